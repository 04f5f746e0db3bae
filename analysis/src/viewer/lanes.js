"use strict";
// Nested steps, phases and layers of one rank, over time.

const LANE = 17, LAYER = 15;
// Maximum number of rows of a lane for overlapping spans of one kind.
const MOST_NESTED = 4;
// Why a span has no end of its own; reports have these numbers from EndedBy.
const OPEN = 1, CUT = 2, LENGTHS = ["", " so far", ", until the rank ended"];

// The colours of phases, --p0 to --p7 of the style: any two differ for colour-blind eyes too. The usual names have the same ones on
// every page; others begin with those that are left, at a place that follows from the name.
const TONES = { data: 0, forward: 1, backward: 2, comm: 3, optimizer: 4, checkpoint: 5, eval: 7, evaluation: 7, validation: 7 };
const OTHER_TONES = [[6, 7, 5], [0, 4, 3, 1, 2]];
const tones = new Map();
function toneOf(name) {
  if (Object.hasOwn(TONES, name)) return TONES[name];
  if (!tones.has(name)) {
    const taken = new Set(tones.values()), hash = [...name].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) >>> 0, 7);
    const all = OTHER_TONES.flatMap((some) => some.map((_, nth) => some[(hash + nth) % some.length]));
    tones.set(name, all.find((tone) => !taken.has(tone)) ?? all[hash % all.length]);
  }
  return tones.get(name);
}

class Lane {
  // spans: { begin, end, step, peak, of, open }, one entry a span in the order of begins; times in seconds, NaN for what
  // is not known; `of` is { kind, name, tone }; `open` is OPEN of those that have not ended, CUT of those whose rank ended first, and
  // 0 of all others. whose: { key, job, jobName, rank, gpus },
  // with a key of the lane, one of the job, and those of the GPUs' series.
  constructor(name, short, spans, whose, shift = 0) {
    Object.assign(this, { name, short, spans, shift }, whose, spans);
    this.count = this.begin.length;
    this.longest = 0;
    for (let i = 0; i < this.count; i++) this.longest = Math.max(this.longest, this.end[i] - this.begin[i]);
    this.place();
  }

  // Gives each span a row: among those of its kind the first one that is free at its begin.
  place() {
    const taken = new Map([["step", []], ["phase", []], ["layer", []]]), rows = new Uint8Array(this.count);
    for (let i = 0; i < this.count; i++) {
      const ends = taken.get(this.of[i].kind) ?? taken.get("phase");
      let free = ends.findIndex((until) => until <= this.begin[i]);
      if (free < 0) free = ends.length < MOST_NESTED ? ends.push(-Infinity) - 1 : MOST_NESTED - 1;
      ends[free] = this.end[i];
      rows[i] = free;
    }
    const first = new Map();
    this.levels = [];
    let height = 0;
    for (const [kind, ends] of taken) {
      first.set(kind, this.levels.length);
      for (let i = 0; i < ends.length; i++) {
        const tall = kind === "layer" ? LAYER : LANE;
        this.levels.push({ top: height, height: tall });
        height += tall;
      }
    }
    this.level = rows.map((row, i) => (first.get(this.of[i].kind) ?? first.get("phase")) + row);
    this.height = height + 4;
  }

  // The spans that contain a time of the chart, longest first.
  at(seconds) {
    const at = seconds - this.shift, found = [];
    // The longest span bounds how far back one that contains the time can begin.
    for (let i = atMost(this.begin, at); i >= 0 && this.begin[i] >= at - this.longest; i--) {
      if (this.end[i] > at) found.push(i);
    }
    return found.sort((a, b) => (this.end[b] - this.begin[b]) - (this.end[a] - this.begin[a])).slice(0, 8);
  }

  // The spans that are in a view of the chart.
  *within([from, to]) {
    const begin = from - this.shift, end = to - this.shift;
    for (let i = Math.max(atMost(this.begin, begin - this.longest), 0); i < this.count && this.begin[i] <= end; i++) {
      if (this.end[i] >= begin) yield i;
    }
  }

  label(span) {
    const { kind, name } = this.of[span], step = this.step[span];
    return kind === "step" ? (Number.isNaN(step) ? "a step without a number" : `step ${step}`) : name;
  }

  // A span in words, with its duration and peak.
  text(span) {
    const length = duration(this.end[span] - this.begin[span]), so = LENGTHS[this.open?.[span] ?? 0];
    const peak = Number.isNaN(this.peak[span]) ? "" : `, peak ${gib(this.peak[span])}`;
    return `${this.label(span)} (${length}${so}${peak})`;
  }
}
