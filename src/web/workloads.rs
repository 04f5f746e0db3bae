//! The pods and Slurm steps of an answer.

use highwater_core::gpu::{GpuWorkloads, PodName, SlurmStep, Workload, WorkloadRow};
use serde::Serialize;
#[cfg(test)]
use utoipa::ToSchema;

/// A container of a pod.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct PodNameAnswer {
    namespace: String,
    pod: String,
    /// Empty if it is not known.
    container: String,
}

/// A step of a Slurm job.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct SlurmStepAnswer {
    job: String,
    /// `0`, `batch`, `extern`; empty if it is not known.
    step: String,
    /// The number of its user; `null` if it is not known.
    user: Option<u32>,
}

/// A container that was given a GPU, or whose processes hold memory on it.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct PodAnswer {
    #[serde(flatten)]
    name: PodNameAnswer,
    /// What its processes hold on the GPU; `null` if it is not known.
    used_bytes: Option<u64>,
}

/// A Slurm step that has a GPU.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct SlurmAnswer {
    #[serde(flatten)]
    name: SlurmStepAnswer,
    /// What its processes hold on the GPU; `null` if it is not known.
    used_bytes: Option<u64>,
}

impl PodNameAnswer {
    fn of(PodName { namespace, pod, container }: &PodName) -> Self {
        Self { namespace: namespace.clone(), pod: pod.clone(), container: container.clone() }
    }
}

impl SlurmStepAnswer {
    fn of(SlurmStep { job, step, user }: &SlurmStep) -> Self {
        Self { job: job.clone(), step: step.clone(), user: *user }
    }
}

/// `77.0`, or `77` where the step is not known.
pub(super) fn number_of(SlurmStep { job, step, .. }: &SlurmStep) -> String {
    if step.is_empty() { job.clone() } else { format!("{job}.{step}") }
}

/// The names among these that are pods'.
pub(super) fn pods<'a>(names: impl IntoIterator<Item = &'a Workload>) -> Vec<PodNameAnswer> {
    names.into_iter().filter_map(Workload::pod).map(PodNameAnswer::of).collect()
}

/// The names among these that are Slurm steps'.
pub(super) fn slurm_steps<'a>(names: impl IntoIterator<Item = &'a Workload>) -> Vec<SlurmStepAnswer> {
    names.into_iter().filter_map(Workload::slurm).map(SlurmStepAnswer::of).collect()
}

/// The pods of a GPU.
pub(super) fn pods_of(gpu: &GpuWorkloads) -> Vec<PodAnswer> {
    let answer = |WorkloadRow { name, used_bytes }: &WorkloadRow| {
        Some(PodAnswer { name: PodNameAnswer::of(name.pod()?), used_bytes: *used_bytes })
    };
    gpu.rows.iter().filter_map(answer).collect()
}

/// The Slurm steps of a GPU.
pub(super) fn slurm_steps_of(gpu: &GpuWorkloads) -> Vec<SlurmAnswer> {
    let answer = |WorkloadRow { name, used_bytes }: &WorkloadRow| {
        Some(SlurmAnswer { name: SlurmStepAnswer::of(name.slurm()?), used_bytes: *used_bytes })
    };
    gpu.rows.iter().filter_map(answer).collect()
}
