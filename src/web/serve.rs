//! The HTTP server: accepts connections, and bounds what each may take.
//!
//! Enters: a listener and the routes. Leaves: nothing, when told to stop. A client that sends its request slowly, opens
//! connections and says nothing, or takes nothing of its answer, is cut off after `PATIENCE`, so that it keeps scrapes from
//! being answered no longer than that.

use super::problem::Problem;
use axum::Router;
use axum::http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep};

/// Connections at a time; more wait in the kernel's queue.
const MOST_CONNECTIONS: usize = 256;
/// How long a client may take for the head of its request, and for the body; how long a kept connection may say nothing, and
/// how long an answer may wait for a client who takes none of it.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one connection lives at most: scrapers open another one.
const LIFETIME: Duration = Duration::from_secs(600);
/// The longest head, bytes.
const MOST_HEAD_BYTES: usize = 16 << 10;
/// How long to wait where accepting fails: no file descriptors are left, say.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Both ends of the connection that a request came over: an extension of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The client's address.
    pub peer: SocketAddr,
    /// The address that it connected to.
    pub local: SocketAddr,
}

/// The routes for the requests of one connection.
struct Routes {
    routes: TowerToHyperService<Router>,
    peer: Peer,
}

impl Service<Request<Incoming>> for Routes {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        self.routes.call(request)
    }
}

/// The body that `read` reads, if it comes in time.
///
/// # Errors
/// That it did not.
pub async fn in_time<T>(read: impl Future<Output = T>) -> Result<T, Problem> {
    tokio::time::timeout(PATIENCE, read).await.map_err(|_| {
        let detail = format!("the body did not arrive within {} s", PATIENCE.as_secs());
        Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
    })
}

/// Serves until `stop`, then waits until requests under way are answered.
pub async fn serve(listener: TcpListener, routes: Router, stop: impl Future<Output = ()>) {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = accept(&listener, &places) => accepted,
        };
        let Some((stream, peer, place)) = accepted else {
            tokio::time::sleep(ACCEPT_RETRY).await;
            continue;
        };
        let service = Routes { routes: TowerToHyperService::new(routes.clone()), peer };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(PATIENCE)
            .max_buf_size(MOST_HEAD_BYTES)
            .serve_connection(TokioIo::new(Taken::by(stream)), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // How a connection ends is the client's affair.
            let _ = tokio::time::timeout(LIFETIME, connection).await;
            drop(place);
        });
    }
    graceful.shutdown().await;
}

/// The next connection once there is a place for it; `None` where the system cannot give one now.
async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, Peer, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    let accepted = listener.accept().await.and_then(|(stream, peer)| {
        let local = stream.local_addr()?;
        Ok((stream, Peer { peer, local }))
    });
    match accepted {
        Ok((stream, peer)) => {
            // Answers are written whole; without this a small one may wait for the client's acknowledgement.
            let _ = stream.set_nodelay(true);
            Some((stream, peer, place))
        }
        Err(error) => {
            tracing::debug!(%error, "a connection could not be accepted");
            None
        }
    }
}

/// A connection whose writing fails once the client has taken nothing for too long.
struct Taken {
    stream: TcpStream,
    /// Until when it must take something, while it is waited for, and what it had not taken when the waiting began, bytes.
    waiting: Option<(Pin<Box<Sleep>>, i32)>,
}

impl Taken {
    fn by(stream: TcpStream) -> Self {
        Self { stream, waiting: None }
    }

    /// What became of a write, unless it has waited for too long. The kernel asks for more only when a third of its buffer
    /// is free, which a slow client may take long for: one who takes anything is waited for.
    fn patiently<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let queued_bytes = queued_bytes(&self.stream);
        let (until, before_bytes) =
            self.waiting.get_or_insert_with(|| (Box::pin(tokio::time::sleep(PATIENCE)), queued_bytes));
        while until.as_mut().poll(cx).is_ready() {
            if queued_bytes >= *before_bytes {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            *before_bytes = queued_bytes;
            until.as_mut().reset(Instant::now() + PATIENCE);
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

impl AsyncRead for Taken {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Taken {
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
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};

    #[tokio::test]
    async fn a_request_has_both_ends_of_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let local = listener.local_addr().expect("bound");
        let told =
            |axum::Extension(peer): axum::Extension<Peer>| async move { format!("{} {}", peer.peer, peer.local) };
        let routes = Router::new().route("/", axum::routing::get(told));
        let serving = tokio::spawn(serve(listener, routes, std::future::pending()));
        let asking = tokio::task::spawn_blocking(move || {
            let mut client = std::net::TcpStream::connect(local).expect("it listens");
            client.write_all(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n").expect("sent");
            let mut answer = String::new();
            client.read_to_string(&mut answer).expect("answered");
            (client.local_addr().expect("connected"), answer)
        });
        let (peer, answer) = asking.await.expect("asked");
        serving.abort();
        assert!(answer.ends_with(&format!("{peer} {local}")), "{answer}");
    }

    /// More than the kernel's buffers take.
    const LONG: usize = 64 << 20;

    #[tokio::test(start_paused = true)]
    async fn a_client_who_takes_nothing_is_left() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let mut client = std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        client.write_all(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n").expect("sent");
        let routes = Router::new().route("/", axum::routing::get(|| async { vec![b'x'; LONG] }));
        // Ends when nobody is connected any more, which takes the client's patience, or else the connection's lifetime.
        let begun = Instant::now();
        serve(listener, routes, tokio::time::sleep(Duration::from_secs(1))).await;
        assert!(begun.elapsed() < 2 * PATIENCE, "{:?}", begun.elapsed());
        let mut taken = Vec::new();
        // It may be cut off rather than ended.
        let _ = client.read_to_end(&mut taken);
        assert!(!taken.is_empty() && taken.len() < LONG, "{} bytes", taken.len());
    }
}
