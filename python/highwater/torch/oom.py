"""A mark for each time that the allocator found no memory, with what it knew then."""

import os
import time
from typing import Any, Dict, List, Optional

import torch

import highwater

from .. import _identity
from .._marks import client
from .guard import Part, guarded

# The observer of the process cannot be taken away, so one serves every watch.
_watching: List["Oom"] = []
_is_attached = False
# A job that tries again and again needs one snapshot and no flood of marks.
MOST_SNAPSHOTS = 2
LEAST_S = 0.1


def _observe(device: int, requested: int, allocated: int, free: int) -> None:
    for each in list(_watching):
        each.happened(device, {"requested": requested, "device_allocated": allocated, "device_free": free})


class Oom(Part):
    """Watches for failed allocations."""

    name = "mark oom"

    def __init__(self, counters: Any, snapshot_dir: Optional[str]) -> None:
        self.counters = counters
        self.snapshot_dir = snapshot_dir
        self.snapshots = 0
        self.last_s = float("-inf")
        # Whether PyTorch tells of a failure when it happens.
        self.is_told = False

    @guarded
    def attach(self) -> None:
        global _is_attached
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None and torch.cuda.is_available():
            if not _is_attached:
                attach(_observe)
                _is_attached = True
            self.is_told = True
        if self.snapshot_dir is not None and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        _watching.append(self)

    @guarded
    def close(self) -> None:
        if self in _watching:
            _watching.remove(self)

    @guarded
    def seen(self, error: Optional[BaseException]) -> None:
        """An exception that left the model, where PyTorch did not tell of it."""
        kind = getattr(torch.cuda, "OutOfMemoryError", None)
        if not self.is_told and kind is not None and isinstance(error, kind):
            self.happened(None, {})

    @guarded
    def happened(self, device: Optional[int], said: Dict[str, Any]) -> None:
        now_s = time.monotonic()
        if now_s - self.last_s < LEAST_S:
            return
        self.last_s = now_s
        attributes = dict(said) if device is None else {"device": device, **said}
        attributes.update(self.counters() or {})
        path = self.dump()
        if path:
            attributes["snapshot"] = path
        highwater.mark("oom", **attributes)

    def dump(self) -> Optional[str]:
        """Writes a snapshot of the allocator, if one was asked for."""
        if self.snapshot_dir is None or self.snapshots >= MOST_SNAPSHOTS:
            return None
        self.snapshots += 1
        rank = client.rank if client.rank is not None else _identity.of_environment().rank
        path = os.path.join(self.snapshot_dir, f"oom-rank{rank}-{os.getpid()}-{self.snapshots}.pickle")
        try:
            os.makedirs(self.snapshot_dir, exist_ok=True)
            torch.cuda.memory._dump_snapshot(path)
            return path
        except Exception as error:
            client.say(f"no snapshot of the allocator was written: {error!r}")
            return None
