//! An invalid setting is reported with its key, its file and its line; all errors are reported at once.

use crate::daemon::command;
use expect_test::expect;
use std::io::Write as _;

fn check(extension: &str, text: &str, arguments: &[&str], environment: &[(&str, &str)]) -> (bool, String) {
    let mut file = tempfile::Builder::new().suffix(extension).tempfile().expect("a file");
    file.write_all(text.as_bytes()).expect("written");
    let path = file.path().display().to_string();
    let mut command = command();
    command.args(["serve", "--check-config", "--config", &path]).args(arguments).envs(environment.iter().copied());
    let output = command.output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stderr).replace(&path, "FILE");
    (output.status.success(), printed)
}

#[test]
fn every_fault_is_reported_with_its_place() {
    let toml = "listen = \"nowhere\"\ncolour = 1\n\n[sampling]\nperiod = \"1 parsec\"\nbudget = 2\n\n[ring]\nretention = \"1s\"\n";
    let (valid, printed) =
        check(".toml", toml, &["--set", "metrics.processes=perhaps"], &[("HIGHWATER_ANNOTATIONS_MAX_JOBS", "0")]);
    assert!(!valid);
    expect![[r#"
        highwater: environment variable HIGHWATER_ANNOTATIONS_MAX_JOBS: annotations.max_jobs: `0` is not between 1 and 10000
        FILE:2: colour: is not a setting
        FILE:1: listen: `nowhere` is not ADDRESS:PORT, such as 127.0.0.1:10450
        --set metrics.processes: `perhaps` is neither true nor false
        FILE:9: ring.retention: `1s` is not between 60s and 86400s
        FILE:6: sampling.budget: `2` is not above 0 and at most 1
        FILE:5: sampling.period: `1 parsec`: `parsec` is no known unit; known units are ns, us, ms, s, m (or min), h, d
    "#]]
    .assert_eq(&printed);
}

#[test]
fn what_jobs_set_for_their_client_is_no_setting_and_no_fault() {
    let of_jobs =
        ["JOB", "URL", "TOKEN", "TOKEN_FILE", "DISABLED", "ANNOTATIONS_SOCKET"].map(|name| format!("HIGHWATER_{name}"));
    let environment: Vec<_> = of_jobs.iter().map(|name| (name.as_str(), "/x")).collect();
    let (valid, printed) = check(".toml", "", &[], &environment);
    assert!(valid, "{printed}");
}

#[test]
fn files_that_settings_point_to_are_read_too_and_every_fault_is_reported() {
    let toml = "source = \"sim:nope\"\n[annotations]\ntoken_file = \"/nope/token\"\n";
    let (valid, printed) = check(".toml", toml, &[], &[]);
    assert!(!valid);
    expect![[r#"
        highwater: `nope` is neither a shipped scenario (demo, spike, faults, pipeline) nor a file that can be read: No such file or directory (os error 2)
        annotations.token_file: cannot read /nope/token: No such file or directory (os error 2)
    "#]]
    .assert_eq(&printed);
    let (valid, printed) = check(".toml", "source = \"replay:/nope\"\n", &[], &[]);
    assert!(!valid && printed.contains("/nope"), "{printed}");
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector.example:4318"),
        ("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", "/nope/a.pem"),
        ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/nope/b.pem"),
    ];
    let (valid, printed) = check(".toml", "", &[], &variables);
    assert!(!valid && printed.contains("/nope/a.pem") && printed.contains("/nope/b.pem"), "{printed}");
}

#[test]
fn an_endpoint_that_is_no_url_is_reported_where_it_was_given() {
    let (valid, printed) = check(".toml", "", &["--set", "otlp.endpoint=bogus"], &[]);
    assert!(!valid && printed.starts_with("highwater: --set otlp.endpoint: `bogus`"), "{printed}");
    assert_eq!(printed.lines().count(), 1, "{printed}");
    let (valid, printed) = check(".toml", "[otlp]\nendpoint = \"bogus\"\n", &[], &[]);
    assert!(!valid && printed.starts_with("highwater: FILE:2: otlp.endpoint: `bogus"), "{printed}");
    let (valid, printed) = check(".toml", "", &[], &[("HIGHWATER_OTLP_ENDPOINT", "bogus")]);
    assert!(!valid && printed.starts_with("highwater: environment variable HIGHWATER_OTLP_ENDPOINT: "), "{printed}");
}

#[test]
fn a_queue_folder_that_cannot_be_used_is_a_fault_and_none_is_made() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let (file, open) = (folder.path().join("file"), folder.path().join("open"));
    std::fs::write(&file, "").expect("written");
    std::fs::create_dir(&open).expect("made");
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).expect("set");
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");
    let of = |path: &std::path::Path| {
        check(".toml", "", &["--set", &format!("otlp.queue_dir={}", path.display())], &[endpoint])
    };
    for bad in [&file, &file.join("queue"), &open] {
        let (valid, printed) = of(bad);
        assert!(!valid && printed.contains("otlp.queue_dir"), "{}: {printed}", bad.display());
    }
    let missing = folder.path().join("missing");
    assert!(of(&missing).0 && !missing.exists());
}

#[test]
fn yaml_is_read_and_its_faults_have_lines_too() {
    let (valid, printed) = check(".yaml", "sampling:\n  period: 2ms\n  perod: 1ms\n", &[], &[]);
    assert!(!valid);
    expect![[r#"
        highwater: FILE:3: sampling.perod: is not a setting
    "#]]
    .assert_eq(&printed);
    let (valid, printed) = check(".yaml", "sampling:\n  period: 2ms\nlisten: \"127.0.0.1:0\"\n", &[], &[]);
    assert!(valid, "{printed}");
}

#[test]
fn lists_are_taken_as_lists() {
    let toml = "[web]\nhosts = [\"gpu-7.example\", \"gpu-7\"]\n";
    let yaml = "web:\n  hosts:\n    - gpu-7.example\n    - gpu-7\n";
    for (extension, text) in [(".toml", toml), (".yaml", yaml)] {
        let (valid, printed) = check(extension, text, &[], &[]);
        assert!(valid, "{printed}");
    }
    let (valid, printed) = check(".toml", "[web]\nhosts = [\"a\", \"not a host\"]\n", &[], &[]);
    assert!(!valid && printed.contains("FILE:2: web.hosts: `a,not a host`"), "{printed}");
    let (valid, printed) =
        check(".toml", "[web]\nhosts = [[\"a\"]]\n[sampling]\nperiod = [\"1ms\", \"2ms\"]\n", &[], &[]);
    assert!(
        !valid && printed.contains("web.hosts: is neither a single value nor a list of single values"),
        "{printed}"
    );
    assert!(printed.contains("sampling.period: `1ms,2ms`"), "{printed}");
}

#[test]
fn a_file_that_is_no_toml_and_an_unknown_variable_are_reported() {
    let (valid, printed) = check(".toml", "listen = \n", &[], &[]);
    assert!(!valid && printed.contains("FILE") && printed.contains("line 1"), "{printed}");
    let (valid, printed) = check(".toml", "", &[], &[("HIGHWATER_LISTN", "x")]);
    assert!(!valid && printed.contains("HIGHWATER_LISTN"), "{printed}");
}

#[test]
fn flags_go_before_the_environment_and_that_before_the_file() {
    let file = "[sampling]\nperiod = \"not a time\"\n";
    let (valid, printed) = check(".toml", file, &[], &[("HIGHWATER_SAMPLING_PERIOD", "2ms")]);
    assert!(valid, "{printed}");
    let (valid, printed) =
        check(".toml", file, &["--set", "sampling.period=2ms"], &[("HIGHWATER_SAMPLING_PERIOD", "x")]);
    assert!(valid, "{printed}");
}

/// A setting that does not exist is refused before any pod is replaced: the chart's schema names all that do. `UPDATE_EXPECT=1` writes it.
#[test]
fn the_charts_schema_names_every_setting() {
    use highwater::config::KEYS;
    use serde_json::{Map, Value, json};
    let value = json!({});
    let object = |properties: Map<String, Value>| json!({"type": "object", "additionalProperties": false, "properties": properties});
    let mut all = Map::new();
    for key in KEYS {
        match key.name.split_once('.') {
            None => drop(all.insert(key.name.to_owned(), value.clone())),
            Some((table, name)) => {
                let table = all.entry(table).or_insert_with(|| object(Map::new()));
                table["properties"][name] = value.clone();
            }
        }
    }
    let expected = object(all);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/helm/highwater/values.schema.json");
    let text = std::fs::read_to_string(path).expect("the schema");
    let schema: Value = serde_json::from_str(&text).expect("JSON");
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        let (before, rest) = text.split_once("\n    \"config\": ").expect("config");
        let (_, after) = rest.split_once("\n    },").expect("its end");
        let lines = serde_json::to_string_pretty(&expected).expect("JSON").replace('\n', "\n    ");
        std::fs::write(path, format!("{before}\n    \"config\": {lines},{after}")).expect("written");
        return;
    }
    assert_eq!(schema["properties"]["config"], expected, "UPDATE_EXPECT=1 writes it");
}

/// The commented example contains all defaults, and nothing else.
#[test]
fn the_example_file_is_the_defaults() {
    use highwater::config::{KEYS, SettingLayers, Settings, load};
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config/highwater.toml");
    let mut expected = String::from(
        "# Every setting of highwater with its default. Each can also be given as HIGHWATER_<KEY> or --set KEY=VALUE.\n",
    );
    let mut section = "";
    for key in KEYS {
        let (table, name) = key.name.split_once('.').unwrap_or(("", key.name));
        if table != section {
            expected += &format!("\n[{table}]\n");
            section = table;
        }
        let plain = key.default.parse::<f64>().is_ok() || key.default.parse::<bool>().is_ok();
        let value = if plain { key.default.to_owned() } else { format!("\"{}\"", key.default) };
        let comment = if key.default.is_empty() { "# " } else { "" };
        expected += &format!("# {}\n{comment}{name} = {value}\n", key.help);
    }
    expect_test::expect_file![path].assert_eq(&expected);
    let loaded =
        load(&SettingLayers { file: Some(path.into()), ..SettingLayers::default() }).expect("the example is valid");
    let mut defaults =
        Settings { annotations_socket: Some("/run/highwater/annotations.sock".into()), ..Settings::default() };
    defaults.captures.directory = Some("/var/lib/highwater/captures".into());
    assert_eq!(loaded, defaults);
}
