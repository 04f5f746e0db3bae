//! Which of the formats of `/metrics` a request prefers, by its `Accept` headers, and whether it may be compressed.
//!
//! Enters: headers, as a client sent them. Leaves: the format, and whether gzip is accepted. Invariants: only a client that names protobuf with its
//! parameters, and prefers it to every text format by a higher quality or by an earlier place at the same quality, gets
//! protobuf; every other client gets text. The time is linear in the header, whose length the server limits.

use crate::export::prometheus::Format;
use axum::http::{HeaderMap, header};

/// The format that these headers prefer.
pub(super) fn format(headers: &HeaderMap) -> Format {
    let (mut protobuf, mut text, mut place) = (Preference::default(), Preference::default(), 0);
    for value in headers.get_all(header::ACCEPT) {
        for range in split(&String::from_utf8_lossy(value.as_bytes()), ',') {
            match Range::parse(range) {
                Some(Range { names: Names::Protobuf, quality }) => protobuf.raise(quality, place),
                Some(Range { names: Names::Text, quality }) => text.raise(quality, place),
                None => {}
            }
            place += 1;
        }
    }
    if protobuf.is_over(&text) { Format::Protobuf } else { Format::Text }
}

/// Whether a client takes an answer that is compressed by gzip, by its `Accept-Encoding` headers (RFC 9110, 12.5.3). A client that sends
/// none takes everything by the standard, but no client that reads compressed answers is known to send none.
pub(super) fn takes_gzip(headers: &HeaderMap) -> bool {
    let (mut named, mut any) = (None, None);
    for value in headers.get_all(header::ACCEPT_ENCODING) {
        for coding in String::from_utf8_lossy(value.as_bytes()).split(',') {
            let mut parts = coding.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let quality = parts.next().map_or(Some(1_000), |weight| {
                let (key, value) = weight.split_once('=')?;
                thousandths(value.trim()).filter(|_| key.trim().eq_ignore_ascii_case("q"))
            });
            let taken = quality.is_some_and(|quality| quality > 0);
            match name {
                "*" => any = any.or(Some(taken)),
                name if ["gzip", "x-gzip"].iter().any(|gzip| name.eq_ignore_ascii_case(gzip)) => {
                    named = named.or(Some(taken))
                }
                _ => {}
            }
        }
    }
    named.or(any).unwrap_or(false)
}

/// The highest quality with which a format was named, in thousandths, and where it was named so first.
#[derive(Debug, Default)]
struct Preference {
    quality: u16,
    place: usize,
}

impl Preference {
    fn raise(&mut self, quality: u16, place: usize) {
        if quality > self.quality {
            *self = Self { quality, place };
        }
    }

    /// At the same quality the one that comes first wins.
    fn is_over(&self, other: &Self) -> bool {
        self.quality > other.quality || (self.quality == other.quality && self.quality > 0 && self.place < other.place)
    }
}

/// One media range that matches a format.
struct Range {
    names: Names,
    quality: u16,
}

enum Names {
    Protobuf,
    Text,
}

impl Range {
    /// `None` if it matches no format, or is malformed.
    fn parse(range: &str) -> Option<Self> {
        let mut parts = split(range, ';').map(str::trim);
        let media = parts.next()?;
        let (mut quality, mut proto, mut encoding) = (1_000, None, None);
        for part in parts.filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=')?;
            let value = value.trim().trim_matches('"');
            match name.trim() {
                name if name.eq_ignore_ascii_case("q") => quality = thousandths(value)?,
                name if name.eq_ignore_ascii_case("proto") => proto = Some(value),
                name if name.eq_ignore_ascii_case("encoding") => encoding = Some(value),
                _ => {}
            }
        }
        let is_one = |of: &[&str]| of.iter().any(|name| media.eq_ignore_ascii_case(name));
        let is_family = proto == Some("io.prometheus.client.MetricFamily") && encoding == Some("delimited");
        // A client that accepts OpenMetrics gets Prometheus's text. It must not get protobuf, which it rated lower.
        let names = if is_one(&["application/vnd.google.protobuf"]) && is_family {
            Names::Protobuf
        } else if is_one(&["text/plain", "application/openmetrics-text", "text/*", "*/*"]) {
            Names::Text
        } else {
            return None;
        };
        Some(Self { names, quality })
    }
}

/// A quality from 0 to 1 with at most three decimals, in thousandths.
fn thousandths(value: &str) -> Option<u16> {
    let (whole, decimals) = value.split_once('.').unwrap_or((value, ""));
    let is_well_formed =
        matches!(whole, "0" | "1") && decimals.len() <= 3 && decimals.bytes().all(|b| b.is_ascii_digit());
    let thousandths = format!("{decimals:0<3}").parse::<u16>().ok().filter(|_| is_well_formed)?;
    let quality = whole.parse::<u16>().ok()? * 1_000 + thousandths;
    (quality <= 1_000).then_some(quality)
}

/// The parts of a text between separators that are not within quotes.
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    text.split(move |character| {
        let is_literal = std::mem::take(&mut is_escaped);
        match character {
            '\\' if is_quoted && !is_literal => is_escaped = true,
            '"' if !is_literal => is_quoted = !is_quoted,
            _ => return character == separator && !is_quoted,
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    const FAMILY: &str = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";

    fn of(lists: &[&str]) -> Format {
        let mut headers = HeaderMap::new();
        for list in lists {
            headers.append(header::ACCEPT, HeaderValue::from_bytes(list.as_bytes()).expect("a header"));
        }
        format(&headers)
    }

    #[test]
    fn only_who_takes_gzip_gets_it() {
        let of = |lists: &[&str]| {
            let mut headers = HeaderMap::new();
            for list in lists {
                headers.append(header::ACCEPT_ENCODING, HeaderValue::from_bytes(list.as_bytes()).expect("a header"));
            }
            takes_gzip(&headers)
        };
        let takes: [&[&str]; 7] = [
            &["gzip"],
            &["GZIP;q=0.5"],
            &["deflate, gzip;q=1.0, *;q=0.5"],
            &["br", "x-gzip"],
            &["*"],
            &["gzip , br"],
            &["*;q=0,gzip"],
        ];
        let refuses: [&[&str]; 8] =
            [&[], &[""], &["identity"], &["gzip;q=0"], &["gzip;q=0.000"], &["*, gzip;q=0"], &["gzip;q=x"], &["gzipx"]];
        assert!(takes.iter().all(|lists| of(lists)), "{takes:?}");
        assert!(!refuses.iter().any(|lists| of(lists)), "{refuses:?}");
    }

    #[test]
    fn a_scraper_gets_what_it_prefers() {
        let openmetrics = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8";
        for (accept, expected) in [
            // Prometheus 3 with `scrape_native_histograms`.
            (format!("{FAMILY};q=0.6,{openmetrics};q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"), Format::Protobuf),
            // Prometheus 2.40 and later with the feature `native-histograms`.
            (format!("{FAMILY},{openmetrics};q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"), Format::Protobuf),
            // Prometheus as it is configured without anything said.
            (format!("{openmetrics};q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"), Format::Text),
            (format!("{openmetrics};q=0.6,{FAMILY};q=0.5,*/*;q=0.1"), Format::Text),
            (FAMILY.to_owned(), Format::Protobuf),
            (format!("{FAMILY};q=0.5"), Format::Protobuf),
            (format!("{FAMILY};q=0"), Format::Text),
            (format!("{FAMILY};q=0.000"), Format::Text),
            // At the same quality the order decides.
            (format!("{FAMILY};q=0.5,text/plain;q=0.5"), Format::Protobuf),
            (format!("text/plain;q=0.5,{FAMILY};q=0.5"), Format::Text),
            (format!("text/html,{FAMILY};q=0.1"), Format::Protobuf),
            (format!("*/*,{FAMILY};q=0.9"), Format::Text),
            ("*/*".to_owned(), Format::Text),
            ("application/*".to_owned(), Format::Text),
            (String::new(), Format::Text),
            // Spaces, capitals and quotes are allowed.
            (
                FAMILY.replace(';', " ; ").replace("proto=", "PROTO=").replace("application", "Application"),
                Format::Protobuf,
            ),
            (
                FAMILY
                    .replace("proto=io.prometheus.client.MetricFamily", "proto=\"io.prometheus.client.MetricFamily\""),
                Format::Protobuf,
            ),
            // Another message or another framing is not what we have.
            (FAMILY.replace("MetricFamily", "Metric"), Format::Text),
            (FAMILY.replace("delimited", "text"), Format::Text),
            ("application/vnd.google.protobuf".to_owned(), Format::Text),
        ] {
            assert_eq!(of(&[&accept]), expected, "{accept}");
        }
        assert_eq!(of(&[]), Format::Text);
        assert_eq!(of(&["text/plain;q=0.2", FAMILY]), Format::Protobuf, "two headers are one list");
    }

    #[test]
    fn what_is_malformed_counts_as_not_there() {
        for quality in
            ["NaN", "nan", "-1", "-0.5", "inf", "2", "1.001", "0.5000", "1e3", "", ".5", "+1", "0x1", "¼", "0.²"]
        {
            assert_eq!(of(&[&format!("{FAMILY};q={quality}")]), Format::Text, "{quality}");
            assert_eq!(of(&[&format!("text/plain;q={quality},{FAMILY};q=0.001")]), Format::Protobuf, "{quality}");
        }
        for list in [",", ";", ";;,,;=", "=", "\"", "\\", ";q", "a/b;\"", "\u{1f4a9}", "/", "q=1", ";q=1;q=1"] {
            assert_eq!(of(&[list]), Format::Text, "{list}");
            assert_eq!(of(&[list, FAMILY]), Format::Protobuf, "{list} in a header of its own");
        }
        // A quote that does not end swallows its own header, and no other one.
        assert_eq!(of(&[&format!("a/b;c=\"{FAMILY},{FAMILY}")]), Format::Text);
        assert_eq!(of(&[&format!("a/b;c=\"x,y;z\\\",\",{FAMILY}")]), Format::Protobuf);
        let mut headers = HeaderMap::new();
        headers.append(header::ACCEPT, HeaderValue::from_bytes(b"\xff\xfe").expect("opaque"));
        assert_eq!(format(&headers), Format::Text);
        let after = [b"\xff/\xfe;q=\xfd,".as_slice(), FAMILY.as_bytes()].concat();
        headers.append(header::ACCEPT, HeaderValue::from_bytes(&after).expect("opaque"));
        assert_eq!(format(&headers), Format::Protobuf, "the other ranges of the same header count");
    }

    #[test]
    fn long_headers_are_read_to_their_end() {
        let many = "a/b;c=d;q=0.5,".repeat(50_000);
        assert_eq!(of(&[&format!("{many}{FAMILY}")]), Format::Protobuf);
        assert_eq!(of(&[&"text/plain,".repeat(50_000)]), Format::Text);
        assert_eq!(of(&[&format!("{};{FAMILY}", ";".repeat(100_000))]), Format::Text);
        assert_eq!(of(&vec![FAMILY; 5_000]), Format::Protobuf);
    }
}
