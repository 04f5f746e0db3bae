//! Tests with the real recording in `tests/data/h200-ddp`, and with defective recordings.

use super::*;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use highwater_core::source::{Error, NextTick, Source as _};
use highwater_core::wire::{EventType, Gpu, GpuList, Kind, Scalar};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

fn recording() -> PathBuf {
    // The real crate's manifest is beside `tests`.
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("tests/data/h200-ddp")
}

fn open(path: &Path) -> Replay {
    Replay::open(path, Options::default()).expect("a good recording")
}

fn refusal(path: &Path) -> (&'static str, String) {
    let error = Replay::open(path, Options::default()).expect_err("a bad recording");
    (error.reason, error.message.replace(&path.display().to_string(), "DIR"))
}

fn unpacked(name: &str) -> String {
    let packed = std::fs::File::open(recording().join(name)).expect("the recording is there");
    let mut text = String::new();
    GzDecoder::new(packed).read_to_string(&mut text).expect("text");
    text
}

/// The points of the file, read as naively as can be.
fn naive_points() -> Vec<(i64, usize, u64)> {
    let text = unpacked("nvml_1khz.csv.gz");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let mut fields = line.split(',');
            let mut next = || fields.next().expect("three fields");
            (next().parse().expect("ns"), next().parse().expect("gpu"), next().parse().expect("bytes"))
        })
        .collect()
}

/// A folder with these files.
fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).expect("written");
    }
    folder
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
    packer.write_all(content).expect("packed");
    packer.finish().expect("packed")
}

#[test]
fn at_each_time_memory_is_what_a_naive_lookup_finds() {
    let replay = open(&recording());
    let points = naive_points();
    assert_eq!(points.len(), 3_316);
    assert_eq!(replay.skipped().count, 0);
    let mut now = BTreeMap::new();
    for (at_ns, gpu, used) in &points {
        if let Some(before) = now.insert(*gpu, *used) {
            assert_eq!(replay.memory_used(*gpu, at_ns - 1), Ok(before));
        } else {
            assert_eq!(replay.memory_used(*gpu, at_ns - 1), Err(Error::NotYet));
        }
        for (gpu, used) in &now {
            assert_eq!(replay.memory_used(*gpu, *at_ns), Ok(*used));
        }
    }
    assert_eq!(now.len(), 2);
}

#[test]
fn the_ticks_are_the_changes_of_all_gpus_and_then_the_end() {
    let replay = open(&recording());
    let mut expected: Vec<i64> = naive_points().iter().map(|(at_ns, ..)| *at_ns).collect();
    expected.sort_unstable();
    expected.dedup();
    let mut ticks = Vec::new();
    let mut at_ns = replay.begin_ns() - 1;
    while let NextTick::At(next_ns) = replay.next_tick(at_ns) {
        assert!(next_ns > at_ns);
        ticks.push(next_ns);
        at_ns = next_ns;
    }
    assert_eq!(ticks, expected);
    assert_eq!(replay.next_tick(at_ns), NextTick::End);
    assert_eq!((replay.begin_ns(), replay.end_ns()), (1_795_207_211_009_094_564, 1_795_207_289_352_069_961));
}

#[test]
fn annotations_of_both_ranks_come_in_order_of_time() {
    let said: Vec<_> = open(&recording()).annotations().collect();
    assert_eq!(said.len(), 6_960);
    assert!(said.is_sorted_by_key(|said| said.time_unix_nano));
    assert_eq!(said.iter().filter(|said| said.kind == Kind::Step).count(), 2 * 2 * 290);
    assert!(said.iter().all(|said| said.world_size == Some(2) && said.job.as_deref() == Some("h200-ddp")));
    assert!(said.iter().all(|said| said.rank.map(|rank| GpuList::One(Gpu::Index(rank))) == said.gpu));
    let retries = said.iter().filter(|said| said.rank == Some(0)).filter_map(|said| said.memory?.alloc_retries);
    assert_eq!(retries.max(), Some(3));
    let comm = said.iter().find(|said| said.name.as_deref() == Some("comm") && said.event == EventType::End);
    let attributes = comm.and_then(|said| said.attributes.as_ref()).expect("attributes");
    assert_eq!(attributes.get("cfg"), Some(&Scalar::Text("warmup".into())));
    assert_eq!(attributes.get("seq"), Some(&Scalar::Int(768)));
    assert!(said.iter().filter(|said| said.kind == Kind::Step).all(|said| said.name.is_none()));
}

#[test]
fn a_shift_moves_everything_alike() {
    let recorded = open(&recording());
    let shifted =
        Replay::open(&recording(), Options { shift_to_now: Some(5_000), ..Options::default() }).expect("good");
    let shift_ns = 5_000 - recorded.begin_ns();
    assert_eq!((shifted.begin_ns(), shifted.end_ns()), (5_000, recorded.end_ns() + shift_ns));
    for (at_ns, gpu, used) in naive_points() {
        assert_eq!(shifted.memory_used(gpu, at_ns + shift_ns), recorded.memory_used(gpu, at_ns));
        assert!(used > 0);
    }
    assert_eq!(shifted.next_tick(4_999), NextTick::At(5_000));
    assert_eq!(shifted.next_tick(shifted.end_ns() - 1), NextTick::At(shifted.end_ns()));
    for (before, after) in recorded.annotations().zip(shifted.annotations()) {
        assert_eq!(before.time_unix_nano.map(|at_ns| at_ns + shift_ns), after.time_unix_nano);
    }
}

#[test]
fn packed_or_not_is_the_same_recording() {
    let names = ["nvml_1khz.csv.gz", "annotations_rank0.jsonl.gz", "annotations_rank1.jsonl.gz"];
    let plain = tempfile::tempdir().expect("a folder");
    let named = plain.path().join("h200-ddp");
    std::fs::create_dir(&named).expect("created");
    for name in names {
        std::fs::write(named.join(name.trim_end_matches(".gz")), unpacked(name)).expect("written");
    }
    let (packed, plain) = (open(&recording()), open(&named));
    assert_eq!(packed.devices(), plain.devices());
    assert!(packed.annotations().eq(plain.annotations()));
    assert_eq!(packed.devices()[0].uuid, "REPLAY-h200-ddp-0");
    assert_eq!(packed.devices()[0].memory_total_bytes, None);
    for (at_ns, gpu, _) in naive_points() {
        assert_eq!(packed.memory_used(gpu, at_ns), plain.memory_used(gpu, at_ns));
    }
}

/// A replay would wait for such a time.
#[test]
fn a_time_of_another_clock_is_refused_with_the_times() {
    let memory: &[u8] = b"1795207210000000000,0,100\n1795207211000000000,0,200\n0,0,5\n";
    let folder = folder(&[("nvml_1khz.csv", memory)]);
    let (reason, message) = refusal(folder.path());
    assert_eq!(reason, "recording_unreadable");
    let expected = "from 0 ns in nvml_1khz.csv to 1795207211000000000 ns in nvml_1khz.csv";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn a_bad_line_is_reported_and_costs_no_other() {
    let memory: &[u8] =
        b"# comment\nrealtime_ns,gpu,used_bytes\n10,0,100\n20,0\n\nx,0,1\n30,0,-5\n\xff\xfe\n25,0,250\r\n40,0,400";
    let rank0 = br#"{"ts": 12, "rank": 0, "ev": "begin", "phase": "step", "step": 3}
{"ts": 13, "rank": 0, "ev": "begin"}
not json
{"ts": 14, "rank": 0, "ev": "oom", "phase": "forward", "step": 3, "ooms": 1, "note": {"a": [1]}, "none": null}
{"ts": "15", "rank": 0, "ev": "end", "phase": "step"}
"#;
    let folder = folder(&[("nvml_1khz.csv", memory), ("annotations_rank0.jsonl", rank0)]);
    let replay = open(folder.path());
    let expected: Vec<String> = replay.skipped().first.iter().map(ToString::to_string).collect();
    let dir = folder.path().display();
    assert_eq!(
        expected,
        [
            format!("{dir}/nvml_1khz.csv:4: `realtime_ns,gpu,used_bytes` is expected"),
            format!("{dir}/nvml_1khz.csv:6: `x` is not a time in nanoseconds"),
            format!("{dir}/nvml_1khz.csv:7: `-5` is not a number of bytes"),
            format!("{dir}/nvml_1khz.csv:8: this is not UTF-8 text"),
            format!("{dir}/annotations_rank0.jsonl:2: `phase` is missing"),
            format!("{dir}/annotations_rank0.jsonl:3: column 2: expected ident"),
            format!("{dir}/annotations_rank0.jsonl:5: column 11: invalid type: string \"15\", expected i64"),
        ]
    );
    assert_eq!(replay.skipped().count, expected.len());
    assert_eq!([10, 24, 25, 40].map(|at_ns| replay.memory_used(0, at_ns)), [Ok(100), Ok(100), Ok(250), Ok(400)]);
    let said: Vec<_> = replay.annotations().collect();
    assert_eq!(said.len(), 2);
    assert_eq!((said[1].event, said[1].name.as_deref()), (EventType::Mark, Some("oom")));
    let attributes = said[1].attributes.clone().expect("attributes");
    let text = |name: &str| attributes.get(name).cloned();
    assert_eq!(text("phase"), Some(Scalar::Text("forward".into())));
    assert_eq!(text("note"), Some(Scalar::Text("{\"a\":[1]}".into())));
    assert_eq!(text("none"), None);
}

#[test]
fn annotations_out_of_order_and_after_the_last_change_are_put_in_order_and_reached() {
    let rank = br#"{"ts": 90, "rank": 7, "ev": "end", "phase": "f"}
{"ts": 5, "rank": 7, "ev": "begin", "phase": "f"}
"#;
    let folder = folder(&[("nvml_1khz.csv", b"10,7,1\n20,7,2\n"), ("annotations_rank7.jsonl", rank)]);
    let replay = open(folder.path());
    let times: Vec<_> = replay.annotations().filter_map(|said| said.time_unix_nano).collect();
    assert_eq!(times, [5, 90]);
    assert_eq!((replay.begin_ns(), replay.end_ns()), (5, 90));
    let ticks = [5, 10, 20, 90].map(|after_ns| replay.next_tick(after_ns));
    assert_eq!(ticks, [NextTick::At(10), NextTick::At(20), NextTick::At(90), NextTick::End]);
    assert_eq!((replay.devices()[0].index.as_str(), replay.devices().len()), ("7", 1));
}

#[test]
fn a_packed_file_that_is_cut_off_gives_what_is_whole() {
    let mut random = 1_u64;
    let mut lines = String::new();
    for at_ns in 0..20_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        lines.push_str(&format!("{at_ns},0,{}\n", random >> 30));
    }
    let packed = gzip(lines.as_bytes());
    let folder = folder(&[("nvml_1khz.csv.gz", &packed[..packed.len() / 2])]);
    let replay = open(folder.path());
    assert_eq!(replay.skipped().count, 1);
    assert!(replay.skipped().first[0].message.starts_with("the file cannot be read from here on"));
    assert!((1_000..20_000).contains(&replay.end_ns()), "{}", replay.end_ns());
}

#[test]
fn what_is_no_recording_is_refused_and_says_why() {
    assert_eq!(refusal(Path::new("/no/such/folder")).0, "recording_missing");
    let of = |files: &[(&str, &[u8])]| refusal(folder(files).path());
    assert_eq!(of(&[]), ("recording_missing", "DIR: there is no nvml_1khz.csv or nvml_1khz.csv.gz".into()));
    let good: (&str, &[u8]) = ("nvml_1khz.csv", b"1,0,1\n");
    assert_eq!(
        of(&[good, ("nvml_1khz.csv.gz", b"")]).1,
        "DIR: both nvml_1khz.csv and nvml_1khz.csv.gz are there: remove one"
    );
    assert_eq!(
        of(&[good, ("annotations_rank0.jsonl", b""), ("annotations_rank0.jsonl.gz", b"")]).1,
        "DIR: both annotations_rank0.jsonl and annotations_rank0.jsonl.gz are there: remove one"
    );
    assert_eq!(
        of(&[("nvml_1khz.csv", b"# only this\nand that\n")]),
        (
            "recording_unreadable",
            "DIR/nvml_1khz.csv: no valid line: line 2: `realtime_ns,gpu,used_bytes` is expected".into()
        )
    );
    assert_eq!(
        of(&[good, ("annotations_rank0.jsonl", b"\n\n")]).1,
        "DIR/annotations_rank0.jsonl: no valid line: the file is empty"
    );
    let (reason, message) = of(&[good, ("gpus.json", br#"[{"index": 0, "uid": "x"}]"#)]);
    assert_eq!(reason, "recording_unreadable");
    assert!(message.starts_with("DIR/gpus.json: unknown field `uid`"), "{message}");
}

#[test]
fn what_gpus_json_shows_is_known() {
    let facts = br#"[{"index": 1, "uuid": "GPU-x", "name": "NVIDIA H200", "memory_total_bytes": 1000}]"#;
    let folder = folder(&[("nvml_1khz.csv", b"1,0,1\n1,1,1\n"), ("gpus.json", facts)]);
    let replay = open(folder.path());
    assert_eq!(replay.devices()[0].usable_bytes(), None);
    assert!(replay.devices()[0].uuid.starts_with("REPLAY-") && replay.devices()[0].uuid.ends_with("-0"));
    assert_eq!((replay.devices()[1].uuid.as_str(), replay.devices()[1].usable_bytes()), ("GPU-x", Some(1000)));
}

proptest! {
    #[test]
    fn no_file_whatever_makes_it_panic(memory in any::<Vec<u8>>(), said in any::<Vec<u8>>(), good in any::<bool>()) {
        let memory = if good { [b"7,0,7\n", memory.as_slice()].concat() } else { memory };
        let folder = folder(&[("nvml_1khz.csv", &memory), ("annotations_rank0.jsonl.gz", &gzip(&said))]);
        if let Ok(replay) = Replay::open(folder.path(), Options { shift_to_now: Some(i64::MAX), ..Options::default() }) {
            prop_assert!(replay.annotations().count() > 0);
        }
    }

    #[test]
    fn lookups_agree_with_a_naive_model(mut points in prop::collection::vec((0_i64..50, 0_u64..5), 1..40)) {
        let text: String = points.iter().map(|(at, used)| format!("{at},0,{used}\n")).collect();
        let folder = folder(&[("nvml_1khz.csv", text.as_bytes())]);
        let replay = open(folder.path());
        points.sort_by_key(|(at, _)| *at);
        for at in -1..60 {
            let naive = points.iter().rfind(|(since, _)| *since <= at).map(|(_, used)| *used);
            prop_assert_eq!(replay.memory_used(0, at).ok(), naive);
            let next = points.iter().map(|(since, _)| *since).find(|since| *since > at);
            prop_assert_eq!(replay.next_tick(at), next.map_or(NextTick::End, NextTick::At));
        }
    }
}

/// This many packed files one after the other, which is a packed file too.
fn bomb(text: &str, times: usize) -> Vec<u8> {
    gzip(text.as_bytes()).repeat(times)
}

#[test]
fn a_file_that_unpacks_without_end_is_refused_with_its_bound() {
    let zeros = "\0".repeat(1 << 24);
    // Long lines mean that there are fewer to go through.
    let padded = |line: &str| format!("{line}{}\n", " ".repeat(1 << 13)).repeat(1 << 11);
    let (comments, blank, lines) = (padded("# nothing"), padded(""), padded("1,0,1"));
    for (name, packed, expected) in [
        ("one line", bomb(&zeros, 96), "line 1 is longer than 1048576 bytes"),
        ("comments", bomb(&comments, 96), "it decompresses to more than "),
        ("blank lines", bomb(&blank, 96), "it decompresses to more than "),
        ("good lines", bomb(&lines, 96), "it decompresses to more than "),
    ] {
        let size = packed.len() as u64;
        assert!(size < 12 << 20, "{name}: {size} bytes");
        let folder = folder(&[("nvml_1khz.csv.gz", &packed)]);
        let (reason, message) = refusal(folder.path());
        assert_eq!(reason, "recording_too_large", "{name}: {message}");
        assert!(message.starts_with(&format!("DIR/nvml_1khz.csv.gz: {expected}")), "{name}: {message}");
    }
}

#[test]
fn what_is_kept_of_a_file_is_bounded() {
    let line = format!("1,0,{}\n", "x".repeat(1 << 19));
    let long = folder(&[("nvml_1khz.csv", format!("1,0,1\n{}", line.repeat(20)).as_bytes())]);
    let replay = open(long.path());
    assert_eq!(replay.skipped().count, 20);
    assert!(replay.skipped().first.iter().all(|skipped| skipped.message.len() < 300), "a message quotes the line");
    let gpus: String = (0..300).map(|gpu| format!("1,{gpu},1\n")).collect();
    let many = folder(&[("nvml_1khz.csv", gpus.as_bytes())]);
    let (reason, message) = refusal(many.path());
    assert_eq!((reason, message.as_str()), ("recording_too_large", "DIR/nvml_1khz.csv: it has more than 256 GPUs"));
    let said = |ts: i64| format!("{{\"ts\":{ts},\"rank\":0,\"ev\":\"{}\"}}\n", "x".repeat(1 << 19));
    let back: String = (0..70).rev().map(said).collect();
    let unordered = folder(&[("nvml_1khz.csv", b"1,0,1\n"), ("annotations_rank0.jsonl", back.as_bytes())]);
    let (reason, message) = refusal(unordered.path());
    assert!(reason == "recording_too_large" && message.contains("its times go back"), "{reason} {message}");
    let facts = folder(&[("nvml_1khz.csv", b"1,0,1\n"), ("gpus.json", " ".repeat(1 << 21).as_bytes())]);
    assert!(refusal(facts.path()).1.contains("gpus.json: it is longer than 1048576 bytes"));
}

/// SQLite needs seconds to minutes for a schema of hundreds of thousands of tables, before its first query.
#[test]
fn a_file_of_very_many_tables_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (tables, is_refused) in [(5_000, false), (20_000, true)] {
        let path = folder.path().join(format!("{tables}.sqlite"));
        let file = rusqlite::Connection::open(&path).unwrap();
        let all: String = (0..tables).map(|n| format!("CREATE TABLE t{n} (a);")).collect();
        file.execute_batch(&format!("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN; {all} COMMIT;"))
            .unwrap();
        drop(file);
        let refused = super::rows::RecordingReader::open(&path).err().expect("it is no recording");
        let because = if is_refused { "its schema has too many tables and indexes" } else { "is not a recording" };
        assert!(refused.message.contains(because), "{tables}: {}", refused.message);
    }
}

/// What another program did not finish writing. Only a connection that may write can undo it.
#[test]
fn a_file_whose_change_was_not_finished_is_refused_with_what_undoes_it() {
    let folder = tempfile::tempdir().unwrap();
    let (path, copy) = (folder.path().join("file.sqlite"), folder.path().join("copy.sqlite"));
    let file = rusqlite::Connection::open(&path).unwrap();
    // The change outgrows a cache of one page, so it is in the file before it is finished.
    file.execute_batch("CREATE TABLE t (a); INSERT INTO t VALUES (zeroblob(100000)); PRAGMA cache_size = 1; BEGIN")
        .unwrap();
    file.execute_batch("UPDATE t SET a = randomblob(100000); INSERT INTO t VALUES (randomblob(100000))").unwrap();
    std::fs::copy(&path, &copy).unwrap();
    std::fs::copy(folder.path().join("file.sqlite-journal"), folder.path().join("copy.sqlite-journal")).unwrap();
    let refused = super::rows::RecordingReader::open(&copy).err().expect("it is no recording");
    assert!(
        refused.message.contains("a change to it was not finished, and copy.sqlite-journal would undo it"),
        "{}",
        refused.message
    );
    rusqlite::Connection::open(&copy)
        .unwrap()
        .query_row("SELECT count(*) FROM t", [], |row| row.get::<_, i64>(0))
        .unwrap();
    let refused = super::rows::RecordingReader::open(&copy).err().expect("it is no recording");
    assert!(refused.message.contains("is not a recording"), "{}", refused.message);
}
