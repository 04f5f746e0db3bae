"""Marks steps and phases of a JAX job.

    from highwater import jax as marks

    for number, batch in enumerate(batches):
        with marks.step(number) as step:
            state, loss = step.ready(train_step(state, batch))

JAX queues work on the device and returns at once. `ready` keeps arrays, and the step or phase ends when they are computed:
`jax.block_until_ready` is called on them at its end. Without it, the end is when the host was done. Arrays
that were donated to a later computation are not waited for.

`mark_from_device` marks an instant inside a jitted function, when the device has computed a value.
"""

from types import TracebackType
from typing import Any, List, Optional, Type, TypeVar

import jax

import highwater

from ._marks import client

_Value = TypeVar("_Value")


class Waiting:
    """A step or phase that ends when the arrays that it was given are computed."""

    def __init__(self, span: highwater.Span) -> None:
        self.span = span
        self.arrays: List[Any] = []

    def ready(self, arrays: _Value) -> _Value:
        """Waits for these at the end; returns them."""
        self.arrays.append(arrays)
        return arrays

    def __enter__(self) -> "Waiting":
        self.arrays = []
        self.span.__enter__()
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            # What fails on the device fails here, as it would at the next use of the array: the job's own error.
            if kind is None and self.arrays:
                jax.block_until_ready([each for each in jax.tree_util.tree_leaves(self.arrays) if not is_deleted(each)])
        finally:
            self.arrays = []
            self.span.__exit__(kind, error, trace)


def is_deleted(array: Any) -> bool:
    """Whether the job has given an array to a later computation (donated it). Then nobody can wait for it."""
    asked = getattr(array, "is_deleted", None)
    return bool(asked is not None and asked())


def step(number: Any = None, **attributes: Any) -> Waiting:
    """One iteration of training."""
    return Waiting(highwater.step(number, **attributes))


def phase(name: str, **attributes: Any) -> Waiting:
    """A part of a step."""
    return Waiting(highwater.phase(name, **attributes))


def mark_from_device(name: str, after: Any) -> None:
    """In a jitted function: a mark when the device has computed `after`, an array. JAX calls the host then; it does not wait
    for the host."""

    def called(_: Any) -> None:
        highwater.mark(name)

    try:
        jax.debug.callback(called, after)
    except Exception as error:
        client.say(f"no mark from the device: {error!r}")
