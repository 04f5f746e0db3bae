//! The heap of the process: it is kept small, and given back.
//!
//! What is freed below something that is still in use stays resident. Long answers, captures and findings come in bursts, so that
//! after an hour of many users a third of the daemon's memory was free pages.

use std::time::{Duration, Instant};

/// How often free pages are given back. It takes up to some milliseconds, in which no other thread can allocate; the fast lane
/// does not.
const PERIOD: Duration = Duration::from_secs(10);

/// One heap for all threads instead of one each: the daemon allocates little, and a heap that was once full is never
/// given back.
pub fn keep_small() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: with documented parameters.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 10);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 256 << 10);
    }
}

/// Gives free pages back now and then.
#[derive(Debug, Default)]
pub struct Returns(Option<Instant>);

impl Returns {
    /// Gives them back, if that is due.
    pub fn look(&mut self) {
        if self.0.is_none_or(|last| last.elapsed() >= PERIOD) {
            self.0 = Some(Instant::now());
            give_back();
        }
    }
}

fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;
    use crate::footprint::Footprint;

    #[test]
    fn what_was_freed_between_what_is_kept_is_given_back() {
        const PIECES: usize = 4_000;
        let resident = || Footprint::now().expect("the kernel says").resident;
        let mut returns = Returns::default();
        returns.look();
        let before = resident();
        // 64 KiB each, and a little after each that stays.
        let mut pieces: Vec<_> = (0..PIECES).map(|n| Some((vec![n as u8; 64 << 10], Box::new(n)))).collect();
        let kept: Vec<_> = pieces.iter_mut().map(|piece| piece.take().map(|(_, kept)| kept)).collect();
        let full = resident();
        assert!(full - before > PIECES * (32 << 10), "free pages stay: {before}, then {full}");
        returns.look();
        assert!(resident() > before + PIECES * (32 << 10), "it is not due yet");
        Returns::default().look();
        assert!(resident() < before + PIECES * (32 << 10), "{before}, {full}, {}", resident());
        assert_eq!(kept.len(), PIECES);
    }
}
