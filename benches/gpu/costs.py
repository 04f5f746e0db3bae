"""The daemon's cost beside its peers: pollers take turns, and the ratio of their CPU is computed.

Input: a rig, and the number and length of the rounds. Output: every turn, means, and ratios with their intervals.
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import harm
from pollers import POLLERS, SAMPLING_THREAD, Poller, other_threads_percent
from rig import Rig

Row = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """A round: its number, the core of its turns, and the seconds to settle when a poller's first turn in it begins."""

    number: int
    core: int
    settle_s: float


TakeRound = Callable[[dict[str, Poller], Namespace, Round, dict[str, str]], dict[str, Row]]
"""Takes a round of the pollers; returns a row of each that had its turn, and notes the others' errors."""

TROUBLES = (RuntimeError, OSError, KeyError, ValueError)
"""Errors that affect one poller only."""
LONGEST_START_S = 25.0
"""The longest that a few rounds take, including their start."""


def in_turns(rig: Rig, options: Namespace) -> dict[str, Any]:
    """What each poller costs in its turns. Each round begins with another poller."""
    names = [name for name in POLLERS if name in ("daemon", *options.peers)]
    rounds, errors = all_rounds(rig, options, names, one_round)
    return {**figures(rounds), "errors": errors}


def all_rounds(
    rig: Rig, options: Namespace, names: Sequence[str], take: TakeRound
) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """The rows of all rounds by poller, and the last error of each. The rounds go through all cores. Pollers are restarted
    every few rounds: depending on where the host has put its memory, one process pays more than another on the same core,
    for a while or for as long as it lives."""
    rounds: dict[str, list[Row]] = {name: [] for name in POLLERS}
    errors: dict[str, str] = {}
    cores = sorted(os.sched_getaffinity(0))
    for begin in range(0, options.rounds, options.rounds_a_start):
        if time.monotonic() + LONGEST_START_S > options.deadline:
            break
        with polling(rig, names, errors) as pollers:
            for number in range(begin, min(begin + options.rounds_a_start, options.rounds)):
                core = cores[number * len(cores) // options.rounds]
                settle_s = options.settle_seconds if number == begin else options.pause_seconds
                for name, row in take(pollers, options, Round(number, core, settle_s), errors).items():
                    rounds[name].append({**row, "round": number, "core": core, "start": begin})
    return rounds, errors


def figures(rounds: dict[str, list[Row]]) -> dict[str, Any]:
    """Every turn, and figures computed from them: means, quiet turns, ratios to each peer, and the daemon's threads."""
    known = {name: rows for name, rows in rounds.items() if rows}
    return {
        "rounds": rounds,
        "mean": {name: means(rows) for name, rows in known.items()},
        "cpu_ratio": {peer: cpu_ratio(rounds["daemon"], rounds[peer]) for peer in rounds if peer != "daemon"},
        "cpu_quiet": {name: quiet([row["cpu_percent"] for row in rows]) for name, rows in known.items()},
        "split": split(rounds["daemon"], rounds.get("floor", [])),
        "daemon_threads": thread_means(rounds["daemon"]),
    }


def together(runs: Sequence[dict[str, list[Row]]]) -> dict[str, list[Row]]:
    """The turns of several runs as if of one run: rounds and starts are numbered on from run to run."""
    joined: dict[str, list[Row]] = {name: [] for name in POLLERS}
    numbered = 0
    for rounds in runs:
        for name, rows in rounds.items():
            moved = ({**row, "round": row["round"] + numbered, "start": row["start"] + numbered} for row in rows)
            joined[name].extend(moved)
        numbered += 1 + max((row["round"] for rows in rounds.values() for row in rows), default=-1)
    return joined


@contextmanager
def polling(rig: Rig, names: Sequence[str], errors: dict[str, str]) -> Iterator[dict[str, Poller]]:
    """The pollers of these names that start, until the block ends. Each is stopped until its first turn."""
    pollers: dict[str, Poller] = {}
    with ExitStack() as ending:
        for name in names:
            started = rig.started()
            try:
                pollers[name] = POLLERS[name](rig)
                ending.callback(pollers[name].end)
            except TROUBLES as error:
                errors[name] = str(error)
                rig.end_since(started)
        yield pollers


def one_round(pollers: dict[str, Poller], options: Namespace, here: Round, errors: dict[str, str]) -> dict[str, Row]:
    """One turn of each poller."""
    names = list(pollers)
    first = here.number % max(1, len(names))
    order = names[first:] + names[:first]
    how = (options.round_seconds, here.settle_s, here.core)
    rows = {name: turn(pollers[name].turn, how, errors, name) for name in order}
    return {name: row for name, row in rows.items() if row}


def turn(
    take: Callable[[float, float, int], Row], how: tuple[float, float, int], errors: dict[str, str], name: str
) -> Row | None:
    """One turn: its seconds, those to settle, and its core. None if it fails, with the reason in `errors`."""
    try:
        return take(*how)
    except TROUBLES as error:
        errors[name] = str(error)
        print(f"  {name}: {error}", flush=True)
        return None


def cpu_ratio(own: Sequence[Row], peer: Sequence[Row]) -> dict[str, dict[str, float]] | None:
    """The daemon's CPU over a peer's: of `all` turns and of each one's `quiet` ones, with 95 % intervals from resampling
    the starts, each with all its rounds. A round that one of them lacks is left out; None if no round is left."""
    starts = [[(mine["cpu_percent"], its["cpu_percent"]) for mine, its in start] for start in by_start(own, peer)]
    if not starts:
        return None
    return {turns: ratio(starts, mean) for turns, mean in (("all", statistics.fmean), ("quiet", quiet))}


def by_start(own: Sequence[Row], peer: Sequence[Row]) -> list[list[tuple[Row, Row]]]:
    """Two pollers' turns of the same rounds, by the start of the pollers. A round that one of them lacks is left out."""
    theirs = {row["round"]: row for row in peer}
    starts: dict[int, list[tuple[Row, Row]]] = {}
    for mine in own:
        if mine["round"] in theirs:
            starts.setdefault(mine["start"], []).append((mine, theirs[mine["round"]]))
    return list(starts.values())


def split(own: Sequence[Row], floor: Sequence[Row]) -> dict[str, dict[str, float]] | None:
    """The daemon's CPU in two parts, with 95 % intervals as above: `sampling` is its sampling thread's over the floor's,
    `others` that of all other threads, percent of one core. None if no round is left."""
    known = [row for row in own if SAMPLING_THREAD in row.get("thread_percent", {})]
    starts = by_start(known, floor)
    if not starts:
        return None
    sampling = [[(mine["thread_percent"][SAMPLING_THREAD], its["cpu_percent"]) for mine, its in start] for start in starts]
    others = [[other_threads_percent(mine) for mine, _ in start] for start in starts]
    return {
        "sampling": ratio(sampling, statistics.fmean),
        "others": with_interval(others, lambda some: statistics.fmean(one for start in some for one in start)),
    }


def ratio(starts: Sequence[Sequence[tuple[float, float]]], mean: Callable[[list[float]], float]) -> dict[str, float]:
    """The mean of the first values over the mean of the second, of all starts' pairs, with its interval."""

    def share(some: Sequence[Sequence[tuple[float, float]]]) -> float:
        mine, theirs = zip(*(pair for start in some for pair in start), strict=True)
        return mean(list(mine)) / mean(list(theirs))

    return with_interval(starts, share)


def with_interval(starts: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> dict[str, float]:
    """A figure of all starts, with its 95 % interval from resampling them."""
    low, high = harm.bootstrap(starts, statistic)
    return {"ratio": statistic(starts), "ratio_low": low, "ratio_high": high, "starts": len(starts)}


def quiet(percents: Sequence[float]) -> float:
    """The mean of the lowest quarter. What makes turns expensive comes mostly from the host, and only ever adds."""
    ordered = sorted(percents)
    return statistics.fmean(ordered[: max(1, len(ordered) // 4)])


def thread_means(rows: Sequence[Row]) -> dict[str, float]:
    """The mean over rounds of each thread's CPU, percent of one core. A thread that a round lacks counts as 0 in it."""
    names = sorted({name for row in rows for name in row["thread_percent"]})
    return {name: statistics.fmean(row["thread_percent"].get(name, 0.0) for row in rows) for name in names}


def means(rows: Sequence[Row]) -> dict[str, float]:
    """The mean over rounds of each number."""
    names = {name for row in rows for name, value in row.items() if isinstance(value, (int, float))}
    known = {name: [row[name] for row in rows if isinstance(row.get(name), (int, float))] for name in sorted(names)}
    return {name: statistics.fmean(values) for name, values in known.items()}
