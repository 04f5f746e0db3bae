"""The phase `data`: the time that the loop waits for its next batch."""

import weakref
from typing import Any, Callable, Dict, Iterator, Tuple

from .guard import Part, guarded
from .loop import Loop


class Batches:
    """An iterator of a data loader, with the time of each `__next__`. In all else it is that iterator."""

    def __init__(self, iterator: Iterator[Any], loop: Loop, count: int) -> None:
        self._iterator = iterator
        # An iterator may outlive the model.
        self._loop = weakref.ref(loop)
        # How many batches are left, if the loader knows. The call after the last batch is no wait for data.
        self._left = count

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        loop = self._loop()
        if self._left == 0 or loop is None or loop.is_off or loop.timeline.is_resting:
            self._left -= self._left > 0
            return next(self._iterator)
        if self._left < 0:
            # This may be the call after the last batch: known once it returns.
            began = loop.now()
            batch = next(self._iterator)
            loop.data_begin(began)
            loop.data_end()
            loop.saw(batch)
            return batch
        self._left -= 1
        loop.data_begin()
        try:
            batch = next(self._iterator)
        finally:
            loop.data_end()
        loop.saw(batch)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class Data(Part):
    """Watches one loader. `iter` looks at an object's class, so the loader gets a class of its own, below the one it had:
    `isinstance`, `len` and all else stay."""

    name = "phase data"

    def __init__(self, loader: Any, loop: Loop) -> None:
        self.loader = loader
        self.loop = weakref.ref(loop)
        self.had: Any = None

    @guarded
    def attach(self) -> None:
        had = type(self.loader)
        part = self

        def __iter__(loader: Any) -> Any:
            return part.batches(loader, had.__iter__(loader))

        def __reduce_ex__(loader: Any, protocol: Any) -> Any:
            # A copy is not watched, and has the class that another process finds.
            become(loader, had)
            try:
                how = loader.__reduce_ex__(protocol)
            finally:
                become(loader, own)
            return (rebuilt, (how[0], how[1]), *how[2:])

        members: Dict[str, Any] = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__, "__module__": had.__module__}
        members["_highwater"] = self
        own = type(had.__name__, (had,), members)
        become(self.loader, own)
        self.had = had

    def batches(self, loader: Any, iterator: Any) -> Any:
        loop = self.loop()
        if self.is_off or self.had is None or loop is None or loop.is_off:
            return iterator
        try:
            count = len(loader) if has_length(loader) else -1
            return Batches(iterator, loop, count)
        except Exception as error:
            self.fail(error)
            return iterator

    def close(self) -> None:
        self.is_off = True
        kind = type(self.loader)
        # Of several watches, each has a class below the last one's, and they end in any order.
        while getattr(kind.__dict__.get("_highwater"), "is_off", False):
            kind = kind.__mro__[1]
        if kind is not type(self.loader):
            become(self.loader, kind)


def become(loader: Any, kind: type) -> None:
    """Changes an object's class, also where the class hides that attribute, as Accelerate's loaders do."""
    vars(object)["__class__"].__set__(loader, kind)


def rebuilt(make: Callable[..., Any], args: Tuple[Any, ...]) -> Any:
    """A loader from its pickle."""
    return make(*args)


def has_length(loader: Any) -> bool:
    """Whether a loader says truly how many batches it has: an IterableDataset's length is a guess."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    try:
        return len(loader) >= 0
    except Exception:
        return False
