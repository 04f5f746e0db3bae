"""Runs a program and measures it, with no more than a share of the machine's memory: a peer that needs more must not take the machine
with it."""

from __future__ import annotations

import os
import resource
import subprocess
import time

# Of the machine's memory.
MOST_SHARE = 0.7


def bounded() -> None:
    most = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MOST_SHARE)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def measured(command: list[str]) -> tuple[float, float, str]:
    """Seconds, the most resident memory in MiB, and what was printed, or `failed: ` and why."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=bounded)
    printed, problem = process.stdout.read() if process.stdout else "", process.stderr.read() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        printed = f"failed: {(problem.strip().splitlines() or [str(status)])[-1]}"
    return time.perf_counter() - began, usage.ru_maxrss / 1024, printed
