//! A row of numbers divided into consecutive parts so that the largest sum of a part is as small as can be.
//!
//! Enters: numbers in order, and how many cuts. Leaves: the least largest sum, and where the cuts are. Invariants: exact,
//! in time and memory that grow with numbers × cuts and numbers × √cuts; of several best divisions it is the one of
//! FairScale's `suggest_checkpoint_location`, whose first cut is as early as can be, then the second, and so on.

/// The best division of a row of numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The largest sum of a part, by number of cuts, from none to as many as were asked for.
    pub by_cuts: Vec<u64>,
    /// Where parts begin, except the first. Every part has at least one number.
    pub cuts: Vec<usize>,
}

/// One row of the dynamic program. For each position: the smallest possible largest sum of the numbers from there on, with a
/// fixed number of cuts.
type Row = Vec<u64>;

/// Divides `numbers` with `most` cuts, or with one less than there are numbers if that is fewer. `None` if the sum does
/// not fit a `u64`.
#[must_use]
pub fn partition(numbers: &[u64], most: usize) -> Option<Partition> {
    let mut before = Vec::with_capacity(numbers.len() + 1);
    before.push(0_u64);
    for number in numbers {
        before.push(before.last()?.checked_add(*number)?);
    }
    let sums = Sums { before };
    let most = most.min(numbers.len().saturating_sub(1));
    // Cuts are found from the last row to the first. Only every `stride`-th row is kept; the rows between are made again.
    let stride = most.isqrt().max(1);
    let mut row = sums.whole();
    let (mut kept, mut by_cuts) = (vec![row.clone()], vec![row[0]]);
    for cuts in 1..=most {
        row = sums.next(&row);
        by_cuts.push(row[0]);
        if cuts % stride == 0 {
            kept.push(row.clone());
        }
    }
    let (mut cuts, mut at, mut left) = (Vec::with_capacity(most), 0, most);
    while left > 0 {
        // Rebuilds the rows with up to `left` cuts from the last kept row that has fewer.
        let nth = (left - 1) / stride;
        let mut rows = vec![kept[nth].clone()];
        while nth * stride + rows.len() <= left {
            let next = sums.next(&rows[rows.len() - 1]);
            rows.push(next);
        }
        while rows.len() > 1 {
            let best = rows.pop()?[at];
            let rest = &rows[rows.len() - 1];
            // The earliest begin of the next part from which the rest is no worse. Rows never rise, so a binary search finds it.
            at += 1 + rest[at + 1..].partition_point(|sum| *sum > best);
            cuts.push(at);
            left -= 1;
        }
    }
    Some(Partition { by_cuts, cuts })
}

/// Sums of consecutive numbers.
struct Sums {
    /// Of all numbers before a position.
    before: Vec<u64>,
}

impl Sums {
    /// Without a cut: all that is left.
    fn whole(&self) -> Row {
        let all = self.before[self.before.len() - 1];
        self.before.iter().map(|before| all - before).collect()
    }

    /// With one cut more than a row has.
    fn next(&self, row: &[u64]) -> Row {
        let Self { before } = self;
        let mut next = vec![0; row.len()];
        // As `at` grows, the position `end` where the first part outgrows the rest only moves right, so one pass is enough.
        let mut end = 1;
        for at in 0..row.len() - 1 {
            end = end.max(at + 1);
            while before[end] - before[at] < row[end] {
                end += 1;
            }
            next[at] = before[end] - before[at];
            if end > at + 1 {
                next[at] = next[at].min(row[end - 1]);
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// FairScale's own tests, and what its program computes for the rest.
    #[test]
    fn the_divisions_of_fairscale() {
        let numbers = [10, 8, 8, 9, 7, 7, 5, 4, 4];
        let expected =
            [(0, 62, vec![]), (1, 35, vec![4]), (2, 24, vec![2, 5]), (3, 18, vec![2, 4, 6]), (4, 16, vec![1, 3, 4, 6])];
        for (most, largest, cuts) in expected {
            let found = partition(&numbers, most).expect("no overflow");
            assert_eq!(found.by_cuts[most], largest, "{most}");
            assert_eq!(found.cuts, cuts, "{most}");
        }
        // FairScale fails from here on.
        for most in [8, 9, 1_000_000] {
            let found = partition(&numbers, most).expect("no overflow");
            assert_eq!((found.by_cuts[8], found.by_cuts.len()), (10, 9));
            assert_eq!(found.cuts, (1..9).collect::<Vec<_>>(), "each alone");
        }
    }

    #[test]
    fn nothing_and_too_much() {
        assert_eq!(partition(&[], 3), Some(Partition { by_cuts: vec![0], cuts: vec![] }));
        assert_eq!(partition(&[0, 0], 1), Some(Partition { by_cuts: vec![0, 0], cuts: vec![1] }));
        assert_eq!(partition(&[u64::MAX, 0], 1).map(|found| found.by_cuts[1]), Some(u64::MAX));
        assert_eq!(partition(&[u64::MAX, 1], 1), None);
    }

    /// As FairScale writes it: every first part is tried, and the earliest of the best is taken.
    fn slow(numbers: &[u64], at: usize, cuts: usize) -> (u64, Vec<usize>) {
        let rest: u64 = numbers[at.min(numbers.len())..].iter().sum();
        if cuts == 0 || at >= numbers.len() {
            return (rest, Vec::new());
        }
        let mut best: Option<(u64, Vec<usize>)> = None;
        for end in at + 1..=numbers.len() {
            let (largest, later) = slow(numbers, end, cuts - 1);
            let largest = largest.max(numbers[at..end].iter().sum());
            if best.as_ref().is_none_or(|(known, _)| largest < *known) {
                best = Some((largest, std::iter::once(end).chain(later).collect()));
            }
        }
        best.unwrap_or_default()
    }

    proptest! {
        #[test]
        fn as_trying_everything(numbers in prop::collection::vec(0_u64..6, 1..9), cuts in 0_usize..9) {
            let (largest, mut expected) = slow(&numbers, 0, cuts);
            expected.retain(|cut| *cut < numbers.len());
            let found = partition(&numbers, cuts).expect("no overflow");
            prop_assert_eq!(found.by_cuts[cuts.min(numbers.len() - 1)], largest);
            prop_assert_eq!(found.cuts, expected);
        }
    }

    #[test]
    fn each_part_of_a_long_row_is_at_most_the_largest() {
        let numbers: Vec<u64> = (0..10_000_u64).map(|nth| nth * 7_919 % 1_009).collect();
        let found = partition(&numbers, 50).expect("no overflow");
        let ends = found.cuts.iter().copied().chain([numbers.len()]);
        let begins = [0].into_iter().chain(found.cuts.iter().copied());
        let sums: Vec<u64> = begins.zip(ends).map(|(begin, end)| numbers[begin..end].iter().sum()).collect();
        assert_eq!((sums.len(), sums.iter().max()), (51, Some(&found.by_cuts[50])));
        assert!(found.by_cuts.is_sorted_by(|more, fewer| more >= fewer));
    }
}
