"""The phase `comm`: when collectives ran, as the union of their times.

A job with FSDP issues hundreds of collectives a step. Times that overlap or lie closer than GAP_NS are one interval. If
there are more than MOST_INTERVALS, those with the smallest gaps are merged. A merged interval begins with its first part and
lasts as long as its parts together, so the time spent in communication stays the same. Intervals are sent with the end of the
phase during which they ended. One that is seen to end after its step ends with the step: the daemon puts marks in the order of
their times, and drops what is open when a step ends. On a CPU, a thread of the backend sees the end, perhaps long after the
thread of the job went on.
"""

import threading
import time
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from .._marks import Later, Mark, client
from .clock import Clock, HostClock, Time
from .guard import Part, guarded
from .timeline import Timeline, head

GAP_NS = 20_000
MOST_INTERVALS = 32
# What a step's end waits for asynchronous collectives of the host that are about to end.
LATE_S = 0.5
MOST_OPS = 65536
# The number that is sent without an end of a phase: an evaluation may have none.
MANY_OPS = 1024
# How many the sender's thread looks at before it lets the job's thread run.
MOST_TAKEN = 512

Interval = Tuple[int, int]


class Op:
    """One collective."""

    __slots__ = ("begin", "end", "is_lost")

    def __init__(self, begin: Time) -> None:
        self.begin = begin
        self.end: Optional[Time] = None
        # Its end will never be known. The garbage collector may set this at any time, so it sets only this flag.
        self.is_lost = False


def union(intervals: Sequence[Interval]) -> List[Interval]:
    """Intervals without overlap, in order: at most MOST_INTERVALS, with gaps shorter than GAP_NS closed."""
    merged = closed(intervals, GAP_NS)
    return fewer(merged) if len(merged) > MOST_INTERVALS else merged


def closed(intervals: Sequence[Interval], gap_ns: int) -> List[Interval]:
    """Intervals in order; those that overlap, or lie closer than `gap_ns`, are one."""
    merged: List[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin - merged[-1][1] < gap_ns:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, max(begin, end)))
    return merged


def fewer(intervals: Sequence[Interval]) -> List[Interval]:
    """Merges intervals that do not overlap into at most MOST_INTERVALS. A merged one ends early by the sum of its gaps."""
    gaps = [after[0] - before[1] for before, after in zip(intervals, intervals[1:])]
    # The largest gaps stay. Of equal ones, all go.
    largest = sorted(gaps)[-MOST_INTERVALS]
    found = [intervals[0]]
    for gap, (begin, end) in zip(gaps, intervals[1:]):
        if gap > largest:
            found.append((begin, end))
        else:
            found[-1] = found[-1][0], found[-1][1] + end - begin
    return found


class Sent:
    """The end of the latest mark: one that was late must not begin before it."""

    def __init__(self) -> None:
        self.until_ns = 0

    def marks(self, intervals: Sequence[Interval]) -> List[Mark]:
        marks: List[Mark] = []
        for begin, end in union(intervals):
            begin = max(begin, self.until_ns)
            if end <= begin:
                continue
            marks += [(head("begin", "comm"), begin, ""), (head("end", "comm"), end, "")]
            self.until_ns = end
        return marks


class Collected(Later):
    """Collectives that ended during a phase, on their way. None of them is sent as ending after `step_end`."""

    def __init__(self, clock: Clock, sent: Sent, ops: List[Op], step_end: Optional[Time] = None) -> None:
        self.clock = clock
        self.sent = sent
        self.ops = ops
        self.step_end = step_end
        self.taken = 0
        self.known: List[Interval] = []
        self.until_s = time.monotonic() + LATE_S

    def take(self) -> Optional[Sequence[Mark]]:
        # The last marks of a process must not wait.
        is_late = client.is_closing or time.monotonic() > self.until_s
        taken = 0
        while self.taken < len(self.ops):
            if taken >= MOST_TAKEN and not client.is_closing:
                return None
            op = self.ops[self.taken]
            if op.end is None and not is_late and not op.is_lost:
                return None
            if op.end is not None:
                begin, end = self.clock.resolve(op.begin), self.clock.resolve(op.end)
                if begin is None or end is None:
                    return None
                self.known.append((begin, end))
            self.taken += 1
            taken += 1
        if self.step_end is None:
            return self.sent.marks(self.known)
        step_end_ns = self.clock.resolve(self.step_end)
        if step_end_ns is None:
            return None
        within = [(begin, min(end, step_end_ns) if begin < step_end_ns else end) for begin, end in self.known]
        return self.sent.marks(within)

    def __len__(self) -> int:
        # Each has a begin and an end. Some become one interval, so this is the most that they are.
        return 2 * len(self.ops)


class Comm(Part):
    """Collects the collectives of one process."""

    name = "phase comm"

    def __init__(self, timeline: Timeline, gathered: Callable[[int], None]) -> None:
        self.timeline = timeline
        # Called with the bytes of each all-gather, for the records of layers.
        self.gathered = gathered
        self.lock = threading.RLock()
        self.ops: List[Op] = []
        self.flush_at = MANY_OPS
        self.sent = Sent()
        self.side: Any = None

    @property
    def is_on_host(self) -> bool:
        return isinstance(self.timeline.clock, HostClock)

    @guarded
    def begin(self) -> Optional[Op]:
        """A collective that is issued now; None if it is not marked."""
        if self.timeline.is_resting:
            return None
        at = self.timeline.stamp()
        if at is None:
            return None
        op = Op(at)
        with self.lock:
            has_room = len(self.ops) < MOST_OPS
            if has_room:
                self.ops.append(op)
        if not has_room:
            # Its begin and its end.
            client.lose(2)
        if len(self.ops) >= self.flush_at:
            self.flush(False)
            # What has not ended must not be looked at again each time.
            self.flush_at = len(self.ops) + MANY_OPS
        return op

    @guarded
    def end_after(self, op: Optional[Op], wait: Callable[[], object]) -> None:
        """Ends the collective when `wait` is over on the GPU. `wait` must block the current stream and not the host; it runs on
        a side stream, for which the job never waits."""
        if op is None:
            return
        if self.side is None:
            self.side = torch.cuda.Stream(self.timeline.clock.device)
        with torch.cuda.stream(self.side):
            wait()
            self.end(op, self.side)

    @guarded
    def end(self, op: Optional[Op], stream: object = None) -> None:
        """It has ended when what is queued on the stream, by default the current one, has."""
        if op is not None and op.end is None:
            op.end = self.timeline.clock.stamp(stream=stream)

    def drop(self) -> None:
        """Ends without a mark: for good, and in a child process, where another thread of the parent may have held the lock."""
        self.is_off = True
        self.lock = threading.RLock()

    @guarded
    def flush(self, is_step_end: bool, at: Optional[Time] = None) -> None:
        """Sends the collectives that have ended. At the end of a step on a CPU, also sends those that are about to end: the
        sender's thread waits for them. `at` is when the step ended."""
        if not self.ops:
            return
        with self.lock:
            known = [op for op in self.ops if not op.is_lost]
            if is_step_end:
                # On a CPU, also what is about to end.
                ended = [op for op in known if self.is_on_host or op.end is not None]
                self.ops = [op for op in known if not self.is_on_host and op.end is None]
            else:
                # Marks are in order: what began after one that has not ended waits for it.
                count = next((number for number, op in enumerate(known) if op.end is None), len(known))
                ended, self.ops = known[:count], known[count:]
            self.flush_at = MANY_OPS
        if ended:
            client.put_later(Collected(self.timeline.clock, self.sent, ended, at if is_step_end else None))
