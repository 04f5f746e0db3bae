//! The Unix datagram socket: one event a line, several lines a datagram, no answer.
//!
//! An annotation must cost a training loop microseconds, so the sender never waits for the daemon; what is refused is
//! counted and, a few times a minute, logged. The kernel names the sender's process, which finds its GPU, and whose end is
//! the end of its ranks. All senders share one queue of `net.unix.max_dgram_qlen` datagrams, 10 on many systems: a sender
//! that finds it full waits, or loses the datagram and says so in the next one.

use super::Intake;
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
/// Datagrams after which the ends of senders' processes are looked for, where the queue is never found empty.
const LOOK_FOR_ENDS: usize = 1_024;
/// How long a turn waits at most: the longest that this thread keeps a shutdown waiting where [`Socket::close`] does
/// not wake it.
const WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long the socket is left alone after receiving has failed.
const RETRY: Duration = Duration::from_millis(200);
/// The user that the kernel itself puts in place of one that has no number here.
const NOBODY: u32 = 65_534;

/// The bound socket; its path is removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    socket: UnixDatagram,
    bound: Bound,
}

impl Socket {
    /// Binds `path`, which any user of the node may send to. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Where the directory cannot be made, the path is something else than a socket, or another daemon has it.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let (socket, bound) = Bound::socket(path, SocketType::DGRAM, 0o666)?;
        let socket = UnixDatagram::from(socket);
        rustix::net::sockopt::set_socket_passcred(&socket, true)?;
        Ok(Self { socket, bound })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.bound.path()
    }

    /// Wakes [`Socket::run`], which then looks whether it is to stop. Nothing is received any more.
    pub fn close(&self) {
        // Refused only where it has been closed before.
        let _ = self.socket.shutdown(std::net::Shutdown::Read);
    }

    /// Takes datagrams until `stop`, and ends the ranks of senders whose processes have ended, after what these had sent.
    pub fn run(&self, intake: &Intake, stop: &AtomicBool) {
        let ends = intake.see_ends();
        let mut in_turn = 0;
        let mut buffer = vec![0u8; MOST_DATAGRAM_BYTES];
        let mut is_failing = false;
        while !stop.load(Ordering::Relaxed) {
            match self.receive(&mut buffer) {
                // What a socket that has been closed receives is nothing, and nobody sent it.
                Ok(Datagram { length: 0, .. }) if stop.load(Ordering::Relaxed) => {}
                Ok(Datagram { truncated: true, sender, .. }) => {
                    intake.refuse_unread(&Refusal::TooLarge { limit: MOST_DATAGRAM_BYTES }, &sender);
                }
                // What is refused is counted and logged with its sender.
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
                        tracing::warn!(%error, "the annotation socket cannot be received from; it is tried again");
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

    /// Waits for the next datagram, or for the end of a sender's process. What such a process had sent comes first: a datagram
    /// is in the queue before its sender ends.
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

    /// The next datagram, with the process that the kernel says sent it.
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

/// Room for the credentials of one sender and for nothing else: the kernel writes them first, and drops what does not fit.
/// With room to spare a sender could pass open files along, and the daemon would hold them.
#[allow(clippy::cast_possible_truncation, reason = "twelve bytes")]
// SAFETY: the macro only computes with its argument.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE(size_of::<libc::ucred>() as u32) } as usize;

/// The control area of a message, aligned as its headers must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// The sending process, which is not known where the kernel has 0, because it is outside this process's namespace; and its
/// user.
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
    // The kernel writes them with every message. Should it not, nobody knows who it was.
    Sender::process(None, NOBODY)
}

struct Datagram {
    length: usize,
    truncated: bool,
    sender: Sender,
}
