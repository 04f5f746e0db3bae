"""The short table at the end of a run: each figure beside its peers and its target.

Input: the results of the parts, any of which may have failed. Output: text. A figure that was not measured is `-`.
"""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
NOT_MEASURED = "-"
PEERS = {"floor": "the floor's", "nvidia-smi": "nvidia-smi's"}
"""The peers whose CPU the daemon's is compared with, in words."""
FEW_GPUS = 2
"""Up to so many GPUs, the tighter bounds apply."""
FEWEST_STARTS = 6
"""With fewer starts, resampling gives their range instead of a 95 % interval."""
Row = tuple[str, ...]
"""Figure, the daemon, the floor, `nvidia-smi`, the target, and whether the daemon meets it."""
HEADER: Row = ("figure", "highwater", "floor", "nvidia-smi", "bound", "holds")


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash if there is none."""
    return NOT_MEASURED if value is None else format(value, form)


def verdict(condition: bool | None) -> str:
    """Yes, no, or a dash if it is not known."""
    return NOT_MEASURED if condition is None else ("yes" if condition else "NO")


def at(results: dict[str, Any], *path: str) -> Any:
    """A value deep in the results; None if a part of the path is missing."""
    value: Any = results
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def bounds(results: dict[str, Any]) -> dict[str, float]:
    """The most that CPU may be, as a share of each peer's, and that steps may take, as a share of their time without."""
    is_few = (at(results, "environment", "gpus") or 1) <= FEW_GPUS
    return {"floor": 1.10 if is_few else 1.25, "nvidia-smi": 1.0, "step": 1.002 if is_few else 1.005}


def cost_rows(results: dict[str, Any], part: str, load: str) -> list[Row]:
    """CPU, rate and missed ticks under one load."""
    names = ("daemon", *PEERS)
    cpu, rate, missed = (
        [at(results, part, "mean", name, figure) for name in names]
        for figure in ("cpu_percent", "rate_hertz", "missed_percent")
    )
    quiet = [at(results, part, "cpu_quiet", name) for name in names]
    as_many = None if None in (rate[0], rate[1]) else rate[0] >= 0.99 * rate[1]
    few_missed = None if None in (missed[0], missed[1]) else missed[0] <= missed[1] + 0.1
    shares = []
    for turns, which in (("all", ""), ("quiet", " in its quiet turns")):
        for peer, whose in PEERS.items():
            ratio, most = at(results, part, "cpu_ratio", peer, turns), bounds(results)[peer]
            shares.append((f"  as a share of {whose}{which}", interval(ratio), "", "", f"≤{most:.2f}", below(ratio, most)))
    counts = (number(one, ".3f") for one in missed)
    own = (number(one, ".1f") for one in outside_driver(results, part))
    return [
        (f"CPU of one core, {load} (%)", *map(number, cpu), "", ""),
        ("  in each one's quiet turns, the quarter that took least (%)", *map(number, quiet), "", ""),
        *shares,
        ("  of it the sampling thread, as a share of the floor's", interval(at(results, part, "split", "sampling")), "", "", "", ""),
        ("  of it all other threads (% of one core)", interval(at(results, part, "split", "others")), "", "", "", ""),
        (f"sampling outside the driver's calls, {load} (µs a tick)", *own, "", "", ""),
        (f"samples a second, {load}", *(number(one, ".1f") for one in rate), "≥0.99 floor", verdict(as_many)),
        (f"ticks missed, {load} (%)", *counts, "≤floor+0.1", verdict(few_missed)),
    ]


def sampling_rows(results: dict[str, Any], part: str, load: str) -> list[Row]:
    """The daemon's threads beside the floor under one load; none if they were not measured."""
    if part not in results:
        return []
    rate = [at(results, part, "mean", name, "rate_hertz") for name in ("daemon", "floor")]
    as_many = None if None in rate else rate[0] >= 0.99 * rate[1]
    most = bounds(results)["floor"]
    rates = (number(one, ".1f") for one in rate)
    rows: list[Row] = [(f"in short turns, {load}: wake-ups a second", *rates, "", "≥0.99 floor", verdict(as_many))]
    for turns, which in (("all", ""), ("quiet", ", in quiet rounds")):
        sampling, whole = (at(results, part, what, turns) for what in ("sampling", "whole"))
        rows.append((f"  the sampling thread, as a share of the floor{which}", interval(sampling), "", "", "", ""))
        rows.append((f"  with all other threads{which}", interval(whole), "", "", f"≤{most:.2f}", below(whole, most)))
    others = interval(at(results, part, "other_threads"))
    return [*rows, (f"  all other threads, {load}, over a minute (% of one core)", others, "", "", "", "")]


def outside_driver(results: dict[str, Any], part: str) -> tuple[float | None, float | None]:
    """The time on a core that a tick takes besides the calls for the memory of all GPUs, µs: of the daemon's sampling
    thread, and of the floor. It includes waking up."""

    def of(poller: str, cpu_percent: float | None) -> float | None:
        rate, sweep = (at(results, part, "mean", poller, figure) for figure in ("rate_hertz", "sweep_mean_us"))
        return None if None in (cpu_percent, rate, sweep) else 1e4 * cpu_percent / rate - sweep

    daemon = of("daemon", at(results, part, "daemon_threads", "hw-fast"))
    return daemon, of("floor", at(results, part, "mean", "floor", "cpu_percent"))


def dearest(percent: dict[str, float] | None, least: float = 0.005, form: str = ".2f") -> str:
    """Threads or calls, the most expensive first, without those under `least` %."""
    dear = sorted(((used, name) for name, used in (percent or {}).items() if used >= least), reverse=True)
    return ", ".join(f"{name} {used:{form}}" for used, name in dear) or NOT_MEASURED


def made_of(results: dict[str, Any], part: str, load: str) -> list[str]:
    """What the daemon's threads and the driver's calls took over a minute under one load; nothing if that was not measured."""
    parts = at(results, part, "others_made_of")
    if parts is None:
        return []
    threads, calls = (dearest(parts[which], 0.0005, ".3f") for which in ("threads", "calls"))
    return [
        f"the daemon's CPU by thread over a minute, {load} (%): {threads}",
        f"time in the driver by call over that minute, {load} (%): {calls}",
    ]


def energy_rows(results: dict[str, Any]) -> list[Row]:
    """The daemon's energy beside the GPUs' counters; none if they were not compared."""
    part = results.get("energy") or {}
    if "gpus" not in part:
        return []
    shares = ", ".join(number(gpu["ratio"], ".4f") for gpu in part["gpus"])
    counted = ", ".join(number(gpu["counter_joules"], ".0f") for gpu in part["gpus"])
    figure = f"energy over {part['seconds']:.0f} s without reading the counter, as a share of it ({counted} J)"
    return [(figure, shares if part["readings"] == 0 else "the counter was read", "", "", "", "")]


def anonymous_row(results: dict[str, Any]) -> Row:
    """The highest anonymous memory of the daemon in any part. No file backs it, so the kernel cannot reclaim it."""
    turns = [row for part in ("costs-idle", "costs-training") for row in at(results, part, "rounds", "daemon") or []]
    found = [*(row.get("anonymous_bytes") for row in turns), at(results, "peaks", "resident", "RssAnon")]
    highest = max((value for value in found if value), default=None)
    floor = at(results, "costs-idle", "mean", "floor", "anonymous_bytes")
    cells = (number(None if value is None else value / MIB, ".1f") for value in (highest, floor))
    return ("  of it anonymous (MiB)", *cells, "", "", "")


def resident_row(results: dict[str, Any]) -> Row:
    """The daemon's highest resident memory in any part."""
    turns = [row for part in ("costs-idle", "costs-training") for row in at(results, part, "rounds", "daemon") or []]
    found = [*(row["resident_peak_bytes"] for row in turns), at(results, "peaks", "resident", "VmHWM")]
    highest = max((value for value in found if value), default=None)
    mebibytes = None if highest is None else highest / MIB
    floor = at(results, "costs-idle", "mean", "floor", "resident_peak_bytes")
    return (
        "resident memory, highest (MiB)",
        number(mebibytes, ".1f"),
        number(None if floor is None else floor / MIB, ".1f"),
        "",
        "≤32",
        verdict(mebibytes and mebibytes <= 32),
    )


def peak_rows(results: dict[str, Any]) -> list[Row]:
    """Peaks by phase against the raw log."""
    report = at(results, "peaks", "report")
    if report is None:
        return [("peaks by phase", NOT_MEASURED, "", "", "within one sample", NOT_MEASURED)]
    shares = f"{report['equal']} equal, {report['within_one']} within one, of {report['compared']}"
    gaps = f"{report['in_gap']} in gaps ({report['in_daemon_gap']} the daemon's own)"
    apart = f"{gaps}, {report['missing']} missing, {report['off']} off"
    worst = f"{report['worst_bytes'] / MIB:.1f} MiB"
    return [
        ("peaks by phase", shares, "", "", "within one sample", verdict(at(results, "peaks", "holds"))),
        ("  of the others", apart, "", "", "0 missing, 0 off", ""),
        ("  worst difference outside gaps", worst, "", "", "", ""),
    ]


def harm_rows(results: dict[str, Any]) -> list[Row]:
    """Ratios of the job's times with a poller on, to those without."""
    rows: list[Row] = []
    for measure, name, most in (
        ("step", "step time, on/off", bounds(results)["step"]),
        ("malloc_p50", "cudaMalloc 256 MiB p50, on/off", None),
        ("malloc_p99", "cudaMalloc 256 MiB p99, on/off", 1.05),
        ("free_p50", "cudaFree p50, on/off", None),
    ):
        off = at(results, "harm", measure, "off", "milliseconds")
        daemon, floor, smi = (at(results, "harm", measure, poller) for poller in ("daemon", "floor", "nvidia-smi"))
        to_hold = f"≤{most}" if most else ""
        title = f"{name} ({number(off, '.3f')} ms off)"
        rows.append((title, interval(daemon), interval(floor), interval(smi), to_hold, below(daemon, most) if most else ""))
    return rows


def below(outcome: dict[str, Any] | None, most: float) -> str:
    """Yes or no if the whole interval says so; `open` if the bound lies inside it, or if there are too few starts
    for an interval."""
    if not outcome or "ratio" not in outcome:
        return NOT_MEASURED
    if outcome.get("starts", FEWEST_STARTS) < FEWEST_STARTS or outcome["ratio_low"] <= most < outcome["ratio_high"]:
        return "open"
    return verdict(outcome["ratio_high"] <= most)


def interval(outcome: dict[str, Any] | None) -> str:
    """A ratio with its 95 % interval."""
    if not outcome or "ratio" not in outcome:
        return NOT_MEASURED
    return f"{outcome['ratio']:.4f} [{outcome['ratio_low']:.4f} {outcome['ratio_high']:.4f}]"


def kill_rows(results: dict[str, Any]) -> list[Row]:
    """The effect of SIGKILL of the daemon on the job."""
    part = results.get("kills") or {}
    if "kills" not in part:
        return [("kill -9 beside a job", NOT_MEASURED, "", "", "no XID, job goes on", NOT_MEASURED)]
    xids = int(part["xids_witnessed"] or 0) + len(part["xids_logged"] or [])
    near, far = part["near_median_ms"], part["far_median_ms"]
    outcome = f"{xids} XID, steps {number(near)} ms near, {number(far)} ms else"
    holds = verdict(xids == 0 and part["job_exit_status"] == 0)
    return [(f"kill -9 beside a job, {part['kills']} times", outcome, "", "", "no XID, job goes on", holds)]


def late_row(name: str, part: dict[str, Any], kind: str, counted: str) -> Row:
    """Ticks that woke late in windows of a kind, with how many of something were counted in them, beside those in
    windows without."""
    if kind not in part:
        return (name, NOT_MEASURED, "", "", "≤without+0.01", NOT_MEASURED)
    late, without = (100 * part[which]["late"] / part[which]["due"] for which in (kind, "without"))
    figures = f"{number(late, '.3f')} with {part[kind][counted]:.0f} {counted}, {number(without, '.3f')} without"
    return (name, figures, "", "", "≤without+0.01", verdict(late <= without + 0.01))


def capture_row(results: dict[str, Any]) -> Row:
    """Ticks that woke late while captures were written."""
    return late_row("ticks late while captures are written (%)", results.get("captures") or {}, "writing", "captures")


def scraper_rows(results: dict[str, Any]) -> list[Row]:
    """Ticks that woke late while fifty scrapers asked at once, and the cost of looking for other devices."""
    part = results.get("scrapers") or {}
    late = late_row("ticks late with 50 scrapers at once (%)", part, "scraped", "scrapes")
    if "looked" not in part:
        return [late]
    looks = f"{part['looked']:.0f} times, {number(part['look_us'], '.0f')} µs each, opened again {part['reopened']} times"
    holds = verdict(part["reopened"] == 0 if part["looked"] else None)
    return [late, ("looking for other devices", looks, "", "", "never opened again", holds)]


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The whole table."""
    start, size = at(results, "startup", "median"), at(results, "environment", "binary_bytes")
    megabytes = None if size is None else size / 1e6
    return [
        *cost_rows(results, "costs-idle", "idle"),
        *cost_rows(results, "costs-training", "training"),
        *sampling_rows(results, "sampling-idle", "idle"),
        *sampling_rows(results, "sampling-training", "training"),
        resident_row(results),
        anonymous_row(results),
        *peak_rows(results),
        *harm_rows(results),
        *kill_rows(results),
        *energy_rows(results),
        capture_row(results),
        *scraper_rows(results),
        ("start to first scrape (ms)", number(start, ".0f"), "", "", "≤300", verdict(start and start <= 300)),
        ("binary (MB)", number(megabytes, ".1f"), "", "", "≤12", verdict(megabytes and megabytes <= 12)),
    ]


def render(results: dict[str, Any]) -> str:
    """The table as text, followed by the daemon's CPU by thread and the parts that failed."""
    rows = [HEADER, *rows_of(results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    failed = [
        f"FAILED {name}: {part['error']}"
        for name, part in results.items()
        if isinstance(part, dict) and "error" in part
    ]
    loads = (("costs-idle", "idle"), ("costs-training", "training"))
    by_thread = [(load, at(results, part, "daemon_threads")) for part, load in loads]
    by_thread.append(("beside training and annotations", at(results, "peaks", "thread_percent")))
    split = [f"the daemon's CPU by thread, {load} (%): {dearest(percent)}" for load, percent in by_thread]
    split += [*made_of(results, "sampling-idle", "idle"), *made_of(results, "sampling-training", "training")]
    return "\n".join([*lines, *split, *failed])
