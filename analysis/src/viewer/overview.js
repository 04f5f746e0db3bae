"use strict";
// All of a chart's time as a strip above it: the highest of the curves that are shown, or the phases where there are none, what was found,
// and the part that is in view. A drag over it chooses another part, and a drag of the part moves it. The keyboard has zoom and pan for
// that.

const OVERVIEW = 34;
// Lanes whose phases are drawn where there is no memory.
const MOST_OVERVIEW_LANES = 4;
// While time goes on, the strip is drawn anew each second. A drag of fewer pixels is a click.
const OVERVIEW_MS = 1000, LEAST_DRAG = 4;

class Overview {
  constructor(place, chart) {
    Object.assign(this, { place, chart, drawn: null });
    this.canvas = place.appendChild(document.createElement("canvas"));
    this.overlay = place.appendChild(document.createElement("canvas"));
    this.overlay.className = "overlay";
    this.listen();
  }

  x(seconds) { const [first, last] = this.chart.bounds; return AXIS + (seconds - first) / (last - first) * this.chart.width; }
  time(x) { const [first, last] = this.chart.bounds; return first + Math.min(Math.max((x - AXIS) / this.chart.width, 0), 1) * (last - first); }

  listen() {
    let from = null, moves = null, isDrag = false;
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      [from, isDrag] = [at(event), false];
      const [begin, end] = this.chart.view.map((seconds) => this.x(seconds));
      // A part that is all there is cannot be moved.
      moves = from > begin && from < end && end - begin < this.chart.width - 1 ? this.time(from) - this.chart.view[0] : null;
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const isNear = Math.abs(at(event) - from) < LEAST_DRAG;
      if (isNear && !isDrag) return;
      isDrag = true;
      const width = this.chart.view[1] - this.chart.view[0];
      if (moves !== null) { const begin = this.time(at(event)) - moves; this.chart.show(begin, begin + width); return; }
      // Brought back to where it began, it chooses nothing.
      this.selection = isNear ? null : [from, at(event)];
      this.window();
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const { selection } = this;
      this.selection = null;
      if (selection) this.chart.show(...selection.map((x) => this.time(x)).sort((a, b) => a - b));
      else if (from !== null && !isDrag) {
        const half = (this.chart.view[1] - this.chart.view[0]) / 2, middle = this.time(at(event));
        this.chart.show(middle - half, middle + half);
      }
      else this.window();
      from = null;
    });
    this.canvas.addEventListener("pointercancel", () => { from = null; this.selection = null; this.window(); });
    this.canvas.addEventListener("dblclick", () => this.chart.whole());
  }

  // Draws it, if what it shows is another or a second has passed.
  paint() {
    const { chart } = this, shown = chart.series.filter((one) => one.shown), across = this.place.clientWidth, color = chart.painter.color;
    if (!across) return;
    // A curve begins earlier, or has more parts, once its past has arrived.
    const curves = shown.map(({ name, curve }) => `${name} ${curve.begin} ${curve.parts}`), now = performance.now();
    const state = `${across} ${devicePixelRatio} ${color("--ground")} ${curves} ${chart.findings.length} ${chart.bounds[0]}`;
    if (this.drawn?.state !== state || (this.drawn.last !== chart.bounds[1] && now - this.drawn.at > OVERVIEW_MS)) {
      this.drawn = { state, at: now, last: chart.bounds[1] };
      this.strip(shown, across, color);
    }
    this.window();
  }

  strip(shown, across, color) {
    const { chart } = this, pen = fit([this.canvas, this.overlay], across, OVERVIEW, color), [first, last] = chart.bounds, per = (last - first) / chart.width;
    const most = rangeOf(shown, null)[1];
    pen.fillStyle = color("--band-a");
    for (let column = 0; column < chart.width; column++) {
      const from = first + column * per;
      let highest = -Infinity;
      for (const { curve, shift } of shown) {
        // Not begun yet, or ended before.
        if (from + per - shift <= curve.begin || from - shift > curve.end) continue;
        highest = Math.max(highest, curve.extremes(from - shift, from + per - shift).most);
      }
      if (highest === -Infinity) continue;
      const tall = Math.max(highest / most * (OVERVIEW - 6), 1);
      pen.fillRect(AXIS + column, OVERVIEW - tall, 1, tall);
    }
    if (!chart.series.length) this.phases(pen, color);
    for (const { from, to, color: own } of chart.findings) {
      pen.fillStyle = color(own);
      const left = Math.max(this.x(from), AXIS), right = Math.min(Math.max(this.x(to), left + 2), AXIS + chart.width);
      if (right > left) pen.fillRect(left, 0, right - left, 4);
    }
    pen.fillStyle = color("--dim");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText((chart.axis.length ?? duration)(last - first).replace(/(\d)\.\d+ s$/, "$1 s"), AXIS - 6, OVERVIEW / 2, AXIS - 8);
  }

  phases(pen, color) {
    const lanes = this.chart.lanes.slice(0, MOST_OVERVIEW_LANES), tall = (OVERVIEW - 6) / Math.max(lanes.length, 1);
    lanes.forEach((lane, nth) => {
      let drawn = -Infinity;
      for (const span of lane.within(this.chart.bounds)) {
        if (lane.of[span].kind !== "phase") continue;
        const left = Math.max(this.x(lane.begin[span] + lane.shift), drawn), right = this.x(lane.end[span] + lane.shift);
        // Of those that are narrower than half a pixel, one is drawn.
        if (right < drawn + 0.5) continue;
        pen.fillStyle = color(`--p${lane.of[span].tone}`);
        pen.fillRect(left, 5 + nth * tall, Math.max(right - left, 0.5), tall - 1);
        drawn = right;
      }
    });
  }

  // The part that is in view, or that a drag chooses.
  window() {
    const { chart } = this, pen = cleared(this.overlay), color = chart.painter.color;
    const [left, right] = this.selection ? [...this.selection].sort((a, b) => a - b) : chart.view.map((seconds) => Math.min(Math.max(this.x(seconds), AXIS), AXIS + chart.width));
    pen.fillStyle = color("--link");
    pen.globalAlpha = 0.2;
    pen.fillRect(left, 0, Math.max(right - left, 2), OVERVIEW);
    pen.globalAlpha = 1;
    for (const x of [left, Math.max(right, left + 2)]) pen.fillRect(Math.round(x) - 1, 0, 2, OVERVIEW);
  }
}
