//! Layer profiles in a recording: the tables `layer_profiles` and `layer_records`, which older files do not have.
//!
//! Enters: a file's rows. Leaves: the newest profile of each rank, and its records one by one, or as the annotations that a
//! job would send. Invariant: a recording of before profiles has none, which is no error.

use super::problem::FileProblem;
use super::rows::{RecordingReader, needed, number, text, word};
use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::{JobId, Limits};
use highwater_core::source::OpenError;
use highwater_core::wire::{Annotation, Direction, EventType, Kind, Layer, Memory};
use rusqlite::Row;
use std::collections::BTreeMap;

/// The most profiles that are read of a file.
pub const MOST_PROFILES: usize = 1 << 10;
/// The most records of all profiles of a file that are written, and that are read.
pub const MOST_RECORDS: usize = 1 << 17;
/// If a profile ended more than this before the recording began, its times are moved to the recording's begin: the daemon
/// refuses events that are older than what the ring keeps.
const OLDEST_NS: i64 = 300 * SECOND_NS;

/// A profile without its records. Times are Unix nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    id: i64,
    /// The job, as the file names it.
    pub job: String,
    /// The rank.
    pub rank: u32,
    /// The step that was profiled, if that is known.
    pub step: Option<u64>,
    /// The time of its first record.
    pub begin_ns: i64,
    /// The time of its last.
    pub end_ns: i64,
    /// Records that found no room.
    pub missing: u64,
}

/// One layer in one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The layer's name.
    pub name: String,
    /// When the pass ended, Unix nanoseconds.
    pub at_ns: i64,
    /// What the framework's allocator had allocated then, bytes.
    pub allocated: Option<u64>,
    /// What it had reserved, bytes.
    pub reserved: Option<u64>,
    /// What was measured of the layer.
    pub layer: Layer,
}

/// Reads a name. Refuses one of a length that the daemon would refuse.
fn name(row: &Row<'_>, at: usize) -> Result<String, FileProblem> {
    let most = Limits::default().name_bytes;
    let name = text(row, at)?.ok_or(FileProblem::Missing("a name".into()))?;
    let problem = || FileProblem::malformed(format!("a name has not 1 to {most} bytes"));
    if (1..=most).contains(&name.len()) { Ok(name) } else { Err(problem()) }
}

impl RecordingReader {
    /// The newest profile of each rank. Profiles beyond [`MOST_PROFILES`] are counted as skipped rows.
    pub fn profiles(&mut self) -> Result<Vec<Head>, OpenError> {
        if !self.has_table("layer_profiles") {
            return Ok(Vec::new());
        }
        let query = "SELECT id, job, rank, step, begin_ns, end_ns, missing FROM layer_profiles ORDER BY id";
        let read = |row: &Row<'_>| {
            Ok(Head {
                id: needed(row, 0)?,
                job: name(row, 1)?,
                rank: needed(row, 2)?,
                step: number(row, 3)?,
                begin_ns: needed(row, 4)?,
                end_ns: needed(row, 5)?,
                missing: needed(row, 6)?,
            })
        };
        let (mut heads, mut left_out) = (Vec::<Head>::new(), 0);
        self.each("layer_profiles", query, 0, read, |head| {
            if heads.len() < MOST_PROFILES && heads.last().is_none_or(|last| last.id < head.id) {
                heads.push(head);
            } else {
                left_out += 1;
            }
            Ok(())
        })?;
        if left_out > 0 {
            let path = self.path().to_owned();
            let problem =
                format!("rows of table layer_profiles, which has more than {MOST_PROFILES}, or several of one id");
            self.skipped.add_many(&path, left_out, &problem);
        }
        heads.sort_by(|one, other| (&one.job, one.rank).cmp(&(&other.job, other.rank)));
        Ok(heads)
    }

    /// How many records each of these profiles has.
    pub fn record_counts(&mut self, heads: &[Head]) -> Result<Vec<usize>, OpenError> {
        let (positions, mut counts) = (positions(heads), vec![0; heads.len()]);
        if heads.is_empty() {
            return Ok(counts);
        }
        let query = "SELECT profile, count(*) FROM layer_records GROUP BY profile ORDER BY profile";
        // Rows that cannot be read are counted where they are read.
        let read = |row: &Row<'_>| Ok((number::<i64>(row, 0).ok().flatten(), needed::<usize>(row, 1)?));
        self.each("layer_records", query, 0, read, |(id, count)| {
            if let Some(position) = id.and_then(|id| positions.get(&id)) {
                counts[*position] = count;
            }
            Ok(())
        })?;
        Ok(counts)
    }

    /// Passes each record of these profiles to `take`, with the position of its profile in `heads`. Profiles come one after the
    /// other, the records of each in their order. Passes `None` for each record beyond [`MOST_RECORDS`].
    pub fn records(&mut self, heads: &[Head], mut take: impl FnMut(usize, Option<Record>)) -> Result<(), OpenError> {
        if heads.is_empty() {
            return Ok(());
        }
        // Files from before the last four columns do not have them.
        let of_modules = self.columns("layer_records", ["modules", "peak_bytes", "held_bytes", "recompute_bytes"]);
        let query = format!(
            "SELECT name, direction, at_ns, allocated_bytes, reserved_bytes, growth_bytes, activation_bytes, \
             parameter_bytes, gathered_bytes, gathered_sum_bytes, duration_ns, profile, {of_modules} FROM layer_records \
             ORDER BY profile, nth"
        );
        let positions = positions(heads);
        let read = |row: &Row<'_>| {
            let id = needed(row, 11)?;
            let position =
                *positions.get(&id).ok_or_else(|| FileProblem::malformed(format!("there is no profile {id}")))?;
            let layer = Layer {
                growth: number(row, 5)?,
                activations: number(row, 6)?,
                parameters: number(row, 7)?,
                gathered: number(row, 8)?,
                gathered_sum: number(row, 9)?,
                duration_ns: number(row, 10)?,
                modules: number(row, 12)?,
                peak: number(row, 13)?,
                held: number(row, 14)?,
                recompute: number(row, 15)?,
                ..Layer::new(word::<Direction>(row, 1)?)
            };
            let (allocated, reserved) = (number(row, 3)?, number(row, 4)?);
            Ok((position, Record { name: name(row, 0)?, at_ns: needed(row, 2)?, allocated, reserved, layer }))
        };
        let mut count = 0;
        self.each("layer_records", &query, 0, read, |(position, record)| {
            count += 1;
            take(position, (count <= MOST_RECORDS).then_some(record));
            Ok(())
        })
    }

    /// Every profile as the annotations that a job would send, in order of time, for a recording that begins at `begin_ns`. The
    /// last record of a profile completes it. A rank without other events (not `is_known`) exits after its profile, because
    /// it had ended before the recording began.
    pub fn profiles_said(
        &mut self,
        begin_ns: i64,
        is_known: impl Fn(&Annotation) -> bool,
    ) -> Result<Vec<Annotation>, OpenError> {
        let (heads, jobs) = (self.profiles()?, self.jobs()?);
        let mut of_each: Vec<(Vec<Annotation>, u64)> = heads.iter().map(|head| (Vec::new(), head.missing)).collect();
        self.records(&heads, |position, record| {
            let (head, (said, missing)) = (&heads[position], &mut of_each[position]);
            let is_old = head.end_ns < begin_ns.saturating_sub(OLDEST_NS);
            let shift_ns = if is_old { begin_ns.saturating_sub(head.end_ns) } else { 0 };
            match record {
                Some(record) => said.push(annotation(head, jobs.get(&head.job), record, shift_ns)),
                None => *missing = missing.saturating_add(1),
            }
        })?;
        let mut all = Vec::new();
        for (mut said, missing) in of_each {
            // Stable sorts: records of the same time stay in their order.
            said.sort_by_key(|said| said.time_unix_nano);
            let Some(last) = said.last_mut() else { continue };
            if let Some(layer) = &mut last.layer {
                layer.last_with_missing = Some(missing);
            }
            let exit = (!is_known(last)).then(|| exit(last));
            all.extend(said.into_iter().chain(exit));
        }
        all.sort_by_key(|said| said.time_unix_nano);
        Ok(all)
    }
}

/// Where each profile is, by its number in the file.
fn positions(heads: &[Head]) -> BTreeMap<i64, usize> {
    heads.iter().enumerate().map(|(position, head)| (head.id, position)).collect()
}

/// The exit of this record's rank, at the time of the record.
fn exit(record: &Annotation) -> Annotation {
    let (name, step, memory, layer) = (None, None, None, None);
    Annotation { event: EventType::Exit, kind: Kind::default(), name, step, memory, layer, ..record.clone() }
}

fn annotation(head: &Head, job: Option<&JobId>, record: Record, shift_ns: i64) -> Annotation {
    let Record { name, at_ns, allocated, reserved, layer } = record;
    let memory = Memory { allocated, reserved, ..Memory::default() };
    Annotation {
        event: EventType::Mark,
        kind: Kind::Layer,
        name: Some(name),
        job: Some(job.map_or_else(|| head.job.clone(), |job| job.name().to_string())),
        scope: job.map(|job| job.scope().clone()),
        rank: Some(head.rank),
        world_size: None,
        mesh: None,
        gpu: None,
        step: head.step,
        time_unix_nano: Some(at_ns.saturating_add(shift_ns)),
        memory: (memory != Memory::default()).then_some(memory),
        layer: Some(Box::new(layer)),
        lost: None,
        answer: None,
        attributes: None,
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_PROFILES, MOST_RECORDS};
    use crate::intake::Intake;
    use crate::recording::{Options, Replay, schema, write};
    use highwater_core::clock::{Manual, SECOND_NS};
    use highwater_core::jobs::{JobId, Limits, Sender};
    use highwater_core::source::Source as _;
    use serde_json::json;
    use std::sync::Arc;

    const NOW_NS: i64 = 5_000 * SECOND_NS;

    /// What each rank of a file says when it is played, with the numbers of rows that are passed over.
    fn said(sql: &str, is_known: bool) -> (Vec<highwater_core::wire::Annotation>, usize) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it.sqlite");
        let connection = schema::create(&path, 1 << 26, 0o600).expect("created");
        connection.execute_batch("INSERT INTO meta VALUES ('state', 'complete')").expect("a state");
        connection.execute_batch(sql).expect("rows");
        connection.execute_batch("COMMIT").expect("committed");
        schema::close(connection).expect("closed");
        let mut file = crate::recording::rows::RecordingReader::open(&path).expect("a recording");
        let said = file.profiles_said(0, |_| is_known).expect("readable");
        (said, file.skipped.count)
    }

    /// SQL that adds `profiles` profiles, each with `records` records.
    fn many(profiles: usize, records: usize) -> String {
        format!(
            "WITH RECURSIVE n(i) AS (VALUES (0) UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {profiles})
             INSERT INTO layer_profiles SELECT i, 'j', i, NULL, 1, 2, 5 FROM n;
             WITH RECURSIVE n(i) AS (VALUES (0) UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {records})
             INSERT INTO layer_records (profile, nth, name, direction, at_ns)
             SELECT id, i, 'a', 'forward', i FROM layer_profiles, n;"
        )
    }

    #[test]
    fn what_is_too_much_is_left_out_and_counted() {
        let (said, skipped) = self::said(&many(MOST_PROFILES + 3, 1), true);
        assert_eq!((said.len(), skipped), (MOST_PROFILES, 3 + 3), "profiles, and their records");
        let (said, skipped) = self::said(&many(3, 50_000), true);
        assert_eq!((said.len(), skipped), (MOST_RECORDS, 0));
        let missing = said.iter().filter_map(|said| said.layer.as_ref()?.last_with_missing);
        assert_eq!(missing.max(), Some(5 + 150_000 - MOST_RECORDS as u64));
    }

    #[test]
    fn names_that_the_daemon_would_refuse_are_passed_over() {
        let long = "x".repeat(129);
        let rows = format!(
            "{}; UPDATE layer_records SET name = '{long}' WHERE nth = 1;
             INSERT INTO layer_profiles VALUES (7, '{long}', 0, 1, 1, 2, 0)",
            many(1, 3)
        );
        let (said, skipped) = self::said(&rows, true);
        assert_eq!((said.len(), skipped), (2, 2));
    }

    #[test]
    fn several_profiles_of_one_number_are_one() {
        let rows = format!(
            "DROP TABLE layer_records; DROP TABLE layer_profiles;
             CREATE TABLE layer_profiles (id, job, rank, step, begin_ns, end_ns, missing);
             CREATE TABLE layer_records (profile, nth, name, direction, at_ns, allocated_bytes, reserved_bytes, growth_bytes,
                 activation_bytes, parameter_bytes, gathered_bytes, gathered_sum_bytes, duration_ns);
             {}; INSERT INTO layer_profiles SELECT * FROM layer_profiles",
            many(2, 2)
        );
        let (said, skipped) = self::said(&rows, true);
        assert_eq!((said.len(), skipped), (4, 2));
    }

    #[test]
    fn a_rank_that_says_nothing_else_ends_with_its_profile_which_knows_what_it_lacks() {
        let (said, _) = self::said(&many(2, 2), false);
        let intake = intake_at(0);
        for said in said {
            intake.take(said, &Sender::DAEMON).expect("taken");
        }
        let jobs = intake.jobs();
        let shown: Vec<_> = jobs
            .ranks()
            .map(|(_, number, rank)| (number, rank.profile().expect("one").missing, rank.exited_ns.is_some()))
            .collect();
        assert_eq!(shown, [(0, 5, true), (1, 5, true)]);
    }

    fn intake_at(now_ns: i64) -> Intake {
        Intake::new(Limits::default(), Arc::new(Manual::at(now_ns)), Arc::default())
    }

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
        let profile = Arc::clone(jobs.by_id()[&JobId::from("j")].ranks[&3].profile().expect("one"));
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it.sqlite");
        let file = write::RecordingWriter::create(&path, (1 << 20, 0o600), 0, vec!["a".into()]).expect("created");
        file.profile(0, (&"j".into(), 3), &profile, 9).expect("written");
        // The same number again replaces it.
        assert_eq!(file.profile(0, (&"j".into(), 3), &profile, 9).expect("written"), 3);
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
        let replayed = Arc::clone(jobs.by_id()[&JobId::from("j")].ranks[&3].profile().expect("one"));
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
        let mut file = crate::recording::rows::RecordingReader::open(&path).expect("a recording");
        assert_eq!(file.profiles().expect("none"), []);
        assert_eq!(file.profiles_said(0, |_| false).expect("none"), []);
    }
}
