"""Exporter health: whether the daemons read everything, and report and send it."""

from generator import queries
from generator.board import Board, listed
from generator.panels import BLUE, GREEN, NONE_WANTED, ORANGE, RED, YELLOW, column, heat, lines, query, rows, table, tile, words
from generator.queries import NODE, count, mean, or_zero, quantile

DAEMON = f"highwater_build_info{{{NODE}}}"
BY_NODE = "{{instance}}"
LATE = "highwater_sampler_lateness_seconds"
CALLS = "highwater_nvml_call_duration_seconds"
MISSED = [(0, GREEN), (0.01, YELLOW), (0.05, RED)]


def rate(metric, by):
    return f"sum by ({by}) (rate({metric}{{{NODE}}}[$__rate_interval]))"


def dashboard():
    board = Board("exporter-health", "Whether the daemons take every sample, accept every annotation and deliver every point, and what "
                  "they cost. Grey means unknown: a daemon that was scraped within the time range and is not now.", [
                      listed("instance", "Node", "highwater_build_info", "instance", "Nodes, by Prometheus's instance label."),
                  ])
    board.row("Is anything wrong?")
    board.tiles(*_tiles())
    board.line(9, (24, _daemons()))
    board.row("Sampling")
    board.line(8, (8, _missed()), (8, _period()), (8, _busy()))
    board.line(10, (8, _late()), (8, _calls()), (8, _failures()))
    board.row("Annotations and findings")
    board.line(8, (8, _events()), (8, _phases()), (8, _memory_by_part()))
    board.row("What it costs")
    board.line(8, (8, _memory()), (8, _cpu()), (8, _handles()))
    board.row("HTTP, captures and OTLP", collapsed=True)
    board.line(8, (8, _http()), (8, _captures()), (8, _otlp()))
    return board


def _tiles():
    missed = f"{rate('highwater_sampler_ticks_missed_total', 'instance')} / {rate('highwater_sampler_ticks_due_total', 'instance')}"
    refused = f'sum(increase(highwater_annotations_total{{{NODE},outcome!="accepted"}}[$__range]))'
    return [
        tile("Daemons reporting", "Daemons that Prometheus scrapes now.", f"count({DAEMON})", steps=[(1, BLUE)]),
        tile("Daemons gone", "Daemons that were scraped within the time range or, where they are still a target of Prometheus, within a "
             "day, and are not now.", queries.gone(), steps=NONE_WANTED),
        tile("Nothing to read", "Daemons that run but have no GPU to read. The table has the reason.",
             or_zero(f"count(highwater_source_error{{{NODE}}})", DAEMON), steps=NONE_WANTED),
        tile("Samples missed", "Share of the memory samples that the worst node missed. If this is not near 0, peaks on that "
             "node may be too low.", f"max({missed})", "percentunit", MISSED, decimals=2),
        tile("Refused, in range", "Annotation events that were not accepted over the time range. Annotations shows the outcome.",
             refused, "short", [(0, GREEN), (1, ORANGE)], decimals=0),
        tile("Versions", "Different versions of the daemon that run. More than one during an upgrade only.",
             f"count(count by (version) ({DAEMON}))", steps=[(1, GREEN), (2, YELLOW)]),
    ]


def _daemons():
    by = "max by (instance)"
    own = f"and on (instance, job) {DAEMON}"
    due = rate("highwater_sampler_ticks_due_total", "instance")
    queries_ = [
        rows(f"{by} ({queries.daemons_seen()})"),
        rows(f"{by} ({DAEMON})"),
        rows(f"max by (instance, version) ({DAEMON})"),
        rows(f"max by (instance, source) (highwater_source_info{{{NODE}}})"),
        rows(f"max by (instance, reason) (highwater_source_error{{{NODE}}})"),
        rows(f"{by} (time() - process_start_time_seconds{{{NODE}}} {own})"),
        rows(f"{by} (highwater_nvml_up{{{NODE}}})"),
        rows(f"{rate('highwater_sampler_ticks_missed_total', 'instance')} / {due}"),
        rows(f"{by} (process_resident_memory_bytes{{{NODE}}} {own})"),
        rows(f"{by} (rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval]) {own})"),
    ]
    columns = [
        column("Node", source="instance", link=("Live page of the node", "http://${__value.raw}/")),
        column("State", source="B", mappings=[words({1: ("reports", GREEN)})], missing="gone", cell="text", width=80),
        column("Version", source="version", width=80),
        column("Source", source="source"),
        column("NVML", source="G", mappings=[words({0: ("down", RED), 1: ("up", GREEN)})], cell="text", width=70),
        column("Nothing to read because", source="reason", missing=""),
        column("Running for", source="F", unit="s", decimals=0, width=100),
        column("Missed", source="H", unit="percentunit", decimals=2, steps=MISSED, cell="text", width=80),
        column("Resident", source="I", unit="bytes", decimals=1, width=100),
        column("CPU", source="J", unit="percentunit", decimals=1, width=80),
    ]
    return table("Daemons", "The version of each daemon and its source; if it reads nothing, the reason; and what it costs. CPU is a share "
                 "of one core. NVML is n/a for simulations and replays.", queries_, columns, sort=("Node", False), pages=True)


def _missed():
    due = "sum without (cause) (rate(highwater_sampler_ticks_due_total{%s}[$__rate_interval]))" % NODE
    return lines("Samples missed, by cause", "Share of the memory samples that were not taken, because NVML blocked or because the thread "
                 "woke late.", [query(f"rate(highwater_sampler_ticks_missed_total{{{NODE}}}[$__rate_interval]) "
                                      f"/ ignoring (cause) group_left () {due}", BY_NODE + " {{cause}}")], "percentunit")


def _period():
    return lines("Sampling period in force", "By default 1 ms. If NVML takes more of the time than its budget, the period doubles, up to "
                 "100 ms, and recovers by itself.", [query(f"highwater_sampler_period_seconds{{{NODE}}}", BY_NODE)], "s")


def _busy():
    return lines("NVML's share of the time", "Share of wall time that all sampling threads together spend inside NVML. The sampling period "
                 "doubles when the memory readings alone take more than the budget, 15 % by default.",
                 [query(f"highwater_nvml_busy_ratio{{{NODE}}}", BY_NODE)], "percentunit")


def _late():
    return heat("How late the sampler wakes", "Delay between the time when a sample was due and the time when it was taken, all selected "
                "nodes.", [query(queries.distribution(LATE, NODE), "{{le}}", shape="heatmap")], "s", cell_unit="short", decimals=0)


def _calls():
    return lines("NVML calls, p99 and mean", "How long each NVML call takes, all selected nodes: the 99th percentile and the exact mean. A "
                 f"rise here precedes missed samples. {queries.GUARANTEE}",
                 [query(quantile(0.99, CALLS, NODE, ["call"]), "{{call}}, p99"),
                  query(mean(CALLS, NODE, ["call"]), "{{call}}, mean")], "s", span=True)


def _failures():
    return lines("NVML calls that failed", "Failures per second, by call. Unsupported calls are not counted: they are tried once.",
                 [query(rate("highwater_nvml_call_failures_total", "instance, call"), BY_NODE + " {{call}}")], "ops")


def _events():
    return lines("Annotations, by outcome", "Events per second that jobs sent, by what became of them, all selected nodes. Lost: events "
                 "that senders could not send.",
                 [query(rate("highwater_annotations_total", "outcome"), "{{outcome}}"),
                  query(f"sum(rate(highwater_annotations_lost_total{{{NODE}}}[$__rate_interval]))", "lost by senders")], "ops")


def _phases():
    return lines("Phases and findings", "Steps, phases and layers per second that ended or were given up, by outcome, and findings that were "
                 "raised.", [query(rate("highwater_phases_total", "outcome"), "phases, {{outcome}}"),
                             query(f"sum(rate(highwater_findings_total{{{NODE}}}[$__rate_interval]))", "findings raised"),
                             query(f"sum(rate(highwater_findings_dropped_total{{{NODE}}}[$__rate_interval]))", "findings dropped")],
                 "ops")


def _memory_by_part():
    return lines("Memory by part", "What the daemons' resident memory is for, of each part the highest of the selected nodes. "
                 "`other` is what no part accounts for: the heap at rest, stacks, connections.",
                 [query(f"max by (part) (highwater_memory_bytes{{{NODE}}})", "{{part}}")], "bytes")


def _memory():
    return lines("Memory of the daemon", "Resident memory, and what of it is kept for jobs: `open` for those that go on, at most "
                 "`annotations.max_bytes`, and `ended` for what has ended, at most `annotations.max_ended_bytes`.",
                 [query(f"process_resident_memory_bytes{{{NODE}}} and on (instance, job) {DAEMON}", BY_NODE + " resident"),
                  query(f"sum by (instance, kind) (highwater_annotations_held_bytes{{{NODE}}})", BY_NODE + " {{kind}}")], "bytes")


def _cpu():
    return lines("CPU of the daemon", "Share of one CPU core that the whole daemon uses.",
                 [query(f"rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval]) and on (instance, job) {DAEMON}", BY_NODE)],
                 "percentunit")


def _handles():
    own = f"and on (instance, job) {DAEMON}"
    return lines("Threads and descriptors", "Threads and open file descriptors of the daemons, the highest of the selected nodes. Neither "
                 "may grow over days.", [query(f"max(process_threads{{{NODE}}} {own})", "threads"),
                                         query(f"max(process_open_fds{{{NODE}}} {own})", "descriptors")], "short", decimals=0)


def _http():
    return lines("HTTP connections and refusals", "Connections that ended, by outcome, and requests that were refused unread, per second.",
                 [query(rate("highwater_http_connections_total", "outcome"), "connections, {{outcome}}"),
                  query(rate("highwater_http_requests_refused_total", "reason"), "refused: {{reason}}")], "ops")


def _captures():
    return lines("Captures", "Triggers of the flight recorder, by outcome. Bars of at least two minutes that do not overlap.",
                 [query(f"sum by (outcome) (increase(highwater_captures_total{{{NODE}}}[$__interval]))", "{{outcome}}")], "short",
                 interval="2m", style="bars", fill=60, stack=True, calcs=["sum"], decimals=0)


def _otlp():
    return lines("OTLP, points and spans", "Data points and spans per second: exported, dropped by reason, and how many wait. Without data if "
                 "no daemon has an OTLP endpoint.",
                 [query(rate("highwater_otlp_exported_total", "signal"), "exported, {{signal}}"),
                  query(rate("highwater_otlp_dropped_total", "signal, reason"), "dropped, {{signal}}: {{reason}}"),
                  query(f"sum by (signal) (highwater_otlp_queued{{{NODE}}})", "waiting, {{signal}}")], "short")
