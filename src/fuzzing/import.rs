//! Fuzzes files of other tools: text, and rows in the tables of nvprof and Nsight Systems; imported and shown.

use super::folder::Folder;
use super::parts;
use super::recording::show;
use super::replay::play;
use highwater_analysis::replay;
use highwater_analysis::report::{Report, Room};
use highwater_core::fuzzing::Numbers;
use highwater_engine::offline::Settings;
use highwater_engine::recording::Options;
use rusqlite::Connection;
use rusqlite::types::Value;
use std::fs;
use std::path::Path;

/// The tables with the columns that are read.
const TABLES: [&str; 2] = [
    "CUPTI_ACTIVITY_KIND_MEMORY (deviceId, start, end, bytes, memoryKind)",
    "CUDA_GPU_MEMORY_USAGE_EVENTS (deviceId, start, bytes, memoryOperationType, address, memKind, globalPid, contextId)",
];
/// Rows inserted from one input.
const MOST_ROWS: usize = 32;

/// Imports a file. If the first byte is 0 or 1, the parts of the input are rows of one of the tables; otherwise the rest
/// of the input is a text file.
pub fn import(data: &[u8]) {
    thread_local!(static BEGUN: (Folder, Settings) = (Folder::make("import").expect("a folder for temporary files"), Settings::default()));
    let Some((kind, data)) = data.split_first() else { return };
    BEGUN.with(|(folder, settings)| {
        let path = folder.file("it");
        let _ = fs::remove_file(&path);
        match TABLES.get(usize::from(*kind)) {
            Some(table) => insert(&path, table, data),
            None => fs::write(&path, data).expect("written"),
        }
        if let Ok(replay) = replay::open(&path, Options::default()) {
            play(&replay);
        }
        if let Ok(report) = Report::open(&path, Room::of(2), settings) {
            show(&report);
        }
    });
}

fn insert(path: &Path, table: &str, data: &[u8]) {
    let connection = Connection::open(path).expect("opened");
    connection
        .execute_batch(&format!("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN; CREATE TABLE {table}"))
        .expect("a table");
    let name = table.split(' ').next().unwrap_or_default();
    let columns = table.matches(',').count() + 1;
    let places = vec!["?"; columns].join(", ");
    for row in parts(data).take(MOST_ROWS) {
        let mut numbers = Numbers(row);
        let cells: Vec<Value> = (0..columns).map(|_| cell(&mut numbers)).collect();
        connection
            .execute(&format!("INSERT INTO {name} VALUES ({places})"), rusqlite::params_from_iter(cells))
            .expect("a row");
    }
    connection.execute_batch("COMMIT").expect("written");
}

fn cell(numbers: &mut Numbers) -> Value {
    match numbers.byte() {
        0 => Value::Null,
        kind @ 1..=199 => Value::Integer(i64::from(kind) - 1),
        200..=229 => Value::Integer(numbers.word().cast_signed()),
        230..=239 => Value::Real(f64::from_bits(numbers.word())),
        _ => Value::Text("x".to_owned()),
    }
}
