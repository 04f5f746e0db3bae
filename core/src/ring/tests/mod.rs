//! The ring against a model without tricks, under contention, in size, and (with `--cfg highwater_loom`) in every order of
//! memory accesses.

#[cfg(not(highwater_loom))]
mod code;
#[cfg(not(highwater_loom))]
mod contention;
#[cfg(not(highwater_loom))]
mod cost;
#[cfg(highwater_loom)]
mod interleavings;
#[cfg(not(highwater_loom))]
mod layout;
#[cfg(not(highwater_loom))]
mod properties;
#[cfg(not(highwater_loom))]
mod sizes;
#[cfg(not(highwater_loom))]
mod stories;

#[cfg(not(highwater_loom))]
use super::model;
