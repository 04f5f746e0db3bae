"""GPU memory: how full the GPUs get between scrapes, for how long, and what else goes on in them."""

from generator import findings, queries
from generator.board import Board, listed, runbooks, window
from generator.panels import (BELOW_SLOWDOWN, BLUE, FULL, GREEN, GREY, NONE_WANTED, ORANGE, RED, YELLOW, column, dashed,
                              lines, query, rows, table, tile, timeline, unlisted, words)
from generator.queries import GPU, RECENT, WHOLE, floor, fullness, or_zero, peak, usable

NAME = "{{instance}} GPU {{gpu}}"
OF_A_GPU = "/ GPU /"
UP = f"highwater_gpu_up{{{GPU}}}"
TO_JOB = ("The job", "/d/highwater-training-job?${__url_time_range}&${datasource:queryparam}&var-job=${__value.raw}")
LIVE = ("Live page of the GPU", "http://${__data.fields.Node}/#/gpu/${__value.raw}")
# Windows that follow each other without overlap, so that their increases add up to the total of the range. Scrapes may
# be a minute apart.
COUNTED = {"interval": "2m", "style": "bars", "fill": 60, "calcs": ["sum"], "decimals": 0}


def dashboard():
    board = Board("gpu-memory", "GPU memory of the selected nodes: how full it gets between scrapes, for how long, and what "
                  "else slows the GPUs. The first row shows whether anything is wrong; the rows below explain its tiles. Grey "
                  "means unknown.", [
                      listed("instance", "Node", "highwater_gpu_up", "instance", "Nodes, by Prometheus's instance label."),
                      listed("gpu", "GPU", 'highwater_gpu_up{instance=~"$instance"}', "gpu",
                             "GPU index as nvidia-smi shows it; gpu:instance for a MIG instance.", sort=3),
                      window("highwater_gpu_memory_used_max_bytes"),
                      listed("node", "GPU by GPU of", 'highwater_gpu_up{instance=~"$instance"}', "instance",
                             "The node whose GPUs have a panel each in the last row.", many=False),
                      listed("node_gpu", "", 'highwater_gpu_up{instance="$node",gpu=~"$gpu"}', "gpu", "The chosen GPUs of that node.",
                             sort=3, shown=False),
                      runbooks(),
                  ], ["gpu"])
    board.row("Is anything wrong?")
    board.tiles(*_tiles())
    board.row("Memory")
    board.line(9, (24, _how_full()))
    on = board.line(10, (12, _peaks()), (12, _least_free()))
    board.line(9, (8, _above()), (8, _flushes()), (8, _floor()))
    board.line(9, (24, _now()))
    board.line(7, (24, _pods()))
    board.row("Work and heat")
    board.line(8, (8, _utilization()), (8, _controller()), (8, _clock()))
    board.line(8, (8, _power()), (8, _temperature()), (8, _energy()))
    board.line(8, (24, _throttled()))
    board.row("Errors")
    board.line(9, (9, _answers()), (8, _xids()), (7, _ecc()))
    board.line(8, (24, _identity()))
    board.row("Links", collapsed=True)
    board.line(9, (12, _bus("PCIe", "pcie", "Bytes per second over PCIe.")),
               (12, _bus("NVLink", "nvlink", "Payload bytes per second over all NVLinks of the GPU. Between ranks of one node "
                         "this is the traffic of collectives.")))
    board.row("GPU by GPU of $node", collapsed=True)
    (band,) = board.line(8, (8, _band()))
    band |= {"repeat": "node_gpu", "repeatDirection": "h", "maxPerRow": 4}
    findings.annotate(board, queries.NODE, on, enabled=False)
    board.annotate("XID errors", f"highwater_gpu_xid_last_timestamp_seconds{{{GPU}}} * 1000", "purple", "XID {{xid}}", NAME,
                   on=on, useValueForTime=True)
    return board


def _tiles():
    throttled = f'max by (instance, gpu) (highwater_gpu_clocks_event_active{{{GPU},reason=~"hw_.+|sw_thermal_slowdown"}})'
    return [
        tile("GPUs answering", "GPUs and MIG instances that the driver can read now.",
             or_zero(f"count({UP} == 1)", UP), steps=[(1, BLUE)]),
        tile("GPUs lost", "GPUs that fell off the bus, cannot be opened, or on which a call hangs. See Errors.",
             f"sum(1 - {UP})", steps=NONE_WANTED),
        tile("Fullest GPU, in range", "The highest memory in use on any selected GPU at any millisecond of the time range, as a "
             "share of the memory that jobs can have (used and free, without the driver's reserve).",
             f"max({fullness(GPU, WHOLE)})", "percentunit", FULL, decimals=1),
        tile("Above 97 %, in range", "Share of the time range that the worst GPU spent with more than 97 % of its memory in use. "
             "When memory is this full, an allocator flushes its cache before it fails.",
             f'max(rate(highwater_gpu_memory_pressure_seconds_total{{{GPU},above="0.97"}}[$__range]))', "percentunit",
             [(0, GREEN), (0.01, YELLOW), (0.1, RED)], decimals=1),
        tile("Flushes, in range", "How often a framework's allocator returned its cache to get one block within the time range. Each flush stalls "
             "its step. Where jobs report their allocators' counts, these are added up; on other GPUs, falls of memory that grew back at once.",
             f"sum({queries.flushes(GPU, WHOLE)})", "short", [(0, GREEN), (1, YELLOW)], decimals=0),
        tile("XIDs, in range", "Kinds of XID errors, by GPU, that the driver reported within the time range. Errors lists them.",
             or_zero(f"count(highwater_gpu_xid_last_timestamp_seconds{{{GPU}}} > time() - $__range_s)", UP),
             steps=NONE_WANTED),
        tile("Fullest GPU, now", "The highest memory in use on any selected GPU within the window before the last scrape.",
             f"max({fullness(GPU)})", "percentunit", FULL, decimals=1),
        tile("Throttled, now", "GPUs that are slowed by heat or a hardware limit of the board. The software power cap is normal "
             "at full load and not counted.", f"sum({throttled})", steps=[(0, GREEN), (1, ORANGE)]),
        tile("Below slowdown, now", "Degrees between the hottest GPU and the temperature at which its hardware slows it: the least "
             "of all selected GPUs. Unknown if no GPU reports that temperature; Temperature has the curves.",
             f"min({queries.below_slowdown(GPU)})", "celsius", BELOW_SLOWDOWN),
        tile("Findings, now", "Findings about the selected GPUs that go on. Fleet and nodes has their table.",
             or_zero(f'count(highwater_finding_active{{{GPU}}} == 1)', UP), steps=[(0, GREEN), (1, ORANGE)]),
        tile("Alerts firing, now", "Alerts about the selected GPUs that fire. Unknown if Prometheus has not loaded the rules.",
             queries.count_firing(queries.firing(GPU), GPU), steps=NONE_WANTED),
        tile("Nodes not read", "Nodes whose daemon runs but has nothing to read. Exporter health shows the reason.",
             or_zero('count(highwater_source_error{instance=~"$instance"})', 'highwater_build_info{instance=~"$instance"}'),
             steps=NONE_WANTED),
    ]


def _how_full():
    return timeline("How full, by GPU", "Peak of each interval as a share of the memory that jobs can have. Yellow from 90 %, "
                    "orange from 97 %, red from 99 %. A gap is a time without samples. Twelve GPUs a page.",
                    [query(queries.by_node(fullness(GPU, RECENT)), NAME)], "percentunit", FULL, per_page=12)


def _peaks():
    return lines("Peak of each interval", "The most memory in use at any millisecond, by GPU. Dashed: the memory "
                 "that jobs can have on the largest GPU.",
                 [query(peak(GPU, RECENT), NAME),
                  query(f"max({usable(GPU)})", "capacity")],
                 "bytes", legend="right", calcs=["max"], overrides=[dashed("capacity", RED)])


def _least_free():
    return lines("Least free memory", "Free memory at the peak of each interval, by GPU: the margin before out of memory, and the "
                 "most that NCCL can still get for its buffers. Below 1 GiB a first communicator may fail.",
                 [query(f"{usable(GPU, RECENT)} - ignoring (window) {peak(GPU, RECENT)}", NAME)], "bytes", legend="right",
                 calcs=["min"], steps=[(0, RED), (2**30, "transparent")], draw_steps=True)


def _above():
    return lines("Time above each threshold", "Share of time that the worst selected GPU spends above 90, 95, 97 and 99 % of its "
                 "memory. It is exact over any range: the daemon sums the time, not the samples.",
                 [query(f"max by (above) (rate(highwater_gpu_memory_pressure_seconds_total{{{GPU}}}[$__rate_interval]))",
                        "above {{above}}")], "percentunit", decimals=1)


def _flushes():
    return lines("Allocator flushes", "How often an allocator ran out of memory and returned its cache, by GPU: as the job's allocator counts it, and "
                 "where none does, as falls of memory that grow back at once. Bars of at least two minutes that do not overlap.",
                 [query(queries.flushes(GPU, "$__interval"), NAME)], "short", **COUNTED)


def _floor():
    return lines("Lowest use of each interval", "The least memory in use at any millisecond, by GPU. If the floor "
                 "rises for hours, something is not given back.",
                 [query(floor(GPU, RECENT), NAME)], "bytes", legend=None)


def _now():
    by = "max by (instance, gpu)"
    queries_ = [
        rows(f"{by} (last_over_time({UP}[$__range]))"),
        rows(f"{by} ({fullness(GPU)})"),
        rows(f"{by} (highwater_gpu_memory_used_bytes{{{GPU}}} / {usable(GPU)})"),
        rows(f"{by} (highwater_gpu_memory_used_bytes{{{GPU}}})"),
        rows(f"{by} ({usable(GPU)} - ignoring (window) {peak(GPU)})"),
        rows(f"topk by (instance, gpu) (1, max by (instance, gpu, training_job, rank) (highwater_job_info{{{GPU}}}))"),
    ]
    return table("Memory now", "A row for each GPU that was seen within the time range, with the job that runs on it.", queries_, [
        column("Node", source="instance"),
        column("GPU", source="gpu", width=50, link=LIVE),
        column("Peak", source="B", unit="percentunit", decimals=1, minimum=0, maximum=1, steps=FULL, cell="gauge"),
        column("In use", source="C", unit="percentunit", decimals=1, minimum=0, maximum=1, steps=FULL, cell="gauge"),
        column("Bytes in use", source="D", unit="bytes", decimals=1, width=120),
        column("Least free", source="E", unit="bytes", decimals=1, width=120),
        column("Job", source="training_job", missing="none reported", link=TO_JOB),
        column("Rank", source="rank", missing="", width=70),
    ], sort=("Peak", True), pages=True)


def _pods():
    by = "max by (instance, gpu, namespace, pod, container)"
    return table("Pods now", "A row for each container that has a GPU, or whose processes hold memory on it, where the kubelet is asked "
                 "(kubelet.socket). Memory is n/a where its processes are not known.", [
                     rows(f"{by} (highwater_gpu_pod_info{{{GPU}}})"),
                     rows(f"{by} (highwater_pod_gpu_memory_used_bytes{{{GPU}}})"),
                 ], [
                     column("Node", source="instance"),
                     column("GPU", source="gpu", width=70, link=LIVE),
                     column("Namespace", source="namespace"),
                     column("Pod", source="pod"),
                     column("Container", source="container"),
                     column("Bytes in use", source="B", unit="bytes", decimals=1, width=120),
                 ], sort=("Bytes in use", True), pages=True)


def _band():
    def named(name, *properties):
        return {"matcher": {"id": "byName", "options": name}, "properties": list(properties)}

    band = {"id": "custom.fillBelowTo", "value": "low"}
    thin = {"id": "custom.lineWidth", "value": 0}
    of_node = queries.NODE + ',instance="$node",gpu=~"$node_gpu"'
    return lines("GPU $node_gpu", "The range of memory in use within each interval, from the lowest to the highest. Both are exact to "
                 "the millisecond, the mean is weighted by time. A mean near the bottom of a wide band is a spike.",
                 [query(peak(of_node, RECENT), "peak"),
                  query(f'avg_over_time(highwater_gpu_memory_used_avg_bytes{{{of_node},window="$window"}}[{RECENT}])', "mean"),
                  query(floor(of_node, RECENT), "low")], "bytes",
                 overrides=[named("peak", band, {"id": "custom.fillOpacity", "value": 25}), named("low", thin)])


def _utilization():
    return lines("Utilization", "Share of time in which a kernel ran, mean of each interval. High utilization does not mean "
                 "progress: a collective that waits for another rank counts as busy.",
                 [query(f"avg_over_time(highwater_gpu_utilization_ratio{{{GPU}}}[{RECENT}])", NAME)], "percentunit", maximum=1, legend=None)


def _controller():
    return lines("Memory controller", "Share of time in which device memory was read or written, mean of each interval.",
                 [query(f"avg_over_time(highwater_gpu_memory_busy_ratio{{{GPU}}}[{RECENT}])", NAME)], "percentunit", maximum=1, legend=None)


def _clock():
    return lines("SM clock", "Clock of the streaming multiprocessors. If it falls under load, Clocks event reasons shows why. The axis "
                 "does not begin at 0.", [query(f"highwater_gpu_sm_clock_hertz{{{GPU}}}", NAME)], "hertz", minimum=None, legend=None)


def _power():
    return lines("Power", "Mean power draw between scrapes, by the GPU's energy. Dashed: the power limit in force, the highest of the "
                 "selected GPUs; no line if they report none.",
                 [query(queries.power(GPU), NAME),
                  query(f"max(highwater_gpu_power_limit_watts{{{GPU}}})", "limit")], "watt",
                 overrides=[dashed("limit", RED), unlisted(OF_A_GPU)])


def _temperature():
    return lines("Temperature", "Core temperature. Dashed: where the hardware slows the GPU and where it shuts down, the lowest of "
                 "the selected GPUs; no line if they report none. Clocks event reasons has thermal reasons. The axis does not begin at 0.",
                 [query(f"highwater_gpu_temperature_celsius{{{GPU}}}", NAME),
                  query(f"min by (limit) (highwater_gpu_temperature_limit_celsius{{{GPU}}})", "{{limit}}")], "celsius",
                 minimum=None, overrides=[dashed("slowdown", ORANGE), dashed("shutdown", RED), unlisted(OF_A_GPU)])


def _energy():
    return table("Energy in this range", "Energy that each GPU used over the dashboard's time range.",
                 [rows(f"increase(highwater_gpu_energy_joules_total{{{GPU}}}[$__range]) / 3600")], [
                     column("Node", source="instance"),
                     column("GPU", source="gpu", width=50),
                     column("Energy", source="A", unit="watth", decimals=1, minimum=0, steps=[(0, BLUE)], cell="gauge"),
                 ], hidden=["uuid", "pod"], sort=("Energy", True))


def _throttled():
    active = f"highwater_gpu_clocks_event_active{{{GPU}}}"
    ever = f"max by (instance, gpu, reason) (max_over_time({active}[$__range])) > 0"
    reasons = f"max by (instance, gpu, reason) ({active}) and ({ever})"
    # A GPU without a reason has a row as well: only then a lack of rows means that nothing is known.
    healthy = f'label_replace(0 * max by (instance, gpu) ({active}), "reason", "not throttled", "", "")'
    return timeline("Clocks event reasons", "Why a GPU runs below its requested clock. sw_power_cap is normal at full load; hw_* and "
                    "sw_thermal_slowdown are not. A GPU has a row for each reason within the range, or one that says that it is not throttled.",
                    [query(queries.by_node(f"({reasons}) or ({healthy} unless on (instance, gpu) ({ever}))"), NAME + " {{reason}}")], "none",
                    [(0, GREEN), (1, ORANGE)], per_page=12)


def _answers():
    return timeline("GPU answers", "Red while the driver does not answer for the GPU. A gap: the daemon was not scraped.",
                    [query(queries.by_node(UP), NAME)], steps=[(0, RED), (1, GREEN)], per_page=12)


def _xids():
    last = f"highwater_gpu_xid_last_timestamp_seconds{{{GPU}}} * 1000"
    expr = queries.first_of(last, queries.a_row("xid", "none since the daemons started", UP))
    return table("XID errors", "Every kind of XID error that a GPU has raised since its daemon started, with the time of the last "
                 "one. The number links to NVIDIA's catalogue.", [rows(expr)], [
                     column("XID", source="xid", link=("NVIDIA's catalogue of XID errors",
                                                       "https://docs.nvidia.com/deploy/xid-errors/")),
                     column("Last", source="A", unit="dateTimeFromNow", mappings=[words({0: ""})], missing="", width=140),
                     column("Node", source="instance", missing="", width=120),
                     column("GPU", source="gpu", width=45, missing=""),
                 ], hidden=["uuid", "pod"])


def _identity():
    return table("GPUs", "Every GPU and MIG instance with its identity, and whether it answers. A GPU that could not be opened has "
                 "no identity.", [
                     rows(f"max by (instance, gpu) ({UP})"),
                     rows("max by (instance, gpu, name, uuid, pci_bus_id, driver_version, mig_profile) "
                          f"(highwater_gpu_info{{{GPU}}})"),
                 ], [
                     column("Node", source="instance"),
                     column("GPU", source="gpu", width=70),
                     column("Answers", source="A", mappings=[words({0: ("no", RED), 1: ("yes", GREEN)})], cell="text",
                            width=80),
                     column("Name", source="name"),
                     column("UUID", source="uuid", width=350),
                     column("PCI bus", source="pci_bus_id"),
                     column("Driver", source="driver_version"),
                     column("MIG profile", source="mig_profile", missing=""),
                 ], pages=True)


def _ecc():
    return lines("ECC, remapped rows", "New ECC errors, and memory rows that were remapped because of them. A single "
                 "corrected error is harmless; an uncorrected one kills the job that touches it. Bars of at least two minutes "
                 "that do not overlap.",
                 [query(f"sum by (error_type) (increase(highwater_gpu_ecc_errors_total{{{GPU}}}[$__interval]))",
                        "ECC, {{error_type}}"),
                  query(f"sum by (error_type) (increase(highwater_gpu_remapped_rows_total{{{GPU}}}[$__interval]))",
                        "rows remapped, {{error_type}}")], "short", **COUNTED)


def _bus(title, name, description):
    sent = {"matcher": {"id": "byRegexp", "options": "/ sent$/"},
            "properties": [{"id": "custom.transform", "value": "negative-Y"}]}
    rate = "rate(highwater_gpu_%s_%s_bytes_total{%s}[$__rate_interval])"
    return lines(title, description + " Received by the GPU: above the axis. Sent: below.",
                 [query(rate % (name, "received", GPU), NAME + " received"), query(rate % (name, "transmitted", GPU), NAME + " sent")],
                 "Bps", minimum=None, overrides=[sent])
