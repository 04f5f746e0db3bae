//! Which family of NVTX ranges is the steps of a program: ranges whose names differ only in numbers.
//!
//! Programs name their steps as they like: `step 3`, `iteration`, `train_batch_12`. Steps are the family with a word for a step in its name
//! that lasts the longest in all. Words of what is only a part of a step (`forward_step`, `optimizer.step`, `next_batch`) do not count.
//! If no name has such a word, the families are looked at that repeat and lie in no other that repeats. Those that repeat equally often are
//! the parts of a loop, if together they cover at least half of its time; a step is then from where the first of them begins to where it
//! begins again.
//!
//! Enters: ranges in the order in which they began. Leaves: the family, and the threads whose ranges count.

use super::gpus::process;
use super::names::{family, words};
use super::ranges::Range;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Words that say that a range is a step.
const STEP: [&str; 8] = ["step", "steps", "iteration", "iter", "batch", "minibatch", "timestep", "trainstep"];
/// Words that say that it is only a part of one.
const PART: [&str; 30] = [
    "optimizer",
    "optim",
    "scheduler",
    "sched",
    "forward",
    "backward",
    "fwd",
    "bwd",
    "zero",
    "micro",
    "microbatch",
    "sub",
    "data",
    "load",
    "loading",
    "loader",
    "get",
    "next",
    "fetch",
    "copy",
    "collate",
    "prepare",
    "read",
    "norm",
    "normalization",
    "batchnorm",
    "relu",
    "tensor",
    "memory",
    "set",
];
/// The most families of all threads. Those that appear later are not looked at.
const MOST_FAMILIES: usize = 1 << 12;
/// The most characters of a family's name. Longer names are data: tools write the arguments of operators into them.
const LONGEST_FAMILY: usize = 100;
/// What the names of operators begin with, which `torch.autograd.profiler.emit_nvtx` writes.
const OPERATORS: [&str; 4] = ["aten::", "autograd::", "torch::", "{"];
/// Ranges within each other.
const DEEPEST: usize = 64;
/// Ranges of one thread whose names differ only in numbers.
#[derive(Debug)]
pub(super) struct Family {
    thread: i64,
    name: String,
    count: u64,
    total_ns: i64,
    first_ns: i64,
    last_ns: i64,
    /// The one in which its first range lies.
    inside: Option<usize>,
}

/// What is known of all ranges.
#[derive(Debug, Default)]
pub(super) struct RangeFamilies {
    pub families: Vec<Family>,
    numbers: HashMap<(i64, String), usize>,
    /// By thread: the ends and families of the ranges in progress.
    open: HashMap<i64, Vec<(i64, usize)>>,
}

impl RangeFamilies {
    pub(super) fn take(&mut self, range: &Range) {
        let is_operator = OPERATORS.iter().any(|begin| range.name.starts_with(begin));
        let key = (range.thread, family(&range.name).0);
        if is_operator || key.1.chars().count() > LONGEST_FAMILY {
            return;
        }
        let known = self.numbers.get(&key).copied();
        if known.is_none() && self.families.len() >= MOST_FAMILIES {
            return;
        }
        let open = self.open.entry(range.thread).or_default();
        open.retain(|(end_ns, _)| *end_ns > range.begin_ns);
        let inside = open.last().filter(|(end_ns, _)| *end_ns >= range.end_ns).map(|(_, of)| *of);
        let at = known.unwrap_or_else(|| {
            let (thread, name) = key.clone();
            let (first_ns, last_ns) = (range.begin_ns, range.end_ns);
            self.families.push(Family { thread, name, count: 0, total_ns: 0, first_ns, last_ns, inside });
            self.numbers.insert(key, self.families.len() - 1);
            self.families.len() - 1
        });
        if open.len() < DEEPEST {
            open.push((range.end_ns, at));
        }
        let of = &mut self.families[at];
        of.count += 1;
        of.total_ns = of.total_ns.saturating_add(range.end_ns.saturating_sub(range.begin_ns));
        of.last_ns = of.last_ns.max(range.end_ns);
    }

    /// The family of the steps.
    pub(super) fn chosen(&self) -> Option<Chosen> {
        let named = self.families.iter().filter(|of| is_step(&of.name));
        if let Some(longest) = named.max_by_key(|of| (of.count > 1, of.total_ns)) {
            let (name, until) = (longest.name.clone(), BTreeMap::new());
            return Some(Chosen { threads: self.threads_of(&name), name, is_loop: false, until });
        }
        let outermost: Vec<&Family> = self.families.iter().filter(|of| of.count > 1 && self.is_outermost(of)).collect();
        let loops = outermost.iter().filter_map(|of| Loop::around(of, &outermost));
        let longest = loops.max_by_key(|of| (of.count, of.total_ns))?;
        let name = longest.first.name.clone();
        let threads = self.threads_of(&name);
        let of_thread = |thread: &i64| {
            let of = outermost.iter().filter(|of| of.thread == *thread && of.count.abs_diff(longest.count) <= 1);
            (*thread, of.map(|of| of.last_ns).max().unwrap_or(i64::MIN))
        };
        let until = threads.iter().map(of_thread).collect();
        Some(Chosen { name, is_loop: true, threads, until })
    }

    /// Whether a family lies in no other that repeats.
    fn is_outermost(&self, of: &Family) -> bool {
        let mut around = of.inside;
        // A range lies in one that began before, so this ends.
        while let Some(outer) = around.and_then(|at| self.families.get(at)) {
            if outer.count > 1 {
                return false;
            }
            around = outer.inside;
        }
        true
    }

    /// Of each process, the thread with the longest such ranges.
    fn threads_of(&self, name: &str) -> BTreeSet<i64> {
        let mut longest: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
        for of in self.families.iter().filter(|of| of.name == name) {
            let known = longest.entry(process(of.thread)).or_insert((of.total_ns, of.thread));
            *known = (*known).max((of.total_ns, of.thread));
        }
        longest.into_values().map(|(_, thread)| thread).collect()
    }
}

/// Families of one thread that are the parts of a loop.
struct Loop<'a> {
    first: &'a Family,
    count: u64,
    total_ns: i64,
}

impl<'a> Loop<'a> {
    /// The one of which this family is a part; `None` if the families do not cover half of its time.
    fn around(of: &Family, all: &[&'a Family]) -> Option<Self> {
        let parts = || all.iter().filter(|other| other.thread == of.thread && other.count.abs_diff(of.count) <= 1);
        let first = parts().min_by_key(|part| part.first_ns)?;
        let last_ns = parts().map(|part| part.last_ns).max()?;
        let total_ns = parts().map(|part| part.total_ns).fold(0, i64::saturating_add);
        let covers = total_ns >= last_ns.saturating_sub(first.first_ns) / 2;
        covers.then_some(Self { first, count: of.count, total_ns })
    }
}

/// Which ranges are steps.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    /// The family.
    pub name: String,
    /// Whether a step is from one range to the next.
    pub is_loop: bool,
    /// Of each process, the thread whose ranges count.
    pub threads: BTreeSet<i64>,
    /// When the last step of a loop ends, by thread.
    pub until: BTreeMap<i64, i64>,
}

fn is_step(family: &str) -> bool {
    let words = words(family);
    let has = |known: &[&str]| words.iter().any(|word| known.contains(&word.as_str()));
    has(&STEP) && !has(&PART)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_known_by_words_and_parts_of_steps_are_none() {
        for name in
            ["step *", "train_step", "ProfilerStep#*", "Iteration *", "iter_*", "trainBatch", "Training step (*)"]
        {
            assert!(is_step(name), "{name}");
        }
        for name in [
            "forward_step",
            "Optimizer.step#Adam.step",
            "lr_scheduler.step",
            "next_batch",
            "batch_norm",
            "BatchNormalization",
            "TensorSetInputMemoryBatch",
            "footsteps",
            "microbatch *",
        ] {
            assert!(!is_step(name), "{name}");
        }
    }
}
