"""An exception that says that a GPU's memory ran out, seen where it leaves a span: what its text says of it.

PyTorch's and CuPy's are known by their class's name, JAX's by the begin of its text. No framework is imported for it."""

import re
from typing import Any, Dict, Optional, Type

_NAME = "OutOfMemoryError"
_JAX = "RESOURCE_EXHAUSTED: Out of memory"
# Longer texts are of something else.
_MOST_TEXT = 4096
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_AMOUNT = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# As in PyTorch 2.1 to 2.15 ("Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 15.56 MiB is free. …
# Of the allocated memory 77.65 GiB is allocated by PyTorch, and 33.51 MiB is reserved by PyTorch but unallocated.").
_REQUESTED = re.compile(rf"Tried to allocate {_AMOUNT}")
_FREE = re.compile(rf"of which {_AMOUNT} is free")
_ALLOCATED = re.compile(rf"{_AMOUNT} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
# "Out of memory while trying to allocate 21474836480 bytes", or "allocating 21474836480 bytes".
_JAX_REQUESTED = re.compile(r"allocat(?:e|ing) (\d+) bytes")
# Set on an exception that was seen: it leaves every span that is open, and is one failure.
_SEEN = "_highwater_seen"


def failed_allocation(kind: Type[BaseException], error: Optional[BaseException]) -> Optional[Dict[str, Any]]:
    """What an exception says of an allocation that failed, bytes; `None` if it is another, or one that was seen before. Never
    raises."""
    try:
        is_named = any(each.__name__ == _NAME for each in kind.__mro__)
        # What is no text yet is not converted: a tensor on a GPU would have to be waited for.
        given = getattr(error, "args", None)
        text = given[0][:_MOST_TEXT] if given and isinstance(given[0], str) else ""
        if not is_named and not text.startswith(_JAX):
            return None
        if getattr(error, _SEEN, False):
            return None
        setattr(error, _SEEN, True)
        return _said(text)
    except Exception:
        return None


def _said(text: str) -> Dict[str, Any]:
    said = {
        "requested": _bytes(_REQUESTED, text),
        "device_free": _bytes(_FREE, text),
        "allocated": _bytes(_ALLOCATED, text),
    }
    unallocated = _bytes(_UNALLOCATED, text)
    if said["allocated"] is not None and unallocated is not None:
        said["reserved"] = said["allocated"] + unallocated
    if said["requested"] is None:
        found = _JAX_REQUESTED.search(text)
        said["requested"] = int(found.group(1)) if found else None
    return {name: value for name, value in said.items() if value is not None}


def _bytes(pattern: "re.Pattern[str]", text: str) -> Optional[int]:
    found = pattern.search(text)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None
