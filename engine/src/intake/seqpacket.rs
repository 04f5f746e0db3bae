//! The Unix seqpacket socket: a connection for each sender, one event per line, several lines per message, and a
//! reply to a message that asks for it.
//!
//! Each sender has a queue of its own. A flood fills only its sender's queue: its sends then block, or fail with
//! `EAGAIN`. One thread reads all connections in rounds, with a limit on the bytes read per account and round, over all
//! of its connections. The kernel identifies a sender's process and user once, when it connects. Invariant: connections
//! are shared among owners as everything else is ([`Accounts`](highwater_core::jobs::Accounts)).

use super::admission::Intake;
use super::answer::MOST_REPLY_BYTES;
use super::datagram::MOST_DATAGRAM_BYTES;
use crate::files::Bound;
use crate::place::process::{started_after, ticks_now};
use highwater_core::jobs::{Account, Refusal, Reservation, Resource, Sender, SenderId};
use rustix::event::{Timespec, epoll};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType, accept_with, listen, recv, send};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// Bytes read per account in one round, over all of its connections. A message that has begun is read completely.
const AT_ONCE: usize = 64 << 10;
/// Minimum number of bytes that a message counts towards [`AT_ONCE`].
const LEAST: usize = 1 << 10;
/// Maximum number of connections that are served in one round, and that are accepted in one.
const EVENTS: usize = 64;
/// Send buffer for a sender's replies, bytes; the kernel doubles it for its bookkeeping. A sender that does not read its replies
/// loses further ones, and costs no more memory than this.
const REPLIES: usize = 4 * MOST_REPLY_BYTES;
/// How long a round waits at most. This is also the longest that the thread delays a shutdown if [`Listener::close`]
/// does not wake it.
const WAIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// The same while accepting is paused.
const WAIT_PAUSED: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long accepting pauses after the system could not provide a descriptor.
const RETRY: Duration = Duration::from_millis(100);
/// Interval of the checks that the process id of a sender was not reused.
const CHECK: Duration = Duration::from_millis(100);
/// The number of the listener in epoll; connections have others.
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
    /// When it was accepted, in ticks since boot, and when its process was last checked. A process with the sender's id that
    /// started later is another one.
    accepted: (u64, Instant),
    account: Arc<Account>,
    /// Whether the memory for its replies is bounded.
    is_answered: bool,
    held: Reservation,
}

/// The state of the reader thread.
struct Reader<'a> {
    listener: &'a Listener,
    intake: &'a Intake,
    connections: HashMap<u64, Connection>,
    next: u64,
    buffer: Vec<u8>,
    /// Until when accepting is paused, because the system could not provide a descriptor.
    paused: Option<Instant>,
    /// Bytes read in this round by account, keyed by its address.
    read: HashMap<usize, usize>,
    /// Rounds so far. Each begins with another connection, so that the connections of one account take turns.
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

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.bound.path()
    }

    /// Wakes [`Listener::run`], which then checks whether it must stop. No sender can connect any more.
    pub fn close(&self) {
        // Refused only if it has been closed before.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Takes senders' events until `stop`.
    pub fn run(&self, intake: &Intake, stop: &AtomicBool) {
        let mut reader = Reader::new(self, intake);
        let mut events = Vec::with_capacity(EVENTS);
        while !stop.load(Ordering::Relaxed) {
            events.clear();
            let wait = if reader.paused.is_some() { &WAIT_PAUSED } else { &WAIT };
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(wait)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for the seqpacket socket");
                    std::thread::sleep(RETRY);
                }
            }
            reader.round(&events);
        }
    }

    /// Sets whether to wait for new connections.
    fn listen_for(&self, flags: epoll::EventFlags) {
        let data = epoll::EventData::new_u64(LISTENER);
        if let Err(error) = epoll::modify(&self.epoll, &self.socket, data, flags) {
            tracing::warn!(%error, "cannot pause or resume accepting on the seqpacket socket");
        }
    }
}

impl<'a> Reader<'a> {
    fn new(listener: &'a Listener, intake: &'a Intake) -> Self {
        let (connections, read, buffer) = (HashMap::new(), HashMap::new(), vec![0u8; MOST_DATAGRAM_BYTES]);
        Self { listener, intake, connections, next: LISTENER + 1, buffer, paused: None, read, rounds: 0 }
    }

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
                // Shut down, or out of descriptors: existing connections continue.
                Err(error) => {
                    tracing::debug!(%error, "a connection to the seqpacket socket could not be accepted");
                    self.paused = Some(Instant::now() + RETRY);
                    return self.listener.listen_for(epoll::EventFlags::empty());
                }
            }
        }
    }

    /// Registers a new sender, if its owner may have another connection.
    fn admit(&mut self, socket: OwnedFd) {
        let sender = match credentials(&socket) {
            // The number wraps after four billion; no connection lasts that long.
            Ok(sender) => Sender { connection: u32::try_from(self.next & u64::from(u32::MAX)).ok(), ..sender },
            Err(error) => return tracing::warn!(%error, "a sender without credentials was refused"),
        };
        let account = self.intake.senders.account_of(&sender);
        if let Err(short) = account.may_hold(Resource::Connections, 1) {
            let refusal = Refusal::over_budget("connections", short, Resource::Connections, &account);
            return self.intake.refuse_unread(&refusal, &sender);
        }
        let data = epoll::EventData::new_u64(self.next);
        if let Err(error) = epoll::add(&self.listener.epoll, &socket, data, epoll::EventFlags::IN) {
            return tracing::warn!(%error, "cannot wait for a connection; closing it");
        }
        let held = account.hold(Resource::Connections, 1);
        let accepted = (ticks_now(), Instant::now());
        self.connections.insert(self.next, Connection { socket, sender, accepted, account, is_answered: false, held });
        self.next += 1;
    }

    /// Takes messages of a connection until its account reaches its limit in this round; the rest is read in a later
    /// round.
    fn turn(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let read = self.read.entry(Arc::as_ptr(&connection.account) as usize).or_default();
        while *read < AT_ONCE {
            match connection.read_one(self.intake, &mut self.buffer) {
                After::More(bytes) => *read += bytes.max(LEAST),
                After::Nothing => return,
                After::End => {
                    // Closing the socket removes it from epoll.
                    let Some(Connection { sender, held, .. }) = self.connections.remove(&number) else { return };
                    let Some(sender_id) = sender.connection.map(SenderId::Connection) else { return };
                    // It counts as a connection until its end has been handled.
                    return self.intake.end_after_parked(sender.pid, sender_id, Some(held));
                }
            }
        }
    }
}

/// What to do after a message.
enum After {
    /// It had this many bytes, and there may be more.
    More(usize),
    Nothing,
    End,
}

impl Connection {
    /// Clears the sender's process once another process has its id. A connection may outlive its process, and the other
    /// process's environment and pod are not the sender's.
    fn check_process(&mut self, intake: &Intake) {
        let (accepted, checked) = self.accepted;
        if let Some(pid) = self.sender.pid
            && checked.elapsed() >= CHECK
        {
            self.accepted.1 = Instant::now();
            if started_after(pid, accepted) {
                self.sender.pid = None;
                self.account = intake.senders.account_of(&self.sender);
            }
        }
    }

    /// Takes a message. The kernel drops open files that are sent along, because the call does not ask for them.
    fn read_one(&mut self, intake: &Intake, buffer: &mut [u8]) -> After {
        match recv(&self.socket, &mut *buffer, RecvFlags::TRUNC | RecvFlags::DONTWAIT) {
            // The end, or an empty message, which no sender with events sends.
            Ok((_, 0)) => After::End,
            Ok((length, whole)) if whole > length => {
                intake.refuse_unread(&Refusal::TooLarge { limit: MOST_DATAGRAM_BYTES }, &self.sender);
                After::More(length)
            }
            // Refused events are counted and logged with their sender.
            Ok((length, _)) => {
                self.check_process(intake);
                let message = buffer.get(..length).unwrap_or_default();
                let reply = intake.take_json(message, &self.sender).reply_to(message);
                After::More(length + reply.map_or(0, |reply| self.reply(&reply)))
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => After::Nothing,
            // It closed without reading its replies. Messages that it sent before may wait behind this error.
            Err(rustix::io::Errno::CONNRESET) => After::More(0),
            Err(_) => After::End,
        }
    }

    /// Replies to a message, and returns the bytes of the reply. Never waits: a sender that does not read loses its
    /// replies. That is not counted here, because only such a sender can cause it, and it misses them itself.
    fn reply(&mut self, reply: &[u8]) -> usize {
        if !self.is_answered {
            if let Err(error) = set_socket_send_buffer_size(&self.socket, REPLIES) {
                tracing::debug!(%error, "the memory for replies could not be bounded; sending none");
                return 0;
            }
            self.is_answered = true;
        }
        if let Err(error) = send(&self.socket, reply, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            tracing::debug!(%error, pid = self.sender.pid, "a reply was lost");
        }
        reply.len()
    }
}

/// The path of the seqpacket socket beside this datagram socket.
#[must_use]
pub fn path_beside(datagrams: &Path) -> PathBuf {
    let mut path = datagrams.as_os_str().to_owned();
    path.push(".seqpacket");
    path.into()
}

/// The process and user that connected. Does not use rustix, which takes a process id of 0 (a process of another namespace)
/// for a valid one.
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

#[cfg(test)]
mod tests;
