//! The read API: GPUs, their memory over time, and jobs. Times are Unix nanoseconds.

use super::json::{self, Json};
use super::problem::Problem;
use super::site::Site;
use super::spans::uuids;
use super::workloads::{self, PodAnswer, SlurmAnswer};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{GpuState, Health, Process, Workload};
use highwater_core::jobs::{Gpus, Job, JobId, Rank, UnknownGpu};
use highwater_core::ring::{QueryError, Reader};
use highwater_core::source::{Skipped, provenance};
use highwater_core::wire;
use highwater_engine::node::Node;
use highwater_engine::recording::curve::Curve;
use highwater_engine::shared_state::SharedState;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// Points in one answer by default.
pub(super) const POINTS: usize = 10_000;
/// The most points that a client may request.
pub(super) const MOST_POINTS: usize = 100_000;

pub(super) fn node(site: &Site) -> Result<Arc<Node>, Problem> {
    node_of(site.state()).map_err(|why| Problem::new(StatusCode::SERVICE_UNAVAILABLE, why))
}

/// The current node, or why there is none.
fn node_of(state: &SharedState) -> Result<Arc<Node>, String> {
    state
        .slot
        .node()
        .ok_or_else(|| state.slot.trouble().map_or_else(|| "starting".to_owned(), |trouble| trouble.message.clone()))
}

/// The answer of `GET /api/v1/gpus`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct GpusAnswer {
    /// What is read.
    source: String,
    /// Whether that is a simulation, or the replay of one: no GPU was read.
    simulated: bool,
    /// Where the numbers of processes hold: the node's boot and the daemon's PID namespace.
    process_ids_of: Option<&'static str>,
    gpus: Vec<GpuAnswer>,
}

/// A GPU or MIG instance. Bytes and Unix nanoseconds; `null` if unknown.
#[derive(Default, Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct GpuAnswer {
    gpu: String,
    /// `null` for a GPU that could not be opened.
    uuid: Option<String>,
    name: Option<String>,
    pci_bus_id: Option<String>,
    parent_uuid: Option<String>,
    up: bool,
    /// Why it is not up.
    trouble: Option<String>,
    memory_total_bytes: Option<u64>,
    memory_reserved_bytes: Option<u64>,
    /// Total less what the driver reserves.
    memory_usable_bytes: Option<u64>,
    memory_used_bytes: Option<u64>,
    /// The most in the last minute.
    memory_peak_bytes: Option<u64>,
    /// Share of the driver's last window in which a kernel ran, 0 to 1.
    utilization_ratio: Option<f64>,
    power_watts: Option<f64>,
    power_limit_watts: Option<f64>,
    temperature_celsius: Option<f64>,
    /// Processes with a context on it, as the driver listed them last; `null` if it does not.
    processes: Option<Vec<ProcessAnswer>>,
    /// The containers that have it, where the kubelet is asked; `null` if that is not known.
    pods: Option<Vec<PodAnswer>>,
    /// The steps of Slurm's jobs that have it; `null` if the kubelet is asked instead, or none are known on this node.
    slurm_steps: Option<Vec<SlurmAnswer>>,
    /// How far back its memory is kept.
    oldest_unix_nano: Option<i64>,
    /// Its newest reading.
    newest_unix_nano: Option<i64>,
}

/// A process on a GPU.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct ProcessAnswer {
    pid: u32,
    used_bytes: Option<u64>,
    /// Its namespace and pod, as `research/llama-0`; `null` if it is in none, or that is not known.
    pod: Option<String>,
    /// Its job's number and step, as `77.0`; `null` likewise.
    slurm_step: Option<String>,
}

impl GpuAnswer {
    fn of(gpu: &GpuState, ring: &Reader, shift_ns: i64, asks_kubelet: bool) -> Self {
        let workloads = gpu.workloads();
        let workloads = workloads.as_deref();
        let name_of = |process: &Process| workloads?.of_process(process.pid).map(|row| &row.name);
        let used = ring.newest_ns().and_then(|newest_ns| ring.at(newest_ns).ok().flatten());
        let (device, is_up) = (gpu.device.clone(), gpu.health() == Health::Up);
        let peak = ring.newest_ns().and_then(|to_ns| {
            let of_minute = ring.of_kept(to_ns - 60 * SECOND_NS, to_ns, |from_ns| ring.summary_through(from_ns, to_ns));
            of_minute.ok()?.1.max
        });
        let medium = gpu.medium().filter(|_| is_up).map(|latest| latest.reading);
        let processes = gpu.processes().filter(|_| is_up);
        let process = |process: &Process| ProcessAnswer {
            pid: process.pid,
            used_bytes: process.used_bytes,
            pod: name_of(process).and_then(Workload::pod).map(|name| format!("{}/{}", name.namespace, name.pod)),
            slurm_step: name_of(process).and_then(Workload::slurm).map(workloads::number_of),
        };
        Self {
            gpu: device.index,
            uuid: Some(device.uuid),
            name: device.name,
            pci_bus_id: device.pci_bus_id,
            parent_uuid: device.parent_uuid,
            up: is_up,
            trouble: (!is_up).then(|| gpu.trouble()).filter(|trouble| !trouble.is_empty()),
            memory_total_bytes: gpu.total_bytes(),
            memory_reserved_bytes: gpu.reserved_bytes(),
            memory_usable_bytes: gpu.usable_bytes(),
            memory_used_bytes: used.filter(|_| is_up),
            memory_peak_bytes: peak.filter(|_| is_up),
            utilization_ratio: medium.and_then(|medium| medium.utilization_ratio),
            power_watts: medium.and_then(|medium| medium.power_watts),
            power_limit_watts: gpu.rare().and_then(|latest| latest.reading.power_limit_watts),
            temperature_celsius: medium.and_then(|medium| medium.temperature_celsius),
            processes: processes.map(|latest| latest.reading.iter().map(process).collect()),
            pods: workloads.filter(|_| asks_kubelet).map(workloads::pods_of),
            slurm_steps: workloads.filter(|_| !asks_kubelet).map(workloads::slurm_steps_of),
            oldest_unix_nano: ring.oldest_ns().map(|at_ns| at_ns + shift_ns),
            newest_unix_nano: ring.newest_ns().map(|at_ns| at_ns + shift_ns),
        }
    }

    fn skipped(gpu: &Skipped) -> Self {
        Self { gpu: gpu.index.clone(), trouble: Some(gpu.reason.clone()), ..Self::default() }
    }
}

/// All GPUs of the node.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/gpus", tag = "gpus", responses(
    (status = 200, body = GpusAnswer), (status = 503, description = "Nothing is read; the detail says why.", body = super::problem::Body))))]
pub(super) async fn gpus(State(site): State<Site>) -> Result<Json<GpusAnswer>, Problem> {
    let answer = gpus_now(site.state()).map_err(|why| Problem::new(StatusCode::SERVICE_UNAVAILABLE, why))?;
    Ok(Json(answer))
}

/// All GPUs now, or why there are none.
pub(super) fn gpus_now(state: &SharedState) -> Result<GpusAnswer, String> {
    let node = node_of(state)?;
    let shift_ns = node.clock.unix_shift_ns();
    let of = |(gpu, ring): (&GpuState, &Reader)| GpuAnswer::of(gpu, ring, shift_ns, state.kubelet.is_some());
    let gpus = node.gpus.iter().zip(node.rings.iter()).map(of);
    let skipped = node.source.skipped().iter().map(GpuAnswer::skipped);
    let source = node.source.description();
    let simulated = provenance::is_simulated(&source);
    let process_ids_of = super::process_ids_of();
    Ok(GpusAnswer { source, simulated, process_ids_of, gpus: gpus.chain(skipped).collect() })
}

/// The position of the GPU with this index, UUID or PCI bus id.
pub(super) fn find_gpu(node: &Node, gpu: String) -> Result<usize, Problem> {
    let devices: Vec<_> = node.gpus.iter().map(|gpu| gpu.device.clone()).collect();
    let unknown = |unknown: UnknownGpu| Problem::new(StatusCode::NOT_FOUND, unknown.to_string());
    Ok(Gpus::new(&devices).resolve(&wire::GpuList::One(wire::Gpu::Name(gpu))).map_err(unknown)?[0])
}

/// The query of `GET /api/v1/gpus/{gpu}/memory`.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct MemoryQuery {
    /// Begin, Unix nanoseconds; a minute before the end if left out. Before the oldest time that is kept, for example 0, it
    /// means that time.
    from: Option<i64>,
    /// End, Unix nanoseconds; the newest sample if left out.
    to: Option<i64>,
    /// The most points; 10,000 if left out, at most 100,000. If there are more, extremes are kept.
    max_points: Option<usize>,
}

/// The changes of a GPU's memory in an interval, as far back as they are kept.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/gpus/{gpu}/memory", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or PCI bus id."), MemoryQuery),
    responses((status = 200, body = MemoryAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "No such GPU, or none of its memory has been read.", body = super::problem::Body),
        (status = 410, description = "Nothing of the interval is kept any more; `oldest_unix_nano` is the oldest time that is.",
            body = super::problem::Body),
        (status = 503, description = "Nothing is read; the detail says why.", body = super::problem::Body))))]
pub(super) async fn memory(
    State(site): State<Site>,
    Path(gpu): Path<String>,
    query: Result<Query<MemoryQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let node = node(&site)?;
    let position = find_gpu(&node, gpu)?;
    let (ring, state) = (&node.rings[position], &node.gpus[position]);
    let shift_ns = node.clock.unix_shift_ns();
    let empty = || Problem::new(StatusCode::NOT_FOUND, "no memory has been read of this GPU yet");
    let (oldest_ns, newest_ns) = (ring.oldest_ns().ok_or_else(empty)?, ring.newest_ns().ok_or_else(empty)?);
    let to_ns = query.to.map_or(newest_ns, |to| to.saturating_sub(shift_ns)).min(newest_ns);
    let from_ns = query.from.map_or(to_ns.saturating_sub(60 * SECOND_NS), |from| from.saturating_sub(shift_ns));
    let most = query.max_points.unwrap_or(POINTS).clamp(4, MOST_POINTS);
    // A change exactly at the end belongs to the next interval, except for the newest reading, which may have no next
    // interval.
    let through_end = to_ns == newest_ns;
    let kept = ring.of_kept(from_ns, to_ns, |from_ns| ring.points_and_summary((from_ns, to_ns), through_end, most));
    let (from_ns, (points, summary)) = kept.map_err(|error| query_problem(&error, shift_ns))?;
    let answer = MemoryAnswer {
        gpu: state.device.index.clone(),
        uuid: state.device.uuid.clone(),
        from_unix_nano: from_ns + shift_ns,
        to_unix_nano: to_ns + shift_ns,
        oldest_unix_nano: oldest_ns + shift_ns,
        peak_bytes: summary.max,
        min_bytes: summary.min,
        mean_bytes: summary.mean,
        gap_ns: summary.gap_ns,
        bucket_ns: points.bucket_ns,
        points: points.points.iter().map(|point| (point.at_ns + shift_ns, point.used)).collect(),
    };
    Ok(site.answers.0.keep(json::line(&answer)?).response(json::TYPE))
}

/// The answer of `GET /api/v1/gpus/{gpu}/memory`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct MemoryAnswer {
    gpu: String,
    uuid: String,
    /// Begin of what is returned: later than the requested one if that is no longer kept.
    from_unix_nano: i64,
    /// End of what is returned: the newest reading if the requested one is later.
    to_unix_nano: i64,
    /// The oldest time of which memory was kept when the request came.
    oldest_unix_nano: i64,
    peak_bytes: Option<u64>,
    min_bytes: Option<u64>,
    mean_bytes: Option<f64>,
    /// For how long of it memory is not known.
    gap_ns: i64,
    /// The length of the intervals whose extremes are in `points`; `null` if every change is there.
    bucket_ns: Option<i64>,
    /// Unix nanoseconds, and bytes from then on; `null` begins a gap.
    #[cfg_attr(test, schema(value_type = Vec<Vec<Option<i64>>>))]
    points: Vec<(i64, Option<u64>)>,
}

impl MemoryAnswer {
    /// What a capture has of an interval of this GPU.
    pub fn of_capture(curve: Curve, uuid: String) -> Self {
        let ((from_unix_nano, to_unix_nano), summary) = (curve.interval, curve.summary);
        Self {
            gpu: curve.gpu,
            uuid,
            from_unix_nano,
            to_unix_nano,
            oldest_unix_nano: curve.oldest,
            peak_bytes: summary.max,
            min_bytes: summary.min,
            mean_bytes: summary.mean,
            gap_ns: summary.gap_ns,
            bucket_ns: curve.points.bucket_ns,
            points: curve.points.points.iter().map(|point| (point.at_ns, point.used)).collect(),
        }
    }
}

/// The problem for a query that failed. If the interval is no longer kept, the problem names the oldest Unix time that is.
fn query_problem(error: &QueryError, shift_ns: i64) -> Problem {
    if let QueryError::Overtaken { oldest_ns } = error {
        let oldest = oldest_ns.saturating_add(shift_ns);
        let detail = format!("memory of that time is no longer kept: only from {oldest} ns on");
        return Problem::new(StatusCode::GONE, detail).with("oldest_unix_nano", &oldest);
    }
    Problem::new(StatusCode::BAD_REQUEST, error.to_string())
}

#[allow(clippy::needless_pass_by_value, reason = "the shape that map_err takes")]
pub(super) fn bad_query(rejection: QueryRejection) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, rejection.body_text())
}

/// The answer of `GET /api/v1/jobs`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct JobsAnswer {
    jobs: Vec<ListedJob>,
}

/// A job and its ranks on this node.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct ListedJob {
    job: String,
    /// What the paths take where several owners have a job of this name.
    id: String,
    /// Of its pod, if that is known.
    namespace: Option<String>,
    /// Number of its user, or the network address that it sends from; `null` where the namespace is known.
    user: Option<String>,
    ranks: Vec<ListedRank>,
}

/// A rank.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct ListedRank {
    rank: u32,
    world_size: Option<u32>,
    pid: Option<u32>,
    /// Number of its last step.
    step: Option<u64>,
    /// Steps that ended, with those that a marked one stands for.
    steps: u64,
    /// UUIDs of its GPUs, as far as they are known.
    gpus: Vec<String>,
    /// Names of what is open, outermost first.
    #[cfg_attr(test, schema(value_type = Vec<String>))]
    open: Vec<Arc<str>>,
    /// Positions of its GPUs.
    #[serde(skip)]
    positions: Option<Arc<[usize]>>,
    /// Counters of the job's own allocator, as last sent.
    allocated_bytes: Option<u64>,
    reserved_bytes: Option<u64>,
    /// Memory of its process outside of the allocator, when its last phase ended that says so; `null` if it has several GPUs.
    outside_allocator_bytes: Option<u64>,
    last_annotation_unix_nano: i64,
}

/// All jobs that are known, with their ranks.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/jobs", tag = "jobs", responses((status = 200, body = JobsAnswer))))]
pub(super) async fn jobs(State(site): State<Site>) -> Json<JobsAnswer> {
    Json(jobs_now(site.state()))
}

/// All jobs now.
pub(super) fn jobs_now(state: &SharedState) -> JobsAnswer {
    let node = state.slot.node();
    let shift_ns = state.unix_shift_ns();
    let listed_rank = |(number, rank): (&u32, &Rank)| ListedRank {
        rank: *number,
        world_size: rank.world_size,
        pid: rank.pid,
        step: rank.step,
        steps: rank.steps,
        gpus: uuids(node.as_deref(), rank),
        open: rank.open.iter().map(|open| Arc::clone(&open.name)).collect(),
        positions: rank.gpus.clone(),
        allocated_bytes: rank.memory.allocated,
        reserved_bytes: rank.memory.reserved,
        outside_allocator_bytes: None,
        last_annotation_unix_nano: rank.last_event_ns.saturating_add(shift_ns),
    };
    let open = state.ledger.open();
    let of_job = |(id, job): (&JobId, &Job)| (id.clone(), job.ranks.iter().map(listed_rank).collect());
    let mut listed: Vec<(JobId, Vec<ListedRank>)> = open.by_id().iter().map(of_job).collect();
    drop(open);
    // The statistics are under another lock.
    let ended = state.ledger.ended();
    for (id, rank) in listed.iter_mut().flat_map(|(id, ranks)| ranks.iter_mut().map(|rank| (&*id, rank))) {
        let stats = ended.rank(&(id.clone(), rank.rank));
        rank.outside_allocator_bytes =
            stats.and_then(|stats| stats.outside_allocator_bytes(rank.pid, rank.positions.as_deref()));
    }
    drop(ended);
    let listed = listed.into_iter().map(|(id, ranks)| {
        let [namespace, user] = owner_of(&id);
        ListedJob { job: id.name().to_string(), id: id.text(), namespace, user, ranks }
    });
    JobsAnswer { jobs: listed.collect() }
}

/// Namespace and user of a job's owner, as far as they are known.
pub(super) fn owner_of(job: &JobId) -> [Option<String>; 2] {
    [job.scope().namespace(), job.scope().user()].map(|text| text.map(str::to_owned))
}
