//! Locates each key of a TOML text, so that a fault can be reported with its key and its line.

use std::ops::Range;
use toml::de::{DeTable, DeValue};

/// Every key and list element of one text.
pub(super) struct KeyPlaces<'a> {
    text: &'a str,
    entries: Vec<Entry>,
}

struct Entry {
    /// Such as `jobs[0].phases[1].duration`.
    path: String,
    /// The key; for a list element, the element.
    key: Range<usize>,
    /// The value; for a table with a header of its own, the header.
    value: Range<usize>,
}

impl<'a> KeyPlaces<'a> {
    /// The places of a text; none if it is not TOML.
    pub(super) fn of(text: &'a str) -> Self {
        let mut entries = Vec::new();
        if let Ok(table) = DeTable::parse(text) {
            walk_table(table.get_ref(), "", &mut entries);
        }
        Self { text, entries }
    }

    /// The key that a span of the text belongs to: the innermost one around it.
    pub(super) fn path_at(&self, span: &Range<usize>) -> Option<&str> {
        let within = |outer: &Range<usize>| outer.start <= span.start && span.end <= outer.end;
        let holding = self.entries.iter().filter(|entry| within(&entry.key) || within(&entry.value));
        holding.min_by_key(|entry| (entry.value.len(), std::cmp::Reverse(entry.path.len()))).map(|e| e.path.as_str())
    }

    /// The line, from 1, of a key, or of the nearest enclosing key if it is not in the text.
    pub(super) fn line_of(&self, path: &str) -> Option<usize> {
        let mut path = path;
        loop {
            if let Some(entry) = self.entries.iter().find(|entry| entry.path == path) {
                return Some(self.line_at(entry.key.start));
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }

    /// The line, from 1, of an offset in the text.
    pub(super) fn line_at(&self, offset: usize) -> usize {
        1 + self.text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
    }
}

fn walk_table(table: &DeTable<'_>, prefix: &str, entries: &mut Vec<Entry>) {
    for (key, value) in table {
        let name = key.get_ref();
        let path = if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") };
        entries.push(Entry { path: path.clone(), key: key.span(), value: value.span() });
        walk_value(value.get_ref(), &path, entries);
    }
}

fn walk_value(value: &DeValue<'_>, path: &str, entries: &mut Vec<Entry>) {
    match value {
        DeValue::Table(table) => walk_table(table, path, entries),
        DeValue::Array(array) => {
            for (index, element) in array.iter().enumerate() {
                let path = format!("{path}[{index}]");
                entries.push(Entry { path: path.clone(), key: element.span(), value: element.span() });
                walk_value(element.get_ref(), &path, entries);
            }
        }
        _ => {}
    }
}
