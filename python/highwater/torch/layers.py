"""Records of layers: what each module of one step allocated, kept and gathered.

As FairScale's LayerwiseMemoryTracker counts: a record for each module during which no other module ran, in the order in
which they ended. Unlike it, nothing is synchronised (the allocator's counters are the host's, and up to date), sizes are
right for every type, and containers may be nested. Hooks exist only during the step that is recorded.
"""

import json
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from .._encode import dumps
from .._marks import Later, Mark, client
from . import tensors
from .clock import Clock, Time
from .guard import Hook, Part, guarded
from .loop import in_backward

MOST_RECORDS = 8192
MOST_NAME_BYTES = 128


class Record:
    """One layer in one direction."""

    __slots__ = ("at", "begin", "fields", "memory", "name")

    def __init__(self, name: str, at: Time, begin: Optional[Time], memory: Dict[str, int], fields: Dict[str, Any]) -> None:
        self.name = name
        self.at = at
        self.begin = begin
        self.memory = memory
        self.fields = fields


class Profile(Later):
    """The records of a step, made into text on the sender's thread."""

    def __init__(self, clock: Clock, step: int, records: List[Record]) -> None:
        self.clock = clock
        self.step = step
        self.records = records
        self.known = 0

    def take(self) -> Optional[Sequence[Mark]]:
        resolve = self.clock.resolve
        while self.known < len(self.records):
            record = self.records[self.known]
            if resolve(record.at) is None or (record.begin is not None and resolve(record.begin) is None):
                return None
            self.known += 1
        marks = []
        for record in self.records:
            at, begin = resolve(record.at), None if record.begin is None else resolve(record.begin)
            assert at is not None
            if begin is not None:
                record.fields["duration_ns"] = max(0, at - begin)
            memory = ',"memory":' + json.dumps(record.memory) if record.memory else ""
            head = '{"event":"mark","kind":"layer","name":' + dumps(record.name) + ',"time_unix_nano":'
            marks.append((head, at, f',"step":{self.step}{memory},"layer":{dumps(record.fields)}'))
        return marks

    def __len__(self) -> int:
        return len(self.records)


def allocator_of(device: Any) -> Callable[[], Dict[str, int]]:
    """A function that returns `allocated` and `reserved`. On a CPU nobody knows them."""
    if device is None or device.type != "cuda":
        return dict
    from .allocator import read

    def counters() -> Dict[str, int]:
        stats = read(device)
        return {"allocated": stats["allocated"], "reserved": stats["reserved"]}

    return counters


class Layers(Part):
    """Records the layers of one step in `every`."""

    name = "records of layers"

    def __init__(self, model: Any, every: int, clock: Callable[[], Clock], device: Callable[[], Any]) -> None:
        self.model = model
        self.every = every
        self.clock = clock
        self.device = device
        self.handles: List[Any] = []
        self.records: List[Record] = []
        self.step = 0
        self.is_active = False
        self.begin_with({})

    def begin_with(self, names: Dict[int, str]) -> None:
        self.names = names
        self.previous: Optional[str] = None
        self.before: Tuple[Dict[str, int], Optional[Time]] = ({}, None)
        self.gathered = 0
        # What each FSDP module that runs has gathered.
        self.stack: List[int] = []
        self.counters: Callable[[], Dict[str, int]] = dict

    @guarded
    def begin_step(self, number: int, in_forward: bool = False) -> None:
        """Registers hooks if this step is to be recorded. The root's forward pass may have begun: its new hook comes late."""
        if not self.every or number % self.every or self.is_active or self.clock().stamp() is None:
            return
        modules = dict(self.model.named_modules(remove_duplicate=True))
        if is_compiled(modules.values()):
            # Hooks on modules would make the compiler begin again, twice for each record.
            self.every = 0
            client.say("records of layers are off: torch.compile is in use", False)
            return
        self.begin_with({id(module): short(name or type(module).__name__) for name, module in modules.items()})
        self.counters = allocator_of(self.device())
        self.records, self.step, self.is_active = [], number, True
        for module in modules.values():
            is_fsdp = is_sharded(module)
            # FSDP gathers in a hook of its own, which must find its place in the stack.
            before = module.register_forward_pre_hook(Hook(self.pushed if is_fsdp else self.before_forward), prepend=is_fsdp)
            after = module.register_forward_hook(Hook(self.popped if is_fsdp else self.after_forward))
            self.handles += [before, after]
        if in_forward:
            self.stack += [0] if is_sharded(self.model) else []
            self.enter(self.model)

    @guarded
    def end_step(self) -> None:
        """Sends the records, before the step's end."""
        if not self.is_active:
            return
        self.remove()
        self.is_active = False
        if self.records:
            client.put_later(Profile(self.clock(), self.step, self.records))
        self.records = []

    def remove(self) -> None:
        """Removes the hooks, also after a fault; what hangs in the graph of this step goes with the graph."""
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.remove()

    def gather(self, count: int) -> None:
        """Counts bytes of an all-gather."""
        if self.is_active:
            self.gathered += count
            if self.stack:
                self.stack[-1] += count

    def is_idle(self) -> bool:
        # A recompute in the backward pass is no forward pass, and a compiled module has no layers.
        return not self.is_active or in_backward() or is_compiling()

    @guarded
    def pushed(self, module: Any, inputs: Any) -> None:
        if not self.is_idle():
            self.stack.append(0)
            self.enter(module)

    @guarded
    def before_forward(self, module: Any, inputs: Any) -> None:
        if not self.is_idle():
            self.enter(module)

    def enter(self, module: Any) -> None:
        self.previous = self.names.get(id(module))
        self.before = (self.counters(), self.clock().stamp())

    @guarded
    def popped(self, module: Any, inputs: Any, outputs: Any) -> None:
        if not self.is_idle():
            if self.stack:
                self.stack.pop()
            self.leave(module, inputs, outputs)

    @guarded
    def after_forward(self, module: Any, inputs: Any, outputs: Any) -> None:
        if not self.is_idle():
            self.leave(module, inputs, outputs)

    def leave(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Adds a record, unless another module ran inside this one."""
        name = self.names.get(id(module))
        is_leaf = name is not None and name == self.previous
        self.previous = None
        at = self.clock().stamp() if is_leaf else None
        if name is None or at is None or len(self.records) >= MOST_RECORDS:
            return
        memory, (before, begin) = self.counters(), self.before
        fields = self.fields("forward", module, tensors.new_bytes(outputs, inputs), sum(self.stack))
        if memory and before:
            fields["growth"] = memory["allocated"] - before["allocated"]
        self.records.append(Record(name, at, begin, memory, fields))
        first = next((tensor for tensor in tensors.tensors(outputs)), None)
        node = None if first is None else first.grad_fn
        if node is not None:
            # On the graph and not on the module: a module's backward hooks forbid operations in place.
            node.register_hook(lambda grad_inputs, grad_outputs: self.backward(name, module, grad_inputs, grad_outputs))

    @guarded
    def backward(self, name: str, module: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        at = self.clock().stamp() if self.is_active else None
        if at is None or len(self.records) >= MOST_RECORDS:
            return
        fields = self.fields("backward", module, tensors.new_bytes(grad_outputs, grad_inputs), 0)
        self.records.append(Record(name, at, None, self.counters(), fields))

    def fields(self, direction: str, module: Any, activations: int, gathered_sum: int) -> Dict[str, Any]:
        gathered, self.gathered = self.gathered, 0
        parameters = sum(tensors.size(parameter) for parameter in module.parameters())
        return {
            "direction": direction, "activations": activations, "parameters": parameters, "gathered": gathered,
            "gathered_sum": gathered_sum,
        }


def short(name: str) -> str:
    """A name that the daemon takes: the end says most."""
    return name.encode()[-MOST_NAME_BYTES:].decode(errors="ignore")


def is_sharded(module: Any) -> bool:
    """Whether a module gathers its parameters: FSDP1 wraps modules, FSDP2 changes their class."""
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)


def is_compiled(modules: Iterable[Any]) -> bool:
    """Whether something of the model, or a function that may contain it, has been compiled."""
    for module in modules:
        if module.__dict__.get("_compiled_call_impl") is not None or type(module).__name__ == "OptimizedModule":
            return True
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters and counters["frames"].get("ok", 0))


def is_compiling() -> bool:
    """Whether the compiler traces this code: hooks do nothing then, and do not end its graph."""
    asked = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return bool(asked and asked())
