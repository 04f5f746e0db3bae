"""Compare runs: several jobs side by side, such as one for each algorithm, batch size or version."""

from generator import queries
from generator.board import OWNED, Board, listed, owners, window
from generator.panels import BLUE, FULL, NONE_WANTED, ORANGE, GREEN, bars, column, lines, matrix, plot, query, rows, table
from generator.queries import JOB, PHASES, RECENT, STEP, WHOLE, count, mean, peak, phase_peak, seconds, usable

INFO = f"max by (instance, uuid, training_job) (highwater_job_info{{{JOB}}})"
BY = "training_job"
NAME = "{{training_job}}"
# A curve without points for each run that has none, so that each run has the same colour on all panels.
EVERY_RUN = f" or (max by ({BY}) (highwater_job_info{{{JOB}}}) * NaN)"
TO_JOB = ("The job", "/d/highwater-training-job?${__url_time_range}&${datasource:queryparam}&var-job=${__value.raw}")


def of_job(vector, reduce="max", info=INFO):
    """A vector of GPUs, by the jobs that run on them."""
    return f"{reduce} by ({BY}) ({vector} * on (instance, uuid) group_right () {info})"


def peaks_of_jobs():
    """The peak of each interval at whose beginning the job ran already: a GPU's peak before may be another job's."""
    throughout = f"({INFO} and max by (instance, uuid, training_job) (highwater_job_info{{{JOB}}} offset {RECENT}))"
    # A daemon that restarts within the interval in another pod has two series for a GPU.
    return of_job(f"max by (instance, uuid) ({_everywhere(peak('', RECENT))})", info=throughout)


def _everywhere(expr):
    """An expression whose matchers are empty."""
    return expr.replace("{,", "{").replace("{}", "")


def dashboard():
    board = Board("compare-runs", "Runs side by side, one job each: an algorithm, a batch size or a version against another. Runs that "
                  "ended stay as long as the time range contains them. Two runs with the same name are one job here.", [
                      *owners(),
                      listed("job", "Jobs", OWNED, "training_job",
                             "The jobs to compare, by their names in annotations, the label training_job."),
                      window("highwater_gpu_memory_used_max_bytes"),
                  ], ["gpu", "training"])
    board.row("The runs")
    board.line(9, (24, _runs()))
    board.row("Memory")
    board.line(10, (24, _memory()))
    board.line(11, (16, _by_step()), (8, _highest()))
    board.row("Steps and phases")
    board.line(9, (12, _steps()), (12, _progress()))
    board.line(10, (12, _phases()), (12, _peaks()))
    board.row("Work and energy")
    board.line(9, (8, _step_time()), (8, _energy()), (8, _utilization()))
    return board


def _runs():
    seen = f"last_over_time(highwater_job_info{{{JOB}}}[$__range])"
    by = f"max by ({BY})"
    energy = f"sum by ({BY}) (rate(highwater_phase_energy_joules_total{{{JOB}}}[$__range]))"
    idle = f"sum by ({BY}) (rate(highwater_phase_gpu_idle_seconds_total{{{JOB}}}[$__range]))"
    # Marked steps: energy is known of these alone.
    steps = count(STEP, JOB, [BY], WHOLE)
    queries_ = [
        rows(f"count by ({BY}) (count by ({BY}, rank) ({seen}))"),
        rows(f"count by ({BY}) (count by ({BY}, rank) (highwater_job_info{{{JOB}}}))"),
        rows(f"{by} (max_over_time(highwater_job_step{{{JOB}}}[$__range]))"),
        rows(mean(STEP, JOB, [BY], WHOLE)),
        rows(f"{by} ({phase_peak(JOB, WHOLE)})"),
        rows(f"{energy} / ({steps} > 0)"),
        rows(f"{idle} / ({seconds(PHASES, JOB, [BY], WHOLE)} > 0)"),
        rows(f"sum by ({BY}) (increase(highwater_job_allocator_retries_total{{{JOB}}}[$__range]))"),
        rows(f"sum by ({BY}) (increase(highwater_job_allocator_ooms_total{{{JOB}}}[$__range]))"),
    ]
    columns = [
        column("Job", source=BY, link=TO_JOB, width=135),
        column("Ranks", source="A", width=60),
        column("Running", source="B", missing="ended", cell="text", steps=[(1, BLUE)], width=75),
        column("Last step", source="C", decimals=0, width=80),
        column("Step time", source="D", unit="s", decimals=3, minimum=0, steps=[(0, BLUE)], cell="gauge"),
        column("Peak", source="E", unit="bytes", decimals=1, minimum=0, steps=[(0, BLUE)], cell="gauge"),
        column("Energy/step", source="F", unit="joule", decimals=0, minimum=0, steps=[(0, BLUE)], cell="gauge"),
        column("Idle", source="G", unit="percentunit", decimals=1, width=65),
        column("Retries", source="H", decimals=0, steps=[(0, GREEN), (1, ORANGE)], cell="text", width=65),
        column("OOMs", source="I", decimals=0, steps=NONE_WANTED, cell="text", width=60),
    ]
    return table("Runs", "Each job over the time range: its exact mean step time, its energy per step of a rank, its highest peak at any "
                 "millisecond of a phase, and how long its GPUs were idle. Energy is power times time inside phases: nested "
                 "phases count in each, and what runs outside phases does not count.", queries_, columns, sort=("Job", False))


def _memory():
    return lines("Memory of each run over time", "The highest use in each interval of the fullest GPU of each run, at the time at which it "
                 "ran. One curve a run: with a run for each algorithm it shows what each of them takes. A run's first interval is "
                 "left out, because the GPU's peak there may be that of the run before.",
                 [query(peaks_of_jobs(), NAME)], "bytes", legend="right", calcs=["max"])


def _by_step():
    return plot("Memory of each run by step", "The highest use in each interval of the fullest GPU of each run over the step that it was "
                "in, so that runs of different times lie on each other. A run's first interval is left out.",
                [query(f"max by ({BY}) (highwater_job_step{{{JOB}}})", shape="table"),
                 query(peaks_of_jobs(), shape="table")], "bytes", x="Step", y="Peak memory", split=BY)


def _highest():
    share = _everywhere(f"{peak('')} / ignoring (window) {usable('')}")
    return bars("Highest share of memory", "The highest use in the window of the fullest GPU of each run that goes on, as a share of the "
                "memory that jobs can have there.", of_job(f"({share})"), "percentunit", NAME, FULL, label=BY, maximum=1, decimals=1)


def _steps():
    return lines("Step time of each run", "The exact mean duration of a step, all ranks of each run.",
                 [query(mean(STEP, JOB, [BY]), NAME)], "s", legend="right", calcs=["mean"])


def _progress():
    return lines("Step of each run", "The number of the last step. The steeper, the faster; a fall is a restart.",
                 [query(f"max by ({BY}) (highwater_job_step{{{JOB}}})", NAME)], "none", decimals=0, legend="right",
                 calcs=["lastNotNull"])


def _phases():
    return matrix("Mean duration of each phase", "The exact mean duration of each phase over the time range, a column for each run.",
                  mean(PHASES, JOB, [BY, "phase"], WHOLE), "s", down="phase", across=BY, decimals=3)


def _peaks():
    return matrix("Highest peak of each phase", "The most device memory in use at any millisecond of each phase over the time range, a "
                  "column for each run.", f"max by ({BY}, phase) ({phase_peak(JOB, WHOLE)})", "bytes", down="phase", across=BY,
                  decimals=1)


def _step_time():
    return bars("Step time over the range", "The exact mean duration of a step over the time range.", mean(STEP, JOB, [BY], WHOLE), "s",
                NAME, label=BY, decimals=3)


def _energy():
    energy = f"sum by ({BY}) (rate(highwater_phase_energy_joules_total{{{JOB}}}[$__rate_interval]))"
    return lines("Energy per step", "Energy of the phases of one step of one rank, over at least a minute. Nested phases count in each.",
                 [query(f"{energy} / ({count(STEP, JOB, [BY])} > 0)" + EVERY_RUN, NAME)], "joule", interval="1m")


def _utilization():
    jobs = of_job(f"avg_over_time(highwater_gpu_utilization_ratio[{RECENT}])", "avg") + EVERY_RUN
    return lines("Utilization", "Share of time in which a kernel ran, mean of the run's GPUs.", [query(jobs, NAME)], "percentunit",
                 maximum=1)
