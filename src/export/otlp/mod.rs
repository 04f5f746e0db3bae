//! OTLP: the snapshot that Prometheus scrapes, pushed; steps as traces; and every change of memory at its own time.
//!
//! ```text
//!  snapshots ─▶ metrics ─┐                                        ┌─ lane of metrics ─▶ receiver of metrics
//!  rings ─────▶ levels ──┤  encoded, counted                      │
//!  rings ─────▶ raw ─────┼──────────────────▶ queue (bounded) ────┼─ lane of raw ─────▶
//!  jobs ──────▶ spans ───┘                    memory or disk      └─ lane of spans ───▶ receiver of traces
//! ```
//!
//! Enters: snapshots, rings and ended phases, read as a scrape reads them. Leaves: OTLP over gRPC or HTTP. Invariants:
//! nothing runs if no endpoint is set; sampling is never affected; every point is known to be exported, waiting, or
//! dropped, with the reason.
//!
//! Spans are the SDK's `SpanData`, and `opentelemetry-otlp` makes their requests (`span_requests`). Metrics are
//! messages of `opentelemetry-proto`, made here, because the SDK (0.33) makes a `ResourceMetrics` only from its own
//! instruments. These cannot express what is exported here:
//! - points with times of their own, such as raw ones: the SDK stamps every point with the time of collection;
//! - totals of a driver or a job, which began before the SDK and come as totals: an SDK counter takes increments;
//! - exemplars.
//!
//! `MetricProducer`, the SDK's interface for values collected elsewhere, was removed. The SDK's resource detectors are not
//! used either, because they leave `OTEL_RESOURCE_ATTRIBUTES` percent-encoded.
//!
//! All signals are sent by tonic and hyper. The SDK's exporter drops a request after four attempts, and a second way to send
//! would need a second bounded queue.

mod around;
mod backoff;
mod context;
mod disk;
mod endpoint;
mod environment;
mod findings;
mod follow;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
pub(crate) mod fuzzing;
mod grpc;
mod levels;
mod metrics;
pub mod names;
pub mod near;
mod producer;
mod queue;
mod raw;
mod reply;
mod resource;
mod run;
mod series;
pub mod settings;
mod span;
mod span_requests;
mod spans;
mod stats;
mod tls;
pub mod trace;
mod transport;

pub use disk::Disk;
pub use levels::{Level, Levels};
pub use metrics::{Exemplars, Mapper, Snapshot};
pub use producer::Producer;
pub use queue::{Batch, Next, Queue};
pub use raw::RawPoints;
pub use reply::{LONGEST_WAIT, MOST_RESPONSE_BYTES, Reply};
pub use run::{Exporter, GRACE};
pub use settings::OtlpSettings;
pub use stats::{Attempt, DropReason, OtlpStats, Signal};
pub use transport::ReceiverClient;
