"use strict";
// A field that finds what the page knows of: GPUs, jobs, ranks, phases, findings and captures, each as a link to its own page.

// Links that are listed.
const MOST_RESULTS = 12;

class Search {
  constructor(live) {
    this.live = live;
    this.field = element("input", { type: "search", placeholder: "Search", "aria-label": "Search GPUs, jobs, ranks, phases, findings and captures", "aria-controls": "results", autocomplete: "off" });
    this.results = element("ul", { id: "results", hidden: true });
    this.said = element("span", { class: "unseen", role: "status" });
    this.place = element("span", { class: "search", role: "search" }, this.field, this.results, this.said);
    this.field.addEventListener("input", () => this.list());
    this.field.addEventListener("focus", () => this.list());
    this.place.addEventListener("keydown", (event) => this.key(event));
    // Left by the keyboard or the pointer.
    this.place.addEventListener("focusout", (event) => { if (!this.place.contains(event.relatedTarget)) this.close(); });
    // A link that is pressed keeps the focus where it is until it is followed.
    this.results.addEventListener("pointerdown", (event) => event.preventDefault());
    this.results.addEventListener("click", () => { this.field.value = ""; this.close(); });
  }

  close() { this.results.hidden = true; this.results.replaceChildren(); }

  key(event) {
    if (event.key === "Escape") { this.field.value = ""; this.close(); this.field.focus(); return; }
    const links = [...this.results.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    if (event.key === "Enter" && at < 0 && links.length) { event.preventDefault(); links[0].click(); }
    const next = { ArrowDown: links[at + 1], ArrowUp: at > 0 ? links[at - 1] : this.field }[event.key];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  list() {
    const words = this.field.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) { this.close(); this.said.textContent = ""; return; }
    // A word of two letters may be the begin of a word of the name, a longer one any part: "rank 1" does not find rank 31.
    const isMeant = (name) => words.every((word) => name.toLowerCase().split(/[\s_./:-]+/).some((part) => word.length > 2 ? part.includes(word) : part.startsWith(word)));
    const order = ({ name, more }) => name.toLowerCase() === words.join(" ") ? 0 : isMeant(name) ? 1 : isMeant(`${name} ${more ?? ""}`) ? 2 : null;
    const found = this.all().map((one) => ({ ...one, order: order(one) })).filter((one) => one.order !== null)
      .sort((a, b) => a.order - b.order || a.name.length - b.name.length || (a.name < b.name ? -1 : 1));
    this.results.replaceChildren(...found.slice(0, MOST_RESULTS).map(({ kind, name, href }) => element("li", {}, element("a", { href }, element("bdi", {}, name)), element("span", { class: "kind" }, ` ${kind}`))),
      ...found.length > MOST_RESULTS ? [element("li", { class: "kind" }, `and ${found.length - MOST_RESULTS} more`)] : found.length ? [] : [element("li", { class: "kind" }, "Nothing of this name is known to the page.")]);
    this.results.hidden = false;
    this.said.textContent = found.length === 1 ? "1 result" : `${found.length} results`;
  }

  // All that can be found: { kind, name, more, href }.
  all() {
    const { feed } = this.live;
    const ranks = feed.ranks.list(), jobs = new Map([...feed.jobs.map(({ id, job }) => [id, job]), ...ranks.map(({ id, job }) => [id, job])]);
    return [...[...feed.gpus.values()].map(({ gpu, uuid, name, pci }) => ({ kind: name ?? "GPU", name: `GPU ${gpu}`, more: `${uuid} ${pci ?? ""} ${name ?? ""}`, href: hrefOf(["gpu", gpu]) })),
      ...[...jobs].map(([id, job]) => ({ kind: "job", name: job, href: hrefOf(["job", id]) })),
      ...ranks.map(({ id, job, rank, gpus }) => ({ kind: gpus.length ? `rank, on GPU ${gpus.map((uuid) => gpuName(feed, uuid)).join(", ")}` : "rank", name: `${job} rank ${rank}`, href: hrefOf(["job", id, rank]) })),
      ...this.phases(ranks),
      ...feed.findings.map(({ id, finding, what, job, gpu }) => ({ kind: `finding: ${what}`, name: `${finding} ${id}`, more: `${job ?? ""} ${gpu === null ? "" : `GPU ${gpu}`}`, href: hrefOf(["finding", id]) })),
      ...feed.captures.captures.map(({ id, reasons }) => ({ kind: `capture of ${reasons.join(", ")}`, name: id, href: hrefOf(["capture", id]) }))];
  }

  // Each phase of a job: its longest that the page has, as a view around it.
  phases(ranks) {
    const { feed } = this.live, longest = new Map();
    for (const one of ranks) {
      const { id, job, rank } = one, { begin, end, of, open } = one.between(-Infinity, Infinity).columns;
      for (let i = 0; i < begin.length; i++) {
        if (of[i].kind !== "phase" || open[i]) continue;
        const key = `${of[i].name} ${id}`, known = longest.get(key);
        if (!known || end[i] - begin[i] > known.long) longest.set(key, { name: of[i].name, id, job, rank, begin: begin[i], long: end[i] - begin[i] });
      }
    }
    const ms = (seconds) => (feed.originMs + seconds * 1e3).toFixed(3);
    return [...longest.values()].map(({ name, id, job, rank, begin, long }) => ({ kind: `phase, its longest of late took ${duration(long)} on rank ${rank}`, name: `${name} of ${job}`,
      href: `${hrefOf(["job", id, rank])}?from=${ms(begin - long)}&to=${ms(begin + 2 * long)}` }));
  }
}
