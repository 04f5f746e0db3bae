//! How long each rank waited for the others in collectives.
//!
//! A kernel of a collective runs from when its own rank begins until all have taken part, so its duration is mostly
//! waiting if another rank is late. The time until the last rank began is waiting; what remains is transfer.
//!
//! Enters: the traces of one job, one for each rank. Leaves: by rank, the time waited and the time of transfer, and who
//! was late. Invariants: times of different ranks are compared only if their clocks can be; without that, waiting is
//! `None`. Absent on purpose: a correction of the clocks of different nodes, about which a trace says nothing.

use super::collective::Kind;
use super::trace::Trace;
use super::usage::Rate;
use super::waits::{self, Matches, Part};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// If at least one matched collective in this many contradicts the clocks, the clocks are not comparable.
const ONE_IN: usize = 10;

/// The collectives of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ranks {
    /// Whether times of different ranks can be compared.
    pub clocks: Clocks,
    /// How many collectives were matched over all ranks of their group.
    pub matched: u64,
    /// How many of `matched` were matched by process group and sequence number; the others were matched by order.
    pub matched_by_sequence: u64,
    /// How many collectives of single ranks were not matched: their counterparts are missing in the traces, or not certain.
    pub unmatched: u64,
    /// How many kernels were not compared: point to point, from or to one rank, or of unknown kind.
    pub not_compared: u64,
    /// In the order of the traces.
    pub ranks: Vec<RankShare>,
    /// The rank that began last most often.
    pub most_often_last: Option<u64>,
    /// The rank that the others waited for longest.
    pub most_waited_for: Option<u64>,
    /// By kind.
    pub kinds: Vec<KindShare>,
}

/// What is known of the clocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Clocks {
    /// Whether times of different ranks were compared.
    pub are_comparable: bool,
    /// Why not, and what is therefore not known.
    pub problem: Option<String>,
    /// How many collectives ended on one rank before they began on another, by these clocks. They are in no rank's
    /// waiting and transfer and in no kind, but in `matched` and in each rank's `collectives` and `total_ns`.
    pub contradicting: u64,
    /// The largest such contradiction, nanoseconds. The clocks differ by at least this much.
    pub disagreement_ns: Option<u64>,
}

/// The matched collectives of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankShare {
    /// The rank.
    pub rank: u64,
    /// How many collectives it took part in.
    pub collectives: u64,
    /// The time in them, nanoseconds.
    pub total_ns: u64,
    /// Of that, until the last rank began; `None` if the clocks cannot be compared, or no collective of the rank was matched.
    pub waiting_ns: Option<u64>,
    /// Of that, from then on; likewise.
    pub transfer_ns: Option<u64>,
    /// How many times it began last; likewise.
    pub times_last: Option<u64>,
    /// How long all others together waited for it then; likewise.
    pub made_others_wait_ns: Option<u64>,
}

/// The matched collectives of one kind, each once. Bandwidths are of the transfer alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KindShare {
    /// The kind.
    pub kind: Kind,
    /// How many.
    pub count: u64,
    /// From the last begin to the last end, nanoseconds.
    pub transfer_ns: u64,
    /// Bytes divided by that time, bytes a second, for those whose message is known.
    pub algorithm_bytes_per_second: Option<f64>,
    /// The same times the factor of nccl-tests, bytes a second.
    pub bus_bytes_per_second: Option<f64>,
}

/// Why ranks cannot be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// There is one trace, or none.
    #[error("the traces of at least two ranks are needed")]
    TooFew,
    /// A trace does not say its rank.
    #[error("a trace does not say its rank (`distributedInfo`)")]
    NoRank,
    /// Two traces are of this rank.
    #[error("two traces are of rank {0}")]
    SameRank(u64),
    /// The trace of this rank has no date.
    #[error("the trace of rank {0} lacks `baseTimeNanoseconds`, so its times have no date")]
    NoDate(u64),
}

/// Compares the ranks of one job. If a trace has no date, collectives are counted and their times are not known.
///
/// # Errors
/// There are not at least two traces, one does not say its rank, or two are of the same rank.
pub fn compare(traces: &[&Trace]) -> Result<Ranks, RanksError> {
    let labels = labels(traces)?;
    let found = waits::matches(traces);
    let mut sums = Sums::new(&labels, &found);
    let problem = match clocks(traces, &labels) {
        Err(problem) => Some(problem.to_string()),
        Ok(clocks) => {
            found.matched.iter().for_each(|parts| sums.split(parts, &clocks));
            let often = sums.contradicting > 0 && sums.contradicting as usize * ONE_IN >= found.matched.len();
            often.then(|| format!("the clocks differ by at least {} ns", sums.disagreement_ns))
        }
    };
    Ok(sums.result(found, problem))
}

/// The ranks, by trace.
fn labels(traces: &[&Trace]) -> Result<Vec<u64>, RanksError> {
    if traces.len() < 2 {
        return Err(RanksError::TooFew);
    }
    // Traces without ranks may be of one rank, before and after a change.
    let labels: Option<Vec<u64>> = traces.iter().map(|trace| trace.rank).collect();
    let (labels, mut seen) = (labels.ok_or(RanksError::NoRank)?, BTreeSet::new());
    match labels.iter().find(|rank| !seen.insert(**rank)) {
        Some(rank) => Err(RanksError::SameRank(*rank)),
        None => Ok(labels),
    }
}

/// When each trace's clock was 0, nanoseconds since 1970.
fn clocks(traces: &[&Trace], labels: &[u64]) -> Result<Vec<i64>, RanksError> {
    let clocks = traces.iter().zip(labels);
    clocks.map(|(trace, rank)| trace.clock_ns().ok_or(RanksError::NoDate(*rank))).collect()
}

/// What adds up over the collectives.
struct Sums {
    ranks: Vec<RankShare>,
    kinds: BTreeMap<Kind, (KindShare, Rate, Rate)>,
    contradicting: u64,
    disagreement_ns: u64,
}

impl Sums {
    fn new(labels: &[u64], found: &Matches) -> Self {
        let none = |rank: &u64| RankShare {
            rank: *rank,
            collectives: 0,
            total_ns: 0,
            waiting_ns: Some(0),
            transfer_ns: Some(0),
            times_last: Some(0),
            made_others_wait_ns: Some(0),
        };
        let mut ranks: Vec<RankShare> = labels.iter().map(none).collect();
        for part in found.matched.iter().flatten() {
            if let Some(share) = ranks.get_mut(part.trace) {
                share.collectives += 1;
                share.total_ns = share.total_ns.saturating_add(part.end_ns.abs_diff(part.begin_ns));
            }
        }
        Self { ranks, kinds: BTreeMap::new(), contradicting: 0, disagreement_ns: 0 }
    }

    /// Splits the time of a collective on each rank.
    fn split(&mut self, parts: &[Part], clocks: &[i64]) {
        let dated = |part: &Part| {
            let clock = i128::from(clocks.get(part.trace).copied().unwrap_or(0));
            (clock + i128::from(part.begin_ns), clock + i128::from(part.end_ns), part.trace)
        };
        let parts_dated: Vec<(i128, i128, usize)> = parts.iter().map(dated).collect();
        let last = parts_dated.iter().max_by_key(|(begin, _, _)| *begin);
        let (Some((begun, _, last)), Some(first_end)) = (last, parts_dated.iter().map(|(_, end, _)| *end).min()) else {
            return;
        };
        if first_end < *begun {
            self.contradicting += 1;
            self.disagreement_ns = self.disagreement_ns.max(whole(begun - first_end));
            return;
        }
        let mut waited = 0_u64;
        for (begin, end, trace) in &parts_dated {
            let (waiting, transfer) = (whole(begun - begin), whole(end - begun));
            waited = waited.saturating_add(waiting);
            if let Some(share) = self.ranks.get_mut(*trace) {
                add(&mut share.waiting_ns, waiting);
                add(&mut share.transfer_ns, transfer);
            }
        }
        if let Some(share) = self.ranks.get_mut(*last).filter(|_| waited > 0) {
            add(&mut share.times_last, 1);
            add(&mut share.made_others_wait_ns, waited);
        }
        let last_end = parts_dated.iter().map(|(_, end, _)| *end).max().unwrap_or(*begun);
        self.add_kind(parts, whole(last_end - begun));
    }

    fn add_kind(&mut self, parts: &[Part], transfer: u64) {
        let Some(collective) = parts.first().map(|part| part.collective) else { return };
        let kind = collective.kind;
        let none =
            KindShare { kind, count: 0, transfer_ns: 0, algorithm_bytes_per_second: None, bus_bytes_per_second: None };
        let (share, message, bus) = self.kinds.entry(kind).or_insert((none, Rate::default(), Rate::default()));
        share.count += 1;
        share.transfer_ns = share.transfer_ns.saturating_add(transfer);
        if let Some(bytes) = collective.bytes.filter(|_| kind != Kind::Barrier) {
            message.add(bytes as f64, transfer);
        }
        if let Some(bytes) = collective.bus_bytes() {
            bus.add(bytes, transfer);
        }
    }

    fn result(mut self, found: Matches, problem: Option<String>) -> Ranks {
        for share in self.ranks.iter_mut().filter(|share| problem.is_some() || share.collectives == 0) {
            (share.waiting_ns, share.transfer_ns) = (None, None);
            (share.times_last, share.made_others_wait_ns) = (None, None);
        }
        if problem.is_some() {
            self.kinds.clear();
        }
        let most = |of: fn(&RankShare) -> Option<u64>| {
            let shares = self.ranks.iter().filter(|share| of(share).is_some_and(|value| value > 0));
            shares.max_by_key(|share| of(share)).map(|share| share.rank)
        };
        let unknown = "how long ranks waited, how long the transfer took and which rank was late is not known";
        Ranks {
            most_often_last: most(|share| share.times_last),
            most_waited_for: most(|share| share.made_others_wait_ns),
            clocks: Clocks {
                are_comparable: problem.is_none(),
                problem: problem.map(|problem| format!("{problem}: {unknown}")),
                contradicting: self.contradicting,
                disagreement_ns: (self.contradicting > 0).then_some(self.disagreement_ns),
            },
            matched: found.matched.len() as u64,
            matched_by_sequence: found.by_sequence,
            unmatched: found.unmatched,
            not_compared: found.not_compared,
            ranks: self.ranks,
            kinds: self.kinds.into_values().map(with_bandwidths).collect(),
        }
    }
}

fn with_bandwidths((share, message, bus): (KindShare, Rate, Rate)) -> KindShare {
    let (algorithm_bytes_per_second, bus_bytes_per_second) = (message.per_second(), bus.per_second());
    KindShare { algorithm_bytes_per_second, bus_bytes_per_second, ..share }
}

fn add(sum: &mut Option<u64>, more: u64) {
    *sum = sum.map(|sum| sum.saturating_add(more));
}

/// Converts a time that is not negative to the type of the sums.
fn whole(time: i128) -> u64 {
    u64::try_from(time).unwrap_or(u64::MAX)
}
