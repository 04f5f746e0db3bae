"""Tests of the bench's arithmetic: what it reads from the processes, and what it computes from that."""

from __future__ import annotations

import math
import os
import random
import time
import unittest
from argparse import Namespace
from datetime import datetime, timedelta

import costs
import energy
import harm
import measure
import parts
import sampling
import table
import together
from pollers import smi_rate

SECOND_NS = 1_000_000_000

EXPOSITION = """\
# HELP highwater_sampler_ticks_due_total Ticks due.
# TYPE highwater_sampler_ticks_due_total counter
highwater_sampler_ticks_due_total{lane="fast"} 5000
highwater_sampler_ticks_due_total{lane="slow"} 5
highwater_sampler_ticks_taken_total{lane="fast"} 4990
highwater_sampler_ticks_missed_total{cause="driver",lane="fast"} 8
highwater_sampler_ticks_missed_total{cause="late",lane="fast"} 2
highwater_gpu_info{gpu="0",name="a \\"b\\", {c}"} 1
highwater_ring_bytes 1.5e+06
"""

FLOOR = (
    "init rc=0\ndevices 1\nloop period=1000us gpus=1 samples=7993 missed=7 rate=999.1Hz wake p50=66.1 p99=207.0 "
    "p99.9=300.0 max=2074.0 us; sweep p50=15.0 p99=65.0 max=2074.0 us; cpu=3.20% of a core; change points=12\n"
)


def blocks_of(rounds: int, step_ns: dict[str, int], drift: float = 0.0) -> tuple[list[harm.Block], list[harm.Timed]]:
    """Blocks of 2 s, and steps of a length that depends on the condition and drifts over the run."""
    draw, now, blocks, steps = random.Random(3), 0, [], []
    for number, condition in harm.order(sorted(step_ns), rounds):
        end = now + 2 * SECOND_NS
        blocks.append(harm.Block(number, condition, now, end))
        while now < end:
            duration = int(step_ns[condition] * (1 + drift * number) * draw.uniform(0.99, 1.01))
            steps.append((now, duration))
            now += duration + 1000
        now = end + 100_000
    return blocks, steps


class Windows(unittest.TestCase):
    """Windows of two kinds, alternating."""

    def test_the_order_turns_and_each_kind_is_summed(self) -> None:
        order: list[str] = []

        def window(name: str, late: float) -> dict[str, float]:
            order.append(name)
            return {"due": 1000.0, "late": late}

        kinds = {"without": lambda: window("without", 1.0), "scraped": lambda: window("scraped", 2.0)}
        outcome = parts.turn_about(3, kinds)
        self.assertEqual(order, ["scraped", "without", "without", "scraped", "scraped", "without"])
        self.assertEqual(outcome["scraped"], {"due": 3000.0, "late": 6.0})
        self.assertEqual(len(outcome["windows"]["without"]), 3)

    def test_the_table_shows_scrapers_and_looks(self) -> None:
        part = {
            "scraped": {"due": 10_000.0, "late": 3.0, "scrapes": 500.0},
            "without": {"due": 10_000.0, "late": 1.0, "scrapes": 0.0},
            "looked": 2.0,
            "look_us": 12.0,
            "reopened": 0,
        }
        late, looks = table.scraper_rows({"scrapers": part})
        self.assertEqual((late[1], late[-1]), ("0.030 with 500 scrapes, 0.010 without", "NO"))
        self.assertEqual((looks[1], looks[-1]), ("2 times, 12 µs each, opened again 0 times", "yes"))
        self.assertEqual(table.scraper_rows({"scrapers": {**part, "looked": 0.0, "look_us": None}})[1][-1], "-")
        self.assertEqual(table.scraper_rows({})[0][-1], "-")


class Harm(unittest.TestCase):
    """Ratios of interleaved blocks."""

    def test_a_slowdown_of_one_percent_is_found_under_drift(self) -> None:
        outcome = harm.compare(*blocks_of(20, {"off": 50_000_000, "daemon": 50_500_000}, drift=0.005))
        self.assertAlmostEqual(outcome["daemon"]["ratio"], 1.01, delta=0.002)
        self.assertGreater(outcome["daemon"]["ratio_low"], 1.005)
        self.assertEqual(outcome["off"]["blocks"], 20)

    def test_no_slowdown_has_one_inside_its_interval(self) -> None:
        daemon = harm.compare(*blocks_of(20, {"off": 50_000_000, "daemon": 50_000_000}))["daemon"]
        self.assertLessEqual(daemon["ratio_low"], 1.0)
        self.assertGreaterEqual(daemon["ratio_high"], 1.0)

    def test_only_what_lies_wholly_in_a_block_counts(self) -> None:
        block = harm.Block(0, "off", 100, 200)
        self.assertEqual(harm.within(block, [(90, 20), (110, 20), (190, 20), (180, 20)]), [20, 20])

    def test_each_round_holds_every_condition_once(self) -> None:
        drawn = harm.order(["off", "daemon", "nvidia-smi"], 5)
        for number in range(5):
            self.assertEqual({one for at, one in drawn if at == number}, {"off", "daemon", "nvidia-smi"})

    def test_too_few_steps_show_nothing(self) -> None:
        self.assertEqual(harm.compare([harm.Block(0, "off", 0, 100)], [(1, 1)]), {})


class Reading(unittest.TestCase):
    """What processes print and the kernel reports."""

    def test_ticks_are_those_of_the_fast_lane(self) -> None:
        ticks = measure.ticks(measure.parse_metrics(EXPOSITION))
        self.assertEqual(ticks, {"due": 5000, "taken": 4990, "missed": 10})

    def test_an_exposition_without_ticks_is_an_error(self) -> None:
        with self.assertRaises(RuntimeError):
            measure.ticks(measure.parse_metrics("highwater_nvml_up 0\n"))

    def test_metrics_without_a_label_and_with_odd_ones_are_read(self) -> None:
        metrics = measure.parse_metrics(EXPOSITION)
        self.assertEqual(measure.total(metrics, "highwater_ring_bytes", lane="fast"), 1.5e6)
        self.assertEqual(measure.total(metrics, "highwater_gpu_info"), 1)
        self.assertIsNone(measure.total(metrics, "highwater_nvml_up"))

    def test_the_floor_shows_its_ticks(self) -> None:
        floor = measure.parse_floor(FLOOR)
        self.assertEqual((floor["samples"], floor["missed"], floor["cpu_percent"]), (7993, 7, 3.2))
        self.assertEqual(floor["sweep_max_us"], 2074.0)

    def test_the_rate_of_nvidia_smi_is_that_of_one_gpu(self) -> None:
        lines = [
            f"2026/11/20 21:00:{1 + tick // 1000:02}.{tick % 1000:03}, {gpu}, 1 MiB"
            for tick in range(0, 2001, 2)
            for gpu in (0, 1)
        ]
        self.assertAlmostEqual(smi_rate("\n".join(["", *lines, ""]), 0.0), 500.0)

    def test_what_nvidia_smi_printed_before_its_turn_does_not_count(self) -> None:
        begin = datetime(2026, 11, 20, 21, 0, 1)
        at = [begin + timedelta(milliseconds=-1000 + late) for late in (0, 1, *range(1000, 3001, 4))]
        lines = [f"{one:%Y/%m/%d %H:%M:%S}.{one.microsecond // 1000:03}, 0, 1 MiB" for one in at]
        self.assertAlmostEqual(smi_rate("\n".join(["3.001, 0, 1 MiB", *lines, "20"]), begin.timestamp()), 250.0, places=3)

    def test_the_floor_says_how_far_it_is(self) -> None:
        said = "devices 1\nso far samples=10 missed=1 sweep_ns=40000\nso far samples=30 missed=1 sweep_ns=90000\nso far sam"
        self.assertEqual(measure.parse_so_far(said), {"samples": 30, "missed": 1, "sweep_ns": 90000})

    def test_cpu_of_a_thread_is_what_it_burnt(self) -> None:
        before, begin = measure.thread_cpu(os.getpid()), time.thread_time()
        while time.thread_time() - begin < 0.2:
            math.sqrt(2)
        burnt = measure.cpu_by_name(before, measure.thread_cpu(os.getpid()), os.getpid())
        self.assertAlmostEqual(sum(burnt.values()), 0.2, delta=0.05)

    def test_the_clock_of_a_process_runs_with_its_cpu(self) -> None:
        clock = measure.process_clock(os.getpid())
        before, begin = time.clock_gettime_ns(clock), time.process_time_ns()
        while time.process_time_ns() - begin < 50_000_000:
            math.sqrt(2)
        self.assertAlmostEqual((time.clock_gettime_ns(clock) - before) / 1e6, 50, delta=20)

    def test_resident_memory_is_reported_in_bytes(self) -> None:
        resident = measure.resident_bytes(os.getpid())
        self.assertGreaterEqual(resident["VmHWM"], resident["VmRSS"])
        self.assertGreater(resident["VmRSS"], 1 << 20)


def cpu_rows(percents: list[float], rounds_a_start: int = 1) -> list[dict[str, float]]:
    """Turns of one poller."""
    return [{"cpu_percent": one, "round": number, "start": number // rounds_a_start} for number, one in enumerate(percents)]


class Table(unittest.TestCase):
    """The table at the end."""

    def test_a_run_with_nothing_measured_still_has_its_table(self) -> None:
        printed = table.render({"harm": {"error": "no GPU"}})
        self.assertIn("CPU of one core, idle (%)", printed)
        self.assertIn("FAILED harm: no GPU", printed)
        self.assertNotIn(" yes", printed)

    def test_the_verdicts_follow_the_figures(self) -> None:
        for gpus, daemon, of_floor, of_smi in (
            (1, 3.2, "yes", "yes"),
            (2, 3.6, "NO", "yes"),
            (8, 3.6, "yes", "yes"),
            (8, 3.9, "NO", "yes"),
            (8, 4.4, "NO", "NO"),
        ):
            cpu = {"daemon": daemon, "floor": 3.0, "nvidia-smi": 4.0}
            rows = {name: cpu_rows([one * drift for drift in (1.0, 1.1, 1.3, 1.5, 1.7, 2.0)]) for name, one in cpu.items()}
            ratios = {peer: costs.cpu_ratio(rows["daemon"], rows[peer]) for peer in ("floor", "nvidia-smi")}
            results = {"environment": {"gpus": gpus}, "costs-idle": {"cpu_ratio": ratios}}
            table_rows = table.cost_rows(results, "costs-idle", "idle")
            self.assertEqual([row[-1] for row in table_rows[2:6]], [of_floor, of_smi] * 2, daemon)

    def test_what_is_outside_the_driver_is_reported_by_the_tick(self) -> None:
        means = {
            "daemon": {"rate_hertz": 1000.0, "sweep_mean_us": 16.0},
            "floor": {"rate_hertz": 500.0, "cpu_percent": 1.3, "sweep_mean_us": 17.0},
        }
        part = {"mean": means, "daemon_threads": {"hw-fast": 2.6, "hw-gpu": 1.0}}
        daemon, floor = table.outside_driver({"costs-idle": part}, "costs-idle")
        self.assertAlmostEqual(daemon, 10.0)
        self.assertAlmostEqual(floor, 9.0)
        del means["daemon"]["sweep_mean_us"]
        self.assertEqual(table.outside_driver({"costs-idle": part}, "costs-idle"), (None, floor))

    def test_the_daemons_cpu_is_split_by_thread(self) -> None:
        mine, theirs = cpu_rows([2.2, 4.6, 3.0]), cpu_rows([1.0, 2.0, 1.5])
        for row in mine:
            row["thread_percent"] = {"hw-fast": row["cpu_percent"] - 0.2, "hw-gpu": 0.2}
        figures = costs.split(mine, theirs[:2])
        self.assertAlmostEqual(figures["sampling"]["ratio"], 6.4 / 3.0)
        self.assertAlmostEqual(figures["others"]["ratio"], 0.2)
        self.assertAlmostEqual(figures["others"]["ratio_high"], 0.2)
        # A turn without its threads has no part in it.
        del mine[0]["thread_percent"]
        self.assertAlmostEqual(costs.split(mine, theirs[:2])["sampling"]["ratio"], 2.2)
        self.assertIsNone(costs.split([], theirs))
        printed = table.render({"costs-idle": {"split": figures}})
        self.assertRegex(printed, r"sampling thread, as a share of the floor's +2\.1333 \[")

    def test_a_daemon_that_reads_seldom_is_not_compared_in_silence(self) -> None:
        for rate, holds in ((1000.0, "yes"), (10.0, "NO")):
            part = {"mean": {"daemon": {"rate_hertz": rate}, "floor": {"rate_hertz": 1001.0}}}
            rows = {row[0]: row[-1] for row in table.cost_rows({"costs-idle": part}, "costs-idle", "idle")}
            self.assertEqual(rows["samples a second, idle"], holds)

    def test_a_few_rounds_make_no_verdict(self) -> None:
        ratio = costs.cpu_ratio(cpu_rows([2.0] * 2), cpu_rows([1.0] * 2))
        self.assertEqual(table.below(ratio["all"], 1.25), "open")

    def test_only_rounds_of_both_are_compared(self) -> None:
        self.assertIsNone(costs.cpu_ratio(cpu_rows([1.0]), []))
        mine, theirs = cpu_rows([1.0, 2.0, 3.0]), cpu_rows([9.0, 1.0, 1.0])
        self.assertEqual(costs.cpu_ratio(mine, theirs[1:])["all"]["ratio"], 2.5)
        self.assertEqual(costs.cpu_ratio(mine[:2], theirs[1:])["all"]["ratio"], 2.0)

    def test_what_comes_once_a_minute_counts_as_it_comes(self) -> None:
        rare = costs.cpu_ratio(cpu_rows([1.0] * 9 + [6.0]), cpu_rows([1.0] * 10))
        self.assertAlmostEqual(rare["all"]["ratio"], 1.5)

    def test_a_spell_that_hits_both_cancels_out(self) -> None:
        spells = [1.0, 1.0, 4.0, 4.2, 1.1, 1.0, 3.0, 1.0]
        ratio = costs.cpu_ratio(cpu_rows([1.2 * one for one in spells]), cpu_rows(spells))
        self.assertAlmostEqual(ratio["all"]["ratio_high"], 1.2)
        self.assertAlmostEqual(ratio["all"]["ratio_low"], 1.2)

    def test_rounds_of_one_start_are_one_observation(self) -> None:
        mine, theirs = [1.0] * 12 + [3.0] * 12, [1.0] * 24
        apart = costs.cpu_ratio(cpu_rows(mine), cpu_rows(theirs))["all"]
        together = costs.cpu_ratio(cpu_rows(mine, 4), cpu_rows(theirs, 4))["all"]
        self.assertEqual(apart["ratio"], together["ratio"])
        self.assertGreater(together["ratio_high"] - together["ratio_low"], 1.5 * (apart["ratio_high"] - apart["ratio_low"]))

    def test_the_quiet_turns_are_the_quarter_that_took_least(self) -> None:
        self.assertEqual(costs.quiet([4.0, 1.0, 3.0, 2.0, 9.0, 2.0, 5.0, 5.0]), 1.5)
        self.assertEqual(costs.quiet([4.0]), 4.0)

    def test_spells_that_hit_one_of_both_leave_the_quiet_turns_alone(self) -> None:
        mine, theirs = [1.2, 3.6, 3.6, 1.2, 1.2, 3.6, 1.2, 1.2] * 2, [1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0] * 2
        ratio = costs.cpu_ratio(cpu_rows(mine), cpu_rows(theirs))
        self.assertGreater(ratio["all"]["ratio"], 1.5)
        self.assertAlmostEqual(ratio["quiet"]["ratio"], 1.2)

    def test_a_thread_that_a_round_lacks_took_nothing_in_it(self) -> None:
        rounds = [{"thread_percent": {"hw-fast": 1.0, "hw-gpu": 0.2}}, {"thread_percent": {"hw-fast": 3.0}}]
        self.assertEqual(costs.thread_means(rounds), {"hw-fast": 2.0, "hw-gpu": 0.1})

    def test_a_ratio_holds_only_with_its_whole_interval(self) -> None:
        for low, high, holds in ((0.999, 1.004, "yes"), (0.999, 1.006, "open"), (1.006, 1.02, "NO")):
            self.assertEqual(table.below({"ratio": 1.0, "ratio_low": low, "ratio_high": high}, 1.005), holds)


class Alternating:
    """A poller of which only the turns are noted. The one with the number `fails` fails."""

    def __init__(self, name: str, noted: list[str], percents: list[float], fails: int | None = None) -> None:
        self.name, self.noted, self.percents, self.fails, self.turns = name, noted, percents, fails, 0

    def short_turn(self, seconds: float, settle_s: float, core: int) -> dict[str, float]:
        self.noted.append(f"{self.name} {seconds} {settle_s} {core}")
        self.turns += 1
        if self.turns == self.fails:
            raise RuntimeError("gone")
        return {"cpu_percent": self.percents.pop(0), "rate_hertz": 1000.0}


class Sampling(unittest.TestCase):
    """The sampling thread in short turns, and the other threads."""

    OPTIONS = Namespace(short_turns=3, short_seconds=0.2, short_pause=0.05)

    def test_short_turns_alternate_on_one_core(self) -> None:
        noted: list[str] = []
        pollers = {"floor": Alternating("floor", noted, [1.0, 2.0, 3.0]), "daemon": Alternating("daemon", noted, [4.0, 4.0, 7.0])}
        errors: dict[str, str] = {}
        rows = sampling.one_round(pollers, self.OPTIONS, costs.Round(1, 5, 1.5), errors)
        self.assertEqual({name: row["cpu_percent"] for name, row in rows.items()}, {"floor": 2.0, "daemon": 5.0})
        order = ["floor 0.2 1.5 5", "daemon 0.2 1.5 5"]
        order += ["daemon 0.2 0.05 5", "floor 0.2 0.05 5", "floor 0.2 0.05 5", "daemon 0.2 0.05 5"]
        self.assertEqual((noted, errors), (order, {}))

    def test_a_poller_that_fails_has_no_row_and_ends_no_round(self) -> None:
        noted: list[str] = []
        pollers = {"floor": Alternating("floor", noted, [1.0] * 3, 2), "daemon": Alternating("daemon", noted, [4.0] * 3)}
        errors: dict[str, str] = {}
        rows = sampling.one_round(pollers, self.OPTIONS, costs.Round(0, 0, 1.5), errors)
        self.assertEqual((list(rows), errors), (["daemon"], {"floor": "gone"}))
        self.assertEqual(len([one for one in noted if one.startswith("floor")]), 2, "no turn after the one that failed")

    def test_the_whole_is_both_parts_and_so_is_its_interval(self) -> None:
        ratio = {"ratio": 1.0, "ratio_low": 0.97, "ratio_high": 1.03, "starts": 9}
        others = {"ratio": 0.2, "ratio_low": 0.12, "ratio_high": 0.28}
        whole = sampling.added(ratio, others, 2.0)
        expected = {"ratio": 1.1, "ratio_low": 1.05, "ratio_high": 1.15, "starts": 9}
        self.assertEqual({name: round(one, 9) for name, one in whole.items()}, expected)

    def test_the_figures_are_in_the_table_with_a_verdict(self) -> None:
        for mine, holds in ((1.01, "yes"), (1.06, "NO")):
            rounds = {"daemon": cpu_rows([2.0 * mine] * 12), "floor": cpu_rows([2.0] * 12)}
            for rows in rounds.values():
                rows[:] = [row | {"rate_hertz": 1000.0} for row in rows]
            figures = sampling.figures(rounds, [0.12, 0.12, 0.12, 0.12])
            results = {"environment": {"gpus": 1}, "sampling-idle": figures}
            rows = table.sampling_rows(results, "sampling-idle", "idle")
            self.assertEqual([row[-1] for row in rows], ["yes", "", holds, "", holds, ""])
            self.assertEqual(rows[2][1], "{0:.4f} [{0:.4f} {0:.4f}]".format(mine + 0.06))
            self.assertEqual(table.sampling_rows(results, "sampling-training", "training"), [])
            self.assertIn("with all other threads", table.render(results))

    def test_without_one_of_both_there_is_no_whole(self) -> None:
        alone = sampling.figures({"daemon": cpu_rows([2.0]), "floor": []}, [0.1])
        self.assertEqual((alone["sampling"], alone["whole"]), (None, None))
        self.assertIsNone(sampling.figures({"daemon": cpu_rows([2.0]), "floor": cpu_rows([2.0])}, [])["whole"])

    def test_runs_are_combined_with_every_round_and_second(self) -> None:
        one, two = run_of(1, []), run_of(2, [])
        for run, percents, others in ((one, [2.0, 4.0], [0.1]), (two, [6.0], [0.3])):
            rounds = {"daemon": cpu_rows(percents), "floor": cpu_rows([2.0] * len(percents))}
            run["sampling-idle"] = sampling.figures(rounds, others)
        added = together.add({"one": one, "two": two})["sampling-idle"]
        self.assertEqual((added["sampling"]["all"]["ratio"], added["sampling"]["all"]["starts"]), (2.0, 3))
        self.assertAlmostEqual(added["whole"]["all"]["ratio"], 2.1)


    def test_what_the_other_threads_do_follows_the_table(self) -> None:
        figures = {"others_made_of": {"threads": {"hw-gpu": 0.1, "hw-none": 0.0004}, "calls": {"nvlink": 0.0041, "bar1": 0.02}}}
        printed = table.render({"sampling-training": figures})
        self.assertIn("by thread over a minute, training (%): hw-gpu 0.100\n", printed + "\n")
        self.assertIn("by call over that minute, training (%): bar1 0.020, nvlink 0.004\n", printed + "\n")
        self.assertNotIn("over a minute, idle", printed)


class Energy(unittest.TestCase):
    """The daemon's energy beside the GPUs' counters."""

    def scrape(self, first: float, second: float, readings: int) -> measure.Metrics:
        lines = [f'highwater_gpu_energy_joules_total{{gpu="{gpu}"}} {joules}' for gpu, joules in enumerate((first, second))]
        lines += [f'highwater_nvml_call_duration_seconds_count{{call="{call}"}} {readings}' for call in ("energy", "bar1")]
        return measure.parse_metrics("\n".join(lines))

    def test_each_gpu_is_compared_with_its_own_counter(self) -> None:
        before, after = self.scrape(1000.0, 2000.0, 2), self.scrape(1990.0, 2505.0, 3)
        rows = energy.compared(before, after, [1000.0, 500.0, 100.0])
        self.assertEqual([row["ratio"] for row in rows], [0.99, 1.01, None])
        self.assertEqual([row["daemon_joules"] for row in rows], [990.0, 505.0, None])
        self.assertEqual(energy.readings(before, after), 1.0)

    def test_a_reading_in_five_minutes_is_part_of_the_other_threads(self) -> None:
        lines = [f'highwater_nvml_call_duration_seconds_sum{{call="{call}"}} 0.03' for call in ("energy", "bar1")]
        self.assertAlmostEqual(sampling.energy_percent(measure.parse_metrics("\n".join(lines))), 0.01)
        self.assertEqual(sampling.energy_percent([]), 0.0)

    def test_a_comparison_in_which_the_daemon_read_the_counter_has_no_figure(self) -> None:
        gpus = [{"counter_joules": 1000.0, "daemon_joules": 990.0, "ratio": 0.99}]
        for readings, said in ((0.0, "0.9900"), (1.0, "the counter was read")):
            rows = table.energy_rows({"energy": {"seconds": 60.0, "readings": readings, "gpus": gpus}})
            self.assertEqual(rows[0][1], said)
            self.assertIn("(1000 J)", rows[0][0])
        self.assertEqual(table.energy_rows({"energy": {"error": "no GPU"}}), [])


def run_of(begin: int, percents: list[float], **environment: object) -> dict[str, object]:
    """Results of one run, two rounds a start, in which the peers took half and twice as much as the daemon."""
    shares = {"daemon": 1.0, "floor": 0.5, "nvidia-smi": 2.0}
    rounds = {name: cpu_rows([share * one for one in percents], 2) for name, share in shares.items()}
    for row in rounds["daemon"]:
        row |= {"thread_percent": {"hw-fast": row["cpu_percent"]}, "resident_peak_bytes": 28 << 20}
    smi = "name, driver_version, temperature.gpu\nNVIDIA H200, 580.159.04, " + str(30 + begin)
    machine = {"host": "Linux", "cores": 16, "gpus": 1, "highwater": "0.1.0", "binary_bytes": 9, "nvidia_smi": smi}
    return {"begin_unix": begin, "environment": machine | environment, "costs-idle": {"rounds": rounds}}


class Together(unittest.TestCase):
    """Runs that are combined."""

    def test_every_turn_of_each_run_counts_and_keeps_its_start(self) -> None:
        runs = {"a": run_of(1, [1.0, 2.0, 3.0]), "b": run_of(2, [4.0, 5.0]), "c": run_of(3, [6.0])}
        added = together.add(runs)["costs-idle"]
        daemon = added["rounds"]["daemon"]
        self.assertEqual([row["cpu_percent"] for row in daemon], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        self.assertEqual([row["round"] for row in daemon], [0, 1, 2, 3, 4, 5])
        self.assertEqual(added["cpu_ratio"]["floor"]["all"]["starts"], 4)
        self.assertAlmostEqual(added["cpu_ratio"]["floor"]["all"]["ratio"], 2.0)
        self.assertIn("yes", table.render(together.add(runs)))

    def test_one_run_alone_is_as_it_was(self) -> None:
        run = run_of(1, [1.0, 2.0, 3.0])
        added = together.add({"a": run})["costs-idle"]
        self.assertEqual(added["rounds"], run["costs-idle"]["rounds"])

    def test_step_times_of_all_runs_are_paired_within_their_own_rounds(self) -> None:
        # The second machine is slower: its rounds say nothing against those of the first.
        rounds = [{"0": {"off": 100.0, "daemon": 101.0}, "1": {"off": 100.0}}, {"0": {"off": 200.0, "daemon": 206.0}}]
        runs = {str(begin): run_of(begin, []) | {"harm": {"step_ns_by_round": one}} for begin, one in enumerate(rounds)}
        step = together.add(runs)["harm"]["step"]
        self.assertEqual((step["off"]["blocks"], step["daemon"]["blocks"]), (3, 2))
        self.assertAlmostEqual(step["daemon"]["ratio"], 1.02)
        self.assertEqual((step["daemon"]["ratio_low"], step["daemon"]["ratio_high"]), (1.01, 1.03))
        self.assertIn("1.0200 [1.0100 1.0300]", table.render(together.add(runs)))

    def test_runs_of_other_things_are_refused_by_name(self) -> None:
        one = run_of(1, [1.0])
        for other, culprit in (
            (run_of(2, [1.0], cores=32), r"one and two .* cores \(16 and 32\)"),
            (run_of(2, [1.0], binary_sha256="b0"), r"binary_sha256 \(None and b0\)"),
            (run_of(2, [1.0], nvidia_smi="name, driver_version\nNVIDIA H100, 580.159.04"), "H100"),
            (run_of(1, [1.0]), "one and two are one and the same run"),
            (run_of(2, [1.0]) | {"environment": {}}, "two has no environment"),
        ):
            with self.assertRaisesRegex(ValueError, culprit):
                together.add({"one": one, "two": other})

    def test_runs_without_turns_are_an_error(self) -> None:
        with self.assertRaisesRegex(ValueError, "no turns in a"):
            together.add({"a": run_of(1, []) | {"costs-idle": {"error": "no GPU"}}})
        with self.assertRaisesRegex(ValueError, "no turns in a"):
            together.add({"a": run_of(1, [])})

    def test_what_failed_in_a_run_is_reported_with_its_name(self) -> None:
        one, two = run_of(1, [1.0]), run_of(2, [1.0])
        two["costs-idle"]["errors"] = {"floor": "no compiler"}
        two["costs-training"] = {"error": "OutOfTime: no time was left"}
        one["harm"] = {"error": "no job"}
        failed = together.failures({"one": one, "two": two})
        self.assertEqual(failed, ["one: harm: no job", "two: costs-idle, floor: no compiler", "two: costs-training: OutOfTime: no time was left"])


if __name__ == "__main__":
    unittest.main()
