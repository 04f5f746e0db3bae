//! `run --via`: a daemon on this node records the command, and this process reads no GPU.
//!
//! Enters: the daemon's address. Leaves: a capture of the time in which the command ran, as the daemon's flight recorder
//! takes it, in a file. Absent on purpose: TLS and tokens; the daemon is on this node's loopback.

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

/// The address that `serve` listens on by default.
pub(super) const DEFAULT: &str = "http://127.0.0.1:10450";

/// The longest answer other than a file, bytes.
const MOST_ANSWER_BYTES: usize = 4 << 20;
/// How long a call may take.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// How long to wait for the written capture, including the time of another one that the daemon is already taking.
const WRITTEN_WITHIN: Duration = Duration::from_secs(120);
/// How often to ask whether it is written.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long the capture goes on after the command, seconds, since phases are joined with memory shortly after they end.
const AFTER_S: f64 = 1.0;

/// A daemon that records.
pub(super) struct RemoteDaemon {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
    /// How far back it keeps memory.
    keeps: Duration,
}

impl RemoteDaemon {
    /// Connects to the daemon at `url`, and checks that it takes captures.
    pub async fn find(url: &str) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/').to_owned();
        if !url.starts_with("http://") {
            bail!("--via {url}: is not http://HOST:PORT");
        }
        let client = Client::builder(TokioExecutor::new()).build_http();
        let mut daemon = Self { client, url, keeps: Duration::ZERO };
        let (status, captures) = daemon.ask(Method::GET, "/api/v1/captures", None).await?;
        if status != StatusCode::OK {
            bail!("{}/api/v1/captures: {status}: {}", daemon.url, detail(&captures));
        }
        if captures["on"] != true {
            bail!("{}: takes no captures (captures.directory)", daemon.url);
        }
        if let Some(trouble) = captures["trouble"].as_str() {
            bail!("{}: cannot take captures: {trouble}", daemon.url);
        }
        let seconds = captures["most_seconds_before"].as_f64();
        let seconds = seconds.with_context(|| format!("{}: is not a highwater that --via can use", daemon.url))?;
        daemon.keeps = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Ok(daemon)
    }

    /// Writes a capture of the last `elapsed` to a new file. Returns how much of that time the daemon no longer keeps.
    pub async fn record(&self, elapsed: Duration, note: &str, path: &Path) -> anyhow::Result<Duration> {
        let within = elapsed.min(self.keeps);
        let note: String = note.chars().filter(|one| !one.is_control()).take(200).collect();
        let asked = json!({ "seconds_before": within.as_secs_f64(), "seconds_after": AFTER_S, "note": note });
        let written = async {
            let id = loop {
                let (status, answer) = self.ask(Method::POST, "/api/v1/captures", Some(&asked)).await?;
                match status {
                    StatusCode::ACCEPTED => break answer["id"].as_str().unwrap_or_default().to_owned(),
                    // Another capture is being taken.
                    StatusCode::CONFLICT => tokio::time::sleep(ASK_EVERY).await,
                    _ => bail!("{}: takes no capture: {}", self.url, detail(&answer)),
                }
            };
            let file = format!("/api/v1/captures/{id}");
            loop {
                let response = self.call(Method::GET, &file, None).await?;
                match response.status() {
                    StatusCode::OK => return save(response, path).await,
                    StatusCode::CONFLICT => tokio::time::sleep(ASK_EVERY).await,
                    _ => bail!("{}: {file}: {}", self.url, detail(&answer(response).await?)),
                }
            }
        };
        let written = tokio::time::timeout(WRITTEN_WITHIN, written).await;
        written.unwrap_or_else(|_| bail!("{}: has no capture after {WRITTEN_WITHIN:?}", self.url))?;
        Ok(elapsed.saturating_sub(within))
    }

    async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<(StatusCode, Value)> {
        let response = self.call(method, path, body).await?;
        Ok((response.status(), answer(response).await?))
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Response<Incoming>> {
        let body = Full::new(Bytes::from(body.map(Value::to_string).unwrap_or_default()));
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url)).body(body)?;
        let response = tokio::time::timeout(ANSWERS_WITHIN, self.client.request(request)).await;
        let response = response.with_context(|| format!("{}: does not answer", self.url))?;
        response.map_err(|error| anyhow::anyhow!("{}: {}", self.url, highwater_engine::dial::with_causes(&error)))
    }
}

/// What a problem says.
fn detail(answer: &Value) -> String {
    highwater_engine::dial::printable(answer["detail"].as_str().unwrap_or("it does not say why"))
}

async fn answer(response: Response<Incoming>) -> anyhow::Result<Value> {
    let body = Limited::new(response.into_body(), MOST_ANSWER_BYTES).collect();
    let body = tokio::time::timeout(ANSWERS_WITHIN, body).await.context("the daemon's answer does not end")?;
    let bytes = body.map_err(|error| anyhow::anyhow!("the daemon's answer: {error}"))?.to_bytes();
    Ok(serde_json::from_slice(&bytes).unwrap_or_default())
}

/// Writes an answer to a new file that only its owner can read.
async fn save(response: Response<Incoming>, path: &Path) -> anyhow::Result<()> {
    let about = || path.display().to_string();
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path).with_context(about)?;
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        if let Ok(piece) = frame?.into_data() {
            file.write_all(&piece).with_context(about)?;
        }
    }
    file.sync_all().with_context(about)
}
