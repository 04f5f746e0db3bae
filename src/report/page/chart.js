"use strict";
// Memory over time, with lanes of steps and phases below. Each column of pixels shows the least and the most of its
// time, so that no reading is lost at any zoom.

const AXIS = 84, TOP = 14, HEIGHT = 340, TICKS = 24, STRIP = 5, LANE = 17, LAYER = 12, RIGHT = 12;
const MOST_SPOKEN = 4, MOST_TIP = 16, MOST_FOUND = 3;
const HUES = [205, 25, 140, 280, 345, 180, 50, 240, 95, 310];

class Chart {
  // series: { name, color, times, used, shift, length, bucket, capacity, peak: [bytes, seconds] or null, allocations, shown }
  // lanes: { name, short, columns, rows, members, begins, level, levels, longest, height, shift }, where `members` are
  // positions of spans in order of time, `begins` when each begins, and `level` the row of each
  // findings: { from, to, color, text }
  constructor(place, { series, lanes, findings, length, unit, say, note }) {
    Object.assign(this, { series, lanes, findings, length: Math.max(length, 1e-6), unit, say, note });
    this.view = [this.first(), this.length];
    this.fit = false;
    this.cursor = null;
    this.place = place;
    this.canvas = place.appendChild(document.createElement("canvas"));
    // The cursor has a canvas of its own, so that moving it repaints nothing else.
    this.overlay = place.appendChild(document.createElement("canvas"));
    this.overlay.className = "overlay";
    this.tip = place.appendChild(document.createElement("div"));
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.tip.setAttribute("aria-hidden", "true");
    this.listen();
    this.draw();
  }

  first() { return Math.min(0, ...this.series.map((one) => one.shift)); }

  lanesHeight() { return this.lanes.reduce((sum, lane) => sum + lane.height, 0); }

  // Where time and bytes lie, in pixels of the page.
  x(seconds) { return AXIS + (seconds - this.view[0]) / (this.view[1] - this.view[0]) * this.width; }
  time(x) { return this.view[0] + (x - AXIS) / this.width * (this.view[1] - this.view[0]); }
  y(bytes) { return TOP + HEIGHT - (bytes - this.range[0]) / (this.range[1] - this.range[0]) * HEIGHT; }

  listen() {
    new ResizeObserver(() => this.draw()).observe(this.place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    let from = null;
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      from = at(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.selection = from !== null && Math.abs(at(event) - from) > 4 ? [from, at(event)] : null;
      this.hover(event.clientX - box.left, event.clientY - box.top);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (this.selection) {
        const [one, other] = this.selection.map((x) => this.time(x)).sort((a, b) => a - b);
        this.selection = null;
        this.show(one, other);
      } else if (from !== null) this.point(this.time(at(event)));
      from = null;
    });
    this.canvas.addEventListener("pointercancel", () => { from = null; this.selection = null; this.drawCursor(); });
    this.canvas.addEventListener("pointerleave", () => { this.leave(); this.drawCursor(); });
    this.canvas.addEventListener("dblclick", () => this.whole());
    this.canvas.addEventListener("wheel", (event) => {
      // Without a key held, the wheel scrolls the page.
      if (!event.ctrlKey && !event.shiftKey && !event.metaKey) return;
      event.preventDefault();
      // A trackpad sends many small steps.
      const by = Math.max(-50, Math.min(50, event.deltaY || event.deltaX));
      this.zoom(Math.exp(by * 0.005), this.time(at(event)));
    }, { passive: false });
  }

  // Shows an interval, at least a few microseconds of it, within the recording.
  show(from, to) {
    const whole = this.length - this.first();
    const width = Math.min(Math.max(to - from, 20e-6), whole);
    let begin = (from + to - width) / 2;
    begin = Math.max(this.first(), Math.min(begin, this.length - width));
    this.view = [begin, begin + width];
    this.leave();
    this.draw();
    this.say(`Shows ${this.moment(begin)} to ${this.moment(begin + width)}.`);
  }

  // What the pointer was at is elsewhere now.
  leave() { this.pointer = null; this.tip.hidden = true; }

  moment(seconds) {
    return this.unit === "readings" ? `reading ${Math.floor(seconds * 1000)}` : `${seconds.toFixed(6)} s`;
  }

  whole() { this.show(this.first(), this.length); }

  zoom(factor, around) {
    const center = around ?? this.center();
    this.show(center - (center - this.view[0]) * factor, center + (this.view[1] - center) * factor);
  }

  // The cursor if it is in view, and the middle otherwise.
  center() {
    const [from, to] = this.view;
    return this.cursor !== null && this.cursor >= from && this.cursor <= to ? this.cursor : (from + to) / 2;
  }

  pan(part) { const by = (this.view[1] - this.view[0]) * part; this.show(this.view[0] + by, this.view[1] + by); }

  // Moves the cursor, brings it into view, and says what is there.
  point(seconds) {
    this.cursor = Math.max(this.first(), Math.min(seconds, this.length));
    this.leave();
    if (this.cursor < this.view[0] || this.cursor > this.view[1]) {
      const half = (this.view[1] - this.view[0]) / 2;
      this.show(this.cursor - half, this.cursor + half);
    } else this.drawCursor();
    // What lies between two stops of the arrow keys is said too.
    this.say(this.at(this.cursor, MOST_SPOKEN, (this.view[1] - this.view[0]) / this.width * 4).join("; "));
  }

  peak() {
    const shown = this.series.filter((one) => one.shown && one.peak);
    if (!shown.length) { this.say("No memory is known."); return; }
    const top = shown.reduce((best, one) => one.peak[0] > best.peak[0] ? one : best);
    const at = top.peak[1] + top.shift, half = Math.min(this.length / 2, Math.max(this.length / 100, 0.25));
    this.show(at - half, at + half);
    this.cursor = at;
    this.draw();
    const when = this.unit === "readings" ? `at ${this.moment(top.peak[1])}` : `after ${duration(top.peak[1])}`;
    this.say(`Peak of ${top.name}: ${gib(top.peak[0])} ${when}; ` + this.at(at, MOST_SPOKEN).slice(1).join("; "));
  }

  // What is there at a time: the time, the highest series, and each lane's spans, outermost first.
  at(seconds, most = MOST_TIP, width = 0) {
    const values = [];
    for (const one of this.series) {
      if (!one.shown) continue;
      // Between the points of a thinned curve only its extremes are known.
      const half = one.bucket > width ? one.bucket / 2 : 0;
      const found = extremes(one.times, one.used, seconds - one.shift - half, seconds - one.shift + Math.max(width, half));
      const within = half && found.least !== found.most ? ` within ${duration(one.bucket)}` : "";
      const value = found.most === -Infinity ? "not known"
        : found.least === found.most ? gib(found.most) : `${gib(found.least)} to ${gib(found.most)}${within}`;
      values.push([found.most, `${one.name}: ${value}`]);
    }
    if (values.length > most) values.sort((a, b) => b[0] - a[0]);
    const texts = [this.moment(seconds), ...values.slice(0, most).map(([, text]) => text)];
    if (values.length > most) texts.push(`and ${values.length - most} more`);
    for (const lane of this.lanes) {
      const inside = this.spansAt(lane, seconds);
      if (inside.length) texts.push(`${lane.name}: ${inside.map((span) => this.spanText(lane, span)).join(", ")}`);
    }
    const found = this.findings.filter(({ from, to }) => from <= seconds + width && seconds <= to);
    texts.push(...found.slice(0, MOST_FOUND).map(({ text }) => text));
    return texts;
  }

  spanText(lane, span) {
    const { step, begin, end, peak } = lane.columns, row = lane.rows[lane.columns.row[span]];
    const name = row.kind === "step" ? stepName(step[span]) : row.name;
    const most = Number.isNaN(peak[span]) ? "" : `, peak ${gib(peak[span])}`;
    return `${name} (${duration(end[span] - begin[span])}${most})`;
  }

  // The spans of a lane that contain a time, longest first.
  spansAt(lane, seconds) {
    const { begin, end } = lane.columns, at = seconds - lane.shift, found = [];
    // The longest span bounds how far back one that contains the time can begin.
    for (let i = atMost(lane.begins, at); i >= 0 && lane.begins[i] >= at - lane.longest; i--) {
      const span = lane.members[i];
      if (end[span] > at) found.push(span);
    }
    return found.sort((a, b) => (end[b] - begin[b]) - (end[a] - begin[a])).slice(0, 8);
  }

  hover(x, y) {
    this.pointer = Math.max(AXIS, Math.min(x, AXIS + this.width));
    const seconds = this.time(this.pointer);
    let texts = this.at(seconds, MOST_TIP, (this.view[1] - this.view[0]) / this.width);
    const lane = this.laneAt(y);
    if (lane) {
      const inside = this.spansAt(lane, seconds);
      texts = [texts[0], lane.name, ...inside.map((span) => this.spanText(lane, span))];
    } else {
      const allocation = this.allocationAt(seconds, y);
      if (allocation) texts.push(allocation);
    }
    this.tip.replaceChildren(...texts.map((text) => {
      const line = document.createElement("div");
      line.textContent = text;
      return line;
    }));
    this.tip.hidden = false;
    const right = this.pointer > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "" : `${this.pointer + 14}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - this.pointer + 14}px` : "";
    // Beside the pointer where that is below the plot: the plot's top may be out of sight.
    this.tip.style.top = lane ? `${y + 14}px` : "8px";
    this.drawCursor();
  }

  laneAt(y) {
    let top = TOP + HEIGHT + STRIP + TICKS;
    for (const lane of this.lanes) {
      if (y >= top && y < top + lane.height) return lane;
      top += lane.height;
    }
    return null;
  }

  allocationAt(seconds, y) {
    for (const one of this.series) {
      if (!one.shown || !one.allocations.length) continue;
      const bands = this.bands(one, seconds, extremes(one.times, one.used, seconds - one.shift, seconds - one.shift).most);
      const band = bands.find(({ from, to }) => y <= this.y(from) && y > this.y(to));
      if (band) {
        const { bytes, begin, end, freed } = band.allocation;
        return `${gib(bytes)} allocated at ${duration(begin)}, ${freed ? `freed after ${duration(end - begin)}` : "never freed"}`;
      }
    }
    return null;
  }

  // The largest allocations that hold at a time, on top of what all others take.
  bands(one, seconds, total) {
    const at = seconds - one.shift;
    const alive = one.allocations.filter(({ begin, end }) => begin <= at && at < end);
    let level = Math.max(0, total - alive.reduce((sum, { bytes }) => sum + bytes, 0));
    return alive.map((allocation) => ({ allocation, from: level, to: (level += allocation.bytes) }));
  }

  color(name) {
    if (!this.colors.has(name)) this.colors.set(name, this.style.getPropertyValue(name).trim());
    return this.colors.get(name);
  }

  setRange() {
    const shown = this.series.filter((one) => one.shown);
    let least = 0, most = 0;
    if (this.fit) {
      least = Infinity;
      for (const one of shown) {
        const found = extremes(one.times, one.used, this.view[0] - one.shift, this.view[1] - one.shift);
        if (found.most === -Infinity) continue;
        least = Math.min(least, found.least);
        most = Math.max(most, found.most);
      }
      if (least === Infinity) least = 0;
      const margin = Math.max((most - least) * 0.06, 1048576);
      least = Math.max(0, least - margin);
      most += margin;
    } else {
      for (const one of shown) {
        const peak = one.peak ? one.peak[0] : 0;
        // The capacity line is worth its room unless it flattens the curve.
        most = Math.max(most, one.capacity && peak > one.capacity / 8 ? one.capacity : peak);
      }
      most = Math.max(most * 1.06, 1048576);
    }
    this.range = [least, most];
  }

  draw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.paint(); });
  }

  paint() {
    const ratio = devicePixelRatio || 1, across = this.place.clientWidth;
    if (!across) return;
    const height = TOP + HEIGHT + STRIP + TICKS + this.lanesHeight() + 6;
    this.width = Math.max(across - AXIS - RIGHT, 10);
    for (const canvas of [this.canvas, this.overlay]) {
      const wide = Math.round(across * ratio), tall = Math.round(height * ratio);
      if (canvas.width !== wide) canvas.width = wide;
      if (canvas.height !== tall) canvas.height = tall;
      canvas.style.height = `${height}px`;
    }
    this.height = height;
    this.style = getComputedStyle(document.documentElement);
    this.colors = new Map();
    this.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const pen = this.canvas.getContext("2d");
    this.pen = pen;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    // Painted and not transparent, so that it is also right on paper.
    pen.fillStyle = this.color("--ground");
    pen.fillRect(0, 0, across, height);
    pen.font = "12px system-ui, sans-serif";
    this.setRange();
    this.axes();
    pen.save();
    pen.beginPath();
    pen.rect(AXIS, 0, this.width, height);
    pen.clip();
    const step = 1 / ratio;
    this.gaps(step);
    for (const one of this.series) if (one.shown) this.curve(one, step);
    for (const one of this.series) if (one.shown) this.marks(one);
    this.drawLanes();
    this.drawFindings();
    pen.restore();
    this.drawCursor();
    const thinned = this.series.filter((one) => one.shown && one.bucket > (this.view[1] - this.view[0]) / this.width);
    this.note(thinned.length ? `Between the points of ${thinned.length === 1 ? thinned[0].name : "some curves"} only extremes are known: `
      + `the page has the lowest and highest of every ${duration(Math.max(...thinned.map((one) => one.bucket)))}.` : "");
    // For tests, and for whoever waits for the picture.
    this.place.dataset.painted = String(Number(this.place.dataset.painted || 0) + 1);
  }

  axes() {
    const pen = this.pen;
    pen.strokeStyle = this.color("--line");
    pen.fillStyle = this.color("--dim");
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const scale = this.range[1] >= 2 ** 31 ? 2 ** 30 : 2 ** 20;
    const every = round((this.range[1] - this.range[0]) / scale / 8) * scale;
    for (let at = Math.ceil(this.range[0] / every) * every; at <= this.range[1]; at += every) {
      const y = Math.round(this.y(at)) + 0.5;
      pen.beginPath(); pen.moveTo(AXIS, y); pen.lineTo(AXIS + this.width, y); pen.stroke();
      const digits = Math.max(0, Math.min(4, Math.ceil(-Math.log10(every / scale) - 1e-9)));
      pen.fillText((at / scale).toFixed(digits) + (scale === 2 ** 30 ? " GiB" : " MiB"), AXIS - 6, y);
    }
    let top = TOP + HEIGHT + STRIP + TICKS;
    for (const lane of this.lanes) {
      pen.fillText(lane.short, AXIS - 6, top + lane.height / 2 - 1, AXIS - 8);
      top += lane.height;
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const span = this.view[1] - this.view[0], tick = round(span / Math.max(this.width / 90, 3));
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(tick))));
    for (let at = Math.ceil(this.view[0] / tick) * tick; at <= this.view[1]; at += tick) {
      const x = this.x(at);
      if (x < AXIS + 14 || x > AXIS + this.width - 14) continue;
      const text = this.unit === "readings" ? (at * 1000).toFixed(0) : `${at.toFixed(digits)} s`;
      pen.fillText(text, x, TOP + HEIGHT + STRIP + 4);
    }
  }

  // Below the plot, a red mark wherever the memory of a shown GPU is not known.
  gaps(step) {
    this.pen.fillStyle = this.color("--gap");
    for (const one of this.series) {
      if (!one.shown) continue;
      let drawn = AXIS;
      for (const { from, to } of this.unknown(one)) {
        const left = Math.max(this.x(from), drawn), right = Math.max(this.x(to), left + Math.max(step, 1));
        if (left > AXIS + this.width) break;
        // Of gaps that are narrower than a pixel, one is drawn.
        if (this.x(to) < drawn && right - left <= Math.max(step, 1)) continue;
        this.pen.fillRect(left, TOP + HEIGHT + 1, right - left, STRIP - 1);
        drawn = right;
      }
    }
  }

  unknown(one) {
    if (!one.gaps) {
      one.gaps = [];
      for (let i = 0; i < one.times.length; i++) {
        if (!Number.isNaN(one.used[i])) continue;
        const to = i + 1 < one.times.length ? one.times[i + 1] : one.length;
        if (to > one.times[i]) one.gaps.push({ from: one.times[i] + one.shift, to: to + one.shift });
      }
    }
    return one.gaps;
  }

  curve(one, step) {
    const pen = this.pen, span = this.view[1] - this.view[0], columns = Math.ceil(this.width / step);
    const per = span * step / this.width, thick = Math.max(1.4, step), floor = TOP + HEIGHT;
    const color = this.color(one.color), bands = one.allocations.length > 0;
    for (let column = 0; column < columns; column++) {
      const from = this.view[0] + column * per;
      if (from - one.shift > one.length || from + per <= one.shift) continue;
      // A recording may end with a reading: the last column has it too.
      const until = from + per - one.shift >= one.length ? Infinity : from + per - one.shift;
      // What held until the column's begin counts, so that a change at that very time is a line.
      const { least, most } = extremes(one.times, one.used, from - one.shift - per * 1e-6, until);
      if (most === -Infinity) continue;
      const x = AXIS + column * step, top = this.y(most), bottom = this.y(least);
      if (bands) {
        pen.fillStyle = color;
        pen.globalAlpha = 0.25;
        pen.fillRect(x, top, step, floor - top);
        pen.globalAlpha = 0.85;
        // A column in which memory changes shows what is allocated at its begin.
        const held = extremes(one.times, one.used, from - one.shift, from - one.shift).most;
        for (const { allocation, from: low, to } of held === -Infinity ? [] : this.bands(one, from, held)) {
          pen.fillStyle = `hsl(${HUES[allocation.nth % HUES.length]} 55% 55%)`;
          pen.fillRect(x, this.y(to), step, this.y(low) - this.y(to));
        }
        pen.globalAlpha = 1;
      } else if (this.filled) {
        pen.fillStyle = color;
        pen.globalAlpha = 0.1;
        pen.fillRect(x, top, step, floor - top);
        pen.globalAlpha = 1;
      }
      pen.fillStyle = color;
      pen.fillRect(x, top - thick / 2, step, bottom - top + thick);
    }
  }

  // The capacity line, and the peak with its value.
  marks(one) {
    const pen = this.pen, color = this.color(one.color);
    pen.strokeStyle = color;
    pen.fillStyle = color;
    if (one.capacity && one.capacity <= this.range[1]) {
      const y = Math.round(this.y(one.capacity)) + 0.5;
      pen.setLineDash([6, 4]);
      pen.beginPath(); pen.moveTo(AXIS, y); pen.lineTo(AXIS + this.width, y); pen.stroke();
      pen.setLineDash([]);
      if (one.namesCapacity) {
        pen.textAlign = "right";
        pen.textBaseline = "bottom";
        pen.fillText(`usable ${gib(one.capacity)}`, AXIS + this.width - 6, y - 2);
      }
    }
    if (!one.peak) return;
    const x = this.x(one.peak[1] + one.shift), y = this.y(one.peak[0]);
    if (x < AXIS || x > AXIS + this.width) return;
    pen.beginPath(); pen.arc(x, y, 4, 0, 2 * Math.PI); pen.fill();
    if (one.namesPeak) {
      const left = x > AXIS + this.width - 190;
      pen.textAlign = left ? "right" : "left";
      pen.textBaseline = "top";
      const text = `peak ${gib(one.peak[0])}`, wide = pen.measureText(text).width, tx = x + (left ? -8 : 8);
      pen.fillStyle = this.color("--ground");
      pen.globalAlpha = 0.8;
      pen.fillRect(left ? tx - wide - 2 : tx - 2, y + 6, wide + 4, 16);
      pen.globalAlpha = 1;
      pen.fillStyle = this.color("--text");
      pen.fillText(text, tx, y + 8);
    }
  }

  // Above the plot, a bar for as long as each finding held, from a mark at its begin.
  drawFindings() {
    for (const { from, to, color } of this.findings) {
      const left = this.x(from), right = Math.max(this.x(to), left + 2);
      if (right < AXIS || left > AXIS + this.width) continue;
      this.pen.fillStyle = this.color(color);
      this.pen.fillRect(left, 5, right - left, 3);
      this.pen.beginPath();
      this.pen.moveTo(left - 4, 1); this.pen.lineTo(left + 4, 1); this.pen.lineTo(left, 9);
      this.pen.fill();
    }
  }

  drawLanes() {
    let top = TOP + HEIGHT + STRIP + TICKS;
    for (const lane of this.lanes) {
      this.lane(lane, top);
      top += lane.height;
    }
  }

  lane(lane, top) {
    const pen = this.pen, { begin, end, row, step } = lane.columns;
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    const drawn = lane.levels.map(() => -Infinity);
    for (const member of this.visible(lane)) {
      const span = lane.members[member], of = lane.rows[row[span]], level = lane.level[member];
      const left = this.x(begin[span] + lane.shift), right = this.x(end[span] + lane.shift);
      // Of spans that are narrower than a pixel, one is drawn.
      if (right < drawn[level] + 0.5) continue;
      const x = Math.max(left, drawn[level], AXIS), wide = Math.max(right - x, 0.7);
      drawn[level] = x + wide;
      const y = top + lane.levels[level].top, tall = lane.levels[level].height - 2;
      if (of.kind === "step") pen.fillStyle = this.color(step[span] % 2 ? "--band-a" : "--band-b");
      else pen.fillStyle = `hsl(${of.hue} 45% ${this.isDark ? 28 : 78}%)`;
      pen.fillRect(x, y, wide > 3 ? wide - 0.7 : wide, tall);
      const text = of.kind === "step" ? stepName(step[span]) : of.name;
      if (wide > 26 && tall > 10) {
        pen.fillStyle = this.color("--text");
        pen.save(); pen.beginPath(); pen.rect(x, y, wide - 4, tall); pen.clip();
        pen.fillText(text, x + 4, y + tall / 2 + 0.5);
        pen.restore();
      }
    }
  }

  // The places of a lane's spans that are in view.
  *visible(lane) {
    const { end } = lane.columns, from = this.view[0] - lane.shift, to = this.view[1] - lane.shift;
    // The longest span bounds how far back one that is in view can begin.
    let low = Math.max(atMost(lane.begins, from - lane.longest), 0);
    for (; low < lane.members.length && lane.begins[low] <= to; low++) {
      if (end[lane.members[low]] >= from) yield low;
    }
  }

  drawCursor() {
    if (!this.width) return;
    const pen = this.overlay.getContext("2d"), ratio = devicePixelRatio || 1, height = this.height;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.overlay.width, this.overlay.height);
    const at = this.pointer ?? (this.cursor === null ? null : this.x(this.cursor));
    if (this.selection) {
      pen.fillStyle = this.color("--cursor");
      pen.globalAlpha = 0.12;
      const [one, other] = [...this.selection].sort((a, b) => a - b);
      pen.fillRect(one, 0, other - one, height);
      pen.globalAlpha = 1;
    }
    if (at === null || at < AXIS || at > AXIS + this.width) return;
    pen.strokeStyle = this.color("--cursor");
    pen.beginPath(); pen.moveTo(Math.round(at) + 0.5, 0); pen.lineTo(Math.round(at) + 0.5, height); pen.stroke();
  }
}

function stepName(step) { return Number.isNaN(step) ? "a step without a number" : `step ${step}`; }

// The next of 1, 2 and 5 times a power of ten.
function round(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  const digit = size / power;
  return (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10) * power;
}
