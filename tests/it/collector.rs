//! A real OpenTelemetry Collector. It accepts OTLP over gRPC and HTTP and writes it to a file, which is read here.
//!
//! It buffers nothing: it answers a request only once the lines are in the file. So what it answered survives a kill,
//! and the sender must send the rest again.

use crate::authority::Files;
use crate::process::Process;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// How long the collector may take until it listens.
const LISTENS_WITHIN: Duration = Duration::from_secs(30);

/// Attributes by name. Values are text, since no test needs their types.
pub type Attributes = BTreeMap<String, String>;

/// The protocol between a daemon and a collector.
#[derive(Debug, Clone, Copy)]
pub enum Protocol {
    Grpc,
    Http,
}

/// A collector, ended when dropped. It keeps its ports and its output when it is killed and started again.
pub struct Collector {
    program: PathBuf,
    grpc: Port,
    http: Port,
    secured: Option<Files>,
    process: Option<Process>,
    /// How often it was started. Each start writes to a new file.
    starts: usize,
    directory: TempDir,
}

/// One point of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The metric's name.
    pub metric: String,
    /// Its unit.
    pub unit: String,
    /// `gauge`, `sum`, `histogram`, `exponentialHistogram` or `summary`.
    pub kind: String,
    /// The attributes of its resource.
    pub resource: Attributes,
    /// Its own attributes.
    pub attributes: Attributes,
    /// Nanoseconds of Unix time.
    pub time_ns: i64,
    /// Its value, if it is a number.
    pub value: Option<f64>,
    /// The whole point, as OTLP writes it in JSON.
    pub json: Value,
}

/// One span.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Hexadecimal.
    pub trace: String,
    /// Hexadecimal.
    pub id: String,
    /// Its parent's id, empty for a root.
    pub parent: String,
    pub name: String,
    /// Nanoseconds of Unix time.
    pub begin_ns: i64,
    /// Nanoseconds of Unix time.
    pub end_ns: i64,
    /// The attributes of its resource.
    pub resource: Attributes,
    /// Its own attributes.
    pub attributes: Attributes,
}

impl Collector {
    /// Starts the collector at `program`; returns once it listens.
    pub fn start(program: &Path) -> Self {
        Self::start_as(program, None)
    }

    /// Like [`start`](Self::start), with TLS: it presents the certificate in these files, and requires one from the
    /// same authority.
    pub fn start_secured(program: &Path, files: Files) -> Self {
        Self::start_as(program, Some(files))
    }

    fn start_as(program: &Path, secured: Option<Files>) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let (grpc, http, program) = (Port::reserve(), Port::reserve(), program.to_owned());
        let mut collector = Self { program, grpc, http, secured, process: None, starts: 0, directory };
        collector.restart();
        collector
    }

    /// Sends SIGKILL. Its ports refuse connections from then on.
    pub fn kill(&mut self) {
        self.process.take().expect("it runs").kill();
    }

    /// Starts it again after a kill, on the same ports.
    pub fn restart(&mut self) {
        assert!(self.process.is_none(), "it runs");
        self.starts += 1;
        let config = self.directory.path().join("otelcol.yaml");
        std::fs::write(&config, self.configuration()).expect("a writable directory");
        let mut command = Command::new(&self.program);
        command.arg("--config").arg(config);
        let process = Process::start(command);
        process.wait_for(LISTENS_WITHIN, "line `Everything is ready`", |line| {
            line.contains("Everything is ready").then_some(())
        });
        self.process = Some(process);
    }

    /// The variables that make a daemon push to it.
    pub fn environment(&self, protocol: Protocol) -> [(&'static str, String); 2] {
        self.environment_through(protocol, self.port(protocol))
    }

    /// The variables that make a daemon push to another port of this host, with this collector's protocol and scheme.
    pub fn environment_through(&self, protocol: Protocol, port: u16) -> [(&'static str, String); 2] {
        let scheme = if self.secured.is_some() { "https" } else { "http" };
        let name = match protocol {
            Protocol::Grpc => "grpc",
            Protocol::Http => "http/protobuf",
        };
        [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", name.to_owned()),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("{scheme}://127.0.0.1:{port}")),
        ]
    }

    /// The port that it listens on.
    pub fn port(&self, protocol: Protocol) -> u16 {
        match protocol {
            Protocol::Grpc => self.grpc.number,
            Protocol::Http => self.http.number,
        }
    }

    /// Everything that it has accepted so far, to be parsed later.
    pub fn taken(&self) -> Taken {
        // The file is created with the first request.
        Taken((1..=self.starts).map(|start| std::fs::read_to_string(self.file(start)).unwrap_or_default()).collect())
    }

    /// Every point that it has accepted, in order of arrival.
    pub fn points(&self) -> Vec<Point> {
        self.taken().points()
    }

    /// The points of one metric.
    pub fn points_named(&self, metric: &str) -> Vec<Point> {
        self.points().into_iter().filter(|point| point.metric == metric).collect()
    }

    /// Every span that it has accepted, in order of arrival.
    pub fn spans(&self) -> Vec<Span> {
        self.taken().spans()
    }

    fn file(&self, start: usize) -> PathBuf {
        self.directory.path().join(format!("taken-{start}.jsonl"))
    }

    /// No batches and no queue. The file rotates, at a size far above any test's, because only a file that rotates is
    /// written without a buffer.
    fn configuration(&self) -> String {
        let (grpc, http, file) = (self.grpc.number, self.http.number, self.file(self.starts));
        let tls = self.secured.as_ref().map_or_else(String::new, |files| {
            format!(
                ", tls: {{cert_file: '{}', key_file: '{}', client_ca_file: '{}'}}",
                files.certificate.display(),
                files.key.display(),
                files.authority.display()
            )
        });
        format!(
            "receivers:\n  otlp:\n    protocols:\n      grpc: {{endpoint: '127.0.0.1:{grpc}'{tls}}}\n      \
             http: {{endpoint: '127.0.0.1:{http}'{tls}}}\n\
             exporters:\n  file: {{path: '{}', rotation: {{max_megabytes: 4096}}}}\n\
             service:\n  telemetry: {{metrics: {{level: none}}}}\n  pipelines:\n    \
             metrics: {{receivers: [otlp], exporters: [file]}}\n    \
             traces: {{receivers: [otlp], exporters: [file]}}\n",
            file.display()
        )
    }
}

/// What a collector had accepted at one moment: the raw output of each start.
pub struct Taken(Vec<String>);

impl Taken {
    /// Every point, in order of arrival.
    pub fn points(&self) -> Vec<Point> {
        let requests = self.requests();
        let metrics = nested(&requests, ["resourceMetrics", "scopeMetrics", "metrics"]);
        metrics.into_iter().flat_map(|(resource, metric)| points_of(&resource, metric)).collect()
    }

    /// Every span, in order of arrival.
    pub fn spans(&self) -> Vec<Span> {
        let requests = self.requests();
        let spans = nested(&requests, ["resourceSpans", "scopeSpans", "spans"]);
        spans.into_iter().map(|(resource, span)| span_of(resource, span)).collect()
    }

    /// The requests, one a line. A line without an end is incomplete, so its request was not answered.
    fn requests(&self) -> Vec<Value> {
        let whole = self.0.iter().map(|text| text.rsplit_once('\n').map_or("", |(whole, _)| whole));
        whole.flat_map(str::lines).map(|line| serde_json::from_str::<Value>(line).expect("JSON")).collect()
    }
}

/// A reserved port of 127.0.0.1, on which nothing listens. The system does not assign it to programs that ask for any
/// free port. A program that asks for this port and reuses addresses, as Go's listeners do, gets it.
pub struct Port {
    /// Its number.
    pub number: u16,
    _socket: OwnedFd,
}

impl Port {
    /// Reserves one.
    pub fn reserve() -> Self {
        let socket =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        sockopt::set_socket_reuseaddr(&socket, true).expect("an option that every socket has");
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = getsockname(&socket).expect("it is bound");
        let address = SocketAddrV4::try_from(address).expect("it is an address of IPv4");
        Self { number: address.port(), _socket: socket }
    }
}

/// The entries three lists deep in OTLP's requests, each with its resource's attributes.
fn nested<'a>(requests: &'a [Value], lists: [&str; 3]) -> Vec<(Attributes, &'a Value)> {
    let mut found = Vec::new();
    for of_resource in requests.iter().flat_map(|request| list(&request[lists[0]])) {
        let resource = attributes(&of_resource["resource"]["attributes"]);
        let scopes = list(&of_resource[lists[1]]).iter();
        found.extend(scopes.flat_map(|scope| list(&scope[lists[2]])).map(|leaf| (resource.clone(), leaf)));
    }
    found
}

fn points_of(resource: &Attributes, metric: &Value) -> Vec<Point> {
    let kinds = ["gauge", "sum", "histogram", "exponentialHistogram", "summary"];
    let kind = kinds.into_iter().find(|kind| metric.get(kind).is_some());
    let kind = kind.unwrap_or_else(|| panic!("a metric without data: {metric}"));
    let point = |json: &Value| Point {
        metric: text(&metric["name"]),
        unit: text(&metric["unit"]),
        kind: kind.to_owned(),
        resource: resource.clone(),
        attributes: attributes(&json["attributes"]),
        time_ns: integer(&json["timeUnixNano"]),
        value: json["asDouble"].as_f64().or_else(|| json["asInt"].as_str()?.parse().ok()),
        json: json.clone(),
    };
    list(&metric[kind]["dataPoints"]).iter().map(point).collect()
}

fn span_of(resource: Attributes, span: &Value) -> Span {
    Span {
        trace: text(&span["traceId"]),
        id: text(&span["spanId"]),
        parent: text(&span["parentSpanId"]),
        name: text(&span["name"]),
        begin_ns: integer(&span["startTimeUnixNano"]),
        end_ns: integer(&span["endTimeUnixNano"]),
        resource,
        attributes: attributes(&span["attributes"]),
    }
}

fn attributes(list_of: &Value) -> Attributes {
    let value = |value: &Value| match value.as_object().and_then(|one| one.iter().next()) {
        Some((_, Value::String(text))) => text.clone(),
        Some((_, other)) => other.to_string(),
        None => String::new(),
    };
    list(list_of).iter().map(|pair| (text(&pair["key"]), value(&pair["value"]))).collect()
}

/// OTLP's JSON encodes 64-bit integers as text.
fn integer(value: &Value) -> i64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("not an integer: {value}"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn what_it_took_before_a_kill_is_still_there_after_it() {
    let Some(program) = crate::tools::find("otelcol") else { return };
    let mut collector = Collector::start(&program);
    send(&collector, 1);
    collector.kill();
    collector.restart();
    send(&collector, 2);
    let points = collector.points_named("level");
    let decoded: Vec<_> = points.iter().map(|point| (point.time_ns, point.value, point.kind.as_str())).collect();
    assert_eq!(decoded, [(1, Some(1.0), "gauge"), (2, Some(2.0), "gauge")]);
    assert!(points.iter().all(|point| point.attributes["n"] == "7" && point.resource["host.name"] == "here"));
}

/// Sends one point at `time_ns`, whose value is its time, over HTTP.
fn send(collector: &Collector, time_ns: u64) {
    let point = serde_json::json!({"timeUnixNano": time_ns.to_string(), "asInt": time_ns.to_string(),
        "attributes": [{"key": "n", "value": {"intValue": "7"}}]});
    let resource = serde_json::json!({"attributes": [{"key": "host.name", "value": {"stringValue": "here"}}]});
    let request = serde_json::json!({"resourceMetrics": [{"resource": resource,
        "scopeMetrics": [{"metrics": [{"name": "level", "unit": "By", "gauge": {"dataPoints": [point]}}]}]}]});
    let path = format!("http://127.0.0.1:{}/v1/metrics", collector.http.number);
    let (status, body) = crate::daemon::answer(crate::daemon::agent().post(&path).send_json(request), &path);
    assert_eq!(status, 200, "{body}");
}
