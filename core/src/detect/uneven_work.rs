//! `uneven_work`: ranks that do the same work on other data take turns at working longest, and the others wait.
//!
//! In each step, the rank that works longest is compared with the mean of the ranks that are like it. The finding is reported
//! if over the last ten steps the longest ranks exceeded the mean by the configured lag, and no rank was the longest in most of
//! these steps. Then the inputs differ, as sequences of different lengths do, and no rank is slow.

use super::detector::Looked;
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Sign, Subject, Text, seconds};
use super::peers::{Alike, Group};
use super::stage_imbalance::severity;
use super::view::{View, ratio};
use crate::jobs::JobId;
use std::collections::{BTreeMap, VecDeque};

/// Steps that are looked at.
const STEPS: usize = 10;
/// No rank may be the longest in more of them.
const MOST_OF_ONE: usize = 6;

/// The longest rank of each job's last steps.
#[derive(Debug, Default)]
pub(super) struct UnevenWork {
    jobs: BTreeMap<JobId, VecDeque<Longest>>,
    /// Steps of ranks: those in which ranks that are alike were compared over the last steps.
    pub looked: Looked,
}

/// The longest rank of a step, among those that are alike and differ most.
#[derive(Debug)]
struct Longest {
    /// When its step began.
    begin_ns: i64,
    rank: u32,
    work_ns: i64,
    mean_ns: i64,
}

impl UnevenWork {
    /// Forgets jobs.
    pub fn retain(&mut self, runs: impl Fn(&JobId) -> bool) {
        self.jobs.retain(|job, _| runs(job));
    }

    /// `is_explained` says that a rank lags lastingly, or was short of memory: then that is the reason.
    pub fn judge(&mut self, view: &View<'_>, group: &Group<'_>, is_explained: bool, signs: &mut Vec<Sign>) {
        let Some(step) = group.step() else { return };
        let recent = self.jobs.entry(step.key.0.clone()).or_default();
        let longest = group.alike.iter().filter_map(|alike| longest(group, alike)).max_by_key(Longest::excess_ns);
        let is_compared = longest.is_some();
        if is_explained || !group.is_warm(view) {
            recent.clear();
        } else {
            recent.extend(longest);
        }
        while recent.len() > STEPS {
            recent.pop_front();
        }
        let is_judged = is_compared && recent.len() == STEPS;
        group.compared().for_each(|_| self.looked.note(is_judged));
        if is_judged && !is_one_ranks(recent) {
            signs.extend(sign(view, group, recent));
        }
    }
}

fn longest(group: &Group<'_>, alike: &Alike) -> Option<Longest> {
    let works = || alike.members.iter().filter_map(|position| Some((*position, group.work_ns(*position)?)));
    let count = i64::try_from(works().count()).ok().filter(|count| *count > 1)?;
    let (position, work_ns) = works().max_by_key(|(_, work_ns)| *work_ns)?;
    let mean_ns = works().map(|(_, work_ns)| work_ns).sum::<i64>() / count;
    let step = group.members.get(position)?.step;
    Some(Longest { begin_ns: step.begin_ns, rank: step.key.1, work_ns, mean_ns })
}

impl Longest {
    fn excess_ns(&self) -> i64 {
        self.work_ns - self.mean_ns
    }
}

/// Whether one rank is the longest in most steps.
fn is_one_ranks(recent: &VecDeque<Longest>) -> bool {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for one in recent {
        *counts.entry(one.rank).or_default() += 1;
    }
    counts.values().any(|count| *count > MOST_OF_ONE)
}

fn sign(view: &View<'_>, group: &Group<'_>, recent: &VecDeque<Longest>) -> Option<Sign> {
    let (work_ns, mean_ns): (i64, i64) =
        recent.iter().fold((0, 0), |(work, mean), one| (work + one.work_ns, mean + one.mean_ns));
    let count = i64::try_from(recent.len()).ok()?;
    let (ratio, excess_ns) = (ratio(work_ns, mean_ns)?, (work_ns - mean_ns) / count);
    if ratio < view.settings.lag || excess_ns < view.settings.lag_ns {
        return None;
    }
    let step = group.step()?;
    let job = &step.key.0;
    let is_uneven =
        |one: &&Longest| self::ratio(one.work_ns, one.mean_ns).is_some_and(|ratio| ratio >= view.settings.lag);
    let onset_ns = recent.iter().find(is_uneven).map(|one| one.begin_ns);
    let mut evidence = vec![
        Evidence { name: "longest_ratio", value: ratio },
        Evidence { name: "longest_excess_seconds", value: seconds(excess_ns) },
    ];
    evidence.extend(group.whole.into_iter().flat_map(super::peers::Whole::evidence));
    Some(Sign {
        kind: FindingKind::UnevenWork,
        subject: Subject { gpu: None, job: Some(job.clone()), rank: None },
        severity: severity(group),
        certainty: Certainty::Observed,
        begin_ns: onset_ns.unwrap_or(step.begin_ns),
        until_ns: view.now_ns + view.settings.hold_ns,
        step: step.number,
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence,
        text: Text {
            what: format!(
                "Ranks of {job} that do the same work on other data differ from step to step: the longest works {ratio:.2} \
                 times the mean{}.",
                group.whole.map(super::peers::Whole::text).unwrap_or_default()
            ),
            why: format!(
                "In the last {STEPS} steps the longest rank worked {} more than the mean, and it was not the same rank in \
                 most of them.",
                HumanDuration(excess_ns)
            ),
            advice: "Balance the tokens of each step over ranks and microbatches: sort or pack sequences by length."
                .to_owned(),
        },
    })
}
