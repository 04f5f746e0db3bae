"""Plain device allocations through the CUDA driver, outside PyTorch's caching allocator.

They act on the context that is current on the calling thread: PyTorch's, once it has touched the device, or one that
`create_context` made. On a machine without a GPU `open_driver` returns None, and what needs it is left out.
"""

from __future__ import annotations

import ctypes
import os
import time

MIB = 1 << 20
GIB = 1 << 30


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


class Driver:
    """`cuMemAlloc`, `cuMemFree`, `cuMemGetInfo`, and contexts for processes without PyTorch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def count(self) -> int:
        """Initialises the driver; returns how many GPUs it has."""
        count = ctypes.c_int()
        self._check("cuInit", self._library.cuInit(0))
        self._check("cuDeviceGetCount", self._library.cuDeviceGetCount(ctypes.byref(count)))
        return count.value

    def create_context(self, gpu: int) -> None:
        """Creates a context on a GPU, and makes it the current one. The context lives as long as the process."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuInit", self._library.cuInit(0))
        self._check("cuDeviceGet", self._library.cuDeviceGet(ctypes.byref(device), gpu))
        self._check("cuCtxCreate", self._library.cuCtxCreate_v2(ctypes.byref(context), 0, device))

    def allocate(self, size_bytes: int) -> int:
        """Allocates `size_bytes`; returns the device address."""
        address = ctypes.c_uint64()
        self._check("cuMemAlloc", self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)))
        return address.value

    def free(self, address: int) -> None:
        """Frees an allocation; waits for the device."""
        self._check("cuMemFree", self._library.cuMemFree_v2(ctypes.c_uint64(address)))

    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check("cuMemGetInfo", self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def cycle(self, size_bytes: int) -> tuple[int, int, int]:
        """Allocates and frees once. Returns the Unix time of the begin and the duration of each call, nanoseconds."""
        begin_unix_ns = time.time_ns()
        begin = time.perf_counter_ns()
        address = self.allocate(size_bytes)
        allocated = time.perf_counter_ns()
        self.free(address)
        return begin_unix_ns, allocated - begin, time.perf_counter_ns() - allocated

    def fill_until(self, free_bytes: int, block_bytes: int = GIB) -> list[int]:
        """Allocates until about `free_bytes` are left: whole blocks, then the rest in steps of 32 MiB."""
        ballast = []
        for size in (block_bytes, 32 * MIB):
            while self.free_bytes() >= free_bytes + size:
                ballast.append(self.allocate(size))
        return ballast

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status != 0:
            raise CudaError(f"{call} returned {status}")


def open_driver() -> Driver | None:
    """The CUDA driver, or None if there is none. Its GPUs are numbered as NVML's are."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
