//! Chooses the plans to enable so that a job needs less memory by a given number of bytes.
//!
//! Enters: plans with what each saves, what is enabled already, which ids exclude each other, and a need. Leaves: the
//! fewest plans that save it, and the configuration that has them. Among choices of equally few plans, the one that saves
//! least beyond the need wins, as more saved is more computed again; among those that save the same, the earliest in the
//! table wins. Invariants: what is enabled stays enabled and saves nothing more; of plans that exclude each other at most
//! one is chosen; the search is bounded, and its answer says whether it is the best one. Absent on purpose: time. ONNX
//! Runtime does not say what a recomputation costs.

use super::plans::{Combination, Id, Plan, Strategy};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

mod search;
/// The most exclusions of all plans together: 8 MiB as numbers.
const MOST_EXCLUSIONS: usize = 1 << 20;

/// A plan, and what enabling it saves.
#[derive(Debug, Clone, Copy)]
pub struct Offer<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Bytes; `None` if not known: the plan is not chosen.
    pub saving_bytes: Option<u64>,
}

/// What to enable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The plans to enable, in the order of the table.
    pub enable: Vec<String>,
    /// Where they are among the offers, from 0.
    pub positions: Vec<usize>,
    /// What they save together, bytes.
    pub saving_bytes: u64,
    /// What is enabled already and stays so.
    pub keep: Vec<String>,
    /// The value of `ORTMODULE_MEMORY_OPT_CONFIG` in versions before May 2024: ids joined by commas.
    pub inline: String,
    /// The content of the file that it names since: a JSON list.
    pub json: String,
    /// Whether this choice is proven to be the best. If not, it suffices, but fewer or smaller plans may also.
    pub is_exact: bool,
    /// How many plans were left out because their savings are not known.
    pub unknown_savings: usize,
}

/// Why no choice can be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChooseError {
    /// No choice of plans saves the bytes needed.
    #[error(
        "{need_bytes} bytes cannot be saved: the plans that are not enabled save at most {most_bytes} bytes{}",
        left_out(*.unknown_savings)
    )]
    Unreachable {
        /// What was asked for, bytes.
        need_bytes: u64,
        /// The most that can be saved, bytes.
        most_bytes: u64,
        /// How many plans have no known saving.
        unknown_savings: usize,
    },
    /// The search ended before it found plans that save the bytes needed.
    #[error(
        "no plans that save {need_bytes} bytes were found among too many; some save {found_bytes} bytes{}",
        left_out(*.unknown_savings)
    )]
    NotFound {
        /// What was asked for, bytes.
        need_bytes: u64,
        /// The most that was found, bytes.
        found_bytes: u64,
        /// How many plans have no known saving.
        unknown_savings: usize,
    },
    /// Sums do not fit.
    #[error("the savings of all plans add up to more than 2^64 bytes")]
    TooManyBytes,
    /// The plans have too many exclusions.
    #[error("the plans exclude each other in more than {MOST_EXCLUSIONS} ways")]
    TooManyExclusions,
}

fn left_out(unknown: usize) -> String {
    match unknown {
        0 => String::new(),
        1 => "; the saving of 1 plan is not known".to_owned(),
        unknown => format!("; the savings of {unknown} plans are not known"),
    }
}

/// Chooses the plans to enable. `enabled` is the configuration in force where that is known; without it, the rows that the
/// log has `ON` are. `exclusive` has the ids of which one at most can be enabled.
///
/// # Errors
/// The need cannot be reached, or the search ended before it was reached; the error has how much can be saved. Or the savings
/// or the exclusions exceed their bounds.
pub fn choose(
    offers: &[Offer<'_>],
    enabled: Option<&[Combination]>,
    exclusive: &[Vec<Id>],
    need_bytes: u64,
) -> Result<Choice, ChooseError> {
    let kept = kept(offers, enabled);
    let (candidates, unknown_savings) = candidates(offers, &kept, &sets(exclusive))?;
    let sum = candidates.iter().try_fold(0_u64, |sum, candidate| sum.checked_add(candidate.saving));
    sum.ok_or(ChooseError::TooManyBytes)?;
    let found = search::search(candidates, need_bytes);
    if found.saving_bytes < need_bytes {
        let (most_bytes, found_bytes) = (found.saving_bytes, found.saving_bytes);
        return Err(match found.is_exact {
            true => ChooseError::Unreachable { need_bytes, most_bytes, unknown_savings },
            false => ChooseError::NotFound { need_bytes, found_bytes, unknown_savings },
        });
    }
    let chosen = found.positions.iter().filter_map(|position| offers.get(*position));
    let chosen: Vec<&Combination> = chosen.map(|offer| &offer.plan.combination).collect();
    let all = || kept.iter().chain(chosen.iter().copied());
    let mut ids = HashSet::new();
    let inline: Vec<String> =
        all().flat_map(Combination::ids).filter(|id| ids.insert(*id)).map(ToString::to_string).collect();
    Ok(Choice {
        inline: inline.join(","),
        json: all().map(ToString::to_string).collect::<serde_json::Value>().to_string(),
        enable: chosen.iter().map(ToString::to_string).collect(),
        keep: kept.iter().map(ToString::to_string).collect(),
        positions: found.positions,
        saving_bytes: found.saving_bytes,
        is_exact: found.is_exact,
        unknown_savings,
    })
}

/// What is enabled, reduced to the ids that take effect: of several ids of one cluster, ONNX Runtime takes the last, and an id
/// that changes nothing is left out. So a combination that is `ON` only because its ids are enabled one by one is not repeated.
fn kept(offers: &[Offer<'_>], enabled: Option<&[Combination]>) -> Vec<Combination> {
    let rows = || offers.iter().filter(|offer| offer.plan.is_on).map(|offer| &offer.plan.combination);
    let all: Vec<&Combination> = enabled.map_or_else(|| rows().collect(), |enabled| enabled.iter().collect());
    let ids = all.iter().flat_map(|combination| combination.ids());
    let last: HashMap<&str, usize> = ids.enumerate().map(|(nth, id)| (id.cluster.as_str(), nth)).collect();
    let mut nth = 0;
    let mut is_last = |id: &&Id| {
        nth += 1;
        last.get(id.cluster.as_str()) == Some(&(nth - 1)) && id.is_active()
    };
    all.iter().filter_map(|combination| combination.only(&mut is_last)).collect()
}

/// Something that at most one enabled plan has.
#[derive(PartialEq, Eq, Hash)]
enum Exclusion<'a> {
    /// A cluster: of several ids with the same one, ONNX Runtime takes the last.
    Cluster(&'a str),
    /// A set of ids of which one at most can be enabled, by number.
    Set(usize),
}

/// The sets that an id is in.
type Sets<'a> = HashMap<(&'a str, Strategy), Vec<usize>>;

fn sets(exclusive: &[Vec<Id>]) -> Sets<'_> {
    let mut sets = Sets::new();
    for (nth, set) in exclusive.iter().enumerate().filter(|(_, set)| set.len() > 1) {
        for id in set {
            sets.entry((id.cluster.as_str(), id.strategy)).or_default().push(nth);
        }
    }
    sets
}

/// The exclusions of a plan, perhaps with duplicates.
fn has<'a>(sets: &'a Sets<'a>, plan: &'a Combination) -> impl Iterator<Item = Exclusion<'a>> {
    plan.ids().iter().flat_map(move |id| {
        let sets = sets.get(&(id.cluster.as_str(), id.strategy)).into_iter().flatten();
        sets.map(|set| Exclusion::Set(*set)).chain([Exclusion::Cluster(&id.cluster)])
    })
}

/// The plans among which to choose, each with its exclusions as numbers, and the number of plans whose savings are not known.
fn candidates(
    offers: &[Offer<'_>],
    kept: &[Combination],
    sets: &Sets<'_>,
) -> Result<(Vec<search::Candidate>, usize), ChooseError> {
    let taken: HashSet<Exclusion<'_>> = kept.iter().flat_map(|plan| has(sets, plan)).collect();
    let enabled: HashSet<(&str, Strategy)> =
        kept.iter().flat_map(Combination::ids).map(|id| (id.cluster.as_str(), id.strategy)).collect();
    let is_enabled = |plan: &Combination| {
        plan.ids().iter().filter(|id| id.is_active()).all(|id| enabled.contains(&(id.cluster.as_str(), id.strategy)))
    };
    let (mut numbers, mut total, mut unknown) = (HashMap::new(), 0, 0);
    let mut candidates = Vec::new();
    for (position, offer) in offers.iter().enumerate().filter(|(_, offer)| !is_enabled(&offer.plan.combination)) {
        let Some(saving) = offer.saving_bytes else {
            unknown += 1;
            continue;
        };
        let (mut keys, mut is_taken) = (Vec::new(), saving == 0);
        for exclusion in has(sets, &offer.plan.combination) {
            is_taken |= taken.contains(&exclusion);
            // Numbered in the order of the table, so that a search that ends early is deterministic.
            let number = numbers.len();
            keys.push(*numbers.entry(exclusion).or_insert(number));
            if total + keys.len() > MOST_EXCLUSIONS {
                return Err(ChooseError::TooManyExclusions);
            }
        }
        if !is_taken {
            keys.sort_unstable();
            keys.dedup();
            total += keys.len();
            candidates.push(search::Candidate::new(position, saving, keys));
        }
    }
    Ok((candidates, unknown))
}

#[cfg(test)]
mod tests;
