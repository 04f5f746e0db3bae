use super::*;
use crate::recording::{Options, Replay, schema};
use highwater_core::jobs::Scope;
use highwater_core::source::{Error, NextTick, Source as _};

/// A finished recording with these rows.
fn file(folder: &Path, sql: &str) -> std::path::PathBuf {
    let path = folder.join("it.sqlite");
    let connection = schema::create(&path, 1 << 20, 0o600).expect("created");
    connection.execute_batch("INSERT INTO meta VALUES ('state', 'complete')").expect("written");
    connection.execute_batch(sql).expect("good SQL");
    connection.execute_batch("COMMIT").expect("written");
    schema::close(connection).expect("closed");
    path
}

fn open(sql: &str) -> Replay {
    let folder = tempfile::tempdir().expect("a folder");
    Replay::open(&file(folder.path(), sql), Options::default()).expect("a good recording")
}

fn refusal(sql: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path = file(folder.path(), sql);
    let error = Replay::open(&path, Options::default()).expect_err("a bad recording");
    error.message.replace(&path.display().to_string(), "FILE")
}

const GPU: &str = "INSERT INTO gpus VALUES (0, '3', 'GPU-a', 'H200', NULL, NULL, NULL, NULL, 1000, 10, 90);";

#[test]
fn memory_is_as_it_was_with_its_gaps() {
    let replay = open(&format!(
        "{GPU} INSERT INTO samples VALUES (0, 5, 0, NULL), (0, 10, 0, 100), (0, 20, 0, 200), (0, 20, 1, 250),
         (0, 30, 0, NULL), (0, 50, 0, 300);"
    ));
    let device = &replay.devices()[0];
    assert_eq!((device.index.as_str(), device.uuid.as_str(), device.usable_bytes()), ("3", "GPU-a", Some(990)));
    let used = |at_ns| replay.memory_used(0, at_ns);
    assert_eq!([5, 9].map(used), [Err(Error::NotYet), Err(Error::NotYet)]);
    assert_eq!([10, 19, 20, 30].map(used), [Ok(100), Ok(100), Ok(250), Ok(250)]);
    assert_eq!(
        [31, 49].map(used),
        [Err(Error::NotYet), Err(Error::NotYet)],
        "a gap begins after its last good reading"
    );
    assert_eq!([50, 90].map(used), [Ok(300), Ok(300)]);
    assert_eq!(used(91), Err(Error::NotYet), "nothing is known beyond");
    let mut ticks = vec![];
    let mut at_ns = i64::MIN;
    while let NextTick::At(next_ns) = replay.next_tick(at_ns) {
        ticks.push(next_ns);
        at_ns = next_ns;
    }
    assert_eq!(ticks, [5, 10, 20, 30, 31, 50, 90, 91]);
}

#[test]
fn a_part_begins_with_what_was_known_then_and_lacks_what_came_before_and_after() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = file(
        folder.path(),
        &format!(
            "INSERT INTO meta VALUES ('begin_ns', 5), ('end_ns', 90);
             {GPU} INSERT INTO samples VALUES (0, 10, 0, 100), (0, 20, 0, 200), (0, 20, 1, 250), (0, 40, 0, 300), (0, 70, 0, 400);
             INSERT INTO health VALUES (1, 15, 0, 'lost', 'fell off'), (2, 80, 0, 'up', NULL);
             INSERT INTO turns VALUES (15), (25), (45), (65), (85);
             INSERT INTO usage (gpu, at_ns, power_watts) VALUES (0, 29, 1.0), (0, 30, 2.0), (0, 64, 3.0), (0, 65, 4.0);
             INSERT INTO annotations (id, at_ns, event, kind, name, job, rank) VALUES (1, 29, 'begin', 'phase', 'a', 'j', 0),
              (2, 30, 'begin', 'phase', 'b', 'j', 0), (3, 64, 'end', 'phase', 'b', 'j', 0), (4, 65, 'begin', 'phase', 'c', 'j', 0);"
        ),
    );
    let open = |from_ns, until_ns| {
        let part = Part { from_ns, until_ns };
        Replay::open(&path, Options { part, ..Options::default() })
    };
    let replay = open(Some(25), Some(60)).expect("a good part");
    assert_eq!((replay.begin_ns(), replay.end_ns()), (30, 66), "it is known until just before the end");
    let used = [29, 30, 39, 40, 64].map(|at_ns| replay.memory_used(0, at_ns).ok());
    assert_eq!(used, [None, Some(250), Some(250), Some(300), Some(300)]);
    let said: Vec<_> = replay.annotations().filter_map(|said| said.time_unix_nano).collect();
    assert_eq!(said, [30, 64]);
    assert_eq!(replay.changes(i64::MIN, i64::MAX).map(|change| change.at_ns).collect::<Vec<_>>(), [30], "lost before");
    assert_eq!([45, 60].map(|at_ns| replay.is_turn(at_ns)), [true, true], "after the last turn at each tick");
    let watts = |at_ns| replay.medium(0, at_ns, &highwater_core::source::CallStats::default()).power_watts;
    assert_eq!([29, 30, 70].map(watts), [None, Some(2.0), Some(3.0)]);
    let whole = open(None, None).expect("all of it");
    assert_eq!((whole.begin_ns(), whole.annotations().count()), (10, 4));
    let last = open(Some(25), None).expect("the rest");
    assert_eq!((last.begin_ns(), last.end_ns(), last.annotations().count()), (30, 91, 3));
    let why = |from_ns, until_ns| open(Some(from_ns), Some(until_ns)).expect_err("nothing is there").message;
    let none = why(1_000, 2_000);
    assert!(none.ends_with("the part begins after the recording's end, which is 0 s after its begin"), "{none}");
    assert!(why(0, 3).ends_with("it has no memory of any GPU in that part"), "{}", why(0, 3));
}

#[test]
fn what_is_too_long_for_a_replay_is_refused_with_what_to_do_and_played_in_parts() {
    let folder = tempfile::tempdir().expect("a folder");
    let most = MOST_USAGE;
    let rows = format!(
        "INSERT INTO meta VALUES ('begin_ns', 0), ('end_ns', {end_ns}); {GPU}
         INSERT INTO samples VALUES (0, 10, 0, 100);
         WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {most}) INSERT INTO turns SELECT i * 2000000000 FROM n;",
        end_ns = 8_192 * SECOND_NS
    );
    let path = file(folder.path(), &rows);
    let refused = Replay::open(&path, Options::default()).expect_err("too long");
    let expected = format!(
        "table turns has more than {most} rows; a part of its 136 minutes can be played, with the settings replay.from and replay.until"
    );
    assert!(refused.message.ends_with(&expected), "{}", refused.message);
    let part = Part { from_ns: Some(3_600 * SECOND_NS), until_ns: None };
    let replay = Replay::open(&path, Options { part, ..Options::default() }).expect("the second hour");
    assert_eq!(replay.memory_used(0, 3_600 * SECOND_NS), Ok(100));
}

#[test]
fn what_jobs_said_comes_in_the_order_of_its_taking_with_the_gpus_of_its_rank() {
    let replay = open(&format!(
        "{GPU} INSERT INTO samples VALUES (0, 10, 0, 100);
         INSERT INTO ranks VALUES ('j', 1, 2, 77, '[\"GPU-a\"]', '{{\"pp\":3}}'), ('j', 2, 2, 78, '[]', NULL);
         INSERT INTO annotations VALUES
          (2, 12, 'begin', 'phase', 'forward', 'j', 1, 2, 7, NULL, 77, 5, 6, NULL, NULL, 1, NULL, '{{\"a\":\"b\"}}'),
          (1, 13, 'begin', 'step', 'step', 'j', 2, 2, 7, '[\"GPU-b\"]', 78, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
          (3, 14, 'exit', 'phase', 'exit', 'j', 2, NULL, NULL, NULL, 78, NULL, NULL, NULL, NULL, NULL, NULL, NULL);"
    ));
    let said: Vec<Annotation> = replay.annotations().collect();
    assert_eq!(said.iter().map(|said| said.time_unix_nano).collect::<Vec<_>>(), [Some(13), Some(12), Some(14)]);
    let gpu = |name: &str| Some(GpuList::Many(vec![Gpu::Name(name.into())]));
    assert_eq!(said.iter().map(|said| said.gpu.clone()).collect::<Vec<_>>(), [gpu("GPU-b"), gpu("GPU-a"), None]);
    assert_eq!((said[1].step, said[1].memory.and_then(|memory| memory.alloc_retries)), (Some(7), Some(1)));
    assert_eq!(said[1].attributes.as_ref().map(|all| all["a"].clone()), Some(Scalar::Text("b".into())));
    assert_eq!((said[1].mesh.clone(), said[0].mesh.clone()), (Some([("pp".to_owned(), 3)].into()), None));
    assert_eq!((said[2].event, said[0].kind), (EventType::Exit, Kind::Step));
}

/// Two owners had a job `train`; the third job is of a file from before owners were known.
#[test]
fn a_job_is_again_the_one_of_its_owner() {
    let replay = open(&format!(
        "{GPU} INSERT INTO samples VALUES (0, 10, 0, 100);
         INSERT INTO jobs VALUES ('train', 'train', 'team-a', NULL), ('1000/train', 'train', NULL, '1000');
         INSERT INTO annotations (id, at_ns, event, kind, name, job, rank) VALUES
          (1, 12, 'begin', 'phase', 'a', 'train', 0), (2, 13, 'begin', 'phase', 'a', '1000/train', 0),
          (3, 14, 'begin', 'phase', 'a', 'old', 0);"
    ));
    let said: Vec<Annotation> = replay.annotations().collect();
    let jobs: Vec<_> = said.into_iter().map(|said| (said.job.expect("a job"), said.scope)).collect();
    let of = |namespace, user| Some(Scope::of(namespace, user));
    let expected = [("train", of(Some("team-a"), None)), ("train", of(None, Some("1000"))), ("old", None)];
    assert_eq!(jobs, expected.map(|(job, scope)| (job.to_owned(), scope)));
}

#[test]
fn the_detectors_look_when_they_did() {
    let replay = open(&format!(
        "{GPU} INSERT INTO samples VALUES (0, 10, 0, 100), (0, 30, 0, 200), (0, 80, 0, 300);
         INSERT INTO turns VALUES (25), (60);"
    ));
    let (mut at_ns, mut ticks) = (i64::MIN, vec![]);
    while let NextTick::At(next_ns) = replay.next_tick(at_ns) {
        ticks.push((next_ns, replay.is_turn(next_ns)));
        at_ns = next_ns;
    }
    // Before the first and after the last known turn, they look at each tick.
    let all = [(10, true), (25, true), (30, false), (60, true), (80, true), (90, true), (91, true)];
    assert_eq!(ticks, all);
}

#[test]
fn a_cell_that_cannot_be_read_costs_its_row_and_no_other() {
    let replay = open(&format!(
        "{GPU} INSERT INTO samples VALUES (0, 10, 0, 100), (0, 20, 0, 'much'), (0, 30, 0, -5), (0, 40, 0, 400);
         INSERT INTO usage (gpu, at_ns, power_watts, utilization_ratio, throttle_reasons, tensor_active_ratio)
          VALUES (0, 10, 250.0, 0.5, 4, 0.25), (0, 20, 'high', 0.5, NULL, NULL);
         INSERT INTO annotations (id, at_ns, event, kind, name, job, rank) VALUES
          (1, 12, 'begins', 'phase', 'a', 'j', 0), (2, 13, 'begin', 'phase', 'a', 'j', -1), (3, 14, 'begin', 'phase', 'a', 'j', 0);"
    ));
    assert_eq!((replay.memory_used(0, 35), replay.memory_used(0, 40)), (Ok(100), Ok(400)));
    assert_eq!(replay.annotations().count(), 1);
    let medium = replay.medium(0, 10, &highwater_core::source::CallStats::default());
    assert_eq!((medium.throttle_reasons, medium.activity.tensor_active_ratio), (Some(4), Some(0.25)));
    let problems: Vec<String> =
        replay.skipped().first.iter().map(|skipped| format!("{}: {}", skipped.line, skipped.message)).collect();
    assert_eq!(replay.skipped().count, 5, "{problems:?}");
    assert_eq!(problems[0], "2: table samples: used_bytes: Text instead of a whole number");
    assert_eq!(problems[1], "3: table samples: used_bytes: -5 is out of range");
    assert!(problems[2].starts_with("1: table annotations: event: unknown variant `begins`"), "{}", problems[2]);
    assert_eq!(problems[3], "2: table annotations: rank: -1 is out of range");
    assert_eq!(problems[4], "2: table usage: power_watts: Text instead of a number");
}

#[test]
fn what_became_of_gpus_comes_in_order_of_time_by_their_positions() {
    let replay = open(&format!(
        "{GPU} INSERT INTO gpus (gpu, gpu_index, uuid) VALUES (7, '7', 'GPU-b');
         INSERT INTO samples VALUES (0, 10, 0, 100);
         INSERT INTO health VALUES (1, 20, 7, 'lost', 'fell off the bus'), (2, 40, 7, 'up', NULL), (3, 41, 7, 'well', NULL),
          (4, 42, 3, 'up', NULL);
         INSERT INTO xids VALUES (1, 20, 0, 79, 3, 18);"
    ));
    let health = |at_ns, health, trouble: &str| GpuChange {
        at_ns,
        gpu: 1,
        what: Changed::Health { health, trouble: trouble.into() },
    };
    let xid = GpuChange { at_ns: 20, gpu: 0, what: Changed::Xid { xid: 79, seen: Xid { count: 3, last_ns: 18 } } };
    let changes = |after_ns, to_ns| replay.changes(after_ns, to_ns).collect::<Vec<_>>();
    assert_eq!(changes(i64::MIN, 20), [health(20, Health::Lost, "fell off the bus"), xid]);
    assert_eq!(changes(20, 99), [health(40, Health::Up, "")]);
    let problems: Vec<&str> = replay.skipped().first.iter().map(|skipped| skipped.message.as_str()).collect();
    assert_eq!(problems, ["table health: `well` is none of up, lost and hung", "table health: there is no gpu 3"]);
}

/// Tables and columns were added without a new version of the format.
#[test]
fn a_file_of_an_earlier_program_is_read_without_what_it_does_not_have() {
    let replay = open(&format!(
        "{GPU} INSERT INTO samples VALUES (0, 10, 0, 100);
         DROP TABLE turns; DROP TABLE health; DROP TABLE xids; ALTER TABLE usage DROP COLUMN throttle_reasons;
         ALTER TABLE usage DROP COLUMN sm_active_ratio; ALTER TABLE usage DROP COLUMN sm_occupancy_ratio;
         ALTER TABLE usage DROP COLUMN tensor_active_ratio; ALTER TABLE usage DROP COLUMN dram_active_ratio;
         INSERT INTO usage VALUES (0, 10, 250.0, 0.5);"
    ));
    assert_eq!((replay.skipped().count, replay.changes(i64::MIN, i64::MAX).count()), (0, 0));
    let medium = replay.medium(0, 10, &highwater_core::source::CallStats::default());
    assert_eq!((medium.power_watts, medium.utilization_ratio, medium.throttle_reasons), (Some(250.0), Some(0.5), None));
    assert_eq!(medium.activity, Activity::default());
}

#[test]
fn what_is_no_recording_is_refused_by_name() {
    for (sql, problem) in [
        ("PRAGMA application_id = 7", "FILE: is not a recording of highwater"),
        ("PRAGMA user_version = 2", "FILE: has format 2; this version of highwater plays format 1"),
        ("DROP TABLE samples", "FILE: it has no table samples"),
        ("SELECT 1", "FILE: it has no memory of any GPU"),
    ] {
        let gpu = if problem.contains("samples") { GPU } else { "" };
        let message = refusal(&format!("{gpu} {sql};"));
        assert!(message.starts_with(problem), "{sql}: {message}");
    }
    let far = format!("{GPU} INSERT INTO samples VALUES (0, 10, 0, 100), (0, 9000000000000000, 0, 100);");
    assert!(refusal(&far).contains("31 days apart"), "{}", refusal(&far));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("text.sqlite");
    std::fs::write(&path, "no database").expect("written");
    let error = Replay::open(&path, Options::default()).expect_err("no database");
    assert!(error.message.contains("text.sqlite: ") && error.reason == "recording_unreadable", "{}", error.message);
}
