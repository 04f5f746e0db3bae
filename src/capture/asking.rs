//! How often captures may be requested: three at once, then one whenever its share of the hour has passed. Pure.

use std::time::{Duration, Instant};

/// Captures that may be requested at once after a long silence.
const BURST: u32 = 3;

/// When the next capture may be requested.
#[derive(Debug, Default)]
pub(super) struct Asking {
    /// When the budget will be full again: each request moves this time on by its share of the hour.
    paid: Option<Instant>,
}

impl Asking {
    /// How long a request made now has to wait; `None` if not at all.
    pub fn wait(&self, now: Instant, per_hour: usize) -> Option<Duration> {
        let ahead = self.paid?.checked_duration_since(now)?;
        ahead.checked_sub(share(per_hour) * (BURST - 1)).filter(|wait| !wait.is_zero())
    }

    /// Counts a request whose capture begins.
    pub fn spend(&mut self, now: Instant, per_hour: usize) {
        self.paid = Some(self.paid.map_or(now, |paid| paid.max(now)) + share(per_hour));
    }
}

fn share(per_hour: usize) -> Duration {
    Duration::from_secs(3600) / u32::try_from(per_hour.max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_at_once_and_then_one_every_hundred_seconds() {
        let (mut asking, begin, second) = (Asking::default(), Instant::now(), Duration::from_secs(1));
        let mut begun = Vec::new();
        // A request every tenth of a second for ten minutes.
        for tenth in 0..6_000_u32 {
            let now = begin + Duration::from_millis(100) * tenth;
            if asking.wait(now, 36).is_none() {
                asking.spend(now, 36);
                begun.push(tenth / 10);
            }
        }
        assert_eq!(begun, [0, 0, 0, 100, 200, 300, 400, 500]);
        assert_eq!(asking.wait(begin + 510 * second, 36), Some(90 * second));
        assert_eq!(asking.wait(begin + 600 * second, 36), None);
        assert_eq!(asking.wait(begin + 10_000 * second, 36), None);
    }
}
