//! Raw points in a real Prometheus 3, which stores milliseconds and one value per millisecond.

use super::prometheus::pushing_to_prometheus;
use super::*;
use crate::scraper::Scraper;
use serde_json::Value;
use std::fmt::Write as _;

const MIB: i64 = 1 << 20;

/// A job whose memory changes all the time, and its GPU, which is lost for a while.
const LOST: &str = r#"
[[gpus]]
count = 2

[[jobs]]
name = "grows"
ranks = [0]
startup = "100 ms"
base = "10 GiB"

[[jobs.phases]]
name = "forward"
duration = "64 ms"
to = "130 GiB"
shape = "ramp"
release = true

[[lost]]
gpu = 0
at = "3 s"
for = "500 ms"
"#;

#[test]
#[ignore = "needs a peer: make test-peers"]
fn prometheus_3_has_every_millisecond_at_its_own_time() {
    let Some(program) = tools::find("prometheus-3") else { return };
    let prometheus = Scraper::taking_otlp(&program);
    let recording = Recording::write();
    let source = format!("replay:{}", recording.folder.path().display());
    let daemon = pushing_to_prometheus(&["--source", &source, "--set", "otlp.raw=always"], &prometheus);
    for (gpu, changes) in recording.changes.iter().enumerate() {
        let query = format!("highwater_gpu_memory_raw_bytes{{hw_id=~\"REPLAY-.*-{gpu}\"}}[1h]");
        let (last_ms, _) = changes.last_key_value().expect("there are changes");
        let stored = eventually(DELIVERED_WITHIN, &query, || {
            let stored = range(&prometheus, &query);
            stored.contains_key(last_ms).then_some(stored)
        });
        let missing: Vec<_> = changes.iter().filter(|(at, used)| stored.get(*at) != Some(*used)).collect();
        assert!(missing.is_empty(), "GPU {gpu}: {} of {} are not there: {missing:?}", missing.len(), changes.len());
        for (at_ms, used) in &stored {
            let held = changes.range(..=at_ms).next_back().map(|(_, held)| held);
            assert_eq!(Some(used), held, "GPU {gpu} at {at_ms} ms");
        }
        let rest_ends = recording.begin_ms + Recording::REST_ENDS_MS;
        assert!(stored.contains_key(&(rest_ends - 1)), "a value that rests has a point at the end of its rest");
    }
    // The recording is over, and its time stands still. After four more exports, too, no time occurs twice.
    let mut looks = 0;
    eventually(DELIVERED_WITHIN, "two seconds", || {
        nothing_was_refused(&daemon);
        looks += 1;
        (looks >= 20).then_some(())
    });
}

/// Memory changes with every reading, so that the last one before a loss is a change.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_gap_in_raw_points_is_a_gap_in_prometheus_3() {
    let Some(program) = tools::find("prometheus-3") else { return };
    let prometheus = Scraper::taking_otlp(&program);
    let scenario = written(LOST);
    let source = format!("sim:{}", scenario.path().join("scenario.toml").display());
    // On a busy machine the sampler would otherwise read less often, and there would be fewer changes to count.
    let steady = ["--set", "sampling.max_period=1ms"];
    let arguments = [&["--source", &source, "--set", "otlp.raw=always"], &steady[..]].concat();
    let daemon = pushing_to_prometheus(&arguments, &prometheus);
    let (read, begin_ms, end_ms) = eventually(DELIVERED_WITHIN, "a second of memory after the loss", || {
        // While the GPU is lost, or before its first reading, there may be no answer.
        let (status, body) = daemon.ask("/api/v1/gpus/0/memory?max_points=1000000");
        let answer: Value = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
        let points = answer["points"].as_array()?;
        let lost = points.windows(2).find(|two| two[0][1].is_null() && ms(&two[1]) - ms(&two[0]) > 400)?;
        let read: BTreeSet<i64> = points.iter().filter(|point| !point[1].is_null()).map(ms).collect();
        (ms(points.last()?) - ms(&lost[1]) > 1_000).then(|| (read, ms(&lost[0]), ms(&lost[1])))
    });
    let uuid = daemon.get("/api/v1/gpus");
    let uuid = serde_json::from_str::<Value>(&uuid).expect("JSON")["gpus"][0]["uuid"].clone();
    let series = format!("highwater_gpu_memory_raw_bytes{{hw_id={uuid}}}");
    let query = format!("{series}[1h]");
    let stored = eventually(DELIVERED_WITHIN, &query, || {
        let stored = range(&prometheus, &query);
        (stored.last_key_value()?.0 > &(end_ms + 500)).then_some(stored)
    });
    // A value that rested has one more point, where its rest ended.
    for (from, to) in [(begin_ms - 500, begin_ms), (end_ms, end_ms + 500)] {
        let missing: Vec<i64> = read.range(from..to).copied().filter(|at_ms| !stored.contains_key(at_ms)).collect();
        assert!(missing.is_empty() && read.range(from..to).next().is_some(), "{from} to {to}: {missing:?}");
    }
    assert_eq!(stored.range(begin_ms + 1..end_ms).count(), 0, "while it was lost");
    // Without a point that marks the loss, Prometheus returns the last value for five more minutes.
    for (at_ms, known) in [(begin_ms, 1), ((begin_ms + end_ms) / 2, 0), (end_ms, 1)] {
        let at = format!("{at_ms}e-3");
        let then = prometheus.api("query", &[("query", &series), ("time", &at)]);
        assert_eq!(then["result"].as_array().map(Vec::len), Some(known), "{series} at {at}");
    }
    nothing_was_refused(&daemon);
}

/// The time of a point of the API, milliseconds.
fn ms(point: &Value) -> i64 {
    point[0].as_i64().expect("a time") / MILLISECOND_NS
}

/// A recording of memory that changes every millisecond, on whole milliseconds, from a few seconds ago.
struct Recording {
    folder: TempDir,
    begin_ms: i64,
    /// For each GPU, bytes in use by the millisecond from which they hold.
    changes: Vec<BTreeMap<i64, i64>>,
}

impl Recording {
    const MILLISECONDS: i64 = 3_000;
    /// Memory rests between these two.
    const REST_BEGINS_MS: i64 = 1_000;
    const REST_ENDS_MS: i64 = 1_060;

    fn write() -> Self {
        let begin_ms = now_ns() / MILLISECOND_NS - 10_000;
        let mut lines = String::from("realtime_ns,gpu,used_bytes\n");
        let mut changes = vec![BTreeMap::new(); 2];
        for offset_ms in 0..Self::MILLISECONDS {
            if (Self::REST_BEGINS_MS + 1..Self::REST_ENDS_MS).contains(&offset_ms) {
                continue;
            }
            for (gpu, changes) in (1..).zip(&mut changes) {
                let (at_ms, used) = (begin_ms + offset_ms, MIB * (1_000 * gpu + offset_ms % 777));
                changes.insert(at_ms, used);
                writeln!(lines, "{},{},{used}", at_ms * MILLISECOND_NS, gpu - 1).expect("a String takes all");
            }
        }
        // A last reading without a change, as the sampler's next one would be. It shows that the last change is over.
        for (gpu, changes) in changes.iter().enumerate() {
            let (at_ms, used) = changes.last_key_value().expect("there are changes");
            writeln!(lines, "{},{gpu},{used}", (at_ms + 1) * MILLISECOND_NS).expect("a String takes all");
        }
        let folder = TempDir::new().expect("a temporary directory");
        std::fs::write(folder.path().join("nvml_1khz.csv"), lines).expect("a writable directory");
        Self { folder, begin_ms, changes }
    }
}

/// The samples of the one series that `query` selects: milliseconds of Unix time, and bytes.
fn range(prometheus: &Scraper, query: &str) -> BTreeMap<i64, i64> {
    let data = prometheus.api("query", &[("query", query)]);
    let series = data["result"].as_array().expect("a list of series");
    assert!(series.len() <= 1, "{query} is one series: {:?}", series.iter().map(|s| &s["metric"]).collect::<Vec<_>>());
    let samples = series.iter().flat_map(|series| series["values"].as_array().into_iter().flatten());
    let sample = |sample: &Value| {
        let at_ms = (sample[0].as_f64().expect("a time") * 1e3).round();
        (at_ms as i64, sample[1].as_str().expect("text").parse::<f64>().expect("a number") as i64)
    };
    samples.map(sample).collect()
}
