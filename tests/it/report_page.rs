//! The page of `report` in a real browser: drawn, reached by keys, read by a screen reader, and closed to the network.

use crate::browser::{Browser, Theme};
use crate::daemon::command;
use crate::tools;
use rusqlite::Connection;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const READY: &str = "document.documentElement?.dataset.ready === 'true'";
const GIB: u64 = 1 << 30;

/// The page of these recordings.
fn page(folder: &Path, files: &[&str]) -> PathBuf {
    let output = command().current_dir(folder).arg("report").args(files).args(["-o", "page.html"]).output();
    let output = output.expect("it runs");
    assert!(output.status.success(), "{output:?}");
    folder.join("page.html")
}

fn ddp(folder: &Path) -> PathBuf {
    page(folder, &[&tools::root().join("tests/data/h200-ddp").display().to_string()])
}

/// A recording of a second, `it.sqlite`, whose rows can be changed.
fn recording(folder: &Path) -> Connection {
    let mut record = command();
    record.current_dir(folder).args(["record", "-o", "it.sqlite", "--source", "sim:spike", "--for", "1s"]);
    let recorded = record.output().expect("it runs");
    assert!(recorded.status.success(), "{recorded:?}");
    Connection::open(folder.join("it.sqlite")).expect("it opens")
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn readout(browser: &mut Browser) -> String {
    browser.value("document.querySelector('.readout').textContent").as_str().expect("text").to_owned()
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_chart_is_drawn_the_peak_is_one_key_away_and_a_phase_is_named_under_the_pointer() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    browser.appear(1400, 1000, Theme::Light);
    browser.open(&ddp(folder.path()), READY);
    browser.painted();
    let drawn = "(() => { const { canvas } = highwaterChart, pixels = canvas.getContext('2d')
        .getImageData(0, 0, canvas.width, canvas.height).data; let colors = new Set();
        for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3]) colors.add(pixels.slice(i, i + 3).join());
        return colors.size; })()";
    assert!(browser.value(drawn).as_u64() > Some(10), "an empty chart");
    browser.press("p");
    browser.painted();
    assert!(
        readout(&mut browser).starts_with("Peak of GPU 0: 140.21 GiB after 61.367 s; "),
        "{}",
        readout(&mut browser)
    );
    let view: Vec<f64> = serde_json::from_value(browser.value("highwaterChart.view")).expect("two times");
    assert!(view[0] < 61.367 && 61.367 < view[1] && view[1] - view[0] < 5.0, "{view:?}");
    browser.keep("peak");
    // The middle of the lane of rank 0, at the peak.
    let place = browser.value(
        "(() => { const chart = highwaterChart, box = chart.canvas.getBoundingClientRect(), lane = chart.lanes[0];
        const { lanesTop } = chart.rows.find(({ lanes }) => lanes[0] === lane);
        return [box.left + chart.x(61.367), box.top + lanesTop + lane.height - 14]; })()",
    );
    let at = |position: usize| place[position].as_f64().expect("a place");
    browser.point(at(0), at(1));
    browser.painted();
    let tip = browser.value("document.querySelector('.tip').textContent");
    let tip = tip.as_str().expect("text");
    assert!(tip.contains("h200-ddp rank 0") && tip.contains("step 2 (") && tip.contains("forward ("), "{tip}");
    // A finding has its mark above the plot, and is named where it holds.
    let mark = browser.value("(() => { const chart = highwaterChart, { from } = chart.findings.find(({ from }) => from > chart.view[0]);
        const { pen } = chart.painter; return pen.getImageData(Math.round(chart.x(from)), 4, 1, 1).data.join() !== pen.getImageData(90, 12, 1, 1).data.join(); })()");
    assert_eq!(mark, json!(true));
    let said = browser.value("highwaterChart.at(61.5).join()");
    assert!(said.as_str().is_some_and(|said| said.contains("allocator_thrash: The allocator of rank 0")), "{said}");
    browser.press("n");
    assert!(readout(&mut browser).contains("ran out of memory and flushed its cache"), "{}", readout(&mut browser));
    browser.press("0");
    browser.painted();
    assert_eq!(browser.value("highwaterChart.view[1] - highwaterChart.view[0] > 78"), json!(true));
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_spike_of_one_reading_is_visible_at_every_zoom() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    // Five minutes at 1 kHz of a curve that moves all the time, so that it must be thinned; and one reading of a spike.
    let (mut text, spike) = (String::new(), 123_456_u64);
    for at in 0..300_000_u64 {
        let used = if at == spike { 40 * GIB } else { 10 * GIB + at % 7 * 2_097_152 };
        let _ = writeln!(text, "0 {} {used}", at * 1_000_000);
    }
    std::fs::write(folder.path().join("memory_usage.txt"), text).expect("written");
    browser.appear(1200, 800, Theme::Light);
    browser.open(&page(folder.path(), &["memory_usage.txt"]), READY);
    assert_eq!(browser.value("highwaterChart.series[0].curve.count < 100000"), json!(true), "it is not thinned");
    let spike_s = spike as f64 / 1_000.0;
    let visible = |spike_s: f64| {
        format!(
        "(() => {{ const chart = highwaterChart, pen = chart.canvas.getContext('2d'), color = chart.painter.color('--c0');
        const probe = document.createElement('canvas').getContext('2d'); probe.fillStyle = color; probe.fillRect(0, 0, 1, 1);
        const wanted = probe.getImageData(0, 0, 1, 1).data, [top, bottom] = [40, 20].map((gib) => Math.round(chart.y(chart.series[0], gib * 2 ** 30)));
        const x = Math.round(chart.x({spike_s})), near = pen.getImageData(x - 2, top - 2, 5, bottom - top).data;
        for (let i = 0; i < near.length; i += 4) if ([0, 1, 2].every((c) => Math.abs(near[i + c] - wanted[c]) < 40)) return true;
        return false; }})()"
    )
    };
    let seen = visible(spike_s);
    for zoom in 0..32 {
        browser.painted();
        let view = browser.value("highwaterChart.view");
        assert_eq!(browser.value(&seen), json!(true), "zoom {zoom}, from {view}");
        browser.value(&format!("highwaterChart.zoom(1 / 1.5, {spike_s})"));
    }
    // The readout does not claim to know more than the page has.
    let said = format!("highwaterChart.at({}).join()", spike_s + 0.0015);
    let said = browser.value(&said);
    assert!(said.as_str().is_some_and(|said| said.contains(" to 40.00 GiB within ")), "{said}");
    // The last reading before a crash is an instant at the very end.
    let last = (0..1_000).map(|at| format!("0 {} {}\n", at * 1_000_000, if at == 999 { 40 * GIB } else { 10 * GIB }));
    std::fs::write(folder.path().join("memory_usage.txt"), last.collect::<String>()).expect("written");
    browser.open(&page(folder.path(), &["memory_usage.txt"]), READY);
    browser.painted();
    assert_eq!(browser.value(&visible(0.9985)), json!(true), "the last reading");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn an_accessibility_checker_finds_nothing_serious_and_narrow_windows_fit() {
    let (Some(mut browser), Some(axe)) = (Browser::start(), tools::find("axe.min.js")) else { return };
    let axe = std::fs::read_to_string(axe).expect("a script");
    let folder = folder();
    let page = ddp(folder.path());
    for (theme, name) in [(Theme::Light, "light"), (Theme::Dark, "dark")] {
        for width in [1400, 390] {
            browser.appear(width, 1400, theme);
            browser.open(&page, READY);
            browser.painted();
            browser.keep(&format!("{name}-{width}"));
            let overflow = browser.value("document.documentElement.scrollWidth - innerWidth");
            assert!(overflow.as_i64() <= Some(0), "{name}, {width} pixels wide: {overflow} too many");
            let found = browser.check_access(&axe);
            assert!(found.is_empty(), "{name}, {width} pixels wide: {found:#?}");
        }
    }
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn names_from_a_recording_are_text_and_the_page_asks_for_nothing() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let name = "</script><img src=x onerror=alert(1)><!--.sqlite";
    let file = recording(folder.path());
    let evil = "<img src=x onerror=alert(1)>";
    file.execute("UPDATE meta SET value = ?1 WHERE key IN ('note', 'host')", [evil]).expect("written");
    file.execute("UPDATE gpus SET name = ?1, gpu_index = ?1", [evil]).expect("written");
    let row = "INSERT INTO phases VALUES (999999, ?1, 0, 'phase', ?1, 1, (SELECT value FROM meta WHERE key = 'begin_ns'), \
               (SELECT value FROM meta WHERE key = 'end_ns'), 'exit')";
    file.execute(row, [evil]).expect("written");
    let row = "INSERT INTO findings VALUES (999, ?1, ?1, ?1, ?1, ?1, 0, (SELECT value FROM meta WHERE key = 'begin_ns'), \
               NULL, ?1, ?1, ?1, '{}', 0, 0, ?1 || ?1, ?1, ?1, ?1)";
    file.execute(row, [evil]).expect("written");
    drop(file);
    std::fs::rename(
        folder.path().join("it.sqlite"),
        folder.path().join("</script><img src=x onerror=alert(1)><!--.sqlite".replace('/', "_")),
    )
    .expect("renamed");
    browser.appear(1200, 800, Theme::Light);
    browser.open(&page(folder.path(), &[&format!("./{}", name.replace('/', "_"))]), READY);
    browser.painted();
    assert_eq!(browser.value("document.images.length"), json!(0));
    assert_eq!(browser.value("performance.getEntriesByType('resource').length"), json!(0));
    let shown = browser.value("document.body.innerText");
    assert!(shown.as_str().is_some_and(|shown| shown.contains(evil)), "{shown}");
    // What ended it is in words, by a number that the page and the recording have in common.
    let cut = "highwaterChart.lanes.flatMap((lane) => [...lane.begin].map((_, at) => lane.text(at))).filter((text) => text.includes('until the rank ended'))";
    let cut = browser.value(cut);
    assert!(cut.as_array().is_some_and(|cut| cut.len() == 1) && cut.to_string().contains(evil), "{cut}");
    // The page's own policy refuses what a page could still be made to ask for.
    let refused = "fetch('https://example.com/').then(() => 'sent', () => 'refused')";
    assert_eq!(browser.value(refused), json!("refused"));
    assert!(browser.errors.iter().all(|error| error.contains("example.com")), "{:?}", browser.errors);
    assert!(!browser.errors.is_empty(), "a refused request is an error of the page");
}

/// An epoch around the steps, communication inside the backward pass and beyond its end: all of them have a place.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn what_the_gpu_did_is_drawn_below_the_curve_and_in_words_at_the_cursor() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let file = recording(folder.path());
    let shares = "utilization_ratio = 1, sm_active_ratio = 0.6, tensor_active_ratio = 0.25, dram_active_ratio = NULL";
    file.execute(&format!("UPDATE usage SET {shares}"), []).expect("changed");
    drop(file);
    browser.appear(1400, 1000, Theme::Dark);
    browser.open(&page(folder.path(), &["it.sqlite"]), READY);
    browser.painted();
    assert_eq!(browser.value("highwaterChart.strips().length"), json!(1));
    let at = browser.value("highwaterChart.at(0.5).join('; ')");
    let at = at.as_str().expect("text");
    assert!(
        at.contains("GPU 0: busy 100 %, multiprocessors 60 %, tensor cores 25 %") && !at.contains("memory 0"),
        "{at}"
    );
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn who_held_memory_is_drawn_in_bands_and_listed_at_the_peak() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let file = recording(folder.path());
    file.execute_batch("DELETE FROM breakdown").expect("changed");
    let held = "INSERT INTO breakdown SELECT gpu, (SELECT value FROM meta WHERE key = 'begin_ns'), 3 << 30, 1 << 30, NULL, NULL, 512 << 20 FROM gpus";
    file.execute(held, []).expect("written");
    drop(file);
    browser.appear(1400, 1000, Theme::Light);
    browser.open(&page(folder.path(), &["it.sqlite"]), READY);
    browser.painted();
    let bands = browser.value(
        "highwaterChart.bands(highwaterChart.series[0], 0.5, 2 ** 40).map((one) => [one.text(), (one.to - one.from) / 2 ** 30])",
    );
    let wanted = json!([
        ["512.00 MiB held by other processes", 0.5],
        ["3.00 GiB held by tensors in allocators", 3],
        ["1.00 GiB held by allocators' caches", 1]
    ]);
    assert_eq!(bands, wanted);
    let row = browser.value(
        "document.querySelector('[aria-label^=\"Memory of each GPU at its peak\"] tbody tr').innerText.split('\\t')",
    );
    assert_eq!(row, json!(["0", "3.00 GiB", "1.00 GiB", "not known", "not known", "512.00 MiB"]));
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn phases_that_overlap_are_all_drawn() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let file = recording(folder.path());
    let begin_ns: i64 =
        file.query_row("SELECT value FROM meta WHERE key = 'begin_ns'", [], |row| row.get(0)).expect("a time");
    file.execute_batch("DELETE FROM phases; DELETE FROM phase_memory").expect("written");
    for (name, from_ms, to_ms) in [("epoch", 0, 900), ("backward", 100, 700), ("comm", 200, 400), ("comm", 600, 800)] {
        let row = "INSERT INTO phases (job, rank, kind, name, step, begin_ns, end_ns) VALUES ('j', 0, 'phase', ?1, 1, ?2, ?3)";
        file.execute(row, rusqlite::params![name, begin_ns + from_ms * 1_000_000, begin_ns + to_ms * 1_000_000])
            .expect("written");
    }
    drop(file);
    browser.appear(1200, 800, Theme::Light);
    browser.open(&page(folder.path(), &["it.sqlite"]), READY);
    browser.painted();
    assert_eq!(browser.value("Array.from(highwaterChart.lanes[0].level)"), json!([0, 1, 2, 2]));
    // In the middle of each, its own color.
    let drawn =
        "[...highwaterChart.lanes[0].begin].map((begin, at) => { const chart = highwaterChart, lane = chart.lanes[0];
        const x = chart.x((begin + lane.end[at]) / 2 + 0.03), level = lane.levels[lane.level[at]];
        const y = chart.rows[0].lanesTop + level.top + 2;
        return chart.painter.pen.getImageData(Math.round(x), Math.round(y), 1, 1).data.join(); })";
    let drawn: Vec<String> = serde_json::from_value(browser.value(drawn)).expect("colors");
    assert_eq!(drawn[2], drawn[3], "both are communication");
    let distinct: std::collections::BTreeSet<_> = drawn.iter().collect();
    assert_eq!(distinct.len(), 3, "{drawn:?}");
    let said = browser.value("highwaterChart.at(0.3).join()");
    assert!(
        said.as_str()
            .is_some_and(|said| said.contains("epoch (") && said.contains("backward (") && said.contains("comm (")),
        "{said}"
    );
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_step_is_compared_with_the_others_of_each_rank() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let file = recording(folder.path());
    let begin_ns: i64 =
        file.query_row("SELECT value FROM meta WHERE key = 'begin_ns'", [], |row| row.get(0)).expect("a time");
    file.execute_batch("DELETE FROM phases; DELETE FROM phase_memory; DELETE FROM findings").expect("written");
    // Steps of 60 ms: 40 of work, 10 of communication. In step 7 rank 0 works for 70 ms, and rank 1 waits for it.
    let row = "INSERT INTO phases (job, rank, kind, name, step, begin_ns, end_ns) VALUES ('j', ?1, ?2, ?3, ?4, ?5, ?6)";
    for rank in 0..2 {
        let mut at_us = 0;
        for step in 0..12 {
            let late = if step == 7 { 30_000 } else { (step * 7 % 5) * 100 };
            let (work, comm) = if rank == 0 { (40_000 + late, 10_000) } else { (40_000, 10_000 + late) };
            let write = |kind: &str, name: &str, from_us: i64, to_us: i64| {
                let ns = |us: i64| begin_ns + us * 1_000;
                file.execute(row, rusqlite::params![rank, kind, name, step, ns(from_us), ns(to_us)]).expect("written");
            };
            write("step", "step", at_us, at_us + work + comm + 10_000);
            write("phase", "forward", at_us, at_us + work);
            write("phase", "comm", at_us + work, at_us + work + comm);
            at_us += work + comm + 10_000;
        }
    }
    drop(file);
    browser.appear(1200, 900, Theme::Light);
    browser.open(&page(folder.path(), &["it.sqlite"]), READY);
    browser.painted();
    // A click on rank 1's step 7.
    let place = browser.value(
        "(() => { const chart = highwaterChart, box = chart.canvas.getBoundingClientRect(), [first, lane] = chart.lanes;
        return [box.left + chart.x(0.45), box.top + chart.rows[0].lanesTop + first.height + lane.height / 2]; })()",
    );
    browser.click(place[0].as_f64().expect("a place"), place[1].as_f64().expect("a place"));
    browser.wait("document.querySelector('section.step') !== null");
    let said = browser.value("document.querySelector('section.step p').textContent");
    let said = said.as_str().expect("text");
    for wanted in [
        "Step 7 of j took 90.0 ms on rank 1, 29.8 ms longer than the median of 11 others. Longer than usual: forward of rank 0 by 29.8 ms.",
        "Longer in communication, which waits for the latest: comm of rank 1 by 29.8 ms.",
    ] {
        assert!(said.contains(wanted), "{said}");
    }
    let rows = browser.value("[...document.querySelectorAll('section.step tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent).slice(0, 4))");
    let wanted = json!([
        ["rank 0", "90.0 ms (+29.8 ms)", "70.0 ms (+29.8 ms)", "10.0 ms"],
        ["rank 1", "90.0 ms (+29.8 ms)", "40.0 ms", "40.0 ms (+29.8 ms)"]
    ]);
    assert_eq!(rows, wanted);
    // Another one, by key, is as long as usual.
    browser.value("highwaterChart.cursor = 0.1; 0");
    browser.press("s");
    let said = browser.value("document.querySelector('section.step p').textContent");
    assert!(
        said.as_str().is_some_and(|said| said.contains("within what is usual: the median of 11 others is 60.2 ms")
            && !said.contains("Longer")),
        "{said}"
    );
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn recordings_are_overlaid_and_allocations_are_stacked() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let mut files = Vec::new();
    for (nth, peak) in [20_u64, 22, 18, 30, 20].into_iter().enumerate() {
        let name = format!("algorithm_{nth}.txt");
        let line =
            |at: u64| format!("0 {} {}\n", at * 1_000_000, if at < 100 * (nth as u64 + 1) { GIB } else { peak * GIB });
        std::fs::write(folder.path().join(&name), (0..1_000).map(line).collect::<String>()).expect("written");
        files.push(name);
    }
    browser.appear(1200, 900, Theme::Light);
    browser.open(&page(folder.path(), &files.iter().map(String::as_str).collect::<Vec<_>>()), READY);
    browser.painted();
    browser.keep("overlaid");
    assert_eq!(browser.value("highwaterChart.series.length"), json!(5));
    let peaks = browser.value("[...document.querySelectorAll('table')][0].innerText.match(/\\d+\\.\\d+ GiB/g).length");
    assert_eq!(peaks, json!(10), "a peak and a mean of each");
    let profile = Connection::open(folder.path().join("profile")).expect("created");
    profile
        .execute_batch(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMORY (_id_ INTEGER PRIMARY KEY, memoryKind INT, address INT, bytes INT, \
             start INT, end INT, deviceId INT);
             INSERT INTO CUPTI_ACTIVITY_KIND_MEMORY VALUES (1, 3, 1, 1073741824, 1000000000, 5000000000, 0),
                 (2, 3, 2, 2147483648, 2000000000, 4000000000, 0), (3, 3, 3, 536870912, 3000000000, 0, 0)",
        )
        .expect("good SQL");
    drop(profile);
    browser.open(&page(folder.path(), &["profile"]), READY);
    browser.painted();
    browser.keep("allocations");
    let bands = browser
        .value("highwaterChart.bands(highwaterChart.series[0], 2.5, 3.5 * 2 ** 30).map(({ from, to }) => [from, to])");
    let gib = |gib: f64| json!(gib * GIB as f64);
    let bands: Vec<Value> = serde_json::from_value(bands).expect("bands");
    assert_eq!(bands.len(), 3, "{bands:?}");
    let ends: Vec<Value> = bands.iter().map(|band| json!([band[0].as_f64(), band[1].as_f64()])).collect();
    assert_eq!(ends, [json!([gib(0.0), gib(2.0)]), json!([gib(2.0), gib(3.0)]), json!([gib(3.0), gib(3.5)])]);
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// Traces of the profiler beside the recording of the same job: each is drawn where it was on the same clock.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn traces_lie_below_the_curve_of_the_same_time_and_layers_alone_are_drawn_without_a_chart() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let data = |name: &str| tools::root().join("tests/data").join(name).display().to_string();
    let files = [data("kineto/ddp_tight_rank0.json.gz"), data("kineto/ddp_tight_rank1.json.gz"), data("h200-ddp")];
    browser.appear(1300, 1000, Theme::Light);
    browser.open(&page(folder.path(), &files.each_ref().map(String::as_str)), READY);
    browser.painted();
    browser.keep("traces");
    let lanes = "highwaterChart.lanes.map((lane) => [lane.name, lane.begin[0] + lane.shift])";
    let lanes: Vec<(String, f64)> = serde_json::from_value(browser.value(lanes)).expect("lanes");
    let begin = |name: &str| lanes.iter().find(|lane| lane.0.starts_with(name)).map(|lane| lane.1).expect(name);
    let (first, second) = (begin("ddp_tight_rank0.json.gz, GPU 0"), begin("ddp_tight_rank1.json.gz, GPU 1"));
    assert!((67.6..67.9).contains(&first) && (first - second).abs() < 0.01, "{lanes:?}");
    // What the profiler saw of collectives lies inside what the job itself marked as communication.
    let inside = "['GPU 0 rank 0', 'GPU 1 rank 1'].map((gpu, rank) => {
        const lane = (end) => highwaterChart.lanes.find(({ name }) => name.endsWith(end));
        const comm = ({ begin, end, of, shift }) => [...begin.keys()].filter((i) => of[i].name === 'comm')
            .map((i) => [begin[i] + shift, end[i] + shift]);
        const marked = comm(lane(`h200-ddp rank ${rank}`)), seen = comm(lane(gpu));
        const sum = (pairs) => pairs.reduce((sum, [from, to]) => sum + Math.max(0, to - from), 0);
        const both = seen.flatMap(([a, b]) => marked.map(([c, d]) => [Math.max(a, c), Math.min(b, d)]));
        return [sum(seen), sum(both) / sum(seen)]; })";
    let inside: Vec<(f64, f64)> = serde_json::from_value(browser.value(inside)).expect("two ranks");
    assert!(inside.iter().all(|(seconds, part)| *seconds > 0.03 && *part > 0.97), "{inside:?}");
    let text = browser.value("document.getElementById('report').innerText");
    let text = text.as_str().expect("text");
    assert!(text.contains("The others waited for rank 0 the longest.") && text.contains("It began 67."), "{text}");
    // The same, moved so that a step of the job is at 0: what ran at the same time stays together.
    let output = command()
        .current_dir(folder.path())
        .args(["report", &files[0], &files[2], "-o", "page.html", "--align-step", "100"])
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    browser.open(&folder.path().join("page.html"), READY);
    let moved = browser.value("highwaterChart.lanes[0].shift - highwaterChart.series[0].shift");
    assert!((moved.as_f64().expect("a number") - first).abs() < 0.01, "{moved}");
    browser.open(&page(folder.path(), &[&data("torch/resnet50_layer_traces.json.gz")]), READY);
    let shown = "[document.querySelectorAll('#report > .chart .tools').length, document.getElementById('report').innerText.includes('layer1.0.conv3')]";
    assert_eq!(browser.value(shown), json!([0, true]), "layers, and no empty chart");
    browser.open(&page(folder.path(), &[&data("kineto/mlp_kineto.json.gz")]), READY);
    browser.painted();
    browser.keep("trace");
    assert_eq!(
        browser.value("highwaterChart.rows[0].floor - highwaterChart.rows[0].top"),
        json!(0),
        "no plot without memory"
    );
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn kernels_of_a_trace_have_their_names_when_zoomed_in() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    let data = |name: &str| tools::root().join("tests/data").join(name).display().to_string();
    browser.appear(1300, 900, Theme::Light);
    browser.open(&page(folder.path(), &[&data("kineto/ddp_tight_rank0.json.gz")]), READY);
    browser.painted();
    // The longest kernel of NCCL alone in view: its name is under the pointer.
    let place = browser.value(
        "(() => { const chart = highwaterChart, [lane] = chart.lanes, box = chart.canvas.getBoundingClientRect();
        const own = [...lane.of.keys()].filter((at) => lane.of[at].kind === 'layer' && lane.of[at].name.startsWith('nccl'));
        const at = own.reduce((one, other) => lane.end[other] - lane.begin[other] > lane.end[one] - lane.begin[one] ? other : one);
        chart.show(lane.begin[at] - 1e-4, lane.end[at] + 1e-4);
        const level = lane.levels[lane.level[at]];
        return [box.left + chart.x((lane.begin[at] + lane.end[at]) / 2), box.top + chart.rows[0].lanesTop + level.top + 5]; })()",
    );
    browser.painted();
    browser.point(place[0].as_f64().expect("a place"), place[1].as_f64().expect("a place"));
    browser.painted();
    let tip = browser.value("document.querySelector('.tip').innerText");
    let tip = tip.as_str().expect("text");
    assert!(tip.contains("ncclDevKernel_AllReduce_Sum_bf16_RING_LL (3.3 ms)") && tip.contains("comm ("), "{tip}");
    let row = browser.value(
        "[...document.querySelectorAll('[aria-label^=\"The kernels and copies\"] tbody tr')]
        .map((row) => row.innerText.split('\\t')).find(([name]) => name.startsWith('nccl'))",
    );
    assert_eq!(
        row,
        json!(["ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "GPU 0", "732", "37.75 ms", "6.6 %", "52 µs", "3.3 ms"])
    );
    // What could do nothing in a trace without memory and findings has no button.
    let keys = browser.value(
        "[...document.querySelectorAll('.tools button')].map((one) => one.getAttribute('aria-keyshortcuts')).join('')",
    );
    assert_eq!(keys, "ms+-0[]t");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn stacks_are_a_flame_graph_that_a_band_leads_to() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = folder();
    browser.appear(1300, 900, Theme::Dark);
    let snapshot = tools::root().join("tests/data/torch/mlp_snapshot.pickle.gz").display().to_string();
    browser.open(&page(folder.path(), &[&snapshot]), READY);
    browser.painted();
    let frames =
        "[...document.querySelectorAll('.flame [role=treeitem]')].map((one) => one.getAttribute('aria-label'))";
    let drawn: Vec<String> = serde_json::from_value(browser.value(frames)).expect("a list");
    // As wide as what is held: 384.23 of 705.64 MiB were allocated below train.py:14.
    assert!(drawn[0].starts_with("all that was allocated: 705.64 MiB, 100.0 %"), "{drawn:?}");
    assert!(drawn.iter().any(|name| name == "train.py:14:step: 384.23 MiB, 54.5 %"), "{drawn:?}");
    assert!(!drawn.iter().any(|name| name.contains("??")), "frames outside of Python are hidden at first: {drawn:?}");
    let wide = browser.value("(() => { const graph = document.querySelector('.flame'), one = [...graph.children].find((one) => one.title.startsWith('train.py:14:step'));
        return one.getBoundingClientRect().width / graph.clientWidth; })()");
    assert!((wide.as_f64().expect("a share") - 0.5445).abs() < 0.002, "{wide}");
    // A click on the lowest band in the chart leads to the stacks of its place.
    let place = browser.value(
        "(() => { const chart = highwaterChart, box = chart.canvas.getBoundingClientRect(), [one] = chart.series;
        return [box.left + chart.x(0.29), box.top + chart.y(one, 100 * 2 ** 20)]; })()",
    );
    browser.click(place[0].as_f64().expect("a place"), place[1].as_f64().expect("a place"));
    let said = "document.querySelector('.flame + .readout').textContent";
    assert_eq!(browser.value(said), "train.py:14:step: 384.23 MiB, 54.5 % of what was allocated at the peak.");
    assert_eq!(browser.value("document.querySelectorAll('.flame .meant').length > 0"), json!(true));
    // Below are the whole stacks of the place, folded; the place in the table of bands is a button that leads to its own.
    let folded = "[...document.querySelectorAll('.flame ~ div .stack summary')].map((one) => one.title)";
    let stacks: Vec<String> = serde_json::from_value(browser.value(folded)).expect("a list");
    assert!(stacks.len() > 1 && stacks.iter().all(|name| name.ends_with(": train.py:14:step")), "{stacks:?}");
    browser.value("document.querySelector('.flame ~ div .stack summary').click()");
    let open = "(() => { const { open, textContent } = document.querySelector('.flame ~ div .stack'); return open && textContent.includes('train.py:16:<module>'); })()";
    assert_eq!(browser.value(open), json!(true));
    browser.value("document.querySelector('[aria-label=\"Show the stacks of train.py:12:step\"]').click()");
    assert_eq!(browser.value(said), "train.py:12:step: 33.00 MiB, 4.7 % of what was allocated at the peak.");
    // The search counts what lies inside of other hits once.
    browser.value("(() => { const field = document.querySelector('[aria-label^=\"Search the frames\"]'); field.value = 'adam'; field.dispatchEvent(new Event('input')); })()");
    assert_eq!(browser.value(said), "Frames with “adam”: 384.23 MiB, 54.5 % of what was allocated at the peak.");
    // A frame alone, and with those of other languages.
    browser.value("[...document.querySelectorAll('.flame [role=treeitem]')].find((one) => one.title.startsWith('train.py:14')).click()");
    let drawn: Vec<String> = serde_json::from_value(browser.value(frames)).expect("a list");
    assert_eq!(drawn[0], "train.py:14:step: 384.23 MiB, 54.5 %");
    browser.press("Escape");
    browser.value("document.querySelector('.tools label input').click()");
    let all: Vec<String> = serde_json::from_value(browser.value(frames)).expect("a list");
    assert!(all.iter().any(|name| name.contains("empty_strided_cuda")), "{all:?}");
    if let Some(axe) = tools::find("axe.min.js") {
        let axe = std::fs::read_to_string(axe).expect("a script");
        assert_eq!(browser.check_access(&axe), Vec::<String>::new());
    }
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}
