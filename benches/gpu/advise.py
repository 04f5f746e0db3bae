"""What `highwater advise` predicts of checkpointed modules, beside what they do, for the ten jobs of `zoo.py`.

Trains each job for a few steps under `highwater.torch.watch`, beside a daemon, and asks for advice by the API and by
`highwater advise --layers`: the modules that are advised, and half and a quarter as many. `highwater.torch.checkpoint` applies
each to a fresh model, and the allocator's own peak and the time of a step are measured.

    HIGHWATER=target/release/highwater python3 benches/gpu/advise.py --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/advise.py --how fsdp --only gpt-autocast,vit-autocast --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/advise.py --dry-run --out /tmp/results

`--how`: two passes with accumulated gradients a step, or DDP or FSDP2 with one rank.
Takes about four minutes. Prints a table and writes advise.json, with the layers of each job beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PYTHON = HERE.parent.parent.parent / "python"
sys.path[:0] = [str(PYTHON)]
import measure  # noqa: E402

WARM_STEPS, STEPS = 4, 8
HOWS = ["plain", "accumulated", "ddp", "fsdp"]


class Varied:
    """A job of `zoo.py` that trains in another way."""

    def __init__(self, job: Any, how: str) -> None:
        self.job, self.how, self.optimizer, self.of, self.samples = job, how, job.optimizer, job.of, job.samples

    def model(self) -> Any:
        model = self.job.model()
        if self.how == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model)
        if self.how == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks if hasattr(model, "blocks") else model.encoder:
                fully_shard(block)
            fully_shard(model)
        return model

    def step(self, model: Any, optimizer: Any, batch: tuple[Any, Any]) -> Any:
        if self.how != "accumulated":
            return self.job.step(model, optimizer, batch)
        import torch

        import zoo

        for x, y in zip(*(part.chunk(2) for part in batch)):
            with torch.autocast(zoo.DEVICE, self.job.dtype, enabled=self.job.is_autocast):
                loss = self.job.loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def trained(torch: Any, job: Any, advice: dict[str, Any] | None) -> dict[str, Any]:
    """The allocator's peak and the median time of a step, of a fresh model."""
    import highwater.torch

    model = job.model()
    applied = None if advice is None else highwater.torch.checkpoint(model, advice)
    optimizer, batch = job.optimizer(model.parameters()), job.of(job.samples)
    is_gpu = torch.cuda.is_available()
    times = []
    for number in range(WARM_STEPS + STEPS):
        if is_gpu:
            torch.cuda.synchronize()
            if number == WARM_STEPS:
                torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = job.step(model, optimizer, batch)
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    outcome = None if applied is None else applied.outcome()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        "step_ms": statistics.median(times[WARM_STEPS:]) * 1e3,
        "loss": float(loss),
        "recomputed_ms": None if outcome is None or outcome.seconds is None else outcome.seconds * 1e3,
    }


def profiled(torch: Any, name: str, job: Any) -> list[float]:
    """A few steps under `watch`, and how long each took, milliseconds."""
    import highwater.torch

    highwater.configure(job=name)
    model = job.model()
    optimizer, batch = job.optimizer(model.parameters()), job.of(job.samples)
    times = []
    with highwater.torch.watch(model, optimizer, layers_every=4):
        for _ in range(10):
            began = time.perf_counter()
            job.step(model, optimizer, batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    highwater.flush(5)
    return times


def advised(binary: str, daemon: measure.Daemon, name: str, out: Path) -> list[tuple[int, dict[str, Any]]]:
    """The advice for the number of modules that it takes by itself, for half and for a quarter of it."""
    deadline = time.monotonic() + 20
    path = out / f"{name}-layers.json"
    while True:
        answer = json.loads(daemon.get(f"/api/v1/jobs/{name}/layers"))
        # The fifth step, whose record has what the history of the third said; or the ninth, which has a history of its own if the
        # fifth was not like the third.
        has_peaks = any(record["peak"] for profile in answer["profiles"] for record in profile["records"])
        is_late = any(profile["step"] >= 4 for profile in answer["profiles"])
        if has_peaks and is_late or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    path.write_text(json.dumps(answer))

    def asked(count: int | None) -> dict[str, Any]:
        command = [binary, "advise", "--layers", str(path), "--json"] + ([] if count is None else ["--checkpoints", str(count)])
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        query = "" if count is None else f"?checkpoints={count}"
        live = json.loads(daemon.get(f"/api/v1/jobs/{name}/advice{query}"))["checkpoints"]
        if live != found:
            raise RuntimeError(f"{name}: the API advises {live}, the command {found}")
        return found

    best = asked(None)
    if best["modules"] is None:
        return [(0, best)]
    most = len(best["modules"]["modules"])
    return [(count, asked(count)) for count in sorted({most // 4, most // 2, most} - {0})]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares what advise predicts of checkpointed modules with what they do.")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", default="", help="names of jobs, joined by commas")
    parser.add_argument("--how", choices=HOWS, default="plain", help="how the jobs train")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, where no peak is known")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    binary = os.environ["HIGHWATER"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = "sim" if arguments.dry_run else "nvml"
        daemon = measure.Daemon(Path(binary), Path(folder), arguments=["--source", source])
        os.environ["HIGHWATER_ANNOTATIONS_SOCKET"] = str(daemon.socket)
        try:
            import torch

            import zoo

            if arguments.how in ("ddp", "fsdp"):
                backend = "gloo" if arguments.dry_run else "nccl"
                torch.distributed.init_process_group(backend, rank=0, world_size=1, init_method=f"file://{folder}/group")
            wanted = set(arguments.only.split(",")) - {""}
            for name, job in zoo.jobs(arguments.dry_run).items():
                if wanted and name not in wanted:
                    continue
                try:
                    varied = job if arguments.how == "plain" else Varied(job, arguments.how)
                    called = name if arguments.how == "plain" else f"{name}-{arguments.how}"
                    rows += of_job(torch, binary, daemon, called, varied, arguments.out)
                except Exception:
                    traceback.print_exc()
        finally:
            daemon.stop()
    (arguments.out / "advise.json").write_text(json.dumps(rows, indent=1))
    show(rows)
    return 0


def of_job(torch: Any, binary: str, daemon: measure.Daemon, name: str, job: Any, out: Path) -> list[dict[str, Any]]:
    def emptied() -> None:
        # The model before is in cycles of references. A job in a process of its own knows nothing of what others compiled.
        gc.collect()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    times = profiled(torch, name, job)
    choices = advised(binary, daemon, name, out)
    observed = (choices[-1][1]["modules"] or {}).get("observed_peak_bytes")
    emptied()
    rows = [{"model": name, "modules": 0, "predicted_bytes": observed, "watched_ms": times, **trained(torch, job, None)}]
    for count, advice in choices:
        of = advice["modules"]
        if of is None:
            continue
        emptied()
        found = trained(torch, job, advice)
        again = of["recomputed_seconds"]
        rows.append({
            "model": name, "modules": count, "of": len(of["by_count"]) - 1, "names": [each["name"] for each in of["modules"]],
            "predicted_bytes": of["predicted_peak_bytes"], "peak_at": of["peak_at"],
            "predicted_ms": None if again is None else again * 1e3, **found,
        })
    emptied()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    def gib(bytes_: int | None) -> str:
        return "-" if bytes_ is None else f"{bytes_ / 2**30:.3f}"

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    print(f"{'job':20}{'modules':>8}{'predicted':>11}{'peak (GiB)':>12}{'apart':>8}{'step ms':>9}{'more':>8}{'again':>8}{'predicted':>10}{'loss':>10}")
    base: dict[str, Any] = {}
    for row in rows:
        first = base.setdefault(row["model"], row)
        predicted, peak = row["predicted_bytes"], row["peak_bytes"]
        apart = f"{(predicted / peak - 1) * 100:+.1f} %" if predicted and peak else "-"
        print(
            f"{row['model']:20}{row['modules']:>8}{gib(predicted):>11}{gib(peak):>12}{apart:>8}{row['step_ms']:>9.1f}"
            f"{row['step_ms'] - first['step_ms']:>8.1f}{ms(row['recomputed_ms']):>8}{ms(row.get('predicted_ms')):>10}{row['loss']:>10.4f}"
            f"  {row.get('peak_at', '')}; {', '.join(row.get('names', [])[:2])}"
        )
        if "watched_ms" in row:
            print(f"{'':20}  watched: " + " ".join(f"{each:.1f}" for each in row["watched_ms"]))


if __name__ == "__main__":
    sys.exit(main())
