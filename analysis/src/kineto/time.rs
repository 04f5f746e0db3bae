//! Times of a trace: microseconds as decimal text, in nanoseconds.
//!
//! Enters: a JSON number, or a string with one. Leaves: nanoseconds. Invariant: exact. Kineto writes three decimals,
//! and a 64-bit float of microseconds since 1970, which older versions write, would be off by up to 125 ns.

/// Maximum number of digits. A longer number is no time, and is refused before any arithmetic.
const MOST_DIGITS: usize = 30;

/// Nanoseconds, rounded to the nearest; `None` if the text is no number, or it does not fit.
pub(super) fn nanoseconds(json: &str) -> Option<i64> {
    let text = json.trim();
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text).trim();
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (text, 0),
    };
    let (is_negative, digits) = match mantissa.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, mantissa.strip_prefix('+').unwrap_or(mantissa)),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() || whole.len() + fraction.len() > MOST_DIGITS {
        return None;
    }
    let mut number: i128 = 0;
    for digit in whole.bytes().chain(fraction.bytes()) {
        number = number * 10 + i128::from(char::from(digit).to_digit(10)?);
    }
    let power = exponent.checked_add(3)?.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    let nanoseconds = scaled(number, power)?;
    i64::try_from(if is_negative { -nanoseconds } else { nanoseconds }).ok()
}

/// `number * 10^power`, rounded; the number is not negative.
fn scaled(number: i128, power: i32) -> Option<i128> {
    if number == 0 {
        return Some(0);
    }
    match u32::try_from(power) {
        Ok(power) => number.checked_mul(10_i128.checked_pow(power)?),
        Err(_) => {
            let divisor = 10_i128.checked_pow(power.unsigned_abs());
            Some(divisor.map_or(0, |divisor| (number + divisor / 2) / divisor))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::nanoseconds;

    #[test]
    fn times_are_exact_to_the_nanosecond() {
        for (text, expected) in [
            ("4350252805637.699", 4_350_252_805_637_699),
            // As a float, it would be 1614800519473220.75.
            ("1614800519473220.789", 1_614_800_519_473_220_789),
            ("\"12.5\"", 12_500),
            ("\" 12 \"", 12_000),
            ("0", 0),
            ("-3.001", -3_001),
            ("1.0006", 1_001),
            ("1.5e3", 1_500_000),
            ("2E-3", 2),
            ("1e-40", 0),
            ("0e999999", 0),
        ] {
            assert_eq!(nanoseconds(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in ["null", "\"\"", "\"soon\"", "[1]", "true", "1e30", "1e999999999999", ".5", "-", "1.2.3", "{}"] {
            assert_eq!(nanoseconds(text), None, "{text}");
        }
        assert_eq!(nanoseconds(&"1".repeat(31)), None);
        assert_eq!(nanoseconds("9223372036854775.808"), None);
        assert_eq!(nanoseconds("9223372036854775.807"), Some(i64::MAX));
    }
}
