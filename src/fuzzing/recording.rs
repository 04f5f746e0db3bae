//! Fuzzes a recording in a SQLite file, played and shown: rows with arbitrary cells in its tables, and arbitrary bytes in its pages.

use super::folder::Folder;
use super::parts;
use super::replay::play;
use highwater_analysis::report::{Comparison, Report, Room, json, page, perfetto, ranks, summary};
use highwater_core::fuzzing::Numbers;
use highwater_engine::recording::schema;
use highwater_engine::recording::{Options, Replay, printable};
use rusqlite::Connection;
use rusqlite::types::Value;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// The tables that are read, with their number of columns.
const TABLES: [(&str, usize); 16] = [
    ("meta", 2),
    ("gpus", 11),
    ("samples", 4),
    ("usage", 9),
    ("breakdown", 7),
    ("annotations", 18),
    ("ranks", 6),
    ("turns", 1),
    ("health", 5),
    ("xids", 6),
    ("phases", 9),
    ("phase_memory", 12),
    ("findings", 19),
    ("layer_profiles", 7),
    ("layer_records", 17),
    ("jobs", 4),
];
/// Texts with a meaning for the reader.
const WORDS: [&str; 34] = [
    "state",
    "complete",
    "writing",
    "begin_ns",
    "end_ns",
    "begin",
    "end",
    "exit",
    "step",
    "phase",
    "GPU-a",
    "[\"GPU-a\"]",
    "{\"a\":1}",
    "up",
    "lost",
    "hung",
    "",
    "forward",
    "backward",
    "layer",
    "mark",
    "oom",
    "info",
    "warning",
    "critical",
    "GPU-b",
    "[\"GPU-b\"]",
    "[]",
    "{}",
    "null",
    "-",
    "ü",
    "hung",
    "",
];
/// Rows inserted from one input.
const MOST_ROWS: usize = 32;

/// Plays the file whose rows are the parts of the input. If the first byte is odd, the last part changes bytes of
/// pages, with three bytes per change: a position in two, and the value.
pub fn recording(data: &[u8]) {
    thread_local!(static BEGUN: (Folder, Vec<u8>) = begun());
    let Some((damages, data)) = data.split_first() else { return };
    BEGUN.with(|(folder, empty)| {
        let path = folder.file("it.sqlite");
        fs::write(&path, empty).expect("written");
        let mut rows: Vec<&[u8]> = parts(data).take(MOST_ROWS).collect();
        let damage = if damages & 1 == 1 { rows.pop() } else { None };
        insert(&path, &rows);
        damage.into_iter().for_each(|damage| change(&path, damage));
        if let Ok(replay) = Replay::open(&path, Options::default()) {
            play(&replay);
        }
        if let Ok(report) = Report::open_own(&path, Room::of(2)) {
            show(&report);
        }
    });
}

/// Everything that a report is turned into.
pub(super) fn show(report: &Report) {
    let text = summary(report).to_string();
    assert!(report.gpus.iter().all(|gpu| text.contains(&printable(&gpu.device.index))), "a GPU is missing: {text}");
    assert!(!text.chars().any(|one| one.is_control() && one != '\n'), "a terminal would obey this: {text:?}");
    let reports = [report.clone(), report.clone()];
    let comparison = Comparison::of(&reports);
    let compared = comparison.iter().map(|one| one.printed().to_string()).collect::<String>();
    assert!(!compared.chars().any(|one| one.is_control() && one != '\n'), "a terminal would obey this: {compared:?}");
    let ranks = ranks(&reports);
    let shown = json(&reports, comparison.as_ref(), ranks.as_ref()).to_string();
    let page = page(&reports, comparison.as_ref(), ranks.as_ref(), Some(1));
    assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (2, 2), "text became an element");
    assert!(shown.contains("\"recordings\""), "{shown}");
    let trace: Result<serde_json::Value, _> = serde_json::from_str(&perfetto(&reports));
    assert!(trace.is_ok_and(|trace| trace["traceEvents"].is_array()), "text became a part of the trace");
}

/// A folder, and the bytes of a recording that contains only the row of its state.
fn begun() -> (Folder, Vec<u8>) {
    let folder = Folder::make("recording").expect("a folder for temporary files");
    let path = folder.file("empty.sqlite");
    let connection = schema::create(&path, 1 << 20, 0o600).expect("created");
    connection.execute_batch("INSERT INTO meta VALUES ('state', 'complete'); COMMIT").expect("written");
    schema::close(connection).expect("closed");
    (folder, fs::read(&path).expect("read"))
}

fn insert(path: &Path, rows: &[&[u8]]) {
    let connection = Connection::open(path).expect("opened");
    // The journal in memory and no syncs: the next input replaces this file.
    connection.execute_batch("PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; BEGIN").expect("a database");
    for row in rows {
        let mut numbers = Numbers(row);
        let (table, columns) = TABLES[usize::from(numbers.byte()) % TABLES.len()];
        let cells: Vec<Value> = (0..columns).map(|_| cell(&mut numbers)).collect();
        let places = vec!["?"; columns].join(", ");
        let mut statement =
            connection.prepare_cached(&format!("INSERT OR REPLACE INTO {table} VALUES ({places})")).expect("a table");
        // Some columns are `NOT NULL`, or allow only whole numbers.
        let _ = statement.execute(rusqlite::params_from_iter(cells));
    }
    connection.execute_batch("COMMIT").expect("written");
}

fn cell(numbers: &mut Numbers) -> Value {
    match numbers.byte() {
        0 => Value::Null,
        kind @ 1..=99 => Value::Integer(i64::from(kind) - 1),
        kind @ 100..=199 => Value::Text(WORDS[usize::from(kind) % WORDS.len()].to_owned()),
        200..=219 => Value::Integer(numbers.word().cast_signed()),
        220..=239 => Value::Real(f64::from_bits(numbers.word())),
        240..=249 => Value::Text(String::from_utf8_lossy(&numbers.word().to_le_bytes()).into_owned()),
        _ => Value::Blob(numbers.word().to_le_bytes().into()),
    }
}

fn change(path: &Path, damage: &[u8]) {
    let file = fs::File::options().write(true).open(path).expect("it was written");
    let length = file.metadata().expect("open").len().max(1);
    for three in damage.chunks_exact(3) {
        let place = u64::from(u16::from_le_bytes([three[0], three[1]])) * 5 % length;
        file.write_all_at(&three[2..], place).expect("written");
    }
}
