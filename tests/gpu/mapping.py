#!/usr/bin/env python3
"""What a job that maps memory all the time costs the sampling of its GPU and of the others.

While a job maps and frees memory, calls of the driver wait for it: those on its own GPU, or on any. For each size the table
has the ticks that the fast lane missed because of the driver, the time in which the memory of the job's GPU was not known, and
whether that GPU was read by a thread of its own. The longest times that the job's calls took say how long a call may wait.

    HIGHWATER=target/release/highwater python3 tests/gpu/mapping.py

It needs one GPU, and two for the others; no PyTorch. It changes no setting of the GPU. It prints a table, and fails if the
other GPUs lose more than one in a hundred of their ticks, or if a GPU does not come back to the fast lane.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches" / "gpu"))

from device_memory import GIB, MIB, open_driver  # noqa: E402

PERIOD_S = 0.001
# How long the job maps, and how long the capture of it is.
SECONDS = 20
CAPTURED = 10
# How long a GPU may stay with a thread of its own after the job.
BACK_WITHIN_S = 45


def maps(size_bytes: int, seconds: float) -> None:
    """The job: maps and frees so many bytes on GPU 0 for so long. Prints its longest calls, milliseconds."""
    driver = open_driver()
    assert driver is not None
    driver.create_context(0)
    size_bytes = size_bytes or int(driver.free_bytes() * 0.75)
    until, cycles, longest = time.monotonic() + seconds, 0, [0, 0]
    while time.monotonic() < until:
        _, *took = driver.cycle(size_bytes)
        longest = [max(pair) for pair in zip(longest, took, strict=True)]
        cycles += 1
    print(json.dumps({"cycles": cycles, "longest_ms": [one / 1e6 for one in longest], "bytes": size_bytes}))


class Daemon:
    def __init__(self, folder: Path) -> None:
        settings = ["listen=127.0.0.1:0", "annotations.socket=none", f"captures.directory={folder}/captures"]
        command = [os.environ.get("HIGHWATER", "highwater"), "serve", *(part for one in settings for part in ("--set", one))]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        until = time.monotonic() + 30
        while not (found := re.search(r"listening on (http://\S+)", self.log.read_text())):
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit("the daemon did not start: " + self.log.read_text())
            time.sleep(0.05)
        self.url = found[1]

    def get(self, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} if data else {})
        with urllib.request.urlopen(request, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    def values(self, name: str) -> dict[str, float]:
        """The samples of a metric, by their labels."""
        lines = self.get("/metrics").decode().splitlines()
        found = (re.match(rf"{name}(?:{{(.*)}})? (\S+)$", line) for line in lines)
        return {one[1] or "": float(one[2]) for one in found if one}

    def ticks(self) -> tuple[float, float]:
        """Due, and missed because of the driver."""
        missed = self.values("highwater_sampler_ticks_missed_total")
        return self.values("highwater_sampler_ticks_due_total")[""], missed['cause="driver_blocked"']

    def period(self, gpu: int) -> float | None:
        """The period in which a GPU's memory is read, seconds."""
        periods = self.values("highwater_gpu_sampling_period_seconds")
        return next((period for labels, period in periods.items() if f'gpu="{gpu}"' in labels), None)

    def alone(self) -> int:
        """How many GPUs have a thread of their own."""
        names = (Path(task, "comm").read_text().strip() for task in Path(f"/proc/{self.process.pid}/task").iterdir())
        return sum(name == "hw-aside" for name in names)

    def capture(self) -> Any:
        request = {"seconds_before": CAPTURED, "seconds_after": 0}
        answer = json.loads(self.get("/api/v1/captures", json.dumps(request).encode()))
        name = answer["id"]
        while True:
            known = next(one for one in json.loads(self.get("/api/v1/captures"))["captures"] if one["id"] == name)
            if known["state"] != "writing":
                return known
            time.sleep(0.2)


def gaps(path: Path, gpu: int) -> tuple[float, float, int]:
    """The share of the time in which a GPU's memory is not known, the longest such time in milliseconds, and how often
    it was seen to change."""
    connection = sqlite3.connect(path)
    points = connection.execute("SELECT at_ns, used_bytes FROM samples WHERE gpu = ? ORDER BY at_ns, nth", (gpu,)).fetchall()
    end_ns = int(connection.execute("SELECT max(end_ns) FROM ticks").fetchone()[0])
    connection.close()
    unknown = [after[0] - point[0] for point, after in zip(points, [*points[1:], (end_ns, 0)], strict=True) if point[1] is None]
    return sum(unknown) / max(1, end_ns - points[0][0]), max(unknown, default=0) / 1e6, len(points)


def measure(daemon: Daemon, folder: Path, size_bytes: int) -> tuple[list[str], bool]:
    gpus = len(daemon.values("highwater_gpu_up"))
    job = subprocess.Popen([sys.executable, __file__, "--maps", str(size_bytes)], stdout=subprocess.PIPE, text=True)
    # The context comes first.
    time.sleep(5)
    begun, alone, periods, until = daemon.ticks(), 0, [], time.monotonic() + CAPTURED + 1
    while time.monotonic() < until and job.poll() is None:
        alone = max(alone, daemon.alone())
        periods.append(daemon.period(0) or 0.0)
        time.sleep(0.25)
    ended = daemon.ticks()
    capture = daemon.capture()
    said = json.loads(job.communicate(timeout=120)[0])
    ended_at = time.monotonic()
    while daemon.alone() and time.monotonic() < ended_at + BACK_WITHIN_S:
        time.sleep(0.1)
    back_s, is_back = time.monotonic() - ended_at, daemon.alone() == 0
    path = folder / "one.sqlite"
    path.write_bytes(daemon.get(f"/api/v1/captures/{capture['id']}"))
    share, longest_ms, points = gaps(path, 0)
    others = [gaps(path, gpu)[0] for gpu in range(1, gpus)]
    due, missed = (after - before for before, after in zip(begun, ended, strict=True))
    holds = is_back and (gpus < 2 or missed <= 0.01 * due)
    return [
        f"{said['bytes'] / GIB:.2f}", f"{said['cycles']}", " and ".join(f"{one:.0f}" for one in said["longest_ms"]),
        f"{missed:.0f} of {due:.0f} ({missed / max(1.0, due):.2%})", f"{share:.2%}, longest {longest_ms:.0f} ms", f"{points}",
        f"{max(others):.2%}" if others else "", "yes" if alone else "no", f"{min(periods) * 1e3:.0f} to {max(periods) * 1e3:.0f}",
        f"{back_s:.1f}" if alone else "", "yes" if holds else "NO",
    ], holds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--maps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.maps is not None:
        maps(options.maps, SECONDS)
        return 0
    failed = False
    print(
        "| GiB | cycles | longest map and free, ms | ticks missed | unknown of its GPU | changes seen in 10 s | unknown of others "
        "| own thread | period of its GPU, ms | back after, s | holds |\n" + "|---" * 11 + "|"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = Daemon(folder)
        try:
            for size_bytes in (256 * MIB, 8 * GIB, 0):
                row, holds = measure(daemon, folder, size_bytes)
                failed |= not holds
                print("| " + " | ".join(row) + " |", flush=True)
        finally:
            daemon.process.terminate()
            daemon.process.wait(30)
            print("".join(line for line in daemon.log.read_text().splitlines(True) if "GPU" in line)[:3000])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
