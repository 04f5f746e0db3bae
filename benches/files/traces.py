#!/usr/bin/env python3
"""Traces of PyTorch's profiler from public repositories: what highwater reports of each, beside a computation of its own.

    benches/files/traces.py FOLDER [--highwater target/release/highwater]

FOLDER has the files of traces.tsv as `OWNER+REPOSITORY/PATH`, with `+` for each `/` of PATH; nothing is fetched. A file whose contents
differ from the ones that were looked at is not compared. Of each, in whole nanoseconds straight from the JSON: the number of
kernels and copies, the time in which anything ran on each GPU, a kernel computed, a collective ran, memory was copied, both computation and collectives ran, and
nothing ran; the highest levels of the allocator; by annotation, its count, the host's time, and the number and time of what its
thread launched within, in all and by the step in which it began; and how many kernels are short, their time, and the idle time before them.
With steps, whose windows depend on launches, times are compared of a copy of the trace without them. Exits with 1 if one differs.
"""

import collections
import decimal
import gzip
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import stored

WORK = {"kernel": "kernel", "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "copy", "memset": "copy"}
STEPS = ("user_annotation", "cpu_op", "operator")
TIMES = ("window", "busy", "idle", "compute", "communication", "memory", "overlap")
COLLECTIVE = re.compile(r"^[^(]*(nccl|rccl|msccl)", re.I)


def nanoseconds(value):
    """Microseconds in decimals as whole nanoseconds, as close as they are."""
    return int((decimal.Decimal(value) * 1000).to_integral_value(decimal.ROUND_HALF_EVEN))


def merged(intervals):
    """These intervals without their overlaps."""
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([begin, end])
    return found


def length(intervals):
    return sum(end - begin for begin, end in merged(intervals))


def document(path):
    """The trace, with numbers as decimals, and its events."""
    data = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
    if not data:
        return None, []
    trace = json.loads(data.decode("utf-8", "replace"), parse_float=decimal.Decimal, strict=False)
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    return trace, [event for event in events or [] if isinstance(event, dict)]


def spans(events):
    """The events with a duration: category, begin, end, and the event."""
    for event in events:
        if event.get("ph") == "X" and "ts" in event and "dur" in event:
            begin = nanoseconds(event["ts"])
            yield str(event.get("cat", "")).lower(), begin, begin + nanoseconds(event["dur"]), event


def of_gpus(events):
    """The times of each GPU, without steps."""
    ran = collections.defaultdict(lambda: collections.defaultdict(list))
    for category, begin, end, event in spans(events):
        if category in WORK:
            args = event.get("args") or {}
            is_collective = COLLECTIVE.match(event.get("name", "")) or args.get("Collective name")
            kind = "memory" if WORK[category] == "copy" else "communication" if is_collective else "compute"
            ran[int(args.get("device", event.get("pid", 0)))][kind].append((begin, end))
    found = {}
    for gpu, kinds in ran.items():
        everything = [one for of in kinds.values() for one in of]
        window, busy = max(end for _, end in everything) - min(begin for begin, _ in everything), length(everything)
        compute, communication = length(kinds["compute"]), length(kinds["communication"])
        found[gpu] = {
            "window": window, "busy": busy, "idle": window - busy, "compute": compute, "communication": communication,
            "memory": length(kinds["memory"]), "overlap": compute + communication - length(kinds["compute"] + kinds["communication"]),
            "kernels": len(kinds["compute"]) + len(kinds["communication"]), "memory_operations": len(kinds["memory"]),
        }
    return found


def of_allocator(events):
    """The highest levels of each GPU, if the trace has totals."""
    found = {}
    for event in events:
        args = event.get("args") or {}
        if event.get("name") == "[memory]" and args.get("Device Type") in (1, 6) and "Total Allocated" in args:
            before = found.get(args["Device Id"], (0, 0))
            found[args["Device Id"]] = tuple(map(max, before, (args["Total Allocated"], args["Total Reserved"])))
    return found


def of_annotations(events):
    """By name: count, time of the host, number and time of what was launched; each launch is looked for in all annotations."""
    calls, named = {}, collections.defaultdict(list)
    for category, begin, end, event in spans(events):
        thread = (event.get("pid"), event.get("tid"))
        number = (event.get("args") or {}).get("correlation")
        if category.endswith(("runtime", "driver")) and number:
            calls[number] = min(calls.get(number, (begin, thread)), (begin, thread), key=lambda of: of[0])
        elif category == "user_annotation" and not re.fullmatch(r"ProfilerStep#\d+", event["name"]):
            named[re.sub(rb"[\x80-\xff]", b"?", event["name"].encode()).decode()[:200]].append((thread, begin, end))
    launched = []
    for category, begin, end, event in spans(events):
        call = calls.get((event.get("args") or {}).get("correlation")) if category in WORK else None
        launched += [(*call, end - begin)] if call else []
    steps = [(begin, end, int(event["name"].split("#")[1])) for category, begin, end, event in spans(events)
             if category in STEPS and re.fullmatch(r"ProfilerStep#\d+", str(event.get("name")))]
    found = {}
    for name, all_of in named.items():
        by_thread = collections.defaultdict(list)
        for thread, begin, end in all_of:
            by_thread[thread].append((begin, end))
        within = [time for at, thread, time in launched if any(begin <= at < end for begin, end in by_thread.get(thread, ()))]
        host = sum(length(of) for of in by_thread.values())
        sums = (len(all_of), host, len(within), sum(within)) if launched else (len(all_of), host, None, None)
        found[name] = (sums, by_step(by_thread, steps, launched))
    return found


def by_step(by_thread, steps, launched):
    """The same of one name by the step in which an annotation began: time and launches within several of them are those of the first."""
    sums = collections.defaultdict(lambda: [0, 0, 0, 0])
    for thread, all_of in by_thread.items():
        until = None
        for begin, end in sorted(all_of, key=lambda of: (of[0], -of[1])):
            step = next((number for first, last, number in steps if first <= begin < last), None)
            sums[step][0] += 1
            sums[step][1] += max(0, end - max(begin, begin if until is None else until))
            until = end if until is None else max(until, end)
        for at, of, time in launched:
            around = [begin for begin, end in all_of if of == thread and begin <= at < end]
            if around:
                step = next((number for first, last, number in steps if first <= min(around) < last), None)
                sums[step][2] += 1
                sums[step][3] += time
    return {step: tuple(of if launched else [*of[:2], None, None]) for step, of in sums.items() if step is not None}


def of_short_kernels(events):
    """Of each GPU: kernels, their time, how many take less than 10 us, their time, and the idle time before them, where at most 100 us."""
    ran = collections.defaultdict(list)
    for category, begin, end, event in spans(events):
        if category in WORK:
            gpu = int((event.get("args") or {}).get("device", event.get("pid", 0)))
            ran[gpu].append((begin, end, WORK[category] == "kernel"))
    found = {}
    for gpu, all_of in ran.items():
        kernels = [(begin, end) for begin, end, is_kernel in all_of if is_kernel]
        short, idle, busy = [], 0, None
        for begin, end, is_kernel in sorted(all_of, key=lambda of: of[:2]):
            if is_kernel and end - begin < 10_000:
                short.append(end - begin)
                gap = 0 if busy is None else max(0, begin - busy)
                idle += gap if gap <= 100_000 else 0
            busy = end if busy is None else max(busy, end)
        if kernels:
            found[gpu] = (len(kernels), sum(end - begin for begin, end in kernels), len(short), sum(short), idle)
    return found


def report(highwater, path):
    made = subprocess.run([highwater, "report", "--json", path], capture_output=True, text=True, check=False)
    if made.returncode:
        return None, made.stderr.strip().split(": ", 2)[-1][:90]
    return json.loads(made.stdout)["recordings"][0], None


def without_steps(trace, events, folder):
    """A copy of a trace without its steps."""
    left = [event for event in events if not str(event.get("name", "")).startswith("ProfilerStep#")]
    members = {key: value for key, value in trace.items() if key != "traceEvents"} if isinstance(trace, dict) else {}
    path = pathlib.Path(folder) / "stripped.json"
    # A decimal of 16 or more digits does not survive as a float; as text, the reader takes no rounding.
    text = json.dumps({**members, "traceEvents": left}, default=lambda value: f"\0{value}\0")
    path.write_text(re.sub(r'"\\u0000([^\\]*)\\u0000"', r"\1", text))
    return path


def differences(trace, events, said, highwater):
    with tempfile.TemporaryDirectory() as folder:
        whole, refused = report(highwater, without_steps(trace, events, folder))
    if refused:
        return [f"without steps: {refused}"]
    wrong, gpus = [], of_gpus(events)
    for step in (whole["trace"] or {"steps": []})["steps"]:
        own = gpus.pop(step["device"])
        shown = {key: step[f"{key}_ns"] for key in TIMES} | {key: step[key] for key in ("kernels", "memory_operations")}
        wrong += [f"GPU {step['device']} {key}: {shown[key]} for {own[key]}" for key in own if shown[key] != own[key]]
        levels = of_allocator(events).get(step["device"])
        peaks = (step["allocated_peak_bytes"], step["reserved_peak_bytes"])
        wrong += [f"GPU {step['device']} allocator: {peaks} for {levels}"] if levels and peaks != levels else []
    wrong += [f"GPU {gpu} is not reported" for gpu in gpus]
    if said["trace"]:
        keys = ("count", "host_ns", "launched", "gpu_ns")
        shown = {
            of["annotation"]: (tuple(of[key] for key in keys), {one["step"]: tuple(one[key] for key in keys) for one in of["steps"]})
            for of in said["trace"]["annotations"]
        }
        own = of_annotations(events)
        wrong += [f"annotation {name}: {shown.get(name)} for {own.get(name)}" for name in own.keys() | shown.keys() if shown.get(name) != own.get(name)]
        keys = ("kernels", "kernels_ns", "count", "total_ns", "idle_before_ns")
        shown, own = {of["device"]: tuple(of[key] for key in keys) for of in said["trace"]["short_kernels"]}, of_short_kernels(events)
        wrong += [f"short kernels of GPU {gpu}: {shown.get(gpu)} for {own.get(gpu)}" for gpu in own.keys() | shown.keys() if shown.get(gpu) != own.get(gpu)]
    return wrong


def main():
    arguments = stored.parser(__doc__).parse_args()
    counts = collections.Counter()
    print(f"{'repository and file':110} {'GPUs':>4} {'kernels':>7} {'busy ns':>14} {'names':>5}  result")
    for _, name, path in stored.files("traces.tsv", arguments.folder):
        trace, events = document(path)
        gpus, said = of_gpus(events), None
        said, refused = report(arguments.highwater, path)
        problems = [] if refused else differences(trace, events, said, arguments.highwater)
        has_work = gpus or of_allocator(events)
        result = f"NOT READ: {refused}" if refused and has_work else f"refused: {refused}" if refused else "; ".join(problems[:4]) or "equal"
        counts["read"] += not refused
        counts["refused"] += bool(refused)
        counts["wrong"] += bool(problems or refused and has_work)
        kernels, busy = (sum(of[key] for of in gpus.values()) for key in ("kernels", "busy"))
        print(f"{name:110} {len(gpus):>4} {kernels:>7} {busy:>14} {len(of_annotations(events)):>5}  {result}")
    print(f"{counts['read']} read, {counts['refused']} refused, {counts['wrong']} wrong")
    return counts["wrong"] > 0 or not counts["read"]


if __name__ == "__main__":
    sys.exit(main())
