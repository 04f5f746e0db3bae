//! Steps as a real collector accepts them.

use super::*;
use crate::collector::Span;
use serde_json::Value;
use std::collections::HashSet;

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_step_is_a_trace_with_its_phases_below_and_all_ranks_in_it() {
    let Some(program) = tools::find("otelcol") else { return };
    let collector = Collector::start(&program);
    let daemon = pushing(&["--source", "sim"], &collector, Protocol::Grpc);
    let spans = eventually(DELIVERED_WITHIN, "six steps of each job", || {
        let spans = collector.spans();
        ["llama-ddp", "moe-tight"].iter().all(|job| newest_step(&spans, job) >= Some(6)).then_some(spans)
    });
    for job in ["llama-ddp", "moe-tight"] {
        let newest = newest_step(&spans, job).expect("there are steps");
        let mut traces = HashSet::new();
        // Spans of the newest steps may still be on their way from one of the ranks.
        for step in 0..newest - 1 {
            let step = step.to_string();
            let is_in = |span: &&Span| span.is_of("highwater.job", job) && span.is_of("highwater.step", &step);
            let of_step: Vec<&Span> = spans.iter().filter(is_in).collect();
            let trace = &of_step.first().unwrap_or_else(|| panic!("{job} has no step {step}")).trace;
            assert!(of_step.iter().all(|span| &span.trace == trace), "{job}, step {step}: {of_step:#?}");
            assert!(traces.insert(trace), "{job}: step {step} has the trace of another step");
            assert_eq!(spans.iter().filter(|span| &span.trace == trace).count(), of_step.len(), "{job}, step {step}");
            is_a_tree(&of_step);
        }
        spans_are_what_the_api_lists(&daemon, job, &spans);
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn one_step_in_three_is_chosen_alike_by_all_ranks() {
    let Some(program) = tools::find("otelcol") else { return };
    let collector = Collector::start(&program);
    let arguments = ["--source", "sim", "--set", "otlp.spans=1/3"];
    let _daemon = pushing(&arguments, &collector, Protocol::Http);
    let spans = eventually(DELIVERED_WITHIN, "nine steps", || {
        let spans = collector.spans();
        (newest_step(&spans, "llama-ddp") >= Some(9)).then_some(spans)
    });
    let ranks_of = |step: &str| -> BTreeSet<&str> {
        let is_in = |span: &&Span| span.is_of("highwater.job", "llama-ddp") && span.is_of("highwater.step", step);
        spans.iter().filter(is_in).map(|span| span.attributes["highwater.rank"].as_str()).collect()
    };
    for (step, ranks) in [("0", 2), ("1", 0), ("2", 0), ("3", 2), ("4", 0), ("5", 0), ("6", 2)] {
        assert_eq!(ranks_of(step).len(), ranks, "step {step}");
    }
}

/// A row has what the API lists for each of its phases.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_step_is_one_row_with_the_seconds_and_the_peak_of_each_phase() {
    let Some(program) = tools::find("otelcol") else { return };
    let collector = Collector::start(&program);
    let daemon = pushing(&["--source", "sim", "--set", "otlp.phases=attributes"], &collector, Protocol::Grpc);
    let rows = eventually(DELIVERED_WITHIN, "three steps", || {
        let spans = collector.spans();
        (newest_step(&spans, "llama-ddp") >= Some(3)).then_some(spans)
    });
    assert!(rows.iter().all(|row| row.name == "highwater.step" && row.parent.is_empty()), "{rows:#?}");
    let answer: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/llama-ddp/phases?limit=100000")).expect("JSON");
    let phases = answer["phases"].as_array().expect("phases");
    let mut compared = 0;
    for row in rows.iter().filter(|row| row.is_of("highwater.job", "llama-ddp")) {
        let is_own = |phase: &&Value| {
            phase["kind"] == "phase"
                && row.is_of("highwater.rank", &phase["rank"].to_string())
                && row.is_of("highwater.step", &phase["step"].to_string())
        };
        for phase in phases.iter().filter(is_own) {
            let of = |what: &str| {
                let name = format!("highwater.phase.{}.{what}", phase["phase"].as_str().expect("a name"));
                row.attributes.get(&name).and_then(|value| value.parse::<f64>().ok())
            };
            let [begin, end] = ["begin_unix_nano", "end_unix_nano"].map(|time| phase[time].as_i64().expect("a time"));
            let seconds = of("seconds").unwrap_or_else(|| panic!("{phase}: {row:#?}"));
            #[allow(clippy::cast_precision_loss, reason = "seconds to a nanosecond")]
            let expected = (end - begin) as f64 * 1e-9;
            assert!((seconds - expected).abs() < 1e-8, "{phase}: {row:#?}");
            assert_eq!(of("memory.peak"), phase["gpus"][0]["peak_bytes"].as_f64(), "{phase}: {row:#?}");
            compared += 1;
        }
    }
    assert!(compared >= 20, "{compared} phases");
}

impl Span {
    fn is_of(&self, attribute: &str, value: &str) -> bool {
        self.attributes.get(attribute).is_some_and(|own| own == value)
    }
}

fn newest_step(spans: &[Span], job: &str) -> Option<u64> {
    let steps = spans.iter().filter(|span| span.name == "highwater.step" && span.is_of("highwater.job", job));
    steps.filter_map(|span| span.attributes.get("highwater.step")?.parse().ok()).max()
}

/// A root for each of two ranks, and every phase inside its rank's root.
fn is_a_tree(spans: &[&Span]) {
    let steps: Vec<_> = spans.iter().filter(|span| span.name == "highwater.step").collect();
    let ranks: Vec<_> = steps.iter().map(|span| span.attributes["highwater.rank"].as_str()).collect();
    assert_eq!(ranks.iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from(["0", "1"]), "{spans:#?}");
    assert_eq!(ranks.len(), 2, "a step has one span a rank: {steps:#?}");
    for span in spans {
        if span.name == "highwater.step" {
            assert_eq!(span.parent, "", "{span:?}");
            continue;
        }
        let parent = steps.iter().find(|step| step.id == span.parent).unwrap_or_else(|| panic!("no parent: {span:?}"));
        assert_eq!(parent.attributes["highwater.rank"], span.attributes["highwater.rank"], "{span:?}");
        assert!(parent.begin_ns <= span.begin_ns && span.end_ns <= parent.end_ns, "{span:?} in {parent:?}");
    }
    let names: BTreeSet<_> = spans.iter().map(|span| span.name.as_str()).collect();
    for phase in ["data", "forward", "backward", "comm", "optimizer"] {
        assert!(names.contains(phase), "{phase}: {names:?}");
    }
}

/// Every span has the times and the peak that the API returns for its step or phase.
fn spans_are_what_the_api_lists(daemon: &Daemon, job: &str, spans: &[Span]) {
    let answer: Value =
        serde_json::from_str(&daemon.get(&format!("/api/v1/jobs/{job}/phases?limit=100000"))).expect("JSON");
    let text = |value: &Value| value.as_i64().map(|value| value.to_string());
    let listed = answer["phases"].as_array().expect("phases").iter().map(|phase| {
        let name = if phase["kind"] == "step" { "highwater.step" } else { phase["phase"].as_str().expect("a name") };
        let times = [&phase["begin_unix_nano"], &phase["end_unix_nano"]].map(|time| time.as_i64().expect("a time"));
        (name, text(&phase["rank"]), times, text(&phase["gpus"][0]["peak_bytes"]))
    });
    let listed: HashSet<_> = listed.collect();
    for span in spans.iter().filter(|span| span.is_of("highwater.job", job)) {
        let attribute = |name: &str| span.attributes.get(name).cloned();
        let times = [span.begin_ns, span.end_ns];
        let own = (span.name.as_str(), attribute("highwater.rank"), times, attribute("highwater.memory.peak"));
        assert!(listed.contains(&own), "the API does not list {own:?}");
    }
}
