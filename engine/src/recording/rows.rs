//! The rows of a recording's SQLite file, one at a time.
//!
//! Enters: a file from anywhere. Invariants: nothing in it is executed: views, triggers and functions of its schema are
//! not used; a row that cannot be read is counted with its table, and no other row is lost.

use super::lines::{SkippedLines, refuse};
use super::problem::FileProblem;
use super::schema::{self, APPLICATION_ID, FORMAT_VERSION};
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use rusqlite::limits::Limit;
use rusqlite::types::{FromSql, ValueRef};
use rusqlite::{Connection, ErrorCode, Row};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};

/// The most GPUs of one recording. A node does not have more.
pub const MOST_GPUS: usize = 256;
/// The longest text of a cell, bytes.
const MOST_CELL_BYTES: i32 = 1 << 16;

/// Maximum number of instructions with which SQLite may read a schema. It needs some ten for each table or index, but the time
/// grows with the square of their number.
const MOST_SCHEMA_STEPS: c_int = 100_000;

/// Makes SQLite read the schema, which it otherwise does in the first query. Fails if that takes more than the maximum.
fn load_schema(path: &Path, connection: &Connection) -> Result<(), OpenError> {
    let limit = |steps, handler| connection.progress_handler(steps, handler).map_err(|error| unreadable(path, &error));
    limit(MOST_SCHEMA_STEPS, Some((|| true) as fn() -> bool))?;
    let loaded = connection.query_row("SELECT count(*) FROM (SELECT 1 FROM sqlite_schema LIMIT 1)", [], |_| Ok(()));
    limit(0, None)?;
    loaded.map_err(|error| match error.sqlite_error_code() {
        Some(ErrorCode::OperationInterrupted) => {
            refuse("recording_unreadable", path, "its schema has too many tables and indexes")
        }
        _ => unreadable(path, &error),
    })
}

/// A recording while it is read.
pub struct RecordingReader {
    path: PathBuf,
    connection: Connection,
    /// The rows that could not be read.
    pub skipped: SkippedLines,
}

impl RecordingReader {
    /// Opens a recording.
    ///
    /// # Errors
    /// If it is not such a file, has another format, or is still being written.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let file = Self::open_any(path)?;
        let connection = &file.connection;
        let unreadable = |error| unreadable(path, &error);
        let number = |pragma: &str| connection.query_row(&format!("PRAGMA {pragma}"), [], |row| row.get::<_, i64>(0));
        let application = number("application_id").map_err(unreadable)?;
        if application != i64::from(APPLICATION_ID) {
            return Err(refuse("recording_unreadable", path, "is not a recording of highwater"));
        }
        let version = number("user_version").map_err(unreadable)?;
        if version != i64::from(FORMAT_VERSION) {
            let problem = format!("has format {version}; this version of highwater plays format {FORMAT_VERSION}");
            return Err(refuse("recording_unreadable", path, problem));
        }
        if !file.has_table("meta") {
            return Err(file.refuse("recording_unreadable", "it has no table meta"));
        }
        // A file in the state `writing` can be read only if its writer was killed: a writer that runs holds a lock.
        schema::meta::<String>(connection, "state").map_err(unreadable)?;
        Ok(file)
    }

    /// Opens a SQLite file of any program.
    ///
    /// # Errors
    /// If it is not such a file, or is still being written.
    pub fn open_any(path: &Path) -> Result<Self, OpenError> {
        let unreadable = |error| unreadable(path, &error);
        // SQLite is opened with a flag to follow no link, not even in the path of the folder, so links are resolved first.
        let real = path.canonicalize().map_err(|error| refuse("recording_unreadable", path, error))?;
        if real.is_dir() {
            return Err(refuse("recording_unreadable", path, "is a folder, and no recording in one file"));
        }
        let connection = schema::look(&real).map_err(unreadable)?;
        connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, MOST_CELL_BYTES).map_err(unreadable)?;
        connection.pragma_update(None, "trusted_schema", false).map_err(unreadable)?;
        connection.pragma_update(None, "cell_size_check", true).map_err(unreadable)?;
        load_schema(path, &connection)?;
        Ok(Self { path: path.to_owned(), connection, skipped: SkippedLines::default() })
    }

    /// An error about this file.
    pub fn refuse(&self, reason: &'static str, problem: impl std::fmt::Display) -> OpenError {
        refuse(reason, &self.path, problem)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Counts a row that was read and cannot be used.
    pub fn skip(&mut self, number: usize, table: &str, problem: impl fmt::Display) {
        self.skipped.add(&self.path, number, format_args!("table {table}: {problem}"));
    }

    /// A value of the table `meta`; `None` if it is missing or of another type.
    pub fn meta<T: FromSql>(&self, key: &str) -> Option<T> {
        schema::meta(&self.connection, key).ok()
    }

    /// Passes every row of a query on one table, converted by `read`, to `take`, which may refuse the whole file. A row
    /// that `read` refuses is skipped.
    pub fn each<T>(
        &mut self,
        table: &str,
        query: &str,
        parameter: i64,
        read: impl Fn(&Row<'_>) -> Result<T, FileProblem>,
        mut take: impl FnMut(T) -> Result<(), OpenError>,
    ) -> Result<(), OpenError> {
        let path = &self.path;
        // A view could be a query without an end.
        if !self.has_table(table) {
            return Err(self.refuse("recording_unreadable", format!("it has no table {table}")));
        }
        let unreadable =
            |error: rusqlite::Error| refuse("recording_unreadable", path, format!("table {table}: {error}"));
        let mut statement = self.connection.prepare(query).map_err(unreadable)?;
        let mut rows = if statement.parameter_count() > 0 { statement.query([parameter]) } else { statement.query([]) }
            .map_err(unreadable)?;
        let mut number = 0;
        while let Some(row) = rows.next().map_err(unreadable)? {
            number += 1;
            match read(row) {
                Ok(good) => take(good)?,
                Err(problem) => self.skipped.add(path, number, format_args!("table {table}: {problem}")),
            }
        }
        Ok(())
    }

    /// Every row of a query on one table. If there are more than `most`, the file is refused.
    pub fn rows<T>(
        &mut self,
        table: &str,
        query: &str,
        parameter: i64,
        most: usize,
        read: impl Fn(&Row<'_>) -> Result<T, FileProblem>,
    ) -> Result<Vec<T>, OpenError> {
        let path = self.path.clone();
        let mut all = Vec::new();
        self.each(table, query, parameter, read, |good| {
            if all.len() >= most {
                return Err(refuse("recording_too_large", &path, format!("table {table} has more than {most} rows")));
            }
            all.push(good);
            Ok(())
        })?;
        Ok(all)
    }

    /// Each device by its number in the file, with the time until which its memory is known.
    pub fn devices(&mut self) -> Result<BTreeMap<u32, (Device, Option<i64>)>, OpenError> {
        let query = "SELECT gpu, gpu_index, uuid, name, pci_bus_id, parent_uuid, mig_profile, driver_version, \
                     memory_total_bytes, memory_reserved_bytes, known_until_ns FROM gpus ORDER BY gpu";
        let rows = self.rows("gpus", query, 0, MOST_GPUS, |row| {
            let device = Device {
                index: text(row, 1)?.ok_or(FileProblem::Missing("gpu_index".into()))?,
                uuid: text(row, 2)?.ok_or(FileProblem::Missing("uuid".into()))?,
                name: text(row, 3)?,
                pci_bus_id: text(row, 4)?,
                parent_uuid: text(row, 5)?,
                mig_profile: text(row, 6)?,
                driver_version: text(row, 7)?,
                memory_total_bytes: number(row, 8)?,
                memory_reserved_bytes: number(row, 9)?,
                ..Device::default()
            };
            Ok((needed::<u32>(row, 0)?, (device, number(row, 10)?)))
        })?;
        Ok(rows.into_iter().collect())
    }

    /// Whether the file has this table.
    pub fn has_table(&self, table: &str) -> bool {
        self.connection.table_exists(None, table).unwrap_or(false)
    }

    /// These columns of a table, for a query; `NULL` for one that a file from before it lacks.
    #[must_use]
    pub fn columns<const COUNT: usize>(&self, table: &str, columns: [&str; COUNT]) -> String {
        columns.map(|column| if self.has_column(table, column) { column } else { "NULL" }).join(", ")
    }

    /// Whether the file has this column: columns and tables were added without a new version of the format. A file that
    /// cannot be queried fails when it is read.
    pub fn has_column(&self, table: &str, column: &str) -> bool {
        self.connection.column_exists(None, table, column).unwrap_or(false)
    }
}

fn unreadable(path: &Path, error: &rusqlite::Error) -> OpenError {
    let problem = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy) => "is still being written".to_owned(),
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::SystemIoFailure | ErrorCode::DiskFull) => {
            unfinished(path, error).unwrap_or_else(|| error.to_string())
        }
        Some(ErrorCode::NotADatabase) => "is no SQLite file, and so no recording of highwater".to_owned(),
        Some(ErrorCode::DatabaseCorrupt) => "is a damaged SQLite file, or one that was not copied whole".to_owned(),
        _ => error.to_string(),
    };
    refuse("recording_unreadable", path, problem)
}

/// What to do about a file whose writer was killed, where SQLite cannot write beside it: SQLite's own error names neither
/// the file that it lacks nor the reason.
fn unfinished(path: &Path, error: &rusqlite::Error) -> Option<String> {
    let beside = |end: &str| {
        let beside = schema::beside(path, end);
        beside.symlink_metadata().ok()?;
        Some(beside.file_name()?.display().to_string())
    };
    if let Some(log) = beside(schema::WAL) {
        return Some(format!(
            "its writer was killed and left {log}; SQLite reads that only where it can write beside it, and here it cannot \
             ({error}): copy both files to another folder, and read them there"
        ));
    }
    beside(schema::JOURNAL).map(|journal| {
        format!(
            "a change to it was not finished, and {journal} would undo it ({error}): open it once with the sqlite3 program, \
             which does so"
        )
    })
}

/// The name of a column, for messages.
fn column(row: &Row<'_>, at: usize) -> String {
    row.as_ref().column_name(at).unwrap_or("a column").to_owned()
}

/// The value of a column cannot be used.
fn wrong(row: &Row<'_>, at: usize, problem: impl ToString) -> FileProblem {
    FileProblem::Column { column: column(row, at), problem: problem.to_string() }
}

fn cell<'a>(row: &'a Row<'_>, at: usize) -> Result<ValueRef<'a>, FileProblem> {
    row.get_ref(at).map_err(|error| wrong(row, at, error))
}

/// A whole number; `None` if it is not known.
pub fn number<T: TryFrom<i64>>(row: &Row<'_>, at: usize) -> Result<Option<T>, FileProblem> {
    match cell(row, at)? {
        ValueRef::Null => Ok(None),
        ValueRef::Integer(number) => {
            T::try_from(number).map(Some).map_err(|_| wrong(row, at, format!("{number} is out of range")))
        }
        other => Err(wrong(row, at, format!("{} instead of a whole number", other.data_type()))),
    }
}

/// A whole number that must be known.
pub fn needed<T: TryFrom<i64>>(row: &Row<'_>, at: usize) -> Result<T, FileProblem> {
    number(row, at)?.ok_or_else(|| FileProblem::missing(column(row, at)))
}

/// A finite number; `None` if it is not known.
pub fn real(row: &Row<'_>, at: usize) -> Result<Option<f64>, FileProblem> {
    match cell(row, at)? {
        ValueRef::Null => Ok(None),
        ValueRef::Real(number) if number.is_finite() => Ok(Some(number)),
        // A column without a type of its own may hold a whole number.
        #[allow(clippy::cast_precision_loss, reason = "watts and shares")]
        ValueRef::Integer(number) => Ok(Some(number as f64)),
        other => Err(wrong(row, at, format!("{} instead of a number", other.data_type()))),
    }
}

/// A text; `None` if it is not known.
pub fn text(row: &Row<'_>, at: usize) -> Result<Option<String>, FileProblem> {
    match cell(row, at)? {
        ValueRef::Null => Ok(None),
        ValueRef::Text(text) => match std::str::from_utf8(text) {
            Ok(text) => Ok(Some(text.to_owned())),
            Err(_) => Err(wrong(row, at, "not UTF-8 text")),
        },
        other => Err(wrong(row, at, format!("{} instead of text", other.data_type()))),
    }
}

/// A value as JSON; `None` if it is not known.
pub fn json<T: DeserializeOwned>(row: &Row<'_>, at: usize) -> Result<Option<T>, FileProblem> {
    let Some(text) = text(row, at)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|error| wrong(row, at, error))
}

/// A name in its wire form: `begin`, `phase`.
pub fn word<T: DeserializeOwned>(row: &Row<'_>, at: usize) -> Result<T, FileProblem> {
    let name = text(row, at)?.ok_or_else(|| FileProblem::missing(column(row, at)))?;
    serde_json::from_value(name.into()).map_err(|error| wrong(row, at, error))
}
