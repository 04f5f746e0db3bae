"use strict";
// What one GPU did over time: shares of the time before each reading.

// A reading says something of at most this much of the time before it, seconds, unless readings are further apart.
const READING_HOLDS = 1.5;

class Activity {
  // points: [seconds, busy, multiprocessors, tensor cores, memory], in order; null is not known
  constructor(points = []) {
    this.points = points;
    this.isKnown = points.some(hasShare);
    this.holds = holdsOf(points);
  }

  // The means of an interval, in the order of the points' shares, null where not known; null if nothing is. Each point counts for
  // as long as it is about: an idle GPU is read once a second, and others ten times.
  mean(from, to) {
    const { points, holds } = this, sums = [0, 0, 0, 0], times = [0, 0, 0, 0];
    let first = 0, end = points.length;
    while (first < end) { const middle = (first + end) >> 1; if (points[middle][0] <= from) first = middle + 1; else end = middle; }
    for (let i = first; i < points.length; i++) {
      const [at] = points[i], since = Math.max(i ? points[i - 1][0] : -Infinity, at - holds);
      if (since >= to && i > first) break;
      const time = Math.min(at, to) - Math.max(since, from);
      if (time > 0) {
        for (let nth = 0; nth < 4; nth++) {
          if (points[i][nth + 1] === null) continue;
          sums[nth] += points[i][nth + 1] * time;
          times[nth] += time;
        }
      }
      if (at >= to) break;
    }
    return times.some((time) => time > 0) ? sums.map((sum, nth) => times[nth] > 0 ? sum / times[nth] : null) : null;
  }
}

const hasShare = ([, ...shares]) => shares.some((share) => share !== null);

// For how long points hold: means of a long time are further apart than readings.
function holdsOf(points) {
  const apart = points.slice(1).map(([at], i) => at - points[i][0]).sort((one, other) => one - other);
  return Math.max(READING_HOLDS, 3 * (apart[apart.length >> 1] ?? 0));
}
