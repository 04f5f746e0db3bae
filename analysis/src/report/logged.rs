//! What ONNX Runtime's lines about memory in a training log say: the allocator of one rank, printed four times a step.
//!
//! Enters: the lines, in their order. Leaves: for each rank, its peak and the lines before and after it, the memory at each
//! phase, and whether that grew.

use super::printed::Printed;
use super::table::{Table, size, size_if};
use crate::import::ort_memory::Statistics;
use serde::Serialize;
use std::fmt::{self, Write as _};

/// The most ranks of one log, and phases of one rank.
pub(super) const MOST_RANKS: usize = 64;
const MOST_PHASES: usize = 16;
/// In its first two steps a job allocates what it keeps, such as the optimizer's state.
const WARM_STEPS: u64 = 2;

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct At {
    /// Its phase.
    phase: String,
    /// Its step.
    step: u64,
}

/// The most that was allocated, bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct LoggedPeak {
    bytes: u64,
    /// The line before it; `None` if it was reached before the first.
    after: Option<At>,
    /// The line after it.
    before: At,
}

/// A highest value, bytes, and its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Highest {
    bytes: u64,
    step: u64,
}

/// What was there at one phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Phase {
    name: String,
    lines: u64,
    allocated: Highest,
    reserved: Highest,
    inactive: Option<Highest>,
    /// Used memory by `nvidia-smi` less reserved memory: the context, NCCL, other processes.
    outside: Option<Highest>,
    /// Allocated in the first step after the warm-up, and in the last.
    first: Option<Highest>,
    last: Option<Highest>,
}

/// One rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Logged {
    rank: u32,
    lines: u64,
    first_step: u64,
    last_step: u64,
    peak: LoggedPeak,
    max_reserved_bytes: u64,
    parameter_bytes: Option<u64>,
    gradient_bytes: Option<u64>,
    buffer_bytes: Option<u64>,
    phases: Vec<Phase>,
    /// Lines of phases beyond the most of one rank.
    lines_of_more_phases: u64,
    /// The last line; the job was started again if the next has an earlier step.
    #[serde(skip)]
    last: At,
    /// The allocator's maximum at it.
    #[serde(skip)]
    max_allocated: u64,
}

impl Highest {
    fn raise(&mut self, bytes: u64, step: u64) {
        if bytes > self.bytes {
            *self = Self { bytes, step };
        }
    }

    fn raise_if(known: &mut Option<Self>, bytes: Option<u64>, step: u64) {
        let Some(bytes) = bytes else { return };
        known.get_or_insert(Self { bytes, step }).raise(bytes, step);
    }
}

impl Phase {
    fn new(line: &Statistics) -> Self {
        let of = |bytes| Highest { bytes, step: line.step };
        Self {
            name: line.phase.clone(),
            lines: 0,
            allocated: of(line.allocated),
            reserved: of(line.reserved),
            inactive: None,
            outside: None,
            first: None,
            last: None,
        }
    }

    fn add(&mut self, line: &Statistics) {
        self.lines += 1;
        self.allocated.raise(line.allocated, line.step);
        self.reserved.raise(line.reserved, line.step);
        Highest::raise_if(&mut self.inactive, line.inactive, line.step);
        let outside = line.device_used.and_then(|used| used.checked_sub(line.reserved));
        Highest::raise_if(&mut self.outside, outside, line.step);
        if line.step >= WARM_STEPS {
            let now = Highest { bytes: line.allocated, step: line.step };
            self.first.get_or_insert(now);
            self.last = Some(now);
        }
    }
}

impl Logged {
    pub(super) fn new(line: &Statistics) -> Self {
        let at = At { phase: line.phase.clone(), step: line.step };
        let mut logged = Self {
            rank: line.rank,
            lines: 0,
            first_step: line.step,
            last_step: line.step,
            peak: LoggedPeak { bytes: line.max_allocated, after: None, before: at.clone() },
            max_reserved_bytes: 0,
            parameter_bytes: None,
            gradient_bytes: None,
            buffer_bytes: None,
            phases: Vec::new(),
            lines_of_more_phases: 0,
            last: at,
            max_allocated: line.max_allocated,
        };
        logged.count(line);
        logged
    }

    /// Adds a line. Returns the allocator's maximum if it rose since the line before and is above what this line has allocated.
    pub(super) fn add(&mut self, line: &Statistics) -> Option<u64> {
        let at = At { phase: line.phase.clone(), step: line.step };
        let has_restarted = line.step < self.last.step;
        let rose = line.max_allocated > self.max_allocated || has_restarted;
        if line.max_allocated > self.peak.bytes {
            let after = (!has_restarted).then(|| self.last.clone());
            self.peak = LoggedPeak { bytes: line.max_allocated, after, before: at.clone() };
        }
        if has_restarted {
            // What grew is judged within one run.
            self.phases.iter_mut().for_each(|phase| (phase.first, phase.last) = (None, None));
        }
        self.count(line);
        (self.last, self.max_allocated) = (at, line.max_allocated);
        (rose && line.max_allocated > line.allocated).then_some(line.max_allocated)
    }

    fn count(&mut self, line: &Statistics) {
        self.lines += 1;
        self.first_step = self.first_step.min(line.step);
        self.last_step = self.last_step.max(line.step);
        self.max_reserved_bytes = self.max_reserved_bytes.max(line.max_reserved);
        let sizes = [
            (&mut self.parameter_bytes, line.parameters),
            (&mut self.gradient_bytes, line.gradients),
            (&mut self.buffer_bytes, line.buffers),
        ];
        for (known, now) in sizes {
            *known = (*known).max(now);
        }
        let known = self.phases.iter().position(|phase| phase.name == line.phase);
        let place = known.or_else(|| {
            (self.phases.len() < MOST_PHASES).then(|| {
                self.phases.push(Phase::new(line));
                self.phases.len() - 1
            })
        });
        match place.and_then(|place| self.phases.get_mut(place)) {
            Some(phase) => phase.add(line),
            None => self.lines_of_more_phases += 1,
        }
    }

    /// What the log shows of this rank, in sentences.
    pub(super) fn sentences(&self) -> Vec<String> {
        let Self { rank, lines, first_step, last_step, peak, .. } = self;
        let of = |at: &At| format!("{} of step {}", at.phase, at.step);
        let place = match &peak.after {
            Some(after) if after.step == peak.before.step => {
                format!("between {} and {}", after.phase, of(&peak.before))
            }
            Some(after) => format!("between {} and {}", of(after), of(&peak.before)),
            None => format!("before {}", of(&peak.before)),
        };
        let mut said = vec![
            format!("Rank {rank} printed its memory {lines} times, in steps {first_step} to {last_step}."),
            format!(
                "The most allocated was {}, {place}; the most reserved was {}.",
                size(peak.bytes),
                size(self.max_reserved_bytes)
            ),
        ];
        if let Some((name, first, last)) = self.growth() {
            let change = match last.bytes.cmp(&first.bytes) {
                std::cmp::Ordering::Greater => format!("{} more than", size(last.bytes - first.bytes)),
                std::cmp::Ordering::Equal => "as much as".to_owned(),
                std::cmp::Ordering::Less => format!("{} less than", size(first.bytes - last.bytes)),
            };
            let (from, to) = (first.step, last.step);
            said.push(format!("At {name}, {} were allocated in step {to}, {change} in step {from}.", size(last.bytes)));
        }
        if [self.parameter_bytes, self.gradient_bytes, self.buffer_bytes].iter().any(Option::is_some) {
            said.push(format!(
                "The model has {} of parameters, at most {} of gradients, and {} of buffers.",
                size_if(self.parameter_bytes),
                size_if(self.gradient_bytes),
                size_if(self.buffer_bytes)
            ));
        }
        if self.lines_of_more_phases > 0 {
            let (lines, most) = (self.lines_of_more_phases, MOST_PHASES);
            said.push(format!("Of its phases, the first {most} are listed; {lines} lines are of others."));
        }
        said
    }

    /// Allocated memory at the first phase, in the first step after the warm-up and in the last. Equal if nothing leaks.
    fn growth(&self) -> Option<(&str, Highest, Highest)> {
        let phase = self.phases.first()?;
        let (first, last) = (phase.first?, phase.last?);
        (last.step > first.step).then_some((phase.name.as_str(), first, last))
    }
}

/// Writes what the log shows of one rank.
pub(super) fn write(logged: &Logged, out: &mut Printed) -> fmt::Result {
    logged.sentences().iter().try_for_each(|said| writeln!(out, "{}", highwater_engine::recording::printable(said)))?;
    let mut table = Table::new(HEADER);
    logged.phases.iter().for_each(|phase| table.push(cells(phase)));
    out.table(table);
    Ok(())
}

/// The columns of the table of phases.
const HEADER: [&str; 10] = [
    "at",
    "lines",
    "allocated, highest",
    "in step",
    "reserved, highest",
    "in step",
    "inactive, highest",
    "in step",
    "outside, highest",
    "in step",
];

fn cells(phase: &Phase) -> [String; 10] {
    let step = |of: Option<Highest>| of.map_or_else(|| "?".to_owned(), |of| of.step.to_string());
    let bytes = |of: Option<Highest>| size_if(of.map(|of| of.bytes));
    let (allocated, reserved) = (Some(phase.allocated), Some(phase.reserved));
    [
        phase.name.clone(),
        phase.lines.to_string(),
        bytes(allocated),
        step(allocated),
        bytes(reserved),
        step(reserved),
        bytes(phase.inactive),
        step(phase.inactive),
        bytes(phase.outside),
        step(phase.outside),
    ]
}

/// The same for a page.
pub(super) fn page(logged: &Logged) -> serde_json::Value {
    serde_json::json!({
        "rank": logged.rank,
        "sentences": logged.sentences(),
        "columns": HEADER,
        "rows": logged.phases.iter().map(cells).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Report, Room, summary};
    use expect_test::expect;
    use highwater_core::source::OpenError;
    use highwater_engine::offline::Settings;

    fn line(step: u64, phase: &str, [allocated, max, reserved]: [u64; 3], more: &str) -> String {
        format!(
            "rank-0 step {step} memory (MiB) | phase: {phase} | allocated: {allocated} | max allocated: {max} \
             | cached: {reserved} | max cached: {reserved} | inactive: 5 | max inactive: 9{more}\n"
        )
    }

    fn opened(text: &str) -> Result<Report, OpenError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("train.log");
        std::fs::write(&path, text).expect("written");
        Report::open(&path, Room::of(1), &Settings::default())
    }

    #[test]
    fn the_peak_lies_between_the_lines_where_the_allocators_maximum_rose() {
        let mut text = "epoch 0\n".to_owned();
        // A leak of 1 MiB a step, and one longer batch.
        for step in [0, 1, 2, 3, 4, 8] {
            let kept = 100 + step;
            let high = if step >= 3 { 420 } else { 400 };
            let more = " | nvm smi: 900 | param size: 50 | grad size: 40 | buffer size: 1";
            text += &line(step, "pre_forward", [kept, if step == 3 { 400 } else { high }, 500], more);
            text += "loss 0.1\n";
            text += &line(step, "post_forward", [300, if step == 3 { 400 } else { high }, 500], "");
            text += &line(step, "pre_backward", [301, if step == 3 { 400 } else { high }, 500], "");
            text += &line(step, "post_backward", [150, high, 510 + step], "");
        }
        text += "rank-0 step 9 memory (MiB) | phase: pre_forward | allocated: many\n";
        let report = opened(&text).expect("a log");
        expect![[r#"
            Peak: 420.00 MiB on GPU 0 at reading 15.
              GPU        peak  reached at        mean      lowest  size  unknown for
                0  420.00 MiB  reading 15  224.75 MiB  100.00 MiB     ?   0 readings
            Rank 0 printed its memory 24 times, in steps 0 to 8.
            The most allocated was 420.00 MiB, between pre_backward and post_backward of step 3; the most reserved was 518.00 MiB.
            At pre_forward, 108.00 MiB were allocated in step 8, 6.00 MiB more than in step 2.
            The model has 50.00 MiB of parameters, at most 40.00 MiB of gradients, and 1.00 MiB of buffers.
        "#]].assert_eq(&summary(&report).to_string().lines().take(7).map(|line| format!("{line}\n")).collect::<String>());
        let phases: Vec<_> = report.logged[0].phases.iter().map(|phase| phase.name.as_str()).collect();
        assert_eq!(phases, ["pre_forward", "post_forward", "pre_backward", "post_backward"]);
        assert_eq!(report.logged[0].phases[0].outside, Some(Highest { bytes: 400 << 20, step: 0 }));
        assert_eq!(report.logged[0].phases[3].reserved, Highest { bytes: 518 << 20, step: 8 });
        assert_eq!((report.skipped.count, report.skipped.first[0].line), (1, 32));
    }

    #[test]
    fn a_job_that_was_started_again_has_a_maximum_of_its_own() {
        let text = line(4, "pre_forward", [100, 700, 800], "")
            + &line(0, "pre_forward", [10, 10, 20], "")
            + &line(0, "post_forward", [90, 95, 99], "");
        let report = opened(&text).expect("a log");
        assert_eq!(report.gpus[0].usage.peak, Some((100 << 20, 0)), "the 700 MiB are of before the first line");
        let LoggedPeak { bytes, after, before } = &report.logged[0].peak;
        assert_eq!((*bytes, after, before.step), (700 << 20, &None, 4));
        let points: Vec<_> =
            report.gpus[0].usage.curve.points().iter().map(|point| point.used.map(|used| used >> 20)).collect();
        assert_eq!(points[..4], [Some(100), Some(10), Some(95), Some(90)]);
    }

    #[test]
    fn phases_that_are_not_listed_are_counted() {
        let text: String = (0..20).map(|phase| line(0, &format!("p{phase}"), [1, 1, 1], "")).collect();
        let report = opened(&text).expect("a log");
        let said = report.logged[0].sentences().join(" ");
        assert!(said.ends_with("Of its phases, the first 16 are listed; 4 lines are of others."), "{said}");
    }

    #[test]
    fn growth_is_that_of_the_last_run() {
        let of = |step: u64, mib: u64| line(step, "pre_forward", [mib, mib, mib], "");
        // A second run with a larger batch, which does not leak.
        let text: String = (0..9).map(|step| of(step, 100)).chain((0..17).map(|step| of(step, 300))).collect();
        let report = opened(&text).expect("a log");
        let said = report.logged[0].sentences().join(" ");
        assert!(said.contains("At pre_forward, 300.00 MiB were allocated in step 16, as much as in step 2."), "{said}");
    }

    #[test]
    fn other_lines_cost_nothing_whatever_they_are() {
        let (first, second) = (line(0, "pre_forward", [1, 1, 1], ""), line(1, "pre_forward", [2, 2, 2], ""));
        let bar = " 50%|#####     | 500/1000 [00:10<00:10]\r".repeat(40_000);
        let mut text = format!("{first}{bar}{second}{}\n", "x".repeat(3 << 20)).into_bytes();
        text.extend_from_slice(b"\xff\xfe no text\nloss 0.1");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("train.log");
        std::fs::write(&path, text).expect("written");
        let report = Report::open(&path, Room::of(1), &Settings::default()).expect("a log");
        assert_eq!((report.skipped.count, report.logged[0].lines, report.logged[0].last_step), (0, 2, 1));
    }

    #[test]
    fn a_log_without_a_line_that_can_be_read_is_refused() {
        let error = opened("rank-x step 1 memory (MiB) | phase: pre_forward | allocated: 1\n").expect_err("nothing");
        assert!(error.message.ends_with("has no line about memory that can be read"), "{error:?}");
    }
}
