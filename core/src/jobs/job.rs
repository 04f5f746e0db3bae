//! One job: its owner, its names, its ranks.

use super::account::{Account, Owner, Reservation, Resource};
use super::event::Event;
use super::id::JobId;
use super::limits::Limits;
use super::profile::LayerNames;
use super::rank::Rank;
use super::refusal::Refusal;
use crate::wire::Kind;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Upper bounds of the memory of a job and of a name, without their text, with allocator overhead.
pub(super) const JOB_BYTES: usize = 512;
pub(super) const NAME_BYTES: usize = 160;

/// Names of one kind, each with its number and its reserved bytes. The reservations of layers' names are in [`LayerNames`].
type Names = BTreeMap<Arc<str>, (usize, Option<Reservation>)>;

/// One job.
#[derive(Debug)]
pub struct Job {
    /// The owner of its first event, and the process that sent it. [`Owner::speaks_for`] decides who else may send for the job.
    owner: Owner,
    begun_by: Option<u32>,
    /// Its processes on this node.
    pub ranks: BTreeMap<u32, Rank>,
    phase_names: Names,
    layer_names: Names,
    pub(super) layers: Arc<LayerNames>,
    /// The job's place and its bytes on its owner's account.
    _held: [Reservation; 2],
}

impl Job {
    pub(super) fn new(id: &JobId, begun_by: Option<u32>, account: &Arc<Account>) -> Self {
        let bytes = account.hold(Resource::Bytes, JOB_BYTES + id.name().len());
        Self {
            owner: account.owner.clone(),
            begun_by,
            ranks: BTreeMap::new(),
            phase_names: Names::new(),
            layer_names: Names::new(),
            layers: Arc::default(),
            _held: [account.hold(Resource::Jobs, 1), bytes],
        }
    }

    pub(super) fn may_be_spoken_for(&self, owner: &Owner, pid: Option<u32>) -> bool {
        owner.speaks_for(&self.owner) || self.is_of_same_process(owner, pid)
    }

    /// Whether the job was begun by this process while its pod was not known.
    fn is_of_same_process(&self, owner: &Owner, pid: Option<u32>) -> bool {
        pid.is_some() && pid == self.begun_by && owner.is_known_as(&self.owner)
    }

    /// A job that was begun before its sender's pod was known is that pod's.
    pub(super) fn adopt(&mut self, owner: &Owner, pid: Option<u32>) {
        if self.is_of_same_process(owner, pid) {
            self.owner.clone_from(owner);
        }
    }

    fn names(&self, kind: Kind) -> Option<&Names> {
        match kind {
            Kind::Phase => Some(&self.phase_names),
            Kind::Layer => Some(&self.layer_names),
            Kind::Step => None,
        }
    }

    /// Returns whether the event adds no name to the job, because its name is known or is not kept. Refuses a new name for which
    /// there is no room.
    pub(super) fn has_room_for(&self, event: &Event, limits: &Limits) -> Result<bool, Refusal> {
        let Some(names) = self.names(event.kind) else { return Ok(true) };
        let most = if event.kind == Kind::Phase { limits.phase_names } else { limits.layer_names };
        let is_known = names.contains_key(event.name.as_str()) || !event.adds_name();
        if is_known || names.len() < most { Ok(is_known) } else { Err(Refusal::TooManyNames(most)) }
    }

    /// The one copy of the event's name, with its number if it has one.
    pub(super) fn intern(&mut self, event: &Event, account: &Arc<Account>) -> (Arc<str>, Option<usize>) {
        let names = match event.kind {
            Kind::Phase => &mut self.phase_names,
            Kind::Layer => &mut self.layer_names,
            Kind::Step => return (event.name.as_str().into(), None),
        };
        if let Some((name, (number, _))) = names.get_key_value(event.name.as_str()) {
            return (Arc::clone(name), Some(*number));
        }
        let name: Arc<str> = event.name.as_str().into();
        if !event.adds_name() {
            return (name, None);
        }
        let number = names.len();
        let held = account.hold(Resource::Bytes, NAME_BYTES + name.len());
        let held = if event.kind == Kind::Layer {
            self.layers.push(&name, held);
            None
        } else {
            Some(held)
        };
        names.insert(Arc::clone(&name), (number, held));
        (name, Some(number))
    }
}
