"use strict";
// What one step did on each rank of its job, beside what that rank's steps usually do.

// Other steps that a comparison needs; ranks in the table; phases that a sentence names.
const FEWEST_STEPS = 3, MOST_STEP_RANKS = 16, MOST_NAMED = 3;
// What is longer by less than this share of a step, or by less than this many times the usual deviation, is as usual.
const LEAST_SHARE = 0.02, DEVIATIONS = 4;

// The steps of a rank that have ended, each with the time in its phases. `spans` are columns, in the order of begins.
function stepsOf({ begin, end, step, peak, of, open }) {
  const steps = [];
  for (let i = 0; i < begin.length; i++) {
    if (of[i].kind === "step" && !open?.[i]) steps.push({ number: step[i], begin: begin[i], end: end[i], peak: peak[i], phases: new Map() });
  }
  let at = 0;
  for (let i = 0; i < begin.length; i++) {
    if (of[i].kind !== "phase" || open?.[i]) continue;
    while (at + 1 < steps.length && steps[at + 1].begin <= begin[i]) at++;
    const inside = steps[at];
    if (inside && inside.begin <= begin[i] && begin[i] < inside.end) inside.phases.set(of[i].name, (inside.phases.get(of[i].name) ?? 0) + end[i] - begin[i]);
  }
  return steps;
}

// The middle of a list of numbers; NaN of none.
function median(values) {
  const sorted = values.filter((value) => !Number.isNaN(value)).sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// A value of a step beside those of the others: { value, usual, by, isLonger, isShorter }. `step` is how long a step usually takes.
function besideOthers(value, others, step) {
  const usual = others.length < FEWEST_STEPS ? NaN : median(others), deviation = median(others.map((one) => Math.abs(one - usual))), by = value - usual;
  const isOther = Math.abs(by) > LEAST_SHARE * step && Math.abs(by) > DEVIATIONS * deviation;
  return { value, usual, by, isLonger: isOther && by > 0, isShorter: isOther && by < 0 };
}

// A step on all ranks of its job. ranks: { job, rank, shift, spans, isThinned }, the last where the page
// left out the shortest spans; `chosen` is one of them, and `seconds` a time of the chart. null if it
// is in no step then.
function stepOn(ranks, chosen, seconds) {
  const within = (steps, at) => steps.find(({ begin, end }) => begin <= at && at < end);
  const clicked = within(stepsOf(chosen.spans), seconds - chosen.shift);
  if (!clicked) return null;
  const middle = (clicked.begin + clicked.end) / 2 + chosen.shift;
  const found = ranks.filter(({ job }) => job === chosen.job).flatMap((rank) => {
    const steps = stepsOf(rank.spans), far = ({ begin, end }) => Math.abs((begin + end) / 2 + rank.shift - middle);
    // A job that was started anew counts its steps anew.
    const own = Number.isNaN(clicked.number) ? within(steps, middle - rank.shift)
      : steps.filter(({ number }) => number === clicked.number).sort((a, b) => far(a) - far(b))[0];
    if (!own) return [];
    const others = steps.filter((one) => one !== own), lengths = others.map(({ begin, end }) => end - begin), usually = median(lengths);
    // A step without a phase has none of it, unless the page left the shortest out: then those count that have it.
    const times = (name) => others.filter(({ phases }) => phases.has(name) || !rank.isThinned).map((one) => one.phases.get(name) ?? 0);
    const phases = new Map([...own.phases].map(([name, time]) => [name, besideOthers(time, times(name), usually)]));
    return [{ rank, count: others.length, whole: besideOthers(own.end - own.begin, lengths, usually), peak: { value: own.peak, usual: median(others.map(({ peak }) => peak)) }, phases }];
  });
  return { number: clicked.number, job: chosen.job, jobName: chosen.jobName, from: clicked.begin + chosen.shift, to: clicked.end + chosen.shift, chosen, ranks: found };
}

// Why a step took as long as it did, in a sentence.
function stepSaid(found) {
  const { chosen, ranks } = found, own = ranks.find(({ rank }) => rank === chosen);
  const { value, usual, by, isLonger } = own.whole, took = `${stepName(found)} took ${duration(value)} on rank ${chosen.rank}`;
  if (Number.isNaN(usual)) return `${took}. There are too few others to compare it with.`;
  const of = `the median of ${own.count} others${chosen.isThinned ? " that the page has" : ""}`;
  const beside = isLonger ? `${duration(by)} longer than ${of}` : own.whole.isShorter ? `${duration(-by)} less than ${of}` : `within what is usual: ${of} is ${duration(usual)}`;
  const longer = ranks.flatMap(({ rank, phases }) => [...phases].filter(([, one]) => one.isLonger).map(([name, { by: more }]) => ({ name, rank: rank.rank, by: more })))
    .sort((a, b) => b.by - a.by);
  const text = (some) => some.slice(0, MOST_NAMED).map(({ name, rank, by: more }) => `${name} of rank ${rank} by ${duration(more)}`).join(", ")
    + (some.length > MOST_NAMED ? ` and ${some.length - MOST_NAMED} more` : "");
  const [waits, works] = [longer.filter(({ name }) => name === "comm"), longer.filter(({ name }) => name !== "comm")];
  const said = [`${took}, ${beside}.`];
  if (works.length) said.push(`Longer than usual: ${text(works)}.`);
  if (waits.length) said.push(`${works.length ? "Longer in communication, which waits for the latest" : "Longer only in communication"}: ${text(waits)}.`);
  const excess = [...own.phases.values()].reduce((sum, one) => sum + Math.max(one.by, 0), 0);
  if (isLonger && !longer.length && own.phases.size) said.push(excess < by / 2 ? "Most of that time lies between its phases." : "Several phases are each a little longer.");
  return said.join(" ");
}

const stepName = ({ number, jobName }) => `${Number.isNaN(number) ? "A step" : `Step ${number}`} of ${jobName}`;

// The step as a sentence and a table. kinds: of the findings of that time.
function stepPart(found, kinds, close) {
  const { ranks, chosen } = found;
  const cell = ({ value, usual, by, isLonger }, show) => Number.isNaN(by) || parseFloat(show(Math.abs(by))) === 0 ? show(value)
    : element(isLonger ? "strong" : "span", isLonger ? { class: "slow" } : {}, `${show(value)} (${by < 0 ? "−" : "+"}${show(Math.abs(by))})`);
  const names = [...new Set(ranks.flatMap(({ phases }) => [...phases.keys()]))];
  const most = ({ whole, phases }) => Math.max(whole.isLonger ? whole.by : 0, ...[...phases.values()].map(({ by, isLonger }) => isLonger ? by : 0));
  const worst = ranks.length > MOST_STEP_RANKS ? [...ranks].sort((a, b) => (b.rank === chosen) - (a.rank === chosen) || most(b) - most(a)).slice(0, MOST_STEP_RANKS) : ranks;
  const rows = worst.toSorted((a, b) => a.rank.rank - b.rank.rank).map(({ rank, whole, phases, peak }) => [`rank ${rank.rank}`, cell(whole, duration),
    ...names.map((name) => phases.has(name) ? cell(phases.get(name), duration) : "none"), cell({ ...peak, by: peak.value - peak.usual, isLonger: false }, gib)]);
  const title = stepName(found), left = ranks.length - worst.length;
  return element("section", { class: "step", "aria-label": title }, element("h2", {}, title, " ", element("button", { onclick: close, "aria-label": `Close ${title}` }, "Close")),
    element("p", {}, stepSaid(found), kinds.length ? ` Reported of that time: ${[...new Set(kinds)].join(", ")}.` : null),
    table(`Each rank's time in it, and by how much that differs from the median of its other steps${left ? `; ${left} ranks that differ less are left out` : ""}`, ["rank", "step", ...names, "peak"], rows));
}
