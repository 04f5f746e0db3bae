//! What the ranks of a recorded job sent, from JSON lines.
//!
//! A file is checked once and then read again while it is played, so that a recording of hours needs no more memory
//! than one of seconds. Only a file whose times go back is kept whole, to be sorted.

use super::files::TextFolder;
use crate::recording::FileProblem;
use crate::recording::lines::{LineFile, SkippedLines};
use crate::recording::tape::AnnotationSource;
use highwater_core::source::OpenError;
use highwater_core::wire::{Annotation, EventType, Gpu, GpuList, Kind, Memory, Scalar};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::sync::Arc;

/// The largest file whose lines are sorted, bytes, unpacked. In memory they take about ten times that.
const MOST_SORTED_BYTES: u64 = 32 << 20;

/// What every rank sent.
#[derive(Debug)]
pub(super) struct Ranks(Vec<RankFile>);

/// One rank's annotations.
#[derive(Debug)]
struct RankFile {
    job: Arc<Job>,
    file: LineFile,
    span: (i64, i64),
    /// All annotations in order, if those in the file are not.
    sorted: Option<Arc<[Annotation]>>,
}

/// What the lines themselves do not contain.
#[derive(Debug)]
struct Job {
    name: String,
    world_size: Option<u32>,
}

/// A line of the file.
#[derive(Debug, Deserialize)]
struct Line {
    ts: i64,
    rank: u32,
    ev: String,
    phase: Option<String>,
    step: Option<u64>,
    world_size: Option<u32>,
    mesh: Option<BTreeMap<String, u32>>,
    allocated: Option<u64>,
    reserved: Option<u64>,
    retries: Option<u64>,
    ooms: Option<u64>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

/// Checks the annotations of every rank.
pub(super) fn read(folder: &TextFolder, skipped: &mut SkippedLines) -> Result<Ranks, OpenError> {
    let job = Arc::new(Job { name: folder.name.clone(), world_size: u32::try_from(folder.annotations.len()).ok() });
    let ranks = folder.annotations.iter().map(|path| RankFile::read(LineFile::open(path)?, &job, skipped));
    Ok(Ranks(ranks.collect::<Result<_, _>>()?))
}

impl RankFile {
    fn read(file: LineFile, job: &Arc<Job>, skipped: &mut SkippedLines) -> Result<Self, OpenError> {
        let (mut begin_ns, mut end_ns, mut ordered) = (i64::MAX, i64::MIN, true);
        let bytes = file.parse(
            skipped,
            |text| job.annotation(text).map(|said| said.time_unix_nano),
            |at_ns| {
                ordered &= end_ns <= at_ns;
                (begin_ns, end_ns) = (begin_ns.min(at_ns), end_ns.max(at_ns));
                Ok(())
            },
        )?;
        if !ordered && bytes > MOST_SORTED_BYTES {
            let problem = format!("its times go back, and with over {MOST_SORTED_BYTES} bytes it is too large to sort");
            return Err(file.refused(&FileProblem::TooLarge(problem.into())));
        }
        let mut rank = Self { job: Arc::clone(job), file, span: (begin_ns, end_ns), sorted: None };
        if !ordered {
            let mut all: Vec<Annotation> = rank.in_order().collect();
            all.sort_by_key(|said| said.time_unix_nano);
            rank.sorted = Some(all.into());
        }
        Ok(rank)
    }

    fn in_order(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        if let Some(sorted) = self.sorted.clone() {
            return Box::new((0..sorted.len()).filter_map(move |position| sorted.get(position).cloned()));
        }
        let job = Arc::clone(&self.job);
        // Lines that cannot be read were reported when the file was checked.
        Box::new(self.file.lines().filter_map(move |(_, line)| job.annotation(line.ok()?.trim()).ok()))
    }
}

impl Ranks {
    /// The first and the last time of each rank.
    pub(super) fn spans(&self) -> impl Iterator<Item = (i64, i64)> {
        self.0.iter().map(|rank| rank.span)
    }
}

impl AnnotationSource for Ranks {
    /// Annotations at the same time come in order of rank.
    fn in_order(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        let mut ranks: Vec<Peekable<_>> = self.0.iter().map(|rank| rank.in_order().peekable()).collect();
        Box::new(std::iter::from_fn(move || {
            let times = ranks.iter_mut().map(|rank| rank.peek().map(|said| said.time_unix_nano)).enumerate();
            let (next, _) = times.filter_map(|(rank, at_ns)| Some((rank, at_ns?))).min_by_key(|(_, at_ns)| *at_ns)?;
            ranks.get_mut(next)?.next()
        }))
    }
}

impl Job {
    fn annotation(&self, text: &str) -> Result<Annotation, FileProblem> {
        let line: Line = serde_json::from_str(text).map_err(|error| problem(&error))?;
        let mut attributes: BTreeMap<String, Scalar> = BTreeMap::new();
        for (name, value) in line.others {
            attributes.extend(scalar(value).map(|scalar| (name, scalar)));
        }
        let (event, kind, name) = match (line.ev.as_str(), line.phase) {
            ("begin" | "end", None) => return Err(FileProblem::malformed("`phase` is missing")),
            ("begin" | "end", Some(phase)) => {
                let event = if line.ev == "begin" { EventType::Begin } else { EventType::End };
                if phase == "step" { (event, Kind::Step, None) } else { (event, Kind::Phase, Some(phase)) }
            }
            (_, phase) => {
                attributes.extend(phase.map(|phase| ("phase".to_owned(), Scalar::Text(phase))));
                (EventType::Mark, Kind::Phase, Some(line.ev))
            }
        };
        let memory = Memory {
            allocated: line.allocated,
            reserved: line.reserved,
            alloc_retries: line.retries,
            ooms: line.ooms,
            ..Memory::default()
        };
        Ok(Annotation {
            event,
            kind,
            name,
            job: Some(self.name.clone()),
            scope: None,
            rank: Some(line.rank),
            world_size: line.world_size.or(self.world_size),
            mesh: line.mesh,
            gpu: Some(GpuList::One(Gpu::Index(line.rank))),
            step: line.step,
            layer: None,
            lost: None,
            answer: None,
            time_unix_nano: Some(line.ts),
            memory: (memory != Memory::default()).then_some(memory),
            attributes: (!attributes.is_empty()).then_some(attributes),
        })
    }
}

/// The problem without the parser's own line number, which is 1 in a text of one line.
fn problem(error: &serde_json::Error) -> FileProblem {
    let (text, place) = (error.to_string(), format!(" at line {} column {}", error.line(), error.column()));
    FileProblem::malformed(format!("column {}: {}", error.column(), text.strip_suffix(&place).unwrap_or(&text)))
}

/// An attribute's value. A list or an object becomes its JSON text; `null` is left out.
fn scalar(value: serde_json::Value) -> Option<Scalar> {
    use serde_json::Value;
    Some(match value {
        Value::Null => return None,
        Value::Bool(value) => Scalar::Bool(value),
        Value::String(text) => Scalar::Text(text),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => Scalar::Int(whole),
            None => Scalar::Float(number.as_f64()?),
        },
        Value::Array(_) | Value::Object(_) => Scalar::Text(value.to_string()),
    })
}
