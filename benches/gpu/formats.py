#!/usr/bin/env python3
"""Records one training job with several tools at the same time, and compares what `highwater report` reads from each file.

    HIGHWATER=target/release/highwater python3 benches/gpu/formats.py [--seconds 20] [--out results/]

The tools are `highwater record` in both of its formats, a program that polls and prints each millisecond as ONNX Runtime's
profiler does, and `nvidia-smi` in each form of its CSV. Fails if a file cannot be read, or if two tools differ by more than
a GiB in the peak: they sample at different times and rates. With --out, the beginnings of the files and the report's page
are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Child
from rig import find_highwater, start_recorder

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
SMI = {
    "smi_all.csv": ["--query-gpu=timestamp,index,uuid,name,pci.bus_id,memory.used,memory.total", "--format=csv", "-lms", "10"],
    "smi_noheader.csv": ["--query-gpu=timestamp,index,memory.used", "--format=csv,noheader", "-lms", "10"],
    "smi_nounits.csv": ["--query-gpu=timestamp,memory.used,index", "--format=csv,nounits", "-lms", "10"],
    "smi_bare.csv": ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "10"],
    "smi_units.csv": ["--query-gpu=memory.used", "--format=csv", "-lms", "10"],
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for which all tools record")
    parser.add_argument("--out", type=Path, help="where to keep the files' beginnings and the page")
    return parser.parse_args()


def shown(highwater: str, path: Path) -> dict[str, object]:
    done = subprocess.run([highwater, "report", path, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"problem": done.stderr.strip()}
    recording = json.loads(done.stdout)["recordings"][0]
    gpu = max(recording["gpus"], key=lambda gpu: gpu["peak_bytes"] or 0)
    return {"format": recording["format"], "skipped": recording["skipped_rows"], **gpu}


def main() -> int:
    options = parse_options()
    highwater = find_highwater()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printer = folder / "poll_and_print"
        subprocess.run(["cc", "-O2", "-o", printer, HERE / "poll_and_print.c", "-ldl"], check=True)
        tools: dict[str, list[object]] = {
            "highwater.sqlite": [highwater, "record", "-o", folder / "highwater.sqlite"],
            "highwater.txt": [highwater, "record", "--format", "ort", "-o", folder / "highwater.txt"],
            "memory_usage.txt": [printer, folder / "memory_usage.txt"],
        }
        if shutil.which("nvidia-smi"):
            tools |= {log: ["nvidia-smi", *query, "-f", folder / log] for log, query in SMI.items()}
        job = Child([sys.executable, HERE / "train.py", "--seconds", 3600, "--verbose"], folder / "job.log")
        job.wait_for("ready: ", 120)
        running = [start_recorder(command) for command in tools.values()]
        time.sleep(options.seconds)
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait(30)
        job.kill()
        print(f"{'file':<18}{'read as':<30}{'peak GiB':>10}{'mean GiB':>10}{'changes':>9}{'skipped':>9}")
        failed, peaks = False, []
        for log in tools:
            found = shown(highwater, folder / log)
            if "problem" in found or found["peak_bytes"] is None:
                print(f"{log:<18}{found.get('problem', 'no memory is known')}")
                failed = True
                continue
            peaks.append(found["peak_bytes"])
            print(
                f"{log:<18}{found['format']:<30}{found['peak_bytes'] / GIB:>10.3f}{found['mean_bytes'] / GIB:>10.3f}"
                f"{found['changes']:>9}{found['skipped']:>9}"
            )
        failed |= not peaks or max(peaks) - min(peaks) > GIB
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            for log in [log for log in tools if not log.endswith(".sqlite")]:
                text = (folder / log).read_bytes()
                (options.out / log).write_bytes(b"".join(text.splitlines(keepends=True)[:100]) + text[-40:])
            files = [folder / log for log in tools]
            page = [highwater, "report", *files, "-o", options.out / "formats.html", "--png", options.out / "formats.png"]
            failed |= subprocess.run(page, stdout=subprocess.DEVNULL, env=os.environ, check=False).returncode != 0
        return int(failed)


if __name__ == "__main__":
    sys.exit(main())
