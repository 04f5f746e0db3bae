"use strict";
// Elements of a page. All text is set as text, never as HTML.

// Of incidents and findings, the worst first.
const SEVERITIES = ["critical", "warning", "info"];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

// The color of what is named beside it.
function swatch(color) {
  const made = element("span", { class: "swatch" });
  made.style.background = color;
  return made;
}

// The first `words` columns are words and aligned left, the others numbers. `isHeaded`: a heading before the table already
// says what the caption says, so that the caption is for screen readers only.
function table(caption, header, rows, words = 1, isHeaded = false) {
  if (!rows.length) return null;
  const side = (at) => at < words ? { class: "words" } : {};
  const head = element("tr", {}, ...header.map((text, at) => element("th", { scope: "col", ...side(at) }, text)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, at) =>
    element(at ? "td" : "th", at ? side(at) : { scope: "row", ...side(at) }, cell ?? "not known"))));
  // A region that scrolls must be reached by the keyboard.
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", isHeaded ? { class: "unseen" } : {}, caption), element("thead", {}, head), element("tbody", {}, ...body)));
}
