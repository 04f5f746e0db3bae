//! Samples grouped by metric: the result of a collection, and the input of the exporters.

use super::catalogue::{ALL, Metric};
use highwater_core::histogram::Counts;
use std::ops::Deref;
use std::sync::Arc;

/// The values of a metric's labels, in their order. Samples of the same thing share them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Labels(Arc<[Arc<str>]>);

impl Deref for Labels {
    type Target = [Arc<str>];

    fn deref(&self) -> &[Arc<str>] {
        &self.0
    }
}

impl<const N: usize> From<[Arc<str>; N]> for Labels {
    fn from(values: [Arc<str>; N]) -> Self {
        Self(Arc::new(values))
    }
}

impl<const N: usize> From<&[&str; N]> for Labels {
    fn from(values: &[&str; N]) -> Self {
        Self::from(&values[..])
    }
}

impl From<&[&str]> for Labels {
    fn from(values: &[&str]) -> Self {
        Self(values.iter().map(|value| Arc::from(*value)).collect())
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
}

/// The samples of one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Families {
    /// Those of each metric, by its place in the catalogue.
    samples: Vec<Vec<Sample>>,
}

impl Default for Families {
    fn default() -> Self {
        Self { samples: vec![Vec::new(); ALL.len()] }
    }
}

impl Families {
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

    fn push(&mut self, metric: &'static Metric, labels: Labels, value: Value) {
        debug_assert_eq!(labels.len(), metric.labels.len(), "{}", metric.name);
        self.samples[metric.place].push(Sample { labels, value });
    }

    /// The families that have samples, in the catalogue's order.
    #[must_use]
    pub fn into_ordered(self) -> Vec<Family> {
        let all = ALL.iter().zip(self.samples);
        all.filter(|(_, samples)| !samples.is_empty()).map(|(metric, samples)| Family { metric, samples }).collect()
    }
}
