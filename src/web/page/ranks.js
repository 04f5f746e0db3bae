"use strict";
// Steps and phases of the ranks: those that the stream brings, and those of before, which are requested for the part of
// time that is in view.

// Spans that are kept as they come, over all ranks.
const MOST_SPANS = 60000;
// Names of phases that have a color.
const MOST_NAMES = 1000;

const kinds = new Map();
// The kind, name and color that spans share.
function kindOf(kind, name) {
  const key = `${kind} ${name}`;
  // Jobs come and go, and so do the names of their phases.
  if (kinds.size > MOST_NAMES) { kinds.clear(); tones.clear(); }
  if (!kinds.has(key)) kinds.set(key, { kind, name, tone: toneOf(name) });
  return kinds.get(key);
}

// Spans of one rank, in the order of their begins.
class Spans {
  constructor() {
    this.columns = { begin: [], end: [], step: [], peak: [], of: [], open: [], id: [] };
    this.longest = 0;
  }

  get count() { return this.columns.begin.length; }

  // Spans come about in the order of their ends.
  push(begin, end, step, peak, of, open = 0, id = -1) {
    const { columns } = this;
    let at = this.count;
    while (at > 0 && columns.begin[at - 1] > begin) at--;
    const values = { begin, end, step, peak, of, open, id }, isLast = at === this.count;
    for (const [name, value] of Object.entries(values)) {
      if (isLast) columns[name].push(value); else columns[name].splice(at, 0, value);
    }
    this.longest = Math.max(this.longest, end - begin);
  }

  // Adds one as the daemon sends it; `at` turns its times into seconds of the page.
  take(span, at) {
    this.push(at(span.begin_us), at(span.end_us), span.step ?? NaN, span.peak_bytes ?? NaN, kindOf(span.kind, span.name), span.cut ? CUT : 0, span.id);
  }

  forget(less) { for (const column of Object.values(this.columns)) column.splice(0, less); }

  // A copy of those that may be in an interval: the longest span bounds how far back one can begin.
  within(from, to) {
    const copy = new Spans(), { begin } = this.columns;
    const first = Math.max(atMost(begin, from - this.longest), 0), last = atMost(begin, to) + 1;
    for (const name of Object.keys(this.columns)) copy.columns[name] = this.columns[name].slice(first, last);
    copy.longest = this.longest;
    return copy;
  }
}

class LiveRank {
  constructor(job, id, rank) { Object.assign(this, { job, id, rank, gpus: [], step: null, open: [], spans: new Spans(), past: null }); }

  forget(most) {
    // A quarter at once, so that it is seldom.
    if (this.spans.count > most) this.spans.forget(this.spans.count - Math.floor(most * 0.75));
  }

  get whose() { return { key: `${this.rank} ${this.id}`, job: this.id, jobName: this.job, rank: this.rank, gpus: this.gpus }; }

  // What the page has of an interval: spans of before, and those that came.
  between(from, to) {
    const came = this.spans.within(from, to);
    if (!this.past) return came;
    const all = this.past.within(from, to), { begin, end, step, peak, of, open } = came.columns;
    for (let i = 0; i < begin.length; i++) all.push(begin[i], end[i], step[i], peak[i], of[i], open[i]);
    return all;
  }

  // What is in a view as a lane, with open spans until `now`.
  lane([from, to], now, severalJobs) {
    const all = this.between(from, to);
    for (const one of this.open) all.push(one.begin, Math.max(now, one.begin), one.step, NaN, one.of, OPEN);
    return new Lane(`${this.job} rank ${this.rank}`, `${severalJobs ? `${this.job.slice(0, 7)} ` : "rank "}${this.rank}`, all.columns, this.whose);
  }
}

class Ranks {
  // `load(from, to, shown)` requests what is kept of an interval, of some ranks.
  constructor(load) { Object.assign(this, { load, byKey: new Map(), started: null, isNewStream: true, retry: -Infinity }); this.reset(); }

  // Forgets all spans: what follows has no connection to them, or belongs to another daemon.
  reset() {
    for (const rank of this.byKey.values()) Object.assign(rank, { spans: new Spans(), past: null });
    Object.assign(this, { lastId: -1, since: Infinity, past: null });
  }

  rankOf(one) {
    const key = `${one.rank} ${one.id}`;
    if (!this.byKey.has(key)) this.byKey.set(key, new LiveRank(one.job, one.id, one.rank));
    return [key, this.byKey.get(key)];
  }

  // The ranks of an event. `at` turns its times into seconds of the page.
  take(update, at) {
    // Another daemon counts anew.
    if (this.started !== update.started_unix_nano) { this.byKey.clear(); this.reset(); this.started = update.started_unix_nano; }
    // A stream's first event has only the last spans. If some before them are missing, all known ones are dropped and requested.
    const ids = update.ranks.flatMap(({ spans }) => spans.map(({ id }) => id));
    if (this.isNewStream && this.lastId >= 0 && ids.length && ids.reduce((least, id) => Math.min(least, id)) > this.lastId + 1) this.reset();
    this.isNewStream = false;
    let last = this.lastId;
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
        // The first event's spans begin somewhere: what ended before is requested.
        if (isFirst) this.since = Math.min(this.since, at(span.end_us));
        rank.spans.take(span, at);
      }
    }
    if (isFirst && this.since === Infinity) this.since = at(0);
    this.lastId = Math.max(last, this.lastId);
    for (const [key, rank] of this.byKey) if (!present.has(key)) rank.open = [];
    const all = [...this.byKey.values()], most = Math.floor(MOST_SPANS / Math.max(all.length, 1));
    if (all.reduce((sum, { spans }) => sum + spans.count, 0) <= MOST_SPANS) return;
    for (const rank of all.filter(({ spans }) => spans.count > most)) {
      rank.forget(most);
      this.since = Math.max(this.since, rank.spans.columns.end[0]);
    }
  }

  // Whether spans of a view are missing, of these ranks.
  lacks(from, to, shown) {
    const has = !this.past?.isThinned || shown.every((rank) => this.past.shown.has(rank));
    return from < to && from < this.since && performance.now() > this.retry && !(has && this.past && this.past.from <= from && this.past.to >= Math.min(to, this.since) && (!this.past.leftOut || this.past.width <= 4 * (to - from)));
  }

  // Requests what a view lacks, with as much again around it.
  async refine(from, to, shown) {
    const margin = (to - from) / 2, begin = from - margin, end = Math.max(begin, Math.min(to + margin, this.since));
    const answer = await this.load(begin, end, shown);
    if (!answer) { this.retry = performance.now() + RETRY_MS; return; }
    const { ranks, leftOut, isThinned } = answer;
    for (const rank of this.byKey.values()) rank.past = null;
    for (const one of ranks) {
      const rank = this.rankOf(one)[1];
      const known = new Set(rank.spans.columns.id);
      rank.past = new Spans();
      for (const span of one.spans) {
        // Those that the stream has brought are there already.
        if (!known.has(span.id)) rank.past.take(span, one.at);
      }
    }
    this.past = { from: begin, to: end, width: end - begin, leftOut, isThinned, shown: new Set(shown) };
  }

  // Drops ranks of which nothing is left in the time that is kept.
  forget(oldest) {
    for (const [key, rank] of this.byKey) {
      const { spans } = rank;
      if (!rank.open.length && !rank.past?.count && (!spans.count || spans.columns.end[spans.count - 1] < oldest)) this.byKey.delete(key);
    }
  }

  list() {
    return [...this.byKey.values()].sort((a, b) => a.id < b.id ? -1 : a.id > b.id ? 1 : a.rank - b.rank);
  }
}
