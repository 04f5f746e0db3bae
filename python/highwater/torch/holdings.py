"""What holds memory at the end of a step: parameters, gradients and optimizer state by walking over them once, and NCCL's own
memory by communicator, if PyTorch says it (2.15, with NCCL 2.29.7). The allocator itself does not count by purpose."""

from typing import Any, Callable, Dict, Iterable, List

import torch
import torch.distributed as dist

from . import tensors
from .guard import Part
from .pace import Pace

# An event has 16 attributes at most.
MOST_GROUPS = 8


def bytes_of(found: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each once: a view of a part keeps all of it."""
    return sum({tensors.place(tensor): tensors.storage_size(tensor) for tensor in found}.values())


class Holdings(Part):
    """Attributes for the ends of the steps whose layers are recorded."""

    name = "attributes of steps"

    def __init__(self, model: Any, optimizers: List[Any], pace: Pace, device: Callable[[], Any]) -> None:
        self.model = model
        self.optimizers = optimizers
        self.pace = pace
        self.device = device
        self.has_nccl = True
        # Optimizers may give gradients free before a step's end is seen, so they are looked at after the backward pass.
        self.gradients = 0

    def is_wanted(self, number: Any) -> bool:
        return not self.is_off and number is not None and self.pace.is_recorded(number)

    def look_at_gradients(self, number: Any) -> None:
        if self.is_wanted(number):
            try:
                self.gradients = bytes_of(p.grad for p in self.model.parameters() if p.grad is not None)
            except Exception as error:
                self.fail(error)

    def attributes(self, number: Any) -> Dict[str, Any]:
        if not self.is_wanted(number):
            return {}
        try:
            return self.known()
        except Exception as error:
            self.fail(error)
            return {}

    def known(self) -> Dict[str, Any]:
        # Not the state of an optimizer of another library, which may be anything.
        states = [optimizer.state for optimizer in self.optimizers if isinstance(optimizer, torch.optim.Optimizer)]
        found = {
            "parameter_bytes": bytes_of(self.model.parameters()),
            "gradient_bytes": self.gradients,
            "optimizer_bytes": bytes_of(tensors.tensors([dict(state) for state in states])),
        }
        self.gradients = 0
        device = self.device()
        if device is not None and device.type == "cuda" and dist.is_available() and dist.is_initialized():
            found.update(self.nccl(device))
        return found

    def nccl(self, device: Any) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        if not self.has_nccl:
            return found
        for group in list(dist.distributed_c10d._world.pg_map)[:MOST_GROUPS]:
            try:
                said = group._get_backend(device).memory_stats()
            except (AttributeError, RuntimeError, NotImplementedError):
                # PyTorch is too old, or the backend is not NCCL. Neither changes later.
                self.has_nccl = False
                return found
            totals = [value for key, value in said.items() if "total" in key.lower()]
            name = str(getattr(group, "group_desc", "") or "undefined")[:24]
            found[f"nccl_bytes.{name}.{group.group_name}"[:48]] = int(totals[0] if totals else sum(said.values()))
        return found
