//! `serve`: the daemon, until a signal.

use super::common::{Common, Misuse};
use super::terminal;
use crate::config::{Settings, SourceSpec, load};
use crate::daemon::{self, Daemon};
use anyhow::Context as _;
use clap::Args;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Threads for HTTP. More would only compete with the sampler.
const HTTP_THREADS: usize = 2;
/// Threads for reading files and making pages.
const BLOCKING_THREADS: usize = 8;

/// The flags of `serve`.
#[derive(Debug, Args)]
pub(super) struct Serve {
    #[command(flatten)]
    common: Common,
    /// The source to read: nvml, sim, sim:SCENARIO, replay:PATH.
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
    /// How many times faster than real time a replay runs, or `max`.
    #[arg(long, value_name = "N")]
    replay_speed: Option<String>,
    /// Begin a replay at this time since the recording's begin, such as 8h.
    #[arg(long, value_name = "TIME")]
    replay_from: Option<String>,
    /// End a replay at this time since the recording's begin.
    #[arg(long, value_name = "TIME")]
    replay_until: Option<String>,
    /// Shift a replay's times so that it begins now.
    #[arg(long)]
    replay_shift_to_now: bool,
    /// Check the settings and the scenario, recording, token and certificates that they name, print every error, and
    /// exit.
    #[arg(long)]
    check_config: bool,
}

impl Serve {
    fn settings(&self) -> anyhow::Result<Settings> {
        let mut layers = self.common.layers();
        let shift = self.replay_shift_to_now.then(|| "true".to_owned());
        let given = [
            ("source", "--source", &self.source),
            ("replay.speed", "--replay-speed", &self.replay_speed),
            ("replay.from", "--replay-from", &self.replay_from),
            ("replay.until", "--replay-until", &self.replay_until),
            ("replay.shift_to_now", "--replay-shift-to-now", &shift),
        ];
        for (key, flag, value) in given {
            layers.flags.extend(value.iter().map(|value| (key.to_owned(), value.clone(), flag.to_owned())));
        }
        let settings = load(&layers)?;
        // Without a replay they would be ignored, and the user who gave them would not notice.
        for (flag, is_given) in [
            ("--replay-speed", self.replay_speed.is_some()),
            ("--replay-from", self.replay_from.is_some()),
            ("--replay-until", self.replay_until.is_some()),
            ("--replay-shift-to-now", self.replay_shift_to_now),
        ] {
            if is_given && !matches!(settings.source, SourceSpec::Replay(_)) {
                return Err(Misuse(format!("{flag}: needs --source replay:PATH")).into());
            }
        }
        Ok(settings)
    }
}

pub(super) fn run(serve: &Serve) -> anyhow::Result<()> {
    let settings = serve.settings()?;
    if serve.check_config {
        daemon::check(&settings).map_err(|faults| {
            let each: Vec<_> = faults.iter().map(|fault| format!("{fault:#}")).collect();
            Misuse(each.join("\n"))
        })?;
        terminal::print_line("settings are valid")?;
        return Ok(());
    }
    drive(async {
        let signals = Signals::listen()?;
        let daemon = daemon::start(settings).await?;
        print_address(&daemon);
        until_ended(signals, serve.common.run_for).await;
        daemon.stop().await;
        Ok(())
    })
}

/// The runtime for HTTP.
///
/// # Errors
/// Its threads cannot be started.
pub fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.on_thread_start(highwater_engine::thread::stand_back);
    let runtime = builder.worker_threads(HTTP_THREADS).max_blocking_threads(BLOCKING_THREADS).enable_all().build();
    runtime.context("cannot start the HTTP runtime")
}

/// Runs the daemon on the runtime for HTTP. At the end, abandons blocking work that still runs, such as the making of a
/// capture's page.
///
/// # Errors
/// If the runtime's threads cannot be started, or `daemon` fails.
pub(super) fn drive<T>(daemon: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = runtime()?;
    let ended = runtime.block_on(daemon);
    runtime.shutdown_background();
    ended
}

/// Prints the line that people and tests wait for.
pub(super) fn print_address(daemon: &Daemon) {
    let scheme = if daemon.is_tls { "https" } else { "http" };
    terminal::print_error(format_args!("listening on {scheme}://{}", daemon.address));
}

/// The signals that end the daemon. Once they are listened for, they no longer kill the process. A signal that arrives
/// during startup is kept until [`until_ended`] waits for it, so the daemon still stops in order.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// `None` if the program that started this process had it ignored, as `nohup` does.
    hang_up: Option<Signal>,
}

impl Signals {
    pub(super) fn listen() -> anyhow::Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
        let hang_up = (!is_ignored(rustix::process::Signal::HUP)).then(|| signal(SignalKind::hangup())).transpose();
        Ok(Self { terminate, interrupt, hang_up: hang_up.context("cannot wait for SIGHUP")? })
    }

    /// Waits for SIGHUP: the terminal was closed.
    async fn hangs_up(hang_up: &mut Option<Signal>) {
        match hang_up {
            Some(signal) => drop(signal.recv().await),
            None => std::future::pending().await,
        }
    }
}

/// Whether this process ignores a signal. Listening to it would undo that.
pub(super) fn is_ignored(signal: rustix::process::Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal.as_raw() - 1) & 1 == 1)
}

/// Waits for SIGTERM, SIGINT, SIGHUP, or the time given.
pub(super) async fn until_ended(mut signals: Signals, run_for: Option<Duration>) {
    let over = async {
        match run_for {
            Some(run_for) => tokio::time::sleep(run_for).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        signal = ended(&mut signals) => tracing::info!("{signal}, stopping"),
        () = over => tracing::info!("the time is up, stopping"),
    }
}

/// Waits for SIGTERM, SIGINT or SIGHUP, and returns its name.
pub(super) async fn ended(signals: &mut Signals) -> &'static str {
    tokio::select! {
        _ = signals.terminate.recv() => "SIGTERM",
        _ = signals.interrupt.recv() => "SIGINT",
        () = Signals::hangs_up(&mut signals.hang_up) => "SIGHUP",
    }
}
