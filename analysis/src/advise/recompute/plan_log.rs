//! What a training log says of the plans of ONNX Runtime's Memory Optimizer.
//!
//! Enters: a log of `ORTModule`, line by line. Leaves: the rows of its last table, what is enabled, the dimensions of the
//! first batch, and which plans exclude each other. Invariants: whatever stands before a row on its line, such as the time
//! or a rank, is ignored, as are all other lines; a row that cannot be read is counted with its line and reason; only one
//! line is in memory, and what is kept is bounded. Absent on purpose: the summary before September 2023, which has no bytes.

use super::expression::{self, Dims};
use super::plans::{self, Combination, Id, MOST_PLANS, MOST_TABLE_BYTES, Plan, PlanError, quoted};
use crate::log_lines::LogLines;
use std::io::{self, BufRead};

/// How many rows that cannot be read are kept to be shown.
const MOST_SHOWN: usize = 100;

/// What a log says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    /// The plans of the last table, in its order: largest printed saving first.
    pub plans: Vec<Plan>,
    /// How many tables there are. `ORTModule` prints one each time it builds its graph.
    pub tables: usize,
    /// The enabled plans, if the line above the last table lists them. Their counts are the requested ones; in rows they are -1.
    pub enabled: Option<Vec<Combination>>,
    /// The rows of the last `MemoryInsight Summary`. Of the options of one row, one can be enabled.
    pub insight: Vec<Vec<Alternative>>,
    /// The dimensions of the first batch, with which savings were computed.
    pub dims: Dims,
    /// The rows that could not be read.
    pub unreadable: Unreadable,
    /// How many lines are longer than 64 KiB.
    pub long_lines: usize,
}

/// An option of a row of the `MemoryInsight Summary`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alternative {
    /// Its id.
    pub id: Id,
    /// Whether it is enabled.
    pub is_on: bool,
}

/// Rows that could not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unreadable {
    /// How many there are.
    pub count: usize,
    /// The line, from 1, and the reason of the first hundred.
    pub first: Vec<(usize, String)>,
}

impl Log {
    /// Ids of which at most one can be enabled, for each row of the `MemoryInsight Summary` that has several.
    #[must_use]
    pub fn exclusive(&self) -> Vec<Vec<Id>> {
        let several = self.insight.iter().filter(|row| row.len() > 1);
        several.map(|row| row.iter().map(|option| option.id.clone()).collect()).collect()
    }
}

/// Reads a log.
///
/// # Errors
/// The reader fails.
pub fn read(log: impl BufRead) -> io::Result<Log> {
    let (mut found, mut lines) = (Reader::default(), LogLines::new(log));
    while let Some(line) = lines.next()? {
        match line.text {
            Some(text) => found.line(line.number, &String::from_utf8_lossy(text)),
            None => found.log.long_lines += 1,
        }
    }
    Ok(found.log)
}

#[derive(Default)]
struct Reader {
    log: Log,
    /// Options of the current summary, in all rows.
    options: usize,
    /// Bytes of the current table.
    bytes: usize,
    /// Whether the option that a status belongs to was read.
    has_option: bool,
    /// Whether the next line has the dimensions.
    dims_follow: bool,
}

impl Reader {
    fn line(&mut self, number: usize, line: &str) {
        let line = line.trim_end();
        if std::mem::take(&mut self.dims_follow) {
            self.dims(line);
        }
        if let Some((plan, rest)) = row(line) {
            self.row(number, plan, rest);
        } else if line.contains("MemoryInsight Summary") {
            self.log.insight.clear();
            (self.options, self.has_option) = (0, false);
        } else if line.contains("For each row options are mutually exclusive") {
            self.has_option = false;
            match self.log.insight.len() {
                ..MOST_PLANS => self.log.insight.push(Vec::new()),
                // An option of a row that is not kept must not go to the one before.
                _ => self.options = MOST_PLANS,
            }
        } else if let Some((_, option)) = line.split_once(">>Option ") {
            self.option(number, option);
        } else if let Some((_, status)) = line.split_once("Status ") {
            self.status(number, status);
        } else if let Some((_, dims)) = line.split_once("1st batch symbolic dim values:") {
            self.log.dims.clear();
            self.dims(dims);
            self.dims_follow = true;
        } else if line.split_once("Memory Optimizer").is_some_and(|(_, rest)| rest.trim_start().starts_with(':')) {
            self.log.enabled = enabled(line);
        }
    }

    fn row(&mut self, number: usize, plan: u64, rest: Row<'_>) {
        if plan == 1 || self.log.tables == 0 {
            self.log.plans.clear();
            self.log.unreadable = Unreadable::default();
            self.bytes = 0;
            self.log.tables += 1;
        }
        self.bytes = self.bytes.saturating_add(rest.columns.len());
        match rest.plan(number) {
            Ok(_) if self.bytes > MOST_TABLE_BYTES => {
                self.unreadable(number, PlanError::TableTooLarge);
            }
            Ok(_) if self.log.plans.len() >= MOST_PLANS => self.unreadable(number, PlanError::TooMany),
            Ok(plan) => self.log.plans.push(plan),
            Err(reason) => self.unreadable(number, reason),
        }
    }

    /// `1     : Recompute subgraph BiasGelu+   |`
    fn option(&mut self, number: usize, option: &str) {
        self.has_option = false;
        let words: Vec<&str> = option.split([' ', '|', ':']).filter(|word| !word.is_empty()).take(4).collect();
        let id = match words.as_slice() {
            [_, "Recompute", "subgraph", cluster] => bounded(&format!("{cluster}:1:-1")),
            [_, "RecomputeWithCompromise", "subgraph", cluster] => bounded(&format!("{cluster}:2:-1")),
            _ => Err(PlanError::UnknownOption(quoted(option))),
        };
        match (id, self.log.insight.last_mut()) {
            (Ok(_), _) if self.options >= MOST_PLANS => {
                self.unreadable(number, PlanError::TooManyOptions);
            }
            (Ok(id), Some(row)) => {
                row.push(Alternative { id, is_on: false });
                (self.options, self.has_option) = (self.options + 1, true);
            }
            (Ok(_), None) => self.unreadable(number, PlanError::StrayOption),
            (Err(reason), _) => self.unreadable(number, reason),
        }
    }

    /// `: Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG=BiasGelu+:1:-1   |`, or `: Enabled, requested count=-1, …`
    fn status(&mut self, number: usize, status: &str) {
        let last = self.log.insight.last_mut().and_then(|row| row.last_mut());
        let Some(option) = last.filter(|_| std::mem::take(&mut self.has_option)) else { return };
        let after = |before: &str| {
            let (_, rest) = status.split_once(before)?;
            rest.split([' ', '|']).next()
        };
        let read = match (after("requested count="), after("ORTMODULE_MEMORY_OPT_CONFIG=")) {
            (Some(count), _) => {
                option.is_on = true;
                let Id { cluster, strategy, .. } = &option.id;
                bounded(&format!("{cluster}:{}:{}", strategy.number(), count.trim_end_matches(',')))
            }
            (None, Some(id)) => bounded(id),
            (None, None) => Ok(option.id.clone()),
        };
        match read {
            Ok(id) => option.id = id,
            Err(reason) => self.unreadable(number, reason),
        }
    }

    /// `input_ids_dim0=1,  input_ids_dim1=1024,`
    fn dims(&mut self, line: &str) {
        for pair in line.split(',') {
            let Some((before, value)) = pair.split_once('=') else { continue };
            let name =
                before.rsplit(|one: char| !(one.is_ascii_alphanumeric() || one == '_')).next().unwrap_or_default();
            let begins = name.starts_with(|one: char| one.is_ascii_alphabetic() || one == '_');
            if let (true, Ok(value)) = (begins && self.log.dims.len() < MOST_PLANS, value.trim().parse()) {
                self.log.dims.insert(name.to_owned(), value);
            }
        }
    }

    fn unreadable(&mut self, line: usize, reason: PlanError) {
        let unreadable = &mut self.log.unreadable;
        unreadable.count += 1;
        if unreadable.first.len() < MOST_SHOWN {
            unreadable.first.push((line, reason.to_string()));
        }
    }
}

/// Parses exactly one id, within the bound of its length.
fn bounded(text: &str) -> Result<Id, PlanError> {
    let combination: Combination = text.parse()?;
    match combination.ids() {
        [id] => Ok(id.clone()),
        _ => Err(PlanError::NotOne(quoted(text))),
    }
}

/// The list of ids in the line above a table, in the words of each version. `None` if it has none: a path, or the level
/// that enables all.
fn enabled(line: &str) -> Option<Vec<Combination>> {
    let forms =
        [("Optimization Config: [", "]"), ("User config: ", ", probe level"), ("RecomputeConfig: ", ", ProbeLevel")];
    forms.iter().find_map(|(begin, end)| {
        let (_, rest) = line.split_once(begin)?;
        let (list, _) = rest.split_once(end)?;
        plans::listed(list).ok().filter(|plans| !plans.is_empty())
    })
}

/// What stands behind the number in a row: `ON   :  BiasGelu+:1:-1   1   20,951,040   20480.0*dim0*(dim1 - 1)`.
struct Row<'a> {
    is_on: bool,
    columns: &'a str,
}

/// The number of the plan in `… - Plan 1     :  OFF  :  …`, and what follows. `None` if the line is no row.
fn row(line: &str) -> Option<(u64, Row<'_>)> {
    line.match_indices("Plan ").find_map(|(at, plan)| {
        let rest = line.get(at + plan.len()..)?.trim_start();
        let (number, rest) = rest.split_at_checked(rest.bytes().take_while(u8::is_ascii_digit).count())?;
        let state = rest.trim_start().strip_prefix(':')?.trim_start();
        let (is_on, rest) = match state.strip_prefix("ON") {
            Some(rest) => (true, rest),
            None => (false, state.strip_prefix("OFF")?),
        };
        let columns = rest.trim_start().strip_prefix(':')?.trim();
        Some((number.parse().ok()?, Row { is_on, columns }))
    })
}

impl Row<'_> {
    fn plan(&self, line: usize) -> Result<Plan, PlanError> {
        let (id, rest) = word(self.columns);
        let mut plan = Plan {
            combination: id.parse()?,
            is_on: self.is_on,
            frequency: None,
            saving_bytes: None,
            expression: None,
            line,
        };
        let (frequency, rest) = word(rest);
        // Above the log level `INFO` a row ends with its id.
        if frequency.is_empty() {
            return Ok(plan);
        }
        let frequency = frequency.parse().map_err(|_| PlanError::Frequency(quoted(frequency)))?;
        plan.frequency = Some(frequency);
        let (saving, after) = word(rest);
        // A saving without a value for the first batch's dimensions is printed as an expression. SymPy writes single blanks in
        // it, while columns are at least two blanks apart.
        let expression = match printed(saving)? {
            Some(bytes) => {
                plan.saving_bytes = Some(bytes);
                after
            }
            None => rest.rsplit("  ").map(str::trim).find(|column| !column.is_empty()).unwrap_or_default(),
        };
        if expression.len() > expression::MOST_BYTES {
            return Err(PlanError::SavingTooLong(expression.len()));
        }
        plan.expression = (!expression.is_empty()).then(|| expression.to_owned());
        Ok(plan)
    }
}

/// The first word, and the rest.
fn word(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (word, rest.trim_start())
}

/// Bytes as `134,217,728`. `None` if it is no number.
fn printed(text: &str) -> Result<Option<u64>, PlanError> {
    let mut groups = text.split(',');
    let is_digits = |group: &str| !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit());
    let is_number = groups.next().is_some_and(is_digits) && groups.all(|group| is_digits(group) && group.len() == 3);
    match is_number {
        true => match text.replace(',', "").parse() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(_) => Err(PlanError::SavingTooLarge(quoted(text))),
        },
        false => Ok(None),
    }
}

#[cfg(test)]
mod tests;
