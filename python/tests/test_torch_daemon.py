"""What `watch` sends, against the real daemon: nothing is refused, and what it says of the job is what the job did."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import highwater

from .listeners import PYTHON, SECONDS, wait_until
from .test_daemon import BINARY, Daemon
from .test_documents import DOCUMENTS, blocks
from .torch_case import TorchCase, needs_torch, torch


@needs_torch
@unittest.skipUnless(BINARY, "HIGHWATER names no daemon: nothing is tried against the real one")
class WatchedByTheDaemon(TorchCase):
    def start(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        daemon = Daemon(folder.name)
        self.addCleanup(daemon.stop)
        return daemon

    def test_phases_and_layers_arrive_whole(self):
        daemon = self.start()
        highwater.configure(socket=daemon.socket, job="watched", gpu=0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4)
        with highwater.torch.watch(model, optimizer, data, layers_every=2):
            for batch in data:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(batch)
        self.assertTrue(highwater.flush(SECONDS))
        wait_until(lambda: len(daemon.phases("watched")) >= 6 * 6 + 1, "all phases")
        phases = list(reversed(daemon.phases("watched")))
        steps = [phase for phase in phases if phase["kind"] == "step"]
        self.assertEqual([step["step"] for step in steps], list(range(6)))
        self.assertEqual([step["attributes"]["batch_size"] for step in steps], [4] * 6)
        for step in steps:
            inside = [phase["phase"] for phase in phases if phase["kind"] == "phase" and phase["step"] == step["step"]]
            self.assertEqual(inside[:5], ["data", "forward", "loss", "backward", "optimizer"])
        self.assertEqual([phase["phase"] for phase in phases].count("eval"), 1)
        (profile,) = json.loads(daemon.get("/api/v1/jobs/watched/layers"))["profiles"]
        self.assertEqual((profile["step"], profile["missing"]), (4, 0))
        records = [(record["layer"], record["direction"]) for record in profile["records"]]
        names = ["0", "1", "2"]
        self.assertEqual(records, [(n, "forward") for n in names] + [(n, "backward") for n in reversed(names)])
        self.assertEqual([record["activations"] for record in profile["records"][:3]], [4 * 16 * 4, 4 * 16 * 4, 4 * 4 * 4])
        parameters = sum(each.numel() * 4 for each in model.parameters())
        self.assertEqual(daemon.metric("highwater_job_profile_parameter_bytes", training_job="watched", rank="0"), parameters)
        outcomes = ("malformed", "bad_name", "too_large", "end_without_begin", "end_before_begin", "over_budget")
        refused = [daemon.metric("highwater_annotations_total", outcome=outcome) for outcome in outcomes]
        self.assertEqual((refused, daemon.metric("highwater_annotations_lost_total")), ([0.0] * len(outcomes), 0))

    def test_a_rank_that_is_late_in_its_backward_pass_is_named(self):
        """It marks nothing by hand, and all ranks' steps and backward passes take as long as the late one's."""
        daemon = self.start()
        environment = {
            **os.environ, "HIGHWATER_ANNOTATIONS_SOCKET": daemon.socket, "HIGHWATER_JOB": "late", "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.torch_rank", "late_in_backward", os.path.join(self.folder, "late")]
        ranks = [subprocess.Popen(command, cwd=PYTHON, env={**environment, "RANK": str(rank)}) for rank in range(2)]
        self.assertEqual([rank.wait(6 * SECONDS) for rank in ranks], [0, 0])

        def named():
            findings = json.loads(daemon.get("/api/v1/findings"))["findings"]
            return {(one["finding"], one["job"], one["rank"]) for one in findings if one["severity"] != "info"}

        # On a busy machine the other rank may be late too, now and then.
        wait_until(lambda: ("straggler", "late", 1) in named(), "the finding that names rank 1")


@needs_torch
@unittest.skipUnless(DOCUMENTS[2].exists(), "the package's tests run without the repository's documents")
class DocumentsOfTorch(TorchCase):
    def test_the_line_of_the_documents_watches_the_loop(self):
        found = [(path, block) for path in DOCUMENTS for block in blocks(path) if "torch" in block]
        self.assertGreaterEqual(len(found), 2)
        for path, block in found:
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            dataloader = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2)
            names = {"highwater": highwater, "model": model, "optimizer": optimizer, "dataloader": dataloader}
            handles = []
            watch = highwater.torch.watch

            def kept(*args, **kwargs):
                handles.append(watch(*args, **kwargs))  # noqa: B023
                return handles[-1]  # noqa: B023

            with contextlib.ExitStack() as stack:
                stack.enter_context(unittest.mock.patch.object(highwater.torch, "watch", kept))
                exec(compile(block, str(path), "exec"), names)
                before = len(self.daemon.events())
                for batch in dataloader:
                    model(batch).sum().backward()
                    optimizer.step()
                handles[-1].close()
            self.assertTrue(highwater.flush(SECONDS))
            wait_until(lambda before=before: len(self.daemon.events()) >= before + 24, "two steps")
            begun = [event.get("name") for event in self.daemon.events()[before:] if event["event"] == "begin"]
            self.assertEqual(begun[:6], [None, "data", "forward", "loss", "backward", "optimizer"], path)


if __name__ == "__main__":
    unittest.main()
