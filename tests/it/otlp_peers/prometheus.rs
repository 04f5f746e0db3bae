//! A real Prometheus 3 that receives OTLP returns what the daemon pushed.

use super::*;
use crate::scraper::Scraper;

#[test]
#[ignore = "needs a peer: make test-peers"]
fn prometheus_3_answers_with_what_was_pushed() {
    let Some(program) = tools::find("prometheus-3") else { return };
    let prometheus = Scraper::taking_otlp(&program);
    let scenario = written(RESTING);
    let source = format!("sim:{}", scenario.path().join("scenario.toml").display());
    let daemon = pushing_to_prometheus(&["--source", &source], &prometheus);
    let scraped = rested(&daemon);
    let asked = now_ns() as f64 / 1e9;
    let gpus = prometheus_labels(&scraped, "highwater_gpu_memory_used_bytes", "uuid");
    assert_eq!(gpus.len(), 2);
    for (ours, theirs, label) in [
        ("highwater_gpu_memory_used_bytes", "hw_gpu_memory_usage_bytes", ("uuid", "hw_id")),
        ("highwater_gpu_memory_total_bytes", "hw_gpu_memory_limit_bytes", ("uuid", "hw_id")),
        ("highwater_job_steps_total", "highwater_job_steps_total", ("rank", "highwater_rank")),
        (
            "highwater_job_step_duration_seconds_count",
            "histogram_count(highwater_job_step_duration_seconds)",
            ("rank", "highwater_rank"),
        ),
        (
            "highwater_job_step_duration_seconds_sum",
            "histogram_sum(highwater_job_step_duration_seconds)",
            ("rank", "highwater_rank"),
        ),
    ] {
        let expected: BTreeMap<&str, f64> = scraped
            .iter()
            .filter(|((name, _), _)| name == ours)
            .map(|((_, labels), value)| (labels[label.0].as_str(), *value))
            .collect();
        assert!(!expected.is_empty(), "{ours}");
        // The newest point must be later than `asked`.
        let fresh = format!("{theirs} and on () (timestamp(hw_gpu_memory_limit_bytes) > {asked})");
        let samples = eventually(DELIVERED_WITHIN, &fresh, || {
            let samples = prometheus.query(&fresh);
            (samples.len() == expected.len()).then_some(samples)
        });
        let stored: BTreeMap<&str, f64> =
            samples.iter().map(|sample| (sample.labels[label.1].as_str(), sample.value)).collect();
        assert_eq!(stored, expected, "{theirs}");
    }
    nothing_was_refused(&daemon);
}

/// A daemon that pushes compressed metrics to `prometheus`, which accepts no traces.
pub(super) fn pushing_to_prometheus(arguments: &[&str], prometheus: &Scraper) -> Daemon {
    let endpoint = prometheus.otlp_endpoint();
    let environment = [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
        ("OTEL_TRACES_EXPORTER", "none"),
    ];
    pushing_with(arguments, &environment)
}

fn prometheus_labels(scraped: &Exposition, metric: &str, label: &str) -> BTreeSet<String> {
    scraped.keys().filter(|(name, _)| name == metric).map(|(_, labels)| labels[label].clone()).collect()
}
