//! The join of ended phases with memory, and what follows from each GPU's memory alone. It runs a few times a second.
//!
//! Enters: rings, and what jobs ended. Leaves: attributed phases in the ledger's log; and for each GPU its pressure, its
//! time with little free, and its flushes. Invariant: it only reads rings, so that it can never make a tick late; and it takes
//! time as an argument, so that a replay of any speed gives what the live run gave.

use super::rise::Rise;
use super::{Flush, FlushDetector, Ledger, LowMemory, Pressure, attribute, holders};
use crate::clock::SECOND_NS;
use crate::gpu::GpuState;
use crate::jobs::Ended;
use crate::ring;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How long a phase waits for memory to be known up to its end. After that, the driver hangs or the GPU is gone.
const PATIENCE_NS: i64 = 2 * SECOND_NS;

/// Phases that are joined with memory in one round, each of which takes some KiB on a node of many GPUs; and the maximum number
/// of rounds in one turn, so that the detectors get to run.
const AT_ONCE: usize = 512;
const MOST_ROUNDS: usize = 8;

/// Flushes of one GPU that are kept.
const MOST_RECENT_FLUSHES: usize = 64;

/// What follows from one GPU's memory alone.
#[derive(Debug, Clone, Default)]
pub struct Derived {
    /// Time near full.
    pub pressure: Pressure,
    /// Time with little free.
    pub low: LowMemory,
    /// How many flushes were found so far.
    pub flushes: u64,
    /// The last of them, in the order of time.
    recent_flushes: VecDeque<Flush>,
    detector: FlushDetector,
    scanned_until_ns: Option<i64>,
    /// The last reading that was looked at.
    last_bytes: Option<u64>,
    rise: Rise,
}

/// Joins phases with memory.
pub struct Join {
    gpus: Arc<[GpuState]>,
    uuids: Arc<[String]>,
    rings: Arc<[ring::Reader]>,
    derived: Box<[Mutex<Derived>]>,
    /// The second in which holders of memory were last read.
    holders_s: AtomicI64,
}

impl Join {
    /// A join over these GPUs and their rings.
    #[must_use]
    pub fn new(gpus: Arc<[GpuState]>, rings: Arc<[ring::Reader]>) -> Self {
        let derived = gpus.iter().map(|_| Mutex::default()).collect();
        let uuids = gpus.iter().map(|gpu| gpu.device.uuid.clone()).collect();
        Self { gpus, uuids, rings, derived, holders_s: AtomicI64::new(i64::MIN) }
    }

    /// Counts the time with less than each of these bytes free. Counts of other thresholds are dropped.
    pub fn count_free_below(&mut self, free_below: &[u64]) {
        for derived in &mut self.derived {
            derived.get_mut().unwrap_or_else(PoisonError::into_inner).low.set_thresholds(free_below);
        }
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

    /// Continues the counters of the GPU at this position from those of an earlier state of it.
    pub fn inherit(&self, gpu: usize, before: &Derived) {
        if let Some(derived) = self.derived.get(gpu) {
            let mut derived = derived.lock().unwrap_or_else(PoisonError::into_inner);
            derived.flushes = before.flushes;
            derived.pressure = before.pressure.go_on();
            derived.low = before.low.go_on();
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
        let second = now_ns.div_euclid(SECOND_NS);
        let last = self.holders_s.swap(second, Ordering::Relaxed);
        if last != second {
            // What is read now is of the time since the last one, which usually is the second that has ended.
            let since = if last == i64::MIN { second - 1 } else { last.min(second) };
            holders::read(ledger, &self.gpus, since * SECOND_NS);
        }
        ledger.expire(now_ns);
    }

    fn attribute_ended(&self, ledger: &Ledger, now_ns: i64) {
        let known_ns = self.known_until_ns().unwrap_or(i64::MIN).max(now_ns - PATIENCE_NS);
        for _ in 0..MOST_ROUNDS {
            let ready: Vec<Ended> = ledger.open().take_ended(known_ns, AT_ONCE);
            if ready.is_empty() {
                return;
            }
            // No lock is held while rings are read, so that senders do not wait.
            let attribute = |ended| attribute(ended, &self.rings, &self.gpus, &self.uuids);
            let attributed: Vec<_> = ready.into_iter().map(attribute).collect();
            let mut log = ledger.ended();
            attributed.into_iter().for_each(|attributed| log.record(attributed));
        }
    }

    /// The time up to which memory is known on every GPU that is sampled and has had a reading.
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
        // The newest reading counts now: if a gap begins at it, later queries do not return it.
        let points = match self.scanned_until_ns.filter(|scanned_ns| *scanned_ns >= oldest_ns) {
            Some(scanned_ns) => ring.changes_after(scanned_ns, newest_ns),
            None => {
                self.low.interrupt();
                ring.changes_from(oldest_ns, newest_ns)
            }
        };
        let Ok(points) = points else { return };
        let before_bytes = self.last_bytes;
        for point in points {
            self.last_bytes = point.used;
            self.low.push(point.at_ns, point.used, usable_bytes);
            if let Some(flush) = self.detector.push(point.at_ns, point.used, usable_bytes) {
                self.flushes += 1;
                self.recent_flushes.push_back(flush);
            }
        }
        let excess = self.recent_flushes.len().saturating_sub(MOST_RECENT_FLUSHES);
        self.recent_flushes.drain(..excess);
        self.low.advance(newest_ns);
        self.scanned_until_ns = Some(newest_ns);
        // Memory at rest costs nothing here.
        if self.last_bytes > before_bytes
            && let (Some(used), Some(usable), Some(listed)) = (self.last_bytes, usable_bytes, state.processes())
            && self.rise.is_steep(ring, listed.at_ns, used, usable)
        {
            state.want_processes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::gpu::Device;
    use crate::jobs::{Account, Event, Limits};
    use crate::phases::hand;
    use crate::wire::EventType;

    const GIB: u64 = 1 << 30;

    /// One GPU, whose memory the test writes by hand.
    fn of_one_gpu() -> (Join, ring::Writer) {
        let (writer, reader) = hand::ring();
        let device = Device { uuid: "GPU-a".into(), memory_total_bytes: Some(140 * GIB), ..Device::default() };
        let gpu = GpuState::new(device, 600 * SECOND_NS, SECOND_NS / 10);
        (Join::new([gpu].into(), [reader].into()), writer)
    }

    /// The trough of a flush may be the last reading before the driver stops answering, and the join may look right then. A gap
    /// that begins at that reading hides the trough from a later look.
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

    #[test]
    fn a_list_of_processes_from_before_memory_rose_is_wanted_anew() {
        let (join, mut writer) = of_one_gpu();
        let look = |at_ms: i64, gib: u64, writer: &mut ring::Writer| {
            writer.push(at_ms * MILLISECOND_NS, gib * GIB).expect("in order");
            join.derived[0].lock().expect("nobody panics").advance(&join.rings[0], &join.gpus[0]);
            join.gpus[0].take_processes_wanted()
        };
        assert!(!look(0, 10, &mut writer), "there is none");
        join.gpus[0].set_processes(MILLISECOND_NS / 2, Some(Vec::new()));
        assert!(!look(100, 15, &mut writer));
        assert!(look(200, 60, &mut writer));
        assert!(look(300, 61, &mut writer), "it has not been read yet");
        join.gpus[0].set_processes(301 * MILLISECOND_NS, Some(Vec::new()));
        assert!(!look(400, 61, &mut writer));
        assert!(!look(500, 20, &mut writer), "it fell");
    }

    fn say(ledger: &Ledger, event: EventType, at_ns: i64) {
        let named = Event { event, name: "a".into(), gpus: Some(vec![0]), ..Event::exit("j", 0, None, at_ns) };
        ledger.open().take(&named, &Account::alone(), at_ns).expect("taken");
    }

    /// The peaks of the phases that were attributed so far.
    fn peaks(ledger: &Ledger) -> Vec<Option<u64>> {
        let (ended, _) = ledger.ended().phases.since(0);
        ended.iter().map(|attributed| attributed.gpus.first().and_then(|gpu| gpu.peak_bytes)).collect()
    }

    #[test]
    fn a_phase_waits_until_memory_is_known_up_to_its_end_or_for_two_seconds() {
        let (join, mut writer) = of_one_gpu();
        let ledger = Ledger::new(Limits::default());
        writer.push(0, 7).expect("in order");
        say(&ledger, EventType::Begin, 0);
        say(&ledger, EventType::End, 100_000);
        join.advance(&ledger, 500_000);
        assert_eq!(peaks(&ledger), []);
        writer.push(100_000, 8).expect("in order");
        join.advance(&ledger, 500_000);
        assert_eq!(peaks(&ledger), [Some(7)]);
        say(&ledger, EventType::Begin, 200_000);
        say(&ledger, EventType::End, 300_000);
        join.advance(&ledger, 300_000 + 2 * SECOND_NS - 1);
        assert_eq!(peaks(&ledger).len(), 1);
        join.advance(&ledger, 300_000 + 2 * SECOND_NS);
        assert_eq!(peaks(&ledger), [Some(7), None], "the ring ended before it");
        assert_eq!((join.gpus().len(), join.rings()[0].newest_ns()), (1, Some(100_000)));
        assert_eq!(ledger.ended().phases.since(0).0[1].uuids.as_ref(), ["GPU-a".to_owned()]);
    }

    #[test]
    fn a_gpu_that_does_not_answer_makes_no_phase_wait() {
        let (mut writers, rings): (Vec<_>, Vec<_>) = (0..2).map(|_| hand::ring()).unzip();
        let gpu = || GpuState::new(Device::default(), SECOND_NS, SECOND_NS);
        let join = Join::new([gpu(), gpu()].into(), rings.into());
        let ledger = Ledger::new(Limits::default());
        [0, 1_000].iter().for_each(|at_ns| writers[0].push(*at_ns, 7).expect("in order"));
        writers[1].push(0, 7).expect("in order");
        say(&ledger, EventType::Begin, 0);
        say(&ledger, EventType::End, 1_000);
        join.advance(&ledger, 1_000);
        assert_eq!(peaks(&ledger), [], "the other GPU is behind");
        join.gpus()[1].lose("gone");
        join.advance(&ledger, 1_000);
        assert_eq!(peaks(&ledger), [Some(7)]);
    }

    #[test]
    fn all_that_has_ended_is_attributed_and_the_silent_are_forgotten() {
        let (join, mut writer) = of_one_gpu();
        let ledger = Ledger::new(Limits::default());
        let many = i64::try_from(AT_ONCE).expect("few") + 3;
        for at_ns in 0..many {
            say(&ledger, EventType::Begin, at_ns);
            say(&ledger, EventType::End, at_ns);
        }
        writer.push(0, 7).expect("in order");
        writer.push(10_000, 7).expect("in order");
        join.advance(&ledger, 10_000);
        assert_eq!(ledger.ended().phases.count(), AT_ONCE as u64 + 3);
        join.advance(&ledger, Limits::default().silence_ns + many);
        assert_eq!(ledger.open().ranks().count(), 0);
    }

    #[test]
    fn without_a_node_what_ended_has_its_times_and_no_memory() {
        let ledger = Ledger::new(Limits::default());
        say(&ledger, EventType::Begin, 0);
        say(&ledger, EventType::End, 5);
        advance_without_node(&ledger, 6);
        assert_eq!((peaks(&ledger), ledger.open().ranks().count()), (vec![None], 1));
        advance_without_node(&ledger, Limits::default().silence_ns + 6);
        assert_eq!(ledger.open().ranks().count(), 0);
    }

    /// Falls of 10 GiB that regrow within 20 ms, one a second from a second on.
    fn fall(writer: &mut ring::Writer, seconds: std::ops::Range<i64>) {
        for second in seconds {
            for (ms, gib) in [(0, 130), (10, 120), (30, 129), (31, 130)] {
                writer.push(second * SECOND_NS + ms * MILLISECOND_NS, gib * GIB).expect("in order");
            }
        }
    }

    #[test]
    fn falls_are_reported_since_a_count_as_far_as_they_are_kept() {
        let (join, mut writer) = of_one_gpu();
        let ledger = Ledger::new(Limits::default());
        let new = |count| {
            let (flushes, count) = join.flushes_since(0, count);
            (flushes.iter().map(|flush| flush.trough_ns / SECOND_NS).collect::<Vec<_>>(), count)
        };
        fall(&mut writer, 1..4);
        join.advance(&ledger, 4 * SECOND_NS);
        assert_eq!((new(0), new(2), new(3)), ((vec![1, 2, 3], 3), (vec![3], 3), (vec![], 3)));
        join.advance(&ledger, 4 * SECOND_NS);
        assert_eq!(new(0).1, 3, "looked at again, and nothing new");
        fall(&mut writer, 4..100);
        join.advance(&ledger, 100 * SECOND_NS);
        let (kept, count) = new(3);
        assert_eq!((kept.len(), kept[0], count), (MOST_RECENT_FLUSHES, 36, 99));
        assert_eq!((join.flushes_since(1, 5), join.derived(1).flushes), ((Vec::new(), 5), 0), "no such GPU");
    }

    #[test]
    fn time_with_little_free_is_counted_turn_by_turn_and_goes_on_with_a_new_node() {
        let (mut join, mut writer) = of_one_gpu();
        join.count_free_below(&[GIB, 2 * GIB]);
        let ledger = Ledger::new(Limits::default());
        let counted = |join: &Join| {
            let levels = join.derived(0).low.levels().to_vec();
            levels.iter().map(|level| (level.total_ns, level.longest_ns(0))).collect::<Vec<_>>()
        };
        let ms = |ms: i64| ms * MILLISECOND_NS;
        for (at_ms, used) in
            [(0, GIB), (10, 139 * GIB), (20, 139 * GIB + 1), (27, GIB), (40, 140 * GIB), (45, 140 * GIB)]
        {
            writer.push(ms(at_ms), used).expect("in order");
            join.advance(&ledger, ms(at_ms));
        }
        assert_eq!(counted(&join), [(ms(12), ms(7)), (ms(22), ms(17))]);
        let (mut after, mut writer) = of_one_gpu();
        after.inherit(0, &join.derived(0));
        after.count_free_below(&[GIB, 2 * GIB]);
        writer.push(ms(90), 140 * GIB).expect("in order");
        writer.push(ms(93), 140 * GIB).expect("in order");
        after.advance(&ledger, ms(93));
        assert_eq!(counted(&after), [(ms(15), ms(7)), (ms(25), ms(17))], "nothing is known of the time between");
    }

    #[test]
    fn a_node_that_is_made_anew_goes_on_counting() {
        let (before, mut writer) = of_one_gpu();
        let ledger = Ledger::new(Limits::default());
        writer.push(0, 139 * GIB).expect("in order");
        writer.push(SECOND_NS, GIB).expect("in order");
        fall(&mut writer, 2..3);
        before.advance(&ledger, 3 * SECOND_NS);
        let was = before.derived(0);
        assert_eq!((was.flushes, was.pressure.above_ns()[3]), (1, SECOND_NS));
        let (after, mut writer) = of_one_gpu();
        after.inherit(0, &was);
        after.inherit(1, &was);
        assert_eq!(after.flushes_since(0, 1), (Vec::new(), 1));
        writer.push(10 * SECOND_NS, 139 * GIB).expect("in order");
        writer.push(11 * SECOND_NS, GIB).expect("in order");
        after.advance(&ledger, 11 * SECOND_NS);
        assert_eq!((after.derived(0).flushes, after.derived(0).pressure.above_ns()[3]), (1, 2 * SECOND_NS));
    }
}
