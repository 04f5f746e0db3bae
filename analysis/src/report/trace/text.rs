//! Traces of PyTorch's profiler: what the GPU did in each step, and how long ranks waited for each other.

use crate::report::printed::Printed;
use crate::report::spans::{Row, Spans};
use crate::report::table::{Table, size, size_if};
use crate::timeline::{Analysis, Bound, BoundBy, Kind, Ranks, Step};
use highwater_core::wire::Kind as WireKind;
use highwater_engine::recording::printable;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};

/// How busy the GPUs were, what they waited for most, and what collectives took, in two sentences.
pub(in crate::report) fn headline(analysis: &Analysis) -> Option<String> {
    let steps = &analysis.steps;
    let sum = |of: fn(&Step) -> u64| steps.iter().map(of).fold(0, u64::saturating_add);
    let (window_ns, busy_ns, idle_ns) =
        (sum(|step| step.window_ns), sum(|step| step.busy_ns), sum(|step| step.idle_ns));
    if window_ns == 0 {
        return None;
    }
    let devices: BTreeSet<u32> = steps.iter().map(|step| step.device).collect();
    let numbered: BTreeSet<u64> = steps.iter().filter_map(|step| step.step).collect();
    let who = match devices.first() {
        Some(device) if devices.len() == 1 => format!("GPU {device} was"),
        _ => format!("{} GPUs were", devices.len()),
    };
    let of = match numbered.len() {
        0 => String::new(),
        1 => " in one step".to_owned(),
        count => format!(" in {count} steps"),
    };
    let mut text = format!("{who} busy for {} of {}{of}", percent(busy_ns, window_ns), milliseconds(window_ns));
    let causes = [
        ("waits for data", sum(|step| step.idle.data_ns.unwrap_or(0))),
        ("waits for the host", sum(|step| step.idle.host_ns.unwrap_or(0))),
        ("waits with work queued", sum(|step| step.idle.other_ns.unwrap_or(0))),
    ];
    let (cause, caused_ns) = causes.into_iter().max_by_key(|(_, ns)| *ns)?;
    // A small share of idle time explains nothing.
    if idle_ns >= window_ns / 20 && caused_ns > 0 {
        let _ = write!(text, "; {} of the {} idle were {cause}", milliseconds(caused_ns), milliseconds(idle_ns));
    }
    let (comm_ns, overlap_ns) = (sum(|step| step.communication_ns), sum(|step| step.overlap_ns));
    if comm_ns > 0 {
        let _ = write!(
            text,
            ". Collectives took {}, {} of it beside other kernels",
            milliseconds(comm_ns),
            percent(overlap_ns, comm_ns)
        );
    }
    text.push('.');
    Some(text)
}

/// What bounds the job, in a sentence; `None` if nothing dominates.
pub(in crate::report) fn verdict(analysis: &Analysis) -> Option<String> {
    let Bound { by, share } = analysis.bound?;
    let share = format!("{:.1} % of the time", share * 100.0);
    let first = analysis.steps.first()?.device;
    let gpus = if analysis.steps.iter().any(|step| step.device != first) { "the GPUs, on average," } else { "the GPU" };
    let has_loader = analysis.steps.iter().any(|step| step.idle.data_ns.is_some());
    Some(match by {
        BoundBy::Data => {
            format!("Bound by loading data: for {share} {gpus} had no work, and the host waited for data.")
        }
        BoundBy::Host if has_loader => {
            format!("Bound by the host: for {share} {gpus} had no work, and the host did not wait for data.")
        }
        BoundBy::Host => format!("Bound by the host: for {share} {gpus} had no work."),
        BoundBy::Communication => {
            format!("Bound by communication: for {share} collectives ran with no other kernel beside.")
        }
        BoundBy::Copies => format!("Bound by copies: for {share} memory was copied or filled with no kernel beside."),
        BoundBy::Computation => format!("Bound by computation: for {share} kernels computed."),
    })
}

/// How long after their launches kernels began.
fn write_delays(analysis: &Analysis, out: &mut Printed) -> fmt::Result {
    for delay in analysis.launch_delays.iter().take(MOST_DELAYS) {
        let [median, p99] = [delay.median_ns, delay.p99_ns].map(microseconds);
        let device = delay.device;
        writeln!(
            out,
            "Kernels of GPU {device} began {median} after their launch in the median, 99 % of them within {p99}."
        )?;
    }
    Ok(())
}

/// The steps and collectives of a trace.
pub(in crate::report) fn write_trace(analysis: &Analysis, out: &mut Printed) -> fmt::Result {
    if let Some(rank) = analysis.rank {
        let of = analysis.world_size.map_or_else(String::new, |size| format!(" of {size}"));
        writeln!(out, "Rank {rank}{of}.")?;
    }
    let mut table =
        Table::new(["step", "GPU", "window", "busy", "idle", "data", "host", "other", "compute", "comm", "overlap"])
            .keys(2);
    for step in &analysis.steps {
        let idle = &step.idle;
        table.push([
            step_of(step.step),
            step.device.to_string(),
            milliseconds(step.window_ns),
            percent(step.busy_ns, step.window_ns),
            milliseconds(step.idle_ns),
            milliseconds_if(idle.data_ns),
            milliseconds_if(idle.host_ns),
            milliseconds_if(idle.other_ns),
            milliseconds(step.compute_ns),
            milliseconds(step.communication_ns),
            step.overlap.map_or_else(|| "-".to_owned(), |overlap| format!("{:.0} %", overlap * 100.0)),
        ]);
    }
    out.table(table);
    write_delays(analysis, out)?;
    write_memory(&analysis.steps, out);
    write_collectives(&analysis.steps, out)?;
    if analysis.is_cut_short {
        writeln!(out, "The file ends in the middle: all numbers are of what comes before.")?;
    }
    if analysis.unusable_events > 0 {
        writeln!(out, "{} events could not be used.", analysis.unusable_events)?;
    }
    if !analysis.unknown_collectives.is_empty() {
        let names: Vec<&str> = analysis.unknown_collectives.iter().map(String::as_str).take(5).collect();
        writeln!(out, "Collectives of unknown kind: {}", printable(&names.join(", ")))?;
    }
    Ok(())
}

/// The memory of each step, if the trace has that.
fn write_memory(steps: &[Step], out: &mut Printed) {
    if steps.iter().all(|step| step.allocated_peak_bytes.is_none()) {
        return;
    }
    let mut table = Table::new(["step", "GPU", "peak allocated", "peak reserved"]).keys(2);
    for step in steps {
        let [allocated, reserved] = [step.allocated_peak_bytes, step.reserved_peak_bytes].map(size_if);
        table.push([step_of(step.step), step.device.to_string(), allocated, reserved]);
    }
    out.table(table);
}

/// The collectives of all steps, by step and kind.
fn write_collectives(steps: &[Step], out: &mut Printed) -> fmt::Result {
    let mut table = Table::new(["step", "collective", "count", "time", "message", "bus bandwidth"]).keys(2);
    let mut is_empty = true;
    for (step, of) in steps.iter().flat_map(|step| step.collectives.iter().map(move |of| (step.step, of))) {
        is_empty = false;
        table.push([
            step_of(step),
            kind(&of.kind),
            of.count.to_string(),
            milliseconds(of.total_ns),
            of.bytes.map_or_else(|| "?".to_owned(), size),
            bandwidth(of.bus_bytes_per_second),
        ]);
    }
    if !is_empty {
        out.table(table);
    }
    Ok(())
}

/// GPUs whose launch delays are listed.
const MOST_DELAYS: usize = 8;
/// Kernels that are listed.
const MOST_KERNELS: usize = 10;

/// The kernels and copies that took the most time in all.
pub(in crate::report) fn write_kernels(spans: &Spans, out: &mut Printed) -> fmt::Result {
    let mut kernels: Vec<&Row> = spans.rows().iter().filter(|row| row.kind == WireKind::Layer).collect();
    if kernels.is_empty() {
        return Ok(());
    }
    kernels.sort_by_key(|row| Reverse(row.total_ns));
    let all_ns: i64 = kernels.iter().map(|row| row.total_ns).fold(0, i64::saturating_add);
    let mut table = Table::new(["time", "of all", "count", "longest", "on", "kernel or copy"]);
    for row in kernels.iter().take(MOST_KERNELS) {
        table.push([
            milliseconds(row.total_ns.unsigned_abs()),
            percent(row.total_ns.unsigned_abs(), all_ns.unsigned_abs()),
            row.count.to_string(),
            milliseconds(row.longest.map_or(0, |span| span.duration_ns()).unsigned_abs()),
            spans.rank(row.rank).0.to_owned(),
            row.name.clone(),
        ]);
    }
    out.table(table);
    let more = kernels.len().saturating_sub(MOST_KERNELS);
    if more > 0 {
        writeln!(out, "and {more} further kernels and copies")?;
    }
    Ok(())
}

/// The operators that took the most time of the GPUs, if the trace says which launched what.
pub(in crate::report) fn write_operators(analysis: &Analysis, out: &mut Printed) -> fmt::Result {
    let Some(operators) = &analysis.operators else { return Ok(()) };
    let all_ns = operators.iter().map(|of| of.total_ns).fold(0, u64::saturating_add);
    let mut table = Table::new(["time", "of all", "count", "on", "operator or NVTX range that launched it"]);
    for of in operators.iter().take(MOST_KERNELS) {
        table.push([
            milliseconds(of.total_ns),
            percent(of.total_ns, all_ns),
            of.count.to_string(),
            format!("GPU {}", of.device),
            of.operator.clone().unwrap_or_else(|| "none, or one whose name is not kept".to_owned()),
        ]);
    }
    out.table(table);
    let more = operators.len().saturating_sub(MOST_KERNELS);
    if more > 0 {
        writeln!(out, "and {more} further operators")?;
    }
    Ok(())
}

/// The annotations whose work took the most time of the GPUs, and how long the host was in them; the two times of a step are of those
/// that began in steps.
pub(in crate::report) fn write_annotations(analysis: &Analysis, out: &mut Printed) -> fmt::Result {
    let Some(annotations) = &analysis.annotations else {
        return writeln!(out, "The time by annotation is not known: there are too many of them.");
    };
    if annotations.is_empty() {
        return Ok(());
    }
    let columns = ["on GPUs", "a step", "on the host", "a step", "launched", "count", "annotation or NVTX range"];
    let mut table = Table::new(columns);
    for of in annotations.iter().take(MOST_KERNELS) {
        let (sum, steps) = (of.in_steps(), of.steps.len() as u64);
        let a_step = |ns: Option<u64>| milliseconds_if(ns.and_then(|ns| ns.checked_div(steps)));
        table.push([
            milliseconds_if(of.all.gpu_ns),
            a_step(sum.gpu_ns),
            milliseconds(of.all.host_ns),
            a_step(Some(sum.host_ns)),
            number(of.all.launched),
            of.all.count.to_string(),
            of.annotation.clone().unwrap_or_else(|| "those whose names are not kept".to_owned()),
        ]);
    }
    out.table(table);
    let more = annotations.len().saturating_sub(MOST_KERNELS);
    if more > 0 {
        writeln!(out, "and {more} further annotations")?;
    }
    Ok(())
}

/// What short kernels cost each GPU that may be bound by launching them.
pub(in crate::report) fn write_short_kernels(analysis: &Analysis, out: &mut Printed) -> fmt::Result {
    for of in analysis.short_kernels.iter().filter(|of| super::bounds(analysis, of)).take(MOST_DELAYS) {
        let steps = analysis.steps.iter().filter(|step| step.device == of.device && step.step.is_some()).count() as u64;
        let a_step = of.count.checked_div(steps).map_or_else(String::new, |count| format!(", {count} a step,"));
        writeln!(
            out,
            "{} of the {} kernels of GPU {}{a_step} take less than {} µs, about as long as launching one. They take {} of the kernels' time, \
             and the GPU was idle for {} right before them. Launch fewer: fuse them with torch.compile, or record them as a CUDA graph.",
            of.count,
            of.kernels,
            of.device,
            of.below_ns / 1_000,
            percent(of.total_ns, of.kernels_ns),
            milliseconds(of.idle_before_ns),
        )?;
        for sequence in of.sequences.iter().flatten() {
            let (count, time, between) =
                (sequence.count, milliseconds(sequence.total_ns), milliseconds(sequence.between_ns));
            let kernels = printable(&sequence.kernels.join(", "));
            writeln!(out, "{count} times one after another ({time}, and {between} between them): {kernels}")?;
        }
    }
    Ok(())
}

/// How long ranks waited for each other.
pub(in crate::report) fn write_ranks(ranks: &Ranks, out: &mut Printed) -> fmt::Result {
    if ranks.matched == 0 {
        let why = match ranks.not_compared {
            0 => "the traces have no collective of all ranks of a group".to_owned(),
            count => format!("{count} kernels send from rank to rank, or are of unknown kind"),
        };
        return writeln!(out, "How long ranks waited for each other is not known: {why}.");
    }
    writeln!(out, "{} collectives of all ranks together", ranks.matched)?;
    let mut table =
        Table::new(["rank", "in collectives", "waiting for others", "transfer", "began last", "made others wait"]);
    for rank in &ranks.ranks {
        table.push([
            rank.rank.to_string(),
            milliseconds(rank.total_ns),
            milliseconds_if(rank.waiting_ns),
            milliseconds_if(rank.transfer_ns),
            number(rank.times_last),
            milliseconds_if(rank.made_others_wait_ns),
        ]);
    }
    out.table(table);
    for of in &ranks.kinds {
        let (kind, time) = (kind(&of.kind), milliseconds(of.transfer_ns));
        writeln!(out, "{kind}: {} in {time} of transfer, {} on the bus", of.count, bandwidth(of.bus_bytes_per_second))?;
    }
    if let Some(problem) = &ranks.clocks.problem {
        writeln!(out, "Waiting is not known: {}", printable(problem))?;
    }
    if let Some(rank) = ranks.most_waited_for {
        writeln!(
            out,
            "The others waited for rank {rank} the longest.{}",
            bound_by_rank(ranks, rank).unwrap_or_default()
        )?;
    }
    if ranks.unmatched > 0 {
        writeln!(out, "{} collectives have no certain counterpart in the other traces.", ranks.unmatched)?;
    }
    Ok(())
}

/// That the others' communication is bound by a late rank, if half of their time in collectives was waiting for it.
fn bound_by_rank(ranks: &Ranks, late: u64) -> Option<String> {
    let waited_ns = ranks.ranks.iter().find(|share| share.rank == late)?.made_others_wait_ns?;
    let others = ranks.ranks.iter().filter(|share| share.rank != late).map(|share| share.total_ns);
    let total_ns = others.fold(0, u64::saturating_add);
    (total_ns > 0 && waited_ns >= total_ns / 2).then(|| {
        format!(
            " Their communication is bound by it, not by the links: {} of their {} in collectives were waiting for it.",
            milliseconds(waited_ns),
            milliseconds(total_ns)
        )
    })
}

/// A kind as JSON has it.
fn kind(kind: &Kind) -> String {
    serde_json::to_value(kind).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The number of a step. `None` stands for the whole of a trace without steps.
fn step_of(step: Option<u64>) -> String {
    step.map_or_else(|| "all".to_owned(), |step| step.to_string())
}

fn number(number: Option<u64>) -> String {
    number.map_or_else(|| "?".to_owned(), |number| number.to_string())
}

#[allow(clippy::cast_precision_loss, reason = "shown to a hundredth")]
fn milliseconds(ns: u64) -> String {
    format!("{:.2} ms", ns as f64 / 1e6)
}

/// A short time: in microseconds, from a millisecond on in milliseconds.
#[allow(clippy::cast_precision_loss, reason = "shown to a tenth")]
fn microseconds(ns: u64) -> String {
    if ns < 1_000_000 { format!("{:.1} µs", ns as f64 / 1e3) } else { milliseconds(ns) }
}

fn milliseconds_if(ns: Option<u64>) -> String {
    ns.map_or_else(|| "?".to_owned(), milliseconds)
}

#[allow(clippy::cast_precision_loss, reason = "a share")]
fn percent(part: u64, of: u64) -> String {
    if of == 0 { "?".to_owned() } else { format!("{:.1} %", part as f64 / of as f64 * 100.0) }
}

fn bandwidth(bytes_per_second: Option<f64>) -> String {
    bytes_per_second.map_or_else(|| "?".to_owned(), |bytes| format!("{:.1} GB/s", bytes / 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Clocks, RankShare};

    #[test]
    fn communication_is_bound_by_a_rank_if_half_of_the_others_time_was_waiting_for_it() {
        let of = |rank, total_ns, made_others_wait_ns| RankShare {
            rank,
            collectives: 1,
            total_ns,
            waiting_ns: Some(0),
            transfer_ns: Some(0),
            times_last: Some(1),
            made_others_wait_ns,
        };
        let bound = |waited_ns: Option<u64>| {
            let ranks = Ranks {
                clocks: Clocks { are_comparable: true, problem: None, contradicting: 0, disagreement_ns: None },
                matched: 1,
                matched_by_sequence: 1,
                unmatched: 0,
                not_compared: 0,
                ranks: vec![of(0, 5_000_000, Some(0)), of(7, 90_000_000, waited_ns), of(1, 15_000_000, Some(0))],
                most_often_last: None,
                most_waited_for: Some(7),
                kinds: Vec::new(),
            };
            bound_by_rank(&ranks, 7)
        };
        assert!(bound(Some(10_000_000)).is_some_and(|text| text.contains("10.00 ms of their 20.00 ms")));
        assert_eq!((bound(Some(9_999_999)), bound(None)), (None, None));
    }
}
