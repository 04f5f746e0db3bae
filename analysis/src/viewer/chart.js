"use strict";
// Memory over time, with lanes of steps and phases below: what is in view, and what the pointer and the keys do. layout.js says where
// things lie, and paint.js draws them. Knows nothing of where its data come from.

// Curves that are spoken of, in all that is said and near the pointer; lanes; findings.
const MOST_SPOKEN = 4, MOST_TIP = 16, MOST_NEAR = 6, MOST_LANES_SAID = 8, MOST_FOUND = 3;

// The text of a finding as of a time.
function saidAt({ text, last }, seconds) { return last && seconds >= last.at ? last.text : text; }

// The means of what a GPU did, in words; null if nothing is known.
function worked(means) {
  const names = ["busy", "multiprocessors", "tensor cores", "memory"];
  const parts = names.flatMap((name, nth) => means[nth] === null ? [] : [`${name} ${Math.round(means[nth] * 100)} %`]);
  return parts.length ? parts.join(", ") : null;
}

class Chart {
  // series: { key, name, color, curve, shift, capacity, headroom, peak: [bytes, seconds] or null, allocations, shown,
  //   holders: { sites, begins, levels } or null: names of places, when each stretch of time begins, in seconds, and for each
  //   stretch the bytes that each place holds; `colors` and `isAlone`, if they are of the GPU itself and not of one allocator: then they
  //   are drawn only while no other series is;
  //   activity: what the GPU did, with isKnown and mean(from, to): shares of a kernel, multiprocessors, tensor cores and memory }
  // lanes: of class Lane, with `gpus`: keys of series
  // findings: { from, to, color, text, last: { at, text } or null, on }: what was said first, and from a time on; keys of series
  // worst: the place of a series among the rows, the lowest first; areRows: whether each GPU has a row of its own
  // bounds: the first and the last time that can be shown, seconds
  // axis: how times are written
  // say: called with text for a screen reader; note: called with a text about the limits of the drawing; moved: called when the
  // view changes; phases: called with the names of the phases in view and their tones; inspect: called with a lane and a time that was
  // clicked on it; choose: called with a series and the band of it that was clicked on
  constructor(place, { series, lanes, findings, bounds, axis, say, note, worst = () => 0, areRows = false, moved = () => {}, phases = () => {}, inspect = () => {}, choose = () => {} }) {
    Object.assign(this, { series, lanes, findings, axis, say, note, worst, areRows, wantsRows: areRows, moved, phases, inspect, choose });
    this.bounds = [bounds[0], Math.max(bounds[1], bounds[0] + 1e-6)];
    this.view = [...this.bounds];
    // How much time is shown while the view follows the present; null if it stays where it is.
    this.following = null;
    this.fit = false;
    // Whether the axis shows what is free.
    this.isHeadroom = false;
    this.cursor = null;
    // At most two times, between which a reader wants to know what changed.
    this.pins = [];
    this.place = place;
    this.canvas = place.appendChild(document.createElement("canvas"));
    // The cursor has a canvas of its own, so that moving it repaints nothing else.
    this.overlay = place.appendChild(document.createElement("canvas"));
    this.overlay.className = "overlay";
    this.tip = place.appendChild(element("div", { class: "tip", hidden: true, "aria-hidden": "true" }));
    this.painter = new Painter(this);
    this.listen();
    this.draw();
  }

  // The series with a strip of what their GPUs did.
  strips() { return this.series.filter((one) => one.shown && one.activity?.isKnown); }
  // Whether a series has a place on the axis: of what is free nothing is known without a capacity.
  isDrawn(one) { return one.shown && !(this.isHeadroom && !one.capacity); }

  // Where everything lies, as of now.
  lay() {
    // Without a curve there are no rows.
    this.areRows = this.wantsRows && this.series.some(({ shown }) => shown);
    this.rows = rowsOf(this);
    const view = this.fit ? this.view : null, shared = rangeOf(this.series.filter(({ shown }) => shown), view);
    for (const row of this.rows) {
      row.range = this.areRows && this.fit ? rangeOf(row.series, view) : shared;
      row.mostFree = row.series.reduce((most, { capacity }) => Math.max(most, capacity ?? 0), 0);
      for (const one of row.series) one.row = row;
    }
    // Below the only plot, or above the rows, of which the last may be out of sight.
    this.ticksTop = this.areRows ? TOP : this.rows[0].floor + STRIP + 4;
    this.height = this.rows[this.rows.length - 1].bottom + 6;
  }

  // Where time and bytes lie, in pixels of the page.
  x(seconds) { return AXIS + (seconds - this.view[0]) / (this.view[1] - this.view[0]) * this.width; }
  time(x) { return this.view[0] + (x - AXIS) / this.width * (this.view[1] - this.view[0]); }
  y(one, bytes) {
    const { floor, top, range: [low, high], mostFree } = one.row;
    return floor - (this.isHeadroom ? heightOfFree(one.capacity - bytes, mostFree) : (bytes - low) / (high - low)) * (floor - top);
  }
  // The time that a pixel takes.
  pixel() { return (this.view[1] - this.view[0]) / Math.max(this.width ?? 1, 1); }

  listen() {
    // Kept, so that end() can remove them and the chart can be garbage-collected.
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.place);
    this.themed = () => this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.themed);
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
      } else if (from !== null) {
        const seconds = this.time(at(event)), y = event.clientY - this.canvas.getBoundingClientRect().top, lane = this.laneAt(y);
        this.point(seconds);
        if (lane) this.inspect(lane, seconds);
        else {
          const found = this.bandAt(this.rowAt(y), seconds, y);
          if (found) this.choose(...found);
        }
      }
      from = null;
    });
    this.canvas.addEventListener("pointercancel", () => { from = null; this.selection = null; this.painter.cursor(); });
    this.canvas.addEventListener("pointerleave", () => { this.leave(); this.painter.cursor(); });
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

  // Stops the chart. Call it when its place is removed.
  end() {
    this.ended = true;
    this.resized.disconnect();
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.themed);
  }

  // Shows an interval, at least a few microseconds of it, within the bounds.
  show(from, to) {
    const [first, last] = this.bounds;
    const width = Math.min(Math.max(to - from, 20e-6), last - first);
    const begin = Math.max(first, Math.min((from + to - width) / 2, last - width));
    this.following = null;
    this.view = [begin, begin + width];
    this.leave();
    this.draw();
    this.moved(this.view);
    this.say(`Shows ${this.axis.moment(begin)} to ${this.axis.moment(begin + width)}.`);
  }

  // Shows the last `width` seconds, also of what is still to come.
  follow(width) {
    this.following = width;
    this.extend(this.bounds[0], this.bounds[1]);
    this.leave();
    this.moved(this.view);
  }

  // Sets new bounds, and moves the view if it follows the present.
  extend(first, last) {
    this.bounds = [first, Math.max(last, first + 1e-6)];
    if (this.following !== null) {
      this.view = [this.bounds[1] - this.following, this.bounds[1]];
      // The view moved, so the pointer is at another time.
      if (this.pointer !== null && this.pointer !== undefined && !this.tip.hidden) this.hover(this.pointer, this.pointerY);
    }
    this.draw();
  }

  // Hides the tooltip, as the pointer has left the chart or the view has moved under it.
  leave() { this.pointer = null; this.tip.hidden = true; }

  whole() { this.show(...this.bounds); }

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
    this.cursor = Math.max(this.bounds[0], Math.min(seconds, this.bounds[1]));
    this.leave();
    if (this.cursor < this.view[0] || this.cursor > this.view[1]) {
      const half = (this.view[1] - this.view[0]) / 2;
      this.show(this.cursor - half, this.cursor + half);
    } else this.painter.cursor();
    // Includes what lies between two stops of the arrow keys.
    this.say(this.at(this.cursor, MOST_SPOKEN, this.pixel() * 4).join("; "));
  }

  // Pins the cursor, or else the middle of the view. The second pin says what changed from the earlier to the later; the one after it
  // begins anew.
  pin() {
    this.cursor = this.center();
    this.pins = this.pins.length === 2 ? [this.cursor] : [...this.pins, this.cursor].sort((a, b) => a - b);
    this.painter.cursor();
    const [from, to] = this.pins;
    if (to === undefined) { this.say(`Pinned ${this.axis.moment(from)}. Pin another time to read what changed between the two.`); return; }
    const changes = this.series.filter((one) => one.shown).map((one) => {
      const found = this.pins.map((seconds) => this.around(one, seconds, 1e-9)), [before, after] = found.map(({ most }) => most), by = after - before;
      const text = before === -Infinity || after === -Infinity ? "not known" : `${gib(before)} to ${gib(after)}, ${by < 0 ? "−" : "+"}${gib(Math.abs(by))}`;
      const widest = Math.max(...found.map(({ bucket }) => bucket));
      return { by: Number.isFinite(by) ? Math.abs(by) : -1, text: `${one.name}: ${text}${widest ? `, each the most within ${duration(widest)}` : ""}` };
    }).sort((a, b) => b.by - a.by);
    const more = changes.length - MOST_SPOKEN;
    this.say([`${duration(to - from)} from ${this.axis.moment(from)} to ${this.axis.moment(to)}`, ...changes.slice(0, MOST_SPOKEN).map(({ text }) => text), ...more > 0 ? [`and ${more} that changed less`] : []].join("; "));
  }

  peak() {
    const shown = this.series.filter((one) => one.shown && one.peak);
    if (!shown.length) { this.say("No memory is known."); return; }
    const top = shown.reduce((best, one) => one.peak[0] > best.peak[0] ? one : best);
    const [first, last] = this.bounds, length = last - first;
    const at = top.peak[1] + top.shift, half = Math.min(length / 2, Math.max(length / 100, 0.25));
    this.show(at - half, at + half);
    this.cursor = at;
    this.draw();
    this.say(`Peak of ${top.name}: ${gib(top.peak[0])} ${this.axis.after(top.peak[1])}; `
      + this.at(at, MOST_SPOKEN).slice(1).join("; "));
  }

  // What a series had from a time on, for `width` seconds. Between the points of a thinned curve only its extremes are known: `bucket` is
  // the time over which they are those, 0 where each change is known.
  around(one, seconds, width) {
    const at = seconds - one.shift, apart = one.curve.bucketAt(at), bucket = apart > width ? apart : 0;
    return { ...one.curve.extremes(at - bucket / 2, at + Math.max(width, bucket / 2)), bucket };
  }

  // What each shown series has at a time: [bytes, text, series].
  values(seconds, width, series = this.series) {
    const values = [];
    for (const one of series) {
      if (!one.shown) continue;
      const found = this.around(one, seconds, width);
      const within = found.bucket && found.least !== found.most ? ` within ${duration(found.bucket)}` : "";
      const value = found.most === -Infinity ? "not known"
        : found.least === found.most ? gib(found.most) : `${gib(found.least)} to ${gib(found.most)}${within}`;
      const free = this.isHeadroom && one.capacity && found.most !== -Infinity ? `, ${gib(Math.max(0, one.capacity - found.most))} free` : "";
      values.push([found.most, `${one.name}: ${value}${free}`, one]);
    }
    return values;
  }

  // What the GPU of a series did around a time; null if nothing is known.
  worked(one, seconds, width) {
    const at = seconds - one.shift, half = Math.max(width, this.pixel()) / 2, means = one.activity.mean(at - half, at + half), text = means && worked(means);
    return text ? `${one.name}: ${text}` : null;
  }

  // What is there at a time: the time, the highest series, and the first lanes' spans, outermost first.
  at(seconds, most = MOST_TIP, width = 0) {
    const values = this.values(seconds, width);
    if (values.length > most) values.sort((a, b) => b[0] - a[0]);
    const texts = [this.axis.moment(seconds), ...values.slice(0, most).map(([, text]) => text)];
    if (values.length > most) texts.push(`and ${values.length - most} more`);
    const strips = this.strips();
    texts.push(...(strips.length > MOST_SPOKEN ? [] : strips).map((one) => this.worked(one, seconds, width)).filter((text) => text !== null));
    const inside = this.lanes.map((lane) => [lane, lane.at(seconds)]).filter(([, spans]) => spans.length);
    texts.push(...inside.slice(0, MOST_LANES_SAID).map(([lane, spans]) => `${lane.name}: ${spans.map((span) => lane.text(span)).join(", ")}`));
    if (inside.length > MOST_LANES_SAID) texts.push(`and ${inside.length - MOST_LANES_SAID} further ranks in the chart`);
    const found = this.findings.filter(({ from, to }) => from <= seconds + width && seconds <= to);
    texts.push(...found.slice(0, MOST_FOUND).map((one) => saidAt(one, seconds)));
    return texts;
  }

  hover(x, y) {
    this.pointer = Math.max(AXIS, Math.min(x, AXIS + this.width));
    this.pointerY = y;
    const seconds = this.time(this.pointer);
    let texts = this.under(seconds, y);
    if (this.selection) {
      const [one, other] = this.selection.map((at) => this.time(at)).sort((a, b) => a - b);
      texts = [`${duration(other - one)} selected`, ...this.inView(one, other).map(({ text }) => text)];
    }
    const isBelow = this.areRows || y > this.rows[0].floor;
    this.tip.replaceChildren(...texts.map((text) => element("div", {}, text)));
    this.tip.hidden = false;
    const right = this.pointer > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "" : `${this.pointer + 14}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - this.pointer + 14}px` : "";
    // Below the plot, the tooltip is beside the pointer, as the top of the plot may be out of sight.
    this.tip.style.top = isBelow ? `${y + 14}px` : "8px";
    this.painter.cursor();
  }

  // What is under the pointer: of a lane its spans, of a strip what the GPU did, and in the plot the curves nearest to it, the band, and
  // what was reported then.
  under(seconds, y) {
    const time = this.axis.moment(seconds), lane = this.laneAt(y);
    if (lane) return [time, lane.name, ...lane.at(seconds).map((span) => lane.text(span))];
    const row = this.rowAt(y), strip = row.strips.find(({ top, tall }) => y >= top && y < top + tall + 4)?.one;
    if (strip) return [time, this.worked(strip, seconds, this.pixel()) ?? `${strip.name}: not known`];
    const values = this.values(seconds, this.pixel(), row.series), far = ([bytes, , one]) => bytes === -Infinity ? 1e9 : Math.abs(this.y(one, bytes) - y);
    const near = values.length > MOST_NEAR ? new Set([...values].sort((a, b) => far(a) - far(b)).slice(0, MOST_NEAR)) : new Set(values);
    const left = values.length - near.size, [, band] = this.bandAt(row, seconds, y) ?? [];
    const found = this.findings.filter(({ from, to, on }) => from <= seconds + this.pixel() && seconds <= to && this.isOn(row, on));
    return [time, ...values.filter((one) => near.has(one)).map(([, text]) => text), ...left ? [`and ${left} further from the pointer`] : [], ...band ? [band.text()] : [],
      ...found.slice(0, MOST_FOUND).map((one) => saidAt(one, seconds))];
  }

  // Whether a finding concerns a row: one that is of no GPU in the chart concerns all.
  isOn(row, on) { return !this.areRows || !on?.length || !this.series.some(({ key, shown }) => shown && on.includes(key)) || row.series.some(({ key }) => on.includes(key)); }

  // The lowest and highest of each shown series within an interval.
  inView(from = this.view[0], to = this.view[1]) {
    return this.series.filter((one) => one.shown).map((one) => {
      const { least, most } = one.curve.extremes(from - one.shift, to - one.shift);
      const text = most === -Infinity ? "not known" : `${gib(least)} to ${gib(most)}`;
      return { one, least, most, text: `${one.name}: ${text}` };
    });
  }

  // The row at a height: between two, the lower one.
  rowAt(y) { return this.rows.find(({ bottom }) => y < bottom) ?? this.rows[this.rows.length - 1]; }

  laneAt(y) {
    const { lanesTop, lanes } = this.rowAt(y);
    let top = lanesTop;
    for (const lane of lanes) {
      if (y >= top && y < top + lane.height) return lane;
      top += lane.height;
    }
    return null;
  }

  // The band of a row at a place, with its series; null if there is none.
  bandAt(row, seconds, y) {
    for (const one of row.series) {
      if (!this.hasBands(one)) continue;
      const at = seconds - one.shift;
      const bands = this.bands(one, seconds, one.curve.extremes(at, at).most);
      const band = bands.find(({ from, to }) => y <= this.y(one, from) && y > this.y(one, to));
      if (band) return [one, band];
    }
    return null;
  }

  // Whether a series has bands below its curve.
  hasBands(one) {
    if (this.isHeadroom) return false;
    const isShown = one.holders && (this.areRows || !(one.holders.isAlone && this.series.some((other) => other !== one && other.shown)));
    return one.allocations.length > 0 || Boolean(isShown);
  }

  // The largest allocations that hold at a time, on top of what all others take.
  bands(one, seconds, total) {
    const at = seconds - one.shift;
    if (one.holders) return this.held(one.holders, at, total);
    const alive = one.allocations.filter(({ begin, end }) => begin <= at && at < end);
    let level = Math.max(0, total - alive.reduce((sum, { bytes }) => sum + bytes, 0));
    return alive.map(({ nth, bytes, begin, end, freed }) => ({ nth, from: level, to: (level += bytes), text: () =>
      `${gib(bytes)} allocated at ${duration(begin)}, ${freed ? `freed after ${duration(end - begin)}` : "never freed"}` }));
  }

  // What places in the program hold, the largest below; all others are above them. Levels are those of the highest moment of a
  // stretch of time, so that they may be above what was held when the stretch began.
  held({ sites, begins, levels }, at, total) {
    const moment = atMost(begins, at);
    if (moment < 0) return [];
    let level = 0;
    return sites.map((site, nth) => {
      const bytes = levels[moment][nth], from = Math.min(level, total);
      level += bytes;
      return { nth, site, from, to: Math.min(level, total), text: () => `${gib(bytes)} held by ${site}` };
    }).filter(({ from, to }) => to > from);
  }

  draw() {
    if (this.pending || this.ended) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; if (!this.ended) this.paint(); });
  }

  paint() { this.painter.paint(); }
}
