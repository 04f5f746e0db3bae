//! Findings in the form in which recordings store them, and the findings that trigger a capture.

use super::trigger::{Findings, Reason, Trigger};
use highwater_core::detect::{Change, Detect, Finding, FindingKind, Severity};
use highwater_engine::recording::write::FindingRow;
use std::sync::Arc;

/// The findings of the node's detectors.
pub(super) struct OnBoard(pub Arc<Detect>);

impl Findings for OnBoard {
    fn between(&self, from_ns: i64, to_ns: i64) -> Vec<FindingRow> {
        let board = self.0.board();
        let held = |finding: &&Finding| {
            finding.sign.begin_ns <= to_ns && finding.ended_ns.is_none_or(|ended_ns| ended_ns >= from_ns)
        };
        board.all().filter(held).map(FindingRow::of).collect()
    }
}

/// The triggers that follow from a turn of the detectors. News of an incident is recorded, its return is not. A finding
/// of severity `info` triggers no capture, because captures of idle GPUs would push out those of real trouble.
pub(super) fn triggers(change: &Change) -> impl Iterator<Item = Trigger> {
    change.notable.iter().filter(|finding| finding.sign.severity > Severity::Info).map(|finding| {
        let subject = &finding.sign.subject;
        let reason = match (finding.sign.kind, &subject.job, subject.rank) {
            // If the rank marked it, the mark has triggered a capture with this reason already.
            (FindingKind::Oom, Some(job), Some(rank)) => Reason::Oom { job: job.clone(), rank },
            (kind, ..) => Reason::Finding(kind.label()),
        };
        let at_ns = finding.seen_ns;
        let owner = subject.job.as_ref().map(|job| job.scope().clone());
        Trigger { reason, at_ns, note: finding.sign.text.what.clone(), owner }
    })
}
