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

// The records of a layer profile, one array each: the name's position in `layer_names`, "forward" or "backward", seconds from
// the begin, and then bytes, null where unknown: allocated, reserved, growth, activations, parameters, gathered, gathered_sum;
// and at last the duration in nanoseconds.
function layerRecords(numbers, count) {
  const column = (read) => Array.from({ length: count }, read);
  const changes = () => {
    let last = 0;
    return column(() => {
      const change = numbers.next();
      if (change === 0) return null;
      return (last += (change - 1) % 2 ? -change / 2 : (change - 1) / 2);
    });
  };
  const optional = () => column(() => { const number = numbers.next(); return number ? number - 1 : null; });
  const names = column(() => numbers.next());
  const backward = column(() => numbers.next());
  let at = 0;
  const times = column(() => (at += numbers.signed()) / 1e6);
  const allocated = changes(), reserved = changes(), gatheredSum = changes();
  const growth = optional().map((n) => (n === null ? null : n % 2 ? -(n + 1) / 2 : n / 2));
  const activations = optional(), parameters = optional(), gathered = optional(), duration = optional();
  return names.map((name, i) => [name, backward[i] ? "backward" : "forward", times[i], allocated[i], reserved[i], growth[i],
    activations[i], parameters[i], gathered[i], gatheredSum[i], duration[i]]);
}

// What a GPU did: seconds from the begin, and four shares, null where not known.
function activityPoints(numbers, count) {
  let at = 0;
  const points = Array.from({ length: count }, () => [(at += numbers.next()) / 1e6]);
  for (let nth = 0; nth < 4; nth++) {
    for (const point of points) { const share = numbers.next(); point.push(share ? (share - 1) / 1e3 : null); }
  }
  return points;
}

// Who held a GPU's memory: seconds from the begin, and the bytes of each part, null where not known.
function breakdownPoints(numbers, count) {
  let at = 0;
  const points = Array.from({ length: count }, () => [(at += numbers.next()) / 1e6]);
  for (let nth = 0; nth < MEMORY_PARTS.length; nth++) {
    let mib = 0;
    for (const point of points) {
      const change = numbers.next();
      if (change) mib += (change - 1) % 2 ? -change / 2 : (change - 1) / 2;
      point.push(change ? mib * 1048576 : null);
    }
  }
  return points;
}

// Adds to every GPU `times` (seconds from the begin), `used` (bytes, NaN where unknown), `activity` and `breakdown`, and to every recording its
// spans, as columns, and to every layer profile its records.
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
      gpu.activity = new Activity(activityPoints(numbers, gpu.activity_points));
      gpu.breakdown = breakdownOf(breakdownPoints(numbers, gpu.breakdown_points));
    }
    const n = recording.spans;
    const columns = { begin: new Float64Array(n), end: new Float64Array(n), row: new Uint32Array(n),
      step: new Float64Array(n), peak: new Float64Array(n), open: new Uint8Array(n) };
    for (let i = 0, at = 0; i < n; i++) columns.begin[i] = (at += numbers.signed()) / 1e6;
    for (let i = 0; i < n; i++) columns.end[i] = columns.begin[i] + numbers.next() / 1e6;
    for (let i = 0; i < n; i++) {
      const packed = numbers.next();
      [columns.row[i], columns.open[i]] = [Math.floor(packed / 4), packed % 4];
    }
    for (let i = 0, step = 0; i < n; i++) {
      const change = numbers.next();
      if (change === 0) { columns.step[i] = NaN; continue; }
      step += (change - 1) % 2 ? -change / 2 : (change - 1) / 2;
      columns.step[i] = step;
    }
    for (let i = 0; i < n; i++) { const peak = numbers.next(); columns.peak[i] = peak ? (peak - 1) * 65536 : NaN; }
    recording.columns = columns;
    for (const profile of recording.profiles) profile.records = layerRecords(numbers, profile.count);
  }
}
