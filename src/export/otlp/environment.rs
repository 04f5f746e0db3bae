//! The environment's variables, and the faults in them.

use std::fmt;

/// The setting that is read beside the variables. A fault in it has this name in place of a variable's.
pub const OF_KEY: &str = "otlp.endpoint";

/// A variable, or the setting [`OF_KEY`], that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvironmentFault {
    /// Its name, or [`OF_KEY`].
    pub variable: String,
    /// What is wrong with its value.
    pub problem: String,
}

impl fmt::Display for EnvironmentFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "environment variable {}: {}", self.variable, self.problem)
    }
}

/// The variables, and the faults found so far. An empty variable counts as not set.
pub(super) struct Environment<'a> {
    variables: &'a [(String, String)],
    pub faults: Vec<EnvironmentFault>,
}

impl<'a> Environment<'a> {
    pub fn of(variables: &'a [(String, String)]) -> Self {
        Self { variables, faults: Vec::new() }
    }

    pub fn get(&self, variable: &str) -> Option<&'a str> {
        let found = self.variables.iter().find(|(name, _)| name == variable);
        found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
    }

    /// Reads a variable. If it cannot be understood, notes a fault.
    pub fn read<T>(&mut self, variable: &str, read: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        match read(self.get(variable)?) {
            Ok(value) => Some(value),
            Err(problem) => {
                self.faults.push(EnvironmentFault { variable: variable.to_owned(), problem });
                None
            }
        }
    }
}
