//! Memory timelines of PyTorch's profiler: what `export_memory_timeline` writes, also packed by gzip.
//!
//! Enters: either `[[time, action, bytes, category], …]`, each change with its nanoseconds (`.raw.json.gz`), or `[[time, …],
//! [[0, bytes, …], …]]`, the level of each category at each microsecond (`.json`, `.json.gz`). Leaves: the memory of one device over
//! time, by category of tensors. Invariants: read as a stream; changes of one microsecond count together, as in PyTorch's own
//! picture; what was there before the profile counts from its begin.

use super::json_of;
use super::torch_snapshot::bands::{BandMoment as Stretch, Bands as Over};
use super::torch_snapshot::curve::{AllocatorCurve, Level};
use highwater_core::clock::A_DATE_NS;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::allocator::{Allocator, BandMoment, Bands, HeldMemory, Holder, Moment, Place};
use highwater_engine::recording::tape::{Format, Tape, Times};
use highwater_engine::recording::track::Track;
use highwater_engine::recording::{SkippedLines, refuse};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use std::collections::HashMap;
use std::fmt;
use std::path::Path;

const FORMAT: Format = Format {
    name: "memory timeline of PyTorch's profiler",
    times: Times::Unix,
    missing: &[
        "memory that the allocator keeps, and memory outside of it",
        "the GPU's number, size and name",
        "call stacks",
        "steps and phases",
    ],
};
/// The categories, in the order of their numbers.
const CATEGORIES: [&str; 8] = [
    "parameters",
    "optimizer state",
    "inputs",
    "temporary",
    "activations",
    "gradients",
    "autograd detail",
    "category not known",
];
/// Actions have the numbers 1 to this.
const MOST_ACTION: i64 = 4;
/// Maximum number of times in the form with levels.
const MOST_TIMES: usize = 1 << 22;
/// Numbers of one row that are kept: one more than any row has.
const MOST_NUMBERS: usize = CATEGORIES.len() + 2;

/// Whether a text begins as one of the two forms.
pub(crate) fn is_begin(text: &str) -> bool {
    let Some(numbers) = text.trim_start().strip_prefix('[').and_then(|rest| rest.trim_start().strip_prefix('[')) else {
        return false;
    };
    let (first, rest) = numbers.split_once(']').unwrap_or((numbers, ""));
    let of_times = first.split(',').take(MOST_NUMBERS).map(|number| number.trim().parse::<i64>().ok());
    let Some(list) = of_times.collect::<Option<Vec<i64>>>() else { return false };
    let next: String = rest.chars().filter(|one| !one.is_whitespace()).take(3).collect();
    match &list[..] {
        // Times, and then the levels at the first of them.
        _ if next.starts_with(",[[") => true,
        [_, action, _, category] => is_action(*action) && is_category(*category),
        _ => rest.is_empty() && list.len() == MOST_NUMBERS,
    }
}

fn is_action(number: i64) -> bool {
    (1..=MOST_ACTION).contains(&number)
}

fn is_category(number: i64) -> bool {
    usize::try_from(number).is_ok_and(|number| number < CATEGORIES.len())
}

pub(crate) fn tape(path: &Path) -> Result<Tape, OpenError> {
    let mut all = Timeline::default();
    json_of(path, |deserializer| deserializer.deserialize_seq(&mut all))?;
    all.end_moment();
    let Timeline { curve, bands, levels, counts, peak, events, begin_us, last_us, .. } = all;
    let Some(begin_us) = begin_us else {
        return Err(refuse("recording_unreadable", path, "it has no change of memory"));
    };
    let at_ns = |us: i64| us.saturating_mul(1_000);
    let times = if at_ns(begin_us) >= A_DATE_NS { Times::Unix } else { Times::Relative };
    let point = |level: Level| Some((at_ns(level.time_us?), u64::try_from(level.allocated).ok()));
    let last = [(at_ns(last_us), u64::try_from(total(&levels)).ok())];
    let track = Track::new(0, curve.levels().filter_map(point).chain(last));
    let device = Device { index: "0".to_owned(), ..Device::default() };
    let mut tape = Tape::imported(path, Format { times, ..FORMAT }, [(device, track)], SkippedLines::default())?;
    tape.assumed.push("the memory is that of GPU 0: the file does not say of which device it is".to_owned());
    tape.allocators.push(Allocator {
        gpu: 0,
        events,
        is_by_category: true,
        peak: Moment {
            after_events: peak.event,
            at_ns: Some(at_ns(peak.at_us)),
            allocated: u64::try_from(total(&peak.levels)).ok(),
            reserved: None,
        },
        at_peak: held(&peak.levels, peak.counts.as_ref()),
        at_end: Some(held(&levels, counts.as_ref())),
        bands: over_time(bands, at_ns),
        reserved: None,
        in_use: None,
        requested: None,
        blocks_at_peak: Vec::new(),
        blocks_at_end: Vec::new(),
        layout_at_peak: None,
        layout_at_end: None,
        failures: Vec::new(),
        failures_left_out: 0,
    });
    Ok(tape)
}

/// By category: bytes, or numbers of tensors.
type ByCategory = [i64; CATEGORIES.len()];

fn total(levels: &ByCategory) -> i64 {
    levels.iter().fold(0, |sum: i64, level| sum.saturating_add(*level))
}

/// What each category holds, the most first. A level below 0 is none.
fn held(levels: &ByCategory, counts: Option<&ByCategory>) -> HeldMemory {
    let holder = |nth: usize| {
        let bytes = u64::try_from(levels[nth]).ok().filter(|bytes| *bytes > 0)?;
        let allocations = counts.and_then(|counts| u64::try_from(counts[nth]).ok());
        let place = Place { site: Some(CATEGORIES[nth].to_owned()), ..Place::default() };
        Some(Holder { bytes, allocations, place })
    };
    let mut holders: Vec<Holder> = (0..CATEGORIES.len()).filter_map(holder).collect();
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    HeldMemory { holders, others: (0, 0) }
}

fn over_time(bands: Over, at_ns: impl Fn(i64) -> i64) -> Bands {
    let banded = bands.finish(&HashMap::new(), CATEGORIES.len());
    let moment = |moment: &Stretch| {
        let from_ns = at_ns(moment.begin_us?);
        Some(BandMoment { from_ns, total: moment.total, held: moment.held.clone() })
    };
    let site = |category: &u32| CATEGORIES.get(*category as usize).map(|name| (*name).to_owned());
    Bands {
        sites: banded.holders.iter().map(site).collect(),
        moments: banded.moments.iter().filter_map(moment).collect(),
    }
    .largest(CATEGORIES.len())
}

/// The highest moment so far.
#[derive(Debug, Default)]
struct Highest {
    event: u64,
    at_us: i64,
    levels: ByCategory,
    counts: Option<ByCategory>,
}

/// What was read so far.
#[derive(Debug, Default)]
struct Timeline {
    curve: AllocatorCurve,
    bands: Over,
    levels: ByCategory,
    /// Tensors by category, where changes are read and not levels.
    counts: Option<ByCategory>,
    /// The changes of the present microsecond.
    changes: ByCategory,
    peak: Highest,
    events: u64,
    begin_us: Option<i64>,
    last_us: i64,
    /// The times of the form with levels.
    times: Vec<i64>,
    /// Levels that were read.
    rows: usize,
}

impl Timeline {
    /// A change of one category at a time; `None` is before the profile.
    fn change(&mut self, at_us: Option<i64>, category: usize, bytes: i64) -> Result<(), &'static str> {
        match at_us {
            Some(at_us) if self.begin_us.is_none() => (self.begin_us, self.last_us) = (Some(at_us), at_us),
            // Times of one file may go back by a little; a chart's do not.
            Some(at_us) if at_us > self.last_us => {
                self.end_moment();
                self.last_us = at_us;
            }
            _ => {}
        }
        let change = self.changes[category].checked_add(bytes).ok_or("its sizes add up to more than 2^63 bytes")?;
        self.changes[category] = change;
        Ok(())
    }

    /// Takes over the changes of the present microsecond. What is freed goes first, so that no level is higher than at its end.
    fn end_moment(&mut self) {
        let at_us = self.begin_us.map(|_| self.last_us);
        let changes = std::mem::take(&mut self.changes);
        for is_growth in [false, true] {
            for (category, bytes) in
                changes.iter().enumerate().filter(|(_, bytes)| **bytes != 0 && (**bytes > 0) == is_growth)
            {
                self.levels[category] = self.levels[category].saturating_add(*bytes);
                self.bands.change(self.events, at_us, u32::try_from(category).unwrap_or(u32::MAX), *bytes);
            }
        }
        let allocated = total(&self.levels);
        self.curve.push(Level { event: self.events, time_us: at_us, allocated });
        if allocated > total(&self.peak.levels) || self.peak.event == 0 {
            self.peak = Highest { event: self.events, at_us: self.last_us, levels: self.levels, counts: self.counts };
        }
    }

    /// `time in nanoseconds, action, bytes, category`.
    fn raw(&mut self, numbers: &[i64]) -> Result<(), &'static str> {
        let &[at_ns, action, bytes, category] = numbers else {
            return Err("a change has a time, an action, bytes and a category");
        };
        if !is_action(action) || !is_category(category) {
            return Err("an action is 1 to 4, and a category 0 to 7");
        }
        let category = usize::try_from(category).unwrap_or_default();
        self.events += 1;
        self.change((at_ns >= 0).then_some(at_ns / 1_000), category, bytes)?;
        self.counts.get_or_insert_default()[category] += bytes.signum();
        Ok(())
    }

    /// The levels at the next time: a 0, and the bytes of each category.
    fn row(&mut self, numbers: &[i64]) -> Result<(), &'static str> {
        let at_us = *self.times.get(self.rows).ok_or("it has more levels than times")?;
        self.rows += 1;
        self.events += 1;
        let Some((0, levels)) = numbers.split_first() else { return Err("levels begin with a 0") };
        if levels.len() != CATEGORIES.len() {
            return Err("there are levels of 8 categories");
        }
        for (category, level) in levels.iter().enumerate() {
            let now = self.levels[category].saturating_add(self.changes[category]);
            let change = level.checked_sub(now).ok_or("its sizes add up to more than 2^63 bytes")?;
            self.change(Some(at_us.max(0)), category, change)?;
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for &mut Timeline {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a memory timeline of PyTorch's profiler")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut lists: A) -> Result<(), A::Error> {
        let mut first = Vec::new();
        lists.next_element_seed(Numbers(&mut first, MOST_TIMES))?;
        // The second list says which form it is: it has numbers, or lists of numbers.
        self.times = first;
        let mut second = Vec::new();
        let is_there = lists.next_element_seed(Second { all: self, numbers: &mut second })?.is_some();
        if is_there && second.is_empty() {
            let is_whole = self.rows == self.times.len() && lists.next_element::<IgnoredAny>()?.is_none();
            return if is_whole { Ok(()) } else { Err(A::Error::custom("it has not as many levels as times")) };
        }
        let first = std::mem::take(&mut self.times);
        self.raw(&first).map_err(A::Error::custom)?;
        if is_there {
            self.raw(&second).map_err(A::Error::custom)?;
        }
        let mut numbers = Vec::with_capacity(MOST_NUMBERS);
        while lists.next_element_seed(Numbers(&mut numbers, MOST_NUMBERS))?.is_some() {
            self.raw(&numbers).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}

/// A list of integers, of which at most some are kept.
struct Numbers<'a>(&'a mut Vec<i64>, usize);

impl<'de> DeserializeSeed<'de> for Numbers<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<(), A::Error> {
        self.0.clear();
        while let Some(number) = numbers.next_element::<i64>()? {
            if self.0.len() >= self.1 {
                return Err(A::Error::custom(format_args!("a list has more than {} numbers", self.1)));
            }
            self.0.push(number);
        }
        Ok(())
    }
}

/// The second list: numbers, which are kept, or the levels at all times.
struct Second<'a> {
    all: &'a mut Timeline,
    numbers: &'a mut Vec<i64>,
}

impl<'de> DeserializeSeed<'de> for Second<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Second<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers, or of such lists")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let mut row = Vec::with_capacity(MOST_NUMBERS);
        while let Some(is_row) = items.next_element_seed(Item { row: &mut row, numbers: self.numbers })? {
            if is_row {
                self.all.row(&row).map_err(A::Error::custom)?;
            }
        }
        Ok(())
    }
}

/// A number, or a list of numbers, which is a row.
struct Item<'a> {
    row: &'a mut Vec<i64>,
    numbers: &'a mut Vec<i64>,
}

impl<'de> DeserializeSeed<'de> for Item<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Item<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number, or a list of them")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<bool, E> {
        if self.numbers.len() >= MOST_NUMBERS {
            return Err(E::custom(format_args!("a change has more than {MOST_NUMBERS} numbers")));
        }
        self.numbers.push(number);
        Ok(false)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<bool, E> {
        self.visit_i64(i64::try_from(number).map_err(|_| E::custom("a number is larger than 2^63"))?)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, numbers: A) -> Result<bool, A::Error> {
        Numbers(self.row, MOST_NUMBERS).visit_seq(numbers).map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::imported;
    use super::*;

    const RAW: &str = "[[-1, 1, 1000, 0], [-1, 1, 24, 7], [1696966048000001000, 2, 512, 4], [1696966048000001400, 2, 512, 4],\n \
        [1696966048000001999, 4, -24, 7], [1696966048000003000, 3, -512, 4], [1696966048000003000, 3, 512, 5], \
        [1696966048000009000, 4, -512, 4]]";
    const LEVELS: &str = "[[1696966048000001, 1696966048000003, 1696966048000009], [[0, 1000, 0, 0, 0, 1024, 0, 0, 0], \
        [0, 1000, 0, 0, 0, 512, 512, 0, 0], [0, 1000, 0, 0, 0, 0, 512, 0, 0]]]";

    fn sites(held: &HeldMemory) -> Vec<(&str, u64, Option<u64>)> {
        held.holders.iter().map(|one| (one.place.site.as_deref().unwrap_or("?"), one.bytes, one.allocations)).collect()
    }

    #[test]
    fn both_forms_have_the_same_levels() {
        for (name, text) in [("memory_timeline.raw.json", RAW), ("memory_timeline.json", LEVELS)] {
            let tape = imported(name, text).expect(name);
            let of = &tape.allocators[0];
            assert_eq!((tape.format.times, of.peak.allocated), (Times::Unix, Some(2_024)), "{name}");
            assert_eq!(of.peak.at_ns, Some(1_696_966_048_000_001_000), "{name}");
            let counts = |one, other| if name.contains("raw") { (Some(one), Some(other)) } else { (None, None) };
            let (parameters, activations) = counts(1, 2);
            assert_eq!(
                sites(&of.at_peak),
                [("activations", 1_024, activations), ("parameters", 1_000, parameters)],
                "{name}"
            );
            let (parameters, gradients) = counts(1, 1);
            let at_end = of.at_end.as_ref().expect("known");
            assert_eq!(sites(at_end), [("parameters", 1_000, parameters), ("gradients", 512, gradients)], "{name}");
            let used: Vec<Option<u64>> = tape.tracks[0].points().map(|(_, used)| used).collect();
            assert_eq!(used.last(), Some(&Some(1_512)), "{name}");
            let bands = &of.bands;
            assert_eq!(bands.moments.last().map(|moment| moment.total), Some(1_512), "{name}");
            assert!(bands.moments.iter().all(|moment| moment.held.iter().sum::<u64>() <= moment.total), "{name}");
        }
    }

    #[test]
    fn a_single_change_is_a_timeline() {
        let tape = imported("a", "[[1696966048000001000, 2, 512, 4]]").expect("read");
        assert_eq!((tape.allocators[0].events, tape.allocators[0].peak.allocated), (1, Some(512)));
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        for (text, because) in [
            ("[[-1, 1, 5, 0], [-1, 1, 5, 0]]", "it has no change of memory"),
            ("[[-1, 1, 5, 0], [7000, 9, 5, 0]]", "an action is 1 to 4, and a category 0 to 7"),
            ("[[-1, 1, 5, 0], [7000, 2, 5, 8]]", "an action is 1 to 4, and a category 0 to 7"),
            ("[[-1, 1, 5, 0], [7000, 2, 5]]", "a change has a time, an action, bytes and a category"),
            (
                "[[-1, 1, 5, 0], [7000, 2, 9223372036854775807, 0], [7000, 2, 9223372036854775807, 0]]",
                "add up to more than 2^63",
            ),
            ("[[-1, 1, 5, 0], [7000, 2, 5, 0], [7000, 2, 5, 0]", "it ends in the middle, in line 1"),
            ("[[1000, 2000], [[0, 1, 2, 3, 4, 5, 6, 7, 8]]]", "not as many levels as times"),
            ("[[1000], [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]]]", "it has more levels than times"),
            ("[[1000], [[0, 1, 2, 3]]]", "there are levels of 8 categories"),
            ("[[1000], [[1, 1, 2, 3, 4, 5, 6, 7, 8]]]", "levels begin with a 0"),
            ("[[-1, 1, 5, 0], [1,2,3,4,5,6,7,8,9,10,11,12]]", "a change has more than 10 numbers"),
        ] {
            let error = imported("a", text).expect_err(text);
            assert!(error.message.contains(because), "{text}: {error:?}");
        }
    }

    #[test]
    fn only_timelines_begin_as_one() {
        for text in [RAW, LEVELS, " [[1,2,3,4,5,6,7,8,9,10,11", "[[5],[[0", "[[1000, 2, 5, 7], [1"] {
            assert!(is_begin(text), "{text}");
        }
        for text in [
            "",
            "[",
            "[]",
            "[[",
            "[[]]",
            "[{\"a\": 1}]",
            "[[1, 9, 5, 7], [1",
            "[[1, 2], [3, 4]]",
            "[[1.5, 2, 3, 4]]",
            "{}",
        ] {
            assert!(!is_begin(text), "{text}");
        }
    }
}
