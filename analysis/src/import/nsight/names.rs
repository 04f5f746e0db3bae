//! Names of kernels, copies and fills, as PyTorch's profiler writes them, so that both can be compared.

use highwater_core::source::OpenError;
use highwater_engine::recording::FileProblem;
use highwater_engine::recording::rows::{RecordingReader, needed, number, text};
use std::collections::{BTreeMap, HashMap};

/// The table of texts.
const TEXTS: &str = "StringIds";
/// The longest text that is read, bytes. SQLite refuses to read those above the reader's limit, which is longer.
pub(super) const LONGEST_TEXT: usize = 1 << 15;
/// The most bytes of all names of kernels.
const MOST_TEXT_BYTES: usize = 64 << 20;
/// The most entries of an enumeration that are read.
const MOST_LABELS: usize = 256;

/// CUPTI's kinds of copies, for exports without the enumeration.
const COPIES: [&str; 14] = [
    "UNKNOWN", "HTOD", "DTOH", "HTOA", "ATOH", "ATOA", "ATOD", "DTOA", "DTOD", "HTOH", "PTOP", "UVM_HTOD", "UVM_DTOH",
    "UVM_DTOD",
];
/// Nsight's kinds of memory, likewise.
const MEMORY: [&str; 8] =
    ["Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown"];

/// Whether the export has texts by number.
pub(super) fn has_texts(file: &RecordingReader) -> bool {
    file.has_table(TEXTS) && file.has_column(TEXTS, "id") && file.has_column(TEXTS, "value")
}

/// The texts whose numbers are in this column of a table.
pub(super) fn texts(file: &mut RecordingReader, table: &str, column: &str) -> Result<HashMap<i64, String>, OpenError> {
    let (mut found, mut bytes) = (HashMap::new(), 0);
    if !has_texts(file) || !file.has_table(table) {
        return Ok(found);
    }
    let query = format!(
        "SELECT id, value FROM {TEXTS} WHERE octet_length(value) <= {LONGEST_TEXT} AND id IN (SELECT {column} FROM {table})"
    );
    let refused =
        file.refuse("recording_too_large", format!("its kernels have more than {MOST_TEXT_BYTES} bytes of names"));
    let read =
        |row: &rusqlite::Row<'_>| Ok((needed(row, 0)?, text(row, 1)?.ok_or(FileProblem::Missing("value".into()))?));
    file.each(TEXTS, &query, 0, read, |(id, value): (i64, String)| {
        bytes += value.len();
        found.insert(id, value);
        if bytes > MOST_TEXT_BYTES { Err(refused.clone()) } else { Ok(()) }
    })?;
    Ok(found)
}

/// The names of an enumeration by number; `column` is the one with the names.
pub(super) fn labels(
    file: &mut RecordingReader,
    table: &'static str,
    column: &'static str,
) -> Result<BTreeMap<i64, String>, OpenError> {
    if !file.has_column(table, "id") || !file.has_column(table, column) {
        return Ok(BTreeMap::new());
    }
    let query = format!("SELECT id, {column} FROM {table} LIMIT {MOST_LABELS}");
    let rows = file.rows(table, &query, 0, MOST_LABELS, |row| Ok((number(row, 0)?, text(row, 1)?)))?;
    Ok(rows.into_iter().filter_map(|(id, name)| id.zip(name)).collect())
}

/// What copies and fills are called.
pub(super) struct Copies {
    kinds: BTreeMap<i64, String>,
    memory: BTreeMap<i64, String>,
}

impl Copies {
    pub(super) fn read(file: &mut RecordingReader) -> Result<Self, OpenError> {
        let listed = |names: &[&str]| (0..).zip(names.iter().map(|name| (*name).to_owned())).collect();
        let mut kinds = labels(file, "ENUM_CUDA_MEMCPY_OPER", "name")?;
        kinds.values_mut().for_each(|name| *name = name.trim_start_matches("CUDA_MEMCPY_KIND_").to_owned());
        let memory = labels(file, "ENUM_CUDA_MEM_KIND", "label")?;
        Ok(Self {
            kinds: if kinds.is_empty() { listed(&COPIES) } else { kinds },
            memory: if memory.is_empty() { listed(&MEMORY) } else { memory },
        })
    }

    /// `Memcpy HtoD (Pageable -> Device)`.
    pub(super) fn copy(&self, kind: Option<i64>, from: Option<i64>, to: Option<i64>) -> String {
        let kind = kind.and_then(|kind| self.kinds.get(&kind)).map_or("UNKNOWN", String::as_str);
        if let Some(kind) = kind.strip_prefix("UVM_") {
            return format!("Memcpy {} (unified memory)", way(kind));
        }
        let memory = |number: Option<i64>| self.memory.get(&number?);
        let ends = memory(from).zip(memory(to)).map_or_else(String::new, |(from, to)| format!(" ({from} -> {to})"));
        if kind == "UNKNOWN" { format!("Memcpy{ends}") } else { format!("Memcpy {}{ends}", way(kind)) }
    }

    /// `Memset (Device)`.
    pub(super) fn fill(&self, memory: Option<i64>) -> String {
        let memory = memory.and_then(|number| self.memory.get(&number));
        memory.map_or_else(|| "Memset".to_owned(), |memory| format!("Memset ({memory})"))
    }
}

/// `HtoD` of `HTOD`.
fn way(kind: &str) -> String {
    match kind.split_once("TO") {
        Some((from, to)) if from.len() == 1 && to.len() == 1 => format!("{from}to{to}"),
        _ => kind.to_owned(),
    }
}

/// A name without its numbers, each of which becomes `*`, and the number that counts: the last, or the one before `/` or `of`.
pub(super) fn family(name: &str) -> (String, Option<u64>) {
    let (mut family, mut numbers, mut digits) = (String::new(), Vec::new(), String::new());
    for letter in name.chars().chain(['\0']) {
        if letter.is_ascii_digit() {
            digits.push(letter);
            continue;
        }
        if !digits.is_empty() {
            let is_of = family.trim_end().ends_with('/') || family.trim_end().ends_with(" of");
            numbers.push((digits.parse::<u64>().ok(), is_of));
            family.push('*');
            digits.clear();
        }
        if letter != '\0' {
            family.push(letter);
        }
    }
    let last = numbers.iter().rposition(|(_, is_of)| !is_of);
    (family.trim().to_owned(), last.and_then(|at| numbers[at].0))
}

/// The words of a name, in lower case: `trainStep_*` is `train` and `step`.
pub(super) fn words(name: &str) -> Vec<String> {
    let (mut words, mut word, mut before) = (Vec::new(), String::new(), ' ');
    for letter in name.chars().chain([' ']) {
        if !word.is_empty()
            && (!letter.is_ascii_alphabetic() || letter.is_ascii_uppercase() && before.is_ascii_lowercase())
        {
            words.push(std::mem::take(&mut word));
        }
        if letter.is_ascii_alphabetic() {
            word.push(letter.to_ascii_lowercase());
        }
        before = letter;
    }
    words
}

/// The most names of ranges that are kept as they are, and in all.
const MOST_RANGES: usize = 256;
const MOST_FAMILIES: usize = 1_000;

/// Names of ranges, numbered from 1. Those of steps, and all after the first [`MOST_RANGES`], are without their numbers.
pub(super) struct RangeNames {
    steps: Option<String>,
    numbers: HashMap<String, u64>,
    names: Vec<String>,
}

impl RangeNames {
    /// None yet; `steps` is what steps are called without their numbers.
    pub(super) fn new(steps: Option<String>) -> Self {
        Self { steps, numbers: HashMap::new(), names: Vec::new() }
    }

    /// The number of a name; 0 if there is no room for it.
    pub(super) fn number(&mut self, name: &str) -> u64 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let family = family(name).0;
        let is_step = self.steps.as_ref() == Some(&family);
        let kept = if is_step || self.names.len() >= MOST_RANGES { family } else { name.to_owned() };
        if let Some(number) = self.numbers.get(&kept) {
            return *number;
        }
        if self.names.len() >= MOST_FAMILIES {
            return 0;
        }
        let number = self.names.len() as u64 + 1;
        self.names.push(kept.clone());
        self.numbers.insert(kept, number);
        number
    }

    /// The name with a number, unless it is that of steps or is not kept.
    pub(super) fn annotation(&self, number: u64) -> Option<&str> {
        let at = usize::try_from(number).ok()?.checked_sub(1)?;
        let is_step = |name: &&String| self.steps.as_ref() == Some(*name);
        self.names.get(at).filter(|name| !is_step(name)).map(String::as_str)
    }

    /// The names with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &str)> {
        (1..).zip(self.names.iter().map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_numbers_are_one_family() {
        for (name, expected, number) in [
            ("step 3", "step *", Some(3)),
            ("ProfilerStep#15", "ProfilerStep#*", Some(15)),
            ("Step 3/100", "Step */*", Some(3)),
            ("epoch 1 batch 7 of 20", "epoch * batch * of *", Some(7)),
            ("fp16 step 12", "fp* step *", Some(12)),
            ("iteration", "iteration", None),
            ("step 99999999999999999999999", "step *", None),
            ("", "", None),
        ] {
            assert_eq!(family(name), (expected.to_owned(), number), "{name}");
        }
    }
}
