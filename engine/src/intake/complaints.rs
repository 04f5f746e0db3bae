//! Logs refusals, with sender and reason, at a limited rate.
//!
//! A job that sends invalid events does so thousands of times a second. Its first few refusals are logged with its
//! owner, so that it can be found. Further ones are counted, and their number is logged with the next line. At the log
//! level `debug` every one is logged.

use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::{Owner, Refusal};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Refusals of one owner that are logged in one period.
const MOST_LOGGED: u32 = 6;
/// Owners whose refusals are logged in one period.
const MOST_OWNERS: usize = 16;
/// The period, nanoseconds.
const PERIOD_NS: i64 = 60 * SECOND_NS;
/// The longest detail that is logged or sent back, bytes: a JSON error repeats the invalid name.
const MOST_DETAIL_BYTES: usize = 256;

/// What was logged in this period.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    since_ns: i64,
    logged: HashMap<Owner, u32>,
    /// Refusals that were not logged.
    silent: u64,
}

impl Complaints {
    /// Logs a refusal as a warning, or at the level `debug` if this period's warnings for its owner are used up.
    pub fn refused(this: &Mutex<Self>, owner: &Owner, pid: Option<u32>, refusal: &Refusal, now_ns: i64) {
        let silent = {
            let mut complaints = this.lock().unwrap_or_else(PoisonError::into_inner);
            let is_worth_a_line = complaints.is_worth_a_line(owner, now_ns);
            complaints.silent += u64::from(!is_worth_a_line);
            is_worth_a_line.then(|| std::mem::take(&mut complaints.silent))
        };
        // After releasing the lock, because writing the log may be slow.
        let reason = refusal.outcome().label();
        match silent {
            Some(silent) => {
                let detail = detail(refusal);
                tracing::warn!(sender = %owner, pid, reason, ?detail, not_logged = silent, "annotation refused");
            }
            None => tracing::debug!(sender = %owner, pid, reason, detail = ?detail(refusal), "annotation refused"),
        }
    }

    fn is_worth_a_line(&mut self, owner: &Owner, now_ns: i64) -> bool {
        if now_ns.saturating_sub(self.since_ns) > PERIOD_NS {
            (self.since_ns, self.logged) = (now_ns, HashMap::new());
        }
        if !self.logged.contains_key(owner) && self.logged.len() >= MOST_OWNERS {
            return false;
        }
        let logged = self.logged.entry(owner.clone()).or_default();
        *logged = logged.saturating_add(1);
        *logged <= MOST_LOGGED
    }
}

/// The refusal's text, cut to the limit.
pub(super) fn detail(refusal: &Refusal) -> String {
    let mut detail = refusal.to_string();
    if detail.len() > MOST_DETAIL_BYTES {
        let end = (0..=MOST_DETAIL_BYTES).rev().find(|at| detail.is_char_boundary(*at)).unwrap_or(0);
        detail.truncate(end);
        detail.push('…');
    }
    detail
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::jobs::Within;

    #[test]
    fn each_owner_has_its_own_few_lines() {
        let (mut complaints, owner) = (Complaints::default(), |uid| Owner::User { uid, within: Within::Node });
        let lines = |complaints: &mut Complaints, uid, now_ns| {
            (0..100).filter(|_| complaints.is_worth_a_line(&owner(uid), now_ns)).count()
        };
        assert_eq!(lines(&mut complaints, 1, 0), MOST_LOGGED as usize);
        assert_eq!(lines(&mut complaints, 2, 0), MOST_LOGGED as usize, "another owner's flood hides none of them");
        assert_eq!(
            (3..1_000).map(|uid| lines(&mut complaints, uid, 0)).filter(|lines| *lines > 0).count(),
            MOST_OWNERS - 2
        );
        assert_eq!(lines(&mut complaints, 1, 2 * PERIOD_NS), MOST_LOGGED as usize);
    }

    #[test]
    fn a_detail_has_a_bound() {
        let long = detail(&Refusal::Malformed("é".repeat(10_000)));
        assert!(long.len() < MOST_DETAIL_BYTES + 8 && long.ends_with('…'), "{long}");
    }
}
