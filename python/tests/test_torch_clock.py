"""The clock of CUDA events, against a GPU that is a list of numbers."""

import json
import random
import unittest

from .torch_case import TorchCase, needs_torch

START = 1_700_000_000_000_000_000


class Gpu:
    """Runs what the host queues, later, and has a clock of its own."""

    def __init__(self, drift=0.0):
        self.host_ns, self.drift, self.made, self.capturing = START, drift, 0, False
        # When the GPU is done with what is queued.
        self.busy_ns = START

    def now(self):
        self.host_ns += 50
        return self.host_ns

    def work(self, ns):
        self.busy_ns = max(self.busy_ns, self.host_ns) + ns

    def event(self):
        self.made += 1
        return Event(self)

    def clock(self, kind):
        return kind(
            "gpu", make_event=self.event, current_stream=lambda: None, is_capturing=lambda: self.capturing, now=self.now,
            synchronize=lambda: None, enter_thread=lambda: None,
        )


class Event:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self, stream):
        self.at = max(self.gpu.busy_ns, self.gpu.host_ns) if stream is None else stream

    def query(self):
        return self.gpu.host_ns >= self.at

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        import struct

        ms = (other.at - self.at) * (1 + self.gpu.drift) / 1e6
        return struct.unpack("f", struct.pack("f", ms))[0]


@needs_torch
class Clock(TorchCase):
    def setUp(self):
        super().setUp()
        from highwater.torch import clock, timeline

        self.kinds, self.timelines = clock, timeline

    def test_a_time_is_known_when_the_gpu_was_there(self):
        gpu = Gpu()
        clock = gpu.clock(self.kinds.CudaClock)
        gpu.work(5_000_000)
        at = clock.stamp()
        self.assertIsNone(clock.resolve(at))
        gpu.host_ns += 50_000_000
        known = clock.resolve(at)
        self.assertLess(abs(known - (START + 5_000_000)), 2000)
        self.assertEqual(clock.resolve(at), known)

    def test_nothing_is_recorded_while_a_graph_is_captured(self):
        gpu = Gpu()
        clock = gpu.clock(self.kinds.CudaClock)
        gpu.capturing = True
        self.assertIsNone(clock.stamp())
        timeline = self.timelines.Timeline(clock)
        timeline.begin_step(0)
        timeline.begin("forward")
        timeline.end("forward")
        timeline.end_step()
        self.assertEqual(self.words(), "")

    def test_events_are_used_again(self):
        gpu = Gpu()
        clock = gpu.clock(self.kinds.CudaClock)
        for _ in range(100):
            begin, end = clock.stamp(is_anchor=True), clock.stamp()
            gpu.host_ns += 1000
            clock.resolve(begin), clock.resolve(end)
        self.assertLessEqual(gpu.made, 4)

    def test_drift_and_rounding_do_not_add_up(self):
        for drift in (50e-6, -50e-6):
            with self.subTest(drift):
                gpu = Gpu(drift)
                clock = gpu.clock(self.kinds.CudaClock)
                draw = random.Random(1)
                worst = 0
                # An hour of steps of 300 ms, 12,000 of them; without the bounds, the clock would be off by 180 ms.
                for number in range(12_000):
                    gpu.work(draw.randrange(150_000_000, 290_000_000))
                    at = clock.stamp(is_anchor=True)
                    truth = at.event.at
                    while clock.resolve(at) is None:
                        gpu.host_ns += draw.randrange(1_000_000, 50_000_000)
                    if number > 1000:
                        worst = max(worst, abs(at.at_ns - truth))
                    gpu.host_ns = max(gpu.host_ns, truth) + 10_000_000
                self.assertLess(worst, 10_000_000)

    def test_a_step_of_the_hosts_clock_does_not_stop_marks(self):
        gpu = Gpu()
        clock = gpu.clock(self.kinds.CudaClock)
        at = clock.stamp()
        gpu.host_ns -= 10**9
        gpu.busy_ns = at.event.at = gpu.host_ns
        self.assertIsNotNone(clock.resolve(at))

    def test_marks_keep_their_order_whatever_completes_first(self):
        gpu = Gpu()
        timeline = self.timelines.Timeline(gpu.clock(self.kinds.CudaClock))
        clock = timeline.clock
        # The end is done before the begin: two streams.
        begin, end = clock.stamp(stream=START + 3_000_000), clock.stamp(stream=START + 1_000_000)
        timeline.begin("forward", begin)
        timeline.end("forward", end)
        # While the first is not done, none is sent.
        self.assertIsNone(self.client.queue[0].take())
        gpu.host_ns += 10_000_000
        events = self.sent(self.daemon)
        self.assertEqual(self.words(), "+forward -forward")
        times = [event["time_unix_nano"] for event in events]
        self.assertEqual(times, sorted(times))
        self.assertLess(abs(times[0] - (START + 3_000_000)), 2000)


class Counters(unittest.TestCase):
    def setUp(self):
        try:
            from highwater.torch.allocator import Counters
        except ImportError:
            self.skipTest("PyTorch is not installed: the budget of the counters is not tested")
        self.ns, self.reads, self.peak = 0, 0, 1
        self.counters = Counters(self.read, lambda: self.ns)

    def read(self):
        self.ns += 20_000
        self.reads += 1

        def of(current):
            return {"all": {"current": current, "peak": current + self.peak, "allocated": 5, "freed": 4}}

        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
        return {**{name: of(nth) for nth, name in enumerate(names)}, "num_alloc_retries": 7, "num_ooms": 8}

    def test_dear_reads_are_left_to_the_end_of_the_step(self):
        # 8 reads of 20 us are 0.16 % of 100 ms, and 0.016 % of a second.
        for step_ns, reads in ((100_000_000, 1), (1_000_000_000, 8)):
            for _ in range(3):
                self.reads = 0
                for _ in range(7):
                    self.counters(False)
                self.ns += step_ns
                text = self.counters(True)
            self.assertEqual(self.reads, reads)
            self.assertEqual(json.loads("{" + text[1:] + "}"), {"memory": {
                "allocated": 0, "reserved": 1, "active": 2, "inactive_split": 3, "alloc_retries": 7, "ooms": 8,
            }})
            # No higher than before the first step: the peak is not a step's.
            risen = {"allocated_peak_bytes": 5, "reserved_peak_bytes": 6}
            self.assertEqual(self.counters.peaks, risen if self.peak > 1 else {})
            self.peak = 5

    def test_short_steps_are_not_all_read(self):
        # A read of 20 us is 0.1 % of 20 ms: with steps of 4 ms and a read now and then, every fifth or sixth.
        texts = []
        for _ in range(60):
            for _ in range(7):
                self.counters(False)
            self.ns += 4_000_000
            texts.append(self.counters(True) != "")
        self.assertIn(sum(texts[10:]), (9, 10))

    def test_a_read_that_fails_ends_them(self):
        self.counters.source = lambda: 1 / 0
        self.assertEqual((self.counters(True), self.counters.is_off), ("", True))
        self.assertEqual(self.counters(True), "")
