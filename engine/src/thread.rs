//! Starts threads, and sets their priority.

use std::io;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};

/// How much lower the priority of the HTTP and OTLP threads is than the sampler's.
const BEHIND: i32 = 10;

/// Starts a thread with this name. If it panics, the process is aborted, so that its supervisor restarts it. Without
/// the thread the daemon would look alive and export stale values.
///
/// # Errors
/// The system cannot create a thread.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let logged = name.to_owned();
    Builder::new().name(name.to_owned()).spawn(move || {
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            tracing::error!(thread = logged, "a thread panicked, which is a bug; the daemon aborts");
            std::process::abort();
        }
    })
}

/// From now on the calling thread is woken at the time that it asks for. The kernel may else delay each wake-up by 50 µs; only
/// sandboxes refuse this, at the cost of those 50 µs.
pub fn wake_on_time() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

/// Lowers the calling thread's priority below the sampler's: if cores are scarce, scrapes and exports wait for it and
/// never the other way round. If the kernel refuses, all threads stay equal.
pub fn stand_back() {
    let _ = rustix::process::setpriority_process(None, BEHIND);
}
