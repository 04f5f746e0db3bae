//! A report as text: lines and tables. As they are for files and pipes, or fitted to a terminal.
//!
//! Enters: lines and tables, in order. Leaves: their text. Invariant: fitting loses no cell and no word: a table that is too wide becomes
//! several, each with the first one's key columns, and only a name that alone is too long is cut.

use super::table::Table;

use std::fmt::{self, Write as _};

/// Lines and tables.
#[derive(Debug, Clone, Default)]
pub struct Printed {
    parts: Vec<Part>,
}

#[derive(Debug, Clone)]
enum Part {
    Lines(String),
    Table(Table),
}

/// The words with which the line of a finding begins, each with its mark and the parameters of a terminal's colour.
const SEVERITIES: [(&str, &str, &str); 3] = [("critical", "●", "1;31"), ("warning", "▲", "33"), ("info", "·", "36")];

/// A terminal.
#[derive(Debug, Clone, Copy)]
pub struct Terminal {
    /// How many characters fit into a line.
    pub columns: usize,
    /// Whether it shows colours, and is to.
    pub has_color: bool,
    /// Whether it shows other characters than ASCII.
    pub is_unicode: bool,
}

impl fmt::Write for Printed {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        match self.parts.last_mut() {
            Some(Part::Lines(lines)) => lines.push_str(text),
            _ => self.parts.push(Part::Lines(text.to_owned())),
        }
        Ok(())
    }
}

impl fmt::Display for Printed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.iter().try_for_each(|part| match part {
            Part::Lines(lines) => f.write_str(lines),
            Part::Table(table) => write!(f, "{table}"),
        })
    }
}

impl Printed {
    /// Adds a table.
    pub(super) fn table(&mut self, table: Table) {
        self.parts.push(Part::Table(table));
    }

    /// Adds what another one has.
    pub fn append(&mut self, other: Self) {
        for part in other.parts {
            match part {
                Part::Lines(lines) => drop(self.write_str(&lines)),
                Part::Table(table) => self.table(table),
            }
        }
    }

    /// The text for a terminal: lines are broken between words, tables fit, and findings have a mark and a colour of their severity.
    #[must_use]
    pub fn fitted(&self, terminal: Terminal) -> String {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Lines(lines) => lines.lines().for_each(|line| fit(line, terminal, &mut text)),
                Part::Table(table) => text.push_str(&table.fitted(terminal.columns)),
            }
        }
        text
    }
}

/// Adds a line, broken between words. What follows the first line is indented by as much, and by two more.
fn fit(line: &str, terminal: Terminal, out: &mut String) {
    let indent = line.len() - line.trim_start_matches(' ').len();
    let severity =
        SEVERITIES.iter().find(|(word, ..)| line.strip_prefix(word).is_some_and(|rest| rest.starts_with(' ')));
    let mark = match severity {
        Some((_, mark, _)) if terminal.is_unicode => format!("{mark} "),
        _ => String::new(),
    };
    let mut column = indent + mark.chars().count();
    out.push_str(&" ".repeat(indent));
    let begin =
        severity.filter(|_| terminal.has_color).map(|(_, _, color)| format!("\x1b[{color}m")).unwrap_or_default();
    out.push_str(&begin);
    out.push_str(&mark);
    for (nth, word) in line.split_whitespace().enumerate() {
        let long = word.chars().count();
        if nth > 0 && column + 1 + long > terminal.columns {
            out.push('\n');
            column = (indent + 2).min(terminal.columns / 2);
            out.push_str(&" ".repeat(column));
        } else if nth > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += long;
        // The colour is that of the severity's word.
        if nth == 0 && !begin.is_empty() {
            out.push_str("\x1b[0m");
        }
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Terminal = Terminal { columns: 30, has_color: false, is_unicode: true };

    #[test]
    fn lines_are_broken_between_words_and_findings_have_marks_and_colours() {
        let mut printed = Printed::default();
        writeln!(
            printed,
            "critical oom from 1.000 s to the end: it ran out\n    The job marked it, and more words.\n\ninformation"
        )
        .unwrap();
        let wanted = "● critical oom from 1.000 s to\n  the end: it ran out\n    The job marked it, and\n      more words.\n\ninformation\n";
        assert_eq!(printed.fitted(PLAIN), wanted);
        let color = Terminal { has_color: true, is_unicode: false, ..PLAIN };
        assert!(printed.fitted(color).starts_with("\x1b[1;31mcritical\x1b[0m oom from"), "{}", printed.fitted(color));
        assert!(printed.fitted(Terminal { columns: 1, ..PLAIN }).contains("information"));
    }
}
