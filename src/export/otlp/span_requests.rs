//! Requests of spans, made by the exporter of `opentelemetry-otlp`.
//!
//! Enters: the SDK's spans. Leaves: the bytes of a request. The exporter gets an HTTP client that sends nothing and keeps
//! the request. The request then goes into the one bounded queue, which serves both protocols. So outages, restarts and
//! counts are handled as for every other signal. Absent on purpose: the exporter's address, headers, compression, timeout
//! and retries, which belong to sending; `endpoint` reads their variables for all signals, and reports which one is wrong.

use super::resource::sdk_resource;
use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

/// The address that the exporter is configured with; nothing is sent there.
const NOWHERE: &str = "http://queue.invalid/v1/traces";

/// Turns spans into requests.
#[derive(Debug)]
pub(super) struct SpanRequests {
    exporter: SpanExporter,
    client: Client,
}

impl SpanRequests {
    /// Makes requests with this resource, each of at most `most_bytes`.
    ///
    /// # Panics
    /// If the exporter refuses its settings, none of which comes from outside.
    pub fn new(resource: &[(String, String)], most_bytes: usize) -> Self {
        let client = Client::default();
        let builder = SpanExporter::builder().with_http().with_http_client(client.clone()).with_endpoint(NOWHERE);
        let builder = builder.with_protocol(Protocol::HttpBinary).with_max_request_body_size(most_bytes);
        let mut exporter = builder.build().expect("an address, a protocol and a client are all that it needs");
        exporter.set_resource(&sdk_resource(resource));
        Self { exporter, client }
    }

    /// The request with these spans, as protobuf.
    ///
    /// # Errors
    /// If it would be larger than allowed.
    pub fn request(&self, spans: Vec<SpanData>) -> Result<Bytes, OTelSdkError> {
        let unsent = || OTelSdkError::InternalFailure("the exporter sent no request".into());
        // The client answers at once, so this never waits.
        let exported: OTelSdkResult = self.exporter.export(spans).now_or_never().unwrap_or_else(|| Err(unsent()));
        exported.and_then(|()| self.client.take().ok_or_else(unsent))
    }
}

/// A client that keeps the last request.
#[derive(Debug, Clone, Default)]
struct Client(Arc<Mutex<Option<Bytes>>>);

impl Client {
    fn take(&self) -> Option<Bytes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl HttpClient for Client {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(request.into_body());
        Box::pin(std::future::ready(Ok(Response::new(Bytes::new()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::otlp::resource::instrumentation;
    use crate::export::otlp::trace;
    use opentelemetry::trace::{SpanId, SpanKind, Status, TraceId};
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
    use opentelemetry_sdk::trace::{SpanEvents, SpanLinks};
    use prost::Message as _;
    use std::time::UNIX_EPOCH;

    fn span(id: u64) -> SpanData {
        SpanData {
            span_context: trace::own(TraceId::from(7), SpanId::from(id)),
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "highwater.step".into(),
            start_time: UNIX_EPOCH,
            end_time: UNIX_EPOCH,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: instrumentation(),
        }
    }

    #[test]
    fn each_request_has_its_own_spans_and_the_resource() {
        let requests = SpanRequests::new(&[("service.name".into(), "highwater".into())], 1 << 20);
        for ids in [vec![1], vec![2, 3]] {
            let request = requests.request(ids.iter().map(|id| span(*id)).collect()).expect("it is small");
            let request = ExportTraceServiceRequest::decode(request).expect("protobuf");
            let [of_resource] = request.resource_spans.as_slice() else { panic!("{request:?}") };
            let resource = of_resource.resource.as_ref().expect("a resource");
            assert_eq!(resource.attributes[0].key, "service.name");
            let [of_scope] = of_resource.scope_spans.as_slice() else { panic!("{request:?}") };
            assert_eq!(of_scope.scope.as_ref().map(|scope| scope.name.as_str()), Some("highwater"));
            let found: Vec<_> = of_scope.spans.iter().map(|span| span.span_id.clone()).collect();
            assert_eq!(found, ids.iter().map(|id: &u64| id.to_be_bytes().to_vec()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_request_that_no_queue_could_hold_is_an_error_and_leaves_nothing_behind() {
        let requests = SpanRequests::new(&[], 200);
        assert!(requests.request((0..100).map(span).collect()).is_err());
        assert!(requests.client.take().is_none());
        requests.request(vec![span(1)]).expect("it is small");
    }
}
