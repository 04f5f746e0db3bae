"""Keeps faults of this package out of the job: a hook that fails is switched off, with one line in the log."""

import contextlib
import functools
import logging
from typing import Any, Callable, TypeVar

from .._marks import client

log = logging.getLogger("highwater")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Part:
    """A part of a watch that can be switched off on its own."""

    # What the log calls it.
    name = "watch"
    is_off = False

    def fail(self, error: BaseException) -> None:
        """Switches the part off and logs why."""
        self.is_off = True
        client.say(f"watch: {self.name} is off after a fault of its own: {error!r}")
        log.debug("highwater: %s", self.name, exc_info=error)


def guarded(method: _Function) -> _Function:
    """A method of a `Part` that never raises. It returns None if it fails, and after that."""

    @functools.wraps(method)
    def call(self: Part, *args: Any, **kwargs: Any) -> Any:
        if self.is_off:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            return None

    return call  # type: ignore[return-value]


class Hook:
    """A hook of a module. A copy or pickle of the module gets one that does nothing in its place, and that needs this package
    as little as the module does."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
