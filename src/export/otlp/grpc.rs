//! OTLP over gRPC: tonic's framing, statuses and compression around requests that are encoded already.

use super::reply::{self, Reply};
use super::settings::Endpoint;
use super::stats::Signal;
use super::transport::{HttpClient, MOST_RESPONSE_BYTES, USER_AGENT};
use bytes::{Buf as _, BufMut as _, Bytes};
use http::HeaderMap;
use http::uri::PathAndQuery;
use http_body_util::Limited;
use hyper::body::Incoming;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::client::Grpc;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tower_service::Service;

/// Sends one request.
pub(super) async fn send(client: &HttpClient, endpoint: &Endpoint, signal: Signal, payload: Bytes) -> Reply {
    let path = PathAndQuery::from_static(match signal {
        Signal::Metrics | Signal::Raw => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        Signal::Spans => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    });
    let mut grpc =
        Grpc::with_origin(Bounded(client.clone()), endpoint.uri.clone()).max_decoding_message_size(MOST_RESPONSE_BYTES);
    if endpoint.gzip {
        // Some servers, Go's among them, pack their answer as the request was, whether they are asked to or not. Unpacked,
        // too, it is at most the size set above.
        grpc = grpc.send_compressed(CompressionEncoding::Gzip).accept_compressed(CompressionEncoding::Gzip);
    }
    let mut request = tonic::Request::new(payload);
    let mut headers: HeaderMap = endpoint.headers.iter().cloned().collect();
    headers.insert(http::header::USER_AGENT, http::HeaderValue::from_static(USER_AGENT));
    *request.metadata_mut() = MetadataMap::from_headers(headers);
    match grpc.unary(request, path, Encoded).await {
        Ok(response) => reply::of_success(signal, &response.into_inner()),
        Err(status) => reply::of_grpc(&status),
    }
}

/// A client of whose answers no more than [`MOST_RESPONSE_BYTES`] are read: tonic bounds each message, and not how many
/// there are.
#[derive(Clone)]
struct Bounded(HttpClient);

impl Service<http::Request<tonic::body::Body>> for Bounded {
    type Response = http::Response<Limited<Incoming>>;
    type Error = <HttpClient as Service<http::Request<tonic::body::Body>>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::<http::Request<tonic::body::Body>>::poll_ready(&mut self.0, context)
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move { Ok(answer.await?.map(|body| Limited::new(body, MOST_RESPONSE_BYTES))) })
    }
}

/// Passes encoded messages on, both ways.
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
