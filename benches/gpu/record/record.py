"""Records training jobs with known truth on real GPUs, each into a folder that `--source replay:` can replay.

    python3 benches/gpu/record/record.py --out recordings/
    python3 benches/gpu/record/record.py --out recordings/ --scenarios fsdp,slow-rank,ballast-ddp --deadline 240
    python3 benches/gpu/record/record.py --out recordings/ --truth-only

One scenario runs after the other, beside a raw 1 kHz log of memory. One that fails reports its error, and the others
still run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import signal
import socket
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent)]

import measure
import nvml
import recording
import summary
import truth
from measure import Child
from scenarios import Scenario, build, tiny

PERIOD_US = 1000
TAIL_S = 0.5
"""How long memory is logged after a job's end, so that the log contains its fall."""
FORMAT = 1


class Ranks:
    """The processes of one job, which wait for their gate."""

    def __init__(self, scenario: Scenario, folder: Path, dry_run: bool) -> None:
        self.folder = folder
        self._gate = folder / "gate"
        device = "cpu" if dry_run else "cuda"
        common = [sys.executable, HERE / "job.py", "--folder", folder, "--gate", self._gate, "--device", device]
        self.children = [
            Child([*common, "--rank", rank], folder / f"rank{rank}.log") for rank in range(scenario.gpus)
        ]

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until all have imported what they need."""
        deadline = time.monotonic() + timeout_s
        for child in self.children:
            child.wait_for(": ready", max(1.0, deadline - time.monotonic()))

    def run(self, timeout_s: float) -> str | None:
        """Opens the gate and waits for the job's end; returns what went wrong, or None."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        written = self._gate.with_suffix(".new")
        written.write_text(str(port))
        written.rename(self._gate)
        deadline = time.monotonic() + timeout_s
        while any(child.alive() for child in self.children):
            failed = [rank for rank, child in enumerate(self.children) if child.process.poll()]
            if failed or time.monotonic() >= deadline:
                time.sleep(1.0 if failed else 0.0)  # So that the others can write their own reason.
                self.end()
                return f"rank {failed[0]} failed" if failed else f"not over after {timeout_s:.0f} s"
            time.sleep(0.02)
        failed = [rank for rank, child in enumerate(self.children) if child.process.returncode]
        return f"rank {failed[0]} failed" if failed else None

    def end(self) -> None:
        """Ends what is still running."""
        for child in self.children:
            if child.alive():
                child.kill()

    def output(self, characters: int = 1500) -> str:
        """The end of each one's output."""
        return "\n".join(f"-- {child.log.name}\n{child.output()[-characters:]}" for child in self.children)


class Recorder:
    """Records one scenario after the other."""

    def __init__(self, options: argparse.Namespace, work: Path, scenarios: list[Scenario]) -> None:
        self.options = options
        self.work = work
        self.floor = None if options.dry_run else measure.find_floor(HERE.parent, work)
        if self.floor is None and not options.dry_run:
            raise SystemExit("no nvml_floor: no compiler here and no binary beside the scripts")
        count = max(one.gpus for one in scenarios)
        self.gpus: nvml.Gpus = nvml.PretendedGpus(count) if options.dry_run else nvml.Nvml(count)

    def prepare(self, scenario: Scenario) -> Ranks:
        """Starts a job's processes, up to their gate."""
        folder = self.work / scenario.name
        folder.mkdir()
        (folder / "design.json").write_text(json.dumps({"scenario": scenario.document()}))
        return Ranks(scenario, folder, self.options.dry_run)

    def record(self, scenario: Scenario, ranks: Ranks, limit_s: float) -> dict[str, Any]:
        """Runs a job beside the logs and writes its folder; returns its truth."""
        begin = time.monotonic()
        ranks.wait_ready(min(limit_s, 90.0))
        (ranks.folder / "gpus.json").write_text(json.dumps(self.gpus.facts()[: scenario.gpus]))
        load = nvml.LoadLog(self.gpus, scenario.gpus, ranks.folder / "utilization.csv")
        floor = self._start_floor(ranks.folder, scenario.gpus, limit_s + 60)
        try:
            load.start()
            problem = ranks.run(max(1.0, limit_s - (time.monotonic() - begin)))
            time.sleep(TAIL_S)
        finally:
            load.stop()
            if floor:
                floor.stop()
            ranks.end()
        seconds = round(time.monotonic() - begin, 1)
        if floor:
            print("".join(floor.output().splitlines()[-1:]), flush=True)
        if problem:
            print(f"   {problem}\n{ranks.output()}", flush=True)
        return self._keep(scenario, ranks.folder, problem, seconds)

    def _start_floor(self, folder: Path, gpus: int, seconds: float) -> Child | None:
        raw = folder / "raw.csv"
        if self.floor is None:
            now_ns = time.time_ns()
            raw.write_text("".join(f"{now_ns},{gpu},{4 << 30}\n" for gpu in range(gpus)))
            return None
        child = Child([self.floor, "loop", PERIOD_US, seconds, raw], folder / "floor.log")
        child.wait_for("devices", 20)
        return child

    def _keep(self, scenario: Scenario, folder: Path, problem: str | None, seconds: float) -> dict[str, Any]:
        """Compresses what was recorded into the scenario's folder of the output, with its truth."""
        target = self.options.out / scenario.name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        facts = [path for rank in range(scenario.gpus) if (path := folder / f"facts_rank{rank}.json").exists()]
        design = {
            "format": FORMAT,
            "scenario": scenario.document(),
            "problem": problem,
            "seconds": seconds,
            "ranks": [json.loads(path.read_text()) for path in facts],
        }
        (target / "design.json").write_text(json.dumps(design, indent=1) + "\n")
        shutil.copy(folder / "gpus.json", target)
        pack(target / "nvml_1khz.csv.gz", of_gpus((folder / "raw.csv").read_text(), scenario.gpus))
        for name in ("utilization.csv", *(f"annotations_rank{rank}.jsonl" for rank in range(scenario.gpus))):
            pack(target / f"{name}.gz", whole_lines((folder / name).read_text()))
        return write_truth(target)


def of_gpus(raw: str, gpus: int) -> str:
    """The raw log without the GPUs that the job does not use, and without a last line that was cut off."""
    kept = []
    for line in whole_lines(raw).splitlines():
        fields = line.split(",")
        if line.startswith("#") and not line.startswith("# reserved,"):
            kept.append(line)
        elif len(fields) == 3 and fields[1].isdigit() and int(fields[1]) < gpus:
            kept.append(line)
    return "\n".join(kept) + "\n"


def whole_lines(text: str) -> str:
    """The text up to its last line's end."""
    return text[: text.rfind("\n") + 1]


def pack(path: Path, text: str) -> None:
    """Writes a compressed file that is the same for the same text."""
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def write_truth(folder: Path) -> dict[str, Any]:
    """Derives a folder's truth and writes it there."""
    read = recording.read(folder)
    derived = {"format": FORMAT, "scenario": folder.name, "problem": read.design.get("problem"), **truth.derive(read)}
    (folder / "truth.json").write_text(json.dumps(derived, indent=1) + "\n")
    return derived


def gather(out: Path) -> dict[str, Any]:
    """The truth of all folders in one file, by scenario."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("*/truth.json"))}
    (out / "truth.json").write_text(json.dumps({"format": FORMAT, "scenarios": found}, indent=1) + "\n")
    return found


def archive(out: Path, target: Path) -> None:
    """Writes all folders into one file. It is replaced as a whole, so that it is never half written."""
    unfinished = target.with_name(target.name + ".new")
    with tarfile.open(unfinished, "w") as tar:
        tar.add(out, arcname=out.name)
    unfinished.rename(target)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Records training jobs with known truth.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the recordings, one folder each")
    add("--scenarios", default="", help="scenarios to record, with commas between, in this order; default: all")
    add("--healthy-seconds", type=float, default=600.0, help="length of the healthy scenario")
    add("--deadline", type=float, default=1800.0, help="end everything this many seconds from now")
    add("--archive", type=Path, help="after each scenario, write all recordings into this tar file too")
    add("--truth-only", action="store_true", help="derive the truth of existing recordings again")
    add("--dry-run", action="store_true", help="try the scripts on a CPU: tiny jobs, made-up counters and memory")
    return parser.parse_args()


def wanted_scenarios(options: argparse.Namespace) -> list[Scenario]:
    """The scenarios asked for."""
    known = build(options.healthy_seconds)
    names = [name for name in options.scenarios.split(",") if name] or list(known)
    unknown = set(names) - known.keys()
    if unknown:
        raise SystemExit(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [tiny(known[name]) if options.dry_run else known[name] for name in names]


def record_all(options: argparse.Namespace, work: Path) -> list[str]:
    """Records all scenarios; returns those that failed. The next job's processes start while one is recorded."""
    scenarios = wanted_scenarios(options)
    recorder = Recorder(options, work, scenarios)
    deadline = time.monotonic() + options.deadline
    failed = []
    ready = recorder.prepare(scenarios[0])
    for position, scenario in enumerate(scenarios):
        print(f"== {scenario.name}: {scenario.about}", flush=True)
        ranks = ready
        if position + 1 < len(scenarios):
            ready = recorder.prepare(scenarios[position + 1])
        try:
            left = deadline - time.monotonic()
            if left < 5:
                raise TimeoutError("no time was left")
            derived = recorder.record(scenario, ranks, min(left, scenario.limit_seconds))
            failed += [scenario.name] if derived["problem"] else []
        except Exception:  # Whatever fails in a scenario, the others still run.
            traceback.print_exc()
            print(ranks.output(), flush=True)
            failed.append(scenario.name)
        finally:
            ranks.end()
        gather(options.out)
        if options.archive:
            archive(options.out, options.archive)
    return failed


def main() -> int:
    """Records, or derives truth again, and prints the table; 1 if a scenario failed."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    if options.truth_only:
        for path in sorted(options.out.glob("*/design.json")):
            write_truth(path.parent)
    else:
        work = Path(tempfile.mkdtemp(prefix="highwater-record-"))
        try:
            failed = record_all(options, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(summary.render(options.out, gather(options.out)))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
