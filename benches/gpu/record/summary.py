"""The table at the end: what was recorded, and what is true of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

COLUMNS = ["scenario", "segment", "rank", "steps", "median ms", "comm ms", "retries", "least free GiB"]


def render(out: Path, truths: dict[str, Any]) -> str:
    """One row a segment and rank, and one line a scenario with its findings and its size."""
    rows = [row(name, one) for name, derived in truths.items() for one in derived["segments"]]
    widths = [max(len(line[column]) for line in [COLUMNS, *rows]) for column in range(len(COLUMNS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in [COLUMNS, *rows]]
    return "\n".join([*lines, "", *(verdict(out / name, derived) for name, derived in truths.items())])


def row(name: str, one: dict[str, Any]) -> list[str]:
    """One segment of one rank."""
    free = one["least_free_bytes"]
    return [
        name,
        one["cfg"],
        str(one["rank"]),
        str(one["steps"]),
        f"{1e3 * one['median_step_seconds']:.0f}",
        f"{1e3 * one['median_comm_seconds']:.1f}",
        str(one["retries"]),
        "-" if free is None else f"{free / 2**30:.2f}",
    ]


def verdict(folder: Path, derived: dict[str, Any]) -> str:
    """What must and what may be found, and how large the folder is."""
    kinds = Counter((one["finding"], one["must_find"]) for one in derived["findings"])
    must = ", ".join(f"{count} {kind}" for (kind, needed), count in sorted(kinds.items()) if needed)
    may = ", ".join(f"{count} {kind}" for (kind, needed), count in sorted(kinds.items()) if not needed)
    kilobytes = sum(path.stat().st_size for path in folder.iterdir()) / 1000
    problem = f"; FAILED: {derived['problem']}" if derived["problem"] else ""
    judged = f"must be found: {must or 'nothing'}; may be: {may or 'nothing'}"
    return f"{derived['scenario']}: {judged}; {kilobytes:.0f} kB{problem}"
