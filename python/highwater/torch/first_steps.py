"""What the allocator did in the first steps of a process, as a file from which `highwater advise` computes the largest batch.

The allocator's history is recorded from the begin of the watch to the end of the third step, in which everything that a step
allocates has been allocated twice: the optimizer's state comes in the first.
"""

import gzip
import json
import os
import tempfile
from typing import Any, Callable, Dict, List, Optional, Set

import torch

from .._marks import client
from .allocator import stats_of
from .guard import Part, guarded
from .history import History, counted, trace_of

STEPS = 3
# Requests and releases. A job with more in three steps has no history: reading it would hold up the job.
MOST_EVENTS = 400_000
# The version of the file's form.
VERSION = 1
# States of blocks that are in use. Those whose release has been asked for are still the program's.
TAKEN = ("active_allocated", "active_pending_free", "active_awaiting_free")
RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Unusable(Exception):
    """Why no file can be written."""


class FirstSteps(Part):
    """Writes one file for a process."""

    name = "history of allocations"

    def __init__(self, folder: Optional[str], device: Callable[[], Any], batch_size: Callable[[], int]) -> None:
        self.folder = folder
        self.device = device
        self.batch_size = batch_size
        self.history: Optional[History] = None
        self.segments: List[Dict[str, Any]] = []
        self.sizes: List[int] = []
        self.is_off = folder is None

    @guarded
    def begin(self) -> None:
        """Begins, if the model is on its GPU and no step has ended."""
        device = self.device()
        if self.history is not None or self.sizes or device is None or device.type != "cuda":
            return
        before = counted(stats_of(device.index))
        self.segments = segments_of(torch.cuda.memory._snapshot(), device.index)
        self.history = History(device.index, MOST_EVENTS)
        if not self.history.start():
            self.give_up("the allocator has no history, or one is recorded already, by the job or for snapshot_dir")
        elif self.history.begin is None or self.history.begin.event != before:
            self.give_up("something was allocated while it began")

    @guarded
    def end_step(self) -> None:
        """After each step."""
        if self.history is None:
            return
        self.sizes.append(self.batch_size())
        if len(self.sizes) < STEPS:
            return
        snapshot = self.history.finish()
        if snapshot is None:
            self.give_up(f"there were more than {MOST_EVENTS} entries, or the job took it over")
            return
        try:
            path = self.write(snapshot, self.history.index)
            client.say(f"the allocations of {STEPS} steps are in {path}", False)
            self.is_off = True
        except Unusable as why:
            self.give_up(str(why))

    def give_up(self, why: str) -> None:
        client.say(f"no history of allocations is written: {why}")
        self.close()

    def close(self) -> None:
        self.is_off = True
        if self.history is not None:
            self.history.end()

    def write(self, snapshot: Dict[str, Any], index: int) -> str:
        if len(set(self.sizes)) > 1 or not self.sizes[0]:
            raise Unusable(f"the first steps have no batch size, or different ones: {self.sizes}")
        segments = segments_of(snapshot, index)
        if any(is_private(each) for each in self.segments + segments):
            raise Unusable("some memory is in a pool of its own, as that of CUDA graphs is")
        begin = [begin_of(each) for each in self.segments]
        trace = trace_of(snapshot, index)
        free, total = torch.cuda.mem_get_info(index)
        reserved = sum(int(each["total_size"]) for each in segments)
        rank, size = client.rank_of_job(), self.sizes[0]
        whole = {
            "highwater_allocations": VERSION,
            "rank": rank,
            "batch_size": size,
            "steps": STEPS,
            "settings": settings_of(snapshot),
            "total_bytes": int(total),
            "outside_bytes": max(0, int(total) - int(free) - reserved),
            "reserved_peak_bytes": reserved_at_most(self.segments, trace),
            "segments": begin,
            "events": events_of(begin, trace),
        }
        folder = str(self.folder)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"allocations-rank{rank}-batch{size}-{os.getpid()}.json.gz")
        # Under another name first: a reader finds a whole file, and a link of this name is not followed.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".allocations-", delete=False) as file:
            try:
                file.write(gzip.compress(json.dumps(whole, separators=(",", ":")).encode()))
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return path


def segments_of(snapshot: Dict[str, Any], index: int) -> List[Dict[str, Any]]:
    return [each for each in snapshot["segments"] if each["device"] == index]


def is_private(segment: Dict[str, Any]) -> bool:
    return any(segment.get("segment_pool_id") or ())


def begin_of(segment: Dict[str, Any]) -> Dict[str, Any]:
    """A segment at the begin, with the sizes of its blocks and whether each is taken."""
    return {
        "stream": int(segment["stream"]),
        "is_small": segment["segment_type"] == "small",
        "is_expandable": bool(segment.get("is_expandable")),
        "address": int(segment["address"]),
        "blocks": [[int(each["size"]), each["state"] in TAKEN] for each in segment["blocks"]],
    }


def events_of(segments: List[Dict[str, Any]], trace: List[Dict[str, Any]]) -> List[List[int]]:
    """Requests with their sizes and streams, and releases, in order."""
    taken: Set[int] = set()
    for segment in segments:
        at = segment["address"]
        for size, is_taken in segment["blocks"]:
            if is_taken:
                taken.add(at)
            at += size
    events = []
    for each in trace:
        address = int(each["addr"])
        if each["action"] == "alloc":
            if address in taken:
                raise Unusable("its entries contradict each other")
            taken.add(address)
            events.append([address, int(each["size"]), int(each["stream"])])
        elif each["action"] == "free_completed":
            if address not in taken:
                raise Unusable("something is released that was not allocated")
            taken.remove(address)
            events.append([address])
    return events


def reserved_at_most(segments: List[Dict[str, Any]], trace: List[Dict[str, Any]]) -> int:
    now = most = sum(int(each["total_size"]) for each in segments)
    for each in trace:
        now += RESERVED.get(each["action"], 0) * int(each["size"])
        most = max(most, now)
    return most


def settings_of(snapshot: Dict[str, Any]) -> str:
    """The settings of the allocator: those of the environment variable, or those that the program has set since."""
    known = snapshot.get("allocator_settings") or {}
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    said = next((str(each[name]) for each in (known, os.environ) for name in names if each.get(name)), "")
    if known.get("expandable_segments") and "expandable_segments" not in said:
        said = f"{said},expandable_segments:True".lstrip(",")
    return said
