//! A spike shorter than any scrape interval is in every window of every scraper.
//!
//! Time is simulated, so that no machine is too busy: the sampler ticks exactly at its period, and two scrapers with
//! different intervals read the real exposition. A sampler sees instants: one that reads every millisecond sees a spike
//! of half a millisecond only if a reading falls into it. So the first test reads every half millisecond, and the
//! second, at one millisecond, places the spikes where readings fall, as the shipped scenario does.

use highwater::export;
use highwater::metrics::{Choice, Snapshots};
use highwater::sim::{Scenario, Sim};
use highwater_core::clock::{Clock, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::jobs::Limits;
use highwater_core::phases::Ledger;
use highwater_core::ring;
use highwater_core::source::Source;
use highwater_engine::node::{Node, Periods};
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;

const START_NS: i64 = 1_800_000_000 * SECOND_NS;
const SPIKE_BYTES: f64 = 20.0 * 1024.0 * 1024.0 * 1024.0;

/// The highest memory in the window, scrape by scrape, as two scrapers saw it over two minutes.
fn scraped(offset: &str, period_ns: i64, window: &str, intervals_ns: [i64; 2]) -> [Vec<f64>; 2] {
    let text = format!(
        "[[spikes]]\ngpu = 0\noffset = \"{offset}\"\nevery = \"10 s\"\nduration = \"0.5 ms\"\nbytes = \"20 GiB\"\n"
    );
    let clock = Arc::new(Manual::at(START_NS));
    let source: Arc<dyn Source> = Arc::new(Sim::new(Scenario::parse(&text, "spikes").expect("a scenario"), START_NS));
    let ring = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };
    let (node, writers) = Node::new(source, Arc::clone(&clock) as _, ring, Periods::default(), None).expect("rings");
    let node = Arc::new(node);
    let state = SharedState::of(&node, &Arc::new(Ledger::new(Limits::default())));
    let snapshots = Snapshots { state, choice: Choice::default(), node_name: Arc::default(), parts: Vec::new() };
    let mut sampler = node.sampler(writers);
    let mut scraped_peaks = [Vec::new(), Vec::new()];
    let mut next_ns = intervals_ns.map(|interval_ns| START_NS + 15 * SECOND_NS + interval_ns);
    while clock.now_ns() < START_NS + 120 * SECOND_NS {
        clock.advance_to(clock.now_ns() + period_ns);
        sampler.tick(clock.now_ns(), |_| ());
        for scraper in 0..2 {
            if clock.now_ns() >= next_ns[scraper] {
                next_ns[scraper] += intervals_ns[scraper];
                let families = snapshots.collect();
                let text = String::from_utf8(export::prometheus::encode(families).expect("encoded")).expect("text");
                scraped_peaks[scraper].push(max_of(&text, window));
            }
        }
    }
    scraped_peaks
}

fn max_of(exposition: &str, window: &str) -> f64 {
    let label = format!("window=\"{window}\"}}");
    let mut lines = exposition.lines().filter(|line| line.starts_with("highwater_gpu_memory_used_max_bytes{"));
    let line = lines.find(|line| line.contains(&label)).expect("the window is exported");
    line.rsplit(' ').next().expect("a value").parse().expect("a number")
}

#[track_caller]
fn every_scrape_has_the_spike(offset: &str, period_ns: i64) {
    for window in ["15s", "60s"] {
        let scraped_peaks = scraped(offset, period_ns, window, [SECOND_NS, 15 * SECOND_NS]);
        assert_eq!((scraped_peaks[0].len() > 100, scraped_peaks[1].len() > 5), (true, true));
        for (scraper, peaks) in scraped_peaks.iter().enumerate() {
            let missed = peaks.iter().filter(|peak| **peak < SPIKE_BYTES).count();
            assert_eq!(missed, 0, "scraper {scraper} missed the spike in the {window} window of {offset}");
        }
    }
}

/// What a scraper with this interval saw, scrape by scrape, of a GPU that is full for 30 ms every 197 seconds: whether the
/// finding was active, and the counter, if it was there.
fn findings_scraped(interval_ns: i64) -> Vec<(bool, Option<f64>)> {
    let text = "[[gpus]]\ncount = 1\n\n[[spikes]]\ngpu = 0\noffset = \"41 s\"\nevery = \"197 s\"\nduration = \"30 ms\"\n\
                bytes = \"139.5 GiB\"\n";
    let clock = Arc::new(Manual::at(START_NS));
    let source: Arc<dyn Source> = Arc::new(Sim::new(Scenario::parse(text, "full").expect("a scenario"), START_NS));
    let ring = ring::Config { retention_ns: 60 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };
    let (node, writers) = Node::new(source, Arc::clone(&clock) as _, ring, Periods::default(), None).expect("rings");
    let node = Arc::new(node);
    let snapshots = Snapshots {
        state: SharedState::of(&node, &Arc::new(Ledger::new(Limits::default()))),
        choice: Choice::default(),
        node_name: Arc::default(),
        parts: Vec::new(),
    };
    let mut sampler = node.sampler(writers);
    let mut scrapes = Vec::new();
    for ms in 1..1_000_000 {
        clock.advance_to(START_NS + ms * MILLISECOND_NS);
        sampler.tick(clock.now_ns(), |_| ());
        if ms % 100 == 0 {
            snapshots.state.advance(&node, clock.now_ns());
        }
        if (ms * MILLISECOND_NS) % interval_ns == 0 {
            let encoded = export::prometheus::encode(snapshots.collect_for("a scraper")).expect("encoded");
            let text = String::from_utf8(encoded).expect("text");
            let line = |name: &str| {
                let start = format!("{name}{{finding=\"low_headroom\"");
                let mut lines = text.lines().filter(|line| line.starts_with(&start) && line.contains("gpu=\"0\""));
                lines.next().map(|line| line.rsplit(' ').next().expect("a value").parse().expect("a number"))
            };
            scrapes.push((line("highwater_finding_active").is_some(), line("highwater_findings_total")));
        }
    }
    scrapes
}

/// The finding itself ends ten seconds after its last sign; its series stays until every scraper has read it.
#[test]
fn a_scraper_sees_every_finding_however_short() {
    for interval_ns in [15 * SECOND_NS, 30 * SECOND_NS] {
        let scrapes = findings_scraped(interval_ns);
        let begun = scrapes.windows(2).filter(|pair| !pair[0].0 && pair[1].0).count();
        assert_eq!(begun, 5, "every {interval_ns} ns: {scrapes:?}");
        // What `increase` adds up is what happened.
        let counts: Vec<f64> = scrapes.iter().filter_map(|(_, count)| *count).collect();
        assert_eq!((counts[0], counts.is_sorted()), (0.0, true), "{counts:?}");
        assert_eq!(counts.last(), Some(&5.0), "{counts:?}");
    }
}

#[test]
fn read_every_half_millisecond_a_spike_at_any_time_is_in_every_window() {
    for offset in ["5 s", "5.0001 s", "5.00025 s", "5.0004 s", "5.00049 s"] {
        every_scrape_has_the_spike(offset, MILLISECOND_NS / 2);
    }
}

#[test]
fn read_every_millisecond_a_spike_that_meets_a_reading_is_in_every_window() {
    every_scrape_has_the_spike("4.9999 s", MILLISECOND_NS);
}

/// Demonstrates the limit of any sampler.
#[test]
fn read_every_millisecond_a_spike_between_two_readings_is_not_seen() {
    let scraped_peaks = scraped("5.0001 s", MILLISECOND_NS, "15s", [SECOND_NS, 15 * SECOND_NS]);
    assert!(scraped_peaks.iter().flatten().all(|peak| *peak < SPIKE_BYTES));
}
