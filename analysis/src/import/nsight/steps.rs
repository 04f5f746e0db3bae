//! The steps of a program, and its waits for data, from its NVTX ranges.
//!
//! Enters: ranges in the order in which they began, twice. Leaves: the steps of each process, and what was guessed. Invariant: steps of
//! one process do not overlap.

use super::gpus::process;
use super::names::{family, words};
use super::ranges::{Range, Ranges};
use super::survey::{Chosen, RangeFamilies};
use crate::timeline::MOST_EVENTS;
use highwater_core::source::OpenError;
use highwater_engine::recording::rows::RecordingReader;
use std::collections::{BTreeMap, BTreeSet};

/// Parts of names, without all but letters, of ranges in which the host waits for data.
const LOADING: [&str; 8] =
    ["dataload", "loaddata", "loadbatch", "getbatch", "nextbatch", "fetchbatch", "fetchdata", "datafetch"];
/// Names of ranges with waits for data that are listed.
const MOST_LISTED: usize = 3;

/// What is taken from the ranges, by process.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Number, begin and end of each step.
    pub steps: BTreeMap<i64, Vec<(u64, i64, i64)>>,
    /// Begin and end of each wait for data.
    pub loading: BTreeMap<i64, Vec<(i64, i64)>>,
    /// The name of the ranges that are steps, without its numbers; `None` if steps are from one range to the next.
    pub family: Option<String>,
    /// The threads whose ranges count.
    pub threads: BTreeSet<i64>,
    /// What was guessed, for people.
    pub assumed: Vec<String>,
    /// What the ranges lack, for people.
    pub missing: Vec<&'static str>,
}

/// The steps of these processes; of all, if none are given.
pub(super) fn marks(file: &mut RecordingReader, processes: Option<&BTreeSet<i64>>) -> Result<Marks, OpenError> {
    let none = |missing| Ok(Marks { missing: vec![missing], ..Marks::default() });
    let Some(ranges) = Ranges::find(file)? else { return none("steps (it has no NVTX ranges)") };
    let mut survey = RangeFamilies::default();
    ranges.each(file, |range| {
        if processes.is_none_or(|processes| processes.contains(&process(range.thread))) {
            survey.take(&range);
        }
        Ok(())
    })?;
    let Some(chosen) = survey.chosen() else {
        let has_any = !survey.families.is_empty();
        return none(if has_any { "steps (no NVTX range repeats like one)" } else { "steps (it has no NVTX ranges)" });
    };
    // What cannot be read was counted the first time.
    let skipped = file.skipped.clone();
    let mut found = Marked::default();
    let too_large = file.refuse("recording_too_large", format!("it has more than {MOST_EVENTS} steps"));
    ranges.each(file, |range| {
        let is_kept = chosen.threads.contains(&range.thread) && found.take(&chosen, &range);
        if is_kept && found.kept > MOST_EVENTS { Err(too_large.clone()) } else { Ok(()) }
    })?;
    file.skipped = skipped;
    Ok(found.marks(&chosen))
}

fn is_loading(family: &str) -> bool {
    let letters = words(family).concat();
    letters == "data" || LOADING.iter().any(|known| letters.contains(known))
}

/// What the second pass over the ranges found.
#[derive(Debug, Default)]
struct Marked {
    /// By process: the number in the name, begin and end.
    steps: BTreeMap<i64, Vec<(Option<u64>, i64, i64)>>,
    loading: BTreeMap<i64, Vec<(i64, i64)>>,
    loaders: BTreeSet<String>,
    kept: usize,
}

impl Marked {
    /// Takes a range if it is a step or a wait for data.
    fn take(&mut self, chosen: &Chosen, range: &Range) -> bool {
        let (family, number) = family(&range.name);
        let (of, times) = (process(range.thread), (range.begin_ns, range.end_ns));
        // A loop may begin with the wait for its data.
        let is_wait = is_loading(&family) && (family != chosen.name || chosen.is_loop);
        if family == chosen.name {
            let steps = self.steps.entry(of).or_default();
            // A step in a step is a part of it.
            if steps.last().is_some_and(|(_, _, end_ns)| *end_ns > range.begin_ns) {
                return false;
            }
            if let Some((_, _, end_ns)) = steps.last_mut().filter(|_| chosen.is_loop) {
                *end_ns = range.begin_ns;
            }
            steps.push((number, times.0, times.1));
        } else if !is_wait {
            return false;
        }
        if is_wait {
            self.loading.entry(of).or_default().push(times);
            if self.loaders.len() < MOST_LISTED {
                self.loaders.insert(family);
            }
        }
        self.kept += 1;
        true
    }

    fn marks(mut self, chosen: &Chosen) -> Marks {
        for (thread, until_ns) in &chosen.until {
            let last = self.steps.get_mut(&process(*thread)).and_then(|steps| steps.last_mut());
            last.into_iter().for_each(|(_, _, end_ns)| *end_ns = (*end_ns).max(*until_ns));
        }
        let mut is_counted = false;
        let numbered = |(process, steps): (i64, Vec<(Option<u64>, i64, i64)>)| {
            let numbers: BTreeSet<u64> = steps.iter().filter_map(|(number, ..)| *number).collect();
            let has_numbers = numbers.len() == steps.len();
            is_counted |= !has_numbers;
            let of = |(nth, (number, begin_ns, end_ns)): (u64, (Option<u64>, i64, i64))| {
                (number.filter(|_| has_numbers).unwrap_or(nth), begin_ns, end_ns)
            };
            (process, (1..).zip(steps).map(of).collect())
        };
        let steps: BTreeMap<i64, Vec<(u64, i64, i64)>> = self.steps.into_iter().map(numbered).collect();
        let counted = if is_counted { ", numbered from 1" } else { "" };
        let name = &chosen.name;
        let mut assumed = vec![match chosen.is_loop {
            true => format!("steps are from one NVTX range `{name}` to the next{counted}"),
            false => format!("steps are the NVTX ranges `{name}`{counted}"),
        }];
        if !self.loaders.is_empty() {
            let names: Vec<String> = self.loaders.iter().map(|name| format!("`{name}`")).collect();
            assumed.push(format!("the host waits for data in the NVTX ranges {}", names.join(", ")));
        }
        let (family, threads) = ((!chosen.is_loop).then(|| chosen.name.clone()), chosen.threads.clone());
        Marks { steps, loading: self.loading, family, threads, assumed, missing: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_data_are_known_by_their_names() {
        for name in ["dataloader", "load_batch", "get_batch *", "data", "Data Loading"] {
            assert!(is_loading(name), "{name}");
        }
        assert!(!is_loading("metadata") && !is_loading("update"));
    }

    /// The steps among ranges of one thread: name, begin, end.
    fn found(ranges: &[(&str, i64, i64)]) -> Option<Marks> {
        let range = |(name, begin_ns, end_ns): &(&str, i64, i64)| Range {
            thread: 5 << 24,
            begin_ns: *begin_ns,
            end_ns: *end_ns,
            name: (*name).to_owned(),
        };
        let (mut survey, mut found) = (RangeFamilies::default(), Marked::default());
        ranges.iter().for_each(|of| survey.take(&range(of)));
        let chosen = survey.chosen()?;
        for of in ranges {
            found.take(&chosen, &range(of));
        }
        Some(found.marks(&chosen))
    }

    fn steps(ranges: &[(&str, i64, i64)]) -> Vec<(u64, i64, i64)> {
        found(ranges).map_or_else(Vec::new, |marks| marks.steps[&5].clone())
    }

    #[test]
    fn of_several_names_of_steps_the_longest_is_chosen() {
        let ranges = [
            ("train", 0, 100),
            ("iteration 1", 0, 50),
            ("batch 1", 0, 20),
            ("batch 2", 20, 40),
            ("iteration 2", 50, 90),
        ];
        assert_eq!(steps(&ranges), [(1, 0, 50), (2, 50, 90)]);
        // One that is named so once is better than none.
        assert_eq!(steps(&[("step 7", 0, 10), ("gemm", 1, 3)]), [(7, 0, 10)]);
    }

    #[test]
    fn without_a_word_the_parts_of_a_loop_are_steps() {
        let ranges = [
            ("main", 0, 100),
            ("read", 10, 12),
            ("solve", 12, 30),
            ("gemm", 13, 20),
            ("gemm", 20, 29),
            ("read", 40, 42),
            ("solve", 42, 60),
            ("read", 60, 62),
            ("tail", 98, 100),
        ];
        let marks = found(&ranges).expect("a loop");
        assert_eq!(marks.steps[&5], [(1, 10, 40), (2, 40, 60), (3, 60, 62)]);
        assert_eq!(marks.assumed, ["steps are from one NVTX range `read` to the next, numbered from 1"]);
        assert!(found(&[("{'mod': 'x'}", 0, 9), ("{'mod': 'x'}", 9, 19)]).is_none(), "operators and their arguments");
        assert!(found(&[("main", 0, 100), ("a", 0, 10), ("b", 10, 20)]).is_none());
        assert!(found(&[("aten::mm, seq = 1", 0, 1), ("aten::mm, seq = 2", 50, 51)]).is_none());
        assert!(found(&[]).is_none());
    }

    #[test]
    fn a_loop_may_begin_with_the_wait_for_its_data() {
        let ranges = [("load_batch", 0, 30), ("train", 30, 100), ("load_batch", 100, 140), ("train", 140, 200)];
        let marks = found(&ranges).expect("a loop");
        assert_eq!(marks.steps[&5], [(1, 0, 100), (2, 100, 200)]);
        assert_eq!(marks.loading[&5], [(0, 30), (100, 140)]);
    }

    #[test]
    fn numbers_that_repeat_are_replaced_and_steps_do_not_overlap() {
        let ranges =
            [("step 0", 0, 10), ("step 0", 2, 4), ("step 1", 10, 20), ("load_batch", 11, 13), ("step 0", 30, 40)];
        let marks = found(&ranges).expect("steps");
        assert_eq!(marks.steps[&5], [(1, 0, 10), (2, 10, 20), (3, 30, 40)]);
        assert_eq!(marks.loading[&5], [(11, 13)]);
        let assumed = [
            "steps are the NVTX ranges `step *`, numbered from 1",
            "the host waits for data in the NVTX ranges `load_batch`",
        ];
        assert_eq!(marks.assumed, assumed);
    }
}
