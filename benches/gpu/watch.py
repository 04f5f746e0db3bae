"""Whether `highwater.torch.watch` reports the truth, and what it costs.

Three parts, in one command, in a few minutes:

- truth: a DDP job, the same with rank 1 slowed in its backward pass, and an FSDP2 job run under `watch` and torch.profiler at
  once. Phases are compared with the kernels that were launched in them, `comm` with the union of NCCL's kernels.
- cost: step times with and without `watch`, in interleaved blocks in random order: a step of about a millisecond, a large
  one, and DDP. The ratio is the median over rounds, with its bootstrap 95 % interval.
- layers: resnet50, batch 16, against the records of FairScale's tracker.

    python3 watch.py --gpus 2 --out results/
    python3 watch.py --dry-run --out /tmp/results

The marks go to a socket of this program. It prints tables and writes results.json.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harm

HERE = Path(__file__).resolve()
PYTHON = HERE.parent.parent.parent / "python"
PHASES = ("forward", "backward", "optimizer")
GAP_NS = 100_000
WARM_STEPS, TRUE_STEPS = 8, 10


class Daemon:
    """Takes marks in the daemon's place."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "annotations.sock")
        self.messages: list[bytes] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(self.path + ".seqpacket")
        self.socket.listen(16)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            threading.Thread(target=self.read, args=(connection,), daemon=True).start()

    def read(self, connection: socket.socket) -> None:
        while message := connection.recv(1 << 17):
            self.messages.append(message)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for message in self.messages for line in message.splitlines()]


def union_ns(spans: list[tuple[int, int]]) -> int:
    """The total of intervals, with gaps below GAP_NS closed, as `watch` closes them."""
    total, until = 0, None
    for begin, end in sorted(spans):
        if until is None or begin - until >= GAP_NS:
            total, until = total + end - begin, end
        elif end > until:
            total, until = total + end - until, end
    return total


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
    return torch.device("cpu") if arguments.dry_run else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


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
    width, layers, batch, length = (32, 4, 2, 16) if arguments.dry_run else (2048, 12, 8, 1024)
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
    activities = [ProfilerActivity.CPU] + ([] if arguments.dry_run else [ProfilerActivity.CUDA])
    with highwater.torch.watch(model, optimizer, layers_every=0):
        profiler = profile(activities=activities)
        for number in range(WARM_STEPS + TRUE_STEPS):
            if number == WARM_STEPS:
                profiler.start()
            with record_function(f"hw#forward#{number}"):
                loss = model(x).float().square().mean()
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
    truth = truth_of(json.loads(path.read_text()), is_cpu=arguments.dry_run)
    path.unlink()
    (Path(arguments.out) / f"truth-{name}-{rank}.json").write_text(json.dumps(truth))


def truth_of(trace: dict[str, Any], is_cpu: bool) -> dict[str, dict[str, list[int]]]:
    """By step and phase: begin and end, Unix nanoseconds, of the kernels that were launched in it; and `comm`, the total of
    NCCL's. On a CPU, of the ranges themselves."""
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
    found: dict[str, dict[str, list[int]]] = {}
    if is_cpu:
        for begin, end, phase, step in ranges:
            found.setdefault(step, {})[phase] = [begin, end]
        return found
    launches = {
        event["args"]["correlation"]: span(event)[0] for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    comm: dict[str, list[tuple[int, int]]] = {}
    for event in events:
        launched = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or launched is None:
            continue
        at = bisect.bisect_right(begins, launched) - 1
        if at < 0 or launched > ranges[at][1]:
            continue
        phase, step = ranges[at][2:]
        begin, end = span(event)
        if "nccl" in event["name"].lower():
            comm.setdefault(step, []).append((begin, end))
            continue
        known = found.setdefault(step, {}).setdefault(phase, [begin, end])
        known[:] = min(known[0], begin), max(known[1], end)
    for step, spans in comm.items():
        found.setdefault(step, {})["comm"] = [0, union_ns(spans)]
    return found


def timed_blocks(name: str, conditions: dict[str, Any], steps: int, rounds: int, wait: Any) -> dict[str, Any]:
    """Milliseconds a step of each condition by round; a condition is a function that runs `steps` steps."""
    table: dict[int, dict[str, float]] = {}
    for number, condition in harm.order(list(conditions), rounds, seed=7):
        with conditions[condition]() as step:
            # The watch's first step builds its pool of events.
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


def costs(arguments: argparse.Namespace, is_ddp: bool) -> list[dict[str, Any]]:
    """Step times with and without `watch`."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import highwater

    device = device_of(torch, arguments)
    wait = (lambda: None) if arguments.dry_run else torch.cuda.synchronize
    jobs = [("ddp", 2048, 6, 8, 1024)] if is_ddp else [("small", 256, 4, 8, 128), ("large", 2048, 6, 8, 1024)]
    found = []
    for name, width, layers, batch, length in jobs:
        if arguments.dry_run:
            width, layers, batch, length = 32, 2, 2, 16
        highwater.configure(job=f"cost-{name}")
        steps = 20 if arguments.dry_run else 100 if name == "small" else 40
        rounds = 3 if arguments.dry_run else 20 if name == "small" else 12

        def job(is_watched: bool, layers_every: int, sizes: tuple[int, ...]) -> Any:
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
            def running() -> Any:
                if not is_watched:
                    yield step
                    return
                # Step 99 is before the measurement, which then has one recorded step in its 100.
                with highwater.torch.watch(model, optimizer, layers_every=layers_every, start_step=-1 % (layers_every or 100)):
                    yield step

            return running

        sizes = (width, layers, batch, length)
        conditions = {"off": job(False, 0, sizes), "phases": job(True, 0, sizes)}
        if not is_ddp:
            conditions["layers"] = job(True, 100, sizes)
        found.append(timed_blocks(name, conditions, 100 if "layers" in conditions and not arguments.dry_run else steps, rounds, wait))
        highwater.flush(5)
        del conditions
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
    sys.path.insert(0, str(PYTHON))
    import torch

    rank = int(os.environ["RANK"])
    if not arguments.dry_run:
        torch.cuda.set_device(device_of(torch, arguments))
    found: dict[str, Any] = {}
    if arguments.worker == "many":
        import torch.distributed as dist

        dist.init_process_group("gloo" if arguments.dry_run else "nccl")
        for name in ("ddp", "ddp-slow", "fsdp2"):
            true_job(name, arguments)
            dist.barrier()
        found["costs"] = costs(arguments, is_ddp=True)
        dist.barrier()
        dist.destroy_process_group()
    else:
        found["costs"] = costs(arguments, is_ddp=False)
        found["resnet"] = resnet(arguments)
    if rank == 0:
        (Path(arguments.out) / f"{arguments.worker}.json").write_text(json.dumps(found))


# In the command's process.


def launch(kind: str, ranks: int, arguments: argparse.Namespace, path: str, limit_s: float) -> str | None:
    """Runs the processes of one part; returns what went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(HERE), "--worker", kind, "--out", str(arguments.out)]
    command += ["--dry-run"] if arguments.dry_run else []
    common = {**os.environ, "HIGHWATER_ANNOTATIONS_SOCKET": path, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = port
    common.setdefault("OMP_NUM_THREADS", "1")
    running = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
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


def said_of(events: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """By step and phase, begin and end as `watch` marked them; of `comm`, zero and the total."""
    found: dict[str, dict[str, list[int]]] = {}
    begins: dict[str, int] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
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
        found.setdefault(number, {})["comm"] = [0, union_ns(each)]
    return found


def compare(said: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """By phase: the medians over steps, their ratio, and how far the begins lie apart. The first profiled step is left out:
    the profiler itself starts in it."""
    rows: dict[str, Any] = {}
    steps = sorted(set(said) & set(truth), key=int)[1:]
    for phase in (*PHASES, "comm"):
        pairs = [(said[step][phase], truth[step][phase]) for step in steps if phase in said[step] and phase in truth[step]]
        if pairs:
            ours, theirs = (statistics.median(each[side][1] - each[side][0] for each in pairs) for side in (0, 1))
            rows[phase] = {"watch_ms": ours / 1e6, "profiler_ms": theirs / 1e6, "ratio": ours / theirs if theirs else None}
            if phase != "comm":
                rows[phase]["begin_apart_us"] = statistics.median(one[0] - other[0] for one, other in pairs) / 1e3
    return rows


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
    print(f"\n{'job':10}{'rank':5}{'phase':10}{'watch ms':>10}{'profiler':>10}{'ratio':>8}{'begin us':>10}")
    for row in results["truth"]:
        for phase, each in row["phases"].items():
            ratio = f"{each['ratio']:8.3f}" if each["ratio"] else f"{'-':>8}"
            apart = f"{each['begin_apart_us']:10.1f}" if "begin_apart_us" in each else f"{'-':>10}"
            times = f"{each['watch_ms']:10.3f}{each['profiler_ms']:10.3f}"
            print(f"{row['job']:10}{row['rank']:<5}{phase:10}{times}{ratio}{apart}")
    print(f"\n{'cost':10}{'condition':10}{'ms/step':>10}{'ratio':>9}{'95 %':>20}")
    for each in results["costs"]:
        for name, one in each["conditions"].items():
            interval = f"{one['ratio']:9.4f}   [{one['ratio_low']:.4f}, {one['ratio_high']:.4f}]" if "ratio" in one else ""
            print(f"{each['name']:10}{name:10}{one['milliseconds']:10.3f}{interval}")
    print(f"\nresnet50: {json.dumps(results['resnet'])}")
    for wrong in results["wrong"]:
        print(f"WRONG: {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Truth and cost of highwater.torch.watch.")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds for each of the two sets of processes")
    parser.add_argument("--worker", choices=("one", "many"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        worker(arguments)
        return 0
    results: dict[str, Any] = {"truth": [], "costs": [], "resnet": {"skipped": "did not run"}, "wrong": []}
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(folder)
        for kind, ranks in (("many", arguments.gpus), ("one", 1)):
            wrong = launch(kind, ranks, arguments, daemon.path, arguments.limit)
            results["wrong"] += [wrong] if wrong else []
            path = arguments.out / f"{kind}.json"
            if path.exists():
                found = json.loads(path.read_text())
                results["costs"] += found["costs"]
                results["resnet"] = found.get("resnet", results["resnet"])
                path.unlink()
        time.sleep(0.2)
        events = daemon.events()
    for path in sorted(arguments.out.glob("truth-*.json")):
        name, rank = path.stem[len("truth-"):].rsplit("-", 1)
        own = [event for event in events if event["job"] == name and event["rank"] == int(rank)]
        phases = compare(said_of(own), json.loads(path.read_text()))
        results["truth"].append({"job": name, "rank": int(rank), "phases": phases})
        path.unlink()
    if not results["resnet"].get("skipped"):
        results["resnet"] = layers_of([event for event in events if event["job"] == "resnet"])
    results["agree"] = all(
        abs(each["ratio"] - 1) <= 0.05 for row in results["truth"] for each in row["phases"].values() if each["ratio"]
    )
    results["lost"] = sum(event.get("lost", 0) for event in events)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    show(results)
    print(f"within 5 %: {results['agree']}; marks lost: {results['lost']}")
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
