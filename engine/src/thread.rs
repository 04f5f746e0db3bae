//! Starts threads, and sets their priority.

use std::io;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};

/// What is added to the process's nice value for the threads that call [`stand_back`], such as those of HTTP, OTLP, captures
/// and recordings.
const BEHIND: i32 = 10;
/// The highest nice value.
const LAST: i32 = 19;

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

/// Sets the calling thread's timer slack to 1 ns. By default, the kernel may delay each wake-up by 50 µs. Only sandboxes refuse
/// the call, and the default then stays.
pub fn wake_on_time() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

/// Lowers the calling thread's priority below the sampler's. If cores are scarce, scrapes and exports wait for the sampler, and
/// never the other way round. If the kernel refuses, the thread keeps its priority.
pub fn stand_back() {
    // That of the main thread, which never stands back.
    let of_process = rustix::process::getpriority_process(Some(rustix::process::getpid())).unwrap_or(0);
    let _ = rustix::process::setpriority_process(None, (of_process + BEHIND).clamp(BEHIND, LAST));
}
