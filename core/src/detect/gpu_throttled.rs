//! `gpu_throttled`: a busy GPU whose clocks are held back by heat, by the board or its power supply, or by another GPU.
//!
//! Based on the driver's clocks event reasons, which the medium lane reads. A GPU at its own power limit works as intended and
//! is not reported. What it costs is the clock and the rank's steps, each beside those before.

use super::detector::{Detector, Looked, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Text, seconds};
use super::steps::Step;
use super::view::{RankNow, View, median, ratio};
use crate::clock::SECOND_NS;
use crate::gpu::{Medium, SLOWDOWN_MASK, THROTTLE_REASONS};
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Readings of this long are judged together: heat switches the reason on and off several times a second. Where readings are rarer,
/// those of the time for which one holds are.
const WINDOW_NS: i64 = 5 * SECOND_NS;
/// Clocks are held back if a reason was active for at least this share of the window.
const SHARE: f64 = 0.5;
/// A clock of at most this part of the one before is critical.
const CRITICAL_CLOCK: f64 = 0.5;
/// The weight of a reading in the moving average of the healthy clock: at 10 readings a second, a time constant of 10
/// s.
const WEIGHT: f64 = 0.01;
/// Steps that are kept of each rank, before and while clocks are held back.
const STEPS: usize = 20;
/// Steps needed before, to know what they took.
const FEWEST_STEPS: usize = 5;

/// Follows the clocks of each GPU, and the steps of the ranks on it.
#[derive(Debug, Default)]
pub(super) struct GpuThrottled {
    gpus: Vec<Clocks>,
    ranks: BTreeMap<RankKey, Lengths>,
    looked: Looked,
}

/// The last readings of one GPU.
#[derive(Debug, Default)]
struct Clocks {
    /// Those of the window in which it was busy, oldest first.
    readings: VecDeque<Reading>,
    /// How many of them have a reason.
    slowed: usize,
    /// The mean clock while it was busy and nothing held it back, hertz.
    healthy_hertz: Option<f64>,
    /// When it began to be held back.
    begin_ns: Option<i64>,
}

/// What one reading says of the clocks.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at_ns: i64,
    /// The active reasons of [`SLOWDOWN_MASK`].
    reasons: u64,
    hertz: Option<f64>,
}

/// How long the last steps of a rank took, nanoseconds.
#[derive(Debug, Default)]
struct Lengths {
    healthy: VecDeque<i64>,
    throttled: VecDeque<i64>,
}

impl Detector for GpuThrottled {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.gpus.resize_with(view.gpus.len(), Clocks::default);
        for (gpu, clocks) in view.gpus.iter().zip(&mut self.gpus) {
            if let Some(latest) = gpu.medium() {
                clocks.note(latest.at_ns, &latest.reading);
            }
            clocks.judge(view.now_ns, gpu.reading_hold_ns());
        }
        self.ranks.retain(|key, _| view.knows(key));
        for step in view.steps {
            let are_known = |gpu: &usize| {
                let latest = view.gpus.get(*gpu).and_then(|gpu| gpu.medium());
                latest.is_some_and(|latest| latest.reading.throttle_reasons.is_some())
            };
            self.looked.note(!step.gpus.is_empty() && step.gpus.iter().all(are_known));
            self.note_step(view, step);
        }
        for (gpu, clocks) in self.gpus.iter().enumerate() {
            if let Some(begin_ns) = clocks.begin_ns {
                let rank = view.rank_on(gpu);
                let steps_ns = rank.and_then(|rank| self.ranks.get(&rank.key)?.medians());
                let lost_ns = rank.zip(steps_ns).and_then(|(rank, (healthy_ns, _))| {
                    // A rank with several such GPUs loses its time once.
                    (self.first_held(rank) == Some(gpu)).then(|| lost_ns(view, rank, begin_ns, healthy_ns))
                });
                signs.push(Sign { lost_ns, ..sign(view, gpu, clocks, begin_ns, steps_ns) });
            }
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::GpuThrottled, self.looked);
    }
}

impl GpuThrottled {
    /// The first GPU of a rank that is held back.
    fn first_held(&self, rank: &RankNow) -> Option<usize> {
        let is_held = |gpu: &usize| self.gpus.get(*gpu).is_some_and(|clocks| clocks.begin_ns.is_some());
        rank.gpus.iter().copied().filter(is_held).min()
    }

    /// Keeps the length of a step: as a throttled one if a GPU of the rank was held back in all of it, and as a healthy one if
    /// none was in any of it.
    fn note_step(&mut self, view: &View<'_>, step: &Step) {
        if step.nth < view.settings.warm_up_steps || !view.knows(&step.key) {
            return;
        }
        let clocks =
            || step.gpus.iter().filter(|gpu| view.counts_on(&step.key, **gpu)).filter_map(|gpu| self.gpus.get(*gpu));
        let in_all = clocks().any(|clocks| clocks.begin_ns.is_some_and(|begin_ns| begin_ns <= step.begin_ns));
        let in_none = !clocks().any(|clocks| clocks.is_in_doubt(step));
        let lengths = self.ranks.entry(step.key.clone()).or_default();
        if in_all {
            push(&mut lengths.throttled, step.length_ns());
        } else if in_none {
            push(&mut lengths.healthy, step.length_ns());
            lengths.throttled.clear();
        }
    }
}

impl Clocks {
    /// Keeps a reading. One without reasons, or of a GPU on which nothing ran, says nothing.
    fn note(&mut self, at_ns: i64, medium: &Medium) {
        let is_new = self.readings.back().is_none_or(|last| last.at_ns < at_ns);
        let is_busy = medium.utilization_ratio.is_none_or(|ratio| ratio > 0.0);
        let (Some(reasons), true, true) = (medium.throttle_reasons, is_new, is_busy) else { return };
        let reasons = reasons & SLOWDOWN_MASK;
        let hertz = medium.sm_clock_hertz;
        if let (0, Some(hertz)) = (reasons, hertz) {
            let before = self.healthy_hertz.unwrap_or(hertz);
            self.healthy_hertz = Some(before + WEIGHT * (hertz - before));
        }
        self.slowed += usize::from(reasons != 0);
        self.readings.push_back(Reading { at_ns, reasons, hertz });
    }

    /// Decides whether it is held back now, and since when. A reading holds for `hold_ns`.
    fn judge(&mut self, now_ns: i64, hold_ns: i64) {
        let window_ns = WINDOW_NS.max(hold_ns);
        while let Some(oldest) = self.readings.front().filter(|oldest| oldest.at_ns <= now_ns - window_ns) {
            self.slowed -= usize::from(oldest.reasons != 0);
            self.readings.pop_front();
        }
        let period_ns = self.period_ns().min(hold_ns * 2 / 3);
        #[allow(clippy::cast_precision_loss, reason = "readings of five seconds")]
        let slowed_ns = self.slowed as f64 * period_ns as f64;
        self.begin_ns = if slowed_ns >= SHARE * window_ns as f64 {
            let first = self.readings.iter().find(|reading| reading.reasons != 0).map(|reading| reading.at_ns);
            self.begin_ns.or(first)
        } else {
            None
        };
    }

    /// The time that a reading stands for: the mean time between two readings of the window, nanoseconds.
    fn period_ns(&self) -> i64 {
        let ends = self.readings.front().zip(self.readings.back()).map(|(first, last)| last.at_ns - first.at_ns);
        let gaps = i64::try_from(self.readings.len()).unwrap_or(i64::MAX) - 1;
        ends.filter(|_| gaps > 0).map_or(0, |span_ns| span_ns / gaps)
    }

    /// Whether a step may have been slowed, so that it is not a healthy one: its GPU is held back now, or a reading
    /// within the step has a reason.
    fn is_in_doubt(&self, step: &Step) -> bool {
        let in_step = |reading: &&Reading| step.begin_ns <= reading.at_ns && reading.at_ns <= step.end_ns;
        self.begin_ns.is_some() || self.readings.iter().filter(in_step).any(|reading| reading.reasons != 0)
    }

    /// The reason that was active most often in the window, and in which share of the readings any was. The general
    /// `hw_slowdown` is active beside a more exact one, which then counts.
    fn reason(&self) -> (&'static str, f64) {
        let count = |mask: u64| self.readings.iter().filter(|reading| reading.reasons & mask != 0).count();
        let reasons = THROTTLE_REASONS.iter().filter(|(bit, _)| bit & SLOWDOWN_MASK != 0);
        let most = reasons.max_by_key(|(bit, name)| (count(*bit), *name != "hw_slowdown"));
        #[allow(clippy::cast_precision_loss, reason = "readings of five seconds")]
        let share = count(SLOWDOWN_MASK) as f64 / self.readings.len().max(1) as f64;
        (most.map_or("", |(_, name)| name), share)
    }

    /// The mean clock of the readings with a reason, hertz.
    fn throttled_hertz(&self) -> Option<f64> {
        let throttled = self.readings.iter().filter(|reading| reading.reasons != 0).filter_map(|reading| reading.hertz);
        let (sum, count) = throttled.fold((0.0, 0_u32), |(sum, count), hertz| (sum + hertz, count + 1));
        (count > 0).then(|| sum / f64::from(count))
    }
}

impl Lengths {
    /// The median step before, and while clocks are held back, nanoseconds.
    fn medians(&self) -> Option<(i64, i64)> {
        let healthy_ns = median(self.healthy.iter().copied()).filter(|_| self.healthy.len() >= FEWEST_STEPS)?;
        Some((healthy_ns, median(self.throttled.iter().copied())?))
    }
}

fn push(lengths: &mut VecDeque<i64>, length_ns: i64) {
    lengths.push_back(length_ns);
    if lengths.len() > STEPS {
        lengths.pop_front();
    }
}

/// The time that a rank lost in the steps that ended in this turn, nanoseconds: what each took longer than the median
/// healthy step. Only steps that began after its GPU was held back count.
fn lost_ns(view: &View<'_>, rank: &RankNow, begin_ns: i64, healthy_ns: i64) -> i64 {
    let is_its = |step: &&Step| step.key == rank.key && step.begin_ns >= begin_ns && step.is_usual(view.settings);
    view.steps.iter().filter(is_its).map(|step| (step.length_ns() - healthy_ns).max(0)).sum()
}

fn sign(view: &View<'_>, gpu: usize, clocks: &Clocks, begin_ns: i64, steps_ns: Option<(i64, i64)>) -> Sign {
    let (reason, share) = clocks.reason();
    let hertz = clocks.healthy_hertz.zip(clocks.throttled_hertz());
    let clock_ratio = hertz.map(|(healthy, throttled)| throttled / healthy);
    let begin_ns = begin_ns.max(view.subject_since_ns(gpu));
    let lasting_ns = view.now_ns - begin_ns;
    let step_ratio = steps_ns.and_then(|(healthy, throttled)| ratio(throttled, healthy));
    let numbers = [
        ("throttled_ratio", Some(share)),
        ("throttled_seconds", Some(seconds(lasting_ns))),
        ("clock_ratio", clock_ratio),
        ("step_slowdown_ratio", step_ratio),
    ];
    let is_critical = clock_ratio.is_some_and(|ratio| ratio <= CRITICAL_CLOCK);
    Sign {
        kind: FindingKind::GpuThrottled,
        subject: view.subject_of(gpu),
        severity: if is_critical { Severity::Critical } else { Severity::Warning },
        certainty: Certainty::Observed,
        begin_ns,
        until_ns: view.now_ns + view.settings.hold_ns,
        step: view.step_on(gpu),
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: numbers.into_iter().filter_map(|(name, value)| Some(Evidence { name, value: value? })).collect(),
        text: Text {
            what: what(&view.gpu_name(gpu), reason, hertz),
            why: why(view, gpu, reason, share, lasting_ns, steps_ns),
            advice: advice(reason).to_owned(),
        },
    }
}

fn what(gpu: &str, reason: &str, hertz: Option<(f64, f64)>) -> String {
    let by = match reason {
        "hw_power_brake_slowdown" => "the node's power brake",
        "hw_thermal_slowdown" => "the hardware, because the GPU is too hot",
        "sw_thermal_slowdown" => "the driver, because the GPU or its memory is too hot",
        "sync_boost" => "another GPU of its sync boost group",
        _ => "the hardware",
    };
    match hertz.filter(|(healthy, throttled)| throttled < healthy) {
        Some((healthy, throttled)) => {
            let [healthy, throttled] = [healthy, throttled].map(|hertz| hertz / 1e6);
            format!("{gpu} runs at {throttled:.0} MHz instead of {healthy:.0} MHz: its clocks are held back by {by}.")
        }
        None => format!("The clocks of {gpu} are held back by {by}."),
    }
}

fn why(view: &View<'_>, gpu: usize, reason: &str, share: f64, lasting_ns: i64, steps_ns: Option<(i64, i64)>) -> String {
    let steps = view.rank_on(gpu).zip(steps_ns).map_or_else(String::new, |(rank, (healthy_ns, throttled_ns))| {
        let (healthy, throttled) = (HumanDuration(healthy_ns), HumanDuration(throttled_ns));
        format!(" Steps of rank {} of {} take {throttled}; before, they took {healthy}.", rank.key.1, rank.key.0)
    });
    let (percent, lasting) = (share * 100.0, HumanDuration(lasting_ns));
    format!("For {lasting} the driver has reported {reason}, in {percent:.0} % of the readings of the last 5 s.{steps}")
}

fn advice(reason: &str) -> &'static str {
    match reason {
        "hw_power_brake_slowdown" => {
            "The power supply or the chassis asks the GPU to draw less. Look at the node's power supplies, cables and power \
             limit (ipmitool sel list), and move the job to another node until that is mended."
        }
        "hw_thermal_slowdown" | "sw_thermal_slowdown" => {
            "Compare its temperature with the other GPUs' of the node. Look at fans, air flow or coolant, and at \
             nvidia-smi -q -d TEMPERATURE,PERFORMANCE."
        }
        "sync_boost" => {
            "The slowest GPU of a sync boost group sets the clocks of all. Find which one is held back, and why: nvidia-smi \
             -q -d PERFORMANCE."
        }
        _ => {
            "The hardware protects the GPU from heat or from a lack of power. Look at nvidia-smi -q -d \
             TEMPERATURE,POWER,PERFORMANCE and at the node's power supplies."
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::gpu::{Device, GpuState};

    const BRAKE: u64 = 0x88;
    const HEAT: u64 = 0x20;
    const CAP: u64 = 0x4;

    /// Reads and looks ten times a second for that long; `of` returns utilization, reasons and clock in MHz of the moment in
    /// milliseconds.
    fn run(
        hand: &mut Hand,
        detector: &mut GpuThrottled,
        to_ms: i64,
        of: impl Fn(i64) -> (f64, u64, f64),
    ) -> Vec<(i64, Sign)> {
        let (from_ms, mut found) = (hand.now_ns / MILLISECOND_NS, Vec::new());
        for ms in (from_ms + 100..=to_ms).step_by(100) {
            hand.now_ns = ms * MILLISECOND_NS;
            let (utilization, reasons, megahertz) = of(ms);
            let medium = Medium {
                utilization_ratio: Some(utilization),
                throttle_reasons: Some(reasons),
                sm_clock_hertz: Some(megahertz * 1e6),
                ..Medium::default()
            };
            hand.gpus[0].set_medium(hand.now_ns, medium);
            found.extend(hand.look(detector).0.into_iter().map(|sign| (ms, sign)));
        }
        found
    }

    #[test]
    fn a_power_brake_is_reported_within_three_seconds_with_its_clock() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), GpuThrottled::default());
        assert!(run(&mut hand, &mut detector, 60_000, |_| (0.9, CAP, 1_755.0)).is_empty(), "its own power limit");
        let found = run(&mut hand, &mut detector, 70_000, |_| (0.9, BRAKE | CAP, 850.0));
        let (first_ms, sign) = &found[0];
        assert!((62_400..=62_700).contains(first_ms), "{first_ms}");
        assert_eq!(
            (sign.begin_ns / MILLISECOND_NS, sign.severity, sign.subject.rank),
            (60_100, Severity::Critical, Some(0))
        );
        assert_eq!(
            sign.text.what,
            "GPU 0 runs at 850 MHz instead of 1755 MHz: its clocks are held back by the node's power brake."
        );
        assert!(sign.text.why.contains("hw_power_brake_slowdown"), "{}", sign.text.why);
        let (_, last) = found.last().expect("it goes on");
        assert_eq!((last.begin_ns, last.until_ns), (sign.begin_ns, hand.now_ns + hand.settings.hold_ns));
        let after = run(&mut hand, &mut detector, 80_000, |_| (0.9, 0, 1_980.0));
        let (last_ms, _) = after.last().expect("some readings of the window have it");
        assert!((72_000..=73_000).contains(last_ms), "{last_ms}");
    }

    #[test]
    fn readings_that_are_rare_are_judged_over_the_time_for_which_they_hold() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), GpuThrottled::default());
        hand.gpus[0] = GpuState::new(Device::default(), 600 * SECOND_NS, 10 * SECOND_NS);
        let first = (0..12).find(|nth| {
            hand.now_ns = nth * 10 * SECOND_NS;
            let reasons = if *nth < 5 { 0 } else { BRAKE };
            let medium = Medium {
                utilization_ratio: Some(1.0),
                throttle_reasons: Some(reasons),
                sm_clock_hertz: Some(1e9),
                ..Medium::default()
            };
            hand.gpus[0].set_medium(hand.now_ns, medium);
            !hand.look(&mut detector).0.is_empty()
        });
        assert_eq!(first, Some(6), "two of the three readings of half a minute");
        // And ends when nothing is read any more.
        hand.now_ns += 60 * SECOND_NS;
        assert!(hand.look(&mut detector).0.is_empty());
    }

    #[test]
    fn heat_that_comes_and_goes_is_one_spell_and_a_moment_of_it_is_none() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), GpuThrottled::default());
        // Six of ten readings, and then four.
        let flips = |of_ten: i64| move |ms: i64| (1.0, if (ms / 100) % 10 < of_ten { HEAT } else { 0 }, 1_800.0);
        let found = run(&mut hand, &mut detector, 20_000, flips(6));
        assert!(found.len() > 100 && found.iter().all(|(_, sign)| sign.begin_ns == found[0].1.begin_ns));
        assert_eq!(found[0].1.severity, Severity::Warning);
        assert!(found[0].1.text.what.contains("too hot"), "{}", found[0].1.text.what);
        let found = run(&mut hand, &mut detector, 60_000, flips(4));
        assert!(found.iter().all(|(ms, _)| *ms < 25_000), "less than half of the time");
    }

    #[test]
    fn an_idle_gpu_and_one_whose_reasons_are_not_known_are_not_reported() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), GpuThrottled::default());
        assert!(run(&mut hand, &mut detector, 20_000, |_| (0.0, BRAKE, 345.0)).is_empty());
        for ms in (20_100..40_000).step_by(100) {
            hand.now_ns = ms * MILLISECOND_NS;
            hand.runs(0, Some(1.0));
            assert!(hand.look(&mut detector).0.is_empty());
        }
        let step = Hand::step(0, 3, 39 * SECOND_NS, &[("forward", 100)]);
        assert!(hand.steps_end(&mut detector, vec![step]).is_empty());
        assert_eq!(detector.looked, Looked { steps: 1, abstained: 1 });
    }

    #[test]
    fn what_it_costs_is_the_step_beside_the_steps_before() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), GpuThrottled::default());
        hand.settings.warm_up_steps = 0;
        run(&mut hand, &mut detector, 10_000, |_| (1.0, 0, 1_980.0));
        for nth in 0..8 {
            let step = Hand::step(0, nth, (2 + nth.cast_signed()) * 500 * MILLISECOND_NS, &[("forward", 400)]);
            hand.steps_end(&mut detector, vec![step]);
        }
        run(&mut hand, &mut detector, 14_000, |_| (1.0, BRAKE, 990.0));
        // A step that was half over when it began is neither.
        let between = Hand::step(0, 8, 9_900 * MILLISECOND_NS, &[("forward", 600)]);
        let [sign] = hand.steps_end(&mut detector, vec![between]).try_into().expect("one");
        assert!(!sign.text.why.contains("Steps of"), "{}", sign.text.why);
        let slow = Hand::step(0, 9, 12_000 * MILLISECOND_NS, &[("forward", 800)]);
        let [sign] = hand.steps_end(&mut detector, vec![slow]).try_into().expect("one");
        assert!(
            sign.text.why.ends_with("Steps of rank 0 of j take 800 ms; before, they took 400 ms."),
            "{}",
            sign.text.why
        );
        let number = |name| sign.evidence.iter().find(|one| one.name == name).map(|one| one.value);
        assert_eq!((number("step_slowdown_ratio"), number("clock_ratio")), (Some(2.0), Some(0.5)));
        assert_eq!(sign.severity, Severity::Critical, "half of the clock");
        assert_eq!(sign.lost_ns, Some(400 * MILLISECOND_NS), "in the step that ended");
        assert_eq!(hand.look(&mut detector).0[0].lost_ns, Some(0), "no other step has");
    }
}
