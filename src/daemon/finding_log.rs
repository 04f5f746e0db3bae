//! Logs notable findings, incidents that come back, and incidents that end, at a limited rate.

use highwater_core::clock::SECOND_NS;
use highwater_core::detect::{Change, Finding, Incident, Severity};

/// Lines logged in one minute. The last of them reports that others are left out; the metrics and the API have them
/// all.
const MOST_LINES: u32 = 20;

/// Counts the lines logged in the current minute.
#[derive(Debug, Default)]
pub struct FindingLog {
    minute_ns: i64,
    lines: u32,
}

impl FindingLog {
    /// Logs what one turn changed.
    pub fn log(&mut self, change: &Change, now_ns: i64) {
        if now_ns - self.minute_ns >= 60 * SECOND_NS {
            *self = Self { minute_ns: now_ns, lines: 0 };
        }
        for finding in &change.notable {
            if self.take_line() {
                raised(finding);
            }
        }
        for incident in change.begun.iter().filter(|incident| is_worth_a_line(incident) && incident.times > 1) {
            if self.take_line() {
                let (cause, times) = (incident.cause.label(), incident.times);
                match incident.severity {
                    Severity::Info => {
                        tracing::info!(incident = incident.id, cause, times, "again: {}", incident.text.what)
                    }
                    _ => tracing::warn!(incident = incident.id, cause, times, "again: {}", incident.text.what),
                }
            }
        }
        for incident in change.over.iter().filter(|incident| is_worth_a_line(incident)) {
            if self.take_line() {
                let (cause, times) = (incident.cause.label(), incident.times);
                let lost = incident
                    .lost_ns
                    .map(|lost_ns| format!("{}.{} s", lost_ns / 1_000_000_000, lost_ns / 100_000_000 % 10));
                tracing::info!(incident = incident.id, cause, times, lost, "incident over");
            }
        }
    }

    fn take_line(&mut self) -> bool {
        self.lines += 1;
        if self.lines == MOST_LINES {
            tracing::warn!("too many findings in one minute to log; see /api/v1/incidents for all of them");
        }
        self.lines < MOST_LINES
    }
}

/// Whether to log this occurrence. Only the 1st, 2nd, 4th, 8th and so on are logged, so that one incident does not fill
/// the log.
fn is_worth_a_line(incident: &Incident) -> bool {
    incident.times.is_power_of_two()
}

fn raised(finding: &Finding) {
    let (sign, incident, id) = (&finding.sign, finding.incident, finding.id);
    let (kind, severity, why) = (sign.kind.label(), sign.severity.label(), &sign.text.why);
    let workloads = (!finding.workloads.is_empty()).then(|| finding.workload_names().join(", "));
    match sign.severity {
        Severity::Info => tracing::info!(finding = kind, severity, id, incident, workloads, why, "{}", sign.text.what),
        Severity::Warning | Severity::Critical => {
            tracing::warn!(finding = kind, severity, id, incident, workloads, why, "{}", sign.text.what)
        }
    }
}
