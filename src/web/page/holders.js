"use strict";
// What the memory of a GPU is now: what the allocators of its ranks have given out and what they keep, what lies outside of them in the
// same processes, other processes, and what is free.

// Other processes with a part of their own; all smaller ones are one part.
const MOST_OTHERS = 4;

const HOLDERS_NOTE = "Of ranks as of their last marks; other processes as of the driver's last list, at most ten seconds ago.";

// The parts, in the order in which they are drawn: { what, whose, bytes, color, faint }; null if memory is not known. What is kept in
// an allocator's cache can be used again by that process alone.
function holders(feed, gpu) {
  const used = gpu.memory.now();
  if (Number.isNaN(used) || !gpu.usable || !gpu.up) return null;
  const left = new Map((gpu.processes ?? []).map(({ pid, used_bytes: bytes }) => [pid, bytes])), parts = [];
  const add = (what, whose, bytes, color, faint = false) => { if (bytes > 0) parts.push({ what, whose, bytes, color, faint }); };
  const all = feed.jobs.flatMap(({ job, id, ranks }) => ranks.map((rank) => ({ ...rank, job, id })));
  // A rank whose process is gone holds nothing. Counters of a rank with several GPUs are the sum over these.
  const here = all.filter(({ gpus, pid }) => gpus.length === 1 && gpus[0] === gpu.uuid && (gpu.processes === null || left.has(pid)));
  for (const rank of here) {
    // Of two ranks of one process on a GPU it is not known what each holds.
    if (gpu.processes !== null && !left.has(rank.pid)) continue;
    const whose = `${rank.job} rank ${rank.rank}`, own = left.get(rank.pid) ?? null, most = own ?? Infinity;
    // A mark may be old, and a job may send any number: there is no more than what the driver says.
    const [allocated, reserved] = [rank.allocated_bytes, rank.reserved_bytes].map((bytes) => bytes === null ? null : Math.min(bytes, most));
    const outside = rank.outside_allocator_bytes === null ? null : Math.min(rank.outside_allocator_bytes, most - (reserved ?? 0));
    left.delete(rank.pid);
    if (reserved === null) { add("process", whose, own ?? 0, "--c2"); continue; }
    add("allocated", whose, Math.min(allocated ?? reserved, reserved), "--c0");
    add("cached", whose, reserved - Math.min(allocated ?? reserved, reserved), "--c0", true);
    add("outside the allocator", whose, outside ?? 0, "--c1");
  }
  const within = ({ pod, slurm_step: step }) => pod ? `, pod ${pod}` : step ? `, Slurm step ${step}` : "";
  const withinOf = new Map((gpu.processes ?? []).map((process) => [process.pid, within(process)]));
  const nameOf = (pid) => {
    const rank = all.find((one) => one.pid === pid);
    return `process ${pid}${rank ? `, ${rank.job} rank ${rank.rank}` : ""}${withinOf.get(pid) ?? ""}`;
  };
  const others = [...left].filter(([, bytes]) => bytes !== null).sort((a, b) => b[1] - a[1]);
  for (const [pid, bytes] of others.slice(0, MOST_OTHERS)) add("other process", nameOf(pid), bytes, "--c3");
  const more = others.slice(MOST_OTHERS);
  add("other processes", `${more.length} processes`, more.reduce((sum, [, bytes]) => sum + bytes, 0), "--c3");
  const known = parts.reduce((sum, { bytes }) => sum + bytes, 0);
  add("not attributed", gpu.processes === null ? "the driver lists no processes" : "since the last mark, or by what the driver does not list", used - known, "--dim");
  add("free", "", gpu.usable - Math.max(used, known), "--line", true);
  return parts;
}

// `research/llama-0 (trainer)`.
const podName = ({ namespace, pod, container }) => `${namespace}/${pod}${container ? ` (${container})` : ""}`;

// `77.0 of user 1000`.
const slurmName = ({ job, step, user }) => `${job}${step ? `.${step}` : ""}${user === null ? "" : ` of user ${user}`}`;

// The pods or Slurm steps of a finding or an incident: `pod research/llama-0 (trainer)`, or several; null if none are known.
function workloadsText({ pods, slurm_steps: steps }) {
  const list = (what, names) => names.length === 0 ? [] : [`${what}${names.length === 1 ? "" : "s"} ${names.join(", ")}`];
  return [...list("pod", pods.map(podName)), ...list("Slurm step", steps.map(slurmName))].join(", ") || null;
}

// The pods or Slurm steps that have a GPU, in a sentence; none where they are not known, and of a GPU whose MIG instances have them.
function workloadsPart(feed, gpu) {
  if ([...feed.gpus.values()].some(({ parent }) => parent === gpu.uuid)) return [];
  const sentence = (what, all, name) => {
    const named = (one) => `${name(one)}${one.used_bytes === null ? "" : `, ${gib(one.used_bytes)}`}`;
    return !all ? [] : [element("p", {}, all.length === 0 ? `No ${what} has this GPU.` : `${what === "pod" ? "Pods" : `${what}s`} with this GPU: ${all.map(named).join("; ")}.`)];
  };
  return [...sentence("pod", gpu.pods, podName), ...sentence("Slurm step", gpu.steps, slurmName)];
}

// A bar of the parts, and a table with their bytes.
function holdersPart(feed, gpu) {
  const parts = holders(feed, gpu), title = element("h2", {}, `What the memory of GPU ${gpu.gpu} is`);
  if (!parts) return [title, element("p", {}, "Its memory is not known now."), ...workloadsPart(feed, gpu)];
  const total = parts.reduce((sum, { bytes }) => sum + bytes, 0);
  const text = ({ what, whose, bytes }) => `${what}${whose ? `, ${whose}` : ""}: ${gib(bytes)}`;
  const alpha = ({ faint }) => faint ? 0.45 : 1;
  const bar = partsBar(parts.map((part) => ({ title: text(part), color: part.color, alpha: alpha(part), share: part.bytes / total })));
  const rows = parts.map((part) => [colored(part.what, part.color, alpha(part)), part.whose, gib(part.bytes), ratio(part.bytes / gpu.usable)]);
  return [title, bar, table(`Memory of GPU ${gpu.gpu} now`, ["memory", "held by", "bytes", "of what is usable"], rows, 2, true), ...workloadsPart(feed, gpu), element("p", { class: "note" }, HOLDERS_NOTE)];
}
