//! The memory of one ended step, phase or layer on each GPU of its rank.

use super::pressure::THRESHOLDS;
use crate::clock::SECOND_NS;
use crate::gpu::{ActiveSeconds, GpuState, Usage};
use crate::jobs::Ended;
use crate::ring;
use std::sync::Arc;

/// Steps and phases of this length or longer have their own share of what the GPU's units did. The readings are means of
/// 500 ms: a shorter one has the mean of what is around it.
pub(super) const LEAST_ACTIVE_NS: i64 = 2 * SECOND_NS;

/// What memory did on one GPU during one step, phase or layer. Sizes are bytes, times nanoseconds; `None` where nothing
/// is known.
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
    /// Time at or above each of [`THRESHOLDS`] of the usable memory, nanoseconds; `None` if the GPU's size is not known, or its
    /// memory at no time of the phase.
    pub above_ns: Option<[i64; THRESHOLDS.len()]>,
    /// Time of which nothing is known, nanoseconds.
    pub gap_ns: i64,
    /// Energy, idle time and activity of the whole GPU.
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
    /// UUIDs of the GPUs by the positions that they had then: positions may change before this is exported.
    pub uuids: Arc<[String]>,
}

impl Attributed {
    /// The UUID of the GPU that this memory is of.
    #[must_use]
    pub fn uuid_of(&self, memory: &PhaseMemory) -> Option<&str> {
        self.uuids.get(memory.gpu).map(String::as_str)
    }

    /// How long the units of the GPU that this memory is of worked; nothing is known if it took less than a second.
    #[must_use]
    pub fn active_of(&self, memory: &PhaseMemory) -> ActiveSeconds {
        let length_ns = self.ended.end_ns.saturating_sub(self.ended.open.begin_ns);
        if length_ns >= LEAST_ACTIVE_NS { memory.usage.active } else { ActiveSeconds::default() }
    }
}

/// Joins one ended phase with the memory of its GPUs, which have these UUIDs. Time that a ring has not reached, or no
/// longer keeps, counts as a gap.
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
    let Some(newest_ns) = ring.newest_ns() else { return unknown() };
    let to_ns = end_ns.min(newest_ns);
    // What changes at a phase's end is the next one's. The last reading of a GPU that is gone since is still this one's.
    let summarize = |from_ns| {
        if to_ns < end_ns { ring.summary_through(from_ns, to_ns) } else { ring.summary(from_ns, to_ns) }
    };
    let Ok((from_ns, summary)) = ring.of_kept(begin_ns, to_ns, summarize) else { return unknown() };
    let above_ns = state.usable_bytes().and_then(|usable_bytes| {
        let thresholds_bytes = THRESHOLDS.map(|threshold| threshold.bytes_of(usable_bytes));
        let peak_bytes = summary.max?;
        if thresholds_bytes.iter().all(|threshold_bytes| peak_bytes < *threshold_bytes) {
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
        // An allocator cannot hold more than its process has. If it seems to, the two values are from different moments.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{MILLISECOND_NS, SECOND_NS};
    use crate::gpu::{Device, Medium, Process};
    use crate::phases::hand;
    use crate::wire::{Kind, Memory};

    /// A GPU of 1000 bytes that jobs can have, and its ring with these readings: milliseconds and bytes, `None` for a gap.
    fn gpu(readings: &[(i64, Option<u64>)]) -> (ring::Reader, GpuState, ring::Writer) {
        let (mut writer, reader) = hand::ring();
        for (ms, bytes) in readings {
            match bytes {
                Some(bytes) => writer.push(ms * MILLISECOND_NS, *bytes).expect("in order"),
                None => writer.gap(ms * MILLISECOND_NS).expect("in order"),
            }
        }
        let device = Device { memory_total_bytes: Some(1_200), memory_reserved_bytes: Some(200), ..Device::default() };
        (reader, GpuState::new(device, 60 * SECOND_NS, 100 * MILLISECOND_NS), writer)
    }

    /// Phase `p` from one millisecond to another.
    fn phase(from_ms: i64, to_ms: i64) -> Ended {
        hand::ended(Kind::Phase, 0, "p", None, from_ms * MILLISECOND_NS, to_ms * MILLISECOND_NS)
    }

    const RISES: [(i64, Option<u64>); 5] =
        [(0, Some(100)), (10, Some(920)), (14, Some(980)), (20, Some(300)), (40, Some(50))];

    #[test]
    fn a_phase_has_the_memory_between_its_begin_and_its_end() {
        let (ring, state, _writer) = gpu(&RISES);
        let of = attribute_one(&phase(5, 40), 3, &ring, &state);
        let expected = PhaseMemory {
            begin_bytes: Some(100),
            end_bytes: Some(300),
            peak_bytes: Some(980),
            min_bytes: Some(100),
            mean_bytes: of.mean_bytes,
            drop_bytes: Some(680),
            above_ns: Some([10, 6, 6, 0].map(|ms| ms * MILLISECOND_NS)),
            ..PhaseMemory::unknown(3)
        };
        assert_eq!(of, expected, "what changes at its end is the next one's");
        // 5 ms of 100, 4 of 920, 6 of 980, 20 of 300.
        let mean = (500.0 + 3_680.0 + 5_880.0 + 6_000.0) / 35.0;
        assert!((of.mean_bytes.expect("known") - mean).abs() < 1e-6);
        assert_eq!(of.growth_bytes(), Some(200));
        assert_eq!(attribute_one(&phase(20, 41), 0, &ring, &state).growth_bytes(), None, "its end is not known yet");
        let low = attribute_one(&phase(20, 40), 0, &ring, &state);
        assert_eq!((low.above_ns, low.growth_bytes()), (Some([0; 4]), Some(0)));
    }

    #[test]
    fn of_a_phase_in_a_gap_no_time_near_full_is_known() {
        let (ring, state, _writer) = gpu(&[(0, Some(100)), (10, None), (50, Some(100))]);
        let of = attribute_one(&phase(20, 40), 0, &ring, &state);
        assert_eq!((of.above_ns, of.peak_bytes, of.gap_ns), (None, None, 20 * MILLISECOND_NS));
        let half = attribute_one(&phase(5, 40), 0, &ring, &state);
        assert_eq!((half.above_ns, half.gap_ns), (Some([0; 4]), 30 * MILLISECOND_NS));
    }

    #[test]
    fn memory_at_a_threshold_is_above_it_and_full_memory_above_all() {
        let above = |bytes| {
            let (ring, state, _writer) = gpu(&[(0, Some(bytes)), (10, Some(bytes))]);
            attribute_one(&phase(0, 10), 0, &ring, &state)
                .above_ns
                .map(|above_ns| above_ns.map(|ns| ns / MILLISECOND_NS))
        };
        assert_eq!([899, 900, 970, 1_000].map(above), [[0; 4], [10, 0, 0, 0], [10, 10, 10, 0], [10; 4]].map(Some));
    }

    #[test]
    fn what_is_not_known_of_a_phase_is_a_gap() {
        let (ring, state, _writer) = gpu(&[(10, Some(100)), (20, None), (30, Some(500)), (50, Some(70))]);
        let of = |from, to| attribute_one(&phase(from, to), 0, &ring, &state);
        let (early, late) = (of(5, 15), of(45, 60));
        assert_eq!((early.gap_ns, early.begin_bytes, early.end_bytes), (5 * MILLISECOND_NS, None, Some(100)));
        assert_eq!((late.gap_ns, late.begin_bytes, late.end_bytes), (10 * MILLISECOND_NS, Some(500), None));
        assert_eq!((late.min_bytes, late.drop_bytes), (Some(70), Some(430)), "the last reading is still its own");
        let across = of(15, 35);
        assert_eq!((across.gap_ns, across.peak_bytes), (10 * MILLISECOND_NS, Some(500)));
        for (from, to) in [(0, 9), (51, 60)] {
            let nothing = PhaseMemory { gap_ns: (to - from) * MILLISECOND_NS, ..PhaseMemory::unknown(0) };
            assert_eq!(of(from, to), nothing);
        }
        assert_eq!(of(50, 60).peak_bytes, Some(70), "a moment in common is enough");
        let (empty, state, _writer) = gpu(&[]);
        assert_eq!(attribute_one(&phase(0, 7), 0, &empty, &state).gap_ns, 7 * MILLISECOND_NS);
    }

    #[test]
    fn energy_and_idleness_are_the_gpus_whatever_is_known_of_its_memory() {
        let (ring, state, _writer) = gpu(&[]);
        for n in 0..3 {
            let reading = Medium { power_watts: Some(100.0), utilization_ratio: Some(0.5), ..Medium::default() };
            state.set_medium(n * 100 * MILLISECOND_NS, reading);
        }
        let usage = attribute_one(&phase(50, 150), 0, &ring, &state).usage;
        let (energy, idle) = (usage.energy_joules.expect("known"), usage.idle_seconds.expect("known"));
        assert!((energy - 10.0).abs() < 1e-9 && (idle - 0.05).abs() < 1e-9, "{usage:?}");
    }

    #[test]
    fn a_gpu_of_unknown_size_has_no_time_near_full() {
        let (ring, _, _writer) = gpu(&RISES);
        let state = GpuState::new(Device::default(), SECOND_NS, SECOND_NS);
        let of = attribute_one(&phase(5, 40), 0, &ring, &state);
        assert_eq!((of.above_ns, of.peak_bytes), (None, Some(980)));
    }

    #[test]
    fn outside_the_allocator_is_what_the_process_has_and_it_does_not_hold() {
        let (ring, state, _writer) = gpu(&RISES);
        let outside = |reserved, pid, to_ms| {
            let memory = Some(Memory { reserved, ..Memory::default() });
            let ended = Ended { memory, pid, ..phase(5, to_ms) };
            attribute_one(&ended, 0, &ring, &state).outside_allocator_bytes
        };
        assert_eq!(outside(Some(100), Some(7), 40), None, "no list of processes");
        let process = |pid, used_bytes| Process { pid, used_bytes: Some(used_bytes) };
        state.set_processes(0, Some(vec![process(7, 0), process(8, 120)]));
        assert_eq!(outside(Some(100), Some(7), 40), Some(80));
        assert_eq!((outside(Some(181), Some(7), 40), outside(Some(180), Some(7), 40)), (None, Some(0)));
        assert_eq!((outside(None, Some(7), 40), outside(Some(100), Some(9), 40)), (None, None));
        assert_eq!(outside(Some(100), Some(7), 41), None, "its memory at the end is not known");
        state.set_processes(0, Some(vec![process(7, 0), process(8, 301)]));
        assert_eq!(outside(Some(0), Some(7), 40), None, "others have more than there is");
    }

    #[test]
    fn each_of_a_ranks_gpus_that_there_is_has_its_memory() {
        let (ring, state, _writer) = gpu(&RISES);
        let (other, other_state, _other) = gpu(&[(0, Some(7)), (50, Some(8))]);
        let uuids: Arc<[String]> = ["a".to_owned(), "b".to_owned()].into();
        let on = |gpus: &[usize]| {
            let ended = Ended { gpus: Some(gpus.into()), ..phase(5, 40) };
            attribute(ended, &[ring.clone(), other.clone()], &[], &uuids)
        };
        assert!(on(&[0, 1]).gpus.is_empty(), "no states");
        let rings = [ring.clone(), other.clone()];
        let attributed =
            attribute(Ended { gpus: Some([1, 9].into()), ..phase(5, 40) }, &rings, &[state, other_state], &uuids);
        assert_eq!(attributed.gpus.iter().map(|gpu| (gpu.gpu, gpu.peak_bytes)).collect::<Vec<_>>(), [(1, Some(7))]);
        assert_eq!(attributed.uuid_of(&attributed.gpus[0]), Some("b"));
        assert_eq!(attributed.uuid_of(&PhaseMemory::unknown(2)), None);
        assert!(attribute(phase(5, 40), &rings, &[], &uuids).gpus.is_empty());
    }
}
