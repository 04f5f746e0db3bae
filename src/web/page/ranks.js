"use strict";
// Steps and phases of the ranks: those that the stream brings, and those of before, which are requested for the part of
// time that is in view.

// Spans that are kept as they come, over all ranks.
const MOST_SPANS = 60000;

const kinds = new Map();
// The kind, name and color that spans share.
function kindOf(kind, name) {
  const key = `${kind} ${name}`;
  if (!kinds.has(key)) kinds.set(key, { kind, name, hue: hueOf(name) });
  return kinds.get(key);
}

// Spans of one rank, in the order of their begins.
class Spans {
  constructor() { Object.assign(this, { begin: [], end: [], step: [], peak: [], of: [], open: [] }); }

  get count() { return this.begin.length; }

  // Spans come about in the order of their ends.
  push(begin, end, step, peak, of, open = false) {
    let at = this.count;
    while (at > 0 && this.begin[at - 1] > begin) at--;
    const values = { begin, end, step, peak, of, open }, isLast = at === this.count;
    for (const [name, value] of Object.entries(values)) {
      if (isLast) this[name].push(value); else this[name].splice(at, 0, value);
    }
  }

  forget(less) { for (const name of Object.keys(this)) this[name].splice(0, less); }

  copy() {
    const copy = new Spans();
    for (const name of Object.keys(this)) copy[name] = [...this[name]];
    return copy;
  }
}

class LiveRank {
  constructor(job, rank) { Object.assign(this, { job, rank, gpus: [], step: null, open: [], spans: new Spans(), past: null }); }

  forget(most) {
    // A quarter at once, so that it is seldom.
    if (this.spans.count > most) this.spans.forget(this.spans.count - Math.floor(most * 0.75));
  }

  // What is known as a lane: spans of before, those that came, and open ones until `now`.
  lane(now, severalJobs) {
    const all = this.past ? this.past.copy() : this.spans.copy();
    const { begin, end, step, peak, of } = this.spans;
    if (this.past) for (let i = 0; i < begin.length; i++) all.push(begin[i], end[i], step[i], peak[i], of[i]);
    for (const one of this.open) all.push(one.begin, Math.max(now, one.begin), one.step, NaN, one.of, true);
    return new Lane(`${this.job} rank ${this.rank}`, `${severalJobs ? `${this.job.slice(0, 7)} ` : "rank "}${this.rank}`, all);
  }
}

class Ranks {
  // `load(from, to)` requests what is kept of an interval.
  constructor(load) { Object.assign(this, { load, byKey: new Map(), firstId: Infinity, lastId: -1, started: null, since: Infinity, past: null }); }

  rankOf(one) {
    const key = `${one.rank} ${one.job}`;
    if (!this.byKey.has(key)) this.byKey.set(key, new LiveRank(one.job, one.rank));
    return [key, this.byKey.get(key)];
  }

  // The ranks of an event. `at` turns its times into seconds of the page.
  take(update, at) {
    // Another daemon counts anew.
    if (this.started !== update.started_unix_nano) {
      this.byKey.clear();
      Object.assign(this, { firstId: Infinity, lastId: -1, since: Infinity, past: null, started: update.started_unix_nano });
    }
    let last = this.lastId, first = Infinity;
    const present = new Set(), isFirst = this.lastId < 0;
    for (const one of update.ranks) {
      const [key, rank] = this.rankOf(one);
      present.add(key);
      if (one.gpus.length) rank.gpus = one.gpus;
      rank.step = one.step;
      rank.open = one.open.map((span) => ({ begin: at(span.begin_us), step: span.step ?? NaN, of: kindOf(span.kind, span.name) }));
      for (const span of one.spans) {
        if (span.id <= this.lastId) continue;
        last = Math.max(last, span.id);
        first = Math.min(first, span.id);
        // The first event's spans begin somewhere: what ended before is requested.
        if (isFirst) this.since = Math.min(this.since, at(span.end_us));
        rank.spans.push(at(span.begin_us), at(span.end_us), span.step ?? NaN, span.peak_bytes ?? NaN, kindOf(span.kind, span.name));
      }
    }
    if (isFirst && this.since === Infinity) this.since = at(0);
    this.firstId = Math.min(this.firstId, first);
    this.lastId = Math.max(last, this.lastId);
    for (const [key, rank] of this.byKey) if (!present.has(key)) rank.open = [];
    const most = Math.floor(MOST_SPANS / Math.max(this.byKey.size, 1));
    for (const rank of this.byKey.values()) {
      if (rank.spans.count > most) {
        rank.forget(most);
        this.since = Math.max(this.since, rank.spans.end[0]);
      }
    }
  }

  // Whether spans of a view are missing.
  lacks(from, to) {
    return from < this.since && !(this.past && this.past.from <= from && this.past.to >= Math.min(to, this.since) && (!this.past.leftOut || this.past.width <= 4 * (to - from)));
  }

  // Requests what a view lacks, with as much again around it.
  async refine(from, to) {
    const margin = (to - from) / 2, begin = from - margin, end = Math.min(to + margin, this.since);
    const answer = await this.load(begin, end);
    if (!answer) return;
    const { ranks, at, leftOut } = answer;
    for (const rank of this.byKey.values()) rank.past = null;
    for (const one of ranks) {
      const rank = this.rankOf(one)[1];
      rank.past = new Spans();
      for (const span of one.spans) {
        // Those that the stream has brought are there already.
        if (span.id < this.firstId) rank.past.push(at(span.begin_us), at(span.end_us), span.step ?? NaN, span.peak_bytes ?? NaN, kindOf(span.kind, span.name));
      }
    }
    this.past = { from: begin, to: end, width: end - begin, leftOut };
  }

  // Drops ranks of which nothing is left in the time that is kept.
  forget(oldest) {
    for (const [key, rank] of this.byKey) {
      const { spans } = rank;
      if (!rank.open.length && !rank.past?.count && (!spans.count || spans.end[spans.count - 1] < oldest)) this.byKey.delete(key);
    }
  }

  list() {
    return [...this.byKey.values()].sort((a, b) => a.job < b.job ? -1 : a.job > b.job ? 1 : a.rank - b.rank);
  }
}
