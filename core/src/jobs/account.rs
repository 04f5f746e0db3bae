//! The owners of senders, and the quota that each owner has of the limits that all owners share.
//!
//! Enters: what the kernel reports about a sender. Leaves: one account for each owner, and [`Reservation`]s, which release
//! their amount when they are dropped. Invariant: an owner that holds something may take more only if it then holds no
//! more than what stays free (the dynamic threshold of shared-memory switches, Choudhury and Hahne 1998), so an owner
//! that is alone can use half of each limit. Three exceptions: an owner that holds nothing may take all that is free;
//! local clients of unknown user together get an eighth; the daemon itself is bound only by the node's limit. Absent on
//! purpose: what is held, and why.

use super::limits::Limits;
use crate::clock::SECOND_NS;
use crate::scope::Scope;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// From this number of accounts on, a new one first evicts the accounts that nothing refers to.
const MOST_IDLE_OWNERS: usize = 256;
/// All local clients whose user is not known share the quota of one owner divided by this.
const NOBODYS_PART: usize = 8;
/// Owners whose refusals and losses are counted apart: each is a label value.
const MOST_APART: usize = 16;
/// The label value of all others.
const OTHERS: &str = "other";

/// What the kernel says of a sender.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sender {
    /// Its process, where a socket's credentials name one.
    pub pid: Option<u32>,
    /// Its user, by the credentials or by the kernel's table of connections.
    pub uid: Option<u32>,
    /// Where it sends from over TCP.
    pub address: Option<IpAddr>,
    /// The connection over which it sends, if the end of the connection is the end of the sender.
    pub connection: Option<u32>,
    /// The Kubernetes namespace of which it has shown the token.
    pub namespace: Option<Arc<str>>,
}

impl Sender {
    /// The daemon itself: the player of a recording. No share bounds it.
    pub const DAEMON: Sender = Sender { pid: None, uid: None, address: None, connection: None, namespace: None };

    /// A process on this node.
    #[must_use]
    pub fn process(pid: Option<u32>, uid: u32) -> Self {
        Self { pid, uid: Some(uid), ..Self::DAEMON }
    }
}

/// A pod, as Kubernetes names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// Where on the node a sender is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Within {
    /// In no pod. Without a kubelet to ask, every sender.
    #[default]
    Node,
    /// In this pod.
    Pod(Pod),
    /// Perhaps in one: its container is not known, or it sends over TCP while pods are distinguished.
    Unknown,
}

/// Who answers for what a sender makes the daemon keep.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The daemon itself.
    Daemon,
    /// A user of this node, in one of its pods where that is known.
    User {
        /// By the kernel's word.
        uid: u32,
        /// Where on the node.
        within: Within,
    },
    /// The senders at this address; for an IPv6 address, its network of 64 bits.
    Address(IpAddr),
    /// Those that have shown the token of this Kubernetes namespace.
    Namespace(Arc<str>),
}

impl Owner {
    /// All local clients over TCP whose user is not known.
    pub const NOBODY: Owner = Owner::Address(IpAddr::V4(Ipv4Addr::LOCALHOST));

    /// The owner of a sender at this place. `within` is used only if the sender's user is known and it has shown no token of a
    /// namespace.
    #[must_use]
    pub fn of(sender: &Sender, within: Within) -> Self {
        if let Some(namespace) = &sender.namespace {
            return Owner::Namespace(Arc::clone(namespace));
        }
        match (sender.uid, sender.address) {
            (Some(uid), _) => Owner::User { uid, within },
            (None, Some(IpAddr::V6(address))) if !address.is_loopback() => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                Owner::Address(IpAddr::V6(network.into()))
            }
            // Any user of this node may send from any of these, and close before anybody can ask who it was.
            (None, Some(address)) if address.is_loopback() => Owner::NOBODY,
            (None, Some(address)) => Owner::Address(address),
            (None, None) => Owner::Daemon,
        }
    }

    /// Whether this owner may send events about what `other` began: both are in pods of one namespace or have its token, or both are
    /// the same owner. Pods of one job share a node and are replaced under other names, so the name of the pod does not count.
    #[must_use]
    pub fn speaks_for(&self, other: &Self) -> bool {
        match (self.namespace(), other.namespace()) {
            (Some(own), Some(others)) => own == others,
            _ => self == other,
        }
    }

    /// The Kubernetes namespace that it is known to be of.
    fn namespace(&self) -> Option<&str> {
        match self {
            Owner::User { within: Within::Pod(pod), .. } => Some(&pod.namespace),
            Owner::Namespace(namespace) => Some(namespace),
            _ => None,
        }
    }

    /// The scope in which the names of its jobs are distinct.
    #[must_use]
    pub fn scope(&self) -> Scope {
        match self {
            Owner::User { within: Within::Pod(pod), .. } => Scope::Namespace(pod.namespace.as_str().into()),
            Owner::Namespace(namespace) => Scope::Namespace(Arc::clone(namespace)),
            Owner::User { uid, .. } => Scope::User(uid.to_string().into()),
            Owner::Address(address) => Scope::User(address.to_string().into()),
            Owner::Daemon => Scope::Daemon,
        }
    }

    /// The scope that its jobs had before its pod was known; `None` where there was no such time.
    pub(super) fn scope_without_pod(&self) -> Option<Scope> {
        match self {
            Owner::User { uid, within: Within::Pod(_) } => Some(Scope::User(uid.to_string().into())),
            _ => None,
        }
    }

    /// Whether `other` may be this owner before its pod was known: it has the same user, and its place is
    /// [`Within::Unknown`]. The caller also checks that one process has sent as both.
    #[must_use]
    pub fn is_known_as(&self, other: &Self) -> bool {
        let Owner::User { uid, within: Within::Unknown } = other else { return false };
        matches!(self, Owner::User { uid: own, .. } if own == uid)
    }

    /// The label value of its refusals: without the pod, of which there may be any number.
    fn label(&self) -> String {
        match self {
            Owner::Daemon => "daemon".to_owned(),
            Owner::User { uid, .. } => format!("uid {uid}"),
            Owner::Address(_) => "tcp".to_owned(),
            Owner::Namespace(namespace) => format!("namespace {namespace}"),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::User { uid, within: Within::Pod(pod) } => {
                write!(f, "uid {uid} in pod {}/{}", pod.namespace, pod.name)
            }
            Owner::Address(address) => write!(f, "a sender at {address}"),
            owner => f.write_str(&owner.label()),
        }
    }
}

/// What all owners share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Resource {
    /// Bytes of jobs, ranks, names, and of what is open or waits for its memory.
    Bytes,
    /// Bytes of the log of what has ended. No event is refused because they are short: the log drops old entries.
    Ended,
    /// Bytes of what is known of ranks' layers.
    Layers,
    /// Jobs.
    Jobs,
    /// Ranks, over all jobs.
    Ranks,
    /// Phases of ranks that have series of their own.
    Series,
    /// Connections to the seqpacket socket.
    Connections,
    /// Processes whose end is waited for.
    Processes,
    /// What has ended and waits for its memory.
    Pending,
}

const RESOURCES: usize = Resource::Pending as usize + 1;

/// Why an owner may have no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// The node has no more of it.
    Node,
    /// The rest is for other owners.
    Share,
}

/// Limits, and what all owners hold together.
#[derive(Debug)]
struct Book {
    limits: [usize; RESOURCES],
    held: [AtomicUsize; RESOURCES],
    /// Events a second, over all owners.
    most_events: usize,
    /// Owners that sent something within the last second.
    active: AtomicUsize,
}

/// What one owner holds.
#[derive(Debug)]
pub struct Account {
    /// Whose it is.
    pub owner: Owner,
    /// The scope in which the names of its jobs are distinct.
    pub scope: Scope,
    book: Arc<Book>,
    held: [AtomicUsize; RESOURCES],
    bucket: Mutex<Bucket>,
    /// When it last sent something, nanoseconds of the timeline.
    heard_ns: AtomicI64,
}

/// Events that an owner may still send now.
#[derive(Debug, Default)]
struct Bucket {
    events: f64,
    filled_ns: Option<i64>,
}

/// An amount on an account, given back when this is dropped. A copy holds as much again.
#[derive(Debug)]
pub struct Reservation {
    account: Arc<Account>,
    resource: Resource,
    amount: usize,
}

impl Account {
    /// An account that shares with nobody: for tests and tools that make jobs without an intake.
    #[must_use]
    pub fn alone() -> Arc<Self> {
        Accounts::new(&Limits::default()).of(&Owner::Daemon)
    }

    /// What is held of this resource.
    #[must_use]
    pub fn holds(&self, resource: Resource) -> usize {
        self.held[resource as usize].load(Ordering::Relaxed)
    }

    /// Whether this owner may have `amount` more.
    ///
    /// # Errors
    /// Why not.
    pub fn may_hold(&self, resource: Resource, amount: usize) -> Result<(), Shortage> {
        let (limit, own) = (self.book.limits[resource as usize], self.holds(resource));
        let all = self.book.held[resource as usize].load(Ordering::Relaxed).saturating_add(amount);
        let Some(free) = limit.checked_sub(all) else { return Err(Shortage::Node) };
        // Senders whose user is not known have a smaller quota: any user can also send like this, and so have a second quota.
        let part = if self.owner == Owner::NOBODY { free / NOBODYS_PART } else { free };
        // One that holds nothing may have what is left, however little that is.
        let is_within = own == 0 || own.saturating_add(amount) <= part;
        if is_within || self.owner == Owner::Daemon { Ok(()) } else { Err(Shortage::Share) }
    }

    /// Reserves an amount without a check: the caller has asked [`may_hold`](Self::may_hold).
    #[must_use]
    pub fn hold(self: &Arc<Self>, resource: Resource, amount: usize) -> Reservation {
        self.held[resource as usize].fetch_add(amount, Ordering::Relaxed);
        self.book.held[resource as usize].fetch_add(amount, Ordering::Relaxed);
        Reservation { account: Arc::clone(self), resource, amount }
    }

    /// The limit that all owners share.
    #[must_use]
    pub fn limit(&self, resource: Resource) -> usize {
        self.book.limits[resource as usize]
    }

    /// Events a second that all owners share.
    #[must_use]
    pub fn most_events(&self) -> usize {
        self.book.most_events
    }

    /// Takes this number of events from the owner's token bucket. Returns false, and takes none, if too few are left.
    /// The node's rate is divided evenly among the owners that have sent within the last second; the daemon is not
    /// limited.
    pub fn may_send(&self, events: usize, now_ns: i64) -> bool {
        if self.owner == Owner::Daemon {
            return true;
        }
        self.heard_ns.store(now_ns, Ordering::Relaxed);
        let active = self.book.active.load(Ordering::Relaxed).max(1);
        #[allow(clippy::cast_precision_loss, reason = "thousands of events")]
        let (most, events) = ((self.book.most_events / active).max(1) as f64, events as f64);
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        #[allow(clippy::cast_precision_loss, reason = "a second or so")]
        let seconds = bucket.filled_ns.map_or(1.0, |filled_ns| (now_ns.saturating_sub(filled_ns)).max(0) as f64 * 1e-9);
        bucket.filled_ns = Some(now_ns.max(bucket.filled_ns.unwrap_or(i64::MIN)));
        bucket.events = (bucket.events + seconds * most).min(most);
        // A batch larger than the bucket is taken only if the bucket is full, and leaves it negative.
        let may = bucket.events >= events.min(most);
        bucket.events -= if may { events } else { 0.0 };
        may
    }
}

impl Reservation {
    /// Whose it is.
    #[must_use]
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Changes the amount without a check.
    pub fn set(&mut self, amount: usize) {
        for held in [&self.account.held, &self.account.book.held] {
            let held = &held[self.resource as usize];
            held.fetch_add(amount, Ordering::Relaxed);
            held.fetch_sub(self.amount, Ordering::Relaxed);
        }
        self.amount = amount;
    }

    /// How much.
    #[must_use]
    pub fn amount(&self) -> usize {
        self.amount
    }
}

impl Clone for Reservation {
    fn clone(&self) -> Self {
        self.account.hold(self.resource, self.amount)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.account.held[self.resource as usize].fetch_sub(self.amount, Ordering::Relaxed);
        self.account.book.held[self.resource as usize].fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// The accounts of all owners.
#[derive(Debug)]
pub struct Accounts {
    book: Arc<Book>,
    open: Mutex<HashMap<Owner, Arc<Account>>>,
    refused: BySender,
    lost: BySender,
}

/// Events by the label value of their owner: a bounded number of owners, and all others together.
#[derive(Debug, Default)]
struct BySender(Mutex<BTreeMap<String, u64>>);

impl BySender {
    fn add(&self, owner: &Owner, events: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let label = owner.label();
        let is_apart = counts.contains_key(&label) || counts.len() < MOST_APART;
        let count = counts.entry(if is_apart { label } else { OTHERS.to_owned() }).or_default();
        *count = count.saturating_add(events);
    }

    fn counts(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Accounts {
    /// No accounts yet.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        let mut of = [0; RESOURCES];
        for (resource, limit) in [
            (Resource::Bytes, limits.bytes),
            (Resource::Ended, limits.ended_bytes),
            (Resource::Layers, limits.layer_bytes),
            (Resource::Jobs, limits.jobs),
            (Resource::Ranks, limits.ranks),
            (Resource::Series, limits.phase_series),
            (Resource::Connections, limits.connections),
            (Resource::Processes, limits.processes),
            (Resource::Pending, limits.pending),
        ] {
            of[resource as usize] = limit;
        }
        let held = std::array::from_fn(|_| AtomicUsize::new(0));
        let book = Book { limits: of, held, most_events: limits.events_a_second, active: AtomicUsize::new(0) };
        Self { book: Arc::new(book), open: Mutex::default(), refused: BySender::default(), lost: BySender::default() }
    }

    /// The account of an owner.
    #[must_use]
    pub fn of(&self, owner: &Owner) -> Arc<Account> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = open.get(owner) {
            return Arc::clone(account);
        }
        if open.len() >= MOST_IDLE_OWNERS {
            // Each reservation refers to its account, so an account without other references holds nothing. The shared limits
            // bound how many accounts stay.
            open.retain(|_, account| Arc::strong_count(account) > 1);
        }
        let account = Account {
            owner: owner.clone(),
            scope: owner.scope(),
            book: Arc::clone(&self.book),
            held: std::array::from_fn(|_| AtomicUsize::new(0)),
            bucket: Mutex::default(),
            heard_ns: AtomicI64::new(i64::MIN),
        };
        let account = Arc::new(account);
        open.insert(owner.clone(), Arc::clone(&account));
        account
    }

    /// What all owners hold of this resource.
    #[must_use]
    pub fn held(&self, resource: Resource) -> usize {
        self.book.held[resource as usize].load(Ordering::Relaxed)
    }

    /// Counts the owners that send, among whom the rate is divided. Called some times a second.
    pub fn advance(&self, now_ns: i64) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let is_active = |account: &&Arc<Account>| {
            let heard_ns = account.heard_ns.load(Ordering::Relaxed);
            heard_ns != i64::MIN && now_ns.saturating_sub(heard_ns) < SECOND_NS
        };
        self.book.active.store(open.values().filter(is_active).count(), Ordering::Relaxed);
    }

    /// Counts events of an owner that were refused.
    pub fn refused(&self, owner: &Owner, events: u64) {
        self.refused.add(owner, events);
    }

    /// Counts events that an owner says it could not send.
    pub fn lost(&self, owner: &Owner, events: u64) {
        self.lost.add(owner, events);
    }

    /// Refused events by owner: a bounded number of owners, and all others together.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<String, u64> {
        self.refused.counts()
    }

    /// Events that owners report as lost, by owner as in [`refusals`](Self::refusals). The count of all other owners is always
    /// there, so that the sum is 0 before the first loss.
    #[must_use]
    pub fn losses(&self) -> BTreeMap<String, u64> {
        let mut losses = self.lost.counts();
        losses.entry(OTHERS.to_owned()).or_default();
        losses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> Owner {
        Owner::User { uid, within: Within::Node }
    }

    fn accounts(jobs: usize) -> Accounts {
        Accounts::new(&Limits { jobs, events_a_second: 1_000, ..Limits::default() })
    }

    /// Takes jobs until it may not, and returns them.
    fn take_all(account: &Arc<Account>) -> Vec<Reservation> {
        let mut held = Vec::new();
        while account.may_hold(Resource::Jobs, 1).is_ok() {
            held.push(account.hold(Resource::Jobs, 1));
        }
        held
    }

    #[test]
    fn whatever_some_owners_take_the_next_finds_room() {
        let accounts = accounts(64);
        let taken: Vec<_> = (0..6).map(|uid| take_all(&accounts.of(&user(uid)))).collect();
        assert_eq!(taken.iter().map(Vec::len).collect::<Vec<_>>(), [32, 16, 8, 4, 2, 1]);
        assert_eq!(accounts.of(&user(0)).may_hold(Resource::Jobs, 1), Err(Shortage::Share));
        assert_eq!(accounts.held(Resource::Jobs), 63);
        let last = take_all(&accounts.of(&user(9)));
        assert_eq!(last.len(), 1, "one that holds nothing may have the last");
        assert_eq!(accounts.of(&user(10)).may_hold(Resource::Jobs, 1), Err(Shortage::Node));
        drop((taken, last));
        assert_eq!(accounts.held(Resource::Jobs), 0);
    }

    #[test]
    fn the_daemon_itself_may_have_all() {
        let accounts = accounts(64);
        assert_eq!(take_all(&accounts.of(&Owner::Daemon)).len(), 64);
    }

    #[test]
    fn a_copy_holds_as_much_again() {
        let accounts = accounts(64);
        let held = accounts.of(&user(1)).hold(Resource::Bytes, 10);
        let copy = held.clone();
        assert_eq!(accounts.held(Resource::Bytes), 20);
        drop(held);
        assert_eq!((accounts.held(Resource::Bytes), copy.account().holds(Resource::Bytes)), (10, 10));
    }

    #[test]
    fn an_amount_may_change() {
        let accounts = accounts(64);
        let mut held = accounts.of(&user(1)).hold(Resource::Layers, 10);
        held.set(25);
        assert_eq!((held.amount(), held.account().holds(Resource::Layers)), (25, 25));
        held.set(5);
        assert_eq!(accounts.held(Resource::Layers), 5);
        drop(held);
        assert_eq!(accounts.held(Resource::Layers), 0);
    }

    #[test]
    fn those_who_send_share_the_rate() {
        let accounts = accounts(64);
        let (one, two) = (accounts.of(&user(1)), accounts.of(&user(2)));
        let sent = |account: &Account, now_ns| (0..2_000).filter(|_| account.may_send(1, now_ns)).count();
        assert_eq!(sent(&one, 0), 1_000, "alone");
        accounts.advance(0);
        assert_eq!(sent(&one, SECOND_NS), 1_000);
        assert!(two.may_send(1, SECOND_NS));
        accounts.advance(SECOND_NS);
        assert_eq!((sent(&one, 3 * SECOND_NS), sent(&two, 3 * SECOND_NS)), (500, 500));
        // A clock that stands still gives nothing.
        assert_eq!(sent(&one, 3 * SECOND_NS), 0);
    }

    #[test]
    fn who_hides_its_user_has_a_small_part() {
        let accounts = Accounts::new(&Limits { jobs: 64, ..Limits::default() });
        let holds = |owner: &Owner| {
            let account = accounts.of(owner);
            let mut held = Vec::new();
            while account.may_hold(Resource::Jobs, 1).is_ok() {
                held.push(account.hold(Resource::Jobs, 1));
            }
            held
        };
        let nobodys = holds(&Owner::NOBODY);
        assert_eq!(nobodys.len(), 7, "an eighth of what is left");
        assert_eq!(holds(&user(1)).len(), 28, "half of what is left");
    }

    #[test]
    fn owners_are_distinguished_by_user_and_namespace() {
        let pod = |namespace: &str, name: &str| Within::Pod(Pod { namespace: namespace.into(), name: name.into() });
        let of = |uid, within| Owner::User { uid, within };
        assert!(of(0, pod("a", "x")).speaks_for(&of(0, pod("a", "y"))), "a pod that was replaced");
        assert!(!of(0, pod("a", "x")).speaks_for(&of(0, pod("b", "x"))));
        for (one, other) in
            [(Within::Node, Within::Unknown), (pod("a", "x"), Within::Node), (pod("a", "x"), Within::Unknown)]
        {
            assert!(!of(0, one.clone()).speaks_for(&of(0, other.clone())) && !of(0, other).speaks_for(&of(0, one)));
        }
        assert!(of(0, pod("a", "x")).is_known_as(&of(0, Within::Unknown)));
        assert!(!of(1, pod("a", "x")).is_known_as(&of(0, Within::Unknown)), "another user");
        assert!(!of(0, pod("a", "x")).is_known_as(&of(0, Within::Node)), "the node itself is known");
        assert!(!user(1).speaks_for(&user(2)));
        // A token is as good as a pod, and better than a user or an address.
        let shown = |namespace: &str| Sender { uid: Some(1), namespace: Some(namespace.into()), ..Sender::default() };
        let token = |namespace| Owner::of(&shown(namespace), pod("c", "z"));
        assert!(token("a").speaks_for(&of(0, pod("a", "x"))) && of(0, pod("a", "x")).speaks_for(&token("a")));
        assert!(token("a").speaks_for(&token("a")) && !token("a").speaks_for(&token("b")));
        assert!(!token("a").speaks_for(&of(0, pod("c", "z"))) && !token("a").speaks_for(&user(1)));
        assert_eq!(token("a").scope(), of(0, pod("a", "x")).scope());
        let address = |text: &str| Sender { address: text.parse().ok(), ..Sender::default() };
        let of_address = |text| Owner::of(&address(text), Within::Node);
        assert_eq!(of_address("2001:db8::1"), of_address("2001:db8::2"), "one network");
        assert_ne!(of_address("10.0.0.1"), of_address("10.0.0.2"));
        for loopback in ["127.0.0.1", "127.200.3.4", "::1"] {
            assert_eq!(of_address(loopback), Owner::NOBODY, "any user may send from {loopback}");
        }
    }

    #[test]
    fn refusals_have_a_bounded_number_of_labels() {
        let accounts = accounts(64);
        (0..100).for_each(|uid| accounts.refused(&user(uid), 2));
        let refusals = accounts.refusals();
        assert_eq!((refusals.len(), refusals[OTHERS]), (MOST_APART + 1, 2 * (100 - MOST_APART as u64)));
        assert!((0..1_000).all(|uid| accounts.of(&user(uid)).holds(Resource::Jobs) == 0));
        assert!(accounts.open.lock().expect("nobody panics").len() <= MOST_IDLE_OWNERS);
    }

    #[test]
    fn each_resource_has_its_own_limit() {
        let limits = Limits {
            bytes: 1,
            ended_bytes: 2,
            layer_bytes: 3,
            jobs: 4,
            ranks: 5,
            phase_series: 6,
            connections: 7,
            processes: 8,
            pending: 9,
            events_a_second: 10,
            ..Limits::default()
        };
        use Resource::{Bytes, Connections, Ended, Jobs, Layers, Pending, Processes, Ranks, Series};
        let account = Accounts::new(&limits).of(&user(1));
        let of = [Bytes, Ended, Layers, Jobs, Ranks, Series, Connections, Processes, Pending];
        assert_eq!(of.map(|resource| account.limit(resource)), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!((account.most_events(), account.hold(Bytes, 3).amount()), (10, 3));
        assert_eq!(Account::alone().owner, Owner::Daemon);
    }

    #[test]
    fn a_share_is_what_then_stays_free_and_others_keep_it() {
        let accounts = accounts(10);
        let (one, two) = (accounts.of(&user(1)), accounts.of(&user(2)));
        let first = one.hold(Resource::Jobs, 2);
        assert_eq!((one.may_hold(Resource::Jobs, 3), one.may_hold(Resource::Jobs, 4)), (Ok(()), Err(Shortage::Share)));
        assert_eq!((two.may_hold(Resource::Jobs, 8), two.may_hold(Resource::Jobs, 9)), (Ok(()), Err(Shortage::Node)));
        assert_eq!(one.may_hold(Resource::Jobs, usize::MAX), Err(Shortage::Node));
        drop(first);
        assert_eq!(one.holds(Resource::Jobs), 0);
    }

    #[test]
    fn a_batch_beyond_the_rate_is_taken_while_there_is_any_and_paid_for_later() {
        let accounts = accounts(64);
        let account = accounts.of(&user(1));
        assert!(account.may_send(5_000, SECOND_NS), "more than a second's");
        assert!(!account.may_send(1, SECOND_NS) && !account.may_send(1, 4 * SECOND_NS));
        assert!(account.may_send(1_000, 6 * SECOND_NS) && !account.may_send(1, 6 * SECOND_NS));
        // A time that goes back gives nothing, now or when it has caught up.
        assert!(!account.may_send(1, 5 * SECOND_NS) && !account.may_send(1, 6 * SECOND_NS));
        assert!(
            account.may_send(500, 6 * SECOND_NS + SECOND_NS / 2) && !account.may_send(1, 6 * SECOND_NS + SECOND_NS / 2)
        );
        assert!(accounts.of(&Owner::Daemon).may_send(1_000_000, 0));
    }

    #[test]
    fn those_who_have_been_silent_for_a_second_have_no_part_of_the_rate() {
        let accounts = accounts(64);
        let (one, two, _) = (accounts.of(&user(1)), accounts.of(&user(2)), accounts.of(&user(3)));
        let sent = |now_ns| (0..2_000).filter(|_| one.may_send(1, now_ns)).count();
        two.may_send(1, 5 * SECOND_NS);
        sent(5 * SECOND_NS);
        accounts.advance(6 * SECOND_NS);
        assert_eq!(sent(7 * SECOND_NS), 1_000, "nobody since a second");
        two.may_send(1, 7 * SECOND_NS);
        accounts.advance(8 * SECOND_NS - 1);
        assert_eq!(sent(9 * SECOND_NS), 500);
        accounts.advance(9 * SECOND_NS);
        assert_eq!(sent(19 * SECOND_NS), 1_000, "the other is silent");
        accounts.advance(99 * SECOND_NS);
        assert_eq!(sent(99 * SECOND_NS), 1_000, "nobody sends");
    }

    #[test]
    fn owners_have_names_for_people_and_fewer_for_labels() {
        let pod = Pod { namespace: "n".into(), name: "p".into() };
        let in_pod = Owner::User { uid: 5, within: Within::Pod(pod) };
        let address = Owner::Address("10.0.0.1".parse().expect("an address"));
        let names = [&Owner::Daemon, &user(5), &in_pod, &address].map(|owner| (owner.to_string(), owner.label()));
        let expected =
            [("daemon", "daemon"), ("uid 5", "uid 5"), ("uid 5 in pod n/p", "uid 5"), ("a sender at 10.0.0.1", "tcp")];
        assert_eq!(names, expected.map(|(name, label)| (name.to_owned(), label.to_owned())));
        let token = Owner::Namespace("n".into());
        assert_eq!((token.to_string(), token.label()), ("namespace n".to_owned(), "namespace n".to_owned()));
        assert_eq!(Owner::of(&Sender::DAEMON, Within::Node), Owner::Daemon);
        assert_eq!(Owner::of(&Sender::process(Some(1), 5), Within::Node), user(5));
        assert!(
            !address.is_known_as(&Owner::User { uid: 5, within: Within::Unknown }) && !in_pod.is_known_as(&address)
        );
        assert!(!address.speaks_for(&user(5)) && address.speaks_for(&address));
    }

    #[test]
    fn owners_that_hold_something_or_are_in_use_are_not_forgotten() {
        let accounts = accounts(64);
        let (held, used) = (accounts.of(&user(1)).hold(Resource::Bytes, 1), accounts.of(&user(2)));
        (0..2 * MOST_IDLE_OWNERS as u32).for_each(|uid| drop(accounts.of(&user(1_000 + uid))));
        assert!(Arc::ptr_eq(held.account(), &accounts.of(&user(1))) && Arc::ptr_eq(&used, &accounts.of(&user(2))));
        // Twice there were as many as may be, of whom these two stayed.
        assert_eq!(accounts.open.lock().expect("nobody panics").len(), 2 + 4);
    }
}
