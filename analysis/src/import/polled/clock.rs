//! Texts of clocks: `2026/11/21 10:15:30.123`, `2025-09-08T17:26:50+08:00`, `Sun May  4 04:27:32 AM EDT 2025`, `03-11-2026 15:13:16`.

use highwater_core::clock::SECOND_NS;

const DAY_S: i64 = 86_400;

/// A time that a text names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stamp {
    /// Nanoseconds since 1970.
    Unix(i64),
    /// The same on a clock whose zone the text does not name.
    Local(i64),
    /// Nanoseconds since midnight.
    OfDay(i64),
    /// Nanoseconds since a begin that the file does not name.
    Elapsed(i64),
}

impl Stamp {
    /// Its nanoseconds, since whatever it counts from.
    pub fn ns(self) -> i64 {
        let (Self::Unix(ns) | Self::Local(ns) | Self::OfDay(ns) | Self::Elapsed(ns)) = self;
        ns
    }
}

/// What comes first in a date such as `03-11-2026`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum DateOrder {
    #[default]
    DayMonth,
    MonthDay,
}

impl DateOrder {
    /// The order that a text shows: one of the two numbers is no month. `None` if both may be, or it has no such date.
    pub fn shown_by(text: &str) -> Option<Self> {
        match ambiguous(text)? {
            (13.., _) => Some(Self::DayMonth),
            (_, 13..) => Some(Self::MonthDay),
            _ => None,
        }
    }
}

/// Whether a text has a date whose order is not known from itself.
pub(super) fn has_unordered_date(text: &str) -> bool {
    ambiguous(text).is_some()
}

/// The first two numbers of a date that ends with its year.
fn ambiguous(text: &str) -> Option<(i64, i64)> {
    let date = text.split_ascii_whitespace().find_map(triple)?;
    (date[0] <= 31 && date[2] >= 1970).then_some((date[0], date[1]))
}

/// The time that a text names; `None` if it is no text of a clock.
pub(super) fn parse(text: &str, order: DateOrder) -> Option<Stamp> {
    let mut found = Found::default();
    for word in text.split_ascii_whitespace() {
        found.add(word, order)?;
    }
    found.stamp()
}

/// Parts of a text of a clock.
#[derive(Default)]
struct Found {
    year: Option<i64>,
    month: Option<i64>,
    day: Option<i64>,
    /// Nanoseconds since midnight.
    of_day: Option<i64>,
    /// Seconds that the clock is ahead of UTC.
    zone: Option<i64>,
    is_afternoon: Option<bool>,
    has_named_zone: bool,
}

impl Found {
    /// Adds a word. `None` if no clock has such a word there.
    fn add(&mut self, word: &str, order: DateOrder) -> Option<()> {
        if let Some(at) = word.bytes().position(|one| b"T_".contains(&one)).filter(|_| starts_with_digit(word)) {
            self.date(&word[..at], order)?;
            return self.time(&word[at + 1..]);
        }
        if word.contains(':') {
            return self.time(word);
        }
        // `+0800` after the time.
        if word.starts_with(['+', '-']) {
            return set(&mut self.zone, offset(word)?);
        }
        if starts_with_digit(word) {
            return match word.trim_end_matches(',') {
                // The day or the year beside the name of a month.
                number if number.len() <= 2 => set(&mut self.day, number.parse().ok()?),
                number if number.len() == 4 => set(&mut self.year, number.parse().ok()?),
                date => self.date(date, order),
            };
        }
        self.name(word.trim_end_matches([',', '.']))
    }

    fn date(&mut self, word: &str, order: DateOrder) -> Option<()> {
        let date = if word.len() == 8 && word.bytes().all(|one| one.is_ascii_digit()) {
            [word.get(..4)?.parse().ok()?, word.get(4..6)?.parse().ok()?, word.get(6..)?.parse().ok()?]
        } else {
            triple(word)?
        };
        let [year, month, day] = match (date[0] >= 1970, order) {
            (true, _) => date,
            (false, DateOrder::DayMonth) => [date[2], date[1], date[0]],
            (false, DateOrder::MonthDay) => [date[2], date[0], date[1]],
        };
        set(&mut self.year, year)?;
        set(&mut self.month, month)?;
        set(&mut self.day, day)
    }

    /// `10:15:30.123`, `10:15:30,123Z`, `10:15:30+08:00`, `101530`.
    fn time(&mut self, word: &str) -> Option<()> {
        // Of ASCII, so that its position is one of a character.
        let (clock, zone) = match word.bytes().position(|one| b"Z+-".contains(&one)) {
            Some(at) => word.split_at(at),
            None => (word, ""),
        };
        if !zone.is_empty() {
            set(&mut self.zone, offset(zone)?)?;
        }
        let (clock, fraction) = match clock.bytes().position(|one| b".,".contains(&one)) {
            Some(at) => (&clock[..at], &clock[at + 1..]),
            None => (clock, "0"),
        };
        let [hours, minutes, seconds] = match clock.len() {
            6 if !clock.contains(':') => {
                let two = |at: usize| clock.get(at..at + 2).and_then(number);
                [two(0)?, two(2)?, two(4)?]
            }
            _ => three(clock.split(':'))?,
        };
        if hours > 23 || minutes > 59 || seconds > 60 || fraction.len() > 9 {
            return None;
        }
        let missing = u32::try_from(9 - fraction.len()).ok()?;
        let nanoseconds = number(fraction)? * 10_i64.pow(missing);
        set(&mut self.of_day, (hours * 3_600 + minutes * 60 + seconds) * SECOND_NS + nanoseconds)
    }

    /// A month, a day of the week, a half of the day or a zone.
    fn name(&mut self, word: &str) -> Option<()> {
        const MONTHS: [&str; 12] = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
        const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
        let lower = word.to_ascii_lowercase();
        match &*lower {
            "am" | "pm" => set(&mut self.is_afternoon, lower == "pm"),
            "z" | "utc" | "gmt" => set(&mut self.zone, 0),
            _ => {
                let begin = lower.get(..3)?;
                if let Some(month) = MONTHS.iter().position(|month| *month == begin) {
                    return set(&mut self.month, i64::try_from(month).ok()? + 1);
                }
                const LEVELS: [&str; 6] = ["INFO", "WARN", "ERROR", "DEBUG", "FATAL", "TRACE"];
                let is_zone =
                    word.len() <= 5 && word.bytes().all(|one| one.is_ascii_uppercase()) && !LEVELS.contains(&word);
                let is_first = !self.has_named_zone;
                self.has_named_zone |= is_zone;
                (DAYS.contains(&begin) || is_zone && is_first).then_some(())
            }
        }
    }

    fn stamp(self) -> Option<Stamp> {
        let mut of_day = self.of_day?;
        if let Some(is_afternoon) = self.is_afternoon {
            let half_ns = 12 * 3_600 * SECOND_NS;
            of_day = of_day % half_ns + if is_afternoon { half_ns } else { 0 };
        }
        let (year, month, day) = match (self.year, self.month, self.day) {
            (None, None, None) if self.zone.is_none() => return Some(Stamp::OfDay(of_day)),
            (year, month, day) => (year?, month?, day?),
        };
        let is_real = (1970..=2200).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
        if !is_real {
            return None;
        }
        let local = days(year, month, day) * DAY_S * SECOND_NS + of_day;
        Some(match self.zone {
            Some(zone) => Stamp::Unix(local - zone * SECOND_NS),
            None => Stamp::Local(local),
        })
    }
}

/// Sets what may be there once.
fn set<T>(place: &mut Option<T>, value: T) -> Option<()> {
    match place.replace(value) {
        Some(_) => None,
        None => Some(()),
    }
}

fn starts_with_digit(word: &str) -> bool {
    word.as_bytes().first().is_some_and(u8::is_ascii_digit)
}

/// A number of at most nine digits.
fn number(text: &str) -> Option<i64> {
    let is_number = (1..=9).contains(&text.len()) && text.bytes().all(|one| one.is_ascii_digit());
    is_number.then(|| text.bytes().fold(0, |number, digit| 10 * number + i64::from(digit - b'0')))
}

fn three<'a>(mut parts: impl Iterator<Item = &'a str>) -> Option<[i64; 3]> {
    let three = [number(parts.next()?)?, number(parts.next()?)?, number(parts.next()?)?];
    parts.next().is_none().then_some(three)
}

/// The three numbers of a date with one kind of separator.
fn triple(word: &str) -> Option<[i64; 3]> {
    let separator = word.bytes().find(|one| b"/-.".contains(one))?;
    three(word.split(char::from(separator)))
}

/// `Z`, `+08:00`, `-0500` or `+02`, in seconds.
fn offset(zone: &str) -> Option<i64> {
    if zone == "Z" {
        return Some(0);
    }
    let (sign, rest) = zone.split_at(1);
    let plain = rest.replace(':', "");
    let (hours, minutes) = match plain.len() {
        2 => (number(&plain)?, 0),
        4 => (plain.get(..2).and_then(number)?, plain.get(2..).and_then(number)?),
        _ => return None,
    };
    let seconds = hours * 3_600 + minutes * 60;
    (hours <= 14 && minutes < 60 && sign != "Z").then_some(if sign == "-" { -seconds } else { seconds })
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Stamp> {
        parse(text, DateOrder::DayMonth)
    }

    /// 2025-09-08 09:26:50 UTC.
    const THEN: i64 = 1_757_323_610 * SECOND_NS;

    #[test]
    fn one_time_in_many_texts() {
        for text in [
            "2025-09-08T17:26:50+08:00",
            "2025-09-08T09:26:50Z",
            "2025-09-08 09:26:50 UTC",
            "Mon Sep  8 09:26:50 UTC 2025",
            "Mon 08 Sep 2025 09:26:50 AM UTC",
            "2025-09-08 05:26:50 -0400",
            "2025-09-08 05:26:50-0400",
        ] {
            assert_eq!(read(text), Some(Stamp::Unix(THEN)), "{text}");
        }
        for text in [
            "2025/09/08 09:26:50.000",
            "2025-09-08 09:26:50,000",
            "2025-09-08 09:26:50",
            "20250908 09:26:50",
            "20250908_092650",
            "Mon Sep  8 09:26:50 2025",
            "Sep 8, 2025 09:26:50 AM",
            "Mon Sep  8 09:26:50 AM EDT 2025",
            "08.09.2025 09:26:50",
            "08-09-2025 09:26:50",
        ] {
            assert_eq!(read(text), Some(Stamp::Local(THEN)), "{text}");
        }
        assert_eq!(parse("09/08/2025 09:26:50 AM", DateOrder::MonthDay), Some(Stamp::Local(THEN)));
        assert_eq!(read("09:26:50.25"), Some(Stamp::OfDay(34_010_250_000_000)));
        assert_eq!(read("12:00:01 AM"), Some(Stamp::OfDay(SECOND_NS)));
        assert_eq!(read("12:00:01 PM"), Some(Stamp::OfDay(43_201 * SECOND_NS)));
    }

    #[test]
    fn times_are_of_the_calendar() {
        let seconds = |text| read(text).map(|stamp| stamp.ns() / SECOND_NS);
        assert_eq!(seconds("1970/01/01 00:00:00.000"), Some(0));
        assert_eq!(seconds("2000/03/01 12:00:00.25"), Some(951_912_000));
        assert_eq!(seconds("2026/11/23 03:36:14.001"), Some(1_795_404_974));
        for wrong in [
            "2026/13/01 00:00:00.0",
            "2026/01/01 24:00:00.0",
            "2300/01/01 00:00:00.0",
            "2026/01/01",
            "2026/1/1 0:0:-1",
            "x y",
            "",
            "45",
            "GPU 0",
            "0 %",
            "2026/01/01 00:00:00.x",
            "2026/01/01 00:00:00 00:00:00",
            "2026/01/01 00:00:00 2026/01/01",
            "00000000:3B:00.0",
            "NVIDIA A40 10:00:00",
            "2026-01-01 10:00:00 INFO",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_date_shows_its_order_where_it_can() {
        assert_eq!(DateOrder::shown_by("03-13-2026 15:13:16"), Some(DateOrder::MonthDay));
        assert_eq!(DateOrder::shown_by("13-03-2026 15:13:16"), Some(DateOrder::DayMonth));
        assert_eq!(DateOrder::shown_by("03-11-2026 15:13:16"), None);
        assert!(has_unordered_date("03-11-2026 15:13:16") && !has_unordered_date("2026-11-03 15:13:16"));
    }
}
