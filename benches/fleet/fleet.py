#!/usr/bin/env python3
"""How long a fleet's questions take over thousands of GPUs, in Prometheus and in VictoriaMetrics.

Takes the series of one simulated node of eight GPUs, as the daemon exports them, and makes an hour of them for each of many nodes.
Loads them into both, and asks what the dashboard *Fleet and nodes*, the recording rules and docs/prometheus.md ask. Series that are
asked for over the hour have a sample each 15 s, all others the last five minutes. Of the GPUs, 146 had less than 1 GiB free for
longer than 5 ms once, and 99 for a shorter time: the answer must be these 146 with their pods.

    HIGHWATER=target/release/highwater python3 benches/fleet/fleet.py --victoria-metrics /usr/bin/victoria-metrics

Prometheus and promtool are those of `make test-peers`, or of --prometheus and --promtool. VictoriaMetrics is Debian's. It prints a
table with the median and the longest of some askings, and fails if the answer to the question of docs/prometheus.md is wrong or
takes longer than 2 s. The other answers are not checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches" / "gpu"))

sys.path.insert(0, str(ROOT / "dashboards"))

import measure  # noqa: E402
from generate import classic  # noqa: E402

STEP_S, HOUR, RECENT = 15, 240, 20
QUESTION = "max by (instance, gpu, namespace, pod) (max_over_time(highwater:pod_gpu_memory_low_longest_seconds[1h])) > 0.005"
# Families that some panel asks for over its whole range.
OVER_THE_HOUR = (
    "highwater_gpu_memory_low_longest_seconds",
    "highwater_gpu_memory_low_seconds_total",
    "highwater_gpu_memory_used_max_bytes",
    "highwater_gpu_memory_used_bytes",
    "highwater_gpu_memory_free_bytes",
    "highwater_gpu_utilization_ratio",
    "highwater_gpu_energy_joules_total",
    "highwater_gpu_up",
    "highwater_finding_active",
    "highwater_build_info",
)
VARIABLES = {
    "$__rate_interval": "1m",
    "$__range_s": "3600",
    "$__range": "1h",
    "$__interval": "1m",
    "$instance": ".*",
    "$gpu": ".*",
    "$window": "60s",
}
LONG, SHORT = 146, 99

Labels = tuple[tuple[str, str], ...]


def get(url: str, timeout: float = 120) -> bytes:
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        text: bytes = answer.read()
    return text


@contextlib.contextmanager
def running(command: list[str], ready: str, log: Path) -> Iterator[None]:
    """A program, once it answers at `ready`."""
    child = measure.Child(command, log)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError):
                get(ready, 5)
                break
            if not child.alive():
                raise SystemExit(f"{command[0]} ended: {child.output()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        child.stop(60)


def node_series(folder: Path, wanted: set[str], buckets: str) -> list[tuple[str, Labels, float]]:
    """The series of one node that the queries use."""
    port = measure.free_port()
    binary = os.environ.get("HIGHWATER", "highwater")
    scenario = ROOT / "tests" / "data" / "ten-phases.toml"
    settings = ["--listen", f"127.0.0.1:{port}", "--set", f"annotations.socket={folder / 'annotations.sock'}"]
    settings += ["--set", f"metrics.phase_buckets={buckets}"]
    url = f"http://127.0.0.1:{port}/metrics"
    with running([binary, "serve", "--source", f"sim:{scenario}", *settings], url, folder / "node.log"):
        time.sleep(20)
        text = get(url).decode()
    series = []
    for line in text.splitlines():
        found = re.match(r"([a-z_:0-9]+)(?:\{(.*)\})? (\S+)$", line)
        if found and found[1] in wanted:
            labels = tuple(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found[2] or ""))
            series.append((found[1], labels, float(found[3])))
    return series


def queries() -> list[tuple[str, str, bool]]:
    """Each query with its name, and whether it is asked over the hour."""
    found = [("the question of docs/prometheus.md", QUESTION, False)]
    board = json.loads((ROOT / "dashboards" / "fleet.json").read_text())
    panels = [inner for panel in board["panels"] for inner in [panel, *panel.get("panels", [])]]
    for panel in panels:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            found.append((f"{panel['title']}, {target['refId']}", expression, not target.get("instant")))
    rules = (ROOT / "dashboards" / "alerts" / "recording.yaml").read_text()
    for rule in re.finditer(r"- record: (\S+)\n\s+expr: (?:>-\n((?:\s{10,}.*\n|\n)+)|(.*)\n)", rules):
        found.append((f"rule {rule[1]}", " ".join((rule[2] or rule[3]).split()), False))
    return found


def fleet(
    template: list[tuple[str, Labels, float]], nodes: int, end_s: int
) -> Iterator[tuple[Labels, list[float], list[float]]]:
    """Each series of the fleet: labels, times (seconds) and values."""
    chance = random.Random(7)
    gpus = sorted({value for _, labels, _ in template for name, value in labels if name == "gpu"})
    events = chance.sample([(node, gpu) for node in range(nodes) for gpu in gpus], LONG + SHORT)
    long = {at: chance.uniform(0.006, 0.4) for at in events[:LONG]}
    short = {at: chance.uniform(0.001, 0.0045) for at in events[LONG:]}
    hour = [float(end_s - STEP_S * (HOUR - 1 - nth)) for nth in range(HOUR)]
    for node in range(nodes):
        instance = f"gpu-{node:04d}"
        for name, labels, value in template:
            of = dict(labels)
            gpu = of.get("gpu")
            if "uuid" in of:
                of["uuid"] = f"GPU-{node:08d}-0000-0000-0000-00000000000{gpu}"
            if "training_job" in of:
                of["training_job"] = f"job-{node // 8}"
            whole: Labels = (("__name__", name), ("job", "highwater"), ("instance", instance), *sorted(of.items()))
            times = hour if name in OVER_THE_HOUR else hour[-RECENT:]
            if name.startswith("highwater_gpu_memory_low"):
                lasted = long.get((node, gpu or ""), short.get((node, gpu or "")))
                at = chance.randrange(HOUR - 8) if lasted else HOUR
                seen = range(at, at + 4)
                if name.endswith("_total"):
                    values = [(lasted or 0.0) * (nth >= at) for nth in range(HOUR)]
                else:
                    values = [lasted or 0.0 if nth in seen else 0.0 for nth in range(HOUR)]
                    if lasted:
                        pod = (("__name__", "highwater:pod_gpu_memory_low_longest_seconds"), ("container", "main"))
                        who = (("namespace", "research"), ("pod", f"llama-{node}-{gpu}"))
                        mine = (
                            *pod,
                            ("gpu", gpu or ""),
                            ("instance", instance),
                            ("job", "highwater"),
                            *who,
                            ("uuid", of["uuid"]),
                        )
                        yield mine, [hour[nth] for nth in seen], [lasted] * 4
            elif name.endswith("_total"):
                values = [value + 100.0 * nth for nth in range(len(times))]
            elif name.endswith(("_bytes", "_ratio")):
                values = [value * chance.uniform(0.9, 1.0) for _ in times]
            else:
                values = [value] * len(times)
            yield whole, times, values
        for gpu in gpus:
            uuid = f"GPU-{node:08d}-0000-0000-0000-00000000000{gpu}"
            info = (("__name__", "highwater_gpu_pod_info"), ("container", "main"), ("gpu", gpu), ("instance", instance))
            full = (("__name__", "highwater:gpu_memory_used_ratio:max1m"), *info[2:], ("job", "highwater"), ("uuid", uuid))
            yield full, hour, [chance.uniform(0.5, 0.95) for _ in hour]
            yield (
                (*info, ("job", "highwater"), ("namespace", "research"), ("pod", f"llama-{node}-{gpu}"), ("uuid", uuid)),
                hour,
                [1.0] * HOUR,
            )


def write(template: list[tuple[str, Labels, float]], nodes: int, end_s: int, folder: Path) -> tuple[int, int]:
    """Writes the fleet for both; returns the numbers of series and samples."""
    series = samples = 0
    with (folder / "fleet.om").open("w") as text, (folder / "fleet.jsonl").open("w") as lines:
        for labels, times, values in fleet(template, nodes, end_s):
            series, samples = series + 1, samples + len(times)
            name, own = labels[0][1], ",".join(f'{key}="{value}"' for key, value in labels[1:])
            start = f"{name}{{{own}}}"
            text.writelines(f"{start} {value} {at:.0f}\n" for at, value in zip(times, values, strict=True))
            stamps = [int(at * 1000) for at in times]
            lines.write(json.dumps({"metric": dict(labels), "values": values, "timestamps": stamps}) + "\n")
        text.write("# EOF\n")
    return series, samples


def ask(url: str, query: str, over: bool, end_s: int) -> tuple[float, list[Any] | str]:
    """Seconds, and the series of the answer, or why there is none."""
    own = {"query": query, **({"start": end_s - 3600, "end": end_s, "step": 30} if over else {"time": end_s})}
    path = "query_range" if over else "query"
    begun = time.monotonic()
    try:
        answer = json.loads(get(f"{url}/api/v1/{path}?{urllib.parse.urlencode(own)}"))
    except urllib.error.HTTPError as error:
        return time.monotonic() - begun, json.loads(error.read()).get("error", str(error))[:90]
    return time.monotonic() - begun, answer["data"]["result"]


def size(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def main() -> None:
    peers = ROOT / "target" / "tools"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--phase-buckets", default="none", help="metrics.phase_buckets of the nodes: fine, coarse or none")
    parser.add_argument("--times", type=int, default=3, help="how often each is asked")
    parser.add_argument(
        "--prometheus", type=Path, default=next(iter(peers.glob("prometheus-3*/prometheus-3")), Path("prometheus"))
    )
    parser.add_argument("--promtool", type=Path, default=peers / "prometheus/usr/bin/promtool")
    parser.add_argument("--victoria-metrics", type=Path)
    parser.add_argument("--folder", type=Path, help="where the data go; a temporary folder by default")
    given = parser.parse_args()
    asked = queries()
    wanted = {name for _, query, _ in asked for name in re.findall(r"highwater_[a-z0-9_]+", query)}
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        template = node_series(folder, wanted, given.phase_buckets)
        end_s = int(time.time()) // 60 * 60 - 60
        begun = time.monotonic()
        series, samples = write(template, given.nodes, end_s, folder)
        gpus = given.nodes * len({value for _, labels, _ in template for name, value in labels if name == "gpu"})
        print(
            f"{gpus:,} GPUs of {given.nodes:,} nodes: {series:,} series, {samples:,} samples, made in {time.monotonic() - begun:.0f} s"
        )
        engines = {}
        begun = time.monotonic()
        blocks = folder / "prometheus"
        made = [
            str(given.promtool),
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "--quiet",
            str(folder / "fleet.om"),
            str(blocks),
        ]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        print(f"Prometheus: blocks in {time.monotonic() - begun:.0f} s, {size(blocks) / samples:.2f} B a sample with the index")
        (folder / "prometheus.yml").write_text("global: {}\n")
        port = measure.free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(given.prometheus), f"--storage.tsdb.path={blocks}", f"--web.listen-address=127.0.0.1:{port}"]
        command += [f"--config.file={folder / 'prometheus.yml'}", "--storage.tsdb.retention.time=10d"]
        stack.enter_context(running(command, url + "/-/ready", folder / "prometheus.log"))
        engines["Prometheus"] = url
        if given.victoria_metrics:
            port = measure.free_port()
            url = f"http://127.0.0.1:{port}"
            store = folder / "victoria"
            command = [str(given.victoria_metrics), f"-storageDataPath={store}", f"-httpListenAddr=127.0.0.1:{port}"]
            command += ["-retentionPeriod=1", "-search.latencyOffset=0s", "-search.maxUniqueTimeseries=2000000"]
            stack.enter_context(running(command, url + "/health", folder / "victoria.log"))
            begun = time.monotonic()
            with (folder / "fleet.jsonl").open("rb") as lines:
                headers = {"Content-Length": str((folder / "fleet.jsonl").stat().st_size)}
                urllib.request.urlopen(urllib.request.Request(url + "/api/v1/import", lines, headers), timeout=600).read()
            took = time.monotonic() - begun
            get(url + "/internal/force_flush")
            print(
                f"VictoriaMetrics: {samples / took / 1e6:.2f} M samples/s taken, {size(store) / samples:.2f} B a sample with the index"
            )
            engines["VictoriaMetrics"] = url
        failed = False
        print(f"{'query':58}" + "".join(f"{name + ' s (longest)':>26} {'series':>8}" for name in engines))
        for name, query, over in asked:
            row = f"{name[:57]:58}"
            for engine, url in engines.items():
                # What `make classic` writes for it.
                own = classic(query) if engine == "VictoriaMetrics" else query
                times = [ask(url, own, over, end_s) for _ in range(given.times)]
                took, found = [seconds for seconds, _ in times], times[-1][1]
                if isinstance(found, str):
                    row += f"  {found:.33}"
                    failed |= query == QUESTION
                    continue
                row += f"{statistics.median(took):17.2f} ({max(took):5.2f}) {len(found):8,}"
                if query == QUESTION:
                    pods = [one["metric"] for one in found]
                    right = all(one["pod"] == f"llama-{int(one['instance'][4:])}-{one['gpu']}" for one in pods)
                    failed |= len(found) != LONG or not right or max(took) > 2
            print(row, flush=True)
        print("NOT: the question's answer is wrong, or took longer than 2 s" if failed else "the question: right, within 2 s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
