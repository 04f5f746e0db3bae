//! `GET /api/v1/live`: what has been read and what has ended since the last event, four times a second, as server-sent
//! events.
//!
//! Enters: clients; and, only by reading, the rings and the ledger. Leaves: a stream per client. Invariants: an event is
//! built once for all clients, except the first of each, and not at all while there are none; a client that falls behind by
//! eight events, or does not read, is disconnected; events in progress count towards the limit on long answers. Absent on
//! purpose: memory from before the client connected, which it requests from `/api/v1/gpus/{gpu}/memory` and
//! `/api/v1/timeline` at the resolution that it needs.

use super::answers::{Answer, Answers};
use super::json;
use super::spans::{self, RankSpans};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use highwater_core::gpu::{GpuState, Health, Medium, THROTTLE_REASONS};
use highwater_core::phases::Span;
use highwater_core::ring;
use highwater_core::source::provenance;
use highwater_engine::node::Node;
use highwater_engine::shared_state::SharedState;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedMutexGuard, broadcast, watch};
#[cfg(test)]
use utoipa::ToSchema;

/// The time between two events.
const PERIOD: Duration = Duration::from_millis(250);
/// Events that a client may be behind.
const BEHIND: usize = 8;
/// Points of one GPU in one event. At 1 kHz there are 250; a replay may be faster.
const POINTS: usize = 1_024;
/// Steps and phases in one event; the first event of a client has the last ones. Older ones are in
/// `/api/v1/timeline`.
const SPANS: u64 = 2_048;
/// How long a browser waits before it connects again.
const RETRY: &str = "retry: 1000\n\n";

/// The clients of the live stream, and how far they have been served.
#[derive(Clone)]
pub struct Live(Arc<Shared>);

struct Shared {
    state: SharedState,
    answers: Arc<Answers>,
    /// When this daemon started, Unix nanoseconds: spans are numbered from then on.
    started_unix_ns: i64,
    served: Mutex<Served>,
    events: broadcast::Sender<Arc<Answer>>,
    stop: watch::Sender<bool>,
    alone: Arc<tokio::sync::Mutex<()>>,
}

/// What the clients have been served.
#[derive(Default)]
struct Served {
    /// Whether events are being built.
    is_running: bool,
    /// How far the last event reached.
    reach: Reach,
}

/// How far an event reaches; the next one begins there.
#[derive(Default)]
struct Reach {
    /// The newest reading of each GPU, by UUID, nanoseconds of the timeline.
    newest_ns: BTreeMap<String, i64>,
    /// The number of the next step or phase.
    spans: u64,
}

/// One event.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct Update {
    /// Unix time that all other times are relative to, nanoseconds.
    base_unix_nano: i64,
    /// When the daemon started, Unix nanoseconds. Numbers of spans are comparable while it stays the same.
    started_unix_nano: i64,
    /// What is read.
    source: Option<String>,
    /// What to show of a simulation or a replay, in a sentence; `null` where GPUs are read.
    notice: Option<String>,
    /// Why nothing is read.
    trouble: Option<String>,
    gpus: Vec<GpuNow>,
    ranks: Vec<RankSpans>,
    /// Steps and phases that have ended and are in no event, because the daemon had already forgotten them.
    lost: u64,
    /// Changes whenever a finding is raised, escalates or ends: `/api/v1/findings` has something new.
    findings_revision: u64,
}

/// A GPU at the end of an event, and its memory since the last one.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct GpuNow {
    gpu: String,
    uuid: String,
    up: bool,
    /// The newest reading's time, microseconds relative to the base; `null` if there is none.
    until_us: Option<i64>,
    /// Times, microseconds relative to the base, and bytes in use from then on; `null` begins a gap.
    #[cfg_attr(test, schema(value_type = Vec<Vec<Option<i64>>>))]
    points: Vec<(i64, Option<u64>)>,
    utilization_ratio: Option<f64>,
    /// What else it did before its newest reading.
    activity: Option<ActivityNow>,
    power_watts: Option<f64>,
    temperature_celsius: Option<f64>,
    /// Reasons that slow its clocks.
    throttle: Option<Vec<&'static str>>,
}

/// Shares of the time before a reading, 0 to 1; `null` is not known.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct ActivityNow {
    /// When it was read, microseconds relative to the base.
    at_us: i64,
    /// Of multiprocessors with a warp, their mean.
    sm: Option<f64>,
    /// Of tensor cores.
    tensor: Option<f64>,
    /// Of memory that transfers.
    dram: Option<f64>,
}

impl Live {
    /// No clients yet. Long events count towards `answers`.
    pub(super) fn new(state: SharedState, answers: Arc<Answers>) -> Self {
        let (events, _) = broadcast::channel(BEHIND);
        let started_unix_ns = state.clock.now_ns() + state.clock.unix_shift_ns();
        let (served, stop) = (Mutex::default(), watch::Sender::new(false));
        Self(Arc::new(Shared { state, answers, started_unix_ns, served, events, stop, alone: Arc::default() }))
    }

    /// Waits for the right to do long work on the past, which one request has at a time: `timeline` decodes spans,
    /// `advice` reads profiles and steps.
    pub(super) async fn alone(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.0.alone).lock_owned().await
    }

    /// Ends all streams: the daemon stops.
    pub fn stop(&self) {
        self.0.stop.send_replace(true);
    }

    /// A client: the last steps and phases, then each event.
    fn connect(&self) -> impl Stream<Item = Arc<Answer>> + use<> {
        let shared = Arc::clone(&self.0);
        let mut served = shared.served();
        // Under the lock, so that no event lies between the first one and those that follow.
        let events = shared.events.subscribe();
        if !served.is_running {
            served.is_running = true;
            // What was before is in the first event of each client.
            served.reach = shared.reach();
            let running = Arc::clone(&shared);
            tokio::spawn(async move { running.run().await });
        }
        // As far as the last event and no further: the next one, which is for all, begins there.
        let first = shared.event(None, &served.reach);
        drop(served);
        let stop = shared.stop.subscribe();
        let following = futures_util::stream::unfold((events, stop), |(mut events, mut stop)| async move {
            let event = tokio::select! {
                event = events.recv() => event,
                _ = stop.wait_for(|stop| *stop) => return None,
            };
            // A client that is behind connects again.
            event.ok().map(|event| (event, (events, stop)))
        });
        futures_util::stream::iter(first).chain(following)
    }
}

impl Shared {
    fn served(&self) -> MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Builds events until there is nobody who reads them, or the daemon stops.
    async fn run(&self) {
        let mut period = tokio::time::interval(PERIOD);
        period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stop = self.stop.subscribe();
        loop {
            tokio::select! {
                _ = period.tick() => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            let mut served = self.served();
            if self.events.receiver_count() == 0 {
                served.is_running = false;
                return;
            }
            let reach = self.reach();
            if let Some(event) = self.event(Some(&served.reach), &reach) {
                // Clients that have gone away need no event.
                let _ = self.events.send(event);
            }
            served.reach = reach;
        }
    }

    /// How far an event that is built now reaches.
    fn reach(&self) -> Reach {
        let newest = |node: &Arc<Node>| {
            let rings = node.gpus.iter().zip(node.rings.iter());
            rings.filter_map(|(gpu, ring)| Some((gpu.device.uuid.clone(), ring.newest_ns()?))).collect()
        };
        let newest_ns = self.state.slot.node().as_ref().map(newest).unwrap_or_default();
        Reach { newest_ns, spans: self.state.ledger.ended().phases.count() }
    }

    /// Builds the text of an event with what is new from `since` to `reach`. Without `since`, it is the first event of a
    /// client: the value of each GPU's memory at `reach`, and the last steps and phases.
    fn event(&self, since: Option<&Reach>, reach: &Reach) -> Option<Arc<Answer>> {
        let node = self.state.slot.node();
        let clock = self.state.clock_of(node.as_deref());
        let (base_ns, shift_ns) = (clock.now_ns(), clock.unix_shift_ns());
        let mut ranks = spans::open(&self.state, node.as_deref(), base_ns);
        let (ended, lost) = self.ended(since.map(|since| since.spans), reach.spans);
        ended.into_iter().for_each(|span| spans::add(&mut ranks, span, base_ns));
        let trouble = self.state.slot.trouble().map(|trouble| trouble.message.clone());
        let source = node.as_ref().map(|node| node.source.description());
        let update = Update {
            base_unix_nano: base_ns + shift_ns,
            started_unix_nano: self.started_unix_ns,
            notice: source.as_deref().and_then(provenance::notice),
            source,
            trouble: trouble.filter(|_| node.is_none()),
            gpus: node.as_deref().map(|node| gpus(node, since, reach, base_ns)).unwrap_or_default(),
            ranks: ranks.into_values().collect(),
            lost,
            findings_revision: self.findings_revision(),
        };
        let mut text = b"data: ".to_vec();
        // A value that has no JSON is no event. These structures always have one.
        text.append(&mut json::line(&update).ok()?);
        text.push(b'\n');
        Some(self.answers.keep(text))
    }

    /// Steps and phases with numbers from `since` to `until`, in order, and how many of them are no longer kept. Without
    /// `since`, the last ones; then none counts as lost.
    fn ended(&self, since: Option<u64>, until: u64) -> (Vec<Span>, u64) {
        let first = since.map_or(until.saturating_sub(SPANS / 2), |since| since.max(until.saturating_sub(SPANS)));
        let blocks = self.state.ledger.ended().trail.blocks_since(first);
        let new = |span: &Span| (first..until).contains(&span.number);
        let mut ended: Vec<Span> = blocks.iter().flat_map(|block| block.spans()).filter(new).collect();
        ended.sort_unstable_by_key(|span| span.number);
        let lost = since.map_or(0, |since| (until - since).saturating_sub(ended.len() as u64));
        (ended, lost)
    }

    /// A number that differs whenever a list of findings would look different.
    fn findings_revision(&self) -> u64 {
        let board = self.state.findings.board();
        let mark = |finding: &highwater_core::detect::Finding| {
            let severity = finding.sign.severity as u64;
            (finding.id.wrapping_mul(8) + severity * 2 + u64::from(finding.ended_ns.is_some())).wrapping_add(1)
        };
        let revision =
            board.all().fold(0, |revision: u64, finding| revision.wrapping_mul(31).wrapping_add(mark(finding)));
        // Below 2^53, so that it is exact in JavaScript.
        revision & ((1 << 53) - 1)
    }
}

fn gpus(node: &Node, since: Option<&Reach>, reach: &Reach, base_ns: i64) -> Vec<GpuNow> {
    let of_gpu = |(gpu, ring): (&GpuState, &ring::Reader)| {
        let newest_ns = reach.newest_ns.get(&gpu.device.uuid).copied();
        let before_ns = since.and_then(|since| since.newest_ns.get(&gpu.device.uuid).copied());
        let points = newest_ns.map(|newest_ns| points(ring, before_ns, newest_ns)).unwrap_or_default();
        let is_up = gpu.health() == Health::Up;
        let latest = gpu.medium().filter(|_| is_up);
        let activity = latest.as_ref().map(|latest| ActivityNow {
            at_us: (latest.at_ns - base_ns) / 1_000,
            sm: latest.reading.activity.sm_active_ratio,
            tensor: latest.reading.activity.tensor_active_ratio,
            dram: latest.reading.activity.dram_active_ratio,
        });
        let medium = latest.map_or_else(Medium::default, |latest| latest.reading);
        let reasons = |mask: u64| THROTTLE_REASONS.iter().filter(move |(bit, _)| mask & bit != 0);
        GpuNow {
            gpu: gpu.device.index.clone(),
            uuid: gpu.device.uuid.clone(),
            up: is_up,
            until_us: newest_ns.map(|newest_ns| (newest_ns - base_ns) / 1_000),
            points: points.into_iter().map(|point| ((point.at_ns - base_ns) / 1_000, point.used)).collect(),
            utilization_ratio: medium.utilization_ratio,
            activity,
            power_watts: medium.power_watts,
            temperature_celsius: medium.temperature_celsius,
            throttle: medium.throttle_reasons.map(|mask| reasons(mask).map(|(_, name)| *name).collect()),
        }
    };
    node.gpus.iter().zip(node.rings.iter()).map(of_gpu).collect()
}

/// The value at the last event and each change since, through the newest reading.
fn points(ring: &ring::Reader, before_ns: Option<i64>, newest_ns: i64) -> Vec<ring::Point> {
    // After a reopening, this node's ring may be older than the reading at which the last event ended.
    let from_ns = before_ns.unwrap_or(newest_ns).min(newest_ns);
    let kept = ring.of_kept(from_ns, newest_ns, |from_ns| ring.points_through(from_ns, newest_ns, POINTS));
    // Without readings the client sees that some are missing, and requests them.
    kept.map(|(_, points)| points.points).unwrap_or_default()
}

/// What GPUs, jobs and findings do now, as server-sent events: an [`Update`] each.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/live", tag = "live", responses(
    (status = 200, description = "A stream of server-sent events without end; the data of each is an `Update`. The first \
     has the last steps and phases.", body = Update, content_type = "text/event-stream"),
)))]
pub(super) async fn live(State(live): State<Live>) -> Response {
    let text = live.connect().map(|event| Ok::<_, io::Error>(event.pieces())).try_flatten();
    let retry = futures_util::stream::iter([Ok(Bytes::from_static(RETRY.as_bytes()))]);
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    // Proxies that collect answers would hold events back.
    let unbuffered = [("x-accel-buffering", "no")];
    (headers, unbuffered, Body::from_stream(retry.chain(text))).into_response()
}
