"""The allocator's counters, with each begin and end if that is cheap enough."""

import time
from typing import Any, Callable, Dict, Optional

import torch

from .. import _encode
from .._marks import client
from .guard import Part

# The share of a step's time that reading may cost.
MOST_SHARE = 0.001


def stats_of(index: int) -> Dict[str, Any]:
    """What the allocator counts on the device of this index. `torch.cuda.memory_stats` sorts more than a hundred numbers, and
    costs several times as much."""
    return torch._C._cuda_memoryStats(index)  # type: ignore[no-any-return]


def peaks_of(stats: Dict[str, Any]) -> Dict[str, int]:
    """The highest values since the process began, or since the job reset them, as attributes of a step."""
    return {
        "allocated_peak_bytes": int(stats["allocated_bytes"]["all"]["peak"]),
        "reserved_peak_bytes": int(stats["reserved_bytes"]["all"]["peak"]),
    }


def counters_of(stats: Dict[str, Any]) -> Dict[str, int]:
    """The counters that go with marks."""

    def current(name: str) -> int:
        return int(stats[name]["all"]["current"])

    return {
        "allocated": current("allocated_bytes"),
        "reserved": current("reserved_bytes"),
        "active": current("active_bytes"),
        "inactive_split": current("inactive_split_bytes"),
        "alloc_retries": int(stats["num_alloc_retries"]),
        "ooms": int(stats["num_ooms"]),
    }


class Counters(Part):
    """The text of the counters for a mark. If reading them at every mark of a step would cost more than MOST_SHARE of it,
    they are read at the ends of steps only, and of short steps not of each."""

    name = "counters of the allocator"

    def __init__(self, source: Callable[[], Optional[Dict[str, Any]]], now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.source = source
        self.now = now
        # The highest values, as the last read at the end of a step found them; empty if it did not read, or if no step was
        # as high.
        self.peaks: Dict[str, int] = {}
        # The highest that there was before the first step, as while a checkpoint was loaded: no step's.
        self.first_peak: Optional[int] = None
        # What one read costs: the least that was seen, as the others were interrupted.
        self.cost_ns: Optional[int] = None
        self.marks = 0
        self.step_began_ns: Optional[int] = None
        self.is_dear = False
        self.read_ns: Optional[int] = None

    def __call__(self, is_step_end: bool) -> str:
        if self.is_off:
            return ""
        try:
            return self.text(is_step_end)
        except Exception as error:
            self.fail(error)
            return ""

    def text(self, is_step_end: bool) -> str:
        self.marks += 1
        if is_step_end:
            self.peaks = {}
            self.judge()
        configured = client.counters
        if configured is not None:
            return configured()
        began_ns = self.now()
        if self.is_dear and not (is_step_end and self.is_due(began_ns)):
            return ""
        stats = self.source()
        if not stats:
            return ""
        text = _encode.memory(counters_of(stats))
        peaks = peaks_of(stats)
        if self.first_peak is None:
            self.first_peak = peaks["allocated_peak_bytes"]
        if is_step_end and peaks["allocated_peak_bytes"] > self.first_peak:
            self.peaks = peaks
        took_ns = self.now() - began_ns
        self.read_ns = began_ns
        self.cost_ns = took_ns if self.cost_ns is None else min(self.cost_ns, took_ns)
        return text

    def is_due(self, now_ns: int) -> bool:
        """Whether a read now costs at most MOST_SHARE of the time since the last one."""
        return self.read_ns is None or self.cost_ns is None or self.cost_ns <= MOST_SHARE * (now_ns - self.read_ns)

    def judge(self) -> None:
        """Compares the cost of a step's reads with the time of the step."""
        ended_ns = self.now()
        if self.step_began_ns is not None and self.cost_ns is not None:
            self.is_dear = self.marks * self.cost_ns > MOST_SHARE * (ended_ns - self.step_began_ns)
        self.marks, self.step_began_ns = 0, ended_ns
