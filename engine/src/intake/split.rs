//! Splits a body into annotations while it arrives: an object, an array of objects, or one object per line.
//!
//! Enters: pieces of JSON text, cut anywhere. Leaves: the text of each event, or that it is too long. Invariants: at
//! most one event is kept; a broken event does not affect its neighbours, if a line or a comma shows where the next one
//! begins. Absent on purpose: whether an event is valid, which its parser decides.

/// The longest event, bytes: names, attributes and a list of GPUs within their limits take less, however escaped.
pub const MOST_EVENT_BYTES: usize = 16 << 10;

/// One event's text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Element<'a> {
    /// All of it; possibly not JSON.
    Text(&'a [u8]),
    /// It is longer than [`MOST_EVENT_BYTES`].
    TooLong,
}

/// The position of the next byte in the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before the first byte that is not a space.
    Start,
    /// Between events.
    Between,
    /// In an object or an array that is an event.
    Nested,
    /// In anything else in place of an event.
    Plain,
}

/// Splits a body.
#[derive(Debug)]
pub(super) struct Splitter {
    at: At,
    /// Whether the body is an array, and whether that has ended.
    in_array: bool,
    array_ended: bool,
    /// Number of open brackets in the event, and one bit for each of the innermost 64: 1 for an array, the innermost lowest.
    depth: u32,
    arrays: u64,
    in_string: bool,
    is_escaped: bool,
    /// The last byte of the event that was not a space, and whether a line has begun since.
    last: u8,
    line_begins: bool,
    /// The event's text from earlier pieces.
    kept: Vec<u8>,
    is_too_long: bool,
    elements: usize,
}

impl Splitter {
    pub fn new() -> Self {
        Self {
            at: At::Start,
            in_array: false,
            array_ended: false,
            depth: 0,
            arrays: 0,
            in_string: false,
            is_escaped: false,
            last: 0,
            line_begins: false,
            kept: Vec::new(),
            is_too_long: false,
            elements: 0,
        }
    }

    /// Records an event that was found without splitting.
    pub fn skip_one(&mut self) {
        (self.at, self.elements) = (At::Between, self.elements + 1);
    }

    /// Bytes that are kept until the next piece.
    #[cfg(test)]
    fn kept_bytes(&self) -> usize {
        self.kept.capacity()
    }

    /// Splits one more piece. Calls `found` with each event's position and text.
    pub fn push(&mut self, piece: &[u8], mut found: impl FnMut(usize, Element<'_>)) {
        let mut begin = 0;
        for (position, &byte) in piece.iter().enumerate() {
            match self.step(byte) {
                Step::Skip => begin = position + 1,
                Step::Go => {}
                Step::EndAfter => {
                    self.emit(piece.get(begin..=position).unwrap_or_default(), &mut found);
                    begin = position + 1;
                }
                Step::EndBefore => {
                    self.emit(piece.get(begin..position).unwrap_or_default(), &mut found);
                    begin = position + 1;
                }
                Step::BeginAnew => {
                    self.emit(piece.get(begin..position).unwrap_or_default(), &mut found);
                    begin = position;
                    self.begin(byte);
                }
            }
        }
        if matches!(self.at, At::Nested | At::Plain) {
            self.keep(piece.get(begin..).unwrap_or_default());
        }
    }

    /// Ends the body. Returns what is wrong with its structure, if anything.
    pub fn end(&mut self, mut found: impl FnMut(usize, Element<'_>)) -> Option<(usize, &'static str)> {
        if matches!(self.at, At::Nested | At::Plain) {
            self.emit(&[], &mut found);
        }
        match self.at {
            At::Start => Some((0, "there is no event")),
            _ if self.in_array && !self.array_ended => Some((self.elements, "the array does not end")),
            _ => None,
        }
    }

    fn step(&mut self, byte: u8) -> Step {
        match self.at {
            At::Start | At::Between => self.outside(byte),
            At::Nested if self.in_string => self.in_string(byte),
            At::Nested => self.nested(byte),
            At::Plain => self.plain(byte),
        }
    }

    fn outside(&mut self, byte: u8) -> Step {
        let in_array = self.in_array && !self.array_ended;
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => Step::Skip,
            b'[' if self.at == At::Start => {
                (self.in_array, self.at) = (true, At::Between);
                Step::Skip
            }
            b',' if in_array && self.elements > 0 => Step::Skip,
            b']' if in_array => {
                self.array_ended = true;
                Step::Skip
            }
            byte => {
                self.begin(byte);
                Step::Go
            }
        }
    }

    fn begin(&mut self, byte: u8) {
        self.at = if matches!(byte, b'{' | b'[') { At::Nested } else { At::Plain };
        (self.depth, self.arrays) = (1, u64::from(byte == b'['));
        (self.in_string, self.is_escaped) = (byte == b'"', false);
        (self.last, self.line_begins) = (byte, false);
    }

    fn in_string(&mut self, byte: u8) -> Step {
        match byte {
            // A JSON string never contains a line break.
            b'\n' => return Step::EndBefore,
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' => self.is_escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
        Step::Go
    }

    fn nested(&mut self, byte: u8) -> Step {
        match byte {
            b'\n' => self.line_begins = true,
            b' ' | b'\t' | b'\r' => {}
            // Valid JSON has no object here: the previous line was cut short.
            b'{' if self.line_begins && !self.may_have_object() => return Step::BeginAnew,
            byte => {
                (self.last, self.line_begins) = (byte, false);
                match byte {
                    b'"' => self.in_string = true,
                    b'{' | b'[' => {
                        self.depth = self.depth.saturating_add(1);
                        self.arrays = self.arrays << 1 | u64::from(byte == b'[');
                    }
                    b'}' | b']' => {
                        self.depth -= 1;
                        self.arrays >>= 1;
                        if self.depth == 0 {
                            return Step::EndAfter;
                        }
                    }
                    _ => {}
                }
            }
        }
        Step::Go
    }

    /// Whether an object may begin at the next byte.
    fn may_have_object(&self) -> bool {
        match self.last {
            b':' | b'[' => true,
            b',' => self.arrays & 1 == 1,
            _ => false,
        }
    }

    fn plain(&mut self, byte: u8) -> Step {
        let in_array = self.in_array && !self.array_ended;
        match byte {
            b'\n' => Step::EndBefore,
            _ if self.in_string => self.in_string(byte),
            b'"' => {
                self.in_string = true;
                Step::Go
            }
            b',' if in_array => Step::EndBefore,
            b']' if in_array => {
                self.array_ended = true;
                Step::EndBefore
            }
            _ => Step::Go,
        }
    }

    fn emit(&mut self, rest: &[u8], found: &mut impl FnMut(usize, Element<'_>)) {
        let text = if self.kept.is_empty() && !self.is_too_long && rest.len() <= MOST_EVENT_BYTES {
            Element::Text(rest)
        } else {
            self.keep(rest);
            if self.is_too_long { Element::TooLong } else { Element::Text(&self.kept) }
        };
        found(self.elements, text);
        self.elements += 1;
        self.kept = Vec::new();
        (self.is_too_long, self.at) = (false, At::Between);
    }

    fn keep(&mut self, text: &[u8]) {
        if self.is_too_long || self.kept.len() + text.len() > MOST_EVENT_BYTES {
            (self.is_too_long, self.kept) = (true, Vec::new());
        } else {
            self.kept.extend_from_slice(text);
        }
    }
}

/// What a byte means for the current event.
enum Step {
    /// It belongs to no event.
    Skip,
    /// It belongs to the event.
    Go,
    /// It is the event's last byte.
    EndAfter,
    /// The event ended before it.
    EndBefore,
    /// The event ended before it, and it is the first byte of the next.
    BeginAnew,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The events of a body that arrives in pieces of this many bytes, and what is wrong with its structure.
    fn split(body: &[u8], piece: usize) -> (Vec<String>, Option<(usize, &'static str)>) {
        let (mut splitter, mut found) = (Splitter::new(), Vec::new());
        let mut note = |position: usize, element: Element<'_>| {
            assert_eq!(position, found.len());
            found.push(match element {
                Element::Text(text) => String::from_utf8_lossy(text).into_owned(),
                Element::TooLong => "too long".to_owned(),
            });
        };
        body.chunks(piece.max(1)).for_each(|piece| splitter.push(piece, &mut note));
        let shape = splitter.end(&mut note);
        assert!(splitter.kept_bytes() <= 2 * MOST_EVENT_BYTES);
        (found, shape)
    }

    #[track_caller]
    fn check(body: &str, expected: &[&str]) {
        for piece in [1, 2, 3, 7, body.len()] {
            let (found, shape) = split(body.as_bytes(), piece);
            assert_eq!(
                (found.iter().map(|text| text.trim_end()).collect::<Vec<_>>(), shape),
                (expected.to_vec(), None),
                "{piece}"
            );
        }
    }

    #[test]
    fn every_form_of_a_body_is_cut_into_its_events() {
        check(r#"{"a":1}"#, &[r#"{"a":1}"#]);
        check("{\n  \"a\": [1,\n 2]\n}\n", &["{\n  \"a\": [1,\n 2]\n}"]);
        check("{\"a\":1}\n\n{\"b\":{\"c\":2}}\r\n", &[r#"{"a":1}"#, r#"{"b":{"c":2}}"#]);
        check(r#" [ {"a":"},{]\"["} , {"b":2} ] "#, &[r#"{"a":"},{]\"["}"#, r#"{"b":2}"#]);
        check("[1,\"a,]\",{}]", &["1", "\"a,]\"", "{}"]);
        check("[]", &[]);
    }

    #[test]
    fn a_broken_event_is_cut_off_from_its_neighbours() {
        check("{\"a\":1}\n{\"b\":\n{\"c\":3}\n", &[r#"{"a":1}"#, "{\"b\":\n{\"c\":3}"]);
        check("{\"a\":1,\n{\"c\":3}\n", &[r#"{"a":1,"#, r#"{"c":3}"#]);
        check("{\"a\":\"x\n{\"c\":3}\n", &[r#"{"a":"x"#, r#"{"c":3}"#]);
        check("hello\n{\"c\":3}\nworld", &["hello", r#"{"c":3}"#, "world"]);
        check("[{\"a\":1} {\"c\":3}]", &[r#"{"a":1}"#, r#"{"c":3}"#]);
    }

    #[test]
    fn a_body_without_shape_is_reported_once() {
        assert_eq!(split(b" \n", 1), (vec![], Some((0, "there is no event"))));
        assert_eq!(split(br#"[{"a":1}"#, 3).1, Some((1, "the array does not end")));
    }

    #[test]
    fn an_event_that_is_too_long_keeps_nothing_and_spoils_nothing() {
        let long = format!("{{\"a\":\"{}\"}}", "x".repeat(MOST_EVENT_BYTES));
        for piece in [5, 1_000, long.len() * 2] {
            let (found, shape) = split(format!("[{long},{{}},{long}]").as_bytes(), piece);
            assert_eq!((found, shape), (vec!["too long".into(), "{}".into(), "too long".into()], None));
        }
    }

    proptest! {
        #[test]
        fn pieces_change_nothing(body in "[\\[\\]{}\",: \n\\\\a1]{0,60}", piece in 1usize..9) {
            prop_assert_eq!(split(body.as_bytes(), piece), split(body.as_bytes(), body.len()));
        }

        #[test]
        fn what_is_valid_is_cut_as_its_parser_would(events in prop::collection::vec("[a-z{}\\[\\],\"\\\\ ]{0,12}", 0..8), pretty: bool) {
            let values: Vec<_> = events.iter().map(|text| serde_json::json!({"a": text, "b": [1, {"c": text}]})).collect();
            let write = |value: &serde_json::Value| {
                if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) }.expect("JSON")
            };
            let array = write(&serde_json::Value::from(values.clone()));
            let lines: String = values.iter().map(|value| write(value) + "\n").collect();
            for body in [array, lines].iter().filter(|_| !values.is_empty()) {
                let found = split(body.as_bytes(), 5).0;
                let parsed: Vec<serde_json::Value> = found.iter().map(|text| serde_json::from_str(text).expect(text)).collect();
                prop_assert_eq!(&parsed, &values);
            }
        }
    }
}
