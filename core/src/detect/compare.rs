//! Brings the ranks of each step together, and has them compared: `straggler` (with and without marks of communication),
//! `stage_imbalance` and `uneven_work` look at the same groups ([`peers`](super::peers)).
//!
//! Enters: steps as they end. Leaves: their signs, and whether each rank could be compared with another.

use super::detector::{Detector, Looked, Ratios, Trouble};
use super::finding::{FindingKind, Sign};
use super::late::Late;
use super::peers::Group;
use super::stage_imbalance::StageImbalance;
use super::steps::Step;
use super::straggler::Straggler;
use super::uneven_work::UnevenWork;
use super::view::View;
use crate::clock::SECOND_NS;
use crate::jobs::JobId;
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Steps of a job that wait for their other ranks, at most.
const MOST_WAITING: usize = 8;
/// How long a step waits for the others.
const PATIENCE_NS: i64 = 10 * SECOND_NS;

/// Puts the ranks of one step beside each other.
#[derive(Debug, Default)]
pub(super) struct Compare {
    waiting: BTreeMap<JobId, VecDeque<Waiting>>,
    /// Whether each rank could be compared with another one in its last step.
    compared: BTreeMap<RankKey, bool>,
    straggler: Straggler,
    late: Late,
    stages: StageImbalance,
    lengths: UnevenWork,
}

/// The ranks of one step that have ended it.
#[derive(Debug)]
struct Waiting {
    number: u64,
    since_ns: i64,
    steps: Vec<Step>,
}

impl Detector for Compare {
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        let runs = |job: &JobId| view.ranks.iter().any(|rank| rank.key.0 == *job);
        self.compared.retain(|key, _| view.knows(key));
        self.waiting.retain(|job, _| runs(job));
        self.straggler.retain(|key| view.knows(key));
        self.late.retain(runs, |key| view.knows(key));
        self.late.read(view);
        self.stages.retain(runs);
        self.lengths.retain(runs);
        for step in view.steps {
            self.add(view, step);
        }
        for steps in self.complete(view) {
            let group = Group::of(view, &steps, |gpu| self.late.reads(gpu));
            self.note(&group);
            let is_lasting = self.straggler.judge(view, &group, troubles, signs);
            self.late.judge(view, &group, signs);
            let before = signs.len();
            self.stages.judge(view, &group, signs);
            // A rank that was short of memory worked longer for that.
            let was_short = |trouble: &Trouble| group.members.iter().any(|member| trouble.is_of_job(member.step));
            let is_explained = is_lasting || troubles.iter().any(was_short);
            self.lengths.judge(view, &group, is_explained, signs);
            // What the step lost by uneven work counts once, whether one of them is found or both.
            if let Some(first) = signs.get_mut(before) {
                first.lost_ns = group.whole.and_then(|whole| whole.lost_ns(group.members.len()));
            }
        }
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        self.straggler.ratios(out);
        self.late.ratios(out);
        for (key, is_compared) in &self.compared {
            out.entry(key.clone()).or_default().compared = Some(*is_compared);
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::Straggler, self.straggler.looked);
        out.insert(FindingKind::StageImbalance, self.stages.looked);
        out.insert(FindingKind::UnevenWork, self.lengths.looked);
    }
}

impl Compare {
    fn add(&mut self, view: &View<'_>, step: &Step) {
        let Some(number) = step.number else { return };
        let waiting = self.waiting.entry(step.key.0.clone()).or_default();
        let overlaps = |one: &Waiting| {
            one.steps.iter().all(|other| other.begin_ns <= step.end_ns && step.begin_ns <= other.end_ns)
        };
        let known = waiting.iter_mut().find(|one| one.number == number && overlaps(one));
        match known {
            Some(one) => one.steps.push(step.clone()),
            None => waiting.push_back(Waiting { number, since_ns: view.now_ns, steps: vec![step.clone()] }),
        }
    }

    /// The steps that all ranks have ended, or that have waited for long enough.
    fn complete(&mut self, view: &View<'_>) -> Vec<Vec<Step>> {
        let mut complete = Vec::new();
        for (job, waiting) in &mut self.waiting {
            let ranks = view.ranks.iter().filter(|rank| rank.key.0 == *job).count();
            while let Some(first) = waiting.front() {
                let is_old = view.now_ns - first.since_ns > PATIENCE_NS || waiting.len() > MOST_WAITING;
                if first.steps.len() < ranks && !is_old {
                    break;
                }
                complete.extend(waiting.pop_front().map(|one| one.steps));
            }
        }
        complete
    }

    /// Notes who was compared.
    fn note(&mut self, group: &Group<'_>) {
        for (position, step) in group.compared().enumerate() {
            let is_compared = group.alike.iter().any(|one| one.members.len() > 1 && one.members.contains(&position));
            self.compared.insert(step.key.clone(), is_compared);
        }
    }
}
