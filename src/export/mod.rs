//! The exporters: each turns the same [`Families`](crate::metrics::Families) into one wire format.

pub mod otlp;
pub mod prometheus;
