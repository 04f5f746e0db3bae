//! One step in the order in which its records came, and of each module from when to when its forward pass is kept.
//!
//! Enters: the records of one profiled step. Leaves: moments, each with what was in live tensors then and at most since the one
//! before; of each module the times between its forward and its backward pass. Invariants: names and moments are bounded;
//! if a record lacks what is needed, nothing is known of the step; a module is left out of which a forward pass has no backward
//! pass.

use highwater_core::wire::{self, Direction};
use std::collections::HashMap;

/// The most records of a step, and bytes of the names of its modules: a profile may have fewer.
const MOST_MOMENTS: usize = 1 << 17;
const MOST_NAME_BYTES: usize = 1 << 24;

/// What was in live tensors when a record was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment {
    /// Then, bytes.
    pub allocated: u64,
    /// At most since the moment before, bytes.
    pub peak: u64,
}

/// A module, and its passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeptModule {
    /// Its name's number.
    pub name: usize,
    /// The moments between which its first forward pass ran.
    pub begins: usize,
    /// See above.
    pub ends: usize,
    /// How many layers had run before it.
    pub layers_before: usize,
    /// How long all its forward passes took, nanoseconds.
    pub duration_ns: Option<u64>,
    /// Each pass.
    pub passes: Vec<Pass>,
}

/// One forward pass and its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pass {
    /// The first moment by which what it holds could be free.
    pub after: usize,
    /// The first moment by which it is needed again.
    pub until: usize,
    /// The last moment before the forward pass would run again.
    pub again: usize,
    /// What it holds in between, bytes.
    pub held: i64,
    /// What it would need at most while it runs again, bytes.
    pub recompute: i64,
}

impl KeptModule {
    /// What all its passes hold, bytes.
    pub fn held(&self) -> i64 {
        self.passes.iter().fold(0, |sum, pass| sum.saturating_add(pass.held))
    }

    /// Whether it keeps something at a moment that would be free if it were checkpointed.
    pub fn is_kept_at(&self, moment: usize) -> bool {
        self.passes.iter().any(|pass| pass.held > 0 && (pass.after..pass.until).contains(&moment))
    }

    /// Whether another one ran inside it.
    pub fn contains(&self, other: &Self) -> bool {
        self != other && self.begins <= other.begins && other.ends <= self.ends
    }
}

/// A forward pass whose backward pass has not begun.
#[derive(Debug, Clone, Copy)]
struct Forward {
    after: usize,
    held: i64,
    recompute: i64,
}

/// What is known of one module so far.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    window: KeptModule,
    /// Whether a pass lacks something.
    is_partly_unknown: bool,
}

/// The records of one step.
#[derive(Debug, Clone, Default)]
pub struct StepHistory {
    moments: Vec<Moment>,
    names: Vec<String>,
    name_bytes: usize,
    /// What each moment is a record of: the name's number, and the pass.
    records: Vec<(usize, Direction)>,
    by_name: HashMap<String, usize>,
    known: HashMap<usize, Known>,
    open: HashMap<usize, Vec<Forward>>,
    /// The module that contains all others: its name's number, and how many ran inside it.
    root: Option<(usize, u64)>,
    /// How many layers had run forward, and before each moment.
    layers: usize,
    layers_before: Vec<usize>,
    is_incomplete: bool,
}

impl PartialEq for StepHistory {
    fn eq(&self, other: &Self) -> bool {
        (&self.moments, &self.names, &self.records) == (&other.moments, &other.names, &other.records)
    }
}

impl Eq for StepHistory {}

impl StepHistory {
    /// Adds a record, and what was in live tensors then.
    pub(super) fn add(&mut self, name: &str, allocated: Option<u64>, layer: &wire::Layer) {
        let Some((allocated, peak)) = allocated.zip(layer.peak) else {
            self.is_incomplete = true;
            return;
        };
        let is_named = self.by_name.contains_key(name) || self.name_bytes + name.len() <= MOST_NAME_BYTES;
        if self.is_incomplete || !is_named || self.moments.len() >= MOST_MOMENTS {
            self.is_incomplete = true;
            return;
        }
        let name = self.number(name);
        if let Some(modules) = layer.modules.filter(|modules| self.root.is_none_or(|(_, known)| *modules > known)) {
            self.root = Some((name, modules));
        }
        self.layers_before.push(self.layers);
        match layer.direction {
            Direction::Forward => self.forward(name, layer),
            Direction::Backward => self.backward(name, layer.is_around_others()),
        }
        self.moments.push(Moment { allocated, peak });
        self.records.push((name, layer.direction));
    }

    fn number(&mut self, name: &str) -> usize {
        if let Some(known) = self.by_name.get(name) {
            return *known;
        }
        self.name_bytes += name.len();
        self.names.push(name.to_owned());
        self.by_name.insert(name.to_owned(), self.names.len() - 1);
        self.names.len() - 1
    }

    fn forward(&mut self, name: usize, layer: &wire::Layer) {
        let at = self.moments.len();
        // Each module inside has a record of its own, before this one.
        let inside = usize::try_from(layer.modules.unwrap_or(0)).unwrap_or(usize::MAX);
        let begins = at.saturating_sub(inside);
        let layers_before = self.layers_before.get(begins).copied().unwrap_or(self.layers);
        self.layers += usize::from(!layer.is_around_others());
        let new = KeptModule { name, begins, ends: at, layers_before, duration_ns: Some(0), passes: Vec::new() };
        let known = self.known.entry(name).or_insert(Known { window: new, is_partly_unknown: false });
        let sum = known.window.duration_ns.zip(layer.duration_ns);
        known.window.duration_ns = sum.map(|(sum, more)| sum.saturating_add(more));
        match layer.held.zip(layer.recompute) {
            Some((held, recompute)) => {
                self.open.entry(name).or_default().push(Forward { after: at + 1, held, recompute });
            }
            None => known.is_partly_unknown = true,
        }
    }

    /// The backward pass of a module that is around others begins; that of another has begun before this moment.
    fn backward(&mut self, name: usize, is_around_others: bool) {
        let at = self.moments.len();
        let Some(forward) = self.open.get_mut(&name).and_then(Vec::pop) else { return };
        let (until, again) = if is_around_others { (at + 1, at) } else { (at, at.saturating_sub(1)) };
        let pass = Pass { after: forward.after, until, again, held: forward.held, recompute: forward.recompute };
        if let Some(known) = self.known.get_mut(&name).filter(|_| pass.after <= pass.until) {
            known.window.passes.push(pass);
        }
    }

    /// The moments; `None` if not all are known.
    pub(super) fn moments(&self) -> Option<&[Moment]> {
        (!self.is_incomplete && !self.moments.is_empty()).then_some(&self.moments)
    }

    /// The modules that keep something for the backward pass and could be checkpointed, but for the one around all.
    pub(super) fn kept_modules(&self) -> Vec<KeptModule> {
        let is_open = |name: &usize| self.open.get(name).is_some_and(|open| !open.is_empty());
        let is_root = |name: &usize| self.root.is_some_and(|(root, _)| root == *name);
        let usable = |(name, known): &(&usize, &Known)| {
            !known.is_partly_unknown && !is_open(name) && !is_root(name) && known.window.held() > 0
        };
        let mut windows: Vec<KeptModule> =
            self.known.iter().filter(usable).map(|(_, known)| known.window.clone()).collect();
        windows.sort_by_key(|window| (window.begins, window.ends));
        windows
    }

    pub(super) fn name(&self, number: usize) -> &str {
        &self.names[number]
    }

    /// Where something before the moment at a position happened, or at it while a module runs again, for people.
    pub(super) fn place(&self, is_again: bool, position: usize) -> String {
        let Some((name, direction)) = self.records.get(position).copied() else { return "an unknown place".to_owned() };
        let is_root = self.root.is_some_and(|(root, _)| root == name);
        let of = self.name(name);
        match direction {
            _ if is_again => format!("the forward pass of {of}, which runs again"),
            Direction::Backward if is_root && position + 1 == self.records.len() => {
                "the end of the step, after the backward pass of all layers".to_owned()
            }
            Direction::Backward if is_root => "the loss, between the forward and the backward pass".to_owned(),
            Direction::Forward => format!("the forward pass, up to {of}"),
            Direction::Backward => format!("the backward pass, up to {of}"),
        }
    }
}
