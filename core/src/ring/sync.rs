//! The atomics that the ring is built on: the standard library's, or loom's when its models are checked.

#[cfg(highwater_loom)]
pub(super) use loom::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
};
#[cfg(not(highwater_loom))]
pub(super) use std::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
};

/// Words that are 0, on pages that cost no memory until they are first written.
#[cfg(not(highwater_loom))]
pub(super) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    const { assert!(align_of::<AtomicU64>() == align_of::<u64>() && size_of::<AtomicU64>() == size_of::<u64>()) };
    // A vector of zeros comes straight from the allocator's zeroed pages; building it of atomics one by one would
    // write, and so occupy, every page of the cap.
    let words = Box::into_raw(vec![0_u64; words].into_boxed_slice());
    // SAFETY: the pointer comes from `Box::into_raw` and is turned back once; an `AtomicU64` has the size, the
    // validity and, as asserted above, the alignment of a `u64`, so the allocation's layout is the same.
    unsafe { Box::from_raw(words as *mut [AtomicU64]) }
}

/// Words that are 0.
#[cfg(highwater_loom)]
pub(super) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}
