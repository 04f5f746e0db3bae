#!/usr/bin/env python3
"""Whether the memory of each Slurm step on a real GPU is what its processes hold, and whose it is said to be.

There is no Slurm: the steps are control groups with the names that `slurmd` gives them, in either version. Two steps of one job hold 4
and 6 GiB, the second in two processes, one step of another user's job holds 5, and a process outside of all holds 3. Each step's bytes
must be what nvidia-smi says of its processes, and together with the rest what is in use. A step that ends is gone. Then a folder as a
prolog writes it gives the GPU to a job without a process.

    HIGHWATER=target/release/highwater python3 tests/gpu/slurm.py

It needs what `pods.py` needs. It changes no setting of the GPU. It prints a table, and fails if a row does.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import whose
from pods import HOLDER, MIB, ControlGroups, adds_up, holder, of_driver, report, until, values


def step_group(user: int, job: int, step: str, task: int) -> ControlGroups:
    if (Path("/sys/fs/cgroup") / "cgroup.procs").exists():
        return ControlGroups(f"system.slice/slurmstepd.scope/job_{job}/step_{step}/user/task_{task}")
    return ControlGroups(f"slurm/uid_{user}/job_{job}/step_{step}/task_{task}")


def steps_of(to: whose.Daemon, name: str) -> dict[str, float]:
    """By `job.step user`."""
    label = re.compile(r'slurm_job="(.*?)"(?:,slurm_step="(.*?)")?(?:,user="(.*?)")?$')
    of = {label.match(labels): value for labels, value in values(to, name).items()}
    return {f"{one[1]}.{one[2]} {one[3]}": value for one, value in of.items() if one}


def main() -> None:
    rows: list[tuple[str, str, bool]] = []
    used_name, info_name = "highwater_slurm_step_gpu_memory_used_bytes", "highwater_gpu_slurm_step_info"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        jobs = folder / "jobs"
        jobs.mkdir()
        script = folder / "holder.py"
        script.write_text(HOLDER)
        os.environ["HIGHWATER_SLURM_JOB_MAP"] = str(jobs)
        groups = [step_group(1000, 77, "0", 0), step_group(1000, 77, "1", 0), step_group(1000, 77, "1", 1)]
        groups.append(step_group(1001, 78, "batch", 0))
        to = whose.Daemon(folder, dry=False)
        try:
            sizes = ((4, 1000), (2, 1000), (4, 1000), (5, 1001))
            held = [holder(script, gib, group, user) for (gib, user), group in zip(sizes, groups, strict=True)]
            outside = holder(script, 3, None)
            took = until(lambda: len(steps_of(to, used_name)) == 3)
            why = f"{steps_of(to, info_name)}, {to.get('/api/v1/gpus')['gpus'][0]['processes']}"
            rows.append(("three steps have their memory", f"after {took:.1f} s" if took else why, took is not None))
            driver, ours = of_driver(), steps_of(to, used_name)
            for step, own in (("77.0 1000", held[:1]), ("77.1 1000", held[1:3]), ("78.batch 1001", held[3:])):
                by_driver = sum(driver.get(process.pid, 0) for process in own)
                by_us = ours.get(step, 0.0)
                found = f"{by_us / MIB:.0f} MiB, nvidia-smi {by_driver / MIB:.0f}"
                rows.append((f"memory of step {step.replace(' ', ' of user ')}", found, abs(by_us - by_driver) <= MIB))
            rows.append(adds_up(to, "steps", lambda to: steps_of(to, used_name)))
            held[3].communicate("")
            took = until(lambda: "78.batch 1001" not in steps_of(to, info_name))
            rows.append(("a step that ended is gone", f"after {took:.1f} s" if took else "no", took is not None))
            (jobs / "0").write_text("77\n4242 1002\n")
            took = until(lambda: "4242.None 1002" in steps_of(to, info_name))
            found = f"after {took:.1f} s" if took else f"{steps_of(to, info_name)}"
            rows.append(("a job of the folder is there", found, took is not None))
            unknown = "4242.None 1002" not in steps_of(to, used_name)
            rows.append(("what it holds", "not known" if unknown else f"{steps_of(to, used_name)}", unknown))
            for process in (*held[:3], outside):
                process.communicate("")
        finally:
            to.process.terminate()
            to.process.wait(10)
            for group in groups:
                until(lambda group=group: all((path / "cgroup.procs").read_text() == "" for path in group.paths), 10)
                group.remove()
    report(rows)


if __name__ == "__main__":
    main()
