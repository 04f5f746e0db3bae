//! The samples of the daemon itself: its sampler, its driver calls, its process.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_core::source::{Call, provenance};
use highwater_engine::footprint::Footprint;
use highwater_engine::node::Node;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

/// Collects the sampler's ticks and driver calls.
#[allow(clippy::cast_precision_loss, reason = "a period in nanoseconds")]
pub(super) fn sampler(node: &Node, out: &mut Families) {
    let source = node.source.description();
    let simulated = provenance::is_simulated(&source).to_string();
    out.number(&c::SOURCE_INFO, Labels::found(&[&source, &simulated]), Some(1.0));
    let ticks = &node.ticks;
    let (taken, late, driver) =
        (ticks.taken.load(Relaxed), ticks.missed_late.load(Relaxed), ticks.missed_driver.load(Relaxed));
    // A recording has no deadlines: nothing is due, so nothing is exported.
    let due = ticks.due.load(Relaxed);
    if due == 0 {
        return;
    }
    out.count(&c::TICKS_DUE, (), Some(due));
    out.count(&c::TICKS_TAKEN, (), Some(taken));
    out.count(&c::TICKS_MISSED, ["late"], Some(late));
    out.count(&c::TICKS_MISSED, ["driver_blocked"], Some(driver));
    out.number(&c::SAMPLER_PERIOD, (), Some(ticks.period_ns.load(Relaxed) as f64 * 1e-9));
    out.histogram(&c::SAMPLER_LATENESS, (), ticks.lateness.counts());
    for call in Call::ALL {
        let durations = node.calls.durations(call).counts();
        if durations.cumulative.last().is_some_and(|count| *count > 0) {
            out.histogram(&c::NVML_CALL_DURATION, [call.label()], durations);
            out.count(&c::NVML_CALL_FAILURES, [call.label()], Some(node.calls.failures(call)));
        }
    }
    out.number(&c::NVML_BUSY, (), node.calls.busy_ratio());
}

/// Collects the process's version and resource use.
pub(super) fn process(footprint: Option<Footprint>, out: &mut Families) {
    out.number(&c::BUILD_INFO, [env!("CARGO_PKG_VERSION"), env!("BUILT_BY_RUSTC")], Some(1.0));
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    #[allow(clippy::cast_precision_loss, reason = "seconds to a microsecond")]
    out.number(&c::PROCESS_CPU, (), Some(cpu.tv_sec as f64 + cpu.tv_nsec as f64 * 1e-9));
    out.count(&c::PROCESS_VIRTUAL, (), footprint.map(|footprint| footprint.mapped as u64));
    out.count(&c::PROCESS_RESIDENT, (), footprint.map(|footprint| footprint.resident as u64));
    out.count(&c::PROCESS_FDS, (), open_files());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    out.count(&c::PROCESS_MAX_FDS, (), limit);
    out.count(&c::PROCESS_THREADS, (), threads());
    out.number(&c::PROCESS_START, (), start_time());
}

/// How many files are open. Since Linux 6.2 that is the size of the folder, which takes a tenth of reading it.
fn open_files() -> Option<u64> {
    let folder = rustix::fs::stat("/proc/self/fd").ok()?;
    match u64::try_from(folder.st_size) {
        Ok(count) if count > 0 => Some(count),
        _ => Some(std::fs::read_dir("/proc/self/fd").ok()?.count() as u64),
    }
}

/// The number of threads. Each is a folder in `/proc/self/task`, so the link count of `task` is the number of threads plus two.
/// `/proc/self/stat` has the number too, but for it the kernel adds up the times of all threads: a twentieth of a scrape.
fn threads() -> Option<u64> {
    #[allow(clippy::useless_conversion, reason = "its size depends on the processor")]
    let links = u64::try_from(rustix::fs::stat("/proc/self/task").ok()?.st_nlink).ok()?;
    // A kernel that does not count these links has two, or one.
    links.checked_sub(2).filter(|threads| *threads > 0)
}

/// When the process was started, Unix time in seconds. Once found, it is kept.
fn start_time() -> Option<f64> {
    static START_S: OnceLock<f64> = OnceLock::new();
    START_S.get().copied().or_else(|| {
        let started_s = started_s()?;
        Some(*START_S.get_or_init(|| started_s))
    })
}

fn started_s() -> Option<f64> {
    // Fields after the command's closing parenthesis, which may itself hold spaces: the start is the 20th.
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks: u64 = fields.split(' ').nth(19)?.parse().ok()?;
    #[allow(clippy::cast_precision_loss, reason = "seconds to a hundredth")]
    let since_boot_s = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
    Some(boot_s()? + since_boot_s)
}

/// When the machine was started, Unix time in seconds.
fn boot_s() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}
