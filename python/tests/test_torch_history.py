"""What the history of a step's allocations says of modules, with histories made by hand; and advice that is applied."""

import contextlib
import copy
import json
import os
import pickle
import types
import unittest
from unittest import mock

from .torch_case import TorchCase, forget_compiled, needs_torch, torch

MIB = 2**20


def allocation(address, mib):
    return {"action": "alloc", "addr": address, "size": mib * MIB}


def release(address, mib):
    return {"action": "free_requested", "addr": address, "size": mib * MIB}


@needs_torch
class Histories(unittest.TestCase):
    def setUp(self):
        from highwater.torch.history import Events, Kept, Place

        self.Kept, self.Place = Kept, Place
        # A step that begins with 100 MiB, after 7 events. The module is given an input of 1 MiB at 0x1, keeps 10 MiB at 0x2,
        # needs 50 MiB at 0x3 meanwhile, gives 4 MiB at 0x4, and allocates 2 MiB at 0x5 that outlive the step.
        self.events = Events(Place(7, 100 * MIB), [
            allocation(0x1, 1),
            allocation(0x2, 10), allocation(0x3, 50), release(0x3, 50), allocation(0x4, 4), allocation(0x5, 2),
            # The loss, and the gradient at which the module's backward pass begins.
            allocation(0x6, 30), release(0x6, 30), allocation(0x7, 4),
            # Its backward pass.
            release(0x4, 4), release(0x2, 10), release(0x7, 4), release(0x1, 1),
        ])
        self.module = Kept(self.at(1, 101), self.at(6, 117), {0x1}, {0x4})

    def at(self, nth, mib):
        return self.Place(7 + nth, mib * MIB)

    def test_the_most_between_two_places_is_from_what_the_counters_said(self):
        self.assertEqual(self.events.peak(self.at(0, 100), self.at(1, 101)), 101 * MIB)
        self.assertEqual(self.events.peak(self.at(1, 101), self.at(6, 117)), 161 * MIB)
        # The counters know of a block that was not split, which the history does not.
        self.assertEqual(self.events.peak(self.at(1, 103), self.at(6, 119)), 163 * MIB)
        self.assertEqual(self.events.peak(self.at(6, 117), self.at(8, 117)), 147 * MIB)
        self.assertEqual(self.events.peak(self.at(13, 102), self.at(13, 102)), 102 * MIB)

    def test_what_the_backward_pass_keeps_of_a_module(self):
        begins = self.at(9, 121)
        self.assertEqual(self.events.held(self.module, begins), 10 * MIB)
        # All that it needs at most, without the output, which its backward pass still has.
        self.assertEqual(self.events.recompute(self.module, begins), (10 + 50 - 4) * MIB)
        # The output is gone by then, and so is the input: a checkpoint would have to keep that.
        later = self.Place(7 + 13, 102 * MIB)
        self.assertEqual(self.events.held(self.module, later), -1 * MIB)
        self.assertEqual(self.events.recompute(self.module, later), 60 * MIB)

    def test_sizes_are_rounded_as_the_allocator_rounds_them(self):
        from highwater.torch.history import Events

        made = [{"action": "alloc", "addr": address, "size": size} for address, size in ((1, 5), (2, 513))]
        events = Events(self.Place(0, 0), made)
        self.assertEqual(events.live, [0, 512, 1536])

    def test_a_history_that_does_not_match_the_counters_is_not_used(self):
        from highwater.torch.history import MOST_EVENTS, History

        def stats(count):
            return {"allocation": {"all": {"allocated": count, "freed": 0}}, "allocated_bytes": {"all": {"current": 1}}}

        def run(*counts, traces=()):
            with mock.patch.multiple(
                torch._C, create=True, _cuda_isHistoryEnabled=lambda: False,
                _cuda_memoryStats=mock.Mock(side_effect=[stats(count) for count in counts]),
                _cuda_memorySnapshot=lambda *_: {"device_traces": [[], list(traces)]},
            ), mock.patch.object(torch.cuda.memory, "_record_memory_history") as record:
                history = History(1)
                self.assertTrue(history.start())
                found = history.stop()
                self.assertEqual([call.kwargs["enabled"] for call in record.call_args_list], ["all", None])
                return found

        events = [allocation(1, 1), {"action": "segment_alloc", "addr": 1, "size": MIB}, release(1, 1)]
        self.assertEqual(run(5, 7, traces=events), ((5, 1), [events[0], events[2]]))
        self.assertIsNone(run(5, 8, traces=events))
        self.assertIsNone(run(0, MOST_EVENTS + 1, traces=events))
        with mock.patch.multiple(
            torch._C, create=True, _cuda_isHistoryEnabled=lambda: False, _cuda_memoryStats=lambda _: stats(1),
        ), mock.patch.object(torch.cuda.memory, "_record_memory_history") as record:
            history = History(1)
            history.start()
            del history
            self.assertEqual([call.kwargs["enabled"] for call in record.call_args_list], ["all", None], "the model has gone")
        with mock.patch.object(torch._C, "_cuda_isHistoryEnabled", lambda: True, create=True):
            self.assertFalse(History(0).start(), "the job has a history of its own")

    def test_a_job_takes_over_the_history_by_beginning_its_own(self):
        from highwater.torch.history import History, is_ours

        def stats(_):
            return {"allocation": {"all": {"allocated": 1, "freed": 0}}, "allocated_bytes": {"all": {"current": 1}}}

        calls = []
        with mock.patch.multiple(
            torch._C, create=True, _cuda_isHistoryEnabled=lambda: False, _cuda_memoryStats=stats,
        ), mock.patch.object(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options)):
            history = History(0)
            history.start()
            self.assertTrue(is_ours())
            torch.cuda.memory._record_memory_history(enabled="all", max_entries=5)
            self.assertFalse(is_ours())
            self.assertIsNone(history.stop())
        self.assertEqual([call["enabled"] for call in calls], ["all", "all"], "the job's own goes on")

    def test_an_allocator_without_a_history_costs_nothing_else(self):
        from highwater.torch.history import History

        def refuse(*_):
            raise RuntimeError("cudaMallocAsync does not yet support it")

        with mock.patch.object(torch._C, "_cuda_isHistoryEnabled", refuse, create=True):
            history = History(0)
            self.assertEqual((history.start(), history.stop()), (False, None))
        with mock.patch.multiple(
            torch._C, create=True, _cuda_isHistoryEnabled=lambda: False, _cuda_memoryStats=refuse,
        ), mock.patch.object(torch.cuda.memory, "_record_memory_history") as record:
            history = History(0)
            self.assertEqual((history.start(), history.stop()), (False, None))
            self.assertEqual([call.kwargs["enabled"] for call in record.call_args_list], ["all", None])


@needs_torch
class Modules(TorchCase):
    """On a CPU with counters made by hand."""

    def setUp(self):
        super().setUp()
        forget_compiled()

    def records(self, model, steps=3, passes=1, **options):
        from highwater.torch import layers
        from highwater.torch.history import Place

        count = iter(range(10**6))

        def counters():
            return layers.Counted({"allocated": 1000, "reserved": 2000}, Place(next(count), 1000))

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        patched = mock.patch.object(layers, "allocator_of", lambda device: counters)
        with patched, self.watch(model, optimizer, layers_every=100, **options):
            for _ in range(steps):
                for _ in range(passes):
                    model(torch.zeros(3, 4)).sum().backward()
                    with torch.no_grad():
                        model.eval()(torch.zeros(3, 4))
                    model.train()
                optimizer.step()
        return [event for event in self.sent(self.daemon) if event.get("kind") == "layer"]

    def test_modules_around_others_have_records_where_their_passes_end_and_begin(self):
        model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.nn.Linear(4, 2))
        records = self.records(model)
        self.assertEqual({event["step"] for event in records}, {0, 2})
        first = [event for event in records if event["step"] == 0]
        found = [(event["name"], event["layer"]["direction"], event["layer"].get("modules")) for event in first]
        self.assertEqual(found, [
            ("0.0", "forward", None), ("0.1", "forward", None), ("0", "forward", 2), ("1", "forward", None),
            ("Sequential", "forward", 4),
            ("Sequential", "backward", 4), ("1", "backward", None), ("0", "backward", 2), ("0.1", "backward", None),
            ("0.0", "backward", None),
            # The rest of the step.
            ("Sequential", "backward", 4),
        ])
        end = next(event for event in self.sent(self.daemon) if event.get("kind") == "step" and event["event"] == "end")
        self.assertEqual(first[-1]["time_unix_nano"], end["time_unix_nano"])
        self.assertEqual(set(first[2]["layer"]), {"direction", "modules", "growth", "duration_ns"})

    def test_every_pass_of_a_step_has_records_and_evaluation_has_none(self):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        for passes in (1, 2):
            records = self.records(model, passes=passes)[-3 * passes * 2 - 1:]
            self.assertEqual({event["step"] for event in records}, {2})
            found = [event["name"] for event in records if event["layer"]["direction"] == "forward"]
            self.assertEqual(found, ["0", "1", "Sequential"] * passes)

    def test_a_module_whose_forward_pass_fails_costs_no_other_its_record(self):
        class Root(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.bad, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(9, 9), torch.nn.Linear(4, 2)

            def forward(self, x):
                x = self.inner(x)
                with contextlib.suppress(RuntimeError):
                    self.bad(x)
                return self.last(x)

        records = self.records(Root(), steps=1)
        found = [event["name"] for event in records if event["layer"]["direction"] == "forward"]
        self.assertEqual(found, ["inner", "last", "Root"])

    def test_what_the_history_said_holds_for_later_steps_that_do_the_same(self):
        from highwater.torch.history import Place
        from highwater.torch.layers import Counted, Known, Profile, Record

        def record(name, allocated, **fields):
            counted = Counted({"allocated": allocated}, Place(0, allocated))
            return Record(name, 1, None, counted, {"direction": "forward", **fields})

        for names, most, expected in ((("a", "b"), 2010, [1501, 2110]), (("a", "b"), 2500, None), (("b", "a"), 2010, None)):
            earlier = Known()
            earlier.records = [record("a", 1000, peak=1500, held=7, recompute=8), record("b", 2000, peak=2100)]
            later = [record(names[0], 1001), record(names[1], most)]
            Profile(types.SimpleNamespace(resolve=lambda at: at), 4, later, None, earlier).take()
            peaks = [each.fields.get("peak") for each in later]
            self.assertEqual(peaks, expected or [None, None])
            self.assertEqual(later[0].fields.get("held"), 7 if expected else None)
            self.assertEqual(len(earlier.records), 2 if expected else 0, "the next recorded step has a history of its own")

    def test_hooks_are_outside_of_compiled_modules(self):
        from highwater.torch.layers import eager

        if not hasattr(torch, "compile"):
            self.skipTest("this PyTorch has no torch.compile")
        model = torch.nn.Sequential(torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4))), torch.nn.Linear(4, 2))
        self.assertEqual(list(eager(model) or {}), ["", "0", "1"])
        in_place = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 2))
        in_place[0].compile()
        self.assertEqual(list(eager(in_place) or {}), ["", "1"])
        self.assertIsNone(eager(torch.compile(model)))


@needs_torch
class Applied(TorchCase):
    def setUp(self):
        super().setUp()
        self.calls = []
        inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Tanh())
        self.model = torch.nn.Sequential(inner, torch.nn.Linear(4, 2))
        inner[0].register_forward_hook(lambda *_: self.calls.append("linear"))

    def gradients(self):
        torch.manual_seed(1)
        self.model.zero_grad()
        self.model(torch.ones(3, 4)).sum().backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def test_advice_is_applied_and_gradients_are_the_same(self):
        import highwater.torch

        plain = self.gradients()
        self.assertEqual(len(self.calls), 1)
        named = [{"name": "0", "held_bytes": 5}]
        advice = {"modules": {"modules": named, "predicted_peak_bytes": 9, "recomputed_seconds": 0.5}}
        path = os.path.join(self.folder, "advice.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(advice, file)
        by_file = {"files": [{"file": "a", "checkpoints": None}, {"file": "b", "checkpoints": advice}], "batch": None}
        for given in (advice, path, {"job": "j", "checkpoints": advice}, by_file, ["0"]):
            self.calls.clear()
            with highwater.torch.checkpoint(self.model, given) as applied:
                again = self.gradients()
                self.assertEqual(len(self.calls), 2, "it ran again")
                for one, other in zip(plain, again):
                    self.assertTrue(torch.equal(one, other))
                with torch.no_grad():
                    self.model(torch.ones(3, 4))
                self.assertEqual(len(self.calls), 3)
            outcome = applied.outcome()
            self.assertEqual((outcome.modules, outcome.peak_bytes, outcome.seconds), (1, None, None))
            if given != ["0"]:
                self.assertEqual((outcome.predicted_peak_bytes, outcome.predicted_seconds), (9, 0.5))
            self.assertIs(type(self.model[0]), torch.nn.Sequential)
        self.calls.clear()
        self.gradients()
        self.assertEqual(len(self.calls), 1, "as before")

    def test_names_of_wrapped_models_are_found_and_others_refused(self):
        from highwater.torch import checkpoint

        wrapped = torch.nn.Module()
        wrapped.module = self.model
        for model, name in ((wrapped, "0"), (self.model, "module.0"), (self.model, "_orig_mod.0"), (wrapped, "module.0")):
            with checkpoint(model, [name]):
                self.assertIsNot(type(self.model[0]), torch.nn.Sequential)
        for advice, problem in (
            (["0.9"], "no module '0.9'; did you mean 0"),
            (["0", "0.0"], "a module inside '0'"),
            ({"modules": None}, "names no modules"),
            ({"modules": {"modules": []}}, "nothing that is checkpointed would lower the peak"),
            ({"files": [{"checkpoints": {}}, {"checkpoints": {}}]}, "advice on 2 files"),
            ({"checkpoints": {"modules": None}}, "names no modules"),
        ):
            with self.assertRaisesRegex(ValueError, problem):
                checkpoint(self.model, advice)
            self.assertIs(type(self.model[0]), torch.nn.Sequential)

    def test_copies_and_pickles_have_their_own_weights(self):
        import highwater.torch

        with highwater.torch.checkpoint(self.model, ["0"]):
            self.assertTrue(isinstance(self.model[0], torch.nn.Sequential))
            copies = [copy.deepcopy(self.model), torch.optim.swa_utils.AveragedModel(self.model).module]
            del self.model[0][0]._forward_hooks[next(iter(self.model[0][0]._forward_hooks))]
            copies.append(pickle.loads(pickle.dumps(self.model)))
            for each in copies:
                each.eval()
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.zero_()
                self.assertEqual(float(each(torch.ones(3, 4)).sum().detach()), 0.0)
                self.assertIs(type(each[0]), torch.nn.Sequential)
            self.assertNotEqual(float(self.model(torch.ones(3, 4)).abs().sum().detach()), 0.0)

    def test_a_model_that_is_trained_in_eval_mode_is_checkpointed_too(self):
        import highwater.torch

        with highwater.torch.checkpoint(self.model.eval(), ["0"]):
            self.gradients()
        self.assertEqual(len(self.calls), 2)

    def test_a_fault_of_the_outcome_does_not_reach_the_job(self):
        import highwater.torch
        from highwater.torch.checkpoint import PASSES, WARM

        with highwater.torch.checkpoint(self.model, ["0"]) as applied, mock.patch.object(applied, "outcome", lambda: 1 / 0):
            for _ in range(WARM + PASSES + 2):
                self.gradients()

    def test_the_outcome_is_logged_once_after_ten_passes(self):
        import highwater.torch
        from highwater.torch.checkpoint import PASSES, WARM

        with self.assertLogs("highwater", "WARNING") as logged, highwater.torch.checkpoint(self.model, ["0"]):
            for _ in range(WARM + PASSES + 3):
                self.gradients()
        self.assertEqual([line for line in logged.output if "checkpointed" in line], [
            "WARNING:highwater:highwater: 1 modules are checkpointed",
        ])
