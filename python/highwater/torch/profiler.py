"""A handler for torch.profiler: exports each trace and marks where it is."""

import os
from typing import Any, Callable

import highwater

from .._marks import client


def profiler_handler(directory: str = "profiles") -> Callable[[Any], None]:
    """For `torch.profiler.profile(on_trace_ready=...)`: writes a Chrome trace into the directory, and one mark `profile` with
    its path. Does not raise."""

    def handler(profiler: Any) -> None:
        try:
            rank = client.rank_of_job()
            os.makedirs(directory, exist_ok=True)
            step = int(getattr(profiler, "step_num", 0))
            path = os.path.abspath(os.path.join(directory, f"rank{rank}-{os.getpid()}-step{step}.json"))
            profiler.export_chrome_trace(path)
            highwater.mark("profile", path=path, profiler_step=step)
        except Exception as error:
            client.say(f"no trace was written: {error!r}")

    return handler
