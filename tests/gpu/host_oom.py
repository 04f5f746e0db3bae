#!/usr/bin/env python3
"""Whether the kernel's kills for want of host memory are reported of the right rank, in real control groups.

Each job runs in a control group of its own below a memory limit, marks steps, and meets one end:

- own: the rank itself takes more than the limit and is killed; `host_oom` of the rank.
- worker: a process beside it, as of a data loader, is killed, and the rank goes on; `host_oom` of a process beside it.
- follows: a process beside it is killed, and the rank then ends by itself; likewise.
- close: it takes 9 tenths of the limit and ends by itself; nothing.
- killed: it is killed with SIGKILL by this script, far from the limit; nothing.

No other job of the same time may be named: an idle neighbour in a group of its own marks steps all along.

    HIGHWATER=target/release/highwater python3 tests/gpu/host_oom.py

It needs root and the memory controller of control groups below /sys/fs/cgroup, of version 2 or 1, and no GPU. It makes groups
`highwater-test-…` and removes them, prints a table, and fails if a row does.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from culprits import findings
from recorder import ROOT, measure, start

GROUPS = Path("/sys/fs/cgroup")
IS_OLD = not (GROUPS / "cgroup.controllers").exists()
# The folder of the groups, and their files: the limit, the same for swap, the count of kills.
FOLDER = GROUPS / "memory" if IS_OLD else GROUPS
FILES = (
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control")
    if IS_OLD
    else ("memory.max", "memory.swap.max", "memory.events")
)
MIB = 1 << 20
LIMIT = 192 * MIB
ENDS = ("own", "worker", "follows", "close", "killed")
# Whether its finding names the rank itself. Its severity is a warning, as no process here runs on a GPU.
EXPECTED = {"own": True, "worker": False, "follows": False}
# How long the daemon waits after a kill for the end of the rank, and some more.
PATIENCE_S = 20.0

JOB = """
import os, sys, time
end, limit, group = sys.argv[1], int(sys.argv[2]), sys.argv[3]
open(group, "w").write(str(os.getpid()))
import itertools, highwater
def take(bytes):
    held = []
    while sum(map(len, held)) < bytes:
        held.append(b"x" * (4 << 20))
    return held
def beside():
    child = os.fork()
    if child == 0:
        # The kernel takes the process with the highest score.
        open("/proc/self/oom_score_adj", "w").write("1000")
        take(2 * limit)
        os._exit(0)
    os.waitpid(child, 0)
for step in itertools.count():
    with highwater.step(step), highwater.phase("data"):
        time.sleep(0.02)
        if step == 50:
            highwater.flush(5)
            print("begins", flush=True)
            if end == "own":
                take(2 * limit)
            if end in ("worker", "follows"):
                beside()
            if end == "close":
                take(limit * 9 // 10 - (40 << 20))
            if end in ("follows", "close"):
                highwater.flush(5)
                sys.exit(0 if end == "close" else 1)
"""


class Group:
    """A control group with a memory limit."""

    def __init__(self, name: str, limit: int | None) -> None:
        self.path = FOLDER / f"highwater-test-{os.getpid()}-{name}"
        self.path.mkdir()
        if limit:
            (self.path / FILES[0]).write_text(str(limit))
            swap = self.path / FILES[1]
            if swap.exists():
                # The old files limit memory and swap together.
                swap.write_text(str(limit) if IS_OLD else "0")

    def kills(self) -> int:
        """The kernel's own count, beside which the findings are judged."""
        lines = (self.path / FILES[2]).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def remove(self) -> None:
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


def begin(end: str, group: Group, daemon: measure.Daemon) -> subprocess.Popen[str]:
    """Starts a job that enters its group before anything else."""
    entrance = str(group.path / "cgroup.procs")
    return start("-c", daemon, f"host-{end}", JOB, end, str(LIMIT), entrance, PYTHONPATH=str(ROOT / "python"))


def host_ooms(daemon: measure.Daemon) -> list[dict[str, Any]]:
    return [one for one in findings(daemon) if one["finding"] == "host_oom"]


def judge(daemon: measure.Daemon, end: str) -> tuple[str, str, bool]:
    """Runs one job to its end. A row of the table: what, what came of it, and whether that is right."""
    group = Group(end, LIMIT)
    try:
        job = begin(end, group, daemon)
        assert job.stdout
        job.stdout.readline()
        if end == "killed":
            job.send_signal(signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        found: list[dict[str, Any]] = []
        while time.monotonic() < until and not (found and end in EXPECTED):
            time.sleep(0.2)
            found = [one for one in host_ooms(daemon) if one["job"] == f"host-{end}"]
        job.kill()
        code = job.wait(10)
        kills = group.kills()
    finally:
        group.remove()
    wanted = EXPECTED.get(end)
    names_rank = [one["what"].startswith("Rank") for one in found]
    is_right = names_rank == ([] if wanted is None else [wanted]) and kills == (0 if wanted is None else 1)
    text = "; ".join(f"{one['severity']}: {one['what']} {one['why']}" for one in found) or "no finding"
    return f"{end} (exit {code}, oom_kill {kills})", text, is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ENDS, action="append", help="only this end; may be repeated")
    options = parser.parse_args()
    if os.geteuid() != 0 or not FOLDER.exists():
        raise SystemExit(f"this needs root and the memory controller at {FOLDER}")
    with tempfile.TemporaryDirectory() as folder:
        daemon = measure.Daemon(Path(os.environ["HIGHWATER"]), Path(folder), arguments=["--source", "sim"])
        beside = Group("neighbour", None)
        neighbour = begin("neighbour", beside, daemon)
        try:
            rows = [judge(daemon, end) for end in options.only or ENDS]
            others = [one["job"] for one in host_ooms(daemon) if one["job"] not in {f"host-{end}" for end in EXPECTED}]
            rows.append(("neighbour and others", ", ".join(others) or "no finding", not others))
        finally:
            neighbour.kill()
            neighbour.wait(10)
            beside.remove()
            daemon.stop()
    for what, text, is_right in rows:
        print(f"{'ok ' if is_right else 'NOT'} {what}: {text}")
    return 0 if all(is_right for _, _, is_right in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
