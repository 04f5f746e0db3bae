"""Processes under measurement: the daemon, the floor, `nvidia-smi`, and the cost of each.

Input: commands. Output: CPU seconds, resident memory, ticks and metrics over a window that the caller chooses, so
that the start of a process is never part of its cost. Every process is started in its own process group and ended
when this one ends.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
FLOOR_LINE = re.compile(
    r"samples=(?P<samples>\d+) missed=(?P<missed>\d+) rate=(?P<rate_hertz>[\d.]+)Hz"
    r" wake p50=(?P<wake_p50_us>[\d.]+) p99=(?P<wake_p99_us>[\d.]+).*?"
    r"sweep p50=(?P<sweep_p50_us>[\d.]+) p99=(?P<sweep_p99_us>[\d.]+) max=(?P<sweep_max_us>[\d.]+) us;"
    r" cpu=(?P<cpu_percent>[\d.]+)%"
)


SO_FAR = "so far "
SO_FAR_LINE = re.compile(rf"{SO_FAR}samples=(?P<samples>\d+) missed=(?P<missed>\d+) sweep_ns=(?P<sweep_ns>\d+)\n")


class Child:
    """One process. Its output goes to a file, and its process group is killed at the end."""

    def __init__(self, command: Sequence[object], log: Path) -> None:
        self.log = log
        self._output = log.open("wb")
        arguments = [str(part) for part in command]
        self.process = subprocess.Popen(arguments, stdout=self._output, stderr=subprocess.STDOUT, process_group=0)
        self.started_at = time.monotonic()
        atexit.register(self.kill)

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether it is still running."""
        return self.process.poll() is None

    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float) -> str:
        """Waits until it has printed `text`; returns the output up to then."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            printed = self.output()
            if text in printed:
                return printed
            if not self.alive():
                break
            time.sleep(0.01)
        raise RuntimeError(f"{self.log.stem} never printed {text!r}: {self.output()[-600:]}")

    def stop(self, timeout_s: float = 5.0) -> int:
        """Asks it to end, and kills it if it does not; returns its exit status."""
        if self.alive():
            self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._output.close()
        atexit.unregister(self.kill)
        return self.process.returncode

    def kill(self) -> None:
        """Kills it and its children at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def thread_cpu(pid: int) -> dict[str, int]:
    """CPU time so far of each thread, by its id, nanoseconds."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            threads[task.name] = int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            continue
    return threads


def scheduled(pid: int, thread: int) -> tuple[int, int]:
    """How long a thread has run so far, nanoseconds, and how often it was put on a core."""
    ran_ns, _waited_ns, times = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
    return int(ran_ns), int(times)


def cpu_by_name(before: dict[str, int], after: dict[str, int], pid: int) -> dict[str, float]:
    """CPU seconds between two readings by thread name, those of one name together. Threads that ended are left
    out."""
    seconds: dict[str, float] = {}
    for task, nanoseconds in after.items():
        try:
            name = Path(f"/proc/{pid}/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        seconds[name] = seconds.get(name, 0.0) + (nanoseconds - before.get(task, 0)) / 1e9
    return seconds


def process_clock(pid: int) -> int:
    """The clock ID of a process's CPU time, ended threads included, as `clock_getcpuclockid` makes it."""
    return (~pid << 3) | 2


def thread_ids(pid: int) -> dict[str, int]:
    """The IDs of a process's threads by name; of several threads with one name, any of them."""
    return {(task / "comm").read_text().strip(): int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident memory now and at its highest, bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|VmHWM|RssAnon|RssFile):\s+(\d+) kB", status, re.MULTILINE))
    return {name: int(kibibytes) * 1024 for name, kibibytes in found.items()}


Metrics = list[tuple[str, dict[str, str], float]]


def parse_metrics(text: str) -> Metrics:
    """The samples of a Prometheus text exposition."""
    samples = []
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match:
            samples.append((match[1], dict(LABEL.findall(match[2] or "")), float(match[3])))
    return samples


def total(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The sum of a metric's samples with these labels; None if there is none. A label that a sample lacks
    does not exclude it."""
    values = [
        value
        for sample, found, value in metrics
        if sample == name and all(found.get(key, wanted) == wanted for key, wanted in labels.items())
    ]
    return sum(values) if values else None


def mean_us(before: Metrics, after: Metrics, histogram: str, **labels: str) -> float | None:
    """The mean of a histogram's observations between two scrapes, microseconds; None if there were none."""
    sums, counts = ([total(at, f"{histogram}_{part}", **labels) or 0.0 for at in (before, after)] for part in ("sum", "count"))
    return 1e6 * (sums[1] - sums[0]) / (counts[1] - counts[0]) if counts[1] > counts[0] else None


def ticks(metrics: Metrics) -> dict[str, float]:
    """Ticks of the fast lane: due, taken and missed."""
    names = {part: f"highwater_sampler_ticks_{part}_total" for part in ("due", "taken", "missed")}
    found = {part: total(metrics, name, lane="fast") for part, name in names.items()}
    if found["due"] is None or found["taken"] is None:
        raise RuntimeError("the daemon exports no sampler ticks: is there a GPU?")
    return {part: value or 0.0 for part, value in found.items()}


class Daemon:
    """`highwater serve` on its own port."""

    def __init__(self, binary: Path, folder: Path, name: str = "daemon", arguments: Sequence[str] = ()) -> None:
        self.socket = folder / f"{name}.sock"
        listen = ["--listen", "127.0.0.1:0", "--annotations-socket", str(self.socket)]
        command = [str(binary), "serve", *listen, *arguments]
        self.child = Child(command, folder / f"{name}.log")
        printed = self.child.wait_for("listening on http://", 15)
        match = re.search(r"listening on (http://[^\s/\x1b]+)", printed)
        if not match:
            raise RuntimeError(f"no address in {printed!r}")
        self.url = match[1]

    def get(self, path: str, timeout_s: float = 10.0) -> bytes:
        """The body at `path`."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return answer.read()

    def metrics(self) -> Metrics:
        """One scrape."""
        return parse_metrics(self.get("/metrics").decode())

    def wait_sampling(self, timeout_s: float = 20.0) -> None:
        """Waits until the fast lane has taken a tick."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (total(self.metrics(), "highwater_sampler_ticks_taken_total", lane="fast") or 0) > 0:
                return
            time.sleep(0.05)
        raise RuntimeError(f"the daemon samples nothing: {self.child.output()[-600:]}")

    def stop(self) -> int:
        """Ends it; returns its exit status."""
        return self.child.stop()


class Scraper(threading.Thread):
    """Scrapes a daemon once a second, as Prometheus would, but in this process: its cost is not the daemon's."""

    def __init__(self, url: str, interval_s: float = 1.0) -> None:
        super().__init__(daemon=True)
        self._address = url.removeprefix("http://")
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self.seconds: list[float] = []
        self.bytes = 0
        self.failures = 0

    def run(self) -> None:
        """Scrapes until stopped."""
        connection = http.client.HTTPConnection(self._address, timeout=5)
        while not self._ended.wait(self._interval_s):
            self._running.wait()
            if self._ended.is_set():
                break
            begin = time.perf_counter()
            try:
                connection.request("GET", "/metrics")
                self.bytes = len(connection.getresponse().read())
                self.seconds.append(time.perf_counter() - begin)
            except (OSError, http.client.HTTPException):
                self.failures += 1
                connection.close()

    def pause(self) -> None:
        """Pauses scraping, because the daemon is stopped."""
        self._running.clear()

    def begin(self) -> None:
        """Resumes scraping and discards earlier results."""
        self.seconds, self.failures = [], 0
        self._running.set()

    def stop(self) -> None:
        """Ends it."""
        self._ended.set()
        self._running.set()
        self.join(6)


@contextmanager
def scraped(daemon: Daemon) -> Iterator[Scraper]:
    """A daemon being scraped every second."""
    scraper = Scraper(daemon.url)
    scraper.start()
    try:
        yield scraper
    finally:
        scraper.stop()


def parse_floor(output: str) -> dict[str, float]:
    """What `nvml_floor loop` prints at its end."""
    match = FLOOR_LINE.search(output)
    if not match:
        raise RuntimeError(f"nvml_floor printed no result: {output[-400:]}")
    return {name: float(value) for name, value in match.groupdict().items()}


def parse_so_far(output: str) -> dict[str, float]:
    """The counts that `nvml_floor loop` printed last: samples, missed ticks, and its sweeps' time, nanoseconds."""
    said = list(SO_FAR_LINE.finditer(output))
    if not said:
        raise RuntimeError(f"nvml_floor has printed no counts: {output[-400:]}")
    return {name: float(value) for name, value in said[-1].groupdict().items()}


def find_floor(here: Path, folder: Path) -> Path | None:
    """The floor's binary: compiled here if there is a compiler, otherwise one that lies beside the scripts."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    built = folder / "nvml_floor"
    if compiler:
        command = [compiler, "-O2", "-o", str(built), str(here / "nvml_floor.c"), "-ldl"]
        if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0:
            return built
    beside = here / "nvml_floor"
    return beside if os.access(beside, os.X_OK) else None


def post(daemon: Daemon, path: str, body: dict[str, Any]) -> int:
    """Posts JSON; returns the answer's status."""
    request = urllib.request.Request(daemon.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def get_json(daemon: Daemon, path: str) -> Any | None:
    """The JSON at `path`; None if the daemon refuses the request."""
    try:
        return json.loads(daemon.get(path))
    except urllib.error.HTTPError:
        return None
