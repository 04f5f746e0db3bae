"use strict";
// What every chart on a canvas needs: the canvas in the screen's own pixels, the theme's colours, and an axis of bytes.

// Sizes the canvases, fills the first with the theme's background, and returns its drawing context. The background is not
// left transparent, so that the chart is also readable in print.
function fit(canvases, across, height, color) {
  const ratio = devicePixelRatio || 1, wide = Math.round(across * ratio), tall = Math.round(height * ratio);
  for (const canvas of canvases) {
    if (canvas.width !== wide) canvas.width = wide;
    if (canvas.height !== tall) canvas.height = tall;
    canvas.style.height = `${height}px`;
  }
  const pen = canvases[0].getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = color("--ground");
  pen.fillRect(0, 0, across, height);
  pen.font = "12px system-ui, sans-serif";
  return pen;
}

// The pen of a canvas that lies above another one, with nothing on it.
function cleared(canvas) {
  const pen = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  return pen;
}

// The colours of the theme as it is now, by their names.
function palette() {
  const style = getComputedStyle(document.documentElement), known = new Map();
  return (name) => {
    if (!known.has(name)) known.set(name, style.getPropertyValue(name).trim());
    return known.get(name);
  };
}

// Lines across a plot at round numbers of bytes from `low` to `high`, some `about` of them, with their labels on the left.
// `y`: where some bytes are; `largest`: the number that decides on the unit; `lowest`: the number from which on lines have a label.
function byteAxis(pen, color, [low, high], about, largest, width, y, lowest = -Infinity) {
  const isLarge = largest >= 2 ** 31, scale = isLarge ? 2 ** 30 : 2 ** 20, every = round(((high - low) || 1) / scale / about) * scale;
  const digits = Math.max(0, Math.min(4, Math.ceil(-Math.log10(every / scale) - 1e-9)));
  pen.strokeStyle = color("--line");
  pen.fillStyle = color("--dim");
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let at = Math.ceil(low / every) * every; at <= high; at += every) {
    const line = Math.round(y(at)) + 0.5;
    pen.beginPath(); pen.moveTo(AXIS, line); pen.lineTo(AXIS + width, line); pen.stroke();
    if (at >= lowest) pen.fillText(`${(Math.abs(at) / scale).toFixed(digits)} ${isLarge ? "GiB" : "MiB"}`, AXIS - 6, line);
  }
}

// The same for an axis of what is free, with a line at every `every`-th power of four from 16 MiB on. `y`: where some free bytes are.
function freeAxis(pen, color, most, every, width, y) {
  pen.strokeStyle = color("--line");
  pen.fillStyle = color("--dim");
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let free = LEAST_FREE; free <= most; free *= 4 ** every) {
    const line = Math.round(y(free)) + 0.5, text = free >= 2 ** 30 ? `${free / 2 ** 30} GiB` : `${free / 2 ** 20} MiB`;
    pen.beginPath(); pen.moveTo(AXIS, line); pen.lineTo(AXIS + width, line); pen.stroke();
    pen.fillText(`${text} free`, AXIS - 6, line, AXIS - 8);
  }
}

// The next of 1, 2 and 5 times a power of ten.
function round(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  const digit = size / power;
  return (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10) * power;
}
