//! Files of one run, added up: what several processes held on each GPU at a time.
//!
//! Enters: reports. Leaves: a report on all of them together, if they have the allocations of processes that ran at the same time.
//! Invariant: before a process's first event and after its last it holds nothing; where the memory of one of them is not known, neither
//! is the sum. Absent on purpose: files with the memory of a whole GPU, which has all processes already.

use super::curve::Point;
use super::model::{Gpu, Origin, Report};
use super::room::Room;
use highwater_core::gpu::Device;
use highwater_engine::recording::Times;
use highwater_engine::recording::tape::is_made_up;
use std::collections::BTreeMap;
use std::path::Path;

/// The reports whose allocations are added up, as one report; `None` if there are not several, or if one of those with memory has
/// something else, or ran at another time.
#[must_use]
pub fn together(reports: &[Report], room: Room) -> Option<Report> {
    let parts: Vec<&Report> = reports.iter().filter(|report| !report.gpus.is_empty()).collect();
    let are_parts = parts.iter().all(|report| report.gpus.iter().all(|gpu| gpu.allocations.is_some()));
    let offsets = super::axis::offsets(reports);
    let ran_at_once = reports.iter().zip(offsets).all(|(report, offset)| report.gpus.is_empty() || offset.is_some());
    if parts.len() < 2 || !are_parts || !ran_at_once {
        return None;
    }
    let begin_ns = parts.iter().map(|report| report.begin_ns).min()?;
    let end_ns = parts.iter().map(|report| report.end_ns).max()?;
    let mut by_index: BTreeMap<(usize, &str), Vec<(&Gpu, i64)>> = BTreeMap::new();
    for (report, gpu) in parts.iter().flat_map(|report| report.gpus.iter().map(move |gpu| (report, gpu))) {
        let uuid = gpu.device.uuid.as_str();
        let index = if uuid.is_empty() || is_made_up(uuid) { gpu.device.index.as_str() } else { uuid };
        by_index.entry((index.len(), index)).or_default().push((gpu, report.end_ns));
    }
    let thinned = parts.iter().flat_map(|report| &report.gpus).filter_map(|gpu| gpu.usage.curve.bucket_ns()).max();
    let thinned =
        thinned.map(|ns| format!("the sums are of the highest and lowest values of {:.3} ms each", ns as f64 / 1e6));
    let has_numbers = by_index.keys().any(|(_, key)| !key.starts_with("GPU-"));
    let by_number = has_numbers.then(|| "GPUs with the same number are one GPU: the files do not say".to_owned());
    let most = room.points_of_one(by_index.len());
    let gpus = by_index.into_values().map(|gpus| sum(&gpus, (begin_ns, end_ns), most)).collect();
    let origin = Origin {
        missing: parts.iter().flat_map(|report| report.origin.missing.iter().copied()).take(1).collect(),
        assumed: thinned.into_iter().chain(by_number).collect(),
        ..Origin::new("sum of allocations", Times::Unix)
    };
    let name = format!("{} files together", parts.len());
    Some(Report { begin_ns, end_ns, gpus, ..Report::of_file(Path::new(&name), origin) })
}

/// What the processes hold together on a GPU. Each ends at its time.
fn sum(gpus: &[(&Gpu, i64)], (begin_ns, end_ns): (i64, i64), most: usize) -> Gpu {
    let known = gpus.iter().map(|(gpu, _)| &gpu.device);
    let device = known.clone().find(|device| device.name.is_some()).or_else(|| known.clone().next());
    let device = device.cloned().unwrap_or_default();
    let mut changes: Vec<(i64, usize, Option<u64>)> = Vec::new();
    for (nth, (gpu, ends_ns)) in gpus.iter().enumerate() {
        changes.extend(gpu.usage.curve.points().iter().map(|point| (point.at_ns, nth, point.used)));
        // Its last event is part of it.
        changes.push((ends_ns.saturating_add(1), nth, Some(0)));
    }
    changes.sort_by_key(|(at_ns, ..)| *at_ns);
    let mut held: Vec<Option<u64>> = vec![Some(0); gpus.len()];
    let mut all = Gpu::new(Device { uuid: format!("{}-together", device.uuid), ..device }, begin_ns, most);
    all.usage.push(Point { at_ns: begin_ns, used: Some(0) });
    for at in changes.chunk_by(|one, other| one.0 == other.0) {
        at.iter().for_each(|(_, nth, used)| held[*nth] = *used);
        let used = held.iter().copied().try_fold(0_u64, |sum, used| sum.checked_add(used?));
        if at[0].0 <= end_ns {
            all.usage.push(Point { at_ns: at[0].0, used });
        }
    }
    all.usage.end(None, end_ns);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::hand;

    const EPOCH_NS: i64 = 1_774_586_313_950_756_076;

    /// A process that began this much after the first, with allocations on these GPUs.
    fn process(name: &str, after_ns: i64, gpus: &[Vec<(i64, Option<u64>)>]) -> Report {
        let begin_ns = EPOCH_NS + after_ns;
        let dated: Vec<Vec<_>> =
            gpus.iter().map(|points| points.iter().map(|(at, used)| (begin_ns + at, *used)).collect()).collect();
        let mut report = hand::report(name, &dated);
        report.begin_ns = begin_ns;
        report.end_ns -= 1;
        report.gpus.iter_mut().for_each(|gpu| gpu.allocations = Some(1));
        report
    }

    fn points(gpu: &Gpu) -> Vec<(i64, Option<u64>)> {
        gpu.usage.curve.points().iter().map(|point| (point.at_ns - EPOCH_NS, point.used)).collect()
    }

    #[test]
    fn processes_that_run_at_once_are_added_up_on_each_gpu() {
        let first = process(
            "a.prof",
            0,
            &[vec![(0, Some(5)), (30, Some(7)), (40, Some(7))], vec![(10, Some(2)), (50, Some(2))]],
        );
        let second = process(
            "b.prof",
            20,
            &[vec![(0, Some(0)), (5, Some(100)), (15, Some(0))], vec![(0, Some(700)), (60, Some(1))]],
        );
        let all = together(&[first, second], Room::of(3)).expect("one run");
        assert_eq!((all.name.as_str(), all.begin_ns - EPOCH_NS, all.end_ns - EPOCH_NS), ("2 files together", 0, 80));
        let [one, other] = &all.gpus[..] else { panic!("{:?}", all.gpus) };
        assert_eq!(one.usage.peak, Some((107, EPOCH_NS + 30)));
        assert_eq!(other.usage.peak, Some((702, EPOCH_NS + 20)));
        assert_eq!(points(other).first(), Some(&(0, Some(0))));
        // The first process has ended, and with it its memory.
        assert_eq!(points(other).last(), Some(&(80, Some(1))), "{:?}", points(other));
    }

    #[test]
    fn what_is_not_known_of_one_is_not_known_of_all() {
        let first = process("a.prof", 0, &[vec![(0, Some(5)), (10, None), (20, Some(5)), (40, Some(5))]]);
        let second = process("b.prof", 0, &[vec![(0, Some(1)), (40, Some(1))]]);
        let all = together(&[first, second], Room::of(3)).expect("one run");
        assert!(points(&all.gpus[0]).contains(&(10, None)) && points(&all.gpus[0]).contains(&(20, Some(6))));
    }

    #[test]
    fn others_are_compared() {
        let one = || process("a.prof", 0, &[vec![(0, Some(5)), (30, Some(7))]]);
        let mut whole = one();
        whole.gpus[0].allocations = None;
        let later = process("b.prof", 5_000, &[vec![(0, Some(5)), (30, Some(7))]]);
        assert!(together(&[one(), whole], Room::of(3)).is_none(), "the memory of a whole GPU has all processes");
        assert!(together(&[one(), later], Room::of(3)).is_none(), "before and after");
        assert!(together(&[one()], Room::of(3)).is_none());
    }
}
