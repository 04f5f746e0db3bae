"""The environment of the bench's parts: the binaries, a folder, the pollers and the training job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
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


def start_recorder(command: list[object]) -> subprocess.Popen[bytes]:
    """Starts a program that SIGINT ends. A shell's `&` makes what it starts ignore that, and processes inherit it."""
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class Job:
    """The training job of `train.py`."""

    def __init__(self, child: Child, times: Path) -> None:
        self.child = child
        self._times = times

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Waits for its first steps."""
        self.child.wait_for("ready: ", timeout_s)

    def finish(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Asks it to end after its step; returns its times and its exit status, which is not 0 if a rank failed."""
        status = self.child.stop(timeout_s)
        if not self._times.exists():
            raise RuntimeError(f"the job ended with {status}: {self.child.output()[-1500:]}")
        if status != 0:
            print(f"  the job ended with {status}: {self.child.output()[-600:]}", flush=True)
        return {**json.loads(self._times.read_text()), "exit_status": status}


class Rig:
    """Starts what is measured, and ends what is left over."""

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
        """Starts one process, with its output in its own log."""
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

    def started(self) -> int:
        """How many processes have been started and not been removed by `end_since`."""
        return len(self._children)

    def end_since(self, started: int) -> None:
        """Ends the processes that were started after there were `started`."""
        for child in self._children[started:]:
            if child.alive():
                child.kill()
        del self._children[started:]

    def end_all(self) -> None:
        """Ends every process that a part left over."""
        self.end_since(0)
