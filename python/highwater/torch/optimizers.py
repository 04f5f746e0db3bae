"""Hooks on optimizers: the phase `optimizer`, and the end of steps."""

from typing import Any, Callable, List

import torch

from .layers import is_compiling
from .loop import Loop

# What an optimizer of PyTorch has. Accelerate's is of its class and has nothing of it.
HOOKS = "_optimizer_step_post_hooks"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of PyTorch inside one of another library (Accelerate, Lightning)."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if not hasattr(optimizer, HOOKS) and hasattr(inner, HOOKS) else optimizer


def attach(number: int, optimizer: Any, loop: Loop, before_step: Callable[[], None]) -> Callable[[], None]:
    """Watches the steps of one optimizer; returns what ends that."""

    def before(*_: Any, **__: Any) -> None:
        if not is_compiling():
            before_step()
            loop.optimizer_begin()

    def after(*_: Any, **__: Any) -> None:
        if not is_compiling():
            loop.optimizer_end(number)

    if hasattr(optimizer, HOOKS):
        handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove
    # An optimizer of another library.
    step, had = optimizer.step, optimizer.__dict__.get("step")

    def timed(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return step(*args, **kwargs)
        finally:
            after()

    def restore() -> None:
        if had is not None:
            optimizer.step = had
        else:
            optimizer.__dict__.pop("step", None)

    optimizer.step = timed
    return restore


def attach_scaler(optimizers: List[Any], loop: Loop) -> Callable[[], None]:
    """A GradScaler that finds gradients that are not finite does not call the optimizer. The step ends all the same."""
    scaler = getattr(getattr(torch, "amp", None), "GradScaler", None)
    if scaler is None:
        return lambda: None
    own = scaler.step

    def step(this: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = loop.steps_alone, loop.next_step
        outcome = own(this, optimizer, *args, **kwargs)
        is_ours = any(unwrapped(optimizer) is each for each in optimizers)
        if is_ours and before == (loop.steps_alone, loop.next_step):
            loop.optimizer_skipped()
        return outcome

    def restore() -> None:
        if scaler.__dict__.get("step") is step:
            scaler.step = own

    scaler.step = step
    return restore
