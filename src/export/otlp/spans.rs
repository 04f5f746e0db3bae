//! Steps as traces: a span for each step of each rank, its phases below it, with the times that the job gave.
//!
//! Enters: ended steps and phases with their memory. Leaves: spans, and exemplars that lead from a duration's histogram
//! to the trace of the slowest. A rank's phases wait until its step has ended, because only then is it known whether
//! the step is slow and which phase lies within which. Invariants: the number of waiting phases is bounded, and those
//! that do not fit are counted. Absent on purpose: layers, of which one step has thousands; recordings have them.

use super::context::Context;
use super::findings::is_found;
use super::metrics::{Exemplars, unix};
use super::settings::{Phases, Spans};
use super::span::{exemplar, row, span};
use super::stats::{DropReason, OtlpStats, Signal};
use super::trace::{self, traceparent};
use crate::metrics::Labels;
use highwater_core::clock::SECOND_NS;
use highwater_core::histogram::Exponential;
use highwater_core::jobs::{Ended, EndedBy, JobId, Rank};
use highwater_core::phases::{Attributed, Ledger, Log, RankKey};
use highwater_core::wire::{Kind, Scalar};
use opentelemetry::trace::{SpanContext, SpanId, TraceId};
use opentelemetry_sdk::trace::SpanData;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

/// The maximum number of waiting spans over all ranks: phases that wait for the end of their step, and steps that wait for
/// a finding, with their phases.
const MOST_WAITING: usize = 16_384;
/// How long a phase outside any open step waits for the end of its step before it is sent without the step. Attribution
/// delays that end by at most 2 s.
const PATIENCE_NS: i64 = 5 * SECOND_NS;
/// How long steps wait for a finding to be raised, if only steps with a finding are sent.
const HELD_NS: i64 = 3 * SECOND_NS;
/// The durations of a rank that was silent for this long are forgotten.
const SILENCE_NS: i64 = 600 * SECOND_NS;
/// Steps of a rank before any of them can be called slow.
const FEWEST_STEPS: u64 = 20;

/// Makes spans of what ends.
pub struct Traces {
    which: Spans,
    phases: Phases,
    cursor: u64,
    waiting: usize,
    ranks: BTreeMap<RankKey, Waiting>,
    /// Steps that may still get a finding, with their phases.
    held: VecDeque<(Arc<Attributed>, Vec<Arc<Attributed>>)>,
}

/// The phases of one rank that wait for the end of their step, and the durations of the rank's steps so far.
#[derive(Default)]
struct Waiting {
    phases: Vec<Arc<Attributed>>,
    durations: Exponential,
    heard_ns: i64,
}

/// What has ended since the last turn.
#[derive(Default)]
pub struct New {
    ended: Vec<Arc<Attributed>>,
    /// How many more had ended but are no longer kept.
    lost: u64,
    /// When the open step of each rank began, for ranks that have one.
    open_steps: HashMap<RankKey, i64>,
}

/// The result of one turn.
#[derive(Default)]
pub struct SpanTurn {
    /// Spans, children before parents.
    pub spans: Vec<SpanData>,
    /// The slowest step and phase of each series.
    pub exemplars: Exemplars,
}

impl Traces {
    /// No spans yet, for steps chosen by `which`, with their phases in this form.
    #[must_use]
    pub fn new(which: Spans, phases: Phases) -> Self {
        Self { which, phases, cursor: 0, waiting: 0, ranks: BTreeMap::new(), held: VecDeque::new() }
    }

    /// Skips everything that has ended so far.
    pub fn skip_to(&mut self, log: &Log) {
        self.cursor = log.phases.count();
    }

    /// What has ended since the last call.
    pub fn new_of(&mut self, ledger: &Ledger) -> New {
        let (ended, lost) = {
            let log = ledger.ended();
            let new = log.phases.since(self.cursor);
            self.cursor = log.phases.count();
            new
        };
        // Read after the ended steps, so that no step is seen as ended and open at once.
        let jobs = ledger.open();
        let step = |(job, number, rank): (&JobId, u32, &Rank)| {
            rank.open_step().map(|step| ((job.clone(), number), step.begin_ns))
        };
        New { ended, lost, open_steps: jobs.ranks().filter_map(step).collect() }
    }

    /// The earliest begin of the steps that this turn may decide about. Findings that ended before it are not needed.
    #[must_use]
    pub fn begin_ns(&self, new: &New) -> Option<i64> {
        let steps = new.ended.iter().chain(self.held.iter().map(|(step, _)| step));
        let steps = steps.filter(|one| one.ended.open.kind == Kind::Step);
        steps.map(|step| step.ended.open.begin_ns).min()
    }

    /// Makes spans of what has ended.
    pub fn advance(&mut self, new: New, context: &Context, stats: &OtlpStats) -> SpanTurn {
        let mut turn = SpanTurn::default();
        if new.lost > 0 {
            stats.add_lost(Signal::Spans, DropReason::Overrun, new.lost);
        }
        for attributed in new.ended {
            match attributed.ended.open.kind {
                Kind::Phase => self.keep(attributed, stats),
                Kind::Step => self.end_step(attributed, context, &mut turn),
                Kind::Layer => {}
            }
        }
        self.send_orphans(&new.open_steps, context, &mut turn);
        self.send_held(context.now_ns - HELD_NS, context, &mut turn);
        turn
    }

    /// Makes spans of what has ended, and of phases whose steps have not, because the daemon ends before them.
    pub fn finish(&mut self, new: New, context: &Context, stats: &OtlpStats) -> SpanTurn {
        let mut turn = self.advance(new, context, stats);
        self.send_held(i64::MAX, context, &mut turn);
        let left: Vec<_> = self.ranks.values_mut().flat_map(|rank| std::mem::take(&mut rank.phases)).collect();
        self.waiting = 0;
        for phase in left {
            self.export_orphan(&phase, context, &mut turn);
        }
        turn
    }

    fn keep(&mut self, phase: Arc<Attributed>, stats: &OtlpStats) {
        if self.waiting >= MOST_WAITING {
            stats.add_lost(Signal::Spans, DropReason::Overrun, 1);
            return;
        }
        self.waiting += 1;
        let rank = self.ranks.entry((phase.ended.job.clone(), phase.ended.rank)).or_default();
        rank.heard_ns = rank.heard_ns.max(phase.ended.end_ns);
        rank.phases.push(phase);
    }

    fn end_step(&mut self, step: Arc<Attributed>, context: &Context, turn: &mut SpanTurn) {
        let ended = &step.ended;
        let rank = self.ranks.entry((ended.job.clone(), ended.rank)).or_default();
        rank.heard_ns = rank.heard_ns.max(ended.end_ns);
        let is_own = |phase: &Arc<Attributed>| is_within(&phase.ended, ended);
        let (own, others): (Vec<_>, Vec<_>) = std::mem::take(&mut rank.phases).into_iter().partition(is_own);
        // The orphans: phases of an earlier step whose end never came. They are sent without that step.
        let (orphans, later) = others.into_iter().partition::<Vec<_>, _>(|phase| phase.ended.end_ns <= ended.end_ns);
        rank.phases = later;
        self.waiting -= own.len() + orphans.len();
        #[allow(clippy::cast_precision_loss, reason = "to a bucket")]
        let seconds = (ended.end_ns - ended.open.begin_ns) as f64 * 1e-9;
        let is_chosen = match self.which {
            Spans::Slow(share) => {
                let is_known = rank.durations.count() >= FEWEST_STEPS;
                is_known && rank.durations.quantile(share).is_some_and(|limit_s| seconds > limit_s)
            }
            which => is_chosen(which, ended.open.step),
        };
        if ended.by == EndedBy::End {
            rank.durations.record(seconds, 1);
        }
        if is_chosen {
            self.decide_step(step, own, context, turn);
        }
        for phase in orphans {
            self.export_orphan(&phase, context, turn);
        }
    }

    /// Sends a chosen step, or lets it wait if it needs a finding and there is room.
    fn decide_step(
        &mut self,
        step: Arc<Attributed>,
        own: Vec<Arc<Attributed>>,
        context: &Context,
        turn: &mut SpanTurn,
    ) {
        let needs_finding = self.which == Spans::Findings;
        if needs_finding && self.waiting + own.len() < MOST_WAITING {
            self.waiting += own.len() + 1;
            self.held.push_back((step, own));
        } else if !needs_finding || is_found(&step, context) {
            self.export_step(&step, own, context, turn);
        }
    }

    /// Decides about the steps that ended before `until_ns`. Ranks end their steps at different times, so all are
    /// checked.
    fn send_held(&mut self, until_ns: i64, context: &Context, turn: &mut SpanTurn) {
        for (step, own) in std::mem::take(&mut self.held) {
            if step.ended.end_ns >= until_ns {
                self.held.push_back((step, own));
                continue;
            }
            self.waiting -= own.len() + 1;
            if is_found(&step, context) {
                self.export_step(&step, own, context, turn);
            }
        }
    }

    fn export_step(&self, step: &Attributed, mut phases: Vec<Arc<Attributed>>, context: &Context, turn: &mut SpanTurn) {
        let place = place_of_step(&step.ended);
        if self.phases == Phases::Attributes {
            phases.iter().for_each(|phase| turn.add_exemplar(phase, &place.own, context));
            turn.add_exemplar(step, &place.own, context);
            turn.spans.push(row(step, &phases, place.own, place.parent.as_ref(), context));
            return;
        }
        // Outer phases come before inner ones.
        phases.sort_by_key(|phase| (phase.ended.open.begin_ns, std::cmp::Reverse(phase.ended.end_ns)));
        let mut around: Vec<(i64, SpanContext)> = Vec::new();
        for phase in &phases {
            around.retain(|(end_ns, _)| *end_ns >= phase.ended.end_ns);
            let inherited = || around.last().map_or(&place.own, |(_, span)| span).clone();
            let parent = own_parent(&phase.ended).unwrap_or_else(inherited);
            // A phase that names another trace is in that trace, with all phases within it.
            let own = trace::own(parent.trace_id(), span_of_phase(place.own.trace_id(), &phase.ended));
            around.push((phase.ended.end_ns, own.clone()));
            turn.add(phase, own, Some(&parent), context);
        }
        turn.add(step, place.own, place.parent.as_ref(), context);
    }

    /// Exports a phase without its step. Its parent is the one that the job named, else the span that its step would have
    /// had; without a step number, it is a root span.
    fn export_orphan(&self, phase: &Attributed, context: &Context, turn: &mut SpanTurn) {
        let ended = &phase.ended;
        let is_chosen = match self.which {
            // Without the step, it is not known whether it is slow or has a finding.
            Spans::Slow(_) | Spans::Findings => false,
            which => is_chosen(which, ended.open.step),
        };
        if !is_chosen {
            return;
        }
        let parent = own_parent(ended).or_else(|| ended.open.step.map(|_| place_of_step(ended).own));
        let begin = ended.open.begin_ns.to_string();
        let rank = ended.rank.to_string();
        let alone = || trace::trace_of(&[&job_of(ended), run_of(ended), &rank, &ended.open.name, &begin]);
        let trace = parent.as_ref().map_or_else(alone, SpanContext::trace_id);
        let own = trace::own(trace, span_of_phase(trace, ended));
        turn.add(phase, own, parent.as_ref(), context);
    }

    /// Sends phases whose step will not end, and forgets ranks that were silent for long.
    fn send_orphans(&mut self, open_steps: &HashMap<RankKey, i64>, context: &Context, turn: &mut SpanTurn) {
        let mut orphans = Vec::new();
        for (key, rank) in &mut self.ranks {
            let step_ns = open_steps.get(key).copied().unwrap_or(i64::MAX);
            orphans.extend(rank.phases.extract_if(.., |phase| {
                phase.ended.open.begin_ns < step_ns && phase.ended.end_ns < context.now_ns - PATIENCE_NS
            }));
        }
        self.ranks.retain(|_, rank| !rank.phases.is_empty() || rank.heard_ns >= context.now_ns - SILENCE_NS);
        self.waiting -= orphans.len();
        for phase in orphans {
            self.export_orphan(&phase, context, turn);
        }
    }
}

impl SpanTurn {
    fn add(&mut self, attributed: &Attributed, own: SpanContext, parent: Option<&SpanContext>, context: &Context) {
        self.add_exemplar(attributed, &own, context);
        self.spans.push(span(attributed, own, parent, context));
    }

    /// Makes this an exemplar that leads to the span `own`, if it is the slowest of its series.
    fn add_exemplar(&mut self, attributed: &Attributed, own: &SpanContext, context: &Context) {
        let ended = &attributed.ended;
        // What its rank ended is in no histogram of durations.
        if ended.by != EndedBy::End {
            return;
        }
        let seconds = exemplar(ended, own, unix(ended.end_ns + context.shift_ns));
        let of_rank = Labels::of_rank(&(ended.job.clone(), ended.rank));
        let labels = match ended.open.kind {
            Kind::Phase => of_rank.with(Arc::clone(&ended.open.name)),
            Kind::Step | Kind::Layer => of_rank,
        };
        let slowest = self.exemplars.entry(labels).or_insert_with(|| seconds.clone());
        if super::span::seconds_of(&seconds) > super::span::seconds_of(slowest) {
            *slowest = seconds;
        }
    }
}

/// Whether `which` selects a step with this number. Slow steps and steps with a finding are decided later, so they pass.
fn is_chosen(which: Spans, step: Option<u64>) -> bool {
    match which {
        Spans::Off => false,
        Spans::All => true,
        // Every rank chooses the same steps.
        Spans::OneIn(number) => step.unwrap_or(0).is_multiple_of(number.max(1)),
        Spans::Slow(_) | Spans::Findings => true,
    }
}

/// Whether a phase belongs to a step of the same rank.
fn is_within(phase: &Ended, step: &Ended) -> bool {
    let same = phase.open.step.is_none() || step.open.step.is_none() || phase.open.step == step.open.step;
    same && phase.open.begin_ns >= step.open.begin_ns && phase.end_ns <= step.end_ns
}

/// The place of a step's span: its own, and its parent's if the job named one.
struct Place {
    own: SpanContext,
    parent: Option<SpanContext>,
}

/// The place of a step, or of the step that a phase is part of.
fn place_of_step(ended: &Ended) -> Place {
    let given = own_parent(ended).filter(|_| ended.open.kind == Kind::Step);
    let (rank, run) = (ended.rank.to_string(), run_of(ended));
    let trace = match (&given, ended.open.step) {
        (Some(given), _) => given.trace_id(),
        (None, Some(step)) => trace::trace_of(&[&job_of(ended), run, &step.to_string()]),
        // Without a number, ranks cannot know that they mean the same step.
        (None, None) => trace::trace_of(&[&job_of(ended), run, &rank, &ended.open.begin_ns.to_string()]),
    };
    let step = ended.open.step.map(|step| step.to_string()).unwrap_or_default();
    let own = trace::own(trace, trace::span_of(trace, &["step", &job_of(ended), &rank, &step]));
    Place { own, parent: given }
}

fn span_of_phase(trace: TraceId, ended: &Ended) -> SpanId {
    let (rank, begin) = (ended.rank.to_string(), ended.open.begin_ns.to_string());
    trace::span_of(trace, &["phase", &job_of(ended), &rank, &ended.open.name, &begin])
}

fn own_parent(ended: &Ended) -> Option<SpanContext> {
    traceparent(attribute(ended, "traceparent")?)
}

/// The job's name in the IDs of traces and spans. Every node must derive the same IDs, and user IDs may differ among nodes.
/// So the name contains the job's namespace, but not its user.
fn job_of(ended: &Ended) -> String {
    ended.job.to_string()
}

/// Distinguishes the runs of one job.
fn run_of(ended: &Ended) -> &str {
    attribute(ended, "run_id").unwrap_or_default()
}

fn attribute<'a>(ended: &'a Ended, wanted: &str) -> Option<&'a str> {
    let attributes = ended.open.attributes.as_deref().unwrap_or_default();
    attributes.iter().find_map(|(name, value)| match value {
        Scalar::Text(text) if &**name == wanted => Some(text.as_str()),
        _ => None,
    })
}

#[cfg(test)]
mod tests;
