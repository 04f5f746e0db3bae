//! Encodes and queues what is exported: the snapshot at each interval; raw points and spans every second.
//!
//! Invariant: it reads rings, jobs and readings as a scrape does, so it never makes a tick late.

use super::around::{self, Around};
use super::context::Context;
use super::levels::Levels;
use super::metrics::{Exemplars, Mapper, Snapshot};
use super::queue::{Batch, Queue};
use super::raw::{RawPoints, requests};
use super::settings::{OtlpSettings, Raw};
use super::span_requests::SpanRequests;
use super::spans::{SpanTurn, Traces};
use super::stats::{DropReason, OtlpStats, Signal};
use crate::metrics::Snapshots;
use bytes::Bytes;
use highwater_core::detect::Finding;
use highwater_core::jobs::Mark;
use highwater_engine::node::Node;
use opentelemetry_sdk::trace::SpanData;
use prost::Message;
use std::sync::Arc;

/// The most spans in one request.
const MOST_SPANS: usize = 2_000;

/// Fills the queue.
pub struct Producer {
    settings: OtlpSettings,
    snapshots: Snapshots,
    queue: Arc<Queue>,
    stats: Arc<OtlpStats>,
    mapper: Mapper,
    levels: Levels,
    raw: RawPoints,
    around: Around,
    traces: Traces,
    span_requests: SpanRequests,
    exemplars: Exemplars,
    snapshot_ns: Option<i64>,
}

/// Whether jobs and rings are read in a regular turn or for the last time.
#[derive(Clone, Copy)]
enum End {
    /// A regular turn. Steps and points that are not complete wait for a later one.
    Turn,
    /// The daemon stops, so nothing waits any longer.
    Daemon,
}

impl Producer {
    /// A producer that has exported nothing yet. Totals of this process begin now.
    #[must_use]
    pub fn new(settings: OtlpSettings, snapshots: Snapshots, queue: Arc<Queue>, stats: Arc<OtlpStats>) -> Self {
        let start_ns = snapshots.state.clock.now_ns() + snapshots.state.clock.unix_shift_ns();
        let mapper = Mapper::new(settings.temporality, settings.resource.clone(), start_ns)
            .with_explicit_histograms(settings.explicit_histograms);
        let mut traces = Traces::new(settings.spans, settings.phases);
        traces.skip_to(&snapshots.state.ledger.ended());
        let span_requests = SpanRequests::new(&settings.resource, settings.queue_bytes);
        Self {
            settings,
            snapshots,
            queue,
            stats,
            mapper,
            levels: Levels::default(),
            raw: RawPoints::default(),
            around: Around::default(),
            traces,
            span_requests,
            exemplars: Exemplars::default(),
            snapshot_ns: None,
        }
    }

    /// Queues a snapshot of every metric.
    pub fn snapshot(&mut self) {
        if self.settings.metrics.is_none() {
            return self.exemplars.clear();
        }
        let node = self.snapshots.state.slot.node();
        let clock = self.snapshots.state.clock_of(node.as_deref());
        let now_ns = clock.now_ns() + clock.unix_shift_ns();
        // Time stands still once a recording is over. A second point at the same time would contradict the first.
        if self.snapshot_ns.replace(now_ns) == Some(now_ns) {
            return;
        }
        let families = self.snapshots.collect_for("otlp");
        let levels = self.levels.advance(node.as_ref());
        let (request, points) = self.mapper.request(Snapshot { now_ns, families, levels, exemplars: &self.exemplars });
        self.exemplars.clear();
        self.push(Signal::Metrics, points, request.encode_to_vec());
    }

    /// Queues what rings and jobs have gained since the last call.
    pub fn follow(&mut self) {
        self.follow_until(End::Turn);
    }

    fn follow_until(&mut self, end: End) {
        let node = self.snapshots.state.slot.node();
        if self.settings.metrics.is_some() {
            // Here too, because reading a minute of a busy ring at once would be a peak of memory and time.
            self.levels.advance(node.as_ref());
        }
        if self.settings.metrics.is_some() && self.settings.raw != Raw::Never {
            self.follow_rings(node.as_ref(), end);
        }
        if self.settings.traces.is_some() {
            self.follow_jobs(end);
        }
    }

    fn follow_rings(&mut self, node: Option<&Arc<Node>>, end: End) {
        let mut drawn = self.raw.draw(node);
        if self.settings.raw == Raw::Findings {
            let clock = self.snapshots.state.clock_of(node.map(|node| &**node));
            let decided_ns = match end {
                End::Turn => clock.now_ns().saturating_sub(around::HELD_NS),
                End::Daemon => i64::MAX,
            };
            self.around.hold(drawn);
            self.around.look(self.snapshots.state.findings.board().all());
            let lost;
            (drawn, lost) = self.around.release(decided_ns);
            self.stats.add_lost(Signal::Raw, DropReason::Overrun, lost);
        }
        for (request, points) in requests(&drawn, &self.settings.resource) {
            self.push(Signal::Raw, points, request.encode_to_vec());
        }
    }

    /// The findings that lasted until this time or longer.
    fn findings_since(&self, from_ns: i64) -> Vec<Finding> {
        let board = self.snapshots.state.findings.board();
        board.all().filter(|finding| finding.seen_ns >= from_ns).cloned().collect()
    }

    /// Queues everything known at the end, including what waits for the end of its step.
    pub fn finish(&mut self) {
        self.follow_until(End::Daemon);
        self.snapshot();
    }

    fn follow_jobs(&mut self, end: End) {
        let node = self.snapshots.state.slot.node();
        let clock = self.snapshots.state.clock_of(node.as_deref());
        // Jobs are locked only while new entries are copied: pointers and a few marks.
        let ledger = &self.snapshots.state.ledger;
        let new = self.traces.new_of(ledger);
        let begin_ns = self.traces.begin_ns(&new);
        let marks: Vec<Mark> = if begin_ns.is_none() { Vec::new() } else { ledger.open().marks().cloned().collect() };
        let findings = begin_ns.map(|begin_ns| self.findings_since(begin_ns)).unwrap_or_default();
        let (now_ns, shift_ns) = (clock.now_ns(), clock.unix_shift_ns());
        let context = Context { now_ns, shift_ns, marks: &marks, findings: &findings };
        let SpanTurn { spans, exemplars } = match end {
            End::Turn => self.traces.advance(new, &context, &self.stats),
            End::Daemon => self.traces.finish(new, &context, &self.stats),
        };
        for (labels, exemplar) in exemplars {
            let kept = self.exemplars.entry(labels).or_insert_with(|| exemplar.clone());
            if super::span::seconds_of(&exemplar) > super::span::seconds_of(kept) {
                *kept = exemplar;
            }
        }
        let mut spans = spans.into_iter().peekable();
        while spans.peek().is_some() {
            self.push_spans(spans.by_ref().take(MOST_SPANS).collect());
        }
    }

    fn push_spans(&self, spans: Vec<SpanData>) {
        let points = spans.len() as u64;
        match self.span_requests.request(spans) {
            Ok(payload) => self.push(Signal::Spans, points, payload),
            Err(error) => {
                tracing::error!(points, %error, "spans are dropped: no request for them fits the queue");
                self.stats.add_lost(Signal::Spans, DropReason::TooLarge, points);
            }
        }
    }

    fn push(&self, signal: Signal, points: u64, payload: impl Into<Bytes>) {
        if points > 0 {
            self.queue.push(Batch { signal, points, payload: payload.into() });
        }
    }
}
