//! Rings and what has ended, made by hand, for tests.

use super::{Attributed, RankKey};
use crate::clock::SECOND_NS;
use crate::jobs::{Ended, EndedBy, Open};
use crate::ring;
use crate::wire::Kind;
use std::sync::Arc;

/// A rank of job `j`.
pub(crate) fn key(rank: usize) -> RankKey {
    ("j".into(), u32::try_from(rank).expect("a rank"))
}

/// What ended of a rank of job `j`, of which nothing else is known.
pub(crate) fn ended(kind: Kind, rank: usize, name: &str, step: Option<u64>, begin_ns: i64, end_ns: i64) -> Ended {
    let (memory, attributes, by, held, series) = (None, None, None, None, None);
    let open = Open { kind, name: name.into(), step, begin_ns, memory, attributes, by, held, series };
    let ((job, rank), gpus, pid, waiting) = (key(rank), None, None, None);
    Ended { job, rank, open, end_ns, by: EndedBy::End, memory, gpus, pid, waiting }
}

/// The same without memory of any GPU.
pub(crate) fn attributed(ended: Ended) -> Attributed {
    Attributed { ended, gpus: Vec::new(), uuids: Arc::default() }
}

/// A ring that keeps ten minutes, to the microsecond.
pub(crate) fn ring() -> (ring::Writer, ring::Reader) {
    let config = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 1 << 20, resolution_ns: 1_000 };
    ring::ring(config).expect("a ring")
}
