#!/usr/bin/env python3
"""Whether what the daemon says of who holds a real GPU's memory is true, second by second.

A job marks steps. At first it holds tensors; then it frees half of them, which its allocator keeps; then it takes memory beside its
allocator; then a process without marks takes memory on the same GPU, and another 80 GiB at once, which must be known within three seconds: the
driver's list of processes is read every ten seconds, and when memory rises. After each of the others, `/api/v1/gpus/0/breakdown` is compared with what the job
knows of itself, and the parts together with all that is in use. Last, the job is killed in a phase, which must be known with its memory.

    HIGHWATER=target/release/highwater python3 tests/gpu/holders.py

It needs PyTorch for CUDA and one GPU on which nothing else runs. It prints a table, and fails if a row does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import whose

MIB = 1 << 20

# Marks steps of 50 ms, and does what it reads, a line each: `hold GIB`, `free`, `outside GIB`. Prints what it has after each.
SCRIPT = """
import ctypes, json, select, sys, time
import highwater, torch
highwater.configure(counters=lambda: {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()})
torch.ones(1, device="cuda")
held, step, beside = [], 0, 0
library = next(line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line)
while True:
    with highwater.step(step), highwater.phase("forward"):
        time.sleep(0.05)
    step += 1
    if not select.select([sys.stdin], [], [], 0)[0]:
        continue
    what, *how = sys.stdin.readline().split() or ["end"]
    if what == "end":
        break
    if what == "hold":
        held.append(torch.empty(int(how[0]) << 30, dtype=torch.uint8, device="cuda"))
    elif what == "free":
        held.pop()
    else:
        beside += int(how[0]) << 30
        at = ctypes.c_void_p()
        assert ctypes.CDLL(library).cudaMalloc(ctypes.byref(at), ctypes.c_size_t(int(how[0]) << 30)) == 0
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    print(json.dumps({"allocated": allocated, "cached": reserved - allocated, "beside": beside}), flush=True)
"""

# Holds the given GiB until its input ends.
NEIGHBOUR = """
import sys, torch
held = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
print("{}", flush=True)
sys.stdin.read()
"""


def now(to: whose.Daemon) -> dict[str, Any]:
    """The newest parts, and all that is in use, bytes."""
    points = to.get("/api/v1/gpus/0/breakdown")["points"]
    used = to.get("/api/v1/gpus/0/memory")["points"][-1][1]
    names = ("at", "allocated", "cached", "outside", "processes", "others")
    return {**dict(zip(names, points[-1], strict=True)), "used": used}


def killed(job: subprocess.Popen[str], to: whose.Daemon) -> tuple[str, str, bool]:
    """Kills the job in its phase: that phase and its step must be known, with the memory that the job still held."""
    name = to.get("/api/v1/jobs")["jobs"][0]["job"]
    held, begun = now(to)["used"], time.monotonic()
    job.kill()
    job.wait(60)
    while time.monotonic() - begun < 10:
        last = to.get(f"/api/v1/jobs/{name}/phases?limit=2")["phases"]
        if all(one["cut"] for one in last):
            break
        time.sleep(0.1)
    text = ", ".join(f"{one['phase']} {one['gpus'][0]['peak_bytes'] / MIB:,.0f} MiB" for one in last if one["cut"])
    is_right = sorted(one["phase"] for one in last) == ["forward", "step"] and all(
        one["cut"] and one["gpus"][0]["peak_bytes"] == held for one in last
    )
    return f"killed in a phase: what ended with it, of {held / MIB:,.0f} MiB", text, is_right


def main() -> None:
    rows: list[tuple[str, str, bool]] = []

    def compare(what: str, found: int | None, wanted: int, within: int) -> None:
        text = "not known" if found is None else f"{found / MIB:,.0f} of {wanted / MIB:,.0f} MiB"
        rows.append((what, text, found is not None and abs(found - wanted) <= within))

    with tempfile.TemporaryDirectory() as folder, whose.daemon(dry=False) as to:
        script = Path(folder) / "holds.py"
        script.write_text(SCRIPT)
        job = whose.start(script, to, stdin=subprocess.PIPE)
        assert job.stdin is not None and job.stdout is not None

        def does(*what: object) -> dict[str, int]:
            print(*what, file=job.stdin, flush=True)
            knows: dict[str, int] = json.loads(job.stdout.readline())  # type: ignore[union-attr]
            return knows

        try:
            context = 0
            for what, name in [(("hold", 20), "tensors"), (("hold", 10), "more tensors"), (("free",), "a cache"), (("outside", 4), "memory beside")]:
                knows = does(*what)
                # The driver's list of processes may be ten seconds old.
                time.sleep(12 if what[0] in ("hold", "outside") else 4)
                parts = now(to)
                for part in ("allocated", "cached"):
                    compare(f"{name}: {part}", parts[part], knows[part], 4 * MIB)
                # A context with its libraries takes 0.4 to 1 GiB, and as much after as before.
                if what == ("hold", 20):
                    context = parts["outside"] or 0
                    rows.append(("a context", f"{context / MIB:,.0f} MiB", 300 * MIB < context < 1024 * MIB))
                compare(f"{name}: outside the allocator, beside a context of {context / MIB:,.0f} MiB", parts["outside"], context + knows["beside"], 64 * MIB)
                together = sum(parts[part] or 0 for part in ("allocated", "cached", "outside", "processes", "others"))
                compare(f"{name}: all parts, of all that is in use", together, parts["used"], 64 * MIB)
            command = [sys.executable, "-c", NEIGHBOUR, "5"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
                assert neighbour.stdin is not None and neighbour.stdout is not None
                neighbour.stdout.readline()
                time.sleep(12)
                parts = now(to)
                compare("a neighbour of 5 GiB: other processes, beside a context as large", parts["others"], (5 << 30) + context, 256 * MIB)
                compare("a neighbour of 5 GiB: outside the allocator", parts["outside"], context + knows["beside"], 64 * MIB)
                neighbour.stdin.close()
            time.sleep(12)
            compare("the neighbour is gone: other processes", now(to)["others"], 0, 0)
            with subprocess.Popen([*command[:-1], "80"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as greedy:
                assert greedy.stdin is not None and greedy.stdout is not None
                greedy.stdout.readline()
                taken = time.monotonic()
                while (now(to)["others"] or 0) < 80 << 30 and time.monotonic() - taken < 15:
                    time.sleep(0.05)
                after = time.monotonic() - taken
                rows.append(("80 GiB at once are attributed after", f"{after:.1f} s", after < 3))
                greedy.stdin.close()
            rows.append(killed(job, to))
        finally:
            job.stdin.close()
            job.wait(60)
    width = max(len(what) for what, _, _ in rows)
    for what, value, is_right in rows:
        print(f"{what:<{width}}  {value:<26}  {'yes' if is_right else 'NO'}")
    if not all(is_right for _, _, is_right in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
