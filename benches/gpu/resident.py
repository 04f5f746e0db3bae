"""Resident memory of a daemon over eight simulated GPUs with eight annotating ranks, scraped every second.

    HIGHWATER=target/release/highwater python3 benches/gpu/resident.py
    HIGHWATER=target/release/highwater python3 benches/gpu/resident.py --source nvml

Prints a line a minute, and the highest value. Without NVML: on real GPUs, which the second form reads, the driver's library
takes more.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import measure
from rig import HERE, find_highwater

MIB = 1 << 20


def main() -> None:
    """Runs the daemon and prints its resident memory."""
    parser = argparse.ArgumentParser(description="Measures the daemon's resident memory.")
    parser.add_argument("--minutes", type=float, default=10.7, help="how long; the ring is full after 10")
    parser.add_argument("--source", default=f"sim:{HERE / 'resident.toml'}", help="what the daemon reads: nvml on real GPUs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="highwater-resident-") as folder:
        captures = f"captures.directory={folder}/captures"
        source = ["--source", arguments.source, "--set", captures]
        daemon = measure.Daemon(find_highwater(), Path(folder), "daemon", source)
        daemon.wait_sampling()
        end = time.monotonic() + 60 * arguments.minutes
        with measure.scraped(daemon):
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(60.0, left))
                say(daemon)
        daemon.stop()


def say(daemon: measure.Daemon) -> None:
    """One line: resident memory, marks taken, and bytes that samples take."""
    resident = {name: size / MIB for name, size in measure.resident_bytes(daemon.child.pid).items()}
    metrics = daemon.metrics()
    marks = measure.total(metrics, "highwater_annotations_total", outcome="accepted") or 0
    ring = (measure.total(metrics, "highwater_ring_bytes") or 0) / MIB
    parts = f"{resident['RssAnon']:.1f} anonymous, {resident['RssFile']:.1f} of files"
    print(
        f"{resident['VmRSS']:.1f} MiB resident ({parts}), highest {resident['VmHWM']:.1f}; "
        f"{marks:.0f} marks taken, {ring:.1f} MiB of samples",
        flush=True,
    )


if __name__ == "__main__":
    main()
