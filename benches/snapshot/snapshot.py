"""Reads a PyTorch memory snapshot of some gigabytes with `highwater report`, beside PyTorch's memory_viz and Python's pickle.

    HIGHWATER=target/release/highwater python3 benches/snapshot/snapshot.py
    HIGHWATER=target/release/highwater python3 benches/snapshot/snapshot.py --memory-viz torch/cuda/_memory_viz.py
    HIGHWATER=target/release/highwater python3 benches/snapshot/snapshot.py --gigabytes 0.3 --python-gigabytes 0.1

The snapshot is written here as Python's pickle writes one: entries whose stacks refer to 5,000 frames, in lists of their own.
Python needs three times the file's size of memory, so it reads a smaller one, and seconds a gigabyte are compared. `--memory-viz` is the
file of an installed PyTorch: its `trace_plot` makes a page, whose browser then has the work; highwater's page is finished. It also
gets the large file, with as much of this machine's memory as bounded.py leaves it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import struct
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
from bounded import measured  # noqa: E402

GB = 1_000_000_000
READ = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"


class Writer:
    """Opcodes of protocol 4, with the numbers of what is remembered."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: dict[str, int] = {}

    def remember(self, opcodes: bytes) -> bytes:
        self.count += 1
        return opcodes + b"\x94"

    def get(self, number: int) -> bytes:
        return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def text(self, text: str) -> bytes:
        if text in self.texts:
            return self.get(self.texts[text])
        self.texts[text] = self.count
        return self.remember(b"\x8c" + bytes([len(text.encode())]) + text.encode())

    def number(self, number: int) -> bytes:
        if number < 256:
            return b"K" + bytes([number])
        if number < 65536:
            return b"M" + struct.pack("<H", number)
        if number < 1 << 31:
            return b"J" + struct.pack("<i", number)
        length = (number.bit_length() + 8) // 8
        return b"\x8a" + bytes([length]) + number.to_bytes(length, "little")


def write(path: Path, size: int) -> int:
    """Writes a snapshot of about so many bytes; returns how many entries it has."""
    random.seed(1)
    to = Writer()
    head = b"\x80\x04" + to.remember(b"}") + b"(" + to.text("external_annotations") + to.remember(b"]") + b"("
    frames = []
    for number in range(5000):
        frames.append(to.count)
        head += to.remember(b"}") + b"(" + to.text("name") + to.text(f"function_{number % 700}") + to.text("filename")
        head += to.text(f"/app/model_{number % 90}.py") + to.text("line") + to.number(number) + b"u"
    head += b"e" + to.text("segments") + to.remember(b"]") + b"(" + to.remember(b"}") + b"(" + to.text("device") + to.number(0)
    head += to.text("address") + to.number(1 << 46) + to.text("total_size") + to.number(1 << 34) + to.text("blocks")
    head += to.remember(b"]") + b"ue" + to.text("device_traces") + to.remember(b"]") + b"(" + to.remember(b"]")
    for text in ("action", "alloc", "free_completed", "addr", "size", "stream", "time_us", "frames", "compile_context", "N/A"):
        head += to.text(text) + b"0"
    stacks = [b"".join(to.get(random.choice(frames)) for _ in range(40)) for _ in range(2000)]

    def entry(action: str, address: int, bytes_: int, at_us: int) -> bytes:
        members = [("action", to.text(action)), ("addr", to.number(address)), ("size", to.number(bytes_)), ("stream", to.number(0))]
        members += [("time_us", to.number(at_us)), ("compile_context", to.text("N/A"))]
        known = b"".join(to.text(name) + value for name, value in members)
        return to.remember(b"}") + b"(" + known + to.text("frames") + to.remember(b"]") + b"(" + random.choice(stacks) + b"eu"

    base, at_us = (1 << 46) + 8192, 1_795_207_208_182_423
    events = [("alloc", number) for number in range(500)] + [("free_completed", number) for number in range(500)]
    # Numbers of what is remembered are implicit in this protocol, so the same thousand entries can come again and again.
    block = b"(" + b"".join(entry(action, base + 4096 * number, 2048 + number, at_us + number) for action, number in events) + b"e"
    written, blocks = len(head), 0
    with path.open("wb", buffering=1 << 20) as file:
        file.write(head)
        while written < size:
            file.write(block)
            written, blocks = written + len(block), blocks + 1
        file.write(b"eu.")
    return blocks * len(events)


def main() -> int:
    parser = argparse.ArgumentParser(description="Reads a large memory snapshot beside Python's pickle.")
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--python-gigabytes", type=float, default=0.5)
    parser.add_argument("--memory-viz", type=Path, help="torch/cuda/_memory_viz.py")
    arguments = parser.parse_args()
    binary = os.environ["HIGHWATER"]
    print(f"{'reader':20}{'GB':>6}{'entries':>12}{'seconds':>9}{'s/GB':>7}{'MiB':>8}")
    with tempfile.TemporaryDirectory() as folder:
        path, page = Path(folder) / "snapshot.pickle", Path(folder) / "page.html"
        own = {"highwater --json": [binary, "report", str(path), "--json"], "highwater -o": [binary, "report", str(path), "--json", "-o", str(page)]}
        peers = {"pickle.load": [sys.executable, "-c", READ, str(path)]}
        viz = {} if arguments.memory_viz is None else {
            "memory_viz": [sys.executable, str(arguments.memory_viz), "trace_plot", str(path), "-o", str(page)]
        }
        for gigabytes, readers in ((arguments.gigabytes, own | viz), (arguments.python_gigabytes, own | peers | viz)):
            entries = write(path, int(gigabytes * GB))
            for name, command in readers.items():
                seconds, resident, printed = measured(command)
                what = printed if printed.startswith("failed") else f"page of {page.stat().st_size / 1e6:.1f} MB" if str(page) in command else ""
                print(f"{name:20}{gigabytes:>6.1f}{entries:>12,}{seconds:>9.1f}{seconds / gigabytes:>7.2f}{resident:>8.0f}  {what}", flush=True)
                if name in own:
                    allocator = json.loads(printed)["recordings"][0]["gpus"][0]["allocator"]
                    assert (allocator["events"], allocator["peak"]["after_events"]) == (entries, 500), allocator["peak"]
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
