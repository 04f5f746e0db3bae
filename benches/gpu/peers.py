"""Every exporter at hand beside each other: what it costs, how often it reads, and what it shows of spikes of 5 ms.

Each runs alone, at its own rate and at the fastest that it can be set to, an exporter scraped at that rate, beside
an otherwise idle GPU on which a process holds a context. Then all run at once while that process allocates memory for 5 ms,
each time more than before: a spike is shown by whatever reports a value that high within the 20 s after it.

    HIGHWATER=target/release/highwater python3 benches/gpu/peers.py --out results/

Peers are found on PATH, or in the folder that --peers names: `nvitop-exporter` (PyPI), `all-smi` and `rezolus` (crates.io),
and `nvidia-smi`. What is missing is said. With --dry-run, highwater runs alone on a simulated GPU, without spikes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure
import pollers
import rig
from context import Context

MIB = 1 << 20
SPIKES, APART_S = 20, 1.7
# The first spike, and by how much each is higher than the one before.
FIRST_MIB, MORE_MIB = 512, 128
# How long after a spike its height still counts as shown.
SHOWN_S = 20.0


@dataclass
class Peer:
    """One way of watching memory."""

    name: str
    rate: str
    command: list[str]
    # How often it reads, per second, if it does not count that itself.
    readings: float | None = None
    # Of an exporter: the port, the path, and what finds the memory in use in its answer.
    port: int | None = None
    path: str = "/metrics"
    values: Callable[[str], list[str]] | None = None
    # What one unit of its values is, bytes.
    unit: int = 1
    scrapes: float = 1.0
    # Of what prints lines: a pattern with the value.
    lines: re.Pattern[str] | None = None
    seen: list[tuple[float, float]] = field(default_factory=list)


def found(name: str, folder: Path | None) -> str | None:
    """The path of a peer's program."""
    own = folder / name if folder else None
    return str(own) if own and own.exists() else shutil.which(name)


def peers(machine: rig.Rig, folder: Path | None, dry_run: bool) -> tuple[list[Peer], list[str]]:
    """Those that are here, at each rate, and the names of those that are not."""
    here: list[Peer] = []
    missing: list[str] = []
    source = ["--source", "sim"] if dry_run else []
    for rate, settings, scrapes in (("1,000 a second", [], 1.0), ("2,000 a second", ["--set", "sampling.period=500us"], 1.0)):
        port = measure.free_port()
        listen = ["--listen", f"127.0.0.1:{port}", "--annotations-socket", str(machine.folder / f"peer-{port}.sock")]
        here.append(Peer(
            "highwater", rate, [str(machine.highwater), "serve", *source, *listen, *settings], port=port, scrapes=scrapes,
            values=re.compile(r'^highwater_gpu_memory_used_max_bytes\{gpu="0".*window="15s"\} (\S+)', re.M).findall,
        ))
    if dry_run:
        return here, missing
    if machine.floor:
        for rate, period_us in (("1,000 a second", 1_000), ("10,000 a second", 100)):
            here.append(Peer("bare loop", rate, [str(machine.floor), "loop", str(period_us), "3600"], readings=1e6 / period_us))
    else:
        missing.append("bare loop (no compiler)")
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=timestamp,index,memory.used", "--format=csv,noheader,nounits"]
        line = re.compile(r", 0, (\d+)")
        here.append(Peer("nvidia-smi", "-l 1", [*query, "-l", "1"], readings=1.0, unit=MIB, lines=line))
        here.append(Peer("nvidia-smi", "-lms 1", [*query, "-lms", "1"], unit=MIB, lines=line))
    if exporter := found("nvitop-exporter", folder):
        for rate, interval in (("its own: 1 s", "1.0"), ("fastest: 0.25 s", "0.25")):
            port = measure.free_port()
            here.append(Peer(
                "nvitop-exporter", rate, [exporter, "--port", str(port), "--interval", interval], readings=1 / float(interval),
                port=port, values=re.compile(r'^gpu_memory_used_MiB\{[^}]*index="0"[^}]*\} (\S+)', re.M).findall, unit=MIB,
                scrapes=1 / float(interval),
            ))
    else:
        missing.append("nvitop-exporter")
    if all_smi := found("all-smi", folder):
        for rate, interval in (("its own: 3 s", "3"), ("fastest: 1 s", "1")):
            port = measure.free_port()
            here.append(Peer(
                "all-smi", rate, [all_smi, "api", "--port", str(port), "--interval", interval], readings=1 / float(interval),
                port=port, values=re.compile(r'^all_smi_gpu_memory_used_bytes\{[^}]*index="0"[^}]*\} (\S+)', re.M).findall,
            ))
    else:
        missing.append("all-smi")
    if rezolus := found("rezolus", folder):
        for rate, scrapes in (("scraped each second", 1.0), ("scraped 50 times a second", 50.0)):
            port = measure.free_port()
            config = machine.folder / f"rezolus-{port}.toml"
            config.write_text(
                f'[general]\nlisten = "127.0.0.1:{port}"\n[log]\nlevel = "error"\n[defaults]\nenabled = false\n'
                "[samplers.gpu_nvidia]\nenabled = true\n"
            )
            here.append(Peer(
                "rezolus", rate, [rezolus, str(config)], readings=scrapes, port=port, scrapes=scrapes,
                path="/metrics/json", values=of_rezolus,
            ))
    else:
        missing.append("rezolus")
    return here, missing


def of_rezolus(text: str) -> list[str]:
    """The memory in use of GPU 0, in a snapshot of its agent."""
    wanted = {"metric": "gpu_memory", "state": "used", "id": "0"}
    gauges = json.loads(text)["gauges"]
    return [gauge["value"] for gauge in gauges if {"metric": gauge["name"], **gauge["metadata"]}.items() >= wanted.items()]


class Running:
    """A peer that runs, and is scraped or read."""

    def __init__(self, peer: Peer, machine: rig.Rig) -> None:
        self.peer, self.ended = peer, threading.Event()
        peer.seen = []
        self.log = (machine.folder / f"{peer.name}-{peer.port or 'lines'}.log").open("w")
        out = subprocess.PIPE if peer.lines else self.log
        self.child = subprocess.Popen(peer.command, stdout=out, stderr=self.log, text=True)
        self.scraped = 0
        self.thread = threading.Thread(target=self.read if peer.lines else self.scrape, daemon=True)
        self.thread.start()

    def read(self) -> None:
        assert self.peer.lines and self.child.stdout
        for line in self.child.stdout:
            if match := self.peer.lines.search(line):
                self.peer.seen.append((time.time(), float(match[1]) * self.peer.unit))

    def scrape(self) -> None:
        """At its rate, over one connection, as Prometheus does."""
        if self.peer.port is None or self.peer.values is None:
            return
        connection, due = None, time.monotonic()
        while not self.ended.is_set():
            due = max(due + 1 / self.peer.scrapes, time.monotonic())
            try:
                connection = connection or http.client.HTTPConnection("127.0.0.1", self.peer.port, timeout=10)
                connection.request("GET", self.peer.path)
                text = connection.getresponse().read().decode(errors="replace")
                self.scraped += 1
                values = [float(value) * self.peer.unit for value in self.peer.values(text)]
                self.peer.seen += [(time.time(), value) for value in values]
            except (OSError, ValueError, http.client.HTTPException):
                connection = None
            self.ended.wait(max(0.0, due - time.monotonic()))

    def end(self) -> None:
        self.ended.set()
        self.child.terminate()
        try:
            self.child.wait(5)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.thread.join(5)
        self.log.close()


def alone(peer: Peer, machine: rig.Rig, seconds: float) -> dict[str, Any]:
    """What one costs."""
    running = Running(peer, machine)
    try:
        time.sleep(4.0)
        if running.child.poll() is not None:
            said = Path(running.log.name).read_text(errors="replace").split("\n")
            last = next((line for line in reversed(said) if line.strip()), "without a word")
            return {"error": f"ended with {running.child.returncode}: {last[:200]}"}
        before, counted = len(peer.seen), ticks(peer)
        cost = pollers.window(running.child.pid, seconds)
        read = peer.readings
        if counted is not None:
            now = ticks(peer)
            read = None if now is None else (now - counted) / cost["seconds"]
        elif peer.lines:
            read = (len(peer.seen) - before) / cost["seconds"]
        resident = measure.resident_bytes(running.child.pid)["VmRSS"]
        if (peer.values or peer.lines) and not peer.seen:
            return {"error": "no memory of GPU 0 in what it says"}
        if read is None:
            return {"error": "it does not say how often it reads"}
        return {"cpu_percent": cost["cpu_percent"], "resident": resident, "readings": read}
    finally:
        running.end()


def ticks(peer: Peer) -> float | None:
    """The readings that highwater counts; None for others, and where it does not say."""
    if peer.name != "highwater":
        return None
    connection = http.client.HTTPConnection("127.0.0.1", peer.port or 0, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    match = re.search(r"^highwater_sampler_ticks_taken_total (\S+)", text, re.M)
    return float(match[1]) if match else None


def spikes(here: list[Peer], machine: rig.Rig, context: Context) -> dict[str, int]:
    """How many spikes each showed, all at once."""
    running: list[Running] = []
    try:
        for peer in here:
            if peer.values or peer.lines:
                running.append(Running(peer, machine))
        time.sleep(6.0)
        base = {id(one): max((value for at, value in one.peer.seen), default=0.0) for one in running}
        heights = [(context.spike(mib), mib * MIB) for mib in heights_mib() if not time.sleep(APART_S)]
        time.sleep(4.0)
    finally:
        for one in running:
            one.end()
    shown = {}
    for one in running:
        # Within half of the step between two heights: only this spike is as high.
        wanted = [(at, base[id(one)] + height) for at, height in heights]
        values = one.peer.seen
        shown[f"{one.peer.name} {one.peer.rate}"] = sum(
            any(at <= when <= at + SHOWN_S and abs(value - level) < MORE_MIB * MIB / 2 for when, value in values)
            for at, level in wanted
        )
    return shown


def heights_mib() -> list[int]:
    """The heights of the spikes, each above the one before: so a maximum over a window shows each of them."""
    return [FIRST_MIB + number * MORE_MIB for number in range(SPIKES)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--peers", type=Path, help="a folder with the peers' programs")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the cost of each is measured (10)")
    parser.add_argument("--dry-run", action="store_true", help="highwater alone, on a simulated GPU")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    machine = rig.Rig(folder, gpus=1, dry_run=given.dry_run, job_arguments=[])
    context = None
    try:
        here, missing = peers(machine, given.peers, given.dry_run)
        context = None if given.dry_run else Context()
        rows = [{"name": peer.name, "rate": peer.rate, **alone(peer, machine, given.seconds)} for peer in here]
        shown = spikes(here, machine, context) if context else {}
    finally:
        if context:
            context.end()
        machine.end_all()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'':17}{'rate':27}{'CPU, %':>8}{'MiB':>8}{'readings a second':>19}{f'spikes of {SPIKES}':>14}")
    for row in rows:
        row["spikes"] = shown.get(f"{row['name']} {row['rate']}")
        if "error" in row:
            print(f"{row['name']:17}{row['rate']:27}{row['error']}")
            continue
        spiked = "-" if row["spikes"] is None else str(row["spikes"])
        numbers = f"{row['cpu_percent']:8.2f}{row['resident'] / MIB:8.1f}{row['readings']:19.1f}{spiked:>14}"
        print(f"{row['name']:17}{row['rate']:27}{numbers}")
    for name in missing:
        print(f"{name}: NOT MEASURED, not installed")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "peers.json").write_text(json.dumps({"rows": rows, "missing": missing}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
