#!/usr/bin/env python3
"""What a change of one file compiles: the crates, their lines, and how long `cargo build` takes, in the profile of development.

    python3 benches/build/change.py

Builds first, so that nothing else is left to do, then adds a function to each file, builds, and takes it away again. The lines are
those of all Rust files of the crates that are compiled anew, tests included: rustc compiles of them what depends on the change.
"""

import pathlib
import re
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {"highwater-core": "core/src", "highwater-engine": "engine/src", "highwater-analysis": "analysis/src", "highwater": "src"}
CHANGES = [
    ("a detector", "core/src/detect/input_stall.rs"),
    ("the place where a sender runs", "engine/src/place/home.rs"),
    ("an importer", "analysis/src/formats.rs"),
    ("a metric", "src/metrics/gpu.rs"),
    ("a panel of the page", "src/web/page/panels.js"),
    ("the chart of the pages", "analysis/src/viewer/chart.js"),
]

ADDED = {".rs": b"\n#[doc(hidden)]\npub fn added(numbers: &[u64]) -> u64 {\n    numbers.iter().sum()\n}\n", ".js": b"\nconst added = 1;\n"}


def lines(folder):
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.rs"))


def build():
    """The crates of this project that were compiled, and the seconds that it took."""
    begin = time.monotonic()
    made = subprocess.run(["cargo", "build", "--locked"], cwd=ROOT, capture_output=True, text=True, check=True)
    return re.findall(r"Compiling (highwater[\w-]*) ", made.stderr), time.monotonic() - begin


def main():
    build()
    total = sum(lines(folder) for folder in SOURCES.values())
    print(f"All four crates have {total:,} lines.\n")
    print("| change | file | crates compiled | lines | seconds |")
    print("|---|---|---|---|---|")
    for what, name in CHANGES:
        path = ROOT / name
        before = path.read_bytes()
        build()
        try:
            path.write_bytes(before + ADDED[path.suffix])
            crates, seconds = build()
        finally:
            path.write_bytes(before)
        compiled = sum(lines(SOURCES[crate]) for crate in crates)
        print(f"| {what} | `{name}` | {', '.join(crates)} | {compiled:,} | {seconds:.0f} |", flush=True)
    build()


if __name__ == "__main__":
    main()
