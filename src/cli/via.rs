//! `run --via`: a daemon on this node records the command, and this process reads no GPU.
//!
//! Enters: the daemon's address. Leaves: a capture of the time in which the command ran, as the daemon's flight recorder
//! takes it, in a file. Absent on purpose: TLS and tokens; the daemon is on this node's loopback.

use super::client::{DaemonClient, answer, detail};
use anyhow::{Context as _, bail};
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::json;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

/// How long to wait for the written capture, including the time of another one that the daemon is already taking.
const WRITTEN_WITHIN: Duration = Duration::from_secs(120);
/// How often to ask whether it is written.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long the capture goes on after the command, seconds, since phases are joined with memory shortly after they end.
const AFTER_S: f64 = 1.0;

/// A daemon that records.
pub(super) struct RemoteDaemon {
    client: DaemonClient,
    /// How far back it keeps memory.
    keeps: Duration,
}

impl RemoteDaemon {
    /// Connects to the daemon at `url`, and checks that it takes captures.
    pub async fn find(url: &str) -> anyhow::Result<Self> {
        let client = DaemonClient::new(url)?;
        let (url, (status, captures)) = (client.url(), client.ask(Method::GET, "/api/v1/captures", None).await?);
        if status != StatusCode::OK {
            bail!("{url}/api/v1/captures: {status}: {}", detail(&captures));
        }
        if captures["on"] != true {
            bail!("{url}: takes no captures (captures.directory)");
        }
        if let Some(trouble) = captures["trouble"].as_str() {
            bail!("{url}: cannot take captures: {trouble}");
        }
        let seconds = captures["most_seconds_before"].as_f64();
        let seconds = seconds.with_context(|| format!("{url}: is not a highwater that --via can use"))?;
        Ok(Self { client, keeps: Duration::try_from_secs_f64(seconds).unwrap_or_default() })
    }

    /// Writes a capture of the last `elapsed` to a new file. Returns how much of that time the daemon no longer keeps.
    pub async fn record(&self, elapsed: Duration, note: &str, path: &Path) -> anyhow::Result<Duration> {
        let within = elapsed.min(self.keeps);
        let note: String = note.chars().filter(|one| !one.is_control()).take(200).collect();
        let asked = json!({ "seconds_before": within.as_secs_f64(), "seconds_after": AFTER_S, "note": note });
        let written = async {
            let id = loop {
                let (status, answer) = self.client.ask(Method::POST, "/api/v1/captures", Some(&asked)).await?;
                match status {
                    StatusCode::ACCEPTED => break answer["id"].as_str().unwrap_or_default().to_owned(),
                    // Another capture is being taken.
                    StatusCode::CONFLICT => tokio::time::sleep(ASK_EVERY).await,
                    _ => bail!("{}: takes no capture: {}", self.client.url(), detail(&answer)),
                }
            };
            let file = format!("/api/v1/captures/{id}");
            loop {
                let response = self.client.call(Method::GET, &file, None).await?;
                match response.status() {
                    StatusCode::OK => return save(response, path).await,
                    StatusCode::CONFLICT => tokio::time::sleep(ASK_EVERY).await,
                    _ => bail!("{}: {file}: {}", self.client.url(), detail(&answer(response).await?)),
                }
            }
        };
        let written = tokio::time::timeout(WRITTEN_WITHIN, written).await;
        written.unwrap_or_else(|_| bail!("{}: has no capture after {WRITTEN_WITHIN:?}", self.client.url()))?;
        Ok(elapsed.saturating_sub(within))
    }
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
