#!/usr/bin/env python3
"""Scores the recording rules that compare ranks across nodes on the public traces of ByteDance-Seed/StragglerAnalysis.

    git clone https://github.com/ByteDance-Seed/StragglerAnalysis
    python3 -m venv target/public && target/public/bin/pip install pyarrow
    target/public/bin/python benches/public/fleet_rules.py --data PATH --promtool target/tools/prometheus/usr/bin/promtool

Each job becomes what a Prometheus has of it: the seconds of its ranks in steps and phases, on nodes of eight GPUs, with the stage
of each rank and without. Prints which ranks are late, by how much of a step, and which node is named. Exits with 1 if AR has another
late rank than its slow worker or none, or if ST or SE have any, with stages. (AR: one worker slowed. ST: the last stage is too long. SE:
inputs of different lengths.) Without stages the ranks of a long stage look late; then no node may be named wrongly.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from straggler_analysis import JOBS, NODE_GPUS, Trace

ROOT = Path(__file__).resolve().parents[2]
# promtool refuses a query over more than 10,000 samples.
MINUTES = 8


def series(trace: Trace, has_stages: bool) -> list[str]:
    """The lines of a test's input: each rank spends its mean step's seconds, again and again."""
    found = []
    for rank, place in sorted(trace.places.items()):
        labels = f'job="highwater",instance="node-{rank // NODE_GPUS}",training_job="{trace.job}",rank="{rank}"'
        spans = [trace.span(step, other) for step in trace.steps for other in trace.places]
        length_s = sum(end - begin for begin, end in spans) / len(spans) / 1e9
        a_minute = 60 / length_s / len(trace.steps) / 1e9
        seconds: dict[str, float] = {}
        own = 0
        for step in trace.steps:
            begin, end = trace.span(step, rank)
            own += end - begin
            for phase, intervals in trace.intervals(step, rank, comm=True).items():
                seconds[phase] = seconds.get(phase, 0) + sum(end - begin for begin, end in intervals)

        def add(name: str, more: str, values: str, labels: str = labels) -> None:
            found.append(f"      - series: 'highwater_{name}{{{labels}{more}}}'\n        values: {values}\n")

        add("job_step_duration_seconds_sum", "", f"0+{own * a_minute}x{MINUTES}")
        for phase, ns in seconds.items():
            add("phase_duration_seconds_sum", f',phase="{phase}"', f"0+{ns * a_minute}x{MINUTES}")
        if has_stages:
            add("job_pipeline_stage", "", f"{place['pp']}x{MINUTES}")
    return found


def evaluated(promtool: str, lines: list[str], expression: str) -> list[tuple[dict[str, str], float]]:
    """What an expression returns over the rules: promtool prints what it got if something else was expected."""
    rules = json.dumps([str(path) for path in sorted((ROOT / "dashboards/alerts").glob("*.yaml"))])
    test = (
        f"rule_files: {rules}\nevaluation_interval: 1m\ngroup_eval_order: [highwater-now, highwater-jobs]\n"
        "tests:\n  - interval: 1m\n    input_series:\n" + "".join(lines)
        + f"    promql_expr_test:\n      - expr: {expression}\n        eval_time: {MINUTES}m\n"
        "        exp_samples: [{labels: '{none=\"none\"}', value: 1}]\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(test)
        file.flush()
        printed = subprocess.run([promtool, "test", "rules", file.name], capture_output=True, text=True, check=False)
    text = printed.stdout + printed.stderr
    if "got:" not in text:
        sys.exit(f"promtool says neither: {text}")
    got = text.split("got:", 1)[1].split("\n\n", 1)[0]
    return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
            for labels, value in re.findall(r"\{([^}]*)\} ([-+.\dEe]+)", got)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a checkout of the data set, or its git directory")
    parser.add_argument("--promtool", default="promtool")
    options = parser.parse_args()
    wrong = []
    for job in JOBS:
        trace = Trace(options.data, job)
        for has_stages in (True, False):
            lines = series(trace, has_stages)
            late = evaluated(options.promtool, lines, "highwater:rank_late_ratio")
            named = {labels["instance"] for labels, _ in evaluated(options.promtool, lines, "highwater:job_late_node")}
            ranks = {int(labels["rank"]): value for labels, value in late}
            what = "with stages" if has_stages else "without stages"
            shown = ", ".join(f"{rank} by {value:.0%}" for rank, value in sorted(ranks.items())[:4]) or "none"
            more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
            print(f"{job}, {len(trace.places)} ranks, {what}: late {shown}{more}; named {', '.join(sorted(named)) or 'no node'}")
            truth = {0} if job == "AR" else set()
            if has_stages and set(ranks) != truth:
                wrong.append(f"{job}: the late ranks are {sorted(ranks)}")
            if named - {f"node-{rank // NODE_GPUS}" for rank in truth}:
                wrong.append(f"{job}, {what}: {sorted(named)} is named")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
