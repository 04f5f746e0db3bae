"""An idle GPU: what it costs to watch it, and that no peak of a process that starts on it is missed.

Runs a daemon on an idle machine, scraped each second, beside the floor in the same run; then records memory while CUDA
processes start, allocate as soon as they can and end, beside a log of every reading at 1 kHz. Fails if a peak differs, or if
the full rate comes back later than one idle period after the first change.

    HIGHWATER=target/release/highwater python3 benches/gpu/idle.py --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/idle.py --simulated 1 2 4 8    # the cost alone, without a GPU
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import check_peaks
import device_memory
import measure
import pollers
import rig

# `sampling.idle_period`.
IDLE_NS = 100_000_000
# The most that an idle daemon may take, percent of a core.
MOST_PERCENT = 0.3
# How long a process keeps its 2 GiB before it takes a gigabyte more, seconds: without a wait it lives some 300 ms.
KINDS = {"at-once": 0.2, "short": 0.0}
# A tick may begin late, and the two logs read at different times within a millisecond.
SLACK_NS = 3_000_000
# How long the GPU is left alone before the next process starts on it, seconds: it counts as idle after one and a quarter.
ALONE_S = 2.0


def start_cuda(hold_s: float) -> None:
    """The process under test: allocates 2 GiB as soon as it can, then a gigabyte more for 5 ms, and prints when."""
    begin = time.time_ns()
    driver = device_memory.open_driver()
    if driver is None:
        raise SystemExit("no CUDA driver here")
    driver.create_context(0)
    created = time.time_ns()
    driver.allocate(2 * device_memory.GIB)
    allocated = time.time_ns()
    time.sleep(hold_s)
    more = driver.allocate(device_memory.GIB)
    time.sleep(0.005)
    driver.free(more)
    times = {"begin": begin, "created": created, "allocated": allocated}
    print(json.dumps({**times, "end": time.time_ns()}))


def cost(
    machine: rig.Rig, seconds: float, simulated: int | None = None
) -> dict[str, Any]:
    """CPU of an idle daemon that is scraped each second, and of the floor at 1 kHz and at an idle GPU's period. With so many
    simulated GPUs there is no floor."""
    arguments: list[str] = []
    if simulated is not None:
        scenario = machine.folder / f"idle-{simulated}.toml"
        scenario.write_text(f"[[gpus]]\ncount = {simulated}\n")
        arguments = ["--source", f"sim:{scenario}"]
    daemon = measure.Daemon(machine.highwater, machine.folder, arguments=arguments)
    try:
        deadline = time.monotonic() + 40
        while (
            measure.total(daemon.metrics(), "highwater_sampler_period_seconds") or 0
        ) < IDLE_NS / 1e9:
            if time.monotonic() > deadline:
                print(daemon.get("/metrics").decode()[:3000])
                raise SystemExit("the daemon does not find the GPUs idle")
            time.sleep(0.5)
        with measure.scraped(daemon):
            time.sleep(2)
            idle = pollers.window(daemon.child.pid, seconds)
        resident = measure.resident_bytes(daemon.child.pid)
    finally:
        daemon.stop()
    result: dict[str, Any] = {"idle": idle, "resident": resident}
    floor = machine.floor if simulated is None else None
    if floor is not None:
        for name, period_us in [("floor", 1_000), ("idle_floor", IDLE_NS // 1_000)]:
            child = subprocess.Popen(
                [str(floor), "loop", str(period_us), str(int(seconds) + 5)],
                stdout=subprocess.DEVNULL,
            )
            time.sleep(2)
            result[name] = pollers.window(child.pid, seconds / 2)
            child.kill()
            child.wait()
    return result


def starts(count: int, hold_s: float) -> list[dict[str, int]]:
    """Starts the process this many times, each time after the GPU has been left alone."""
    command = [sys.executable, __file__, "--start", str(hold_s)]
    done = []
    for _ in range(count):
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        )
        done.append({**json.loads(answer.stdout), "gone": time.time_ns()})
        time.sleep(ALONE_S)
    return done


def judge(
    runs: list[dict[str, int]], raw: check_peaks.Series, recording: Path
) -> dict[str, Any]:
    """Each start's peaks in both logs, and how long the full rate took to come back."""
    file = sqlite3.connect(recording)
    ticks = file.execute(
        "SELECT begin_ns, end_ns FROM ticks WHERE skipped & 1 = 0 ORDER BY begin_ns"
    ).fetchall()
    samples = file.execute(
        "SELECT at_ns, used_bytes FROM samples WHERE gpu = 0 ORDER BY at_ns, nth"
    ).fetchall()
    result: dict[str, Any] = {
        "starts": len(runs),
        "peaks_differ": [],
        "was_idle": 0,
        "to_full_ms": [],
    }
    for run in runs:
        lower, upper = run["begin"], run["gone"]
        allocated = run["allocated"]
        next_change = bisect.bisect(raw.times, lower)
        first = next((at for at in raw.times[next_change:] if at <= upper), None)
        raw_peak = max(raw.over(allocated, upper))
        own_peak = max(
            used
            for at, used in samples
            if allocated - 1_000_000 <= at <= upper and used is not None
        )
        if raw_peak != own_peak:
            result["peaks_differ"].append([raw_peak, own_peak])
        if first is None:
            continue
        before = [begin for begin, _ in ticks if first - 4 * IDLE_NS <= begin < first]
        result["was_idle"] += len(before) <= 6
        # While a context is created the driver makes calls wait, so the rate is judged from a reading's end to the next.
        after = [
            tick for tick in ticks if first - SLACK_NS <= tick[0] <= first + 6 * IDLE_NS
        ]
        pairs = itertools.pairwise(after)
        full = next((one[0] for one, two in pairs if two[0] - one[1] < SLACK_NS), None)
        waits = [to - since for since, to in raw.gaps if lower <= since <= upper]
        result.setdefault("raw_gap_ms", []).append(max(waits, default=0) / 1e6)
        result["to_full_ms"].append(None if full is None else (full - first) / 1e6)
        result.setdefault("first_change_ms", []).append((first - run["begin"]) / 1e6)
        result.setdefault("to_allocated_ms", []).append((allocated - first) / 1e6)
    return result


def recorded(machine: rig.Rig, kinds: list[str], count: int) -> dict[str, Any]:
    """What a recording and the raw log have of this many starts of each kind."""
    recording, raw_log = machine.folder / "idle.sqlite", machine.folder / "raw.csv"
    # Processes are listed often, so that the GPU is idle again before the next start.
    command: list[object] = [
        machine.highwater,
        "record",
        "-o",
        recording,
        "--set",
        "sampling.slow_period=100ms",
    ]
    recorder = rig.start_recorder(command)
    floor = machine.floor_loop(60 + 10 * count * len(kinds), raw_log)
    time.sleep(6)
    runs = {kind: starts(count, KINDS[kind]) for kind in kinds}
    floor.stop()
    recorder.send_signal(2)
    recorder.wait(30)
    raw = check_peaks.read_raw(raw_log)[0]
    return {kind: judge(done, raw, recording) for kind, done in runs.items()}


def print_cost(gpus: str, cost: dict[str, Any]) -> None:
    """One line for the daemon, one for its threads."""
    floors = {"floor": "floor at 1 kHz", "idle_floor": "floor at an idle GPU's period"}
    beside = [
        f"{text} {cost[name]['cpu_percent']:.3f} %"
        for name, text in floors.items()
        if name in cost
    ]
    percent = cost["idle"]["cpu_percent"]
    print(f"{gpus} idle, scraped each second: {percent:.3f} % of a core, ", end="")
    print("within" if percent <= MOST_PERCENT else "NOT within", MOST_PERCENT, end="")
    print("".join(f", {each}" for each in beside))
    used = cost["idle"]["thread_percent"].items()
    print("  " + ", ".join(f"{name} {percent:.3f}" for name, percent in used))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument(
        "--starts", type=int, default=100, help="starts of the process (100)"
    )
    parser.add_argument(
        "--seconds", type=float, default=40, help="seconds of the idle cost (40)"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["cost", *KINDS],
        default=["cost", *KINDS],
        help="what is run (everything)",
    )
    parser.add_argument(
        "--simulated", nargs="+", type=int, default=[], help="numbers of simulated GPUs, whose cost alone is measured"
    )
    parser.add_argument("--start", type=float, metavar="HOLD_S", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start is not None:
        start_cuda(given.start)
        return 0
    folder = Path(tempfile.mkdtemp())
    machine = rig.Rig(folder, gpus=1, dry_run=False, job_arguments=[])
    try:
        results: dict[str, Any] = {}
        parts = [] if given.simulated else given.parts
        results["simulated"] = {
            gpus: cost(machine, given.seconds, gpus) for gpus in given.simulated
        }
        if "cost" in parts:
            results["cost"] = cost(machine, given.seconds)
        kinds = [kind for kind in KINDS if kind in parts]
        if kinds:
            results["runs"] = recorded(machine, kinds, given.starts)
    finally:
        machine.end_all()
        shutil.rmtree(folder, ignore_errors=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "idle.json").write_text(json.dumps(results))
    costs = {f"{gpus} simulated GPUs": of for gpus, of in results["simulated"].items()}
    if "cost" in results:
        costs["GPUs"] = results["cost"]
    for gpus, of in costs.items():
        print_cost(gpus, of)
    failed = any(of["idle"]["cpu_percent"] > MOST_PERCENT for of in costs.values())
    for name, run in results.get("runs", {}).items():
        known = [ms for ms in run["to_full_ms"] if ms is not None]
        worst = max(known, default=float("nan"))
        late = [
            ms
            for ms in run["to_full_ms"]
            if ms is None or ms * 1e6 > IDLE_NS + SLACK_NS
        ]
        # A start on a GPU that is read at the full rate shows nothing.
        failed |= bool(run["peaks_differ"] or late or run["was_idle"] < run["starts"])
        print(
            f"{name}: {run['starts']} starts, {run['was_idle']} of them on an idle GPU,",
            end="",
        )
        print(
            f" {len(run['peaks_differ'])} peaks differ, full rate after at most {worst:.1f} ms, {len(late)} later than one period;",
            end="",
        )
        changes, allocations = (
            run.get("first_change_ms", []),
            run.get("to_allocated_ms", []),
        )
        if changes:
            print(
                f" longest gap of the raw log {max(run['raw_gap_ms']):.0f} ms;", end=""
            )
            print(
                f" first change {min(changes):.0f} ms after begin, 2 GiB at least {min(allocations):.0f} ms later",
                end="",
            )
        print()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
