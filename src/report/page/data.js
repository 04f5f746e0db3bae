"use strict";
// The numbers of the chart: packed by report/packed.rs as unsigned LEB128 numbers, gzip, base64.

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Numbers {
  constructor(bytes) { this.bytes = bytes; this.at = 0; }
  // Sums instead of shifts: bytes of memory and microseconds of days have more than 32 bits.
  next() {
    let value = 0, scale = 1, byte;
    do {
      if (this.at >= this.bytes.length) throw new Error("the page's data end early");
      byte = this.bytes[this.at++];
      value += (byte & 127) * scale;
      scale *= 128;
    } while (byte > 127);
    return value;
  }
  // 0, -1, 1, -2, ... as 0, 1, 2, 3, ...
  signed() { const n = this.next(); return n % 2 ? -(n + 1) / 2 : n / 2; }
}

// Adds to every GPU `times` (seconds from the begin) and `used` (bytes, NaN where unknown), and to every recording its
// spans, as columns.
function decode(bytes, recordings) {
  const numbers = new Numbers(bytes);
  for (const recording of recordings) {
    for (const gpu of recording.gpus) {
      gpu.times = new Float64Array(gpu.points);
      gpu.used = new Float64Array(gpu.points);
      for (let i = 0, at = 0; i < gpu.points; i++) gpu.times[i] = (at += numbers.next()) / 1e6;
      for (let i = 0, used = 0; i < gpu.points; i++) {
        const change = numbers.next();
        if (change === 0) { gpu.used[i] = NaN; continue; }
        const n = change - 1;
        used += n % 2 ? -(n + 1) / 2 : n / 2;
        gpu.used[i] = used * gpu.unit_bytes;
      }
    }
    const n = recording.spans;
    const columns = { begin: new Float64Array(n), end: new Float64Array(n), row: new Uint32Array(n),
      step: new Float64Array(n), peak: new Float64Array(n) };
    for (let i = 0, at = 0; i < n; i++) columns.begin[i] = (at += numbers.signed()) / 1e6;
    for (let i = 0; i < n; i++) columns.end[i] = columns.begin[i] + numbers.next() / 1e6;
    for (let i = 0; i < n; i++) columns.row[i] = numbers.next();
    for (let i = 0, step = 0; i < n; i++) {
      const change = numbers.next();
      if (change === 0) { columns.step[i] = NaN; continue; }
      step += (change - 1) % 2 ? -change / 2 : (change - 1) / 2;
      columns.step[i] = step;
    }
    for (let i = 0; i < n; i++) { const peak = numbers.next(); columns.peak[i] = peak ? (peak - 1) * 65536 : NaN; }
    recording.columns = columns;
  }
}

// The last position whose value is at most `value`; -1 if there is none. `list` rises.
function atMost(list, value) {
  let low = 0, high = list.length;
  while (low < high) { const middle = (low + high) >> 1; if (list[middle] <= value) low = middle + 1; else high = middle; }
  return low - 1;
}

// The least and the most of a curve within [from, to), and whether all and whether any of it is known. The value that
// holds at `from` counts.
function extremes(times, used, from, to) {
  let least = Infinity, most = -Infinity, gap = false;
  let at = atMost(times, from);
  if (at < 0) { gap = true; at = 0; if (!(times[0] < to)) return { least, most, gap }; }
  for (; at < times.length && (times[at] < to || times[at] <= from); at++) {
    const value = used[at];
    // What ends at `from` itself does not hold inside.
    if (at + 1 < times.length && times[at + 1] <= from) continue;
    if (Number.isNaN(value)) { gap = true; continue; }
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return { least, most, gap };
}

function gib(bytes) {
  if (bytes === null || Number.isNaN(bytes)) return "not known";
  const mib = bytes / 1048576;
  return Math.abs(mib) >= 1024 ? (mib / 1024).toFixed(2) + " GiB" : mib.toFixed(2) + " MiB";
}

function duration(seconds) {
  if (seconds === null || Number.isNaN(seconds)) return "not known";
  if (seconds < 0) return "-" + duration(-seconds);
  if (seconds === 0) return "0 s";
  // Rounded first, so that nothing is 1000 ms or 60 s.
  if (Math.round(seconds * 1e6) < 1000) return Math.round(seconds * 1e6) + " µs";
  if (Math.round(seconds * 1e4) < 10000) return (seconds * 1e3).toFixed(1) + " ms";
  const milliseconds = Math.round(seconds * 1e3);
  if (milliseconds < 120000) return (milliseconds / 1e3).toFixed(3) + " s";
  return Math.floor(milliseconds / 60000) + " min " + (milliseconds % 60000 / 1e3).toFixed(3) + " s";
}
