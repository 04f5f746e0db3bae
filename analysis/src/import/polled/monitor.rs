//! Columns without end: `nvidia-smi dmon -s m`, `nvidia-smi pmon -s m`, `dcgmi dmon -e 250,252`.
//!
//! `pmon` has the memory of processes, and what a GPU's hold is added up.

use super::clock::{self, DateOrder, Stamp};
use super::columns::{MIB, size};
use super::hints::Hints;
use super::polls::Polls;
use crate::import::each_line;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{Fault, LineFile};
use highwater_engine::recording::tape::Tape;
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The most processes of a poll.
const MOST_PROCESSES: usize = 1 << 16;

/// Whether lines can be the first of such a file.
pub(crate) fn is_begin(lines: &[String]) -> bool {
    lines.iter().take(8).any(|line| Header::of(line).is_some())
}

/// Reads such a file.
pub(crate) fn tape(path: &Path, file: &LineFile, hints: &Hints) -> Result<Tape, OpenError> {
    let mut reader = Reader { polls: Polls::new(hints), header: None, of_processes: OfProcesses::default() };
    let mut skipped = SkippedLines::default();
    each_line(path, file, &mut skipped, |line| reader.take(line))?;
    if let Err(Fault::Line(problem) | Fault::File(problem)) = reader.end_poll() {
        skipped.add(path, 0, problem);
    }
    reader.polls.tape(path, "monitor of GPUs", skipped)
}

/// What the columns are, by their positions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Header {
    gpu: usize,
    date: Option<usize>,
    time: Option<usize>,
    pid: Option<usize>,
    used: Option<usize>,
    total: Option<usize>,
    /// Whether the GPU has two words: `GPU 0`.
    is_of_dcgm: bool,
}

impl Header {
    /// The header in a line; `None` if it is none.
    fn of(line: &str) -> Option<Self> {
        let names: Vec<String> = words(line.strip_prefix('#')?).map(str::to_ascii_lowercase).collect();
        let at = |name: &str| names.iter().position(|one| one == name);
        let (entity, used) = (at("entity"), at("fb").or_else(|| at("fbusd")));
        // The second line has the units.
        Some(Self {
            gpu: at("gpu").or(entity)?,
            date: at("date"),
            time: at("time"),
            pid: at("pid"),
            used,
            total: at("fbttl"),
            is_of_dcgm: entity.is_some(),
        })
    }
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|one: char| one.is_ascii_whitespace() || one == ',').filter(|word| !word.is_empty())
}

struct Reader {
    polls: Polls,
    header: Option<Header>,
    of_processes: OfProcesses,
}

/// What the processes of a poll hold, so far.
#[derive(Default)]
struct OfProcesses {
    at: Option<Stamp>,
    /// By GPU; `None` if one of its processes' memory is not known.
    held: BTreeMap<u32, Option<u64>>,
    seen: BTreeSet<(u32, String)>,
    last: u32,
}

impl Reader {
    fn take(&mut self, line: &str) -> Result<(), Fault> {
        if line.starts_with('#') {
            if let Some(header) = Header::of(line) {
                if header.used.is_none() {
                    let problem = "it has no memory in use: run dmon or pmon with -s m, or dcgmi dmon with -e 250,252";
                    return Err(Fault::File(FileProblem::malformed(problem)));
                }
                self.header = Some(header);
            }
            return Ok(());
        }
        let Some(header) = self.header.clone() else { return Ok(()) };
        let mut words: Vec<&str> = words(line).collect();
        if header.is_of_dcgm {
            // `ID` is the second line of the header.
            match words.first() {
                Some(&"GPU") => drop(words.remove(0)),
                _ => return Ok(()),
            }
        }
        let word = |at: usize| words.get(at).copied();
        let wrong = || Fault::Line(FileProblem::malformed("it has fewer columns than the header"));
        let gpu = word(header.gpu).ok_or_else(wrong)?;
        let number: u32 = gpu.parse().map_err(|_| Fault::Line(FileProblem::not_a("number of a GPU", gpu)))?;
        let used = header.used.and_then(word).ok_or_else(wrong)?;
        let at = match (header.date.and_then(word), header.time.and_then(word)) {
            (None, None) => None,
            (date, time) => {
                let text = [date, time].into_iter().flatten().collect::<Vec<_>>().join(" ");
                Some(
                    clock::parse(&text, DateOrder::DayMonth)
                        .ok_or_else(|| Fault::Line(FileProblem::not_a("timestamp", &text)))?,
                )
            }
        };
        if let Some(pid) = header.pid {
            let pid = word(pid).ok_or_else(wrong)?.to_owned();
            return self.take_process(at, number, pid, used);
        }
        let used = size(used, MIB).map_err(Fault::Line)?;
        let total = header.total.and_then(word).and_then(|total| size(total, MIB).ok().flatten());
        self.polls.add(at, Some(gpu), used, || Device {
            index: gpu.to_owned(),
            memory_total_bytes: total,
            ..Device::default()
        })
    }

    fn take_process(&mut self, at: Option<Stamp>, gpu: u32, pid: String, used: &str) -> Result<(), Fault> {
        let is_idle = pid == "-";
        let used = if is_idle { Some(0) } else { size(used, MIB).map_err(Fault::Line)? };
        let of = &self.of_processes;
        let is_next =
            gpu < of.last || at != of.at || of.seen.contains(&(gpu, pid.clone())) || of.seen.len() >= MOST_PROCESSES;
        if is_next {
            self.end_poll()?;
        }
        let of = &mut self.of_processes;
        let held = of.held.entry(gpu).or_insert(Some(0));
        *held = held.zip(used).and_then(|(held, used)| held.checked_add(used));
        of.seen.insert((gpu, pid));
        (of.at, of.last) = (at, gpu);
        Ok(())
    }

    /// Passes on what the processes of a poll hold.
    fn end_poll(&mut self) -> Result<(), Fault> {
        let OfProcesses { at, held, .. } = std::mem::take(&mut self.of_processes);
        for (gpu, used) in held {
            self.polls.assume("memory.used is what a GPU's processes hold together");
            if at.is_none() {
                self.polls.assume("a poll begins where a process comes again: of one that took another's place the first reading is added");
            }
            let index = gpu.to_string();
            self.polls.add(at, Some(&index), used, || Device { index: index.clone(), ..Device::default() })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::imported;
    use super::*;
    use highwater_engine::recording::tape::{READING_NS, Times};

    fn used(text: &str) -> Vec<Vec<(i64, Option<u64>)>> {
        let tape = imported("dmon.log", text).expect("a log");
        let points = |track: &highwater_engine::recording::track::Track| {
            track.points().map(|(at, used)| (at - tape.begin_ns, used.map(|used| used / MIB))).collect()
        };
        tape.tracks.iter().map(points).collect()
    }

    #[test]
    fn dmon_has_a_row_for_each_gpu() {
        let plain = "# gpu     fb   bar1   ccpm\n# Idx     MB     MB     MB\n    0   1000      5      0\n    1      4      5      0\n\
                     # gpu     fb   bar1   ccpm\n# Idx     MB     MB     MB\n    0   1200      5      0\n    1      4      5      0\n";
        assert_eq!(used(plain)[0], [(0, Some(1000)), (READING_NS, Some(1200))]);
        let timed = "#Date       Time        gpu     fb   bar1\n#YYYYMMDD   HH:MM:SS    Idx     MB     MB\n \
                     20240311   10:00:00      0   1000      5\n 20240311   10:00:02      0      -      5\n \
                     20240311   10:00:03      0   1200      5\n";
        let tape = imported("dmon.log", timed).expect("a log");
        assert_eq!(tape.format.times, Times::Relative);
        let seconds = |at: i64| at * 1_000_000_000;
        assert_eq!(used(timed)[0], [(0, Some(1000)), (seconds(2), None), (seconds(3), Some(1200))]);
        let table =
            "#Date, Time, gpu, fb\n#YYYYMMDD, HH:MM:SS, Idx, MB\n20240311, 10:00:00, 0, 7\n20240311, 10:00:02, 0, 8\n";
        assert_eq!(used(table)[0], [(0, Some(7)), (seconds(2), Some(8))]);
    }

    #[test]
    fn a_time_of_day_goes_on_after_midnight() {
        let text = "#Time        gpu     fb\n#HH:MM:SS    Idx     MB\n 23:59:59      0   5\n 00:00:01      0   6\n";
        assert_eq!(used(text)[0], [(0, Some(5)), (2_000_000_000, Some(6))]);
    }

    #[test]
    fn pmon_adds_up_a_gpus_processes() {
        let text = "# gpu         pid   type     fb   ccpm    command \n# Idx           #    C/G     MB     MB    name \n\
                    0       1492     C    100      0    python\n    0       1500     C     20      0    python\n    1          -     -      -      -    -\n\
                    0       1492     C    300      0    python\n    1       1600     C      7      0    python\n";
        assert_eq!(used(text)[0].iter().map(|(_, used)| *used).collect::<Vec<_>>(), [Some(120), Some(300)]);
        assert_eq!(used(text)[1].iter().map(|(_, used)| *used).collect::<Vec<_>>(), [Some(0), Some(7)]);
    }

    #[test]
    fn dcgmi_names_the_gpu_in_two_words() {
        let text = "#Entity   FBUSD   FBTTL\nID\nGPU 0     1234    81559\nGPU 1     4       81559\nGPU 0     1240    81559\nGPU 1     N/A     81559\n";
        assert_eq!(used(text)[0], [(0, Some(1234)), (READING_NS, Some(1240))]);
        assert_eq!(used(text)[1], [(0, Some(4)), (READING_NS, None)]);
    }

    #[test]
    fn a_monitor_of_other_things_is_refused_with_what_to_run() {
        let text =
            "# gpu     sm    mem    enc    dec\n# Idx      %      %      %      %\n    0     46     26      0      1\n";
        assert!(imported("dmon.log", text).expect_err("no memory").message.contains("run dmon or pmon with -s m"));
    }
}
