//! A framework's own allocator in a report: the peak, who held memory then, what was reserved for nothing, and failures.

use super::model::{Gpu, Report};
use super::printed::Printed;
use super::table::{Table, size, size_if};
use highwater_engine::recording::{Allocator, Bands, Failure, Moment, Place, printable};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

/// Places that are listed of those that held memory at the peak, and failures.
const MOST_LISTED: usize = 10;

/// What each place held at the peak: bytes and allocations, the most bytes first. Stacks with the same place are added up.
pub(super) fn places(of: &Allocator) -> Vec<(&str, u64, u64)> {
    let mut places: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for holder in &of.holders {
        let known = places.entry(site(&holder.place)).or_default();
        *known = (known.0.saturating_add(holder.bytes), known.1.saturating_add(holder.allocations));
    }
    let mut places: Vec<_> =
        places.into_iter().map(|(site, (bytes, allocations))| (site, bytes, allocations)).collect();
    places.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
    places
}

/// What is held at the peak by others than the places that are listed, bytes.
fn held_by_others(of: &Allocator, places: &[(&str, u64, u64)]) -> u64 {
    places.iter().skip(MOST_LISTED).fold(of.others.1, |sum, (_, bytes, _)| sum.saturating_add(*bytes))
}

fn site(place: &Place) -> &str {
    place.site.as_deref().unwrap_or(NOWHERE)
}

const NOWHERE: &str = "a place that is not known: no stack was recorded";

/// Why there was no memory, as far as that is known.
pub(super) fn why(failure: &Failure) -> Option<String> {
    let unused = failure.at.unused()?;
    Some(if unused >= failure.requested {
        format!(
            "{} were reserved and not allocated, which is enough: probably in pieces (fragmentation, which \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids), or kept for other streams or CUDA graphs.",
            size(unused)
        )
    } else {
        format!("{} were reserved and not allocated, which would not have been enough.", size(unused))
    })
}

/// Writes a paragraph about one GPU.
pub(super) fn write(report: &Report, gpu: &Gpu, of: &Allocator, out: &mut Printed) -> fmt::Result {
    let Allocator { peak, events, .. } = of;
    let when = when(report, peak);
    writeln!(
        out,
        "The allocator on GPU {}, {events} entries: at its peak, {when}, {} allocated and {} reserved.",
        gpu.device.index,
        size_if(peak.allocated),
        size_if(peak.reserved)
    )?;
    if let Some(unused) = peak.unused() {
        writeln!(out, "Then {} were reserved and not allocated.", size(unused))?;
    }
    let less = |whole: Option<u64>, part: Option<u64>| {
        size_if(whole.zip(part).map(|(whole, part)| whole.saturating_sub(part)))
    };
    writeln!(
        out,
        "At the end, {} reserved, of which {} are not in use and {} are lost to rounding.",
        size_if(of.reserved),
        less(of.reserved, of.in_use),
        less(of.in_use, of.requested)
    )?;
    let places = places(of);
    if !places.is_empty() {
        let mut table = Table::new(["held at the peak", "allocations", "by"]);
        for (site, bytes, allocations) in places.iter().take(MOST_LISTED) {
            table.push([size(*bytes), allocations.to_string(), (*site).to_owned()]);
        }
        let more = held_by_others(of, &places);
        if more > 0 {
            table.push([size(more), String::new(), "others".to_owned()]);
        }
        out.table(table);
    }
    for failure in of.failures.iter().take(MOST_LISTED) {
        let at = self::when(report, &failure.at);
        let free = failure.device_free.map_or_else(String::new, |free| format!(", {} free on the GPU", size(free)));
        let line = format!(
            "No memory for {} {at}: {} allocated, {} reserved{free}; asked for by {}",
            size(failure.requested),
            size_if(failure.at.allocated),
            size_if(failure.at.reserved),
            site(&failure.place)
        );
        writeln!(out, "{}", printable(&line))?;
        why(failure).iter().try_for_each(|why| writeln!(out, "    {why}"))?;
    }
    let more = (of.failures.len().saturating_sub(MOST_LISTED) as u64).saturating_add(of.failures_left_out);
    if more > 0 {
        writeln!(out, "and {more} more times")?;
    }
    Ok(())
}

fn when(report: &Report, moment: &Moment) -> String {
    match moment.at_ns {
        Some(at_ns) => format!("after {}", report.time(at_ns.saturating_sub(report.begin_ns))),
        None => format!("after {} entries", moment.after_events),
    }
}

/// The same for a page. Times are nanoseconds after the begin.
pub(super) fn page(of: &Allocator, begin_ns: i64) -> Value {
    let places = places(of);
    let failures = of.failures.iter().take(MOST_LISTED).map(|failure| {
        json!({
            "after_ns": after_ns(&failure.at, begin_ns),
            "requested_bytes": failure.requested,
            "allocated_bytes": failure.at.allocated,
            "reserved_bytes": failure.at.reserved,
            "device_free_bytes": failure.device_free,
            "site": site(&failure.place),
            "why": why(failure),
        })
    });
    json!({
        "peak": moment(&of.peak, begin_ns),
        "holders": places.iter().take(MOST_LISTED).collect::<Vec<_>>(),
        "other_holders_bytes": held_by_others(of, &places),
        "stacks": stacks(of),
        "reserved_bytes": of.reserved,
        "in_use_bytes": of.in_use,
        "requested_bytes": of.requested,
        "failures": failures.collect::<Vec<_>>(),
        "bands": bands(&of.bands, begin_ns, UNIT_BYTES),
    })
}

/// Who held memory at the peak, by stack. Each frame is there once, and stacks name its position: they share most of them.
fn stacks(of: &Allocator) -> Value {
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    let mut frames: Vec<&str> = Vec::new();
    let mut number = |frame| {
        *known.entry(frame).or_insert_with(|| {
            frames.push(frame);
            frames.len() - 1
        })
    };
    let held = of.holders.iter().map(|holder| {
        let stack: Vec<_> = holder.place.frames.iter().map(|frame| number(frame)).collect();
        json!({"bytes": holder.bytes, "allocations": holder.allocations, "site": site(&holder.place), "frames": stack})
    });
    let held: Vec<_> = held.collect();
    json!({"held": held, "frames": frames, "others": of.others.0, "other_bytes": of.others.1})
}

/// The unit of levels in a page, bytes. On a chart of gigabytes, it is less than a pixel.
const UNIT_BYTES: u64 = 1 << 16;

/// Levels over time by place. They are counted in units, rounded down.
fn bands(of: &Bands, begin_ns: i64, unit_bytes: u64) -> Value {
    let moments = of.moments.iter().map(|moment| {
        json!({
            "after_ns": moment.from_ns.saturating_sub(begin_ns),
            "total": moment.total / unit_bytes,
            "held": moment.held.iter().map(|bytes| bytes / unit_bytes).collect::<Vec<_>>(),
        })
    });
    let sites = of
        .sites
        .iter()
        .enumerate()
        .map(|(nth, site)| json!({"site": site.as_deref().unwrap_or(NOWHERE), "highest_bytes": of.highest(nth)}));
    json!({"unit_bytes": unit_bytes, "sites": sites.collect::<Vec<_>>(), "moments": moments.collect::<Vec<_>>()})
}

/// The same for programs. Times are nanoseconds after the begin.
pub(super) fn json(of: &Allocator, begin_ns: i64) -> Value {
    let place = |place: &Place| json!({"site": place.site, "frames": place.frames});
    let holders = of
        .holders
        .iter()
        .map(|holder| json!({"bytes": holder.bytes, "allocations": holder.allocations, "place": place(&holder.place)}));
    let failures = of.failures.iter().map(|failure| {
        json!({
            "at": moment(&failure.at, begin_ns),
            "requested_bytes": failure.requested,
            "device_free_bytes": failure.device_free,
            "place": place(&failure.place),
            "why": why(failure),
        })
    });
    json!({
        "events": of.events,
        "peak": moment(&of.peak, begin_ns),
        "holders": holders.collect::<Vec<_>>(),
        "other_holders": of.others.0,
        "other_holders_bytes": of.others.1,
        "reserved_bytes": of.reserved,
        "in_use_bytes": of.in_use,
        "requested_bytes": of.requested,
        "failures": failures.collect::<Vec<_>>(),
        "failures_left_out": of.failures_left_out,
        "bands": bands(&of.bands, begin_ns, 1),
    })
}

fn moment(moment: &Moment, begin_ns: i64) -> Value {
    json!({
        "after_events": moment.after_events,
        "after_ns": after_ns(moment, begin_ns),
        "allocated_bytes": moment.allocated,
        "reserved_bytes": moment.reserved,
    })
}

fn after_ns(moment: &Moment, begin_ns: i64) -> Option<i64> {
    moment.at_ns.map(|at_ns| at_ns.saturating_sub(begin_ns))
}
