"""A real training job to measure beside: a transformer in bf16 with AdamW, on one GPU or data-parallel over several.

Its phases are `data`, `forward`, `backward`, `comm` (the gradients are all-reduced explicitly, after the backward
pass) and `optimizer`. With annotations on, the device is synchronised at the end of each phase, so that a phase holds
the memory that it used; without them only the step's end is synchronised. The sequence length is drawn anew
each step unless `--seq-min` equals `--seq-max`.

    python3 train.py --seconds 30 --socket /run/highwater/annotations.sock --events out/
    python3 train.py --gpus 2 --seconds 60 --times times.json
    torchrun --nproc-per-node 2 train.py --seconds 60
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # As NVML counts, so that indexes agree.

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn

from annotator import Annotator
from device_memory import GIB, MIB, Driver, open_driver


class Block(nn.Module):
    """One pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Activations in, activations out, shape (batch, sequence, width)."""
        batch, length, width = x.shape
        mixed = self.query_key_value(self.norm_attention(x))
        query, key, value = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Token embedding, layers, and a head of its own weights."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


class Job:
    """The training loop of one process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = self._open_device()
        self.cuda = self.device.type == "cuda"
        self.synchronize: Callable[[], None] = torch.cuda.synchronize if self.cuda else (lambda: None)
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if self.cuda else "gloo", device_id=self.device if self.cuda else None)
        self.annotator = self._open_annotator()
        self.lengths = random.Random(options.seed * 1009 + self.rank)
        torch.manual_seed(options.seed)
        self.model = Transformer(options.layers, options.width, options.heads, options.vocab)
        self.model.to(self.device, torch.bfloat16 if self.cuda else torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.cuda)
        self.driver = open_driver() if self.cuda else None
        self.ballast = self._fill() if options.free_gib is not None else []
        self.stopping = False
        self.steps: list[tuple[int, int, int]] = []
        self.allocations: list[tuple[int, int, int]] = []

    def run(self) -> None:
        """Trains until the steps or the seconds are over, or a SIGTERM came."""
        signal.signal(signal.SIGTERM, self._stop)
        deadline = time.monotonic() + self.options.seconds if self.options.seconds else None
        step = 0
        while not self._finished(step, deadline):
            self._timed_step(step)
            if self.driver:
                self._cycle_allocations(self.driver)
            step += 1
            if step == self.options.warmup and self.rank == 0:
                print("ready: the warm-up is over", flush=True)
        self.annotator.close()
        self._write_times()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def _timed_step(self, step: int) -> None:
        length = self._draw_length()
        self.synchronize()
        begin_unix_ns = time.time_ns()
        begin = time.perf_counter_ns()
        self.annotator.emit("begin", "step", None, step)
        self._step(step, length)
        self.synchronize()
        duration_ns = time.perf_counter_ns() - begin
        self.annotator.emit("end", "step", None, step)
        self.annotator.flush()
        self.steps.append((begin_unix_ns, duration_ns, length))
        if self.options.verbose and self.rank == 0:
            print(f"step {step} length {length} {duration_ns / 1e6:.2f} ms", flush=True)

    def _step(self, step: int, length: int) -> None:
        with self._phase("data", step):
            if self.cuda and self.options.empty_cache and step % self.options.empty_cache == 0:
                torch.cuda.empty_cache()
            time.sleep(self.options.data_ms / 1e3)
            batch = torch.randint(self.options.vocab, (self.options.batch, length))
            batch = batch.to(self.device)
        with self._phase("forward", step):
            loss = self.model(batch)
        with self._phase("backward", step):
            loss.backward()
        if dist.is_initialized():
            with self._phase("comm", step):
                self._all_reduce_gradients()
        with self._phase("optimizer", step):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def _phase(self, name: str, step: int) -> Iterator[None]:
        self.annotator.emit("begin", "phase", name, step)
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self.annotator.emit("mark", "phase", "oom", step)
            raise
        if self.annotator.enabled:
            self.synchronize()
        self.annotator.emit("end", "phase", name, step)

    def _all_reduce_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        handles = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for handle in handles:
            handle.wait()
        torch._foreach_div_(gradients, float(self.world_size))

    def _cycle_allocations(self, driver: Driver) -> None:
        for _ in range(self.options.alloc_cycles):
            self.allocations.append(driver.cycle(self.options.alloc_mib * MIB))

    def _finished(self, step: int, deadline: float | None) -> bool:
        """Whether to stop, agreed by all ranks: a rank that left alone would leave the others in a collective."""
        over = self.stopping or (deadline is not None and time.monotonic() >= deadline)
        over = over or (self.options.steps is not None and step >= self.options.steps)
        if not dist.is_initialized():
            return over
        flag = torch.tensor([int(over)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _stop(self, _signal: int, _frame: Any) -> None:
        self.stopping = True

    def _draw_length(self) -> int:
        return self.lengths.randrange(self.options.seq_min, self.options.seq_max + 1, self.options.seq_step)

    def _open_device(self) -> torch.device:
        if self.options.device == "cpu":
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        return device

    def _open_annotator(self) -> Annotator:
        identity: dict[str, Any] = {"job": self.options.job, "rank": self.rank, "world_size": self.world_size}
        if self.options.name_gpu:
            identity["gpu"] = self._gpu_name()
        log = self.options.events / f"events-rank{self.rank}.jsonl" if self.options.events else None
        return Annotator(identity, self.options.socket, log, self._counters)

    def _gpu_name(self) -> str | int:
        if not self.cuda:
            return self.rank
        uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", None)
        return f"GPU-{uuid}" if uuid else torch.cuda.current_device()

    def _counters(self) -> dict[str, int] | None:
        if not self.cuda:
            return None
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        current = {name: stats[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "reserved", "active")}
        split = stats["inactive_split_bytes"]["all"]["current"]
        return {
            **current,
            "inactive_split": split,
            "alloc_retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
        }

    def _fill(self) -> list[int]:
        if self.driver is None or self.rank != 0:
            return []
        return self.driver.fill_until(int(self.options.free_gib * GIB))

    def _write_times(self) -> None:
        if self.rank != 0:
            return
        durations = sorted(duration for _, duration, _ in self.steps)
        if durations:
            print(f"{len(durations)} steps, median {durations[len(durations) // 2] / 1e6:.2f} ms", flush=True)
        if self.options.times:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            document = {
                "world_size": self.world_size,
                "parameters": parameters,
                "steps": self.steps,
                "allocations": self.allocations,
                "annotations": self.annotator.summary(),
            }
            self.options.times.write_text(json.dumps(document))


def launch(gpus: int) -> int:
    """Runs this script once per GPU, as ranks of one job. A rank that fails ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(gpus)
    ]

    def end_ranks(_signal: int, _frame: Any) -> None:
        for rank in ranks:
            rank.terminate()

    signal.signal(signal.SIGTERM, end_ranks)
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.1)
    return max(abs(rank.returncode) for rank in ranks)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A training job to measure beside.")
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="processes, one per GPU")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu is for trying the scripts only")
    add("--layers", type=int, default=16)
    add("--width", type=int, default=2048)
    add("--heads", type=int, default=16)
    add("--vocab", type=int, default=32000)
    add("--batch", type=int, default=8)
    add("--seq-min", type=int, default=512, help="shortest sequence")
    add("--seq-max", type=int, default=2048, help="longest; equal to --seq-min for a fixed shape")
    add("--seq-step", type=int, default=64, help="lengths are --seq-min plus a multiple of this")
    add("--data-ms", type=float, default=0.0, help="how long the loader takes per step")
    add("--empty-cache", type=int, default=0, help="empty the allocator's cache every so many steps")
    add("--free-gib", type=float, help="fill GPU 0 with ballast until about this much is free")
    add("--alloc-cycles", type=int, default=0, help="after each step, allocate and free this often")
    add("--alloc-mib", type=int, default=256, help="this much each time")
    add("--steps", type=int, help="end after this many steps")
    add("--seconds", type=float, help="end after this long")
    add("--warmup", type=int, default=5, help="print 'ready:' after this many steps")
    add("--seed", type=int, default=1)
    add("--job", default="bench", help="the job's name in annotations")
    add("--socket", type=Path, help="the daemon's annotation socket; none: no annotations sent")
    add("--events", type=Path, help="folder for the local log of the same events; none: no log")
    add("--no-gpu-name", dest="name_gpu", action="store_false", help="let the daemon find the GPU by the process")
    add("--times", type=Path, help="write step and allocation times here, as JSON (rank 0)")
    add("--verbose", action="store_true", help="print each step's time")
    return parser.parse_args()


def main() -> int:
    """Trains here, or starts one process per GPU."""
    options = parse_options()
    if options.gpus > 1 and "RANK" not in os.environ:
        return launch(options.gpus)
    Job(options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
