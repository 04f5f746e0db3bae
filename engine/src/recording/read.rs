//! A recording in a SQLite file, in the format of `docs/recordings.md`, or a part of one. A file with more rows in that part than the
//! bounds below is refused.

use super::lines::refuse;
use super::meters::Meters;
use super::part::{ALWAYS, Part, Span, within};
use super::problem::FileProblem;
use super::rows::{RecordingReader, json, needed, number, real, text, word};
use super::tape::{AnnotationSource, Format, Tape, Times, is_too_long};
use super::track::Track;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{Activity, Changed, GpuChange, Health, MOST_TROUBLE, UsagePoint, Xid};
use highwater_core::source::{OpenError, provenance};
use highwater_core::wire::{Annotation, EventType, Gpu, GpuList, Kind, Memory, Scalar};
use rusqlite::Row;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// The most rows of `samples` that are kept of each GPU.
const MOST_SAMPLES: usize = 1 << 24;
/// The most rows of `usage` that are kept of all GPUs together, and the most turns.
const MOST_USAGE: usize = if cfg!(test) { 1 << 12 } else { 1 << 22 };
const MOST_EVENTS: usize = 1 << 20;
/// The most bytes of their names, jobs and attributes. A capture has 8 MiB of events at most.
const MOST_EVENT_BYTES: usize = 256 << 20;
const MOST_RANKS: usize = 1 << 16;
const MOST_CHANGES: usize = 1 << 16;

/// The product's own format.
const OWN: Format = Format { name: "highwater", times: Times::Unix, missing: &[] };

/// The simulation that a recording in the product's own format was made from; `None` if it was made from real GPUs.
pub(super) fn simulation_of(path: &Path) -> Option<String> {
    // The caller has read this file, and reported its errors.
    let file = RecordingReader::open(path).ok()?;
    provenance::simulation(&file.meta::<String>("source")?).map(str::to_owned)
}

/// Reads a part of a recording.
///
/// # Errors
/// If it is not such a file, has another format, is still being written, has no memory in that part, or the part exceeds the bounds.
pub(super) fn tape(path: &Path, part: Part) -> Result<Tape, OpenError> {
    let mut file = RecordingReader::open(path)?;
    let times = file.times(part)?;
    let read = read(&mut file, times);
    read.map_err(|error| OpenError { message: format!("{}{}", error.message, file.hint(error.reason)), ..error })
}

fn read(file: &mut RecordingReader, times: Span) -> Result<Tape, OpenError> {
    let devices = file.devices()?;
    let mut tracks = Vec::new();
    for (gpu, (_, until_ns)) in &devices {
        tracks.push(track(file, *gpu, until_ns.map(|until_ns| until_ns.min(times.1)), times)?);
    }
    let mut said = file.annotations(times)?;
    let meters = file.meters(times)?;
    let turns = file.turns(times)?;
    let changes = file.changes(&devices.keys().copied().collect::<Vec<_>>(), &turns, times)?;
    let spans = tracks.iter().filter_map(Track::span).chain(said.span());
    let (begin_ns, end_ns) =
        spans.fold((i64::MAX, i64::MIN), |(first, last), (begin_ns, end_ns)| (first.min(begin_ns), last.max(end_ns)));
    if tracks.iter().all(|track| track.span().is_none()) {
        let part = if times == ALWAYS { "" } else { " in that part" };
        return Err(file.refuse("recording_unreadable", format!("it has no memory of any GPU{part}")));
    }
    // A value that lasts to the end of the recording is known until then.
    let end_ns = end_ns.max(file.meta("end_ns").unwrap_or(end_ns).min(times.1));
    let known: BTreeSet<_> =
        said.events.iter().filter_map(|said| Some((said.job.clone()?, said.scope.clone(), said.rank?))).collect();
    let is_known = |said: &Annotation| {
        let of = || Some((said.job.clone()?, said.scope.clone(), said.rank?));
        of().is_some_and(|of| known.contains(&of))
    };
    said.profiles = file.profiles_said(begin_ns, is_known)?.into();
    if is_too_long(begin_ns, end_ns) {
        return Err(file.refuse(
            "recording_unreadable",
            "its times lie more than 31 days apart: one of them is wrong, or it is longer than what is read",
        ));
    }
    let devices = devices.into_values().map(|(device, _)| device).collect();
    let skipped = std::mem::take(&mut file.skipped);
    Ok(Tape {
        devices,
        tracks,
        said: Box::new(said),
        meters,
        turns,
        changes,
        begin_ns,
        end_ns,
        skipped,
        format: OWN,
        assumed: Vec::new(),
        allocations: Vec::new(),
        allocators: Vec::new(),
    })
}

/// One GPU's changes, and what it used at the begin of these times. A gap begins just after the last good reading, whose time is in
/// the gap's row.
pub(super) fn track(
    file: &mut RecordingReader,
    gpu: u32,
    until_ns: Option<i64>,
    times: Span,
) -> Result<Track, OpenError> {
    let (from_ns, to_ns) = times;
    let query = if times == ALWAYS {
        "SELECT at_ns, used_bytes FROM samples WHERE gpu = ?1 ORDER BY at_ns, nth".to_owned()
    } else {
        format!(
            "SELECT max(at_ns, {from_ns}), used_bytes FROM samples WHERE gpu = ?1 AND at_ns < {to_ns} AND at_ns >= coalesce(
             (SELECT max(at_ns) FROM samples WHERE gpu = ?1 AND at_ns <= {from_ns}), {from_ns}) ORDER BY at_ns, nth"
        )
    };
    let read = |row: &Row<'_>| Ok((needed::<i64>(row, 0)?, number::<u64>(row, 1)?));
    let rows = file.rows("samples", &query, gpu.into(), MOST_SAMPLES, read)?;
    let mut points: Vec<(i64, Option<u64>)> = Vec::with_capacity(rows.len());
    for (at_ns, used) in rows {
        let before = points.last().and_then(|(_, used)| *used);
        match (used, before) {
            // Adds a reading at that time, which is the last one before the gap.
            (None, Some(before)) => points.extend([(at_ns, Some(before)), (at_ns.saturating_add(1), None)]),
            (used, _) => points.push((at_ns, used)),
        }
    }
    if let (Some((last_ns, Some(used))), Some(until_ns)) = (points.last().copied(), until_ns)
        && until_ns > last_ns
    {
        points.extend([(until_ns, Some(used)), (until_ns.saturating_add(1), None)]);
    }
    Ok(Track::new(gpu, points))
}

impl RecordingReader {
    /// The times of a part.
    fn times(&self, part: Part) -> Result<Span, OpenError> {
        if part == Part::WHOLE {
            return Ok(ALWAYS);
        }
        let begin_ns: i64 = self.meta("begin_ns").ok_or_else(|| {
            self.refuse("recording_unreadable", "meta has no begin_ns, from which a part of it would be counted")
        })?;
        let at = |since_ns: Option<i64>, otherwise: i64| {
            since_ns.map_or(otherwise, |since_ns| begin_ns.saturating_add(since_ns))
        };
        let (from_ns, to_ns) = (at(part.from_ns, ALWAYS.0), at(part.until_ns, ALWAYS.1));
        let end_ns: Option<i64> = self.meta("end_ns");
        if let Some(end_ns) = end_ns.filter(|end_ns| *end_ns <= from_ns) {
            let length_s = end_ns.saturating_sub(begin_ns) / SECOND_NS;
            let problem = format!("the part begins after the recording's end, which is {length_s} s after its begin");
            return Err(self.refuse("recording_unreadable", problem));
        }
        Ok((from_ns, to_ns))
    }

    /// What can be done if the file was refused for this reason.
    fn hint(&self, reason: &str) -> String {
        let ends: Option<(i64, i64)> = self.meta("begin_ns").zip(self.meta("end_ns"));
        let minutes = ends.map(|(begin_ns, end_ns)| end_ns.saturating_sub(begin_ns) / (60 * SECOND_NS));
        let long = minutes.map_or_else(String::new, |minutes| format!(" of its {minutes} minutes"));
        if reason == "recording_too_large" {
            format!("; a part{long} can be played, with the settings replay.from and replay.until")
        } else {
            String::new()
        }
    }

    fn meters(&mut self, times: Span) -> Result<Meters, OpenError> {
        // Files from before a column lack it.
        let later =
            ["throttle_reasons", "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio"];
        let later = self.columns("usage", later);
        let query = format!(
            "SELECT gpu, at_ns, utilization_ratio, power_watts, {later} FROM usage WHERE {} ORDER BY gpu, at_ns",
            within(times)
        );
        let rows = self.rows("usage", &query, 0, MOST_USAGE, |row| {
            let reading = UsagePoint {
                at_ns: needed(row, 1)?,
                utilization_ratio: real(row, 2)?,
                power_watts: real(row, 3)?,
                throttle_reasons: number(row, 4)?,
                activity: Activity {
                    sm_active_ratio: real(row, 5)?,
                    sm_occupancy_ratio: real(row, 6)?,
                    tensor_active_ratio: real(row, 7)?,
                    dram_active_ratio: real(row, 8)?,
                },
            };
            Ok((needed::<u32>(row, 0)?, reading))
        })?;
        let mut by_gpu = BTreeMap::<u32, Vec<UsagePoint>>::new();
        for (gpu, reading) in rows {
            by_gpu.entry(gpu).or_default().push(reading);
        }
        Ok(Meters::new(by_gpu))
    }

    /// The changes of GPUs. `gpus` has the file's numbers of the GPUs, by position. Changes are recorded at turns of
    /// the detectors, so a GPU that is up again came back at some time since the turn before. It is played as up from
    /// just after that turn, so that its memory in between is played too. No detector runs between two turns, so none
    /// is affected.
    fn changes(&mut self, gpus: &[u32], turns: &[i64], times: Span) -> Result<Vec<GpuChange>, OpenError> {
        // What a GPU was like before holds at the begin.
        let (from_ns, to_ns) = times;
        let of = |columns: &str, table: &str| {
            if times == ALWAYS {
                format!("SELECT at_ns, gpu, {columns} FROM {table} ORDER BY id")
            } else {
                format!("SELECT max(at_ns, {from_ns}), gpu, {columns} FROM {table} WHERE at_ns < {to_ns} ORDER BY id")
            }
        };
        let position = |row: &Row<'_>| {
            let gpu = needed::<u32>(row, 1)?;
            gpus.binary_search(&gpu).map_err(|_| FileProblem::malformed(format!("there is no gpu {gpu}")))
        };
        let mut changes = Vec::new();
        if self.has_column("health", "health") {
            changes.extend(self.rows("health", &of("health, trouble", "health"), 0, MOST_CHANGES, |row| {
                let label = text(row, 2)?.ok_or(FileProblem::Missing("health".into()))?;
                let health = Health::ALL.into_iter().find(|health| health.label() == label);
                let health =
                    health.ok_or_else(|| FileProblem::malformed(format!("`{label}` is none of up, lost and hung")))?;
                let trouble = text(row, 3)?.unwrap_or_default().chars().take(MOST_TROUBLE).collect();
                let (seen_ns, what) = (needed(row, 0)?, Changed::Health { health, trouble });
                let before =
                    turns.partition_point(|turn| *turn < seen_ns).checked_sub(1).map(|before| turns[before] + 1);
                let at_ns = before.filter(|_| health == Health::Up).unwrap_or(seen_ns);
                Ok(GpuChange { at_ns, gpu: position(row)?, what })
            })?);
        }
        if self.has_column("xids", "xid") {
            changes.extend(self.rows("xids", &of("xid, count, last_ns", "xids"), 0, MOST_CHANGES, |row| {
                let seen = Xid { count: needed(row, 3)?, last_ns: needed(row, 4)? };
                let what = Changed::Xid { xid: needed(row, 2)?, seen };
                Ok(GpuChange { at_ns: needed(row, 0)?, gpu: position(row)?, what })
            })?);
        }
        // A stable sort, so that of changes at the same time the last row counts.
        changes.sort_by_key(|change| change.at_ns);
        Ok(changes)
    }

    /// When the detectors looked.
    fn turns(&mut self, times: Span) -> Result<Vec<i64>, OpenError> {
        let query = format!("SELECT at_ns FROM turns WHERE {} ORDER BY at_ns", within(times));
        if self.has_table("turns") {
            self.rows("turns", &query, 0, MOST_USAGE, |row| needed(row, 0))
        } else {
            Ok(Vec::new())
        }
    }

    /// What jobs sent, each event with its rank's GPUs. The GPUs of a job that names none are those found when it was
    /// recorded.
    fn annotations(&mut self, times: Span) -> Result<Rows, OpenError> {
        let (found, jobs) = (self.ranks()?, self.jobs()?);
        let query = format!(
            "SELECT at_ns, event, kind, name, job, rank, world_size, step, gpus, allocated_bytes, reserved_bytes, \
                     active_bytes, inactive_split_bytes, alloc_retries, ooms, attributes FROM annotations WHERE {} ORDER BY id",
            within(times)
        );
        let read = |row: &Row<'_>| {
            let memory = Memory {
                allocated: number(row, 9)?,
                reserved: number(row, 10)?,
                active: number(row, 11)?,
                inactive_split: number(row, 12)?,
                alloc_retries: number(row, 13)?,
                ooms: number(row, 14)?,
            };
            let (job, rank) = (text(row, 4)?.ok_or(FileProblem::Missing("job".into()))?, needed::<u32>(row, 5)?);
            let known = found.get(&(job.clone(), rank));
            let named = gpus(row, 8)?.or_else(|| known?.gpus.clone());
            let attributes: Option<BTreeMap<String, Scalar>> = json(row, 15)?;
            let name = text(row, 3)?;
            let bytes = job.len() + name.as_ref().map_or(0, String::len) + text(row, 15)?.map_or(0, |text| text.len());
            let annotation = Annotation {
                event: word::<EventType>(row, 1)?,
                kind: word::<Kind>(row, 2)?,
                name,
                job: Some(jobs.get(&job).map_or_else(|| job.clone(), |id| id.name().to_string())),
                scope: jobs.get(&job).map(|id| id.scope().clone()),
                rank: Some(rank),
                world_size: number(row, 6)?,
                mesh: known.and_then(|known| known.mesh.clone()),
                gpu: named,
                step: number(row, 7)?,
                time_unix_nano: Some(needed(row, 0)?),
                memory: (memory != Memory::default()).then_some(memory),
                layer: None,
                lost: None,
                answer: None,
                attributes,
            };
            Ok((annotation, bytes))
        };
        let (mut rows, mut bytes, path) = (Vec::new(), 0, self.path().to_owned());
        self.each("annotations", &query, 0, read, |(annotation, more)| {
            bytes += more;
            if rows.len() >= MOST_EVENTS || bytes > MOST_EVENT_BYTES {
                let problem =
                    format!("table annotations has more than {MOST_EVENTS} rows or {MOST_EVENT_BYTES} bytes of text");
                return Err(refuse("recording_too_large", &path, problem));
            }
            rows.push(annotation);
            Ok(())
        })?;
        Ok(Rows { events: rows.into(), profiles: Arc::default() })
    }

    /// What is known of each rank beside what it sent.
    fn ranks(&mut self) -> Result<BTreeMap<(String, u32), Known>, OpenError> {
        let mesh = if self.has_column("ranks", "mesh") { "mesh" } else { "NULL" };
        let query = format!("SELECT job, rank, gpus, {mesh} FROM ranks");
        let rows = self.rows("ranks", &query, 0, MOST_RANKS, |row| {
            let known = Known { gpus: gpus(row, 2)?, mesh: json(row, 3)? };
            Ok(((text(row, 0)?.ok_or(FileProblem::Missing("job".into()))?, needed(row, 1)?), known))
        })?;
        Ok(rows.into_iter().collect())
    }
}

/// What a recording has of a rank as a whole.
#[derive(Debug)]
struct Known {
    /// Its GPUs, if they were found.
    gpus: Option<GpuList>,
    /// Its coordinates, which it may have sent before the recording began.
    mesh: Option<BTreeMap<String, u32>>,
}

/// What jobs sent.
#[derive(Debug)]
struct Rows {
    /// In the order in which it was received.
    events: Arc<[Annotation]>,
    /// Records of layers, in order of time.
    profiles: Arc<[Annotation]>,
}

impl Rows {
    /// The first and the last time. Profiles may be of long before.
    fn span(&self) -> Option<(i64, i64)> {
        let times = || self.events.iter().filter_map(|said| said.time_unix_nano);
        times().min().zip(times().max())
    }
}

impl AnnotationSource for Rows {
    fn in_order(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        let (events, profiles) = (Arc::clone(&self.events), Arc::clone(&self.profiles));
        let (mut next_event, mut next_record) = (0, 0);
        Box::new(std::iter::from_fn(move || {
            let (event, record) = (events.get(next_event), profiles.get(next_record));
            let record =
                record.filter(|record| event.is_none_or(|event| record.time_unix_nano <= event.time_unix_nano));
            *(if record.is_some() { &mut next_record } else { &mut next_event }) += 1;
            record.or(event).cloned()
        }))
    }
}

/// A JSON array of UUIDs; an empty one counts as not known.
fn gpus(row: &Row<'_>, at: usize) -> Result<Option<GpuList>, FileProblem> {
    let uuids: Option<Vec<String>> = json(row, at)?;
    Ok(uuids.filter(|uuids| !uuids.is_empty()).map(|uuids| GpuList::Many(uuids.into_iter().map(Gpu::Name).collect())))
}

#[cfg(test)]
mod tests;
