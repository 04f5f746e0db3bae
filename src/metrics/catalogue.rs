//! The one list of metrics: name, kind, labels, and a help text with the source and the true update period.

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A value that rises and falls.
    Gauge,
    /// A total that only rises until the daemon or the driver restarts.
    Counter,
    /// Counts by upper bound.
    Histogram,
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Full Prometheus name.
    pub name: &'static str,
    /// Gauge, counter or histogram.
    pub kind: MetricKind,
    /// Names of its labels, in the order of each sample's values.
    pub labels: &'static [&'static str],
    /// What it measures, where the value comes from, and how often it changes.
    pub help: &'static str,
    /// Its place in [`ALL`].
    pub place: usize,
}

macro_rules! metrics {
    ($($id:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = $help]
            pub static $id: Metric =
                Metric { name: $name, kind: MetricKind::$kind, labels: &[$($label),*], help: $help, place: Place::$id as usize };
        )*
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "the names of the metrics")]
        enum Place { $($id),* }
        /// Every metric, in the order in which they are exported.
        pub static ALL: &[&Metric] = &[$(&$id),*];
    };
}

metrics! {
    GPU_INFO = Gauge "highwater_gpu_info" ["gpu", "uuid", "name", "pci_bus_id", "driver_version", "parent_uuid", "mig_profile"]
        "Static facts of a GPU or MIG instance, always 1. From NVML, read at startup.";
    GPU_UP = Gauge "highwater_gpu_up" ["gpu", "uuid"]
        "Whether the GPU answers: 0 when the driver calls it lost, a call on it hangs, or it cannot be opened (then without `uuid`).";
    GPU_SAMPLING_PERIOD = Gauge "highwater_gpu_sampling_period_seconds" ["gpu", "uuid"]
        "The period in which the GPU's memory is read: `sampling.idle_period` while nothing runs on it, else the fast lane's. Absent in a replay.";
    GPU_MEMORY_TOTAL = Gauge "highwater_gpu_memory_total_bytes" ["gpu", "uuid"]
        "Framebuffer size. From NVML memory info, every 30 s.";
    GPU_MEMORY_USED = Gauge "highwater_gpu_memory_used_bytes" ["gpu", "uuid"]
        "Memory in use without the driver's reserve, at the last sample. From NVML memory info, fresh at every sample, by default every 1 ms.";
    GPU_MEMORY_FREE = Gauge "highwater_gpu_memory_free_bytes" ["gpu", "uuid"]
        "Total less reserved less used, at the last sample.";
    GPU_MEMORY_RESERVED = Gauge "highwater_gpu_memory_reserved_bytes" ["gpu", "uuid"]
        "Memory that the driver keeps for itself. From NVML memory info, every 30 s.";
    GPU_MEMORY_USED_MAX = Gauge "highwater_gpu_memory_used_max_bytes" ["gpu", "uuid", "window"]
        "Highest memory in use over the sliding window, of all samples. It does not depend on the number of scrapers; no sample is missed while the window is at least the scrape interval.";
    GPU_MEMORY_USED_MIN = Gauge "highwater_gpu_memory_used_min_bytes" ["gpu", "uuid", "window"]
        "Lowest memory in use over the sliding window, of all samples.";
    GPU_MEMORY_USED_AVG = Gauge "highwater_gpu_memory_used_avg_bytes" ["gpu", "uuid", "window"]
        "Time-weighted mean of memory in use over the part of the sliding window that is known.";
    GPU_MEMORY_PRESSURE = Counter "highwater_gpu_memory_pressure_seconds_total" ["gpu", "uuid", "above"]
        "Time with at least this share of the usable memory in use, exact to a sample over any range. Usable is total less reserved.";
    GPU_MEMORY_LOW = Counter "highwater_gpu_memory_low_seconds_total" ["gpu", "uuid", "free_below"]
        "Time with less than `free_below` of the usable memory free (`metrics.free_below`), exact to a sample. Absent where the whole GPU has no more than that.";
    GPU_MEMORY_LOW_LONGEST = Gauge "highwater_gpu_memory_low_longest_seconds" ["gpu", "uuid", "free_below", "window"]
        "The longest stretch in which less than `free_below` was free without a break. A stretch counts if any part of it lies in the sliding window, and with its whole length; 0 if there was none.";
    GPU_MEMORY_FLUSHES = Counter "highwater_gpu_memory_flushes_total" ["gpu", "uuid"]
        "Drops in memory in use, of at least 256 MiB and 1 % of the usable memory, half of which came back within 100 ms; on a nearly full GPU, of at least 256 MiB and more than was free, of which as much came back as had been free, or half. It is the sign that a framework's allocator flushed its cache.";
    GPU_UTILIZATION = Gauge "highwater_gpu_utilization_ratio" ["gpu", "uuid"]
        "Share of the driver's last window in which a kernel ran. From NVML every 100 ms; the driver's own window is 1/6 to 1 s.";
    GPU_MEMORY_BUSY = Gauge "highwater_gpu_memory_busy_ratio" ["gpu", "uuid"]
        "Share of the driver's last window in which device memory was read or written. From NVML every 100 ms; the driver's own window is 1/6 to 1 s.";
    GPU_SM_ACTIVE = Gauge "highwater_gpu_sm_active_ratio" ["gpu", "uuid"]
        "Share of the multiprocessors, over time, with at least one warp: DCGM's PROF_SM_ACTIVE. From GPM, over 500 ms. Absent before Hopper.";
    GPU_SM_OCCUPANCY = Gauge "highwater_gpu_sm_occupancy_ratio" ["gpu", "uuid"]
        "Warps on the multiprocessors, as a share of the most that they can hold: DCGM's PROF_SM_OCCUPANCY. From GPM, over 500 ms. Absent before Hopper.";
    GPU_TENSOR_ACTIVE = Gauge "highwater_gpu_tensor_active_ratio" ["gpu", "uuid"]
        "Share of the cycles in which any tensor core worked: DCGM's PROF_PIPE_TENSOR_ACTIVE. From GPM, over 500 ms. Absent before Hopper.";
    GPU_DRAM_ACTIVE = Gauge "highwater_gpu_dram_active_ratio" ["gpu", "uuid"]
        "Share of the memory's bandwidth that was used: DCGM's PROF_DRAM_ACTIVE. From GPM, over 500 ms. Absent before Hopper.";
    GPU_POWER = Gauge "highwater_gpu_power_watts" ["gpu", "uuid"]
        "Power draw. From NVML every 100 ms: the instant value, or the mean of 1 s if the driver has no other.";
    GPU_POWER_LIMIT = Gauge "highwater_gpu_power_limit_watts" ["gpu", "uuid"]
        "The power limit in force, the lowest of the operator's and the board's. From NVML, every 30 s. Absent if the GPU does not report it.";
    GPU_ENERGY = Counter "highwater_gpu_energy_joules_total" ["gpu", "uuid"]
        "Energy since the driver was loaded. NVML's counter, read once in five minutes because reading it stops every other call for milliseconds, plus power times the time since.";
    GPU_TEMPERATURE = Gauge "highwater_gpu_temperature_celsius" ["gpu", "uuid"]
        "Core temperature. From NVML every 100 ms.";
    GPU_TEMPERATURE_LIMIT = Gauge "highwater_gpu_temperature_limit_celsius" ["gpu", "uuid", "limit"]
        "Core temperature at which the hardware slows the GPU down (`slowdown`) or the GPU shuts down (`shutdown`). From NVML, every 30 s. Absent if the GPU does not report it.";
    GPU_SM_CLOCK = Gauge "highwater_gpu_sm_clock_hertz" ["gpu", "uuid"]
        "Clock of the streaming multiprocessors. From NVML every 100 ms.";
    GPU_MEMORY_CLOCK = Gauge "highwater_gpu_memory_clock_hertz" ["gpu", "uuid"]
        "Memory clock. From NVML every 100 ms.";
    GPU_CLOCKS_EVENT = Gauge "highwater_gpu_clocks_event_active" ["gpu", "uuid", "reason"]
        "Whether this clocks event reason slows the GPU's clocks. The reasons have NVML's names: `sw_power_cap`, `hw_slowdown`, `sync_boost`, `sw_thermal_slowdown`, `hw_thermal_slowdown`, `hw_power_brake_slowdown`. From NVML every 100 ms.";
    GPU_CLOCKS_EVENT_SECONDS = Counter "highwater_gpu_clocks_event_seconds_total" ["gpu", "uuid", "reason"]
        "Time in which this clocks event reason was active since the daemon started: the sum of the readings' periods, 100 ms each, or 1 s while the GPU is idle.";
    GPU_PCIE_LINK_GENERATION = Gauge "highwater_gpu_pcie_link_generation" ["gpu", "uuid"]
        "Generation of the PCIe link, which an idle GPU may lower to save power. From NVML, every 30 s.";
    GPU_PCIE_LINK_GENERATION_MAX = Gauge "highwater_gpu_pcie_link_generation_max" ["gpu", "uuid"]
        "Highest generation of the PCIe link that the GPU and the board can do together. From NVML, every 30 s.";
    GPU_PCIE_LINK_WIDTH = Gauge "highwater_gpu_pcie_link_width" ["gpu", "uuid"]
        "Lanes of the PCIe link. From NVML, every 30 s.";
    GPU_PCIE_LINK_WIDTH_MAX = Gauge "highwater_gpu_pcie_link_width_max" ["gpu", "uuid"]
        "Most lanes of the PCIe link that the GPU and the board can do together. From NVML, every 30 s.";
    GPU_PCIE_RECEIVED = Counter "highwater_gpu_pcie_received_bytes_total" ["gpu", "uuid"]
        "Bytes received over PCIe. From an NVML counter if it is 64 bits wide, else from GPM's rate times time since the daemon started. Every 5 s, because a sample takes 0.3 ms.";
    GPU_PCIE_TRANSMITTED = Counter "highwater_gpu_pcie_transmitted_bytes_total" ["gpu", "uuid"]
        "Bytes sent over PCIe. From an NVML counter if it is 64 bits wide, else from GPM's rate times time since the daemon started. Every 5 s, because a sample takes 0.3 ms.";
    GPU_NVLINK_RECEIVED = Counter "highwater_gpu_nvlink_received_bytes_total" ["gpu", "uuid"]
        "Payload bytes received over all NVLinks. From an NVML counter, every 30 s, because the call takes 1 to 3 ms.";
    GPU_NVLINK_TRANSMITTED = Counter "highwater_gpu_nvlink_transmitted_bytes_total" ["gpu", "uuid"]
        "Payload bytes sent over all NVLinks. From an NVML counter, every 30 s, because the call takes 1 to 3 ms.";
    GPU_NVLINK_ERRORS = Counter "highwater_gpu_nvlink_errors_total" ["gpu", "uuid", "error_type"]
        "Errors of all NVLinks since the driver was loaded, after which data was sent again: `replay` (a packet), `recovery` (a link was trained again), `crc` (a wrong checksum). From NVML, every 30 s; Blackwell does not count them. DCGM's NVLINK_REPLAY_, RECOVERY_ and CRC_FLIT_ERROR_COUNT_TOTAL.";
    GPU_NVLINKS = Gauge "highwater_gpu_nvlinks" ["gpu", "uuid", "state"]
        "NVLinks that are `up`, and those that are `down`; a board may leave some of a GPU's links unconnected. From NVML, every 30 s.";
    GPU_FABRIC_JOINED = Gauge "highwater_gpu_fabric_joined" ["gpu", "uuid"]
        "Whether the GPU has joined the NVLink fabric; until then CUDA does not start on it. Absent where there is no fabric. From NVML, every 30 s.";
    GPU_BAR1_USED = Gauge "highwater_gpu_bar1_used_bytes" ["gpu", "uuid"]
        "BAR1 aperture in use. From NVML, every 30 s.";
    GPU_ECC_ERRORS = Counter "highwater_gpu_ecc_errors_total" ["gpu", "uuid", "error_type"]
        "ECC errors since the driver was loaded, `corrected` or `uncorrected`. From NVML, in the slow lane.";
    GPU_REMAPPED_ROWS = Counter "highwater_gpu_remapped_rows_total" ["gpu", "uuid", "error_type"]
        "Memory rows remapped in the GPU's life, because of `corrected` or `uncorrected` errors. From NVML, in the slow lane.";
    GPU_ROW_REMAP_PENDING = Gauge "highwater_gpu_row_remap_pending" ["gpu", "uuid"]
        "Whether memory rows wait to be remapped, which a reset of the GPU does. From NVML, in the slow lane.";
    GPU_ROW_REMAP_FAILED = Gauge "highwater_gpu_row_remap_failed" ["gpu", "uuid"]
        "Whether a memory row could not be remapped: the GPU is to be replaced. From NVML, in the slow lane.";
    GPU_RECOVERY_ACTION = Gauge "highwater_gpu_recovery_action" ["gpu", "uuid"]
        "What the driver asks for to recover the GPU, as NVML's number: 0 nothing, 1 reset the GPU, 2 reboot the node, 3 drain peer-to-peer traffic, 4 drain and reset. From NVML, in the slow lane.";
    GPU_XID_ERRORS = Counter "highwater_gpu_xid_errors_total" ["gpu", "uuid", "xid"]
        "XID errors since the daemon started. From NVML's events, as they happen.";
    GPU_XID_LAST = Gauge "highwater_gpu_xid_last_timestamp_seconds" ["gpu", "uuid", "xid"]
        "Unix time of the last XID error of this number.";
    PROCESS_MEMORY_USED = Gauge "highwater_process_gpu_memory_used_bytes" ["gpu", "uuid", "pid"]
        "Memory of one process on one GPU; only with `metrics.processes`. From NVML, in the slow lane.";
    GPU_POD_INFO = Gauge "highwater_gpu_pod_info" ["gpu", "uuid", "namespace", "pod", "container"]
        "The containers that have a GPU or MIG instance, always 1: those that the kubelet gave it, and those whose processes hold memory on it. A shared GPU has a series for each. Only with `kubelet.socket`; every 5 s.";
    POD_MEMORY_USED = Gauge "highwater_pod_gpu_memory_used_bytes" ["gpu", "uuid", "namespace", "pod", "container"]
        "Memory that a container's processes hold on a GPU. Only with `kubelet.socket`, where the driver lists all processes; every 5 s, from lists that are read every 10 s.";
    GPU_MEMORY_OUTSIDE_WORKLOADS = Gauge "highwater_gpu_memory_outside_workloads_bytes" ["gpu", "uuid"]
        "What neither a pod's process nor a Slurm step's held of the memory that was in use when the driver last listed processes: with what they hold on the GPU it adds up to that. Read likewise.";
    GPU_SLURM_INFO = Gauge "highwater_gpu_slurm_step_info" ["gpu", "uuid", "slurm_job", "slurm_step", "user"]
        "The steps of Slurm's jobs that have a GPU or MIG instance, always 1: those whose processes hold memory on it, by their control groups, and jobs that `slurm.job_map` names. `user` is the user's number. Not where `kubelet.socket` is set; every 5 s.";
    SLURM_MEMORY_USED = Gauge "highwater_slurm_step_gpu_memory_used_bytes" ["gpu", "uuid", "slurm_job", "slurm_step", "user"]
        "Memory that the processes of a Slurm step hold on a GPU, where the driver lists all processes; every 5 s, from lists that are read every 10 s.";
    KUBELET_UP = Gauge "highwater_kubelet_up" []
        "Whether the kubelet listed the GPUs of pods when it was last asked. Only with `kubelet.socket`.";
    JOB_INFO = Gauge "highwater_job_info" ["training_job", "rank", "namespace", "user", "world_size", "gpu", "uuid"]
        "Static facts of a rank, always 1; a series for each of its GPUs. From its annotations.";
    JOB_CONFLICTS = Counter "highwater_job_conflicts_total" []
        "How often two processes that ran at once sent steps for one rank of one job. What the second sends is kept as a job of its own, NAME~PID.";
    JOB_STEP = Gauge "highwater_job_step" ["training_job", "rank", "namespace", "user"]
        "Number of the last step. From annotations.";
    JOB_STEPS = Counter "highwater_job_steps_total" ["training_job", "rank", "namespace", "user"]
        "Steps that ended, with those that the job ran without marks if it says how many (attribute `steps`); the histogram of step durations counts the marked ones. From annotations.";
    JOB_PIPELINE_STAGE = Gauge "highwater_job_pipeline_stage" ["training_job", "rank", "namespace", "user"]
        "The rank's stage of a pipeline, from the coordinates that it sent; absent where it sent none, or they have no stage.";
    JOB_STEP_DURATION = Histogram "highwater_job_step_duration_seconds" ["training_job", "rank", "namespace", "user"]
        "Durations of steps, by the job's own times. docs/prometheus.md describes its buckets and native histograms.";
    JOB_STEP_IDLE = Counter "highwater_job_step_gpu_idle_seconds_total" ["training_job", "rank", "namespace", "user"]
        "Time inside the rank's steps in which no kernel ran, the mean of several GPUs. From the driver's utilization.";
    JOB_STEP_SM_ACTIVE = Counter "highwater_job_step_sm_active_seconds_total" ["training_job", "rank", "namespace", "user"]
        "Time of multiprocessors with a warp inside the rank's steps: highwater_gpu_sm_active_ratio times time, the mean of several GPUs.";
    JOB_STEP_TENSOR_ACTIVE = Counter "highwater_job_step_tensor_active_seconds_total" ["training_job", "rank", "namespace", "user"]
        "The same of tensor cores. A rank that works more than its peers, which wait for it, has more of it in the same time.";
    JOB_STEP_DRAM_ACTIVE = Counter "highwater_job_step_dram_active_seconds_total" ["training_job", "rank", "namespace", "user"]
        "The same of memory that transfers.";
    JOB_STEP_IDLE_OBSERVED = Counter "highwater_job_step_idle_observed_seconds_total" ["training_job", "rank", "namespace", "user"]
        "How long the rank's steps took of which highwater_job_step_gpu_idle_seconds_total knows the idle time: shares are of this time.";
    JOB_STEP_ACTIVE_OBSERVED = Counter "highwater_job_step_active_observed_seconds_total" ["training_job", "rank", "namespace", "user"]
        "The same for highwater_job_step_tensor_active_seconds_total.";
    JOB_LAST_ANNOTATION = Gauge "highwater_job_last_annotation_timestamp_seconds" ["training_job", "rank", "namespace", "user"]
        "Unix time of the rank's newest annotation.";
    JOB_ALLOCATOR_ALLOCATED = Gauge "highwater_job_allocator_allocated_bytes" ["training_job", "rank", "namespace", "user"]
        "Bytes in live tensors, as last reported by the job's allocator.";
    JOB_ALLOCATOR_RESERVED = Gauge "highwater_job_allocator_reserved_bytes" ["training_job", "rank", "namespace", "user"]
        "Bytes that the job's allocator holds from the driver, as it last reported.";
    JOB_ALLOCATOR_RETRIES = Counter "highwater_job_allocator_retries_total" ["training_job", "rank", "namespace", "user"]
        "Failed device allocations that made the job's allocator flush its cache, since the process began, as it last reported.";
    JOB_ALLOCATOR_OOMS = Counter "highwater_job_allocator_ooms_total" ["training_job", "rank", "namespace", "user"]
        "Out-of-memory errors of the job's allocator since the process began, as it last reported.";
    JOB_OUTSIDE_ALLOCATOR = Gauge "highwater_job_memory_outside_allocator_bytes" ["training_job", "rank", "namespace", "user"]
        "Non-PyTorch memory, as PyTorch's out-of-memory message calls it: the process's memory according to NVML less what its allocator held, at the end of the last phase that reported the latter: communication buffers, context, workspaces.";
    PHASE_ACTIVE = Gauge "highwater_phase_active" ["training_job", "rank", "namespace", "user", "phase"]
        "Whether the rank is inside this phase.";
    PHASE_DURATION = Histogram "highwater_phase_duration_seconds" ["training_job", "rank", "namespace", "user", "phase"]
        "Durations of phases, by the job's own times. docs/prometheus.md describes its buckets and native histograms.";
    PHASE_MEMORY_PEAK = Gauge "highwater_phase_memory_peak_bytes" ["training_job", "rank", "namespace", "user", "phase"]
        "Highest memory in use on the rank's GPUs inside the last phase of this name that ended, or that was open when its process ended or an allocation failed, of all samples.";
    PHASE_MEMORY_PEAK_MAX = Gauge "highwater_phase_memory_peak_max_bytes" ["training_job", "rank", "namespace", "user", "phase", "window"]
        "Highest memory in use inside any phase of this name that ended within the sliding window, or that was open when its process ended or an allocation failed.";
    PHASE_MEMORY_GROWTH = Gauge "highwater_phase_memory_growth_bytes" ["training_job", "rank", "namespace", "user", "phase"]
        "Memory at the end of the last phase of this name less memory at its beginning.";
    PHASE_ENERGY = Counter "highwater_phase_energy_joules_total" ["training_job", "rank", "namespace", "user", "phase"]
        "Energy of the rank's GPUs inside phases of this name: power, read every 100 ms, times time.";
    PHASE_IDLE = Counter "highwater_phase_gpu_idle_seconds_total" ["training_job", "rank", "namespace", "user", "phase"]
        "Time inside phases of this name in which no kernel ran, the mean of several GPUs. From the driver's utilization, whose window is 1/6 to 1 s, so it is an estimate for shorter phases.";
    PHASE_SM_ACTIVE = Counter "highwater_phase_sm_active_seconds_total" ["training_job", "rank", "namespace", "user", "phase"]
        "Time of multiprocessors with a warp inside phases of this name: highwater_gpu_sm_active_ratio times time, the mean of several GPUs. Of phases of 2 s or longer alone, because the readings are means of 500 ms.";
    PHASE_TENSOR_ACTIVE = Counter "highwater_phase_tensor_active_seconds_total" ["training_job", "rank", "namespace", "user", "phase"]
        "The same of tensor cores: highwater_gpu_tensor_active_ratio times time.";
    PHASE_DRAM_ACTIVE = Counter "highwater_phase_dram_active_seconds_total" ["training_job", "rank", "namespace", "user", "phase"]
        "The same of memory that transfers: highwater_gpu_dram_active_ratio times time.";
    FINDING_ACTIVE = Gauge "highwater_finding_active" ["finding", "severity", "gpu", "uuid", "training_job", "rank", "namespace", "user"]
        "1 while a finding goes on, and after its last sign for three scrape intervals as the daemon observes them, at most 5 minutes; a label that does not apply is empty. docs/findings.md describes each kind.";
    FINDINGS = Counter "highwater_findings_total" ["finding", "gpu", "uuid", "training_job", "rank", "namespace", "user"]
        "Findings that were raised; a label that does not apply is empty. A new series is 0 for two scrape intervals, so that its first increase can be seen. The 512 series that changed last are kept.";
    FINDINGS_DROPPED = Counter "highwater_findings_dropped_total" []
        "Signs of findings that were dropped because 256 findings were already going on, and their owner had its share of them.";
    FINDINGS_UNSEEN = Counter "highwater_findings_unseen_phases_total" []
        "Steps and phases that were forgotten before the detectors saw them, because too many ended at once.";
    INCIDENT_ACTIVE = Gauge "highwater_incident_active" ["cause", "severity", "training_job", "namespace", "user", "gpu", "uuid"]
        "1 while an incident goes on: all findings of one job that have one cause, or of one GPU if no job is known on it; a label that does not apply is empty. After its last sign as highwater_finding_active.";
    INCIDENTS = Counter "highwater_incidents_total" ["cause", "training_job", "namespace", "user", "gpu", "uuid"]
        "How often incidents were there: each time that one began or came back. A new series is 0 for two scrape intervals. The 128 series that changed last are kept.";
    JOB_LOST = Counter "highwater_job_lost_seconds_total" ["training_job", "namespace", "user", "cause"]
        "Time that ranks of the job on this node lost to incidents of a cause, summed over the ranks, as far as findings know it: docs/findings.md has what each counts. A new series is 0 for two scrape intervals. The 128 series that changed last are kept.";
    JOB_PRODUCTIVE = Counter "highwater_job_productive_seconds_total" ["training_job", "namespace", "user"]
        "Time that ranks of the job on this node spent in steps and did not lose, summed over the ranks: without the warm-up, checkpoints and evaluations, and less highwater_job_lost_seconds_total, which is taken from the steps that follow. A new series is 0 for two scrape intervals. The 128 series that changed last are kept.";
    COMM_SLOWDOWN = Gauge "highwater_comm_slowdown_ratio" ["training_job", "rank", "namespace", "user"]
        "The last step's communication divided by the median of the rank's own healthy steps.";
    JOB_COMPUTE_LAG = Gauge "highwater_job_compute_lag_ratio" ["training_job", "rank", "namespace", "user"]
        "The last step's work divided by the median of the ranks that are like it on this node; absent where none is. Without marks of communication: of a rank that is late, the step divided by what it would have taken otherwise.";
    JOB_COMPARED = Gauge "highwater_job_compute_compared" ["training_job", "rank", "namespace", "user"]
        "1 if the last step could be compared with that of a rank that is like it, 0 if the marks give not enough evidence.";
    JOB_DATA_STALL = Gauge "highwater_job_data_stall_ratio" ["training_job", "rank", "namespace", "user"]
        "Share of the last 10 steps' time spent waiting for data with the GPU idle.";
    JOB_MEMORY_FULL = Gauge "highwater_job_memory_full_forecast_seconds" ["training_job", "rank", "namespace", "user"]
        "Time until memory is full at the present growth of the peak per step; absent while it does not grow.";
    PHASES = Counter "highwater_phases_total" ["outcome"]
        "Steps, phases and layers that ended or were given up, by outcome.";
    JOB_PROFILE_STEP = Gauge "highwater_job_profile_step" ["training_job", "rank", "namespace", "user"]
        "Step of the rank's last layer profile. From records of layers, updated when a profiled step is over, as are all metrics of the profile. docs/annotations.md describes the records.";
    JOB_PROFILE_LAYERS = Gauge "highwater_job_profile_layers" ["training_job", "rank", "namespace", "user"]
        "Different layers in the rank's last layer profile. Updated at each profiled step.";
    JOB_PROFILE_MISSING = Gauge "highwater_job_profile_missing_records" ["training_job", "rank", "namespace", "user"]
        "Records that the rank's last layer profile lacks because there was no room for them. Updated at each profiled step.";
    JOB_PROFILE_ACTIVATION = Gauge "highwater_job_profile_activation_bytes" ["training_job", "rank", "namespace", "user"]
        "Activations of all layers in the forward pass of the last profiled step, as the job measured them. Updated at each profiled step.";
    JOB_PROFILE_PARAMETER = Gauge "highwater_job_profile_parameter_bytes" ["training_job", "rank", "namespace", "user"]
        "Parameters of all layers of the last profiled step, each layer once. Updated at each profiled step.";
    JOB_PROFILE_GATHERED = Gauge "highwater_job_profile_gathered_bytes" ["training_job", "rank", "namespace", "user"]
        "Bytes that all-gathers produced in the last profiled step. Updated at each profiled step.";
    JOB_PROFILE_ALLOCATED_MAX = Gauge "highwater_job_profile_allocated_max_bytes" ["training_job", "rank", "namespace", "user"]
        "The most in live tensors after any layer of the last profiled step. Updated at each profiled step.";
    JOB_PROFILE_RESERVED_MAX = Gauge "highwater_job_profile_reserved_max_bytes" ["training_job", "rank", "namespace", "user"]
        "The most that the job's allocator held from the driver after any layer of the last profiled step. Updated at each profiled step.";
    LAYER_ACTIVATION = Gauge "highwater_layer_activation_bytes" ["training_job", "rank", "namespace", "user", "layer"]
        "Activations of one layer in the forward pass of the last profiled step; the `layers.top` layers of the rank with the most, and fewer if all ranks together have more than 2,048. Updated at each profiled step.";
    LAYER_PARAMETER = Gauge "highwater_layer_parameter_bytes" ["training_job", "rank", "namespace", "user", "layer"]
        "Parameters of the layers that highwater_layer_activation_bytes has. Updated at each profiled step.";
    LAYER_RECORDS_DROPPED = Counter "highwater_layer_records_dropped_total" []
        "Records of layers that are in no profile: refused for lack of room, of a step whose profile was whole already, or of a step that began again before it ended.";
    LAYERS_UNKEPT = Counter "highwater_layers_unkept_total" []
        "Layers that ended but were not kept, because there was no room for statistics of another layer; captures contain them all the same.";
    ANNOTATIONS = Counter "highwater_annotations_total" ["outcome"]
        "Annotation events received, by outcome. docs/annotations.md describes each outcome.";
    ANNOTATIONS_REFUSED = Counter "highwater_annotations_refused_total" ["sender"]
        "Annotation events refused, by sender: `uid N` as the kernel reports it, `tcp` if the kernel reports none, `other` for all senders beyond the first 16.";
    ANNOTATIONS_LOST = Counter "highwater_annotations_lost_total" ["sender"]
        "Annotation events that senders could not send, as they report in the field `lost` of the next event that they could, by sender as in highwater_annotations_refused_total.";
    ANNOTATIONS_HELD = Gauge "highwater_annotations_held_bytes" ["kind"]
        "Bytes that the daemon keeps for jobs: `open` for jobs, ranks, names and everything that is open or waits for its memory, `ended` for everything that has ended. At most `annotations.max_bytes` and `annotations.max_ended_bytes`.";
    CGROUPS_READ = Gauge "highwater_cgroups_read" []
        "Control groups of senders' processes in which the daemon sees that the kernel kills for want of host memory; 0 with jobs on the sockets means that `host.cgroups` has none of them. Every second.";
    NVML_UP = Gauge "highwater_nvml_up" []
        "Whether NVML could be opened and has GPUs. Absent for simulations and replays.";
    SOURCE_ERROR = Gauge "highwater_source_error" ["reason"]
        "1 with the reason while there is nothing to read; the daemon tries again every few seconds.";
    SOURCE_INFO = Gauge "highwater_source_info" ["source", "simulated"]
        "The source that is read, always 1: NVML with its driver's version, a simulation, or a replay. `simulated` is `true` where no GPU was read.";
    TICKS_DUE = Counter "highwater_sampler_ticks_due_total" []
        "Deadlines of the fast lane that passed: taken plus missed.";
    TICKS_TAKEN = Counter "highwater_sampler_ticks_taken_total" []
        "Deadlines at which every GPU that is up was asked, except those that are idle and not due. Readings that failed are in highwater_nvml_call_failures_total.";
    TICKS_MISSED = Counter "highwater_sampler_ticks_missed_total" ["cause"]
        "Deadlines at which memory was not read: because the thread woke late, or because the driver did not answer in time.";
    SAMPLER_PERIOD = Gauge "highwater_sampler_period_seconds" []
        "The fast lane's period in force: the time between ticks. Longer than configured while it backs off, or while no process has a context on any GPU (`sampling.idle_period`).";
    SAMPLER_LATENESS = Histogram "highwater_sampler_lateness_seconds" []
        "How long after its deadline each tick began.";
    NVML_CALL_DURATION = Histogram "highwater_nvml_call_duration_seconds" ["call"]
        "How long the driver took for each call.";
    NVML_CALL_FAILURES = Counter "highwater_nvml_call_failures_total" ["call"]
        "Calls that failed for another reason than not being supported.";
    NVML_BUSY = Gauge "highwater_nvml_busy_ratio" []
        "Share of wall time that all lanes together spent inside the driver since the last second began.";
    MEMORY = Gauge "highwater_memory_bytes" ["part"]
        "Resident memory of the daemon by what it is for; docs/prometheus.md describes the parts. `other` is what no part accounts for, so that all together are process_resident_memory_bytes.";
    RING_BYTES = Gauge "highwater_ring_bytes" ["gpu", "uuid"]
        "Bytes that the samples of this GPU take.";
    RING_SPAN = Gauge "highwater_ring_span_seconds" ["gpu", "uuid"]
        "How far back the samples of this GPU reach.";
    CAPTURES = Counter "highwater_captures_total" ["outcome"]
        "Triggers of the flight recorder, by outcome. docs/recordings.md describes each outcome. Absent if the recorder is off.";
    CAPTURES_REMOVED = Counter "highwater_captures_removed_total" []
        "Captures that were removed to make room for newer ones.";
    CAPTURES_BYTES = Gauge "highwater_captures_bytes" []
        "Bytes of all captures that are kept, at most `captures.most_bytes`.";
    OTLP_PRODUCED = Counter "highwater_otlp_produced_total" ["signal"]
        "Data points or spans produced for export over OTLP: exported, queued and dropped ones together.";
    OTLP_EXPORTED = Counter "highwater_otlp_exported_total" ["signal"]
        "Data points or spans that an OTLP receiver accepted.";
    OTLP_DROPPED = Counter "highwater_otlp_dropped_total" ["signal", "reason"]
        "Data points or spans that no OTLP receiver will get, by reason. docs/otlp.md describes each reason.";
    OTLP_QUEUED = Gauge "highwater_otlp_queued" ["signal"]
        "Data points or spans that wait to be exported over OTLP.";
    OTLP_QUEUED_BYTES = Gauge "highwater_otlp_queued_bytes" []
        "Bytes of everything that waits to be exported over OTLP, at most `otlp.queue_bytes`.";
    OTLP_ATTEMPTS = Counter "highwater_otlp_attempts_total" ["signal", "outcome"]
        "Requests to OTLP receivers, by outcome: sent, failed (tried again), refused for good.";
    OTLP_READ_FAILURES = Counter "highwater_otlp_read_failures_total" ["signal"]
        "How often the file of a request in `otlp.queue_dir` could not be read for now. The request keeps its place.";
    OTLP_SENT_BYTES = Counter "highwater_otlp_sent_bytes_total" ["signal"]
        "Bytes of the requests that OTLP receivers accepted, before compression.";
    HTTP_CONNECTIONS_OPEN = Gauge "highwater_http_open_connections" ["listener"]
        "Connections that are open: of `listen` (http), `annotations.listen` and `health.listen`.";
    HTTP_CONNECTIONS = Counter "highwater_http_connections_total" ["listener", "outcome"]
        "Connections that ended: closed by either side, idle for 20 s, evicted for a newer one when all places were taken, timed_out because the client was too slow, or handshake_failed.";
    HTTP_ACCEPT_FAILURES = Counter "highwater_http_accept_failures_total" ["listener"]
        "Connections that could not be accepted, for example for lack of file descriptors.";
    HTTP_REQUESTS_REFUSED = Counter "highwater_http_requests_refused_total" ["reason"]
        "Requests that were refused unread: for their Host, by the rate limit, for lack of a valid user and password, or because too many passwords were being checked. docs/web-config.md describes each reason.";
    WEB_CONFIG_READS = Counter "highwater_web_config_reads_total" ["outcome"]
        "How often the web configuration file was read after a change: taken, or refused, in which case the previous one stays in force. Absent if there is none.";
    BUILD_INFO = Gauge "highwater_build_info" ["version", "rustc"]
        "The version that was built, and the compiler, always 1.";
    PROCESS_CPU = Counter "process_cpu_seconds_total" []
        "User and system time of the daemon.";
    PROCESS_RESIDENT = Gauge "process_resident_memory_bytes" []
        "Resident memory of the daemon.";
    PROCESS_VIRTUAL = Gauge "process_virtual_memory_bytes" []
        "Virtual memory of the daemon.";
    PROCESS_FDS = Gauge "process_open_fds" []
        "Open file descriptors of the daemon.";
    PROCESS_MAX_FDS = Gauge "process_max_fds" []
        "Most file descriptors that the daemon may open.";
    PROCESS_THREADS = Gauge "process_threads" []
        "Threads of the daemon.";
    PROCESS_START = Gauge "process_start_time_seconds" []
        "Unix time at which the daemon started.";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_follow_the_conventions() {
        let mut seen = HashSet::new();
        for metric in ALL {
            assert!(seen.insert(metric.name), "{} is declared twice", metric.name);
            assert_eq!(metric.kind == MetricKind::Counter, metric.name.ends_with("_total"), "{}", metric.name);
            assert!(metric.help.ends_with('.') && metric.help.len() > 10, "{}", metric.name);
            assert!(metric.name.starts_with("highwater_") || metric.name.starts_with("process_"), "{}", metric.name);
        }
    }

    /// The table of docs/metrics.md, generated from the catalogue.
    #[test]
    fn the_documented_table_is_the_catalogue() {
        use std::fmt::Write as _;
        let mut table = String::from(
            "# Metrics\n\nGenerated from the catalogue in `src/metrics/catalogue.rs`; a test compares them. Values are in base units: bytes,\nseconds, watts, joules. A value that is not known has no series. The *fast lane* reads memory every millisecond, the\n*slow lane* reads what changes seldom, once a second or less often; ARCHITECTURE.md lists the lanes.\n\n| metric | kind | labels | what it is |\n|---|---|---|---|\n",
        );
        for metric in ALL {
            let kind = format!("{:?}", metric.kind).to_lowercase();
            let labels = metric.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
            let _ = writeln!(table, "| `{}` | {kind} | {labels} | {} |", metric.name, metric.help);
        }
        expect_test::expect_file!["../../docs/metrics.md"].assert_eq(&table);
    }
}
