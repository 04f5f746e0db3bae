//! Sends one request to one receiver: OTLP over HTTP/1.1 with protobuf, or over gRPC.
//!
//! Enters: an encoded request. Leaves: whether it was accepted, refused for good, or must be retried, and when.
//! Requests are encoded once, when they are produced, so both protocols send the same bytes; gRPC uses tonic with a
//! codec that passes them on. A receiver's answer is untrusted: at most [`MOST_RESPONSE_BYTES`] of it are read, packed
//! or unpacked, and no wait that it asks for is longer than [`LONGEST_WAIT`](reply::LONGEST_WAIT). A connection on
//! which an answer did not come in time is not used again. Absent on purpose: waiting itself, and redirects.

use super::endpoint::USER_AGENT;
use super::grpc;
use super::reply::{self, MOST_RESPONSE_BYTES, Reply};
use super::settings::{Endpoint, Protocol};
use super::stats::Signal;
use super::tls::tls_config;
use crate::gzip;
use arc_swap::ArcSwap;
use bytes::Bytes;
use highwater_engine::dial::{Connector, Dial, with_causes};
use highwater_engine::grpc::HttpClient;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::sync::Arc;

/// A client for one endpoint.
pub struct ReceiverClient {
    endpoint: Endpoint,
    connector: Connector,
    client: ArcSwap<HttpClient>,
}

impl ReceiverClient {
    /// A client that makes its connections with `dial`. It makes none yet.
    ///
    /// # Errors
    /// If TLS cannot be configured.
    pub fn new(endpoint: Endpoint, dial: Arc<dyn Dial>) -> Result<Self, String> {
        let is_http2 = endpoint.protocol == Protocol::Grpc;
        let is_tls = endpoint.uri.scheme() == Some(&http::uri::Scheme::HTTPS);
        let tls = is_tls.then(|| tls_config(&endpoint.tls, is_http2)).transpose()?;
        let connector = Connector::new(dial, tls);
        let client = ArcSwap::from_pointee(client(connector.clone(), is_http2));
        Ok(Self { endpoint, connector, client })
    }

    /// Where it sends to. URLs with a user name are refused, so this holds no password.
    pub fn uri(&self) -> &http::Uri {
        &self.endpoint.uri
    }

    /// Sends one request and waits for the answer, at most the endpoint's timeout.
    pub async fn send(&self, signal: Signal, payload: Bytes) -> Reply {
        let client = self.client.load_full();
        let sent = async {
            match self.endpoint.protocol {
                Protocol::HttpProtobuf => self.send_http(&client, signal, payload).await,
                Protocol::Grpc => grpc::send(&client, &self.endpoint, signal, payload).await,
            }
        };
        let timeout = self.endpoint.timeout;
        match tokio::time::timeout(timeout, sent).await {
            Ok(reply) => reply,
            Err(_) => {
                self.leave(&client);
                Reply::Retry { after: None, why: format!("no answer within {timeout:?}") }
            }
        }
    }

    /// Replaces the client, so that later requests use new connections. A network that drops all packets closes no
    /// connection, and gRPC would use the old one until the kernel gives it up, a quarter of an hour later.
    fn leave(&self, silent: &Arc<HttpClient>) {
        let fresh = Arc::new(client(self.connector.clone(), self.endpoint.protocol == Protocol::Grpc));
        // If the other lane has already left it, the other lane's new connection is kept.
        self.client.compare_and_swap(silent, fresh);
    }

    async fn send_http(&self, client: &HttpClient, signal: Signal, payload: Bytes) -> Reply {
        let request = match self.http_request(payload) {
            Ok(request) => request,
            Err(error) => return Reply::Refused(error.to_string()),
        };
        let response = match client.request(request).await {
            Ok(response) => response,
            Err(error) => return Reply::Retry { after: None, why: with_causes(&error) },
        };
        let (head, body) = response.into_parts();
        match Limited::new(body, MOST_RESPONSE_BYTES).collect().await {
            Ok(body) => reply::of_http(signal, &head, &body.to_bytes()),
            // The status is known, and it decides. The contents of the body are lost.
            Err(error) => {
                tracing::debug!(%error, "the receiver's answer could not be read");
                reply::of_http(signal, &head, &[])
            }
        }
    }

    fn http_request(&self, payload: Bytes) -> Result<http::Request<tonic::body::Body>, http::Error> {
        let mut request = http::Request::post(&self.endpoint.uri).header("content-type", "application/x-protobuf");
        request = request.header("user-agent", USER_AGENT);
        for (name, value) in self.endpoint.headers.iter() {
            request = request.header(name, value);
        }
        let payload = match self.endpoint.gzip.then(|| Bytes::from(gzip::compress(&payload))) {
            Some(packed) => {
                request = request.header("content-encoding", "gzip");
                packed
            }
            None => payload,
        };
        request.body(tonic::body::Body::new(Full::new(payload)))
    }
}

fn client(connector: Connector, is_http2: bool) -> HttpClient {
    let mut builder = Client::builder(TokioExecutor::new());
    builder.http2_only(is_http2).pool_timer(TokioTimer::new()).pool_max_idle_per_host(1);
    builder.build(connector)
}
