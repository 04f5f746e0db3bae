//! The live page in a real browser: drawn, zoomed to a single reading, up to date with findings, and closed to other servers.

use crate::browser::{Browser, Theme};
use crate::daemon::{Daemon, agent, wide};
use crate::process::eventually;
use crate::tools;
use serde_json::{Value, json};
use std::time::Duration;

const READY: &str =
    "document.documentElement?.dataset.ready === 'true' && highwaterChart.series.every(({ curve }) => curve.overview)";

fn visit(browser: &mut Browser, daemon: &Daemon, place: &str, ready: &str) {
    browser.visit(&format!("http://{}/{place}", daemon.address()), ready);
    browser.painted();
}

fn text(browser: &mut Browser, expression: &str) -> String {
    browser.value(expression).as_str().unwrap_or_else(|| panic!("{expression} is no text")).to_owned()
}

fn findings(daemon: &Daemon) -> Vec<Value> {
    let answer: Value = serde_json::from_str(&daemon.get("/api/v1/findings")).expect("JSON");
    answer["findings"].as_array().expect("a list").clone()
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_chart_is_drawn_and_a_phase_is_named_under_the_pointer() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    browser.appear(1400, 1000, Theme::Light);
    visit(&mut browser, &daemon, "", READY);
    // Whole steps, and every GPU in its color.
    browser.wait("highwaterChart.lanes.length === 4 && highwaterChart.lanes.every(({ count }) => count > 20)");
    browser.painted();
    let drawn = "(() => { const { canvas } = highwaterChart, pixels = canvas.getContext('2d')
        .getImageData(0, 0, canvas.width, canvas.height).data; let colors = new Set();
        for (let i = 0; i < pixels.length; i += 4) colors.add(pixels.slice(i, i + 3).join());
        return colors.size; })()";
    assert!(browser.value(drawn).as_u64() > Some(20), "an empty chart");
    // Paused at a phase that has ended, and pointed at.
    let place = browser.value(
        "(() => { const chart = highwaterChart, lane = chart.lanes[0];
        const at = lane.of.findLastIndex(({ name }, i) => name === 'forward' && !lane.open[i] && i < lane.count - 8);
        chart.show(lane.begin[at] - 0.1, lane.end[at] + 0.1); globalThis.pointedAt = (lane.begin[at] + lane.end[at]) / 2; })()",
    );
    assert!(place.is_null());
    browser.painted();
    let place = browser.value(
        "(() => { const chart = highwaterChart, box = chart.canvas.getBoundingClientRect(), lane = chart.lanes[0];
        const { lanesTop } = chart.rows.find(({ lanes }) => lanes[0] === lane);
        return [box.left + chart.x(pointedAt), box.top + lanesTop + lane.height - 14]; })()",
    );
    browser.point(place[0].as_f64().expect("a place"), place[1].as_f64().expect("a place"));
    browser.painted();
    let tip = text(&mut browser, "document.querySelector('.tip').innerText");
    assert!(tip.contains("llama-ddp rank 0") && tip.contains("step ") && tip.contains("forward ("), "{tip}");
    // What the GPUs did, drawn and in words, before the page was opened too.
    browser.wait("highwaterChart.strips().length === 4 && highwaterChart.strips().every(({ activity }) => activity.points.length > 20)");
    let said = text(&mut browser, "highwaterChart.at(highwaterChart.center()).join('; ')");
    assert!(said.contains("multiprocessors ") && said.contains("tensor cores "), "{said}");
    let column = "(() => { const chart = highwaterChart, [one] = chart.strips(), { canvas } = chart, ratio = canvas.width / canvas.clientWidth;
        const { top } = chart.rows.find(({ series }) => series.includes(one)).strips[0], pixels = canvas.getContext('2d').getImageData(0, top * ratio, canvas.width, 12 * ratio).data;
        const colors = new Set(); for (let i = 0; i < pixels.length; i += 4) colors.add(pixels.slice(i, i + 3).join()); return colors.size; })()";
    assert!(browser.value(column).as_u64() > Some(3), "an empty strip");
    // The address names what is shown, and leads there again.
    browser.wait("location.hash.includes('from=')");
    let view = text(&mut browser, "highwaterChart.view.map((at) => highwaterChart.axis.moment(at)).join()");
    let address = text(&mut browser, "location.hash");
    browser.visit("about:blank", "location.href === 'about:blank'");
    visit(&mut browser, &daemon, &address, READY);
    let again = text(&mut browser, "highwaterChart.view.map((at) => highwaterChart.axis.moment(at)).join()");
    assert_eq!(view[..12], again[..12], "to the millisecond");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn zoom_reaches_a_spike_of_a_millisecond_and_everything_works_by_keyboard() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    // 20 GiB for half a millisecond every ten seconds: one reading sees them.
    eventually(Duration::from_secs(60), "a spike", || {
        let memory: Value = serde_json::from_str(&daemon.get("/api/v1/gpus/0/memory?from=0")).ok()?;
        (memory["peak_bytes"].as_u64() >= Some(20 << 30)).then_some(())
    });
    browser.appear(1200, 900, Theme::Dark);
    visit(&mut browser, &daemon, "", READY);
    assert_eq!(browser.value("highwaterChart.following"), json!(30));
    let notice = browser.value("document.querySelector('.notice').textContent");
    assert_eq!(notice, "Simulated by sim:spike: no GPU was read.");
    browser.value("highwaterChart.place.focus()");
    browser.press("p");
    browser.wait("highwaterChart.following === null");
    let said = text(&mut browser, "document.querySelector('.readout').textContent");
    assert!(said.starts_with("Peak of GPU 0: 20."), "{said}");
    for _ in 0..16 {
        browser.press("+");
    }
    browser.wait("!highwaterLive.feed.gpus.values().next().value.loading");
    browser.painted();
    let shown = browser.value("highwaterChart.view[1] - highwaterChart.view[0]").as_f64().expect("a time");
    assert!(shown < 0.01, "{shown} s are shown");
    // The spike lasts from one reading to the next, and is drawn as such.
    let spike = browser.value(
        "(() => { const { curve } = highwaterChart.series[0], [from, to] = highwaterChart.view, highest = [];
        for (let at = from; at < to; at += 20e-6) if (curve.extremes(at, at + 1e-6).most > 15 * 2 ** 30) highest.push(at);
        return highest.length * 20e-6; })()",
    );
    let spike = spike.as_f64().expect("a time");
    assert!(spike > 0.0 && spike < 0.003, "the spike lasts {spike} s");
    // Two pins: before the spike, and at its top.
    browser.value("globalThis.spikeAt = (() => { const { curve } = highwaterChart.series[0], [from, to] = highwaterChart.view; let at = from; while (at < to && !(curve.extremes(at, at + 1e-6).most > 15 * 2 ** 30)) at += 20e-6; return at; })()");
    browser.value("highwaterChart.point(spikeAt - 0.002)");
    browser.press("m");
    let said = text(&mut browser, "document.querySelector('.readout').textContent");
    assert!(said.starts_with("Pinned "), "{said}");
    browser.value("highwaterChart.point(spikeAt + 1e-4)");
    browser.press("m");
    let said = text(&mut browser, "document.querySelector('.readout').textContent");
    assert!(said.starts_with("2.1 ms from ") && said.contains(", +20.00 GiB"), "{said}");
    assert_eq!(browser.value("highwaterChart.pins.length"), json!(2));
    browser.press("m");
    assert_eq!(browser.value("highwaterChart.pins.length"), json!(1), "the third begins anew");
    browser.press("0");
    browser.wait("highwaterChart.view[1] - highwaterChart.view[0] > 4");
    browser.press("t");
    let rows = browser.value("document.querySelectorAll('.chart table tbody tr').length");
    assert!(rows.as_u64() >= Some(50), "the chart as a table: {rows}");
    browser.press("2");
    browser.wait("highwaterChart.following === 60");
    browser.painted();
    browser.keep("live-spike");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// The memory of a GPU from `from` on, and the answer's status.
fn memory(daemon: &Daemon, from: i64) -> (u16, Value) {
    let (status, body) = daemon.ask(&format!("/api/v1/gpus/2/memory?from={from}&max_points=4000"));
    (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")))
}

/// A daemon that keeps a minute and runs for longer: the oldest time moves on with each reading, a thousand times a second.
fn wrapped() -> Daemon {
    let daemon = Daemon::start(&["serve", "--source", "sim:demo", "--set", "ring.retention=60s"]).ready();
    let oldest = || {
        let answer: Value = serde_json::from_str(&daemon.get("/api/v1/gpus")).ok()?;
        answer["gpus"][2]["oldest_unix_nano"].as_i64()
    };
    let first = eventually(Duration::from_secs(20), "a reading", oldest);
    eventually(Duration::from_secs(120), "a ring that has wrapped", || (oldest()? > first).then_some(()));
    daemon
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_page_has_all_that_is_kept_once_the_oldest_is_forgotten() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = wrapped();
    for _ in 0..20 {
        let (status, answer) = memory(&daemon, 0);
        assert_eq!(status, 200, "{answer}");
        let [from, oldest] = ["from_unix_nano", "oldest_unix_nano"].map(|name| answer[name].as_i64().expect("a time"));
        assert!(oldest > 0 && from >= oldest, "{from}, {oldest}");
        // Its points and its peak are of the same readings.
        let points = answer["points"].as_array().expect("a list");
        assert_eq!(points[0][0], from);
        assert_eq!(points.iter().filter_map(|point| point[1].as_u64()).max(), answer["peak_bytes"].as_u64());
    }
    browser.appear(1400, 1000, Theme::Light);
    visit(&mut browser, &daemon, "", READY);
    browser.value("highwaterChart.place.focus()");
    browser.press("0");
    let whole = "(() => { const [from, to] = highwaterChart.view, part = (to - from) / 20, { curve } = highwaterChart.series[2];
        return to - from > 50 && Array.from({ length: 18 }, (_, i) => from + (i + 1.5) * part)
            .every((at) => curve.extremes(at, at + part).most > 2 ** 30); })()";
    browser.wait(whole);
    let peak = "fetch('api/v1/gpus/2/memory?from=0').then((answer) => answer.json())
        .then(({ peak_bytes: peak }) => peak > 0 && peak === highwaterChart.series[2].peak?.[0])";
    browser.wait(peak);
    browser.painted();
    browser.keep("live-wrapped");
    // More than is kept: the page says from when on there is memory.
    browser.press("3");
    browser.wait("document.querySelector('.chart').innerText.includes('The daemon has memory from ')");
    // And what it could not load is not missing without a word.
    browser.value(
        "for (const { memory } of highwaterLive.feed.gpus.values())
            Object.assign(memory, { overview: null, detail: null, load: () => Promise.reject(new Error('made up')) })",
    );
    browser.wait("document.querySelector('.chart').innerText.includes('Memory of GPU 2 before ')");
    browser.wait("document.querySelector('.chart').innerText.includes('could not be loaded: made up.')");
    browser.painted();
    browser.keep("live-lacks-history");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// A finding older than the rings' memory is drawn from its capture, and the page never shows another time instead. A URL
/// that a colleague has sent does not change.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn an_old_finding_and_an_old_address_show_their_own_time_or_none() {
    let Some(mut browser) = Browser::start() else { return };
    let captures = tempfile::tempdir().expect("a folder");
    let folder = format!("captures.directory={}", captures.path().display());
    let daemon =
        Daemon::start(&["serve", "--source", "sim:demo", "--set", "ring.retention=60s", "--set", &folder]).ready();
    // The first episode of the demo is over, its capture is written, and its time has left the ring.
    let old = eventually(Duration::from_secs(240), "a finding of before what is kept", || {
        let gpus: Value = serde_json::from_str(&daemon.get("/api/v1/gpus")).ok()?;
        let oldest = gpus["gpus"][2]["oldest_unix_nano"].as_i64()?;
        let is_old = |found: &Value| found["ended_unix_nano"].as_i64().is_some_and(|ended| ended < oldest);
        findings(&daemon).into_iter().rev().find(|found| found["finding"] == "low_headroom" && is_old(found))
    });
    let [begin, seen] = ["begin_unix_nano", "seen_unix_nano"].map(|name| old[name].as_f64().expect("a time"));
    assert_eq!(old["ended_unix_nano"], old["seen_unix_nano"], "it ended with its last sign");
    assert!(old["first"]["seen_unix_nano"].as_f64() <= Some(seen) && old["first"]["what"].is_string(), "{old}");
    let covers = format!(
        "(() => {{ const [from, to] = highwaterChart.view.map((at) => highwaterLive.feed.unixNs(at));
        return from <= {begin} && to >= {seen} && to - from < 3 * ({seen} - {begin}) + 5e9; }})()"
    );
    for (theme, width, name) in [(Theme::Light, 1400, "light"), (Theme::Dark, 390, "dark")] {
        browser.appear(width, 1000, theme);
        browser.visit("about:blank", "location.href === 'about:blank'");
        visit(&mut browser, &daemon, &format!("#/finding/{}", old["id"]), READY);
        browser.wait("document.querySelector('.chart').innerText.includes('memory is drawn from the capture')");
        assert_eq!(browser.value(&covers), json!(true), "its own time");
        let full = format!(
            "highwaterChart.series.some(({{ curve }}) => curve.extremes(highwaterLive.feed.seconds({begin}) - 0.1,
            highwaterLive.feed.seconds({begin}) + 0.5).most > 138 * 2 ** 30)"
        );
        browser.wait(&full);
        browser.painted();
        browser.keep(&format!("live-old-finding-{name}"));
    }
    // Its bar ends with its last sign, and the text at its begin is that of its first sign.
    let bar = format!(
        "(() => {{ const [one] = highwaterChart.findings, {{ feed }} = highwaterLive;
        return Math.abs(feed.unixNs(one.to) - {seen}) < 1e6; }})()"
    );
    assert_eq!(browser.value(&bar), json!(true));
    browser.value("highwaterChart.place.focus()");
    browser.press("n");
    let said = text(&mut browser, "document.querySelector('.readout').textContent");
    assert!(said.contains(old["first"]["what"].as_str().expect("text")), "{said}");
    // A time of which nothing is left, not even a capture.
    let before = (begin / 1e6) as i64 - 3_600_000;
    let address = format!("#/gpu/2?from={before}.000&to={}.000", before + 5_000);
    visit(&mut browser, &daemon, &address, "document.documentElement?.dataset.ready === 'true'");
    browser.wait("document.querySelector('.chart').innerText.includes('is no longer kept, and no capture has it')");
    browser.wait("highwaterLive.feed.revision !== null");
    let shown = text(&mut browser, "location.hash");
    assert_eq!(shown, address, "the address is its sender's");
    let view = browser.value("highwaterLive.feed.originMs + highwaterChart.view[0] * 1e3").as_f64().expect("a time");
    assert!((view - before as f64).abs() < 1.0, "{view} instead of {before}");
    browser.keep("live-old-address");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// Shown at the latest with the fourth event after it was raised: events are a quarter of a second apart.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_finding_appears_within_a_second_and_its_capture_opens() {
    let Some(mut browser) = Browser::start() else { return };
    browser.appear(1400, 1000, Theme::Light);
    // The page must be open before the first finding, after ten seconds of the demo. A busy machine may need several demos.
    let opened = (0..5).find_map(|_| {
        let daemon = Daemon::start(&["demo"]).ready();
        visit(&mut browser, &daemon, "", "document.documentElement?.dataset.ready === 'true'");
        browser.value(
            "globalThis.events = []; globalThis.shownAfter = null;
            highwaterLive.feed.stream.addEventListener('message', ({ data }) => events.push(JSON.parse(data).base_unix_nano));
            new MutationObserver(() => { if (shownAfter === null && document.querySelector('.found')) shownAfter = events.length; })
                .observe(document.body, { childList: true, subtree: true }); 0",
        );
        findings(&daemon).is_empty().then_some(daemon)
    });
    let daemon = opened.expect("a page that opens within ten seconds");
    browser.wait("shownAfter !== null");
    let found = findings(&daemon);
    let first = found.last().expect("it is shown, so it is there");
    let raised = first["raised_unix_nano"].as_i64().expect("a time");
    let events: Vec<f64> = serde_json::from_value(browser.value("events.slice(0, shownAfter)")).expect("times");
    let after = events.iter().filter(|base| **base > raised as f64).count();
    // None after it, if it was raised between the reading of an event's time and that of the findings' revision.
    assert!(after <= 4, "shown with event {after} after it was raised");
    // It is in the card of its incident, whose text follows what is known.
    let id = &first["id"];
    let incident = || {
        let answer: Value = serde_json::from_str(&daemon.get("/api/v1/incidents")).expect("JSON");
        let incidents = answer["incidents"].as_array().expect("a list");
        incidents.iter().find(|one| one["id"] == first["incident"]).expect("its incident").clone()
    };
    let own = format!(
        "[...document.querySelectorAll('.found')].find((one) => one.querySelector('a[href=\"#/finding/{id}\"]'))"
    );
    eventually(Duration::from_secs(30), "the incident's advice on the page", || {
        let said = browser.value(&format!("{own}?.innerText"));
        let advice = incident()["advice"].as_str().expect("text").to_owned();
        (!advice.is_empty() && said.as_str()?.contains(&advice)).then_some(())
    });
    // Marked on the curve.
    browser.wait("highwaterChart.findings.length > 0");
    browser.keep("live-finding");
    // Its capture is linked from it, opens in the same viewer, and can be downloaded.
    browser.wait("[...document.querySelectorAll('.found a')].some(({ hash }) => hash.startsWith('#/capture/'))");
    browser.wait("[...document.querySelectorAll('a')].some(({ textContent }) => textContent === 'open')");
    let file = text(
        &mut browser,
        "[...document.querySelectorAll('a')].find(({ textContent }) => textContent === 'download').pathname",
    );
    let file = agent().get(format!("http://{}{file}", daemon.address())).call().expect("an answer");
    assert_eq!(file.headers()["content-type"], "application/vnd.sqlite3");
    browser.value("[...document.querySelectorAll('a')].find(({ textContent }) => textContent === 'open').click()");
    browser.wait("location.pathname.endsWith('/report') && document.documentElement?.dataset.ready === 'true'");
    browser.painted();
    assert!(browser.value("highwaterChart.series.length").as_u64() == Some(4));
    assert!(browser.value("highwaterChart.lanes.length").as_u64() == Some(4));
    browser.keep("live-capture");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// One rank of 64 is short of memory time and again, because something outside its allocator takes it.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn of_64_ranks_the_first_screen_says_which_is_short_of_memory_why_and_what_to_do() {
    let Some(mut browser) = Browser::start() else { return };
    // Rank 0 is on the last GPU, which is not among those that are drawn at first.
    let (_folder, source) = wide((0..64).rev(), "every = \"18 s\"\noffset = \"8 s\"\nfor = \"4 s\"");
    let daemon = Daemon::start(&["serve", "--source", &source, "--set", "sampling.period=10ms"]).ready();
    browser.appear(1280, 800, Theme::Light);
    visit(&mut browser, &daemon, "", "document.documentElement?.dataset.ready === 'true'");
    // The second time: a finding holds for ten seconds.
    browser.wait("highwaterLive.feed.incidents.some(({ times }) => times >= 2)");
    browser.wait("[...document.querySelectorAll('.found strong')].some((one) => one.textContent.includes('outside the allocator of rank 0 of wide'))");
    let seen = browser.value(
        "(() => { const bottom = (one) => one.getBoundingClientRect().bottom, cards = [...document.querySelectorAll('.found')];
        const cause = cards[0].querySelector('strong'), todo = [...cards[0].querySelectorAll('strong')].at(-1);
        return { cards: cards.length, cause: bottom(cause), todo: bottom(todo.parentElement), page: document.documentElement.scrollHeight,
            title: document.title, drawn: highwaterChart.series.filter(({ shown }) => shown).map(({ name }) => name),
            first: highwaterChart.lanes[0].name, rows: document.querySelector('.scroll table').rows.length }; })()",
    );
    assert!(seen["cards"].as_u64().is_some_and(|cards| (1..=3).contains(&cards)), "{seen}");
    assert!(seen["cause"].as_f64().is_some_and(|at| at <= 400.0), "whose it is, at once: {seen}");
    assert!(seen["todo"].as_f64().is_some_and(|at| at <= 800.0), "what to do, without scrolling: {seen}");
    assert!(seen["page"].as_u64().is_some_and(|height| height <= 3 * 800), "three screens: {seen}");
    assert_eq!((&seen["first"], &seen["rows"]), (&json!("wide rank 0"), &json!(7)), "{seen}");
    assert!(seen["drawn"].as_array().is_some_and(|drawn| drawn.contains(&json!("GPU 63"))), "{seen}");
    browser.wait("document.title.startsWith('1 critical · ')");
    browser.keep("live-wide");
    // The keyboard's first stop leads to the chart, past the cards.
    let first = "document.querySelector('a, button, input, [tabindex]')";
    assert_eq!(text(&mut browser, &format!("{first}.textContent")), "To the chart");
    browser.value(&format!("{first}.click()"));
    browser.wait("document.activeElement.classList.contains('plot')");
    // All of it is there on request.
    let press = |text: &str| {
        format!("[...document.querySelectorAll('button')].find((one) => one.textContent === '{text}').click()")
    };
    browser.value(&press("All 64 GPUs"));
    browser.value(&press("Show all 64 ranks"));
    browser.wait("document.querySelector('.scroll table').rows.length === 65 && highwaterChart.lanes.length === 64");
    // As text for a ticket.
    browser.value("globalThis.copied = null; navigator.clipboard.writeText = async (text) => { copied = text; }; 0");
    browser.value(&press("Copy"));
    browser.wait("copied !== null");
    let copied = text(&mut browser, "copied");
    assert!(
        copied.starts_with("**GPU 63 had only 200 MiB free: ") && copied.contains("ranks 1 to 63 wait"),
        "{copied}"
    );
    // Of a minute of 64 ranks an answer has a few seconds. The lanes that are shown have all of it.
    browser.value("location.reload()");
    browser.wait(
        "document.documentElement?.dataset.ready === 'true' && globalThis.highwaterLive?.feed.ranks.past?.isThinned",
    );
    // A page that falls behind the stream on a busy machine connects anew, and requests the past once more.
    browser.wait(
        "(() => { const { ranks } = highwaterLive.feed, [lane] = highwaterChart.lanes, [from] = highwaterChart.view;
        const steps = [...lane.within(highwaterChart.view)].filter((at) => lane.of[at].kind === 'step').map((at) => lane.step[at]);
        return ranks.past?.shown.size === 5 && ranks.past.leftOut === 0 && from < ranks.since && steps.length > 20
            && steps.every((step, at) => !at || step === steps[at - 1] + 1); })()",
    );
    // The job's page.
    browser.value("location.hash = '#/job/wide'; 0");
    browser.wait(
        "[...document.querySelectorAll('button')].some((one) => one.textContent === 'All 64 ranks in the tables')",
    );
    let height = browser.value("document.documentElement.scrollHeight");
    // Six before: two tables of 64 rows.
    assert!(height.as_u64().is_some_and(|height| height <= 3 * 800), "three screens: {height}");
    browser.keep("live-wide-job");
    browser.value(&press("All 64 ranks in the tables"));
    browser
        .wait("[...document.querySelectorAll('.scroll table')].filter((one) => one.rows.length === 65).length === 2");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// The demo's second job lacks memory and sends its layers.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_page_of_a_finding_of_too_little_memory_says_where_to_checkpoint() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    let advice = "/api/v1/jobs/moe-tight/advice";
    let advised = || agent().get(format!("http://{}{advice}", daemon.address())).call().is_ok();
    let lacking = eventually(Duration::from_secs(90), "a finding of too little memory, and layers", || {
        let found = findings(&daemon).into_iter().find(|found| found["finding"] == "allocator_thrash")?;
        advised().then_some(found)
    });
    let answer: Value = serde_json::from_str(&daemon.get(advice)).expect("JSON");
    let layers: Vec<&str> =
        answer["checkpoints"]["split_modules"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    browser.appear(1400, 1000, Theme::Dark);
    visit(&mut browser, &daemon, &format!("#/finding/{}", lacking["id"]), "document.querySelector('.advice') !== null");
    let said = text(&mut browser, "document.querySelector('.advice').innerText");
    let wanted = format!("Checkpoint activations of moe-tight before {}: at most ", layers.join(", "));
    assert!(layers.len() == 4 && said.starts_with(&wanted), "{said}");
    browser.keep("live-advice");
    // What the memory of its GPU is: the parts are as large as what is usable.
    browser.value("location.hash = '#/gpu/2'; 0");
    browser
        .wait("[...document.querySelectorAll('h2')].some((one) => one.textContent === 'What the memory of GPU 2 is')");
    browser.wait("document.querySelectorAll('.holders div').length >= 4");
    let parts = browser.value(
        "(() => { const rows = [...document.querySelectorAll('[aria-label=\"Memory of GPU 2 now\"] tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
        return { what: rows.map(([what, whose]) => `${what} ${whose}`), sum: rows.reduce((sum, [, , , share]) => sum + parseFloat(share), 0),
            drawn: document.querySelectorAll('.holders div').length }; })()",
    );
    let what: Vec<&str> = parts["what"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    for part in ["allocated", "cached", "outside the allocator"] {
        assert!(what.contains(&format!("{part} moe-tight rank 0").as_str()), "{parts}");
    }
    assert!(parts["sum"].as_f64().is_some_and(|percent| (97.0..130.0).contains(&percent)), "{parts}");
    assert_eq!(parts["drawn"].as_u64(), Some(what.len() as u64), "{parts}");
    // The same over time, as bands: at each time that is drawn no more than what is in use, and named under the pointer. What lies
    // outside of allocators is known once the driver has listed the process.
    let drawn = "(() => { const chart = highwaterChart, [one] = chart.series, [from, to] = chart.view, found = new Set(); let over = 0;
        for (let nth = 0; nth < 200; nth++) {
            const at = from + (to - from) * nth / 200, used = one.curve.extremes(at, at).most;
            for (const band of used === -Infinity || !chart.hasBands(one) ? [] : chart.bands(one, at, used)) {
                found.add(band.text().replace(/^[^ ]+ GiB held by /, ''));
                over += band.to > used;
            }
        }
        return `${over}: ${[...found].sort().join('; ')}`; })()";
    let named = "allocators' caches; tensors in allocators; the same processes, outside of their allocators";
    browser.wait(&format!("{drawn} === \"0: {named}\""));
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// The least difference (CIE 1976, in Lab) between two colours of phases, over usual eyes and three kinds of colour blindness
/// (Machado, Oliveira and Fernandes 2009, complete).
const LEAST_DIFFERENCE: &str = "(() => {
    const eyes = [[1, 0, 0, 0, 1, 0, 0, 0, 1],
        [.152286, 1.052583, -.204868, .114503, .786281, .099216, -.003882, -.048116, 1.051998],
        [.367322, .860646, -.227968, .280085, .672501, .047413, -.01182, .04294, .968881],
        [1.255528, -.076749, -.178779, -.078411, .930809, .147602, .004733, .691367, .3039]];
    const pen = document.createElement('canvas').getContext('2d');
    const linear = (name) => {
        pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
        pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => c / 255)
            .map((c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    };
    const lab = (color, eye) => {
        const [r, g, b] = [0, 1, 2].map((row) => Math.min(1, Math.max(0, color.reduce((sum, c, at) => sum + eye[3 * row + at] * c, 0))));
        const f = (t) => t > .008856 ? Math.cbrt(t) : 7.787 * t + 16 / 116;
        const [x, y, z] = [(.4124 * r + .3576 * g + .1805 * b) / .95047, .2126 * r + .7152 * g + .0722 * b,
            (.0193 * r + .1192 * g + .9505 * b) / 1.08883].map(f);
        return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
    };
    const colors = Array.from({ length: 8 }, (_, nth) => linear(`--p${nth}`));
    let least = Infinity;
    for (const eye of eyes) for (let i = 0; i < 8; i++) for (let j = 0; j < i; j++)
        least = Math.min(least, Math.hypot(...lab(colors[i], eye).map((value, at) => value - lab(colors[j], eye)[at])));
    return least;
})()";

#[test]
#[ignore = "needs a peer: make test-peers"]
fn colours_of_phases_differ_for_colour_blind_eyes_and_have_a_legend() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    for theme in [Theme::Light, Theme::Dark] {
        browser.appear(1400, 1000, theme);
        visit(&mut browser, &daemon, "", READY);
        let least = browser.value(LEAST_DIFFERENCE).as_f64().expect("a number");
        assert!(least > 20.0, "two colours differ by {least}");
    }
    browser.wait("document.querySelectorAll('.phases li').length >= 5");
    let legend = text(&mut browser, "document.querySelector('.phases').innerText");
    assert!(legend.contains("forward") && legend.contains("backward") && legend.contains("comm"), "{legend}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn an_accessibility_checker_finds_nothing_on_any_page() {
    let (Some(mut browser), Some(axe)) = (Browser::start(), tools::find("axe.min.js")) else { return };
    let axe = std::fs::read_to_string(axe).expect("a script");
    let daemon = Daemon::start(&["demo"]).ready();
    eventually(Duration::from_secs(60), "a finding", || (!findings(&daemon).is_empty()).then_some(()));
    let first = findings(&daemon).last().expect("a finding")["id"].clone();
    let places = ["", "#/gpu/2", "#/job/moe-tight", &format!("#/finding/{first}"), "#/findings", "#/captures"];
    for (theme, name) in [(Theme::Light, "light"), (Theme::Dark, "dark")] {
        for width in [1400, 390] {
            browser.appear(width, 1000, theme);
            for place in places {
                browser.visit("about:blank", "location.href === 'about:blank'");
                visit(&mut browser, &daemon, place, "document.documentElement?.dataset.ready === 'true'");
                browser.wait("document.querySelectorAll('main h2, main p').length > 0");
                let what = format!("{place}, {name}, {width} pixels wide");
                let overflow = browser.value("document.documentElement.scrollWidth - innerWidth");
                assert!(overflow.as_i64() <= Some(0), "{what}: {overflow} too many");
                let found = browser.check_access(&axe);
                assert!(found.is_empty(), "{what}: {found:#?}");
                browser.keep(&format!("live-{name}-{width}-{}", place.replace(['#', '/'], "")));
            }
        }
    }
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// By links, and back.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_page_leads_to_the_others_and_back() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    eventually(Duration::from_secs(60), "a finding", || (!findings(&daemon).is_empty()).then_some(()));
    browser.appear(1400, 1000, Theme::Light);
    visit(&mut browser, &daemon, "", READY);
    let go = |browser: &mut Browser, link: &str, title: &str| {
        browser.wait(&format!("[...document.querySelectorAll('a')].some((a) => a.hash === {link:?})"));
        browser.value(&format!("[...document.querySelectorAll('a')].find((a) => a.hash === {link:?}).click()"));
        browser.wait(&format!("document.title.startsWith({title:?})"));
    };
    let around =
        [("#/findings", "Findings"), ("#/", "Overview"), ("#/gpu/2", "GPU 2"), ("#/job/moe-tight", "moe-tight")];
    for (link, title) in around.into_iter().chain([("#/captures", "Captures"), ("#/", "Overview")]) {
        go(&mut browser, link, title);
    }
    browser.value("history.back()");
    browser.wait("document.title.startsWith('Captures')");
    browser.value("history.back()");
    browser.wait("document.title.startsWith('moe-tight') && highwaterChart.lanes.length === 2");
    // Addresses that lead nowhere say so.
    for (place, said) in [
        ("#/gpu/99", "no GPU 99"),
        ("#/job/none", "No job none"),
        ("#/finding/x", "No finding"),
        ("#/__proto__/x", "no such page"),
    ] {
        browser.value(&format!("location.hash = {place:?}"));
        browser.wait(&format!("document.querySelector('[role=alert]')?.textContent.includes({said:?})"));
    }
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// A GPU that stops answering has no memory now, and steps go on.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn what_was_read_last_is_not_shown_as_what_is() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    browser.appear(1400, 1000, Theme::Light);
    visit(&mut browser, &daemon, "", READY);
    // Events as of a daemon one of whose GPUs hangs, after the last real one.
    browser.value(
        "highwaterLive.feed.disconnect();
        for (let i = 1; i < 12; i++) {
          const { feed } = highwaterLive, base = feed.unixNs(feed.now) + 250e6;
          feed.take({ base_unix_nano: base, started_unix_nano: feed.ranks.started, source: 'made', trouble: null, lost: 0, ranks: [],
            findings_revision: feed.revision, gpus: [...feed.gpus.values()].map(({ uuid, gpu, memory }, nth) => ({ gpu, uuid, up: nth > 0,
              until_us: nth ? -1000 : Math.round((memory.tail.end - feed.seconds(base)) * 1e6), points: nth ? [[-1000, 2 ** 30]] : [],
              utilization_ratio: null, power_watts: null, temperature_celsius: null, throttle: null })) });
        }",
    );
    browser.wait("highwaterChart.series[0].value.textContent.startsWith('not known now')");
    assert_eq!(browser.value("highwaterChart.series[1].value.textContent.startsWith('1.00 GiB now')"), json!(true));
    let gap = browser.value("[...highwaterChart.series[0].curve.gaps(...highwaterChart.view)].at(-1).to === highwaterChart.series[0].curve.present");
    assert_eq!(gap, json!(true), "a mark until now");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

/// Names of jobs and phases are anybody's text.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn names_from_jobs_are_text_and_no_other_server_is_asked() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    let evil = "<img src=x onerror=alert(1)>";
    let mark = |event: &str| json!({ "event": event, "name": evil, "job": evil, "rank": 0, "gpu": 0 });
    assert_eq!(daemon.post("/api/v1/annotations", &json!([mark("begin"), mark("end"), mark("begin")])).0, 200);
    browser.appear(1200, 900, Theme::Light);
    visit(&mut browser, &daemon, "", READY);
    browser.wait("document.body.innerText.includes('onerror')");
    browser.value(
        "[...document.querySelectorAll('a')].find(({ textContent }) => textContent.includes('onerror')).click()",
    );
    browser.wait("document.querySelector('h2')?.textContent.includes('onerror')");
    browser.painted();
    assert_eq!(browser.value("document.images.length"), json!(0));
    let asked = browser.value("performance.getEntriesByType('resource').every(({ name }) => name.startsWith(location.origin) || name.startsWith('data:'))");
    assert_eq!(asked, json!(true));
    let refused = "fetch('https://example.com/').then(() => 'sent', () => 'refused')";
    assert_eq!(browser.value(refused), json!("refused"));
    assert!(browser.errors.iter().all(|error| error.contains("example.com")), "{:?}", browser.errors);
}

/// A daemon that has no GPU says so on its page, and one that goes away is noticed.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_daemon_without_gpus_says_why_and_one_that_is_gone_is_noticed() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["serve", "--source", "nvml", "--nvml-library", "/nonexistent/libnvidia-ml.so.1"]);
    browser.appear(1200, 900, Theme::Light);
    visit(&mut browser, &daemon, "", "document.documentElement?.dataset.ready === 'true'");
    browser.wait("document.querySelector('header').innerText.includes('/nonexistent/libnvidia-ml.so.1')");
    browser.painted();
    browser.keep("live-without-gpus");
    daemon.kill();
    browser.wait("document.querySelector('header').innerText.includes('disconnected')");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_page_of_a_failed_allocation_shows_its_last_seconds_and_who_held_the_memory() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim:faults"]).ready();
    let oom = eventually(Duration::from_secs(60), "a failed allocation", || {
        findings(&daemon).into_iter().find(|found| found["finding"] == "oom")
    });
    browser.appear(1280, 900, Theme::Light);
    let held = "[...document.querySelectorAll('[aria-label^=\"Who held the memory when\"] tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent.trim()))";
    visit(&mut browser, &daemon, &format!("#/finding/{}", oom["id"]), &format!("{held}.length > 0"));
    let view = browser.value("highwaterChart.view[1] - highwaterChart.view[0]");
    assert!(view.as_f64().is_some_and(|seconds| (5.0..7.0).contains(&seconds)), "{view} s");
    let bytes =
        |text: &Value| -> f64 { text.as_str().and_then(|text| text.strip_suffix(" GiB")?.parse().ok()).unwrap_or(0.0) };
    let rows = browser.value(held);
    let of = |name: &str| {
        let row = rows.as_array().expect("rows").iter().find(|row| row[0] == name);
        bytes(&row.unwrap_or_else(|| panic!("no {name}: {rows}"))[1])
    };
    // The mark says 130.1 GiB of 138.8; a context is beside it.
    assert!(
        (125.0..139.0).contains(&of("allocated")) && of("cached") > 5.0 && of("free, or not attributed") < 2.0,
        "{rows}"
    );
    assert!(
        text(&mut browser, "document.querySelector('#live').innerText")
            .contains("ran out of memory in backward of step")
    );
    browser.keep("live-oom");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn each_gpu_has_a_row_with_its_ranks_the_worst_first_and_the_strip_above_moves_the_view() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    browser.appear(1280, 900, Theme::Light);
    visit(&mut browser, &daemon, "", READY);
    // GPU 2 is short of memory, and rank 0 of moe-tight is on it.
    browser.wait("highwaterChart.findings.some(({ text }) => text.startsWith('low_headroom')) && highwaterChart.lanes.length === 4 && highwaterChart.rows[0].name === 'GPU 2'");
    let rows = browser.value("highwaterChart.rows.map(({ name, lanes }) => [name, ...lanes.map((lane) => lane.name)])");
    let wanted = json!([
        ["GPU 2", "moe-tight rank 0"],
        ["GPU 0", "llama-ddp rank 0"],
        ["GPU 1", "llama-ddp rank 1"],
        ["GPU 3", "moe-tight rank 1"]
    ]);
    assert_eq!(rows, wanted);
    // The text under the pointer in a row is of its GPU, also of findings.
    let place = |row: usize| {
        format!(
            "(() => {{ const chart = highwaterChart, row = chart.rows[{row}]; return chart.under(chart.findings.find(({{ text }}) => text.startsWith('low_headroom')).from + 0.05, (row.top + row.floor) / 2); }})()"
        )
    };
    let [own, other] = [0, 1].map(|row| browser.value(&place(row)).to_string());
    assert!(own.contains("GPU 2: ") && own.contains("low_headroom") && !own.contains("GPU 0: "), "{own}");
    assert!(other.contains("GPU 0: ") && !other.contains("low_headroom"), "{other}");
    browser.keep("rows");
    browser.value("highwaterChart.place.focus()");
    browser.press("r");
    browser.painted();
    assert_eq!(
        browser.value("highwaterChart.rows.map(({ series, lanes }) => [series.length, lanes.length])"),
        json!([[4, 4]])
    );
    // What is free as the axis: the same distance for each quarter of it, up to the top for what is full.
    browser.press("h");
    browser.painted();
    let heights = browser.value("(() => { const chart = highwaterChart, [one] = chart.series, { top } = chart.rows[0];
        return [2 ** 24, 2 ** 26, 2 ** 28, 2 ** 30].map((free) => Math.round((chart.y(one, one.capacity - free) - top) * 10)); })()");
    let heights: Vec<i64> = serde_json::from_value(heights).expect("pixels");
    assert!(
        heights[0] == 0
            && heights[1] > 300
            && (heights[2] - 2 * heights[1]).abs() <= 1
            && (heights[3] - 3 * heights[1]).abs() <= 1,
        "{heights:?}"
    );
    let said = text(&mut browser, "highwaterChart.at(highwaterChart.bounds[1] - 1).join('; ')");
    assert!(said.contains(" free"), "{said}");
    browser.press("h");
    // A click on the strip centres the view there; a drag over it chooses one.
    browser.wait("highwaterChart.bounds[1] - highwaterChart.bounds[0] > 20");
    browser.press("1");
    browser.painted();
    let at = |part: f64| {
        format!(
            "(() => {{ const chart = highwaterChart, box = document.querySelector('.strip canvas').getBoundingClientRect(); return [box.left + 84 + chart.width * {part}, box.top + 15]; }})()"
        )
    };
    let [quarter, half] = [0.25, 0.5].map(|part| browser.value(&at(part)));
    let pixel = |place: &Value, nth: usize| place[nth].as_f64().expect("a place");
    browser.click(pixel(&quarter, 0), pixel(&quarter, 1));
    browser.painted();
    assert_eq!(browser.value("highwaterChart.following"), Value::Null);
    let middle = "(() => { const { view: [from, to], bounds: [first, last] } = highwaterChart; return [((from + to) / 2 - first) / (last - first), to - from]; })()";
    let found = browser.value(middle);
    assert!((pixel(&found, 0) - 0.25).abs() < 0.06 && (pixel(&found, 1) - 10.0).abs() < 0.01, "{found}");
    for (kind, place) in [("mousePressed", &half), ("mouseMoved", &quarter), ("mouseReleased", &quarter)] {
        // Outside of the part in view, so that it chooses and does not move.
        let x = if kind == "mousePressed" { pixel(place, 0) + 300.0 } else { pixel(place, 0) + 400.0 };
        browser.call(
            "Input.dispatchMouseEvent",
            json!({ "type": kind, "x": x, "y": pixel(place, 1), "button": "left", "buttons": 1, "clickCount": 1 }),
        );
    }
    browser.painted();
    let chosen = browser.value(middle);
    assert!(pixel(&chosen, 0) > 0.5 && pixel(&chosen, 0) < 0.85, "{chosen}");
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_page_can_be_stopped_searched_and_recognized_by_its_icon() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&["demo"]).ready();
    browser.appear(1280, 900, Theme::Light);
    visit(&mut browser, &daemon, "", READY);
    let icon = "decodeURIComponent(document.querySelector('link[rel=icon]').href)";
    browser.wait("highwaterLive.feed.incidents.some(({ ended_unix_nano: ended, severity }) => ended === null && severity === 'critical')");
    browser.wait(&format!("{icon}.includes('#b3261e') && {icon}.includes('>!<')"));
    // Stopped: neither the chart nor the tables change while the daemon goes on.
    browser.value("highwaterChart.place.focus()");
    browser.press(" ");
    browser.painted();
    let shown = "[highwaterChart.view[0], highwaterChart.following, document.querySelector('[aria-label=\"GPUs now\"]').innerText, document.querySelector('[aria-label=Jobs]').innerText].join()";
    let before = text(&mut browser, shown);
    let now = browser.value("highwaterLive.feed.now").as_f64().expect("a time");
    browser.wait(&format!("highwaterLive.feed.now > {} && highwaterLive.feed.jobs.length > 0", now + 7.0));
    assert_eq!(text(&mut browser, shown), before);
    assert!(
        text(&mut browser, "document.querySelector('nav [role=status]:not(.unseen)').textContent")
            .starts_with("stopped at ")
    );
    browser.press(" ");
    browser.wait("highwaterChart.following === 30 && highwaterChart.view[1] === highwaterLive.feed.now");
    browser.wait("document.querySelector('nav > [role=status]').textContent === 'live'");
    // A rank by its name, first as a part of it.
    let search = |words: &str| {
        format!("(() => {{ const field = document.querySelector('.search input'); field.focus(); field.value = '{words}'; field.dispatchEvent(new Event('input'));
        return [...document.querySelectorAll('#results a')].map((one) => one.textContent); }})()")
    };
    assert_eq!(browser.value(&search("moe rank")), json!(["moe-tight rank 0", "moe-tight rank 1"]));
    assert_eq!(browser.value(&search("gpu 3"))[0], "GPU 3");
    assert_eq!(browser.value(&search("nothing of that")), json!([]));
    assert!(browser.value(&search("back")).to_string().contains("backward of moe-tight"));
    browser.value(&search("moe-tight rank 1"));
    browser.press("Enter");
    browser.wait("location.hash.endsWith('/1') && document.title.includes('moe-tight rank 1') && highwaterChart.lanes.length === 1");
    assert_eq!(
        browser.value("[highwaterChart.lanes[0].name, ...highwaterChart.series.map(({ name }) => name)]"),
        json!(["moe-tight rank 1", "GPU 3"])
    );
    // A view that is to be named while a link is followed does not take the link's place.
    let link = "#/job/moe-tight/1?from=1800000000000.000&to=1800000001000.000";
    let named = browser.value(&format!(
        "(() => {{ const real = setTimeout; let name; globalThis.setTimeout = (call) => {{ name = call; return 0; }};
        highwaterLive.moved(highwaterChart.view); globalThis.setTimeout = real;
        location.hash = '{link}'; name(); return location.hash; }})()"
    ));
    assert_eq!(named, json!(link));
    browser.wait("highwaterLive.opened === location.hash && highwaterChart.view[1] - highwaterChart.view[0] < 2");
    // A phase leads to a view that has it.
    // A page that fell behind the stream on a busy machine requests the past anew.
    browser.wait(&format!("{}.length > 0", search("backward of moe")));
    browser.press("Enter");
    browser.wait("location.hash.includes('from=') && highwaterChart.view[1] - highwaterChart.view[0] < 5");
    browser.wait("(() => { const [lane] = highwaterChart.lanes; return lane && [...lane.within(highwaterChart.view)].some((at) => lane.of[at].name === 'backward'); })()");
    if let Some(axe) = tools::find("axe.min.js") {
        let axe = std::fs::read_to_string(axe).expect("a script");
        browser.value(&search("moe"));
        assert_eq!(browser.check_access(&axe), Vec::<String>::new());
    }
    assert!(browser.errors.is_empty(), "{:?}", browser.errors);
}
