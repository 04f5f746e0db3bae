//! How long a lane waits before it tries again.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// Waits double from 1 s to 30 s. Each is shortened by up to a half at random, so that a fleet does not return all at
/// once to a receiver that is back.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    random: u64,
}

impl Backoff {
    /// Seeded by the system's random numbers. In a container every daemon has process id 1, and a fleet's daemons start
    /// together, so neither distinguishes them.
    pub fn new() -> Self {
        Self::seeded(RandomState::new().hash_one(0))
    }

    fn seeded(seed: u64) -> Self {
        Self { next: FIRST, random: seed | 1 }
    }

    /// Whether the last attempt succeeded.
    pub fn is_reset(&self) -> bool {
        self.next == FIRST
    }

    pub fn reset(&mut self) {
        self.next = FIRST;
    }

    /// The next wait. A wait that the receiver asked for is never shortened, but stretched by up to a tenth. It is at
    /// least the first of our own waits, so that a receiver that asks for no wait is not retried without a pause.
    pub fn wait(&mut self, asked: Option<Duration>) -> Duration {
        let random = self.random_share();
        let own = self.next;
        self.next = (own * 2).min(LONGEST);
        match asked {
            Some(asked) => asked.max(FIRST).mul_f64(1.0 + 0.1 * random),
            None => own.mul_f64(1.0 - 0.5 * random),
        }
    }

    /// A random number from 0 to 1, by xorshift.
    fn random_share(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        #[allow(clippy::cast_precision_loss, reason = "a share")]
        let share = (self.random >> 11) as f64 / (1_u64 << 53) as f64;
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_within_their_jitter_and_begin_anew() {
        let mut backoff = Backoff::seeded(42);
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            let wait = backoff.wait(None).as_secs_f64();
            assert!(wait > f64::from(seconds) * 0.5 && wait <= f64::from(seconds), "{wait} for {seconds}");
        }
        let asked = backoff.wait(Some(Duration::from_secs(100))).as_secs_f64();
        assert!((100.0..110.0).contains(&asked));
        assert!(backoff.wait(Some(Duration::ZERO)) >= FIRST, "a request for no wait is ignored");
        backoff.reset();
        assert!(backoff.wait(None) <= FIRST);
    }

    #[test]
    fn exporters_of_one_process_id_wait_differently() {
        let waits = |_| {
            let mut backoff = Backoff::new();
            (0..8).map(|_| backoff.wait(None)).collect::<Vec<_>>()
        };
        let [one, other] = [0, 1].map(waits);
        assert!(one.iter().zip(&other).all(|(one, other)| one != other), "{one:?} and {other:?}");
    }
}
