//! Every return code of every call, at work and while NVML is opened: what it costs its own GPU, and that it costs no other
//! anything. docs/reliability.md has the table.

use super::{GIB, Node};
use highwater::nvml;
use highwater_core::source::{CallStats, Error, Source};
use serde_json::{Value, json};
use std::path::Path;

/// Success is 0; 999 is "unknown", and 77 no code that NVML's header has.
const CODES: [u32; 32] = {
    let mut codes = [0; 32];
    let mut code = 0;
    while code < 30 {
        codes[code] = code as u32 + 1;
        code += 1;
    }
    codes[30] = 77;
    codes[31] = 999;
    codes
};
/// Codes that say that a call can never work on this GPU. It is not made again until the GPU was lost and came back.
const NEVER: [u32; 5] = [3, 4, 13, 25, 26];
/// The same for a call of the slower lanes, whose arguments are always the same.
const NEVER_IN_LANES: [u32; 6] = [2, 3, 4, 13, 25, 26];
/// Calls of the fast lane.
const FAST: [&str; 2] = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"];
/// Calls of the slower lanes.
const SLOWER: [&str; 23] = [
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
];
/// Calls for one GPU while NVML is opened, beside those of the lanes.
const OPENING: [&str; 7] = [
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceRegisterEvents",
];
/// Calls for the node.
const OF_NODE: [&str; 4] = ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion", "nvmlEventSetCreate"];

/// Two GPUs with a value for each reading; `more` is what is wrong with the first one.
fn control(more: &Value) -> Value {
    let gpu = |uuid: &str, used: u64| {
        json!({"uuid": uuid, "used": used, "reserved": 0, "utilization": 42, "memory_utilization": 7,
               "power_instant_mw": 77_000, "power_average_mw": 77_000, "nvlink": [{"tx_kib": 5, "rx_kib": 6, "replays": 1}], "fabric": [3, 0],
               "energy_mj": 1_000_000, "ecc_corrected": 4, "ecc_uncorrected": 1, "rows_corrected": 2, "rows_uncorrected": 3,
               "processes": [{"pid": 7, "used": GIB}]})
    };
    let (mut first, other) = (gpu("GPU-a", 3 * GIB), gpu("GPU-b", 5 * GIB));
    let fields = first.as_object_mut().expect("an object");
    fields.extend(more.as_object().cloned().unwrap_or_default());
    json!({"gpus": [first, other]})
}

/// Every reading of a GPU as text; `None` for one that is not known.
fn readings(source: &impl Source, gpu: usize) -> Vec<(&'static str, Option<String>)> {
    fn text<T: std::fmt::Debug>(value: Option<T>) -> Option<String> {
        value.map(|value| format!("{value:?}"))
    }
    let calls = CallStats::default();
    let (medium, slow) = (source.medium(gpu, 0, &calls), source.slow(gpu, 0, &calls));
    let (rare, pcie) = (source.rare(gpu, 0, &calls), source.pcie(gpu, 0, &calls));
    vec![
        ("used", text(source.memory_used(gpu, 0).ok())),
        ("utilization", text(medium.utilization_ratio)),
        ("memory busy", text(medium.memory_busy_ratio)),
        ("power", text(medium.power_watts)),
        ("temperature", text(medium.temperature_celsius)),
        ("SM clock", text(medium.sm_clock_hertz)),
        ("memory clock", text(medium.memory_clock_hertz)),
        ("reasons", text(medium.throttle_reasons)),
        ("corrected", text(slow.ecc_corrected)),
        ("uncorrected", text(slow.ecc_uncorrected)),
        ("rows corrected", text(slow.remapped_rows_corrected)),
        ("rows uncorrected", text(slow.remapped_rows_uncorrected)),
        ("rows pending", text(slow.row_remap_pending)),
        ("rows failed", text(slow.row_remap_failed)),
        ("recovery action", text(slow.recovery_action)),
        ("PCIe link", text(rare.pcie_link)),
        ("total", text(rare.memory_total_bytes)),
        ("reserved", text(rare.memory_reserved_bytes)),
        ("BAR1", text(rare.bar1_used_bytes)),
        ("NVLink received", text(rare.nvlink_received_bytes)),
        ("NVLink transmitted", text(rare.nvlink_transmitted_bytes)),
        ("NVLinks", text(rare.nvlinks)),
        ("NVLink replays", text(rare.nvlink_errors.replays)),
        ("NVLink recoveries", text(rare.nvlink_errors.recoveries)),
        ("NVLink checksums", text(rare.nvlink_errors.crc)),
        ("fabric", text(rare.fabric)),
        ("power limit", text(rare.power_limit_watts)),
        ("slowdown", text(rare.slowdown_celsius)),
        ("shutdown", text(rare.shutdown_celsius)),
        ("PCIe received", text(pcie.received_bytes)),
        ("PCIe transmitted", text(pcie.transmitted_bytes)),
        ("energy", text(source.energy_joules(gpu, 0, &calls))),
        ("processes", text(source.processes(gpu, 0, &calls))),
    ]
}

/// What differs from `whole`; panics if it is anything but a value that is not known.
fn lacks(
    whole: &[(&'static str, Option<String>)],
    now: &[(&'static str, Option<String>)],
    what: &str,
) -> Vec<&'static str> {
    let differing = whole.iter().zip(now).filter(|(whole, now)| whole != now);
    differing
        .map(|((name, value), (_, now))| {
            assert_eq!(*now, None, "{what}: {name} is {value:?}, or not known");
            *name
        })
        .collect()
}

fn open(library: &Path) -> nvml::Nvml {
    nvml::open(Some(library)).expect("the fake opens")
}

#[test]
fn a_code_costs_its_own_gpu_the_readings_of_its_call_and_the_others_nothing() {
    let node = Node::with(control(&json!({})));
    let library = node.control.library().to_owned();
    let healthy = open(&library);
    let whole = [0, 1].map(|gpu| readings(&healthy, gpu));
    assert!(whole.iter().flatten().all(|(_, value)| value.is_some()), "{whole:?}");
    drop(healthy);
    let mut tried = 0;
    for call in FAST.iter().chain(&SLOWER) {
        for code in CODES {
            let what = format!("{call} returns {code}");
            let source = open(&library);
            node.control.set(&control(&json!({"errors": {*call: code}})));
            // Twice: what was not supported is not asked for again.
            for _ in 0..2 {
                assert_eq!(readings(&source, 1), whole[1], "{what}: the other GPU");
                lacks(&whole[0], &readings(&source, 0), &what);
            }
            let memory = source.memory_used(0, 0);
            if *call == "nvmlDeviceGetMemoryInfo_v2" {
                match code {
                    15 | 16 | 28 | 2 | 6 => assert!(matches!(memory, Err(Error::Lost(_))), "{what}: {memory:?}"),
                    code if NEVER.contains(&code) => assert_eq!(memory, Err(Error::Unsupported), "{what}"),
                    _ => assert!(matches!(memory, Err(Error::Failed(_))), "{what}: {memory:?}"),
                }
            } else {
                assert_eq!(memory, Ok(3 * GIB), "{what}: memory is read all the same");
            }
            node.control.set(&control(&json!({})));
            // The memory call is one of the slower lanes too, which read the total.
            let is_remembered = NEVER_IN_LANES.contains(&code);
            let left = lacks(&whole[0], &readings(&source, 0), &what);
            assert!(left.is_empty() || is_remembered, "{what}: {left:?} is not read again once it answers");
            assert_eq!(source.reacquire(0), Ok(()), "{what}");
            assert_eq!(readings(&source, 0), whole[0], "{what}: after the GPU was reacquired");
            tried += 1;
        }
    }
    assert_eq!(tried, 25 * 32);
}

#[test]
fn a_code_while_nvml_is_opened_costs_its_own_gpu_at_most() {
    let node = Node::with(control(&json!({})));
    let library = node.control.library().to_owned();
    let whole = readings(&open(&library), 1);
    for call in OPENING.iter().chain(&FAST).chain(&SLOWER) {
        for code in CODES {
            let what = format!("{call} returns {code}");
            node.control.set(&control(&json!({"errors": {*call: code}})));
            let source = open(&library);
            let found: Vec<_> = source.devices().iter().map(|device| device.uuid.as_str()).collect();
            let other = found.iter().position(|uuid| *uuid == "GPU-b").unwrap_or_else(|| panic!("{what}: {found:?}"));
            assert_eq!(readings(&source, other), whole, "{what}: the other GPU");
            // It is listed, left out with the reason, or, where this process may not access it, not mentioned.
            let is_kept_back = matches!(code, 4 | 17);
            assert!(found.len() + source.skipped().len() == 2 || is_kept_back, "{what}: {:?}", source.skipped());
            assert!(source.skipped().iter().all(|skipped| !skipped.reason.is_empty()), "{what}");
        }
    }
    node.control.set(&control(&json!({})));
    assert_eq!(open(&library).devices().len(), 2);
}

#[test]
fn a_code_of_the_whole_node_is_named_and_the_next_attempt_opens() {
    let node = Node::with(control(&json!({})));
    let library = node.control.library().to_owned();
    for call in OF_NODE {
        for code in CODES {
            let what = format!("{call} returns {code}");
            let mut faulty = control(&json!({}));
            faulty["errors"] = json!({call: code});
            node.control.set(&faulty);
            match nvml::open(Some(&library)) {
                // Without a version, or events, everything else is there.
                Ok(source) => {
                    assert!(!matches!(call, "nvmlInit_v2" | "nvmlDeviceGetCount_v2"), "{what}: opened");
                    assert_eq!(source.memory_used(1, 0), Ok(5 * GIB), "{what}");
                }
                Err(error) => assert!(!error.reason.is_empty() && !error.message.is_empty(), "{what}: {error:?}"),
            }
            node.control.set(&control(&json!({})));
            assert_eq!(open(&library).devices().len(), 2, "{what}: afterwards");
        }
    }
}

/// What no GPU can say, in every reading at once.
#[test]
fn nonsense_of_one_gpu_is_no_other_gpus() {
    let node = Node::with(control(&json!({})));
    let library = node.control.library().to_owned();
    let whole = readings(&open(&library), 1);
    for most in [u64::MAX, u64::from(u32::MAX), 1 << 63, 0] {
        let low = u32::try_from(most).unwrap_or(u32::MAX);
        let nonsense = json!({"used": most, "total": most, "reserved": most, "utilization": low, "memory_utilization": low,
            "power_instant_mw": low, "power_average_mw": low, "power_limit_mw": low, "temperature": low,
            "slowdown_celsius": low, "shutdown_celsius": low, "sm_clock_mhz": low, "memory_clock_mhz": low,
            "throttle_reasons": most, "energy_mj": most, "bar1_used": most, "pcie_tx_bytes": most, "pcie_rx_bytes": most,
            "ecc_corrected": most, "ecc_uncorrected": most, "rows_corrected": low, "rows_uncorrected": low,
            "processes": [{"pid": low, "used": most}]});
        node.control.set(&control(&nonsense));
        let source = open(&library);
        // Whatever it is: there is no overflow, and the other GPU is as it was.
        readings(&source, 0);
        assert_eq!(readings(&source, 1), whole, "{most}");
    }
}
