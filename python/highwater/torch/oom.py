"""A mark for each time that the allocator found no memory, with what it knew then."""

import os
import time
from typing import Any, Dict, Optional

import torch

import highwater

from .._marks import client
from .guard import Part, guarded
from .history import is_ours
from .patches import Parts


def _nobody_watches() -> None:
    client.has_oom_observer = False


# The observer of the process cannot be taken away, so one serves every watch.
_watching = Parts(_nobody_watches)
_is_attached = False
# How many watches want the history of allocations that this module has PyTorch record.
_recording = 0
# A job that tries again and again needs one snapshot and no flood of marks.
MOST_SNAPSHOTS = 2
LEAST_S = 0.1


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    # The limit is the device's memory, or what of it `set_per_process_memory_fraction` leaves to the process.
    for each in _watching:
        each.happened(device, {"requested": requested, "device_limit": limit, "device_free": free})


class Oom(Part):
    """Watches for failed allocations."""

    name = "mark oom"

    def __init__(self, counters: Any, snapshot_dir: Optional[str]) -> None:
        self.counters = counters
        self.snapshot_dir = snapshot_dir
        self.snapshots = 0
        self.last_s = float("-inf")
        # Whether PyTorch reports a failure when it happens.
        self.is_told = False
        self.records = False

    @guarded
    def attach(self) -> None:
        """Only for a job that uses CUDA: these calls initialize CUDA, and a forked child could not use it then."""
        global _is_attached
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None and not _is_attached:
            attach(_observe)
            _is_attached = True
        self.is_told = _is_attached
        client.has_oom_observer = _is_attached
        _watching.add(self)
        if self.snapshot_dir is not None and not self.records:
            self.record()

    def record(self) -> None:
        """Begins the history of allocations, unless the job has one."""
        global _recording
        is_recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if not _recording:
            if is_recording is not None and is_recording() and not is_ours():
                return
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        _recording += 1
        self.records = True

    @guarded
    def close(self) -> None:
        global _recording
        _watching.remove(self)
        if self.records:
            self.records = False
            _recording -= 1
            if not _recording:
                torch.cuda.memory._record_memory_history(enabled=None)

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
        rank = client.rank_of_job()
        path = os.path.join(self.snapshot_dir, f"oom-rank{rank}-{os.getpid()}-{self.snapshots}.pickle")
        try:
            os.makedirs(self.snapshot_dir, exist_ok=True)
            torch.cuda.memory._dump_snapshot(path)
            return path
        except Exception as error:
            client.say(f"no snapshot of the allocator was written: {error!r}")
            return None
