"""The truth of a recording: what a detector must find in it, what it may find, and where it must find nothing.

Input: a recording. Output: `truth.json`. An allocator flush is true because PyTorch's `num_alloc_retries` rose, and running out of memory because the job saw it; a slow
rank, a slow loader and a leak are true because the job was configured so; a stretched communication phase and low
memory are measured. What lies between clearly wrong and clearly right is recorded with `must_find` false: finding it
is neither required nor wrong. Outside all findings of its kind and outside `unjudged`, every finding is wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recording import Phase, Recording, Step
from scenarios import Segment

FIRST_STEPS = 2
"""Steps at the begin of a segment that are not judged: memory is mapped in them."""
STRETCH_MUST, STRETCH_MAY = 3.0, 1.5
"""How many times its healthy median a communication phase, or a step without one, lasts."""
LAG_MAY = 1.5
"""How many times its peers' compute a rank's compute lasts."""
LOW_MUST_BYTES = 512 << 20
"""Free memory below which NCCL cannot make a new communicator."""
LOW_MAY_SHARE = 0.02
"""Free memory, as a share of all memory, below which it may be called low."""
LOW_STEPS = 3
"""In how many consecutive steps memory must be so low until it must be found."""


@dataclass(frozen=True)
class Judged:
    """One segment's steps of one rank, without its first ones."""

    segment: Segment
    rank: int
    steps: list[Step]


def derive(recording: Recording) -> dict[str, Any]:
    """The truth about one recording."""
    judged = [
        Judged(segment, rank, steps[FIRST_STEPS:])
        for segment in recording.scenario.segments
        for rank, made in recording.steps.items()
        if len(steps := [step for step in made if step.cfg == segment.cfg]) > FIRST_STEPS
    ]
    findings = [
        *ooms(recording),
        *thrash(recording),
        *starvation(recording, judged),
        *low_headroom(recording, judged),
        *designed(judged),
        *growth(judged),
        *compute_lag(recording, judged),
    ]
    findings.sort(key=lambda one: (one["begin_unix_nano"], one["rank"]))
    return {
        "gpus": recording.scenario.gpus,
        "findings": findings,
        "clean": [interval(one.steps, one.segment.cfg) for one in judged if one.segment.healthy and one.rank == 0],
        "unjudged": unjudged(recording, judged),
        "segments": [summary(recording, one) for one in judged],
    }


def ooms(recording: Recording) -> list[dict[str, Any]]:
    """Each step in which an allocation failed although the allocator had given its cache back, caught or not."""
    found = []
    for step in all_steps(recording):
        if step.ooms_ns and step.cfg != "warmup":
            times = (step.ooms_ns[0], step.ooms_ns[-1])
            found.append(finding("oom", [step], True, {"failed_allocations": len(step.ooms_ns)}, times=times))
    return found


def thrash(recording: Recording) -> list[dict[str, Any]]:
    """Each step in which the allocator flushed its cache, from the first such phase to the last one."""
    found = []
    for step in all_steps(recording):
        phases = [phase for phase in step.phases if phase.retries]
        if phases and step.cfg != "warmup":
            evidence = {"retries": step.retries, "phase": phases[0].name, **swing(recording, step.rank, phases[0])}
            times = (phases[0].begin_ns, phases[-1].end_ns)
            found.append(finding("allocator_thrash", [step], True, evidence, times=times))
    return found


def swing(recording: Recording, gpu: int, phase: Phase) -> dict[str, int]:
    """By how much memory in use fell within a phase, and by how much it grew again after its low."""
    used = recording.memory[gpu].within(phase.begin_ns, phase.end_ns) if gpu in recording.memory else []
    if not used:
        return {}
    highest, fall, lowest_at = used[0], 0, 0
    for position, value in enumerate(used):
        highest = max(highest, value)
        if highest - value > fall:
            fall, lowest_at = highest - value, position
    return {"fall_bytes": fall, "regrowth_bytes": max(used[lowest_at:]) - used[lowest_at]}


def starvation(recording: Recording, judged: list[Judged]) -> list[dict[str, Any]]:
    """Steps in which a rank waited long for one that was short of memory, which the finding is about."""
    if recording.scenario.gpus < 2 or not any(segment.spare for segment in recording.scenario.segments):
        return []
    culprit = recording.scenario.ballast_rank
    retries = {step.number: step.retries for step in recording.steps[culprit]}
    annotated = recording.scenario.parallel == "ddp"
    found = []
    for rank in sorted(recording.steps.keys() - {culprit}):
        own = [one for one in judged if one.rank == rank]
        healthy = [waiting(step, annotated) for one in own if one.segment.healthy for step in one.steps]
        usual = statistics.median(healthy) if healthy else 0.0
        for step in [step for one in own if one.segment.spare is not None for step in one.steps]:
            ratio = waiting(step, annotated) / usual if usual else 0.0
            if ratio >= STRETCH_MAY:
                evidence = {"ratio": round(ratio, 2), "usual_seconds": round(usual, 6)}
                evidence |= {"culprit_retries": retries.get(step.number, 0)}
                starved = finding("comm_starvation", [step], ratio >= STRETCH_MUST, evidence)
                found.append({**starved, "rank": culprit, "gpu": culprit, "waiting_ranks": [rank]})
    return found


def waiting(step: Step, annotated: bool) -> float:
    """Seconds that include waiting for other ranks: the communication phase, or the step if there is none."""
    return step.spent("comm") if annotated else step.seconds


def low_headroom(recording: Recording, judged: list[Judged]) -> list[dict[str, Any]]:
    """Stretches of a segment in which little memory was free."""
    found = []
    for one in judged:
        total = recording.total_bytes.get(one.rank)
        if total is None or one.rank not in recording.memory:
            continue
        free = [(least_free(recording, step, total), step) for step in one.steps]
        may = [step for left, step in free if left is not None and left < LOW_MAY_SHARE * total]
        must = longest_run(left is not None and left < LOW_MUST_BYTES for left, _ in free)
        if not may:
            continue
        evidence = {
            "least_free_bytes": min(left for left, _ in free if left is not None),
            "steps_in_a_row_below_half_gib": must,
            "steps_below_2_percent": len(may),
        }
        found.append(finding("low_headroom", may, must >= LOW_STEPS, evidence))
    return found


def longest_run(flags: Iterable[bool]) -> int:
    """The length of the longest run of true flags."""
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def least_free(recording: Recording, step: Step, total_bytes: int) -> int | None:
    """The least free bytes during a step; None if the log has no data."""
    used = recording.memory[step.rank].within(step.begin_ns, step.end_ns)
    return total_bytes - max(used) if used else None


def designed(judged: list[Judged]) -> list[dict[str, Any]]:
    """A slow loader and a slow rank, where the job was configured so."""
    found = []
    for one in judged:
        if one.segment.loader_ms and not one.segment.healthy:
            waited = [step for step in one.steps if step.spent("data") >= 0.5 * step.seconds]
            if waited:
                share = sum(step.spent("data") for step in waited) / sum(step.seconds for step in waited)
                evidence = {"steps": len(waited), "data_share": round(share, 3), "loader_ms": one.segment.loader_ms}
                found.append(finding("input_stall", waited, True, evidence))
        if one.segment.slow_rank == one.rank:
            peers = [each for each in judged if each.segment is one.segment and each.rank != one.rank]
            if not peers:
                continue
            own = statistics.median(map(compute, one.steps))
            ratio = own / statistics.median(compute(step) for peer in peers for step in peer.steps)
            evidence = {"compute_ratio": round(ratio, 3), "design_ratio": 1 + one.segment.slow_share}
            found.append(finding("straggler", one.steps, True, evidence))
    return found


def growth(judged: list[Judged]) -> list[dict[str, Any]]:
    """A leak, from its begin until memory is full."""
    found = []
    for one in judged:
        if one.segment.leak_mib:
            ooms = [at_ns for step in one.steps for at_ns in step.ooms_ns]
            evidence = {"bytes_per_step": one.segment.leak_mib << 20, "oom_unix_nano": ooms[0] if ooms else None}
            found.append(finding("memory_growth", one.steps, True, evidence))
    return found


def compute_lag(recording: Recording, judged: list[Judged]) -> list[dict[str, Any]]:
    """Steps of a tight segment in which a rank's compute lagged, as it does in a flush: a straggler may be found."""
    by_step: dict[int, dict[int, Step]] = {}
    for one in judged:
        if one.segment.spare is not None and recording.scenario.gpus > 1:
            for step in one.steps:
                by_step.setdefault(step.number, {})[step.rank] = step
    found = []
    for ranks in by_step.values():
        for rank, step in ranks.items():
            peers = [compute(peer) for other, peer in ranks.items() if other != rank]
            ratio = compute(step) / statistics.median(peers) if peers else 0.0
            if ratio >= LAG_MAY:
                found.append(finding("straggler", [step], False, {"compute_ratio": round(ratio, 2)}))
    return found


def compute(step: Step) -> float:
    """Seconds of a step without its communication and its data phase."""
    return step.seconds - step.spent("comm", "data")


def unjudged(recording: Recording, judged: list[Judged]) -> list[dict[str, Any]]:
    """Everything between the stretches that are judged: start, warm-up, first steps, changes of the ballast, end."""
    times = sorted((one.steps[0].begin_ns, one.steps[-1].end_ns) for one in judged)
    begin, found = None, []
    for first, last in times:
        if begin is None or first > begin:
            found.append({"begin_unix_nano": begin, "end_unix_nano": first})
        begin = max(begin or 0, last)
    found.append({"begin_unix_nano": begin, "end_unix_nano": None})
    return found


def summary(recording: Recording, one: Judged) -> dict[str, Any]:
    """One segment of one rank in figures."""
    total = recording.total_bytes.get(one.rank)
    free = [least_free(recording, step, total) for step in one.steps] if total and one.rank in recording.memory else []
    known = [left for left in free if left is not None]
    return {
        **interval(one.steps, one.segment.cfg),
        "rank": one.rank,
        "steps": len(one.steps),
        "median_step_seconds": round(statistics.median(step.seconds for step in one.steps), 4),
        "median_comm_seconds": round(statistics.median(step.spent("comm") for step in one.steps), 4),
        "retries": sum(step.retries for step in one.steps),
        "least_free_bytes": min(known) if known else None,
    }


def interval(steps: list[Step], cfg: str) -> dict[str, Any]:
    """From the first of these steps to the last."""
    return {
        "cfg": cfg,
        "begin_unix_nano": steps[0].begin_ns,
        "end_unix_nano": steps[-1].end_ns,
        "first_step": steps[0].number,
        "last_step": steps[-1].number,
    }


def finding(
    kind: str, steps: list[Step], must: bool, evidence: dict[str, Any], times: tuple[int, int] | None = None
) -> dict[str, Any]:
    """One finding over these steps of one rank, which runs on the GPU of the same number."""
    found = {"finding": kind, "rank": steps[0].rank, "gpu": steps[0].rank, **interval(steps, steps[0].cfg)}
    if times:
        found |= {"begin_unix_nano": times[0], "end_unix_nano": times[1]}
    return {**found, "must_find": must, "evidence": evidence}


def all_steps(recording: Recording) -> Iterable[Step]:
    """The steps of all ranks."""
    return (step for steps in recording.steps.values() for step in steps)
