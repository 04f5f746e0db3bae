"""Hooks on optimizers: the phase `optimizer`, and the end of steps."""

import functools
import weakref
from typing import Any, Callable

import torch

from . import patches
from .layers import is_compiling

# An attribute of PyTorch's optimizers. Accelerate's wrapper is an instance of their class, but lacks it.
HOOKS = "_optimizer_step_post_hooks"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of PyTorch inside one of another library (Accelerate, Lightning)."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if not hasattr(optimizer, HOOKS) and hasattr(inner, HOOKS) else optimizer


def attach(number: int, optimizer: Any, watch: Any) -> Callable[[], None]:
    """Watches the steps of one optimizer; returns what ends that. An optimizer does not keep the watch, as it may outlive the
    model."""
    known = weakref.ref(watch)

    def before(has_closure: bool) -> None:
        here = known()
        if here is not None and not is_compiling() and not here.timeline.is_resting:
            here.attach_compiled_late()
            here.loop.optimizer_begin(number, has_closure)

    def after(*_: Any) -> None:
        here = known()
        if here is not None and not is_compiling():
            here.loop.optimizer_end(number)

    def pre_hook(_: Any, args: Any, kwargs: Any) -> None:
        # The first one is the optimizer.
        before(has_any((*args[1:], *kwargs.values())))

    if runs_hooks(optimizer):
        watch.rest.add(lambda: optimizer.register_step_pre_hook(pre_hook).remove)
        remove: Callable[[], None] = optimizer.register_step_post_hook(after).remove
        return remove
    # An optimizer of another library, or one without hooks.
    step = optimizer.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        before(has_any((*args, *kwargs.values())))
        try:
            return step(*args, **kwargs)
        finally:
            after()

    return patches.put(optimizer, "step", timed)


def runs_hooks(optimizer: Any) -> bool:
    """Whether steps run hooks. Before PyTorch 2.3, torch.compile takes away, for the rest of the process, the wrapper of each
    class's `step` that runs them, and marks `step` as wrapped all the same."""
    if not hasattr(optimizer, HOOKS):
        return False
    step = type(optimizer).step
    if not getattr(step, "hooked", False):
        return True
    # Each wrapper is a function of its own, and all have the same code.
    wrapper = torch.optim.Optimizer.profile_hook_step(lambda _: None)
    while step is not None and getattr(step, "__code__", None) is not wrapper.__code__:
        step = getattr(step, "__wrapped__", None)
    return step is not None


def has_any(given: Any) -> bool:
    return any(each is not None for each in given)


def attach_scaler(watch: Any) -> Callable[[], None]:
    """A GradScaler that finds gradients that are not finite does not call the optimizer. The step ends all the same."""
    # Before 2.3, there is only the one of CUDA.
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    return patches.join(watch, (scaler,), "step", seen_scaler)


def seen_scaler(own: Callable[..., Any], watches: patches.Parts) -> Callable[..., Any]:
    @functools.wraps(own)
    def step(this: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        asked = [(watch, watch.loop.optimizer_calls) for watch in watches]
        outcome = own(this, optimizer, *args, **kwargs)
        inner = unwrapped(optimizer)
        for watch, calls in asked:
            which = next((number for number, each in enumerate(watch.optimizers) if each is inner), None)
            if which is not None and calls == watch.loop.optimizer_calls:
                watch.loop.optimizer_skipped(which)
        return outcome

    return step
