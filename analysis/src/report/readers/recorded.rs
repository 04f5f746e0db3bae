//! A report on a recording in the product's own format, row by row, so that its size does not matter.

use crate::report::breakdown::Breakdown;
use crate::report::curve::Point;
use crate::report::layers::Layers;
use crate::report::model::{FirstSaid, Found, Gpu, Origin, Report, index_of, peaks_of};
use crate::report::room::Room;
use crate::report::spans::{Ended, Spans};
use highwater_core::gpu::{ActivityMeans, BreakdownPoint, Device, MOST_NAMED, Parts};
use highwater_core::jobs::EndedBy;
use highwater_core::source::OpenError;
use highwater_core::wire::Kind;
use highwater_engine::recording::rows::{MOST_GPUS, RecordingReader, json, needed, number, real, text, word};
use highwater_engine::recording::{FileProblem, Times, is_too_long, short};
use rusqlite::Row;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The most findings, ranks and phases with memory that a file may have: 32 MiB of text and 128 MiB of numbers.
const MOST_FINDINGS: usize = 1 << 11;
const MOST_RANKS: usize = 1 << 12;
const MOST_PEAKS: usize = 1 << 23;
/// The most characters that are kept of a name, and of a sentence of a finding.
const LONGEST_NAME: usize = 200;
const LONGEST_SENTENCE: usize = 1_000;

/// Reads a recording in the product's own format.
///
/// # Errors
/// As [`Report::open`].
pub fn open(path: &Path, room: Room) -> Result<Report, OpenError> {
    let mut file = RecordingReader::open(path)?;
    let devices = file.devices()?;
    let (begin_ns, end_ns) = interval(&mut file, &devices)?;
    let count = devices.len();
    let mut gpus = Vec::with_capacity(count);
    for (number, (device, until_ns)) in devices {
        let mut gpu = Gpu::new(device, begin_ns, room.points_of_one(count));
        samples(&mut file, number, &mut gpu, (begin_ns, end_ns))?;
        gpu.usage.end(until_ns, end_ns);
        activity(&mut file, number, &mut gpu.activity, (begin_ns, end_ns))?;
        gpu.breakdown = Breakdown::new((begin_ns, end_ns), gpu.usage.peak.map(|(_, at_ns)| at_ns));
        breakdown(&mut file, number, &mut gpu.breakdown, (begin_ns, end_ns))?;
        gpu.breakdown.finish();
        gpus.push(gpu);
    }
    if gpus.iter().all(|gpu| gpu.usage.peak.is_none()) {
        return Err(file.refuse("recording_unreadable", "it has no memory of any GPU"));
    }
    let spans = spans(&mut file, (begin_ns, end_ns), Spans::new(room.spans, peaks_of(&gpus)).sampled(room.samples))?;
    let gpus_of = gpus_of(&mut file)?;
    let findings = findings(&mut file, &gpus, (begin_ns, end_ns))?;
    let layers = Layers::read(&mut file, room)?;
    let origin = Origin {
        format: "highwater",
        host: file.meta("host"),
        source: file.meta("source"),
        note: file.meta::<String>("note").filter(|note| !note.is_empty()).map(|note| short(&note, LONGEST_SENTENCE)),
        state: file.meta("state"),
        period_ns: file.meta("period_ns"),
        times: Times::Unix,
        missing: Vec::new(),
        assumed: Vec::new(),
    };
    Ok(Report {
        begin_ns,
        end_ns,
        gpus,
        spans,
        gpus_of,
        findings: Some(findings),
        layers,
        skipped: file.skipped,
        ..Report::of_file(path, origin)
    })
}

/// The recording's begin and end. The last readings of a file whose writer was killed lie after the end that it noted, and
/// a damaged file may have noted none.
fn interval(
    file: &mut RecordingReader,
    devices: &BTreeMap<u32, (Device, Option<i64>)>,
) -> Result<(i64, i64), OpenError> {
    let (mut begin_ns, mut end_ns) = (file.meta::<i64>("begin_ns"), file.meta::<i64>("end_ns"));
    let is_noted = begin_ns.is_some();
    for (gpu, (_, until_ns)) in devices {
        // Two subqueries, so that SQLite answers each from the index. Both aggregates in one query would read every row.
        let query =
            "SELECT (SELECT min(at_ns) FROM samples WHERE gpu = ?1), (SELECT max(at_ns) FROM samples WHERE gpu = ?1)";
        let found = file.rows("samples", query, (*gpu).into(), 1, |row| Ok((number(row, 0)?, number(row, 1)?)))?;
        for (first_ns, last_ns) in found {
            if !is_noted {
                begin_ns = begin_ns.into_iter().chain(first_ns).min();
            }
            end_ns = end_ns.into_iter().chain(last_ns).chain(*until_ns).max();
        }
    }
    let (Some(begin_ns), Some(end_ns)) = (begin_ns, end_ns) else {
        return Err(file.refuse("recording_unreadable", "it has no memory of any GPU"));
    };
    // A writer that was killed before its first reading has noted until when memory is known: floored, and so before its begin.
    let end_ns = if is_noted && !is_too_long(end_ns, begin_ns) { end_ns.max(begin_ns) } else { end_ns };
    if end_ns < begin_ns || is_too_long(begin_ns, end_ns) {
        let problem = "its begin and its end are not within 31 days: one of them is wrong";
        return Err(file.refuse("recording_unreadable", problem));
    }
    Ok((begin_ns, end_ns))
}

fn samples(
    file: &mut RecordingReader,
    gpu: u32,
    to: &mut Gpu,
    (begin_ns, end_ns): (i64, i64),
) -> Result<(), OpenError> {
    let query = "SELECT at_ns, used_bytes FROM samples WHERE gpu = ?1 ORDER BY at_ns, nth";
    let read = |row: &Row<'_>| {
        let at_ns: i64 = needed(row, 0)?;
        if at_ns < begin_ns || at_ns > end_ns {
            let problem = format!("{at_ns} lies outside the recording");
            return Err(FileProblem::Column { column: "at_ns".to_owned(), problem });
        }
        Ok(Point { at_ns, used: number(row, 1)? })
    };
    file.each("samples", query, gpu.into(), read, |point| {
        to.usage.push(point);
        Ok(())
    })
}

/// What a GPU did. Files from before a column lack it.
fn activity(
    file: &mut RecordingReader,
    gpu: u32,
    to: &mut ActivityMeans,
    (begin_ns, end_ns): (i64, i64),
) -> Result<(), OpenError> {
    if !file.has_table("usage") {
        return Ok(());
    }
    let columns = ["utilization_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"];
    let columns = file.columns("usage", columns);
    let query = format!(
        "SELECT at_ns, {columns} FROM usage WHERE gpu = ?1 AND at_ns BETWEEN {begin_ns} AND {end_ns} ORDER BY at_ns"
    );
    let read = |row: &Row<'_>| Ok((needed(row, 0)?, [real(row, 1)?, real(row, 2)?, real(row, 3)?, real(row, 4)?]));
    file.each("usage", &query, gpu.into(), read, |(at_ns, shares)| {
        to.push(at_ns, shares);
        Ok(())
    })
}

/// Who held its memory. Files from before that table lack it.
fn breakdown(
    file: &mut RecordingReader,
    gpu: u32,
    to: &mut Breakdown,
    (begin_ns, end_ns): (i64, i64),
) -> Result<(), OpenError> {
    if !file.has_table("breakdown") {
        return Ok(());
    }
    let query = format!(
        "SELECT at_ns, allocated_bytes, cached_bytes, outside_bytes, process_bytes, others_bytes FROM breakdown
         WHERE gpu = ?1 AND at_ns BETWEEN {begin_ns} AND {end_ns} ORDER BY at_ns"
    );
    let read = |row: &Row<'_>| {
        let (allocated, cached) = (number(row, 1)?, number(row, 2)?);
        let (outside, processes, others) = (number(row, 3)?, number(row, 4)?, number(row, 5)?);
        let parts = Parts { allocated, cached, outside, processes, others };
        Ok(BreakdownPoint { at_ns: needed(row, 0)?, parts })
    };
    file.each("breakdown", &query, gpu.into(), read, |point| {
        to.push(point);
        Ok(())
    })
}

/// A time that may lie before the recording's begin or after its end, as those of phases do, but not far.
fn near(at_ns: i64, (begin_ns, end_ns): (i64, i64)) -> Result<i64, FileProblem> {
    let is_far = is_too_long(begin_ns, at_ns) || is_too_long(at_ns, end_ns);
    let problem = || FileProblem::malformed(format!("{at_ns} lies more than 31 days outside the recording"));
    if is_far { Err(problem()) } else { Ok(at_ns) }
}

/// The highest memory inside each phase, bytes, by the phases' numbers.
fn peaks(file: &mut RecordingReader) -> Result<Vec<(i64, u64)>, OpenError> {
    let query = "SELECT phase, max(peak_bytes) FROM phase_memory WHERE typeof(peak_bytes) = 'integer' GROUP BY phase \
                 ORDER BY phase";
    file.rows("phase_memory", query, 0, MOST_PEAKS, |row| Ok((needed(row, 0)?, needed(row, 1)?)))
}

fn spans(file: &mut RecordingReader, interval: (i64, i64), mut spans: Spans) -> Result<Spans, OpenError> {
    let peaks = peaks(file)?;
    // Files from before this column lack it.
    let ended_by = if file.has_column("phases", "ended_by") { "ended_by" } else { "'end'" };
    let query = format!("SELECT job, rank, kind, name, step, begin_ns, end_ns, id, {ended_by} FROM phases ORDER BY id");
    let read = |row: &Row<'_>| {
        let (begin_ns, end_ns) = (near(needed(row, 5)?, interval)?, near(needed(row, 6)?, interval)?);
        if end_ns < begin_ns {
            return Err(FileProblem::malformed("end_ns: it lies before begin_ns"));
        }
        Ok(Ended {
            job: short(&text(row, 0)?.ok_or(FileProblem::Missing("job".into()))?, LONGEST_NAME),
            rank: needed(row, 1)?,
            kind: word::<Kind>(row, 2)?,
            name: short(&text(row, 3)?.ok_or(FileProblem::Missing("name".into()))?, LONGEST_NAME),
            step: number(row, 4)?,
            begin_ns,
            end_ns,
            by: word::<EndedBy>(row, 8)?,
            peak_bytes: peaks.binary_search_by_key(&needed(row, 7)?, |peak| peak.0).ok().map(|at| peaks[at].1),
        })
    };
    file.each("phases", &query, 0, read, |ended| {
        spans.push(ended);
        Ok(())
    })?;
    spans.finish();
    Ok(spans)
}

/// The GPUs of each rank.
fn gpus_of(file: &mut RecordingReader) -> Result<BTreeMap<(String, u32), BTreeSet<String>>, OpenError> {
    let rows = file.rows("ranks", "SELECT job, rank, gpus FROM ranks", 0, MOST_RANKS, |row| {
        let gpus: Option<Vec<String>> = json(row, 2)?;
        let gpus = gpus.map(|gpus| gpus.into_iter().take(MOST_GPUS).map(|uuid| short(&uuid, LONGEST_NAME)).collect());
        let job = short(&text(row, 0)?.ok_or(FileProblem::Missing("job".into()))?, LONGEST_NAME);
        Ok(((job, needed(row, 1)?), gpus))
    })?;
    Ok(rows.into_iter().filter_map(|(rank, gpus)| Some((rank, gpus?))).collect())
}

/// What a report shows of a finding's evidence.
#[derive(Debug, Deserialize)]
struct Evidence {
    #[serde(default)]
    workloads: Vec<String>,
}

impl Evidence {
    fn workloads(self) -> Vec<String> {
        self.workloads.into_iter().take(MOST_NAMED).map(|name| short(&name, LONGEST_NAME)).collect()
    }
}

fn findings(file: &mut RecordingReader, gpus: &[Gpu], interval: (i64, i64)) -> Result<Vec<Found>, OpenError> {
    // Files from before these columns lack them.
    let column = |name| if file.has_column("findings", name) { name } else { "NULL" };
    let (cause, incident) = (column("lag_cause"), column("incident"));
    let query = format!(
        "SELECT kind, severity, certainty, gpu_uuid, job, rank, begin_ns, end_ns, what, why, advice, seen_ns,
         first_seen_ns, first_what, first_why, {cause}, {incident}, evidence FROM findings ORDER BY begin_ns, id"
    );
    file.rows("findings", &query, 0, MOST_FINDINGS, |row| {
        let seen_ns = |at| number(row, at)?.map(|at_ns| near(at_ns, interval)).transpose();
        let sentence = |at| text(row, at).map(|text| short(&text.unwrap_or_default(), LONGEST_SENTENCE));
        Ok(Found {
            kind: sentence(0)?,
            severity: sentence(1)?,
            certainty: sentence(2)?,
            lag_cause: text(row, 15)?.map(|cause| short(&cause, LONGEST_NAME)),
            gpu: text(row, 3)?.map(|uuid| short(&index_of(gpus, uuid), LONGEST_NAME)),
            job: text(row, 4)?.map(|job| short(&job, LONGEST_NAME)),
            rank: number(row, 5)?,
            incident: number(row, 16)?,
            workloads: json::<Evidence>(row, 17)?.map(Evidence::workloads).unwrap_or_default(),
            begin_ns: near(needed(row, 6)?, interval)?,
            end_ns: number(row, 7)?.map(|end_ns| near(end_ns, interval)).transpose()?,
            what: sentence(8)?,
            why: sentence(9)?,
            advice: sentence(10)?,
            seen_ns: seen_ns(11)?,
            first: match seen_ns(12)? {
                Some(seen_ns) => Some(FirstSaid { seen_ns, what: sentence(13)?, why: sentence(14)? }),
                None => None,
            },
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_engine::recording::schema;

    /// Two GPUs from 1,000 to 2,000 ns, with phases and what was found.
    const ROWS: &str = "
        INSERT INTO meta VALUES ('state', 'writing'), ('begin_ns', 1000), ('end_ns', 1500), ('host', 'h'), ('note', '');
        INSERT INTO gpus (gpu, gpu_index, uuid, memory_total_bytes, known_until_ns)
            VALUES (0, '3', 'a', 100, 1990), (1, '4', 'b', NULL, 2000);
        INSERT INTO samples VALUES (0, 1000, 0, 30), (0, 1600, 0, 90), (0, 1700, 0, NULL), (0, 1800, 0, 20),
            (1, 1100, 0, 5), (1, 900, 0, 99);
        INSERT INTO phases VALUES (1, 'j', 0, 'step', 'step', 7, 1100, 1300, 'end'),
            (2, 'j', 0, 'phase', 'forward', 7, 1110, 1210, 'end'), (3, 'j', 1, 'phase', 'forward', 7, 1500, 1700, 'end'),
            (4, 'j', 1, 'phase', 'forward', 7, 1700, 1600, 'end'), (5, 'j', 1, 'phase', 'forward', 7, 1, 9000000000000000000, 'end'),
            (6, 'j', 1, 'phase', 'backward', 7, 1700, 1900, 'exit');
        INSERT INTO phase_memory (phase, gpu, peak_bytes, gap_ns) VALUES (1, 0, 30, 0), (1, 1, 95, 0), (2, 0, 'x', 0);
        INSERT INTO ranks (job, rank, gpus) VALUES ('j', 0, '[\"b\"]'), ('j', 1, '[\"a\"]');
        INSERT INTO findings VALUES (1, 'k', 'warning', 'c', 'a', 'j', 0, 1200, NULL, 'what', 'why', 'advice',
            '{\"free_bytes\": 1.0, \"workloads\": [\"pod research/llama-0/main\"]}', 1900, 1210,
            'first what', 'first why', 'host', 4)";

    fn with(more: &str) -> Result<Report, OpenError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it.sqlite");
        let connection = schema::create(&path, 1 << 20, 0o600).expect("created");
        connection.execute_batch(ROWS).expect("its tables");
        connection.execute_batch(more).expect("good SQL");
        connection.execute_batch("COMMIT").expect("written");
        schema::close(connection).expect("closed");
        open(&path, Room::of(1))
    }

    #[test]
    fn a_killed_recording_is_read_to_its_last_reading() {
        let report = with("").expect("a recording");
        assert_eq!((report.begin_ns, report.end_ns), (1_000, 2_000), "beyond the end that was noted");
        let shown: Vec<_> = report.gpus.iter().map(|gpu| (gpu.usage.peak, gpu.usage.gap_ns)).collect();
        assert_eq!(shown, [(Some((90, 1_600)), 100 + 10), (Some((5, 1_100)), 100)]);
        let messages: Vec<&str> = report.skipped.first.iter().map(|skipped| skipped.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "table samples: at_ns: 900 lies outside the recording",
                "table phases: end_ns: it lies before begin_ns",
                "table phases: 9000000000000000000 lies more than 31 days outside the recording",
            ]
        );
        let rows: Vec<_> = report.spans.rows().iter().map(|row| (row.rank, row.count, row.highest)).collect();
        assert_eq!(rows.iter().map(|row| (row.0, row.1)).collect::<Vec<_>>(), [(0, 1), (0, 1), (1, 1), (1, 0)]);
        let cut: Vec<_> = report.spans.spans().iter().map(|span| span.by).collect();
        assert_eq!(cut, [EndedBy::End, EndedBy::End, EndedBy::End, EndedBy::Exit]);
        assert_eq!(rows[0].2.and_then(|highest| highest.peak_bytes), Some(95));
        assert_eq!(rows[1].2, None, "a cell that is no number");
        // The peak is GPU 3's, on which rank 1 was.
        let (gpu, _, at_ns) = report.peak().expect("a peak");
        let running: Vec<_> = report.at(at_ns, gpu).map(|span| report.spans.rank(span.rank)).collect();
        assert_eq!((gpu.device.index.as_str(), running), ("3", vec![("j", 1)]));
        let found = &report.found()[0];
        assert_eq!((found.gpu.as_deref(), found.begin_ns, found.end_ns), (Some("3"), 1_200, None));
        assert_eq!((found.lag_cause.as_deref(), found.incident), (Some("host"), Some(4)));
        assert_eq!(found.workloads, ["pod research/llama-0/main"]);
    }

    #[test]
    fn a_file_of_before_what_a_rank_ended_was_kept_is_read() {
        let report = with("ALTER TABLE phases DROP COLUMN ended_by").expect("a recording");
        assert_eq!(report.spans.spans().iter().filter(|span| span.by != EndedBy::End).count(), 0);
        assert_eq!(report.spans.spans().len(), 4);
    }

    #[test]
    fn times_that_were_not_noted_are_those_of_the_readings() {
        let report = with("DELETE FROM meta WHERE key LIKE '%_ns'").expect("a recording");
        assert_eq!((report.begin_ns, report.end_ns), (900, 2_000));
        let refused = |more: &str| with(more).expect_err(more).message;
        let early = "DELETE FROM samples; DELETE FROM meta WHERE key = 'end_ns'; UPDATE gpus SET known_until_ns = 995";
        assert!(refused(early).ends_with("it has no memory of any GPU"), "{}", refused(early));
        let far = "DELETE FROM meta WHERE key LIKE '%_ns';
                   INSERT INTO samples VALUES (0, -9000000000000000000, 0, 1), (0, 9000000000000000000, 0, 1)";
        assert!(refused(far).ends_with("are not within 31 days: one of them is wrong"));
        assert!(refused("DELETE FROM samples").ends_with("it has no memory of any GPU"));
    }

    #[test]
    fn no_view_is_queried() {
        let endless =
            "WITH RECURSIVE n AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT 1 AS phase, 1 AS peak_bytes FROM n";
        for table in ["phase_memory", "phases", "findings", "samples", "ranks", "gpus"] {
            let error =
                with(&format!("DELETE FROM phase_memory; DROP TABLE {table}; CREATE VIEW {table} AS {endless}"))
                    .expect_err(table);
            assert!(error.message.ends_with(&format!("it has no table {table}")), "{error:?}");
        }
    }

    #[test]
    fn long_texts_are_cut() {
        let report =
            with("UPDATE findings SET what = printf('%.5000c', 'ü'); UPDATE phases SET name = printf('%.900c', 'n')");
        let report = report.expect("a recording");
        assert_eq!(report.found()[0].what.chars().count(), LONGEST_SENTENCE + 1);
        assert!(report.spans.rows().iter().all(|row| row.name.chars().count() == LONGEST_NAME + 1));
    }
}
