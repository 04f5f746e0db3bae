"""Hooks that steps without marks do without: they are taken away while such steps run, and cost nothing then."""

import functools
import weakref
from typing import Any, Callable, List, Optional, Sequence

import torch

from . import patches
from .guard import Part, guarded
from .layers import is_compiled, is_compiler_used

Undo = Callable[[], None]


class Rest(Part):
    """Hooks of one watch. `eval()` of one of its models brings them back, as evaluation is marked always."""

    name = "marks of phases"

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = [weakref.ref(model) for model in models]
        self.attach: List[Callable[[], Undo]] = []
        self.undo: List[Undo] = []
        self.leave: Optional[Undo] = None

    def add(self, attach: Callable[[], Undo]) -> None:
        """Has hooks attached by a function, which returns what takes them away."""
        self.attach.append(attach)
        self.undo.append(attach())

    @guarded
    def begin(self) -> None:
        """The next steps are not marked. Where the compiler is in use, hooks stay and do nothing: it may compile anew for each
        change of them."""
        if self.undo and not is_compiler_used() and not any(is_compiled(model) for model in self.known()):
            self.remove()
            if self.leave is None:
                # Once, and not for each row of steps: Python's caches of attributes are lost with each change of a class, for
                # all modules, and from 3.12 on for good after a thousand.
                self.leave = patches.join(self, (torch.nn.Module,), "eval", seen_eval)

    @guarded
    def end(self) -> None:
        if not self.undo:
            self.undo = [attach() for attach in self.attach]

    def remove(self) -> None:
        undo, self.undo = self.undo, []
        for each in undo:
            each()

    def close(self) -> None:
        if self.leave is not None:
            self.leave()
        self.remove()
        self.attach, self.is_off = [], True

    def known(self) -> List[Any]:
        return [model for model in (each() for each in self.models) if model is not None]


def seen_eval(own: Callable[..., Any], rests: patches.Parts) -> Callable[..., Any]:
    @functools.wraps(own)
    def eval(this: Any) -> Any:
        for rest in rests:
            if any(this is model for model in rest.known()):
                rest.end()
        return own(this)

    return eval
