"""What `highwater advise --batches` predicts of a batch size, beside what that batch takes.

Trains a GPT and resnet50 under `highwater.torch.watch` and `highwater run`, with growing batches in one process and with one
process for each batch. `highwater advise --batches` then says which batch fits, and that batch is trained in a fresh process.

    HIGHWATER=target/release/highwater python3 benches/gpu/batch.py --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/batch.py --dry-run --out /tmp/results

Takes about four minutes. Prints a table and writes batch.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
STEPS = 6
SIZES = {"gpt": (4, 8, 12, 16), "resnet50": (32, 64, 96, 128)}


def train(name: str, sizes: list[int], is_small: bool) -> None:
    """Some steps with each batch size, in this process."""
    sys.path[:0] = [str(ROOT / "python"), str(HERE.parent)]
    import torch

    import advise
    import highwater.torch

    device = torch.device("cpu") if is_small else torch.device("cuda", 0)
    make, x, optimizer_of = advise.models(torch, is_small, device)[name]
    torch.manual_seed(0)
    shape = x.shape[1:]
    del x
    model = make()
    optimizer = optimizer_of(model.parameters())
    with highwater.torch.watch(model, optimizer):
        for size in sizes:
            for _ in range(STEPS):
                batch = torch.randn(size, *shape, device=device)
                model(batch).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if not is_small:
                torch.cuda.synchronize()
    highwater.flush(5)


def recorded(binary: str, out: Path, name: str, sizes: list[int], is_small: bool) -> tuple[Path, int | None]:
    """A recording of these batch sizes, and its peak; none if memory was not enough."""
    path = out / f"{name}-{'-'.join(map(str, sizes))}.sqlite"
    path.unlink(missing_ok=True)
    again = [sys.executable, str(HERE), "--train", name, "--sizes", ",".join(map(str, sizes))] + ["--dry-run"] * is_small
    source = ["--source", "sim:spike"] if is_small else []
    done = subprocess.run([binary, "run", "-o", str(path), *source, "--", *again], capture_output=True, text=True)
    if done.returncode:
        if "OutOfMemoryError" not in done.stderr:
            raise RuntimeError(f"{name} {sizes}: {done.stderr[-2000:]}")
        return path, None
    report = subprocess.run([binary, "report", str(path), "--json"], check=True, capture_output=True, text=True)
    gpus = json.loads(report.stdout)["recordings"][0]["gpus"]
    return path, max(gpu["peak_bytes"] or 0 for gpu in gpus)


def advised(binary: str, files: list[Path]) -> dict[str, Any]:
    command = [binary, "advise", "--json", "--batches", str(files[0])]
    for file in files[1:]:
        command += ["--batches", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {"problem": done.stderr.strip()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares what advise says of a batch size with what it takes.")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, with a simulated GPU")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, [int(size) for size in arguments.sizes.split(",")], arguments.dry_run)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    binary, is_small, rows = os.environ["HIGHWATER"], arguments.dry_run, []
    for name, sizes in SIZES.items():
        if is_small:
            sizes = (2, 4, 6)
        runs = {"one process": [list(sizes)], "a process each": [[size] for size in sizes]}
        for how, parts in runs.items():
            files = [recorded(binary, arguments.out, name, part, is_small)[0] for part in parts]
            advice = advised(binary, files)
            best, real, above = advice.get("largest_batch_size"), None, None
            if best and not is_small:
                real = recorded(binary, arguments.out, name, [best], False)[1]
                # A tenth more must not fit, or the advice leaves memory unused.
                above = recorded(binary, arguments.out, name, [best * 11 // 10 + 1], False)[1]
            rows.append({"model": name, "runs": how, "advice": advice, "real_peak_bytes": real, "above_peak_bytes": above})
    for path in arguments.out.glob("*.sqlite"):
        path.unlink()
    (arguments.out / "batch.json").write_text(json.dumps(rows, indent=1))
    show(rows)
    return 0


def show(rows: list[dict[str, Any]]) -> None:
    def gib(bytes_: float | None) -> str:
        return "none" if bytes_ is None else f"{bytes_ / 2**30:.2f}"

    print(f"{'model':10}{'runs':>16}{'GiB/sample':>12}{'error':>8}{'largest':>9}{'times':>7}{'predicted':>11}{'at most':>9}{'real':>8}{'limit':>8}{'a tenth more':>14}")
    for row in rows:
        of = row["advice"]
        if "problem" in of:
            print(f"{row['model']:10}{row['runs']:>16}  {of['problem']}")
            continue
        print(
            f"{row['model']:10}{row['runs']:>16}{of['bytes_per_sample'] / 2**30:>12.4f}{gib(of['error_bytes']):>8}"
            f"{of['largest_batch_size'] or 0:>9}{of['times_observed'] or 0:>7.1f}{gib(of['predicted_peak_bytes']):>11}"
            f"{gib(of['highest_peak_bytes']):>9}{gib(row['real_peak_bytes']):>8}{gib(of['limit_bytes']):>8}{gib(row['above_peak_bytes']):>14}"
        )


if __name__ == "__main__":
    sys.exit(main())
