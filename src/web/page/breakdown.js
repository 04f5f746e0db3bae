"use strict";
// Who held the memory of one GPU, as the page knows it: what the daemon keeps, requested again while it is shown.

// The daemon adds a point each second at most.
const BREAKDOWN_EVERY_MS = 2000;

class LiveBreakdown {
  // `load(from)` requests points from a time on, in seconds, with the one that holds then; null for all that the daemon keeps.
  constructor(load) { Object.assign(this, { load, points: [], holders: null, next: -Infinity, isLoading: false }); }

  async refine() {
    const now = performance.now();
    if (now < this.next || this.isLoading) return;
    this.next = now + BREAKDOWN_EVERY_MS;
    this.isLoading = true;
    try {
      const last = this.points.at(-1)?.[0] ?? null, loaded = await this.load(last === null ? null : last + 0.001);
      // The clock may have been set back, and the daemon started anew.
      if (last !== null && !(Math.abs(loaded[0]?.[0] - last) < 0.001)) { this.points = []; this.holders = null; return; }
      this.points = last === null ? loaded : [...this.points, ...loaded.slice(1)].slice(-MOST_BREAKDOWNS);
      if (last === null || loaded.length > 1) this.holders = breakdownOf(this.points);
    } catch { /* The next time may do. */ }
    finally { this.isLoading = false; }
  }
}

// As many as the daemon keeps.
const MOST_BREAKDOWNS = 1200;

// What was asked for, and what would have fitted, in sentences; evidence is that of the finding.
function askedFor({ requested_bytes: asked, free_bytes: free, reserved_unallocated_bytes: kept, held_by_others_bytes: others }) {
  const said = [];
  if (asked !== undefined) said.push(`${gib(asked)} were asked for${free === undefined ? "." : `, and ${gib(free)} were free on the GPU.`}`);
  else if (free !== undefined) said.push(`${gib(free)} were free on the GPU.`);
  if (free !== undefined && kept !== undefined) said.push(`At most ${gib(Math.max(free, 0))} in a new segment would have fitted, or up to ${gib(free + kept)} if what the allocator kept were in one piece (expandable segments).`);
  if (free !== undefined && others !== undefined) said.push(`Without the other processes on the GPU it would have been ${gib(free + others)}.`);
  return said.join(" ");
}
