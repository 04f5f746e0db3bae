//! YAML as a tree of tables. Each known key is taken from it, and every key left over is a fault.
//!
//! Enters: untrusted text that could grow when parsed. Leaves: values, and faults with the path of their key.

use config::{FileFormat, Map, Source as _, Value, ValueKind};

/// Nested sequences allowed on one line.
const MOST_DEPTH: usize = 16;

/// Parses a text into a tree that is no larger than the text.
pub(super) fn table(text: &str) -> Result<Map<String, Value>, String> {
    for (number, line) in text.lines().enumerate() {
        let refused = |what: &str| Err(format!("line {}: {what}", number + 1));
        if has_anchor(line) {
            return refused("anchors and aliases are not supported");
        }
        if line.split_whitespace().take_while(|word| matches!(*word, "-" | "?")).count() > MOST_DEPTH {
            return refused("too many sequences inside one another");
        }
    }
    config::File::from_str(text, FileFormat::Yaml).collect().map_err(|error| error.to_string())
}

/// Whether an anchor, which aliases multiply, may begin on this line. Hashes, certificates and headers never have `&`
/// there.
fn has_anchor(line: &str) -> bool {
    let mut before = ' ';
    line.chars().any(|character| {
        let begins = before.is_whitespace() || "[{,:-?".contains(before);
        before = character;
        character == '&' && begins
    })
}

/// One table of the file, from which keys are taken until none is left.
pub(super) struct Section<'a> {
    pub name: String,
    pub table: Map<String, Value>,
    pub faults: &'a mut Vec<String>,
}

impl Section<'_> {
    fn path(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    pub(super) fn fault(&mut self, key: &str, problem: impl std::fmt::Display) {
        let path = self.path(key);
        self.faults.push(format!("{path}: {problem}"));
    }

    /// The value of a key, if it has one.
    fn take(&mut self, key: &str) -> Option<Value> {
        self.table.remove(key).filter(|value| value.kind != ValueKind::Nil)
    }

    pub(super) fn section(&mut self, key: &str) -> Option<Section<'_>> {
        let name = self.path(key);
        match self.take(key)?.into_table() {
            Ok(table) => Some(Section { name, table, faults: self.faults }),
            Err(_) => {
                self.fault(key, "is not a table of keys");
                None
            }
        }
    }

    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        match self.take(key)?.into_string() {
            Ok(text) => Some(text).filter(|text| !text.is_empty()),
            Err(_) => {
                self.fault(key, "is not a single value");
                None
            }
        }
    }

    pub(super) fn boolean(&mut self, key: &str) -> Option<bool> {
        match self.take(key)?.into_bool() {
            Ok(boolean) => Some(boolean),
            Err(_) => {
                self.fault(key, "is neither true nor false");
                None
            }
        }
    }

    /// A list whose items are parsed by `read`, which returns what is wrong with an item.
    pub(super) fn list<T>(&mut self, key: &str, read: impl Fn(&str) -> Result<T, String>) -> Vec<T> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let Ok(values) = value.into_array() else {
            self.fault(key, "is not a list");
            return Vec::new();
        };
        let mut list = Vec::new();
        for value in values {
            let text = value.into_string().map_err(|_| "has an item that is not text".to_owned());
            match text.and_then(|text| read(&text)) {
                Ok(one) => list.push(one),
                Err(problem) => self.fault(key, problem),
            }
        }
        list
    }

    /// The keys not taken yet, in order: a table has no order.
    pub(super) fn keys(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.table.keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    /// Reports each key that was not taken.
    pub(super) fn finish(mut self) {
        for key in self.keys() {
            self.fault(&key, "is not supported");
        }
    }
}
