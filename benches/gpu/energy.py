"""How far the daemon's energy is from the GPU's own counter.

The daemon reads the counter seldom and adds up power in between (ARCHITECTURE.md). Input: a rig beside whatever loads the GPUs, and
for how long to compare. Output: by GPU, the joules that each counted in that time, and their ratio.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import measure
from rig import Rig

LIBRARY = "libnvidia-ml.so.1"
METRIC = "highwater_gpu_energy_joules_total"


class Counters:
    """The energy counters of the first GPUs, by NVML."""

    def __init__(self, gpus: int) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._check("nvmlInit_v2")
        self._handles = [ctypes.c_void_p() for _ in range(gpus)]
        for index, handle in enumerate(self._handles):
            self._check("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))

    def joules(self) -> list[float]:
        """What each counts now."""
        millijoules = [ctypes.c_ulonglong() for _ in self._handles]
        for handle, counter in zip(self._handles, millijoules, strict=True):
            self._check("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(counter))
        return [counter.value / 1e3 for counter in millijoules]

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")


def beside_the_counter(rig: Rig, seconds: float) -> dict[str, Any]:
    """What the daemon and the GPUs' counters counted over `seconds`. The daemon must not read the counters meanwhile."""
    counters, daemon = Counters(rig.gpus), rig.daemon()
    with measure.scraped(daemon):
        time.sleep(1.0)
        before, own_before = daemon.metrics(), counters.joules()
        time.sleep(seconds)
        after, own_after = daemon.metrics(), counters.joules()
    daemon.stop()
    own = [later - earlier for earlier, later in zip(own_before, own_after, strict=True)]
    return {"seconds": seconds, "readings": readings(before, after), "gpus": compared(before, after, own)}


def readings(before: measure.Metrics, after: measure.Metrics) -> float:
    """How often the daemon read a counter between two scrapes."""
    name, call = "highwater_nvml_call_duration_seconds_count", {"call": "energy"}
    return (measure.total(after, name, **call) or 0.0) - (measure.total(before, name, **call) or 0.0)


def compared(before: measure.Metrics, after: measure.Metrics, own: list[float]) -> list[dict[str, float | None]]:
    """By GPU, the joules that its counter and the daemon counted, and the daemon's as a share of the counter's."""
    rows: list[dict[str, float | None]] = []
    for index, counter in enumerate(own):
        begun, ended = (measure.total(metrics, METRIC, gpu=str(index)) for metrics in (before, after))
        daemon = None if begun is None or ended is None else ended - begun
        ratio = daemon / counter if daemon is not None and counter else None
        rows.append({"counter_joules": counter, "daemon_joules": daemon, "ratio": ratio})
    return rows
