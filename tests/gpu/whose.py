#!/usr/bin/env python3
"""Whether marks and findings belong to the right job on a real GPU.

- apart: one script runs twice at once, without a launcher. Each run is a job of its own, with all of its steps.
- next: a job fills the GPU and ends. The next job on that GPU marks at once. What the first one did is not reported of the
  second: no finding of it begins before its first mark, and low headroom is none of its.
- named: while a job fills the GPU, a program of another user marks short steps of a job of its own on that GPU, on which it
  does not run. Low headroom stays the first job's. This part needs root, to be another user.

    HIGHWATER=target/release/highwater python3 tests/gpu/whose.py
    HIGHWATER=target/debug/highwater python3 tests/gpu/whose.py --dry-run

It needs PyTorch for CUDA and one GPU; with --dry-run neither, and headroom is not checked. It changes no setting
of the GPU. It prints a table, and fails if a row does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parents[2] / "python"

# Runs steps of 50 ms that hold the given GiB each, or all but the given MiB of the GPU's memory where that is given.
SCRIPT = """
import sys, time
gib, steps, leave_mib, dry = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "dry"
import highwater
if not dry:
    import torch
    torch.ones(1, device="cuda")
    if leave_mib:
        gib = torch.cuda.mem_get_info()[0] / 2**30 - leave_mib / 1024
begun = time.time_ns()
for step in range(steps):
    with highwater.step(step):
        with highwater.phase("forward"):
            held = None if dry else torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
            time.sleep(0.05)
        held = None
        if not dry and not leave_mib:
            torch.cuda.empty_cache()
highwater.flush(10)
status = highwater.status()
import json
print(json.dumps({"job": status.get("job"), "begun": begun, "status": {key: str(value) for key, value in status.items()}}))
"""


# Marks short steps on GPU 0, on which it does not run, until it is ended.
THIEF = """
import json, os, socket, sys, time
os.setuid(65534)
sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sender.connect(sys.argv[1] + ".seqpacket")
for step in range(1_000_000):
    for event in ("begin", "end"):
        sender.send(json.dumps({"event": event, "kind": "step", "step": step, "job": "thief", "gpu": 0}).encode())
    time.sleep(0.015)
"""


class Daemon:
    """A daemon of its own, whose socket the jobs are told."""

    def __init__(self, folder: Path, *, dry: bool) -> None:
        self.socket = folder / "annotations.sock"
        source = ["--source", "sim:spike"] if dry else []
        settings = ["--set", "listen=127.0.0.1:0", "--set", f"annotations.socket={self.socket}"]
        binary = os.environ.get("HIGHWATER", "highwater")
        self.process = subprocess.Popen([binary, "serve", *source, *settings], stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        for line in self.process.stderr or []:
            self.said.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise SystemExit("the daemon ended: " + "".join(self.said))
        threading.Thread(target=lambda: self.said.extend(self.process.stderr or []), daemon=True).start()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


@contextlib.contextmanager
def daemon(*, dry: bool) -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as folder:
        one = Daemon(Path(folder), dry=dry)
        try:
            yield one
        finally:
            one.process.terminate()
            one.process.wait(10)


def start(script: Path, to: Daemon, *arguments: object, stdin: int | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(PYTHON), "HIGHWATER_ANNOTATIONS_SOCKET": str(to.socket)}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True)


def ended(job: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = job.communicate(timeout=120)
    if job.returncode != 0:
        raise SystemExit(f"a job ended with {job.returncode}")
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def steps_of(to: Daemon, job: str) -> int:
    steps: int = sum(rank["steps"] for rank in to.get(f"/api/v1/jobs/{job}")["ranks"])
    return steps


def apart(script: Path, how: str) -> list[tuple[str, str, bool]]:
    rows = []
    with daemon(dry=how == "dry") as to:
        wanted = [1.0, 4.0]
        jobs = [start(script, to, gib, 40, 0, how) for gib in wanted]
        pids = [job.pid for job in jobs]
        for job in jobs:
            ended(job)
        time.sleep(1.5)
        for pid, gib in zip(pids, wanted, strict=True):
            steps = steps_of(to, f"{script.stem}-{pid}")
            rows.append((f"steps of the run with {gib:.0f} GiB a step", f"{steps} of 40", steps == 40))
        names = sorted(one["job"] for one in to.get("/api/v1/jobs")["jobs"])
        rows.append(("jobs of two runs of one script at once", f"{len(names)}", len(names) == 2))
    return rows


def following(script: Path, how: str, rounds: int) -> list[tuple[str, str, bool]]:
    found_first = early = of_next = 0
    with daemon(dry=how == "dry") as to:
        for _ in range(rounds):
            first = start(script, to, 0, 60, 300, how)
            first_name = f"{script.stem}-{first.pid}"
            ended(first)
            second = start(script, to, 1, 20, 0, how)
            second_name = f"{script.stem}-{second.pid}"
            begun = ended(second)["begun"]
            time.sleep(0.5)
            findings = to.get("/api/v1/findings?limit=512")["findings"]
            found_first += any(one["finding"] == "low_headroom" and one["job"] == first_name for one in findings)
            its = [one for one in findings if one["job"] == second_name]
            early += sum(one["begin_unix_nano"] < begun for one in its)
            of_next += sum(one["finding"] == "low_headroom" for one in its)
    dry = how == "dry"
    return [
        ("low headroom of the job that fills the GPU", f"{found_first} of {rounds} jobs", dry or found_first == rounds),
        ("low headroom of the job after it", f"{of_next} of {rounds} jobs", of_next == 0),
        ("findings of the job after it from before its first mark", str(early), early == 0),
    ]


def named(script: Path, how: str, rounds: int) -> list[tuple[str, str, bool]]:
    kept = stolen = 0
    with daemon(dry=how == "dry") as to:
        os.chmod(to.socket.parent, 0o755)
        thief = subprocess.Popen([sys.executable, "-c", THIEF, str(to.socket)])
        try:
            for _ in range(rounds):
                job = start(script, to, 0, 60, 300, how)
                ended(job)
                findings = to.get("/api/v1/findings?limit=512")["findings"]
                full = [one["job"] for one in findings if one["finding"] == "low_headroom"]
                kept += f"{script.stem}-{job.pid}" in full
                stolen += "thief" in full
            has_marked = steps_of(to, "thief") > 0
        finally:
            thief.kill()
            thief.wait()
    dry = how == "dry"
    return [
        ("steps of a job that only names the GPU are taken", "yes" if has_marked else "no", has_marked),
        ("low headroom of the job that fills the GPU beside it", f"{kept} of {rounds} jobs", dry or kept == rounds),
        ("low headroom of the job that only names the GPU", f"{stolen} of {rounds} jobs", stolen == 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    how = "dry" if arguments.dry_run else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "sweep.py"
        script.write_text(SCRIPT)
        rows = apart(script, how) + following(script, how, arguments.rounds)
        if os.geteuid() == 0:
            rows += named(script, how, arguments.rounds)
        else:
            print("not root: the part `named` is left out", file=sys.stderr)
    width = max(len(what) for what, _, _ in rows)
    for what, value, is_right in rows:
        print(f"{what:<{width}}  {value:<14}  {'yes' if is_right else 'NO'}")
    if not all(is_right for _, _, is_right in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
