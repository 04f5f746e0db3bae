//! The fewest numbers whose sum is at least a given need, where some exclude each other.
//!
//! Enters: candidates, each with a saving and keys; two with a key in common exclude each other. Leaves: the best set, or
//! the largest one where none suffices. Invariants: exact, unless there are too many candidates or the search takes too
//! long, which the result reports; the result is then at least as good as that of a greedy search.

use std::collections::HashMap;

/// The most plans for an exact search. With more, the search is greedy: it takes the largest until they suffice.
pub const MOST_SEARCHED: usize = 512;

/// The budget of each of the two parts of a search, in candidates and keys looked at. Without budget, the search ends
/// with the best set so far, which may not be the best.
const MOST_LOOKS: u64 = 10_000_000;

/// A number that can be chosen.
pub(super) struct Candidate {
    /// Where it is in the table.
    position: usize,
    pub saving: u64,
    /// Its exclusions. Two candidates that share a key cannot both be chosen.
    keys: Vec<usize>,
    /// The group in which bounds count this candidate. Its members exclude each other, so at most one of them can be chosen.
    home: usize,
    /// An earlier candidate that must be chosen before this one: it saves as much and excludes no more, so it is never worse.
    before: Option<usize>,
}

/// What was found.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selection {
    /// Ascending.
    pub positions: Vec<usize>,
    pub saving_bytes: u64,
    /// Whether nothing is better.
    pub is_exact: bool,
}

impl Candidate {
    pub fn new(position: usize, saving: u64, keys: Vec<usize>) -> Self {
        Self { position, saving, keys, home: 0, before: None }
    }
}

/// Finds the best set that reaches `need`, or the largest one that there is. The savings of all must add up to a `u64`.
pub(super) fn search(mut candidates: Vec<Candidate>, need: u64) -> Selection {
    prepare(&mut candidates);
    let homes = candidates.iter().map(|one| one.home + 1).max().unwrap_or(0);
    let keys = candidates.iter().flat_map(|one| &one.keys).max().map_or(0, |key| key + 1);
    let mut search = Search {
        need,
        seen: vec![0; homes],
        used: vec![false; keys],
        is_chosen: vec![false; candidates.len()],
        candidates: &candidates,
        round: 0,
        looks: MOST_LOOKS,
        chosen: Vec::new(),
        total: 0,
        best: None,
    };
    if candidates.len() > MOST_SEARCHED {
        search.greedy();
        let is_all = need == 0 || search.total == candidates.iter().fold(0, |sum, one| sum + one.saving);
        let is_exact = is_all && search.total <= need;
        return search.found(is_exact);
    }
    search.largest(0, &covers(&candidates));
    let (reached, is_exact) = (search.best_total(), !search.is_over());
    if reached < need || need == 0 {
        return search.found(is_exact);
    }
    search.looks = MOST_LOOKS;
    // The set that was found suffices, so the best choice has at most as many candidates.
    let most = search.best.as_ref().map_or(0, |(_, positions)| positions.len());
    for count in 1..=most {
        let sufficient = search.best.take();
        if count == most {
            search.best.clone_from(&sufficient);
        }
        search.fewest(0, count);
        if search.best.is_some() {
            break;
        }
        search.best = sufficient;
        if search.is_over() {
            break;
        }
    }
    let is_exact = !search.is_over();
    search.found(is_exact)
}

/// Sorts candidates by descending savings, and sets `home` and `before` of each.
fn prepare(candidates: &mut [Candidate]) {
    let mut shared: HashMap<usize, usize> = HashMap::new();
    for key in candidates.iter().flat_map(|one| &one.keys) {
        *shared.entry(*key).or_default() += 1;
    }
    candidates.sort_by(|left, right| right.saving.cmp(&left.saving).then(left.position.cmp(&right.position)));
    // A home has the number of a key. A candidate that excludes no other has a number of its own after all keys.
    let after_keys = shared.keys().max().map_or(0, |key| key + 1);
    let mut free: Option<(usize, u64)> = None;
    let mut last: Option<(u64, Vec<usize>)> = None;
    for (nth, one) in candidates.iter_mut().enumerate() {
        one.keys.retain(|key| shared.get(key).is_some_and(|count| *count > 1));
        one.keys.sort_unstable();
        one.home = one.keys.iter().copied().max_by_key(|key| shared.get(key)).unwrap_or(after_keys + nth);
        let same = last.as_ref().is_some_and(|(saving, keys)| *saving == one.saving && *keys == one.keys);
        one.before = match free {
            Some((at, saving)) if saving == one.saving => Some(at),
            _ => nth.checked_sub(1).filter(|_| same),
        };
        if one.keys.is_empty() {
            free = Some((nth, one.saving));
        }
        last = Some((one.saving, one.keys.clone()));
    }
}

/// The most that each candidate and those after it can add: of each home the largest.
fn covers(candidates: &[Candidate]) -> Vec<u64> {
    let (mut largest, mut cover) = (HashMap::new(), 0);
    let mut covers: Vec<u64> = candidates
        .iter()
        .rev()
        .map(|one| {
            cover += one.saving - largest.insert(one.home, one.saving).unwrap_or(0);
            cover
        })
        .collect();
    covers.reverse();
    covers
}

struct Search<'a> {
    candidates: &'a [Candidate],
    need: u64,
    /// By key, whether a chosen one has it.
    used: Vec<bool>,
    /// By home, the round in which a bound last counted it.
    seen: Vec<u64>,
    round: u64,
    /// Remaining looks; 0 ends the search.
    looks: u64,
    /// The candidates that are chosen.
    chosen: Vec<usize>,
    is_chosen: Vec<bool>,
    total: u64,
    /// The best set that was found, its positions ascending.
    best: Option<(u64, Vec<usize>)>,
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        self.looks == 0
    }

    fn found(self, is_exact: bool) -> Selection {
        let (saving_bytes, positions) = self.best.unwrap_or_default();
        Selection { positions, saving_bytes, is_exact }
    }

    fn best_total(&self) -> u64 {
        self.best.as_ref().map_or(0, |(total, _)| *total)
    }

    /// Whether none that is chosen excludes it.
    fn is_free(&mut self, one: &Candidate) -> bool {
        self.looks = self.looks.saturating_sub(1 + one.keys.len() as u64);
        one.keys.iter().all(|key| self.used.get(*key).is_some_and(|used| !used))
    }

    fn set(&mut self, at: usize, one: &Candidate, is_chosen: bool) {
        for key in &one.keys {
            if let Some(used) = self.used.get_mut(*key) {
                *used = is_chosen;
            }
        }
        if let Some(chosen) = self.is_chosen.get_mut(at) {
            *chosen = is_chosen;
        }
        match is_chosen {
            true => {
                self.chosen.push(at);
                self.total += one.saving;
            }
            false => {
                self.chosen.pop();
                self.total -= one.saving;
            }
        }
    }

    fn keep(&mut self) {
        let chosen = self.chosen.iter().filter_map(|at| self.candidates.get(*at));
        let mut positions: Vec<usize> = chosen.map(|one| one.position).collect();
        positions.sort_unstable();
        self.best = Some((self.total, positions));
    }

    /// Takes the largest ones until they suffice.
    fn greedy(&mut self) {
        for (at, one) in self.candidates.iter().enumerate() {
            if self.total >= self.need {
                break;
            }
            if self.is_free(one) {
                self.set(at, one, true);
            }
        }
        self.keep();
    }

    /// Finds the set with the largest sum, from a candidate on, and ends with the first that suffices.
    fn largest(&mut self, from: usize, covers: &[u64]) {
        if self.best.is_none() || self.total > self.best_total() {
            self.keep();
        }
        for (at, (one, cover)) in self.candidates.iter().zip(covers).enumerate().skip(from) {
            let is_best = self.best_total() >= self.total + cover;
            if is_best || self.best_total() >= self.need || self.is_over() {
                return;
            }
            if self.is_free(one) {
                self.set(at, one, true);
                self.largest(at + 1, covers);
                self.set(at, one, false);
            }
        }
    }

    /// Finds the best set of `count` more candidates, from candidate `from` on.
    fn fewest(&mut self, from: usize, count: usize) {
        let Some(last) = self.candidates.len().checked_sub(count) else { return };
        let least = self.candidates.iter().skip(last).fold(0, |sum, one| sum + one.saving);
        if self.best.as_ref().is_some_and(|(best, _)| self.total + least > *best) {
            return;
        }
        for (at, one) in self.candidates.iter().enumerate().take(last + 1).skip(from) {
            if self.is_over() || !self.can_reach(at, count) {
                return;
            }
            let is_first = one.before.is_none_or(|before| self.is_chosen.get(before).is_some_and(|chosen| *chosen));
            if !is_first || !self.is_free(one) {
                continue;
            }
            self.set(at, one, true);
            match count {
                1 => self.compare(),
                _ => self.fewest(at + 1, count - 1),
            }
            self.set(at, one, false);
        }
    }

    fn compare(&mut self) {
        if self.total < self.need || self.best.as_ref().is_some_and(|(best, _)| self.total > *best) {
            return;
        }
        let before = self.best.take();
        self.keep();
        // Fewer bytes win; of equally many, the positions earlier in the table.
        self.best = before.into_iter().chain(self.best.take()).min();
    }

    /// Whether `count` more candidates from candidate `from` on may suffice: the largest that are free, one of each home.
    fn can_reach(&mut self, from: usize, count: usize) -> bool {
        self.round += 1;
        let (mut total, mut left) = (self.total, count);
        for one in self.candidates.iter().skip(from) {
            if left == 0 || total >= self.need || self.is_over() {
                break;
            }
            if self.is_free(one)
                && let Some(seen) = self.seen.get_mut(one.home)
                && *seen != self.round
            {
                *seen = self.round;
                (total, left) = (total + one.saving, left - 1);
            }
        }
        total >= self.need
    }
}

#[cfg(test)]
mod tests;
