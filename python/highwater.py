"""Marks steps and phases of a training job for the highwater daemon.

One file, no dependencies, Python 3.9 or later: put it beside the training script, or on `PYTHONPATH`.

    import highwater

    for n, batch in enumerate(batches):
        with highwater.step(n):
            with highwater.phase("forward"):
                loss = model(batch)

Marks go to the daemon's Unix socket: `HIGHWATER_ANNOTATIONS_SOCKET`, or else `/run/highwater/annotations.sock` and
`$XDG_RUNTIME_DIR/highwater/annotations.sock`. Job and rank come from `configure`, or from `HIGHWATER_JOB`, `SLURM_JOB_ID`,
`TORCHELASTIC_RUN_ID` and `RANK`, `SLURM_PROCID`.

Nothing here raises into the job or waits for the daemon. A mark that cannot be sent is counted, and the next one that can
reports the number (`highwater_annotations_lost_total`). CUDA is asynchronous: call `torch.cuda.synchronize()` before a phase
ends if the phase must include the memory that its kernels cause.
"""

import atexit
import json
import math
import os
import socket
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Union

__all__ = ["configure", "layer", "mark", "phase", "step"]

Gpu = Union[int, str, List[Union[int, str]]]

_JOBS = (("HIGHWATER_JOB", ""), ("SLURM_JOB_ID", "slurm-"), ("TORCHELASTIC_RUN_ID", "torchrun-"))
_RANKS = ("RANK", "SLURM_PROCID")
_WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS")
_PLACES = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")


def _number(value: Any) -> Optional[int]:
    """A whole number that is not negative, or None. A CUDA tensor would have to be waited for, so it is None too."""
    try:
        if getattr(value, "is_cuda", False):
            return None
        number = int(value)
        return number if number >= 0 else None
    except Exception:
        return None


def _scalar(value: Any) -> Any:
    """What JSON can hold of an attribute: a number, a boolean or text; None is left out."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return None if getattr(value, "is_cuda", False) else str(value)


def _first_number(names: Any) -> Optional[int]:
    return next((number for name in names if (number := _number(os.environ.get(name))) is not None), None)


def _job_name() -> str:
    named = (prefix + os.environ[name] for name, prefix in _JOBS if os.environ.get(name))
    script = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0]
    return next(named, script or "python")


class _Client:
    """One process's socket, and what every event of it says."""

    def __init__(self) -> None:
        self.socket: Optional[socket.socket] = None
        self.path: Optional[str] = None
        self.job: Optional[str] = None
        self.rank: Optional[int] = None
        self.gpu: Optional[Gpu] = None
        self.common: Optional[Dict[str, Any]] = None
        self.places: Dict[str, Any] = {}
        self.known_paths: List[str] = []
        # A signal handler may mark while the thread that it interrupts counts.
        self.lock = threading.RLock()
        self.lost = 0
        self.has_sent = False

    def prepare(self) -> Dict[str, Any]:
        """What every event says and where it goes. Read for the first one: launchers set the environment before."""
        rank = self.rank if self.rank is not None else _first_number(_RANKS)
        common: Dict[str, Any] = {"job": self.job or _job_name(), "rank": rank or 0}
        world_size = _first_number(_WORLD_SIZES)
        if world_size:
            common["world_size"] = world_size
        if self.gpu is not None:
            common["gpu"] = self.gpu
        self.places = {name: os.environ[name] for name in _PLACES if os.environ.get(name)}
        self.known_paths = self.paths()
        self.common = common
        return common

    def paths(self) -> List[str]:
        """Where the daemon's socket may be, the most likely first."""
        named = self.path or os.environ.get("HIGHWATER_ANNOTATIONS_SOCKET")
        if named:
            return [named]
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        own = [os.path.join(runtime, "highwater", "annotations.sock")] if runtime else []
        return ["/run/highwater/annotations.sock", *own]

    def send(self, event: str, fields: Dict[str, Any], attributes: Optional[Dict[str, Any]]) -> None:
        """Sends one event, or counts it as lost."""
        at_ns = time.time_ns()
        with self.lock:
            lost, self.lost = self.lost, 0
        try:
            line = {"event": event, "time_unix_nano": at_ns, **(self.common or self.prepare()), **fields}
            scalars = ((str(name), _scalar(value)) for name, value in (attributes or {}).items())
            known = {**self.places, **{name: value for name, value in scalars if value is not None}}
            if known:
                line["attributes"] = known
            if lost:
                line["lost"] = min(lost, 2**32 - 1)
            self.write(json.dumps(line, allow_nan=False).encode())
            self.has_sent = True
        except Exception:
            with self.lock:
                self.lost += lost + 1

    def write(self, message: bytes) -> None:
        if self.socket is None:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        *others, last = self.known_paths
        for path in others:
            try:
                self.socket.sendto(message, socket.MSG_DONTWAIT, path)
                return
            except (FileNotFoundError, ConnectionRefusedError, PermissionError):
                pass
        self.socket.sendto(message, socket.MSG_DONTWAIT, last)

    def after_fork(self) -> None:
        """A child that marks is a sender of its own: it has lost nothing yet, and the parent's exit is not its own."""
        self.lock, self.lost, self.has_sent = threading.RLock(), 0, False

    def exit(self) -> None:
        """The rank ends with its process."""
        if self.has_sent:
            self.send("exit", {}, None)
        if self.socket is not None:
            self.socket.close()


_client = _Client()
atexit.register(lambda: _client.exit())
os.register_at_fork(after_in_child=lambda: _client.after_fork())


class _Span:
    """Begins when it is entered and ends when it is left, whatever happens in between."""

    __slots__ = ("attributes", "fields")

    def __init__(self, fields: Dict[str, Any], attributes: Dict[str, Any]) -> None:
        self.fields = fields
        self.attributes = attributes

    def __enter__(self) -> "_Span":
        _client.send("begin", self.fields, self.attributes)
        return self

    def __exit__(self, *_: Any) -> None:
        _client.send("end", self.fields, None)


def configure(
    job: Optional[str] = None, rank: Optional[int] = None, gpu: Optional[Gpu] = None, socket: Optional[str] = None
) -> None:
    """Sets what the environment does not say: the job's name, this process's rank, its GPU (index, UUID or PCI bus id, or
    a list of them) and the path of the daemon's socket. What is left out stays as it is."""
    _client.job = str(job) if job else _client.job
    _client.rank = _number(rank) if rank is not None else _client.rank
    _client.gpu = gpu if gpu is not None else _client.gpu
    _client.path = str(socket) if socket else _client.path
    _client.common = None


def step(number: Any = None, **attributes: Any) -> _Span:
    """One iteration of training, as a context manager. Attributes of it go to spans and captures."""
    known = _number(number)
    return _Span({"kind": "step", **({} if known is None else {"step": known})}, attributes)


def phase(name: str, **attributes: Any) -> _Span:
    """A part of a step: `data`, `forward`, `backward`, `comm`, `optimizer`, `checkpoint`, `eval`, or any other name."""
    return _Span({"name": name}, attributes)


def layer(name: str, **attributes: Any) -> _Span:
    """One layer of the model within a phase."""
    return _Span({"kind": "layer", "name": name}, attributes)


def mark(name: str, **attributes: Any) -> None:
    """An instant: `oom`, `checkpoint saved`."""
    _client.send("mark", {"name": name}, attributes)
