"""Applies the advice on which modules to checkpoint, and says what came of it."""

import copyreg
import difflib
import functools
import json
import operator
import os
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch.utils.checkpoint import checkpoint as run_again

from .._marks import client
from .loop import in_backward

Advice = Union[str, "os.PathLike[str]", Mapping[str, Any], Iterable[str]]
# The first backward passes, of this number, are not timed, as they also load kernels. After PASSES more the outcome is logged.
WARM = 3
PASSES = 10
# What wrappers put before the names of a model's modules.
WRAPPERS = ("module.", "_orig_mod.")


class Outcome(NamedTuple):
    """What was predicted of checkpointing, and what came. Bytes in live tensors and seconds a backward pass; None is not
    known."""

    modules: int
    predicted_peak_bytes: Optional[int]
    peak_bytes: Optional[int]
    predicted_seconds: Optional[float]
    seconds: Optional[float]

    def __str__(self) -> str:
        parts = [f"{self.modules} modules are checkpointed"]
        if self.peak_bytes is not None:
            predicted = "" if self.predicted_peak_bytes is None else f", predicted {_gib(self.predicted_peak_bytes)}"
            parts.append(f"the peak in live tensors is {_gib(self.peak_bytes)}{predicted}")
        if self.seconds is not None:
            expected = "" if self.predicted_seconds is None else f", predicted {self.predicted_seconds * 1e3:.1f} ms"
            parts.append(f"running forward passes again takes {self.seconds * 1e3:.1f} ms a backward pass{expected}")
        return "; ".join(parts)


class Checkpointed:
    """Modules that run through `torch.utils.checkpoint`. `close` has them run as before; so does leaving it as a context
    manager."""

    def __init__(self, names: List[str], modules: List[Any], predicted: Mapping[str, Any]) -> None:
        self.names = names
        self.predicted = predicted
        self.undo: List[Callable[[], None]] = []
        self.device = next((each.device for module in modules for each in module.parameters()), torch.device("cpu"))
        # The begins and ends of the passes that ran again, and how often the last module's did.
        self.times: List[Tuple[Any, Any]] = []
        self.passes = 0
        for nth, module in enumerate(modules):
            self.undo.append(self.wrap(module, nth == len(modules) - 1))

    def wrap(self, module: Any, is_last: bool) -> Callable[[], None]:
        """Has a module run so; returns what ends it. Its class gets a child with another `forward`, so that copies, replicas of
        DataParallel and pickles have the weights of their own. What is compiled has its `forward` in the object."""
        if "forward" in module.__dict__:
            own = module.forward
            module.forward = functools.wraps(own)(lambda *args, **kwargs: self.run(own, is_last, args, kwargs))
            return functools.partial(setattr, module, "forward", own)
        plain = type(module)

        class Again(plain):  # type: ignore[misc, valid-type]
            def forward(this, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
                return self.run(super().forward, is_last, args, kwargs)

            def __reduce_ex__(this, protocol: Any) -> Any:  # noqa: N805
                # A copy or a pickle is of the plain class.
                made, arguments, *rest = super().__reduce_ex__(protocol)
                if made is copyreg.__newobj__:  # type: ignore[attr-defined]
                    # Which refuses the class of another.
                    made = operator.methodcaller("__new__", plain)
                return (made, tuple(plain if each is Again else each for each in arguments), *rest)

        Again.__name__, Again.__qualname__, Again.__module__ = plain.__name__, plain.__qualname__, plain.__module__
        module.__class__ = Again

        def restore() -> None:
            if module.__class__ is Again:
                module.__class__ = plain

        return restore

    def run(self, own: Callable[..., Any], is_last: bool, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward():
            return own(*args, **kwargs)

        def again(*args: Any, **kwargs: Any) -> Any:
            return self.timed(own, is_last, args, kwargs) if in_backward() else own(*args, **kwargs)

        return run_again(again, *args, use_reentrant=False, **kwargs)

    def timed(self, own: Callable[..., Any], is_last: bool, args: Any, kwargs: Any) -> Any:
        self.passes += is_last
        begin = self.now() if WARM < self.passes <= WARM + PASSES else None
        try:
            return own(*args, **kwargs)
        finally:
            if begin is not None:
                self.times.append((begin, self.now()))
            elif is_last and self.passes == WARM + PASSES + 1:
                self.log_outcome()

    def log_outcome(self) -> None:
        try:
            client.say(str(self.outcome()))
        except Exception as error:
            client.say(f"checkpoint: its outcome is not known: {error!r}", False)

    def now(self) -> Any:
        if self.device.type != "cuda":
            return None
        try:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        except Exception as error:
            client.say(f"checkpoint: a pass is not timed: {error!r}", False)
            return None

    def outcome(self) -> Outcome:
        """What has come of it so far. Waits for what is known of the GPU's time."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        seconds = None
        known = [(begin, end) for begin, end in self.times if begin is not None and end is not None]
        if known:
            known[-1][1].synchronize()
            seconds = sum(begin.elapsed_time(end) for begin, end in known) / 1e3 / (min(self.passes, WARM + PASSES) - WARM)
        predicted = self.predicted
        return Outcome(
            len(self.names), predicted.get("predicted_peak_bytes"), peak, predicted.get("recomputed_seconds"), seconds
        )

    def close(self) -> None:
        undo, self.undo = self.undo, []
        for each in reversed(undo):
            each()

    def __enter__(self) -> "Checkpointed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def checkpoint(model: Any, advice: Advice) -> Checkpointed:
    """Has modules of a model run through `torch.utils.checkpoint`, each by itself: what they keep for the backward pass is then
    computed again instead. Call it before the first step; before or after DistributedDataParallel, and before `torch.compile`
    of the whole model.

    `advice` is what `highwater advise FILE --json` printed: its path, or what `json.load` made of it. Names of modules, in a
    list, will do too. After thirteen backward passes one line in the log says the peak and the time beside the predicted ones;
    `outcome()` of what is returned gives them at any time, and `close()` ends it. Raises `ValueError` for advice without
    modules, and for a name that the model has not."""
    names, predicted = _read(advice)
    if not names:
        raise ValueError("this advice names no modules: nothing that is checkpointed would lower the peak")
    modules = [_find(model, name) for name in names]
    for name, module in zip(names, modules):
        inner = {id(each) for each in module.modules()} - {id(module)}
        if any(id(other) in inner for other in modules):
            raise ValueError(f"a module inside {name!r} is to be checkpointed as well: one of them is enough")
    return Checkpointed(names, modules, predicted)


def _read(advice: Advice) -> Tuple[List[str], Mapping[str, Any]]:
    """The names of modules, and what is predicted."""
    said: Any = advice
    if isinstance(advice, (str, os.PathLike)):
        with open(advice, encoding="utf-8") as file:
            said = json.load(file)
    if isinstance(said, Mapping):
        # `advise FILE` has it by file, the answer of the API among other advice.
        files = [each for each in said.get("files", []) if isinstance(each.get("checkpoints"), Mapping)]
        if len(files) > 1:
            raise ValueError(f"this is advice on {len(files)} files: ask for that on one")
        said = files[0] if files else said
        said = said.get("checkpoints") if isinstance(said.get("checkpoints"), Mapping) else said
        found = said.get("modules")
        if isinstance(found, Mapping):
            return [str(each["name"]) for each in found["modules"]], found
        raise ValueError(
            "this advice names no modules: it comes from `highwater advise FILE --json`, of a file with a layer profile that "
            "`highwater.torch.watch` made on CUDA"
        )
    names: Dict[str, None] = dict.fromkeys(str(each) for each in said)
    return list(names), {}


def _find(model: Any, name: str) -> Any:
    """The module of a name, which may have been that of the model inside a wrapper, or outside."""
    known = dict(model.named_modules())
    for tried in _names(name):
        if tried in known:
            return known[tried]
    near = difflib.get_close_matches(name, known, 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"the model has no module {name!r}{hint}")


def _names(name: str) -> List[str]:
    bare = name
    for wrapper in WRAPPERS:
        bare = bare.replace(wrapper, "", 1) if bare.startswith(wrapper) else bare
    return [name, bare, *(wrapper + bare for wrapper in WRAPPERS)]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
