//! Keeps the heap of the process small, returns its free pages to the kernel, and counts the memory of work in progress.
//!
//! The C library returns only the end of its heap: pages freed below memory that is still in use stay resident. Long answers,
//! captures and findings come in bursts, and after an hour of many users a third of the daemon's memory was free pages.

use crate::metrics::{Collect, Families, Part};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often free pages are given back.
const PERIOD: Duration = Duration::from_secs(10);
/// How often the heap is looked at.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Giving back and counting walk over all free pieces, some milliseconds to a tenth of a second, in which no other thread can
/// allocate; the fast lane does not. So each waits for this many times as long as it took.
const PAUSE: u32 = 500;
/// If work in progress freed at least this many bytes between its peak and its end, free pages are given back at the next look.
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

/// Looks after the heap until `stop` is set: gives free pages back, and counts what is free.
pub fn look_after(stop: &AtomicBool) {
    let mut heap = Heap::default();
    while !stop.load(Ordering::Relaxed) {
        heap.look();
        std::thread::park_timeout(LOOK_PERIOD);
    }
}

/// When free pages may be given back next, and when they may be counted.
#[derive(Debug, Default)]
struct Heap {
    give_back: Option<Instant>,
    count: Option<Instant>,
    given_back: Option<Instant>,
}

impl Heap {
    /// Does what is due.
    fn look(&mut self) {
        let now = Instant::now();
        let is_due = self.given_back.is_none_or(|last| now - last >= PERIOD) || MUCH_WAS_FREED.load(Ordering::Relaxed);
        if is_due && self.give_back.is_none_or(|next| now >= next) {
            MUCH_WAS_FREED.store(false, Ordering::Relaxed);
            give_back();
            (self.given_back, self.give_back) = (Some(now), Some(pause_after(now)));
        }
        let now = Instant::now();
        if self.count.is_none_or(|next| now >= next) {
            if let Some(bytes) = free_bytes() {
                FREE.store(bytes, Ordering::Relaxed);
            }
            self.count = Some(pause_after(now));
        }
    }
}

/// When what began at `begun`, and has just ended, may begin again.
fn pause_after(begun: Instant) -> Instant {
    Instant::now() + begun.elapsed() * PAUSE
}

fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes that work inside [`making`] has allocated and not freed, over all threads.
static IN_THE_MAKING: AtomicUsize = AtomicUsize::new(0);
/// Bytes of free pages, as they were last counted; [`UNKNOWN`] before that, and where the allocator does not say.
static FREE: AtomicUsize = AtomicUsize::new(UNKNOWN);
const UNKNOWN: usize = usize::MAX;
/// Whether work has freed [`MUCH`] bytes since free pages were returned.
static MUCH_WAS_FREED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The bytes of this thread's work in progress; `None` outside of [`making`].
    static MADE: Cell<Option<Made>> = const { Cell::new(None) };
}

/// Bytes of what is being made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Made {
    now: isize,
    highest: isize,
}

/// Runs `work`. Until it returns, the memory that it holds counts as work in progress: an answer, an exposition, the page of
/// a capture. Afterwards, the part of the daemon that owns the result counts it.
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

/// Bytes of the heap that are resident and not in use; `None` if they are not known.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn free_bytes() -> Option<usize> {
    // It does not move.
    static BEGIN: OnceLock<usize> = OnceLock::new();
    let read = || {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let heap = maps.lines().find(|line| line.ends_with("[heap]"))?;
        usize::from_str_radix(heap.split('-').next()?, 16).ok()
    };
    let begin = BEGIN.get().copied().or_else(|| read().map(|begin| *BEGIN.get_or_init(|| begin)))?;
    let page = rustix::param::page_size();
    // SAFETY: it moves nothing.
    let end = unsafe { libc::sbrk(0) } as usize;
    let mut pages = vec![0_u8; end.checked_sub(begin)?.div_ceil(page)];
    // SAFETY: the kernel writes a byte for each page of these addresses, and reads nothing there.
    let is_known = unsafe { libc::mincore(begin as *mut libc::c_void, end - begin, pages.as_mut_ptr()) } == 0;
    // SAFETY: it may be called at any time by any thread. Not `mallinfo2`, which old systems lack: the heap has less than 4 GiB.
    let used = unsafe { libc::mallinfo() }.uordblks.cast_unsigned() as usize;
    let resident = page * pages.iter().filter(|page| **page & 1 == 1).count();
    is_known.then(|| resident.saturating_sub(used))
}

/// As above, where the allocator does not say.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn free_bytes() -> Option<usize> {
    None
}

/// What is being made, and what is free, as parts of the daemon's memory.
#[derive(Debug)]
pub struct Parts;

impl Collect for Parts {
    fn collect(&self, out: &mut Families) {
        // More may have been freed than was allocated.
        let making = IN_THE_MAKING.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned();
        out.memory(Part::Making, making);
        let free = FREE.load(Ordering::Relaxed);
        if free != UNKNOWN {
            out.memory(Part::Free, free);
        }
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
            let mut alone = std::process::Command::new(this);
            // With one heap for all threads, as the daemon has.
            let ran =
                alone.args(["--exact", name]).env(ALONE, "1").env("MALLOC_ARENA_MAX", "1").output().expect("it runs");
            let said = String::from_utf8_lossy(&ran.stdout);
            assert!(ran.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let mut heap = Heap::default();
        heap.look();
        // 64 KiB each, and a little after each that stays: too much for a gap that was there before.
        let pieces: Vec<_> = (0..200).map(|n| (vec![n as u8; 64 << 10], vec![n as u8; 2 << 10])).collect();
        let addresses: Vec<_> = pieces.iter().map(|(piece, _)| piece.as_ptr() as usize).collect();
        let kept: Vec<_> = pieces.into_iter().map(|(_, kept)| kept).collect();
        assert!(in_memory(&addresses) > 150, "free pages stay");
        let free = free_bytes().expect("known");
        assert!((10 << 20..16 << 20).contains(&free), "200 of 64 KiB, but not what is in use: {free}");
        heap.look();
        assert!(in_memory(&addresses) > 150, "it is not due yet");
        making(|| drop(vec![0_u8; 1 << 20]));
        heap.look();
        assert!(in_memory(&addresses) > 150, "little was freed");
        making(|| drop(vec![0_u8; 3 << 20]));
        heap.look();
        assert!(in_memory(&addresses) < 50, "{}", in_memory(&addresses));
        assert!(free_bytes().expect("known") < free / 3);
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
