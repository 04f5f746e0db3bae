"""Marks steps and phases of a training job for the highwater daemon.

    import highwater

    for n, batch in enumerate(batches):
        with highwater.step(n):
            with highwater.phase("forward"):
                loss = model(batch)

With PyTorch, one line does this and more: `highwater.torch.watch(model, optimizer=optimizer)`.

Marks go to the daemon that `configure` names, or else `HIGHWATER_ANNOTATIONS_SOCKET` (a Unix socket) or `HIGHWATER_URL` (HTTP).
If none of these names one, they go to the socket `/run/highwater/annotations.sock` or
`$XDG_RUNTIME_DIR/highwater/annotations.sock`. Job, rank and GPU come from `configure` or from the launcher's environment
(torchrun, Slurm, MPI, Ray, Kubernetes). `HIGHWATER_DISABLED=1` turns everything off.

Nothing here raises into the job or waits for the daemon: a mark is put into a queue, and a thread of its own sends it. A mark
that cannot be sent is counted, and the next one that can reports the number (`highwater_annotations_lost_total`). `status()`
says what became of the marks. CUDA is asynchronous: call `torch.cuda.synchronize()` before a phase ends if the phase must
include the memory that its kernels cause.
"""

import asyncio
import functools
import importlib
import inspect
import time
from types import TracebackType
from typing import Any, Callable, Dict, List, Mapping, Optional, Type, TypeVar, Union, overload

from . import _encode
from ._failures import failed_allocation as _failed_allocation
from ._gc import collector as _collector
from ._identity import number as _number
from ._marks import client as _client
from ._tally import Status as Status

__all__ = ["Status", "configure", "flush", "layer", "mark", "phase", "status", "step"]
__version__ = "0.1.0"

Gpu = Union[int, str, List[Union[int, str]]]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Spans without attributes, by name: they have no state, so one serves every begin and end of the name.
_phases: Dict[str, "Span"] = {}
_layers: Dict[str, "Span"] = {}
_MOST_SPANS = 1024

_put = _client.put
_now_ns = time.time_ns


class Span:
    """Begins when it is entered and ends when it is left, whatever happens in between. As a decorator, it does so around
    each call of the function."""

    __slots__ = ("_begin", "_end", "_tail")

    def __init__(self, begin: str, end: str, tail: str) -> None:
        self._begin = begin
        self._end = end
        self._tail = tail

    def __enter__(self) -> "Span":
        counters = _client.counters
        _put(self._begin, _now_ns(), self._tail + counters() if counters else self._tail)
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if kind is not None:
            _failed(kind, error)
        counters = _client.counters
        _put(self._end, _now_ns(), counters() if counters else "")

    def __call__(self, function: _Function) -> _Function:
        if asyncio.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return awaited  # type: ignore[return-value]

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return called  # type: ignore[return-value]


class _Step(Span):
    """A step, whose end says how long Python's garbage collector stopped it."""

    __slots__ = ("_collected_ns",)

    def __enter__(self) -> "Span":
        self._collected_ns = _collector.follow()
        return super().__enter__()

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if kind is not None:
            _failed(kind, error)
        seconds = _collector.seconds_since(self._collected_ns)
        counters = _client.counters
        tail = counters() if counters else ""
        _put(self._end, _now_ns(), tail if seconds is None else f'{tail},"attributes":{{"gc_seconds":{seconds:.6f}}}')


def _failed(kind: Type[BaseException], error: Optional[BaseException]) -> None:
    """Marks an allocation that failed, unless PyTorch's own allocator reports it to `watch`."""
    failed = None if _client.has_oom_observer else _failed_allocation(kind, error)
    if failed is not None:
        mark("oom", **failed)


def _named(kind: str, name: Any, attributes: Mapping[str, Any]) -> Span:
    text = _encode.name(name)
    return Span(_encode.head("begin", kind, text), _encode.head("end", kind, text), _encode.attributes(attributes))


def _keep(spans: Dict[str, Span], kind: str, name: Any) -> Span:
    span = _named(kind, name, {})
    if isinstance(name, str) and len(spans) < _MOST_SPANS:
        spans[name] = span
    return span


def configure(
    job: Optional[str] = None,
    rank: Optional[int] = None,
    gpu: Optional[Gpu] = None,
    socket: Optional[str] = None,
    url: Optional[str] = None,
    world_size: Optional[int] = None,
    counters: Optional[Callable[[], Mapping[str, int]]] = None,
    mesh: Optional[Mapping[str, int]] = None,
) -> None:
    """Sets, in place of the environment's values, the job's name, this process's rank of `world_size`, its GPU (index, UUID or
    PCI bus id, or a list of them), the path of the daemon's socket or its address (`http://127.0.0.1:10450`), and a function
    that returns the allocator's counters (`allocated`, `reserved`, `active`, `inactive_split` in bytes, `alloc_retries`,
    `ooms`), called at each begin and end. `mesh` is where the process stands in the job's grid of parallel dimensions
    (`{"pp": 1, "dp": 0}`). What is left out stays as it is."""
    _client.job = _text("job", job) or _client.job
    _client.rank = _number(rank) if rank is not None else _client.rank
    _client.world_size = _number(world_size) if world_size is not None else _client.world_size
    _client.gpu = gpu if gpu is not None else _client.gpu
    _client.socket = _text("socket", socket) or _client.socket
    _client.url = _text("url", url) or _client.url
    if mesh is not None:
        axes = _axes(mesh)
        _client.mesh = axes if axes is not None else _client.mesh
    if counters is not None:
        _client.counters = functools.partial(_counters, counters)


def _text(what: str, value: Any) -> Optional[str]:
    try:
        return str(value) if value else None
    except Exception:
        _client.trouble(f"configure({what}=…): this has no text, and is not used", f"configure {what}")
        return None


def _axes(mesh: Mapping[str, int]) -> Optional[Dict[str, int]]:
    try:
        numbers = {str(axis): _number(at) for axis, at in mesh.items()}
        return {axis: at for axis, at in numbers.items() if at is not None}
    except Exception:
        _client.trouble("configure(mesh=…): this has no axes with numbers, and is not used", "configure mesh")
        return None


def _counters(counters: Callable[[], Mapping[str, int]]) -> str:
    try:
        return _encode.memory(counters())
    except Exception:
        return ""


def step(number: Any = None, **attributes: Any) -> Span:
    """One iteration of training, as a context manager. Attributes of it go to spans and captures."""
    begin, end = _encode.step_heads(_number(number))
    return _Step(begin, end, _encode.attributes(attributes) if attributes else "")


@overload
def phase(name: _Function) -> _Function: ...
@overload
def phase(name: str, **attributes: Any) -> Span: ...
def phase(name: Any, **attributes: Any) -> Any:
    """A part of a step, as a context manager or a decorator: `data`, `forward`, `loss`, `backward`, `comm`,
    `optimizer`, `checkpoint`, `eval`, or any other name. As a decorator without a name, the function's own is taken."""
    if not attributes and inspect.isroutine(name):
        return _keep(_phases, "phase", name.__name__)(name)
    if attributes:
        return _named("phase", name, attributes)
    try:
        return _phases[name]
    except (KeyError, TypeError):
        return _keep(_phases, "phase", name)


def layer(name: str, **attributes: Any) -> Span:
    """One layer of the model within a phase."""
    if attributes:
        return _named("layer", name, attributes)
    try:
        return _layers[name]
    except (KeyError, TypeError):
        return _keep(_layers, "layer", name)


def mark(name: str, **attributes: Any) -> None:
    """An instant: `oom`, `checkpoint saved`. It is sent at once."""
    _put(_encode.head("mark", "phase", _encode.name(name)), _now_ns(), _encode.attributes(attributes))
    _client.wake()


def flush(timeout: float = 1.0) -> bool:
    """Waits until what was marked so far has been sent, `timeout` seconds at most. Returns whether the daemon took all of it
    since the flush before: False if it refused a mark, if one was lost, or if there is no daemon. Where the daemon cannot
    answer (`status()["confirmed"]` is None), True means that everything was handed to its socket."""
    return _client.flush(timeout)


def status() -> Status:
    """Where this process's marks go, and what became of them: how many the daemon took, refused and why, how many were lost.
    Never raises, and never waits."""
    return _client.status()


def __dir__() -> List[str]:
    return sorted([*__all__, "__version__", "torch"])


def __getattr__(name: str) -> Any:
    """`highwater.torch` is imported when it is first used, so that programs without PyTorch need none."""
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
