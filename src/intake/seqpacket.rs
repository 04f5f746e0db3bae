//! The Unix seqpacket socket: a connection for each sender, one event a line, several lines a message, no answer.
//!
//! Each sender has a queue of its own. A flood fills only its sender's queue: its sends then block, or fail with `EAGAIN`.
//! One thread reads all connections in rounds; in a round an account has only so many bytes read, over all of its
//! connections. The kernel names a sender's process and user once, when it connects. Invariant: connections are shared among
//! owners as everything else is ([`Accounts`](super::Accounts)).

use super::Intake;
use super::datagram::MOST_DATAGRAM_BYTES;
use crate::files::Bound;
use highwater_core::jobs::{Account, Held, Refusal, Resource, Sender, Speaker};
use rustix::event::{Timespec, epoll};
use rustix::net::{RecvFlags, SocketFlags, SocketType, accept_with, listen, recv};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Bytes of one account that are read in one round, over all of its connections, and a little more: what is begun is read.
const AT_ONCE: usize = 64 << 10;
/// What a message counts for at the least, bytes.
const LEAST: usize = 1 << 10;
/// Connections that have their turn in one round, and new ones that are accepted in it.
const EVENTS: usize = 64;
/// How long a round waits at most: the longest that this thread keeps a shutdown waiting where [`Listener::close`] does not
/// wake it.
const WAIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// The same while nobody is accepted.
const WAIT_PAUSED: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long the listener is left alone where the system gives no descriptor.
const RETRY: Duration = Duration::from_millis(100);
/// The number of the listener among what is waited for; connections have others.
const LISTENER: u64 = 0;

/// The listening socket; its path is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    bound: Bound,
    epoll: OwnedFd,
}

/// One sender.
struct Connection {
    socket: OwnedFd,
    sender: Sender,
    account: Arc<Account>,
    _held: Held,
}

/// What the thread that reads keeps.
struct Reader<'a> {
    listener: &'a Listener,
    intake: &'a Intake,
    connections: HashMap<u64, Connection>,
    next: u64,
    buffer: Vec<u8>,
    /// Until when nobody is accepted, because the system gave no descriptor.
    paused: Option<Instant>,
    /// Bytes of each account that were read in this round, by its address.
    read: HashMap<usize, usize>,
    /// Rounds so far: each begins with another connection, so that those of one account have their turns.
    rounds: usize,
}

impl Listener {
    /// Listens beside this datagram socket, at its path with `.seqpacket` appended. Any user of the node may connect.
    ///
    /// # Errors
    /// As of [`Socket::bind`](super::datagram::Socket::bind).
    pub fn beside(datagrams: &Path) -> io::Result<Self> {
        let (socket, bound) = Bound::socket(&path_beside(datagrams), SocketType::SEQPACKET, 0o666)?;
        listen(&socket, BACKLOG)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &socket, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(Self { socket, bound, epoll })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.bound.path()
    }

    /// Wakes [`Listener::run`], which then looks whether it is to stop. Nobody can connect any more.
    pub fn close(&self) {
        // Refused only where it has been closed before.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Takes what senders send until `stop`.
    pub fn run(&self, intake: &Intake, stop: &AtomicBool) {
        let (connections, read, buffer) = (HashMap::new(), HashMap::new(), vec![0u8; MOST_DATAGRAM_BYTES]);
        let mut reader =
            Reader { listener: self, intake, connections, next: LISTENER + 1, buffer, paused: None, read, rounds: 0 };
        let mut events = Vec::with_capacity(EVENTS);
        while !stop.load(Ordering::Relaxed) {
            events.clear();
            let wait = if reader.paused.is_some() { &WAIT_PAUSED } else { &WAIT };
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(wait)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the seqpacket socket cannot be waited for");
                    std::thread::sleep(RETRY);
                }
            }
            reader.round(&events);
        }
    }

    /// Lets new connections wait, or not.
    fn listen_for(&self, flags: epoll::EventFlags) {
        let data = epoll::EventData::new_u64(LISTENER);
        if let Err(error) = epoll::modify(&self.epoll, &self.socket, data, flags) {
            tracing::warn!(%error, "the seqpacket socket's connections cannot be waited for");
        }
    }
}

impl Reader<'_> {
    fn round(&mut self, events: &[epoll::Event]) {
        self.read.clear();
        if self.paused.is_some_and(|until| Instant::now() >= until) {
            self.paused = None;
            self.listener.listen_for(epoll::EventFlags::IN);
        }
        self.rounds = self.rounds.wrapping_add(1);
        let (first, last) = events.split_at(self.rounds.checked_rem(events.len()).unwrap_or(0));
        for event in last.iter().chain(first) {
            match event.data.u64() {
                LISTENER => self.accept(),
                number => self.turn(number),
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..EVENTS {
            match accept_with(&self.listener.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.admit(socket),
                Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return,
                // Shut down, or out of descriptors: those who are connected go on.
                Err(error) => {
                    tracing::debug!(%error, "a connection to the seqpacket socket could not be accepted");
                    self.paused = Some(Instant::now() + RETRY);
                    return self.listener.listen_for(epoll::EventFlags::empty());
                }
            }
        }
    }

    /// Gives a new sender its place, where its owner may have one.
    fn admit(&mut self, socket: OwnedFd) {
        let sender = match credentials(&socket) {
            // A connection's number begins anew after four billion, and nobody is connected for so long.
            Ok(sender) => Sender { connection: u32::try_from(self.next & u64::from(u32::MAX)).ok(), ..sender },
            Err(error) => return tracing::warn!(%error, "a sender without credentials was turned away"),
        };
        let account = self.intake.account_of(&sender);
        if let Err(short) = account.may_hold(Resource::Connections, 1) {
            let refusal = Refusal::over_budget("connections", short, Resource::Connections, &account);
            return self.intake.refuse_unread(&refusal, &sender);
        }
        let data = epoll::EventData::new_u64(self.next);
        if let Err(error) = epoll::add(&self.listener.epoll, &socket, data, epoll::EventFlags::IN) {
            return tracing::warn!(%error, "a connection cannot be waited for and is closed");
        }
        let held = account.hold(Resource::Connections, 1);
        self.connections.insert(self.next, Connection { socket, sender, account, _held: held });
        self.next += 1;
    }

    /// Takes messages of a connection while its account has not had enough in this round; what is left comes again in a later
    /// one.
    fn turn(&mut self, number: u64) {
        let Some(connection) = self.connections.get(&number) else { return };
        let read = self.read.entry(Arc::as_ptr(&connection.account) as usize).or_default();
        while *read < AT_ONCE {
            match connection.read_one(self.intake, &mut self.buffer) {
                After::More(bytes) => *read += bytes.max(LEAST),
                After::Nothing => return,
                After::End => {
                    // Closing it takes it out of what is waited for.
                    let ended = self.connections.remove(&number).and_then(|connection| connection.sender.connection);
                    return ended.into_iter().for_each(|number| self.intake.has_ended(Speaker::Connection(number)));
                }
            }
        }
    }
}

/// What follows a message.
enum After {
    /// It had so many bytes, and there may be more.
    More(usize),
    Nothing,
    End,
}

impl Connection {
    /// Takes a message. Open files that are sent along are dropped by the kernel, because nobody asks for them.
    fn read_one(&self, intake: &Intake, buffer: &mut [u8]) -> After {
        match recv(&self.socket, &mut *buffer, RecvFlags::TRUNC | RecvFlags::DONTWAIT) {
            // The end, or an empty message, which nobody sends who has something to say.
            Ok((_, 0)) => After::End,
            Ok((length, whole)) if whole > length => {
                intake.refuse_unread(&Refusal::TooLarge { limit: MOST_DATAGRAM_BYTES }, &self.sender);
                After::More(length)
            }
            // What is refused is counted and logged with its sender.
            Ok((length, _)) => {
                drop(intake.take_json(buffer.get(..length).unwrap_or_default(), &self.sender));
                After::More(length)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => After::Nothing,
            Err(_) => After::End,
        }
    }
}

/// Where the seqpacket socket beside this datagram socket is.
#[must_use]
pub fn path_beside(datagrams: &Path) -> PathBuf {
    let mut path = datagrams.as_os_str().to_owned();
    path.push(".seqpacket");
    path.into()
}

/// Who connected. Not by rustix, which takes the process of another namespace, 0, for a process id.
fn credentials(socket: &OwnedFd) -> io::Result<Sender> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and the kernel writes at most `length` bytes, which is the size of what they are
    // written to.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Sender::process(u32::try_from(credentials.pid).ok().filter(|pid| *pid != 0), credentials.uid))
}
