//! Two memory snapshots beside each other, by place: what grew, what is new, and what went.
//!
//! Enters: the holders of memory of two reports, by call stack, at the peak and at the end. Leaves: the stacks with what they held
//! in both, those that grew the most first, and a sentence. Invariants: stacks are the same if their frames of Python are, or without
//! any, all their frames; where exactly one stack is left on each side with the same functions of the same files, they are taken for
//! the same with other lines, and that is reported; what one side's list is too short to know is not known, and never 0.

use super::frames::of_python;
use super::model::{Gpu, Report};
use super::printed::Printed;
use super::table::{Table, size};
use highwater_engine::recording::{HeldMemory, Holder, Place, printable};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

/// Stacks that are listed of a comparison, and those that text shows.
const MOST_LISTED: usize = 200;
const MOST_SHOWN: usize = 15;
/// A site without a known stack.
const NOWHERE: &str = "a place that is not known: no stack was recorded";

/// The memory of one GPU in two snapshots at one time of each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ComparedPlaces {
    /// The names of the files.
    pub first: String,
    /// See above.
    pub name: String,
    /// The GPU's index in the second.
    pub gpu: String,
    /// `end`, when the snapshots were taken, or `peak`.
    pub at: &'static str,
    /// What was allocated in each, bytes.
    pub first_bytes: u64,
    /// See above.
    pub bytes: u64,
    /// The stacks that differ, sorted by growth, the largest first; at most the 200 that differ the most.
    pub places: Vec<PlaceBeside>,
    /// How many further stacks differ, and by how much they grew together, bytes.
    pub others: usize,
    /// See above.
    pub others_increase_bytes: i64,
    /// How many stacks hold the same in both.
    pub unchanged: usize,
}

/// A call stack with what it held in two snapshots; `None` is not known. Bytes, and numbers of blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlaceBeside {
    /// The innermost frame of the program's own code in the second snapshot, or in the first if it went.
    pub site: Option<String>,
    /// The frames of it, the innermost first: of several stacks with the same frames of Python, those of the one that holds the most.
    pub frames: Vec<Arc<str>>,
    /// How many further frames there are, outside of these.
    pub more_frames: usize,
    /// `grew`, `shrank`, `new`, `gone`, or `not known`.
    pub change: &'static str,
    /// Whether the stack of the first has other lines.
    pub other_lines: bool,
    /// What it held in the first.
    pub first_bytes: Option<u64>,
    /// In how many blocks.
    pub first_blocks: Option<u64>,
    /// What it held in the second.
    pub bytes: Option<u64>,
    /// In how many blocks.
    pub blocks: Option<u64>,
    /// How much more that is.
    pub increase_bytes: Option<i64>,
}

/// Compares the snapshots with the first of them, GPU by GPU.
pub(super) fn compare(reports: &[Report]) -> Vec<ComparedPlaces> {
    let has_allocator = |report: &&Report| report.gpus.iter().any(|gpu| gpu.allocator.is_some());
    let mut snapshots = reports.iter().filter(has_allocator);
    let Some(first) = snapshots.next() else { return Vec::new() };
    snapshots.flat_map(|report| beside(first, report)).collect()
}

fn beside(first: &Report, report: &Report) -> Vec<ComparedPlaces> {
    // Two ranks of one job have GPUs with different numbers.
    let are_alone = first.gpus.len() == 1 && report.gpus.len() == 1;
    let pairs = report.gpus.iter().filter_map(|gpu| {
        let is_it = |one: &&Gpu| are_alone || one.device.index == gpu.device.index;
        Some((first.gpus.iter().find(is_it)?.allocator.as_ref()?, gpu, gpu.allocator.as_ref()?))
    });
    let compared = pairs.flat_map(|(before, gpu, after)| {
        let at_end = before.at_end.as_ref().zip(after.at_end.as_ref()).map(|held| ("end", held));
        let have_histories = before.events > 0 && after.events > 0;
        let at_peak = have_histories.then_some(("peak", (&before.at_peak, &after.at_peak)));
        let named = |(at, (one, other))| {
            let names = (first.name.clone(), report.name.clone());
            places(names, gpu.device.index.clone(), at, one, other)
        };
        at_end.into_iter().chain(at_peak).map(named).collect::<Vec<_>>()
    });
    compared.collect()
}

/// What one place holds: its largest holder, bytes and blocks.
type Stack<'a> = (&'a Holder, u64, Option<u64>);
/// What is compared of a stack: its frames of Python, as C++ differs by kernels and versions; all frames, if none is of Python; and the
/// site, where there are no frames.
type Key<'a> = (Vec<&'a str>, Option<&'a str>);

fn key(place: &Place) -> Key<'_> {
    let frames: Vec<&str> = of_python(&place.frames).map(|frame| &**frame).collect();
    let frames = if frames.is_empty() { place.frames.iter().map(|frame| &**frame).collect() } else { frames };
    let site = place.site.as_deref().filter(|_| frames.is_empty());
    (frames, site)
}

/// By place: stacks with the same key are added up.
fn stacks(of: &HeldMemory) -> HashMap<Key<'_>, Stack<'_>> {
    let mut stacks: HashMap<Key<'_>, Stack<'_>> = HashMap::new();
    for holder in &of.holders {
        let (_, bytes, blocks) = stacks.entry(key(&holder.place)).or_insert((holder, 0, Some(0)));
        let more = holder.allocations;
        (*bytes, *blocks) =
            (bytes.saturating_add(holder.bytes), blocks.zip(more).map(|(sum, one)| sum.saturating_add(one)));
    }
    stacks
}

fn places(
    (first, name): (String, String),
    gpu: String,
    at: &'static str,
    before: &HeldMemory,
    after: &HeldMemory,
) -> ComparedPlaces {
    let (mut one, mut other) = (stacks(before), stacks(after));
    let mut rows = Vec::new();
    let mut unchanged = 0;
    for (place, after) in std::mem::take(&mut other) {
        match one.remove(&place) {
            Some(before) if (before.1, before.2) == (after.1, after.2) => unchanged += 1,
            Some(before) => rows.push(row(Some(before), Some(after), false)),
            None => {
                other.insert(place, after);
            }
        }
    }
    // What is left of both, without lines. Only a single one of each can be meant.
    let mut lineless: HashMap<Vec<String>, (Vec<Stack<'_>>, Vec<Stack<'_>>)> = HashMap::new();
    one.into_values().for_each(|stack| lineless.entry(without_lines(stack.0)).or_default().0.push(stack));
    other.into_values().for_each(|stack| lineless.entry(without_lines(stack.0)).or_default().1.push(stack));
    let unknown = (before.others.0 > 0, after.others.0 > 0);
    for (before, after) in lineless.into_values() {
        if let ([before], [after]) = (&before[..], &after[..]) {
            rows.push(row(Some(*before), Some(*after), true));
            continue;
        }
        let gone = before.into_iter().map(|stack| (Some(stack), None, unknown.1));
        let new = after.into_iter().map(|stack| (None, Some(stack), unknown.0));
        rows.extend(gone.chain(new).map(|(before, after, is_unknown)| {
            if is_unknown { unknown_beside(before, after) } else { row(before, after, false) }
        }));
    }
    let increase = |row: &PlaceBeside| row.increase_bytes.unwrap_or(0);
    let largest = |row: &PlaceBeside| row.bytes.max(row.first_bytes);
    rows.sort_by(|one, other| {
        let key = |row: &PlaceBeside| (Reverse(increase(row).unsigned_abs()), Reverse(largest(row)));
        key(one).cmp(&key(other)).then_with(|| (&one.frames, &one.site).cmp(&(&other.frames, &other.site)))
    });
    let rest = rows.split_off(MOST_LISTED.min(rows.len()));
    rows.sort_by_key(|row| Reverse(increase(row)));
    ComparedPlaces {
        first,
        name,
        gpu,
        at,
        first_bytes: before.bytes(),
        bytes: after.bytes(),
        others: rest.len(),
        others_increase_bytes: rest.iter().fold(0, |sum, row| sum.saturating_add(increase(row))),
        places: rows,
        unchanged,
    }
}

/// The same without lines: the file and function of each frame.
fn without_lines(holder: &Holder) -> Vec<String> {
    let without = |frame: &str| {
        let mut parts = frame.splitn(3, ':');
        let (file, _, function) = (parts.next(), parts.next(), parts.next());
        file.zip(function).map_or_else(|| frame.to_owned(), |(file, function)| format!("{file}:{function}"))
    };
    let (frames, site) = key(&holder.place);
    frames.into_iter().map(without).chain(site.map(str::to_owned)).collect()
}

fn row(before: Option<Stack<'_>>, after: Option<Stack<'_>>, other_lines: bool) -> PlaceBeside {
    let bytes = |stack: Option<Stack<'_>>| stack.map_or(0, |(_, bytes, _)| bytes);
    let blocks = |stack: Option<Stack<'_>>| stack.map_or(Some(0), |(_, _, blocks)| blocks);
    let increase = i64::try_from(i128::from(bytes(after)) - i128::from(bytes(before))).ok();
    let change = match (before, after) {
        (None, _) => "new",
        (_, None) => "gone",
        _ if bytes(after) < bytes(before) => "shrank",
        _ if bytes(after) > bytes(before) => "grew",
        _ => "same",
    };
    let place = after.or(before).map(|(holder, ..)| &holder.place);
    PlaceBeside {
        site: place.and_then(|place| place.site.clone()),
        frames: place.map(|place| place.frames.clone()).unwrap_or_default(),
        more_frames: place.map_or(0, |place| place.more_frames),
        change,
        other_lines,
        first_bytes: Some(bytes(before)),
        first_blocks: blocks(before),
        bytes: Some(bytes(after)),
        blocks: blocks(after),
        increase_bytes: increase,
    }
}

/// A stack that the other side may have among those that it does not list.
fn unknown_beside(before: Option<Stack<'_>>, after: Option<Stack<'_>>) -> PlaceBeside {
    let known = row(before, after, false);
    let (is_before, is_after) = (before.is_some(), after.is_some());
    PlaceBeside {
        change: "not known",
        first_bytes: known.first_bytes.filter(|_| is_before),
        first_blocks: known.first_blocks.filter(|_| is_before),
        bytes: known.bytes.filter(|_| is_after),
        blocks: known.blocks.filter(|_| is_after),
        increase_bytes: None,
        ..known
    }
}

/// A difference of sizes, for people.
fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "+" };
    format!("{sign}{}", size(bytes.unsigned_abs()))
}

/// A place with the number of its further frames: those of Python, if it has any.
fn named(place: &PlaceBeside) -> String {
    let site = place.site.as_deref().unwrap_or(NOWHERE);
    let python = of_python(&place.frames).count();
    let frames = if python > 0 { python } else { place.frames.len() };
    match frames.saturating_add(place.more_frames) {
        0 | 1 => site.to_owned(),
        2 => format!("{site} (1 more frame)"),
        frames => format!("{site} ({} more frames)", frames - 1),
    }
}

/// What follows, in a sentence for each.
pub(super) fn verdict(all: &[ComparedPlaces]) -> Vec<String> {
    all.iter().map(sentence).collect()
}

fn sentence(of: &ComparedPlaces) -> String {
    let what = if of.at == "end" { "Live memory at the end" } else { "Allocated memory at the peak" };
    let (grew, shrank) = (of.bytes.saturating_sub(of.first_bytes), of.first_bytes.saturating_sub(of.bytes));
    let from_to =
        format!("from {} ({}) to {} ({}) on GPU {}", size(of.first_bytes), of.first, size(of.bytes), of.name, of.gpu);
    let lines = |place: &PlaceBeside| if place.other_lines { ", whose lines differ" } else { "" };
    if grew == 0 && shrank == 0 {
        return format!("{what} is the same on GPU {}: {}.", of.gpu, size(of.bytes));
    }
    let (verb, by, place) = if grew > 0 {
        ("grew", grew, of.places.first().filter(|place| place.increase_bytes > Some(0)))
    } else {
        ("fell", shrank, of.places.last().filter(|place| place.increase_bytes < Some(0)))
    };
    let begin = format!("{what} {verb} by {}, {from_to}", size(by));
    let change = place.and_then(|place| Some((place, place.increase_bytes?.unsigned_abs())));
    match change {
        Some((place, bytes)) if bytes <= by => {
            format!("{begin}; {} of it at {}{}.", size(bytes), named(place), lines(place))
        }
        // Others went the other way.
        Some((place, bytes)) => format!("{begin}; the most at {}{}: {}.", named(place), lines(place), size(bytes)),
        None => format!("{begin}; at which place is not known."),
    }
}

/// Writes a table of each.
pub(super) fn print(all: &[ComparedPlaces], out: &mut Printed) {
    for of in all.iter().filter(|of| !of.places.is_empty()) {
        let when = if of.at == "end" { "at the end" } else { "at the peak" };
        let mut table = Table::new([
            &format!("GPU {} {when}", of.gpu),
            &printable(&of.first),
            "blocks",
            &printable(&of.name),
            "blocks",
            "more",
            "by",
        ]);
        let shown = |value: Option<u64>, show: fn(u64) -> String| value.map_or_else(|| "?".to_owned(), show);
        // Half of them from each end: what grew, and what shrank.
        let few = of.places.len().saturating_sub(MOST_SHOWN);
        let grew = MOST_SHOWN - MOST_SHOWN / 3;
        let listed = of.places.iter().enumerate().filter(|(nth, _)| *nth < grew || *nth >= grew + few);
        for (_, place) in listed {
            table.push([
                format!("{}{}", place.change, if place.other_lines { ", other lines" } else { "" }),
                shown(place.first_bytes, size),
                shown(place.first_blocks, |blocks| blocks.to_string()),
                shown(place.bytes, size),
                shown(place.blocks, |blocks| blocks.to_string()),
                place.increase_bytes.map_or_else(|| "?".to_owned(), signed),
                named(place),
            ]);
        }
        let more = few + of.others;
        if more > 0 {
            let text = format!("{more} further stacks differ");
            let row = ["…", "", "", "", "", "", &text];
            table.push(row.map(str::to_owned));
        }
        out.table(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A holder of some MiB.
    fn holder(mib: u64, allocations: u64, frames: &[&str]) -> Holder {
        let site = frames.first().map(|frame| (*frame).to_owned());
        let place = Place { site, frames: frames.iter().map(|frame| Arc::from(*frame)).collect(), more_frames: 0 };
        Holder { bytes: mib << 20, allocations: Some(allocations), place }
    }

    fn held(holders: &[Holder], others: (usize, u64)) -> HeldMemory {
        HeldMemory { holders: holders.to_vec(), others }
    }

    fn compared(before: &HeldMemory, after: &HeldMemory) -> ComparedPlaces {
        places(("a".into(), "b".into()), "0".into(), "end", before, after)
    }

    #[test]
    fn places_that_grew_are_new_or_went() {
        let before = held(
            &[holder(100, 2, &["t.py:1:f", "t.py:9:main"]), holder(50, 1, &["t.py:2:g"]), holder(7, 1, &["t.py:3:h"])],
            (0, 0),
        );
        let after = held(
            &[holder(400, 8, &["t.py:1:f", "t.py:9:main"]), holder(60, 1, &["u.py:5:k"]), holder(7, 1, &["t.py:3:h"])],
            (0, 0),
        );
        let of = compared(&before, &after);
        let rows: Vec<_> = of
            .places
            .iter()
            .map(|row| {
                (
                    row.change,
                    row.site.as_deref().unwrap_or(""),
                    row.increase_bytes.map(|bytes| bytes >> 20),
                    row.first_blocks,
                    row.blocks,
                )
            })
            .collect();
        assert_eq!(
            rows,
            [
                ("grew", "t.py:1:f", Some(300), Some(2), Some(8)),
                ("new", "u.py:5:k", Some(60), Some(0), Some(1)),
                ("gone", "t.py:2:g", Some(-50), Some(1), Some(0)),
            ]
        );
        assert_eq!((of.first_bytes >> 20, of.bytes >> 20, of.unchanged, of.others), (157, 467, 1, 0));
        let sum: i64 = of.places.iter().filter_map(|row| row.increase_bytes).sum();
        assert_eq!(sum >> 20, 310, "the rows add up to the difference");
        assert_eq!(
            sentence(&of),
            "Live memory at the end grew by 310.00 MiB, from 157.00 MiB (a) to 467.00 MiB (b) on GPU 0; 300.00 MiB of it at t.py:1:f \
             (1 more frame)."
        );
    }

    #[test]
    fn another_line_is_the_same_place_only_where_one_is_left_on_each_side() {
        let before =
            held(&[holder(10, 1, &["t.py:1:f"]), holder(20, 1, &["u.py:1:g"]), holder(30, 1, &["u.py:2:g"])], (0, 0));
        let after = held(&[holder(15, 1, &["t.py:4:f"]), holder(25, 1, &["u.py:9:g"])], (0, 0));
        let of = compared(&before, &after);
        let mut rows: Vec<_> =
            of.places.iter().map(|row| (row.site.as_deref().unwrap_or(""), row.change, row.other_lines)).collect();
        rows.sort_unstable();
        assert_eq!(
            rows,
            [
                ("t.py:4:f", "grew", true),
                ("u.py:1:g", "gone", false),
                ("u.py:2:g", "gone", false),
                ("u.py:9:g", "new", false)
            ]
        );
        assert!(sentence(&of).contains("fell by 20.00 MiB"), "{}", sentence(&of));
    }

    #[test]
    fn a_stack_that_a_list_may_lack_is_neither_new_nor_gone() {
        let before = held(&[holder(100, 1, &["t.py:1:f"])], (3, 12 << 20));
        let after = held(&[holder(100, 1, &["t.py:1:f"]), holder(9, 1, &["u.py:5:k"])], (0, 0));
        let of = compared(&before, &after);
        let [row] = &of.places[..] else { panic!("{of:?}") };
        assert_eq!(
            (row.change, row.first_bytes, row.bytes, row.increase_bytes),
            ("not known", None, Some(9 << 20), None)
        );
        assert_eq!((of.first_bytes >> 20, of.bytes >> 20), (112, 109));
        assert!(sentence(&of).ends_with("at which place is not known."), "{}", sentence(&of));
    }
}
