//! Any words through the decoder, and any operations through a ring and its model.

use super::config::Config;
use super::create::with_layout;
use super::errors::PushError;
use super::layout::Layout;
use super::model::Model;
use super::reader::Reader;
use super::store::Copied;
use super::writer::Writer;
use crate::fuzzing::Numbers;

/// Operations of one input: the model looks at all changes for each question.
const MOST_OPERATIONS: usize = 300;
const RESOLUTIONS_NS: [i64; 4] = [1, 7, 1_000, 1_000_000];
const RETENTIONS_NS: [i64; 4] = [1, 50_000_000, 10_000_000_000, i64::MAX];
/// The steps of values, and the scales of times.
const SCALES: [i64; 4] = [1, 1 << 16, 1 << 21, 1 << 31];

/// Decodes the input as a block's words, or drives a ring and its model by it. The first byte says which.
pub fn ring(data: &[u8]) {
    let mut numbers = Numbers(data);
    match numbers.byte() {
        0..=63 => decode(&mut numbers),
        first => drive(first, &mut numbers),
    }
}

fn decode(numbers: &mut Numbers<'_>) {
    let resolution_ns = RESOLUTIONS_NS[usize::from(numbers.byte() % 4)];
    let begin = (numbers.word().cast_signed(), numbers.word(), numbers.byte() & 1 != 0);
    let mut words = Vec::new();
    while !numbers.is_empty() {
        words.push(numbers.word());
    }
    let points = Copied::of_words(&words, begin).points(resolution_ns).count();
    // A change point takes nine bits at least.
    assert!(points <= words.len() * 64 / 9 + 1, "{points} points in {} words", words.len());
}

fn drive(first: u8, numbers: &mut Numbers<'_>) {
    let shape = numbers.byte();
    let layout = Layout::of((shape % 12).into(), 2 + usize::from(shape / 12), 1 + u32::from(first % 3))
        .with_marks(1 + u32::from(shape % 5), usize::from(shape % 7));
    let pick = |table: [i64; 4], bits: u8| table[usize::from(bits % 4)];
    let config = Config {
        retention_ns: pick(RETENTIONS_NS, first >> 2),
        max_bytes: 0,
        resolution_ns: pick(RESOLUTIONS_NS, first >> 4),
    };
    let (writer, reader) = with_layout(layout, &config);
    let mut pair = Pair { writer, reader, model: Model::new(config), now_ns: 0, used_bytes: 0 };
    for _ in 0..MOST_OPERATIONS {
        if numbers.is_empty() {
            break;
        }
        pair.step(numbers);
    }
    pair.ask(numbers);
}

/// A ring and its model, driven alike.
struct Pair {
    writer: Writer,
    reader: Reader,
    model: Model,
    now_ns: i64,
    used_bytes: u64,
}

impl Pair {
    fn step(&mut self, numbers: &mut Numbers<'_>) {
        let (operation, amount) = (numbers.byte(), i64::from(numbers.short()));
        let scaled = amount * SCALES[usize::from(operation >> 2 & 3)];
        match operation % 4 {
            0 => self.push(self.now_ns + scaled),
            1 => {
                self.used_bytes = self.used_bytes.wrapping_add_signed(scaled - (scaled << 1) * (amount & 1));
                self.push(self.now_ns + 1_000_000 + (amount & 0xff) * 1_000);
            }
            2 => self.gap(self.now_ns + scaled - (1 << 15)),
            _ => self.ask(numbers),
        }
    }

    fn push(&mut self, at_ns: i64) {
        let taken = self.writer.push(at_ns, self.used_bytes);
        // Times out of range are the ring's own to refuse.
        if let Err(PushError::OutOfRange { .. }) = taken {
            return;
        }
        assert_eq!(taken, self.model.push(at_ns, self.used_bytes));
        if taken.is_ok() {
            self.now_ns = at_ns;
        }
    }

    fn gap(&mut self, from_ns: i64) {
        if self.writer.gap(from_ns).is_ok() && self.model.newest_ns.is_some() {
            self.model.gap(from_ns);
        }
        assert_eq!(self.reader.point_count(), self.model.changes.len() as u64);
    }

    /// Asks for an interval of what is kept.
    fn ask(&self, numbers: &mut Numbers<'_>) {
        let (Some(oldest_ns), Some(newest_ns)) = (self.reader.oldest_ns(), self.reader.newest_ns()) else { return };
        let span_ns = i128::from(newest_ns - oldest_ns);
        let mut within = || i64::try_from(i128::from(numbers.short()) * span_ns / 0xffff).unwrap_or(0);
        let [one, other] = [oldest_ns + within(), oldest_ns + within()];
        let (from_ns, to_ns) = (one.min(other), one.max(other));
        assert_eq!(self.reader.summary(from_ns, to_ns), Ok(self.model.summary(from_ns, to_ns)));
        let through = self.reader.summary_through(from_ns, to_ns);
        assert_eq!(through, Ok(self.model.summary_through(from_ns, to_ns)));
        assert_eq!(self.reader.changes_after(from_ns, to_ns), Ok(self.model.changes_after(from_ns, to_ns)));
        let points = self.reader.points(from_ns, to_ns, usize::MAX).map(|points| points.points);
        assert_eq!(points, Ok(self.model.points(from_ns, to_ns)));
        let above = self.model.above_ns(from_ns, to_ns, self.used_bytes);
        assert_eq!(self.reader.above_ns(from_ns, to_ns, [self.used_bytes]), Ok([above]));
    }
}
