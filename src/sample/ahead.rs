//! Memory that a tick needs after a call to the driver, asked for before it.
//!
//! A thread that has slept for a millisecond beside a job finds little of its memory in a cache. What is asked for before a
//! call arrives while the driver works. Enters: places, once. Leaves: nothing. Invariant: asking is a hint; it neither reads
//! nor writes.

/// The places that every tick needs.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    addresses: Vec<usize>,
}

impl Ahead {
    /// Adds places that stay where they are. Of each, the line of memory in which it begins is asked for.
    pub fn add<T>(&mut self, places: impl IntoIterator<Item = *const T>) {
        self.addresses.extend(places.into_iter().map(<*const T>::addr));
    }

    /// Asks for all of them.
    #[inline]
    pub fn ask(&self) {
        self.addresses.iter().for_each(|address| ask_for(std::ptr::without_provenance::<u8>(*address)));
    }
}

/// Asks for the line of memory in which a place begins. Does nothing on processors other than x86-64.
#[inline]
pub(super) fn ask_for<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault, whatever the address, and has no effect but on the caches.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
