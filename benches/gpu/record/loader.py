"""A data loader that prefetches in a thread, as real ones do. A batch that is ready costs the step nothing. If making
a batch takes longer than the step, the step waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class Loader:
    """Batches that `make` makes, `ready` of them ahead. Each takes `seconds` in addition."""

    def __init__(self, make: Callable[[], Any], ready: int = 2) -> None:
        self.seconds = 0.0
        self._make = make
        self._batches: queue.Queue[Any] = queue.Queue(maxsize=ready)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """The next batch, waiting for it."""
        return self._batches.get(timeout=60)

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._ended.wait(self.seconds):
            batch = self._make()
            while not self._ended.is_set():
                try:
                    self._batches.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    continue
