"""A communication hook of DDP that times the reduction of each bucket, for PyTorch without hooks of process groups.

It computes what DDP does without a hook. A hook cannot be taken away from DDP, and a second one is an error, so this one
stays, and gives way to one that the job registers later.
"""

import os
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .comm import Comm

_attached: "weakref.WeakKeyDictionary[Any, Bucket]" = weakref.WeakKeyDictionary()


class Bucket:
    """The state of the hook. The reducer keeps it, and it must keep neither the watch nor the model."""

    def __init__(self, model: Any) -> None:
        self.comm: Callable[[], Optional[Comm]] = lambda: None
        self.group = model.process_group
        self.world_size = self.group.size()
        # A hook of the job, and its state.
        self.other: Tuple[Any, Any] = (None, None)
        # Where the gradient of a parameter was before this backward pass added to it, if that can matter.
        self.places: Optional[Dict[int, int]] = None
        is_power_of_two = not self.world_size & (self.world_size - 1)
        self.has_average = is_power_of_two and _has_average(model, self.group, self.world_size)
        if getattr(model, "gradient_as_bucket_view", False) and not is_power_of_two:
            self.places = {}
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(_noting(parameter, self.places))

    def divide(self, bucket: dist.GradBucket) -> None:
        """As the reducer does when it fills a bucket: it divides gradients that are in the bucket already, and multiplies
        others with the inverse while it copies them. With two or four ranks, both is the same."""
        buffer = bucket.buffer()
        if self.places is None:
            if self.world_size > 1:
                buffer.mul_(1.0 / self.world_size)
            return
        here = buffer.untyped_storage().data_ptr()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            if self.places.get(id(parameter)) == here:
                gradient.div_(self.world_size)
            else:
                gradient.mul_(1.0 / self.world_size)


def _has_average(model: Any, group: Any, world_size: int) -> bool:
    """Whether to use NCCL's average, which saves a pass over the gradients, and is exact for a power of two of ranks. NVLS, the
    reduction inside the switch (from Hopper on, with more than two GPUs), has no average: NCCL would use a slower algorithm,
    which costs more than the pass."""
    if world_size < 2 or dist.get_backend(group) != "nccl":
        return False
    device = next(model.parameters()).device
    return world_size <= 2 or torch.cuda.get_device_capability(device)[0] < 9 or os.environ.get("NCCL_NVLS_ENABLE") == "0"


def _noting(parameter: torch.Tensor, places: Dict[int, int]) -> Callable[[Any], None]:
    """A hook that runs before the gradient is added to the parameter's."""
    known = weakref.ref(parameter)

    def note(_: Any) -> None:
        here = known()
        had = None if here is None else here.grad
        places[id(here)] = 0 if had is None else had.untyped_storage().data_ptr()

    return note


def timed_allreduce(state: Bucket, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over the ranks."""
    hook, of_hook = state.other
    if hook is not None:
        return hook(of_hook, bucket)
    buffer, options = bucket.buffer(), dist.AllreduceOptions()
    if state.has_average and buffer.is_floating_point():
        options.reduceOp = dist.ReduceOp.AVG
    else:
        state.divide(bucket)
    known = state.comm
    comm = known()
    op = None if comm is None else comm.begin()
    del comm
    reduced = state.group.allreduce([buffer], options).get_future()
    # A library that queues on the GPU, as NCCL does, has a result at once. Waiting for another would block the host.
    if buffer.is_cuda and reduced.done():
        comm = known()
        if comm is not None:
            comm.end_after(op, reduced.wait)
        return reduced.then(lambda future: future.value()[0])

    def ended(future: Any) -> Any:
        here = known()
        if here is not None:
            here.end(op)
        return future.value()[0]

    return reduced.then(ended)


def has_other(model: Any) -> bool:
    """Whether the job has registered a hook of its own."""
    ours = _attached.get(model)
    if ours is not None:
        return ours.other[0] is not None
    # Before 2.3, DDP has no list of its hooks; what it logs has the name of one.
    hooks = getattr(model, "_comm_hooks", None)
    return "comm_hook" in model._get_ddp_logging_data() if hooks is None else bool(hooks)


def attach(model: Any, comm: Comm) -> None:
    """Registers the hook, and lets the job's own take its place later."""
    state = _attached.get(model)
    if state is None:
        state = Bucket(model)
        model.register_comm_hook(state, timed_allreduce)
        getattr(model, "_comm_hooks", []).clear()
        _attached[model] = state
        _let_others_in()
    # Or of a watch that was closed.
    state.comm = weakref.ref(comm)


def detach(model: Any, comm: Comm) -> None:
    """Detaches the watch. The hook stays, and reports to no watch."""
    state = _attached.get(model)
    if state is not None and state.comm() is comm:
        state.comm = lambda: None


def _let_others_in() -> None:
    """Lets a later hook of the job replace ours. Patches the class: a model with our functions could not be pickled."""
    own, builtin = DistributedDataParallel.register_comm_hook, DistributedDataParallel._register_builtin_comm_hook
    if getattr(own, "is_watched", False):
        return

    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        ours = _attached.get(self)
        if ours is None or ours.other[0] is not None:
            own(self, state, hook)
            return
        self._check_comm_hook(hook)
        getattr(self, "_comm_hooks", []).append((hook, state))
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
