//! The command line, with one file per command.

mod advise;
mod client;
mod common;
mod demo;
mod input;
mod manual;
pub mod probe;
mod record;
pub mod replay_eval;
mod report;
mod run;
pub mod serve;
mod terminal;
mod top;
mod via;

use crate::config::Faults;
use clap::{CommandFactory as _, Parser, Subcommand};
use common::{MISUSED, Misuse};
use std::process::ExitCode;
use tracing_subscriber::filter::{LevelFilter, Targets};

/// For `--help`.
const EXIT_STATUS: &str =
    "Exit status: 0 when all went well, 1 when something failed, 2 when flags or settings are wrong.";

/// For `run --help`.
const RUN_STATUS: &str = "Exit status: the command's; 128 + N if signal N ended it, 126 or 127 if it cannot be run, and \
                          1 or 2 if the recording cannot begin, in which case the command is not run.";

/// What GPU memory did inside each step of training.
///
/// A daemon for one node: it reads the memory of every NVIDIA GPU a thousand times a second, takes step and phase
/// marks from training jobs over HTTP or a Unix socket, and serves what happened inside each phase to Prometheus.
#[derive(Debug, Parser)]
#[command(name = "highwater", version, max_term_width = 100, after_help = EXIT_STATUS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon on this node's GPUs.
    ///
    /// Without a GPU it logs the reason, serves /metrics with `highwater_nvml_up 0`, and retries; it never simulates
    /// unasked. Try `highwater demo` for that.
    #[command(after_help = common::settings_help())]
    Serve(serve::Serve),
    /// Demonstrate everything on four simulated GPUs with two training jobs, one of them short of memory.
    Demo(common::Common),
    /// Run a command and record the memory of every GPU meanwhile.
    ///
    /// Needs no daemon and no root. The command's standard streams, terminal and arguments are its own, and its exit
    /// status is returned. It finds the socket for its step and phase marks in HIGHWATER_ANNOTATIONS_SOCKET. At the end
    /// a table of peaks goes to standard error.
    #[command(after_help = RUN_STATUS)]
    Run(run::Run),
    /// Record the memory of every GPU into a file until interrupted.
    Record(record::Record),
    /// Show what recordings contain: peaks, phases and findings, as text, JSON, or a page that opens without a network.
    ///
    /// Reads what `run`, `record` and the flight recorder write, and files of other tools: memory snapshots of
    /// PyTorch, memory_usage.txt of ONNX Runtime's profiler, CSV of nvidia-smi, and SQLite of nvprof and Nsight Systems.
    /// Several files are compared with the first. Of traces of PyTorch's profiler, it shows what the GPU did in each step.
    #[command(after_help = report::status_help())]
    Report(report::ReportCommand),
    /// Say what to change so that a job needs less memory, in numbers.
    ///
    /// Takes any file and says what it can from it: where to checkpoint activations, which batch size fits, or which of ONNX
    /// Runtime's recompute plans there are; or which file it needs instead. With --layers, where to checkpoint activations: it divides a model's layers so that the part with the most
    /// activations has as few as can be. Layers come from `highwater.torch.watch`, by way of a recording, a capture or the
    /// API, or from FairScale's tracker. With --plans, which of ONNX Runtime's recompute plans to enable.
    Advise(advise::Advise),
    /// Show GPUs, their processes and jobs, and what is wrong, in this terminal.
    ///
    /// Asks the daemon of this node. Where none runs it reads the GPUs itself, without root and without settings; steps and
    /// phases of jobs are known to the daemon alone.
    Top(top::Top),
    /// Time every NVML call on this machine and find each counter's true update period.
    Probe(probe::ProbeCommand),
    /// Run the detectors over recordings with a known truth, and print precision, recall and delay.
    ReplayEval(replay_eval::ReplayEval),
    /// Print completions for a shell: highwater completions bash > /etc/bash_completion.d/highwater.
    Completions(manual::Completions),
    /// Print the manual page: highwater man > /usr/local/share/man/man1/highwater.1.
    Man,
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    crate::heap::keep_small();
    survive_file_limit();
    let command = Cli::parse().command;
    // The command of `run` prints to the same terminal, and `top` fills it, so only errors are logged.
    init_log(if matches!(command, Command::Run(_) | Command::Top(_)) { LevelFilter::ERROR } else { LevelFilter::INFO });
    let succeeded = |()| ExitCode::SUCCESS;
    let done = match command {
        Command::Serve(serve) => serve::run(&serve).map(succeeded),
        Command::Demo(common) => demo::run(&common).map(succeeded),
        Command::Run(run) => run.run(),
        Command::Record(record) => record.run().map(succeeded),
        Command::Report(report) => report.run(),
        Command::Advise(advise) => advise.run().map(succeeded),
        Command::Top(top) => top.run().map(succeeded),
        Command::Probe(probe) => probe.run().map(succeeded),
        Command::ReplayEval(eval) => eval.run().map(succeeded),
        Command::Completions(completions) => completions.run(Cli::command()).map(succeeded),
        Command::Man => manual::man(Cli::command()).map(succeeded),
    };
    match done {
        Ok(status) => status,
        Err(error) => {
            terminal::print_error(format_args!("highwater: {error:#}"));
            if error.is::<Misuse>() || error.is::<Faults>() { ExitCode::from(MISUSED) } else { ExitCode::FAILURE }
        }
    }
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`, or a limit of Slurm or systemd) fail with an error, instead of
/// ending this process by SIGXFSZ. The signal is handled and not ignored, because started commands inherit ignored signals.
fn survive_file_limit() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing, which is safe at any moment. It is refused only for signals that do not exist.
    unsafe {
        libc::signal(libc::SIGXFSZ, nothing as extern "C" fn(libc::c_int) as libc::sighandler_t);
    }
}

/// Writes the log to stderr: what `RUST_LOG` asks for, as `info` or `warn,highwater_engine::sample=debug`, else the default.
fn init_log(default: LevelFilter) {
    use tracing_subscriber::layer::SubscriberExt as _;
    use tracing_subscriber::util::SubscriberInitExt as _;
    let asked = std::env::var("RUST_LOG").ok().filter(|asked| !asked.is_empty());
    let parsed = asked.map(|asked| asked.parse::<Targets>()).transpose().unwrap_or_else(|error| {
        terminal::print_error(format_args!("RUST_LOG: {error}; using the default, `{default}`"));
        None
    });
    let color = terminal::wants_color() && std::io::IsTerminal::is_terminal(&std::io::stderr());
    let lines = tracing_subscriber::fmt::layer().with_writer(|| terminal::Stderr).with_ansi(color).with_target(false);
    tracing_subscriber::registry()
        .with(lines)
        .with(parsed.unwrap_or_else(|| Targets::new().with_default(default)))
        .init();
}
