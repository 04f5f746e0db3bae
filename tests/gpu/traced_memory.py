#!/usr/bin/env python3
"""Whether the memory that `report` reads from a trace of PyTorch's profiler is what PyTorch says of itself.

A small transformer trains with `profile_memory=True`; in each step PyTorch's own peaks (`max_memory_allocated`,
`max_memory_reserved`) are reset and read. `highwater report --json` of the exported trace must have the same bytes for each step.

    HIGHWATER=target/release/highwater python3 tests/gpu/traced_memory.py [--trace FILE]

It needs PyTorch with CUDA, changes no setting of the GPU, prints a table, and fails if a row differs. With `--trace`, the trace is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch

STEPS = 4
GPU = torch.device("cuda", 0)


def model() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).to(GPU)


def trained(trace: Path) -> list[tuple[int, int]]:
    """Trains, writes the trace, and returns the most allocated and reserved bytes of each step."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    peaks = []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    # Without a schedule PyTorch marks no steps. Steps are numbered from 0.
    schedule = torch.profiler.schedule(wait=0, warmup=0, active=STEPS + 1)
    with torch.profiler.profile(activities=activities, profile_memory=True, schedule=schedule) as profiler:
        for step in range(STEPS):
            torch.cuda.reset_peak_memory_stats(GPU)
            # The batch differs, so that steps have different peaks.
            batch = torch.randn(8 * (step + 1), 64, 256, device=GPU)
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del batch
            torch.cuda.synchronize()
            peaks.append((torch.cuda.max_memory_allocated(GPU), torch.cuda.max_memory_reserved(GPU)))
            if step == 1:
                torch.cuda.empty_cache()
            profiler.step()
    profiler.export_chrome_trace(str(trace))
    return peaks


def reported(trace: Path) -> tuple[dict[int, tuple[int, int]], int]:
    """What `report` says of each step, and of the whole trace."""
    highwater = os.environ.get("HIGHWATER", "target/release/highwater")
    answer = subprocess.run([highwater, "report", "--json", str(trace)], capture_output=True, text=True, check=True)
    recording = json.loads(answer.stdout)["recordings"][0]
    steps = {
        step["step"]: (step["allocated_peak_bytes"], step["reserved_peak_bytes"]) for step in recording["trace"]["steps"]
    }
    return steps, recording["gpus"][0]["peak_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="where the trace is kept")
    with tempfile.TemporaryDirectory() as folder:
        trace = parser.parse_args().trace or Path(folder) / "trace.json.gz"
        peaks = trained(trace)
        steps, highest = reported(trace)
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name(GPU)}")
    print(f"{'step':>4} {'allocated':>12} {'reported':>12} {'reserved':>12} {'reported':>12}")
    wrong = highest != max(allocated for allocated, _ in peaks)
    for number, (allocated, reserved) in enumerate(peaks):
        of = steps.get(number, (None, None))
        wrong |= of != (allocated, reserved)
        print(f"{number:>4} {allocated:>12} {of[0]!s:>12} {reserved:>12} {of[1]!s:>12}")
    print(f"highest {highest}: {'DIFFERS' if wrong else 'equal'}")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
