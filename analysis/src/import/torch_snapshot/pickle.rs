//! A pickle as data: protocols 2 to 5, as far as data needs them.
//!
//! Enters: a file that Python's `pickle` or PyTorch's own pickler wrote. Leaves: what `values` makes of its dictionaries and
//! lists, while it is read. Invariants: nothing is executed, and an opcode that would execute code is an error that names the
//! code; a list or dictionary that occurs again is not copied; memory does not grow with the file, except for the memo.

use super::input::{Input, MOST_TEXT, Parsed};
use super::memo::{Kept, Memo};
use super::stacks::Stacks;
use super::values::{CONTAINER_BYTES, Dict, Sink, Top, Value};
use highwater_engine::recording::FileProblem;
use std::io::Read;

/// Maximum number of values that wait for their container, and of their bytes. Python's pickler adds a thousand at a time.
const MOST_WAITING: usize = 1 << 16;
const MOST_WAITING_BYTES: usize = 48 << 20;
/// The most containers that are open, one inside the other.
const MOST_OPEN: usize = 1 << 10;
/// PyTorch's own pickler appends all items of a list at once. If more than this number wait, they are added to their list
/// early.
const MANY: usize = 1 << 12;

/// Reads a pickle.
///
/// # Errors
/// It is cut short, has code, or is no pickle of a snapshot; says why and where.
pub(super) fn read<R: Read, S: Sink>(reader: R, stacks: &mut Stacks, sink: &mut S) -> Parsed<Top> {
    let (values, marks, memo) = (Vec::new(), Vec::new(), Memo::default());
    let mut machine = Machine { input: Input::new(reader), stacks, sink, values, marks, memo, waiting_bytes: 0 };
    loop {
        let opcode = machine.input.byte()?;
        if opcode == b'.' {
            break;
        }
        machine.step(opcode)?;
    }
    let whole = machine.pop()?;
    machine.consume(whole)?.top()
}

struct Machine<'a, R, S> {
    input: Input<R>,
    stacks: &'a mut Stacks,
    sink: &'a mut S,
    values: Vec<Value>,
    /// Where the values after each mark begin.
    marks: Vec<usize>,
    memo: Memo,
    /// What the values take, about.
    waiting_bytes: usize,
}

impl<R: Read, S: Sink> Machine<'_, R, S> {
    #[inline(always)]
    fn step(&mut self, opcode: u8) -> Parsed<()> {
        match opcode {
            b'h' => self.index(1).and_then(|at| self.recall(at)),
            b'j' => self.index(4).and_then(|at| self.recall(at)),
            0x94 => self.remember(self.memo.next()),
            b'q' => self.index(1).and_then(|at| self.remember(at)),
            b'r' => self.index(4).and_then(|at| self.remember(at)),
            b'(' => self.mark(),
            b'K' => self.unsigned(1),
            b'M' => self.unsigned(2),
            b'J' => self.signed(4),
            0x8a => self.input.number(1).and_then(|bytes| self.signed(bytes)),
            0x8b => self.input.number(4).and_then(|bytes| self.signed(bytes)),
            0x8c | b'U' => self.text(1),
            b'X' | b'T' => self.text(4),
            0x8d => self.text(8),
            b'}' => self.open_dict(),
            b']' => self.open(Value::List(Box::default())),
            b'u' => self.set_items(),
            b'e' => self.append_items(),
            b's' => {
                self.marks.push(self.values.len().saturating_sub(2));
                self.set_items()
            }
            b'a' => {
                self.marks.push(self.values.len().saturating_sub(1));
                self.append_items()
            }
            0x88 | 0x89 => self.push(Value::Bool(opcode == 0x88)),
            b'N' | b')' | 0x8f => self.push(Value::Other),
            0x86 => self.pair(),
            0x85 | 0x87 => {
                self.marks.push(self.values.len().saturating_sub(usize::from(opcode - 0x84)));
                self.drop_to_mark()?;
                self.push(Value::Other)
            }
            b't' | 0x91 => {
                self.drop_to_mark()?;
                self.push(Value::Other)
            }
            // ADDITEMS of a set, and POP_MARK.
            0x90 | b'1' => self.drop_to_mark(),
            // POP: the memo may still refer to the value.
            b'0' => self.pop().and_then(|value| self.consume(value)).map(drop),
            _ => self.seldom(opcode),
        }
    }

    /// Opcodes that a snapshot has once or never.
    #[cold]
    fn seldom(&mut self, opcode: u8) -> Parsed<()> {
        match opcode {
            0x80 => match self.input.byte()? {
                2..=5 => Ok(()),
                protocol => {
                    let problem = format!("it is written in protocol {protocol}; 2 to 5 are known");
                    Err(FileProblem::malformed(problem).into())
                }
            },
            0x95 => self.input.skip(8),
            b'G' => self.passed_over(8),
            b'C' | 0x8e | b'B' | 0x96 => {
                let count = self.input.number(match opcode {
                    b'C' => 1,
                    b'B' => 4,
                    _ => 8,
                })?;
                self.passed_over(count)
            }
            b'c' | b'i' => {
                let (module, name) = (self.input.line()?, self.input.line()?);
                Err(code(&format!("{}.{}", String::from_utf8_lossy(&module), String::from_utf8_lossy(&name))))
            }
            0x93 => {
                let mut named = |value: Value| match value {
                    Value::Text(text) => self.stacks.text_of(text).to_owned(),
                    _ => "?".to_owned(),
                };
                let name = self.values.pop().map(&mut named).unwrap_or_default();
                let module = self.values.pop().map(named).unwrap_or_default();
                Err(code(&format!("{module}.{name}")))
            }
            b'R' | b'b' | b'o' | 0x81..=0x84 | 0x92 => Err(code("an object")),
            b'P' | b'Q' | 0x97 | 0x98 => Err(FileProblem::malformed("it needs data that are not in the file").into()),
            _ => {
                let at = self.input.position() - 1;
                let problem = format!("byte {at} is {opcode:#04x}, which begins nothing in a pickle");
                Err(FileProblem::malformed(problem).into())
            }
        }
    }

    #[cold]
    fn damaged(&self, problem: &'static str) -> Box<FileProblem> {
        FileProblem::Damaged { problem, at: self.input.position() }.into()
    }

    #[inline]
    fn push(&mut self, value: Value) -> Parsed<()> {
        if self.values.len() >= MOST_WAITING || self.waiting_bytes > MOST_WAITING_BYTES {
            let problem =
                format!("more than {MOST_WAITING} values, or {MOST_WAITING_BYTES} bytes of them, wait for their list");
            return Err(FileProblem::TooLarge(problem.into()).into());
        }
        self.values.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Parsed<Value> {
        let begun = self.marks.last().copied().unwrap_or(0);
        if self.values.len() <= begun {
            return Err(self.damaged("a value is missing before"));
        }
        self.values.pop().ok_or_else(no_mark)
    }

    fn mark(&mut self) -> Parsed<()> {
        self.marks.push(self.values.len());
        if self.marks.len() > MOST_OPEN {
            let problem = format!("more than {MOST_OPEN} lists are open, one inside the other");
            return Err(FileProblem::TooLarge(problem.into()).into());
        }
        Ok(())
    }

    fn open_dict(&mut self) -> Parsed<()> {
        if self.values.len().saturating_sub(self.marks.last().copied().unwrap_or(0)) > MANY {
            self.append_early()?;
        }
        self.open(Value::Dict(Box::default()))
    }

    fn open(&mut self, container: Value) -> Parsed<()> {
        self.waiting_bytes += CONTAINER_BYTES;
        self.push(container)
    }

    /// A tuple of two.
    fn pair(&mut self) -> Parsed<()> {
        let begin = self.values.len().saturating_sub(2);
        let pair = match &self.values[begin..] {
            [Value::Int(one), Value::Int(other)] => Value::Pair((*one, *other) != (0, 0)),
            _ => Value::Other,
        };
        self.marks.push(begin);
        self.drop_to_mark()?;
        self.push(pair)
    }

    /// The number of something that is remembered.
    #[inline]
    fn index(&mut self, bytes: usize) -> Parsed<usize> {
        self.input.number(bytes).map(|at| usize::try_from(at).unwrap_or(usize::MAX))
    }

    fn unsigned(&mut self, bytes: usize) -> Parsed<()> {
        let number = self.input.number(bytes)?;
        self.push(Value::Int(number.cast_signed()))
    }

    fn signed(&mut self, bytes: u64) -> Parsed<()> {
        let number = self.input.signed(bytes)?;
        self.push(number.map_or(Value::Other, Value::number))
    }

    fn passed_over(&mut self, bytes: u64) -> Parsed<()> {
        self.input.skip(bytes)?;
        self.push(Value::Other)
    }

    fn text(&mut self, bytes: usize) -> Parsed<()> {
        let length = self.input.number(bytes)?;
        let Some(short) = usize::try_from(length).ok().filter(|length| *length <= MOST_TEXT) else {
            self.stacks.left_out += 1;
            return self.passed_over(length);
        };
        let text = self.input.bytes(short)?;
        let text = match std::str::from_utf8(text) {
            Ok(text) => self.stacks.text(text),
            Err(_) => self.stacks.text(&String::from_utf8_lossy(text)),
        };
        self.push(Value::Text(text))
    }

    /// Removes the last mark, and returns where the values after it begin.
    fn since_mark(&mut self) -> Parsed<usize> {
        let begin = self.marks.pop().ok_or_else(no_mark)?;
        if begin > self.values.len() || self.marks.last().is_some_and(|outer| begin < *outer) {
            Err(no_mark())
        } else {
            Ok(begin)
        }
    }

    /// Drops the values since the last mark. Completes them first, as the memo may refer to them again.
    fn drop_to_mark(&mut self) -> Parsed<()> {
        let begin = self.since_mark()?;
        for value in self.values.split_off(begin) {
            self.consume(value)?;
        }
        Ok(())
    }

    fn set_items(&mut self) -> Parsed<()> {
        let begin = self.since_mark()?;
        let Some(at) = begin.checked_sub(1) else { return Err(no_mark()) };
        if (self.values.len() - begin) % 2 == 1 {
            return Err(self.damaged("a key has no value before"));
        }
        let mut target = std::mem::take(&mut self.values[at]);
        for key in (begin..self.values.len()).step_by(2) {
            let value = std::mem::take(&mut self.values[key + 1]);
            let value = self.consume(value)?;
            let key = std::mem::take(&mut self.values[key]);
            match (&mut target, self.consume(key)?) {
                (Value::Dict(dict), Value::Text(key)) => {
                    let before = dict.weight;
                    dict.set(key, value);
                    self.waiting_bytes += dict.weight - before;
                }
                // Keys of other types, and what is of no use.
                (Value::Dict(_) | Value::Other, _) => {}
                _ => return Err(self.damaged("items have no dictionary before")),
            }
        }
        self.values.truncate(begin);
        self.values[at] = target;
        Ok(())
    }

    fn append_items(&mut self) -> Parsed<()> {
        let begin = self.since_mark()?;
        self.append(begin)
    }

    /// Adds the values since the last mark to their list, before the pickle's own opcode does, if they belong to a list.
    #[cold]
    fn append_early(&mut self) -> Parsed<()> {
        let begin = self.marks.last().copied().unwrap_or(0);
        let is_list = begin.checked_sub(1).is_some_and(|at| matches!(self.values.get(at), Some(Value::List(_))));
        if is_list { self.append(begin) } else { Ok(()) }
    }

    fn append(&mut self, begin: usize) -> Parsed<()> {
        let Some(at) = begin.checked_sub(1) else { return Err(no_mark()) };
        let mut target = std::mem::take(&mut self.values[at]);
        for item in begin..self.values.len() {
            let item = std::mem::take(&mut self.values[item]);
            let item = self.consume(item)?;
            match &mut target {
                Value::List(list) => {
                    let before = list.weight();
                    list.push(item, self.sink)?;
                    self.waiting_bytes = (self.waiting_bytes + list.weight()).saturating_sub(before);
                }
                Value::Other => {}
                _ => return Err(self.damaged("items have no list before")),
            }
        }
        self.values.truncate(begin);
        self.values[at] = target;
        Ok(())
    }

    /// Completes a value that is used or dropped: no items are added to it any more.
    #[inline]
    fn consume(&mut self, value: Value) -> Parsed<Value> {
        let (slot, weight, value) = match value {
            Value::Dict(dict) => {
                let Dict { slot, weight, .. } = *dict;
                (slot, weight, dict.done(self.stacks))
            }
            Value::List(list) => {
                let (slot, weight) = (list.slot, list.weight());
                (slot, weight, list.done(self.stacks))
            }
            known => return Ok(known),
        };
        self.waiting_bytes = self.waiting_bytes.saturating_sub(weight + CONTAINER_BYTES);
        if let Some(slot) = slot {
            self.memo.set(slot, value.kept());
        }
        Ok(value)
    }

    /// Remembers the last value.
    fn remember(&mut self, at: usize) -> Parsed<()> {
        let open = Kept::Open(u32::try_from(self.values.len().saturating_sub(1)).unwrap_or(u32::MAX >> 3));
        let kept = match self.values.last_mut() {
            Some(Value::Dict(dict)) => {
                dict.slot = Some(at);
                open
            }
            Some(Value::List(list)) => {
                list.slot = Some(at);
                open
            }
            Some(value) => value.kept(),
            None => return Err(no_mark()),
        };
        self.memo.put(at, kept)
    }

    fn recall(&mut self, at: usize) -> Parsed<()> {
        let value = match self.memo.get(at) {
            Some(Kept::Text(text)) => Value::Text(text),
            Some(Kept::Frame(frame)) => {
                // Most of a snapshot is frames that occur again, in a list of frames.
                let at = self.values.len();
                if let Some(Value::List(list)) = self.values.last_mut()
                    && self.marks.last() == Some(&at)
                    && list.push_frame(frame)
                {
                    self.waiting_bytes += size_of::<u32>();
                    return Ok(());
                }
                Value::Frame(frame)
            }
            Some(Kept::Stack(stack)) => Value::Stack(stack),
            Some(Kept::Other) => Value::Other,
            Some(Kept::Pair(is_set)) => Value::Pair(is_set),
            Some(Kept::Open(place)) => {
                self.complete(at, place as usize)?;
                return self.recall(at);
            }
            Some(Kept::Gone) => {
                // An entry or a segment that occurs again is counted and ignored.
                self.sink.skipped(1);
                Value::Other
            }
            None => {
                let problem = format!("byte {} refers to a value that was not before it", self.input.position());
                return Err(FileProblem::malformed(problem).into());
            }
        };
        self.push(value)
    }
}

impl<R: Read, S: Sink> Machine<'_, R, S> {
    /// Completes a container that the pickle refers to again while it waits on the stack.
    ///
    /// # Errors
    /// Items are still being added to it, so it would contain itself.
    #[cold]
    fn complete(&mut self, slot: usize, place: usize) -> Parsed<()> {
        let is_it = match self.values.get(place) {
            Some(Value::Dict(dict)) => dict.slot == Some(slot),
            Some(Value::List(list)) => list.slot == Some(slot),
            _ => false,
        };
        if !is_it || self.marks.contains(&(place + 1)) {
            return Err(self.damaged("a list contains itself at"));
        }
        let value = std::mem::take(&mut self.values[place]);
        self.values[place] = self.consume(value)?;
        Ok(())
    }
}

fn no_mark() -> Box<FileProblem> {
    FileProblem::malformed("a value is missing that should be before its list").into()
}

fn code(what: &str) -> Box<FileProblem> {
    let what: String =
        what.chars().take(100).map(|one| if one.is_control() { char::REPLACEMENT_CHARACTER } else { one }).collect();
    FileProblem::Code(what).into()
}
