"""An hour of a daemon that does everything at once: its memory, open files and threads must not grow.

    HIGHWATER=target/release/highwater python3 benches/soak/soak.py --minutes 60

Eight simulated GPUs with eight annotating ranks; OTLP with spans and raw points to a receiver of this process, which is
away for a while; a scrape every second; captures on, one requested every few minutes. `/proc` is read every ten
seconds. Exits with status 1 if resident memory rises by more than `--most-slope` after the warm-up (least squares), or
if there are more open files or threads in the last quarter of that time than in the first.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parent / "gpu" / "resident.toml"
PERIOD_S = 10.0
MIB = 1 << 20


class Sample(NamedTuple):
    """What `/proc` shows of the daemon at one moment."""

    at_s: float
    resident_bytes: int
    anonymous_bytes: int
    files: int
    threads: int


class Receiver:
    """An OTLP receiver that accepts everything and stores nothing. It can be away; then nothing listens."""

    def __init__(self) -> None:
        self._server = self._listen(0)
        self.port = self._server.server_address[1]

    def _listen(self, port: int) -> http.server.ThreadingHTTPServer:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Taker)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def leave(self) -> None:
        """Closes all connections; new ones are refused."""
        Taker.away.set()
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        """Listens again on the same port."""
        Taker.away.clear()
        self._server = self._listen(self.port)


class Taker(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything."""

    protocol_version = "HTTP/1.1"
    away = threading.Event()

    def do_POST(self) -> None:  # noqa: N802
        """Reads and accepts the request."""
        left = int(self.headers.get("content-length", 0))
        while left > 0 and (read := len(self.rfile.read(min(left, MIB)))):
            left -= read
        self.close_connection = self.away.is_set()
        if not self.close_connection:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def look(pid: int, begin_s: float) -> Sample:
    """Reads `/proc`."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(VmRSS|RssAnon|Threads):\s+(\d+)", status, re.MULTILINE)}
    files = len(os.listdir(f"/proc/{pid}/fd"))
    resident, anonymous = found["VmRSS"] * 1024, found["RssAnon"] * 1024
    return Sample(time.monotonic() - begin_s, resident, anonymous, files, found["Threads"])


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through (seconds, value) by least squares, per hour."""
    if len(samples) < 2:
        raise ValueError("a line needs two points")
    mean_x = statistics.fmean(x for x, _ in samples)
    mean_y = statistics.fmean(y for _, y in samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread


def judge(samples: Sequence[Sample], warm_up_s: float, most_mib: float) -> list[str]:
    """Everything that has grown too much."""
    settled = [sample for sample in samples if sample.at_s >= warm_up_s]
    rise_mib = slope([(sample.at_s, sample.resident_bytes / MIB) for sample in settled])
    faults = [f"resident memory rises by {rise_mib:.2f} MiB an hour"] if rise_mib > most_mib else []
    quarter = max(1, len(settled) // 4)
    for name in ("files", "threads"):
        first, last = ([getattr(sample, name) for sample in part] for part in (settled[:quarter], settled[-quarter:]))
        # A scrape or a connection may be open at the moment of a sample, but they must not become more and more.
        if statistics.median(last) > max(first):
            faults.append(f"open {name}: at most {max(first)} at first, {statistics.median(last):.0f} at last")
    return faults


class Daemon:
    """The program, with everything on."""

    def __init__(self, folder: Path, port: int) -> None:
        named = os.environ.get("HIGHWATER", str(HERE.parents[1] / "target/release/highwater"))
        settings = {
            "captures.directory": folder / "captures",
            "captures.before": "5s",
            "captures.after": "1s",
            "captures.asks_per_hour": 100_000,
            "otlp.queue_dir": folder / "queue",
            "otlp.raw": "always",
        }
        command = [named, "serve", "--listen", "127.0.0.1:0", "--source", f"sim:{SCENARIO}"]
        command += ["--annotations-socket", str(folder / "annotations.sock")]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HIGHWATER_", "OTEL_"))}
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_METRIC_EXPORT_INTERVAL": "10000"}
        self.process = subprocess.Popen(command, env=kept | endpoint, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                self.base = found[1]
                break
        else:
            raise SystemExit(f"{named} ended before it listened")
        threading.Thread(target=self._say, daemon=True).start()

    def _say(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(f"  {line}", end="", flush=True)

    def get(self, path: str, body: bytes | None = None) -> str:
        """The body at `path`, also of a refusal."""
        try:
            with urllib.request.urlopen(self.base + path, data=body, timeout=10) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.read().decode()

    def total(self, metric: str) -> float:
        """The sum of a metric's samples."""
        return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE))

    def stop(self) -> int:
        """Ends it; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)


def scrape(daemon: Daemon, over: threading.Event) -> None:
    """Scrapes once a second."""
    while not over.wait(1.0):
        with contextlib.suppress(OSError):
            daemon.get("/metrics")


def observe(daemon: Daemon, receiver: Receiver, minutes: float) -> list[Sample]:
    """Samples every ten seconds, while the receiver is away from one third to five twelfths of the time."""
    begin_s, end_s, samples, is_away = time.monotonic(), 60 * minutes, [], False
    while (now_s := time.monotonic() - begin_s) < end_s:
        is_due = end_s / 3 <= now_s < end_s * 5 / 12
        if is_due != is_away:
            (receiver.leave if is_due else receiver.come_back)()
            is_away = is_due
            print(f"{now_s / 60:6.1f} min: the receiver is {'away' if is_away else 'there again'}", flush=True)
        samples.append(look(daemon.process.pid, begin_s))
        if len(samples) % 6 == 1:
            show(daemon, samples[-1])
        if len(samples) % 18 == 0:
            daemon.get("/api/v1/captures", json.dumps({"seconds_after": 0}).encode())
        time.sleep(max(0.0, PERIOD_S - (time.monotonic() - begin_s) % PERIOD_S))
    return samples


def show(daemon: Daemon, sample: Sample) -> None:
    """One line a minute."""
    queued, dropped = daemon.total("highwater_otlp_queued"), daemon.total("highwater_otlp_dropped_total")
    print(
        f"{sample.at_s / 60:6.1f} min: {sample.resident_bytes / MIB:6.2f} MiB resident, {sample.anonymous_bytes / MIB:6.2f}"
        f" anonymous, {sample.files} files, {sample.threads} threads, {queued:.0f} points queued, {dropped:.0f} dropped",
        flush=True,
    )


def main() -> None:
    """Runs the soak and judges it."""
    parser = argparse.ArgumentParser(description="Soaks the daemon.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes that are not judged; at most half of all")
    parser.add_argument("--most-slope", type=float, default=1.0, help="MiB an hour")
    parser.add_argument("--out", type=Path, help="a CSV file of all samples")
    options = parser.parse_args()
    receiver = Receiver()
    with tempfile.TemporaryDirectory(prefix="highwater-soak-") as folder:
        daemon, over = Daemon(Path(folder), receiver.port), threading.Event()
        threading.Thread(target=scrape, args=(daemon, over), daemon=True).start()
        try:
            samples = observe(daemon, receiver, options.minutes)
            lost = daemon.total("highwater_otlp_dropped_total")
        finally:
            over.set()
            status = daemon.stop()
    if options.out:
        rows = [",".join(Sample._fields), *(",".join(str(field) for field in sample) for sample in samples)]
        options.out.write_text("\n".join(rows) + "\n")
    warm_up_s = 60 * min(options.warm_up, options.minutes / 2)
    settled = [(sample.at_s, sample.resident_bytes / MIB) for sample in samples if sample.at_s >= warm_up_s]
    print(f"resident memory after {warm_up_s / 60:.1f} min: {slope(settled):+.2f} MiB an hour, highest {max(y for _, y in settled):.1f} MiB")
    faults = judge(samples, warm_up_s, options.most_slope)
    faults += [f"{lost:.0f} points were dropped"] if lost else []
    faults += [f"it ended with {status}"] if status else []
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
