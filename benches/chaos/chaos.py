#!/usr/bin/env python3
"""An hour of a daemon around which everything breaks, and whose books must balance.

    cargo build --release && cargo build --release -p nvml-fake
    benches/chaos/chaos.py --highwater target/release/highwater --nvml target/release/libnvml_fake.so --minutes 60

As root it becomes the user `nobody`, because root may write into folders that nobody may write to. Four GPUs of the fake NVML;
faults of the driver, of the host, of the network and of senders are drawn at random and overlap; the daemon is ended, killed and
started again. With the same `--seed` the faults of the driver, those of the host and those of each sender come in the same order. GPU 0 has no faults of its own. What is checked at each scrape, and once all
has calmed down, is a row of the table. The exit status is 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import hashlib
import http.server
import json
import os
import pwd
import random
import re
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

GIB = 1 << 30
GPUS = 4
CODES = [*range(1, 31), 77, 999]
CALLS = """
    nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetUtilizationRates nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit
    nvmlDeviceGetTemperature nvmlDeviceGetClockInfo nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetFieldValues
    nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetPcieThroughput nvmlDeviceGetTotalEccErrors
    nvmlDeviceGetMemoryErrorCounter nvmlDeviceGetRemappedRows nvmlDeviceGetComputeRunningProcesses_v3
    nvmlDeviceGetGraphicsRunningProcesses_v3
""".split()
OPENING = ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMigMode"]
READINGS = ["used", "total", "utilization", "temperature", "sm_clock_mhz", "energy_mj", "power_instant_mw"]
NONSENSE = [2**64 - 1, 2**63, 2**32 - 1, 0]
SIGNALS = ("metrics", "raw", "spans")


# What the books say.


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.samples = []
        for line in text.splitlines():
            if line.startswith("highwater_") or line.startswith("process_"):
                name, labels, value = re.match(r"([a-z_0-9]+)(?:\{(.*)\})? (\S+)", line).groups()
                self.samples.append((name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")), float(value)))

    def each(self, name: str, **labels: str):
        """Values of the samples of a metric with these labels."""
        return [value for one, own, value in self.samples if one == name and labels.items() <= own.items()]

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.each(name, **labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        return {own.get(label, ""): value for one, own, value in self.samples if one == name}


class Books:
    """Checks, how often each was made, and what it found."""

    def __init__(self, tell=print) -> None:
        self.checks, self.faults, self.lock = collections.Counter(), collections.defaultdict(list), threading.Lock()
        self.tell = tell

    def check(self, what: str, holds: bool, detail: object = "") -> None:
        with self.lock:
            self.checks[what] += 1
            if not holds:
                self.faults[what].append(str(detail))
                if len(self.faults[what]) <= 3:
                    self.tell(f"  NOT: {what}: {detail}", flush=True)

    def of_scrape(self, scrape: Scrape, before: Scrape | None) -> None:
        """Everything that holds at any moment."""
        due, taken = scrape.sum("highwater_sampler_ticks_due_total"), scrape.sum("highwater_sampler_ticks_taken_total")
        missed = scrape.sum("highwater_sampler_ticks_missed_total")
        self.check("ticks due = taken + missed", due == taken + missed, (due, taken, missed))
        for kind in SIGNALS:
            of = {part: scrape.sum(f"highwater_otlp_{part}", signal=kind) for part in ("produced_total", "exported_total", "dropped_total", "queued")}
            self.check(f"OTLP {kind}: produced = exported + dropped + queued",
                       of["produced_total"] == of["exported_total"] + of["dropped_total"] + of["queued"], of)
        # Without a file descriptor it cannot ask the kernel what is resident; then neither that nor `other` is there.
        parts, resident = scrape.sum("highwater_memory_bytes"), scrape.each("process_resident_memory_bytes")
        other = scrape.each("highwater_memory_bytes", part="other")
        # And where the kernel took pages back since they were counted, `other` is 0.
        is_sum = resident == [parts] or (other == [0.0] and bool(resident) and resident[0] < parts)
        self.check("parts of memory = resident memory", is_sum if other else not resident, (parts, resident, other))
        if other:
            mib = {part: round(value / (1 << 20), 2) for part, value in scrape.by("highwater_memory_bytes", "part").items()}
            self.check("memory in `other` at most 8 MiB", other[0] <= 8 << 20, mib)
        up, known = scrape.by("highwater_gpu_up", "uuid"), scrape.by("highwater_gpu_memory_used_bytes", "uuid")
        self.check("a GPU that is down has no memory", not any(uuid in known for uuid, is_up in up.items() if not is_up), (up, known))
        if before:
            now = counters(scrape)
            fell = [of for of, value in counters(before).items() if value > now.get(of, value)]
            self.check("no counter falls", not fell, fell[:3])


def counters(scrape: Scrape) -> dict[tuple[str, tuple], float]:
    return {(name, tuple(sorted(own.items()))): value for name, own, value in scrape.samples if name.endswith("_total")}


# The driver.


class Driver:
    """The control file, with what is wrong with each GPU at the moment."""

    def __init__(self, library: Path, chance: random.Random) -> None:
        self.library, self.chance, self.faults, self.xids, self.generation = library, chance, {}, [], [0] * GPUS
        self.absent, self.node, self.count = set(), {}, collections.Counter()
        self.pids: list[int] = []
        self.write()

    def gpu(self, index: int) -> dict:
        wave = [{"at_ms": 40 * n, "value": (20 + n) * GIB} for n in range(10)]
        base = {"uuid": f"GPU-{index:04d}", "used": {"points": wave, "repeat_ms": 400}, "utilization": 80, "generation": self.generation[index],
                "processes": [{"pid": pid, "used": 20 * GIB} for n, pid in enumerate(self.pids) if n % GPUS == index]}
        return base | self.faults.get(index, {})

    def write(self) -> None:
        gpus = [self.gpu(index) for index in range(GPUS) if index not in self.absent]
        text = json.dumps({"gpus": gpus, "xids": self.xids, **self.node})
        following = Path(f"{self.library}.next")
        following.write_text(text)
        following.rename(f"{self.library}.json")

    def turn(self) -> None:
        """Two times in five: another fault of one GPU, or none any more; GPU 0 has none."""
        if self.chance.random() >= 0.4:
            return
        index, kind = self.chance.randrange(1, GPUS), self.chance.choice(
            ["well", "well", "code", "code", "hang", "opening", "slow", "nonsense", "lost", "gone", "mig", "xid", "node"])
        self.count[kind] += 1
        if self.faults.pop(index, {}).get("lost"):
            self.generation[index] += 1
        self.node = {}
        self.absent.discard(index)
        fault = {
            "code": {"errors": {self.chance.choice(CALLS): self.chance.choice(CODES)}},
            "hang": {"hang": [self.chance.choice(CALLS)]},
            "opening": {"hang": [self.chance.choice(OPENING)]} if self.chance.random() < 0.5 else
                       {"errors": {self.chance.choice(OPENING): self.chance.choice(CODES)}},
            "slow": {"delay_us": {self.chance.choice(CALLS): 300_000.0}},
            "nonsense": {self.chance.choice(READINGS): self.chance.choice(NONSENSE)},
            "lost": {"lost": True},
            "mig": {"mig": [{"uuid": f"MIG-{index}-{n}"} for n in range(self.chance.randrange(1, 4))]},
        }.get(kind)
        if fault:
            self.faults[index] = fault
        elif kind == "gone":
            self.absent.add(index)
        elif kind == "xid" and index not in self.absent:
            self.xids.append({"gpu": min(index, GPUS - len(self.absent) - 1), "xid": self.chance.choice([13, 31, 48, 63, 79, 94, 119])})
        elif kind == "node":
            self.node = {"errors": {self.chance.choice(["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlEventSetCreate"]): self.chance.choice(CODES)}}
        self.write()

    def calm(self) -> None:
        for index in list(self.faults):
            if self.faults.pop(index).get("lost"):
                self.generation[index] += 1
        self.node, self.absent = {}, set()
        self.write()


# The network.


class Receiver(http.server.ThreadingHTTPServer):
    """An OTLP receiver over HTTP: it counts the points and spans of what it accepted, each request once.

    Delivery is at least once: a daemon whose queue has a request that this receiver accepted just before the daemon before
    it ended sends it again. So what each daemon delivered is counted apart."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.mood, self.seen, self.points, self.again, self.lock = "well", {}, collections.Counter(), 0, threading.Lock()
        self.of_this_daemon, self.delivered = set(), collections.Counter()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        key = hashlib.sha256(body).digest()
        with self.lock:
            kind = "spans" if path.endswith("/traces") else "points"
            if key in self.seen:
                self.again += 1
            else:
                self.seen[key] = count_spans(body) if kind == "spans" else count_points(body)
                self.points[kind] += self.seen[key]
            if key not in self.of_this_daemon:
                self.of_this_daemon.add(key)
                self.delivered[kind] += self.seen[key]

    def next_daemon(self) -> None:
        """What is accepted from now on is another daemon's."""
        with self.lock:
            self.of_this_daemon.clear()
            self.delivered.clear()

    def handle_error(self, *_: object) -> None:
        """A daemon that was killed left its connection."""


class Taker(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        mood = self.server.mood
        if mood == "reset":
            self.close_connection = True
            return
        if mood == "silent":
            # Longer than the exporter waits. Nothing is accepted, so it sends the request again.
            time.sleep(12)
        if mood == "well":
            self.server.take(self.path, body)
        self.send_response({"well": 200, "busy": 429}.get(mood, 503))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def fields(message: bytes):
    """The fields of a protobuf message: number, and value or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind)
        size = varint() if size is None else size
        yield number, message[at:at + size]
        at += size


def inner(messages, number: int):
    return (value for message in messages for own, value in fields(message) if own == number)


def count_points(body: bytes) -> int:
    """Data points of an ExportMetricsServiceRequest: of gauges, sums, and both kinds of histograms."""
    metrics = inner(inner(inner([body], 1), 2), 2)
    return sum(1 for metric in metrics for kind, data in fields(metric) if kind in (5, 7, 9, 10) for own, _ in fields(data) if own == 1)


def count_spans(body: bytes) -> int:
    return sum(1 for _ in inner(inner(inner([body], 1), 2), 2))


# Senders.


class Sender(threading.Thread):
    """One rank. It sends steps with phases, and now and then nonsense; it knows what became of each event."""

    def __init__(self, node: Node, rank: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.node, self.rank, self.chance = node, rank, random.Random(seed)
        self.step, self.link, self.linked_to, self.over = 0, None, 0, False

    def run(self) -> None:
        while not self.over:
            with self.node.quiet.shared():
                if not self.over:
                    self.one()
            time.sleep(0.05)

    def one(self) -> None:
        self.step += 1
        now, own = time.time_ns() - 60_000_000, {"job": "steady", "rank": self.rank, "gpu": f"GPU-{self.rank % GPUS:04d}"}
        events = [{"event": "begin", "kind": "step", "step": self.step, "time_unix_nano": now, **own}]
        for n, name in enumerate(["forward", "backward", "comm"]):
            for m, what in enumerate(["begin", "end"]):
                events.append({"event": what, "name": name, "time_unix_nano": now + (2 * n + m + 1) * 5_000_000, **own})
        events.append({"event": "end", "kind": "step", "step": self.step, "time_unix_nano": now + 50_000_000, **own})
        draw = self.chance.random()
        if draw < 0.1:
            events.insert(self.chance.randrange(len(events)), self.chance.choice([
                {"event": "end", "name": "never begun", **own}, {"event": "begin", "name": "x" * 300, **own},
                {"event": "begin", "name": "old", "time_unix_nano": 1, **own}, {"what": 1}, {"event": "mark", "name": "oom", **own},
                {"event": "begin", "kind": "phase", "name": "left open", **own}, {"event": "mark", "name": "\u202e", **own}]))
        if draw > 0.97:
            events.pop()
        if draw > 0.995:
            events.append({"event": "exit", "job": "steady", "rank": self.rank})
        self.send(events)

    def send(self, events: list[dict]) -> None:
        events[-1]["answer"] = True
        body = "\n".join(json.dumps(one) for one in events).encode()
        tally = self.node.tally
        if self.linked_to != self.node.starts:
            self.forget()
        try:
            if self.rank % 4 == 3:
                answer = self.node.post("/api/v1/annotations", body)
            else:
                if self.link is None:
                    self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self.link.settimeout(30)
                    self.link.connect(f"{self.node.socket}.seqpacket")
                    self.linked_to = self.node.starts
                self.link.send(body)
                reply = self.link.recv(1 << 16)
                if not reply:
                    raise ConnectionError("it closed")
                answer = json.loads(reply)
        except (OSError, ValueError):
            # Their outcome is not known.
            with tally.lock:
                tally.unsure += len(events)
            self.forget()
            return
        with tally.lock:
            tally.sent += len(events)
            tally.accepted += answer["accepted"]
            tally.refused += answer["refused"]
            refusals = {one["index"] for one in answer.get("refusals", [])}
            tally.begun += sum(one.get("event") == "begin" for n, one in enumerate(events) if n not in refusals)
            # A short answer does not list each event that was refused.
            tally.unsure += len(events) if len(refusals) < answer["refused"] else 0
        reasons = sum(answer.get("reasons", {}).values())
        self.node.books.check("an answer accounts for each event",
                              answer["accepted"] + answer["refused"] == len(events) and reasons == answer["refused"], (answer, len(events)))

    def forget(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None


class Tally:
    """What became of the events that were sent to one daemon."""

    def __init__(self) -> None:
        self.sent = self.accepted = self.refused = self.unsure = self.begun = 0
        self.lock = threading.Lock()


class Quiet:
    """Many may send, or one may have silence."""

    def __init__(self) -> None:
        self.condition, self.sending, self.wanted = threading.Condition(), 0, 0

    @contextlib.contextmanager
    def shared(self):
        with self.condition:
            self.condition.wait_for(lambda: self.wanted == 0)
            self.sending += 1
        try:
            yield
        finally:
            with self.condition:
                self.sending -= 1
                self.condition.notify_all()

    @contextlib.contextmanager
    def silence(self):
        with self.condition:
            self.wanted += 1
            self.condition.wait_for(lambda: self.sending == 0)
        try:
            yield
        finally:
            with self.condition:
                self.wanted -= 1
                self.condition.notify_all()


# The node.


class Node:
    """A daemon, started as often as it ends."""

    def __init__(self, options: argparse.Namespace, folder: Path, books: Books, driver: Driver, receiver: Receiver) -> None:
        self.options, self.folder, self.books, self.driver, self.receiver = options, folder, books, driver, receiver
        self.socket, self.quiet, self.tally, self.last = folder / "annotations.sock", Quiet(), Tally(), None
        self.count, self.starts, self.peak, self.scrapes = collections.Counter(), 0, 0.0, 0
        self.start()

    def start(self) -> None:
        settings = {"captures.directory": self.folder / "captures", "captures.before": "5s", "captures.after": "1s",
                    "captures.cooldown": "20s", "captures.asks_per_hour": 100_000, "captures.most_bytes": "32MiB",
                    "otlp.queue_dir": self.folder / "queue", "otlp.raw": "findings", "otlp.queue_bytes": "16MiB"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HIGHWATER_", "OTEL_"))}
        own = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.receiver.server_address[1]}", "OTEL_METRIC_EXPORT_INTERVAL": "2000",
               "OTEL_EXPORTER_OTLP_TIMEOUT": "10000", "NO_COLOR": "1"}
        self.starts += 1
        log = self.folder / f"log-{self.starts}"
        # Before it runs: it delivers what is queued before it listens.
        self.receiver.next_daemon()
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [self.options.highwater, "serve", "--nvml-library", self.driver.library, "--listen", "127.0.0.1:0",
                 "--annotations-socket", self.socket, *[part for key, value in settings.items() for part in ("--set", f"{key}={value}")]],
                stdout=out, stderr=subprocess.STDOUT, env=kept | own)
        until = time.monotonic() + 60
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > until:
                sys.exit(f"the daemon does not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        self.url, self.tally, self.last = found[1], Tally(), None

    def request(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, data=body, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read()

    def post(self, path: str, body: bytes) -> dict:
        answer = json.loads(self.request(path, body)[1])
        if "accepted" not in answer:
            raise ValueError(answer)
        return answer

    def scrape(self) -> Scrape | None:
        """Reads and checks the metrics; `None` while nobody answers, which the faults of the host excuse."""
        try:
            scrape = Scrape(self.request("/metrics")[1].decode())
        except OSError:
            return None
        self.books.of_scrape(scrape, self.last)
        self.last, self.scrapes = scrape, self.scrapes + 1
        self.peak = max(self.peak, scrape.sum("process_resident_memory_bytes"))
        return scrape

    def settle(self, final: bool = False) -> None:
        """With nobody who sends: what was sent is what was counted."""
        with self.quiet.silence():
            scrape = self.scrape()
            if scrape is None:
                return
            counted, tally = scrape.sum("highwater_annotations_total"), self.tally
            accepted = sum(value for outcome, value in scrape.by("highwater_annotations_total", "outcome").items() if outcome.startswith("accepted"))
            self.books.check("events sent = events counted", tally.sent <= counted <= tally.sent + tally.unsure,
                             (tally.sent, counted, tally.unsure))
            self.books.check("events accepted by answers = by counters", tally.accepted <= accepted <= tally.accepted + tally.unsure,
                             (tally.accepted, accepted, tally.unsure))
            if final:
                self.books.check("what became of each event is known at the end", tally.unsure == 0, tally.unsure)
                over = scrape.by("highwater_phases_total", "outcome")
                self.books.check("steps and phases begun = ended and given up", sum(over.values()) == tally.begun, (over, tally.begun))
            # Only now: each is counted by outcome a moment before it is counted by sender.
            refused, by_sender = counted - accepted, scrape.sum("highwater_annotations_refused_total")
            self.books.check("events refused by outcome = by sender", refused == by_sender, (refused, by_sender))
            # A new series is 0 for two scrape intervals, so that its first increase is seen.
            raised, last = scrape.sum("highwater_findings_total"), self.last_finding()
            self.books.check("findings counted at most the number of the last one", raised <= last, (raised, last))
            if final:
                self.books.check("findings counted = the number of the last one", raised == last, (raised, last))

    def last_finding(self) -> int:
        """The number of the finding that was raised last; they are numbered from 1."""
        findings = json.loads(self.request("/api/v1/findings?limit=1000")[1])["findings"]
        return max((one["id"] for one in findings), default=0)

    def end(self, how: signal.Signals, loaded: bool = False) -> None:
        """Ends the daemon, and starts another one. Under load nobody stops to send meanwhile, so that its last books are not read."""
        with contextlib.ExitStack() as quiet:
            if not loaded:
                self.settle()
                quiet.enter_context(self.quiet.silence())
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(how)
            if how is signal.SIGTERM:
                try:
                    status = self.process.wait(10)
                except subprocess.TimeoutExpired:
                    status = "not within 10 s"
                    self.process.kill()
                self.books.check(f"SIGTERM{' under load' * loaded}: it ends with 0", status == 0, status)
            self.process.wait(30)
            if loaded:
                # Who sends to it sees that it is gone.
                quiet.enter_context(self.quiet.silence())
            self.start()

    def ask(self) -> None:
        with contextlib.suppress(OSError):
            self.count[f"captures asked for: {self.request('/api/v1/captures', b'{}')[0]}"] += 1


class Host:
    """What happens to the daemon from outside; each returns what undoes it."""

    def __init__(self, node: Node, chance: random.Random) -> None:
        self.node, self.chance, self.undo, self.until, self.count = node, chance, None, 0.0, collections.Counter()
        self.kind = ""

    def turn(self) -> None:
        if self.undo is not None:
            if time.monotonic() < self.until:
                return
            self.undo()
            self.undo, self.kind = None, ""
            return
        self.kind = kind = self.chance.choice(["stop", "files", "descriptors", "captures", "queue", "starve", "receiver", "receiver", "terminate", "kill", "terminate_loaded", "kill_loaded", "ask", "ask"])
        self.count[kind] += 1
        self.undo = getattr(self, kind)()
        self.until = time.monotonic() + self.chance.uniform(2, 12)

    def calm(self) -> None:
        if self.undo is not None:
            self.undo()
        self.undo = None
        self.node.receiver.mood = "well"

    def limit(self, which: int, value: int):
        process = self.node.process
        _, hard = resource.prlimit(process.pid, which)
        before = resource.prlimit(process.pid, which, (value, hard))

        def undo() -> None:
            if process.poll() is None:
                resource.prlimit(process.pid, which, before)
        return undo

    def stop(self):
        process = self.node.process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.1, 3))
        process.send_signal(signal.SIGCONT)

    def files(self):
        return self.limit(resource.RLIMIT_FSIZE, self.chance.choice([0, 4096, 65536]))

    def descriptors(self):
        return self.limit(resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{self.node.process.pid}/fd")) + self.chance.randrange(3))

    def folder(self, name: str):
        folder = self.node.folder / name
        if folder.is_dir():
            folder.chmod(0o500)
            return lambda: folder.chmod(0o700)
        return None

    def captures(self):
        return self.folder("captures")

    def queue(self):
        return self.folder("queue")

    def starve(self):
        burners = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(4 * (os.cpu_count() or 1))]

        def undo() -> None:
            for burner in burners:
                burner.kill()
                burner.wait()
        return undo

    def receiver(self):
        self.node.receiver.mood = self.chance.choice(["busy", "failing", "silent", "reset"])

        def undo() -> None:
            self.node.receiver.mood = "well"
        return undo

    def terminate(self):
        self.node.end(signal.SIGTERM)

    def kill(self):
        self.node.end(signal.SIGKILL)

    def terminate_loaded(self):
        self.node.end(signal.SIGTERM, loaded=True)

    def kill_loaded(self):
        self.node.end(signal.SIGKILL, loaded=True)

    def ask(self):
        self.node.ask()


def wait_for(what: str, books: Books, seconds: float, holds) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if holds():
                books.check(what, True)
                return True
        time.sleep(0.5)
    books.check(what, False, f"not within {seconds:.0f} s")
    return False


def settle_down(node: Node, books: Books, senders: list[Sender]) -> None:
    """Once all faults are over: everything recovers, and the books of the last daemon balance to the last event."""
    def up() -> bool:
        values = Scrape(node.request("/metrics")[1].decode()).each("highwater_gpu_up")
        return len(values) == GPUS and all(values)

    wait_for("all GPUs are read again within 90 s, without a restart", books, 90, up)
    wait_for("/readyz is 200", books, 30, lambda: node.request("/readyz")[0] == 200)
    # One more daemon, so that nothing is unsure; the faults of its senders go on.
    node.end(signal.SIGTERM)
    wait_for("all GPUs are read by the last daemon", books, 60, up)
    time.sleep(20)
    with node.quiet.silence():
        for sender in senders:
            sender.over = True
    for sender in senders:
        sender.send([{"event": "exit", "job": "steady", "rank": sender.rank}])
    wait_for("all that ended has its memory, or is counted as without", books, 30,
             lambda: Scrape(node.request("/metrics")[1].decode()).sum("highwater_phases_total") >= node.tally.begun)
    wait_for("each finding is counted", books, 60, lambda: node.scrape().sum("highwater_findings_total") == node.last_finding())
    wait_for("what is queued for OTLP is delivered", books, 120,
             lambda: Scrape(node.request("/metrics")[1].decode()).sum("highwater_otlp_queued", signal="spans") == 0)
    wait_for("what the receiver accepted = what was exported", books, 30, lambda: received(node))
    node.settle(final=True)


def received(node: Node) -> bool:
    """Whether the receiver has what the last daemon exported, each point once."""
    scrape, new = Scrape(node.request("/metrics")[1].decode()), node.receiver.delivered.copy()
    spans = scrape.sum("highwater_otlp_exported_total", signal="spans")
    points = sum(scrape.sum("highwater_otlp_exported_total", signal=kind) for kind in ("metrics", "raw"))
    return (new["points"], new["spans"]) == (points, spans)


def check_logs(folder: Path, books: Books) -> None:
    for log in folder.glob("log-*"):
        panics = [line for line in log.read_text(errors="replace").splitlines() if "panicked" in line]
        books.check("no log has a panic", not panics, panics[:1])


def check_captures(folder: Path, books: Books) -> int:
    """Each file opens, and is whole as SQLite knows it."""
    count = 0
    for path in sorted((folder / "captures").glob("*.sqlite*")):
        if path.name.endswith(("-journal", "-wal", "-shm")):
            continue
        count += 1
        try:
            connection = sqlite3.connect(path)
            said = connection.execute("PRAGMA integrity_check").fetchone()[0]
            connection.close()
        except sqlite3.Error as error:
            said = error
        books.check("a capture's file is whole", said == "ok", (path.name, said))
    return count


def become_nobody(folder: Path) -> None:
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--highwater", default="target/release/highwater")
    parser.add_argument("--nvml", default="target/release/libnvml_fake.so")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the daemons' logs")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        options.keep.chmod(0o777)
    books, receiver = Books(), Receiver()
    with tempfile.TemporaryDirectory(prefix="highwater-chaos-") as name:
        folder = Path(name)
        # Copies, because nobody may not be allowed to reach the originals.
        options.highwater = shutil.copy(options.highwater, folder / "highwater")
        library = Path(shutil.copy(options.nvml, folder / "libnvml_fake.so"))
        become_nobody(folder)
        driver = Driver(library, random.Random(options.seed + 1))
        driver.pids = [os.getpid()] * GPUS
        driver.write()
        node = Node(options, folder, books, driver, receiver)
        host = Host(node, random.Random(options.seed))
        senders = [Sender(node, rank, options.seed * 100 + rank) for rank in range(8)]
        for sender in senders:
            sender.start()
        begun, said = time.monotonic(), 0.0
        try:
            while (now := time.monotonic() - begun) < 60 * options.minutes:
                driver.turn()
                host.turn()
                answers = node.scrape() is not None
                books.check("a scrape is answered, but without file descriptors", answers or host.kind == "descriptors", host.kind)
                books.check("the daemon runs", node.process.poll() is None, node.process.poll())
                if node.process.poll() is not None:
                    node.start()
                if now - said >= 60:
                    said = now
                    node.settle()
                    print(f"{now / 60:5.1f} min: {node.scrapes} scrapes, {node.peak / (1 << 20):.1f} MiB at most, {node.starts} daemons, "
                          f"{sum(driver.count.values())} faults of the driver, {sum(host.count.values())} of the host", flush=True)
                time.sleep(1.0)
            host.calm()
            driver.calm()
            settle_down(node, books, senders)
            captures = check_captures(folder, books)
            check_logs(folder, books)
        finally:
            host.calm()
            node.process.send_signal(signal.SIGCONT)
            node.process.terminate()
            status = node.process.wait(20)
            if options.keep:
                for log in folder.glob("log-*"):
                    shutil.copy(log, options.keep)
            for part in ("captures", "queue"):
                with contextlib.suppress(OSError):
                    (folder / part).chmod(0o700)
    books.check("SIGTERM: it ends with 0", status == 0, status)
    print(f"\n{options.minutes:g} min, seed {options.seed}: {node.scrapes} scrapes, {node.starts} daemons, {captures} captures, "
          f"{receiver.points['points']} points and {receiver.points['spans']} spans received, {receiver.again} requests again; "
          f"{node.peak / (1 << 20):.1f} MiB at most")
    print(f"driver: {dict(sorted(driver.count.items()))}\nhost: {dict(sorted(host.count.items()))}\n{dict(sorted(node.count.items()))}\n")
    print("| what holds | checked | did not hold |\n|---|---|---|")
    for what, count in books.checks.items():
        print(f"| {what} | {count} | {len(books.faults[what])} |")
    sys.exit(any(books.faults.values()))


if __name__ == "__main__":
    main()
