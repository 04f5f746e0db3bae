"""Which steps highwater.torch.watch marks, so that it costs little of any step."""

import unittest
from unittest import mock

import highwater

from .torch_case import TorchCase, needs_hooks_that_run, needs_torch, torch

MS = 1_000_000


class Job:
    """Steps on a clock of their own: what one takes, and how much more if it is marked, or if its layers are recorded."""

    def __init__(self, step_ms, cost_ms, layers_every=0, record_ms=0.0, **options):
        from highwater.torch.pace import Pace

        self.now_ns = 1
        self.step_ms, self.cost_ms, self.record_ms = step_ms, cost_ms, record_ms
        self.pace = Pace(layers_every, now=lambda: self.now_ns, **options)
        self.number = options.get("first", 0)
        self.marked, self.recorded = [], []

    def run(self, until):
        """As the loop does: a marked step, and then those up to the next one."""
        while self.number < until:
            is_recorded = self.pace.is_recorded(self.number)
            self.now_ns += int((self.step_ms + self.cost_ms + is_recorded * self.record_ms) * MS)
            self.marked.append(self.number)
            self.recorded += [self.number] * is_recorded
            self.pace.ended(self.number, 0)
            following = self.pace.next_marked(self.number + 1)
            count = following - self.number - 1
            if count:
                self.now_ns += int(count * self.step_ms * MS)
                self.pace.ended(following - 1, count)
            self.number = following

    def share(self, begin, end):
        """What marks and records add to the time of these steps."""
        marked = sum(begin <= each < end for each in self.marked)
        recorded = sum(begin <= each < end for each in self.recorded)
        return (marked * self.cost_ms + recorded * self.record_ms) / ((end - begin) * self.step_ms)


@needs_torch
class Paces(unittest.TestCase):
    def test_short_steps_are_marked_one_in_so_many_that_it_costs_little(self):
        for step_ms, cost_ms, wanted in ((1.5, 0.37, 128), (4.0, 0.37, 64), (30.0, 0.37, 8), (34.0, 0.2, 1), (30.0, 0.0, 1)):
            with self.subTest(step_ms=step_ms, cost_ms=cost_ms):
                job = Job(step_ms, cost_ms)
                job.run(7_000)
                self.assertEqual(job.pace.every, wanted)
                self.assertEqual(job.marked[:20], [*range(17), 18, 20, 22])
                if wanted > 1:
                    self.assertLess(job.share(1_000, 7_000), 0.0026)
                self.assertTrue(all(number % wanted == 0 for number in job.marked if number > 144))

    def test_a_step_that_is_long_is_marked_always(self):
        job = Job(100.0, 5.0)
        job.run(1_000)
        self.assertEqual(job.marked, list(range(1_000)))

    def test_ranks_with_different_clocks_mark_the_same_steps_or_some_of_the_others(self):
        for first in (0, 1_000_003):
            jobs = [Job(3.0, cost, first=first) for cost in (0.2, 0.5, 0.9)]
            for job in jobs:
                job.run(first + 5_000)
            sets = [set(job.marked) for job in jobs]
            self.assertGreater(len(sets[0]), len(sets[2]))
            self.assertTrue(sets[2] <= sets[1] <= sets[0])

    def test_a_job_that_becomes_slower_is_marked_and_measured_anew(self):
        job = Job(2.0, 0.3)
        job.run(1_000)
        self.assertEqual(job.pace.every, 64)
        job.step_ms = 10.0
        job.run(1_300)
        # All of some steps after the first that were seen to be slow, and then a trial.
        awake = next(number for number in job.marked if number > 1_000 and number + 1 in job.marked)
        self.assertLess(awake, 1_130)
        self.assertTrue(set(range(awake, awake + 16)) <= set(job.marked))
        self.assertEqual(job.pace.every, 16)
        # One slow stretch that passes changes nothing.
        job.run(2_000)
        job.step_ms = 40.0
        job.run(2_032)
        job.step_ms = 10.0
        job.run(3_000)
        self.assertEqual(job.pace.every, 16)

    def test_a_trial_comes_again(self):
        job = Job(2.0, 0.4)
        job.run(5_000)
        job.cost_ms = 0.0
        job.run(10_000)
        self.assertEqual(job.pace.every, 1)

    def test_records_of_layers_come_as_seldom_as_they_cost(self):
        job = Job(4.0, 0.0, layers_every=100, record_ms=14.0)
        job.run(20_000)
        self.assertEqual(job.recorded[:3], [0, 2, 100])
        gaps = {after - before for before, after in zip(job.recorded[3:], job.recorded[4:])}
        self.assertEqual(gaps, {2_400})
        self.assertTrue(set(job.recorded) <= set(job.marked))
        # Those that are long enough, as often as asked for.
        job = Job(60.0, 0.0, layers_every=100, record_ms=8.0)
        job.run(1_000)
        self.assertEqual(job.recorded, [0, 2, *range(100, 1_000, 100)])

    def test_a_pace_that_was_asked_for_is_kept(self):
        job = Job(2.0, 0.4, every=1)
        job.run(1_000)
        self.assertEqual(job.marked, list(range(1_000)))
        job = Job(2.0, 0.4, every=10, layers_every=64)
        job.run(200)
        self.assertEqual(job.marked, sorted({*range(0, 200, 10), 2, 64, 128, 192}))


@needs_torch
class Rests(TorchCase):
    """Steps that are not marked."""

    def step(self):
        self.train()
        self.optimizer.step()

    def test_a_marked_step_says_how_many_it_stands_for(self):
        with self.watch(self.model, self.optimizer, steps_every=4):
            for _ in range(9):
                self.step()
        one = "+{0} +forward -forward +loss -loss +backward -backward +optimizer -optimizer -{0}"
        self.assertEqual(self.words(), " ".join(one.format(number) for number in (0, 4, 8)))
        ends = [event for event in self.sent(self.daemon) if event.get("kind") == "step" and event["event"] == "end"]
        self.assertEqual([event["attributes"].get("steps") for event in ends], [None, 4, 4])
        self.assertFalse(self.model._forward_hooks or self.model._forward_pre_hooks)

    def test_hooks_are_away_in_steps_that_are_not_marked(self):
        needs_hooks_that_run(self)
        own = torch.autograd.backward
        with self.watch(self.model, self.optimizer, steps_every=4) as watch:
            had = []
            for _ in range(5):
                had.append(bool(self.model._forward_hooks))
                self.assertEqual(torch.autograd.backward is own, not had[-1])
                self.assertEqual(bool(self.optimizer._optimizer_step_pre_hooks), had[-1])
                self.step()
            self.assertEqual(had, [True, False, False, False, True])
            self.assertTrue(watch.timeline.is_resting)
        self.assertIs(torch.autograd.backward, own)
        self.assertFalse(self.optimizer._optimizer_step_post_hooks)

    def test_evaluation_is_marked_always(self):
        eval_of = torch.nn.Module.eval
        with self.watch(self.model, self.optimizer, steps_every=100):
            for _ in range(3):
                self.step()
            replaced = torch.nn.Module.eval
            self.model.eval()
            # For as long as the watch is open: each change of a class costs Python's caches of its attributes.
            self.assertIs(torch.nn.Module.eval, replaced)
            self.assertIsNot(replaced, eval_of)
            with torch.no_grad():
                self.model(torch.randn(3, 4))
            self.model.train()
            for _ in range(2):
                self.step()
        words = self.words().split()
        self.assertEqual(words[-2:], ["+eval", "-eval"])
        self.assertEqual(words.count("+forward"), 1)
        events = self.sent(self.daemon)
        spans = [event["time_unix_nano"] for event in events if event.get("name") == "eval"]
        self.assertLess(spans[0], spans[1])
        self.assertIs(torch.nn.Module.eval, eval_of)

    def test_batches_collectives_and_scalers_in_steps_that_are_not_marked(self):
        loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)
        with self.watch(self.model, [self.optimizer], loader, steps_every=3) as watch:
            for batch in loader:
                self.assertEqual(watch.comm.begin() is None, watch.timeline.is_resting)
                self.model(batch).sum().backward()
                if watch.timeline.is_resting:
                    watch.loop.optimizer_skipped(0)
                else:
                    self.optimizer.step()
        words = self.words().split()
        self.assertEqual([word for word in words if word[1:].isdigit()], ["+0", "-0", "+3", "-3"])
        self.assertEqual(words.count("+data"), 2)

    def test_without_an_optimizer_each_step_is_marked(self):
        with self.watch(self.model, steps_every=10):
            for _ in range(3):
                self.train()
        self.assertIn("+2", self.words())

    def test_where_the_compiler_is_in_use_hooks_stay(self):
        from highwater.torch import rest

        with mock.patch.object(rest, "is_compiler_used", lambda: True), self.watch(
            self.model, self.optimizer, steps_every=4
        ):
            for _ in range(6):
                self.step()
                self.assertTrue(self.model._forward_hooks)
        self.assertEqual([word for word in self.words().split() if word[1:].isdigit()], ["+0", "-0", "+4", "-4"])

    def test_two_watches_rest_apart(self):
        other = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        with self.watch(self.model, self.optimizer, steps_every=2), self.watch(other, optimizer, steps_every=3):
            for _ in range(6):
                self.step()
                other(torch.randn(3, 4)).sum().backward()
                optimizer.step()
        self.assertEqual(self.words().split().count("+backward"), 3 + 2)
        self.assertTrue(highwater.flush(5))


if __name__ == "__main__":
    unittest.main()
