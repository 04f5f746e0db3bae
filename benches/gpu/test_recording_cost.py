"""Tests of recording_cost.py, without a GPU."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import unittest
from pathlib import Path

import recording_cost

WRITER = """
import sys, time
with open(sys.argv[1], "w") as out:
    for _ in range(5000):
        out.write("0 1 2\\n")
    out.flush()
    try:
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        out.write("the end\\n")
"""


class Recording(unittest.TestCase):
    def test_a_way_is_ended_measured_and_its_file_counted(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "out"
            row = recording_cost.record([sys.executable, "-c", WRITER, path], path, 1.0, recording_cost.lines)
            wall = recording_cost.lines(path) / row["readings_a_second"]
            self.assertEqual(recording_cost.lines(path), 5001, "it ended by itself after SIGINT")
            self.assertGreaterEqual(wall, 1.0)
            self.assertAlmostEqual(row["bytes_a_second"] * wall, path.stat().st_size, delta=1)
            self.assertGreater(row["cpu_percent"], 0)
            self.assertGreater(row["resident_mib"], 1)

    def test_readings_of_a_recording_are_its_ticks_on_each_gpu(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "file.sqlite"
            with sqlite3.connect(path) as file:
                file.executescript("CREATE TABLE ticks (n); CREATE TABLE gpus (n);")
                file.executemany("INSERT INTO ticks VALUES (?)", [(n,) for n in range(7)])
                file.executemany("INSERT INTO gpus VALUES (?)", [(n,) for n in range(2)])
            self.assertEqual(recording_cost.readings_of_database(path), 14)


if __name__ == "__main__":
    unittest.main()
