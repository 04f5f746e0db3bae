//! Rows of text: their cells, what their columns are, and their times.

use super::clock::{self, DateOrder, Stamp};
use super::columns::{Column, Columns};
use highwater_core::clock::A_DATE_NS;
use highwater_engine::recording::FileProblem;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// The greatest number of a GPU that is believed.
const MOST_INDEX: u32 = 63;
/// The most columns.
const MOST_COLUMNS: usize = 4_096;

/// How a file is written.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub separator: char,
    pub columns: Columns,
    /// What the header says of them, before some were dropped for what is in them.
    pub header: Vec<Column>,
    /// Whether its rows begin with a time that its header does not name.
    pub has_more: bool,
    /// Whether the user named the columns: then a header is a line like any other.
    pub is_named: bool,
    pub is_of_smi: bool,
}

impl Shape {
    /// One of rows with these columns.
    pub fn of_columns(columns: Columns) -> Self {
        let header = columns.columns.clone();
        Self { separator: ',', columns, header, has_more: false, is_named: false, is_of_smi: false }
    }

    /// Of several columns that can be the GPU's index, keeps the one that distinguishes the most rows.
    pub fn one_index(&mut self, rows: &[Vec<String>], assumed: &mut Vec<String>) {
        let has_times = self.columns.position(|of| matches!(of, Column::Time(_))).is_some();
        let columns = &mut self.columns.columns;
        let indices: Vec<usize> = (0..columns.len()).filter(|at| columns[*at] == Column::Index).collect();
        let values = |at: usize| rows.iter().filter_map(move |row| row.get(at));
        let distinct = |at: &usize| values(*at).collect::<BTreeSet<_>>().len();
        // Utilization has great numbers, and the number of a row never comes again.
        let is_small = |text: &String| {
            text.parse::<f64>().is_err() || text.parse::<u32>().is_ok_and(|number| number <= MOST_INDEX)
        };
        let is_one = |at: &usize| {
            let count = distinct(at);
            let comes_again = count < rows.len() || rows.len() <= 1 || !has_times || is_one_poll(rows, *at);
            comes_again && (values(*at).all(is_small) || self.is_named)
        };
        let best = indices.iter().rev().copied().filter(|at| is_one(at)).max_by_key(distinct);
        for at in indices.iter().filter(|at| Some(**at) != best) {
            columns[*at] = Column::Other;
            assumed.push(format!("column {} is not the GPU's index", at + 1));
        }
    }

    /// A number that often goes back is no clock, but how long something took.
    pub fn drop_durations(&mut self, rows: &[Vec<String>], assumed: &mut Vec<String>) {
        let times: Vec<Stamp> =
            rows.iter().filter_map(|row| self.time(row, DateOrder::DayMonth).ok().flatten()).collect();
        let back = times.windows(2).filter(|pair| pair[1].ns() < pair[0].ns()).count();
        if matches!(times.first(), Some(Stamp::Elapsed(_))) && 4 * back >= times.len() {
            self.columns
                .columns
                .iter_mut()
                .filter(|of| matches!(of, Column::Time(_)))
                .for_each(|of| *of = Column::Other);
            assumed.push("its numbers of time go back, so they are no clock: readings are counted".to_owned());
        }
    }

    /// The time of a row; `None` if the file has none.
    pub fn time(&self, fields: &[impl AsRef<str>], dates: DateOrder) -> Result<Option<Stamp>, FileProblem> {
        // A second time is the script's own, or since its begin: the first that is a time of day or of a year counts.
        let of = |column: &Column| if let Column::Time(unit) = column { Some(*unit) } else { None };
        let skip = usize::from(self.has_more && fields.len() > self.columns.columns.len());
        let times = self.columns.columns.iter().enumerate().filter_map(|(at, column)| Some((at + skip, of(column)?)));
        let date = self.columns.position(|of| of == Column::Date).and_then(|at| fields.get(at));
        let (mut elapsed, mut wrong) = (None, None);
        for (at, unit) in times {
            let field = fields.get(at).map_or("", |field| field.as_ref());
            let text = match date {
                Some(date) => Cow::Owned(format!("{} {field}", date.as_ref())),
                None => Cow::Borrowed(field),
            };
            match clock::parse(&text, dates).or_else(|| numbered(field, unit)) {
                Some(Stamp::Elapsed(ns)) => elapsed = elapsed.or(Some(Stamp::Elapsed(ns))),
                Some(stamp) => return Ok(Some(stamp)),
                None => wrong = wrong.or(Some(field.to_owned())),
            }
        }
        match (elapsed, wrong) {
            (Some(elapsed), _) => Ok(Some(elapsed)),
            (None, Some(wrong)) => Err(FileProblem::not_a("timestamp", &wrong)),
            (None, None) => Ok(None),
        }
    }
}

/// Whether rows are of one poll: each first cell that is a time is the same, and a column counts from 0.
fn is_one_poll(rows: &[Vec<String>], at: usize) -> bool {
    let first = |row: &Vec<String>| row.iter().find(|field| is_clock(field)).cloned();
    let times: BTreeSet<Option<String>> = rows.iter().map(first).collect();
    times.len() == 1
        && rows.iter().zip(0_usize..).all(|(row, nth)| row.get(at).is_some_and(|field| number(field) == Some(nth)))
}

fn number(field: &str) -> Option<usize> {
    field.rsplit(|one: char| !one.is_ascii_digit()).next()?.parse().ok()
}

/// A time that is a number: since 1970 in seconds or fractions of them, or since a begin.
fn numbered(field: &str, unit: Option<i64>) -> Option<Stamp> {
    let number: f64 = field.parse().ok().filter(|number: &f64| *number >= 0.0)?;
    let unit_ns = unit.unwrap_or(match number {
        ..1e11 => 1_000_000_000,
        ..1e14 => 1_000_000,
        ..1e17 => 1_000,
        _ => 1,
    });
    let ns = match field.parse::<i64>() {
        Ok(whole) => whole.checked_mul(unit_ns)?,
        // The parts before and after the point: 64 bits of floating point have 100 ns of Unix time.
        Err(_) => {
            let (whole, fraction) = field.split_once('.')?;
            let fraction: f64 = format!("0.{fraction}").parse().ok()?;
            #[expect(clippy::cast_possible_truncation, reason = "it is less than a unit")]
            whole.parse::<i64>().ok()?.checked_mul(unit_ns)?.checked_add((fraction * unit_ns as f64).round() as i64)?
        }
    };
    Some(if ns >= A_DATE_NS { Stamp::Unix(ns) } else { Stamp::Elapsed(ns) })
}

/// Whether a line is no row: a comment, or the time of the poll that follows.
pub(super) fn is_aside(line: &str) -> bool {
    // `10:15:30,604` is a time and a reading here, and no fraction.
    let has_fields = line.as_bytes().windows(2).any(|pair| pair[0] == b',' && pair[1].is_ascii_digit());
    line.starts_with("# ") || !has_fields && is_clock(line)
}

pub(super) fn is_clock(text: &str) -> bool {
    clock::parse(text, DateOrder::DayMonth).or_else(|| clock::parse(text, DateOrder::MonthDay)).is_some()
}

pub(super) fn separator_of(line: &str) -> char {
    [',', ';', '\t'].into_iter().find(|separator| line.contains(*separator)).unwrap_or(',')
}

/// The fields of a line, without quotes.
pub(super) fn split(line: &str, separator: char) -> Vec<Cow<'_, str>> {
    if !line.contains('"') {
        return line.split(separator).take(MOST_COLUMNS).map(|field| Cow::Borrowed(field.trim())).collect();
    }
    let (mut fields, mut field, mut is_quoted) = (Vec::new(), String::new(), false);
    let mut rest = line.chars().peekable();
    while let Some(one) = rest.next() {
        match one {
            // Two in a quoted field are one of it.
            '"' if is_quoted && rest.peek() == Some(&'"') => field.extend(rest.next()),
            '"' => is_quoted = !is_quoted,
            _ if one == separator && !is_quoted && fields.len() < MOST_COLUMNS => {
                fields.push(std::mem::take(&mut field));
            }
            _ => field.push(one),
        }
    }
    fields.push(field);
    fields.into_iter().map(|field| Cow::Owned(field.trim().to_owned())).collect()
}
