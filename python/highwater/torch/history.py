"""The history of one step's allocations: what was in live tensors at most, and what the backward pass keeps of each module.

The allocator's counters at a module's begin and end do not show what it held in between. PyTorch's history of allocations
does, event by event; it is recorded for one step, without stacks, and read once. Events are counted like the counters count
them, so that a hook knows its place in the history without a clock.
"""

import bisect
import functools
import logging
import os
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from . import patches
from .allocator import stats_of

log = logging.getLogger("highwater")
# A step with more events of the allocator has no history: reading it would hold up the job.
MOST_EVENTS = 50_000
# The allocator rounds each size up to a multiple of this, bytes.
ALIGNMENT = 512
# Where a history began, and its events.
Raw = Tuple["Place", List[Dict[str, Any]]]
# Events that change what is in live tensors, and by which sign.
SIGNS = {"alloc": 1, "free_requested": -1}


class Place(NamedTuple):
    """Where in the history something happened, and what was in live tensors then, bytes."""

    event: int
    allocated: int


class Kept(NamedTuple):
    """What a forward pass of a module was given and gave: its begin and end, and the storages by their addresses."""

    begin: Place
    end: Place
    inputs: Set[int]
    outputs: Set[int]


def counted(stats: Dict[str, Any]) -> int:
    """How many events there have been in this process, by the allocator's counters."""
    allocations = stats["allocation"]["all"]
    return int(allocations["allocated"]) + int(allocations["freed"])


def place_of(stats: Dict[str, Any]) -> Place:
    return Place(counted(stats), int(stats["allocated_bytes"]["all"]["current"]))


# The allocator has one history for the process. A job that begins or ends one takes over what is on.
_RECORD = "_record_memory_history"


def is_ours() -> bool:
    """Whether the history that the allocator records is one of these, and not the job's."""
    return any(history.is_on for history in _on)


class History:
    """Records the allocations of a step, or of some, of one device."""

    def __init__(self, index: int, most: int = MOST_EVENTS) -> None:
        self.index = index
        self.most = most
        self.is_on = False
        self.begin: Optional[Place] = None
        self.process = os.getpid()
        self.leave: Callable[[], None] = lambda: None

    def __del__(self) -> None:
        # The model, and with it the watch, went in the middle of a step.
        self.end()

    def start(self) -> bool:
        """Begins, unless the job records a history of its own or its allocator has none. Returns whether it did."""
        try:
            if torch._C._cuda_isHistoryEnabled():
                return False
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=3 * self.most)
            self.is_on = True
            _on.add(self)
            self.leave = patches.join(self, (torch.cuda.memory,), _RECORD, taken_over)
            self.begin = place_of(stats_of(self.index))
        except Exception as error:
            log.debug("highwater: no history of allocations: %r", error)
            self.end()
        return self.is_on

    def stop(self) -> Optional[Raw]:
        """Ends, and returns where it began and what happened since; None if there was too much, or if the job took it over."""
        snapshot = self.finish()
        return None if snapshot is None or self.begin is None else (self.begin, signed(snapshot, self.index))

    def finish(self) -> Optional[Dict[str, Any]]:
        """The same with all that the allocator says: its snapshot."""
        try:
            if not self.is_on or self.begin is None:
                return None
            ended = counted(stats_of(self.index))
            if ended - self.begin.event > self.most:
                return None
            snapshot: Dict[str, Any] = torch.cuda.memory._snapshot()
        except Exception as error:
            log.debug("highwater: no history of allocations: %r", error)
            return None
        finally:
            self.end()
        # Anything else has counted events that the history lacks, or the other way round: no place would be right.
        return snapshot if len(signed(snapshot, self.index)) == ended - self.begin.event else None

    def end(self) -> None:
        """Ends without a word: never raises. In a child of the process, the history is the parent's."""
        if not self.is_on:
            return
        self.is_on = False
        try:
            self.leave()
            if self.process == os.getpid():
                torch.cuda.memory._record_memory_history(enabled=None)
        except Exception as error:
            log.debug("highwater: the history of allocations: %r", error)


_on: "weakref.WeakSet[History]" = weakref.WeakSet()


def trace_of(snapshot: Dict[str, Any], index: int) -> List[Dict[str, Any]]:
    """All that a snapshot's history has of a device."""
    traces = snapshot["device_traces"]
    return traces[index] if index < len(traces) else []


def signed(snapshot: Dict[str, Any], index: int) -> List[Dict[str, Any]]:
    """The requests and releases among it."""
    return [each for each in trace_of(snapshot, index) if each["action"] in SIGNS]


def taken_over(own: Callable[..., Any], histories: patches.Parts) -> Callable[..., Any]:
    """What begins and ends histories, while one of these is on: it is the caller's from then on."""

    @functools.wraps(own)
    def record(*args: Any, **kwargs: Any) -> Any:
        for history in histories:
            history.is_on = False
        return own(*args, **kwargs)

    return record


class Events:
    """The events of a step in order."""

    def __init__(self, begin: Place, events: Sequence[Dict[str, Any]]) -> None:
        self.begin = begin
        # What is in live tensors after each event, and before the first.
        self.live = [begin.allocated]
        # By the number of the event that made it: an allocation's address, its size, and the event that freed it, if one did.
        self.made: Dict[int, Tuple[int, int, Optional[int]]] = {}
        # The events that allocated at an address.
        self.at: Dict[int, List[int]] = {}
        for nth, each in enumerate(events):
            size, address = -(-int(each["size"]) // ALIGNMENT) * ALIGNMENT, int(each["addr"])
            self.live.append(self.live[-1] + SIGNS[each["action"]] * size)
            known = self.at.setdefault(address, [])
            if SIGNS[each["action"]] > 0:
                self.made[nth] = (address, size, None)
                known.append(nth)
            elif known and self.made[known[-1]][2] is None:
                self.made[known[-1]] = (address, self.made[known[-1]][1], nth)

    def nth(self, place: Place) -> int:
        """How many events there were before a place."""
        return min(max(0, place.event - self.begin.event), len(self.live) - 1)

    def peak(self, since: Place, until: Place) -> int:
        """What was in live tensors at most between two places, bytes. Sizes in the history are those that were asked for, so
        it is relative to what the counters said at the first."""
        live = self.live[self.nth(since): self.nth(until) + 1] or [0]
        return max(max(live) - live[0] + since.allocated, until.allocated)

    def recompute(self, module: Kept, backward: Place) -> int:
        """By how much live tensors would grow at most if a module's forward pass ran again where its backward pass begins,
        bytes. Outputs that its own backward pass needs, as those of an operation in place, are live there now and would not
        be."""
        first, last, begins = self.nth(module.begin), self.nth(module.end), self.nth(backward)
        grown = max(self.live[first: last + 1]) - self.live[first]
        for nth in range(first, last):
            address, size, freed = self.made.get(nth, (0, 0, None))
            if address in module.outputs and (freed is None or freed >= begins):
                grown -= size
        return grown

    def held(self, module: Kept, backward: Place) -> int:
        """By how much less there would be in live tensors between a module's forward and its backward pass if it were
        checkpointed, bytes: what it allocated and its backward pass frees, without its outputs, less the inputs that nothing
        else keeps until then."""
        first, last, begins = self.nth(module.begin), self.nth(module.end), self.nth(backward)
        own = (self.made[nth] for nth in range(first, last) if nth in self.made)
        freed_later = ((address, size) for address, size, freed in own if freed is not None and freed >= begins)
        held = sum(size for address, size in freed_later if address not in module.outputs)
        for address in module.inputs:
            before = self.at.get(address, [])
            nth = bisect.bisect_left(before, first) - 1
            _, size, freed = self.made[before[nth]] if nth >= 0 else (0, 0, None)
            if freed is not None and last <= freed < begins:
                held -= size
        return held
