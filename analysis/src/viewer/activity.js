"use strict";
// What one GPU did over time: shares of the time before each reading.

// A reading says something of at most this much of the time before it, seconds, unless readings are further apart.
const READING_HOLDS = 1.5;

class Activity {
  // points: [seconds, busy, multiprocessors, tensor cores, memory], in order; null is not known
  constructor(points = []) { this.points = points; }

  // Whether anything of it is known.
  get isKnown() { return this.points.some(([, ...shares]) => shares.some((share) => share !== null)); }

  // For how long a reading holds: means of a long recording are further apart than its readings.
  get holds() {
    const { points } = this, last = points.length - 1;
    return last > 0 ? Math.max(READING_HOLDS, 3 * (points[last][0] - points[0][0]) / last) : READING_HOLDS;
  }

  // The means of an interval, in the order of the points' shares, null where not known; null if nothing is.
  mean(from, to) {
    const { points, holds } = this, sums = [0, 0, 0, 0], counts = [0, 0, 0, 0];
    let first = 0, end = points.length;
    while (first < end) { const middle = (first + end) >> 1; if (points[middle][0] <= from) first = middle + 1; else end = middle; }
    for (let i = first; i < points.length; i++) {
      // A later one is about the time before it: it counts if none lies in the interval.
      const isLater = points[i][0] > to;
      if (isLater && (i > first || points[i][0] - to > holds)) break;
      for (let nth = 0; nth < 4; nth++) {
        if (points[i][nth + 1] === null) continue;
        sums[nth] += points[i][nth + 1];
        counts[nth]++;
      }
      if (isLater) break;
    }
    return counts.some((count) => count) ? sums.map((sum, nth) => counts[nth] ? sum / counts[nth] : null) : null;
  }
}
