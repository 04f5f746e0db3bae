"""Measures the daemon on real GPUs beside its peers, and prints a short table: see README.md.

    HIGHWATER=target/release/highwater python3 benches/gpu/bench.py --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/bench.py --gpus 2 --out results/

A part that fails reports its error, and the others still run. Results are written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import table
from parts import ON_REQUEST, PARTS
from rig import Rig
from table import PEERS

ONE_GPU = {"minutes": 21.0, "rounds": 40, "block_seconds": 2.0, "kills": 8}
SEVERAL_GPUS = {"minutes": 14.0, "rounds": 32, "block_seconds": 1.6, "kills": 4}
DRY_RUN = {
    "minutes": 3.0,
    "rounds": 4,
    "rounds_a_start": 2,
    "round_seconds": 1.0,
    "settle_seconds": 0.3,
    "pause_seconds": 0.2,
    "short_turns": 2,
    "others_seconds": 2.0,
    "capture_rounds": 2,
    "capture_seconds": 1.0,
    "capture_past_seconds": 2.0,
    "scraper_rounds": 2,
    "scraper_seconds": 1.0,
    "peaks_seconds": 5.0,
    "blocks": 3,
    "block_seconds": 1.0,
    "kills": 2,
    "startups": 3,
}
"""Settings for trying out the scripts. They measure nothing."""


class OutOfTime(Exception):
    """The run's time is over."""


def parse_options() -> argparse.Namespace:
    """The command line. Some defaults depend on the number of GPUs."""
    parser = argparse.ArgumentParser(description="Measures the daemon on real GPUs.")
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="GPUs of the training job")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-bench")), help="folder for the results")
    usual = ",".join(name for name in PARTS if name not in ON_REQUEST)
    named = f"which parts to run, with commas between: all but {', '.join(ON_REQUEST)}, which run only if they are named"
    add("--parts", default=usual, help=named)
    add("--skip", default="", help="which parts to leave out")
    add(
        "--peers",
        type=named_peers,
        default=",".join(PEERS),
        help="the pollers beside the daemon in the cost and harm parts, with commas between; with fewer, more rounds fit into the same time",
    )
    add("--minutes", type=float, help="stop after this long: 21, or 14 on several GPUs")
    add("--rounds", type=int, help="rounds of the costs and sampling parts: 40, or 32 on several GPUs")
    add("--rounds-a-start", type=int, default=4, help="rounds after which pollers are restarted")
    add("--round-seconds", type=float, default=1.0, help="measured seconds of each poller's turn in a round")
    add("--settle-seconds", type=float, default=1.5, help="seconds to settle after a poller has started")
    add("--pause-seconds", type=float, default=0.3, help="seconds to settle when a poller's turn begins")
    add("--short-turns", type=int, default=6, help="turns of each poller in a round of the sampling parts")
    add("--short-seconds", type=float, default=0.2, help="measured seconds of such a turn")
    add("--short-pause", type=float, default=0.05, help="seconds to settle when such a turn begins")
    add("--others-seconds", type=float, default=60.0, help="there, how long the daemon's other threads are measured")
    add("--energy-seconds", type=float, default=60.0, help="how long the daemon's energy is compared with the GPUs' counters")
    add("--peaks-seconds", type=float, default=35.0, help="seconds of training beside the raw log")
    add("--empty-cache", type=int, default=4, help="there, empty the allocator's cache every so many steps")
    add("--blocks", type=int, default=20, help="rounds of the harm part; each holds one block of each condition")
    add("--block-seconds", type=float, help="measured seconds of a block: 2, or 1.6 on several GPUs")
    add("--alloc-cycles", type=int, default=20, help="allocations after each step in the harm part")
    add("--kills", type=int, help="how often the daemon is killed: 8, or 4 on several GPUs")
    add("--capture-rounds", type=int, default=5, help="pairs of windows with and without captures")
    add("--capture-seconds", type=float, default=5.0, help="length of such a window")
    add("--capture-past-seconds", type=float, default=30.0, help="seconds to wait first, so that captures have a past")
    add("--scraper-rounds", type=int, default=8, help="pairs of windows with and without fifty scrapers")
    add("--scraper-seconds", type=float, default=4.0, help="length of such a window")
    add("--startups", type=int, default=10, help="how often the daemon is started without a GPU")
    add("--job-arguments", default="", help="more arguments for train.py, as one string")
    add("--dry-run", action="store_true", help="try the scripts without a GPU: simulated GPUs, a tiny job on the CPU")
    options = parser.parse_args()
    defaults = DRY_RUN if options.dry_run else SEVERAL_GPUS if options.gpus > 1 else ONE_GPU
    for name, value in defaults.items():
        if options.dry_run or getattr(options, name) is None:
            setattr(options, name, value)
    return options


def named_peers(text: str) -> list[str]:
    """The peers named, with commas between; none if it is empty."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return names


def run_part(name: str, rig: Rig, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one part, at most until the run's deadline. If it fails, its error takes the place of its result."""
    print(f"== {name}", flush=True)
    begin = time.monotonic()
    try:
        left = options.deadline - begin
        if left <= 1:
            raise OutOfTime("no time was left")
        signal.setitimer(signal.ITIMER_REAL, left)
        outcome = PARTS[name](rig, options, options.out)
    except Exception as error:  # Whatever fails in a part, the others still run.
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        rig.end_all()
    outcome["part_seconds"] = round(time.monotonic() - begin, 1)
    print(f"   {outcome['part_seconds']} s", flush=True)
    return outcome


def raise_out_of_time(*_: Any) -> None:
    """Handles the deadline's signal."""
    raise OutOfTime("the run's minutes are over")


def keep_logs(folder: Path, target: Path) -> None:
    """Writes the last lines of every process's log into one file."""
    with target.open("w") as out:
        for log in sorted(folder.glob("*.log")):
            out.write(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}\n")


def main() -> int:
    """Runs the parts asked for; 1 if one of them failed."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    options.deadline = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGALRM, raise_out_of_time)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    skipped = set(options.skip.split(","))
    wanted = [name for name in options.parts.split(",") if name not in skipped]
    unknown = set(wanted) - PARTS.keys()
    if unknown:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results: dict[str, Any] = {"command": shlex.join(sys.argv), "begin_unix": int(time.time())}
    folder = Path(tempfile.mkdtemp(prefix="highwater-bench-"))
    try:
        rig = Rig(folder, options.gpus, options.dry_run, shlex.split(options.job_arguments))
        for name in PARTS:
            if name in wanted:
                results[name] = run_part(name, rig, options)
                (options.out / "results.json").write_text(json.dumps(results, indent=1))
    finally:
        # Also if the run is ended from outside: what was measured until then is reported.
        keep_logs(folder, options.out / "bench.log")
        shutil.rmtree(folder, ignore_errors=True)
        printed = table.render(results)
        (options.out / "table.txt").write_text(printed + "\n")
        print(printed, flush=True)
    return 1 if any("error" in part for part in results.values() if isinstance(part, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
