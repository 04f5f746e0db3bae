//! Starting and ending the daemon's threads.

use anyhow::Context as _;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long shutdown waits for threads. A thread that hangs in the driver never ends.
pub(super) const DRAIN: Duration = Duration::from_millis(1500);
/// How long requests in progress may take at shutdown.
pub(super) const HTTP_DRAIN: Duration = Duration::from_millis(500);

/// Starts a thread whose panic ends the process.
pub(super) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> anyhow::Result<JoinHandle<()>> {
    highwater_engine::thread::spawn(name, run).with_context(|| format!("cannot start thread {name}"))
}

/// As [`spawn`], with a receiver that closes when the thread ends.
pub(super) fn spawn_watched(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> anyhow::Result<(JoinHandle<()>, tokio::sync::oneshot::Receiver<()>)> {
    let (runs, running) = tokio::sync::oneshot::channel();
    let thread = spawn(name, move || {
        let _runs = runs;
        run();
    })?;
    Ok((thread, running))
}

/// Joins threads that end within `patience`; returns whether all did.
pub(super) fn join_all(threads: Vec<JoinHandle<()>>, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    let mut all = true;
    for handle in threads {
        while !handle.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
        all &= handle.is_finished() && handle.join().inspect_err(|_| tracing::error!("a thread panicked")).is_ok();
    }
    all
}
