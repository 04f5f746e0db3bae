//! `slow_steps`: the steps of a job take longer than before, whatever the cause.
//!
//! A step of a rank is compared with the rank's last [`STEPS`] usual steps in which its phases come as many times: a step that
//! accumulates the gradients of four batches is no slow step of one. It is reported at once if it is far longer than
//! these, and otherwise with the third in a row that is longer than each of them, or the fifth that is longer than all but two. The
//! detectors of causes need some seconds more. The finding is one for a job, once at least half of its
//! ranks are slow: ranks of a job wait for each other. Steps that checkpoint or evaluate are left out, and so are those of other ranks at
//! that time, which wait for them. A step that does not end is reported while it is open. After an hour, the new length is the usual one.

use super::detector::{Detector, Looked, Trouble};
use super::finding::{
    Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Subject, Text, capitalized, seconds,
};
use super::steps::{Step, is_one_of, title};
use super::view::{OpenStep, RankNow, View, ratio};
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use crate::jobs::JobId;
use crate::phases::RankKey;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Usual steps with which a step is compared. Fewer than `LEAST` decide nothing.
const STEPS: usize = 48;
const LEAST: usize = 16;
/// This number of the longest usual steps count as outliers, for example steps in which the garbage collector ran.
const OUTLIERS: usize = 2;
/// A step of this many medians is long.
const LONG: f64 = 1.1;
/// One step suffices if it takes at least `FAR` times the median, takes at least `LONG` times the longest usual step,
/// and exceeds the median by at least `FAR_NS` and by at least `FAR_SPREADS` times as much as the longest usual step
/// without outliers does.
const FAR: f64 = 1.5;
const FAR_NS: i64 = 250 * MILLISECOND_NS;
const FAR_SPREADS: i64 = 4;
/// Or `RUN` long steps in a row that are longer than each usual step, or `RUN_OF_MOST` that are longer than all but the outliers.
const RUN: usize = 3;
const RUN_OF_MOST: usize = 5;
/// An open step is reported when it has lasted for this many times the longest usual step, and for `OPEN_NS` more than that one.
const OPEN: i64 = 3;
pub(super) const OPEN_NS: i64 = SECOND_NS;
/// If the rank's process is not known, so that nothing shows its end, an open step is reported for this long at most.
const OPEN_MOST_NS: i64 = 600 * SECOND_NS;
/// What has lasted for this long is a warning, and what has lasted for `USUAL_NS` is the usual length from then on.
const LASTING_NS: i64 = 10 * SECOND_NS;
const USUAL_NS: i64 = 3600 * SECOND_NS;
/// Kinds of steps of a rank whose lengths are known, by how many times their phases come.
const MOST_KINDS: usize = 2;
/// Phases of a rank whose usual time is known.
const MOST_PHASES: usize = 8;
/// Weight of a new step in a phase's usual time.
const NEW: f64 = 1.0 / 16.0;

/// Follows the length of each rank's steps.
#[derive(Debug, Default)]
pub(super) struct SlowSteps {
    ranks: BTreeMap<RankKey, RankSteps>,
    /// By job, the begin and end of what a rank did last beside training, nanoseconds.
    refills: BTreeMap<JobId, (i64, i64)>,
    looked: Looked,
}

/// The steps of a rank.
#[derive(Debug, Default)]
struct RankSteps {
    /// The lengths of each kind of step, that of the last step first.
    kinds: VecDeque<Lengths>,
    slow: Option<Slow>,
}

/// The lengths of a rank's steps of one kind, nanoseconds.
#[derive(Debug, Default)]
struct Lengths {
    /// How many passes the last of them had ([`passes`]).
    passes: usize,
    usual: VecDeque<i64>,
    limits: Option<Limits>,
    /// The last long steps in a row, and when the first of all in this row began.
    long: VecDeque<i64>,
    long_since_ns: i64,
    /// Usual time in each phase, nanoseconds.
    phases: Vec<(Arc<str>, f64)>,
}

/// What usual steps take, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limits {
    median_ns: i64,
    /// The longest without the outliers, and with them.
    most_ns: i64,
    all_ns: i64,
}

/// A slow step of a rank.
#[derive(Debug, Clone)]
struct Slow {
    number: Option<u64>,
    length_ns: i64,
    ratio: f64,
    usual: Limits,
    begin_ns: i64,
    /// How many are long in a row, as far as they are kept.
    steps: usize,
    /// The phase that is longer than usual by most, and by how much.
    phase: Option<(Arc<str>, i64)>,
    is_open: bool,
}

impl Detector for SlowSteps {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.ranks.retain(|key, _| view.knows(key));
        self.refills.retain(|job, _| view.ranks.iter().any(|rank| rank.key.0 == *job));
        let refills: Vec<Option<(i64, i64)>> = view.steps.iter().map(|step| refill(view, step)).collect();
        for (step, times_ns) in view.steps.iter().zip(&refills) {
            if let Some(times_ns) = times_ns {
                self.refills.insert(step.key.0.clone(), *times_ns);
            }
        }
        let mut jobs: BTreeSet<&JobId> = BTreeSet::new();
        for (step, refill) in view.steps.iter().zip(refills) {
            let rank = self.ranks.entry(step.key.clone()).or_default();
            if step.nth < view.settings.warm_up_steps {
                rank.kinds.clear();
            }
            // What was reported while it was open has ended.
            rank.slow = None;
            let waits = |(begin_ns, end_ns): &(i64, i64)| step.begin_ns < *end_ns && *begin_ns < step.end_ns;
            let is_usual = refill.is_none()
                && step.nth >= view.settings.warm_up_steps
                && !self.refills.get(&step.key.0).is_some_and(waits);
            let lengths = rank.lengths_of(passes(view, step));
            self.looked.note(is_usual && lengths.limits.is_some());
            if is_usual {
                rank.slow = lengths.note(step, view.settings.lag_ns);
            }
            if rank.slow.is_some() {
                jobs.insert(&step.key.0);
            }
        }
        jobs.extend(self.look_at_open(view));
        signs.extend(jobs.into_iter().filter_map(|job| self.sign(view, job)));
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::SlowSteps, self.looked);
    }
}

impl SlowSteps {
    /// The jobs of ranks whose step has been open for too long.
    fn look_at_open<'a>(&mut self, view: &View<'a>) -> Vec<&'a JobId> {
        let refills = |rank: &&RankNow| rank.step.is_some_and(|open| open.refills);
        let refilling: BTreeSet<&JobId> = view.ranks.iter().filter(refills).map(|rank| &rank.key.0).collect();
        let mut jobs = Vec::new();
        for rank in view.ranks {
            let is_long = |open: &OpenStep| view.now_ns - open.begin_ns > OPEN_NS && !refilling.contains(&rank.key.0);
            let (Some(open), Some(steps)) = (rank.step.filter(is_long), self.ranks.get_mut(&rank.key)) else {
                continue;
            };
            // It waited for as long as another rank did something beside training.
            let refilled_ns = self.refills.get(&rank.key.0).map_or(open.begin_ns, |(_, end_ns)| *end_ns);
            let open_ns = view.now_ns - open.begin_ns.max(refilled_ns);
            let longest = steps.kinds.iter().max_by_key(|lengths| lengths.limits.map(|limits| limits.all_ns));
            let stuck = longest.filter(|lengths| lengths.is_stuck(rank, open_ns));
            if let Some(slow) = stuck.and_then(|lengths| lengths.open(open, view.now_ns)) {
                steps.slow = Some(slow);
                jobs.push(&rank.key.0);
            }
        }
        jobs
    }

    /// The sign of a job, if at least half of its ranks that are known for long enough are slow.
    fn sign(&self, view: &View<'_>, job: &JobId) -> Option<Sign> {
        let ranks = self.ranks.range((job.clone(), 0)..=(job.clone(), u32::MAX));
        let known: Vec<&RankSteps> = ranks.map(|(_, rank)| rank).filter(|rank| rank.is_known()).collect();
        let slow: Vec<&Slow> = known.iter().filter_map(|rank| rank.slow.as_ref()).collect();
        if slow.len() * 2 < known.len() {
            return None;
        }
        let begin_ns = slow.iter().map(|slow| slow.begin_ns).min()?;
        let most = slow.into_iter().max_by(|one, other| one.ratio.total_cmp(&other.ratio))?;
        let is_lasting = view.now_ns - begin_ns >= LASTING_NS && (most.steps >= RUN || most.is_open);
        let excess = |(_, ns): &(Arc<str>, i64)| Evidence { name: "phase_excess_seconds", value: seconds(*ns) };
        let numbers = [
            ("slowdown_ratio", most.ratio),
            ("step_seconds", seconds(most.length_ns)),
            ("usual_step_seconds", seconds(most.usual.median_ns)),
        ];
        let evidence = numbers.map(|(name, value)| Evidence { name, value }).into_iter();
        Some(Sign {
            kind: FindingKind::SlowSteps,
            subject: Subject { job: Some(job.clone()), ..Subject::default() },
            severity: if is_lasting { Severity::Warning } else { Severity::Info },
            certainty: Certainty::Observed,
            begin_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: most.number,
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            // The cause says what was lost, and counts it.
            lost_ns: None,
            evidence: evidence.chain(most.phase.as_ref().map(excess)).collect(),
            text: most.text(job),
        })
    }
}

impl RankSteps {
    /// The lengths of steps with about this number of passes. Of too many kinds, that whose last step is the oldest is forgotten.
    fn lengths_of(&mut self, passes: usize) -> &mut Lengths {
        let is_alike = |lengths: &Lengths| lengths.passes.max(passes) * 5 <= lengths.passes.min(passes) * 6;
        let known = self.kinds.iter().position(is_alike);
        let lengths = known.and_then(|at| self.kinds.remove(at)).unwrap_or_default();
        self.kinds.push_front(Lengths { passes, ..lengths });
        self.kinds.truncate(MOST_KINDS);
        &mut self.kinds[0]
    }

    /// Whether enough steps of the last one's kind are known.
    fn is_known(&self) -> bool {
        self.kinds.front().is_some_and(|lengths| lengths.limits.is_some())
    }
}

impl Lengths {
    /// Takes the next step, and returns it if it is slow. `least_ns`: what a step must be longer by.
    fn note(&mut self, step: &Step, least_ns: i64) -> Option<Slow> {
        let length_ns = step.length_ns();
        let Some(limits) = self.limits else {
            self.add(step);
            return None;
        };
        let longer_ns = length_ns - limits.median_ns;
        let ratio_to = |usual_ns: i64| ratio(length_ns, usual_ns).unwrap_or(1.0);
        let ratio = ratio_to(limits.median_ns);
        if ratio < LONG || longer_ns < least_ns || length_ns <= limits.most_ns {
            // Fewer than `RUN` in a row are chance: they are usual steps too.
            if self.long.len() < RUN {
                self.usual.append(&mut self.long);
            }
            self.long.clear();
            self.add(step);
            return None;
        }
        if self.long.is_empty() {
            self.long_since_ns = step.begin_ns;
        }
        self.long.push_back(length_ns);
        while self.long.len() > STEPS {
            self.long.pop_front();
        }
        if step.end_ns - self.long_since_ns >= USUAL_NS {
            self.usual = std::mem::take(&mut self.long);
            self.phases.clear();
            self.add(step);
            return None;
        }
        let is_far = ratio >= FAR
            && longer_ns >= FAR_NS
            && ratio_to(limits.all_ns) >= LONG
            && longer_ns >= FAR_SPREADS * (limits.most_ns - limits.median_ns);
        let beyond_all = self.long.iter().rev().take_while(|one| **one > limits.all_ns).count();
        (is_far || beyond_all >= RUN || self.long.len() >= RUN_OF_MOST).then(|| {
            let (number, usual, begin_ns) = (step.number, limits, self.long_since_ns);
            let (steps, phase) = (self.long.len(), self.longer_phase(step));
            Slow { number, length_ns, ratio, usual, begin_ns, steps, phase, is_open: false }
        })
    }

    /// Adds a usual step.
    fn add(&mut self, step: &Step) {
        self.usual.push_back(step.length_ns());
        while self.usual.len() > STEPS {
            self.usual.pop_front();
        }
        for (name, ns) in times(step) {
            #[allow(clippy::cast_precision_loss, reason = "durations of steps")]
            let ns = ns as f64;
            if let Some((_, usual)) = self.phases.iter_mut().find(|(known, _)| *known == *name) {
                *usual += (ns - *usual) * NEW;
            } else if self.phases.len() < MOST_PHASES {
                self.phases.push((Arc::clone(name), ns));
            }
        }
        self.limits = Limits::of(&self.usual);
    }

    /// Whether a step that has been open for this long is reported.
    fn is_stuck(&self, rank: &RankNow, open_ns: i64) -> bool {
        let is_long = |limits: Limits| open_ns >= OPEN * limits.all_ns && open_ns >= limits.all_ns + OPEN_NS;
        self.limits.is_some_and(is_long) && (rank.pid.is_some() || open_ns < OPEN_MOST_NS)
    }

    /// A step that is open.
    fn open(&self, step: OpenStep, now_ns: i64) -> Option<Slow> {
        let (usual, length_ns) = (self.limits?, now_ns - step.begin_ns);
        let ratio = ratio(length_ns, usual.median_ns)?;
        let (number, steps) = (step.number, self.long.len() + 1);
        let begin_ns = if self.long.is_empty() { step.begin_ns } else { self.long_since_ns };
        Some(Slow { number, length_ns, ratio, usual, begin_ns, steps, phase: None, is_open: true })
    }

    /// The phase of a step that is longer than usual by most, if it is by at least a third of what the step is longer by.
    fn longer_phase(&self, step: &Step) -> Option<(Arc<str>, i64)> {
        let limits = self.limits?;
        let longer = times(step).into_iter().map(|(name, ns)| {
            let usual = self.phases.iter().find(|(known, _)| *known == *name).map_or(0.0, |(_, usual)| *usual);
            #[allow(clippy::cast_possible_truncation, reason = "durations of steps")]
            (name, ns - usual as i64)
        });
        let (name, longer_ns) = longer.max_by_key(|(_, longer_ns)| *longer_ns)?;
        (longer_ns * 3 >= step.length_ns() - limits.median_ns).then(|| (Arc::clone(name), longer_ns))
    }
}

/// The time in each phase of a step, by name, nanoseconds.
fn times(step: &Step) -> Vec<(&Arc<str>, i64)> {
    let mut times: Vec<(&Arc<str>, i64)> = Vec::new();
    for phase in &step.phases {
        let ns = phase.end_ns - phase.begin_ns;
        match times.iter_mut().find(|(name, _)| **name == phase.name) {
            Some((_, all_ns)) => *all_ns += ns,
            None => times.push((&phase.name, ns)),
        }
    }
    times
}

/// How many times the phase that comes most often comes in a step. How often communication is marked differs from step to step.
fn passes(view: &View<'_>, step: &Step) -> usize {
    let mut passes: Vec<(&str, usize)> = Vec::new();
    for phase in &step.phases {
        match passes.iter_mut().find(|(name, _)| *name == &*phase.name) {
            Some((_, times)) => *times += 1,
            None => passes.push((&phase.name, 1)),
        }
    }
    let of_work = passes.iter().filter(|(name, _)| !is_one_of(name, &view.settings.comm_phases));
    of_work.map(|(_, times)| *times).max().unwrap_or(0)
}

/// When a step did something beside training, from its begin to its end; `None` if it did not.
fn refill(view: &View<'_>, step: &Step) -> Option<(i64, i64)> {
    let phases = || step.phases.iter().filter(|phase| is_one_of(&phase.name, &view.settings.refill_phases));
    Some((phases().map(|phase| phase.begin_ns).min()?, phases().map(|phase| phase.end_ns).max()?))
}

impl Limits {
    /// Those of these steps; `None` if they are too few.
    fn of(usual: &VecDeque<i64>) -> Option<Self> {
        if usual.len() < LEAST {
            return None;
        }
        let mut sorted: Vec<i64> = usual.iter().copied().collect();
        sorted.sort_unstable();
        let most_ns = *sorted.iter().rev().nth(OUTLIERS)?;
        Some(Self { median_ns: *sorted.get(sorted.len() / 2)?, most_ns, all_ns: *sorted.last()? })
    }
}

impl Slow {
    fn text(&self, job: &JobId) -> Text {
        let (length, usual) = (HumanDuration(self.length_ns), HumanDuration(self.usual.median_ns));
        let (ratio, step) = (self.ratio, title(self.number));
        let what = if self.is_open {
            format!("{} of {job} has not ended after {length}; {usual} is usual.", capitalized(&step))
        } else if self.steps < RUN {
            format!("{} of {job} took {length}, {ratio:.1} times as long as usual.", capitalized(&step))
        } else {
            format!("Steps of {job} take {length}, {ratio:.1} times as long as before.")
        };
        let usual = format!(
            "Before, its last steps took {usual} in the median and {} at most.",
            HumanDuration(self.usual.all_ns)
        );
        let phase = self.phase.as_ref().map_or_else(String::new, |(name, ns)| {
            format!(" {} spent {} more than usual in {name}.", capitalized(&step), HumanDuration(*ns))
        });
        Text {
            what,
            why: format!("{usual}{phase}"),
            advice: "If another finding of the job is active, it says why. If there is none, compare the phases of a slow step with \
                     those of a usual one, and look for what changed at that moment: the length of the inputs, clocks, other \
                     processes on the node, storage, the network."
                .to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::phases::hand::key;

    /// A job of some ranks that all take the same time for each step.
    struct Job {
        hand: Hand,
        detector: SlowSteps,
        ranks: usize,
        nth: u64,
    }

    impl Job {
        fn of(ranks: usize) -> Self {
            Self { hand: Hand::with_ranks(ranks), detector: SlowSteps::default(), ranks, nth: 0 }
        }

        /// A job after 51 steps of 300 ms, of which 3 are warm-up, with up to 2 % of noise.
        fn steady(ranks: usize) -> Self {
            let mut job = Self::of(ranks);
            for nth in 0..51 {
                assert_eq!(job.step(300 + nth * 7 % 6), None, "step {nth}");
            }
            job
        }

        /// All ranks take the next step, which takes this many milliseconds, 200 of them in forward and the rest in backward.
        fn step(&mut self, ms: i64) -> Option<Sign> {
            self.step_of(&|_| vec![("forward", 200), ("backward", ms - 200)])
        }

        fn step_of(&mut self, phases: &dyn Fn(usize) -> Vec<(&'static str, i64)>) -> Option<Sign> {
            let (nth, begin_ns) = (self.nth, self.hand.now_ns);
            let steps = (0..self.ranks).map(|rank| Hand::step(rank, nth, begin_ns, &phases(rank))).collect();
            self.nth += 1;
            let mut signs = self.hand.steps_end(&mut self.detector, steps);
            assert!(signs.len() <= 1, "one for a job");
            signs.pop()
        }

        /// After how many steps of this length one is reported.
        fn reported_after(&mut self, ms: i64) -> Option<usize> {
            (1..=40).find(|_| self.step(ms).is_some())
        }

        /// Every rank has been in the next step for this long.
        fn is_open_for(&mut self, open_ns: i64, refills: bool) -> Vec<Sign> {
            let step =
                OpenStep { number: Some(self.nth), begin_ns: self.hand.now_ns - open_ns, retries: None, refills };
            self.hand.ranks.iter_mut().for_each(|rank| rank.step = Some(step));
            self.hand.look(&mut self.detector).0
        }
    }

    #[test]
    fn one_step_far_beyond_all_is_reported_at_once_and_three_that_are_beyond_by_little() {
        assert_eq!(Job::steady(1).reported_after(1500), Some(1));
        assert_eq!(Job::steady(2).reported_after(560), Some(1), "by a quarter of a second");
        assert_eq!(Job::steady(2).reported_after(500), Some(3));
        assert_eq!(Job::steady(2).reported_after(335), Some(3));
        assert_eq!(Job::steady(2).reported_after(325), None, "less than a tenth");
    }

    #[test]
    fn it_says_how_long_steps_took_before_and_in_which_phase_they_are_longer() {
        let mut job = Job::steady(2);
        let began_ns = job.hand.now_ns;
        let sign = job.step(1500).expect("a sign");
        assert_eq!((sign.kind, sign.severity, sign.step), (FindingKind::SlowSteps, Severity::Info, Some(51)));
        assert_eq!(sign.subject, Subject { job: Some("j".into()), ..Subject::default() });
        assert_eq!((sign.begin_ns, sign.until_ns), (began_ns, job.hand.now_ns + job.hand.settings.hold_ns));
        assert_eq!(sign.text.what, "Step 51 of j took 1.5 s, 5.0 times as long as usual.");
        assert_eq!(
            sign.text.why,
            "Before, its last steps took 303 ms in the median and 305 ms at most. Step 51 spent 1.2 s more than usual in backward."
        );
        job.step(1500);
        let sign = job.step(1500).expect("a sign");
        assert_eq!(sign.text.what, "Steps of j take 1.5 s, 5.0 times as long as before.");
        let evidence: Vec<_> = sign.evidence.iter().map(|one| (one.name, (one.value * 1000.0).round())).collect();
        let [ratio, step, usual, phase] = evidence.try_into().expect("four");
        assert_eq!((ratio, step), (("slowdown_ratio", 4950.0), ("step_seconds", 1500.0)));
        assert_eq!((usual, phase.0), (("usual_step_seconds", 303.0), "phase_excess_seconds"));
        assert!((1195.0..=1200.0).contains(&phase.1), "{phase:?}");
        assert_eq!(sign.begin_ns, began_ns);
    }

    #[test]
    fn what_lasts_for_ten_seconds_is_a_warning_and_what_lasts_for_an_hour_is_usual() {
        let mut job = Job::steady(1);
        let severities: Vec<_> = (0..10).map(|_| job.step(1500).map(|sign| sign.severity)).collect();
        assert_eq!(severities[..6], [Some(Severity::Info); 6]);
        assert_eq!(severities[6..], [Some(Severity::Warning); 4]);
        let steps = (0..3000).filter(|_| job.step(1500).is_some()).count();
        assert_eq!(steps, 2400 - 11, "of 1.5 s each");
        assert_eq!(job.reported_after(1500), None);
        assert_eq!(job.reported_after(2500), Some(1));
    }

    #[test]
    fn steps_that_differ_in_length_are_no_news() {
        let mut job = Job::of(1);
        // From 200 to 500 ms, by a generator of fixed seed; the longest come in pairs now and then.
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            200 + i64::try_from(state >> 33).expect("31 bits") % 300
        };
        let reported = (0..3000).filter(|_| job.step(next()).is_some()).count();
        assert_eq!(reported, 0);
        assert!(job.reported_after(700).is_some_and(|steps| steps <= RUN));
    }

    #[test]
    fn now_and_then_a_longer_step_is_no_news_and_does_not_hide_what_comes_then() {
        let mut job = Job::steady(1);
        for nth in 0..210 {
            assert_eq!(job.step(if nth % 25 == 24 { 400 } else { 300 + nth % 5 }), None, "step {nth}");
        }
        assert_eq!(job.reported_after(400), Some(RUN_OF_MOST), "not longer than all");
    }

    #[test]
    fn checkpoints_and_evaluations_are_left_out_and_so_is_the_warm_up() {
        let mut job = Job::steady(1);
        assert_eq!(job.step_of(&|_| vec![("forward", 200), ("checkpoint", 4000)]), None);
        assert_eq!(job.detector.looked, Looked { steps: 52, abstained: 3 + 16 + 1 });
        assert_eq!(job.reported_after(335), Some(3));
        let mut job = Job::steady(1);
        job.nth = 0;
        assert_eq!(job.reported_after(3000), None, "another run");
    }

    #[test]
    fn half_of_the_ranks_must_be_slow() {
        let slow = |ranks: usize| {
            let mut job = Job::steady(4);
            job.step_of(&|rank| vec![("forward", if rank < ranks { 1500 } else { 300 })]).is_some()
        };
        assert_eq!([1, 2, 4].map(slow), [false, true, true]);
        let mut job = Job::steady(4);
        job.step(1500);
        job.hand.ranks.clear();
        job.hand.look(&mut job.detector);
        assert!(job.detector.ranks.is_empty());
    }

    #[test]
    fn a_step_that_does_not_end_is_reported_while_it_is_open() {
        let mut job = Job::steady(2);
        job.hand.now_ns += 20 * SECOND_NS;
        let of = |ms: i64| ms * MILLISECOND_NS;
        assert_eq!(job.is_open_for(of(1304), false), []);
        let [sign] = job.is_open_for(of(1305), false).try_into().expect("one");
        assert_eq!(sign.text.what, "Step 51 of j has not ended after 1.3 s; 303 ms is usual.");
        assert_eq!((sign.severity, sign.begin_ns), (Severity::Info, job.hand.now_ns - of(1305)));
        assert_eq!(job.is_open_for(of(10_000), false)[0].severity, Severity::Warning);
        assert_eq!(job.is_open_for(of(10_000), true), [], "in a checkpoint");
        // Nothing shows the end of a rank without a process.
        job.hand.now_ns += 700 * SECOND_NS;
        assert_eq!(job.is_open_for(of(600_000), false), []);
        job.hand.ranks.iter_mut().for_each(|rank| rank.pid = Some(7));
        assert_eq!(job.is_open_for(of(600_000), false).len(), 1);
        assert!(job.detector.ranks[&key(0)].slow.is_some());
    }

    #[test]
    fn a_step_that_ends_with_a_checkpoint_is_not_reported_as_open_any_more() {
        let mut job = Job::steady(2);
        job.hand.now_ns += 20 * SECOND_NS;
        assert_eq!(job.is_open_for(10 * SECOND_NS, false).len(), 1);
        job.hand.ranks.iter_mut().for_each(|rank| rank.step = None);
        assert_eq!(job.step_of(&|_| vec![("forward", 200), ("checkpoint", 9_000)]), None);
        // Rank 0 has another slow step, while rank 1 is still in its own.
        let step = Hand::step(0, 52, job.hand.now_ns, &[("forward", 1500)]);
        let [sign] = job.hand.steps_end(&mut job.detector, vec![step]).try_into().expect("one");
        assert_eq!(sign.text.what, "Step 52 of j took 1.5 s, 5.0 times as long as usual.");
    }

    #[test]
    fn steps_that_wait_for_a_checkpoint_of_another_rank_are_left_out_too() {
        // Rank 0 writes a checkpoint at the end of its step. The other is in its next step by then.
        let mut job = Job::steady(2);
        let begin_ns = job.hand.now_ns;
        let ms = |ms: i64| begin_ns + ms * MILLISECOND_NS;
        let ends = vec![
            Hand::step(0, 51, begin_ns, &[("forward", 200), ("checkpoint", 2000)]),
            Hand::step(1, 51, begin_ns, &[("forward", 200)]),
        ];
        assert_eq!(job.hand.steps_end(&mut job.detector, ends), []);
        let waits = |nth, from_ms| vec![Hand::step(1, nth, ms(from_ms), &[("forward", 2200)])];
        assert_eq!(job.hand.steps_end(&mut job.detector, waits(52, 210)), []);
        assert_eq!(job.hand.steps_end(&mut job.detector, waits(53, 2410)).len(), 1, "not for the checkpoint");
        // It is in its checkpoint still.
        let mut job = Job::steady(2);
        let step = |refills| OpenStep { number: Some(51), begin_ns: 0, retries: None, refills };
        (job.hand.ranks[0].step, job.hand.ranks[1].step) = (Some(step(true)), Some(step(false)));
        assert_eq!(job.hand.look(&mut job.detector).0, []);
        job.hand.ranks[0].step = Some(step(false));
        assert_eq!(job.hand.look(&mut job.detector).0.len(), 1);
        // It ended a second ago, for which the other waited.
        let end_ns = job.hand.now_ns;
        job.hand.steps_end(&mut job.detector, vec![Hand::step(0, 51, end_ns - 3 * SECOND_NS, &[("checkpoint", 3000)])]);
        job.hand.now_ns = end_ns + SECOND_NS;
        assert_eq!(job.hand.look(&mut job.detector).0, []);
        job.hand.now_ns = end_ns + 2 * SECOND_NS;
        assert_eq!(job.hand.look(&mut job.detector).0.len(), 1);
        job.hand.ranks.clear();
        job.hand.look(&mut job.detector);
        assert!(job.detector.refills.is_empty());
    }

    #[test]
    fn steps_that_accumulate_gradients_are_compared_with_each_other() {
        let passes = |times: usize, ms: i64| move |_: usize| [("forward", ms), ("backward", ms)].repeat(times);
        let mut job = Job::of(1);
        (0..51).for_each(|_| assert_eq!(job.step_of(&passes(1, 100)), None));
        for nth in 0..60 {
            assert_eq!(job.step_of(&passes(4, 100)), None, "step {nth}");
        }
        // Each kind has its own usual length, and the other is not forgotten.
        assert!(job.step_of(&passes(1, 500)).is_some());
        let sign = job.step_of(&passes(4, 200)).expect("slow");
        assert!(sign.text.what.ends_with("took 1.6 s, 2.0 times as long as usual."), "{}", sign.text.what);
        // An open step is compared with the longest.
        job.hand.now_ns += 20 * SECOND_NS;
        assert_eq!(job.is_open_for(2 * SECOND_NS, false), []);
        assert_eq!(job.is_open_for(3 * SECOND_NS, false).len(), 1);
        job.hand.ranks.iter_mut().for_each(|rank| rank.step = None);
        job.step_of(&passes(3, 100));
        let kinds: Vec<usize> = job.detector.ranks[&key(0)].kinds.iter().map(|lengths| lengths.passes).collect();
        assert_eq!(kinds, [3, 4], "the oldest makes room");
        for nth in 0..60 {
            let comm = [("comm", 1)].repeat(nth % 7);
            assert_eq!(job.step_of(&|_| [passes(10 + nth % 2, 10)(0), comm.clone()].concat()), None);
        }
        assert_eq!(
            job.detector.ranks[&key(0)].kinds[0].usual.len(),
            STEPS,
            "about as many passes, and any communication"
        );
    }

    #[test]
    fn a_name_of_a_phase_beyond_the_eighth_is_not_kept() {
        let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
        let mut job = Job::of(1);
        for _ in 0..30 {
            job.step_of(&|_| names.map(|name| (name, 30)).to_vec());
        }
        assert_eq!(job.detector.ranks[&key(0)].kinds[0].phases.len(), MOST_PHASES);
        let sign = job.step_of(&|_| vec![("forward", 900)]).expect("a sign");
        assert!(sign.text.why.ends_with("spent 900 ms more than usual in forward."), "{}", sign.text.why);
    }
}
