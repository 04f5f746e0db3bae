//! Traces of real jobs: two ranks of data-parallel training on H200 for three steps without `ProfilerStep`, and a small
//! model with a slow data loader. `tests/data/kineto/reduce.py` made the former smaller.
//!
//! What the module says has to equal what is computed here in another way: from all of the JSON at once, with times from
//! floats, by one walk over all begins and ends that counts what is running.

use crate::kineto::read;
use crate::timeline::{Analysis, CollectiveUsage, Kind, Trace, analyse, compare};
use flate2::read::MultiGzDecoder;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("tests/data/kineto").join(name)
}

fn unpacked(path: &Path) -> MultiGzDecoder<File> {
    MultiGzDecoder::new(File::open(path).expect("the recording"))
}

fn trace(path: &Path) -> Trace {
    read(unpacked(path)).expect("a trace")
}

/// What runs on the GPU.
#[derive(Clone, Copy, PartialEq)]
enum What {
    Compute,
    Collective,
    Memory,
    Loading,
}

struct Event {
    what: What,
    begin: i64,
    end: i64,
    launch: Option<i64>,
    elements: u64,
}

fn ns(value: &Value) -> i64 {
    (value.as_f64().expect("microseconds") * 1e3).round() as i64
}

/// What the file has, and its steps.
fn events(file: &Value) -> (Vec<Event>, Vec<(i64, i64)>) {
    let all: Vec<&Value> = file["traceEvents"].as_array().expect("events").iter().filter(|e| e["ph"] == "X").collect();
    let is_call = |event: &&&Value| event["cat"] == "cuda_runtime" || event["cat"] == "cuda_driver";
    let calls: HashMap<u64, i64> =
        all.iter().filter(is_call).filter_map(|e| Some((e["args"]["correlation"].as_u64()?, ns(&e["ts"])))).collect();
    let (mut events, mut steps) = (Vec::new(), Vec::new());
    for event in all {
        let (begin, name) = (ns(&event["ts"]), event["name"].as_str().expect("a name"));
        let end = begin + ns(&event["dur"]);
        let what = match event["cat"].as_str().expect("a category") {
            "kernel" if name.starts_with("nccl") => What::Collective,
            "kernel" => What::Compute,
            "gpu_memcpy" | "gpu_memset" => What::Memory,
            "user_annotation" if name.contains("DataLoader") => What::Loading,
            "user_annotation" if name.starts_with("ProfilerStep#") => {
                steps.push((begin, end));
                continue;
            }
            _ => continue,
        };
        let launch = event["args"]["correlation"].as_u64().and_then(|correlation| calls.get(&correlation).copied());
        let elements = event["args"]["In msg nelems"].as_u64().unwrap_or(0);
        events.push(Event { what, begin, end, launch, elements });
    }
    steps.sort_unstable();
    (events, steps)
}

/// For each step: window, busy, compute, communication, memory, overlap, data, host, other; nanoseconds.
fn expected(file: &Value) -> Vec<[i64; 9]> {
    let (events, steps) = events(file);
    let work = || events.iter().filter(|event| event.what != What::Loading);
    let all = (work().map(|e| e.begin).min().expect("work"), work().map(|e| e.end).max().expect("work"));
    let mut windows: Vec<(i64, i64)> = Vec::new();
    for (begin, end) in &steps {
        let launched = work().filter(|e| e.launch.is_some_and(|at| (*begin..*end).contains(&at))).map(|e| e.end).max();
        let first = windows.last().map_or(*begin, |(_, before)| *before.max(begin));
        windows.push((first, launched.unwrap_or(*end).max(*end).max(first)));
    }
    if steps.is_empty() {
        windows.push(all);
    }
    windows.iter().map(|(begin, end)| walk(&events, *begin, *end)).collect()
}

fn walk(events: &[Event], from: i64, to: i64) -> [i64; 9] {
    let mut edges = BTreeMap::<i64, Vec<(What, i64)>>::from([(from, Vec::new()), (to, Vec::new())]);
    let mut begins = BTreeMap::<i64, i64>::new();
    for event in events {
        edges.entry(event.begin).or_default().push((event.what, 1));
        edges.entry(event.end).or_default().push((event.what, -1));
        if let (true, Some(launch)) = (event.what != What::Loading, event.launch) {
            begins.entry(event.begin).and_modify(|first| *first = launch.min(*first)).or_insert(launch);
        }
    }
    let (mut sums, mut running, mut gap) = ([0; 9], [0; 4], from);
    sums[0] = to - from;
    let times: Vec<i64> = edges.keys().copied().collect();
    for pair in times.windows(2) {
        let (at, length) = (pair[0], pair[1] - pair[0]);
        edges[&at].iter().for_each(|(what, change)| running[*what as usize] += change);
        let [compute, collective, memory, loading] = running.map(|count| count > 0);
        if at < from || at >= to {
            continue;
        }
        if compute || collective || memory {
            gap = pair[1];
        }
        let launch = begins.range(at + 1..).next().map(|(_, launch)| *launch);
        let is_queued = launch.is_some_and(|launch| launch <= gap);
        // Where the launch falls into this stretch, only the time before it can be the loader's.
        let before = launch.map_or(length, |launch| (launch - at).clamp(0, length));
        for (sum, time) in sums[1..].iter_mut().zip([
            if compute || collective || memory { length } else { 0 },
            if compute { length } else { 0 },
            if collective { length } else { 0 },
            if memory { length } else { 0 },
            if compute && collective { length } else { 0 },
            if gap <= at && !is_queued && loading { before } else { 0 },
            if gap <= at && !is_queued { if loading { length - before } else { length } } else { 0 },
            if gap <= at && is_queued { length } else { 0 },
        ]) {
            *sum += time;
        }
    }
    sums
}

fn said(analysis: &Analysis) -> Vec<[i64; 9]> {
    let whole = |ns: u64| i64::try_from(ns).expect("a time");
    let each = analysis.steps.iter().map(|step| {
        let idle = &step.idle;
        assert_eq!((step.idle_ns, idle.unexplained_ns), (step.window_ns - step.busy_ns, 0));
        [
            step.window_ns,
            step.busy_ns,
            step.compute_ns,
            step.communication_ns,
            step.memory_ns,
            step.overlap_ns,
            idle.data_ns.unwrap_or(0),
            idle.host_ns.expect("known"),
            idle.other_ns.expect("known"),
        ]
        .map(whole)
    });
    each.collect()
}

/// Checks the analysis of a file, and returns it.
fn check(path: &Path) -> Analysis {
    let analysis = analyse(&trace(path)).expect("work");
    let file: Value = serde_json::from_reader(unpacked(path)).expect("JSON");
    assert_eq!(said(&analysis), expected(&file), "{}", path.display());
    let (events, _) = events(&file);
    let of = |what| events.iter().filter(move |event| event.what == what);
    let usages = || analysis.steps.iter().flat_map(|step| &step.collectives);
    assert!(usages().all(|usage| usage.kind == Kind::AllReduce));
    let sum = |of: fn(&CollectiveUsage) -> u64| usages().map(of).sum::<u64>();
    assert_eq!(sum(|usage| usage.count), of(What::Collective).count() as u64);
    assert_eq!(sum(|usage| usage.total_ns) as i64, of(What::Collective).map(|e| e.end - e.begin).sum::<i64>());
    // All messages are of two bytes for each element, but for three of one number of four.
    let elements = of(What::Collective).map(|e| if e.elements == 1 { 4 } else { 2 * e.elements }).sum::<u64>();
    assert_eq!(sum(|usage| usage.bytes.unwrap_or(0)), elements);
    analysis
}

/// The times of each rank: waiting and transfer.
fn check_ranks(paths: &[PathBuf; 2]) {
    let all = paths.each_ref().map(|path| {
        let (events, _) = events(&serde_json::from_reader(unpacked(path)).expect("JSON"));
        let mut times: Vec<(i64, i64)> =
            events.iter().filter(|e| e.what == What::Collective).map(|e| (e.begin, e.end)).collect();
        times.sort_unstable();
        times
    });
    let latest: Vec<i64> = all[0].iter().zip(&all[1]).map(|(one, other)| one.0.max(other.0)).collect();
    let ranks = compare(&paths.each_ref().map(|path| trace(path)).each_ref()).expect("two ranks");
    for (share, times) in ranks.ranks.iter().zip(&all) {
        let waiting: i64 = times.iter().zip(&latest).map(|((begin, _), latest)| latest - begin).sum();
        let transfer: i64 = times.iter().zip(&latest).map(|((_, end), latest)| end - latest).sum();
        assert_eq!((share.waiting_ns, share.transfer_ns), (Some(waiting as u64), Some(transfer as u64)));
    }
    // Rank 0 has little free memory and is late, so that rank 1 waits.
    assert_eq!((ranks.matched, ranks.unmatched, ranks.clocks.contradicting), (735, 0, 0));
    assert_eq!((ranks.most_often_last, ranks.most_waited_for), (Some(0), Some(0)));
    let waiting: Vec<_> = ranks.ranks.iter().map(|share| (share.times_last, share.waiting_ns)).collect();
    assert_eq!(waiting, [(Some(662), Some(4_849_126)), (Some(73), Some(45_441_806))]);
}

#[test]
fn two_ranks_of_a_training_job() {
    let paths = [data("ddp_tight_rank0.json.gz"), data("ddp_tight_rank1.json.gz")];
    let idle = paths.each_ref().map(|path| check(path).steps[0].idle_ns);
    assert_eq!(idle, [68_713_253, 36_344_183]);
    check_ranks(&paths);
}

#[test]
fn a_small_model_with_a_slow_loader() {
    let analysis = check(&data("mlp_kineto.json.gz"));
    let steps: Vec<_> = analysis.steps.iter().map(|step| (step.step, step.kernels, step.idle.data_ns)).collect();
    let expected = [(2, 986_667), (3, 930_024), (4, 545_885), (5, 347_556)];
    assert_eq!(steps, expected.map(|(step, data_ns)| (Some(step), 76, Some(data_ns))));
}

/// PyTorch's own peaks of the same run: `tests/gpu/traced_memory.py`, on an H200.
#[test]
fn the_memory_of_each_step_is_what_pytorch_counts() {
    let analysis = analyse(&trace(&data("memory_kineto.json.gz"))).expect("a GPU worked");
    let peaks: Vec<_> =
        analysis.steps.iter().map(|step| (step.allocated_peak_bytes, step.reserved_peak_bytes)).collect();
    let said =
        [(89_765_888, 111_149_056), (118_880_768, 144_703_488), (135_555_584, 153_092_096), (152_243_200, 174_063_616)];
    let said = said.map(|(allocated, reserved)| (Some(allocated), Some(reserved)));
    // The step that was begun and not ended has no work.
    assert_eq!(peaks[..said.len()], said);
}
