//! `memory_growth`: peak memory rises from step to step, or with each checkpoint or evaluation, or, where nobody marks steps, from
//! minute to minute; with a forecast of when memory will be full.
//!
//! The peaks of all steps of a run since its warm-up are kept, thinned to a bounded number ([`Peaks`]). Of a GPU on which no step
//! has ended for [`STEPLESS_NS`], as one that serves, those of its minutes are.

use super::detector::{Detector, Looked, Ratios, Trouble};
use super::finding::{
    Certainty, Evidence, FindingKind, HumanBytes, HumanDuration, Severity, Sign, Subject, Text, seconds,
};
use super::peaks::{Full, Growth, Peaks};
use super::steps::Step;
use super::view::{View, bytes, human};
use crate::clock::SECOND_NS;
use crate::phases::RankKey;
use std::collections::BTreeMap;

/// A forecast beyond this is no trouble yet, nanoseconds.
const FAR_NS: i64 = 24 * 3600 * SECOND_NS;
/// One below this is critical.
const NEAR_NS: i64 = 600 * SECOND_NS;
const MINUTE_NS: i64 = 60 * SECOND_NS;
/// After so long without a step on it, a GPU's growth is judged by its minutes.
const STEPLESS_NS: i64 = 600 * SECOND_NS;
/// A fall of the highest memory to less than this fraction between two minutes is another process's begin, where the driver lists
/// none.
const FALL: u64 = 2;
/// A time beyond this is no time for people.
const NEVER_NS: i64 = 30 * 24 * 3600 * SECOND_NS;

/// Follows each rank's peaks, and those of GPUs without steps.
#[derive(Debug, Default)]
pub(super) struct MemoryGrowth {
    ranks: BTreeMap<RankKey, Run>,
    gpus: Vec<Minutes>,
    looked: Looked,
}

/// What is known of one run of a rank.
#[derive(Debug, Default)]
struct Run {
    peaks: Peaks,
    last_ns: Option<i64>,
    full_ns: Option<i64>,
}

/// The minutes of one GPU.
#[derive(Debug, Default)]
struct Minutes {
    peaks: Peaks,
    /// When its last step ended, and the last minute.
    stepped_ns: Option<i64>,
    minute_ns: Option<i64>,
    last_bytes: u64,
    of: Option<RankKey>,
    /// Its processes, in the order of their ids.
    pids: Vec<u32>,
}

/// Where growth was found.
struct Place<'a> {
    subject: Subject,
    step: Option<u64>,
    /// Whose memory: `rank 0 of job`, `GPU 0`.
    whose: String,
    peak_bytes: u64,
    /// What each value of the peaks is: a step, or a minute.
    is_step: bool,
    growth: &'a Growth,
}

impl Detector for MemoryGrowth {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.ranks.retain(|key, _| view.knows(key));
        self.gpus.resize_with(view.gpus.len(), Minutes::default);
        for step in view.steps {
            // Any job may name any GPU.
            for gpu in step.gpus.iter().filter(|gpu| view.counts_on(&step.key, **gpu)) {
                if let Some(minutes) = self.gpus.get_mut(*gpu) {
                    minutes.stepped_ns = Some(step.end_ns);
                }
            }
            let run = self.ranks.entry(step.key.clone()).or_default();
            if step.nth < view.settings.warm_up_steps {
                *run = Run::default();
                self.looked.note(false);
                continue;
            }
            let Some(peak_bytes) = step.peak_bytes else {
                self.looked.note(false);
                continue;
            };
            let usable_bytes = step.gpus.iter().filter_map(|gpu| view.gpus.get(*gpu)?.usable_bytes()).min();
            run.peaks.push_step(step, peak_bytes, usable_bytes);
            run.last_ns = Some(step.end_ns);
            self.looked.note(run.peaks.are_enough());
            let growth = run.peaks.growth();
            run.full_ns = growth.and_then(|growth| growth.full).map(|full| full.at_ns);
            signs.extend(growth.and_then(|growth| of_step(step, peak_bytes, growth).sign(view)));
        }
        for gpu in 0..view.gpus.len() {
            let grown = self.gpus.get_mut(gpu).and_then(|minutes| minutes.look(view, gpu));
            signs.extend(grown.and_then(|(peak_bytes, growth)| of_gpu(view, gpu, peak_bytes, growth).sign(view)));
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::MemoryGrowth, self.looked);
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, run) in &self.ranks {
            let full_in =
                run.full_ns.zip(run.last_ns).map(|(full_ns, last_ns)| seconds(full_ns.saturating_sub(last_ns).max(0)));
            out.entry(key.clone()).or_default().memory_full_seconds = full_in;
        }
    }
}

impl Minutes {
    /// Takes the minute that is over, if one is. Returns its highest memory and the growth up to it.
    fn look(&mut self, view: &View<'_>, gpu: usize) -> Option<(u64, &Growth)> {
        let from_ns = *self.minute_ns.get_or_insert(view.now_ns);
        if view.now_ns - from_ns < MINUTE_NS {
            return None;
        }
        self.minute_ns = Some(view.now_ns);
        let has_steps = self.stepped_ns.is_some_and(|stepped_ns| view.now_ns - stepped_ns < STEPLESS_NS);
        let rank = view.rank_on(gpu);
        if has_steps || rank.is_some_and(|rank| rank.step.is_some()) {
            *self = Self { stepped_ns: self.stepped_ns, minute_ns: self.minute_ns, ..Self::default() };
            return None;
        }
        let ring = view.rings.get(gpu)?;
        let to_ns = ring.newest_ns().filter(|to_ns| *to_ns > from_ns)?;
        let peak_bytes = ring.summary_through(from_ns.max(ring.oldest_ns()?), to_ns).ok()?.max?;
        let of = rank.map(|rank| rank.key.clone());
        let state = view.gpus.get(gpu)?;
        let listed = state.processes().map(|listed| listed.reading.iter().map(|process| process.pid).collect());
        let mut pids: Vec<u32> = listed.unwrap_or_default();
        pids.sort_unstable();
        // A new process brings memory of its own: the others have not grown by it.
        let has_more = pids.iter().any(|pid| self.pids.binary_search(pid).is_err());
        if of != self.of || has_more || peak_bytes < self.last_bytes / FALL {
            (self.of, self.peaks) = (of, Peaks::default());
        }
        (self.last_bytes, self.pids) = (peak_bytes, pids);
        self.peaks.push(view.now_ns, peak_bytes, state.usable_bytes());
        Some((peak_bytes, self.peaks.growth()?))
    }
}

fn of_step<'a>(step: &Step, peak_bytes: u64, growth: &'a Growth) -> Place<'a> {
    let (job, rank) = (step.key.0.clone(), step.key.1);
    let whose = format!("rank {rank} of {job}");
    let subject = Subject { gpu: step.gpus.first().copied(), job: Some(job), rank: Some(rank) };
    Place { subject, step: step.number, whose, peak_bytes, is_step: true, growth }
}

fn of_gpu<'a>(view: &View<'_>, gpu: usize, peak_bytes: u64, growth: &'a Growth) -> Place<'a> {
    Place { subject: view.subject_of(gpu), step: None, whose: view.gpu_name(gpu), peak_bytes, is_step: false, growth }
}

impl Place<'_> {
    fn sign(self, view: &View<'_>) -> Option<Sign> {
        let (growth, end_ns) = (self.growth, view.now_ns);
        if growth.full.is_some_and(|full| full.at_ns.saturating_sub(end_ns) > FAR_NS) {
            return None;
        }
        let is_near = growth.full.is_some_and(|full| full.at_ns.saturating_sub(end_ns) < NEAR_NS);
        Some(Sign {
            kind: FindingKind::MemoryGrowth,
            severity: if is_near { Severity::Critical } else { Severity::Warning },
            certainty: Certainty::Observed,
            begin_ns: growth.onset_ns,
            until_ns: end_ns + if self.is_step { view.settings.hold_ns } else { 2 * MINUTE_NS },
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: self.evidence(end_ns),
            text: self.text(end_ns),
            step: self.step,
            subject: self.subject,
        })
    }

    fn evidence(&self, now_ns: i64) -> Vec<Evidence> {
        let growth = self.growth;
        let mut evidence = vec![
            bytes("grown_bytes", growth.grown_bytes),
            Evidence { name: "over_seconds", value: seconds(growth.over_ns) },
            bytes("peak_bytes", self.peak_bytes),
        ];
        let names = if self.is_step {
            ["bytes_each_step", "least_bytes_each_step", "most_bytes_each_step"]
        } else {
            ["bytes_each_minute", "least_bytes_each_minute", "most_bytes_each_minute"]
        };
        evidence.extend(names.into_iter().zip(growth.each_bytes).map(|(name, value)| Evidence { name, value }));
        evidence.extend(growth.with.iter().map(|(_, each_bytes)| bytes("bytes_each_time", *each_bytes)));
        let full = |full: Full| {
            let latest_ns = Some(full.latest_ns).filter(|latest_ns| latest_ns.saturating_sub(now_ns) <= NEVER_NS);
            let soonest = [("full_in_seconds", Some(full.at_ns)), ("full_soonest_seconds", Some(full.soonest_ns))];
            soonest.into_iter().chain([("full_latest_seconds", latest_ns)])
        };
        let later = |ns: i64| seconds(ns.saturating_sub(now_ns).max(0));
        let known = growth.full.into_iter().flat_map(full).filter_map(|(name, ns)| Some((name, later(ns?))));
        evidence.extend(known.map(|(name, value)| Evidence { name, value }));
        evidence
    }

    fn text(&self, now_ns: i64) -> Text {
        let growth = self.growth;
        let what = match &growth.with {
            Some((phase, each_bytes)) => {
                format!("The peak of memory of {} rises by {} with each {phase}.", self.whose, human(*each_bytes))
            }
            None if self.is_step => {
                format!("The peak of memory of {} rises by {} a step.", self.whose, pace(growth, 1.0))
            }
            None => format!("The memory of {} rises by {} an hour.", self.whose, pace(growth, 60.0)),
        };
        let when = growth.full.map(|full| forecast(full, now_ns));
        let when = when.unwrap_or_else(|| "How much memory the GPU has is not known.".to_owned());
        let with = growth
            .with
            .as_ref()
            .map_or_else(String::new, |(phase, _)| format!(" It rises little without {phase} in between."));
        Text {
            what: format!("{what} {when}"),
            why: format!(
                "It rose by {} within {} to about {}, in five stretches that each rose.{with}",
                human(growth.grown_bytes),
                HumanDuration(growth.over_ns),
                human(growth.level_bytes)
            ),
            advice: match (&growth.with, self.is_step) {
                (Some((phase, _)), _) => format!(
                    "Look for what {phase} leaves behind: outputs and metrics that are collected on the GPU, gathered states \
                     and copies of them, a cache for each new shape."
                ),
                (None, true) => {
                    "Look for tensors that outlive their step: losses summed without .item() or .detach(), growing \
                     lists, caches keyed by shape. torch.cuda.memory._record_memory_history records who allocates."
                        .to_owned()
                }
                (None, false) => {
                    "Look for caches without a bound: of prefixes, adapters or graphs for each new shape, and for \
                     requests that are never released. Marks of steps or requests would show with what it rises."
                        .to_owned()
                }
            },
        }
    }
}

/// Growth of this many values of the peaks, with its bounds where they differ.
fn pace(growth: &Growth, values: f64) -> String {
    let [each, least, most] = growth.each_bytes.map(|bytes| HumanBytes(bytes * values).to_string());
    match growth.each_bytes {
        _ if least == most => each,
        [_, low, _] if low <= 0.0 => format!("{each} (at most {most})"),
        _ => format!("{each} ({least} to {most})"),
    }
}

/// When memory is full if it goes on so.
fn forecast(full: Full, now_ns: i64) -> String {
    let later = |ns: i64| ns.saturating_sub(now_ns).max(0);
    let [at, soonest, latest] =
        [full.at_ns, full.soonest_ns, full.latest_ns].map(|ns| HumanDuration(later(ns)).to_string());
    let bounds = match (later(full.soonest_ns), later(full.latest_ns)) {
        (0, _) => " (at any time, by its highest peaks)".to_owned(),
        (_, latest_ns) if latest_ns > NEVER_NS => format!(" ({soonest} at the soonest)"),
        _ if soonest == latest => String::new(),
        _ => format!(" ({soonest} to {latest})"),
    };
    format!("If it goes on so, memory is full {at} later{bounds}.")
}

#[cfg(test)]
mod tests {
    use super::super::finding::number;
    use super::super::hand::{GIB, Hand};
    use super::*;
    use crate::phases::hand::key;

    const MIB: u64 = 1 << 20;

    fn growth_of(full: Option<Full>) -> Growth {
        let each_bytes = [2.5, 2.0, 3.0].map(|mib| mib * number(MIB));
        let (over_ns, onset_ns, level_bytes, with) = (400 * SECOND_NS, 7, 2 * GIB, None);
        Growth { grown_bytes: GIB, over_ns, onset_ns, level_bytes, each_bytes, full, with }
    }

    /// A step of rank 0 with this peak; the first three are its warm-up.
    fn step(nth: u64, peak_bytes: u64) -> Step {
        let begin_ns = i64::try_from(nth).expect("a step") * SECOND_NS;
        Step { peak_bytes: Some(peak_bytes), ..Hand::step(0, nth, begin_ns, &[("forward", 1_000)]) }
    }

    #[test]
    fn growth_is_reported_with_its_forecast_and_ends_with_the_run() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), MemoryGrowth::default());
        let mut reported =
            |hand: &mut Hand, nth: u64, peak_bytes| hand.steps_end(&mut detector, vec![step(nth, peak_bytes)]).pop();
        let at = |nth: u64| 10 * GIB + nth * 100 * MIB;
        assert!((0..42).all(|nth| reported(&mut hand, nth, at(nth)).is_none()), "three of warm-up, then thirty-nine");
        let sign = reported(&mut hand, 42, at(42)).expect("forty");
        assert_eq!(
            (sign.kind, sign.severity, sign.certainty),
            (FindingKind::MemoryGrowth, Severity::Warning, Certainty::Observed)
        );
        assert_eq!(sign.subject, Subject { gpu: Some(0), job: Some("j".into()), rank: Some(0) });
        assert_eq!(
            (sign.begin_ns, sign.until_ns),
            (4 * SECOND_NS, hand.now_ns + hand.settings.hold_ns),
            "from the third on"
        );
        let values: Vec<_> = sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect();
        let full_in = (140.0 * 1_024.0 - 14_440.0) / 100.0;
        assert_eq!(
            values[..3],
            [("grown_bytes", number(3_200 * MIB)), ("over_seconds", 32.0), ("peak_bytes", number(at(42)))]
        );
        let rest =
            ["bytes_each_step", "least_bytes_each_step", "most_bytes_each_step"].map(|name| (name, number(100 * MIB)));
        let full = ["full_in_seconds", "full_soonest_seconds", "full_latest_seconds"].map(|name| (name, full_in));
        for (value, expected) in values[3..].iter().zip(rest.into_iter().chain(full)) {
            assert!(value.0 == expected.0 && (value.1 / expected.1 - 1.0).abs() < 1e-6, "{values:?}");
        }
        assert_eq!(values.len(), 9);
        let said =
            "The peak of memory of rank 0 of j rises by 100 MiB a step. If it goes on so, memory is full 21 min later.";
        assert_eq!(sign.text.what, said);
        let known = Hand::ratios(&detector, 0).memory_full_seconds.expect("a forecast");
        assert!((known - full_in).abs() < 1e-3);
        hand.steps_end(&mut detector, vec![step(2, at(45))]);
        assert_eq!(Hand::ratios(&detector, 0).memory_full_seconds, None, "another run");
        assert!(hand.steps_end(&mut detector, vec![step(46, at(46))]).is_empty());
        hand.ranks.clear();
        hand.look(&mut detector);
        assert!(!detector.ranks.contains_key(&key(0)));
    }

    #[test]
    fn a_forecast_beyond_a_day_is_no_trouble_and_one_within_ten_minutes_is_critical() {
        let (hand, step) = (Hand::with_ranks(1), step(50, GIB));
        let severity = |full_in_ns: Option<i64>| {
            let full = full_in_ns.map(|at_ns| Full { at_ns, soonest_ns: 0, latest_ns: at_ns });
            let growth = growth_of(full);
            hand.view(|view| of_step(&step, GIB, &growth).sign(view)).map(|sign| sign.severity)
        };
        let (warning, critical) = (Some(Severity::Warning), Some(Severity::Critical));
        assert_eq!(
            (severity(Some(24 * 3_600 * SECOND_NS)), severity(Some(24 * 3_600 * SECOND_NS + 1)), severity(None)),
            (warning, None, warning)
        );
        assert_eq!((severity(Some(600 * SECOND_NS)), severity(Some(600 * SECOND_NS - 1))), (warning, critical));
    }

    #[test]
    fn steps_without_a_known_peak_say_nothing_and_the_smallest_gpu_fills_first() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), MemoryGrowth::default());
        hand.gpus[1].device.memory_total_bytes = Some(20 * GIB);
        let on_both = |nth: u64| Step { gpus: vec![0, 1], ..step(nth, 10 * GIB + nth * 100 * MIB) };
        for nth in 3..42 {
            assert_eq!(hand.steps_end(&mut detector, vec![on_both(nth)]), []);
            assert_eq!(hand.steps_end(&mut detector, vec![Step { peak_bytes: None, ..on_both(nth) }]), []);
        }
        let [sign] = hand.steps_end(&mut detector, vec![on_both(42)]).try_into().expect("forty peaks");
        assert_eq!(sign.severity, Severity::Critical);
        let full_in = (20.0 * 1_024.0 - 14_440.0) / 100.0;
        let forecast = sign.evidence.iter().find(|evidence| evidence.name == "full_in_seconds").expect("one");
        assert!((forecast.value - full_in).abs() < 1e-3);
    }

    #[test]
    fn what_is_said_has_bounds_and_the_phase_with_which_memory_rises() {
        let now_ns = 7 * SECOND_NS;
        let full = |minutes: [i64; 3]| {
            let [at_ns, soonest_ns, latest_ns] = minutes.map(|minutes| now_ns + minutes * MINUTE_NS);
            growth_of(Some(Full { at_ns, soonest_ns, latest_ns }))
        };
        let said = |growth: &Growth, is_step| {
            let place = Place { is_step, ..of_step(&step(50, GIB), GIB, growth) };
            let text = place.text(now_ns);
            (text.what, text.why, place.evidence(now_ns).iter().map(|evidence| evidence.name).collect::<Vec<_>>())
        };
        let growth = full([30, 20, 50]);
        let (what, why, names) = said(&growth, true);
        let pace = "The peak of memory of rank 0 of j rises by 2.5 MiB (2 MiB to 3 MiB) a step.";
        assert_eq!(what, format!("{pace} If it goes on so, memory is full 30 min later (20 min to 50 min)."));
        assert_eq!(why, "It rose by 1.0 GiB within 7 min to about 2.0 GiB, in five stretches that each rose.");
        assert!(names.contains(&"full_latest_seconds") && !names.contains(&"bytes_each_time"));
        let (what, _, names) = said(&full([30, 20, 50_000]), true);
        assert!(
            what.ends_with("memory is full 30 min later (20 min at the soonest).")
                && !names.contains(&"full_latest_seconds")
        );
        let (what, ..) = said(&full([30, -1, 50]), true);
        assert!(what.ends_with("memory is full 30 min later (at any time, by its highest peaks)."), "{what}");
        let unsure = Growth { each_bytes: [2.5, -1.0, 3.0].map(|mib| mib * number(MIB)), ..growth_of(None) };
        assert!(
            said(&unsure, true).0.contains(" rises by 2.5 MiB (at most 3 MiB) a step."),
            "{}",
            said(&unsure, true).0
        );
        assert!(said(&growth_of(None), true).0.ends_with("How much memory the GPU has is not known."));
        let (what, _, names) = said(&growth, false);
        assert!(what.starts_with("The memory of rank 0 of j rises by 150 MiB (120 MiB to 180 MiB) an hour."), "{what}");
        assert!(names.contains(&"bytes_each_minute"));
        let (what, why, names) = said(&Growth { with: Some(("eval".into(), 3 * GIB)), ..growth }, true);
        assert!(what.starts_with("The peak of memory of rank 0 of j rises by 3.0 GiB with each eval. If"), "{what}");
        assert!(why.ends_with("It rises little without eval in between.") && names.contains(&"bytes_each_time"));
    }

    /// Minutes of a GPU with this memory: the signs of it, by its minute.
    fn minutes(hand: &mut Hand, detector: &mut MemoryGrowth, values: impl Iterator<Item = u64>) -> Vec<(i64, Sign)> {
        let mut said = Vec::new();
        for bytes in values {
            for second in [20, 40, 60] {
                hand.now_ns += 20 * SECOND_NS;
                hand.uses(0, if second == 40 { bytes } else { 10 * MIB.min(bytes) });
                said.extend(hand.look(detector).0.into_iter().map(|sign| (hand.now_ns / MINUTE_NS, sign)));
            }
        }
        said
    }

    #[test]
    fn a_gpu_without_steps_grows_from_minute_to_minute() {
        let (mut hand, mut detector) = (Hand::new(1), MemoryGrowth::default());
        let rising = |from: u64| (0..45).map(move |nth| 20 * GIB + (from + nth) * 500 * MIB);
        assert!(hand.look(&mut detector).0.is_empty());
        let said = minutes(&mut hand, &mut detector, rising(0));
        let (first, sign) = said.first().expect("it grows");
        assert_eq!((*first, said.len()), (40, 6), "once a minute from the fortieth on");
        assert_eq!((sign.subject.gpu, &sign.subject.job, sign.step), (Some(0), &None, None));
        assert_eq!((sign.begin_ns, sign.until_ns), (MINUTE_NS, 42 * MINUTE_NS));
        assert!(sign.text.what.starts_with("The memory of GPU 0 rises by 29.3 GiB an hour. If"), "{}", sign.text.what);
        // Another process begins, or a rank that marks none of its steps.
        assert!(minutes(&mut hand, &mut detector, (0..39).map(|nth| GIB + nth * 500 * MIB)).is_empty());
        hand.ranks.push(Hand::rank_on(0));
        assert!(minutes(&mut hand, &mut detector, rising(40).take(39)).is_empty());
        let said = minutes(&mut hand, &mut detector, rising(79).take(1));
        assert_eq!((said.len(), said[0].1.subject.rank), (1, Some(0)));
    }

    #[test]
    fn a_worker_that_is_added_every_nine_minutes_is_no_growth() {
        for is_listed in [true, false] {
            let (mut hand, mut detector) = (Hand::new(1), MemoryGrowth::default());
            hand.look(&mut detector);
            let mut said = Vec::new();
            for worker in 1..8_u32 {
                let process = |pid| crate::gpu::Process { pid, used_bytes: None };
                hand.gpus[0].set_processes(hand.now_ns, is_listed.then(|| (1..=worker).map(process).collect()));
                said.extend(minutes(&mut hand, &mut detector, (0..9).map(|_| u64::from(worker) * 8 * GIB)));
            }
            assert_eq!(said.is_empty(), is_listed);
        }
    }

    #[test]
    fn another_users_step_that_names_the_gpu_hides_nothing() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), MemoryGrowth::default());
        hand.look(&mut detector);
        let mut said = Vec::new();
        for nth in 0..50 {
            let mut other = Step { end_ns: hand.now_ns, ..step(50, GIB) };
            other.key.0 = crate::jobs::JobId::new(crate::scope::Scope::User("666".into()), "liar");
            hand.steps_end(&mut detector, vec![other]);
            said.extend(minutes(&mut hand, &mut detector, [20 * GIB + nth * 500 * MIB].into_iter()));
        }
        assert_eq!(said.first().map(|(minute, _)| *minute), Some(40));
    }

    #[test]
    fn a_gpu_with_steps_is_judged_by_them_alone() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), MemoryGrowth::default());
        let rising = || (0..45).map(|nth| 20 * GIB + nth * 500 * MIB);
        hand.look(&mut detector);
        // A step that takes longer than the minutes.
        hand.ranks[0].step =
            Some(super::super::view::OpenStep { number: Some(7), begin_ns: 0, retries: None, refills: false });
        assert!(minutes(&mut hand, &mut detector, rising()).is_empty());
        hand.ranks[0].step = None;
        assert!(hand.steps_end(&mut detector, vec![Step { end_ns: hand.now_ns, ..step(50, GIB) }]).is_empty());
        let said = minutes(&mut hand, &mut detector, rising().chain((45..51).map(|nth| 20 * GIB + nth * 500 * MIB)));
        assert_eq!(
            said.iter().map(|(minute, _)| *minute).collect::<Vec<_>>(),
            [94, 95, 96],
            "ten minutes after it, for forty"
        );
        // The list of GPUs changes.
        hand.gpus.clear();
        assert!(hand.look(&mut detector).0.is_empty() && detector.gpus.is_empty());
    }
}
