#!/usr/bin/env python3
"""Whether the daemon names the rank that is late, why, and memory that ran out, on real GPUs.

- late: two ranks train a model under DDP or FSDP2. In blocks of 30 steps rank 1 is made late: by more work in backward or in
  forward, by its host, by its data. Between them are healthy blocks, some with inputs of different lengths, and steps that are
  not judged. A late block is named if the daemon has a straggler of rank 1 with that reason in it; a healthy one is silent if it
  has none. The marks are by hand (data, forward, backward, optimizer, and none of communication), once with marks that wait for
  the GPU and once with marks as the host sees them, or those of `highwater.torch.watch`. With `--healthy` nobody is late, and there
  are also blocks in which rank 0 writes checkpoints, in which gradients are accumulated, and with an evaluation.
- oom: a job runs out of memory and marks it; another is gone in the middle of a step on a full GPU and says nothing; a third runs
  out because a second process holds half of the GPU; a healthy one ends. Each must be reported so, and the last not at all.

    HIGHWATER=target/release/highwater python3 tests/gpu/culprits.py --blocks 20
    HIGHWATER=target/release/highwater python3 tests/gpu/culprits.py --only late --record corpus/
    HIGHWATER=target/release/highwater python3 tests/gpu/culprits.py --healthy --record corpus/ --blocks 8 --model 1536 12

With `--record` the first part is recorded by `highwater record`, whose detectors look on as a daemon's do, and each recording gets
its truth.json; `highwater replay-eval` then judges it, here and after a change of the rules.

It needs PyTorch for CUDA, two GPUs for the first part and one for the second. It changes no setting of the GPUs. It prints a
table, and fails if a row does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recorder import Recorder, interrupted, measure, printed, start, start_two, stretch, write_truth

STEPS = 30
# Steps after each block that are not judged: the daemon looks at ten at a time.
BETWEEN = 25
# What each kind of lateness must be called in the finding's text.
REASONS = {
    "backward": ["computes longer", "longer in backward"],
    "forward": ["longer in forward", "computes longer"],
    "host": ["The host of rank 1", "longer in backward"],
    "data": ["longer for data", "longer in data"],
}
# The finding's cause, in one word.
CAUSES = {"backward": "computes", "forward": "computes", "host": "host", "data": "data"}
NAMED = 0.95
# A sign may come this much after the end of its block.
SLACK_NS = 500_000_000
BEFORE_NS = 1_500_000_000
MARKS = {"wait": "marks that wait", "run on": "marks that run on", "watch": "marks of watch"}


HEALTHY = ("healthy", "lengths", "checkpoint", "accumulation", "evaluation")


def blocks(count: int, seed: int, is_healthy: bool) -> list[str]:
    """The blocks in the order of their turn: of each kind this many."""
    kinds = [*HEALTHY] * count if is_healthy else [*REASONS] * count + ["healthy", "lengths"] * count
    random.Random(seed).shuffle(kinds)
    return kinds


# The job.


def train(kinds: list[str], marks: str, parallel: str) -> None:
    """One rank. Rank 0 prints the begin and end of each block."""
    import torch
    import torch.distributed as dist

    import highwater
    import highwater.torch

    rank = int(os.environ["RANK"])
    width, depth, lateness = int(os.environ["WIDTH"]), int(os.environ["DEPTH"]), float(os.environ["LATENESS"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(rank)
    device, length, batch = torch.device("cuda", rank), 1024, 6
    inner = Model(torch, width, depth).to(device)
    model = spread(inner, parallel, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    extra = torch.randn(6144, 6144, device=device, dtype=torch.bfloat16)
    pick = random.Random(rank)

    def more() -> None:
        for _ in range(round(45 * lateness)):
            torch.mm(extra, extra)

    late = {"kind": "healthy"}

    def in_forward(*_: Any) -> None:
        if rank == 1 and late["kind"] == "forward":
            more()

    inner[depth // 2].register_forward_pre_hook(in_forward)

    def in_backward(_: Any) -> None:
        if rank == 1 and late["kind"] == "backward":
            more()
        if rank == 1 and late["kind"] == "host":
            time.sleep(0.06 * lateness)

    def finish() -> None:
        if marks == "wait":
            torch.cuda.synchronize()

    def batches() -> Iterator[Any]:
        while True:
            if rank == 1 and late["kind"] == "data":
                time.sleep(0.04 * lateness)
            tokens = pick.randrange(384, length + 1, 64) if late["kind"] == "lengths" else length
            yield torch.randn(batch, tokens, width, device=device, dtype=torch.bfloat16)

    by_hand = marks != "watch"
    loader: Any = batches() if by_hand else torch.utils.data.DataLoader(Endless(batches()), batch_size=None)
    watched = None if by_hand else highwater.torch.watch(model, optimizer, loader)
    inputs_of = iter(loader)

    def phase(name: str) -> Any:
        return highwater.phase(name) if by_hand else contextlib.nullcontext()

    step = 0

    def passes() -> None:
        with phase("data"):
            inputs = next(inputs_of)
            finish()
        with phase("forward"):
            with torch.autocast("cuda", torch.bfloat16):
                output = model(inputs)
            loss = output.float().square().mean()
            loss.register_hook(in_backward)
            finish()
        with phase("backward"):
            loss.backward()
            finish()

    def besides(kind: str, at: int) -> None:
        """What some steps of a healthy block do after their update."""
        if kind == "checkpoint" and at % 10 == 5 and rank == 0:
            with phase("checkpoint"), tempfile.TemporaryFile() as file:
                torch.save([part.to_local() if hasattr(part, "to_local") else part for part in model.parameters()], file)
        if kind == "evaluation" and at % 15 == 10:
            with phase("evaluation"), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                for _ in range(6):
                    model(next(inputs_of))
                finish()

    def one(kind: str, at: int = 0) -> None:
        nonlocal step
        late["kind"] = kind
        with highwater.step(step) if by_hand else contextlib.nullcontext():
            for _ in range(3 if kind == "accumulation" else 0):
                with unsynchronised(model, parallel):
                    passes()
            passes()
            with phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
                finish()
            besides(kind, at)
            torch.cuda.synchronize()
        step += 1

    is_healthy = not set(kinds) & set(REASONS)
    for _ in range(25):
        one("healthy")
    for kind in kinds:
        begin_ns = time.time_ns()
        for at in range(STEPS):
            one(kind, at)
        end_ns = time.time_ns()
        if rank == 0:
            print(json.dumps({"kind": kind, "begin_ns": begin_ns, "end_ns": end_ns}), flush=True)
        # Of healthy blocks all is judged.
        for _ in range(0 if is_healthy else BETWEEN):
            one("healthy")
    if watched is not None:
        watched.close()
    highwater.flush(5)
    dist.destroy_process_group()


def spread(model: Any, parallel: str, rank: int | None) -> Any:
    """The model under data parallelism."""
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        # On the CPU there are no devices to name.
        return DistributedDataParallel(model, device_ids=None if rank is None else [rank])
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


@contextlib.contextmanager
def unsynchronised(model: Any, parallel: str) -> Iterator[None]:
    """Passes whose gradients are only added up."""
    if parallel == "ddp":
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


class Endless:
    """A data set without an end or a length."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items

    def __getitem__(self, _: int) -> Any:
        return next(self.items)

    def __len__(self) -> int:
        return 1 << 40


def Model(torch: Any, width: int, depth: int) -> Any:  # noqa: N802
    """Blocks of a transformer."""
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            q, k, v = self.mix(self.first(x)).unflatten(-1, (3, 16, width // 16)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    return nn.Sequential(*[Block() for _ in range(depth)])


def memory(how: str) -> None:
    """A job of one rank that meets its end in step 20, in the way that `how` says."""
    import torch

    import highwater

    device = torch.device("cuda", 0)
    held = []
    for step in range(25):
        with highwater.step(step), highwater.phase("forward"):
            torch.mm(torch.ones(512, 512, device=device), torch.ones(512, 512, device=device))
            time.sleep(0.05)
            if step == 20 and how in ("marked", "crowded"):
                try:
                    held.append(torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device=device))
                    held.append(torch.empty(8 << 30, dtype=torch.uint8, device=device))
                except torch.OutOfMemoryError:
                    time.sleep(1.2)
                    memory = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
                    highwater.mark("oom", requested=8 << 30, device_free=torch.cuda.mem_get_info()[0], **memory)
                    highwater.flush(5)
                    os._exit(1)
            if step == 20 and how == "gone":
                held.append(torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device=device))
                highwater.flush(5)
                time.sleep(1.0)
                os._exit(1)
    highwater.flush(5)


def hold(gib: float) -> None:
    """Holds memory on GPU 0 until its input ends."""
    import torch

    kept = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda:0")
    print("holds", flush=True)
    sys.stdin.read()
    del kept


# The judge.


def findings(daemon: measure.Daemon) -> list[dict[str, Any]]:
    answer: dict[str, Any] = json.loads(daemon.get("/api/v1/findings?limit=512"))
    return list(answer["findings"])


def late(daemon: measure.Daemon | Recorder, kinds: list[str], how: str, parallel: str) -> Iterator[dict[str, Any]]:
    """Each block with what the daemon said of it."""
    job, train = f"{parallel}-{how}", ["--train", ",".join(kinds), how, parallel]
    ranks = start_two(__file__, daemon, job, *train)
    try:
        for block in printed(ranks[0]):
            if isinstance(daemon, Recorder):
                yield block
                continue
            # The detectors look at a step a tenth of a second after its end.
            time.sleep(0.3)
            of_job = [one for one in findings(daemon) if one["finding"] == "straggler" and one["job"] == job]
            seen = [one for one in of_job if one["severity"] != "info" and block["begin_ns"] <= one["seen_unix_nano"]]
            yield {**block, "said": seen}
        if any(rank.wait(60) for rank in ranks):
            raise SystemExit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()


def judge_late(daemon: measure.Daemon, kinds: list[str], how: str, parallel: str) -> list[tuple[str, str, bool]]:
    named: dict[str, list[bool]] = {}
    steps = []
    for block in late(daemon, kinds, how, parallel):
        kind = block["kind"]
        texts = [(one["rank"], one["what"]) for one in block["said"]]
        whys = [one["why"] for one in block["said"]]
        steps.append((block["end_ns"] - block["begin_ns"]) / STEPS / 1e6)
        if kind in REASONS:
            is_right = [rank == 1 and any(reason in what for reason in REASONS[kind]) for rank, what in texts]
            named.setdefault(kind, []).append(bool(is_right) and all(is_right))
        else:
            named.setdefault(kind, []).append(not texts)
        print(f"{parallel} {how} {kind:9} {steps[-1]:6.1f} ms a step: {texts}", *([] if named[kind][-1] else whys), flush=True)
    rows = []
    for kind, held in sorted(named.items()):
        what = "blocks named with their reason" if kind in REASONS else "healthy blocks without a finding"
        least = NAMED if kind in REASONS else 1.0
        rows.append((f"{parallel}, {MARKS[how]}: {kind}: {what}", f"{sum(held)} of {len(held)}", sum(held) >= least * len(held)))
    return rows


def record_late(binary: Path, folder: Path, kinds: list[str], how: str, parallel: str) -> list[tuple[str, str, bool]]:
    """Records the blocks, writes what is true of them, and judges what the detectors say of the recording."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(binary, folder)
    blocks: list[dict[str, Any]] = []
    try:
        blocks.extend(late(recorder, kinds, how, parallel))
    finally:
        # What was recorded until then is worth keeping.
        recorder.stop()
        if blocks:
            keep_truth(folder, blocks, how, parallel)
    return judge_recording(binary, folder, blocks, f"{parallel}, {MARKS[how]}")


def keep_truth(folder: Path, blocks: list[dict[str, Any]], how: str, parallel: str) -> None:
    """Writes what is true of a recording: rank 1 is late in some blocks, and nothing is judged between blocks."""
    times = [(block["begin_ns"], block["end_ns"]) for block in blocks]
    between = [(None, times[0][0]), *((end, begin) for (_, end), (begin, _) in itertools.pairwise(times)), (times[-1][1], None)]
    is_healthy = not {block["kind"] for block in blocks} & set(CAUSES)
    what = f"{'nobody' if is_healthy else 'rank 1'} is late in blocks of {STEPS} steps"

    def true(block: dict[str, Any], finding: str, must: bool, rank: int | None = 1, **more: str) -> dict[str, Any]:
        times = {"begin_unix_nano": block["begin_ns"], "end_unix_nano": block["end_ns"]}
        return {"finding": finding, "rank": rank, **more, **times, "must_find": must}

    late = [true(block, "straggler", True, lag_cause=CAUSES[block["kind"]]) for block in blocks if block["kind"] in CAUSES]
    # The daemon also reports that the rank waits for data.
    waits = [true(block, "input_stall", False) for block in blocks if block["kind"] == "data"]
    # With `watch` nothing marks a checkpoint, so steps with one are slow for a reason that the daemon cannot know.
    saves = [true(block, "slow_steps", False, rank=None) for block in blocks if block["kind"] == "checkpoint" and how == "watch"]
    write_truth(
        folder,
        f"two ranks under {parallel}, {MARKS[how]}; {what} (tests/gpu/culprits.py)",
        {"width": os.environ["WIDTH"], "depth": os.environ["DEPTH"], "lateness": os.environ["LATENESS"]},
        blocks,
        late + waits + saves,
        [stretch(begin_ns, end_ns) for begin_ns, end_ns in (between[::len(times)] if is_healthy else between)],
    )


def judge_recording(binary: Path, folder: Path, blocks: list[dict[str, Any]], title: str) -> list[tuple[str, str, bool]]:
    """A late block is named if a sign of rank 1 was seen in it and none of another rank; a healthy one is silent if none was."""
    evaluated = subprocess.run([binary, "replay-eval", "--json", folder], capture_output=True, text=True, check=True)
    (signs,) = json.loads(evaluated.stdout)["signs"].values()
    named: dict[str, list[bool]] = {}
    causes: dict[str, list[bool]] = {}
    for block in blocks:
        kind, begin, end = block["kind"], block["begin_ns"], block["end_ns"]
        # A sign of what was before the block is not about it, but the readings that show it may have begun a second before.
        seen = [one for one in signs if one["finding"] == "straggler" and begin <= one["seen_unix_nano"] <= end + SLACK_NS]
        seen = [one for one in seen if one["begin_unix_nano"] >= begin - BEFORE_NS]
        ranks, told = {one["rank"] for one in seen}, [one["lag_cause"] for one in seen if one["lag_cause"]]
        if kind in CAUSES:
            named.setdefault(kind, []).append(ranks == {1})
            causes.setdefault(kind, []).append(bool(told) and told[-1] == CAUSES[kind])
        else:
            named.setdefault(kind, []).append(not seen)
        length_ms = (end - begin) / STEPS / 1e6
        print(f"{title}: {kind:9} {length_ms:6.1f} ms a step: {sorted(ranks)} {sorted(set(told))}", flush=True)
        for one in [] if named[kind][-1] else seen[:2]:
            print(f"    {one['what']} {one['why']}", flush=True)
    rows = []
    for kind, held in sorted(named.items()):
        what = "blocks named" if kind in CAUSES else "healthy blocks without a sign"
        least = NAMED if kind in CAUSES else 1.0
        rows.append((f"{title}: {kind}: {what}", f"{sum(held)} of {len(held)}", sum(held) >= least * len(held)))
    for kind, held in sorted(causes.items()):
        rows.append((f"{title}: {kind}: with the cause", f"{sum(held)} of {len(held)}", sum(held) >= NAMED * len(held)))
    return rows


def judge_memory(daemon: measure.Daemon) -> list[tuple[str, str, bool]]:
    rows = []
    for how, words in [
        ("marked", ["ran out of memory in forward of step 20", "it asked for 8.0 GiB"]),
        ("gone", ["seems to have run out of memory", "step 20"]),
        ("crowded", ["it asked for 8.0 GiB", "held 30."]),
        ("healthy", []),
    ]:
        holder = None
        if how == "crowded":
            holder = start(__file__, daemon, "other", "--hold", "30")
            assert holder.stdout is not None
            holder.stdout.readline()
        job = start(__file__, daemon, f"memory-{how}", "--memory", how)
        job.wait(120)
        # What is only suspected takes three seconds.
        time.sleep(5)
        if holder is not None:
            holder.communicate("")
        of_job = [one for one in findings(daemon) if one["finding"] == "oom" and one["job"] == f"memory-{how}"]
        said = " / ".join(f"{one['what']} {one['why']} {one['advice']}" for one in of_job)
        print(f"{how}: {said}", flush=True)
        holds = all(word in said for word in words) and len(of_job) == bool(words)
        rows.append((f"out of memory, {how}", f"{len(of_job)} finding(s)", holds))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--only", choices=["late", "oom"])
    parser.add_argument("--healthy", action="store_true", help="only healthy blocks, of five kinds, in the first part")
    parser.add_argument("--marks", choices=MARKS, action="append", help="only these marks; may be repeated")
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], action="append", help="only this; may be repeated")
    parser.add_argument("--seed", type=int, default=7, help="another order of the blocks")
    parser.add_argument("--model", type=int, nargs=2, metavar=("WIDTH", "DEPTH"), default=[2048, 16], help="of the transformer")
    parser.add_argument("--lateness", type=float, default=1.0, help="how late: 1 is by some 30 to 60 ms of 90")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record the first part into folders below this one")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train[0].split(","), *options.train[1:])
        return 0
    if options.memory:
        memory(options.memory)
        return 0
    if options.hold:
        hold(options.hold)
        return 0
    signal.signal(signal.SIGTERM, interrupted)
    rows: list[tuple[str, str, bool]] = []
    binary = Path(os.environ.get("HIGHWATER", "highwater"))
    kinds = blocks(options.blocks, options.seed, options.healthy)
    os.environ.update(WIDTH=str(options.model[0]), DEPTH=str(options.model[1]), LATENESS=str(options.lateness))
    jobs = [] if options.only == "oom" else list(itertools.product(options.parallel or ["ddp", "fsdp2"], options.marks or MARKS))
    if options.record:
        for parallel, how in jobs:
            folder = options.record / f"{'healthy' if options.healthy else 'late'}-{parallel}-{how.replace(' ', '-')}"
            rows += record_late(binary, folder, kinds, how, parallel)
        jobs = []
    is_late_only = options.only == "late" or options.healthy
    if jobs or not is_late_only:
        with tempfile.TemporaryDirectory() as name:
            daemon = measure.Daemon(binary, Path(name))
            daemon.wait_sampling()
            if not is_late_only:
                rows += judge_memory(daemon)
            for parallel, how in jobs:
                rows += judge_late(daemon, kinds, how, parallel)
            daemon.stop()
    print("\n| what | result | holds |\n|---|---|---|")
    for what, result, holds in rows:
        print(f"| {what} | {result} | {'yes' if holds else '**no**'} |")
    return int(not all(holds for *_, holds in rows))


if __name__ == "__main__":
    sys.exit(main())
