"""Who a process is, by the environment that each launcher sets."""

import unittest
from unittest import mock

from highwater import _names
from highwater._identity import of_environment

# Environments as the launchers set them, without what is not looked at.
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0,1"}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "prterun-1",
}
INTEL_MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
RAY = {"RAY_JOB_ID": "02000000", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
POD = {"POD_NAMESPACE": "ml", "POD_NAME": "train-0", "POD_UID": "u", "JOB_COMPLETION_INDEX": "6"}


class Identities(unittest.TestCase):
    def of(self, *environments):
        return of_environment({name: value for each in environments for name, value in each.items()})

    def test_each_launcher_says_who_it_is(self):
        for environment, job, rank, world_size, local_rank in [
            (TORCHRUN, "torchrun-x", 3, 8, 1),
            (SLURM, "slurm-77", 5, 16, 1),
            (OPEN_MPI, "mpi-prterun-1", 2, 4, 0),
            (INTEL_MPI, "guessed", 1, 2, 1),
            (RAY, "ray-02000000", 1, 2, 1),
            (POD, "guessed", 6, None, None),
            ({}, "guessed", 0, None, None),
        ]:
            with mock.patch.object(_names, "guess", return_value="guessed"):
                known = self.of(environment)
            self.assertEqual(tuple(known)[:4], (job, rank, world_size, local_rank), environment)

    def test_launchers_within_others_are_told_apart(self):
        # torchrun on each node of a Slurm job; mpirun in a batch script of Slurm, whose variables are the script's.
        self.assertEqual(tuple(self.of(TORCHRUN, SLURM))[:4], ("slurm-77", 3, 8, 1))
        script = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
        self.assertEqual(tuple(self.of(script, OPEN_MPI))[:4], ("slurm-77", 2, 4, 0))
        self.assertEqual(self.of(SLURM, {"HIGHWATER_JOB": "llama"}).job, "llama")

    def test_what_is_no_rank_is_left_out(self):
        for wrong in ("", "x", "-1", "1.5", "nan"):
            known = self.of({"RANK": wrong, "WORLD_SIZE": "8", "LOCAL_RANK": "2"}, SLURM)
            self.assertEqual(tuple(known)[1:4], (5, 16, 1), wrong)
        self.assertEqual(self.of({"RANK": "8", "WORLD_SIZE": "8"}).world_size, None, "a size that the rank does not fit")

    def test_places_from_which_the_daemon_finds_the_gpu(self):
        self.assertEqual(self.of(TORCHRUN).places, {"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "1"})
        self.assertEqual(self.of(SLURM).places, {"LOCAL_RANK": "1"})
        self.assertEqual(self.of(POD).places, {"k8s.namespace.name": "ml", "k8s.pod.name": "train-0", "k8s.pod.uid": "u"})
        self.assertEqual(self.of({"POD_NAME": "train-0"}).places, {}, "of no namespace")
        self.assertEqual(self.of({"LOCAL_RANK": "1"}).places, {"LOCAL_RANK": "1"})


if __name__ == "__main__":
    unittest.main()
