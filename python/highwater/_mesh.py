"""Where this process stands in the job's grid of parallel dimensions: by Megatron, or by the DeviceMesh of its parameters.

Reads what the job has imported already and imports nothing itself. torchtitan's dimensions are those of the DeviceMesh that
its parameters are on.
"""

import sys
from typing import Any, Dict, Optional

from ._marks import client

MEGATRON = "megatron.core.parallel_state"
MEGATRON_AXES = {
    "pp": "get_pipeline_model_parallel_rank",
    "dp": "get_data_parallel_rank",
    "tp": "get_tensor_model_parallel_rank",
    "cp": "get_context_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
}
# Parameters that are looked at: those of one model are on few meshes.
MOST_PARAMETERS = 4096


def note(model: Any) -> None:
    """From now on the marks have the coordinates, if they are known and the job has given none. Never raises."""
    try:
        client.mesh = client.mesh or coordinates(model)
    except Exception as error:
        client.say(f"watch: the coordinates of this rank are not known: {error!r}")


def coordinates(model: Any) -> Optional[Dict[str, int]]:
    """The coordinates by axis, or None where they are not known."""
    return _of_megatron(sys.modules.get(MEGATRON)) or _of_parameters(model)


def _of_megatron(state: Any) -> Optional[Dict[str, int]]:
    if state is None or not state.model_parallel_is_initialized():
        return None
    axes = {}
    for axis, name in MEGATRON_AXES.items():
        if hasattr(state, name):
            axes[axis] = int(getattr(state, name)())
    return axes


def _of_parameters(model: Any) -> Optional[Dict[str, int]]:
    axes: Dict[str, int] = {}
    seen = set()
    for _, parameter in zip(range(MOST_PARAMETERS), model.parameters()):
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or id(mesh) in seen:
            continue
        seen.add(id(mesh))
        for one in (_root(mesh), mesh):
            axes.update(_of_mesh(one))
    return axes or None


def _of_mesh(mesh: Any) -> Dict[str, int]:
    names, places = getattr(mesh, "mesh_dim_names", None), mesh.get_coordinate()
    if not names or places is None:
        return {}
    return {str(name).lower(): int(place) for name, place in zip(names, places)}


def _root(mesh: Any) -> Any:
    """The mesh of the whole job of which this is a part."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    resources = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    if resources is None or not hasattr(resources, "get_root_mesh"):
        return mesh
    return resources.get_root_mesh(mesh)
