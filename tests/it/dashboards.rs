//! The shipped dashboards, read as Grafana reads them: complete, explained, and with data in every panel.
//!
//! Not covered: Grafana itself, which neither Debian nor a language registry carries. So the look of a panel is not
//! tested; that each of its queries returns data from a real Prometheus is.

use crate::daemon::Daemon;
use crate::scraper::{Sample, Scraper};
use crate::tools;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A dashboard and where it was read from.
struct Dashboard {
    file: String,
    json: Value,
}

/// One expression and where it occurs.
#[derive(Debug, Clone)]
struct Query {
    place: String,
    expression: String,
    /// The label whose values a variable lists; `None` for a panel's query.
    label: Option<String>,
}

#[test]
fn each_is_whole() {
    let mut uids = BTreeSet::new();
    for Dashboard { file, json } in dashboards() {
        let uid = text(&json["uid"]);
        assert_eq!(
            file,
            format!("{}.json", uid.trim_start_matches("highwater-")),
            "the uid is stable: it is the file's name"
        );
        assert!(uids.insert(uid.to_owned()), "{file}: another dashboard has the uid {uid}");
        assert!(json["schemaVersion"].as_i64() >= Some(39), "{file}: schemaVersion");
        assert!(json["id"].is_null() && json.get("__inputs").is_none(), "{file}: it can be provisioned unchanged");
        assert!(
            !text(&json["description"]).is_empty() && !text(&json["title"]).is_empty(),
            "{file}: title and description"
        );
        let variables = list(&json["templating"]["list"]);
        assert_eq!(variables[0]["type"], "datasource", "{file}: the first variable chooses the data source");
        assert!(
            variables.iter().all(|v| v["name"] != "job" || !text(&v["description"]).is_empty()),
            "{file}: variables"
        );
        let ids: Vec<i64> = panels(&json).iter().filter_map(|panel| panel["id"].as_i64()).collect();
        assert_eq!(
            ids.iter().collect::<BTreeSet<_>>().len(),
            panels(&json).len(),
            "{file}: every panel has its own id"
        );
    }
    assert!(uids.len() >= 2, "dashboards/ has {uids:?}");
}

#[test]
fn each_panel_explains_itself() {
    for Dashboard { file, json } in dashboards() {
        for panel in panels(&json).into_iter().filter(|panel| panel["type"] != "row") {
            let place = format!("{file}, panel {}", panel["title"]);
            assert!(!text(&panel["title"]).is_empty(), "{place}: title");
            assert!(text(&panel["description"]).len() > 20, "{place}: description");
            assert!(!text(&panel["fieldConfig"]["defaults"]["unit"]).is_empty(), "{place}: unit");
            assert!(panel["fieldConfig"]["defaults"]["thresholds"].is_object(), "{place}: thresholds");
            assert!(
                ["timeseries", "stat", "heatmap", "state-timeline", "bargauge", "table"]
                    .contains(&text(&panel["type"])),
                "{place}: type"
            );
            for target in list(&panel["targets"]) {
                assert_eq!(target["datasource"]["uid"], "${datasource}", "{place}: data source");
            }
        }
    }
}

#[test]
fn no_panel_lies_on_another() {
    for Dashboard { file, json } in dashboards() {
        let mut taken: BTreeMap<(i64, i64), String> = BTreeMap::new();
        for panel in panels(&json) {
            let (at, title) = (&panel["gridPos"], text(&panel["title"]));
            let side = |key: &str| at[key].as_i64().unwrap_or_else(|| panic!("{file}, {title}: gridPos has no {key}"));
            assert!(side("x") + side("w") <= 24, "{file}, {title}: wider than the page");
            for cell in
                (side("x")..side("x") + side("w")).flat_map(|x| (side("y")..side("y") + side("h")).map(move |y| (x, y)))
            {
                let other = taken.insert(cell, title.to_owned());
                assert!(other.is_none(), "{file}: {title} lies on {other:?}");
            }
        }
    }
}

#[test]
fn each_query_keeps_to_the_variables() {
    for Dashboard { file, json } in dashboards() {
        let names: BTreeSet<String> =
            list(&json["templating"]["list"]).iter().map(|v| text(&v["name"]).to_owned()).collect();
        // Every query on a page is restricted to what its first query variable selects.
        let scope = format!("${}", text(&json["templating"]["list"][1]["name"]));
        for Query { place, expression, label } in queries(&file, &json) {
            assert!(label.is_some() || expression.contains(&scope), "{place} not restricted to {scope}: {expression}");
            for name in variables_of(&expression) {
                assert!(names.contains(&name) || name.starts_with("__"), "{place}: no variable ${name}: {expression}");
            }
            for range in expression.split('[').skip(1).filter_map(|rest| rest.split_once(']')) {
                assert!(["$__rate_interval", "$__range"].contains(&range.0), "{place}: a fixed range: {expression}");
            }
        }
    }
}

#[test]
fn each_link_leads_somewhere() {
    let all = dashboards();
    let uids: BTreeSet<&str> = all.iter().map(|dashboard| text(&dashboard.json["uid"])).collect();
    for Dashboard { file, json } in &all {
        let others = list(&json["links"]).iter().filter_map(|link| text(&link["url"]).strip_prefix("/d/"));
        let others: Vec<&str> = others.collect();
        assert!(!others.is_empty(), "{file} links to no other dashboard");
        for uid in others.into_iter().chain(links_in(json)) {
            assert!(uids.contains(uid), "{file} links to {uid}");
        }
    }
}

/// The daemons that answer the queries.
struct Nodes {
    demo: Daemon,
    /// The daemon on which most things go wrong.
    troubled: Daemon,
    /// A daemon without a driver, so with nothing to read.
    driverless: Daemon,
}

impl Nodes {
    fn start() -> Self {
        let library = tools::root().join("target/no-such-library.so").display().to_string();
        Self {
            demo: Daemon::start(&["demo"]),
            troubled: Daemon::start(&["serve", "--source", "sim:faults"]),
            driverless: Daemon::start(&["serve", "--source", "nvml", "--nvml-library", &library]),
        }
    }

    fn all(&self) -> [&Daemon; 3] {
        [&self.demo, &self.troubled, &self.driverless]
    }

    /// The daemon that has data for a query: the demo, unless the query is about a fault that the demo does not have.
    fn with_data_for(&self, expression: &str) -> &Daemon {
        match expression {
            xid if xid.contains("highwater_gpu_xid_") => &self.troubled,
            throttle if throttle.contains("highwater_gpu_throttle_active") => &self.troubled,
            error if error.contains("highwater_source_error") => &self.driverless,
            _ => &self.demo,
        }
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_query_returns_data_from_the_demo() {
    let Some(program) = tools::find("prometheus") else { return };
    let nodes = Nodes::start();
    let scraper = Scraper::of(&program, &nodes.all());
    scraper.wait_for_scrapes(nodes.all().len(), 12);

    let mut waiting = Vec::new();
    for Dashboard { file, json } in dashboards() {
        for query in queries(&file, &json) {
            let expression = substitute(&query.expression, nodes.with_data_for(&query.expression), &scraper);
            waiting.push(Query { expression, ..query });
        }
    }
    // Some queries are about events, such as a phase that is active at a scrape. Each query has to return data once.
    let deadline = Instant::now() + Duration::from_secs(90);
    loop {
        waiting.retain(|query| !returns_data(&scraper.query(&query.expression), query.label.as_deref()));
        if waiting.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "{} queries return nothing: {waiting:#?}", waiting.len());
        scraper.wait_for_another_scrape();
    }
    every_metric_is_exposed(&nodes);
}

/// With an `or`, a query can return data although it names a metric that does not exist.
fn every_metric_is_exposed(nodes: &Nodes) {
    let known = metric_names(&nodes.all().map(|node| node.get("/metrics")).concat());
    for Dashboard { file, json } in dashboards() {
        for query in queries(&file, &json) {
            for name in names_of(&query.expression) {
                assert!(known.contains(&name), "{}: no metric {name}: {}", query.place, query.expression);
            }
        }
    }
}

fn returns_data(samples: &[Sample], label: Option<&str>) -> bool {
    samples.iter().any(|sample| !sample.value.is_nan() && label.is_none_or(|name| sample.labels.contains_key(name)))
}

/// `expression` as Grafana sends it: with `node` and its jobs selected, and everything else set to all.
fn substitute(expression: &str, node: &Daemon, scraper: &Scraper) -> String {
    let instance = node.address();
    let jobs = scraper.query(&format!("highwater_job_info{{instance={instance:?}}}"));
    let jobs: BTreeSet<&str> =
        jobs.iter().filter_map(|job| job.labels.get("exported_job")).map(String::as_str).collect();
    let jobs: Vec<&str> = jobs.into_iter().collect();
    [
        ("$__rate_interval", "10s"),
        ("$__range_s", "3600"),
        ("$__range", "1h"),
        ("$instance", instance),
        ("$job", &jobs.join("|")),
        ("$window", "15s"),
        ("$gpu", ".+"),
        ("$rank", ".+"),
        ("$phase", ".+"),
    ]
    .into_iter()
    .fold(expression.to_owned(), |text, (name, value)| text.replace(name, value))
}

fn dashboards() -> Vec<Dashboard> {
    files()
        .into_iter()
        .map(|path| {
            let file = path.file_name().expect("a file").to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path).expect("readable");
            Dashboard { json: serde_json::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}")), file }
        })
        .collect()
}

/// The dashboards' files, sorted by name.
pub fn files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(tools::root().join("dashboards")).expect("dashboards/");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files
}

/// All panels, rows and those inside collapsed rows included.
fn panels(json: &Value) -> Vec<&Value> {
    list(&json["panels"]).iter().flat_map(|panel| std::iter::once(panel).chain(list(&panel["panels"]))).collect()
}

/// Every expression of the panels, the variables and the annotations.
fn queries(file: &str, json: &Value) -> Vec<Query> {
    let mut queries = Vec::new();
    for panel in panels(json) {
        for target in list(&panel["targets"]) {
            let place = format!("{file}, panel {}, query {}", panel["title"], target["refId"]);
            queries.push(Query { place, expression: text(&target["expr"]).to_owned(), label: None });
        }
    }
    for variable in list(&json["templating"]["list"]).iter().filter(|variable| variable["type"] == "query") {
        let place = format!("{file}, variable {}", variable["name"]);
        let query = text(&variable["query"]["query"]);
        assert_eq!(query, text(&variable["definition"]), "{place}: definition and query differ");
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let Some((series, label)) = inner.and_then(|inner| inner.rsplit_once(',')) else {
            panic!("{place}: not label_values(series, label): {query}");
        };
        queries.push(Query { place, expression: series.trim().to_owned(), label: Some(label.trim().to_owned()) });
    }
    for annotation in list(&json["annotations"]["list"]) {
        let place = format!("{file}, annotation {}", annotation["name"]);
        queries.push(Query { place, expression: text(&annotation["expr"]).to_owned(), label: None });
    }
    assert!(queries.len() > 10, "{file} has {} queries", queries.len());
    queries
}

fn identifiers(expression: &str) -> impl Iterator<Item = &str> {
    expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

/// The metrics that an expression names.
fn names_of(expression: &str) -> BTreeSet<String> {
    let own = |name: &&str| name.starts_with("highwater_") || name.starts_with("process_");
    identifiers(expression).filter(own).map(str::to_owned).collect()
}

/// The variables that an expression names, without their `$`.
fn variables_of(expression: &str) -> BTreeSet<String> {
    expression.split('$').skip(1).filter_map(|rest| identifiers(rest).next()).map(str::to_owned).collect()
}

/// Every name for which an exposition has a type or a sample.
fn metric_names(exposition: &str) -> BTreeSet<String> {
    let line_name = |line: &str| line.trim_start_matches("# TYPE ").split(['{', ' ']).next().map(str::to_owned);
    exposition.lines().filter_map(line_name).collect()
}

/// The dashboards to which data links anywhere inside `json` lead.
fn links_in(json: &Value) -> Vec<&str> {
    match json {
        Value::String(link) => link.strip_prefix("/d/").and_then(|rest| rest.split('?').next()).into_iter().collect(),
        Value::Array(items) => items.iter().flat_map(links_in).collect(),
        Value::Object(fields) => fields.values().flat_map(links_in).collect(),
        _ => Vec::new(),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
