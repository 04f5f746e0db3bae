"""Resident memory of a daemon over eight simulated GPUs with eight annotating ranks, scraped every second.

    HIGHWATER=target/release/highwater python3 benches/gpu/resident.py
    HIGHWATER=target/release/highwater python3 benches/gpu/resident.py --source nvml

Everything that takes memory is on: captures are asked for every second minute, and all metrics and spans go over OTLP to a receiver
that is away, so that they wait in the queue. Prints a line a minute, then what the memory is for, and fails if more than 32
MiB is resident beside that queue, or no capture was written. Without NVML: on real GPUs, which the second form reads, the driver's library takes more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import measure
from rig import HERE, find_highwater

MIB = 1 << 20
MOST_MIB = 32.0


def main() -> int:
    """Runs the daemon and prints its resident memory."""
    parser = argparse.ArgumentParser(description="Measures the daemon's resident memory.")
    parser.add_argument("--minutes", type=float, default=10.7, help="how long; the ring is full after 10")
    parser.add_argument("--source", default=f"sim:{HERE / 'resident.toml'}", help="what the daemon reads: nvml on real GPUs")
    arguments = parser.parse_args()
    highest = 0.0
    with tempfile.TemporaryDirectory(prefix="highwater-resident-") as folder:
        # Nobody listens on port 9.
        settings = [f"captures.directory={folder}/captures", "otlp.endpoint=http://127.0.0.1:9"]
        source = ["--source", arguments.source, *(each for setting in settings for each in ("--set", setting))]
        daemon = measure.Daemon(find_highwater(), Path(folder), "daemon", source)
        daemon.wait_sampling()
        end = time.monotonic() + 60 * arguments.minutes
        minute = 0
        with measure.scraped(daemon):
            while (left := end - time.monotonic()) > 0:
                if minute % 2 == 0:
                    ask_for_capture(daemon)
                minute += 1
                # A capture of 40 s is being written, or has just been.
                until = time.monotonic() + min(60.0, left)
                while time.monotonic() < until:
                    time.sleep(1)
                    highest = max(highest, beside_queue(daemon))
                say(daemon)
        print_parts(daemon)
        captures = measure.total(daemon.metrics(), "highwater_captures_total", outcome="complete") or 0
        daemon.stop()
    print(f"highest beside the OTLP queue: {highest:.1f} MiB, bound {MOST_MIB:.0f}")
    if not captures:
        print("no capture was written")
    return 0 if highest <= MOST_MIB and captures else 1


def ask_for_capture(daemon: measure.Daemon) -> None:
    """Asks for the last seconds; that one is still being written is no error."""
    request = urllib.request.Request(
        f"{daemon.url}/api/v1/captures", data=b"{}", headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10):
            pass
    except urllib.error.HTTPError as error:
        print(f"no capture: {error.code}", flush=True)


def beside_queue(daemon: measure.Daemon) -> float:
    """Resident memory without what waits to be sent, MiB."""
    queued = measure.total(daemon.metrics(), "highwater_memory_bytes", part="otlp") or 0
    return (measure.resident_bytes(daemon.child.pid)["VmRSS"] - queued) / MIB


def say(daemon: measure.Daemon) -> None:
    """One line: resident memory, marks taken, captures written, and bytes that samples and the queue take."""
    resident = {name: size / MIB for name, size in measure.resident_bytes(daemon.child.pid).items()}
    metrics = daemon.metrics()
    marks = measure.total(metrics, "highwater_annotations_total", outcome="accepted") or 0
    captures = measure.total(metrics, "highwater_captures_total", outcome="complete") or 0
    ring, queue = ((measure.total(metrics, "highwater_memory_bytes", part=part) or 0) / MIB for part in ("rings", "otlp"))
    parts = f"{resident['RssAnon']:.1f} anonymous, {resident['RssFile']:.1f} of files"
    print(
        f"{resident['VmRSS']:.1f} MiB resident ({parts}), highest {resident['VmHWM']:.1f}; "
        f"{marks:.0f} marks taken, {captures:.0f} captures, {ring:.1f} MiB of samples, {queue:.1f} MiB wait to be sent",
        flush=True,
    )


def print_parts(daemon: measure.Daemon) -> None:
    """What the memory is for, the largest part first."""
    parts = [(value / MIB, labels["part"]) for name, labels, value in daemon.metrics() if name == "highwater_memory_bytes"]
    print(", ".join(f"{part} {mib:.2f}" for mib, part in sorted(parts, reverse=True)))


if __name__ == "__main__":
    sys.exit(main())
