//! The stream of one connection: tells its place of each byte, and gives up clients who take nothing.

use super::seat::Seat;
use std::io;
use std::os::fd::AsRawFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// How long an answer may wait for a client who takes none of it.
pub(super) const TAKE_PATIENCE: Duration = Duration::from_secs(20);

/// A connection whose writing fails once the client has taken nothing for too long.
pub(super) struct Watched {
    stream: TcpStream,
    seat: Arc<Seat>,
    /// Until when it must take something, while it is waited for, and what it had not taken when the waiting began, bytes.
    waiting: Option<(Pin<Box<Sleep>>, i32)>,
}

impl Watched {
    pub(super) fn new(stream: TcpStream, seat: Arc<Seat>) -> Self {
        Self { stream, seat, waiting: None }
    }

    /// What became of a write, unless it has waited for too long. The kernel asks for more only when a third of its buffer
    /// is free, which a slow client may take long for: one who takes anything is waited for.
    fn patiently(&mut self, written: Poll<io::Result<usize>>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.waiting = None;
            self.seat.wrote();
            return written;
        }
        let queued_bytes = queued_bytes(&self.stream);
        let (until, before_bytes) =
            self.waiting.get_or_insert_with(|| (Box::pin(tokio::time::sleep(TAKE_PATIENCE)), queued_bytes));
        while until.as_mut().poll(cx).is_ready() {
            if queued_bytes >= *before_bytes {
                self.seat.stall();
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            *before_bytes = queued_bytes;
            until.as_mut().reset(Instant::now() + TAKE_PATIENCE);
        }
        Poll::Pending
    }
}

/// What was written and the client has not taken yet, bytes; 0 where the kernel does not tell, which counts as nothing taken.
fn queued_bytes(stream: &TcpStream) -> i32 {
    let mut bytes = 0;
    // SAFETY: the descriptor is the stream's own, and the call writes one number.
    unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    bytes
}

impl AsyncRead for Watched {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buffer))?;
        if buffer.filled().len() > before {
            this.seat.read();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.patiently(written, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, parts);
        this.patiently(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_flush(cx))?;
        this.seat.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
