//! How to open a connection, for every HTTP client in the daemon: OTLP to its receivers, gRPC to the kubelet.
//!
//! Enters: a host and port, or a Unix socket's path; a TLS configuration if there is one. Leaves: streams for hyper, and
//! texts of errors for the log. Absent on purpose: proxies, and the certificates that TLS trusts, which the caller configures.

use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tower_service::Service;

/// The most characters that are kept of a peer's text.
const MOST_TEXT: usize = 300;

/// A stream of bytes both ways.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

type Dialled<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// Makes streams to a host and port: TCP, or what a test puts in its place.
pub trait Dial: Send + Sync {
    /// A new stream.
    fn dial(&self, host: String, port: u16) -> Dialled<Box<dyn Stream>>;
}

/// The operating system's TCP. For a host with addresses of both families, the other family is tried too after a short
/// delay (RFC 8305), so that a network that drops one family's packets does not hide a receiver.
#[derive(Debug, Clone, Copy)]
pub struct Tcp;

impl Dial for Tcp {
    fn dial(&self, host: String, port: u16) -> Dialled<Box<dyn Stream>> {
        Box::pin(async move { Ok(Box::new(connect(HttpConnector::new(), &host, port).await?) as Box<dyn Stream>) })
    }
}

async fn connect<R>(mut http: HttpConnector<R>, host: &str, port: u16) -> io::Result<TcpStream>
where
    HttpConnector<R>: Service<http::Uri, Response = TokioIo<TcpStream>>,
    <HttpConnector<R> as Service<http::Uri>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    http.set_nodelay(true);
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let uri = http::Uri::builder().scheme("http").authority(format!("{host}:{port}")).path_and_query("/").build();
    let stream = http.call(uri.map_err(io::Error::other)?).await.map_err(io::Error::other)?;
    Ok(stream.into_inner())
}

/// One Unix stream socket, whatever the host's name.
#[derive(Debug, Clone)]
pub struct Unix(pub PathBuf);

impl Dial for Unix {
    fn dial(&self, _host: String, _port: u16) -> Dialled<Box<dyn Stream>> {
        let path = self.0.clone();
        Box::pin(async move { Ok(Box::new(tokio::net::UnixStream::connect(path).await?) as Box<dyn Stream>) })
    }
}

/// Connects HTTP clients.
#[derive(Clone)]
pub struct Connector {
    dial: Arc<dyn Dial>,
    tls: Option<TlsConnector>,
}

impl Connector {
    /// Makes plain connections, or TLS connections if `tls` is set.
    #[must_use]
    pub fn new(dial: Arc<dyn Dial>, tls: Option<ClientConfig>) -> Self {
        Self { dial, tls: tls.map(|config| TlsConnector::from(Arc::new(config))) }
    }
}

impl Service<http::Uri> for Connector {
    type Response = Wire;
    type Error = io::Error;
    type Future = Dialled<Wire>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: http::Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            let host = uri.host().ok_or_else(|| io::Error::other("the endpoint has no host"))?;
            let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
            let port = uri.port_u16().unwrap_or(if connector.tls.is_some() { 443 } else { 80 });
            let stream = connector.dial.dial(host.clone(), port).await?;
            let stream: Box<dyn Stream> = match connector.tls {
                None => stream,
                Some(tls) => {
                    let name = ServerName::try_from(host).map_err(io::Error::other)?;
                    Box::new(tls.connect(name, stream).await?)
                }
            };
            Ok(Wire(TokioIo::new(stream)))
        })
    }
}

/// A connection in the form that the HTTP client needs.
pub struct Wire(TokioIo<Box<dyn Stream>>);

impl Connection for Wire {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl hyper::rt::Read for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl hyper::rt::Write for Wire {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// An error and its causes, for the log.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    printable(&text)
}

/// A peer's text for the log: short, and without control characters.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(MOST_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

    /// Resolves every name to these addresses.
    #[derive(Clone)]
    struct Names(Vec<SocketAddr>);

    impl Service<hyper_util::client::legacy::connect::dns::Name> for Names {
        type Response = std::vec::IntoIter<SocketAddr>;
        type Error = io::Error;
        type Future = std::future::Ready<io::Result<Self::Response>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: hyper_util::client::legacy::connect::dns::Name) -> Self::Future {
            std::future::ready(Ok(self.0.clone().into_iter()))
        }
    }

    /// A listener, and a socket of the same port for IPv6. Other tests may have one of the two.
    async fn one_port() -> (tokio::net::TcpListener, tokio::net::TcpSocket) {
        loop {
            let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
            let port = listener.local_addr().expect("a port").port();
            let socket = tokio::net::TcpSocket::new_v6().expect("IPv6");
            if socket.bind((Ipv6Addr::LOCALHOST, port).into()).is_ok() {
                return (listener, socket);
            }
        }
    }

    /// A listener whose queue is full, so that the system drops further attempts to connect; and the connections in its
    /// queue.
    async fn black_hole(socket: tokio::net::TcpSocket) -> (tokio::net::TcpListener, Vec<TcpStream>) {
        let listener = socket.listen(0).expect("it listens");
        let address = listener.local_addr().expect("a port");
        let mut queued = Vec::new();
        let patience = std::time::Duration::from_millis(300);
        while let Ok(stream) = tokio::time::timeout(patience, TcpStream::connect(address)).await {
            queued.push(stream.expect("queued"));
        }
        (listener, queued)
    }

    #[tokio::test]
    async fn a_receiver_behind_a_network_that_swallows_ipv6_is_found() {
        let (listener, socket) = one_port().await;
        let (hole, _queued) = black_hole(socket).await;
        let port = hole.local_addr().expect("a port").port();
        let names = Names(vec![(Ipv6Addr::LOCALHOST, port).into(), (Ipv4Addr::LOCALHOST, port).into()]);
        let (stream, taken) =
            tokio::join!(connect(HttpConnector::new_with_resolver(names), "both", port), listener.accept());
        assert_eq!(stream.expect("by IPv4").local_addr().expect("it is open"), taken.expect("taken").1);
    }

    #[tokio::test]
    async fn what_went_wrong_is_said() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("a port").port();
        drop(listener);
        let error = connect(HttpConnector::new(), "127.0.0.1", port).await.expect_err("nobody listens");
        assert!(with_causes(&error).contains("Connection refused"), "{}", with_causes(&error));
    }
}
