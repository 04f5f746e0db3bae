//! How often each GPU is read: seldom while nothing can change its memory, and at the full rate from the first sign
//! that something might.
//!
//! Enters: each reading of the fast lane, the slow lane's lists of processes, and annotations that name the GPU. Leaves:
//! which GPUs are due in a sweep, and the period in force of each. Invariants: only a GPU on which no process has a
//! context is read seldom, which takes two witnesses, the driver's list and too little memory for a context; what is
//! not known counts as a sign. Absent on purpose: overload of the driver, which is `backoff`'s.

use super::ticks::MOST_SKIPPED;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::GpuState;

/// How long there must be no sign before a GPU is read seldom, nanoseconds.
const QUIET_NS: i64 = SECOND_NS;
/// The time between two looks at whether a GPU that is read at the full rate has become idle, nanoseconds.
const LOOK_NS: i64 = SECOND_NS / 4;
/// The most memory in use on a GPU without any context, bytes. A context takes hundreds of MiB (527 on an H200), and the
/// driver by itself a few. This is the witness where the driver's list leaves processes out, as it does for those of
/// other containers.
const BARE_BYTES: u64 = 32 << 20;

/// The rate of one GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    used_bytes: Option<u64>,
    /// The last sign, nanoseconds of the timeline.
    sign_ns: i64,
    /// While the GPU is idle, when it is due next; otherwise, when to check next whether it has become idle.
    /// Nanoseconds of the timeline.
    next_ns: i64,
    is_idle: bool,
}

/// The rates of one source's GPUs.
#[derive(Debug)]
pub(super) struct Idle {
    /// The period of an idle GPU, nanoseconds. `None` reads all GPUs at the full rate.
    period_ns: Option<i64>,
    full_ns: i64,
    rates: Vec<Rate>,
}

impl Idle {
    /// All GPUs at the full rate, whose period is not known.
    pub fn new(gpus: usize) -> Self {
        // The first reading counts as a sign, because it differs from `None`.
        let rate = Rate { used_bytes: None, sign_ns: i64::MIN, next_ns: i64::MIN, is_idle: false };
        Self { period_ns: None, full_ns: i64::MAX, rates: vec![rate; gpus] }
    }

    /// Sets the period of idle GPUs, `None` for the full rate, and the period of the full rate, nanoseconds. An idle
    /// period that is not longer than the full rate's counts as `None`.
    pub fn set_periods(&mut self, idle_ns: Option<i64>, full_ns: i64) {
        (self.period_ns, self.full_ns) = (idle_ns.filter(|idle_ns| *idle_ns > full_ns), full_ns);
    }

    /// The period of the full rate, nanoseconds.
    pub fn full_ns(&self) -> i64 {
        self.full_ns
    }

    /// Sets the period of the full rate, nanoseconds.
    pub fn set_full(&mut self, full_ns: i64) {
        self.full_ns = full_ns;
    }

    /// The period in force of a GPU, nanoseconds.
    pub fn period_ns(&self, gpu: usize) -> i64 {
        if self.is_idle(gpu) { self.period_ns_of_idle() } else { self.full_ns }
    }

    /// The period of an idle GPU, nanoseconds.
    pub fn period_ns_of_idle(&self) -> i64 {
        self.period_ns.map_or(self.full_ns, |idle_ns| idle_ns.max(self.full_ns))
    }

    /// Whether a GPU is idle.
    pub fn is_idle(&self, gpu: usize) -> bool {
        self.rates.get(gpu).is_some_and(|rate| rate.is_idle)
    }

    /// Whether a GPU is to be read in a sweep that begins at `at_ns`.
    pub fn is_due(&self, gpu: usize, at_ns: i64) -> bool {
        self.rates.get(gpu).is_none_or(|rate| !rate.is_idle || at_ns >= rate.next_ns)
    }

    /// Where the rate of each GPU lies.
    pub fn places(&self) -> impl Iterator<Item = *const Rate> {
        self.rates.iter().map(std::ptr::from_ref)
    }

    /// Records a reading, `None` if it failed, of a sweep that began at `at_ns`, and decides on the GPU's rate.
    /// Returns whether that has changed.
    #[inline]
    pub fn note(&mut self, position: usize, gpu: &GpuState, at_ns: i64, used_bytes: Option<u64>) -> bool {
        let (Some(rate), Some(idle_ns)) = (self.rates.get_mut(position), self.period_ns) else { return false };
        let is_sign = used_bytes.is_none() || rate.used_bytes != used_bytes;
        if is_sign {
            (rate.used_bytes, rate.sign_ns) = (used_bytes, at_ns);
        }
        (is_sign || at_ns >= rate.next_ns) && rate.decide(at_ns, gpu, position < MOST_SKIPPED, idle_ns)
    }
}

impl Rate {
    /// Decides whether the GPU is idle, and when to decide again. `may_be_idle` is false for a position without a bit
    /// in `Sweep::skipped`. Returns whether the decision has changed.
    #[cold]
    fn decide(&mut self, at_ns: i64, gpu: &GpuState, may_be_idle: bool, idle_ns: i64) -> bool {
        let was_idle = self.is_idle;
        self.is_idle = may_be_idle && self.is_idle_at(at_ns, gpu);
        // Idle GPUs are due together, at multiples of their period, so that one wake-up reads all of them.
        let idle_due_ns = || (at_ns.div_euclid(idle_ns) + 1) * idle_ns;
        self.next_ns = if self.is_idle { idle_due_ns() } else { at_ns + LOOK_NS };
        self.is_idle != was_idle
    }

    fn is_idle_at(&self, at_ns: i64, gpu: &GpuState) -> bool {
        let sign_ns = self.sign_ns.max(gpu.annotated_ns());
        self.used_bytes.is_some_and(|used_bytes| used_bytes <= BARE_BYTES)
            && at_ns.saturating_sub(sign_ns) >= QUIET_NS
            && gpu.processes().is_some_and(|listed| listed.reading.is_empty() && listed.at_ns > sign_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::MILLISECOND_NS as MS;
    use highwater_core::gpu::Process;

    const IDLE_NS: i64 = 50 * MS;
    const PROCESS: Process = Process { pid: 1, used_bytes: None };

    /// A GPU whose memory is read whenever it is due, and the times of its readings.
    struct Rig {
        idle: Idle,
        gpu: GpuState,
        now_ns: i64,
    }

    impl Rig {
        fn new() -> Self {
            let mut idle = Idle::new(1);
            idle.set_periods(Some(IDLE_NS), MS);
            Self { idle, gpu: crate::sample::hand::gpu(), now_ns: 0 }
        }

        /// Runs sweeps of the full rate for this long, with this much memory in use. Returns when it was read.
        fn run(&mut self, for_ns: i64, used_bytes: Option<u64>) -> Vec<i64> {
            let until_ns = self.now_ns + for_ns;
            let mut read_ns = vec![];
            while self.now_ns < until_ns {
                self.now_ns += MS;
                if self.idle.is_due(0, self.now_ns) {
                    self.idle.note(0, &self.gpu, self.now_ns, used_bytes);
                    read_ns.push(self.now_ns);
                }
            }
            read_ns
        }

        fn list(&self, processes: &[Process]) {
            self.gpu.set_processes(self.now_ns, Some(processes.to_vec()));
        }

        /// Makes it idle: nothing listed, and no sign for long enough.
        fn rest(&mut self) {
            self.run(MS, Some(0));
            self.now_ns += MS;
            self.list(&[]);
            self.run(2 * SECOND_NS, Some(0));
            assert_eq!(self.idle.period_ns(0), IDLE_NS);
        }
    }

    #[test]
    fn an_idle_gpu_is_read_at_multiples_of_its_period() {
        let mut rig = Rig::new();
        rig.rest();
        rig.now_ns = 3 * SECOND_NS;
        let read_ns = rig.run(200 * MS, Some(0));
        let since_ns: Vec<_> = read_ns.iter().map(|at_ns| (at_ns - 3 * SECOND_NS) / MS).collect();
        assert_eq!(since_ns, [1, 50, 100, 150, 200], "the first after a pause");
    }

    #[test]
    fn nothing_is_idle_while_there_may_be_a_context() {
        for (processes, used_bytes, why) in [
            (None, Some(0), "the driver does not list processes"),
            (Some(vec![PROCESS]), Some(0), "a process is listed"),
            (Some(vec![]), Some(BARE_BYTES + 1), "there is memory of one that is not listed"),
            (Some(vec![]), None, "its memory is not known"),
        ] {
            let mut rig = Rig::new();
            rig.run(MS, used_bytes);
            rig.now_ns += MS;
            rig.gpu.set_processes(rig.now_ns, processes);
            assert_eq!(rig.run(5 * SECOND_NS, used_bytes).len(), 5_000, "{why}");
        }
        let mut rig = Rig::new();
        rig.run(MS, Some(BARE_BYTES));
        rig.now_ns += MS;
        rig.list(&[]);
        assert!(rig.run(5 * SECOND_NS, Some(BARE_BYTES)).len() < 1_500);
    }

    #[test]
    fn a_list_older_than_the_last_sign_shows_nothing() {
        let mut rig = Rig::new();
        rig.run(MS, Some(0));
        rig.now_ns += MS;
        rig.list(&[]);
        rig.run(SECOND_NS / 2, Some(7));
        rig.run(5 * SECOND_NS, Some(0));
        assert_eq!(rig.idle.period_ns(0), MS, "its memory has changed since");
        rig.list(&[]);
        rig.run(SECOND_NS, Some(0));
        assert_eq!(rig.idle.period_ns(0), IDLE_NS);
    }

    #[test]
    fn what_changes_back_between_two_looks_is_a_sign() {
        for used_bytes in [Some(7), None] {
            let mut rig = Rig::new();
            rig.run(MS, Some(0));
            // The next look is after 250 ms.
            rig.run(100 * MS, Some(0));
            rig.run(MS, used_bytes);
            rig.run(MS, Some(0));
            let back_ns = rig.now_ns;
            rig.now_ns += MS;
            rig.list(&[]);
            rig.run(QUIET_NS - 2 * MS, Some(0));
            assert_eq!(rig.idle.period_ns(0), MS, "{used_bytes:?}");
            rig.run(back_ns + QUIET_NS + LOOK_NS - rig.now_ns, Some(0));
            assert_eq!(rig.idle.period_ns(0), IDLE_NS, "{used_bytes:?}");
        }
    }

    #[test]
    fn every_sign_brings_back_the_full_rate_with_the_next_reading() {
        type Sign = fn(&mut Rig) -> Option<u64>;
        let signs: [(&str, Sign); 5] = [
            ("memory rises", |_| Some(1)),
            ("memory is not known", |_| None),
            ("a process is listed", |rig| {
                rig.list(&[PROCESS]);
                Some(0)
            }),
            ("processes are not listed", |rig| {
                rig.gpu.set_processes(rig.now_ns, None);
                Some(0)
            }),
            ("an annotation names it", |rig| {
                rig.gpu.note_annotation(rig.now_ns);
                Some(0)
            }),
        ];
        for (why, sign) in signs {
            let mut rig = Rig::new();
            rig.rest();
            rig.now_ns = 3 * SECOND_NS + 7 * MS;
            rig.run(MS, Some(0));
            let used_bytes = sign(&mut rig);
            let read_ns = rig.run(QUIET_NS, used_bytes);
            assert_eq!(read_ns[0], 3 * SECOND_NS + 50 * MS, "{why}: when it was due");
            assert!(read_ns.windows(2).all(|pair| pair[1] - pair[0] == MS), "{why}");
            assert_eq!(rig.idle.period_ns(0), MS, "{why}");
        }
    }

    #[test]
    fn a_gpu_stays_at_the_full_rate_for_a_while_after_an_annotation() {
        let mut rig = Rig::new();
        rig.rest();
        rig.gpu.note_annotation(rig.now_ns);
        rig.run(IDLE_NS, Some(0));
        rig.now_ns += MS;
        rig.list(&[]);
        rig.run(QUIET_NS - IDLE_NS - 2 * MS, Some(0));
        assert_eq!(rig.idle.period_ns(0), MS);
        rig.run(LOOK_NS + IDLE_NS, Some(0));
        assert_eq!(rig.idle.period_ns(0), IDLE_NS);
    }

    #[test]
    fn without_a_period_or_with_a_shorter_one_nothing_is_idle() {
        for idle_ns in [None, Some(MS), Some(MS / 2)] {
            let mut rig = Rig::new();
            rig.idle.set_periods(idle_ns, MS);
            rig.run(MS, Some(0));
            rig.now_ns += MS;
            rig.list(&[]);
            assert_eq!(rig.run(3 * SECOND_NS, Some(0)).len(), 3_000);
            assert_eq!(rig.idle.period_ns(0), MS);
        }
    }

    #[test]
    fn an_overloaded_driver_is_not_read_more_often_for_idleness() {
        let mut rig = Rig::new();
        rig.rest();
        rig.idle.set_full(100 * MS);
        assert_eq!(rig.idle.period_ns(0), 100 * MS);
    }
}
