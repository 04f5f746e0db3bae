"""Whether `highwater.torch.watch` reports the truth, and what it costs.

In one command, in some ten minutes:

- truth: a DDP job, the same with rank 1 slowed in its backward pass, and an FSDP2 job run under `watch` and torch.profiler at
  once. Phases are compared with the work that was launched in them, `comm` with the union of the times at which collectives
  were in flight, and for information (`nccl`) with the union of NCCL's kernels.
- cost: step times with and without `watch`. Steps of about 30 ms, and DDP, of one rank where there is one GPU, run in
  interleaved blocks in random order; the ratio is the median over rounds, with its bootstrap 95 % interval. Where Python is the
  bound, its speed changes by some per cent from second to second: steps of about 1.5 and 4 ms run in pairs, a step of a model
  that is watched beside one of an equal model that is not, in random order, and each of the two is watched for half of the pairs; the
  ratio is that of the sums, with the interval by resampling of rows of 50 pairs. The steps in which `watch` measures what it costs are not timed.
- layers: resnet50, batch 16, against the records of FairScale's tracker.
- named: with HIGHWATER, a DDP job whose rank 1 is late in its backward pass runs beside that daemon, which must name it.

    python3 watch.py --gpus 2 --out results/
    python3 watch.py --gpus 2 --share-gpu --out results/
    python3 watch.py --gpus 2 --parts truth --keep --out results/
    python3 watch.py --dry-run --out /tmp/results

The other parts' marks go to a socket of this program. It prints tables and writes results.json; with --keep also the marks
and the profiler's traces of the part truth.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gzip
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PYTHON = HERE.parent.parent.parent / "python"
sys.path[:0] = [str(PYTHON), str(PYTHON / "tests")]
import harm  # noqa: E402
import measure  # noqa: E402
from listeners import Listener  # noqa: E402

Span = tuple[int, int]
PARTS = ["truth", "cost", "cost-ddp", "layers", "named"]
PHASES = ("forward", "loss", "backward", "optimizer")
GAP_NS = 20_000
WARM_STEPS, TRUE_STEPS = 8, 10
SETTLING = 160
# Step length, as a name; width, layers, batch and length of the model; steps of a block, and rounds; or 0, and pairs of steps.
COSTS = [("1.5 ms", (256, 1, 8, 128), 0, 6000), ("4 ms", (256, 4, 8, 128), 0, 3000), ("30 ms", (2048, 6, 8, 1024), 60, 6)]
COSTS_DDP = [("ddp 30 ms", (2048, 6, 8, 1024), 60, 6)]
# Pairs that are resampled together, as many as have some marked steps; and by what times the median a step counts at most: another
# process had the processor.
ROW, MOST_TIMES = 50, 3.0
# Enough for the detectors to know the job's usual step.
LATE_STEPS, LATE_MS = 60, 40.0


def union(spans: list[Span]) -> list[Span]:
    """Intervals without overlap, with gaps below GAP_NS closed, as `watch` closes them."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin - merged[-1][1] < GAP_NS:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def total_ns(spans: list[Span]) -> int:
    return sum(end - begin for begin, end in spans)


# In the processes of the job.


def build(torch: Any, arguments: argparse.Namespace, width: int, layers: int) -> Any:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.attention = torch.nn.Linear(width, 3 * width, bias=False)
            self.out = torch.nn.Linear(width, width, bias=False)
            self.mlp = torch.nn.Sequential(
                torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
            )

        def forward(self, x: Any) -> Any:
            heads = width // min(64, width)
            parts = self.attention(self.norm(x)).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.mlp(x)

    torch.manual_seed(0)
    dtype = torch.float32 if arguments.dry_run else torch.bfloat16
    return torch.nn.Sequential(*(Block() for _ in range(layers))).to(device_of(torch, arguments), dtype)


def device_of(torch: Any, arguments: argparse.Namespace) -> Any:
    if arguments.dry_run:
        return torch.device("cpu")
    return torch.device("cuda", 0 if arguments.share_gpu else int(os.environ.get("LOCAL_RANK", "0")))


def slow_down(torch: Any, model: Any, milliseconds: float) -> None:
    """Adds work to each backward pass, by a hook on a gradient in the middle."""

    def late(gradient: Any) -> None:
        if gradient.is_cuda:
            torch.cuda._sleep(int(milliseconds * 1.5e6))
        else:
            time.sleep(milliseconds / 1e3)

    def after(module: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(late)

    model[len(model) // 2].register_forward_hook(after)


def true_job(name: str, arguments: argparse.Namespace) -> None:
    """One job under `watch` and the profiler; writes what the profiler saw."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, record_function

    import highwater

    rank, device = int(os.environ["RANK"]), device_of(torch, arguments)
    width, layers, batch, length = (2048, 12, 8, 1024)
    if arguments.dry_run:
        width, layers, batch, length = (32, 4, 2, 16)
    elif arguments.share_gpu:
        width, layers = 1024, 6
    highwater.configure(job=name)
    inner = build(torch, arguments, width, layers)
    if name == "ddp-slow" and rank == 1:
        slow_down(torch, inner, 20.0)
    if name.startswith("ddp"):
        on = None if arguments.dry_run else [device.index]
        model: Any = DistributedDataParallel(inner, device_ids=on)
    else:
        from torch.distributed.fsdp import fully_shard

        model = inner
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = torch.randn(batch, length, width, device=device, dtype=next(model.parameters()).dtype)
    # The loss of a language model, outside of it, as most jobs have it.
    head = torch.randn(width, 16 if arguments.dry_run else 8192, device=device, dtype=x.dtype)
    words = torch.randint(head.shape[1], (batch * length,), device=device)
    activities = [ProfilerActivity.CPU] + ([] if arguments.dry_run else [ProfilerActivity.CUDA])
    with highwater.torch.watch(model, optimizer, layers_every=0, steps_every=1):
        profiler = profile(activities=activities)
        for number in range(WARM_STEPS + TRUE_STEPS):
            if number == WARM_STEPS:
                profiler.start()
            with record_function(f"hw#forward#{number}"):
                out = model(x)
            with record_function(f"hw#loss#{number}"):
                loss = torch.nn.functional.cross_entropy((out @ head).float().flatten(0, 1), words)
            with record_function(f"hw#backward#{number}"):
                loss.backward()
            with record_function(f"hw#optimizer#{number}"):
                optimizer.step()
            optimizer.zero_grad()
        if not arguments.dry_run:
            torch.cuda.synchronize()
        profiler.stop()
    highwater.flush(5)
    path = Path(arguments.out) / f"trace-{name}-{rank}.json"
    profiler.export_chrome_trace(str(path))
    text = path.read_text()
    truth = truth_of(json.loads(text), is_cpu=arguments.dry_run)
    path.unlink()
    if arguments.keep:
        (Path(arguments.out) / f"{path.name}.gz").write_bytes(gzip.compress(text.encode(), 6))
    (Path(arguments.out) / f"truth-{name}-{rank}.json").write_text(json.dumps(truth))


def same_job(arguments: argparse.Namespace) -> bool:
    """Whether DDP computes the same gradients with `watch` as without, bit for bit."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import highwater

    device, computed = device_of(torch, arguments), []
    for is_watched in (False, True):
        torch.manual_seed(1)
        layers = [part for _ in range(4) for part in (torch.nn.Linear(512, 512), torch.nn.GELU())]
        inner = torch.nn.Sequential(*layers).to(device)
        model = DistributedDataParallel(inner, device_ids=None if arguments.dry_run else [device.index])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(int(os.environ["RANK"]))
        with highwater.torch.watch(model, optimizer, layers_every=0, steps_every=1) if is_watched else contextlib.nullcontext():
            for number in range(4):
                model(torch.randn(64, 512, device=device)).square().sum().backward()
                if number < 3:
                    optimizer.step()
                    optimizer.zero_grad()
        computed.append(torch.cat([each.detach().flatten() for own in model.parameters() for each in (own, own.grad)]))
    return torch.equal(*computed)


def late_job(arguments: argparse.Namespace) -> None:
    """Two ranks, of which rank 1 is late in its backward passes, with `watch` alone."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import highwater

    device = device_of(torch, arguments)
    width, layers, batch, length = (32, 4, 2, 16) if arguments.dry_run else (512, 4, 8, 512)
    highwater.configure(job="late")
    inner = build(torch, arguments, width, layers)
    if os.environ["RANK"] == "1":
        slow_down(torch, inner, LATE_MS)
    model = DistributedDataParallel(inner, device_ids=None if arguments.dry_run else [device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = torch.randn(batch, length, width, device=device, dtype=next(model.parameters()).dtype)
    with highwater.torch.watch(model, optimizer, layers_every=0):
        for _ in range(LATE_STEPS):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    highwater.flush(5)


def truth_of(trace: dict[str, Any], is_cpu: bool) -> dict[str, dict[str, list[Any]]]:
    """By step and phase, Unix nanoseconds: from where the host is in the phase and the one before is over, to the end of its last
    work on any stream, since a pass is over once its reductions are. The one before is over with its work, or earlier, where work
    of this one begins after its computation: what is gathered ahead of a pass on a stream of its own is no part of it. `comm` has the times at which collectives were
    in flight, from when the job had called them and their input was ready, and `nccl` those of NCCL's kernels, which begin once the job's own kernels leave
    them room. On a CPU, the ranges themselves."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]

    def span(event: dict[str, Any]) -> tuple[int, int]:
        begin = base + int(float(event["ts"]) * 1000)
        return begin, begin + int(float(event["dur"]) * 1000)

    ranges = sorted(
        (*span(event), *event["name"].split("#")[1:])
        for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("hw#")
    )
    begins = [each[0] for each in ranges]
    found: dict[str, dict[str, list[Any]]] = {}
    if is_cpu:
        for begin, end, phase, step in ranges:
            found.setdefault(step, {})[phase] = [begin, end]
        return found
    launches = {
        event["args"]["correlation"]: span(event)[0] for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    computation = statistics.mode(event["args"]["stream"] for event in work)
    # In the order of the host: when each was launched, its times, its stream, whether it is NCCL's.
    launched = sorted(
        (launches[event["args"]["correlation"]], *span(event), event["args"]["stream"], "nccl" in event["name"].lower())
        for event in work if event["args"].get("correlation") in launches
    )
    # By range, when the first of its work began and the last ended, also of its computation; by step, its collectives.
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    computed: dict[int, int] = {}
    in_flight: dict[str, list[Span]] = {}
    kernels: dict[str, list[Span]] = {}
    calls = sorted(span(event) for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("c10d::"))

    def called(at_host: int) -> int:
        """When the host began the call that launched a collective."""
        begin, end = calls[max(0, bisect.bisect_right(calls, (at_host, at_host)) - 1)] if calls else (0, 0)
        return begin if begin <= at_host <= end else at_host

    # What was launched last that is not NCCL's makes a collective's input; collectives of one stream wait for each other.
    ready, free = 0, {}
    for at_host, begin, end, stream, is_nccl in launched:
        input_ready = max(called(at_host), ready, free.get(stream, 0))
        if is_nccl:
            free[stream] = end
        else:
            ready = end
        at = bisect.bisect_right(begins, at_host) - 1
        if at < 0 or at_host > ranges[at][1]:
            continue
        began[at], ended[at] = min(began.get(at, begin), begin), max(ended.get(at, 0), end)
        if is_nccl:
            kernels.setdefault(ranges[at][3], []).append((begin, end))
            in_flight.setdefault(ranges[at][3], []).append((min(input_ready, begin), end))
        if stream == computation:
            computed[at] = max(computed.get(at, 0), end)
    for at, end in ended.items():
        phase, step = ranges[at][2:]
        over = max(computed.get(at - 1, 0), min(began[at], ended.get(at - 1, 0)))
        found.setdefault(step, {})[phase] = [max(begins[at], over), end]
    for name, by_step in (("comm", in_flight), ("nccl", kernels)):
        for step, spans in by_step.items():
            found.setdefault(step, {})[name] = union(spans)
    return found


def timed_blocks(name: str, conditions: dict[str, Any], steps: int, rounds: int, wait: Any) -> dict[str, Any]:
    """Milliseconds a step of each condition by round; a condition is a context in which steps run. Of those that are watched,
    the first SETTLING steps are not timed: all of some and half of others are marked."""
    table: dict[int, dict[str, float]] = {}
    for number, condition in harm.order(list(conditions), rounds, seed=7):
        with conditions[condition]() as step:
            for _ in range(1 if condition == harm.BASELINE else SETTLING):
                step()
            wait()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            wait()
            table.setdefault(number, {})[condition] = (time.perf_counter() - began) / steps * 1e3
    outcome: dict[str, Any] = {}
    for condition in conditions:
        own = [row[condition] for row in table.values()]
        outcome[condition] = {"milliseconds": statistics.median(own)}
        if condition != harm.BASELINE:
            ratios = [row[condition] / row[harm.BASELINE] for row in table.values()]
            low, high = harm.bootstrap(ratios)
            outcome[condition] |= {"ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high}
    return {"name": name, "steps": steps, "rounds": rounds, "conditions": outcome}


def timed_pairs(name: str, jobs: list[Any], pairs: int, wait: Any, others: list[int]) -> dict[str, Any]:
    """The same of steps one by one, a watched one beside one that is not. Each is waited for. Two equal models differ by half a
    per cent, by where they lie in memory: each is watched for half of the pairs. `others` adds up the nanoseconds of steps that are
    not watched: the watch, which chooses by the time of its steps how many it marks, has a clock without them."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for nth in range(len(jobs)):
        watched, plain = jobs[nth], jobs[nth - 1]
        with watched(True) as watched_step, plain(False) as plain_step:
            steps = {False: plain_step, True: watched_step}
            for count in range(SETTLING + pairs // len(jobs)):
                for is_watched in random.sample([False, True], 2):
                    wait()
                    began = time.perf_counter_ns()
                    steps[is_watched]()
                    wait()
                    took = time.perf_counter_ns() - began
                    others[0] += 0 if is_watched else took
                    if count >= SETTLING:
                        times[is_watched].append(took / 1e6)
    most = MOST_TIMES * statistics.median(times[False])
    cut = {is_watched: [min(each, most) for each in own] for is_watched, own in times.items()}
    rows = range(0, len(cut[True]), ROW)
    sums = [(sum(cut[True][nth: nth + ROW]), sum(cut[False][nth: nth + ROW])) for nth in rows]
    low, high = harm.bootstrap(sums, ratio_of_sums)
    off, watch = ({"milliseconds": statistics.mean(cut[is_watched])} for is_watched in (False, True))
    for outcome, own in ((off, times[False]), (watch, times[True])):
        outcome["longer"] = sum(each > most for each in own)
    watch |= {"ratio": ratio_of_sums(sums), "ratio_low": low, "ratio_high": high}
    return {"name": name, "pairs": pairs, "conditions": {harm.BASELINE: off, "watch": watch}}


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(watched for watched, _ in pairs) / sum(plain for _, plain in pairs)


def costs(arguments: argparse.Namespace, is_ddp: bool) -> list[dict[str, Any]]:
    """Step times with and without `watch`."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import highwater

    device = device_of(torch, arguments)
    wait = (lambda: None) if arguments.dry_run else torch.cuda.synchronize
    found, others = [], [0]

    def without_others() -> int:
        return time.perf_counter_ns() - others[0]

    wanted = set(arguments.only.split(",")) - {""}
    for name, sizes, steps, rounds in COSTS_DDP if is_ddp else COSTS:
        if wanted and name not in wanted:
            continue
        if arguments.dry_run:
            sizes, steps, rounds = (32, 2, 2, 16), min(steps, 20), 3 if steps else 200
        highwater.configure(job=f"cost-{name}")

        def job(sizes: tuple[int, ...]) -> Any:
            width, layers, batch, length = sizes
            model = build(torch, arguments, width, layers)
            if is_ddp:
                # A hook on DDP stays: each condition has a model of its own.
                model = DistributedDataParallel(model, device_ids=None if arguments.dry_run else [device.index])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not arguments.dry_run)
            x = torch.randn(batch, length, width, device=device, dtype=next(model.parameters()).dtype)

            def step() -> None:
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            step()

            @contextlib.contextmanager
            def running(is_watched: bool) -> Any:
                if not is_watched:
                    yield step
                    return
                with highwater.torch.watch(model, optimizer) as handle:
                    handle.loop.pace.now = handle.counters.now = without_others
                    yield step

            return running

        jobs = [job(sizes), job(sizes)]
        if steps:
            conditions = {"off": lambda: jobs[0](False), "watch": lambda: jobs[1](True)}
            found.append(timed_blocks(name, conditions, steps, rounds, wait))
        else:
            found.append(timed_pairs(name, jobs, rounds, wait, others))
        print(json.dumps(found[-1]), flush=True)
        highwater.flush(5)
        del jobs
    return found


def resnet(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs resnet50 once under `watch`; what it recorded comes over the socket."""
    try:
        import torch
        import torchvision
    except ImportError as error:
        return {"skipped": str(error)}
    import highwater

    device = device_of(torch, arguments)
    highwater.configure(job="resnet")
    model = torchvision.models.resnet50(weights=None).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with highwater.torch.watch(model, optimizer, layers_every=1):
        model(torch.rand(16, 3, 224, 224, device=device)).sum().backward()
        optimizer.step()
    highwater.flush(5)
    return {}


def worker(arguments: argparse.Namespace) -> None:
    import torch

    rank = int(os.environ["RANK"])
    if not arguments.dry_run:
        torch.cuda.set_device(device_of(torch, arguments))
    found: dict[str, Any] = {}
    if arguments.worker != "one":
        import torch.distributed as dist

        dist.init_process_group("gloo" if arguments.dry_run else "nccl")
    if arguments.worker == "late":
        late_job(arguments)
        dist.destroy_process_group()
    elif arguments.worker in ("many", "alone"):
        if "truth" in arguments.parts and arguments.worker == "many":
            for name in ("ddp", "ddp-slow", "fsdp2"):
                true_job(name, arguments)
                dist.barrier()
            found["same"] = same_job(arguments)
        # Of two processes that take turns on one GPU, the time of a step says nothing of cost: one is then measured alone.
        is_costly = "cost-ddp" in arguments.parts and arguments.share_gpu == (arguments.worker == "alone")
        found["costs"] = costs(arguments, is_ddp=True) if is_costly else []
        dist.barrier()
        dist.destroy_process_group()
    else:
        found["costs"] = costs(arguments, is_ddp=False) if "cost" in arguments.parts else []
        found["resnet"] = resnet(arguments) if "layers" in arguments.parts else {"skipped": "not asked for"}
    if rank == 0:
        (Path(arguments.out) / f"{arguments.worker}.json").write_text(json.dumps(found))


# In the command's process.


def launch(kind: str, ranks: int, arguments: argparse.Namespace, path: str, limit_s: float) -> str | None:
    """Runs the processes of one part; returns what went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(HERE), "--worker", kind, "--out", str(arguments.out), "--parts", *arguments.parts]
    command += ["--only", arguments.only]
    command += ["--dry-run"] if arguments.dry_run else []
    command += ["--keep"] if arguments.keep else []
    common = {**os.environ, "HIGHWATER_ANNOTATIONS_SOCKET": path, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = port
    common.setdefault("OMP_NUM_THREADS", "1")
    if arguments.share_gpu:
        command += ["--share-gpu"]
        # NCCL refuses two ranks of one host on one GPU.
        common |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    running = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **({"NCCL_HOSTID": f"rank{rank}"} if arguments.share_gpu else {})}
        running.append(subprocess.Popen(command, env={**common, **own}))
    deadline = time.monotonic() + limit_s
    wrong = None
    for rank, process in enumerate(running):
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
            wrong = wrong or (f"rank {rank} of {kind} ended with {code}" if code else None)
        except subprocess.TimeoutExpired:
            wrong = wrong or f"rank {rank} of {kind} did not end within {limit_s:.0f} s"
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()
    return wrong


def named(arguments: argparse.Namespace, folder: str, wrong: list[str]) -> list[dict[str, Any]] | None:
    """What the daemon in HIGHWATER finds in the late job; none without a daemon or without a second rank."""
    binary = os.environ.get("HIGHWATER")
    if binary is None or arguments.gpus < 2 or "named" not in arguments.parts:
        return None
    source = "sim" if arguments.dry_run else "nvml"
    daemon = measure.Daemon(Path(binary), Path(folder), arguments=["--source", source])
    try:
        daemon.wait_sampling()
        failed = launch("late", 2, arguments, str(daemon.socket), arguments.limit)
        wrong += [failed] if failed else []
        # The detectors judge a step once all its ranks' marks are there.
        deadline = time.monotonic() + 10
        found: list[dict[str, Any]] = []
        while time.monotonic() < deadline and not any(one["finding"] == "straggler" for one in found):
            time.sleep(0.2)
            found = [one for one in json.loads(daemon.get("/api/v1/findings"))["findings"] if one["job"] == "late"]
        return found
    finally:
        daemon.stop()


def said_of(events: list[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """By step and phase, begin and end as `watch` marked them; of `comm`, its intervals."""
    found: dict[str, dict[str, list[Any]]] = {}
    begins: dict[str, int] = {}
    spans: dict[str, list[Span]] = {}
    step = None
    for event in sorted(events, key=lambda event: event["time_unix_nano"]):
        at, name = event["time_unix_nano"], event.get("name")
        if event.get("kind") == "step":
            step = str(event["step"]) if event["event"] == "begin" else step
        elif event["event"] == "begin":
            begins[name] = at
        elif event["event"] == "end" and name in begins and step is not None:
            if name == "comm":
                spans.setdefault(step, []).append((begins.pop(name), at))
            else:
                found.setdefault(step, {})[name] = [begins.pop(name), at]
    for number, each in spans.items():
        found.setdefault(number, {})["comm"] = union(each)
    return found


def apart(said: list[Span], truth: list[Span]) -> list[Span]:
    """Of each interval that overlaps one other and no more: how much earlier `watch` saw its begin, and later its end."""
    def over(span: Span, others: list[Span]) -> list[Span]:
        return [other for other in others if other[0] < span[1] and span[0] < other[1]]

    found = []
    for span in said:
        others = over(span, truth)
        if len(others) == 1 and len(over(others[0], said)) == 1:
            found.append((others[0][0] - span[0], span[1] - others[0][1]))
    return found


def compare(said: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """By phase: the medians over steps, their ratio, and how far the begins lie apart; of `comm`, also the ends, and how often
    they could be compared. `nccl` compares `comm` with NCCL's kernels alone. The first profiled step is left out: the profiler
    itself starts in it."""
    rows: dict[str, Any] = {}
    steps = sorted(set(said) & set(truth), key=int)[1:]
    for phase in (*PHASES, "comm", "nccl"):
        own = "comm" if phase == "nccl" else phase
        pairs = [(said[step][own], truth[step][phase]) for step in steps if own in said[step] and phase in truth[step]]
        if not pairs:
            continue
        lengths = [[total_ns(one if own == "comm" else [one]) for one in pair] for pair in pairs]
        ours, theirs = (statistics.median(each[side] for each in lengths) for side in (0, 1))
        rows[phase] = {"watch_ms": ours / 1e6, "profiler_ms": theirs / 1e6, "ratio": ours / theirs if theirs else None}
        if own != "comm":
            rows[phase]["begin_apart_us"] = statistics.median(one[0] - other[0] for one, other in pairs) / 1e3
        elif compared := [each for pair in pairs for each in apart(*pair)]:
            rows[phase]["begin_apart_us"] = -statistics.median(begin for begin, _ in compared) / 1e3
            rows[phase]["end_apart_us"] = statistics.median(end for _, end in compared) / 1e3
            rows[phase]["compared"] = len(compared)
    return rows


def agrees(row: dict[str, Any]) -> bool:
    """Whether every phase of a rank, and `comm`, was compared and is within 5 %."""
    ratios = [row["phases"].get(phase, {}).get("ratio") for phase in (*PHASES, "comm")]
    return all(ratio is not None and abs(ratio - 1) <= 0.05 for ratio in ratios)


def layers_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """resnet50's records against FairScale's."""
    records = [event for event in events if "layer" in event]
    wanted = json.loads((PYTHON / "tests" / "data" / "resnet50_layers.json").read_text())["records"]
    rows = [
        [event["name"], event["layer"]["direction"], event["layer"]["parameters"], event["layer"]["activations"]]
        for event in records
    ]
    forward = [event for event in records if event["layer"]["direction"] == "forward"]
    return {
        "records": len(rows), "as_fairscale": rows == wanted,
        "activations": sum(event["layer"]["activations"] for event in forward),
        "growth": sum(event["layer"].get("growth", 0) for event in forward),
        "highest_allocated": max((event.get("memory", {}).get("allocated", 0) for event in records), default=0),
    }


def show(results: dict[str, Any]) -> None:
    print(f"\n{'job':10}{'rank':5}{'phase':10}{'watch ms':>10}{'profiler':>10}{'ratio':>8}{'begin us':>10}{'end us':>10}")
    for row in results["truth"]:
        for phase, each in row["phases"].items():
            ratio = f"{each['ratio']:8.3f}" if each["ratio"] else f"{'-':>8}"
            times = f"{each['watch_ms']:10.3f}{each['profiler_ms']:10.3f}"
            apart_us = [f"{each[key]:10.1f}" if key in each else f"{'-':>10}" for key in ("begin_apart_us", "end_apart_us")]
            print(f"{row['job']:10}{row['rank']:<5}{phase:10}{times}{ratio}{''.join(apart_us)}")
    print(f"\n{'cost':10}{'condition':10}{'ms/step':>10}{'ratio':>9}{'95 %':>20}")
    for each in results["costs"]:
        for name, one in each["conditions"].items():
            interval = f"{one['ratio']:9.4f}   [{one['ratio_low']:.4f}, {one['ratio_high']:.4f}]" if "ratio" in one else ""
            print(f"{each['name']:10}{name:10}{one['milliseconds']:10.3f}{interval}")
    print(f"\ngradients of DDP equal, bit for bit: {results['same']}")
    print(f"\nresnet50: {json.dumps(results['resnet'])}")
    if results["named"] is None:
        print("late rank: not tried (it takes HIGHWATER, two ranks and the part named)")
    for one in results["named"] or []:
        print(f"late rank: {one['finding']} ({one['severity']}), rank {one['rank']}: {one['what']} {one['why']}")
    for wrong in results["wrong"]:
        print(f"WRONG: {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Truth and cost of highwater.torch.watch.")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is run (everything)")
    parser.add_argument("--only", default="", help="of the part cost, names of steps, joined by commas")
    parser.add_argument("--keep", action="store_true", help="keep the marks and the profiler's traces of the part truth")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, over NCCL's sockets (where there is only one)")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for each set of processes")
    parser.add_argument("--worker", choices=("one", "many", "alone", "late"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        worker(arguments)
        return 0
    results: dict[str, Any] = {"truth": [], "costs": [], "resnet": {"skipped": "did not run"}, "same": None, "wrong": []}
    with tempfile.TemporaryDirectory() as folder:
        daemon = Listener(os.path.join(folder, "annotations.sock"))
        sets = {"many": (arguments.gpus, {"truth", "cost-ddp"}), "one": (1, {"cost", "layers"})}
        if arguments.share_gpu:
            sets = {"many": (arguments.gpus, {"truth"}), "alone": (1, {"cost-ddp"}), "one": (1, {"cost", "layers"})}
        for kind, (ranks, parts) in sets.items():
            if not parts & set(arguments.parts):
                continue
            wrong = launch(kind, ranks, arguments, daemon.path, arguments.limit)
            results["wrong"] += [wrong] if wrong else []
            path = arguments.out / f"{kind}.json"
            if path.exists():
                found = json.loads(path.read_text())
                results["costs"] += found["costs"]
                results["resnet"] = found.get("resnet", results["resnet"])
                results["same"] = found.get("same", results["same"])
                path.unlink()
        time.sleep(0.2)
        events = daemon.events()
        if arguments.keep:
            lines = "".join(json.dumps(event) + "\n" for event in events)
            (arguments.out / "marks.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 6))
        results["named"] = named(arguments, folder, results["wrong"])
    for path in sorted(arguments.out.glob("truth-*.json")):
        name, rank = path.stem[len("truth-"):].rsplit("-", 1)
        own = [event for event in events if event["job"] == name and event["rank"] == int(rank)]
        phases = compare(said_of(own), json.loads(path.read_text()))
        results["truth"].append({"job": name, "rank": int(rank), "phases": phases})
        path.unlink()
    if not results["resnet"].get("skipped"):
        results["resnet"] = layers_of([event for event in events if event["job"] == "resnet"])
    results["agree"] = all(map(agrees, results["truth"])) if results["truth"] else None
    results["lost"] = sum(event.get("lost", 0) for event in events)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    show(results)
    print(f"within 5 %: {'not compared' if results['agree'] is None else results['agree']}; marks lost: {results['lost']}")
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
