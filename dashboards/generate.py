#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file from their source in generator/.

    python3 dashboards/generate.py           writes the dashboards
    python3 dashboards/generate.py --check   fails if a dashboard differs from its source
    python3 dashboards/generate.py --classic FOLDER
                                             writes them and the alert rules to FOLDER without what reads native histograms
"""

import json
import pathlib
import re
import sys

from generator import compare_runs, exporter_health, fleet, gpu_memory, layers, training_job

# A function that only native histograms have, and the `or` before its classic form. The chart's `highwater.histograms` does the same.
NATIVE = re.compile(r"histogram_(sum|count)\([a-z_]+\([^()]*\)\)\s+or\s+")
HERE = pathlib.Path(__file__).resolve().parent
DASHBOARDS = [fleet, gpu_memory, training_job, layers, compare_runs, exporter_health]


def rendered():
    """The text of each dashboard's file, by the file's name."""
    boards = [module.dashboard() for module in DASHBOARDS]
    return {f"{board.name}.json": json.dumps(board.json(), indent=1, ensure_ascii=False) + "\n" for board in boards}


def differing():
    """The dashboards that differ from their source or have none."""
    wanted = rendered()
    present = {path.name: path.read_text() for path in HERE.glob("*.json")}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def classic(text):
    """PromQL for engines that do not know those functions, such as VictoriaMetrics."""
    return NATIVE.sub("", text)


def write_classic(folder):
    (folder / "alerts").mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (folder / name).write_text(classic(text))
    for path in (HERE / "alerts").glob("*.yaml"):
        (folder / "alerts" / path.name).write_text(classic(path.read_text()))


def main():
    if sys.argv[1:] == ["--check"]:
        names = differing()
        if names:
            sys.exit(f"{', '.join(names)}: not what dashboards/generate.py writes")
    elif sys.argv[1:2] == ["--classic"] and len(sys.argv) == 3:
        write_classic(pathlib.Path(sys.argv[2]))
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        for name, text in rendered().items():
            (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
