"""Compares the daemon's peaks by phase with those computed offline from a raw 1 kHz log taken beside it.

Input:
- the raw log of `nvml_floor loop 1000 SECONDS raw.csv`: change points of `used` as NVML's first version returns it,
  which includes the driver's reserve; the reserve is subtracted, as given by the log's own `# reserved` lines or
  `--reserved-bytes`;
- the job's local log of its events (`events-rank*.jsonl`), with the times that were sent to the daemon;
- the answer of `GET /api/v1/jobs/{job}/phases?limit=100000`.

Two pollers of 1 kHz never tick at the same instant, so a change within one period of a phase's begin or end may fall
inside for one and outside for the other. A peak agrees *within one sample* if it lies between
- the raw peak over the phase narrowed by one period at each end (for a phase shorter than two periods: the lowest
  value over the widened phase), and
- the raw peak over the phase widened by one period at each end.
*Within two samples* is the same with two periods. *Exact* is the raw peak over the phase itself. Phases touched by a
gap of either poller are counted separately. A gap is more than 1.5 periods between two sweeps of the raw log, as when
the driver blocks, or what the daemon itself reports as one.

Exit status: 0 if every phase outside gaps agrees within one sample, none is missing, and at most 1 % lie in gaps that
only the daemon has; 1 if not; 2 for bad input.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PERIOD_NS = 1_000_000
MATCH_NS = 1_000_000
"""How far the begin that the daemon reports may be from the one that was sent, nanoseconds: else phases differ."""
DAEMON_GAP_SHARE = 0.01
"""Share of the phases that may lie in gaps that the daemon reports and the raw log does not have."""
MIB = 1 << 20


@dataclass
class Series:
    """Change points of one GPU's memory without the driver's reserve, and the stretches without samples."""

    times: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def over(self, begin_ns: int, end_ns: int) -> list[int]:
        """The values during an interval, including the one at its begin; empty before the first sample."""
        first = bisect.bisect_right(self.times, begin_ns) - 1
        return self.values[first : bisect.bisect_right(self.times, end_ns)] if first >= 0 else []

    def bounds(self, begin_ns: int, end_ns: int, margin_ns: int) -> tuple[int, int] | None:
        """The lowest and the highest peak that a poller `margin_ns` apart can have seen; None if not covered."""
        wide = self.over(begin_ns - margin_ns, end_ns + margin_ns)
        if not wide:
            return None
        narrow = self.over(begin_ns + margin_ns, end_ns - margin_ns) if end_ns - begin_ns >= 2 * margin_ns else []
        return (max(narrow) if narrow else min(wide)), max(wide)

    def in_gap(self, begin_ns: int, end_ns: int) -> bool:
        """Whether a gap touches an interval."""
        following = bisect.bisect_left(self.gaps, (begin_ns, begin_ns))
        return any(gap[0] <= end_ns and gap[1] >= begin_ns for gap in self.gaps[max(0, following - 1) : following + 1])


@dataclass(frozen=True)
class Phase:
    """One phase as the job logged it. `step` is None if the job gave none."""

    rank: int
    name: str
    step: int | None
    begin_ns: int
    end_ns: int

    @property
    def key(self) -> tuple[int, str, int | None]:
        """The key that finds it in the daemon's answer."""
        return self.rank, self.name, self.step


@dataclass
class Report:
    """The outcome. `equal`, `within_one` and `within_two` each include the one before; none counts phases in gaps."""

    phases: int = 0
    compared: int = 0
    equal: int = 0
    within_one: int = 0
    within_two: int = 0
    off: int = 0
    in_gap: int = 0
    in_gap_within_one: int = 0
    in_daemon_gap: int = 0
    missing: int = 0
    without_memory: int = 0
    unexpected: int = 0
    not_covered: int = 0
    worst_bytes: int = 0
    worst_in_gap_bytes: int = 0
    gaps: int = 0
    gap_seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the daemon's answer is right and complete."""
        whole = self.off == self.missing == self.without_memory == self.unexpected == 0
        few_gaps = self.in_daemon_gap <= DAEMON_GAP_SHARE * (self.compared + self.in_gap)
        return self.compared > 0 and whole and few_gaps

    def note(self, text: str) -> None:
        """Keeps a few of the findings as examples for people."""
        if len(self.examples) < 20:
            self.examples.append(text)


def read_lines(path: Path) -> Iterable[str]:
    """The lines of a text file, gzip or plain."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from lines


def read_raw(path: Path, reserved_bytes: int | None = None) -> dict[int, Series]:
    """The raw log by GPU, less the reserve. Raises ValueError if a reserve is not known."""
    series: dict[int, Series] = {}
    reserved: dict[int, int] = {}
    gaps: list[tuple[int, int]] = []
    for line in read_lines(path):
        fields = line.lstrip("# ").rstrip("\n").split(",")
        if line.startswith("# reserved,"):
            reserved[int(fields[1])] = int(fields[2])
        elif line.startswith("# gap,"):
            gaps.append((int(fields[1]), int(fields[2])))
        elif not line.startswith("#") and len(fields) == 3:
            one = series.setdefault(int(fields[1]), Series(gaps=gaps))
            one.times.append(int(fields[0]))
            one.values.append(int(fields[2]))
    for gpu, one in series.items():
        reserve = reserved_bytes if reserved_bytes is not None else reserved.get(gpu)
        if reserve is None:
            raise ValueError(f"{path} has no reserve of GPU {gpu}: give --reserved-bytes")
        one.values = [value - reserve for value in one.values]
    return series


def read_phases(paths: Iterable[Path]) -> list[Phase]:
    """The ended phases of the job's local logs, in order."""
    begun: dict[tuple[int, str, int | None], int] = {}
    phases = []
    for path in paths:
        for line in read_lines(path):
            event = json.loads(line)
            if event.get("kind", "phase") != "phase" or event["event"] == "mark":
                continue
            key = (event["rank"], event["name"], event.get("step"))
            if event["event"] == "begin":
                begun[key] = event["time_unix_nano"]
            elif key in begun:
                phases.append(Phase(*key, begun.pop(key), event["time_unix_nano"]))
    return sorted(phases, key=lambda phase: phase.end_ns)


def read_answer(document: Any) -> list[dict[str, Any]]:
    """The phases of the daemon's answer, an object with `phases` or a bare list; steps and layers are left out."""
    phases = document.get("phases") if isinstance(document, dict) else document
    if not isinstance(phases, list):
        raise ValueError("the daemon's answer holds no list of phases")
    return [phase for phase in phases if phase.get("kind", "phase") == "phase"]


def index_answer(answer: list[dict[str, Any]]) -> dict[tuple[int, str, int | None], list[dict[str, Any]]]:
    """The daemon's phases by rank, name and step; a phase may occur more than once in a step."""
    found: dict[tuple[int, str, int | None], list[dict[str, Any]]] = {}
    for phase in answer:
        found.setdefault((phase.get("rank", 0), phase["phase"], phase.get("step")), []).append(phase)
    return found


def take_match(found: dict[tuple[int, str, int | None], list[dict[str, Any]]], phase: Phase) -> dict[str, Any] | None:
    """Removes and returns the daemon's phase that matches a local one, by name and begin; None if there is none."""
    for candidate in found.get(phase.key, []):
        if abs(candidate["begin_unix_nano"] - phase.begin_ns) <= MATCH_NS:
            found[phase.key].remove(candidate)
            return candidate
    return None


def reported_gap(gpu: dict[str, Any]) -> bool:
    """Whether the daemon itself reports a gap in this phase."""
    return any("gap" in name and isinstance(value, (int, float)) and value > 0 for name, value in gpu.items())


def judge(report: Report, one: Series, phase: Phase, gpu: dict[str, Any], period_ns: int) -> None:
    """Compares one phase on one GPU."""
    own = one.over(phase.begin_ns, phase.end_ns)
    close = one.bounds(phase.begin_ns, phase.end_ns, period_ns)
    wide = one.bounds(phase.begin_ns, phase.end_ns, 2 * period_ns)
    if not own or close is None or wide is None:
        report.not_covered += 1
        return
    peak = gpu.get("peak_bytes")
    difference = 0 if peak is None else abs(peak - max(own))
    within_one = peak is not None and close[0] <= peak <= close[1]
    raw_gap = one.in_gap(phase.begin_ns - period_ns, phase.end_ns + period_ns)
    if raw_gap or reported_gap(gpu):
        report.in_gap += 1
        report.in_daemon_gap += not raw_gap
        report.in_gap_within_one += within_one
        report.worst_in_gap_bytes = max(report.worst_in_gap_bytes, difference)
        return
    if peak is None:
        report.without_memory += 1
        return
    report.compared += 1
    report.equal += difference == 0
    report.within_one += within_one
    report.within_two += wide[0] <= peak <= wide[1]
    report.worst_bytes = max(report.worst_bytes, difference)
    if not within_one:
        report.off += 1
        span = f"{(phase.end_ns - phase.begin_ns) / 1e6:.2f} ms"
        report.note(
            f"off: rank {phase.rank} step {phase.step} {phase.name} ({span}): daemon {peak}, raw {max(own)}, "
            f"within one sample {close[0]}..{close[1]}, within two {wide[0]}..{wide[1]}"
        )


def compare(raw: dict[int, Series], phases: list[Phase], answer: Any, period_ns: int = PERIOD_NS) -> Report:
    """The whole comparison. Raises ValueError for an answer of another shape or a GPU that the raw log lacks."""
    report = Report(phases=len(phases))
    found = index_answer(read_answer(answer))
    for phase in phases:
        reported = take_match(found, phase)
        if reported is None:
            report.missing += 1
            report.note(f"missing: rank {phase.rank} step {phase.step} {phase.name}")
            continue
        gpus = reported.get("gpus") or []
        report.without_memory += not gpus
        for gpu in gpus:
            index = int(gpu["gpu"])
            if index not in raw:
                raise ValueError(f"the raw log has no GPU {index}")
            judge(report, raw[index], phase, gpu, period_ns)
    for key, left in found.items():
        report.unexpected += len(left)
        for _ in left:
            report.note("unexpected: rank {} {} step {}".format(*key))
    add_gaps(report, raw, phases)
    return report


def add_gaps(report: Report, raw: dict[int, Series], phases: list[Phase]) -> None:
    """Counts the raw log's gaps from the first phase to the last; all GPUs share them."""
    if not phases or not raw:
        return
    first, last = min(phase.begin_ns for phase in phases), phases[-1].end_ns
    gaps = [gap for gap in next(iter(raw.values())).gaps if gap[0] <= last and gap[1] >= first]
    report.gaps = len(gaps)
    report.gap_seconds = sum(end - begin for begin, end in gaps) / 1e9


def describe(report: Report) -> str:
    """The report for people."""
    lines = [
        f"phases logged by the job        {report.phases}",
        f"compared (phase × GPU, no gap)  {report.compared}",
        f"  equal exactly                 {report.equal}",
        f"  within one sample             {report.within_one}",
        f"  within two samples            {report.within_two}",
        f"  off by more than one sample   {report.off}",
        f"  worst difference              {report.worst_bytes / MIB:.1f} MiB",
        f"touched by a gap                {report.in_gap} ({report.in_gap_within_one} of them within one sample, "
        f"worst {report.worst_in_gap_bytes / MIB:.1f} MiB)",
        f"  in a gap of the daemon only   {report.in_daemon_gap}",
        f"gaps of the raw log             {report.gaps}, {report.gap_seconds * 1e3:.1f} ms in all",
        f"missing from the daemon         {report.missing}",
        f"without memory                  {report.without_memory}",
        f"unexpected                      {report.unexpected}",
        f"not covered by the raw log      {report.not_covered}",
        *report.examples,
        "holds" if report.holds else "DOES NOT HOLD",
    ]
    return "\n".join(lines)


def self_test() -> int:
    """Runs the tests that lie beside this script."""
    import unittest

    import test_check_peaks

    suite = unittest.defaultTestLoader.loadTestsFromModule(test_check_peaks)
    return 0 if unittest.TextTestRunner().run(suite).wasSuccessful() else 1


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares the daemon's peaks by phase with a raw log's.")
    parser.add_argument("--raw", type=Path, help="log of `nvml_floor loop 1000 SECONDS raw.csv`, plain or .gz")
    parser.add_argument("--events", type=Path, nargs="+", help="the job's events-rank*.jsonl, plain or .gz")
    parser.add_argument("--phases", type=Path, help="the daemon's answer, as JSON, plain or .gz")
    parser.add_argument("--reserved-bytes", type=int, help="the driver's reserve, for a log that does not contain it")
    parser.add_argument("--period-ns", type=int, default=PERIOD_NS, help="the pollers' period")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--self-test", action="store_true", help="check this script on made-up logs")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    if not (options.raw and options.events and options.phases):
        parser.error("--raw, --events and --phases are needed")
    try:
        answer = json.loads("".join(read_lines(options.phases)))
        raw = read_raw(options.raw, options.reserved_bytes)
        report = compare(raw, read_phases(options.events), answer, options.period_ns)
    except (OSError, ValueError, KeyError) as error:
        print(f"check_peaks: {error!r}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=1))
    print(describe(report))
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
