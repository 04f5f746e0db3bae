//! A receiver that stores what it gets: OTLP over HTTP and gRPC, on TCP or on its own network in memory, on which time
//! and outages are simulated.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Request, Response, StatusCode};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use futures_util::stream;
use highwater_engine::dial::{Dial, Stream};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Read as _, Write as _};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

/// How the receiver, or the network before it, handles requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Accepts each.
    Takes,
    /// Nothing listens.
    Refuses,
    /// Accepts connections, and never answers.
    BlackHole,
    /// Answers 503, or gRPC's UNAVAILABLE, and asks for this wait.
    Unavailable(Duration),
    /// Accepts each, after this time.
    Slow(Duration),
    /// Closes each connection in the middle of the first request.
    DiesMidStream,
    /// Accepts each, except this many points.
    Rejects(i64),
    /// Refuses each permanently.
    Denies,
    /// Accepts each, with a body that does not end; over gRPC, with a message that claims to be a gigabyte.
    Endless,
    /// Accepts each, with a body that does not end; over gRPC, of empty messages.
    Flood,
    /// Accepts each, with 64 MiB compressed into an answer of 64 kB.
    Bomb,
    /// Accepts each, with megabytes of headers.
    Headers,
}

/// What was received.
#[derive(Default)]
pub struct Received {
    pub metrics: Vec<ExportMetricsServiceRequest>,
    pub traces: Vec<ExportTraceServiceRequest>,
    pub headers: Vec<HeaderMap>,
    pub paths: Vec<String>,
    pub refused: usize,
}

impl Received {
    /// Every metric of this name.
    pub fn metrics_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Metric> {
        let scopes = self.metrics.iter().flat_map(|request| &request.resource_metrics).flat_map(|r| &r.scope_metrics);
        scopes.flat_map(|scope| &scope.metrics).filter(move |metric| metric.name == name)
    }

    pub fn spans(&self) -> Vec<&Span> {
        let scopes = self.traces.iter().flat_map(|request| &request.resource_spans).flat_map(|r| &r.scope_spans);
        scopes.flat_map(|scope| &scope.spans).collect()
    }
}

/// A receiver.
#[derive(Clone)]
pub struct Collector {
    mode: Arc<Mutex<Mode>>,
    received: Arc<Mutex<Received>>,
    connections: UnboundedSender<DuplexStream>,
}

impl Collector {
    /// A receiver on the network in memory. Must be called on a runtime.
    pub fn in_memory() -> Self {
        Self::with(None)
    }

    /// A receiver on the network in memory, inside TLS. Must be called on a runtime.
    pub fn in_memory_with_tls(config: ServerConfig) -> Self {
        Self::with(Some(TlsAcceptor::from(Arc::new(config))))
    }

    fn with(tls: Option<TlsAcceptor>) -> Self {
        let (connections, incoming) = unbounded_channel();
        let collector = Self { mode: Arc::new(Mutex::new(Mode::Takes)), received: Arc::default(), connections };
        tokio::spawn(axum::serve(Incoming { connections: incoming, tls }, collector.router()).into_future());
        collector
    }

    /// A receiver on a port of this host, with the port. Must be called on a runtime.
    pub async fn on_tcp() -> (Self, u16) {
        let (connections, _) = unbounded_channel();
        let collector = Self { mode: Arc::new(Mutex::new(Mode::Takes)), received: Arc::default(), connections };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(axum::serve(listener, collector.router()).into_future());
        (collector, port)
    }

    pub fn set(&self, mode: Mode) {
        *self.mode.lock().expect("no panic") = mode;
    }

    pub fn mode(&self) -> Mode {
        *self.mode.lock().expect("no panic")
    }

    pub fn received<T>(&self, look: impl FnOnce(&Received) -> T) -> T {
        look(&self.received.lock().expect("no panic"))
    }

    fn router(&self) -> Router {
        Router::new().fallback(take).with_state(self.clone())
    }
}

impl Dial for Collector {
    fn dial(&self, _: String, _: u16) -> Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>> {
        let collector = self.clone();
        Box::pin(async move {
            let (ours, mut theirs) = duplex(64 << 10);
            match collector.mode() {
                Mode::Refuses => return Err(io::ErrorKind::ConnectionRefused.into()),
                Mode::BlackHole => {
                    tokio::spawn(async move {
                        let _open = theirs;
                        std::future::pending::<()>().await;
                    });
                }
                Mode::DiesMidStream => {
                    tokio::spawn(async move {
                        let mut some = [0; 700];
                        let _ = theirs.read_exact(&mut some).await;
                    });
                }
                _ => {
                    let _ = collector.connections.send(theirs);
                }
            }
            Ok(Box::new(ours) as Box<dyn Stream>)
        })
    }
}

struct Incoming {
    connections: UnboundedReceiver<DuplexStream>,
    tls: Option<TlsAcceptor>,
}

impl axum::serve::Listener for Incoming {
    type Io = Box<dyn Stream>;
    type Addr = ();

    async fn accept(&mut self) -> (Box<dyn Stream>, ()) {
        loop {
            let Some(stream) = self.connections.recv().await else { return std::future::pending().await };
            match &self.tls {
                None => return (Box::new(stream), ()),
                // A client that fails the handshake is dropped.
                Some(tls) => match tls.accept(stream).await {
                    Ok(stream) => return (Box::new(stream), ()),
                    Err(_) => continue,
                },
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

async fn take(State(collector): State<Collector>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let is_grpc = head.headers.get("content-type").is_some_and(|value| value == "application/grpc");
    let mode = collector.mode();
    match mode {
        // Connections that are still open when the outage begins get no answer either.
        Mode::Refuses | Mode::BlackHole | Mode::DiesMidStream => return std::future::pending().await,
        Mode::Unavailable(wait) => {
            collector.received.lock().expect("no panic").refused += 1;
            return if is_grpc { grpc_status(14, &retry_info(wait)) } else { unavailable(wait) };
        }
        Mode::Denies if is_grpc => return grpc_status(3, &[]),
        Mode::Denies => return with_status(StatusCode::BAD_REQUEST, Body::from("no")),
        _ => {}
    }
    let Ok(body) = body.collect().await else { return with_status(StatusCode::BAD_REQUEST, Body::empty()) };
    if let Mode::Slow(time) = mode {
        tokio::time::sleep(time).await;
    }
    let packed = head.headers.get("content-encoding").is_some_and(|value| value == "gzip");
    collector.keep(head.uri.path(), &head.headers, &message(&body.to_bytes(), is_grpc, packed));
    let answer = match mode {
        Mode::Rejects(points) => {
            let error_message = "too old".to_owned();
            let partial = ExportMetricsPartialSuccess { rejected_data_points: points, error_message };
            ExportMetricsServiceResponse { partial_success: Some(partial) }.encode_to_vec()
        }
        _ => Vec::new(),
    };
    match mode {
        Mode::Endless => as_grpc(is_grpc, with_status(StatusCode::OK, endless(is_grpc))),
        Mode::Flood => as_grpc(is_grpc, with_status(StatusCode::OK, endless(false))),
        Mode::Bomb => bomb(is_grpc),
        Mode::Headers => as_grpc(is_grpc, with_headers()),
        _ if is_grpc => grpc_ok(&answer),
        _ => with_status(StatusCode::OK, Body::from(answer)),
    }
}

impl Collector {
    fn keep(&self, path: &str, headers: &HeaderMap, message: &[u8]) {
        let mut received = self.received.lock().expect("no panic");
        received.headers.push(headers.clone());
        received.paths.push(path.to_owned());
        if path.contains("trace") || path.contains("Trace") {
            received.traces.push(ExportTraceServiceRequest::decode(message).expect("spans"));
        } else {
            received.metrics.push(ExportMetricsServiceRequest::decode(message).expect("metrics"));
        }
    }
}

fn message(body: &[u8], is_grpc: bool, packed: bool) -> Vec<u8> {
    let (packed, payload) = if is_grpc { (body[0] == 1, &body[5..]) } else { (packed, body) };
    let mut message = payload.to_vec();
    if packed {
        message.clear();
        GzDecoder::new(payload).read_to_end(&mut message).expect("gzip");
    }
    message
}

fn with_status(status: StatusCode, body: Body) -> Response<Body> {
    Response::builder().status(status).body(body).expect("a response")
}

fn unavailable(wait: Duration) -> Response<Body> {
    let answer = Response::builder().status(StatusCode::SERVICE_UNAVAILABLE);
    answer.header("retry-after", wait.as_secs()).body(Body::empty()).expect("a response")
}

fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("short");
    [&[0], &length.to_be_bytes()[..], message].concat().into()
}

fn grpc_ok(message: &[u8]) -> Response<Body> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().expect("a value"));
    let frames = [Ok::<_, Infallible>(Frame::data(framed(message))), Ok(Frame::trailers(trailers))];
    let body = Body::new(StreamBody::new(stream::iter(frames)));
    Response::builder().header("content-type", "application/grpc").body(body).expect("a response")
}

fn grpc_status(code: u32, details: &[u8]) -> Response<Body> {
    let answer = Response::builder().header("content-type", "application/grpc").header("grpc-status", code);
    answer.header("grpc-status-details-bin", base64(details)).body(Body::empty()).expect("a response")
}

/// `google.rpc.Status` with a `RetryInfo`, encoded by hand: the receiver must not share the sender's code.
fn retry_info(wait: Duration) -> Vec<u8> {
    let seconds = u8::try_from(wait.as_secs()).expect("below 128");
    let info = [0x0a, 2, 0x08, seconds];
    let url = b"type.googleapis.com/google.rpc.RetryInfo";
    let length = |bytes: usize| u8::try_from(bytes).expect("below 128");
    let any = [&[0x0a, length(url.len())], &url[..], &[0x12, length(info.len())], &info].concat();
    [&[0x08, 14, 0x1a, length(any.len())], &any[..]].concat()
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..=chunk.len() {
            text.push(char::from(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize]));
        }
    }
    text
}

fn as_grpc(is_grpc: bool, mut answer: Response<Body>) -> Response<Body> {
    if is_grpc {
        answer.headers_mut().insert("content-type", "application/grpc".parse().expect("a value"));
    }
    answer
}

/// 64 MiB of zeros, compressed; over gRPC, as a message.
fn bomb(is_grpc: bool) -> Response<Body> {
    // Made once, since a client waits only so long for an answer.
    static PACKED: OnceLock<Vec<u8>> = OnceLock::new();
    let packed = PACKED.get_or_init(|| {
        let mut packed = GzEncoder::new(Vec::new(), Compression::best());
        packed.write_all(&vec![0; 64 << 20]).expect("into memory");
        packed.finish().expect("into memory")
    });
    if !is_grpc {
        let answer = Response::builder().header("content-encoding", "gzip");
        return answer.body(Body::from(packed.clone())).expect("a response");
    }
    let length = u32::try_from(packed.len()).expect("short");
    let message = [&[1], &length.to_be_bytes()[..], packed].concat();
    let answer = Response::builder().header("content-type", "application/grpc").header("grpc-encoding", "gzip");
    answer.body(Body::from(message)).expect("a response")
}

/// A success with 4 MiB of headers.
fn with_headers() -> Response<Body> {
    let mut answer = with_status(StatusCode::OK, Body::empty());
    for number in 0..64 {
        let name: http::HeaderName = format!("x-much-{number}").parse().expect("a name");
        answer.headers_mut().insert(name, "y".repeat(64 << 10).parse().expect("a value"));
    }
    answer
}

/// The body of a success that never ends; over gRPC, a message that claims to be a gigabyte.
fn endless(is_grpc: bool) -> Body {
    let head = if is_grpc { vec![0, 0x40, 0, 0, 0] } else { Vec::new() };
    let chunk = Bytes::from(vec![0; 64 << 10]);
    let forever = stream::unfold(Some(Bytes::from(head)), move |head| {
        let data = head.filter(|head| !head.is_empty()).unwrap_or_else(|| chunk.clone());
        async move { Some((Ok::<_, Infallible>(Frame::data(data)), None)) }
    });
    Body::new(StreamBody::new(forever))
}
