//! Settings: defaults < file < environment < flags, through the `config` crate.
//!
//! Enters: a TOML or YAML file, `HIGHWATER_*` variables, flags. Leaves: [`Settings`], or every fault at once, each with
//! its key and where it was set. Invariant: a key that is not in [`KEYS`] is an error.

mod keys;
mod load;
mod locate;
mod yaml;

pub use keys::{KEYS, Key, SourceSpec};
pub use load::{Fault, Faults, SettingLayers, load};

use crate::capture;
use crate::export::otlp::settings as otlp;
use crate::metrics::Choice;
use crate::web::hosts::Hosts;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::jobs::Limits;
use highwater_core::phases::FREE_BELOW;
use highwater_core::{detect, ring};
use highwater_engine::node::Periods;
use highwater_engine::offline;
use highwater_engine::place::{kubelet, slurm};
use highwater_engine::recording::Part;
use std::net::SocketAddr;
use std::path::PathBuf;

/// All settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The source to read.
    pub source: SourceSpec,
    /// NVML's library; the loader's `libnvidia-ml.so.1` if not set.
    pub nvml_library: Option<PathBuf>,
    /// The address that HTTP listens on.
    pub listen: SocketAddr,
    /// A separate address for only the probes; `None` for none.
    pub health_listen: Option<SocketAddr>,
    /// `health.restart_after`, nanoseconds.
    pub health_restart_after_ns: Option<i64>,
    /// The fast lane's period, nanoseconds.
    pub period_ns: i64,
    /// The longest period that it backs off to, nanoseconds.
    pub max_period_ns: i64,
    /// The period of GPUs on which nothing runs, nanoseconds; `None` for the full rate.
    pub idle_period_ns: Option<i64>,
    /// Share of wall time that sweeps may take.
    pub budget: f64,
    /// How long a call may take before sampling continues without its GPU, nanoseconds.
    pub hang_after_ns: i64,
    /// The medium lane's period, nanoseconds.
    pub medium_period_ns: i64,
    /// The slow lane's period, nanoseconds.
    pub slow_period_ns: i64,
    /// How far back the ring keeps samples, nanoseconds.
    pub retention_ns: i64,
    /// The largest size of the ring of one GPU, bytes.
    pub ring_max_bytes: usize,
    /// The annotation socket; `None` for none.
    pub annotations_socket: Option<PathBuf>,
    /// The file with the token that annotations over TCP need.
    pub token_file: Option<PathBuf>,
    /// The folder with a token for each Kubernetes namespace.
    pub namespace_tokens: Option<PathBuf>,
    /// A separate address for annotations over TCP; `None` for `listen`.
    pub annotations_listen: Option<SocketAddr>,
    /// The exporters' common web configuration file.
    pub web_config_file: Option<PathBuf>,
    /// The names that requests may have in `Host`.
    pub web_hosts: Hosts,
    /// Limits on what jobs send.
    pub limits: Limits,
    /// How to ask the kubelet for the GPUs of pods.
    pub kubelet: kubelet::KubeletSettings,
    /// How to find Slurm's jobs, where no kubelet is asked.
    pub slurm: slurm::SlurmSettings,
    /// Where control groups are mounted; `None` to read none.
    pub cgroups: Option<PathBuf>,
    /// How captures are taken and kept.
    pub captures: capture::CaptureSettings,
    /// The time with fewer free bytes than each of these is counted.
    pub free_below: Vec<u64>,
    /// Which metrics are exported.
    pub metrics: Choice,
    /// Thresholds for findings.
    pub detect: detect::Settings,
    /// The speed of a replay: 1 is real time, 2 is twice as fast; `None` for as fast as possible.
    pub replay_speed: Option<f64>,
    /// Which part of a recording is replayed.
    pub replay_part: Part,
    /// Whether a replay's times are shifted to now.
    pub replay_shift_to_now: bool,
    /// The OTLP keys.
    pub otlp: otlp::Keys,
    /// The result of those keys and the standard variables; `None` if nothing is exported.
    pub otlp_export: Option<otlp::OtlpSettings>,
}

impl Default for Settings {
    fn default() -> Self {
        let offline::Settings { periods, ring, limits, detect, without_counters: _ } = offline::Settings::default();
        Self {
            source: SourceSpec::Nvml,
            nvml_library: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 10450)),
            health_listen: None,
            health_restart_after_ns: None,
            period_ns: periods.fast_ns,
            max_period_ns: 100 * MILLISECOND_NS,
            idle_period_ns: Some(100 * MILLISECOND_NS),
            budget: 0.15,
            hang_after_ns: SECOND_NS,
            medium_period_ns: periods.medium_ns,
            slow_period_ns: periods.slow_ns,
            retention_ns: ring.retention_ns,
            ring_max_bytes: ring.max_bytes,
            annotations_socket: Some(default_socket()),
            token_file: None,
            namespace_tokens: None,
            annotations_listen: None,
            web_config_file: None,
            web_hosts: Hosts::default(),
            limits,
            kubelet: kubelet::KubeletSettings::default(),
            slurm: slurm::SlurmSettings::default(),
            cgroups: Some("/sys/fs/cgroup".into()),
            captures: capture::CaptureSettings::default(),
            free_below: vec![FREE_BELOW],
            metrics: Choice::default(),
            detect,
            replay_speed: Some(1.0),
            replay_part: Part::WHOLE,
            replay_shift_to_now: false,
            otlp: otlp::Keys::default(),
            otlp_export: None,
        }
    }
}

impl Settings {
    /// The configuration of one GPU's ring, with times rounded to this many nanoseconds.
    #[must_use]
    pub fn ring(&self, resolution_ns: i64) -> ring::Config {
        ring::Config { retention_ns: self.retention_ns, max_bytes: self.ring_max_bytes, resolution_ns }
    }

    /// How often each lane reads.
    #[must_use]
    pub fn periods(&self) -> Periods {
        Periods { fast_ns: self.period_ns, medium_ns: self.medium_period_ns, slow_ns: self.slow_period_ns }
    }
}

impl From<&Settings> for offline::Settings {
    fn from(settings: &Settings) -> Self {
        let (limits, detect) = (settings.limits, settings.detect.clone());
        Self { periods: settings.periods(), ring: settings.ring(1), limits, detect, without_counters: false }
    }
}

/// The default socket, where clients look for it: below `/run` for root, otherwise in the user's runtime directory. A
/// service manager may name another folder (`RUNTIME_DIRECTORY`, `systemd.exec(5)`).
#[must_use]
pub fn default_socket() -> PathBuf {
    let folder = |name| std::env::var_os(name).filter(|dir| !dir.is_empty());
    if let Some(folders) = folder("RUNTIME_DIRECTORY") {
        // Several are separated by colons.
        let first = std::env::split_paths(&folders).next().unwrap_or_default();
        return first.join("annotations.sock");
    }
    match folder("XDG_RUNTIME_DIR") {
        Some(dir) if !rustix::process::geteuid().is_root() => PathBuf::from(dir).join("highwater/annotations.sock"),
        _ => PathBuf::from("/run/highwater/annotations.sock"),
    }
}
