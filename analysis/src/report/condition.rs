//! Conditions on recordings, for CI: `peak > 70GiB`, `peak.increase > 5%`.

use super::compare::{Difference, Measure};
use super::model::Report;
use highwater_core::units::{parse_bytes, parse_duration_ns};
use std::fmt;

/// When a recording fails.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    text: String,
    measure: Measure,
    of: Of,
    comparison: Order,
    bound: f64,
}

/// What of the measure is compared with the bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    /// The value itself.
    Value,
    /// By how much it is more than the first recording's.
    Increase,
    /// The same in percent.
    IncreasePercent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    More,
    AtLeast,
    Less,
    AtMost,
}

/// A recording that fails: the condition holds, or cannot be judged because a value is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// What is the matter, in one line.
    pub why: String,
    /// Whether the condition could be judged.
    pub is_known: bool,
}

const FORM: &str = "`MEASURE > VALUE` or `MEASURE.increase > VALUE` (also >=, <, <=), where MEASURE is one of peak, mean, \
                    duration, step, unknown and findings";

/// Why a text is not a condition.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConditionError {
    /// It does not compare a measure with a value.
    #[error("`{0}` is not {FORM}")]
    Form(String),
    /// It names something that is not measured.
    #[error("`{0}` is no measure: {FORM}")]
    UnknownMeasure(String),
    /// Only an increase can be a percentage.
    #[error("`{value}`: a percentage needs {measure}.increase")]
    NoIncrease {
        /// The percentage.
        value: String,
        /// What is measured.
        measure: String,
    },
    /// The value is not a size or a duration.
    #[error("{0}")]
    Unit(#[from] highwater_core::units::UnitError),
    /// The value is not a number.
    #[error("`{0}` is not a number")]
    Number(String),
}

impl std::str::FromStr for Condition {
    type Err = ConditionError;

    fn from_str(text: &str) -> Result<Self, ConditionError> {
        let form = || ConditionError::Form(text.to_owned());
        let at = text.find(['>', '<']).ok_or_else(form)?;
        let (name, rest) = text.split_at(at);
        let (comparison, value) =
            [(">=", Order::AtLeast), ("<=", Order::AtMost), (">", Order::More), ("<", Order::Less)]
                .into_iter()
                .find_map(|(sign, comparison)| Some((comparison, rest.strip_prefix(sign)?.trim())))
                .ok_or_else(form)?;
        let (name, is_increase) = match name.trim().strip_suffix(".increase") {
            Some(name) => (name, true),
            None => (name.trim(), false),
        };
        let measure = Measure::ALL.into_iter().find(|measure| measure.name() == name);
        let measure = measure.ok_or_else(|| ConditionError::UnknownMeasure(name.to_owned()))?;
        let (of, bound) = match (is_increase, value.strip_suffix('%')) {
            (true, Some(percent)) => (Of::IncreasePercent, plain(percent.trim())?),
            (false, Some(_)) => {
                return Err(ConditionError::NoIncrease { value: value.to_owned(), measure: name.to_owned() });
            }
            (true, None) => (Of::Increase, bound(measure, value)?),
            (false, None) => (Of::Value, bound(measure, value)?),
        };
        Ok(Self { text: text.trim().to_owned(), measure, of, comparison, bound })
    }
}

#[allow(clippy::cast_precision_loss, reason = "bytes below 2^53, and days of nanoseconds")]
fn bound(measure: Measure, value: &str) -> Result<f64, ConditionError> {
    Ok(match measure {
        Measure::Peak | Measure::Mean => parse_bytes(value)? as f64,
        Measure::Duration | Measure::Step | Measure::Unknown => parse_duration_ns(value)? as f64,
        Measure::Findings => plain(value)?,
    })
}

fn plain(value: &str) -> Result<f64, ConditionError> {
    let number: Option<f64> = value.parse().ok();
    number.filter(|number| number.is_finite()).ok_or_else(|| ConditionError::Number(value.to_owned()))
}

impl Condition {
    /// Whether it compares recordings with the first one.
    #[must_use]
    pub fn needs_two(&self) -> bool {
        self.of != Of::Value
    }

    /// The recordings for which it holds, and those for which it cannot be judged.
    #[must_use]
    pub fn failed(&self, reports: &[Report]) -> Vec<Failed> {
        let Some(first) = reports.first() else { return Vec::new() };
        let judged = if self.needs_two() { &reports[1..] } else { reports };
        judged.iter().filter_map(|report| self.judge(report, first)).collect()
    }

    fn judge(&self, report: &Report, first: &Report) -> Option<Failed> {
        let measure = self.measure;
        let beside = Difference::new(measure.of(report), measure.of(first));
        let value = match self.of {
            Of::Value => beside.value,
            Of::Increase => beside.increase,
            Of::IncreasePercent => beside.increase_ratio.map(|ratio| ratio * 100.0),
        };
        let Some(value) = value else {
            let name = measure.name();
            let why = match (beside.value, measure.of(first)) {
                (None, _) => format!("{}: {name} is not known", report.name),
                (_, None) => format!("{}: {name} is not known", first.name),
                _ => format!("{}: {name} is 0, of which nothing is a percentage", first.name),
            };
            return Some(Failed { why: format!("{why}, so `{self}` cannot be judged"), is_known: false });
        };
        let holds = match self.comparison {
            Order::More => value > self.bound,
            Order::AtLeast => value >= self.bound,
            Order::Less => value < self.bound,
            Order::AtMost => value <= self.bound,
        };
        let now = measure.show(beside.value.unwrap_or_default());
        let than = || format!("{now} after {} in {}", measure.show(measure.of(first).unwrap_or_default()), first.name);
        let shown = match self.of {
            Of::Value => now.clone(),
            Of::Increase => format!("{} more ({})", measure.show(value), than()),
            Of::IncreasePercent => format!("{value:+.1} % ({})", than()),
        };
        holds.then(|| Failed {
            why: format!("{}: {}: {shown}, and `{self}` fails it", report.name, measure.name()),
            is_known: true,
        })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_a_measure_a_sign_and_a_value_of_its_unit() {
        let parsed: Condition = " peak.increase >= 5 % ".parse().expect("a condition");
        assert_eq!(
            (parsed.measure, parsed.of, parsed.comparison, parsed.bound),
            (Measure::Peak, Of::IncreasePercent, Order::AtLeast, 5.0)
        );
        let parsed: Condition = "step<1.5ms".parse().expect("a condition");
        assert_eq!(
            (parsed.measure, parsed.of, parsed.comparison, parsed.bound),
            (Measure::Step, Of::Value, Order::Less, 1.5e6)
        );
        let parsed: Condition = "mean.increase > 1GiB".parse().expect("a condition");
        assert_eq!((parsed.of, parsed.bound, parsed.needs_two()), (Of::Increase, 1_073_741_824.0, true));
        let refused =
            ["peak", "peak = 3GiB", "top > 3GiB", "peak > 5%", "peak > 70", "findings > x", "step.increase > NaN%"];
        for (text, problem) in refused.into_iter().zip([
            "is not `MEASURE",
            "is not `MEASURE",
            "`top` is no measure",
            "a percentage needs peak.increase",
            "no unit",
            "`x` is not a number",
            "`NaN` is not a number",
        ]) {
            let error = text.parse::<Condition>().expect_err(text).to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
