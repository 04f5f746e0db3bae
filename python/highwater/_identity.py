"""Who this process is in its job: what launchers say in the environment, and a guessed name if they say none.

Read for the first mark and not at import, because some programs set the environment themselves.
"""

import os
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from . import _names

# A job's name: the variable, and what stands before its value. The first three are what the daemon knows, too.
_JOBS = (
    ("HIGHWATER_JOB", ""),
    ("SLURM_JOB_ID", "slurm-"),
    ("TORCHELASTIC_RUN_ID", "torchrun-"),
    ("RAY_JOB_ID", "ray-"),
    ("PMIX_NAMESPACE", "mpi-"),
)
# torchrun's run id where none was given: every job of the node would have the same name.
_NO_RUN_ID = "none"


class _Launcher(NamedTuple):
    """The variables in which one launcher has a process's rank, the number of ranks, and its rank on the node."""

    rank: str
    world_size: str
    local_rank: str


_LAUNCHERS = (
    # torchrun, and what sets the same: Ray Train, Kubeflow, DeepSpeed, Accelerate.
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # MPICH and Intel MPI.
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    # After MPI's own: a batch script that calls mpirun has Slurm's variables of the script.
    _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    # An indexed Job of Kubernetes.
    _Launcher("JOB_COMPLETION_INDEX", "", ""),
)

# Where the daemon finds the GPU: docs/annotations.md. The right side are the usual names for the downward API's values.
_PLACES = (
    ("k8s.namespace.name", "POD_NAMESPACE"),
    ("k8s.pod.name", "POD_NAME"),
    ("k8s.pod.uid", "POD_UID"),
    ("k8s.container.name", "CONTAINER_NAME"),
)


class Identity(NamedTuple):
    """What the environment says about this process."""

    job: str
    rank: int
    world_size: Optional[int]
    local_rank: Optional[int]
    # Attributes from which the daemon finds the GPU.
    places: Dict[str, str]


def number(value: Any) -> Optional[int]:
    """A whole number that is not negative, or None. A CUDA tensor would have to be waited for, so it is None too."""
    try:
        if getattr(value, "is_cuda", False):
            return None
        whole = int(value)
        return whole if whole >= 0 else None
    except Exception:
        return None


def of_environment(environment: Optional[Mapping[str, str]] = None) -> Identity:
    """The identity of this process, from its environment."""
    known = os.environ if environment is None else environment
    rank, world_size, local_rank = _ranks(known)
    places = {name: known[name] for name in ("CUDA_VISIBLE_DEVICES",) if known.get(name)}
    if local_rank is not None:
        places["LOCAL_RANK"] = str(local_rank)
    if known.get("POD_NAME") and known.get("POD_NAMESPACE"):
        places.update({name: known[variable] for name, variable in _PLACES if known.get(variable)})
    return Identity(_job(known) or _names.guess(known, rank is not None), rank or 0, world_size, local_rank, places)


def _job(known: Mapping[str, str]) -> Optional[str]:
    """The name that the user or a launcher gave."""
    for name, prefix in _JOBS:
        value = known.get(name)
        if value and not (name == "TORCHELASTIC_RUN_ID" and value == _NO_RUN_ID):
            return prefix + value
    return None


def _ranks(known: Mapping[str, str]) -> Tuple[Optional[int], Optional[int], Optional[int]]:
    """Rank, number of ranks and local rank, all of the first launcher whose rank is a number."""
    for launcher in _LAUNCHERS:
        rank = number(known.get(launcher.rank))
        if rank is not None:
            local_rank = number(known.get(launcher.local_rank))
            # A number of ranks that the rank does not fit is another launcher's.
            world_size = number(known.get(launcher.world_size))
            return rank, world_size if world_size and rank < world_size else None, local_rank
    return None, None, number(known.get("LOCAL_RANK"))
