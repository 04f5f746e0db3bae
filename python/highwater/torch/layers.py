"""Records of layers: what each module of one step allocated, kept and gathered.

As FairScale's LayerwiseMemoryTracker counts: a record for each module during which no other module ran, in the order in
which they ended. Unlike it, nothing is synchronised (the allocator's counters are the host's, and up to date), sizes are
right for every type, and containers may be nested. Hooks exist only during the step that is recorded.

On CUDA, modules inside which others ran have records too, with how many ran: at the end of their forward pass, and where
their backward pass begins. One step has the history of its allocations beside it, from which come the most that was in live
tensors since the record before, and what each module's forward pass keeps for its backward pass.
"""

import json
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from .._encode import dumps
from .._marks import Later, Mark, client
from . import tensors
from .allocator import stats_of
from .clock import Clock, Time
from .guard import Hook, Part, guarded
from .history import Events, History, Kept, Place, Raw, place_of
from .loop import in_backward
from .pace import STEP_WITH_HISTORY, Pace

MOST_RECORDS = 8192
MOST_NAME_BYTES = 128


# A step is like another if its memory differs by no more than this share.
SAME = 0.02
# How often a step is recorded with its history, if that fails.
MOST_TRIES = 2


class Counted(NamedTuple):
    """The allocator's counters, and the place in its history; both empty where nobody knows them."""

    memory: Dict[str, int]
    place: Optional[Place]


NOTHING = Counted({}, None)


class Record:
    """One layer in one direction."""

    __slots__ = ("at", "backward", "begin", "fields", "kept", "memory", "name", "place")

    def __init__(self, name: str, at: Time, begin: Optional[Time], counted: Counted, fields: Dict[str, Any]) -> None:
        self.name = name
        self.at = at
        self.begin = begin
        self.memory = counted.memory
        self.place = counted.place
        self.fields = fields
        # Of a forward pass: what it was given and gave, and where its backward pass begins.
        self.kept: Optional[Kept] = None
        self.backward: Optional[Place] = None

    def what(self) -> Any:
        """What is the same in steps that do the same."""
        return self.name, self.fields["direction"], self.fields.get("modules")


class Frame:
    """A module whose forward pass has begun."""

    __slots__ = ("begin", "counted", "inner", "module")

    def __init__(self, module: int, counted: Counted, begin: Optional[Time]) -> None:
        self.module = module
        self.counted = counted
        self.begin = begin
        # How many modules have run inside it.
        self.inner = 0


class Known:
    """The records of the latest step that had its history, once that has been looked at."""

    def __init__(self) -> None:
        self.records: List[Record] = []


class Profile(Later):
    """The records of a step, made into text on the sender's thread."""

    def __init__(
        self, clock: Clock, step: int, records: List[Record], history: Optional[Raw], known: Known
    ) -> None:
        self.clock = clock
        self.step = step
        self.records = records
        self.history = history
        self.earlier = known
        self.known = 0

    def add_history(self, events: Events) -> None:
        """What the history of the step says of each record."""
        since = events.begin
        for record in self.records:
            if record.place is None:
                continue
            kept = record.kept
            began = since if kept is None or events.nth(since) < events.nth(kept.begin) else kept.begin
            record.fields["peak"] = events.peak(began, record.place)
            if kept is not None and record.backward is not None:
                record.fields["held"] = events.held(kept, record.backward)
                record.fields["recompute"] = events.recompute(kept, record.backward)
            record.kept, since = None, record.place

    def add_known(self, known: List[Record]) -> None:
        """What the history of an earlier step says, if this one did the same as far as the counters show: the same modules in
        the same order, with as much memory but for what varies from step to step. If it did not, the next recorded step has a
        history of its own: some memory comes later than the third step, as DDP's buckets."""
        most, then = (max((each.memory.get("allocated", 0) for each in of), default=0) for of in (self.records, known))
        is_same = [each.what() for each in self.records] == [each.what() for each in known]
        if not is_same or abs(most - then) > SAME * then:
            self.earlier.records = []
            return
        for record, earlier in zip(self.records, known):
            if record.place is not None and earlier.place is not None and "peak" in earlier.fields:
                since = record.place.allocated - earlier.place.allocated
                record.fields.update({key: earlier.fields[key] for key in ("held", "recompute") if key in earlier.fields})
                record.fields["peak"] = earlier.fields["peak"] + since

    def take(self) -> Optional[Sequence[Mark]]:
        resolve = self.clock.resolve
        while self.known < len(self.records):
            record = self.records[self.known]
            if resolve(record.at) is None or (record.begin is not None and resolve(record.begin) is None):
                return None
            self.known += 1
        history, self.history = self.history, None
        if history is not None:
            self.add_history(Events(*history))
            self.earlier.records = self.records
        elif self.earlier.records is not self.records:
            self.add_known(self.earlier.records)
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


def allocator_of(device: Any) -> Callable[[], Counted]:
    """A function that returns `allocated` and `reserved`, and the place. On a CPU nobody knows them."""
    if device is None or device.type != "cuda":
        return lambda: NOTHING

    def counters() -> Counted:
        stats = stats_of(device.index)
        place = place_of(stats)
        return Counted({"allocated": place.allocated, "reserved": int(stats["reserved_bytes"]["all"]["current"])}, place)

    return counters


class Layers(Part):
    """Records the layers of the steps that the pace names."""

    name = "records of layers"

    def __init__(
        self, model: Any, pace: Pace, clock: Callable[[], Clock], device: Callable[[], Any]
    ) -> None:
        self.model = model
        # The model whose forward pass has just begun, if the watch has several.
        self.entering = model
        self.pace = pace
        # Not of a model that is compiled as a whole.
        self.can_record = True
        # What is known of a step with its history.
        self.known = Known()
        # Whether a forward pass is one of evaluation, where that is known.
        self.is_evaluation: Callable[[], bool] = lambda: not torch.is_grad_enabled()
        self.tries = MOST_TRIES
        # The largest allocation of a step with its history, until it is asked for; 0 is none.
        self.largest = 0
        self.clock = clock
        self.device = device
        self.handles: List[Any] = []
        self.records: List[Record] = []
        self.step = 0
        self.is_active = False
        self.begin_with({})

    def begin_with(self, names: Dict[int, str]) -> None:
        self.names = names
        # The modules whose forward pass has begun, the innermost last.
        self.frames: List[Frame] = []
        self.gathered = 0
        # What each FSDP module that runs has gathered.
        self.stack: List[int] = []
        self.counters: Callable[[], Counted] = lambda: NOTHING
        self.history: Optional[History] = None

    def is_wanted(self, number: int) -> bool:
        return self.can_record and self.pace.is_recorded(number)

    @guarded
    def begin_step(self, number: int, in_forward: bool = False) -> None:
        """Registers hooks if this step is to be recorded. The root's forward pass may have begun: its new hook comes late."""
        if not self.is_wanted(number) or self.is_active or self.clock().stamp() is None:
            return
        modules = eager(self.model)
        if modules is None:
            # Hooks on modules would make the compiler begin again, twice for each record.
            self.can_record = False
            client.say("records of layers are off: torch.compile is in use", False)
            return
        self.begin_with({id(module): short(name or type(module).__name__) for name, module in modules.items()})
        device = self.device()
        self.counters = allocator_of(device)
        self.records, self.step, self.is_active = [], number, True
        for module in modules.values():
            is_fsdp = is_sharded(module)
            # FSDP gathers in a hook of its own, which must find its place in the stack.
            before = module.register_forward_pre_hook(Hook(self.pushed if is_fsdp else self.before_forward), prepend=is_fsdp)
            after = module.register_forward_hook(Hook(self.popped if is_fsdp else self.after_forward))
            self.handles += [before, after]
        is_settled = number >= self.pace.first + STEP_WITH_HISTORY
        if is_settled and not self.known.records and self.tries and device is not None and device.type == "cuda":
            self.tries -= 1
            self.history = History(device.index)
            self.history.start()
        if in_forward:
            self.stack += [0] if is_sharded(self.entering) else []
            self.enter(self.entering)

    @guarded
    def end_step(self, at: Time) -> None:
        """Sends the records, before the step's end, which is at this time."""
        if not self.is_active:
            return
        self.remove()
        self.is_active = False
        history = self.history
        if self.records and self.records[0].place is not None:
            # For the most in live tensors since the last record, in the rest of the step.
            fields = {"direction": "backward", "modules": len(self.names) - 1}
            self.records.append(Record(self.names[id(self.model)], at, None, self.counters(), fields))
        events = None if history is None else history.stop()
        if self.records:
            client.put_later(Profile(self.clock(), self.step, self.records, events, self.known))
        if events is not None:
            self.largest = max((int(each["size"]) for each in events[1]), default=0)
        self.records, self.frames, self.history = [], [], None

    def take_largest(self) -> Dict[str, int]:
        """The largest allocation of the step that has just ended, as its attribute, if its history was recorded."""
        largest, self.largest = self.largest, 0
        return {"largest_allocation_bytes": largest} if largest else {}

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.abort()

    def abort(self) -> None:
        """Ends what is being recorded."""
        self.remove()
        if self.history is not None:
            self.history.end()

    def backward_ended(self) -> None:
        """Removes the hooks, but on CUDA, where peaks count of the whole step: more passes may follow in it."""
        if not self.records or self.records[0].place is None:
            self.remove()

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
        # A recompute in the backward pass is no forward pass, a compiled module has no layers, and evaluation keeps nothing.
        return not self.is_active or in_backward() or is_compiling() or self.is_evaluation()

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
        for frame in self.frames:
            frame.inner += 1
        self.frames.append(Frame(id(module), self.counters(), self.clock().stamp()))

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

    def left(self, module: Any) -> Optional[Frame]:
        """The frame of a module whose forward pass ends. Those of modules that an exception ended are inside it."""
        for nth in range(len(self.frames) - 1, -1, -1):
            if self.frames[nth].module == id(module):
                frame = self.frames[nth]
                del self.frames[nth:]
                return frame
        return None

    def leave(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Adds a record. Of modules inside which others ran only where the allocator's counters are known."""
        frame, name = self.left(module), self.names.get(id(module))
        if frame is None or name is None or (frame.inner and not frame.counted.memory) or len(self.records) >= MOST_RECORDS:
            return
        at, counted = self.clock().stamp(), self.counters()
        if at is None:
            return
        fields: Dict[str, Any]
        if frame.inner:
            fields = {"direction": "forward", "modules": frame.inner}
        else:
            fields = self.fields("forward", module, tensors.new_bytes(outputs, inputs), sum(self.stack))
        if counted.memory and frame.counted.memory:
            fields["growth"] = counted.memory["allocated"] - frame.counted.memory["allocated"]
        record = Record(name, at, frame.begin, counted, fields)
        if self.history is not None and counted.place is not None and frame.counted.place is not None:
            known = [{tensors.place(tensor)[1] for tensor in tensors.tensors(of)} for of in (inputs, outputs)]
            record.kept = Kept(frame.counted.place, counted.place, *known)
        self.records.append(record)
        self.follow(record, module, outputs)

    def follow(self, record: Record, module: Any, outputs: Any) -> None:
        """Waits for the backward pass of a module."""
        first = next((tensor for tensor in tensors.tensors(outputs) if tensor.grad_fn is not None), None)
        if first is None:
            return
        if record.kept is not None or "modules" in record.fields:
            # Before anything of its backward pass runs.
            first.register_hook(lambda gradient: self.backward_begins(record, module))
        node = first.grad_fn
        if node is not None and "modules" not in record.fields:
            # On the graph and not on the module: a module's backward hooks forbid operations in place.
            node.register_hook(lambda grad_inputs, grad_outputs: self.backward(record.name, module, grad_inputs, grad_outputs))

    @guarded
    def backward_begins(self, record: Record, module: Any) -> None:
        at = self.clock().stamp() if self.is_active else None
        if at is None or record.backward is not None:
            return
        counted = self.counters()
        record.backward = counted.place
        if "modules" in record.fields and len(self.records) < MOST_RECORDS:
            fields = {"direction": "backward", "modules": record.fields["modules"]}
            self.records.append(Record(record.name, at, None, counted, fields))

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


def eager(model: Any) -> Optional[Dict[str, Any]]:
    """The modules that may have hooks, by name: not those inside compiled ones, nor those that were compiled in place, whose
    hooks are compiled with them. None if the model, or a function that may contain it, is compiled."""
    if is_compiled(model):
        return None
    found: Dict[str, Any] = {}
    compiled: List[str] = []
    # Outer modules come before inner ones.
    for name, module in model.named_modules(remove_duplicate=True):
        if compiled and name.startswith(tuple(compiled)):
            continue
        if is_compiled(module):
            compiled.append(name + ".")
        if not is_compiled(module) or type(module).__name__ == "OptimizedModule":
            found[name] = module
    return None if not compiled and is_compiler_used() else found


def is_compiler_used() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters and counters["frames"].get("ok", 0))


def is_compiled(module: Any) -> bool:
    """Whether a module is compiled, in place or as a module of its own around it."""
    return module.__dict__.get("_compiled_call_impl") is not None or type(module).__name__ == "OptimizedModule"


def is_compiling() -> bool:
    """Whether the compiler traces this code: hooks do nothing then, and do not end its graph."""
    asked = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return bool(asked and asked())
