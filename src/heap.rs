//! Keeps the heap of the process small, returns its free pages to the kernel, and counts what is in use and what is not.
//!
//! The C library returns only the end of its heap: pages freed below memory that is still in use stay resident. Long answers,
//! captures and findings come in bursts, and after an hour of many users a third of the daemon's memory was free pages.
//!
//! The free bytes are the resident bytes of the heap less those in use. The C library finds those in use only by a walk
//! over all free pieces, during which no other thread can allocate. So our allocator counts what Rust code uses, and a
//! rare walk finds the rest: the driver's library, SQLite, and what each piece takes beyond the size that was
//! requested.

use crate::code_pages::CodePages;
use crate::metrics::{Collect, Families, Part};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often free pages are given back.
const PERIOD: Duration = Duration::from_secs(10);
/// How often the thread looks whether something is due.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// After a trim or a count, the next of its kind waits for this many times as long as it took. Both walk over all free
/// pieces for some milliseconds to a tenth of a second, in which no other thread can allocate. The fast lane does
/// not.
const PAUSE: u32 = 500;
/// If work in progress freed at least this many bytes between its peak and its end, free pages are given back at the next look.
const MUCH: isize = 2 << 20;
/// A thread adds to the count of all when its own has changed by this many bytes.
const BATCH: isize = 4 << 10;
/// Pieces from this size on may be outside of the heap, in a mapping of their own.
const MAPPED_FROM: usize = 256 << 10;

/// One heap for all threads instead of one each: the daemon allocates little, and a heap that was once full is never
/// given back.
pub fn keep_small() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: with documented parameters.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 10);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM as libc::c_int);
    }
}

/// Looks after the heap until `stop` is set: gives free pages back, and counts what the C library has in use. Gives back pages
/// of the program's code too.
pub fn look_after(stop: &AtomicBool) {
    let (mut heap, mut code) = (Heap::default(), CodePages::default());
    while !stop.load(Ordering::Relaxed) {
        heap.look();
        code.look();
        std::thread::park_timeout(LOOK_PERIOD);
    }
}

/// When free pages may be given back next, and when the C library may be asked.
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
            if let Some(bytes) = in_use_by_c() {
                OF_C.store(bytes, Ordering::Relaxed);
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
/// Bytes of the heap that Rust code has in use, without what threads have not added yet.
static IN_USE: AtomicIsize = AtomicIsize::new(0);
/// Bytes of the heap that the C library has in use beside them, as last counted; [`UNKNOWN`] before that, and where it does not
/// say.
static OF_C: AtomicIsize = AtomicIsize::new(UNKNOWN);
const UNKNOWN: isize = isize::MAX;
/// Whether work has freed [`MUCH`] bytes since free pages were returned.
static MUCH_WAS_FREED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The bytes of this thread's work in progress; `None` outside of [`making`].
    static MADE: Cell<Option<Made>> = const { Cell::new(None) };
    /// What this thread has not added to [`IN_USE`] yet.
    static CHANGED: Cell<isize> = const { Cell::new(0) };
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

/// Counts bytes of the heap that this thread has allocated; a negative number was freed.
fn count(bytes: isize) {
    // A thread that ends leaves less than a batch, which the next walk counts as the C library's.
    let _ = CHANGED.try_with(|changed| {
        let now = changed.get() + bytes;
        let is_batch = now.unsigned_abs() >= BATCH.unsigned_abs();
        changed.set(if is_batch { 0 } else { now });
        if is_batch {
            IN_USE.fetch_add(now, Ordering::Relaxed);
        }
    });
}

/// Counts a piece at this address that was allocated (`sign` 1) or will be freed (-1). A failed allocation of less than
/// [`MAPPED_FROM`] bytes is counted too; the next walk corrects that.
fn count_piece(pointer: *mut u8, bytes: usize, sign: isize) {
    if bytes < MAPPED_FROM || is_in_heap(pointer) {
        count(sign * bytes.cast_signed());
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

/// The system's allocator, with counts of what is in use and of what is being made.
#[derive(Debug, Clone, Copy)]
pub struct Counting;

// SAFETY: every call is passed on to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size().cast_signed());
        // SAFETY: the caller keeps to the same contract.
        let pointer = unsafe { System.alloc(layout) };
        count_piece(pointer, layout.size(), 1);
        pointer
    }

    #[inline(never)]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(-layout.size().cast_signed());
        count_piece(pointer, layout.size(), -1);
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size().cast_signed());
        // SAFETY: the caller keeps to the same contract.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        count_piece(pointer, layout.size(), 1);
        pointer
    }

    #[inline(never)]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size.cast_signed() - layout.size().cast_signed());
        count_piece(pointer, layout.size(), -1);
        // SAFETY: the caller keeps to the same contract.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if moved.is_null() {
            // The piece is as it was.
            note(layout.size().cast_signed() - size.cast_signed());
            count_piece(pointer, layout.size(), 1);
        } else {
            count_piece(moved, size, 1);
        }
        moved
    }
}

/// Where the heap begins, which does not change; 0 before it was looked for, and if it was not found.
static BEGIN: AtomicUsize = AtomicUsize::new(0);
/// More than the heap takes, and less than its distance from mappings.
const SPAN: usize = 1 << 40;

/// Whether this address is in the heap, as far as that is known. It allocates nothing.
fn is_in_heap(pointer: *mut u8) -> bool {
    let begin = BEGIN.load(Ordering::Relaxed);
    begin == 0 || (pointer as usize).wrapping_sub(begin) < SPAN
}

/// Looks where the heap begins.
fn find_heap() -> Option<usize> {
    let known = BEGIN.load(Ordering::Relaxed);
    if known != 0 {
        return Some(known);
    }
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let heap = maps.lines().find(|line| line.ends_with("[heap]"))?;
    let begin = usize::from_str_radix(heap.split('-').next()?, 16).ok()?;
    BEGIN.store(begin, Ordering::Relaxed);
    Some(begin)
}

/// Bytes of the heap that the C library has in use beside those of Rust code; `None` if that is not known.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn in_use_by_c() -> Option<isize> {
    find_heap()?;
    // SAFETY: it may be called at any time by any thread. Not `mallinfo2`, which old systems lack: the heap has less than 4 GiB.
    let in_use = unsafe { libc::mallinfo() }.uordblks.cast_unsigned() as usize;
    Some(in_use.cast_signed() - IN_USE.load(Ordering::Relaxed))
}

/// As above, where the allocator does not say.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn in_use_by_c() -> Option<isize> {
    None
}

/// Bytes of the heap that are resident and not in use; `None` if they are not known.
fn free_bytes() -> Option<usize> {
    let of_c = OF_C.load(Ordering::Relaxed);
    let begin = find_heap().filter(|_| of_c != UNKNOWN)?;
    let page = rustix::param::page_size();
    // SAFETY: it moves nothing.
    let end = unsafe { libc::sbrk(0) } as usize;
    let mut pages = vec![0_u8; end.checked_sub(begin)?.div_ceil(page)];
    // SAFETY: the kernel writes a byte for each page of these addresses, and reads nothing there.
    let is_known = unsafe { libc::mincore(begin as *mut libc::c_void, end - begin, pages.as_mut_ptr()) } == 0;
    let resident = page * pages.iter().filter(|page| **page & 1 == 1).count();
    let in_use = IN_USE.load(Ordering::Relaxed).wrapping_add(of_c).max(0).cast_unsigned();
    is_known.then(|| resident.saturating_sub(in_use))
}

/// What is being made, and what is free, as parts of the daemon's memory.
#[derive(Debug)]
pub struct Parts;

impl Collect for Parts {
    fn collect(&self, out: &mut Families) {
        // More may have been freed than was allocated.
        let making = IN_THE_MAKING.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned();
        out.memory(Part::Making, making);
        if let Some(free) = free_bytes() {
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
        keep_small();
        let mut heap = Heap::default();
        heap.look();
        // As when the pause after it is over, and the period is not, however long this machine takes.
        (heap.give_back, heap.given_back) = (None, Some(Instant::now() + Duration::from_secs(3_600)));
        // 64 KiB each, and a little after each that stays: too much for a gap that was there before.
        let pieces: Vec<_> = (0..200).map(|n| (vec![n as u8; 64 << 10], vec![n as u8; 2 << 10])).collect();
        let addresses: Vec<_> = pieces.iter().map(|(piece, _)| piece.as_ptr() as usize).collect();
        let kept: Vec<_> = pieces.into_iter().map(|(_, kept)| kept).collect();
        assert!(in_memory(&addresses) > 150, "free pages stay");
        let free = free_bytes().expect("known");
        assert!((10 << 20..16 << 20).contains(&free), "200 of 64 KiB, but not what is in use: {free}");
        let used: Vec<_> = (0..4).map(|_| vec![1_u8; 50 << 10]).collect();
        let less = free_bytes().expect("known");
        assert!((190 << 10..220 << 10).contains(&(free - less)), "known at once, without another walk: {free} {less}");
        let mapped = vec![1_u8; 8 << 20];
        let beside = free_bytes().expect("known");
        assert!(beside.abs_diff(less) < 30 << 10, "a mapping of its own is no part of the heap: {less} {beside}");
        drop((used, mapped));
        assert!(free_bytes().expect("known").abs_diff(free) < 30 << 10);
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
