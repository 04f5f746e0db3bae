//! Readings of one poll after the other, on their way into a `Tape`: which GPU each is of, and when it was made.
//!
//! Invariants: the times of a GPU never go back. Where a clock does, because it was set, a zone changed, or another run was appended,
//! what follows begins one poll after what was before, and the tape says so.

use super::super::readings::Readings;
use super::clock::Stamp;
use super::hints::Hints;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::Fault;
use highwater_engine::recording::tape::{Format, READING_NS, Tape, Times};
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::collections::BTreeMap;
use std::path::Path;

/// A time of day that goes back by more than this is of the next day.
const HALF_DAY_NS: i64 = 12 * 3_600 * SECOND_NS;
/// How often a clock may go back. Files in which it does so more often are of several programs that wrote at once.
const MOST_RETURNS: usize = 10_000;

/// The most guesses that are listed.
const MOST_ASSUMED: usize = 64;

/// How rows that name no GPU belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Grouping {
    /// Each row is a poll of one GPU.
    #[default]
    Single,
    /// A poll begins where [`Polls::begin_poll`] was called.
    Marked,
    /// A poll begins after a pause of more nanoseconds than this.
    Paused(i64),
}

/// Readings of a file.
#[derive(Debug, Default)]
pub(super) struct Polls {
    readings: Readings,
    /// GPUs by what distinguishes them.
    gpus: BTreeMap<String, u32>,
    /// How many readings each has had.
    counts: BTreeMap<u32, i64>,
    grouping: Grouping,
    /// How many rows of this poll there were.
    position: usize,
    period_ns: Option<i64>,
    /// The kind of the file's times.
    kind: Option<Stamp>,
    /// The newest time of each GPU, as it stands in the file.
    last_ns: BTreeMap<u32, i64>,
    /// The newest time of all, with `shift_ns`.
    newest_ns: Option<i64>,
    /// The time between the newest poll and the one before.
    step_ns: Option<i64>,
    /// Added to each time since a clock last went back.
    shift_ns: i64,
    returns: usize,
    /// Readings since the tool last began.
    since_begin: usize,
    is_anonymous: bool,
    assumed: Vec<String>,
}

impl Polls {
    pub fn new(hints: &Hints) -> Self {
        Self { period_ns: hints.period_ns, ..Self::default() }
    }

    /// Says how rows without a GPU's name belong together.
    pub fn group(&mut self, grouping: Grouping) {
        self.grouping = grouping;
    }

    /// Notes what was guessed, for people.
    pub fn assume(&mut self, what: impl Into<String>) {
        let what = what.into();
        if self.assumed.len() < MOST_ASSUMED && !self.assumed.contains(&what) {
            self.assumed.push(what);
        }
    }

    /// What follows is another poll.
    pub fn begin_poll(&mut self) {
        self.position = 0;
    }

    /// The tool printed what it prints first. If it polled several times since it last did, this is another run, and its period may
    /// differ; else it is started anew for each poll.
    pub fn begin_run(&mut self) {
        if self.since_begin > self.gpus.len() {
            self.readings.begin_anew();
        }
        self.since_begin = 0;
        self.begin_poll();
    }

    /// Adds a reading of the GPU with this name, or of the next one of this poll. `None` if the tool could not read it.
    ///
    /// # Errors
    /// Its time is of another kind than those before, or there are too many.
    pub fn add(
        &mut self,
        at: Option<Stamp>,
        name: Option<&str>,
        used: Option<u64>,
        device: impl FnOnce() -> Device,
    ) -> Result<(), Fault> {
        if let Some(kind) = self.kind
            && at.is_none_or(|at| std::mem::discriminant(&at) != std::mem::discriminant(&kind))
        {
            return Err(Fault::Line(FileProblem::malformed(
                "its time is of another kind than that of the readings before",
            )));
        }
        let raw_ns = at.map(Stamp::ns);
        let begins_poll = match (self.grouping, raw_ns.zip(self.newest_ns)) {
            (Grouping::Single, _) => true,
            (Grouping::Paused(pause_ns), Some((raw_ns, newest_ns))) => {
                raw_ns.saturating_add(self.shift_ns).saturating_sub(newest_ns).saturating_abs() > pause_ns
            }
            (Grouping::Paused(_) | Grouping::Marked, _) => false,
        };
        if begins_poll {
            self.begin_poll();
        }
        let gpu = match name {
            Some(name) => self.number_of(name),
            None => {
                self.is_anonymous = true;
                self.number_of(&format!("#{}", self.position))
            }
        };
        self.position += 1;
        let count = self.counts.get(&gpu).copied().unwrap_or(0);
        let at_ns = match raw_ns {
            Some(raw_ns) => self.at_ns(gpu, raw_ns, at)?,
            None => count.saturating_mul(self.period_ns.unwrap_or(READING_NS)),
        };
        self.readings.push(gpu, at_ns, used, || {
            let found = device();
            let index = if found.index.is_empty() { gpu.to_string() } else { found.index };
            Device { index, ..found }
        })?;
        self.counts.insert(gpu, count + 1);
        self.kind = self.kind.or(at);
        self.since_begin += 1;
        self.step_ns = self
            .newest_ns
            .map(|newest_ns| at_ns.saturating_sub(newest_ns))
            .filter(|step_ns| *step_ns > 0)
            .or(self.step_ns);
        self.newest_ns = self.newest_ns.max(Some(at_ns));
        raw_ns.map(|raw_ns| self.last_ns.insert(gpu, raw_ns));
        Ok(())
    }

    fn number_of(&mut self, name: &str) -> u32 {
        if let Some(number) = self.gpus.get(name) {
            return *number;
        }
        let next = u32::try_from(self.gpus.len()).unwrap_or(u32::MAX);
        *self.gpus.entry(name.to_owned()).or_insert(next)
    }

    /// A reading's time, which is not before that of the GPU's reading before.
    fn at_ns(&mut self, gpu: u32, raw_ns: i64, at: Option<Stamp>) -> Result<i64, Fault> {
        let back_ns = self.last_ns.get(&gpu).map_or(0, |last_ns| last_ns.saturating_sub(raw_ns));
        if back_ns > 0 {
            if matches!(at, Some(Stamp::OfDay(_))) && back_ns > HALF_DAY_NS {
                self.shift_ns = self.shift_ns.saturating_add(2 * HALF_DAY_NS);
            } else {
                if self.returns >= MOST_RETURNS {
                    return Err(Fault::Line(FileProblem::malformed("its time lies before that of the reading before")));
                }
                self.returns += 1;
                self.readings.begin_anew();
                let begin_ns = self.newest_ns.unwrap_or(raw_ns).saturating_add(self.step_ns.unwrap_or(SECOND_NS));
                self.shift_ns = begin_ns.saturating_sub(raw_ns);
            }
            // They are compared with what comes after it, and not with what was before.
            self.last_ns.clear();
        }
        let at_ns = raw_ns.checked_add(self.shift_ns);
        at_ns.ok_or_else(|| Fault::Line(FileProblem::malformed("its time is out of range")))
    }

    /// The recording of a file with such a name for people.
    ///
    /// # Errors
    /// There is no reading, or times lie too far apart.
    pub fn tape(mut self, path: &Path, name: &'static str, skipped: SkippedLines) -> Result<Tape, OpenError> {
        if self.returns > 0 {
            let returns = match self.returns {
                1 => "once".to_owned(),
                more => format!("{more} times"),
            };
            self.assume(format!("its clock goes back {returns}: what follows is shown right after what was before"));
        }
        if self.is_anonymous && self.gpus.len() > 1 {
            self.assume("the rows of each poll are of GPUs in the same order: none says which GPU it is of");
        }
        let missing = match (self.kind, self.is_anonymous && self.gpus.len() == 1) {
            (Some(Stamp::Unix(_)), true) => &[ANONYMOUS, BETWEEN, PHASES][..],
            (Some(Stamp::Unix(_)), false) => &[BETWEEN, PHASES],
            (Some(_), true) => &[ANONYMOUS, "the time zone", BETWEEN, PHASES],
            (Some(_), false) => &["the time zone", BETWEEN, PHASES],
            (None, true) if self.period_ns.is_some() => &[ANONYMOUS, DATE, BETWEEN, PHASES],
            (None, false) if self.period_ns.is_some() => &[DATE, BETWEEN, PHASES],
            (None, true) => &[ANONYMOUS, TIMES, BETWEEN, PHASES],
            (None, false) => &[TIMES, BETWEEN, PHASES],
        };
        let times = match self.kind {
            Some(Stamp::Unix(_)) => Times::Unix,
            None if self.period_ns.is_none() => Times::Readings,
            _ => Times::Relative,
        };
        let (mut tape, assumed) = (self.readings.tape(path, Format { name, times, missing }, skipped)?, self.assumed);
        // GPUs of several nodes, or of a job that was given another one each time.
        let indices: Vec<String> = tape.devices.iter().map(|device| device.index.clone()).collect();
        for device in &mut tape.devices {
            let is_one_of_several = indices.iter().filter(|index| **index == device.index).count() > 1;
            if let (true, Some(bus)) = (is_one_of_several, &device.pci_bus_id) {
                device.index = format!("{} ({bus})", device.index);
            }
        }
        tape.assumed = assumed;
        Ok(tape)
    }
}

/// What logs do not contain.
const ANONYMOUS: &str = "which GPU a row is of (query index too)";
const TIMES: &str = "times (query timestamp too, or give --period)";
const DATE: &str = "times (those shown are by --period)";
const BETWEEN: &str = "readings between its own";
const PHASES: &str = "steps and phases";
