//! One rank that is late, and why: what the rules by the marks and by the GPUs find.

use crate::detect::finding::{Certainty, Evidence, LagCause, seconds};
use crate::detect::peers::{Group, Member};
use crate::detect::view::{View, median_of_others, ratio};
use std::sync::Arc;

/// A step must take at least this many times as long as it would without the late phase.
pub(super) const SLOWDOWN: f64 = 1.05;
/// Python's garbage collector is why a rank is late if it makes up at least this part of the lag.
const COLLECTED_SHARE: f64 = 0.5;
/// What a process waits for on its host is why, if the share of the time that it waited is at least this part of the lag's share.
const WAITED_HOST_SHARE: f64 = 0.5;

/// One rank that is late in one step or block.
pub(super) struct Found<'a> {
    pub member: &'a Member<'a>,
    /// The phase in which it is, if the marks say so.
    pub phase: Option<Arc<str>>,
    /// Why it is late, if that is known.
    pub cause: Option<LagCause>,
    pub lag_ns: i64,
    /// How long Python's garbage collector stopped it in a step longer than the others, nanoseconds, where that is the cause.
    pub collected_ns: i64,
    /// The share of the time that its process waited on its host, where that is the cause.
    pub host_share: f64,
    pub step_ns: i64,
    /// How long each peer waited for it in all steps that are not reported yet, nanoseconds.
    pub lost_ns: i64,
    /// Since when it is late.
    pub begin_ns: i64,
    /// For how long at least the finding goes on without another sign.
    pub hold_ns: i64,
    pub evidence: Vec<Evidence>,
    /// The numbers in words.
    pub numbers: String,
    pub certainty: Certainty,
}

impl Found<'_> {
    /// The same, with what its process waited for as the cause, if that explains why its host is late.
    pub fn on_host(mut self, view: &View<'_>) -> Self {
        let Some(waits) = view.hosts.shares(&self.member.step.key).filter(|_| self.cause == Some(LagCause::Host))
        else {
            return self;
        };
        let cpu = if waits.is_limited { LagCause::CpuLimit } else { LagCause::Cpu };
        let kinds = [
            (cpu, "cpu_wait_ratio", waits.cpu),
            (LagCause::HostMemory, "memory_stall_ratio", waits.memory),
            (LagCause::Storage, "storage_stall_ratio", waits.storage),
        ];
        let known = || kinds.iter().filter_map(|(cause, name, share)| Some((*cause, *name, (*share)?)));
        self.evidence.extend(known().map(|(_, name, value)| Evidence { name, value }));
        let lag = ratio(self.lag_ns, self.step_ns).unwrap_or(1.0);
        let most = known().max_by(|one, other| one.2.total_cmp(&other.2));
        if let Some((cause, _, share)) = most.filter(|(_, _, share)| *share >= WAITED_HOST_SHARE * lag) {
            (self.cause, self.host_share) = (Some(cause), share);
        }
        self
    }

    /// The same, with the garbage collector as the cause if it explains the lag; `collected_ns` is how long it stopped a rank in a
    /// step.
    pub fn explained(self, group: &Group<'_>, collected_ns: impl Fn(&Member<'_>) -> i64) -> Self {
        let own_ns = collected_ns(self.member);
        let mut all_ns: Vec<i64> = group.members.iter().map(collected_ns).collect();
        all_ns.sort_unstable();
        let more_ns = median_of_others(&all_ns, own_ns).map_or(0, |others_ns| own_ns - others_ns);
        #[allow(clippy::cast_precision_loss, reason = "a share of milliseconds")]
        let is_most = more_ns > 0 && more_ns as f64 >= COLLECTED_SHARE * self.lag_ns as f64;
        if !is_most || !matches!(self.cause, None | Some(LagCause::Host)) {
            return self;
        }
        let mut evidence = self.evidence;
        evidence.push(Evidence { name: "gc_seconds", value: seconds(own_ns) });
        Self { cause: Some(LagCause::GarbageCollector), collected_ns: more_ns, evidence, ..self }
    }
}
