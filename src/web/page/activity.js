"use strict";
// What one GPU does, as the page knows it: what the daemon keeps, and each reading since the page was opened.

// Readings that are kept: a quarter of an hour, ten a second.
const MOST_READINGS = 9000;

class LiveActivity extends Activity {
  // `load()` requests what the daemon keeps, as points.
  constructor(load) {
    super();
    Object.assign(this, { load, isLoaded: false, retry: -Infinity });
  }

  // The reading of an event; one that is not newer than the last is that one again.
  take(at, shares) {
    if (this.points.length && at <= this.points[this.points.length - 1][0]) return;
    this.points.push([at, ...shares]);
    if (this.points.length > MOST_READINGS) this.points.splice(0, MOST_READINGS / 2);
  }

  // Requests what was before the first event, once. A request that fails is repeated after a while.
  async refine() {
    if (this.isLoaded || performance.now() < this.retry) return;
    this.isLoaded = true;
    try {
      const before = await this.load(), first = this.points[0]?.[0] ?? Infinity;
      this.points = [...before.filter(([at]) => at < first), ...this.points];
    } catch {
      this.isLoaded = false;
      this.retry = performance.now() + RETRY_MS;
    }
  }
}
