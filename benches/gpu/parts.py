"""The parts of the bench. Each starts what it needs on the rig, measures, and returns one JSON object."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import check_peaks
import costs
import energy
import harm
import measure
import sampling
from context import Context
from measure import Daemon
from rig import Rig

SCRAPERS_AT_ONCE = 50
"""How many scrapers the daemon has to sustain at once."""

SMI_FIELDS = (
    "name,driver_version,persistence_mode,mig.mode.current,ecc.mode.current,memory.total,memory.reserved,"
    "pstate,clocks.sm,clocks.mem,power.draw,temperature.gpu"
)


def environment(rig: Rig, _options: Namespace, _out: Path) -> dict[str, Any]:
    """The host, its GPUs and the versions in use."""
    return {
        "host": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": rig.gpus,
        "highwater": say([rig.highwater, "--version"]),
        "binary_bytes": rig.highwater.stat().st_size,
        "binary_sha256": hashlib.sha256(rig.highwater.read_bytes()).hexdigest(),
        "nvidia_smi": say([rig.smi, f"--query-gpu={SMI_FIELDS}", "--format=csv"]) if rig.smi else None,
    }


def probe(rig: Rig, _options: Namespace, out: Path) -> dict[str, Any]:
    """The daemon's own table of what NVML's calls cost here, written to `probe.txt` and `probe.json`."""
    seconds = {}
    for arguments, name in ((["probe"], "probe.txt"), (["probe", "--json"], "probe.json")):
        begin = time.monotonic()
        done = subprocess.run([rig.highwater, *arguments], capture_output=True, timeout=90, check=False)
        (out / name).write_bytes(done.stdout)
        if done.returncode != 0:
            raise RuntimeError(f"probe ended with {done.returncode}: {done.stderr.decode(errors='replace')[-600:]}")
        seconds[name] = time.monotonic() - begin
    json.loads((out / "probe.json").read_bytes())
    return {"seconds": seconds, "table": (out / "probe.txt").read_text(errors="replace")}


def startup(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """From exec to the first scrape answered, without a GPU, milliseconds."""
    milliseconds = [first_scrape_ms(rig) for _ in range(options.startups)]
    return {"milliseconds": milliseconds, "median": statistics.median(milliseconds), "worst": max(milliseconds)}


def costs_idle(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """Floor, daemon and `nvidia-smi` in turns, while a process holds a context on each GPU: otherwise the daemon reads them
    seldom, see `idle.py`."""
    with nullcontext() if rig.dry_run else Context():
        return costs.in_turns(rig, options)


def costs_training(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """The same as `costs_idle`, beside a training job of varying shapes."""
    job = rig.train()
    outcome = costs.in_turns(rig, options)
    times = job.finish()
    outcome["job"] = {
        "steps": len(times["steps"]),
        "median_ms": median_ms(times["steps"]),
        "exit_status": times["exit_status"],
    }
    return outcome


def sampling_idle(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """The daemon's threads beside the floor, while a process holds a context on each GPU."""
    with nullcontext() if rig.dry_run else Context():
        return sampling.beside_the_floor(rig, options)


def sampling_training(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """The same as `sampling_idle`, beside a training job of varying shapes."""
    job = rig.train()
    outcome = sampling.beside_the_floor(rig, options)
    job.finish()
    return outcome


def energy_training(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """The daemon's energy beside the GPUs' counters, beside a training job of varying shapes."""
    job = rig.train()
    outcome = energy.beside_the_counter(rig, options.energy_seconds)
    job.finish()
    return outcome


def peaks(rig: Rig, options: Namespace, out: Path) -> dict[str, Any]:
    """Runs the daemon beside an annotating job, and compares its peaks by phase with a raw log."""
    raw_log = rig.folder / "raw.csv"
    floor = rig.floor_loop(options.peaks_seconds + 180, raw_log)
    daemon = rig.daemon()
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    with measure.scraped(daemon):
        annotated = ["--socket", str(daemon.socket), "--events", str(rig.folder)]
        job = rig.train(*annotated, "--empty-cache", str(options.empty_cache))
        ticks, cpu = measure.ticks(daemon.metrics()), measure.thread_cpu(daemon.child.pid)
        begin = time.monotonic()
        deadline = begin + options.peaks_seconds
        while time.monotonic() < deadline:
            time.sleep(min(5.0, max(0.0, deadline - time.monotonic())))
            collect(daemon, seen)
        elapsed, after = time.monotonic() - begin, measure.thread_cpu(daemon.child.pid)
        threads = measure.cpu_by_name(cpu, after, daemon.child.pid)
        missed = {name: value - ticks[name] for name, value in measure.ticks(daemon.metrics()).items()}
        times = job.finish()
        time.sleep(1.5)  # The last phases are attributed once the ring has passed their end.
        collect(daemon, seen)
        outcomes = annotation_outcomes(daemon)
        resident = measure.resident_bytes(daemon.child.pid)
    daemon.stop()
    floor.stop()
    logs = sorted(rig.folder.glob("events-rank*.jsonl"))
    answer = {"phases": list(seen.values())}
    keep(out, raw_log, logs, answer)
    report = check_peaks.compare(check_peaks.read_raw(raw_log), check_peaks.read_phases(logs), answer)
    print(check_peaks.describe(report))
    return {
        "report": asdict(report),
        "holds": report.holds,
        "annotations": outcomes,
        "client": times["annotations"],
        "resident": resident,
        "thread_percent": {name: 100 * used / elapsed for name, used in threads.items()},
        "ticks": missed,
        "floor": measure.parse_floor(floor.output()),
    }


def captures(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """Ticks beside an annotating job, with and without captures of the last 30 s written one after the other."""
    often = ["--set", "captures.asks_per_hour=1000000"]
    daemon = rig.daemon("recorder", ["--set", f"captures.directory={rig.folder / 'captures'}", *often])
    job = rig.train("--socket", str(daemon.socket))
    time.sleep(options.capture_past_seconds)  # So that each capture has as much past as it asks for.
    of_kind = {
        name: partial(capture_window, daemon, options.capture_seconds, name == "writing") for name in ("without", "writing")
    }
    outcome = turn_about(options.capture_rounds, of_kind)
    job.finish()
    daemon.stop()
    return outcome


def turn_about(rounds: int, of_kind: dict[str, Callable[[], dict[str, float]]]) -> dict[str, Any]:
    """Windows of each kind, in an order that is reversed from round to round, and their sums by kind."""
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in of_kind}
    for number in range(rounds):
        for name in list(windows)[:: 1 if number % 2 else -1]:
            windows[name].append(of_kind[name]())
    sums = {name: {key: sum(row[key] for row in rows) for key in rows[0]} for name, rows in windows.items()}
    return {"windows": windows, **sums}


def capture_window(daemon: measure.Daemon, seconds: float, is_writing: bool) -> dict[str, float]:
    """What the sampler did over a window. With `is_writing`, a capture was requested whenever the last one was done."""
    with counted(daemon) as window:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if is_writing:
                measure.post(daemon, "/api/v1/captures", {"seconds_after": 0})
            time.sleep(0.05)
        while any(one["state"] == "writing" for one in measure.get_json(daemon, "/api/v1/captures")["captures"]):
            time.sleep(0.05)
    return window


def scrapers(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """Ticks with fifty scrapers at once every second, and with none; then how often the daemon has looked for other
    devices, and whether it opened the driver again without a reason."""
    daemon = rig.daemon("scraped")
    daemon.wait_sampling()
    of_kind = {
        name: partial(scraper_window, daemon, options.scraper_seconds, count)
        for name, count in (("without", 0), ("scraped", SCRAPERS_AT_ONCE))
    }
    outcome = turn_about(options.scraper_rounds, of_kind)
    metrics, durations = daemon.metrics(), "highwater_nvml_call_duration_seconds"
    daemon.stop()
    looks = {
        "looked": measure.total(metrics, f"{durations}_count", call="devices") or 0.0,
        "look_us": measure.mean_us([], metrics, durations, call="devices"),
        "reopened": daemon.child.output().count("reopening NVML"),
    }
    return {**outcome, **looks}


def scraper_window(daemon: measure.Daemon, seconds: float, count: int) -> dict[str, float]:
    """What the sampler did over a window of whole seconds, in each of which this many scrapers scraped at once."""
    scraped = [0] * count

    def scrape_each_second(number: int, begin: float) -> None:
        for second in range(max(1, int(seconds))):
            time.sleep(max(0.0, begin + second + 0.5 - time.monotonic()))
            daemon.get("/metrics")
            scraped[number] += 1

    with counted(daemon) as window:
        at = time.monotonic()
        threads = [threading.Thread(target=scrape_each_second, args=(n, at), daemon=True) for n in range(count)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        for thread in threads:
            thread.join()
    return {"scrapes": float(sum(scraped)), **window}


@contextmanager
def counted(daemon: measure.Daemon) -> Iterator[dict[str, float]]:
    """Yields a dictionary, which holds what the sampler did in the block once the block is over."""
    window: dict[str, float] = {}
    before = sampler_counts(daemon)
    yield window
    after = sampler_counts(daemon)
    window.update({name: after[name] - before[name] for name in after})


def sampler_counts(daemon: measure.Daemon) -> dict[str, float]:
    """Ticks due, missed and late, and captures written, so far."""
    metrics = daemon.metrics()
    ticks = measure.ticks(metrics)
    late = measure.total(metrics, "highwater_sampler_ticks_missed_total", lane="fast", cause="late") or 0.0
    written = measure.total(metrics, "highwater_captures_total", outcome="complete") or 0.0
    return {"due": ticks["due"], "missed": ticks["missed"], "late": late, "captures": written}


def harm_to_job(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """Step times and allocation times of one job, with pollers started and ended beside it."""
    job = rig.train("--alloc-cycles", str(options.alloc_cycles), fixed=True)
    there = {"floor": rig.floor, "nvidia-smi": rig.smi}
    peers = [name for name in options.peers if there[name]]
    conditions = [harm.BASELINE, "daemon", *peers]
    blocks = []
    for number, condition in harm.order(conditions, options.blocks):
        needed = options.settle_seconds + options.block_seconds + 8
        if time.monotonic() + needed > options.deadline or not job.child.alive():
            break
        blocks.append(run_block(rig, options, number, condition))
    times = job.finish()
    steps = [(begin, duration) for begin, duration, _ in times["steps"]]
    mallocs = [(begin, malloc) for begin, malloc, _ in times["allocations"]]
    frees = [(begin + malloc, free) for begin, malloc, free in times["allocations"]]
    return {
        "rounds": len(blocks) // len(conditions),
        "parameters": times["parameters"],
        "step": harm.compare(blocks, steps),
        "step_ns_by_round": harm.by_round(blocks, steps, 0.5),
        "malloc_p50": harm.compare(blocks, mallocs),
        "malloc_p99": harm.compare(blocks, mallocs, 0.99),
        "free_p50": harm.compare(blocks, frees),
    }


def kills(rig: Rig, options: Namespace, _out: Path) -> dict[str, Any]:
    """Kills the sampling daemon with SIGKILL beside an annotating job, while a second daemon watches for XID errors."""
    logged = kernel_xids()
    witness = rig.daemon("witness")
    target = rig.folder / "victim.sock"
    job = rig.train("--socket", str(target), fixed=True)
    killed = []
    for _ in range(options.kills):
        victim = rig.daemon("victim")
        time.sleep(1.0)
        os.kill(victim.child.pid, signal.SIGKILL)
        killed.append(time.time_ns())
        victim.child.stop()
        time.sleep(0.5)
    times = job.finish()
    xids = measure.total(witness.metrics(), "highwater_gpu_xid_errors_total")
    witness.stop()
    return {
        "kills": len(killed),
        "xids_witnessed": xids,
        "xids_logged": None if logged is None else (kernel_xids() or [])[len(logged) :],
        "job_exit_status": times["exit_status"],
        **around(times["steps"], killed),
    }


PARTS: dict[str, Callable[[Rig, Namespace, Path], dict[str, Any]]] = {
    "environment": environment,
    "startup": startup,
    "probe": probe,
    "costs-idle": costs_idle,
    "peaks": peaks,
    "costs-training": costs_training,
    "sampling-idle": sampling_idle,
    "sampling-training": sampling_training,
    "energy": energy_training,
    "kills": kills,
    "captures": captures,
    "scrapers": scrapers,
    "harm": harm_to_job,
}
"""In the order of running. The last one takes the time that is left."""
ON_REQUEST = ("sampling-idle", "sampling-training", "energy")
"""Parts that run only if they are named."""


def run_block(rig: Rig, options: Namespace, number: int, condition: str) -> harm.Block:
    """One block: the poller is started, left to settle, and ended after the block."""
    with ExitStack() as ending:
        if condition == "daemon":
            daemon = rig.daemon()
            ending.callback(daemon.stop)
            ending.enter_context(measure.scraped(daemon))
        elif condition == "nvidia-smi":
            ending.callback(rig.smi_loop().stop)
        elif condition == "floor":
            ending.callback(rig.floor_loop(options.settle_seconds + options.block_seconds + 30).stop)
        time.sleep(options.settle_seconds)
        begin_ns = time.time_ns()
        time.sleep(options.block_seconds)
        return harm.Block(number, condition, begin_ns, time.time_ns())


def around(steps: list[list[int]], killed: Iterable[int]) -> dict[str, Any]:
    """Steps that overlap the 300 ms after a kill, beside all others, milliseconds."""
    spans = [(at, at + 300_000_000) for at in killed]
    near: list[float] = []
    far: list[float] = []
    for begin, duration, _ in steps[5:]:
        hit = any(begin <= end and begin + duration >= start for start, end in spans)
        (near if hit else far).append(duration / 1e6)
    return {
        "steps_near": len(near),
        "near_median_ms": statistics.median(near) if near else None,
        "near_worst_ms": max(near, default=None),
        "far_median_ms": statistics.median(far) if far else None,
        "far_worst_ms": max(far, default=None),
    }


def kernel_xids() -> list[str] | None:
    """The kernel log's lines of XID errors; None if it cannot be read."""
    if not shutil.which("dmesg"):
        return None
    done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=False)
    return [line for line in done.stdout.splitlines() if "Xid" in line] if done.returncode == 0 else None


def collect(daemon: Daemon, seen: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Adds the daemon's ended phases to those seen. If a limit is refused, a smaller one is requested."""
    for limit in (100_000, 10_000, 1_000):
        answer = measure.get_json(daemon, f"/api/v1/jobs/bench/phases?limit={limit}")
        if answer is not None:
            for phase in check_peaks.read_answer(answer):
                key = (phase.get("rank"), phase["phase"], phase.get("step"), phase["begin_unix_nano"])
                seen[key] = phase
            return


def annotation_outcomes(daemon: Daemon) -> dict[str, float]:
    """How many annotations the daemon accepted and refused, by outcome."""
    name = "highwater_annotations_total"
    return {labels.get("outcome", ""): value for found, labels, value in daemon.metrics() if found == name and value}


def keep(out: Path, raw_log: Path, logs: list[Path], answer: dict[str, Any]) -> None:
    """Keeps the comparison's three inputs, so that it can be repeated."""
    with gzip.open(out / "raw.csv.gz", "wb") as target, raw_log.open("rb") as source:
        shutil.copyfileobj(source, target)
    with gzip.open(out / "events.jsonl.gz", "wb") as target:
        for log in logs:
            target.write(log.read_bytes())
    with gzip.open(out / "phases.json.gz", "wt") as target:
        json.dump(answer, target)


def first_scrape_ms(rig: Rig) -> float:
    """Starts the daemon once without a GPU; returns the time to its first scrape, milliseconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["--listen", f"127.0.0.1:{port}", "--annotations-socket", str(rig.folder / "startup.sock")]
    begin = time.perf_counter()
    child = rig.spawn("startup", [rig.highwater, "serve", *settings, "--nvml-library", "/nonexistent"])
    while not answers(port):
        if not child.alive() or time.perf_counter() - begin > 10:
            raise RuntimeError(f"no scrape was answered: {child.output()[-600:]}")
        time.sleep(0.001)
    elapsed = 1e3 * (time.perf_counter() - begin)
    child.stop()
    return elapsed


def answers(port: int) -> bool:
    """Whether a scrape of this port is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def median_ms(steps: list[list[int]]) -> float | None:
    """The median step, milliseconds."""
    return statistics.median(duration for _, duration, _ in steps) / 1e6 if steps else None


def say(command: list[Any]) -> str:
    """The output of a short command."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=20, check=False)
    return (done.stdout or done.stderr).strip()
