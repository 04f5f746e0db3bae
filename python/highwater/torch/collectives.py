"""Where collectives are seen: the functions of torch.distributed, `Work.wait`, hooks of process groups, a hook of DDP.

- The functions serve plain code, FSDP1 and FSDP2. A synchronous collective lies between two events on the current stream.
- An asynchronous one ends, on CUDA, where the job waits for it: right after the job's own wait, a stream of ours waits too,
  and an event on it shows when the collective ended. Waiting earlier would be wrong: `Work.wait` gives tensors free that NCCL
  still reads. On a CPU, its future says when it ended.
- What C++ issues, such as DDP's reducer, is seen by hooks of the process group (PyTorch 2.15), or else by a communication
  hook of DDP with the arithmetic of the built-in one.
"""

import functools
import threading
import time
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from . import patches, tensors
from .comm import Comm, Op
from .guard import Part, guarded
from .layers import is_compiling
from .loop import in_backward

# Not isend and irecv: batch_isend_irecv compares what it is given with them.
SYNCHRONOUS = ("send", "recv", "monitored_barrier")
FUNCTIONS = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced",
    "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "broadcast", "reduce", "gather", "scatter",
    # What PyTorch 2.13 calls the two of a single tensor; FSDP2 uses these.
    "all_gather_single", "reduce_scatter_single",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", *SYNCHRONOUS,
)
HOOK_ID = 0x4157
# What the end waits at most for collectives that have not ended.
MOST_SETTLE_S = 2.0

# Whether this thread is inside a function that is seen already.
_inside = threading.local()
# The parts that watch, and the groups that have our hooks. A process group keeps its hooks for good, so a hook must
# hold nothing of a watch.
_seeing = patches.Parts()
_groups: Dict[int, Any] = {}


class Collectives(Part):
    """Watches the collectives of this process."""

    name = "phase comm"

    def __init__(self, comm: Comm, models: Iterable[Any], with_group_hooks: bool = True) -> None:
        self.comm = comm
        # The reducer is a part of what torch.compile wraps.
        inner = [getattr(model, "_orig_mod", model) for model in models]
        self.with_reducer = [model for model in inner if isinstance(model, torch.nn.parallel.DistributedDataParallel)]
        self.with_group_hooks = with_group_hooks
        self.undo: List[Callable[[], None]] = []
        # Asynchronous collectives that the job has not waited for, by their Work.
        self.waiting: Dict[int, Tuple[Op, bool]] = {}
        # Of the group's hooks, by the group's number of the operation.
        self.issued: Dict[Tuple[int, int], Op] = {}
        # Futures that will call this process back.
        self.due = 0
        self.has_followed = False
        self.is_settled = threading.Condition()

    @guarded
    def attach(self) -> None:
        c10d = dist.distributed_c10d
        for name in FUNCTIONS:
            own: Any = getattr(c10d, name, None)
            if own is not None:
                # One function in both places, as they are compared by identity.
                self.replace([place for place in (c10d, dist) if getattr(place, name, None) is own], name, seen_function(name))
        functional: Any = getattr(dist, "_functional_collectives", None)
        if hasattr(functional, "wait_tensor"):
            self.replace([functional], "wait_tensor", seen_function("wait_tensor"))
        self.replace([dist.Work], "wait", seen_wait)
        if self.has_group_hooks():
            _seeing.add(self)
        self.attach_groups()
        if not self.has_group_hooks():
            self.attach_reducers()

    def close(self) -> None:
        for each in reversed(self.undo):
            each()
        self.undo = []
        _seeing.remove(self)
        if not any(True for _ in _seeing):
            remove_group_hooks()
        for model in self.with_reducer:
            from . import reducer

            reducer.detach(model, self.comm)
        self.settle()

    def drop(self) -> None:
        """Ends in a child process: no callback comes there."""
        self.is_off = True

    def settle(self) -> None:
        """Waits for callbacks that are due: a thread of C++ that wants to run Python while the interpreter ends would end the
        process with an error."""
        with self.is_settled:
            self.is_settled.wait_for(lambda: not self.due, MOST_SETTLE_S)
        if self.has_followed:
            # What follows a callback in its thread gives Python objects free.
            time.sleep(0.01)

    def replace(self, places: Sequence[Any], name: str, make: Callable[[Any, patches.Parts], Any]) -> None:
        self.undo.append(patches.join(self, tuple(places), name, make))

    # Functions.

    @guarded
    def called(self, is_gather: bool, args: Any, kwargs: Any) -> Optional[Op]:
        if is_gather:
            self.count(args[0] if args else next(iter(kwargs.values()), None))
        # Last, as it begins with what follows.
        return self.comm.begin()

    @guarded
    def count(self, outputs: Any) -> None:
        self.comm.gathered(sum(tensors.size(tensor) for tensor in tensors.tensors(outputs)))

    @guarded
    def issued_one(self, op: Optional[Op], result: Any, args: Any, kwargs: Any) -> None:
        """A function has returned: without a Work the collective has ended, or will on the current stream."""
        works = [each for each in (result if isinstance(result, list) else [result]) if isinstance(each, dist.Work)]
        if op is None or not works:
            self.comm.end(op)
            return
        # Of several, the last one's end is the end of all.
        self.follow(op, works[-1], any(tensor.is_cuda for tensor in tensors.tensors((args, kwargs))))

    def follow(self, op: Op, work: Any, is_cuda: bool) -> None:
        """Finds out when an asynchronous collective ends."""
        if self.comm.is_on_host:
            try:
                future = work.get_future()
            except RuntimeError:
                # Sends and receives of gloo have no future.
                pass
            else:
                self.follow_future(op, future)
                return
        key = id(work)
        self.waiting[key] = (op, is_cuda)
        weakref.finalize(work, lost, self.waiting, key, op).atexit = False

    def follow_future(self, op: Op, future: Any) -> None:
        with self.is_settled:
            self.due += 1
            self.has_followed = True
        future.add_done_callback(functools.partial(self.done, op))

    def done(self, op: Op, future: Any) -> None:
        self.comm.end(op)
        with self.is_settled:
            self.due -= 1
            self.is_settled.notify_all()

    @guarded
    def after_wait(self, own: Callable[..., Any], work: Any) -> None:
        op, is_cuda = self.waiting.pop(id(work), (None, False))
        if op is None:
            return
        if self.comm.is_on_host or not is_cuda:
            self.comm.end(op)
            return
        if torch.cuda.is_current_stream_capturing():
            op.is_lost = True
            return
        self.comm.end_after(op, lambda: own(work))

    # Hooks of process groups.

    def has_group_hooks(self) -> bool:
        return self.with_group_hooks and hasattr(dist.ProcessGroup, "register_post_hook")

    @guarded
    def attach_groups(self) -> None:
        """Hooks on the groups that there are; called again for those that come."""
        if not self.has_group_hooks() or not dist.is_initialized():
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            key = id(group)
            known = _groups.get(key, lambda: None)()
            if known is group or not isinstance(group, dist.ProcessGroup):
                continue
            group.register_pre_hook(HOOK_ID, functools.partial(before_group, key))
            group.register_post_hook(HOOK_ID, functools.partial(after_group, key))
            _groups[key] = weakref.ref(group)

    def groups_may_have_come(self, number: int, in_forward: bool) -> None:
        self.attach_groups()

    @guarded
    def before(self, key: int, said: Any) -> None:
        if "ALLGATHER" in said.name.name:
            self.count(said.output_tensors)
        is_cuda = not self.comm.is_on_host
        # Of C++'s asynchronous operations on CUDA, only the reducer's can be followed: its buckets live as long as it does.
        if is_cuda and said.async_op and not (said.name.name == "ALLREDUCE" and self.with_reducer and in_backward()):
            return
        op = self.comm.begin()
        if op is not None and len(self.issued) < 4096:
            self.issued[key, said.op_id] = op

    @guarded
    def after(self, key: int, said: Any) -> None:
        op = self.issued.pop((key, said.op_id), None)
        if op is None:
            return
        if self.comm.is_on_host and said.work is not None:
            self.follow(op, said.work, False)
        elif said.async_op and said.work is not None:
            future = said.work.get_future()
            if future.done():
                # It is queued on the GPU. Unlike the Work's, the future's wait gives nothing free.
                self.comm.end_after(op, future.wait)
            else:
                self.follow_future(op, future)
        else:
            self.comm.end(op)

    # DDP.

    def attach_reducers(self) -> None:
        for model in self.with_reducer:
            from . import reducer

            if not reducer.has_other(model):
                reducer.attach(model, self.comm)


# What PyTorch holds: it knows those that watch weakly.


def seen_function(name: str) -> Callable[[Any, patches.Parts], Any]:
    is_gather = name.lstrip("_").startswith("all_gather")

    def make(own: Callable[..., Any], parts: patches.Parts) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or getattr(_inside, "is_set", False):
                return own(*args, **kwargs)
            seen = [(part, part.called(is_gather, args, kwargs)) for part in parts if not part.comm.is_off]
            _inside.is_set = True
            work = None
            try:
                work = own(*args, **kwargs)
            finally:
                _inside.is_set = False
                for part, op in seen:
                    part.issued_one(op, work, args, kwargs)
            return work

        return call

    return make


def seen_wait(own: Callable[..., Any], parts: patches.Parts) -> Callable[..., Any]:
    @functools.wraps(own)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = own(work, *args, **kwargs)
        for part in parts:
            if part.waiting:
                part.after_wait(own, work)
        return outcome

    return wait


def lost(waiting: Dict[int, Tuple[Op, bool]], key: int, op: Op) -> None:
    """A Work is gone: if nobody waited for it, nobody will know when it ended. The garbage collector calls this anywhere."""
    if op.end is None:
        op.is_lost = True
    waiting.pop(key, None)


def before_group(key: int, said: Any) -> None:
    if not getattr(_inside, "is_set", False):
        for part in _seeing:
            part.before(key, said)


def after_group(key: int, said: Any) -> None:
    for part in _seeing:
        part.after(key, said)


def remove_group_hooks() -> None:
    while _groups:
        _, group = _groups.popitem()
        here = group()
        if here is not None:
            here.unregister_pre_hook(HOOK_ID)
            here.unregister_post_hook(HOOK_ID)
