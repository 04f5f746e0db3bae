//! One layer's record in few bytes: each relative to the one before, as layers run one after the other.
//!
//! Enters: records, with the numbers of their layers. Leaves: bytes, and the records again, exactly. A record of a
//! transformer takes some 20 bytes. Absent on purpose: names, and any bound.

use crate::varint::{put, take, unzigzag, zigzag};
use crate::wire::{Direction, Layer};

/// The most bytes of one record.
pub(super) const MOST_RECORD_BYTES: usize = 160;
/// Allocators align tensors to this, bytes: sizes are multiples of it.
const ALIGNMENT: i64 = 512;

/// A record whose layer is a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbered {
    pub number: usize,
    pub at_ns: i64,
    pub allocated: Option<u64>,
    pub reserved: Option<u64>,
    pub layer: Layer,
}

/// What the next record is relative to. The first is relative to zeros.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Last {
    flags: u64,
    /// The number of the layer after it in its direction.
    expected: i64,
    at_ns: i64,
    allocated: u64,
    reserved: u64,
    gathered_sum: u64,
}

/// Appends a change of a size. A multiple of [`ALIGNMENT`] is stored as a count of it, shifted left by one; any other
/// change follows a 1.
fn put_size(encoded: &mut Vec<u8>, change: i64) {
    if change % ALIGNMENT == 0 {
        put(encoded, zigzag(change / ALIGNMENT) << 1);
    } else {
        put(encoded, 1);
        put(encoded, zigzag(change));
    }
}

fn take_size(encoded: &[u8], at: &mut usize) -> Option<i64> {
    let first = take(encoded, at)?;
    if first == 1 { take(encoded, at).map(unzigzag) } else { Some(unzigzag(first >> 1).wrapping_mul(ALIGNMENT)) }
}

fn change(to: u64, from: u64) -> i64 {
    to.wrapping_sub(from).cast_signed()
}

fn changed(from: u64, by: i64) -> u64 {
    from.wrapping_add(by.cast_unsigned())
}

/// Appends a record.
pub(super) fn encode(encoded: &mut Vec<u8>, last: &mut Last, record: &Numbered) {
    let Numbered { number, at_ns, allocated, reserved, layer } = record;
    let known = [
        layer.direction == Direction::Backward,
        allocated.is_some(),
        reserved.is_some(),
        layer.growth.is_some(),
        layer.activations.is_some(),
        layer.parameters.is_some(),
        layer.gathered.is_some(),
        layer.gathered_sum.is_some(),
        layer.duration_ns.is_some(),
        layer.modules.is_some(),
        layer.peak.is_some(),
        layer.held.is_some(),
        layer.recompute.is_some(),
    ];
    let flags = known.iter().rev().fold(0, |flags, known| flags << 1 | u64::from(*known));
    let number = i64::try_from(*number).unwrap_or(i64::MAX);
    put(encoded, flags ^ last.flags);
    put(encoded, zigzag(number.wrapping_sub(last.expected)));
    if let Some(ns) = layer.duration_ns {
        put(encoded, ns);
    }
    let expected_ns = last.at_ns.wrapping_add(layer.duration_ns.unwrap_or(0).cast_signed());
    put(encoded, zigzag(at_ns.wrapping_sub(expected_ns)));
    let grown = allocated.map_or(0, |bytes| change(bytes, last.allocated));
    if allocated.is_some() {
        put_size(encoded, grown);
    }
    if let Some(bytes) = reserved {
        put_size(encoded, change(*bytes, last.reserved));
    }
    if let Some(bytes) = layer.growth {
        put_size(encoded, bytes.wrapping_sub(grown));
    }
    if let Some(bytes) = layer.activations {
        put_size(encoded, change(bytes, layer.growth.unwrap_or(0).cast_unsigned()));
    }
    for bytes in [layer.parameters, layer.gathered].into_iter().flatten() {
        put_size(encoded, bytes.cast_signed());
    }
    if let Some(bytes) = layer.gathered_sum {
        put_size(encoded, change(bytes, last.gathered_sum));
    }
    if let Some(modules) = layer.modules {
        put(encoded, modules);
    }
    if let Some(bytes) = layer.peak {
        put_size(encoded, change(bytes, allocated.unwrap_or(last.allocated)));
    }
    for bytes in [layer.held, layer.recompute].into_iter().flatten() {
        put_size(encoded, bytes);
    }
    *last = last.after(flags, number, record);
}

/// The record at a position, which advances past it. `None` at the end.
pub(super) fn decode(encoded: &[u8], at: &mut usize, last: &mut Last) -> Option<Numbered> {
    let flags = take(encoded, at)? ^ last.flags;
    let has = |bit: u32| flags >> bit & 1 == 1;
    let number = last.expected.wrapping_add(unzigzag(take(encoded, at)?));
    let mut layer = Layer::new(if has(0) { Direction::Backward } else { Direction::Forward });
    if has(8) {
        layer.duration_ns = Some(take(encoded, at)?);
    }
    let expected_ns = last.at_ns.wrapping_add(layer.duration_ns.unwrap_or(0).cast_signed());
    let at_ns = expected_ns.wrapping_add(unzigzag(take(encoded, at)?));
    let grown = if has(1) { Some(take_size(encoded, at)?) } else { None };
    let reserved = if has(2) { Some(changed(last.reserved, take_size(encoded, at)?)) } else { None };
    if has(3) {
        layer.growth = Some(grown.unwrap_or(0).wrapping_add(take_size(encoded, at)?));
    }
    if has(4) {
        layer.activations = Some(changed(layer.growth.unwrap_or(0).cast_unsigned(), take_size(encoded, at)?));
    }
    if has(5) {
        layer.parameters = Some(take_size(encoded, at)?.cast_unsigned());
    }
    if has(6) {
        layer.gathered = Some(take_size(encoded, at)?.cast_unsigned());
    }
    if has(7) {
        layer.gathered_sum = Some(changed(last.gathered_sum, take_size(encoded, at)?));
    }
    let allocated = grown.map(|grown| changed(last.allocated, grown));
    if has(9) {
        layer.modules = Some(take(encoded, at)?);
    }
    if has(10) {
        layer.peak = Some(changed(allocated.unwrap_or(last.allocated), take_size(encoded, at)?));
    }
    if has(11) {
        layer.held = Some(take_size(encoded, at)?);
    }
    if has(12) {
        layer.recompute = Some(take_size(encoded, at)?);
    }
    let record = Numbered { number: usize::try_from(number).ok()?, at_ns, allocated, reserved, layer };
    *last = last.after(flags, number, &record);
    Some(record)
}

impl Last {
    fn after(self, flags: u64, number: i64, record: &Numbered) -> Self {
        let ahead = if record.layer.direction == Direction::Forward { 1 } else { -1 };
        Self {
            flags,
            expected: number.wrapping_add(ahead),
            at_ns: record.at_ns,
            allocated: record.allocated.unwrap_or(self.allocated),
            reserved: record.reserved.unwrap_or(self.reserved),
            gathered_sum: record.layer.gathered_sum.unwrap_or(self.gathered_sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_record() -> impl Strategy<Value = Numbered> {
        let signed = prop::array::uniform3(any::<Option<i64>>());
        let layer = (any::<bool>(), signed, prop::array::uniform7(any::<Option<u64>>()));
        (0_usize..4_096, any::<i64>(), any::<Option<u64>>(), any::<Option<u64>>(), layer).prop_map(
            |(number, at_ns, allocated, reserved, (is_backward, [growth, held, recompute], more))| {
                let [activations, parameters, gathered, gathered_sum, duration_ns, modules, peak] = more;
                let direction = if is_backward { Direction::Backward } else { Direction::Forward };
                let known = Layer::new(direction);
                let layer = Layer {
                    growth,
                    activations,
                    parameters,
                    gathered,
                    gathered_sum,
                    duration_ns,
                    modules,
                    peak,
                    held,
                    recompute,
                    ..known
                };
                Numbered { number, at_ns, allocated, reserved, layer }
            },
        )
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(records in prop::collection::vec(any_record(), 0..50)) {
            let (mut encoded, mut last) = (Vec::new(), Last::default());
            for record in &records {
                let before = encoded.len();
                encode(&mut encoded, &mut last, record);
                prop_assert!(encoded.len() - before <= MOST_RECORD_BYTES);
            }
            let (mut at, mut last) = (0, Last::default());
            let decoded: Vec<_> = std::iter::from_fn(|| decode(&encoded, &mut at, &mut last)).collect();
            prop_assert_eq!((decoded, at), (records, encoded.len()));
        }
    }
}
