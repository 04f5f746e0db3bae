"use strict";
// Incidents: what is wrong, whose it is, what it costs and what to do about it. Those that go on, or were over a moment ago, stand
// above the chart; the others below.

// How long an incident that is over stays above the chart, seconds, and how many stand there.
const RECENT = 600, MOST_ABOVE = 3;

// Those that go on first, then by severity, the newest first.
function ordered(incidents) {
  const rank = ({ ended_unix_nano: ended, severity, seen_unix_nano: seen }) => [ended === null ? 0 : 1, SEVERITIES.indexOf(severity), -seen];
  return [...incidents].sort((a, b) => {
    const [one, other] = [rank(a), rank(b)], at = one.findIndex((value, nth) => value !== other[nth]);
    return at < 0 ? 0 : one[at] - other[at];
  });
}

// Whether an incident stands above the chart.
function isRecent(feed, { ended_unix_nano: ended, severity, seen_unix_nano: seen }) {
  return severity !== "info" && (ended === null || feed.now - feed.seconds(seen) < RECENT);
}

// Of how many incidents that go on a page should speak, in two words; empty if there are none.
function inShort(incidents) {
  const active = incidents.filter(({ ended_unix_nano: ended }) => ended === null), of = (severity) => active.filter((one) => one.severity === severity).length;
  const critical = of("critical"), warnings = of("warning");
  return critical ? `${critical} critical` : warnings ? `${warnings} warning${warnings > 1 ? "s" : ""}` : "";
}

// The icon of the page's tab: a disc in the color of the worst incident that goes on, with a mark that needs no color.
function drawIcon(incidents) {
  const worst = SEVERITIES.find((severity) => incidents.some((one) => one.ended_unix_nano === null && one.severity === severity));
  const [color, mark] = { critical: ["#b3261e", "!"], warning: ["#b26a00", "!"] }[worst] ?? ["#1c7a3e", ""];
  const drawing = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="8" fill="${color}"/><text x="8" y="12.5" font-family="sans-serif" font-size="13" font-weight="bold" text-anchor="middle" fill="#fff">${mark}</text></svg>`;
  const icon = document.querySelector("link[rel=icon]"), address = `data:image/svg+xml,${encodeURIComponent(drawing)}`;
  if (icon.href !== address) icon.href = address;
}

const oftenOf = ({ times, begin_unix_nano: begin, again_unix_nano: again }) => times === 1 ? `since ${when(begin)}`
  : `${times.toLocaleString("en")} times since ${when(begin)}, the last at ${when(again)}`;
const costOf = ({ lost_seconds: lost, ranks, waiting_ranks: waiting }) => lost === null ? null
  : `Ranks have lost ${roughly(lost)} by it${ranks.length + waiting.length > 1 ? " in all" : ""}.`;
// A duration without what is small beside it.
const roughly = (seconds) => seconds < 10 ? duration(seconds) : seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
const followedOf = ({ findings }) => findings.filter(({ current }) => current).slice(1).map(({ what }) => what);

// An incident as text for a ticket.
function markdown(incident) {
  const { what, why, advice, severity, certainty, job, ranks, gpus, waiting_ranks: waiting, ended_unix_nano: ended } = incident;
  const whose = [job === null ? null : `job ${job}${ranks.length ? ` ${numbered("rank", ranks)}` : ""}`, gpus.length ? `GPU ${gpus.map(({ gpu }) => gpu).join(", ")}` : null,
    workloadsText(incident),
    waiting.length ? `${numbered("rank", waiting)} ${waiting.length === 1 ? "waits" : "wait"}` : null].filter((text) => text !== null);
  const state = ended === null ? "going on" : `over ${when(ended)}`;
  return [`**${what}**`, "", ...followedOf(incident).map((text) => `- ${text}`), `- ${severity}, ${certainty}, ${oftenOf(incident)}, ${state}`,
    ...whose.length ? [`- ${whose.join("; ")}`] : [], ...costOf(incident) ? [`- ${costOf(incident)}`] : [], "", why, "", advice, ""].join("\n");
}

// Puts text where a paste takes it from. The clipboard's own interface is there only over HTTPS and on this machine.
async function copy(text) {
  if (navigator.clipboard) { await navigator.clipboard.writeText(text); return; }
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// An incident: its cause first, then what followed from it, whom it concerns, and what it cost.
function incidentPanel(feed, incident, show) {
  const { ended_unix_nano: ended, ranks, waiting_ranks: waiting } = incident, followed = followedOf(incident);
  const cause = incident.findings.find(({ current }) => current);
  const captures = feed.captures.captures.filter(({ reasons, begin_unix_nano: from, end_unix_nano: to }) => from !== null && from <= incident.seen_unix_nano
    && (to ?? Infinity) >= incident.begin_unix_nano && incident.findings.some(({ finding }) => reasons.includes(finding)));
  const cost = costOf(incident);
  const shown = feed.findings.find((one) => one.id === cause?.last_id);
  return element("section", { class: `found ${incident.severity}${ended === null ? "" : " ended"}`, "aria-label": incident.what },
    element("p", {}, element("strong", {}, incident.what)),
    followed.length ? element("ul", {}, followed.map((what) => element("li", {}, what))) : null,
    element("p", {}, cost ? `${cost} ` : null, incident.why), element("p", {}, element("strong", {}, "What to do: "), incident.advice),
    element("p", { class: "kind" }, `${incident.severity}, ${incident.certainty}, ${oftenOf(incident)}, ${ended === null ? "going on" : `over ${when(ended)}`}`,
      incident.job === null ? null : [" · ", link(["job", incident.job_id], incident.job), ranks.length ? ` ${numbered("rank", ranks)}` : ""],
      incident.gpus.length ? [" · GPU ", incident.gpus.map(({ gpu }, nth) => [nth ? ", " : "", link(["gpu", gpu], gpu)])] : null,
      inWorkloads(incident),
      waiting.length ? ` · ${numbered("rank", waiting)} ${waiting.length === 1 ? "waits" : "wait"}` : null,
      incident.findings.map(({ finding, last_id: id, count }) => [" · ", link(["finding", String(id)], `${finding} ${id}`), count > 1 ? ` (${count.toLocaleString("en")} times)` : ""]),
      captures.map((capture) => [" · capture ", link(["capture", capture.id], capture.id)]), " ",
      show && shown ? element("button", { onclick: () => show(shown), "aria-label": `Show incident ${incident.id} on the chart` }, "Show") : null, " ",
      element("button", { onclick: (event) => copy(markdown(incident)).then(() => { event.target.textContent = "Copied"; }), "aria-label": `Copy incident ${incident.id} as Markdown` }, "Copy")));
}

// `1, 2, 5 to 9`.
function inRuns(numbers) {
  const runs = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last && last[1] === number - 1) last[1] = number; else runs.push([number, number]);
  }
  return runs.map(([first, last]) => first === last ? `${first}` : last === first + 1 ? `${first}, ${last}` : `${first} to ${last}`).join(", ");
}

// `rank 3`, `ranks 1, 2, 5 to 9`.
const numbered = (name, numbers) => `${name}${numbers.length === 1 ? "" : "s"} ${inRuns(numbers)}`;
