//! From the wire to an event that can be trusted: names, times and GPUs checked.

use super::account::Sender;
use super::gpus;
use super::limits::Limits;
use super::refusal::Refusal;
use super::speaker::Speaker;
use crate::wire::{Annotation, EventType, Gpus, Kind, Memory, Scalar};
use std::collections::BTreeMap;

/// The name of a step that was given none.
const STEP_NAME: &str = "step";
/// The name of a rank's exit that was given none.
const EXIT_NAME: &str = "exit";

/// Attributes of one event, by name. Kept with every ended phase, hence as small as can be.
pub type Attributes = Box<[(Box<str>, Scalar)]>;

/// Bytes that attributes take in memory, with what allocating them costs.
#[must_use]
pub fn weight(attributes: &Attributes) -> usize {
    const ALLOCATION: usize = 16;
    let text = |value: &Scalar| if let Scalar::Text(text) = value { text.len() + ALLOCATION } else { 0 };
    let each = size_of::<(Box<str>, Scalar)>() + ALLOCATION;
    attributes.iter().map(|(name, value)| each + name.len() + text(value)).sum()
}

/// An event whose every field is within its bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Begin, end, mark or exit.
    pub event: EventType,
    /// Step, phase or layer.
    pub kind: Kind,
    /// The step's, phase's, layer's or mark's name.
    pub name: String,
    /// The job.
    pub job: String,
    /// Which process of it; 0 where the job does not say.
    pub rank: u32,
    /// How many processes it has.
    pub world_size: Option<u32>,
    /// Positions of the GPUs that it named.
    pub gpus: Option<Vec<usize>>,
    /// Number of the step.
    pub step: Option<u64>,
    /// When, nanoseconds of the timeline.
    pub at_ns: i64,
    /// Allocator counters.
    pub memory: Option<Memory>,
    /// Whatever else the job tells.
    pub attributes: Option<Attributes>,
    /// The sending process, where the socket told it.
    pub pid: Option<u32>,
    /// The connection over which it came, where its end is the sender's.
    pub connection: Option<u32>,
}

impl Event {
    /// The end of a rank that its process did not tell itself.
    #[must_use]
    pub fn exit(job: &str, rank: u32, pid: Option<u32>, at_ns: i64) -> Self {
        Self {
            event: EventType::Exit,
            kind: Kind::Phase,
            name: EXIT_NAME.to_owned(),
            job: job.to_owned(),
            rank,
            world_size: None,
            gpus: None,
            step: None,
            at_ns,
            memory: None,
            attributes: None,
            pid,
            connection: None,
        }
    }

    /// Who sent it, where the daemon sees the end of that.
    #[must_use]
    pub fn speaker(&self) -> Option<Speaker> {
        self.connection.map(Speaker::Connection).or(self.pid.map(Speaker::Process))
    }
}

/// What the daemon knows when an event arrives.
pub struct Context<'a> {
    /// What it is checked against.
    pub limits: &'a Limits,
    /// `None` while there is no source: then a named GPU cannot be checked and counts as not told.
    pub gpus: Option<&'a gpus::Gpus>,
    /// When it arrived, nanoseconds of the timeline.
    pub now_ns: i64,
    /// The system clock's step since the timeline began.
    pub unix_shift_ns: i64,
    /// Its sender.
    pub sender: &'a Sender,
}

impl Context<'_> {
    /// Checks one annotation; `job` and `rank` stand in where it names none.
    pub fn check(&self, raw: Annotation, job: Option<String>, rank: Option<u32>) -> Result<Event, Refusal> {
        let job = raw.job.or(job).ok_or(Refusal::Missing(if self.sender.pid.is_some() {
            "job: missing, and the peer's environment has none of HIGHWATER_JOB, SLURM_JOB_ID, TORCHELASTIC_RUN_ID"
        } else {
            "job: missing (only on the socket, and where the kernel tells the sender's process, may it be left out)"
        }))?;
        self.check_name("job", &job)?;
        let name = match (raw.name, raw.kind) {
            (Some(name), _) => name,
            (None, _) if raw.event == EventType::Exit => EXIT_NAME.to_owned(),
            (None, Kind::Step) => STEP_NAME.to_owned(),
            (None, _) => return Err(Refusal::Missing("name: missing (only a step and an exit need none)")),
        };
        self.check_name("name", &name)?;
        if matches!(&raw.gpu, Some(Gpus::Many(gpus)) if gpus.is_empty()) {
            return Err(Refusal::Missing("gpu: is an empty list; leave it out where it is not known"));
        }
        let gpus = match (&raw.gpu, self.gpus) {
            (Some(named), Some(gpus)) => Some(gpus.resolve(named).map_err(Refusal::UnknownGpu)?),
            _ => None,
        };
        if let Some(attributes) = &raw.attributes {
            self.check_attributes(attributes)?;
        }
        Ok(Event {
            at_ns: self.check_time(raw.time_unix_nano)?,
            event: raw.event,
            kind: raw.kind,
            name,
            job,
            rank: raw.rank.or(rank).unwrap_or(0),
            world_size: raw.world_size,
            gpus,
            step: raw.step,
            memory: raw.memory,
            attributes: raw
                .attributes
                .map(|attributes| attributes.into_iter().map(|(name, value)| (name.into_boxed_str(), value)).collect()),
            pid: self.sender.pid,
            connection: self.sender.connection,
        })
    }

    fn check_name(&self, field: &'static str, name: &str) -> Result<(), Refusal> {
        let problem = if name.is_empty() {
            "is empty".to_owned()
        } else if name.len() > self.limits.name_bytes {
            format!("is {} bytes long, the limit is {}", name.len(), self.limits.name_bytes)
        } else if let Some(hidden) = name.chars().find(|character| is_hidden(*character)) {
            format!("has the character U+{:04X}, which is not shown", u32::from(hidden))
        } else {
            return Ok(());
        };
        Err(Refusal::BadName { field, problem })
    }

    fn check_attributes(&self, attributes: &BTreeMap<String, Scalar>) -> Result<(), Refusal> {
        let bad = |problem| Err(Refusal::BadName { field: "attributes", problem });
        if attributes.len() > self.limits.attributes {
            return bad(format!("{} of them, the limit is {}", attributes.len(), self.limits.attributes));
        }
        if let Some(hidden) = attributes.keys().flat_map(|name| name.chars()).find(|character| is_hidden(*character)) {
            return bad(format!("a name has the character U+{:04X}, which is not shown", u32::from(hidden)));
        }
        let text = |value: &Scalar| if let Scalar::Text(text) = value { text.len() } else { 0 };
        let length: usize = attributes.iter().map(|(name, value)| name.len() + text(value)).sum();
        if length > self.limits.attribute_bytes {
            return bad(format!("{length} bytes in all, the limit is {}", self.limits.attribute_bytes));
        }
        Ok(())
    }

    fn check_time(&self, unix_ns: Option<i64>) -> Result<i64, Refusal> {
        const SECOND_NS: i64 = crate::clock::SECOND_NS;
        let Some(unix_ns) = unix_ns else { return Ok(self.now_ns) };
        let at_ns = unix_ns.saturating_sub(self.unix_shift_ns);
        let behind_ns = self.now_ns.saturating_sub(at_ns);
        if behind_ns > self.limits.past_ns {
            let kept_s = self.limits.past_ns / SECOND_NS;
            return Err(Refusal::TooOld { behind_s: behind_ns / SECOND_NS, kept_s });
        }
        if -behind_ns > self.limits.future_ns {
            return Err(Refusal::InFuture { ahead_s: -behind_ns / SECOND_NS });
        }
        Ok(at_ns)
    }
}

/// Whether a character of a name would not be seen, or would change how others are seen: control characters, line ends,
/// byte-order marks, characters of no width, and those that turn the direction of writing. With them one name looks like
/// another, in a log, a terminal or a dashboard.
fn is_hidden(character: char) -> bool {
    let invisible = matches!(character,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
        | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}');
    character.is_control() || invisible
}
