//! A push allocates nothing, and neither does any question but the one for points.

use highwater_core::ring::{Config, ring};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting what each thread asks of it.
struct Counting;

// SAFETY: every call is passed on to the system's allocator as it came; counting touches only a thread-local cell
// that needs no allocation of its own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn pushes_gaps_and_summaries_allocate_nothing() {
    let (mut writer, reader) =
        ring(Config { retention_ns: 60_000_000_000, max_bytes: 100_000, resolution_ns: 1_000 }).unwrap();
    let before = ALLOCATIONS.get();
    assert!(before > 0, "the ring itself was counted");
    for tick in 0..500_000_i64 {
        let at_ns = tick * 1_000_000;
        if tick % 1_000 == 999 {
            writer.gap(at_ns).unwrap();
        } else {
            writer.push(at_ns, (((tick.cast_unsigned() * 0x9E37_79B9) >> 8) << 16) % (1 << 37)).unwrap();
        }
        if tick % 1_000 == 500 {
            let oldest_ns = reader.oldest_ns().unwrap();
            reader.summary(oldest_ns, at_ns).unwrap();
            reader.above_ns(oldest_ns, at_ns, [1 << 36]).unwrap();
            reader.at(oldest_ns).unwrap();
        }
    }
    assert!(reader.oldest_ns() > Some(400_000_000_000), "the memory was used again many times");
    assert_eq!(ALLOCATIONS.get(), before);
}
