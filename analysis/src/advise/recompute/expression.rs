//! The symbolic savings of ONNX Runtime's plans, such as `128.0*dim0*dim1*(dim1 - 1)`, computed without rounding.
//!
//! Enters: an expression as SymPy prints it, and values of its names. Leaves: a fraction, or bytes. Invariants: exact, in
//! fractions of 128 bits; what does not fit is an error, as is everything but numbers, names, `+ - * / **` and parentheses;
//! an expression may come from anybody, so its length and depth are bounded. Absent on purpose: floating point, functions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The longest expression, bytes.
pub const MOST_BYTES: usize = 16 << 10;
/// How deep parentheses, signs and exponents may be nested.
pub const MOST_DEPTH: usize = 64;

/// Values of the symbolic dimensions by name.
pub type Dims = BTreeMap<String, u64>;

/// Why an expression has no value. `at` is the byte at which the culprit begins, from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// It has more than [`MOST_BYTES`].
    #[error("the expression has {0} bytes, and may have {MOST_BYTES}")]
    TooLong(usize),
    /// It is nested deeper than [`MOST_DEPTH`].
    #[error("the expression is nested deeper than {MOST_DEPTH} levels at byte {at}")]
    TooDeep {
        /// Where.
        at: usize,
    },
    /// It is not of the form that is known.
    #[error("expected {expected} at byte {at} of the expression, found {}", shown(*.found))]
    Syntax {
        /// Where.
        at: usize,
        /// What may be there.
        expected: &'static str,
        /// What is there; `None` at the end.
        found: Option<char>,
    },
    /// Names have no value.
    #[error("no value for {}; the expression needs {}", .missing.join(", "), .needed.join(", "))]
    Unknown {
        /// The names without a value, sorted.
        missing: Vec<String>,
        /// All names of the expression, sorted.
        needed: Vec<String>,
    },
    /// A result needs more than 128 bits.
    #[error("the value at byte {at} of the expression needs more than 128 bits")]
    Overflow {
        /// Where the operator or number is.
        at: usize,
    },
    /// A division by zero.
    #[error("division by zero at byte {at} of the expression")]
    DivisionByZero {
        /// Where the operator is.
        at: usize,
    },
    /// An exponent that is negative, a fraction, or above 2^32 - 1.
    #[error("the exponent at byte {at} of the expression is not an integer from 0 to 4294967295")]
    Exponent {
        /// Where the operator is.
        at: usize,
    },
    /// The value is below 0 or above 2^64 - 1: no number of bytes.
    #[error("the expression's value is {0}, which is no number of bytes")]
    NotBytes(Fraction),
}

fn shown(found: Option<char>) -> String {
    // A control character in a log is not repeated to a terminal.
    found.map_or_else(|| "its end".to_owned(), |found| format!("`{}`", found.escape_default()))
}

/// An exact value, in lowest terms; the denominator is above 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fraction {
    /// The numerator.
    pub numerator: i128,
    /// The denominator.
    pub denominator: i128,
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.denominator {
            1 => write!(f, "{}", self.numerator),
            denominator => write!(f, "{}/{denominator}", self.numerator),
        }
    }
}

/// Arithmetic in which `None` is a result of more than 128 bits.
impl Fraction {
    const ONE: Self = Self { numerator: 1, denominator: 1 };

    fn new(numerator: i128, denominator: i128) -> Option<Self> {
        let common = common(numerator, denominator)?;
        let (numerator, denominator) = (numerator.checked_div(common)?, denominator.checked_div(common)?);
        match denominator {
            ..0 => Some(Self { numerator: numerator.checked_neg()?, denominator: denominator.checked_neg()? }),
            _ => Some(Self { numerator, denominator }),
        }
    }

    fn plus(self, other: Self) -> Option<Self> {
        let common = common(self.denominator, other.denominator)?;
        let (ours, theirs) = (other.denominator.checked_div(common)?, self.denominator.checked_div(common)?);
        let numerator = self.numerator.checked_mul(ours)?.checked_add(other.numerator.checked_mul(theirs)?)?;
        Self::new(numerator, self.denominator.checked_mul(ours)?)
    }

    fn negative(self) -> Option<Self> {
        Some(Self { numerator: self.numerator.checked_neg()?, ..self })
    }

    fn times(self, other: Self) -> Option<Self> {
        // Reduced crosswise first, so that only a result that does not fit overflows.
        let (left, right) =
            (Self::new(self.numerator, other.denominator)?, Self::new(other.numerator, self.denominator)?);
        let numerator = left.numerator.checked_mul(right.numerator)?;
        Some(Self { numerator, denominator: left.denominator.checked_mul(right.denominator)? })
    }

    fn inverse(self) -> Option<Self> {
        Self::new(self.denominator, self.numerator)
    }

    fn power(self, mut exponent: u32) -> Option<Self> {
        let (mut base, mut result) = (self, Self::ONE);
        while exponent > 0 {
            if exponent % 2 == 1 {
                result = result.times(base)?;
            }
            exponent /= 2;
            if exponent > 0 {
                base = base.times(base)?;
            }
        }
        Some(result)
    }
}

/// The greatest common divisor; `None` if it does not fit, or both are 0.
fn common(left: i128, right: i128) -> Option<i128> {
    let (mut left, mut right) = (left.unsigned_abs(), right.unsigned_abs());
    while right > 0 {
        (left, right) = (right, left.checked_rem(right)?);
    }
    i128::try_from(left).ok().filter(|common| *common > 0)
}

/// The exact value of an expression.
///
/// # Errors
/// It is not understood, needs a name that has no value, or cannot be computed; says which and where.
pub fn evaluate(text: &str, dims: &Dims) -> Result<Fraction, ExpressionError> {
    if text.len() > MOST_BYTES {
        return Err(ExpressionError::TooLong(text.len()));
    }
    // The first pass has no values: it reports syntax errors before missing names, and collects all names.
    let mut form = Parser { text, at: 0, depth: 0, dims: None, names: BTreeSet::new() };
    form.whole()?;
    let missing: Vec<String> =
        form.names.iter().filter(|name| !dims.contains_key(**name)).map(|name| (*name).to_owned()).collect();
    if !missing.is_empty() {
        return Err(ExpressionError::Unknown {
            missing,
            needed: form.names.iter().map(|name| (*name).to_owned()).collect(),
        });
    }
    let mut valued = Parser { text, at: 0, depth: 0, dims: Some(dims), names: BTreeSet::new() };
    valued.whole()?.ok_or(ExpressionError::Overflow { at: 1 })
}

/// The names in an expression; none if it cannot be read.
#[must_use]
pub fn names(text: &str) -> Vec<String> {
    match evaluate(text, &Dims::new()) {
        Err(ExpressionError::Unknown { needed, .. }) => needed,
        _ => Vec::new(),
    }
}

/// The value of an expression as bytes, rounded down.
///
/// # Errors
/// As [`evaluate`], or the value is no number of bytes.
pub fn bytes(text: &str, dims: &Dims) -> Result<u64, ExpressionError> {
    let value = evaluate(text, dims)?;
    let whole = value.numerator.div_euclid(value.denominator);
    u64::try_from(whole).map_err(|_| ExpressionError::NotBytes(value))
}

/// `None` while only the form is looked at.
type Value = Option<Fraction>;

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    dims: Option<&'a Dims>,
    names: BTreeSet<&'a str>,
}

impl<'a> Parser<'a> {
    fn whole(&mut self) -> Result<Value, ExpressionError> {
        let value = self.sum()?;
        match self.rest().is_empty() {
            true => Ok(value),
            false => Err(self.unexpected("an operator or the end")),
        }
    }

    /// What is left, without blanks before it.
    fn rest(&mut self) -> &'a str {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let trimmed = rest.trim_start();
        self.at += rest.len() - trimmed.len();
        trimmed
    }

    /// Consumes a token if it is next, and returns its position, from 1.
    fn take(&mut self, token: &str) -> Option<usize> {
        self.rest().starts_with(token).then(|| {
            self.at += token.len();
            self.at + 1 - token.len()
        })
    }

    fn unexpected(&mut self, expected: &'static str) -> ExpressionError {
        let found = self.rest().chars().next();
        ExpressionError::Syntax { at: self.at + 1, expected, found }
    }

    fn sum(&mut self) -> Result<Value, ExpressionError> {
        let mut sum = self.product()?;
        loop {
            if let Some(at) = self.take("+") {
                sum = computed(at, sum, self.product()?, Fraction::plus)?;
            } else if let Some(at) = self.take("-") {
                sum = computed(at, sum, self.product()?, |left, right| left.plus(right.negative()?))?;
            } else {
                return Ok(sum);
            }
        }
    }

    fn product(&mut self) -> Result<Value, ExpressionError> {
        let mut product = self.signed()?;
        loop {
            if let Some(at) = self.take("*") {
                product = computed(at, product, self.signed()?, Fraction::times)?;
            } else if let Some(at) = self.take("/") {
                let divisor = self.signed()?;
                if divisor.is_some_and(|divisor| divisor.numerator == 0) {
                    return Err(ExpressionError::DivisionByZero { at });
                }
                product = computed(at, product, divisor, |left, right| left.times(right.inverse()?))?;
            } else {
                return Ok(product);
            }
        }
    }

    fn signed(&mut self) -> Result<Value, ExpressionError> {
        match self.take("-") {
            Some(at) => {
                let value = self.nested(Self::signed)?;
                value.map(|value| value.negative().ok_or(ExpressionError::Overflow { at })).transpose()
            }
            None => self.power(),
        }
    }

    /// Binds tighter than a sign before it, and is right-associative, as in Python.
    fn power(&mut self) -> Result<Value, ExpressionError> {
        let base = self.atom()?;
        let Some(at) = self.take("**") else { return Ok(base) };
        let Some((exponent, base)) = self.nested(Self::signed)?.zip(base) else { return Ok(None) };
        let whole = Some(exponent.numerator).filter(|_| exponent.denominator == 1);
        let whole = whole.and_then(|whole| u32::try_from(whole).ok()).ok_or(ExpressionError::Exponent { at })?;
        base.power(whole).map(Some).ok_or(ExpressionError::Overflow { at })
    }

    fn atom(&mut self) -> Result<Value, ExpressionError> {
        if self.take("(").is_some() {
            let value = self.nested(Self::sum)?;
            return match self.take(")") {
                Some(_) => Ok(value),
                None => Err(self.unexpected("an operator or `)`")),
            };
        }
        match self.rest().bytes().next() {
            Some(b'0'..=b'9') => self.number(),
            Some(b'a'..=b'z' | b'A'..=b'Z' | b'_') => {
                let name = self.run(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
                self.names.insert(name);
                let value = self.dims.and_then(|dims| dims.get(name));
                Ok(value.map(|value| Fraction { numerator: i128::from(*value), denominator: 1 }))
            }
            _ => Err(self.unexpected("a number, a name, `-` or `(`")),
        }
    }

    fn number(&mut self) -> Result<Value, ExpressionError> {
        let at = self.at + 1;
        let whole = self.run(|byte| byte.is_ascii_digit());
        let mut fraction = "";
        if self.text.get(self.at..).unwrap_or_default().starts_with('.') {
            self.at += 1;
            fraction = self.run(|byte| byte.is_ascii_digit());
            if fraction.is_empty() {
                return Err(self.unexpected("a digit"));
            }
        }
        // SymPy writes `4096.00000000000`: the zeros would need bits for nothing.
        let fraction = fraction.trim_end_matches('0');
        let digits = whole.bytes().chain(fraction.bytes()).map(|digit| i128::from(digit - b'0'));
        let value = digits.into_iter().try_fold(0_i128, |value, digit| value.checked_mul(10)?.checked_add(digit));
        let scale = u32::try_from(fraction.len()).ok().and_then(|digits| 10_i128.checked_pow(digits));
        let value = value.zip(scale).and_then(|(value, scale)| Fraction::new(value, scale));
        value.ok_or(ExpressionError::Overflow { at }).map(|value| self.dims.map(|_| value))
    }

    /// Passes the bytes that belong to a token.
    fn run(&mut self, belongs: impl Fn(u8) -> bool) -> &'a str {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let length = rest.bytes().take_while(|byte| belongs(*byte)).count();
        self.at += length;
        rest.get(..length).unwrap_or_default()
    }

    fn nested(
        &mut self,
        inner: impl Fn(&mut Self) -> Result<Value, ExpressionError>,
    ) -> Result<Value, ExpressionError> {
        if self.depth >= MOST_DEPTH {
            return Err(ExpressionError::TooDeep { at: self.at + 1 });
        }
        self.depth += 1;
        let value = inner(self);
        self.depth -= 1;
        value
    }
}

fn computed(
    at: usize,
    left: Value,
    right: Value,
    operator: impl Fn(Fraction, Fraction) -> Option<Fraction>,
) -> Result<Value, ExpressionError> {
    left.zip(right).map(|(left, right)| operator(left, right).ok_or(ExpressionError::Overflow { at })).transpose()
}

#[cfg(test)]
mod tests;
