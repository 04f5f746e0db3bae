//! `input_stall`: a rank waits for its data, and its GPU for it.
//!
//! The time that a step spends in `data`, as far as the GPU was idle in the step, over the time of the last steps. Where
//! the GPU's idleness is not known, the time in `data` alone makes it suspected.

use super::finding::{Certainty, Evidence, Kind, Severity, Sign, Subject, Text, seconds};
use super::steps::Step;
use super::view::{View, ratio};
use super::{Detector, Ratios, Trouble};
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Steps that the share is told over.
const STEPS: usize = 10;
/// A stall of these last steps alone is enough if it takes twice the share asked for.
const SUDDEN_STEPS: usize = 2;
/// A share of this and more is a stall whatever is asked for.
const MOST_SHARE: f64 = 0.9;

/// Follows each rank's last steps.
#[derive(Debug, Default)]
pub(super) struct InputStall {
    ranks: BTreeMap<RankKey, VecDeque<Waited>>,
}

#[derive(Debug, Clone, Copy)]
struct Waited {
    step_ns: i64,
    stalled_ns: i64,
    is_idle_known: bool,
}

impl Detector for InputStall {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.ranks.retain(|key, _| view.knows(key));
        for step in view.steps {
            let Some(data_ns) = step.time_in(&view.settings.data_phases) else { continue };
            let steps = self.ranks.entry(step.key.clone()).or_default();
            if step.nth < view.settings.warm_up_steps {
                steps.clear();
                continue;
            }
            let stalled_ns = step.idle_ns.map_or(data_ns, |idle_ns| data_ns.min(idle_ns));
            steps.push_back(Waited { step_ns: step.length_ns(), stalled_ns, is_idle_known: step.idle_ns.is_some() });
            while steps.len() > STEPS {
                steps.pop_front();
            }
            signs.extend(judge(view, step, steps));
        }
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, steps) in &self.ranks {
            out.entry(key.clone()).or_default().data_stall = share(steps.iter());
        }
    }
}

fn share<'a>(steps: impl Iterator<Item = &'a Waited> + Clone) -> Option<f64> {
    ratio(steps.clone().map(|step| step.stalled_ns).sum(), steps.map(|step| step.step_ns).sum())
}

fn judge(view: &View<'_>, step: &Step, steps: &VecDeque<Waited>) -> Option<Sign> {
    let least = view.settings.stall_share;
    let sudden = share(steps.iter().rev().take(SUDDEN_STEPS)).filter(|_| steps.len() >= SUDDEN_STEPS);
    let lasting = share(steps.iter()).filter(|_| steps.len() >= STEPS);
    let sudden = sudden.filter(|share| *share >= (2.0 * least).min(MOST_SHARE));
    let found = sudden.or(lasting.filter(|share| *share >= least))?;
    let is_idle_known = steps.iter().all(|step| step.is_idle_known);
    let stalled_ns: i64 = steps.iter().map(|step| step.stalled_ns).sum();
    let (job, rank) = (&step.key.0, step.key.1);
    let idle = if is_idle_known { "with its GPU idle" } else { "(whether its GPU was idle is not known)" };
    Some(Sign {
        kind: Kind::InputStall,
        subject: Subject { gpu: step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
        severity: Severity::Warning,
        certainty: if is_idle_known { Certainty::Observed } else { Certainty::Suspected },
        begin_ns: step.begin_ns,
        until_ns: view.now_ns + view.settings.hold_ns,
        step: step.number,
        code: None,
        evidence: vec![
            Evidence { name: "stalled_ratio", value: found },
            Evidence { name: "stalled_seconds", value: seconds(stalled_ns) },
        ],
        text: Text {
            what: format!("Rank {rank} of {job} spends {:.0} % of its time waiting for data.", 100.0 * found),
            why: format!(
                "In its last {} steps it was {:.2} s in its data phase {idle}.",
                steps.len(),
                seconds(stalled_ns)
            ),
            advice:
                "Raise the data loader's num_workers and prefetch_factor, pin memory, move decoding and augmentation \
                     off the critical path, and look at the storage's throughput."
                    .to_owned(),
        },
    })
}
