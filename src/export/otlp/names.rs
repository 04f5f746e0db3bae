//! The OTLP name of each metric of the catalogue, in one table. A test checks that it is complete.
//!
//! A metric has the name that OpenTelemetry's hardware and process conventions define for the same quantity, if there is
//! one, else `highwater.*`. Two quantities have similar names: `hw.gpu.memory.utilization` is memory in use as a share of
//! all memory, so it is made from two metrics. NVML's memory utilization is how busy memory was, and is exported as
//! `highwater.gpu.memory.busy`.

use crate::metrics::catalogue::{self as c, Metric};

/// How a metric is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instrument {
    /// A gauge of whole numbers.
    GaugeInt,
    /// A gauge.
    Gauge,
    /// A sum of whole numbers that rises and falls.
    UpDown,
    /// A total of whole numbers that began with this process.
    CountInt,
    /// A total that began with this process.
    Count,
    /// A total of whole numbers that began before this process: with the driver, the GPU's life, the job's process.
    ForeignCountInt,
    /// A total that began before this process.
    ForeignCount,
    /// Counts by fixed upper bounds.
    Histogram,
    /// Counts by exponential buckets.
    Exponential,
}

/// One metric's name over OTLP.
#[derive(Debug)]
pub struct Named {
    /// The metric of the catalogue.
    pub metric: &'static Metric,
    /// Its name.
    pub name: &'static str,
    /// Its unit, in UCUM.
    pub unit: &'static str,
    /// How it is exported.
    pub instrument: Instrument,
    /// Attributes that are the same on every point, because several metrics of the catalogue may share one OTLP name.
    pub constant: &'static [(&'static str, &'static str)],
}

macro_rules! names {
    ($($metric:ident => $name:literal $unit:literal $instrument:ident $([$($key:literal = $value:literal),*])?;)*) => {
        /// Every metric, in the catalogue's order.
        pub static NAMES: &[Named] = &[$(Named {
            metric: &c::$metric,
            name: $name,
            unit: $unit,
            instrument: Instrument::$instrument,
            constant: &[$($(($key, $value)),*)?],
        }),*];
    };
}

names! {
    GPU_INFO => "highwater.gpu.info" "1" GaugeInt ["hw.vendor" = "NVIDIA"];
    GPU_UP => "highwater.gpu.up" "1" GaugeInt;
    GPU_SAMPLING_PERIOD => "highwater.gpu.sampling.period" "s" Gauge;
    GPU_MEMORY_TOTAL => "hw.gpu.memory.limit" "By" UpDown;
    GPU_MEMORY_USED => "hw.gpu.memory.usage" "By" UpDown;
    GPU_MEMORY_FREE => "highwater.gpu.memory.free" "By" UpDown;
    GPU_MEMORY_RESERVED => "highwater.gpu.memory.reserved" "By" UpDown;
    GPU_MEMORY_USED_MAX => "highwater.gpu.memory.usage.max" "By" GaugeInt;
    GPU_MEMORY_USED_MIN => "highwater.gpu.memory.usage.min" "By" GaugeInt;
    GPU_MEMORY_USED_AVG => "highwater.gpu.memory.usage.avg" "By" Gauge;
    GPU_MEMORY_PRESSURE => "highwater.gpu.memory.pressure" "s" Count;
    GPU_MEMORY_LOW => "highwater.gpu.memory.low" "s" Count;
    GPU_MEMORY_LOW_LONGEST => "highwater.gpu.memory.low.longest" "s" Gauge;
    GPU_MEMORY_FLUSHES => "highwater.gpu.memory.flushes" "{flush}" CountInt;
    GPU_UTILIZATION => "hw.gpu.utilization" "1" Gauge;
    GPU_MEMORY_BUSY => "highwater.gpu.memory.busy" "1" Gauge;
    GPU_SM_ACTIVE => "highwater.gpu.sm.active" "1" Gauge;
    GPU_SM_OCCUPANCY => "highwater.gpu.sm.occupancy" "1" Gauge;
    GPU_TENSOR_ACTIVE => "highwater.gpu.tensor.active" "1" Gauge;
    GPU_DRAM_ACTIVE => "highwater.gpu.dram.active" "1" Gauge;
    GPU_POWER => "hw.power" "W" Gauge ["hw.type" = "gpu"];
    GPU_POWER_LIMIT => "highwater.gpu.power.limit" "W" Gauge;
    GPU_ENERGY => "hw.energy" "J" ForeignCount ["hw.type" = "gpu"];
    GPU_TEMPERATURE => "hw.temperature" "Cel" Gauge ["hw.type" = "gpu"];
    GPU_TEMPERATURE_LIMIT => "hw.temperature.limit" "Cel" Gauge ["hw.type" = "gpu"];
    GPU_SM_CLOCK => "highwater.gpu.clock.frequency" "Hz" Gauge ["highwater.clock" = "sm"];
    GPU_MEMORY_CLOCK => "highwater.gpu.clock.frequency" "Hz" Gauge ["highwater.clock" = "memory"];
    GPU_CLOCKS_EVENT => "highwater.gpu.clocks.event.active" "1" GaugeInt;
    GPU_CLOCKS_EVENT_SECONDS => "highwater.gpu.clocks.event.time" "s" Count;
    GPU_PCIE_LINK_GENERATION => "highwater.gpu.pcie.link.generation" "1" GaugeInt;
    GPU_PCIE_LINK_GENERATION_MAX => "highwater.gpu.pcie.link.generation.max" "1" GaugeInt;
    GPU_PCIE_LINK_WIDTH => "highwater.gpu.pcie.link.width" "{lane}" GaugeInt;
    GPU_PCIE_LINK_WIDTH_MAX => "highwater.gpu.pcie.link.width.max" "{lane}" GaugeInt;
    GPU_PCIE_RECEIVED => "hw.gpu.io" "By" ForeignCountInt ["network.io.direction" = "receive"];
    GPU_PCIE_TRANSMITTED => "hw.gpu.io" "By" ForeignCountInt ["network.io.direction" = "transmit"];
    GPU_NVLINK_RECEIVED => "highwater.gpu.nvlink.io" "By" ForeignCountInt ["network.io.direction" = "receive"];
    GPU_NVLINK_TRANSMITTED => "highwater.gpu.nvlink.io" "By" ForeignCountInt ["network.io.direction" = "transmit"];
    GPU_NVLINK_ERRORS => "highwater.gpu.nvlink.errors" "{error}" ForeignCountInt;
    GPU_NVLINKS => "highwater.gpu.nvlinks" "{link}" GaugeInt;
    GPU_FABRIC_JOINED => "highwater.gpu.fabric.joined" "1" GaugeInt;
    GPU_BAR1_USED => "highwater.gpu.bar1.usage" "By" UpDown;
    GPU_ECC_ERRORS => "hw.errors" "{error}" ForeignCountInt ["hw.type" = "gpu"];
    GPU_REMAPPED_ROWS => "highwater.gpu.remapped_rows" "{row}" ForeignCountInt;
    GPU_ROW_REMAP_PENDING => "highwater.gpu.row_remap.pending" "1" GaugeInt;
    GPU_ROW_REMAP_FAILED => "highwater.gpu.row_remap.failed" "1" GaugeInt;
    GPU_RECOVERY_ACTION => "highwater.gpu.recovery_action" "1" GaugeInt;
    GPU_XID_ERRORS => "highwater.gpu.xid.errors" "{error}" CountInt;
    GPU_XID_LAST => "highwater.gpu.xid.last_time" "s" Gauge;
    PROCESS_MEMORY_USED => "highwater.process.gpu.memory.usage" "By" UpDown;
    GPU_POD_INFO => "highwater.gpu.pod.info" "1" GaugeInt;
    POD_MEMORY_USED => "highwater.pod.gpu.memory.usage" "By" UpDown;
    GPU_MEMORY_OUTSIDE_WORKLOADS => "highwater.gpu.memory.outside_workloads" "By" UpDown;
    GPU_SLURM_INFO => "highwater.gpu.slurm_step.info" "1" GaugeInt;
    SLURM_MEMORY_USED => "highwater.slurm_step.gpu.memory.usage" "By" UpDown;
    KUBELET_UP => "highwater.kubelet.up" "1" GaugeInt;
    JOB_INFO => "highwater.job.info" "1" GaugeInt;
    JOB_CONFLICTS => "highwater.job.conflicts" "{conflict}" CountInt;
    JOB_STEP => "highwater.job.step" "1" GaugeInt;
    JOB_STEPS => "highwater.job.steps" "{step}" CountInt;
    JOB_PIPELINE_STAGE => "highwater.job.pipeline.stage" "1" GaugeInt;
    JOB_STEP_DURATION => "highwater.job.step.duration" "s" Exponential;
    JOB_STEP_IDLE => "highwater.job.step.gpu.idle_time" "s" Count;
    JOB_STEP_SM_ACTIVE => "highwater.job.step.gpu.sm.active_time" "s" Count;
    JOB_STEP_TENSOR_ACTIVE => "highwater.job.step.gpu.tensor.active_time" "s" Count;
    JOB_STEP_DRAM_ACTIVE => "highwater.job.step.gpu.dram.active_time" "s" Count;
    JOB_STEP_IDLE_OBSERVED => "highwater.job.step.gpu.idle.observed_time" "s" Count;
    JOB_STEP_ACTIVE_OBSERVED => "highwater.job.step.gpu.active.observed_time" "s" Count;
    JOB_LAST_ANNOTATION => "highwater.job.last_annotation_time" "s" Gauge;
    JOB_ALLOCATOR_ALLOCATED => "highwater.job.allocator.allocated" "By" UpDown;
    JOB_ALLOCATOR_RESERVED => "highwater.job.allocator.reserved" "By" UpDown;
    JOB_ALLOCATOR_RETRIES => "highwater.job.allocator.retries" "{retry}" ForeignCountInt;
    JOB_ALLOCATOR_OOMS => "highwater.job.allocator.ooms" "{error}" ForeignCountInt;
    JOB_OUTSIDE_ALLOCATOR => "highwater.job.memory.outside_allocator" "By" UpDown;
    PHASE_ACTIVE => "highwater.phase.active" "1" GaugeInt;
    PHASE_DURATION => "highwater.phase.duration" "s" Exponential;
    PHASE_MEMORY_PEAK => "highwater.phase.memory.peak" "By" GaugeInt;
    PHASE_MEMORY_PEAK_MAX => "highwater.phase.memory.peak.max" "By" GaugeInt;
    PHASE_MEMORY_GROWTH => "highwater.phase.memory.growth" "By" GaugeInt;
    PHASE_ENERGY => "highwater.phase.energy" "J" Count;
    PHASE_IDLE => "highwater.phase.gpu.idle_time" "s" Count;
    PHASE_SM_ACTIVE => "highwater.phase.gpu.sm.active_time" "s" Count;
    PHASE_TENSOR_ACTIVE => "highwater.phase.gpu.tensor.active_time" "s" Count;
    PHASE_DRAM_ACTIVE => "highwater.phase.gpu.dram.active_time" "s" Count;
    FINDING_ACTIVE => "highwater.finding.active" "1" GaugeInt;
    FINDINGS => "highwater.findings" "{finding}" CountInt;
    FINDINGS_DROPPED => "highwater.findings.dropped" "{sign}" CountInt;
    FINDINGS_UNSEEN => "highwater.findings.unseen_phases" "{phase}" CountInt;
    INCIDENT_ACTIVE => "highwater.incident.active" "1" GaugeInt;
    INCIDENTS => "highwater.incidents" "{incident}" CountInt;
    JOB_LOST => "highwater.job.lost_time" "s" Count;
    JOB_PRODUCTIVE => "highwater.job.productive_time" "s" Count;
    COMM_SLOWDOWN => "highwater.comm.slowdown" "1" Gauge;
    JOB_COMPUTE_LAG => "highwater.job.compute.lag" "1" Gauge;
    JOB_COMPARED => "highwater.job.compute.compared" "1" Gauge;
    JOB_DATA_STALL => "highwater.job.data.stall" "1" Gauge;
    JOB_MEMORY_FULL => "highwater.job.memory.full_forecast" "s" Gauge;
    PHASES => "highwater.phases" "{phase}" CountInt;
    JOB_PROFILE_STEP => "highwater.job.profile.step" "1" GaugeInt;
    JOB_PROFILE_LAYERS => "highwater.job.profile.layers" "{layer}" GaugeInt;
    JOB_PROFILE_MISSING => "highwater.job.profile.missing" "{record}" GaugeInt;
    JOB_PROFILE_ACTIVATION => "highwater.job.profile.activation" "By" GaugeInt;
    JOB_PROFILE_PARAMETER => "highwater.job.profile.parameter" "By" GaugeInt;
    JOB_PROFILE_GATHERED => "highwater.job.profile.gathered" "By" GaugeInt;
    JOB_PROFILE_ALLOCATED_MAX => "highwater.job.profile.allocated.max" "By" GaugeInt;
    JOB_PROFILE_RESERVED_MAX => "highwater.job.profile.reserved.max" "By" GaugeInt;
    LAYER_ACTIVATION => "highwater.layer.activation" "By" GaugeInt;
    LAYER_PARAMETER => "highwater.layer.parameter" "By" GaugeInt;
    LAYER_RECORDS_DROPPED => "highwater.layer.records.dropped" "{record}" CountInt;
    LAYERS_UNKEPT => "highwater.layers.unkept" "{layer}" CountInt;
    ANNOTATIONS => "highwater.annotations" "{event}" CountInt;
    ANNOTATIONS_REFUSED => "highwater.annotations.refused" "{event}" CountInt;
    ANNOTATIONS_LOST => "highwater.annotations.lost" "{event}" CountInt;
    ANNOTATIONS_HELD => "highwater.annotations.held" "By" GaugeInt;
    CGROUPS_READ => "highwater.cgroups.read" "{cgroup}" GaugeInt;
    NVML_UP => "highwater.nvml.up" "1" GaugeInt;
    SOURCE_ERROR => "highwater.source.error" "1" GaugeInt;
    SOURCE_INFO => "highwater.source.info" "1" GaugeInt;
    TICKS_DUE => "highwater.sampler.ticks.due" "{tick}" CountInt;
    TICKS_TAKEN => "highwater.sampler.ticks.taken" "{tick}" CountInt;
    TICKS_MISSED => "highwater.sampler.ticks.missed" "{tick}" CountInt;
    SAMPLER_PERIOD => "highwater.sampler.period" "s" Gauge;
    SAMPLER_LATENESS => "highwater.sampler.lateness" "s" Histogram;
    NVML_CALL_DURATION => "highwater.nvml.call.duration" "s" Histogram;
    NVML_CALL_FAILURES => "highwater.nvml.call.failures" "{call}" CountInt;
    NVML_BUSY => "highwater.nvml.busy" "1" Gauge;
    MEMORY => "highwater.memory.usage" "By" UpDown;
    RING_BYTES => "highwater.ring.usage" "By" UpDown;
    RING_SPAN => "highwater.ring.span" "s" Gauge;
    CAPTURES => "highwater.captures" "{trigger}" CountInt;
    CAPTURES_REMOVED => "highwater.captures.removed" "{capture}" CountInt;
    CAPTURES_BYTES => "highwater.captures.size" "By" UpDown;
    OTLP_PRODUCED => "highwater.otlp.produced" "{point}" CountInt;
    OTLP_EXPORTED => "highwater.otlp.exported" "{point}" CountInt;
    OTLP_DROPPED => "highwater.otlp.dropped" "{point}" CountInt;
    OTLP_QUEUED => "highwater.otlp.queued" "{point}" UpDown;
    OTLP_QUEUED_BYTES => "highwater.otlp.queued.size" "By" UpDown;
    OTLP_ATTEMPTS => "highwater.otlp.attempts" "{request}" CountInt;
    OTLP_READ_FAILURES => "highwater.otlp.read_failures" "{failure}" CountInt;
    OTLP_SENT_BYTES => "highwater.otlp.sent.io" "By" CountInt;
    HTTP_CONNECTIONS_OPEN => "highwater.http.open_connections" "{connection}" UpDown;
    HTTP_CONNECTIONS => "highwater.http.connections" "{connection}" CountInt;
    HTTP_ACCEPT_FAILURES => "highwater.http.accept.failures" "{connection}" CountInt;
    HTTP_REQUESTS_REFUSED => "highwater.http.requests.refused" "{request}" CountInt;
    WEB_CONFIG_READS => "highwater.web_config.reads" "{read}" CountInt;
    BUILD_INFO => "highwater.build.info" "1" GaugeInt;
    PROCESS_CPU => "process.cpu.time" "s" Count;
    PROCESS_RESIDENT => "process.memory.usage" "By" UpDown;
    PROCESS_VIRTUAL => "process.memory.virtual" "By" UpDown;
    PROCESS_FDS => "process.unix.file_descriptor.count" "{file_descriptor}" UpDown;
    PROCESS_MAX_FDS => "highwater.process.file_descriptor.limit" "{file_descriptor}" UpDown;
    PROCESS_THREADS => "process.thread.count" "{thread}" UpDown;
    PROCESS_START => "highwater.process.start_time" "s" Gauge;
}

/// A metric that no other exporter has, made from the ring or from two metrics.
#[derive(Debug)]
pub struct OtlpOnly {
    /// Its name.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// What it is.
    pub help: &'static str,
}

/// Memory in use as a share of the whole framebuffer.
pub static MEMORY_SHARE: OtlpOnly = OtlpOnly {
    name: "hw.gpu.memory.utilization",
    unit: "1",
    help: "Share of the framebuffer in use at the last sample.",
};
/// Whether each GPU answers, as the conventions have it.
pub static STATUS: OtlpOnly = OtlpOnly {
    name: "hw.status",
    unit: "1",
    help: "1 for the state that the GPU is in, else 0: `hw.state` is `ok` where it answers, else `failed`. The same as highwater.gpu.up.",
};
/// The attribute of [`STATUS`] that names a state.
pub const STATE: &str = "hw.state";
/// How long memory was at each level.
pub static MEMORY_LEVEL: OtlpOnly = OtlpOnly {
    name: "highwater.gpu.memory.level",
    unit: "By",
    help: "Milliseconds that memory in use spent at each level: one count for each millisecond that is known.",
};
/// Every change of memory.
pub static MEMORY_RAW: OtlpOnly = OtlpOnly {
    name: "highwater.gpu.memory.raw",
    unit: "By",
    help: "Memory in use at each change, at the time of the reading; a held value is repeated, a gap has no value.",
};

/// Every metric that only OTLP has.
pub static OTLP_ONLY: [&OtlpOnly; 4] = [&MEMORY_SHARE, &STATUS, &MEMORY_LEVEL, &MEMORY_RAW];

/// The name of a label as an attribute of `metric`.
#[must_use]
pub fn attribute_name(metric: &Metric, label: &str) -> String {
    let convention = match label {
        "uuid" => "hw.id",
        "gpu" => "highwater.gpu.index",
        "parent_uuid" => "hw.parent",
        "name" => "hw.model",
        "driver_version" => "hw.driver_version",
        "error_type" => "error.type",
        "limit" if std::ptr::eq(metric, &raw const c::GPU_TEMPERATURE_LIMIT) => "hw.limit_type",
        "training_job" => "highwater.job",
        "pid" => "process.pid",
        "namespace" => "k8s.namespace.name",
        "pod" => "k8s.pod.name",
        "container" => "k8s.container.name",
        other => return format!("highwater.{other}"),
    };
    convention.to_owned()
}

/// The value of a label as the value of that attribute.
#[must_use]
pub fn attribute_value<'a>(metric: &Metric, label: &str, value: &'a str) -> &'a str {
    if attribute_name(metric, label) != "hw.limit_type" {
        return value;
    }
    // The conventions have a list of types of limits, and these two are on it under other names.
    match value {
        "slowdown" => "throttled",
        "shutdown" => "high.critical",
        other => other,
    }
}

/// The name of a metric over OTLP.
#[must_use]
pub fn of(metric: &'static Metric) -> Option<&'static Named> {
    NAMES.iter().find(|named| std::ptr::eq(named.metric, metric))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::catalogue::{ALL, MetricKind};
    use opentelemetry_semantic_conventions::{attribute, metric};

    #[test]
    fn the_table_is_the_catalogue() {
        let named: Vec<_> = NAMES.iter().map(|named| named.metric.name).collect();
        let all: Vec<_> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(named, all, "a metric of the catalogue needs its row, in the same order");
    }

    #[test]
    fn instruments_suit_kinds_and_one_name_has_one_shape() {
        for named in NAMES {
            use Instrument::{Count, CountInt, Exponential, ForeignCount, ForeignCountInt, Histogram};
            let kind = match named.instrument {
                Count | CountInt | ForeignCount | ForeignCountInt => MetricKind::Counter,
                Histogram | Exponential => MetricKind::Histogram,
                _ => MetricKind::Gauge,
            };
            assert_eq!(kind, named.metric.kind, "{}", named.name);
            for other in NAMES.iter().filter(|other| other.name == named.name) {
                assert_eq!((other.unit, other.instrument), (named.unit, named.instrument), "{}", named.name);
                let apart = std::ptr::eq(other, named) || other.constant != named.constant;
                assert!(apart, "{}: {} and {} are not distinct", named.name, other.metric.name, named.metric.name);
            }
        }
    }

    /// docs/otlp-metrics.md, generated from the table.
    #[test]
    fn the_documented_names_are_the_table() {
        use std::fmt::Write as _;
        let mut table = String::from(
            "# Metrics over OTLP\n\nGenerated from the table in `src/export/otlp/names.rs`; a test compares them. docs/metrics.md describes each metric under\nits Prometheus name. Labels keep their values, except that `hw.limit_type` is `throttled` for `slowdown` and\n`high.critical` for `shutdown`.\n\n| OTLP | unit | instrument | attributes | Prometheus |\n|---|---|---|---|---|\n",
        );
        for named in NAMES {
            let labels = named.metric.labels.iter().map(|label| format!("`{}`", attribute_name(named.metric, label)));
            let constant = named.constant.iter().map(|(name, value)| format!("`{name}={value}`"));
            let attributes = labels.chain(constant).collect::<Vec<_>>().join(", ");
            let instrument = match named.instrument {
                Instrument::GaugeInt | Instrument::Gauge => "gauge",
                Instrument::UpDown => "updowncounter",
                Instrument::CountInt | Instrument::Count | Instrument::ForeignCountInt | Instrument::ForeignCount => {
                    "counter"
                }
                Instrument::Histogram => "histogram",
                Instrument::Exponential => "exponential histogram",
            };
            let (name, unit) = (named.name, named.unit);
            let _ = writeln!(table, "| `{name}` | `{unit}` | {instrument} | {attributes} | `{}` |", named.metric.name);
        }
        table.push_str("\n## Only over OTLP\n\n| metric | unit | what it is |\n|---|---|---|\n");
        for only in OTLP_ONLY {
            let _ = writeln!(table, "| `{}` | `{}` | {} |", only.name, only.unit, only.help);
        }
        expect_test::expect_file!["../../../docs/otlp-metrics.md"].assert_eq(&table);
    }

    /// Names other than `highwater.*` are those of the conventions.
    #[test]
    fn names_of_the_conventions_are_theirs() {
        let conventions = [
            metric::HW_GPU_MEMORY_LIMIT,
            metric::HW_GPU_MEMORY_USAGE,
            metric::HW_GPU_MEMORY_UTILIZATION,
            metric::HW_GPU_UTILIZATION,
            metric::HW_GPU_IO,
            metric::HW_ERRORS,
            metric::HW_POWER,
            metric::HW_ENERGY,
            metric::HW_TEMPERATURE,
            metric::HW_TEMPERATURE_LIMIT,
            metric::HW_STATUS,
            metric::PROCESS_CPU_TIME,
            metric::PROCESS_MEMORY_USAGE,
            metric::PROCESS_MEMORY_VIRTUAL,
            metric::PROCESS_UNIX_FILE_DESCRIPTOR_COUNT,
            metric::PROCESS_THREAD_COUNT,
        ];
        let only = OTLP_ONLY.iter().map(|only| only.name);
        for name in NAMES.iter().map(|named| named.name).chain(only) {
            assert!(name.starts_with("highwater.") || conventions.contains(&name), "{name}");
        }
        assert_eq!(attribute_name(&c::GPU_POWER, "uuid"), attribute::HW_ID);
        assert_eq!(attribute_name(&c::GPU_INFO, "name"), attribute::HW_MODEL);
        assert_eq!(attribute_name(&c::GPU_INFO, "parent_uuid"), attribute::HW_PARENT);
        assert_eq!(attribute_name(&c::GPU_ECC_ERRORS, "error_type"), attribute::ERROR_TYPE);
        assert_eq!(attribute_name(&c::GPU_REMAPPED_ROWS, "error_type"), attribute::ERROR_TYPE);
        assert_eq!(attribute_name(&c::FINDING_ACTIVE, "severity"), "highwater.severity");
        let info = of(&c::GPU_INFO).expect("a name");
        assert_eq!(info.constant, [(attribute::HW_VENDOR, "NVIDIA")]);
        assert_eq!(STATE, attribute::HW_STATE);
        assert_eq!(attribute_name(&c::GPU_TEMPERATURE_LIMIT, "limit"), attribute::HW_LIMIT_TYPE);
        let limits = ["slowdown", "shutdown"].map(|limit| attribute_value(&c::GPU_TEMPERATURE_LIMIT, "limit", limit));
        assert_eq!(limits, ["throttled", "high.critical"]);
        assert_eq!(attribute_value(&c::GPU_CLOCKS_EVENT, "reason", "slowdown"), "slowdown");
    }
}
