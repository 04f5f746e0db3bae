"""What `highwater advise` predicts of checkpoints, beside what they do.

Trains resnet50 (batch 16) and a GPT for a few steps under `highwater.torch.watch`, beside a daemon, and asks for advice by the
API and by `highwater advise --layers`. Then each model is split at the layers that were named, every part but the last runs
through torch.utils.checkpoint, and the allocator's own peak and the time of a step are measured.

    HIGHWATER=target/release/highwater python3 benches/gpu/advise.py --out results/
    HIGHWATER=target/release/highwater python3 benches/gpu/advise.py --dry-run --out /tmp/results

Takes about a minute. Prints a table and writes advise.json, with the layers of each model beside it.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PYTHON = HERE.parent.parent.parent / "python"
sys.path[:0] = [str(PYTHON)]
import measure  # noqa: E402

CHECKPOINTS = (1, 2, 4, 8)
WARM_STEPS, STEPS = 4, 12


def gpt(torch: Any, width: int, layers: int) -> Any:
    functional = torch.nn.functional

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.act, self.down = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            heads = max(1, width // 64)
            qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, heads, width // heads)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(-2))
            return x + self.down(self.act(self.up(self.norm2(x))))

    return torch.nn.Sequential(*[Block() for _ in range(layers)], torch.nn.LayerNorm(width))


def models(torch: Any, is_small: bool, device: Any) -> dict[str, Any]:
    """By name: what makes a model, its input, and its optimizer."""
    found: dict[str, Any] = {}
    width, layers, batch, length = (32, 3, 2, 16) if is_small else (1024, 24, 8, 1024)
    x = torch.randn(batch, length, width, device=device)
    found["gpt"] = lambda: gpt(torch, width, layers).to(device), x, lambda own: torch.optim.AdamW(own, lr=1e-5)
    try:
        import torchvision
    except ImportError:
        return found
    pictures = torch.rand(2, 3, 64, 64, device=device) if is_small else torch.rand(16, 3, 224, 224, device=device)
    resnet = lambda: torchvision.models.resnet50(weights=None).to(device)  # noqa: E731
    return {"resnet50": (resnet, pictures, lambda own: torch.optim.SGD(own, lr=1e-5)), **found}


def checkpointed(torch: Any, model: Any, at: list[str]) -> Any:
    """The model in parts that begin with these layers, all but the last checkpointed."""
    from torch.fx.passes.split_module import split_module
    from torch.utils.checkpoint import checkpoint

    class Part(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return checkpoint(self.inner, *args, use_reentrant=False)

    if not at:
        return model
    traced, left, part = torch.fx.symbolic_trace(model), list(at), 0
    place: dict[Any, int] = {}
    for node in traced.graph.nodes:
        if left and node.op == "call_module" and str(node.target) == left[0]:
            left.pop(0)
            part += 1
        place[node] = part
    if left:
        raise RuntimeError(f"{left[0]} is no layer of the model as it was traced")
    split = split_module(traced, model, lambda node: place[node])
    for number in range(part):
        name = f"submod_{number}"
        setattr(split, name, Part(getattr(split, name)))
    return split


def trained(torch: Any, of: Any, at: list[str], is_small: bool) -> dict[str, Any]:
    """The allocator's peak and the median time of a step."""
    make, x, optimizer_of = of
    torch.manual_seed(0)
    model = checkpointed(torch, make(), at)
    optimizer = optimizer_of(model.parameters())
    wait = (lambda: None) if is_small else torch.cuda.synchronize
    times = []
    for number in range(WARM_STEPS + STEPS):
        if number == WARM_STEPS and not is_small:
            torch.cuda.reset_peak_memory_stats()
        wait()
        began = time.perf_counter()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        times.append(time.perf_counter() - began)
    peak = None if is_small else torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "step_ms": statistics.median(times[WARM_STEPS:]) * 1e3, "loss": float(loss.detach())}


def profiled(torch: Any, name: str, of: Any) -> None:
    """A few steps under `watch`."""
    import highwater

    make, x, optimizer_of = of
    highwater.configure(job=name)
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model.parameters())
    with highwater.torch.watch(model, optimizer, layers_every=2):
        for _ in range(6):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    highwater.flush(5)


def advised(binary: str, daemon: measure.Daemon, name: str, out: Path) -> dict[int, dict[str, Any]]:
    """By number of checkpoints, the advice; once the API and the command agree."""
    deadline = time.monotonic() + 10
    path = out / f"{name}-layers.json"
    while True:
        answer = json.loads(daemon.get(f"/api/v1/jobs/{name}/layers"))
        if answer["profiles"] or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    path.write_text(json.dumps(answer))
    found = {}
    for most in (0, *CHECKPOINTS):
        command = [binary, "advise", "--layers", str(path), "--checkpoints", str(most), "--json"]
        found[most] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        live = json.loads(daemon.get(f"/api/v1/jobs/{name}/advice?checkpoints={most}"))["checkpoints"]
        if live != found[most]:
            raise RuntimeError(f"{name}: the API advises {live}, the command {found[most]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares what advise predicts of checkpoints with what they do.")
    parser.add_argument("--out", type=Path, default=Path("results"))
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

            device = torch.device("cpu") if arguments.dry_run else torch.device("cuda", 0)
            for name, of in models(torch, arguments.dry_run, device).items():
                profiled(torch, name, of)
                for most, advice in advised(binary, daemon, name, arguments.out).items():
                    # The model before it is in cycles of references.
                    gc.collect()
                    if not arguments.dry_run:
                        torch.cuda.empty_cache()
                    found = trained(torch, of, advice["split_modules"], arguments.dry_run)
                    rows.append({"model": name, "checkpoints": most, "advice": advice, **found})
        finally:
            daemon.stop()
    (arguments.out / "advise.json").write_text(json.dumps(rows, indent=1))
    show(rows)
    return 0


def show(rows: list[dict[str, Any]]) -> None:
    def mib(bytes_: int | None) -> str:
        return "-" if bytes_ is None else f"{bytes_ / 2**20:.0f}"

    print(f"{'model':10}{'K':>3}{'activations':>13}{'predicted':>11}{'peak (MiB)':>12}{'apart':>8}{'step ms':>9}{'more':>8}{'recomputed':>12}  loss")
    base: dict[str, Any] = {}
    for row in rows:
        advice, name = row["advice"], row["model"]
        base.setdefault(name, row)
        predicted, peak = advice["predicted_peak_bytes"], row["peak_bytes"]
        apart = f"{(predicted / peak - 1) * 100:+.1f} %" if predicted and peak else "-"
        again = advice["recomputed_seconds"]
        print(
            f"{name:10}{row['checkpoints']:>3}{mib(advice['max_memory']):>13}{mib(predicted):>11}{mib(peak):>12}{apart:>8}"
            f"{row['step_ms']:>9.2f}{row['step_ms'] - base[name]['step_ms']:>8.2f}"
            f"{'-' if again is None else f'{again * 1e3:.2f}':>12}  {row['loss']:.6f}  {', '.join(advice['split_modules'][:3])}"
        )


if __name__ == "__main__":
    sys.exit(main())
