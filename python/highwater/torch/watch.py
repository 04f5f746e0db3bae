"""Hooks on a model, its optimizers and its data loaders, from which the marks of the loop come."""

import atexit
import difflib
import functools
import inspect
import os
import sys
import weakref
from types import TracebackType
from typing import Any, Callable, Dict, List, Optional, Type

import torch

from .. import _mesh
from .._marks import client
from . import clock, optimizers, patches, tensors
from .allocator import Counters, counters_of, stats_of
from .comm import Comm
from .data import Batches, Data
from .first_steps import FirstSteps
from .guard import Hook, Part, guarded
from .holdings import Holdings
from .layers import Layers, is_compiling
from .loop import Loop, end_of
from .oom import Oom
from .options import Off, Options, listed
from .pace import Pace
from .patches import weakly
from .rest import Rest
from .timeline import Timeline

# During this many first steps, the model may still be moved to its GPU.
STEPS_TO_MOVE = 8

# Those that are open, for the end of the program and for forks. Hooks on the model keep a watch, and nothing else of this
# package does: it ends with its model.
_open: "weakref.WeakSet[Watch]" = weakref.WeakSet()


class Watch(Part):
    """What `watch` returns. `close` removes every hook; as a context manager, it does so at the end."""

    def __init__(self, model: Any, optimizer: Any, dataloader: Any, options: Options) -> None:
        self.models = listed(model)
        if not self.models:
            raise ValueError("there is no model")
        # Several are looked at as one: a list of them that nobody calls.
        self.model = self.models[0] if len(self.models) == 1 else torch.nn.ModuleList(self.models)
        self.optimizers = [optimizers.unwrapped(each) for each in listed(optimizer)]
        self.loaders = listed(dataloader)
        self.device: Any = None
        self.options = options
        self.last_to_move = options.start_step + STEPS_TO_MOVE
        self.undo: List[Callable[[], None]] = []
        self.is_closed = False
        self.seen: Any = None
        # These keep nothing of the watch, as they end what is open after it.
        self.counters = Counters(weakly(self.read_stats))
        self.timeline = Timeline(clock.HostClock(), self.counters)
        self.timeline.peaks = weakly(self.peaks, {})
        pace = Pace(options.layers_every, options.start_step, options.steps_every)
        self.loop = Loop(self.timeline, len(self.optimizers), pace)
        self.rest = Rest(self.models)
        device = weakly(self.get_device)
        self.layers = Layers(self.model, pace, weakly(self.get_clock), device)
        self.layers.is_evaluation = self.loop.is_evaluation
        self.comm = Comm(self.timeline, weakly(self.layers.gather))
        self.holdings = Holdings(self.model, self.optimizers, pace, device)
        self.oom = Oom(weakly(self.read_counters), options.snapshot_dir)
        self.first_steps = FirstSteps(options.history_dir, device, weakly(self.samples, 0))
        self.find_device()

    @guarded
    def attach(self) -> None:
        """Registers every hook."""
        self.loop.on_step += [weakly(self.follow_device), weakly(self.layers.begin_step)]
        self.loop.on_rest = weakly(self.rest.begin), weakly(self.rest.end)
        self.loop.on_backward_end += [weakly(self.layers.backward_ended), weakly(self.look_at_gradients)]
        self.loop.version = weakly(self.version, 0)
        self.timeline.attributes = weakly(self.holdings.attributes, {})
        self.timeline.before_end.append(weakly(self.before_end))
        weakref.finalize(self, end_of, self.loop).atexit = False
        _mesh.note(self.model)
        if self.options.comm and torch.distributed.is_available():
            self.attach_comm()
        self.attach_oom()
        self.undo.append(self.oom.close)
        self.undo.append(self.rest.close)
        self.attach_models()
        for number, optimizer in enumerate(self.optimizers):
            self.undo.append(optimizers.attach(number, optimizer, self))
        for loader in self.loaders:
            data = Data(loader, self.loop)
            self.undo.append(data.close)
            data.attach()
        self.rest.add(lambda: patches.join(self, (torch.autograd,), "backward", seen_backward))
        if self.optimizers:
            self.undo.append(optimizers.attach_scaler(self))
        self.undo.append(self.layers.abort)
        self.loop.on_step_end.append(weakly(self.first_steps.end_step))
        self.undo.append(self.first_steps.close)
        self.first_steps.begin()
        _open.add(self)
        # The latest registration runs first: before the client sends its last marks, and before what the job registered.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def close(self) -> None:
        """Removes every hook and ends what is open. Never raises; a second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        self.loop.close()
        for each in reversed(self.undo):
            try:
                each()
            except Exception as error:
                self.fail(error)
        self.drop()

    def drop(self) -> None:
        """Ends without a mark, and takes nothing away: all that a child process may do, whose parent goes on."""
        self.is_closed = self.is_off = True
        self.undo = []
        for part in (self.loop, self.comm, *([self.seen] if self.seen else [])):
            part.drop()
        self.layers.is_off = True
        self.timeline.before_end = []
        _open.discard(self)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def attach_comm(self) -> None:
        from .collectives import Collectives

        self.seen = seen = Collectives(self.comm, self.models, self.options.group_hooks)
        self.undo.append(seen.close)
        seen.attach()
        self.timeline.before_end.append(weakly(self.comm.flush))
        self.loop.on_step.append(weakly(seen.groups_may_have_come))

    def before_end(self, is_step_end: bool, at: clock.Time) -> None:
        if is_step_end:
            self.layers.end_step(at)

    def samples(self) -> int:
        return self.timeline.batch_size

    def look_at_gradients(self) -> None:
        self.holdings.look_at_gradients(self.timeline.step)

    # The device.

    def get_device(self) -> Any:
        return self.device

    def get_clock(self) -> Any:
        return self.timeline.clock

    def find_device(self) -> None:
        parameter = next(iter(self.model.parameters()), None)
        device = None if parameter is None else tensors.local(parameter).device
        if device is not None and device.type == "cuda":
            self.timeline.use(clock.of(device))
            index = device.index if device.index is not None else torch.cuda.current_device()
            device = torch.device("cuda", index)
            try:
                self.name_gpu(device)
            except Exception as error:
                client.say(f"the GPU is found without its UUID: {error!r}", False)
        self.device = device

    def name_gpu(self, device: Any) -> None:
        """Names the GPU by its UUID, which is right even if the container's indexes are not the node's. Names none if the
        process uses several GPUs, or a MIG instance, which has another UUID."""
        has_several = len({tensors.local(each).device for each in self.model.parameters()}) > 1
        is_part = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        is_spread = any(isinstance(each, torch.nn.DataParallel) for each in self.models)
        if uuid and not has_several and not is_part and not is_spread:
            client.places = {"CUDA_VISIBLE_DEVICES": f"GPU-{uuid}", "LOCAL_RANK": "0"}

    def follow_device(self, number: int, in_forward: bool) -> None:
        """Some programs move the model to its GPU late."""
        if self.device is not None and self.device.type == "cpu" and number < self.last_to_move:
            parameter = next(iter(self.model.parameters()), None)
            if parameter is not None and parameter.is_cuda:
                self.find_device()
                self.attach_oom()
                self.first_steps.begin()

    def attach_oom(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            self.oom.attach()

    def version(self) -> int:
        """A number that changes when an optimizer steps, seen or not."""
        parameter = next((each for each in self.model.parameters() if each.requires_grad), None)
        try:
            return 0 if parameter is None else tensors.local(parameter)._version
        except RuntimeError:
            # Tensors of the inference mode have none.
            return 0

    def read_stats(self) -> Optional[Dict[str, Any]]:
        if self.device is None or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        return stats_of(self.device.index)

    def peaks(self) -> Dict[str, int]:
        return {**self.counters.peaks, **self.layers.take_largest()}

    def read_counters(self) -> Optional[Dict[str, int]]:
        stats = self.read_stats()
        return None if stats is None else counters_of(stats)

    # The models.

    def attach_models(self) -> None:
        for model in self.models:
            self.attach_model(model)

    def attach_model(self, model: Any) -> None:
        """Hooks of the root only. Hooks of this class see a compiled model from outside."""
        def before(module: Any, inputs: Any) -> None:
            if module is model and not is_compiling():
                self.layers.entering = model
                self.forward_begins(model, inputs)

        def after(module: Any, inputs: Any, outputs: Any) -> None:
            if module is model and not is_compiling():
                if outputs is None:
                    self.oom.seen(sys.exc_info()[1])
                self.forward_ended(outputs)

        def attach() -> Callable[[], None]:
            first = model.register_forward_pre_hook(Hook(before), prepend=True)
            last = model.register_forward_hook(Hook(after), always_call=True)

            def remove() -> None:
                first.remove()
                last.remove()

            return remove

        self.rest.add(attach)
        self.attach_compiled(model)

    def attach_compiled(self, model: Any) -> None:
        """After `model.compile()`, hooks are compiled with the model and see nothing. The call of it is timed instead."""
        compiled = model.__dict__.get("_compiled_call_impl")
        under = compiled
        while under is not None:
            if getattr(under, "watch", None) is self:
                return
            under = getattr(under, "under", None)
        if compiled is None:
            return
        call = self.around(compiled, model)
        call.watch = self  # type: ignore[attr-defined]
        self.undo.append(patches.put(model, "_compiled_call_impl", call))

    def around(self, function: Callable[..., Any], model: Any = None) -> Callable[..., Any]:
        """The function, with its calls as forward passes of a model, the first if none is named."""
        model, loop = self.models[0] if model is None else model, self.loop

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or loop.is_off:
                return function(*args, **kwargs)
            self.forward_begins(model, (args, kwargs))
            outputs = None
            try:
                outputs = function(*args, **kwargs)
                return outputs
            finally:
                self.forward_ended(outputs)

        return call

    def batches(self, iterator: Any) -> Any:
        """The iterator, with the time of each batch as the phase `data`."""
        return Batches(iterator, self.loop, -1)

    @guarded
    def attach_compiled_late(self) -> None:
        """A model may have been compiled since."""
        for model in self.models:
            self.attach_compiled(model)

    def forward_begins(self, model: Any, inputs: Any) -> None:
        is_training = model.training and torch.is_grad_enabled()
        if is_training and self.timeline.is_resting:
            self.loop.passes_by()
        else:
            self.loop.forward_begin(is_training, inputs)

    @guarded
    def forward_ended(self, outputs: Any) -> None:
        if self.timeline.is_resting and not self.loop.in_forward:
            return
        self.loop.forward_end(outputs is not None)
        if outputs is not None and torch.is_grad_enabled() and not self.loop.in_forward:
            for tensor in tensors.tensors(outputs):
                # A hook on a leaf would stay for ever.
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self.backward_reached)

    def backward_reached(self, gradient: Any) -> None:
        """Called when the backward pass reaches an output of the model. Queues a callback for the end of the pass, which queues
        the final one. So the final one runs after the callbacks of DDP and FSDP, which wait for their collectives."""
        if self.is_off or self.loop.is_off or is_compiling():
            return
        try:
            if self.loop.backward_begin():
                queue = torch.autograd.Variable._execution_engine.queue_callback
                queue(lambda: self.at_end_of_backward(queue))
        except Exception as error:
            self.fail(error)

    @guarded
    def at_end_of_backward(self, queue: Callable[[Callable[[], None]], None]) -> None:
        queue(self.loop.backward_end)


def seen_backward(own: Callable[..., Any], watches: patches.Parts) -> Callable[..., Any]:
    """The call of a backward pass, which `Tensor.backward` looks up each time."""

    @functools.wraps(own)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return own(*args, **kwargs)
        loops = [watch.loop for watch in watches if not watch.timeline.is_resting]
        for loop in loops:
            loop.backward_called()
        try:
            return own(*args, **kwargs)
        finally:
            for loop in loops:
                loop.backward_returned()

    return backward


def _close_all() -> None:
    """When the program ends."""
    for watch in list(_open):
        watch.close()


def _drop_all() -> None:
    """In a child after a fork: the marks of the open step are the parent's, and so are CUDA's events."""
    watches = list(_open)
    clock.keep_in_child(watches)
    for watch in watches:
        watch.drop()


os.register_at_fork(after_in_child=_drop_all)


def watch(
    model: Any,
    optimizer: Any = None,
    dataloader: Any = None,
    *,
    layers_every: int = 100,
    comm: bool = True,
    start_step: int = 0,
    snapshot_dir: Optional[str] = None,
    history_dir: Optional[str] = None,
    steps_every: Optional[int] = None,
    **options: Any,
) -> Any:
    """Marks the phases of a training loop.

    `model`, `optimizer` and `dataloader` may each be a list of several. `layers_every`: one step in this number records its
    layers (0: none). `comm`: whether collectives are marked. `start_step`: the number of the first step. `snapshot_dir`: a
    folder for a snapshot of the allocator if it finds no memory. `history_dir`: a folder for the allocations of the first
    steps, from which `highwater advise` computes the largest batch. `steps_every`: one step in this number is marked (if it is
    not given, as many as cost at most one percent of the time). Returns a handle with `close()`. Never raises: an argument
    that does not exist is named in the log, and nothing is marked."""
    if not client.room:
        return Off()
    wrong = [each for each in options if each not in Options._fields]
    if wrong:
        known = [*inspect.signature(watch).parameters][:-1]
        near = difflib.get_close_matches(wrong[0], known, 1)
        client.say(f"watch is off: it has no argument {wrong[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return Off()
    try:
        every = None if steps_every is None else int(steps_every)
        asked = Options(int(layers_every), bool(comm), int(start_step), snapshot_dir, history_dir, every, **options)
        made = Watch(model, optimizer, dataloader, asked)
        made.attach()
        if made.is_off:
            # What was attached before the fault must not stay.
            made.close()
            return Off()
        return made
    except Exception as error:
        client.say(f"watch is off: {error!r}")
        return Off()

