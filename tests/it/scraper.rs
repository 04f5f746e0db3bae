//! A real Prometheus that scrapes daemons every second, configured as people do it: without honor_labels. Or one
//! that receives OTLP.

use crate::daemon::{Daemon, agent, answer};
use crate::process::{Process, eventually};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// The recommendation of Prometheus's guide to OTLP, plus the attribute that identifies a GPU as a label of its series.
const TAKING_OTLP: &str = "otlp: {promote_resource_attributes: [service.name, service.instance.id, hw.id]}\n\
                           storage: {tsdb: {out_of_order_time_window: 30m}}\n";

/// A running Prometheus, ended when dropped.
pub struct Scraper {
    base: String,
    _process: Process,
    _directory: TempDir,
}

/// One series at one instant.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Its labels, including `__name__` if it has one.
    pub labels: BTreeMap<String, String>,
    /// Its value; the count of a native histogram, which has no single value.
    pub value: f64,
}

impl Scraper {
    /// Starts the Prometheus at `program`, which scrapes these daemons under the scrape job `highwater`.
    pub fn of(program: &Path, daemons: &[&Daemon]) -> Self {
        let addresses: Vec<&str> = daemons.iter().map(|daemon| daemon.address()).collect();
        Self::start(program, &scraping(&addresses), &[])
    }

    /// The same, with more lines in its scrape configuration, and the rules in the folder `rules`, which it evaluates
    /// every second.
    pub fn judging(program: &Path, daemons: &[&Daemon], lines: &str, rules: &Path) -> Self {
        let addresses: Vec<&str> = daemons.iter().map(|daemon| daemon.address()).collect();
        let configuration = format!("{}{lines}rule_files: [{:?}]\n", scraping(&addresses), rules.join("*.yaml"));
        Self::start(program, &configuration, &[])
    }

    /// Starts the Prometheus at `program` with the text of a configuration.
    pub fn configured(program: &Path, configuration: &str) -> Self {
        Self::start(program, configuration, &[])
    }

    /// Starts the Prometheus at `program`, which scrapes one daemon, with more lines in its scrape configuration.
    pub fn with(program: &Path, daemon: &Daemon, lines: &str) -> Self {
        Self::start(program, &format!("{}{lines}", scraping(&[daemon.address()])), &[])
    }

    /// Starts the Prometheus at `program`, which scrapes one daemon, with one of its feature flags.
    pub fn with_feature(program: &Path, daemon: &Daemon, feature: &str) -> Self {
        Self::start(program, &scraping(&[daemon.address()]), &[&format!("--enable-feature={feature}")])
    }

    /// Starts the Prometheus at `program`, which scrapes `address`, evaluates the rules in the folder `rules` every
    /// second, and sends alerts to the Alertmanager at `alertmanager`.
    pub fn alerting(program: &Path, address: &str, rules: &Path, alertmanager: &str) -> Self {
        let configuration = format!(
            "{}rule_files: [{:?}]\nalerting: {{alertmanagers: [{{static_configs: [{{targets: [{alertmanager:?}]}}]}}]}}\n",
            scraping(&[address]),
            rules.join("*.yaml"),
        );
        Self::start(program, &configuration, &[])
    }

    /// Starts the Prometheus 3 at `program`, which scrapes nothing and receives OTLP.
    pub fn taking_otlp(program: &Path) -> Self {
        Self::start(program, TAKING_OTLP, &["--web.enable-otlp-receiver"])
    }

    /// Starts the Prometheus at `program`, which scrapes nothing, over the blocks in the folder `data` of `directory`.
    pub fn holding(program: &Path, directory: TempDir) -> Self {
        Self::start_in(directory, program, "", &[])
    }

    fn start(program: &Path, configuration: &str, arguments: &[&str]) -> Self {
        Self::start_in(TempDir::new().expect("a temporary directory"), program, configuration, arguments)
    }

    fn start_in(directory: TempDir, program: &Path, configuration: &str, arguments: &[&str]) -> Self {
        let config = directory.path().join("prometheus.yml");
        std::fs::write(&config, configuration).expect("a writable directory");
        let mut command = Command::new(program);
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()));
        command.arg("--web.listen-address=127.0.0.1:0").args(arguments);
        let process = Process::start(command);
        let within = Duration::from_secs(30);
        let base = process.wait_for(within, "line `Listening on`", |line| {
            let address = line.split_once("msg=\"Listening on\"")?.1.split_once("address=")?.1;
            Some(format!("http://{}", address.split_whitespace().next()?))
        });
        let ready = format!("{base}/-/ready");
        eventually(within, &ready, || {
            agent().get(&ready).call().is_ok_and(|answer| answer.status() == 200).then_some(())
        });
        Self { base, _process: process, _directory: directory }
    }

    /// Its endpoint for OTLP over HTTP; each signal has its own path below.
    pub fn otlp_endpoint(&self) -> String {
        format!("{}/api/v1/otlp", self.base)
    }

    /// Waits until each of `daemons` has been scraped at least `count` times.
    pub fn wait_for_scrapes(&self, daemons: usize, count: u32) {
        let expression = format!(r#"count_over_time(up{{job="highwater"}}[10m]) >= {count}"#);
        eventually(Duration::from_secs(u64::from(count) * 2 + 20), &expression, || {
            (self.query(&expression).len() == daemons).then_some(())
        });
    }

    /// Waits until one more scrape is stored.
    pub fn wait_for_another_scrape(&self) {
        let scrapes =
            || self.query(r#"sum(count_over_time(up{job="highwater"}[10m]))"#).iter().map(|s| s.value).sum::<f64>();
        let before = scrapes();
        eventually(Duration::from_secs(20), "another scrape", || (scrapes() > before).then_some(()));
    }

    /// The result of `expression` now; panics if Prometheus refuses it.
    pub fn query(&self, expression: &str) -> Vec<Sample> {
        let data = self.api("query", &[("query", expression)]);
        let result = data["result"].as_array().unwrap_or_else(|| panic!("{expression}: {data}"));
        if data["resultType"] == "scalar" {
            return vec![Sample { labels: BTreeMap::new(), value: number(&data["result"][1]) }];
        }
        result.iter().map(sample).collect()
    }

    /// The result of `expression` at a time, seconds of Unix time.
    pub fn query_at(&self, expression: &str, at_s: f64) -> Vec<Sample> {
        let data = self.api("query", &[("query", expression), ("time", &format!("{at_s:.3}"))]);
        data["result"].as_array().unwrap_or_else(|| panic!("{expression}: {data}")).iter().map(sample).collect()
    }

    /// The `data` in an answer of Prometheus's API.
    pub fn api(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let mut request = agent().get(format!("{}/api/v1/{path}", self.base));
        for (name, value) in parameters {
            request = request.query(name, value);
        }
        let (status, body) = answer(request.call(), path);
        assert_eq!(status, 200, "{path} {parameters:?}: {body}");
        let mut answer: Value = serde_json::from_str(&body).expect("Prometheus answers JSON");
        answer["data"].take()
    }
}

fn scraping(addresses: &[&str]) -> String {
    let targets: Vec<String> = addresses.iter().map(|address| format!("{address:?}")).collect();
    format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
         scrape_configs:\n  - job_name: highwater\n    static_configs: [{{targets: [{}]}}]\n",
        targets.join(", ")
    )
}

fn sample(series: &Value) -> Sample {
    let labels = series["metric"].as_object().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Sample {
        labels: labels.map(|(name, value)| (name.clone(), text(value))).collect(),
        value: series.get("histogram").map_or_else(|| number(&series["value"][1]), |of| number(&of[1]["count"])),
    }
}

fn number(value: &Value) -> f64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN)
}
