"""What each recording consists of: a job, and its segments one after the other.

Input: none. Output: scenarios as plain data, which `truth.py` reads again from a recording's `design.json`. A segment
defines what the job does in it; what the allocator makes of that is measured, not planned. Times are seconds or
milliseconds as named, sizes GiB or MiB as named.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Segment:
    """Steps of one kind. It ends after `steps`, or after `seconds` if that comes first."""

    cfg: str
    """Its name, which no other segment of the scenario has."""
    steps: int | None = None
    seconds: float | None = None
    healthy: bool = False
    """Whether nothing may be found in it, except in its first steps."""
    spare: float | None = None
    """Tight: leave this share more than one step needs on the ballast's GPU, so that a second pool does not fit."""
    free_gib: float | None = None
    """Leave this much on the ballast's GPU. If this and `spare` are None, memory stays as it is."""
    loader_ms: float = 0.0
    """How long the loader takes to make one batch."""
    slow_rank: int | None = None
    slow_share: float = 0.0
    """How much longer that rank computes, as a share of its healthy forward and backward pass."""
    leak_mib: int = 0
    """Memory that each step keeps and never frees."""


@dataclass(frozen=True)
class Scenario:
    """One recording: a folder, and a job that is named after it."""

    name: str
    about: str
    segments: tuple[Segment, ...]
    gpus: int = 1
    parallel: str = "none"
    """`none`, `ddp` (gradients all-reduced in a phase of its own) or `fsdp` (collectives inside the passes)."""
    layers: int = 12
    width: int = 2048
    heads: int = 16
    vocabulary: int = 32000
    batch: int = 4
    lengths: tuple[int, ...] = (1280, 1408, 1536, 1664, 1792, 1920, 2048)
    """Sequence lengths, drawn anew each step, the same on all ranks; the last is the longest."""
    auxiliary_every: int = 0
    """Every so many steps a pass on a second stream takes memory, for which PyTorch keeps a pool of its own."""
    auxiliary_share: float = 0.7
    """Its memory, as a share of what a step needs."""
    ballast_rank: int = 0
    allocator: str = ""
    """Settings of PyTorch's allocator."""
    ends_in_oom: bool = False
    limit_seconds: float = 120.0
    """When it is ended, however far it has come, counted from the start of its processes."""
    seed: int = 1

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def from_document(document: dict[str, Any]) -> Scenario:
    """The scenario that `document()` wrote; unknown fields are an error."""
    fields = {**document, "segments": tuple(Segment(**one) for one in document["segments"])}
    return Scenario(**{**fields, "lengths": tuple(document["lengths"])})


def eased(cfg: str = "eased") -> Segment:
    """A healthy segment after a tight one: the ballast is reduced."""
    return Segment(cfg, 40, healthy=True, free_gib=40.0)


def build(healthy_seconds: float) -> dict[str, Scenario]:
    """All scenarios by name, those of one GPU first."""
    every_64 = tuple(range(512, 2049, 64))
    scenarios = [
        Scenario(
            "expandable",
            "expandable segments; in the tight part two pools do not fit together",
            (Segment("free", 60, healthy=True), Segment("tight", 64, spare=0.15), eased()),
            auxiliary_every=8,
            allocator="expandable_segments:True",
        ),
        Scenario(
            "dataloader",
            "the loader is fast, and then takes longer than the step",
            (
                Segment("fast-loader", 90, healthy=True, loader_ms=8.0),
                Segment("slow-loader", 45, loader_ms=350.0),
            ),
        ),
        Scenario(
            "growth-oom",
            "steady, then each step keeps memory until there is none",
            (Segment("steady", 70, healthy=True, free_gib=45.0), Segment("leaking", 400, seconds=60.0, leak_mib=512)),
            ends_in_oom=True,
        ),
        Scenario(
            "healthy",
            "sequence lengths vary, and nothing is wrong",
            (Segment("healthy", seconds=healthy_seconds, healthy=True),),
            layers=16,
            batch=8,
            lengths=every_64,
            limit_seconds=healthy_seconds + 90.0,
        ),
        Scenario(
            "fsdp",
            "sharded over two GPUs; in the tight part two pools do not fit together on rank 0",
            (Segment("free", 50, healthy=True), Segment("tight", 56, spare=0.25), eased()),
            gpus=2,
            parallel="fsdp",
            auxiliary_every=8,
        ),
        Scenario(
            "slow-rank",
            "data-parallel; in the second half rank 1 computes longer",
            (Segment("even", 80, healthy=True), Segment("slow-rank1", 80, slow_rank=1, slow_share=0.6)),
            gpus=2,
            parallel="ddp",
        ),
        Scenario(
            "ballast-ddp",
            "data-parallel; a ballast on rank 0 leaves it short of memory twice",
            (
                Segment("free", 48, healthy=True),
                Segment("tight0.15", 48, spare=0.15),
                eased(),
                Segment("tight0.05", 48, spare=0.05),
                eased("eased-again"),
            ),
            gpus=2,
            parallel="ddp",
            auxiliary_every=8,
        ),
    ]
    return {one.name: one for one in scenarios}


def tiny(scenario: Scenario) -> Scenario:
    """The same on a CPU, to try the scripts: a few steps of a tiny model."""
    segments = tuple(
        replace(
            one,
            steps=20 if one.leak_mib or one.steps is None else 10,
            seconds=None,
            loader_ms=one.loader_ms / 10,
        )
        for one in scenario.segments
    )
    return replace(
        scenario,
        segments=segments,
        layers=1,
        width=64,
        heads=2,
        vocabulary=64,
        batch=2,
        lengths=(32, 48, 64),
        auxiliary_every=min(4, scenario.auxiliary_every),
    )
