//! The Unix datagram socket: one event a line, several lines a datagram, no answer.
//!
//! An annotation must cost a training loop microseconds, so the sender never waits for the daemon; what is refused is
//! counted and, a few times a minute, logged. The kernel tells the sender's process, which finds its GPU.

use super::intake::Intake;
use super::refusal::Refusal;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest datagram, bytes.
pub const MOST_DATAGRAM_BYTES: usize = 64 << 10;
/// How long a receive waits at most: the longest that this thread keeps a shutdown waiting.
const RECEIVE_WAIT: Duration = Duration::from_millis(200);
/// Refusals that are logged in one minute.
const MOST_LOGGED: u32 = 6;

/// The bound socket; its path is removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Socket {
    /// Binds `path`, which any user of the node may send to. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Where the directory cannot be made, the path is something else than a socket, or another daemon has it.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        remove_stale(path)?;
        let socket = UnixDatagram::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        socket.set_read_timeout(Some(RECEIVE_WAIT))?;
        rustix::net::sockopt::set_socket_passcred(&socket, true)?;
        // As much as the system allows: a burst waits here while the thread is not scheduled.
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 4 << 20)?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes datagrams until `stop`.
    pub fn run(&self, intake: &Intake, stop: &AtomicBool) {
        let mut buffer = vec![0u8; MOST_DATAGRAM_BYTES];
        let mut log = Log { since: Instant::now(), logged: 0 };
        while !stop.load(Ordering::Relaxed) {
            match self.receive(&mut buffer) {
                Ok(Datagram { truncated: true, .. }) => {
                    let refusal = Refusal::TooLarge { limit: MOST_DATAGRAM_BYTES };
                    intake.refuse(&refusal);
                    log.refused(&refusal.to_string(), None);
                }
                Ok(Datagram { length, pid, .. }) => {
                    let answer = intake.take_json(buffer.get(..length).unwrap_or_default(), pid);
                    if let Some(first) = answer.refusals.first() {
                        log.refused(&first.detail, pid);
                    }
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => {
                    log.refused(&format!("receiving failed: {error}"), None);
                    std::thread::sleep(RECEIVE_WAIT);
                }
            }
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> rustix::io::Result<Datagram> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(buffer)];
        let received = recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::empty())?;
        let pid = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmCredentials(credentials) => Some(credentials.pid.as_raw_nonzero().get()),
            _ => None,
        });
        Ok(Datagram {
            length: received.bytes,
            truncated: received.flags.contains(ReturnFlags::TRUNC),
            pid: pid.and_then(|pid| u32::try_from(pid).ok()),
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "annotation socket was already gone");
        }
    }
}

struct Datagram {
    length: usize,
    truncated: bool,
    pid: Option<u32>,
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is not a socket"));
    }
    let probe = UnixDatagram::unbound()?;
    if probe.connect(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another daemon listens on it"));
    }
    std::fs::remove_file(path)
}

/// Keeps a misbehaving job from filling the log.
struct Log {
    since: Instant,
    logged: u32,
}

impl Log {
    fn refused(&mut self, detail: &str, pid: Option<u32>) {
        if self.since.elapsed() > Duration::from_secs(60) {
            *self = Log { since: Instant::now(), logged: 0 };
        }
        self.logged += 1;
        match self.logged {
            ..=MOST_LOGGED => tracing::warn!(pid, detail = ?detail, "annotation refused"),
            n if n == MOST_LOGGED + 1 => {
                tracing::warn!("more annotations refused; counted in highwater_annotations_total")
            }
            _ => {}
        }
    }
}
