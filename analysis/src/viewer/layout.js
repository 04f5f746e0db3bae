"use strict";
// Where the parts of a chart lie, and how bytes become pixels: one plot with all curves, or a row for each GPU with its ranks.

const AXIS = 84, TOP = 14, HEIGHT = 340, TICKS = 24, STRIP = 5, RIGHT = 12;
// The plot of a row, its strip, and the room below it; the first and the last are less where there are more rows than a few.
const ROW = 64, ROW_STRIP = 12, ROW_GAP = 10, FEW_GPU_ROWS = 4, LOW_ROW = 40, LOW_GAP = 5;
// With headroom as the axis, less than this is drawn as this, bytes: an axis of logarithms has no 0.
const LEAST_FREE = 2 ** 24;

// The rows from the top, in pixels: { series, lanes, name, top, floor, strips: [{ one, top, tall }], lanesTop, bottom }. A lane is in the
// row of the first GPU that is drawn of those that its rank is on; all others are in a row without a plot, at the end.
function rowsOf({ series, lanes, areRows, worst }) {
  const shown = series.filter((one) => one.shown);
  const placed = (row, top, tall, [strip, above]) => {
    const floor = top + tall, strips = row.series.filter(({ activity }) => activity?.isKnown).map((one, nth) => ({ one, top: floor + STRIP + above + nth * strip, tall: strip - 4 }));
    const lanesTop = floor + STRIP + above + strips.length * strip;
    return { ...row, top, floor, strips, lanesTop, bottom: lanesTop + row.lanes.reduce((sum, lane) => sum + lane.height, 0) };
  };
  if (!areRows) {
    const works = shown.filter(({ activity }) => activity?.isKnown).length;
    return [placed({ series: shown, lanes, name: null }, TOP, series.length ? HEIGHT : 0, [works > 2 ? 16 : 28, TICKS])];
  }
  const of = new Map(shown.map((one) => [one.key, []])), others = [];
  for (const lane of lanes) (of.get(lane.gpus?.find((key) => of.has(key))) ?? others).push(lane);
  // Once for each series: the live page looks through its incidents for an answer, and lays out several times a second.
  const places = new Map(shown.map((one) => [one, worst(one)]));
  const rows = [...shown].sort((one, other) => places.get(one) - places.get(other)).map((one) => ({ series: [one], lanes: of.get(one.key), name: one.short ?? one.name }));
  if (others.length) rows.push({ series: [], lanes: others, name: null });
  let top = TOP + TICKS;
  const [tall, gap] = rows.length > FEW_GPU_ROWS ? [LOW_ROW, LOW_GAP] : [ROW, ROW_GAP];
  return rows.map((row) => {
    const made = placed(row, top, row.series.length ? tall : 0, [ROW_STRIP + 4, 0]);
    top = made.bottom + gap;
    return made;
  });
}

// Of a row the bytes from the bottom of its plot to the top. `all`: the series that share an axis; `view`: what is fitted, null if the
// axis begins at 0.
function rangeOf(all, view) {
  if (!view) {
    // The capacity line is worth its room unless it flattens the curve.
    const most = all.reduce((sum, { peak, capacity }) => Math.max(sum, capacity && (peak?.[0] ?? 0) > capacity / 8 ? capacity : peak?.[0] ?? 0), 0);
    return [0, Math.max(most * 1.06, 1048576)];
  }
  let least = Infinity, most = 0;
  for (const one of all) {
    const found = one.curve.extremes(view[0] - one.shift, view[1] - one.shift);
    if (found.most === -Infinity) continue;
    least = Math.min(least, found.least);
    most = Math.max(most, found.most);
  }
  if (least === Infinity) least = 0;
  const margin = Math.max((most - least) * 0.06, 1048576);
  return [Math.max(0, least - margin), most + margin];
}

// How far some free bytes are from the bottom of an axis of headroom, 0 to 1. The less is free, the higher: like a curve of memory in use.
function heightOfFree(free, most) {
  return 1 - Math.log(Math.min(Math.max(free, LEAST_FREE), most) / LEAST_FREE) / Math.log(Math.max(most, 2 * LEAST_FREE) / LEAST_FREE);
}
