//! Calls that hang while NVML is opened.

use super::{EVENTUALLY, GIB, Node};
use highwater::nvml::{Nvml, Opener};
use highwater_core::source::{CallStats, OpenError, Source as _};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Much longer than a call of the fake takes, on any machine.
const PATIENCE: Duration = Duration::from_secs(2);

fn opener(node: &Node) -> Opener {
    Opener::new(Some(node.control.library().to_owned()), PATIENCE)
}

fn opened(opener: &Opener) -> Nvml {
    opener.open(&mut |_| true).expect("it is not given up").expect("it opens")
}

/// Three GPUs, of which these hang in these calls.
fn gpus(hang: [&[&str]; 3]) -> Value {
    let gpu = |n: usize| json!({"uuid": format!("GPU-{n}"), "used": (n as u64 + 1) * GIB, "hang": hang[n]});
    json!({"gpus": (0..3).map(gpu).collect::<Vec<_>>()})
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < EVENTUALLY, "never: {what}");
        std::thread::yield_now();
    }
}

/// In each call of the opening: the others open, nobody asks the GPU again until it answers, and then it is found.
#[test]
fn a_gpu_that_hangs_while_it_is_opened_costs_the_others_nothing_and_comes_back() {
    let calls = [
        ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"),
        ("nvmlDeviceGetUUID", "nvmlDeviceGetUUID"),
        ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"),
        ("nvmlDeviceGetName", "nvmlDeviceGetName"),
        ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo"),
        ("nvmlDeviceGetMigMode", "nvmlDeviceGetMigMode"),
    ];
    for (call, named) in calls {
        let node = Node::with(gpus([&[], &[call], &[]]));
        let opener = opener(&node);
        let nvml = opened(&opener);
        let found: Vec<_> = nvml.devices().iter().map(|device| device.uuid.as_str()).collect();
        assert_eq!(found, ["GPU-0", "GPU-2"], "{call}");
        assert_eq!(nvml.memory_used(1, 0), Ok(3 * GIB), "{call}");
        let skipped = nvml.skipped();
        assert_eq!((skipped.len(), skipped[0].index.as_str()), (1, "1"), "{call}");
        let says = format!("{named} has not returned for ");
        assert!(skipped[0].reason.starts_with(&says), "{call}: {}", skipped[0].reason);
        let asked = node.control.calls("nvmlDeviceGetHandleByIndex_v2");
        let begun = Instant::now();
        drop(opened(&opener));
        assert!(begun.elapsed() < PATIENCE, "{call}: what is known to hang is not waited for");
        assert_eq!(node.control.calls("nvmlDeviceGetHandleByIndex_v2"), asked + 2, "{call}: it is not asked again");
        assert!(!nvml.has_changed(&CallStats::default()), "{call}: it still hangs");
        node.control.set(&gpus([&[], &[], &[]]));
        until("it has answered", || nvml.has_changed(&CallStats::default()));
        assert_eq!(opened(&opener).devices().len(), 3, "{call}");
    }
}

#[test]
fn gpus_that_hang_together_are_waited_for_together() {
    let node = Node::with(gpus([&["nvmlDeviceGetUUID"], &["nvmlDeviceGetName"], &[]]));
    let begun = Instant::now();
    let nvml = opened(&opener(&node));
    assert!(begun.elapsed() < 4 * PATIENCE, "the first alone, then both beside each other: {:?}", begun.elapsed());
    let found: Vec<_> = nvml.devices().iter().map(|device| device.uuid.as_str()).collect();
    assert_eq!((found, nvml.skipped().len()), (vec!["GPU-2"], 2));
    node.control.set(&gpus([&[], &[], &[]]));
    let node = Node::with(gpus([&["nvmlDeviceGetUUID"], &["nvmlDeviceGetName"], &["nvmlDeviceGetMigMode"]]));
    let error = opener(&node).open(&mut |_| true).expect("not given up").expect_err("none opens");
    assert_eq!(error.reason, "no_gpus");
    for call in ["GPU 0: nvmlDeviceGetUUID has", "GPU 1: nvmlDeviceGetName has", "GPU 2: nvmlDeviceGetMigMode has"] {
        assert!(error.message.contains(call), "{call}: {}", error.message);
    }
    node.control.set(&gpus([&[], &[], &[]]));
}

#[test]
fn an_initialization_that_hangs_is_named_and_waited_for() {
    for (hangs, named) in [
        (["nvmlInit_v2", "nvmlInitWithFlags"], "nvmlInit has not returned for "),
        (["nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"], "nvmlDeviceGetCount has not returned for "),
    ] {
        let mut control = gpus([&[], &[], &[]]);
        control["hang"] = json!(hangs[..1]);
        let node = Node::with(control);
        let trouble = RefCell::new(None::<OpenError>);
        let given_up = opener(&node).open(&mut |error| {
            *trouble.borrow_mut() = error.cloned();
            error.is_none()
        });
        assert!(given_up.is_none());
        let said = trouble.take().expect("it hangs");
        assert_eq!(said.reason, "driver_hangs");
        assert!(said.message.starts_with(named), "{}", said.message);
        let opened = opener(&node).open(&mut |error| {
            if error.is_some() {
                node.control.set(&gpus([&[], &[], &[]]));
            }
            true
        });
        assert_eq!(opened.expect("not given up").expect("it opens").devices().len(), 3);
    }
}
