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
