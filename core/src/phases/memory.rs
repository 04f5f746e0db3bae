//! One ended phase, GPU by GPU.

use super::pressure::THRESHOLDS;
use crate::gpu::{GpuState, Usage};
use crate::jobs::Ended;
use crate::ring;
use std::sync::Arc;

/// What memory did on one GPU during one phase. Bytes throughout; `None` where nothing is known.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseMemory {
    /// Position of the GPU.
    pub gpu: usize,
    /// In use when the phase began.
    pub begin_bytes: Option<u64>,
    /// In use when it ended.
    pub end_bytes: Option<u64>,
    /// The most in between.
    pub peak_bytes: Option<u64>,
    /// The least in between.
    pub min_bytes: Option<u64>,
    /// The mean over the time that is known.
    pub mean_bytes: Option<f64>,
    /// The largest fall from a high to a later low.
    pub drop_bytes: Option<u64>,
    /// Time above each of [`THRESHOLDS`] of the usable memory, nanoseconds; `None` where the GPU's size is not known.
    pub above_ns: Option<[i64; THRESHOLDS.len()]>,
    /// Time of which nothing is known, nanoseconds.
    pub gap_ns: i64,
    /// Energy and idle time of the whole GPU.
    pub usage: Usage,
    /// The process's memory at the end less what its allocator held then: communication buffers, context, workspaces.
    pub outside_allocator_bytes: Option<u64>,
}

impl PhaseMemory {
    /// Memory at the end less memory at the begin.
    #[must_use]
    pub fn growth_bytes(&self) -> Option<i64> {
        Some(self.end_bytes?.cast_signed() - self.begin_bytes?.cast_signed())
    }
}

/// An ended phase with its memory on each of its rank's GPUs; none where no GPU of the rank is known.
#[derive(Debug, Clone)]
pub struct Attributed {
    /// What ended.
    pub ended: Ended,
    /// Its memory.
    pub gpus: Vec<PhaseMemory>,
    /// UUIDs of the GPUs by the positions that these had then: it may be told of when they have others.
    pub uuids: Arc<[String]>,
}

impl Attributed {
    /// The UUID of the GPU that this memory is of.
    #[must_use]
    pub fn uuid_of(&self, memory: &PhaseMemory) -> Option<&str> {
        self.uuids.get(memory.gpu).map(String::as_str)
    }
}

/// Joins one ended phase with the memory of its GPUs, which have these UUIDs. The rings must have passed its end.
#[must_use]
pub fn attribute(ended: Ended, rings: &[ring::Reader], states: &[GpuState], uuids: &Arc<[String]>) -> Attributed {
    let gpus = ended.gpus.as_deref().unwrap_or_default().iter();
    let gpus = gpus.filter_map(|&gpu| Some(attribute_one(&ended, gpu, rings.get(gpu)?, states.get(gpu)?)));
    // Thousands are kept, nearly all of one GPU, and a vector that grows begins with room for four.
    let mut gpus: Vec<PhaseMemory> = gpus.collect();
    gpus.shrink_to_fit();
    Attributed { ended, gpus, uuids: Arc::clone(uuids) }
}

/// Joins one ended phase with the memory of one GPU.
#[must_use]
pub fn attribute_one(ended: &Ended, gpu: usize, ring: &ring::Reader, state: &GpuState) -> PhaseMemory {
    let (begin_ns, end_ns) = (ended.open.begin_ns, ended.end_ns);
    let usage = state.series.usage(begin_ns, end_ns);
    // What lies before the first sample, or after the last one because the GPU is gone, is a gap like any other.
    let unknown = || PhaseMemory { gap_ns: end_ns - begin_ns, usage, ..PhaseMemory::unknown(gpu) };
    let (Some(oldest_ns), Some(newest_ns)) = (ring.oldest_ns(), ring.newest_ns()) else { return unknown() };
    let (from_ns, to_ns) = (begin_ns.max(oldest_ns), end_ns.min(newest_ns));
    if from_ns > to_ns {
        return unknown();
    }
    // What changes at a phase's end is the next one's. The last reading of a GPU that is gone since is still this one's.
    let summary = if to_ns < end_ns { ring.summary_through(from_ns, to_ns) } else { ring.summary(from_ns, to_ns) };
    let Ok(summary) = summary else { return unknown() };
    let above_ns = state.usable_bytes().and_then(|usable_bytes| {
        let thresholds_bytes = THRESHOLDS.map(|threshold| threshold.bytes_of(usable_bytes));
        if summary.max.is_none_or(|max| thresholds_bytes.iter().all(|threshold_bytes| max < *threshold_bytes)) {
            return Some([0; THRESHOLDS.len()]);
        }
        ring.above_ns(from_ns, to_ns, thresholds_bytes).ok()
    });
    // The process's own memory at the end, to the millisecond: what is in use then, less what the others had of it.
    let end_bytes = summary.last.filter(|_| to_ns == end_ns);
    let process_bytes =
        end_bytes.and_then(|used_bytes| used_bytes.checked_sub(state.used_by_others_bytes(ended.pid, used_bytes)?));
    let reserved_bytes = ended.memory.and_then(|memory| memory.reserved);
    PhaseMemory {
        gpu,
        begin_bytes: summary.first.filter(|_| from_ns == begin_ns),
        end_bytes,
        peak_bytes: summary.max,
        min_bytes: summary.min,
        mean_bytes: summary.mean,
        drop_bytes: summary.drop.map(|drop| drop.bytes),
        above_ns,
        gap_ns: summary.gap_ns + (from_ns - begin_ns) + (end_ns - to_ns),
        usage,
        // An allocator cannot hold more than its process has: then the two were not read of the same moment.
        outside_allocator_bytes: process_bytes.zip(reserved_bytes).and_then(|(has, holds)| has.checked_sub(holds)),
    }
}

impl PhaseMemory {
    /// Of a GPU of which nothing is known.
    #[must_use]
    pub fn unknown(gpu: usize) -> Self {
        Self {
            gpu,
            begin_bytes: None,
            end_bytes: None,
            peak_bytes: None,
            min_bytes: None,
            mean_bytes: None,
            drop_bytes: None,
            above_ns: None,
            gap_ns: 0,
            usage: Usage::default(),
            outside_allocator_bytes: None,
        }
    }
}
