#!/usr/bin/env python3
"""Logs of GPU memory that people have in public repositories: what highwater reads of each, beside a computation of its own.

    benches/files/real.py FOLDER [--highwater target/release/highwater]

FOLDER has the files of real.tsv as `OWNER+REPOSITORY/NAME`; nothing is fetched. A file whose contents differ from the ones that were
looked at is not compared. For each, real.tsv has how its memory in use stands in a line (a regular expression with one group, in MiB),
or `-` if there is none, and the options that `report` needs. The peak and the number of readings are computed from that, without
highwater. Exits with 1 if one of them differs, or if a file without memory is read.
"""

import json
import re
import subprocess
import sys

import stored

MIB = 1 << 20


def expected(text, pattern):
    """The readings of a file, MiB."""
    if pattern.startswith("total-free:"):
        found = re.findall(pattern.removeprefix("total-free:"), text, re.M)
        return [float(total) - float(free) for total, free in found]
    return [float(value) for value in re.findall(pattern, text, re.M)]


def read(highwater, path, options):
    """What `report` finds: the peak in bytes, the GPUs and what was guessed; or why it refuses."""
    made = subprocess.run([highwater, "report", "--json", *options, path], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return None, made.stderr.strip().removeprefix("highwater: ").removeprefix(f"{path}: ")
    report = json.loads(made.stdout)["recordings"][0]
    peaks = [gpu["peak_bytes"] for gpu in report["gpus"] if gpu["peak_bytes"] is not None]
    return max(peaks, default=None), report


def main():
    arguments = stored.parser(__doc__).parse_args()
    wrong = tried = was_read = 0
    print(f"{'repository and file':66} {'form':26} {'GPUs':>4} {'readings':>8} {'peak':>12}  result")
    for row, name, path in stored.files("real.tsv", arguments.folder):
        tried += 1
        content = path.read_bytes()
        encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
        text = content.decode(encoding, errors="replace")
        readings = [] if row["used"] == "-" else expected(text, row["used"])
        peak, report = read(arguments.highwater, path, row["options"].split())
        if isinstance(report, str):
            is_right = not readings
            gpus, result = "-", ("refused: " if is_right else "NOT READ: ") + report.splitlines()[0][:90]
        else:
            was_read += 1
            # Sizes are printed in whole MiB, or with few digits.
            is_right = peak is None if not readings else abs(peak / MIB - max(readings)) <= max(readings) * 1e-9
            guessed = f"; guessed: {'; '.join(report['assumed'])}" if report["assumed"] else ""
            gpus, result = len(report["gpus"]), ("equal" if is_right else f"DIFFERS: {max(readings, default=0)}") + guessed
        wrong += not is_right
        shown = f"{max(readings):.0f} MiB" if readings else "none"
        print(f"{name:66} {row['form']:26} {gpus:>4} {len(readings):>8} {shown:>12}  {result}")
    print(f"{tried} files, {was_read} read, {wrong} wrong")
    return wrong > 0 or tried == 0


if __name__ == "__main__":
    sys.exit(main())
