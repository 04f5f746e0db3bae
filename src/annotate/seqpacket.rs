//! The Unix seqpacket socket: a connection for each sender, one event a line, several lines a message, no answer.
//!
//! Beside the datagram socket it gives each sender a queue of its own: whoever floods fills its own and waits, or is told by
//! the kernel that it is full. One thread reads all connections in turn, a few messages of each, so that a flood costs others
//! nothing but that. The kernel names a sender's process and user once, when it connects. Invariant: connections are shared
//! among users as everything else is ([`Accounts`](super::Accounts)).

use super::account::{Account, Owner, Resource, Sender};
use super::intake::Intake;
use super::refusal::Refusal;
use super::socket::MOST_DATAGRAM_BYTES;
use crate::files::Bound;
use rustix::event::{Timespec, epoll};
use rustix::net::{RecvFlags, SocketFlags, SocketType, accept_with, listen, recv};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Messages of one connection that are read before others have their turn.
const AT_ONCE: usize = 8;
/// Connections whose turn comes in one round, before the listener's.
const EVENTS: usize = 64;
/// How long a round waits at most: the longest that this thread keeps a shutdown waiting where [`Listener::close`] does not
/// wake it.
const WAIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// How long the listener is left alone where the system gives no descriptor.
const RETRY: std::time::Duration = std::time::Duration::from_millis(100);
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
    _held: super::account::Held,
}

impl Listener {
    /// Listens beside this datagram socket, at its path with `.seqpacket` appended. Any user of the node may connect.
    ///
    /// # Errors
    /// As of [`Socket::bind`](super::socket::Socket::bind).
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
        let (mut connections, mut next) = (HashMap::new(), LISTENER + 1);
        let mut buffer = vec![0u8; MOST_DATAGRAM_BYTES];
        let mut events = Vec::with_capacity(EVENTS);
        while !stop.load(Ordering::Relaxed) {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&WAIT)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the seqpacket socket cannot be waited for");
                    std::thread::sleep(RETRY);
                }
            }
            for event in events.drain(..) {
                let number = event.data.u64();
                if number == LISTENER {
                    self.accept(intake, &mut connections, &mut next);
                } else if let Some(connection) = connections.get(&number)
                    && !connection.read(intake, &mut buffer)
                {
                    // Closing it takes it out of what is waited for.
                    connections.remove(&number);
                }
            }
        }
    }

    fn accept(&self, intake: &Intake, connections: &mut HashMap<u64, Connection>, next: &mut u64) {
        let socket = match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => return,
            // Shut down, or out of descriptors.
            Err(error) => {
                tracing::debug!(%error, "a connection to the seqpacket socket could not be accepted");
                return std::thread::sleep(RETRY);
            }
        };
        let sender = match credentials(&socket) {
            Ok(sender) => sender,
            Err(error) => return tracing::warn!(%error, "a sender without credentials was turned away"),
        };
        let account = intake.accounts().of(&Owner::of(&sender, None));
        if let Err(short) = account.may_hold(Resource::Connections, 1) {
            let limit = account.limit(Resource::Connections);
            return intake.refuse_unread(&Refusal::OverBudget { what: "connections", short, limit }, &sender);
        }
        let added = epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(*next), epoll::EventFlags::IN);
        if let Err(error) = added {
            return tracing::warn!(%error, "a connection cannot be waited for and is closed");
        }
        connections.insert(*next, Connection::new(socket, sender, &account));
        *next += 1;
    }
}

impl Connection {
    fn new(socket: OwnedFd, sender: Sender, account: &Arc<Account>) -> Self {
        Self { socket, sender, _held: account.hold(Resource::Connections, 1) }
    }

    /// Takes some messages; returns whether more may come. Open files that are sent along are dropped by the kernel, because
    /// nobody asks for them.
    fn read(&self, intake: &Intake, buffer: &mut [u8]) -> bool {
        for _ in 0..AT_ONCE {
            match recv(&self.socket, &mut *buffer, RecvFlags::TRUNC | RecvFlags::DONTWAIT) {
                // The end, or an empty message, which nobody sends who has something to say.
                Ok((_, 0)) => return false,
                Ok((length, whole)) if whole > length => {
                    intake.refuse_unread(&Refusal::TooLarge { limit: MOST_DATAGRAM_BYTES }, &self.sender);
                }
                // What is refused is counted and logged with its sender.
                Ok((length, _)) => drop(intake.take_json(buffer.get(..length).unwrap_or_default(), &self.sender)),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return true,
                Err(_) => return false,
            }
        }
        true
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
