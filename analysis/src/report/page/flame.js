"use strict";
// Who held memory, as a flame graph: from the outermost frame above to the innermost below, each as wide as what it holds.

// Frames narrower than this share of the graph are not drawn, and rows that are drawn at most.
const LEAST_FRAME = 0.001, MOST_DEPTH = 64;

// A frame of Python: others have no file, or one of another language, whose line is not known.
const isPython = (frame) => /(\.py|>):\d+:/.test(frame);

// A tree of the stacks: { name, bytes, allocations, children, own }, the last with the bytes of stacks that end there, by place. The frames of a stack come the innermost first. `isNative`: with
// those of the interpreter and of libraries that are not in Python.
function flameTree({ held, frames, other_bytes: others, others: count }, isNative) {
  const node = (name) => ({ name, bytes: 0, allocations: 0, children: new Map(), own: new Map() }), root = node("all that was allocated");
  const add = (path, bytes, allocations, site) => {
    let at = root;
    for (const name of [null, ...path]) {
      if (name !== null) {
        if (!at.children.has(name)) at.children.set(name, node(name));
        at = at.children.get(name);
      }
      at.bytes += bytes;
      at.allocations += allocations;
    }
    if (site !== null) at.own.set(site, (at.own.get(site) ?? 0) + bytes);
  };
  for (const { bytes, allocations, site, frames: stack } of held) {
    const path = stack.map((nth) => frames[nth]).filter((frame) => isNative || isPython(frame)).reverse();
    // Autograd's threads have no frame of Python: what they run is the place.
    add(path.length ? path : [site], bytes, allocations, site);
  }
  if (others) add([`${count.toLocaleString("en")} further stacks`], others, 0, null);
  return root;
}

// The file of a frame without its folders, its line, and its function; of one without a file the function.
const shortFrame = (frame) => frame.replace(/^.*\/(?=[^/:]+:)/, "").replace(/^\?\?:0:/, "");
// A library's code is in a folder of packages.
const isOwn = (frame) => isPython(frame) && !/(site|dist)-packages|\/lib\/python|<frozen/.test(frame);

// The graph with its search: { place, choose }, the last with a place in the program whose stacks are to be found.
function flameGraph(stacks, label) {
  let root = flameTree(stacks, false), shown = root, words = "", site = null;
  const hasNative = stacks.frames.some((frame) => !isPython(frame)), native = element("input", { type: "checkbox", onchange: () => { root = shown = flameTree(stacks, native.checked); draw(); } });
  const graph = element("div", { class: "flame", role: "tree", "aria-label": label });
  const field = element("input", { type: "search", placeholder: "Search frames", "aria-label": `Search the frames of ${label}`, autocomplete: "off" });
  const whole = element("div", {}), said = element("p", { class: "readout", role: "status" }), all = element("button", { onclick: () => zoom(root), "aria-label": `Show all of ${label}` }, "All");
  const share = (bytes) => `${gib(bytes)}, ${(bytes / root.bytes * 100).toFixed(1)} %`;
  const isMeant = (one) => site !== null ? one.own.has(site) : words !== "" && one.name.toLowerCase().includes(words);

  function zoom(one) {
    shown = one;
    draw();
    graph.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
  }

  // What the frames hold that are meant: those inside of others of them count once.
  function meant(one) { return site === null && isMeant(one) ? one.bytes : (one.own.get(site) ?? 0) + [...one.children.values()].reduce((sum, child) => sum + meant(child), 0); }

  function draw() {
    const made = [];
    let depth = 0, cut = 0;
    const place = (one, left, level) => {
      const wide = one.bytes / shown.bytes;
      if (wide < LEAST_FRAME) return;
      if (level >= MOST_DEPTH) { cut++; return; }
      depth = Math.max(depth, level + 1);
      const box = element("div", { role: "treeitem", tabindex: made.length ? "-1" : "0", "aria-level": String(level + 1), "aria-expanded": one.children.size ? "true" : null,
        class: [isMeant(one) ? "meant" : null, isOwn(one.name) ? "own" : null].filter(Boolean).join(" "), title: `${one.name}: ${share(one.bytes)}`, "aria-label": `${one.name}: ${share(one.bytes)}` }, shortFrame(one.name));
      Object.assign(box.style, { left: `${left * 100}%`, width: `${wide * 100}%`, top: `${level * 19}px` });
      box.addEventListener("click", () => zoom(one));
      box.node = one;
      made.push(box);
      let at = left;
      for (const child of [...one.children.values()].sort((a, b) => b.bytes - a.bytes)) { place(child, at, level + 1); at += child.bytes / shown.bytes; }
    };
    place(shown, 0, 0);
    graph.replaceChildren(...made);
    graph.style.height = `${depth * 19}px`;
    all.disabled = shown === root;
    whole.replaceChildren(...site === null ? [] : stacksAt(stacks, site));
    const found = words !== "" || site !== null ? meant(root) : null;
    said.textContent = found === null ? `${shown === root ? "" : `${shown.name}: `}${share(shown.bytes)} of what was allocated at the peak. A click shows a frame alone.${cut ? ` Frames below the ${MOST_DEPTH}th are not drawn until one above them is shown alone.` : ""}`
      : `${site ?? `Frames with “${words}”`}: ${share(found)} of what was allocated at the peak.`;
  }

  field.addEventListener("input", () => { [words, site] = [field.value.trim().toLowerCase(), null]; draw(); });
  graph.addEventListener("keydown", (event) => {
    const boxes = [...graph.children], at = boxes.indexOf(document.activeElement), own = boxes[at];
    if (!own) return;
    const level = Number(own.getAttribute("aria-level")), after = (list, is) => list.find((box) => Number(box.getAttribute("aria-level")) === level + is);
    const go = { ArrowDown: boxes[at + 1]?.getAttribute("aria-level") === String(level + 1) ? boxes[at + 1] : null, ArrowUp: after(boxes.slice(0, at).reverse(), -1),
      ArrowRight: after(boxes.slice(at + 1), 0), ArrowLeft: after(boxes.slice(0, at).reverse(), 0), Home: boxes[0] }[event.key];
    if (event.key === "Enter") zoom(own.node);
    else if (event.key === "Escape") zoom(root);
    else if (go) { own.tabIndex = -1; go.tabIndex = 0; go.focus(); } else return;
    event.preventDefault();
  });
  draw();
  return { place: element("div", {}, element("div", { class: "tools" }, field, all, hasNative ? element("label", {}, native, " frames outside of Python") : null), graph, said, whole),
    choose: (name) => { [shown, words, site, field.value] = [root, "", name, ""]; draw(); graph.scrollIntoView({ block: "nearest" }); } };
}
