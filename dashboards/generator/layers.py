"""Layers and allocations: which layers take a job's memory, and what its allocator makes of it."""

from generator.board import OWNED, Board, listed, owners
from generator.panels import BLUE, GREEN, NONE_WANTED, ORANGE, bars, column, heat, lines, query, rows, table, tile
from generator.queries import JOB, RANK, in_order

INFO = f"highwater_job_info{{{RANK}}}"
PROFILED = f"highwater_job_profile_step{{{RANK}}}"


def dashboard():
    board = Board("layers", "One job: the layers that take its memory, from the last profiled step of each rank, and its "
                  "allocator: what it holds, what is in tensors, what is outside of it, and how often it had to try again. A job "
                  "without layer profiles has only the latter. Grey means unknown.", [
                      *owners(),
                      listed("job", "Job", OWNED, "training_job",
                             "The job's name in its annotations, the label training_job.", many=False),
                      listed("rank", "Rank", f"highwater_job_info{{{JOB}}}", "rank", "Ranks of the job.", sort=3),
                  ], ["gpu", "training"])
    board.row("The last profiled step")
    board.tiles(*_tiles())
    board.row("Layers")
    board.line(14, (12, _top_activations()), (12, _top_parameters()))
    board.line(10, (24, _ranks()))
    board.row("Profiles over time")
    board.line(9, (8, _total("Activations", "activation", "Activations of all layers in the forward pass of each profiled step. "
                             "They are what activation checkpointing saves.")),
               (8, _total("Parameters", "parameter", "Parameters of all layers, each once. In a sharded job, the rank's own part.")),
               (8, _total("Gathered", "gathered", "Bytes that all-gathers produced in each profiled step. None without sharded "
                          "parameters.")))
    board.row("Allocator")
    board.line(9, (8, _by_rank("Allocated, by rank", "allocator_allocated", "in live tensors")),
               (8, _by_rank("Reserved, by rank", "allocator_reserved", "that the allocator holds from the driver")),
               (8, _by_rank("Outside, by rank", "memory_outside_allocator",
                            "of the process outside its allocator: NCCL's buffers, the CUDA context, workspaces")))
    board.line(9, (12, _cache()), (12, _retries()))
    return board


def _tiles():
    def worst(name):
        return f"max(highwater_job_profile_{name}{{{RANK}}})"

    return [
        tile("Profiled step", "The newest step of which a rank has sent its layers. Metrics of layers change only at profiled steps.",
             f"max({PROFILED})", steps=[(0, BLUE)], missing="no profile", decimals=0),
        tile("Layers", "Different layers in the profile of the rank that has the most.", worst("layers"), steps=[(0, BLUE)],
             missing="no profile", decimals=0),
        tile("Activations", "Activations of all layers in the forward pass, rank with the most.", worst("activation_bytes"), "bytes",
             [(0, BLUE)], missing="no profile", decimals=1),
        tile("Parameters", "Parameters of all layers, rank with the most.", worst("parameter_bytes"), "bytes", [(0, BLUE)],
             missing="no profile", decimals=1),
        tile("Highest allocated", "The most in live tensors after any layer, rank with the most.", worst("allocated_max_bytes"), "bytes",
             [(0, BLUE)], missing="no profile", decimals=1),
        tile("Highest reserved", "The most that an allocator held after any layer, rank with the most.", worst("reserved_max_bytes"),
             "bytes", [(0, BLUE)], missing="no profile", decimals=1),
        tile("Missing records", "Records of layers that the profiles lack because there was no room. If "
             "highwater_annotations_total{outcome=\"over_budget\"} rises, raise annotations.max_ended_bytes or "
             "annotations.max_bytes, as the daemon's log says; otherwise profile fewer layers.", f"sum(highwater_job_profile_missing_records{{{RANK}}})", "short", NONE_WANTED,
             missing="no profile", decimals=0),
        tile("Retries, in range", "Device allocations that failed and were retried after the allocator flushed its cache, over the "
             "time range.", f"sum(increase(highwater_job_allocator_retries_total{{{RANK}}}[$__range]))", "short",
             [(0, GREEN), (1, ORANGE)], decimals=0),
    ]


def _top(title, description, name):
    each = f"max by (layer) (highwater_layer_{name}_bytes{{{RANK}}})"
    return bars(title, description, f"topk(20, {each})", "bytes", "{{layer}}", label="layer", decimals=1)


def _top_activations():
    return _top("Top layers, by activations", "Activations of single layers in the last profiled step, of the rank in which the layer "
                "has the most. Each rank exports the layers with the most (layers.top, 10 by default). A layer that is called "
                "several times has the sum.", "activation")


def _top_parameters():
    return _top("Their parameters", "Parameters of the layers with the most activations, the largest first. Layers with few "
                "activations are not exported, whatever their parameters; the API has all of them.", "parameter")


def _ranks():
    by = "max by (instance, rank)"

    def of(name):
        return rows(f"{by} (highwater_job_profile_{name}{{{RANK}}})")

    columns = [
        column("Rank", source="rank", width=70),
        column("Node", source="instance", width=180),
        column("Step", source="B", decimals=0, width=80, missing="no profile"),
        column("Layers", source="C", decimals=0, width=80),
        column("Missing", source="D", decimals=0, width=90),
        column("Activations", source="E", unit="bytes", decimals=1),
        column("Parameters", source="F", unit="bytes", decimals=1),
        column("Gathered", source="G", unit="bytes", decimals=1),
        column("Allocated", source="H", unit="bytes", decimals=1),
        column("Reserved", source="I", unit="bytes", decimals=1),
    ]
    shown = [rows(f"{by} ({INFO})"), of("step"), of("layers"), of("missing_records"), of("activation_bytes"),
             of("parameter_bytes"), of("gathered_bytes"), of("allocated_max_bytes"), of("reserved_max_bytes")]
    return table("Profile of each rank", "The last profiled step of each rank. Allocated and Reserved are the highest values after any "
                 "layer. Missing is the number of records that found no room.", shown, columns,
                 sort=("Rank", False), pages=True)


def _total(title, name, description):
    vector = f"highwater_job_profile_{name}_bytes{{{RANK}}}"
    names = {"highest rank": f"max({vector})", "median": f"quantile(0.5, {vector})", "lowest rank": f"min({vector})"}
    return lines(title, description, [query(expr, legend) for legend, expr in names.items()], "bytes")


def _by_rank(title, name, what):
    vector = f"max by (rank) (max_over_time(highwater_job_{name}_bytes{{{RANK}}}[$__rate_interval]))"
    return heat(title, f"Bytes {what}, as the job last reported: the highest value of each interval. A row for each rank, rank 0 "
                "at the top. A gap is unknown.", [query(in_order(vector), shape="table")], "bytes", rows_of="rank", low=0,
                interval="30s", decimals=1, scheme=None)


def _cache():
    reserved, allocated = (f"highwater_job_allocator_{name}_bytes{{{RANK}}}" for name in ("reserved", "allocated"))
    vector = f"({reserved} - {allocated}) / {reserved}"
    names = {"highest rank": f"max({vector})", "median": f"quantile(0.5, {vector})", "lowest rank": f"min({vector})"}
    return lines("Reserved but not allocated", "Share of the memory that the allocator holds and no live tensor uses: cache and "
                 "fragmentation. After a phase that frees its memory it is high; it should fall again when the next step grows.",
                 [query(expr, legend) for legend, expr in names.items()], "percentunit", maximum=1)


def _retries():
    increase = "sum by (rank) (increase(highwater_job_allocator_retries_total{%s}[$__interval]))"
    return lines("Allocator retries, by rank", "Failed device allocations that made the allocator flush its cache and try again. Bars "
                 "of at least two minutes that do not overlap.", [query(increase % RANK, "rank {{rank}}")], "short",
                 interval="2m", style="bars", fill=60, calcs=["sum"], decimals=0)
