"""Functions of PyTorch that are replaced while somebody watches.

There is one replacement for each function, whatever the number of watches and the order in which they end. It knows them
weakly: nothing of this process keeps a watch alive, and so no model.
"""

import weakref
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

Function = Callable[..., Any]


class Parts:
    """Parts of watches, as long as they live. It may be changed while another thread goes over it, and by the garbage
    collector at any time: so there is no lock, and a change makes a new tuple."""

    def __init__(self, on_empty: Optional[Callable[[], None]] = None) -> None:
        self.known: Tuple["weakref.ref[Any]", ...] = ()
        self.on_empty = on_empty

    def __iter__(self) -> Iterator[Any]:
        for each in self.known:
            part = each()
            if part is not None:
                yield part

    def add(self, part: Any) -> None:
        self.known = (*self.known, weakref.ref(part, self.without))

    def remove(self, part: Any) -> None:
        for each in self.known:
            if each() is part:
                self.without(each)

    def without(self, gone: "weakref.ref[Any]") -> None:
        self.known = tuple(each for each in self.known if each is not gone)
        if not self.known and self.on_empty is not None:
            self.on_empty()


class Patch:
    """The replacement of one function, in every place where it is found."""

    def __init__(self, places: Tuple[Any, ...], name: str, make: Callable[[Function, Parts], Function]) -> None:
        self.places = places
        self.name = name
        self.own = getattr(places[0], name)
        self.parts = Parts(self.restore)
        self.new = make(self.own, self.parts)
        for place in places:
            setattr(place, name, self.new)

    def restore(self) -> None:
        _patches.pop((id(self.places[0]), self.name), None)
        for place in self.places:
            # Somebody may have wrapped it since. What is inside does nothing then.
            if getattr(place, self.name, None) is self.new:
                setattr(place, self.name, self.own)


_patches: Dict[Tuple[int, str], Patch] = {}


def join(part: Any, places: Tuple[Any, ...], name: str, make: Callable[[Function, Parts], Function]) -> Callable[[], None]:
    """Has a function of modules or classes replaced by `make(function, parts)` while the part lives. Returns what ends it."""
    key = id(places[0]), name
    patch = _patches.get(key)
    if patch is None:
        patch = _patches[key] = Patch(places, name, make)
    patch.parts.add(part)
    known, here = patch, weakref.ref(part)

    def leave() -> None:
        left = here()
        if left is not None:
            known.parts.remove(left)

    return leave


def put(place: Any, name: str, new: Any) -> Callable[[], None]:
    """Sets an attribute of one object. Returns what takes it away, which several do in any order."""
    new.under, new.is_over = place.__dict__.get(name), False
    setattr(place, name, new)

    def restore() -> None:
        new.is_over = True
        while getattr(place.__dict__.get(name), "is_over", False):
            under = place.__dict__[name].under
            if under is None:
                delattr(place, name)
            else:
                setattr(place, name, under)

    return restore


def weakly(method: Function, otherwise: Any = None) -> Function:
    """The method, without keeping its object: `otherwise` is returned once that is gone."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        here = known()
        return otherwise if here is None else here(*args)

    return call
