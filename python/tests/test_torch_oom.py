"""The mark `oom`, the attributes of steps, and the profiler's handler."""

import gc
import json
import os
from unittest import mock

import highwater
from highwater import _gc

from .torch_case import TorchCase, needs_torch, torch


@needs_torch
class Oom(TorchCase):
    def test_the_observer_marks_what_the_allocator_knew(self):
        from highwater.torch import oom

        seen = oom.Oom(lambda: {"allocated": 7, "reserved": 9}, None)
        attached = mock.patch.object(torch._C, "_cuda_attach_out_of_memory_observer", create=True)
        with attached as attach, mock.patch.object(oom, "_is_attached", False):
            seen.attach()
        attach.assert_called_once_with(oom._observe)
        self.addCleanup(seen.close)
        for _ in range(3):
            oom._observe(1, 100, 200, 300)
        marks = [event for event in self.sent(self.daemon) if event.get("name") == "oom"]
        self.assertEqual([event["attributes"] for event in marks], [
            {"device": 1, "requested": 100, "device_limit": 200, "device_free": 300, "allocated": 7, "reserved": 9},
        ])

    def test_a_failure_that_the_observer_tells_of_is_not_marked_again_by_a_span(self):
        from highwater.torch import oom

        seen = oom.Oom(dict, None)
        attached = mock.patch.object(torch._C, "_cuda_attach_out_of_memory_observer", create=True)
        with attached, mock.patch.object(oom, "_is_attached", False):
            seen.attach()

        def fail():
            with self.assertRaises(torch.cuda.OutOfMemoryError), highwater.phase("forward"):
                oom._observe(0, 100, 200, 300)
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        fail()
        seen.close()
        fail()
        marks = [event.get("attributes") for event in self.sent(self.daemon) if event.get("name") == "oom"]
        self.assertEqual(marks, [{"device": 0, "requested": 100, "device_limit": 200, "device_free": 300}, None])

    def test_a_job_on_a_cpu_is_asked_nothing(self):
        attached = mock.patch.object(torch._C, "_cuda_attach_out_of_memory_observer", create=True)
        asked = mock.patch.object(torch.cuda, "is_available", return_value=True)
        with attached as attach, asked as is_available:
            self.watch(self.model, self.optimizer, snapshot_dir=self.folder, comm=False)
        self.assertEqual((attach.call_count, is_available.call_count), (0, 0))

    def test_the_history_of_allocations_ends_with_the_last_watch_and_a_jobs_own_stays(self):
        from highwater.torch import oom

        def opened():
            seen = oom.Oom(dict, self.folder)
            seen.attach()
            return seen

        attach = mock.patch.object(torch._C, "_cuda_attach_out_of_memory_observer", create=True)
        asked = mock.patch.object(torch._C, "_cuda_isHistoryEnabled", create=True, return_value=False)
        record = mock.patch.object(torch.cuda.memory, "_record_memory_history")
        with attach, asked as is_recording, record as recorded, mock.patch.object(oom, "_is_attached", False):
            first, second = opened(), opened()
            first.close()
            self.assertEqual(recorded.call_args_list, [mock.call(max_entries=100_000)])
            second.close()
            second.close()
            self.assertEqual(recorded.call_args_list[1:], [mock.call(enabled=None)])
            is_recording.return_value = True
            opened().close()
            self.assertEqual(recorded.call_count, 2)

    def test_a_snapshot_that_cannot_be_written_does_not_cost_the_mark(self):
        from highwater.torch import oom

        seen = oom.Oom(dict, self.folder)
        full = mock.patch.object(torch.cuda.memory, "_dump_snapshot", side_effect=OSError("full"))
        with full, self.assertLogs("highwater", "WARNING"):
            seen.happened(0, {"device_free": 1})
        seen.last_s = 0.0
        with mock.patch.object(torch.cuda.memory, "_dump_snapshot") as dump:
            seen.happened(0, {"device_free": 2})
            seen.last_s = 0.0
            seen.happened(0, {"device_free": 3})
        marks = [event["attributes"] for event in self.sent(self.daemon) if event.get("name") == "oom"]
        self.assertEqual([mark["device_free"] for mark in marks], [1, 2, 3])
        self.assertEqual(["snapshot" in mark for mark in marks], [False, True, False])
        self.assertEqual(dump.call_args[0][0], marks[1]["snapshot"])

    def test_an_exception_in_forward_is_seen_where_there_is_no_observer(self):
        def full(*_):
            raise torch.cuda.OutOfMemoryError("none left")

        self.watch(self.model, self.optimizer)
        self.model[0].forward = full
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            self.train()
        self.assertIn("!oom", self.words())


@needs_torch
class Steps(TorchCase):
    def test_a_recorded_step_says_what_holds_memory(self):
        optimizer = torch.optim.Adam(self.model.parameters())
        self.watch(self.model, optimizer, layers_every=2)
        for _ in range(2):
            self.train()
            optimizer.step()
        count = sum(parameter.numel() for parameter in self.model.parameters()) * 4
        ends = [event for event in self.sent(self.daemon) if event.get("kind") == "step" and event["event"] == "end"]
        self.assertEqual(ends[0]["attributes"], {
            "batch_size": 3, "parameter_bytes": count, "gradient_bytes": count, "optimizer_bytes": 2 * count + 4 * 4,
        })
        self.assertEqual(ends[1]["attributes"], {"batch_size": 3})

    def test_a_step_says_its_largest_batch(self):
        from highwater.torch.tensors import batch_size

        self.assertEqual(batch_size({"ids": [torch.tensor(1.0), torch.zeros(5, 2)], "more": torch.zeros(9)}), 5)
        self.assertEqual([batch_size(value) for value in ([], None, "text", torch.tensor(3), [[[[torch.zeros(4)]]]])], [0] * 5)
        loader = torch.utils.data.DataLoader(torch.randn(7, 4), batch_size=3)
        self.watch(self.model, self.optimizer, loader)
        for batch in loader:
            # What the loader gave counts, and not what the model was given of it.
            self.model(batch[:1]).sum().backward()
            self.optimizer.step()
        ends = [event for event in self.sent(self.daemon) if event.get("kind") == "step" and event["event"] == "end"]
        self.assertEqual([end["attributes"]["batch_size"] for end in ends], [3, 3, 1])

    def test_the_end_of_a_step_says_how_long_the_garbage_collector_stopped_it(self):
        self.watch(self.model, self.optimizer)
        gc.disable()
        self.addCleanup(gc.enable)
        with mock.patch.object(_gc, "LEAST_NS", 1):
            for collects in (True, False):
                loss = self.model(torch.zeros(3, 4)).sum()
                if collects:
                    gc.collect()
                loss.backward()
                self.optimizer.step()
        ends = [event for event in self.sent(self.daemon) if event.get("kind") == "step" and event["event"] == "end"]
        self.assertEqual(["gc_seconds" in end["attributes"] for end in ends], [True, False], ends)
        self.assertGreater(ends[0]["attributes"]["gc_seconds"], 0)

    def test_a_view_keeps_its_storage(self):
        from highwater.torch.holdings import bytes_of

        whole = torch.zeros(100)
        self.assertEqual(bytes_of([whole[:3], whole[50:], torch.zeros(2)]), 408)

    def test_nccls_memory_is_left_out_where_nobody_says_it(self):
        from highwater.torch.holdings import Holdings
        from highwater.torch.pace import Pace

        group = mock.Mock(group_desc="default_pg", group_name="0")
        group._get_backend.return_value.memory_stats.return_value = {"gpu_total": 5, "gpu_persist": 3}
        holdings = Holdings(self.model, [], Pace(1), lambda: torch.device("cuda", 0))
        world = type(torch.distributed.distributed_c10d._world)
        with mock.patch.object(world, "pg_map", new_callable=lambda: {group: 1}):
            self.assertEqual(holdings.nccl(torch.device("cuda", 0)), {"nccl_bytes.default_pg.0": 5})
            group._get_backend.side_effect = RuntimeError("gloo")
            self.assertEqual((holdings.nccl(torch.device("cuda", 0)), holdings.has_nccl), ({}, False))


@needs_torch
class Profiler(TorchCase):
    def test_a_trace_is_written_and_marked(self):
        import highwater

        folder = os.path.join(self.folder, "traces")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=highwater.torch.profiler_handler(folder)
        ):
            self.train()
        (mark,) = [event for event in self.sent(self.daemon) if event.get("name") == "profile"]
        with open(mark["attributes"]["path"], encoding="utf-8") as file:
            self.assertIn("traceEvents", json.load(file))

    def test_a_directory_that_cannot_be_made_is_no_error(self):
        import highwater

        with self.assertLogs("highwater", "WARNING"):
            highwater.torch.profiler_handler(__file__)(None)
