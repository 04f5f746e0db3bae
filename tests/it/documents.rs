//! Commands and snippets of the documents, executed as they stand there; those that need a GPU as far as their
//! arguments. The alerts' configurations and queries are with `alerts` and `alertmanager`, the scenarios with the
//! simulator's parser, the README's Python with `annotations`.

use crate::daemon::{Daemon, command};
use crate::process::{Process, eventually};
use crate::tools::{self, root};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use tempfile::TempDir;

/// How long a command may take on a busy machine; the demo shows its first findings after some twenty seconds.
const SOON: Duration = Duration::from_secs(90);
/// The address that the documents' commands use.
const DOCUMENTED_PORT: &str = "localhost:10450";
/// Runs a Python script up to where its arguments have been accepted. PyTorch need not be there.
const ONLY_ARGUMENTS: &str = "
import argparse, importlib.util, os, runpy, sys, unittest.mock
accept = argparse.ArgumentParser.parse_args
def only(self, *a, **k):
    accept(self, *a, **k)
    print('accepted')
    sys.exit(0)
argparse.ArgumentParser.parse_args = only
if importlib.util.find_spec('torch') is None:
    for name in ['torch', 'torch.distributed', 'torch.nn', 'torch.nn.functional', 'torch.nn.parallel']:
        sys.modules[name] = unittest.mock.MagicMock()
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name='__main__')
";

/// A fenced block of a document.
struct Block {
    /// Path from the root, and line.
    place: String,
    document: String,
    language: String,
    text: String,
}

/// Every document of the repository.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("listed").map(|entry| entry.expect("an entry")) {
            let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
            if entry.file_type().expect("a type").is_dir() && !name.starts_with('.') && name != "target" {
                folders.push(path);
            } else if name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn blocks() -> Vec<Block> {
    documents().iter().flat_map(|path| blocks_of(path)).collect()
}

fn blocks_of(path: &Path) -> Vec<Block> {
    let document = path.strip_prefix(root()).expect("below it").display().to_string();
    let (mut blocks, mut open): (Vec<Block>, Option<Block>) = (Vec::new(), None);
    for (number, line) in (1..).zip(fs::read_to_string(path).expect("text").lines()) {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(language), None) => {
                let (place, document) = (format!("{document}:{number}"), document.clone());
                open = Some(Block { place, document, language: language.to_owned(), text: String::new() });
            }
            (None, Some(block)) => block.text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{document}: a block does not end");
    blocks
}

/// The one block of this language in a document.
fn block(document: &str, language: &str) -> String {
    let mut found = blocks_of(&root().join(document)).into_iter().filter(|block| block.language == language);
    let text = found.next().unwrap_or_else(|| panic!("{document} has no block of {language}")).text;
    assert!(found.next().is_none(), "{document} has two blocks of {language}");
    text
}

/// The commands of a block of `sh`: lines, joined where an argument goes over several, without comments.
fn commands(text: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut open = String::new();
    for line in text.lines() {
        open += line;
        if open.matches('"').count() % 2 == 1 {
            open.push('\n');
            continue;
        }
        let command = std::mem::take(&mut open);
        commands.push(command.split(" #").next().unwrap_or_default().trim().to_owned());
    }
    assert!(open.is_empty(), "a quote is open: {text}");
    commands.retain(|command| !command.is_empty());
    commands
}

/// A shell in the repository's root that finds the built `highwater`, and `curl` that finds `daemon` at the documented port.
fn shell(line: &str, folder: &TempDir, address: &str) -> Command {
    fs::write(
        folder.path().join(".curlrc"),
        format!("silent\nshow-error\nconnect-to = \"{DOCUMENTED_PORT}:{address}\"\n"),
    )
    .expect("written");
    let program = Path::new(env!("CARGO_BIN_EXE_highwater")).parent().expect("a folder");
    let path = std::env::join_paths(
        [program.to_owned()].into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    let mut shell = Command::new("sh");
    for (name, _) in command().get_envs() {
        shell.env_remove(name);
    }
    shell.args(["-ec", line]).current_dir(root()).env("PATH", path.expect("a path")).env("CURL_HOME", folder.path());
    shell
}

fn succeeds(mut command: Command, what: &str) -> String {
    let Output { status, stdout, stderr } = command.output().expect("it runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{what}: {stdout}{stderr}");
    stdout
}

#[test]
fn every_block_has_a_language_that_is_tested() {
    // A drawing, figures of a run on a GPU, and what `run` prints (see `records`).
    let figures = ["ARCHITECTURE.md", "docs/performance.md", "docs/recordings.md"];
    for block in blocks() {
        let tested = match &*block.language {
            "sh" | "promql" | "toml" => true,
            "yaml" => block.document == "docs/alerts.md",
            "console" => ["README.md", "docs/recordings.md"].contains(&&*block.document),
            // python/tests/test_documents.py runs those of the client.
            "python" => {
                ["README.md", "docs/recordings.md", "docs/python.md", "python/README.md"].contains(&&*block.document)
            }
            "sql" => block.document == "docs/recordings.md",
            // The same file runs it and compares what it prints.
            "pycon" => block.document == "docs/python.md",
            // `the_documented_record_of_a_layer_is_accepted` sends the latter's first; the intake's tests make its second.
            "json" => ["docs/scenarios.md", "docs/annotations.md"].contains(&&*block.document),
            "text" => figures.contains(&&*block.document),
            _ => false,
        };
        assert!(tested, "{}: nothing executes this block of `{}`", block.place, block.language);
        assert!(block.language != "promql" || block.document.starts_with("docs/runbooks/"), "{}", block.place);
        assert!(block.language != "toml" || block.document == "docs/scenarios.md", "{}", block.place);
    }
}

/// `a line with 3.5 of 17` is `a line with # of #`.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    for character in line.trim().chars() {
        let number = character.is_ascii_digit() || (character == '.' && shape.ends_with('#'));
        if !number {
            shape.push(character);
        } else if !shape.ends_with('#') {
            shape.push('#');
        }
    }
    shape
}

#[test]
fn the_readmes_commands_print_on_the_demo_what_it_shows() {
    let folder = tempfile::tempdir().expect("a folder");
    let demo = {
        let mut demo = command();
        demo.args(["demo", "--listen", "127.0.0.1:0"]).env("TMPDIR", folder.path());
        Process::start(demo)
    };
    let address = demo.wait_for(SOON, "line `listening on`", |line| {
        Some(line.split_once("listening on http://")?.1.trim_end_matches('/').to_owned())
    });
    let text = block("README.md", "console");
    let examples: Vec<&str> = text.split("$ ").skip(1).collect();
    assert!(examples.len() >= 2, "{text}");
    for example in examples {
        let (line, shown) = example.split_once('\n').expect("a command and what it prints");
        let wanted: Vec<String> = shown.lines().filter(|line| *line != "…").map(shape).collect();
        assert!(!wanted.is_empty(), "{example}");
        let mut printed = BTreeSet::new();
        eventually(SOON, &format!("{line} prints all of {wanted:#?}"), || {
            let output = shell(line, &folder, &address).output().expect("it runs");
            printed.extend(String::from_utf8_lossy(&output.stdout).lines().map(shape));
            wanted.iter().all(|line| printed.contains(line)).then_some(())
        });
    }
}

/// Commands of blocks of `sh`, by program.
#[test]
fn every_command_of_the_documents_is_accepted() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Daemon::start(&["serve", "--source", "sim:demo"]).ready();
    let mut seen = BTreeSet::new();
    for block in blocks().iter().filter(|block| block.language == "sh") {
        for line in commands(&block.text) {
            for command in line.split(" && ") {
                let words = command.split_whitespace().skip_while(|word| word.contains('=')).collect::<Vec<_>>();
                let what = format!("{}: {command}", block.place);
                seen.insert(words[0].to_owned());
                match words[0] {
                    "make" => is_a_target(words[1], &what),
                    "cargo" => is_built_elsewhere(command, &what),
                    "highwater" => runs(command, &folder, &what),
                    "curl" => {
                        let printed = succeeds(shell(command, &folder, daemon.address()), &what);
                        let answer: Value = serde_json::from_str(&printed).expect("JSON");
                        assert_eq!(answer["accepted"], json!(1), "{what}: {answer}");
                    }
                    "python3" => takes_its_arguments(&words[1..], &what),
                    "cc" => {
                        let here = command.replace("-o nvml_floor", "-o \"$CURL_HOME/nvml_floor\"");
                        succeeds(shell(&here, &folder, ""), &what);
                    }
                    "./nvml_floor" => knows_its_command(&folder, &words[1..], &what),
                    // `the_queries_of_a_capture_return_rows` executes it.
                    "sqlite3" => assert_eq!(block.document, "docs/recordings.md"),
                    // `python_client::a_wheel_is_built_and_installed_in_a_clean_environment` installs it.
                    "pip" => assert_eq!(command, "pip install ./python", "{what}"),
                    "helm" => assert!(command.contains("helm/highwater"), "{what}"),
                    other => panic!("{what}: no test knows {other}"),
                }
            }
        }
    }
    for program in ["make", "cargo", "highwater", "curl", "python3", "cc", "./nvml_floor"] {
        assert!(seen.contains(program), "no document has a command of {program}: {seen:?}");
    }
}

fn is_a_target(target: &str, what: &str) {
    let makefile = fs::read_to_string(root().join("Makefile")).expect("text");
    assert!(makefile.lines().any(|line| line.starts_with(&format!("{target}: "))), "{what}");
}

/// Building in release takes minutes: benchmarks and the image do it.
fn is_built_elsewhere(command: &str, what: &str) {
    assert!(["cargo build --release", "cargo install --locked --path ."].contains(&command), "{what}");
}

/// Commands that end succeed. The daemon starts on the simulator instead of NVML, on a free port.
fn runs(command: &str, folder: &TempDir, what: &str) {
    let mut shell = shell(&format!("exec env {command}"), folder, "");
    if command.starts_with("highwater run") || command.starts_with("highwater record") {
        records(shell.current_dir(folder.path()), what);
        return;
    }
    if command.starts_with("highwater report") && !command.contains("tests/data/") {
        has_recordings(folder);
        shell.current_dir(folder.path());
    }
    if !command.contains("highwater serve") {
        assert!(!succeeds(shell, what).is_empty(), "{what}");
        return;
    }
    shell.env("HIGHWATER_SOURCE", "sim").env("HIGHWATER_LISTEN", "127.0.0.1:0");
    shell.env("XDG_RUNTIME_DIR", folder.path()).env("XDG_STATE_HOME", folder.path());
    let serves = Process::start(shell);
    serves.wait_for(SOON, "line `listening on`", |line| line.contains("listening on").then_some(()));
}

/// The recordings that docs/reports.md names, once.
fn has_recordings(folder: &TempDir) {
    let names = ["job.sqlite", "before.sqlite", "after.sqlite"].map(|name| folder.path().join(name));
    if names[1].exists() {
        return;
    }
    let _ = fs::remove_file(&names[0]);
    let mut record = command();
    record.args(["record", "--source", "sim:demo", "--for", "2s", "-o"]).arg(&names[0]);
    succeeds(record, "record");
    for name in &names[1..] {
        fs::copy(&names[0], name).expect("copied");
    }
}

/// Recordings end by themselves, and print what docs/recordings.md shows.
fn records(shell: &mut Command, what: &str) {
    let job = "import highwater\nwith highwater.step(1), highwater.phase('forward'): pass\n";
    fs::write(Path::new(shell.get_current_dir().expect("a folder")).join("train.py"), job).expect("written");
    shell.env("HIGHWATER_SOURCE", "sim").env("PYTHONPATH", root().join("python"));
    let output = shell.output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {printed}");
    // Columns are as wide as their numbers, and sizes have the unit that keeps them short.
    let narrow = |line: &str| shape(line).split_whitespace().collect::<Vec<_>>().join(" ").replace("MiB", "GiB");
    let printed: BTreeSet<String> = printed.lines().map(narrow).collect();
    for shown in block("docs/recordings.md", "text").lines().filter(|line| !line.contains("moe-tight")) {
        let wanted =
            narrow(shown).replace("node.sqlite", if what.contains("run -o") { "job.sqlite" } else { "node.sqlite" });
        assert!(printed.contains(&wanted), "{what} does not print `{wanted}`: {printed:#?}");
    }
}

fn takes_its_arguments(words: &[&str], what: &str) {
    if let ["-m", "unittest", "discover", folder] = words {
        let makefile = fs::read_to_string(root().join("Makefile")).expect("text");
        assert!(
            makefile.contains(&format!("part python3 -m unittest discover -q {folder};")),
            "{what}: not in make test"
        );
        return;
    }
    let mut python = Command::new("python3");
    python.args(["-c", ONLY_ARGUMENTS]).args(words).current_dir(root());
    assert!(succeeds(python, what).ends_with("accepted\n"), "{what}");
}

/// Without a driver it goes as far as opening NVML. A command that it does not know prints how it is used.
fn knows_its_command(folder: &TempDir, words: &[&str], what: &str) {
    let mut floor = Command::new(folder.path().join("nvml_floor"));
    let output = floor.args(words).current_dir(folder.path()).output().expect("built before");
    assert!(output.status.success() || format!("{output:?}").contains("libnvidia-ml"), "{what}: {output:?}");
}

/// `highwater …` inside sentences: flags and subcommands exist.
#[test]
fn commands_inside_sentences_have_flags_that_exist() {
    let help = |name: &str| {
        let mut help = command();
        help.args([name, "--help"]);
        succeeds(help, name)
    };
    let mut checked = 0;
    for path in documents() {
        let text = fs::read_to_string(&path).expect("text");
        let inline = text.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("highwater "));
        for line in inline {
            let words: Vec<&str> = line.split_whitespace().collect();
            let help = help(words[0]);
            for flag in words.iter().filter(|word| word.starts_with("--")) {
                let flag = flag.split('=').next().unwrap_or_default();
                assert!(help.contains(flag), "{}: `highwater {line}`: no {flag}", path.display());
            }
            checked += 1;
        }
    }
    assert!(checked >= 6, "{checked}");
}

/// A capture of the demo with the name that docs/recordings.md gives it.
fn capture(folder: &TempDir) {
    let captures = format!("captures.directory={}", folder.path().join("captures").display());
    let daemon = Daemon::start(&["serve", "--source", "sim:demo", "--set", &captures]).ready();
    eventually(SOON, "phases", || {
        let metrics = daemon.metrics();
        let counted =
            metrics.lines().find_map(|line| line.strip_prefix("highwater_phases_total{outcome=\"attributed\"} "));
        (counted?.parse::<f64>().expect("a number") >= 20.0).then_some(())
    });
    assert_eq!(daemon.post("/api/v1/captures", &json!({"seconds_before": 5, "seconds_after": 1})).0, 202);
    let id = eventually(SOON, "a complete capture", || {
        let listed: Value = serde_json::from_str(&daemon.get("/api/v1/captures")).expect("JSON");
        let first = listed["captures"].as_array()?.first()?.clone();
        (first["state"] == "complete").then(|| first["id"].as_str().expect("text").to_owned())
    });
    let written = folder.path().join("captures").join(format!("{id}.sqlite"));
    fs::rename(written, folder.path().join("20261121T101530.123Z-oom.sqlite")).expect("there");
}

#[test]
fn the_queries_of_a_capture_return_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    capture(&folder);
    let file = folder.path().join("20261121T101530.123Z-oom.sqlite");
    let recording = rusqlite::Connection::open(&file).expect("a recording");
    let queries = block("docs/recordings.md", "sql");
    let queries: Vec<&str> = queries.split(";\n").map(str::trim).filter(|query| !query.is_empty()).collect();
    assert_eq!(queries.len(), 5);
    for query in queries {
        let mut statement = recording.prepare(query).unwrap_or_else(|error| panic!("{query}: {error}"));
        let rows = statement.query_map([], |_| Ok(())).expect("it runs").filter(Result::is_ok).count();
        // The last two find what need not have happened.
        let may_be_none = query.contains("more > 0") || query.contains("1.5 *");
        assert!(rows > 0 || may_be_none, "{query}");
    }
    let python = block("docs/recordings.md", "python") + "assert len(rows) > 1000, len(rows)\n";
    let mut script = Command::new("python3");
    script.args(["-c", &python]).current_dir(folder.path());
    succeeds(script, "docs/recordings.md, python");
    let Some(sqlite3) = tools::find("sqlite3") else { return };
    let blocks = blocks_of(&root().join("docs/recordings.md"));
    let line = blocks.iter().flat_map(|block| commands(&block.text)).find(|line| line.starts_with("sqlite3 "));
    let line = &line.expect("it is shown");
    let mut shell = Command::new("sh");
    shell.args(["-ec", line]).current_dir(folder.path());
    shell.env("PATH", format!("{}:/usr/bin:/bin", sqlite3.parent().expect("a folder").display()));
    let printed = succeeds(shell, line);
    assert!(printed.contains("peak_mib") && printed.lines().count() == 4 + 4, "{printed}");
}

/// The first words in backquotes of the rows of a document's first table.
fn first_cells(document: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join(document)).expect("text");
    let rows =
        text.lines().skip_while(|line| !line.starts_with("|--")).skip(1).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| Some(row.strip_prefix("| `")?.split_once('`')?.0.to_owned())).collect()
}

/// What a kind's row says is up to its author; that it is there, and that its settings exist, is not.
#[test]
fn every_kind_of_finding_has_a_row_with_settings_that_exist() {
    use highwater_core::detect::FindingKind;
    let kinds: BTreeSet<String> = FindingKind::ALL.iter().map(|kind| kind.label().to_owned()).collect();
    assert_eq!(first_cells("docs/findings.md").into_iter().collect::<BTreeSet<_>>(), kinds);
    let (mut settings, mut text) =
        (BTreeSet::new(), fs::read_to_string(root().join("docs/findings.md")).expect("text"));
    text += &fs::read_to_string(root().join("docs/alerts.md")).expect("text");
    for code in text.split('`').skip(1).step_by(2).filter(|code| code.starts_with("detect.") && !code.contains("*")) {
        settings.insert(code.split([' ', '=']).next().unwrap_or_default().to_owned());
    }
    let known: BTreeSet<&str> = highwater::config::KEYS.iter().map(|key| key.name).collect();
    assert!(settings.len() > 4, "{settings:?}");
    for setting in settings {
        assert!(known.contains(setting.as_str()), "{setting} is no setting");
    }
}

#[test]
fn pictures_show_what_the_recording_has() {
    let mut drawn = Command::new("python3");
    drawn.arg(root().join("docs/images/flush.py"));
    let picture = fs::read_to_string(root().join("docs/images/flush.svg")).expect("text");
    assert!(succeeds(drawn, "flush.py") == picture, "draw docs/images/flush.svg again: its first lines show how");
    assert!(fs::read_to_string(root().join("docs/findings.md")).expect("text").contains("(images/flush.svg)"));
}

#[test]
fn an_annotation_of_a_recording_is_taken_as_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = block("docs/scenarios.md", "json");
    let begin_ns = serde_json::from_str::<Value>(&line).expect("JSON")["ts"].as_i64().expect("a time");
    let memory: String = (0..20).map(|n| format!("{},0,{}\n", begin_ns - 5_000_000 + n * 1_000_000, n << 30)).collect();
    fs::write(folder.path().join("nvml_1khz.csv"), format!("realtime_ns,gpu,used_bytes\n{memory}")).expect("written");
    fs::write(folder.path().join("annotations_rank0.jsonl"), &line).expect("written");
    let source = format!("replay:{}", folder.path().display());
    let daemon = Daemon::start(&["serve", "--source", &source, "--replay-speed", "max"]);
    eventually(SOON, "the end", || daemon.printed().contains("the recording has ended").then_some(()));
    assert!(daemon.metrics().contains("highwater_annotations_total{outcome=\"accepted\"} 1"), "{}", daemon.printed());
    assert!(!daemon.printed().contains("skipped") && !daemon.printed().contains("refused"), "{}", daemon.printed());
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_documented_prometheus_takes_its_configuration() {
    let Some(promtool) = tools::find("promtool") else { return };
    let mut found = blocks_of(&root().join("docs/alerts.md")).into_iter();
    let block = found.find(|block| block.text.starts_with("# prometheus.yml\n")).expect("it is shown");
    let folder = tempfile::tempdir().expect("a folder");
    let rules = root().join("dashboards/alerts").display().to_string();
    fs::write(folder.path().join("prometheus.yml"), block.text.replace("/etc/prometheus/highwater", &rules))
        .expect("written");
    let mut check = Command::new(promtool);
    check.args(["check", "config", "prometheus.yml"]).current_dir(folder.path());
    let printed = succeeds(check, "docs/alerts.md");
    assert!(printed.contains("3 rule files found"), "{printed}");
}
