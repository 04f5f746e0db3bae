//! What a late rank's finding says.

use super::lag::Found;
use crate::detect::finding::{Evidence, FindingKind, HumanDuration, LagCause, Severity, Sign, Subject, Text, seconds};
use crate::detect::view::View;

impl Found<'_> {
    /// `peers` is how many ranks wait for it.
    pub(super) fn sign(self, view: &View<'_>, slowdown: Option<f64>, peers: usize) -> Sign {
        let step = self.member.step;
        let (job, rank) = (&step.key.0, step.key.1);
        let what = self.what();
        let advice = advice(self.cause);
        let numbers = [
            Some(Evidence { name: "lag_seconds", value: seconds(self.lag_ns) }),
            slowdown.map(|value| Evidence { name: "slowdown_ratio", value }),
        ];
        Sign {
            kind: FindingKind::Straggler,
            subject: Subject { gpu: step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
            severity: Severity::Warning,
            certainty: self.certainty,
            begin_ns: self.begin_ns,
            until_ns: view.now_ns + view.settings.hold_ns.max(self.hold_ns),
            step: step.number,
            code: None,
            lag_cause: self.cause,
            waiting_ranks: Vec::new(),
            lost_ns: i64::try_from(peers).ok().map(|peers| self.lost_ns.saturating_mul(peers)),
            evidence: numbers.into_iter().flatten().chain(self.evidence).collect(),
            text: Text { what, why: self.numbers, advice: advice.to_owned() },
        }
    }

    fn what(&self) -> String {
        let (job, rank) = (&self.member.step.key.0, self.member.step.key.1);
        let lag = HumanDuration(self.lag_ns);
        let share = format!("{:.0} %", 100.0 * self.host_share);
        let waits_for = match self.cause {
            Some(LagCause::Cpu) => Some(format!("its process waits for a CPU for {share} of the time")),
            Some(LagCause::CpuLimit) => {
                Some(format!("its container has reached its CPU limit, and its process waits for {share} of the time"))
            }
            Some(LagCause::HostMemory) => {
                Some(format!("its container waits for the host's memory for {share} of the time"))
            }
            Some(LagCause::Storage) => Some(format!("its container waits for storage for {share} of the time")),
            _ => None,
        };
        match (&self.phase, self.cause) {
            (_, Some(LagCause::Data)) => {
                format!("Rank {rank} of {job} waits {lag} longer for data than the other ranks, which wait for it.")
            }
            (_, Some(LagCause::GarbageCollector)) => format!(
                "Python's garbage collector stops rank {rank} of {job} for {} a step longer than the other ranks, which wait for \
                 it.",
                HumanDuration(self.collected_ns)
            ),
            (Some(name), cause) => {
                let because = match cause {
                    Some(LagCause::Computes) => Some("it computes longer".to_owned()),
                    Some(LagCause::Clocks) => Some("its GPU's clocks are held back".to_owned()),
                    Some(LagCause::Host) => Some("its host is late, and its GPU has nothing to do".to_owned()),
                    _ => waits_for,
                };
                let because = because.map(|because| format!(": {because}")).unwrap_or_default();
                format!(
                    "Rank {rank} of {job} takes {lag} longer in {name} than the other ranks, which wait for it{because}."
                )
            }
            (None, Some(LagCause::Clocks)) => format!(
                "Rank {rank} of {job} computes longer because its GPU's clocks are held back, and the other ranks wait for it: up \
                 to {lag} a step."
            ),
            (None, Some(LagCause::Host)) => format!(
                "The host of rank {rank} of {job} is late: its GPU has nothing to do while the other ranks wait for it, up to \
                 {lag} a step."
            ),
            (None, _) if waits_for.is_some() => format!(
                "The host of rank {rank} of {job} is late: {}. The other ranks wait for it, up to {lag} a step.",
                waits_for.unwrap_or_default()
            ),
            (None, _) => format!(
                "Rank {rank} of {job} computes longer than the other ranks, which wait for it: up to {lag} a step."
            ),
        }
    }
}

fn advice(cause: Option<LagCause>) -> &'static str {
    match cause {
        None | Some(LagCause::Computes | LagCause::Memory) => {
            "Compare its input (sequence lengths, experts), its GPU's clocks and throttle reasons, and its host's load with \
             its peers'."
        }
        Some(LagCause::Data) => "Look at its data loader: workers, prefetching, and the storage that this rank reads.",
        Some(LagCause::Clocks) => {
            "Look at the finding gpu_throttled of its GPU: heat, the power brake, or the power supply."
        }
        Some(LagCause::Host) => {
            "Look at what its process does between kernels (py-spy dump, or a trace): logging, a lock, a CPU that others use."
        }
        Some(LagCause::Cpu) => {
            "See what else runs on its CPUs: data loader workers and threads of the job itself (OMP_NUM_THREADS), other jobs, or \
             a CPU set that is too small (taskset -p, cpuset)."
        }
        Some(LagCause::CpuLimit) => {
            "Raise its container's CPU limit (cpu.max; in Kubernetes resources.limits.cpu), or start fewer data loader workers \
             and threads (OMP_NUM_THREADS)."
        }
        Some(LagCause::HostMemory) => {
            "Raise its container's memory limit, or keep less in the host's memory: fewer data loader workers, a smaller prefetch."
        }
        Some(LagCause::Storage) => {
            "See what it reads and writes between kernels: logs, checkpoints, a data set on slow storage."
        }
        Some(LagCause::GarbageCollector) => {
            "Call gc.freeze() once the model is built, and gc.disable() with a gc.collect() on all ranks in the same step; look \
             for objects that this rank makes in each step and keeps, such as lists of losses or log records."
        }
    }
}
