"use strict";
// Builds the page: the chart, and every number of it as text.

const seconds = (ns) => ns === null ? null : ns / 1e9;
const bytes = (value) => value === null ? "not known" : gib(value);
// A time after a recording's begin, and a duration. Recordings without times have numbers of readings instead.
const moment = (recording, ns) => ns === null ? "not known"
  : recording.times === "readings" ? `reading ${Math.round(ns / 1e6)}` : duration(seconds(ns));
const stretch = (recording, ns) => recording.times === "readings" ? `${Math.round(ns / 1e6)} readings` : duration(seconds(ns));
const percent = (ratio) => ratio === null ? "" : `${ratio > 0 ? "+" : ""}${(ratio * 100).toFixed(1)} %`;

// By how much a recording is moved so that this step begins at 0; null if the page does not have that step.
function shiftOf(recording, step) {
  const { columns, rows } = recording;
  for (let i = 0; i < recording.spans; i++) {
    if (columns.step[i] === step && rows[columns.row[i]].kind === "step") return -columns.begin[i];
  }
  return null;
}

// The first step that all recordings of several have; null if there is none.
function commonStep(recordings) {
  const all = recordings.map(({ columns, rows, spans }) => {
    const steps = new Set();
    for (let i = 0; i < spans; i++) if (rows[columns.row[i]].kind === "step" && !Number.isNaN(columns.step[i])) steps.add(columns.step[i]);
    return steps;
  });
  const common = all.length > 1 ? [...all[0]].filter((step) => all.every((steps) => steps.has(step))) : [];
  return common.length ? common.reduce((least, step) => Math.min(least, step)) : null;
}

// Gives every recording `shift`, by how much it is moved in the chart, and `is_aligned`. Recordings that ran at the same time
// stay together, also where one of them is aligned with a step.
function placeAll(report) {
  const together = report.recordings.filter(({ offset_ns }) => offset_ns !== null);
  for (const recording of together) recording.shift = seconds(recording.offset_ns);
  for (const recording of report.recordings) if (!together.includes(recording)) recording.shift = 0;
  const move = (recordings) => {
    // The steps that jobs sent have precedence over those of a profiler's trace.
    const order = [...recordings].sort((a, b) => Number(a.trace !== null) - Number(b.trace !== null));
    const found = order.map((recording) => [recording, shiftOf(recording, report.align_step)]).find(([, by]) => by !== null);
    const by = found ? found[1] - found[0].shift : 0;
    for (const recording of recordings) {
      recording.is_aligned = found !== undefined;
      recording.shift += by;
    }
  };
  // Versions of one run that did not run at the same time are compared from the first step that all of them have.
  if (report.align_step === null && together.length < 2) report.align_step = commonStep(report.recordings);
  if (report.align_step === null) return;
  move(together);
  for (const recording of report.recordings) if (!together.includes(recording)) move([recording]);
}

// Curves that are shown at first: there are as many colors.
const MOST_SHOWN = 8;
// Maximum number of lanes that are drawn: the height of a canvas is limited.
const MOST_LANES = 64;
function seriesOf(report) {
  const series = [], several = report.recordings.length > 1;
  const count = report.recordings.reduce((sum, recording) => sum + recording.gpus.length, 0);
  for (const [nth, recording] of report.recordings.entries()) {
    const most = Math.max(...recording.gpus.map((gpu) => gpu.peak_bytes ?? -1));
    for (const gpu of recording.gpus) {
      const name = several ? `${recording.name}, GPU ${gpu.index}` : `GPU ${gpu.index}`;
      gpu.curve = new Curve(gpu.times, gpu.used, Math.max(seconds(recording.duration_ns), 1e-6),
        gpu.bucket_ns === null ? 0 : seconds(gpu.bucket_ns));
      series.push({ key: `${nth} ${gpu.uuid}`, name, short: several ? `${nth + 1}: GPU ${gpu.index}` : name, color: `--c${series.length % 8}`, curve: gpu.curve, activity: gpu.activity, shift: recording.shift, capacity: gpu.usable_bytes,
        peak: gpu.peak_bytes === null ? null : [gpu.peak_bytes, seconds(gpu.peak_after_ns)],
        namesPeak: count <= 8 && (several || gpu.peak_bytes === most || count <= 2), namesCapacity: false, shown: true,
        holders: holdersOf(gpu),
        allocations: gpu.largest.map((one, nth) => ({ nth, bytes: one.bytes, freed: one.freed,
          begin: seconds(one.after_ns), end: seconds(one.after_ns + one.lasted_ns) })) });
    }
  }
  const sized = series.find((one) => one.capacity);
  if (sized) sized.namesCapacity = true;
  // Bands of several GPUs would hide each other: one is shown at first.
  if (series.some((one) => one.allocations.length || (one.holders && !one.holders.isAlone))) {
    const top = series.reduce((best, one) => (one.peak?.[0] ?? 0) > (best.peak?.[0] ?? 0) ? one : best);
    series.forEach((one) => { one.shown = one === top; });
  } else if (series.length > MOST_SHOWN) {
    const highest = [...series].sort((a, b) => (b.peak?.[0] ?? -1) - (a.peak?.[0] ?? -1)).slice(0, MOST_SHOWN);
    series.forEach((one) => { one.shown = highest.includes(one); });
  }
  return series;
}

// Who held memory over time, if the recording has it.
function holdersOf({ allocator, breakdown }) {
  if (!allocator?.bands.moments.length) return breakdown;
  const { sites, moments, unit_bytes: unit } = allocator.bands;
  return { sites: sites.map(({ site }) => site), begins: Float64Array.from(moments, (moment) => seconds(moment.after_ns)),
    levels: moments.map(({ held }) => held.map((units) => units * unit)) };
}

function lanesOf(report) {
  const lanes = [], several = report.recordings.length > 1;
  report.recordings.forEach((recording, nth) => {
    for (const row of recording.rows) row.tone = toneOf(row.name);
    const { columns, rows } = recording, members = recording.ranks.map(() => []);
    for (let i = 0; i < recording.spans; i++) members[rows[columns.row[i]].rank].push(i);
    const jobs = new Set(recording.ranks.map(([job]) => job)).size > 1;
    recording.ranks.forEach(([job, rank], position) => {
      const spans = members[position];
      if (!spans.length) return;
      const of = (column) => Float64Array.from(spans, (span) => column[span]);
      const short = `${several ? `${nth + 1}: ` : ""}${jobs ? `${job.slice(0, 7)} ` : "rank "}${rank}`;
      lanes.push(new Lane(`${several ? `${recording.name}, ` : ""}${job} rank ${rank}`, short, { begin: of(columns.begin),
        end: of(columns.end), step: of(columns.step), peak: of(columns.peak), open: of(columns.open), of: spans.map((span) => rows[columns.row[span]]) },
      { key: `${nth} ${position}`, job: `${nth} ${job}`, jobName: several ? `${job} in ${recording.name}` : job, rank, gpus: recording.gpus_of[position].map((uuid) => `${nth} ${uuid}`), isThinned: recording.left_out > 0 }, recording.shift));
    });
  });
  return lanes;
}

function about(report) {
  const one = report.recordings.length === 1 ? report.recordings[0] : null;
  const parts = one ? [one.format, one.host, one.source,
    one.begin_unix_ms === null ? null : new Date(one.begin_unix_ms).toISOString(),
    one.gpus.length || one.spans ? stretch(one, one.duration_ns) : null,
    one.state === "complete" || one.state === null ? null : `the recording is ${one.state.replace("_", " ")}`] : [];
  const title = one ? one.name : `${report.recordings.length} recordings`;
  const notices = [...new Set(report.recordings.map(({ notice }) => notice).filter(Boolean))];
  return [element("h1", {}, title), ...notices.map((notice) => element("p", { class: "notice", role: "status" }, notice)), parts.length ? element("p", { class: "about" }, ...parts.filter(Boolean).flatMap((part, at) =>
    // Right-to-left characters in names from a file must not reorder the text beside them.
    [at ? " · " : "", element("bdi", {}, part)])) : null,
    one?.note ? element("p", { class: "about" }, element("code", {}, one.note)) : null,
    one?.headline ? element("p", { class: "headline" }, one.headline) : null,
    ...waitedFor(report), ...(report.comparison?.verdict ?? []).map((text) => element("p", { class: "headline" }, text))]
    .filter((made) => made !== null);
}

// For whom the ranks of several traces waited, as a headline.
function waitedFor({ ranks }) {
  if (!ranks || ranks.problem || ranks.most_waited_for === null) return [];
  const own = ranks.ranks.find(({ rank }) => rank === ranks.most_waited_for), waiting = ranks.ranks.reduce((sum, { waiting_ns: ns }) => sum + (ns ?? 0), 0);
  const inside = ranks.ranks.reduce((sum, { rank, total_ns: ns }) => sum + (rank === own.rank ? 0 : ns), 0);
  const bound = inside && own.made_others_wait_ns >= inside / 2 ? ` Their communication is bound by it, not by the links: they were in collectives for ${milliseconds(inside)}.` : "";
  return [element("p", { class: "headline" }, `The others waited for rank ${own.rank} the longest: ${milliseconds(own.made_others_wait_ns)} of the ${milliseconds(waiting)} that ranks waited in collectives.${bound}`)];
}

function comparison(report) {
  if (!report.comparison) return [];
  const beside = (of, show) => [of.value === null ? "not known" : show(of.value), percent(of.increase_ratio)];
  const readings = report.recordings.some((recording) => recording.times === "readings");
  const time = (ns) => readings ? `${Math.round(ns / 1e6)} readings` : duration(ns / 1e9);
  const rows = report.comparison.recordings.map((one) => [one.name, ...beside(one.peak, gib), ...beside(one.mean, gib),
    ...beside(one.duration, time), ...beside(one.step, time)]);
  const memory = rows.length ? [element("h2", {}, "Comparison"), table("Each recording beside the first", ["recording", "peak", "change", "mean", "change", "duration", "change", "mean step", "change"], rows)] : [];
  return [...memory, ...byPlace(report.comparison.places), ...byPhase(report.comparison.phases), ...byKernel(report.comparison.kernels)];
}

// The kernels of traces whose time differs the most.
function byKernel(kernels) {
  if (!kernels.length) return [];
  const sign = (ns) => ns === null ? "" : `${ns < 0 ? "−" : "+"}${(Math.abs(ns) / 1e6).toFixed(3)} ms`;
  const rows = kernels.flatMap(({ kernel, recordings }) => recordings.map((of) => [
    element("span", { title: kernel }, kernel.length > MOST_KERNEL_NAME ? `${kernel.slice(0, MOST_KERNEL_NAME)}…` : kernel), of.name,
    of.count.toFixed(1), `${(of.time_ns / 1e6).toFixed(3)} ms`, sign(of.increase_ns)]));
  return [element("h2", {}, "Kernels beside the first"), table(`Kernels and copies of each trace, in ${kernels[0].is_by_step ? "a step" : "all of it"}, whose time differs the most`,
    ["kernel or copy", "trace", "count", "time", "change"], rows, 2)];
}

// Each phase's median beside the first recording's. The bar is the difference, and the line across its end the 95 % interval.
function byPhase(phases) {
  if (!phases.length) return [];
  const far = phases.flatMap(({ recordings }) => recordings.flatMap(({ increase_95_ns: ends }) => ends ?? [0])).reduce((most, end) => Math.max(most, Math.abs(end)), 1);
  const place = (ns) => 50 + ns / far * 50, sign = (ns) => `${ns < 0 ? "−" : "+"}${milliseconds(Math.abs(ns))}`;
  const bar = ({ increase_ns: by, increase_95_ns: [low, high] }) => {
    const part = (name, from, to) => {
      const one = element("span", { class: name });
      Object.assign(one.style, { left: `${Math.min(from, to)}%`, width: `${Math.abs(to - from)}%` });
      return one;
    };
    return element("span", { class: "delta", "aria-hidden": "true" }, part("zero", 50, 50), part(low > 0 ? "more" : high < 0 ? "less" : "same", 50, place(by)), part("within", place(low), place(high)));
  };
  const rows = phases.flatMap(({ job, phase, recordings }) => recordings.map((one, nth) => [nth ? "" : job === null ? phase : `${phase} of ${job}`, one.name, one.count.toLocaleString("en"), milliseconds(one.median_ns),
    one.increase_ns === null ? "" : sign(one.increase_ns), one.increase_95_ns === null ? "" : `${sign(one.increase_95_ns[0])} to ${sign(one.increase_95_ns[1])}`,
    one.increase_95_ns === null ? "" : bar(one)]));
  return [element("h2", {}, "Comparison by phase"), table("The median of each phase beside the first recording's, with the 95 % interval of the difference",
    ["phase", "recording", "of", "median", "beside the first", "95 %", "less, or longer"], rows, 2)];
}

// A file may say anything; only these have a look of their own.
const lookOf = (severity) => ["warning", "critical"].includes(severity) ? severity : "info";

function showFinding(recording, found, chart) {
  const from = seconds(found.begin_after_ns), to = found.end_after_ns === null ? seconds(recording.duration_ns) : seconds(found.end_after_ns), margin = Math.max((to - from) * 0.1, 0.01);
  if (found.kind === "oom") chart.show(from + recording.shift - BEFORE_FAILURE, from + recording.shift + 0.5);
  else chart.show(from + recording.shift - margin, to + recording.shift + margin);
  chart.place.scrollIntoView({ block: "nearest" });
  chart.say((found.first ?? found).what);
}

// One finding: what its first sign said, and its last if that is another.
function findingPanel(recording, found, of, chart) {
  const from = seconds(found.begin_after_ns), to = found.end_after_ns === null ? seconds(recording.duration_ns) : seconds(found.end_after_ns);
  const full = found.kind === "oom" ? recording.gpus.find(({ index }) => index === found.gpu) : null;
  const failure = full?.breakdown ? heldAtFailure(full.breakdown.points, from, full.usable_bytes) : [];
  const first = found.first ?? found, changed = found.what !== first.what || found.why !== first.why;
  return element("section", { class: `found ${lookOf(found.severity)}` },
    element("p", {}, element("strong", {}, of + first.what)),
    element("p", {}, first.why),
    changed ? element("p", {}, `At last, ${duration(seconds(found.seen_after_ns))}: ${found.what} ${found.why}`) : null,
    element("p", {}, found.advice), ...failure,
    element("p", { class: "kind" }, `${found.severity}, ${found.kind}, ${found.certainty}, from ${duration(from)} to ${duration(to)}${found.workloads.length ? ` · ${found.workloads.join(", ")}` : ""} `,
      element("button", { onclick: () => showFinding(recording, found, chart), "aria-label": `Show ${found.kind} at ${duration(from)}` }, "Show")));
}

// Times at which an incident came that have a button, and incidents above the chart.
const MOST_TIMES = 8, MOST_ABOVE = 3;

// What was found: the worst of it for above the chart, and the rest, with advice, for below.
function findings(report, chart) {
  const made = [], several = report.recordings.length > 1, advice = [];
  for (const recording of report.recordings) {
    const of = several ? `${recording.name}: ` : "";
    for (const { severity, kinds } of recording.incidents) {
      const all = kinds.map((positions) => positions.map((at) => recording.findings[at])), [[...times]] = all, newest = times.at(-1);
      if (all.flat().length === 1) { made.push([severity, findingPanel(recording, newest, of, chart)]); continue; }
      const shown = times.slice(0, MOST_TIMES).map((found) => element("button", { onclick: () => showFinding(recording, found, chart), "aria-label": `Show ${found.kind} at ${moment(recording, found.begin_after_ns)}` }, moment(recording, found.begin_after_ns)));
      const often = times.length > 1 ? `${times.length} times` : "once", left = times.length - shown.length;
      made.push([severity, element("section", { class: `found ${lookOf(severity)}` }, element("p", {}, element("strong", {}, of + newest.what)),
        all.length > 1 ? element("ul", {}, ...all.slice(1).map((findings) => element("li", {}, findings.at(-1).what))) : null,
        element("p", {}, newest.why), element("p", {}, element("strong", {}, "What to do: "), newest.advice),
        element("p", { class: "kind" }, `${severity}, ${often}: `, ...shown.flatMap((button) => [button, " "]), left > 0 ? `and ${left} more` : null),
        element("details", {}, element("summary", {}, `${all.flat().length} findings: ${all.map((findings) => findings[0].kind + (findings.length > 1 ? ` (${findings.length})` : "")).join(", ")}`),
          ...all.flat().map((found) => findingPanel(recording, found, of, chart))))]);
    }
  }
  for (const recording of report.recordings) {
    for (const text of recording.advice) advice.push(element("section", { class: "found info" },
      element("p", {}, element("strong", {}, report.recordings.length > 1 ? `${recording.name}: advice` : "Advice")), element("p", {}, text)));
  }
  const rank = ([severity]) => SEVERITIES.indexOf(lookOf(severity)), worst = [...made].sort((a, b) => rank(a) - rank(b)).filter((one) => rank(one) < 2).slice(0, MOST_ABOVE);
  const panels = (some) => some.map(([, panel]) => panel), rest = [...panels(made.filter((one) => !worst.includes(one))), ...advice];
  return { above: worst.length ? [element("h2", {}, "Findings"), ...panels(worst)] : [],
    below: rest.length ? [element("h2", {}, worst.length ? "Further findings and advice" : "Findings"), ...rest] : [] };
}

function tables(report, chart) {
  const made = [], several = report.recordings.length > 1;
  for (const [nth, recording] of report.recordings.entries()) {
    const of = several ? ` in ${recording.name}` : "";
    const jump = (span, text) => span === null ? "not known" : element("button", {
      onclick: () => {
        const from = seconds(span.after_ns) + recording.shift, long = seconds(span.duration_ns);
        chart.show(from - long * 0.2, from + long * 1.2);
        chart.place.scrollIntoView({ block: "nearest" });
      }, "aria-label": `Show ${text}` }, text);
    if (recording.gpus.length) made.push(element("h2", {}, `GPUs${of}`), table(`Memory of each GPU${of}`,
      ["GPU", "name", "peak", "reached at", "mean", "lowest", "usable", "unknown for", "changes", "in the chart"],
      recording.gpus.map((gpu) => [gpu.index, gpu.name ?? "not known", bytes(gpu.peak_bytes),
        moment(recording, gpu.peak_after_ns), bytes(gpu.mean_bytes), bytes(gpu.lowest_bytes),
        bytes(gpu.usable_bytes), stretch(recording, gpu.unknown_ns), gpu.changes.toLocaleString("en"),
        gpu.bucket_ns === null ? "every change" : `extremes of every ${duration(seconds(gpu.bucket_ns))}`]), 2));
    const parted = recording.gpus.filter((gpu) => gpu.at_peak);
    if (parted.length) made.push(element("h2", {}, `What the memory was${of}`),
      element("p", {}, "In the second of each GPU's peak. With one GPU in the chart, bands show it at all times: what allocators gave out, what they kept, what the same processes held outside of them, and other processes."),
      table(`Memory of each GPU at its peak by who held it${of}`, ["GPU", ...MEMORY_PARTS.map(partName)], parted.map(({ index, at_peak: held }) => [index, bytes(held.allocated_bytes), bytes(held.cached_bytes), bytes(held.outside_allocator_bytes), bytes(held.process_bytes), bytes(held.other_processes_bytes)])));
    for (const { rank, sentences, columns, rows } of recording.logged) {
      made.push(element("h2", {}, `Memory as rank ${rank} printed it${of}`), element("p", {}, sentences.join(" ")),
        table(`What rank ${rank} printed at each phase${of}`, columns, rows, 1));
    }
    if (recording.trace) made.push(...traceTables(recording, of, jump));
    const rows = recording.rows.map((row) => {
      const [job, rank] = recording.ranks[row.rank];
      const step = (span) => span === null || span.step === null ? "" : ` in step ${span.step}`;
      return [row.kind === "step" ? "step" : row.name, job, rank, row.count.toLocaleString("en"), row.mean_ns === null ? "not known" : duration(row.mean_ns / 1e9),
        jump(row.longest, row.longest === null ? "" : duration(seconds(row.longest.duration_ns)) + step(row.longest)),
        jump(row.highest, row.highest === null ? "" : gib(row.highest.peak_bytes) + step(row.highest))].map((cell) =>
          typeof cell === "number" ? String(cell) : cell);
    });
    // Of a profiler's trace, these are joined stretches, and what the GPUs did is above.
    if (rows.length && !recording.trace) made.push(element("h2", {}, `Phases${of}`), table(`Steps, phases and layers${of}`,
      ["phase", "job", "rank", "count", "mean", "longest", "highest peak"], rows, 2));
    const steps = longestSteps(recording).map((span) => {
      const { begin, end, step, peak, row, open } = recording.columns, [job, rank] = recording.ranks[recording.rows[row[span]].rank];
      const long = end[span] - begin[span], name = Number.isNaN(step[span]) ? "not known" : String(step[span]);
      return [jump({ after_ns: begin[span] * 1e9, duration_ns: long * 1e9 }, name), job, String(rank), duration(begin[span]), duration(long) + LENGTHS[open[span]],
        gib(peak[span])];
    });
    // Those of a trace are listed with what the GPUs did in them.
    if (steps.length && !recording.trace) made.push(element("h2", {}, `Longest steps${of}`), table(`The longest steps${of}`,
      ["step", "job", "rank", "began at", "duration", "peak"], steps, 2));
    for (const gpu of recording.gpus) {
      if (!gpu.largest.length) continue;
      made.push(element("h2", {}, `Largest allocations on GPU ${gpu.index}${of}`), table(
        `${gpu.largest.length} of ${(gpu.allocations ?? 0).toLocaleString("en")} allocations on GPU ${gpu.index}${of}`,
        ["size", "allocated at", "lasted"], gpu.largest.map((one) => [gib(one.bytes), duration(seconds(one.after_ns)),
          one.freed ? duration(seconds(one.lasted_ns)) : "never freed"]), 0));
    }
    for (const gpu of recording.gpus) if (gpu.allocator) made.push(...allocatorTables(gpu, of, `${nth} ${gpu.uuid}`, chart));
    const gaps = longestGaps(recording).map(({ gpu, from, to }) => [gpu, duration(from), duration(to - from)]);
    if (gaps.length && recording.times !== "readings") made.push(element("h2", {}, `Longest gaps${of}`),
      table(`The longest times at which memory is not known${of}`, ["GPU", "began at", "lasted"], gaps));
    const notes = [];
    if (several && report.align_step !== null) notes.push(recording.is_aligned
      ? `In the chart, 0 s is the begin of step ${report.align_step}. Tables count from the recording's begin.`
      : `It is not aligned: the page has no step ${report.align_step} of it.`);
    else if (recording.offset_ns !== null) notes.push(
      `It began ${duration(recording.shift)} after the first of the files that ran at the same time. The chart counts from that one's begin, tables from this one's.`);
    else if (report.recordings.some((other) => other.offset_ns !== null) && recording.spans + recording.gpus.length > 0) notes.push(
      recording.times === "unix" ? "It ran at another time than the first file: the chart shows it from its begin." : "Its times are not times of day: the chart shows it from its begin.");
    for (const assumed of recording.assumed) notes.push(`Guessed: ${assumed}.`);
    if (recording.missing.length) notes.push(`Not in this file: ${recording.missing.join(", ")}.`);
    if (recording.left_out) notes.push(`${recording.left_out.toLocaleString("en")} of the shortest steps and phases are not in the chart.`);
    if (recording.skipped) notes.push(`${recording.skipped.toLocaleString("en")} lines or rows could not be read: ${recording.skipped_first}`);
    if (notes.length) made.push(element("h2", {}, `About this recording${of}`), ...notes.map((note) => element("p", {}, note)));
  }
  return made;
}

const milliseconds = (ns) => ns === null ? "not known" : `${(ns / 1e6).toFixed(2)} ms`;
const share = (part, whole) => whole ? `${(part / whole * 100).toFixed(1)} %` : "";
const bandwidth = (perSecond) => perSecond === null ? "not known" : `${(perSecond / 1e9).toFixed(1)} GB/s`;

// Kernels that are listed, and letters of their names.
const MOST_KERNELS = 20, MOST_KERNEL_NAME = 70;

// What each GPU did in each step of a trace of the profiler, and its collectives.
function traceTables(recording, of, jump) {
  const { steps, steps_left_out: more, unusable_events: unusable, unknown_collectives: unknown, launch_delays: delays, operators, annotations, short_kernels: shortKernels } = recording.trace;
  const number = ({ step }) => step === null ? "all" : String(step);
  const shown = (step) => step.begin_after_ns === null ? number(step)
    : jump({ after_ns: step.begin_after_ns, duration_ns: step.window_ns }, number(step));
  const made = [element("h2", {}, `What the GPUs did${of}`), table(`Steps of the trace${of}`,
    ["step", "GPU", "duration", "busy", "idle", "idle for data", "idle for the host", "idle otherwise", "compute", "collectives", "overlap"],
    steps.map((step) => [shown(step), String(step.device), milliseconds(step.window_ns), share(step.busy_ns, step.window_ns),
      milliseconds(step.idle_ns), milliseconds(step.idle.data_ns), milliseconds(step.idle.host_ns), milliseconds(step.idle.other_ns),
      milliseconds(step.compute_ns), milliseconds(step.communication_ns), step.overlap === null ? "" : share(step.overlap, 1)]), 1)];
  if (steps.some((step) => step.allocated_peak_bytes !== null)) made.push(element("h2", {}, `Memory of each step${of}`), table(
    `What PyTorch's allocator had given out and reserved at most while the host was in each step${of}`, ["step", "GPU", "allocated", "reserved"],
    steps.map((step) => [shown(step), String(step.device), bytes(step.allocated_peak_bytes), bytes(step.reserved_peak_bytes)]), 1));
  const collectives = steps.flatMap((step) => step.collectives.map((kind) => [number(step), kind.kind, kind.count.toLocaleString("en"),
    milliseconds(kind.total_ns), bytes(kind.bytes), bandwidth(kind.bus_bytes_per_second)]));
  if (collectives.length) made.push(element("h2", {}, `Collectives${of}`), table(`Collectives by step and kind${of}`,
    ["step", "collective", "count", "time", "messages", "bus bandwidth"], collectives, 2));
  const kernels = recording.rows.filter(({ kind }) => kind === "layer").sort((a, b) => b.count * b.mean_ns - a.count * a.mean_ns), all = kernels.reduce((sum, { count, mean_ns: mean }) => sum + count * mean, 0);
  if (kernels.length) made.push(element("h2", {}, `Kernels${of}`), table(`The kernels and copies that took the most time${kernels.length > MOST_KERNELS ? `; there are ${kernels.length - MOST_KERNELS} more` : ""}${of}`,
    ["kernel or copy", "on", "count", "time", "of all", "mean", "longest"], kernels.slice(0, MOST_KERNELS).map((row) => [element("span", { title: row.name }, row.name.length > MOST_KERNEL_NAME ? `${row.name.slice(0, MOST_KERNEL_NAME)}…` : row.name), recording.ranks[row.rank][0], row.count.toLocaleString("en"),
      milliseconds(row.count * row.mean_ns), share(row.count * row.mean_ns, all), duration(row.mean_ns / 1e9), jump(row.longest, duration(seconds(row.longest.duration_ns)))]), 2));
  if (operators.length) made.push(element("h2", {}, `Operators and ranges${of}`), table(`The operators or NVTX ranges of the host that launched what took the most time${of}`,
    ["operator or range", "on", "count", "time"], operators.map((by) => [by.operator ?? "none, or one whose name is not kept", `GPU ${by.device}`, by.count.toLocaleString("en"), milliseconds(by.total_ns)]), 2));
  const aStep = (ns, count) => ns === null || !count ? "" : milliseconds(ns / count);
  if (annotations.length) made.push(element("h2", {}, `Annotations${of}`), table(`What was launched within the annotations or NVTX ranges that took the most time, and how long the host was in them${of}`,
    ["annotation or range", "count", "launched", "on GPUs", "a step", "on the host", "a step"], annotations.map(({ annotation, all, in_steps: inSteps, steps: count }) => [annotation ?? "those whose names are not kept",
      all.count.toLocaleString("en"), all.launched === null ? "" : all.launched.toLocaleString("en"), milliseconds(all.gpu_ns), aStep(inSteps.gpu_ns, count), milliseconds(all.host_ns), aStep(inSteps.host_ns, count)]), 1));
  for (const short of shortKernels) {
    made.push(element("h2", {}, `Short kernels of GPU ${short.device}${of}`), element("p", {}, `${short.count.toLocaleString("en")} of the ${short.kernels.toLocaleString("en")} kernels take less than ${duration(short.below_ns / 1e9)}, about as long as launching one. They take ${share(short.total_ns, short.kernels_ns)} of the kernels' time, and the GPU was idle for ${milliseconds(short.idle_before_ns)} right before them. Launch fewer: fuse them with torch.compile, or record them as a CUDA graph.`));
    if (short.sequences?.length) made.push(table(`Short kernels of GPU ${short.device} that often run one after another on one stream${of}`, ["kernels", "count", "time", "between them"],
      short.sequences.map((one) => [one.kernels.map((name) => name.length > MOST_KERNEL_NAME ? `${name.slice(0, MOST_KERNEL_NAME)}…` : name).join(", "), one.count.toLocaleString("en"), milliseconds(one.total_ns), milliseconds(one.between_ns)]), 1));
  }
  for (const { device, median_ns: median, p99_ns: most } of delays.slice(0, 8)) made.push(element("p", {},
    `Kernels of GPU ${device} began ${duration(median / 1e9)} after their launch in the median, 99 % of them within ${duration(most / 1e9)}.`));
  if (more) made.push(element("p", {}, `${more.toLocaleString("en")} further steps are not listed here; JSON has them.`));
  if (unusable) made.push(element("p", {}, `${unusable.toLocaleString("en")} events of the trace could not be used.`));
  if (unknown.length) made.push(element("p", {}, `Collectives of unknown kind: ${unknown.join(", ")}`));
  return made;
}

// How long the ranks of several traces waited for each other.
function rankTables({ ranks }) {
  if (!ranks) return [];
  if (ranks.problem) return [element("p", {}, `The traces are not compared as ranks of one job: ${ranks.problem}.`)];
  if (ranks.matched === 0) return [element("p", {}, "How long ranks waited for each other is not known: no collective is of all ranks of a group.")];
  const made = [element("h2", {}, "Ranks"), table("Time in collectives by rank",
    ["rank", "in collectives", "waiting for others", "transfer", "began last", "made others wait"],
    ranks.ranks.map((rank) => [String(rank.rank), milliseconds(rank.total_ns), milliseconds(rank.waiting_ns), milliseconds(rank.transfer_ns),
      rank.times_last === null ? "not known" : rank.times_last.toLocaleString("en"), milliseconds(rank.made_others_wait_ns)]))];
  if (ranks.most_waited_for !== null) made.push(element("p", {}, `The others waited for rank ${ranks.most_waited_for} the longest.`));
  if (ranks.clocks.problem) made.push(element("p", {}, `Waiting is not known: ${ranks.clocks.problem}.`));
  if (ranks.unmatched) made.push(element("p", {}, `${ranks.unmatched.toLocaleString("en")} collectives have no certain counterpart in the other traces.`));
  return made;
}

// The layer profiles of all recordings, one shown at a time.
function profiles(report) {
  const several = report.recordings.length > 1, all = report.recordings.flatMap((recording) => recording.profiles.map((profile) => {
    const title = `${several ? `${recording.name}, ` : ""}${profile.job} rank ${profile.rank}${profile.step === null ? "" : `, step ${profile.step}`}`;
    const named = (name) => recording.layer_names[name], top = profile.top.map((one) => ({ ...one, layer: named(one.layer) }));
    return { ...profile, title, totals: { ...profile, top }, records: profile.records.map(([name, ...rest]) => [named(name), ...rest]) };
  }));
  if (!all.length) return [];
  const chooser = layerChooser("Profile", (nth) => chooser.show(all[Number(nth)]));
  chooser.offer(all.map(({ title }, nth) => [String(nth), title]));
  return [element("h2", {}, "Layers"), chooser.place, () => chooser.show(all[0])];
}

function longestGaps(recording) {
  const gaps = [];
  for (const gpu of recording.gpus) {
    for (const gap of gpu.curve.gaps(-Infinity, Infinity)) gaps.push({ gpu: gpu.index, ...gap });
  }
  return gaps.sort((a, b) => (b.to - b.from) - (a.to - a.from)).slice(0, 10);
}

function longestSteps(recording) {
  const { begin, end, row } = recording.columns, steps = [];
  for (let i = 0; i < recording.spans; i++) if (recording.rows[row[i]].kind === "step") steps.push(i);
  return steps.sort((a, b) => (end[b] - begin[b]) - (end[a] - begin[a])).slice(0, 20);
}

function marksOf(report) {
  const colors = { critical: "--bad", warning: "--warn" };
  // The GPUs that a finding is about: its own, or those of its rank.
  const gpusOf = ({ gpus, ranks, gpus_of: all }, { gpu, job, rank: number }) => gpu !== null ? gpus.filter(({ index }) => index === gpu).map(({ uuid }) => uuid)
    : ranks.flatMap(([name, rank], nth) => name === job && rank === number ? all[nth] : []);
  return report.recordings.flatMap((recording, nth) => recording.findings.map((found) => ({
    from: seconds(found.begin_after_ns) + recording.shift,
    to: seconds(found.end_after_ns ?? recording.duration_ns) + recording.shift,
    color: colors[found.severity] ?? "--note",
    on: gpusOf(recording, found).map((uuid) => `${nth} ${uuid}`),
    text: `${found.kind}: ${(found.first ?? found).what}`,
    last: found.first && found.first.what !== found.what
      ? { at: seconds(found.seen_after_ns) + recording.shift, text: `${found.kind}: ${found.what}` } : null,
  })));
}

// How far above the others the row of a series belongs: by its worst finding, and then the fuller GPU first.
function worstOf(marks) {
  const trouble = new Map();
  for (const { on, color } of marks) for (const key of on) trouble.set(key, Math.min(trouble.get(key) ?? 2, ["--bad", "--warn"].indexOf(color) + 1 || 2));
  return ({ key, peak, capacity }) => (trouble.get(key) ?? 3) - (peak && capacity ? peak[0] / capacity / 2 : 0);
}

async function build() {
  const report = JSON.parse(document.getElementById("data").textContent);
  if (typeof DecompressionStream === "undefined") {
    throw new Error("it needs a browser with DecompressionStream, which all have had since 2023");
  }
  decode(await unpacked(report.columns), report.recordings);
  placeAll(report);
  document.getElementById("about").append(...about(report));
  const main = document.getElementById("report"), series = seriesOf(report), lanes = lanesOf(report);
  const length = Math.max(...report.recordings.map((recording) => seconds(recording.duration_ns) + recording.shift));
  const units = new Set(report.recordings.map((recording) => recording.times));
  const hasChart = series.length > 0 || lanes.length > 0, marks = marksOf(report);
  const { region, chart } = chartRegion({ series, choose: (one, band) => { if (band.site) chart.stacks.get(one.key)?.choose(band.site); }, lanes: lanes.slice(0, MOST_LANES), findings: marks, worst: worstOf(marks),
    // Curves of several recordings are compared on one axis.
    areRows: report.recordings.length === 1 && series.filter(({ shown }) => shown).length > 1,
    bounds: [Math.min(0, ...report.recordings.map((recording) => recording.shift)), length],
    axis: units.size === 1 && units.has("readings") ? READINGS : SECONDS },
  [], "", [...series.length ? [] : "prhf", ...marks.length ? [] : "n", ...lanes.length ? [] : "s"]);
  // Layers alone have no times.
  main.replaceChildren(...hasChart ? [region] : []);
  if (lanes.length > MOST_LANES) region.append(element("p", {}, `${lanes.length - MOST_LANES} of ${lanes.length} ranks are not in the chart; the tables have all.`));
  chart.filled = series.length <= 2;
  // The flame graph of each GPU of an allocator, which the chart's bands lead to.
  chart.stacks = new Map();
  chart.draw();
  const { above, below } = findings(report, chart);
  main.prepend(...above);
  main.append(...[...comparison(report), ...rankTables(report), ...below, ...tables(report, chart)].filter((made) => made !== null));
  const [heading, place, draw] = profiles(report);
  if (draw) {
    main.append(heading, place);
    draw();
  }
  // For tests and benchmarks: the page is complete, so many milliseconds after it was asked for.
  chart.paint();
  document.documentElement.dataset.readyAfterMs = performance.now().toFixed(0);
  document.documentElement.dataset.ready = "true";
  globalThis.highwaterChart = chart;
  // Its keys work at once.
  if (document.activeElement === document.body) chart.place.focus({ preventScroll: true });
}

build().catch((error) => {
  document.getElementById("report").replaceChildren(element("p", { role: "alert" },
    `The report cannot be drawn: ${error.message}. highwater report FILE prints the same numbers as text.`));
});
