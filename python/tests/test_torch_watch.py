"""One line marks the loop, whatever its form."""

import copy
import dataclasses
import io
import os
import pickle
import subprocess
import sys
import unittest
import warnings
from unittest import mock

import highwater

from .listeners import PYTHON
from .torch_case import GradScaler, TorchCase, forget_compiled, needs_scaler_of_cpu, needs_torch, torch

STEP = "+{0} +forward -forward +loss -loss +backward -backward +optimizer -optimizer -{0}"


def steps(*numbers):
    return " ".join(STEP.format(number) for number in numbers)


class Import(unittest.TestCase):
    def test_the_client_alone_imports_no_torch(self):
        code = "import sys, highwater; sys.exit('torch' in sys.modules)"
        self.assertEqual(subprocess.run([sys.executable, "-c", code], cwd=PYTHON, check=False).returncode, 0)

    def test_what_is_not_there_is_an_attribute_error(self):
        with self.assertRaises(AttributeError):
            highwater.nothing  # noqa: B018


@dataclasses.dataclass
class Output:
    loss: object
    more: object


@needs_torch
class Loops(TorchCase):
    def test_a_plain_loop(self):
        self.watch(self.model, self.optimizer)
        for _ in range(2):
            self.train()
            self.optimizer.step()
        self.assertEqual(self.words(), steps(0, 1))
        self.check_pairs()

    def test_steps_count_from_a_resumed_one(self):
        self.watch(self.model, self.optimizer, start_step=70)
        self.train()
        self.optimizer.step()
        self.assertEqual(self.words(), steps(70))

    def test_accumulated_gradients_are_one_step(self):
        self.watch(self.model, self.optimizer)
        for _ in range(2):
            self.train()
            self.train()
            self.optimizer.step()
        one = "+forward -forward +loss -loss +backward -backward"
        self.assertEqual(self.words(), " ".join(f"+{n} {one} {one} +optimizer -optimizer -{n}" for n in (0, 1)))

    def test_without_an_optimizer_the_next_forward_begins_a_step(self):
        handle = self.watch(self.model)
        for _ in range(2):
            self.train()
        one = "+forward -forward +loss -loss +backward -backward"
        self.assertEqual(self.words(), f"+0 {one} -0 +1 {one}")
        handle.close()
        self.assertTrue(self.words().endswith("-backward -1"))

    def test_evaluation_is_one_phase_outside_steps(self):
        self.watch(self.model, self.optimizer)
        self.train()
        self.optimizer.step()
        with torch.no_grad():
            for _ in range(3):
                self.model(torch.randn(3, 4))
        self.model.eval()
        self.model(torch.randn(3, 4))
        self.model.train()
        self.train()
        self.optimizer.step()
        self.assertEqual(self.words(), f"{steps(0)} +eval -eval {steps(1)}")
        ends = [event for event in self.sent(self.daemon) if event["event"] == "end" and event.get("name") == "eval"]
        begin = [event for event in self.sent(self.daemon) if event.get("step") == 1][0]
        self.assertLess(ends[0]["time_unix_nano"], begin["time_unix_nano"])

    def test_an_exception_in_forward_ends_the_phase_and_goes_through(self):
        handle = self.watch(self.model, self.optimizer)
        with self.assertRaises(RuntimeError):
            self.model(torch.randn(3, 5))
        self.assertEqual(self.words(), "+0 +forward -forward")
        self.train()
        self.optimizer.step()
        handle.close()
        self.check_pairs()

    def test_an_exception_in_backward_is_ended_by_what_comes_next(self):
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise KeyError("the job's")

        self.watch(self.model, self.optimizer)
        with self.assertRaises(KeyError):
            self.model(Bad.apply(torch.randn(3, 4, requires_grad=True))).sum().backward()
        self.train()
        self.optimizer.step()
        one = "+forward -forward +loss -loss +backward -backward"
        self.assertEqual(self.words(), f"+0 {one} {one} +optimizer -optimizer -0")

    def test_several_outputs_and_several_backward_passes(self):
        class Model(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                y = self.inner(x)
                out = Output(y.sum(), {"a": (y, [y * 2]), "none": None})
                out.more["itself"] = out
                return out

        model = Model(self.model)
        self.watch(model, self.optimizer)
        out = model(torch.randn(3, 4))
        out.loss.backward(retain_graph=True)
        (out.more["a"][1][0].sum() + out.more["a"][0].sum()).backward()
        self.optimizer.step()
        twice = "+backward -backward +backward -backward"
        self.assertEqual(self.words(), f"+0 +forward -forward +loss -loss {twice} +optimizer -optimizer -0")

    def test_the_loss_ends_with_what_comes_next(self):
        loader = [torch.randn(3, 4) for _ in range(2)]
        watch = self.watch(self.model, self.optimizer)
        for batch in watch.batches(iter(loader)):
            self.model(batch)
        with self.assertRaises(RuntimeError):
            self.model(torch.randn(3, 5))
        self.model(torch.randn(3, 4))
        with torch.no_grad():
            self.model(torch.randn(3, 4))
        self.train()
        self.optimizer.step()
        batches = "+data -data +forward -forward +loss -loss " * 2
        # The pass that failed has no loss; nor has evaluation.
        self.assertEqual(
            self.words(),
            f"+0 {batches}+forward -forward +forward -forward +loss -loss +eval -eval "
            "+forward -forward +loss -loss +backward -backward +optimizer -optimizer -0",
        )
        last = {(event["event"], event.get("name")): event["time_unix_nano"] for event in self.sent(self.daemon)}
        self.assertEqual(last["begin", "loss"], last["end", "forward"])
        self.assertEqual(last["end", "loss"], last["begin", "backward"])

    def test_closures_run_the_model_inside_the_optimizer(self):
        optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=2)
        self.watch(self.model, optimizer)
        batch = torch.randn(3, 4)

        def closure():
            optimizer.zero_grad()
            loss = self.model(batch).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        self.train()
        optimizer.step(closure)
        said = self.words()
        self.assertTrue(said.startswith("+0 +optimizer -optimizer +forward -forward +loss -loss +backward"), said)
        self.assertEqual([word for word in said.split() if word[1:].isdigit()], ["+0", "-0", "+1", "-1"])
        self.check_pairs()

    def test_several_optimizers_end_a_step_together(self):
        other = torch.optim.Adam(self.model[0].parameters())
        self.watch(self.model, [self.optimizer, other])
        for _ in range(2):
            self.train()
            self.optimizer.step()
            other.step()
        said = self.words()
        self.assertEqual([word for word in said.split() if word[1:].isdigit()], ["+0", "-0", "+1", "-1"])
        self.assertEqual(said.count("+optimizer"), 4)

    def test_several_models_and_optimizers(self):
        forget_compiled()
        generator, discriminator = torch.nn.Linear(2, 4), torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (discriminator, generator)]
        watch = self.watch([generator, discriminator], optimizers, layers_every=2)
        for _ in range(2):
            fake = generator(torch.randn(3, 2))
            discriminator(fake.detach()).sum().backward()
            optimizers[0].step()
            discriminator(fake).sum().backward()
            optimizers[1].step()
        step = (
            "+forward -forward +loss -loss +forward -forward +loss -loss +backward -backward +optimizer -optimizer "
            "+forward -forward +loss -loss +backward -backward +optimizer -optimizer"
        )
        self.assertEqual(self.words(), f"+0 {step} -0 +1 {step} -1")
        records = [event for event in self.sent(self.daemon) if event.get("kind") == "layer"]
        names = [event["name"] for event in records if event["layer"]["direction"] == "forward"]
        self.assertEqual(names[:3], ["0", "1.0", "1.1"])
        ends = [event for event in self.sent(self.daemon) if event.get("kind") == "step" and event["event"] == "end"]
        # Of both models: 12, and 10 and 3 parameters.
        self.assertEqual(ends[0]["attributes"]["parameter_bytes"], 4 * (12 + 10 + 3))
        watch.close()
        for model in (generator, discriminator):
            self.assertEqual((len(model._forward_hooks), len(model._forward_pre_hooks)), (0, 0))

    def test_a_misspelled_argument_is_named(self):
        import highwater.torch

        for options, problem in (
            ({"layer_every": 5}, "no argument 'layer_every'; did you mean 'layers_every'?"),
            ({"optimiser": 5}, "no argument 'optimiser'; did you mean 'optimizer'?"),
            ({"qqq": 5}, "no argument 'qqq'"),
        ):
            highwater.torch.watch.__globals__["client"].said.clear()
            with self.assertLogs("highwater", "WARNING") as logs:
                highwater.torch.watch(self.model, **options)
            self.assertTrue(logs.records[0].getMessage().endswith(problem), logs.records[0].getMessage())
            self.assertEqual(len(self.model._forward_hooks), 0)
        highwater.torch.watch.__globals__["client"].said.clear()
        with self.assertLogs("highwater", "WARNING") as logs:
            highwater.torch.watch([])
        self.assertIn("there is no model", logs.output[0])

    def test_an_optimizer_that_never_steps_does_not_keep_the_step_open(self):
        self.watch(self.model, [self.optimizer, torch.optim.Adam(self.model[0].parameters())])
        for _ in range(65):
            self.train()
            self.optimizer.step()
        self.assertIn("-0 +1", self.words())

    def test_optimizers_inside_the_backward_pass(self):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in self.model.parameters()}
        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
        self.watch(self.model, list(optimizers.values()))
        self.train()
        self.train()
        one = "+forward -forward +loss -loss +backward -backward"
        self.assertEqual(self.words(), f"+0 {one} -0 +1 {one} -1")

    @needs_scaler_of_cpu
    def test_a_scaler_that_skips_the_optimizer_ends_the_step(self):
        scaler = GradScaler("cpu", init_scale=2.0)
        own = GradScaler.step
        handle = self.watch(self.model, self.optimizer)
        for factor in (1.0, float("inf"), 1.0):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self.model(torch.randn(3, 4)).sum() * factor
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
        skipped = "+1 +forward -forward +loss -loss +backward -backward -1"
        self.assertEqual(self.words(), f"{steps(0)} {skipped} {steps(2)}")
        handle.close()
        self.assertIs(GradScaler.step, own)

    def test_checkpointed_activations_are_no_second_forward(self):
        from torch.utils.checkpoint import checkpoint

        class Model(torch.nn.Module):
            def __init__(self, inner, reentrant):
                super().__init__()
                self.inner, self.reentrant = inner, reentrant

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=self.reentrant)

        for number, reentrant in enumerate((True, False)):
            model = Model(self.model, reentrant)
            with self.watch(model, self.optimizer, start_step=number, layers_every=1):
                model(torch.randn(3, 4, requires_grad=True)).sum().backward()
                self.optimizer.step()
        # The root itself, checkpointed without reentrance.
        with self.watch(self.model, self.optimizer, start_step=2):
            checkpoint(self.model, torch.randn(3, 4), use_reentrant=False).sum().backward()
            self.optimizer.step()
        self.assertEqual(self.words(), steps(0, 1, 2))
        layers = [event["layer"]["direction"] for event in self.sent(self.daemon) if event.get("kind") == "layer"]
        self.assertEqual(layers.count("forward"), 6)

    def test_data_parallel(self):
        # Without GPUs it only calls its module.
        model = torch.nn.DataParallel(self.model if torch.cuda.device_count() == 0 else self.model.cuda())
        self.watch(model, self.optimizer)
        self.train(model)
        self.optimizer.step()
        self.assertEqual(self.words(), steps(0))

    def test_compiled_models(self):
        def compiled_outside():
            return torch.compile(self.model, backend="aot_eager"), lambda: None

        def compiled_after():
            return self.model, lambda: self.model.compile(backend="aot_eager")

        def compiled_before():
            self.model.compile(backend="aot_eager")
            return self.model, lambda: None

        for made in (compiled_outside, compiled_before, compiled_after):
            with self.subTest(made.__name__), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                before = len(self.sent(self.daemon))
                model, after = made()
                with self.watch(model, self.optimizer, layers_every=1):
                    after()
                    for _ in range(2):
                        self.train(model)
                        self.optimizer.step()
                events = self.sent(self.daemon)[before:]
                words = [event.get("step", event.get("name")) for event in events if event["event"] == "end"]
                wanted = ["forward", "loss", "backward", "optimizer", 1]
                self.assertEqual([word for word in words if not str(word).startswith("_")][-5:], wanted)
                if made is not compiled_after:
                    self.assertFalse([event for event in events if "layer" in event])
                self.model._compiled_call_impl = None
                torch._dynamo.reset()

    def test_a_user_who_marks_by_hand_too(self):
        self.watch(self.model, self.optimizer)
        with highwater.step(0), highwater.phase("forward"):
            self.train()
            self.optimizer.step()
        self.assertEqual(self.words().count("+forward"), 2)


@needs_torch
class Handle(TorchCase):
    def test_close_removes_every_hook_and_is_idempotent(self):
        loader = torch.utils.data.DataLoader([1, 2])
        kind = type(loader)
        handle = self.watch(self.model, self.optimizer, loader)
        self.train()
        handle.close()
        handle.close()
        hooks = [*self.model._forward_hooks, *self.model._forward_pre_hooks]
        hooks += [*self.optimizer._optimizer_step_pre_hooks, *self.optimizer._optimizer_step_post_hooks]
        self.assertEqual((hooks, type(loader)), ([], kind))
        said = self.words()
        self.train()
        self.optimizer.step()
        self.assertEqual((self.words(), said.endswith("-0")), (said, True))

    def test_a_fault_of_ours_does_not_reach_the_job(self):
        import highwater.torch.loop as loop

        for fault in ("next_part", "end_eval", "resume_optimizer", "end_step"):
            with self.subTest(fault), mock.patch.object(loop.Loop, fault, side_effect=ZeroDivisionError("ours")):
                self.client.said.clear()
                with self.assertLogs("highwater", "WARNING") as logged, self.watch(self.model, self.optimizer):
                    for _ in range(2):
                        self.train()
                        self.optimizer.step()
                self.assertEqual(len(logged.output), 1)
                self.assertIn("ZeroDivisionError", logged.output[0])

    def test_what_cannot_be_watched_does_no_harm(self):
        for model, optimizer, loader in [
            (None, None, None), (3, "no optimizer", [1, 2]), (self.model, 3, None), (self.model, None, range(3)),
        ]:
            self.client.said.clear()
            with self.assertLogs("highwater", "WARNING"), self.watch(model, optimizer, loader):
                pass
        self.train()

    def test_copies_and_pickles_of_a_model_are_not_watched_and_need_nothing_of_ours(self):
        self.watch(self.model, self.optimizer)
        copied = copy.deepcopy(self.model)
        stored = io.BytesIO()
        torch.save(self.model, stored)
        self.assertNotIn(b"highwater", stored.getvalue())
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        batch = torch.randn(3, 4)
        self.assertTrue(torch.equal(copied(batch), loaded(batch)))
        self.assertEqual(self.words(), "")
        self.assertTrue(torch.equal(self.model(batch), loaded(batch)))
        self.assertEqual(self.words(), "+0 +forward -forward +loss")

    def test_disabled_does_nothing(self):
        with mock.patch.object(self.client, "room", 0):
            self.watch(self.model, self.optimizer)
        self.assertEqual(len(self.model._forward_hooks), 0)


class Counted(torch.utils.data.Dataset if torch else object):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Endless(torch.utils.data.IterableDataset if torch else object):
    def __iter__(self):
        return (torch.zeros(4) for _ in range(3))


@needs_torch
class Loaders(TorchCase):
    STEP = "+{0} +data -data +forward -forward +loss -loss +backward -backward +optimizer -optimizer -{0}"

    def run_epochs(self, loader, epochs):
        self.watch(self.model, self.optimizer, loader)
        count = 0
        for _ in range(epochs):
            for batch in loader:
                self.model(batch).sum().backward()
                self.optimizer.step()
                count += 1
        return count

    def test_each_batch_is_a_phase(self):
        loader = torch.utils.data.DataLoader(Counted(), batch_size=2)
        self.assertEqual(self.run_epochs(loader, 2), 6)
        self.assertEqual(self.words(), " ".join(self.STEP.format(n) for n in range(6)))
        self.check_pairs()
        self.assertIsInstance(loader, torch.utils.data.DataLoader)
        self.assertEqual((len(loader), len(iter(loader)), type(loader).__name__), (3, 3, "DataLoader"))

    def test_workers_that_stay(self):
        loader = torch.utils.data.DataLoader(Counted(), batch_size=2, num_workers=1, persistent_workers=True)
        self.assertEqual(self.run_epochs(loader, 2), 6)
        self.assertEqual(self.words(), " ".join(self.STEP.format(n) for n in range(6)))
        self.assertEqual(iter(loader)._num_workers, 1)

    def test_a_loader_without_a_length(self):
        loader = torch.utils.data.DataLoader(Endless(), batch_size=1)
        self.assertEqual(self.run_epochs(loader, 2), 6)
        self.assertEqual(self.words(), " ".join(self.STEP.format(n) for n in range(6)))

    def test_a_loader_can_be_pickled_and_another_one_is_not_watched(self):
        loader = torch.utils.data.DataLoader(Counted(), batch_size=2)
        kind = type(loader)
        self.watch(self.model, self.optimizer, loader)
        self.assertIs(type(pickle.loads(pickle.dumps(loader))), kind)
        self.assertIsNot(type(loader), kind)
        for _ in torch.utils.data.DataLoader(Counted()):
            pass
        self.assertEqual(self.words(), "")

    def test_errors_of_the_dataset_go_through(self):
        loader = torch.utils.data.DataLoader([1, None])
        self.watch(self.model, self.optimizer, loader)
        with self.assertRaises(TypeError):
            list(loader)
        self.assertEqual(self.words(), "+0 +data -data +data -data")


@needs_torch
class Exit(TorchCase):
    def test_a_program_that_ends_in_a_step_ends_its_marks(self):
        code = """if True:
            import highwater, torch
            model = torch.nn.Linear(2, 2)
            highwater.torch.watch(model)
            model(torch.ones(1, 2)).sum().backward()
        """
        done = subprocess.run([sys.executable, "-c", code], cwd=PYTHON, env=dict(os.environ), check=False)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(self.words(("Linear",)), "+0 +forward -forward +loss -loss +backward -backward -0")
