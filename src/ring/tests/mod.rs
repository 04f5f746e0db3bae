//! The ring against a model without tricks, under contention, in size, and (with `--cfg loom`) in every order of
//! memory accesses.

#[cfg(not(loom))]
mod code;
#[cfg(not(loom))]
mod contention;
#[cfg(loom)]
mod interleavings;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
mod properties;
#[cfg(not(loom))]
mod sizes;
#[cfg(not(loom))]
mod stories;
