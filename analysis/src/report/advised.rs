//! Advice beside findings of too little memory: where to checkpoint, if the recording has the job's layers.
//!
//! Enters: a report with findings and layer profiles. Leaves: for each job that lacked memory, advice with numbers.
//! Invariant: nothing is advised from an incomplete profile: the daemon lacked records, or the report had no room for
//! them.

use super::layers::Profile;
use super::model::{Found, Report};
use super::table::size;
use crate::advise::{Checkpoints, ModuleAdvice, StepLayers, checkpoints};
use serde::Serialize;
use std::collections::BTreeSet;

/// Findings that less memory would mend.
const KINDS: [&str; 3] = ["low_headroom", "allocator_thrash", "comm_starvation"];
/// How many modules a sentence names.
const MOST_LISTED: usize = 4;
/// Jobs that are advised.
const MOST_JOBS: usize = 16;

/// What to change in one job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advised {
    /// The sentence for people.
    pub text: String,
    /// Where to checkpoint.
    pub checkpoints: Checkpoints,
}

/// The advice for each job that a finding says lacks memory.
#[must_use]
pub fn advised(report: &Report) -> Vec<Advised> {
    let lacking = report.found().iter().filter(|found| KINDS.contains(&found.kind.as_str()));
    let named: Vec<&Found> = lacking.collect();
    // A finding that names no job may be about any of them.
    let is_meant =
        |profile: &Profile| named.iter().any(|found| found.job.as_ref().is_none_or(|job| *job == profile.job));
    let mut jobs = BTreeSet::new();
    let mut profiles: Vec<&Profile> = report.layers.profiles.iter().filter(|profile| is_meant(profile)).collect();
    // Of each job, the rank with the most activations.
    profiles.sort_by_key(|profile| std::cmp::Reverse(profile.totals.activations));
    profiles.retain(|profile| jobs.len() < MOST_JOBS && jobs.insert(&profile.job));
    profiles.into_iter().filter_map(|profile| of(report, profile)).collect()
}

fn of(report: &Report, profile: &Profile) -> Option<Advised> {
    if profile.left_out > 0 || profile.missing > 0 {
        return None;
    }
    let mut layers = StepLayers::of(Some(profile.job.clone()), Some(profile.rank), profile.step);
    for record in &profile.records {
        layers.add(report.layers.names.get(record.name)?, record.allocated, &record.layer).ok()?;
    }
    let checkpoints = checkpoints(&layers, None, 0).ok().filter(|found| !found.split_modules.is_empty())?;
    Some(Advised { text: sentence(&checkpoints, &layers), checkpoints })
}

fn sentence(advice: &Checkpoints, layers: &StepLayers) -> String {
    if let Some(modules) = advice.modules.as_ref().filter(|advice| !advice.modules.is_empty()) {
        return format!("Memory of {}: {}", layers.whose(), of_modules(modules));
    }
    let (count, at) = (advice.split_modules.len(), advice.split_modules.join(", "));
    let mut text = format!(
        "Activations of {}: with {count} checkpoints, at {at}, at most {} are held at a time instead of {}.",
        layers.whose(),
        size(advice.max_memory),
        size(layers.activations()),
    );
    if let Some((observed, predicted)) = advice.observed_peak_bytes.zip(advice.predicted_peak_bytes) {
        text.push_str(&format!(" The allocator's peak, {}, should fall to {}.", size(observed), size(predicted)));
    }
    if let Some(seconds) = advice.recomputed_seconds.filter(|seconds| *seconds > 0.0) {
        text.push_str(&format!(" Each step runs forward passes of {:.1} ms a second time.", seconds * 1e3));
    }
    text
}

/// What checkpointing modules leads to, for people.
#[must_use]
pub fn of_modules(advice: &ModuleAdvice) -> String {
    let names: Vec<&str> = advice.modules.iter().map(|module| module.name.as_str()).collect();
    let (from, to) = (size(advice.observed_peak_bytes), size(advice.predicted_peak_bytes));
    let mut text = format!(
        "with {} checkpointed, each by itself, the peak of a step should fall from {from} to {to} in live tensors.",
        list(&names)
    );
    if let Some(seconds) = advice.recomputed_seconds.filter(|seconds| *seconds > 0.0) {
        text.push_str(&format!(
            " Forward passes that took {:.1} ms in the profiled step run a second time.",
            seconds * 1e3
        ));
    }
    text.push_str(&format!(" The peak then lies in {}.", advice.peak_at));
    text
}

/// Names of modules; of many, the first and how many.
fn list(names: &[&str]) -> String {
    match names {
        [one] => one.to_string(),
        few if few.len() <= MOST_LISTED => few.join(", "),
        many => format!("{} and {} more", many[..MOST_LISTED].join(", "), many.len() - MOST_LISTED),
    }
}
