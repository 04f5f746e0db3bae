use super::*;

/// Candidates in the order of the table, from savings and keys.
fn candidates(of: &[(u64, Vec<usize>)]) -> Vec<Candidate> {
    of.iter().enumerate().map(|(position, (saving, keys))| Candidate::new(position, *saving, keys.clone())).collect()
}

/// Every subset is tried: of those that suffice the fewest, then the smallest, then the earliest; without one, the largest
/// sum.
fn slow(of: &[(u64, Vec<usize>)], need: u64) -> Result<(u64, Vec<usize>), u64> {
    let mut best: Option<(usize, u64, Vec<usize>)> = None;
    let mut largest = 0;
    for subset in 0_u32..1 << of.len() {
        let positions: Vec<usize> = (0..of.len()).filter(|position| subset >> position & 1 == 1).collect();
        let mut keys: Vec<usize> = positions.iter().flat_map(|position| of[*position].1.clone()).collect();
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair[0] == pair[1]) {
            continue;
        }
        let total: u64 = positions.iter().map(|position| of[*position].0).sum();
        largest = largest.max(total);
        let this = (positions.len(), total, positions);
        if total >= need && best.as_ref().is_none_or(|best| this < *best) {
            best = Some(this);
        }
    }
    best.map(|(_, total, positions)| (total, positions)).ok_or(largest)
}

fn check(of: &[(u64, Vec<usize>)], need: u64) {
    let found = search(candidates(of), need);
    assert!(found.is_exact, "{of:?} {need}");
    match slow(of, need) {
        Ok(best) => assert_eq!((found.saving_bytes, found.positions), best, "{of:?} {need}"),
        Err(largest) => assert_eq!(found.saving_bytes, largest, "{of:?} {need}"),
    }
}

/// Numbers that look random, and are the same each time.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

#[test]
fn every_four_small_savings_with_every_two_exclusions() {
    let pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
    for savings in 0..81 {
        for exclusions in 0_usize..1 << pairs.len() {
            if exclusions.count_ones() > 2 {
                continue;
            }
            let of: Vec<(u64, Vec<usize>)> = (0..4)
                .map(|nth| {
                    let has =
                        |key: &usize| exclusions >> key & 1 == 1 && (pairs[*key].0 == nth || pairs[*key].1 == nth);
                    (
                        1 + savings / 3_u64.pow(u32::try_from(nth).expect("small")) % 3,
                        (0..pairs.len()).filter(has).collect(),
                    )
                })
                .collect();
            (0..=13).for_each(|need| check(&of, need));
        }
    }
}

#[test]
fn as_trying_everything_on_thousands_of_tables() {
    let mut dice = Dice(1);
    let (mut reached, mut not) = (0, 0);
    for _ in 0..4_000 {
        let (plans, keys, largest) = (1 + dice.throw(10), 1 + dice.throw(8), 1 + dice.throw(40));
        let of: Vec<(u64, Vec<usize>)> = (0..plans)
            .map(|_| {
                let mut has: Vec<usize> = (0..dice.throw(3)).filter_map(|_| dice.throw(keys).try_into().ok()).collect();
                has.sort_unstable();
                has.dedup();
                (1 + dice.throw(largest), has)
            })
            .collect();
        let need = dice.throw(plans * largest / 2 + 2);
        check(&of, need);
        match slow(&of, need) {
            Ok(_) => reached += 1,
            Err(_) => not += 1,
        }
    }
    assert!(reached > 1_000 && not > 300, "both are tried: {reached}, {not}");
}

#[test]
fn realistic_tables_are_searched_to_the_end() {
    let mut dice = Dice(7);
    for table in 0..60 {
        // As in ONNX Runtime: a few clusters by layer with the same savings, pairs of strategies, some combinations.
        let of: Vec<(u64, Vec<usize>)> = (0..48_usize)
            .map(|nth| match table % 3 {
                0 => ((1 + dice.throw(1 << 20)) << 12, vec![nth]),
                1 => (4_096 * (1 + dice.throw(6)), vec![nth / 2]),
                _ => (1 + dice.throw(1 << 30), vec![nth / 3, 100 + nth % 7 * (1 + nth % 5)]),
            })
            .collect();
        let all = search(candidates(&of), u64::MAX).saving_bytes;
        for percent in [5, 30, 60, 90, 100] {
            let need = all / 100 * percent;
            let found = search(candidates(&of), need);
            assert!(found.is_exact && found.saving_bytes >= need, "table {table}, {percent} %");
        }
    }
}

#[test]
fn many_equal_ones_are_no_burden() {
    let of: Vec<(u64, Vec<usize>)> = (0..400).map(|_| (10, vec![])).collect();
    let found = search(candidates(&of), 1_995);
    assert_eq!(found, Selection { positions: (0..200).collect(), saving_bytes: 2_000, is_exact: true });
}

#[test]
fn a_search_that_is_too_long_ends_and_says_so() {
    // Everybody excludes some others at random. Savings are nearly the same, or of many sizes.
    for (least, spread) in [(1_000, 100), (1, 1_000)] {
        let mut dice = Dice(3);
        let mut one = || {
            let keys = (0..6).filter_map(|_| dice.throw(300).try_into().ok()).collect();
            (least + dice.throw(spread), keys)
        };
        let of: Vec<(u64, Vec<usize>)> = (0..400).map(|_| one()).collect();
        let found = search(candidates(&of), u64::MAX);
        assert!(!found.is_exact && found.saving_bytes > 10_000, "{found:?}");
        // All that was found, and less of it: what suffices is known before the search for fewer ends.
        for need in [found.saving_bytes, found.saving_bytes * 9 / 10] {
            let found = search(candidates(&of), need);
            assert!(!found.is_exact && found.saving_bytes >= need, "{found:?}");
            let keys =
                found.positions.iter().flat_map(|position| of[*position].1.iter().map(move |key| (*key, *position)));
            let mut owners = HashMap::new();
            keys.for_each(|(key, position)| assert_eq!(*owners.entry(key).or_insert(position), position, "exclusive"));
        }
    }
}

#[test]
fn of_too_many_the_largest_are_taken() {
    let of: Vec<(u64, Vec<usize>)> = (0..4_096_u64).map(|nth| (1 + nth, vec![])).collect();
    let found = search(candidates(&of), 8_000);
    assert_eq!(found, Selection { positions: vec![4_094, 4_095], saving_bytes: 8_191, is_exact: false });
    let all = 4_096 * 4_097 / 2;
    assert_eq!(
        search(candidates(&of), all + 1),
        Selection { positions: (0..4_096).collect(), saving_bytes: all, is_exact: true }
    );
    assert_eq!(search(candidates(&of), 0), Selection { positions: vec![], saving_bytes: 0, is_exact: true });
}

#[test]
fn nothing_to_choose_from() {
    assert_eq!(search(vec![], 1), Selection { positions: vec![], saving_bytes: 0, is_exact: true });
    assert_eq!(search(vec![], 0), Selection { positions: vec![], saving_bytes: 0, is_exact: true });
    let huge = candidates(&[(u64::MAX - 1, vec![]), (1, vec![])]);
    assert_eq!(search(huge, u64::MAX).positions, [0, 1]);
}
