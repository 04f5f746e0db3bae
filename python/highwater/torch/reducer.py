"""A communication hook of DDP that times the reduction of each bucket, for PyTorch without hooks of process groups.

It computes what DDP does without a hook. A hook cannot be taken away from DDP, and a second one is an error, so this one
stays, and gives way to one that the job registers later.
"""

import weakref
from typing import Any, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .comm import Comm

_attached: "weakref.WeakKeyDictionary[Any, Bucket]" = weakref.WeakKeyDictionary()


class Bucket:
    """The state of the hook."""

    def __init__(self, comm: Comm, group: Any) -> None:
        self.comm = comm
        self.group = group
        self.world_size = group.size()
        # A hook of the job, and its state.
        self.other: Tuple[Any, Any] = (None, None)


def timed_allreduce(state: Bucket, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over the ranks."""
    hook, of_hook = state.other
    if hook is not None:
        return hook(of_hook, bucket)
    buffer = bucket.buffer()
    # As the reducer does when it fills a bucket.
    buffer.mul_(1.0 / state.world_size)
    op = state.comm.begin()
    work = state.group.allreduce([buffer])

    def ended(future: Any) -> Any:
        # On CUDA, the current stream is here one that waits for the collective.
        state.comm.end(op)
        return future.value()[0]

    return work.get_future().then(ended)


def attach(model: Any, comm: Comm) -> None:
    """Registers the hook, and lets the job's own take its place later."""
    known = _attached.get(model)
    if known is not None:
        # Of a watch that was closed.
        known.comm = comm
        return
    state = Bucket(comm, model.process_group)
    model.register_comm_hook(state, timed_allreduce)
    model._comm_hooks.clear()
    _attached[model] = state
    _let_others_in()


def _let_others_in() -> None:
    """The class's methods and not the model's: a model with functions of ours could not be pickled."""
    own, builtin = DistributedDataParallel.register_comm_hook, DistributedDataParallel._register_builtin_comm_hook
    if getattr(own, "is_watched", False):
        return

    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        ours = _attached.get(self)
        if ours is None or self._comm_hooks:
            own(self, state, hook)
            return
        self._check_comm_hook(hook)
        self._comm_hooks.append((hook, state))
        ours.other = (hook, state)

    def register_builtin(self: Any, comm_hook_type: Any) -> None:
        ours = _attached.get(self)
        if ours is None:
            builtin(self, comm_hook_type)
        elif comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            ours.other = (fp16_compress_hook, self.process_group)

    register_comm_hook.is_watched = True  # type: ignore[attr-defined]
    register_comm_hook.__doc__ = own.__doc__
    DistributedDataParallel.register_comm_hook = register_comm_hook
    DistributedDataParallel._register_builtin_comm_hook = register_builtin
