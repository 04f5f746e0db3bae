//! Steps, phases and layers: a table of all of them, and the longest of them one by one.

use highwater_core::jobs::EndedBy;
use highwater_core::thinned::Thinned;
use highwater_core::wire::Kind;
use std::collections::BTreeMap;

/// A step, phase or layer that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    /// The job.
    pub job: String,
    /// The rank.
    pub rank: u32,
    /// Step, phase or layer.
    pub kind: Kind,
    /// Its name; `step` for steps.
    pub name: String,
    /// The step that it is, or belongs to.
    pub step: Option<u64>,
    /// When it began and ended, nanoseconds.
    pub begin_ns: i64,
    /// See above.
    pub end_ns: i64,
    /// What ended it; nothing if the recording ended first.
    pub by: EndedBy,
    /// The highest memory inside it, bytes, over its GPUs.
    pub peak_bytes: Option<u64>,
}

/// One of the steps, phases and layers that are kept one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Position in [`Spans::ranks`].
    pub rank: usize,
    /// Position in [`Spans::rows`].
    pub row: usize,
    /// The step that it is, or belongs to.
    pub step: Option<u64>,
    /// When it began and ended, nanoseconds.
    pub begin_ns: i64,
    /// See above.
    pub end_ns: i64,
    /// What ended it; nothing if the recording ended first.
    pub by: EndedBy,
    /// The highest memory inside it, bytes.
    pub peak_bytes: Option<u64>,
}

/// All spans of one name of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Position in [`Spans::ranks`].
    pub rank: usize,
    /// Step, phase or layer.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// How many ended. Those that were open when their rank ended are not counted: how long they would have taken is not known.
    pub count: u64,
    /// Time in all that ended, nanoseconds.
    pub total_ns: i64,
    /// How long some of them took, evenly over all.
    pub sample: Sample,
    /// The longest; `None` if none ended.
    pub longest: Option<Span>,
    /// The span with the highest peak, whether or not it ended; `None` if the memory of no span is known.
    pub highest: Option<Span>,
}

impl Row {
    /// The mean duration, nanoseconds; `None` if none ended.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a mean")]
    pub fn mean_ns(&self) -> Option<f64> {
        (self.count > 0).then(|| self.total_ns as f64 / self.count as f64)
    }
}

/// Durations that are kept of one row.
const MOST_DURATIONS: usize = 256;

/// Durations of some spans, evenly over all, microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample(Thinned<u32, MOST_DURATIONS>);

impl Sample {
    fn push(&mut self, duration_ns: i64) {
        let us = duration_ns.max(0) / 1_000;
        self.0.push(u32::try_from(us).unwrap_or(u32::MAX));
    }

    /// The durations, nanoseconds: to the microsecond, and at most 71 minutes.
    pub fn durations_ns(&self) -> impl Iterator<Item = i64> + '_ {
        self.0.values().iter().map(|us| i64::from(*us) * 1_000)
    }
}

/// The spans of all ranks: totals by rank and name of all, and the longest one by one.
#[derive(Debug, Clone, Default)]
pub struct Spans {
    ranks: Vec<(String, u32)>,
    rows: Vec<Row>,
    by_name: BTreeMap<(String, u32), BTreeMap<(Kind, String), usize>>,
    spans: Vec<Span>,
    left_out: u64,
    most: usize,
    /// Spans that cover one of these times are dropped last.
    keep: Vec<i64>,
    /// Whether rows have no samples of durations.
    has_no_samples: bool,
}

/// The most rows of all ranks together. Spans of further names are not in any row; they are only counted as left out.
const MOST_ROWS: usize = 1 << 14;

impl Spans {
    /// No spans yet. Keeps at most `most` spans one by one; spans that cover a time in `keep` are dropped last.
    #[must_use]
    pub fn new(most: usize, keep: Vec<i64>) -> Self {
        Self { most, keep, ..Self::default() }
    }

    /// Whether durations are kept, to be compared with other recordings: they take up to a KiB a row.
    #[must_use]
    pub fn sampled(self, is_sampled: bool) -> Self {
        Self { has_no_samples: !is_sampled, ..self }
    }

    /// Counts spans that were lost before they could be added.
    pub fn lose(&mut self, count: u64) {
        self.left_out += count;
    }

    /// Adds one.
    pub fn push(&mut self, ended: Ended) {
        let Some(span) = self.add(ended) else { return };
        self.spans.push(span);
        if self.spans.len() >= 2 * self.most {
            self.thin();
        }
    }

    /// Adds several of one name to the totals of their row: the longest, how many there are and how long all took, nanoseconds. None is
    /// kept one by one.
    pub(super) fn count(&mut self, longest: Ended, count: u64, total_ns: i64) {
        self.left_out += count;
        let long_ns = longest.end_ns.saturating_sub(longest.begin_ns);
        let Some(row) = self.add(longest).map(|span| span.row) else {
            self.left_out -= 1;
            return;
        };
        let of = &mut self.rows[row];
        of.count += count.saturating_sub(1);
        of.total_ns = of.total_ns.saturating_add(total_ns.saturating_sub(long_ns));
    }

    /// Adds one to the totals of its row; `None` if there is no room for the row.
    fn add(&mut self, ended: Ended) -> Option<Span> {
        let Some(row) = self.row(&ended) else {
            self.left_out += 1;
            return None;
        };
        let of = &mut self.rows[row];
        let Ended { step, begin_ns, end_ns, by, peak_bytes, .. } = ended;
        let span = Span { rank: of.rank, row, step, begin_ns, end_ns, by, peak_bytes };
        if peak_bytes > of.highest.and_then(|highest| highest.peak_bytes) {
            of.highest = Some(span);
        }
        if by != EndedBy::End {
            return Some(span);
        }
        if of.longest.is_none_or(|longest| span.duration_ns() > longest.duration_ns()) {
            of.longest = Some(span);
        }
        of.count += 1;
        of.total_ns = of.total_ns.saturating_add(span.duration_ns());
        if of.kind != Kind::Layer && !self.has_no_samples {
            of.sample.push(span.duration_ns());
        }
        Some(span)
    }

    /// Puts everything in order, and leaves out the shortest spans if there are too many.
    pub fn finish(&mut self) {
        if self.spans.len() > self.most {
            self.thin();
        }
        self.spans.sort_by_key(|span| (span.begin_ns, std::cmp::Reverse(span.end_ns)));
        self.sort_rows();
    }

    /// Sorts ranks and rows, and updates the positions in every span.
    fn sort_rows(&mut self) {
        let mut ranks: Vec<usize> = (0..self.ranks.len()).collect();
        ranks.sort_by_key(|rank| &self.ranks[*rank]);
        let rank_now = positions(&ranks);
        let mut rows: Vec<usize> = (0..self.rows.len()).collect();
        rows.sort_by_key(|row| (rank_now[self.rows[*row].rank], self.rows[*row].kind, *row));
        let row_now = positions(&rows);
        let moved = |span: &mut Span| (span.rank, span.row) = (rank_now[span.rank], row_now[span.row]);
        self.ranks = ranks.iter().map(|rank| self.ranks[*rank].clone()).collect();
        self.rows = rows.iter().map(|row| self.rows[*row].clone()).collect();
        for row in &mut self.rows {
            row.rank = rank_now[row.rank];
            row.longest.as_mut().map(moved);
            row.highest.as_mut().map(moved);
        }
        self.spans.iter_mut().for_each(moved);
        self.by_name = BTreeMap::new();
    }

    /// The ranks, by job and number.
    #[must_use]
    pub fn ranks(&self) -> &[(String, u32)] {
        &self.ranks
    }

    /// Every name of every rank: by rank, steps first, and in the order in which they first appear.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The steps, phases and layers, in order of time.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// How many spans are not listed: the shortest, those of names beyond the bound, and those that were lost.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// The job and the rank at this position of `ranks`; an empty job if there is none.
    #[must_use]
    pub fn rank(&self, rank: usize) -> (&str, u32) {
        self.ranks.get(rank).map_or(("", 0), |(job, rank)| (job, *rank))
    }

    fn row(&mut self, ended: &Ended) -> Option<usize> {
        let known = self.by_name.get(&(ended.job.clone(), ended.rank));
        let name = (ended.kind, ended.name.clone());
        if let Some(row) = known.and_then(|names| names.get(&name)) {
            return Some(*row);
        }
        if self.rows.len() >= MOST_ROWS {
            return None;
        }
        let rank = known.and_then(|names| Some(self.rows[*names.values().next()?].rank)).unwrap_or_else(|| {
            self.ranks.push((ended.job.clone(), ended.rank));
            self.ranks.len() - 1
        });
        let row = self.rows.len();
        let (kind, name_of) = (ended.kind, ended.name.clone());
        let (sample, longest, highest) = (Sample::default(), None, None);
        self.rows.push(Row { rank, kind, name: name_of, count: 0, total_ns: 0, sample, longest, highest });
        self.by_name.entry((ended.job.clone(), ended.rank)).or_default().insert(name, row);
        Some(row)
    }

    fn thin(&mut self) {
        let is_kept = |span: &Span| self.keep.iter().any(|at_ns| span.holds(*at_ns));
        self.spans.sort_by_cached_key(|span| std::cmp::Reverse((is_kept(span), span.duration_ns())));
        self.left_out += self.spans.len().saturating_sub(self.most) as u64;
        self.spans.truncate(self.most);
    }
}

/// The inverse of a permutation: the position of each entry.
fn positions(order: &[usize]) -> Vec<usize> {
    let mut positions = vec![0; order.len()];
    for (position, entry) in order.iter().enumerate() {
        positions[*entry] = position;
    }
    positions
}

impl Span {
    /// Whether it contains a time.
    #[must_use]
    pub fn holds(&self, at_ns: i64) -> bool {
        self.begin_ns <= at_ns && at_ns < self.end_ns
    }

    /// How long it lasted, nanoseconds.
    #[must_use]
    pub fn duration_ns(&self) -> i64 {
        self.end_ns.saturating_sub(self.begin_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 6_000;

    fn ended(rank: u32, name: &str, begin_ns: i64, end_ns: i64, peak_bytes: Option<u64>) -> Ended {
        let kind = if name == "step" { Kind::Step } else { Kind::Phase };
        let (job, name, step) = ("j".to_owned(), name.to_owned(), Some(7));
        Ended { job, rank, kind, name, step, begin_ns, end_ns, by: EndedBy::End, peak_bytes }
    }

    #[test]
    fn the_table_counts_all_and_names_the_longest_and_the_highest() {
        let mut spans = Spans::new(MOST, Vec::new());
        for one in [
            ended(1, "step", 90, 100, None),
            ended(0, "step", 100, 200, Some(5)),
            ended(0, "forward", 100, 150, Some(4)),
            ended(0, "step", 200, 350, Some(5)),
        ] {
            spans.push(one);
        }
        spans.finish();
        assert_eq!(spans.ranks(), [("j".to_owned(), 0), ("j".to_owned(), 1)]);
        let steps = &spans.rows()[0];
        assert_eq!((steps.count, steps.total_ns, steps.longest.map(|span| span.begin_ns)), (2, 250, Some(200)));
        assert_eq!(steps.highest.map(|span| span.begin_ns), Some(100), "of equal peaks the first");
        let shown: Vec<_> = spans.rows().iter().map(|row| (spans.rank(row.rank).1, row.name.as_str())).collect();
        assert_eq!(shown, [(0, "step"), (0, "forward"), (1, "step")]);
        assert_eq!(spans.rows()[2].highest, None);
        assert_eq!(spans.spans().iter().map(|span| span.begin_ns).collect::<Vec<_>>(), [90, 100, 100, 200]);
        assert_eq!(spans.spans()[1].row, 0, "what contains another comes first");
    }

    #[test]
    fn of_those_that_their_rank_ended_the_peak_counts_and_no_time() {
        let mut spans = Spans::new(MOST, Vec::new());
        spans.push(ended(0, "forward", 0, 10, Some(5)));
        spans.push(Ended { by: EndedBy::Exit, ..ended(0, "forward", 20, 90, Some(7)) });
        spans.push(Ended { by: EndedBy::Exit, ..ended(0, "backward", 90, 95, None) });
        spans.finish();
        let [forward, backward] = spans.rows() else { panic!("{:?}", spans.rows()) };
        assert_eq!(
            (forward.count, forward.mean_ns(), forward.longest.map(|span| span.end_ns)),
            (1, Some(10.0), Some(10))
        );
        assert_eq!(forward.highest.map(|span| (span.peak_bytes, span.by)), Some((Some(7), EndedBy::Exit)));
        assert_eq!((backward.count, backward.mean_ns(), backward.longest), (0, None, None));
        assert_eq!(spans.spans().iter().filter(|span| span.by != EndedBy::End).count(), 2);
    }

    #[test]
    fn those_that_are_only_counted_are_in_the_totals_and_left_out_one_by_one() {
        let mut spans = Spans::new(MOST, Vec::new());
        spans.push(ended(0, "gemm", 0, 9, None));
        spans.count(ended(0, "gemm", 10, 17, None), 5, 20);
        spans.count(ended(0, "other", 20, 23, None), 2, 4);
        spans.finish();
        let rows: Vec<_> = spans
            .rows()
            .iter()
            .map(|row| (row.name.as_str(), row.count, row.total_ns, row.longest.map(|span| span.begin_ns)))
            .collect();
        assert_eq!(rows, [("gemm", 6, 29, Some(0)), ("other", 2, 4, Some(20))]);
        assert_eq!((spans.spans().len(), spans.left_out()), (1, 7));
    }

    #[test]
    fn of_too_many_the_shortest_are_left_out_and_counted_in_the_table() {
        let mut spans = Spans::new(MOST, Vec::new());
        let all = 2 * MOST as i64 + 10;
        for begin_ns in 0..all {
            spans.push(ended(0, "forward", begin_ns, begin_ns + 1 + begin_ns % 1_000, None));
        }
        spans.finish();
        assert_eq!((spans.spans().len(), spans.rows()[0].count), (MOST, all as u64));
        assert_eq!(spans.left_out(), all as u64 - MOST as u64);
        let shortest = spans.spans().iter().map(Span::duration_ns).min();
        assert!(shortest > Some(400), "{shortest:?}");
        assert!(spans.spans().is_sorted_by_key(|span| span.begin_ns));
    }
}
