"""The phase `comm`, in jobs of two processes with gloo."""

import importlib
import os
import subprocess
import sys
import unittest

from .listeners import PYTHON, SECONDS, wait_until
from .torch_case import TorchCase, needs_torch, torch, words


def has_fully_shard():
    """FSDP2, which is public from PyTorch 2.6 on; before, it needs a GPU."""
    return torch is not None and hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard")


def has_fsdp1_on_a_cpu():
    """FSDP1 makes streams of the CPU with a priority, which those of PyTorch before 2.2 do not take."""
    try:
        return torch is not None and torch.cpu.Stream(priority=0) is not None
    except TypeError:
        return False


@needs_torch
class Union(TorchCase):
    def test_intervals_that_overlap_or_nearly_touch_are_one(self):
        from highwater.torch.comm import Sent, union

        ms = 1_000_000
        self.assertEqual(union([(5 * ms, 6 * ms), (0, ms), (ms // 2, 2 * ms), (2 * ms + 19_999, 3 * ms)]), [
            (0, 3 * ms), (5 * ms, 6 * ms),
        ])
        self.assertEqual(union([(0, ms), (ms + 20_000, 2 * ms)]), [(0, ms), (ms + 20_000, 2 * ms)])
        self.assertEqual(union([(5, 3)]), [(5, 5)])
        # Forty intervals of 1 ms; the gap before number n is n times 50 us. The 31 largest stay, and the sum of all intervals.
        begins = [number * ms + 50_000 * number * (number + 1) // 2 for number in range(40)]
        many = union([(begin, begin + ms) for begin in begins])
        self.assertEqual((len(many), many[0]), (32, (0, 9 * ms)))
        self.assertEqual(many[1:], [(begin, begin + ms) for begin in begins[9:]])
        sent = Sent()
        self.assertEqual(len(sent.marks([(0, 10)])), 2)
        self.assertEqual([mark[1] for mark in sent.marks([(5, 20), (3, 8)])], [10, 20])
        self.assertEqual(sent.marks([(5, 20)]), [])

    def test_what_ends_late_or_never_holds_nothing_up(self):
        from unittest import mock

        from highwater.torch import clock, comm

        host = clock.HostClock()
        first, second = comm.Op(10), comm.Op(20)
        first.end = 15
        collected = comm.Collected(host, comm.Sent(), [first, second])
        self.assertIsNone(collected.take())
        with mock.patch.object(comm.time, "monotonic", return_value=1e9):
            self.assertEqual([mark[1] for mark in collected.take()], [10, 15])

    def test_what_is_seen_to_end_after_its_step_ends_with_it(self):
        """The daemon sorts marks by their times, and refuses the end of what was open when a step ended."""
        from highwater.torch import clock, comm

        ops = [comm.Op(begin) for begin in (10, 40_000, 90_000)]
        for op, end in zip(ops, (15, 70_000, 95_000)):
            op.end = end
        at = clock.Stamp(None, 0, False)
        collected = comm.Collected(clock.HostClock(), comm.Sent(), ops, at)
        self.assertIsNone(collected.take(), "when the step ended is not known yet")
        at.at_ns = 50_000
        self.assertEqual([mark[1] for mark in collected.take()], [10, 15, 40_000, 50_000, 90_000, 95_000])


@needs_torch
class OnCuda(TorchCase):
    """A bucket on a GPU, by stand-ins."""

    def reduced(self, is_queued):
        """What the hook does with a reduction that is queued on the GPU, or runs elsewhere, and when that is over."""
        from unittest import mock

        import torch

        from highwater.torch import reducer

        said = []
        comm = mock.Mock(begin=lambda: "op", end=lambda op: said.append("end"), end_after=lambda op, wait: said.append("after"))
        future = torch.futures.Future()
        if is_queued:
            future.set_result(["mean"])
        group = mock.Mock()
        group.allreduce.return_value.get_future.return_value = future
        state = mock.Mock(other=(None, None), comm=lambda: comm, group=group, has_average=False)
        result = reducer.timed_allreduce(state, mock.Mock(buffer=lambda: mock.Mock(is_cuda=True)))
        if not is_queued:
            self.assertEqual((said, result.done()), ([], False))
            future.set_result(["mean"])
        self.assertEqual(result.wait(), "mean")
        return said

    def test_the_host_waits_for_no_reduction(self):
        self.assertEqual(self.reduced(is_queued=True), ["after"])
        self.assertEqual(self.reduced(is_queued=False), ["end"])


@needs_torch
class Jobs(TorchCase):
    def run_job(self, scenario, steps=2, size=2):
        environment = {**os.environ, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.torch_rank", scenario, os.path.join(self.folder, scenario)]
        ranks = [
            subprocess.Popen(
                command, cwd=PYTHON, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(size)
        ]
        said = [rank.communicate(timeout=6 * SECONDS)[0].decode() for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0] * size, "\n".join(said))
        self.assertNotIn("highwater: watch", "".join(said))
        wait_until(lambda: self.daemon.ended >= size, "the end of all ranks")
        events = [[event for event in self.daemon.events() if event["rank"] == rank] for rank in range(size)]
        for each in events if steps else []:
            ends = [event for event in each if event.get("kind") == "step" and event["event"] == "end"]
            self.assertEqual([event["step"] for event in ends], list(range(steps)))
        return events

    def check_comm(self, events, phase, count=1):
        """Each step has marks of `comm` inside it, and at least `count` inside the phase."""
        within, begins = 0, {}
        for event in sorted(events, key=lambda event: event["time_unix_nano"]):
            name = event.get("name", "step")
            if event["event"] == "begin":
                self.assertNotIn(name, begins)
                if name == "comm":
                    self.assertIn("step", begins)
                    within += phase in begins
                begins[name] = event["time_unix_nano"]
            elif event["event"] == "end":
                self.assertLess(begins.pop(name) if name == "comm" else begins.pop(name) - 1, event["time_unix_nano"])
        self.assertGreaterEqual(within, count)

    def phases(self, events):
        return [word for word in words(events).split() if word[1:] != "comm"]

    def loop(self, steps=2):
        one = "+{0} +forward -forward +loss -loss +backward -backward +optimizer -optimizer -{0}"
        return " ".join(one.format(number) for number in range(steps)).split()

    def names(self, events, direction):
        return [
            event["name"] for event in events if "layer" in event and event["layer"]["direction"] == direction
            and event["step"] == 0
        ]

    def test_ddp(self):
        for events in self.run_job("ddp"):
            self.assertEqual(self.phases(events), self.loop())
            self.check_comm(events, "backward", 2)
            names = [f"module.{number}" for number in range(5)]
            self.assertEqual((self.names(events, "forward"), self.names(events, "backward")), (names, names[::-1]))

    def test_ddp_with_a_hook_of_ours(self):
        for events in self.run_job("ddp_with_our_hook"):
            self.assertEqual(self.phases(events), self.loop())
            self.check_comm(events, "backward", 2)

    def test_a_jobs_own_hook_takes_our_hooks_place(self):
        for events in self.run_job("ddp_with_another_hook", 4):
            self.assertEqual(self.phases(events), self.loop(4))

    def test_a_watch_after_another_one(self):
        for events in self.run_job("watched_again"):
            self.assertEqual(self.phases(events), self.loop())
            begins = [event for event in events if event["event"] == "begin"]
            last = next(number for number, event in enumerate(begins) if event.get("step") == 1)
            self.assertIn("comm", [event.get("name") for event in begins[last:]])

    def test_our_hook_computes_what_ddp_does(self):
        # The inverse of three is not exact.
        self.run_job("same_arithmetic", 0, 3)

    def test_ddp_is_given_free(self):
        self.run_job("gone", 0)

    def test_ddp_that_is_compiled(self):
        for events in self.run_job("compiled"):
            self.check_comm(events, "backward", 2)

    @unittest.skipUnless(has_fully_shard(), "this PyTorch has no public FSDP2 (torch.distributed.fsdp.fully_shard)")
    def test_fsdp2(self):
        for events in self.run_job("fsdp2"):
            self.assertEqual(self.phases(events), self.loop())
            self.check_comm(events, "forward", 2)
            layers = [event["layer"] for event in events if "layer" in event and event["step"] == 0]
            forward = [layer for layer in layers if layer["direction"] == "forward"]
            # The root holds the layers 1 and 3, the layers 0, 2 and 4 gather their own 110 parameters.
            self.assertEqual([layer["gathered"] for layer in forward], [3 * 440, 0, 440, 0, 440])
            self.assertEqual([layer["gathered_sum"] for layer in forward][2::2], [2 * 440 + 0, 2 * 440])

    @unittest.skipUnless(has_fsdp1_on_a_cpu(), "this PyTorch's FSDP1 needs a GPU (torch.cpu.Stream takes no priority)")
    def test_fsdp1(self):
        for events in self.run_job("fsdp1"):
            self.assertEqual(self.phases(events), self.loop())
            self.check_comm(events, "forward", 2)
            layers = [event["layer"] for event in events if "layer" in event and event["layer"]["direction"] == "forward"]
            self.assertEqual([layer["gathered"] for layer in layers[:5]], [440] * 5)

    def test_plain_collectives(self):
        for scenario in ("plain", "plain_without_group_hooks"):
            for events in self.run_job(scenario):
                self.assertEqual(self.phases(events), self.loop())
                self.check_comm(events, "step", 2)
            self.daemon.messages.clear()
            self.daemon.ended = 0

    def test_what_is_closed_leaves_no_trace(self):
        self.run_job("closed")
