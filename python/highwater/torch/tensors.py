"""The tensors in what modules take and return: nested tuples, lists, dicts, dataclasses. An object is looked at once, so
cycles end."""

import dataclasses
import itertools
from typing import Any, Iterator, List, Set, Tuple

import torch

# A container of more objects than this is not looked at to its end.
MOST_OBJECTS = 100_000


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value, in order, each object once."""
    waiting: List[Any] = [value]
    seen: Set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, dict):
            waiting.extend(reversed(list(each.values())))
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting.extend(reversed(list(each)))
        elif dataclasses.is_dataclass(each) and not isinstance(each, type):
            waiting.extend(getattr(each, field.name, None) for field in reversed(dataclasses.fields(each)))


def batch_size(value: Any, depth: int = 3) -> int:
    """The first dimension of the first tensor that has one: how many samples a batch has. 0 is not known."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else 0
    if depth:
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for each in itertools.islice(members, 8):
            found = batch_size(each, depth - 1)
            if found:
                return found
    return 0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements on this rank."""
    here = local(tensor)
    return int(here.numel() * here.element_size())


def storage_size(tensor: torch.Tensor) -> int:
    """Bytes of the storage of a tensor on this rank."""
    here = local(tensor)
    try:
        return int(here.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return size(here)


def place(tensor: torch.Tensor) -> Tuple[str, int]:
    """The storage of a tensor: two tensors with the same one share memory."""
    here = local(tensor)
    try:
        at = here.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Sparse tensors have no storage of their own.
        at = -id(here)
    return str(here.device), at


def new_bytes(outputs: Any, inputs: Any) -> int:
    """Bytes of the outputs that share no storage with an input."""
    known = {place(tensor) for tensor in tensors(inputs)}
    return sum(size(tensor) for tensor in tensors(outputs) if place(tensor) not in known)
