//! What is learned of a table of text from its first rows: where its header is, what its columns are, how its dates are written, and
//! which rows are of one poll.

use super::clock::{self, DateOrder, Stamp};
use super::columns::{Column, Columns, MIB, OF_PROCESSES, is_bus_id, is_unknown, size};
use super::hints::Hints;
use super::polls::Grouping;
use super::shape::{Shape, is_aside, is_clock, separator_of, split};
use crate::import::trimmed;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::LineFile;
use highwater_engine::recording::{FileProblem, refuse};
use std::collections::BTreeSet;
use std::path::Path;

/// How many of the first lines are looked at.
const SURVEYED: usize = 4_096;
/// How many bytes of them.
const SURVEYED_BYTES: usize = 4 << 20;
/// The most lines before a header.
const MOST_BEFORE_HEADER: usize = 64;
/// The most rows of a poll that name no GPU.
const MOST_OF_A_POLL: usize = 16;
/// The fewest polls that show how many rows one has.
const LEAST_POLLS: usize = 4;
/// The greatest number of a GPU that a file without a header is believed.
const GREATEST_INDEX: u64 = 15;
/// The most by which the sums of two rounded sizes differ.
const ROUNDED: u64 = 2 * MIB;
const AGAIN: &str = "record it with a header (without noheader), or name the columns with --columns";

/// What is learned from the first rows.
#[derive(Debug)]
pub(super) struct Survey {
    pub shape: Shape,
    pub dates: DateOrder,
    pub grouping: Grouping,
    /// What was guessed, for people.
    pub assumed: Vec<String>,
}

/// The first rows, and where the lines between polls are.
#[derive(Debug, Default)]
struct Begin {
    shape: Option<Shape>,
    rows: Vec<Vec<String>>,
    /// The number of rows before each header and each time that stands alone.
    marks: Vec<usize>,
    has_asides: bool,
}

/// Whether lines can be the first of such a file.
pub(crate) fn is_begin(lines: &[String]) -> bool {
    if header_in(lines.iter().map(String::as_str)).is_some() {
        return true;
    }
    let mut rows = lines.iter().map(|line| line.as_str()).filter(|line| !is_aside(line));
    let Some(first) = rows.next() else { return false };
    let fields = split(first, separator_of(first));
    let fields: Vec<&str> = fields.iter().map(|field| &**field).collect();
    let is_size = |field: &&str| by_value(field) == Value::Size;
    let is_plain = |field: &&str| by_value(field) == Value::Plain;
    let is_other = |field: &&str| matches!(by_value(field), Value::Text | Value::Time);
    let plain = fields.iter().filter(|field| is_plain(field)).count();
    // Without a unit, only rows of numbers, times and names of GPUs are believed.
    fields.iter().any(is_size) || plain == 1 && !fields.iter().any(|field| is_other(field) && !is_clock(field))
}

/// The number of the first of these lines that is a header: what follows has as many columns. Scripts print other lines before it.
fn header_in<'a>(lines: impl Iterator<Item = &'a str>) -> Option<usize> {
    let mut before: Option<(usize, char, usize, bool)> = None;
    let lines = lines.enumerate().filter(|(_, line)| !is_aside(line)).take(MOST_BEFORE_HEADER);
    for (at, line) in lines {
        if let Some((header, separator, count, is_sure)) = before.take()
            && (count..=count + 1).contains(&split(line, separator).len())
            // A sentence is a row of one field, too.
            && (is_sure || count > 1 || size(line, MIB).is_ok())
        {
            return Some(header);
        }
        let separator = separator_of(line);
        let fields = split(line, separator);
        let fields: Vec<&str> = fields.iter().map(|field| &**field).collect();
        before = Columns::of_header(&fields).map(|found| (at, separator, fields.len(), found.is_of_smi));
    }
    // A file that was just begun.
    before.map(|(header, ..)| header)
}

impl Survey {
    /// Learns from the begin of a file.
    ///
    /// # Errors
    /// What its columns are, or which GPU a row is of, cannot be known.
    pub fn of(path: &Path, file: &LineFile, hints: &Hints) -> Result<Self, OpenError> {
        let refused = |problem| file.refused(&problem);
        let Begin { shape, rows, marks, has_asides } = Begin::of(file, hints).map_err(refused)?;
        let empty = || refuse("recording_unreadable", path, "it has no memory of any GPU; it has no whole row");
        let mut shape = shape.ok_or_else(empty)?;
        if let Some(names) = &hints.columns {
            shape.columns = Columns::of_names(names.iter().map(String::as_str));
            shape.is_named = true;
        } else if shape.columns.columns.is_empty() {
            shape.columns = guessed(&rows).map_err(refused)?;
        } else {
            shape.has_more = has_more(&shape, &rows);
        }
        let mut assumed = shape.columns.assumed.clone();
        shape.one_index(&rows, &mut assumed);
        shape.drop_durations(&rows, &mut assumed);
        let dates = date_order(&shape, &rows, &mut assumed);
        let grouping = match shape.columns.names_gpus() {
            true => Grouping::Single,
            false => grouping(&shape, &rows, dates, &marks, has_asides).map_err(refused)?,
        };
        Ok(Self { shape, dates, grouping, assumed })
    }
}

impl Begin {
    fn of(file: &LineFile, hints: &Hints) -> Result<Self, FileProblem> {
        let mut begin = Self::default();
        // Lines that cannot be read are counted when the file is read; the last may be cut off.
        let lines = || {
            let whole = file.lines().take(SURVEYED).filter_map(|(_, line)| line.ok());
            let mut left = SURVEYED_BYTES;
            whole.map_while(move |line| {
                left = left.checked_sub(line.len())?;
                Some(trimmed(line.strip_suffix('\n')?).to_owned())
            })
        };
        let first: Vec<String> = lines().take(MOST_BEFORE_HEADER).collect();
        let before = match hints.columns {
            None => header_in(first.iter().map(String::as_str)).unwrap_or(0),
            Some(_) => 0,
        };
        lines().skip(before).try_for_each(|line| begin.add(&line, hints.columns.is_some()))?;
        Ok(begin)
    }

    fn add(&mut self, line: &str, is_named: bool) -> Result<(), FileProblem> {
        if is_aside(line) {
            if !line.starts_with('#') {
                self.marks.push(self.rows.len());
                self.has_asides = true;
            }
            return Ok(());
        }
        let separator = self.shape.as_ref().map_or_else(|| separator_of(line), |shape| shape.separator);
        let fields = split(line, separator);
        let texts: Vec<&str> = fields.iter().map(|field| &**field).collect();
        let has_units = texts.iter().any(|text| text.starts_with("memory.") || text.ends_with("MiB"));
        let shape = |columns| Shape { separator, is_of_smi: has_units, ..Shape::of_columns(columns) };
        let before = self.shape.as_ref().map_or(0, |shape| shape.columns.columns.len());
        if let Some(columns) = Columns::of_header(&texts).filter(|_| texts.len() > 1 || before <= 1) {
            if columns.has_processes && !is_named {
                return Err(FileProblem::malformed(OF_PROCESSES));
            }
            if !columns.has_memory() && !is_named {
                return Err(FileProblem::malformed("the query has no memory.used"));
            }
            self.marks.push(self.rows.len());
            self.shape.get_or_insert_with(|| shape(columns));
            return Ok(());
        }
        let columns = self.shape.get_or_insert_with(|| shape(Columns::default())).columns.columns.len();
        // Other lines are counted when the file is read.
        if columns > 0 && !(columns..=columns + 1).contains(&texts.len()) && !is_named {
            return Ok(());
        }
        self.rows.push(texts.into_iter().map(str::to_owned).collect());
        Ok(())
    }
}

/// The order of day and month in a file's dates: as one of them shows it, or else as its readings are closest together.
fn date_order(shape: &Shape, rows: &[Vec<String>], assumed: &mut Vec<String>) -> DateOrder {
    let dates = || rows.iter().flatten().filter(|field| clock::has_unordered_date(field) && is_clock(field));
    if dates().next().is_none() {
        return DateOrder::default();
    }
    if let Some(shown) = dates().find_map(|date| DateOrder::shown_by(date)) {
        return shown;
    }
    let span_ns = |order: DateOrder| {
        let times = || rows.iter().filter_map(|row| shape.time(row, order).ok().flatten()).map(Stamp::ns);
        times().max().unwrap_or(0).saturating_sub(times().min().unwrap_or(0))
    };
    if span_ns(DateOrder::MonthDay) < span_ns(DateOrder::DayMonth) {
        assumed.push("its dates are month, day, year: its readings are closest together so".to_owned());
        return DateOrder::MonthDay;
    }
    assumed.push("its dates are day, month, year".to_owned());
    DateOrder::DayMonth
}

/// Whether rows begin with a time that the header does not name: the script's, before what nvidia-smi printed.
fn has_more(shape: &Shape, rows: &[Vec<String>]) -> bool {
    let named = shape.columns.columns.len();
    let has = |row: &Vec<String>| row.len() == named + 1 && row.iter().take(2).all(|field| is_clock(field));
    rows.first().is_some_and(has) && rows.iter().all(|row| row.len() != named)
}

/// How rows without a GPU's name belong together: by the lines between polls, or else by their times.
fn grouping(
    shape: &Shape,
    rows: &[Vec<String>],
    dates: DateOrder,
    marks: &[usize],
    has_asides: bool,
) -> Result<Grouping, FileProblem> {
    let times: Vec<i64> = rows.iter().filter_map(|row| shape.time(row, dates).ok().flatten()).map(Stamp::ns).collect();
    if times.is_empty() {
        let end = rows.len();
        let ends = marks.iter().skip(1).chain([&end]);
        let mut counts: Vec<usize> =
            marks.iter().zip(ends).map(|(begin, end)| end - begin).filter(|count| *count > 0).collect();
        // The last may be cut off, or end after what is looked at.
        counts.truncate(counts.len().saturating_sub(1).max(1));
        let counts: BTreeSet<usize> = counts.into_iter().collect();
        let is_poll = |count: &usize| (2..=MOST_OF_A_POLL).contains(count);
        let is_one_size = counts.len() == 1 && counts.iter().all(is_poll);
        return Ok(if is_one_size && (has_asides || marks.len() > 1) { Grouping::Marked } else { Grouping::Single });
    }
    let steps: Vec<i64> = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    for count in 2..=MOST_OF_A_POLL {
        let (mut within, mut between) = (0, i64::MAX);
        for (at, step) in steps.iter().enumerate() {
            // A clock that goes back says nothing of how rows belong together.
            match (at + 1) % count {
                _ if *step < 0 => {}
                0 => between = between.min(*step),
                _ => within = within.max(*step),
            }
        }
        // Rows of one time are of one poll. Others may also be a few runs of as many readings each.
        let least_polls = if within == 0 { 2 } else { LEAST_POLLS };
        if between > 4 * within.max(1) && between < i64::MAX && times.len() >= least_polls * count {
            return Ok(Grouping::Paused(within + (between - within) / 2));
        }
    }
    match steps.contains(&0) {
        true => Err(FileProblem::malformed(
            "it has several GPUs and no column that distinguishes them: query index or uuid too",
        )),
        false => Ok(Grouping::Single),
    }
}

/// What a cell can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Time,
    Uuid,
    Bus,
    /// With its unit.
    Size,
    /// A whole number without a unit.
    Plain,
    Text,
}

fn by_value(field: &str) -> Value {
    let is_size = || {
        let number = field.trim_end_matches(|one: char| one.is_ascii_alphabetic());
        number.len() < field.len()
            && number.trim().parse::<f64>().is_ok()
            && size(field, 1).is_ok_and(|size| size.is_some())
    };
    if is_clock(field) {
        Value::Time
    } else if field.starts_with("GPU-") || field.starts_with("MIG-") {
        Value::Uuid
    } else if is_bus_id(field) {
        Value::Bus
    } else if is_size() {
        Value::Size
    } else if field.parse::<u64>().is_ok() {
        Value::Plain
    } else {
        Value::Text
    }
}

/// The columns of a file without a header, from its first rows.
fn guessed(rows: &[Vec<String>]) -> Result<Columns, FileProblem> {
    let first = rows.first().map_or(&[][..], Vec::as_slice);
    if first.iter().any(|field| is_unknown(field)) {
        let problem = format!("its first line has no value in a column, so what that is cannot be known: {AGAIN}");
        return Err(FileProblem::malformed(problem));
    }
    let values: Vec<Value> = first.iter().map(|field| by_value(field)).collect();
    let of = |wanted: Value| -> Vec<usize> { (0..values.len()).filter(|at| values[*at] == wanted).collect() };
    let mut columns: Vec<Column> = values
        .iter()
        .map(|value| match value {
            Value::Time => Column::Time(None),
            Value::Uuid => Column::Uuid,
            Value::Bus => Column::Bus,
            Value::Size | Value::Plain | Value::Text => Column::Other,
        })
        .collect();
    let (sizes, mut plain) = (of(Value::Size), of(Value::Plain));
    let mut assumed = Vec::new();
    let ambiguous = |what: &str| FileProblem::malformed(format!("several of its columns can be {what}: {AGAIN}"));
    let number = |at: usize| at + 1;
    let sum_of =
        |one: &Vec<String>, at: &[usize]| at.iter().map(|at| size(one.get(*at)?, MIB).ok()?).sum::<Option<u64>>();
    let spread = |at: &[usize]| {
        let sums: Vec<u64> = rows.iter().filter_map(|row| sum_of(row, at)).collect();
        Some((*sums.iter().min()?, *sums.iter().max()?))
    };
    match sizes[..] {
        [] if plain.len() == 1 => {
            let at = plain.remove(0);
            columns[at] = Column::Used(MIB);
            assumed.push(format!("column {} is memory.used in MiB: nothing in the file says what it is", number(at)));
        }
        [] if plain.is_empty() => return Err(FileProblem::malformed("it has no column that can be memory.used")),
        [] => return Err(ambiguous("memory.used")),
        [at] => {
            columns[at] = Column::Used(MIB);
            assumed.push(format!("column {} is memory.used: nothing in the file says what it is", number(at)));
        }
        [one, other] => {
            let is_constant = |at: usize| spread(&[at]).is_some_and(|(least, most)| least == most);
            let is_above = |above: usize, below: usize| {
                rows.iter().all(|row| sum_of(row, &[above]).zip(sum_of(row, &[below])).is_none_or(|(a, b)| a >= b))
            };
            let is_total = |total: usize, used: usize| is_constant(total) && is_above(total, used);
            let is_split = spread(&[one, other]).is_some_and(|(least, most)| most - least <= ROUNDED);
            let (used, rest, what, why) = if rows.len() < 2 {
                return Err(ambiguous("memory.used"));
            } else if is_total(other, one) {
                (one, other, Column::Total(MIB), "memory.total: it does not change")
            } else if is_total(one, other) {
                (other, one, Column::Total(MIB), "memory.total: it does not change")
            } else if is_split {
                (one, other, Column::Free(MIB), "memory.free: what they hold together does not change")
            } else {
                return Err(ambiguous("memory.used"));
            };
            (columns[used], columns[rest]) = (Column::Used(MIB), what);
            assumed.push(format!("column {} is memory.used, and column {} {why}", number(used), number(rest)));
        }
        [..] => {
            let [used, free, total] = parts(rows, &sizes).ok_or_else(|| ambiguous("memory.used"))?;
            (columns[used], columns[free]) = (Column::Used(MIB), Column::Free(MIB));
            columns[total] = Column::Total(MIB);
            let [used, free, total] = [used, free, total].map(number);
            assumed.push(format!(
                "column {used} is memory.used, column {free} memory.free and column {total} memory.total: by their sums"
            ));
        }
    }
    if columns.iter().all(|of| !matches!(of, Column::Uuid | Column::Bus)) {
        let indices: Vec<usize> = plain.iter().copied().filter(|at| is_index(rows, *at)).collect();
        match indices[..] {
            [at] => {
                columns[at] = Column::Index;
                assumed.push(format!("column {} is the GPU's index", number(at)));
            }
            [] => {}
            _ => return Err(ambiguous("the GPU's index")),
        }
    }
    Ok(Columns::of_values(columns, assumed))
}

/// Which of three columns of sizes is in use, free and the total: the total does not change, and neither does what the others hold
/// together. Of these the first is what is in use.
fn parts(rows: &[Vec<String>], sizes: &[usize]) -> Option<[usize; 3]> {
    let [one, other, third] = *sizes else { return None };
    let row = |row: &Vec<String>, at: usize| size(row.get(at)?, MIB).ok()?;
    [[one, other, third], [one, third, other], [other, third, one]].into_iter().find(|[used, free, total]| {
        let totals: BTreeSet<_> = rows.iter().map(|one| row(one, *total)).collect();
        let sums: Vec<u64> = rows.iter().filter_map(|one| row(one, *used)?.checked_add(row(one, *free)?)).collect();
        let spread = sums.iter().max().zip(sums.iter().min()).is_some_and(|(most, least)| most - least <= ROUNDED);
        let fits = totals
            .first()
            .copied()
            .flatten()
            .zip(sums.iter().max().copied())
            .is_some_and(|(total, sum)| sum <= total.saturating_add(ROUNDED));
        totals.len() == 1 && spread && fits && rows.len() > 1
    })
}

/// Whether a column without a name is the GPU's index: small numbers that come in one order, again and again.
fn is_index(rows: &[Vec<String>], at: usize) -> bool {
    let numbers: Vec<Option<u64>> = rows.iter().map(|row| row.get(at).and_then(|field| field.parse().ok())).collect();
    let first = numbers.first().copied().flatten();
    let turn = numbers.iter().skip(1).position(|number| *number == first).map_or(numbers.len(), |turn| turn + 1);
    let is_small = numbers.iter().all(|number| number.is_some_and(|number| number <= GREATEST_INDEX));
    let is_cycle = numbers.iter().zip(numbers.iter().skip(turn)).all(|(before, after)| before == after);
    let distinct: BTreeSet<_> = numbers.iter().take(turn).collect();
    is_small && is_cycle && distinct.len() == turn.min(numbers.len())
}
