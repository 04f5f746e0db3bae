//! The steps of a recording with their batch sizes.

use super::observed::{Observed, Peaks, Run};
use super::{ALLOCATED_PEAK, ATTRIBUTE, LARGEST_ALLOCATION, RESERVED_PEAK};
use highwater_core::source::OpenError;
use highwater_engine::recording::FileProblem;
use highwater_engine::recording::rows::{RecordingReader, json, needed, text};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The most steps with a batch size, ranks, and steps with memory of one file.
const MOST_SIZES: usize = 1 << 20;
const MOST_RANKS: usize = 1 << 12;
const MOST_STEPS: usize = 1 << 22;

/// What the attributes of a step say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizedStep {
    /// Its batch size.
    pub batch_size: u64,
    allocated: Option<u64>,
    reserved: Option<u64>,
    largest: Option<u64>,
}

impl SizedStep {
    /// Reads attributes by their names; `None` if there is no batch size.
    pub fn of(attribute: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        let (allocated, reserved) = (attribute(ALLOCATED_PEAK), attribute(RESERVED_PEAK));
        Some(Self { batch_size: attribute(ATTRIBUTE)?, allocated, reserved, largest: attribute(LARGEST_ALLOCATION) })
    }

    /// Its peaks, with the highest memory of its GPU, bytes.
    #[must_use]
    pub fn peaks(&self, gpu: u64) -> Peaks {
        Peaks { gpu, allocated: self.allocated, reserved: self.reserved, largest: self.largest }
    }
}

/// Adds the steps of a recording of highwater to what was observed. Of each GPU, `headroom_bytes` are to stay free.
///
/// # Errors
/// The file is no recording of highwater, or has too many steps.
pub fn read(path: &Path, headroom_bytes: u64, observed: &mut Observed) -> Result<(), OpenError> {
    let mut file = RecordingReader::open(path)?;
    let devices = file.devices()?;
    let limit = |gpu: u32| Some(devices.get(&gpu)?.0.usable_bytes()?.saturating_sub(headroom_bytes));
    let mut ranks: BTreeMap<(String, u32), usize> = BTreeMap::new();
    let mut sizes: HashMap<(usize, i64), SizedStep> = HashMap::new();
    let mut problem = None;
    let query = "SELECT job, rank, at_ns, attributes FROM annotations
                 WHERE kind = 'step' AND event IN ('begin', 'end') AND attributes IS NOT NULL";
    file.each(
        "annotations",
        query,
        0,
        |row| {
            let attributes: Option<BTreeMap<String, Value>> = json(row, 3)?;
            let size = attributes.and_then(|of| SizedStep::of(|name| of.get(name)?.as_u64()));
            Ok((text(row, 0)?.ok_or(FileProblem::Missing("job".into()))?, needed(row, 1)?, needed(row, 2)?, size))
        },
        |(job, rank, at_ns, size): (String, u32, i64, Option<SizedStep>)| {
            let Some(size) = size else { return Ok(()) };
            let known = ranks.len();
            let nth = *ranks.entry((job, rank)).or_insert(known);
            if ranks.len() > MOST_RANKS || sizes.len() >= MOST_SIZES {
                problem = Some(format!("it has more than {MOST_RANKS} ranks, or {MOST_SIZES} steps with a batch size"));
            } else {
                sizes.insert((nth, at_ns), size);
            }
            Ok(())
        },
    )?;
    if let Some(problem) = problem {
        return Err(file.refuse("recording_too_large", problem));
    }
    // SQLite takes the GPU from the row with the highest peak.
    let query = "SELECT phase, max(peak_bytes), gpu FROM phase_memory WHERE typeof(peak_bytes) = 'integer'
                 GROUP BY phase ORDER BY phase";
    let peaks: Vec<(i64, u64, u32)> =
        file.rows("phase_memory", query, 0, MOST_STEPS, |row| Ok((needed(row, 0)?, needed(row, 1)?, needed(row, 2)?)))?;
    let mut runs: BTreeMap<usize, (Run, Option<u64>)> = BTreeMap::new();
    // A step that has not ended by itself may not have come to its peak. Files from before the column have none of these.
    let whole = if file.has_column("phases", "ended_by") { "AND ended_by = 'end'" } else { "" };
    let query =
        format!("SELECT job, rank, begin_ns, end_ns, id FROM phases WHERE kind = 'step' {whole} ORDER BY begin_ns, id");
    file.each(
        "phases",
        &query,
        0,
        |row| {
            let rank = (text(row, 0)?.ok_or(FileProblem::Missing("job".into()))?, needed(row, 1)?);
            Ok((rank, [needed(row, 2)?, needed(row, 3)?], needed(row, 4)?))
        },
        |(rank, times, id): ((String, u32), [i64; 2], i64)| {
            let size = ranks.get(&rank).and_then(|nth| {
                let size = times.iter().find_map(|at_ns| sizes.get(&(*nth, *at_ns)))?;
                Some((*nth, *size))
            });
            let peak = peaks.binary_search_by_key(&id, |peak| peak.0).ok().map(|at| peaks[at]);
            if let Some(((nth, sized), (_, bytes, gpu))) = size.zip(peak) {
                let (run, limits) = runs.entry(nth).or_default();
                run.add(sized.batch_size, sized.peaks(bytes));
                *limits = limits.iter().copied().chain(limit(gpu)).min();
            }
            Ok(())
        },
    )?;
    let names: BTreeMap<usize, u32> = ranks.into_iter().map(|((_, rank), nth)| (nth, rank)).collect();
    for (nth, (run, limit_bytes)) in runs {
        if let Some(rank) = names.get(&nth) {
            observed.add(*rank, run, limit_bytes);
        }
    }
    if let Some(first) = file.skipped.first.first() {
        tracing::warn!(count = file.skipped.count, %first, "rows could not be read");
    }
    Ok(())
}
