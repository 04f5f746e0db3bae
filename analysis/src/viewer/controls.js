"use strict";
// What surrounds a chart: buttons with their keys, the line that is read out, the legend, and the chart's data as a
// table.

const HELP = "Keys work while the chart or its buttons have the focus. Arrow keys move the cursor, with Shift the view. Plus and minus zoom, 0 shows all, p jumps to the peak, n to the " +
  "next finding, m pins the cursor: the second pin says what changed between the two, s or a click on a lane compares the step there with the others, r gives each GPU a row, the worst first, h shows what is free, f fits the memory axis. Drag over the chart to zoom in, double-click to show all; Ctrl or Shift with the wheel zooms.";
// Curves that are all in the legend.
const MOST_LISTED = 16;
// Rows of the chart's tables.
const MOST_ROWS = 100;
// How often the tables are made anew while the view moves, milliseconds.
const TABLES_MS = 1000;
// Names in the legend of phases.
const MOST_PHASES = 24;

// What stands on buttons whose names would take too much room.
const SIGNS = new Map([["+", "+"], ["-", "−"], ["[", "◂"], ["]", "▸"]]);

// A chart with its controls. `options` are those of Chart; `more` are further actions: [key, name, function]; `without`: keys of those
// that could do nothing here.
function chartRegion(options, more = [], help = "", without = []) {
  const place = element("div", { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart",
    "aria-label": "Memory in use over time", "aria-describedby": "help" });
  const readout = element("p", { class: "readout", role: "status" }), note = element("p", { class: "note" });
  const strip = element("div", { class: "plot strip", "aria-hidden": "true" }), tools = element("div", { class: "tools" }), legend = element("ul", { class: "legend" }), tables = element("div");
  const phases = element("ul", { class: "legend phases", "aria-label": "Colours of phases" });
  const step = element("div"), close = () => step.replaceChildren();
  let isListed = false, listing = null;
  // The tables follow the view, once a second: a screen reader could not read what changes with each frame.
  const fillTables = () => {
    if (!isListed || listing !== null) return;
    listing = setTimeout(() => { listing = null; if (isListed && !chart.ended) tables.replaceChildren(...chartTables(chart)); }, TABLES_MS);
  };
  const region = element("div", { class: "chart" }, tools, strip, place, readout, note, step, legend, phases, tables,
    element("p", { class: "unseen", id: "help" }, HELP + help));
  const chart = new Chart(place, { ...options,
    say: (text) => { readout.textContent = text; },
    phases: (names) => { drawPhases(phases, names); fillTables(); },
    inspect: (lane, seconds) => {
      const ranks = options.ranks?.() ?? chart.lanes, chosen = ranks.find(({ key }) => key === lane.key), found = chosen ? stepOn(ranks, chosen, seconds) : null;
      if (!found) { chart.say("There is no step that has ended."); close(); return; }
      // A finding's text begins with its kind.
      const reported = chart.findings.filter(({ from, to }) => from <= found.to && found.from <= to).map(({ text }) => text.split(/[,:]/)[0]);
      step.replaceChildren(stepPart(found, reported, () => { close(); place.focus({ preventScroll: true }); }));
      chart.say(`${stepName(found)} is beside the others, below the chart.`);
    },
    // Setting the same text again would make a screen reader repeat it.
    note: (text) => { if (note.textContent !== text) note.textContent = text; } });
  readout.textContent = "";
  chart.overview = new Overview(strip, chart);
  // A button that stays pressed.
  const toggle = (key, isOn) => buttons.get(key)?.setAttribute("aria-pressed", String(isOn));
  const actions = [
    ["p", "Peak", () => chart.peak()],
    ["n", "Next finding", () => nextFinding(chart)],
    ["m", "Pin", () => chart.pin()],
    ["s", "Step", () => inspectStep(chart)],
    ["+", "Zoom in", () => chart.zoom(1 / 1.6)],
    ["-", "Zoom out", () => chart.zoom(1.6)],
    ["0", "Whole", () => chart.whole()],
    ["[", "Left", () => chart.pan(-0.3)],
    ["]", "Right", () => chart.pan(0.3)],
    ["r", "Rows", () => {
      chart.areRows = chart.wantsRows = !chart.wantsRows;
      toggle("r", chart.wantsRows);
      chart.draw();
      chart.moved(chart.view);
      chart.say(chart.wantsRows ? "Each GPU has a row with its ranks, the worst first." : "All GPUs share a plot.");
    }],
    ["h", "Headroom", () => {
      if (!chart.isHeadroom && !chart.series.some(({ capacity }) => capacity)) { chart.say("How much memory is usable is not known, so what is free is not either."); return; }
      chart.isHeadroom = !chart.isHeadroom;
      toggle("h", chart.isHeadroom);
      chart.draw();
      chart.say(chart.isHeadroom ? "The memory axis shows what is free, in powers of four: the less, the higher." : "The memory axis shows what is in use.");
    }],
    ["f", "Fit memory axis", () => {
      // What is free has an axis of its own.
      chart.isHeadroom = false;
      toggle("h", false);
      chart.fit = !chart.fit;
      toggle("f", chart.fit);
      chart.draw();
      chart.say(chart.fit ? "The memory axis fits what is shown." : "The memory axis begins at 0.");
    }],
    ["t", "Table", () => {
      isListed = !isListed;
      toggle("t", isListed);
      tables.replaceChildren(...isListed ? chartTables(chart) : []);
    }],
    ...more.map(([key, name, act]) => [key, name, () => act(chart)]),
  ].filter(([key]) => !without.includes(key));
  const buttons = new Map(actions.map(([key, name, act]) => {
    const attributes = { onclick: act, "aria-keyshortcuts": key === " " ? "Space" : key };
    return [key, SIGNS.has(key) ? element("button", { ...attributes, "aria-label": name, title: `${name}: key ${key}` }, SIGNS.get(key))
      : element("button", attributes, `${name} `, element("kbd", { "aria-hidden": "true" }, key === " " ? "space" : key))];
  }));
  tools.append(...buttons.values());
  for (const key of ["r", "h", "f", "t"]) toggle(key, key === "r" && chart.areRows);
  listenToKeys(region, chart, actions);
  drawLegend(legend, chart);
  return { region, chart, legend, buttons };
}

function nextFinding(chart) {
  if (!chart.findings.length) { chart.say("There are no findings."); return; }
  chart.finding = ((chart.finding ?? -1) + 1) % chart.findings.length;
  const found = chart.findings[chart.finding];
  chart.point(found.from);
  chart.say(found.text);
}

// The step at the cursor, of the first rank that is in one.
function inspectStep(chart) {
  const seconds = chart.center(), lane = chart.lanes.find((one) => one.at(seconds).some((span) => one.of[span].kind === "step" && !one.open?.[span]));
  if (!lane) { chart.say("No rank in the chart is in a step at the cursor that ended by itself."); return; }
  chart.cursor = seconds;
  chart.painter.cursor();
  chart.inspect(lane, seconds);
}

function listenToKeys(region, chart, actions) {
  // Not on the whole document: speech input and find-as-you-type must not trigger these keys.
  region.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    const key = event.key === "=" ? "+" : event.key;
    // The space bar presses a button that has the focus.
    const action = key === " " && event.target !== chart.place ? null : actions.find(([known]) => known === key);
    if (action) { event.preventDefault(); action[2](); }
  });
  chart.place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      if (event.shiftKey) chart.pan(by * 0.2); else chart.point(chart.center() + by * 4 * chart.pixel());
    } else if (event.key === "Home" || event.key === "End") {
      event.preventDefault();
      chart.point(chart.bounds[event.key === "Home" ? 0 : 1]);
    }
  });
}

function drawLegend(legend, chart) {
  const item = (one) => {
    const box = element("input", { type: "checkbox", onchange: () => { one.shown = box.checked; chart.draw(); chart.moved(chart.view); } });
    box.checked = one.shown;
    one.value = element("span", { class: "value" });
    return element("li", {}, element("label", {}, box, swatch(`var(${one.color})`), one.name, " ", one.value));
  };
  // Of very many, those that are not drawn are behind a heading.
  const isLong = chart.series.length > MOST_LISTED, unseen = isLong ? chart.series.filter((one) => !one.shown) : [];
  const more = unseen.length ? [element("li", {}, element("details", {}, element("summary", {}, `${unseen.length} that are not drawn`), element("ul", { class: "legend" }, ...unseen.map(item))))] : [];
  legend.replaceChildren(...chart.series.filter((one) => !isLong || one.shown).map(item), ...more);
}

// The phases in view with their colours, in the order of their names.
function drawPhases(legend, names) {
  const all = [...names].sort(([one], [other]) => one < other ? -1 : 1).slice(0, MOST_PHASES), text = JSON.stringify(all);
  if (legend.dataset.names === text) return;
  legend.dataset.names = text;
  const left = names.size - all.length;
  legend.replaceChildren(...all.map(([name, tone]) => element("li", {}, swatch(`var(--p${tone})`), name)),
    ...left > 0 ? [element("li", {}, `and ${left} more`)] : []);
}

// What the chart shows as tables: memory in equal parts of the view, and the steps and phases in it.
function chartTables(chart) {
  const [from, to] = chart.view, shown = chart.series.filter((one) => one.shown), parts = [];
  const count = Math.min(MOST_ROWS, Math.max(1, Math.floor((to - from) / 1e-3)));
  for (let i = 0; i < count; i++) {
    const begin = from + (to - from) * i / count, end = from + (to - from) * (i + 1) / count;
    parts.push([chart.axis.moment(begin), ...shown.flatMap((one) => {
      const { least, most } = one.curve.extremes(begin - one.shift, end - one.shift);
      return most === -Infinity ? ["not known", "not known"] : [gib(least), gib(most)];
    })]);
  }
  const spans = chart.lanes.flatMap((lane) => [...lane.within(chart.view)].map((span) => ({ lane, span })));
  spans.sort((a, b) => a.lane.begin[a.span] + a.lane.shift - b.lane.begin[b.span] - b.lane.shift);
  const rows = spans.slice(0, MOST_ROWS).map(({ lane, span }) => [lane.label(span), lane.name,
    chart.axis.moment(lane.begin[span] + lane.shift), duration(lane.end[span] - lane.begin[span]) + LENGTHS[lane.open?.[span] ?? 0], gib(lane.peak[span])]);
  const part = duration((to - from) / count), left = spans.length - rows.length;
  return [
    table(`Memory, lowest and highest in every ${part}${chart.axis.day ? `, on ${chart.axis.day(from)}` : ""}`, ["from", ...shown.flatMap((one) => [`${one.name} lowest`, "highest"])], parts),
    table(`Steps and phases in view${left > 0 ? `: the first ${MOST_ROWS} of ${spans.length}` : ""}`, ["name", "rank", "began at", "duration", "peak"], rows, 2),
  ].filter((made) => made !== null);
}
