"""Scores the comparison of ranks on the public traces of ByteDance-Seed/StragglerAnalysis.

The data set (Apache-2.0, artifact of "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025) has
three real jobs, operation by operation, with the slowdown that their authors computed: AR (one worker slowed on purpose), ST
(the last pipeline stage too long) and SE (sequences of different lengths). No data of it is in this repository: give the path
of a checkout or of a bare clone. Needs pyarrow:

    python3 -m venv target/public && target/public/bin/pip install pyarrow
    target/public/bin/python benches/public/straggler_analysis.py --data PATH --highwater target/release/highwater

Each job is written as recordings in target/public: whole, cut into nodes of eight GPUs, without coordinates, without marks of
communication, with its ranks in another order, and twenty times as fast. Prints who is accused, in which step first, what else
is told, and the slowdown beside the published one. Exits with 1 if AR accuses anybody but its slow worker, or not within eight
steps; if ST or SE accuse anybody, or do not tell their cause; or if a slowdown is more than 5 % off.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import pyarrow.parquet as parquet
except ImportError:
    sys.exit("straggler_analysis.py needs pyarrow: python3 -m venv target/public && target/public/bin/pip install pyarrow")

JOBS = ("AR", "ST", "SE")
NAMES = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer", "gc": "gc"}
BEGIN_NS = 1_700_000_000_000_000_000
GAP_NS = 10_000_000
NODE_GPUS = 8
WARM_AND_STEADY_STEPS = 8
TOLERANCE = 0.05
GPU_BYTES, USED_BYTES = 80 << 30, 40 << 30


@dataclass(frozen=True)
class Shape:
    """How a trace becomes a recording."""

    name: str
    mesh: bool = True
    comm: bool = True
    permuted: bool = False
    pace: float = 1.0
    node_gpus: int | None = None


SHAPES = (
    Shape("whole"),
    Shape("nodes", node_gpus=NODE_GPUS),
    Shape("no-mesh", mesh=False),
    Shape("no-mesh-nodes", mesh=False, node_gpus=NODE_GPUS),
    Shape("no-comm", comm=False),
    Shape("no-comm-nodes", comm=False, node_gpus=NODE_GPUS),
    Shape("no-comm-no-mesh", comm=False, mesh=False),
    Shape("permuted", permuted=True),
    Shape("fast", pace=20.0),
)


def read(data: Path, name: str) -> bytes:
    """A file of the data set, from a checkout or a repository without a work tree."""
    plain = data / "data" / name
    if plain.exists():
        return plain.read_bytes()
    command = ["git", "--git-dir", str(data), "show", f"HEAD:data/{name}"]
    return subprocess.run(command, check=True, capture_output=True).stdout


class Trace:
    """The operations of one job, by step and rank."""

    def __init__(self, data: Path, job: str) -> None:
        rows = parquet.read_table(io.BytesIO(read(data, f"trace-{job}.parquet"))).to_pylist()
        self.job = job
        self.operations: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self.places: dict[int, dict[str, int]] = {}
        for row in rows:
            self.operations[row["step"], row["rank"]].append(row)
            self.places[row["rank"]] = {"dp": row["dp_rank"], "pp": row["stage"]}
        self.steps = sorted({step for step, _ in self.operations})
        self.published: float = json.loads(read(data, f"result-{job}.json"))["blocking_slowdown"]

    def intervals(self, step: int, rank: int, comm: bool) -> dict[str, list[tuple[int, int]]]:
        """The phases of a rank in a step: what is not work is communication, and what overlaps is one."""
        phases: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row in sorted(self.operations[step, rank], key=lambda row: row["start_ts"]):
            name = NAMES.get(row["optype"], "comm")
            begin, end = (int(seconds * 1e9) for seconds in (row["start_ts"], row["start_ts"] + row["duration"]))
            if end == begin or (name == "comm" and not comm):
                continue
            last = phases[name][-1] if phases[name] else None
            if last and begin < last[1]:
                if name == "comm":
                    phases[name][-1] = (last[0], max(last[1], end))
                    continue
                begin = last[1]
            if begin < end:
                phases[name].append((begin, end))
        return phases

    def span(self, step: int, rank: int) -> tuple[int, int]:
        """When a rank's step begins and ends, whatever of it is marked."""
        rows = self.operations[step, rank]
        ends = (row["start_ts"] + row["duration"] for row in rows)
        return int(min(row["start_ts"] for row in rows) * 1e9), int(max(ends) * 1e9)


def numbers(trace: Trace, shape: Shape) -> dict[int, int]:
    """The number that each rank gets."""
    ranks = sorted(trace.places)
    others = list(ranks)
    if shape.permuted:
        random.Random(trace.job).shuffle(others)
    return dict(zip(ranks, others, strict=True))


def lines(trace: Trace, shape: Shape, rank: int, number: int, size: int) -> list[dict[str, Any]]:
    """What one rank sends."""
    said: list[dict[str, Any]] = []
    offset = BEGIN_NS
    for step in trace.steps:
        spans = [trace.span(step, other) for other in trace.places]
        first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
        def at(ns: int, first: int = first, offset: int = offset) -> int:
            return offset + int((ns - first) / shape.pace)
        events: list[tuple[int, int, str, str]] = []
        begin, end = trace.span(step, rank)
        events += [(at(begin), 0, "begin", "step"), (at(end), 3, "end", "step")]
        for phase, intervals in trace.intervals(step, rank, shape.comm).items():
            for begin, end in intervals:
                events += [(at(begin), 2, "begin", phase), (at(end), 1, "end", phase)]
        for ts, _, event, phase in sorted(events):
            said.append({"ts": ts, "rank": number, "ev": event, "phase": phase, "step": step, "world_size": size})
        offset += int((last - first) / shape.pace) + GAP_NS
    if shape.mesh:
        said[0]["mesh"] = trace.places[rank]
    return said


def write(trace: Trace, shape: Shape, out: Path) -> list[tuple[Path, int | None]]:
    """Writes the recordings of a job in one shape. Returns each with its slow rank."""
    renamed = numbers(trace, shape)
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in trace.places:
        nodes[rank // shape.node_gpus if shape.node_gpus else 0].append(rank)
    folders = []
    for node, ranks in sorted(nodes.items()):
        folder = out / shape.name / (f"{trace.job}-node{node}" if shape.node_gpus else trace.job)
        folder.mkdir(parents=True, exist_ok=True)
        end = BEGIN_NS
        for rank in ranks:
            said = lines(trace, shape, rank, renamed[rank], len(trace.places))
            end = max(end, said[-1]["ts"])
            with gzip.open(folder / f"annotations_rank{renamed[rank]}.jsonl.gz", "wt", compresslevel=1) as file:
                file.writelines(json.dumps(line) + "\n" for line in said)
        facts = [{"index": renamed[rank], "memory_total_bytes": GPU_BYTES} for rank in ranks]
        (folder / "gpus.json").write_text(json.dumps(facts))
        samples = [f"{at},{renamed[rank]},{USED_BYTES}\n" for at in (BEGIN_NS, end) for rank in ranks]
        (folder / "nvml_1khz.csv").write_text("# realtime_ns,gpu,used_bytes\n" + "".join(samples))
        slow = renamed[0] if trace.job == "AR" and 0 in ranks else None
        truth = {"findings": []}
        if slow is not None:
            truth["findings"].append({"finding": "straggler", "rank": slow, "begin_unix_nano": BEGIN_NS,
                                      "end_unix_nano": end, "must_find": shape.comm and shape.mesh})
        (folder / "truth.json").write_text(json.dumps(truth))
        folders.append((folder, slow))
    return folders


def judge(trace: Trace, shape: Shape, told: list[dict[str, Any]], slow: int | None) -> list[str]:
    """What is wrong with what was told of a recording."""
    wrong = []
    accused = {one["rank"] for one in told if one["finding"] == "straggler"}
    if accused - {slow}:
        wrong.append(f"accuses {sorted(accused - {slow})}")
    is_plain = shape.comm and shape.mesh
    if slow is not None and is_plain:
        first = next((one["first_step"] for one in told if one["finding"] == "straggler"), None)
        if first is None or trace.steps.index(first) >= WARM_AND_STEADY_STEPS:
            wrong.append("the slow worker is not told within eight steps")
    kind = {"ST": "stage_imbalance", "SE": "uneven_work"}.get(trace.job)
    if is_plain and not shape.node_gpus:
        if kind and kind not in {one["finding"] for one in told}:
            wrong.append(f"{kind} is not told")
        for one in told:
            slowdown = one["evidence"].get("slowdown_ratio")
            if slowdown and abs(slowdown / trace.published - 1) > TOLERANCE:
                wrong.append(f"the slowdown is {slowdown:.3f}, published is {trace.published:.3f}")
    return wrong


def row(trace: Trace, folder: Path, one: dict[str, Any] | None) -> str:
    """A line of the table."""
    name = f"{folder.parent.name}/{folder.name}"
    if one is None:
        return f"{name:<24} nothing"
    slowdown = one["evidence"].get("slowdown_ratio")
    rank = "-" if one["rank"] is None else one["rank"]
    nth = trace.steps.index(one["first_step"]) + 1 if one["first_step"] is not None else "-"
    figures = f"{slowdown:.3f}  {trace.published:.3f}" if slowdown else "-      -"
    return f"{name:<24} {one['finding']:<16} {one['severity']:<8} {rank!s:<5} {nth!s:<6} {one['signs']:<6} {figures}"


def main() -> None:
    """Converts, replays and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a checkout of the data set, or its git directory")
    parser.add_argument("--highwater", type=Path, default=Path("target/release/highwater"))
    parser.add_argument("--out", type=Path, default=Path("target/public/straggler"))
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    options = parser.parse_args()
    problems, texts, recordings = [], {}, []
    for job in JOBS:
        trace = Trace(options.data, job)
        for shape in (shape for shape in SHAPES if shape.name in options.shapes):
            recordings += [(trace, shape, *one) for one in write(trace, shape, options.out)]
    command = [str(options.highwater), "replay-eval", "--json", *(str(folder) for _, _, folder, _ in recordings)]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print(f"{'recording':<24} {'finding':<16} {'severity':<8} {'rank':<5} {'nth':<6} {'signs':<6} slowdown  published")
    for trace, shape, folder, slow in recordings:
        told = report["told"][str(folder)]
        for one in told or [None]:
            print(row(trace, folder, one))
            if one:
                texts.setdefault((trace.job, one["finding"]), one["what"])
        problems += [f"{folder.parent.name}/{folder.name}: {wrong}" for wrong in judge(trace, shape, told, slow)]
    kinds = report["kinds"].get("straggler", {})
    print(f"straggler: {kinds.get('right', 0)} of {kinds.get('signs', 0)} signs right, "
          f"{kinds.get('found', 0)} of {kinds.get('must_find', 0)} found")
    for (job, finding), text in texts.items():
        print(f"{job} {finding}: {text}")
    for problem in problems:
        print(f"wrong: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
