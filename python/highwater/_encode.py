"""JSON of events. What is the same for every event of a name is made once."""

import json
import math
from typing import Any, Mapping, Optional, Tuple

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
dumps = _encoder.encode


def name(value: Any) -> str:
    """The text of a name; the name of its type if it cannot be converted to text."""
    try:
        return value if isinstance(value, str) else str(value)
    except Exception:
        return type(value).__name__


def head(event: str, kind: str, text: str) -> str:
    """The begin of an event's JSON, up to its time."""
    of_kind = "" if kind == "phase" else f',"kind":"{kind}"'
    return f'{{"event":"{event}"{of_kind},"name":{dumps(text)},"time_unix_nano":'


def step_heads(number: Optional[int]) -> Tuple[str, str]:
    """The beginnings of the JSON of a step's begin and of its end, up to the time."""
    fields = '"kind":"step",' if number is None else f'"kind":"step","step":{number},'
    return f'{{"event":"begin",{fields}"time_unix_nano":', f'{{"event":"end",{fields}"time_unix_nano":'


def attributes(values: Mapping[str, Any]) -> str:
    """Attributes as the end of an event's JSON. One that has no text is left out: the mark is worth more."""
    known = {}
    for key, value in values.items():
        try:
            plain = scalar(value)
        except Exception:
            continue
        if plain is not None:
            known[key] = plain
    return ',"attributes":' + dumps(known) if known else ""


def scalar(value: Any) -> Any:
    """What JSON can hold of an attribute: a number, a boolean or text; None is left out. So is a CUDA tensor, which would
    have to be waited for."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return None if getattr(value, "is_cuda", False) else str(value)


def memory(counters: Mapping[str, int]) -> str:
    """Allocator counters as the end of an event's JSON."""
    return ',"memory":' + dumps(dict(counters)) if counters else ""
