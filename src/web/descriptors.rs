//! The limit on file descriptors: enough for connections beside everything else that the daemon opens.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The wanted limit: some hundred connections, the driver's devices, and files. A higher one would only let a leak last
/// longer.
const WANTED: u64 = 4096;

/// Raises the soft limit towards the hard one, and returns how many descriptors may be open.
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
            tracing::warn!(%error, soft, "cannot raise the limit on file descriptors");
            soft
        }
    }
}

/// The number of connections, each with a descriptor: `most`, or a `share`-th of all descriptors if that is fewer.
#[must_use]
pub fn slots(descriptors: u64, most: usize, share: u64) -> usize {
    usize::try_from(descriptors / share).unwrap_or(usize::MAX).clamp(4, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_stay_well_below_the_descriptors() {
        assert_eq!(slots(u64::MAX, 256, 4), 256);
        assert_eq!(slots(4096, 256, 4), 256);
        assert_eq!(slots(256, 256, 4), 64);
        assert_eq!(slots(0, 256, 4), 4);
    }
}
