//! The tables of a recording, and how its file is written so that a kill leaves it readable.
//!
//! While it is written, the file is a database in WAL mode, called `….partial.sqlite`, with its journal beside it. When
//! the process is killed, what was committed is in one of the two, and the next program that opens the database finds
//! it there. The lock is exclusive, so SQLite keeps the journal's index on its heap, and not in shared memory, which a
//! full disk could take away. A checkpoint writes the journal into the database and syncs both: once after the first
//! commit, which has all that was kept before the recording began, and then about every second. A power failure loses only
//! what was written since the last checkpoint. At the end the database leaves WAL mode, so that it is one file that opens
//! anywhere, in read-only folders too. Only then does it get its final name.

use rusqlite::{Connection, OpenFlags};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `HiWa`, in the header of each file.
pub const APPLICATION_ID: i32 = 0x4869_5761;
/// The format of `docs/recordings.md`, in the header's user version.
pub const FORMAT_VERSION: i32 = 1;

/// Why a recording cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// SQLite refused it.
    #[error("{0}")]
    Sql(#[from] rusqlite::Error),
    /// The file could not be made or locked.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// Bytes of a page: SQLite's default.
pub const PAGE_BYTES: u64 = 4096;
/// Kibibytes of SQLite's own cache. What does not fit spills into the journal.
pub const CACHE_KIB: i64 = 1024;

const TABLES: &str = "
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE gpus (
    gpu INTEGER PRIMARY KEY, gpu_index TEXT NOT NULL, uuid TEXT NOT NULL, name TEXT, pci_bus_id TEXT, parent_uuid TEXT,
    mig_profile TEXT, driver_version TEXT, memory_total_bytes INTEGER, memory_reserved_bytes INTEGER,
    known_until_ns INTEGER
);
-- `skipped` has bit n for GPU n if that was not read, as nothing ran on it.
CREATE TABLE ticks (begin_ns INTEGER PRIMARY KEY, end_ns INTEGER NOT NULL, skipped INTEGER NOT NULL);
CREATE TABLE turns (at_ns INTEGER PRIMARY KEY);
CREATE TABLE samples (
    gpu INTEGER NOT NULL, at_ns INTEGER NOT NULL, nth INTEGER NOT NULL, used_bytes INTEGER,
    PRIMARY KEY (gpu, at_ns, nth)
) WITHOUT ROWID;
CREATE TABLE usage (
    gpu INTEGER NOT NULL, at_ns INTEGER NOT NULL, power_watts REAL, utilization_ratio REAL, throttle_reasons INTEGER,
    sm_active_ratio REAL, sm_occupancy_ratio REAL, tensor_active_ratio REAL, dram_active_ratio REAL,
    PRIMARY KEY (gpu, at_ns)
) WITHOUT ROWID;
CREATE TABLE breakdown (
    gpu INTEGER NOT NULL, at_ns INTEGER NOT NULL, allocated_bytes INTEGER, cached_bytes INTEGER, outside_bytes INTEGER,
    process_bytes INTEGER, others_bytes INTEGER, PRIMARY KEY (gpu, at_ns)
) WITHOUT ROWID;
CREATE TABLE health (
    id INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, gpu INTEGER NOT NULL, health TEXT NOT NULL, trouble TEXT
);
CREATE TABLE xids (
    id INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, gpu INTEGER NOT NULL, xid INTEGER NOT NULL, count INTEGER NOT NULL,
    last_ns INTEGER NOT NULL
);
-- `job` is what the other tables have: the name, or with its owner where another job has that name.
CREATE TABLE jobs (job TEXT PRIMARY KEY, name TEXT NOT NULL, namespace TEXT, user TEXT) WITHOUT ROWID;
CREATE TABLE annotations (
    id INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, event TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    job TEXT NOT NULL, rank INTEGER NOT NULL, world_size INTEGER, step INTEGER, gpus TEXT, pid INTEGER,
    allocated_bytes INTEGER, reserved_bytes INTEGER, active_bytes INTEGER, inactive_split_bytes INTEGER,
    alloc_retries INTEGER, ooms INTEGER, attributes TEXT
);
CREATE TABLE phases (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, rank INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    step INTEGER, begin_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, ended_by TEXT NOT NULL DEFAULT 'end'
);
CREATE TABLE phase_memory (
    phase INTEGER NOT NULL REFERENCES phases (id), gpu INTEGER NOT NULL, begin_bytes INTEGER, end_bytes INTEGER,
    peak_bytes INTEGER, min_bytes INTEGER, mean_bytes REAL, drop_bytes INTEGER, gap_ns INTEGER NOT NULL,
    energy_joules REAL, idle_seconds REAL, outside_allocator_bytes INTEGER, PRIMARY KEY (phase, gpu)
) WITHOUT ROWID;
CREATE TABLE layer_profiles (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, rank INTEGER NOT NULL, step INTEGER, begin_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL, missing INTEGER NOT NULL, UNIQUE (job, rank)
);
CREATE TABLE layer_records (
    profile INTEGER NOT NULL REFERENCES layer_profiles (id), nth INTEGER NOT NULL, name TEXT NOT NULL,
    direction TEXT NOT NULL, at_ns INTEGER NOT NULL, allocated_bytes INTEGER, reserved_bytes INTEGER,
    growth_bytes INTEGER, activation_bytes INTEGER, parameter_bytes INTEGER, gathered_bytes INTEGER,
    gathered_sum_bytes INTEGER, duration_ns INTEGER, modules INTEGER, peak_bytes INTEGER, held_bytes INTEGER,
    recompute_bytes INTEGER, PRIMARY KEY (profile, nth)
) WITHOUT ROWID;
CREATE TABLE ranks (
    job TEXT NOT NULL, rank INTEGER NOT NULL, world_size INTEGER, pid INTEGER, gpus TEXT, mesh TEXT, PRIMARY KEY (job, rank)
) WITHOUT ROWID;
CREATE TABLE findings (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, severity TEXT NOT NULL, certainty TEXT NOT NULL, gpu_uuid TEXT, job TEXT,
    rank INTEGER, begin_ns INTEGER NOT NULL, end_ns INTEGER, what TEXT NOT NULL, why TEXT NOT NULL,
    advice TEXT NOT NULL, evidence TEXT NOT NULL, seen_ns INTEGER, first_seen_ns INTEGER, first_what TEXT, first_why TEXT,
    lag_cause TEXT, incident INTEGER
);
CREATE TABLE triggers (at_ns INTEGER NOT NULL, reason TEXT NOT NULL, job TEXT, rank INTEGER, note TEXT NOT NULL,
    owner TEXT);
-- Every single reading. A gap begins at the last good reading, so a gap that begins inside the sweep is passed over to
-- find that reading; times of samples are floored to the microsecond.
CREATE VIEW samples_by_tick AS
SELECT g.gpu AS gpu, t.begin_ns AS begin_ns, t.end_ns AS end_ns, (
    SELECT s.used_bytes FROM samples s
    WHERE s.gpu = g.gpu AND s.at_ns <= t.end_ns AND NOT (s.used_bytes IS NULL AND s.at_ns > t.begin_ns - 1000)
    ORDER BY s.at_ns DESC, s.nth DESC LIMIT 1
) AS used_bytes
FROM gpus g CROSS JOIN ticks t WHERE g.gpu > 63 OR (t.skipped >> g.gpu) & 1 = 0;
";

/// The end of the name of a database's write-ahead log, and of a rollback journal.
pub const WAL: &str = "-wal";
pub(crate) const JOURNAL: &str = "-journal";

/// How every file is opened: by one thread, and through no link; its path must have none at all.
const SAFELY: OpenFlags = OpenFlags::SQLITE_OPEN_NO_MUTEX.union(OpenFlags::SQLITE_OPEN_NOFOLLOW);

/// Creates the file of a new recording of at most `most_bytes`, and begins the transaction that creates its tables.
/// SQLite alone would accept a file that exists already. If this fails, no file is left.
pub fn create(path: &Path, most_bytes: u64, mode: u32) -> Result<Connection, WriteError> {
    std::fs::File::options().write(true).create_new(true).mode(mode).open(path)?;
    begin(path, most_bytes).inspect_err(|_| remove(path))
}

/// Removes a file that [`create`] made and nothing was written to, with what SQLite has beside it. No connection may be open.
pub fn remove(path: &Path) {
    for end in ["", WAL, "-shm"] {
        let _ = std::fs::remove_file(beside(path, end));
    }
}

/// The file that SQLite has beside a database, by the end of its name.
pub fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

fn begin(path: &Path, most_bytes: u64) -> Result<Connection, WriteError> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | SAFELY)?;
    tune(&connection)?;
    let pages = i64::try_from(most_bytes / PAGE_BYTES).unwrap_or(i64::MAX).max(16);
    connection.pragma_update(None, "max_page_count", pages)?;
    connection.execute_batch("BEGIN IMMEDIATE")?;
    connection.pragma_update(None, "application_id", APPLICATION_ID)?;
    connection.pragma_update(None, "user_version", FORMAT_VERSION)?;
    connection.execute_batch(TABLES)?;
    Ok(connection)
}

fn tune(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(Duration::ZERO)?;
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // In WAL mode this syncs only when the journal is written into the database.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    // The capture decides when that happens.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    connection.set_prepared_statement_cache_capacity(32);
    Ok(())
}

/// Writes the journal into the database and syncs both.
pub(crate) fn checkpoint(connection: &Connection) -> rusqlite::Result<()> {
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
}

/// Makes one file of the database and its journal, and closes it.
pub fn close(connection: Connection) -> rusqlite::Result<()> {
    checkpoint(&connection)?;
    connection.pragma_update(None, "journal_mode", "DELETE")?;
    connection.close().map_err(|(_, error)| error)
}

/// Opens a recording that a killed process left behind, so that [`close`] can make one file of it.
pub fn reopen(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | SAFELY)?;
    tune(&connection)?;
    Ok(connection)
}

/// Opens a finished recording for reading.
pub fn look(path: &Path) -> rusqlite::Result<Connection> {
    Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY | SAFELY)
}

/// A value of the table `meta`.
pub fn meta<T: rusqlite::types::FromSql>(connection: &Connection, key: &str) -> rusqlite::Result<T> {
    connection.query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0))
}
