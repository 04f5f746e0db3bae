"""Tests of the recorder's pure parts on made-up recordings, and of its pieces that need no GPU."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent / "record"))

import nvml
import record
import recording
import summary
import truth
from events import EventLog
from loader import Loader
from scenarios import Scenario, Segment, build, from_document, tiny

GIB = 1 << 30
MS = 1_000_000
START_NS = 1_795_207_211_000_000_000
TOTAL = 140 * GIB


class Job:
    """A made-up job: each step has a data phase of 1 ms, a forward of 40 ms, a comm of 10 ms."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(scenario.gpus)}
        self.points = [(START_NS, gpu, 20 * GIB) for gpu in range(scenario.gpus)]
        self.retries = [0] * scenario.gpus
        self.now_ns = START_NS + MS
        self.number = 0

    def steps(self, cfg: str, count: int, **longer_ms: dict[int, int]) -> None:
        """Steps in which a phase lasts the given milliseconds on a rank."""
        for _ in range(count):
            self.step(cfg, longer_ms)

    def step(self, cfg: str, longer_ms: dict[str, dict[int, int]], flush_on: int | None = None) -> None:
        """One step; with a flush, 8 GiB go and come back in the forward phase."""
        end_ns = self.now_ns
        for rank in range(self.scenario.gpus):
            at_ns = self.now_ns
            self.say(rank, at_ns, cfg, "begin", "step")
            for phase, usual_ms in (("data", 1), ("forward", 40), ("comm", 10)):
                self.say(rank, at_ns, cfg, "begin", phase)
                if flush_on == rank and phase == "forward":
                    self.retries[rank] += 1
                    levels = ((5, 139.8), (10, 131.8), (30, 139.7))
                    self.points += [(at_ns + ms * MS, rank, int(gib * GIB)) for ms, gib in levels]
                at_ns += longer_ms.get(phase, {}).get(rank, usual_ms) * MS
                self.say(rank, at_ns, cfg, "end", phase)
            self.say(rank, at_ns, cfg, "end", "step")
            end_ns = max(end_ns, at_ns)
        self.now_ns, self.number = end_ns + MS, self.number + 1

    def say(self, rank: int, at_ns: int, cfg: str, ev: str, phase: str) -> None:
        """One annotation."""
        head = {"ts": at_ns, "rank": rank, "cfg": cfg, "ev": ev, "phase": phase, "step": self.number}
        self.events[rank].append({**head, "allocated": 1, "reserved": 2, "retries": self.retries[rank], "ooms": 0})

    def write(self, folder: Path) -> None:
        """The folder as `record.py` writes it."""
        (folder / "design.json").write_text(json.dumps({"scenario": self.scenario.document()}))
        gpus = [{"index": gpu, "memory_total_bytes": TOTAL} for gpu in range(self.scenario.gpus)]
        (folder / "gpus.json").write_text(json.dumps(gpus))
        lines = "# a comment\n" + "".join(f"{at_ns},{gpu},{used}\n" for at_ns, gpu, used in self.points)
        record.pack(folder / "nvml_1khz.csv.gz", lines)
        for rank, events in self.events.items():
            text = "".join(json.dumps(event) + "\n" for event in events)
            record.pack(folder / f"annotations_rank{rank}.jsonl.gz", text)

    def truth(self) -> dict[str, Any]:
        """What is derived from the folder."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(Path(folder))
            return record.write_truth(Path(folder))


def found(derived: dict[str, Any], kind: str, must: bool | None = None) -> list[dict[str, Any]]:
    """The findings of a kind."""
    return [one for one in derived["findings"] if one["finding"] == kind and must in (None, one["must_find"])]


def two_ranks(*segments: Segment, parallel: str = "ddp") -> Job:
    """A job of two ranks."""
    return Job(Scenario("made-up", "", segments, gpus=2, parallel=parallel))


class Truth(unittest.TestCase):
    """What is derived from a recording."""

    def test_a_flush_is_thrash_of_its_rank_and_starves_the_other(self) -> None:
        job = two_ranks(Segment("free", healthy=True), Segment("tight", spare=0.1))
        job.steps("warmup", 2)
        job.steps("free", 10)
        job.steps("tight", 4)
        job.step("tight", {"forward": {0: 140}, "comm": {1: 110}}, flush_on=0)
        job.steps("tight", 4)
        derived = job.truth()
        (thrash,) = found(derived, "allocator_thrash")
        self.assertEqual((thrash["rank"], thrash["first_step"], thrash["must_find"]), (0, 16, True))
        self.assertEqual(thrash["evidence"]["phase"], "forward")
        self.assertAlmostEqual(thrash["evidence"]["fall_bytes"] / GIB, 8, delta=0.01)
        self.assertAlmostEqual(thrash["evidence"]["regrowth_bytes"] / GIB, 7.9, delta=0.01)
        (starved,) = found(derived, "comm_starvation")
        self.assertEqual((starved["rank"], starved["waiting_ranks"]), (0, [1]))
        self.assertEqual((starved["first_step"], starved["must_find"]), (16, True))
        self.assertEqual(starved["evidence"]["ratio"], 11.0)
        self.assertEqual(starved["evidence"]["culprit_retries"], 1)
        (lag,) = found(derived, "straggler")
        self.assertFalse(lag["must_find"])
        (clean,) = derived["clean"]
        self.assertEqual((clean["cfg"], clean["first_step"], clean["last_step"]), ("free", 4, 11))

    def test_the_flush_lies_within_its_phase(self) -> None:
        job = two_ranks(Segment("tight", spare=0.1))
        job.steps("tight", 3)
        begin_ns = job.now_ns
        job.step("tight", {}, flush_on=0)
        (thrash,) = found(job.truth(), "allocator_thrash")
        self.assertEqual((thrash["begin_unix_nano"], thrash["end_unix_nano"]), (begin_ns + MS, begin_ns + 41 * MS))

    def test_low_memory_must_be_found_only_where_it_lasts(self) -> None:
        for steps, must in ((2, False), (3, True)):
            job = Job(Scenario("made-up", "", (Segment("tight", spare=0.1),)))
            job.steps("tight", 5)
            job.points.append((job.now_ns, 0, TOTAL - GIB // 4))
            job.steps("tight", steps)
            job.points.append((job.now_ns - MS // 2, 0, TOTAL - 2 * GIB))
            job.steps("tight", 2)
            (low,) = found(job.truth(), "low_headroom")
            self.assertEqual(low["must_find"], must)
            self.assertEqual(low["evidence"]["least_free_bytes"], GIB // 4)
            self.assertEqual((low["first_step"], low["last_step"]), (5, 6 + steps))

    def test_plenty_of_memory_is_no_finding(self) -> None:
        job = two_ranks(Segment("free", healthy=True))
        job.steps("free", 6)
        derived = job.truth()
        self.assertEqual(derived["findings"], [])
        self.assertEqual(derived["segments"][0]["least_free_bytes"], 120 * GIB)

    def test_a_slow_rank_is_a_straggler_from_its_first_judged_step(self) -> None:
        job = two_ranks(Segment("even", healthy=True), Segment("slow", slow_rank=1, slow_share=0.6))
        job.steps("even", 6)
        job.steps("slow", 6, forward={1: 64}, comm={0: 34})
        derived = job.truth()
        (straggler,) = found(derived, "straggler")
        self.assertEqual((straggler["rank"], straggler["first_step"], straggler["last_step"]), (1, 8, 11))
        self.assertAlmostEqual(straggler["evidence"]["compute_ratio"], 1.6)
        self.assertEqual(len(derived["findings"]), 1)

    def test_waiting_for_data_is_a_stall_only_where_the_loader_is_slow(self) -> None:
        segments = (Segment("fast", healthy=True, loader_ms=8), Segment("slow", loader_ms=300))
        job = Job(Scenario("made-up", "", segments))
        job.steps("fast", 5)
        job.steps("slow", 3)
        job.steps("slow", 4, data={0: 250})
        (stall,) = found(job.truth(), "input_stall")
        self.assertEqual((stall["first_step"], stall["last_step"]), (8, 11))
        self.assertAlmostEqual(stall["evidence"]["data_share"], 250 / 300, delta=0.01)

    def test_a_leak_ends_where_memory_ends(self) -> None:
        job = Job(Scenario("made-up", "", (Segment("leaking", leak_mib=512),), ends_in_oom=True))
        job.steps("leaking", 5)
        for ev, phase, after_ms in (("begin", "step", 0), ("begin", "forward", 1), ("oom", "forward", 20)):
            job.say(0, job.now_ns + after_ms * MS, "leaking", ev, phase)
        (growth,) = found(job.truth(), "memory_growth")
        self.assertEqual(growth["end_unix_nano"], job.now_ns + 20 * MS)
        self.assertEqual(growth["evidence"], {"bytes_per_step": 512 << 20, "oom_unix_nano": job.now_ns + 20 * MS})

    def test_without_a_comm_phase_the_step_is_what_stretches(self) -> None:
        segments = (Segment("free", healthy=True), Segment("tight", spare=0.1))
        job = two_ranks(*segments, parallel="fsdp")
        job.steps("free", 6)
        job.steps("tight", 3)
        job.step("tight", {"forward": {0: 240, 1: 240}}, flush_on=0)
        (starved,) = found(job.truth(), "comm_starvation")
        self.assertEqual((starved["waiting_ranks"], starved["evidence"]["ratio"]), ([1], round(251 / 51, 2)))

    def test_what_is_judged_and_what_is_not_share_all_time(self) -> None:
        job = two_ranks(Segment("free", healthy=True), Segment("tight", spare=0.1))
        job.steps("warmup", 3)
        job.steps("free", 5)
        job.steps("tight", 5)
        derived = job.truth()
        gaps = [(one["begin_unix_nano"], one["end_unix_nano"]) for one in derived["unjudged"]]
        free, tight = derived["segments"][0], derived["segments"][2]
        edges = [None, free["begin_unix_nano"], free["end_unix_nano"], tight["begin_unix_nano"]]
        self.assertEqual(gaps, [tuple(edges[:2]), tuple(edges[2:]), (tight["end_unix_nano"], None)])

    def test_the_table_shows_each_segment_and_verdict(self) -> None:
        job = two_ranks(Segment("tight", spare=0.1))
        job.steps("tight", 4)
        job.step("tight", {}, flush_on=0)
        with tempfile.TemporaryDirectory() as out:
            (folder := Path(out) / "made-up").mkdir()
            job.write(folder)
            record.write_truth(folder)
            printed = summary.render(Path(out), record.gather(Path(out)))
        self.assertIn("must be found: 1 allocator_thrash;", printed)
        self.assertEqual(len([line for line in printed.splitlines() if line.split()[:2] == ["made-up", "tight"]]), 2)


class Reading(unittest.TestCase):
    """Files of a recording."""

    def test_a_phase_that_never_ends_is_open(self) -> None:
        job = Job(Scenario("made-up", "", (Segment("a"),)))
        job.say(0, 10, "a", "begin", "step")
        job.say(0, 11, "a", "begin", "forward")
        job.say(0, 15, "a", "oom", "forward")
        (step,) = recording.read_steps(job.events[0])
        self.assertEqual((step.open, step.phases[0].open, step.phases[0].end_ns, step.ooms_ns), (True, True, 15, [15]))

    def test_a_pass_that_is_tried_again_is_two_phases(self) -> None:
        job = Job(Scenario("made-up", "", (Segment("a"),)))
        said = [("begin", "step"), ("begin", "forward"), ("oom", "forward"), ("end", "forward"), ("begin", "forward")]
        for at_ns, (ev, phase) in enumerate([*said, ("end", "forward"), ("end", "step")]):
            job.say(0, at_ns, "a", ev, phase)
        (step,) = recording.read_steps(job.events[0])
        self.assertEqual([(one.begin_ns, one.end_ns, one.open) for one in step.phases], [(1, 3, False), (4, 5, False)])

    def test_memory_is_what_it_was_before_and_what_it_became(self) -> None:
        memory = recording.Memory([(10, 1), (20, 2), (30, 3)])
        self.assertEqual(memory.within(15, 25), [1, 2])
        self.assertEqual(memory.within(20, 20), [2])
        self.assertEqual(memory.within(0, 5), [])

    def test_other_gpus_and_a_torn_line_are_left_out(self) -> None:
        raw = "# realtime_ns,gpu,used_bytes ; c\n# reserved,0,1\n# reserved,1,1\n1,0,5\n2,1,6\n# gap,1,2\n3,0,7\n4,0"
        kept = record.of_gpus(raw, 1)
        self.assertEqual(
            kept, "# realtime_ns,gpu,used_bytes ; c\n# reserved,0,1\n1,0,5\n# gap,1,2\n3,0,7\n"
        )

    def test_packing_twice_gives_the_same_bytes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("a.gz", "b.gz")]
            for path in paths:
                record.pack(path, "text\n")
            self.assertEqual(paths[0].read_bytes(), paths[1].read_bytes())
            self.assertEqual(gzip.decompress(paths[0].read_bytes()), b"text\n")


class Pieces(unittest.TestCase):
    """Parts of the recorder and of the job."""

    def test_scenarios_survive_json_and_have_segments_of_their_own(self) -> None:
        for scenario in build(600).values():
            self.assertEqual(from_document(json.loads(json.dumps(scenario.document()))), scenario)
            names = [segment.cfg for segment in scenario.segments]
            self.assertEqual(len(names), len(set(names)), scenario.name)
            self.assertEqual(max(scenario.lengths), scenario.lengths[-1])
            self.assertTrue(all(one.steps or one.seconds for one in (*scenario.segments, *tiny(scenario).segments)))

    def test_two_pools_fit_in_no_tight_segment_and_each_alone_in_all(self) -> None:
        for scenario in build(600).values():
            shortest = scenario.lengths[0] / scenario.lengths[-1]
            for spare in [one.spare for one in scenario.segments if one.spare is not None]:
                self.assertGreater(scenario.auxiliary_share + shortest, 1 + spare)
                self.assertLess(scenario.auxiliary_share, 1 + spare)

    def test_a_fast_loader_is_ready_and_a_slow_one_is_waited_for(self) -> None:
        loader = Loader(lambda: "batch")
        try:
            self.assertEqual([loader.next() for _ in range(3)], ["batch"] * 3)
            loader.seconds = 0.05
            begin = time.monotonic()
            for _ in range(6):
                loader.next()
            self.assertGreater(time.monotonic() - begin, 0.05)
        finally:
            loader.close()

    def test_load_is_logged_with_empty_fields_for_what_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "utilization.csv"
            log = nvml.LoadLog(nvml.PretendedGpus(2), 2, path, now_ns=lambda: 7)
            log.start()
            deadline = time.monotonic() + 10
            while path.read_text().count("\n") < 3 if path.exists() else True:
                self.assertLess(time.monotonic(), deadline)
            log.stop()
            lines = path.read_text().splitlines()
        self.assertEqual(lines[:3], [nvml.HEADER, "7,0,50,", "7,1,51,"])

    def test_events_have_the_fields_that_replay_reads(self) -> None:
        counters = {"allocated": 1, "reserved": 2, "retries": 3, "ooms": 4}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "annotations_rank1.jsonl"
            log = EventLog(path, 1, lambda: counters)
            with self.assertRaises(MemoryError), log.span("step", 5, lambda: None, seq=64):
                with log.span("data", 5, lambda: None):
                    pass
                raise MemoryError
            log.close()
            events = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual(
            [(event["ev"], event["phase"]) for event in events], [("begin", "step"), ("begin", "data"), ("end", "data")]
        )
        self.assertEqual(list(events[0]), [*"ts rank cfg ev phase step".split(), *counters, "seq"])


@unittest.skipUnless(importlib.util.find_spec("torch"), "PyTorch is not installed")
class Ballast(unittest.TestCase):
    """The ballast, over a driver that only counts."""

    def setUp(self) -> None:
        from memory import DeviceMemory

        self.free = 100 * GIB + 123
        self.sizes: dict[int, int] = {}
        driver = mock.Mock()
        driver.free_bytes.side_effect = lambda: self.free
        driver.allocate.side_effect = self.allocate
        driver.free.side_effect = self.give_back
        with mock.patch("torch.cuda.Stream"):
            self.memory = DeviceMemory(mock.Mock(), driver)

    def allocate(self, size: int) -> int:
        """Takes from what is free."""
        self.free -= size
        self.sizes[len(self.sizes)] = size
        return len(self.sizes) - 1

    def give_back(self, address: int) -> None:
        """Adds to what is free."""
        self.free += self.sizes[address]

    def test_it_leaves_what_it_is_asked_growing_and_shrinking(self) -> None:
        for wanted in (20 * GIB, 5 * GIB, 40 * GIB, 300 << 20):
            left = self.memory.leave(wanted)
            self.assertGreaterEqual(left, wanted)
            self.assertLess(left, wanted + (32 << 20))

    def test_it_gives_way_until_it_is_gone(self) -> None:
        self.memory.leave(98 * GIB)
        with mock.patch("torch.cuda.empty_cache"):
            self.assertTrue(self.memory.relieve(GIB))
            self.assertTrue(self.memory.relieve(GIB))
            self.assertFalse(self.memory.relieve(GIB))


if __name__ == "__main__":
    unittest.main()
