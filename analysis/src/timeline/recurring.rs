//! Finds the short kernels of each GPU, and the sequences of them that recur.
//!
//! Enters: what ran on the GPUs, in any order, with its stream. Leaves: for each GPU, how many kernels are short, their time, the idle time before
//! them, and the sequences of short kernels of one stream that recur the most. Invariants: at most [`MOST_SEQUENCES`] different
//! sequences are counted, and if there are more, none is known; idle time longer than [`LONGEST_GAP_NS`] has other causes and does not count.

use super::names::Names;
use super::short::{KernelSequence, SHORT_NS, ShortKernels};
use super::trace::{Op, Work};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// The longest idle time before a short kernel that counts, nanoseconds.
const LONGEST_GAP_NS: i64 = 100_000;
/// The kernels of a sequence.
const LONGEST: usize = 5;
/// The most different sequences of a GPU: 8 MiB.
const MOST_SEQUENCES: usize = 1 << 16;
/// The sequences that are kept, and how often one recurs at least.
const MOST_KEPT: usize = 5;
const LEAST_RECURRING: u64 = 3;

/// A sequence while it is counted.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    count: u64,
    total_ns: u64,
    between_ns: u64,
    /// The position after its last occurrence.
    after: usize,
}

type Sequences = HashMap<Vec<u32>, Counted>;

/// The short kernels of each GPU. `streams` has the stream of each of the `ops`, if it is known.
pub(super) fn short_kernels(ops: &[Op], streams: &[Option<u32>], names: &Names) -> Vec<ShortKernels> {
    let mut of_gpus: BTreeMap<u32, Vec<(&Op, Option<u32>)>> = BTreeMap::new();
    for (op, stream) in ops.iter().zip(streams) {
        of_gpus.entry(op.device).or_default().push((op, *stream));
    }
    of_gpus.into_iter().filter_map(|(device, of)| of_gpu(device, of, names)).collect()
}

/// The short kernels of a GPU; `None` if it ran no kernel.
fn of_gpu(device: u32, mut ran: Vec<(&Op, Option<u32>)>, names: &Names) -> Option<ShortKernels> {
    ran.sort_by_key(|(op, _)| (op.begin_ns, op.end_ns));
    let are_kernels = ran.iter().filter(|(op, _)| op.work != Work::Memory);
    let (kernels, kernels_ns) =
        are_kernels.fold((0, 0_u64), |(count, ns), (op, _)| (count + 1, ns.saturating_add(duration(op))));
    let mut short = ShortKernels {
        device,
        below_ns: SHORT_NS,
        kernels,
        kernels_ns,
        count: 0,
        total_ns: 0,
        idle_before_ns: 0,
        sequences: None,
    };
    let mut busy_until = ran.first()?.0.begin_ns;
    for (op, _) in &ran {
        if is_short(op) {
            let idle_ns = op.begin_ns.saturating_sub(busy_until);
            short.count += 1;
            short.total_ns += duration(op);
            short.idle_before_ns += u64::try_from(idle_ns).ok().filter(|_| idle_ns <= LONGEST_GAP_NS).unwrap_or(0);
        }
        busy_until = busy_until.max(op.end_ns);
    }
    short.sequences = sequences(ran).map(|counted| kept(counted, names));
    (kernels > 0).then_some(short)
}

fn duration(op: &Op) -> u64 {
    op.end_ns.abs_diff(op.begin_ns)
}

fn is_short(op: &Op) -> bool {
    op.work != Work::Memory && duration(op) < SHORT_NS
}

/// Counts the sequences of a GPU; `None` if there are too many.
fn sequences(mut ran: Vec<(&Op, Option<u32>)>) -> Option<Sequences> {
    ran.retain(|(_, stream)| stream.is_some());
    // Stable: those of a stream stay in the order of time.
    ran.sort_by_key(|(_, stream)| *stream);
    let mut counted = Sequences::new();
    for (last, (_, stream)) in ran.iter().enumerate() {
        let (mut key, mut total_ns, mut between_ns, mut next_ns) = (Vec::new(), 0, 0, None);
        for first in (0..=last).rev().take(LONGEST) {
            let (op, of) = ran[first];
            let Some(name) = op.name.filter(|_| is_short(op) && of == *stream) else { break };
            let gap_ns = next_ns.map_or(0, |next_ns: i64| next_ns.saturating_sub(op.end_ns).max(0));
            if gap_ns > LONGEST_GAP_NS {
                break;
            }
            key.insert(0, name);
            total_ns += duration(op);
            between_ns += gap_ns.unsigned_abs();
            next_ns = Some(op.begin_ns);
            if key.len() > 1 {
                count(&mut counted, &key, (first, last), total_ns, between_ns)?;
            }
        }
    }
    Some(counted)
}

/// Counts one occurrence, unless it overlaps the one before; `None` if there is no room.
fn count(
    counted: &mut Sequences,
    key: &[u32],
    (first, last): (usize, usize),
    total_ns: u64,
    between_ns: u64,
) -> Option<()> {
    if !counted.contains_key(key) {
        if counted.len() >= MOST_SEQUENCES {
            return None;
        }
        counted.insert(key.to_vec(), Counted::default());
    }
    let of = counted.get_mut(key).filter(|of| of.count == 0 || of.after <= first);
    if let Some(of) = of {
        let (total_ns, between_ns) = (of.total_ns + total_ns, of.between_ns + between_ns);
        *of = Counted { count: of.count + 1, total_ns, between_ns, after: last + 1 };
    }
    Some(())
}

/// The sequences whose launches would be saved the most by making one kernel of each; none that is a part of another, or repeats it.
fn kept(counted: Sequences, names: &Names) -> Vec<KernelSequence> {
    let mut all: Vec<(Vec<u32>, Counted)> = counted.into_iter().filter(|(_, of)| of.count >= LEAST_RECURRING).collect();
    all.sort_by(|a, b| order(a).cmp(&order(b)));
    let mut kept: Vec<(Vec<u32>, Counted)> = Vec::new();
    for (key, of) in all {
        let shares =
            |(known, _): &(Vec<u32>, Counted)| key.windows(2).any(|pair| known.windows(2).any(|of| of == pair));
        if kept.len() < MOST_KEPT && !kept.iter().any(shares) {
            kept.push((key, of));
        }
    }
    let named = |(key, of): (Vec<u32>, Counted)| KernelSequence {
        kernels: key.iter().filter_map(|name| names.get(*name)).map(str::to_owned).collect(),
        count: of.count,
        total_ns: of.total_ns,
        between_ns: of.between_ns,
    };
    kept.into_iter().map(named).collect()
}

/// Those that would save the most launches come first, the longer of two alike.
fn order((key, of): &(Vec<u32>, Counted)) -> (Reverse<(u64, usize)>, &[u32]) {
    (Reverse((of.count * (key.len() as u64 - 1), key.len())), key)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels of one stream and GPU: name, begin and duration in µs.
    fn short(ran: &[(u32, &str, i64, i64)]) -> ShortKernels {
        let mut names = Names::default();
        let op = |(_, name, begin, long): &(u32, &str, i64, i64)| Op {
            begin_ns: begin * 1_000,
            end_ns: (begin + long) * 1_000,
            launch_ns: None,
            device: 3,
            work: if *name == "copy" { Work::Memory } else { Work::Compute },
            name: names.intern_kernel(name),
        };
        let ops: Vec<Op> = ran.iter().map(op).collect();
        let streams: Vec<_> = ran.iter().map(|of| Some(of.0)).collect();
        short_kernels(&ops, &streams, &names).remove(0)
    }

    fn shown(of: &ShortKernels) -> Vec<(String, u64, u64, u64)> {
        let of = of.sequences.as_ref().expect("few").iter();
        of.map(|of| (of.kernels.join(" "), of.count, of.total_ns / 1_000, of.between_ns / 1_000)).collect()
    }

    #[test]
    fn short_kernels_and_the_idle_time_before_them_are_counted() {
        // The second follows after 3 µs, the third is long, the fourth overlaps it, the fifth comes after a pause, a copy is none.
        let ran = [
            (7, "a", 0, 2),
            (7, "b", 5, 9),
            (7, "long", 20, 10),
            (8, "a", 25, 2),
            (7, "b", 900, 4),
            (7, "copy", 910, 1),
        ];
        let of = short(&ran);
        let found = (of.device, of.kernels, of.count, of.total_ns, of.idle_before_ns);
        assert_eq!(found, (3, 5, 4, 17_000, 3_000));
        assert_eq!(shown(&of), []);
    }

    #[test]
    fn sequences_are_of_one_stream_and_end_at_long_kernels_and_pauses() {
        let step = |nth: i64| {
            let at = nth * 1_000;
            [(7, "a", at, 2), (8, "x", at + 1, 3), (7, "b", at + 4, 2), (7, "c", at + 7, 2), (7, "long", at + 10, 50)]
        };
        let ran: Vec<_> = (0..4).flat_map(step).collect();
        assert_eq!(shown(&short(&ran)), [("a b c".to_owned(), 4, 24, 12)]);
        assert_eq!(shown(&short(&ran[..10])), [], "twice is not often");
    }

    #[test]
    fn a_kernel_that_repeats_is_counted_without_overlaps() {
        let ran: Vec<_> = (0..12).map(|nth| (7, "a", 3 * nth, 2)).collect();
        // Of twelve: four times three save eight launches, three times four nine.
        assert_eq!(shown(&short(&ran)), [("a a a a".to_owned(), 3, 24, 9)]);
    }

    #[test]
    fn of_too_many_sequences_none_is_known() {
        let mut counted = Sequences::new();
        for nth in 0..MOST_SEQUENCES as u32 {
            count(&mut counted, &[nth, nth], (0, 1), 1, 1).expect("room");
        }
        assert_eq!(count(&mut counted, &[1, 2], (0, 1), 1, 1), None);
        assert_eq!(count(&mut counted, &[5, 5], (2, 3), 1, 1), Some(()));
    }
}
