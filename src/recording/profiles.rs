//! Layer profiles in a recording: the tables `layer_profiles` and `layer_records`, which older files do not have.
//!
//! Enters: a file's rows. Leaves: the newest profile of each rank, and its records one by one, or as the annotations that a
//! job would send. Invariant: a recording of before profiles has none, which is no error.

use super::lines::refuse;
use super::rows::{File, needed, number, text, word};
use crate::source::OpenError;
use highwater_core::clock::SECOND_NS;
use highwater_core::wire::{Annotation, Direction, EventType, Kind, Layer, Memory};
use rusqlite::Row;

/// The most profiles of a file, and the most records of all of them that are played.
const MOST_PROFILES: usize = 1 << 12;
const MOST_PLAYED: usize = 1 << 18;
/// A profile from longer before the recording than this is played with its times moved to the recording's begin: the daemon
/// refuses events that are older than what the ring keeps.
const OLDEST_NS: i64 = 300 * SECOND_NS;

/// A profile without its records. Times are Unix nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    id: i64,
    pub job: String,
    pub rank: u32,
    pub step: Option<u64>,
    pub begin_ns: i64,
    pub end_ns: i64,
    /// Records that found no room.
    pub missing: u64,
}

/// One layer in one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub name: String,
    pub at_ns: i64,
    pub allocated: Option<u64>,
    pub reserved: Option<u64>,
    pub layer: Layer,
}

impl File {
    /// The newest profile of each rank.
    pub fn profiles(&mut self) -> Result<Vec<Head>, OpenError> {
        if !self.has_table("layer_profiles") {
            return Ok(Vec::new());
        }
        let query = "SELECT id, job, rank, step, begin_ns, end_ns, missing FROM layer_profiles ORDER BY job, rank";
        self.rows("layer_profiles", query, 0, MOST_PROFILES, |row| {
            Ok(Head {
                id: needed(row, 0)?,
                job: text(row, 1)?.ok_or("job is not known")?,
                rank: needed(row, 2)?,
                step: number(row, 3)?,
                begin_ns: needed(row, 4)?,
                end_ns: needed(row, 5)?,
                missing: needed(row, 6)?,
            })
        })
    }

    /// Passes each record of a profile, in their order, to `take`, which may refuse the file.
    pub fn records(&mut self, head: &Head, take: impl FnMut(Record) -> Result<(), OpenError>) -> Result<(), OpenError> {
        let query = "SELECT name, direction, at_ns, allocated_bytes, reserved_bytes, growth_bytes, activation_bytes, \
                     parameter_bytes, gathered_bytes, gathered_sum_bytes, duration_ns FROM layer_records \
                     WHERE profile = ?1 ORDER BY nth";
        let read = |row: &Row<'_>| {
            let layer = Layer {
                direction: word::<Direction>(row, 1)?,
                growth: number(row, 5)?,
                activations: number(row, 6)?,
                parameters: number(row, 7)?,
                gathered: number(row, 8)?,
                gathered_sum: number(row, 9)?,
                duration_ns: number(row, 10)?,
            };
            let name = text(row, 0)?.ok_or("name is not known")?;
            let (allocated, reserved) = (number(row, 3)?, number(row, 4)?);
            Ok(Record { name, at_ns: needed(row, 2)?, allocated, reserved, layer })
        };
        self.each("layer_records", query, head.id, read, take)
    }

    /// Every profile as the annotations that a job would send, in order of time, for a recording that begins then.
    pub fn profiles_said(&mut self, begin_ns: i64) -> Result<Vec<Annotation>, OpenError> {
        let (mut said, path) = (Vec::new(), self.path().to_owned());
        for head in self.profiles()? {
            let is_old = head.end_ns < begin_ns.saturating_sub(OLDEST_NS);
            let shift_ns = if is_old { begin_ns.saturating_sub(head.end_ns) } else { 0 };
            self.records(&head, |record| {
                if said.len() >= MOST_PLAYED {
                    let problem = format!("table layer_records has more than {MOST_PLAYED} rows");
                    return Err(refuse("recording_too_large", &path, problem));
                }
                said.push(annotation(&head, record, shift_ns));
                Ok(())
            })?;
        }
        // A stable sort: records of the same time stay in their order.
        said.sort_by_key(|said| said.time_unix_nano);
        Ok(said)
    }
}

fn annotation(head: &Head, record: Record, shift_ns: i64) -> Annotation {
    let Record { name, at_ns, allocated, reserved, layer } = record;
    let memory = Memory { allocated, reserved, ..Memory::default() };
    Annotation {
        event: EventType::Mark,
        kind: Kind::Layer,
        name: Some(name),
        job: Some(head.job.clone()),
        rank: Some(head.rank),
        world_size: None,
        gpu: None,
        step: head.step,
        time_unix_nano: Some(at_ns.saturating_add(shift_ns)),
        memory: (memory != Memory::default()).then_some(memory),
        layer: Some(Box::new(layer)),
        lost: None,
        attributes: None,
    }
}

#[cfg(test)]
mod tests {
    use crate::intake::Intake;
    use crate::recording::{Options, Replay, schema, write};
    use crate::source::Source as _;
    use highwater_core::clock::{Manual, SECOND_NS};
    use highwater_core::jobs::{Limits, Sender};
    use serde_json::json;
    use std::sync::Arc;

    const NOW_NS: i64 = 5_000 * SECOND_NS;

    fn intake() -> Intake {
        Intake::new(Limits::default(), Arc::new(Manual::at(NOW_NS)), Arc::default())
    }

    fn record(n: u64, direction: &str, at_ns: i64) -> serde_json::Value {
        json!({"event": "mark", "kind": "layer", "name": format!("layer {n}"), "job": "j", "rank": 3, "step": 7,
            "time_unix_nano": at_ns, "memory": {"allocated": 100 + n},
            "layer": {"direction": direction, "growth": -5, "activations": n, "gathered_sum": 9}})
    }

    /// The profile that a recording of one with these times has when it is played.
    fn played(
        profile_ns: i64,
        begin_ns: i64,
    ) -> (Vec<highwater_core::jobs::Record>, Vec<highwater_core::jobs::Record>) {
        let original = intake();
        let step = |event: &str, step: u64, at_ns: i64| json!({"event": event, "kind": "step", "job": "j", "rank": 3, "step": step, "time_unix_nano": at_ns});
        let said = [
            record(1, "forward", profile_ns),
            record(2, "forward", profile_ns + 1),
            record(2, "backward", profile_ns + 2),
        ];
        original.take_json(json!(said).to_string().as_bytes(), &Sender::DAEMON);
        original.take_json(step("begin", 8, profile_ns + 9).to_string().as_bytes(), &Sender::DAEMON);
        let jobs = original.jobs();
        let profile = Arc::clone(jobs.by_name()["j"].ranks[&3].profile().expect("one"));
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it.sqlite");
        let file = write::File::create(&path, (1 << 20, 0o600), 0, vec!["a".into()]).expect("created");
        file.profile(0, ("j", 3), &profile).expect("written");
        // The same number again replaces it.
        file.profile(0, ("j", 3), &profile).expect("written");
        file.meta("state", "complete").expect("written");
        file.commit().expect("committed");
        file.close().expect("closed");
        let rows = rusqlite::Connection::open(&path).expect("opened");
        rows.execute_batch(&format!(
            "INSERT INTO gpus (gpu, gpu_index, uuid) VALUES (0, '0', 'a');
             INSERT INTO samples VALUES (0, {begin_ns}, 0, 30), (0, {}, 0, 31);
             INSERT INTO annotations (id, at_ns, event, kind, name, job, rank, step)
                 VALUES (1, {}, 'begin', 'step', 'step', 'j', 3, 8)",
            begin_ns + 500,
            begin_ns + 400
        ))
        .expect("its tables");
        drop(rows);
        let replay = Replay::open(&path, Options::default()).expect("a recording");
        assert_eq!((replay.begin_ns(), replay.skipped().count), (begin_ns, 0), "a profile of before is no begin");
        let again = intake();
        for said in replay.annotations() {
            again.take(said, &Sender::DAEMON).expect("taken");
        }
        let jobs = again.jobs();
        let replayed = Arc::clone(jobs.by_name()["j"].ranks[&3].profile().expect("one"));
        assert_eq!((replayed.step, replayed.totals), (profile.step, profile.totals));
        (profile.records().collect(), replayed.records().collect())
    }

    #[test]
    fn a_profile_is_played_as_it_was_recorded() {
        let (recorded, replayed) = played(NOW_NS - 20 * SECOND_NS, NOW_NS - 20 * SECOND_NS);
        assert_eq!((&replayed, replayed.len()), (&recorded, 3));
    }

    #[test]
    fn a_profile_of_long_before_is_moved_to_the_begin() {
        let begin_ns = NOW_NS - 10 * SECOND_NS;
        let (recorded, replayed) = played(begin_ns - 400 * SECOND_NS, begin_ns);
        assert_eq!(
            replayed.iter().map(|record| record.at_ns).collect::<Vec<_>>(),
            [begin_ns - 2, begin_ns - 1, begin_ns]
        );
        let layers =
            |records: &[highwater_core::jobs::Record]| records.iter().map(|record| record.layer).collect::<Vec<_>>();
        assert_eq!(layers(&replayed), layers(&recorded));
    }

    #[test]
    fn a_recording_of_before_profiles_has_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it.sqlite");
        let connection = schema::create(&path, 1 << 20, 0o600).expect("created");
        connection
            .execute_batch("INSERT INTO meta VALUES ('state', 'complete'); DROP TABLE layer_records; DROP TABLE layer_profiles; COMMIT")
            .expect("its tables");
        schema::close(connection).expect("closed");
        let mut file = crate::recording::rows::File::open(&path).expect("a recording");
        assert_eq!(file.profiles().expect("none"), []);
        assert_eq!(file.profiles_said(0).expect("none"), []);
    }
}
