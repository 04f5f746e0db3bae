//! JSON objects one after the other: events of W&B, `gpustat --json`, what scripts write.
//!
//! An object is a row whose columns are the names of its values, with those of the objects around them: `gpus.0.memory.used`.

use super::clock::DateOrder;
use super::columns::Columns;
use super::csv::Reader;
use super::hints::Hints;
use super::polls::Polls;
use super::shape::Shape;
use crate::import::each_line;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{Fault, LineFile};
use highwater_engine::recording::tape::Tape;
use highwater_engine::recording::{FileProblem, SkippedLines};
use serde_json::Value;
use std::path::Path;

/// The longest object, bytes.
const MOST_BYTES: usize = 1 << 20;
/// The most values of an object.
const MOST_VALUES: usize = 4_096;

/// Whether lines can be the first of such a file: an object that has memory of a GPU.
pub(crate) fn is_begin(lines: &[String]) -> bool {
    let mut objects = Objects::default();
    let found = lines.iter().find_map(|line| objects.add(line).ok()?.into_iter().next());
    found.is_some_and(|object| Columns::of_names(rows(&object).0.iter().map(String::as_str)).has_memory())
}

/// Reads such a file.
pub(crate) fn tape(path: &Path, file: &LineFile, hints: &Hints) -> Result<Tape, OpenError> {
    let shape = Shape::of_columns(Columns::default());
    let mut reader = Reader::new(shape, DateOrder::DayMonth, Polls::new(hints));
    let (mut objects, mut names, mut skipped) = (Objects::default(), Vec::new(), SkippedLines::default());
    each_line(path, file, &mut skipped, |line| {
        for object in objects.add(line)? {
            let (new, values) = rows(&object);
            if new != names {
                let columns = Columns::of_names(new.iter().map(String::as_str));
                columns.assumed.iter().for_each(|what| reader.polls.assume(what.as_str()));
                (reader.shape, names) = (Shape::of_columns(columns), new);
            }
            if !reader.shape.columns.has_memory() {
                return Err(Fault::Line(FileProblem::malformed("the object has no memory of a GPU")));
            }
            reader.take_row(&values.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        Ok(())
    })?;
    let torn = objects.torn + usize::from(!objects.text.trim().is_empty());
    if torn > 0 {
        skipped.add_many(path, torn, "objects break off");
    }
    reader.polls.tape(path, "JSON of GPU memory", skipped)
}

/// The names and the texts of an object's values.
fn rows(object: &Value) -> (Vec<String>, Vec<String>) {
    let (mut names, mut values) = (Vec::new(), Vec::new());
    flatten(object, "", &mut |name, value| {
        if names.len() < MOST_VALUES {
            names.push(name);
            values.push(value);
        }
    });
    (names, values)
}

fn flatten(value: &Value, name: &str, add: &mut impl FnMut(String, String)) {
    let inner = |part: &str| if name.is_empty() { part.to_owned() } else { format!("{name}.{part}") };
    match value {
        Value::Object(members) => members.iter().for_each(|(part, value)| flatten(value, &inner(part), add)),
        Value::Array(all) => all.iter().zip(0_u64..).for_each(|(value, at)| {
            // GPUs in a list have their own numbers: the first of a job is not GPU 0.
            let number = value.get("index").and_then(Value::as_u64).unwrap_or(at);
            flatten(value, &inner(&number.to_string()), add);
        }),
        Value::String(text) => add(name.to_owned(), text.clone()),
        other => add(name.to_owned(), other.to_string()),
    }
}

/// Puts objects of several lines together.
#[derive(Default)]
struct Objects {
    text: String,
    depth: i64,
    is_quoted: bool,
    is_escaped: bool,
    /// Whether `text` is one line, and not only the begin of an object of several.
    is_one_line: bool,
    /// Objects that broke off before the next one began.
    torn: usize,
}

impl Objects {
    /// Adds a line, and gives the objects that end with it.
    fn add(&mut self, line: &str) -> Result<Vec<Value>, Fault> {
        // A writer that was killed leaves a part of a line, and the next one begins anew. Objects of several lines begin with the
        // brace alone.
        if self.is_one_line && line.starts_with('{') && serde_json::from_str::<Value>(line).is_ok() {
            *self = Self { torn: self.torn + 1, ..Self::default() };
        }
        self.is_one_line = self.text.is_empty() && !matches!(line.trim(), "" | "{" | "[" | "[{");
        for one in line.bytes() {
            match one {
                _ if std::mem::take(&mut self.is_escaped) => {}
                b'\\' if self.is_quoted => self.is_escaped = true,
                b'"' => self.is_quoted = !self.is_quoted,
                b'{' if !self.is_quoted => self.depth += 1,
                b'}' if !self.is_quoted => self.depth -= 1,
                _ => {}
            }
        }
        self.text.push_str(line);
        self.text.push('\n');
        if self.depth > 0 && self.text.len() <= MOST_BYTES {
            return Ok(Vec::new());
        }
        let whole = std::mem::replace(self, Self { torn: self.torn, ..Self::default() });
        if whole.text.len() > MOST_BYTES {
            return Err(Fault::File(FileProblem::too_many(MOST_BYTES, "bytes in an object")));
        }
        if let Ok(Value::Array(objects)) = serde_json::from_str(whole.text.trim()) {
            return Ok(objects);
        }
        // Objects may be members of a list.
        let text = whole.text.trim().trim_start_matches(['[', ',']).trim_end_matches([',', ']']).trim();
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let object = serde_json::from_str::<Value>(text);
        object
            .map(|object| vec![object])
            .map_err(|error| Fault::Line(FileProblem::malformed(format!("it is no JSON object: {error}"))))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::imported;
    use super::super::columns::MIB;
    use highwater_engine::recording::tape::Times;

    #[test]
    fn events_of_wandb_have_a_value_for_each_gpu() {
        let event = |at: &str, one: u64, other: u64| {
            format!(
                "{{\"system.gpu.0.memoryAllocated\": 12.5, \"system.gpu.0.memoryAllocatedBytes\": {one}, \
                 \"system.gpu.1.memoryAllocatedBytes\": {other}, \"system.gpu.process.0.memoryAllocatedBytes\": 5, \
                 \"_timestamp\": {at}, \"_runtime\": 3.5}}\n"
            )
        };
        let text = event("1746556382.8348258", 700, 1) + &event("1746556383.5", 800, 1);
        let tape = imported("wandb-events.jsonl", &text).expect("a log");
        let points: Vec<_> = tape.tracks[0].points().collect();
        assert_eq!(points, [(1_746_556_382_834_825_800, Some(700)), (1_746_556_383_500_000_000, Some(800))]);
        assert_eq!((tape.tracks.len(), tape.format.times), (2, Times::Unix));
        let shares = "{\"system.gpu.0.memoryAllocated\": 12.5, \"_timestamp\": 1746556382}\n";
        assert!(imported("wandb-events.jsonl", shares).is_err(), "a share of an unknown size");
    }

    #[test]
    fn objects_of_several_lines_are_read() {
        let one = |second: u32, used: u32| {
            format!(
                "{{\n    \"hostname\": \"n{{1\",\n    \"query_time\": \"2024-03-11T10:00:0{second}.5\",\n    \"gpus\": [\n        \
                 {{\n            \"index\": 0,\n            \"memory.used\": {used},\n            \"memory.total\": 24576\n        }}\n    ]\n}}\n"
            )
        };
        let tape = imported("gpustat.json", &(one(0, 5) + &one(1, 9))).expect("a log");
        let points: Vec<_> = tape.tracks[0].points().map(|(at, used)| (at - tape.begin_ns, used)).collect();
        assert_eq!(points, [(0, Some(5 * MIB)), (1_000_000_000, Some(9 * MIB))]);
        assert_eq!(tape.devices[0].memory_total_bytes, Some(24_576 * MIB));
    }

    #[test]
    fn a_line_that_breaks_off_costs_no_other() {
        let one = |second: u32, used: u32| {
            format!("{{\"timestamp\": 174655638{second}, \"gpu\": 0, \"memory_used_mb\": {used}}}\n")
        };
        let torn = one(2, 100)
            + "{\"timestamp\": 1746556385, \"gpu\": 0, \"memory_us\n"
            + &one(6, 9_000)
            + "{\"timestamp\": 17\n";
        let tape = imported("torn.jsonl", &torn).expect("a log");
        assert_eq!((tape.tracks[0].used_at(tape.end_ns), tape.skipped.count), (Some(9_000 * MIB), 2));
        let list = "[{\"time\": 1746556382, \"gpu_memory_used_mb\": [10, 7000]}, {\"time\": 1746556383, \"gpu_memory_used_mb\": [11, 7001]}]\n";
        let tape = imported("list.json", list).expect("a log");
        let used: Vec<_> = tape.tracks.iter().map(|track| track.used_at(tape.end_ns)).collect();
        assert_eq!(used, [Some(11 * MIB), Some(7_001 * MIB)]);
    }

    #[test]
    fn gpus_in_a_list_have_their_own_numbers() {
        let text = "{\"query_time\": \"2024-03-11T10:00:00\", \"gpus\": [{\"index\": 2, \"memory.used\": 5}, {\"index\": 3, \"memory.used\": 9}]}\n";
        let tape = imported("gpustat.json", text).expect("a log");
        let shown: Vec<_> = tape.devices.iter().map(|gpu| gpu.index.as_str()).collect();
        assert_eq!((shown, tape.tracks[1].used_at(tape.end_ns)), (vec!["2", "3"], Some(9 * MIB)));
    }
}
