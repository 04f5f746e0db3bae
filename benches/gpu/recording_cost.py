#!/usr/bin/env python3
"""What it costs to record a job's GPU memory into a file: `highwater record`, a text file, `nvidia-smi -lms 1`.

    HIGHWATER=target/release/highwater python3 benches/gpu/recording_cost.py [--rounds 4] [--seconds 10]

A training job runs throughout. Each round runs each way of recording for some seconds, one after the other, in an order
that changes. At last `highwater run` runs a job of its own, and its table is printed. Cost is the processor time of the
recording process, start and end included; readings are what is in its file.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harm import order
from measure import Child
from rig import find_highwater, start_recorder

HERE = Path(__file__).resolve().parent
SMI = "nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv,noheader -lms 1 -f".split()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each way in each round")
    return parser.parse_args()


def readings_of_database(path: Path) -> int:
    with sqlite3.connect(path) as file:
        return file.execute("SELECT (SELECT count(*) FROM ticks) * (SELECT count(*) FROM gpus)").fetchone()[0]


def lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def record(command: list[object], path: Path, seconds: float, count: Callable[[Path], int]) -> dict[str, float]:
    """Runs it for some seconds, ends it with SIGINT, and measures it."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = start_recorder(command)
    time.sleep(seconds)
    resident = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
    process.send_signal(signal.SIGINT)
    process.wait(10)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "cpu_percent": 100 * cpu_s / wall,
        "readings_a_second": count(path) / wall,
        "bytes_a_second": path.stat().st_size / wall,
        "resident_mib": int(resident[1]) / 1024 if resident else float("nan"),
    }


def main() -> int:
    options = parse_options()
    highwater = find_highwater()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printer = folder / "poll_and_print"
        subprocess.run(["cc", "-O2", "-o", printer, HERE / "poll_and_print.c", "-ldl"], check=True)
        job = Child([sys.executable, HERE / "train.py", "--seconds", 3600, "--verbose"], folder / "job.log")
        job.wait_for("ready: ", 120)
        ways: dict[str, Callable[[Path], list[object]]] = {
            "highwater record": lambda path: [highwater, "record", "-o", path],
            "poll and print": lambda path: [printer, path],
        }
        if shutil.which("nvidia-smi"):
            ways["nvidia-smi -lms 1"] = lambda path: [*SMI, path]
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number, (_, way) in enumerate(order(list(ways), options.rounds)):
            path = folder / f"{number}.out"
            count = readings_of_database if way == "highwater record" else lines
            measured[way].append(record(ways[way](path), path, options.seconds, count))
            path.unlink()
        job.kill()
        print(f"{'':<20}{'CPU %':>8}{'readings/s':>12}{'KB/s':>8}{'MiB resident':>14}   (medians of {options.rounds})")
        for way, rows in measured.items():
            cpu, rate, size, resident = (
                statistics.median(row[key] for row in rows)
                for key in ("cpu_percent", "readings_a_second", "bytes_a_second", "resident_mib")
            )
            print(f"{way:<20}{cpu:>8.2f}{rate:>12.0f}{size / 1e3:>8.1f}{resident:>14.1f}")
        file = folder / "job.sqlite"
        train = [sys.executable, HERE / "train.py", "--seconds", "8"]
        own = [highwater, "run", "-o", file, "--", "sh", "-c", 'exec "$@" --socket "$HIGHWATER_ANNOTATIONS_SOCKET"', "sh"]
        done = subprocess.run([*own, *train], capture_output=True, text=True, env=os.environ, check=False)
        print(f"highwater run ended with {done.returncode}:\n{done.stderr[-2500:]}")
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
