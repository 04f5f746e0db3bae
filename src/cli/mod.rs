//! The command line, with one file per command.

mod advise;
mod demo;
mod manual;
pub mod probe;
mod record;
pub mod replay_eval;
mod report;
mod run;
pub mod serve;
mod terminal;
mod via;

use crate::config::{Faults, KEYS, SettingLayers, Settings, SourceSpec, load};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
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
    #[command(after_help = settings_help())]
    Serve(Serve),
    /// Demonstrate everything on four simulated GPUs with two training jobs, one of them short of memory.
    Demo(Common),
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
    /// With --layers, where to checkpoint activations: it divides a model's layers so that the part with the most
    /// activations has as few as can be. Layers come from `highwater.torch.watch`, by way of a recording, a capture or the
    /// API, or from FairScale's tracker. With --plans, which of ONNX Runtime's recompute plans to enable.
    Advise(advise::Advise),
    /// Time every NVML call on this machine and find each counter's true update period.
    Probe(Probe),
    /// Run the detectors over recordings with a known truth, and print precision, recall and delay.
    ReplayEval(replay_eval::ReplayEval),
    /// Print completions for a shell: highwater completions bash > /etc/bash_completion.d/highwater.
    Completions(manual::Completions),
    /// Print the manual page: highwater man > /usr/local/share/man/man1/highwater.1.
    Man,
}

#[derive(Debug, Args)]
struct Serve {
    #[command(flatten)]
    common: Common,
    /// The source to read: nvml, sim, sim:SCENARIO, replay:PATH.
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
    /// How many times faster than real time a replay runs, or `max`.
    #[arg(long, value_name = "N")]
    replay_speed: Option<String>,
    /// Shift a replay's times so that it begins now.
    #[arg(long)]
    replay_shift_to_now: bool,
    /// Check the settings and the scenario, recording, token and certificates that they name, print every error, and
    /// exit.
    #[arg(long)]
    check_config: bool,
}

#[derive(Debug, Args)]
struct Common {
    /// Settings file, TOML or YAML.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The address that HTTP listens on [default: 127.0.0.1:10450].
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,
    /// The Unix datagram socket for annotations, or `none`.
    #[arg(long, value_name = "PATH")]
    annotations_socket: Option<String>,
    /// Path of libnvidia-ml.so.1.
    #[arg(long, value_name = "PATH")]
    nvml_library: Option<String>,
    /// Any other setting.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// Exit after this time, such as 20s.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    run_for: Option<Duration>,
}

#[derive(Debug, Args)]
struct Probe {
    /// Path of libnvidia-ml.so.1.
    #[arg(long, value_name = "PATH")]
    nvml_library: Option<PathBuf>,
    /// Which GPU to probe, by index, UUID or PCI bus id [default: the first].
    #[arg(long)]
    gpu: Option<String>,
    /// JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    crate::heap::keep_small();
    survive_file_limit();
    let command = Cli::parse().command;
    // The command prints to the same terminal: findings wait for the end, and only errors are logged meanwhile.
    init_log(if matches!(command, Command::Run(_)) { LevelFilter::ERROR } else { LevelFilter::INFO });
    let succeeded = |()| ExitCode::SUCCESS;
    let done = match command {
        Command::Serve(serve) => serve::run(&serve).map(succeeded),
        Command::Demo(common) => demo::run(&common).map(succeeded),
        Command::Run(run) => run.run(),
        Command::Record(record) => record.run().map(succeeded),
        Command::Report(report) => report.run(),
        Command::Advise(advise) => advise.run().map(succeeded),
        Command::Probe(probe) => probe.run().map(succeeded),
        Command::ReplayEval(eval) => eval.run().map(succeeded),
        Command::Completions(completions) => completions.run().map(succeeded),
        Command::Man => manual::man().map(succeeded),
    };
    match done {
        Ok(status) => status,
        Err(error) => {
            terminal::print_error(format_args!("highwater: {error:#}"));
            if error.is::<Misuse>() || error.is::<Faults>() { ExitCode::from(MISUSED) } else { ExitCode::FAILURE }
        }
    }
}

/// The exit status where flags or settings are wrong, as clap has it too. What fails later ends with 1.
const MISUSED: u8 = 2;

/// Flags or settings that are wrong.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Misuse(String);

/// From now on a write beyond the limit on the size of files (`ulimit -f`, Slurm's and systemd's limits) fails as on a full
/// disk, and does not end the process. Handled and not ignored, because what is ignored stays so in commands that are
/// started.
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
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|asked| !asked.is_empty());
    let color = !is_plain && std::io::IsTerminal::is_terminal(&std::io::stderr());
    let lines = tracing_subscriber::fmt::layer().with_writer(|| terminal::Stderr).with_ansi(color).with_target(false);
    tracing_subscriber::registry()
        .with(lines)
        .with(parsed.unwrap_or_else(|| Targets::new().with_default(default)))
        .init();
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("is not KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn duration(text: &str) -> Result<Duration, String> {
    let duration_ns = highwater_core::units::parse_duration_ns(text).map_err(|error| error.to_string())?;
    Ok(Duration::from_nanos(duration_ns.unsigned_abs()))
}

impl Common {
    fn layers(&self) -> SettingLayers {
        let mut flags = Vec::new();
        let given = [
            ("listen", "--listen", &self.listen),
            ("annotations.socket", "--annotations-socket", &self.annotations_socket),
            ("nvml_library", "--nvml-library", &self.nvml_library),
        ];
        for (key, flag, value) in given {
            flags.extend(value.iter().map(|value| (key.to_owned(), value.clone(), flag.to_owned())));
        }
        flags.extend(self.set.iter().map(|(key, value)| (key.clone(), value.clone(), format!("--set {key}"))));
        layers(self.config.clone(), flags)
    }
}

/// A settings file, this process's variables, and flags: a key, its value, and how the flag is called.
fn layers(file: Option<PathBuf>, flags: Vec<(String, String, String)>) -> SettingLayers {
    let text = |text: OsString| text.into_string().ok();
    let environment = std::env::vars_os().filter_map(|(name, value)| Some((text(name)?, text(value)?)));
    let is_ours =
        |name: &str| name.starts_with("HIGHWATER_") || crate::export::otlp::settings::is_standard_variable(name);
    let environment = environment.filter(|(name, _)| is_ours(name)).collect();
    SettingLayers { file, environment, flags }
}

impl Serve {
    fn settings(&self) -> anyhow::Result<Settings> {
        let mut layers = self.common.layers();
        let shift = self.replay_shift_to_now.then(|| "true".to_owned());
        let given = [
            ("source", "--source", &self.source),
            ("replay.speed", "--replay-speed", &self.replay_speed),
            ("replay.shift_to_now", "--replay-shift-to-now", &shift),
        ];
        for (key, flag, value) in given {
            layers.flags.extend(value.iter().map(|value| (key.to_owned(), value.clone(), flag.to_owned())));
        }
        let settings = load(&layers)?;
        // Without a replay they would be ignored, and the user who gave them would not notice.
        for (flag, is_given) in
            [("--replay-speed", self.replay_speed.is_some()), ("--replay-shift-to-now", self.replay_shift_to_now)]
        {
            if is_given && !matches!(settings.source, SourceSpec::Replay(_)) {
                return Err(Misuse(format!("{flag}: needs --source replay:PATH")).into());
            }
        }
        Ok(settings)
    }
}

impl Probe {
    fn run(&self) -> anyhow::Result<()> {
        let (library, gpu) = (self.nvml_library.as_deref(), self.gpu.as_deref());
        probe::run(
            &probe::Options { library, gpu, json: self.json, ..probe::Options::default() },
            &mut std::io::stdout(),
        )
    }
}

/// The default settings with only these changes: neither a file nor the environment is read.
fn settings_of(set: &[(String, String)]) -> anyhow::Result<Settings> {
    let flags = set.iter().map(|(key, value)| (key.clone(), value.clone(), format!("--set {key}"))).collect();
    Ok(load(&SettingLayers { file: None, environment: Default::default(), flags })?)
}

/// The settings, for `serve --help`.
fn settings_help() -> String {
    use std::fmt::Write as _;
    let mut help =
        String::from("Settings (file, --set KEY=VALUE, or the variable; config/highwater.toml lists them all):\n");
    for key in KEYS {
        let default = if key.default.is_empty() { "not set" } else { key.default };
        let _ = writeln!(help, "  {} [{}] [default: {default}]\n      {}", key.name, key.variable(), key.help);
    }
    help
}
