//! The samples of GPUs and MIG instances.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{GpuState, Health, THROTTLE_REASONS};
use highwater_core::phases::{LONGEST_WINDOW_S, LowMemory, THRESHOLDS, WINDOW_SLACK_NS, WINDOWS};
use highwater_core::ring;
use highwater_core::units::exact_bytes;
use highwater_engine::node::{Node, Periods};
use highwater_engine::sample::{RARE_TURNS, pcie_turns};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A reading is exported as current until it is older than this and than three periods of its lane. So a driver that
/// blocks for a moment makes no hole in a graph.
const STALE_NS: i64 = 2 * SECOND_NS;

/// The label of [`LONGEST_WINDOW_S`].
const LONGEST_WINDOW: &str = "60s";

/// One GPU with its labels.
struct View<'a> {
    state: &'a GpuState,
    ring: &'a ring::Reader,
    now_ns: i64,
    periods: Periods,
    /// Its index and UUID, which all its samples share.
    labels: Labels,
}

impl View<'_> {
    /// Whether a reading of a lane with this period is current.
    fn is_present(&self, at_ns: i64, period_ns: i64) -> bool {
        self.state.health() == Health::Up && self.now_ns - at_ns <= STALE_NS.max(3 * period_ns)
    }
}

/// Collects every GPU's samples.
pub(super) fn collect(node: &Node, with_processes: bool, out: &mut Families) {
    let now_ns = node.clock.now_ns();
    // The period in force, which may be longer than the configured one.
    let fast_ns = node.ticks.period_ns.load(Ordering::Relaxed).max(node.periods.fast_ns);
    let periods = Periods { fast_ns, ..node.periods };
    for skipped in node.source.skipped() {
        out.count(&c::GPU_UP, Labels::found(&[&skipped.index, ""]), Some(0));
    }
    for (position, state) in node.gpus.iter().enumerate() {
        let Some(ring) = node.rings.get(position) else { continue };
        let labels = Labels::found(&[&state.device.index, &state.device.uuid]);
        let view = View { state, ring, now_ns, periods, labels };
        info(&view, out);
        memory(&view, out);
        derived(node, position, &view, out);
        medium(&view, out);
        slow(&view, out);
        pcie(&view, out);
        rare(&view, out);
        if with_processes {
            processes(&view, out);
        }
        events(&view, node.clock.unix_shift_ns(), out);
    }
}

fn info(view: &View, out: &mut Families) {
    let device = &view.state.device;
    let text = |value: &'_ Option<String>| value.clone().unwrap_or_default();
    let (name, bus_id, driver) = (text(&device.name), text(&device.pci_bus_id), text(&device.driver_version));
    let (parent, profile) = (text(&device.parent_uuid), text(&device.mig_profile));
    let labels = [&*view.labels[0], &*view.labels[1], &name, &bus_id, &driver, &parent, &profile];
    out.number(&c::GPU_INFO, Labels::found(&labels), Some(1.0));
    let up = view.state.health() == Health::Up;
    out.count(&c::GPU_UP, &view.labels, Some(u64::from(up)));
    let period_ns = view.state.sampling_period_ns().filter(|_| up);
    #[allow(clippy::cast_precision_loss, reason = "nanoseconds of at most a few seconds")]
    let period_s = period_ns.map(|period_ns| period_ns as f64 * 1e-9);
    out.number(&c::GPU_SAMPLING_PERIOD, &view.labels, period_s);
}

fn memory(view: &View, out: &mut Families) {
    let (total, reserved) = (view.state.total_bytes(), view.state.reserved_bytes());
    out.count(&c::GPU_MEMORY_TOTAL, &view.labels, total);
    out.count(&c::GPU_MEMORY_RESERVED, &view.labels, reserved);
    out.count(&c::RING_BYTES, &view.labels, Some(view.ring.bytes() as u64));
    let (Some(newest_ns), Some(oldest_ns)) = (view.ring.newest_ns(), view.ring.oldest_ns()) else { return };
    out.number(&c::RING_SPAN, &view.labels, Some(seconds(newest_ns - oldest_ns)));
    let fresh = view.is_present(newest_ns, view.periods.fast_ns);
    let used = view.ring.at(newest_ns).ok().flatten().filter(|_| fresh);
    out.count(&c::GPU_MEMORY_USED, &view.labels, used);
    let free = used.and_then(|used| Some(view.state.usable_bytes()?.saturating_sub(used)));
    out.count(&c::GPU_MEMORY_FREE, &view.labels, free);
    for (window, length_ns) in WINDOWS {
        let labels = view.labels.with(window);
        // The window ends now, not at the last sample, so that the memory of a lost GPU leaves it in time.
        let from_ns = view.now_ns - length_ns - WINDOW_SLACK_NS;
        let kept = view.ring.of_kept(from_ns, newest_ns, |from_ns| view.ring.summary_through(from_ns, newest_ns));
        let Ok((_, summary)) = kept else { continue };
        out.count(&c::GPU_MEMORY_USED_MAX, &labels, summary.max);
        out.count(&c::GPU_MEMORY_USED_MIN, &labels, summary.min);
        out.number(&c::GPU_MEMORY_USED_AVG, labels, summary.mean);
    }
}

fn derived(node: &Node, position: usize, view: &View, out: &mut Families) {
    let derived = node.join.derived(position);
    out.count(&c::GPU_MEMORY_FLUSHES, &view.labels, Some(derived.flushes));
    if let Some(usable_bytes) = view.state.usable_bytes() {
        low(&derived.low, usable_bytes, view, out);
        for (threshold, above_ns) in THRESHOLDS.iter().zip(derived.pressure.above_ns()) {
            out.number(&c::GPU_MEMORY_PRESSURE, view.labels.with(threshold.label), Some(seconds(above_ns)));
        }
    }
}

fn low(low: &LowMemory, usable_bytes: u64, view: &View, out: &mut Families) {
    let from_ns = view.now_ns - LONGEST_WINDOW_S * SECOND_NS - WINDOW_SLACK_NS;
    // Of a GPU without a reading in the window its longest stretch is not known.
    let is_known = view.ring.newest_ns().is_some_and(|newest_ns| newest_ns >= from_ns);
    for level in low.levels().iter().filter(|level| level.free_below_bytes < usable_bytes) {
        let labels = view.labels.with(Arc::<str>::from(exact_bytes(level.free_below_bytes)));
        out.number(&c::GPU_MEMORY_LOW, &labels, Some(seconds(level.total_ns)));
        let longest = is_known.then(|| seconds(level.longest_ns(from_ns)));
        out.number(&c::GPU_MEMORY_LOW_LONGEST, labels.with(LONGEST_WINDOW), longest);
    }
}

fn medium(view: &View, out: &mut Families) {
    let Some(latest) = view.state.medium().filter(|latest| view.is_present(latest.at_ns, view.periods.medium_ns))
    else {
        return;
    };
    let reading = &latest.reading;
    out.number(&c::GPU_UTILIZATION, &view.labels, reading.utilization_ratio);
    out.number(&c::GPU_MEMORY_BUSY, &view.labels, reading.memory_busy_ratio);
    out.number(&c::GPU_SM_ACTIVE, &view.labels, reading.activity.sm_active_ratio);
    out.number(&c::GPU_SM_OCCUPANCY, &view.labels, reading.activity.sm_occupancy_ratio);
    out.number(&c::GPU_TENSOR_ACTIVE, &view.labels, reading.activity.tensor_active_ratio);
    out.number(&c::GPU_DRAM_ACTIVE, &view.labels, reading.activity.dram_active_ratio);
    out.number(&c::GPU_POWER, &view.labels, reading.power_watts);
    out.number(&c::GPU_TEMPERATURE, &view.labels, reading.temperature_celsius);
    out.number(&c::GPU_SM_CLOCK, &view.labels, reading.sm_clock_hertz);
    out.number(&c::GPU_MEMORY_CLOCK, &view.labels, reading.memory_clock_hertz);
    out.number(&c::GPU_ENERGY, &view.labels, view.state.energy.joules(latest.at_ns, &view.state.series));
    if let Some(reasons) = reading.throttle_reasons {
        for (bit, reason) in THROTTLE_REASONS {
            out.count(&c::GPU_CLOCKS_EVENT, view.labels.with(*reason), Some(u64::from(reasons & bit != 0)));
        }
        for ((_, reason), active_ns) in THROTTLE_REASONS.iter().zip(view.state.throttled_ns()) {
            let active_ns = i64::try_from(active_ns).ok();
            out.number(&c::GPU_CLOCKS_EVENT_SECONDS, view.labels.with(*reason), active_ns.map(seconds));
        }
    }
}

fn slow(view: &View, out: &mut Families) {
    // Stale only after 30 periods of the slow lane, not 3, because the slow calls of some GPUs take seconds in total.
    let Some(latest) = view.state.slow().filter(|latest| view.is_present(latest.at_ns, 10 * view.periods.slow_ns))
    else {
        return;
    };
    let reading = &latest.reading;
    out.count(&c::GPU_ECC_ERRORS, view.labels.with("corrected"), reading.ecc_corrected);
    out.count(&c::GPU_ECC_ERRORS, view.labels.with("uncorrected"), reading.ecc_uncorrected);
    out.count(&c::GPU_REMAPPED_ROWS, view.labels.with("corrected"), reading.remapped_rows_corrected);
    out.count(&c::GPU_REMAPPED_ROWS, view.labels.with("uncorrected"), reading.remapped_rows_uncorrected);
    out.count(&c::GPU_ROW_REMAP_PENDING, &view.labels, reading.row_remap_pending.map(u64::from));
    out.count(&c::GPU_ROW_REMAP_FAILED, &view.labels, reading.row_remap_failed.map(u64::from));
    out.count(&c::GPU_RECOVERY_ACTION, &view.labels, reading.recovery_action);
}

fn pcie(view: &View, out: &mut Families) {
    let period_ns = pcie_turns(view.periods.slow_ns) * view.periods.slow_ns;
    let Some(latest) = view.state.pcie().filter(|latest| view.is_present(latest.at_ns, period_ns)) else { return };
    out.count(&c::GPU_PCIE_RECEIVED, &view.labels, latest.reading.received_bytes);
    out.count(&c::GPU_PCIE_TRANSMITTED, &view.labels, latest.reading.transmitted_bytes);
}

fn processes(view: &View, out: &mut Families) {
    let period_ns = 10 * view.periods.slow_ns;
    let Some(latest) = view.state.processes().filter(|latest| view.is_present(latest.at_ns, period_ns)) else { return };
    for process in &latest.reading {
        out.count(&c::PROCESS_MEMORY_USED, view.labels.with(Arc::from(process.pid.to_string())), process.used_bytes);
    }
}

fn rare(view: &View, out: &mut Families) {
    let period_ns = RARE_TURNS * view.periods.slow_ns;
    let Some(latest) = view.state.rare().filter(|latest| view.is_present(latest.at_ns, period_ns)) else { return };
    let reading = &latest.reading;
    out.count(&c::GPU_NVLINK_RECEIVED, &view.labels, reading.nvlink_received_bytes);
    out.count(&c::GPU_NVLINK_TRANSMITTED, &view.labels, reading.nvlink_transmitted_bytes);
    let errors = [
        ("replay", reading.nvlink_errors.replays),
        ("recovery", reading.nvlink_errors.recoveries),
        ("crc", reading.nvlink_errors.crc),
    ];
    for (kind, count) in errors {
        out.count(&c::GPU_NVLINK_ERRORS, view.labels.with(kind), count);
    }
    if let Some((up, down)) = reading.nvlinks.map(|links| links.counts()) {
        out.count(&c::GPU_NVLINKS, view.labels.with("up"), Some(up.into()));
        out.count(&c::GPU_NVLINKS, view.labels.with("down"), Some(down.into()));
    }
    out.count(&c::GPU_FABRIC_JOINED, &view.labels, reading.fabric.map(|fabric| fabric.has_joined().into()));
    out.count(&c::GPU_BAR1_USED, &view.labels, reading.bar1_used_bytes);
    out.number(&c::GPU_POWER_LIMIT, &view.labels, reading.power_limit_watts);
    out.number(&c::GPU_TEMPERATURE_LIMIT, view.labels.with("slowdown"), reading.slowdown_celsius);
    out.number(&c::GPU_TEMPERATURE_LIMIT, view.labels.with("shutdown"), reading.shutdown_celsius);
    if let Some(link) = reading.pcie_link {
        out.count(&c::GPU_PCIE_LINK_GENERATION, &view.labels, Some(link.generation.into()));
        out.count(&c::GPU_PCIE_LINK_GENERATION_MAX, &view.labels, Some(link.max_generation.into()));
        out.count(&c::GPU_PCIE_LINK_WIDTH, &view.labels, Some(link.width.into()));
        out.count(&c::GPU_PCIE_LINK_WIDTH_MAX, &view.labels, Some(link.max_width.into()));
    }
}

fn events(view: &View, unix_shift_ns: i64, out: &mut Families) {
    for (number, xid) in view.state.xids() {
        let labels = view.labels.with(Arc::from(number.to_string()));
        out.count(&c::GPU_XID_ERRORS, &labels, Some(xid.count));
        out.number(&c::GPU_XID_LAST, labels, Some(seconds(xid.last_ns + unix_shift_ns)));
    }
}

#[allow(clippy::cast_precision_loss, reason = "seconds of Unix time to a microsecond")]
fn seconds(ns: i64) -> f64 {
    ns as f64 / SECOND_NS as f64
}
