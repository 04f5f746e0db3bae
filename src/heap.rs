//! The heap of the process: it is kept small, and given back; and what is being made of it is counted.
//!
//! What is freed below something that is still in use stays resident. Long answers, captures and findings come in bursts, so that
//! after an hour of many users a third of the daemon's memory was free pages.

use crate::metrics::{Collect, Families, Part};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often free pages are given back. It takes up to some milliseconds, in which no other thread can allocate; the fast lane
/// does not.
const PERIOD: Duration = Duration::from_secs(10);
/// If the peak memory of something that was made exceeds what is left of it by at least `MUCH` bytes, free pages are given
/// back at the next look.
const MUCH: isize = 2 << 20;

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
        let much = MUCH_WAS_FREED.swap(false, Ordering::Relaxed);
        if much || self.0.is_none_or(|last| last.elapsed() >= PERIOD) {
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

/// Bytes that threads have allocated for what they are [making].
static IN_THE_MAKING: AtomicUsize = AtomicUsize::new(0);
/// Whether much of it was freed since free pages were given back.
static MUCH_WAS_FREED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Those of this thread; `None` if it makes nothing.
    static MADE: Cell<Option<Made>> = const { Cell::new(None) };
}

/// Bytes of what is being made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Made {
    now: isize,
    highest: isize,
}

/// Does work on this thread. Until it returns, what it allocates and has not freed is counted as being made: an answer, an
/// exposition, the page of a capture. The result is not counted any more, as its owner has a part of its own.
pub fn making<T>(work: impl FnOnce() -> T) -> T {
    let _making = Making { outer: MADE.replace(Some(Made::default())), thread: PhantomData };
    work()
}

/// Counts for its thread while it exists.
struct Making {
    outer: Option<Made>,
    thread: PhantomData<*const ()>,
}

impl Drop for Making {
    fn drop(&mut self) {
        let made = MADE.replace(self.outer).unwrap_or_default();
        IN_THE_MAKING.fetch_sub(made.now.cast_unsigned(), Ordering::Relaxed);
        if made.highest - made.now >= MUCH {
            MUCH_WAS_FREED.store(true, Ordering::Relaxed);
        }
    }
}

/// Adds to what this thread makes; a negative number of bytes was freed.
fn note(bytes: isize) {
    // At the end of a thread nothing is made.
    let _ = MADE.try_with(|made| {
        if let Some(before) = made.get() {
            let now = before.now.wrapping_add(bytes);
            made.set(Some(Made { now, highest: before.highest.max(now) }));
            IN_THE_MAKING.fetch_add(bytes.cast_unsigned(), Ordering::Relaxed);
        }
    });
}

/// The system's allocator, with a count of what is being made.
#[derive(Debug, Clone, Copy)]
pub struct Counting;

// SAFETY: every call is passed on to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size().cast_signed());
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc(layout) }
    }

    #[inline(never)]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(-layout.size().cast_signed());
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size().cast_signed());
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline(never)]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// What is being made, as a part of the daemon's memory.
#[derive(Debug)]
pub struct InTheMaking;

impl Collect for InTheMaking {
    fn collect(&self, out: &mut Families) {
        // More may have been freed than was allocated.
        let bytes = IN_THE_MAKING.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned();
        out.memory(Part::Making, bytes);
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
        making(|| drop(vec![0_u8; 1 << 20]));
        returns.look();
        assert!(in_memory(&addresses) > 150, "little was freed");
        making(|| drop(vec![0_u8; 3 << 20]));
        returns.look();
        assert!(in_memory(&addresses) < 50, "{}", in_memory(&addresses));
        assert_eq!(kept.len(), 200);
    }

    #[test]
    fn what_is_being_made_counts_until_it_is_whole() {
        const MIB: isize = 1 << 20;
        let made = || MADE.get().expect("something is being made").now;
        let rest = |before: usize| IN_THE_MAKING.load(Ordering::Relaxed).wrapping_sub(before).cast_signed();
        assert_eq!(MADE.get(), None);
        let (earlier, whole) = (
            vec![0_u8; 1 << 20],
            making(|| {
                let begin = IN_THE_MAKING.load(Ordering::Relaxed);
                let mut text = vec![0_u8; 3 << 20];
                assert_eq!(made(), 3 * MIB);
                text.reserve_exact(1);
                assert_eq!(made(), 3 * MIB + 1);
                // Other tests of this process may make something too, though nothing of this size.
                assert!(rest(begin) >= 2 * MIB);
                let inner = making(|| (made(), vec![0_u8; 1 << 20]));
                assert_eq!((inner.0, made()), (0, 3 * MIB + 1), "the inner result counts no longer");
                text
            }),
        );
        assert_eq!((MADE.get(), whole.len()), (None, 3 << 20));
        // What was there before and is freed meanwhile is less than nothing.
        making(|| {
            drop(earlier);
            assert_eq!(made(), -MIB);
        });
        let panicked = std::panic::catch_unwind(|| making(|| panic!("what is not finished")));
        assert_eq!((panicked.is_err(), MADE.get()), (true, None));
    }
}
