"use strict";
// Who held the memory of one GPU, as the page knows it: what the daemon keeps, requested again while it is shown.

// The daemon adds a point each second at most.
const BREAKDOWN_EVERY_MS = 2000;

class LiveBreakdown {
  // `load(from)` requests points from a time on, in seconds, with the one that holds then; null for all that the daemon keeps.
  constructor(load) { Object.assign(this, { load, points: [], holders: null, next: -Infinity }); }

  async refine() {
    const now = performance.now();
    if (now < this.next) return;
    this.next = now + BREAKDOWN_EVERY_MS;
    try {
      const last = this.points.at(-1)?.[0] ?? null, loaded = await this.load(last === null ? null : last + 0.001);
      // The clock may have been set back, and the daemon started anew.
      if (last !== null && !(Math.abs(loaded[0]?.[0] - last) < 0.001)) { this.points = []; this.holders = null; return; }
      this.points = last === null ? loaded : [...this.points, ...loaded.slice(1)].slice(-MOST_BREAKDOWNS);
      if (last === null || loaded.length > 1) this.holders = breakdownOf(this.points);
    } catch { /* The next time may do. */ }
  }
}

// As many as the daemon keeps.
const MOST_BREAKDOWNS = 1200;
