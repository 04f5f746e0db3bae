#!/usr/bin/env python3
"""Exports of Nsight Systems that people have in public repositories: what highwater reports of each, beside a computation of its own.

    benches/files/nsight.py FOLDER [--highwater target/release/highwater]

FOLDER has the files of nsight.tsv as `OWNER+REPOSITORY/NAME`; nothing is fetched. A file whose contents differ from the ones that were
looked at is not compared. Of each, the number and the time of kernels, the time of each kernel, the copies and fills, the time in
which any of them ran on a GPU, and the time of its window are computed from the tables with Python's sqlite3, and the steps from the
ranges that the report names; the time by NVTX range; of those in which nothing ran on a GPU, the number and the time of the ranges of each name. Exits with 1 if
one of them differs, or if a file with work or ranges is not read.
"""

import collections
import json
import re
import sqlite3
import subprocess
import sys

import stored

CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNEL, COPY, FILL = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))


def union(intervals):
    """The time in which at least one of these was going on."""
    total, end = 0, None
    for begin, until in sorted(intervals):
        if end is None or begin > end:
            total += until - begin
            end = until
        elif until > end:
            total += until - end
            end = until
    return total


def computed(path):
    """What the tables say, by GPU."""
    file = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    file.text_factory = lambda text: text.decode("utf-8", "replace")
    tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    gpus = {}
    if "TARGET_INFO_CUDA_DEVICE" in tables:
        gpus = {(pid, cuda): gpu for pid, cuda, gpu in file.execute("SELECT pid, cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE")}
    found = collections.defaultdict(lambda: {"kernels": 0, "copies": 0, "all": [], "compute": [], "by_name": collections.Counter()})
    for table in (KERNEL, COPY, FILL):
        if table not in tables:
            continue
        name = "(SELECT value FROM StringIds WHERE id = demangledName)" if table == KERNEL else "NULL"
        for begin, end, device, pid, text in file.execute(f"SELECT start, end, deviceId, globalPid, {name} FROM {table}"):
            of = found[gpus.get(((pid or 0) >> 24 & 0xFFFFFF, device), device)]
            of["kernels" if table == KERNEL else "copies"] += 1
            of["all"].append((begin, end))
            if table == KERNEL:
                of["by_name"][text] += end - begin
                if not re.search("nccl", text or "", re.I):
                    of["compute"].append((begin, end))
    ranges = []
    if "NVTX_EVENTS" in tables:
        columns = {row[1] for row in file.execute("PRAGMA table_info(NVTX_EVENTS)")}
        text = "coalesce(text, (SELECT value FROM StringIds WHERE id = textId))" if "textId" in columns else "text"
        query = f"SELECT {text}, end - start FROM NVTX_EVENTS WHERE eventType IN (59, 60) AND end >= start"
        ranges = [(name, time) for name, time in file.execute(query) if name]
    by_range = of_ranges(file, tables, text) if "NVTX_EVENTS" in tables and CALLS in tables else {}
    file.close()
    return found, ranges, by_range


def of_ranges(file, tables, text):
    """The time on GPUs by the innermost range that the thread of the launch was in; of each launch, all ranges are looked at."""
    ranges = list(file.execute(f"SELECT start, end, globalTid, {text} FROM NVTX_EVENTS WHERE eventType IN (59, 60) AND end >= start"))
    calls = {}
    for begin, thread, number in file.execute(f"SELECT start, globalTid, correlationId FROM {CALLS} ORDER BY start DESC"):
        calls[thread >> 24, number] = begin, thread
    times = collections.Counter()
    for table in (KERNEL, COPY, FILL):
        if table in tables:
            for time, pid, number in file.execute(f"SELECT end - start, globalPid, correlationId FROM {table}"):
                begin, thread = calls.get((pid >> 24, number), (None, None)) if number else (None, None)
                around = [of for of in ranges if begin is not None and of[2] == thread and of[0] <= begin < of[1]]
                times[max(around, key=lambda of: (of[0], -of[1]))[3] if around else None] += time
    return times


def named_steps(report):
    """What the names of the ranges that are steps match, if steps are ranges."""
    named = [re.search("NVTX ranges `(.*?)`", text) for text in report["assumed"] if text.startswith("steps are the")]
    parts = re.split(r"(\*)", named[0][1]) if named else []
    return re.compile("".join(r"\d+" if part == "*" else re.escape(part) for part in parts)) if named else None


def host_differences(ranges, report):
    """What the report says otherwise of the host's ranges."""
    of, counts, times = named_steps(report), collections.Counter(), collections.Counter()
    for name, time in ranges:
        name = "step" if of and of.fullmatch(name) else name
        counts[name] += 1
        times[name] += time
    rows, more = collections.defaultdict(lambda: [0, 0]), [] if of else ["step"]
    for row in report["phases"]:
        # Steps from one range to the next are no ranges.
        if row["name"] not in more:
            rows[row["name"]][0] += row["count"]
            rows[row["name"]][1] += row["total_ns"]
    if len(counts) > 256:
        # Of more names than 256, those that differ only in numbers are one.
        counts, times = {"all": sum(counts.values())}, {"all": sum(times.values())}
        rows = {"all": [sum(count for count, _ in rows.values()), sum(time for _, time in rows.values())]}
    return [f"{name}: {rows[name]} for {counts[name], times[name]}" for name in counts if rows[name] != [counts[name], times[name]]]


def differences(found, ranges, by_range, report):
    """What the report says otherwise."""
    steps, wrong, named = report["trace"]["steps"], [], named_steps(report)
    has_steps = any(text.startswith("steps are") for text in report["assumed"])
    for gpu, of in found.items():
        here = [step for step in steps if step["device"] == gpu]
        reported = {
            "kernels": sum(step["kernels"] for step in here),
            "copies": sum(step["memory_operations"] for step in here),
            "busy": sum(step["busy_ns"] for step in here),
            "compute": sum(step["compute_ns"] for step in here),
            "window": sum(step["window_ns"] for step in here),
        }
        own = {
            "kernels": of["kernels"],
            "copies": of["copies"],
            "busy": union(of["all"]),
            "compute": union(of["compute"]),
            "window": max(end for _, end in of["all"]) - min(begin for begin, _ in of["all"]),
        }
        # With steps, what ran outside of them is in no window.
        wrong += [f"GPU {gpu} {key}: {reported[key]} for {own[key]}" for key in own if not has_steps and reported[key] != own[key]]
        rows = [row for row in report["phases"] if row["kind"] == "layer" and row["job"] == f"GPU {gpu}" and not row["name"].startswith("Mem")]
        listed, times = sum(row["total_ns"] for row in rows), sum(of["by_name"].values())
        wrong += [f"GPU {gpu} time by kernel: {listed} for {times}"] if listed != times else []
        if len(rows) == len(of["by_name"]):
            differ = sorted(row["total_ns"] for row in rows) != sorted(of["by_name"].values())
            wrong += [f"GPU {gpu}: the times of single kernels"] if differ else []
    if named:
        count, shown = sum(bool(named.fullmatch(name)) for name, _ in ranges), len({step["step"] for step in steps})
        wrong += [f"{shown} steps for {count} ranges"] if shown != count else []
    if len(by_range) <= 256 and set(by_range) - {None}:
        reported = collections.Counter()
        for of in report["trace"]["operators"]:
            reported[of["operator"]] += of["total_ns"]
        wrong += [f"range {name}: {reported[name]} for {by_range[name]}" for name in by_range if reported[name] != by_range[name]]
    return wrong


def main():
    arguments = stored.parser(__doc__).parse_args()
    tried = read = wrong = 0
    print(f"{'repository and file':66} {'version':14} {'GPUs':>4} {'kernels':>7} {'copies':>6} {'kernel time':>14} {'busy':>14} {'steps':>5}  result")
    for row, name, path in stored.files("nsight.tsv", arguments.folder):
        tried += 1
        found, ranges, by_range = computed(path)
        made = subprocess.run([arguments.highwater, "report", "--json", path], capture_output=True, text=True, check=False)
        if made.returncode == 0:
            read += 1
            report = json.loads(made.stdout)["recordings"][0]
            traced = report["trace"]
            problems = differences(found, ranges, by_range, report) if traced else host_differences(ranges, report)
            steps = len({step["step"] for step in traced["steps"]} - {None}) if traced else 0
            result = "; ".join(problems) or ("equal" if traced else f"equal: {len(ranges)} ranges of the host")
            result += "".join(f"; guessed: {text}" for text in report["assumed"])
        else:
            problems, steps = list(found) + ranges, 0
            result = ("NOT READ: " if problems else "refused: ") + made.stderr.strip().split(": ", 2)[-1][:80]
        wrong += bool(problems)
        kernels, copies = (sum(of[key] for of in found.values()) for key in ("kernels", "copies"))
        time, busy = (sum(sum(of["by_name"].values()) for of in found.values()), sum(union(of["all"]) for of in found.values()))
        print(f"{name:66} {row['version']:14} {len(found):>4} {kernels:>7} {copies:>6} {time:>14} {busy:>14} {steps:>5}  {result}")
    print(f"{tried} files, {read} read, {wrong} wrong")
    return wrong > 0 or tried == 0


if __name__ == "__main__":
    sys.exit(main())
