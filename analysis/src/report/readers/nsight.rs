//! Reads exports of Nsight Systems: what ran on the GPUs, and their memory, as far as the file has each.

use super::played;
use super::work::{Drawn, gpus_of};
use crate::formats::FileFormat;
use crate::import::nsight::{self, HostRange, ProfiledWork};
use crate::import::polled::Hints;
use crate::report::model::{Origin, Report};
use crate::report::room::Room;
use crate::report::spans::{Ended, Spans};
use crate::report::trace::Traced;
use crate::timeline::Analysis;
use highwater_core::jobs::EndedBy;
use highwater_core::source::OpenError;
use highwater_core::wire::Kind;
use highwater_engine::offline::Settings;
use highwater_engine::recording::rows::RecordingReader;
use highwater_engine::recording::{SkippedLines, Times, is_too_long, refuse};
use std::path::Path;

/// What an export lacks, for people.
const FORMAT: &str = "Nsight Systems export";
const WITHOUT_MEMORY: &str = "the memory of GPUs (record with --cuda-memory-usage=true)";
const WITHOUT_WORK: &str = "what ran on the GPUs (record with --trace=cuda)";
/// What a file with memory alone says that it lacks.
const WITHOUT_STEPS: &str = "steps and phases";

/// Reads an export.
pub(super) fn open(path: &Path, room: Room, settings: &Settings, hints: &Hints) -> Result<Report, OpenError> {
    let mut file = RecordingReader::open_any(path)?;
    let memory = match nsight::has_memory(&mut file)? {
        true => Some(played::open(FileFormat::NsightSystems, path, room, settings, hints)?),
        false => None,
    };
    let profile = nsight::profile(file)?;
    let skipped = profile.skipped.clone();
    let mut report = match (worked(path, room, profile)?, memory) {
        (Some(work), Some(memory)) => with_memory(work, memory),
        (Some(alone), None) | (None, Some(alone)) => alone,
        (None, None) => of_host(path, room, &skipped)?,
    };
    report.skipped.extend(skipped);
    Ok(report)
}

/// A report on what ran on the GPUs, with the memory of another.
fn with_memory(work: Report, memory: Report) -> Report {
    let (begin_ns, end_ns) = (work.begin_ns.min(memory.begin_ns), work.end_ns.max(memory.end_ns));
    let lacks = memory.origin.missing.iter().copied().filter(|what| !what.starts_with(WITHOUT_STEPS));
    let also = work.origin.missing.iter().copied().filter(|what| *what != WITHOUT_MEMORY);
    let origin = Origin { missing: lacks.chain(also).collect(), ..work.origin };
    let gpus_of = gpus_of(&memory.gpus, 0);
    Report { begin_ns, end_ns, origin, gpus: memory.gpus, gpus_of, skipped: memory.skipped, ..work }
}

/// A report on what ran on the GPUs; `None` if nothing ran.
fn worked(path: &Path, room: Room, profile: ProfiledWork) -> Result<Option<Report>, OpenError> {
    let (mut drawn, mut analysis) = (Drawn::new(room), None::<Analysis>);
    for (nth, trace) in profile.traces.iter().enumerate() {
        // Each process has its part of the room.
        let of = drawn.draw(trace, room.spans * (nth + 1) / profile.traces.len());
        let of = of.map_err(|error| refuse("recording_unreadable", path, error))?;
        analysis = Some(match analysis.take() {
            None => of,
            Some(before) => before.with(of),
        });
    }
    let Some(analysis) = analysis else { return Ok(None) };
    let (spans, begin_ns, end_ns) = drawn.finish();
    let has_clock = profile.traces.iter().any(|trace| trace.clock_ns().is_some());
    let origin = Origin {
        missing: [WITHOUT_MEMORY].into_iter().chain(profile.missing).collect(),
        assumed: profile.assumed,
        ..Origin::new(FORMAT, times(has_clock))
    };
    let trace = Some(Traced { analysis, trace: None });
    Ok(Some(Report { begin_ns, end_ns, spans, trace, ..Report::of_file(path, origin) }))
}

/// A report on the host's ranges, of an export in which nothing ran on a GPU.
fn of_host(path: &Path, room: Room, unread: &SkippedLines) -> Result<Report, OpenError> {
    let (mut spans, mut lasted) = (Spans::new(room.spans, Vec::new()).sampled(room.samples), None::<(i64, i64)>);
    let host = nsight::host(RecordingReader::open_any(path)?, |range| {
        let (begin_ns, end_ns) = lasted.unwrap_or((range.begin_ns, range.end_ns));
        lasted = Some((begin_ns.min(range.begin_ns), end_ns.max(range.end_ns)));
        spans.push(ended(range));
    })?;
    let Some((begin_ns, end_ns)) = lasted else {
        let unread = unread.first.first().map_or_else(String::new, |first| format!(" ({first})"));
        let why = "nothing ran on a GPU, and it has no NVTX ranges, or none of it can be read";
        return Err(refuse("recording_unreadable", path, format!("{why}{unread}: record it with --trace=cuda,nvtx")));
    };
    if is_too_long(begin_ns, end_ns) {
        return Err(refuse("recording_too_large", path, "its NVTX ranges are too far apart"));
    }
    spans.finish();
    let missing = [WITHOUT_WORK, WITHOUT_MEMORY].into_iter().chain(host.missing).collect();
    let origin = Origin { missing, assumed: host.assumed, ..Origin::new(FORMAT, times(host.epoch_ns.is_some())) };
    Ok(Report { begin_ns, end_ns, spans, skipped: host.skipped, ..Report::of_file(path, origin) })
}

fn times(has_clock: bool) -> Times {
    if has_clock { Times::Unix } else { Times::Relative }
}

/// A range of the host as a step or a phase. The thread takes the place of the job.
fn ended(range: HostRange) -> Ended {
    Ended {
        job: format!("thread {}", range.thread),
        rank: 0,
        kind: if range.name.is_none() { Kind::Step } else { Kind::Phase },
        name: range.name.unwrap_or_else(|| "step".to_owned()),
        step: range.step,
        begin_ns: range.begin_ns,
        end_ns: range.end_ns,
        by: EndedBy::End,
        peak_bytes: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Comparison, summary};
    use highwater_core::clock::SECOND_NS;

    const EPOCH_NS: i64 = 1_774_586_313 * SECOND_NS;

    /// A report on an export of two steps of 1 ms, in each of which a kernel runs for this time, with more tables.
    fn report(folder: &Path, name: &str, kernel_ns: i64, more: &str) -> Result<Report, OpenError> {
        let path = folder.join(name);
        let file = rusqlite::Connection::open(&path).expect("created");
        file.execute_batch(&format!(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
             INSERT INTO StringIds VALUES (1, 'void gemm(int)');
             CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
             INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES ({EPOCH_NS});
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER,
                correlationId INTEGER, demangledName INTEGER);
             INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (100, 100 + {kernel_ns}, 0, 16777216, 1, 1),
                (1000100, 1000100 + {kernel_ns}, 0, 16777216, 2, 1);
             CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);
             INSERT INTO NVTX_EVENTS VALUES (0, 1000000, 59, 'step 0', 16777216), (1000000, 2000000, 59, 'step 1', 16777216); {more}"
        ))
        .expect("good SQL");
        drop(file);
        Report::open(&path, Room::of(2), &Settings::default())
    }

    const MEMORY: &str = "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (start INTEGER, globalPid INTEGER, deviceId INTEGER, address INTEGER,
        bytes INTEGER, memKind INTEGER, memoryOperationType INTEGER);
        INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES (50, 16777216, 0, 9, 1048576, 2, 0), (2500000, 16777216, 0, 9, 1048576, 2, 1)";

    #[test]
    fn memory_and_work_of_one_export_are_one_report() {
        let folder = tempfile::tempdir().expect("a folder");
        let report = report(folder.path(), "a.sqlite", 500_000, MEMORY).expect("an export");
        assert_eq!((report.begin_ns - EPOCH_NS, report.end_ns - EPOCH_NS), (0, 2_500_000));
        let traced = report.trace.as_ref().expect("work");
        assert_eq!(traced.analysis.steps.iter().map(|step| step.busy_ns).collect::<Vec<_>>(), [500_000, 500_000]);
        assert_eq!(report.gpus[0].usage.peak, Some((1 << 20, EPOCH_NS + 50)));
        let text = summary(&report).to_string();
        let headline = "GPU 0 was busy for 50.0 % of 2.00 ms in 2 steps. Peak: 1.00 MiB on GPU 0 after";
        assert!(text.contains(headline) && text.contains("guessed: steps are the NVTX ranges `step *`"), "{text}");
        assert!(!text.contains("NVTX ranges are not read") && !text.contains("the memory of GPUs (record"), "{text}");
    }

    #[test]
    fn two_exports_are_compared_kernel_by_kernel() {
        let folder = tempfile::tempdir().expect("a folder");
        let pinned = MEMORY.replace(" 2, 0)", " 1, 0)").replace(" 2, 1)", " 1, 1)");
        let reports = [("before.sqlite", 100_000, pinned.as_str()), ("after.sqlite", 300_000, "")]
            .map(|(name, kernel_ns, more)| report(folder.path(), name, kernel_ns, more).expect("an export"));
        assert!(reports.iter().all(|report| report.gpus.is_empty()), "pinned memory is the host's");
        assert!(reports[0].origin.missing.contains(&WITHOUT_MEMORY));
        let comparison = Comparison::of(&reports).expect("two");
        let sentence = "In a step of after.sqlite, gemm takes 0.200 ms more than in before.sqlite.";
        assert!(comparison.verdict.iter().any(|one| one == sentence), "{:?}", comparison.verdict);
        assert!(crate::report::ranks(&reports).is_none(), "the files do not say which ranks they are of");
    }

    #[test]
    fn ranges_of_the_host_are_phases_if_nothing_ran_on_a_gpu() {
        let folder = tempfile::tempdir().expect("a folder");
        let more = "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL;
            INSERT INTO NVTX_EVENTS VALUES (100, 600, 59, 'layer1', 16777216), (1000200, 1000400, 59, 'layer2', 16777216),
                (50, 90, 59, 'elsewhere', 16777217)";
        let report = report(folder.path(), "a.sqlite", 1, more).expect("ranges");
        assert!(report.trace.is_none() && report.gpus.is_empty());
        assert_eq!((report.begin_ns - EPOCH_NS, report.end_ns - EPOCH_NS), (0, 2_000_000));
        let mut rows: Vec<_> = report
            .spans
            .rows()
            .iter()
            .map(|row| (report.spans.rank(row.rank).0.to_owned(), row.name.as_str(), row.count, row.total_ns))
            .collect();
        rows.sort();
        let of = |name, count, ns| ("thread 1".to_owned(), name, count, ns);
        let elsewhere = ("thread 2".to_owned(), "elsewhere", 1, 40);
        assert_eq!(rows, [of("layer1", 1, 500), of("layer2", 1, 200), of("step", 2, 2_000_000), elsewhere]);
        let step = |name: &str| {
            let row = report.spans.rows().iter().find(|row| row.name == name)?;
            row.longest.and_then(|span| span.step)
        };
        assert_eq!((step("layer1"), step("layer2"), step("elsewhere")), (Some(0), Some(1), Some(0)));
        assert_eq!(report.origin.missing, [WITHOUT_WORK, WITHOUT_MEMORY]);
    }

    #[test]
    fn an_export_of_which_nothing_can_be_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = report(
            folder.path(),
            "a.sqlite",
            1,
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = NULL; DELETE FROM NVTX_EVENTS",
        );
        assert!(refused.expect_err("no work").message.contains("nothing ran on a GPU"));
    }
}
