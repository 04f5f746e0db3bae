//! Tables, sizes and times as text.

use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_engine::recording::{printable, short};
use std::fmt::{self, Write as _};

/// Maximum width of a cell, characters. Names come from untrusted files, and every row is padded to the widest cell.
const WIDEST: usize = 200;

/// A table with a header, its columns as wide as their widest cell.
#[derive(Debug, Clone, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
    /// How many columns say whose a row is, beside the first.
    more_keys: usize,
}

impl Table {
    /// A table with these columns.
    #[must_use]
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { rows: vec![header.map(str::to_owned).to_vec()], more_keys: 0 }
    }

    /// Sets how many of the first columns say whose a row is; one, if this is not called.
    #[must_use]
    pub fn keys(self, count: usize) -> Self {
        Self { more_keys: count.saturating_sub(1), ..self }
    }

    /// Adds a row.
    pub fn push(&mut self, row: impl AsRef<[String]>) {
        self.rows.push(row.as_ref().iter().map(|cell| printable(&short(cell, WIDEST))).collect());
    }

    /// The table for a terminal, in a number of columns of characters: as one, or as several below each other.
    #[must_use]
    pub fn fitted(&self, columns: usize) -> String {
        let count = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let keys = (1 + self.more_keys).min(count);
        let mut widths: Vec<usize> =
            (0..count).map(|column| self.cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0)).collect();
        // A column without a header belongs to the one before it.
        let header = |column: usize| self.rows.first().and_then(|head| head.get(column)).map_or("", String::as_str);
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for column in keys..count {
            match groups.last_mut().filter(|_| header(column).is_empty()) {
                Some(group) => group.push(column),
                None => groups.push(vec![column]),
            }
        }
        let wide = |group: &[usize], widths: &[usize]| group.iter().map(|column| widths[*column] + 2).sum::<usize>();
        // Keys leave room for the widest group, or for half: the widest of them is cut first.
        let widest = groups.iter().map(|group| wide(group, &widths)).max().unwrap_or(0).min(columns / 2);
        let all_keys: Vec<usize> = (0..keys).collect();
        while wide(&all_keys, &widths) + widest > columns {
            let Some(key) = widths[..keys].iter_mut().filter(|width| **width > LEAST_KEY).max() else { break };
            *key -= 1;
        }
        let room = columns.saturating_sub(wide(&all_keys, &widths));
        // What alone is too wide is cut.
        groups.iter().filter(|group| group.len() == 1).for_each(|group| {
            let width = &mut widths[group[0]];
            *width = (*width).min(room.saturating_sub(2).max(LEAST_KEY));
        });
        let mut parts = vec![all_keys.clone()];
        for group in groups {
            let last = parts
                .last_mut()
                .filter(|part| wide(part, &widths) + wide(&group, &widths) <= columns || part.len() == keys);
            match last {
                Some(part) => part.extend(group),
                None => parts.push([all_keys.clone(), group].concat()),
            }
        }
        let words: Vec<bool> = (0..count).map(|column| self.has_words(column)).collect();
        let mut text = String::new();
        for part in parts {
            self.rows.iter().for_each(|row| line(row, &part, &widths, &words, &mut text));
        }
        text
    }

    fn cells(&self, column: usize) -> impl Iterator<Item = &String> {
        self.rows.iter().filter_map(move |row| row.get(column))
    }

    /// Whether the cells of a column are words: most of them begin with a letter or a path.
    fn has_words(&self, column: usize) -> bool {
        let is_word =
            |cell: &&String| cell.chars().next().is_some_and(|first| first.is_alphabetic() || "/.<_".contains(first));
        let cells = || self.cells(column).skip(1).filter(|cell| !cell.is_empty());
        2 * cells().filter(is_word).count() > cells().count()
    }
}

/// Adds the columns of a row that are shown.
fn line(row: &[String], shown: &[usize], widths: &[usize], words: &[bool], out: &mut String) {
    let mut line = String::new();
    for &column in shown {
        let width = widths[column];
        let cell = row.get(column).map(|cell| cut(cell, width)).unwrap_or_default();
        let _ = if words[column] { write!(line, "  {cell:<width$}") } else { write!(line, "  {cell:>width$}") };
    }
    let _ = writeln!(out, "{}", line.trim_end());
}

/// A cell of at most a number of characters.
fn cut(cell: &str, width: usize) -> String {
    // What shortens it adds a mark.
    if cell.chars().count() > width { short(cell, width.saturating_sub(1)) } else { cell.to_owned() }
}

/// The least width of a name that is cut.
const LEAST_KEY: usize = 8;

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width =
            |column: usize| self.rows.iter().filter_map(move |row| row.get(column)).map(|cell| cell.chars().count());
        let widths: Vec<usize> = (0..columns).map(|column| width(column).max().unwrap_or(0)).collect();
        for row in &self.rows {
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}", width = *width)).collect();
            writeln!(f, "  {}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// Bytes for people, with two decimals: in GiB from 1 GiB on, below that in MiB.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "shown to a hundredth")]
pub fn size(bytes: u64) -> String {
    const MIB: f64 = 1_048_576.0;
    if bytes >= 1 << 30 {
        format!("{:.2} GiB", bytes as f64 / MIB / 1024.0)
    } else {
        format!("{:.2} MiB", bytes as f64 / MIB)
    }
}

pub(crate) fn size_if(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "?".to_owned(), size)
}

#[allow(clippy::cast_precision_loss, reason = "shown to a millisecond")]
pub(crate) fn seconds(duration_ns: i64) -> String {
    format!("{:.3} s", duration_ns as f64 / SECOND_NS as f64)
}

#[allow(clippy::cast_precision_loss, reason = "shown to a tenth")]
pub(crate) fn milliseconds(duration_ns: i64) -> String {
    format!("{:.1} ms", duration_ns as f64 / MILLISECOND_NS as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_the_unit_that_keeps_them_short() {
        assert_eq!(
            [0, (1 << 30) - 1, 1 << 30, 149_904_425_779].map(size),
            ["0.00 MiB", "1024.00 MiB", "1.00 GiB", "139.61 GiB"]
        );
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["a", "bcd"]);
        table.push(["12".to_owned(), "µ".to_owned()]);
        let mut long = table.clone();
        long.push(["x".repeat(100_000), String::new()]);
        assert_eq!(long.to_string().lines().map(|line| line.chars().count()).max(), Some(208));
        assert_eq!(table.to_string(), "   a  bcd\n  12    µ\n");
    }

    #[test]
    fn a_table_that_is_too_wide_becomes_several_with_the_same_keys() {
        let mut table = Table::new(["job", "rank", "phase", "count", "mean", "in step"]).keys(3);
        table.push([
            "a".to_owned(),
            "0".to_owned(),
            "forward".to_owned(),
            "12".to_owned(),
            "3.0 ms".to_owned(),
            "7".to_owned(),
        ]);
        assert_eq!(
            table.fitted(80),
            "  job  rank  phase    count    mean  in step\n  a       0  forward     12  3.0 ms        7\n"
        );
        assert_eq!(
            table.fitted(38),
            "  job  rank  phase    count    mean\n  a       0  forward     12  3.0 ms\n  job  rank  phase    in step\n  a       0  forward        7\n"
        );
        for columns in 1..80 {
            let text = table.fitted(columns);
            assert!(text.contains("12") && text.contains('7'), "{columns}: {text}");
            assert!(columns < 38 || text.lines().all(|line| line.chars().count() <= columns), "{columns}: {text}");
        }
        // A long name is cut, and leaves room for the others.
        let mut table = Table::new(["path", "bytes"]);
        table.push(["/a/very/long/path/of/a/file.py:12".to_owned(), "1 GiB".to_owned()]);
        let text = table.fitted(20);
        assert!(text.lines().all(|line| line.chars().count() <= 20) && text.contains("1 GiB"), "{text}");
        assert_eq!(Table::default().fitted(20), "");
    }
}
