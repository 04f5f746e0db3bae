#!/usr/bin/env python3
"""Whether the memory of each pod on a real GPU is what its processes hold, and how long the GPU was almost full.

The kubelet is the stand-in of the tests (`tests/kubelet`), and the pods are control groups with a container's name. One pod was
given the GPU and holds 20 GiB, another was not and holds 5 GiB, and a process outside of all pods holds 3 GiB. Each pod's bytes
must be what nvidia-smi says of its process, and together with the rest what is in use. A pod that ends is gone. Then the third
process fills the GPU but for 300 MiB, holds that for a quarter of a second, three times, and says how long each took.

    HIGHWATER=target/release/highwater KUBELET=target/tools/kubelet-0.37.2/kubelet-podresources python3 tests/gpu/pods.py

It needs PyTorch for CUDA, root (for the control groups), and one GPU on which nothing else runs, on a machine and not in a
container: the driver's process ids are the machine's. It changes no setting of the GPU. It prints a table, and fails if a row does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import whose

MIB = 1 << 20
# Holds the given GiB, as the given user, until its input ends. On a line `fill` it takes all but 300 MiB for a quarter of a second, and prints for
# how long.
HOLDER = """
import os, sys, time
if len(sys.argv) > 2: os.setuid(int(sys.argv[2]))
import torch
held = torch.empty(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holds", flush=True)
for line in sys.stdin:
    free = torch.cuda.mem_get_info()[0]
    more = torch.empty(free - 300 * 2**20, dtype=torch.uint8, device="cuda")
    begun = time.monotonic()
    time.sleep(0.25)
    del more
    lasted = time.monotonic() - begun
    torch.cuda.empty_cache()
    print(lasted, time.monotonic() - begun, flush=True)
"""


class ControlGroups:
    """A control group with this path, in each hierarchy."""

    def __init__(self, below: str) -> None:
        root = Path("/sys/fs/cgroup")
        roots = [root] if (root / "cgroup.procs").exists() else [one for one in root.iterdir() if not one.is_symlink()]
        # A cpuset without CPUs takes no process.
        roots = [one for one in roots if (one / "cgroup.procs").exists() and "cpuset" not in one.name]
        self.paths = [one / below for one in roots]
        self.depth = len(Path(below).parts)
        for path in self.paths:
            path.mkdir(parents=True)

    def command(self, command: list[str]) -> list[str]:
        files = [str(path / "cgroup.procs") for path in self.paths]
        return [
            "sh",
            "-c",
            'while [ "$1" != -- ]; do echo $$ >"$1"; shift; done; shift; exec "$@"',
            "sh",
            *files,
            "--",
            *command,
        ]

    def remove(self) -> None:
        for path in self.paths:
            for one in (path, *path.parents[: self.depth - 1]):
                # Others may be below it.
                with contextlib.suppress(OSError):
                    one.rmdir()


def holder(
    script: Path, gib: float, group: ControlGroups | None, user: int | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), str(gib), *([] if user is None else [str(user)])]
    process = subprocess.Popen(
        group.command(command) if group else command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "holds\n", "a process does not hold its memory"
    return process


def metrics(to: whose.Daemon) -> list[str]:
    with urllib.request.urlopen(to.url + "/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text.splitlines()


def values(to: whose.Daemon, name: str) -> dict[str, float]:
    """Each series of GPU 0: its labels, and its value."""
    found = (re.match(rf'{name}\{{gpu="0",uuid="[^"]*",?(.*)\}} (\S+)$', line) for line in metrics(to))
    return {one[1]: float(one[2]) for one in found if one}


def pods_of(to: whose.Daemon) -> dict[str, float]:
    label = re.compile(r'namespace="(.*)",pod="(.*)",container="(.*)"')
    of = {label.match(labels): bytes_ for labels, bytes_ in values(to, "highwater_pod_gpu_memory_used_bytes").items()}
    return {f"{one[1]}/{one[2]}": bytes_ for one, bytes_ in of.items() if one}


def until(what: object, seconds: float = 30) -> float | None:
    """How long it took until `what` was true; `None` if it was not."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if what():  # type: ignore[operator]
            return time.monotonic() - begun
        time.sleep(0.1)
    return None


def smi(*query: str) -> list[str]:
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def of_driver() -> dict[int, int]:
    lines = smi("--query-compute-apps=pid,used_memory")
    return {int(pid): int(mib) * MIB for pid, mib in (line.split(",") for line in lines)}


def adds_up(to: whose.Daemon, what: str, held_by: Callable[[whose.Daemon], dict[str, float]]) -> tuple[str, str, bool]:
    """Whether what these hold and the rest are what is in use. The processes are listed every ten seconds."""
    found, apart = "", 1.0

    def is_so() -> bool:
        nonlocal found, apart
        held = sum(held_by(to).values())
        rest = values(to, "highwater_gpu_memory_outside_workloads_bytes").get("", 0.0)
        used = values(to, "highwater_gpu_memory_used_bytes").get("", 1.0)
        apart = (held + rest - used) / used
        found = f"{held / MIB:.0f} + {rest / MIB:.0f} of {used / MIB:.0f} MiB ({apart:+.2%})"
        return abs(apart) < 0.01

    is_right = until(is_so) is not None
    return f"{what} and the rest, of what is in use", found, is_right


def report(rows: list[tuple[str, str, bool]]) -> None:
    """Prints the table, and ends the program."""
    for what, found, is_right in rows:
        print(f"{'ok ' if is_right else 'NOT'}  {what:45} {found}")
    sys.exit(0 if all(is_right for _, _, is_right in rows) else 1)


def main() -> None:
    rows: list[tuple[str, str, bool]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        ids = {"ml/trainer": "0a" * 32, "serving/stowaway": "0b" * 32}
        for pod, container in ids.items():
            space, own = pod.split("/")
            (folder / "logs" / f"{own}_{space}_main-{container}.log").touch()
        uuid = smi("--query-gpu=uuid", "-i", "0")[0]
        devices = [{"resourceName": "nvidia.com/gpu", "deviceIds": [uuid]}]
        listed = {
            "podResources": [{"namespace": "ml", "name": "trainer", "containers": [{"name": "main", "devices": devices}]}]
        }
        (folder / "pods.json").write_text(json.dumps(listed))
        kubelet = subprocess.Popen(
            [os.environ["KUBELET"], str(folder / "kubelet.sock"), str(folder / "pods.json")], stderr=subprocess.DEVNULL
        )
        os.environ["HIGHWATER_KUBELET_SOCKET"] = str(folder / "kubelet.sock")
        os.environ["HIGHWATER_KUBELET_CONTAINER_LOGS"] = str(folder / "logs")
        script = folder / "holder.py"
        script.write_text(HOLDER)
        groups = {pod: ControlGroups(f"kubepods/pod{pod.replace('/', '-')}/{container}") for pod, container in ids.items()}
        to = whose.Daemon(folder, dry=False)
        try:
            trainer = holder(script, 20, groups["ml/trainer"])
            stowaway = holder(script, 5, groups["serving/stowaway"])
            outside = holder(script, 3, None)
            took = until(lambda: len(pods_of(to)) == 2)
            why = f"{pods_of(to)}, {values(to, 'highwater_gpu_pod_info')}, {to.get('/api/v1/gpus')['gpus'][0]['processes']}"
            rows.append(("two pods have their memory", f"after {took:.1f} s" if took else why, took is not None))
            driver, ours = of_driver(), pods_of(to)
            for pod, process in (("ml/trainer", trainer), ("serving/stowaway", stowaway)):
                by_driver, by_us = driver.get(process.pid, 0), ours.get(pod, 0.0)
                rows.append(
                    (
                        f"memory of {pod}",
                        f"{by_us / MIB:.0f} MiB, nvidia-smi {by_driver / MIB:.0f}",
                        abs(by_us - by_driver) <= MIB,
                    )
                )
            rows.append(adds_up(to, "pods", pods_of))
            stowaway.communicate("")
            took = until(lambda: list(pods_of(to)) == ["ml/trainer"])
            rows.append(("a pod that ended is gone", f"after {took:.1f} s" if took else "no", took is not None))
            lasted = []
            for _ in range(3):
                assert outside.stdin and outside.stdout
                outside.stdin.write("fill\n")
                outside.stdin.flush()
                lasted.append([float(one) for one in outside.stdout.readline().split()])
                time.sleep(0.5)
            longest = values(to, "highwater_gpu_memory_low_longest_seconds").get('free_below="1GiB",window="60s"', 0.0)
            total = values(to, "highwater_gpu_memory_low_seconds_total").get('free_below="1GiB"', 0.0)
            # From when the process knew that it had the memory to when it had given it back.
            least, most = max(one[0] for one in lasted), max(one[1] for one in lasted)
            found = f"{longest:.3f} s, the process {least:.3f} to {most:.3f}"
            rows.append(("the longest time with less than 1 GiB free", found, least - 0.005 <= longest <= most + 0.02))
            least, most = sum(one[0] for one in lasted), sum(one[1] for one in lasted)
            found = f"{total:.3f} s, the process {least:.3f} to {most:.3f}"
            rows.append(("in all", found, least - 0.015 <= total <= most + 0.06))
            for process in (trainer, outside):
                process.communicate("")
        finally:
            to.process.terminate()
            to.process.wait(10)
            kubelet.terminate()
            for group in groups.values():
                until(lambda group=group: all((path / "cgroup.procs").read_text() == "" for path in group.paths), 10)
                group.remove()
    report(rows)


if __name__ == "__main__":
    main()
