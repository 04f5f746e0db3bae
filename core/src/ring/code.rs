//! The bits of a change point: what a time and a value become, and back.
//!
//! Prefix codes, written from the highest bit of a word down. A time is coded as the distance to the last change point
//! less a period that writer and readers track alike. A value is coded as its difference to the last value. If that is
//! one of the last seven different differences, its rank among these is written (move-to-front), because allocators
//! map the same sizes again and again. The widths cost least on a recorded training job (two H200, 3,314 changes), and
//! keep a change at every sample, with 30 µs of jitter and jumps of 8 GiB, below 3 bytes.
//!
//! | time: deviation in units of the resolution | | value | |
//! |---|---|---|---|
//! | `0` + 6 bits | ± 32 | `00` + 10 bits | multiple of 2 MiB, ± 1 GiB |
//! | `10` + 8 | ± 128 | `01` + 13 | multiple of 2 MiB, ± 8 GiB |
//! | `110` + 10 | ± 512 | `10` | the last difference again |
//! | `1110` + 12 | ± 2,048 | `110` + 1 | the second or third last |
//! | `11110` + 15 | ± 16,384 | `1110` + 2 | the fourth to seventh last |
//! | `111110` + 20 | ± 524,288 | `11110` + 23 | multiple of 64 KiB, ± 256 GiB |
//! | `111111` + 64 | the distance itself | `111110` + 64 | the value itself |
//! | | | `111111` | a gap begins |
//!
//! The widths of times are for a resolution of 1 µs. A finer resolution widens them by the bits that a deviation gains.
//!
//! Words that no encoder wrote decode to other numbers, never to a panic: every sum wraps around.

/// The most bits that one change point can take.
pub(super) const MAX_POINT_BITS: u32 = 2 * (PREFIX_BITS + 64);

const PREFIX_BITS: u32 = 6;
const TIME_WIDTHS: [u32; 6] = [6, 8, 10, 12, 15, 20];
const NOMINAL_PERIOD_NS: i64 = 1_000_000;
const NOMINAL_RESOLUTION_NS: i64 = 1_000;
const NEAR_UNITS: u64 = 64;
/// Smoothing of the period: the deviation counts an eighth.
const PERIOD_SHIFT: u32 = 3;

/// log2 of 64 KiB, the smallest step that drivers report memory in.
const STEP_SHIFT: u32 = 16;
/// log2 of how many such steps a 2 MiB granule has.
const GRANULE_SHIFT: u32 = 5;
const SMALL_WIDTH: u32 = 10;
const LARGE_WIDTH: u32 = 13;
const STEP_WIDTH: u32 = 23;
const RANKS: usize = 7;
const PLACES: usize = 8;
/// The most bits of a value but for a raw one.
const VALUE_BITS: u32 = 5 + STEP_WIDTH;

/// Bits to be written: up to 64, then another 64 if there is a raw word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Code {
    pub(super) bits: u64,
    pub(super) width: u32,
    pub(super) raw: Option<u64>,
}

impl Code {
    fn prefixed(prefix: u64, prefix_width: u32, payload: i64, width: u32) -> Self {
        let mask = (1 << width) - 1;
        Self { bits: prefix << width | (payload.cast_unsigned() & mask), width: prefix_width + width, raw: None }
    }

    fn escaped(prefix: u64, raw: u64) -> Self {
        Self { bits: prefix, width: PREFIX_BITS, raw: Some(raw) }
    }

    /// Bits in all.
    pub(super) fn len(&self) -> u32 {
        self.width + if self.raw.is_some() { 64 } else { 0 }
    }
}

/// Words of a coder's state.
pub(super) const STATE_WORDS: usize = 4 + PLACES / 2;

/// The state that writer and reader of a block share: both begin it with the block and move it alike.
#[derive(Debug, Clone)]
pub(super) struct Coder {
    widths: [u32; TIME_WIDTHS.len()],
    near: u64,
    period: i64,
    last_distance: i64,
    used_bytes: u64,
    /// The last different differences: the latest at `front`, the one before it in the next place, around the end.
    recent: [i32; PLACES],
    front: usize,
}

impl Coder {
    /// The state at a block's begin, where `used_bytes` is held, or was held last before a gap.
    pub(super) fn new(resolution_ns: i64, used_bytes: u64) -> Self {
        let finer = u64::try_from(NOMINAL_RESOLUTION_NS / resolution_ns).unwrap_or(0).max(1);
        let extra = finer.next_power_of_two().trailing_zeros();
        let period = NOMINAL_PERIOD_NS / resolution_ns;
        Self {
            widths: TIME_WIDTHS.map(|width| width + extra),
            near: NEAR_UNITS << extra,
            period,
            last_distance: period,
            used_bytes,
            recent: [0; PLACES],
            front: 0,
        }
    }

    /// The state as words of the ring's memory; what follows from the resolution is left out.
    pub(super) fn to_words(&self) -> [u64; STATE_WORDS] {
        let mut words = [0; STATE_WORDS];
        words[..4].copy_from_slice(&[
            self.period.cast_unsigned(),
            self.last_distance.cast_unsigned(),
            self.used_bytes,
            self.front as u64,
        ]);
        for (word, pair) in words[4..].iter_mut().zip(self.recent.chunks_exact(2)) {
            *word = u64::from(pair[0].cast_unsigned()) << 32 | u64::from(pair[1].cast_unsigned());
        }
        words
    }

    /// From the words that [`Coder::to_words`] made.
    #[allow(clippy::cast_possible_truncation, reason = "halves of a word, and a place of eight")]
    pub(super) fn from_words(resolution_ns: i64, words: [u64; STATE_WORDS]) -> Self {
        let mut coder = Self::new(resolution_ns, words[2]);
        (coder.period, coder.last_distance) = (words[0].cast_signed(), words[1].cast_signed());
        coder.front = words[3] as usize % PLACES;
        for (pair, word) in coder.recent.chunks_exact_mut(2).zip(&words[4..]) {
            pair.copy_from_slice(&[((word >> 32) as u32).cast_signed(), (*word as u32).cast_signed()]);
        }
        coder
    }

    /// The value held, or held last before a gap.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Codes the distance to the last change point, in units of the resolution, not negative.
    pub(super) fn encode_time(&mut self, distance: i64) -> Code {
        let deviation = distance - self.period;
        let class = self.widths.iter().position(|&width| fits(deviation, width));
        self.follow(distance);
        match class {
            #[allow(clippy::cast_possible_truncation, reason = "one of six")]
            Some(class) => Code::prefixed((2 << class) - 2, class as u32 + 1, deviation, self.widths[class]),
            None => Code::escaped(0b11_1111, distance.cast_unsigned()),
        }
    }

    #[inline]
    /// Reads the distance to the last change point, in units of the resolution.
    pub(super) fn decode_time(&mut self, bits: &mut Bits<'_>) -> i64 {
        let word = bits.refilled();
        let class = word.leading_ones();
        let distance = if class == 0 {
            // Most of them: a branch of its own lets the processor go on before the width is known.
            let width = self.widths[0];
            bits.skip(1 + width);
            self.period.wrapping_add(signed(word << 1, width))
        } else if let Some(&width) = self.widths.get(class as usize) {
            bits.skip(class + 1 + width);
            self.period.wrapping_add(signed(word << (class + 1), width))
        } else {
            bits.skip(PREFIX_BITS);
            bits.raw().cast_signed()
        };
        self.follow(distance);
        distance
    }

    /// The period follows small deviations slowly, and jumps where two distances agree on another one.
    fn follow(&mut self, distance: i64) {
        let deviation = distance.wrapping_sub(self.period);
        if deviation.unsigned_abs() < self.near {
            self.period = self.period.wrapping_add(deviation >> PERIOD_SHIFT);
        } else if distance.wrapping_sub(self.last_distance).unsigned_abs() < self.near {
            self.period = distance;
        }
        self.last_distance = distance;
    }

    /// Codes a value, or the begin of a gap.
    pub(super) fn encode_value(&mut self, used_bytes: Option<u64>) -> Code {
        let Some(used_bytes) = used_bytes else {
            return Code { bits: 0b11_1111, width: PREFIX_BITS, raw: None };
        };
        let steps = steps_between(self.used_bytes, used_bytes);
        self.used_bytes = used_bytes;
        let Some(steps) = steps else {
            return Code::escaped(0b11_1110, used_bytes);
        };
        let rank = (0..RANKS).find(|&rank| self.recent[self.place(rank)] == steps);
        self.remember(steps, rank);
        match rank {
            Some(0) => Code::prefixed(0b10, 2, 0, 0),
            Some(rank @ 1..=2) => Code::prefixed(0b110, 3, rank as i64 - 1, 1),
            Some(rank) => Code::prefixed(0b1110, 4, rank as i64 - 3, 2),
            None => encode_steps(i64::from(steps)),
        }
    }

    #[inline]
    /// Reads a value, or the begin of a gap.
    pub(super) fn decode_value(&mut self, bits: &mut Bits<'_>) -> Option<u64> {
        let word = bits.ahead(VALUE_BITS);
        let (steps, rank) = match word.leading_ones() {
            0 if word >> 62 == 0 => (decode_granules(word, SMALL_WIDTH, bits), None),
            0 => (decode_granules(word, LARGE_WIDTH, bits), None),
            1 => self.decode_rank(0, 2, bits),
            2 => self.decode_rank(1 + top(word << 3, 1), 4, bits),
            3 => self.decode_rank(3 + top(word << 4, 2), 6, bits),
            4 => {
                bits.skip(5 + STEP_WIDTH);
                #[allow(clippy::cast_possible_truncation, reason = "23 bits")]
                let steps = signed(word << 5, STEP_WIDTH) as i32;
                (steps, None)
            }
            5 => {
                bits.skip(PREFIX_BITS);
                self.used_bytes = bits.raw();
                return Some(self.used_bytes);
            }
            _ => {
                bits.skip(PREFIX_BITS);
                return None;
            }
        };
        self.remember(steps, rank);
        self.used_bytes = self.used_bytes.wrapping_add_signed(i64::from(steps) << STEP_SHIFT);
        Some(self.used_bytes)
    }

    fn decode_rank(&self, rank: usize, width: u32, bits: &mut Bits<'_>) -> (i32, Option<usize>) {
        bits.skip(width);
        (self.recent[self.place(rank)], Some(rank))
    }

    fn place(&self, rank: usize) -> usize {
        (self.front + rank) % PLACES
    }

    /// Moves a difference from its rank to the front, or adds a new one there. Adding one moves no other, so that each difference
    /// of a trace without repetitions costs one write.
    #[inline]
    fn remember(&mut self, steps: i32, rank: Option<usize>) {
        match rank {
            Some(rank) => {
                for rank in (0..rank).rev() {
                    self.recent[self.place(rank + 1)] = self.recent[self.place(rank)];
                }
            }
            None => self.front = self.place(PLACES - 1),
        }
        self.recent[self.front] = steps;
    }
}

fn encode_steps(steps: i64) -> Code {
    let granules = steps >> GRANULE_SHIFT;
    let whole = granules << GRANULE_SHIFT == steps;
    if whole && fits(granules, SMALL_WIDTH) {
        Code::prefixed(0b00, 2, granules, SMALL_WIDTH)
    } else if whole && fits(granules, LARGE_WIDTH) {
        Code::prefixed(0b01, 2, granules, LARGE_WIDTH)
    } else {
        Code::prefixed(0b1_1110, 5, steps, STEP_WIDTH)
    }
}

#[allow(clippy::cast_possible_truncation, reason = "18 bits")]
#[inline]
fn decode_granules(word: u64, width: u32, bits: &mut Bits<'_>) -> i32 {
    bits.skip(2 + width);
    (signed(word << 2, width) << GRANULE_SHIFT) as i32
}

/// The difference in steps of 64 KiB, if it is a multiple of them and fits the code.
fn steps_between(from_bytes: u64, to_bytes: u64) -> Option<i32> {
    let distance = from_bytes.abs_diff(to_bytes);
    let steps = i32::try_from(distance >> STEP_SHIFT).ok()?;
    let whole = u64::from(steps.unsigned_abs()) << STEP_SHIFT == distance;
    let steps = if to_bytes < from_bytes { -steps } else { steps };
    (whole && fits(i64::from(steps), STEP_WIDTH)).then_some(steps)
}

fn fits(value: i64, width: u32) -> bool {
    let bound = 1_i64 << (width - 1);
    (-bound..bound).contains(&value)
}

/// The highest `width` bits of a word, as a signed number.
fn signed(word: u64, width: u32) -> i64 {
    word.cast_signed() >> (64 - width)
}

/// The highest `width` bits of a word.
fn top(word: u64, width: u32) -> usize {
    (word >> (64 - width)) as usize
}

/// Reads bits from the highest of a word down; beyond the words there are only zeros.
#[derive(Debug, Clone)]
pub(super) struct Bits<'a> {
    words: &'a [u64],
    at: u32,
    /// The next bits, from the highest down, of which `ready` are loaded.
    ahead: u64,
    ready: u32,
}

impl<'a> Bits<'a> {
    /// Reads these words from their first bit.
    pub(super) fn new(words: &'a [u64]) -> Self {
        Self { words, at: 0, ahead: 0, ready: 0 }
    }

    /// The same from another bit on.
    pub(super) fn from(self, position: u32) -> Self {
        Self { at: position, ahead: 0, ready: 0, ..self }
    }

    /// How many bits were read.
    pub(super) fn position(&self) -> u32 {
        self.at
    }

    /// The next 64 bits, which stay unread.
    #[inline]
    fn refilled(&mut self) -> u64 {
        let word = (self.at / 64) as usize;
        let offset = self.at % 64;
        let high = self.words.get(word).copied().unwrap_or(0);
        let low = self.words.get(word + 1).copied().unwrap_or(0);
        self.ahead = high << offset | low >> 1 >> (63 - offset);
        self.ready = 64;
        self.ahead
    }

    /// At least the next `bits` bits, highest first, which stay unread.
    #[inline]
    fn ahead(&mut self, bits: u32) -> u64 {
        if self.ready < bits { self.refilled() } else { self.ahead }
    }

    /// Goes over 1 to 63 bits.
    #[inline]
    fn skip(&mut self, bits: u32) {
        self.at += bits;
        self.ahead <<= bits;
        self.ready = self.ready.saturating_sub(bits);
    }

    fn raw(&mut self) -> u64 {
        let word = self.refilled();
        self.at += 64;
        self.ready = 0;
        word
    }
}
