//! The join: what jobs said × what memory did, brought up to date a few times a second.
//!
//! Enters: rings, and what jobs ended. Leaves: attributed phases in the ledger's log; and for each GPU its pressure and
//! flushes. Invariant: it only reads rings, so that it can never make a tick late; and it takes
//! time as an argument, so that a replay of any speed gives what the live run gave.

use super::{Flush, FlushDetector, Ledger, Pressure, attribute};
use crate::clock::SECOND_NS;
use crate::gpu::GpuState;
use crate::jobs::Ended;
use crate::ring;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Memory that is not known this long after a phase ended will not be: the driver hangs, or the GPU is gone.
const PATIENCE_NS: i64 = 2 * SECOND_NS;

/// Phases that are joined with memory at once, which take some KiB each on a node of many GPUs; and how often at most in one
/// turn, so that detectors have theirs.
const AT_ONCE: usize = 512;
const MOST_ROUNDS: usize = 8;

/// Flushes of one GPU that are kept.
const MOST_RECENT_FLUSHES: usize = 64;

/// What follows from one GPU's memory alone.
#[derive(Debug, Clone, Default)]
pub struct Derived {
    /// Time near full.
    pub pressure: Pressure,
    /// Falls and regrowths.
    pub flushes: u64,
    /// The last of them, in the order of time.
    recent_flushes: VecDeque<Flush>,
    detector: FlushDetector,
    scanned_until_ns: Option<i64>,
}

/// Joins phases with memory.
pub struct Join {
    gpus: Arc<[GpuState]>,
    uuids: Arc<[String]>,
    rings: Arc<[ring::Reader]>,
    derived: Box<[Mutex<Derived>]>,
}

impl Join {
    /// A join over these GPUs and their rings.
    #[must_use]
    pub fn new(gpus: Arc<[GpuState]>, rings: Arc<[ring::Reader]>) -> Self {
        let derived = gpus.iter().map(|_| Mutex::default()).collect();
        let uuids = gpus.iter().map(|gpu| gpu.device.uuid.clone()).collect();
        Self { gpus, uuids, rings, derived }
    }

    /// What follows from the memory of the GPU at this position; nothing for a position that has none.
    #[must_use]
    pub fn derived(&self, gpu: usize) -> Derived {
        let derived = self.derived.get(gpu).map(|derived| derived.lock().unwrap_or_else(PoisonError::into_inner));
        derived.as_deref().cloned().unwrap_or_default()
    }

    /// The flushes of the GPU at this position since there were `count` of them, oldest first, as far as they are kept;
    /// and how many there are now.
    #[must_use]
    pub fn flushes_since(&self, gpu: usize, count: u64) -> (Vec<Flush>, u64) {
        let Some(derived) = self.derived.get(gpu) else { return (Vec::new(), count) };
        let derived = derived.lock().unwrap_or_else(PoisonError::into_inner);
        let new = usize::try_from(derived.flushes.saturating_sub(count)).unwrap_or(usize::MAX);
        let skipped = derived.recent_flushes.len().saturating_sub(new);
        (derived.recent_flushes.iter().skip(skipped).copied().collect(), derived.flushes)
    }

    /// Lets the GPU at this position go on counting from what another state of it has counted.
    pub fn inherit(&self, gpu: usize, before: &Derived) {
        if let Some(derived) = self.derived.get(gpu) {
            let mut derived = derived.lock().unwrap_or_else(PoisonError::into_inner);
            derived.flushes = before.flushes;
            derived.pressure = before.pressure.go_on();
        }
    }

    /// The GPUs.
    #[must_use]
    pub fn gpus(&self) -> &[GpuState] {
        &self.gpus
    }

    /// Their memory, in the same order.
    #[must_use]
    pub fn rings(&self) -> &[ring::Reader] {
        &self.rings
    }

    /// Brings everything up to date with the rings. `now_ns` is on the timeline of their samples.
    pub fn advance(&self, ledger: &Ledger, now_ns: i64) {
        for (position, derived) in self.derived.iter().enumerate() {
            let (Some(ring), Some(state)) = (self.rings.get(position), self.gpus.get(position)) else { continue };
            derived.lock().unwrap_or_else(PoisonError::into_inner).advance(ring, state);
        }
        self.attribute_ended(ledger, now_ns);
        ledger.expire(now_ns);
    }

    fn attribute_ended(&self, ledger: &Ledger, now_ns: i64) {
        let known_ns = self.known_until_ns().unwrap_or(i64::MIN).max(now_ns - PATIENCE_NS);
        for _ in 0..MOST_ROUNDS {
            let ready: Vec<Ended> = ledger.open().take_ended(known_ns, AT_ONCE);
            if ready.is_empty() {
                return;
            }
            // Nothing is held while rings are read: jobs go on meanwhile.
            let attribute = |ended| attribute(ended, &self.rings, &self.gpus, &self.uuids);
            let attributed: Vec<_> = ready.into_iter().map(attribute).collect();
            let mut log = ledger.ended();
            attributed.into_iter().for_each(|attributed| log.record(attributed));
        }
    }

    /// Until when the memory of every GPU that is sampled is known.
    fn known_until_ns(&self) -> Option<i64> {
        let answering = self.gpus.iter().zip(self.rings.iter()).filter(|(gpu, _)| gpu.is_sampled());
        answering.filter_map(|(_, ring)| ring.newest_ns()).min()
    }
}

/// Brings the jobs up to date while there is no node: what ended has times and no memory, and the silent are forgotten.
pub fn advance_without_node(ledger: &Ledger, now_ns: i64) {
    let ended = ledger.open().take_ended(i64::MAX, usize::MAX);
    let attributed = ended.into_iter().map(|ended| attribute(ended, &[], &[], &Arc::default()));
    let mut log = ledger.ended();
    attributed.for_each(|attributed| log.record(attributed));
    drop(log);
    ledger.expire(now_ns);
}

impl Derived {
    fn advance(&mut self, ring: &ring::Reader, state: &GpuState) {
        let (Some(newest_ns), Some(oldest_ns)) = (ring.newest_ns(), ring.oldest_ns()) else { return };
        let usable_bytes = state.usable_bytes();
        if let Some(usable_bytes) = usable_bytes {
            self.pressure.advance(ring, usable_bytes, newest_ns);
        }
        // The newest reading counts now: where a gap begins at it, it is not told later.
        let points = match self.scanned_until_ns.filter(|scanned_ns| *scanned_ns >= oldest_ns) {
            Some(scanned_ns) => ring.changes_after(scanned_ns, newest_ns),
            None => ring.changes_from(oldest_ns, newest_ns),
        };
        let Ok(points) = points else { return };
        for point in points {
            if let Some(flush) = self.detector.push(point.at_ns, point.used, usable_bytes) {
                self.flushes += 1;
                self.recent_flushes.push_back(flush);
            }
        }
        let excess = self.recent_flushes.len().saturating_sub(MOST_RECENT_FLUSHES);
        self.recent_flushes.drain(..excess);
        self.scanned_until_ns = Some(newest_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::gpu::Device;

    const GIB: u64 = 1 << 30;

    /// One GPU, whose memory the test writes by hand.
    fn of_one_gpu() -> (Join, ring::Writer) {
        let config = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 1 << 20, resolution_ns: 1_000 };
        let (writer, reader) = ring::ring(config).expect("a ring");
        let device = Device { memory_total_bytes: Some(140 * GIB), ..Device::default() };
        let gpu = GpuState::new(device, 600 * SECOND_NS, SECOND_NS / 10);
        (Join::new([gpu].into(), [reader].into()), writer)
    }

    /// The trough of a flush may be the one reading before the driver answers nobody, and the join may look right then:
    /// a gap that begins at that reading hides it from whoever looks later.
    #[test]
    fn a_flush_whose_trough_is_the_last_reading_before_a_gap_counts_whenever_it_is_looked_for() {
        let readings =
            [(0, Some(130)), (99, Some(130)), (100, Some(120)), (100, None), (160, Some(129)), (161, Some(130))];
        for looks in [vec![], vec![2], vec![3], vec![2, 3], vec![0, 1, 2, 3, 4]] {
            let (join, mut writer) = of_one_gpu();
            let look = || {
                let mut derived = join.derived[0].lock().expect("nobody panics");
                derived.advance(&join.rings[0], &join.gpus[0]);
            };
            for (number, (ms, gib)) in readings.into_iter().enumerate() {
                match gib {
                    Some(gib) => writer.push(ms * MILLISECOND_NS, gib * GIB).expect("in order"),
                    None => writer.gap(ms * MILLISECOND_NS).expect("in order"),
                }
                if looks.contains(&number) {
                    look();
                }
            }
            look();
            assert_eq!(join.derived(0).flushes, 1, "looked at {looks:?}");
            assert_eq!(join.flushes_since(0, 0).0[0].drop_bytes, 10 * GIB);
        }
    }
}
