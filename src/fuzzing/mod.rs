//! The entry points of untrusted data, as functions of bytes: for the fuzz targets in `fuzz/` and for `make test`.
//!
//! Enters: any bytes. Leaves: nothing, or a panic if an invariant is broken. Invariants: an input needs no thread and
//! no runtime of its own, so that millions of them take minutes; no input affects another, except through the bounded
//! state of a few hundred requests in `http`. Absent on purpose: anything that a release build contains.

mod annotations;
mod folder;
mod framework;
mod http;
mod import;
mod recording;
mod replay;
mod scenario;
mod settings;
#[cfg(test)]
mod tests;
mod world;

pub use crate::export::otlp::fuzzing::otlp_reply;
pub use annotations::annotations;
pub use framework::framework;
pub use highwater_core::ring::fuzzing::ring;
pub use highwater_engine::intake::fuzzing::event_log;
pub use highwater_engine::place::kubelet::fuzzing::kubelet;
pub use http::http;
pub use import::import;
pub use recording::recording;
pub use replay::replay;
pub use scenario::scenario;
pub use settings::settings;
#[cfg(test)]
pub(crate) use world::node;

use highwater_core::fuzzing::parts;
