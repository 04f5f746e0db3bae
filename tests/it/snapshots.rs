//! Memory snapshots of PyTorch, as `highwater report` shows them, beside what Python's own pickle and the algorithm of
//! PyTorch's visualiser (`MemoryViz.js`) make of the same files.

use crate::daemon::command;
use crate::tools;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Writes snapshots of a random history, in all protocols, and prints what the visualiser computes of each: every element
/// with its begin and end, the set of those that are there after each action, and the first highest one.
const ORACLE: &str = r#"
import collections, gzip, json, pickle, random, sys

def history(seed):
    random.seed(seed)
    frames = [{'name': f'f{n % 7}', 'filename': ('/app/train.py', '/x/site-packages/torch/nn.py', 'a.cpp')[n % 3], 'line': n} for n in range(30)]
    stacks = [[random.choice(frames) for _ in range(random.randrange(6))] for _ in range(12)]
    traces, segments = [], []
    for device in range(3):
        live, trace, at = {}, [], 1795207208182423
        # There before the history began: freed in it, or never.
        before = {(1 << 46) + 512 * n: random.randrange(1, 5000) for n in range(20)}
        for n in range(0 if device == 1 else 700):
            at += random.randrange(3)
            entry = {'addr': 0, 'size': 0, 'stream': 0, 'time_us': at, 'frames': random.choice(stacks)}
            kind = random.random()
            if kind < 0.5:
                address = (1 << 47) + 512 * random.randrange(200)
                if address in live: continue
                live[address] = random.randrange(1, 1 << random.randrange(1, 34))
                entry.update(action='alloc', addr=address, size=live[address])
            elif kind < 0.9 and live:
                address = random.choice(list(live))
                entry.update(action='free_requested', addr=address, size=live[address])
                trace.append(dict(entry))
                entry.update(action='free_completed')
                del live[address]
            elif kind < 0.93 and before:
                address, size = before.popitem()
                entry.update(action='free_completed', addr=address, size=size)
            elif kind < 0.96:
                entry.update(action='segment_alloc', size=2 << 20)
            elif kind < 0.97:
                del entry['addr']
                entry.update(action='oom', size=1 << 40, device_free=5 << 20)
            else:
                entry.update(action='snapshot')
            trace.append(entry)
        traces.append(trace)
        blocks = [{'address': address, 'size': size + 99, 'requested_size': size, 'state': 'active_allocated', 'frames': random.choice(stacks)}
                  for address, size in {**live, **before}.items()]
        blocks.append({'address': 1 << 48, 'size': 77, 'requested_size': 0, 'state': 'inactive', 'frames': []})
        segments.append({'device': device, 'address': 1 << 46, 'total_size': 1 << 44, 'allocated_size': 0, 'active_size': 0,
                         'stream': 0, 'segment_type': 'large', 'segment_pool_id': (0, 0), 'is_expandable': False, 'blocks': blocks, 'frames': []})
    return {'segments': segments, 'device_traces': traces, 'allocator_settings': {'PYTORCH_CUDA_ALLOC_CONF': '', 'roundup': {'1': 2}, 'x': None},
            'external_annotations': [{'device': 0, 'name': 'step', 'time_us': 2.5, 'more': (1, 2, 3)}], 'large': 1 << 90, 'small': -5}

def visualised(snapshot, device):
    elements, initially, actions, live = [], [], [], {}
    for n, entry in enumerate(snapshot['device_traces'][device]):
        if entry['action'] == 'alloc':
            elements.append(entry)
            live[entry['addr']] = len(elements) - 1
            actions.append((n, len(elements) - 1))
        elif entry['action'] in ('free', 'free_completed'):
            if entry['addr'] in live:
                actions.append((n, live.pop(entry['addr'])))
            else:
                elements.append(entry)
                initially.append(len(elements) - 1)
                actions.append((n, len(elements) - 1))
    for segment in snapshot['segments']:
        for block in segment['blocks'] if segment['device'] == device else []:
            if block['state'] == 'active_allocated' and block['address'] not in live:
                elements.append({'size': block['requested_size'], 'frames': block['frames']})
                initially.append(len(elements) - 1)
    there = set(initially)
    best = (sum(elements[n]['size'] for n in there), 0, None, set(there))
    for n, which in actions:
        if which in there:
            there.remove(which)
        else:
            there.add(which)
            total = sum(elements[n]['size'] for n in there)
            if total > best[0]:
                best = (total, n + 1, snapshot['device_traces'][device][n]['time_us'], set(there))
    held = collections.defaultdict(lambda: [0, 0])
    for n in best[3]:
        of = held[' '.join(f"{f['filename']}:{f['line']}:{f['name']}" for f in elements[n]['frames'])]
        of[0] += elements[n]['size']
        of[1] += 1
    return {'peak': best[0], 'events': best[1], 'time_us': best[2], 'held': held}

found = {}
for seed in range(4):
    snapshot = history(seed)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        for pack, ending in ((False, ''), (True, '.gz')):
            name = f'{seed}-{protocol}.pickle{ending}'
            with (gzip.open if pack else open)(f'{sys.argv[1]}/{name}', 'wb') as file:
                # The pickler written in Python writes frames and memo as the one written in C, but for SETITEM and APPEND.
                (pickle._dump if pack else pickle.dump)(snapshot, file, protocol)
            found[name] = {str(device): visualised(snapshot, device) for device in range(3)}
for path in sys.argv[2:]:
    snapshot = pickle.loads(gzip.open(path).read())
    found[path] = {str(device): visualised(snapshot, device) for device, trace in enumerate(snapshot['device_traces']) if trace}
print(json.dumps(found))
"#;

/// Written on an H200 by PyTorch 2.11's own pickler, in C++ (`torch::cuda::_memory_snapshot_pickled`).
const OF_CPP: &str = "tests/data/torch/cpp_snapshot.pickle.gz";

fn reported(path: &Path) -> Value {
    let output = command().arg("report").arg(path).arg("--json").output().expect("it runs");
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Asserts that the highest moment in the drawn bands is the peak, and that each band then equals the sum of its holders.
fn bands_are_right_at_the_peak(allocator: &Value, name: &str, least: usize) {
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let moments = list(&allocator["bands"]["moments"]);
    let highest = moments.iter().rev().max_by_key(|moment| moment["total"].as_u64()).expect("a moment");
    assert_eq!(highest["total"], allocator["peak"]["allocated_bytes"], "{name}");
    let mut held: BTreeMap<String, u64> = BTreeMap::new();
    for holder in list(&allocator["holders"]) {
        let site = holder["place"]["site"].as_str().unwrap_or("a place that is not known: no stack was recorded");
        *held.entry(site.to_owned()).or_default() += holder["bytes"].as_u64().expect("bytes");
    }
    let sites = list(&allocator["bands"]["sites"]);
    assert!(sites.len() >= least || moments.len() < 5, "{name}: {sites:?}");
    for (site, bytes) in sites.iter().zip(list(&highest["held"])) {
        let site = site["site"].as_str().expect("a name");
        assert_eq!(bytes.as_u64(), Some(held.get(site).copied().unwrap_or(0)), "{name}: {site}");
    }
}

#[test]
fn the_peak_and_its_holders_are_those_of_pytorchs_visualiser() {
    let folder = tempfile::tempdir().expect("a folder");
    let of_cpp = tools::root().join(OF_CPP);
    let oracle =
        Command::new("python3").args(["-c", ORACLE]).args([folder.path(), &of_cpp]).output().expect("python3 runs");
    assert!(oracle.status.success(), "{}", String::from_utf8_lossy(&oracle.stderr));
    let expected: BTreeMap<String, Value> = serde_json::from_slice(&oracle.stdout).expect("JSON");
    assert_eq!(expected.len(), 33, "four histories, protocols 2 to 5, packed and not; and PyTorch's own");
    for (name, devices) in expected {
        let (gpus, least) = if name.ends_with(OF_CPP) { (1, 4) } else { (3, 6) };
        let report = reported(&folder.path().join(&name));
        let begin_ns = report["recordings"][0]["begin_unix_nano"].as_i64();
        for gpu in report["recordings"][0]["gpus"].as_array().expect("a list") {
            let (of, expected) = (&gpu["allocator"], &devices[gpu["index"].as_str().expect("an index")]);
            assert_eq!(of["peak"]["allocated_bytes"], expected["peak"], "{name}: {of}");
            assert_eq!(of["peak"]["after_events"], expected["events"], "{name}");
            let at_us =
                of["peak"]["after_ns"].as_i64().zip(begin_ns).map(|(after_ns, begin_ns)| (begin_ns + after_ns) / 1_000);
            if let Some(time_us) = expected["time_us"].as_i64() {
                assert_eq!(at_us, Some(time_us), "{name}");
            }
            let holders = of["holders"].as_array().expect("a list").iter().map(|holder| {
                let frames: Vec<&str> =
                    holder["place"]["frames"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
                (frames.join(" "), json!([holder["bytes"], holder["allocations"]]))
            });
            let holders: serde_json::Map<String, Value> = holders.collect();
            if name.ends_with(OF_CPP) {
                // Names of C++ templates are shortened.
                let sorted = |of: &serde_json::Map<String, Value>| {
                    let mut held: Vec<String> = of.values().map(Value::to_string).collect();
                    held.sort();
                    held
                };
                assert_eq!(sorted(&holders), sorted(expected["held"].as_object().expect("an object")), "{name}");
            } else {
                assert_eq!(Value::Object(holders), expected["held"], "{name}");
            }
            if of["events"] != json!(0) {
                bands_are_right_at_the_peak(of, &name, least);
            }
        }
        assert_eq!(report["recordings"][0]["gpus"].as_array().map(Vec::len), Some(gpus), "{name}");
    }
}

#[test]
fn a_report_says_who_held_memory_and_why_there_was_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let oracle = Command::new("python3").args(["-c", ORACLE]).arg(folder.path()).output().expect("python3 runs");
    assert!(oracle.status.success(), "{}", String::from_utf8_lossy(&oracle.stderr));
    let output = command().arg("report").arg(folder.path().join("1-4.pickle")).output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    for part in [
        "(PyTorch memory snapshot)",
        "held at the peak  allocations",
        "/app/train.py:",
        "No memory for 1024.00 GiB after",
        "5.00 MiB free on the GPU; asked for by",
        "were reserved and not allocated, which is enough: in pieces (fragmentation)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let page = folder.path().join("report.html");
    let made = command()
        .arg("report")
        .arg(tools::root().join("tests/data/torch/mlp_snapshot.pickle.gz"))
        .arg("-o")
        .arg(&page)
        .output();
    assert!(made.expect("it runs").status.success());
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains("train.py:14:step") && page.contains("PyTorch memory snapshot"));
}
