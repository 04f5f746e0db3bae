//! Sizes and durations as people write them: `"40 GiB"`, `"1.5 MiB"`, `"200 ms"`, `"5m"`.
//!
//! Enters: text of a scenario, a setting or a flag. Leaves: bytes or nanoseconds, exact to the last one. One number
//! and one unit; space between them is free. Absent on purpose: units that mean two things to two people (`G`, `kb`,
//! `M`) and durations without a unit, which are refused rather than guessed.

use serde::de::{self, Deserialize, Deserializer, Visitor};
use std::fmt;

/// Why a size or duration cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// There is no number at the front.
    #[error("`{text}` is not a {what}: write it like {example}")]
    NotANumber {
        /// What was given.
        text: String,
        /// `size` or `duration`.
        what: &'static str,
        /// A value that would do.
        example: &'static str,
    },
    /// The unit is missing or not one of those known.
    #[error("`{text}`: {} unit; known units are {known}", if .unit.is_empty() { "no".into() } else { format!("`{}` is no known", .unit) })]
    Unit {
        /// What was given.
        text: String,
        /// The unit in it; empty where there is none.
        unit: String,
        /// The units that would do.
        known: &'static str,
    },
    /// The value is beyond what is representable, or not 0 and smaller than the smallest unit.
    #[error("`{text}` is out of range")]
    OutOfRange {
        /// What was given.
        text: String,
    },
}

/// What a family of units is called and how large each of them is.
struct Family {
    what: &'static str,
    example: &'static str,
    known: &'static str,
    units: &'static [(&'static str, u64)],
}

const SIZES: Family = Family {
    what: "size",
    example: "`40 GiB` or `1.5 MiB`",
    known: "B, KiB, MiB, GiB, TiB, kB, MB, GB, TB",
    units: &[
        ("B", 1),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("kB", 1_000),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
    ],
};

const DURATIONS: Family = Family {
    what: "duration",
    example: "`200 ms` or `1.5 s`",
    known: "ns, us, ms, s, m (or min), h, d",
    units: &[
        ("ns", 1),
        ("us", 1_000),
        ("µs", 1_000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
        ("m", 60_000_000_000),
        ("min", 60_000_000_000),
        ("h", 3_600_000_000_000),
        ("d", 86_400_000_000_000),
    ],
};

/// Reads a size, as `40 GiB`, `64MiB`, `1.5 GB` or `0 B`, into bytes; a fraction of a byte is cut off.
///
/// # Errors
/// [`UnitError`] for anything else: the message repeats the text and lists the units.
pub fn parse_bytes(text: &str) -> Result<u64, UnitError> {
    SIZES.parse(text)
}

/// A size as [`parse_bytes`] reads it, in the largest binary unit in which it is a whole number: `1GiB`, `1536MiB`, `1001B`.
#[must_use]
pub fn exact_bytes(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")];
    let fits = |(shift, _): &(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= *shift;
    let (shift, unit) = units.into_iter().find(fits).unwrap_or((0, "B"));
    format!("{}{unit}", bytes >> shift)
}

/// Reads a duration, as `200 ms`, `1ms`, `1.5 s` or `5m`, into nanoseconds; a fraction of a nanosecond is cut off.
/// Only `0` needs no unit.
///
/// # Errors
/// [`UnitError`] for anything else: the message repeats the text and lists the units.
pub fn parse_duration_ns(text: &str) -> Result<i64, UnitError> {
    if text.trim() == "0" {
        return Ok(0);
    }
    let value = DURATIONS.parse(text)?;
    i64::try_from(value).map_err(|_| UnitError::OutOfRange { text: text.to_owned() })
}

impl Family {
    fn parse(&self, text: &str) -> Result<u64, UnitError> {
        let trimmed = text.trim();
        let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits_end);
        let unit = unit.trim_start();
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || fraction.contains('.') || (number.contains('.') && fraction.is_empty()) {
            let text = text.to_owned();
            return Err(UnitError::NotANumber { text, what: self.what, example: self.example });
        }
        let Some((_, factor)) = self.units.iter().find(|(name, _)| *name == unit) else {
            return Err(UnitError::Unit { text: text.to_owned(), unit: unit.to_owned(), known: self.known });
        };
        scale(whole, fraction, *factor).ok_or_else(|| UnitError::OutOfRange { text: text.to_owned() })
    }
}

/// `whole.fraction × factor` in whole numbers; `None` when it does not fit, or is cut off to nothing.
fn scale(whole: &str, fraction: &str, factor: u64) -> Option<u64> {
    let fraction = fraction.trim_end_matches('0');
    let denominator = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let whole = u128::from(whole.parse::<u64>().ok()?);
    let fraction = if fraction.is_empty() { 0 } else { fraction.parse::<u64>().ok()?.into() };
    let numerator = whole.checked_mul(denominator)?.checked_add(fraction)?;
    let value = u64::try_from(numerator.checked_mul(factor.into())? / denominator).ok()?;
    (value > 0 || numerator == 0).then_some(value)
}

/// A size in a file: text with a unit, or a whole number of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A duration in a file, nanoseconds: text with a unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanoseconds(pub i64);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a size like {}", SIZES.example)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                parse_bytes(text).map(Bytes).map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Bytes, E> {
                u64::try_from(bytes).map(Bytes).map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))
            }
        }
        deserializer.deserialize_any(Size)
    }
}

impl<'de> Deserialize<'de> for Nanoseconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Duration;
        impl Visitor<'_> for Duration {
            type Value = Nanoseconds;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a duration with its unit, like {}", DURATIONS.example)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Nanoseconds, E> {
                parse_duration_ns(text).map(Nanoseconds).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_written_as_it_is_read() {
        for text in ["1GiB", "1536MiB", "1001B", "3KiB", "2TiB", "0B"] {
            assert_eq!(exact_bytes(parse_bytes(text).expect("a size")), text);
        }
    }

    #[test]
    fn sizes_are_exact() {
        for (text, bytes) in [
            ("40 GiB", 40 << 30),
            ("40GiB", 40 << 30),
            (" 64 MiB ", 64 << 20),
            ("1.5 MiB", 3 << 19),
            ("0.1 kB", 100),
            ("2.50 GB", 2_500_000_000),
            ("0 B", 0),
            ("18446744073709551615 B", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn durations_are_exact() {
        for (text, ns) in [
            ("1ms", 1_000_000),
            ("500us", 500_000),
            ("500 µs", 500_000),
            ("10 s", 10_000_000_000),
            ("4.9999 s", 4_999_900_000),
            ("5m", 300_000_000_000),
            ("5 min", 300_000_000_000),
            ("1h", 3_600_000_000_000),
            ("0", 0),
            ("0 s", 0),
        ] {
            assert_eq!(parse_duration_ns(text), Ok(ns), "{text}");
        }
    }

    #[test]
    fn what_is_ambiguous_is_refused_and_says_how_to_write_it() {
        for (text, message) in [
            ("40", "`40`: no unit; known units are B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"),
            ("40 G", "`40 G`: `G` is no known unit; known units are B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"),
            ("lots", "`lots` is not a size: write it like `40 GiB` or `1.5 MiB`"),
            ("-1 GiB", "`-1 GiB` is not a size: write it like `40 GiB` or `1.5 MiB`"),
            ("1. GiB", "`1. GiB` is not a size: write it like `40 GiB` or `1.5 MiB`"),
            ("1.2.3 GiB", "`1.2.3 GiB` is not a size: write it like `40 GiB` or `1.5 MiB`"),
            ("99999999 TiB", "`99999999 TiB` is out of range"),
            ("0.1 B", "`0.1 B` is out of range"),
        ] {
            assert_eq!(parse_bytes(text).expect_err(text).to_string(), message);
        }
        assert!(parse_duration_ns("10").expect_err("no unit").to_string().contains("no unit"));
        assert!(parse_duration_ns("400000 d").expect_err("too long").to_string().contains("out of range"));
    }

    #[test]
    fn every_unit_has_its_size() {
        let bytes = |unit: &str| parse_bytes(&format!("3 {unit}")).expect(unit);
        assert_eq!(["B", "KiB", "MiB", "GiB", "TiB"].map(bytes), [3, 3 << 10, 3 << 20, 3 << 30, 3 << 40]);
        let decimal = [3_000, 3_000, 3_000_000, 3_000_000_000, 3_000_000_000_000];
        assert_eq!(["kB", "KB", "MB", "GB", "TB"].map(bytes), decimal);
    }

    #[test]
    fn files_have_text_with_a_unit_or_a_whole_number_of_bytes() {
        let bytes = |json: serde_json::Value| serde_json::from_value::<Bytes>(json).map_err(|e| e.to_string());
        assert_eq!(bytes("2 KiB".into()), Ok(Bytes(2_048)));
        assert_eq!((bytes(7.into()), bytes(i64::MAX.into())), (Ok(Bytes(7)), Ok(Bytes(i64::MAX as u64))));
        assert!(bytes("2".into()).is_err_and(|message| message.contains("no unit")));
        for wrong in [serde_json::json!(-1), true.into()] {
            assert!(bytes(wrong).is_err_and(|message| message.contains("a size like `40 GiB` or `1.5 MiB`")));
        }
        let ns = |json: serde_json::Value| serde_json::from_value::<Nanoseconds>(json).map_err(|e| e.to_string());
        assert_eq!(ns("2 us".into()), Ok(Nanoseconds(2_000)));
        assert!(ns(7.into()).is_err_and(|message| message.contains("a duration with its unit, like `200 ms`")));
    }
}
