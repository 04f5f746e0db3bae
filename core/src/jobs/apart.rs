//! Two processes that run at once and send steps for one rank of one job: the second is kept apart.
//!
//! Their marks would end each other's steps. So what the second one sends for that rank belongs to a job of its own, named
//! after its process. Invariant: no more of them are kept than there are jobs.

use super::event::Event;
use super::id::JobId;
use std::collections::BTreeMap;

/// The jobs of processes that are kept apart, by the job and rank that each process names, and its process id.
#[derive(Debug, Default)]
pub(super) struct Apart {
    jobs: BTreeMap<(JobId, u32, u32), JobId>,
    conflicts: u64,
}

impl Apart {
    /// The job to which an event that names the job `meant` belongs.
    pub fn of(&self, meant: JobId, event: &Event) -> JobId {
        let Some(pid) = event.pid.filter(|_| !self.jobs.is_empty()) else { return meant };
        let key = (meant, event.rank, pid);
        self.jobs.get(&key).cloned().unwrap_or(key.0)
    }

    /// From now on the event's process has a job of its own. Returns whether it had none.
    pub fn keep(&mut self, meant: &JobId, event: &Event, most_name_bytes: usize) -> bool {
        let Some(pid) = event.pid else { return false };
        let own = JobId::new(meant.scope().clone(), &name_of(meant.name(), pid, most_name_bytes));
        let is_new = self.jobs.insert((meant.clone(), event.rank, pid), own).is_none();
        self.conflicts += u64::from(is_new);
        is_new
    }

    /// The event's process has no job of its own after all.
    pub fn forget(&mut self, meant: &JobId, event: &Event) {
        if let Some(pid) = event.pid {
            self.jobs.remove(&(meant.clone(), event.rank, pid));
        }
    }

    /// Forgets those whose job is over.
    pub fn retain(&mut self, is_known: impl Fn(&JobId) -> bool) {
        self.jobs.retain(|_, own| is_known(own));
    }

    /// How many there were so far.
    pub fn conflicts(&self) -> u64 {
        self.conflicts
    }
}

/// `NAME~PID`, with as much of the name as there is room for.
fn name_of(name: &str, pid: u32, most_bytes: usize) -> String {
    let suffix = format!("~{pid}");
    let mut end = name.len().min(most_bytes.saturating_sub(suffix.len()));
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.get(..end).unwrap_or_default().to_owned() + &suffix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_so_that_the_process_fits() {
        assert_eq!(name_of("train", 4711, 128), "train~4711");
        assert_eq!(name_of("tr\u{e9}in", 47, 6), "tr~47", "no character is cut in two");
        assert_eq!(name_of("train", 4711, 3), "~4711");
    }
}
