"""A process that holds a CUDA context on every GPU, so that none is idle, and allocates on the first when told to.

As a script it is that process: each line of its input is a size in MiB, which it allocates for 5 ms; it answers with the
Unix time at which the memory was there.
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

from device_memory import MIB, open_driver

SPIKE_S = 0.005


class Context:
    """That process. Raises `RuntimeError` if it gets no context."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout
        if self.child.stdout.readline().strip() != "ready":
            raise RuntimeError("no CUDA context could be created")

    def __enter__(self) -> Context:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None) -> None:
        self.end()

    def spike(self, mib: int) -> float:
        """Allocates so much for 5 ms; returns when it was there."""
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(f"{mib}\n")
        self.child.stdin.flush()
        return float(self.child.stdout.readline())

    def end(self) -> None:
        """Ends it, and with it its contexts."""
        assert self.child.stdin
        self.child.stdin.close()
        self.child.wait(20)


def hold() -> None:
    """Holds the contexts until the input ends."""
    driver = open_driver()
    if driver is None:
        raise SystemExit("no CUDA driver here")
    # The first GPU's last, so that it is the current one.
    for gpu in reversed(range(driver.count())):
        driver.create_context(gpu)
    print("ready", flush=True)
    for line in sys.stdin:
        address = driver.allocate(int(line) * MIB)
        there = time.time()
        time.sleep(SPIKE_S)
        driver.free(address)
        print(there, flush=True)


if __name__ == "__main__":
    hold()
