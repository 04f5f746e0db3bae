//! What a detector reports: signs, and the findings made from them, which last as long as their signs go on.
//!
//! Enters: nothing; this is the vocabulary. Leaves: [`Sign`]s of detectors and [`Finding`]s of the board. Absent on
//! purpose: any rule about when something is found.

use crate::gpu::Workload;
use crate::jobs::JobId;
use serde::{Deserialize, Serialize};
use std::fmt;

crate::labels! {
    /// What kind of trouble it is: the label `finding`.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[allow(missing_docs, reason = "each has a file of its own that explains it")]
    pub enum FindingKind {
        Oom = "oom",
        HostOom = "host_oom",
        LowHeadroom = "low_headroom",
        AllocatorThrash = "allocator_thrash",
        CommStarvation = "comm_starvation",
        InputStall = "input_stall",
        Straggler = "straggler",
        StageImbalance = "stage_imbalance",
        UnevenWork = "uneven_work",
        SlowSteps = "slow_steps",
        MemoryGrowth = "memory_growth",
        IdleGpu = "idle_gpu",
        GpuThrottled = "gpu_throttled",
        PcieDegraded = "pcie_degraded",
        NvlinkDegraded = "nvlink_degraded",
        GpuUnhealthy = "gpu_unhealthy",
        GpuLost = "gpu_lost",
        Xid = "xid",
    }
}

/// How bad it is: the label `severity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Worth knowing: brief, usual, or not yet known to last.
    Info,
    /// Time or money is being lost.
    Warning,
    /// The job fails, or is about to.
    Critical,
}

impl Severity {
    /// The label value.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Critical => "critical",
        }
    }
}

/// How certain a sign is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Certainty {
    /// It looks so from outside; something else may look alike.
    Suspected,
    /// The readings themselves say it.
    Observed,
    /// The job's own counters agree.
    Confirmed,
}

impl Certainty {
    /// The word for it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Certainty::Suspected => "suspected",
            Certainty::Observed => "observed",
            Certainty::Confirmed => "confirmed",
        }
    }
}

crate::labels! {
    /// Why a rank is late.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum LagCause {
        /// It computes longer than the others, and its clocks are not held back. It probably has more work.
        Computes = "computes",
        /// It computes longer because its GPU's clocks are held back.
        Clocks = "clocks",
        /// Its GPU waits for its host.
        Host = "host",
        /// Its host is late because its process waits for a CPU.
        Cpu = "cpu",
        /// Its process waits for a CPU because its container has reached its CPU limit.
        CpuLimit = "cpu_limit",
        /// Its host is late because its container waits for memory of the host.
        HostMemory = "host_memory",
        /// Its host is late because its container waits for storage.
        Storage = "storage",
        /// Its host is late because Python's garbage collector stops it.
        GarbageCollector = "garbage_collector",
        /// Its input is late.
        Data = "data",
        /// It mapped memory.
        Memory = "memory",
    }
}

/// Whom it concerns; a part that does not apply is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// Position of the GPU.
    pub gpu: Option<usize>,
    /// The job.
    pub job: Option<JobId>,
    /// Which process of it.
    pub rank: Option<u32>,
}

/// One measured number of a finding. The name has its unit: it ends in `_bytes`, `_seconds`, `_ratio` or `_count`, or
/// contains `bytes_each_`. The exception is `xid`, a number without a unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evidence {
    /// What was measured.
    pub name: &'static str,
    /// The number.
    pub value: f64,
}

/// Three sentences for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Text {
    /// What is the matter.
    pub what: String,
    /// Why that is believed, in numbers.
    pub why: String,
    /// What to try next.
    pub advice: String,
}

/// Ranks that a finding lists as waiting; further ones are left out of the list.
pub const MOST_WAITING: usize = 64;

/// What a detector sees at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Sign {
    /// What it is.
    pub kind: FindingKind,
    /// Whom it concerns.
    pub subject: Subject,
    /// How bad.
    pub severity: Severity,
    /// How sure.
    pub certainty: Certainty,
    /// When it began, nanoseconds of the timeline.
    pub begin_ns: i64,
    /// Until when it counts as going on if no other sign follows, nanoseconds of the timeline.
    pub until_ns: i64,
    /// The step in which it was seen.
    pub step: Option<u64>,
    /// Distinguishes findings of one kind on one subject: an XID, a pipeline stage, or an ailment of `gpu_unhealthy`.
    pub code: Option<u64>,
    /// Why a rank is late, where its sign is about that and the readings decide.
    pub lag_cause: Option<LagCause>,
    /// Ranks of the job that wait for the subject, in order and at most 64; empty where nobody is known to.
    pub waiting_ranks: Vec<u32>,
    /// Time that ranks lost by it since the sign before, summed over the ranks, nanoseconds; `None` where that is not known.
    pub lost_ns: Option<i64>,
    /// The numbers.
    pub evidence: Vec<Evidence>,
    /// The words.
    pub text: Text,
}

impl Sign {
    /// Ranks that wait as well; the list stays in order and bounded.
    pub(super) fn add_waiting(&mut self, ranks: &[u32]) {
        self.waiting_ranks.extend(ranks);
        self.waiting_ranks.sort_unstable();
        self.waiting_ranks.dedup();
        self.waiting_ranks.truncate(MOST_WAITING);
    }
}

/// What one sign said, when it was seen.
#[derive(Debug, Clone, PartialEq)]
pub struct Said {
    /// When, nanoseconds of the timeline.
    pub seen_ns: i64,
    /// The step in which it was seen.
    pub step: Option<u64>,
    /// What was the matter.
    pub what: String,
    /// Why that was believed, in numbers.
    pub why: String,
}

impl Said {
    /// The text of a sign that is seen at `seen_ns`, without its advice, which hardly changes within a kind.
    #[must_use]
    pub fn of(sign: &Sign, seen_ns: i64) -> Self {
        Self { seen_ns, step: sign.step, what: sign.text.what.clone(), why: sign.text.why.clone() }
    }
}

/// A problem, from its first sign until its last sign runs out.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Number of the finding since the daemon started.
    pub id: u64,
    /// Number of the [`Incident`](super::Incident) that it belongs to.
    pub incident: u64,
    /// Index and UUID of its GPU.
    pub gpu: Option<(String, String)>,
    /// The pods or Slurm steps that its newest sign is about: of a job's finding that of its rank, as the rank's process shows it; of one
    /// without a job those that have the GPU or an instance of it, the one that holds most memory first, at most
    /// [`MOST_NAMED`](crate::gpu::MOST_NAMED). Empty if there are none, or they are not known.
    pub workloads: Vec<Workload>,
    /// What the first sign said.
    pub first: Said,
    /// The newest sign, but with the highest severity and certainty, the earliest begin, the latest `until_ns`, and the waiting
    /// ranks of all signs.
    pub sign: Sign,
    /// When it was raised, nanoseconds of the timeline.
    pub raised_ns: i64,
    /// When the newest sign was seen.
    pub seen_ns: i64,
    /// When it ended, which is the time of its last sign; `None` while it is active.
    pub ended_ns: Option<i64>,
    /// How many signs it has had.
    pub signs: u64,
}

impl Finding {
    /// The names of its [`workloads`](Self::workloads), as texts.
    #[must_use]
    pub fn workload_names(&self) -> Vec<String> {
        self.workloads.iter().map(ToString::to_string).collect()
    }

    /// Bytes that it takes in memory, with its texts and lists.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let (sign, first) = (&self.sign, &self.first);
        let texts = [&sign.text.what, &sign.text.why, &sign.text.advice, &first.what, &first.why];
        let gpu = self.gpu.iter().map(|(index, uuid)| index.len() + uuid.len()).sum::<usize>();
        let lists = sign.waiting_ranks.len() * size_of::<u32>() + sign.evidence.len() * size_of::<Evidence>();
        let workloads = self.workloads.iter().map(Workload::bytes).sum::<usize>();
        size_of::<Self>() + texts.into_iter().map(String::len).sum::<usize>() + gpu + lists + workloads
    }
}

/// A number of bytes for people, in the unit that keeps it short.
#[derive(Debug, Clone, Copy)]
pub(super) struct HumanBytes(pub f64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = 1_048_576.0;
        if self.0.abs() >= 1024.0 * MIB {
            write!(f, "{:.1} GiB", self.0 / 1024.0 / MIB)
        } else if self.0 != 0.0 && self.0.abs() < MIB {
            write!(f, "{:.0} KiB", self.0 * 1024.0 / MIB)
        } else if self.0.abs() < 10.0 * MIB && self.0 % MIB != 0.0 {
            write!(f, "{:.1} MiB", self.0 / MIB)
        } else {
            write!(f, "{:.0} MiB", self.0 / MIB)
        }
    }
}

/// A duration for people.
#[derive(Debug, Clone, Copy)]
pub(super) struct HumanDuration(pub i64);

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = seconds(self.0);
        match seconds.abs() {
            s if s < 1.0 => write!(f, "{:.0} ms", seconds * 1e3),
            s if s < 120.0 => write!(f, "{seconds:.1} s"),
            s if s < 7200.0 => write!(f, "{:.0} min", seconds / 60.0),
            _ => write!(f, "{:.1} h", seconds / 3600.0),
        }
    }
}

/// A text with its first letter in upper case.
pub(super) fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Nanoseconds as seconds.
#[allow(clippy::cast_precision_loss, reason = "durations of at most days, for people and gauges")]
pub(super) fn seconds(ns: i64) -> f64 {
    ns as f64 / 1e9
}

/// Bytes or counts as a number of evidence.
#[allow(clippy::cast_precision_loss, reason = "bytes of one GPU stay below 2^53")]
pub(super) fn number(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people_are_in_the_unit_that_keeps_them_short() {
        let gib = 1_073_741_824.0;
        assert_eq!(
            [0.0, 5e5, 2e6, 2_097_152.0, 5e7, gib - 1e6, gib, 1.5 * gib].map(|bytes| HumanBytes(bytes).to_string()),
            ["0 MiB", "488 KiB", "1.9 MiB", "2 MiB", "48 MiB", "1023 MiB", "1.0 GiB", "1.5 GiB"]
        );
        let spans = [40, 999, 1_000, 119_900, 120_000, 7_199_000, 7_200_000]
            .map(|ms| HumanDuration(ms * 1_000_000).to_string());
        assert_eq!(spans, ["40 ms", "999 ms", "1.0 s", "119.9 s", "2 min", "120 min", "2.0 h"]);
        assert_eq!(HumanDuration(-40_000_000).to_string(), "-40 ms");
    }

    #[test]
    fn severity_and_certainty_have_their_words_and_their_order() {
        assert_eq!(
            [Severity::Info, Severity::Warning, Severity::Critical].map(Severity::label),
            ["info", "warning", "critical"]
        );
        let certainties = [Certainty::Suspected, Certainty::Observed, Certainty::Confirmed];
        assert_eq!(certainties.map(Certainty::label), ["suspected", "observed", "confirmed"]);
        assert!(Severity::Info < Severity::Warning && Certainty::Observed < Certainty::Confirmed);
    }
}
