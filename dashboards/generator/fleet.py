"""Fleet and nodes: every node, GPU and job, a row each; what is wrong; and the whole over time."""

from generator import findings, queries
from generator.board import Board, listed, runbooks, window
from generator.panels import (BELOW_SLOWDOWN, BLUE, FULL, GREEN, GREY, NONE_WANTED, ORANGE, RED, YELLOW, column, lines,
                              query, rows, table, tile, words)
from generator.queries import NODE, RECENT, fullness, or_zero

DAEMON = f"highwater_build_info{{{NODE}}}"
# A daemon without a driver has none of these: what its GPUs do is unknown.
UP = f"highwater_gpu_up{{{NODE}}}"
ALERTS = queries.firing('instance=~"$instance|"')
TO_GPU = ("Its memory", "/d/highwater-gpu-memory?${__url_time_range}&${datasource:queryparam}"
          "&var-instance=${__data.fields.Node}&var-gpu=${__data.fields.GPU}")
TO_NODE = ("Its GPUs", "/d/highwater-gpu-memory?${__url_time_range}&${datasource:queryparam}&var-instance=${__value.raw}")
TO_JOB = ("The job", "/d/highwater-training-job?${__url_time_range}&${datasource:queryparam}&var-job=${__value.raw}")
ANSWERS = words({0: ("lost", RED), 1: ("answers", GREEN)})
THROTTLED = words({0: ("no", GREEN), 1: ("yes", ORANGE)})
SOME = [(0, GREEN), (1, ORANGE)]


def dashboard():
    board = Board("fleet", "Every node and GPU that highwater reads: what is wrong now, a row for each GPU, node and job, "
                  "and the fleet over time. Grey means unknown: a node or GPU that was seen within the time range and no "
                  "longer reports.", [
                      listed("instance", "Node", "highwater_build_info", "instance", "Nodes, by Prometheus's instance label."),
                      window("highwater_gpu_memory_used_max_bytes"),
                      runbooks(),
                  ], ["gpu"])
    board.row("Is anything wrong?")
    board.tiles(*_tiles())
    board.line(10, (24, findings.findings_table("Findings that go on", f"highwater_finding_active{{{NODE}}} == 1", UP,
                                               unread=DAEMON)))
    board.line(7, (24, findings.alerts_table("Alerts that fire", ALERTS, DAEMON)))
    board.row("GPUs")
    board.line(14, (24, _gpus()))
    board.line(8, (24, _low()))
    board.row("Nodes and jobs")
    board.line(8, (24, _nodes()))
    board.line(8, (24, _jobs()))
    board.row("Over time")
    on = board.line(9, (12, _full()), (12, _found()))
    board.line(8, (8, _busy()), (8, _power()), (8, _answering()))
    findings.annotate(board, NODE, on[:1], enabled=False)
    return board


def _tiles():
    active = f"highwater_finding_active{{{NODE},severity=\"%s\"}} == 1"
    throttled = f'max by (instance, gpu) (highwater_gpu_clocks_event_active{{{NODE},reason=~"hw_.+|sw_thermal_slowdown"}})'
    return [
        tile("Nodes reporting", "Daemons that Prometheus scrapes now.", f"count({DAEMON})", steps=[(1, BLUE)]),
        tile("Nodes gone", "Daemons that were scraped within the time range or, where they are still a target of Prometheus, within a day, "
             "and are not now. What their GPUs do is unknown.",
             queries.gone(), steps=NONE_WANTED),
        tile("Nodes not read", "Nodes whose daemon runs but has nothing to read: no driver, or a container without the NVIDIA "
             "runtime. The table Nodes has the reason.",
             or_zero(f"count(highwater_source_error{{{NODE}}})", DAEMON), steps=NONE_WANTED),
        tile("Critical findings", "Findings of severity critical that go on: a job fails or is about to.",
             or_zero(f"count({active % 'critical'})", UP), steps=NONE_WANTED),
        tile("Warnings", "Findings of severity warning that go on: time or money is being lost.",
             or_zero(f"count({active % 'warning'})", UP), steps=SOME),
        tile("Alerts firing", "Alerts of dashboards/alerts that fire. Unknown if Prometheus has not loaded the rules.",
             queries.count_firing(ALERTS, NODE), steps=NONE_WANTED),
        tile("GPUs answering", "GPUs and MIG instances that the driver can read now.",
             or_zero(f"count(highwater_gpu_up{{{NODE}}} == 1)", f"highwater_gpu_up{{{NODE}}}"), steps=[(1, BLUE)]),
        tile("GPUs lost", "GPUs that fell off the bus, cannot be opened, or on which a call hangs.",
             f"sum(1 - highwater_gpu_up{{{NODE}}})", steps=NONE_WANTED),
        tile("GPUs above 97 %", "GPUs whose highest use within the window was above 97 % of the memory that jobs can have.",
             or_zero(f"count({fullness(NODE)} > 0.97)", f"highwater_gpu_memory_used_bytes{{{NODE}}}"), steps=SOME),
        tile("GPUs throttled", "GPUs that are slowed by heat or by a hardware limit. The power cap is normal at full load and "
             "not counted.", f"sum({throttled})", steps=SOME),
        tile("XIDs in range", "Kinds of XID errors, by GPU, that the driver reported within the time range.",
             or_zero(f"count(highwater_gpu_xid_last_timestamp_seconds{{{NODE}}} > time() - $__range_s)",
                     f"highwater_gpu_up{{{NODE}}}"), steps=NONE_WANTED),
        tile("Power", "Mean power draw of all GPUs since the last scrapes, by their energy.", f"sum({queries.power(NODE)})", "watt",
             [(0, BLUE)]),
    ]


def _gpus():
    by = "max by (instance, gpu)"
    seen = f"last_over_time(highwater_gpu_up{{{NODE}}}[$__range])"
    xids = f"highwater_gpu_xid_last_timestamp_seconds{{{NODE}}} > time() - $__range_s"
    queries_ = [
        rows(f"{by} ({seen})"),
        rows(f"{by} (highwater_gpu_up{{{NODE}}})"),
        rows(f"max by (instance, gpu, name) (last_over_time(highwater_gpu_info{{{NODE}}}[$__range]))"),
        rows(f"{by} ({fullness(NODE)})"),
        rows(f"{by} (highwater_gpu_utilization_ratio{{{NODE}}})"),
        rows(f"{by} ({queries.power(NODE)})"),
        rows(f"{by} (highwater_gpu_temperature_celsius{{{NODE}}})"),
        rows(f'{by} (highwater_gpu_clocks_event_active{{{NODE},reason=~"hw_.+|sw_thermal_slowdown"}})'),
        rows(f"count by (instance, gpu) ({xids}) or 0 * {by} (highwater_gpu_up{{{NODE}}})"),
        rows(f"count by (instance, gpu) (highwater_finding_active{{{NODE},gpu!=\"\"}} == 1) "
             f"or 0 * {by} (highwater_gpu_up{{{NODE}}})"),
        # A rank whose GPU is unknown would be merged into the rows of all GPUs of its node.
        rows("topk by (instance, gpu) (1, max by (instance, gpu, training_job, rank) "
             f"(highwater_job_info{{{NODE},gpu!=\"\"}}))"),
        rows(f"{by} ({queries.share_of_power_limit(NODE)})"),
        rows(f"min by (instance, gpu) ({queries.below_slowdown(NODE)})"),
    ]
    columns = [
        column("Node", source="instance", link=TO_NODE, filtered=True, width=150),
        column("GPU", source="gpu", width=45, link=TO_GPU),
        column("State", source="B", mappings=[ANSWERS], missing="gone", cell="text", width=72),
        column("Peak", source="D", unit="percentunit", decimals=1, minimum=0, maximum=1, steps=FULL, cell="gauge",
               link=TO_GPU, width=115),
        column("Utilization", source="E", unit="percentunit", decimals=0, minimum=0, maximum=1, steps=[(0, BLUE)],
               cell="gauge", width=95),
        column("Power", source="F", unit="watt", decimals=0, width=60),
        column("Of its limit", source="L", unit="percentunit", decimals=0, minimum=0, maximum=1, steps=[(0, BLUE)],
               cell="gauge", width=95),
        column("Temp", source="G", unit="celsius", decimals=0, width=62),
        column("To slowdown", source="M", unit="celsius", decimals=0, steps=BELOW_SLOWDOWN, cell="text", width=105),
        column("Throttled", source="H", mappings=[THROTTLED], cell="text", width=80),
        column("XIDs", source="I", steps=NONE_WANTED, cell="text", width=50),
        column("Findings", source="J", steps=SOME, cell="text", width=75),
        column("Job", source="training_job", missing="", link=TO_JOB, filtered=True, width=115),
        column("Rank", source="rank", missing="", width=50),
        column("Model", source="name", filtered=True),
    ]
    return table("GPUs", "A row for each GPU that was seen within the time range, also on nodes that are gone. Peak memory is "
                 "the highest use at any millisecond of the window. Node, GPU and job link to their dashboards. The filter "
                 "in a column's head restricts thousands of rows. "
                 "To slowdown is how many degrees the GPU is below the temperature at which it slows itself. It and the share of "
                 "the power limit are n/a if the GPU reports no limit.", queries_, columns, sort=("Peak", True),
                 pages=True)


def _low():
    """Which GPU was how long almost out of memory, and whose it was then: a pod's name is that of the time, by the recording rule."""
    by, most = "instance, gpu", f"max_over_time(highwater_gpu_memory_low_longest_seconds{{{NODE},free_below=\"1GiB\"}}[$__range])"
    pods = f"max by ({by}, namespace, pod) (max_over_time(highwater:pod_gpu_memory_low_longest_seconds{{{NODE}}}[$__range]))"
    most_used = f"max_over_time(highwater_gpu_memory_used_max_bytes{{{NODE},window=\"60s\"}}[$__range])"
    least = f"min by ({by}) ({queries.usable(NODE, '$__range')} - ignoring (window) {most_used})"
    total = f"max by ({by}) (increase(highwater_gpu_memory_low_seconds_total{{{NODE},free_below=\"1GiB\"}}[$__range]))"
    found = f"({pods} or on ({by}) max by ({by}) ({most})) > 0.005"
    among = f"and on ({by}) (max by ({by}) ({most}) > 0.005)"
    return table("GPUs with less than 1 GiB free for longer than 5 ms", "Within the time range, from samples of every millisecond. "
                 "Longest is without a break; a stretch from before the range counts in whole. Pods are those that had the GPU "
                 "then, where the kubelet is asked.",
                 [rows(found), rows(f"{total} {among}"), rows(f"{least} {among}")], [
                     column("Node", source="instance", link=TO_NODE, filtered=True, least=125),
                     column("GPU", source="gpu", width=60, link=TO_GPU),
                     column("Longest", source="A", unit="s", decimals=3, width=110),
                     column("In all", source="B", unit="s", decimals=3, width=110),
                     column("Least free", source="C", unit="bytes", decimals=1, width=110),
                     column("Namespace", source="namespace", missing="", filtered=True),
                     column("Pod", source="pod", missing="", filtered=True),
                 ], sort=("Longest", True), pages=True)


def _nodes():
    by = "max by (instance)"
    due = f"sum by (instance) (rate(highwater_sampler_ticks_due_total{{{NODE}}}[$__rate_interval]))"
    queries_ = [
        rows(f"{by} ({queries.daemons_seen()})"),
        rows(f"{by} ({DAEMON})"),
        rows(f"sum by (instance) (highwater_gpu_up{{{NODE}}})"),
        rows(f"{by} ({fullness(NODE)})"),
        rows(f"sum by (instance) (rate(highwater_sampler_ticks_missed_total{{{NODE}}}[$__rate_interval])) / {due}"),
        rows(f"max by (instance, version) (highwater_build_info{{{NODE}}})"),
        rows(f"max by (instance, reason) (highwater_source_error{{{NODE}}})"),
    ]
    columns = [
        column("Node", source="instance", link=TO_NODE, filtered=True, least=125),
        column("State", source="B", mappings=[words({1: ("reports", GREEN)})], missing="gone", cell="text", width=80),
        column("GPUs", source="C", width=60),
        column("Peak memory", source="D", unit="percentunit", decimals=1, minimum=0, maximum=1, steps=FULL, cell="gauge", least=130),
        column("Missed", source="E", unit="percentunit", decimals=1, steps=[(0, GREEN), (0.01, YELLOW), (0.05, RED)],
               cell="text", width=80),
        column("Version", source="version", width=80),
        column("Nothing to read because", source="reason", missing=""),
    ]
    return table("Nodes", "A row for each node whose daemon was scraped within the time range. Missed is the share of memory "
                 "samples that were not taken.", queries_, columns, sort=("Node", False), pages=True)


def _jobs():
    info = f"highwater_job_info{{{NODE}}}"
    ranks = "count by (namespace, user, training_job) (count by (namespace, user, training_job, rank) (%s))"
    seen = f"last_over_time({info}[$__range])"
    queries_ = [
        rows(ranks % seen),
        rows(ranks % info),
        rows("count by (namespace, user, training_job) (count by (namespace, user, training_job, instance) (%s))" % seen),
        rows(queries.mean(queries.STEP, NODE, ["namespace", "user", "training_job"])),
        rows(f"max by (namespace, user, training_job) (highwater_job_compute_lag_ratio{{{NODE}}})"),
        rows(f"max by (namespace, user, training_job) (highwater_job_data_stall_ratio{{{NODE}}})"),
        rows(f"count by (namespace, user, training_job) (highwater_finding_active{{{NODE},training_job!=\"\"}} == 1) "
             f"or 0 * count by (namespace, user, training_job) ({info})"),
    ]
    columns = [
        column("Job", source="training_job", link=TO_JOB, filtered=True, least=90),
        column("Namespace", source="namespace", missing="", filtered=True),
        column("User", source="user", missing="", filtered=True, width=80),
        column("Ranks now", source="B", missing="gone", cell="text", steps=[(1, BLUE)], width=90),
        column("Nodes", source="C", width=60),
        column("Step time", source="D", unit="s", decimals=3, least=90),
        column("Worst lag", source="E", unit="percentunit", decimals=0, steps=[(0, GREEN), (1.2, YELLOW), (1.5, RED)],
               cell="text"),
        column("Worst stall", source="F", unit="percentunit", decimals=0, steps=[(0, GREEN), (0.15, YELLOW), (0.3, RED)],
               cell="text"),
        column("Findings", source="G", steps=SOME, cell="text", width=80),
    ]
    return table("Jobs", "A row for each job that ran within the time range. Lag is a rank's compute time against the median of "
                 "its peers on the node; stall is the share of time spent waiting for data.", queries_, columns,
                 sort=("Job", False), pages=True)


def _full():
    share = f"max_over_time(highwater:gpu_memory_used_ratio:max1m{{{NODE}}}[{RECENT}])"
    return lines("How full the GPUs are", "The highest use of each minute as a share of what jobs can have: the fullest "
                 "GPU, the fullest tenth, and the median GPU. Unknown if Prometheus has not loaded the rules.",
                 [query(f"max({share})", "fullest"), query(f"quantile(0.9, {share})", "fullest tenth"),
                  query(f"quantile(0.5, {share})", "median")], "percentunit", maximum=1,
                 steps=[(0.97, ORANGE), (0.99, RED)], draw_steps=True)


def _found():
    return lines("Findings that go on, by kind", "How many findings of each kind went on at a time.",
                 [query(f"sum by (finding) (highwater_finding_active{{{NODE}}})", "{{finding}}")], "short", stack=True,
                 fill=40, decimals=0)


def _busy():
    value = f"avg_over_time(highwater_gpu_utilization_ratio{{{NODE}}}[{RECENT}])"
    return lines("GPUs at work", "Share of time in which a kernel ran: mean of all GPUs, and the idlest tenth.",
                 [query(f"avg({value})", "mean"), query(f"quantile(0.1, {value})", "idlest tenth")], "percentunit", maximum=1)


def _power():
    return lines("Power of all GPUs", "The sum of the GPUs' mean power draw, by their energy.",
                 [query(f"sum({queries.power(NODE)})", "power")], "watt", fill=10)


def _answering():
    return lines("GPUs and nodes that answer", "A step down is a GPU that was lost or a node that is gone.",
                 [query(f"sum(highwater_gpu_up{{{NODE}}})", "GPUs"), query(f"count({DAEMON})", "nodes")], "short", decimals=0)
