//! A report on a recording that has no phases and findings of its own: they are derived as the daemon derives them.

use crate::formats::FileFormat;
use crate::import::polled::Hints;
use crate::replay;
use crate::report::curve::Point;
use crate::report::layers::Layers;
use crate::report::model::{FirstSaid, Found, Gpu, Origin, Report, peaks_of};
use crate::report::room::Room;
use crate::report::spans::{Ended, Spans};
use highwater_core::detect::Finding;
use highwater_core::phases::{Attributed, PhaseMemory};
use highwater_core::source::{OpenError, Source as _};
use highwater_core::wire::Kind;
use highwater_engine::offline;
use highwater_engine::offline::Settings;
use highwater_engine::recording::write::FindingRow;
use highwater_engine::recording::{Allocation, Options, Replay};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Allocations that are drawn and listed one by one, of each GPU.
const MOST_LARGEST: usize = 32;

pub(super) fn open(
    format: FileFormat,
    path: &Path,
    room: Room,
    settings: &Settings,
    hints: &Hints,
) -> Result<Report, OpenError> {
    let replay = Arc::new(replay::open_as(format, path, Options::default(), hints)?);
    let (begin_ns, end_ns) = (replay.begin_ns(), replay.end_ns());
    let devices = replay.devices();
    let mut gpus: Vec<Gpu> =
        devices.iter().map(|device| Gpu::new(device.clone(), begin_ns, room.points_of_one(devices.len()))).collect();
    for (position, gpu) in gpus.iter_mut().enumerate() {
        replay.points(position).for_each(|(at_ns, used)| gpu.usage.push(Point { at_ns, used }));
        gpu.usage.end(None, end_ns);
    }
    allocations(&replay, &mut gpus);
    for allocator in replay.allocators() {
        gpus.get_mut(allocator.gpu).into_iter().for_each(|gpu| gpu.allocator = Some(allocator.clone()));
    }
    let Derived { spans, gpus_of, findings, layers, refused } = if replay.annotations().next().is_some() {
        derived(&replay, settings, Spans::new(room.spans, peaks_of(&gpus)).sampled(room.samples), Layers::new(room))
            .map_err(|error| OpenError {
                reason: "recording_unreadable",
                message: format!("{}: {error}", path.display()),
            })?
    } else {
        Derived::default()
    };
    let mut skipped = replay.skipped().clone();
    if refused > 0 {
        skipped.add_many(path, refused, "annotations were refused; `highwater serve --source replay:FILE` logs why");
    }
    let name = path.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let format = replay.format();
    let origin = Origin {
        missing: format.missing.to_vec(),
        assumed: replay.assumed().to_vec(),
        ..Origin::new(format.name, format.times)
    };
    Ok(Report {
        name: name.unwrap_or_else(|| path.display().to_string()),
        begin_ns,
        end_ns,
        gpus,
        spans,
        gpus_of,
        findings,
        layers,
        skipped,
        ..Report::of_file(path, origin)
    })
}

/// Gives each GPU its largest allocations, the earlier of equal ones first.
fn allocations(replay: &Replay, gpus: &mut [Gpu]) {
    let mut all: Vec<&Allocation> = replay.allocations().iter().collect();
    all.sort_by_key(|one| (std::cmp::Reverse(one.bytes), one.begin_ns));
    for one in all {
        let Some(gpu) = gpus.get_mut(one.gpu) else { continue };
        *gpu.allocations.get_or_insert(0) += 1;
        if gpu.largest.len() < MOST_LARGEST {
            gpu.largest.push(*one);
        }
    }
}

/// What follows from a recording's annotations.
#[derive(Default)]
struct Derived {
    spans: Spans,
    gpus_of: BTreeMap<(String, u32), BTreeSet<String>>,
    /// `None` if no detector had anything to look at.
    findings: Option<Vec<Found>>,
    layers: Layers,
    /// Annotations that the daemon would refuse.
    refused: usize,
}

/// Phases and findings, as the daemon would have found them.
fn derived(replay: &Arc<Replay>, settings: &Settings, mut spans: Spans, mut layers: Layers) -> anyhow::Result<Derived> {
    let mut gpus_of = BTreeMap::new();
    let mut found = BTreeMap::new();
    let mut next = [0, 0];
    let played = offline::play(replay, settings, |_, ledger, change| {
        found.extend(change.ended.iter().map(|finding| (finding.id, shown(finding))));
        let log = ledger.ended();
        for (next, shelf) in next.iter_mut().zip([&log.phases, &log.layers]) {
            let (new, lost) = shelf.since(*next);
            spans.lose(lost);
            *next = shelf.count();
            for attributed in new {
                let ended = ended(&attributed);
                let gpus = attributed.gpus.iter().filter_map(|gpu| attributed.uuid_of(gpu));
                // Only steps are used. The GPUs of a rank without steps stay unknown.
                if attributed.ended.open.kind == Kind::Step {
                    let of: &mut BTreeSet<String> = gpus_of.entry((ended.job.clone(), ended.rank)).or_default();
                    of.extend(gpus.map(str::to_owned));
                }
                spans.push(ended);
            }
        }
    })?;
    found.extend(played.detect.board().active().map(|finding| (finding.id, shown(finding))));
    layers.divide(played.profiles.iter().map(|(_, profile)| profile.count));
    for ((job, rank), profile) in &played.profiles {
        layers.played(&job.to_string(), *rank, profile);
    }
    spans.finish();
    let mut findings: Vec<Found> = found.into_values().collect();
    findings.sort_by_key(|found| found.begin_ns);
    gpus_of.retain(|_, gpus| !gpus.is_empty());
    Ok(Derived { spans, gpus_of, findings: Some(findings), layers, refused: played.refused })
}

fn ended(attributed: &Attributed) -> Ended {
    let (ended, open) = (&attributed.ended, &attributed.ended.open);
    Ended {
        job: ended.job.to_string(),
        rank: ended.rank,
        kind: open.kind,
        name: open.name.to_string(),
        step: open.step,
        begin_ns: open.begin_ns,
        end_ns: ended.end_ns,
        by: ended.by,
        peak_bytes: attributed.gpus.iter().filter_map(|gpu: &PhaseMemory| gpu.peak_bytes).max(),
    }
}

fn shown(finding: &Finding) -> Found {
    let FindingRow {
        kind,
        severity,
        certainty,
        lag_cause,
        job,
        rank,
        incident,
        begin_ns,
        end_ns,
        what,
        why,
        advice,
        seen_ns,
        first,
        ..
    } = FindingRow::of(finding);
    let gpu = finding.gpu.as_ref().map(|(index, _)| index.clone());
    Found {
        kind: kind.to_owned(),
        severity,
        certainty,
        lag_cause: lag_cause.map(str::to_owned),
        gpu,
        job: job.map(|job| job.to_string()),
        rank,
        incident: Some(incident),
        workloads: finding.workload_names(),
        begin_ns,
        end_ns,
        what,
        why,
        advice,
        seen_ns: Some(seen_ns),
        first: Some(FirstSaid { seen_ns: first.seen_ns, what: first.what, why: first.why }),
    }
}
