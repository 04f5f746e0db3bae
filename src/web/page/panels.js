"use strict";
// The parts of the live page as elements: GPUs, jobs, findings, captures; incidents.js has those. Every entity has a link to its own page.

const hrefOf = (path) => `#/${path.map(encodeURIComponent).join("/")}`;
const link = (path, text) => element("a", { href: hrefOf(path) }, text);
const ratio = (value, digits = 0) => value === null || value === undefined ? "not known" : `${(value * 100).toFixed(digits)} %`;
const unit = (value, name, digits = 0) => value === null || value === undefined ? "not known" : `${value.toFixed(digits)} ${name}`;
// Local time as on the chart's axis, with its date: a Swede writes it so.
const when = (unixNs) => unixNs === null || unixNs === undefined ? "not known" : new Date(unixNs / 1e6).toLocaleString("sv");
const millis = (seconds) => duration(seconds === null ? NaN : seconds);
const gpuName = (feed, uuid) => feed.gpus.get(uuid)?.gpu ?? uuid;

// The share of a GPU's memory in use; `null` where it is not known.
function shareOf(gpu) {
  const used = gpu.up ? gpu.memory.now() : NaN;
  return gpu.usable && !Number.isNaN(used) ? used / gpu.usable : null;
}

function gpuTable(feed, gpus) {
  const rows = gpus.map((gpu) => {
    const used = gpu.up ? gpu.memory.now() : NaN, share = shareOf(gpu);
    const bar = element("meter", { min: "0", max: "1", high: "0.97", value: share ?? 0, "aria-label": `Share of GPU ${gpu.gpu}'s memory in use` });
    const ranks = feed.ranks.list().filter(({ gpus }) => gpus.includes(gpu.uuid));
    const jobs = [...new Map(ranks.map(({ id, job }) => [id, job]))];
    return [element("span", {}, link(["gpu", gpu.gpu], `GPU ${gpu.gpu}`)), gpu.name ?? "not known",
      gpu.up ? jobs.length ? element("span", {}, ...jobs.flatMap(([id, job], at) => [at ? ", " : "", link(["job", id], job)])) : "none" : (gpu.trouble ?? "does not answer"),
      share === null ? "not known" : element("span", {}, bar, ` ${ratio(share)}`), gib(used), gib(gpu.usable), ratio(gpu.utilization), unit(gpu.power, "W"),
      unit(gpu.temperature, "°C"), gpu.throttle === null || gpu.throttle === undefined ? "not known" : gpu.throttle.join(", ") || "none"];
  });
  for (const gpu of feed.skipped ?? []) rows.push([`GPU ${gpu.gpu}`, "not known", gpu.trouble ?? "cannot be opened", ...new Array(7).fill("not known")]);
  return table("GPUs now", ["GPU", "name", "jobs", "in use", "memory", "usable", "busy", "power", "temperature", "slowed by"], rows, 3, true);
}

function jobTable(feed) {
  const rows = feed.jobs.map(({ job, id, namespace, user, ranks }) => {
    const steps = ranks.map(({ step }) => step).filter((step) => step !== null);
    const heard = Math.max(...ranks.map((rank) => rank.last_annotation_unix_nano));
    const gpus = [...new Set(ranks.flatMap((rank) => rank.gpus))].map((uuid) => gpuName(feed, uuid));
    const first = Math.min(...steps), last = Math.max(...steps);
    return [link(["job", id], job), namespace ?? (user === null ? "this daemon" : `user ${user}`), String(ranks.length), ranks[0]?.world_size === null ? "not known" : String(ranks[0]?.world_size),
      (gpus.every((gpu) => /^\d+$/.test(gpu)) ? inRuns(gpus.map(Number).sort((a, b) => a - b)) : gpus.join(", ")) || "not known", steps.length ? first === last ? String(last) : `${first} to ${last}` : "not known",
      `${duration(Math.max(0, feed.jobsAt - feed.seconds(heard)))} ago`];
  });
  return table("Jobs", ["job", "owner", "ranks here", "of", "GPUs", "step", "last heard"], rows, 2, true);
}

// The pods or Slurm steps of a finding or an incident, after what else it concerns.
const inWorkloads = (found) => workloadsText(found) && ` · ${workloadsText(found)}`;

// A finding with its advice. `show` shows it on the chart; null if there is no chart.
function findingPanel(feed, found, show) {
  const captures = capturesOf(feed, found), ended = found.ended_unix_nano;
  const state = ended === null ? "going on" : `ended ${when(ended)}`, { first, signs } = found;
  // Each text is of the moment of its sign.
  const said = (at, what, which) => element("p", {}, `${which} ${when(at)}: `, element("strong", {}, what));
  const texts = signs > 1 ? [said(first.seen_unix_nano, first.what, "First sign, at"), said(found.seen_unix_nano, found.what, `Last of ${signs.toLocaleString("en")} signs, at`)]
    : [said(found.seen_unix_nano, found.what, "At")];
  return element("section", { class: `found ${found.severity}${ended === null ? "" : " ended"}`, "aria-label": found.what },
    texts, element("p", {}, found.why), element("p", {}, found.advice),
    element("p", { class: "kind" }, `${found.severity}, ${found.certainty}, since ${when(found.begin_unix_nano)}, ${state}. `,
      link(["finding", String(found.id)], `${found.finding} ${found.id}`),
      found.gpu === null ? null : [" on ", link(["gpu", found.gpu], `GPU ${found.gpu}`)],
      found.job === null ? null : [" in ", link(["job", found.job_id], found.job), found.rank === null ? "" : ` rank ${found.rank}`],
      inWorkloads(found),
      found.waiting_ranks.length ? ` · ${found.waiting_ranks.length === 1 ? "rank" : "ranks"} ${found.waiting_ranks.join(", ")} ${found.waiting_ranks.length === 1 ? "waits" : "wait"}` : null,
      captures.map((capture) => [" · capture ", link(["capture", capture.id], capture.id)]), " ",
      show ? element("button", { onclick: () => show(found), "aria-label": `Show ${found.finding} ${found.id} on the chart` }, "Show") : null));
}

// The kinds of findings whose remedy is to use less memory.
const LACKS_MEMORY = ["low_headroom", "allocator_thrash", "comm_starvation", "oom"];

// What to change so that a job needs less memory, in sentences; none where nothing is known.
function adviceOf(job, { checkpoints, batch }) {
  const said = [];
  const of = checkpoints?.modules;
  if (of?.modules.length && !checkpoints.missing_records) {
    const names = of.modules.map((one) => one.name), more = names.length - 4;
    said.push(`Checkpoint ${more > 0 ? `${names.slice(0, 4).join(", ")} and ${more} more` : names.join(", ")} of ${job}, each by itself: the peak of a step in live tensors should fall from ${gib(of.observed_peak_bytes)} to ${gib(of.predicted_peak_bytes)}.`
      + (of.recomputed_seconds > 0 ? ` Forward passes that took ${(of.recomputed_seconds * 1e3).toFixed(1)} ms in the profiled step run a second time.` : ""));
  } else if (checkpoints?.split_modules.length && !checkpoints.missing_records) {
    const { split_modules: at, max_memory: most, activation_bytes: all, observed_peak_bytes: observed, predicted_peak_bytes: predicted } = checkpoints;
    said.push(`Checkpoint activations of ${job} before ${at.join(", ")}: at most ${gib(most)} of them are then held at a time instead of ${gib(all)}.`
      + (observed === null || predicted === null ? "" : ` The allocator's peak, ${gib(observed)}, should fall to ${gib(predicted)}.`));
  }
  if (batch?.largest_batch_size) said.push(`The largest batch of ${job} whose ${batch.basis === "live_tensors" ? "live tensors stay" : "memory stays"} below ${gib(batch.limit_bytes)} has ${batch.largest_batch_size} samples on each rank.`);
  return said;
}

// Captures of a finding: taken for its kind, and of its time.
function capturesOf(feed, found) {
  const end = found.ended_unix_nano ?? Infinity;
  return feed.captures.captures.filter((capture) => capture.reasons.includes(found.finding) && capture.begin_unix_nano !== null
    && capture.begin_unix_nano <= Math.max(found.raised_unix_nano, found.begin_unix_nano) && (capture.end_unix_nano ?? Infinity) >= Math.min(found.begin_unix_nano, end));
}

// Panels of what goes on, and below them of what has ended.
function panels(all, panel, now, before) {
  const active = all.filter(({ ended_unix_nano: ended }) => ended === null), ended = all.filter(({ ended_unix_nano: ended }) => ended !== null);
  return [element("h2", {}, now), active.length ? active.map(panel) : element("p", {}, "There are none."),
    ended.length ? [element("h2", {}, before), ended.map(panel)] : []].flat(2);
}

function captureTable(feed, captures) {
  const rows = captures.map((capture) => {
    const path = `api/v1/captures/${encodeURIComponent(capture.id)}`, is = capture.state;
    const whole = is !== "writing" && is !== "failed" && is !== "unreadable";
    return [link(["capture", capture.id], capture.id), capture.reasons.join(", "),
      whole ? element("span", {}, element("a", { href: `${path}/report` }, "open"), " ", element("a", { href: path, download: `${capture.id}.sqlite` }, "download")) : "not yet",
      is.replace("_", " "), when(capture.begin_unix_nano),
      capture.begin_unix_nano === null || capture.end_unix_nano === null ? "not known" : duration((capture.end_unix_nano - capture.begin_unix_nano) / 1e9),
      gib(capture.bytes)];
  });
  return table("Captures", ["capture", "taken for", "file", "state", "begin", "length", "size"], rows, 4, true);
}

function capturesPart(feed, captures = feed.captures.captures) {
  const { on, trouble } = feed.captures;
  return [element("h2", {}, "Captures"), trouble ? element("p", { class: "trouble" }, trouble) : null,
    captureTable(feed, captures) ?? element("p", {}, on === false ? "Captures are off: the setting captures.directory names no folder." : "None has been taken.")];
}

// A duration, and how many times the others' it is if that is much.
function beside(seconds, all) {
  const usual = median(all);
  if (Number.isNaN(seconds) || all.length < 2 || !(seconds > usual * 1.2)) return duration(seconds);
  return element("strong", { class: "slow" }, `${duration(seconds)} ×${(seconds / usual).toFixed(1)}`);
}

// The ranks of a job side by side, and its phases. Of many ranks, `shown` are the worst; `more` shows all.
function jobTables(feed, { ranks }, shown, more) {
  const names = [...new Set(ranks.flatMap(({ phases }) => phases.map(({ phase }) => phase)))];
  const mean = (rank, name) => rank.phases.find(({ phase }) => phase === name)?.durations.mean_seconds ?? NaN;
  const step = (rank) => rank.step_durations?.mean_seconds ?? NaN;
  const number = (value, digits) => value === null ? "not known" : value.toFixed(digits);
  const side = shown.map((rank) => [`rank ${rank.rank}`, beside(step(rank), ranks.map(step)),
    ...names.map((name) => beside(mean(rank, name), ranks.map((one) => mean(one, name))))]);
  const state = shown.map((rank) => [`rank ${rank.rank}`, element("span", {}, ...rank.gpus.flatMap((uuid, at) => [at ? ", " : "", link(["gpu", gpuName(feed, uuid)], gpuName(feed, uuid))]), rank.gpus.length ? "" : "not known"),
    rank.exited_unix_nano === null ? rank.open.join(" › ") || "between steps" : "has ended", String(rank.step ?? "not known"), String(rank.steps),
    millis(rank.step_durations?.p50_seconds ?? null), millis(rank.step_durations?.p99_seconds ?? null), millis(rank.step_durations?.max_seconds ?? null),
    number(rank.ratios.comm_slowdown, 2), number(rank.ratios.compute_lag, 2), ratio(rank.ratios.data_stall), gib(rank.reserved_bytes), String(rank.alloc_retries ?? "not known"), String(rank.ooms ?? "not known")]);
  const phases = names.map((name) => {
    const all = ranks.flatMap((one) => one.phases.filter(({ phase }) => phase === name));
    const sum = (of) => all.reduce((total, one) => total + of(one), 0), most = (of) => Math.max(...all.map((one) => of(one) ?? -Infinity));
    const known = (value, show) => Number.isFinite(value) ? show(value) : "not known";
    const count = sum(({ durations }) => durations.count), total = sum(({ durations }) => durations.total_seconds);
    const idle = total > 0 && all.every((one) => one.gpu_idle_seconds !== null) ? sum((one) => one.gpu_idle_seconds) / total : null;
    return [name, count.toLocaleString("en"), duration(total / count), known(most(({ durations }) => durations.p99_seconds), duration),
      known(most(({ durations }) => durations.max_seconds), duration), known(most(({ peak_bytes: peak }) => peak), gib), known(most(({ growth_bytes: growth }) => growth), gib), ratio(idle)];
  });
  return [
    element("h2", {}, "Ranks side by side"), table("Mean duration since the daemon knows the rank; what takes 1.2 times the median of the ranks is marked", ["rank", "step", ...names], side) ?? element("p", {}, "No rank is known."), more,
    element("h2", {}, "Ranks"), table("Ranks", ["rank", "GPUs", "is in", "step", "steps", "median step", "99th percentile", "longest", "comm. slowdown", "compute lag", "data stall", "reserved", "retries", "out of memory"], state, 3, true),
    element("h2", {}, "Phases"), table("Phases over all ranks", ["phase", "count", "mean", "highest p99", "longest", "peak of the last", "growth in the last", "GPU idle"], phases) ?? element("p", {}, "No phase has ended."),
  ];
}
