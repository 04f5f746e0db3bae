//! The token bucket of `rate_limit`.

use super::file::Rate;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// A bucket that holds `burst` requests and is refilled by one each `interval`.
#[derive(Debug)]
pub(super) struct Bucket {
    pub rate: Rate,
    /// When the bucket is full again.
    full_at: Mutex<Instant>,
}

impl Bucket {
    pub(super) fn new(rate: Rate) -> Self {
        Self { rate, full_at: Mutex::new(Instant::now()) }
    }

    /// Takes one request, or returns how long until one is available.
    pub(super) fn take(&self) -> Result<(), Duration> {
        let now = Instant::now();
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let room = self.rate.interval.saturating_mul(self.rate.burst.saturating_sub(1));
        let missing = full_at.saturating_duration_since(now);
        if missing > room {
            return Err(missing - room);
        }
        *full_at = now + missing + self.rate.interval;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_answered_and_then_one_each_interval() {
        let bucket = Bucket::new(Rate { interval: Duration::from_secs(2), burst: 3 });
        assert_eq!([bucket.take(), bucket.take(), bucket.take()], [Ok(()); 3]);
        assert_eq!(bucket.take(), Err(Duration::from_secs(2)));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(bucket.take(), Ok(()));
        assert!(bucket.take().is_err());
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!([bucket.take(), bucket.take(), bucket.take()], [Ok(()); 3]);
        assert!(bucket.take().is_err(), "it never holds more than its burst");
    }
}
