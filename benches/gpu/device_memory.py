"""Plain device allocations through the CUDA driver, outside PyTorch's caching allocator.

They act on the context that is current on the calling thread: PyTorch's, once it has touched the device. On a machine
without a GPU `open_driver` returns None, and what needs it is left out.
"""

from __future__ import annotations

import ctypes
import time

MIB = 1 << 20
GIB = 1 << 30


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


class Driver:
    """`cuMemAlloc`, `cuMemFree` and `cuMemGetInfo`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

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
    """The CUDA driver, or None if there is none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
