"""Findings on dashboards: their texts, their table, their annotations, and the table of firing alerts.

Prometheus has a finding's kind and subject as labels, but not its texts, which contain numbers. The table shows what
each kind means instead, and links to the live page of the daemon, which has the finding with its numbers.
"""

from generator import queries
from generator.panels import ORANGE, RED, BLUE, GREEN, GREY, column, rows, table, words

# For each kind: what is the matter, why it is believed, what to try first, and its page in docs/runbooks.
KINDS = {
    "oom": (
        "A rank ran out of memory",
        "It marked a failed allocation or its allocator counted one, or it ended in the middle of a step on a full GPU",
        "The live page has what was asked for and who held what; a smaller batch, recomputation, or expandable segments",
        "oom"),
    "host_oom": (
        "A rank ran out of host memory, and the kernel killed a process of it",
        "The kernel's count of killed processes of its control group rose as it ended; the GPU's memory is not the reason",
        "Raise the memory limit of the container or job, or use fewer data loader workers and less prefetching",
        "host-oom"),
    "low_headroom": (
        "A GPU is almost out of memory",
        "Less memory than detect.headroom was free within the last second. NCCL allocates outside the framework's pool "
        "and fails without it",
        "Use a smaller batch or sequence, recompute activations, or leave part of the memory outside the framework's pool",
        "near-oom"),
    "allocator_thrash": (
        "A rank's allocator flushes its cache and takes the memory again",
        "The job's retry counter rose, or memory fell and came back within a step",
        "Free memory on that rank: a smaller batch, or expandable segments against fragmentation",
        "allocator-thrash"),
    "comm_starvation": (
        "The rank is short of memory, and other ranks wait for it in communication",
        "Other ranks' comm phases took a multiple of their healthy time, while this rank had low headroom or thrashed",
        "Give this rank more room; the ranks that wait need no change, and the network is not the cause",
        "comm-starvation"),
    "input_stall": (
        "A rank waits for its data",
        "A large share of the last steps was spent in phase data with the GPU idle",
        "More data loader workers and prefetching; look at the storage's throughput",
        "input-stall"),
    "straggler": (
        "A rank works longer than those that are like it, which wait for it",
        "Its marked work is above the median of the ranks of its stage and shard, step after step",
        "Compare the rank's input, clocks, throttle reasons and host with those of its peers",
        "straggler"),
    "stage_imbalance": (
        "One pipeline stage works longer than the others, which wait for it",
        "The median work of its ranks is above that of the other stages, step after step",
        "Give this stage fewer layers; the live page has what balancing would win",
        "stage-imbalance"),
    "uneven_work": (
        "Ranks that do the same work on other data differ from step to step",
        "The longest of them is far above their mean, and it is another rank from step to step",
        "Balance the tokens of each step over ranks and microbatches; the live page has what that would win",
        "uneven-work"),
    "slow_steps": (
        "The steps of a job take longer than before",
        "They are longer than each of its last usual steps",
        "Look at the job's other findings for the cause; without one, at what changed on the node at that moment",
        "job-incident"),
    "memory_growth": (
        "The peak of a rank's memory rises from step to step",
        "The median peak rose in each of five successive stretches of steps",
        "Look for tensors that outlive their step: summed losses, growing lists, caches keyed by shape",
        "memory-growth"),
    "idle_gpu": (
        "A GPU holds memory and runs nothing",
        "The driver reported 0 % utilization for detect.idle_after",
        "Look at what the process waits for, or end it to free the GPU",
        "idle-gpu"),
    "gpu_throttled": (
        "The clocks of a busy GPU are held back",
        "The driver gave heat, the power brake or sync boost as a reason for at least half of the last five seconds",
        "Look at the node's cooling and power supplies; move the job to another node until they are mended",
        "gpu-throttled"),
    "pcie_degraded": (
        "A GPU's PCIe link has fewer lanes or a lower generation than it could have",
        "Two readings in a row showed it, the generation while the GPU was busy",
        "Look for PCIe errors in the kernel's log, and have the GPU or its riser seated again",
        "pcie-degraded"),
    "nvlink_degraded": (
        "NVLinks of a GPU are down, or had to send data again",
        "Two readings in a row showed fewer links than before or than another GPU has, or their error counters rose",
        "Compare nvidia-smi nvlink -s and -e with the node's other GPUs, and have the GPU and its board checked",
        "nvlink-degraded"),
    "gpu_unhealthy": (
        "The driver asks for a GPU to be reset or replaced",
        "It reports rows of memory that wait to be remapped or cannot be, a recovery action, or a GPU outside of its NVLink fabric",
        "Drain the GPU, then reset it, reboot the node or have the GPU replaced; the live page has which",
        "gpu-unhealthy"),
    "gpu_lost": (
        "A GPU does not answer",
        "The driver calls it lost, or a call on it hangs",
        "Look in the kernel log for XID errors, drain the node, reset the GPU or reboot",
        "gpu-lost"),
    "xid": (
        "The driver reported an XID error",
        "It came from the driver's events",
        "The live page has the number's meaning; the runbook lists which ones need a reset",
        "xid"),
}
# What an incident of each cause is.
CAUSES = {
    "memory": "GPU memory ran short",
    "host_memory": "Host memory ran out",
    "input": "A rank waited for data",
    "held_back": "A GPU was held back by heat, power or a link",
    "gpu": "A GPU had an error or was lost",
    "late_rank": "A rank made others wait",
    "imbalance": "Work was shared unevenly",
    "idle": "A GPU held memory and ran nothing",
    "unexplained": "Steps became slow",
}
NOTHING = "none"
SEVERITIES = {"critical": RED, "warning": ORANGE, "info": BLUE}
SHOWN_SEVERITIES = words({severity: (severity, color) for severity, color in SEVERITIES.items()})
RUNBOOK = "${runbooks}docs/runbooks/${__value.raw}.md"


def _with_texts(vector):
    """Adds the labels `what` (with why) and `advice`. They are labels, not mappings of values, because Grafana makes a row
    as high as the value needs before it is mapped."""
    for kind, (what, why, advice, _) in KINDS.items():
        for label, text in [("what", f"{what}. {why}."), ("advice", f"{advice}.")]:
            vector = f'label_replace({vector}, "{label}", "{text}", "finding", "{kind}")'
    return vector


def _with_runbook(vector):
    """Adds the label `runbook`. A page is named like its kind, with few exceptions."""
    vector = f'label_replace({vector}, "runbook", "$1", "finding", "([a-z]+)")'
    vector = f'label_replace({vector}, "runbook", "$1-$2", "finding", "([a-z]+)_([a-z]+)")'
    for kind, (*_, page) in KINDS.items():
        if page != kind.replace("_", "-"):
            vector = f'label_replace({vector}, "runbook", "{page}", "finding", "{kind}")'
    return vector


def _live(path=""):
    return f"http://${{__data.fields.Node}}/#{path}"


def findings_table(title, active, seen, *, of="", unread=None):
    """The findings that go on now. If there is none, it has a row that says so, as long as `seen` returns anything, or else
    one that says that nothing is read, as long as `unread` does."""
    unknown = "unknown: no GPU read"
    vectors = [queries.by_severity(_with_runbook(_with_texts(active))), queries.a_row("finding", NOTHING, seen)]
    if unread:
        vectors.append(queries.a_row("finding", unknown, unread))
    kinds = words({NOTHING: (NOTHING, GREEN), unknown: (unknown, GREY)})
    return table(
        title,
        f"Problems{of} that go on now: what each kind means, why it is reported and what to try. The node links to the "
        "daemon's live page, which has the numbers. The row “none” means that the daemons read GPUs and report nothing.",
        [rows(f"sort_desc({queries.first_of(*vectors)})")],
        [
            column("Finding", source="finding", mappings=[kinds], cell="text", width=150,
                   link=("What the live page shows", _live("/findings"))),
            column("Severity", source="severity", mappings=[SHOWN_SEVERITIES], cell="text", width=95, missing=""),
            column("Node", source="instance", width=125, missing="", link=("Live page of the node", _live("/findings"))),
            column("GPU", source="gpu", width=50, missing="", link=("Live page of the GPU", _live("/gpu/${__value.raw}"))),
            column("Job", source="training_job", width=90, missing="",
                   link=("Training job", "/d/highwater-training-job?${__url_time_range}&${datasource:queryparam}"
                                         "&var-job=${__value.raw}")),
            column("Rank", source="rank", width=50, missing=""),
            column("What and why", source="what", cell="wrap", missing="", least=240),
            column("Advice", source="advice", cell="wrap", missing="", least=200),
            column("Runbook", source="runbook", width=135, missing="", link=("Runbook", RUNBOOK)),
        ],
        hidden=["uuid", "pod", "Value"])


def alerts_table(title, alerts, seen):
    """The alerts that fire; a row says so if none does, or if the rules are not loaded."""
    unevaluated = "unknown: rules not loaded"
    states = words({NOTHING: (NOTHING, GREEN), unevaluated: (unevaluated, GREY)})
    none = queries.a_row("alertname", NOTHING, f"{queries.RULES} and on (instance) {seen}")
    expr = queries.first_of(queries.by_severity(alerts), none, queries.a_row("alertname", unevaluated, seen))
    return table(
        title,
        "Alerts of dashboards/alerts that fire in this Prometheus. The row “none” means that the rules are evaluated and "
        "nothing fires; “unknown” means that Prometheus has not loaded them.",
        [rows(f"sort_desc({expr})")],
        [
            column("Alert", source="alertname", mappings=[states], cell="text", least=190, link=("All alerts", "${runbooks}docs/alerts.md")),
            column("Severity", source="severity", mappings=[SHOWN_SEVERITIES], cell="text", width=95, missing=""),
            column("Node", source="instance", missing="", least=125),
            column("GPU", source="gpu", width=60, missing=""),
            column("Job", source="training_job", missing="", least=90),
            column("Rank", source="rank", width=60, missing=""),
        ],
        hidden=["alertstate", "uuid", "pod", "xid", "finding", "cause", "reason", "Value"])


def annotate(board, matchers, on, enabled=True):
    """Marks incidents on the panels `on`, each time that one began or came back. A mark stands where a counter rose, so that none is
    left out however seldom a long range is looked at, and one starved rank of 64 is one mark. Pages of many nodes leave them
    switched off: marks of many jobs lie on each other until they hide the data."""
    by = "cause, instance, training_job, gpu"
    count = f"highwater_incidents_total{{{matchers}}}"
    before = f"{count} offset $__interval"
    # The counter of a cause begins with its first incident, a few scrapes before it counts that. After a pause in the scrapes it is as
    # old as it is.
    scraped = "on (job, instance) (highwater_build_info offset $__interval)"
    vector = f"sum by ({by}) ({count} - ({before}) >= 1 or ({count} unless {before} and {scraped}) >= 1)"
    for cause, what in CAUSES.items():
        vector = f'label_replace({vector}, "what", "{what}", "cause", "{cause}")'
    board.annotate("Incidents", vector, ORANGE, "{{what}}", "job {{training_job}} GPU {{gpu}} node {{instance}}, cause {{cause}}",
                   on=on, enabled=enabled)
