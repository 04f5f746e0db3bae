//! Findings in the form in which recordings store them, and the findings that trigger a capture.

use super::trigger::{Findings, Reason, Trigger};
use crate::recording::write::FindingRow;
use highwater_core::detect::{Change, Detect, Finding, Severity};
use std::sync::Arc;

/// The findings of the node's detectors.
pub(super) struct OnBoard(pub Arc<Detect>);

impl Findings for OnBoard {
    fn between(&self, from_ns: i64, to_ns: i64) -> Vec<FindingRow> {
        let board = self.0.board();
        let held = |finding: &&Finding| {
            finding.sign.begin_ns <= to_ns && finding.ended_ns.is_none_or(|ended_ns| ended_ns >= from_ns)
        };
        board.all().filter(held).map(row).collect()
    }
}

fn row(finding: &Finding) -> FindingRow {
    let (sign, subject) = (&finding.sign, &finding.sign.subject);
    let evidence = sign.evidence.iter().map(|evidence| (evidence.name.to_owned(), evidence.value.into()));
    FindingRow {
        id: finding.id,
        kind: sign.kind.label(),
        severity: sign.severity.label().to_owned(),
        certainty: sign.certainty.label().to_owned(),
        gpu_uuid: finding.gpu.as_ref().map(|(_, uuid)| uuid.clone()),
        job: subject.job.as_deref().map(str::to_owned),
        rank: subject.rank,
        begin_ns: sign.begin_ns,
        end_ns: finding.ended_ns,
        what: sign.text.what.clone(),
        why: sign.text.why.clone(),
        advice: sign.text.advice.clone(),
        evidence: serde_json::Value::Object(evidence.collect()),
    }
}

/// The triggers that follow from a turn of the detectors. A finding that is only worth knowing triggers no capture:
/// those of an idle GPU would push out those of real trouble.
pub(super) fn triggers(change: &Change) -> impl Iterator<Item = Trigger> {
    change.news().filter(|finding| finding.sign.severity > Severity::Info).map(|finding| {
        let (reason, at_ns) = (Reason::Finding(finding.sign.kind.label()), finding.seen_ns);
        Trigger { reason, at_ns, note: finding.sign.text.what.clone() }
    })
}
