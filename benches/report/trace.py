"""Reads a trace of PyTorch's profiler of a gigabyte with `highwater report`, beside HTA (Holistic Trace Analysis).

    HIGHWATER=target/release/highwater python3 benches/report/trace.py
    HIGHWATER=target/release/highwater python3 benches/report/trace.py --hta-python venv/bin/python
    HIGHWATER=target/release/highwater python3 benches/report/trace.py --gigabytes 0.05 --hta-python venv/bin/python

The trace is written here in Kineto's form: steps with operators of the host, launches, kernels on two streams, one of them NCCL's.
Times are whole microseconds, because HTA cuts off what is less, and no annotation is one of the profiler's steps, whose last HTA leaves out. `--hta-python` is an interpreter that has HolisticTraceAnalysis: it
computes how long the GPU was idle, computed and communicated, which is compared. Both take uncompressed JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
from bounded import measured  # noqa: E402

GB = 1_000_000_000
OPERATORS = 400
HTA = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="").get_temporal_breakdown(visualize=False)
print(json.dumps({name: float(found[name].iloc[0]) for name in ("idle_time(us)", "compute_time(us)", "non_compute_time(us)", "kernel_time(us)")}))
"""


def events_of(step: int) -> str:
    """The events of one step of 40 ms: each operator takes 100 us, its kernel 60 us; each tenth kernel is NCCL's, on a stream of its own."""
    base = 1_000_000 + step * 40_000
    marks = {"External id": step, "Ev Idx": step}
    all_ = [{"ph": "X", "cat": "user_annotation", "name": "train_step", "pid": 4242, "tid": 4242, "ts": base, "dur": 39_990, "args": marks}]
    for nth in range(OPERATORS):
        at, correlation = base + nth * 100 - nth % 3, step * OPERATORS + nth + 1
        is_nccl = nth % 10 == 9
        name = "nccl:all_reduce" if is_nccl else ("aten::mm", "aten::add_", "aten::addmm", "aten::native_layer_norm")[nth % 4]
        shapes = [[4096, 1024], [1024, 4096], []]
        args = {"External id": correlation, "Record function id": 0, "Concrete Inputs": ["", "", ""], "Input type": ["float", "float", ""],
                "Input Strides": [[1024, 1], [4096, 1], []], "Input Dims": shapes, "Ev Idx": correlation}
        all_.append({"ph": "X", "cat": "cpu_op", "name": name, "pid": 4242, "tid": 4242, "ts": at, "dur": 90, "args": args})
        args = {"External id": correlation, "cbid": 211, "correlation": correlation}
        all_.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, "tid": 4242, "ts": at + 20, "dur": 8, "args": args})
        kernel = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)" if is_nccl else \
            f"void at::native::vectorized_elementwise_kernel<4, at::native::Functor_{nth % 37}<float>, at::detail::Array<char*, 3> >(int)"
        stream = 20 if is_nccl else 7
        args = {"External id": correlation, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": correlation,
                "registers per thread": 32, "shared memory": 0, "blocks per SM": 12.5, "warps per SM": 50.0, "grid": [1024, 1, 1],
                "block": [128, 1, 1], "est. achieved occupancy %": 78}
        all_.append({"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": stream, "ts": at + 30, "dur": 90 if is_nccl else 60, "args": args})
        all_.append({"ph": "s", "id": correlation, "pid": 4242, "tid": 4242, "ts": at + 20, "cat": "ac2g", "name": "ac2g"})
        all_.append({"ph": "f", "id": correlation, "pid": 0, "tid": stream, "ts": at + 30, "cat": "ac2g", "name": "ac2g", "bp": "e"})
    return ",\n".join(map(json.dumps, all_))


def write(path: Path, size: int) -> int:
    """Writes a trace of about so many bytes; returns how many steps it has."""
    steps, written = 0, 0
    with path.open("w", buffering=1 << 20) as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320}],\n')
        file.write('"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},\n"traceEvents": [\n')
        while written < size:
            text = (",\n" if steps else "") + events_of(steps)
            file.write(text)
            written, steps = written + len(text), steps + 1
        file.write('],\n"traceName": "trace.json"}\n')
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description="Reads a large trace of PyTorch's profiler beside HTA.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--hta-python", type=Path, help="an interpreter that has HolisticTraceAnalysis")
    arguments = parser.parse_args()
    binary = os.environ["HIGHWATER"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        steps = write(path, int(arguments.gigabytes * GB))
        readers = {"highwater": [binary, "report", str(path), "--json"]}
        if arguments.hta_python is not None:
            readers["HTA"] = [str(arguments.hta_python), "-c", HTA, str(path)]
        print(f"{path.stat().st_size / GB:.2f} GB, {steps} steps, {steps * OPERATORS:,} kernels")
        print(f"{'reader':12}{'seconds':>9}{'MiB':>8}  idle, computing and other time (ms)")
        for name, command in readers.items():
            seconds, resident, printed = measured(command)
            print(f"{name:12}{seconds:>9.1f}{resident:>8.0f}  {printed if printed.startswith('failed') else said(name, json.loads(printed))}", flush=True)
    return 0


def said(name: str, answer: dict) -> str:
    """How long the GPU was idle, computed, and did something else than computing, as each says it, milliseconds."""
    if name == "HTA":
        return ", ".join(f"{answer[key] / 1e3:.3f}" for key in ("idle_time(us)", "compute_time(us)", "non_compute_time(us)"))
    (whole,) = answer["recordings"][0]["trace"]["steps"]
    times = whole["idle_ns"], whole["compute_ns"], whole["window_ns"] - whole["idle_ns"] - whole["compute_ns"]
    return ", ".join(f"{each / 1e6:.3f}" for each in times)


if __name__ == "__main__":
    sys.exit(main())
