"""Training job: whether one job is well, why it is slow, and what its steps, phases and memory do."""

from generator import findings, queries
from generator.board import OWNED, Board, listed, owners, runbooks, window
from generator.panels import (across, BLUE, GREEN, FULL, NONE_WANTED, ORANGE, RED, YELLOW, column, heat, lines, otherwise, query, rows, table,
                              tile, timeline, words)
from generator.queries import (PHASE, PHASES, RANK, RECENT, STEP, WHOLE, count, in_order, mean, or_zero, phase_peak, quantile,
                               seconds)

INFO = f"highwater_job_info{{{RANK}}}"
LAST = f"highwater_job_last_annotation_timestamp_seconds{{{RANK}}}"
# Alerts about the job, and alerts without a job about the nodes that it runs on.
NODES_ALERTS = queries.firing('training_job=""')
ALERTS = f"{queries.firing(queries.JOB)} or ({NODES_ALERTS} and on (instance) highwater_job_info{{{queries.JOB}}})"
# Findings about the job, and findings without a job about the GPUs that it runs on: a GPU that ranks share has no job.
FINDINGS = (f'highwater_finding_active{{{RANK}}} == 1 or (highwater_finding_active{{training_job="",gpu!=""}} == 1 '
            f"and on (instance, gpu) {INFO})")
LAG = [(0, GREEN), (1.2, YELLOW), (1.5, RED)]
STALL = [(0, GREEN), (0.15, YELLOW), (0.3, RED)]
SLOWDOWN = [(0, GREEN), (2, YELLOW), (10, RED)]
TO_NODE = ("GPUs of this node", "/d/highwater-gpu-memory?${__url_time_range}&${datasource:queryparam}&var-instance=${__value.raw}")
TO_GPU = ("This GPU", "/d/highwater-gpu-memory?${__url_time_range}&${datasource:queryparam}"
          "&var-instance=${__data.fields.Node}&var-gpu=${__value.raw}")


def dashboard():
    board = Board("training-job", "One training job: why it is slow, how long its steps and phases take, what memory did inside "
                  "each phase, and where the GPUs waited. The job's name is in the label training_job. "
                  "Grey means unknown.", [
                      *owners(),
                      listed("job", "Job", OWNED, "training_job",
                             "The job's name in its annotations, the label training_job.", many=False),
                      listed("rank", "Rank", f"highwater_job_info{{{queries.JOB}}}", "rank", "Ranks of the job.", sort=3),
                      listed("phase", "Phase", f"highwater_phase_active{{{queries.JOB}}}", "phase",
                             "Phases that the job has annotated."),
                      window("highwater_phase_memory_peak_max_bytes"),
                      runbooks(),
                  ], ["gpu", "training"])
    board.row("Is anything wrong?")
    board.tiles(*_tiles())
    board.row("Why is it slow")
    board.line(10, (24, findings.findings_table("Findings that go on", FINDINGS, INFO, of=" of the job and its GPUs")))
    board.line(11, (8, _lag()), (8, _stall()), (8, _slowdown()))
    board.line(7, (24, findings.alerts_table("Alerts that fire", ALERTS, f"highwater_job_info{{{queries.JOB}}}")))
    board.line(9, (24, _where()))
    board.row("Steps")
    on = board.line(10, (9, _durations()), (8, _distribution()), (7, _rates()))
    board.line(10, (24, _ranks()))
    board.row("Phases")
    board.line(9, (9, _per_step()), (8, _rare()), (7, _rare_of_all()))
    board.row("Memory")
    on += board.line(9, (8, _peak("Peak by phase", "phase", "{{phase}}", "highest of the selected ranks")),
                     (8, _peak_by_rank()), (8, _floor()))
    board.line(9, (8, _allocator()), (8, _outside()), (8, _failed()))
    board.row("GPU time and energy")
    board.line(9, (12, _tensor()), (12, _idle()))
    board.line(9, (12, _energy()), (12, _power()))
    findings.annotate(board, queries.JOB, on[:2] + on[3:5])
    return board


def _tiles():
    idle = f"sum(rate(highwater_phase_gpu_idle_seconds_total{{{PHASE}}}[$__rate_interval]))"
    ranks = "count by (training_job, rank) (%s)"
    gone = f"{ranks % f'last_over_time({INFO}[$__range])'} unless {ranks % INFO}"
    top = (f"max by (instance, training_job, rank) ({phase_peak(PHASE)}) "
           f"* on (instance, training_job, rank) group_right () {INFO} "
           "/ on (instance, gpu, uuid) group_left () (highwater_gpu_memory_used_bytes + highwater_gpu_memory_free_bytes)")
    return [
        tile("Silent for", "Time since the longest-silent rank sent its last event. A rank that hangs or died goes silent, and is "
             "forgotten after annotations.silence (5 min by default): Ranks gone counts it then. Where each rank is shows the "
             "phase in which it stopped.", f"time() - min({LAST})", "s", [(-86400, GREEN), (30, YELLOW), (120, RED)], missing="gone",
             decimals=0),
        tile("Ranks gone", "Ranks that were seen within the time range and are not now, although others of the job are: they hang, "
             "died, or belong to an earlier and larger run. If none is left, the job ended or died.",
             f"(count({gone}) or 0 * count({INFO})) + 0 * count({INFO})", steps=NONE_WANTED, missing="all or unknown"),
        tile("Step time, mean", "The exact mean duration of a step over the last few scrapes, all selected ranks.",
             mean(STEP, RANK), "s", [(0, BLUE)], decimals=2),
        tile("Against this range", "The current mean step time as a share of the mean over the dashboard's time range: 200 % means "
             "that steps take twice as long as usual. Choose a range that includes a healthy period.",
             f"({mean(STEP, RANK)}) / ({mean(STEP, RANK, window=WHOLE)})", "percentunit",
             [(0, GREEN), (1.2, YELLOW), (1.5, RED)], decimals=0),
        tile("GPU idle", "Share of the phases' time in which the GPU ran nothing: it waited for data, for the host, or for a file. "
             "Investigate above 10 %; above 20 % the wait limits the job.", f"{idle} / {seconds(PHASES, PHASE)}", "percentunit",
             [(0, GREEN), (0.1, YELLOW), (0.2, RED)], decimals=1),
        tile("Highest peak", "The most device memory in use at any millisecond of any phase that ended in the window, as a share of "
             "the memory that jobs can have on the rank's GPU.", f"max({top})", "percentunit", FULL, decimals=1),
        tile("Worst lag", "Compute time of the last step of the slowest rank, as a share of the median of its peers on the node.",
             f"max(highwater_job_compute_lag_ratio{{{RANK}}})", "percentunit", LAG, decimals=0),
        tile("Worst data stall", "Share of the last 10 steps' time that the worst rank spent waiting for data with its GPU idle.",
             f"max(highwater_job_data_stall_ratio{{{RANK}}})", "percentunit", STALL, decimals=0),
        tile("Comm slowdown", "Communication of the last step as a multiple of the median of the rank's healthy steps; "
             "1 is healthy.", f"max(highwater_comm_slowdown_ratio{{{RANK}}})", "none", SLOWDOWN, decimals=1),
        tile("Retries, in range", "Device allocations that failed and were retried after the allocator flushed its cache, over the "
             "time range: the job is close to out of memory, and its steps are slower.",
             f"sum(increase(highwater_job_allocator_retries_total{{{RANK}}}[$__range]))", "short", [(0, GREEN), (1, ORANGE)],
             decimals=0),
        tile("OOMs, in range", "Out-of-memory errors that the job's allocator counted over the time range.",
             f"sum(increase(highwater_job_allocator_ooms_total{{{RANK}}}[$__range]))", "short", NONE_WANTED, decimals=0),
        tile("Alerts firing", "Alerts about the job and its nodes that fire. Unknown if Prometheus has not loaded the rules.",
             or_zero(f"count({ALERTS})", f"{queries.RULES} and on (instance) {INFO}"), steps=NONE_WANTED),
    ]


def _by_rank(title, description, metric, unit, low, high, **more):
    vector = f"max by (rank) (max_over_time({metric}{{{RANK}}}[$__rate_interval]))"
    return heat(title, description + " A row for each rank, rank 0 at the top, with the highest value of each interval. A "
                "gap is unknown.",
                [query(in_order(vector), shape="table")], unit, rows_of="rank", low=low, high=high, interval="30s", **more)


def _spread(title, description, vector, unit):
    """Three curves for any number of ranks. The table Ranks has each of them."""
    names = {"highest rank": f"max({vector})", "median": f"quantile(0.5, {vector})", "lowest rank": f"min({vector})"}
    return lines(title, description, [query(expr, name) for name, expr in names.items()], unit)


def _lag():
    return _by_rank("Compute lag, by rank", "The last step's time outside communication and data, divided by the median of the "
                    "job's other ranks on the node. A rank that stands out for long is a straggler, for which the others wait.",
                    "highwater_job_compute_lag_ratio", "percentunit", 1, 1.5, decimals=0, scheme="RdYlGn")


def _stall():
    return _by_rank("Data stall, by rank", "Share of the last 10 steps' time spent waiting for data with the GPU idle.",
                    "highwater_job_data_stall_ratio", "percentunit", 0, 0.5, decimals=0, scheme="RdYlGn")


def _slowdown():
    return _by_rank("Comm slowdown, by rank", "The last step's communication as a multiple of the rank's healthy steps. A rank that "
                    "stays healthy while the others slow down is the one that they wait for.",
                    "highwater_comm_slowdown_ratio", "none", 1, 10, decimals=1, scheme="RdYlGn")


BY_RANK = {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "rank"}]}}
# What `in_order` has put before numbers so that text sorts like them.
WITHOUT_ZEROS = {"id": "renameByRegex", "options": {"regex": "^0{1,2}([0-9]+)$", "renamePattern": "$1"}}


def _where():
    phase = f"max by (rank, phase) (highwater_phase_active{{{PHASE}}}) == 1"
    colors = dict(data="yellow", forward="blue", backward="purple", comm="orange", optimizer="green", checkpoint="semi-dark-red",
                  eval="light-blue")
    return timeline("Where each rank is", "The phase of each rank at each scrape, a row for each rank. Phases shorter than the scrape "
                    "interval appear by chance; a hung rank shows as one long bar. A gap is unknown. Twelve ranks a page.",
                    [query(in_order(phase), shape="table")], transformations=[BY_RANK, across("rank", "phase"), WITHOUT_ZEROS], per_page=12, legend=True,
                    mappings=[words({name: (name, color) for name, color in colors.items()}), otherwise("dark-blue")])


def _durations():
    return lines("Step duration", "Exact means of all selected ranks and of the slowest one, and quantiles. If only the 99th "
                 "percentile rises, a few steps are slow: flushes, checkpoints, a data stall. If the median moves, every step "
                 f"changed. {queries.GUARANTEE}",
                 [query(mean(STEP, RANK), "mean (exact)"),
                  query(f"max({mean(STEP, RANK, ['rank'])})", "mean of the slowest rank (exact)"),
                  query(quantile(0.5, STEP, RANK), "median"),
                  query(quantile(0.99, STEP, RANK), "99th percentile")], "s")


def _distribution():
    return heat("Steps by duration", "How many steps took how long. Two bands mean two kinds of steps.",
                [query(queries.distribution(STEP, RANK), "{{le}}", shape="heatmap")], "s", cell_unit="short", decimals=0)


def _rates():
    return _spread("Steps per second", "Steps per second of the ranks. Ranks that train in lockstep share one line.",
                   f"rate(highwater_job_steps_total{{{RANK}}}[$__rate_interval])", "ops")


def _ranks():
    by = "max by (instance, rank)"
    seen = f"last_over_time({INFO}[$__range])"
    queries_ = [
        rows(f"max by (instance, rank, gpu) ({seen})"),
        rows(f"{by} (highwater_job_step{{{RANK}}})"),
        rows(f"{by} (time() - {LAST})"),
        rows(mean(STEP, RANK, ["instance", "rank"])),
        rows(f"{by} (highwater_job_compute_lag_ratio{{{RANK}}})"),
        rows(f"{by} (highwater_job_data_stall_ratio{{{RANK}}})"),
        rows(f"{by} (highwater_comm_slowdown_ratio{{{RANK}}})"),
        rows(f"{by} ({phase_peak(PHASE)})"),
        rows(f"{by} (highwater_job_allocator_reserved_bytes{{{RANK}}})"),
        rows(f"{by} (highwater_job_memory_outside_allocator_bytes{{{RANK}}})"),
    ]
    columns = [
        column("Rank", source="rank", width=70),
        column("Node", source="instance", link=TO_NODE, width=130),
        column("GPU", source="gpu", width=45, link=TO_GPU),
        column("Step", source="B", missing="gone", decimals=0, width=65),
        column("Silent for", source="C", unit="s", decimals=0, missing="gone",
               steps=[(-86400, GREEN), (30, YELLOW), (120, RED)], cell="text", width=80),
        column("Step time", source="D", unit="s", decimals=3, width=95),
        column("Lag", source="E", unit="percentunit", decimals=0, steps=LAG, cell="text", width=55),
        column("Stall", source="F", unit="percentunit", decimals=0, steps=STALL, cell="text", width=55),
        column("Slowdown", source="G", decimals=1, steps=SLOWDOWN, cell="text", width=85),
        column("Peak", source="H", unit="bytes", decimals=1, width=92),
        column("Reserved", source="I", unit="bytes", decimals=1, width=92),
        column("Outside", source="J", unit="bytes", decimals=1, width=92),
    ]
    return table("Ranks", "A row for each rank that was seen within the time range: its node and GPU, its step, lag, stall and "
                 "memory. Reserved is what its allocator holds, Outside is memory of the process beyond that. Node and GPU "
                 "link to GPU memory.", queries_, columns, sort=("Rank", False), pages=True)


def _per_step():
    steps = count(STEP, RANK)
    step = {"matcher": {"id": "byName", "options": "step"},
            "properties": [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}]}
    return lines("Seconds per step, by phase", "Time in each phase per step, mean of the selected ranks. Nested phases count in both. "
                 "The dashed line is the step itself; the time between it and the phases was not annotated.",
                 [query(f"{seconds(PHASES, PHASE, ['phase'])} / ignoring (phase) group_left () {steps}", "{{phase}}"),
                  query(mean(STEP, RANK), "step")], "s", legend="right", calcs=["mean"], overrides=[step])


def _rare():
    return lines("Phase duration", "Exact mean and 99th percentile of each phase's duration, all selected ranks. A comm phase that "
                 f"grows while memory is nearly full waits for a rank without room. Points of rare phases are joined. {queries.GUARANTEE}",
                 [query(mean(PHASES, PHASE, ["phase"]), "{{phase}}, mean"),
                  query(quantile(0.99, PHASES, PHASE, ["phase"]), "{{phase}}, p99")], "s", legend="right",
                 calcs=["max"], span=True)


def _rare_of_all():
    return lines("Phase duration over all ranks", "99th percentile of each phase over every rank and node of the job, whichever ranks are selected, "
                 f"of the last five minutes. Unknown if Prometheus has not loaded the rules. {queries.GUARANTEE}",
                 [query(queries.phase_quantile_of_jobs(0.99, queries.JOB + ',phase=~"$phase"'), "{{phase}}")], "s", legend="right",
                 calcs=["max"], span=True)


def _peak(title, by, legend, of):
    return lines(title, f"The most device memory in use at any millisecond of a phase, {of}. It includes NCCL's buffers and the "
                 "CUDA context, which the framework's own peak omits. If ranks differ widely, the fullest one limits the batch.",
                 [query(f"max by ({by}) ({phase_peak(PHASE, RECENT)})", legend)], "bytes")


def _peak_by_rank():
    share = (f"max by (instance, training_job, rank) ({phase_peak(PHASE, RECENT)}) * on (instance, training_job, rank) group_right () {INFO} "
             "/ on (instance, gpu, uuid) group_left () (highwater_gpu_memory_used_bytes + highwater_gpu_memory_free_bytes)")
    return heat("Peak by rank", "The most device memory in use at any millisecond of the selected phases, as a share of what jobs can "
                "have on the rank's GPU. A row for each rank, rank 0 at the top. If ranks differ widely, the fullest one limits "
                "the batch.", [query(in_order(f"max by (rank) ({share})"), shape="table")], "percentunit", rows_of="rank",
                low=0, high=1, decimals=1, interval="30s", scheme=None)


def _floor():
    # A daemon that restarts within the interval in another pod has two series for a GPU.
    lowest = 'min by (instance, uuid) (min_over_time(highwater_gpu_memory_used_min_bytes{window="60s"}[$__rate_interval]))'
    joined = f"max by (rank) ({lowest} * on (instance, uuid) group_right () {INFO})"
    return _spread("Floor of memory", "The lowest use within at least a minute on the rank's GPU: what it holds between steps. A "
                   "floor that rises for hours is a leak, or a cache that is still warming up.",
                   joined, "bytes")


def _allocator():
    def over(function, name):
        return f"{function}_over_time(highwater_job_allocator_{name}_bytes{{{RANK}}}[$__rate_interval])"

    return lines("Allocator: reserved, allocated", "What the framework's allocators hold from the driver (reserved), and the part in "
                 "live tensors (allocated): the highest and lowest value of the rank with the most and the least. The "
                 "difference of reserved and allocated is cache and fragmentation.",
                 [query(f"max({over('max', 'reserved')})", "reserved, highest"),
                  query(f"max({over('max', 'allocated')})", "allocated, highest"),
                  query(f"min({over('min', 'reserved')})", "reserved, lowest"),
                  query(f"min({over('min', 'allocated')})", "allocated, lowest")], "bytes")


def _outside():
    return _spread("Outside the allocator", "The process's memory on the device minus what its allocator reserved: NCCL's buffers, "
                   "the CUDA context, workspaces. The framework's own tools do not show it. Highest value of each interval.",
                   f"max_over_time(highwater_job_memory_outside_allocator_bytes{{{RANK}}}[$__rate_interval])", "bytes")


def _failed():
    increase = "sum(increase(highwater_job_allocator_%s_total{%s}[$__interval]))"
    return lines("Allocator retries and OOMs", "Failed device allocations: retried after a flush of the cache, or given up, all selected ranks. Bars of at "
                 "least two minutes that do not overlap.",
                 [query(increase % ("retries", RANK), "retries"), query(increase % ("ooms", RANK), "OOMs")],
                 "short", interval="2m", style="bars", fill=60, calcs=["sum"], decimals=0)


def _idle():
    idle = f"sum by (phase) (rate(highwater_phase_gpu_idle_seconds_total{{{PHASE}}}[$__rate_interval]))"
    return lines("GPU idle, by phase", "Share of each phase's time in which the GPU ran nothing. In data the loader is slow; in forward "
                 "or backward the host launches kernels too slowly; in comm a rank waits for another.",
                 [query(f"{idle} / ({seconds(PHASES, PHASE, ['phase'])} > 0)", "{{phase}}")], "percentunit", maximum=1, span=True)


def _tensor():
    tensor, observed = (f"sum by (rank) (rate(highwater_job_step_{name}_seconds_total{{{RANK}}}[$__rate_interval]))"
                        for name in ("tensor_active", "active_observed"))
    return heat("Tensor cores active, by rank", "Share of each rank's time in steps in which its tensor cores worked, from Hopper on. All "
                "ranks take as long for a step as the slowest one: a rank that is well above the others works while they wait. A row "
                "for each rank, rank 0 at the top.",
                [query(in_order(f"{tensor} / ({observed} > 0)"), shape="table")], "percentunit", rows_of="rank",
                low=0, high=1, interval="30s", decimals=0, scheme=None)


def _energy():
    energy = f"sum by (phase) (rate(highwater_phase_energy_joules_total{{{PHASE}}}[$__rate_interval]))"
    return lines("Energy per step, by phase", "Energy of one step of one rank, by phase. Nested phases count in both.",
                 [query(f"{energy} / ignoring (phase) group_left () {count(STEP, RANK)}", "{{phase}}")], "joule", interval="1m")


def _power():
    # Energy and time of a phase are counted at its end. A short range may contain one of the two without the other.
    energy = f"sum by (phase) (rate(highwater_phase_energy_joules_total{{{PHASE}}}[$__rate_interval]))"
    return lines("Power, by phase", "Mean power while a phase ran, over the selected ranks and at least five minutes.",
                 [query(f"{energy} / ({seconds(PHASES, PHASE, ['phase'])} > 0)", "{{phase}}")], "watt", interval="5m", span=True)
