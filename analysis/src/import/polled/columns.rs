//! What the columns of a log are, by their names, and what is in their cells.

use highwater_engine::recording::{FileProblem, short};
use std::collections::BTreeMap;

pub(super) const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;

/// The highest number of a GPU in a column's name.
const MOST_NUMBER: u32 = 255;
/// How sure a name is that says nothing of statistics.
const SURE: u8 = 4;
const GPU_WORDS: [&str; 7] = ["gpu", "gpus", "cuda", "device", "vram", "fb", "nvidia"];
/// The longest name that is shown of a column, characters.
const LONGEST_SHOWN: usize = 100;

/// Why a table of processes is refused.
pub(super) const OF_PROCESSES: &str =
    "its rows are of processes, and not of GPUs: record --query-gpu=timestamp,index,memory.used";

/// What a column is. Sizes have the bytes of their unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    /// A text of a clock, Unix time, or time since a begin; the nanoseconds of a number's unit, if the name says it.
    Time(Option<i64>),
    /// The day, if the time of day is in another column.
    Date,
    Index,
    /// The node, where a log has several.
    Host,
    Uuid,
    Bus,
    Name,
    Used(u64),
    Free(u64),
    Total(u64),
    Reserved(u64),
    /// The memory in use of the GPU with this number: a column for each GPU.
    UsedOf(u32, u64),
    TotalOf(u32, u64),
    Other,
}

/// The columns of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Columns {
    pub columns: Vec<Column>,
    /// What was guessed of them, for people.
    pub assumed: Vec<String>,
    /// Whether one has a name that only nvidia-smi uses.
    pub is_of_smi: bool,
    /// Whether rows are of processes.
    pub has_processes: bool,
}

impl Columns {
    /// The columns with these names.
    pub fn of_names<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let mut found = Self::default();
        // The position of the column for each thing, and how sure its name is.
        let mut known: BTreeMap<(u8, u32), (usize, u8)> = BTreeMap::new();
        for name in names {
            let Named { column, assumed, rank, is_of_smi } = Named::of(name);
            found.is_of_smi |= is_of_smi;
            found.has_processes |= name.trim() == "pid";
            let key = key_of(column);
            let column = match key.and_then(|key| known.get(&key)) {
                Some((before, before_rank)) if rank > *before_rank => {
                    found.columns[*before] = Column::Other;
                    column
                }
                Some(_) if matches!(column, Column::Used(_) | Column::UsedOf(..)) && rank >= SURE => {
                    found.assumed.push(format!(
                        "{} is not read: another column is taken for memory.used",
                        short(name, LONGEST_SHOWN)
                    ));
                    Column::Other
                }
                Some(_) => Column::Other,
                None => column,
            };
            if column != Column::Other {
                found.assumed.extend(assumed);
                key.map(|key| known.insert(key, (found.columns.len(), rank)));
            }
            found.columns.push(column);
        }
        found
    }

    /// Columns that were recognised by their values.
    pub fn of_values(columns: Vec<Column>, assumed: Vec<String>) -> Self {
        Self { columns, assumed, ..Self::default() }
    }

    /// The columns of a header; `None` if a line is none.
    pub fn of_header(fields: &[&str]) -> Option<Self> {
        let is_name = |field: &&str| {
            // The command that prints such a table has `--query-gpu=`.
            let is_command = field.contains("--") || field.contains('=');
            let is_text = field.chars().any(char::is_alphabetic) && !is_unknown(field) && size(field, 1).is_err();
            is_text && !is_command && field.len() < 256
        };
        let found = Self::of_names(fields.iter().copied());
        (fields.iter().all(is_name) && (found.is_of_smi || found.has_memory())).then_some(found)
    }

    pub fn position(&self, wanted: impl Fn(Column) -> bool) -> Option<usize> {
        self.columns.iter().position(|of| wanted(*of))
    }

    /// The position of a column and the bytes of its unit.
    pub fn size(&self, wanted: impl Fn(Column) -> Option<u64>) -> Option<(usize, u64)> {
        self.columns.iter().enumerate().find_map(|(at, of)| Some((at, wanted(*of)?)))
    }

    /// Whether the memory in use follows from them.
    pub fn has_memory(&self) -> bool {
        let has = |wanted: fn(Column) -> bool| self.position(wanted).is_some();
        has(|of| matches!(of, Column::Used(_) | Column::UsedOf(..)))
            || has(|of| matches!(of, Column::Free(_))) && has(|of| matches!(of, Column::Total(_)))
    }

    /// Whether they say which GPU a row is of.
    pub fn names_gpus(&self) -> bool {
        self.position(|of| matches!(of, Column::Index | Column::Uuid | Column::Bus | Column::UsedOf(..))).is_some()
    }
}

/// What a second column cannot be too. Second times and numbers of GPUs are chosen by their values.
fn key_of(column: Column) -> Option<(u8, u32)> {
    Some(match column {
        Column::Date => (0, 0),
        Column::Uuid => (1, 0),
        Column::Bus => (2, 0),
        Column::Name => (3, 0),
        Column::Used(_) => (4, 0),
        Column::Free(_) => (5, 0),
        Column::Total(_) => (6, 0),
        Column::Reserved(_) => (7, 0),
        Column::UsedOf(gpu, _) => (8, gpu),
        Column::TotalOf(gpu, _) => (9, gpu),
        Column::Host => (10, 0),
        Column::Time(_) | Column::Index | Column::Other => return None,
    })
}

/// What a name says.
struct Named {
    column: Column,
    assumed: Option<String>,
    /// The surer of two columns for the same has the higher.
    rank: u8,
    is_of_smi: bool,
}

impl Named {
    fn of(name: &str) -> Self {
        let plain = name.split('[').next().unwrap_or_default().trim();
        let of_smi = match plain {
            "timestamp" => Some(Column::Time(None)),
            "index" => Some(Column::Index),
            "uuid" | "gpu_uuid" => Some(Column::Uuid),
            "pci.bus_id" | "gpu_bus_id" => Some(Column::Bus),
            "name" | "gpu_name" => Some(Column::Name),
            "memory.used" => Some(Column::Used(MIB)),
            "memory.free" => Some(Column::Free(MIB)),
            "memory.total" => Some(Column::Total(MIB)),
            "memory.reserved" => Some(Column::Reserved(MIB)),
            _ => None,
        };
        if let Some(column) = of_smi {
            return Self { column, assumed: None, rank: 9, is_of_smi: plain.contains('.') };
        }
        // Of statistics of an interval, the highest value is the one that counts.
        let (of, rank) = match name.rsplit_once('/').filter(|(of, _)| of.contains("memory")) {
            Some((of, "max")) => (of, 3),
            Some((of, "mean" | "last" | "avg")) => (of, 2),
            Some((of, "min")) => (of, 1),
            _ => (name, SURE),
        };
        let words = words(of);
        // Beside memory of GPUs, memory without that word is the host's.
        let is_of_gpu = words.iter().any(|word| GPU_WORDS.contains(&word.as_str()));
        let rank = if rank == SURE && is_of_gpu { rank + 1 } else { rank };
        let (column, is_guess) = by_words(name, &words);
        let shown = short(name, LONGEST_SHOWN);
        // PyTorch's `memory_allocated` is its allocator's; W&B's is the driver's.
        let is_of_allocator = words.iter().any(|word| word == "allocated") && !name.contains("memoryAllocated");
        let assumed = match rank {
            _ if is_of_allocator => Some(format!("{shown} is taken for memory.used, and may be an allocator's")),
            3 => Some(format!("{shown}: the highest value of each interval is taken for memory.used")),
            _ => is_guess.then(|| format!("{shown} is taken to be in MiB")),
        };
        let is_size = matches!(column, Column::Used(_) | Column::UsedOf(..) | Column::Free(_) | Column::Total(_));
        let assumed = assumed.filter(|_| is_size);
        Self { column, assumed, rank, is_of_smi: is_of_query(plain) }
    }
}

/// Whether a name is of `nvidia-smi --help-query-gpu`.
fn is_of_query(name: &str) -> bool {
    const GROUPS: [&str; 8] =
        ["utilization.", "temperature.", "power.", "clocks.", "pcie.", "fan.", "ecc.", "compute_"];
    GROUPS.iter().any(|group| name.starts_with(group))
}

/// The words of a name: `system.gpu.0.memoryAllocatedBytes` has system, gpu, 0, memory, allocated and bytes.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut before = ' ';
    let mut rest = name.chars().peekable();
    while let Some(one) = rest.next() {
        // `MiB` is one word.
        let is_unit = before == 'i' && one == 'B' && rest.peek().is_none_or(|next| !next.is_alphanumeric());
        let begins = !before.is_alphanumeric()
            || before.is_lowercase() && one.is_uppercase() && !is_unit
            || before.is_numeric() != one.is_numeric();
        if one.is_alphanumeric() {
            match words.last_mut().filter(|_| !begins) {
                Some(word) => word.extend(one.to_lowercase()),
                None => words.push(one.to_lowercase().collect()),
            }
        } else if one == '%' {
            words.push("percent".to_owned());
        }
        before = one;
    }
    words
}

/// What a name with these words is, and whether its unit is a guess.
fn by_words(name: &str, words: &[String]) -> (Column, bool) {
    let has = |any: &[&str]| words.iter().any(|word| any.contains(&word.as_str()));
    let only = |all: &[&str]| !words.is_empty() && words.iter().all(|word| all.contains(&word.as_str()));
    if has(&["uuid"]) {
        return (Column::Uuid, false);
    }
    if has(&["pci", "bus"]) {
        return (Column::Bus, false);
    }
    let is_memory = has(&["mem", "memory", "vram", "fb"]);
    // What is no amount, is of the host, or of less than the GPU.
    const OTHER: &[&str] = &[
        "percent",
        "pct",
        "util",
        "utilization",
        "utilisation",
        "ratio",
        "temp",
        "temperature",
        "clock",
        "clk",
        "freq",
        "frequency",
        "bandwidth",
        "rate",
        "power",
        "cpu",
        "ram",
        "host",
        "swap",
        "process",
        "proc",
        "pid",
        "peak",
        "reserved",
        "cached",
        "min",
        "max",
        "bar",
        "torch",
        "fraction",
        "speed",
    ];
    // W&B's `memoryAllocated` is a share; its amount has `Bytes`.
    let is_share = name.contains("memoryAllocated") && !has(&["bytes"]);
    if is_memory && !is_share && !has(OTHER) {
        let unit = unit(words);
        let bytes = unit.unwrap_or(MIB);
        let of_gpu = || {
            let number = |word: &String| word.parse::<u32>().ok().filter(|number| *number <= MOST_NUMBER);
            let at = words.iter().position(|word| ["gpu", "gpus", "cuda", "device"].contains(&word.as_str()));
            // `gpu_memory_used_0`, and lists and objects of JSON: `used_mb.0`, `0.used_mb`.
            let after = at.and_then(|at| number(words.get(at + 1)?));
            after.or_else(|| number(words.last()?)).or_else(|| number(words.first()?))
        };
        if has(&["total", "capacity", "size", "limit"]) {
            return (of_gpu().map_or(Column::Total(bytes), |gpu| Column::TotalOf(gpu, bytes)), unit.is_none());
        }
        if has(&["free", "available", "avail"]) {
            return (if of_gpu().is_some() { Column::Other } else { Column::Free(bytes) }, unit.is_none());
        }
        if has(&["used", "usage", "use", "allocated", "alloc", "occupied", "consumed"]) || unit.is_some() {
            return (of_gpu().map_or(Column::Used(bytes), |gpu| Column::UsedOf(gpu, bytes)), unit.is_none());
        }
        return (Column::Other, false);
    }
    if only(&["name", "gpu", "product", "device", "model"]) && has(&["name", "product", "model"]) {
        return (Column::Name, false);
    }
    if only(&["gpu", "index", "id", "idx", "device", "number", "num", "no", "cuda", "minor", "ordinal"]) {
        return (Column::Index, false);
    }
    if only(&["host", "hostname", "node", "nodename", "name", "server"]) && !only(&["name"]) {
        return (Column::Host, false);
    }
    // A duration of something is no clock.
    const DURATIONS: &[&str] = &[
        "step",
        "iter",
        "iteration",
        "epoch",
        "batch",
        "eta",
        "load",
        "data",
        "forward",
        "backward",
        "train",
        "duration",
        "wait",
        "per",
    ];
    let is_time = !has(DURATIONS) && has(&["timestamp", "datetime", "time", "ts", "elapsed", "runtime"]);
    match (is_memory || name.len() > 64, is_time, only(&["date", "day"])) {
        (false, true, _) => (Column::Time(words.iter().rev().find_map(|word| unit_of_time(word))), false),
        (false, _, true) => (Column::Date, false),
        _ => (Column::Other, false),
    }
}

/// The bytes of the unit among these words. Tools that write MB mean what nvidia-smi shows: MiB.
fn unit(words: &[String]) -> Option<u64> {
    words.iter().rev().find_map(|word| unit_of(word))
}

fn unit_of(word: &str) -> Option<u64> {
    Some(match word {
        "b" | "byte" | "bytes" => 1,
        "k" | "kb" | "kib" => KIB,
        "m" | "mb" | "mib" => MIB,
        "g" | "gb" | "gib" => GIB,
        _ => return None,
    })
}

fn unit_of_time(word: &str) -> Option<i64> {
    Some(match word {
        "s" | "sec" | "secs" | "seconds" => 1_000_000_000,
        "ms" | "milliseconds" => 1_000_000,
        "us" | "microseconds" => 1_000,
        "ns" | "nanoseconds" => 1,
        _ => return None,
    })
}

/// Whether a text is a bus id such as `00000000:4A:00.0`.
pub(super) fn is_bus_id(text: &str) -> bool {
    text.split(':').count() == 3 && text.bytes().all(|one| one.is_ascii_hexdigit() || b":.".contains(&one))
}

/// A cell for which the tool had no value: `[N/A]`, `[Not Supported]`, `[Unknown Error]`, `N/A`, `-`.
pub(super) fn is_unknown(field: &str) -> bool {
    const NOTHING: [&str; 8] = ["", "-", "N/A", "n/a", "nan", "NaN", "None", "null"];
    NOTHING.contains(&field) || field == "ERR!" || field.starts_with('[') && field.ends_with(']')
}

/// A size in bytes, in its own unit or in this one; `None` if the tool had none.
pub(super) fn size(field: &str, unit: u64) -> Result<Option<u64>, FileProblem> {
    if is_unknown(field) {
        return Ok(None);
    }
    let wrong = || FileProblem::not_a("size of memory", field);
    let end = field.bytes().position(|one| !one.is_ascii_digit() && one != b'.').unwrap_or(field.len());
    let (number, rest) = field.split_at(end);
    let unit = match rest.trim() {
        "" => unit,
        own => unit_of(&own.to_ascii_lowercase()).ok_or_else(wrong)?,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).map(Some).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().ok().map(|number| number * unit as f64).ok_or_else(wrong)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is in range, and no fraction of a byte"
    )]
    (0.0..9e18).contains(&bytes).then_some(Some(bytes.round() as u64)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_known_by_the_names_that_people_give_them() {
        let cases: &[(&str, Column)] = &[
            ("memory.used [MiB]", Column::Used(MIB)),
            ("gpu_memory_used", Column::Used(MIB)),
            ("mem_used_mb", Column::Used(MIB)),
            ("memory_used(MB)", Column::Used(MIB)),
            ("GPU Memory Usage (GB)", Column::Used(GIB)),
            ("vram_bytes", Column::Used(1)),
            ("VRAM used", Column::Used(MIB)),
            ("memory.free [MiB]", Column::Free(MIB)),
            ("gpu_memory_total", Column::Total(MIB)),
            ("system.gpu.1.memoryAllocatedBytes", Column::UsedOf(1, 1)),
            ("run-7 - system/gpu.0.memoryAllocatedBytes", Column::UsedOf(0, 1)),
            ("system.gpu.0.memoryAllocated", Column::Other),
            ("gpu0_mem_used_mb", Column::UsedOf(0, MIB)),
            ("resources/cuda:1 (gpu:3)/memory_used (MiB)", Column::UsedOf(1, MIB)),
            ("system.gpu.process.0.memoryAllocatedBytes", Column::Other),
            ("system.gpu.0.memory", Column::Other),
            ("utilization.memory [%]", Column::Other),
            ("gpu_memory_utilization", Column::Other),
            ("mem_util_percent", Column::Other),
            ("memory_util(%)", Column::Other),
            ("memory.reserved [MiB]", Column::Reserved(MIB)),
            ("system.proc.memory.rssMB", Column::Other),
            ("utilization.gpu [%]", Column::Other),
            ("gpu_utilization", Column::Other),
            ("temperature.gpu", Column::Other),
            ("index_gpu", Column::Index),
            ("gpu", Column::Index),
            ("device_id", Column::Index),
            ("pci_bus_id", Column::Bus),
            ("timestamp", Column::Time(None)),
            ("Time (s)", Column::Time(Some(1_000_000_000))),
            ("elapsed_ms", Column::Time(Some(1_000_000))),
            ("_timestamp", Column::Time(None)),
            ("date", Column::Date),
            ("gpu_name", Column::Name),
            ("epoch", Column::Other),
            ("loss", Column::Other),
        ];
        for (name, column) in cases {
            assert_eq!(Named::of(name).column, *column, "{name}");
        }
    }

    #[test]
    fn of_two_columns_for_one_thing_the_surer_counts() {
        let columns = |list: &str| Columns::of_names(list.split(',')).columns;
        let of = |at: u32| Column::UsedOf(at, MIB);
        assert_eq!(
            columns("cuda:0/memory_used (MiB)/mean,cuda:0/memory_used (MiB)/max,cuda:0/memory_used (MiB)/min"),
            [Column::Other, of(0), Column::Other]
        );
        assert_eq!(columns("gpu0_mem_used_mb,gpu1_mem_used_mb"), [of(0), of(1)]);
        assert_eq!(columns("mem_used_mb,memory.used [MiB]"), [Column::Other, Column::Used(MIB)]);
    }

    #[test]
    fn sizes_have_their_own_unit_or_the_columns() {
        assert_eq!(size("12 MiB", 1), Ok(Some(12 * MIB)));
        assert_eq!(size("1.5GiB", 1), Ok(Some(3 << 29)));
        assert_eq!(size("4851.00", MIB), Ok(Some(4851 * MIB)));
        assert_eq!(size("7MB", MIB), Ok(Some(7 * MIB)));
        for unknown in ["[N/A]", "N/A", "[GPU is lost]", "-", ""] {
            assert_eq!(size(unknown, MIB), Ok(None), "{unknown}");
        }
        for wrong in ["x", "12 %", "-3", "1e5", "12 M W", "99999999999999999999"] {
            assert!(size(wrong, MIB).is_err(), "{wrong}");
        }
    }
}
