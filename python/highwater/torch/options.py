"""What a watch is given, and what stands for one that is off."""

from typing import Any, Callable, List, NamedTuple, Optional


class Options(NamedTuple):
    """What a watch is asked for."""

    layers_every: int = 100
    comm: bool = True
    start_step: int = 0
    snapshot_dir: Optional[str] = None
    # A folder for what the allocator did in the first steps.
    history_dir: Optional[str] = None
    # One step in this number is marked; None is as many as cost at most one percent.
    steps_every: Optional[int] = None
    # Whether hooks of process groups may be used, where PyTorch has them.
    group_hooks: bool = True


def listed(value: Any) -> List[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class Off:
    """What `watch` returns where it could not begin, or must not."""

    def close(self) -> None:
        pass

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def batches(self, iterator: Any) -> Any:
        return iterator

    def __enter__(self) -> "Off":
        return self

    def __exit__(self, *_: Any) -> None:
        pass
