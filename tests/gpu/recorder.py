"""A job and the recording of it: what the scripts that fill the corpus have in common."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches" / "gpu"))
sys.path.insert(0, str(ROOT / "python"))

import measure  # noqa: E402


class Recorder:
    """`highwater record`, in the place of a daemon."""

    def __init__(self, binary: Path, folder: Path, *options: str) -> None:
        self.socket = folder / "annotations.sock"
        self.file = folder / "recording.sqlite"
        self.file.unlink(missing_ok=True)
        command = [binary, "record", "-o", self.file, "--annotations-socket", self.socket, *options]
        self.child = measure.Child(command, folder / "record.log")
        self.child.wait_for("recording to", 15)

    def stop(self) -> None:
        """Ends the recording."""
        self.child.process.send_signal(signal.SIGINT)
        self.child.process.wait(60)
        # What a replay derives again.
        with contextlib.closing(sqlite3.connect(self.file)) as recording:
            for table in ("phases", "phase_memory", "ticks", "findings"):
                recording.execute(f"DELETE FROM {table}")
            recording.commit()
            recording.execute("VACUUM")


def start(script: str, to: Any, job: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts a script as a job whose marks go `to` a daemon or a recorder."""
    own = {"HIGHWATER_ANNOTATIONS_SOCKET": str(to.socket), "HIGHWATER_JOB": job, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    command, pipe = [sys.executable, script, *arguments], subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **own, **environment}, stdin=pipe, stdout=pipe, text=True)


def start_two(script: str, to: Any, job: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Starts a script as both ranks of a job, which meet at a port of their own."""
    port = str(measure.free_port())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_NVLS_ENABLE": "0"}
    return [start(script, to, job, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in (0, 1)]


def of_marks(counted: dict[str, int]) -> dict[str, int]:
    """What an allocator counted, by the names of marks."""
    return {**{key: counted[key] for key in ("allocated", "reserved", "ooms")}, "alloc_retries": counted["retries"]}


def rose(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """How often an allocator flushed and failed between two counts."""
    return {key: after[key] - before[key] for key in ("retries", "ooms")}


def printed(job: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects that a job prints, one a line."""
    return (json.loads(line) for line in job.stdout or [] if line.startswith("{"))


def interrupted(number: int, _: Any) -> None:
    """Ends the recording, once: a limit of time may signal the whole group, and again."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def stretch(begin_ns: int | None, end_ns: int | None) -> dict[str, int]:
    """A stretch of time as truth.json has it. One without a begin or an end is the recording's."""
    times = {"begin_unix_nano": begin_ns, "end_unix_nano": end_ns}
    return {key: at_ns for key, at_ns in times.items() if at_ns is not None}


def write_truth(
    folder: Path,
    about: str,
    model: dict[str, Any],
    blocks: list[dict[str, Any]],
    findings: list[dict[str, Any]],
    unjudged: list[dict[str, int]],
) -> None:
    """Writes what is true of a recording beside it."""
    kept = [{key: block[key] for key in ("kind", "begin_ns", "end_ns", "steps") if key in block} for block in blocks]
    truth = {"about": about, "model": model, "blocks": kept, "findings": findings, "unjudged": unjudged}
    (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


def pack(folder: Path) -> None:
    """Compresses a recording that has ended, and removes what was beside it."""
    with (folder / "recording.sqlite").open("rb") as plain, gzip.open(folder / "recording.sqlite.gz", "wb", 9) as packed:
        shutil.copyfileobj(plain, packed)
    for name in ("recording.sqlite", "annotations.sock", "annotations.sock.seqpacket", "record.log"):
        (folder / name).unlink(missing_ok=True)
