#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file from their source in generator/.

    python3 dashboards/generate.py           writes the dashboards
    python3 dashboards/generate.py --check   fails if a dashboard differs from its source
"""

import json
import pathlib
import sys

from generator import compare_runs, exporter_health, fleet, gpu_memory, layers, training_job

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


def main():
    if sys.argv[1:] == ["--check"]:
        names = differing()
        if names:
            sys.exit(f"{', '.join(names)}: not what dashboards/generate.py writes")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        for name, text in rendered().items():
            (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
