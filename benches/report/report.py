#!/usr/bin/env python3
"""Measures `highwater report` on large recordings: time, memory, the page's size, and how long it takes to open.

    cargo build --release
    HIGHWATER=target/release/highwater python3 benches/report/report.py [--chromium chromium]

The recordings are made here, in the schema that `highwater record` writes: eight GPUs sampled at 1 kHz, each with a
rank that trains in steps of 250 ms. In `training`, memory changes 40 times in a step; in `restless`, with every reading.
Exits with 1 if a bound is exceeded.
"""

import argparse
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests"))
from chromium import Browser  # noqa: E402

GPUS = 8
MILLISECOND = 1_000_000
STEP_MS = 250
GIB = 1 << 30
PHASES = [("data", 0, 5), ("forward", 5, 90), ("backward", 90, 220), ("optimizer", 220, 248)]
BEGIN = 1_800_000_000_000_000_000


def template(highwater, path):
    """A recording of the simulator, emptied: its tables are the product's own."""
    command = [highwater, "record", "-o", path, "--source", "sim:spike", "--for", "200ms"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    file = sqlite3.connect(path)
    file.execute("PRAGMA journal_mode = OFF")
    file.execute("PRAGMA synchronous = OFF")
    tables = "gpus ticks turns samples usage annotations phases phase_memory ranks findings triggers".split()
    for table in tables:
        file.execute(f"DELETE FROM {table}")
    return file


def make(highwater, path, seconds, restless):
    file = template(highwater, path)
    end = BEGIN + seconds * 1000 * MILLISECOND
    for key, value in (("begin_ns", BEGIN), ("end_ns", end)):
        file.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))
    ticks = ((BEGIN + ms * MILLISECOND, BEGIN + ms * MILLISECOND + 90_000) for ms in range(seconds * 1000))
    file.executemany("INSERT INTO ticks VALUES (?, ?, 0)", ticks)
    for gpu in range(GPUS):
        row = (gpu, str(gpu), f"GPU-{gpu}", "NVIDIA H200", 150 * GIB, GIB // 2, end)
        file.execute("INSERT INTO gpus (gpu, gpu_index, uuid, name, memory_total_bytes, memory_reserved_bytes, "
                     "known_until_ns) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        samples = every_reading(gpu, seconds) if restless else training(gpu, seconds)
        file.executemany("INSERT INTO samples VALUES (?, ?, 0, ?)", samples)
        phases(file, gpu, seconds)
    file.commit()
    file.close()


def training(gpu, seconds):
    """20 rises in the forward phase, 20 falls in the backward phase, of sizes that differ from step to step."""
    chance = random.Random(gpu)
    for step in range(seconds * 1000 // STEP_MS):
        at, high = step * STEP_MS, chance.randrange(40, 140)
        for nth in range(20):
            yield gpu, BEGIN + (at + 5 + 4 * nth) * MILLISECOND, 20 * GIB + high * GIB * (nth + 1) // 20 // 2 // 2097152 * 2097152
        for nth in range(20):
            yield gpu, BEGIN + (at + 90 + 6 * nth) * MILLISECOND, 20 * GIB + high * GIB * (19 - nth) // 20 // 2 // 2097152 * 2097152


def every_reading(gpu, seconds):
    chance = random.Random(gpu)
    for ms in range(seconds * 1000):
        yield gpu, BEGIN + ms * MILLISECOND + chance.randrange(900) * 1000, chance.randrange(10_000, 70_000) * 2097152


def phases(file, gpu, seconds):
    file.execute("INSERT INTO ranks (job, rank, world_size, pid, gpus) VALUES ('train', ?, ?, 1, ?)", (gpu, GPUS, f'["GPU-{gpu}"]'))
    number = gpu * 10_000_000
    rows, memory = [], []
    for step in range(seconds * 1000 // STEP_MS):
        at = BEGIN + step * STEP_MS * MILLISECOND
        for kind, name, begin, end in [("step", "step", 0, STEP_MS), *(("phase", *phase) for phase in PHASES)]:
            number += 1
            rows.append((number, gpu, kind, name, step, at + begin * MILLISECOND, at + end * MILLISECOND))
            memory.append((number, gpu, 90 * GIB, 0))
    file.executemany("INSERT INTO phases VALUES (?, 'train', ?, ?, ?, ?, ?, ?)", rows)
    file.executemany("INSERT INTO phase_memory (phase, gpu, peak_bytes, gap_ns) VALUES (?, ?, ?, ?)", memory)


def measured(command):
    """Seconds and peak resident MiB of a command."""
    began = time.monotonic()
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=[
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)])
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, command
    return time.monotonic() - began, usage.ru_maxrss / 1024


def opened_ms(page, path):
    """Milliseconds from asking for a page until its chart is painted and all its tables are there."""
    page.call("Page.navigate", {"url": f"file://{os.path.abspath(path)}"})
    return int(page.wait("document.documentElement?.dataset.readyAfterMs"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="chromium")
    options = parser.parse_args()
    highwater = os.environ.get("HIGHWATER", "target/release/highwater")
    failed = False
    print(f"{'recording':>22} {'file':>9} {'report':>8} {'resident':>9} {'page':>9} {'opens in':>9}")
    # Recording, its seconds, restless, and the bounds: seconds, MiB, bytes of the page, milliseconds to open.
    cases = [("ddp 78 s", None, False, 1, None, None, None),
             ("training 8 x 10 min", 600, False, 5, 300, 2_000_000, 1000),
             ("restless 8 x 10 min", 600, True, 5, 300, 2_000_000, 1000),
             ("training 8 x 1 h", 3600, False, 5, 300, 2_000_000, 1000)]
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds, restless, most_s, most_mib, most_bytes, most_ms in cases:
            path = "tests/data/h200-ddp"
            if seconds is not None:
                path = os.path.join(folder, "it.sqlite")
                make(highwater, path, seconds, restless)
            page = os.path.join(folder, "page.html")
            runs = [measured([highwater, "report", path, "-o", page]) for _ in range(3)]
            took, mib = min(run[0] for run in runs), max(run[1] for run in runs)
            size = os.path.getsize(page)
            browser = Browser(options.chromium)
            shown = browser.page()
            # The second time, the browser has what it needs in memory, as in use.
            best = min(opened_ms(shown, page) for _ in range(3))
            browser.close()
            stored = sum(os.path.getsize(os.path.join(path, one)) for one in os.listdir(path)) if os.path.isdir(path) else os.path.getsize(path)
            print(f"{name:>22} {stored / 1e6:>6.0f} MB {took:>6.2f} s {mib:>5.0f} MiB {size / 1e6:>6.2f} MB {best:>6} ms", flush=True)
            bounds = [(took, most_s), (mib, most_mib), (size, most_bytes), (best, most_ms)]
            failed |= any(bound is not None and value > bound for value, bound in bounds)
            if seconds is not None:
                os.remove(path)
    sys.exit(failed)


if __name__ == "__main__":
    main()
