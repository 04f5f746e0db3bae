//! From the wire to an event that can be trusted: names, times and GPUs checked.

use super::gpus::Gpus;
use super::limits::Limits;
use super::refusal::Refusal;
use super::wire::{Annotation, EventType, Kind, Memory, Scalar};
use std::collections::BTreeMap;

/// The name of a step that was given none.
const STEP_NAME: &str = "step";

/// Attributes of one event, by name. Kept with every ended phase, hence as small as can be.
pub type Attributes = Box<[(Box<str>, Scalar)]>;

/// An event whose every field is within its bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Begin, end or mark.
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
}

/// What the daemon knows when an event arrives.
pub(super) struct Context<'a> {
    pub limits: &'a Limits,
    /// `None` while there is no source: then a named GPU cannot be checked and counts as not told.
    pub gpus: Option<&'a Gpus>,
    pub now_ns: i64,
    /// The system clock's step since the timeline began.
    pub unix_shift_ns: i64,
    pub pid: Option<u32>,
}

impl Context<'_> {
    /// Checks one annotation; `job` and `rank` stand in where it names none.
    pub fn check(&self, raw: Annotation, job: Option<String>, rank: Option<u32>) -> Result<Event, Refusal> {
        let job = raw.job.or(job).ok_or(Refusal::Missing(if self.pid.is_some() {
            "job: missing, and the peer's environment has none of HIGHWATER_JOB, SLURM_JOB_ID, TORCHELASTIC_RUN_ID"
        } else {
            "job: missing (only on the socket, and where the kernel tells the sender's process, may it be left out)"
        }))?;
        self.check_name("job", &job)?;
        let name = match (raw.name, raw.kind) {
            (Some(name), _) => name,
            (None, Kind::Step) => STEP_NAME.to_owned(),
            (None, _) => return Err(Refusal::Missing("name: missing (only a step needs none)")),
        };
        self.check_name("name", &name)?;
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
            pid: self.pid,
        })
    }

    fn check_name(&self, field: &'static str, name: &str) -> Result<(), Refusal> {
        let problem = if name.is_empty() {
            "is empty".to_owned()
        } else if name.len() > self.limits.name_bytes {
            format!("is {} bytes long, the limit is {}", name.len(), self.limits.name_bytes)
        } else if let Some(control) = name.chars().find(|character| character.is_control()) {
            format!("has the control character U+{:04X}", u32::from(control))
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
