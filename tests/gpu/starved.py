#!/usr/bin/env python3
"""Records jobs of two ranks for the corpus, in which one rank waits for the other because the other is short of memory.

In a tight block one rank, now this one, now that, has too little memory for the pools that PyTorch keeps for two streams: its
allocator flushes in some steps, and the other rank waits in a collective. Between these blocks are two kinds without want of memory: the same
second pool in enough memory, and a rank that empties its cache itself, for which the other rank waits too.

What is true of a step is measured by the job: that the allocator flushed or failed by PyTorch's own counters, and the wait by the
time in the phase `comm` (marks by hand), or by how much longer than in the other blocks the waiting rank's step took (marks of
`watch`). A wait must be found from three times the usual time on; with `watch`, from 50 ms on. From half as much on it may be found.

    HIGHWATER=target/release/highwater python3 tests/gpu/starved.py --record corpus/
    HIGHWATER=target/release/highwater python3 tests/gpu/starved.py --record corpus/ --prefix set-aside- --marks watch --parallel fsdp2

It needs PyTorch for CUDA and two GPUs that nothing else uses. It changes no setting of the GPUs. `highwater replay-eval` then prints what
the detectors say of each recording. Without GPUs, `--try` runs all of it on the CPU for a few steps; its recordings mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from culprits import Endless, Model, spread
from recorder import ROOT, Recorder, interrupted, of_marks, pack, printed, rose, start_two, stretch, write_truth

sys.path.insert(0, str(ROOT / "benches" / "gpu" / "record"))

MIB, GIB = 1 << 20, 1 << 30
STEPS = 30
# Steps after each block that are not judged.
BETWEEN = 10
LENGTHS = tuple(range(640, 1025, 64))
BATCH = 6
# The phase `comm`, as a multiple of its usual time, and the milliseconds by which it must be longer.
MUST_TIMES, MAY_TIMES, MUST_MS = 3.0, 1.5, 25.0
# Of `watch`, a step beyond its usual time, milliseconds.
MUST_LONGER_MS, MAY_LONGER_MS = 50.0, 12.0
# A step that is this much longer than usual is slow for a rank that empties its cache.
SLOW_TIMES = 1.15


class Job:
    """One rank of a transformer that is trained on two GPUs."""

    def __init__(self, marks: str, parallel: str, pick: random.Random) -> None:
        import torch
        import torch.distributed as dist
        from device_memory import open_driver
        from memory import DeviceMemory, PretendedMemory

        import highwater
        import highwater.torch

        self.torch, self.dist, self.highwater = torch, dist, highwater
        self.by_hand, self.pick, self.rank = marks == "hand", pick, int(os.environ["RANK"])
        self.is_real = torch.cuda.is_available()
        self.width, depth = int(os.environ["WIDTH"]), int(os.environ["DEPTH"])
        self.lengths = LENGTHS if self.is_real else (16, 24, 32)
        self.device = torch.device("cuda", self.rank) if self.is_real else torch.device("cpu")
        if self.is_real:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.is_real else "gloo")
        torch.manual_seed(7)
        inner = Model(torch, self.width, depth).to(self.device)
        self.memory = DeviceMemory(self.device, open_driver()) if self.is_real else PretendedMemory()
        # With marks by hand, gradients are summed in a phase of their own.
        self.model = inner if self.by_hand else spread(inner, parallel, self.rank if self.is_real else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.is_real)
        self.tokens, self.steps, self.comm_ms = self.lengths[-1], 0, 0.0
        if self.by_hand:
            highwater.configure(counters=self.counters)
        loader: Any = self.batches() if self.by_hand else torch.utils.data.DataLoader(Endless(self.batches()), batch_size=None)
        self.watched = None if self.by_hand else highwater.torch.watch(self.model, self.optimizer, loader)
        self.inputs = iter(loader)
        # Called in forward.
        self.in_forward: Any = lambda: None
        inner[depth // 2].register_forward_pre_hook(self.before_middle)

    def before_middle(self, *_: Any) -> None:
        self.in_forward()

    def counters(self) -> dict[str, int]:
        """The allocator's, by the names of marks."""
        return of_marks(self.memory.counters())

    def batches(self) -> Iterator[Any]:
        while True:
            yield self.torch.randn(BATCH, self.tokens, self.width, device=self.device)

    def phase(self, name: str) -> Any:
        """Marked by hand, or by `watch`."""
        return self.highwater.phase(name) if self.by_hand else contextlib.nullcontext()

    def step(self, tokens: int | None = None) -> dict[str, Any]:
        """One step: its times, and what the allocator counted in it."""
        self.tokens = tokens or self.lengths[-1]
        before, begin_ns = self.memory.counters(), time.time_ns()
        with self.highwater.step(self.steps) if self.by_hand else contextlib.nullcontext():
            self.passes()
        counted = rose(before, self.memory.counters())
        self.steps += 1
        return {"begin_ns": begin_ns, "end_ns": time.time_ns(), "comm_ms": self.comm_ms, **counted}

    def passes(self) -> None:
        with self.phase("forward"):
            inputs = next(self.inputs)
            with self.torch.autocast(self.device.type, self.torch.bfloat16):
                loss = self.model(inputs).float().square().mean()
            self.finish()
        with self.phase("backward"):
            loss.backward()
            self.finish()
        if self.by_hand:
            began = time.perf_counter()
            with self.phase("comm"):
                self.sum_gradients()
            self.comm_ms = (time.perf_counter() - began) * 1e3
        with self.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.memory.synchronize()

    def finish(self) -> None:
        """Waits for the device, where the marks are by hand."""
        if self.by_hand:
            self.memory.synchronize()

    def sum_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        work = [self.dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for one in work:
            one.wait()
        self.memory.synchronize()

    def need(self) -> int:
        """Bytes that a step takes beside what is kept."""
        kept = self.memory.clear_cache()
        self.step()
        return self.memory.peak_reserved() - kept

    def take(self, size: int) -> None:
        """Takes memory on a second stream. What does not fit is left out, so that the other rank need not wait for ever."""
        try:
            self.memory.auxiliary(size)
        except self.torch.OutOfMemoryError:
            self.memory.relieve(512 * MIB)
        if not self.is_real:
            time.sleep(0.06)

    def block(self, kind: str, culprit: int, need: int) -> dict[str, Any]:
        """One block. Both ranks draw the same numbers."""
        is_culprit = self.rank == culprit
        free = int(need * self.pick.uniform(1.2, 1.35)) + 512 * MIB
        self.memory.leave(40 * GIB)
        if kind == "tight" and is_culprit:
            self.memory.clear_cache()
            self.memory.leave(free)
        for _ in range(BETWEEN):
            self.step()
        every, share = self.pick.randrange(3, 7), self.pick.uniform(0.5, 0.7)
        steps = []
        for at in range(STEPS):
            tokens = self.pick.choice(self.lengths) if self.by_hand else None
            if is_culprit and at % every == every - 1:
                self.in_forward = self.memory.clear_cache if kind == "emptied" else lambda: self.take(int(need * share))
            steps.append(self.step(tokens))
            self.in_forward = lambda: None
        both: list[Any] = [None, None]
        self.dist.all_gather_object(both, steps)
        return {"kind": kind, "culprit": culprit, "ranks": both}

    def close(self) -> None:
        self.memory.leave(40 * GIB)
        if self.watched is not None:
            self.watched.close()
        self.highwater.flush(5)
        self.dist.destroy_process_group()


def train(kinds: list[str], marks: str, parallel: str, seed: int) -> None:
    """One rank. Rank 0 prints the blocks."""
    job = Job(marks, parallel, random.Random(seed))
    for tokens in (*job.lengths, job.lengths[-1], *[None] * 15):
        job.step(tokens)
    need = job.need()
    culprits = random.Random(seed + 1)
    for kind in kinds:
        block = job.block(kind, culprits.randrange(2), need)
        if job.rank == 0:
            print(json.dumps(block), flush=True)
    job.close()


# The truth.


def truths(blocks: list[dict[str, Any]], marks: str) -> list[dict[str, Any]]:
    """What is true of the blocks."""
    usual = [statistics.median(waited(step, marks) for step in healthy(blocks, rank)) for rank in (0, 1)]
    usual_ms = [statistics.median(length_ms(step) for step in healthy(blocks, rank)) for rank in (0, 1)]
    found: list[dict[str, Any]] = []
    for block in blocks:
        culprit, victim = block["culprit"], 1 - block["culprit"]
        for own, other in zip(block["ranks"][culprit], block["ranks"][victim], strict=True):
            own_is_slow = length_ms(other) >= SLOW_TIMES * usual_ms[victim]
            if own["retries"]:
                found.append(true("allocator_thrash", culprit, [own], must=True))
            if own["ooms"]:
                found.append(true("oom", culprit, [own], must=True))
            may, must = starves(waited(other, marks), usual[victim], marks)
            if block["kind"] == "tight" and may:
                starved = true("comm_starvation", culprit, [other, own], must=must and own["retries"] > 0)
                found.append({**starved, "waiting_ranks": [victim]})
            if block["kind"] == "emptied" and own_is_slow:
                found.append(true("slow_steps", None, [own, other], must=False))
        if block["kind"] == "tight":
            found.append(true("low_headroom", culprit, block["ranks"][culprit], must=False))
        if block["kind"] != "roomy":
            found.append(true("straggler", culprit, block["ranks"][culprit], must=False))
    return found


def healthy(blocks: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """The steps of a rank in blocks in which no rank is late."""
    return [step for block in blocks if block["kind"] == "roomy" for step in block["ranks"][rank]]


def length_ms(step: dict[str, Any]) -> float:
    return float(step["end_ns"] - step["begin_ns"]) / 1e6


def waited(step: dict[str, Any], marks: str) -> float:
    """Milliseconds that hold the wait."""
    return float(step["comm_ms"]) if marks == "hand" else length_ms(step)


def starves(waited_ms: float, usual_ms: float, marks: str) -> tuple[bool, bool]:
    """Whether a wait may be found, and whether it must."""
    longer_ms = waited_ms - usual_ms
    if marks == "hand":
        return waited_ms >= MAY_TIMES * usual_ms, waited_ms >= MUST_TIMES * usual_ms and longer_ms >= MUST_MS
    return longer_ms >= MAY_LONGER_MS, longer_ms >= MUST_LONGER_MS


def true(finding: str, rank: int | None, steps: list[dict[str, Any]], must: bool) -> dict[str, Any]:
    """A truth over these steps."""
    begin_ns, end_ns = min(step["begin_ns"] for step in steps), max(step["end_ns"] for step in steps)
    return {"finding": finding, "rank": rank, "begin_unix_nano": begin_ns, "end_unix_nano": end_ns, "must_find": must}


def record(binary: Path, folder: Path, options: argparse.Namespace) -> None:
    """Records the blocks, and writes what is true of them."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["tight"] * options.blocks + ["roomy", "emptied"] * max(options.blocks * 3 // 8, 1)
    random.Random(options.seed).shuffle(kinds)
    recorder = Recorder(binary, folder, *(["--source", "sim"] if options.try_ else []))
    arguments = ["--train", ",".join(kinds), options.marks, options.parallel, str(options.seed)]
    name = f"starved-{options.parallel}-{options.marks}"
    ranks = start_two(__file__, recorder, name, *arguments)
    blocks: list[dict[str, Any]] = []
    try:
        for block in printed(ranks[0]):
            blocks.append(block)
            tight_ms = [round(length_ms(step)) for step in block["ranks"][1 - block["culprit"]]]
            flushes = sum(step["retries"] for step in block["ranks"][block["culprit"]])
            print(f"{name} {block['kind']}: {flushes} flushes of rank {block['culprit']}, steps of {tight_ms} ms", flush=True)
        if any(rank.wait(60) for rank in ranks):
            raise SystemExit("a rank failed")
    finally:
        # What was recorded until then is worth keeping.
        for rank in ranks:
            rank.kill()
        recorder.stop()
        if any(block["kind"] == "roomy" for block in blocks):
            keep(folder, blocks, options)
            pack(folder)


def keep(folder: Path, blocks: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Writes what is true. The steps before a block, in which memory gets tight, are not judged."""
    ends = [
        {"begin_ns": min(steps[0]["begin_ns"] for steps in block["ranks"]), "end_ns": max(steps[-1]["end_ns"] for steps in block["ranks"])}
        for block in blocks
    ]
    between = itertools.pairwise([None, *ends, None])
    marks = "by hand" if options.marks == "hand" else "of watch"
    write_truth(
        folder,
        f"two ranks, {options.parallel}, marks {marks}; one is short of memory in some blocks (tests/gpu/starved.py)",
        {"width": int(os.environ["WIDTH"]), "depth": int(os.environ["DEPTH"])},
        [{"kind": block["kind"], **times, "steps": STEPS} for block, times in zip(blocks, ends, strict=True)],
        truths(blocks, options.marks),
        [stretch(before and before["end_ns"], after and after["begin_ns"]) for before, after in between],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record into a folder below this one")
    parser.add_argument("--marks", choices=["hand", "watch"], default="hand", help="who marks")
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp", help="of jobs with marks of watch")
    parser.add_argument("--prefix", default="", help="of the folder's name")
    parser.add_argument("--seed", type=int, default=1, help="another order and other amounts")
    parser.add_argument("--model", type=int, nargs=2, metavar=("WIDTH", "DEPTH"), default=[2048, 16], help="of the transformer")
    parser.add_argument("--blocks", type=int, default=8, help="tight blocks; of each other kind three for eight of these")
    parser.add_argument("--try", dest="try_", action="store_true", help="a few steps on the CPU, beside the simulator")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        kinds, marks, parallel, seed = options.train
        train(kinds.split(","), marks, parallel, int(seed))
        return 0
    if options.record is None:
        parser.error("--record FOLDER is missing")
    signal.signal(signal.SIGTERM, interrupted)
    binary = Path(os.environ.get("HIGHWATER", "highwater"))
    if options.try_:
        options.model = [32, 2]
    os.environ.update(WIDTH=str(options.model[0]), DEPTH=str(options.model[1]))
    folder = options.record / f"{options.prefix}starved-{options.parallel}-{options.marks}"
    record(binary, folder, options)
    return subprocess.run([binary, "replay-eval", folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
