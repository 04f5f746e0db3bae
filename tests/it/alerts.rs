//! The shipped alerts, read as Prometheus reads them: each is complete, explained, and tested to fire and not to fire.
//!
//! Not covered: whether a threshold suits a site. Other tests cover that the daemon raises the findings behind alerts.

mod delivery;
mod fleet;

use crate::helm::documents;
use crate::{alertmanager, tools};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Series that Prometheus itself creates.
const PROMETHEUS_OWN: [&str; 1] = ["up"];

/// One rule and its file.
struct Rule {
    file: String,
    json: Value,
}

impl Rule {
    fn alert(&self) -> Option<&str> {
        self.json["alert"].as_str()
    }

    fn text(&self, path: &str) -> &str {
        self.json.pointer(path).and_then(Value::as_str).unwrap_or_default()
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn promtool_finds_nothing_to_say_about_the_rules() {
    let Some(promtool) = tools::find("promtool") else { return };
    let said = succeeds(Command::new(promtool).args(["check", "rules", "--lint=all", "--lint-fatal"]).args(files()));
    assert_eq!(said.matches("SUCCESS").count(), files().len(), "{said}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn each_alert_fires_and_stays_silent_where_it_should() {
    let Some(promtool) = tools::find("promtool") else { return };
    let said = succeeds(Command::new(promtool).args(["test", "rules"]).args(tests()));
    assert_eq!(said.matches("SUCCESS").count(), tests().len(), "{said}");
}

#[test]
fn each_alert_is_tested_both_ways() {
    let mut tested: BTreeMap<String, BTreeSet<bool>> = BTreeMap::new();
    for file in tests() {
        let json = documents(&read(&file)).remove(0);
        let cases = list(&json["tests"]).iter().flat_map(|test| list(&test["alert_rule_test"]));
        for case in cases {
            let name = case["alertname"].as_str().expect("an alertname").to_owned();
            tested.entry(name).or_default().insert(list(&case["exp_alerts"]).is_empty());
        }
    }
    let names: BTreeSet<String> = alerts().iter().filter_map(|rule| rule.alert().map(str::to_owned)).collect();
    assert_eq!(tested.keys().cloned().collect::<BTreeSet<_>>(), names, "the alerts and their tests correspond");
    for (name, ways) in tested {
        assert_eq!(
            ways.len(),
            2,
            "{name} is only tested {}",
            if ways.contains(&true) { "not to fire" } else { "to fire" }
        );
    }
}

/// The rendered text of each alert is tested as a whole, because a valid template can still render a wrong text.
#[test]
fn the_whole_text_of_each_alert_is_tested() {
    let mut read_whole = BTreeSet::new();
    for file in tests() {
        let json = documents(&read(&file)).remove(0);
        for case in list(&json["tests"]).iter().flat_map(|test| list(&test["alert_rule_test"])) {
            let name = case["alertname"].as_str().expect("an alertname");
            for expected in list(&case["exp_alerts"]) {
                let text = |part: &str| expected["exp_annotations"][part].as_str().unwrap_or_default();
                for part in ["summary", "description", "runbook"] {
                    assert!(!text(part).is_empty() && !text(part).contains("{{"), "{}, {name}: {part}", file.display());
                }
                read_whole.insert(name.to_owned());
            }
        }
    }
    let names: BTreeSet<String> = alerts().iter().filter_map(|rule| rule.alert().map(str::to_owned)).collect();
    assert_eq!(read_whole, names, "alerts whose text is tested");
}

#[test]
fn where_the_repository_has_an_address_alerts_link_to_their_runbooks() {
    let made = |runbooks: &str| {
        let mut make = Command::new("make");
        make.args(["-s", "rules", &format!("RUNBOOKS={runbooks}")]).current_dir(tools::root());
        make.output().expect("make runs")
    };
    assert!(!made("docs").status.success(), "a path is no address");
    assert!(made("https://git.example/highwater/").status.success());
    for path in files() {
        let linked = read(&tools::root().join("target/alerts").join(path.file_name().expect("a file")));
        let links = linked.matches("runbook_url: https://git.example/highwater/docs/runbooks/").count();
        assert_eq!((links, linked.matches("runbook: ").count()), (read(&path).matches("runbook: ").count(), 0));
    }
}

#[test]
fn each_alert_explains_itself() {
    let table = read(&tools::root().join("docs/alerts.md"));
    let mut names = BTreeSet::new();
    for rule in alerts() {
        let name = rule.alert().expect("an alert").to_owned();
        let (severity, held) = (rule.text("/labels/severity"), rule.text("/for"));
        assert!(["info", "warning", "critical"].contains(&severity), "{name}: severity {severity:?}");
        // What has happened once and for all needs no time to last.
        let is_event = name.starts_with("HighwaterXid") || name.ends_with("OutOfMemory");
        assert!(!held.is_empty() || is_event, "{name} fires at once");
        assert!(rule.text("/annotations/summary").len() > 20, "{name}: summary");
        let description = rule.text("/annotations/description");
        let numberless = rule.text("/expr").starts_with("absent(");
        assert!(description.contains("{{") || numberless, "{name}: no number in {description:?}");
        // A reader cannot follow a path as a link, and the repository has no address. Who has one makes links of these.
        assert_eq!(rule.text("/annotations/runbook_url"), "", "{name}");
        let link = rule.text("/annotations/runbook");
        assert!(link.starts_with("docs/runbooks/"), "{name}: runbook {link:?}");
        assert!(read(&tools::root().join(link)).contains(&name), "{link} is not about {name}");
        let row = table.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("docs/alerts.md has no row for {name}"));
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(columns[2..4], [severity, held], "docs/alerts.md, {name}");
        assert!(row.contains(link.trim_start_matches("docs/")), "docs/alerts.md, {name}: {link}");
        assert!(names.insert(name.clone()), "{}: two alerts are called {name}", rule.file);
    }
    assert!(names.len() > 10, "{names:?}");
}

#[test]
fn each_runbook_belongs_to_an_alert_and_can_be_followed() {
    let linked: BTreeSet<String> = alerts().iter().map(|rule| rule.text("/annotations/runbook").to_owned()).collect();
    for path in in_directory("docs/runbooks", ".md") {
        let name = format!("docs/runbooks/{}", path.file_name().expect("a file").to_string_lossy());
        let text = read(&path);
        let says_why_not = text.split_whitespace().collect::<Vec<_>>().join(" ").contains("There is no alert: ");
        assert!(linked.contains(&name) != says_why_not, "{name} belongs to no alert, or says so and belongs to one");
        for part in ["## What it means", "## Confirm", "## Do", "## Ignore it when"] {
            assert!(text.contains(part), "{name} has no {part}");
        }
        assert!(text.matches("```promql\n").count() >= 2, "{name} has too few queries");
        for target in text.split("](").skip(1).filter_map(|rest| rest.split_once(')')) {
            assert!(path.with_file_name(target.0).is_file(), "{name} links to {}", target.0);
        }
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_queries_of_the_runbooks_are_promql_over_known_metrics() {
    let known = known_names();
    let mut rules = String::from("groups:\n  - name: runbooks\n    rules:\n");
    for path in in_directory("docs/runbooks", ".md") {
        for query in read(&path).split("```promql\n").skip(1).filter_map(|rest| rest.split_once("```")) {
            for name in names_of(query.0) {
                assert!(known.contains(&name), "{}: {name} in {}", path.display(), query.0);
            }
            rules +=
                &format!("      - record: runbook:query{}\n        expr: {}\n", rules.len(), json_text(query.0.trim()));
        }
    }
    let Some(promtool) = tools::find("promtool") else { return };
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), rules).expect("writable");
    succeeds(Command::new(promtool).args(["check", "rules"]).arg(file.path()));
}

#[test]
fn every_metric_of_the_rules_is_in_the_catalogue_or_recorded() {
    let (known, mut used) = (known_names(), BTreeSet::new());
    for rule in rules() {
        let place = rule.alert().unwrap_or_else(|| rule.text("/record"));
        let description = rule.text("/annotations/description");
        for name in names_of(rule.text("/expr")).into_iter().chain(names_of(description)) {
            assert!(known.contains(&name), "{}, {place}: {name} is neither in docs/metrics.md nor recorded", rule.file);
            used.insert(name);
        }
    }
    for dashboard in crate::dashboards::files() {
        used.extend(names_of(&read(&dashboard)));
    }
    for record in recorded() {
        assert!(used.contains(&record), "{record} is recorded and not used");
    }
}

#[test]
fn each_xid_has_one_alert_and_its_line_in_the_runbook() {
    let codes = |alert: &str, matcher: &str| -> BTreeSet<u32> {
        let rules = alerts();
        let rule = rules.iter().find(|rule| rule.alert() == Some(alert)).expect("the alert");
        let list = rule.text("/expr").split_once(&format!("xid{matcher}\"")).expect("a matcher").1;
        list.split_once('"').expect("it ends").0.split('|').map(|code| code.parse().expect("a number")).collect()
    };
    let critical = codes("HighwaterXidCritical", "=~");
    let application = codes("HighwaterXidApplication", "=~");
    assert!(critical.is_disjoint(&application));
    assert_eq!(codes("HighwaterXid", "!~"), &critical | &application, "the third alert has all other codes");
    let runbook = read(&tools::root().join("docs/runbooks/xid.md"));
    let row_codes = |row: &str| numbers(row.split('|').nth(2).unwrap_or_default());
    let mut class = "";
    let mut documented: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
    for row in runbook.lines().filter(|line| line.starts_with('|')) {
        if let Some(name) =
            row.split('|').nth(1).map(|cell| cell.trim().trim_matches('`')).filter(|cell| !cell.is_empty())
        {
            class = name;
        }
        documented.entry(class).or_default().extend(row_codes(row));
    }
    assert_eq!(documented["HighwaterXidCritical"], critical, "docs/runbooks/xid.md");
    assert_eq!(documented["HighwaterXidApplication"], application, "docs/runbooks/xid.md");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn alertmanager_takes_the_configuration_of_the_documentation() {
    let configuration = alertmanager::documented_configuration();
    let names: BTreeSet<String> = alerts().iter().filter_map(|rule| rule.alert().map(str::to_owned)).collect();
    for word in configuration.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| word.starts_with("Highwater")) {
        assert!(word == "Highwater" || names.contains(word), "docs/alerts.md inhibits {word}, which is no alert");
    }
    let Some(amtool) = tools::find("amtool") else { return };
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), configuration).expect("writable");
    succeeds(Command::new(amtool).arg("check-config").arg(file.path()));
}

/// The rule files, sorted.
pub fn files() -> Vec<PathBuf> {
    in_directory("dashboards/alerts", ".yaml")
}

fn tests() -> Vec<PathBuf> {
    in_directory("tests/data/alerts", ".test.yaml")
}

fn rules() -> Vec<Rule> {
    let mut rules = Vec::new();
    for path in files() {
        let file = path.file_name().expect("a file").to_string_lossy().into_owned();
        let json = documents(&read(&path)).remove(0);
        let of_groups = list(&json["groups"]).iter().flat_map(|group| list(&group["rules"]));
        rules.extend(of_groups.map(|rule| Rule { file: file.clone(), json: rule.clone() }));
    }
    rules
}

fn alerts() -> Vec<Rule> {
    rules().into_iter().filter(|rule| rule.alert().is_some()).collect()
}

fn recorded() -> BTreeSet<String> {
    rules().iter().filter_map(|rule| rule.json["record"].as_str().map(str::to_owned)).collect()
}

/// Every series name in docs/metrics.md, those of histograms included.
fn catalogue() -> BTreeSet<String> {
    let text = read(&tools::root().join("docs/metrics.md"));
    let mut names = BTreeSet::new();
    for row in text.lines().filter_map(|line| line.strip_prefix("| `")) {
        let Some((name, rest)) = row.split_once("` | ") else { continue };
        // A native histogram is one series without a suffix.
        let suffixes: &[&str] = if rest.starts_with("histogram") { &["", "_bucket", "_sum", "_count"] } else { &[""] };
        names.extend(suffixes.iter().map(|suffix| format!("{name}{suffix}")));
    }
    assert!(names.len() > 50, "docs/metrics.md has {names:?}");
    names
}

fn known_names() -> BTreeSet<String> {
    let extra = PROMETHEUS_OWN.into_iter().map(str::to_owned);
    catalogue().into_iter().chain(recorded()).chain(extra).collect()
}

/// The series that an expression, or the queries in a template, use: those of highwater, of its process, and recorded.
fn names_of(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    let own = |word: &&str| {
        word.starts_with("highwater_")
            || word.starts_with("process_")
            || word.starts_with("highwater:")
            || *word == "up"
    };
    words.filter(own).map(str::to_owned).collect()
}

/// The numbers in `text`; `144–150` stands for all seven.
fn numbers(text: &str) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    for part in text.split(',').map(str::trim) {
        let mut ends = part.split('–').map_while(|end| end.parse::<u32>().ok());
        if let Some(first) = ends.next() {
            found.extend(first..=ends.next().unwrap_or(first));
        }
    }
    found
}

fn in_directory(directory: &str, ending: &str) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(tools::root().join(directory)).unwrap_or_else(|error| panic!("{directory}: {error}"));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(ending));
    files.sort();
    assert!(!files.is_empty(), "{directory} has no {ending}");
    files
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs it and returns everything that it printed; panics with that if it fails.
fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

fn json_text(text: &str) -> String {
    Value::from(text).to_string()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
