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
/// The tables of an export of Nsight Systems with what ran on GPUs, with the columns that are read.
const WORK: [&str; 7] = [
    "StringIds (id, value)",
    "CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, globalPid, correlationId, demangledName)",
    "CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, globalPid, correlationId, copyKind, srcKind, dstKind)",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, end, deviceId, globalPid, correlationId)",
    "CUPTI_ACTIVITY_KIND_RUNTIME (start, globalTid, correlationId)",
    "NVTX_EVENTS (start, end, eventType, globalTid, text, textId, domainId)",
    "TARGET_INFO_CUDA_DEVICE (gpuId, cudaId, pid)",
];
/// The first byte of an input with rows of these.
const IS_WORK: u8 = 3;
/// Texts of cells.
const TEXTS: [&str; 5] = ["x", "step 1", "step 2", "load_batch", "ncclKernel_AllReduce"];
/// Rows inserted from one input.
const MOST_ROWS: usize = 32;

/// Imports a file. If the first byte is 0 or 1, the parts of the input are rows of one of the tables; if it is 3, rows of the
/// tables of work, each of which the first byte of a part chooses; otherwise the rest of the input is a text file.
pub fn import(data: &[u8]) {
    thread_local!(static BEGUN: (Folder, Settings) = (Folder::make("import").expect("a folder for temporary files"), Settings::default()));
    let Some((kind, data)) = data.split_first() else { return };
    BEGUN.with(|(folder, settings)| {
        let path = folder.file("it");
        let _ = fs::remove_file(&path);
        match TABLES.get(usize::from(*kind)) {
            Some(table) => insert(&path, &[table], data),
            None if *kind == IS_WORK => insert(&path, &WORK, data),
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

/// Makes these tables. Each part of the data is a row; if there are several tables, its first byte chooses one.
fn insert(path: &Path, tables: &[&str], data: &[u8]) {
    let connection = Connection::open(path).expect("opened");
    connection.execute_batch("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN").expect("begun");
    tables.iter().for_each(|table| connection.execute_batch(&format!("CREATE TABLE {table}")).expect("a table"));
    for row in parts(data).take(MOST_ROWS) {
        let mut numbers = Numbers(row);
        let chosen = if tables.len() > 1 { usize::from(numbers.byte()) % tables.len() } else { 0 };
        let table = tables[chosen];
        let name = table.split(' ').next().unwrap_or_default();
        let columns = table.matches(',').count() + 1;
        let places = vec!["?"; columns].join(", ");
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
        kind => Value::Text(TEXTS[usize::from(kind) % TEXTS.len()].to_owned()),
    }
}
