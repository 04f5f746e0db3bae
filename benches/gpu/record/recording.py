"""A recording's folder read back: steps, phases and counters of each rank, and each GPU's memory.

Input: the files that `record.py` wrote. Output: plain data for `truth.py`. Nothing here judges.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scenarios import Scenario, from_document


@dataclass
class Phase:
    """One phase of one step. A phase in which the process died ends at its last event and is `open`."""

    name: str
    begin_ns: int
    end_ns: int
    retries: int = 0
    """Allocator flushes in it."""
    open: bool = False

    @property
    def seconds(self) -> float:
        """Its duration."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass
class Step:
    """One step of one rank."""

    rank: int
    number: int
    cfg: str
    begin_ns: int
    end_ns: int
    open: bool = True
    phases: list[Phase] = field(default_factory=list)
    ooms_ns: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Its duration."""
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def retries(self) -> int:
        """Allocator flushes in it."""
        return sum(phase.retries for phase in self.phases)

    def spent(self, *names: str) -> float:
        """Seconds in the phases of these names."""
        return sum(phase.seconds for phase in self.phases if phase.name in names)


class Memory:
    """One GPU's memory in use, from its change points."""

    def __init__(self, points: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(points)
        self._times = [at_ns for at_ns, _ in ordered]
        self._used = [used for _, used in ordered]

    def within(self, begin_ns: int, end_ns: int) -> list[int]:
        """Bytes in use at the begin, and at each change until the end; empty if the log has no data."""
        first = max(0, bisect_right(self._times, begin_ns) - 1)
        return self._used[first : bisect_right(self._times, end_ns)]


@dataclass
class Recording:
    """The content of a folder."""

    scenario: Scenario
    design: dict[str, Any]
    steps: dict[int, list[Step]]
    """By rank, in order."""
    memory: dict[int, Memory]
    total_bytes: dict[int, int]


def read_lines(path: Path) -> list[str]:
    """The lines of a file, compressed (`.gz`) or not, whichever exists."""
    packed = path.with_name(path.name + ".gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else path.read_text()
    return text.splitlines()


def read(folder: Path) -> Recording:
    """A recording from its folder."""
    design = json.loads((folder / "design.json").read_text())
    scenario = from_document(design["scenario"])
    steps = {}
    for rank in range(scenario.gpus):
        lines = read_lines(folder / f"annotations_rank{rank}.jsonl")
        steps[rank] = read_steps([json.loads(line) for line in lines])
    points: dict[int, list[tuple[int, int]]] = {}
    for at_ns, gpu, used in read_points(read_lines(folder / "nvml_1khz.csv")):
        points.setdefault(gpu, []).append((at_ns, used))
    facts = json.loads((folder / "gpus.json").read_text())
    totals = {one["index"]: one["memory_total_bytes"] for one in facts}
    return Recording(scenario, design, steps, {gpu: Memory(found) for gpu, found in points.items()}, totals)


def read_points(lines: Iterable[str]) -> Iterable[tuple[int, int, int]]:
    """Time, GPU and bytes of each change point; comments are left out."""
    for line in lines:
        if line and not line.startswith("#"):
            at_ns, gpu, used = line.split(",")
            yield int(at_ns), int(gpu), int(used)


def read_steps(events: Iterable[dict[str, Any]]) -> list[Step]:
    """The steps of one rank from its annotations, in order of time. Flushes count for the phase in which the counter
    was first seen higher, or, between two phases, for the one before."""
    steps: list[Step] = []
    retries = 0
    for event in events:
        at_ns, name = event["ts"], event["phase"]
        if event["ev"] == "begin" and name == "step":
            steps.append(Step(event["rank"], event["step"], event["cfg"], at_ns, at_ns))
        if not steps:
            continue
        step = steps[-1]
        new = event.get("retries", 0) - retries
        retries += new
        if new and step.phases:
            step.phases[-1].retries += new
        step.end_ns = at_ns
        if event["ev"] == "begin" and name != "step":
            step.phases.append(Phase(name, at_ns, at_ns, open=True))
        elif event["ev"] == "end" and name == "step":
            step.open = False
        else:
            follow(step, event)
    return steps


def follow(step: Step, event: dict[str, Any]) -> None:
    """Adds the end of a phase, or a mark, to its step."""
    if event["ev"] == "oom":
        step.ooms_ns.append(event["ts"])
    if step.phases and step.phases[-1].open:
        step.phases[-1].end_ns = event["ts"]
        step.phases[-1].open = event["ev"] != "end"
