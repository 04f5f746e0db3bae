//! Quantiles of durations in a real Prometheus, from native histograms and from buckets, against the durations of the
//! same steps in the API.

use crate::daemon::{Daemon, agent, wide};
use crate::process::eventually;
use crate::scraper::Scraper;
use crate::tools;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DATA_WITHIN: Duration = Duration::from_secs(90);
const SHARES: [f64; 3] = [0.5, 0.9, 0.99];
const NATIVE: &str = "    scrape_native_histograms: true\n";
/// The ratio between the bounds of a bucket below 10 s, and so the error that a quantile of buckets can have.
const BUCKET: f64 = 1.29;
/// The same of the coarse bounds.
const COARSE_BUCKET: f64 = 2.5;
/// Steps that this test sends at a time.
const STEPS: usize = 400;

#[test]
fn a_scraper_gets_the_format_that_it_prefers() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    let protobuf = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
    let (text, delimited) = ("text/plain; version=0.0.4", protobuf.replace(';', "; "));
    for (accept, expected) in [
        (format!("{protobuf};q=0.6,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"), delimited.as_str()),
        ("application/openmetrics-text;q=0.6,text/plain;q=0.3,*/*;q=0.2".to_owned(), text),
        (format!("{protobuf};q=NaN"), text),
        (format!("{}{protobuf}", "a/b;q=-1,".repeat(200)), &delimited),
        ("\"".repeat(2_000), text),
    ] {
        let request = agent().get(format!("http://{}/metrics", daemon.address())).header("accept", &accept);
        let mut answer = request.call().expect("an exposition");
        let header = |name: &str| answer.headers()[name].to_str().expect("text").to_owned();
        assert_eq!(
            (header("content-type"), header("vary")),
            (expected.to_owned(), "accept, accept-encoding".to_owned()),
            "{accept}"
        );
        let length: usize = header("content-length").parse().expect("a number");
        let body = answer.body_mut().read_to_vec().expect("all of it");
        assert!(body.len() == length && length > 1_000);
        assert_eq!(body.starts_with(b"# HELP highwater_gpu_info"), expected == text, "{accept}");
    }
}

/// Prometheus asks for gzip. What it gets is the same, in far fewer bytes.
#[test]
fn a_scraper_that_takes_gzip_gets_it() {
    let (_folder, source) = wide(0..8, "offset = \"1 h\"\nevery = \"1 h\"\nfor = \"1 s\"");
    let daemon = Daemon::start(&["serve", "--source", &source]).ready();
    eventually(DATA_WITHIN, "phases of each rank", || {
        (daemon.metrics().matches("highwater_phase_duration_seconds_count").count() >= 16).then_some(())
    });
    let whole = daemon.metrics();
    let request = agent().get(format!("http://{}/metrics", daemon.address())).header("accept-encoding", "gzip");
    let mut answer = request.call().expect("an exposition");
    assert_eq!(answer.headers()["content-encoding"], "gzip");
    let packed = answer.body_mut().read_to_vec().expect("all of it");
    let mut text = String::new();
    flate2::read::GzDecoder::new(&packed[..]).read_to_string(&mut text).expect("gzip of text");
    let names = |text: &str| -> BTreeSet<String> {
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).map(str::to_owned).collect()
    };
    assert_eq!(names(&text), names(&whole));
    assert!(packed.len() * 8 < text.len(), "{} of {} bytes", packed.len(), text.len());
}

/// What docs/prometheus.md says of a fleet's settings.
#[test]
fn a_scrape_of_eight_gpus_and_ten_phases_is_small_where_that_is_wanted() {
    let scrape = |settings: &[&str]| {
        let source = concat!("sim:", env!("CARGO_MANIFEST_DIR"), "/tests/data/ten-phases.toml");
        let flags = settings.iter().flat_map(|setting| ["--set", setting]);
        let daemon = Daemon::start(&["serve", "--source", source].into_iter().chain(flags).collect::<Vec<_>>()).ready();
        eventually(DATA_WITHIN, "every phase of each rank", || {
            (daemon.metrics().matches("highwater_phase_duration_seconds_count").count() >= 80).then_some(())
        });
        let series = daemon.metrics().lines().filter(|line| !line.starts_with('#')).count();
        let request = agent().get(format!("http://{}/metrics", daemon.address())).header("accept-encoding", "gzip");
        let packed = request.call().expect("an exposition").body_mut().read_to_vec().expect("all of it").len();
        (series, packed)
    };
    let (series, packed) = scrape(&["metrics.phase_buckets=none", "metrics.diagnostics=false"]);
    assert!(series < 1_800 && packed < 25 << 10, "{series} series, {packed} bytes");
    let (all, _) = scrape(&[]);
    assert!(all > 4 * series, "{all} and {series} series");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn native_histograms_have_the_quantiles_of_the_steps() {
    let Some(program) = tools::find("prometheus-3") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    let begin_ns = begin_ns();
    send(&daemon, begin_ns, 0);
    let prometheus = Scraper::with(&program, &daemon, NATIVE);
    let job = r#"highwater_job_step_duration_seconds{training_job="spread"}"#;
    has_counted(&prometheus, &format!("histogram_count({job})"), STEPS);
    send(&daemon, begin_ns, STEPS);
    has_counted(&prometheus, &format!("histogram_count({job})"), 2 * STEPS);
    // All steps, and those between the first scrape and the last one: the second half.
    let all = durations(&daemon, "spread", |_, step| step < 2 * STEPS);
    let second = durations(&daemon, "spread", |_, step| step >= STEPS);
    assert_eq!((all.len(), second.len()), (2 * STEPS, STEPS));
    for share in SHARES {
        let of_all = format!("histogram_quantile({share}, sum({job}))");
        is_near(&of_all, one(&prometheus, &of_all), &all, share, 1.1);
        let of_rate = format!("histogram_quantile({share}, sum(rate({job}[5m])))");
        is_near(&of_rate, one(&prometheus, &of_rate), &second, share, 1.1);
    }
    the_demo_agrees(&daemon, &prometheus);
    only_native_series_exist(&prometheus);
}

/// The demo's job goes on meanwhile, so this compares only the steps that Prometheus had counted at one instant.
fn the_demo_agrees(daemon: &Daemon, prometheus: &Scraper) {
    let job = r#"highwater_job_step_duration_seconds{training_job="llama-ddp"}"#;
    let enough = format!("sum(histogram_count({job})) > 200");
    eventually(DATA_WITHIN, &enough, || (!prometheus.query(&enough).is_empty()).then_some(()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64().to_string();
    let at = |expression: &str| prometheus.api("query", &[("query", expression), ("time", &now)])["result"].take();
    let counts = at(&format!("histogram_count({job})"));
    let counts: BTreeMap<u64, usize> = counts.as_array().expect("ranks").iter().map(rank_and_count).collect();
    let steps = durations(daemon, "llama-ddp", |rank, place| counts.get(&rank).is_some_and(|count| place < *count));
    assert_eq!(steps.len(), counts.values().sum::<usize>(), "the API still has every step");
    for share in SHARES {
        let quantile = format!("histogram_quantile({share}, sum({job}))");
        let value = at(&quantile)[0]["value"][1].as_str().and_then(|value| value.parse().ok()).expect("a number");
        is_near(&quantile, value, &steps, share, 1.1);
    }
}

fn rank_and_count(sample: &Value) -> (u64, usize) {
    let number = |value: &Value| value.as_str().expect("text").parse::<usize>().expect("a whole number");
    (number(&sample["metric"]["rank"]) as u64, number(&sample["value"][1]))
}

/// Queries of `_bucket`, `_sum` and `_count` find nothing; other metrics are as in the text.
fn only_native_series_exist(prometheus: &Scraper) {
    for family in [
        "highwater_job_step_duration_seconds",
        "highwater_phase_duration_seconds",
        "highwater_sampler_lateness_seconds",
        "highwater_nvml_call_duration_seconds",
    ] {
        for suffix in ["_bucket", "_sum", "_count"] {
            assert!(prometheus.query(&format!("{family}{suffix}")).is_empty(), "{family}{suffix}");
        }
        let quantile = format!("histogram_quantile(0.99, sum(rate({family}[1m]))) > 0");
        eventually(DATA_WITHIN, &quantile, || (!prometheus.query(&quantile).is_empty()).then_some(()));
    }
    for other in ["highwater_gpu_memory_used_bytes > 0", "highwater_job_steps_total > 0", "up{job=\"highwater\"} == 1"]
    {
        assert!(!prometheus.query(other).is_empty(), "{other}");
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn classic_series_are_there_beside_native_ones_if_they_are_wanted() {
    let Some(program) = tools::find("prometheus-3") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]);
    send(&daemon, begin_ns(), 0);
    let lines = format!("{NATIVE}    always_scrape_classic_histograms: true\n");
    let prometheus = Scraper::with(&program, &daemon, &lines);
    let job = r#"{training_job="spread"}"#;
    for count in
        ["histogram_count(highwater_job_step_duration_seconds{})", "highwater_job_step_duration_seconds_count{}"]
    {
        has_counted(&prometheus, &count.replace("{}", job), STEPS);
    }
    // As many as the text has: an older rule finds what it found.
    let buckets = prometheus.query(&format!("highwater_job_step_duration_seconds_bucket{job}"));
    let lines = daemon.metrics();
    let lines = lines
        .lines()
        .filter(|line| line.starts_with("highwater_job_step_duration_seconds_bucket{training_job=\"spread\""));
    assert_eq!(buckets.len(), lines.count());
    let coarse = r#"highwater_job_step_duration_seconds_bucket{training_job="spread",le="0.1"}"#;
    assert_eq!(prometheus.query(coarse).len(), 1);
}

/// The Prometheus of Debian is older: it stores native histograms behind a feature flag.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn an_older_prometheus_stores_native_histograms_too() {
    let Some(program) = tools::find("prometheus") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]);
    send(&daemon, begin_ns(), 0);
    let prometheus = Scraper::with_feature(&program, &daemon, "native-histograms");
    let job = r#"highwater_job_step_duration_seconds{training_job="spread"}"#;
    has_counted(&prometheus, &format!("histogram_count({job})"), STEPS);
    let all = durations(&daemon, "spread", |_, _| true);
    for share in SHARES {
        let quantile = format!("histogram_quantile({share}, sum({job}))");
        is_near(&quantile, one(&prometheus, &quantile), &all, share, 1.1);
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn buckets_have_the_quantiles_to_a_bucket() {
    let Some(program) = tools::find("prometheus") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]);
    send(&daemon, begin_ns(), 0);
    let prometheus = Scraper::of(&program, &[&daemon]);
    has_counted(&prometheus, r#"highwater_job_step_duration_seconds_count{training_job="spread"}"#, STEPS);
    let all = durations(&daemon, "spread", |_, _| true);
    // What the coarse bounds alone would say: those of a node with many series.
    let coarse = r#"le=~"0.001|0.0025|0.005|0.01|0.025|0.05|0.1|0.25|0.5|1.0|2.5|5.0|10.0|30.0|60.0|300.0|1|5|10|30|60|300|\\+Inf""#;
    for share in SHARES {
        for (bounds, ratio) in [("", BUCKET), (coarse, COARSE_BUCKET)] {
            let buckets = format!("highwater_job_step_duration_seconds_bucket{{training_job=\"spread\",{bounds}}}");
            let quantile = format!("histogram_quantile({share}, sum by (le) ({buckets}))");
            is_near(&quantile, one(&prometheus, &quantile), &all, share, ratio);
        }
    }
}

/// When the job of this test began: all its steps have ended by now.
fn begin_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos();
    i64::try_from(now).expect("before 2262") - (0..2 * STEPS).map(duration_ns).sum::<i64>()
}

/// Most steps take 90 to 100 ms, some up to four times as long.
fn duration_ns(step: usize) -> i64 {
    let share = (step as f64 * 0.618_033_988_749_895).fract();
    (90e6 * (1.0 + 0.1 * share + 3.0 * share.powi(9))) as i64
}

/// Sends the steps from this one on, and waits until the daemon exports them.
fn send(daemon: &Daemon, begin_ns: i64, first: usize) {
    let steps = first..first + STEPS;
    let mut at_ns = begin_ns + (0..first).map(duration_ns).sum::<i64>();
    let mut events = Vec::new();
    for step in steps {
        let mut event = |kind: &str, at_ns: i64| {
            events.push(json!({"event": kind, "kind": "step", "name": "step", "job": "spread", "rank": 0, "gpu": 0,
                               "step": step, "time_unix_nano": at_ns}));
        };
        event("begin", at_ns);
        at_ns += duration_ns(step);
        event("end", at_ns);
    }
    let (status, answer) = daemon.post("/api/v1/annotations", &Value::from(events));
    assert_eq!(status, 200, "{answer}");
    let counted =
        format!("highwater_job_step_duration_seconds_count{{training_job=\"spread\",rank=\"0\"}} {}", first + STEPS);
    eventually(DATA_WITHIN, &counted, || daemon.metrics().contains(&counted).then_some(()));
}

/// The durations of a job's steps in the API, seconds, in rising order. `is_wanted` selects steps by rank and by their
/// position among the rank's steps.
fn durations(daemon: &Daemon, job: &str, is_wanted: impl Fn(u64, usize) -> bool) -> Vec<f64> {
    let answer: Value =
        serde_json::from_str(&daemon.get(&format!("/api/v1/jobs/{job}/phases?limit=100000"))).expect("JSON");
    let mut by_rank = BTreeMap::<u64, Vec<(i64, i64)>>::new();
    for phase in answer["phases"].as_array().expect("a list").iter().filter(|phase| phase["kind"] == "step") {
        let nanos = |name: &str| phase[name].as_i64().expect("a time");
        let span = (nanos("begin_unix_nano"), nanos("end_unix_nano"));
        by_rank.entry(phase["rank"].as_u64().expect("a rank")).or_default().push(span);
    }
    let mut wanted = Vec::new();
    for (rank, mut spans) in by_rank {
        spans.sort_unstable();
        let spans = spans.iter().enumerate().filter(|(place, _)| is_wanted(rank, *place));
        wanted.extend(spans.map(|(_, (begin_ns, end_ns))| (end_ns - begin_ns) as f64 * 1e-9));
    }
    wanted.sort_by(f64::total_cmp);
    wanted
}

fn has_counted(prometheus: &Scraper, count: &str, steps: usize) {
    let all = format!("{count} == {steps}");
    eventually(DATA_WITHIN, &all, || (!prometheus.query(&all).is_empty()).then_some(()));
}

fn one(prometheus: &Scraper, expression: &str) -> f64 {
    match &prometheus.query(expression)[..] {
        [sample] => sample.value,
        samples => panic!("{expression}: {samples:?}"),
    }
}

/// Asserts that a quantile is within a factor of `ratio` of the true one. Every value between the two nearest durations
/// counts as true.
fn is_near(what: &str, value: f64, durations: &[f64], share: f64, ratio: f64) {
    let rank = durations.len() as f64 * share;
    let of = |rank: f64| durations[(rank as usize).clamp(1, durations.len()) - 1];
    let (low, high) = (of(rank.floor()), of(rank.ceil() + 1.0));
    println!("{what}: {value:.4} s, true {low:.4} to {high:.4} s, {:+.1} %", (value / low - 1.0) * 100.0);
    assert!(value >= low / ratio && value <= high * ratio, "{what}: {value} is not near {low} to {high}");
}
