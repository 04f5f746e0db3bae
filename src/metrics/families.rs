//! Samples grouped by metric: the result of a collection, and the input of the exporters.

use super::catalogue::{self as c, ALL, Metric};
use highwater_core::histogram::Counts;
use highwater_core::phases::RankKey;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::slice;
use std::sync::Arc;

/// The value of one label. Values are equal if their texts are.
#[derive(Debug, Clone)]
pub enum LabelValue {
    /// One that the program knows. It takes no memory of its own.
    Known(&'static str),
    /// One from outside: of a device, a job, a process.
    Found(Arc<str>),
}

impl Deref for LabelValue {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            LabelValue::Known(text) => text,
            LabelValue::Found(text) => text,
        }
    }
}

impl From<&'static str> for LabelValue {
    fn from(text: &'static str) -> Self {
        LabelValue::Known(text)
    }
}

impl From<Arc<str>> for LabelValue {
    fn from(text: Arc<str>) -> Self {
        LabelValue::Found(text)
    }
}

impl PartialEq for LabelValue {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for LabelValue {}

impl Hash for LabelValue {
    fn hash<H: Hasher>(&self, state: &mut H) {
        str::hash(self, state);
    }
}

/// The values of a metric's labels, in their order. Samples of the same thing share them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Labels(Values);

/// No label and one that the program knows take no allocation: a node has hundreds of such series, and makes them anew for
/// every scrape. Each number of values has one form, so that equal labels are equal here.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Values {
    None,
    One(LabelValue),
    /// At least two.
    Several(Arc<[LabelValue]>),
}

impl Deref for Labels {
    type Target = [LabelValue];

    fn deref(&self) -> &[LabelValue] {
        match &self.0 {
            Values::None => &[],
            Values::One(text) => slice::from_ref(text),
            Values::Several(texts) => texts,
        }
    }
}

impl Labels {
    /// Copies of texts from outside.
    #[must_use]
    pub fn found(texts: &[&str]) -> Self {
        Self::of(texts.iter().map(|text| LabelValue::Found(Arc::from(*text))))
    }

    /// Those of a rank's series: its job's name, its number, and whose job it is as far as that is known.
    #[must_use]
    pub fn of_rank((job, rank): &RankKey) -> Self {
        let [namespace, user] =
            [job.scope().namespace(), job.scope().user()].map(|text| Arc::from(text.unwrap_or_default()));
        Self::from([Arc::clone(job.name()), Arc::from(rank.to_string()), namespace, user])
    }

    /// These and one more.
    #[must_use]
    pub fn with(&self, last: impl Into<LabelValue>) -> Self {
        let last = last.into();
        Self(match &**self {
            [] => Values::One(last),
            texts => Values::Several(texts.iter().cloned().chain([last]).collect()),
        })
    }

    fn of(mut texts: impl ExactSizeIterator<Item = LabelValue>) -> Self {
        Self(match texts.len() {
            0 => Values::None,
            1 => texts.next().map_or(Values::None, Values::One),
            _ => Values::Several(texts.collect()),
        })
    }
}

impl From<()> for Labels {
    fn from((): ()) -> Self {
        Self(Values::None)
    }
}

impl<const N: usize> From<[&'static str; N]> for Labels {
    fn from(texts: [&'static str; N]) -> Self {
        Self::of(texts.into_iter().map(LabelValue::Known))
    }
}

impl<const N: usize> From<[Arc<str>; N]> for Labels {
    fn from(texts: [Arc<str>; N]) -> Self {
        Self::of(texts.into_iter().map(LabelValue::Found))
    }
}

impl From<&Labels> for Labels {
    fn from(labels: &Labels) -> Self {
        labels.clone()
    }
}

/// The value of one sample.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Of a gauge or a counter.
    Number(f64),
    /// Of a histogram.
    Histogram(Box<Counts>),
}

/// One sample of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The values of the metric's labels.
    pub labels: Labels,
    /// The value.
    pub value: Value,
}

/// All samples of one metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// Which metric.
    pub metric: &'static Metric,
    /// Its samples.
    pub samples: Vec<Sample>,
    /// Which buckets its histograms have in `/metrics`.
    pub buckets: Buckets,
}

impl Family {
    /// A metric that is no histogram.
    #[must_use]
    pub fn of_numbers(metric: &'static Metric, samples: Vec<Sample>) -> Self {
        Self { metric, samples, buckets: Buckets::default() }
    }
}

/// Which buckets a histogram has, beside the one of all observations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Buckets {
    /// All, or those of `Coarse` if there are too many histograms.
    #[default]
    Fine,
    /// Every fourth.
    Coarse,
    /// None: native histograms, sums and counts remain.
    None,
}

/// The durations of what jobs do.
static DURATIONS: [&Metric; 2] = [&c::JOB_STEP_DURATION, &c::PHASE_DURATION];
/// Metrics for debugging the sampler.
static DIAGNOSTICS: [&Metric; 3] = [&c::NVML_CALL_DURATION, &c::NVML_CALL_FAILURES, &c::SAMPLER_LATENESS];

/// The samples of one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Families {
    /// Those of each metric, by its place in the catalogue.
    samples: Vec<Vec<Sample>>,
    /// Copies under other names, for `/metrics` alone.
    copies: Vec<Family>,
    choice: Choice,
}

/// What of all metrics is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The memory of single processes.
    pub processes: bool,
    /// The buckets of the durations of steps and phases.
    pub phase_buckets: Buckets,
    /// How long the sampler's calls took, and how late it was.
    pub diagnostics: bool,
    /// The metrics of GPUs under DCGM's names too, in `/metrics`.
    pub dcgm: bool,
}

impl Default for Choice {
    fn default() -> Self {
        Self { processes: false, phase_buckets: Buckets::Fine, diagnostics: true, dcgm: false }
    }
}

impl Default for Families {
    fn default() -> Self {
        Self::of(Choice::default())
    }
}

impl Families {
    /// No samples, with this choice of what is exported.
    #[must_use]
    pub fn of(choice: Choice) -> Self {
        Self { samples: vec![Vec::new(); ALL.len()], copies: Vec::new(), choice }
    }

    /// Adds a sample if its value is known. A value that is not finite counts as not known.
    pub fn number(&mut self, metric: &'static Metric, labels: impl Into<Labels>, value: Option<f64>) {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            self.push(metric, labels.into(), Value::Number(value));
        }
    }

    /// Adds a sample of a whole number if it is known.
    #[allow(clippy::cast_precision_loss, reason = "a double holds bytes and counts below 2^53 exactly")]
    pub fn count(&mut self, metric: &'static Metric, labels: impl Into<Labels>, value: Option<u64>) {
        self.number(metric, labels, value.map(|value| value as f64));
    }

    /// Adds a histogram.
    pub fn histogram(&mut self, metric: &'static Metric, labels: impl Into<Labels>, counts: Counts) {
        self.push(metric, labels.into(), Value::Histogram(Box::new(counts)));
    }

    /// The sum of all samples of a metric that are numbers.
    #[must_use]
    pub fn sum(&self, metric: &'static Metric) -> f64 {
        let number = |sample: &Sample| match sample.value {
            Value::Number(value) => value,
            Value::Histogram(_) => 0.0,
        };
        self.samples[metric.place].iter().map(number).sum()
    }

    /// The samples of a metric so far.
    #[must_use]
    pub fn samples_of(&self, metric: &'static Metric) -> &[Sample] {
        &self.samples[metric.place]
    }

    /// Adds copies of samples under other names.
    pub fn add_copies(&mut self, copies: Vec<Family>) {
        self.copies.extend(copies);
    }

    /// What `/metrics` shows: all families that have samples, in the catalogue's order, and copies after them.
    #[must_use]
    pub fn into_exposed(mut self) -> Vec<Family> {
        let copies = std::mem::take(&mut self.copies);
        let mut families = self.into_ordered();
        families.extend(copies);
        families
    }

    fn push(&mut self, metric: &'static Metric, labels: Labels, value: Value) {
        debug_assert_eq!(labels.len(), metric.labels.len(), "{}", metric.name);
        self.samples[metric.place].push(Sample { labels, value });
    }

    /// The families that have samples, in the catalogue's order.
    #[must_use]
    pub fn into_ordered(self) -> Vec<Family> {
        let all = ALL.iter().zip(self.samples);
        let chosen =
            |metric: &Metric| self.choice.diagnostics || !DIAGNOSTICS.iter().any(|one| std::ptr::eq(*one, metric));
        let buckets = |metric: &Metric| {
            let is_of_jobs = DURATIONS.iter().any(|one| std::ptr::eq(*one, metric));
            if is_of_jobs { self.choice.phase_buckets } else { Buckets::Fine }
        };
        all.filter(|(metric, samples)| !samples.is_empty() && chosen(metric))
            .map(|(metric, samples)| Family { metric, samples, buckets: buckets(metric) })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn labels_are_equal_by_their_texts_however_they_came() {
        let known = [Labels::from(()), Labels::from(["a"]), Labels::from(["a", "b"])];
        let found = [Labels::found(&[]), Labels::found(&["a"]), Labels::found(&["a", "b"])];
        assert_eq!(known, found);
        let series: HashSet<Labels> = known.into_iter().chain(found).collect();
        assert_eq!(series.len(), 3);
        assert_ne!(Labels::from(["a", "b"]), Labels::from(["a", "c"]));
        let shared = Labels::from([Arc::from("a"), Arc::from("b")]);
        assert!(series.contains(&shared));
        assert!(series.contains(&Labels::from(()).with("a")) && series.contains(&Labels::found(&["a"]).with("b")));
        assert_eq!(shared.with("c"), Labels::from(["a", "b", "c"]));
        assert_eq!(shared.iter().map(|value| &**value).collect::<Vec<_>>(), ["a", "b"]);
    }
}
