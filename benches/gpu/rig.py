"""What the parts of the bench run with: the binaries, a folder, the pollers and the training job."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import measure
from measure import Child, Daemon

HERE = Path(__file__).resolve().parent
QUERY = ["--query-gpu=timestamp,index,memory.used", "--format=csv,noheader"]
PERIOD_US = 1000
TINY_JOB = "--device cpu --layers 1 --width 32 --heads 2 --vocab 64 --batch 1 --seq-max 528 --data-ms 20"


def find_highwater() -> Path:
    """The daemon's binary: `$HIGHWATER`, the path, or this repository's release build."""
    named = os.environ.get("HIGHWATER") or shutil.which("highwater")
    path = Path(named) if named else HERE.parents[1] / "target/release/highwater"
    if not os.access(path, os.X_OK):
        raise SystemExit(f"no executable at {path}: set HIGHWATER to the daemon's binary")
    return path.resolve()


class Job:
    """The training job of `train.py`."""

    def __init__(self, child: Child, times: Path) -> None:
        self.child = child
        self._times = times

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Waits for its first steps."""
        self.child.wait_for("ready: ", timeout_s)

    def finish(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Asks it to end after its step; its times, and the exit status, which is not 0 where a rank failed."""
        status = self.child.stop(timeout_s)
        if not self._times.exists():
            raise RuntimeError(f"the job ended with {status}: {self.child.output()[-1500:]}")
        if status != 0:
            print(f"  the job ended with {status}: {self.child.output()[-600:]}", flush=True)
        return {**json.loads(self._times.read_text()), "exit_status": status}


class Rig:
    """Starts what is measured and ends what is left over."""

    def __init__(self, folder: Path, gpus: int, dry_run: bool, job_arguments: Sequence[str]) -> None:
        self.folder = folder
        self.gpus = gpus
        self.dry_run = dry_run
        self.highwater = find_highwater()
        self.floor = measure.find_floor(HERE, folder)
        self.smi = shutil.which("nvidia-smi")
        self._job_arguments = [*(TINY_JOB.split() if dry_run else []), *job_arguments]
        self._children: list[Child] = []
        self._count = 0

    def daemon(self, name: str = "daemon", arguments: Sequence[str] = ()) -> Daemon:
        """A daemon that samples."""
        source = ["--source", "sim"] if self.dry_run else []
        daemon = Daemon(self.highwater, self.folder, name, [*source, *arguments])
        self._children.append(daemon.child)
        daemon.wait_sampling()
        return daemon

    def spawn(self, name: str, command: Sequence[object]) -> Child:
        """One process, its output in a log of its own."""
        self._count += 1
        child = Child(command, self.folder / f"{name}-{self._count}.log")
        self._children.append(child)
        return child

    def floor_loop(self, seconds: float, log: Path | None = None) -> Child:
        """The floor, polling at 1 kHz for at most `seconds`; ends early on SIGTERM."""
        if self.floor is None:
            raise RuntimeError("no nvml_floor: no compiler here and no binary beside the scripts")
        child = self.spawn("floor", [self.floor, "loop", str(PERIOD_US), str(seconds), *([log] if log else [])])
        child.wait_for("devices", 20)
        return child

    def smi_loop(self) -> Child:
        """`nvidia-smi -lms 1`, once it prints."""
        if self.smi is None:
            raise RuntimeError("no nvidia-smi here")
        child = self.spawn("nvidia-smi", [self.smi, *QUERY, "-lms", "1"])
        child.wait_for("\n", 20)
        return child

    def train(self, *arguments: str, fixed: bool = False) -> Job:
        """A training job that is past its first steps."""
        self._count += 1
        times = self.folder / f"times-{self._count}.json"
        shape = ["--seq-min", "1024", "--seq-max", "1024"] if fixed and not self.dry_run else []
        command = [sys.executable, HERE / "train.py", "--gpus", str(self.gpus), "--times", times]
        child = self.spawn("train", [*command, *self._job_arguments, *shape, *arguments])
        job = Job(child, times)
        job.wait_ready()
        return job

    def end_all(self) -> None:
        """Ends every process that a part left over."""
        for child in self._children:
            if child.alive():
                child.kill()
        self._children.clear()


def daemon_cost(rig: Rig, seconds: float, settle_s: float) -> dict[str, Any]:
    """The daemon over a window, scraped every second."""
    daemon = rig.daemon()
    with measure.scraped(daemon) as scraper:
        time.sleep(settle_s)
        metrics = daemon.metrics()
        cost = window(daemon.child.pid, seconds)
        later = daemon.metrics()
    ticks, after = measure.ticks(metrics), measure.ticks(later)
    delta = {name: after[name] - ticks[name] for name in ticks}
    resident = measure.resident_bytes(daemon.child.pid)
    daemon.stop()
    return {
        **cost,
        "rate_hertz": delta["taken"] / cost["seconds"],
        "missed_percent": 100 * delta["missed"] / delta["due"] if delta["due"] else float("nan"),
        "resident_bytes": resident["VmRSS"],
        "resident_peak_bytes": resident["VmHWM"],
        "memory_call_mean_us": measure.mean_us(metrics, later, "highwater_nvml_call_duration_seconds", call="memory_info"),
        "lateness_mean_us": measure.mean_us(metrics, later, "highwater_sampler_lateness_seconds"),
        "scrape_p50_ms": 1e3 * statistics.median(scraper.seconds) if scraper.seconds else float("nan"),
        "scrape_bytes": scraper.bytes,
        "scrape_failures": scraper.failures,
    }


def floor_cost(rig: Rig, seconds: float, settle_s: float) -> dict[str, Any]:
    """The floor over a window; its ticks are those of its whole run."""
    child = rig.floor_loop(seconds + settle_s + 30)
    time.sleep(settle_s)
    cost = window(child.pid, seconds)
    resident = measure.resident_bytes(child.pid)["VmHWM"]
    child.stop()
    own = measure.parse_floor(child.output())
    missed = 100 * own["missed"] / (own["samples"] + own["missed"])
    return {**cost, "rate_hertz": own["rate_hertz"], "missed_percent": missed, "resident_peak_bytes": resident, "own": own}


def smi_cost(rig: Rig, seconds: float, settle_s: float) -> dict[str, Any]:
    """`nvidia-smi` over a window; its rate is that of its whole run."""
    child = rig.smi_loop()
    time.sleep(settle_s)
    cost = window(child.pid, seconds)
    child.stop()
    rate = smi_rate(child.output())
    return {**cost, "rate_hertz": rate, "missed_percent": max(0.0, 100 - rate / 10)}


def smi_rate(printed: str) -> float:
    """Samples a second of one GPU, by the timestamps of the first and the last line."""
    rows = [line.split(", ") for line in printed.splitlines() if line.count(", ") == 2]
    if len(rows) < 3:
        raise RuntimeError(f"nvidia-smi printed no samples: {printed[-400:]}")
    first_gpu = [row for row in rows if row[1] == rows[0][1]]
    first, last = (datetime.strptime(row[0], "%Y/%m/%d %H:%M:%S.%f") for row in (first_gpu[0], first_gpu[-1]))
    elapsed = (last - first).total_seconds()
    return (len(first_gpu) - 1) / elapsed if elapsed else float("nan")


def window(pid: int, seconds: float) -> dict[str, Any]:
    """CPU of a process over the next `seconds`, in percent of one core: whole, by its threads' names, and by second."""
    before, begin = measure.cpu_seconds(pid), time.monotonic()
    by_second, looked, then = [], before, begin
    while (left := begin + seconds - then) > 0:
        time.sleep(min(1.0, left))
        after, now = measure.cpu_seconds(pid), time.monotonic()
        by_second.append(round(100 * measure.cpu_between(looked, after) / (now - then), 3))
        looked, then = after, now
    elapsed = then - begin
    threads = measure.cpu_by_name(before, after, pid)
    return {
        "cpu_percent": 100 * measure.cpu_between(before, after) / elapsed,
        "cpu_percent_by_second": by_second,
        "seconds": elapsed,
        "thread_percent": {name: 100 * used / elapsed for name, used in threads.items()},
    }


COSTS: dict[str, Callable[[Rig, float, float], dict[str, Any]]] = {
    "floor": floor_cost,
    "daemon": daemon_cost,
    "nvidia-smi": smi_cost,
}
"""How each of the three is measured."""
