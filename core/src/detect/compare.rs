//! Groups the ranks of each step, and passes each [`Group`] to the detectors that compare ranks: `late` and
//! `straggler` (findings of kind `straggler`), `stage_imbalance` and `uneven_work`.
//!
//! Enters: steps as they end. Leaves: their signs, and whether each rank could be compared with another.

use super::detector::{Detector, Looked, Ratios, Trouble};
use super::finding::{FindingKind, Sign};
use super::late::Late;
use super::peers::Group;
use super::stage_imbalance::StageImbalance;
use super::steps::{MOST_ALL_PHASES, Phase, Step};
use super::straggler::Straggler;
use super::uneven_work::UnevenWork;
use super::view::View;
use crate::clock::SECOND_NS;
use crate::jobs::JobId;
use crate::phases::RankKey;
use crate::shares::heaviest;
use std::collections::{BTreeMap, VecDeque};

/// Steps of a job that wait for their other ranks, at most.
const MOST_WAITING: usize = 8;
/// How long a step waits for the others.
const PATIENCE_NS: i64 = 10 * SECOND_NS;

/// How many phases take as much memory as a step without any.
const STEP: usize = size_of::<Step>().div_ceil(size_of::<Phase>());

/// Puts the ranks of one step beside each other. Steps that wait have at most [`MOST_ALL_PHASES`] phases.
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
            let is_late_judged = self.late.judge(view, &group, signs);
            self.note(&group, is_late_judged);
            let is_lasting = self.straggler.judge(view, &group, troubles, is_late_judged, signs);
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

impl Waiting {
    /// How many phases its steps have; a step, and the names before it, count as some.
    fn phases(&self) -> usize {
        self.steps.iter().map(|step| STEP + step.phases.len() + step.before.len() / 4).sum()
    }
}

impl Compare {
    fn add(&mut self, view: &View<'_>, step: &Step) {
        let Some(number) = step.number else { return };
        let waiting = self.waiting.entry(step.key.0.clone()).or_default();
        // A rank is in each of them once.
        let fits =
            |other: &Step| other.key != step.key && other.begin_ns <= step.end_ns && step.begin_ns <= other.end_ns;
        let overlaps = |one: &Waiting| one.steps.iter().all(fits);
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
        complete.extend(std::iter::from_fn(|| self.give_way()));
        complete
    }

    /// While steps that wait have too many phases: the first step of the job that has most, of the owner that has most.
    fn give_way(&mut self) -> Option<Vec<Step>> {
        let each =
            || self.waiting.iter().map(|(job, waiting)| (job, waiting.iter().map(Waiting::phases).sum::<usize>()));
        if each().map(|(_, phases)| phases).sum::<usize>() <= MOST_ALL_PHASES {
            return None;
        }
        let (owner, _) = heaviest(each().map(|(job, phases)| (job.scope(), phases)))?;
        let own = each().filter(|(job, _)| job.scope() == owner);
        let job = own.max_by_key(|(_, phases)| *phases)?.0.clone();
        Some(self.waiting.get_mut(&job)?.pop_front()?.steps)
    }

    /// Notes who was compared; all were if `is_judged`.
    fn note(&mut self, group: &Group<'_>, is_judged: bool) {
        for (position, step) in group.compared().enumerate() {
            let is_compared = group.alike.iter().any(|one| one.members.len() > 1 && one.members.contains(&position));
            self.compared.insert(step.key.clone(), is_compared || is_judged);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::scope::Scope;

    #[test]
    fn steps_that_wait_give_way_by_owner_where_they_have_too_many_phases() {
        let (mut hand, mut compare) = (Hand::new(0), Compare::default());
        let phases: Vec<(&str, i64)> = (0..500).map(|_| ("forward", 0)).collect();
        let of = |user: &str, rank: usize, nth: u64| {
            let mut step = Hand::step(rank, nth, 0, &phases);
            step.key.0 = JobId::new(Scope::User(user.into()), "j");
            step
        };
        // Of each job, one rank never ends its step.
        let all = [("1000", 3), ("1001", 120)].map(|(user, ranks)| (0..ranks).map(move |rank| of(user, rank, 1)));
        for step in all.into_iter().flatten() {
            hand.ranks.push(super::super::view::RankNow { key: step.key.clone(), ..Hand::rank_on(0) });
        }
        let ends: Vec<Step> = hand
            .ranks
            .iter()
            .filter(|rank| rank.key.1 > 0)
            .map(|rank| rank.key.clone())
            .map(|key| Step { key: key.clone(), ..of("", 0, 1) })
            .collect();
        hand.steps_end(&mut compare, ends);
        let waiting: Vec<_> = compare
            .waiting
            .iter()
            .map(|(job, waiting)| (job.scope().user().expect("one").to_owned(), waiting.len()))
            .collect();
        assert_eq!(waiting, [("1000".to_owned(), 1), ("1001".to_owned(), 0)]);
        assert_eq!(compare.waiting.values().flatten().map(Waiting::phases).sum::<usize>(), 2 * (STEP + 500));
    }

    #[test]
    fn a_rank_that_ends_the_same_step_again_and_again_waits_once_in_each() {
        let (mut hand, mut compare) = (Hand::with_ranks(2), Compare::default());
        let again = (0..1_000).map(|_| Hand::step(0, 7, 0, &[("forward", 10)])).collect();
        hand.steps_end(&mut compare, again);
        let waiting: Vec<usize> = compare.waiting.values().flatten().map(|one| one.steps.len()).collect();
        assert_eq!(waiting, [1; MOST_WAITING]);
    }
}
