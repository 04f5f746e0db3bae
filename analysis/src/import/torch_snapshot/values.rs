//! What the dictionaries and lists of a snapshot are: segments with their blocks, entries of traces, frames of stacks.
//!
//! Enters: dictionaries and lists, item by item. Leaves: segments and entries, one by one, to a `Sink`. Invariants: a
//! dictionary is recognized by its members and not by its position; an unknown one is ignored.

use super::input::Parsed;
use super::members::{
    ACTION, ACTIVE_ALLOCATED, ACTIVE_AWAITING_FREE, ACTIVE_PENDING_FREE, ADDR, ADDRESS, BLOCKS, DEVICE, DEVICE_FREE,
    DEVICE_TRACES, FILENAME, FRAMES, IS_EXPANDABLE, LARGE, LINE, MEMBERS, NAME, REQUESTED_SIZE, SEGMENT_POOL_ID,
    SEGMENT_TYPE, SEGMENTS, SIZE, SMALL, STATE, STREAM, TIME_US, TOTAL_SIZE,
};
use super::memo::Kept;
use super::stacks::{Frame, NO_LINE, NONE, Stacks};
use highwater_engine::recording::FileProblem;

/// The most members of a dictionary that are looked at, and frames of a stack.
const MOST_MEMBERS: usize = 64;
const MOST_FRAMES: usize = 1 << 12;
/// Approximate bytes of an empty dictionary or list, and of the value that is made of one.
pub(super) const CONTAINER_BYTES: usize = 128;
/// The most devices of one process.
pub(super) const MOST_DEVICES: usize = 64;

/// Memory that the allocator has from the driver. Bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub device: i64,
    pub address: Option<u64>,
    pub total: u64,
    pub kind: SegmentKind,
    pub blocks: Vec<Block>,
}

/// What requests a segment serves; `None` is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SegmentKind {
    pub stream: Option<u64>,
    /// Whether it is for requests up to 1 MiB.
    pub is_small: Option<bool>,
    /// Whether it belongs to a pool of its own, such as a CUDA graph's.
    pub is_private: Option<bool>,
    /// Whether it grows.
    pub is_expandable: bool,
}

/// A part of a segment. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub address: Option<u64>,
    pub size: u64,
    /// What was asked for, where that is known.
    pub requested: Option<u64>,
    /// Whether the program has it.
    pub is_allocated: bool,
    /// Whether it is in use: the program has it, or has given it back while the GPU still uses it.
    pub is_in_use: bool,
    pub stack: u32,
}

/// What the allocator did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// By the number of its text.
    pub action: u32,
    pub address: Option<u64>,
    pub size: u64,
    /// Microseconds of Unix time.
    pub time_us: Option<i64>,
    pub stack: u32,
    pub device_free: Option<u64>,
    pub stream: Option<u64>,
}

/// Where segments and entries go.
pub(super) trait Sink {
    /// A trace begins; returns its number.
    fn trace(&mut self) -> Parsed<u32>;
    /// An entry of a trace.
    fn entry(&mut self, trace: u32, entry: Entry) -> Parsed<()>;
    /// A segment.
    fn segment(&mut self, segment: Segment) -> Parsed<()>;
    /// Counts `count` values that are no entry, segment or trace where one should be.
    fn skipped(&mut self, count: u64);
}

/// The whole snapshot.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Top {
    /// By device, the number of its trace; `None` where that is empty.
    pub traces: Vec<Option<u32>>,
}

#[derive(Debug, Default)]
pub(super) enum Value {
    #[default]
    Other,
    /// An integer.
    Int(i64),
    /// An integer above `i64::MAX`.
    Large(u64),
    Bool(bool),
    /// Two integers, and whether one of them is not 0.
    Pair(bool),
    Text(u32),
    Frame(u32),
    Stack(u32),
    Entry(Box<Entry>),
    Block(Box<Block>),
    Blocks(Box<[Block]>),
    Segment(Box<Segment>),
    /// A list of segments that have gone to the sink.
    Segments,
    Trace(u32),
    Traces(Box<[Option<u32>]>),
    Top(Box<Top>),
    Dict(Box<Dict>),
    List(Box<List>),
}

impl Value {
    /// A number, if it is one of those that are of use.
    #[inline]
    pub fn number(number: i128) -> Self {
        match i64::try_from(number) {
            Ok(number) => Self::Int(number),
            Err(_) => u64::try_from(number).map_or(Self::Other, Self::Large),
        }
    }

    /// What is remembered of it, once it is complete.
    pub fn kept(&self) -> Kept {
        match self {
            Self::Text(text) => Kept::Text(*text),
            Self::Frame(frame) => Kept::Frame(*frame),
            Self::Stack(stack) => Kept::Stack(*stack),
            Self::Pair(is_set) => Kept::Pair(*is_set),
            Self::Other | Self::Int(_) | Self::Large(_) | Self::Bool(_) => Kept::Other,
            _ => Kept::Gone,
        }
    }

    /// The whole snapshot. Before PyTorch 2.0, that was a list of segments.
    pub fn top(self) -> Parsed<Top> {
        match self {
            Self::Top(top) => Ok(*top),
            Self::Segments => Ok(Top::default()),
            _ => {
                let problem =
                    "it is a pickle, but no memory snapshot of PyTorch: it has no `segments` and no `device_traces`";
                Err(FileProblem::Foreign(problem).into())
            }
        }
    }

    /// The bytes that it takes beside the value itself, about.
    pub fn weight(&self) -> usize {
        match self {
            Self::Blocks(blocks) => size_of_val::<[Block]>(blocks),
            Self::Entry(_) | Self::Block(_) | Self::Segment(_) | Self::Dict(_) | Self::List(_) => CONTAINER_BYTES,
            _ => size_of::<u32>(),
        }
    }

    fn unsigned(&self) -> Option<u64> {
        match self {
            Self::Int(number) => u64::try_from(*number).ok(),
            Self::Large(number) => Some(*number),
            _ => None,
        }
    }
}

/// A dictionary that is still being filled.
#[derive(Debug, Default)]
pub(super) struct Dict {
    /// Its number in the memo, if it has one.
    pub slot: Option<usize>,
    /// The bytes that it takes, about.
    pub weight: usize,
    members: Vec<(u32, Value)>,
}

impl Dict {
    /// Sets a member, of those that are of use.
    pub fn set(&mut self, key: u32, value: Value) {
        let is_known = (1..=MEMBERS.len()).contains(&(key as usize));
        if is_known && self.members.len() < MOST_MEMBERS {
            self.weight += size_of::<(u32, Value)>() + value.weight();
            self.members.push((key, value));
        }
    }

    fn has(&self, key: u32) -> bool {
        self.members.iter().any(|(known, _)| *known == key)
    }

    fn of(&self, key: u32) -> Option<&Value> {
        self.members.iter().rev().find(|(known, _)| *known == key).map(|(_, value)| value)
    }

    fn number(&self, key: u32) -> Option<u64> {
        self.of(key).and_then(Value::unsigned)
    }

    fn text(&self, key: u32) -> Option<u32> {
        if let Some(Value::Text(text)) = self.of(key) { Some(*text) } else { None }
    }

    fn stack(&self) -> u32 {
        if let Some(Value::Stack(stack)) = self.of(FRAMES) { *stack } else { NONE }
    }

    fn segment_kind(&self) -> SegmentKind {
        let is_small = match self.text(SEGMENT_TYPE) {
            Some(SMALL) => Some(true),
            Some(LARGE) => Some(false),
            _ => None,
        };
        let is_private =
            if let Some(Value::Pair(is_private)) = self.of(SEGMENT_POOL_ID) { Some(*is_private) } else { None };
        let is_expandable = matches!(self.of(IS_EXPANDABLE), Some(Value::Bool(true)));
        SegmentKind { stream: self.number(STREAM), is_small, is_private, is_expandable }
    }

    /// Converts the complete dictionary into the value that its members identify.
    pub fn done(mut self, stacks: &mut Stacks) -> Value {
        if let Some(action) = self.text(ACTION) {
            let time_us = if let Some(Value::Int(us)) = self.of(TIME_US) { Some(*us) } else { None };
            // As nanoseconds, it has to fit.
            let time_us = time_us.filter(|us| us.checked_mul(1_000).is_some());
            let Some(size) = self.number(SIZE) else { return Value::Other };
            let (address, device_free, stream) = (self.number(ADDR), self.number(DEVICE_FREE), self.number(STREAM));
            let stack = self.stack();
            return Value::Entry(Box::new(Entry { action, address, size, time_us, stack, device_free, stream }));
        }
        if let Some(file) = self.text(FILENAME) {
            let line = self.number(LINE).and_then(|line| u32::try_from(line).ok()).unwrap_or(NO_LINE);
            return Value::Frame(stacks.frame(Frame { name: self.text(NAME).unwrap_or(NONE), file, line }));
        }
        if let Some(state) = self.text(STATE) {
            let Some(size) = self.number(SIZE) else { return Value::Other };
            let (address, requested) = (self.number(ADDRESS), self.number(REQUESTED_SIZE));
            let is_allocated = state == ACTIVE_ALLOCATED;
            let is_in_use = is_allocated || state == ACTIVE_PENDING_FREE || state == ACTIVE_AWAITING_FREE;
            return Value::Block(Box::new(Block {
                address,
                size,
                requested,
                is_allocated,
                is_in_use,
                stack: self.stack(),
            }));
        }
        if let (Some(total), true) = (self.number(TOTAL_SIZE), self.has(BLOCKS)) {
            let Some(device) = self.number(DEVICE).and_then(|device| i64::try_from(device).ok()) else {
                return Value::Other;
            };
            let (address, kind) = (self.number(ADDRESS), self.segment_kind());
            let mut next = address;
            let blocks =
                self.members.iter_mut().find(|(key, _)| *key == BLOCKS).map(|(_, value)| std::mem::take(value));
            let mut blocks = if let Some(Value::Blocks(blocks)) = blocks { blocks.into_vec() } else { Vec::new() };
            // Before PyTorch 2.1, blocks have no address: they lie one after the other.
            for block in &mut blocks {
                block.address = block.address.or(next);
                next = block.address.and_then(|address| address.checked_add(block.size));
            }
            return Value::Segment(Box::new(Segment { device, address, total, kind, blocks }));
        }
        if self.has(SEGMENTS) || self.has(DEVICE_TRACES) {
            let traces = self.members.into_iter().rev().find(|(key, _)| *key == DEVICE_TRACES).map(|(_, value)| value);
            let traces = if let Some(Value::Traces(traces)) = traces { traces.into_vec() } else { Vec::new() };
            return Value::Top(Box::new(Top { traces }));
        }
        Value::Other
    }
}

/// A list that is still being filled.
#[derive(Debug, Default)]
pub(super) struct List {
    /// Its number in the memo, if it has one.
    pub slot: Option<usize>,
    items: Items,
    /// Number of unusable items before the first usable one, which determines the type of the list.
    odd: usize,
}

#[derive(Debug, Default)]
enum Items {
    #[default]
    None,
    Frames(Vec<u32>),
    Blocks(Vec<Block>),
    Segments,
    Trace(u32),
    Traces(Vec<Option<u32>>),
}

impl List {
    /// Adds a frame if this list is empty, or has frames and room for more; returns whether it was added.
    #[inline]
    pub fn push_frame(&mut self, frame: u32) -> bool {
        match &mut self.items {
            Items::Frames(frames) if frames.len() < MOST_FRAMES => frames.push(frame),
            Items::None if self.odd == 0 => self.items = Items::Frames(vec![frame]),
            _ => return false,
        }
        true
    }

    /// The bytes that its items take, about. Entries and segments have gone to the sink.
    #[inline]
    pub fn weight(&self) -> usize {
        match &self.items {
            Items::Frames(frames) => size_of_val(frames.as_slice()),
            Items::Blocks(blocks) => size_of_val(blocks.as_slice()),
            Items::Traces(traces) => size_of_val(traces.as_slice()),
            Items::None | Items::Segments | Items::Trace(_) => 0,
        }
    }

    /// Adds an item. The first usable item determines the type of the list; later items of another type are counted
    /// as skipped.
    #[inline]
    pub fn push(&mut self, item: Value, sink: &mut impl Sink) -> Parsed<()> {
        match (&mut self.items, item) {
            (Items::Frames(frames), Value::Frame(_) | Value::Other) if frames.len() >= MOST_FRAMES => {}
            (Items::Frames(frames), Value::Frame(frame)) => frames.push(frame),
            (Items::Frames(frames), Value::Other) => frames.push(NONE),
            (Items::Trace(trace), Value::Entry(entry)) => sink.entry(*trace, *entry)?,
            (Items::Segments, Value::Segment(segment)) => sink.segment(*segment)?,
            (Items::Blocks(blocks), Value::Block(block)) => blocks.push(*block),
            (Items::Traces(traces), _) if traces.len() >= MOST_DEVICES => {
                return Err(FileProblem::too_many(MOST_DEVICES, "devices with traces").into());
            }
            (Items::Traces(traces), Value::Trace(trace)) => traces.push(Some(trace)),
            // The trace of a device that did nothing.
            (Items::Traces(traces), Value::Stack(NONE)) => traces.push(None),
            (Items::Traces(traces), _) => {
                // Keeps the place: a trace's position is its device.
                traces.push(None);
                sink.skipped(1);
            }
            (Items::None, item) => self.begin(item, sink)?,
            _ => sink.skipped(1),
        }
        Ok(())
    }

    /// Adds the first item of use.
    fn begin(&mut self, item: Value, sink: &mut impl Sink) -> Parsed<()> {
        let (odd, skipped) = (self.odd, self.odd as u64);
        let lost = |most: usize| std::iter::repeat_n(None, odd.min(most));
        self.items = match item {
            Value::Frame(frame) => {
                Items::Frames([NONE].repeat(odd.min(MOST_FRAMES)).into_iter().chain([frame]).collect())
            }
            Value::Entry(entry) => {
                let trace = sink.trace()?;
                sink.skipped(skipped);
                sink.entry(trace, *entry)?;
                Items::Trace(trace)
            }
            Value::Segment(segment) => {
                sink.skipped(skipped);
                sink.segment(*segment)?;
                Items::Segments
            }
            Value::Block(block) => {
                sink.skipped(skipped);
                Items::Blocks(vec![*block])
            }
            Value::Trace(trace) => {
                sink.skipped(skipped);
                Items::Traces(lost(MOST_DEVICES).chain([Some(trace)]).collect())
            }
            Value::Stack(NONE) => {
                sink.skipped(skipped);
                Items::Traces(lost(MOST_DEVICES).chain([None]).collect())
            }
            _ => {
                self.odd += 1;
                Items::None
            }
        };
        Ok(())
    }

    /// What it is.
    pub fn done(self, stacks: &mut Stacks) -> Value {
        match self.items {
            Items::None if self.odd > 0 => Value::Other,
            Items::None => Value::Stack(NONE),
            Items::Frames(frames) => Value::Stack(stacks.stack(&frames)),
            Items::Blocks(blocks) => Value::Blocks(blocks.into()),
            Items::Segments => Value::Segments,
            Items::Trace(trace) => Value::Trace(trace),
            Items::Traces(traces) => Value::Traces(traces.into()),
        }
    }
}
