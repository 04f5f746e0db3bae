#!/usr/bin/env python3
"""Records jobs of one GPU with faults for the corpus: flushes of the allocator, waits for data, growing memory, memory that ran out.

Each recording is of one kind of fault, in blocks of steps; between them are blocks without a fault that look alike. Nothing is judged
between blocks. What is true of a block is measured by the job, not planned: that the allocator flushed or failed by PyTorch's
own counters, a wait by the time that the loop waited, growth by what was kept.

- flush: a ballast leaves too little for the pools that PyTorch keeps for two streams; beside it the same in enough memory, and a
  cache that the job empties itself.
- stall: a loader that takes longer than the step; beside it one that is a little faster, and single late batches.
- growth: each step keeps memory; each block is a run of its own. Beside it lengths that vary, caches that are full after a while,
  and memory that is kept for some steps and freed.
- oom: processes that run out of memory, with `watch`, with marks by hand, by an exception that leaves a marked phase or that the
  job catches, or without a word; beside them some that end, are ended, or have used almost all memory.

    HIGHWATER=target/release/highwater python3 tests/gpu/faults.py --record corpus/
    HIGHWATER=target/release/highwater python3 tests/gpu/faults.py --record corpus/ --prefix set-aside- --seed 2 --marks watch --model 1024 24

It needs PyTorch for CUDA and one GPU that nothing else uses. It changes no setting of the GPU. `highwater replay-eval` then prints
what the detectors say of each recording. Without a GPU, `--try` runs all of it on the CPU for a few steps; its recordings mean nothing.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from culprits import Endless, Model
from recorder import ROOT, Recorder, interrupted, of_marks, pack, printed, rose, start, stretch, write_truth

sys.path.insert(0, str(ROOT / "benches" / "gpu" / "record"))

MIB, GIB = 1 << 20, 1 << 30
LENGTHS = tuple(range(384, 1025, 64))
# Steps after each block that are not judged.
BETWEEN = 15
# A share of the time of a block's steps that waits for data: from the one on it must be found, from the other on it may.
MUST_WAIT, MAY_WAIT = 0.4, 0.2
# A share of the GPU's memory: growth by less need not be found (docs/findings.md).
MUST_GROW = 0.01


class Job:
    """A transformer that is trained on one GPU."""

    def __init__(self, by_hand: bool, has_counters: bool = True, model: tuple[int, int] | None = None) -> None:
        import torch
        from device_memory import open_driver
        from loader import Loader
        from memory import DeviceMemory, PretendedMemory

        import highwater
        import highwater.torch

        self.torch, self.highwater, self.by_hand = torch, highwater, by_hand
        width, depth = model or (int(os.environ["WIDTH"]), int(os.environ["DEPTH"]))
        self.width, self.is_real = width, torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_real else torch.device("cpu")
        self.memory = DeviceMemory(self.device, open_driver()) if self.is_real else PretendedMemory()
        self.lengths = LENGTHS if self.is_real else (16, 24, 32)
        if by_hand and has_counters and self.is_real:
            highwater.configure(counters=self.counters)
        self.model = Model(torch, width, depth).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.is_real)
        self.tokens = self.lengths[-1]
        self.loader = Loader(lambda: None)
        loader: Any = Endless(self.batches())
        if not by_hand:
            loader = torch.utils.data.DataLoader(loader, batch_size=None)
            self.watch = highwater.torch.watch(self.model, self.optimizer, loader)
        self.inputs = iter(loader) if not by_hand else self.batches()
        # Called in forward.
        self.in_forward: Any = lambda: None
        self.model[depth // 2].register_forward_pre_hook(lambda *_: self.in_forward())
        self.steps = 0
        self.waited_ns = 0

    def counters(self) -> dict[str, int]:
        """The allocator's, by the names of marks."""
        return of_marks(self.memory.counters())

    def batches(self) -> Iterator[Any]:
        """Random inputs, each once the loader has made one."""
        while True:
            before_ns = time.perf_counter_ns()
            self.loader.next()
            self.waited_ns = time.perf_counter_ns() - before_ns
            yield self.torch.randn(4, self.tokens, self.width, device=self.device)

    def phase(self, name: str) -> Any:
        """Marked by hand, or by `watch`."""
        return self.highwater.phase(name) if self.by_hand else contextlib.nullcontext()

    def finish(self) -> None:
        """Waits for the device."""
        self.memory.synchronize()

    def step(self, tokens: int | None = None, number: int | None = None, may_fail: bool = False) -> dict[str, Any]:
        """One step. Returns its times, what the allocator counted in it, and how long it waited for data, nanoseconds."""
        self.tokens = tokens or self.lengths[-1]
        before, begin_ns = self.memory.counters(), time.time_ns()
        try:
            with self.highwater.step(self.steps if number is None else number) if self.by_hand else contextlib.nullcontext():
                self.passes()
        except self.torch.OutOfMemoryError:
            if not may_fail:
                raise
        # Outside the handler, whose exception holds tensors.
        counted = rose(before, self.memory.counters())
        self.steps += 1
        if counted["ooms"]:
            self.optimizer.zero_grad()
        return {"begin_ns": begin_ns, "end_ns": time.time_ns(), "waited_ns": self.waited_ns, **counted}

    def passes(self) -> None:
        """What a step does."""
        with self.phase("data"):
            inputs = next(self.inputs)
            self.finish()
        with self.phase("forward"):
            with self.torch.autocast(self.device.type, self.torch.bfloat16):
                loss = self.model(inputs).float().square().mean()
            self.finish()
        with self.phase("backward"):
            loss.backward()
            self.finish()
        with self.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.finish()

    def warm_up(self) -> None:
        """Runs each length once."""
        for tokens in (*self.lengths, self.lengths[-1], *[None] * 10):
            self.step(tokens)

    def close(self) -> None:
        """Sends what is left."""
        self.loader.close()
        self.highwater.flush(5)

    def block(self, kind: str, steps: list[dict[str, Any]], truths: list[dict[str, Any]]) -> None:
        """Prints what a block was."""
        times = {"begin_ns": steps[0]["begin_ns"], "end_ns": steps[-1]["end_ns"]}
        print(json.dumps({"kind": kind, **times, "steps": len(steps), "truths": truths}), flush=True)


def half() -> tuple[int, int]:
    """A model with shorter steps."""
    return int(os.environ["WIDTH"]) // 2, int(os.environ["DEPTH"]) // 2


def true(finding: str, steps: list[dict[str, Any]], must: bool) -> dict[str, Any]:
    """A truth over these steps."""
    times = {"begin_unix_nano": steps[0]["begin_ns"], "end_unix_nano": steps[-1]["end_ns"]}
    return {"finding": finding, "rank": 0, **times, "must_find": must}


# The jobs of one process. Each prints its blocks.


def flush(by_hand: bool, blocks: int, pick: random.Random) -> None:
    """Steps in memory that is too small for what is cached."""
    job = Job(by_hand)
    job.warm_up()
    kinds = ["tight"] * blocks + ["roomy", "emptied"] * (blocks // 2)
    pick.shuffle(kinds)
    for kind in kinds:
        job.memory.leave(40 * GIB)
        kept = job.memory.clear_cache()
        job.step()
        need = job.memory.peak_reserved() - kept
        if kind == "tight":
            job.memory.clear_cache()
            job.memory.leave(int(need * pick.uniform(1.05, 1.2)) + 512 * MIB)
        for _ in range(BETWEEN):
            job.step(may_fail=True)
        every, share = pick.randrange(3, 9), pick.uniform(0.5, 0.8)
        rare = job.torch.cuda.empty_cache if kind == "emptied" else lambda bytes=int(need * share): job.memory.auxiliary(bytes)
        steps: list[dict[str, Any]] = []
        while len(steps) < 40 and sum(step["retries"] > 0 for step in steps) < 10:
            if job.is_real and len(steps) % every == every - 1:
                job.in_forward = rare
            steps.append(job.step(pick.choice(job.lengths), may_fail=True))
            job.in_forward = lambda: None
            if steps[-1]["ooms"]:
                job.memory.relieve(512 * MIB)
        truths = [true("allocator_thrash", [step], must=True) for step in steps if step["retries"]]
        truths += [true("oom", [step], must=True) for step in steps if step["ooms"]]
        if kind == "tight":
            truths.append(true("low_headroom", steps, must=False))
        job.block(kind, steps, truths)
    job.memory.leave(40 * GIB)
    job.close()


def stall(by_hand: bool, blocks: int, pick: random.Random) -> None:
    """Steps that wait for their data, or hardly."""
    job = Job(by_hand)
    job.warm_up()
    timed = [job.step() for _ in range(10)]
    usual_s = sorted(step["end_ns"] - step["begin_ns"] for step in timed)[5] / 1e9
    kinds = ["slow"] * blocks + ["close", "single"] * (blocks // 4)
    pick.shuffle(kinds)
    for kind in kinds:
        factor = {"slow": pick.uniform(1.8, 4.0), "close": pick.uniform(0.5, 0.9), "single": 0.3}[kind]
        steps: list[dict[str, Any]] = []
        for at in range(12):
            # What was made ahead is used first.
            is_late = kind == "single" and at in (3, 4)
            job.loader.seconds = usual_s * (2.5 if is_late else factor)
            steps.append(job.step())
        # Until the batches that were ready are used, nothing waits.
        judged = steps[2:]
        waited = sum(step["waited_ns"] for step in judged) / sum(step["end_ns"] - step["begin_ns"] for step in judged)
        truths = [true("input_stall", judged, must=waited >= MUST_WAIT)] if waited >= MAY_WAIT or kind == "single" else []
        job.block(kind, judged, truths)
        job.loader.seconds = 0.0
        for _ in range(BETWEEN):
            job.step()
    job.close()


def growth(by_hand: bool, blocks: int, pick: random.Random) -> None:
    """Runs in which memory grows, or rises and falls."""
    job = Job(by_hand, model=half())
    job.warm_up()
    total = job.torch.cuda.get_device_properties(0).total_memory if job.is_real else 0
    kinds = ["leaks"] * blocks + ["lengths", "cached", "sawtooth"] * (blocks // 6)
    pick.shuffle(kinds)
    for kind in kinds:
        kept: list[Any] = []
        each = int(2 ** pick.uniform(5, 9)) * MIB if job.is_real else 64
        onset, often = pick.randrange(10, 41), pick.choice([1, 1, 2, 4])

        def keep(mine: list[Any] = kept, each: int = each) -> None:
            mine.append(job.torch.empty(each, dtype=job.torch.uint8, device=job.device))

        steps: list[dict[str, Any]] = []
        for number in range(onset + 90):
            grows = number >= onset and number % often == 0
            if kind == "leaks" or (kind == "cached" and len(kept) < 12) or kind == "sawtooth":
                job.in_forward = keep if grows else lambda: None
            if kind == "sawtooth" and number % 16 == 15:
                kept.clear()
            tokens = pick.choice(job.lengths) if kind == "lengths" else None
            steps.append(job.step(tokens, number))
        job.in_forward = lambda: None
        is_much = sum(tensor.nbytes for tensor in kept) >= MUST_GROW * total
        truths = [true("memory_growth", steps[onset:], must=is_much)] if kind == "leaks" else []
        # Memory that is kept for a while in the first steps has risen until then.
        if kind == "cached":
            truths.append(true("memory_growth", steps[onset : onset + 12 * often], must=False))
        job.block(kind, steps[3:], truths)
        kept.clear()
        job.memory.clear_cache()
    job.close()


# Processes that run out of memory.
OOMS = ("watched", "marked", "raised", "caught", "gone")
OTHERS = ("ends", "killed", "stopped", "full")


def one_oom(how: str, seed: int) -> None:
    """One process, which meets its end in some step. Prints its last block."""
    pick = random.Random(seed)
    job = Job(by_hand=how != "watched", has_counters=how == "caught", model=half())
    torch, steps, kept = job.torch, [], []
    for _ in range(5):
        job.step()
    last, chunk = pick.randrange(6, 14), pick.choice([1, 2, 4, 8]) * GIB

    def fill(leave: int) -> None:
        if job.is_real:
            kept.append(torch.empty(max(torch.cuda.mem_get_info()[0] - leave, MIB), dtype=torch.uint8, device=job.device))

    def run_out() -> None:
        if not job.is_real:
            raise torch.OutOfMemoryError("pretended")
        while True:
            kept.append(torch.empty(chunk, dtype=torch.uint8, device=job.device))

    fill(pick.randrange(6, 30) * GIB if how != "full" else GIB + 256 * MIB)
    for at in range(last + 1):
        time.sleep(0.03)
        begin_ns = time.time_ns()
        if at == last and how in ("killed", "stopped", "gone"):
            if how == "gone":
                fill(pick.randrange(16, 257) * MIB)
            job.in_forward = lambda: end_in_the_middle(job, how, begin_ns)
        elif at == last and how in OOMS:
            say(how, begin_ns, "oom")
            job.in_forward = run_out
        try:
            steps.append(job.step())
        except torch.OutOfMemoryError:
            if how in ("raised", "watched"):
                raise
            if how == "marked":
                job.highwater.mark("oom", requested=chunk)
        if how == "caught" and at == last:
            # It goes on with less.
            kept.clear()
            job.in_forward = lambda: None
            job.memory.clear_cache()
            for _ in range(5):
                job.step()
    if how not in OOMS:
        say(how, steps[0]["begin_ns"], None)
    job.close()


def say(how: str, begin_ns: int, finding: str | None) -> None:
    """Prints the block that ends with the process."""
    print(json.dumps({"kind": how, "begin_ns": begin_ns, "finding": finding}), flush=True)


def end_in_the_middle(job: Job, how: str, begin_ns: int) -> None:
    """Ends this process in a step, or has it ended."""
    say(how, begin_ns, "oom" if how == "gone" else None)
    job.highwater.flush(5)
    time.sleep(0.3)
    if how == "gone":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGTERM)
    time.sleep(10)


def ooms(count: int, seed: int) -> None:
    """One process after the other; each is a block. They are forks of this one, because importing PyTorch takes longer than all else."""
    # A process in which CUDA was asked for anything cannot be forked, so this only imports.
    import torch  # noqa: F401

    kinds = [*OOMS] * count + [*OTHERS] * (count // 2)
    random.Random(seed).shuffle(kinds)
    for at, how in enumerate(kinds):
        said = forked(f"oom-{how}-{at}", how, seed * 1000 + at)
        end_ns = time.time_ns()
        # What is only suspected takes three seconds. The next process needs one to begin.
        time.sleep({"gone": 2.2, "killed": 3.5, "stopped": 3.5}.get(how, 0.5))
        truth = {"finding": "oom", "rank": 0, "begin_unix_nano": said["begin_ns"], "end_unix_nano": end_ns, "must_find": True}
        besides = ["low_headroom", *(["allocator_thrash"] if said["finding"] else [])]
        truths = [truth] if said["finding"] else []
        truths += [{**truth, "finding": finding, "must_find": False} for finding in besides if truths or how == "full"]
        block = {"kind": how, "begin_ns": said["begin_ns"], "end_ns": time.time_ns(), "steps": 0, "truths": truths}
        print(json.dumps(block), flush=True)


def forked(job: str, how: str, seed: int) -> dict[str, Any]:
    """Runs one process to its end. Returns what it printed last."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writes, 1)
        os.environ["HIGHWATER_JOB"] = job
        try:
            one_oom(how, seed)
        except BaseException as error:
            print(f"{job}: {type(error).__name__}", file=sys.stderr, flush=True)
        # As at the end of a program.
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as output:
        lines = [line for line in output if line.startswith("{")]
    os.waitpid(child, 0)
    if not lines:
        raise SystemExit(f"a process that was to be {how} said nothing")
    said: dict[str, Any] = json.loads(lines[-1])
    return said


# The recordings.


def record(binary: Path, folder: Path, kind: str, options: argparse.Namespace) -> None:
    """Records one kind, and writes what is true of it."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(binary, folder, *(["--source", "sim"] if options.try_ else []))
    count = {"flush": 8, "stall": 50, "growth": 48, "oom": 10}[kind]
    count = options.count or count
    count = 6 if options.try_ and kind != "oom" else 1 if options.try_ else count
    job = start(__file__, recorder, f"{kind}-{options.marks}", "--job", kind, options.marks, str(count), str(options.seed))
    blocks: list[dict[str, Any]] = []
    try:
        for block in printed(job):
            blocks.append(block)
        if job.wait(60):
            raise SystemExit(f"the job of {kind} failed")
    finally:
        # What was recorded until then is worth keeping.
        job.kill()
        recorder.stop()
        if blocks:
            keep(folder, kind, blocks, options)


def keep(folder: Path, kind: str, blocks: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Packs the recording, and writes what is true of it; nothing is judged between blocks."""
    begins = [block["begin_ns"] for block in blocks]
    ends = [block["end_ns"] for block in blocks]
    between = zip([None, *ends], [*begins, None], strict=True)
    how = "" if kind == "oom" else f", marks {'by hand' if options.marks == 'hand' else 'of watch'}"
    write_truth(
        folder,
        f"one rank, {kind}{how} (tests/gpu/faults.py)",
        dict(zip(("width", "depth"), options.model, strict=True)),
        blocks,
        [one for block in blocks for one in block["truths"]],
        [stretch(begin_ns, end_ns) for begin_ns, end_ns in between],
    )
    pack(folder)


KINDS = ("flush", "stall", "growth", "oom")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record into folders below this one")
    parser.add_argument("--only", choices=KINDS, action="append", help="only this kind; may be repeated")
    parser.add_argument("--marks", choices=["hand", "watch"], default="hand", help="who marks, but in oom and growth")
    parser.add_argument("--prefix", default="", help="of the folders' names")
    parser.add_argument("--seed", type=int, default=1, help="another order and other amounts")
    parser.add_argument("--model", type=int, nargs=2, metavar=("WIDTH", "DEPTH"), default=[1536, 12], help="of the transformer")
    parser.add_argument("--count", type=int, help="blocks with a fault, or of oom processes of each kind")
    parser.add_argument("--try", dest="try_", action="store_true", help="a few steps on the CPU, beside the simulator")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupted)
    if options.job:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kind, marks, count, seed = options.job
        # Step numbers that begin again, as in a job that is run again, are set by hand.
        by_hand = marks == "hand" or kind == "growth"
        if kind == "oom":
            ooms(int(count), int(seed))
        else:
            {"flush": flush, "stall": stall, "growth": growth}[kind](by_hand, int(count), random.Random(int(seed)))
        return 0
    if options.record is None:
        parser.error("--record FOLDER is missing")
    binary = Path(os.environ.get("HIGHWATER", "highwater"))
    if options.try_:
        options.model = [32, 2]
    os.environ.update(WIDTH=str(options.model[0]), DEPTH=str(options.model[1]))
    folders = []
    for kind in options.only or KINDS:
        folder = options.record / f"{options.prefix}faults-{kind}"
        began = time.monotonic()
        record(binary, folder, kind, options)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder}: {time.monotonic() - began:.0f} s, {size / MIB:.1f} MiB", flush=True)
        folders.append(folder)
    return subprocess.run([binary, "replay-eval", *folders], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
