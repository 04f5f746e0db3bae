//! The senders of events: whose they are, where their processes run, and which GPUs these use.
//!
//! Enters: a sender's process and user. Leaves: its account, its environment, and its GPUs. Invariant: no method takes the jobs'
//! lock, which all senders wait for, while another process is read.

use super::unlinked::Unlinked;
use super::waiting::{Arrival, Parked};
use crate::place::{Kubelet, LookupOutcome, Peer, Peers, Places};
use highwater_core::clock::Clock;
use highwater_core::gpu::{OnGpus, Processes};
use highwater_core::jobs::{
    Account, Accounts, Event, JobId, Jobs, Limits, Owner, Refusal, Resource, Search, Sender, Shortage, Within,
};
use highwater_core::wire::{Annotation, EventType, Kind};
use std::sync::Arc;

/// An annotation with its sender's environment, if that was needed.
type WithPeer = (Annotation, Option<Arc<Peer>>);

/// What is known of senders.
pub(super) struct Senders {
    pub accounts: Accounts,
    pub places: Places,
    pub peers: Peers<Parked>,
    /// Events that wait until the kubelet has linked their container.
    pub unlinked: Unlinked,
    /// The timeline for rates and deadlines, which continues when a recording has ended.
    pub live: Arc<dyn Clock>,
}

impl Senders {
    /// Nobody yet.
    pub fn new(limits: &Limits, live: Arc<dyn Clock>, processes: Arc<Processes>) -> Self {
        Self {
            accounts: Accounts::new(limits),
            places: Places::new(processes),
            peers: Peers::default(),
            unlinked: Unlinked::default(),
            live,
        }
    }

    /// The same, which also asks the kubelet for the GPUs of senders' containers.
    pub fn with_kubelet(mut self, kubelet: Option<Arc<Kubelet>>) -> Self {
        self.places = self.places.with_kubelet(kubelet);
        self
    }

    /// The account of a sender.
    pub fn account_of(&self, sender: &Sender) -> Arc<Account> {
        let within =
            if sender.uid.is_some() { self.places.within(sender.pid, self.live.now_ns()) } else { Within::Node };
        self.accounts.of(&Owner::of(sender, within))
    }

    /// The annotation, with its sender's environment if needed: an event without a job belongs to its process's job.
    /// `None` if the process is read first, and the event waits.
    pub fn peer_of(&self, raw: Annotation, arrival: &Arrival) -> Result<Option<WithPeer>, Refusal> {
        let Some(pid) = arrival.sender.pid.filter(|_| raw.job.is_none()) else { return Ok(Some((raw, None))) };
        let (account, bytes) = (&arrival.account, size_of::<Parked>() + raw.weight());
        let over = |what, short| Refusal::over_budget(what, short, Resource::Bytes, account);
        account.may_hold(Resource::Bytes, bytes).map_err(|short| over("bytes", short))?;
        let held = account.hold(Resource::Bytes, bytes);
        let mut parked = Some(Parked::Event { annotation: raw, arrival: arrival.clone(), held });
        match (self.peers.ask(pid, account, arrival.live_ns, &mut parked), parked) {
            (LookupOutcome::Known(peer), Some(Parked::Event { annotation, .. })) => Ok(Some((annotation, Some(peer)))),
            (LookupOutcome::Full, _) => Err(over("events that wait for their process to be read", Shortage::Share)),
            (LookupOutcome::Later | LookupOutcome::Known(_), _) => Ok(None),
        }
    }

    /// The job and rank of a process that does not name them in its events.
    pub fn job_of(peer: Option<&Arc<Peer>>, arrival: &Arrival) -> (Option<String>, Option<u32>) {
        let Some(peer) = peer else { return (None, None) };
        // Without the environment, the pod's name is not used: the environment may name another job, and the rank.
        let of_pod = || match &arrival.account.owner {
            Owner::User { within: Within::Pod(pod), .. } if peer.is_read => {
                Some(format!("{}/{}", pod.namespace, pod.name))
            }
            _ => None,
        };
        (peer.job.clone().or_else(of_pod), peer.rank)
    }

    /// At the begin of a step, or of anything outside of a step, the GPUs on which the driver lists the sender: a
    /// process may have begun on one and spread over several since.
    pub fn listed_at(&self, event: &Event, job: &JobId, jobs: &Jobs) -> Option<OnGpus> {
        let pid = event.pid.filter(|_| event.event == EventType::Begin)?;
        let begins = event.kind == Kind::Step || !jobs.is_in_step(job, event.rank);
        begins.then(|| self.places.listed_on(pid)).flatten()
    }

    /// The GPUs of a rank that has named none. `None` if they are unknown, or if its process is read first.
    pub fn find_gpus(&self, pid: Option<u32>, account: &Arc<Account>, search: &Search) -> Option<Vec<usize>> {
        if let Some(found) = pid.and_then(|pid| self.places.works_on(pid)) {
            return Some(found);
        }
        let now_ns = self.live.now_ns();
        let peer = match pid.map(|pid| self.peers.ask(pid, account, now_ns, &mut None)) {
            Some(LookupOutcome::Known(peer)) => Peer::clone(&peer),
            // The search is repeated once the process has been read, or, if the queue is full, at the rank's next event.
            Some(LookupOutcome::Later | LookupOutcome::Full) => return None,
            None => Peer::default(),
        };
        self.places.find(pid, peer.place, search, now_ns)
    }
}
