"""The memory of one rank's GPU, as the job uses it: the allocator's counters, a ballast, a second pool, a leak.

`DeviceMemory` is a real GPU. `PretendedMemory` behaves alike without one, so that every path of the scripts can be
tried on a CPU; its figures mean nothing for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from device_memory import GIB, MIB, Driver

BLOCKS = 12
"""Tensors of the auxiliary pass. Each is a segment that the allocator can release by itself."""


class DeviceMemory:
    """PyTorch's allocator on a GPU, and plain allocations beside it."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device = device
        self._driver = driver
        self._second_stream = torch.cuda.Stream(device)
        self._ballast: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor] = []

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self._device)

    def counters(self) -> dict[str, int]:
        """Bytes allocated and reserved, and how often the allocator flushed its cache and ran out of memory."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return {
            "allocated": stats["allocated_bytes"]["all"]["current"],
            "reserved": stats["reserved_bytes"]["all"]["current"],
            "retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
        }

    def clear_cache(self) -> int:
        """Returns the allocator's cache to the driver and resets peaks; returns the bytes that stay reserved."""
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device)

    def peak_reserved(self) -> int:
        """The most bytes reserved since the cache was cleared."""
        return torch.cuda.max_memory_reserved(self._device)

    def leave(self, free_bytes: int) -> int:
        """Grows or shrinks the ballast until about `free_bytes` are free; returns the bytes that are."""
        while self._ballast and self._driver.free_bytes() < free_bytes:
            self._drop()
        for size in (GIB, 32 * MIB):
            while self._driver.free_bytes() >= free_bytes + size:
                self._ballast.append((self._driver.allocate(size), size))
        return self._driver.free_bytes()

    def relieve(self, at_least_bytes: int) -> bool:
        """Releases that much of the ballast after an allocation failed; false if there is not that much."""
        released = 0
        while self._ballast and released < at_least_bytes:
            released += self._drop()
        torch.cuda.empty_cache()
        return released >= at_least_bytes

    def _drop(self) -> int:
        address, size = self._ballast.pop()
        self._driver.free(address)
        return size

    def auxiliary(self, size_bytes: int) -> None:
        """Allocates memory on the second stream, writes all of it and frees it."""
        with torch.cuda.stream(self._second_stream):
            blocks = [self._block(size_bytes // BLOCKS) for _ in range(BLOCKS)]
        self.synchronize()
        del blocks

    def keep(self, size_bytes: int) -> None:
        """Allocates memory and never frees it."""
        self._kept.append(self._block(size_bytes))

    def _block(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device).zero_()

    def facts(self) -> dict[str, Any]:
        """The allocator's properties."""
        return {"expandable_segments": self.expandable()}

    def expandable(self) -> bool:
        """Whether it has expandable segments."""
        return any(segment.get("is_expandable", False) for segment in torch.cuda.memory_snapshot())


class PretendedMemory:
    """Counters that move as a GPU's would: a retry at each auxiliary pass in tight memory, an OOM after some leaks."""

    LEAKS_UNTIL_OOM = 12

    def __init__(self) -> None:
        self._reserved = GIB
        self._retries = 0
        self._ooms = 0
        self._leaks = 0
        self._tight = False

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def counters(self) -> dict[str, int]:
        """Made up."""
        reserved = self._reserved + self._leaks * GIB
        return {"allocated": reserved // 2, "reserved": reserved, "retries": self._retries, "ooms": self._ooms}

    def clear_cache(self) -> int:
        """Nothing is kept."""
        return self._reserved

    def peak_reserved(self) -> int:
        """A GiB more than after clearing."""
        return self._reserved + GIB

    def leave(self, free_bytes: int) -> int:
        """Tight below 2 GiB."""
        self._tight = free_bytes < 2 * GIB
        return free_bytes

    def relieve(self, at_least_bytes: int) -> bool:
        """There is no ballast."""
        return at_least_bytes == 0

    def auxiliary(self, size_bytes: int) -> None:
        """Costs a retry where memory is tight."""
        self._retries += int(self._tight and size_bytes > 0)

    def keep(self, size_bytes: int) -> None:
        """Runs out after a while, as PyTorch does."""
        self._leaks += 1
        if self._leaks > self.LEAKS_UNTIL_OOM:
            self._ooms += 1
            raise torch.OutOfMemoryError(f"no {size_bytes} bytes are left (pretended)")

    def expandable(self) -> bool:
        """As asked for."""
        return True

    def facts(self) -> dict[str, Any]:
        """None of a GPU."""
        return {"pretended": True}
