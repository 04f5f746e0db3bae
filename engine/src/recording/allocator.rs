//! What a framework's own allocator did on a GPU, for reports.

/// The allocator of one process on one GPU. Sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocator {
    /// Position of the GPU.
    pub gpu: usize,
    /// How many entries its history has.
    pub events: u64,
    /// When the most was allocated.
    pub peak: Moment,
    /// What it had from the driver when the snapshot was taken; `None` if the snapshot does not say.
    pub reserved: Option<u64>,
    /// Of that, what was in use.
    pub in_use: Option<u64>,
    /// Of that, what was asked for; the rest is lost to rounding.
    pub requested: Option<u64>,
    /// Who held memory at the peak, by stack, the most first.
    pub holders: Vec<Holder>,
    /// How many stacks are not among them, and what they held.
    pub others: (usize, u64),
    /// When it found no memory, in order of time.
    pub failures: Vec<Failure>,
    /// How many failures are not among them.
    pub failures_left_out: u64,
    /// Who held memory over time.
    pub bands: Bands,
}

/// The memory of the places in the program that held the most at any time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bands {
    /// The places, the one with the highest level first; `None` is one that is not known.
    pub sites: Vec<Option<String>>,
    /// In order of time, each until the next begins.
    pub moments: Vec<BandMoment>,
}

/// What was held at the highest moment of a stretch of time, bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandMoment {
    /// When the stretch begins, nanoseconds, as the times of the recording.
    pub from_ns: i64,
    /// By all places, also those that are not listed.
    pub total: u64,
    /// By each place.
    pub held: Vec<u64>,
}

impl Bands {
    /// The highest level of a place, bytes.
    #[must_use]
    pub fn highest(&self, site: usize) -> u64 {
        self.moments.iter().filter_map(|moment| moment.held.get(site)).copied().max().unwrap_or(0)
    }

    /// Keeps at most `most` places: those with the highest levels.
    #[must_use]
    pub fn largest(mut self, most: usize) -> Self {
        let mut order: Vec<usize> = (0..self.sites.len()).collect();
        order.sort_by_key(|site| std::cmp::Reverse(self.highest(*site)));
        order.truncate(most);
        for moment in &mut self.moments {
            moment.held = order.iter().filter_map(|site| moment.held.get(*site).copied()).collect();
        }
        self.sites = order.iter().filter_map(|site| self.sites.get(*site).cloned()).collect();
        self
    }
}

/// One moment of an allocator's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// After how many entries of the history; 0 is its begin.
    pub after_events: u64,
    /// When, nanoseconds, as the times of the recording.
    pub at_ns: Option<i64>,
    /// Allocated, bytes; `None` if the history contradicts itself.
    pub allocated: Option<u64>,
    /// What the allocator had from the driver, bytes; `None` if the history contradicts itself.
    pub reserved: Option<u64>,
}

impl Moment {
    /// What was reserved and not allocated, bytes.
    #[must_use]
    pub fn unused(&self) -> Option<u64> {
        self.reserved?.checked_sub(self.allocated?)
    }
}

/// What was allocated by one stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Bytes.
    pub bytes: u64,
    /// In how many allocations.
    pub allocations: u64,
    /// Where in the program.
    pub place: Place,
}

/// Where in a program something happened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// The innermost frame of the program's own code, as `file:line:function`; `None` if no frame is known.
    pub site: Option<String>,
    /// All frames, the innermost first, likewise.
    pub frames: Vec<String>,
}

/// The allocator found no memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// When, and what was allocated and reserved then.
    pub at: Moment,
    /// What was asked for, bytes.
    pub requested: u64,
    /// What the driver had free, bytes.
    pub device_free: Option<u64>,
    /// Where.
    pub place: Place,
}
