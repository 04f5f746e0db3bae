//! Tables, sizes and times as text.

use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_engine::recording::{printable, short};
use std::fmt;

/// Maximum width of a cell, characters. Names come from untrusted files, and every row is padded to the widest cell.
const WIDEST: usize = 200;

/// A table with a header, its columns as wide as their widest cell.
#[derive(Debug, Clone, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    #[must_use]
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { rows: vec![header.map(str::to_owned).to_vec()] }
    }

    /// Adds a row.
    pub fn push(&mut self, row: impl AsRef<[String]>) {
        self.rows.push(row.as_ref().iter().map(|cell| printable(&short(cell, WIDEST))).collect());
    }
}

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
}
