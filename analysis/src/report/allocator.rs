//! A framework's own allocator in a report: the peak, who held memory then, what was reserved for nothing, and failures.

use super::frames::of_python;
use super::model::{Gpu, Report};
use super::printed::Printed;
use super::segments::{self, why};
use super::table::{Table, size, size_if};
use highwater_engine::recording::{Allocator, Bands, HeldBlock, HeldMemory, Holder, Moment, Place, printable};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::Arc;

/// Places that are listed of those that held memory at the peak, and failures.
const MOST_LISTED: usize = 10;

/// Stacks that are listed for programs and in a page.
const MOST_STACKS: usize = 100;
/// Blocks whose stacks are in the text, and frames of each.
const MOST_BLOCKS: usize = 2;
const MOST_FRAMES: usize = 8;

/// What each place held at a time: bytes and allocations, the most bytes first. Stacks with the same place are added up.
fn places(of: &HeldMemory) -> Vec<(&str, u64, Option<u64>)> {
    let mut places: BTreeMap<&str, (u64, Option<u64>)> = BTreeMap::new();
    for holder in &of.holders {
        let (bytes, allocations) = places.entry(site(&holder.place)).or_insert((0, Some(0)));
        *bytes = bytes.saturating_add(holder.bytes);
        *allocations = allocations.zip(holder.allocations).map(|(sum, more)| sum.saturating_add(more));
    }
    let mut places: Vec<_> =
        places.into_iter().map(|(site, (bytes, allocations))| (site, bytes, allocations)).collect();
    places.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
    places
}

/// What is held at the peak by others than the places that are listed, bytes.
fn held_by_others(of: &HeldMemory, places: &[(&str, u64, Option<u64>)]) -> u64 {
    places.iter().skip(MOST_LISTED).fold(of.others.1, |sum, (_, bytes, _)| sum.saturating_add(*bytes))
}

fn site(place: &Place) -> &str {
    place.site.as_deref().unwrap_or(NOWHERE)
}

const NOWHERE: &str = "a place that is not known: no stack was recorded";

/// Writes a paragraph about one GPU.
pub(super) fn write(report: &Report, gpu: &Gpu, of: &Allocator, out: &mut Printed) -> fmt::Result {
    let Allocator { peak, events, .. } = of;
    let when = when(report, peak);
    let reserved =
        peak.reserved.or(of.reserved).map_or_else(String::new, |_| format!(" and {} reserved", size_if(peak.reserved)));
    writeln!(
        out,
        "The allocator on GPU {}, {events} entries: at its peak, {when}, {} allocated{reserved}.",
        gpu.device.index,
        size_if(peak.allocated),
    )?;
    if let Some(unused) = peak.unused() {
        writeln!(out, "Then {} were reserved and not allocated.", size(unused))?;
    }
    let less = |whole: Option<u64>, part: Option<u64>| {
        size_if(whole.zip(part).map(|(whole, part)| whole.saturating_sub(part)))
    };
    if of.reserved.is_some() {
        writeln!(
            out,
            "At the end, {} reserved, of which {} are not in use and {} are lost to rounding.",
            size_if(of.reserved),
            less(of.reserved, of.in_use),
            less(of.in_use, of.requested)
        )?;
    }
    segments::table(of).into_iter().for_each(|table| out.table(table));
    write_places("held at the peak", &of.at_peak, out);
    // Without a history, the peak is the end.
    of.at_end.iter().filter(|_| of.events > 0).for_each(|held| write_places("held at the end", held, out));
    write_blocks("at the peak", &of.blocks_at_peak, out)?;
    if of.events > 0 {
        write_blocks("at the end", &of.blocks_at_end, out)?;
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

/// A table of the places that held memory.
fn write_places(title: &str, of: &HeldMemory, out: &mut Printed) {
    let places = places(of);
    if places.is_empty() {
        return;
    }
    let mut table = Table::new([title, "allocations", "by"]);
    for (site, bytes, allocations) in places.iter().take(MOST_LISTED) {
        let allocations = allocations.map_or_else(|| "?".to_owned(), |count| count.to_string());
        table.push([size(*bytes), allocations, (*site).to_owned()]);
    }
    let more = held_by_others(of, &places);
    if more > 0 {
        table.push([size(more), String::new(), "others".to_owned()]);
    }
    out.table(table);
}

/// The stacks of the largest blocks, each stack once, as far as they are Python's. The page and JSON have all frames.
fn write_blocks(when: &str, of: &[HeldBlock], out: &mut Printed) -> fmt::Result {
    let mut written: Vec<Vec<&Arc<str>>> = Vec::new();
    for block in of {
        let frames: Vec<&Arc<str>> = of_python(&block.place.frames).collect();
        if written.len() >= MOST_BLOCKS || frames.is_empty() || written.contains(&frames) {
            continue;
        }
        let entry = block.entry.map_or_else(|| "before the history".to_owned(), |entry| format!("by entry {entry}"));
        writeln!(out, "One of the largest blocks {when}, {}, allocated {entry}:", size(block.bytes))?;
        frames.iter().take(MOST_FRAMES).try_for_each(|frame| writeln!(out, "    {}", printable(frame)))?;
        let more = frames.len().saturating_sub(MOST_FRAMES).saturating_add(block.place.more_frames);
        if more > 0 {
            writeln!(out, "    and {more} more frames")?;
        }
        written.push(frames);
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
    let places = places(&of.at_peak);
    let failures = of.failures.iter().take(MOST_LISTED).map(|failure| {
        json!({
            "after_ns": after_ns(&failure.at, begin_ns),
            "requested_bytes": failure.requested,
            "allocated_bytes": failure.at.allocated,
            "reserved_bytes": failure.at.reserved,
            "device_free_bytes": failure.device_free,
            "site": site(&failure.place),
            "frames": failure.place.frames,
            "layout": failure.layout.as_ref().map(segments::json),
            "entry": failure.at.after_events,
            "why": why(failure),
        })
    });
    json!({
        "peak": moment(&of.peak, begin_ns),
        "holders": places.iter().take(MOST_LISTED).collect::<Vec<_>>(),
        "other_holders_bytes": held_by_others(&of.at_peak, &places),
        "stacks": stacks(&of.at_peak),
        "stacks_at_end": of.at_end.as_ref().map(stacks),
        "has_history": of.events > 0,
        "by": if of.is_by_category { "category" } else { "place in the program" },
        "blocks_at_peak": of.blocks_at_peak.iter().map(block).collect::<Vec<_>>(),
        "blocks_at_end": of.blocks_at_end.iter().map(block).collect::<Vec<_>>(),
        "layout_at_peak": of.layout_at_peak.as_ref().map(segments::json),
        "layout_at_end": of.layout_at_end.as_ref().map(segments::json),
        "reserved_bytes": of.reserved,
        "in_use_bytes": of.in_use,
        "requested_bytes": of.requested,
        "failures": failures.collect::<Vec<_>>(),
        "bands": bands(&of.bands, begin_ns, UNIT_BYTES),
    })
}

/// Who held memory at a time, by stack. Each frame is there once, and stacks name its position: they share most of them.
fn stacks(of: &HeldMemory) -> Value {
    let (holders, others) = of.largest(MOST_STACKS);
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    let mut frames: Vec<&str> = Vec::new();
    let mut number = |frame| {
        *known.entry(frame).or_insert_with(|| {
            frames.push(frame);
            frames.len() - 1
        })
    };
    let held = holders.iter().map(|holder| {
        let stack: Vec<_> = holder.place.frames.iter().map(|frame| number(frame)).collect();
        json!({"bytes": holder.bytes, "allocations": holder.allocations, "site": site(&holder.place), "frames": stack})
    });
    let held: Vec<_> = held.collect();
    json!({"held": held, "frames": frames, "others": others.0, "other_bytes": others.1})
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

/// One of the largest blocks.
fn block(of: &HeldBlock) -> Value {
    json!({"bytes": of.bytes, "entry": of.entry, "place": place(&of.place)})
}

fn place(of: &Place) -> Value {
    json!({"site": of.site, "frames": of.frames, "more_frames": of.more_frames})
}

/// The largest holders, for programs.
fn holders(of: &HeldMemory) -> Vec<Value> {
    let holder = |holder: &Holder| json!({"bytes": holder.bytes, "allocations": holder.allocations, "place": place(&holder.place)});
    of.largest(MOST_STACKS).0.iter().map(holder).collect()
}

/// The same for programs. Times are nanoseconds after the begin.
pub(super) fn json(of: &Allocator, begin_ns: i64) -> Value {
    let failures = of.failures.iter().map(|failure| {
        json!({
            "at": moment(&failure.at, begin_ns),
            "requested_bytes": failure.requested,
            "device_free_bytes": failure.device_free,
            "stream": failure.stream,
            "layout": failure.layout.as_ref().map(segments::json),
            "place": place(&failure.place),
            "why": why(failure),
        })
    });
    let (_, others) = of.at_peak.largest(MOST_STACKS);
    let at_end = of.at_end.as_ref();
    let others_at_end = at_end.map(|held| held.largest(MOST_STACKS).1);
    json!({
        "events": of.events,
        "peak": moment(&of.peak, begin_ns),
        "holders": holders(&of.at_peak),
        "other_holders": others.0,
        "other_holders_bytes": others.1,
        "holders_at_end": at_end.map(holders),
        "other_holders_at_end": others_at_end.map(|others| others.0),
        "other_holders_at_end_bytes": others_at_end.map(|others| others.1),
        "blocks_at_peak": of.blocks_at_peak.iter().map(block).collect::<Vec<_>>(),
        "blocks_at_end": of.blocks_at_end.iter().map(block).collect::<Vec<_>>(),
        "layout_at_peak": of.layout_at_peak.as_ref().map(segments::json),
        "layout_at_end": of.layout_at_end.as_ref().map(segments::json),
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
