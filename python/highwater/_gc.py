"""How long Python's garbage collector has stopped this process. While it collects, no thread of the process runs Python: a
rank whose collections take long or come often is late, and all others wait for it."""

import gc
import time
from typing import Dict, Optional

# Collections of less than this in a step are not worth an attribute.
LEAST_NS = 100_000


class Collector:
    """Adds up how long collections take, from the first step on."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.begin_ns: Optional[int] = None

    def follow(self) -> int:
        """How long they have taken so far, nanoseconds."""
        if self.on not in gc.callbacks:
            gc.callbacks.append(self.on)
        return self.total_ns

    def on(self, phase: str, info: Dict[str, int]) -> None:
        """Called by the interpreter before and after each collection."""
        now_ns = time.perf_counter_ns()
        if phase == "start":
            self.begin_ns = now_ns
        elif self.begin_ns is not None:
            self.total_ns += now_ns - self.begin_ns
            self.begin_ns = None

    def seconds_since(self, before_ns: int) -> Optional[float]:
        """How long they have taken since `follow` returned this; None if that is next to nothing."""
        taken_ns = self.total_ns - before_ns
        return taken_ns / 1e9 if taken_ns >= LEAST_NS else None


collector = Collector()
