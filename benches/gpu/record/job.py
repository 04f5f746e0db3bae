"""One rank of a recorded job, started by `record.py`.

It imports PyTorch at once. Before it touches a GPU it waits for its gate, a file that contains the port to meet the
other ranks on. So the next job can get ready while one is being recorded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Trains as `design.json` in the folder says."""
    parser = argparse.ArgumentParser(description="One rank of a recorded job.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gate", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    parent = os.getppid()
    end_with_parent()
    sys.path.insert(1, str(HERE.parent))
    from scenarios import from_document

    scenario = from_document(json.loads((options.folder / "design.json").read_text())["scenario"])
    prepare_environment(options.rank, scenario.gpus, scenario.allocator)
    from training import Training

    print(f"rank {options.rank}: ready", flush=True)
    os.environ["MASTER_PORT"] = wait_for_gate(options.gate, parent)
    training = Training(scenario, options.folder, options.rank, options.device == "cuda")
    training.run()
    training.end()
    return 0


def prepare_environment(rank: int, ranks: int, allocator: str) -> None:
    """Sets the variables that PyTorch and NCCL read when they are imported."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # As NVML counts, so that rank r runs on its GPU r.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(name, None)
    if allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator


def wait_for_gate(gate: Path, parent: int) -> str:
    """The content of the gate's file, once it exists."""
    while not gate.exists():
        if os.getppid() != parent:
            raise SystemExit("the recorder is gone")
        time.sleep(0.02)
    return gate.read_text()


def end_with_parent() -> None:
    """Makes the kernel end this process when the recorder dies, if the kernel can."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


if __name__ == "__main__":
    sys.exit(main())
