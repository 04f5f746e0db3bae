//! Asks a daemon over HTTP: for `run --via` and `top`.
//!
//! Enters: the daemon's address. Leaves: its answers as JSON. Absent on purpose: TLS and tokens; the daemon is on this node's
//! loopback.

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::time::Duration;

/// The address that `serve` listens on by default.
pub(super) const DEFAULT: &str = "http://127.0.0.1:10450";

/// The longest answer other than a file, bytes.
const MOST_ANSWER_BYTES: usize = 4 << 20;
/// How long a call may take.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// A daemon that is asked.
pub(super) struct DaemonClient {
    client: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
    url: String,
}

impl DaemonClient {
    /// Will ask the daemon at `url`.
    ///
    /// # Errors
    /// `url` is no address of HTTP.
    pub fn new(url: &str) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/').to_owned();
        if !url.starts_with("http://") {
            bail!("--via {url}: is not http://HOST:PORT");
        }
        Ok(Self { client: hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http(), url })
    }

    /// The daemon's address, without a slash at its end.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The status and the JSON of an answer.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<(StatusCode, Value)> {
        let response = self.call(method, path, body).await?;
        Ok((response.status(), answer(response).await?))
    }

    /// An answer that is still to be read.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Response<Incoming>> {
        let body = Full::new(Bytes::from(body.map(Value::to_string).unwrap_or_default()));
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url)).body(body)?;
        let response = tokio::time::timeout(ANSWERS_WITHIN, self.client.request(request)).await;
        let response = response.with_context(|| format!("{}: does not answer", self.url))?;
        response.map_err(|error| anyhow::anyhow!("{}: {}", self.url, highwater_engine::dial::with_causes(&error)))
    }
}

/// What a problem says.
pub(super) fn detail(answer: &Value) -> String {
    highwater_engine::dial::printable(answer["detail"].as_str().unwrap_or("it does not say why"))
}

/// The JSON of an answer; null if it is none.
pub(super) async fn answer(response: Response<Incoming>) -> anyhow::Result<Value> {
    let body = Limited::new(response.into_body(), MOST_ANSWER_BYTES).collect();
    let body = tokio::time::timeout(ANSWERS_WITHIN, body).await.context("the daemon's answer does not end")?;
    let bytes = body.map_err(|error| anyhow::anyhow!("the daemon's answer: {error}"))?.to_bytes();
    Ok(serde_json::from_slice(&bytes).unwrap_or_default())
}
