"""What `highwater advise` says of the largest batch, beside what runs, for the ten jobs of `zoo.py`.

The allocator of each process may reserve `--limit` and no more. Each try is a process of its own, as a user's next run is.

- history: each job runs three steps with two batch sizes, under `highwater.torch.watch(history_dir=…)`. From these two files
  `highwater advise` says which batch is the largest, with the allocator as it is and with expandable segments. Tried is that
  batch, one sample more, and the smallest that is more than 5 % larger.
- line: four growing batches in one process under `highwater run`. Tried is the batch that `highwater advise` says.

    HIGHWATER=target/release/highwater python3 benches/gpu/batch.py --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/batch.py --dry-run --out /tmp/results

Takes about ten minutes, with three processes at a time on one GPU of 139 GiB. Prints a table and writes batch.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
STEPS = 5
# The advised batch is to be within this share of the largest that runs.
NEAR = 0.05
EXPANDABLE = "expandable_segments:True"
PARTS = ["history", "line"]


def libraries() -> tuple[Any, Any]:
    # Children of this process use CUDA, which must not be used before a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    sys.path[:0] = [str(ROOT / "python"), str(HERE.parent)]
    import torch

    import zoo

    return torch, zoo


# In processes of their own.


def train(name: str, is_small: bool) -> None:
    """Some steps with each batch size, in this process."""
    torch, zoo = libraries()
    import highwater.torch

    job = zoo.jobs(is_small)[name]
    if is_small:
        # On a CPU nothing says which GPU it is.
        highwater.configure(gpu=0)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    with highwater.torch.watch(model, optimizer):
        for size in job.sizes:
            for _ in range(STEPS):
                job.step(model, optimizer, job.of(size))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    highwater.flush(5)


def first_steps(name: str, size: int, folder: str) -> None:
    """Three steps, whose allocations are written."""
    _, zoo = libraries()
    import highwater.torch

    job = zoo.jobs()[name]
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    with highwater.torch.watch(model, optimizer, history_dir=folder, layers_every=0, comm=False):
        for _ in range(3):
            job.step(model, optimizer, job.of(size))


def runs(name: str, size: int, limit: int, settings: str, answer: Any) -> None:
    """Says whether four steps run if the allocator may reserve this many bytes."""
    torch, zoo = libraries()
    if settings:
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        change(settings)
    job = zoo.jobs()[name]
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        for _ in range(4):
            job.step(model, optimizer, job.of(size))
        torch.cuda.synchronize()
        answer.send([True, torch.cuda.max_memory_reserved()])
    except torch.cuda.OutOfMemoryError:
        answer.send([False, torch.cuda.max_memory_reserved()])


def forked(function: Any, *arguments: Any) -> None:
    """Runs a function in a child of this process, which has imported PyTorch and does not use CUDA."""
    child = multiprocessing.get_context("fork").Process(target=alone, args=(function, *arguments))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"{function.__name__}{arguments[:2]} ended with {child.exitcode}")


def alone(function: Any, *arguments: Any) -> None:
    """Ends without Python's own end, which fails in a child that a thread has forked."""
    status = 0
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def tried(name: str, size: int, limit: int, settings: str = "") -> dict[str, Any]:
    answer, end = multiprocessing.get_context("fork").Pipe(False)
    forked(runs, name, size, limit, settings, end)
    fits, reserved = answer.recv() if answer.poll() else (None, None)
    return {"batch": size, "runs": fits, "reserved_peak_bytes": reserved}


# Here.


def advice_of(binary: str, files: list[Path], headroom: int) -> dict[str, Any]:
    each = [part for file in files for part in ("--batches", str(file))]
    done = subprocess.run([binary, "advise", "--json", *each, "--headroom", f"{headroom}B"], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {"problem": done.stderr.strip()}


def by_history(binary: str, out: Path, name: str, limit: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """What the histories say, and what runs."""
    _, zoo = libraries()
    folder = out / f"history-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = zoo.jobs()[name].sizes
    for each in [pool.submit(forked, first_steps, name, size, str(folder)) for size in (sizes[1], sizes[3])]:
        each.result()
    files = sorted(folder.glob("*.json.gz"))
    whole = advice_of(binary, files, 0)
    if "problem" in whole:
        return whole
    advice = advice_of(binary, files, whole["limit_bytes"] - limit)
    tries: dict[str, list[Future[dict[str, Any]]]] = {}
    for how, of, settings in (("as run", advice, ""), ("expandable", advice["with_expandable_segments"], EXPANDABLE)):
        largest = (of or {}).get("largest_batch_size")
        points = {largest, largest + 1, int(largest / (1 - NEAR)) + 1} if largest else set()
        tries[how] = [pool.submit(tried, name, point, limit, settings) for point in sorted(points)]
    return {"advice": advice, "tries": {how: [each.result() for each in of] for how, of in tries.items()}}


def by_line(binary: str, out: Path, name: str, limit: int, is_small: bool) -> dict[str, Any]:
    """What the line through the peaks of a recording says, and whether that runs."""
    path = out / f"{name}.sqlite"
    path.unlink(missing_ok=True)
    again = [sys.executable, str(HERE), "--train", name] + ["--dry-run"] * is_small
    source = ["--source", "sim:spike"] if is_small else []
    done = subprocess.run([binary, "run", "-o", str(path), *source, "--", *again], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    whole = advice_of(binary, [path], 0)
    if is_small or "problem" in whole or whole["outside_bytes"] is None:
        path.unlink()
        return {"advice": whole, "tries": {}}
    report = subprocess.run([binary, "report", str(path), "--json"], check=True, capture_output=True, text=True)
    gpu = next(gpu for gpu in json.loads(report.stdout)["recordings"][0]["gpus"] if gpu["peak_bytes"])
    # The headroom is what leaves the allocator as much as the limit.
    advice = advice_of(binary, [path], gpu["usable_bytes"] - whole["outside_bytes"] - limit)
    path.unlink()
    largest = advice.get("largest_batch_size")
    return {"advice": advice, "tries": {"as run": [tried(name, largest, limit)] if largest else []}}


def show(name: str, part: str, row: dict[str, Any]) -> None:
    of = row.get("advice", row)
    if "problem" in of:
        print(f"{name:20}{part:10}{of['problem']}", flush=True)
        return
    text = ""
    for how, tries in row["tries"].items():
        marks = ", ".join(f"{each['batch']} {'runs' if each['runs'] else 'does not'}" for each in tries)
        text += f"  {how}: {marks};"
    points = of.get("histories") or of["points"]
    sizes = ", ".join(str(point["batch_size"]) for point in points)
    print(f"{name:20}{part:10}from {sizes:16} advised {of['largest_batch_size']}{text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares what advise says of a batch size with what runs.")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", default="", help="names of jobs, joined by commas")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is run (everything)")
    parser.add_argument("--limit", type=float, default=40, help="what the allocator may reserve, GiB")
    parser.add_argument("--at-a-time", type=int, default=3, help="processes on the GPU")
    parser.add_argument("--dry-run", action="store_true", help="the line alone, small, on the CPU, with a simulated GPU")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    limit, is_small = int(arguments.limit * 2**30), arguments.dry_run
    if arguments.train:
        train(arguments.train, is_small)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    binary, rows = os.environ["HIGHWATER"], []
    _, zoo = libraries()
    wanted = set(arguments.only.split(",")) - {""}
    names = [name for name in zoo.jobs(is_small) if not wanted or name in wanted]
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        for name in names:
            for part in PARTS[is_small:]:
                if part not in arguments.parts:
                    continue
                if part == "history":
                    row = by_history(binary, arguments.out, name, limit, pool)
                else:
                    row = by_line(binary, arguments.out, name, limit, is_small)
                show(name, part, row)
                rows.append({"job": name, "part": part, **row})
                (arguments.out / "batch.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
