//! `stage_imbalance`: the ranks of one pipeline stage work longer than those of the others, which wait for them.
//!
//! Within one step, the median work of the longest stage's ranks is compared with the mean of the other stages' medians. The
//! finding is reported if the same stage is the longest by about as much in each of the last steps, or in most of the last
//! twenty. No rank is named, because the cause is the division of the layers.

use super::detector::Looked;
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Subject, Text, seconds};
use super::lasting::{LagStep, Lags, STEPS};
use super::peers::Group;
use super::view::{View, median, ratio};
use crate::jobs::JobId;
use crate::mesh::Mesh;
use std::collections::{BTreeMap, VecDeque};

/// A step that takes this many times as long as with even work is worth a warning.
pub(super) const COSTLY: f64 = 1.1;

/// The longest stage of each job's last steps.
#[derive(Debug, Default)]
pub(super) struct StageImbalance {
    jobs: BTreeMap<JobId, VecDeque<(u32, f64, i64)>>,
    /// Steps of ranks: all of a step's ranks are judged or none.
    pub looked: Looked,
}

/// The longest stage of a step.
#[derive(Debug)]
struct Longest {
    stage: u32,
    ranks: usize,
    stages: usize,
    work_ns: i64,
    others_ns: i64,
    ratio: f64,
}

impl StageImbalance {
    /// Forgets jobs.
    pub fn retain(&mut self, runs: impl Fn(&JobId) -> bool) {
        self.jobs.retain(|job, _| runs(job));
    }

    pub fn judge(&mut self, view: &View<'_>, group: &Group<'_>, signs: &mut Vec<Sign>) {
        let longest = longest(group);
        let is_judged = longest.is_some() && group.is_warm(view);
        group.compared().for_each(|_| self.looked.note(is_judged));
        let (Some(step), Some(longest)) = (group.step(), longest) else { return };
        let recent = self.jobs.entry(step.key.0.clone()).or_default();
        if !group.is_warm(view) {
            recent.clear();
            return;
        }
        let is_lagging = longest.ratio >= view.settings.lag && longest.ns() >= view.settings.lag_ns;
        recent.push_back((longest.stage, if is_lagging { longest.ratio } else { 1.0 }, step.begin_ns));
        while recent.len() > STEPS {
            recent.pop_front();
        }
        let mut lags = Lags::default();
        for (stage, ratio, begin_ns) in recent {
            let ratio = if *stage == longest.stage { *ratio } else { 1.0 };
            lags.push(LagStep { ratio, begin_ns: *begin_ns, lost_ns: 0 });
        }
        if is_lagging && lags.is_lasting() {
            let begin_ns = lags.onset_ns().unwrap_or(step.begin_ns);
            signs.push(Sign { begin_ns, ..longest.sign(view, group, &step.key.0) });
        }
    }
}

/// The stage whose ranks worked longest, where the work of two stages or more is known.
fn longest(group: &Group<'_>) -> Option<Longest> {
    let mut stages: BTreeMap<u32, Vec<i64>> = BTreeMap::new();
    for member in &group.members {
        if let (Some(stage), Some(work)) = (member.mesh.and_then(Mesh::stage), &member.work) {
            stages.entry(stage).or_default().push(work.total_ns);
        }
    }
    let medians: Vec<(u32, usize, i64)> =
        stages.into_iter().filter_map(|(stage, works)| Some((stage, works.len(), median(works)?))).collect();
    let (stage, ranks, work_ns) = medians.iter().copied().max_by_key(|(_, _, work_ns)| *work_ns)?;
    let others: Vec<i64> = medians.iter().filter(|one| one.0 != stage).map(|one| one.2).collect();
    let count = i64::try_from(others.len()).ok().filter(|count| *count > 0)?;
    let others_ns = others.iter().sum::<i64>() / count;
    Some(Longest { stage, ranks, stages: medians.len(), work_ns, others_ns, ratio: ratio(work_ns, others_ns)? })
}

impl Longest {
    fn ns(&self) -> i64 {
        self.work_ns - self.others_ns
    }

    fn sign(&self, view: &View<'_>, group: &Group<'_>, job: &JobId) -> Sign {
        let (step, whole) = (group.step(), group.whole);
        let mut evidence = vec![
            Evidence { name: "stage_ratio", value: self.ratio },
            Evidence { name: "stage_seconds", value: seconds(self.work_ns) },
            Evidence { name: "other_stages_seconds", value: seconds(self.others_ns) },
        ];
        evidence.extend(whole.into_iter().flat_map(super::peers::Whole::evidence));
        let stage = self.stage;
        let alone = if self.ranks == 1 { " One rank runs this stage, so it may as well be slow itself." } else { "" };
        Sign {
            kind: FindingKind::StageImbalance,
            subject: Subject { gpu: None, job: Some(job.clone()), rank: None },
            severity: severity(group),
            certainty: Certainty::Observed,
            begin_ns: step.map_or(view.now_ns, |step| step.begin_ns),
            until_ns: view.now_ns + view.settings.hold_ns,
            step: step.and_then(|step| step.number),
            code: Some(u64::from(stage)),
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence,
            text: Text {
                what: format!(
                    "Pipeline stage {stage} of {job} works {:.2} times as long as the other {} on average{}.",
                    self.ratio,
                    if self.stages == 2 { "stage".to_owned() } else { format!("{} stages", self.stages - 1) },
                    whole.map(super::peers::Whole::text).unwrap_or_default()
                ),
                why: format!(
                    "In {} its ranks worked {} at the median, those of the other stages {}.{alone}",
                    step.map_or_else(|| "a step".to_owned(), super::steps::Step::title),
                    HumanDuration(self.work_ns),
                    HumanDuration(self.others_ns)
                ),
                advice:
                    "Give this stage fewer layers; the first also has the embedding, the last the head and the loss."
                        .to_owned(),
            },
        }
    }
}

/// How bad it is that the work of a step is uneven.
pub(super) fn severity(group: &Group<'_>) -> Severity {
    let is_costly = group.whole.is_some_and(|whole| whole.slowdown() >= COSTLY);
    if is_costly { Severity::Warning } else { Severity::Info }
}
