//! What is written into a recording is what is read from it.

use super::part::Part;
use super::rows::RecordingReader;
use super::source::{Options, Replay};
use super::state::State;
use super::track_writer::TrackWriter;
use super::write::RecordingWriter;
use crate::intake::Intake;
use crate::node::Node;
use highwater_core::clock::{Clock as _, Manual, SECOND_NS};
use highwater_core::jobs::{Limits, Sender};
use highwater_core::phases::attribute;
use highwater_core::ring;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const SHIFT_NS: i64 = 1_000_000 * SECOND_NS;

/// A node with one GPU and a job, of which a file is written.
struct Rig {
    folder: tempfile::TempDir,
    clock: Arc<Manual>,
    node: Arc<Node>,
    memory: ring::Writer,
    intake: Intake,
}

impl Rig {
    fn new() -> Self {
        let clock = Arc::new(Manual::at(0));
        clock.set_unix_shift_ns(SHIFT_NS);
        let (node, memory) = Node::of_one_gpu(Arc::clone(&clock) as _);
        let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default());
        intake.set_devices(node.source.devices());
        Self { folder: tempfile::tempdir().expect("a folder"), clock, node, memory, intake }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("a.sqlite")
    }

    fn read_memory(&mut self, at_ns: i64, bytes: u64) {
        self.memory.push(at_ns, bytes).expect("in order");
    }

    /// Sends an event of the rank at a time.
    fn say(&self, at_ns: i64, mut event: Value) {
        self.clock.advance_to(at_ns);
        for (name, value) in [("job", json!("j")), ("rank", json!(3)), ("gpu", json!(0)), ("step", json!(7))] {
            event[name] = value;
        }
        event["time_unix_nano"] = json!(at_ns + SHIFT_NS);
        let answer = self.intake.take_json(event.to_string().as_bytes(), &Sender::DAEMON);
        assert_eq!(answer.accepted, 1, "{event}");
    }

    /// A file of this node in which nothing but the GPU is.
    fn create(&self) -> RecordingWriter {
        let uuids = vec![self.node.gpus[0].device.uuid.clone()];
        let file = RecordingWriter::create(&self.path(), (1 << 20, 0o600), SHIFT_NS, uuids).expect("created");
        file.meta_time("begin_ns", 0).expect("written");
        file.gpu(0, &self.node.gpus[0]).expect("written");
        file
    }
}

fn close(file: RecordingWriter, end_ns: i64) {
    file.meta_time("end_ns", end_ns).expect("written");
    file.state(State::Complete).expect("written");
    file.commit().expect("committed");
    file.close().expect("closed");
}

fn open(path: &Path) -> Replay {
    Replay::open(path, Options::default()).unwrap_or_else(|error| panic!("{error:?}"))
}

#[test]
fn memory_is_written_in_parts_and_read_as_one() {
    let mut rig = Rig::new();
    let file = rig.create();
    assert!(!file.is_idle(), "its first transaction is open");
    file.commit().expect("committed");
    assert!(file.is_idle());
    file.begin().expect("begun");
    let mut track = TrackWriter::new(0, 0, 1_000);
    for (second, bytes) in [(1, 5), (2, 5), (3, 9), (12, 4), (13, 4)] {
        rig.read_memory(second * SECOND_NS, bytes);
        track.write(&rig.node.rings[0], i64::MAX, &file, &|| ()).expect("written");
        assert_eq!(track.until_ns(), second * SECOND_NS);
    }
    track.end(14 * SECOND_NS, &file).expect("written");
    close(file, 14 * SECOND_NS);
    let points: Vec<_> =
        open(&rig.path()).points(0).map(|(at_ns, used)| ((at_ns - SHIFT_NS) / SECOND_NS, used)).collect();
    // The last reading is a point, though nothing changed there.
    assert_eq!(points, [(0, None), (1, Some(5)), (3, Some(9)), (12, Some(4)), (13, Some(4)), (13, None)]);
}

#[test]
fn a_phase_is_written_with_its_memory() {
    let mut rig = Rig::new();
    rig.say(SECOND_NS, json!({"event": "begin", "name": "forward"}));
    for (second, bytes) in [(1, 10), (2, 30), (3, 20), (4, 20)] {
        rig.read_memory(second * SECOND_NS, bytes);
    }
    rig.say(4 * SECOND_NS, json!({"event": "end", "name": "forward"}));
    rig.node.advance(rig.intake.ledger(), rig.clock.now_ns());
    let (ended, _) = rig.intake.ledger().ended().phases.since(0);
    assert_eq!(ended.len(), 1);
    let file = rig.create();
    file.phase(&ended[0]).expect("written");
    // One that is on a GPU which the file does not have: it is there, without memory.
    let elsewhere: Arc<[String]> = vec!["GPU-elsewhere".to_owned()].into();
    file.phase(&attribute(ended[0].ended.clone(), &rig.node.rings, &rig.node.gpus, &elsewhere)).expect("written");
    close(file, 5 * SECOND_NS);
    let connection = rusqlite::Connection::open(rig.path()).expect("a database");
    let count = |query: &str| connection.query_row(query, [], |row| row.get::<_, i64>(0)).expect("a number");
    let phases = format!(
        "SELECT count(*) FROM phases JOIN jobs USING (job) WHERE jobs.name = 'j' AND rank = 3 AND step = 7 AND \
         phases.name = 'forward' AND kind = 'phase' AND ended_by = 'end' AND begin_ns = {} AND end_ns = {}",
        SHIFT_NS + SECOND_NS,
        SHIFT_NS + 4 * SECOND_NS
    );
    assert_eq!(count(&phases), 2);
    let memory = "SELECT count(*) FROM phase_memory WHERE phase = 1 AND gpu = 0 AND peak_bytes = 30 AND min_bytes = 10 AND \
                  begin_bytes = 10 AND end_bytes = 20 AND gap_ns = 0";
    assert_eq!([count(memory), count("SELECT count(*) FROM phase_memory")], [1, 1]);
}

#[test]
fn a_profile_is_read_as_it_was_sent() {
    let rig = Rig::new();
    let layer = |name: &str, at_ns: i64, growth: i64| {
        rig.say(
            at_ns,
            json!({"event": "mark", "kind": "layer", "name": name, "memory": {"allocated": 40, "reserved": 50},
                "layer": {"direction": "forward", "growth": growth, "activations": 7, "parameters": 8,
                    "gathered": 9, "gathered_sum": 11, "duration_ns": 12,
                    "modules": 3, "peak": 1_030, "held": -13, "recompute": 14}}),
        );
    };
    rig.say(1, json!({"event": "begin", "kind": "step", "name": "step"}));
    layer("a", 2, -5);
    layer("b", 3, 6);
    rig.say(9, json!({"event": "end", "kind": "step", "name": "step"}));
    let file = rig.create();
    {
        let jobs = rig.intake.jobs();
        let (id, job) = jobs.by_id().iter().next().expect("a job");
        let profile = job.ranks[&3].profile().expect("one");
        assert_eq!(file.profile(1, (id, 3), profile, 9).expect("written"), 2);
    }
    close(file, 10);
    let mut reader = RecordingReader::open(&rig.path()).expect("a recording");
    let heads = reader.profiles().expect("read");
    assert_eq!(reader.record_counts(&heads).expect("read"), [2]);
    let mut read = Vec::new();
    reader.records(&heads, |position, record| read.push((position, record.expect("few")))).expect("read");
    let names: Vec<_> =
        read.iter().map(|(position, record)| (*position, &*record.name, record.at_ns - SHIFT_NS)).collect();
    assert_eq!(names, [(0, "a", 2), (0, "b", 3)]);
    let (record, layer) = (&read[0].1, &read[0].1.layer);
    assert_eq!((record.allocated, record.reserved, layer.growth), (Some(40), Some(50), Some(-5)));
    let rest = [layer.activations, layer.parameters, layer.gathered, layer.gathered_sum, layer.duration_ns];
    assert_eq!(rest, [7, 8, 9, 11, 12].map(Some));
}

#[test]
fn a_row_that_cannot_be_used_is_counted_and_costs_no_other() {
    let mut rig = Rig::new();
    rig.read_memory(SECOND_NS, 5);
    let file = rig.create();
    TrackWriter::new(0, 0, 1_000).write(&rig.node.rings[0], i64::MAX, &file, &|| ()).expect("written");
    close(file, 2 * SECOND_NS);
    let connection = rusqlite::Connection::open(rig.path()).expect("a database");
    // SQLite keeps a text in any column that is not strict about it.
    let spoilt = "INSERT INTO annotations (id, at_ns, event, kind, name, job, rank) VALUES (1, 5, 'nonsense', 'phase', 'p', 1, 0)";
    connection.execute_batch("PRAGMA ignore_check_constraints = 1; PRAGMA foreign_keys = 0;").expect("set");
    connection.execute(spoilt, []).expect("inserted");
    drop(connection);
    let replay = open(&rig.path());
    assert_eq!(replay.points(0).filter_map(|(_, used)| used).collect::<Vec<_>>(), [5]);
    assert_eq!(replay.skipped().count, 1, "{:?}", replay.skipped());
}

#[test]
fn a_part_of_a_folder_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options { part: Part { from_ns: Some(1), until_ns: None }, ..Options::default() };
    let refused = Replay::open(folder.path(), options).expect_err("it cannot be read in parts");
    assert!(refused.message.contains("a part can be played only of a recording"), "{}", refused.message);
    let whole = Replay::open(folder.path(), Options::default()).expect_err("it is empty");
    assert!(!whole.message.contains("a part can be played"), "{}", whole.message);
}
