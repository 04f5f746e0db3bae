#!/usr/bin/env python3
"""Reduces a trace to the events and arguments that the analysis reads: reduce.py FROM.json.gz TO.json.gz

Times are floats of microseconds since the trace's base, which Python writes with the same three decimals.
"""
import gzip
import json
import sys

ARGS = {
    "External id", "device", "stream", "correlation", "Collective name", "dtype", "In msg nelems", "Out msg nelems",
    "Group size", "Process Group Name", "Process Group Ranks", "Seq", "bytes",
}
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver"}




def main(source, target):
    with gzip.open(source) as file:
        trace = json.loads(file.read())
    events = trace["traceEvents"]
    launched = {event["args"]["correlation"] for event in events if event.get("cat") in ON_GPU}

    def is_needed(event):
        category, name = event.get("cat"), event.get("name", "")
        if category in CALLS:
            return event["args"].get("correlation") in launched
        if category == "gpu_user_annotation":
            return name.startswith("ProfilerStep#")
        return (
            category in ON_GPU
            or name.startswith("ProfilerStep#")
            or "DataLoader" in name
        )

    def reduced(event):
        short = {member: event[member] for member in ("ph", "cat", "name", "pid", "ts", "dur") if member in event}
        # Templates make up most of a kernel's name.
        short["name"] = short["name"].split("(")[0].split("<")[0]
        short["args"] = {name: value for name, value in event.get("args", {}).items() if name in ARGS}
        return short

    kept = {name: trace[name] for name in ("schemaVersion", "distributedInfo", "baseTimeNanoseconds") if name in trace}
    kept["traceEvents"] = [reduced(event) for event in events if is_needed(event)]
    with gzip.GzipFile(target, "wb", compresslevel=9, mtime=0) as file:
        file.write(json.dumps(kept, separators=(",", ":")).encode())


main(*sys.argv[1:])
