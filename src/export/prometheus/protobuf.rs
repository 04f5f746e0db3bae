//! The Prometheus protobuf exposition: `io.prometheus.client.MetricFamily` messages, each after its length.
//!
//! Enters: collected families. Leaves: the samples of the text exposition; each histogram with the text's buckets and
//! as a native one, which a Prometheus that asks for protobuf prefers. Absent on purpose: message types. Their strings
//! would be copies of every label value, of which 2,048 phases have 50,000. The tests decode with derived types.
//!
//! A native histogram of schema `s` has buckets (2^((i-1)·2^-s), 2^(i·2^-s)]; OpenTelemetry's bucket `i` at scale `s`
//! is (2^(i·2^-s), 2^((i+1)·2^-s)]. The index is therefore one higher.

use super::size::{Kept, kept, lines};
use crate::metrics::catalogue::MetricKind;
use crate::metrics::{Families, Family, LabelValue, Sample, Value};
use highwater_core::histogram::{Counts, Exponential};
use highwater_core::varint::zigzag;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};

/// The schemas that Prometheus stores.
const SCHEMAS: std::ops::RangeInclusive<i32> = -4..=8;
/// Upper bound of the bucket of zeros, seconds, 2^-128: what client libraries use. It is below 1 ns, the shortest
/// duration that is not 0. Above 0, it marks a histogram without observations as native.
const ZERO_THRESHOLD_S: f64 = 2.938_735_877_055_719e-39;
/// The longest run of empty buckets that is written out, since a new span takes more bytes. A longer one begins a new span.
const MOST_FILLED: i32 = 2;

/// Field numbers of the public `metrics.proto`.
mod field {
    pub(super) const FAMILY_NAME: u32 = 1;
    pub(super) const FAMILY_HELP: u32 = 2;
    pub(super) const FAMILY_TYPE: u32 = 3;
    pub(super) const FAMILY_METRIC: u32 = 4;
    pub(super) const METRIC_LABEL: u32 = 1;
    pub(super) const METRIC_GAUGE: u32 = 2;
    pub(super) const METRIC_COUNTER: u32 = 3;
    pub(super) const METRIC_HISTOGRAM: u32 = 7;
    pub(super) const LABEL_NAME: u32 = 1;
    pub(super) const LABEL_VALUE: u32 = 2;
    pub(super) const NUMBER_VALUE: u32 = 1;
    pub(super) const SAMPLE_COUNT: u32 = 1;
    pub(super) const SAMPLE_SUM: u32 = 2;
    pub(super) const BUCKET: u32 = 3;
    pub(super) const SCHEMA: u32 = 5;
    pub(super) const ZERO_THRESHOLD: u32 = 6;
    pub(super) const ZERO_COUNT: u32 = 7;
    pub(super) const POSITIVE_SPAN: u32 = 12;
    pub(super) const POSITIVE_DELTA: u32 = 13;
    pub(super) const BUCKET_COUNT: u32 = 1;
    pub(super) const BUCKET_BOUND: u32 = 2;
    pub(super) const SPAN_OFFSET: u32 = 1;
    pub(super) const SPAN_LENGTH: u32 = 2;
}

/// Encodes these families as length-delimited messages.
#[must_use]
pub fn encode(families: Families) -> Vec<u8> {
    let families = families.into_exposed();
    let mut out = Vec::with_capacity(families.iter().map(bytes).sum());
    families.iter().for_each(|family| write_delimited(family, &mut out));
    out
}

/// Appends a family's message after its length.
pub(super) fn write_delimited(family: &Family, out: &mut Vec<u8>) {
    delimited(out, |out| write_family(family, out));
}

/// The approximate size of a family's message.
fn bytes(family: &Family) -> usize {
    let of_sample = if family.metric.kind == MetricKind::Histogram { 350 } else { 100 };
    256 + 16 * lines(family) + of_sample * family.samples.len()
}

fn write_family(family: &Family, out: &mut Vec<u8>) {
    let kind = match family.metric.kind {
        MetricKind::Counter => 0,
        MetricKind::Gauge => 1,
        MetricKind::Histogram => 4,
    };
    text(field::FAMILY_NAME, family.metric.name, out);
    text(field::FAMILY_HELP, family.metric.help, out);
    number(field::FAMILY_TYPE, kind, out);
    let kept = kept(family);
    for Sample { labels, value } in &family.samples {
        nested(field::FAMILY_METRIC, out, |out| {
            write_labels(family.metric.labels, labels, out);
            match value {
                Value::Histogram(counts) => {
                    nested(field::METRIC_HISTOGRAM, out, |out| write_histogram(counts, kept, out));
                }
                Value::Number(value) => {
                    let is_counter = family.metric.kind == MetricKind::Counter;
                    let of = if is_counter { field::METRIC_COUNTER } else { field::METRIC_GAUGE };
                    nested(of, out, |out| double(field::NUMBER_VALUE, *value, out));
                }
            }
        });
    }
}

fn write_labels(names: &[&str], values: &[LabelValue], out: &mut Vec<u8>) {
    // An empty value is the same as none.
    for (name, value) in names.iter().zip(values).filter(|(_, value)| !value.is_empty()) {
        nested(field::METRIC_LABEL, out, |out| {
            text(field::LABEL_NAME, name, out);
            text(field::LABEL_VALUE, value, out);
        });
    }
}

fn write_histogram(counts: &Counts, kept: Kept, out: &mut Vec<u8>) {
    number(field::SAMPLE_COUNT, counts.cumulative.last().copied().unwrap_or(0), out);
    double(field::SAMPLE_SUM, counts.sum_s, out);
    // The last count, beyond all bounds, is the number of samples.
    for (bound, count) in kept.of(counts.bounds_s).iter().zip(&counts.cumulative).step_by(kept.step) {
        nested(field::BUCKET, out, |out| {
            number(field::BUCKET_COUNT, *count, out);
            double(field::BUCKET_BOUND, *bound, out);
        });
    }
    if let Some(exponential) = &counts.exponential {
        write_native(exponential, out);
    }
}

fn write_native(exponential: &Exponential, out: &mut Vec<u8>) {
    let (scale, buckets) = exponential.at_most(*SCHEMAS.end());
    // Durations are between a nanosecond and centuries, which fits into the buckets at scale 1.
    if !SCHEMAS.contains(&scale) {
        return;
    }
    let (spans, deltas) = spans(buckets.map(|(index, count)| (index + 1, count)));
    number(field::SCHEMA, zigzag(i64::from(scale)), out);
    double(field::ZERO_THRESHOLD, ZERO_THRESHOLD_S, out);
    number(field::ZERO_COUNT, exponential.zeros(), out);
    for (offset, length) in spans {
        nested(field::POSITIVE_SPAN, out, |out| {
            number(field::SPAN_OFFSET, zigzag(i64::from(offset)), out);
            number(field::SPAN_LENGTH, u64::from(length), out);
        });
    }
    deltas.iter().for_each(|delta| number(field::POSITIVE_DELTA, zigzag(*delta), out));
}

/// The spans and deltas of a native histogram. A span is its distance from the end of the previous span (for the first, its
/// index) and its length. A delta is a bucket's count minus that of the previous bucket.
fn spans(buckets: impl Iterator<Item = (i32, u64)>) -> (Vec<(i32, u32)>, Vec<i64>) {
    let (mut spans, mut deltas) = (Vec::<(i32, u32)>::new(), Vec::new());
    let (mut next, mut before) = (0, 0);
    for (index, count) in buckets {
        let gap = index - next;
        match spans.last_mut() {
            Some((_, length)) if gap <= MOST_FILLED => {
                for _ in 0..gap {
                    deltas.push(-std::mem::take(&mut before));
                    *length += 1;
                }
                *length += 1;
            }
            _ => spans.push((gap, 1)),
        }
        let count = count.cast_signed();
        deltas.push(count - before);
        (next, before) = (index + 1, count);
    }
    (spans, deltas)
}

fn number(field: u32, value: u64, out: &mut Vec<u8>) {
    encode_key(field, WireType::Varint, out);
    encode_varint(value, out);
}

fn double(field: u32, value: f64, out: &mut Vec<u8>) {
    encode_key(field, WireType::SixtyFourBit, out);
    out.extend_from_slice(&value.to_le_bytes());
}

fn text(field: u32, value: &str, out: &mut Vec<u8>) {
    encode_key(field, WireType::LengthDelimited, out);
    encode_varint(value.len() as u64, out);
    out.extend_from_slice(value.as_bytes());
}

fn nested(field: u32, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    encode_key(field, WireType::LengthDelimited, out);
    delimited(out, write);
}

/// Writes a message after its length. The length is known only once the message is written, so the message is then moved.
fn delimited(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    write(out);
    let (end, length) = (out.len(), (out.len() - start) as u64);
    let moved = start + encoded_len_varint(length);
    out.resize(moved + (end - start), 0);
    out.copy_within(start..end, moved);
    encode_varint(length, &mut &mut out[start..moved]);
}
