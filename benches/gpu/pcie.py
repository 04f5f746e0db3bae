"""Compares the daemon's PCIe counters with the bytes that were copied.

Copies between pinned host memory and one GPU, each way, in several sizes and for some seconds each, and reads
`highwater_gpu_pcie_{received,transmitted}_bytes_total` before and after. For each it prints the bytes that were copied,
the bytes that the daemon counted in that direction and their ratio, and what it counted in the other direction. One
idle stretch is measured too. With GPM, a copy may end in a window after its own, so the counters are read only after
several turns of the slow lane. Needs PyTorch for CUDA. Other work on the GPU is counted as well.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
from rig import find_highwater

MIB = 1 << 20
IN_FLIGHT_BYTES = 512 * MIB
"""Copied between two synchronizations, so that small copies are queued instead of waited for one by one."""
METRICS = {way: f"highwater_gpu_pcie_{way}_bytes_total" for way in ("received", "transmitted")}
COUNTED_BY = {"host to device": "received", "device to host": "transmitted"}
"""The counter of each direction, in the GPU's view."""


@dataclass(frozen=True)
class Row:
    """One stretch of copying, bytes and seconds."""

    direction: str
    size: int
    seconds: float
    copied: int
    reported: float
    reported_other_way: float

    @property
    def ratio(self) -> float | None:
        """Counted over copied; None if nothing was copied."""
        return self.reported / self.copied if self.copied else None


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", type=int, default=0, help="PyTorch's number of the GPU")
    add("--seconds", type=float, default=5.0, help="how long each size is copied in each direction")
    add("--sizes-mib", default="1,16,256,1024", help="sizes of one copy, MiB, with commas between")
    add("--settle-seconds", type=float, default=3.5, help="seconds to wait before the counters are read")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-bench")), help="folder for pcie.json and the log")
    return parser.parse_args()


def gpu_labels(torch: Any, device: int) -> dict[str, str]:
    """The labels of PyTorch's device in the daemon's metrics; empty if this PyTorch does not report the UUID."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return {} if uuid is None else {"uuid": f"GPU-{str(uuid).removeprefix('GPU-')}"}


def counters(daemon: measure.Daemon, labels: dict[str, str]) -> dict[str, float]:
    """Both counters of the GPU; empty unless the daemon exports both. Without labels there must be one GPU."""
    metrics = daemon.metrics()
    gpus = {found.get("uuid") for name, found, _ in metrics if name in METRICS.values()}
    if not labels and len(gpus) > 1:
        raise SystemExit("this PyTorch does not report a GPU's UUID: let the daemon see one GPU only")
    found = {way: measure.total(metrics, name, **labels) for way, name in METRICS.items()}
    return {way: value for way, value in found.items() if value is not None} if None not in found.values() else {}


def wait_counters(daemon: measure.Daemon, labels: dict[str, str], timeout_s: float = 15.0) -> dict[str, float]:
    """The counters, once they are exported. GPM needs two turns of the slow lane for its first rate."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        reported = counters(daemon, labels)
        if reported:
            return reported
        time.sleep(0.2)
    raise SystemExit("the daemon exports no PCIe bytes of this GPU: no wide counters, and no GPM (highwater probe)")


def source_of(daemon: measure.Daemon) -> str:
    """Whether the metric comes from GPM or from NVML's counters, judging by the calls that the daemon makes."""
    asked = measure.total(daemon.metrics(), "highwater_nvml_call_duration_seconds_count", call="gpm")
    return "GPM" if asked else "NVML's 64-bit counters"


def copier(torch: Any, device: int, direction: str, size: int, seconds: float) -> Callable[[], int]:
    """Allocates now. The function that it returns copies for `seconds` and returns the bytes."""
    host = torch.ones(size, dtype=torch.uint8).pin_memory()
    there = torch.ones(size, dtype=torch.uint8, device=f"cuda:{device}")
    target, origin = (there, host) if COUNTED_BY[direction] == "received" else (host, there)
    batch = max(1, IN_FLIGHT_BYTES // size)
    torch.cuda.synchronize(device)

    def copy() -> int:
        copies, deadline = 0, time.monotonic() + seconds
        while time.monotonic() < deadline:
            for _ in range(batch):
                target.copy_(origin, non_blocking=True)
            torch.cuda.synchronize(device)
            copies += batch
        return copies * size

    return copy


def idle(seconds: float) -> int:
    """Copies nothing."""
    time.sleep(seconds)
    return 0


def stretch(
    daemon: measure.Daemon,
    labels: dict[str, str],
    direction: str,
    size: int,
    copy: Callable[[], int],
    settle_s: float,
) -> Row:
    """The counters' growth over one stretch of copying, with the turns after it."""
    time.sleep(settle_s)
    before = wait_counters(daemon, labels)
    begin = time.monotonic()
    copied = copy()
    seconds = time.monotonic() - begin
    time.sleep(settle_s)
    after = wait_counters(daemon, labels)
    grown = {way: after[way] - before[way] for way in METRICS}
    own = COUNTED_BY.get(direction, "received")
    other = next(way for way in METRICS if way != own)
    return Row(direction, size, seconds, copied, grown[own], grown[other])


HEAD = f"{'direction':<15} {'copy':>9} {'seconds':>8} {'copied':>16} {'seen':>16} {'ratio':>7} {'other way':>14} {'GB/s':>6}"


def line(row: Row) -> str:
    """One row of the table."""
    size = f"{row.size // MIB} MiB" if row.size else "-"
    ratio = "-" if row.ratio is None else f"{row.ratio:.4f}"
    return (
        f"{row.direction:<15} {size:>9} {row.seconds:>8.2f} {row.copied:>16,} {row.reported:>16,.0f} {ratio:>7}"
        f" {row.reported_other_way:>14,.0f} {row.copied / row.seconds / 1e9:>6.1f}"
    )


def main() -> None:
    """Measures every direction and size, prints the table as it grows, and writes `pcie.json`."""
    options = parse_options()
    import torch  # late, so that --help needs no PyTorch

    options.out.mkdir(parents=True, exist_ok=True)
    torch.cuda.init()
    labels = gpu_labels(torch, options.device)
    daemon = measure.Daemon(find_highwater(), options.out, "pcie-daemon")
    daemon.wait_sampling()
    wait_counters(daemon, labels)
    print(f"{torch.cuda.get_device_name(options.device)}, PCIe bytes by {source_of(daemon)}\n{HEAD}", flush=True)

    rows = [stretch(daemon, labels, "idle", 0, lambda: idle(options.seconds), options.settle_seconds)]
    print(line(rows[0]), flush=True)
    for direction in COUNTED_BY:
        for size in (int(float(mib) * MIB) for mib in options.sizes_mib.split(",")):
            copy = copier(torch, options.device, direction, size, options.seconds)
            rows.append(stretch(daemon, labels, direction, size, copy, options.settle_seconds))
            print(line(rows[-1]), flush=True)
    report = {"source": source_of(daemon), "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}
    (options.out / "pcie.json").write_text(json.dumps(report, indent=1) + "\n")
    daemon.stop()


if __name__ == "__main__":
    main()
