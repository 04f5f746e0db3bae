//! Stories of findings.
