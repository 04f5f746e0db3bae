"""What `highwater advise --batches` says of the largest batch, beside the largest that fits, for the ten jobs of `zoo.py`.

Trains each job under `highwater.torch.watch` and `highwater run`, with four growing batches in one process. `highwater advise
--batches` then says which batch fits into `--limit` of memory. A second process may reserve as much and no more: it tries the
advised batch, and looks for the largest that runs; a third does so with expandable segments.

    HIGHWATER=target/release/highwater python3 benches/gpu/batch.py --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/batch.py --dry-run --out /tmp/results

Takes about ten minutes. Prints a table and writes batch.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
STEPS = 5
# The largest batch is found within this share.
NEAR = 0.01
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def libraries() -> tuple[Any, Any]:
    sys.path[:0] = [str(ROOT / "python"), str(HERE.parent)]
    import torch

    import zoo

    return torch, zoo


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


def largest(name: str, advised: int, limit: int) -> None:
    """Prints whether the advised batch runs, and the largest that does, if the allocator may reserve this many bytes."""
    torch, zoo = libraries()
    job = zoo.jobs()[name]
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)

    def runs(size: int) -> bool:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            model = job.model()
            optimizer = job.optimizer(model.parameters())
            for _ in range(3):
                job.step(model, optimizer, job.of(size))
            torch.cuda.synchronize()
            return True
        except torch.cuda.OutOfMemoryError:
            return False

    fits = runs(advised)
    low, high = (advised, int(advised * 1.15) + 1) if fits else (0, advised)
    while fits and runs(high):
        low, high = high, int(high * 1.15) + 1
    while high - low > max(1, int(high * NEAR)):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    print(json.dumps({"fits": fits, "largest": low}))


def recorded(binary: str, out: Path, name: str, is_small: bool) -> Path:
    path = out / f"{name}.sqlite"
    path.unlink(missing_ok=True)
    again = [sys.executable, str(HERE), "--train", name] + ["--dry-run"] * is_small
    source = ["--source", "sim:spike"] if is_small else []
    done = subprocess.run([binary, "run", "-o", str(path), *source, "--", *again], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return path


def advised(binary: str, file: Path, limit: int | None) -> dict[str, Any]:
    """The advice; with a limit, the headroom is what leaves the allocator as much."""

    def asked(headroom: int) -> dict[str, Any]:
        command = [binary, "advise", "--json", "--batches", str(file), "--headroom", f"{headroom}B"]
        done = subprocess.run(command, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else {"problem": done.stderr.strip()}

    whole = asked(0)
    if limit is None or "problem" in whole or whole["outside_bytes"] is None:
        return whole
    report = json.loads(subprocess.run([binary, "report", str(file), "--json"], check=True, capture_output=True, text=True).stdout)
    gpu = next(gpu for gpu in report["recordings"][0]["gpus"] if gpu["peak_bytes"])
    return asked(gpu["usable_bytes"] - whole["outside_bytes"] - limit)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares what advise says of a batch size with the largest that fits.")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", default="", help="names of jobs, joined by commas")
    parser.add_argument("--limit", type=float, default=40, help="what the allocator may reserve, GiB")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, with a simulated GPU")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--largest", help=argparse.SUPPRESS)
    parser.add_argument("--advised", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    limit, is_small = int(arguments.limit * 2**30), arguments.dry_run
    if arguments.train:
        train(arguments.train, is_small)
        return 0
    if arguments.largest:
        largest(arguments.largest, arguments.advised, limit)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    binary, rows = os.environ["HIGHWATER"], []
    _, zoo = libraries()
    wanted = set(arguments.only.split(",")) - {""}
    for name in (name for name in zoo.jobs(is_small) if not wanted or name in wanted):
        path = recorded(binary, arguments.out, name, is_small)
        advice = advised(binary, path, None if is_small else limit)
        path.unlink()
        row = {"job": name, "advice": advice}
        if advice.get("largest_batch_size") and not is_small:
            row.update(tried(name, advice["largest_batch_size"], arguments.limit, {}))
            row["expandable"] = tried(name, row.get("largest", 1), arguments.limit, EXPANDABLE)
        rows.append(row)
        show(row)
    (arguments.out / "batch.json").write_text(json.dumps(rows, indent=1))
    return 0


def tried(name: str, first: int, limit: float, environment: dict[str, str]) -> dict[str, Any]:
    """What `largest` prints, in a process of its own with more variables in its environment."""
    again = [sys.executable, str(HERE), "--largest", name, "--advised", str(first), "--limit", str(limit)]
    done = subprocess.run(again, capture_output=True, text=True, env={**os.environ, **environment})
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"problem": done.stderr[-500:]}


def show(row: dict[str, Any]) -> None:
    of = row["advice"]
    if "problem" in of:
        print(f"{row['job']:20}  {of['problem']}", flush=True)
        return
    most, advised_batch = row.get("largest"), of["largest_batch_size"] or 0
    share = f"{advised_batch / most * 100:.1f} %" if most else "-"
    outside = "-" if of["outside_bytes"] is None else f"{of['outside_bytes'] / 2**30:.2f} GiB outside"
    print(
        f"{row['job']:20}{of['basis']:>14}  sizes {', '.join(str(point['batch_size']) for point in of['points'])}"
        f"  {of['bytes_per_sample'] / 2**20:8.1f} MiB a sample, error {(of['error_bytes'] or 0) / 2**20:6.1f} MiB, {outside}"
        f"  advised {advised_batch:5}  runs: {row.get('fits', '-')}  largest {most or '-':>5}  {share}"
        f"  possible {of['possible_batch_size']}  expandable {row.get('expandable', {}).get('largest', '-')}  {row.get('problem', '')}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
