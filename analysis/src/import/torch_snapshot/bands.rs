//! Which stacks held how much memory over time, in bounded memory.
//!
//! Enters: changes of what a stack holds, in order of events; at the end, what each stack held at the begin. Leaves: at most
//! 512 moments, each with the level of every stack that is drawn. Invariants: consecutive changes form stretches, and each
//! stretch is represented by the first moment at which its total was highest, with the levels of that very moment; when the
//! stretches are full, neighbours join. The levels of a moment never add up to more than its total; the rest of the total
//! belongs to stacks that are not drawn.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The most stretches. Even, so that all have equally many changes after neighbours have joined.
const MOST: usize = 512;
/// The most stacks of which a moment keeps the level: 16 bytes each, 2 MiB for all moments.
const MOST_KEPT: usize = 256;
/// Maximum number of stacks tracked at a time. Memory of further stacks is only in the total.
const MOST_STACKS: usize = 1 << 19;

/// When something was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct At {
    event: u64,
    time_us: Option<i64>,
}

/// What one stack holds, bytes less what it held at the begin.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    now: i64,
    /// The level at the top with the number `top`. If a newer top exists, the level there is `now`.
    at_top: i64,
    /// The number of the last top before the latest change.
    top: u64,
}

/// Consecutive changes.
#[derive(Debug)]
struct Stretch {
    begin: At,
    /// The first moment with the highest total.
    top: At,
    end: At,
    /// The total at the top, relative to the begin of the trace.
    total: i64,
    /// What the stacks with the largest levels held at the top; empty while the stretch is open.
    kept: Box<[(u32, i64)]>,
}

/// The stretches so far. Levels are relative to the begin of the trace, whose levels are known only at its end.
#[derive(Debug)]
pub(in crate::import) struct Bands {
    closed: Vec<Stretch>,
    open: Option<Stretch>,
    /// How many changes make a stretch.
    each: u64,
    /// Changes in the open stretch.
    changes: u64,
    total: i64,
    /// How many tops there were, of all stretches.
    tops: u64,
    held: HashMap<u32, Held>,
    /// Maximum number of tracked stacks; 0 once a stack was refused. A stack that is added later could have releases
    /// counted without its allocations.
    room: usize,
}

/// What was held over time, for drawing.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::import) struct Banded {
    /// The stacks with the highest levels at any moment, the highest first. Each held something at one of them.
    pub holders: Vec<u32>,
    /// In order of events. Empty, as the holders are, if nothing changed.
    pub moments: Vec<BandMoment>,
}

/// The moment that represents a stretch. Bytes.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::import) struct BandMoment {
    /// The first change of the stretch.
    pub begin_event: u64,
    pub begin_us: Option<i64>,
    /// The change after which the total was highest.
    pub event: u64,
    pub time_us: Option<i64>,
    /// The last change of the stretch.
    pub end_event: u64,
    pub end_us: Option<i64>,
    /// What all stacks held, drawn or not.
    pub total: u64,
    /// By holder. The sum is at most the total.
    pub held: Vec<u64>,
}

impl Default for Bands {
    fn default() -> Self {
        Self {
            closed: Vec::new(),
            open: None,
            each: 1,
            changes: 0,
            total: 0,
            tops: 0,
            held: HashMap::new(),
            room: MOST_STACKS,
        }
    }
}

impl Bands {
    /// Adds `bytes`, which may be negative, to what a stack holds after an event.
    pub fn change(&mut self, event: u64, time_us: Option<i64>, stack: u32, bytes: i64) {
        if self.changes >= self.each {
            self.close();
            self.join();
        }
        self.hold(stack, bytes);
        self.total = self.total.saturating_add(bytes);
        self.changes += 1;
        let (at, total) = (At { event, time_us }, self.total);
        let open = self.open.get_or_insert_with(|| {
            self.tops += 1;
            Stretch { begin: at, top: at, end: at, total, kept: Box::default() }
        });
        open.end = at;
        if total > open.total {
            (open.top, open.total) = (at, total);
            self.tops += 1;
        }
    }

    /// The moments, and up to `most` stacks with the highest levels. `before` has the bytes that each stack held at the begin.
    pub fn finish(mut self, before: &HashMap<u32, u64>, most: usize) -> Banded {
        self.close();
        let holders = holders(&self.closed, before, most);
        let ranks: HashMap<u32, usize> = holders.iter().enumerate().map(|(rank, stack)| (*stack, rank)).collect();
        let assumed: Vec<u64> = holders.iter().map(|stack| before.get(stack).copied().unwrap_or(0)).collect();
        let total_before = before.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let moments = self.closed.iter().map(|stretch| stretch.moment(&ranks, &assumed, total_before)).collect();
        Banded { holders, moments }
    }

    /// Changes a level, and keeps what it was at the last top, so that a new top needs no visit to every stack.
    fn hold(&mut self, stack: u32, bytes: i64) {
        if bytes == 0 {
            return;
        }
        let has_room = self.held.len() < self.room;
        let held = match self.held.entry(stack) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(vacant) if has_room => vacant.insert(Held::default()),
            Entry::Vacant(_) => {
                // No further stack is added from here on: this one's releases could be counted without its allocations.
                self.room = 0;
                return;
            }
        };
        if held.top != self.tops {
            (held.at_top, held.top) = (held.now, self.tops);
        }
        held.now = held.now.saturating_add(bytes);
    }

    /// Ends the open stretch, if there is one.
    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        let kept = self.collect();
        self.closed.push(Stretch { kept, ..open });
        self.changes = 0;
    }

    /// Makes place for another stretch.
    fn join(&mut self) {
        if self.closed.len() < MOST {
            return;
        }
        let mut stretches = std::mem::take(&mut self.closed).into_iter();
        while let Some(first) = stretches.next() {
            self.closed.push(match stretches.next() {
                Some(next) => first.and(next),
                None => first,
            });
        }
        self.each = self.each.saturating_mul(2);
    }

    /// The levels at the last top that are farthest from what they were at the begin.
    fn collect(&mut self) -> Box<[(u32, i64)]> {
        let mut kept = Vec::new();
        // No level nearer to 0 than this is among the largest. It saves most of the sorting when there are very many.
        let mut least = 1;
        let (tops, is_full) = (self.tops, self.room == 0);
        self.held.retain(|stack, held| {
            let level = if held.top == tops { held.at_top } else { held.now };
            if level.unsigned_abs() >= least {
                kept.push((*stack, level));
            }
            if kept.len() >= 2 * MOST_KEPT {
                keep_largest(&mut kept);
                least = kept.last().map_or(least, |(_, level)| level.unsigned_abs());
            }
            // A stack at its initial level needs no entry. Once stacks are refused it keeps it, as it could not get a new one.
            held.now != 0 || is_full
        });
        keep_largest(&mut kept);
        kept.into_boxed_slice()
    }
}

/// Drops all but the levels that are farthest from 0. If it drops any, the nearest to 0 of the others is the last. Ties are
/// broken by number, so that the order of a map does not matter.
fn keep_largest(levels: &mut Vec<(u32, i64)>) {
    if levels.len() > MOST_KEPT {
        levels.select_nth_unstable_by_key(MOST_KEPT - 1, |(stack, level)| (Reverse(level.unsigned_abs()), *stack));
        levels.truncate(MOST_KEPT);
    }
}

impl Stretch {
    fn and(self, next: Self) -> Self {
        let (begin, end) = (self.begin, next.end);
        let highest = if next.total > self.total { next } else { self };
        Self { begin, end, ..highest }
    }

    /// `assumed` has each holder's level at the begin, which stands in for a level that was not kept.
    fn moment(&self, ranks: &HashMap<u32, usize>, assumed: &[u64], total_before: u64) -> BandMoment {
        let mut levels: Vec<(u64, bool)> = assumed.iter().map(|bytes| (*bytes, false)).collect();
        for (stack, relative) in &self.kept {
            if let Some(level) = ranks.get(stack).and_then(|rank| levels.get_mut(*rank)) {
                *level = (level.0.saturating_add_signed(*relative), true);
            }
        }
        let total = total_before.saturating_add_signed(self.total);
        // Assumed levels may be too high. If the sum exceeds the total, they are cut, and exact levels are kept.
        let mut left = total;
        for is_exact in [true, false] {
            for (level, _) in levels.iter_mut().filter(|level| level.1 == is_exact) {
                *level = left.min(*level);
                left -= *level;
            }
        }
        let Self { begin, top, end, .. } = self;
        BandMoment {
            begin_event: begin.event,
            begin_us: begin.time_us,
            event: top.event,
            time_us: top.time_us,
            end_event: end.event,
            end_us: end.time_us,
            total,
            held: levels.into_iter().map(|level| level.0).collect(),
        }
    }
}

/// The stacks with the highest levels at any moment.
fn holders(stretches: &[Stretch], before: &HashMap<u32, u64>, most: usize) -> Vec<u32> {
    // The highest kept level of each stack, and of how many moments its level was kept.
    let mut highest: HashMap<u32, (u64, usize)> = HashMap::new();
    for (stack, relative) in stretches.iter().flat_map(|stretch| &stretch.kept) {
        let level = before.get(stack).copied().unwrap_or(0).saturating_add_signed(*relative);
        let (bytes, moments) = highest.entry(*stack).or_default();
        (*bytes, *moments) = (level.max(*bytes), *moments + 1);
    }
    for (stack, level) in before {
        let (bytes, moments) = highest.entry(*stack).or_default();
        if *moments < stretches.len() {
            *bytes = (*bytes).max(*level);
        }
    }
    let mut holders: Vec<(u32, u64)> = highest.into_iter().map(|(stack, (bytes, _))| (stack, bytes)).collect();
    holders.retain(|(_, bytes)| *bytes > 0);
    holders.sort_unstable_by_key(|(stack, bytes)| (Reverse(*bytes), *stack));
    holders.truncate(most);
    holders.into_iter().map(|(stack, _)| stack).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A change of a stack's level, and the levels at the begin.
    type Changes = Vec<(u32, i64)>;
    type Before = HashMap<u32, u64>;

    /// Numbers and times of events that `Bands` could not make up.
    fn event(change: usize) -> (u64, Option<i64>) {
        let event = 3 * change as u64 + 7;
        (event, (!change.is_multiple_of(5)).then_some(event.cast_signed() * 10))
    }

    fn banded(bands: Bands, changes: &[(u32, i64)], before: &Before, most: usize) -> Banded {
        let mut bands = bands;
        for (change, (stack, bytes)) in changes.iter().enumerate() {
            let (event, time_us) = event(change);
            bands.change(event, time_us, *stack, *bytes);
        }
        bands.finish(before, most)
    }

    /// The same from the levels of all stacks after every change.
    fn expected(changes: &[(u32, i64)], before: &Before, most: usize) -> Banded {
        let mut now: HashMap<u32, i64> = before.iter().map(|(stack, bytes)| (*stack, bytes.cast_signed())).collect();
        let mut levels = Vec::new();
        for (stack, bytes) in changes {
            *now.entry(*stack).or_default() += bytes;
            levels.push(now.clone());
        }
        let total = |change: usize| levels[change].values().sum::<i64>();
        let mut each = 1;
        while changes.len().div_ceil(each) > MOST {
            each *= 2;
        }
        let tops: Vec<(usize, usize, usize)> = (0..changes.len())
            .step_by(each)
            .map(|begin| {
                let end = changes.len().min(begin + each);
                let top = (begin..end).min_by_key(|change| (Reverse(total(*change)), *change)).unwrap();
                (begin, top, end - 1)
            })
            .collect();
        let at = |top: usize, stack: u32| levels[top].get(&stack).copied().unwrap_or(0).cast_unsigned();
        let mut holders: Vec<(Reverse<u64>, u32)> = now
            .keys()
            .map(|stack| (Reverse(tops.iter().map(|(_, top, _)| at(*top, *stack)).max().unwrap_or(0)), *stack))
            .filter(|(highest, _)| highest.0 > 0)
            .collect();
        holders.sort_unstable();
        let holders: Vec<u32> = holders.into_iter().take(most).map(|(_, stack)| stack).collect();
        let moments = tops.iter().map(|(begin, top, end)| BandMoment {
            begin_event: event(*begin).0,
            begin_us: event(*begin).1,
            event: event(*top).0,
            time_us: event(*top).1,
            end_event: event(*end).0,
            end_us: event(*end).1,
            total: total(*top).cast_unsigned(),
            held: holders.iter().map(|stack| at(*top, *stack)).collect(),
        });
        Banded { moments: moments.collect(), holders }
    }

    /// What the stacks must have held at the begin at least, and `more`.
    fn before(changes: &[(u32, i64)], more: &[(u32, u64)]) -> Before {
        let (mut now, mut before) = (HashMap::new(), Before::new());
        for (stack, bytes) in changes {
            let now: &mut i64 = now.entry(*stack).or_default();
            *now += bytes;
            if *now < 0 {
                let before = before.entry(*stack).or_default();
                *before = now.unsigned_abs().max(*before);
            }
        }
        for (stack, bytes) in more {
            *before.entry(*stack).or_default() += bytes;
        }
        before
    }

    /// Few stacks and sizes make ties, and levels that come back to those of the begin.
    fn changes(most: usize) -> impl Strategy<Value = Changes> {
        (1_u32..200, 1_i64..1000)
            .prop_flat_map(move |(stacks, bytes)| prop::collection::vec((0..stacks, -bytes..=bytes), 0..most))
    }

    fn check_sums(banded: &Banded) {
        for moment in &banded.moments {
            assert_eq!(moment.held.len(), banded.holders.len());
            let sum: u128 = moment.held.iter().map(|bytes| u128::from(*bytes)).sum();
            assert!(sum <= u128::from(moment.total), "{moment:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_moments_are_those_of_a_replay_that_keeps_every_level(
            changes in prop_oneof![changes(20), changes(600), changes(5000)],
            more in prop::collection::vec((0_u32..250, 0_u64..2000), 0..20),
            most in 0_usize..30,
        ) {
            let before = before(&changes, &more);
            let banded = banded(Bands::default(), &changes, &before, most);
            check_sums(&banded);
            prop_assert_eq!(banded, expected(&changes, &before, most));
        }

        #[test]
        fn any_numbers_at_all_add_up_to_no_more_than_the_total(
            changes in prop::collection::vec((0_u32..600, any::<i64>()), 0..2000),
            before in prop::collection::hash_map(0_u32..700, any::<u64>(), 0..100),
            room in prop_oneof![Just(MOST_STACKS), 0_usize..300],
            most in prop_oneof![Just(usize::MAX), 0_usize..30],
        ) {
            let banded = banded(Bands { room, ..Bands::default() }, &changes, &before, most);
            check_sums(&banded);
            prop_assert!(banded.holders.len() <= most);
            prop_assert!(banded.moments.len() <= MOST);
        }
    }

    /// By moment: the total, and what is held.
    fn levels(banded: &Banded) -> Vec<(u64, &[u64])> {
        banded.moments.iter().map(|moment| (moment.total, moment.held.as_slice())).collect()
    }

    #[test]
    fn what_was_there_at_the_begin_is_there_until_it_is_freed() {
        let changes = [(1, 100), (2, -300), (1, -100), (3, 50)];
        let banded = banded(Bands::default(), &changes, &Before::from([(2, 300), (4, 70), (5, 0)]), 10);
        assert_eq!(banded.holders, [2, 1, 4, 3], "5 never held anything");
        let expected: [(u64, &[u64]); 4] =
            [(470, &[300, 100, 70, 0]), (170, &[0, 100, 70, 0]), (70, &[0, 0, 70, 0]), (120, &[0, 0, 70, 50])];
        assert_eq!(levels(&banded), expected);
    }

    #[test]
    fn a_stack_that_was_at_its_highest_before_every_moment_ranks_by_its_moments() {
        let banded = banded(Bands::default(), &[(1, -90), (2, 20)], &Before::from([(1, 100)]), 10);
        assert_eq!(
            (banded.holders.as_slice(), levels(&banded)),
            (&[2, 1][..], vec![(10, &[0, 10][..]), (30, &[20, 10])])
        );
    }

    #[test]
    fn holders_are_the_highest_and_the_rest_is_in_the_total() {
        let banded = banded(Bands::default(), &[(9, 10), (3, 10), (4, 11), (5, 1)], &Before::new(), 2);
        assert_eq!(banded.holders, [4, 3], "of equal levels the lower number");
        assert_eq!(levels(&banded), [(10, &[0, 0][..]), (20, &[0, 10]), (31, &[11, 10]), (32, &[11, 10])]);
    }

    #[test]
    fn without_a_change_there_are_no_moments_and_so_no_holders() {
        let banded = Bands::default().finish(&Before::from([(1, 100)]), 10);
        assert_eq!(banded, Banded { holders: vec![], moments: vec![] });
    }

    #[test]
    fn a_moment_keeps_the_largest_levels_whatever_their_sign() {
        let stacks = 0..u32::try_from(3 * MOST_KEPT).unwrap();
        let sign = |stack: u32| if stack.is_multiple_of(2) { 1 } else { -1 };
        let changes: Changes = stacks.clone().map(|stack| (stack, sign(stack) * i64::from(stack + 1))).collect();
        let mut bands = Bands { each: u64::MAX, ..Bands::default() };
        for (stack, bytes) in changes.into_iter().chain([(1_000_000, 1 << 40)]) {
            bands.change(1, None, stack, bytes);
        }
        bands.close();
        let mut kept: Vec<u32> = bands.closed[0].kept.iter().map(|(stack, _)| *stack).collect();
        kept.sort_unstable();
        let largest = stacks.skip(2 * MOST_KEPT + 1).chain([1_000_000]);
        assert_eq!(kept, largest.collect::<Vec<u32>>());
    }

    #[test]
    fn of_equal_levels_those_of_the_lower_numbers_are_kept() {
        let mut bands = Bands { each: u64::MAX, ..Bands::default() };
        for stack in (0..u32::try_from(5 * MOST_KEPT).unwrap()).rev() {
            bands.change(1, None, stack, 8);
        }
        bands.close();
        assert!(bands.closed[0].kept.iter().all(|(stack, _)| (*stack as usize) < MOST_KEPT));
        assert_eq!(bands.closed[0].kept.len(), MOST_KEPT);
    }

    #[test]
    fn a_level_that_was_not_kept_gives_way_to_exact_ones() {
        // 500 bytes are freed that were there at the begin, which is less than what each of the others allocates.
        let mut changes: Changes = vec![(0, -500)];
        changes.extend((1..=u32::try_from(MOST_KEPT).unwrap()).map(|stack| (stack, 1000)));
        let mut bands = Bands { each: u64::MAX, ..Bands::default() };
        for (stack, bytes) in changes {
            bands.change(1, None, stack, bytes);
        }
        let banded = bands.finish(&Before::from([(0, 2000), (1000, 600)]), 300);
        assert_eq!((banded.holders[0], banded.holders[1], banded.holders.len()), (0, 1, MOST_KEPT + 2));
        let moment = &banded.moments[0];
        assert_eq!(moment.total, 256_000 + 1500 + 600);
        assert_eq!(
            (moment.held[0], moment.held[1]),
            (2000, 1000),
            "what is exact stays, what is not takes what is left"
        );
        assert_eq!(moment.held[MOST_KEPT + 1], 100);
    }

    #[test]
    fn more_is_freed_than_there_was() {
        let banded = banded(Bands::default(), &[(1, -100), (2, 50), (2, 70)], &Before::new(), 10);
        assert_eq!(
            (banded.holders.as_slice(), levels(&banded)),
            (&[2][..], vec![(0, &[0][..]), (0, &[0]), (20, &[20])])
        );
    }

    #[test]
    fn a_refused_stack_stays_nobodys_and_those_with_room_stay_exact() {
        let changes = [(1, 10), (2, 20), (3, 30), (1, -10), (4, 5), (3, -30), (1, 40), (4, -5)];
        let banded = banded(Bands { room: 2, ..Bands::default() }, &changes, &Before::from([(3, 7)]), 10);
        assert_eq!(banded.holders, [1, 2, 3]);
        let last: Vec<(u64, &[u64])> = levels(&banded).split_off(2);
        let expected: [(u64, &[u64]); 6] = [
            (67, &[10, 20, 7]),
            (57, &[0, 20, 7]),
            (62, &[0, 20, 7]),
            (32, &[0, 20, 7]),
            (72, &[40, 20, 7]),
            (67, &[40, 20, 7]),
        ];
        assert_eq!(last, expected);
    }

    #[test]
    fn a_million_changes_leave_as_many_moments_as_a_chart_needs() {
        let stack = |event: u64| u32::try_from(event % 100_000).unwrap();
        let mut bands = Bands::default();
        for event in 1..=1_000_003_u64 {
            // Each stack holds its bytes for 50 events; one of them more, and once.
            let bytes = if event == 777_777 { 1 << 40 } else { 100 };
            bands.change(2 * event, None, stack(event), bytes);
            if event > 50 {
                let bytes = if event - 50 == 777_777 { 1 << 40 } else { 100 };
                bands.change(2 * event + 1, None, stack(event - 50), -bytes);
            }
        }
        assert!(bands.held.len() < 5200, "stacks that hold nothing are dropped: {}", bands.held.len());
        let banded = bands.finish(&Before::new(), 1);
        assert!(banded.moments.len() <= MOST && banded.moments.len() > MOST / 4, "{}", banded.moments.len());
        assert_eq!(banded.holders, [77_777]);
        let top = banded.moments.iter().find(|moment| moment.event == 2 * 777_777);
        assert_eq!(top.map(|moment| (moment.total, moment.held[0])), Some(((1 << 40) + 5000, 1 << 40)));
        assert!(banded.moments.iter().all(|one| one.begin_event <= one.event && one.event <= one.end_event));
        let follows = |one: &BandMoment, next: &BandMoment| one.end_event < next.begin_event;
        assert!(banded.moments.is_sorted_by(follows), "stretches follow each other");
        assert_eq!(banded.moments.last().map(|last| last.end_event), Some(2 * 1_000_003 + 1));
    }
}
