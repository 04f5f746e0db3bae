"""The daemon, the floor and `nvidia-smi` as pollers that take turns.

Input: a rig. Output: for each turn, what the poller cost and how many ticks it took. A poller is started once, and is
stopped (SIGSTOP) while another has its turn. The cost of a driver call varies up to fourfold, core by core and second
by second, whichever process makes it and whichever others poll. So the turns of a round follow each other on one core.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any

import measure
from measure import Child
from rig import Rig

LONG_S = 3600.0
"""Longer than any part lasts."""
SAMPLING_THREAD = "hw-fast"
"""The daemon's thread that reads memory."""


class Poller:
    """One process that polls while it has its turn."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float, settle_s: float, core: int) -> dict[str, Any]:
        """Lets it run, with its polling thread on one core, and measures it over `seconds` once it has settled."""
        with self._running(settle_s, core):
            before, begin = self.counts(), time.time()
            cost = window(self.child.pid, seconds)
            return {**cost, **self.outcome(before, self.counts(), cost["seconds"], begin)}

    def short_turn(self, seconds: float, settle_s: float, core: int) -> dict[str, Any]:
        """The same, but measures its polling thread alone: what its other threads do every second or less would not fall
        into so short a time as often as it should."""
        thread = self.polling_thread()
        with self._running(settle_s, core):
            before, begin = measure.scheduled(self.child.pid, thread), time.monotonic_ns()
            time.sleep(seconds)
            after, elapsed_ns = measure.scheduled(self.child.pid, thread), time.monotonic_ns() - begin
        ran_ns, wakes = (later - earlier for earlier, later in zip(before, after, strict=True))
        return {"cpu_percent": 100 * ran_ns / elapsed_ns, "rate_hertz": 1e9 * wakes / elapsed_ns}

    @contextmanager
    def _running(self, settle_s: float, core: int) -> Iterator[None]:
        """It runs, with its polling thread on one core and settled, until the block ends."""
        os.sched_setaffinity(self.polling_thread(), {core})
        self._signal(signal.SIGCONT)
        try:
            time.sleep(settle_s)
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def polling_thread(self) -> int:
        """The ID of the thread that reads memory."""
        return self.child.pid

    def counts(self) -> Any:
        """Its counts so far."""
        raise NotImplementedError

    def outcome(self, before: Any, after: Any, seconds: float, begin_unix: float) -> dict[str, Any]:
        """What it did between two readings of its counts."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends it."""
        self._signal(signal.SIGCONT)
        self.child.stop()

    def _signal(self, which: signal.Signals) -> None:
        if self.child.alive():
            os.killpg(self.child.pid, which)


class DaemonPoller(Poller):
    """The daemon, scraped every second of its turn."""

    def __init__(self, rig: Rig) -> None:
        # A call during which the daemon was stopped must not look like one that hangs.
        self._daemon = rig.daemon(arguments=["--set", "sampling.hang_after=10m"])
        self._ending = ExitStack()
        self._scraper = self._ending.enter_context(measure.scraped(self._daemon))
        self._scraper.pause()
        super().__init__(self._daemon.child)

    def turn(self, seconds: float, settle_s: float, core: int) -> dict[str, Any]:
        self._scraper.begin()
        try:
            return super().turn(seconds, settle_s, core)
        finally:
            self._scraper.pause()

    def polling_thread(self) -> int:
        return measure.thread_ids(self.child.pid)[SAMPLING_THREAD]

    def counts(self) -> measure.Metrics:
        return self._daemon.metrics()

    def outcome(self, before: Any, after: Any, seconds: float, begin_unix: float) -> dict[str, Any]:
        ticks, later = measure.ticks(before), measure.ticks(after)
        delta = {name: later[name] - ticks[name] for name in ticks}
        resident = measure.resident_bytes(self.child.pid)
        calls = calls_us(before, after)
        taken = delta["taken"]
        return {
            "rate_hertz": taken / seconds,
            "missed_percent": 100 * delta["missed"] / delta["due"] if delta["due"] else float("nan"),
            "resident_bytes": resident["VmRSS"],
            "resident_peak_bytes": resident["VmHWM"],
            "anonymous_bytes": resident["RssAnon"],
            "sweep_mean_us": calls["memory_info"] / taken if taken and "memory_info" in calls else None,
            "lateness_mean_us": measure.mean_us(before, after, "highwater_sampler_lateness_seconds"),
            "calls_us": calls,
            "scrape_p50_ms": 1e3 * statistics.median(self._scraper.seconds) if self._scraper.seconds else None,
            "scrape_bytes": self._scraper.bytes,
            "scrape_failures": self._scraper.failures,
        }

    def end(self) -> None:
        self._ending.close()
        super().end()


class FloorPoller(Poller):
    """The floor, which prints its counts when it gets a signal."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.floor_loop(LONG_S))

    def counts(self) -> dict[str, float]:
        said = self.child.output().count(measure.SO_FAR)
        self._signal(signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while self.child.output().count(measure.SO_FAR) == said:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nvml_floor prints no counts: {self.child.output()[-300:]}")
            time.sleep(0.002)
        return measure.parse_so_far(self.child.output())

    def outcome(self, before: Any, after: Any, seconds: float, begin_unix: float) -> dict[str, Any]:
        taken, missed, swept_ns = (after[name] - before[name] for name in ("samples", "missed", "sweep_ns"))
        resident = measure.resident_bytes(self.child.pid)
        return {
            "rate_hertz": taken / seconds,
            "missed_percent": 100 * missed / (taken + missed) if taken + missed else float("nan"),
            "resident_peak_bytes": resident["VmHWM"],
            "anonymous_bytes": resident["RssAnon"],
            "sweep_mean_us": swept_ns / taken / 1e3 if taken else None,
        }


class SmiPoller(Poller):
    """`nvidia-smi`, whose rate is that of the lines it printed in its turn."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.smi_loop())

    def counts(self) -> int:
        return self.child.log.stat().st_size

    def outcome(self, before: Any, after: Any, seconds: float, begin_unix: float) -> dict[str, Any]:
        with self.child.log.open("rb") as log:
            log.seek(before)
            printed = log.read(after - before).decode(errors="replace")
        rate = smi_rate(printed, begin_unix)
        return {"rate_hertz": rate, "missed_percent": max(0.0, 100 - rate / 10)}


POLLERS: dict[str, type[FloorPoller | DaemonPoller | SmiPoller]] = {
    "floor": FloorPoller,
    "daemon": DaemonPoller,
    "nvidia-smi": SmiPoller,
}
"""The three that are compared."""


def window(pid: int, seconds: float) -> dict[str, Any]:
    """CPU of a process over the next `seconds`, in percent of one core, whole and by its threads' names."""
    clock = measure.process_clock(pid)
    before, used, begin = measure.thread_cpu(pid), time.clock_gettime_ns(clock), time.monotonic()
    time.sleep(seconds)
    after, used, elapsed = measure.thread_cpu(pid), time.clock_gettime_ns(clock) - used, time.monotonic() - begin
    threads = measure.cpu_by_name(before, after, pid)
    return {
        "cpu_percent": used / 1e7 / elapsed,
        "seconds": elapsed,
        "thread_percent": {name: 100 * used / elapsed for name, used in threads.items()},
    }


def other_threads_percent(cost: dict[str, Any]) -> float:
    """CPU of all of the daemon's threads but the one that samples, of a `window`, percent of one core."""
    return cost["cpu_percent"] - cost["thread_percent"][SAMPLING_THREAD]


def calls_us(before: measure.Metrics, after: measure.Metrics) -> dict[str, float]:
    """Microseconds that the driver took for each of its calls between two scrapes, summed over all GPUs and threads."""
    name = "highwater_nvml_call_duration_seconds_sum"
    begun = {labels["call"]: value for sample, labels, value in before if sample == name}
    ended = {labels["call"]: value for sample, labels, value in after if sample == name}
    return {call: 1e6 * (value - begun.get(call, 0.0)) for call, value in ended.items()}


def smi_rate(printed: str, begin_unix: float) -> float:
    """Samples a second of one GPU, by the timestamps of the first and the last line since `begin_unix`. Earlier lines
    may have waited in a buffer; the first line and the last may be torn."""
    rows = [line.split(", ") for line in printed.splitlines()[1:-1] if line.count(", ") == 2]
    times = [(datetime.strptime(row[0], "%Y/%m/%d %H:%M:%S.%f").timestamp(), row[1]) for row in rows]
    times = [(at, gpu) for at, gpu in times if at >= begin_unix]
    first_gpu = [at for at, gpu in times if gpu == times[0][1]]
    if len(first_gpu) < 2:
        raise RuntimeError(f"nvidia-smi printed no samples: {printed[-400:]}")
    elapsed = first_gpu[-1] - first_gpu[0]
    return (len(first_gpu) - 1) / elapsed if elapsed else float("nan")
