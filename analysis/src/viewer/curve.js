"use strict";
// Memory of one GPU over time, as steps: each value holds until the next one.

// The last position whose value is at most `value`; -1 if there is none. `list` rises.
function atMost(list, value, length = list.length) {
  let low = 0, high = length;
  while (low < high) { const middle = (low + high) >> 1; if (list[middle] <= value) low = middle + 1; else high = middle; }
  return low - 1;
}

class Curve {
  // `times` in seconds, rising; `used` in bytes, NaN where memory is not known. The last value holds until `end`.
  // `bucket`: the length of the intervals whose extremes are there, seconds; 0 if every change is.
  constructor(times, used, end, bucket = 0) { Object.assign(this, { times, used, end, bucket, count: times.length }); }

  get begin() { return this.count ? this.times[0] : Infinity; }

  // The least and the most within [from, to), and whether any of it is not known. The value that holds at `from`
  // counts.
  extremes(from, to) {
    const { times, used, count } = this;
    let least = Infinity, most = -Infinity, gap = false;
    if (!count || from > this.end) return { least, most, gap: true };
    let at = atMost(times, from, count);
    if (at < 0) { gap = true; at = 0; if (!(times[0] < to)) return { least, most, gap }; }
    for (; at < count && (times[at] < to || times[at] <= from); at++) {
      // What ends at `from` itself does not hold inside.
      if (at + 1 < count && times[at + 1] <= from) continue;
      const value = used[at];
      if (Number.isNaN(value)) { gap = true; continue; }
      if (value < least) least = value;
      if (value > most) most = value;
    }
    return { least, most, gap };
  }

  // How far apart the points around a time are at most, seconds; 0 where every change is there.
  bucketAt() { return this.bucket; }

  // The highest value and its time; null if no memory is known.
  peak() {
    let best = -1;
    for (let i = 0; i < this.count; i++) if (this.used[i] > (best < 0 ? -1 : this.used[best])) best = i;
    return best < 0 ? null : [this.used[best], this.times[best]];
  }

  // Where memory is not known within [from, to).
  *gaps(from, to) {
    for (let i = Math.max(0, atMost(this.times, from, this.count)); i < this.count && this.times[i] < to; i++) {
      if (!Number.isNaN(this.used[i])) continue;
      const until = i + 1 < this.count ? this.times[i + 1] : this.end;
      if (until > this.times[i]) yield { from: this.times[i], to: until };
    }
  }
}
