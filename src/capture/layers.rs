//! The layer profiles of a capture: the newest one of each rank.
//!
//! Enters: the ranks' profiles. Leaves: rows, which replace those of the rank's profile before. Invariant: a capture has at
//! most one profile of each rank, however many steps a job profiles, and keeps none in memory.

use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::Profile;
use highwater_core::phases::{Ledger, RankKey};
use highwater_engine::recording::MOST_RECORDS;
use highwater_engine::recording::write::RecordingWriter;
use rusqlite::ErrorCode;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// How often profiles are written again while a capture goes on: a profile of a large model takes 100 KiB.
const PERIOD_NS: i64 = 10 * SECOND_NS;
/// The most that a record takes in the file, bytes: with the longest name and all numbers.
const ROW_BYTES: u64 = 256;

/// What was written of them.
#[derive(Debug)]
pub(super) struct Profiles {
    /// Each rank's profile in the file.
    written: BTreeMap<RankKey, Written>,
    next_ns: Option<i64>,
    /// The most records in the file.
    most: usize,
    /// Profiles that found no room in the file; none is written any more then.
    pub lost: usize,
}

/// A rank's profile in the file.
#[derive(Debug, Clone, Default)]
struct Written {
    number: i64,
    last: Weak<Profile>,
    records: usize,
}

/// A rank and its profile.
type Known = (RankKey, Arc<Profile>);

impl Profiles {
    /// The profiles of a file of at most `most_bytes` bytes, of which they may take a quarter.
    pub fn new(most_bytes: u64) -> Self {
        let most = usize::try_from(most_bytes / 4 / ROW_BYTES).unwrap_or(usize::MAX).min(MOST_RECORDS);
        Self { written: BTreeMap::new(), next_ns: None, most, lost: 0 }
    }

    /// Writes the profiles that are new in a transaction of their own, if it is time or if the capture is at its end. If the
    /// file has no room for them, only they are lost.
    pub fn write(&mut self, ledger: &Ledger, file: &RecordingWriter, now_ns: i64, end_ns: i64) -> rusqlite::Result<()> {
        if self.lost > 0 || (self.next_ns.is_some_and(|next_ns| now_ns < next_ns) && now_ns < end_ns) {
            return Ok(());
        }
        self.next_ns = Some(now_ns.saturating_add(PERIOD_NS));
        let new: Vec<Known> = {
            let jobs = ledger.open();
            jobs.profiles().filter(|(who, profile)| !self.is_written(who, profile)).collect()
        };
        if new.is_empty() {
            return Ok(());
        }
        file.begin()?;
        match self.write_each(&new, file).and_then(|()| file.commit()) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DiskFull) => {
                tracing::warn!(profiles = new.len(), %error, "layer profiles found no room in a capture");
                self.lost = new.len();
                file.roll_back();
                Ok(())
            }
            written => written,
        }
    }

    fn is_written(&self, who: &RankKey, profile: &Arc<Profile>) -> bool {
        self.written.get(who).is_some_and(|written| std::ptr::eq(written.last.as_ptr(), Arc::as_ptr(profile)))
    }

    fn write_each(&mut self, new: &[Known], file: &RecordingWriter) -> rusqlite::Result<()> {
        let mut left = self.most.saturating_sub(self.written.values().map(|written| written.records).sum());
        for (who, profile) in new {
            let number = i64::try_from(self.written.len()).unwrap_or(i64::MAX);
            let written = self.written.entry(who.clone()).or_insert(Written { number, ..Written::default() });
            left += written.records;
            written.records = file.profile(written.number, (&who.0, who.1), profile, left)?;
            written.last = Arc::downgrade(profile);
            left -= written.records;
        }
        Ok(())
    }
}
