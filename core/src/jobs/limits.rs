//! How much of what jobs send is kept.

use crate::clock::SECOND_NS;

/// Bounds on everything that jobs can make the daemon hold. Those over all jobs are shared among owners
/// ([`Accounts`](super::Accounts)): one alone gets half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Jobs at a time.
    pub jobs: usize,
    /// Ranks at a time, over all jobs.
    pub ranks: usize,
    /// Different phase names of one job: each is a label value.
    pub phase_names: usize,
    /// Phases of ranks that have series of their own, over all jobs. Each has some 75 series, or 30 if there are more than 256
    /// such phases.
    pub phase_series: usize,
    /// Different layer names of one job.
    pub layer_names: usize,
    /// Steps, phases and layers that one rank has open at a time.
    pub open: usize,
    /// Length of a job's, phase's, layer's or mark's name, bytes.
    pub name_bytes: usize,
    /// Attributes of one event.
    pub attributes: usize,
    /// Length of all names and texts of one event's attributes together, bytes.
    pub attribute_bytes: usize,
    /// Bytes of jobs, ranks, names, series and of what is open or waits for its memory, over all jobs. What has ended
    /// and layers have limits of their own.
    pub bytes: usize,
    /// Bytes of what has ended and is kept for the API, over all jobs.
    pub ended_bytes: usize,
    /// Bytes of layers that have ended and are kept one by one for captures, over all jobs.
    pub ended_layer_bytes: usize,
    /// Bytes of the statistics and profiles of each rank's layers, over all jobs.
    pub layer_bytes: usize,
    /// Layers of a rank's profile with metrics of their own: those with the most activations.
    pub top_layers: usize,
    /// Events a second, over all senders.
    pub events_a_second: usize,
    /// Connections to the seqpacket socket.
    pub connections: usize,
    /// Processes whose end is waited for; each takes a file descriptor.
    pub processes: usize,
    /// Phases ended and not yet attributed.
    pub pending: usize,
    /// Ended phases kept for the API, over all jobs.
    pub ended: usize,
    /// Marks kept.
    pub marks: usize,
    /// How far back an event may lie, nanoseconds: what the ring keeps.
    pub past_ns: i64,
    /// How far ahead an event may lie, nanoseconds: the error of reading two clocks.
    pub future_ns: i64,
    /// A rank that says nothing for this long is forgotten, nanoseconds.
    pub silence_ns: i64,
    /// A rank that has ended is shown for this long, nanoseconds: until every scraper has seen its last steps.
    pub shown_after_exit_ns: i64,
}

/// Upper bound of [`Limits::trail_bytes`]: room for some million steps and phases.
const MOST_TRAIL_BYTES: usize = 16 << 20;

impl Limits {
    /// Bytes of the times of ended steps and phases, which charts draw, over all jobs.
    #[must_use]
    pub fn trail_bytes(&self) -> usize {
        (self.ended_bytes / 6).min(MOST_TRAIL_BYTES)
    }

    /// Sets the bytes of what has ended. Layers that are kept one by one get a third as much in addition, and the statistics and
    /// profiles of layers two thirds. A single owner gets half of each; by default, profiles of 64 ranks fit into that.
    pub fn set_ended_bytes(&mut self, bytes: usize) {
        (self.ended_bytes, self.ended_layer_bytes, self.layer_bytes) = (bytes, bytes / 3, bytes / 3 * 2);
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            jobs: 128,
            ranks: 512,
            phase_names: 32,
            phase_series: 2_048,
            layer_names: 4096,
            open: 32,
            name_bytes: 128,
            attributes: 16,
            attribute_bytes: 1024,
            bytes: 12 << 20,
            ended_bytes: 6 << 20,
            ended_layer_bytes: 2 << 20,
            layer_bytes: 4 << 20,
            top_layers: 10,
            events_a_second: 400_000,
            connections: 1_024,
            processes: 512,
            pending: 16_384,
            ended: 4_096,
            marks: 256,
            past_ns: 600 * SECOND_NS,
            future_ns: SECOND_NS,
            silence_ns: 300 * SECOND_NS,
            shown_after_exit_ns: 120 * SECOND_NS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_that_the_daemon_answers_for() {
        let mut limits = Limits::default();
        let bytes = |limits: &Limits| [limits.ended_bytes, limits.ended_layer_bytes, limits.layer_bytes];
        assert_eq!((limits.bytes, bytes(&limits)), (12_582_912, [6_291_456, 2_097_152, 4_194_304]));
        limits.set_ended_bytes(10);
        assert_eq!(bytes(&limits), [10, 3, 6]);
        assert_eq!((limits.past_ns, limits.silence_ns), (600_000_000_000, 300_000_000_000));
        assert_eq!((limits.future_ns, limits.shown_after_exit_ns), (1_000_000_000, 120_000_000_000));
    }
}
