//! OTLP over gRPC.

use super::endpoint::USER_AGENT;
use super::reply::{self, MOST_RESPONSE_BYTES, Reply};
use super::settings::Endpoint;
use super::stats::Signal;
use bytes::Bytes;
use highwater_engine::grpc::{Call, HttpClient};
use http::HeaderMap;

/// Sends one request.
pub(super) async fn send(client: &HttpClient, endpoint: &Endpoint, signal: Signal, payload: Bytes) -> Reply {
    let mut headers: HeaderMap = endpoint.headers.iter().cloned().collect();
    headers.insert(http::header::USER_AGENT, http::HeaderValue::from_static(USER_AGENT));
    let call = Call {
        origin: endpoint.uri.clone(),
        path: match signal {
            Signal::Metrics | Signal::Raw => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
            Signal::Spans => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
        },
        headers,
        gzip: endpoint.gzip,
        most_response_bytes: MOST_RESPONSE_BYTES,
    };
    match call.send(client.clone(), payload).await {
        Ok(answer) => reply::of_success(signal, &answer),
        Err(status) => reply::of_grpc(&status),
    }
}
