"""PromQL that several dashboards share.

A duration is a native histogram where Prometheus scrapes those, and a classic one elsewhere. A native histogram is one
series without `_bucket`, `_sum` and `_count`, so every expression on durations has both forms, joined by `or`. Sums and
counts join them series by series: where some nodes are scraped this way and some that way, or both forms are stored, each
series counts once. Buckets of the two forms do not add up, so a quantile or heat map over several nodes is that of the
native ones if there are any. Prometheus 2.40 and newer parse both.

A gauge with a label `window` is a maximum or minimum over that window before the scrape. A point of a time panel stands for
a whole interval, which has many such windows, so time panels take the maximum or minimum of them (`over`).
"""

NODE = 'instance=~"$instance"'
GPU = 'instance=~"$instance",gpu=~"$gpu"'
# A name may be that of several owners: of namespaces or else of users.
JOB = 'namespace=~"$namespace",user=~"$user",training_job=~"$job"'
RANK = JOB + ',rank=~"$rank"'
PHASE = RANK + ',phase=~"$phase"'
STEP = "highwater_job_step_duration_seconds"
PHASES = "highwater_phase_duration_seconds"
RECENT, WHOLE = "$__rate_interval", "$__range"


def _sum(by, vector):
    return f"sum by ({', '.join(by)}) ({vector})" if by else f"sum({vector})"


# What a panel says of its quantiles: the bounds of a native bucket are 9 % apart, those of a classic one 29 %, and 2.5 times where a node has
# many series.
GUARANTEE = ("Quantiles are within 10 % of the true ones with native histograms; with classic buckets within 29 %, or by up to 2.5 times on nodes "
             "with many series, whose buckets are coarse.")


def quantile(q, metric, matchers, by=(), window=RECENT):
    native = _sum(by, f"rate({metric}{{{matchers}}}[{window}])")
    classic = _sum((*by, "le"), f"rate({metric}_bucket{{{matchers}}}[{window}])")
    return f"histogram_quantile({q}, {native}) or histogram_quantile({q}, {classic})"


def phase_quantile_of_jobs(q, matchers):
    """Over all ranks and nodes, of five minutes: by the recording rules alone, since the histograms of a large job are tens of thousands
    of series, and `or` would read them in any case."""
    native, classic = (f"highwater:job_phase_duration_seconds{part}:rate5m{{{matchers}}}" for part in ("", "_bucket"))
    return f"histogram_quantile({q}, sum by (phase) ({native})) or histogram_quantile({q}, sum by (phase, le) ({classic}))"


def seconds(metric, matchers, by=(), window=RECENT):
    """Seconds that passed in what `metric` measures, per second."""
    native, classic = f"rate({metric}{{{matchers}}}[{window}])", f"rate({metric}_sum{{{matchers}}}[{window}])"
    return _sum(by, f"histogram_sum({native}) or {classic}")


def count(metric, matchers, by=(), window=RECENT):
    """How often it happened, per second."""
    native, classic = f"rate({metric}{{{matchers}}}[{window}])", f"rate({metric}_count{{{matchers}}}[{window}])"
    return _sum(by, f"histogram_count({native}) or {classic}")


def mean(metric, matchers, by=(), window=RECENT):
    """The exact mean; nothing where nothing happened."""
    return f"{seconds(metric, matchers, by, window)} / ({count(metric, matchers, by, window)} > 0)"


def distribution(metric, matchers, window=RECENT):
    """Buckets for a heat map: the native ones alone where both forms are stored."""
    increase = f"increase({metric}{{{matchers}}}[{window}])"
    classic = f"increase({metric}_bucket{{{matchers}}}[{window}])"
    return f"sum({increase}) or on () sum by (le) ({classic})"


def usable(matchers, over=None):
    """Bytes that jobs can have, without the driver's reserve: now, or when the GPU was last read within the range `over`."""
    used, free = (f"highwater_gpu_memory_{part}_bytes{{{matchers}}}" for part in ("used", "free"))
    return f"({_last(used, over)} + {_last(free, over)})"


def _last(gauge, over):
    return f"last_over_time({gauge}[{over}])" if over else gauge


def windowed(function, metric, matchers, over=None):
    """A gauge of the chosen window; with `over`, its highest or lowest value within that range (`function`: max or min)."""
    gauge = f'{metric}{{{matchers},window="$window"}}'
    return f"{function}_over_time({gauge}[{over}])" if over else gauge


def peak(matchers, over=None):
    """The highest use within the window."""
    return windowed("max", "highwater_gpu_memory_used_max_bytes", matchers, over)


def floor(matchers, over=None):
    """The lowest use within the window."""
    return windowed("min", "highwater_gpu_memory_used_min_bytes", matchers, over)


def phase_peak(matchers, over=None):
    """The highest use at any time of a phase that ended within the window."""
    return windowed("max", "highwater_phase_memory_peak_max_bytes", matchers, over)


def fullness(matchers, over=None):
    """The highest use within the window, as a share of what jobs can have."""
    return f"{peak(matchers, over)} / ignoring (window) {usable(matchers, over)}"


def power(matchers, window=RECENT):
    """Mean power draw, by the energy counter. The gauge is of the moment of a scrape, and the GPUs of a job work in step: its sum over
    a job can be a third of the truth at one scrape and the whole of it at the next."""
    return f"rate(highwater_gpu_energy_joules_total{{{matchers}}}[{window}])"


def share_of_power_limit(matchers):
    """Power draw as a share of the limit in force; nothing for a GPU that reports no limit."""
    return f"{power(matchers)} / highwater_gpu_power_limit_watts{{{matchers}}}"


def below_slowdown(matchers):
    """Degrees between a GPU and the temperature at which it slows itself; nothing for a GPU that reports none."""
    limit = f'highwater_gpu_temperature_limit_celsius{{{matchers},limit="slowdown"}}'
    return f"{limit} - ignoring (limit) highwater_gpu_temperature_celsius{{{matchers}}}"


def flushes(matchers, window):
    """How often allocators returned their caches, by GPU: as the allocators of its ranks count it, and of GPUs on which none does, how often memory
    fell steeply and grew back. A job that gives memory back by itself looks like the latter."""
    # A rank on several GPUs, or that moved, counts on each of them; one of two scrape jobs, or of a world of another size, counts once.
    of = "instance, namespace, user, training_job, rank"
    ranks = f"max by (gpu, uuid, {of}) (last_over_time(highwater_job_info{{{matchers}}}[{window}]))"
    counted = f"max by ({of}) (increase(highwater_job_allocator_retries_total[{window}])) * on ({of}) group_right () {ranks}"
    seen = f"increase(highwater_gpu_memory_flushes_total{{{matchers}}}[{window}])"
    return f"sum by (instance, gpu, uuid) ({counted}) or on (instance, gpu, uuid) {seen}"


def or_zero(expr, if_there_is):
    """`expr`, or 0 as long as `if_there_is` returns anything. Without it, what was not seen stays unknown."""
    return f"{expr} or 0 * count({if_there_is})"


def in_order(vector, label="rank"):
    """Pads numbers of up to three digits with zeros, because Prometheus and Grafana sort labels as text."""
    padded = f'label_replace({vector}, "{label}", "0$1", "{label}", "([0-9]{{2}})")'
    return f'label_replace({padded}, "{label}", "00$1", "{label}", "([0-9])")'


def firing(matchers):
    return f'ALERTS{{alertstate="firing",alertname=~"Highwater.*",{matchers}}}'


# This recorded series exists while the rules of dashboards/alerts are evaluated and a GPU is read.
RULES = "highwater:gpu_memory_headroom_bytes"


def count_firing(alerts, among):
    """How many alerts fire; nothing if Prometheus has not loaded the rules or no GPU of `among` is read."""
    return or_zero(f"count({alerts})", f"{RULES}{{{among}}}")


def by_node(vector):
    """GPUs in the order of their nodes: Prometheus returns series in the order of their labels, and `gpu` comes before `instance`."""
    # The label that decides must come before all others.
    numbered = in_order(f'label_replace({vector}, "order", "$1", "gpu", "(.*)")', "order")
    return f'label_join({numbered}, "_row", " ", "instance", "order")'


def by_severity(vector):
    """Series with the label `severity`, the higher the worse: a table sorts labels as text, in which `info` comes before `warning`."""
    order = " or ".join(f'label_replace(vector({nth}), "severity", "{name}", "", "")' for name, nth in [("critical", 3), ("warning", 2), ("info", 1)])
    # Sites may give alerts another severity.
    return f"(({vector}) * on (severity) group_left () ({order})) or 0 * ({vector})"


def a_row(label, text, if_there_is):
    """One row that has only `text` in `label`, as long as `if_there_is` returns anything."""
    return f'label_replace(0 * count({if_there_is}), "{label}", "{text}", "", "")'


def first_of(*vectors):
    """The first of these vectors that returns anything."""
    return " or on () ".join(f"({vector})" for vector in vectors)


def daemons_seen():
    """The daemons that were scraped within the range, or within a day where Prometheus still tries to."""
    daemon = f"highwater_build_info{{{NODE}}}"
    return f"(last_over_time({daemon}[$__range]) or up{{{NODE}}} == 0 and on (job, instance) last_over_time({daemon}[1d]))"


def gone():
    """How many daemons are gone: scraped within the range, or within a day where Prometheus still tries to, and not now. After an outage
    that is longer than the range, only the second is left."""
    daemon, known = f"highwater_build_info{{{NODE}}}", daemons_seen()
    return or_zero(f"count(count by (instance) ({known}) unless count by (instance) ({daemon}))", known)
