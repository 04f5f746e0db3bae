"""The events of one rank of a recorded job: the lines of `annotations_rank<N>.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class EventLog:
    """Begins, ends and marks, each with its time (CLOCK_REALTIME, nanoseconds) and the allocator's counters."""

    def __init__(self, path: Path, rank: int, counters: Callable[[], dict[str, int]]) -> None:
        self._file = path.open("w")
        self._rank = rank
        self._counters = counters
        self.cfg = "warmup"

    def emit(self, event: str, phase: str, step: int, **more: Any) -> int:
        """Writes one line; returns its time."""
        now_ns = time.time_ns()
        head = {"ts": now_ns, "rank": self._rank, "cfg": self.cfg, "ev": event, "phase": phase, "step": step}
        self._file.write(json.dumps({**head, **self._counters(), **more}) + "\n")
        return now_ns

    @contextmanager
    def span(self, phase: str, step: int, finish: Callable[[], None], **more: Any) -> Iterator[None]:
        """A phase from its begin to its end. `finish` waits for the device before the end. After an exception the phase
        has no end, like that of a process that dies."""
        self.emit("begin", phase, step, **more)
        yield
        finish()
        self.emit("end", phase, step)

    def flush(self) -> None:
        """Flushes the file."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
