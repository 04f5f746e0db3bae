"""Whether a poller beside a job slows it down: statistics of interleaved blocks.

Input: blocks of time, each under one condition (`off`, or a poller's name), in rounds that contain every condition
once; and durations stamped with their begin. Output: the ratio of each condition to `off`. A ratio is formed within
a round, so that drift of clocks and temperature over the run cancels out. The estimate is the median over rounds, and
its 95 % interval comes from resampling rounds. Nothing here measures or waits.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

BASELINE = "off"
RESAMPLES = 4000
Value = TypeVar("Value")


@dataclass(frozen=True)
class Block:
    """One stretch of time under one condition, Unix nanoseconds."""

    round: int
    condition: str
    begin_ns: int
    end_ns: int


Timed = tuple[int, int]
"""Begin, Unix nanoseconds, and duration, nanoseconds."""


def within(block: Block, samples: Sequence[Timed]) -> list[int]:
    """The durations of samples that began and ended inside a block."""
    return [duration for begin, duration in samples if begin >= block.begin_ns and begin + duration <= block.end_ns]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by linear interpolation; `values` is not empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def bootstrap(
    values: Sequence[Value], statistic: Callable[[Sequence[Value]], float] = statistics.median, seed: int = 1
) -> tuple[float, float]:
    """The 95 % interval of the median, or of another statistic, by resampling; `values` is not empty."""
    draw = random.Random(seed)
    found = [statistic(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return quantile(found, 0.025), quantile(found, 0.975)


def by_round(blocks: Sequence[Block], samples: Sequence[Timed], share: float) -> dict[int, dict[str, float]]:
    """One quantile of each block's durations, by round and condition; a block with fewer than 5 is left out."""
    table: dict[int, dict[str, float]] = {}
    for block in blocks:
        durations = within(block, samples)
        if len(durations) >= 5:
            table.setdefault(block.round, {})[block.condition] = quantile(durations, share)
    return table


def compare(blocks: Sequence[Block], samples: Sequence[Timed], share: float = 0.5) -> dict[str, Any]:
    """The figures of the blocks' quantile; see `figures`."""
    return figures(list(by_round(blocks, samples, share).values()))


def figures(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """By condition, of rounds that have nanoseconds by condition: their median in milliseconds, and, against `off`, the
    median ratio within a round with its 95 % interval. A condition that has no round with `off` has no ratio."""
    outcome: dict[str, Any] = {}
    for condition in sorted({condition for row in rounds for condition in row}):
        own = [row[condition] for row in rounds if condition in row]
        outcome[condition] = {"blocks": len(own), "milliseconds": statistics.median(own) / 1e6}
        ratios = [row[condition] / row[BASELINE] for row in rounds if {condition, BASELINE} <= row.keys()]
        if condition != BASELINE and ratios:
            low, high = bootstrap(ratios)
            outcome[condition] |= {"ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high}
    return outcome


def order(conditions: Sequence[str], rounds: int, seed: int = 1) -> list[tuple[int, str]]:
    """Every condition once per round, in a new random order each round."""
    draw = random.Random(seed)
    return [(number, one) for number in range(rounds) for one in draw.sample(list(conditions), len(conditions))]
