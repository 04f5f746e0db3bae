"use strict";
// Who held the memory of one GPU over time, as bands below its curve.

// The parts in the order of a point's numbers: what holds them, its name in a table, its color, and how strong that is. What an allocator
// keeps can be used again by that process alone.
const MEMORY_PARTS = [["tensors in allocators", "allocated", "--c0", 0.8], ["allocators' caches", "cached", "--c0", 0.35],
  ["the same processes, outside of their allocators", "outside the allocator", "--c1", 0.8], ["processes whose allocators are not known", "processes with an unknown allocator", "--c2", 0.8],
  ["other processes", "other processes", "--c3", 0.8]];
// From below. Where less is in use than a second's points say, an allocator has given memory back: the last ones are cut off.
const FROM_BELOW = [4, 3, 2, 0, 1];

// Bands of points: [seconds, bytes of each part], null where not known, each until the next. null if nothing is known.
function breakdownOf(points) {
  if (!points.some(([, ...parts]) => parts.some((bytes) => bytes !== null))) return null;
  const parts = FROM_BELOW.map((nth) => MEMORY_PARTS[nth]);
  return { sites: parts.map(([holder]) => holder), begins: Float64Array.from(points, ([at]) => at),
    levels: points.map((point) => FROM_BELOW.map((nth) => point[nth + 1] ?? 0)), colors: parts.map(([, , color, alpha]) => [color, alpha]), isAlone: true, points };
}

// A name beside the color of its part.
function colored(name, color, alpha) {
  const mark = swatch(`var(${color})`);
  mark.style.opacity = alpha;
  return element("span", {}, mark, ` ${name}`);
}

const partName = ([, name, color, alpha]) => colored(name, color, alpha);

// Parts side by side: { title, color, alpha, share }. A screen reader has the table beside it.
function partsBar(parts) {
  return element("div", { class: "holders", "aria-hidden": "true" }, ...parts.map(({ title, color, alpha, share }) => {
    const one = element("div", { title });
    Object.assign(one.style, { flexGrow: String(share), background: `var(${color})`, opacity: String(alpha) });
    return one;
  }));
}

// The point in which the most was held within an interval; null if nothing is known of it.
function fullest(points, from, to) {
  const held = ([, ...parts]) => parts.reduce((sum, bytes) => sum + (bytes ?? 0), 0);
  const inside = points.filter(([at], nth) => at <= to && (points[nth + 1]?.[0] ?? Infinity) > from && held(points[nth]) > 0);
  return inside.length ? inside.reduce((most, one) => held(one) > held(most) ? one : most) : null;
}

// How long before a failed allocation its page begins, seconds, and how long before it what held the memory is looked for: the process may be
// gone before the second is over.
const BEFORE_FAILURE = 5, HELD_BEFORE = 2;

// Who held the memory of a GPU when an allocation failed, as a bar and a table; nothing where it is not known.
function heldAtFailure(points, at, usable) {
  const point = fullest(points, at - HELD_BEFORE, at);
  if (!point) return [];
  const parts = MEMORY_PARTS.map((part, nth) => ({ part, bytes: point[nth + 1] })), known = parts.reduce((sum, { bytes }) => sum + (bytes ?? 0), 0);
  const all = Math.max(usable ?? 0, known), segment = (name, color, alpha, bytes) => ({ title: `${name}: ${gib(bytes)}`, color, alpha, share: bytes / all });
  const bar = partsBar([...FROM_BELOW.map((nth) => parts[nth]).filter(({ bytes }) => bytes > 0).map(({ part: [, name, color, alpha], bytes }) => segment(name, color, alpha, bytes)),
    segment("neither", "--line", 0.45, all - known)]);
  const share = (bytes) => usable && bytes !== null ? `${(bytes / usable * 100).toFixed(1)} %` : "not known";
  const rows = [...parts.map(({ part, bytes }) => [partName(part), gib(bytes), share(bytes)]),
    ...usable ? [["free, or not attributed", gib(all - known), share(all - known)]] : []];
  return [bar, table("Who held the memory when the allocation failed: the fullest of the last two seconds", ["memory", "bytes", "of what is usable"], rows)];
}
