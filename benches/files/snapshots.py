#!/usr/bin/env python3
"""Memory snapshots of PyTorch: what highwater reads of each, and of each pair, beside a computation of its own.

    benches/files/snapshots.py FOLDER [--highwater target/release/highwater] [FILE …]

FOLDER has the files of snapshots.tsv as `OWNER+REPOSITORY/NAME`; nothing is fetched. A file whose contents differ from the ones that
were looked at is not compared. FILEs are further snapshots of one's own, which are compared in the same way. A snapshot is loaded by
Python's pickle with all code refused. Computed without highwater: the segments and blocks at the end, as `torch.cuda._memory_viz.segsum`
adds them up, by stream and kind; at the peak and at each failure, from the whole state of the allocator, which is followed backwards
from the end of the history; what each call stack holds at the end and at the peak; and, for pairs of files that follow each other, what
each call stack holds more in the second. Exits with 1 if one number differs.
"""

import collections
import gzip
import json
import pathlib
import pickle
import re
import subprocess
import sys

import stored

MIB = 1 << 20


class Data(pickle.Unpickler):
    """Reads data and refuses everything else."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it has {module}.{name}")


def load(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        return Data(file).load()


def stack(frames):
    """The frames that highwater lists: 64, with 150 characters of each name."""
    return tuple(f"{one['filename'][-150:]}:{one['line']}:{one['name'][:150]}" for one in (frames or [])[:64])


def python(frames):
    """What two snapshots are compared by: the frames of Python, or all where none is of Python."""
    return tuple(frame for frame in frames if re.search(r"(\.py|>):[\d?]", frame)) or tuple(frames)


def asked(block):
    return block.get("requested_size", block["size"])


def at_end(segments):
    """Sums over the segments as they are stored."""
    sums = collections.Counter()
    for segment in segments:
        blocks, at = segment["blocks"], None
        taken = sum(block["size"] for block in blocks if block["state"].startswith("active"))
        sums["segments"] += 1
        sums["reserved_bytes"] += segment["total_size"]
        sums["in_blocks_bytes"] += taken
        if not taken:
            sums["idle_segments"] += 1
            sums["idle_bytes"] += segment["total_size"]
            continue
        for block in blocks:
            if not block["state"].startswith("active"):
                # Free blocks that touch are one piece.
                sums["pieces"] += at != "free"
                sums["free_bytes"] += block["size"]
                at = "free"
            else:
                at = "taken"
    return sums


def before_history(trace, segments):
    """The blocks and segments at the begin, by following the history backwards from the end."""
    blocks = {block["address"]: asked(block) for segment in segments for block in segment["blocks"] if block["state"].startswith("active")}
    mapped = {segment["address"]: segment["total_size"] for segment in segments}
    for entry in reversed(trace):
        if entry["action"] == "alloc":
            blocks.pop(entry["addr"], None)
        elif entry["action"] in ("free_completed", "free"):
            blocks[entry["addr"]] = entry["size"]
        elif entry["action"] == "segment_alloc":
            mapped.pop(entry["addr"], None)
        elif entry["action"] == "segment_free":
            mapped[entry["addr"]] = entry["size"]
    return blocks, mapped


def followed(trace, segments):
    """The peak and the failures, each with its entry and the blocks and segments then."""
    blocks, mapped = before_history(trace, segments)
    level = sum(blocks.values())
    peak, moments = (level, 0, dict(blocks), dict(mapped)), []
    for nth, entry in enumerate(trace, 1):
        action, size = entry["action"], entry["size"]
        if action == "alloc":
            blocks[entry["addr"]] = size
            level += size
            if level > peak[0]:
                peak = (level, nth, None, None)
        elif action in ("free_completed", "free"):
            level -= blocks.pop(entry["addr"])
        elif action == "segment_alloc":
            mapped[entry["addr"]] = size
        elif action == "segment_free":
            del mapped[entry["addr"]]
        elif action == "oom":
            moments.append((nth, dict(blocks), dict(mapped)))
    if peak[2] is None:
        then, mapped = before_history(trace[peak[1] :], segments)
        peak = (peak[0], peak[1], then, mapped)
    return peak, moments


def laid_out(blocks, mapped):
    """Sums over segments that do not grow, by PyTorch's rules of rounding."""
    sums, ordered = collections.Counter(), sorted(blocks.items())
    for begin, total in mapped.items():
        within = [(at, size) for at, size in ordered if begin <= at < begin + total]
        sums["segments"] += 1
        sums["reserved_bytes"] += total
        if not within:
            sums["idle_segments"] += 1
            sums["idle_bytes"] += total
            continue
        at, is_behind = begin, False
        for start, size in [*within, (begin + total, None)]:
            gap = start - at
            if is_behind and total != 2 * MIB and gap <= MIB:
                sums["in_blocks_bytes"] += gap
            elif gap:
                sums["pieces"] += 1
                sums["free_bytes"] += gap
            if size is not None:
                rounded = max(512, (size + 511) // 512 * 512)
                sums["in_blocks_bytes"] += rounded
                at, is_behind = start + rounded, True
    return sums


def holders(snapshot, device):
    """What each call stack holds at the end: bytes and blocks. A block without a stack has that of the entry that allocated it."""
    traces, by_address = snapshot["device_traces"], {}
    for entry in traces[device] if device < len(traces) else []:
        if entry["action"] == "alloc":
            by_address[entry["addr"]] = entry.get("frames")
        elif entry["action"] in ("free_completed", "free"):
            by_address.pop(entry["addr"], None)
    held = collections.defaultdict(lambda: [0, 0])
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == device else []:
            if block["state"] == "active_allocated":
                of = held[stack(block.get("frames") or by_address.get(block["address"]))]
                of[0], of[1] = of[0] + asked(block), of[1] + 1
    return held


def by_python(held):
    """The same by the frames of Python alone."""
    sums = collections.defaultdict(lambda: [0, 0])
    for frames, (bytes_, blocks) in held.items():
        of = sums[python(frames)]
        of[0], of[1] = of[0] + bytes_, of[1] + blocks
    return sums


def report(highwater, *paths):
    made = subprocess.run([highwater, "report", "--json", "--compare", *paths], capture_output=True, text=True, check=True)
    return json.loads(made.stdout)


class Checked:
    def __init__(self):
        self.equal = self.different = 0

    def same(self, what, expected, found):
        if expected == found:
            self.equal += 1
        else:
            self.different += 1
            print(f"    DIFFERS {what}: {expected} is right, highwater has {found}")


SUMS = ("segments", "reserved_bytes", "in_blocks_bytes", "free_bytes", "pieces", "idle_segments", "idle_bytes")


def check_sums(checked, what, expected, found):
    if found is None:
        checked.same(what, dict(expected), None)
        return
    for name in SUMS:
        checked.same(f"{what} {name}", expected[name], found[name])


def check_device(checked, device, snapshot, allocator):
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    trace = snapshot["device_traces"][device] if device < len(snapshot["device_traces"]) else []
    if not segments:
        return 0
    check_sums(checked, "end", at_end(segments), allocator["layout_at_end"])
    held = holders(snapshot, device)
    found = {tuple(one["place"]["frames"]): [one["bytes"], one["allocations"]] for one in allocator["holders_at_end"]}
    if len(held) <= 100:
        for frames, of in held.items():
            checked.same(f"held at the end by {frames[:1]}", of, found.get(frames))
    checked.same("live at the end", sum(bytes_ for bytes_, _ in held.values()),
                 sum(bytes_ for bytes_, _ in found.values()) + allocator["other_holders_at_end_bytes"])
    grows = any(entry["action"] in ("segment_map", "segment_unmap") for entry in trace)
    if not trace or grows:
        return len(trace)
    (level, entry, blocks, mapped), failures = followed(trace, segments)
    checked.same("peak", (level, entry), (allocator["peak"]["allocated_bytes"], allocator["peak"]["after_events"]))
    # At the peak, highwater knows the real sizes of blocks that are there to the end.
    check_sums(checked, "peak", laid_out(blocks, mapped), allocator["layout_at_peak"])
    largest = sorted(blocks.values(), reverse=True)[:16]
    checked.same("largest blocks at the peak", largest, [one["bytes"] for one in allocator["blocks_at_peak"]])
    for (entry, blocks, mapped), failure in zip(failures, allocator["failures"], strict=False):
        checked.same("failure", entry, failure["at"]["after_events"])
        check_sums(checked, f"failure at {entry}", laid_out(blocks, mapped), failure["layout"])
    return len(trace)


def check_pair(checked, one, other, comparison):
    """What each stack holds more, for stacks that are equal and those that are only on one side."""
    for of in (of for of in comparison["places"] if of["at"] == "end"):
        device = int(of["gpu"])
        before, after = by_python(holders(one, device)), by_python(holders(other, device))
        total = [sum(bytes_ for bytes_, _ in held.values()) for held in (before, after)]
        checked.same("totals", total, [of["first_bytes"], of["bytes"]])
        found = sum(row["increase_bytes"] or 0 for row in of["places"]) + of["others_increase_bytes"]
        if all(row["increase_bytes"] is not None for row in of["places"]):
            checked.same("sum of differences", total[1] - total[0], found)
        for row in of["places"]:
            frames = python(row["frames"])
            if frames and not row["other_lines"] and row["change"] != "not known":
                expected = [*before.get(frames, [0, 0]), *after.get(frames, [0, 0])]
                checked.same(f"stack at {row['site']}", expected, [row["first_bytes"], row["first_blocks"], row["bytes"], row["blocks"]])


def main():
    parser = stored.parser(__doc__)
    parser.add_argument("files", type=pathlib.Path, nargs="*")
    arguments = parser.parse_args()
    paths = [path for _, _, path in stored.files("snapshots.tsv", arguments.folder)]
    paths += arguments.files
    checked, last = Checked(), None
    for path in paths:
        snapshot = load(path)
        before = checked.equal
        gpus = report(arguments.highwater, path)["recordings"][0]["gpus"]
        entries = sum(check_device(checked, int(gpu["index"]), snapshot, gpu["allocator"]) for gpu in gpus)
        print(f"{path.name:50} {entries:>9} entries, {len(snapshot['segments']):>5} segments, {checked.equal - before} numbers equal")
        if last is not None:
            before = checked.equal
            check_pair(checked, last[1], snapshot, report(arguments.highwater, last[0], path)["comparison"])
            print(f"    beside {last[0].name}: {checked.equal - before} numbers equal")
        last = (path, snapshot)
    print(f"{len(paths)} snapshots, {checked.equal} numbers equal, {checked.different} different")
    return checked.different > 0 or not paths


if __name__ == "__main__":
    sys.exit(main())
