//! The samples of findings and incidents, of lost and productive time, and of the ratios of each rank's last steps.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_core::detect::{Concerned, Counted, Detect, Finding, Incident, Incurred};
use highwater_core::jobs::{JobId, Scope};
use std::collections::BTreeSet;

/// Collects the findings, the incidents and the ratios.
pub(super) fn collect(detect: &Detect, now_ns: i64, out: &mut Families) {
    // Two XIDs of one GPU are two findings with the same labels, and so is one that has come again.
    let labels: BTreeSet<[String; 8]> = detect.shown(now_ns).iter().map(labels).collect();
    for labels in &labels {
        out.number(&c::FINDING_ACTIVE, Labels::found(&labels.each_ref().map(String::as_str)), Some(1.0));
    }
    for (counted, count) in detect.counts(now_ns) {
        out.count(&c::FINDINGS, counted_labels(&counted), Some(count));
    }
    // Two incidents of one cause, one of them over, have the same labels.
    let active: BTreeSet<[String; 7]> = detect.shown_incidents(now_ns).iter().map(incident_labels).collect();
    for labels in &active {
        out.number(&c::INCIDENT_ACTIVE, Labels::found(&labels.each_ref().map(String::as_str)), Some(1.0));
    }
    for (incurred, count) in detect.incurred(now_ns) {
        out.count(&c::INCIDENTS, incurred_labels(&incurred), Some(count));
    }
    for (lost, lost_ns) in detect.lost(now_ns) {
        let [job, namespace, user] = of_job(Some(&lost.job));
        let labels = Labels::found(&[&job, &namespace, &user, lost.cause.label()]);
        out.number(&c::JOB_LOST, labels, Some(seconds(lost_ns)));
    }
    for (job, productive_ns) in detect.productive(now_ns) {
        let [job, namespace, user] = of_job(Some(&job));
        out.number(&c::JOB_PRODUCTIVE, Labels::found(&[&job, &namespace, &user]), Some(seconds(productive_ns)));
    }
    let board = detect.board();
    out.count(&c::FINDINGS_DROPPED, (), Some(board.dropped()));
    out.count(&c::FINDINGS_UNSEEN, (), Some(detect.unseen()));
    for (rank, ratios) in board.ratios() {
        let labels = Labels::of_rank(rank);
        out.number(&c::COMM_SLOWDOWN, &labels, ratios.comm_slowdown);
        out.number(&c::JOB_COMPUTE_LAG, &labels, ratios.compute_lag);
        out.number(&c::JOB_COMPARED, &labels, ratios.compared.map(|is_compared| f64::from(u8::from(is_compared))));
        out.number(&c::JOB_DATA_STALL, &labels, ratios.data_stall);
        out.number(&c::JOB_MEMORY_FULL, labels, ratios.memory_full_seconds);
    }
}

#[allow(clippy::cast_precision_loss, reason = "nanoseconds of a job, as seconds")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn counted_labels(counted: &Counted) -> Labels {
    let (gpu, uuid) = counted.gpu.clone().unwrap_or_default();
    let rank = counted.rank.map(|rank| rank.to_string()).unwrap_or_default();
    let [job, namespace, user] = of_job(counted.job.as_ref());
    Labels::found(&[counted.kind.label(), &gpu, &uuid, &job, &rank, &namespace, &user])
}

fn incurred_labels(incurred: &Incurred) -> Labels {
    let [job, namespace, user, gpu, uuid] = of_concerned(incurred.whose.as_ref());
    Labels::found(&[incurred.cause.label(), &job, &namespace, &user, &gpu, &uuid])
}

fn incident_labels(incident: &Incident) -> [String; 7] {
    let [job, namespace, user, gpu, uuid] = of_concerned(Some(&incident.whose));
    [incident.cause.label().to_owned(), incident.severity.label().to_owned(), job, namespace, user, gpu, uuid]
}

/// Name, namespace and user of the job, or index and UUID of the GPU; empty where there is none.
fn of_concerned(whose: Option<&Concerned>) -> [String; 5] {
    let [job, namespace, user] = of_job(whose.and_then(Concerned::job));
    let [gpu, uuid] = match whose {
        Some(Concerned::Gpu(index, uuid)) => [index.clone(), uuid.clone()],
        _ => Default::default(),
    };
    [job, namespace, user, gpu, uuid]
}

/// Name, namespace and user of a job; empty where there is none.
fn of_job(job: Option<&JobId>) -> [String; 3] {
    let of_owner = |of: fn(&Scope) -> Option<&str>| job.and_then(|job| of(job.scope())).unwrap_or_default().to_owned();
    let name = job.map(|job| job.name().to_string()).unwrap_or_default();
    [name, of_owner(Scope::namespace), of_owner(Scope::user)]
}

fn labels(finding: &Finding) -> [String; 8] {
    let (sign, subject) = (&finding.sign, &finding.sign.subject);
    let (gpu, uuid) = finding.gpu.clone().unwrap_or_default();
    let rank = subject.rank.map(|rank| rank.to_string()).unwrap_or_default();
    let [job, namespace, user] = of_job(subject.job.as_ref());
    [sign.kind.label().to_owned(), sign.severity.label().to_owned(), gpu, uuid, job, rank, namespace, user]
}
