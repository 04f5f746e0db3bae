//! The shipped dashboards, read as Grafana reads them: complete, explained, and with data in every panel.
//!
//! Not covered: Grafana itself, which neither Debian nor a language registry carries. So the look of a panel is not
//! tested; that each of its queries returns data from a real Prometheus is.

use crate::daemon::Daemon;
use crate::helm::documents;
use crate::process::eventually;
use crate::scraper::{Sample, Scraper};
use crate::tools;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The units of Grafana that the dashboards use. A unit of one's own, such as `suffix:×`, cannot be scaled or translated.
const UNITS: [&str; 14] = [
    "none",
    "short",
    "percentunit",
    "bytes",
    "Bps",
    "s",
    "ms",
    "hertz",
    "watt",
    "watth",
    "joule",
    "celsius",
    "ops",
    "dateTimeFromNow",
];

/// Queries that return nothing on the nodes of `Nodes`: what they contain, the dashboard, and why.
const EMPTY: [(&str, &str, &str); 4] = [
    ("highwater_job_info", "variable \"namespace\"", "simulated jobs have no owner"),
    ("highwater_job_info", "variable \"user\"", "simulated jobs have no owner"),
    ("highwater_gpu_pod_info", "panel \"Pods now\"", "no kubelet is asked"),
    ("highwater_pod_gpu_memory_used_bytes", "panel \"Pods now\"", "no kubelet is asked"),
];

/// Tiles that are green for a daemon without a driver, because they are about the daemon itself.
const OF_THE_DAEMON: [&str; 4] = ["Nodes gone", "Daemons gone", "Refused, in range", "Versions"];

/// Panels that look further back than the page's range: what is gone for longer than that has nothing in it.
const BEYOND_THE_RANGE: [&str; 4] = ["\"Nodes gone\"", "\"Daemons gone\"", "\"Nodes\"", "\"Daemons\""];

/// A dashboard and where it was read from.
pub struct Dashboard {
    pub file: String,
    pub json: Value,
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
        assert_eq!(json["editable"], false, "{file}: its source is dashboards/generator");
        let required: BTreeSet<&str> = list(&json["__requires"]).iter().map(|needed| text(&needed["id"])).collect();
        let used = panels(&json).into_iter().map(|panel| text(&panel["type"])).filter(|kind| *kind != "row");
        for needed in used.chain(["grafana", "prometheus"]) {
            assert!(required.contains(needed), "{file}: __requires lacks {needed}");
        }
        let ids: Vec<i64> = panels(&json).iter().filter_map(|panel| panel["id"].as_i64()).collect();
        assert_eq!(
            ids.iter().collect::<BTreeSet<_>>().len(),
            panels(&json).len(),
            "{file}: every panel has its own id"
        );
    }
    assert!(uids.len() >= 5, "dashboards/ has {uids:?}");
}

#[test]
fn each_panel_explains_itself() {
    for Dashboard { file, json } in dashboards() {
        for panel in panels(&json).into_iter().filter(|panel| panel["type"] != "row") {
            let place = format!("{file}, panel {}", panel["title"]);
            assert!(!text(&panel["title"]).is_empty(), "{place}: title");
            assert!(text(&panel["description"]).len() > 20, "{place}: description");
            for unit in units_of(panel) {
                assert!(UNITS.contains(&unit), "{place}: unit {unit:?}");
            }
            assert!(panel["fieldConfig"]["defaults"]["thresholds"].is_object(), "{place}: thresholds");
            assert!(
                ["timeseries", "stat", "heatmap", "state-timeline", "bargauge", "table", "xychart"]
                    .contains(&text(&panel["type"])),
                "{place}: type"
            );
            for target in list(&panel["targets"]) {
                assert_eq!(target["datasource"]["uid"], "${datasource}", "{place}: data source");
            }
        }
    }
}

/// A quantile of classic buckets is anywhere inside of a bucket, which a reader must know.
#[test]
fn each_panel_with_a_quantile_says_how_exact_it_is() {
    let mut count = 0;
    for Dashboard { file, json } in dashboards() {
        for panel in panels(&json) {
            let is_quantile = |target: &Value| text(&target["expr"]).contains("histogram_quantile(");
            if list(&panel["targets"]).iter().any(is_quantile) {
                count += 1;
                let says = text(&panel["description"]).contains("with classic buckets within 29 %");
                assert!(says, "{file}, {}", panel["title"]);
            }
        }
    }
    assert!(count >= 3, "{count}");
}

/// The unit of a panel's values, and those of single columns.
fn units_of(panel: &Value) -> Vec<&str> {
    let own = list(&panel["fieldConfig"]["overrides"]).iter().flat_map(|over| list(&over["properties"]));
    let own = own.filter(|property| property["id"] == "unit").map(|property| text(&property["value"]));
    std::iter::once(text(&panel["fieldConfig"]["defaults"]["unit"])).chain(own).collect()
}

/// Grafana draws a missing value in the colour of the lowest threshold, unless a mapping has another.
#[test]
fn nothing_that_is_unknown_is_green() {
    for Dashboard { file, json } in dashboards() {
        for panel in panels(&json).into_iter().filter(|panel| panel["type"] != "row") {
            let place = format!("{file}, panel {}", panel["title"]);
            let defaults = &panel["fieldConfig"]["defaults"];
            assert_neutral(&place, &defaults["thresholds"], Some(&defaults["mappings"]));
            for over in list(&panel["fieldConfig"]["overrides"]) {
                let property = |id: &str| {
                    list(&over["properties"])
                        .iter()
                        .find(|property| property["id"] == id)
                        .map(|property| &property["value"])
                };
                let place = format!("{place}, {}", over["matcher"]["options"]);
                // An override replaces the panel's mappings, so it needs one of its own.
                match (property("thresholds"), property("mappings")) {
                    (None, None) => {}
                    (thresholds, mappings) => {
                        assert_neutral(&place, thresholds.unwrap_or(&defaults["thresholds"]), mappings)
                    }
                }
            }
        }
    }
}

fn assert_neutral(place: &str, thresholds: &Value, mappings: Option<&Value>) {
    let lowest = &list(&thresholds["steps"])[0];
    assert!(lowest["value"].is_null(), "{place}: {lowest}");
    assert!(["#7b8087", "text", "blue"].contains(&text(&lowest["color"])), "{place}: {lowest}");
    let mut missing = mappings.into_iter().flat_map(list).filter(|mapping| mapping["options"]["match"] == "null+nan");
    let mapping = missing.next().unwrap_or_else(|| panic!("{place}: a missing value has no mapping"));
    assert_eq!(mapping["options"]["result"]["color"], "#7b8087", "{place}: {mapping}");
}

/// A gauge with a window holds a few seconds before the scrape, and a point of a time panel stands for minutes.
#[test]
fn a_point_of_a_time_panel_holds_the_peaks_of_its_whole_interval() {
    let mut found = 0;
    for Dashboard { file, json } in dashboards() {
        let over_time = ["timeseries", "state-timeline", "heatmap", "xychart"];
        for panel in panels(&json).into_iter().filter(|panel| over_time.contains(&text(&panel["type"]))) {
            for target in list(&panel["targets"]) {
                let expression = text(&target["expr"]);
                for (gauge, function) in [
                    ("_max_bytes{", "max_over_time("),
                    ("_min_bytes{", "min_over_time("),
                    ("_avg_bytes{", "avg_over_time("),
                ] {
                    for (at, _) in expression.match_indices(gauge) {
                        let metric = expression[..at].rfind("highwater_").expect("one of its own");
                        let is_inside = expression[..metric].ends_with(function);
                        assert!(is_inside, "{file}, panel {}: not in {function}: {expression}", panel["title"]);
                        found += 1;
                    }
                }
            }
        }
    }
    assert!(found >= 10, "{found} gauges with a window");
}

/// A legend's total adds up the points of a curve. If each is the increase over `$__rate_interval`, which is longer than
/// the distance of the points, it counts everything several times.
#[test]
fn totals_do_not_count_twice() {
    let mut found = 0;
    for Dashboard { file, json } in dashboards() {
        for panel in panels(&json) {
            let place = format!("{file}, panel {}", panel["title"]);
            let expressions: Vec<&str> = list(&panel["targets"]).iter().map(|target| text(&target["expr"])).collect();
            if list(&panel["options"]["legend"]["calcs"]).iter().any(|reduce| reduce == "sum") {
                found += 1;
                for expression in &expressions {
                    let is_short = ranges_of(expression).iter().all(|range| *range == "$__interval");
                    assert!(is_short && !ranges_of(expression).is_empty(), "{place}: {expression}");
                }
            }
            // Shorter than two scrapes, a window contains no increase.
            if expressions.iter().any(|expression| ranges_of(expression).contains(&"$__interval")) {
                assert_eq!(panel["interval"], "2m", "{place}: the shortest interval");
            }
        }
    }
    assert!(found >= 4, "{found} panels have totals");
}

#[test]
fn they_are_what_the_generator_writes() {
    let mut check = Command::new("python3");
    let output = check
        .args(["-B", "dashboards/generate.py", "--check"])
        .current_dir(tools::root())
        .output()
        .expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What an engine without native histograms gets: the dashboards and the rules, in a folder.
pub fn classic(folder: &Path) {
    let mut write = Command::new("python3");
    let output = write
        .args(["-B", "dashboards/generate.py", "--classic"])
        .arg(folder)
        .current_dir(tools::root())
        .output()
        .expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn without_native_histograms_nothing_asks_for_their_sums() {
    let folder = tempfile::tempdir().expect("a folder");
    classic(folder.path());
    for (written, source) in [(folder.path().to_owned(), ""), (folder.path().join("alerts"), "alerts")] {
        let mut changed = 0;
        for file in std::fs::read_dir(&written).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            let Some(name) = file.file_name().filter(|_| file.is_file()) else { continue };
            let text = std::fs::read_to_string(&file).expect("readable");
            let before =
                std::fs::read_to_string(tools::root().join("dashboards").join(source).join(name)).expect("a source");
            assert!(!text.contains("histogram_sum") && !text.contains("histogram_count"), "{}", file.display());
            // What remains is the classic form, with its parentheses and the rest of the expression.
            assert_eq!(before.matches("_sum{").count(), text.matches("_sum{").count(), "{}", file.display());
            assert_eq!(
                text.matches('(').count(),
                text.matches(')').count() + before.matches('(').count() - before.matches(')').count()
            );
            changed += usize::from(text != before);
        }
        assert!(changed > 0, "{}: something reads both", written.display());
    }
}

/// The texts of findings are not in Prometheus, so the dashboards have them. A new kind must not be forgotten there.
#[test]
fn every_kind_of_finding_has_its_texts() {
    let script = "import json; from generator.findings import KINDS; print(json.dumps(KINDS))";
    let mut python = Command::new("python3");
    let output =
        python.args(["-B", "-c", script]).current_dir(tools::root().join("dashboards")).output().expect("python3 runs");
    let texts: BTreeMap<String, [String; 4]> = serde_json::from_slice(&output.stdout).expect("JSON");
    let source = std::fs::read_to_string(tools::root().join("core/src/detect/finding.rs")).expect("readable");
    let kinds =
        source.split_once("pub enum FindingKind {").and_then(|(_, rest)| rest.split_once('}')).expect("the kinds").0;
    let kinds: BTreeSet<&str> = kinds.split('"').skip(1).step_by(2).collect();
    assert_eq!(texts.keys().map(String::as_str).collect::<BTreeSet<_>>(), kinds);
    let documented = std::fs::read_to_string(tools::root().join("docs/findings.md")).expect("readable");
    let table = dashboards().into_iter().find(|dashboard| dashboard.file == "fleet.json").expect("fleet.json");
    let table = queries(&table.file, &table.json).into_iter().find(|query| query.place.contains("Findings that go on"));
    let expression = table.expect("its table").expression;
    for (kind, [what, why, advice, runbook]) in texts {
        assert!(documented.contains(&format!("| `{kind}` |")), "docs/findings.md has no {kind}");
        assert!(tools::root().join(format!("docs/runbooks/{runbook}.md")).is_file(), "{kind}: no runbook {runbook}");
        for text in [what, why, advice] {
            assert!(text.len() > 20 && expression.contains(&text), "{kind}: {text:?}");
        }
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn grafanas_linter_finds_nothing_but_what_is_excluded_with_a_reason() {
    let Some(linter) = tools::find_if_offered("dashboard-linter") else { return };
    let settings = tools::root().join("dashboards/.lint");
    let said = std::fs::read_to_string(&settings).expect("readable");
    assert_eq!(said.matches("-rule:").count(), said.matches("    reason: ").count(), "each exclusion has a reason");
    for file in files() {
        let mut lint = Command::new(&linter);
        let output = lint.args(["lint", "--strict", "--config"]).arg(&settings).arg(&file).output().expect("it runs");
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}: {}", file.display(), String::from_utf8_lossy(&said));
    }
}

#[test]
fn the_stack_mounts_what_there_is() {
    let folder = tools::root().join("dashboards/stack");
    let yaml = |path: &str| documents(&std::fs::read_to_string(folder.join(path)).expect("readable")).remove(0);
    let compose = yaml("compose.yaml");
    let services = compose["services"].as_object().expect("services");
    let mut inside: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (name, service) in services {
        for volume in list(&service["volumes"]) {
            let mut parts = text(volume).split(':');
            let (here, there) = (folder.join(parts.next().unwrap_or_default()), parts.next().unwrap_or_default());
            assert!(here.exists(), "{name}: {volume}");
            assert_eq!(parts.next(), Some("ro"), "{name}: {volume}");
            inside.insert(there.to_owned(), here);
        }
        for port in list(&service["ports"]) {
            assert!(text(port).starts_with("127.0.0.1:"), "{name}: {port} is open to other machines");
        }
    }
    assert!(folder.join(text(&compose["services"]["demo"]["build"]["context"])).join("Dockerfile").is_file());
    // What the files inside the containers name is mounted there, and services by their names.
    let rules = text(&yaml("prometheus.yml")["rule_files"][0]).to_owned();
    assert!(inside.contains_key(rules.trim_end_matches("/*.yaml")), "{rules}");
    let dashboards = text(&yaml("grafana/dashboards.yaml")["providers"][0]["options"]["path"]).to_owned();
    assert!(inside[&dashboards].join("fleet.json").is_file(), "{dashboards}");
    let home = text(&compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]);
    assert!(home.starts_with(&dashboards), "{home}");
    let source = text(&yaml("grafana/datasources.yaml")["datasources"][0]["url"]).to_owned();
    let host = source.trim_start_matches("http://").split(':').next().unwrap_or_default();
    assert!(services.contains_key(host), "{source}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_stacks_prometheus_scrapes_a_demo_and_evaluates_the_rules() {
    let Some(program) = tools::find("prometheus-3") else { return };
    let demo = Daemon::start(&["demo"]);
    let stack = std::fs::read_to_string(tools::root().join("dashboards/stack/prometheus.yml")).expect("readable");
    let rules = tools::root().join("dashboards/alerts").display().to_string();
    let configuration = stack.replace("demo:10450", demo.address()).replace("/etc/prometheus/highwater", &rules);
    assert!(configuration.contains(&rules) && configuration.contains(demo.address()), "{stack}");
    let scraper = Scraper::configured(&program, &configuration);
    let seen = || scraper.query("highwater:gpu_memory_headroom_bytes").len() == 4;
    eventually(Duration::from_secs(60), "the rules", || seen().then_some(()));
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
            for range in ranges_of(&expression) {
                let known = ["$__rate_interval", "$__range", "$__range:", "$__interval"];
                let is_beyond = range == "1d" && BEYOND_THE_RANGE.iter().any(|title| place.contains(title));
                assert!(known.contains(&range) || is_beyond, "{place}: a fixed range: {expression}");
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
            // Nobody listens at this port, so everything waits there.
            troubled: Daemon::start(&["serve", "--source", "sim:faults", "--set", "otlp.endpoint=http://127.0.0.1:9"]),
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
            throttle if throttle.contains("highwater_gpu_clocks_event_active") => &self.troubled,
            error if error.contains("highwater_source_error") || error.contains("highwater_nvml_up") => {
                &self.driverless
            }
            otlp if otlp.contains("highwater_otlp_") => &self.troubled,
            _ => &self.demo,
        }
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_query_returns_data_from_the_demo() {
    let (Some(debians), Some(newest)) = (tools::find("prometheus"), tools::find("prometheus-3")) else { return };
    let nodes = Nodes::start();
    let rules = tools::root().join("dashboards/alerts");
    let native = "    scrape_native_histograms: true\n";
    let scrapers = [(debians, ""), (newest, native)]
        .map(|(program, lines)| Scraper::judging(&program, &nodes.all(), lines, &rules));
    for scraper in scrapers {
        // Two minutes: each minute of the demo has a shortage of memory.
        scraper.wait_for_scrapes(nodes.all().len(), 120);
        every_query_returns_data(&nodes, &scraper);
        without_a_driver_nothing_is_green(&nodes, &scraper);
    }
    every_metric_is_exposed(&nodes);
}

fn every_query_returns_data(nodes: &Nodes, scraper: &Scraper) {
    let mut waiting = Vec::new();
    for Dashboard { file, json } in dashboards() {
        let queries = queries(&file, &json).into_iter().filter(|query| why_empty(query).is_none());
        for query in queries {
            let expression = substitute(&query.expression, nodes.with_data_for(&query.expression), scraper);
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
}

/// Without a driver, the state of the GPUs is unknown. So no tile may be green, and no table may report that all is well.
fn without_a_driver_nothing_is_green(nodes: &Nodes, scraper: &Scraper) {
    let mut tiles = 0;
    for Dashboard { file, json } in dashboards() {
        if text(&json["templating"]["list"][1]["name"]) != "instance" {
            continue;
        }
        for panel in panels(&json) {
            for target in list(&panel["targets"]).iter().filter(|target| target["instant"] == true) {
                let place = format!("{file}, panel {}", panel["title"]);
                let expression = substitute(text(&target["expr"]), &nodes.driverless, scraper);
                for Sample { labels, value } in scraper.query(&expression) {
                    assert!(labels.values().all(|label| label != "none"), "{place}: {labels:?}: {expression}");
                    let is_known = text(&panel["type"]) != "stat" || OF_THE_DAEMON.contains(&text(&panel["title"]));
                    assert!(is_known || color_of(panel, value) != "green", "{place}: {value}: {expression}");
                }
                tiles += usize::from(panel["type"] == "stat");
            }
        }
    }
    assert!(tiles >= 30, "{tiles} tiles");
}

/// The colour of a panel's value by its thresholds.
fn color_of(panel: &Value, value: f64) -> &str {
    let steps = list(&panel["fieldConfig"]["defaults"]["thresholds"]["steps"]);
    let reached = steps.iter().rfind(|step| step["value"].as_f64().is_none_or(|from| value >= from));
    text(&reached.expect("the lowest step")["color"])
}

/// Why a query need not return data.
fn why_empty(query: &Query) -> Option<&'static str> {
    let matches =
        |(part, place, _): &&(&str, &str, &str)| query.expression.contains(part) && query.place.contains(place);
    EMPTY.iter().find(matches).map(|(_, _, reason)| *reason)
}

/// With an `or`, a query can return data although it names a metric that does not exist.
fn every_metric_is_exposed(nodes: &Nodes) {
    let known = metric_names(&nodes.all().map(|node| node.get("/metrics")).concat());
    for Dashboard { file, json } in dashboards() {
        for query in queries(&file, &json).into_iter().filter(|query| why_empty(query).is_none()) {
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
        jobs.iter().filter_map(|job| job.labels.get("training_job")).map(String::as_str).collect();
    let jobs: Vec<&str> = jobs.into_iter().collect();
    let values = [
        ("$__rate_interval", "10s"),
        ("$__range_s", "3600"),
        ("$__range", "1h"),
        ("$__interval", "30s"),
        ("$instance", instance),
        ("$node", instance),
        ("$job", &jobs.join("|")),
        ("$window", "15s"),
    ];
    filled(expression, &values)
}

/// `expression` as Grafana sends it: with these values of variables, and with all of every other.
pub fn filled(expression: &str, values: &[(&str, &str)]) -> String {
    let all = ["$instance", "$node_gpu", "$gpu", "$rank", "$phase"].map(|name| (name, ".+"));
    // Of what may have none.
    let any = ["$namespace", "$user"].map(|name| (name, ".*"));
    let others = all.into_iter().chain(any).filter(|(name, _)| values.iter().all(|(chosen, _)| chosen != name));
    let mut names: Vec<_> = values.iter().copied().chain(others).collect();
    // One name is the begin of another.
    names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
    names.into_iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value))
}

/// All of them, sorted by the names of their files.
pub fn dashboards() -> Vec<Dashboard> {
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
pub fn panels(json: &Value) -> Vec<&Value> {
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

/// The variables that an expression names, without their `$`. `$1` is what a regular expression found.
fn variables_of(expression: &str) -> BTreeSet<String> {
    let names = expression.split('$').skip(1).filter_map(|rest| identifiers(rest).next());
    names.filter(|name| name.starts_with(|c: char| c == '_' || c.is_alphabetic())).map(str::to_owned).collect()
}

/// The ranges of an expression. A `[` after `(` is inside a regular expression.
fn ranges_of(expression: &str) -> Vec<&str> {
    let begins = expression.match_indices('[').filter(|(at, _)| !expression[..*at].ends_with('('));
    begins.filter_map(|(at, _)| expression[at + 1..].split_once(']')).map(|(range, _)| range).collect()
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

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
