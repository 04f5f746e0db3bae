//! Several recordings phase by phase: the median duration of each beside the first recording's, and how much of the difference chance
//! explains.
//!
//! Enters: reports with steps. Leaves: a difference with its 95 % interval for each phase, and a sentence for each recording. The interval is
//! that of medians by order statistics, so that a few long steps, such as the first ones or those with a checkpoint, move neither.
//! Absent on purpose: traces of several ranks of one job, which waited for each other and are no versions of one run.

use super::model::Report;
use super::printed::Printed;
use super::table::{Table, milliseconds};
use crate::timeline::Step;
use highwater_core::wire::Kind;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// The name of whole steps.
const STEP: &str = "step";
/// Phases that a sentence names.
const MOST_NAMED: usize = 3;
/// 95 % of a normal distribution lie within this many standard deviations; the rank of a median has half a root of the number.
const DEVIATIONS: f64 = 1.96;
/// Durations of a rank that an interval needs: between the least and the most of five the median lies in 94 of 100 cases.
const FEWEST: usize = 6;
/// Phases that are compared, over all jobs.
const MOST_COMPARED: usize = 256;
/// An interval that is at most this share of the median says that two are alike.
const ALIKE_RATIO: f64 = 0.02;

/// One phase in each recording.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedPhase {
    /// The job, where a recording has several.
    pub job: Option<String>,
    /// Its name; `step` for whole steps.
    pub phase: String,
    /// The recordings that have steps, in the order in which they were given.
    pub recordings: Vec<MedianBeside>,
}

/// The median of one recording beside the first's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MedianBeside {
    /// The recording.
    pub name: String,
    /// How many durations the median is of: all, or some evenly over all.
    pub count: usize,
    /// The median duration, nanoseconds; `None` if there is no such phase.
    pub median_ns: Option<i64>,
    /// By how much it is more than the first's; `None` for the first, and where one is not known.
    pub increase_ns: Option<i64>,
    /// The 95 % interval of the increase.
    pub increase_95_ns: Option<[i64; 2]>,
}

/// Durations of one phase, in order, nanoseconds.
struct Durations {
    all: Vec<i64>,
    /// How many of them are of one rank: what ranks do at once is no more evidence than what one does.
    of_one: usize,
}

impl Durations {
    fn new(mut all: Vec<i64>, of_one: usize) -> Self {
        all.sort_unstable();
        Self { all, of_one }
    }

    fn median(&self) -> Option<i64> {
        let (count, at) = (self.all.len(), |rank: usize| self.all.get(rank).copied());
        Some(i64::midpoint(at(count.saturating_sub(1) / 2)?, at(count / 2)?))
    }

    /// The ends of the median's 95 % interval; `None` of too few.
    fn interval(&self) -> Option<[i64; 2]> {
        if self.of_one < FEWEST {
            return None;
        }
        let count = self.all.len();
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank in a list"
        )]
        let half = (DEVIATIONS / 2.0 * count as f64 / (self.of_one as f64).sqrt()).ceil() as usize;
        let at = |rank: usize| self.all.get(rank.min(count.saturating_sub(1))).copied();
        Some([at((count / 2).saturating_sub(half))?, at((count / 2).saturating_add(half))?])
    }
}

/// Compares the phases of reports that have steps; nothing if fewer than two have.
pub(super) fn compare(reports: &[Report]) -> Vec<ComparedPhase> {
    let ranks = traced_ranks(reports);
    let compared: Vec<&Report> = reports.iter().filter(|report| report.trace.is_none() || !ranks).collect();
    let are_single = compared.iter().all(|report| jobs(report).len() <= 1);
    let measured = compared.into_iter().map(|report| (report, durations(report, !are_single)));
    let with_steps: Vec<(&Report, Measured)> = measured.filter(|(_, (order, _))| !order.is_empty()).collect();
    let Some(((_, (_, first)), [_, ..])) = with_steps.split_first() else { return Vec::new() };
    let mut keys: Vec<&Key> = Vec::new();
    let mut known = BTreeSet::new();
    for key in with_steps.iter().flat_map(|(_, (order, _))| order) {
        if keys.len() < MOST_COMPARED && known.insert(key) {
            keys.push(key);
        }
    }
    let compared = |key: &Key| {
        let first = first.get(key);
        let beside = with_steps.iter().enumerate().map(|(nth, (report, (_, phases)))| {
            let own = phases.get(key);
            let median_ns = own.and_then(Durations::median);
            let first = first.filter(|_| nth > 0);
            let first_ns = first.and_then(Durations::median);
            let intervals = own.and_then(Durations::interval).zip(first.and_then(Durations::interval));
            MedianBeside {
                name: report.name.clone(),
                count: own.map_or(0, |own| own.all.len()),
                median_ns,
                increase_ns: median_ns.zip(first_ns).map(|(own, first)| own.saturating_sub(first)),
                increase_95_ns: median_ns.zip(first_ns).zip(intervals).map(|(medians, ends)| increase(medians, ends)),
            }
        });
        ComparedPhase { recordings: beside.collect(), job: key.0.clone(), phase: key.1.clone() }
    };
    keys.into_iter().map(compared).collect()
}

/// The job, where it matters, and the phase.
type Key = (Option<String>, String);

/// Phases in the order in which ranks have them, and their durations.
type Measured = (Vec<Key>, BTreeMap<Key, Durations>);

/// The jobs of a report. Of a profiler's trace, GPUs stand in their place.
fn jobs(report: &Report) -> BTreeSet<&str> {
    let of_trace = report.trace.is_some();
    report.spans.ranks().iter().filter(|_| !of_trace).map(|(job, _)| job.as_str()).collect()
}

/// The 95 % interval of the difference of two medians with these intervals.
fn increase((own, first): (i64, i64), (own_ends, first_ends): ([i64; 2], [i64; 2])) -> [i64; 2] {
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "days of nanoseconds to a microsecond"
    )]
    let both = |one: i64, other: i64| (one as f64).hypot(other as f64) as i64;
    let by = own.saturating_sub(first);
    let down = both(own.saturating_sub(own_ends[0]), first_ends[1].saturating_sub(first));
    let up = both(own_ends[1].saturating_sub(own), first.saturating_sub(first_ends[0]));
    [by.saturating_sub(down), by.saturating_add(up)]
}

/// Whether the traces among these are of several ranks of one job.
pub(super) fn traced_ranks(reports: &[Report]) -> bool {
    let ranks: Vec<_> = reports.iter().filter_map(|report| report.trace.as_ref()?.analysis.rank).collect();
    ranks.len() > 1 && ranks.iter().collect::<BTreeSet<_>>().len() == ranks.len()
}

/// The durations of steps and phases over all ranks, of each job where `by_job`; of a profiler's trace, what its GPUs did in each step.
/// Nothing without steps.
fn durations(report: &Report, by_job: bool) -> Measured {
    let mut order = Vec::new();
    let mut all: BTreeMap<Key, (Vec<i64>, usize)> = BTreeMap::new();
    let mut add = |key: Key, of_one: &mut dyn Iterator<Item = i64>| {
        let (durations, most) = all.entry(key.clone()).or_insert_with(|| {
            order.push(key);
            Default::default()
        });
        let before = durations.len();
        durations.extend(of_one);
        *most = (*most).max(durations.len() - before);
    };
    // What its rank ended has a row, and no duration.
    let ended = || report.spans.rows().iter().filter(|row| row.count > 0);
    if let Some(traced) = &report.trace {
        for device in traced.analysis.steps.iter().map(|step| step.device).collect::<BTreeSet<_>>() {
            let steps = || traced.analysis.steps.iter().filter(|step| step.step.is_some() && step.device == device);
            let mut of = |name: &str, value: fn(&Step) -> Option<u64>| {
                let known = steps().filter_map(value).map(|ns| i64::try_from(ns).unwrap_or(i64::MAX));
                let known: Vec<i64> = known.collect();
                if !known.is_empty() {
                    add((None, name.to_owned()), &mut known.into_iter());
                }
            };
            of(STEP, |step| Some(step.window_ns));
            of("compute", |step| Some(step.compute_ns));
            of("collectives", |step| Some(step.communication_ns));
            of("copies", |step| Some(step.memory_ns));
            of("idle for data", |step| step.idle.data_ns);
            of("idle for the host", |step| step.idle.host_ns);
            of("idle otherwise", |step| step.idle.other_ns);
        }
    } else if ended().any(|row| row.kind == Kind::Step) {
        for row in ended().filter(|row| row.kind != Kind::Layer) {
            let name = if row.kind == Kind::Step { STEP } else { row.name.as_str() };
            let job = by_job.then(|| report.spans.rank(row.rank).0.to_owned());
            add((job, name.to_owned()), &mut row.sample.durations_ns());
        }
    }
    (order, all.into_iter().map(|(key, (all, of_one))| (key, Durations::new(all, of_one))).collect())
}

impl ComparedPhase {
    /// The phase, with its job where that matters.
    fn title(&self) -> String {
        self.job.as_ref().map_or_else(|| self.phase.clone(), |job| format!("{} of {job}", self.phase))
    }
}

impl MedianBeside {
    /// Whether chance alone does not explain that it is another than the first's.
    fn differs(&self) -> bool {
        self.increase_95_ns.is_some_and(|[low, high]| low > 0 || high < 0)
    }
}

/// Adds a table of all phases.
pub(super) fn print(phases: &[ComparedPhase], out: &mut Printed) {
    if phases.is_empty() {
        return;
    }
    let mut table = Table::new(["phase", "recording", "of", "median", "beside the first", "95 %"]).keys(2);
    for (phase, of) in phases.iter().flat_map(|phase| phase.recordings.iter().map(move |of| (phase, of))) {
        let interval = of.increase_95_ns.map(|[low, high]| format!("{} to {}", signed(low), signed(high)));
        table.push([
            phase.title(),
            of.name.clone(),
            of.count.to_string(),
            of.median_ns.map_or_else(|| "?".to_owned(), milliseconds),
            of.increase_ns.map(signed).unwrap_or_default(),
            interval.unwrap_or_default(),
        ]);
    }
    out.table(table);
}

fn signed(ns: i64) -> String {
    let shown = milliseconds(ns.saturating_abs());
    if ns < 0 { format!("-{shown}") } else { format!("+{shown}") }
}

/// Whether the steps of each recording take longer than the first's, and in which phases.
pub(super) fn verdict(phases: &[ComparedPhase]) -> Vec<String> {
    let steps = phases.iter().filter(|phase| phase.phase == STEP);
    steps
        .flat_map(|steps| {
            verdict_on(steps, phases.iter().filter(|phase| phase.job == steps.job && phase.phase != STEP))
        })
        .collect()
}

fn verdict_on<'a>(steps: &ComparedPhase, phases: impl Iterator<Item = &'a ComparedPhase> + Clone) -> Vec<String> {
    let Some((first, others)) = steps.recordings.split_first() else { return Vec::new() };
    let whose = steps.job.as_ref().map_or_else(String::new, |job| format!("{job} in "));
    let said = others.iter().enumerate().filter_map(|(nth, own)| {
        let (median_ns, by_ns) = (own.median_ns?, own.increase_ns?);
        let (name, first) = (format!("{whose}{}", own.name), &first.name);
        let Some([low, high]) = own.increase_95_ns else {
            return Some(format!("There are too few steps of {name} or {first} to say which take longer."));
        };
        if !own.differs() {
            let (far, median) = (low.saturating_abs().max(high.saturating_abs()), milliseconds(median_ns));
            #[allow(clippy::cast_precision_loss, reason = "a share")]
            let are_alike = far as f64 <= median_ns as f64 * ALIKE_RATIO;
            return Some(if are_alike {
                format!("Steps of {name} take as long as those of {first}, within {}: {median} at the median.", milliseconds(far))
            } else {
                let (low, high) = (signed(low), signed(high));
                format!("Whether steps of {name} take longer than those of {first} is not clear: {median} at the median, {low} to {high} beside them (95 %).")
            });
        }
        let (more, [low, high]) = if by_ns > 0 {
            ("longer", [low, high])
        } else {
            ("less", [high.saturating_neg(), low.saturating_neg()])
        };
        let (by, low, high) = (milliseconds(by_ns.saturating_abs()), milliseconds(low), milliseconds(high));
        let mut text =
            format!("Steps of {name} take {by} {more} than those of {first} at the median (95 %: {low} to {high})");
        let parts = phases.clone().filter_map(|phase| Some((&phase.phase, phase.recordings.get(nth + 1)?)));
        let mut parts: Vec<(&String, i64)> =
            parts.filter(|(_, of)| of.differs()).filter_map(|(phase, of)| Some((phase, of.increase_ns?))).collect();
        parts.sort_by_key(|(_, by_ns)| std::cmp::Reverse(by_ns.saturating_abs()));
        for (nth, (phase, by_ns)) in parts.iter().take(MOST_NAMED).enumerate() {
            let _ = write!(text, "{} {phase} {}", if nth == 0 { ":" } else { "," }, signed(*by_ns));
        }
        text.push('.');
        Some(text)
    });
    said.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Ended, Spans, hand};
    use highwater_core::jobs::EndedBy;

    /// A run of steps that take this long in forward and backward, milliseconds.
    fn run(name: &str, steps: impl Iterator<Item = (i64, i64)>) -> Report {
        let (mut spans, mut at_ns) = (Spans::new(10_000, Vec::new()), 0);
        for (step, (forward, backward)) in steps.enumerate() {
            let (middle_ns, end_ns) = (at_ns + forward * 1_000_000, at_ns + (forward + backward) * 1_000_000);
            for (kind, phase, begin_ns, end_ns) in [
                (Kind::Step, "step", at_ns, end_ns),
                (Kind::Phase, "forward", at_ns, middle_ns),
                (Kind::Phase, "backward", middle_ns, end_ns),
            ] {
                let (job, name) = ("j".to_owned(), phase.to_owned());
                spans.push(Ended {
                    job,
                    rank: 0,
                    kind,
                    name,
                    step: Some(step as u64),
                    begin_ns,
                    end_ns,
                    by: EndedBy::End,
                    peak_bytes: None,
                });
            }
            at_ns = end_ns;
        }
        spans.finish();
        Report { spans, ..hand::report(name, &[]) }
    }

    /// 100 steps around a duration; every tenth is ten times as long.
    fn around(backward: i64) -> impl Iterator<Item = (i64, i64)> {
        (0..100).map(move |nth| if nth % 10 == 0 { (500, 10 * backward) } else { (50 + nth % 3, backward + nth % 5) })
    }

    #[test]
    fn a_recording_in_which_no_step_ended_has_no_durations() {
        for (by, has_some) in [(EndedBy::End, true), (EndedBy::Exit, false), (EndedBy::StillOpen, false)] {
            let mut spans = Spans::new(9, Vec::new());
            for (kind, name) in [(Kind::Step, "step"), (Kind::Phase, "forward")] {
                let (job, name, peak_bytes) = ("j".to_owned(), name.to_owned(), None);
                spans.push(Ended { job, rank: 0, kind, name, step: None, begin_ns: 0, end_ns: 9, by, peak_bytes });
            }
            spans.finish();
            let (order, _) = durations(&Report { spans, ..hand::report("a", &[]) }, false);
            assert_eq!(!order.is_empty(), has_some, "{by:?}");
        }
    }

    #[test]
    fn what_takes_longer_is_named_and_long_steps_move_no_median() {
        let phases = compare(&[run("a", around(100)), run("b", around(120)), run("c", around(100))]);
        let of = |nth: usize| {
            phases.iter().map(|phase| (phase.phase.as_str(), phase.recordings[nth].increase_ns)).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [("step", None), ("forward", None), ("backward", None)]);
        assert_eq!(of(1), [("step", Some(20_000_000)), ("forward", Some(0)), ("backward", Some(20_000_000))]);
        let [low, high] = phases[0].recordings[1].increase_95_ns.expect("known");
        assert!((15_000_000..20_000_000).contains(&low) && (20_000_000..25_000_000).contains(&high), "{low} to {high}");
        let said = verdict(&phases);
        assert!(
            said[0].starts_with("Steps of b take 20.0 ms longer than those of a at the median (95 %: ")
                && said[0].ends_with("): backward +20.0 ms."),
            "{said:?}"
        );
        assert!(
            said[1].starts_with("Whether steps of c take longer than those of a is not clear")
                || said[1].starts_with("Steps of c take as long as those of a, within "),
            "{said:?}"
        );
        let faster = verdict(&compare(&[run("a", around(120)), run("b", around(100))]));
        assert!(
            faster[0].starts_with("Steps of b take 20.0 ms less than those of a")
                && faster[0].ends_with("): backward -20.0 ms."),
            "{faster:?}"
        );
    }

    #[test]
    fn the_interval_holds_in_19_of_20_pairs_of_like_runs() {
        let mut random = 1_u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % 1_000
        };
        let mut noisy = |name: &str| {
            let steps: Vec<(i64, i64)> =
                (0..60).map(|_| (10, 100 + next().cast_signed() / 10 + if next() < 50 { 900 } else { 0 })).collect();
            run(name, steps.into_iter())
        };
        let wrong = (0..200).filter(|_| compare(&[noisy("a"), noisy("b")])[0].recordings[1].differs()).count();
        assert!(wrong <= 20, "{wrong} of 200 like pairs differ");
    }

    /// Ranks that wait for each other have the same steps.
    #[test]
    fn many_ranks_are_no_more_evidence_than_one() {
        let of = |count: u32, backward: i64| {
            let one = run("a", (0..40).map(|nth| (10, backward + nth * 7 % 40)));
            let mut spans = Spans::new(100_000, Vec::new());
            for (rank, span) in (0..count).flat_map(|rank| one.spans.spans().iter().map(move |span| (rank, span))) {
                let row = &one.spans.rows()[span.row];
                let (job, name, kind) = ("j".to_owned(), row.name.clone(), row.kind);
                let (begin_ns, end_ns, step) = (span.begin_ns, span.end_ns, span.step);
                spans.push(Ended { job, rank, kind, name, step, begin_ns, end_ns, by: EndedBy::End, peak_bytes: None });
            }
            spans.finish();
            Report { spans, ..hand::report("a", &[]) }
        };
        let interval =
            |count| compare(&[of(count, 100), of(count, 104)])[0].recordings[1].increase_95_ns.expect("known");
        let ([low, high], [low_64, high_64]) = (interval(1), interval(64));
        assert!(
            (low - low_64).abs() <= 2_000_000 && (high - high_64).abs() <= 2_000_000,
            "{low} {high} {low_64} {high_64}"
        );
        assert!(low < 0 && high > 0);
    }

    #[test]
    fn several_jobs_are_compared_each_with_itself() {
        let two = |name: &str, backward: i64| {
            let (mut one, other) = (run(name, around(100)), run(name, around(backward)));
            let (mut spans, ranks) = (Spans::new(10_000, Vec::new()), [("a", &one.spans), ("b", &other.spans)]);
            for (job, of) in ranks {
                for span in of.spans() {
                    let row = &of.rows()[span.row];
                    let (job, name, kind) = (job.to_owned(), row.name.clone(), row.kind);
                    let (begin_ns, end_ns, step) = (span.begin_ns, span.end_ns, span.step);
                    spans.push(Ended {
                        job,
                        rank: 0,
                        kind,
                        name,
                        step,
                        begin_ns,
                        end_ns,
                        by: EndedBy::End,
                        peak_bytes: None,
                    });
                }
            }
            spans.finish();
            one.spans = spans;
            one
        };
        let phases = compare(&[two("x", 100), two("y", 130)]);
        assert_eq!(phases.len(), 6);
        let said = verdict(&phases);
        assert!(said[0].starts_with("Steps of a in y take as long as those of x"), "{said:?}");
        assert!(said[1].starts_with("Steps of b in y take 30.0 ms longer than those of x"), "{said:?}");
    }

    #[test]
    fn few_steps_and_none_are_no_reason_to_say_more_than_is_known() {
        let even = |backward: i64, steps: usize| (0..steps).map(move |nth| (50, backward + nth as i64 % 3));
        for steps in 1..FEWEST {
            let phases = compare(&[run("a", even(100, steps)), run("b", even(200, steps))]);
            assert_eq!(phases[0].recordings[1].increase_95_ns, None, "{steps}");
            assert_eq!(verdict(&phases), ["There are too few steps of b or a to say which take longer."]);
        }
        let phases = compare(&[run("a", even(100, FEWEST)), run("b", even(200, FEWEST))]);
        assert!(phases[0].recordings[1].differs(), "{phases:?}");
        assert!(compare(&[run("a", around(1)), hand::report("none", &[])]).is_empty());
        assert!(compare(&[]).is_empty() && verdict(&[]).is_empty());
        let mut printed = Printed::default();
        print(&phases, &mut printed);
        assert!(printed.to_string().contains("backward"), "{printed}");
    }
}
