"use strict";
// The pages by their address after `#`: overview, GPU, job, finding, capture; and what keeps each up to date.

// What is shown at first, seconds, and the widths that have buttons.
const WIDTH = 30, WIDTHS = [["1", "10 s", 10], ["2", "1 min", 60], ["3", "10 min", 600]];
const LIVE_HELP = " The space bar stops the page and lets it go on, l follows the present; 1, 2 and 3 follow 10 seconds, a minute and 10 minutes. Below the plot, the work of each GPU: a kernel "
  + "ran (light), its multiprocessors had work (darker), its tensor cores worked (full).";
// How often tables of numbers that always change are made anew, milliseconds.
const TABLES_EVERY = 1000;
// Ranks in the chart, and how many at first; GPUs drawn at first, and of more than these; rows of a table, and incidents of before, at first.
const MOST_LANES = 64, FEW_LANES = 8, FEW_GPUS = 8, FEWER_GPUS = 4, FEW_ROWS = 6;

const COLORS = { critical: "--bad", warning: "--warn" };

class Live {
  constructor(headroom) {
    this.headroom = headroom;
    this.main = document.getElementById("live");
    this.drawHeader();
    this.known = null;
    // What a reader wants to see whole on this page, and the incidents whose GPUs were drawn for them.
    this.whole = new Set();
    this.seen = new Set();
    this.feed = new Feed((what) => this.changed(what));
    addEventListener("hashchange", () => { if (this.page) this.open(); });
    // A part that is made anew between the press and the release of a button would lose the click.
    this.main.addEventListener("pointerdown", () => { this.isPressed = true; });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { this.isPressed = false; });
  }

  drawHeader() {
    this.state = element("span", { role: "status" }, "connecting");
    this.news = element("p", { class: "unseen", role: "status" });
    this.source = element("p", { class: "about" });
    this.notice = element("p", { class: "notice", role: "status" });
    // The first stop of the keyboard, and unseen until then.
    const skip = element("button", { class: "skip", onclick: () => this.region?.chart.place.focus() }, "To the chart");
    this.search = new Search(this);
    document.getElementById("about").append(skip, element("h1", {}, "highwater"),
      element("nav", { "aria-label": "Pages" }, element("a", { href: "#/" }, "Overview"), " ", element("a", { href: "#/findings" }, "Findings"), " ",
        element("a", { href: "#/captures" }, "Captures"), " ", element("a", { href: "metrics" }, "Metrics"), " ", element("a", { href: "api/v1/openapi.json" }, "API"), " ", this.search.place, " ", this.state), this.source, this.notice, this.news);
  }

  // Stops what the page shows at this moment, or lets it go on. What the daemon sends is received all the while.
  pause(chart) {
    if (this.paused) chart.follow(this.paused.width); else {
      this.paused = { width: chart.following ?? Math.min(chart.view[1] - chart.view[0], 600), at: this.feed.now };
      if (chart.following !== null) chart.show(...chart.view);
      chart.say(`Stopped at ${chart.axis.moment(this.paused.at).slice(0, 8)}. The space bar lets the page go on.`);
    }
    this.drawState();
    this.follow();
  }

  // The page follows the present, or a reader asks for it.
  resume() {
    if (!this.paused) return;
    this.paused = null;
    this.drawState();
    this.page?.lists?.();
    this.page?.tables?.();
  }

  // The address: the parts of the path, and the interval that it names.
  address() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?"), range = new URLSearchParams(query ?? "");
    const time = (name) => range.has(name) && Number.isFinite(Number(range.get(name))) ? (Number(range.get(name)) - this.feed.originMs) / 1e3 : null;
    let parts = [];
    // An address that somebody typed may be no text.
    try { parts = path.split("/").filter(Boolean).map(decodeURIComponent); } catch { parts = [path]; }
    return { parts, from: time("from"), to: time("to") };
  }

  // Something has changed: the header, and what is on the page.
  changed(what) {
    if (what === "state") this.drawState();
    if (what === "update") {
      const { source, notice, trouble } = this.feed;
      if (this.notice.textContent !== (notice ?? "")) this.notice.textContent = notice ?? "";
      const text = trouble ? `Nothing is read: ${trouble}` : source ? `Reading ${source}.` : "Starting.";
      if (this.source.textContent !== text) { this.source.textContent = text; this.source.className = trouble ? "trouble" : "about"; }
      // Before the lists have come, nothing is known of how far back a view may reach.
      if (!this.page && this.feed.isListed) this.open();
      this.follow();
    }
    if (what === "findings") this.announce();
    if (what === "incidents") { this.retitle(); this.showTroubled(); }
    if (this.page && what !== "update" && !this.paused) this.page.lists?.();
    const now = performance.now();
    if (this.page && what === "update" && !this.paused && now - (this.tabled ?? -Infinity) > TABLES_EVERY) { this.tabled = now; this.page.tables?.(); }
  }

  drawState() {
    const stopped = this.paused ? `stopped at ${clock(this.feed.originMs).moment(this.paused.at).slice(0, 8)}` : null;
    const texts = { live: stopped ?? "live", connecting: "connecting", paused: "paused while hidden", disconnected: "disconnected; trying again" };
    clearTimeout(this.stateful);
    // A stream is renewed every ten minutes, which takes a second and is no news.
    this.stateful = setTimeout(() => {
      this.state.textContent = texts[this.feed.state];
      this.state.className = this.feed.state === "disconnected" ? "trouble" : "";
    }, this.feed.state === "disconnected" ? 3000 : 0);
  }

  announce() {
    const ids = this.feed.findings.map(({ id }) => id), newest = Math.max(-1, ...ids);
    const found = this.feed.findings.find(({ id, ended_unix_nano: ended }) => id === newest && ended === null);
    if (this.known !== null && newest > this.known && found) this.news.textContent = `New finding: ${found.what}`;
    this.known = newest;
  }

  open() {
    clearTimeout(this.naming);
    this.opened = location.hash;
    this.region?.chart.end();
    this.page?.end?.();
    this.region = this.page = this.paused = null;
    this.drawState();
    this.whole = new Set();
    this.seen = new Set();
    const { parts, from, to } = this.address(), [kind, name] = parts;
    const pages = { gpu: () => this.gpu(name), job: () => this.job(name, parts[2]), finding: () => this.finding(Number(name)),
      findings: () => this.findings(), captures: () => this.captures(), capture: () => this.capture(name) };
    this.main.replaceChildren();
    this.page = (kind === undefined ? () => this.overview() : Object.hasOwn(pages, kind) ? pages[kind] : () => this.nothing("There is no such page."))();
    this.retitle();
    if (this.region && from !== null && to !== null) this.showTime(from, to, true);
    this.page.lists?.();
    this.page.tables?.();
    this.follow();
    document.documentElement.dataset.ready = "true";
  }

  // The title says first what goes on, because a tab shows no more than its begin, and its icon has the color of the worst.
  retitle() {
    if (!this.page) return;
    drawIcon(this.feed.incidents);
    const title = [inShort(this.feed.incidents), this.page.title, "highwater"].filter(Boolean).join(" · ");
    if (document.title !== title) document.title = title;
  }

  nothing(text) {
    this.main.replaceChildren(element("p", { role: "alert" }, text, " ", element("a", { href: "#/" }, "Overview")));
    return { title: text };
  }

  // A chart of some GPUs and ranks at the top of the page.
  chart(gpus, ranks, findings) {
    this.scope = { gpus, ranks, findings };
    this.inChart = [];
    const series = this.allSeries(gpus);
    const region = chartRegion({ series, lanes: [], findings: [], bounds: [this.feed.oldest(), this.feed.now], axis: clock(this.feed.originMs), worst: (one) => this.worstOf(one.gpu), areRows: series.length > 1,
      moved: (view) => this.moved(view), ranks: () => this.wholeRanks() }, [[" ", "Pause", (chart) => this.pause(chart)], ["l", "Follow", (chart) => { chart.follow(Math.min(chart.view[1] - chart.view[0], 600)); this.follow(); }],
      ...WIDTHS.map(([key, text, width]) => [key, text, (chart) => { chart.follow(width); this.follow(); }])], LIVE_HELP);
    const { chart } = region;
    this.region = region;
    this.earliest = Infinity;
    region.chart.whole = () => region.chart.show(this.feed.oldest(), this.feed.now);
    region.chart.filled = series.length <= 2;
    region.chart.follow(WIDTH);
    globalThis.highwaterChart = region.chart;
    this.main.append(region.region);
    this.unseen = element("p", { class: "note" });
    this.allRanks = element("p", { hidden: "" }, element("button", { onclick: () => { this.whole.add("ranks"); this.follow(); chart.draw(); } }));
    region.region.append(this.unseen, this.allRanks);
    this.showTroubled();
  }

  // Draws the GPUs of incidents that have come up since, also those that are not among the first.
  showTroubled() {
    if (!this.region) return;
    const { chart, legend } = this.region;
    let isChanged = false;
    for (const incident of this.recent().filter(({ id }) => !this.seen.has(id))) {
      this.seen.add(incident.id);
      for (const one of chart.series.filter(({ gpu, shown }) => !shown && incident.gpus.some(({ uuid }) => uuid === gpu.uuid))) isChanged = one.shown = true;
    }
    if (isChanged) { drawLegend(legend, chart); chart.draw(); }
  }

  // The first of things that are more than twice as many, and a button for the rest. What a reader has asked to see whole stays so until
  // another page is opened.
  few(name, things, most, update) {
    if (things.length <= 2 * most || this.whole.has(name)) return [things, null];
    const text = `All ${things.length} ${name}`;
    return [things.slice(0, most), element("p", {}, element("button", { onclick: () => { this.whole.add(name); update(); } }, text))];
  }

  // The incidents that go on, or were over a moment ago, the worst first.
  recent(incidents = this.feed.incidents) { return ordered(incidents.filter((one) => isRecent(this.feed, one))); }

  // Puts the ranks that an incident is about before others of its job, and these before all others.
  sortByTrouble(ranks) {
    const recent = this.recent(), trouble = new Map(ranks.map((one) => {
      const own = recent.filter(({ job_id: id }) => id === one.id);
      return [one, own.some((incident) => incident.ranks.includes(one.rank)) ? 0 : own.length ? 1 : 2];
    }));
    return ranks.sort((a, b) => trouble.get(a) - trouble.get(b));
  }

  // How far above the others a GPU belongs: first those that are gone, then those in an incident.
  worstOf(gpu) { return gpu.up ? this.recent().some(({ gpus }) => gpus.some(({ uuid }) => uuid === gpu.uuid)) ? 1 : 2 : 0; }

  // The GPUs, the worst first, and of alike ones the fullest.
  worstGpus() {
    const trouble = new Map([...this.feed.gpus.values()].map((gpu) => [gpu, this.worstOf(gpu)]));
    return [...trouble.keys()].sort((a, b) => trouble.get(a) - trouble.get(b) || (shareOf(b) ?? 0) - (shareOf(a) ?? 0));
  }

  allSeries(gpus) {
    const all = [...this.feed.gpus.values()].filter(gpus);
    return all.map((gpu, at) => this.series(gpu, at, at < (all.length > FEW_GPUS ? FEWER_GPUS : FEW_GPUS)));
  }

  series(gpu, at, shown) {
    return { gpu, key: gpu.uuid, name: `GPU ${gpu.gpu}`, color: `--c${at % 8}`, curve: gpu.memory, activity: gpu.activity, shift: 0, capacity: null, headroom: null,
      get peak() { return gpu.memory.peak(); }, namesCapacity: at === 0, namesPeak: false, shown, allocations: [],
      get holders() { return gpu.breakdown.holders; } };
  }

  // Brings the chart up to the present.
  follow() {
    if (!this.region || document.hidden) return;
    if (this.region.chart.following !== null) this.resume();
    const { feed } = this, { chart, buttons } = this.region, { gpus, findings } = this.scope;
    const present = [...feed.gpus.values()].filter(gpus);
    if (present.length !== chart.series.length || present.some((gpu, at) => chart.series[at].gpu !== gpu)) {
      chart.series = this.allSeries(gpus);
      drawLegend(this.region.legend, chart);
    }
    for (const one of chart.series) {
      one.capacity = one.gpu.usable ?? null;
      one.headroom = one.capacity ? one.capacity - this.headroom : null;
    }
    const highest = chart.series.reduce((best, one) => (one.peak?.[0] ?? -1) > (best?.peak?.[0] ?? -1) ? one : best, null);
    chart.series.forEach((one) => { one.namesPeak = one === highest; });
    feed.ranks.forget(feed.oldest());
    const marks = feed.findings.filter(findings).map((found) => this.mark(found));
    chart.findings = marks.sort((a, b) => a.from - b.from);
    chart.extend(Math.min(feed.oldest(), this.earliest), feed.now);
    const unseen = this.missing().join(" ");
    if (this.unseen.textContent !== unseen) this.unseen.textContent = unseen;
    buttons.get("l").setAttribute("aria-pressed", String(chart.following !== null));
    buttons.get(" ").setAttribute("aria-pressed", String(Boolean(this.paused)));
    for (const { one, least, most } of chart.inView()) {
      const now = one.gpu.up ? one.gpu.memory.now() : NaN;
      const text = `${this.paused ? "" : `${gib(now)} now, `}${most === -Infinity ? "not known" : `${gib(least)} to ${gib(most)}`} in view`;
      if (one.value && one.value.textContent !== text) one.value.textContent = text;
    }
    this.refine();
  }

  // A finding on the chart: from its begin to its last sign, with the words of the first and of the newest sign.
  mark(found) {
    const { feed } = this, { axis } = this.region.chart, at = feed.seconds(found.seen_unix_nano), first = feed.seconds(found.first.seen_unix_nano);
    const said = (seconds, what) => `${found.finding}, ${axis.after(seconds).slice(0, 11)}: ${what}`;
    return { from: feed.seconds(found.begin_unix_nano), to: Math.max(at, feed.seconds(found.begin_unix_nano)), color: COLORS[found.severity] ?? "--note", on: this.gpusOf(found),
      text: said(first, found.first.what), last: found.signs > 1 ? { at, text: said(at, found.what) } : null };
  }

  // The GPUs that a finding is about: its own, or those of its rank.
  gpusOf({ uuid, job_id: id, rank: number }) {
    if (uuid !== null) return [uuid];
    return number === null ? [] : this.feed.ranks.list().filter((rank) => rank.id === id && rank.rank === number).flatMap(({ gpus }) => gpus);
  }

  // What is drawn instead of what the daemon does not keep any more, in a sentence; null if all of the view is kept.
  old([from, to], shown, oldest) {
    const { axis } = this.region.chart, short = (seconds) => axis.moment(seconds).slice(0, 8);
    if (!shown.length || from >= oldest - this.region.chart.pixel()) return null;
    const ids = new Set(shown.flatMap(({ gpu }) => [...gpu.memory.archive].filter(([, part]) => part.curve && part.from < Math.min(to, oldest) && part.to > from).map(([id]) => id)));
    const kept = `The daemon has memory from ${short(oldest)} on.`;
    if (ids.size) return `${kept} Before that, memory is drawn from ${ids.size > 1 ? "the captures" : "the capture"} ${[...ids].join(", ")}; steps and phases are in its report.`;
    const loading = shown.some(({ gpu }) => [...gpu.memory.archive.values()].some((part) => !part.curve && !part.trouble));
    if (loading) return `${kept} A capture of the time before is being loaded.`;
    return to <= oldest ? `What memory did at this time is no longer kept, and no capture has it. ${kept}` : kept;
  }

  // What the chart lacks, in sentences.
  missing() {
    const { feed } = this, { chart } = this.region, [from] = chart.view, all = this.lanes(), left = all - MOST_LANES;
    const isShort = all > chart.lanes.length && !this.whole.has("ranks"), text = `Show ${all > MOST_LANES ? MOST_LANES : `all ${all}`} ranks`;
    if (this.allRanks.hidden === isShort) this.allRanks.hidden = !isShort;
    if (this.allRanks.firstChild.textContent !== text) this.allRanks.firstChild.textContent = text;
    const shown = chart.series.filter((one) => one.shown);
    return [...shown.map((one) => one.gpu.memory.missing(from, one.name, chart.axis)),
      this.old(chart.view, shown, feed.oldest()),
      isShort ? `${all - chart.lanes.length} ranks are not in the chart; those of incidents come first.` : left > 0 ? `${left} ranks are not in the chart.` : null,
      feed.ranks.past?.leftOut && from < feed.ranks.since ? "The shortest steps and phases of this view's past are left out: a narrower view has them." : null,
      feed.lost ? `${feed.lost.toLocaleString("en")} steps and phases ended too fast to be shown.` : null].filter((text) => text !== null);
  }

  // The steps and phases in view; returns how many ranks there are.
  lanes() {
    const { feed } = this, { chart } = this.region;
    const shown = feed.ranks.list().filter(this.scope.ranks), several = new Set(shown.map(({ id }) => id)).size > 1;
    const most = this.whole.has("ranks") ? MOST_LANES : FEW_LANES;
    if (shown.length > most) this.sortByTrouble(shown);
    // In rows, of many ranks only those on GPUs that have one.
    const drawn = new Set(chart.series.filter((one) => one.shown).map(({ key }) => key)), isDrawn = ({ gpus }) => gpus.some((uuid) => drawn.has(uuid));
    const own = chart.areRows && shown.length > most ? shown.filter(isDrawn) : shown;
    this.inChart = (own.length ? own : shown).slice(0, most);
    chart.lanes = this.inChart.map((rank) => rank.lane(chart.view, feed.now, several));
    return shown.length;
  }

  // All that the page has of all ranks, also of those that are not in the chart.
  wholeRanks() {
    return this.feed.ranks.list().map((rank) => ({ ...rank.whose, shift: 0, isThinned: Boolean(this.feed.ranks.past?.leftOut), spans: rank.between(-Infinity, Infinity).columns }));
  }

  // Requests the memory that the view lacks, one request for each GPU at a time.
  refine() {
    const { chart } = this.region, [from, to] = chart.view, pixel = chart.pixel();
    const shown = chart.series.filter((one) => one.shown);
    if (shown.length === 1) shown[0].gpu.breakdown.refine();
    for (const one of chart.series) {
      if (one.shown) one.gpu.activity.refine();
      if (!one.shown || one.gpu.loading || !one.gpu.memory.wants(from, to, pixel)) continue;
      one.gpu.loading = true;
      one.gpu.memory.refine(from, to, pixel).finally(() => { one.gpu.loading = false; chart.draw(); });
    }
    this.refineOld(from, to);
    const { ranks } = this.feed, { region } = this;
    if (ranks.loading || !ranks.lacks(Math.max(from, chart.bounds[0]), to, this.inChart)) return;
    ranks.loading = true;
    ranks.refine(Math.max(from, chart.bounds[0]), to, this.inChart).finally(() => {
      ranks.loading = false;
      // The page may be another one by now.
      if (this.region === region) { this.lanes(); chart.draw(); }
    });
  }

  // Requests captures of what the daemon does not keep any more.
  refineOld(from, to) {
    const oldest = this.feed.oldest();
    if (from >= oldest) { this.earliest = Infinity; return; }
    for (const capture of this.feed.capturesIn(from, Math.min(to, oldest)).slice(0, MOST_ARCHIVED)) {
      for (const { shown, gpu } of this.region.chart.series) {
        if (!shown || gpu.isArchiving || gpu.memory.archive.has(capture.id)) continue;
        gpu.isArchiving = true;
        this.feed.archive(gpu, capture).finally(() => { gpu.isArchiving = false; this.region?.chart.draw(); });
      }
    }
  }

  // Shows exactly this interval, even if it is older than what the daemon keeps. `isNamed`: the address already names the
  // interval, and stays as it is.
  showTime(from, to, isNamed = false) {
    const { chart } = this.region;
    this.earliest = Math.min(this.earliest, from);
    chart.bounds = [Math.min(chart.bounds[0], from), Math.max(chart.bounds[1], to)];
    chart.show(from, to);
    this.named = isNamed ? chart.view : null;
  }

  // The view has moved: the address names it, unless it follows the present.
  moved(view) {
    // At once, so that what is said of a place has its steps and phases.
    if (this.region) this.lanes();
    clearTimeout(this.naming);
    this.naming = setTimeout(() => {
      // A link has been followed, and its page is about to open.
      if (!this.region || location.hash !== this.opened) return;
      this.refine();
      if (this.named === this.region.chart.view) return;
      const path = location.hash.split("?")[0] || "#/", { chart } = this.region, ms = (seconds) => (this.feed.originMs + seconds * 1e3).toFixed(3);
      const named = chart.following !== null ? path : `${path}?from=${ms(view[0])}&to=${ms(view[1])}`;
      // Not by setting the hash, which would open the page again.
      if (named !== location.hash) history.replaceState(null, "", named);
      this.opened = location.hash;
    }, 150);
  }

  show(found) {
    const { chart } = this.region, { from, to, text } = this.mark(found), margin = Math.max((to - from) * 0.1, 0.5);
    if (found.finding === "oom") this.showTime(from - BEFORE_FAILURE, from + margin); else this.showTime(from - margin, to + margin);
    chart.say(text);
    chart.place.scrollIntoView({ block: "nearest" });
  }

  // A part of the page that `make` fills again. Focus and the scroll positions of tables are kept. While text in it is
  // selected or a button is pressed, the part is not replaced.
  part(make) {
    const place = element("div");
    this.main.append(place);
    return () => {
      const selected = getSelection();
      if (this.isPressed || (!selected.isCollapsed && place.contains(selected.anchorNode))) return;
      const made = element("div", {}, ...make());
      if (made.innerHTML === place.last) return;
      place.last = made.innerHTML;
      const nameOf = (one) => one.getAttribute("aria-label") ?? one.textContent, focused = place.contains(document.activeElement) ? document.activeElement : null;
      const scrolled = new Map([...place.querySelectorAll(".scroll")].map((region) => [nameOf(region), region.scrollLeft]));
      // Several may have the same name: links to one job in several rows.
      const alike = (within, one) => one ? [...within.querySelectorAll(one.tagName)].filter((other) => nameOf(other) === nameOf(one)) : [];
      const nth = alike(place, focused).indexOf(focused);
      place.replaceChildren(...made.childNodes);
      for (const region of place.querySelectorAll(".scroll")) region.scrollLeft = scrolled.get(nameOf(region)) ?? 0;
      alike(place, focused)[nth]?.focus({ preventScroll: true });
    };
  }

  overview() {
    const { feed } = this, all = () => true;
    const above = this.part(() => this.incidentsAbove(feed.incidents));
    this.chart(all, all, all);
    const gpus = this.part(() => {
      const [shown, more] = this.few("GPUs", feed.gpus.size > 2 * FEW_ROWS ? this.worstGpus() : [...feed.gpus.values()], FEW_ROWS, () => gpus());
      return [element("h2", {}, "GPUs"), gpuTable(feed, shown) ?? element("p", {}, feed.trouble ?? "There are none."), more];
    });
    const jobs = this.part(() => [element("h2", {}, "Jobs"), jobTable(feed) ?? element("p", {}, "No job has sent a mark. docs/annotations.md shows how.")]);
    const below = this.part(() => this.incidentsBelow(feed.incidents, () => below()));
    const captures = this.part(() => capturesPart(feed));
    return { title: "Overview", lists: () => { above(); below(); captures(); }, tables: () => { above(); gpus(); jobs(); } };
  }

  gpu(name) {
    const { feed } = this, of = (gpu) => gpu.gpu === name || gpu.uuid === name;
    const gpu = [...feed.gpus.values()].find(of);
    if (!gpu) return this.nothing(`There is no GPU ${name} on this node.`);
    this.main.append(element("h2", {}, `GPU ${gpu.gpu}`));
    const above = this.part(() => this.incidentsAbove(this.incidentsHere()));
    this.chart(of, (rank) => rank.gpus.includes(gpu.uuid), (found) => found.uuid === gpu.uuid || this.ranksOn(gpu, found));
    const split = this.part(() => holdersPart(feed, gpu));
    const ranksOf = () => feed.ranks.list().filter((rank) => rank.gpus.includes(gpu.uuid)).map(({ job, rank }) => `${job} rank ${rank}`);
    const facts = this.part(() => [table(`GPU ${gpu.gpu}`, ["property", "value"], [["name", gpu.name ?? "not known"], ["UUID", gpu.uuid], ["PCI bus id", gpu.pci ?? "not known"],
      ["usable memory", gib(gpu.usable)], ["the driver's reserve", gib(gpu.reserved)], ["busy", ratio(gpu.utilization)], ["power", unit(gpu.power, "W")], ["temperature", unit(gpu.temperature, "°C")],
      ["slowed by", gpu.throttle ? gpu.throttle.join(", ") || "nothing" : "not known"], ["ranks", ranksOf().join(", ") || "none"]], 2, true)]);
    const below = this.part(() => this.incidentsBelow(this.incidentsHere(), () => below()));
    return { title: `GPU ${gpu.gpu}`, lists: () => { above(); below(); }, tables: () => { above(); split(); facts(); } };
  }

  incidentPanel(incident) { return incidentPanel(this.feed, incident, (found) => this.show(found)); }

  // The incidents that go on, or were over a moment ago.
  incidentsAbove(incidents) {
    const recent = this.recent(incidents), isNow = recent.some(({ ended_unix_nano: ended }) => ended === null);
    if (!recent.length) return [element("p", { class: "about" }, "No incident in the last ten minutes.")];
    return [element("h2", {}, isNow ? "Incidents now" : "Incidents of the last ten minutes"), ...recent.slice(0, MOST_ABOVE).map((one) => this.incidentPanel(one)),
      recent.length > MOST_ABOVE ? element("p", { class: "about" }, `${recent.length - MOST_ABOVE} further ones are below the chart.`) : null];
  }

  // All others.
  incidentsBelow(incidents, update) {
    const others = ordered(incidents.filter((one) => !isRecent(this.feed, one)));
    const [shown, more] = this.few("incidents", [...this.recent(incidents).slice(MOST_ABOVE), ...others], FEW_ROWS, update);
    return shown.length ? [element("h2", {}, "Further incidents"), ...shown.map((one) => this.incidentPanel(one)), more] : [];
  }

  // The incidents that name a GPU, a rank or the job of this page; their findings may have been forgotten.
  incidentsHere() {
    const named = ({ job, job_id, ranks, gpus }) => [...gpus.map(({ uuid }) => ({ uuid, job, job_id })),
      ...(ranks.length ? ranks : [null]).map((rank) => ({ uuid: null, job, job_id, rank }))];
    return this.feed.incidents.filter((incident) => this.scope && named(incident).some(this.scope.findings));
  }

  // Whether a finding is about a rank on this GPU.
  ranksOn(gpu, found) {
    return found.job !== null && this.feed.ranks.list().some((rank) => rank.id === found.job_id && (found.rank === null || rank.rank === found.rank) && rank.gpus.includes(gpu.uuid));
  }

  // `number`: the only rank that the chart shows, as text of the address.
  job(name, number) {
    const { feed } = this, isMeant = ({ job, id }) => id === name || job === name, own = isMeant, drawn = (rank) => own(rank) && (number === undefined || String(rank.rank) === number);
    const known = feed.jobs.some(isMeant) || feed.ranks.list().some(own);
    if (!known) return this.nothing(`No job ${name} is known.`);
    if (number !== undefined && !feed.ranks.list().some(drawn)) return this.nothing(`No rank ${number} of job ${name} is known.`);
    this.main.append(element("h2", {}, "Job ", element("bdi", {}, name), number === undefined ? null : [` rank ${number} `, link(["job", name], "All ranks")]));
    const gpus = () => new Set(feed.ranks.list().filter(drawn).flatMap((rank) => rank.gpus));
    const above = this.part(() => this.incidentsAbove(this.incidentsHere()));
    this.chart((gpu) => gpus().has(gpu.uuid), drawn, (found) => found.job_id === name || found.job === name || (found.job === null && gpus().has(found.uuid)));
    const below = this.part(() => this.incidentsBelow(this.incidentsHere(), () => below()));
    let answer = { ranks: [] };
    const tables = this.part(() => {
      const accused = new Set(this.recent(this.incidentsHere()).flatMap(({ ranks }) => ranks)), lag = ({ ratios }) => ratios.compute_lag ?? 0;
      const worst = [...answer.ranks].sort((a, b) => accused.has(b.rank) - accused.has(a.rank) || lag(b) - lag(a));
      const [shown, more] = this.few("ranks in the tables", worst, FEW_ROWS, () => tables());
      return jobTables(feed, answer, shown.toSorted((a, b) => a.rank - b.rank), more);
    });
    const load = async () => {
      try { answer = await request(`api/v1/jobs/${encodeURIComponent(name)}`); tables(); } catch { /* It has ended meanwhile: what was last known stays. */ }
    };
    const profiles = new Profiles(name, () => [...new Set(feed.ranks.list().filter(own).map(({ rank }) => rank))].sort((a, b) => a - b));
    this.main.append(profiles.place);
    let asked = -Infinity;
    return { title: number === undefined ? name : `${name} rank ${number}`, lists: () => { above(); below(); }, end: () => profiles.end(), tables: () => {
      above();
      profiles.update();
      if (performance.now() - asked > 2000) { asked = performance.now(); load(); }
    } };
  }

  finding(id) {
    const { feed } = this, found = feed.findings.find((one) => one.id === id);
    if (!found) return this.nothing(`No finding ${id} is known; the daemon keeps the last ones.`);
    this.main.append(element("h2", {}, `Finding ${id}`));
    const gpus = new Set(found.uuid ? [found.uuid] : feed.ranks.list().filter(({ id }) => id === found.job_id).flatMap((rank) => rank.gpus));
    this.chart((gpu) => gpus.size === 0 || gpus.has(gpu.uuid), (rank) => rank.id === found.job_id || rank.gpus.some((uuid) => gpus.has(uuid)), (one) => one.id === id);
    this.show(found);
    const now = () => feed.findings.find((one) => one.id === id) ?? found;
    // There is advice once a profile of layers or enough steps are known, which may be later than the finding.
    let advice = [], asked = -Infinity, isAnswered = !LACKS_MEMORY.includes(found.finding) || found.job === null;
    const ask = async () => {
      try {
        advice = adviceOf(found.job, await request(`api/v1/jobs/${encodeURIComponent(found.job_id)}/advice`));
        isAnswered = advice.length > 0;
        text();
      } catch { /* There is none yet, or the job has ended. */ }
    };
    const lacking = LACKS_MEMORY.includes(found.finding) ? feed.gpus.get(found.uuid) : null, [full, failed] = found.finding === "oom" ? [null, lacking] : [lacking, null];
    const failure = () => {
      // The second in which it failed is known after the next one has begun, and requested every two.
      const at = feed.seconds(found.begin_unix_nano), isKnown = failed && feed.now - at > HELD_BEFORE + BREAKDOWN_EVERY_MS / 1e3;
      const held = isKnown ? heldAtFailure(failed.breakdown.points, at, failed.usable) : [], asked = askedFor(now().evidence);
      return held.length || asked ? [element("h2", {}, "When the allocation failed"), element("p", {}, asked), ...held] : [];
    };
    const text = this.part(() => [findingPanel(feed, now(), (one) => this.show(one)), ...found.finding === "oom" ? failure() : [],
      ...advice.length ? [element("h2", {}, "What to change"), ...advice.map((said) => element("p", { class: "advice" }, said))] : [],
      element("h2", {}, "Evidence"), table("Evidence", ["measured", "value"], Object.entries(now().evidence).map(([name, value]) => [name, measured(name, value)]), 1, true)
        ?? element("p", {}, "There are no numbers."),
      ...capturesPart(feed, capturesOf(feed, now()))]);
    // What held it then is in the evidence.
    const split = full ? this.part(() => found.ended_unix_nano === null && now().ended_unix_nano === null ? holdersPart(feed, full) : []) : () => {};
    return { title: `${found.finding} ${id}`, lists: text, tables: () => {
      split();
      if (failed) text();
      const isDue = asked === -Infinity || (performance.now() - asked > 5000 && feed.jobs.some(({ id }) => id === found.job_id));
      if (!isAnswered && isDue) { asked = performance.now(); ask(); }
    } };
  }

  findings() {
    const { feed } = this;
    return { title: "Findings", lists: this.part(() => panels(feed.findings, (found) => findingPanel(feed, found, null), "Findings now", "Findings that have ended")) };
  }

  captures() { return { title: "Captures", lists: this.part(() => capturesPart(this.feed)) }; }

  capture(id) {
    const { feed } = this, capture = feed.captures.captures.find((one) => one.id === id);
    if (!capture) return this.nothing(`There is no capture ${id}.`);
    const now = () => feed.captures.captures.find((one) => one.id === id) ?? capture;
    return { title: id, lists: this.part(() => [element("h2", {}, "Capture ", element("bdi", {}, id)), captureTable(feed, [now()]),
      now().note ? element("p", {}, now().note) : null, now().trouble ? element("p", { class: "trouble" }, now().trouble) : null]) };
  }
}

// A number of a finding's evidence: its name ends in its unit.
function measured(name, value) {
  if (name.endsWith("_bytes")) return gib(value);
  if (name.endsWith("_seconds")) return duration(value);
  if (name.endsWith("_ratio")) return value.toFixed(3);
  return value.toLocaleString("en");
}

globalThis.highwaterLive = new Live(JSON.parse(document.getElementById("data").textContent).headroom_bytes);
