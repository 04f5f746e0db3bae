//! Thresholds of the detectors.

use crate::clock::{MILLISECOND_NS, SECOND_NS};

/// The detectors' thresholds, and the names of phases that they know. Durations are in nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Whether anything is looked for.
    pub enabled: bool,
    /// Phases of communication, by name.
    pub comm_phases: Vec<String>,
    /// Phases in which a rank waits for its input, by name.
    pub data_phases: Vec<String>,
    /// Phases that free and refill memory on purpose, by name.
    pub refill_phases: Vec<String>,
    /// Less free memory than this is low headroom, bytes.
    pub headroom_bytes: u64,
    /// Less than this is critical, bytes.
    pub critical_headroom_bytes: u64,
    /// How long memory must be that full within a second.
    pub headroom_ns: i64,
    /// Communication that takes this many times its baseline is slow.
    pub comm_slowdown: f64,
    /// Communication that takes less than this above its baseline is not worth a finding.
    pub comm_excess_ns: i64,
    /// Waiting for data is a stall from this share of a rank's time on.
    pub stall_share: f64,
    /// A rank that computes this many times as long as its peers lags.
    pub lag: f64,
    /// A lag below this is not worth a finding.
    pub lag_ns: i64,
    /// Steps of a run that are warm-up: memory is mapped and kernels are chosen in them.
    pub warm_up_steps: u64,
    /// Memory that is held for this long with nothing running is idle.
    pub idle_after_ns: i64,
    /// Less held memory than this is not worth a finding, bytes.
    pub idle_bytes: u64,
    /// A finding outlasts its last sign by this.
    pub hold_ns: i64,
}

impl Settings {
    /// Less free memory than this is low headroom, and less than half of it is critical, bytes.
    pub fn set_headroom(&mut self, bytes: u64) {
        (self.headroom_bytes, self.critical_headroom_bytes) = (bytes, bytes / 2);
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            comm_phases: vec!["comm".to_owned()],
            data_phases: vec!["data".to_owned()],
            refill_phases: ["checkpoint", "eval", "evaluation", "validation"].map(str::to_owned).to_vec(),
            // On an H200 NCCL takes 0.9 GiB for a process's first communicator and 0.5 GiB for each further one.
            headroom_bytes: 1 << 30,
            critical_headroom_bytes: 512 << 20,
            headroom_ns: 10 * MILLISECOND_NS,
            comm_slowdown: 2.0,
            comm_excess_ns: 20 * MILLISECOND_NS,
            stall_share: 0.3,
            lag: 1.2,
            lag_ns: 10 * MILLISECOND_NS,
            warm_up_steps: 3,
            idle_after_ns: 60 * SECOND_NS,
            idle_bytes: 1 << 30,
            hold_ns: 10 * SECOND_NS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_than_half_of_the_headroom_is_critical() {
        let mut settings = Settings::default();
        assert_eq!((settings.headroom_bytes, settings.critical_headroom_bytes), (1_073_741_824, 536_870_912));
        settings.set_headroom(7);
        assert_eq!((settings.headroom_bytes, settings.critical_headroom_bytes), (7, 3));
        assert_eq!(
            (settings.headroom_ns, settings.comm_excess_ns, settings.lag_ns),
            (10_000_000, 20_000_000, 10_000_000)
        );
        assert_eq!(
            (settings.idle_after_ns, settings.hold_ns, settings.idle_bytes),
            (60_000_000_000, 10_000_000_000, 1 << 30)
        );
    }
}
