//! One GPU's memory on its way into a recording: change points, and gaps in which nothing is known.

use super::write::RecordingWriter;
use highwater_core::clock::SECOND_NS;
use highwater_core::ring::{QueryError, Reader};

/// How much of a ring is read at once: 5,000 points at most at 1 kHz, 120 KB.
const SLICE_NS: i64 = 5 * SECOND_NS;

/// How far one GPU's memory has been written.
#[derive(Debug, Clone)]
pub struct TrackWriter {
    gpu: usize,
    begin_ns: i64,
    /// Until when the written memory is known, nanoseconds of the timeline.
    until_ns: i64,
    /// Whether all changes up to then have been written, including those at that very time.
    follows: bool,
    last: Option<Last>,
}

#[derive(Debug, Clone, Copy)]
struct Last {
    at_ns: i64,
    nth: u32,
    used: Option<u64>,
}

impl TrackWriter {
    /// Begins at a time, for a ring whose times are floored to `resolution_ns`. There, a reading just after the begin
    /// may have a time before it.
    pub fn new(gpu: usize, begin_ns: i64, resolution_ns: i64) -> Self {
        let until_ns = begin_ns - begin_ns.rem_euclid(resolution_ns);
        Self { gpu, begin_ns, until_ns, follows: false, last: None }
    }

    /// Everything before this time is written.
    pub fn until_ns(&self) -> i64 {
        self.until_ns
    }

    /// Writes what the ring has gained since the last call, up to `end_ns`, and calls `between` now and then.
    pub fn write(
        &mut self,
        ring: &Reader,
        end_ns: i64,
        file: &RecordingWriter,
        between: &dyn Fn(),
    ) -> rusqlite::Result<()> {
        while let Some(newest_ns) = ring.newest_ns() {
            let known_ns = newest_ns.min(end_ns);
            if known_ns < self.until_ns {
                break;
            }
            let to_ns = known_ns.min(self.until_ns.saturating_add(SLICE_NS));
            let changes = if self.follows {
                ring.changes_after(self.until_ns, to_ns)
            } else {
                ring.changes_from(self.until_ns, to_ns)
            };
            match changes {
                Ok(points) => {
                    for point in points {
                        self.put(point.at_ns, point.used, file)?;
                    }
                    (self.until_ns, self.follows) = (to_ns, true);
                }
                // What lies before is not known, or no longer kept.
                Err(QueryError::Overtaken { oldest_ns }) => {
                    self.put(self.until_ns, None, file)?;
                    // The oldest reading that is kept must still be written, even if it is also the newest, unless it
                    // lies after the end.
                    (self.until_ns, self.follows) = (oldest_ns.min(end_ns), oldest_ns > end_ns);
                }
                Err(QueryError::Ahead { .. } | QueryError::Empty | QueryError::Reversed) => break,
            }
            between();
            if self.follows && self.until_ns >= known_ns {
                break;
            }
        }
        file.known_until(self.gpu, self.until_ns)
    }

    /// Marks the rest up to `end_ns` as not known.
    pub fn end(&mut self, end_ns: i64, file: &RecordingWriter) -> rusqlite::Result<()> {
        if self.until_ns < end_ns || self.last.is_none() {
            self.put(self.until_ns, None, file)?;
            self.until_ns = end_ns;
        }
        file.known_until(self.gpu, self.until_ns)
    }

    fn put(&mut self, at_ns: i64, used: Option<u64>, file: &RecordingWriter) -> rusqlite::Result<()> {
        let at_ns = at_ns.max(self.begin_ns);
        let nth = match self.last {
            Some(last) if last.used == used => return Ok(()),
            Some(last) if last.at_ns == at_ns => last.nth + 1,
            _ => 0,
        };
        self.last = Some(Last { at_ns, nth, used });
        file.sample(self.gpu, at_ns, nth, used)
    }
}
