"""The daemon's cost beside the floor, for less noise than turns of a second have: its sampling thread in short turns, and its
other threads over a minute.

A turn of a second costs 10 to 20 % more or less than the next, mostly because of what the host does for a second or so. In turns
of a fifth of a second, floor and daemon share such a spell. Other threads do something up to twice a minute, so they are measured
while the daemon is never stopped. Input: a rig, and the number and length of the rounds. Output: every round, and ratios with
their intervals.
"""

from __future__ import annotations

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import costs
import measure
import pollers
from costs import Round, Row
from pollers import Poller
from rig import Rig

PAIR = ("floor", "daemon")
"""The two that are compared."""
BEGUN_S = 5.0
"""How long a daemon runs before its other threads are measured: at its start they read what they otherwise read seldom."""
ENERGY_PERIOD_S = 300.0
"""How often the daemon reads energy counters. The other threads are measured for less, so a reading's share is added."""


def beside_the_floor(rig: Rig, options: Namespace) -> dict[str, Any]:
    """The daemon's threads: the one that samples beside the floor, the others alone."""
    seconds, made_of = other_threads(rig, options.others_seconds)
    rounds, errors = costs.all_rounds(rig, options, PAIR, one_round)
    return {**figures({name: rounds[name] for name in PAIR}, seconds), "others_made_of": made_of, "errors": errors}


def other_threads(rig: Rig, seconds: float) -> tuple[list[float], dict[str, dict[str, float]]]:
    """CPU of all threads but the one that samples in each second of a daemon that is scraped every second, percent of one
    core; and what takes it: each thread's CPU, and how long the driver's calls took, percent of the whole time."""
    daemon = rig.daemon()
    with measure.scraped(daemon):
        time.sleep(BEGUN_S)
        before, begin = daemon.metrics(), time.monotonic()
        windows = [pollers.window(daemon.child.pid, 1.0) for _ in range(math.ceil(seconds))]
        elapsed_us, calls = 1e6 * (time.monotonic() - begin), pollers.calls_us(before, daemon.metrics())
    daemon.stop()
    threads = costs.means([window["thread_percent"] for window in windows])
    energy = energy_percent(before)
    shares = {call: 100 * us / elapsed_us for call, us in calls.items()} | {"energy": energy}
    return [pollers.other_threads_percent(window) + energy for window in windows], {"threads": threads, "calls": shares}


def energy_percent(first: measure.Metrics) -> float:
    """What a reading of all energy counters takes every `ENERGY_PERIOD_S`, percent of one core, by a scrape after the first."""
    return 100 * pollers.calls_us([], first).get("energy", 0.0) / (1e6 * ENERGY_PERIOD_S)


def one_round(pair: dict[str, Poller], options: Namespace, here: Round, errors: dict[str, str]) -> dict[str, Row]:
    """Short turns of both, alternating on one core; their means. A poller whose turn fails has no row."""
    turns: dict[str, list[Row]] = {name: [] for name in pair}
    for again in range(options.short_turns):
        how = (options.short_seconds, options.short_pause if again else here.settle_s, here.core)
        for name in list(turns)[:: 1 if (here.number + again) % 2 else -1]:
            row = costs.turn(pair[name].short_turn, how, errors, name)
            if row:
                turns[name].append(row)
            else:
                del turns[name]
    return {name: costs.means(rows) for name, rows in turns.items()}


def figures(rounds: dict[str, list[Row]], others: Sequence[float]) -> dict[str, Any]:
    """Every round, and figures computed from them: the sampling thread as a share of the floor, the other threads, and the
    whole daemon as a share of the floor, each with a 95 % interval."""
    sampling = costs.cpu_ratio(rounds["daemon"], rounds["floor"])
    beside = costs.with_interval(others, statistics.fmean) if others else None
    floor = [row["cpu_percent"] for row in rounds["floor"]]
    whole = None
    if sampling and beside:
        means = {"all": statistics.fmean(floor), "quiet": costs.quiet(floor)}
        whole = {turns: added(ratio, beside, means[turns]) for turns, ratio in sampling.items()}
    return {
        "rounds": rounds,
        "others": list(others),
        "mean": {name: costs.means(rows) for name, rows in rounds.items() if rows},
        "sampling": sampling,
        "other_threads": beside,
        "whole": whole,
    }


def added(sampling: dict[str, float], others: dict[str, float], floor_percent: float) -> dict[str, float]:
    """The sampling thread's share of the floor and that of the other threads. The two were measured apart, so the distances
    to the ends of their intervals are added as squares."""
    share = {name: others[name] / floor_percent for name in ("ratio", "ratio_low", "ratio_high")}
    ratio = sampling["ratio"] + share["ratio"]

    def away(end: str) -> float:
        return math.hypot(sampling[end] - sampling["ratio"], share[end] - share["ratio"])

    low, high = ratio - away("ratio_low"), ratio + away("ratio_high")
    return {"ratio": ratio, "ratio_low": low, "ratio_high": high, "starts": sampling["starts"]}


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several runs as if of one."""
    rounds = costs.together([run["rounds"] for run in runs])
    return figures({name: rounds[name] for name in PAIR}, [one for run in runs for one in run["others"]])
