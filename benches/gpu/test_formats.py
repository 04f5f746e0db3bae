"""Tests of formats.py, without a GPU."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

import formats


class Shown(unittest.TestCase):
    def program(self, folder: str, script: str) -> str:
        path = Path(folder) / "highwater"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def test_the_gpu_with_the_highest_peak_is_compared(self) -> None:
        gpus = [{"index": "0", "peak_bytes": None}, {"index": "1", "peak_bytes": 7}, {"index": "2", "peak_bytes": 5}]
        report = json.dumps({"recordings": [{"format": "f", "skipped_rows": 3, "gpus": gpus}]})
        with tempfile.TemporaryDirectory() as folder:
            found = formats.shown(self.program(folder, f"echo '{report}'"), Path("log"))
        self.assertEqual((found["index"], found["skipped"], found["format"]), ("1", 3, "f"))

    def test_a_file_that_cannot_be_read_is_reported(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            found = formats.shown(self.program(folder, "echo 'highwater: log: is empty' >&2; exit 1"), Path("log"))
        self.assertEqual(found, {"problem": "highwater: log: is empty"})


if __name__ == "__main__":
    unittest.main()
