"use strict";
// Bytes, durations and times as text.

function gib(bytes) {
  if (bytes === null || bytes === undefined || Number.isNaN(bytes)) return "not known";
  const mib = bytes / 1048576;
  return Math.abs(mib) >= 1024 ? (mib / 1024).toFixed(2) + " GiB" : mib.toFixed(2) + " MiB";
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "not known";
  if (seconds < 0) return "-" + duration(-seconds);
  if (seconds === 0) return "0 s";
  // Rounded before the unit is chosen, so that neither 1000.0 ms nor 1 min 60.000 s appears.
  if (Math.round(seconds * 1e6) < 1000) return Math.round(seconds * 1e6) + " µs";
  if (Math.round(seconds * 1e4) < 10000) return (seconds * 1e3).toFixed(1) + " ms";
  const milliseconds = Math.round(seconds * 1e3);
  if (milliseconds < 120000) return (milliseconds / 1e3).toFixed(3) + " s";
  return Math.floor(milliseconds / 60000) + " min " + (milliseconds % 60000 / 1e3).toFixed(3) + " s";
}

// How a chart writes its times. `moment` names one time exactly, `tick` labels an axis with `digits` decimals of a second,
// `after` says when something was, `length` how long something is where that is no duration.
const SECONDS = {
  moment: (seconds) => `${seconds.toFixed(6)} s`,
  tick: (seconds, digits) => `${seconds.toFixed(digits)} s`,
  after: (seconds) => `after ${duration(seconds)}`,
};
const READINGS = {
  moment: (seconds) => `reading ${Math.floor(seconds * 1000)}`,
  tick: (seconds) => (seconds * 1000).toFixed(0),
  after: (seconds) => `at reading ${Math.floor(seconds * 1000)}`,
  length: (seconds) => `${Math.round(seconds * 1000)} readings`,
};

// The wall clock of the reader's time zone, for seconds after a Unix time in milliseconds.
function clock(originMs) {
  const text = (seconds, digits) => {
    // Rounded first, so that no time is 59.9996 s and shown as 60.
    const scale = 10 ** digits, all = Math.round((originMs / 1e3 + seconds) * scale) / scale, whole = Math.floor(all);
    const date = new Date(whole * 1000), two = (number) => String(number).padStart(2, "0");
    const part = digits ? (all - whole).toFixed(digits).slice(1) : "";
    return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}${part}`;
  };
  return { moment: (seconds) => text(seconds, 6), tick: (seconds, digits) => text(seconds, digits),
    after: (seconds) => `at ${text(seconds, 3)}`, day: (seconds) => new Date(originMs + seconds * 1e3).toLocaleDateString("sv"), isClock: true };
}
