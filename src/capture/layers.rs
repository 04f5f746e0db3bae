//! The layer profiles of a capture: the newest one of each rank.
//!
//! Enters: the ranks' profiles. Leaves: rows, which replace those of the rank's profile before. Invariant: a capture has at
//! most one profile of each rank, however many steps a job profiles, and keeps none in memory.

use crate::intake::Intake;
use crate::recording::write::File;
use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::Profile;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// How often profiles are written again while a capture goes on: a profile of a large model takes 100 KiB.
const PERIOD_NS: i64 = 10 * SECOND_NS;

/// What was written of them.
#[derive(Debug, Default)]
pub(super) struct Profiles {
    /// The number of each rank's profile in the file, and the profile that was written last.
    written: BTreeMap<(Arc<str>, u32), (i64, Weak<Profile>)>,
    next_ns: Option<i64>,
}

impl Profiles {
    /// Writes the profiles that are new, if it is time or if the capture is at its end.
    pub fn write(&mut self, intake: &Intake, file: &File, now_ns: i64, end_ns: i64) -> rusqlite::Result<()> {
        if self.next_ns.is_some_and(|next_ns| now_ns < next_ns) && now_ns < end_ns {
            return Ok(());
        }
        self.next_ns = Some(now_ns.saturating_add(PERIOD_NS));
        let known: Vec<_> = {
            let jobs = intake.jobs();
            let ranks = jobs.ranks();
            ranks
                .filter_map(|(job, number, rank)| Some(((Arc::clone(job), number), Arc::clone(rank.profile()?))))
                .collect()
        };
        for (who, profile) in known {
            let new = i64::try_from(self.written.len()).unwrap_or(i64::MAX);
            let (number, written) = self.written.entry(who.clone()).or_insert((new, Weak::new()));
            if !std::ptr::eq(Weak::as_ptr(written), Arc::as_ptr(&profile)) {
                file.profile(*number, (&who.0, who.1), &profile)?;
                *written = Arc::downgrade(&profile);
            }
        }
        Ok(())
    }
}
