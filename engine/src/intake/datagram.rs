//! The Unix datagram socket: one event per line, several lines per datagram, no answer.
//!
//! An annotation may cost a training loop only microseconds, so the daemon sends no answer. Refusals are counted and, a few
//! times a minute, logged. The kernel reports the sender's process. The daemon finds the GPU through it, and ends its ranks
//! when it ends. All senders share one queue of `net.unix.max_dgram_qlen` datagrams, 10 on many systems. A sender that
//! finds it full waits, or loses the datagram and reports the loss in the next one.

use super::admission::Intake;
use super::ends::Ends;
use crate::files::Bound;
use highwater_core::jobs::{Refusal, Sender};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketType;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The longest datagram, bytes.
pub const MOST_DATAGRAM_BYTES: usize = 64 << 10;
/// Datagrams after which ended senders' processes are looked for, if the queue is never empty.
const LOOK_FOR_ENDS: usize = 1_024;
/// How long a turn waits at most. This is also the longest that the thread delays a shutdown if [`Socket::close`] does
/// not wake it.
const WAIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// How long to wait after receiving has failed.
const RETRY: Duration = Duration::from_millis(200);
/// The user id that the kernel reports for a user that this user namespace does not map (`overflowuid`).
const NOBODY: u32 = 65_534;

/// The bound socket; its path is removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    socket: UnixDatagram,
    bound: Bound,
}

impl Socket {
    /// Binds `path`, to which any user of the node may send. A socket on which no process listens any more is replaced.
    ///
    /// # Errors
    /// The directory cannot be created, the path is not a socket, or another daemon uses it.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let (socket, bound) = Bound::socket(path, SocketType::DGRAM, 0o666)?;
        let socket = UnixDatagram::from(socket);
        rustix::net::sockopt::set_socket_passcred(&socket, true)?;
        Ok(Self { socket, bound })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.bound.path()
    }

    /// Wakes [`Socket::run`], which then checks whether it must stop. Nothing is received any more.
    pub fn close(&self) {
        // Refused only if it has been closed before.
        let _ = self.socket.shutdown(std::net::Shutdown::Read);
    }

    /// Takes datagrams until `stop`, and ends the ranks of senders whose processes have ended, after taking their
    /// datagrams.
    pub fn run(&self, intake: &Intake, stop: &AtomicBool) {
        let ends = intake.see_ends();
        let mut in_turn = 0;
        let mut buffer = vec![0u8; MOST_DATAGRAM_BYTES];
        let mut is_failing = false;
        while !stop.load(Ordering::Relaxed) {
            match self.receive(&mut buffer) {
                // A closed socket returns an empty datagram without a sender.
                Ok(Datagram { length: 0, .. }) if stop.load(Ordering::Relaxed) => {}
                Ok(Datagram { truncated: true, sender, .. }) => {
                    intake.refuse_unread(&Refusal::TooLarge { limit: MOST_DATAGRAM_BYTES }, &sender);
                }
                // Refused events are counted and logged with their sender.
                Ok(Datagram { length, sender, .. }) => {
                    is_failing = false;
                    drop(intake.take_json(buffer.get(..length).unwrap_or_default(), &sender));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    in_turn = 0;
                    self.wait(intake, ends);
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "cannot receive from the annotation socket; retrying");
                    }
                    std::thread::sleep(RETRY);
                }
            }
            in_turn += 1;
            if in_turn >= LOOK_FOR_ENDS {
                in_turn = 0;
                ends.iter().for_each(|ends| intake.take_ended(ends));
            }
        }
    }

    /// Waits for the next datagram, or for the end of a sender's process. The process's datagrams come first: they are
    /// in the queue before it ends.
    fn wait(&self, intake: &Intake, ends: Option<&Ends>) {
        let mut fds = vec![PollFd::new(&self.socket, PollFlags::IN)];
        fds.extend(ends.map(|ends| PollFd::new(ends, PollFlags::IN)));
        // A failure shows when the socket is read.
        let _ = poll(&mut fds, Some(&WAIT));
        let is_ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        if let Some(ends) = ends.filter(|_| !is_ready(fds.first()) && is_ready(fds.get(1))) {
            intake.take_ended(ends);
        }
    }

    /// The next datagram, with its sender's process from the kernel.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<Datagram> {
        let mut control = Control([0; CONTROL_BYTES]);
        let mut slice = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: a message header is plain data, for which all zeros is a valid value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut slice;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES as _;
        // SAFETY: the header points to a buffer and a control area that live until the call returns, with their sizes.
        let length = unsafe {
            libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT)
        };
        let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
        Ok(Datagram { length, truncated: message.msg_flags & libc::MSG_TRUNC != 0, sender: sender(&message) })
    }
}

/// Room for the credentials of one sender and nothing else: the kernel writes them first, and drops what does not fit.
/// With room to spare, a sender could pass open files along, and the daemon would hold them.
#[allow(clippy::cast_possible_truncation, reason = "twelve bytes")]
// SAFETY: the macro only computes with its argument.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE(size_of::<libc::ucred>() as u32) } as usize;

/// The control area of a message, aligned as its headers must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// The sending process and its user. The process is unknown if the kernel reports 0, because it is outside this
/// process's namespace.
fn sender(message: &libc::msghdr) -> Sender {
    // SAFETY: the kernel has filled in the control area that the header points to, and its length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: the macros' own walk gave a header inside the control area.
        let (level, kind) = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
        if level == libc::SOL_SOCKET && kind == libc::SCM_CREDENTIALS {
            // SAFETY: a message of this type holds one `ucred`, perhaps unaligned.
            let credentials = unsafe { std::ptr::read_unaligned(libc::CMSG_DATA(header).cast::<libc::ucred>()) };
            let pid = u32::try_from(credentials.pid).ok().filter(|pid| *pid != 0);
            return Sender::process(pid, credentials.uid);
        }
        // SAFETY: as for the first.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    // The kernel writes them with every message. If it did not, the sender would be unknown.
    Sender::process(None, NOBODY)
}

struct Datagram {
    length: usize,
    truncated: bool,
    sender: Sender,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_datagram_that_is_longer_than_the_buffer_is_cut_off() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = Socket::bind(&folder.path().join("a.sock")).expect("bound");
        let client = UnixDatagram::unbound().expect("a socket");
        let receive = |bytes: usize| {
            client.send_to(&vec![b'x'; bytes], socket.path()).expect("sent");
            let Datagram { length, truncated, sender } = socket.receive(&mut [0; 8]).expect("received");
            assert_eq!(sender.pid, Some(std::process::id()));
            (length, truncated)
        };
        assert_eq!([receive(3), receive(8), receive(9)], [(3, false), (8, false), (8, true)]);
    }
}
