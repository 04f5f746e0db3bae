//! `straggler` for jobs whose communication is not marked or overlaps with computation: a rank for which all others
//! wait.
//!
//! DDP and FSDP run collectives inside the forward and backward pass. All ranks wait in them for the slowest, so all
//! steps take the same time. Two rules still find the slowest rank. By the marks: one of its phases is longer, and
//! later phases of its peers are longer by about as much, because the peers wait in them. By the GPUs, where the marks
//! are equal: a GPU that waits in a collective is busy and uses no tensor cores. One that computes longer uses them
//! more. One whose host is late is less busy. Measured on two H200s: when a rank was late by 26 of 131 ms in backward,
//! its tensor cores were active 1.59 times as much; when its host was late by 100 of 202 ms, its GPU was busy half of
//! the time; in healthy jobs the ratios were 1.05 and 1.04.
//!
//! Ranks are compared only if they do the same: by their coordinates, or else if each of their phases comes once in a step and
//! `forward` and `backward` are among them, which is not so in pipelines. If two ranks are late at once, neither is named.

mod block;
mod device;
mod lag;
mod marks;
mod words;

#[cfg(test)]
mod tests;

use super::detector::Ratios;
use super::finding::{LagCause, Sign};
use super::lasting::{LagStep, Lags};
use super::peers::{Group, Member};
use super::steps::is_one_of;
use super::view::{View, ratio};
use crate::clock::SECOND_NS;
use crate::jobs::JobId;
use crate::phases::RankKey;
use block::{LateBlock, Run};
use device::{Mean, Readings, Verdict};
use lag::Found;
use marks::{Lengths, Phases};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The blocks without a late rank whose median step is the baseline ([`LateBlock::healthy_ns`]).
const HEALTHY_BLOCKS: usize = 8;
/// Steps and time whose readings are compared with each other.
const BLOCK_STEPS: usize = 10;
const BLOCK_NS: i64 = SECOND_NS;
/// The most steps of a block, however short they are.
const MOST_STEPS: usize = 1024;
/// A rank is reported once consecutive blocks in which it is late have this weight in all: two blocks of even steps, or
/// five others. A block of uneven steps has weight 1, because unequal inputs can make one rank late in it by chance.
const ENOUGH: u32 = 5;
const EVEN_WEIGHT: u32 = 3;
/// A run of blocks in which a rank is late goes on over blocks that show nothing for this long.
const UNCLEAR_NS: i64 = 5 * SECOND_NS;

/// Looks for ranks that are late behind barriers.
#[derive(Debug, Default)]
pub(super) struct Late {
    readings: Readings,
    jobs: BTreeMap<JobId, LateBlock>,
    ranks: BTreeMap<RankKey, Known>,
}

/// What is known of a rank's last steps.
#[derive(Debug, Default)]
struct Known {
    /// By how much a phase that peers waited for made each step longer.
    recent: Lags,
    /// The slowdown, as a ratio, that it caused by the marks in the step judged last, and by the GPUs in the block judged last;
    /// `None` if it was not the late rank of it.
    by_marks: Option<f64>,
    by_device: Option<f64>,
    /// How long Python's garbage collector stopped it in the steps of the block, nanoseconds.
    collected_ns: i64,
    /// The end of the last step in which the marks showed it to be late. The rule by the GPUs does not report it for a
    /// block that began before that, because the marks also name the phase.
    named_ns: Option<i64>,
}

impl Late {
    /// Takes the readings of a turn.
    pub fn read(&mut self, view: &View<'_>) {
        self.readings.take(view);
    }

    /// Whether it is known what a GPU did lately.
    pub fn reads(&self, gpu: usize) -> bool {
        self.readings.knows(gpu)
    }

    /// Forgets jobs and ranks.
    pub fn retain(&mut self, runs: impl Fn(&JobId) -> bool, knows: impl Fn(&RankKey) -> bool) {
        self.jobs.retain(|job, _| runs(job));
        self.ranks.retain(|key, _| knows(key));
    }

    /// Adds by how much each rank made the last step longer.
    pub fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, known) in &self.ranks {
            if let Some(slowdown) = known.by_marks.or(known.by_device) {
                out.entry(key.clone()).or_default().compute_lag.get_or_insert(slowdown);
            }
        }
    }

    /// Looks for a late rank in one step of a job. Returns false if its ranks cannot be compared. What the marks show
    /// comes before what the GPUs show, so a step yields at most one sign.
    pub fn judge(&mut self, view: &View<'_>, group: &Group<'_>, signs: &mut Vec<Sign>) -> bool {
        let Some(job) = group.step().map(|step| step.key.0.clone()) else { return false };
        forget(&mut self.ranks, group, |known| known.by_marks = None);
        if !are_comparable(view, group) {
            // What the GPUs did in it does not belong to the block.
            if let Some(block) = self.jobs.get_mut(&job) {
                block.spans_ns.clear();
            }
            forget(&mut self.ranks, group, |known| known.by_device = None);
            return false;
        }
        let by_marks = self.judge_marks(view, group);
        if let Some(known) = by_marks.as_ref().and_then(|found| self.ranks.get_mut(&found.member.step.key)) {
            known.named_ns = by_marks.as_ref().map(|found| found.member.step.end_ns);
        }
        let by_device = self.judge_device(view, group, &job);
        let by_marks = by_marks.map(|found| match self.jobs.get(&job) {
            // Where the marks show only the phase.
            Some(block) if found.cause.is_none() => {
                let cause = block.cause_of(&found.member.step.key, found.begin_ns);
                Found { cause, ..found }
            }
            _ => found,
        });
        let is_by_marks = by_marks.is_some();
        for found in by_marks.into_iter().chain(by_device).take(1).map(|found| found.on_host(view)) {
            let slowdown = ratio(found.step_ns, found.step_ns - found.lag_ns);
            if let Some(known) = self.ranks.get_mut(&found.member.step.key) {
                *(if is_by_marks { &mut known.by_marks } else { &mut known.by_device }) = slowdown;
            }
            signs.push(found.sign(view, slowdown, group.members.len() - 1));
        }
        true
    }

    /// The one rank that has been late for a while by the marks.
    fn judge_marks<'a>(&mut self, view: &View<'_>, group: &'a Group<'_>) -> Option<Found<'a>> {
        let phases: Vec<Phases> = group.members.iter().map(|member| Phases::of(member.step, view.settings)).collect();
        let lengths = Lengths::of(&phases);
        let collected_ns = |member: &Member<'_>| member.step.collected_ns.unwrap_or(0);
        let late: Vec<Option<Found<'a>>> = (group.members.iter().zip(&phases))
            .map(|(member, own)| marks::judge(view.settings, &lengths, own, member))
            .map(|found| found.map(|found| found.explained(group, collected_ns)))
            .collect();
        for (member, found) in group.members.iter().zip(&late) {
            let slowdown = found.as_ref().and_then(|found| ratio(found.step_ns, found.step_ns - found.lag_ns));
            let recent = &mut self.ranks.entry(member.step.key.clone()).or_default().recent;
            let lost_ns = found.as_ref().map_or(0, |found| found.lost_ns);
            recent.push(LagStep { ratio: slowdown.unwrap_or(1.0), begin_ns: member.step.begin_ns, lost_ns });
        }
        let since = |found: Found<'a>| {
            let recent = &mut self.ranks.get_mut(&found.member.step.key)?.recent;
            let begin_ns = recent.onset_ns().unwrap_or(found.begin_ns);
            recent.is_lasting().then(|| Found { begin_ns, lost_ns: recent.take_lost_ns(), ..found })
        };
        let mut lasting = late.into_iter().flatten().filter_map(since);
        lasting.next().filter(|_| lasting.next().is_none())
    }

    /// The one rank that enough blocks of steps in a row show to be late by what the GPUs did.
    fn judge_device<'a>(&mut self, view: &View<'_>, group: &'a Group<'_>, job: &JobId) -> Option<Found<'a>> {
        let (begin_ns, end_ns) = self.add(group, job)?;
        let block = self.jobs.get_mut(job)?;
        let rare = block.take_rare();
        let mean_of = |member: &Member<'_>| self.readings.mean_of(view, member, (begin_ns, end_ns), &rare);
        let means: Option<Vec<Mean>> = group.members.iter().map(mean_of).collect();
        let weight = if block.is_even() { EVEN_WEIGHT } else { 1 };
        block.spans_ns.clear();
        let late = match means.map_or(Verdict::Unclear, |means| device::judge(view, group, &means, block)) {
            Verdict::Late(found) => Some(found),
            Verdict::Even => {
                block.healthy_ns.push_front(block.step_ns);
                block.healthy_ns.truncate(HEALTHY_BLOCKS);
                None
            }
            // A block that shows nothing neither ends a run nor is a healthy one.
            Verdict::Unclear if block.run.as_ref().is_some_and(|run| end_ns - run.end_ns <= UNCLEAR_NS) => return None,
            Verdict::Unclear => None,
        };
        forget(&mut self.ranks, group, |known| known.by_device = None);
        let Some((found, cause)) = late.and_then(|found| found.cause.map(|cause| (found, cause))) else {
            block.run = None;
            return None;
        };
        let key = &found.member.step.key;
        if let Some(pid) = view.rank(key).and_then(|rank| rank.pid).filter(|_| cause == LagCause::Host) {
            view.hosts.want(key, pid, view.now_ns);
        }
        let before = block.run.take().filter(|run| run.key == *key);
        let run = block.run.insert(before.unwrap_or_else(|| Run::new(key, begin_ns)));
        run.add(cause, weight, end_ns, found.lost_ns);
        if run.weight < ENOUGH || run.cause() != Some(cause) {
            return None;
        }
        let lost_ns = std::mem::take(&mut run.lost_ns);
        // The marks know the reason better than the GPUs do.
        let named_ns = self.ranks.get(key).and_then(|known| known.named_ns);
        if named_ns.is_some_and(|named_ns| named_ns > begin_ns) {
            return None;
        }
        let steps = i64::try_from(block.steps).unwrap_or(i64::MAX).max(1);
        let collected_ns =
            |member: &Member<'_>| self.ranks.get(&member.step.key).map_or(0, |known| known.collected_ns / steps);
        // After the verdict, which holds though the garbage collector runs in some blocks only.
        Some(Found { begin_ns: run.since_ns, lost_ns, ..found.explained(group, collected_ns) })
    }

    /// Adds a step to the block of its job. Returns the begin and end of the block once it is long enough to be judged.
    fn add(&mut self, group: &Group<'_>, job: &JobId) -> Option<(i64, i64)> {
        let begin_ns = group.members.iter().map(|member| member.step.begin_ns).min()?;
        let end_ns = group.members.iter().map(|member| member.step.end_ns).max()?;
        let block = self.jobs.entry(job.clone()).or_default();
        let is_first = block.spans_ns.is_empty();
        for member in &group.members {
            // The marks were judged before, so that each rank is known.
            let Some(known) = self.ranks.get_mut(&member.step.key) else { continue };
            let before_ns = if is_first { 0 } else { known.collected_ns };
            known.collected_ns = before_ns.saturating_add(member.step.collected_ns.unwrap_or(0));
        }
        if is_first {
            (block.begin_ns, block.first) = (begin_ns, group.step().and_then(|step| step.number));
        }
        block.spans_ns.push((begin_ns, end_ns));
        let steps = block.spans_ns.len();
        let is_long = steps >= BLOCK_STEPS && end_ns - block.begin_ns >= BLOCK_NS;
        (is_long || steps >= MOST_STEPS).then_some((block.begin_ns, end_ns))
    }
}

/// Forgets something of each rank of a step.
fn forget(ranks: &mut BTreeMap<RankKey, Known>, group: &Group<'_>, mut what: impl FnMut(&mut Known)) {
    for member in &group.members {
        if let Some(known) = ranks.get_mut(&member.step.key) {
            what(known);
        }
    }
}

/// Whether all ranks of a step do the same on other data, the work of none is known by its marks, and none does anything beside
/// training.
fn are_comparable(view: &View<'_>, group: &Group<'_>) -> bool {
    let Some(first) = group.members.first() else { return false };
    let settings = view.settings;
    let is_apart = |member: &Member<'_>| {
        let refills = member.step.time_in(&settings.refill_phases).is_some();
        member.work.is_some() || refills || !member.step.is_whole || member.step.phases.is_empty()
    };
    let order = |member: &Member<'_>| -> Vec<Arc<str>> {
        let is_left_out = |name: &str| is_one_of(name, &settings.data_phases) || is_one_of(name, &settings.comm_phases);
        let phases = member.step.phases.iter().filter(|phase| !is_left_out(&phase.name));
        phases.map(|phase| Arc::clone(&phase.name)).collect()
    };
    let of_first = order(first);
    let has = |wanted: &str| of_first.iter().any(|name| &**name == wanted);
    let comes_once = of_first.iter().enumerate().all(|(at, name)| !of_first[..at].contains(name));
    let is_plain = comes_once && has("forward") && has("backward");
    let is_like = |member: &Member<'_>| match (member.mesh, first.mesh) {
        (Some(mesh), Some(other)) => mesh.is_like(other),
        (None, None) => is_plain,
        _ => false,
    };
    group.members.len() > 1
        && group.is_warm(view)
        && !group.members.iter().any(is_apart)
        && group.members.iter().all(|member| is_like(member) && order(member) == of_first)
}
