//! Detects the end of senders' processes, with a descriptor for each (`pidfd_open(2)`): the kernel signals the end of a
//! process, and a later process with the same id is not mistaken for it.
//!
//! Enters: processes that send events for a rank. Leaves: those that have ended. Invariants: the descriptors are
//! limited, and shared among owners; if no descriptor is available, a rank ends by its silence.

use highwater_core::jobs::{Account, Reservation, Resource};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// Ends read at a time.
const EVENTS: usize = 64;

/// Processes whose end is watched for.
#[derive(Debug)]
pub(super) struct Ends {
    epoll: OwnedFd,
    watched: Mutex<HashMap<u32, (OwnedFd, Reservation)>>,
}

impl Ends {
    /// No processes yet.
    ///
    /// # Errors
    /// The system cannot provide a descriptor.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, watched: Mutex::default() })
    }

    /// Watches for the end of this process, and charges a descriptor to `account`. Returns true if it was not watched
    /// before and is now. The next [`take`](Self::take) returns a process that has ended already; this function does
    /// not, because what the process sent may still be in a queue.
    pub fn watch(&self, pid: u32, account: &Arc<Account>) -> bool {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let Some(process) = process.filter(|_| !watched.contains_key(&pid)) else { return false };
        if account.may_hold(Resource::Processes, 1).is_err() {
            return false;
        }
        let descriptor = match pidfd_open(process, PidfdFlags::empty()) {
            // Readable at once, like the descriptor of a process that has ended.
            Err(rustix::io::Errno::SRCH) => eventfd(1, EventfdFlags::CLOEXEC),
            opened => opened,
        };
        let data = epoll::EventData::new_u64(pid.into());
        let added = descriptor.and_then(|descriptor| {
            epoll::add(&self.epoll, &descriptor, data, epoll::EventFlags::IN).map(|()| descriptor)
        });
        match added {
            Ok(descriptor) => {
                watched.insert(pid, (descriptor, account.hold(Resource::Processes, 1)));
                true
            }
            // Before Linux 5.3, or with no descriptor left.
            Err(error) => {
                tracing::debug!(pid, %error, "cannot watch for the end of a sender's process");
                false
            }
        }
    }

    /// Processes that have ended since the last call. They are no longer watched.
    pub fn take(&self) -> Vec<u32> {
        let mut events = Vec::with_capacity(EVENTS);
        let at_once = Some(&Timespec { tv_sec: 0, tv_nsec: 0 });
        if let Err(error) = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), at_once) {
            tracing::debug!(%error, "cannot read the ends of senders' processes");
        }
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = events.iter().filter_map(|event| u32::try_from(event.data.u64()).ok());
        let forget = |pid: &u32| {
            // Closing the descriptor is not enough: a process that is being started holds a copy of it for a moment.
            if let Some((descriptor, _)) = watched.remove(pid)
                && let Err(error) = epoll::delete(&self.epoll, &descriptor)
            {
                tracing::debug!(pid, %error, "cannot stop watching for the end of a sender's process");
            }
        };
        ended.inspect(forget).collect()
    }
}

/// Readable while a process has ended that [`Ends::take`] has not returned.
impl AsFd for Ends {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// Whether a process runs; true if the system does not say.
pub(super) fn is_running(pid: u32) -> bool {
    let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    match pidfd_open(process, PidfdFlags::empty()) {
        // Readable from the end on, also while its parent has not collected it.
        Ok(descriptor) => {
            let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(1)
        }
        Err(error) => error != rustix::io::Errno::SRCH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::jobs::{Accounts, Limits, Owner, Within};
    use std::process::{Child, Command, Stdio};

    /// A process that lives until its standard input is closed.
    fn process() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat is installed")
    }

    fn end(mut process: Child) {
        drop(process.stdin.take());
        process.wait().expect("it ends");
    }

    fn accounts(processes: usize) -> Accounts {
        Accounts::new(&Limits { processes, ..Limits::default() })
    }

    #[test]
    fn a_process_that_ends_is_reported_once() {
        let (ends, account) = (Ends::new().unwrap(), Account::alone());
        let (one, other) = (process(), process());
        let pid = one.id();
        for pid in [pid, pid, other.id()] {
            ends.watch(pid, &account);
        }
        assert_eq!((ends.take(), account.holds(Resource::Processes)), (vec![], 2));
        end(one);
        assert_eq!((ends.take(), account.holds(Resource::Processes)), (vec![pid], 1));
        assert!(ends.take().is_empty());
        ends.watch(pid, &account);
        assert_eq!(ends.take(), vec![pid], "it had ended already");
        assert!(ends.take().is_empty());
        end(other);
    }

    #[test]
    fn descriptors_are_shared_among_owners() {
        let (ends, accounts) = (Ends::new().unwrap(), accounts(2));
        let owner = |uid| accounts.of(&Owner::User { uid, within: Within::Node });
        let processes = [process(), process(), process()];
        let pids = processes.each_ref().map(Child::id);
        for (pid, uid, all) in [(pids[0], 1, 1), (pids[1], 1, 1), (pids[2], 2, 2)] {
            ends.watch(pid, &owner(uid));
            assert_eq!(accounts.held(Resource::Processes), all, "half is for others");
        }
        processes.into_iter().for_each(end);
        let mut ended = ends.take();
        ended.sort_unstable();
        let mut watched = [pids[0], pids[2]];
        watched.sort_unstable();
        assert_eq!((ended, accounts.held(Resource::Processes)), (watched.to_vec(), 0));
    }
}
