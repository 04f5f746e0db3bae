//! From TOML to a checked [`Scenario`], and the scenarios that come with the program.

use super::place::Places;
use super::{Scenario, check};
use std::path::Path;
use std::{fmt, io};

/// The scenarios that come with the program, by name.
pub(super) const SHIPPED: &[(&str, &str)] = &[
    ("demo", include_str!("../../../config/scenarios/demo.toml")),
    ("spike", include_str!("../../../config/scenarios/spike.toml")),
    ("faults", include_str!("../../../config/scenarios/faults.toml")),
];

/// The largest file of a scenario: a thousand times the longest that is shipped.
const MOST_BYTES: u64 = 1 << 20;

/// One thing that is wrong in a scenario.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where it is, as `jobs[0].phases[1].duration`; empty where the text is no TOML.
    pub key: String,
    /// The line, from 1, where one is known.
    pub line: Option<usize>,
    /// What is wrong.
    pub message: String,
}

/// Why a scenario is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ScenarioError {
    /// The file's name, as it was given.
    pub file: String,
    /// Everything that is wrong; for a text that cannot be read at all, the first thing.
    pub faults: Vec<Fault>,
}

impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, fault) in self.faults.iter().enumerate() {
            let newline = if position == 0 { "" } else { "\n" };
            write!(f, "{newline}{}:", self.file)?;
            if let Some(line) = fault.line {
                write!(f, "{line}:")?;
            }
            if !fault.key.is_empty() {
                write!(f, " {}:", fault.key)?;
            }
            write!(f, " {}", fault.message)?;
        }
        Ok(())
    }
}

impl Scenario {
    /// The text of a scenario's file.
    ///
    /// # Errors
    /// Where it cannot be read, or is longer than a mebibyte.
    pub fn text(path: &Path) -> io::Result<String> {
        crate::files::read_text(path, MOST_BYTES)
    }

    /// Reads a scenario. `file_name` is told in errors, and gives the scenario its name.
    ///
    /// # Errors
    /// [`ScenarioError`] with every fault, its key, file and line.
    pub fn parse(text: &str, file_name: &str) -> Result<Self, ScenarioError> {
        let refuse = |faults| ScenarioError { file: file_name.to_owned(), faults };
        let mut scenario: Scenario = toml::from_str(text).map_err(|error| refuse(vec![unreadable(text, &error)]))?;
        let mut faults = check::faults(&scenario);
        if !faults.is_empty() {
            let places = Places::of(text);
            faults.iter_mut().for_each(|fault| fault.line = places.line_of(&fault.key));
            return Err(refuse(faults));
        }
        scenario.name = Path::new(file_name).file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        Ok(scenario)
    }

    /// A scenario that comes with the program: `demo`, `spike` or `faults`; `None` for any other name.
    #[must_use]
    pub fn shipped(name: &str) -> Option<Self> {
        let (_, text) = SHIPPED.iter().find(|(shipped, _)| *shipped == name)?;
        Some(Self::parse(text, &format!("{name}.toml")).expect("a scenario inside the program is held by a test"))
    }

    /// The scenario of `highwater demo`: four GPUs, a healthy job and one that goes near OOM every minute.
    #[must_use]
    pub fn demo() -> Self {
        Self::shipped("demo").expect("demo is shipped")
    }
}

fn unreadable(text: &str, error: &toml::de::Error) -> Fault {
    let places = Places::of(text);
    let span = error.span();
    let key = span.as_ref().and_then(|span| places.path_at(span)).unwrap_or_default().to_owned();
    Fault { key, line: span.map(|span| places.line_at(span.start)), message: error.message().to_owned() }
}
