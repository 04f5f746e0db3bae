#!/usr/bin/env python3
"""Measures the live page: what it costs in a browser, and what open pages cost the daemon.

    cargo build --release
    HIGHWATER=target/release/highwater python3 benches/live/live.py [--chromium chromium]
    HIGHWATER=… python3 benches/live/live.py --source nvml --no-browser -- python3 benches/gpu/train.py --seconds 200

The second form measures only the clients of the stream, on real GPUs, while a command runs.

Prints three tables. Ten streams: ticks that the sampler missed and the daemon's processor time, without clients, with ten
clients of the stream, and with one page in a browser on the same machine, in turns. A page: processor time of the whole
browser, and the page's memory. An hour: the page's memory after it was given an hour of events of eight GPUs whose memory
changes a thousand times a second, and its processor time while such events go on. Exits with 1 if a bound is exceeded:
30 % of a core, 150 MB.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benches/gpu")]
from chromium import Browser  # noqa: E402
from measure import Daemon, ticks  # noqa: E402
from rig import find_highwater  # noqa: E402

MOST_CORE, MOST_BYTES = 0.30, 150_000_000
CLIENTS, ROUNDS, SECONDS = 10, 5, 10
READY = "document.documentElement?.dataset.ready === 'true'"
# Events of eight GPUs with 250 changes each, and of eight ranks with six phases a step of 250 ms, as the daemon sends.
SYNTHETIC = """
globalThis.eventAt = (nth, begin) => {
  const uuids = [...highwaterLive.feed.gpus.keys()], base = begin + nth * 250e6;
  return { base_unix_nano: base, started_unix_nano: 1, source: 'made', trouble: null, lost: 0, findings_revision: highwaterLive.feed.revision,
    gpus: uuids.map((uuid, gpu) => ({ gpu: String(gpu), uuid, up: true, until_us: -1000, utilization_ratio: 0.9, power_watts: 650,
      temperature_celsius: 60, throttle: [], points: Array.from({ length: 251 }, (_, i) => [-251000 + i * 1000, (40 + (i * 7 + nth * 13 + gpu) % 90) * 2 ** 30]) })),
    ranks: uuids.map((uuid, rank) => ({ job: 'made', rank, gpus: [uuid], step: nth, open: [{ kind: 'step', name: 'step', step: nth, begin_us: -1000 }],
      spans: ['data', 'forward', 'backward', 'comm', 'optimizer', 'step'].map((name, i) => ({ id: (nth * 8 + rank) * 6 + i, kind: i < 5 ? 'phase' : 'step', name,
        step: nth, begin_us: i < 5 ? -251000 + i * 50000 : -251000, end_us: i < 5 ? -251000 + (i + 1) * 50000 : -1000, peak_bytes: 70 * 2 ** 30 })) })) };
};
"""


@contextlib.contextmanager
def daemon(source):
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--source", source, "--set", f"captures.directory={folder}/captures"]
        started = Daemon(find_highwater(), pathlib.Path(folder), arguments=arguments)
        try:
            yield started
        finally:
            started.stop()


def cpu_seconds(pid):
    """Processor time of a process and of all its descendants."""
    children, ticks_of = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
            ticks_of[int(entry)] = int(fields[11]) + int(fields[12])
    total, left = 0, [pid]
    while left:
        one = left.pop()
        total += ticks_of.get(one, 0)
        left += children.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")


def read(address, stop):
    with contextlib.suppress(OSError):
        stream = urllib.request.urlopen(f"{address}/api/v1/live")
        while not stop.is_set() and stream.read1(1 << 16):
            pass


@contextlib.contextmanager
def clients(address, count):
    stop = threading.Event()
    threads = [threading.Thread(target=read, args=(address, stop), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


def window(measured):
    """Share of ticks missed and the daemon's processor time, of a core, over some seconds."""
    before, begin, used = ticks(measured.metrics()), time.monotonic(), cpu_seconds(measured.child.pid)
    time.sleep(SECONDS)
    after, passed = ticks(measured.metrics()), time.monotonic() - begin
    missed, due = (after[part] - before[part] for part in ("missed", "due"))
    return missed / due, (cpu_seconds(measured.child.pid) - used) / passed


def ten_streams(chromium, source):
    """Rounds of windows without clients, with ten, and, if there is a browser, with a page in it."""
    kinds = {"no client": [], f"{CLIENTS} streams": []} | ({"a page in a browser here": []} if chromium else {})
    with daemon(source) as measured:
        measured.wait_sampling()
        time.sleep(3)
        for _ in range(ROUNDS):
            kinds["no client"].append(window(measured))
            with clients(measured.url, CLIENTS):
                kinds[f"{CLIENTS} streams"].append(window(measured))
            if not chromium:
                continue
            browser = Browser(chromium)
            browser.page().open(measured.url, 1400, 1000)
            kinds["a page in a browser here"].append(window(measured))
            browser.close()
    print(f"{'ticks missed and the daemon with':34} {'missed':>9} {'of a core':>10}")
    for name, rounds in kinds.items():
        missed, core = (statistics.median(values) for values in zip(*rounds))
        print(f"{name:34} {missed:9.3%} {core:10.1%}")


def heap(page):
    page.call("HeapProfiler.collectGarbage")
    return page.evaluate("performance.memory.usedJSHeapSize")


def one_page(chromium, source):
    """A page that follows a minute of a job on eight GPUs; then an hour of made events."""
    bad = []
    with daemon(source) as measured:
        browser = Browser(chromium)
        page = browser.page()
        page.open(measured.url, 1400, 1000)
        page.wait(READY)
        page.evaluate("highwaterChart.follow(60)")
        time.sleep(10)
        begin, used = time.monotonic(), cpu_seconds(browser.process.pid)
        time.sleep(20)
        live = (cpu_seconds(browser.process.pid) - used) / (time.monotonic() - begin)
        print(f"\n{'a page, 8 GPUs':34} {'of a core':>9} {'heap':>10}")
        print(f"{'follows a minute, live':34} {live:9.1%} {heap(page) / 1e6:7.1f} MB")
        page.evaluate("highwaterLive.feed.disconnect();" + SYNTHETIC)
        begun = page.evaluate("globalThis.begunNs = (Date.now() + 60000) * 1e6")
        assert begun
        for hour_part in range(60):
            page.evaluate(f"for (let nth = {hour_part * 240}; nth < {(hour_part + 1) * 240}; nth++) highwaterLive.feed.take(eventAt(nth, begunNs)); 0")
        kept = heap(page)
        page.evaluate("globalThis.nth = 14400; setInterval(() => highwaterLive.feed.take(eventAt(nth++, begunNs)), 250); highwaterChart.follow(60)")
        time.sleep(5)
        begin, used = time.monotonic(), cpu_seconds(browser.process.pid)
        time.sleep(20)
        hour = (cpu_seconds(browser.process.pid) - used) / (time.monotonic() - begin)
        print(f"{'after an hour, 8,000 changes/s':34} {hour:9.1%} {kept / 1e6:7.1f} MB")
        browser.close()
        bad += [f"{what}: {value:.1%} of a core" for what, value in [("live", live), ("after an hour", hour)] if value > MOST_CORE]
        if kept > MOST_BYTES:
            bad.append(f"after an hour: {kept / 1e6:.0f} MB")
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--chromium", default="chromium")
    parser.add_argument("--no-browser", action="store_true", help="measure only the clients of the stream")
    parser.add_argument("--source", help="what the daemon reads; by default a simulation of eight GPUs")
    parser.add_argument("command", nargs="*", help="runs beside it, such as a training job")
    options = parser.parse_args()
    source = options.source or f"sim:{ROOT / 'benches/live/eight.toml'}"
    beside = subprocess.Popen(options.command, stdout=subprocess.DEVNULL) if options.command else None
    try:
        ten_streams(None if options.no_browser else options.chromium, source)
    finally:
        if beside:
            beside.terminate()
            beside.wait()
    bad = [] if options.no_browser else one_page(options.chromium, source)
    for what in bad:
        print(f"beyond its bound: {what}", file=sys.stderr)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
