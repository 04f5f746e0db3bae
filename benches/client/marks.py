#!/usr/bin/env python3
"""Measures what the Python client's marks cost a training loop, beside a system call for each mark.

    cargo build --release
    HIGHWATER=target/release/highwater python3 benches/client/marks.py [--out results/]

A pair: the time of one begin and end, with a daemon and without one. A step: a fixed piece of work of about 1.4 ms with the
marks of a step and three phases, minus the same without marks. There are three kinds of work. `python` holds the interpreter's
lock throughout, so everything that the client's thread does delays it. `native` gives the lock away, as waiting for a GPU
does. `gpu` is a small model on a GPU (with PyTorch and a GPU only).

`datagrams` is the peer: JSON and a system call for each mark, on the job's thread. The median step: single steps of each
condition follow each other in random order, and the figure is the median over hundreds of such groups of the difference to
`none` in the group. The mean step, which has what the client's thread does now and then: the conditions take turns of 200
steps, and the figure is the median over the rounds of the difference of means. Both have their 95 % interval (bootstrap over
groups and rounds). Exits with 1 if a bound is exceeded: 30 µs for the marks of the median step (`gpu`, or else `native`),
20 µs for a begin and end with a daemon, 2 µs without.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "benches/gpu"), str(ROOT / "python")]
import highwater  # noqa: E402
from annotator import Annotator  # noqa: E402
from harm import bootstrap, order, quantile  # noqa: E402
from measure import Daemon  # noqa: E402
from rig import find_highwater  # noqa: E402

STEP_S = 0.0014
STEPS, WARM_UP = 200, 10
GROUPS = 50
MOST_STEP_US, MOST_PAIR_UP_US, MOST_PAIR_DOWN_US = 30.0, 20.0, 2.0
PHASES = ("forward", "backward", "optimizer")
PAIRS = 20


def python_work(amount: int) -> None:
    """A loop of the interpreter."""
    total = 0
    for n in range(amount):
        total += n


def native_work(data: bytes) -> None:
    """Work outside the interpreter's lock."""
    hashlib.sha256(data)


def calibrated(work: Callable[[Any], None], of_size: Callable[[int], Any]) -> Any:
    """How much of this work takes a third of a step."""
    size = 1000
    while True:
        amount = of_size(size)
        began = time.perf_counter()
        for _ in range(5):
            work(amount)
        took_s = (time.perf_counter() - began) / 5
        if took_s > STEP_S / 6:
            return of_size(int(size * STEP_S / 3 / took_s))
        size *= 2


def gpu_work() -> Callable[[], None] | None:
    """A part of a step on a GPU, or None where there is none."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def work(count: int = 1) -> None:
        for _ in range(count):
            weight @ weight
        torch.cuda.synchronize()

    work(100)
    began = time.perf_counter()
    work(100)
    count = max(1, int(STEP_S / 3 / ((time.perf_counter() - began) / 100)))
    return lambda: work(count)


def parts(kind: str) -> Callable[[], None] | None:
    """One third of a step."""
    if kind == "gpu":
        return gpu_work()
    if kind == "python":
        amount = calibrated(python_work, lambda size: size)
        return lambda: python_work(amount)
    data = calibrated(native_work, bytes)
    return lambda: native_work(data)


def step_none(part: Callable[[], None], _: int) -> None:
    for _name in PHASES:
        part()


def step_client(part: Callable[[], None], n: int) -> None:
    with highwater.step(n):
        for name in PHASES:
            with highwater.phase(name):
                part()


def with_datagrams(peer: Annotator) -> Callable[[Callable[[], None], int], None]:
    def step(part: Callable[[], None], n: int) -> None:
        peer.emit("begin", "step", None, n)
        for name in PHASES:
            peer.emit("begin", "phase", name, n)
            part()
            peer.emit("end", "phase", name, n)
        peer.emit("end", "step", None, n)

    return step


def turn(step: Callable[[Callable[[], None], int], None], part: Callable[[], None]) -> list[float]:
    """Microseconds of each step of one turn."""
    taken = []
    for n in range(STEPS):
        began = time.perf_counter_ns()
        step(part, n)
        taken.append((time.perf_counter_ns() - began) / 1e3)
    return taken[WARM_UP:]


def single(step: Callable[[Callable[[], None], int], None], part: Callable[[], None], n: int) -> float:
    """Microseconds of one step."""
    began = time.perf_counter_ns()
    step(part, n)
    return (time.perf_counter_ns() - began) / 1e3


def difference(groups: list[dict[str, float]], condition: str) -> dict[str, float]:
    """Microseconds more than without marks in the same group, with its interval."""
    values = [each[condition] - each["none"] for each in groups]
    low, high = bootstrap(values)
    return {"us": statistics.median(values), "low": low, "high": high}


def pair_us() -> dict[str, float]:
    """What one begin and end takes, in a loop as fast as a job with hundreds of phases a second has it."""
    taken = []
    for _ in range(400):
        began = time.perf_counter_ns()
        for _ in range(PAIRS):
            with highwater.phase("forward"):
                pass
        taken.append((time.perf_counter_ns() - began) / 1e3 / PAIRS)
        time.sleep(0.005)
    return {"p50": quantile(taken, 0.5), "p99": quantile(taken, 0.99)}


def measure(socket: Path, rounds: int) -> dict[str, Any]:
    """Everything in this process, with marks for this socket."""
    highwater.configure(socket=str(socket), job="marks", gpu=0)
    peer = Annotator({"job": "datagrams", "rank": 0, "gpu": 0}, socket, None, lambda: None)
    steps = {"none": step_none, "client": step_client, "datagrams": with_datagrams(peer)}
    results: dict[str, Any] = {"pair": pair_us(), "steps": {}}
    for kind in ("python", "native", "gpu"):
        part = parts(kind)
        if part is None:
            continue
        means: list[dict[str, float]] = [{} for _ in range(rounds)]
        for number, condition in order(list(steps), rounds):
            means[number][condition] = statistics.fmean(turn(steps[condition], part))
        singles: list[dict[str, float]] = [{} for _ in range(GROUPS * rounds)]
        for number, condition in order(list(steps), len(singles)):
            singles[number][condition] = single(steps[condition], part, number)
        results["steps"][kind] = {
            "step_us": statistics.median(each["none"] for each in singles),
            **{
                condition: {"median": difference(singles, condition), "mean": difference(means, condition)}
                for condition in ("client", "datagrams")
            },
        }
    results["flushed"] = highwater.flush(10)
    results["lost"] = highwater._client.lost
    return results


def in_process(socket: Path, rounds: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--socket", str(socket), "--rounds", str(rounds)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def text(found: dict[str, float]) -> str:
    return f"{found['us']:7.1f} [{found['low']:.1f} {found['high']:.1f}]"


def report(results: dict[str, Any]) -> bool:
    """Prints the table; whether every bound holds."""
    up, down = results["up"], results["down"]
    print(f"a begin and end, µs: p50 {up['pair']['p50']:.2f}, p99 {up['pair']['p99']:.2f} with a daemon; ", end="")
    print(f"p50 {down['pair']['p50']:.2f}, p99 {down['pair']['p99']:.2f} without")
    print(f"marks of a step and three phases, µs more than none (95 % interval); all sent: {up['flushed']}, lost: {up['lost']}")
    print(f"{'work':8} {'step':>8}  {'':12} {'median step':>24} {'mean step':>24}")
    holds = up["pair"]["p50"] <= MOST_PAIR_UP_US and down["pair"]["p50"] <= MOST_PAIR_DOWN_US and up["flushed"]
    for daemon, found in results.items():
        for kind, row in found["steps"].items():
            for condition in ("client", "datagrams"):
                name = f"{condition}{'' if daemon == 'up' else ', no daemon'}"
                median, mean = text(row[condition]["median"]), text(row[condition]["mean"])
                print(f"{kind:8} {row['step_us']:8.0f}  {name:20} {median:>22} {mean:>24}")
        bounded = found["steps"].get("gpu", found["steps"]["native"])
        holds = holds and bounded["client"]["median"]["us"] <= MOST_STEP_US
    print("every bound holds" if holds else "A BOUND IS EXCEEDED")
    return bool(holds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--source", default="sim:spike", help="what the daemon reads: nvml on a real GPU")
    parser.add_argument("--out", type=Path, default=None, help="folder for results.json")
    parser.add_argument("--socket", type=Path, default=None, help="measure with this socket and print JSON: what the parts do")
    options = parser.parse_args()
    if options.socket:
        print(json.dumps(measure(options.socket, options.rounds)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = Daemon(find_highwater(), folder, arguments=["--source", options.source])
        results = {"up": in_process(daemon.socket, options.rounds)}
        daemon.stop()
        results["down"] = in_process(folder / "nobody.sock", options.rounds)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "marks.json").write_text(json.dumps(results, indent=1))
    return 0 if report(results) else 1


if __name__ == "__main__":
    sys.exit(main())
