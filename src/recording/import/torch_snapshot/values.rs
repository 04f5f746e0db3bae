//! What the dictionaries and lists of a snapshot are: segments with their blocks, entries of traces, frames of stacks.
//!
//! Enters: dictionaries and lists as their items come. Leaves: segments and entries, one by one, to a `Sink`. Invariants: known
//! by their members and not by where they are; what is not known is passed over.

use super::members::{
    ACTION, ACTIVE_ALLOCATED, ADDR, ADDRESS, BLOCKS, DEVICE, DEVICE_FREE, DEVICE_TRACES, FILENAME, FRAMES, LINE,
    MEMBERS, NAME, REQUESTED_SIZE, SEGMENTS, SIZE, STATE, TIME_US, TOTAL_SIZE,
};
use super::memo::Kept;
use super::stacks::{Frame, NONE, Stacks};

/// The most members of a dictionary that are looked at, and frames of a stack.
const MOST_MEMBERS: usize = 64;
const MOST_FRAMES: usize = 1 << 12;
/// The most devices, and blocks of one segment.
const MOST_DEVICES: usize = 1 << 10;
const MOST_BLOCKS: usize = 1 << 22;

/// Memory that the allocator has from the driver. Bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub device: i64,
    pub total: u64,
    pub blocks: Vec<Block>,
}

/// A part of a segment. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub address: Option<u64>,
    pub size: u64,
    pub requested: u64,
    pub is_allocated: bool,
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
}

/// Where segments and entries go.
pub(super) trait Sink {
    /// A trace begins; returns its number.
    fn trace(&mut self) -> u32;
    /// An entry of a trace.
    fn entry(&mut self, trace: u32, entry: Entry) -> Result<(), String>;
    /// A segment.
    fn segment(&mut self, segment: Segment) -> Result<(), String>;
    /// Something that is no entry where one should be.
    fn skipped(&mut self);
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
    /// A number that fits, or one above that.
    Int(i64),
    Large(u64),
    Text(u32),
    Frame(u32),
    Stack(u32),
    Entry(Box<Entry>),
    Block(Box<Block>),
    Blocks(Box<Vec<Block>>),
    Segment(Box<Segment>),
    /// A list of segments that have gone to the sink.
    Segments,
    Trace(u32),
    Traces(Box<Vec<Option<u32>>>),
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
            Self::Other | Self::Int(_) | Self::Large(_) => Kept::Other,
            Self::Dict(_) | Self::List(_) => Kept::Open,
            _ => Kept::Gone,
        }
    }

    /// The whole snapshot. Before PyTorch 2.0, that was a list of segments.
    pub fn top(self) -> Result<Top, String> {
        match self {
            Self::Top(top) => Ok(*top),
            Self::Segments => Ok(Top::default()),
            _ => Err("it is a pickle, but no memory snapshot of PyTorch: it has no `segments` and no `device_traces`"
                .to_owned()),
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

/// A dictionary whose items come.
#[derive(Debug, Default)]
pub(super) struct Dict {
    /// Under which number it is remembered.
    pub slot: Option<usize>,
    members: Vec<(u32, Value)>,
}

impl Dict {
    /// Sets a member, of those that are of use.
    pub fn set(&mut self, key: u32, value: Value) {
        let is_known = (1..=MEMBERS.len()).contains(&(key as usize));
        if is_known && self.members.len() < MOST_MEMBERS {
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

    /// What it is.
    pub fn done(mut self, stacks: &mut Stacks) -> Value {
        if let Some(action) = self.text(ACTION) {
            let time_us = if let Some(Value::Int(us)) = self.of(TIME_US) { Some(*us) } else { None };
            let Some(size) = self.number(SIZE) else { return Value::Other };
            let (address, device_free) = (self.number(ADDR), self.number(DEVICE_FREE));
            return Value::Entry(Box::new(Entry { action, address, size, time_us, stack: self.stack(), device_free }));
        }
        if let Some(file) = self.text(FILENAME) {
            let line = self.number(LINE).and_then(|line| u32::try_from(line).ok()).unwrap_or(0);
            return Value::Frame(stacks.frame(Frame { name: self.text(NAME).unwrap_or(NONE), file, line }));
        }
        if let Some(state) = self.text(STATE) {
            let Some(size) = self.number(SIZE) else { return Value::Other };
            let requested = self.number(REQUESTED_SIZE).unwrap_or(size);
            let (address, is_allocated) = (self.number(ADDRESS), state == ACTIVE_ALLOCATED);
            return Value::Block(Box::new(Block { address, size, requested, is_allocated, stack: self.stack() }));
        }
        if let (Some(total), true) = (self.number(TOTAL_SIZE), self.has(BLOCKS)) {
            let device = self.number(DEVICE).and_then(|device| i64::try_from(device).ok()).unwrap_or(0);
            let mut next = self.number(ADDRESS);
            let blocks =
                self.members.iter_mut().find(|(key, _)| *key == BLOCKS).map(|(_, value)| std::mem::take(value));
            let mut blocks = if let Some(Value::Blocks(blocks)) = blocks { *blocks } else { Vec::new() };
            // Before PyTorch 2.1, blocks have no address: they lie one after the other.
            for block in &mut blocks {
                block.address = block.address.or(next);
                next = block.address.and_then(|address| address.checked_add(block.size));
            }
            return Value::Segment(Box::new(Segment { device, total, blocks }));
        }
        if self.has(SEGMENTS) || self.has(DEVICE_TRACES) {
            let traces = self.members.into_iter().rev().find(|(key, _)| *key == DEVICE_TRACES).map(|(_, value)| value);
            let traces = if let Some(Value::Traces(traces)) = traces { *traces } else { Vec::new() };
            return Value::Top(Box::new(Top { traces }));
        }
        Value::Other
    }
}

/// A list whose items come.
#[derive(Debug, Default)]
pub(super) struct List {
    /// Under which number it is remembered.
    pub slot: Option<usize>,
    items: Items,
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
    Other,
}

impl List {
    /// Adds a frame to a list of frames; whether it is one.
    #[inline]
    pub fn push_frame(&mut self, frame: u32) -> bool {
        match &mut self.items {
            Items::Frames(frames) if frames.len() < MOST_FRAMES => frames.push(frame),
            Items::None => self.items = Items::Frames(vec![frame]),
            _ => return false,
        }
        true
    }

    /// Adds an item.
    #[inline]
    pub fn push(&mut self, item: Value, sink: &mut impl Sink) -> Result<(), String> {
        match (&mut self.items, item) {
            (Items::Frames(frames), Value::Frame(_) | Value::Other) if frames.len() >= MOST_FRAMES => {}
            (Items::Frames(frames), Value::Frame(frame)) => frames.push(frame),
            (Items::None, Value::Frame(frame)) => self.items = Items::Frames(vec![frame]),
            (Items::Frames(frames), Value::Other) => frames.push(NONE),
            (Items::Trace(trace), Value::Entry(entry)) => sink.entry(*trace, *entry)?,
            (Items::None, Value::Entry(entry)) => {
                let trace = sink.trace();
                self.items = Items::Trace(trace);
                sink.entry(trace, *entry)?;
            }
            (Items::Trace(_), _) => sink.skipped(),
            (Items::None | Items::Segments, Value::Segment(segment)) => {
                self.items = Items::Segments;
                sink.segment(*segment)?;
            }
            (Items::Segments, _) => sink.skipped(),
            (Items::None, Value::Block(block)) => self.items = Items::Blocks(vec![*block]),
            (Items::Blocks(blocks), Value::Block(block)) => {
                if blocks.len() >= MOST_BLOCKS {
                    return Err(format!("a segment has more than {MOST_BLOCKS} blocks"));
                }
                blocks.push(*block);
            }
            (Items::None, Value::Trace(trace)) => self.items = Items::Traces(vec![Some(trace)]),
            // The trace of a device that did nothing.
            (Items::None, Value::Stack(NONE)) => self.items = Items::Traces(vec![None]),
            (Items::Traces(traces), Value::Trace(_) | Value::Stack(NONE)) if traces.len() >= MOST_DEVICES => {
                return Err(format!("it has traces of more than {MOST_DEVICES} devices"));
            }
            (Items::Traces(traces), Value::Trace(trace)) => traces.push(Some(trace)),
            (Items::Traces(traces), Value::Stack(NONE)) => traces.push(None),
            _ => self.items = Items::Other,
        }
        Ok(())
    }

    /// What it is.
    pub fn done(self, stacks: &mut Stacks) -> Value {
        match self.items {
            Items::None => Value::Stack(NONE),
            Items::Frames(frames) => Value::Stack(stacks.stack(&frames)),
            Items::Blocks(blocks) => Value::Blocks(Box::new(blocks)),
            Items::Segments => Value::Segments,
            Items::Trace(trace) => Value::Trace(trace),
            Items::Traces(traces) => Value::Traces(Box::new(traces)),
            Items::Other => Value::Other,
        }
    }
}
