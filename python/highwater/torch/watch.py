"""Hooks on a model, its optimizers and its data loaders, from which the marks of the loop come."""

import atexit
import functools
import os
import sys
import weakref
from types import TracebackType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Type

import torch

from .._marks import client
from . import clock, optimizers, tensors
from .allocator import Counters, read
from .comm import Comm
from .data import Batches, Data
from .guard import Hook, Part, guarded
from .holdings import Holdings
from .layers import Layers, is_compiling
from .loop import Loop
from .oom import Oom
from .timeline import Timeline

# During this many first steps, the model may still be moved to its GPU.
STEPS_TO_MOVE = 8


class Options(NamedTuple):
    """What a watch is asked for."""

    layers_every: int = 100
    comm: bool = True
    start_step: int = 0
    snapshot_dir: Optional[str] = None
    # Whether hooks of process groups may be used, where PyTorch has them.
    group_hooks: bool = True


class Watch(Part):
    """What `watch` returns. `close` removes every hook; as a context manager, it does so at the end."""

    def __init__(self, model: Any, optimizer: Any, dataloader: Any, options: Options) -> None:
        self.model = model
        self.optimizers = [optimizers.unwrapped(each) for each in _listed(optimizer)]
        self.loaders = _listed(dataloader)
        self.device: Any = None
        self.options = options
        self.last_to_move = options.start_step + STEPS_TO_MOVE
        self.undo: List[Callable[[], None]] = []
        self.is_closed = False
        self.timeline = Timeline(clock.HostClock(), Counters(self.read_counters))
        self.loop = Loop(self.timeline, len(self.optimizers), options.start_step)
        self.layers = Layers(model, options.layers_every, lambda: self.timeline.clock, lambda: self.device)
        self.comm = Comm(self.timeline, self.layers.gather)
        self.holdings = Holdings(model, self.optimizers, options.layers_every, lambda: self.device)
        self.oom = Oom(self.read_counters, options.snapshot_dir)
        self.find_device()

    @guarded
    def attach(self) -> None:
        """Registers every hook."""
        self.loop.on_step += [self.follow_device, self.layers.begin_step]
        self.loop.on_backward_end += [self.layers.remove, lambda: self.holdings.look_at_gradients(self.timeline.step)]
        self.timeline.attributes = self.holdings.attributes
        self.timeline.before_end.append(lambda is_step_end: self.layers.end_step() if is_step_end else None)
        if self.options.comm and torch.distributed.is_available():
            self.attach_comm()
        self.oom.attach()
        self.undo.append(self.oom.close)
        self.attach_model()
        for number, optimizer in enumerate(self.optimizers):
            self.undo.append(optimizers.attach(number, optimizer, self.loop, self.attach_compiled_late))
        for loader in self.loaders:
            data = Data(loader, self.loop)
            data.attach()
            self.undo.append(data.close)
        self.attach_backward()
        if self.optimizers:
            self.undo.append(optimizers.attach_scaler(self.optimizers, self.loop))
        self.undo.append(self.layers.remove)
        self.on_exit = _close_at_exit(self)

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
        self.undo = []
        on_exit = getattr(self, "on_exit", None)
        if on_exit is not None:
            atexit.unregister(on_exit)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def attach_comm(self) -> None:
        from .collectives import Collectives

        seen = Collectives(self.comm, self.model, lambda: self.device, self.options.group_hooks)
        seen.attach()
        self.timeline.before_end.append(self.comm.flush)
        self.loop.on_step.append(lambda number, in_forward: seen.attach_groups())
        self.undo.append(seen.close)

    # The device.

    def find_device(self) -> None:
        parameter = next(iter(self.model.parameters()), None)
        device = None if parameter is None else tensors.local(parameter).device
        if device is not None and device.type == "cuda":
            self.timeline.use(clock.of(device))
            index = device.index if device.index is not None else torch.cuda.current_device()
            device = torch.device("cuda", index)
            self.name_gpu(device)
        self.device = device

    @guarded
    def name_gpu(self, device: Any) -> None:
        """The daemon finds a GPU by its UUID, also where the indexes of a container are not the node's. Not where the process
        uses several, and not where what PyTorch sees is a part of a GPU, whose UUID is another one."""
        has_several = len({tensors.local(each).device for each in self.model.parameters()}) > 1
        is_part = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid and not has_several and not is_part and not isinstance(self.model, torch.nn.DataParallel):
            client.places = {"CUDA_VISIBLE_DEVICES": f"GPU-{uuid}", "LOCAL_RANK": "0"}

    def follow_device(self, number: int, in_forward: bool) -> None:
        """Some programs move the model to its GPU late."""
        if self.device is not None and self.device.type == "cpu" and number < self.last_to_move:
            parameter = next(iter(self.model.parameters()), None)
            if parameter is not None and parameter.is_cuda:
                self.find_device()

    def read_counters(self) -> Optional[Dict[str, int]]:
        if self.device is None or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        return read(self.device)

    # The model.

    def attach_model(self) -> None:
        """Hooks of the root only. Hooks of this class see a compiled model from outside."""
        model, loop = self.model, self.loop

        def before(module: Any, inputs: Any) -> None:
            if module is model and not is_compiling():
                loop.forward_begin(module.training and torch.is_grad_enabled())

        def after(module: Any, inputs: Any, outputs: Any) -> None:
            if module is model and not is_compiling():
                if outputs is None:
                    self.oom.seen(sys.exc_info()[1])
                self.forward_ended(outputs)

        self.undo.append(model.register_forward_pre_hook(Hook(before), prepend=True).remove)
        self.undo.append(model.register_forward_hook(Hook(after), always_call=True).remove)
        self.attach_compiled()

    def attach_compiled(self) -> None:
        """After `model.compile()`, hooks are compiled with the model and see nothing. The call of it is timed instead."""
        compiled = self.model.__dict__.get("_compiled_call_impl")
        if compiled is None or getattr(compiled, "is_watched", False):
            return
        model, call = self.model, self.around(compiled)

        def restore() -> None:
            if model.__dict__.get("_compiled_call_impl") is call:
                model._compiled_call_impl = compiled

        call.is_watched = True  # type: ignore[attr-defined]
        model._compiled_call_impl = call
        self.undo.append(restore)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its calls as the model's forward passes."""
        model, loop = self.model, self.loop

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return function(*args, **kwargs)
            loop.forward_begin(model.training and torch.is_grad_enabled())
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
        """The model may have been compiled since."""
        self.attach_compiled()

    @guarded
    def forward_ended(self, outputs: Any) -> None:
        self.loop.forward_end()
        if outputs is not None and torch.is_grad_enabled() and not self.loop.in_forward:
            for tensor in tensors.tensors(outputs):
                # A hook on a leaf would stay for ever.
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self.backward_reached)

    def attach_backward(self) -> None:
        """The call of a backward pass, which `Tensor.backward` looks up each time."""
        own, loop = torch.autograd.backward, self.loop

        @functools.wraps(own)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return own(*args, **kwargs)
            loop.backward_called()
            try:
                return own(*args, **kwargs)
            finally:
                loop.backward_returned()

        def restore() -> None:
            if torch.autograd.backward is backward:
                torch.autograd.backward = own

        torch.autograd.backward = backward
        self.undo.append(restore)

    def backward_reached(self, gradient: Any) -> None:
        """The backward pass comes to an output of the model. What it leaves to be done at its end is not done before it
        begins to end: only then can the callback be put behind the others (those of DDP and FSDP, which wait for their
        collectives)."""
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


def _close_at_exit(watch: Watch) -> Callable[[], None]:
    """Closes a watch when the program ends, before the client sends its last marks."""
    known = weakref.ref(watch)

    def close() -> None:
        here = known()
        if here is not None:
            here.close()

    atexit.register(close)
    return close


def _listed(value: Any) -> List[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class Off:
    """What `watch` returns where it could not begin, or must not."""

    def close(self) -> None:
        pass

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def batches(self, iterator: Any) -> Any:
        return iterator

    def __enter__(self) -> "Off":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def watch(
    model: Any,
    optimizer: Any = None,
    dataloader: Any = None,
    *,
    layers_every: int = 100,
    comm: bool = True,
    start_step: int = 0,
    snapshot_dir: Optional[str] = None,
    **options: Any,
) -> Any:
    """Marks the phases of a training loop; see the package."""
    if not client.room:
        return Off()
    try:
        asked = Options(int(layers_every), bool(comm), int(start_step), snapshot_dir, **options)
        made = Watch(model, optimizer, dataloader, asked)
        made.attach()
        return made
    except Exception as error:
        client.say(f"watch is off: {error!r}")
        return Off()

