//! The samples of the daemon itself: its sampler, its driver calls, its process.

use super::catalogue as c;
use super::families::Families;
use crate::node::Node;
use crate::source::Call;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

/// Collects the sampler's ticks and driver calls.
#[allow(clippy::cast_precision_loss, reason = "a period in nanoseconds")]
pub(super) fn sampler(node: &Node, out: &mut Families) {
    out.number(&c::SOURCE_INFO, &[node.source.description().as_str()], Some(1.0));
    let ticks = &node.ticks;
    let (taken, late, driver) =
        (ticks.taken.load(Relaxed), ticks.missed_late.load(Relaxed), ticks.missed_driver.load(Relaxed));
    // A recording has no deadlines: nothing is due, so nothing is exported.
    let due = ticks.due.load(Relaxed);
    if due == 0 {
        return;
    }
    out.count(&c::TICKS_DUE, &[], Some(due));
    out.count(&c::TICKS_TAKEN, &[], Some(taken));
    out.count(&c::TICKS_MISSED, &["late"], Some(late));
    out.count(&c::TICKS_MISSED, &["driver_blocked"], Some(driver));
    out.number(&c::SAMPLER_PERIOD, &[], Some(ticks.period_ns.load(Relaxed) as f64 * 1e-9));
    out.histogram(&c::SAMPLER_LATENESS, &[], ticks.lateness.counts());
    for call in Call::ALL {
        let durations = node.calls.durations(call).counts();
        if durations.cumulative.last().is_some_and(|count| *count > 0) {
            out.histogram(&c::NVML_CALL_DURATION, &[call.label()], durations);
            out.count(&c::NVML_CALL_FAILURES, &[call.label()], Some(node.calls.failures(call)));
        }
    }
    out.number(&c::NVML_BUSY, &[], node.calls.busy_ratio());
}

/// Collects the process's version and resource use.
pub(super) fn process(out: &mut Families) {
    out.number(&c::BUILD_INFO, &[env!("CARGO_PKG_VERSION"), env!("BUILT_BY_RUSTC")], Some(1.0));
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    #[allow(clippy::cast_precision_loss, reason = "seconds to a microsecond")]
    out.number(&c::PROCESS_CPU, &[], Some(cpu.tv_sec as f64 + cpu.tv_nsec as f64 * 1e-9));
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = |position| statm.split(' ').nth(position)?.parse::<u64>().ok();
    let bytes = |pages: Option<u64>| Some(pages? * rustix::param::page_size() as u64);
    out.count(&c::PROCESS_VIRTUAL, &[], bytes(pages(0)));
    out.count(&c::PROCESS_RESIDENT, &[], bytes(pages(1)));
    out.count(&c::PROCESS_FDS, &[], std::fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as u64));
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    out.count(&c::PROCESS_MAX_FDS, &[], limit);
    // Fields after the command's closing parenthesis, which may itself hold spaces: threads is the 18th, start the 20th.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(") ").map(|(_, fields)| fields.split(' ').collect::<Vec<_>>()).unwrap_or_default();
    let field = |position: usize| fields.get(position)?.parse::<u64>().ok();
    out.count(&c::PROCESS_THREADS, &[], field(17));
    out.number(&c::PROCESS_START, &[], field(19).and_then(start_time));
}

/// Unix time, seconds, of a start that the kernel gives in clock ticks since boot.
#[allow(clippy::cast_precision_loss, reason = "seconds to a hundredth")]
fn start_time(ticks: u64) -> Option<f64> {
    /// When the machine was started, by its clock at the first call. Read once, because the file counts the interrupts
    /// of every core.
    static BOOT_S: OnceLock<f64> = OnceLock::new();
    let boot_s = BOOT_S.get().copied().or_else(boot_s)?;
    Some(*BOOT_S.get_or_init(|| boot_s) + ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// When the machine was started, Unix time in seconds.
fn boot_s() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}
