"use strict";
// Memory of one GPU as the page knows it: all that the daemon keeps, thinned; the part in view, as fine as is drawn; and
// every change since the page was opened.

// Changes that are kept as they come: a minute of a GPU whose memory changes with every reading.
const MOST_TAIL = 60000;
// Points of everything that the daemon keeps.
const OVERVIEW_POINTS = 4000;

// The age at which the newest reading no longer counts as the present value, seconds.
const SILENT = 1;
// How long to wait after a request that failed, milliseconds.
const RETRY_MS = 2000;

// Changes as they come.
class Tail extends Curve {
  constructor() {
    super(new Float64Array(1024), new Float64Array(1024), -Infinity);
    this.count = 0;
    this.highest = null;
  }

  push(at, used) {
    if (this.count === this.times.length) this.grow();
    this.times[this.count] = at;
    this.used[this.count++] = used;
    if (this.highest === null ? !Number.isNaN(used) : used > this.highest[0]) this.highest = [used, at];
  }

  grow() {
    if (this.count >= MOST_TAIL) {
      const half = this.count >> 1;
      for (const list of [this.times, this.used]) list.copyWithin(0, half, this.count);
      this.count -= half;
      this.trimmed = true;
      return;
    }
    for (const name of ["times", "used"]) {
      const longer = new Float64Array(Math.min(this.count * 2, MOST_TAIL));
      longer.set(this[name]);
      this[name] = longer;
    }
  }

  peak() { return this.highest; }
}

class Memory {
  // `load(from, to, points)` requests a Curve of an interval; null for everything that is kept. `trouble`: why the last
  // request failed; null if it did not.
  constructor(load) {
    Object.assign(this, { load, overview: null, detail: null, oldest: -Infinity, present: -Infinity, best: null, retry: -Infinity, trouble: null });
    // Parts of before what the daemon keeps, from captures: { from, to, curve }, by the capture's name.
    this.archive = new Map();
    this.tail = new Tail();
  }

  get begin() { return Math.min(this.overview?.begin ?? Infinity, this.tail.begin, ...[...this.archive.values()].map(({ from }) => from)); }
  get end() { return this.tail.end; }
  // How many parts of the past are here: what is drawn of it changes with them.
  get parts() { return [this.overview, ...[...this.archive.values()].map(({ curve }) => curve)].filter(Boolean).length; }

  // What an event says: changes until a time. The first point is the value that held when the last event ended. `present`
  // is the event's own time, which goes on where a GPU does not answer.
  take(points, until, present) {
    this.present = present;
    if (!points.length) return;
    const { tail } = this;
    // Something between this event and the last is missing: what follows has a beginning of its own.
    if (tail.count && points[0][0] > tail.end + 0.002) {
      this.tail = new Tail();
      this.overview = null;
    }
    for (const [at, used] of points) {
      if (this.tail.count && at <= this.tail.end) continue;
      this.tail.push(at, used ?? NaN);
    }
    this.tail.end = Math.max(this.tail.end, until);
    if (this.tail.trimmed) { this.tail.trimmed = false; this.overview = null; }
  }

  // What holds before the tail: the part in view if it covers the interval, or else everything.
  base(from, to) {
    const { detail, overview, tail } = this;
    return detail && detail.from <= from && detail.to >= Math.min(to, tail.begin) ? detail : overview;
  }

  // From when on the page has what the daemon keeps. Before, captures may have something.
  get edge() { return Math.max(this.oldest, Math.min(this.overview?.begin ?? Infinity, this.tail.begin)); }

  // The loaded parts of captures that overlap an interval, before the edge.
  archived(from, to) { return [...this.archive.values()].filter((part) => part.curve && part.from < Math.min(to, this.edge) && part.to > from); }

  extremes(from, to) {
    const { edge } = this, parts = from < edge ? this.archived(from, to) : [];
    if (!parts.length) return this.kept(from, to);
    const all = to > edge ? [this.kept(edge, to)] : [];
    for (const { from: first, to: last, curve } of parts) all.push(curve.extremes(Math.max(from, first), Math.min(to, last, edge)));
    return { least: Math.min(...all.map(({ least }) => least)), most: Math.max(...all.map(({ most }) => most)), gap: all.some(({ gap }) => gap) };
  }

  kept(from, to) {
    const { tail } = this;
    if (from >= tail.begin) return tail.extremes(from, to);
    const base = this.base(from, to) ?? { extremes: () => ({ least: Infinity, most: -Infinity, gap: true }) };
    const before = base.extremes(from, Math.min(to, tail.begin));
    if (to <= tail.begin) return before;
    const after = tail.extremes(tail.begin, to);
    return { least: Math.min(before.least, after.least), most: Math.max(before.most, after.most), gap: before.gap || after.gap };
  }

  bucketAt(at) { const [part] = at < this.edge ? this.archived(at, at + 1e-6) : []; return part ? part.curve.bucket : at >= this.tail.begin ? 0 : this.base(at, at)?.bucket ?? 0; }

  // The newest reading; NaN if there is none, or it is older than a second.
  now() { return this.tail.count && this.present - this.tail.end < SILENT ? this.tail.used[this.tail.count - 1] : NaN; }

  // The highest value that is kept, and when it was read. What is held since before the oldest time counts from then on.
  peak() {
    const { best, tail, overview } = this, newest = tail.peak();
    // Of what is not loaded the highest value is not known.
    if (!overview && this.oldest < tail.begin) return null;
    const isKnown = best && best.at[1] >= this.oldest && best.overview === overview && !(newest && newest[0] > best.at[0]);
    if (isKnown) return best.at;
    let at = null;
    for (const curve of [overview, tail]) {
      for (let i = 0; curve && i < curve.count; i++) {
        const until = i + 1 < curve.count ? curve.times[i + 1] : curve.end;
        if (until >= this.oldest && curve.used[i] > (at?.[0] ?? -1)) at = [curve.used[i], Math.max(curve.times[i], this.oldest)];
      }
    }
    this.best = at && { at, overview };
    return at;
  }

  *gaps(from, to) {
    const { tail } = this;
    const base = this.base(from, to);
    if (base && from < tail.begin) {
      for (const gap of base.gaps(from, Math.min(to, tail.begin))) yield { from: gap.from, to: Math.min(gap.to, tail.begin) };
    }
    yield* tail.gaps(Math.max(from, tail.begin), to);
    // A GPU that no longer answers has a gap after its last reading.
    if (this.present - tail.end > SILENT) yield { from: tail.end, to: this.present };
  }

  // Whether a view has less than it could: nothing yet, or points that are further apart than two pixels.
  lacks(from, to, pixel) {
    const begin = Math.max(from, this.oldest);
    if (begin >= this.tail.begin || begin >= to) return false;
    const base = this.base(begin, to);
    return !base || base.bucket > 2 * pixel;
  }

  // Whether something is to be requested, and the last request did not fail just now.
  wants(from, to, pixel) { return performance.now() > this.retry && (!this.overview || this.lacks(from, to, pixel)); }

  // A request that fails is repeated after a while, and the page says why it lacks something.
  async request(from, to, points) {
    try {
      const curve = await this.load(from, to, points);
      this.trouble = null;
      return curve;
    } catch (error) {
      this.trouble = error.message;
      this.retry = performance.now() + RETRY_MS;
      return null;
    }
  }

  // Requests what a view lacks, with as much again around it.
  async refine(from, to, pixel) {
    this.overview ??= await this.request(null, null, OVERVIEW_POINTS);
    if (!this.overview || !this.lacks(from, to, pixel)) return;
    const margin = (to - from) / 4, begin = from - margin, end = Math.min(to + margin, this.tail.end);
    // Nothing of it is kept.
    if (end < this.oldest) return;
    // Six points at most are kept of each interval.
    const points = Math.ceil((end - begin) / (2 * pixel)) * 6 + 7;
    const curve = await this.request(begin, end, Math.min(points, 100000));
    if (curve) this.detail = Object.assign(curve, { from: begin, to: end });
  }

  // What a view should show and does not, as a sentence that `name` and the `axis` complete; null if nothing.
  missing(from, name, axis) {
    if (this.tail.begin === Infinity || from >= this.tail.begin) return null;
    if (!this.overview) {
      const before = `Memory of ${name} before ${axis.moment(this.tail.begin).slice(0, 8)}`;
      return this.trouble ? `${before} could not be loaded: ${this.trouble}. The page tries again.` : `${before} is being loaded.`;
    }
    return this.trouble ? `Details of ${name} could not be loaded: ${this.trouble}. The page tries again.` : null;
  }
}
