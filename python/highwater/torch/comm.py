"""The phase `comm`: when collectives ran, as the union of their times.

A job with FSDP issues hundreds of collectives a step. Times that overlap or lie closer than GAP_NS are one mark. They are
sent with the end of the phase during which they ended.
"""

import threading
import time
from typing import Callable, List, Optional, Sequence, Tuple

from .._marks import Later, Mark, client
from .clock import Clock, HostClock, Time
from .guard import Part, guarded
from .timeline import Timeline, head

GAP_NS = 100_000
# What a step's end waits for asynchronous collectives of the host that are about to end.
LATE_S = 0.5
MOST_OPS = 65536

Interval = Tuple[int, int]


class Op:
    """One collective."""

    __slots__ = ("begin", "end")

    def __init__(self, begin: Time) -> None:
        self.begin = begin
        self.end: Optional[Time] = None


def union(intervals: Sequence[Interval], gap_ns: int = GAP_NS) -> List[Interval]:
    """Intervals without overlap, in order; gaps shorter than `gap_ns` are closed."""
    merged: List[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin - merged[-1][1] < gap_ns:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, max(begin, end)))
    return merged


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
    """Collectives that ended during a phase, on their way."""

    def __init__(self, clock: Clock, sent: Sent, ops: List[Op]) -> None:
        self.clock = clock
        self.sent = sent
        self.ops = ops
        self.known: List[Interval] = []
        self.until_s = time.monotonic() + LATE_S

    def take(self) -> Optional[Sequence[Mark]]:
        # The last marks of a process must not wait.
        is_late = client.is_closing or time.monotonic() > self.until_s
        while self.ops:
            op = self.ops[0]
            if op.end is None and not is_late:
                return None
            if op.end is not None:
                begin, end = self.clock.resolve(op.begin), self.clock.resolve(op.end)
                if begin is None or end is None:
                    return None
                self.known.append((begin, end))
            del self.ops[0]
        return self.sent.marks(self.known)


class Comm(Part):
    """Collects the collectives of one process."""

    name = "phase comm"

    def __init__(self, timeline: Timeline, gathered: Callable[[int], None]) -> None:
        self.timeline = timeline
        # Called with the bytes of each all-gather, for the records of layers.
        self.gathered = gathered
        self.lock = threading.Lock()
        self.ops: List[Op] = []
        self.sent = Sent()

    @property
    def is_on_host(self) -> bool:
        return isinstance(self.timeline.clock, HostClock)

    @guarded
    def begin(self) -> Optional[Op]:
        """A collective that is issued now."""
        at = self.timeline.stamp()
        if at is None:
            return None
        op = Op(at)
        with self.lock:
            if len(self.ops) < MOST_OPS:
                self.ops.append(op)
        return op

    @guarded
    def end(self, op: Optional[Op], stream: object = None) -> None:
        """It has ended when what is queued on the stream, by default the current one, has."""
        if op is not None and op.end is None:
            op.end = self.timeline.clock.stamp(stream=stream)

    @guarded
    def forget(self, op: Optional[Op]) -> None:
        """Nobody will know when it ended."""
        with self.lock:
            if op is not None and op in self.ops:
                self.ops.remove(op)

    @guarded
    def flush(self, is_step_end: bool) -> None:
        """Sends what has ended. At the end of a step on a CPU, that what is about to end is waited for, on the sender's
        thread."""
        if not self.ops:
            return
        with self.lock:
            takes_all = is_step_end and self.is_on_host
            ended = [op for op in self.ops if takes_all or op.end is not None]
            self.ops = [] if takes_all else [op for op in self.ops if op.end is None]
        if ended:
            client.put_later(Collected(self.timeline.clock, self.sent, ended))
