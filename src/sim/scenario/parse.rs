//! Parses TOML into a checked [`Scenario`], and holds the scenarios that are shipped with the program.

use super::place::KeyPlaces;
use super::{Scenario, check};
use std::path::Path;
use std::{fmt, io};

/// The scenarios that are shipped with the program, by name.
pub(super) const SHIPPED: &[(&str, &str)] = &[
    ("demo", include_str!("../../../config/scenarios/demo.toml")),
    ("spike", include_str!("../../../config/scenarios/spike.toml")),
    ("faults", include_str!("../../../config/scenarios/faults.toml")),
    ("pipeline", include_str!("../../../config/scenarios/pipeline.toml")),
];

/// The largest scenario file: a thousand times the longest shipped one.
const MOST_BYTES: u64 = 1 << 20;

/// One error in a scenario.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScenarioFault {
    /// Where it is, such as `jobs[0].phases[1].duration`; empty if the text is not TOML.
    pub key: String,
    /// The line, from 1, if known.
    pub line: Option<usize>,
    /// What is wrong.
    pub message: String,
}

/// Why a scenario is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ScenarioError {
    /// The file's name, as given.
    pub file: String,
    /// All errors; for a text that cannot be parsed, only the first.
    pub faults: Vec<ScenarioFault>,
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
    /// It cannot be read, or is longer than a mebibyte.
    pub fn text(path: &Path) -> io::Result<String> {
        highwater_engine::files::read_text(path, MOST_BYTES)
    }

    /// Parses a scenario. Errors contain `file_name`, from which the scenario also gets its name.
    ///
    /// # Errors
    /// [`ScenarioError`] with every fault, its key, file and line.
    pub fn parse(text: &str, file_name: &str) -> Result<Self, ScenarioError> {
        let refuse = |faults| ScenarioError { file: file_name.to_owned(), faults };
        let mut scenario: Scenario = toml::from_str(text).map_err(|error| refuse(vec![unreadable(text, &error)]))?;
        let mut faults = check::faults(&scenario);
        if !faults.is_empty() {
            let places = KeyPlaces::of(text);
            faults.iter_mut().for_each(|fault| fault.line = places.line_of(&fault.key));
            return Err(refuse(faults));
        }
        scenario.name = Path::new(file_name).file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        Ok(scenario)
    }

    /// The scenario of this name, if it is one of [`shipped_names`](Self::shipped_names); `None` for any other name.
    #[must_use]
    pub fn shipped(name: &str) -> Option<Self> {
        let (_, text) = SHIPPED.iter().find(|(shipped, _)| *shipped == name)?;
        Some(Self::parse(text, &format!("{name}.toml")).expect("a scenario inside the program is held by a test"))
    }

    /// The names of the scenarios that are shipped with the program.
    pub fn shipped_names() -> impl Iterator<Item = &'static str> {
        SHIPPED.iter().map(|(name, _)| *name)
    }

    /// The scenario of `highwater demo`: four GPUs, a healthy job and one that comes near OOM every minute.
    #[must_use]
    pub fn demo() -> Self {
        Self::shipped("demo").expect("demo is shipped")
    }
}

fn unreadable(text: &str, error: &toml::de::Error) -> ScenarioFault {
    let places = KeyPlaces::of(text);
    let span = error.span();
    let key = span.as_ref().and_then(|span| places.path_at(span)).unwrap_or_default().to_owned();
    ScenarioFault { key, line: span.map(|span| places.line_at(span.start)), message: error.message().to_owned() }
}
