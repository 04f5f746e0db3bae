"""What a job is called if nobody names it, by processes as users start them."""

import os
import re
import subprocess
import sys
import unittest
from unittest import mock

from highwater import _names
from highwater._identity import of_environment

from .listeners import PYTHON, SECONDS, Case

WHO = (
    "import os; from highwater._identity import of_environment as _of\n"
    "print(_of().job, os.getpid(), os.getppid(), flush=True)\n"
)
# Every way in which multiprocessing starts a process, a child of such a child, and a plain fork.
CHILDREN = '''
import multiprocessing, os, sys
def who(*_):
    from highwater._identity import of_environment
    print(of_environment().job, flush=True)
def nest(method):
    who()
    child = multiprocessing.get_context(method).Process(target=who)
    child.start(), child.join()
if __name__ == "__main__":
    if "early" in sys.argv:
        import highwater
    print(os.getpid(), flush=True)
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=nest, args=(sys.argv[1],))
        child.start(), child.join()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(who, range(2))
    if os.fork() == 0:
        who()
        os._exit(0)
    os.wait()
    who()
'''


class Started(Case):
    """Programs in files of their own, without a launcher."""

    def setUp(self):
        super().setUp()
        del os.environ["HIGHWATER_JOB"]

    def write(self, path, text):
        path = os.path.join(self.folder, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
        return path

    def run_python(self, *arguments, text=None, **environment):
        """What it prints, and its process."""
        environment = {**os.environ, "PYTHONPATH": f"{PYTHON}:{self.folder}", **environment}
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments], env=environment, cwd=self.folder, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        ) as process:
            printed = process.communicate(text, timeout=SECONDS)[0]
        self.assertEqual(process.returncode, 0)
        return printed.split(), process.pid

    def test_a_program_is_called_as_a_person_calls_it_and_after_its_process(self):
        self.write("sweep.py", WHO)
        self.write("pkg/train.py", WHO)
        self.write("pkg/__main__.py", WHO)
        self.write("folder/__main__.py", WHO)
        self.write("__main__.py", WHO)
        self.write("ipykernel_launcher.py", WHO)
        for arguments, text, name in [
            (["sweep.py"], None, "sweep"),
            ([os.path.join(self.folder, "sweep.py")], None, "sweep"),
            (["-m", "sweep"], None, "sweep"),
            (["-m", "pkg.train"], None, "pkg.train"),
            (["-m", "pkg"], None, "pkg"),
            (["folder"], None, "folder"),
            (["folder/__main__.py"], None, "folder"),
            (["."], None, os.path.basename(self.folder)),
            (["-m", "cProfile", "-o", os.devnull, "sweep.py"], None, "sweep"),
            (["-c", WHO], None, "python"),
            (["-"], WHO, "python"),
            ([], WHO, "python"),
            (["ipykernel_launcher.py", "-f", "kernel.json"], None, "notebook"),
        ]:
            (job, *_), pid = self.run_python(*arguments, text=text)
            self.assertEqual(job, _names._fitted(name, _names._process(pid)), arguments)

    def test_two_runs_of_one_program_differ(self):
        self.write("sweep.py", WHO)
        names = {self.run_python("sweep.py")[0][0] for _ in range(2)}
        self.assertEqual(len(names), 2, names)

    def test_a_notebook_has_its_own_name_and_what_it_starts_has_not(self):
        self.write("ipykernel_launcher.py", WHO)
        self.write("vscode/ipykernel_launcher.py", "__vsc_ipynb_file__ = '/home/u/Fine tune.ipynb'\n" + WHO)
        self.write("sweep.py", WHO)
        session = {"JPY_SESSION_NAME": "/home/u/notebooks/Attention.ipynb"}
        for script, environment, name in [
            ("ipykernel_launcher.py", session, "Attention-"), ("vscode/ipykernel_launcher.py", {}, "Fine"),
            ("sweep.py", session, "sweep-"),
        ]:
            (job, *_), _ = self.run_python(script, **environment)
            self.assertTrue(job.startswith(name), job)

    def test_children_have_the_name_of_the_process_that_began(self):
        path = self.write("train.py", CHILDREN)
        for nested in ("fork", "spawn", "forkserver"):
            for early in ([], ["early"]):
                (pid, *jobs), _ = self.run_python(path, nested, *early)
                self.assertEqual((len(jobs), set(jobs)), (10, {_names._fitted("train", _names._process(int(pid)))}), nested)

    def test_programs_that_a_program_starts_are_runs_of_their_own(self):
        self.write("sweep.py", WHO)
        starts = "import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, 'sweep.py'], check=True)\n"
        self.write("driver.py", "import highwater\n" + starts)
        printed, _ = self.run_python("driver.py")
        jobs = printed[0::3]
        self.assertEqual(len(set(jobs)), 2, jobs)

    def test_ranks_of_one_launcher_share_a_name_and_two_launchers_differ(self):
        self.write("train.py", WHO)
        start = (
            "import os, subprocess, sys\n"
            "for rank in range(2):\n"
            "    known = {**os.environ, sys.argv[1]: str(rank)}\n"
            "    subprocess.run([sys.executable, 'train.py'], check=True, env=known)\n"
        )
        self.write("launch.py", start)
        for variable, common in [("PMI_RANK", {}), ("RANK", {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"})]:
            (*printed, _, launcher), _ = self.run_python("launch.py", variable, **common)
            names = set(printed[0::3])
            run = _names._container() + common["MASTER_PORT"] if common else _names._process(int(launcher))
            self.assertEqual(names, {_names._fitted("train", run)}, variable)


class Runs(unittest.TestCase):
    """What tells runs apart."""

    def of(self, argv="train.py", pids=_names._FIRST_PIDS, host_names="uts:[1]", host="3f2a9c", **environment):
        namespaces = {"pid": pids, "uts": host_names}
        with (
            mock.patch.object(_names, "_namespace", namespaces.get), mock.patch("socket.gethostname", return_value=host),
            mock.patch.object(sys, "argv", [argv]), mock.patch.object(_names, "_first_process", 4711),
        ):
            return of_environment(environment).job

    def test_the_process_is_enough_on_a_machine_and_not_in_a_container(self):
        self.assertEqual(self.of(), "train-4711")
        self.assertEqual(self.of(pids="pid:[5]"), "train-3f2a9c-4711")
        self.assertEqual(self.of(pids="pid:[5]", host_names=_names._FIRST_HOST), "train-5-4711", "it has the host's name")
        self.assertEqual(self.of(pids=""), "train-3f2a9c-4711", "what cannot be read may be a container")

    def test_the_ranks_of_torchrun_without_an_id_share_where_they_meet(self):
        def run(**known):
            return self.of(RANK="3", WORLD_SIZE="8", LOCAL_RANK="1", TORCHELASTIC_RUN_ID="none", **known)

        self.assertEqual(run(MASTER_PORT="29500", MASTER_ADDR="127.0.0.1"), "train-29500")
        self.assertEqual(run(MASTER_PORT="29500", MASTER_ADDR="localhost", pids="pid:[5]"), "train-3f2a9c-29500")
        self.assertEqual(run(MASTER_PORT="29500", MASTER_ADDR="node-1", pids="pid:[5]"), "train-node-1-29500")

    def test_the_pods_of_an_indexed_job_share_its_name(self):
        self.assertEqual(self.of(JOB_COMPLETION_INDEX="6", host="llama-6"), "train-llama")
        self.assertEqual(self.of(JOB_COMPLETION_INDEX="6", host="node"), "train-4711")

    def test_a_name_is_one_that_the_daemon_takes(self):
        for argv in ("x" * 500 + ".py", "größe" * 50 + ".py", "a\u202eb\ud800\n\ufeff.py", "\u200b.py"):
            name = self.of(argv)
            self.assertLessEqual(len(name.encode()), _names.MOST_BYTES)
            self.assertRegex(name, re.compile(r"^.+-4711$"))
            self.assertTrue(name.isprintable(), ascii(name))
        self.assertEqual(self.of("a\u202eb\ud800\n\ufeff.py"), "ab-4711")

    def test_a_name_that_is_given_stays_as_it_is(self):
        self.assertEqual(self.of(HIGHWATER_JOB="llama"), "llama")
        self.assertEqual(self.of(SLURM_JOB_ID="7", pids="pid:[5]"), "slurm-7")


if __name__ == "__main__":
    unittest.main()
