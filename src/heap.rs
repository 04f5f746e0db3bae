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
    use std::os::unix::fs::FileExt as _;

    const ALONE: &str = "HIGHWATER_TEST_OF_THE_HEAP";

    /// How many of the first pages of pieces at these addresses are in memory.
    fn in_memory(addresses: &[usize]) -> usize {
        let pages = std::fs::File::open("/proc/self/pagemap").expect("the kernel says");
        let is_in = |address: &&usize| {
            let mut entry = [0; 8];
            let page = *address / rustix::param::page_size() + 1;
            pages.read_exact_at(&mut entry, 8 * page as u64).expect("it is mapped");
            u64::from_ne_bytes(entry) >> 63 == 1
        };
        addresses.iter().filter(is_in).count()
    }

    #[test]
    fn what_was_freed_between_what_is_kept_is_given_back() {
        if std::env::var_os(ALONE).is_none() {
            // In a process of its own: other tests would use what is freed.
            let this = std::env::current_exe().expect("a program");
            let name = "heap::tests::what_was_freed_between_what_is_kept_is_given_back";
            let ran =
                std::process::Command::new(this).args(["--exact", name]).env(ALONE, "1").output().expect("it runs");
            let said = String::from_utf8_lossy(&ran.stdout);
            assert!(ran.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let mut returns = Returns::default();
        returns.look();
        // 64 KiB each, and a little after each that stays.
        let pieces: Vec<_> = (0..200).map(|n| (vec![n as u8; 64 << 10], Box::new(n))).collect();
        let addresses: Vec<_> = pieces.iter().map(|(piece, _)| piece.as_ptr() as usize).collect();
        let kept: Vec<_> = pieces.into_iter().map(|(_, kept)| kept).collect();
        assert!(in_memory(&addresses) > 150, "free pages stay");
        returns.look();
        assert!(in_memory(&addresses) > 150, "it is not due yet");
        Returns::default().look();
        assert!(in_memory(&addresses) < 50, "{}", in_memory(&addresses));
        assert_eq!(kept.len(), 200);
    }
}
