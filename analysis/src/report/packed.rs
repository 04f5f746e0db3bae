//! Packs the numbers that a page draws: columns of unsigned LEB128 numbers, gzip, base64. `page/data.js` unpacks them.
//!
//! Invariant: every point of a curve is there with its exact bytes; times are rounded down to the microsecond.

use super::curve::Point;
use super::layers::{Profile, Record};
use super::model::Report;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use highwater_core::gpu::{ActivityMeans, BreakdownPoint, Parts};
use highwater_core::varint::{self, zigzag};
use highwater_core::wire::Direction;
use std::io::Write as _;

const MICROSECOND_NS: i64 = 1_000;
/// The unit of spans' peaks in the page, bytes. Peaks are rounded down to it.
const PEAK_UNIT_BYTES: u64 = 1 << 16;

/// The packed bytes. Small numbers and small changes take the fewest.
#[derive(Default)]
struct Numbers(Vec<u8>);

impl Numbers {
    fn push(&mut self, number: u64) {
        varint::put(&mut self.0, number);
    }

    fn signed(&mut self, number: i64) {
        self.push(zigzag(number));
    }

    /// A number that may be unknown: 0, or one more than it.
    fn optional(&mut self, number: Option<u64>) {
        self.push(number.map_or(0, |number| number.saturating_add(1)));
    }

    /// A number that may be unknown: 0, or the change from the last known one.
    fn change(&mut self, number: Option<u64>, last: &mut u64) {
        match number {
            None => self.push(0),
            Some(number) => {
                self.push(zigzag(number.wrapping_sub(*last).cast_signed()).saturating_add(1));
                *last = number;
            }
        }
    }
}

/// The curves and spans of all recordings, packed.
pub(super) fn columns(reports: &[Report]) -> String {
    let mut numbers = Numbers::default();
    for report in reports {
        for gpu in &report.gpus {
            curve(gpu.usage.curve.points(), report.begin_ns, &mut numbers);
            activity(&gpu.activity, report.begin_ns, &mut numbers);
            breakdown(gpu.breakdown.points(), report.begin_ns, &mut numbers);
        }
        spans(report, &mut numbers);
        report.layers.profiles.iter().for_each(|profile| records(profile, report.begin_ns, &mut numbers));
    }
    let mut packer = GzEncoder::new(Vec::new(), Compression::best());
    let packed = packer.write_all(&numbers.0).and_then(|()| packer.finish());
    STANDARD.encode(packed.unwrap_or_default())
}

/// The largest power of two that divides every known value, bytes: what the curve's values are counted in.
pub(super) fn unit_bytes(points: &[Point]) -> u64 {
    let all = points.iter().filter_map(|point| point.used).fold(0, |all, used| all | used);
    // At most 2 MiB, the driver's own unit. A larger unit would help only a curve with few values.
    1 << all.trailing_zeros().min(21)
}

/// Times that do not fall, each as the change from the one before.
fn times(all_ns: impl Iterator<Item = i64>, begin_ns: i64, numbers: &mut Numbers) {
    let mut last_us = 0;
    for at_ns in all_ns {
        let at_us = (at_ns - begin_ns) / MICROSECOND_NS;
        numbers.push((at_us - last_us).max(0).unsigned_abs());
        last_us = at_us.max(last_us);
    }
}

fn curve(points: &[Point], begin_ns: i64, numbers: &mut Numbers) {
    let unit_bytes = unit_bytes(points);
    times(points.iter().map(|point| point.at_ns), begin_ns, numbers);
    let mut last = 0;
    points.iter().for_each(|point| numbers.change(point.used.map(|used| used / unit_bytes), &mut last));
}

/// Times, then each share in thousandths.
fn activity(activity: &ActivityMeans, begin_ns: i64, numbers: &mut Numbers) {
    times(activity.points().map(|(at_ns, _)| at_ns), begin_ns, numbers);
    for nth in 0..4 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share in thousandths")]
        let thousandths = |share: f64| (share * 1e3).round() as u64;
        activity.points().for_each(|(_, shares)| numbers.optional(shares[nth].map(thousandths)));
    }
}

/// Times, then each part in mebibytes.
fn breakdown(points: &[BreakdownPoint], begin_ns: i64, numbers: &mut Numbers) {
    times(points.iter().map(|point| point.at_ns), begin_ns, numbers);
    for nth in 0..Parts::default().all().len() {
        let mut last = 0;
        points.iter().for_each(|point| numbers.change(point.parts.all()[nth].map(|bytes| bytes >> 20), &mut last));
    }
}

fn spans(report: &Report, numbers: &mut Numbers) {
    let spans = report.spans.spans();
    let mut last_us = 0;
    for span in spans {
        let at_us = (span.begin_ns - report.begin_ns) / MICROSECOND_NS;
        numbers.signed(at_us - last_us);
        last_us = at_us;
    }
    spans.iter().for_each(|span| numbers.push((span.duration_ns() / MICROSECOND_NS).max(0).unsigned_abs()));
    // The numbers of what ended it are those of the page: OPEN and CUT in viewer/lanes.js.
    spans.iter().for_each(|span| numbers.push((span.row as u64) << 2 | span.by as u64));
    let mut last_step = 0;
    spans.iter().for_each(|span| numbers.change(span.step, &mut last_step));
    let peak = |bytes: Option<u64>| bytes.map_or(0, |bytes| bytes / PEAK_UNIT_BYTES + 1);
    spans.iter().for_each(|span| numbers.push(peak(span.peak_bytes)));
}

/// The records of a profile, column by column.
fn records(profile: &Profile, begin_ns: i64, numbers: &mut Numbers) {
    let records: Vec<&Record> = profile.of_layers().collect();
    records.iter().for_each(|record| numbers.push(record.name as u64));
    records.iter().for_each(|record| numbers.push(u64::from(record.layer.direction == Direction::Backward)));
    let mut last_us = 0;
    for record in &records {
        let at_us = record.at_ns.saturating_sub(begin_ns) / MICROSECOND_NS;
        numbers.signed(at_us - last_us);
        last_us = at_us;
    }
    for counter in [
        |record: &Record| record.allocated,
        |record: &Record| record.reserved,
        |record: &Record| record.layer.gathered_sum,
    ] {
        let mut last = 0;
        records.iter().for_each(|record| numbers.change(counter(record), &mut last));
    }
    records.iter().for_each(|record| numbers.optional(record.layer.growth.map(zigzag)));
    for own in [
        |record: &Record| record.layer.activations,
        |record: &Record| record.layer.parameters,
        |record: &Record| record.layer.gathered,
        |record: &Record| record.layer.duration_ns,
    ] {
        records.iter().for_each(|record| numbers.optional(own(record)));
    }
}
