//! One recording as text, in the format of ONNX Runtime's NVML profiler: `<device> <nanoseconds since start> <bytes>`
//! for each reading of each GPU.
//!
//! Enters: a node. Leaves: lines, flushed several times a second. Absent on purpose: what the format has no place for,
//! such as annotations.

use super::taking::{View, new_within};
use super::whole::{Ended, WRITE_PERIOD};
use anyhow::Context as _;
use highwater_core::clock::park_for;
use highwater_core::ring;
use highwater_engine::shared_state::SharedState;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Times of rings are rounded down to this, nanoseconds.
const RESOLUTION_NS: i64 = 1_000;

/// Such a recording.
pub struct Profile {
    path: PathBuf,
    file: BufWriter<File>,
    view: View,
    state: SharedState,
    begin_ns: i64,
    next_tick: u64,
}

impl Profile {
    /// Begins the file, which must not exist yet, with the readings from now on.
    ///
    /// # Errors
    /// No GPU is read, or the file cannot be created.
    pub fn begin(path: PathBuf, state: &SharedState) -> anyhow::Result<Self> {
        let node = state.slot.node().context("no GPU is read")?;
        let (view, begin_ns) = (View::of(&node), node.clock.now_ns());
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        let file = BufWriter::new(file.with_context(|| path.display().to_string())?);
        Ok(Self { path, file, view, state: state.clone(), begin_ns, next_tick: 0 })
    }

    /// Writes until `stop`, at a lower priority than the sampler.
    ///
    /// # Errors
    /// The file can no longer be written, for example because the disk is full. It keeps what was written before.
    pub fn run(mut self, stop: &AtomicBool) -> anyhow::Result<Ended> {
        highwater_engine::thread::stand_back();
        let path = self.path.clone();
        self.follow(stop).with_context(|| path.display().to_string())
    }

    fn follow(&mut self, stop: &AtomicBool) -> io::Result<Ended> {
        loop {
            let is_ending = stop.load(Ordering::Relaxed);
            self.advance()?;
            if is_ending {
                self.file.get_ref().sync_all()?;
                return Ok(Ended::Stopped);
            }
            if !self.view.is_of(self.state.slot.node().as_deref()) {
                return Ok(Ended::SourceGone);
            }
            park_for(WRITE_PERIOD, stop);
        }
    }

    /// Writes the readings of the sweeps since the last call.
    fn advance(&mut self) -> io::Result<()> {
        let sweeps = new_within(self.view.ticks(), &mut self.next_tick, self.begin_ns, i64::MAX);
        for sweep in sweeps {
            for (gpu, ring) in self.view.rings().iter().enumerate().filter(|(gpu, _)| sweep.has(*gpu)) {
                if let Some(used) = reading(ring, sweep.begin_ns, sweep.end_ns) {
                    writeln!(self.file, "{gpu} {} {used}", sweep.end_ns - self.begin_ns)?;
                }
            }
        }
        self.file.flush()
    }
}

/// The last good reading within a sweep; `None` if there was none.
fn reading(ring: &ring::Reader, begin_ns: i64, end_ns: i64) -> Option<u64> {
    let begin_ns = begin_ns - begin_ns.rem_euclid(RESOLUTION_NS);
    let to_ns = end_ns.min(ring.newest_ns()?);
    if to_ns < begin_ns {
        return None;
    }
    let points = ring.changes_from(begin_ns.max(ring.oldest_ns()?), to_ns).ok()?;
    // A gap begins at the time of the last good reading, so the value before it is a reading.
    points.iter().rev().find_map(|point| point.used)
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::ring::Config;

    #[test]
    fn a_sweep_has_a_reading_unless_the_driver_had_none() {
        let (mut writer, ring) =
            ring::ring(Config { retention_ns: 1_000_000_000, max_bytes: 1 << 20, resolution_ns: RESOLUTION_NS })
                .expect("a ring");
        assert_eq!(reading(&ring, 0, 10_000), None, "nothing was read");
        for (at_ns, used) in [(1_000_500, 5), (2_000_500, 5), (3_000_500, 9)] {
            writer.push(at_ns, used).expect("in order");
        }
        // The reading at 4 ms failed.
        writer.gap(3_000_500).expect("in order");
        writer.push(5_000_500, 9).expect("in order");
        let sweeps = [0, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000];
        let read = sweeps.map(|begin_ns| reading(&ring, begin_ns, begin_ns + 900));
        assert_eq!(read, [None, Some(5), Some(5), Some(9), None, Some(9)]);
    }
}
