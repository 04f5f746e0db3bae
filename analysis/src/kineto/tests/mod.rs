//! Stories about whole traces: from their text to what is said of them.

mod ranks;
mod recorded;
mod steps;
mod story;
