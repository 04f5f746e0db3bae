//! Threads that the daemon cannot do without.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};

/// How far the threads of HTTP and OTLP stand back behind the sampler's.
const BEHIND: i32 = 10;

/// Starts a thread of this name. If it panics the process is aborted: with one thread gone the daemon would look alive
/// and tell what is no longer true, while whoever started it starts another one that is whole.
///
/// # Errors
/// Where the system gives no thread.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let told = name.to_owned();
    Builder::new().name(name.to_owned()).spawn(move || {
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            tracing::error!(thread = told, "a thread panicked, which is a defect; the daemon ends");
            std::process::abort();
        }
    })
}

/// Puts the calling thread behind the sampler: where cores are short, scrapes and exports wait for it and never the other
/// way round. A kernel that refuses leaves all threads equal.
pub fn stand_back() {
    let _ = rustix::process::setpriority_process(None, BEHIND);
}
