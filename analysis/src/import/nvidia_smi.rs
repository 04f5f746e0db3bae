//! CSV of `nvidia-smi --query-gpu=… --format=csv`, with or without header and units, once or with `-l` or `-lms`.
//!
//! A file with a header can have any columns. Without one, a column is recognised by its values, and a file in which
//! more than one column can be `memory.used` is refused.

use super::readings::Readings;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
pub use highwater_engine::recording::lines::{Fault, LineFile};
pub use highwater_engine::recording::tape::{Format, READING_NS, Tape, Times};
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::collections::BTreeMap;
use std::path::Path;

const MIB: u64 = 1 << 20;

const TIMED: Format = Format {
    name: "nvidia-smi CSV",
    times: Times::Relative,
    missing: &["the time zone", "readings between its own", "steps and phases"],
};
const UNTIMED: Format = Format {
    name: "nvidia-smi CSV",
    times: Times::Readings,
    missing: &["times (query timestamp too)", "readings between its own", "steps and phases"],
};

/// Of a file in which nothing distinguishes GPUs.
const ANONYMOUS: &[&str] =
    &["which GPU a row is of (query index too)", "times or their zone", "readings between its own", "steps and phases"];

/// What a column is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Column {
    Time,
    Index,
    Uuid,
    Bus,
    Name,
    Used,
    Total,
    Reserved,
    Other,
}

/// The columns of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Columns(Vec<Column>);

/// Whether a line can be the first of such a file.
pub(crate) fn is_first_line(line: &str) -> bool {
    let has_size = || line.split(',').any(|field| by_value(field.trim()) == Column::Used);
    Columns::named(line).is_some() || has_size() || Columns::guessed(line).is_ok()
}

pub(crate) fn tape(path: &Path, file: &LineFile) -> Result<Tape, OpenError> {
    let (mut reader, mut skipped) = (Reader::default(), SkippedLines::default());
    super::each_line(path, file, &mut skipped, |line| reader.take(line))?;
    let format = if reader.has(Column::Time) { TIMED } else { UNTIMED };
    let format = if reader.is_anonymous { Format { missing: ANONYMOUS, ..format } } else { format };
    reader.readings.tape(path, format, skipped)
}

#[derive(Default)]
struct Reader {
    columns: Option<Columns>,
    readings: Readings,
    /// GPUs by what distinguishes them.
    gpus: BTreeMap<String, u32>,
    /// How many readings each has had.
    counts: BTreeMap<u32, i64>,
    last_ns: Option<i64>,
    /// Whether rows name no GPU.
    is_anonymous: bool,
}

impl Reader {
    fn has(&self, column: Column) -> bool {
        self.columns.as_ref().is_some_and(|columns| columns.has(column))
    }

    fn take(&mut self, line: &str) -> Result<(), Fault> {
        // A header comes first, and again wherever a second run was appended.
        if let Some(named) = Columns::named(line) {
            if !named.has(Column::Used) {
                return Err(Fault::File(FileProblem::malformed("the query has no memory.used")));
            }
            self.columns = Some(named);
            self.readings.begin_anew();
            return Ok(());
        }
        let columns = match &self.columns {
            Some(columns) => columns.clone(),
            None => match Columns::guessed(line) {
                Ok(columns) => self.columns.insert(columns).clone(),
                Err(problem) => return Err(Fault::File(problem)),
            },
        };
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        if fields.len() != columns.0.len() {
            let problem = format!("it has {} columns instead of {}", fields.len(), columns.0.len());
            return Err(Fault::Line(FileProblem::malformed(problem)));
        }
        let field = |column: Column| columns.0.iter().position(|of| *of == column).map(|at| fields[at]);
        let used = mebibytes(field(Column::Used).unwrap_or_default()).map_err(Fault::Line)?;
        let at_ns = field(Column::Time).map(local_ns).transpose().map_err(Fault::Line)?;
        let name = [Column::Uuid, Column::Bus, Column::Index].into_iter().find_map(field);
        if name.is_none() && at_ns.is_some() && at_ns == self.last_ns {
            let problem = "it has several GPUs and no column that distinguishes them: query index or uuid too";
            return Err(Fault::File(FileProblem::malformed(problem)));
        }
        (self.last_ns, self.is_anonymous) = (at_ns, name.is_none());
        let next = u32::try_from(self.gpus.len()).unwrap_or(u32::MAX);
        let gpu = *self.gpus.entry(name.unwrap_or_default().to_owned()).or_insert(next);
        let count = self.counts.entry(gpu).or_insert(0);
        let at_ns = at_ns.unwrap_or(*count * READING_NS);
        *count += 1;
        let size = |column| field(column).and_then(|text| mebibytes(text).ok().flatten());
        let known = |column| field(column).filter(|text| !is_unknown(text)).map(str::to_owned);
        self.readings.push(gpu, at_ns, used, || Device {
            index: known(Column::Index).unwrap_or_else(|| gpu.to_string()),
            uuid: known(Column::Uuid).unwrap_or_default(),
            name: known(Column::Name),
            pci_bus_id: known(Column::Bus),
            memory_total_bytes: size(Column::Total),
            memory_reserved_bytes: size(Column::Reserved),
            ..Device::default()
        })
    }
}

impl Columns {
    fn has(&self, column: Column) -> bool {
        self.0.contains(&column)
    }

    /// The columns of a header; `None` if a line is none.
    fn named(line: &str) -> Option<Self> {
        let of = |name: &str| {
            let name = name.split('[').next().unwrap_or_default().trim();
            Some(match name {
                "timestamp" => Column::Time,
                "index" => Column::Index,
                "uuid" | "gpu_uuid" => Column::Uuid,
                "pci.bus_id" | "gpu_bus_id" => Column::Bus,
                "name" | "gpu_name" => Column::Name,
                "memory.used" => Column::Used,
                "memory.total" => Column::Total,
                "memory.reserved" => Column::Reserved,
                _ => return None,
            })
        };
        let names: Vec<&str> = line.split(',').map(str::trim).collect();
        let is_name = |name: &&str| {
            let plain = name.split('[').next().unwrap_or_default().trim();
            plain.starts_with(|first: char| first.is_ascii_lowercase())
                && plain.chars().all(|one| one.is_ascii_alphanumeric() || "._".contains(one))
        };
        let has_known = names.iter().any(|name| of(name).is_some());
        (has_known && names.iter().all(is_name))
            .then(|| Self(names.iter().map(|name| of(name).unwrap_or(Column::Other)).collect()))
    }

    /// The columns of a file without a header, from its first line.
    fn guessed(line: &str) -> Result<Self, FileProblem> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let mut columns: Vec<Column> = fields.iter().map(|field| by_value(field)).collect();
        let count = |columns: &[Column], wanted| columns.iter().filter(|of| **of == wanted).count();
        let is_plain = |at: usize| columns[at] == Column::Other && fields[at].parse::<u64>().is_ok();
        let plain: Vec<usize> = (0..fields.len()).filter(|at| is_plain(*at)).collect();
        let again = "record it with a header (without noheader)";
        if fields.iter().any(|field| is_unknown(field)) {
            let problem = format!("its first line has no value in a column, so what that is cannot be known: {again}");
            return Err(FileProblem::malformed(problem));
        }
        let ambiguous = |what: &str| FileProblem::malformed(format!("several of its columns can be {what}: {again}"));
        match (count(&columns, Column::Used), plain.len()) {
            // Without units, a column of plain numbers is memory if it is the only one; beside memory, it is the index.
            (0, 1) => columns[plain[0]] = Column::Used,
            (1, 1) => columns[plain[0]] = Column::Index,
            (1, 0) => {}
            (0, 0) => return Err(FileProblem::malformed("it has no column that can be memory.used")),
            (1, _) => return Err(ambiguous("the GPU's index")),
            _ => return Err(ambiguous("memory.used")),
        }
        Ok(Self(columns))
    }
}

fn by_value(field: &str) -> Column {
    if local_ns(field).is_ok() {
        Column::Time
    } else if field.starts_with("GPU-") || field.starts_with("MIG-") {
        Column::Uuid
    } else if field.split(':').count() == 3 && field.bytes().all(|one| one.is_ascii_hexdigit() || b":.".contains(&one))
    {
        Column::Bus
    } else if field.strip_suffix("MiB").is_some_and(|number| number.trim().parse::<u64>().is_ok()) {
        Column::Used
    } else {
        Column::Other
    }
}

/// A cell for which the driver had no value: `[N/A]`, `[Not Supported]`, `[Unknown Error]`, `N/A`.
fn is_unknown(field: &str) -> bool {
    field == "N/A" || field.starts_with('[') && field.ends_with(']')
}

/// A size in bytes; `None` if the driver had none.
fn mebibytes(field: &str) -> Result<Option<u64>, FileProblem> {
    if is_unknown(field) {
        return Ok(None);
    }
    let number = field.strip_suffix("MiB").unwrap_or(field).trim();
    let mebibytes: Option<u64> = number.parse().ok();
    let bytes = mebibytes.and_then(|mebibytes| mebibytes.checked_mul(MIB));
    bytes.map(Some).ok_or_else(|| FileProblem::not_a("size in MiB", field))
}

/// Parses `2026/11/21 10:15:30.123` as nanoseconds since 1970 in local time. The file does not name its time zone.
fn local_ns(field: &str) -> Result<i64, FileProblem> {
    let wrong = || FileProblem::not_a("timestamp", field);
    let (date, time) = field.split_once(' ').ok_or_else(wrong)?;
    let numbers = |text: &str, separator: char| -> Option<Vec<i64>> {
        let parts: Option<Vec<i64>> =
            text.split(separator).map(|part| part.parse().ok().filter(|part| *part >= 0)).collect();
        parts.filter(|parts| parts.len() == 3)
    };
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let date = numbers(date, '/').ok_or_else(wrong)?;
    let clock = numbers(clock, ':').ok_or_else(wrong)?;
    let is_real = (1970..=2200).contains(&date[0])
        && (1..=12).contains(&date[1])
        && (1..=31).contains(&date[2])
        && clock[0] < 24
        && clock[1] < 60
        && clock[2] <= 60;
    if !is_real || fraction.is_empty() || fraction.len() > 9 || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(wrong());
    }
    let nanoseconds: i64 = format!("{fraction:0<9}").parse().map_err(|_| wrong())?;
    let seconds = days(date[0], date[1], date[2]) * 86_400 + clock[0] * 3_600 + clock[1] * 60 + clock[2];
    Ok(seconds * 1_000_000_000 + nanoseconds)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::super::tests::imported;
    use super::*;

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
            ("0, 17, 10 MiB\n", "can be the GPU's index: record it with a header"),
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

    #[test]
    fn timestamps_are_dates_of_the_calendar() {
        let seconds = |text| local_ns(text).map(|ns| ns / 1_000_000_000);
        assert_eq!(seconds("1970/01/01 00:00:00.000"), Ok(0));
        assert_eq!(seconds("2000/03/01 12:00:00.25"), Ok(951_912_000));
        assert_eq!(seconds("2026/11/23 03:36:14.001"), Ok(1_795_404_974));
        for wrong in [
            "2026/13/01 00:00:00.0",
            "2026/01/01 24:00:00.0",
            "2300/01/01 00:00:00.0",
            "2026/01/01",
            "2026/1/1 0:0:-1",
            "x y",
            "2026/01/01 00:00:00.x",
        ] {
            assert!(local_ns(wrong).is_err(), "{wrong}");
        }
    }
}
