//! The samples of findings, and of the ratios of each rank's last steps.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_core::detect::{Detect, Finding, Kind};
use std::collections::BTreeSet;

/// Collects the findings and the ratios.
pub(super) fn collect(detect: &Detect, out: &mut Families) {
    let board = detect.board();
    // Two XIDs of one GPU are two findings with the same labels.
    let labels: BTreeSet<[String; 6]> = board.active().map(labels).collect();
    for labels in &labels {
        out.number(&c::FINDING_ACTIVE, Labels::found(&labels.each_ref().map(String::as_str)), Some(1.0));
    }
    for kind in Kind::ALL {
        out.count(&c::FINDINGS, [kind.label()], Some(board.raised(kind)));
    }
    out.count(&c::FINDINGS_DROPPED, (), Some(board.dropped()));
    out.count(&c::FINDINGS_UNSEEN, (), Some(detect.unseen()));
    for ((job, rank), ratios) in board.ratios() {
        let rank = rank.to_string();
        let labels = Labels::found(&[job, &rank]);
        out.number(&c::COMM_SLOWDOWN, &labels, ratios.comm_slowdown);
        out.number(&c::JOB_COMPUTE_LAG, &labels, ratios.compute_lag);
        out.number(&c::JOB_DATA_STALL, &labels, ratios.data_stall);
        out.number(&c::JOB_MEMORY_FULL, labels, ratios.memory_full_seconds);
    }
}

fn labels(finding: &Finding) -> [String; 6] {
    let (sign, subject) = (&finding.sign, &finding.sign.subject);
    let (gpu, uuid) = finding.gpu.clone().unwrap_or_default();
    let job = subject.job.as_deref().unwrap_or_default().to_owned();
    let rank = subject.rank.map(|rank| rank.to_string()).unwrap_or_default();
    [sign.kind.label().to_owned(), sign.severity.label().to_owned(), gpu, uuid, job, rank]
}
