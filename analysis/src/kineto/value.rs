//! Visitors that read a member of an event as text or as a number, whatever its JSON type.
//!
//! Invariant: no value is an error, because one member of an unexpected type must not make the file unreadable.

use serde::de::{DeserializeSeed, Deserializer, Visitor};
use std::marker::PhantomData;
use std::str::FromStr;

/// Takes a string or a number as text; everything else as an empty one.
pub(super) struct Text<'a>(pub &'a mut String);

/// Takes a whole number that its type has, also as text; everything else as `None`.
pub(super) struct Number<T>(PhantomData<T>);

/// Numbers that are not negative.
pub(super) const WHOLE: Number<u64> = Number(PhantomData);
/// All numbers.
pub(super) const SIGNED: Number<i64> = Number(PhantomData);

/// The longest text that is kept of one value.
const LONGEST: usize = 4096;

/// Visits everything that is no string, number or object, and passes over it.
macro_rules! pass_over {
    ($nothing:expr) => {
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("any value")
        }

        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok($nothing)
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($nothing)
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut each: A) -> Result<Self::Value, A::Error> {
            while each.next_element::<serde::de::IgnoredAny>()?.is_some() {}
            Ok($nothing)
        }
    };
}

/// Visits strings and numbers, and passes over them.
macro_rules! pass_over_scalars {
    ($nothing:expr) => {
        fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
            Ok($nothing)
        }

        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok($nothing)
        }

        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok($nothing)
        }

        fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
            Ok($nothing)
        }
    };
}

/// Visits an object, and passes over it.
macro_rules! pass_over_object {
    ($nothing:expr) => {
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut each: A) -> Result<Self::Value, A::Error> {
            while each.next_entry::<serde::de::IgnoredAny, serde::de::IgnoredAny>()?.is_some() {}
            Ok($nothing)
        }
    };
}

pub(super) use {pass_over, pass_over_scalars};

impl<'de> DeserializeSeed<'de> for Text<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.0.clear();
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Text<'_> {
    type Value = ();

    pass_over!(());
    pass_over_object!(());

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        let end = (0..=LONGEST.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
        self.0.push_str(text.get(..end.unwrap_or(0)).unwrap_or_default());
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.0.push_str(&number.to_string());
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.0.push_str(&number.to_string());
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.0.push_str(&number.to_string());
        Ok(())
    }
}

impl<'de, T: TryFrom<u64> + TryFrom<i64> + FromStr> DeserializeSeed<'de> for Number<T> {
    type Value = Option<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<T>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: TryFrom<u64> + TryFrom<i64> + FromStr> Visitor<'de> for Number<T> {
    type Value = Option<T>;

    pass_over!(None);
    pass_over_object!(None);

    fn visit_u64<E>(self, number: u64) -> Result<Option<T>, E> {
        Ok(T::try_from(number).ok())
    }

    fn visit_i64<E>(self, number: i64) -> Result<Option<T>, E> {
        Ok(T::try_from(number).ok())
    }

    fn visit_f64<E>(self, _: f64) -> Result<Option<T>, E> {
        Ok(None)
    }

    fn visit_str<E>(self, text: &str) -> Result<Option<T>, E> {
        Ok(text.trim().parse().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_value_is_it_is_taken() {
        let cases = [
            ("\"abc\"", "abc", None),
            ("7", "7", Some(7)),
            ("\" 7 \"", " 7 ", Some(7)),
            ("-7", "-7", None),
            ("1.5", "1.5", None),
            ("null", "", None),
            ("true", "", None),
            ("[1, [2]]", "", None),
            ("{\"a\": {\"b\": 1}}", "", None),
        ];
        for (json, as_text, as_whole) in cases {
            let mut text = "before".to_owned();
            Text(&mut text).deserialize(&mut serde_json::Deserializer::from_str(json)).expect("a value");
            let whole = WHOLE.deserialize(&mut serde_json::Deserializer::from_str(json)).expect("a value");
            assert_eq!((text.as_str(), whole), (as_text, as_whole), "{json}");
        }
        let (long, mut text) = (format!("\"{}ä\"", "x".repeat(LONGEST - 1)), String::new());
        Text(&mut text).deserialize(&mut serde_json::Deserializer::from_str(&long)).expect("a value");
        assert_eq!(text.len(), LONGEST - 1);
    }
}
