"use strict";
// Draws a chart on its canvas. Each column of pixels shows the least and the most of its time, or with a minute in view or more of the time
// around it, so that no reading is lost at any zoom.

// From how much time in view on a curve is drawn as its highest and its lowest, seconds: steps of less than a second would be a solid block.
// The view has so many parts, and each shows the extremes of itself and two on either side.
const ENVELOPE_FROM = 60, ENVELOPE_PARTS = 240, ENVELOPE_BESIDE = 2;
const HUES = [205, 25, 140, 280, 345, 180, 50, 240, 95, 310];
// The color of the band of an allocation, or of a place that holds memory.
const bandColor = (nth) => `hsl(${HUES[nth % HUES.length]} 55% ${nth < HUES.length ? 55 : 72}%)`;

class Painter {
  constructor(chart) { this.chart = chart; }

  paint() {
    const { chart } = this, ratio = devicePixelRatio || 1, across = chart.place.clientWidth;
    if (!across) return;
    chart.lay();
    chart.width = Math.max(across - AXIS - RIGHT, 10);
    this.color = palette();
    const pen = this.pen = fit([chart.canvas, chart.overlay], across, chart.height, this.color);
    this.axes();
    pen.save();
    pen.beginPath();
    pen.rect(AXIS, 0, chart.width, chart.height);
    pen.clip();
    const step = 1 / ratio, shown = chart.series.filter((one) => one.shown), names = new Map();
    this.findings();
    for (const row of chart.rows) {
      row.series.forEach((one) => this.gaps(one, step));
      const drawn = row.series.filter((one) => chart.isDrawn(one));
      for (const one of drawn) if (this.isEnvelope(one)) this.envelope(one); else this.curve(one, step);
      drawn.forEach((one) => this.marks(one));
      if (row.name !== null) this.caption(row.name, AXIS + 6, row.top + 3, "left", this.color(row.series[0].color));
      row.strips.forEach(({ one, top, tall }) => this.work(one, top, tall));
      this.lanes(row, names);
    }
    chart.phases(names);
    pen.restore();
    this.cursor();
    this.limits(shown);
    chart.overview?.paint();
    // For tests, and for whoever waits for the picture.
    chart.place.dataset.painted = String(Number(chart.place.dataset.painted || 0) + 1);
  }

  // Says which curves have less than a point a pixel.
  limits(shown) {
    const { chart } = this, [from, to] = chart.view, pixel = chart.pixel();
    const bucket = (one) => one.curve.bucketAt((from + to) / 2 - one.shift);
    const thinned = shown.filter((one) => bucket(one) > pixel), isEnvelope = shown.some((one) => this.isEnvelope(one));
    const drawn = (to - from) / ENVELOPE_PARTS * (2 * ENVELOPE_BESIDE + 1);
    const unknown = chart.isHeadroom ? shown.filter((one) => !one.capacity) : [];
    chart.note((unknown.length ? `What is free on ${unknown.map(({ name }) => name).join(", ")} is not known, and not drawn. ` : "") + (isEnvelope ? `Curves are the highest and the lowest of ${duration(drawn)} around each time; a narrower view has each reading. ` : "") + (thinned.length ? `Between the points of ${thinned.length === 1 ? thinned[0].name : "some curves"} only extremes are known: `
      + `the page has the lowest and highest of every ${duration(Math.max(...thinned.map(bucket)))}.` : ""));
  }

  axes() {
    const { chart, pen } = this, { view, width } = chart;
    for (const row of chart.rows) {
      const [first] = row.series.filter((one) => chart.isDrawn(one)), about = chart.areRows ? 2 : 8;
      if (first && chart.isHeadroom) freeAxis(pen, this.color, row.mostFree, chart.areRows ? 3 : 1, width, (free) => row.floor - heightOfFree(free, row.mostFree) * (row.floor - row.top));
      else if (row.floor > row.top) byteAxis(pen, this.color, row.range, about, row.range[1], width, (bytes) => row.floor - (bytes - row.range[0]) / (row.range[1] - row.range[0]) * (row.floor - row.top),
        // The name of the strip stands beside the foot of a row.
        chart.areRows ? row.range[0] + (row.range[1] - row.range[0]) / 8 : -Infinity);
      pen.fillStyle = this.color("--dim");
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      for (const { one, top, tall } of row.strips) pen.fillText(chart.areRows ? "work" : `${one.short ?? one.name} work`, AXIS - 6, top + tall / 2, AXIS - 8);
      let top = row.lanesTop;
      for (const lane of row.lanes) {
        pen.fillText(lane.short, AXIS - 6, top + lane.height / 2 - 1, AXIS - 8);
        top += lane.height;
      }
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    // Clock times need more room, and steps above 10 s are parts or multiples of a minute.
    const span = view[1] - view[0], room = chart.axis.isClock ? 120 : 90, least = span / Math.max(width / room, 3);
    const tick = chart.axis.isClock && least > 10 ? [20, 30, 60, 120, 300, 600, 1200, 1800, 3600].find((every) => every >= least) ?? 7200 : round(least);
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(tick) + 1e-9)));
    for (let at = Math.ceil(view[0] / tick) * tick; at <= view[1]; at += tick) {
      const x = chart.x(at);
      if (x < AXIS + 14 || x > AXIS + width - 14) continue;
      pen.fillText(chart.axis.tick(at, digits), x, chart.ticksTop);
    }
  }

  // Below the plot, a red mark wherever the memory of a shown GPU is not known.
  gaps(one, step) {
    const { chart, pen } = this, least = Math.max(step, 1);
    pen.fillStyle = this.color("--gap");
    let drawn = AXIS;
    for (const { from, to } of one.curve.gaps(chart.view[0] - one.shift, chart.view[1] - one.shift)) {
      const end = chart.x(to + one.shift), left = Math.max(chart.x(from + one.shift), drawn), right = Math.max(end, left + least);
      if (left > AXIS + chart.width) break;
      // Of gaps that are narrower than a pixel, one is drawn.
      if (end < drawn && right - left <= least) continue;
      pen.fillRect(left, one.row.floor + 1, right - left, STRIP - 1);
      drawn = right;
    }
  }

  isEnvelope(one) { return this.chart.view[1] - this.chart.view[0] >= ENVELOPE_FROM && !this.chart.hasBands(one); }

  // The highest and the lowest as lines with a band between them. The parts lie at fixed times, so that nothing shimmers while the view moves.
  envelope(one) {
    const { chart, pen } = this, { curve } = one, long = (chart.view[1] - chart.view[0]) / ENVELOPE_PARTS;
    const first = Math.floor((chart.view[0] - one.shift) / long) - ENVELOPE_BESIDE, parts = [];
    for (let nth = 0; nth < ENVELOPE_PARTS + 2 * ENVELOPE_BESIDE + 2; nth++) {
      // What is out of view counts no more than in the axis that fits the view.
      const from = Math.max((first + nth) * long, chart.view[0] - one.shift), to = Math.min((first + nth + 1) * long, chart.view[1] - one.shift);
      parts.push(to <= from || from > curve.end || to <= curve.begin ? { least: Infinity, most: -Infinity } : curve.extremes(from, to));
    }
    const color = this.color(one.color);
    for (let nth = ENVELOPE_BESIDE; nth < parts.length - ENVELOPE_BESIDE; nth++) {
      // What is not known stays a gap.
      if (parts[nth].most === -Infinity) continue;
      const around = parts.slice(nth - ENVELOPE_BESIDE, nth + ENVELOPE_BESIDE + 1);
      const top = chart.y(one, Math.max(...around.map(({ most }) => most))), bottom = chart.y(one, Math.min(...around.map(({ least }) => least)));
      // Whole pixels, so that parts beside each other have no seam.
      const [left, right] = [nth, nth + 1].map((end) => Math.round(chart.x((first + end) * long + one.shift))), wide = right - left;
      pen.fillStyle = color;
      pen.globalAlpha = 0.18;
      pen.fillRect(left, top, wide, bottom - top);
      pen.globalAlpha = 1;
      pen.fillRect(left, top - 1, wide, 2);
      if (bottom - top > 2) pen.fillRect(left, bottom - 0.5, wide, 1);
    }
  }

  curve(one, step) {
    const { chart, pen } = this, columns = Math.ceil(chart.width / step), { curve } = one;
    const per = (chart.view[1] - chart.view[0]) * step / chart.width, thick = Math.max(1.4, step), { floor } = one.row, isFilled = chart.filled || chart.areRows;
    const color = this.color(one.color), bands = chart.hasBands(one);
    for (let column = 0; column < columns; column++) {
      const from = chart.view[0] + column * per - one.shift;
      if (from > curve.end || from + per <= curve.begin) continue;
      // A recording may end with a reading: the last column has it too.
      const until = from + per >= curve.end ? Infinity : from + per;
      // The value before the column's begin counts too, so that a change at the begin is drawn as a vertical line.
      const { least, most } = curve.extremes(from - per * 1e-6, until);
      if (most === -Infinity) continue;
      const x = AXIS + column * step, top = chart.y(one, most), bottom = chart.y(one, least);
      if (bands) this.bands(one, from, x, top, step, color);
      else if (isFilled) {
        pen.fillStyle = color;
        pen.globalAlpha = 0.1;
        pen.fillRect(x, top, step, floor - top);
        pen.globalAlpha = 1;
      }
      pen.fillStyle = color;
      pen.fillRect(x, top - thick / 2, step, bottom - top + thick);
    }
  }

  // What a GPU did, each share from the bottom of its strip: a kernel ran (light), multiprocessors had work, tensor cores worked
  // (full). A GPU that waits in a collective is busy, and its tensor cores are not.
  work(one, top, tall) {
    const { chart, pen } = this, per = (chart.view[1] - chart.view[0]) / chart.width;
    pen.fillStyle = this.color("--raised");
    pen.fillRect(AXIS, top, chart.width, tall);
    pen.fillStyle = this.color(one.color);
    for (let column = 0; column < chart.width; column++) {
      const from = chart.view[0] + column * per - one.shift, means = one.activity.mean(from, from + per);
      if (!means) continue;
      for (const [share, alpha] of [[means[0], 0.25], [means[1], 0.4], [means[2], 1]]) {
        if (!share) continue;
        pen.globalAlpha = alpha;
        pen.fillRect(AXIS + column, top + tall * (1 - share), 1, tall * share);
      }
    }
    pen.globalAlpha = 1;
  }

  // The allocations of one column. A column in which memory changes shows what is allocated at its begin.
  bands(one, from, x, top, step, color) {
    const { chart, pen } = this, held = one.curve.extremes(from, from).most;
    pen.fillStyle = color;
    pen.globalAlpha = one.holders?.colors ? 0.1 : 0.25;
    pen.fillRect(x, top, step, one.row.floor - top);
    pen.globalAlpha = 0.85;
    for (const { nth, from: low, to } of held === -Infinity ? [] : chart.bands(one, from + one.shift, held)) {
      const [own, alpha] = one.holders?.colors?.[nth] ?? [null, 0.85];
      pen.fillStyle = own ? this.color(own) : bandColor(nth);
      pen.globalAlpha = alpha;
      pen.fillRect(x, chart.y(one, to), step, chart.y(one, low) - chart.y(one, to));
    }
    pen.globalAlpha = 1;
  }

  // The lines of capacity and headroom, and the peak with its value.
  marks(one) {
    const { chart, pen } = this, color = this.color(one.color), [low, high] = one.row.range;
    pen.strokeStyle = color;
    pen.fillStyle = color;
    for (const [bytes, dash, name] of [[one.capacity, [6, 4], "usable"], [one.headroom, [2, 4], "little headroom from"]]) {
      // What is usable is the top of an axis of what is free.
      if (!bytes || (chart.isHeadroom ? name === "usable" : bytes > high || bytes < low)) continue;
      const y = Math.round(chart.y(one, bytes)) + 0.5;
      pen.setLineDash(dash);
      pen.beginPath(); pen.moveTo(AXIS, y); pen.lineTo(AXIS + chart.width, y); pen.stroke();
      pen.setLineDash([]);
      // A narrow chart has no room for both.
      if (one.namesCapacity && !chart.areRows && (name === "usable" || chart.width > 500)) this.caption(`${name} ${gib(bytes)}`, AXIS + chart.width - 6, y + (name === "usable" ? -16 : 2), "right", color);
    }
    if (!one.peak) return;
    const x = chart.x(one.peak[1] + one.shift), y = chart.y(one, one.peak[0]);
    if (x < AXIS || x > AXIS + chart.width) return;
    pen.fillStyle = color;
    pen.beginPath(); pen.arc(x, y, 4, 0, 2 * Math.PI); pen.fill();
    if (!one.namesPeak && !(chart.areRows && chart.rows.length <= FEW_GPU_ROWS)) return;
    // Beside the name of the row, which stands at its left end.
    const left = x > AXIS + chart.width - 190, beside = chart.areRows ? Math.max(x + 8, AXIS + 16 + pen.measureText(one.row.name).width) : x + 8;
    this.caption(`peak ${gib(one.peak[0])}`, left ? x - 8 : beside, y + 6, left ? "right" : "left", this.color("--text"));
  }

  // Text on a ground of its own, so that curves do not cross it.
  caption(text, x, y, align, color) {
    const { pen } = this, wide = pen.measureText(text).width;
    pen.textAlign = align;
    pen.textBaseline = "top";
    pen.fillStyle = this.color("--ground");
    pen.globalAlpha = 0.8;
    pen.fillRect(align === "right" ? x - wide - 2 : x - 2, y, wide + 4, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = color;
    pen.fillText(text, x, y + 2);
  }

  // Above the plot, a bar for as long as each finding held, from a mark at its begin; with rows, also behind those that it concerns.
  findings() {
    const { chart, pen } = this;
    for (const { from, to, color, on } of chart.findings) {
      const left = chart.x(from), right = Math.max(chart.x(to), left + 2);
      if (right < AXIS || left > AXIS + chart.width) continue;
      pen.fillStyle = this.color(color);
      pen.fillRect(left, 5, right - left, 3);
      pen.beginPath();
      pen.moveTo(left - 4, 1); pen.lineTo(left + 4, 1); pen.lineTo(left, 9);
      pen.fill();
      if (!chart.areRows || !on?.length) continue;
      pen.globalAlpha = 0.12;
      for (const row of chart.rows) if (row.series.some(({ key }) => on.includes(key))) pen.fillRect(left, row.top, right - left, row.floor - row.top);
      pen.globalAlpha = 1;
    }
  }

  lanes(row, names) {
    let top = row.lanesTop;
    for (const lane of row.lanes) {
      this.lane(lane, top, names);
      top += lane.height;
    }
  }

  // Adds the phases that are in view to `names`, each with its tone.
  lane(lane, top, names) {
    const { chart, pen } = this, drawn = lane.levels.map(() => -Infinity);
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    for (const span of lane.within(chart.view)) {
      const of = lane.of[span], level = lane.level[span];
      if (of.kind === "phase") names.set(of.name, of.tone);
      const left = chart.x(lane.begin[span] + lane.shift), right = chart.x(lane.end[span] + lane.shift);
      // Of spans that are narrower than a pixel, one is drawn.
      if (right < drawn[level] + 0.5) continue;
      const x = Math.max(left, drawn[level], AXIS), wide = Math.max(right - x, 0.7);
      drawn[level] = x + wide;
      const y = top + lane.levels[level].top, tall = lane.levels[level].height - 2;
      if (of.kind === "step") pen.fillStyle = this.color(lane.step[span] % 2 ? "--band-a" : "--band-b");
      else pen.fillStyle = this.color(`--p${of.tone}`);
      pen.fillRect(x, y, wide > 3 ? wide - 0.7 : wide, tall);
      // An edge where the rank ended first.
      if (lane.open?.[span] === CUT) { pen.fillStyle = this.color("--text"); pen.fillRect(Math.max(x + wide - 2, x), y, Math.min(wide, 2), tall); }
      if (wide > 26 && tall > 10) {
        pen.fillStyle = this.color("--text");
        pen.save(); pen.beginPath(); pen.rect(x, y, wide - 4, tall); pen.clip();
        pen.fillText(lane.label(span), x + 4, y + tall / 2 + 0.5);
        pen.restore();
      }
    }
  }

  cursor() {
    const { chart } = this;
    if (!chart.width || !this.color) return;
    const pen = cleared(chart.overlay), { height } = chart;
    const at = chart.pointer ?? (chart.cursor === null ? null : chart.x(chart.cursor));
    if (chart.selection) {
      pen.fillStyle = this.color("--cursor");
      pen.globalAlpha = 0.12;
      const [one, other] = [...chart.selection].sort((a, b) => a - b);
      pen.fillRect(one, 0, other - one, height);
      pen.globalAlpha = 1;
    }
    for (const x of chart.pins.map((seconds) => chart.x(seconds)).filter((x) => x >= AXIS && x <= AXIS + chart.width)) {
      pen.strokeStyle = pen.fillStyle = this.color("--note");
      pen.setLineDash([4, 3]);
      pen.beginPath(); pen.moveTo(Math.round(x) + 0.5, 0); pen.lineTo(Math.round(x) + 0.5, height); pen.stroke();
      pen.setLineDash([]);
      pen.beginPath(); pen.arc(x, 5, 4, 0, 2 * Math.PI); pen.fill();
    }
    if (at === null || at < AXIS || at > AXIS + chart.width) return;
    pen.strokeStyle = this.color("--cursor");
    pen.beginPath(); pen.moveTo(Math.round(at) + 0.5, 0); pen.lineTo(Math.round(at) + 0.5, height); pen.stroke();
  }
}
