//! `host_oom`: a rank ran out of host memory, so that the kernel killed a process of it.
//!
//! From the rank's mark `host_oom`, which the daemon makes from what the kernel counts of the rank's control group, or which somebody
//! else sends who knows. From outside such an end looks like any other: nothing is in the job's log, and its GPU may be far from full.

use super::detector::{Detector, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, Severity, Sign, Subject, Text, number};
use super::steps::place;
use super::view::{View, bytes, human};
use crate::clock::SECOND_NS;
use crate::jobs::HostOom;
use crate::phases::RankKey;
use std::collections::BTreeMap;

/// Until when it goes on after its mark: for as long as an alert needs to see it.
const HOLD_NS: i64 = 60 * SECOND_NS;

/// Follows the marks of all ranks.
#[derive(Debug, Default)]
pub(super) struct HostOomDetector {
    /// By rank, the number of its last mark that was reported.
    marked: BTreeMap<RankKey, u64>,
}

impl Detector for HostOomDetector {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        let is_new = |key: &RankKey, oom: &HostOom| self.marked.get(key).is_none_or(|count| *count < oom.count);
        let new = view.host_ooms.iter().filter(|(key, oom)| is_new(key, oom));
        signs.extend(new.map(|(key, oom)| sign(view, key, oom)));
        self.marked = view.host_ooms.iter().map(|(key, oom)| (key.clone(), oom.count)).collect();
    }
}

fn sign(view: &View<'_>, key: &RankKey, oom: &HostOom) -> Sign {
    let (job, rank) = key;
    // Where it ran, which is not where memory is missing.
    let gpu = oom.gpus.first().copied().filter(|gpu| view.counts_on(key, *gpu));
    let evidence = [
        oom.limit_bytes.map(|limit| bytes("host_limit_bytes", limit)),
        oom.killed.map(|killed| Evidence { name: "killed_processes_count", value: number(killed) }),
    ];
    Sign {
        kind: FindingKind::HostOom,
        subject: Subject { gpu, job: Some(job.clone()), rank: Some(*rank) },
        // A data loader without one of its processes fails a moment later, or is replaced.
        severity: if oom.has_ended == Some(false) { Severity::Warning } else { Severity::Critical },
        // The kernel counts processes, and does not say which.
        certainty: if oom.killed.is_some() { Certainty::Observed } else { Certainty::Confirmed },
        begin_ns: oom.at_ns,
        until_ns: view.now_ns + HOLD_NS,
        step: oom.step,
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: evidence.into_iter().flatten().collect(),
        text: Text { what: what(key, oom), why: why(oom), advice: advice(oom).to_owned() },
    }
}

fn what((job, rank): &RankKey, oom: &HostOom) -> String {
    let place = place(oom.phase.as_deref(), oom.step);
    let reached = match (oom.is_limit, oom.limit_bytes) {
        (Some(true), Some(limit)) => format!(": its limit of {} was reached", human(limit)),
        (Some(true), None) => ": its limit was reached".to_owned(),
        (Some(false), _) => ": the node had none left".to_owned(),
        (None, _) => String::new(),
    };
    let who = if oom.is_own == Some(false) { "A process beside rank" } else { "Rank" };
    format!("{who} {rank} of {job} ran out of host memory{place}{reached}.")
}

fn why(oom: &HostOom) -> String {
    let Some(killed) = oom.killed else { return "The job marked it.".to_owned() };
    let processes = if killed == 1 { "a process".to_owned() } else { format!("{killed} processes") };
    let group = oom.group.as_deref().map_or_else(String::new, |group| format!(" in control group {group}"));
    let whose = match (oom.has_ended, oom.is_own, oom.pid) {
        (Some(true), Some(true), Some(pid)) => format!(" The rank's process {pid} was ended by a signal."),
        (Some(true), Some(false), Some(pid)) => {
            format!(" The rank's process {pid} then ended by itself: it was another, such as one of its data loader.")
        }
        (Some(true), None, Some(pid)) => format!(" The rank's process {pid} ended at that time."),
        (None, Some(false), _) => {
            " It was not the rank's process, which closed its connection then: one of its data loader, for example."
                .to_owned()
        }
        (Some(false), ..) => " The rank's process goes on: it was another, such as one of its data loader.".to_owned(),
        _ => String::new(),
    };
    format!("The kernel killed {processes}{group}.{whose}")
}

fn advice(oom: &HostOom) -> &'static str {
    if oom.is_limit == Some(false) {
        "No limit of the job was reached: give each job on this node a memory limit (resources.limits.memory, --mem), so that the one \
         that takes too much is the one that ends, and see what else runs here."
    } else {
        "Raise the limit (resources.limits.memory of the container, --mem of the Slurm job), or take less host memory: fewer workers \
         of the data loader, a smaller prefetch_factor, and no copy of the data set in each worker; files in /dev/shm count too."
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::phases::hand::key;
    use std::sync::Arc;

    fn oom(count: u64) -> HostOom {
        HostOom {
            count,
            at_ns: SECOND_NS,
            ago_ns: 0,
            step: Some(12),
            phase: Some("data".into()),
            gpus: [0].into(),
            pid: Some(7),
            killed: Some(1),
            is_limit: Some(true),
            limit_bytes: Some(8 << 30),
            group: Some("/kubepods/pod1/ctr".into()),
            is_own: Some(true),
            has_ended: Some(true),
        }
    }

    fn look(hand: &mut Hand, detector: &mut HostOomDetector, of: Option<HostOom>) -> Vec<Sign> {
        hand.now_ns += SECOND_NS;
        hand.host_ooms = of.map(|oom| (key(1), Arc::new(oom))).into_iter().collect();
        hand.look(detector).0
    }

    #[test]
    fn a_mark_is_reported_once_with_the_limit_that_was_reached_also_of_a_rank_that_has_ended() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), HostOomDetector::default());
        assert!(look(&mut hand, &mut detector, None).is_empty());
        let [sign] = look(&mut hand, &mut detector, Some(oom(1))).try_into().expect("one");
        assert_eq!(
            (sign.kind, sign.severity, sign.certainty),
            (FindingKind::HostOom, Severity::Critical, Certainty::Observed)
        );
        assert_eq!((sign.subject.gpu, sign.subject.rank, sign.step), (Some(0), Some(1), Some(12)));
        assert_eq!((sign.begin_ns, sign.until_ns), (SECOND_NS, 62 * SECOND_NS));
        assert_eq!(
            sign.text.what,
            "Rank 1 of j ran out of host memory in data of step 12: its limit of 8.0 GiB was reached."
        );
        assert_eq!(
            sign.text.why,
            "The kernel killed a process in control group /kubepods/pod1/ctr. The rank's process 7 was ended by a signal."
        );
        assert!(sign.text.advice.starts_with("Raise the limit"), "{}", sign.text.advice);
        assert!(look(&mut hand, &mut detector, Some(oom(1))).is_empty(), "reported already");
        assert_eq!(look(&mut hand, &mut detector, Some(oom(2))).len(), 1, "another one");
    }

    #[test]
    fn a_node_without_memory_and_a_process_beside_the_rank_are_told_apart() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), HostOomDetector::default());
        let node = HostOom { is_limit: Some(false), limit_bytes: None, killed: Some(3), step: None, ..oom(1) };
        let [sign] = look(&mut hand, &mut detector, Some(node)).try_into().expect("one");
        assert_eq!(sign.text.what, "Rank 1 of j ran out of host memory in data: the node had none left.");
        assert!(sign.text.why.starts_with("The kernel killed 3 processes in"), "{}", sign.text.why);
        assert!(sign.text.advice.starts_with("No limit of the job"), "{}", sign.text.advice);
        let beside = HostOom {
            is_own: Some(false),
            has_ended: Some(false),
            pid: None,
            phase: None,
            limit_bytes: None,
            ..oom(2)
        };
        let [sign] = look(&mut hand, &mut detector, Some(beside)).try_into().expect("one");
        assert_eq!(sign.severity, Severity::Warning);
        assert_eq!(
            sign.text.what,
            "A process beside rank 1 of j ran out of host memory in step 12: its limit was reached."
        );
        assert!(sign.text.why.contains("The rank's process goes on"), "{}", sign.text.why);
        let exits = HostOom { is_own: Some(false), step: None, ..oom(3) };
        let [sign] = look(&mut hand, &mut detector, Some(exits)).try_into().expect("one");
        assert!(sign.text.what.starts_with("A process beside rank 1 of j ran out"), "{}", sign.text.what);
        assert!(sign.severity == Severity::Critical && sign.text.why.contains("7 then ended by itself"), "{sign:?}");
        let closes = HostOom { is_own: Some(false), has_ended: None, ..oom(4) };
        let [sign] = look(&mut hand, &mut detector, Some(closes)).try_into().expect("one");
        assert!(sign.severity == Severity::Critical && sign.text.why.contains("process, which closed"), "{sign:?}");
        let marked = HostOom { count: 5, at_ns: 0, ..HostOom::default() };
        let [sign] = look(&mut hand, &mut detector, Some(marked)).try_into().expect("one");
        assert_eq!(
            (sign.severity, sign.certainty, sign.text.what.as_str(), sign.text.why.as_str()),
            (Severity::Critical, Certainty::Confirmed, "Rank 1 of j ran out of host memory.", "The job marked it.")
        );
    }
}
