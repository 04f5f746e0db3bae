//! YAML as a tree of tables, of which each key is taken by whoever knows it, and every other is a fault.
//!
//! Enters: text that is not trusted to be small once it is parsed. Leaves: values, and faults with the path of their key.

use config::{FileFormat, Map, Source as _, Value, ValueKind};

/// Sequences inside one another on one line.
const MOST_DEPTH: usize = 16;

/// The tree of a text, of which the parser makes no more than the text is long.
pub(super) fn table(text: &str) -> Result<Map<String, Value>, String> {
    for (number, line) in text.lines().enumerate() {
        let told = |what: &str| Err(format!("line {}: {what}", number + 1));
        if has_anchor(line) {
            return told("anchors and aliases are not supported");
        }
        if line.split_whitespace().take_while(|word| matches!(*word, "-" | "?")).count() > MOST_DEPTH {
            return told("too many sequences inside one another");
        }
    }
    config::File::from_str(text, FileFormat::Yaml).collect().map_err(|error| error.to_string())
}

/// Whether an anchor, which aliases multiply, may begin on this line: no hash, certificate or header has the sign there.
fn has_anchor(line: &str) -> bool {
    let mut before = ' ';
    line.chars().any(|character| {
        let begins = before.is_whitespace() || "[{,:-?".contains(before);
        before = character;
        character == '&' && begins
    })
}

/// One table of the file, of which keys are taken until none is left.
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

    /// The value of a key that has one.
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

    /// A list of which each text is read by `read`, which tells what is wrong with one.
    pub(super) fn list<T>(&mut self, key: &str, read: impl Fn(&str) -> Result<T, String>) -> Vec<T> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let Ok(values) = value.into_array() else {
            self.fault(key, "is not a list");
            return Vec::new();
        };
        let mut list = Vec::new();
        for value in values {
            let text = value.into_string().map_err(|_| "has something that is no text".to_owned());
            match text.and_then(|text| read(&text)) {
                Ok(one) => list.push(one),
                Err(problem) => self.fault(key, problem),
            }
        }
        list
    }

    /// The keys that nobody took yet, in order: a table has none.
    pub(super) fn keys(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.table.keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    /// Tells of each key that nobody took.
    pub(super) fn finish(mut self) {
        for key in self.keys() {
            self.fault(&key, "is not supported");
        }
    }
}
