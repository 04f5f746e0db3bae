//! One receiver: address, protocol, headers, compression, timeout and TLS, from the standard variables.

use super::environment::Environment;
use http::uri::Scheme;
use http::{HeaderName, HeaderValue, Uri};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How requests identify this program to receivers.
pub(super) const USER_AGENT: &str = concat!("highwater/", env!("CARGO_PKG_VERSION"));

/// How requests travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Protobuf in HTTP/1.1.
    HttpProtobuf,
    /// gRPC.
    Grpc,
}

/// Headers of every request. They hold credentials, so their values are never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(Vec<(HeaderName, HeaderValue)>);

impl Headers {
    /// Name and value of each.
    pub fn iter(&self) -> std::slice::Iter<'_, (HeaderName, HeaderValue)> {
        self.0.iter()
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

/// Files that TLS needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// Certificate authorities to trust; the system's if not set.
    pub certificate: Option<PathBuf>,
    /// Our own certificate.
    pub client_certificate: Option<PathBuf>,
    /// Its key.
    pub client_key: Option<PathBuf>,
}

/// One receiver of one signal.
#[derive(Debug, Clone, PartialEq)]
pub struct Endpoint {
    /// Where requests go. gRPC adds its own paths.
    pub uri: Uri,
    /// How they travel.
    pub protocol: Protocol,
    /// The headers of each request.
    pub headers: Headers,
    /// Whether they are compressed.
    pub gzip: bool,
    /// How long one request may take.
    pub timeout: Duration,
    /// How the connection is secured, if the address begins with `https`.
    pub tls: Tls,
}

/// The names of one signal: in variables, and in the path of a request.
#[derive(Clone, Copy)]
pub(super) struct Names {
    variable: &'static str,
    path: &'static str,
}

/// The variable with the address of every signal that has none of its own.
const GENERAL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
pub(super) const METRICS: Names = Names { variable: "METRICS", path: "v1/metrics" };
pub(super) const TRACES: Names = Names { variable: "TRACES", path: "v1/traces" };

fn own_endpoint(names: Names) -> String {
    format!("OTEL_EXPORTER_OTLP_{}_ENDPOINT", names.variable)
}

/// Whether an endpoint is set for a signal.
pub(super) fn is_set(names: Names, general: Option<&str>, environment: &Environment) -> bool {
    general.is_some() || [&*own_endpoint(names), GENERAL].into_iter().any(|name| environment.get(name).is_some())
}

/// The endpoint of a signal, if one is set. `general` takes the place of the general variable.
pub(super) fn resolve(names: Names, general: Option<&str>, environment: &mut Environment) -> Option<Endpoint> {
    let own = own_endpoint(names);
    let protocol = read(environment, names, "PROTOCOL", protocol).unwrap_or(Protocol::HttpProtobuf);
    let is_grpc = protocol == Protocol::Grpc;
    let insecure = read(environment, names, "INSECURE", boolean).unwrap_or(false);
    let parse_own = |text: &str| uri(text, is_grpc.then_some(insecure), None);
    let parse_general = |text: &str| uri(text, is_grpc.then_some(insecure), Some(names.path).filter(|_| !is_grpc));
    let uri = if environment.get(&own).is_some() {
        environment.read(&own, parse_own)?
    } else if let Some(general) = general {
        match parse_general(general) {
            Ok(uri) => uri,
            Err(problem) => {
                let variable = super::environment::OF_KEY.to_owned();
                environment.faults.push(super::environment::EnvironmentFault { variable, problem });
                return None;
            }
        }
    } else {
        environment.read(GENERAL, parse_general)?
    };
    let path = |text: &str| Ok(PathBuf::from(text));
    let tls = Tls {
        certificate: read(environment, names, "CERTIFICATE", path),
        client_certificate: read(environment, names, "CLIENT_CERTIFICATE", path),
        client_key: read(environment, names, "CLIENT_KEY", path),
    };
    let headers = read(environment, names, "HEADERS", headers).unwrap_or_default();
    let gzip = read(environment, names, "COMPRESSION", gzip).unwrap_or(false);
    let timeout = read(environment, names, "TIMEOUT", timeout).unwrap_or(Duration::from_secs(10));
    Some(Endpoint { uri, protocol, headers, gzip, timeout, tls })
}

/// Reads a variable of the signal, or else the general one.
fn read<T>(
    environment: &mut Environment,
    names: Names,
    name: &str,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Option<T> {
    let own = format!("OTEL_EXPORTER_OTLP_{}_{name}", names.variable);
    let general = format!("OTEL_EXPORTER_OTLP_{name}");
    let variable = if environment.get(&own).is_some() { own } else { general };
    environment.read(&variable, read)
}

/// Reads an address. Only a gRPC address may lack a scheme; then `insecure` decides. `path` is added to a general
/// address.
fn uri(text: &str, insecure: Option<bool>, path: Option<&str>) -> Result<Uri, String> {
    let (_, rest) = text.split_once("://").unwrap_or(("", text));
    if rest.split(['/', '?', '#']).next().is_some_and(|authority| authority.contains('@')) {
        // The address is not quoted, because it may hold a password.
        return Err("has an `@`: credentials in an address are not sent; set OTEL_EXPORTER_OTLP_HEADERS".into());
    }
    let full = match insecure {
        Some(insecure) if !text.contains("://") => format!("{}://{text}", if insecure { "http" } else { "https" }),
        _ => text.to_owned(),
    };
    let full = path.map_or_else(|| full.clone(), |path| format!("{}/{path}", full.trim_end_matches('/')));
    let uri: Uri = full.parse().map_err(|error| format!("`{text}` is not a URL: {error}"))?;
    let is_http = uri.scheme() == Some(&Scheme::HTTP) || uri.scheme() == Some(&Scheme::HTTPS);
    if !is_http || uri.host().is_none_or(str::is_empty) {
        return Err(format!("`{text}` is not http://HOST:PORT or https://HOST:PORT"));
    }
    Ok(uri)
}

fn protocol(text: &str) -> Result<Protocol, String> {
    match text {
        "grpc" => Ok(Protocol::Grpc),
        "http/protobuf" => Ok(Protocol::HttpProtobuf),
        _ => Err(format!("`{text}` is neither grpc nor http/protobuf")),
    }
}

fn gzip(text: &str) -> Result<bool, String> {
    match text {
        "gzip" => Ok(true),
        "none" => Ok(false),
        _ => Err(format!("`{text}` is neither gzip nor none")),
    }
}

fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(format!("`{text}` is neither true nor false")),
    }
}

fn timeout(text: &str) -> Result<Duration, String> {
    let milliseconds: u64 = text.parse().map_err(|_| format!("`{text}` is not a number of milliseconds"))?;
    if (1..=600_000).contains(&milliseconds) {
        return Ok(Duration::from_millis(milliseconds));
    }
    Err(format!("`{text}` is not between 1 and 600000 milliseconds"))
}

/// Reads `name=value,name=value`, with values percent-encoded. A fault names the header but never its value.
fn headers(text: &str) -> Result<Headers, String> {
    let mut headers = Vec::new();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or("has an entry without `=`")?;
        let name = name.trim();
        let key: HeaderName = name.parse().map_err(|_| format!("`{name}` is not a header name"))?;
        let value = super::resource::percent_decode(value.trim()).ok_or(format!("`{name}` is not percent-encoded"))?;
        let mut value = HeaderValue::from_str(&value).map_err(|_| format!("`{name}` has an invalid value"))?;
        value.set_sensitive(true);
        headers.push((key, value));
    }
    Ok(Headers(headers))
}
