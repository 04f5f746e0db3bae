//! Logs incidents: findings that are news of one, how often it came back, and its end; at a limited rate.

use highwater_core::clock::SECOND_NS;
use highwater_core::detect::{Change, Finding, Incident, Severity};

/// Lines logged in one minute. What is beyond them is still in the metrics and the API.
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
            if self.may() {
                raised(finding);
            }
        }
        for incident in change.begun.iter().filter(|incident| is_worth_a_line(incident) && incident.times > 1) {
            if self.may() {
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
            if self.may() {
                let (cause, times) = (incident.cause.label(), incident.times);
                let lost = incident
                    .lost_ns
                    .map(|lost_ns| format!("{}.{} s", lost_ns / 1_000_000_000, lost_ns / 100_000_000 % 10));
                tracing::info!(incident = incident.id, cause, times, lost, "incident over");
            }
        }
    }

    fn may(&mut self) -> bool {
        self.lines += 1;
        if self.lines == MOST_LINES {
            tracing::warn!("too many findings in one minute to log; see /api/v1/incidents for all of them");
        }
        self.lines < MOST_LINES
    }
}

/// Of one that comes back again and again, the 1st, 2nd, 4th, 8th time and so on.
fn is_worth_a_line(incident: &Incident) -> bool {
    incident.times.is_power_of_two()
}

fn raised(finding: &Finding) {
    let (sign, incident, id) = (&finding.sign, finding.incident, finding.id);
    let (kind, severity, why) = (sign.kind.label(), sign.severity.label(), &sign.text.why);
    match sign.severity {
        Severity::Info => tracing::info!(finding = kind, severity, id, incident, why, "{}", sign.text.what),
        Severity::Warning | Severity::Critical => {
            tracing::warn!(finding = kind, severity, id, incident, why, "{}", sign.text.what)
        }
    }
}
