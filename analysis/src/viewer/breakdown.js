"use strict";
// Who held the memory of one GPU over time, as bands below its curve.

// The parts in the order of a point's numbers: what holds them, its name in a table, its color, and how strong that is. What an allocator
// keeps can be used again by that process alone.
const MEMORY_PARTS = [["tensors in allocators", "allocated", "--c0", 0.8], ["allocators' caches", "cached", "--c0", 0.35],
  ["the same processes, outside of their allocators", "outside the allocator", "--c1", 0.8], ["other processes", "other processes", "--c3", 0.8]];
// From below. Where less is in use than a second's points say, an allocator has given memory back: the last ones are cut off.
const FROM_BELOW = [3, 2, 0, 1];

// Bands of points: [seconds, bytes of each part], null where not known, each until the next. null if nothing is known.
function breakdownOf(points) {
  if (!points.some(([, ...parts]) => parts.some((bytes) => bytes !== null))) return null;
  const parts = FROM_BELOW.map((nth) => MEMORY_PARTS[nth]);
  return { sites: parts.map(([holder]) => holder), begins: Float64Array.from(points, ([at]) => at),
    levels: points.map((point) => FROM_BELOW.map((nth) => point[nth + 1] ?? 0)), colors: parts.map(([, , color, alpha]) => [color, alpha]), isAlone: true };
}

// The name of a part beside its color.
function partName([, name, color, alpha]) {
  const mark = swatch(`var(${color})`);
  mark.style.opacity = alpha;
  return element("span", {}, mark, ` ${name}`);
}
