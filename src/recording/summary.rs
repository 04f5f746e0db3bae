//! What a recording shows at a glance: the peak of each GPU, and of each phase of each rank.
//!
//! Enters: a finished file. Leaves: numbers, and a table of them for people.

use super::schema::look;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use rusqlite::{Connection, Row};
use std::fmt;
use std::path::Path;

/// The numbers of one recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// How long it lasted, nanoseconds.
    pub duration_ns: i64,
    /// Each GPU, in the recording's order.
    pub gpus: Vec<GpuPeak>,
    /// Each phase of each rank, by job, rank, and first begin.
    pub phases: Vec<PhasePeak>,
    /// What was found, in order of time.
    pub findings: Vec<String>,
}

/// One GPU's memory.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuPeak {
    /// Its index.
    pub index: String,
    /// The highest memory in use, bytes, and how long after the begin it was first reached, nanoseconds. `None` if no
    /// reading succeeded.
    pub peak: Option<(u64, i64)>,
    /// The lowest memory in use, bytes.
    pub lowest_bytes: Option<u64>,
    /// Its size, bytes.
    pub total_bytes: Option<u64>,
    /// For how long its memory is not known, nanoseconds.
    pub gap_ns: i64,
}

/// All phases of one name of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct PhasePeak {
    /// The job.
    pub job: String,
    /// The rank.
    pub rank: u32,
    /// The phase; `step` for whole steps.
    pub name: String,
    /// How many there were.
    pub count: u64,
    /// Their mean duration, nanoseconds.
    pub mean_ns: f64,
    /// The highest peak, bytes; `None` if the memory of none is known.
    pub peak_bytes: Option<u64>,
}

impl Summary {
    /// Reads it from a finished recording.
    ///
    /// # Errors
    /// The file is no recording, or damaged.
    pub fn of(path: &Path) -> rusqlite::Result<Self> {
        let file = look(path)?;
        let time = |key: &str| super::schema::meta::<i64>(&file, key);
        let (begin_ns, end_ns) = (time("begin_ns")?, time("end_ns")?);
        Ok(Self {
            duration_ns: end_ns - begin_ns,
            gpus: gpus(&file, begin_ns, end_ns)?,
            phases: phases(&file)?,
            findings: all(&file, "SELECT what FROM findings ORDER BY begin_ns, id", [], |row| row.get(0))?,
        })
    }
}

fn all<T>(
    file: &Connection,
    sql: &str,
    parameters: impl rusqlite::Params,
    read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Vec<T>> {
    file.prepare(sql)?.query_map(parameters, read)?.collect()
}

/// A number of bytes or things; `None` where the file has none, or one that cannot be.
fn number(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<u64>> {
    Ok(row.get::<_, Option<i64>>(column)?.and_then(|number| u64::try_from(number).ok()))
}

fn gpus(file: &Connection, begin_ns: i64, end_ns: i64) -> rusqlite::Result<Vec<GpuPeak>> {
    let known = "SELECT gpu, gpu_index, memory_total_bytes FROM gpus ORDER BY gpu";
    let known: Vec<(i64, String, Option<u64>)> =
        all(file, known, [], |row| Ok((row.get(0)?, row.get(1)?, number(row, 2)?)))?;
    let of = |(gpu, index, total_bytes): (i64, String, Option<u64>)| {
        let peak = "SELECT used_bytes, at_ns FROM samples WHERE gpu = ?1 AND used_bytes IS NOT NULL
                    ORDER BY used_bytes DESC, at_ns LIMIT 1";
        let peak = all(file, peak, [gpu], |row| Ok((number(row, 0)?, row.get::<_, i64>(1)? - begin_ns)))?;
        let peak = peak.first().and_then(|(bytes, at_ns)| Some(((*bytes)?, *at_ns)));
        let lowest = "SELECT min(used_bytes) FROM samples WHERE gpu = ?1";
        // A row is true until the next one; what lies before the first is not known.
        let gap = "SELECT coalesce(sum(until - at_ns), 0) FROM (
                       SELECT used_bytes, at_ns, lead(at_ns, 1, ?3) OVER (ORDER BY at_ns, nth) AS until
                       FROM samples WHERE gpu = ?1
                   ) WHERE used_bytes IS NULL";
        let first = "SELECT coalesce(min(at_ns), ?3) - ?2 FROM samples WHERE gpu = ?1";
        let time = |sql: &str| file.query_row(sql, [gpu, begin_ns, end_ns], |row| row.get::<_, i64>(0));
        Ok(GpuPeak {
            index,
            peak,
            lowest_bytes: file.query_row(lowest, [gpu], |row| number(row, 0))?,
            total_bytes,
            gap_ns: time(gap)? + time(first)?.max(0),
        })
    };
    known.into_iter().map(of).collect()
}

fn phases(file: &Connection) -> rusqlite::Result<Vec<PhasePeak>> {
    let sql = "SELECT job, rank, name, count(DISTINCT id), avg(end_ns - begin_ns), max(peak_bytes)
               FROM phases LEFT JOIN phase_memory ON phase = id
               WHERE kind <> 'layer' GROUP BY job, rank, kind, name ORDER BY job, rank, min(begin_ns)";
    all(file, sql, [], |row| {
        Ok(PhasePeak {
            job: row.get(0)?,
            rank: row.get(1)?,
            name: row.get(2)?,
            count: number(row, 3)?.unwrap_or(0),
            mean_ns: row.get(4)?,
            peak_bytes: number(row, 5)?,
        })
    })
}

/// Bytes in GiB, to ten MiB; `?` if they are not known.
fn gib(bytes: Option<u64>) -> String {
    #[allow(clippy::cast_precision_loss, reason = "shown to a hundredth")]
    bytes.map_or_else(|| "?".to_owned(), |bytes| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)))
}

#[allow(clippy::cast_precision_loss, reason = "shown to a millisecond")]
fn seconds(duration_ns: i64) -> String {
    format!("{:.3} s", duration_ns as f64 / SECOND_NS as f64)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>4} {:>12} {:>12} {:>12} {:>12} {:>12}",
            "GPU", "peak", "reached at", "lowest", "size", "unknown for"
        )?;
        for gpu in &self.gpus {
            let at = gpu.peak.map_or_else(|| "?".to_owned(), |(_, at_ns)| seconds(at_ns));
            let (peak, lowest, total) =
                (gib(gpu.peak.map(|(bytes, _)| bytes)), gib(gpu.lowest_bytes), gib(gpu.total_bytes));
            writeln!(f, "{:>4} {peak:>12} {at:>12} {lowest:>12} {total:>12} {:>12}", gpu.index, seconds(gpu.gap_ns))?;
        }
        if !self.phases.is_empty() {
            writeln!(f, "{:>20} {:>5} {:>16} {:>7} {:>12} {:>12}", "job", "rank", "phase", "count", "mean", "peak")?;
        }
        for phase in &self.phases {
            #[allow(clippy::cast_precision_loss, reason = "a constant")]
            let mean = format!("{:.1} ms", phase.mean_ns / MILLISECOND_NS as f64);
            let (job, rank, name, count) = (&phase.job, phase.rank, &phase.name, phase.count);
            writeln!(f, "{job:>20} {rank:>5} {name:>16} {count:>7} {mean:>12} {:>12}", gib(phase.peak_bytes))?;
        }
        self.findings.iter().try_for_each(|what| writeln!(f, "found: {what}"))
    }
}
