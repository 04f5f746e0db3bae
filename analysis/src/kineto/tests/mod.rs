//! Stories about whole traces: from their text to what the analysis reports.

mod ranks;
mod recorded;
mod steps;
mod story;
