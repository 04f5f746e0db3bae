//! Compares the sum of everything that the daemon can be made to keep with the chart's memory limit.
//!
//! Each row is a bound of the code, taken from where it is kept, with its highest cost. Two rows are measured: the
//! daemon at rest with NVML (docs/performance.md), and making an exposition.

use super::listeners::{HEALTH_SLOTS, SLOTS};
use crate::config::Settings;
use crate::metrics::MOST_LAYERS;
use crate::web::{answers, serve};
use highwater_analysis::report::{MOST_NAME_BYTES, MOST_NAMES, MOST_TOP};
use highwater_core::detect::MOST_PHASES_BYTES;
use highwater_core::gpu;
use highwater_core::gpu::{MOST_NAMED, Workload};
use highwater_engine::intake::datagram::MOST_DATAGRAM_BYTES;
use highwater_engine::intake::split::MOST_EVENT_BYTES;
use highwater_engine::intake::{MOST_BATCHED_BYTES, MOST_KILLS_BYTES};
use highwater_engine::place::home::MOST_UNLINKED;
use highwater_engine::place::kubelet::MOST_RESPONSE_BYTES;
use highwater_engine::place::peer::{MOST_BYTES, MOST_ENVIRON_BYTES, MOST_READERS};
use highwater_engine::place::process::MOST_PROCESSES;
use highwater_engine::place::slurm;
use highwater_engine::recording::MOST_PROFILES;
use highwater_engine::recording::schema::CACHE_KIB;
use highwater_engine::workloads::{MOST_NAME_BYTES as MOST_NAME_BYTES_OF_PODS, MOST_ROWS};
use std::fmt::Write as _;

const MIB: usize = 1 << 20;
/// GPUs of a large node.
const GPUS: usize = 8;
/// The program, its heap at rest and NVML's libraries: the highest measurement on four H200s, 28.4 MiB, includes 8 MiB
/// that rows below count; the bare loop of NVML calls in C takes 20.5.
const AT_REST: usize = 26 * MIB;
/// A scrape of 2,048 phases with series: its samples, and their text while it is made. Of these, 8 MiB were measured, and each
/// phase has three samples more since then.
const EXPOSITION: usize = 9 * MIB;
/// One more sample, and its text while it is made, beside its names.
const SAMPLE: usize = 120;
/// Bytes per byte of a sample's name: in the text, each character may need an escape. The name itself is shared.
const OF_NAME: usize = 2;
/// Series of a rank's profile beside those of its layers.
const PROFILE_SERIES: usize = 8;
/// A profile in a page that is being made, as JSON and twice as text.
const PROFILE: usize = 2 << 10;
/// One of its layers, in the same three forms.
const TOP: usize = 1 << 10;
/// A layer's name in that page, beside its bytes.
const NAME: usize = 160;
/// Bytes per byte of a layer's name then: twice in the report, once as JSON, and in both texts with escapes.
const OF_LAYER_NAME: usize = 3 + 2 * OF_NAME;
/// Stack of a thread that has run, and of its reads.
const STACK: usize = 64 << 10;
/// 256 active and 256 ended findings, each with its evidence and the texts of its first and last sign; an incident for each active
/// one and 64 others, with a sentence for each kind of finding and its lists; and 512 and twice 128 counts with their subjects.
const FINDINGS: usize = 512 * 4 * 1024 + (256 + 64) * 4 * 1024 + (512 + 2 * 128) * 512;
/// State that detectors keep of one rank: room for 640 peaks of 16 bytes, 64 gaps, 32 names, four verdicts, and baselines of some
/// dozens of steps.
const OF_RANK: usize = 16 << 10;
/// A connection's task and the TCP library's state for it, without its buffers.
const CONNECTION: usize = 6 << 10;
/// The points and spans of one report with half the usual room, and its page twice: one is made at a time. A capture of 70
/// s of 8 GPUs whose memory changes with every reading took 4 MiB.
const REPORT: usize = 8 * MIB;
/// A capture's transaction in progress, without SQLite's cache.
const CAPTURE: usize = 2 * MIB;

/// A row of the table of pods, twice while a new one is made, and its two samples with the GPU's names.
const POD_ROW: usize = 2 * (MOST_NAME_BYTES_OF_PODS + 128) + 2 * (SAMPLE + OF_NAME * (MOST_NAME_BYTES_OF_PODS + 64));

/// The same of a Slurm step, whose names are short.
const SLURM_ROW: usize = 2 * (SLURM_NAMES + 128) + 2 * (SAMPLE + OF_NAME * (SLURM_NAMES + 64));
/// Job and step.
const SLURM_NAMES: usize = 2 * slurm::MOST_NAME_BYTES;
/// Findings and incidents that are kept, each with the most names of workloads.
const NAMED: usize = (512 + 256 + 64) * MOST_NAMED;

/// Every bound with its highest cost, bytes.
fn bounds(settings: &Settings) -> Vec<(&'static str, usize)> {
    let limits = settings.limits;
    let sqlite = usize::try_from(CACHE_KIB).unwrap_or(usize::MAX) << 10;
    let reads = usize::try_from(MOST_ENVIRON_BYTES).unwrap_or(usize::MAX) * 2 + STACK;
    let connection = serve::MOST_HEAD_BYTES + MOST_EVENT_BYTES.max(2 * answers::PIECE_BYTES) + CONNECTION;
    vec![
        ("program, heap at rest, NVML (measured)", AT_REST),
        ("rings (`ring.max_bytes` a GPU)", GPUS * settings.ring_max_bytes),
        ("power, utilization and activity", GPUS * gpu::most_usage_bytes()),
        ("who held memory over time", GPUS * gpu::most_breakdown_bytes()),
        ("changes of GPUs' health, and XIDs", gpu::most_change_bytes(GPUS)),
        ("times of sweeps", settings.captures.sweeps(settings.period_ns) * 20),
        ("events for captures", settings.captures.event_log().bytes),
        ("what jobs have open (`annotations.max_bytes`)", limits.bytes),
        ("what has ended (`annotations.max_ended_bytes`)", limits.ended_bytes),
        ("steps and phases for charts (a sixth of `annotations.max_ended_bytes`)", limits.trail_bytes()),
        (
            "layers (a third and two thirds of `annotations.max_ended_bytes`)",
            limits.ended_layer_bytes + limits.layer_bytes,
        ),
        ("detectors' baselines", limits.ranks * OF_RANK),
        ("phases of current steps and of steps that wait for other ranks", MOST_PHASES_BYTES),
        ("findings", FINDINGS),
        ("processes of senders", MOST_PROCESSES * (3 * MOST_BYTES + 512) + MOST_UNLINKED * 160),
        ("control groups of senders", MOST_KILLS_BYTES),
        ("reads of processes", MOST_READERS * reads),
        ("events of HTTP bodies that are still arriving", MOST_BATCHED_BYTES),
        ("HTTP connections", (SLOTS.0 + HEALTH_SLOTS.0) * connection),
        (
            "senders' connections and processes, receive buffers",
            (limits.connections + limits.processes) * 512 + 2 * MOST_DATAGRAM_BYTES,
        ),
        (
            "Slurm steps, where no kubelet is asked",
            MOST_ROWS * SLURM_ROW + NAMED * (size_of::<Workload>() + SLURM_NAMES),
        ),
        ("long answers being sent", answers::MOST_BYTES),
        ("making an exposition", EXPOSITION),
        (
            "series of layer profiles in an exposition",
            2 * MOST_LAYERS.max(limits.ranks) * (SAMPLE + 2 * OF_NAME * limits.name_bytes)
                + PROFILE_SERIES * limits.ranks * (SAMPLE + OF_NAME * limits.name_bytes),
        ),
        ("a capture being written", sqlite + CAPTURE),
        ("a capture's page being made", REPORT),
        (
            "layer profiles in that page",
            MOST_NAMES * NAME
                + MOST_NAME_BYTES * OF_LAYER_NAME
                + MOST_PROFILES * PROFILE
                + (MOST_TOP + MOST_PROFILES) * TOP,
        ),
    ]
}

/// What the chart adds to its limit where the kubelet is asked, bytes.
fn chart_adds_for_kubelet() -> usize {
    let helpers = include_str!("../../helm/highwater/templates/_helpers.tpl");
    let added = helpers
        .split("queueMebibytes\" . | int64) (ternary ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .expect("a number");
    added.parse::<usize>().expect("a number") * MIB
}

/// An answer of the kubelet that other exporters refuse. 110 pods make some 100 KB. The kubelet is the node's own, so the bound of
/// what is read is one of time rather than of memory.
const LARGE_ANSWER: usize = 4 * MIB;
/// How much more a list takes decoded, and as names by pod, beside its bytes.
const DECODED: usize = 4;

#[test]
fn a_large_answer_of_the_kubelet_and_the_pods_fit_what_the_chart_adds_for_them() {
    let of_findings = NAMED * (size_of::<Workload>() + MOST_NAME_BYTES_OF_PODS);
    let most = LARGE_ANSWER * DECODED + MOST_ROWS * POD_ROW + of_findings;
    assert!(most <= chart_adds_for_kubelet() && LARGE_ANSWER <= MOST_RESPONSE_BYTES, "{most}");
}

/// The chart's limit of memory, bytes.
fn chart_limit() -> usize {
    let values = include_str!("../../helm/highwater/values.yaml");
    let limits = values.split("\n  limits:\n").nth(1).expect("limits");
    let memory = limits.lines().find_map(|line| line.trim().strip_prefix("memory: ")).expect("a limit of memory");
    memory.strip_suffix("Mi").expect("mebibytes").parse::<usize>().expect("a number") * MIB
}

#[test]
#[allow(clippy::cast_precision_loss, reason = "mebibytes to a tenth")]
fn all_that_can_be_kept_fits_the_charts_limit() {
    let settings = Settings {
        captures: crate::capture::CaptureSettings { directory: Some("/x".into()), ..Default::default() },
        ..Settings::default()
    };
    let (bounds, mib) = (bounds(&settings), |bytes: usize| bytes as f64 / MIB as f64);
    let sum: usize = bounds.iter().map(|(_, bytes)| bytes).sum();
    let mut table = String::from(
        "# Bounds of memory\n\nA test generates this page from the limits in the code, for 8 GPUs and the default settings. If an OTLP endpoint is set\nand the queue is in memory, the requests that wait to be sent add up to 64 MiB (`otlp.queue_bytes`), and the chart adds\nthat to its limit. Where the kubelet is asked (`kubelet.socket`), the chart adds 24 MiB: for up to 1,024 rows\nof pods, and for an answer of 4 MiB while it is read. The usual one has 0.1 MiB. Up to 16 MiB are read.\nWith `compat.dcgm`, a scrape takes some 20 KiB more for each GPU or MIG instance while it is made.\n\n| what | at most (MiB) |\n|---|---|\n",
    );
    for (what, bytes) in &bounds {
        let _ = writeln!(table, "| {what} | {:.1} |", mib(*bytes));
    }
    let _ = writeln!(table, "| all together | {:.1} |\n| the chart's limit | {:.1} |", mib(sum), mib(chart_limit()));
    expect_test::expect_file!["../../docs/memory-bounds.md"].assert_eq(&table);
    assert!(sum <= chart_limit(), "{:.1} MiB", mib(sum));
}
