"""What the allocator did in the first steps, written as a file: with snapshots made by hand."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from .torch_case import needs_torch, torch

MIB = 2**20


def entry(action, address, size, stream=0):
    return {"action": action, "addr": address, "size": size, "stream": stream}


def segment(address, *blocks, device=0, kind="large", pool=(0, 0)):
    made = [{"size": size, "state": state} for size, state in blocks]
    total = sum(size for size, _ in blocks)
    return {
        "device": device, "address": address, "total_size": total, "stream": 0, "segment_type": kind, "segment_pool_id": pool,
        "is_expandable": False, "blocks": made,
    }


# A model of 4 MiB; each of three steps takes 30 MiB and gives it back, and the first a state of 2 MiB that stays.
MODEL = segment(0x1000, (4 * MIB, "active_allocated"), (16 * MIB, "inactive"))
OTHER = segment(0x9000, (2 * MIB, "active_allocated"), device=1)
STEP = [
    entry("segment_alloc", 0x4000000, 30 * MIB), entry("alloc", 0x4000000, 30 * MIB - 5),
    entry("free_requested", 0x4000000, 30 * MIB - 5), entry("free_completed", 0x4000000, 30 * MIB - 5),
    entry("segment_free", 0x4000000, 30 * MIB),
]
STATE = [entry("alloc", 0x1000 + 4 * MIB, 2 * MIB)]


class Allocator:
    """What PyTorch says of its allocator."""

    def __init__(self, *traces, segments=(MODEL, OTHER), settings=None):
        self.segments, self.traces, self.events = list(segments), list(traces), 0
        self.settings = {} if settings is None else settings

    def trace(self):
        return [each for trace in self.traces[:self.done] for each in trace]

    done = 0

    def step(self):
        self.done += 1

    def stats(self, _):
        counted = sum(each["action"] in ("alloc", "free_requested") for each in self.trace())
        return {"allocation": {"all": {"allocated": 7 + counted, "freed": 3}}, "allocated_bytes": {"all": {"current": 4 * MIB}}}

    def snapshot(self, *_):
        return {"segments": self.segments, "device_traces": [self.trace()], "allocator_settings": self.settings}

    @contextlib.contextmanager
    def used(self):
        with mock.patch.multiple(
            torch._C, create=True, _cuda_isHistoryEnabled=lambda: False, _cuda_memoryStats=self.stats,
            _cuda_memorySnapshot=self.snapshot,
        ), mock.patch.object(torch.cuda.memory, "_record_memory_history") as self.record, \
                mock.patch.object(torch.cuda, "mem_get_info", lambda _: (60 * MIB, 100 * MIB)):
            yield self


@needs_torch
class FirstSteps(unittest.TestCase):
    def written(self, allocator, *sizes, env=None):
        """The files after a step of each of these batch sizes, read, and what was said."""
        from highwater.torch import first_steps

        said = []
        with tempfile.TemporaryDirectory() as folder, allocator.used(), mock.patch.dict(os.environ, env or {}), \
                mock.patch.object(first_steps.client, "say", lambda text, *_: said.append(text)):
            left = list(sizes)
            part = first_steps.FirstSteps(
                os.path.join(folder, "made"), lambda: torch.device("cuda", 0), lambda: left.pop(0)
            )
            part.begin()
            for _ in sizes:
                allocator.step()
                part.end_step()
            files = sorted(Path(folder).glob("made/*"))
            found = [(each.name, json.loads(gzip.decompress(each.read_bytes()))) for each in files]
            for each in files if os.environ.get("HIGHWATER") else ():
                done = subprocess.run(
                    [os.environ["HIGHWATER"], "advise", "--batches", str(each)], capture_output=True, text=True, check=False
                )
                self.assertIn("histories of two batch sizes are needed to see how memory grows: all have 8", done.stderr)
        self.assertEqual(
            [call.kwargs["enabled"] for call in allocator.record.call_args_list][-1:], [None], "it is off in the end"
        )
        return found, said

    def test_three_steps_are_a_file(self):
        files, _ = self.written(Allocator(STEP + STATE, STEP, STEP, STEP), 8, 8, 8)
        self.assertEqual(len(files), 1)
        name, whole = files[0]
        self.assertEqual(name, f"allocations-rank0-batch8-{os.getpid()}.json.gz")
        step = [[0x4000000, 30 * MIB - 5, 0], [0x4000000]]
        self.assertEqual(whole, {
            "highwater_allocations": 1, "rank": 0, "batch_size": 8, "steps": 3, "settings": "", "total_bytes": 100 * MIB,
            # 40 MiB are in use, of which the allocator has 20.
            "outside_bytes": 20 * MIB,
            "reserved_peak_bytes": 50 * MIB,
            "segments": [{
                "stream": 0, "is_small": False, "is_expandable": False, "address": 0x1000,
                "blocks": [[4 * MIB, True], [16 * MIB, False]],
            }],
            "events": [*step, [0x1000 + 4 * MIB, 2 * MIB, 0], *step, *step],
        })

    def test_settings_are_those_of_the_allocator_or_of_the_environment(self):
        for known, env, expected in (
            ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}, "max_split_size_mb:64"),
            ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
            ({"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": True}, {}, "expandable_segments:True"),
        ):
            (_, whole), = self.written(Allocator(STEP, STEP, STEP, settings=known), 8, 8, 8, env=env)[0]
            self.assertEqual(whole["settings"], expected)

    def test_what_would_mislead_is_not_written_and_is_said(self):
        graph = segment(0x7000, (2 * MIB, "inactive"), pool=(0, 1))
        foreign = [entry("free_requested", 0x5, 1), entry("free_completed", 0x5, 1)]
        for allocator, sizes, because in (
            (Allocator(STEP, STEP, STEP), (8, 8, 4), "no batch size, or different ones: [8, 8, 4]"),
            (Allocator(STEP, STEP, STEP), (0, 0, 0), "no batch size, or different ones: [0, 0, 0]"),
            (Allocator(STEP, STEP, STEP, segments=(MODEL, graph)), (8, 8, 8), "a pool of its own, as that of CUDA graphs is"),
            (Allocator(STEP, foreign, STEP), (8, 8, 8), "something is released that was not allocated"),
            (Allocator(STEP, STATE, STATE), (8, 8, 8), "its entries contradict each other"),
            (Allocator(STEP * 200_001, STEP, STEP), (8, 8, 8), "more than 400000 entries"),
        ):
            files, said = self.written(allocator, *sizes)
            self.assertEqual(files, [])
            self.assertIn(because, said[-1])

    def test_a_history_of_the_job_or_of_snapshot_dir_is_left_alone(self):
        from highwater.torch import first_steps

        with Allocator(STEP).used() as allocator, mock.patch.object(torch._C, "_cuda_isHistoryEnabled", lambda: True), \
                mock.patch.object(first_steps.client, "say") as say:
            part = first_steps.FirstSteps("nowhere", lambda: torch.device("cuda", 0), lambda: 8)
            part.begin()
            part.end_step()
        allocator.record.assert_not_called()
        self.assertIn("recorded already", say.call_args.args[0])

    def test_without_a_folder_or_a_gpu_nothing_is_recorded(self):
        from highwater.torch.first_steps import FirstSteps as Part

        with Allocator(STEP).used() as allocator:
            for folder, device in ((None, torch.device("cuda", 0)), ("f", torch.device("cpu")), ("f", None)):
                part = Part(folder, lambda device=device: device, lambda: 8)
                part.begin()
                for _ in range(3):
                    part.end_step()
        allocator.record.assert_not_called()

    def test_a_watch_tells_it_of_each_step_and_its_batch(self):
        import highwater.torch
        from highwater.torch import first_steps

        seen = []

        class Counted(first_steps.FirstSteps):
            def begin(self):
                seen.append(self.folder)

            def end_step(self):
                seen.append(self.batch_size())

        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mock.patch.object(sys.modules["highwater.torch.watch"], "FirstSteps", Counted), \
                highwater.torch.watch(model, optimizer, history_dir="f"):
            for size in (5, 6):
                model(torch.ones(size, 3)).sum().backward()
                optimizer.step()
        self.assertEqual(seen, ["f", 5, 6])


if __name__ == "__main__":
    unittest.main()
