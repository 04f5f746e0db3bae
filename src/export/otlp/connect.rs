//! How a connection to a receiver is made: a dialled stream, inside TLS where the endpoint asks for it.
//!
//! Enters: an address and TLS material. Leaves: streams for HTTP. There is one TLS stack (rustls with ring) and one
//! place that configures it. Absent on purpose: proxies.

use super::settings::Tls;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

/// A stream of bytes both ways.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

type Dialled<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// Makes streams to a host and port: TCP, or what a test puts in its place.
pub trait Dial: Send + Sync {
    /// A new stream.
    fn dial(&self, host: String, port: u16) -> Dialled<Box<dyn Stream>>;
}

/// The operating system's TCP.
#[derive(Debug, Clone, Copy)]
pub struct Tcp;

impl Dial for Tcp {
    fn dial(&self, host: String, port: u16) -> Dialled<Box<dyn Stream>> {
        Box::pin(async move {
            let stream = tokio::net::TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        })
    }
}

/// Connects HTTP clients.
#[derive(Clone)]
pub struct Connector {
    dial: Arc<dyn Dial>,
    tls: Option<TlsConnector>,
}

impl Connector {
    /// Plain connections, or those inside TLS.
    pub(super) fn new(dial: Arc<dyn Dial>, tls: Option<ClientConfig>) -> Self {
        Self { dial, tls: tls.map(|config| TlsConnector::from(Arc::new(config))) }
    }
}

impl tower_service::Service<http::Uri> for Connector {
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

/// A connection as the HTTP client wants it.
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

/// The configuration of TLS: the given certificate authorities, or else the system's.
///
/// # Errors
/// What is wrong, with the file where one is at fault.
pub(super) fn tls_config(tls: &Tls, is_http2: bool) -> Result<ClientConfig, String> {
    let provider = Arc::new(crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let trusting = versions.map_err(|error| error.to_string())?.with_root_certificates(roots(tls)?);
    let mut config = match (&tls.client_certificate, &tls.client_key) {
        (Some(certificate), Some(key)) => {
            let private = PrivateKeyDer::from_pem_file(key).map_err(|error| format!("{}: {error}", key.display()))?;
            let chain = certificates(certificate)?;
            trusting.with_client_auth_cert(chain, private).map_err(|error| error.to_string())?
        }
        (None, None) => trusting.with_no_client_auth(),
        _ => return Err("a client certificate needs its key, and the key its certificate".into()),
    };
    config.alpn_protocols = vec![if is_http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(config)
}

fn roots(tls: &Tls) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = &tls.certificate {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    } else {
        let found = rustls_native_certs::load_native_certs();
        // A store of this size has some that no verifier takes; what matters is that there are others.
        roots.add_parsable_certificates(found.certs);
    }
    if roots.is_empty() {
        return Err("there are no certificate authorities to trust; set OTEL_EXPORTER_OTLP_CERTIFICATE".into());
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let problem = |error| format!("{}: {error}", path.display());
    CertificateDer::pem_file_iter(path).map_err(problem)?.collect::<Result<_, _>>().map_err(problem)
}
