//! `straggler`, of jobs that do not mark their communication, or in which it runs beside their work: a rank that is late behind a
//! barrier.
//!
//! DDP and FSDP hide their collectives in the forward and backward pass. Every rank then takes as long as the slowest, so that the
//! durations of steps name nobody. Two things still differ. The marks: a phase of the late rank is longer than that of its peers, by what
//! later phases of the peers are longer, because they wait in them. And the GPUs, where the marks are equal: a GPU that waits in
//! a collective is busy and uses no tensor cores, one that computes longer uses them more, and one whose host is late is less
//! busy. Measured on two H200s: late by 26 of 131 ms in backward, the tensor cores were active 1.59 times as much; late by
//! 100 of 202 ms on the host, the GPU was busy half of the time; in healthy jobs the ratios were 1.05 and 1.04.
//!
//! Ranks are compared only if they do the same: by their coordinates, or else if each of their phases comes once in a step and
//! `forward` and `backward` are among them, which is not so in pipelines. If two ranks are late at once, neither is named.

use super::detector::Ratios;
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Subject, Text, seconds};
use super::lasting::Lags;
use super::peers::{Group, Member};
use super::settings::Settings;
use super::steps::{Step, is_one_of};
use super::view::{View, median, ratio};
use crate::clock::SECOND_NS;
use crate::gpu::{Medium, SLOWDOWN_MASK};
use crate::jobs::JobId;
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Peers must have waited for at least this part of what a phase was longer.
const WAITED_SHARE: f64 = 0.5;
/// A step must take at least this many times as long as it would without the late phase.
const SLOWDOWN: f64 = 1.05;
/// And if its host is late. Where the hosts of all ranks hardly keep up, as under FSDP2, the GPU of one is less busy by chance.
const HOST_SLOWDOWN: f64 = 1.15;
/// Blocks in which nobody was late that show how long a step takes.
const HEALTHY_BLOCKS: usize = 8;
/// Steps and time whose readings are compared with each other.
const BLOCK_STEPS: usize = 10;
const BLOCK_NS: i64 = SECOND_NS;
/// Readings of a GPU in a block that are needed at least.
const FEWEST_READINGS: usize = 4;
/// The most steps of a block, however short they are.
const MOST_STEPS: usize = 1024;
/// Blocks in a row that must agree, and where steps differ in length, as inputs do: then one rank has more work than the others
/// in a block by chance.
const BLOCKS: u32 = 2;
const UNEVEN_BLOCKS: u32 = 5;
/// Steps are even if the longest but one takes at most this many times as long as the shortest.
const EVEN: f64 = 1.3;
/// Tensor cores that are active at least this many times as much as the peers' show that a rank computes longer.
const MORE_TENSOR: f64 = 1.2;
/// A GPU that is busy at most this part of the time that its peers are shows that its host is late.
const LESS_BUSY: f64 = 0.85;
/// A rank that computes longer is busy for at least this part of the time that its peers are.
const AS_BUSY: f64 = 0.9;
/// Python's garbage collector is why a rank is late if it makes up at least this part of the lag.
const COLLECTED_SHARE: f64 = 0.5;
/// Below this the tensor cores are hardly used, and their ratio says nothing.
const LEAST_TENSOR: f64 = 0.005;
/// For how long after its marks named a rank its GPU does not.
const NAMED_NS: i64 = 5 * SECOND_NS;
/// How long readings are kept: for a block of steps of a few seconds.
const KEPT_NS: i64 = 60 * SECOND_NS;

/// Looks for ranks that are late behind barriers.
#[derive(Debug, Default)]
pub(super) struct Late {
    gpus: Vec<VecDeque<Reading>>,
    jobs: BTreeMap<JobId, Block>,
    ranks: BTreeMap<RankKey, Known>,
}

/// What one reading says of a GPU.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at_ns: i64,
    tensor: f64,
    busy: f64,
    is_throttled: bool,
}

/// What is known of a rank's last steps.
#[derive(Debug, Default)]
struct Known {
    /// By how much a phase that peers waited for made each step longer.
    recent: Lags,
    /// The slowdown of the last step that it caused; `None` if it caused none that is known.
    slowdown: Option<f64>,
    /// How long Python's garbage collector stopped it in the steps of the block, nanoseconds.
    collected_ns: i64,
    /// When its marks named it last: they know the reason better than its GPU does.
    named_ns: Option<i64>,
}

/// The steps of a job whose readings are compared next.
#[derive(Debug, Default)]
struct Block {
    begin_ns: i64,
    /// How long each of its steps took.
    lengths_ns: Vec<i64>,
    first: Option<u64>,
    step_ns: i64,
    /// How many there were.
    steps: usize,
    /// The mean steps of the last blocks in which nobody was late.
    healthy_ns: VecDeque<i64>,
    /// The last block's verdict, and in how many blocks in a row it was the same.
    verdict: Option<(RankKey, Why)>,
    blocks: u32,
    /// When the first of these began.
    since_ns: i64,
}

/// Why a rank is late.
#[derive(Debug, Clone, PartialEq)]
enum Why {
    /// This phase is longer.
    Phase(Arc<str>),
    /// Its input is late.
    Data,
    /// It computes longer.
    Computes,
    /// It computes longer because its clocks are held back.
    Throttled,
    /// Its GPU waits for its host.
    Host,
    /// Its host is late because Python's garbage collector stops it, for this many nanoseconds a step longer than the others.
    Collector(i64),
}

/// One rank that is late in one step or block.
struct Found<'a> {
    member: &'a Member<'a>,
    why: Why,
    lag_ns: i64,
    step_ns: i64,
    /// How many steps it is about.
    steps: usize,
    /// Since when it is late.
    begin_ns: i64,
    /// For how long at least the finding goes on without another sign.
    hold_ns: i64,
    evidence: Vec<Evidence>,
    /// The numbers in words.
    numbers: String,
    certainty: Certainty,
}

impl Late {
    /// Takes the readings of a turn.
    pub fn read(&mut self, view: &View<'_>) {
        self.gpus.resize_with(view.gpus.len(), VecDeque::new);
        for (gpu, readings) in view.gpus.iter().zip(&mut self.gpus) {
            let latest = gpu.medium().filter(|latest| readings.back().is_none_or(|last| last.at_ns < latest.at_ns));
            readings.extend(latest.and_then(|latest| Reading::of(latest.at_ns, &latest.reading)));
            while readings.front().is_some_and(|oldest| view.now_ns - oldest.at_ns > KEPT_NS) {
                readings.pop_front();
            }
        }
    }

    /// Whether it is known what a GPU did lately.
    pub fn reads(&self, gpu: usize) -> bool {
        self.gpus.get(gpu).is_some_and(|readings| !readings.is_empty())
    }

    /// Forgets jobs and ranks.
    pub fn retain(&mut self, runs: impl Fn(&JobId) -> bool, knows: impl Fn(&RankKey) -> bool) {
        self.jobs.retain(|job, _| runs(job));
        self.ranks.retain(|key, _| knows(key));
    }

    /// Adds by how much each rank made the last step longer.
    pub fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, known) in self.ranks.iter().filter(|(_, known)| known.slowdown.is_some()) {
            let ratios = out.entry(key.clone()).or_default();
            ratios.compute_lag = ratios.compute_lag.or(known.slowdown);
        }
    }

    /// Judges the ranks of a step whose communication is not marked.
    pub fn judge(&mut self, view: &View<'_>, group: &Group<'_>, signs: &mut Vec<Sign>) {
        let Some(job) = group.step().map(|step| step.key.0.clone()) else { return };
        for member in &group.members {
            if let Some(known) = self.ranks.get_mut(&member.step.key) {
                known.slowdown = None;
            }
        }
        if !are_comparable(view, group) {
            // What the GPUs did in it does not belong to the block.
            if let Some(block) = self.jobs.get_mut(&job) {
                block.lengths_ns.clear();
            }
            return;
        }
        let by_marks = self.judge_marks(view, group);
        if let Some(known) = by_marks.as_ref().and_then(|found| self.ranks.get_mut(&found.member.step.key)) {
            known.named_ns = Some(view.now_ns);
        }
        let by_device = self.judge_device(view, group, &job);
        let is_named = |found: &Found<'_>| {
            let named_ns = self.ranks.get(&found.member.step.key).and_then(|known| known.named_ns);
            named_ns.is_some_and(|named_ns| view.now_ns - named_ns < NAMED_NS)
        };
        let by_device = by_device.filter(|found| !is_named(found));
        for found in by_marks.into_iter().chain(by_device).take(1) {
            let slowdown = ratio(found.step_ns, found.step_ns - found.lag_ns);
            if let Some(known) = self.ranks.get_mut(&found.member.step.key) {
                known.slowdown = slowdown;
            }
            signs.push(found.sign(view, slowdown, group.members.len() - 1));
        }
    }

    /// The one rank that has been late for a while by the marks.
    fn judge_marks<'a>(&mut self, view: &View<'_>, group: &'a Group<'_>) -> Option<Found<'a>> {
        let phases: Vec<Phases> = group.members.iter().map(|member| Phases::of(member.step, view.settings)).collect();
        let lengths = Lengths::of(&phases);
        let collected_ns = |member: &Member<'_>| member.step.collected_ns.unwrap_or(0);
        let late: Vec<Option<Found<'a>>> = (group.members.iter().zip(&phases))
            .map(|(member, own)| by_marks(view.settings, &lengths, own, member))
            .map(|found| found.map(|found| found.explained(group, collected_ns)))
            .collect();
        for (member, found) in group.members.iter().zip(&late) {
            let slowdown = found.as_ref().and_then(|found| ratio(found.step_ns, found.step_ns - found.lag_ns));
            let recent = &mut self.ranks.entry(member.step.key.clone()).or_default().recent;
            recent.push(slowdown.unwrap_or(1.0), member.step.begin_ns);
        }
        let since = |found: Found<'a>| {
            let recent = &self.ranks.get(&found.member.step.key)?.recent;
            let begin_ns = recent.onset_ns().unwrap_or(found.begin_ns);
            recent.is_lasting().then_some(Found { begin_ns, ..found })
        };
        let mut lasting = late.into_iter().flatten().filter_map(since);
        lasting.next().filter(|_| lasting.next().is_none())
    }

    /// The one rank that enough blocks of steps in a row show to be late by what the GPUs did.
    fn judge_device<'a>(&mut self, view: &View<'_>, group: &'a Group<'_>, job: &JobId) -> Option<Found<'a>> {
        let begin_ns = group.members.iter().map(|member| member.step.begin_ns).min()?;
        let end_ns = group.members.iter().map(|member| member.step.end_ns).max()?;
        let block = self.jobs.entry(job.clone()).or_default();
        let is_first = block.lengths_ns.is_empty();
        for member in &group.members {
            // The marks were judged before, so that each rank is known.
            let Some(known) = self.ranks.get_mut(&member.step.key) else { continue };
            let before_ns = if is_first { 0 } else { known.collected_ns };
            known.collected_ns = before_ns.saturating_add(member.step.collected_ns.unwrap_or(0));
        }
        if is_first {
            (block.begin_ns, block.first) = (begin_ns, group.step().and_then(|step| step.number));
        }
        block.lengths_ns.push(end_ns - begin_ns);
        block.step_ns = (end_ns - block.begin_ns) / i64::try_from(block.lengths_ns.len()).unwrap_or(i64::MAX);
        block.steps = block.lengths_ns.len();
        let is_long = block.lengths_ns.len() >= BLOCK_STEPS && end_ns - block.begin_ns >= BLOCK_NS;
        if !is_long && block.lengths_ns.len() < MOST_STEPS {
            return None;
        }
        let (begin_ns, is_even) = (block.begin_ns, is_even(&mut block.lengths_ns));
        block.lengths_ns.clear();
        let means: Option<Vec<Mean>> =
            group.members.iter().map(|member| self.mean_of(view, member, (begin_ns, end_ns))).collect();
        let block = self.jobs.get_mut(job)?;
        let found = means.and_then(|means| by_device(view, group, &means, block));
        let verdict = found.as_ref().map(|found| (found.member.step.key.clone(), found.why.clone()));
        if verdict.is_some() && verdict == block.verdict {
            block.blocks += 1;
        } else {
            (block.blocks, block.since_ns) = (1, begin_ns);
        }
        block.verdict = verdict;
        if found.is_none() {
            block.healthy_ns.push_front(block.step_ns);
            block.healthy_ns.truncate(HEALTHY_BLOCKS);
        }
        // After the verdict, which holds though the garbage collector runs in some blocks only.
        let steps = i64::try_from(block.steps).unwrap_or(i64::MAX).max(1);
        let collected_ns =
            |member: &Member<'_>| self.ranks.get(&member.step.key).map_or(0, |known| known.collected_ns / steps);
        let found = found.filter(|_| block.blocks >= if is_even { BLOCKS } else { UNEVEN_BLOCKS });
        found.map(|found| Found { begin_ns: block.since_ns, ..found.explained(group, collected_ns) })
    }

    /// What the GPU of a rank did on average; `None` if it has several, or too few readings.
    fn mean_of(&self, view: &View<'_>, member: &Member<'_>, (begin_ns, end_ns): (i64, i64)) -> Option<Mean> {
        let [gpu] = member.step.gpus[..] else { return None };
        if view.rank_on(gpu).is_none_or(|rank| rank.key != member.step.key) {
            return None;
        }
        let readings = self.gpus.get(gpu)?.iter().filter(|reading| (begin_ns..=end_ns).contains(&reading.at_ns));
        let (mut sum, mut count, mut throttled) = (Mean::default(), 0, 0);
        for reading in readings {
            (sum.tensor, sum.busy) = (sum.tensor + reading.tensor, sum.busy + reading.busy);
            count += 1;
            throttled += usize::from(reading.is_throttled);
        }
        #[allow(clippy::cast_precision_loss, reason = "readings of a minute")]
        let of = |sum: f64| sum / count as f64;
        let is_throttled = throttled * 2 >= count;
        (count >= FEWEST_READINGS).then(|| Mean { tensor: of(sum.tensor), busy: of(sum.busy), is_throttled })
    }
}

impl Reading {
    fn of(at_ns: i64, medium: &Medium) -> Option<Self> {
        let (tensor, busy) = (medium.activity.tensor_active_ratio?, medium.utilization_ratio?);
        let is_throttled = medium.throttle_reasons.is_some_and(|reasons| reasons & SLOWDOWN_MASK != 0);
        Some(Self { at_ns, tensor, busy, is_throttled })
    }
}

/// Whether steps of these lengths are about as long.
fn is_even(lengths_ns: &mut [i64]) -> bool {
    lengths_ns.sort_unstable();
    let (shortest, longest) = (lengths_ns.first(), lengths_ns.iter().nth_back(1));
    shortest.zip(longest).and_then(|(shortest, longest)| ratio(*longest, *shortest)).is_some_and(|ratio| ratio <= EVEN)
}

/// What a GPU did on average.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    tensor: f64,
    busy: f64,
    is_throttled: bool,
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

/// The phases of a step by name, in the order of their first begin, without communication, which runs beside them; and last the
/// time that no phase covers: the host of a rank that runs ahead of its GPU waits there, at the end of the step.
struct Phases(Vec<OnePhase>);

/// How long all phases of one name took in a step, and when the last one ended, nanoseconds.
struct OnePhase {
    name: Arc<str>,
    length_ns: i64,
    end_ns: i64,
}

/// The name of the time that no phase covers.
const UNMARKED: &str = "unmarked time";

impl Phases {
    fn of(step: &Step, settings: &Settings) -> Self {
        let mut all: Vec<OnePhase> = Vec::new();
        let is_comm = |name: &str| is_one_of(name, &settings.comm_phases);
        let mut phases: Vec<_> = step.phases.iter().filter(|phase| !is_comm(&phase.name)).collect();
        phases.sort_by_key(|phase| phase.begin_ns);
        for phase in phases {
            let (length_ns, end_ns) = (phase.end_ns - phase.begin_ns, phase.end_ns);
            match all.iter_mut().find(|known| known.name == phase.name) {
                Some(known) => {
                    (known.length_ns, known.end_ns) = (known.length_ns + length_ns, known.end_ns.max(end_ns));
                }
                None => all.push(OnePhase { name: Arc::clone(&phase.name), length_ns, end_ns }),
            }
        }
        // Where phases overlap, nothing is known of it.
        let marked_ns: i64 = all.iter().map(|phase| phase.length_ns).sum();
        let length_ns = (step.length_ns() - marked_ns).max(0);
        all.push(OnePhase { name: UNMARKED.into(), length_ns, end_ns: step.end_ns });
        Self(all)
    }
}

/// By name, the lengths of a phase in all ranks of a step, and its ends, each in order. A rank without the phase spends no time in
/// it.
struct Lengths(BTreeMap<Arc<str>, (Vec<i64>, Vec<i64>)>);

impl Lengths {
    fn of(all: &[Phases]) -> Self {
        let mut lengths: BTreeMap<Arc<str>, (Vec<i64>, Vec<i64>)> = BTreeMap::new();
        for phase in all.iter().flat_map(|phases| &phases.0) {
            let (of_phase, ends) = lengths.entry(Arc::clone(&phase.name)).or_default();
            of_phase.push(phase.length_ns);
            ends.push(phase.end_ns);
        }
        for (of_phase, ends) in lengths.values_mut() {
            of_phase.resize(all.len(), 0);
            of_phase.sort_unstable();
            ends.sort_unstable();
        }
        Self(lengths)
    }

    /// The median length of a phase in the ranks but the one that took `own_ns`.
    fn others_ns(&self, name: &str, own_ns: i64) -> Option<i64> {
        median_of_others(&self.0.get(name)?.0, own_ns)
    }

    /// The median end of a phase in the other ranks.
    fn others_end_ns(&self, name: &str, own_ns: i64) -> Option<i64> {
        median_of_others(&self.0.get(name)?.1, own_ns)
    }
}

/// The median of a list in order, without one of the values that equal `own`; of an even number the lower one.
fn median_of_others(sorted: &[i64], own: i64) -> Option<i64> {
    let middle = sorted.len().checked_sub(2)? / 2;
    let own_at = sorted.binary_search(&own).ok()?;
    sorted.get(if middle < own_at { middle } else { middle + 1 }).copied()
}

/// Whether a rank is late in one step by the marks: its longest excess in a phase for which peers waited in later ones. The phase
/// must also end later than the peers' by as much: if they end together, the rank itself waited in it. For data the peers may wait
/// after their phases too. Of the other phases nothing follows from that: where a host runs ahead of its GPU, it depends on chance
/// in which phase it is held up.
fn by_marks<'a>(settings: &Settings, lengths: &Lengths, own: &Phases, member: &'a Member<'_>) -> Option<Found<'a>> {
    let step_ns = member.step.length_ns();
    #[allow(clippy::cast_precision_loss, reason = "a share of milliseconds")]
    let is_most = |part_ns: i64, of_ns: i64| part_ns as f64 >= WAITED_SHARE * of_ns as f64;
    let mut late: Option<(&OnePhase, bool, i64, i64, &Arc<str>)> = None;
    for (at, phase) in own.0.iter().enumerate().filter(|(_, phase)| &*phase.name != UNMARKED) {
        let lag_ns = phase.length_ns - lengths.others_ns(&phase.name, phase.length_ns)?;
        let slows = ratio(step_ns, step_ns - lag_ns).is_some_and(|slowdown| slowdown >= SLOWDOWN);
        if lag_ns < settings.lag_ns || !slows || late.is_some_and(|late| late.2 >= lag_ns) {
            continue;
        }
        let ends_later_ns = phase.end_ns - lengths.others_end_ns(&phase.name, phase.end_ns)?;
        let is_data = is_one_of(&phase.name, &settings.data_phases);
        let later = own.0.iter().skip(at + 1).filter(|later| is_data || &*later.name != UNMARKED);
        let (mut waited_ns, mut longest) = (0, None);
        for later in later {
            let wait_ns = lengths.others_ns(&later.name, later.length_ns)? - later.length_ns;
            waited_ns += wait_ns.max(0);
            longest = longest.max(Some((wait_ns, &later.name)));
        }
        if let Some((_, in_phase)) = longest.filter(|_| is_most(waited_ns, lag_ns) && is_most(ends_later_ns, lag_ns)) {
            late = Some((phase, is_data, lag_ns, waited_ns, in_phase));
        }
    }
    let (phase, is_data, lag_ns, waited_ns, in_phase) = late?;
    let name = &phase.name;
    let why = if is_data { Why::Data } else { Why::Phase(Arc::clone(name)) };
    Some(Found {
        member,
        why,
        lag_ns,
        step_ns,
        steps: 1,
        begin_ns: member.step.begin_ns,
        hold_ns: 0,
        evidence: vec![Evidence { name: "peers_waited_seconds", value: seconds(waited_ns) }],
        numbers: format!(
            "In {} its {name} took {}, that of the other ranks {} at the median, and they spent {} more in {in_phase}.",
            member.step.title(),
            HumanDuration(phase.length_ns),
            HumanDuration(phase.length_ns - lag_ns),
            HumanDuration(waited_ns),
        ),
        certainty: Certainty::Observed,
    })
}

/// Which rank is late in a block of steps by what the GPUs did, if it is one.
fn by_device<'a>(view: &View<'_>, group: &'a Group<'_>, means: &[Mean], block: &Block) -> Option<Found<'a>> {
    let others = |position: usize, of: fn(&Mean) -> f64| {
        let mut others: Vec<f64> =
            means.iter().enumerate().filter(|(other, _)| *other != position).map(|(_, mean)| of(mean)).collect();
        others.sort_unstable_by(f64::total_cmp);
        others.get(others.len().checked_sub(1)? / 2).copied()
    };
    let mut late = means.iter().enumerate().filter_map(|(position, mean)| {
        let (tensor, busy) = (others(position, |mean| mean.tensor)?, others(position, |mean| mean.busy)?);
        let tensor_ratio = (tensor >= LEAST_TENSOR).then(|| mean.tensor / tensor);
        let busy_ratio = (busy > 0.0).then(|| mean.busy / busy)?;
        let (why, share) = if busy_ratio <= LESS_BUSY {
            (Why::Host, busy - mean.busy)
        } else if busy_ratio >= AS_BUSY && tensor_ratio.is_some_and(|ratio| ratio >= MORE_TENSOR) {
            let why = if mean.is_throttled { Why::Throttled } else { Why::Computes };
            (why, 1.0 - tensor / mean.tensor)
        } else {
            return None;
        };
        Some((position, why, share, (*mean, tensor, busy)))
    });
    let (position, why, share, (mean, tensor, busy)) = late.next().filter(|_| late.next().is_none())?;
    let member = group.members.get(position)?;
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a part of a step")]
    let most_ns = (block.step_ns as f64 * share) as i64;
    // What is done in the late part may use the tensor cores more than the rest. What steps took before is the better bound.
    let longer_ns = median(block.healthy_ns.iter().copied()).map(|healthy_ns| block.step_ns - healthy_ns);
    let lag_ns = longer_ns.map_or(most_ns, |ns| ns.min(most_ns));
    let least = if why == Why::Host { HOST_SLOWDOWN } else { SLOWDOWN };
    let slows = ratio(block.step_ns, block.step_ns - lag_ns).is_some_and(|slowdown| slowdown >= least);
    if lag_ns < view.settings.lag_ns || !slows {
        return None;
    }
    let from = block.first.map_or_else(|| "the last steps".to_owned(), |first| format!("the steps from {first} on"));
    let percent = |share: f64| share * 100.0;
    Some(Found {
        member,
        why,
        lag_ns,
        step_ns: block.step_ns,
        steps: block.steps,
        begin_ns: block.begin_ns,
        // The next block may take as long.
        hold_ns: 2 * (view.now_ns - block.begin_ns),
        evidence: vec![
            Evidence { name: "tensor_active_ratio", value: mean.tensor },
            Evidence { name: "peers_tensor_active_ratio", value: tensor },
            Evidence { name: "busy_ratio", value: mean.busy },
            Evidence { name: "peers_busy_ratio", value: busy },
        ],
        numbers: format!(
            "In {from} the tensor cores of its GPU were active in {:.1} % of the time, those of the other ranks in {:.1} % at \
             the median; the GPU was busy in {:.0} % of it, theirs in {:.0} %. The steps of all ranks take the \
             same time, because they wait for each other.",
            percent(mean.tensor),
            percent(tensor),
            percent(mean.busy),
            percent(busy),
        ),
        certainty: Certainty::Suspected,
    })
}

impl Found<'_> {
    /// The same, with the garbage collector as the reason if it explains the lag; `collected_ns` is how long it stopped a rank in a
    /// step.
    fn explained(self, group: &Group<'_>, collected_ns: impl Fn(&Member<'_>) -> i64) -> Self {
        let own_ns = collected_ns(self.member);
        let mut all_ns: Vec<i64> = group.members.iter().map(collected_ns).collect();
        all_ns.sort_unstable();
        let more_ns = median_of_others(&all_ns, own_ns).map_or(0, |others_ns| own_ns - others_ns);
        #[allow(clippy::cast_precision_loss, reason = "a share of milliseconds")]
        let is_most = more_ns > 0 && more_ns as f64 >= COLLECTED_SHARE * self.lag_ns as f64;
        if !is_most || !matches!(self.why, Why::Phase(_) | Why::Host) {
            return self;
        }
        let mut evidence = self.evidence;
        evidence.push(Evidence { name: "gc_seconds", value: seconds(own_ns) });
        Self { why: Why::Collector(more_ns), evidence, ..self }
    }

    /// `peers` is how many ranks wait for it.
    fn sign(self, view: &View<'_>, slowdown: Option<f64>, peers: usize) -> Sign {
        let step = self.member.step;
        let (job, rank) = (&step.key.0, step.key.1);
        let lag = HumanDuration(self.lag_ns);
        let what = match &self.why {
            Why::Phase(name) => {
                format!("Rank {rank} of {job} takes {lag} longer in {name} than the other ranks, which wait for it.")
            }
            Why::Data => {
                format!("Rank {rank} of {job} waits {lag} longer for data than the other ranks, which wait for it.")
            }
            Why::Computes => {
                format!(
                    "Rank {rank} of {job} computes longer than the other ranks, which wait for it: up to {lag} a step."
                )
            }
            Why::Throttled => format!(
                "Rank {rank} of {job} computes longer because its GPU's clocks are held back, and the other ranks wait for it: up \
                 to {lag} a step."
            ),
            Why::Host => format!(
                "The host of rank {rank} of {job} is late: its GPU has nothing to do while the other ranks wait for it, up to \
                 {lag} a step."
            ),
            Why::Collector(more_ns) => format!(
                "Python's garbage collector stops rank {rank} of {job} for {} a step longer than the other ranks, which wait for \
                 it.",
                HumanDuration(*more_ns)
            ),
        };
        let advice = match &self.why {
            Why::Phase(_) | Why::Computes => {
                "Compare its input (sequence lengths, experts), its GPU's clocks and throttle reasons, and its host's load with \
                 its peers'."
            }
            Why::Data => "Look at its data loader: workers, prefetching, and the storage that this rank reads.",
            Why::Throttled => {
                "Look at the finding gpu_throttled of its GPU: heat, the power brake, or the power supply."
            }
            Why::Host => {
                "Look at what its process does between kernels (py-spy dump, or a trace): logging, a lock, a CPU that others use."
            }
            Why::Collector(_) => {
                "Call gc.freeze() once the model is built, and gc.disable() with a gc.collect() on all ranks in the same step; look \
                 for objects that this rank makes in each step and keeps, such as lists of losses or log records."
            }
        };
        let numbers = [
            Some(Evidence { name: "lag_seconds", value: seconds(self.lag_ns) }),
            slowdown.map(|value| Evidence { name: "slowdown_ratio", value }),
        ];
        Sign {
            kind: FindingKind::Straggler,
            subject: Subject { gpu: step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
            severity: Severity::Warning,
            certainty: self.certainty,
            begin_ns: self.begin_ns,
            until_ns: view.now_ns + view.settings.hold_ns.max(self.hold_ns),
            step: step.number,
            code: None,
            waiting_ranks: Vec::new(),
            lost_ns: i64::try_from(self.steps * peers).ok().map(|times| self.lag_ns.saturating_mul(times)),
            evidence: numbers.into_iter().flatten().chain(self.evidence).collect(),
            text: Text { what, why: self.numbers, advice: advice.to_owned() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::compare::Compare;
    use super::super::hand::Hand;
    use super::super::steps::Phase;
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::gpu::Activity;
    use crate::mesh::Mesh;

    /// Each rank's phases in milliseconds, and what its GPU does: tensor cores, busy; or [`THROTTLED`] for busy with clocks that
    /// are held back.
    type Does<'a> = (&'a [(&'a str, i64)], f64, f64);

    /// Runs steps of 130 ms and returns the signs, each with its step.
    fn run(
        hand: &mut Hand,
        detector: &mut Compare,
        steps: std::ops::Range<u64>,
        of: impl Fn(u64) -> Vec<Does<'static>>,
    ) -> Vec<Sign> {
        run_of(130, hand, detector, steps, of)
    }

    fn run_of(
        step_ms: i64,
        hand: &mut Hand,
        detector: &mut Compare,
        steps: std::ops::Range<u64>,
        of: impl Fn(u64) -> Vec<Does<'static>>,
    ) -> Vec<Sign> {
        let mut signs = Vec::new();
        for nth in steps {
            let (begin_ns, does) = (hand.now_ns.max(SECOND_NS), of(nth));
            for (gpu, (_, tensor, busy)) in does.iter().enumerate() {
                let activity = Activity { tensor_active_ratio: Some(*tensor), ..Activity::default() };
                let throttle_reasons = (*busy > 1.0).then_some(0x80);
                let medium =
                    Medium { utilization_ratio: Some(busy.min(1.0)), throttle_reasons, activity, ..Medium::default() };
                hand.gpus[gpu].set_medium(begin_ns, medium);
            }
            hand.now_ns = begin_ns;
            hand.look(detector);
            let steps = does.iter().enumerate().map(|(rank, (phases, ..))| {
                let step = Hand::step(rank, nth, begin_ns, phases);
                Step { end_ns: begin_ns + step_ms * MILLISECOND_NS, ..step }
            });
            signs.extend(hand.steps_end(detector, steps.collect()));
        }
        signs
    }

    /// Always busy, with clocks that are held back.
    const THROTTLED: f64 = 2.0;
    const EQUAL: &[(&str, i64)] = &[("data", 2), ("forward", 22), ("backward", 88), ("optimizer", 12)];
    const LATE_FORWARD: &[(&str, i64)] = &[("data", 2), ("forward", 47), ("backward", 66), ("optimizer", 12)];
    const LATE_DATA: &[(&str, i64)] = &[("data", 30), ("forward", 22), ("backward", 61), ("optimizer", 12)];

    fn ranks(signs: &[Sign]) -> Vec<u32> {
        let mut ranks: Vec<u32> = signs.iter().filter_map(|sign| sign.subject.rank).collect();
        ranks.dedup();
        ranks
    }

    #[test]
    fn a_phase_that_the_peers_wait_for_later_names_its_rank_by_the_marks_alone() {
        for (late, why) in [(LATE_FORWARD, "takes 25 ms longer in forward"), (LATE_DATA, "waits 28 ms longer for data")]
        {
            let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
            let signs = run(&mut hand, &mut detector, 0..30, |_| vec![(EQUAL, 0.0, 0.0), (late, 0.0, 0.0)]);
            assert_eq!(ranks(&signs), [1]);
            assert_eq!(
                (signs[0].step, signs[0].certainty),
                (Some(7), Certainty::Observed),
                "five steps after the warm-up"
            );
            assert!(signs[0].text.what.contains(why), "{}", signs[0].text.what);
            assert!(signs[0].text.why.contains("more in backward"), "{}", signs[0].text.why);
            let lag_ms = if late == LATE_FORWARD { 25 } else { 28 };
            assert_eq!(signs[0].lost_ns, Some(lag_ms * MILLISECOND_NS), "by its one peer, in one step");
            assert_eq!(signs[0].begin_ns, SECOND_NS + 3 * 130 * MILLISECOND_NS, "the first after the warm-up");
            assert!(Hand::ratios(&detector, 1).compute_lag.is_some_and(|ratio| (1.2..1.3).contains(&ratio)));
            assert_eq!(Hand::ratios(&detector, 0).compute_lag, None);
        }
    }

    /// Steps of two ranks with a collective each, which begins after this many milliseconds and ends after 110. `sees` is whether
    /// the GPUs have readings.
    fn beside(of: [(&'static [(&'static str, i64)], i64); 2], sees: bool) -> Vec<Sign> {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let mut signs = Vec::new();
        for nth in 0..30 {
            let begin_ns = i64::try_from(nth).expect("small") * SECOND_NS;
            for gpu in hand.gpus.iter().filter(|_| sees) {
                let activity = Activity { tensor_active_ratio: Some(0.03), ..Activity::default() };
                gpu.set_medium(begin_ns, Medium { utilization_ratio: Some(1.0), activity, ..Medium::default() });
            }
            let steps = of.into_iter().enumerate().map(|(rank, (phases, from_ms))| {
                let mut step = Hand::step(rank, nth, begin_ns, phases);
                let (from_ns, to_ns) = (begin_ns + from_ms * MILLISECOND_NS, begin_ns + 110 * MILLISECOND_NS);
                let name = "comm".into();
                step.phases.push(Phase { name, begin_ns: from_ns, end_ns: to_ns, retries: [None; 2] });
                step
            });
            signs.extend(hand.steps_end(&mut detector, steps.collect()));
        }
        signs
    }

    /// The host of rank 1 is late by 40 of 130 ms, of which its garbage collector takes this long, and that of its peer this long.
    fn collects(own_ms: i64, peers_ms: i64) -> Vec<String> {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let mut signs = Vec::new();
        for nth in 0..60 {
            let begin_ns = hand.now_ns.max(SECOND_NS);
            for (gpu, busy) in hand.gpus.iter().zip([1.0, 0.7]) {
                let activity = Activity { tensor_active_ratio: Some(0.3), ..Activity::default() };
                gpu.set_medium(begin_ns, Medium { utilization_ratio: Some(busy), activity, ..Medium::default() });
            }
            hand.now_ns = begin_ns;
            hand.look(&mut detector);
            let steps = [peers_ms, own_ms].into_iter().enumerate().map(|(rank, ms)| {
                let step = Hand::step(rank, nth, begin_ns, &[("forward", 40), ("backward", 70), ("optimizer", 20)]);
                Step { collected_ns: Some(ms * MILLISECOND_NS), ..step }
            });
            signs.extend(hand.steps_end(&mut detector, steps.collect()));
        }
        assert!(!signs.is_empty() && signs.iter().all(|sign| sign.subject.rank == Some(1)), "{signs:?}");
        let has_evidence = |sign: &Sign| sign.evidence.iter().any(|evidence| evidence.name == "gc_seconds");
        assert!(signs.iter().all(|sign| has_evidence(sign) == sign.text.what.contains("collector")), "{signs:?}");
        let mut said: Vec<String> = signs.into_iter().map(|sign| sign.text.what).collect();
        said.dedup();
        said
    }

    #[test]
    fn the_garbage_collector_is_named_if_it_takes_half_of_the_lag_longer_than_that_of_the_others() {
        let collector = |ms: u32| {
            format!(
                "Python's garbage collector stops rank 1 of j for {ms} ms a step longer than the other ranks, which wait for it."
            )
        };
        assert_eq!(collects(30, 5), [collector(25)]);
        assert_eq!(collects(25, 5), [collector(20)]);
        for (own_ms, peers_ms) in [(18, 0), (60, 45), (0, 0)] {
            let said = collects(own_ms, peers_ms);
            assert!(said.iter().all(|what| what.starts_with("The host of rank 1")), "{own_ms}, {peers_ms}: {said:?}");
        }
    }

    #[test]
    fn a_phase_that_is_longer_by_the_garbage_collector_is_named_so() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let mut signs = Vec::new();
        for nth in 0..30 {
            let begin_ns = i64::try_from(nth).expect("small") * SECOND_NS;
            let steps = [(EQUAL, None), (LATE_FORWARD, Some(15 * MILLISECOND_NS))].into_iter().enumerate();
            let steps = steps
                .map(|(rank, (phases, collected_ns))| Step { collected_ns, ..Hand::step(rank, nth, begin_ns, phases) });
            signs.extend(hand.steps_end(&mut detector, steps.collect()));
        }
        assert!(!signs.is_empty() && ranks(&signs) == [1]);
        assert!(signs.iter().all(|sign| sign.text.what.contains("garbage collector")), "{signs:?}");
        assert!(signs.iter().all(|sign| sign.text.why.contains("its forward took")), "{signs:?}");
    }

    /// The marks of `watch` under DDP and FSDP2: what is left of a rank's phases beside its collectives is chance.
    #[test]
    fn communication_that_runs_beside_the_work_neither_names_a_rank_nor_hides_one() {
        for (late, expected) in [(EQUAL, vec![]), (LATE_FORWARD, vec![1])] {
            let signs = beside([(EQUAL, 10), (late, 75)], true);
            assert_eq!(ranks(&signs), expected);
            assert!(signs.iter().all(|sign| sign.text.what.contains("takes 25 ms longer in forward")), "{signs:?}");
        }
        // In two phases also where nothing else is known, as of older GPUs: then nobody is named by what is left.
        assert_eq!(ranks(&beside([(EQUAL, 2), (EQUAL, 20)], false)), [0_u32; 0]);
    }

    /// DDP, late in the backward pass, where nothing is known of the GPUs: the late rank comes to the collective last.
    #[test]
    fn communication_in_one_phase_shows_who_comes_last_where_nothing_else_does() {
        assert_eq!(ranks(&beside([(EQUAL, 30), (EQUAL, 90)], false)), [1]);
        assert_eq!(ranks(&beside([(EQUAL, 30), (EQUAL, 30)], false)), [0_u32; 0]);
    }

    /// The host of each rank runs ahead of its GPU, and waits for it after its last phase.
    #[test]
    fn peers_may_wait_after_their_last_phase() {
        const AHEAD: &[(&str, i64)] = &[("data", 2), ("forward", 10), ("backward", 20), ("optimizer", 5)];
        const LATE: &[(&str, i64)] = &[("data", 42), ("forward", 10), ("backward", 20), ("optimizer", 5)];
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let signs = run(&mut hand, &mut detector, 0..20, |_| vec![(AHEAD, 0.0, 0.0), (LATE, 0.0, 0.0)]);
        assert_eq!(ranks(&signs), [1]);
        assert!(signs[0].text.what.contains("waits 40 ms longer for data"), "{}", signs[0].text.what);
        assert!(signs[0].text.why.contains("40 ms more in unmarked time"), "{}", signs[0].text.why);
        // Its GPU idles for that reason, and says so of the host alone; the marks know better.
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let signs = run(&mut hand, &mut detector, 0..40, |nth| {
            let is_late = nth < 25;
            vec![(AHEAD, 0.03, 1.0), (if is_late { LATE } else { AHEAD }, 0.03, 0.6)]
        });
        assert!(signs.iter().all(|sign| sign.text.what.contains("for data")) && signs.len() > 15, "{signs:?}");
        // In which phase such a host is held up says nothing.
        const HELD: &[(&str, i64)] = &[("data", 2), ("forward", 10), ("backward", 60), ("optimizer", 5)];
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        assert!(run(&mut hand, &mut detector, 0..20, |_| vec![(AHEAD, 0.0, 0.0), (HELD, 0.0, 0.0)]).is_empty());
    }

    /// The peer waits for it in backward of the next step, so that the peer's backward is longer.
    #[test]
    fn who_waits_in_a_phase_is_not_late_in_it() {
        const LATE_END: &[(&str, i64)] = &[("data", 2), ("forward", 22), ("backward", 68), ("optimizer", 37)];
        const WAITS: &[(&str, i64)] = &[("data", 2), ("forward", 22), ("backward", 93), ("optimizer", 12)];
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let mut signs = Vec::new();
        for nth in 0..20 {
            let begin_ns = SECOND_NS + nth * 130 * MILLISECOND_NS;
            let early = Hand::step(1, nth.unsigned_abs(), begin_ns - 25 * MILLISECOND_NS, WAITS);
            signs.extend(
                hand.steps_end(&mut detector, vec![Hand::step(0, nth.unsigned_abs(), begin_ns, LATE_END), early]),
            );
        }
        assert!(signs.is_empty(), "{signs:?}");
    }

    #[test]
    fn steps_that_differ_in_length_need_more_blocks() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let mut first = None;
        for nth in 0..100 {
            let of = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.06, 1.0)];
            let signs = run_of(if nth % 2 == 0 { 125 } else { 250 }, &mut hand, &mut detector, nth..nth + 1, of);
            first = first.or_else(|| signs.first().and_then(|sign| sign.step));
        }
        assert_eq!(first, Some(52), "five blocks after the warm-up");
    }

    #[test]
    fn the_median_of_the_others_leaves_one_value_out() {
        let of = |sorted: &[i64], own| median_of_others(sorted, own);
        assert_eq!([of(&[1, 5], 1), of(&[1, 5], 5), of(&[7], 7), of(&[], 7)], [Some(5), Some(1), None, None]);
        assert_eq!([1, 2, 3].map(|own| of(&[1, 2, 3], own)), [Some(2), Some(1), Some(1)]);
        assert_eq!([1, 2, 3, 9].map(|own| of(&[1, 2, 3, 9], own)), [3, 3, 2, 2].map(Some));
        assert_eq!(of(&[4, 4, 4], 4), Some(4));
    }

    #[test]
    fn what_it_costs_is_bounded_by_what_steps_took_before() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let cost = |signs: &[Sign]| signs.last().map(|sign| sign.evidence[0].value);
        let lost_s = |signs: &[Sign]| signs.last().and_then(|sign| sign.lost_ns).map(seconds);
        let late = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.06, 1.0)];
        assert_eq!(cost(&run(&mut hand, &mut detector, 0..40, late)), Some(0.065), "half of the step at most");
        // Steps of 130 ms that had taken 100.
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        run_of(100, &mut hand, &mut detector, 0..30, |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.03, 1.0)]);
        let signs = run(&mut hand, &mut detector, 30..70, late);
        assert!(cost(&signs).is_some_and(|cost| (0.03..0.035).contains(&cost)), "{:?}", cost(&signs));
        assert!(lost_s(&signs).is_some_and(|lost| (0.3..0.35).contains(&lost)), "ten steps: {:?}", lost_s(&signs));
    }

    #[test]
    fn where_the_marks_are_equal_the_gpus_name_the_rank_and_why() {
        let cases = [
            ((0.0325, 0.95), (0.0516, 0.93), Some("computes longer than the other ranks")),
            ((0.0209, 0.97), (0.0216, 0.49), Some("The host of rank 1 of j is late")),
            ((0.0436, 0.95), (0.0459, 0.98), None),
        ];
        for (first, second, why) in cases {
            let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
            let of = |_| vec![(EQUAL, first.0, first.1), (EQUAL, second.0, second.1)];
            let signs = run(&mut hand, &mut detector, 0..33, of);
            assert_eq!(ranks(&signs), why.map_or(vec![], |_| vec![1]), "{why:?}");
            let Some(why) = why else { continue };
            assert_eq!(
                (signs[0].step, signs[0].certainty),
                (Some(22), Certainty::Suspected),
                "two blocks after the warm-up"
            );
            assert_eq!(signs[0].begin_ns, SECOND_NS + 3 * 130 * MILLISECOND_NS, "since the first of them");
            assert!(signs[0].text.what.contains(why), "{}", signs[0].text.what);
        }
    }

    #[test]
    fn clocks_that_are_held_back_are_the_reason_where_they_are() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let of = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.05, THROTTLED)];
        let signs = run(&mut hand, &mut detector, 0..33, of);
        assert!(signs[0].text.what.contains("clocks are held back"), "{}", signs[0].text.what);
    }

    #[test]
    fn who_lags_in_turn_and_two_at_once_are_not_named() {
        let (mut hand, mut detector) = (Hand::with_ranks(3), Compare::default());
        let in_turn = |nth: u64| {
            let late = usize::try_from(nth % 3).expect("small");
            (0..3).map(|rank| if rank == late { (LATE_FORWARD, 0.05, 1.0) } else { (EQUAL, 0.04, 1.0) }).collect()
        };
        assert!(run(&mut hand, &mut detector, 0..60, in_turn).is_empty());
        let both = |_| vec![(EQUAL, 0.03, 1.0), (LATE_FORWARD, 0.05, 1.0), (LATE_FORWARD, 0.05, 1.0)];
        let (mut hand, mut detector) = (Hand::with_ranks(3), Compare::default());
        assert!(run(&mut hand, &mut detector, 0..40, both).is_empty());
    }

    #[test]
    fn what_may_be_a_pipeline_and_what_does_something_else_is_not_compared() {
        let with = |phases: &'static [(&'static str, i64)], mesh: Option<&str>| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
            for (rank, now) in hand.ranks.iter_mut().enumerate() {
                let axes = mesh.map(|name| {
                    Mesh::checked([(name.to_owned(), u32::try_from(rank).expect("small"))].into()).expect("a mesh")
                });
                now.mesh = axes.map(Arc::new);
            }
            let of = |_| vec![(phases, 0.03, 1.0), (phases, 0.05, 1.0)];
            run(&mut hand, &mut detector, 0..40, of).len()
        };
        const ROUNDS: &[(&str, i64)] = &[("forward", 20), ("backward", 40), ("forward", 20), ("backward", 40)];
        const SAVES: &[(&str, i64)] = &[("forward", 20), ("backward", 40), ("checkpoint", 60)];
        assert!(with(EQUAL, None) > 0 && with(ROUNDS, Some("dp")) > 0);
        assert_eq!((with(ROUNDS, None), with(EQUAL, Some("pp")), with(SAVES, None)), (0, 0, 0));
    }
}
