"""Times of a job's marks: when the host was there, or when the GPU was.

A kernel runs long after the host has queued it. `CudaClock` therefore records a CUDA event for each mark and asks later
when it happened. It synchronises once, at the start, and never again:

- An anchor is an event whose wall time is known. The time of another event is the anchor's plus what CUDA says lies
  between them. That is a float32 of milliseconds, so each step's first event becomes the next anchor.
- The GPU's clock drifts from the host's. Three bounds hold for every event: it happened after the host recorded it, after
  any query that found it unfinished, and before the query that found it finished. A time outside them moves the anchor.
"""

import collections
import ctypes
import os
import threading
import time
import weakref
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Union

import torch

RELAXED = 2
# PyTorch has 32 streams of each priority; others may come and go.
MOST_STREAMS = 256

# In a child process CUDA is gone, and an event must not be destroyed: what the parent had stays for good.
_clocks: "weakref.WeakSet[Clock]" = weakref.WeakSet()
_kept: List[Any] = []


def keep_in_child(parts: Iterable[Any]) -> None:
    """Has a child process keep its parent's objects."""
    _kept.extend(parts)


os.register_at_fork(after_in_child=lambda: keep_in_child(_clocks))


class Stamp:
    """A mark's event, and its wall time once that is known."""

    __slots__ = ("at_ns", "earliest_ns", "event", "is_anchor")

    def __init__(self, event: Any, earliest_ns: int, is_anchor: bool) -> None:
        self.event = event
        self.earliest_ns = earliest_ns
        self.is_anchor = is_anchor
        self.at_ns: Optional[int] = None


# Nanoseconds of Unix time, or what will become them.
Time = Union[int, Stamp]


class Clock:
    """Takes times on the job's threads, and says later what they are."""

    # Whose times they are; None is the host.
    device: Any = None

    def stamp(self, stream: Any = None, is_anchor: bool = False) -> Optional[Time]:
        """The time of now; None where nothing may be recorded. `is_anchor` is for the first of a step."""
        raise NotImplementedError

    def resolve(self, at: Time) -> Optional[int]:
        """Nanoseconds of Unix time; None while they are not known. Called on the sender's thread."""
        raise NotImplementedError


class HostClock(Clock):
    """The host's time: right on a CPU, where nothing is asynchronous."""

    def stamp(self, stream: Any = None, is_anchor: bool = False) -> Optional[Time]:
        return time.time_ns()

    def resolve(self, at: Time) -> Optional[int]:
        return at if isinstance(at, int) else at.at_ns


class CudaClock(Clock):
    """The GPU's time, in the host's. The arguments after the first stand for CUDA in tests."""

    def __init__(
        self,
        device: Any,
        make_event: Optional[Callable[[], Any]] = None,
        current_stream: Optional[Callable[[], Any]] = None,
        is_capturing: Optional[Callable[[], bool]] = None,
        now: Callable[[], int] = time.time_ns,
        synchronize: Optional[Callable[[], None]] = None,
        enter_thread: Optional[Callable[[], None]] = None,
    ) -> None:
        self.device = device
        self.make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self.current_stream = current_stream or _current_stream_of(device)
        self.is_capturing = is_capturing or torch.cuda.is_current_stream_capturing
        self.now = now
        self.enter_thread = enter_thread or (lambda: _enter_thread(device))
        self.known = threading.local()
        # Events that are free, as often as there are marks on their way.
        self.pool: Deque[Any] = collections.deque(maxlen=4096)
        (synchronize or (lambda: torch.cuda.synchronize(device)))()
        self.anchor = self.make_event()
        before = now()
        self.anchor.record(self.current_stream())
        self.anchor.synchronize()
        self.anchor_ns = (before + now()) // 2
        _clocks.add(self)

    def stamp(self, stream: Any = None, is_anchor: bool = False) -> Optional[Time]:
        if self.is_capturing():
            return None
        try:
            event = self.pool.pop()
        except IndexError:
            event = self.make_event()
        earliest_ns = self.now()
        event.record(stream if stream is not None else self.current_stream())
        return Stamp(event, earliest_ns, is_anchor)

    def resolve(self, at: Time) -> Optional[int]:
        if isinstance(at, int) or at.at_ns is not None:
            return at if isinstance(at, int) else at.at_ns
        if not hasattr(self.known, "is_entered"):
            self.known.is_entered = True
            self.enter_thread()
        asked_ns = self.now()
        if not at.event.query():
            at.earliest_ns = max(at.earliest_ns, asked_ns)
            return None
        latest_ns = self.now()
        said_ns = self.anchor_ns + int(self.anchor.elapsed_time(at.event) * 1e6)
        # A step of the host's clock backwards can cross the bounds; the later look is right then.
        right_ns = min(max(said_ns, at.earliest_ns), latest_ns)
        self.anchor_ns += right_ns - said_ns
        if at.is_anchor:
            self.pool.append(self.anchor)
            self.anchor, self.anchor_ns = at.event, right_ns
        else:
            self.pool.append(at.event)
        at.event, at.at_ns = None, right_ns
        return right_ns


def _current_stream_of(device: Any) -> Callable[[], Any]:
    """What gives the current stream of a device. `torch.cuda.current_stream` makes an object each time, which takes as long
    as recording an event; here one is made for each stream."""
    handle_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if handle_of is None:
        return lambda: torch.cuda.current_stream(device)
    streams: Dict[int, Any] = {}

    def current() -> Any:
        handle = handle_of(device.index)
        stream = streams.get(handle)
        if stream is None:
            if len(streams) >= MOST_STREAMS:
                streams.clear()
            stream = streams[handle] = torch.cuda.current_stream(device)
        return stream

    return current


def _enter_thread(device: Any) -> None:
    """Prepares the sender's thread for CUDA queries. Sets the job's device, because the first query would otherwise create a
    context on GPU 0. Relaxes the capture mode, so that a query does not invalidate a graph that another thread captures."""
    torch.cuda.set_device(device)
    try:
        mode = ctypes.c_int(RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        pass


def of(device: Any) -> Clock:
    """The clock for work on a device."""
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        index = device.index if device.index is not None else torch.cuda.current_device()
        return CudaClock(torch.device("cuda", index))
    return HostClock()
