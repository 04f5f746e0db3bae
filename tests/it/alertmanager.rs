//! A real Alertmanager with the configuration in docs/alerts.md. Its webhooks lead to the test.

use crate::daemon::{agent, answer};
use crate::http_server::HttpServer;
use crate::process::{Process, eventually};
use crate::tools;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// How long Alertmanager may take until it listens.
const LISTENS_WITHIN: Duration = Duration::from_secs(30);

/// Debian's Alertmanager reads its templates only from this path. If the package is merely unpacked, a private mount
/// namespace puts the templates there.
const TEMPLATES: &str = "/usr/share/prometheus/alertmanager";
const WITH_TEMPLATES: &str = "mount -t tmpfs tmpfs /usr/share && mkdir -p /usr/share/prometheus && \
                              ln -s \"$1\" /usr/share/prometheus/alertmanager && shift && exec \"$@\"";

/// A running Alertmanager, ended when dropped.
pub struct Alertmanager {
    base: String,
    notices: Arc<Mutex<Vec<Notice>>>,
    _process: Process,
    _webhook: HttpServer,
    _directory: TempDir,
}

/// What a receiver was sent about one alert.
#[derive(Debug, Clone)]
pub struct Notice {
    /// The receiver: the webhook's path.
    pub receiver: String,
    /// `firing` or `resolved`.
    pub status: String,
    /// The alert's labels, `alertname` among them.
    pub labels: BTreeMap<String, String>,
    /// The alert's annotations.
    pub annotations: BTreeMap<String, String>,
}

impl Alertmanager {
    /// Starts the Alertmanager at `program`; returns once it listens.
    pub fn start(program: &Path) -> Self {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let received = Arc::clone(&notices);
        let webhook = HttpServer::start(move |path, body| {
            received.lock().expect("no panic while held").extend(notices_in(path, body));
            String::new()
        });
        let directory = TempDir::new().expect("a temporary directory");
        let config = directory.path().join("alertmanager.yml");
        std::fs::write(&config, hastened(&documented_configuration(), &webhook.address())).expect("writable");
        let mut command = command(program);
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.path={}", directory.path().join("data").display()));
        command.args(["--web.listen-address=127.0.0.1:0", "--cluster.listen-address="]);
        let process = Process::start(command);
        let base = process.wait_for(LISTENS_WITHIN, "line `Listening on`", |line| {
            let address = line.split_once("msg=\"Listening on\"")?.1.split_once("address=")?.1;
            Some(format!("http://{}", address.split_whitespace().next()?))
        });
        Self { base, notices, _process: process, _webhook: webhook, _directory: directory }
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> &str {
        self.base.trim_start_matches("http://")
    }

    /// Waits for a notice that `wanted` accepts. Panics after `within` with all notices that came.
    pub fn notice(&self, within: Duration, what: &str, wanted: impl Fn(&Notice) -> bool) -> Notice {
        let all = || self.notices.lock().expect("no panic while held").clone();
        let mut last = Vec::new();
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually(within, what, || {
                last = all();
                last.iter().find(|notice| wanted(notice)).cloned()
            })
        }));
        found.unwrap_or_else(|_| panic!("no {what}: {last:#?}"))
    }

    /// The alerts that it holds, as its API returns them.
    pub fn alerts(&self) -> Vec<Value> {
        let (status, body) = answer(agent().get(format!("{}/api/v2/alerts", self.base)).call(), "alerts");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("Alertmanager answers JSON")
    }
}

/// The configuration in docs/alerts.md.
pub fn documented_configuration() -> String {
    let text = std::fs::read_to_string(tools::root().join("docs/alerts.md")).expect("docs/alerts.md");
    let begin = text.split_once("```yaml\n# alertmanager.yml\n").expect("docs/alerts.md shows alertmanager.yml").1;
    begin.split_once("```").expect("the block ends").0.to_owned()
}

/// `configuration` with shorter waits, and with its receivers at `webhook`.
fn hastened(configuration: &str, webhook: &str) -> String {
    let text = configuration
        .replace("group_wait: 30s", "group_wait: 100ms")
        .replace("group_interval: 5m", "group_interval: 500ms")
        .replace("pager.example/alerts", &format!("{webhook}/pager"))
        .replace("chat.example/alerts", &format!("{webhook}/chat"));
    assert!(!text.contains(".example") && !text.contains("30s") && !text.contains("5m"), "{text}");
    text
}

fn command(program: &Path) -> Command {
    let tree = program.parent().and_then(Path::parent).and_then(Path::parent);
    let templates = tree.map(|tree| tree.join(TEMPLATES.trim_start_matches('/')));
    match templates {
        Some(templates) if !Path::new(TEMPLATES).exists() && templates.exists() => {
            let mut command = Command::new("unshare");
            command.args(["--map-root-user", "--mount", "sh", "-c", WITH_TEMPLATES, "sh"]);
            command.arg(templates).arg(program);
            command
        }
        _ => Command::new(program),
    }
}

fn notices_in(path: &str, body: &str) -> Vec<Notice> {
    let notification: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"));
    let texts = |value: &Value| -> BTreeMap<String, String> {
        let pairs = value.as_object().into_iter().flatten();
        pairs.map(|(name, text)| (name.clone(), text.as_str().unwrap_or_default().to_owned())).collect()
    };
    let alerts = notification["alerts"].as_array().into_iter().flatten();
    let notice = |alert: &Value| Notice {
        receiver: path.trim_start_matches('/').to_owned(),
        status: alert["status"].as_str().unwrap_or_default().to_owned(),
        labels: texts(&alert["labels"]),
        annotations: texts(&alert["annotations"]),
    };
    alerts.map(notice).collect()
}
