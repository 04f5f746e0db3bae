//! The HTTP server: accepts connections, and limits what each may use.
//!
//! Enters: listeners and their routes. Leaves: nothing; it ends when stopped. Every client gets a slot at once
//! (`slots`). A client that sends its request slowly, opens connections without sending anything, or does not read its
//! answer is cut off, and is evicted before that when other clients need its slot. Invariant: accepting waits for no
//! client and no handler.

use super::connection::ConnectionState;
use super::counts::{Ending, HttpStats, Listener, LogLimiter};
use super::guard::Guard;
use super::problem::Problem;
use super::sender::Peer;
use super::slots::{ConnectionSlot, ConnectionSlots};
use super::stream::Watched;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode};
use highwater_engine::dial::Stream;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tower_service::Service as _;

/// Connections that the kernel completes before they are accepted: those of a burst, while each gets a slot.
const BACKLOG: u32 = 4096;
/// How long an answer may wait for a client that does not read.
pub const TAKE_PATIENCE: Duration = Duration::from_secs(20);
/// How long a client may take for the body of its request.
const BODY_PATIENCE: Duration = Duration::from_secs(10);
/// The longest head, bytes.
pub(crate) const MOST_HEAD_BYTES: usize = 16 << 10;
/// How long to wait if accepting fails and no connection can be evicted.
const ACCEPT_RETRY: Duration = Duration::from_millis(10);

/// One listener and its routes.
pub struct Server {
    /// The listener's name, for metrics.
    pub name: Listener,
    /// Where clients connect.
    pub listener: TcpListener,
    /// What they may request.
    pub routes: Router,
    /// The most connections at a time.
    pub slots: usize,
    /// Counts of connections.
    pub stats: Arc<HttpStats>,
    /// The web configuration, with its TLS settings.
    pub guard: Option<Arc<Guard>>,
}

/// Waits for `read`, which reads the body of a request, for at most `BODY_PATIENCE`.
///
/// # Errors
/// A problem with status 408, if that time is over.
pub async fn in_time<T>(read: impl Future<Output = T>) -> Result<T, Problem> {
    tokio::time::timeout(BODY_PATIENCE, read).await.map_err(|_| {
        let detail = format!("the body did not arrive within {} s", BODY_PATIENCE.as_secs());
        Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
    })
}

/// Listens on `address`. The kernel closes the connection of a client that reads nothing of its answer for `patience`
/// (`TCP_USER_TIMEOUT`). Kernels before 5.11 without that version's fix wait as long as the client advertises a window
/// of zero.
///
/// # Errors
/// The address cannot be bound.
pub fn listen(address: SocketAddr, patience: Duration) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    // Connections inherit this from their listener.
    sockopt::set_tcp_user_timeout(&socket, u32::try_from(patience.as_millis()).unwrap_or(u32::MAX))?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Server {
    /// Serves until `stop`, then waits until requests in progress are answered.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let slots = ConnectionSlots::new(self.name, self.slots, Arc::clone(&self.stats));
        let graceful = GracefulShutdown::new();
        let failing = LogLimiter::default();
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = accept(&self.listener) => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let Some(slot) = slots.take(peer.client()).await else { break };
                    tokio::spawn(self.connection(stream, peer, slot, graceful.watcher()));
                }
                Err(error) => self.failed(&error, &slots, &failing).await,
            }
        }
        graceful.shutdown().await;
    }

    /// One connection, from its first byte to its last.
    fn connection(
        &self,
        stream: TcpStream,
        peer: Peer,
        slot: ConnectionSlot,
        watcher: Watcher,
    ) -> impl Future<Output = ()> + use<> {
        let state = Arc::clone(&slot.state);
        let client = peer.peer;
        let service = Routes { routes: self.routes.clone(), peer, state: Arc::clone(&state) };
        let guard = self.guard.clone();
        slot.keep(async move {
            match secured(Watched::new(stream, Arc::clone(&state)), guard).await {
                Ok(stream) => {
                    state.shook_hands();
                    serve_one(stream, service, watcher).await
                }
                Err(error) => {
                    tracing::debug!(peer = %client, %error, "the TLS handshake failed");
                    Ending::HandshakeFailed
                }
            }
        })
    }

    /// Counts and logs a failed accept, and makes room if the system has none.
    async fn failed(&self, error: &io::Error, slots: &ConnectionSlots, failing: &LogLimiter) {
        // The kernel looks for a free descriptor first, and fails without one even if no client is waiting.
        if !has_come(&self.listener) {
            return tokio::time::sleep(ACCEPT_RETRY).await;
        }
        self.stats.connections(self.name).fail();
        if let Some(since) = failing.due() {
            tracing::warn!(listener = self.name.label(), %error, "{since} connections could not be accepted");
        }
        let of_one_client = [Errno::CONNABORTED, Errno::CONNRESET, Errno::INTR];
        if of_one_client.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error())) {
            return;
        }
        if !slots.make_room().await {
            tokio::time::sleep(ACCEPT_RETRY).await;
        }
    }
}

/// Whether a client waits to be accepted, as far as the kernel reports it.
fn has_come(listener: &TcpListener) -> bool {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).map_or(true, |ready| ready > 0)
}

async fn accept(listener: &TcpListener) -> io::Result<(TcpStream, Peer)> {
    let (stream, peer) = listener.accept().await?;
    let local = stream.local_addr()?;
    // Answers are written at once; without this, a small one may wait for the client's acknowledgement.
    let _ = stream.set_nodelay(true);
    Ok((stream, Peer::accepted(peer, local)))
}

/// The stream inside TLS, if enabled.
async fn secured(stream: Watched, guard: Option<Arc<Guard>>) -> io::Result<Box<dyn Stream>> {
    let Some(guard) = guard else { return Ok(Box::new(stream)) };
    match guard.rules().await.tls() {
        Some(acceptor) => Ok(Box::new(acceptor.accept(stream).await?)),
        None => Ok(Box::new(stream)),
    }
}

/// HTTP/1 on one stream.
async fn serve_one(stream: Box<dyn Stream>, service: Routes, watcher: Watcher) -> Ending {
    // The slot measures the time for the head: hyper's own timer would count a kept connection's silence too.
    let connection = http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(MOST_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    // Errors at the end of a connection are the client's concern.
    let _ = watcher.watch(connection).await;
    Ending::Closed
}

/// The routes for the requests of one connection.
struct Routes {
    routes: Router,
    peer: Peer,
    state: Arc<ConnectionState>,
}

impl Service<Request<Incoming>> for Routes {
    type Response = Response<Answer>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let state = Arc::clone(&self.state);
        state.asked(!hyper::body::Body::is_end_stream(request.body()));
        let mut request = request.map(|body| Body::new(Asked { body, state: Arc::clone(&state) }));
        request.extensions_mut().insert(self.peer);
        // A router is always ready.
        let answered = self.routes.clone().call(request);
        Box::pin(async move {
            let answer = answered.await?;
            state.heard_all();
            Ok(answer.map(|body| Answer { body, state }))
        })
    }
}

/// A request's body, which notifies its state when all of it has arrived.
struct Asked {
    body: Incoming,
    state: Arc<ConnectionState>,
}

impl hyper::body::Body for Asked {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if self.body.is_end_stream() || matches!(frame, Poll::Ready(None)) {
            self.state.heard_all();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body, which notifies its state when all of it has been handed to the stream.
struct Answer {
    body: Body,
    state: Arc<ConnectionState>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.state.answered();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn serve(listener: TcpListener, routes: Router, stop: impl Future<Output = ()>) -> Arc<HttpStats> {
        let (name, stats) = (Listener::Http, Arc::<HttpStats>::default());
        let server = Server { name, listener, routes, slots: 8, stats: Arc::clone(&stats), guard: None };
        server.run(stop).await;
        stats
    }

    #[tokio::test]
    async fn a_request_has_both_ends_of_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let local = listener.local_addr().expect("bound");
        let answer =
            |axum::Extension(peer): axum::Extension<Peer>| async move { format!("{} {}", peer.peer, peer.local) };
        let routes = Router::new().route("/", axum::routing::get(answer));
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

    /// More than fits the kernel's buffers.
    const LONG: usize = 64 << 20;

    #[tokio::test]
    async fn a_client_who_takes_nothing_is_left() {
        let listener = listen(([127, 0, 0, 1], 0).into(), Duration::from_millis(300)).expect("a port");
        let mut client = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("it listens");
        client.write_all(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n").await.expect("sent");
        let routes = Router::new().route("/", axum::routing::get(|| async { vec![b'x'; LONG] }));
        // Stopped when the answer begins, it waits for the client, which does not read.
        let begun = async { client.readable().await.expect("connected") };
        let stats = serve(listener, routes, begun).await;
        assert_eq!(stats.connections(Listener::Http).ended(Ending::TimedOut), 1);
        let mut taken = Vec::new();
        // It may be reset instead of closed.
        let _ = client.read_to_end(&mut taken).await;
        assert!(!taken.is_empty() && taken.len() < LONG, "{} bytes", taken.len());
    }
}
