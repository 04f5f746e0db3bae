"""How long a watch lives, what it leaves behind, and steps that do not end as they should."""

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from unittest import mock

from .listeners import PYTHON
from .test_torch_watch import steps
from .torch_case import GradScaler, TorchCase, needs_hooks_that_run, needs_scaler_of_cpu, needs_torch, torch


@needs_torch
class Life(TorchCase):
    def test_a_closed_watch_keeps_nothing_until_the_garbage_is_collected(self):
        import highwater.torch

        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        handle = highwater.torch.watch(model, optimizer, layers_every=1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        handle.close()
        known = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer, handle
        self.assertEqual([each() for each in known], [None, None])

    def test_nothing_keeps_a_model_that_nobody_else_keeps(self):
        import highwater.torch

        loader = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2)
        own = torch.autograd.backward, GradScaler.step
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters())
        highwater.torch.watch(model, optimizer, loader, layers_every=1)
        self.assertIsNot(torch.autograd.backward, own[0])
        gc.collect()
        iterator = iter(loader)
        for batch in iterator:
            model(batch).sum().backward()
            optimizer.step()
        self.assertEqual(self.words(("data",)), steps(0, 1))
        known = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        self.assertEqual([each() for each in known], [None, None])
        self.assertEqual((torch.autograd.backward, GradScaler.step), own)
        self.assertEqual(len(list(loader)), 2)

    def test_an_optimizer_and_a_loader_do_not_keep_the_model(self):
        loader = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2)
        import highwater.torch

        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters())
        highwater.torch.watch(model, optimizer, loader)
        iterator = iter(loader)
        next(iterator)
        known = weakref.ref(model)
        del model
        gc.collect()
        self.assertIsNone(known())
        optimizer.step()
        next(iterator)

    def test_what_is_open_ends_with_the_model(self):
        import highwater.torch

        model = torch.nn.Linear(4, 4)
        highwater.torch.watch(model, layers_every=1)
        model(torch.randn(3, 4)).sum().backward()
        model.eval()
        model(torch.randn(3, 4))
        del model
        gc.collect()
        self.assertEqual(self.words(), "+0 +forward -forward +loss -loss +backward -backward +eval -eval -0")

    def test_watches_end_in_any_order(self):
        loader = torch.utils.data.DataLoader([1, 2])
        own, kind = (torch.autograd.backward, GradScaler.step), type(loader)

        class Foreign:
            def step(self):
                pass

        foreign = Foreign()
        for order in (1, -1):
            other = torch.nn.Linear(4, 4)
            handles = [self.watch(self.model, [foreign], loader), self.watch(other, [foreign], loader)][::order]
            handles[0].close()
            self.assertIsNot(torch.autograd.backward, own[0])
            self.assertIsNot(type(loader), kind)
            handles[1].close()
            self.assertEqual((torch.autograd.backward, GradScaler.step), own)
            self.assertIs(type(loader), kind)
            self.assertEqual(foreign.__dict__, {})

    def test_two_models_are_watched_side_by_side(self):
        other = torch.nn.Linear(4, 4)
        first, second = self.watch(self.model), self.watch(other, start_step=5)
        self.train()
        self.train(other)
        first.close()
        self.train(other)
        second.close()
        one = "+forward -forward +loss -loss +backward -backward"
        self.assertEqual(self.words(), f"+0 {one} +5 {one} -0 -5 +6 {one} -6")

    def test_close_is_the_end_whatever_the_job_is_in(self):
        loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
        handle = self.watch(self.model, self.optimizer, loader, layers_every=1)
        iterator = iter(loader)
        loss = self.model(next(iterator)).sum()
        handle.close()
        said = self.words()
        loss.backward()
        self.optimizer.step()
        next(iterator)
        around = handle.around(self.model)
        around(torch.randn(3, 4)).sum().backward()
        self.assertEqual(self.words(), said)
        self.assertTrue(said.endswith("-0"))
        self.assertEqual([module for module in self.model.modules() if module._forward_hooks], [])

    def test_a_watch_that_fails_at_its_begin_leaves_nothing(self):
        own = torch.autograd.backward, torch.distributed.all_reduce
        with self.assertLogs("highwater", "WARNING"):
            self.watch(self.model, 3)
        self.assertEqual((torch.autograd.backward, torch.distributed.all_reduce), own)
        self.assertEqual(len(self.model._forward_hooks), 0)
        self.train()
        self.assertEqual(self.words(), "")

    def test_a_child_sends_nothing_of_its_parents_step_and_ends_soon(self):
        code = """if True:
            import os, sys, time, torch, highwater
            model = torch.nn.Linear(2, 2)
            handle = highwater.torch.watch(model)
            loss = model(torch.ones(1, 2)).sum()
            handle.comm.lock.acquire()
            handle.loop.lock.acquire()
            handle.seen.due = 1
            child = os.fork()
            if not child:
                began = time.monotonic()
                model(torch.ones(1, 2)).sum().backward()
                handle.close()
                highwater.mark("child", lasted=time.monotonic() - began)
                highwater.flush(2)
                sys.exit(0 if time.monotonic() - began < 1.5 else 7)
            handle.loop.lock.release()
            handle.seen.due = 0
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            loss.backward()
        """
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=PYTHON, env=dict(os.environ), check=False)
        self.assertEqual(done.returncode, 0)
        said = [word for word in self.words(("Linear",)).split() if word != "!child"]
        self.assertEqual(" ".join(said), "+0 +forward -forward +loss -loss +backward -backward -0")

    def test_events_of_cuda_stay_in_a_child(self):
        from highwater.torch import clock

        gpu = clock.CudaClock(
            "gpu", make_event=mock.MagicMock, current_stream=lambda: None, is_capturing=lambda: False, synchronize=lambda: None,
        )
        self.addCleanup(clock._kept.clear)
        with warnings.catch_warnings():
            # Another test may have threads of JAX.
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            os._exit(0 if any(each is gpu for each in clock._kept) else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(clock._kept, [])


@needs_torch
class Steps(TorchCase):
    def numbers(self):
        return [word for word in self.words().split() if word[1:].isdigit()]

    def test_an_optimizer_that_raises_ends_nothing_for_good(self):
        def fails(*_):
            raise KeyError("the job's")

        needs_hooks_that_run(self)
        self.watch(self.model, self.optimizer)
        self.train()
        # A hook behind ours.
        handle = self.optimizer.register_step_pre_hook(fails)
        with self.assertRaises(KeyError):
            self.optimizer.step()
        handle.remove()
        self.optimizer.step()
        self.train()
        self.optimizer.step()
        handle = self.optimizer.register_step_pre_hook(fails)
        self.train()
        with self.assertRaises(KeyError):
            self.optimizer.step()
        handle.remove()
        self.train()
        self.optimizer.step()
        one = "+forward -forward +loss -loss +backward -backward"
        self.assertEqual(
            self.words(),
            f"+0 {one} +optimizer -optimizer +optimizer -optimizer -0 {steps(1)} +2 {one} +optimizer -optimizer {one} "
            "+optimizer -optimizer -2",
        )

    @needs_scaler_of_cpu
    def test_a_scaler_that_skips_one_of_two_optimizers(self):
        scaler = GradScaler("cpu", init_scale=2.0)
        other = torch.nn.Linear(4, 1)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        self.watch(self.model, [self.optimizer, second])
        for factor in (1.0, float("inf"), 1.0):
            batch = torch.randn(3, 4)
            scaler.scale(self.model(batch).sum() * factor + other(batch).sum()).backward()
            scaler.step(self.optimizer)
            scaler.step(second)
            scaler.update()
            self.optimizer.zero_grad()
            second.zero_grad()
        one = "+{0} +forward -forward +loss -loss +backward -backward{1} +optimizer -optimizer -{0}"
        twice = " +optimizer -optimizer"
        self.assertEqual(self.words(), " ".join(one.format(n, "" if n == 1 else twice) for n in range(3)))

    def test_after_a_step_that_was_captured_the_next_is_whole(self):
        handle = self.watch(self.model, [self.optimizer, torch.optim.SGD(self.model.parameters(), lr=0.1)])
        both = handle.optimizers
        with mock.patch.object(handle.timeline.clock, "stamp", return_value=None):
            self.train()
            both[0].step()
            both[1].step()
        for _ in range(2):
            self.train()
            for each in both:
                each.step()
        self.assertEqual(self.numbers(), ["+0", "-0", "+1", "-1"])
        handle.close()
        handle = self.watch(self.model, start_step=2)
        with mock.patch.object(handle.timeline.clock, "stamp", return_value=None):
            self.train()
        self.train()
        self.assertEqual(self.numbers()[4:], ["+2"])

    def test_an_optimizer_that_no_hook_sees(self):
        self.watch(self.model, self.optimizer)
        compiled = torch.compile(lambda: self.optimizer.step(), backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(8):
                self.train()
                compiled()
                self.optimizer.zero_grad()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        said = self.numbers()
        # The first ones are one, and the last one is open. Before 2.3, where `step` itself is replaced, each is seen.
        wanted = [word for number in range(8) for word in (f"+{number}", f"-{number}")]
        self.assertEqual(said, wanted[:len(said)])
        self.assertGreaterEqual(len(said), 7)

    def test_an_optimizer_whose_hooks_do_not_run(self):
        """As PyTorch before 2.3 leaves all of them once torch.compile has been used."""

        class Plain(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {})

            def step(self, closure=None):
                pass

        optimizer = Plain(self.model.parameters())
        Plain.step = Plain.step.__wrapped__
        Plain.step.hooked = True
        with self.watch(self.model, optimizer):
            for _ in range(2):
                self.train()
                optimizer.step()
        self.assertEqual(self.words(), steps(0, 1))
        self.assertNotIn("step", optimizer.__dict__)

    def test_many_passes_before_the_first_optimizer_are_one_step(self):
        self.watch(self.model, self.optimizer)
        for _ in range(20):
            self.train()
        self.optimizer.step()
        self.assertEqual(self.numbers(), ["+0", "-0"])


@needs_torch
class Collected(TorchCase):
    def comm(self):
        from highwater.torch import clock, comm, timeline

        made = comm.Comm(timeline.Timeline(clock.HostClock()), lambda count: None)
        return comm, made

    def test_a_lost_collective_found_while_marks_are_sent_is_no_deadlock(self):
        from highwater.torch import collectives

        _, made = self.comm()
        op, waiting = made.begin(), {}
        waiting[5] = (op, True)

        class Work:
            pass

        work = [Work()]
        weakref.finalize(work[0], collectives.lost, waiting, 5, op)

        def flush():
            with made.lock:
                work.clear()
                gc.collect()
            made.flush(True)

        thread = threading.Thread(target=flush, daemon=True)
        thread.start()
        thread.join(10)
        self.assertFalse(thread.is_alive())
        self.assertEqual((waiting, made.ops, op.is_lost), ({}, [], True))

    def test_a_long_collective_is_sent_whole(self):
        from highwater import _marks

        comm, made = self.comm()
        ms = 1_000_000
        long, short, before = comm.Op(100 * ms), comm.Op(150 * ms), comm.Op(90 * ms)
        before.end, short.end = 95 * ms, 160 * ms
        made.ops = [before, long, short]
        with mock.patch.object(_marks.client, "put_later") as put:
            made.flush(False)
            self.assertEqual(made.ops, [long, short])
            long.end = 200 * ms
            made.flush(True)
        marks = [mark[1] // ms for call in put.call_args_list for mark in call[0][0].take()]
        self.assertEqual(marks, [90, 95, 100, 200])

    def test_collectives_outside_steps_do_not_pile_up(self):
        from highwater import _marks

        comm, made = self.comm()
        with mock.patch.object(_marks.client, "put_later") as put:
            for _ in range(3000):
                made.end(made.begin())
            self.assertLess(len(made.ops), comm.MANY_OPS)
            self.assertEqual(put.call_count, 2)
            # Those that have not ended are not looked at each time.
            made.begin()
            with mock.patch.object(made, "flush", wraps=made.flush) as flush:
                for _ in range(3000):
                    made.end(made.begin())
            self.assertLess(flush.call_count, 8)
        collected = put.call_args_list[0][0][0]
        self.assertIsNone(collected.take())
        rounds = 1
        while collected.take() is None:
            rounds += 1
        self.assertLess(rounds, 4)
