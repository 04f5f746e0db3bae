//! Which modules to checkpoint, each by itself, and the peak of the step that this leaves.
//!
//! Enters: one step's records in order, with the most in live tensors between each and the one before, and of each module's
//! forward pass what the backward pass keeps of it. Leaves: by number of checkpointed modules, which they are, the predicted
//! peak of the whole step, the loss and the optimizer included, and where it lies. Invariants: modules that are advised never
//! contain each other; a step of which a record lacks its peak has no advice; work and memory are bounded.

use super::history::{KeptModule, Moment, StepHistory};
use serde::Serialize;
use std::cmp::Reverse;

/// A larger saving is worth further modules: those are advised that come within this share of the lowest peak.
const NEAR: f64 = 0.02;
/// How many sizes of modules are tried.
const MOST_SIZES: usize = 24;
/// Moments and passes that are looked at in all, a bound on the time: half a second, as the API computes this too.
const MOST_LOOKS: usize = 100_000_000;

/// Which modules to run through `torch.utils.checkpoint`. Bytes and seconds; `null` if not known.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "testing", derive(utoipa::ToSchema))]
pub struct ModuleAdvice {
    /// The modules, in the order in which they run. None contains another.
    pub modules: Vec<CheckpointedModule>,
    /// The peak of the step as it was, in live tensors.
    pub observed_peak_bytes: u64,
    /// What it should become.
    pub predicted_peak_bytes: u64,
    /// Where the peak then lies.
    pub peak_at: String,
    /// The duration of the forward passes that run a second time.
    pub recomputed_seconds: Option<f64>,
    /// The same for each number of modules, from none.
    pub by_count: Vec<ByCount>,
}

/// A module to checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "testing", derive(utoipa::ToSchema))]
pub struct CheckpointedModule {
    /// Its name in the model.
    pub name: String,
    /// What it no longer keeps between its forward and its backward pass, bytes.
    pub held_bytes: i64,
}

/// What a number of checkpointed modules leads to.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "testing", derive(utoipa::ToSchema))]
pub struct ByCount {
    /// How many modules.
    pub modules: usize,
    /// The peak that is expected.
    pub predicted_peak_bytes: u64,
    /// The duration of the forward passes that run a second time.
    pub recomputed_seconds: Option<f64>,
}

/// One choice of modules: the first of an order.
#[derive(Debug, Clone, Copy)]
struct Choice {
    /// The position of the order among all orders, and how many modules of it are taken.
    order: usize,
    count: usize,
    peak: i128,
    at: Highest,
    /// How long what runs again takes, nanoseconds.
    again_ns: Option<u64>,
}

/// Where a peak is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Highest {
    /// Before the moment at this position.
    Before(usize),
    /// While a module runs again, whose backward pass begins at this position.
    Again(usize),
}

/// The modules to checkpoint: `most` of them or fewer, or as many as bring the peak near the lowest that can be reached. Modules
/// that begin among the first `skipped` layers stay as they are. `None` if the step's peaks are not known, or no module that
/// keeps something is.
#[must_use]
pub fn modules(of: &StepHistory, most: Option<usize>, skipped: usize) -> Option<ModuleAdvice> {
    let moments = of.moments()?;
    let candidates: Vec<KeptModule> =
        of.kept_modules().into_iter().filter(|window| window.layers_before >= skipped).collect();
    let mut looks = MOST_LOOKS;
    let (mut orders, mut all) = (Vec::new(), vec![Choice::none(moments)?]);
    for size in sizes(&candidates) {
        let (order, choices) = choices(moments, &candidates, size, orders.len(), &mut looks);
        orders.push(order);
        all.extend(choices);
    }
    let best = best(all);
    let lowest = best.last()?.peak;
    let near = best.iter().position(|choice| is_near(choice.peak, lowest)).unwrap_or(0);
    let asked = most.map(|most| best.partition_point(|choice| choice.count <= most).saturating_sub(1));
    let taken = best[asked.unwrap_or(near)];
    let chosen = orders.get(taken.order).map_or(&[][..], |order| &order[..taken.count]);
    Some(ModuleAdvice {
        modules: listed(of, &candidates, chosen),
        observed_peak_bytes: bytes(best[0].peak),
        predicted_peak_bytes: bytes(taken.peak),
        peak_at: of.place(matches!(taken.at, Highest::Again(_)), taken.at.position()),
        recomputed_seconds: taken.seconds(),
        by_count: best.iter().map(ByCount::of).collect(),
    })
}

/// The choices of ever more modules, from none, each of which has a lower peak than every one of fewer.
fn best(mut all: Vec<Choice>) -> Vec<Choice> {
    all.sort_by_key(|choice| (choice.count, choice.peak, choice.again_ns.unwrap_or(u64::MAX)));
    let mut lowest = i128::MAX;
    all.retain(|choice| {
        let is_lower = choice.peak < lowest;
        lowest = lowest.min(choice.peak);
        is_lower
    });
    all
}

#[allow(clippy::cast_precision_loss, reason = "a comparison of some per cent")]
fn is_near(peak: i128, lowest: i128) -> bool {
    peak as f64 <= lowest as f64 * (1.0 + NEAR)
}

fn bytes(signed: i128) -> u64 {
    u64::try_from(signed).unwrap_or(0)
}

fn listed(of: &StepHistory, candidates: &[KeptModule], chosen: &[usize]) -> Vec<CheckpointedModule> {
    let mut listed: Vec<&KeptModule> = chosen.iter().map(|nth| &candidates[*nth]).collect();
    listed.sort_by_key(|window| window.begins);
    let module =
        |window: &KeptModule| CheckpointedModule { name: of.name(window.name).to_owned(), held_bytes: window.held() };
    listed.into_iter().map(module).collect()
}

impl ByCount {
    fn of(choice: &Choice) -> Self {
        Self { modules: choice.count, predicted_peak_bytes: bytes(choice.peak), recomputed_seconds: choice.seconds() }
    }
}

impl Highest {
    fn position(self) -> usize {
        match self {
            Self::Before(nth) | Self::Again(nth) => nth,
        }
    }
}

impl Choice {
    fn none(moments: &[Moment]) -> Option<Self> {
        let (nth, highest) = moments.iter().enumerate().max_by_key(|(nth, moment)| (moment.peak, Reverse(*nth)))?;
        let at = Highest::Before(nth);
        Some(Self { order: 0, count: 0, peak: i128::from(highest.peak), at, again_ns: Some(0) })
    }

    #[allow(clippy::cast_precision_loss, reason = "seconds to a microsecond")]
    fn seconds(&self) -> Option<f64> {
        self.again_ns.map(|again_ns| again_ns as f64 * 1e-9)
    }
}

/// The sizes of modules that are tried, the largest first.
fn sizes(candidates: &[KeptModule]) -> Vec<i64> {
    let mut all: Vec<i64> = candidates.iter().map(KeptModule::held).collect();
    all.sort_unstable_by_key(|held| Reverse(*held));
    all.dedup();
    let step = all.len().div_ceil(MOST_SIZES).max(1);
    all.into_iter().step_by(step).collect()
}

/// Adds modules one by one: each keeps at most `size`, or contains none that keeps less. The next one is the module that keeps the
/// most at the time of the peak. Returns the modules in this order, and the choice of the first 0, 1, 2 … of them.
fn choices(
    moments: &[Moment],
    candidates: &[KeptModule],
    size: i64,
    order: usize,
    looks: &mut usize,
) -> (Vec<usize>, Vec<Choice>) {
    // The one that keeps the most is the last.
    let mut free = units(candidates, size);
    free.sort_by_key(|nth| (candidates[*nth].held(), Reverse(candidates[*nth].duration_ns), Reverse(*nth)));
    let mut less = vec![0_i128; moments.len() + 1];
    let (mut chosen, mut found, mut again_ns) = (Vec::new(), Vec::new(), Some(0_u64));
    loop {
        let passes: usize = chosen.iter().chain(&free).map(|nth: &usize| candidates[*nth].passes.len()).sum();
        let Some(left) = looks.checked_sub(moments.len() + passes) else { break };
        *looks = left;
        let Some((peak, at)) = measured(moments, candidates, &chosen, &less) else { break };
        found.push(Choice { order, count: chosen.len(), peak, at, again_ns });
        let Some(place) = free.iter().rposition(|nth| candidates[*nth].is_kept_at(at.position())) else { break };
        let next = free.remove(place);
        for pass in &candidates[next].passes {
            less[pass.after] += i128::from(pass.held);
            less[pass.until] -= i128::from(pass.held);
        }
        again_ns = again_ns.zip(candidates[next].duration_ns).map(|(sum, more)| sum.saturating_add(more));
        chosen.push(next);
    }
    (chosen, found)
}

/// Candidates that do not contain each other and together stand for all.
fn units(candidates: &[KeptModule], size: i64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    // Outer ones first.
    order.sort_by_key(|nth| (candidates[*nth].begins, Reverse(candidates[*nth].ends)));
    let mut units: Vec<usize> = Vec::new();
    for (place, nth) in order.iter().copied().enumerate() {
        let own = &candidates[nth];
        let is_inside = |unit: &usize| candidates[*unit].contains(own);
        if units.last().is_some_and(is_inside) {
            continue;
        }
        let has_inner = order.get(place + 1).is_some_and(|next| own.contains(&candidates[*next]));
        if own.held() <= size || !has_inner {
            units.push(nth);
        }
    }
    units
}

/// The peak with these modules checkpointed. `less` has, at each moment, what changes in what they no longer keep.
fn measured(moments: &[Moment], candidates: &[KeptModule], chosen: &[usize], less: &[i128]) -> Option<(i128, Highest)> {
    let (mut dropped, mut all) = (0, Vec::with_capacity(moments.len()));
    let mut highest: Option<(i128, Highest)> = None;
    let mut look = |live: i128, at: Highest| {
        if highest.is_none_or(|(known, _)| live > known) {
            highest = Some((live, at));
        }
    };
    for (nth, moment) in moments.iter().enumerate() {
        dropped += less[nth];
        all.push(dropped);
        look(i128::from(moment.peak) - dropped, Highest::Before(nth));
    }
    for pass in chosen.iter().flat_map(|nth| &candidates[*nth].passes) {
        let begins = pass.again;
        let live = i128::from(moments[begins].allocated) - all[begins] + i128::from(pass.recompute);
        look(live, Highest::Again(begins));
    }
    highest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advise::{ProfileChoice, StepLayers, read};
    use highwater_core::wire::{Direction, Layer};
    use proptest::prelude::*;
    use std::path::Path;

    fn recorded(name: &str) -> StepLayers {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/advise").join(name);
        read(&path, &ProfileChoice::default()).expect("layers").0
    }

    #[allow(clippy::cast_precision_loss, reason = "gibibytes")]
    fn gib(bytes: u64) -> f64 {
        bytes as f64 / f64::from(1 << 30)
    }

    /// A GPT of 12 blocks with its loss outside the model, and resnet50, as an H200 ran them: the advice was applied by
    /// `highwater.torch.checkpoint`, and these are the peaks that came (benches/gpu/advise.py).
    #[test]
    fn what_came_on_an_h200_was_predicted() {
        let gpt = [(0, 9.302), (3, 8.698), (6, 8.094), (12, 6.881)];
        let resnet = [(0, 2.862), (3, 1.540), (14, 1.088)];
        for (file, known) in [("gpt_layers.json.gz", &gpt[..]), ("resnet50_layers.json.gz", &resnet)] {
            let layers = recorded(file);
            for (count, real) in known.iter().copied() {
                let advice = modules(&layers.history, Some(count), 0).expect("peaks are known");
                let apart = gib(advice.predicted_peak_bytes) / real - 1.0;
                assert_eq!(advice.modules.len(), count);
                assert!(apart.abs() < 0.015, "{file}: {count} modules: {apart}");
            }
        }
        let layers = recorded("gpt_layers.json.gz");
        let advice = modules(&layers.history, None, 0).expect("peaks are known");
        let names: Vec<&str> = advice.modules.iter().map(|module| module.name.as_str()).collect();
        let blocks: Vec<String> = (0..12).map(|nth| format!("blocks.{nth}")).collect();
        assert_eq!(names, blocks);
        assert_eq!(advice.peak_at, "the loss, between the forward and the backward pass");
        let skipped = modules(&layers.history, None, 70).expect("peaks are known");
        assert!(skipped.modules.iter().all(|module| !module.name.starts_with("blocks.0")), "{:?}", skipped.modules);
    }

    /// A record of a module, `[peak, allocated]`, and what its forward pass keeps and needs again.
    type Made<'a> = (&'a str, Direction, Option<u64>, [u64; 2], Option<(i64, i64)>);

    fn history(records: &[Made]) -> StepHistory {
        let mut history = StepHistory::default();
        for (name, direction, modules, [peak, allocated], kept) in records {
            let (held, recompute) = kept.unzip();
            let layer = Layer {
                modules: *modules,
                peak: Some(*peak),
                held,
                recompute,
                duration_ns: Some(7),
                ..Layer::new(*direction)
            };
            history.add(name, Some(*allocated), &layer);
        }
        history
    }

    use Direction::{Backward, Forward};

    /// Two blocks that keep 40 and 30, of one layer each, the second of which needs 90 while it runs again; a loss of 20.
    fn two_blocks() -> Vec<Made<'static>> {
        vec![
            ("a.l", Forward, None, [160, 145], Some((5, 50))),
            ("a", Forward, Some(1), [160, 145], Some((40, 60))),
            ("b.l", Forward, None, [235, 180], Some((5, 80))),
            ("b", Forward, Some(1), [235, 180], Some((30, 90))),
            ("root", Forward, Some(4), [235, 180], Some((70, 150))),
            ("root", Backward, Some(4), [200, 185], None),
            ("b", Backward, Some(1), [185, 185], None),
            ("b.l", Backward, None, [190, 150], None),
            ("a", Backward, Some(1), [155, 150], None),
            ("a.l", Backward, None, [160, 100], None),
            ("root", Backward, Some(4), [130, 100], None),
        ]
    }

    #[test]
    fn peaks_are_of_what_is_kept_and_of_what_runs_again() {
        let made = history(&two_blocks());
        let none = modules(&made, Some(0), 0).expect("known");
        assert_eq!((none.observed_peak_bytes, none.predicted_peak_bytes, none.modules.len()), (235, 235, 0));
        assert_eq!(none.peak_at, "the forward pass, up to b.l");
        // Without what `a` keeps, the forward pass of b.l reaches 195. The second block would need 185 - 40 - 30 + 90 = 205
        // when it runs again: it is no gain.
        let advice = modules(&made, None, 0).expect("known");
        assert_eq!(advice.modules, [CheckpointedModule { name: "a".to_owned(), held_bytes: 40 }]);
        assert_eq!(advice.predicted_peak_bytes, 195);
        assert!(advice.recomputed_seconds.is_some_and(|seconds| (seconds - 7e-9).abs() < 1e-12));
        let counts: Vec<_> = advice.by_count.iter().map(|one| (one.modules, one.predicted_peak_bytes)).collect();
        assert_eq!(counts, [(0, 235), (1, 195)]);
    }

    /// The second module alone would need more when it runs again than the step did; both together less.
    #[test]
    fn fewer_modules_are_advised_where_one_more_would_raise_the_peak() {
        let made = history(&[
            ("a.l", Forward, None, [60, 60], None),
            ("a", Forward, Some(1), [60, 60], Some((30, 10))),
            ("b.l", Forward, None, [90, 90], None),
            ("b", Forward, Some(1), [90, 90], Some((40, 50))),
            ("root", Forward, Some(4), [90, 90], None),
            ("root", Backward, Some(4), [100, 100], None),
            ("b", Backward, Some(1), [100, 100], None),
            ("b.l", Backward, None, [90, 60], None),
            ("a", Backward, Some(1), [60, 60], None),
            ("a.l", Backward, None, [60, 10], None),
            ("root", Backward, Some(4), [10, 10], None),
        ]);
        let counts: Vec<_> = modules(&made, None, 0)
            .expect("known")
            .by_count
            .iter()
            .map(|one| (one.modules, one.predicted_peak_bytes))
            .collect();
        assert_eq!(counts, [(0, 100), (2, 80)]);
        let one = modules(&made, Some(1), 0).expect("known");
        assert_eq!((one.modules.len(), one.predicted_peak_bytes), (0, 100));
        assert_eq!(modules(&made, Some(2), 0).expect("known").modules.len(), 2);
    }

    /// What a job may send at most: each module of two records, and all as large.
    #[test]
    fn thousands_of_equal_modules_take_no_longer_than_the_bound() {
        let names: Vec<String> = (0..4_000).map(|nth| format!("m{nth}")).collect();
        let mut records: Vec<Made> =
            names.iter().map(|name| (name.as_str(), Forward, None, [9, 9], Some((1, 1)))).collect();
        records.push(("root", Backward, Some(4_000), [9_000, 9], None));
        records.extend(names.iter().rev().map(|name| (name.as_str(), Backward, None, [9, 9], None)));
        let made = history(&records);
        let mut looks = MOST_LOOKS;
        let candidates = made.kept_modules();
        let (order, found) = choices(made.moments().expect("known"), &candidates, 1, 0, &mut looks);
        assert!(found.len() > 1 && order.len() + 1 >= found.len());
        assert!(MOST_LOOKS - looks >= found.len() * 2 * names.len(), "each is counted");
    }

    #[test]
    fn what_is_not_known_is_no_advice() {
        let mut lacking = history(&two_blocks()[..4]);
        assert!(modules(&lacking, None, 0).expect("peaks are known").modules.is_empty(), "no backward pass was seen");
        lacking.add("c", Some(5), &Layer::new(Forward));
        assert_eq!(modules(&lacking, None, 0), None, "a record has no peak");
        assert_eq!(modules(&StepHistory::default(), None, 0), None);
    }

    /// With accumulated gradients a module runs twice, and with weights that are shared before its first backward pass.
    #[test]
    fn a_module_that_runs_twice_keeps_both() {
        for order in [[Forward, Backward, Forward, Backward], [Forward, Forward, Backward, Backward]] {
            let mut records: Vec<Made> = Vec::new();
            for direction in order {
                let (modules, kept) = (Some(1), (direction == Forward).then_some((40, 10)));
                if direction == Forward {
                    records.push(("a.l", Forward, None, [100, 100], None));
                }
                records.push(("a", direction, modules, [200, 150], kept));
            }
            records.push(("root", Backward, Some(3), [60, 60], None));
            let made = history(&records);
            assert_eq!(
                made.kept_modules().iter().map(|window| window.passes.len()).collect::<Vec<_>>(),
                [2],
                "{order:?}"
            );
            assert_eq!(made.kept_modules()[0].duration_ns, Some(14));
        }
    }

    /// A name, whether it is forward, modules, peak, allocated, what is kept, and the duration.
    type AnyRecord = (u8, bool, Option<u64>, Option<u64>, u64, Option<(i64, i64)>, Option<u64>);

    fn any_record() -> impl Strategy<Value = AnyRecord> {
        let sizes = prop::option::of((any::<i64>(), any::<i64>()));
        (
            0_u8..6,
            any::<bool>(),
            prop::option::of(0_u64..9),
            prop::option::weighted(0.95, any::<u64>()),
            any::<u64>(),
            sizes,
            any::<Option<u64>>(),
        )
    }

    proptest! {
        /// Whatever a job sends: no panic, modules that do not contain each other, and no peak above that of fewer modules.
        #[test]
        fn anything_may_be_sent(records in prop::collection::vec(any_record(), 0..40), skipped in 0_usize..4) {
            let mut history = StepHistory::default();
            for (name, is_forward, modules, peak, allocated, kept, duration_ns) in &records {
                let (held, recompute) = kept.unzip();
                let direction = if *is_forward { Forward } else { Backward };
                let layer = Layer { modules: *modules, peak: *peak, held, recompute, duration_ns: *duration_ns, ..Layer::new(direction) };
                history.add(&format!("m{name}"), Some(*allocated), &layer);
            }
            if let Some(advice) = modules(&history, None, skipped) {
                prop_assert!(advice.by_count.windows(2).all(|two| two[0].predicted_peak_bytes >= two[1].predicted_peak_bytes
                    && two[0].modules < two[1].modules));
                prop_assert!(advice.predicted_peak_bytes <= advice.observed_peak_bytes);
                prop_assert!(advice.by_count.iter().any(|one| one.modules == advice.modules.len()));
            }
        }
    }
}
