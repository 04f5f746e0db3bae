//! The HTTP server: accepts connections, and bounds what each may take.
//!
//! Enters: a listener and the routes. Leaves: nothing, when told to stop. A client that sends its request slowly, or
//! opens connections and says nothing, is cut off, and cannot keep scrapes from being answered.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// Connections at a time; more wait in the kernel's queue.
const MOST_CONNECTIONS: usize = 256;
/// How long a client may take for the head of its request, and a kept connection may say nothing.
const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// How long one connection lives at most: scrapers open another one.
const LIFETIME: Duration = Duration::from_secs(600);
/// The longest head, bytes.
const MOST_HEAD_BYTES: usize = 16 << 10;
/// How long to wait where accepting fails: no file descriptors are left, say.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

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
        let Some((stream, place)) = accepted else {
            tokio::time::sleep(ACCEPT_RETRY).await;
            continue;
        };
        let service = TowerToHyperService::new(routes.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MOST_HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), service);
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
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Answers are written whole; without this a small one may wait for the client's acknowledgement.
            let _ = stream.set_nodelay(true);
            Some((stream, place))
        }
        Err(error) => {
            tracing::debug!(%error, "a connection could not be accepted");
            None
        }
    }
}
