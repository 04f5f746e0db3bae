"""Coordinates of ranks, read from stand-ins for Megatron and for parameters on a DeviceMesh, and those that a job gives."""

import sys
import unittest
from types import ModuleType, SimpleNamespace
from typing import Any, List, Optional, Tuple
from unittest import mock

import highwater
from highwater._marks import client
from highwater._mesh import MEGATRON, coordinates, note


class Mesh:
    """A stand-in for a DeviceMesh."""

    def __init__(self, names: Optional[Tuple[str, ...]], places: Optional[List[int]], root: Any = None) -> None:
        self.mesh_dim_names, self.places, self.root = names, places, root

    def get_coordinate(self) -> Optional[List[int]]:
        return self.places

    def _get_root_mesh(self) -> Any:
        return self.root or self


def model(*meshes: Any) -> Any:
    parameters = [SimpleNamespace(device_mesh=mesh) if mesh else SimpleNamespace() for mesh in meshes]
    return SimpleNamespace(parameters=lambda: iter(parameters))


class Coordinates(unittest.TestCase):
    def setUp(self) -> None:
        absent = mock.patch.dict(sys.modules)
        absent.start()
        self.addCleanup(absent.stop)
        sys.modules.pop(MEGATRON, None)

    def test_a_job_without_a_mesh_has_none(self) -> None:
        self.assertIsNone(coordinates(model()))
        self.assertIsNone(coordinates(model(None, Mesh(None, [0]), Mesh(("dp",), None))))

    def test_parameters_on_a_part_of_a_mesh_have_the_coordinates_of_the_whole(self) -> None:
        root = Mesh(("pp", "dp_shard", "tp"), [1, 0, 3])
        self.assertEqual(coordinates(model(None, Mesh(("dp_shard",), [0], root))), {"pp": 1, "dp_shard": 0, "tp": 3})
        self.assertEqual(coordinates(model(Mesh(("DP",), [2]))), {"dp": 2})

    def test_megatron_is_asked_once_it_is_initialized(self) -> None:
        state: Any = ModuleType(MEGATRON)
        state.model_parallel_is_initialized = lambda: False
        state.get_pipeline_model_parallel_rank = lambda: 2
        state.get_tensor_model_parallel_rank = lambda: 1
        state.get_data_parallel_rank = lambda: 0
        sys.modules[MEGATRON] = state
        self.assertIsNone(coordinates(model()))
        state.model_parallel_is_initialized = lambda: True
        self.assertEqual(coordinates(model()), {"pp": 2, "tp": 1, "dp": 0})

    def test_what_the_job_gives_stays_and_a_fault_is_none_of_the_job(self) -> None:
        self.addCleanup(setattr, client, "mesh", None)
        note(SimpleNamespace())
        self.assertIsNone(client.mesh)
        note(model(Mesh(("dp",), [2])))
        self.assertEqual(client.mesh, {"dp": 2})
        highwater.configure(mesh={"pp": 1, "dp": "x"})
        note(model(Mesh(("dp",), [2])))
        self.assertEqual(client.mesh, {"pp": 1})


if __name__ == "__main__":
    unittest.main()
