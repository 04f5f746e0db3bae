//! How much time of the host and of the GPUs each annotation of a program took: a name that it gave to a part of its work, such as by
//! `torch.profiler.record_function` or an NVTX range.
//!
//! Enters: annotations of threads, and when each thread launched what. Leaves: by name, the time in which a thread was in an annotation of
//! that name, and what it launched meanwhile, in all and by step. Invariants: what was launched within several annotations counts in each, and
//! once for annotations of one name; if there are more than are kept, nothing is known rather than a part. Absent on
//! purpose: work that another thread launched, such as a backward pass that an annotation waits for.

use super::names::Names;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// The most annotations that are kept: 32 MiB.
const MOST_ANNOTATIONS: usize = 1 << 20;
/// The most annotations within each other on one thread.
const DEEPEST: usize = 64;
/// The most pairs of a name and a step.
const MOST_SUMS: usize = 1 << 16;

/// What one name of annotations took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AnnotationTime {
    /// The name; `None` for those for which there was no room.
    pub annotation: Option<String>,
    /// The sum over all steps, and over the time outside of steps.
    #[serde(flatten)]
    pub all: AnnotationSum,
    /// The same of each step in which an annotation of this name began.
    pub steps: Vec<AnnotationStep>,
}

/// What the annotations of one name that began in a step took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AnnotationStep {
    /// The step's number.
    pub step: u64,
    /// The sum.
    #[serde(flatten)]
    pub sum: AnnotationSum,
}

/// What annotations took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct AnnotationSum {
    /// How many there were.
    pub count: u64,
    /// How long threads were in them, nanoseconds; one within another of the same name counts once.
    pub host_ns: u64,
    /// How many kernels, copies and fills their threads launched meanwhile; `None` if the file does not say which thread launched what.
    pub launched: Option<u64>,
    /// The durations of those, nanoseconds; two that ran at once count twice.
    pub gpu_ns: Option<u64>,
}

impl AnnotationSum {
    /// A sum of nothing, of which as much is known as of this one.
    fn zero(self) -> Self {
        let zero = self.launched.map(|_| 0);
        Self { launched: zero, gpu_ns: zero, ..Self::default() }
    }

    fn with(self, other: Self) -> Self {
        let add = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
        Self {
            count: self.count + other.count,
            host_ns: self.host_ns.saturating_add(other.host_ns),
            launched: add(self.launched, other.launched),
            gpu_ns: add(self.gpu_ns, other.gpu_ns),
        }
    }
}

impl AnnotationTime {
    /// The sum over those that began in steps.
    #[must_use]
    pub fn in_steps(&self) -> AnnotationSum {
        self.steps.iter().map(|of| of.sum).fold(self.all.zero(), AnnotationSum::with)
    }
}

/// An annotation of a thread; the thread is 0 if it is not known.
#[derive(Debug, Clone, Copy)]
struct Annotation {
    thread: i64,
    begin_ns: i64,
    end_ns: i64,
    name: Option<u32>,
}

/// Something that ran on a GPU, by its launch. They are ordered by thread and time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Launched {
    pub thread: i64,
    pub at_ns: i64,
    pub duration_ns: u64,
}

/// An annotation in which its thread is.
struct Open {
    end_ns: i64,
    name: Option<u32>,
    step: Option<u64>,
}

type Sums = BTreeMap<(Option<u32>, Option<u64>), AnnotationSum>;

/// The annotations of a trace.
#[derive(Debug, Default)]
pub(super) struct Annotations {
    kept: Vec<Annotation>,
    names: Names,
    is_full: bool,
}

impl Annotations {
    pub(super) fn take(&mut self, thread: i64, name: &str, begin_ns: i64, end_ns: i64) {
        if self.kept.len() >= MOST_ANNOTATIONS {
            self.is_full = true;
            return;
        }
        let name = self.names.intern_short(name);
        self.kept.push(Annotation { thread, begin_ns, end_ns, name });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// The time by name, the longest on the GPUs first; `None` if there are too many annotations. `step_at` is the step of the host at a time.
    pub(super) fn times(
        mut self,
        mut launched: Vec<Launched>,
        step_at: impl Fn(i64) -> Option<u64>,
    ) -> Option<Vec<AnnotationTime>> {
        if self.is_full {
            return None;
        }
        launched.retain(|of| of.thread != 0);
        launched.sort_unstable();
        self.kept.sort_by_key(|of| (of.thread, of.begin_ns, Reverse(of.end_ns)));
        let are_joined = !launched.is_empty() && self.kept.iter().all(|of| of.thread != 0);
        let zero = are_joined.then_some(0);
        let (mut sums, mut rest) = (Sums::new(), launched.as_slice());
        for of_thread in self.kept.chunk_by(|a, b| a.thread == b.thread) {
            let thread = of_thread.first()?.thread;
            rest = &rest[rest.partition_point(|of| of.thread < thread)..];
            let (here, later) = rest.split_at(rest.partition_point(|of| of.thread == thread));
            rest = later;
            add_thread(&mut sums, of_thread, here, &step_at, zero)?;
        }
        Some(self.named(sums))
    }

    fn named(&self, sums: Sums) -> Vec<AnnotationTime> {
        let mut times: Vec<AnnotationTime> = Vec::new();
        let mut before = None;
        for ((name, step), sum) in sums {
            if before != Some(name) {
                let annotation = name.and_then(|name| self.names.get(name)).map(str::to_owned);
                times.push(AnnotationTime { annotation, all: sum.zero(), steps: Vec::new() });
                before = Some(name);
            }
            let Some(of) = times.last_mut() else { continue };
            of.all = of.all.with(sum);
            of.steps.extend(step.map(|step| AnnotationStep { step, sum }));
        }
        times.sort_by_key(order);
        times
    }
}

/// The longest on GPUs, and then on the host, come first.
fn order(of: &AnnotationTime) -> Reverse<(Option<u64>, u64)> {
    Reverse((of.all.gpu_ns, of.all.host_ns))
}

/// Adds the annotations of one thread; `None` if there are too many.
fn add_thread(
    sums: &mut Sums,
    annotations: &[Annotation],
    launched: &[Launched],
    step_at: &impl Fn(i64) -> Option<u64>,
    zero: Option<u64>,
) -> Option<()> {
    let mut launched = launched.iter().peekable();
    let (mut open, mut covered) = (Vec::<Open>::new(), HashMap::<Option<u32>, i64>::new());
    for of in annotations {
        while let Some(launch) = launched.next_if(|launch| launch.at_ns < of.begin_ns) {
            add_launch(sums, &open, launch);
        }
        open.retain(|open| open.end_ns > of.begin_ns);
        let step = step_at(of.begin_ns);
        let covered = covered.entry(of.name).or_insert(i64::MIN);
        let begin_ns = of.begin_ns.max(*covered);
        let host_ns = if of.end_ns > begin_ns { of.end_ns.abs_diff(begin_ns) } else { 0 };
        *covered = of.end_ns.max(*covered);
        let one = AnnotationSum { count: 1, host_ns, launched: zero, gpu_ns: zero };
        sums.entry((of.name, step)).and_modify(|sum| *sum = sum.with(one)).or_insert(one);
        open.push(Open { end_ns: of.end_ns, name: of.name, step });
        if open.len() > DEEPEST || sums.len() > MOST_SUMS {
            return None;
        }
    }
    launched.for_each(|launch| add_launch(sums, &open, launch));
    Some(())
}

/// Adds a launch to each name whose annotation it lies in.
fn add_launch(sums: &mut Sums, open: &[Open], launch: &Launched) {
    let around = |of: &&Open| launch.at_ns < of.end_ns;
    for (nth, of) in open.iter().enumerate().filter(|(_, of)| around(of)) {
        let is_counted = open[..nth].iter().filter(around).any(|outer| outer.name == of.name);
        if let (Some(sum), false) = (sums.get_mut(&(of.name, of.step)), is_counted) {
            let one = AnnotationSum { launched: Some(1), gpu_ns: Some(launch.duration_ns), ..AnnotationSum::default() };
            *sum = sum.with(one);
        }
    }
}

/// The annotations of two processes.
pub(super) fn merged(mut all: Vec<AnnotationTime>, others: Vec<AnnotationTime>) -> Vec<AnnotationTime> {
    for other in others {
        let Some(of) = all.iter_mut().find(|of| of.annotation == other.annotation) else {
            all.push(other);
            continue;
        };
        of.all = of.all.with(other.all);
        for one in other.steps {
            match of.steps.binary_search_by_key(&one.step, |known| known.step) {
                Ok(at) => of.steps[at].sum = of.steps[at].sum.with(one.sum),
                Err(at) => of.steps.insert(at, one),
            }
        }
    }
    all.sort_by_key(order);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(annotations: &[(i64, &str, i64, i64)], launched: &[(i64, i64, u64)]) -> Option<Vec<AnnotationTime>> {
        let mut all = Annotations::default();
        annotations.iter().for_each(|(thread, name, begin, end)| all.take(*thread, name, *begin, *end));
        let launched = launched.iter().map(|(thread, at_ns, duration_ns)| Launched {
            thread: *thread,
            at_ns: *at_ns,
            duration_ns: *duration_ns,
        });
        all.times(launched.collect(), |at_ns| (at_ns >= 100).then_some(at_ns.unsigned_abs() / 100))
    }

    fn shown(of: &AnnotationTime) -> (&str, u64, u64, Option<u64>, Option<u64>) {
        (of.annotation.as_deref().unwrap_or("?"), of.all.count, of.all.host_ns, of.all.launched, of.all.gpu_ns)
    }

    #[test]
    fn what_a_thread_launched_counts_in_each_annotation_around_it_and_in_no_other_thread() {
        let annotations = [(1, "outer", 0, 50), (1, "inner", 10, 20), (2, "else", 0, 50), (1, "outer", 60, 70)];
        // Before, in both, at the end of the inner one, at the end of the outer one, in the second, and on a thread without any.
        let launched = [(1, -1, 1), (1, 10, 2), (1, 20, 4), (1, 50, 8), (1, 69, 16), (3, 15, 32)];
        let times = times(&annotations, &launched).expect("few");
        let expected = [
            ("outer", 2, 60, Some(3), Some(22)),
            ("inner", 1, 10, Some(1), Some(2)),
            ("else", 1, 50, Some(0), Some(0)),
        ];
        assert_eq!(times.iter().map(shown).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn one_within_another_of_the_same_name_counts_its_time_once() {
        let times =
            times(&[(1, "f", 0, 50), (1, "f", 10, 20), (1, "f", 40, 60)], &[(1, 15, 7), (1, 45, 1)]).expect("few");
        assert_eq!(times.iter().map(shown).collect::<Vec<_>>(), [("f", 3, 60, Some(2), Some(8))]);
    }

    #[test]
    fn each_belongs_to_the_step_in_which_it_began() {
        let times = times(&[(1, "f", 0, 50), (1, "f", 110, 220), (1, "f", 230, 240)], &[(1, 210, 7)]).expect("few");
        let steps: Vec<_> = times[0].steps.iter().map(|of| (of.step, of.sum.host_ns, of.sum.gpu_ns)).collect();
        assert_eq!(steps, [(1, 110, Some(7)), (2, 10, Some(0))]);
        assert_eq!(shown(&times[0]), ("f", 3, 170, Some(1), Some(7)));
        let twice = merged(times.clone(), times);
        assert_eq!((twice.len(), shown(&twice[0]), twice[0].steps.len()), (1, ("f", 6, 340, Some(2), Some(14)), 2));
    }

    #[test]
    fn without_threads_only_the_host_s_time_is_known() {
        let unknown = times(&[(0, "f", 0, 50)], &[(1, 15, 7)]).expect("few");
        assert_eq!(unknown.iter().map(shown).collect::<Vec<_>>(), [("f", 1, 50, None, None)]);
        let unlaunched = times(&[(1, "f", 0, 50)], &[(0, 15, 7)]).expect("few");
        assert_eq!(unlaunched.iter().map(shown).collect::<Vec<_>>(), [("f", 1, 50, None, None)]);
    }

    #[test]
    fn of_too_many_nothing_is_known() {
        let nested = |count: usize| vec![(1, "f", 0, 50); count];
        assert!(times(&nested(DEEPEST), &[]).is_some() && times(&nested(DEEPEST + 1), &[]).is_none());
        let full = Annotations { is_full: true, ..Annotations::default() };
        assert_eq!(full.times(Vec::new(), |_| None), None);
        let many: Vec<_> = (1..=MOST_SUMS as i64 + 1).map(|nth| (1, "f", 100 * nth, 100 * nth + 1)).collect();
        assert!(times(&many[1..], &[]).is_some() && times(&many, &[]).is_none());
    }
}
