"""The client against the real daemon: every way to it, and what it says of the marks afterwards.

`HIGHWATER` names the daemon's program; `make test` sets it. Without it, these tests are skipped.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

import highwater
from highwater import _names

from .listeners import PYTHON, SECONDS, Case, wait_until

BINARY = os.environ.get("HIGHWATER")


class Daemon:
    """`highwater serve` on a simulated GPU without a job, on ports and sockets of its own."""

    def __init__(self, folder, *arguments, address="127.0.0.1"):
        self.socket, self.log = os.path.join(folder, "annotations.sock"), os.path.join(folder, "daemon.log")
        listen = ["--source", "sim:spike", "--listen", f"{address}:0", "--annotations-socket", self.socket]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HIGHWATER_")}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([BINARY, "serve", *listen, *arguments], stdout=log, stderr=log, env=environment)
        wait_until(lambda: self.address() or self.process.poll() is not None, "the daemon's address")
        self.url = self.address()
        if not self.url:
            raise AssertionError(f"the daemon did not start: {self.printed()}")
        # Before that, a mark's GPU is not known.
        wait_until(lambda: self.metric("highwater_gpu_up"), "the GPU")

    def printed(self):
        with open(self.log) as log:
            return log.read()

    def address(self):
        found = re.search(r"listening on (http://[^\s/\x1b]+)", self.printed())
        return found and found[1].replace("0.0.0.0", "127.0.0.1")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=SECONDS) as answer:
            return answer.read().decode()

    def metric(self, name, **labels):
        """The sum of the series of a name that have these labels, or None where there is none."""
        found = []
        for line in self.get("/metrics").splitlines():
            series = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if series and series[1] == name:
                known = dict(re.findall(r'(\w+)="([^"]*)"', series[2] or ""))
                if all(known.get(label) == value for label, value in labels.items()):
                    found.append(float(series[3]))
        return sum(found) if found else None

    def phases(self, job):
        try:
            return json.loads(self.get(f"/api/v1/jobs/{job}/phases?limit=1000"))["phases"]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return []  # The job is not known yet.

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(SECONDS)


@unittest.skipUnless(BINARY, "HIGHWATER names no daemon: nothing is tried against the real one")
class RealDaemon(Case):
    def start(self, *arguments, **where):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        daemon = Daemon(folder.name, *arguments, **where)
        self.addCleanup(daemon.stop)
        return daemon

    def work(self, steps):
        for n in range(steps):
            with highwater.step(n, lr=0.1):
                for name in ("data", "forward", "backward"):
                    with highwater.phase(name):
                        pass

    def check(self, daemon, job, steps):
        """All steps and phases arrived, in order, and nothing was refused or lost."""
        self.assertTrue(highwater.flush(SECONDS), highwater.status())
        wait_until(lambda: len(daemon.phases(job)) == 4 * steps, "all phases")
        phases = list(reversed(daemon.phases(job)))
        self.assertEqual([phase["step"] for phase in phases if phase["kind"] == "step"], list(range(steps)))
        self.assertEqual({phase["phase"] for phase in phases if phase["kind"] == "phase"}, {"data", "forward", "backward"})
        self.assertTrue(all(phase["begin_unix_nano"] <= phase["end_unix_nano"] for phase in phases))
        outcomes = re.findall(r'highwater_annotations_total\{outcome="(\w+)"\} (\d+)', daemon.get("/metrics"))
        refused = {outcome for outcome, count in outcomes if int(count) and not outcome.startswith("accepted")}
        self.assertEqual((refused, daemon.metric("highwater_annotations_lost_total")), (set(), 0))

    def test_over_the_socket(self):
        daemon = self.start()
        highwater.configure(socket=daemon.socket, gpu=0, job="socket")
        self.work(50)
        self.check(daemon, "socket", 50)
        status = highwater.status()
        self.assertEqual((status["accepted"], status["refused"], status["unconfirmed"]), (400, {}, 0))
        self.assertEqual(self.client.sender.transport.__class__.__name__, "Seqpacket")
        self.assertEqual([p for p in daemon.phases("socket") if not p["gpus"]], [], "the memory of the GPU that was named")

    def test_over_http(self):
        daemon = self.start()
        highwater.configure(url=daemon.url, gpu=0, job="http")
        self.work(50)
        self.check(daemon, "http", 50)
        self.assertEqual(highwater.status()["accepted"], 400)

    def test_over_datagrams(self):
        daemon = self.start()
        os.unlink(daemon.socket + ".seqpacket")
        highwater.configure(socket=daemon.socket, gpu=0, job="datagrams")
        self.work(50)
        self.check(daemon, "datagrams", 50)

    def test_everything_that_a_mark_may_have_is_taken(self):
        daemon = self.start()
        os.environ.update(RANK="3", WORLD_SIZE="8", LOCAL_RANK="0", POD_NAME="p", POD_NAMESPACE="n", POD_UID="u")
        counters = {"allocated": 5, "reserved": 6, "active": 5, "inactive_split": 1, "alloc_retries": 0, "ooms": 0}
        highwater.configure(socket=daemon.socket, gpu=[0], job="all", counters=lambda: counters)
        step = highwater.step(1, lr=0.5, text="größe", flag=True)
        with step, highwater.phase("forward", n=1), highwater.layer("attention", heads=8):
            pass
        highwater.mark("checkpoint saved", path="/x")
        self.assertTrue(highwater.flush(SECONDS))
        wait_until(lambda: len(daemon.phases("all")) == 2, "the step and its phase")
        self.assertEqual({phase["rank"] for phase in daemon.phases("all")}, {3})
        self.assertEqual(daemon.metric("highwater_annotations_total", outcome="malformed"), 0)
        self.assertEqual(daemon.metric("highwater_job_allocator_allocated_bytes", training_job="all", rank="3"), 5)
        self.assertEqual(len(json.loads(daemon.get("/api/v1/jobs/all/layers"))["layers"]), 1)

    def test_a_token_is_needed_where_the_daemon_asks_for_one_and_a_wrong_one_is_told_once(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        token = os.path.join(folder.name, "token")
        with open(token, "w") as file:
            file.write("0123456789abcdef\n")
        daemon = self.start("--set", f"annotations.token_file={token}", address="0.0.0.0")
        os.environ["HIGHWATER_TOKEN"] = "wrong wrong wrong"
        highwater.configure(url=daemon.url, job="token")
        with self.assertLogs("highwater", "WARNING") as logs:
            self.work(2)
            self.assertFalse(highwater.flush(SECONDS))
        self.assertEqual(len(logs.output), 1)
        self.assertIn("401", logs.output[0])
        self.reset()
        os.environ["HIGHWATER_TOKEN_FILE"] = token
        del os.environ["HIGHWATER_TOKEN"]
        highwater.configure(url=daemon.url, job="token")
        self.work(2)
        self.assertTrue(highwater.flush(SECONDS))
        wait_until(lambda: len(daemon.phases("token")) == 8, "all phases")

    def test_a_job_that_ends_ends_its_rank_over_every_way(self):
        daemon = self.start()
        text = "import highwater\nwith highwater.step(1): pass\nhighwater.phase('forward').__enter__()\nhighwater.flush(20)"
        for name, place in [
            ("seqpacket", {"HIGHWATER_ANNOTATIONS_SOCKET": daemon.socket}),
            ("http", {"HIGHWATER_ANNOTATIONS_SOCKET": "", "HIGHWATER_URL": daemon.url}),
        ]:
            environment = {**os.environ, **place, "HIGHWATER_JOB": name, "PYTHONPATH": str(PYTHON)}
            subprocess.run([sys.executable, "-W", "error", "-c", text], env=environment, check=True, timeout=SECONDS)
            wait_until(lambda name=name: not daemon.metric("highwater_phase_active", training_job=name), "the rank's end")
        self.assertEqual(daemon.metric("highwater_phases_total", outcome="exited"), 2)

    def test_two_runs_of_one_script_are_two_jobs_and_every_step_is_counted(self):
        daemon = self.start()
        script = os.path.join(os.path.dirname(daemon.socket), "sweep.py")
        with open(script, "w") as file:
            file.write(
                "import highwater, sys\n"
                "for n in range(60):\n"
                "    with highwater.step(n), highwater.phase('forward'): pass\n"
                # Both are there before either ends.
                "    if n == 30: print(flush=True), sys.stdin.readline()\n"
            )
        environment = {**os.environ, "HIGHWATER_ANNOTATIONS_SOCKET": daemon.socket, "PYTHONPATH": str(PYTHON)}
        del environment["HIGHWATER_JOB"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs = [subprocess.Popen([sys.executable, script], env=environment, **pipes) for _ in range(2)]
        for run in runs:
            run.stdout.readline()
        printed = [run.communicate("\n", SECONDS)[0] for run in runs]
        self.assertEqual(([run.returncode for run in runs], printed), ([0, 0], ["", ""]))
        steps = "highwater_job_steps_total"
        for run in runs:
            job = _names._fitted("sweep", _names._process(run.pid))
            counted = functools.partial(daemon.metric, steps, training_job=job)
            wait_until(lambda counted=counted: counted() == 60, f"the steps of {job}", counted)
            wait_until(lambda job=job: len(daemon.phases(job)) == 120, f"the steps and phases of {job}")
        accepted = daemon.metric("highwater_annotations_total", outcome="accepted_without_gpu")
        self.assertEqual(accepted, daemon.metric("highwater_annotations_total"))

    def test_a_refusal_reaches_the_person(self):
        daemon = self.start()
        highwater.configure(socket=daemon.socket, job="refused")
        highwater.mark("a")
        self.assertTrue(highwater.flush(SECONDS))
        with self.assertLogs("highwater", "WARNING") as logs:
            for _ in range(2):
                highwater.phase("never begun").__exit__(None, None, None)
                self.assertFalse(highwater.flush(SECONDS))
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(logs.output[0], r"refused 1 marks \(end_without_begin\): .*never begun.* has not begun$")
        self.assertEqual(highwater.status()["refused"], {"end_without_begin": 2})
        highwater.mark("a")
        self.assertTrue(highwater.flush(SECONDS))

    def test_two_users_have_a_job_of_one_name_each(self):
        if os.geteuid() != 0:
            self.skipTest("NOT TRIED: only root can start a program of another user")
        daemon = self.start()
        # The other user has to reach the socket.
        os.chmod(os.path.dirname(daemon.socket), 0o755)
        highwater.configure(socket=daemon.socket, job="train")
        self.work(2)
        self.check(daemon, "train", 2)
        text = (
            "import highwater, json, os\n"
            "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
            "for n in range(60):\n"
            "    with highwater.step(n), highwater.phase('forward'): pass\n"
            "print(json.dumps([highwater.flush(20), highwater.status()]))\n"
        )
        environment = {
            **os.environ, "HIGHWATER_ANNOTATIONS_SOCKET": daemon.socket, "HIGHWATER_JOB": "train", "PYTHONPATH": str(PYTHON),
        }
        command, pipes = [sys.executable, "-c", text], {"capture_output": True, "text": True}
        result = subprocess.run(command, env=environment, check=True, timeout=SECONDS, **pipes)
        is_taken, status = json.loads(result.stdout)
        self.assertEqual((is_taken, status["accepted"], status["refused"], result.stderr), (True, 240, {}, ""))
        for user, steps in ((0, 2), (65534, 60)):
            self.assertEqual(daemon.metric("highwater_job_steps_total", training_job="train", user=str(user)), steps)

    def test_a_daemon_that_is_started_again_goes_on_with_the_job(self):
        daemon = self.start()
        highwater.configure(socket=daemon.socket, gpu=0, job="again")
        self.work(3)
        self.check(daemon, "again", 3)
        daemon.stop()
        highwater.mark("while it was away")
        wait_until(lambda: self.client.sender.transport is None, "the end of the connection")
        again = Daemon(os.path.dirname(daemon.socket))
        self.addCleanup(again.stop)
        self.work(3)
        self.check(again, "again", 3)
        self.assertEqual(again.metric("highwater_annotations_total", outcome="accepted"), 25)


if __name__ == "__main__":
    unittest.main()
