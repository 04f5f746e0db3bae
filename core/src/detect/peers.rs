//! The ranks of one step beside each other, and which of them are alike.
//!
//! Enters: the steps of one number of a job's ranks. Leaves: a [`Group`]. Ranks are alike if their coordinates say so: same
//! stage, same shard, other data. Where a job sends no coordinates, the marks must show it: the same phases in the same order,
//! and the first of them at the same time, which stages of a pipeline never have, or the second by far longer than the ranks are
//! apart. A rank that is like no other rank is compared with none.

use super::finding::{Evidence, HumanDuration, seconds};
use super::steps::Step;
use super::view::{RankNow, View};
use super::work::Work;
use crate::mesh::Mesh;

/// One rank of a step.
pub(super) struct Member<'a> {
    pub step: &'a Step,
    pub mesh: Option<&'a Mesh>,
    /// How long it worked, where that is known.
    pub work: Option<Work>,
}

/// Ranks that are alike, by their positions in the group.
#[derive(Debug)]
pub(super) struct Alike {
    pub members: Vec<usize>,
    /// Whether their coordinates say so.
    pub is_by_mesh: bool,
    /// The time that their first phases have in common.
    window_ns: (i64, i64),
}

/// One step of a job.
pub(super) struct Group<'a> {
    pub members: Vec<Member<'a>>,
    /// Each rank whose work is known is in one of these.
    pub alike: Vec<Alike>,
    /// The step as a whole, where all of the job's ranks are here.
    pub whole: Option<Whole>,
}

/// A step as all of its ranks made it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Whole {
    /// How long it took.
    pub step_ns: i64,
    /// How long it would take if each rank worked as long as they do on average.
    pub even_ns: i64,
}

impl<'a> Group<'a> {
    /// `sees` returns whether a GPU has readings that can show a late rank. If most marked communication lies in phases
    /// of work, the work of all ranks counts as unknown. The exception: some rank has no such GPU, and that
    /// communication lies in one phase.
    pub fn of(view: &'a View<'_>, steps: &'a [Step], sees: impl Fn(usize) -> bool) -> Self {
        let now = |step: &Step| view.rank(&step.key);
        let member = |step: &'a Step| Member {
            step,
            mesh: now(step).and_then(|rank| rank.mesh.as_deref()),
            work: Work::of(step, view.settings),
        };
        let mut members: Vec<Member<'a>> = steps.iter().map(member).collect();
        let works = || members.iter().filter_map(|member| member.work.as_ref());
        let sees_all = || members.iter().all(|member| member.step.gpus.iter().any(|gpu| sees(*gpu)));
        if !Work::is_known(works()) && (sees_all() || !Work::is_in_one_phase(works())) {
            members.iter_mut().for_each(|member| member.work = None);
        }
        let size = steps.iter().filter_map(now).filter_map(|rank: &RankNow| rank.world_size).max();
        let is_all = size.is_none_or(|size| members.len() as u64 >= u64::from(size));
        let alike = alike(&members);
        // Ranks that are not all alike may be stages of a pipeline, also where no coordinate says so.
        let has_stage = |member: &Member<'_>| member.mesh.is_some_and(|mesh| mesh.stage().is_some());
        let is_plain = alike.len() == 1 || members.iter().all(has_stage);
        let whole = if is_all && is_plain { whole(&members) } else { None };
        Self { alike, whole, members }
    }

    /// The step of any of them: all have one number and one job.
    pub fn step(&self) -> Option<&'a Step> {
        self.members.first().map(|member| member.step)
    }

    /// How long a member worked; `None` if that is not known. The members of an [`Alike`] always have a value.
    pub fn work_ns(&self, position: usize) -> Option<i64> {
        Some(self.members.get(position)?.work.as_ref()?.total_ns)
    }

    /// The steps that count as examined: those of all ranks, or none if there is only one rank, which has no peers.
    pub fn compared(&self) -> impl Iterator<Item = &'a Step> {
        let members = if self.members.len() > 1 { self.members.as_slice() } else { &[] };
        members.iter().map(|member| member.step)
    }

    /// Whether all are past the warm-up.
    pub fn is_warm(&self, view: &View<'_>) -> bool {
        self.members.iter().all(|member| member.step.nth >= view.settings.warm_up_steps)
    }
}

/// Puts those that are alike together.
fn alike(members: &[Member<'_>]) -> Vec<Alike> {
    let mut all: Vec<Alike> = Vec::new();
    for (position, member) in members.iter().enumerate() {
        let Some(work) = &member.work else { continue };
        let with = all.iter_mut().find_map(|one| {
            let first = members.get(*one.members.first()?)?;
            let window_ns = (one.window_ns.0.max(work.first_ns.0), one.window_ns.1.min(work.first_ns.1));
            let of_first = first.work.as_ref()?;
            let is_common = window_ns.0 < window_ns.1;
            let looks_alike = of_first.order == work.order && (is_common || of_first.is_beside(work));
            let is_like = match (member.mesh, first.mesh) {
                // A mesh without stages may be a part of one that has them: then the marks must agree.
                (Some(mesh), Some(other)) => mesh.is_like(other) && (mesh.stage().is_some() || looks_alike),
                (None, None) => looks_alike,
                _ => false,
            };
            is_like.then_some((if is_common { window_ns } else { one.window_ns }, one))
        });
        match with {
            Some((window_ns, one)) => {
                one.members.push(position);
                one.window_ns = window_ns;
            }
            None => {
                all.push(Alike { members: vec![position], is_by_mesh: member.mesh.is_some(), window_ns: work.first_ns })
            }
        }
    }
    all
}

/// The step with all of its ranks; `None` where the work of one is not known, or ranks differ in their microbatches.
fn whole(members: &[Member<'_>]) -> Option<Whole> {
    let works: Vec<&Work> = members.iter().map(|member| member.work.as_ref()).collect::<Option<_>>()?;
    let rounds = works.first()?.rounds;
    if works.iter().any(|work| work.rounds != rounds) {
        return None;
    }
    let stages = stages(members)?;
    let begin_ns = members.iter().map(|member| member.step.begin_ns).min()?;
    let step_ns = members.iter().map(|member| member.step.end_ns).max()? - begin_ns;
    let mean = |of: fn(&Work) -> i64| works.iter().map(|work| i128::from(of(work))).sum::<i128>() / works.len() as i128;
    let (repeated_ns, once_ns) = (mean(|work| work.total_ns - work.once_ns), mean(|work| work.once_ns));
    // A pipeline is filled and drained once a step. The idle time of the rank that idles least is not waiting for other ranks.
    let filled_ns = repeated_ns * i128::from(rounds + stages - 1) / i128::from(rounds);
    let beside = |work: &&Work| if stages > 1 { work.outside_ns } else { work.idle_ns };
    let beside_ns = works.iter().map(beside).min()?;
    let even_ns = i64::try_from(filled_ns + once_ns).ok()?.checked_add(beside_ns)?;
    (even_ns > 0).then_some(Whole { step_ns, even_ns })
}

/// The number of stages; `None` where some are not here.
fn stages(members: &[Member<'_>]) -> Option<u64> {
    let stage = |member: &Member<'_>| member.mesh.and_then(Mesh::stage);
    let mut known: Vec<u32> = members.iter().filter_map(stage).collect();
    if known.is_empty() {
        return Some(1);
    }
    let is_each = known.len() == members.len();
    known.sort_unstable();
    known.dedup();
    let is_dense = known.iter().copied().eq(0..u32::try_from(known.len()).ok()?);
    (is_each && is_dense).then_some(known.len() as u64)
}

impl Whole {
    /// The duration of the step over its duration with even work; at least 1.
    pub fn slowdown(self) -> f64 {
        super::view::ratio(self.step_ns, self.even_ns).unwrap_or(1.0).max(1.0)
    }

    /// The time that this number of ranks loses because work is uneven, summed over them, nanoseconds.
    pub fn lost_ns(self, ranks: usize) -> Option<i64> {
        Some((self.step_ns - self.even_ns).max(0).saturating_mul(i64::try_from(ranks).ok()?))
    }

    /// Its numbers.
    pub fn evidence(self) -> [Evidence; 3] {
        [
            Evidence { name: "slowdown_ratio", value: self.slowdown() },
            Evidence { name: "step_seconds", value: seconds(self.step_ns) },
            Evidence { name: "even_step_seconds", value: seconds(self.even_ns.min(self.step_ns)) },
        ]
    }

    /// The end of a sentence: what even work would save. Empty if it would save nothing.
    pub fn text(self) -> String {
        if self.even_ns >= self.step_ns {
            return String::new();
        }
        let (even, step) = (HumanDuration(self.even_ns), HumanDuration(self.step_ns));
        format!("; if all worked alike, the step would take {even} instead of {step}")
    }
}
