//! How much of a recording is kept for drawing.

/// How many points, spans and records a report keeps for drawing. The reports of one page share the room of a single report,
/// so that the page stays small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Points of all GPUs. With three to five bytes each, they are most of a page.
    pub(super) points: usize,
    /// Steps, phases and layers.
    pub(super) spans: usize,
    /// Records of layers in profiled steps. With ten to twenty bytes each.
    pub(super) records: usize,
    /// Whether durations are kept to be compared with those of other recordings.
    pub(super) samples: bool,
}

/// The most points of one GPU.
const MOST_POINTS_OF_ONE: usize = 100_000;

impl Room {
    /// The room of each of `recordings` recordings.
    #[must_use]
    pub fn of(recordings: usize) -> Self {
        let recordings = recordings.max(1);
        Self {
            points: 280_000 / recordings,
            spans: 60_000 / recordings,
            records: 30_000 / recordings,
            samples: recordings > 1,
        }
    }

    /// How many points each of `gpus` GPUs may have.
    pub(super) fn points_of_one(self, gpus: usize) -> usize {
        (self.points / gpus.max(1)).min(MOST_POINTS_OF_ONE)
    }
}
