//! Every setting: its key, its default as written in a file, its help text, and its parser.

use super::Settings;
use crate::metrics::Buckets;
use crate::web::hosts::Hosts;
use highwater_core::phases::MOST_FREE_BELOW;
use highwater_core::units::{parse_bytes, parse_duration_ns};
use std::net::SocketAddr;
use std::path::PathBuf;

/// The source that the daemon reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceSpec {
    /// The driver.
    Nvml,
    /// A simulation: a scenario file, the name of a shipped scenario, or the demo.
    Sim(Option<String>),
    /// A recording.
    Replay(PathBuf),
}

/// One setting.
pub struct Key {
    /// Dotted key.
    pub name: &'static str,
    /// The default as the example file shows it; empty for "not set".
    pub default: &'static str,
    /// Its help text.
    pub help: &'static str,
    /// Parses the text into the settings, or returns what is wrong with it.
    pub set: fn(&mut Settings, &str) -> Result<(), String>,
}

impl Key {
    /// The environment variable that sets it.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("HIGHWATER_{}", self.name.to_ascii_uppercase().replace('.', "_"))
    }
}

macro_rules! keys {
    ($($name:literal = $default:literal, $help:literal, $set:expr;)*) => {
        /// Every setting, in the order of the example file.
        pub static KEYS: &[Key] = &[$(Key { name: $name, default: $default, help: $help, set: $set }),*];
    };
}

keys! {
    "source" = "nvml", "What to read: nvml, sim, sim:SCENARIO (a file or the name of a shipped scenario), replay:PATH.",
        |s, v| { s.source = source(v)?; Ok(()) };
    "nvml_library" = "", "Path of libnvidia-ml.so.1; the loader finds it if not set.",
        |s, v| { s.nvml_library = path(v); Ok(()) };
    "listen" = "127.0.0.1:10450", "The address that HTTP listens on. On an address that is not loopback, annotations over TCP need a token.",
        |s, v| { s.listen = address(v)?; Ok(()) };
    "health.listen" = "", "A separate address for only /healthz and /readyz, such as 0.0.0.0:10451, with connections and a thread of its own and without TLS and passwords. `listen` serves them in any case.",
        |s, v| { s.health_listen = address_or_none(v)?; Ok(()) };
    "health.restart_after" = "none", "/healthz fails once NVML's library has been missing, or did not fit the driver, for this long: in a container, only a new one gets another library. `none` for never.",
        |s, v| { s.health_restart_after_ns = duration_or_none(v, 1_000_000_000, 360_000_000_000_000)?; Ok(()) };
    "web.config_file" = "", "The exporters' common web configuration file: TLS, users and passwords, a rate of requests. It is reloaded when it changes. docs/web-config.md lists what is supported.",
        |s, v| { s.web_config_file = path(v); Ok(()) };
    "web.hosts" = "", "Comma-separated names that requests may have in `Host`, beside addresses, `localhost` and the machine's name; `*` for any. If not set, other names are refused on connections to loopback addresses (against DNS rebinding) and accepted on others.",
        |s, v| { s.web_hosts = Hosts::parse(v)?; Ok(()) };
    "sampling.period" = "1ms", "Period of the fast lane: memory of all GPUs.",
        |s, v| { s.period_ns = duration(v, 50_000, 1_000_000_000)?; Ok(()) };
    "sampling.max_period" = "100ms", "The longest period that the fast lane backs off to while the driver is overloaded.",
        |s, v| { s.max_period_ns = duration(v, 50_000, 10_000_000_000)?; Ok(()) };
    "sampling.idle_period" = "100ms", "Period of the fast lane for a GPU on which no process has a context, until the first sign that one has; `none` for the full rate, as for a period that is not longer than `sampling.period`.",
        |s, v| { s.idle_period_ns = duration_or_none(v, 1_000_000, 1_000_000_000)?; Ok(()) };
    "sampling.budget" = "0.15", "Share of wall time that the fast lane may spend inside the driver before it backs off.",
        |s, v| { s.budget = ratio(v)?; Ok(()) };
    "sampling.hang_after" = "1s", "A call that takes longer is given up, and sampling continues without its GPU.",
        |s, v| { s.hang_after_ns = duration(v, 100_000_000, 600_000_000_000)?; Ok(()) };
    "sampling.medium_period" = "100ms", "Period of utilization, power, temperature, clocks and throttle reasons; one second for a GPU on which no process has a context.",
        |s, v| { s.medium_period_ns = duration(v, 10_000_000, 60_000_000_000)?; Ok(()) };
    "sampling.slow_period" = "1s", "Period of ECC and remapped rows. PCIe bytes are read every 5th turn and at least once in 5s, processes every 10th, NVLink bytes, BAR1, total memory and the limits of power and temperature every 30th.",
        |s, v| { s.slow_period_ns = duration(v, 100_000_000, 5_000_000_000)?; Ok(()) };
    "ring.retention" = "10m", "How far back samples are kept.",
        |s, v| {
            s.retention_ns = duration(v, 60_000_000_000, 86_400_000_000_000)?;
            s.limits.past_ns = s.retention_ns;
            Ok(())
        };
    "ring.max_bytes" = "2MiB", "Memory limit for the samples of one GPU; at the limit, older samples are dropped.",
        |s, v| { s.ring_max_bytes = bytes(v, 256 << 10, 1 << 30)?; Ok(()) };
    "annotations.socket" = "/run/highwater/annotations.sock", "The Unix datagram socket for annotations; `none` disables it. By default in $RUNTIME_DIRECTORY, which systemd sets, or else below $XDG_RUNTIME_DIR if that is set and the daemon does not run as root.",
        |s, v| { s.annotations_socket = path_or_none(v); Ok(()) };
    "annotations.token_file" = "", "File with the token that annotations over TCP need. Without it and `annotations.namespace_tokens` they are accepted on loopback addresses only.",
        |s, v| { s.token_file = path(v); Ok(()) };
    "annotations.namespace_tokens" = "", "Folder with a token for each Kubernetes namespace, each in a file that is called by the namespace, as a mounted Secret has them. What is sent with one belongs to its namespace, like what its pods send.",
        |s, v| { s.namespace_tokens = path(v); Ok(()) };
    "annotations.listen" = "", "The address for annotations over TCP and requests for captures, such as 0.0.0.0:10452; `listen` if not set.",
        |s, v| { s.annotations_listen = address_or_none(v)?; Ok(()) };
    "annotations.max_jobs" = "128", "The most jobs at a time; each is a label value. One sender gets at most half of this and of the other limits over all jobs.",
        |s, v| { s.limits.jobs = count(v, 1, 10_000)?; Ok(()) };
    "annotations.max_ranks" = "512", "The most ranks at a time, over all jobs.",
        |s, v| { s.limits.ranks = count(v, 1, 100_000)?; Ok(()) };
    "annotations.max_phase_names" = "32", "Different phase names of one job; each is a label value.",
        |s, v| { s.limits.phase_names = count(v, 1, 1_000)?; Ok(()) };
    "annotations.max_phase_series" = "2048", "The most phases of ranks with series, over all jobs; each has some 75 series, or 30 if there are more than 256.",
        |s, v| { s.limits.phase_series = count(v, 1, 1_000_000)?; Ok(()) };
    "annotations.max_bytes" = "12MiB", "Memory limit for what jobs make the daemon keep, without ended steps and phases.",
        |s, v| { s.limits.bytes = bytes(v, 1 << 20, 1 << 30)?; Ok(()) };
    "annotations.max_ended_bytes" = "6MiB", "Memory limit for ended steps and phases, which are kept for the API. A sixth as much, at most 16 MiB, is used for the times of steps and phases that the live page draws, a third for layers kept for captures, and two thirds for statistics and profiles of layers.",
        |s, v| { s.limits.set_ended_bytes(bytes(v, 1 << 20, 1 << 30)?); Ok(()) };
    "annotations.max_rate" = "400000", "Events per second over all senders, which share it evenly.",
        |s, v| { s.limits.events_a_second = count(v, 100, 100_000_000)?; Ok(()) };
    "annotations.silence" = "5m", "A rank that sends nothing for this long is dropped.",
        |s, v| { s.limits.silence_ns = duration(v, 1_000_000_000, 86_400_000_000_000)?; Ok(()) };
    "layers.top" = "10", "Layers of each rank's profile with metrics of their own: those with the most activations. 0 for none. All ranks together have at most 2,048, or one each if there are more ranks.",
        |s, v| { s.limits.top_layers = count(v, 0, 100)?; Ok(()) };
    "kubelet.socket" = "", "The kubelet's PodResources socket, /var/lib/kubelet/pod-resources/kubelet.sock on most nodes. It gives the GPUs of a pod whose job names none; not used if not set. docs/annotations.md lists the requirements.",
        |s, v| { s.kubelet.socket = path_or_none(v); Ok(()) };
    "kubelet.container_logs" = "/var/log/containers", "The folder with a link for each container's log; the daemon finds the pod of a process in it.",
        |s, v| { s.kubelet.container_logs = path(v).ok_or("is empty")?; Ok(()) };
    "slurm.steps" = "true", "Whether to name the Slurm step of each process that holds memory on a GPU, by its control group. Not where `kubelet.socket` is set.",
        |s, v| { s.slurm.steps = boolean(v)?; Ok(()) };
    "slurm.job_map" = "", "A folder in which Slurm's prolog names the jobs of each GPU: a file for each, called by its index or UUID, with a job's number in each line and perhaps that of its user. It is dcgm-exporter's folder (`DCGM_HPC_JOB_MAPPING_DIR`). Not used if not set, or where `kubelet.socket` is.",
        |s, v| { s.slurm.job_map = path_or_none(v); Ok(()) };
    "host.cgroups" = "/sys/fs/cgroup", "Where control groups are mounted. In them the daemon sees that the kernel killed a process of a job for want of host memory; `none` not to look.",
        |s, v| { s.cgroups = path_or_none(v); Ok(()) };
    "captures.directory" = "/var/lib/highwater/captures", "The folder for captures: the seconds around a finding, an `oom` mark or a request; `none` disables them. By default below $STATE_DIRECTORY or $XDG_STATE_HOME if one is set, and below the home directory if the daemon does not run as root.",
        |s, v| { s.captures.directory = path_or_none(v); Ok(()) };
    "captures.before" = "30s", "How far before its trigger a capture begins.",
        |s, v| { s.captures.before_ns = duration(v, 0, 600_000_000_000)?; Ok(()) };
    "captures.after" = "10s", "How far after its trigger a capture ends. Further triggers lengthen it up to six times this.",
        |s, v| { s.captures.after_ns = duration(v, 0, 600_000_000_000)?; Ok(()) };
    "captures.most_files" = "20", "Captures that are kept; the oldest is removed first. docs/recordings.md lists the shares of findings, `oom` marks and requests.",
        |s, v| { s.captures.most_files = count(v, 1, 100_000)?; Ok(()) };
    "captures.most_bytes" = "256MiB", "Size limit of all captures together; one capture may take a third.",
        |s, v| { s.captures.most_bytes = bytes(v, 4 << 20, 1 << 50)? as u64; Ok(()) };
    "captures.cooldown" = "5m", "The shortest time between two automatic captures for the same reason.",
        |s, v| { s.captures.cooldown_ns = duration(v, 0, 86_400_000_000_000)?; Ok(()) };
    "captures.asks_per_hour" = "36", "Captures that clients may request per hour, three of them at once.",
        |s, v| { s.captures.asks_per_hour = count(v, 1, 1_000_000)?; Ok(()) };
    "metrics.processes" = "false", "Whether /metrics exports the memory of single processes. They are then read in every slow turn.",
        |s, v| { s.metrics.processes = boolean(v)?; Ok(()) };
    "metrics.phase_buckets" = "fine", "The buckets of durations of steps and phases in /metrics: `fine` (61 bounds; every fourth where a node has more than 256 phases), `coarse` (every fourth), or `none`, where native histograms, sums and counts are enough.",
        |s, v| { s.metrics.phase_buckets = buckets(v)?; Ok(()) };
    "metrics.free_below" = "1GiB", "The time in which a GPU has less than this much memory free is counted, and its longest stretch; at most four sizes, separated by commas, or empty.",
        |s, v| { s.free_below = sizes(v)?; Ok(()) };
    "metrics.diagnostics" = "true", "Whether metrics for debugging the sampler are exported: durations and failures of driver calls, and its lateness. A panel and two runbooks use them.",
        |s, v| { s.metrics.diagnostics = boolean(v)?; Ok(()) };
    "compat.dcgm" = "false", "Whether /metrics has the metrics of GPUs also under the names, units and labels of NVIDIA's dcgm-exporter: docs/from-dcgm-exporter.md.",
        |s, v| { s.metrics.dcgm = boolean(v)?; Ok(()) };
    "detect.enabled" = "true", "Whether to look for causes of slow steps. docs/findings.md describes each.",
        |s, v| { s.detect.enabled = boolean(v)?; Ok(()) };
    "detect.comm_phases" = "comm", "Names of the phases in which ranks communicate, separated by commas.",
        |s, v| { s.detect.comm_phases = names(v); Ok(()) };
    "detect.data_phases" = "data", "Names of the phases in which ranks wait for their input, separated by commas.",
        |s, v| { s.detect.data_phases = names(v); Ok(()) };
    "detect.headroom" = "1GiB", "Less free memory than this is low headroom; half of it is critical.",
        |s, v| { s.detect.set_headroom(bytes(v, 16 << 20, 1 << 40)? as u64); Ok(()) };
    "detect.comm_slowdown" = "2", "Communication that takes this many times its baseline is slow.",
        |s, v| { s.detect.comm_slowdown = factor(v)?; Ok(()) };
    "detect.stall_share" = "0.3", "Share of a rank's time spent waiting for data from which it is a stall.",
        |s, v| { s.detect.stall_share = ratio(v)?; Ok(()) };
    "detect.lag" = "1.2", "A rank that computes this many times as long as its peers lags.",
        |s, v| { s.detect.lag = factor(v)?; Ok(()) };
    "detect.idle_after" = "1m", "Memory that is held for this long with nothing running is idle.",
        |s, v| { s.detect.idle_after_ns = duration(v, 1_000_000_000, 86_400_000_000_000)?; Ok(()) };
    "otlp.endpoint" = "", "The OTLP endpoint for metrics and spans, in place of OTEL_EXPORTER_OTLP_ENDPOINT; nothing is pushed if neither is set. docs/otlp.md lists the standard variables, which also apply.",
        |s, v| { s.otlp.endpoint = (!v.is_empty()).then(|| v.to_owned()); Ok(()) };
    "otlp.spans" = "all", "Which steps are pushed as traces: off, all, 1/N, findings for those with a finding, or slow:p95 for those slower than that share of their rank's steps.",
        |s, v| { s.otlp.spans = crate::export::otlp::settings::spans(v)?; Ok(()) };
    "otlp.phases" = "spans", "The form of the phases of these steps: spans below the step's, or attributes of it, which makes each step of a rank one row of a table.",
        |s, v| { s.otlp.phases = crate::export::otlp::settings::phases(v)?; Ok(()) };
    "otlp.raw" = "never", "Whether every change of memory is pushed with its own time: never, findings (from 10 s before to 10 s after each), or always.",
        |s, v| { s.otlp.raw = crate::export::otlp::settings::raw(v)?; Ok(()) };
    "otlp.queue_bytes" = "64MiB", "Size limit of the push queue; at the limit the oldest data is dropped and counted.",
        |s, v| { s.otlp.queue_bytes = bytes(v, 1 << 20, 1 << 40)?; Ok(()) };
    "otlp.queue_dir" = "", "A folder for the push queue, which then survives a restart; in memory if not set.",
        |s, v| { s.otlp.queue_dir = path(v); Ok(()) };
    "replay.speed" = "1", "How many times faster than real time a replay runs; `max` for as fast as possible.",
        |s, v| { s.replay_speed = speed(v)?; Ok(()) };
    "replay.from" = "none", "Where a replay begins in a recording of the product's own format: the time since its begin, such as 8h; none for the begin.",
        |s, v| { s.replay_part.from_ns = duration_or_none(v, 0, MOST_RECORDING_NS)?; Ok(()) };
    "replay.until" = "none", "Where it ends: the time since the recording's begin; none for the end.",
        |s, v| { s.replay_part.until_ns = duration_or_none(v, 1, MOST_RECORDING_NS)?; Ok(()) };
    "replay.shift_to_now" = "false", "Whether a replay's times are shifted so that it begins now.",
        |s, v| { s.replay_shift_to_now = boolean(v)?; Ok(()) };
}

/// Recordings that last longer are refused.
const MOST_RECORDING_NS: i64 = 31 * 86_400 * 1_000_000_000;

fn source(text: &str) -> Result<SourceSpec, String> {
    match text.split_once(':') {
        None if text == "nvml" => Ok(SourceSpec::Nvml),
        None if text == "sim" => Ok(SourceSpec::Sim(None)),
        Some(("sim", scenario)) if !scenario.is_empty() => Ok(SourceSpec::Sim(Some(scenario.into()))),
        Some(("replay", recording)) if !recording.is_empty() => Ok(SourceSpec::Replay(recording.into())),
        _ => Err("is none of nvml, sim, sim:SCENARIO, replay:PATH".into()),
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    // The one name that means the same everywhere: nothing is looked up.
    let text = text.strip_prefix("localhost:").map_or_else(|| text.to_owned(), |port| format!("127.0.0.1:{port}"));
    text.parse().map_err(|_| "is not ADDRESS:PORT, such as 127.0.0.1:10450".to_owned())
}

/// An address; `none` in a higher layer removes it.
fn address_or_none(text: &str) -> Result<Option<SocketAddr>, String> {
    (!text.is_empty() && text != "none").then(|| address(text)).transpose()
}

fn path(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| PathBuf::from(text))
}

fn buckets(text: &str) -> Result<Buckets, String> {
    match text {
        "fine" => Ok(Buckets::Fine),
        "coarse" => Ok(Buckets::Coarse),
        "none" => Ok(Buckets::None),
        _ => Err("is not fine, coarse or none".to_owned()),
    }
}

/// A path; `none` in a higher layer removes it.
fn path_or_none(text: &str) -> Option<PathBuf> {
    path(text).filter(|path| path.as_os_str() != "none")
}

fn duration(text: &str, least_ns: i64, most_ns: i64) -> Result<i64, String> {
    let duration_ns = parse_duration_ns(text).map_err(|error| error.to_string())?;
    if (least_ns..=most_ns).contains(&duration_ns) {
        return Ok(duration_ns);
    }
    let shown = |ns: i64| format!("{:?}", std::time::Duration::from_nanos(ns.unsigned_abs()));
    Err(format!("is not between {} and {}", shown(least_ns), shown(most_ns)))
}

fn duration_or_none(text: &str, least_ns: i64, most_ns: i64) -> Result<Option<i64>, String> {
    if text == "none" { Ok(None) } else { duration(text, least_ns, most_ns).map(Some) }
}

fn bytes(text: &str, least: u64, most: u64) -> Result<usize, String> {
    let bytes = parse_bytes(text).map_err(|error| error.to_string())?;
    if (least..=most).contains(&bytes) {
        return usize::try_from(bytes).map_err(|error| error.to_string());
    }
    Err(format!("is not between {least} and {most} bytes"))
}

/// Different sizes, the smallest first.
fn sizes(text: &str) -> Result<Vec<u64>, String> {
    let mut sizes = names(text)
        .iter()
        .map(|size| bytes(size, 1 << 20, 1 << 40).map(|size| size as u64))
        .collect::<Result<Vec<_>, _>>()?;
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.len() <= MOST_FREE_BELOW { Ok(sizes) } else { Err(format!("has more than {MOST_FREE_BELOW} sizes")) }
}

fn count(text: &str, least: usize, most: usize) -> Result<usize, String> {
    let count = text.parse().map_err(|_| "is not a whole number".to_owned())?;
    if (least..=most).contains(&count) { Ok(count) } else { Err(format!("is not between {least} and {most}")) }
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio: f64 = text.parse().map_err(|_| "is not a number".to_owned())?;
    if ratio > 0.0 && ratio <= 1.0 { Ok(ratio) } else { Err("is not above 0 and at most 1".into()) }
}

fn factor(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| "is not a number".to_owned())?;
    if factor > 1.0 && factor <= 1000.0 { Ok(factor) } else { Err("is not above 1 and at most 1000".into()) }
}

fn names(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn speed(text: &str) -> Result<Option<f64>, String> {
    if text == "max" {
        return Ok(None);
    }
    let speed: f64 = text.parse().map_err(|_| "is neither a number nor `max`".to_owned())?;
    if speed > 0.0 && speed.is_finite() { Ok(Some(speed)) } else { Err("is not above 0".into()) }
}

fn boolean(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| "is neither true nor false".into())
}
