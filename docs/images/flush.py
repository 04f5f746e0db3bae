#!/usr/bin/env python3
"""Draws docs/images/flush.svg: some steps of a job on two H200s, of which one is short of memory.

    docs/images/flush.py > docs/images/flush.svg

Memory and phases are those of the recording tests/data/h200-findings/ballast-ddp. Nothing is smoothed: each change of
memory is a step of the line, and an interval without readings is left blank.
"""

import gzip
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RECORDING = Path(__file__).resolve().parents[2] / "tests/data/h200-findings/ballast-ddp"
FIRST_STEP, FLUSH_STEP, LAST_STEP = 64, 66, 67
GIB = 1 << 30
# Pixels: the width of the labels at the left, of the drawing, and where its parts begin and end.
LEFT, WIDTH, RIGHT = 74, 850, 16
TOP, BOTTOM = 54, 264
LANE, LANES, PITCH = 22, 300, 42
LOWEST_GIB, HIGHEST_GIB = 132.0, 141.0

STYLE = """
  svg { font: 13px system-ui, sans-serif; --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --line: #0a4fb4;
        --full: #c1121f; --forward: #9ec5fe; --backward: #c5b3f2; --comm: #f7b267; --optimizer: #a3d9b1; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --rule: #3d444d; --line: #79b8ff; --full: #ff8a8a;
          --forward: #1f5fa8; --backward: #6a4fb3; --comm: #b8691b; --optimizer: #2f7d4a; }
  }
  text { fill: var(--ink); } .soft { fill: var(--soft); } .end { text-anchor: end; } .middle { text-anchor: middle; }
  .rule { stroke: var(--rule); } .line { stroke: var(--line); fill: none; stroke-width: 2; }
  .full { stroke: var(--full); stroke-dasharray: 5 4; } .full-text { fill: var(--full); } .small { font-size: 12px; }
  .forward { fill: var(--forward); } .backward { fill: var(--backward); } .comm { fill: var(--comm); }
  .optimizer { fill: var(--optimizer); } .pointer { stroke: var(--soft); fill: none; }
"""


@dataclass(frozen=True)
class Phase:
    """A phase or a step of one rank; times in Unix nanoseconds."""

    name: str
    step: int
    begin_ns: int
    end_ns: int


def phases(rank: int) -> list[Phase]:
    """What a rank annotated, in the order in which it ended."""
    begun: dict[str, int] = {}
    ended = []
    with gzip.open(RECORDING / f"annotations_rank{rank}.jsonl.gz", "rt") as lines:
        for event in map(json.loads, lines):
            if event["ev"] == "begin":
                begun[event["phase"]] = event["ts"]
            elif event["ev"] == "end":
                ended.append(Phase(event["phase"], event["step"], begun.pop(event["phase"]), event["ts"]))
    return ended


def memory(gpu: int, from_ns: int, to_ns: int) -> Iterator[list[tuple[int, int]]]:
    """Runs of used bytes between gaps, each with a point at every change and at both of its ends."""
    changes, gaps = [], []
    with gzip.open(RECORDING / "nvml_1khz.csv.gz", "rt") as lines:
        for line in lines:
            if line.startswith("# gap,"):
                gaps.append(tuple(map(int, line.strip().split(",")[1:])))
            elif not line.startswith("#"):
                at_ns, of_gpu, used = map(int, line.split(","))
                if of_gpu == gpu:
                    changes.append((at_ns, used))
    value = [used for at_ns, used in changes if at_ns <= from_ns][-1]
    run = [(from_ns, value)]
    events = [(at_ns, 1, used) for at_ns, used in changes] + [(begin, 0, end) for begin, end in gaps]
    for at_ns, is_change, what in sorted(event for event in events if from_ns < event[0] < to_ns):
        if is_change:
            run += [(at_ns, value)] if run else []
            run.append((at_ns, value := what))
        else:
            yield [*run, (at_ns, value)]
            run = []
    if run:
        yield [*run, (to_ns, value)]


def usual_ms(all_phases: list[Phase], name: str) -> float:
    """The median of a phase in the steps drawn, without the step of the flush."""
    return statistics.median(
        (phase.end_ns - phase.begin_ns) / 1e6
        for phase in all_phases
        if phase.name == name and FIRST_STEP <= phase.step <= LAST_STEP and phase.step != FLUSH_STEP
    )


def at_flush(all_phases: list[Phase], name: str) -> Phase:
    return next(phase for phase in all_phases if phase.name == name and phase.step == FLUSH_STEP)


def draw() -> str:
    ranks = [phases(0), phases(1)]
    steps = [phase for phase in ranks[0] if phase.name == "step" and FIRST_STEP <= phase.step <= LAST_STEP]
    from_ns, to_ns = steps[0].begin_ns, steps[-1].end_ns
    total = json.loads((RECORDING / "gpus.json").read_text())[0]["memory_total_bytes"] / GIB

    def x(at_ns: int) -> float:
        return round(LEFT + WIDTH * (at_ns - from_ns) / (to_ns - from_ns), 1)

    def y(gib: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (gib - LOWEST_GIB) / (HIGHEST_GIB - LOWEST_GIB), 1)

    def text(at: tuple[float, float], what: str, kind: str = "") -> str:
        return f'<text x="{at[0]}" y="{at[1]}" class="{kind}">{what}</text>'

    height = LANES + 2 * PITCH + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" role="img">',
        f"<title>Memory of an H200 at 1 kHz over {len(steps)} steps, and the phases of both ranks</title>",
        f"<style>{STYLE}</style>",
        text((LEFT, 18), "GPU 0, used memory (GiB), one reading per millisecond", "soft"),
    ]
    for gib in range(int(LOWEST_GIB), int(total) + 1, 2):
        parts.append(f'<path class="rule" d="M{LEFT} {y(gib)}H{LEFT + WIDTH}"/>')
        parts.append(text((LEFT - 8, y(gib) + 4), str(gib), "end soft"))
    parts.append(f'<path class="full" d="M{LEFT} {y(total)}H{LEFT + WIDTH}"/>')
    parts.append(text((LEFT + WIDTH, y(total) - 6), f"capacity {total:.1f} GiB", "end full-text small"))
    for step in steps:
        parts.append(f'<path class="rule" d="M{x(step.begin_ns)} {TOP - 16}V{LANES + 2 * PITCH}"/>')
        parts.append(text((x((step.begin_ns + step.end_ns) // 2), 40), f"step {step.step}", "middle small soft"))
    for run in memory(0, from_ns, to_ns):
        points = " ".join(f"{x(at_ns)},{y(used / GIB)}" for at_ns, used in run)
        parts.append(f'<polyline class="line" points="{points}"/>')
    for rank, of_rank in enumerate(ranks):
        above = LANES + rank * PITCH
        parts.append(text((LEFT - 8, above + 15), f"rank {rank}", "end soft"))
        for phase in of_rank:
            if FIRST_STEP <= phase.step <= LAST_STEP and phase.name in ("forward", "backward", "comm", "optimizer"):
                begin, end = max(x(phase.begin_ns), LEFT), min(x(phase.end_ns), LEFT + WIDTH)
                span = round(end - begin, 1)
                parts.append(f'<rect class="{phase.name}" x="{begin}" y="{above}" width="{span}" height="{LANE}"/>')
                if end - begin > 9 * len(phase.name):
                    parts.append(text((round((begin + end) / 2, 1), above + 15), phase.name, "middle small"))

    forward, comm = at_flush(ranks[0], "forward"), at_flush(ranks[1], "comm")
    within = [used for run in memory(0, forward.begin_ns, forward.end_ns) for _, used in run]
    slow = (forward.end_ns - forward.begin_ns) / 1e6, usual_ms(ranks[0], "forward")
    wait = (comm.end_ns - comm.begin_ns) / 1e6, usual_ms(ranks[1], "comm")
    flushed = (max(within) - min(within)) / GIB
    notes = (
        f"Memory is full: the allocator returns {flushed:.1f} GiB and maps",
        f"them again. Forward takes {slow[0]:.0f} ms instead of {slow[1]:.0f}.",
    )
    for number, note in enumerate(notes):
        parts.append(text((x(forward.begin_ns) - 12, y(136.0) + 17 + 18 * number), note, "end"))
    under = LANES + 2 * PITCH + 14
    parts.append(f'<path class="pointer" d="M{x((comm.begin_ns + comm.end_ns) // 2)} {LANES + PITCH + LANE}V{under - 12}"/>')
    waits = f"Rank 1 waits for rank 0 in the collective: {wait[0]:.0f} ms instead of {wait[1]:.0f}."
    parts.append(text((x((comm.begin_ns + comm.end_ns) // 2), under), waits, "middle"))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.stdout.write(draw())
