"""What NVML reports at its own slow pace, beside the raw memory log: GPU utilisation and power, ten times a second.

Output: `utilization.csv`, lines `realtime_ns,gpu,utilization_percent,power_mw`. Utilisation is the share of NVML's own
last sample period in which a kernel ran; power is in milliwatts and averaged by the driver. A value that the driver
refuses is left empty.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

HEADER = "realtime_ns,gpu,utilization_percent,power_mw"
PERIOD_S = 0.1


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class NvmlError(RuntimeError):
    """A call that a recording cannot do without failed."""


class Gpus(Protocol):
    """GPUs that can be read."""

    def facts(self) -> list[dict[str, Any]]:
        """Their entries in `gpus.json`."""

    def load(self, gpu: int) -> tuple[int | None, int | None]:
        """Utilisation in percent and power in milliwatts."""


class Nvml:
    """The GPUs of this machine, by NVML's index."""

    def __init__(self, count: int) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._require("nvmlInit_v2", self._library.nvmlInit_v2())
        self._handles = []
        for index in range(count):
            handle = ctypes.c_void_p()
            status = self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            self._require("nvmlDeviceGetHandleByIndex_v2", status)
            self._handles.append(handle)

    def facts(self) -> list[dict[str, Any]]:
        """Name and size of each GPU. The size fits the raw log's bytes, which count the driver's part as used."""
        found = []
        for index, handle in enumerate(self._handles):
            memory, name = _Memory(), ctypes.create_string_buffer(96)
            status = self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            self._require("nvmlDeviceGetMemoryInfo", status)
            self._require("nvmlDeviceGetName", self._library.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)))
            found.append({"index": index, "name": name.value.decode(), "memory_total_bytes": memory.total})
        return found

    def load(self, gpu: int) -> tuple[int | None, int | None]:
        """Utilisation and power now; None for what the driver refuses."""
        utilization, power = _Utilization(), ctypes.c_uint()
        handle = self._handles[gpu]
        knows_load = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0
        knows_power = self._library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) == 0
        return (utilization.gpu if knows_load else None), (power.value if knows_power else None)

    @staticmethod
    def _require(call: str, status: int) -> None:
        if status != 0:
            raise NvmlError(f"{call} returned {status}")


class PretendedGpus:
    """Stands in for GPUs when the scripts are tried without one."""

    def __init__(self, count: int) -> None:
        self._count = count

    def facts(self) -> list[dict[str, Any]]:
        """GPUs of 8 GiB."""
        return [{"index": gpu, "name": "pretended", "memory_total_bytes": 8 << 30} for gpu in range(self._count)]

    def load(self, gpu: int) -> tuple[int | None, int | None]:
        """Always the same."""
        return 50 + gpu, None


class LoadLog(threading.Thread):
    """Writes the load of the first `count` GPUs to a file until it is stopped."""

    def __init__(self, gpus: Gpus, count: int, path: Path, now_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__(daemon=True)
        self._gpus = gpus
        self._count = count
        self._path = path
        self._now_ns = now_ns
        self._ended = threading.Event()

    def run(self) -> None:
        """Polls at a fixed pace. Late turns are not made up for."""
        with self._path.open("w", buffering=1) as out:
            out.write(HEADER + "\n")
            due = time.monotonic()
            while not self._ended.wait(max(0.0, due - time.monotonic())):
                due = max(due + PERIOD_S, time.monotonic())
                for gpu in range(self._count):
                    percent, milliwatts = self._gpus.load(gpu)
                    fields = ("" if value is None else str(value) for value in (percent, milliwatts))
                    out.write(f"{self._now_ns()},{gpu},{','.join(fields)}\n")

    def stop(self) -> None:
        """Ends it. The file is complete then."""
        self._ended.set()
        self.join(5)
