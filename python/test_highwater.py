"""The client against a socket that stands in for the daemon's: whatever a job gives it, it neither raises nor waits."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

import highwater

HERE = Path(__file__).resolve().parent


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Tensor:
    """As much of a tensor as the client looks at."""

    def __init__(self, value, is_cuda=False):
        self.value, self.is_cuda = value, is_cuda

    def __int__(self):
        if self.is_cuda:
            raise AssertionError("this waits for the GPU")
        return int(self.value)

    def __str__(self):
        if self.is_cuda:
            raise AssertionError("this waits for the GPU")
        return f"tensor({self.value})"


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "annotations.sock")
        self.daemon = self.listen()
        self.client = highwater._Client()
        environment = {"HIGHWATER_ANNOTATIONS_SOCKET": self.path, "HIGHWATER_JOB": "llama", "PATH": os.environ["PATH"]}
        for patch in (mock.patch.object(highwater, "_client", self.client), mock.patch.dict(os.environ, environment, clear=True)):
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(lambda: self.client.socket and self.client.socket.close())

    def listen(self):
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(daemon.close)
        daemon.bind(self.path)
        return daemon

    def received(self):
        """Every event that has arrived."""
        self.daemon.setblocking(False)
        events = []
        while True:
            try:
                events.append(json.loads(self.daemon.recv(1 << 16)))
            except BlockingIOError:
                return events

    def test_steps_and_phases_have_their_begin_and_end(self):
        with highwater.step(7, lr=0.5):
            with highwater.phase("forward"):
                pass
            with highwater.layer("attention"):
                pass
        highwater.mark("saved", path="/x")
        events = self.received()
        self.assertTrue(all(event.pop("time_unix_nano") > 1e18 for event in events))
        who = {"job": "llama", "rank": 0}
        self.assertEqual(events, [
            {"event": "begin", "kind": "step", "step": 7, "attributes": {"lr": 0.5}, **who},
            {"event": "begin", "name": "forward", **who},
            {"event": "end", "name": "forward", **who},
            {"event": "begin", "kind": "layer", "name": "attention", **who},
            {"event": "end", "kind": "layer", "name": "attention", **who},
            {"event": "end", "kind": "step", "step": 7, **who},
            {"event": "mark", "name": "saved", "attributes": {"path": "/x"}, **who},
        ])

    def test_launchers_and_configure_say_who_it_is(self):
        os.environ.update(RANK="3", WORLD_SIZE="8", LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="0,1")
        highwater.mark("a")
        highwater.configure(job="gpt", rank=5, gpu=["GPU-a", 1])
        highwater.mark("b")
        first, second = self.received()
        places = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
        self.assertEqual((first["job"], first["rank"], first["world_size"], first["attributes"]), ("llama", 3, 8, places))
        self.assertEqual((second["job"], second["rank"], second["gpu"]), ("gpt", 5, ["GPU-a", 1]))
        self.assertNotIn("gpu", first)

    def test_jobs_are_named_as_the_daemon_names_them(self):
        for name, value, job in [
            ("TORCHELASTIC_RUN_ID", "x", "torchrun-x"),
            ("SLURM_JOB_ID", "77", "slurm-77"),
            ("HIGHWATER_JOB", "llama", "llama"),
        ]:
            os.environ.pop("HIGHWATER_JOB", None)
            os.environ[name] = value
            self.client.common = None
            highwater.mark("a")
            self.assertEqual(self.received()[0]["job"], job)
        del os.environ["HIGHWATER_JOB"], os.environ["SLURM_JOB_ID"], os.environ["TORCHELASTIC_RUN_ID"]
        for argv, job in [(["/a/train.py"], "train"), ([""], "python"), ([], "python")]:
            self.client.common = None
            with mock.patch.object(sys, "argv", argv):
                highwater.mark("a")
            self.assertEqual(self.received()[0]["job"], job)

    def test_a_wrong_environment_is_no_rank(self):
        for wrong in ("", "x", "-1", "1.5", "nan"):
            os.environ.update(RANK=wrong, WORLD_SIZE=wrong, SLURM_PROCID="4")
            self.client.common = None
            highwater.mark("a")
            event = self.received()[0]
            self.assertEqual(event["rank"], 4)
            self.assertNotIn("world_size", event)

    def test_numbers_that_json_has_not_and_tensors_do_no_harm(self):
        for number, sent in [
            (Tensor(4), 4), (Tensor(4, is_cuda=True), None), (float("nan"), None), (float("inf"), None), (-1, None),
            ("5", 5), (None, None), (Unprintable(), None), (True, 1), (2.0, 2),
        ]:
            with highwater.step(number):
                pass
            self.assertEqual([event.get("step") for event in self.received()], [sent, sent])
        highwater.mark(
            "a", nan=float("nan"), loss=Tensor(0.25), gpu=Tensor(1, is_cuda=True), huge=2**70, none=None, ok=True, n=3, shape=(1, 2)
        )
        self.assertEqual(self.received()[0]["attributes"], {
            "nan": "nan", "loss": "tensor(0.25)", "huge": str(2**70), "ok": True, "n": 3, "shape": "(1, 2)",
        })

    def test_what_cannot_be_sent_is_counted_and_reported_with_the_next(self):
        highwater.mark("unprintable", x=Unprintable())
        highwater.mark("too long" * 100_000)
        highwater.mark(object())
        highwater.mark("a")
        highwater.mark("b")
        self.assertEqual([(event["name"], event.get("lost")) for event in self.received()], [("a", 3), ("b", None)])

    def test_no_daemon_and_one_that_comes_later(self):
        self.daemon.close()
        highwater.mark("refused")
        os.unlink(self.path)
        highwater.mark("missing")
        self.daemon = self.listen()
        highwater.mark("a")
        self.assertEqual([(event["name"], event["lost"]) for event in self.received()], [("a", 2)])

    def test_a_full_queue_costs_its_mark_and_no_time(self):
        sent = 0
        while not self.client.lost:
            highwater.mark("a")
            sent += 1
        self.assertLess(sent, 1_000_000)
        self.received()
        highwater.mark("b")
        self.assertEqual(self.received()[0]["lost"], 1)

    def test_the_socket_of_a_user_is_found_beside_the_systems(self):
        runtime = os.path.dirname(self.path)
        os.makedirs(os.path.join(runtime, "highwater"))
        del os.environ["HIGHWATER_ANNOTATIONS_SOCKET"]
        os.environ["XDG_RUNTIME_DIR"] = runtime
        self.assertEqual(self.client.paths(), ["/run/highwater/annotations.sock", f"{runtime}/highwater/annotations.sock"])
        self.path = f"{runtime}/highwater/annotations.sock"
        self.daemon = self.listen()
        with mock.patch.object(self.client, "paths", lambda: [f"{runtime}/nobody", self.path]):
            highwater.mark("a")
        self.assertEqual(len(self.received()), 1)
        highwater.configure(socket="/elsewhere")
        self.assertEqual(self.client.paths(), ["/elsewhere"])

    def test_the_jobs_own_errors_go_through_and_end_their_phase(self):
        with self.assertRaises(KeyError):
            with highwater.phase("forward"):
                raise KeyError("the job's")
        self.assertEqual([event["event"] for event in self.received()], ["begin", "end"])

    def test_a_child_is_a_sender_of_its_own(self):
        self.client.lost = 9
        child = os.fork()
        if child == 0:
            highwater.mark("child")
            self.client.lost = 9
            os._exit(0)
        os.waitpid(child, 0)
        highwater.mark("parent")
        self.assertEqual([(event["name"], event.get("lost")) for event in self.received()], [("child", None), ("parent", 9)])

    def test_threads_do_not_disturb_each_other(self):
        self.daemon.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        events, done = [], threading.Event()

        def read():
            self.daemon.settimeout(0.01)
            while True:
                try:
                    events.append(json.loads(self.daemon.recv(1 << 16)))
                except TimeoutError:
                    if done.is_set():
                        return

        def work(n):
            for _ in range(200):
                with highwater.phase(f"phase {n}"):
                    pass

        reader, threads = threading.Thread(target=read), [threading.Thread(target=work, args=(n,)) for n in range(8)]
        reader.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        reader.join()
        self.assertEqual(len(events) + sum(event.get("lost", 0) for event in events) + self.client.lost, 8 * 400)

    def run_job(self, text):
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        subprocess.run([sys.executable, "-W", "error", "-c", text], env=environment, check=True)
        return [(event["event"], event.get("name")) for event in self.received()]

    def test_a_job_that_ends_says_so_and_one_that_marked_nothing_does_not(self):
        self.assertEqual(self.run_job("import highwater; highwater.mark('a')"), [("mark", "a"), ("exit", None)])
        self.assertEqual(self.run_job("import highwater"), [])
        forks = "import highwater, os, sys\nhighwater.mark('a')\nif os.fork() == 0: sys.exit()\nos.wait()"
        self.assertEqual(self.run_job(forks), [("mark", "a"), ("exit", None)])

    def test_the_example_runs_as_it_stands(self):
        command = [sys.executable, str(HERE / "example.py"), "--gpu", "0", "--steps", "1", "--seconds", "0"]
        subprocess.run(command, env={**os.environ}, check=True)
        events = self.received()
        self.assertEqual({(event["job"], event["gpu"]) for event in events}, {("example", 0)})
        self.assertEqual([event.get("name") for event in events if event["event"] == "begin"], [None, "data", "forward", "backward"])


if __name__ == "__main__":
    unittest.main()
