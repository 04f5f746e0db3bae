//! The samples of findings, and of the ratios of each rank's last steps.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_core::detect::{Detect, Finding, Kind};
use highwater_core::jobs::Scope;
use std::collections::BTreeSet;

/// Collects the findings and the ratios.
pub(super) fn collect(detect: &Detect, out: &mut Families) {
    let board = detect.board();
    // Two XIDs of one GPU are two findings with the same labels.
    let labels: BTreeSet<[String; 8]> = board.active().map(labels).collect();
    for labels in &labels {
        out.number(&c::FINDING_ACTIVE, Labels::found(&labels.each_ref().map(String::as_str)), Some(1.0));
    }
    for kind in Kind::ALL {
        out.count(&c::FINDINGS, [kind.label()], Some(board.raised(kind)));
    }
    out.count(&c::FINDINGS_DROPPED, (), Some(board.dropped()));
    out.count(&c::FINDINGS_UNSEEN, (), Some(detect.unseen()));
    for (rank, ratios) in board.ratios() {
        let labels = Labels::of_rank(rank);
        out.number(&c::COMM_SLOWDOWN, &labels, ratios.comm_slowdown);
        out.number(&c::JOB_COMPUTE_LAG, &labels, ratios.compute_lag);
        out.number(&c::JOB_DATA_STALL, &labels, ratios.data_stall);
        out.number(&c::JOB_MEMORY_FULL, labels, ratios.memory_full_seconds);
    }
}

fn labels(finding: &Finding) -> [String; 8] {
    let (sign, subject) = (&finding.sign, &finding.sign.subject);
    let (gpu, uuid) = finding.gpu.clone().unwrap_or_default();
    let job = subject.job.as_ref().map(|job| job.name().to_string()).unwrap_or_default();
    let rank = subject.rank.map(|rank| rank.to_string()).unwrap_or_default();
    let of_owner = |of: fn(&Scope) -> Option<&str>| {
        subject.job.as_ref().and_then(|job| of(job.scope())).unwrap_or_default().to_owned()
    };
    let (namespace, user) = (of_owner(Scope::namespace), of_owner(Scope::user));
    [sign.kind.label().to_owned(), sign.severity.label().to_owned(), gpu, uuid, job, rank, namespace, user]
}
