//! `GET /api/v1/jobs/{job}`: one job, with the statistics of its ranks side by side.

use super::api::owner_of;
use super::json;
use super::phases::find;
use super::problem::Problem;
use super::site::Site;
use super::spans::uuids;
use axum::extract::{Path, State};
use axum::response::Response;
use highwater_core::detect::Ratios;
use highwater_core::histogram::Durations;
use highwater_core::jobs::{JobId, Rank};
use highwater_core::phases::{PhaseStats, RankStats};
use serde::Serialize;
use std::sync::Arc;
#[cfg(test)]
use utoipa::ToSchema;

/// A job.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct JobAnswer {
    job: String,
    /// What the paths take where several owners have a job of this name.
    id: String,
    /// Of its pod, if that is known.
    namespace: Option<String>,
    /// Number of its user, or the network address that it sends from; `null` where the namespace is known.
    user: Option<String>,
    ranks: Vec<RankAnswer>,
}

/// A rank and its statistics since the daemon knows it.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct RankAnswer {
    rank: u32,
    world_size: Option<u32>,
    pid: Option<u32>,
    /// UUIDs of its GPUs, as far as they are known.
    gpus: Vec<String>,
    step: Option<u64>,
    steps: u64,
    /// Names of what is open, outermost first.
    #[cfg_attr(test, schema(value_type = Vec<String>))]
    open: Vec<Arc<str>>,
    last_annotation_unix_nano: i64,
    /// When the rank ended; `null` while it goes on.
    exited_unix_nano: Option<i64>,
    /// Counters of the job's own allocator, as last sent.
    allocated_bytes: Option<u64>,
    reserved_bytes: Option<u64>,
    alloc_retries: Option<u64>,
    ooms: Option<u64>,
    ratios: RatiosAnswer,
    /// `null` while no step has ended.
    step_durations: Option<DurationsAnswer>,
    phases: Vec<PhaseAnswer>,
}

/// What the detectors compare; each is `null` if it is not known.
#[derive(Serialize, Default)]
#[cfg_attr(test, derive(ToSchema))]
struct RatiosAnswer {
    /// The last step's communication divided by the rank's own healthy baseline.
    comm_slowdown: Option<f64>,
    /// The last step's work divided by the median of the ranks that are like it; where that is not marked, how many times as long
    /// the step took because the others waited for this rank.
    compute_lag: Option<f64>,
    /// Whether the last step could be compared with that of a rank that is like it; `false` is insufficient evidence.
    compared: Option<bool>,
    /// Share of the last steps' time spent waiting for data with the GPU idle.
    data_stall: Option<f64>,
    /// Time until memory is full at the present growth.
    memory_full_seconds: Option<f64>,
}

/// The phases of one name of one rank.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct PhaseAnswer {
    #[cfg_attr(test, schema(value_type = String))]
    phase: Arc<str>,
    durations: DurationsAnswer,
    /// Highest memory in use in the last one, bytes.
    peak_bytes: Option<u64>,
    /// Memory at the end of the last one less memory at its begin, bytes.
    growth_bytes: Option<i64>,
    energy_joules: Option<f64>,
    gpu_idle_seconds: Option<f64>,
    /// Of those of 2 s or longer alone, as the next two.
    sm_active_seconds: Option<f64>,
    tensor_active_seconds: Option<f64>,
    dram_active_seconds: Option<f64>,
}

/// Durations. Quantiles are exact to a bucket of the exponential histogram, a few percent.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct DurationsAnswer {
    count: u64,
    total_seconds: f64,
    mean_seconds: f64,
    p50_seconds: Option<f64>,
    p90_seconds: Option<f64>,
    p99_seconds: Option<f64>,
    max_seconds: Option<f64>,
}

impl DurationsAnswer {
    fn of(durations: &Durations) -> Option<Self> {
        let all = durations.exponential();
        #[allow(clippy::cast_precision_loss, reason = "a count of durations")]
        (all.count() > 0).then(|| Self {
            count: all.count(),
            total_seconds: all.sum(),
            mean_seconds: all.sum() / all.count() as f64,
            p50_seconds: all.quantile(0.5),
            p90_seconds: all.quantile(0.9),
            p99_seconds: all.quantile(0.99),
            max_seconds: all.extremes().map(|(_, highest)| highest),
        })
    }
}

impl PhaseAnswer {
    fn of((name, stats): (&Arc<str>, &PhaseStats)) -> Option<Self> {
        Some(Self {
            phase: Arc::clone(name),
            durations: DurationsAnswer::of(&stats.durations)?,
            peak_bytes: stats.peak_bytes,
            growth_bytes: stats.growth_bytes,
            energy_joules: stats.energy_joules,
            gpu_idle_seconds: stats.gpu_time.idle_seconds,
            sm_active_seconds: stats.gpu_time.sm_active_seconds,
            tensor_active_seconds: stats.gpu_time.tensor_active_seconds,
            dram_active_seconds: stats.gpu_time.dram_active_seconds,
        })
    }
}

/// One job, with the statistics of its ranks.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/jobs/{job}", tag = "jobs", params(("job" = String, Path, description = "Its name.")),
    responses((status = 200, body = JobAnswer), (status = 404, description = "No such job is known.", body = super::problem::Body),
        (status = 409, description = "Several owners have a job of this name.", body = super::problem::Body))))]
pub(super) async fn job(State(site): State<Site>, Path(name): Path<String>) -> Result<Response, Problem> {
    let id = find(&site, &name)?;
    let mut ranks = open_ranks(&site, &id);
    let key = |rank: &RankAnswer| (id.clone(), rank.rank);
    let board = site.state().findings.board();
    for rank in &mut ranks {
        rank.ratios = board.ratios().get(&key(rank)).map(RatiosAnswer::of).unwrap_or_default();
    }
    drop(board);
    let log = site.state().ledger.ended();
    for rank in &mut ranks {
        if let Some(stats) = log.rank(&key(rank)) {
            rank.add(stats);
        }
    }
    drop(log);
    let [namespace, user] = owner_of(&id);
    let answer = JobAnswer { job: id.name().to_string(), id: id.text(), namespace, user, ranks };
    // Two thousand phases are most of a megabyte.
    Ok(site.answers.0.keep(json::line(&answer)?).response(json::TYPE))
}

/// The job's ranks without their statistics, which are under another lock.
fn open_ranks(site: &Site, id: &JobId) -> Vec<RankAnswer> {
    let node = site.state().slot.node();
    let shift_ns = site.state().unix_shift_ns();
    let answer = |(number, rank): (&u32, &Rank)| RankAnswer {
        rank: *number,
        world_size: rank.world_size,
        pid: rank.pid,
        gpus: uuids(node.as_deref(), rank),
        step: rank.step,
        steps: rank.steps,
        open: rank.open.iter().map(|open| Arc::clone(&open.name)).collect(),
        last_annotation_unix_nano: rank.last_event_ns.saturating_add(shift_ns),
        exited_unix_nano: rank.exited_ns.map(|at_ns| at_ns.saturating_add(shift_ns)),
        allocated_bytes: rank.memory.allocated,
        reserved_bytes: rank.memory.reserved,
        alloc_retries: rank.memory.alloc_retries,
        ooms: rank.memory.ooms,
        ratios: RatiosAnswer::default(),
        step_durations: None,
        phases: Vec::new(),
    };
    let jobs = site.state().ledger.open();
    jobs.by_id().get(id).map(|job| job.ranks.iter().map(answer).collect()).unwrap_or_default()
}

impl RankAnswer {
    fn add(&mut self, stats: &RankStats) {
        self.step_durations = DurationsAnswer::of(&stats.step_durations);
        self.phases = stats.phases.iter().filter_map(PhaseAnswer::of).collect();
    }
}

impl RatiosAnswer {
    fn of(ratios: &Ratios) -> Self {
        Self {
            comm_slowdown: ratios.comm_slowdown,
            compute_lag: ratios.compute_lag,
            compared: ratios.compared,
            data_stall: ratios.data_stall,
            memory_full_seconds: ratios.memory_full_seconds,
        }
    }
}
