//! Events that the driver reports.

use super::{EVENTUALLY, Node};
use highwater_core::source::{DriverEvent, Error, Source};
use serde_json::json;
use std::time::{Duration, Instant};

#[test]
fn an_xid_error_arrives_with_its_gpu() {
    let gpus = json!([{}, {}, {"mig": [{"uuid": "MIG-x", "gpu_instance": 4}, {"uuid": "MIG-y", "gpu_instance": 5}]}]);
    let node = Node::with(json!({"gpus": gpus}));
    let nvml = node.open();
    assert_eq!(nvml.wait_event(Duration::from_millis(5)), Ok(None));
    let xids = json!([
        {"gpu": 1, "xid": 79},
        {"gpu": 2, "xid": 31, "gpu_instance": 5, "compute_instance": 0},
        {"gpu": 2, "xid": 48},
    ]);
    node.control.set(&json!({"gpus": gpus, "xids": xids}));
    let arrived = [0; 3].map(|_| nvml.wait_event(EVENTUALLY));
    let expected = [(1, 79), (4, 31), (2, 48)].map(|(gpu, xid)| Ok(Some(DriverEvent::Xid { gpu, xid })));
    assert_eq!(arrived, expected, "the second is of the instance at position 4, the third of the whole GPU");
    assert_eq!(nvml.wait_event(Duration::from_millis(5)), Ok(None));
}

#[test]
fn a_gpu_that_came_back_reports_events_again() {
    let node = Node::with(json!({"gpus": [{}]}));
    let nvml = node.open();
    assert_eq!(nvml.wait_event(Duration::ZERO), Ok(None));
    node.control.set(&json!({"gpus": [{"generation": 1}], "xids": [{"gpu": 0, "xid": 79}]}));
    assert!(matches!(nvml.wait_event(EVENTUALLY), Err(Error::Failed(_))), "the handle of the event is not known yet");
    assert_eq!(nvml.reacquire(0), Ok(()));
    let registered = node.control.calls("nvmlDeviceRegisterEvents");
    node.control.set(&json!({"gpus": [{"generation": 1}], "xids": [{"gpu": 0, "xid": 79}, {"gpu": 0, "xid": 13}]}));
    assert_eq!(nvml.wait_event(EVENTUALLY), Ok(Some(DriverEvent::Xid { gpu: 0, xid: 13 })));
    assert_eq!(node.control.calls("nvmlDeviceRegisterEvents"), registered + 1);
}

/// NVML cannot remove a GPU from an event set: a lost one would silence all others.
#[test]
fn a_lost_gpu_silences_no_other() {
    let gpus = |lost: bool| json!([{"lost": lost}, {}]);
    let node = Node::with(json!({"gpus": gpus(false)}));
    let nvml = node.open();
    assert_eq!(nvml.wait_event(Duration::ZERO), Ok(None));
    node.control.set(&json!({"gpus": gpus(true)}));
    assert!(matches!(nvml.wait_event(Duration::ZERO), Err(Error::Failed(_))), "the loss is reported");
    let one = json!({"gpu": 1, "xid": 31});
    node.control.set(&json!({"gpus": gpus(true), "xids": [one]}));
    assert_eq!(nvml.wait_event(EVENTUALLY), Ok(Some(DriverEvent::Xid { gpu: 1, xid: 31 })));
    assert_eq!(nvml.wait_event(Duration::ZERO), Ok(None), "the loss is not reported again");
    node.control.set(&json!({"gpus": gpus(false), "xids": [one, {"gpu": 0, "xid": 13}]}));
    assert_eq!(nvml.reacquire(0), Ok(()));
    assert_eq!(nvml.wait_event(EVENTUALLY), Ok(Some(DriverEvent::Xid { gpu: 0, xid: 13 })));
    drop(nvml);
    let sets = ["nvmlEventSetCreate", "nvmlEventSetFree"].map(|name| node.control.calls(name));
    assert_eq!(sets, [2, 2]);
}

/// An event set in which NVML failed with an unknown error is unusable.
#[test]
fn a_gpu_that_spoils_the_set_is_left_out() {
    let gpus = json!([{"errors": {"nvmlDeviceRegisterEvents": 999}}, {}]);
    let node = Node::with(json!({"gpus": gpus, "xids": [{"gpu": 1, "xid": 31}]}));
    let nvml = node.open();
    assert_eq!(nvml.wait_event(EVENTUALLY), Ok(Some(DriverEvent::Xid { gpu: 1, xid: 31 })));
    let sets = ["nvmlEventSetCreate", "nvmlEventSetFree"].map(|name| node.control.calls(name));
    assert_eq!(sets, [2, 1], "the first was freed");
    // The GPU is tried again once it has been reacquired.
    node.control.set(&json!({"gpus": [{}, {}], "xids": [{"gpu": 1, "xid": 31}, {"gpu": 0, "xid": 13}]}));
    assert_eq!(nvml.reacquire(0), Ok(()));
    assert_eq!(nvml.wait_event(EVENTUALLY), Ok(Some(DriverEvent::Xid { gpu: 0, xid: 13 })));
}

#[test]
fn without_events_anywhere_the_lane_is_reported_once() {
    let none = json!({"nvmlDeviceRegisterEvents": 3});
    let node = Node::with(json!({"gpus": [{"errors": none}, {"errors": none}]}));
    let nvml = node.open();
    assert_eq!(nvml.wait_event(EVENTUALLY), Err(Error::Unsupported));
    assert_eq!(node.control.calls("nvmlEventSetFree"), 1);
    let one = Node::with(json!({"gpus": [{"errors": none}, {}]}));
    assert_eq!(one.open().wait_event(Duration::ZERO), Ok(None), "one GPU with events is enough");
}

#[test]
fn a_failing_wait_takes_its_timeout_and_is_no_busy_loop() {
    let node = Node::with(json!({"gpus": [{}]}));
    let nvml = node.open();
    node.control.set(&json!({"gpus": [{}], "errors": {"nvmlEventSetWait_v2": 999}}));
    let begin = Instant::now();
    assert!(matches!(nvml.wait_event(Duration::from_millis(20)), Err(Error::Failed(_))));
    assert!(begin.elapsed() >= Duration::from_millis(20));
}
