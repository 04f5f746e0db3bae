//! The origin of readings: simulated and replayed data are marked as such wherever they are shown.
//!
//! Enters: the description of a source, as daemons and recordings have it. Leaves: a sentence for people, and a flag for
//! programs.

/// Separates the path from the simulation in the description of a replay whose recording was simulated.
pub const RECORDED_FROM: &str = " of ";

/// Whether no GPU was read: a simulation, or the replay of one.
#[must_use]
pub fn is_simulated(source: &str) -> bool {
    simulation(source).is_some()
}

/// The notice for readings that do not come from GPUs now; `None` for readings that do.
#[must_use]
pub fn notice(source: &str) -> Option<String> {
    let replayed = source.strip_prefix("replay:");
    match (replayed, simulation(source)) {
        (None, Some(simulation)) => Some(format!("Simulated by {simulation}: no GPU was read.")),
        (Some(replayed), Some(simulation)) => {
            let path = replayed.strip_suffix(simulation).unwrap_or(replayed).trim_end_matches(RECORDED_FROM);
            Some(format!("Replayed from {path}, which was simulated by {simulation}: no GPU was read."))
        }
        (Some(path), None) => Some(format!("Replayed from {path}: these are not the readings of now.")),
        (None, None) => None,
    }
}

/// The simulation that a description names.
#[must_use]
pub fn simulation(source: &str) -> Option<&str> {
    let origin = match source.strip_prefix("replay:") {
        Some(replayed) => replayed.rsplit_once(RECORDED_FROM)?.1,
        None => source,
    };
    (origin == "sim" || origin.starts_with("sim:")).then_some(origin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_read_from_gpus_now_says_so() {
        let of = |source: &str| (notice(source).unwrap_or_default(), is_simulated(source));
        assert_eq!(of("nvml 580.159.04"), (String::new(), false));
        assert_eq!(of("sim:demo"), ("Simulated by sim:demo: no GPU was read.".to_owned(), true));
        let replayed = "Replayed from /r/a of b.sqlite: these are not the readings of now.";
        assert_eq!(of("replay:/r/a of b.sqlite"), (replayed.to_owned(), false));
        let both = "Replayed from /r/a of b.sqlite, which was simulated by sim:demo: no GPU was read.";
        assert_eq!(of("replay:/r/a of b.sqlite of sim:demo"), (both.to_owned(), true));
    }
}
