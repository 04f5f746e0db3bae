#!/usr/bin/env python3
"""What a job that maps memory all the time costs the sampling of its GPU and of the others.

While a job maps and frees memory, the driver lets other calls wait: where one lock serves all GPUs, those on every GPU. For each
size the table has what a bare loop of NVML calls on the last GPU loses, one call each millisecond, and then what the daemon loses:
the ticks that the fast lane missed because of the driver, and the time in which the memory of the job's GPU was not known. The
daemon may read the job's GPU by a thread of its own meanwhile.

    HIGHWATER=target/release/highwater python3 tests/gpu/mapping.py

It needs one GPU, and two for the others; no PyTorch. It changes no setting of the GPU. It prints a table, and fails if the
daemon loses more than a tenth more than the bare loop, and a hundredth of its ticks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches" / "gpu"))

import measure  # noqa: E402
from device_memory import GIB, MIB, open_driver  # noqa: E402

# How long the job maps, how long each of both reads, and how long the capture is.
SECONDS = 40
BARE_S = 10
CAPTURED = 10
PERIOD_S = 0.001


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


class Memory(ctypes.Structure):
    """`nvmlMemory_v2_t`."""

    _fields_ = (("version", ctypes.c_uint), *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")))


def bare(gpu: int, seconds: float) -> tuple[float, float]:
    """Reads a GPU's memory each millisecond. Returns the share of the readings that were missed because a call took longer, and
    the longest call in milliseconds."""
    nvml, device, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), Memory()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(device)):
        raise SystemExit("NVML cannot be opened")
    begun = due = time.perf_counter()
    missed, longest = 0, 0.0
    while due < begun + seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        memory.version = ctypes.sizeof(Memory) | 2 << 24
        called = time.perf_counter()
        nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(memory))
        took = time.perf_counter() - called
        passed = int(took / PERIOD_S)
        longest, missed, due = max(longest, took), missed + passed, max(due, called) + (1 + passed) * PERIOD_S
    return missed * PERIOD_S / seconds, longest * 1e3


def ticks(metrics: measure.Metrics) -> tuple[float, float]:
    """Due, and missed because of the driver."""
    missed = measure.total(metrics, "highwater_sampler_ticks_missed_total", cause="driver_blocked")
    return measure.total(metrics, "highwater_sampler_ticks_due_total") or 0.0, missed or 0.0


def own_threads(daemon: measure.Daemon) -> int:
    """How many GPUs have a thread of their own."""
    names = (Path(task, "comm").read_text().strip() for task in Path(f"/proc/{daemon.child.pid}/task").iterdir())
    return sum(name == "hw-aside" for name in names)


def capture(daemon: measure.Daemon, path: Path) -> None:
    """Writes a capture of the last seconds to this file."""
    data = json.dumps({"seconds_before": CAPTURED, "seconds_after": 0}).encode()
    request = urllib.request.Request(daemon.url + "/api/v1/captures", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        name = json.loads(answer.read())["id"]
    while True:
        known = next(one for one in json.loads(daemon.get("/api/v1/captures"))["captures"] if one["id"] == name)
        if known["state"] != "writing":
            break
        time.sleep(0.2)
    path.write_bytes(daemon.get(f"/api/v1/captures/{name}", 60))


def gaps(path: Path, gpu: int) -> tuple[float, float, int]:
    """The share of the time in which a GPU's memory is not known, the longest such time in milliseconds, and how often
    it was seen to change."""
    connection = sqlite3.connect(path)
    points = connection.execute("SELECT at_ns, used_bytes FROM samples WHERE gpu = ? ORDER BY at_ns, nth", (gpu,)).fetchall()
    end_ns = int(connection.execute("SELECT max(end_ns) FROM ticks").fetchone()[0])
    connection.close()
    unknown = [after[0] - point[0] for point, after in zip(points, [*points[1:], (end_ns, 0)], strict=True) if point[1] is None]
    return sum(unknown) / max(1, end_ns - points[0][0]), max(unknown, default=0) / 1e6, len(points)


def row(folder: Path, size_bytes: int) -> tuple[list[str], bool]:
    job = subprocess.Popen([sys.executable, __file__, "--maps", str(size_bytes)], stdout=subprocess.PIPE, text=True)
    # The context comes first.
    time.sleep(5)
    driver = open_driver()
    assert driver is not None
    last = driver.count() - 1
    bare_share, bare_ms = bare(last, BARE_S)
    captures = ["--set", f"captures.directory={folder}/captures"]
    daemon = measure.Daemon(Path(os.environ.get("HIGHWATER", "highwater")), folder, f"daemon-{size_bytes}", captures)
    daemon.wait_sampling()
    begun, own, until = ticks(daemon.metrics()), 0, time.monotonic() + CAPTURED + 1
    while time.monotonic() < until and job.poll() is None:
        own = max(own, own_threads(daemon))
        time.sleep(0.25)
    ended, path, mapped = ticks(daemon.metrics()), folder / "one.sqlite", job.poll() is None
    capture(daemon, path)
    daemon.stop()
    said = json.loads(job.communicate(timeout=120)[0])
    share, longest_ms, points = gaps(path, 0)
    due, missed = (after - before for before, after in zip(begun, ended, strict=True))
    missed /= max(1.0, due)
    holds = mapped and missed <= 1.1 * bare_share + 0.01
    return [
        f"{said['bytes'] / GIB:.2f}", f"{said['cycles']}", " and ".join(f"{one:.0f}" for one in said["longest_ms"]),
        f"{last}: {bare_share:.2%}, longest {bare_ms:.0f} ms", f"{missed:.2%} of {due:.0f}", f"{share:.2%}, longest {longest_ms:.0f} ms",
        f"{points}", "yes" if own else "no", "yes" if holds else "NO",
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
        "| GiB | cycles in 40 s | longest map and free, ms | missed by a bare loop on GPU | ticks missed | unknown of the job's GPU |"
        " changes seen in 10 s | own thread | holds |\n" + "|---" * 9 + "|"
    )
    with tempfile.TemporaryDirectory() as name:
        for size_bytes in (256 * MIB, 2 * GIB, 8 * GIB, 0):
            cells, holds = row(Path(name), size_bytes)
            failed |= not holds
            print("| " + " | ".join(cells) + " |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
