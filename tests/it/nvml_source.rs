//! The real NVML source, driven by a fake NVML through the same path as the real one.

#[path = "nvml_source/events.rs"]
mod events;
#[path = "nvml_source/matrix.rs"]
mod matrix;
#[path = "nvml_source/opening.rs"]
mod opening;
#[path = "nvml_source/pcie.rs"]
mod pcie;
#[path = "nvml_source/probe.rs"]
mod probe;

use crate::fake_nvml::Control;
use highwater::nvml::{self, Nvml};
use highwater_core::gpu::{Activity, Fabric, MigPlace, NvLinkErrors, NvLinks, Pcie, PcieLink};
use highwater_core::source::{CallStats, Error, OpenError, Source};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Long enough for any machine. A test that waits this long has failed.
const EVENTUALLY: Duration = Duration::from_secs(5);

/// A node whose GPUs a test can change.
struct Node {
    control: Control,
    _folder: TempDir,
}

impl Node {
    fn with(control: Value) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let node = Self { control: Control::new(folder.path()), _folder: folder };
        node.control.set(&control);
        node
    }

    fn open(&self) -> Nvml {
        nvml::open(Some(self.control.library())).expect("the fake opens")
    }

    fn refuses(&self) -> OpenError {
        nvml::open(Some(self.control.library())).expect_err("the fake refuses to open")
    }
}

#[test]
fn several_gpus_are_read_each_for_itself() {
    let node = Node::with(json!({"gpus": [
        {"used": 3 * GIB},
        {"used": 5 * GIB, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-b", "bus_id": "00000000:1B:00.0",
         "total": 80 * GIB, "reserved": 500 * MIB},
    ]}));
    let nvml = node.open();
    assert_eq!(nvml.description(), "nvml 580.159.04");
    assert_eq!([nvml.memory_used(0, 0), nvml.memory_used(1, 0)], [Ok(3 * GIB), Ok(5 * GIB)]);
    assert!(matches!(nvml.memory_used(2, 0), Err(Error::Failed(_))));
    let gpu = &nvml.devices()[1];
    assert_eq!((gpu.index.as_str(), gpu.uuid.as_str()), ("1", "GPU-b"));
    assert_eq!(gpu.name.as_deref(), Some("NVIDIA H100 80GB HBM3"));
    assert_eq!(gpu.pci_bus_id.as_deref(), Some("00000000:1B:00.0"));
    assert_eq!(gpu.driver_version.as_deref(), Some("580.159.04"));
    assert_eq!((gpu.memory_total_bytes, gpu.memory_reserved_bytes), (Some(80 * GIB), Some(500 * MIB)));
    assert_eq!((&gpu.parent_uuid, &gpu.mig_profile), (&None, &None));
}

#[test]
fn every_lane_answers_in_base_units() {
    let node = Node::with(json!({"gpus": [{
        "utilization": 42, "memory_utilization": 7, "power_instant_mw": 650_500, "temperature": 61,
        "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "throttle_reasons": 0x44, "energy_mj": 12_345_678,
        "bar1_used": 5 * MIB, "pcie_tx_bytes": 7_000_000_000_u64, "pcie_rx_bytes": 9_000_000_000_u64,
        "ecc_corrected": 4, "ecc_uncorrected": 1, "rows_corrected": 2, "rows_uncorrected": 3, "rows_pending": true,
        "recovery_action": 4, "pcie_link": [3, 8], "pcie_best": [5, 16],
    }]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    let medium = nvml.medium(0, 0, &calls);
    assert_eq!((medium.utilization_ratio, medium.memory_busy_ratio), (Some(0.42), Some(0.07)));
    assert_eq!((medium.power_watts, medium.temperature_celsius), (Some(650.5), Some(61.0)));
    assert_eq!((medium.sm_clock_hertz, medium.memory_clock_hertz), (Some(1.98e9), Some(3.201e9)));
    assert_eq!(medium.throttle_reasons, Some(0x44));
    let slow = nvml.slow(0, 0, &calls);
    let rare = nvml.rare(0, 0, &calls);
    assert_eq!((rare.memory_reserved_bytes, rare.bar1_used_bytes), (Some(615 * MIB), Some(5 * MIB)));
    assert_eq!(nvml.energy_joules(0, 0, &calls), Some(12_345.678));
    let pcie = Pcie { received_bytes: Some(9_000_000_000), transmitted_bytes: Some(7_000_000_000) };
    assert_eq!(nvml.pcie(0, 0, &calls), pcie);
    assert_eq!((slow.ecc_corrected, slow.ecc_uncorrected), (Some(4), Some(1)));
    assert_eq!((slow.remapped_rows_corrected, slow.remapped_rows_uncorrected), (Some(2), Some(3)));
    assert_eq!(
        (slow.row_remap_pending, slow.row_remap_failed, slow.recovery_action),
        (Some(true), Some(false), Some(4))
    );
    assert_eq!(rare.pcie_link, Some(PcieLink { generation: 3, width: 8, max_generation: 5, max_width: 16 }));
    assert_eq!(nvml.processes(0, 0, &calls), Some(Vec::new()));
    let rare = nvml.rare(0, 0, &calls);
    assert_eq!((rare.nvlink_received_bytes, rare.nvlink_transmitted_bytes), (None, None), "this GPU has no NVLink");
}

#[test]
fn nvlinks_are_read_one_by_one_and_their_errors_as_a_sum() {
    let link = |is_down: bool| json!({"is_down": is_down, "replays": 2, "recoveries": 1, "crc": 100});
    let node = Node::with(json!({"gpus": [
        {"nvlink": [link(false), link(true), link(false)], "fabric": [3, 0]},
        {"nvlink": [link(false)], "fabric": [2, 0], "field_errors": {"161": 3}},
        {"mig": [{"uuid": "MIG-x"}], "nvlink": [link(false)]},
    ]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    let rare = nvml.rare(0, 0, &calls);
    assert_eq!(rare.nvlinks, Some(NvLinks { present: 0b111, up: 0b101 }));
    assert_eq!(rare.nvlink_errors, NvLinkErrors { replays: Some(6), recoveries: Some(3), crc: Some(300) });
    assert_eq!(rare.fabric, Some(Fabric { state: 3, status: 0 }));
    let rare = nvml.rare(1, 0, &calls);
    assert_eq!(rare.nvlink_errors, NvLinkErrors { replays: None, recoveries: Some(1), crc: Some(100) });
    assert_eq!(
        (rare.nvlinks, rare.fabric),
        (Some(NvLinks { present: 1, up: 1 }), Some(Fabric { state: 2, status: 0 }))
    );
    let [parent, instance] = [2, 3].map(|gpu| nvml.rare(gpu, 0, &calls));
    assert_eq!((parent.nvlinks.map(|links| links.counts()), parent.fabric), (Some((1, 0)), None), "no fabric");
    assert_eq!((instance.nvlinks, instance.nvlink_errors), (None, NvLinkErrors::default()));
}

#[test]
fn limits_are_those_that_the_gpu_reports() {
    let node = Node::with(json!({"gpus": [
        {"power_limit_mw": 650_500, "slowdown_celsius": 87, "shutdown_celsius": 92, "mig": [{"uuid": "MIG-x"}]},
        // A limit of 0 is a driver that does not know it.
        {"power_limit_mw": 0, "slowdown_celsius": 0, "shutdown_celsius": null},
    ]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    let limits = |gpu| {
        let rare = nvml.rare(gpu, 0, &calls);
        [rare.power_limit_watts, rare.slowdown_celsius, rare.shutdown_celsius]
    };
    assert_eq!(limits(0), [Some(650.5), Some(87.0), Some(92.0)]);
    assert_eq!(limits(1), [None; 3], "they are the whole GPU's, so a MIG instance has none");
    assert_eq!(limits(2), [None; 3]);
    node.control.set(&json!({"gpus": [{"power_limit_mw": 400_000, "mig": [{"uuid": "MIG-x"}]}, {}]}));
    assert_eq!(limits(0)[0], Some(400.0), "an operator may change it");
}

#[test]
fn limits_that_are_not_supported_are_asked_for_once() {
    let node =
        Node::with(json!({"gpus": [{"shutdown_celsius": null, "errors": {"nvmlDeviceGetEnforcedPowerLimit": 3}}]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    for _ in 0..5 {
        let rare = nvml.rare(0, 0, &calls);
        assert_eq!((rare.power_limit_watts, rare.shutdown_celsius), (None, None));
        assert_eq!(rare.slowdown_celsius, Some(89.0), "the other threshold is still read");
    }
    assert_eq!(node.control.calls("nvmlDeviceGetEnforcedPowerLimit"), 1);
    assert_eq!(node.control.calls("nvmlDeviceGetTemperatureThreshold"), 5 + 1);
    assert_eq!(calls.failures(highwater_core::source::Call::Limits), 0, "an unsupported call is not a failure");
}

#[test]
fn nvlink_counters_are_of_all_links_and_in_bytes() {
    let node = Node::with(json!({"gpus": [{"nvlink": [{"tx_kib": 100, "rx_kib": 7}, {"tx_kib": 50, "rx_kib": 1}]}]}));
    let slow = node.open().rare(0, 0, &CallStats::default());
    assert_eq!(slow.nvlink_transmitted_bytes, Some(150 * 1024));
    assert_eq!(slow.nvlink_received_bytes, Some(8 * 1024));
}

#[test]
fn a_pcie_counter_of_32_bits_is_not_available_rather_than_wrong() {
    let node = Node::with(json!({"gpus": [{"pcie_narrow": true}]}));
    let nvml = node.open();
    for _ in 0..3 {
        assert_eq!(nvml.pcie(0, 0, &CallStats::default()), Pcie::default());
    }
    assert_eq!(node.control.calls("field:197"), 1);
}

#[test]
fn activity_is_of_the_time_between_two_samples_and_an_idle_gpu_costs_none() {
    let gpm = json!({"sm": 94, "occupancy": 15, "tensor": 7, "dram": 10});
    let node = Node::with(
        json!({"gpus": [{"utilization": 50, "gpm": gpm}, {"utilization": 0, "gpm": gpm}, {"utilization": 50}]}),
    );
    let (nvml, calls) = (node.open(), CallStats::default());
    let at = |gpu, ms: i64| nvml.medium(gpu, ms * 1_000_000, &calls).activity;
    let whole = Activity {
        sm_active_ratio: Some(0.94),
        sm_occupancy_ratio: Some(0.15),
        tensor_active_ratio: Some(0.07),
        dram_active_ratio: Some(0.1),
    };
    assert_eq!([0, 400, 500, 900].map(|ms| at(0, ms)), [Activity::default(), Activity::default(), whole, whole]);
    assert_eq!(node.control.calls("nvmlGpmSampleGet"), 2, "every fifth turn");
    assert_eq!(at(0, 5_000), Activity::default(), "a pause begins another stretch");
    assert_eq!(at(0, 5_500), whole);
    assert_eq!([0, 500, 900].map(|ms| at(1, ms)), [Activity::default(), Activity::NONE, Activity::NONE], "it has GPM");
    node.control.set(&json!({"gpus": [{"utilization": 0, "gpm": gpm}, {}, {"utilization": 50}]}));
    let before = node.control.calls("nvmlGpmSampleGet");
    assert_eq!([6_000, 6_500].map(|ms| at(0, ms)), [Activity::NONE; 2]);
    assert_eq!(node.control.calls("nvmlGpmSampleGet"), before);
    assert_eq!([0, 500, 900].map(|ms| at(2, ms)), [Activity::default(); 3]);
    assert_eq!(node.control.calls("nvmlGpmQueryDeviceSupport"), 3, "each GPU once");
}

#[test]
fn mig_instances_are_devices_of_their_own() {
    let node = Node::with(json!({"gpus": [
        {"uuid": "GPU-a", "used": 9 * GIB, "processes": [], "mig": [
            {"uuid": "MIG-x", "name": "NVIDIA H200 MIG 1g.18gb", "used": 2 * GIB, "gpu_instance": 7,
             "processes": [{"pid": 70, "used": GIB}]},
            null,
            {"uuid": "MIG-y", "name": "NVIDIA H200", "used": 4 * GIB, "total": 35 * GIB, "gpu_instance": 3,
             "profile_id": 14, "start": 4, "gpu_slices": 2, "compute_slices": 2, "processes": [{"pid": 30, "used": null}]},
        ]},
        {"uuid": "GPU-b", "used": GIB},
    ]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    let listed: Vec<_> = nvml.devices().iter().map(|d| (d.index.as_str(), d.uuid.as_str())).collect();
    assert_eq!(listed, [("0", "GPU-a"), ("0:0", "MIG-x"), ("0:2", "MIG-y"), ("1", "GPU-b")]);
    let parents: Vec<_> = nvml.devices().iter().map(|device| device.parent_uuid.as_deref()).collect();
    assert_eq!(parents, [None, Some("GPU-a"), Some("GPU-a"), None]);
    let profiles: Vec<_> = nvml.devices().iter().map(|device| device.mig_profile.as_deref()).collect();
    assert_eq!(profiles, [None, Some("1g.18gb"), Some("2g.35gb"), None]);
    let places: Vec<_> = nvml.devices().iter().map(|device| device.mig_place).collect();
    let place = |profile, start| Some(MigPlace { profile, start });
    assert_eq!(places, [None, place(19, 0), place(14, 4), None]);
    let used: Vec<_> = (0..4).map(|gpu| nvml.memory_used(gpu, 0)).collect();
    assert_eq!(used, [Ok(9 * GIB), Ok(2 * GIB), Ok(4 * GIB), Ok(GIB)]);
    let pids = |gpu| -> Vec<u32> { nvml.processes(gpu, 0, &calls).into_iter().flatten().map(|p| p.pid).collect() };
    assert_eq!([pids(0), pids(1), pids(2), pids(3)], [vec![30, 70], vec![70], vec![30], vec![]]);
}

/// Privileged processes alone may ask for them. Without them an instance is read like any other.
#[test]
fn a_user_who_may_not_ask_for_places_has_none() {
    const NO_PERMISSION: u32 = 4;
    let node = Node::with(json!({"gpus": [
        {"mig": [{"uuid": "MIG-x", "used": GIB}], "errors": {"nvmlDeviceGetGpuInstanceById": NO_PERMISSION}},
    ]}));
    let nvml = node.open();
    assert_eq!((nvml.devices()[1].mig_place, nvml.memory_used(1, 0)), (None, Ok(GIB)));
}

#[test]
fn what_belongs_to_the_whole_gpu_is_not_asked_of_an_instance() {
    let node = Node::with(json!({"gpus": [{"mig": [{"uuid": "MIG-x"}]}]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    assert_eq!(nvml.medium(1, 0, &calls), Default::default());
    assert_eq!(nvml.energy_joules(1, 0, &calls), None);
    assert_eq!(node.control.calls("nvmlDeviceGetTotalEnergyConsumption"), 0);
    assert_eq!(node.control.calls("nvmlDeviceGetUtilizationRates"), 0);
    assert!(nvml.medium(0, 0, &calls).power_watts.is_some());
}

#[test]
fn an_unsupported_call_is_asked_once() {
    let node = Node::with(json!({"gpus": [{
        "errors": {"nvmlDeviceGetTemperature": 3, "nvmlDeviceGetTotalEnergyConsumption": 13,
                   "nvmlDeviceGetGraphicsRunningProcesses_v3": 4, "nvmlDeviceGetBAR1MemoryInfo": 2},
        "field_errors": {"138": 3, "139": 3},
        "processes": [{"pid": 9, "used": MIB}],
    }]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    for _ in 0..5 {
        let (medium, processes) = (nvml.medium(0, 0, &calls), nvml.processes(0, 0, &calls));
        let energy_joules = nvml.energy_joules(0, 0, &calls);
        assert_eq!(
            (medium.temperature_celsius, energy_joules, nvml.rare(0, 0, &calls).bar1_used_bytes),
            (None, None, None)
        );
        assert!(medium.utilization_ratio.is_some(), "the other calls go on");
        assert_eq!(processes.map(|processes| processes.len()), Some(1), "the other list is enough");
    }
    for call in [
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetBAR1MemoryInfo",
        "field:138",
    ] {
        assert_eq!(node.control.calls(call), 1, "{call}");
    }
    assert_eq!(node.control.calls("nvmlDeviceGetUtilizationRates"), 5);
    assert_eq!(calls.failures(highwater_core::source::Call::Temperature), 0, "an unsupported call is not a failure");
}

#[test]
fn a_call_that_fails_is_counted_and_asked_again() {
    let node = Node::with(json!({"gpus": [{"errors": {"nvmlDeviceGetTemperature": 999}}]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    assert_eq!(nvml.medium(0, 0, &calls).temperature_celsius, None);
    assert_eq!(calls.failures(highwater_core::source::Call::Temperature), 1);
    node.control.set(&json!({"gpus": [{"temperature": 44}]}));
    assert_eq!(nvml.medium(0, 0, &calls).temperature_celsius, Some(44.0));
}

#[test]
fn a_process_list_that_is_half_known_is_not_reported() {
    let gpu = json!([{"pid": 9, "used": MIB}]);
    let node =
        Node::with(json!({"gpus": [{"processes": gpu, "errors": {"nvmlDeviceGetComputeRunningProcesses_v3": 999}}]}));
    assert_eq!(node.open().processes(0, 0, &CallStats::default()), None);
}

#[test]
fn power_falls_back_to_the_average_and_says_so() {
    let node = Node::with(json!({"gpus": [
        {"power_instant_mw": 1000, "power_average_mw": 2000},
        {"power_instant_mw": 1000, "power_average_mw": 2000, "field_errors": {"186": 3}},
    ]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    assert_eq!([nvml.power_is_instant(0), nvml.power_is_instant(1)], [true, false]);
    assert_eq!([0, 1].map(|gpu| nvml.medium(gpu, 0, &calls).power_watts), [Some(1.0), Some(2.0)]);
    assert_eq!(node.control.calls("nvmlDeviceGetPowerUsage"), 1);
}

#[test]
fn an_old_driver_has_one_memory_call_and_the_description_says_so() {
    let old = json!({"nvmlDeviceGetMemoryInfo_v2": 13});
    let node = Node::with(json!({"gpus": [{"used": GIB, "reserved": 600 * MIB, "errors": old}]}));
    let nvml = node.open();
    let asked = node.control.calls("nvmlDeviceGetMemoryInfo_v2");
    assert_eq!(
        nvml.memory_used(0, 0),
        Ok(GIB + 600 * MIB),
        "the old call counts the reserve, and nothing is subtracted"
    );
    assert_eq!(nvml.devices()[0].memory_reserved_bytes, None);
    assert!(!nvml.used_excludes_reserve(0));
    assert!(nvml.description().contains("used counts the driver's reserve"), "{}", nvml.description());
    assert_eq!(node.control.calls("nvmlDeviceGetMemoryInfo_v2"), asked, "decided at the start, not at each call");
}

#[test]
fn a_lost_gpu_costs_no_other_and_comes_back() {
    let gpus = |lost: bool, generation: u32| json!({"gpus": [{"used": GIB}, {"used": 2 * GIB, "lost": lost, "generation": generation}]});
    let node = Node::with(gpus(false, 0));
    let nvml = node.open();
    assert_eq!(nvml.memory_used(1, 0), Ok(2 * GIB));
    node.control.set(&gpus(true, 0));
    assert!(matches!(nvml.memory_used(1, 0), Err(Error::Lost(_))));
    assert!(matches!(nvml.reacquire(1), Err(Error::Lost(_))));
    assert_eq!(nvml.memory_used(0, 0), Ok(GIB));
    // After a reset the old handle stays dead: only a new one can read.
    node.control.set(&gpus(false, 1));
    assert!(matches!(nvml.memory_used(1, 0), Err(Error::Lost(_))));
    assert_eq!(nvml.reacquire(1), Ok(()));
    assert_eq!(nvml.memory_used(1, 0), Ok(2 * GIB));
}

#[test]
fn a_gpu_that_came_back_is_asked_everything_again() {
    let node = Node::with(json!({"gpus": [{"errors": {"nvmlDeviceGetTemperature": 3}, "field_errors": {"186": 3}}]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    assert_eq!(nvml.medium(0, 0, &calls).temperature_celsius, None);
    node.control.set(&json!({"gpus": [{"generation": 1, "temperature": 50}]}));
    assert_eq!(nvml.medium(0, 0, &calls).temperature_celsius, None);
    assert_eq!(nvml.reacquire(0), Ok(()));
    assert_eq!(nvml.medium(0, 0, &calls).temperature_celsius, Some(50.0));
    assert!(nvml.power_is_instant(0));
}

#[test]
fn a_reset_that_is_required_and_an_instance_that_was_destroyed_are_losses() {
    let node = Node::with(json!({"gpus": [{"mig": [{"uuid": "MIG-x"}]}]}));
    let nvml = node.open();
    node.control.set(&json!({"gpus": [{"errors": {"nvmlDeviceGetMemoryInfo_v2": 16}, "mig": [null]}]}));
    assert!(matches!(nvml.memory_used(0, 0), Err(Error::Lost(_))));
    assert!(matches!(nvml.memory_used(1, 0), Err(Error::Lost(_))));
    assert!(matches!(nvml.reacquire(1), Err(Error::Lost(_))));
}

#[test]
fn a_hung_gpu_holds_its_own_call_and_no_other() {
    let node = Node::with(json!({"gpus": [{"used": GIB}, {"used": 2 * GIB}]}));
    let nvml = node.open();
    node.control.set(&json!({"gpus": [{"used": GIB, "hang": ["nvmlDeviceGetMemoryInfo_v2"]}, {"used": 2 * GIB}]}));
    let asked = || node.control.calls("nvmlDeviceGetMemoryInfo_v2");
    let (before, returned) = (asked(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| {
            let used = nvml.memory_used(0, 0);
            returned.store(true, Ordering::Release);
            used
        });
        while asked() == before {
            std::thread::yield_now();
        }
        assert_eq!(nvml.memory_used(1, 0), Ok(2 * GIB));
        assert_eq!(nvml.medium(1, 0, &CallStats::default()).temperature_celsius, Some(30.0));
        assert!(!returned.load(Ordering::Acquire));
        node.control.set(&json!({"gpus": [{"used": GIB}, {"used": 2 * GIB}]}));
        assert_eq!(hung.join().ok(), Some(Ok(GIB)));
    });
}

#[test]
fn one_bad_gpu_of_several_is_left_out_and_named() {
    let node = Node::with(json!({"gpus": [
        {"used": GIB}, {"errors": {"nvmlDeviceGetHandleByIndex_v2": 999}}, {"used": 3 * GIB, "errors": {"nvmlDeviceGetName": 999}},
    ]}));
    let nvml = node.open();
    let indexes: Vec<_> = nvml.devices().iter().map(|device| device.index.as_str()).collect();
    assert_eq!(indexes, ["0", "2"], "the others keep their own indexes");
    assert_eq!(nvml.memory_used(1, 0), Ok(3 * GIB));
    assert_eq!(nvml.devices()[1].name, None, "a GPU whose name is not known is listed");
    assert_eq!(nvml.skipped().len(), 1);
    assert_eq!(nvml.skipped()[0].index, "1");
    assert!(nvml.skipped()[0].reason.contains("UNKNOWN"), "{}", nvml.skipped()[0].reason);
}

#[test]
fn a_gpu_that_this_process_is_kept_from_is_left_out_and_not_reported_as_down() {
    for code in [4, 17] {
        let kept_back = json!({"errors": {"nvmlDeviceGetHandleByIndex_v2": code}});
        let node = Node::with(json!({"gpus": [{"used": GIB}, kept_back]}));
        let nvml = node.open();
        assert_eq!((nvml.devices().len(), nvml.skipped()), (1, &[][..]));
        let node = Node::with(json!({"gpus": [kept_back]}));
        let error = nvml::open(Some(node.control.library())).expect_err("nothing is left");
        assert!(error.message.contains("can open none. GPU 0:"), "{}", error.message);
    }
}

#[test]
fn devices_differ_where_others_are_shown_and_not_where_a_gpu_does_not_answer() {
    let control = |mig: Value, errors: Value| json!({"gpus": [{"uuid": "GPU-a", "mig": mig, "errors": errors}, {"uuid": "GPU-b", "used": GIB}]});
    let (one, none) = (json!([{"uuid": "MIG-x"}, null]), json!({}));
    let node = Node::with(control(one.clone(), none.clone()));
    let nvml = node.open();
    let differ = |mig: Value, errors: Value| {
        node.control.set(&control(mig, errors));
        nvml.has_changed(&CallStats::default())
    };
    assert!(!differ(one.clone(), none.clone()));
    assert!(differ(json!([{"uuid": "MIG-x"}, {"uuid": "MIG-y"}]), none.clone()), "one more");
    assert!(differ(json!([null, {"uuid": "MIG-y"}]), none.clone()), "another");
    assert!(differ(json!([null, null]), none), "one less");
    for function in ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"] {
        assert!(
            !differ(one.clone(), json!({function: 15})),
            "{function} fails: the GPU is lost, and counts as unchanged"
        );
    }
    assert!(!differ(one, json!({"nvmlDeviceGetHandleByIndex_v2": 15})), "lost");
}

#[test]
fn a_gpu_that_is_lost_at_the_start_is_listed_where_its_name_is_known() {
    let node = Node::with(json!({"gpus": [{"uuid": "GPU-a", "errors": {"nvmlDeviceGetMemoryInfo_v2": 15}}]}));
    let nvml = node.open();
    assert_eq!(nvml.devices()[0].uuid, "GPU-a");
    assert_eq!(nvml.devices()[0].memory_total_bytes, None);
    assert!(matches!(nvml.memory_used(0, 0), Err(Error::Lost(_))));
    assert!(matches!(nvml.reacquire(0), Err(Error::Lost(_))), "a handle alone is not enough");
    node.control.set(&json!({"gpus": [{"uuid": "GPU-a", "used": GIB}]}));
    assert_eq!(nvml.reacquire(0), Ok(()));
    assert_eq!(nvml.memory_used(0, 0), Ok(GIB));
}

#[test]
fn a_missing_library_shows_what_to_do() {
    let missing = std::path::Path::new("/nonexistent/libnvidia-ml.so.1");
    let error = nvml::open(Some(missing)).expect_err("there is no such library");
    assert_eq!(error.reason, "library_missing");
    assert!(error.message.contains("/nonexistent/libnvidia-ml.so.1"), "{}", error.message);
}

#[test]
fn a_library_that_is_not_nvml_is_distinguished() {
    let error = nvml::open(Some(std::path::Path::new("libc.so.6"))).expect_err("the C library is not NVML");
    assert_eq!(error.reason, "init_failed");
    assert!(error.message.contains("not an NVML library"), "{}", error.message);
}

#[test]
fn each_refusal_at_the_start_has_its_reason_and_leaves_nothing_open() {
    for (code, reason) in
        [(18, "driver_mismatch"), (9, "driver_not_loaded"), (4, "no_permission"), (999, "init_failed")]
    {
        let node = Node::with(json!({"errors": {"nvmlInit_v2": code}}));
        let error = node.refuses();
        assert_eq!(error.reason, reason);
        assert!(error.message.contains("To fix it"), "{}", error.message);
    }
    let empty = Node::with(json!({"gpus": []}));
    assert_eq!(empty.refuses().reason, "no_gpus");
    assert_eq!(empty.control.calls("nvmlShutdown"), 1);
    let bad = Node::with(json!({"gpus": [{"errors": {"nvmlDeviceGetHandleByIndex_v2": 17}}]}));
    let error = bad.refuses();
    assert_eq!(error.reason, "no_gpus");
    assert!(error.message.contains("GPU 0: the operating system"), "{}", error.message);
}

#[test]
fn processes_of_both_kinds_are_merged_and_unknown_memory_stays_unknown() {
    let node = Node::with(json!({"gpus": [{"processes": [
        {"pid": 300, "used": 3 * GIB, "graphics": true},
        {"pid": 100, "used": null},
        {"pid": 200, "used": 0, "compute": false, "graphics": true},
    ]}]}));
    let processes = node.open().processes(0, 0, &CallStats::default()).expect("a list");
    let listed: Vec<_> = processes.iter().map(|process| (process.pid, process.used_bytes)).collect();
    assert_eq!(listed, [(100, None), (200, None), (300, Some(3 * GIB))], "a context takes memory: 0 means unknown");
}

/// This holds also if NVML writes eight bytes more per process than the header of that version declares.
#[test]
fn processes_are_all_listed_however_many_and_long_they_are() {
    let cases =
        [(0, false, 1), (1, false, 1), (0, true, 1), (1, true, 1), (64, true, 1), (500, false, 2), (500, true, 2)];
    for (count, long, calls) in cases {
        let processes: Vec<Value> = (1..=count).map(|pid| json!({"pid": pid, "used": pid * MIB})).collect();
        let node = Node::with(json!({
            "driver_version": if long { "535.54.03" } else { "580.159.04" },
            "gpus": [{"processes": processes, "long_processes": long}],
        }));
        let listed = node.open().processes(0, 0, &CallStats::default()).expect("a list");
        let wanted = (1..=count).map(|pid| (u32::try_from(pid).expect("few"), Some(pid * MIB)));
        assert!(
            listed.iter().map(|process| (process.pid, process.used_bytes)).eq(wanted),
            "{count} {long}: {listed:?}"
        );
        assert_eq!(node.control.calls("nvmlDeviceGetComputeRunningProcesses_v3"), calls);
    }
}

#[test]
fn closing_gives_everything_back() {
    let node = Node::with(json!({"gpus": [{}]}));
    let nvml = node.open();
    assert_eq!(nvml.wait_event(Duration::ZERO), Ok(None), "the first wait opens the set");
    drop(nvml);
    let calls = |name| node.control.calls(name);
    assert_eq!((calls("nvmlEventSetCreate"), calls("nvmlEventSetFree")), (1, 1));
    assert_eq!((calls("nvmlInit_v2"), calls("nvmlShutdown")), (1, 1));
    // It can be opened again, with the same library.
    assert_eq!(node.open().devices().len(), 1);
}

#[test]
fn the_fakes_memory_follows_its_curve() {
    let far = 1e9;
    let node = Node::with(json!({"gpus": [
        {"used": [{"at_ms": 0, "used": GIB}, {"at_ms": far, "used": 0}]},
        {"used": {"from": 5, "step": 1, "every_ms": far, "steps": null}},
    ]}));
    let nvml = node.open();
    assert_eq!([nvml.memory_used(0, 0), nvml.memory_used(1, 0)], [Ok(GIB), Ok(5)]);
}

#[test]
fn the_fake_refuses_a_control_file_with_a_typing_error() {
    let node = Node::with(json!({"gpus": [{}]}));
    for wrong in [
        json!({"gpsu": []}),
        json!({"gpus": [{"usde": 1}]}),
        json!({"gpus": [{"errors": {"nvmlDeviceGetMemory": 3}}]}),
        json!({"gpus": [{"mig": [{"uid": "MIG-x"}]}]}),
        json!({"hang": ["nvmlShutDown"]}),
    ] {
        assert!(!node.control.accepts(&wrong), "{wrong}");
    }
    assert!(node.control.accepts(&json!({"gpus": [{"used": 7}]})));
    assert_eq!(node.open().memory_used(0, 0), Ok(7));
}

#[test]
fn a_control_file_that_changes_is_seen_at_its_next_use() {
    let node = Node::with(json!({"gpus": [{"used": 1}]}));
    let nvml = node.open();
    assert_eq!(nvml.memory_used(0, 0), Ok(1));
    node.control.put(&json!({"gpus": [{"used": 2}]}));
    let begin = Instant::now();
    while nvml.memory_used(0, 0) != Ok(2) {
        assert!(begin.elapsed() < EVENTUALLY, "the fake does not read its file again");
    }
}
