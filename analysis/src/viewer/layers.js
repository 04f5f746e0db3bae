"use strict";
// What the layers of a model took in one profiled step of one rank: three graphs over one axis, on which records stand in
// the order in which the layers ran, forward first and then backward. Memory at the end of each layer; activations, and
// parameters below them; all-gathers with the bytes that are gathered at the time. Knows nothing of where records come from.

const GRAPH = 130, GRAPH_GAP = 26, MODULES = 18, LAYERS_TOP = 20, MOST_MODULES = 200;

// records: arrays of [name, "forward" or "backward", any, allocated, reserved, growth, activations, parameters, gathered,
// gathered_sum, duration in nanoseconds]; null where not known.
const RECORD = { name: 0, direction: 1, allocated: 3, reserved: 4, growth: 5, activations: 6, parameters: 7, gathered: 8, gatheredSum: 9, duration: 10 };

const GRAPHS = [
  { title: "Memory at the end of each layer", lines: [["allocated", "allocated", "--c0"], ["reserved", "reserved", "--c1"]], bars: [], none: "The allocator's counters are not known." },
  { title: "Activations, parameters below", lines: [], bars: [["activations", "activations", "--c2", 1], ["parameters", "parameters", "--c3", -1]], none: "Activations and parameters are not known." },
  { title: "All-gathers", lines: [["gatheredSum", "gathered and not released", "--c4"]], bars: [["gathered", "gathered", "--c5", 1]], none: "All-gathers are not known.", zero: "Nothing was gathered." },
];

// A size of a layer, which may be a few bytes.
function size(bytes) {
  if (bytes === null || bytes === undefined || Math.abs(bytes) >= 1048576) return gib(bytes);
  return Math.abs(bytes) >= 1024 ? `${(bytes / 1024).toFixed(2)} KiB` : `${bytes} B`;
}

class LayerChart {
  // say: called with text for a screen reader.
  constructor(place, records, say) {
    Object.assign(this, { place, records, say, cursor: null, pointer: null });
    this.graphs = GRAPHS.filter((graph) => this.has(graph, (value) => value > 0));
    this.passes = records.findIndex((record) => record[RECORD.direction] === "backward");
    if (this.passes < 0) this.passes = records.length;
    this.modules = modules(records);
    this.canvas = place.appendChild(document.createElement("canvas"));
    this.overlay = place.appendChild(document.createElement("canvas"));
    this.overlay.className = "overlay";
    this.tip = place.appendChild(element("div", { class: "tip", hidden: true, "aria-hidden": "true" }));
    this.resized = new ResizeObserver(() => this.paint());
    this.resized.observe(place);
    this.themed = () => this.paint();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.themed);
    this.canvas.addEventListener("pointermove", (event) => {
      this.pointer = this.at(event.clientX - this.canvas.getBoundingClientRect().left);
      this.mark();
    });
    this.canvas.addEventListener("pointerleave", () => { this.pointer = null; this.mark(); });
    this.canvas.addEventListener("click", () => { if (this.pointer !== null) this.point(this.pointer); });
    place.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const last = records.length - 1, from = this.cursor ?? -1;
      const to = { ArrowLeft: from - 1, ArrowRight: from + 1, PageUp: from - 20, PageDown: from + 20, Home: 0, End: last }[event.key];
      if (to === undefined || last < 0) return;
      event.preventDefault();
      this.point(Math.max(0, Math.min(to, last)));
    });
  }

  // Stops the chart. Call it when its place is removed.
  end() {
    this.resized.disconnect();
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.themed);
  }

  // Whether `is` holds for any of a graph's values.
  has({ lines, bars }, is) { return [...lines, ...bars].some(([key]) => this.records.some((record) => is(record[RECORD[key]]))); }

  // What is said in place of a graph that has nothing to show.
  instead(graph) { return graph.zero && this.has(graph, (value) => value !== null) ? graph.zero : graph.none; }

  x(nth) { return AXIS + nth / this.records.length * this.width; }
  at(x) {
    const nth = Math.floor((x - AXIS) / this.width * this.records.length);
    return nth < 0 || nth >= this.records.length ? null : nth;
  }

  // Moves the cursor and says what is there.
  point(nth) {
    this.cursor = nth;
    this.pointer = null;
    this.mark();
    this.say(this.describe(nth).join("; "));
  }

  describe(nth) {
    const record = this.records[nth], value = (key, text, show = size) => record[RECORD[key]] === null ? null : `${text} ${show(record[RECORD[key]])}`;
    const gathered = (key, text) => record[RECORD[key]] ? value(key, text) : null;
    return [`${nth + 1} of ${this.records.length}: ${record[RECORD.name]}, ${record[RECORD.direction]}`,
      value("allocated", "allocated"), value("reserved", "reserved"), value("growth", "growth"), value("activations", "activations"),
      value("parameters", "parameters"), gathered("gathered", "gathered"), gathered("gatheredSum", "gathered and not released"),
      value("duration", "took", (ns) => duration(ns / 1e9))].filter((part) => part !== null);
  }

  paint() {
    const across = this.place.clientWidth;
    if (!across) return;
    this.width = Math.max(across - AXIS - RIGHT, 10);
    this.height = LAYERS_TOP + this.graphs.length * (GRAPH + GRAPH_GAP) + this.modules.length * (MODULES + 1) + 6;
    this.color = palette();
    this.pen = fit([this.canvas, this.overlay], across, this.height, this.color);
    this.drawPasses();
    this.graphs.forEach((graph, at) => this.drawGraph(graph, LAYERS_TOP + at * (GRAPH + GRAPH_GAP)));
    this.drawModules(LAYERS_TOP + this.graphs.length * (GRAPH + GRAPH_GAP) - 4);
    this.mark();
    this.place.dataset.painted = String(Number(this.place.dataset.painted || 0) + 1);
  }

  // Labels the forward and the backward pass above the graphs, and draws a line between them.
  drawPasses() {
    const { pen } = this, middle = this.x(this.passes);
    pen.fillStyle = this.color("--dim");
    pen.textBaseline = "top";
    pen.textAlign = "left";
    if (this.passes > 0) pen.fillText("forward", AXIS + 2, 3);
    if (this.passes >= this.records.length) return;
    pen.fillText("backward", middle + 4, 3);
    pen.strokeStyle = this.color("--dim");
    pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(Math.round(middle) + 0.5, 0); pen.lineTo(Math.round(middle) + 0.5, this.height); pen.stroke();
    pen.setLineDash([]);
  }

  drawGraph({ title, lines, bars }, top) {
    const { pen, records } = this, bottom = top + GRAPH, most = (sign) => {
      const keys = [...lines.map(([key]) => [key, 1]), ...bars.map(([key, , , side]) => [key, side])].filter(([, side]) => side === sign);
      return Math.max(0, ...keys.map(([key]) => records.reduce((highest, record) => Math.max(highest, record[RECORD[key]] ?? 0), 0)));
    };
    const up = most(1), down = most(-1), y = (bytes) => bottom - (bytes + down) / ((up + down) || 1) * (GRAPH - 20);
    byteAxis(pen, this.color, [-down, up], 5, Math.max(up, down), this.width, y);
    pen.textAlign = "left";
    pen.textBaseline = "bottom";
    pen.fillStyle = this.color("--text");
    pen.fillText(title, AXIS + 2, top + 11);
    // Of records that are narrower than a pixel, the highest of each pixel is drawn.
    const step = 1 / (devicePixelRatio || 1), wide = this.width / records.length;
    for (const [key, , color, side] of bars) {
      pen.fillStyle = this.color(color);
      for (let nth = 0; nth < records.length;) {
        const left = this.x(nth);
        let highest = 0, next = nth;
        do highest = Math.max(highest, records[next++][RECORD[key]] ?? 0); while (next < records.length && this.x(next) < left + step);
        const end = y(side * highest), zero = y(0);
        if (highest > 0) pen.fillRect(left, Math.min(end, zero), Math.max(wide > 3 ? wide - 1 : wide, step), Math.max(Math.abs(end - zero), 1));
        nth = next;
      }
    }
    for (const [key, , color] of lines) {
      pen.fillStyle = this.color(color);
      records.forEach((record, nth) => {
        const value = record[RECORD[key]], before = nth ? records[nth - 1][RECORD[key]] : value;
        if (value === null) return;
        const here = y(value), left = this.x(nth);
        pen.fillRect(left, here - 1, Math.max(wide, 1), 2);
        // The change from the one before, as an upright line.
        if (before !== null) pen.fillRect(left - 0.7, Math.min(here, y(before)) - 1, 1.4, Math.abs(here - y(before)) + 2);
      });
    }
  }

  // Below everything, the modules of which the layers are parts, and below these their own parts.
  drawModules(top) {
    const { pen } = this;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    this.modules.forEach((row, depth) => row.forEach(({ from, to, name }, nth) => {
      const left = this.x(from), wide = this.x(to) - left, y = top + depth * (MODULES + 1);
      pen.fillStyle = this.color(nth % 2 ? "--band-a" : "--band-b");
      pen.fillRect(left, y, Math.max(wide - 0.7, 0.7), MODULES);
      // The row above has the rest of the name.
      const text = depth ? name.slice(name.lastIndexOf(".") + 1) : name;
      if (pen.measureText(text).width + 4 > wide) return;
      pen.fillStyle = this.color("--text");
      pen.fillText(text, left + wide / 2, y + MODULES / 2 + 0.5);
    }));
  }

  // The record at the pointer, or else at the cursor.
  mark() {
    const nth = this.pointer ?? this.cursor;
    if (!this.width || !this.color) return;
    const pen = cleared(this.overlay);
    this.tip.hidden = this.pointer === null;
    if (nth === null) return;
    const left = this.x(nth), right = this.x(nth + 1), height = this.height;
    pen.fillStyle = this.color("--cursor");
    pen.globalAlpha = 0.18;
    pen.fillRect(left, 0, Math.max(right - left, 1), height);
    pen.globalAlpha = 1;
    if (this.tip.hidden) return;
    const [title, ...lines] = this.describe(nth);
    this.tip.replaceChildren(element("strong", {}, title), ...lines.map((line) => element("div", {}, line)));
    const onRight = left < AXIS + this.width / 2;
    this.tip.style.left = onRight ? `${right + 10}px` : "auto";
    this.tip.style.right = onRight ? "auto" : `${this.place.clientWidth - left + 10}px`;
  }
}

// Groups neighbouring records into rows: by the first part in which their names differ, and in a second row by the first two
// parts, unless that makes too many groups.
function modules(records) {
  const parts = records.map((record) => record[RECORD.name].split(".").filter((part) => part && !part.startsWith("_")));
  let common = 0;
  // What wrappers put before every name, such as "module", says nothing.
  while (parts.length && parts.every((of) => of.length > common + 1 && of[common] === parts[0][common])) common++;
  const runs = (depth) => {
    const found = [];
    parts.forEach((of, nth) => {
      const name = of.slice(common, common + depth).join(".") || "the model", last = found.at(-1);
      const isOther = last && records[nth][RECORD.direction] !== records[last.from][RECORD.direction];
      if (last && last.name === name && !isOther) last.to = nth + 1;
      else found.push({ name, from: nth, to: nth + 1 });
    });
    return found;
  };
  const whole = runs(1), parted = runs(2);
  return parted.length > whole.length && parted.length <= MOST_MODULES ? [whole, parted] : [whole];
}

// The graphs of one profile with their legend, what is at the cursor, and its totals and largest layers as tables.
// `profile`: { title, records, missing, left_out, totals: { layers, activation_bytes, parameter_bytes, gathered_bytes,
// allocated_max_bytes, reserved_max_bytes, top } }. The totals are of all records, also of those that are left out here.
function layerRegion({ title, records, missing, left_out: leftOut, totals }) {
  const place = element("div", { class: "plot layers", tabindex: "0", role: "application", "aria-roledescription": "chart",
    "aria-label": `Layers of ${title}. Arrow keys move from layer to layer.` });
  const readout = element("p", { class: "readout", role: "status" });
  const chart = new LayerChart(place, records, (text) => { readout.textContent = text; });
  const swatches = chart.graphs.flatMap(({ lines, bars }) => [...lines, ...bars]).map(([key, name, color]) => {
    return element("li", {}, swatch(`var(${color})`), name);
  });
  const notes = GRAPHS.filter((graph) => !chart.graphs.includes(graph)).map((graph) => chart.instead(graph));
  if (leftOut) notes.push(`${leftOut.toLocaleString("en")} records are not drawn; the tables have them.`);
  if (missing) notes.push(`${missing.toLocaleString("en")} records found no room in the daemon.`);
  const sums = [["layers", totals.layers.toLocaleString("en")], ["activations of the forward pass", size(totals.activation_bytes)], ["parameters", size(totals.parameter_bytes)],
    ["gathered", size(totals.gathered_bytes)], ["highest allocated", gib(totals.allocated_max_bytes)], ["highest reserved", gib(totals.reserved_max_bytes)]];
  const top = totals.top.map((one) => [one.layer, size(one.activation_bytes), size(one.parameter_bytes)]);
  const region = element("div", { class: "chart" }, records.length ? [place, element("ul", { class: "legend" }, ...swatches), readout] : [],
    ...notes.map((text) => element("p", { class: "note" }, text)),
    table(`Totals of ${title}`, ["of the profile", "value"], sums, 1), table(`Layers with the most activations in ${title}`, ["layer", "activations", "parameters"], top, 1));
  return { region, chart };
}

// A choice among profiles, and the graphs of the chosen one. `chosen` is called when the reader chooses another.
function layerChooser(label, chosen) {
  const select = element("select", { onchange: () => chosen(select.value) }), inside = element("div");
  const place = element("div", {}, element("p", { class: "choice" }, element("label", {}, `${label} `, select)), inside);
  let chart = null, offered = null;
  const clear = () => { chart?.end(); chart = null; inside.replaceChildren(); };
  return {
    place,
    chosen: () => select.value,
    // Offers [value, text] pairs; returns the value that is chosen, or null if there is none.
    offer(options) {
      const named = JSON.stringify(options);
      if (named !== offered) {
        const before = select.value;
        select.replaceChildren(...options.map(([value, text]) => element("option", { value, selected: value === before }, text)));
        offered = named;
      }
      place.firstChild.hidden = options.length < 2;
      return options.length ? select.value : null;
    },
    show(profile) {
      clear();
      const made = layerRegion(profile);
      chart = made.chart;
      inside.append(made.region);
      chart.paint();
      globalThis.highwaterLayers = chart;
    },
    say(text) { clear(); inside.append(element("p", {}, text)); },
    end: clear,
  };
}
