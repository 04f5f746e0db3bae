//! Tables of text: `nvidia-smi --query-gpu=… --format=csv`, with or without header and units, once or with `-l` or `-lms`; exports of
//! W&B and nvitop; what scripts write.
//!
//! A file with a header can have any columns. Without one, a column is recognised by its values in the first rows, and a file in which
//! more than one column can be the memory in use is refused, unless the user names the columns.

use super::clock::{self, DateOrder, Stamp};
use super::columns::{Column, Columns, OF_PROCESSES, is_unknown, size};
use super::hints::Hints;
use super::polls::Polls;
use super::shape::{Shape, is_aside, split};
use super::survey::Survey;
use crate::import::each_line;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{Fault, LineFile};
use highwater_engine::recording::tape::Tape;
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::path::Path;

/// Reads such a file.
pub(crate) fn tape(path: &Path, file: &LineFile, hints: &Hints) -> Result<Tape, OpenError> {
    let survey = Survey::of(path, file, hints)?;
    let mut polls = Polls::new(hints);
    survey.assumed.iter().for_each(|what| polls.assume(what.as_str()));
    polls.group(survey.grouping);
    let mut reader = Reader::new(survey.shape, survey.dates, polls);
    let mut skipped = SkippedLines::default();
    each_line(path, file, &mut skipped, |line| reader.take(line))?;
    reader.polls.tape(path, if reader.shape.is_of_smi { "nvidia-smi CSV" } else { "table of GPU memory" }, skipped)
}

/// Reads rows whose columns are known.
pub(super) struct Reader {
    pub shape: Shape,
    pub dates: DateOrder,
    pub polls: Polls,
    /// The time of a poll whose rows have none.
    poll_at: Option<Stamp>,
}

impl Reader {
    pub fn new(shape: Shape, dates: DateOrder, polls: Polls) -> Self {
        Self { shape, dates, polls, poll_at: None }
    }

    fn take(&mut self, line: &str) -> Result<(), Fault> {
        if is_aside(line) {
            if let Some(at) = clock::parse(line, self.dates) {
                self.poll_at = Some(at);
                self.polls.begin_run();
            }
            return Ok(());
        }
        let fields = split(line, self.shape.separator);
        let mut fields: Vec<&str> = fields.iter().map(|field| &**field).collect();
        // A header comes first, and again wherever a second run was appended.
        if fields.iter().all(|field| field.starts_with(char::is_alphabetic) || field.starts_with('_'))
            && (fields.len() > 1 || self.shape.columns.columns.len() == 1)
            && let Some(columns) = Columns::of_header(&fields)
        {
            if columns.has_processes {
                return Err(Fault::File(FileProblem::malformed(OF_PROCESSES)));
            }
            if !self.shape.is_named && !columns.has_memory() {
                return Err(Fault::File(FileProblem::malformed("the query has no memory.used")));
            }
            if !self.shape.is_named && self.shape.header != columns.columns {
                self.shape.header.clone_from(&columns.columns);
                columns.assumed.iter().for_each(|what| self.polls.assume(what.as_str()));
                self.shape.columns = columns;
            }
            self.polls.begin_run();
            return Ok(());
        }
        if self.shape.has_more && fields.len() == self.shape.columns.columns.len() + 1 {
            self.polls.assume("its rows begin with a time that the header does not name");
            fields.remove(0);
        }
        let wanted = self.shape.columns.columns.len();
        if fields.len() != wanted {
            let problem = format!("it has {} columns instead of {wanted}", fields.len());
            return Err(Fault::Line(FileProblem::malformed(problem)));
        }
        self.take_row(&fields)
    }

    /// Takes the cells of a row.
    pub fn take_row(&mut self, fields: &[&str]) -> Result<(), Fault> {
        let at = self.shape.time(fields, self.dates).map_err(Fault::Line)?.or(self.poll_at);
        let columns = &self.shape.columns;
        if columns.position(|of| matches!(of, Column::UsedOf(..))).is_some() {
            return self.take_wide(at, fields);
        }
        let field = |wanted: fn(Column) -> bool| columns.position(wanted).and_then(|at| fields.get(at).copied());
        let bytes = |wanted: fn(Column) -> Option<u64>| match columns.size(wanted) {
            Some((at, unit)) => size(fields.get(at).copied().unwrap_or_default(), unit),
            None => Ok(None),
        };
        let total = bytes(|of| if let Column::Total(unit) = of { Some(unit) } else { None });
        let has_used = columns.position(|of| matches!(of, Column::Used(_))).is_some();
        let used = if has_used {
            bytes(|of| if let Column::Used(unit) = of { Some(unit) } else { None }).map_err(Fault::Line)?
        } else {
            let free = bytes(|of| if let Column::Free(unit) = of { Some(unit) } else { None }).map_err(Fault::Line)?;
            let total = total.clone().map_err(Fault::Line)?;
            self.polls.assume("memory.used is memory.total less memory.free");
            total.zip(free).and_then(|(total, free)| total.checked_sub(free))
        };
        let (uuid, bus) = (field(|of| of == Column::Uuid), field(|of| of == Column::Bus));
        let index = field(|of| of == Column::Index);
        let host = field(|of| of == Column::Host);
        let reserved = bytes(|of| if let Column::Reserved(unit) = of { Some(unit) } else { None });
        let known = |text: Option<&str>| text.filter(|text| !is_unknown(text)).map(str::to_owned);
        let name = field(|of| of == Column::Name);
        let own = [uuid, bus, index].into_iter().flatten().find(|text| !is_unknown(text));
        // GPUs of several nodes have the same numbers.
        let of_host = host.and_then(|host| Some(format!("{} ({host})", own?)));
        let shown = known(index).map(|index| number_in(&index));
        let shown = shown.map(|index| host.map_or(index.clone(), |host| format!("{index} ({host})")));
        self.polls.add(at, of_host.as_deref().or(own), used, || Device {
            index: shown.unwrap_or_default(),
            uuid: known(uuid).unwrap_or_default(),
            name: known(name),
            pci_bus_id: known(bus),
            memory_total_bytes: total.ok().flatten(),
            memory_reserved_bytes: reserved.ok().flatten(),
            ..Device::default()
        })
    }

    /// Takes a row with a column for each GPU.
    fn take_wide(&mut self, at: Option<Stamp>, fields: &[&str]) -> Result<(), Fault> {
        self.polls.begin_poll();
        let Self { shape, polls, .. } = self;
        for (at_column, column) in shape.columns.columns.iter().enumerate() {
            let Column::UsedOf(gpu, unit) = *column else { continue };
            let field = fields.get(at_column).copied().unwrap_or_default();
            // An export of several series has rows in which only some have a value.
            if field.is_empty() {
                continue;
            }
            let used = size(field, unit).map_err(Fault::Line)?;
            let total = || {
                let of = |of| matches!(of, Column::TotalOf(other, _) if other == gpu);
                let at = shape.columns.position(of)?;
                match shape.columns.columns[at] {
                    Column::TotalOf(_, unit) => size(fields.get(at)?, unit).ok().flatten(),
                    _ => None,
                }
            };
            let index = gpu.to_string();
            polls.add(at, Some(&index), used, || Device {
                index: index.clone(),
                memory_total_bytes: total(),
                ..Device::default()
            })?;
        }
        Ok(())
    }
}

/// The number of a GPU in `0`, `GPU 0` or `cuda:0`, else the text.
fn number_in(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let rest = ["gpu", "cuda", "device"].iter().find_map(|name| lower.strip_prefix(name)).unwrap_or(&lower);
    let number = rest.trim_start_matches([' ', ':', '#', '_', '-']);
    let is_number = !number.is_empty() && number.bytes().all(|one| one.is_ascii_digit());
    if is_number { number.to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::imported;
    use super::super::columns::MIB;
    use highwater_engine::recording::tape::Times;

    fn points(text: &str) -> Vec<Vec<(i64, Option<u64>)>> {
        let tape = imported("smi.csv", text).expect("a recording");
        tape.tracks
            .iter()
            .map(|track| track.points().map(|(at_ns, used)| (at_ns - tape.begin_ns, used)).collect())
            .collect()
    }

    #[test]
    fn a_query_of_memory_alone_has_readings_and_no_times() {
        let tape = imported("memory_GEMM.txt", "memory.used [MiB]\n3 MiB\n3 MiB\n5 MiB\n4 MiB\n").expect("a recording");
        assert_eq!(tape.format.times, Times::Readings);
        let read: Vec<_> = tape.tracks[0].points().collect();
        assert_eq!(read, [(0, Some(3 * MIB)), (2_000_000, Some(5 * MIB)), (3_000_000, Some(4 * MIB))]);
        for same in ["3 MiB\n3 MiB\n5 MiB\n4 MiB\n", "memory.used [MiB]\n3\n3\n5\n4\n", "3\n3\n5\n4\n"] {
            assert_eq!(points(same)[0], read, "{same}");
        }
    }

    #[test]
    fn a_lone_number_is_taken_for_memory_with_a_word() {
        for text in ["3\n5\n", "3 MiB\n5 MiB\n", "2024/03/10 10:00:00.123, 45\n2024/03/10 10:00:01.123, 46\n"] {
            let assumed = imported("smi.csv", text).expect("a log").assumed;
            let [only] = &assumed[..] else { panic!("{text}: {assumed:?}") };
            assert!(only.contains("is memory.used") && only.contains("nothing in the file says what it is"), "{only}");
        }
        let named = imported("smi.csv", "memory.used [MiB]\n3 MiB\n5 MiB\n").expect("a log");
        assert_eq!(named.assumed, Vec::<String>::new());
    }

    #[test]
    fn gpus_are_distinguished_and_described() {
        let text = "timestamp, index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]\n\
                    2026/02/28 23:59:59.900, 3, GPU-a, NVIDIA H200, 10 MiB, 143771 MiB, 5 %\n\
                    2026/02/28 23:59:59.901, 5, GPU-b, NVIDIA H200, 20 MiB, 143771 MiB, [N/A]\n\
                    2026/03/01 00:00:00.000, 3, GPU-a, NVIDIA H200, [N/A], 143771 MiB, 5 %\n\
                    2026/03/01 00:00:00.001, 5, GPU-b, NVIDIA H200, 25 MiB, 143771 MiB, 5 %\n\
                    2026/03/01 00:00:00.1, 3, GPU-a, NVIDIA H200, 12 M";
        let tape = imported("smi.csv", text).expect("a recording");
        let shown: Vec<_> = tape.devices.iter().map(|device| (device.index.as_str(), device.uuid.as_str())).collect();
        assert_eq!(shown, [("3", "GPU-a"), ("5", "GPU-b")]);
        assert_eq!(tape.devices[0].memory_total_bytes, Some(143_771 * MIB));
        assert_eq!(tape.devices[0].name.as_deref(), Some("NVIDIA H200"));
        assert_eq!(
            points(text),
            [
                vec![(0, Some(10 * MIB)), (100_000_000, None)],
                vec![(1_000_000, Some(20 * MIB)), (101_000_000, Some(25 * MIB))],
            ]
        );
        assert_eq!((tape.skipped.count, tape.format.times), (1, Times::Relative));
    }

    #[test]
    fn gpus_are_distinguished_without_a_header() {
        for (first, second) in [("0", "3"), ("GPU-a", "GPU-b"), ("00000000:3B:00.0", "00000000:5E:00.0")] {
            let text = format!("{first}, 10 MiB\n{second}, 20 MiB\n{first}, 11 MiB\n{second}, 20 MiB\n");
            assert_eq!(
                points(&text),
                [
                    vec![(0, Some(10 * MIB)), (1_000_000, Some(11 * MIB))],
                    vec![(0, Some(20 * MIB)), (1_000_000, Some(20 * MIB))],
                ],
                "{first}"
            );
        }
    }

    #[test]
    fn an_appended_run_has_a_period_of_its_own() {
        let mut text = String::new();
        for (begin, period) in [(0, 10), (20_000, 1_000)] {
            text += "timestamp, encoder.stats.sessionCount, memory.used [MiB]\n";
            for nth in 0..30 {
                let at = begin + nth * period;
                text += &format!("2026/01/01 00:00:{:02}.{:03}, 0, {} MiB\n", at / 1000, at % 1000, 5 + begin);
            }
        }
        let gaps: Vec<_> = points(&text)[0].iter().filter(|(_, used)| used.is_none()).copied().collect();
        assert_eq!(gaps, [(290_000_001, None)], "between the runs only");
    }

    #[test]
    fn what_cannot_be_known_is_refused_with_what_to_query() {
        let refused = |text: &str| imported("smi.csv", text).expect_err(text).message;
        for (text, problem) in [
            ("10 MiB, 143771 MiB\n", "can be memory.used: record it with a header"),
            ("0, 7, 10 MiB\n", "can be the GPU's index: record it with a header"),
            ("[N/A], 143771 MiB\n", "its first line has no value in a column"),
            ("memory.total [MiB]\n3 MiB\n", "the query has no memory.used"),
            (
                "timestamp, memory.used [MiB]\n2026/01/01 00:00:00.5, 1 MiB\n2026/01/01 00:00:00.5, 2 MiB\n",
                "query index or uuid too",
            ),
            ("memory.used [MiB]\nx\n", "it has no memory of any GPU; "),
        ] {
            assert!(refused(text).contains(problem), "{text}: {}", refused(text));
        }
    }

    /// Changes of the first GPU's memory: seconds since the begin and MiB.
    fn seconds(text: &str) -> (Vec<(f64, Option<u64>)>, Vec<String>) {
        let tape = imported("gpu_usage.csv", text).expect("a log");
        assert_eq!(tape.skipped.count, 0, "{:?}", tape.skipped.first);
        let points = points(text).remove(0);
        (points.into_iter().map(|(at, used)| (at as f64 / 1e9, used.map(|used| used / MIB))).collect(), tape.assumed)
    }

    #[test]
    fn a_header_for_each_reading_makes_no_gap() {
        let mut text = String::new();
        for (second, used) in [(56, 841), (57, 869), (58, 865), (59, 865)] {
            text += "timestamp, index, memory.used [MiB], memory.total [MiB]\n";
            text += &format!("2023/06/22 18:56:{second}.252, 0, {used} MiB, 8192 MiB\n");
            text += &format!("2023/06/22 18:56:{second}.255, 1, 7 MiB, 8192 MiB\n");
        }
        let (read, assumed) = seconds(&text);
        assert_eq!(read, [(0.0, Some(841)), (1.0, Some(869)), (2.0, Some(865)), (3.0, Some(865))]);
        assert_eq!(assumed, Vec::<String>::new());
    }

    #[test]
    fn a_clock_that_goes_back_hides_nothing() {
        let row = |time: &str, used: u32| format!("2026/10/25 {time}, 0, {used} MiB\n");
        // The end of summer time: 02:59:59 is followed by 02:00:00.
        let text = "timestamp, index, memory.used [MiB]\n".to_owned()
            + &row("02:59:58.000", 1_500)
            + &row("02:59:59.000", 1_400)
            + &row("02:00:00.000", 5_000)
            + &row("02:00:01.000", 1_000);
        let (read, assumed) = seconds(&text);
        let highest = read.iter().filter_map(|(at, used)| Some(((*used)?, *at))).max_by_key(|(used, _)| *used);
        assert_eq!(highest, Some((5_000, 2.0)), "{read:?}");
        assert_eq!(read.last(), Some(&(3.0, Some(1_000))));
        assert!(assumed[0].contains("goes back once"), "{assumed:?}");
        // Another run before that, with a header between.
        let text = "timestamp, index, memory.used [MiB]\n2026/01/01 00:00:10.000, 0, 1000 MiB\n\
                    2026/01/01 00:00:11.000, 0, 1000 MiB\ntimestamp, index, memory.used [MiB]\n\
                    2025/01/01 00:00:10.000, 0, 9000 MiB\n2025/01/01 00:00:11.000, 0, 8000 MiB\n";
        let (read, _) = seconds(text);
        assert!(read.contains(&(2.0, Some(9_000))) && read.iter().any(|(_, used)| used.is_none()), "{read:?}");
    }

    #[test]
    fn several_readings_in_a_second_of_a_clock_are_no_gaps() {
        let mut text = "timestamp, memory.used [MiB]\n".to_owned();
        for nth in 0..20 {
            text += &format!("2026-01-01 00:00:{:02}, {} MiB\n", nth / 5, 100 + nth);
        }
        // Rows of one time look like those of several GPUs; a header says one.
        let text = text.replace("timestamp, memory", "timestamp, index, memory").replace(", 1", ", 0, 1");
        let (read, _) = seconds(&text);
        assert!(read.iter().all(|(_, used)| used.is_some()), "{read:?}");
        assert_eq!(read.last(), Some(&(3.0, Some(119))));
    }

    #[test]
    fn rows_of_a_poll_are_of_its_gpus_in_their_order() {
        let mut text = "timestamp, memory.used [MiB]\n".to_owned();
        for poll in 0..9 {
            text += &format!("2026/01/01 00:00:0{poll}.000, {} MiB\n", 100 + poll);
            text += &format!("2026/01/01 00:00:0{poll}.00{}, 20 MiB\n", 2 + poll % 3);
        }
        let both = points(&text);
        assert_eq!((both.len(), both[0].len(), both[1].len()), (2, 9, 2), "{both:?}");
        let tape = imported("smi.csv", &text).expect("a log");
        assert!(tape.assumed[0].contains("of GPUs in the same order"), "{:?}", tape.assumed);
        // A script's clock before the rows of each poll.
        let text = "Wed Feb 26 01:50:18 PM EST 2025\n0 %, 7042 MiB, 46068 MiB\n5 %, 4 MiB, 46068 MiB\n\
                    Wed Feb 26 01:50:20 PM EST 2025\n0 %, 7000 MiB, 46068 MiB\n5 %, 9 MiB, 46068 MiB\n";
        assert_eq!(points(text)[1], [(0, Some(4 * MIB)), (2_000_000_000, Some(9 * MIB))]);
    }

    #[test]
    fn logs_of_scripts_are_read_by_the_names_of_their_columns() {
        let unix = "timestamp,gpu_utilization,memory_used,memory_total\n1746556382.8348258,0, 0, 15360\n\
                    1746556383.3749516,0, 326, 15360\n";
        let tape = imported("gpu_usage.csv", unix).expect("a log");
        assert_eq!((tape.format.times, tape.begin_ns), (Times::Unix, 1_746_556_382_834_825_800));
        assert_eq!(tape.devices[0].memory_total_bytes, Some(15_360 * MIB));
        assert_eq!(tape.assumed, ["memory_used is taken to be in MiB", "memory_total is taken to be in MiB"]);
        let iso = "timestamp,gpu,index,memory.used,memory.total\n2025-09-08T17:26:50+08:00,0, 0, 4, 81559\n\
                   2025-09-08T17:26:50+08:00,1, 0, 5, 81559\n";
        let tape = imported("nvidia_smi.csv", iso).expect("a log");
        assert_eq!((tape.begin_ns, tape.tracks.len()), (1_757_323_610_000_000_000, 2));
        assert_eq!(tape.devices[1].index, "1");
        let preamble = "=== monitor ===\ninterval: 1 s\n\ntime,memory_used_mb\n2025-12-10 03:09:34,604\n";
        let tape = imported("gpu_monitor.log", preamble).expect("a log");
        assert_eq!((tape.tracks.len(), tape.skipped.count), (1, 2));
        let more = "time,gpu_index,mem_used_mb\n2026-05-06 10:06:45,2026/05/06 10:06:45.521, 0, 410\n";
        assert_eq!(
            imported("log.csv", more).expect("a log").tracks[0].points().next().map(|(_, used)| used),
            Some(Some(410 * MIB))
        );
        let free = "time,free_memory_mb,total_memory_mb\n2026-05-06 10:06:45,1000,8000\n2026-05-06 10:06:46,900,8000\n";
        assert_eq!(points(free)[0], [(0, Some(7_000 * MIB)), (1_000_000_000, Some(7_100 * MIB))]);
        let quoted = "\"Step\",\"a, b - system/gpu.0.memoryAllocatedBytes\",\"a, b - _timestamp\"\n\"1\",\"77\",\"1746556382\"\n";
        assert_eq!(points(quoted)[0], [(0, Some(77))]);
    }

    #[test]
    fn day_and_month_are_as_the_file_shows_them() {
        let log = |first: &str, second: &str| {
            format!("timestamp, memory.used [MiB]\n{first} 23:59:59, 1 MiB\n{second} 00:00:59, 2 MiB\n")
        };
        let (read, assumed) = seconds(&log("03-11-2026", "03-12-2026"));
        assert_eq!((read[1].0, assumed.len()), (60.0, 1), "from March 11th to 12th");
        assert!(assumed[0].contains("month, day, year"));
        let (read, assumed) = seconds(&log("30-11-2026", "01-12-2026"));
        assert_eq!((read[1].0, assumed.len()), (60.0, 0));
    }

    #[test]
    fn sizes_without_names_are_told_apart_by_their_sums_and_that_is_listed() {
        let used = |text: &str| {
            let tape = imported("gpu_log.csv", text).expect("a log");
            let used: Vec<_> = tape.tracks[0].points().filter_map(|(_, used)| Some(used? / MIB)).collect();
            assert_eq!(tape.assumed.len(), 1, "{:?}", tape.assumed);
            used
        };
        let at = |second: u32| format!("2026/04/25 16:06:0{second}.780");
        let rows =
            |rows: [&str; 2]| format!("{}, {}, 27, 11.64 W\n{}, {}, 27, 11.64 W\n", at(1), rows[0], at(2), rows[1]);
        assert_eq!(used(&rows(["2 MiB, 20146 MiB", "20142 MiB, 6 MiB"])), [2, 20_142]);
        assert_eq!(used(&rows(["2 MiB, 20480 MiB", "9000 MiB, 20480 MiB"])), [2, 9_000]);
        assert_eq!(used(&rows(["32510 MiB, 0 MiB, 32510 MiB", "32510 MiB, 424 MiB, 32086 MiB"])), [0, 424]);
        assert_eq!(used("2024/03/10 10:00:00.123, 45\n2024/03/10 10:00:01.123, 47\n"), [45, 47]);
        let ambiguous = rows(["2 MiB, 20146 MiB", "20142 MiB, 15000 MiB"]);
        assert!(imported("gpu_log.csv", &ambiguous).expect_err("two").message.contains("--columns"));
    }

    /// The peak of each GPU by its index, MiB, and what was guessed.
    fn peaks(name: &str, text: &str) -> (Vec<(String, u64)>, Vec<String>) {
        let tape = imported(name, text).expect("a log");
        let peak =
            |track: &highwater_engine::recording::track::Track| track.points().filter_map(|(_, used)| used).max();
        let peaks = tape
            .devices
            .iter()
            .zip(&tape.tracks)
            .map(|(gpu, track)| (gpu.index.clone(), peak(track).unwrap_or(0) / MIB));
        (peaks.collect(), tape.assumed)
    }

    #[test]
    fn memory_of_the_host_and_of_other_gpus_is_told_apart_by_names() {
        let row = |index: &str, mib: u64| (index.to_owned(), mib);
        let host = "timestamp,cpu_percent,memory_used_mb,gpu_memory_used_mb\n2026-01-01 00:00:00,5,30000,100\n\
                    2026-01-01 00:00:01,5,30001,20000\n";
        assert_eq!(peaks("host.csv", host), (vec![row("0", 20_000)], vec![]));
        let suffix =
            "timestamp,gpu_memory_used_0,gpu_memory_used_1\n2026-01-01 00:00:00,10,7000\n2026-01-01 00:00:01,20,8000\n";
        assert_eq!(peaks("suffix.csv", suffix).0, [row("0", 20), row("1", 8_000)]);
        let runs = "\"Step\",\"run-a - system/gpu.0.memoryAllocatedBytes\",\"run-b - system/gpu.0.memoryAllocatedBytes\"\n1,1048576,70000000000\n";
        let (found, assumed) = peaks("wandb.csv", runs);
        assert_eq!((found, assumed.len()), (vec![row("0", 1)], 1), "the other run is listed as not read");
        assert!(assumed[0].starts_with("run-b"), "{assumed:?}");
        let nodes = "hostname,timestamp,index,memory.used [MiB]\nn1,2026/01/01 00:00:00.000,0,100 MiB\nn2,2026/01/01 00:00:00.010,0,50000 MiB\n";
        assert_eq!(peaks("nodes.csv", nodes).0, [row("0 (n1)", 100), row("0 (n2)", 50_000)]);
        let unknown = "index, uuid, memory.used [MiB]\n0, [N/A], 10 MiB\n1, [N/A], 5000 MiB\n";
        assert_eq!(peaks("nouuid.csv", unknown).0, [row("0", 10), row("1", 5_000)]);
    }

    #[test]
    fn utilization_row_numbers_and_durations_are_no_gpus_and_no_clock() {
        let utilization = "timestamp,cpu,gpu,vram_mb\n2026-01-01 00:00:00,5,0,100\n2026-01-01 00:00:01,5,97,2100\n2026-01-01 00:00:02,5,98,2000\n";
        let (found, assumed) = peaks("util.csv", utilization);
        assert_eq!((found.len(), assumed), (1, vec!["column 3 is not the GPU's index".to_owned()]));
        let rows = "index,timestamp,gpu,memory_used_mb\n0,2026-01-01 00:00:00,0,10\n1,2026-01-01 00:00:00,1,200\n2,2026-01-01 00:00:01,0,11\n3,2026-01-01 00:00:01,1,210\n";
        assert_eq!(peaks("rowindex.csv", rows).0, [("0".to_owned(), 11), ("1".to_owned(), 210)]);
        let named =
            "timestamp,device,memory_used_mb\n2026-01-01 00:00:00,NVIDIA A100,10\n2026-01-01 00:00:01,NVIDIA A100,11\n";
        assert_eq!(peaks("devname.csv", named).0, [("NVIDIA A100".to_owned(), 11)]);
        let steps = "step,step_time,gpu_mem_used_mb\n1,0.31,10\n2,0.30,20\n3,0.32,30\n4,0.29,40\n";
        let tape = imported("steptime.csv", steps).expect("a log");
        assert_eq!((tape.tracks.len(), tape.format.times), (1, Times::Readings));
        let allocated = "timestamp,memory_allocated_mb\n2026-01-01 00:00:00,5\n2026-01-01 00:00:01,6\n";
        assert!(peaks("allocated.csv", allocated).1[0].ends_with("may be an allocator's"));
        let train = "loss,memory_used_mb,time\n3,10,12.1\n2,20,11.9\n1,30,12.0\n1,30,11.0\n";
        let tape = imported("train.csv", train).expect("a log");
        assert_eq!(tape.format.times, Times::Readings, "{:?}", tape.assumed);
    }

    #[test]
    fn sentences_are_no_headers_and_processes_no_gpus() {
        let warned = "timestamp, index, memory.used [MiB]\n2026/01/01 00:00:00.000, 0, 100 MiB\nWARNING GPU memory usage is high\n\
                      2026/01/01 00:00:01.000, 0, 20000 MiB\n";
        let tape = imported("warn.csv", warned).expect("a log");
        assert_eq!((tape.skipped.count, tape.tracks[0].used_at(tape.end_ns)), (1, Some(20_000 * MIB)));
        let preamble = "GPU memory usage log\n====\ntimestamp;index;memory_used_mb\n2026-01-01 00:00:00;0;5\n2026-01-01 00:00:00;1;6\n";
        assert_eq!(peaks("preamble.csv", preamble).0, [("0".to_owned(), 5), ("1".to_owned(), 6)]);
        let apps = "timestamp, gpu_bus_id, pid, used_gpu_memory [MiB]\n2026/01/01 00:00:00.000, 00000000:01:00.0, 10, 100 MiB\n";
        assert!(imported("apps.csv", apps).expect_err("processes").message.contains("rows are of processes"));
    }

    #[test]
    fn times_beyond_all_bounds_end_in_one_line() {
        let mut days = "time,gpu,memory_used_mb\n".to_owned();
        (0..120_000).for_each(|_| days += "23:00:00,0,5\n01:00:00,0,5\n");
        assert!(imported("days.csv", &days).expect_err("328 years").message.contains("31 days"));
        let mut over = "timestamp,memory_used_mb\n".to_owned();
        for second in (1_700_000_000..1_700_000_010_u64).chain([9_200_000_000, 1_000_000_000, 9_200_000_000]) {
            over += &format!("{second},1\n{second},2\n");
        }
        assert!(imported("over.csv", &over).is_err());
    }
}
