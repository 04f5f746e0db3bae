//! File descriptors: as many as connections need beside all else that the daemon opens.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What the daemon wants to be able to open: some hundred connections, the driver's devices, and files. More would only let
/// a leak go on for longer.
const WANTED: u64 = 4096;

/// Raises the soft limit towards the hard one, and returns how many may be open.
pub fn raise() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let (soft, hard) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    let wanted = WANTED.min(hard);
    if soft >= wanted {
        return soft;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }) {
        Ok(()) => wanted,
        Err(error) => {
            tracing::warn!(%error, soft, "the limit on file descriptors stays as it is");
            soft
        }
    }
}

/// Places for connections of which each takes a descriptor: `most`, or `share` of all descriptors where these are few.
#[must_use]
pub fn places(descriptors: u64, most: usize, share: u64) -> usize {
    usize::try_from(descriptors / share).unwrap_or(usize::MAX).clamp(4, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_stay_well_below_the_descriptors() {
        assert_eq!(places(u64::MAX, 256, 4), 256);
        assert_eq!(places(4096, 256, 4), 256);
        assert_eq!(places(256, 256, 4), 64);
        assert_eq!(places(0, 256, 4), 4);
    }
}
