//! Logs findings when they are raised and when they end, at a limited rate.

use highwater_core::clock::SECOND_NS;
use highwater_core::detect::{Change, Finding, Severity};

/// Lines logged in one minute. Findings beyond them are still in the metrics and the API.
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
        for finding in change.news() {
            if self.may() {
                raised(finding);
            }
        }
        for finding in &change.ended {
            if self.may() {
                tracing::info!(
                    finding = finding.sign.kind.label(),
                    id = finding.id,
                    signs = finding.signs,
                    "finding ended"
                );
            }
        }
    }

    fn may(&mut self) -> bool {
        self.lines += 1;
        if self.lines == MOST_LINES {
            tracing::warn!("too many findings in one minute to log; see /api/v1/findings for all of them");
        }
        self.lines < MOST_LINES
    }
}

fn raised(finding: &Finding) {
    let sign = &finding.sign;
    let (kind, severity, id, why) = (sign.kind.label(), sign.severity.label(), finding.id, &sign.text.why);
    match sign.severity {
        Severity::Info => tracing::info!(finding = kind, severity, id, why, "{}", sign.text.what),
        Severity::Warning | Severity::Critical => {
            tracing::warn!(finding = kind, severity, id, why, "{}", sign.text.what)
        }
    }
}
