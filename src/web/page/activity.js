"use strict";
// What one GPU does, as the page knows it: what the daemon keeps, and a reading of each event since the page was opened.

// Readings that are kept: half an hour of events.
const MOST_READINGS = 9000;

class LiveActivity extends Activity {
  // `load()` requests what the daemon keeps, as points.
  constructor(load) {
    super();
    Object.assign(this, { load, isLoaded: false, retry: -Infinity });
  }

  // The reading of an event; one that is not newer than the last is that one again. What an event has not brought, because the page
  // was out of sight or the clock was set back, is requested anew.
  take(at, shares) {
    const last = this.points.at(-1)?.[0] ?? -Infinity, isKnown = hasShare([at, ...shares]);
    if (at < last - READING_HOLDS) Object.assign(this, { points: [], isLoaded: false });
    else if (at <= last || !(isKnown || this.isKnown)) return;
    else if (at > last + this.holds && last > -Infinity) this.isLoaded = false;
    this.isKnown ||= isKnown;
    this.points.push([at, ...shares]);
    if (this.points.length > MOST_READINGS) this.points.splice(0, MOST_READINGS / 2);
  }

  // Requests what the events have not brought, once. A request that fails is repeated after a while.
  async refine() {
    if (this.isLoaded || performance.now() < this.retry) return;
    this.isLoaded = true;
    try {
      const loaded = await this.load(), first = loaded[0]?.[0] ?? Infinity, end = loaded.at(-1)?.[0] ?? -Infinity;
      // What was loaded is finer than what events bring.
      this.points = [...this.points.filter(([at]) => at < first), ...loaded, ...this.points.filter(([at]) => at > end)];
      this.isKnown = this.points.some(hasShare);
      this.holds = holdsOf(loaded);
    } catch {
      this.isLoaded = false;
      this.retry = performance.now() + RETRY_MS;
    }
  }
}
