//! A layer profile of a real model on its way from a job to the API, the live page and a report: resnet50, one step at batch 16,
//! as FairScale's tracker recorded it (`tests/data/torch`). What is known of it is in that recording, not in this program.

use crate::browser::{Browser, Theme};
use crate::daemon::{Daemon, command};
use crate::process::eventually;
use crate::tools;
use flate2::read::GzDecoder;
use serde_json::{Value, json};
use std::fs::File;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const ACTIVATIONS: u64 = 1_435_630_080;
/// Shown once the profile has been drawn.
const DRAWN: &str = "Number(globalThis.highwaterLayers?.place.dataset.painted) > 0";

/// The records of the recording.
fn traces() -> Vec<Value> {
    let path = tools::root().join("tests/data/torch/resnet50_layer_traces.json.gz");
    let mut read: Value =
        serde_json::from_reader(GzDecoder::new(File::open(path).expect("it is there"))).expect("JSON");
    serde_json::from_value(read["traces"].take()).expect("a list")
}

/// Sends one profiled step, as the Python client does. Returns its records.
pub(crate) fn send(daemon: &Daemon, job: &str) -> Vec<Value> {
    let traces = traces();
    let event = |fields: Value| {
        let mut event = json!({"job": job, "rank": 0, "gpu": 0});
        event.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        event
    };
    let record = |trace: &Value| {
        event(json!({"event": "mark", "kind": "layer", "name": trace["module_name"], "step": 7,
            "memory": {"allocated": trace["allocated"], "reserved": trace["reserved"]},
            "layer": {"direction": if trace["is_forward"] == json!(true) { "forward" } else { "backward" },
                "growth": trace["event"]["memory_diff"], "activations": trace["event"]["memory_activations"],
                "parameters": trace["module_params"], "gathered": trace["all_gathered"],
                "gathered_sum": trace["cumul_all_gathered"]}}))
    };
    let step = |event_type: &str| event(json!({"event": event_type, "kind": "step", "step": 7}));
    let mut events = vec![step("begin")];
    events.extend(traces.iter().map(record));
    events.push(step("end"));
    let (status, answer) = daemon.post("/api/v1/annotations", &Value::from(events));
    assert!(status == 200 && answer.contains("\"refused\":0,"), "{answer}");
    traces
}

#[test]
fn the_activations_of_resnet50_are_what_its_recording_has() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    let traces = send(&daemon, "resnet50");
    let listed: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/resnet50/layers")).expect("JSON");
    let records = listed["profiles"][0]["records"].as_array().expect("a list");
    let of = |list: &[Value], name: &str| list.iter().map(|one| one[name].clone()).collect::<Vec<_>>();
    assert_eq!(of(records, "layer"), of(&traces, "module_name"), "the order in which the layers ran");
    assert_eq!(of(records, "parameters"), of(&traces, "module_params"));
    assert_eq!(
        (of(records, "allocated"), of(records, "reserved")),
        (of(&traces, "allocated"), of(&traces, "reserved"))
    );
    let forward = records.iter().filter(|record| record["direction"] == json!("forward"));
    let activations: u64 = forward.map(|record| record["activations"].as_u64().expect("a number")).sum();
    assert_eq!(activations, ACTIVATIONS);
    assert_eq!(listed["profiles"][0]["totals"]["activation_bytes"], json!(ACTIVATIONS));
    let metrics = daemon.metrics();
    for expected in [
        format!("highwater_job_profile_activation_bytes{{training_job=\"resnet50\",rank=\"0\"}} {ACTIVATIONS}"),
        "highwater_job_profile_allocated_max_bytes{training_job=\"resnet50\",rank=\"0\"} 1588135936".to_owned(),
        "highwater_job_profile_reserved_max_bytes{training_job=\"resnet50\",rank=\"0\"} 1973420032".to_owned(),
        "highwater_layer_activation_bytes{training_job=\"resnet50\",rank=\"0\",layer=\"layer1.0.bn3\"} 51380224"
            .to_owned(),
    ] {
        assert!(metrics.contains(&expected), "no {expected}");
    }
    assert_eq!(metrics.lines().filter(|line| line.starts_with("highwater_layer_activation_bytes{")).count(), 10);
}

/// The three graphs of a page that is open: drawn, with the layer under the cursor named.
fn has_graphs(browser: &mut Browser, what: &str) {
    browser.wait(DRAWN);
    let graphs = browser.value("highwaterLayers.graphs.map(({ title }) => title)");
    let without_gathers = ["Memory at the end of each layer", "Activations, parameters below"];
    assert_eq!(graphs, json!(without_gathers), "{what}");
    let shown = browser.value("document.querySelector('.layers').parentNode.innerText");
    let shown = shown.as_str().expect("text");
    for expected in
        ["Nothing was gathered.", "activations of the forward pass\t1.34 GiB", "layers\t126", "parameters\t97.49 MiB"]
    {
        assert!(shown.contains(expected), "{what}: no `{expected}` in {shown}");
    }
    assert_eq!(browser.value("highwaterLayers.records.length"), json!(traces().len()), "{what}");
    browser.value("highwaterLayers.place.focus()");
    browser.press("Home");
    let said = browser.value("document.querySelector('.layers ~ .readout').textContent");
    let said = said.as_str().expect("text");
    assert!(said.starts_with("1 of 316: conv1, forward; allocated 156.92 MiB;"), "{what}: {said}");
    assert!(said.contains("activations 49.00 MiB; parameters 36.75 KiB"), "{what}: {said}");
    browser.press("End");
    let said = browser.value("document.querySelector('.layers ~ .readout').textContent");
    assert!(said.as_str().expect("text").contains("316 of 316: conv1, backward"), "{what}: {said}");
    // What the pointer is at is found at both ends and in the middle of the axis.
    let named = browser.value(
        "[0, 157, 158, 315].map((nth) => highwaterLayers.at((highwaterLayers.x(nth) + highwaterLayers.x(nth + 1)) / 2))",
    );
    assert_eq!(named, json!([0, 157, 158, 315]), "{what}");
    let modules = browser.value("highwaterLayers.modules.map((row) => row.map(({ name }) => name).slice(4, 7))");
    assert_eq!(modules, json!([["layer1", "layer2", "layer3"], ["layer1.0", "layer1.1", "layer1.2"]]), "{what}");
    let drawn = "(() => { const { canvas } = highwaterLayers, pixels = canvas.getContext('2d')
        .getImageData(0, 0, canvas.width, canvas.height).data; let colors = new Set();
        for (let i = 0; i < pixels.length; i += 4) colors.add(pixels.slice(i, i + 3).join());
        return colors.size; })()";
    assert!(browser.value(drawn).as_u64() > Some(20), "{what}: an empty chart");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_live_page_and_a_report_draw_the_layers_of_resnet50() {
    let (Some(mut browser), Some(axe)) = (Browser::start(), tools::find("axe.min.js")) else { return };
    let axe = std::fs::read_to_string(axe).expect("a script");
    let folder = tempfile::tempdir().expect("a folder");
    let captures = format!("captures.directory={}", folder.path().display());
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", &captures]).ready();
    send(&daemon, "resnet50");
    assert_eq!(daemon.post("/api/v1/captures", &json!({"seconds_before": 2, "seconds_after": 1})).0, 202);
    let capture = eventually(SOON, "a capture", || {
        let listed: Value = serde_json::from_str(&daemon.get("/api/v1/captures")).expect("JSON");
        let first = listed["captures"].as_array()?.first()?.clone();
        (first["state"] == "complete").then(|| first["id"].as_str().expect("text").to_owned())
    });
    let mut report = command();
    report.current_dir(folder.path()).args(["report", &format!("{capture}.sqlite"), "-o", "page.html"]);
    assert!(report.status().expect("it runs").success());
    let page = folder.path().join("page.html");
    for (theme, name) in [(Theme::Light, "light"), (Theme::Dark, "dark")] {
        for width in [1400, 390] {
            for on_live_page in [true, false] {
                let what = format!("layers-{}-{name}-{width}", if on_live_page { "live" } else { "report" });
                browser.appear(width, 1400, theme);
                browser.visit("about:blank", "location.href === 'about:blank'");
                if on_live_page {
                    let address = format!("http://{}/#/job/resnet50", daemon.address());
                    browser.visit(&address, "document.documentElement?.dataset.ready === 'true'");
                } else {
                    browser.open(&page, "document.documentElement?.dataset.ready === 'true'");
                }
                has_graphs(&mut browser, &what);
                let overflow = browser.value("document.documentElement.scrollWidth - innerWidth");
                assert!(overflow.as_i64() <= Some(0), "{what}: {overflow} too many");
                browser.value("highwaterLayers.place.scrollIntoView()");
                browser.keep(&what);
                let found = browser.check_access(&axe);
                assert!(found.is_empty(), "{what}: {found:#?}");
            }
        }
    }
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// A job whose layers are gathered shows the third graph, and ranks can be chosen.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn all_gathers_have_a_graph_and_another_rank_can_be_chosen() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    let profiled = ["moe-tight\",rank=\"0", "moe-tight\",rank=\"1", "llama-ddp\",rank=\"0"];
    eventually(SOON, "profiles", || {
        let metrics = daemon.metrics();
        profiled
            .iter()
            .all(|rank| metrics.contains(&format!("highwater_job_profile_step{{training_job=\"{rank}\"")))
            .then_some(())
    });
    browser.appear(1400, 1000, Theme::Light);
    let ready = "document.documentElement?.dataset.ready === 'true'";
    browser.visit(&format!("http://{}/#/job/moe-tight", daemon.address()), ready);
    browser.wait(DRAWN);
    assert_eq!(browser.value("highwaterLayers.graphs.length"), json!(3));
    let title = "document.querySelector('.layers').getAttribute('aria-label')";
    assert!(browser.value(title).as_str().expect("text").starts_with("Layers of rank 0, step "));
    browser.value(
        "(() => { const select = document.querySelector('.choice select'); select.value = '1';
        select.dispatchEvent(new Event('change')); })()",
    );
    browser.wait(&format!("{title}.startsWith('Layers of rank 1, step ')"));
    // The page of another job ends the chart of this one.
    browser.value("location.hash = '#/job/llama-ddp'");
    browser.wait("document.title.startsWith('llama-ddp')");
    browser.wait("highwaterLayers.graphs.length === 2");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}
