//! Codes: what was written is read back, and costs the bits that the table says.

use crate::ring::code::{Bits, Coder};
use crate::ring::store::Copied;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn width(code: crate::ring::code::Code) -> u32 {
    code.len()
}

#[test]
fn a_steady_period_costs_seven_bits_and_is_found_again_after_it_changed() {
    let mut coder = Coder::new(1_000, 0);
    let costs = [1_000, 1_020, 990, 100_000, 100_010, 99_995].map(|distance| width(coder.encode_time(distance)));
    assert_eq!(costs, [7, 7, 7, 26, 26, 7]);
}

#[test]
fn a_finer_resolution_costs_the_bits_that_it_adds() {
    let mut coder = Coder::new(1, 0);
    assert_eq!(width(coder.encode_time(1_030_000)), 17);
}

#[test]
fn values_cost_what_the_table_says() {
    let mut coder = Coder::new(1_000, 0);
    let mut cost = |mib: u64| width(coder.encode_value(Some(mib * MIB)));
    assert_eq!([cost(20), cost(40), cost(60)], [12, 2, 2], "the same difference again");
    assert_eq!([cost(70), cost(90), cost(100)], [12, 4, 4], "one of the last");
    assert_eq!(cost(8_000), 15, "gigabytes");
    assert_eq!(cost(100_000), 28, "tens of gigabytes");
    assert_eq!(width(coder.encode_value(Some(100_000 * MIB + 65_536))), 28, "a step of 64 KiB");
    assert_eq!(width(coder.encode_value(Some(12_345))), 70, "no step at all");
    assert_eq!(width(coder.encode_value(None)), 6, "a gap");
}

/// Packs codes into words as the writer does, one bit at a time.
fn pack(codes: &[crate::ring::code::Code]) -> Vec<u64> {
    let mut bits = Vec::new();
    for code in codes {
        bits.extend((0..code.width).rev().map(|bit| code.bits >> bit & 1));
        bits.extend(code.raw.into_iter().flat_map(|raw| (0..64).rev().map(move |bit| raw >> bit & 1)));
    }
    bits.chunks(64).map(|chunk| chunk.iter().enumerate().fold(0, |word, (at, bit)| word | bit << (63 - at))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(
        points in prop::collection::vec((
            prop_oneof![950..1_050_i64, 0..40_000_i64, 0..i64::MAX],
            prop_oneof![
                (0..300_u64).prop_map(|granules| Some(granules * 2 * MIB)),
                (0..8_u64).prop_map(|granules| Some(granules * 2 * MIB)),
                (0..90_000_u64).prop_map(|granules| Some(granules * 2 * MIB)),
                (0..90_000_u64).prop_map(|steps| Some(steps << 16)),
                any::<u64>().prop_map(Some),
                Just(None),
            ],
        ), 0..200),
        resolution_ns in prop::sample::select(vec![1, 50, 1_000, 1_000_000_000]),
        begin_bytes in any::<u64>(),
    ) {
        let mut coder = Coder::new(resolution_ns, begin_bytes);
        let codes: Vec<_> = points
            .iter()
            .flat_map(|(distance, used)| [coder.encode_time(*distance), coder.encode_value(*used)])
            .collect();
        let words = pack(&codes);
        let (mut bits, mut coder) = (Bits::new(&words), Coder::new(resolution_ns, begin_bytes));
        for (distance, used) in points {
            prop_assert_eq!(coder.decode_time(&mut bits), distance);
            prop_assert_eq!(coder.decode_value(&mut bits), used);
        }
        prop_assert_eq!(bits.position(), codes.iter().map(|code| width(*code)).sum::<u32>());
    }

    /// Words that no encoder wrote: some numbers, an end where the words end, and no panic.
    #[test]
    fn words_that_nobody_wrote_come_to_an_end(
        words in prop::collection::vec(word(), 0..400),
        resolution_ns in prop::sample::select(vec![1, 50, 1_000, 1_000_000_000]),
        begin in any::<(i64, u64, bool)>(),
    ) {
        let copied = Copied::of_words(&words, begin);
        // A change point takes nine bits at least.
        prop_assert!(copied.points(resolution_ns).count() <= words.len() * 64 / 9 + 1);
    }
}

/// Random words, and those with long runs of ones: escapes with times and values at the ends of their ranges.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        Just(u64::MAX),
        Just(0),
        (any::<u64>(), 0..64_u32).prop_map(|(word, ones)| word | !(u64::MAX >> ones)),
        (0..64_u32).prop_map(|ones| u64::MAX >> ones),
    ]
}
