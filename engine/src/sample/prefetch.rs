//! Prefetches, before a tick's first driver call, the memory that the tick needs after it.
//!
//! A thread that has slept for a millisecond beside a job finds little of its memory in a cache. What is prefetched before a
//! call arrives while the driver works. Enters: addresses, once. Leaves: nothing. Invariant: a prefetch is a hint; it neither
//! reads nor writes.

/// Bytes of a cache line on x86-64.
const LINE_BYTES: usize = 64;

/// The places that every tick needs.
#[derive(Debug, Default)]
pub(super) struct Prefetch {
    addresses: Vec<usize>,
}

impl Prefetch {
    /// Adds addresses of values that do not move. The cache line in which each begins is prefetched; a line in which
    /// several begin, once.
    pub fn add<T>(&mut self, places: impl IntoIterator<Item = *const T>) {
        for address in places.into_iter().map(<*const T>::addr) {
            if !self.addresses.iter().any(|other| other / LINE_BYTES == address / LINE_BYTES) {
                self.addresses.push(address);
            }
        }
    }

    /// Asks for all of them.
    #[inline]
    pub fn issue(&self) {
        self.addresses.iter().for_each(|address| prefetch(std::ptr::without_provenance::<u8>(*address)));
    }
}

/// Asks for the line of memory in which a place begins. Does nothing on processors other than x86-64.
#[inline]
pub(super) fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault, whatever the address, and has no effect but on the caches.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_asked_for_once() {
        let mut prefetch = Prefetch::default();
        let place = std::ptr::without_provenance::<u8>;
        prefetch.add([place(0x1000), place(0x103f), place(0x1040)]);
        prefetch.add([place(0x1008), place(0x0fff)]);
        assert_eq!(prefetch.addresses, [0x1000, 0x1040, 0x0fff]);
        // Nothing lies there, and nothing happens.
        prefetch.issue();
    }
}
