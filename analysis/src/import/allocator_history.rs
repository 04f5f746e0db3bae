//! What PyTorch's allocator did in the first steps of a process, as `highwater.torch.watch(history_dir=…)` writes it.
//!
//! Enters: a JSON file, also packed by gzip. Leaves: the segments at its begin, and each request and release since, in order.
//! Invariants: numbers of entries and all sizes are bounded, so that no sum of sizes exceeds 64 bits; a release of what was not
//! requested is an error.

use super::json_of;
use highwater_core::source::OpenError;
use highwater_engine::recording::{FileProblem, refuse};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// The first member of the object: the version of its form.
pub(crate) const MEMBER: &str = "highwater_allocations";
const VERSION: u64 = 1;
/// The most requests and releases, and the most segments and blocks at the begin. The client writes at most 400,000 entries.
const MOST: usize = 1 << 20;
/// The largest size, and the largest address, bytes.
pub(crate) const MOST_BYTES: u64 = 1 << 50;
const MOST_ADDRESS: u64 = 1 << 60;
/// The longest text.
const MOST_TEXT: usize = 4096;

/// The first steps of a process.
#[derive(Debug, Clone, Deserialize)]
pub struct AllocationHistory {
    #[serde(rename = "highwater_allocations")]
    pub(crate) version: u64,
    pub(crate) rank: u32,
    /// Samples of each step.
    pub(crate) batch_size: u64,
    pub(crate) steps: u64,
    /// What `PYTORCH_CUDA_ALLOC_CONF` said.
    pub(crate) settings: String,
    /// The GPU's memory, and what of it was in use at the end beside what the allocator had reserved, bytes.
    pub(crate) total_bytes: u64,
    pub(crate) outside_bytes: u64,
    /// What the allocator had reserved at most since the begin, bytes.
    pub(crate) reserved_peak_bytes: u64,
    pub(crate) segments: Bounded<PastSegment>,
    pub(crate) events: Bounded<AllocatorEvent>,
}

/// A segment at the begin.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PastSegment {
    pub stream: u64,
    pub is_small: bool,
    pub is_expandable: bool,
    pub address: u64,
    /// The sizes of its blocks in order, and whether each is taken.
    pub blocks: Bounded<(u64, bool)>,
}

/// A request, with the size that was asked for and its stream, or a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocatorEvent {
    pub address: u64,
    pub request: Option<(u64, u64)>,
}

/// A list of at most `MOST` items.
#[derive(Debug, Clone)]
pub(crate) struct Bounded<T>(pub Vec<T>);

struct Items<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
    type Value = Bounded<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut each: A) -> Result<Bounded<T>, A::Error> {
        let mut all = Vec::new();
        while let Some(one) = each.next_element()? {
            if all.len() >= MOST {
                return Err(A::Error::custom(format!("it has a list of more than {MOST} items")));
            }
            all.push(one);
        }
        Ok(Bounded(all))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Bounded<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Items(PhantomData))
    }
}

struct Entry;

impl<'de> Visitor<'de> for Entry {
    type Value = AllocatorEvent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[address, size, stream] or [address]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut each: A) -> Result<AllocatorEvent, A::Error> {
        let address = each.next_element()?.ok_or_else(|| A::Error::custom("an entry has no address"))?;
        let size: Option<u64> = each.next_element()?;
        let stream: Option<u64> = each.next_element()?;
        Ok(AllocatorEvent { address, request: size.zip(stream) })
    }
}

impl<'de> Deserialize<'de> for AllocatorEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Entry)
    }
}

/// Reads a history.
///
/// # Errors
/// It cannot be read, is not of this form, has too much, or contradicts itself.
pub fn read(path: &Path) -> Result<AllocationHistory, OpenError> {
    let mut read = None;
    json_of(path, |deserializer| {
        read = Some(AllocationHistory::deserialize(deserializer)?);
        Ok(())
    })?;
    let history = read.ok_or_else(|| refuse("recording_unreadable", path, "is empty"))?;
    history.check().map_err(|problem| refuse("recording_unreadable", path, problem))?;
    Ok(history)
}

impl AllocationHistory {
    /// Whether the job ran with segments that grow.
    pub(crate) fn is_expandable(&self) -> bool {
        self.setting("expandable_segments").is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }

    /// The settings that change what the allocator does and are not simulated.
    pub(crate) fn unknown_settings(&self) -> Vec<&str> {
        let is_known = |key: &str| key == "expandable_segments" || key.starts_with("pinned_");
        let is_default = |(key, value): &(&str, &str)| *key == "backend" && *value == "native";
        let others = self.settings().filter(|one| !is_known(one.0) && !is_default(one));
        others.map(|(key, _)| key).collect()
    }

    fn settings(&self) -> impl Iterator<Item = (&str, &str)> {
        let parts = self.settings.split(',').map(str::trim).filter(|part| !part.is_empty());
        parts.map(|part| part.split_once(':').map_or((part, ""), |(key, value)| (key.trim(), value.trim())))
    }

    fn setting(&self, name: &str) -> Option<&str> {
        self.settings().filter(|(key, _)| *key == name).last().map(|(_, value)| value)
    }

    /// Finds what contradicts itself or exceeds the bounds.
    fn check(&self) -> Result<(), FileProblem> {
        if self.version != VERSION {
            let problem = format!("it is of version {} of its form, and version {VERSION} is known", self.version);
            return Err(FileProblem::malformed(problem));
        }
        if self.batch_size == 0 || self.batch_size > MOST_BYTES {
            return Err(FileProblem::malformed(format!("its batch size is {}", self.batch_size)));
        }
        if self.settings.len() > MOST_TEXT {
            return Err(FileProblem::malformed("its settings are too long"));
        }
        let (mut sum, mut known) = (0_u64, HashSet::new());
        for segment in &self.segments.0 {
            is_within(segment.address, MOST_ADDRESS)?;
            let mut at = segment.address;
            for (bytes, is_taken) in &segment.blocks.0 {
                is_within(*bytes, MOST_BYTES)?;
                if *is_taken {
                    known.insert(at);
                }
                (at, sum) = (at.saturating_add(*bytes), sum.saturating_add(*bytes));
            }
        }
        is_within(sum, MOST_BYTES)?;
        for (nth, event) in self.events.0.iter().enumerate() {
            match event.request {
                Some((bytes, _)) => {
                    is_within(bytes, MOST_BYTES)?;
                    if !known.insert(event.address) {
                        let problem = format!("its entry {nth} requests an address that is taken");
                        return Err(FileProblem::malformed(problem));
                    }
                }
                None if !known.remove(&event.address) => {
                    let problem = format!("its entry {nth} releases an address that is not taken");
                    return Err(FileProblem::malformed(problem));
                }
                None => {}
            }
        }
        Ok(())
    }
}

fn is_within(number: u64, most: u64) -> Result<(), FileProblem> {
    let problem = || FileProblem::malformed(format!("it has a size or an address of {number}"));
    if number > most { Err(problem()) } else { Ok(()) }
}
