"""Tests of check_peaks on made-up logs: two pollers of one memory curve, a period apart at most."""

from __future__ import annotations

import json
import random
import tempfile
import unittest
from pathlib import Path
from typing import Any

from check_peaks import PERIOD_NS, Phase, Report, Series, compare, read_phases, read_raw

MIB = 1 << 20
START_NS = 1_795_207_211_000_000_000
RESERVED = 615 * MIB


class Curve:
    """True memory: a step function of time."""

    def __init__(self, changes: list[tuple[int, int]]) -> None:
        self.changes = changes

    def at(self, time_ns: int) -> int:
        """Bytes in use at a time."""
        return [value for since, value in self.changes if since <= time_ns][-1]


def poll(curve: Curve, until_ns: int, offset_ns: int, blocked: tuple[int, int] = (0, 0)) -> Series:
    """What a poller of 1 kHz sees that starts at `offset_ns` and is stopped while blocked."""
    series = Series()
    previous = None
    for tick in range(offset_ns, until_ns, PERIOD_NS):
        if blocked[0] <= tick < blocked[1]:
            continue
        if previous is not None and tick - previous > 1.5 * PERIOD_NS:
            series.gaps.append((previous, tick))
        previous = tick
        value = curve.at(tick)
        if not series.values or series.values[-1] != value:
            series.times.append(tick)
            series.values.append(value)
    return series


def random_curve(seed: int, until_ns: int) -> Curve:
    """Memory that is held for 1.2 ms to 8 ms at each level."""
    draw = random.Random(seed)
    time_ns, changes = -10 * PERIOD_NS, []
    while time_ns < until_ns:
        changes.append((time_ns, draw.randrange(1, 500) * 2 * MIB))
        time_ns += draw.randrange(1_200_000, 8_000_000)
    return Curve(changes)


def random_phases(seed: int, until_ns: int) -> list[Phase]:
    """Phases of 0.3 ms to 40 ms, one after the other."""
    draw = random.Random(seed)
    time_ns = 5 * PERIOD_NS
    phases: list[Phase] = []
    while time_ns < until_ns - 60 * PERIOD_NS:
        end_ns = time_ns + draw.randrange(300_000, 40_000_000)
        phases.append(Phase(0, "forward", len(phases), time_ns, end_ns))
        time_ns = end_ns + draw.randrange(10_000, 3_000_000)
    return phases


def answer(phases: list[Phase], seen: Series, **changes: Any) -> dict[str, Any]:
    """The daemon's answer if it had seen `seen`."""
    return {
        "phases": [
            {
                "rank": phase.rank,
                "phase": phase.name,
                "step": phase.step,
                "begin_unix_nano": phase.begin_ns,
                "end_unix_nano": phase.end_ns,
                "gpus": [{"gpu": "0", "peak_bytes": max(seen.over(phase.begin_ns, phase.end_ns)), **changes}],
            }
            for phase in phases
        ]
    }


class TwoPollers(unittest.TestCase):
    """Pollers that tick at different instants."""

    def test_any_two_pollers_of_held_memory_agree_within_one_sample(self) -> None:
        until_ns = 2_000 * PERIOD_NS
        for seed in range(40):
            curve, phases = random_curve(seed, until_ns), random_phases(seed, until_ns)
            raw = poll(curve, until_ns, 0)
            daemon = poll(curve, until_ns, random.Random(seed).randrange(PERIOD_NS))
            report = compare({0: raw}, phases, answer(phases, daemon))
            self.assertTrue(report.holds, (seed, report.examples))
            self.assertEqual(report.within_one, len(phases))
            self.assertLessEqual(report.equal, report.within_one)

    def test_a_poller_three_periods_late_does_not(self) -> None:
        until_ns = 2_000 * PERIOD_NS
        curve, phases = random_curve(7, until_ns), random_phases(7, until_ns)
        late = poll(curve, until_ns, 0)
        late.times = [time_ns + 3 * PERIOD_NS for time_ns in late.times]
        report = compare({0: poll(curve, until_ns, 0)}, phases, answer(phases, late))
        self.assertGreater(report.off, 0)
        self.assertFalse(report.holds)


class OnePhase(unittest.TestCase):
    """One phase of 20 ms in which memory rises to 300 MiB for 5 ms in its middle."""

    def setUp(self) -> None:
        self.curve = Curve([(-PERIOD_NS, 100 * MIB), (30 * PERIOD_NS, 300 * MIB), (35 * PERIOD_NS, 120 * MIB)])
        self.raw = poll(self.curve, 100 * PERIOD_NS, 0)
        self.phase = Phase(0, "backward", 3, 20 * PERIOD_NS, 40 * PERIOD_NS)

    def compare(self, reported: dict[str, Any], raw: Series | None = None) -> Report:
        return compare({0: raw or self.raw}, [self.phase], reported)

    def test_the_same_peak_is_equal(self) -> None:
        report = self.compare(answer([self.phase], self.raw))
        self.assertEqual((report.equal, report.within_one, report.off, report.worst_bytes), (1, 1, 0, 0))
        self.assertTrue(report.holds)

    def test_a_bare_list_is_taken_too(self) -> None:
        self.assertTrue(self.compare(answer([self.phase], self.raw)["phases"]).holds)

    def test_a_peak_of_one_granule_less_is_off(self) -> None:
        report = self.compare(answer([self.phase], self.raw, peak_bytes=298 * MIB))
        self.assertEqual((report.equal, report.within_one, report.off, report.worst_bytes), (0, 0, 1, 2 * MIB))
        self.assertFalse(report.holds)

    def test_a_peak_that_counts_the_reserve_is_off(self) -> None:
        self.assertEqual(self.compare(answer([self.phase], self.raw, peak_bytes=300 * MIB + RESERVED)).off, 1)

    def test_a_phase_that_the_daemon_lacks_is_missing(self) -> None:
        report = self.compare({"phases": []})
        self.assertEqual((report.missing, report.compared), (1, 0))
        self.assertFalse(report.holds)

    def test_a_phase_of_another_time_is_missing_and_unexpected(self) -> None:
        reported = answer([self.phase], self.raw)
        reported["phases"][0]["begin_unix_nano"] += 5 * PERIOD_NS
        report = self.compare(reported)
        self.assertEqual((report.missing, report.unexpected), (1, 1))

    def test_a_phase_without_a_peak_and_without_a_gap_is_counted(self) -> None:
        reported = answer([self.phase], self.raw, peak_bytes=None, gap_ns=0)
        self.assertEqual(self.compare(reported).without_memory, 1)

    def test_a_daemon_that_shows_gaps_where_the_log_has_samples_does_not_hold(self) -> None:
        phases = [Phase(0, "forward", step, 10 * PERIOD_NS, 20 * PERIOD_NS) for step in range(200)]
        for blind, holds in ((2, True), (3, False)):
            reported = answer(phases, self.raw)
            for phase in reported["phases"][:blind]:
                phase["gpus"][0] |= {"peak_bytes": None, "gap_ns": 10 * PERIOD_NS}
            report = compare({0: self.raw}, phases, reported)
            self.assertEqual((report.in_daemon_gap, report.holds), (blind, holds))

    def test_steps_in_the_answer_are_left_out(self) -> None:
        reported = answer([self.phase], self.raw)
        reported["phases"].append({**reported["phases"][0], "kind": "step", "phase": None})
        self.assertTrue(self.compare(reported).holds)

    def test_a_phase_in_a_gap_is_counted_apart(self) -> None:
        blocked = (29 * PERIOD_NS, 36 * PERIOD_NS)
        raw = poll(self.curve, 100 * PERIOD_NS, 0, blocked)
        report = self.compare(answer([self.phase], self.raw), raw)
        self.assertEqual((report.in_gap, report.compared, report.off), (1, 0, 0))
        self.assertEqual(report.worst_in_gap_bytes, 180 * MIB)
        self.assertEqual(report.gaps, 1)

    def test_a_gap_that_the_daemon_shows_counts_too(self) -> None:
        reported = answer([self.phase], self.raw, peak_bytes=120 * MIB, gap_ns=7 * PERIOD_NS)
        self.assertEqual(self.compare(reported).in_gap, 1)

    def test_a_change_just_after_the_end_is_within_one_sample(self) -> None:
        phase = Phase(0, "backward", 3, 20 * PERIOD_NS, 30 * PERIOD_NS - 100_000)
        report = compare({0: self.raw}, [phase], answer([phase], self.raw, peak_bytes=300 * MIB))
        self.assertEqual((report.equal, report.within_one, report.off), (0, 1, 0))

    def test_a_change_one_and_a_half_periods_after_the_end_is_within_two(self) -> None:
        phase = Phase(0, "backward", 3, 20 * PERIOD_NS, 30 * PERIOD_NS - 1_500_000)
        report = compare({0: self.raw}, [phase], answer([phase], self.raw, peak_bytes=300 * MIB))
        self.assertEqual((report.within_one, report.within_two, report.off), (0, 1, 1))

    def test_a_phase_before_the_log_is_not_covered(self) -> None:
        phase = Phase(0, "data", 0, -9 * PERIOD_NS, -5 * PERIOD_NS)
        reported = answer([phase], Series([-20 * PERIOD_NS], [0]))
        self.assertEqual(compare({0: self.raw}, [phase], reported).not_covered, 1)


class Files(unittest.TestCase):
    """The files as they are written beside a run."""

    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name) / "file"

    def test_the_reserve_is_taken_off_and_gaps_are_shared(self) -> None:
        self.path.write_text(
            "# realtime_ns,gpu,used_bytes ; change points only, plus first\n"
            f"# reserved,0,{RESERVED}\n# reserved,1,{RESERVED}\n"
            f"{START_NS},0,{RESERVED + 5 * MIB}\n{START_NS + 9},1,{RESERVED}\n# gap,{START_NS},{START_NS + 4}\n"
        )
        raw = read_raw(self.path)
        self.assertEqual((raw[0].values, raw[1].values), ([5 * MIB], [0]))
        self.assertEqual(raw[1].gaps, [(START_NS, START_NS + 4)])

    def test_an_unknown_reserve_is_an_error(self) -> None:
        self.path.write_text(f"{START_NS},0,{RESERVED}\n")
        with self.assertRaises(ValueError):
            read_raw(self.path)
        self.assertEqual(read_raw(self.path, RESERVED)[0].values, [0])

    def test_phases_are_paired_and_steps_and_marks_left_out(self) -> None:
        events = [
            {"event": "begin", "kind": "step", "rank": 0, "step": 1, "time_unix_nano": 1},
            {"event": "begin", "kind": "phase", "name": "data", "rank": 0, "step": 1, "time_unix_nano": 2},
            {"event": "mark", "kind": "phase", "name": "oom", "rank": 0, "step": 1, "time_unix_nano": 3},
            {"event": "end", "kind": "phase", "name": "data", "rank": 0, "step": 1, "time_unix_nano": 4},
            {"event": "begin", "kind": "phase", "name": "forward", "rank": 0, "step": 1, "time_unix_nano": 5},
        ]
        self.path.write_text("".join(json.dumps(event) + "\n" for event in events))
        self.assertEqual(read_phases([self.path]), [Phase(0, "data", 1, 2, 4)])


if __name__ == "__main__":
    unittest.main()
