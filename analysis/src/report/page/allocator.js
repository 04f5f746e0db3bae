"use strict";
// What a framework's own allocator did on a GPU: who held memory, in which stacks, how it lay in segments, and two snapshots beside each other.

// A place in a program whose frames a click or Enter unfolds, the innermost first.
function foldedStack(site, frames, more = 0) {
  const name = site ?? "a place that is not known: no stack was recorded";
  if (!frames.length) return name;
  return element("details", { class: "stack" }, element("summary", { title: name }, shortFrame(name), frames.length > 1 ? element("span", { class: "kind" }, ` and ${(frames.length - 1 + more).toLocaleString("en")} more frame${frames.length + more === 2 ? "" : "s"}`) : null),
    element("ol", {}, ...frames.map((frame) => element("li", { class: isOwn(frame) ? "own" : null }, frame)), more ? element("li", {}, `and ${more.toLocaleString("en")} more`) : null));
}

// The stacks of a place, the largest first: unfolded where it is one.
function stacksAt({ held, frames }, site) {
  const found = held.filter((one) => one.site === site).slice(0, MOST_STACKS_SHOWN);
  return found.map((one) => {
    const made = foldedStack(`${gib(one.bytes)} in ${one.allocations.toLocaleString("en")}: ${site}`, one.frames.map((nth) => frames[nth]));
    if (found.length === 1 && typeof made !== "string") made.open = true;
    return element("div", {}, made);
  });
}
const MOST_STACKS_SHOWN = 8;

// All that is known of the allocator of one GPU. `key` is the series of the chart with its bands.
function allocatorTables({ index, allocator }, of, key, chart) {
  const { peak, holders, failures } = allocator, less = (whole, part) => whole === null || part === null ? null : whole - part;
  const unused = less(peak.reserved_bytes, peak.allocated_bytes), made = [], whose = `GPU ${index}${of}`;
  const rows = holders.map(([site, bytes, allocations]) => [site, gib(bytes), allocations === null ? "not known" : allocations.toLocaleString("en")]);
  if (allocator.other_holders_bytes) rows.push(["others", gib(allocator.other_holders_bytes), ""]);
  made.push(element("h2", {}, `Who held memory at the peak on ${whose}`),
    element("p", {}, `At its peak, the allocator had given ${gib(peak.allocated_bytes)}${peak.reserved_bytes === null ? "" : ` of ${gib(peak.reserved_bytes)} that it had reserved`}`
      + `${unused !== null && unused >= 0 ? `; ${gib(unused)} were not in use` : ""}.${allocator.reserved_bytes === null ? "" : ` At the end it had reserved ${gib(allocator.reserved_bytes)}: ${gib(less(allocator.reserved_bytes, allocator.in_use_bytes))} `
      + `not in use, ${gib(less(allocator.in_use_bytes, allocator.requested_bytes))} lost to rounding.`}`),
    table(`Memory at the peak by ${allocator.by}, ${whose}`, [allocator.by, "held", "allocations"], rows, 1));
  if (allocator.stacks.held.some(({ frames }) => frames.length)) {
    const flame = flameGraph(allocator.stacks, `memory at the peak by stack, ${whose}`);
    chart.stacks.set(key, flame);
    made.push(element("h3", {}, `By stack${of}`), flame.place);
  }
  for (const [when, blocks] of [["at the peak", allocator.blocks_at_peak], ["at the end", allocator.has_history ? allocator.blocks_at_end : []]]) {
    if (blocks.length) made.push(element("h3", {}, `Largest blocks ${when}${of}`), table(`The largest blocks ${when} on ${whose}, with their stacks`, ["allocated by", "size", "entry of the history"],
      blocks.map(({ bytes, entry, place: { site, frames, more_frames: more } }) => [foldedStack(site, frames, more), gib(bytes), entry === null ? "before it" : entry.toLocaleString("en")]), 1));
  }
  made.push(...segmentTables(allocator, whose));
  const { sites, moments } = allocator.bands;
  const name = (site, nth) => {
    const flame = chart.stacks.get(key), isHeld = allocator.stacks.held.some((one) => one.site === site && one.frames.length);
    const shown = flame && isHeld ? element("button", { onclick: () => flame.choose(site), "aria-label": `Show the stacks of ${site}` }, site) : site;
    return element("span", {}, swatch(bandColor(nth)), " ", shown);
  };
  if (sites.length) made.push(element("h2", {}, `Who held memory over time on ${whose}`),
    element("p", {}, `The bands in the chart, from below${chart.stacks.has(key) ? ", of which a click shows the stacks at the peak" : ""}; all others are above them. There are ${moments.length.toLocaleString("en")} stretches of time, and each shows its highest moment.`),
    table(`Memory over time by ${allocator.by}, ${whose}`, [allocator.by, "most"], sites.map(({ site, highest_bytes: most }, nth) => [name(site, nth), gib(most)]), 1));
  if (failures.length) made.push(element("h2", {}, `No memory on ${whose}`), table(`Allocations that failed on ${whose}`,
    ["asked for by", "why", "after", "asked for", "allocated", "reserved", "free on the GPU"], failures.map((one) => [foldedStack(one.site, one.frames), one.why, duration(seconds(one.after_ns)),
      gib(one.requested_bytes), gib(one.allocated_bytes), gib(one.reserved_bytes), gib(one.device_free_bytes)]), 2));
  return made;
}

// How memory lay in segments, at each time at which that is known. The bar is what is reserved: in blocks, in pieces, idle.
function segmentTables(allocator, whose) {
  const times = [["at the peak", allocator.has_history ? allocator.layout_at_peak : null], ...allocator.failures.map((one) => [`no memory, entry ${one.entry.toLocaleString("en")}`, one.layout]), ["at the end", allocator.layout_at_end]]
    .filter(([, layout]) => layout);
  if (!times.length) return [];
  const bar = (layout) => {
    const part = (name, bytes) => {
      const one = element("span", { class: name });
      one.style.width = `${bytes / Math.max(1, layout.reserved_bytes) * 100}%`;
      return one;
    };
    return element("span", { class: "reserved", "aria-hidden": "true" }, part("blocks", layout.in_blocks_bytes), part("pieces", layout.free_bytes), part("idle", layout.idle_bytes));
  };
  const row = (name, layout) => [name, bar(layout), layout.segments.toLocaleString("en"), gib(layout.reserved_bytes), gib(layout.in_blocks_bytes), gib(layout.free_bytes), layout.pieces.toLocaleString("en"),
    layout.largest_piece_bytes === null ? "none" : gib(layout.largest_piece_bytes), layout.idle_segments ? `${gib(layout.idle_bytes)} in ${layout.idle_segments.toLocaleString("en")}` : "none"];
  const rows = times.flatMap(([when, layout]) => [row(when, layout), ...layout.pools.length > 1 ? layout.pools.map((pool) => row(`\u2003${pool.name}`, pool)) : []]);
  return [element("h2", {}, `Segments on ${whose}`),
    element("p", {}, "What the allocator has from the driver lies in segments: in blocks that the program has, in free pieces between them, and in idle segments without a block, which torch.cuda.empty_cache() would return."),
    table(`How memory lay in segments on ${whose}: blocks, free pieces, idle segments`, ["when", "parts", "segments", "reserved", "in blocks", "free in pieces", "pieces", "largest piece", "idle segments"], rows, 2)];
}

// Memory snapshots beside the first: the stacks whose memory differs.
function byPlace(compared) {
  const sign = (bytes) => bytes === null ? "not known" : `${bytes < 0 ? "−" : "+"}${gib(Math.abs(bytes))}`, count = (blocks) => blocks === null ? "not known" : blocks.toLocaleString("en");
  return compared.filter(({ places }) => places.length).flatMap((of) => {
    const when = of.at === "end" ? "at the end" : "at the peak";
    const rows = of.places.map((one) => [foldedStack(one.site, one.frames, one.more_frames), `${one.change}${one.other_lines ? ", other lines" : ""}`, gib(one.first_bytes), count(one.first_blocks), gib(one.bytes), count(one.blocks), sign(one.increase_bytes)]);
    if (of.others) rows.push([`${of.others.toLocaleString("en")} further stacks`, "", "", "", "", "", sign(of.others_increase_bytes)]);
    return [element("h2", {}, `What grew ${when} on GPU ${of.gpu}: ${of.name} beside ${of.first}`),
      table(`Memory ${when} by call stack: ${of.first}, then ${of.name}`, ["place", "change", "before", "blocks", "after", "blocks", "more"], rows, 2)];
  });
}
