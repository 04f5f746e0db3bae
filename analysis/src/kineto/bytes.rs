//! The bytes of a trace, made into JSON where Kineto writes something else.
//!
//! Enters: any reader. Leaves: the same bytes, but `null` for `nan` and `inf`, which Kineto writes as the bandwidth of
//! a copy of no duration (pytorch/kineto#105) and Python as `NaN` and `Infinity`; a space for a control character in a
//! string; `?` for a byte beyond ASCII in a string, so that no name makes the file unreadable. Invariant: no event or
//! member makes the parser hold more than the allowance, which the caller renews.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

/// How much is read at once.
const CHUNK: usize = 1 << 16;
/// Words are checked in pieces of this length. No word of JSON, and none of those replaced, is longer.
const LONGEST_WORD: usize = 16;

/// How many bytes may still be read before the allowance is renewed.
#[derive(Debug, Clone)]
pub(super) struct Allowance(Rc<Cell<usize>>);

impl Allowance {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Rc::new(Cell::new(bytes)))
    }

    pub(super) fn renew(&self, bytes: usize) {
        self.0.set(bytes);
    }

    fn is_used_up(&self) -> bool {
        self.0.get() == 0
    }
}

/// Where in the text the next byte is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Outside,
    InString,
    AfterBackslash,
}

/// A reader of JSON from a reader of almost JSON.
pub(super) struct Repaired<R> {
    from: R,
    allowance: Allowance,
    chunk: Vec<u8>,
    ready: Vec<u8>,
    given: usize,
    place: Place,
    /// Letters outside strings that are not yet known to be a whole word.
    word: Vec<u8>,
    /// The last byte outside strings: letters after a digit are an exponent, not a word.
    last: u8,
}

impl<R: Read> Repaired<R> {
    pub(super) fn new(from: R, allowance: Allowance) -> Self {
        let (chunk, ready, word) = (vec![0; CHUNK], Vec::with_capacity(CHUNK), Vec::new());
        Self { from, allowance, chunk, ready, given: 0, place: Place::Outside, word, last: b' ' }
    }

    /// Reads more, until there is something to give or the end.
    fn fill(&mut self) -> io::Result<()> {
        self.ready.clear();
        self.given = 0;
        while self.ready.is_empty() {
            let mut chunk = std::mem::take(&mut self.chunk);
            let count = self.from.read(&mut chunk);
            let bytes = count.as_ref().ok().and_then(|count| chunk.get(..*count)).unwrap_or_default();
            bytes.iter().for_each(|byte| self.take(*byte));
            self.chunk = chunk;
            match count {
                Ok(0) => {
                    self.end();
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn take(&mut self, byte: u8) {
        match self.place {
            Place::Outside => self.take_outside(byte),
            Place::AfterBackslash => {
                self.place = Place::InString;
                self.ready.push(in_string(byte));
            }
            Place::InString => {
                self.place = match byte {
                    b'"' => Place::Outside,
                    b'\\' => Place::AfterBackslash,
                    _ => Place::InString,
                };
                self.ready.push(in_string(byte));
            }
        }
    }

    fn take_outside(&mut self, byte: u8) {
        let is_in_word = !self.word.is_empty();
        let begins_word = byte.is_ascii_alphabetic() && !matches!(self.last, b'0'..=b'9' | b'.');
        let begins_number = byte == b'-' && !matches!(self.last, b'e' | b'E');
        let goes_on = is_in_word && byte.is_ascii_alphabetic() && self.word.len() < LONGEST_WORD;
        if goes_on || (!is_in_word && (begins_word || begins_number)) {
            self.word.push(byte);
        } else {
            self.end_word();
            if byte == b'"' {
                self.place = Place::InString;
            }
            self.ready.push(byte);
        }
        self.last = byte;
    }

    /// Drops a word and completes a number that the end of the input cuts off, so that the parser reports an early end and not
    /// a syntax error.
    fn end(&mut self) {
        self.word.clear();
        if self.place == Place::Outside && matches!(self.last, b'.' | b'e' | b'E' | b'+' | b'-') {
            self.last = b'0';
            self.ready.push(b'0');
        }
    }

    fn end_word(&mut self) {
        let bare = self.word.strip_prefix(b"-").unwrap_or(&self.word);
        let is_no_number = ["nan", "inf", "infinity"].iter().any(|known| bare.eq_ignore_ascii_case(known.as_bytes()));
        self.ready.extend_from_slice(if is_no_number { b"null" } else { &self.word });
        self.word.clear();
    }
}

fn in_string(byte: u8) -> u8 {
    match byte {
        0..=31 => b' ',
        128..=255 => b'?',
        _ => byte,
    }
}

impl<R: Read> Read for Repaired<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.given >= self.ready.len() {
            self.fill()?;
        }
        let ready = self.ready.get(self.given..).unwrap_or_default();
        if !ready.is_empty() && self.allowance.is_used_up() {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "one event or member is too long"));
        }
        let count = ready.len().min(buffer.len());
        for (to, from) in buffer.iter_mut().zip(ready) {
            *to = *from;
        }
        self.given += count;
        self.allowance.0.set(self.allowance.0.get().saturating_sub(count));
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives one byte at a time, so that every word is cut at every place.
    struct Slowly<'a>(&'a [u8]);

    impl Read for Slowly<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let (Some((first, rest)), Some(to)) = (self.0.split_first(), buffer.first_mut()) else { return Ok(0) };
            (*to, self.0) = (*first, rest);
            Ok(1)
        }
    }

    fn repaired(bytes: &[u8]) -> String {
        let mut texts = ["".to_owned(), "".to_owned()];
        Repaired::new(bytes, Allowance::new(1 << 20)).read_to_string(&mut texts[0]).expect("read");
        Repaired::new(Slowly(bytes), Allowance::new(1 << 20)).read_to_string(&mut texts[1]).expect("read");
        assert_eq!(texts[0], texts[1]);
        texts[0].clone()
    }

    #[test]
    fn what_is_no_number_becomes_null_and_only_outside_strings() {
        let text = r#"{"nan": nan, "inf": [-inf,Infinity , -Infinity,NaN,-nan], "x": "NaN \" inf"}"#;
        let expected = r#"{"nan": null, "inf": [null,null , null,null,null], "x": "NaN \" inf"}"#;
        assert_eq!(repaired(text.as_bytes()), expected);
        assert_eq!(repaired(b"inf "), "null ");
    }

    #[test]
    fn valid_json_is_as_it_was() {
        for text in [
            r#"{"a": [true,false,null], "b": -1.5e-7, "c": 2E+3, "d": [1e5,-2], "e": "\\", "f": 1e-7}"#,
            r#"[-0.1e-3,"-",-0]"#,
            "nonsense -word ",
        ] {
            assert_eq!(repaired(text.as_bytes()), text);
        }
    }

    #[test]
    fn what_the_end_cuts_is_no_error_of_its_own() {
        for (text, expected) in
            [("[1, na", "[1, "), ("[-", "[0"), ("[2.", "[2.0"), ("[2e+", "[2e+0"), ("[\"2.", "[\"2.")]
        {
            assert_eq!(repaired(text.as_bytes()), expected);
        }
    }

    #[test]
    fn no_byte_of_a_string_makes_it_unreadable() {
        assert_eq!(repaired(b"{\"a\": \"x\ny\x1f\xff\xc3\xa4\"}\n"), "{\"a\": \"x y ???\"}\n");
    }

    #[test]
    fn more_than_allowed_is_an_error_and_exactly_that_is_not() {
        let read = |bytes| Repaired::new(&b"[1, 2]"[..], Allowance::new(bytes)).read_to_end(&mut Vec::new());
        assert_eq!(read(6).expect("room"), 6);
        // A chunk that is given out whole may exceed it; the next one is refused.
        let long = vec![b' '; 3 * CHUNK];
        let error = Repaired::new(&long[..], Allowance::new(CHUNK)).read_to_end(&mut Vec::new());
        assert_eq!(error.expect_err("too long").kind(), io::ErrorKind::FileTooLarge);
    }
}
