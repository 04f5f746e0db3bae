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

impl GpuPeak {
    /// Adds a value that held for a while, from `at_ns` after the begin; `None` if it is not known.
    fn add(&mut self, used: Option<u64>, for_ns: i64, at_ns: i64) {
        let Some(used) = used else {
            self.gap_ns += for_ns.max(0);
            return;
        };
        if self.peak.is_none_or(|(peak, _)| used > peak) {
            self.peak = Some((used, at_ns));
        }
        self.lowest_bytes = Some(self.lowest_bytes.map_or(used, |lowest| lowest.min(used)));
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
        let mut peak = GpuPeak { index, peak: None, lowest_bytes: None, total_bytes, gap_ns: 0 };
        // A row is true until the next one; what lies before the first is not known.
        let (mut since_ns, mut used) = (begin_ns, None);
        let mut statement = file.prepare("SELECT at_ns, used_bytes FROM samples WHERE gpu = ?1 ORDER BY at_ns, nth")?;
        let mut rows = statement.query([gpu])?;
        while let Some(row) = rows.next()? {
            let at_ns: i64 = row.get(0)?;
            peak.add(used, at_ns - since_ns, since_ns - begin_ns);
            (since_ns, used) = (at_ns, number(row, 1)?);
        }
        peak.add(used, end_ns - since_ns, since_ns - begin_ns);
        Ok(peak)
    };
    known.into_iter().map(of).collect()
}

fn phases(file: &Connection) -> rusqlite::Result<Vec<PhasePeak>> {
    let sql = "SELECT job, rank, name, count(*), avg(end_ns - begin_ns), max(
                   (SELECT max(peak_bytes) FROM phase_memory WHERE phase = id)
               ) FROM phases WHERE kind <> 'layer' GROUP BY job, rank, kind, name ORDER BY job, rank, min(begin_ns)";
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

#[cfg(test)]
mod tests {
    use super::super::schema;
    use super::*;

    /// Two GPUs from 1,000 to 2,000 ns: one with a gap and two equal peaks, one that was never read.
    const ROWS: &str = "
        INSERT INTO meta VALUES ('begin_ns', 1000), ('end_ns', 2000);
        INSERT INTO gpus (gpu, gpu_index, uuid, memory_total_bytes) VALUES (0, '0', 'a', 100), (1, '1', 'b', NULL);
        INSERT INTO samples VALUES (0, 1050, 0, 30), (0, 1100, 0, 70), (0, 1100, 1, 90), (0, 1200, 0, NULL),
            (0, 1300, 0, 20), (0, 1400, 0, 90), (0, 1900, 0, NULL);
        INSERT INTO phases VALUES (1, 'j', 0, 'step', 'step', 1, 1100, 1300), (2, 'j', 0, 'phase', 'forward', 1, 1110, 1210),
            (3, 'j', 0, 'step', 'step', 2, 1300, 1700), (4, 'j', 0, 'layer', 'l', 1, 1110, 1210),
            (5, 'j', 1, 'step', 'step', 1, 1100, 1200);
        INSERT INTO phase_memory (phase, gpu, peak_bytes, gap_ns) VALUES (1, 0, 90, 0), (1, 1, 95, 0), (2, 0, 80, 0),
            (3, 0, NULL, 0), (4, 0, 99, 0);
        INSERT INTO findings VALUES (2, 'k', 's', 'c', NULL, NULL, NULL, 1500, NULL, 'later', '', '', '{}'),
            (1, 'k', 's', 'c', NULL, NULL, NULL, 1400, NULL, 'first', '', '', '{}');
        COMMIT";

    #[test]
    fn peaks_times_gaps_and_means_are_those_of_the_rows() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file.sqlite");
        let connection = schema::create(&path, 1 << 20, 0o600).expect("created");
        connection.execute_batch(ROWS).expect("its tables");
        schema::close(connection).expect("closed");
        let phase = |rank, name: &str, count, mean_ns, peak_bytes| PhasePeak {
            job: "j".to_owned(),
            rank,
            name: name.to_owned(),
            count,
            mean_ns,
            peak_bytes,
        };
        let gpu = |index: &str, peak, lowest_bytes, total_bytes, gap_ns| GpuPeak {
            index: index.to_owned(),
            peak,
            lowest_bytes,
            total_bytes,
            gap_ns,
        };
        let expected = Summary {
            duration_ns: 1000,
            gpus: vec![
                gpu("0", Some((90, 100)), Some(20), Some(100), 50 + 100 + 100),
                gpu("1", None, None, None, 1000),
            ],
            phases: vec![
                phase(0, "step", 2, 300.0, Some(95)),
                phase(0, "forward", 1, 100.0, Some(80)),
                phase(1, "step", 1, 100.0, None),
            ],
            findings: vec!["first".to_owned(), "later".to_owned()],
        };
        assert_eq!(Summary::of(&path).expect("a recording"), expected);
    }
}
