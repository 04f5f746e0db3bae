//! A node of 64 GPUs at the end of an hour in which one rank of 64 runs short of memory each minute: its live page in a real
//! browser, and the marks that a dashboard draws of the hour.
//!
//! Time is simulated and ends now: the parts are the daemon's own, without its threads.

use crate::browser::{Browser, Theme};
use crate::dashboards::{dashboards, filled, text};
use crate::scraper::Scraper;
use crate::tools;
use highwater::capture::Recorder;
use highwater::export;
use highwater::metrics::{Choice, Snapshots};
use highwater::sim::{Scenario, Sim};
use highwater::web::annotations::Access;
use highwater::web::gate::{Gate, Refusals};
use highwater::web::hosts::Hosts;
use highwater::web::{self, Site};
use highwater_core::clock::{Clock, Live, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::jobs::{Limits, Sender};
use highwater_core::ring;
use highwater_core::source::Source;
use highwater_engine::intake::{Intake, due};
use highwater_engine::node::{Node, Periods};
use highwater_engine::shared_state::SharedState;
use serde_json::Value;
use std::fmt::Write as _;
use std::process::Command;
use std::sync::{Arc, LazyLock};
use tempfile::TempDir;

const RANKS: usize = 64;
const LASTING_S: i64 = 3_600;
/// The faults of an hour.
const FAULTS: usize = 60;
/// How often memory is read. The faults last seconds.
const READ_MS: i64 = 50;
/// How often the daemon is scraped, as the dashboards expect it.
const SCRAPED_S: i64 = 15;

/// An hour, played.
struct Hour {
    site: Site,
    /// What a scraper saw: the lines of the families that marks are made of, as OpenMetrics.
    scraped: String,
    /// When it began, seconds of Unix time.
    begin_s: i64,
}

static HOUR: LazyLock<Hour> = LazyLock::new(play);

/// Rank 0 is on the last GPU, which is not among those that a page shows without being asked.
fn scenario() -> String {
    let gpus: Vec<String> = (0..RANKS).rev().map(|gpu| gpu.to_string()).collect();
    format!(
        r#"
        [[gpus]]
        count = {RANKS}

        [[jobs]]
        name = "wide"
        ranks = [{}]
        base = "40 GiB"
        phases = [
          {{ name = "data", duration = "60 ms", jitter = "10 ms", busy = 0.02 }},
          {{ name = "forward", duration = "500 ms", jitter = "10 ms", to = "96 GiB", shape = "steps", busy = 0.9 }},
          {{ name = "backward", duration = "800 ms", jitter = "10 ms", to = "110 GiB", shape = "steps", busy = 0.95 }},
          {{ name = "comm", duration = "120 ms", busy = 0.6, collective = true }},
          {{ name = "optimizer", duration = "100 ms", busy = 0.8 }},
        ]

        [jobs.near_oom]
        offset = "30 s"
        every = "1 min"
        for = "8 s"
        free = "200 MiB"
        "#,
        gpus.join(", ")
    )
}

fn play() -> Hour {
    let begin_ns = (Live::start().now_ns() / SECOND_NS - LASTING_S) * SECOND_NS;
    let clock = Arc::new(Manual::at(begin_ns));
    let source: Arc<dyn Source> = Arc::new(Sim::new(Scenario::parse(&scenario(), "hour").expect("valid"), begin_ns));
    let ring = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };
    let (node, writers) =
        Node::new(Arc::clone(&source), Arc::clone(&clock) as _, ring, Periods::default(), None).expect("rings");
    let node = Arc::new(node);
    let intake = Arc::new(Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default()));
    intake.set_devices(source.devices());
    let state = SharedState::of(&node, intake.ledger());
    let snapshots = Snapshots {
        state: state.clone(),
        choice: Choice::default(),
        node_name: Arc::default(),
        parts: vec![Arc::clone(&intake) as _],
    };
    let mut sampler = node.sampler(writers);
    sampler.set_periods(None, READ_MS * MILLISECOND_NS);
    let mut annotations = source.annotations().peekable();
    let mut scraped = String::new();
    for ms in (READ_MS..=LASTING_S * 1_000).step_by(READ_MS.unsigned_abs() as usize) {
        let now_ns = begin_ns + ms * MILLISECOND_NS;
        clock.advance_to(now_ns);
        sampler.tick(now_ns, |_| ());
        for annotation in due(&mut annotations, now_ns) {
            intake.take(annotation, &Sender::DAEMON).expect("a good annotation");
        }
        if ms % 500 == 0 {
            read_the_rest(&node, ms);
        }
        if ms % 100 == 0 {
            state.advance(&node, now_ns);
        }
        if ms % (SCRAPED_S * 1_000) == 0 {
            let text = export::prometheus::encode(snapshots.collect()).expect("encoded");
            let text = String::from_utf8(text).expect("text");
            let wanted = |line: &&str| {
                line.starts_with("highwater_incidents_total{") || line.starts_with("highwater_build_info{")
            };
            for line in text.lines().filter(wanted) {
                let _ = writeln!(scraped, "{line} {}", now_ns / SECOND_NS);
            }
        }
    }
    let site = Site::new(snapshots, intake, Recorder::default());
    Hour { site, scraped, begin_s: begin_ns / SECOND_NS }
}

/// The work of the slower lanes.
fn read_the_rest(node: &Node, ms: i64) {
    let at_ns = node.clock.now_ns();
    for (position, gpu) in node.gpus.iter().enumerate() {
        gpu.set_medium(at_ns, node.source.medium(position, at_ns, &node.calls));
        if ms % 5_000 == 0 || gpu.take_processes_wanted() || gpu.rare().is_none() {
            gpu.set_processes(at_ns, node.source.processes(position, at_ns, &node.calls));
            gpu.set_slow(at_ns, node.source.slow(position, at_ns, &node.calls));
            gpu.set_rare(at_ns, node.source.rare(position, at_ns, &node.calls));
        }
    }
}

/// Serves the page of the hour for as long as the runtime lives, and returns its address.
fn serve(runtime: &tokio::runtime::Runtime) -> String {
    let gate = Gate {
        hosts: Hosts::default(),
        guard: None,
        access: Access::Open,
        stats: Arc::default(),
        refusals: Refusals::default(),
    };
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("it binds");
    let address = listener.local_addr().expect("an address");
    let routes = web::router(HOUR.site.clone(), Arc::new(gate), true);
    runtime.spawn(async move { axum::serve(listener, routes).await });
    address.to_string()
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn an_hour_of_a_fault_each_minute_is_one_card_on_three_screens() {
    let Some(mut browser) = Browser::start() else { return };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let address = serve(&runtime);
    browser.appear(1280, 800, Theme::Light);
    browser.visit(&format!("http://{address}/"), "document.documentElement?.dataset.ready === 'true'");
    browser.wait("document.querySelectorAll('.found').length > 0");
    browser.wait("highwaterChart.series.filter(({ shown }) => shown).every(({ curve }) => curve.overview)");
    browser.painted();
    let seen = browser.value(
        "(() => { const bottom = (one) => one.getBoundingClientRect().bottom, cards = [...document.querySelectorAll('.found')];
        const cause = cards[0].querySelector('strong');
        return { cards: cards.length, times: highwaterLive.feed.incidents.map(({ times }) => times), bottom: bottom(cause),
            cause: cause.textContent, card: cards[0].innerText, page: document.documentElement.scrollHeight }; })()",
    );
    browser.keep("live-hour");
    assert!(seen["cards"].as_u64().is_some_and(|cards| cards <= 3), "{seen}");
    assert_eq!(seen["times"], serde_json::json!([FAULTS]), "{seen}");
    assert!(seen["bottom"].as_f64().is_some_and(|at| at <= 400.0), "{seen}");
    assert!(seen["cause"].as_str().is_some_and(|cause| cause.contains("rank 0")), "{seen}");
    assert!(seen["page"].as_u64().is_some_and(|height| height <= 3 * 800), "{seen}");
    // The strip has all of the time, also where none goes on.
    browser.wait(
        "(() => { const canvas = document.querySelector('.strip canvas'), ratio = canvas.width / canvas.clientWidth;
        const at = (x, y) => canvas.getContext('2d').getImageData(x * ratio, y * ratio, 1, 1).data.join();
        const width = canvas.clientWidth; return [0.2, 0.5, 0.8].every((part) => at(part * width, 30) !== at(part * width, 7)); })()",
    );
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn each_fault_of_an_hour_is_one_mark_on_a_dashboard() {
    let (Some(prometheus), Some(promtool)) = (tools::find("prometheus"), tools::find("promtool")) else { return };
    let folder = TempDir::new().expect("a folder");
    let (file, data) = (folder.path().join("hour.om"), folder.path().join("data"));
    std::fs::write(&file, in_order_of_families(&HOUR.scraped)).expect("written");
    let made = Command::new(promtool).args(["tsdb", "create-blocks-from", "openmetrics"]).args([&file, &data]).output();
    let made = made.expect("promtool runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let scraper = Scraper::holding(&prometheus, folder);
    let mut marked = 0;
    for (board, expression, step) in annotations() {
        marked += 1;
        assert_eq!(step, format!("{SCRAPED_S}s"), "{board}");
        let marks = marks(&scraper, &expression);
        assert_eq!(marks.iter().map(Vec::len).collect::<Vec<_>>(), [FAULTS], "{board}: {marks:?}");
    }
    assert_eq!(marked, 3, "dashboards mark incidents");
}

/// OpenMetrics has the samples of a family together, and of each series in order of time.
fn in_order_of_families(scraped: &str) -> String {
    let mut lines: Vec<&str> = scraped.lines().collect();
    let series = |line: &str| line.rsplitn(3, ' ').last().unwrap_or_default().to_owned();
    lines.sort_by_cached_key(|line| series(line));
    // A scraper adds these.
    let named = |line: &&str| line.replacen('{', "{job=\"highwater\",instance=\"node:9400\",", 1);
    lines.iter().map(named).chain(["# EOF".to_owned()]).map(|line| line + "\n").collect()
}

/// What marks incidents on each dashboard: its file, the expression as Grafana sends it, and the step.
fn annotations() -> Vec<(String, String, String)> {
    let boards = dashboards().into_iter();
    let marks = boards.flat_map(|board| {
        let marks = board.json["annotations"]["list"].as_array().cloned().unwrap_or_default();
        marks.into_iter().map(move |mark| (board.file.to_string(), mark))
    });
    let sent = |mark: &Value| filled(text(&mark["expr"]), &[("$__interval", "15s"), ("$job", "wide")]);
    let of_incidents = marks.filter(|(_, mark)| mark["name"] == "Incidents");
    of_incidents.map(|(file, mark)| (file, sent(&mark), text(&mark["step"]).to_owned())).collect()
}

/// The marks of each series, as Grafana makes them: times that are at most a step apart are one.
fn marks(scraper: &Scraper, expression: &str) -> Vec<Vec<f64>> {
    let (begin, end) = (HOUR.begin_s.to_string(), (HOUR.begin_s + LASTING_S).to_string());
    let answer = scraper.api("query_range", &[("query", expression), ("start", &begin), ("end", &end), ("step", "15")]);
    let of_series = |series: &Value| {
        let mut marks = Vec::<f64>::new();
        let mut last = f64::MIN;
        for value in series["values"].as_array().into_iter().flatten() {
            let at = value[0].as_f64().expect("a time");
            if at - last > SCRAPED_S as f64 {
                marks.push(at);
            }
            last = at;
        }
        marks
    };
    answer["result"].as_array().into_iter().flatten().map(of_series).collect()
}
