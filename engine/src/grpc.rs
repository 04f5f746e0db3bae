//! One unary gRPC call: tonic's framing, statuses and compression around messages that are already encoded.
//!
//! Enters: a client, an address, an encoded request. Leaves: the encoded answer, or gRPC's status. The server's answer
//! is untrusted: no more of it is read than the caller allows, compressed or uncompressed.

use crate::dial::{Connector, printable, with_causes};
use bytes::{Buf as _, BufMut as _, Bytes};
use http::HeaderMap;
use http::uri::PathAndQuery;
use http_body_util::Limited;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tower_service::Service;

/// A pool of connections.
pub type HttpClient = Client<Connector, tonic::body::Body>;

/// One call.
pub struct Call {
    /// Scheme and authority of the server.
    pub origin: http::Uri,
    /// `/PACKAGE.SERVICE/METHOD`.
    pub path: &'static str,
    /// Further headers.
    pub headers: HeaderMap,
    /// Whether the request is compressed with gzip, and the answer may be.
    pub gzip: bool,
    /// The most bytes of an answer that are read.
    pub most_response_bytes: usize,
}

impl Call {
    /// Sends the request and waits for the answer.
    ///
    /// # Errors
    /// The server's status, or a local error.
    pub async fn send(self, client: HttpClient, request: Bytes) -> Result<Bytes, Status> {
        let most_bytes = self.most_response_bytes;
        let mut grpc = tonic::client::Grpc::with_origin(Bounded { client, most_bytes }, self.origin)
            .max_decoding_message_size(most_bytes);
        if self.gzip {
            // Some servers, including Go's, compress their answer as the request was, whether they are asked to or not.
            // The limit above also applies to the uncompressed answer.
            grpc = grpc.send_compressed(CompressionEncoding::Gzip).accept_compressed(CompressionEncoding::Gzip);
        }
        let mut request = tonic::Request::new(request);
        *request.metadata_mut() = MetadataMap::from_headers(self.headers);
        Ok(grpc.unary(request, PathAndQuery::from_static(self.path), Encoded).await?.into_inner())
    }
}

/// An error message for the log, from the transport or from the server.
#[must_use]
pub fn describe(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(_) => with_causes(status),
        None => format!("gRPC {:?}: {}", status.code(), printable(status.message())),
    }
}

/// A client that reads at most this many bytes of each answer: tonic limits each message, but not how many there are.
#[derive(Clone)]
struct Bounded {
    client: HttpClient,
    most_bytes: usize,
}

impl Service<http::Request<tonic::body::Body>> for Bounded {
    type Response = http::Response<Limited<Incoming>>;
    type Error = <HttpClient as Service<http::Request<tonic::body::Body>>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::<http::Request<tonic::body::Body>>::poll_ready(&mut self.client, context)
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let (answer, most_bytes) = (self.client.call(request), self.most_bytes);
        Box::pin(async move { Ok(answer.await?.map(|body| Limited::new(body, most_bytes))) })
    }
}

/// Passes encoded messages through, both ways.
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
