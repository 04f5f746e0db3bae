"""Combines the turns and the step times of several runs, and prints their table: one longer run in parts.

    python3 benches/gpu/together.py results-1/ results-2/

Runs that differ in the host's system, its cores, its GPUs, their driver or the daemon's binary are refused: their turns
are not one sample. Two machines that are alike in all of that cannot be distinguished; the caller has to know. Of the
other parts only the step times of the part harm are combined; the rest is in the tables of the runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import costs
import harm
import sampling
import table

SAME = ("host", "cores", "gpus", "highwater", "binary_sha256")
"""What must be equal in the environments of all runs, besides the GPUs' names and driver."""
COSTS = ("costs-idle", "costs-training")
SAMPLING = ("sampling-idle", "sampling-training")
TURNS = (*COSTS, *SAMPLING)
PARTS = (*TURNS, "harm")


def machine(results: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in all runs. Clocks, power and temperature vary from moment to moment and do not count."""
    environment = results["environment"]
    lines = (environment.get("nvidia_smi") or "").splitlines()[1:]
    gpus = [tuple(cell.strip() for cell in line.split(",")[:2]) for line in lines]
    return {**{name: environment.get(name) for name in SAME}, "name and driver": gpus}


def add(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Results with the costs and step times of all runs, by the runs' names. Raises `ValueError`, naming them, if two runs
    were measured on different things, one has no environment, or none has turns or step times."""
    first = next(iter(runs))
    begun: dict[Any, str] = {}
    for name, results in runs.items():
        if not results.get("environment"):
            raise ValueError(f"{name} has no environment: run the part environment too")
        before = begun.setdefault(results.get("begin_unix"), name)
        if before != name:
            raise ValueError(f"{before} and {name} are one and the same run")
        one, other = machine(runs[first]), machine(results)
        differing = [what for what in one if one[what] != other[what]]
        if differing:
            differences = ", ".join(f"{what} ({one[what]} and {other[what]})" for what in differing)
            raise ValueError(f"{first} and {name} were not measured on the same machine and binary: {differences}")
    added: dict[str, Any] = {"environment": runs[first]["environment"]}
    for part in TURNS:
        parts = (results.get(part) or {} for results in runs.values())
        measured = [one for one in parts if any((one.get("rounds") or {}).values())]
        if measured and part in COSTS:
            added[part] = costs.figures(costs.together([one["rounds"] for one in measured]))
        elif measured:
            added[part] = sampling.together(measured)
    steps = [row for results in runs.values() for row in (table.at(results, "harm", "step_ns_by_round") or {}).values()]
    if steps:
        added["harm"] = {"step": harm.figures(steps), "rounds": len(steps)}
    if added.keys().isdisjoint(PARTS):
        raise ValueError(f"no turns in {', '.join(runs)}: run the parts {' or '.join(PARTS)}")
    return added


def failures(runs: dict[str, dict[str, Any]]) -> list[str]:
    """What failed in the runs' costs. Such a run contributes the turns that it has."""
    failed = []
    for name, results in runs.items():
        for part in PARTS:
            error = table.at(results, part, "error")
            failed += [f"{name}: {part}: {error}"] if error else []
            pollers = table.at(results, part, "errors") or {}
            failed += [f"{name}: {part}, {poller}: {why}" for poller, why in pollers.items()]
    return failed


def read(file: Path) -> dict[str, Any]:
    """The results in a file. Raises `ValueError`, naming the file, if it has none."""
    try:
        results = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(results, dict):
        raise ValueError(f"{file}: not the results of a run")
    return results


def main() -> int:
    """Prints the table of all runs together; returns 1, with the reason, if they cannot be combined."""
    parser = argparse.ArgumentParser(description="Combines the turns and step times of several runs.")
    parser.add_argument("results", nargs="+", type=Path, help="folders of bench.py, or their results.json")
    try:
        runs = {}
        for path in parser.parse_args().results:
            file = path / "results.json" if path.is_dir() else path
            runs[str(path)] = read(file)
        added = add(runs)
    except (OSError, ValueError) as error:
        print(f"together.py: {error}", file=sys.stderr)
        return 1
    turns = [f"{part} {len(table.at(added, part, 'rounds', 'daemon') or [])} turns" for part in TURNS]
    print(f"{len(runs)} runs: {', '.join(turns)}, harm {table.at(added, 'harm', 'rounds') or 0} rounds")
    print("\n".join([table.render(added), *(f"FAILED {failed}" for failed in failures(runs))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
