//! Selects one of several profiles.
//!
//! Enters: profiles, record by record. Leaves: of the profiles that match the choice, the one with the most
//! activations, among those whose peaks are known if there are any. Invariant: at most two profiles are in memory.

use super::layers::{LayersError, StepLayers};
use highwater_core::wire;

/// The job and the rank to select; `None` matches every one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProfileChoice {
    /// The job.
    pub job: Option<String>,
    /// The rank.
    pub rank: Option<u32>,
}

/// The profile that is meant, of those that have been read so far.
pub(super) struct Best {
    choice: ProfileChoice,
    /// The job of all profiles that come without one.
    pub job: Option<String>,
    begun: StepLayers,
    best: Option<StepLayers>,
    profiles: usize,
    /// The others, for a message.
    others: Vec<String>,
}

/// How many others a message lists.
const MOST_LISTED: usize = 8;

/// What a profile says: of one whose peaks are known, which modules to checkpoint.
fn worth(of: &StepLayers) -> (bool, u64) {
    (of.history.moments().is_some(), of.activations())
}

/// Why a file has no profile that can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoProfile {
    #[error(
        "it has no layer profile: neither a recording with one, nor an object with `traces` of FairScale or `profiles` of \
         /api/v1/jobs/JOB/layers"
    )]
    None,
    #[error("it has no layers of {meant}, but of {others}")]
    OnlyOthers { meant: String, others: String },
}

impl Best {
    pub fn new(choice: ProfileChoice) -> Self {
        Self { choice, job: None, begun: StepLayers::default(), best: None, profiles: 0, others: Vec::new() }
    }

    /// Begins a profile.
    pub fn begin(&mut self) {
        self.begun = StepLayers::default();
    }

    /// Adds a record to it; an error says why it cannot be.
    pub fn add(&mut self, name: &str, allocated: Option<u64>, layer: &wire::Layer) -> Result<(), LayersError> {
        self.begun.add(name, allocated, layer)
    }

    /// Ends the profile. `of` has whose it is, and how many of its records are missing.
    pub fn end(&mut self, of: StepLayers) {
        let StepLayers { job, rank, step, missing, .. } = of;
        let mut layers = std::mem::take(&mut self.begun);
        (layers.job, layers.rank, layers.step, layers.missing) =
            (job.or_else(|| self.job.clone()), rank, step, missing);
        self.profiles += 1;
        let ProfileChoice { job, rank } = &self.choice;
        if job.is_some() && *job != layers.job || rank.is_some() && *rank != layers.rank {
            if self.others.len() < MOST_LISTED {
                self.others.push(layers.whose());
            }
        } else if self.best.as_ref().is_none_or(|best| worth(best) < worth(&layers)) {
            self.best = Some(layers);
        }
    }

    /// The selected profile, and how many profiles were read, also those that do not match. The error names the others.
    pub fn finish(self) -> Result<(StepLayers, usize), NoProfile> {
        let meant = StepLayers::of(self.choice.job, self.choice.rank, None);
        self.best.map(|best| (best, self.profiles)).ok_or_else(|| match self.others.as_slice() {
            [] => NoProfile::None,
            others => NoProfile::OnlyOthers { meant: meant.whose(), others: others.join("; ") },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::wire::{Direction, Layer};

    /// Under DDP the third step of a job had its history, and the fifth, with as many activations, did not match it.
    #[test]
    fn a_profile_whose_peaks_are_known_says_more() {
        let mut best = Best::new(ProfileChoice::default());
        for (step, activations, peak) in [(2, 10, Some(50)), (4, 11, None), (6, 9, Some(50))] {
            best.begin();
            let layer = Layer { activations: Some(activations), peak, ..Layer::new(Direction::Forward) };
            best.add("a", Some(40), &layer).expect("room");
            best.end(StepLayers::of(None, Some(0), Some(step)));
        }
        let (chosen, profiles) = best.finish().expect("there are some");
        assert_eq!((chosen.step, profiles), (Some(2), 3));
    }
}
