//! Where `top` gets its answers from: a daemon, or this process.

use super::super::client::{DEFAULT, DaemonClient};
use super::super::common::layers;
use crate::config::load;
use crate::daemon::Readers;
use crate::web;
use anyhow::{Context as _, bail};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use std::time::Duration;

/// What is asked of a daemon, and the names of the answers.
const ASKED: [(&str, &str); 3] =
    [("gpus", "/api/v1/gpus"), ("jobs", "/api/v1/jobs"), ("incidents", "/api/v1/incidents?active=true")];

/// How long all answers together may take.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);

/// Who answers.
pub(super) enum Source {
    /// A daemon.
    Daemon(Box<DaemonClient>),
    /// This process reads the GPUs.
    Own(Readers),
}

impl Source {
    /// The daemon at `via`, or the one of this node; where none answers, or another source is wanted, this process.
    ///
    /// # Errors
    /// The daemon that was named does not answer, or there is nothing to read here.
    pub async fn find(via: Option<&str>, source: Option<&str>, library: Option<&str>) -> anyhow::Result<Self> {
        if let Some(url) = via {
            let daemon = Self::Daemon(Box::new(DaemonClient::new(url)?));
            daemon.answers().await?;
            return Ok(daemon);
        }
        if source.is_none() && library.is_none() {
            let daemon = Self::Daemon(Box::new(DaemonClient::new(DEFAULT)?));
            if daemon.answers().await.is_ok() {
                return Ok(daemon);
            }
        }
        Self::own(source, library)
    }

    fn own(source: Option<&str>, library: Option<&str>) -> anyhow::Result<Self> {
        let set = |key: &str, value: &str| (key.to_owned(), value.to_owned(), "top".to_owned());
        let mut flags = vec![set("annotations.socket", "none"), set("metrics.processes", "true")];
        flags.extend(source.map(|source| set("source", source)));
        flags.extend(library.map(|library| set("nvml_library", library)));
        let mut layers = layers(None, flags);
        // What is set for a daemon or a job of this node is not meant for this.
        layers.environment.clear();
        let readers = Readers::alone(load(&layers)?)?;
        readers.wait_for_node().context("no daemon answers at http://127.0.0.1:10450")?;
        readers.wait_for_readings();
        Ok(Self::Own(readers))
    }

    /// What is so now, by the names of [`ASKED`].
    ///
    /// # Errors
    /// The daemon does not answer, or refuses.
    pub async fn answers(&self) -> anyhow::Result<Value> {
        let answers = tokio::time::timeout(ANSWERS_WITHIN, self.ask()).await;
        answers.unwrap_or_else(|_| bail!("{}: does not answer within {ANSWERS_WITHIN:?}", self.about()))
    }

    async fn ask(&self) -> anyhow::Result<Value> {
        let client = match self {
            Self::Own(readers) => return Ok(web::now(readers.state())?),
            Self::Daemon(client) => client,
        };
        let mut answers = json!({});
        for (name, path) in ASKED {
            let (status, answer) = client.ask(Method::GET, path, None).await?;
            // A daemon without a GPU says why.
            if status != StatusCode::OK && !(name == "gpus" && answer["detail"].is_string()) {
                bail!("{}{path}: {status}", client.url());
            }
            answers[name] = answer;
        }
        Ok(answers)
    }

    /// Who answers, in a few words.
    pub fn about(&self) -> &str {
        match self {
            Self::Own(_) => "no daemon: without marks of jobs",
            Self::Daemon(client) => client.url(),
        }
    }

    /// Ends what reads the GPUs.
    pub fn stop(self) {
        if let Self::Own(readers) = self {
            readers.stop();
        }
    }
}
