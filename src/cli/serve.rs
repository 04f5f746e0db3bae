//! `serve`: the daemon, until a signal.

use super::{Serve, terminal};
use crate::daemon::{self, Daemon};
use anyhow::Context as _;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Threads for HTTP. More would only be in the sampler's way.
const HTTP_THREADS: usize = 2;

pub(super) fn run(serve: &Serve) -> anyhow::Result<()> {
    let settings = serve.settings()?;
    if serve.check_config {
        daemon::check(&settings).map_err(|faults| {
            let told: Vec<_> = faults.iter().map(|fault| format!("{fault:#}")).collect();
            anyhow::anyhow!(told.join("\n"))
        })?;
        terminal::print_line("settings are valid")?;
        return Ok(());
    }
    runtime()?.block_on(async {
        let signals = Signals::listen()?;
        let daemon = daemon::start(settings).await?;
        tell(&daemon);
        until_ended(signals, serve.common.run_for).await;
        daemon.stop().await;
        Ok(())
    })
}

/// The runtime that HTTP runs on.
///
/// # Errors
/// Where its threads cannot be started.
pub fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.on_thread_start(crate::thread::stand_back);
    builder.worker_threads(HTTP_THREADS).enable_all().build().context("cannot start the HTTP runtime")
}

/// The line that people and tests wait for.
pub(super) fn tell(daemon: &Daemon) {
    let scheme = if daemon.is_tls { "https" } else { "http" };
    terminal::tell_line(format_args!("listening on {scheme}://{}", daemon.address));
}

/// The signals that end the daemon. From when they are listened to, one of them kills nothing any more: it is kept until
/// it is waited for, so that a daemon that has just begun ends as any other.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn listen() -> anyhow::Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
        Ok(Self { terminate, interrupt })
    }
}

/// Waits for SIGTERM, SIGINT, or the time given.
pub(super) async fn until_ended(mut signals: Signals, run_for: Option<Duration>) {
    let over = async {
        match run_for {
            Some(run_for) => tokio::time::sleep(run_for).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = signals.terminate.recv() => tracing::info!("SIGTERM, stopping"),
        _ = signals.interrupt.recv() => tracing::info!("SIGINT, stopping"),
        () = over => tracing::info!("time is over, stopping"),
    }
}
