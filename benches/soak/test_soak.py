"""What the soak reports as a rise."""

import unittest

import soak


def samples(rise_mib_an_hour: float, files: int = 0) -> list[soak.Sample]:
    """An hour of a daemon whose memory rises on top of a sawtooth, and which opens `files` more files."""
    made = []
    for n in range(360):
        resident = 20 + rise_mib_an_hour * n / 360 + (n % 7) / 10
        made.append(soak.Sample(10.0 * n, int(resident * soak.MIB), 0, 30 + n % 2 + files * n // 360, 14))
    return made


class Soak(unittest.TestCase):
    """Figures with a known slope."""

    def test_slope(self) -> None:
        self.assertAlmostEqual(soak.slope([(0.0, 1.0), (1800.0, 2.0), (3600.0, 3.0)]), 2.0)

    def test_a_saw_stands_still(self) -> None:
        self.assertEqual(soak.judge(samples(0.0), 600, 1.0), [])
        self.assertEqual(soak.judge(samples(0.8), 600, 1.0), [])

    def test_a_rise_is_reported(self) -> None:
        self.assertRegex(soak.judge(samples(7.3), 600, 1.0)[0], r"rises by 7\.\d\d MiB an hour")
        self.assertRegex(soak.judge(samples(0.0, files=8), 600, 1.0)[0], "open files: at most 3")


if __name__ == "__main__":
    unittest.main()
