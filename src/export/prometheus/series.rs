//! Writes families with labels and histograms. The text that all lines of a series share is built once for the series. The
//! text of the bucket bounds is built once for the process, because the bounds are few and never change.

use super::size::kept;
use crate::metrics::catalogue::MetricKind;
use crate::metrics::{Family, LabelValue, Sample, Value};
use highwater_core::histogram::Counts;
use std::io::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

/// Appends the family's lines.
pub(super) fn write(family: &Family, text: &mut Vec<u8>) {
    let name = family.metric.name.as_bytes();
    let kept = kept(family);
    head(family, text);
    let (mut labels, mut line) = (Vec::with_capacity(256), Vec::with_capacity(256));
    for Sample { labels: values, value } in &family.samples {
        labels.clear();
        write_labels(family.metric.labels, values, &mut labels);
        match value {
            Value::Number(value) => {
                put_series(&[name], &labels, text);
                put_value(*value, text);
            }
            Value::Histogram(counts) => {
                let comma: &[u8] = if labels.is_empty() { b"" } else { b"," };
                line.clear();
                put(&mut line, &[name, b"_bucket{", &labels, comma, b"le=\""]);
                let mut put_bucket = |bound: &str, count: u64| {
                    put(text, &[&line, bound.as_bytes()]);
                    put_count(count, text);
                };
                let (all, bounds) = (counts.cumulative.last().copied().unwrap_or(0), bounds(counts));
                for (bound, count) in kept.of(&bounds).iter().zip(&counts.cumulative).step_by(kept.step) {
                    put_bucket(bound, *count);
                }
                put_bucket(INFINITY, all);
                put_series(&[name, b"_sum"], &labels, text);
                put_value(counts.sum_s, text);
                put_series(&[name, b"_count"], &labels, text);
                put_count(all, text);
            }
        }
    }
}

fn head(family: &Family, text: &mut Vec<u8>) {
    let name = family.metric.name.as_bytes();
    let kind: &[u8] = match family.metric.kind {
        MetricKind::Gauge => b"gauge",
        MetricKind::Counter => b"counter",
        MetricKind::Histogram => b"histogram",
    };
    put(text, &[b"# HELP ", name, b" "]);
    escape(family.metric.help, |byte| matches!(byte, b'\\' | b'\n'), text);
    put(text, &[b"\n# TYPE ", name, b" ", kind, b"\n"]);
}

/// `name="value",…`, without braces. An empty value is the same as none, so it is left out.
fn write_labels(names: &[&str], values: &[LabelValue], text: &mut Vec<u8>) {
    for (name, value) in names.iter().zip(values).filter(|(_, value)| !value.is_empty()) {
        put(text, &[if text.is_empty() { b"" } else { b"," }, name.as_bytes(), b"=\""]);
        escape(value, |byte| matches!(byte, b'\\' | b'\n' | b'"'), text);
        text.push(b'"');
    }
}

/// The text after `le="` of the bucket of all observations.
const INFINITY: &str = "+Inf\"} ";

/// Bounds, and the text of each.
type Written = (&'static [f64], Arc<[String]>);

/// The text of each bucket bound, from the value of `le` to the space before the count.
fn bounds(counts: &Counts) -> Arc<[String]> {
    static WRITTEN: Mutex<Vec<Written>> = Mutex::new(Vec::new());
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, texts)) = written.iter().find(|(bounds_s, _)| std::ptr::eq(*bounds_s, counts.bounds_s)) {
        return Arc::clone(texts);
    }
    let texts: Arc<[String]> = counts.bounds_s.iter().map(|bound| format!("{bound}\"}} ")).collect();
    written.push((counts.bounds_s, Arc::clone(&texts)));
    texts
}

/// Writes everything on a line before its value.
fn put_series(name: &[&[u8]], labels: &[u8], text: &mut Vec<u8>) {
    put(text, name);
    if !labels.is_empty() {
        put(text, &[b"{", labels, b"}"]);
    }
    text.push(b' ');
}

fn put(text: &mut Vec<u8>, parts: &[&[u8]]) {
    parts.iter().for_each(|part| text.extend_from_slice(part));
}

fn put_count(count: u64, text: &mut Vec<u8>) {
    put(text, &[itoa::Buffer::new().format(count).as_bytes(), b"\n"]);
}

/// Most values are whole numbers, for which there is a faster way to the same text.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "the conversion back must give the same value"
)]
fn put_value(value: f64, text: &mut Vec<u8>) {
    let whole = value as i64;
    if (whole as f64).to_bits() == value.to_bits() && value.abs() < 9e15 {
        put(text, &[itoa::Buffer::new().format(whole).as_bytes(), b"\n"]);
    } else {
        writeln!(text, "{value}").expect("writing to memory does not fail");
    }
}

/// Appends a text with a backslash before each special character, and `n` in place of each newline.
fn escape(from: &str, is_special: impl Fn(u8) -> bool, text: &mut Vec<u8>) {
    // Special characters are rare. The compiler can vectorize this loop, because it has no early exit.
    if !from.bytes().fold(false, |found, byte| found | is_special(byte)) {
        return text.extend_from_slice(from.as_bytes());
    }
    for byte in from.bytes() {
        if is_special(byte) {
            text.push(b'\\');
        }
        text.push(if byte == b'\n' { b'n' } else { byte });
    }
}
