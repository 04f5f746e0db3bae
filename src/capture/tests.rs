//! The file contains what was read, and the folder keeps to its bounds whatever happens.

use super::admission::Refusal;
use super::directory::Directory;
use super::recorder::{RecordingKind, Start};
use super::taking::{Capture, Sent, View, open_at};
use super::trigger::{Findings, Reason, Trigger};
use super::{CaptureSettings, Outcome, Recorder, Request};
use highwater_core::clock::{Clock, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::detect::Said;
use highwater_core::gpu::{Device, Medium};
use highwater_core::jobs::{Account, Event, Jobs, Limits, Scope, Sender};
use highwater_core::ring;
use highwater_core::source::{Error, Source};
use highwater_core::wire::{Annotation, EventType, Kind};
use highwater_engine::intake::{Intake, LogLimits};
use highwater_engine::node::{Node, Periods};
use highwater_engine::recording::schema;
use highwater_engine::recording::{State, write::FindingRow};
use highwater_engine::sample::{Sampler, Ticked};
use highwater_engine::shared_state::SharedState;
use proptest::prelude::*;
use rusqlite::Connection;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const START_NS: i64 = 1_795_207_211_009_094_564;
const GPUS: usize = 2;
/// The rings' resolution.
const RESOLUTION_NS: i64 = 1_000;

/// GPUs that give scripted answers, and note what they gave.
struct Script {
    devices: Vec<Device>,
    next: Mutex<[Option<u64>; GPUS]>,
    given: Mutex<[Option<u64>; GPUS]>,
}

impl Source for Script {
    fn description(&self) -> String {
        "script".into()
    }

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn memory_used(&self, gpu: usize, _at_ns: i64) -> Result<u64, Error> {
        let next = self.next.lock().unwrap()[gpu];
        self.given.lock().unwrap()[gpu] = next;
        next.ok_or_else(|| Error::Failed("as scripted".into()))
    }
}

/// A node whose every reading is set by the test.
struct Rig {
    clock: Arc<Manual>,
    script: Arc<Script>,
    node: Arc<Node>,
    sampler: Sampler,
    intake: Arc<Intake>,
    state: SharedState,
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let clock = Arc::new(Manual::at(START_NS));
        let device = |gpu: usize| Device { index: gpu.to_string(), uuid: format!("GPU-{gpu}"), ..Device::default() };
        let devices = (0..GPUS).map(device).collect();
        let script = Arc::new(Script { devices, next: Mutex::default(), given: Mutex::default() });
        let config = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 1 << 20, resolution_ns: RESOLUTION_NS };
        let (node, writers) =
            Node::new(Arc::clone(&script) as _, Arc::clone(&clock) as _, config, Periods::default(), None).unwrap();
        node.ticks.keep_log(60_000, 600);
        let mut sampler = node.sampler(writers);
        sampler.set_periods(None, MILLISECOND_NS);
        let limits = LogLimits { keep_ns: 600 * SECOND_NS, bytes: 1 << 20 };
        let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default()).with_log(limits);
        intake.set_devices(&script.devices);
        let node = Arc::new(node);
        let state = SharedState::of(&node, intake.ledger());
        let folder = tempfile::tempdir().unwrap();
        Self { clock, script, node, sampler, intake: Arc::new(intake), state, folder }
    }

    /// Makes one sweep this long after the last. Returns when it began and what each GPU gave, or `None` if no sweep
    /// was made.
    fn sweep(&mut self, after_ns: i64, answers: [Option<u64>; GPUS]) -> Option<(i64, [Option<u64>; GPUS])> {
        self.clock.advance_to(self.clock.now_ns() + after_ns);
        *self.script.next.lock().unwrap() = answers;
        *self.script.given.lock().unwrap() = [None; GPUS];
        let ticked = self.sampler.tick(self.clock.now_ns(), |_| ());
        (ticked == Ticked::Taken).then(|| (self.clock.now_ns(), *self.script.given.lock().unwrap()))
    }

    fn say(&self, json: &str) {
        let annotation: Annotation = serde_json::from_str(json).unwrap();
        self.intake.take(annotation, &Sender::DAEMON).unwrap();
        self.node.advance(self.intake.ledger(), self.clock.now_ns());
    }

    fn capture(&self, path: &Path, interval: (i64, i64), findings: Arc<dyn Findings>) -> Capture {
        self.try_capture(path, interval, findings).unwrap()
    }

    fn try_capture(
        &self,
        path: &Path,
        (begin_ns, end_ns): (i64, i64),
        findings: Arc<dyn Findings>,
    ) -> Result<Capture, schema::WriteError> {
        self.capture_of(64 << 20, path, (begin_ns, end_ns), findings)
    }

    /// A capture whose file may have at most `most_bytes` bytes.
    fn capture_of(
        &self,
        most_bytes: u64,
        path: &Path,
        (begin_ns, end_ns): (i64, i64),
        findings: Arc<dyn Findings>,
    ) -> Result<Capture, schema::WriteError> {
        let trigger = Trigger { reason: Reason::Asked, at_ns: self.clock.now_ns(), note: "why".into(), owner: None };
        let start = Start { kind: RecordingKind::Capture, id: "id".into(), trigger, begin_ns, end_ns };
        Capture::begin(path, most_bytes, &start, View::of(&self.node), Sent::of(&self.intake), findings)
    }

    /// What a user's process sends: as many phases of its job as are asked for, one after the other.
    fn send(&self, uid: u32, phases: usize) {
        let sender = Sender::process(None, uid);
        for _ in 0..phases {
            for event in ["begin", "end"] {
                let json = format!(r#"{{"event":"{event}","kind":"phase","name":"p","job":"of {uid}"}}"#);
                self.intake.take(serde_json::from_str(&json).unwrap(), &sender).unwrap();
            }
        }
    }

    /// A recorder over this node, the switch that ends its thread, and the thread.
    fn recorder(&self, settings: CaptureSettings) -> (Recorder, Arc<AtomicBool>, std::thread::JoinHandle<()>) {
        let (recorder, worker) = super::recorder(&settings, 600 * SECOND_NS, &self.state, &self.intake);
        let (worker, stop) = (worker.unwrap(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        (recorder, stop, std::thread::spawn(move || worker.run(&stopped)))
    }

    fn settings(&self) -> CaptureSettings {
        let directory = Some(self.folder.path().join("captures"));
        let (before_ns, after_ns, cooldown_ns) = (SECOND_NS, SECOND_NS / 10, 0);
        let (most_files, most_bytes, asks_per_hour) = (3, 4 << 20, 1_000_000);
        CaptureSettings {
            directory,
            before_ns,
            after_ns,
            cooldown_ns,
            most_files,
            most_bytes,
            asks_per_hour,
            ..CaptureSettings::default()
        }
    }

    /// Reports a finding of this kind.
    fn find(&self, recorder: &Recorder, kind: &'static str) {
        let at_ns = self.clock.now_ns();
        recorder.trigger(Trigger { reason: Reason::Finding(kind), at_ns, note: String::new(), owner: None });
    }

    /// The file of a finished capture.
    fn whole(&self, id: &str) -> PathBuf {
        self.folder.path().join("captures").join(format!("{id}.sqlite"))
    }

    /// Lets time pass until a condition holds: a millisecond at a time, with changing memory, and some twenty times as
    /// fast as real time.
    fn until(&mut self, what: &str, is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        for n in 0_u64.. {
            if is_so() {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
            self.sweep(MILLISECOND_NS, [Some(n << 21), Some(7)]);
            if n % 20 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

type Readings = Vec<(i64, [Option<u64>; GPUS])>;

/// Every reading in a recording, sweep by sweep.
fn readings(connection: &Connection) -> Readings {
    let sql = "SELECT begin_ns, max(CASE gpu WHEN 0 THEN used_bytes END), max(CASE gpu WHEN 1 THEN used_bytes END) \
               FROM samples_by_tick GROUP BY begin_ns ORDER BY begin_ns";
    let mut statement = connection.prepare(sql).unwrap();
    let bytes = |value: Option<i64>| value.map(i64::cast_unsigned);
    let rows = statement.query_map([], |row| Ok((row.get(0)?, [bytes(row.get(1)?), bytes(row.get(2)?)]))).unwrap();
    rows.map(Result::unwrap).collect()
}

/// The change points that a recording has of one GPU.
fn points(connection: &Connection, gpu: i64) -> Vec<(i64, Option<u64>)> {
    let sql = "SELECT at_ns, used_bytes FROM samples WHERE gpu = ?1 ORDER BY at_ns, nth";
    let mut statement = connection.prepare(sql).unwrap();
    let point = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get::<_, Option<i64>>(1)?.map(i64::cast_unsigned)));
    statement.query_map([gpu], point).unwrap().map(Result::unwrap).collect()
}

fn integrity(connection: &Connection) -> String {
    connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap()
}

fn answer() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![4 => Just(Some(7)), 4 => (0..90_000_u64).prop_map(|granules| Some(granules << 21)), 1 => Just(None)]
}

fn spacing_ns() -> impl Strategy<Value = i64> {
    prop_oneof![8 => 970_000..1_030_000_i64, 2 => 2_000..5_000_000_i64, 1 => 5_000_000..80_000_000_i64]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever was read, failed or was late, and whenever the capture looked, the file contains every reading.
    #[test]
    fn every_reading_of_the_interval_is_reported(
        sweeps in prop::collection::vec((spacing_ns(), answer(), answer(), 0..8_u8), 2..400),
        trigger in any::<prop::sample::Index>(),
        before_ns in 0..300_000_000_i64,
        after_ns in 0..200_000_000_i64,
    ) {
        let mut rig = Rig::new();
        let path = rig.folder.path().join("it.sqlite");
        let (mut capture, mut given, mut interval) = (None::<Capture>, Readings::new(), (0, 0));
        let trigger = trigger.index(sweeps.len());
        for (number, (after_sweep_ns, zero, one, look)) in sweeps.iter().enumerate() {
            given.extend(rig.sweep(*after_sweep_ns, [*zero, *one]));
            if number == trigger {
                interval = (rig.clock.now_ns() - before_ns, rig.clock.now_ns() + after_ns);
                capture = Some(rig.capture(&path, interval, Arc::new(OneFinding)));
            }
            if let Some(capture) = capture.as_mut().filter(|_| number == trigger || *look == 0) {
                capture.advance(&[], &|| ()).unwrap();
            }
        }
        let mut capture = capture.unwrap();
        capture.advance(&[], &|| ()).unwrap();
        capture.finish(State::Complete).unwrap();
        let file = schema::look(&path).unwrap();
        prop_assert_eq!(integrity(&file), "ok");
        given.retain(|(at_ns, _)| (interval.0..=interval.1).contains(at_ns));
        prop_assert_eq!(readings(&file), given);
        for (gpu, ring) in rig.node.rings.iter().enumerate() {
            let (Some(oldest_ns), Some(newest_ns)) = (ring.oldest_ns(), ring.newest_ns()) else { continue };
            // The ring's times are coarser than the sweeps'. A reading that it puts at the very end may have been taken
            // after it.
            let begin_ns = interval.0 - interval.0.rem_euclid(RESOLUTION_NS);
            let (from_ns, to_ns) = (begin_ns.max(oldest_ns), (interval.1 - RESOLUTION_NS).min(newest_ns));
            if from_ns > to_ns { continue }
            let mut wanted = ring.changes_from(from_ns, to_ns).unwrap();
            wanted.dedup_by_key(|point| point.used);
            let wanted: Vec<_> = wanted.iter().map(|point| (point.at_ns.max(interval.0), point.used)).collect();
            let kept: Vec<_> = points(&file, gpu as i64).into_iter().filter(|(at_ns, _)| (from_ns..=to_ns).contains(at_ns)).collect();
            // If nothing is known before or after, there is one more point that says so.
            prop_assert!(kept.starts_with(&wanted), "{kept:?} {wanted:?}");
            prop_assert!(kept[wanted.len()..].iter().all(|(_, used)| used.is_none()), "{kept:?} {wanted:?}");
        }
    }
}

/// The driver came back with other devices before the capture noticed, so positions mean others.
#[test]
fn what_jobs_said_of_other_devices_is_not_reported() {
    let mut rig = Rig::new();
    let path = rig.folder.path().join("it.sqlite");
    rig.sweep(MILLISECOND_NS, [Some(5), Some(6)]);
    rig.say(r#"{"event":"begin","name":"forward","job":"job","rank":1,"gpu":1,"step":4}"#);
    let now_ns = rig.clock.now_ns();
    let mut capture = rig.capture(&path, (now_ns, now_ns + SECOND_NS), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    let device = |uuid: &str| Device { uuid: uuid.into(), ..Device::default() };
    rig.intake.set_devices(&["GPU-0", "MIG-of-0", "GPU-1"].map(device));
    capture.advance(&[], &|| ()).unwrap();
    capture.finish(State::CutShort).unwrap();
    let file = schema::look(&path).unwrap();
    let gpus: String = file.query_row("SELECT gpus FROM ranks", [], |row| row.get(0)).unwrap();
    assert_eq!(gpus, r#"["GPU-1"]"#);
}

#[test]
fn a_rank_that_has_ended_keeps_its_gpus_in_the_file() {
    let mut rig = Rig::new();
    let path = rig.folder.path().join("it.sqlite");
    rig.sweep(MILLISECOND_NS, [Some(5), Some(6)]);
    rig.say(r#"{"event":"begin","name":"forward","job":"job","rank":1,"gpu":1,"step":4}"#);
    let now_ns = rig.clock.now_ns();
    let mut capture = rig.capture(&path, (now_ns, now_ns + SECOND_NS), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    rig.say(r#"{"event":"exit","name":"exit","job":"job","rank":1}"#);
    capture.advance(&[], &|| ()).unwrap();
    capture.finish(State::CutShort).unwrap();
    let file = schema::look(&path).unwrap();
    let gpus: Option<String> = file.query_row("SELECT gpus FROM ranks", [], |row| row.get(0)).unwrap();
    assert_eq!(gpus.as_deref(), Some(r#"["GPU-1"]"#));
}

/// The ring floors its time to before the begin.
#[test]
fn a_reading_right_after_the_begin_with_nothing_after_it_is_reported() {
    let mut rig = Rig::new();
    let path = rig.folder.path().join("it.sqlite");
    rig.sweep(MILLISECOND_NS, [Some(7), Some(7)]);
    let read_ns = rig.clock.now_ns();
    assert_ne!(read_ns % RESOLUTION_NS, 0);
    rig.sweep(MILLISECOND_NS, [None, Some(7)]);
    let mut capture =
        rig.capture(&path, (read_ns - read_ns % RESOLUTION_NS + 1, rig.clock.now_ns()), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    capture.finish(State::Complete).unwrap();
    let wanted = [(read_ns, [Some(7), Some(7)]), (read_ns + MILLISECOND_NS, [None, Some(7)])];
    assert_eq!(readings(&schema::look(&path).unwrap()), wanted);
}

#[test]
fn a_gpu_that_answers_first_at_the_very_end_is_reported() {
    let mut rig = Rig::new();
    let path = rig.folder.path().join("it.sqlite");
    rig.sweep(MILLISECOND_NS, [Some(7), None]);
    let begin_ns = rig.clock.now_ns();
    let mut capture = rig.capture(&path, (begin_ns, begin_ns + MILLISECOND_NS), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    rig.sweep(MILLISECOND_NS, [Some(7), Some(8)]);
    capture.advance(&[], &|| ()).unwrap();
    capture.finish(State::Complete).unwrap();
    let wanted = [(begin_ns, [Some(7), None]), (begin_ns + MILLISECOND_NS, [Some(7), Some(8)])];
    assert_eq!(readings(&schema::look(&path).unwrap()), wanted);
}

struct OneFinding;

impl Findings for OneFinding {
    fn between(&self, from_ns: i64, _to_ns: i64) -> Vec<FindingRow> {
        vec![FindingRow {
            id: 9,
            kind: "allocator_thrash",
            severity: "warning".into(),
            certainty: "confirmed".into(),
            lag_cause: None,
            incident: 1,
            gpu_uuid: Some("GPU-1".into()),
            job: Some("job".into()),
            rank: Some(1),
            begin_ns: from_ns,
            end_ns: None,
            what: "what".into(),
            why: "why".into(),
            advice: "advice".into(),
            evidence: serde_json::json!({ "drop_bytes": 9 }),
            seen_ns: from_ns + 2,
            first: Said { seen_ns: from_ns + 1, step: None, what: "first what".into(), why: "first why".into() },
        }]
    }
}

/// In a file in which there is no room for what one of two users sends, the other's is whole, and what is left out is counted.
#[test]
fn a_flood_costs_another_owner_nothing_in_a_capture() {
    const ROUNDS: usize = 10;
    const HONEST: usize = 5;
    const FLOOD: usize = 1_500;
    let mut rig = Rig::new();
    let (begin_ns, path) = (rig.clock.now_ns(), rig.folder.path().join("flood.sqlite"));
    let mut capture = None;
    for round in 0..ROUNDS {
        rig.send(1, HONEST);
        rig.send(2, FLOOD);
        rig.sweep(10 * MILLISECOND_NS, [Some(7), Some(7)]).unwrap();
        rig.node.advance(rig.intake.ledger(), rig.clock.now_ns());
        if round == 1 {
            let end_ns = begin_ns + SECOND_NS;
            capture = Some(rig.capture_of(2 << 20, &path, (begin_ns, end_ns), Arc::new(OneFinding)).unwrap());
        }
        capture.iter_mut().for_each(|capture| capture.advance(&[], &|| ()).unwrap());
    }
    capture.unwrap().finish(State::Complete).unwrap();
    let file = Connection::open(path).unwrap();
    let one = |sql: &str| file.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    for (table, lost, of_each) in [("annotations", "annotations_lost", 2), ("phases", "phases_lost", 1)] {
        let of = |job| one(&format!("SELECT count(*) FROM {table} JOIN jobs USING (job) WHERE jobs.name = '{job}'"));
        let (honest, flood) = (of("of 1"), of("of 2"));
        let lost = one(&format!("SELECT value FROM meta WHERE key = '{lost}'"));
        let sent = |phases| i64::try_from(ROUNDS * phases * of_each).unwrap();
        assert_eq!(honest, sent(HONEST), "{table}");
        assert!(flood > sent(FLOOD) / 20 && flood < sent(FLOOD) / 2, "{table}: {flood}");
        assert_eq!(honest + flood + lost, sent(HONEST + FLOOD), "{table}: all that was sent is there, or counted");
    }
}

/// Whatever the size of the file: if all else fits, a profile that does not is all that is lost.
#[test]
fn a_profile_that_finds_no_room_is_all_that_is_lost() {
    let mut rig = Rig::new();
    for n in 0..50 {
        rig.sweep(MILLISECOND_NS, [Some(n), Some(n + 1)]);
    }
    for n in 0..200 {
        rig.say(&format!(
            r#"{{"event":"mark","kind":"layer","name":"{n:0>128}","job":"j","rank":0,"step":1,"layer":{{"direction":"forward"}}}}"#
        ));
    }
    rig.say(r#"{"event":"begin","kind":"step","job":"j","rank":0,"step":2}"#);
    let mut kept = Vec::new();
    for pages in (16..120).step_by(2) {
        let path = rig.folder.path().join(format!("{pages}.sqlite"));
        let now_ns = rig.clock.now_ns();
        let trigger = Trigger { reason: Reason::Asked, at_ns: now_ns, note: "why".into(), owner: None };
        let (kind, id) = (RecordingKind::Capture, "id".into());
        let start = Start { kind, id, trigger, begin_ns: now_ns - SECOND_NS, end_ns: now_ns };
        let (view, sent) = (View::of(&rig.node), Sent::of(&rig.intake));
        let begun = Capture::begin(&path, pages * 4_096, &start, view, sent, Arc::new(OneFinding));
        let Ok(mut capture) = begun else { continue };
        let is_whole = capture.advance(&[], &|| ()).is_ok();
        if !capture.is_committed() {
            continue;
        }
        assert!(is_whole, "{pages} pages: committed, and then an error");
        capture.finish(State::Complete).unwrap();
        let file = schema::look(&path).unwrap();
        assert_eq!(integrity(&file), "ok");
        let one = |sql: &str| file.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
        let rows = one("SELECT count(*) FROM layer_records");
        let missing = if rows > 0 { one("SELECT missing FROM layer_profiles") } else { 0 };
        let lost = one("SELECT value FROM meta WHERE key = 'layer_profiles_lost'");
        assert!((rows + missing, lost) == (200, 0) || (rows, lost) == (0, 1), "{pages} pages: {rows} {missing} {lost}");
        kept.push(rows);
    }
    assert!(kept.contains(&0) && kept.iter().any(|rows| (1..200).contains(rows)), "{kept:?}");
}

/// A job that is killed ends its recording, which its own end reaches a little later.
#[test]
fn what_ends_just_after_a_recording_is_in_it_and_what_begins_then_is_not() {
    let mut rig = Rig::new();
    let path = rig.folder.path().join("it.sqlite");
    rig.sweep(MILLISECOND_NS, [Some(5), Some(6)]);
    let mark =
        |event: &str, name: &str| format!(r#"{{"event":"{event}","name":"{name}","job":"job","rank":1,"gpu":1}}"#);
    rig.say(&mark("begin", "forward"));
    rig.say(&mark("begin", "killed"));
    rig.sweep(MILLISECOND_NS, [Some(5), Some(6)]);
    let now_ns = rig.clock.now_ns();
    let mut capture = rig.capture(&path, (now_ns - SECOND_NS, now_ns + 60 * SECOND_NS), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    capture.end_now();
    for event in [mark("begin", "later"), mark("end", "forward"), r#"{"event":"exit","job":"job","rank":1}"#.to_owned()]
    {
        rig.sweep(MILLISECOND_NS, [Some(7), Some(8)]);
        rig.say(&event);
    }
    rig.sweep(MILLISECOND_NS, [Some(7), Some(8)]);
    rig.node.advance(rig.intake.ledger(), rig.clock.now_ns());
    capture.advance(&[], &|| ()).unwrap();
    capture.finish(State::Complete).unwrap();
    let file = schema::look(&path).unwrap();
    let one = |sql: &str| file.query_row(sql, [], |row| row.get::<_, String>(0)).unwrap();
    assert_eq!(one("SELECT group_concat(name || ' ' || ended_by) FROM phases"), "forward end,killed exit");
}

#[test]
fn what_is_open_takes_turns_by_owner_the_innermost_of_each_rank_first() {
    let jobs = |count: u32| {
        let mut jobs = Jobs::new(Limits::default());
        let account = Account::alone();
        let mut say = |scope: &str, rank: u32, kind: Kind, name: &str| {
            let scope = Some(Scope::User(scope.into()));
            let event =
                Event { scope, event: EventType::Begin, kind, name: name.into(), ..Event::exit("j", rank, None, 1) };
            jobs.take(&event, &account, 1).expect("taken");
        };
        for rank in 0..count {
            say("1", rank, Kind::Step, "step");
            say("1", rank, Kind::Phase, "forward");
        }
        say("2", 0, Kind::Phase, "hangs");
        jobs
    };
    let open: Vec<String> =
        open_at(&jobs(3), 9).iter().map(|one| format!("{} {} {}", one.job.text(), one.rank, one.open.name)).collect();
    assert_eq!(open.len(), 7);
    assert!(open[..2].iter().any(|one| one.ends_with("0 hangs")), "{open:?}");
    assert!(open[..4].iter().all(|one| !one.ends_with("step")), "the innermost first: {open:?}");
    assert!(open_at(&jobs(3), 1).is_empty(), "begun before the end");
}

#[test]
fn what_is_open_and_finds_no_room_counts_as_lost() {
    let mut rig = Rig::new();
    let path = rig.folder.path().join("it.sqlite");
    rig.sweep(MILLISECOND_NS, [Some(5), Some(6)]);
    for rank in 0..130 {
        rig.say(&format!(r#"{{"event":"begin","name":"forward","job":"job","rank":{rank},"gpu":1}}"#));
    }
    rig.sweep(MILLISECOND_NS, [Some(5), Some(6)]);
    let now_ns = rig.clock.now_ns();
    let mut capture = rig.capture(&path, (now_ns - SECOND_NS, now_ns), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    capture.finish(State::Complete).unwrap();
    let file = schema::look(&path).unwrap();
    let number = |sql: &str| file.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(number("SELECT count(*) FROM phases"), 128, "with as many rows of memory");
    assert_eq!(number("SELECT value FROM meta WHERE key = 'phases_lost'"), 2);
}

#[test]
fn what_jobs_said_before_and_after_is_reported_with_phases_ranks_and_findings() {
    let mut rig = Rig::new();
    let path = rig.folder.path().join("it.sqlite");
    rig.sweep(MILLISECOND_NS, [Some(5), Some(6)]);
    rig.say(r#"{"event":"begin","name":"forward","job":"job","rank":1,"gpu":1,"step":4}"#);
    for n in 0..50 {
        rig.sweep(MILLISECOND_NS, [Some(n), Some(n + 1)]);
        rig.node.gpus[1].set_medium(rig.clock.now_ns(), Medium { power_watts: Some(500.0), ..Medium::default() });
    }
    rig.say(
        r#"{"event":"end","name":"forward","job":"job","rank":1,"memory":{"alloc_retries":3},"attributes":{"a":1}}"#,
    );
    let now_ns = rig.clock.now_ns();
    let mut capture = rig.capture(&path, (now_ns - SECOND_NS, now_ns + 5 * MILLISECOND_NS), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    rig.say(r#"{"event":"mark","name":"oom","job":"job","rank":1}"#);
    rig.say(r#"{"event":"begin","name":"backward","job":"job","rank":1,"step":4}"#);
    for n in 0..9 {
        rig.sweep(MILLISECOND_NS, [Some(n), (n == 0).then_some(1)]);
    }
    // Begun after the end.
    rig.say(r#"{"event":"begin","name":"optimizer","job":"job","rank":1,"step":4}"#);
    rig.node.advance(rig.intake.ledger(), rig.clock.now_ns());
    capture.advance(&[], &|| ()).unwrap();
    capture.finish(State::Complete).unwrap();
    let file = schema::look(&path).unwrap();
    let one = |sql: &str| file.query_row(sql, [], |row| row.get::<_, String>(0)).unwrap();
    assert_eq!(
        one("SELECT group_concat(event || ' ' || name) FROM (SELECT * FROM annotations ORDER BY id)"),
        "begin forward,end forward,mark oom,begin backward,begin optimizer"
    );
    assert_eq!(
        one(
            "SELECT gpus || alloc_retries || attributes FROM (SELECT max(gpus) gpus, max(alloc_retries) alloc_retries, max(attributes) attributes FROM annotations)"
        ),
        r#"["GPU-1"]3{"a":1}"#
    );
    assert_eq!(
        one(
            "SELECT name || ' ' || step || ' ' || m.gpu || ' ' || peak_bytes FROM phases JOIN phase_memory m ON phase = id"
        ),
        "forward 4 1 50"
    );
    let open = "SELECT group_concat(name || ' ' || ended_by || ' ' || peak_bytes || ' ' || ((end_ns - begin_ns) / 1000000)) FROM phases
        JOIN phase_memory ON phase = id ORDER BY id";
    assert_eq!(one(open), "forward end 50 50,backward open 50 5", "what is open ends with the capture");
    assert_eq!(one("SELECT job || rank || gpus FROM ranks"), r#"job1["GPU-1"]"#);
    assert_eq!(one("SELECT kind || id || evidence FROM findings"), r#"allocator_thrash9{"drop_bytes":9}"#);
    assert_eq!(
        one("SELECT first_what || first_why || (seen_ns - first_seen_ns) FROM findings"),
        "first whatfirst why1"
    );
    assert_eq!(one("SELECT reason || note FROM triggers"), "askedwhy");
    assert_eq!(one("SELECT count(*) || ' ' || max(power_watts) FROM usage"), "50 500.0");
    assert_eq!(one("SELECT value FROM meta WHERE key = 'state'"), "complete");
    let number = |sql: &str| file.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(number("PRAGMA user_version"), i64::from(schema::FORMAT_VERSION));
    assert_eq!(number("PRAGMA application_id"), i64::from(schema::APPLICATION_ID));
    assert!(!std::fs::exists(path.with_extension("sqlite-wal")).unwrap(), "one file is all of it");
}

/// Ends the recorder's thread as the daemon does.
fn end(recorder: &Recorder, stop: &AtomicBool, thread: std::thread::JoinHandle<()>) {
    stop.store(true, Ordering::Relaxed);
    recorder.wake();
    thread.join().unwrap();
}

#[test]
fn captures_beyond_their_number_are_removed_oldest_first() {
    let mut rig = Rig::new();
    let (recorder, stop, thread) = rig.recorder(rig.settings());
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    let mut ids = Vec::new();
    for count in 1..=5 {
        rig.find(&recorder, "xid");
        let seen = recorder.clone();
        rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == count);
        ids.push(recorder.list()[0].id.clone());
    }
    // A capture is listed as complete before room is made and the bytes are counted; at its end the thread has done both.
    end(&recorder, &stop, thread);
    let listed: Vec<_> = recorder.list().into_iter().rev().map(|listed| listed.id).collect();
    assert_eq!(listed, ids[2..]);
    let stats = recorder.stats().unwrap();
    assert_eq!((stats.outcome(Outcome::Complete), stats.removed()), (5, 2));
    let kept: u64 = recorder.list().iter().map(|listed| listed.bytes).sum();
    assert_eq!(stats.bytes(), kept + (1 << 20), "with the reserve");
    let files = std::fs::read_dir(rig.folder.path().join("captures")).unwrap();
    let names = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.ends_with(".sqlite")).count(), 3);
}

#[test]
fn bytes_are_bounded_and_a_capture_that_grows_too_large_is_cut_short_and_readable() {
    let mut rig = Rig::new();
    // One capture may take a third of 4 MiB; a changing GPU fills that within a minute.
    let settings = CaptureSettings { after_ns: 300 * SECOND_NS, ..rig.settings() };
    let (recorder, stop, thread) = rig.recorder(settings);
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    for round in 1..=3 {
        recorder.ask(Request::default()).unwrap();
        let seen = recorder.clone();
        rig.until("cut short", || seen.stats().unwrap().outcome(Outcome::CutShort) == round);
        assert!(recorder.stats().unwrap().bytes() <= 4 << 20, "{}", recorder.stats().unwrap().bytes());
    }
    let listed = recorder.list();
    assert!(listed.len() < 4 && listed[0].state == State::CutShort, "{listed:?}");
    let path = rig.whole(&listed[0].id);
    let file = schema::look(&path).unwrap();
    assert_eq!(integrity(&file), "ok");
    let end_ns: i64 = schema::meta(&file, "end_ns").unwrap();
    // Times of samples are floored to the microsecond; those of sweeps are not.
    let last = readings(&file).pop().unwrap();
    assert!(last.0 - end_ns < 1_000 && last.1.iter().all(Option::is_some), "{last:?} {end_ns}");
    end(&recorder, &stop, thread);
}

#[test]
fn a_folder_that_cannot_be_had_is_reported_and_counted() {
    let rig = Rig::new();
    std::fs::write(rig.folder.path().join("captures"), "a file").unwrap();
    let (recorder, stop, thread) = rig.recorder(rig.settings());
    while recorder.trouble().is_none() {
        std::thread::yield_now();
    }
    assert!(matches!(recorder.ask(Request::default()), Err(Refusal::Unavailable(_))));
    recorder.trigger(Trigger { reason: Reason::Finding("xid"), at_ns: START_NS, note: String::new(), owner: None });
    assert_eq!(recorder.stats().unwrap().outcome(Outcome::Unavailable), 2);
    end(&recorder, &stop, thread);
}

#[test]
fn what_is_asked_for_beyond_the_limits_is_refused() {
    let rig = Rig::new();
    assert_eq!(Recorder::default().ask(Request::default()), Err(Refusal::Off));
    let (recorder, _worker) = super::recorder(&rig.settings(), 600 * SECOND_NS, &rig.state, &rig.intake);
    for (before_s, after_s) in [(601, 1), (1, 301), (-1, 1), (1, -1)] {
        let request =
            Request { before_ns: Some(before_s * SECOND_NS), after_ns: Some(after_s * SECOND_NS), note: String::new() };
        assert!(matches!(recorder.ask(request), Err(Refusal::Limit(_))), "{before_s} {after_s}");
    }
    let id = recorder.ask(Request::default()).unwrap();
    assert_eq!(recorder.ask(Request::default()), Err(Refusal::Busy { id: id.clone() }));
    assert!(recorder.find(&id).is_some() && recorder.find("../captures").is_none());
}

#[test]
fn what_a_killed_process_left_is_finished_at_the_next_start() {
    let mut rig = Rig::new();
    let folder = rig.folder.path().join("captures");
    std::fs::create_dir_all(&folder).unwrap();
    let name = |what: &str| folder.join(format!("20261120T204011.009Z-{what}.partial.sqlite"));
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    let now_ns = rig.clock.now_ns();
    let mut capture = rig.capture(&name("oom"), (now_ns - SECOND_NS, now_ns + SECOND_NS), Arc::new(OneFinding));
    capture.advance(&[], &|| ()).unwrap();
    let nothing = rig.capture(&name("xid"), (now_ns - SECOND_NS, now_ns + SECOND_NS), Arc::new(OneFinding));
    // As a kill leaves them: nothing is closed. The locks belong to another process, and the copies do not have them.
    for what in ["oom", "xid"] {
        for suffix in ["", "-wal"] {
            let from = format!("{}{suffix}", name(what).display());
            let to = from.replace("204011", "204012");
            if std::fs::exists(&from).unwrap() {
                std::fs::copy(&from, to).unwrap();
            }
        }
    }
    drop((capture, nothing));
    let (recorder, stop, thread) = rig.recorder(rig.settings());
    while recorder.list().is_empty() {
        std::thread::yield_now();
    }
    let listed = recorder.list();
    let copy = listed.iter().find(|listed| listed.id == "20261120T204012.009Z-oom").unwrap();
    assert_eq!((copy.state, copy.begin_unix_nano), (State::Interrupted, Some(now_ns - SECOND_NS)));
    assert!(listed.iter().all(|listed| listed.reason == "oom"), "what has nothing is removed: {listed:?}");
    let path = rig.whole(&copy.id);
    assert_eq!(readings(&schema::look(&path).unwrap()).len(), 1);
    end(&recorder, &stop, thread);
}

/// What another user may have prepared where the daemon writes as root: links to a file that only root can write to.
#[test]
fn no_link_in_the_folder_is_followed_and_each_is_named() {
    use std::os::unix::fs::symlink;
    let rig = Rig::new();
    let (victim, folder) = (rig.folder.path().join("victim"), rig.folder.path().join("captures"));
    std::fs::write(&victim, "bytes of somebody else").unwrap();
    std::fs::create_dir(&folder).unwrap();
    for name in [".lock", ".reserve"] {
        symlink(&victim, folder.join(name)).unwrap();
        let (recorder, stop, thread) = rig.recorder(rig.settings());
        while recorder.trouble().is_none() {
            std::thread::yield_now();
        }
        let trouble = recorder.trouble().unwrap();
        assert!(trouble.contains(&format!("captures/{name}")) && trouble.contains("symbolic link"), "{trouble}");
        end(&recorder, &stop, thread);
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    let elsewhere = rig.folder.path().join("elsewhere");
    std::fs::rename(&folder, &elsewhere).unwrap();
    symlink(&elsewhere, &folder).unwrap();
    let message = Directory::open(&folder).unwrap_err().to_string();
    assert!(message.contains("captures: is a symbolic link"), "{message}");
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "bytes of somebody else");
}

#[test]
fn a_recording_is_made_and_opened_through_no_link() {
    use std::os::unix::fs::symlink;
    let rig = Rig::new();
    let (victim, link) = (rig.folder.path().join("victim"), rig.folder.path().join("it.sqlite"));
    std::fs::write(&victim, "").unwrap();
    symlink(&victim, &link).unwrap();
    let now_ns = rig.clock.now_ns();
    let message = rig.try_capture(&link, (now_ns, now_ns + SECOND_NS), Arc::new(OneFinding)).err().unwrap().to_string();
    assert!(message.contains("exists"), "{message}");
    assert!(schema::reopen(&link).is_err() && schema::look(&link).is_err());
    assert_eq!(std::fs::read(&victim).unwrap(), b"", "an empty file is what SQLite would make a database of");
    // What a dead process left, or another user put there under such a name.
    let folder = rig.folder.path().join("captures");
    std::fs::create_dir(&folder).unwrap();
    let left = folder.join("20261120T204011.009Z-oom.partial.sqlite");
    for prepare in [symlink::<&Path, &Path>, std::fs::hard_link::<&Path, &Path>] {
        prepare(&victim, &left).unwrap();
        let (listed, is_left) = Directory::open(&folder).unwrap().recover_and_list().unwrap();
        assert!(listed.is_empty() && is_left);
        std::fs::remove_file(&left).unwrap();
    }
    assert_eq!(std::fs::read(&victim).unwrap(), b"");
}

/// For example too many open files: what a kill left is finished later, and not removed.
#[test]
fn what_cannot_be_looked_at_now_is_no_reason_to_remove_it() {
    let rig = Rig::new();
    let folder = rig.folder.path().join("captures");
    std::fs::create_dir(&folder).unwrap();
    let left = folder.join("20261120T204011.009Z-oom.partial.sqlite");
    std::fs::write(&left, "").unwrap();
    // An empty database has no table. What was committed may be in its journal, which cannot be read.
    let journal = folder.join("20261120T204011.009Z-oom.partial.sqlite-wal");
    std::os::unix::fs::symlink(&journal, &journal).unwrap();
    let directory = Directory::open(&folder).unwrap();
    let (listed, is_left) = directory.recover_and_list().unwrap();
    assert!(listed.is_empty() && is_left && left.exists());
    std::fs::create_dir(folder.join("20261120T204011.009Z-xid.sqlite")).unwrap();
    std::fs::write(folder.join("20261120T204012.009Z-xid.sqlite"), "no database").unwrap();
    let (listed, _) = directory.recover_and_list().unwrap();
    assert!(listed.len() == 2 && listed.values().all(|listed| listed.state == State::Unreadable), "{listed:?}");
}

#[test]
fn what_is_asked_for_pushes_out_no_evidence() {
    let mut rig = Rig::new();
    let (recorder, stop, thread) = rig.recorder(CaptureSettings { most_files: 8, ..rig.settings() });
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    let seen = recorder.clone();
    for (count, kind) in (1..).zip(["xid", "gpu_lost", "straggler"]) {
        rig.find(&recorder, kind);
        rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == count);
    }
    rig.say(r#"{"event":"mark","name":"oom","job":"job","rank":1,"gpu":1}"#);
    rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == 4);
    let evidence: Vec<_> = recorder.list().into_iter().map(|listed| listed.id).collect();
    for count in 5..=26 {
        recorder.ask(Request::default()).unwrap();
        rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == count);
    }
    end(&recorder, &stop, thread);
    let kept: Vec<_> = recorder.list().into_iter().map(|listed| listed.id).collect();
    assert!(evidence.iter().all(|id| kept.contains(id) && rig.whole(id).exists()), "{evidence:?} of {kept:?}");
    assert_eq!((kept.len(), recorder.stats().unwrap().removed()), (8, 18));
}

/// A user who requests captures all the time keeps findings from getting captures of their own. So a requested capture
/// that contains a finding counts as the finding's.
#[test]
fn a_finding_within_what_was_asked_for_is_evidence_too_after_a_restart() {
    let mut rig = Rig::new();
    let (recorder, stop, thread) = rig.recorder(rig.settings());
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    let id = recorder.ask(Request { before_ns: Some(2 * SECOND_NS), ..Request::default() }).unwrap();
    rig.find(&recorder, "xid");
    let seen = recorder.clone();
    rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == 1);
    let reasons = vec!["asked".to_owned(), "xid".to_owned()];
    assert_eq!(recorder.find(&id).unwrap().reasons, reasons);
    end(&recorder, &stop, thread);
    let (recorder, stop, thread) = rig.recorder(CaptureSettings { most_files: 4, ..rig.settings() });
    rig.until("listed", || recorder.find(&id).is_some_and(|listed| listed.reasons == reasons));
    let seen = recorder.clone();
    for count in 1..=6 {
        recorder.ask(Request::default()).unwrap();
        rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == count);
    }
    end(&recorder, &stop, thread);
    assert!(recorder.find(&id).is_some(), "{:?}", recorder.list());
}

#[test]
fn each_trigger_of_a_capture_is_counted_once() {
    let mut rig = Rig::new();
    let (recorder, stop, thread) = rig.recorder(rig.settings());
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    ["xid", "low_headroom", "gpu_lost"].iter().for_each(|kind| rig.find(&recorder, kind));
    let seen = recorder.clone();
    rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == 1);
    end(&recorder, &stop, thread);
    let stats = recorder.stats().unwrap();
    assert_eq!(stats.outcome(Outcome::Joined), 2);
    assert_eq!(Outcome::ALL.into_iter().map(|outcome| stats.outcome(outcome)).sum::<u64>(), 3);
}

#[test]
fn what_was_asked_for_with_no_past_makes_way_for_a_finding() {
    let mut rig = Rig::new();
    let (recorder, stop, thread) = rig.recorder(rig.settings());
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    let request = Request { before_ns: Some(0), after_ns: Some(300 * SECOND_NS), note: String::new() };
    let asked = recorder.ask(request).unwrap();
    let begun_ns = rig.clock.now_ns();
    let clock = Arc::clone(&rig.clock);
    rig.until("half a second", || clock.now_ns() > begun_ns + SECOND_NS / 2);
    rig.find(&recorder, "xid");
    let seen = recorder.clone();
    rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == 1);
    end(&recorder, &stop, thread);
    let listed = recorder.list();
    assert_eq!((listed[0].reason.as_str(), listed[0].state), ("xid", State::Complete));
    let begin_ns = listed[0].begin_unix_nano.unwrap();
    assert!(begin_ns < begun_ns, "it has the second before");
    let made_way = recorder.find(&asked).unwrap();
    assert_eq!(made_way.state, State::CutShort);
    assert!(made_way.trouble.unwrap().contains("made way"));
}

/// The thread does not run, so nothing is recorded.
#[test]
fn a_trigger_that_joined_a_capture_that_ends_early_begins_the_next_and_is_counted_once() {
    let mut rig = Rig::new();
    let (recorder, worker) = super::recorder(&rig.settings(), 600 * SECOND_NS, &rig.state, &rig.intake);
    let shared = recorder.0.as_ref().unwrap();
    shared.admission().trouble = None;
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    rig.find(&recorder, "xid");
    rig.find(&recorder, "low_headroom");
    let counted = || Outcome::ALL.into_iter().map(|outcome| shared.stats.outcome(outcome)).sum::<u64>();
    let first = shared.admission().running.clone().expect("it runs");
    assert_eq!((first.joined.len(), counted()), (1, 0), "not before it is recorded");
    worker.as_ref().unwrap().starts.try_recv().expect("it begins");
    shared.admission().end(&first.id);
    let next = shared.admission().take_next();
    assert_eq!(next, first.joined);
    next.into_iter().for_each(|trigger| shared.trigger(trigger));
    let second = shared.admission().running.clone().expect("it begins");
    assert_eq!(
        (second.id == first.id, second.joined.len(), counted()),
        (false, 0, 0),
        "counted when its own capture ends"
    );
}

#[test]
fn asking_is_limited_and_says_when_to_ask_again() {
    let mut rig = Rig::new();
    let (recorder, stop, thread) = rig.recorder(CaptureSettings { asks_per_hour: 36, ..rig.settings() });
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    let seen = recorder.clone();
    for count in 1..=3 {
        recorder.ask(Request::default()).unwrap();
        rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == count);
    }
    let Err(Refusal::TooOften { wait }) = recorder.ask(Request::default()) else { panic!("a fourth one") };
    assert!(wait <= Duration::from_secs(100) && wait > Duration::from_secs(30), "{wait:?}");
    rig.find(&recorder, "xid");
    rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == 4);
    assert_eq!(recorder.stats().unwrap().outcome(Outcome::TooOften), 1);
    end(&recorder, &stop, thread);
}

#[test]
fn a_capture_that_comes_to_nothing_is_listed_with_why() {
    let mut rig = Rig::new();
    let (recorder, stop, thread) = rig.recorder(rig.settings());
    rig.sweep(MILLISECOND_NS, [Some(1), Some(1)]);
    let id = recorder.ask(Request::default()).unwrap();
    let seen = recorder.clone();
    rig.until("complete", || seen.stats().unwrap().outcome(Outcome::Complete) == 1);
    let folder = rig.folder.path().join("captures");
    std::fs::rename(&folder, folder.with_file_name("away")).unwrap();
    let failed = recorder.ask(Request::default()).unwrap();
    rig.until("failed", || seen.stats().unwrap().outcome(Outcome::Failed) == 1);
    let listed = recorder.list();
    assert_eq!((listed[0].id.as_str(), listed[0].state, listed[0].bytes), (failed.as_str(), State::Failed, 0));
    let trouble = recorder.failure(&failed).unwrap();
    assert!(trouble.contains("captures: was moved or replaced"), "{trouble}");
    assert!(recorder.find(&failed).is_none() && recorder.failure(&id).is_none());
    end(&recorder, &stop, thread);
}
