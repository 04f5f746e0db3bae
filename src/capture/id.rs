//! The name of a capture: the time of its trigger in UTC and its reason, so that a folder sorts by time.

use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};

const DAY_S: i64 = 86_400;

/// A name for a capture that was triggered at this Unix time, nanoseconds: `20261121T101530.123Z-oom`.
pub(super) fn id(unix_ns: i64, reason: &str) -> String {
    let seconds = unix_ns.div_euclid(SECOND_NS);
    let (year, month, day) = civil(seconds.div_euclid(DAY_S));
    let (of_day, ms) = (seconds.rem_euclid(DAY_S), unix_ns.rem_euclid(SECOND_NS) / MILLISECOND_NS);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}.{ms:03}Z-{reason}")
}

/// Whether a name could be one of ours. No other file is ever listed, opened or removed.
pub(super) fn is_id(name: &str) -> bool {
    let Some((time, reason)) = name.split_once("Z-") else { return false };
    let shape = time.char_indices().all(|(at, character)| match at {
        8 => character == 'T',
        15 => character == '.',
        _ => character.is_ascii_digit(),
    });
    let word = |character: char| character.is_ascii_lowercase() || character == '_';
    time.len() == 19 && shape && !reason.is_empty() && reason.len() <= 64 && reason.chars().all(word)
}

/// Year, month and day of the proleptic Gregorian calendar, of a day counted from 1970-01-01.
fn civil(day: i64) -> (i64, i64, i64) {
    // Days are counted from 1 March, so that a leap day is the last of its year; 400 years have 146,097 days.
    let day = day + 719_468;
    let (era, of_era) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // March to July and August to December have the same 153 days.
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year_of_era + next_year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_time_in_utc() {
        assert_eq!(id(0, "oom"), "19700101T000000.000Z-oom");
        assert_eq!(id(951_782_400 * SECOND_NS, "asked"), "20000229T000000.000Z-asked");
        assert_eq!(id(1_795_207_211_009_094_564, "low_headroom"), "20261120T204011.009Z-low_headroom");
        assert_eq!(id(4_102_444_799_999_999_999, "xid"), "20991231T235959.999Z-xid");
    }

    #[test]
    fn only_names_of_this_shape_are_ours() {
        assert!(is_id(&id(1_795_207_211_009_094_564, "comm_starvation")));
        for name in [
            "",
            "../etc/passwd",
            "20261120T204011.009Z-",
            "20261120T204011.009Z-a/b",
            "20261120T204011.009Z-..",
            "x0261120T204011.009Z-oom",
            "20261120T204011.009Z-oom.sqlite",
            "20261120T2040é1.09Z-oom",
        ] {
            assert!(!is_id(name), "{name}");
        }
    }
}
