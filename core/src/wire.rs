//! The JSON that jobs send, exactly as `docs/annotations.md` gives it. Nothing here is trusted or interpreted yet.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Whether something begins, ends or just happens, or all is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventType {
    /// A step, phase or layer begins.
    Begin,
    /// It ends.
    End,
    /// An instant: `oom`, `checkpoint saved`, …
    Mark,
    /// The rank itself ends: nothing more will come from this process.
    Exit,
}

impl EventType {
    /// All of them, each at the position of its number.
    pub const ALL: [EventType; 4] = [EventType::Begin, EventType::End, EventType::Mark, EventType::Exit];
}

/// What the event is about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One iteration of training.
    Step,
    /// A part of it: `forward`, `comm`, …
    #[default]
    Phase,
    /// A part of a phase: one layer of the model.
    Layer,
}

/// One GPU or several: indexes, UUIDs or PCI bus ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "`gpu` is an index, a UUID or a PCI bus id, or a list of these")]
pub enum GpuList {
    /// One GPU.
    One(Gpu),
    /// Several.
    Many(Vec<Gpu>),
}

/// One GPU as a job names it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a GPU is an index, a UUID or a PCI bus id")]
pub enum Gpu {
    /// Index, as `nvidia-smi` shows it.
    Index(u32),
    /// UUID, PCI bus id, or an index as text (`0`, `0:1` for a MIG instance).
    Name(String),
}

/// The job's own allocator's counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Bytes in live tensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// Bytes that the allocator holds from the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<u64>,
    /// Bytes in live or pending blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active: Option<u64>,
    /// Bytes in free parts of split blocks: fragmentation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inactive_split: Option<u64>,
    /// Failed device allocations that flushed the cache, since the process began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alloc_retries: Option<u64>,
    /// Out-of-memory errors, since the process began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ooms: Option<u64>,
}

/// Which pass of a step a layer ran in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the input to the loss.
    Forward,
    /// From the loss to the gradients.
    Backward,
}

impl Direction {
    /// The same as on the wire.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
        }
    }
}

/// What one layer did in one pass of a profiled step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// In which pass.
    pub direction: Direction,
    /// Bytes in live tensors after the layer less those before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<i64>,
    /// Bytes of its outputs that share no storage with its inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activations: Option<u64>,
    /// Bytes of the module's own parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// Bytes of all-gathers since the record before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gathered: Option<u64>,
    /// Bytes that are gathered and not released at this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gathered_sum: Option<u64>,
    /// How long it took, nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
    /// How many modules ran inside it; only on records of modules inside which others did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules: Option<u64>,
    /// The most bytes in live tensors since the record before, or since its forward pass began if that was earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<u64>,
    /// Of a forward pass: by how many bytes fewer would be in live tensors between it and the backward pass if the module were
    /// checkpointed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<i64>,
    /// Of a forward pass: by how many bytes live tensors would grow at most if it ran again where its backward pass begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute: Option<i64>,
    /// Set only on a record that is played from a recording: it is the last of its profile, and the value is the number of
    /// further records that the profile lacks. No job can send this.
    #[serde(skip)]
    pub last_with_missing: Option<u64>,
}

impl Layer {
    /// A layer of which only the pass is known.
    #[must_use]
    pub fn new(direction: Direction) -> Self {
        Self {
            direction,
            growth: None,
            activations: None,
            parameters: None,
            gathered: None,
            gathered_sum: None,
            duration_ns: None,
            modules: None,
            peak: None,
            held: None,
            recompute: None,
            last_with_missing: None,
        }
    }

    /// Whether other modules ran inside it: their records have all that it allocated.
    #[must_use]
    pub fn is_around_others(&self) -> bool {
        self.modules.is_some()
    }
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "an attribute is a text, a number, `true` or `false`")]
#[allow(missing_docs, reason = "each is its JSON type")]
pub enum Scalar {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

/// One event of one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an annotation, which is a JSON object")]
pub struct Annotation {
    /// Begin, end, mark or exit.
    pub event: EventType,
    /// Step, phase or layer; phase if left out.
    #[serde(default)]
    pub kind: Kind,
    /// The phase's or layer's name. May be left out for a step and an exit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The job. May be left out if the peer's environment names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Whose job it is. Only of a recording's events: no job can send this.
    #[serde(skip)]
    pub scope: Option<crate::scope::Scope>,
    /// Which process of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// How many processes the job has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// Where the rank stands in the job's grid of parallel dimensions: its coordinate by axis (`pp`, `dp`, `tp`, …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh: Option<BTreeMap<String, u32>>,
    /// Which GPU or GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuList>,
    /// Number of the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// When it happened, nanoseconds of Unix time on this host's clock; the time of receipt if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_unix_nano: Option<i64>,
    /// Allocator counters at that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// What a layer did in a profiled step; only with a mark of kind layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<Box<Layer>>,
    /// Events that the sender could not send since the last one that it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u32>,
    /// Whether the sender reads an answer to the message that contains this event. Only the seqpacket socket needs it;
    /// it is never recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<bool>,
    /// A few more strings or numbers, kept for spans and recordings, never labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<BTreeMap<String, Scalar>>,
}

impl Annotation {
    /// Bytes that it takes beside its own size.
    #[must_use]
    pub fn weight(&self) -> usize {
        const ALLOCATION: usize = 32;
        let text = |text: &String| text.capacity() + ALLOCATION;
        let gpu = |gpu: &Gpu| size_of::<Gpu>() + if let Gpu::Name(name) = gpu { text(name) } else { 0 };
        let gpus = match &self.gpu {
            Some(GpuList::One(one)) => gpu(one),
            Some(GpuList::Many(many)) => many.iter().map(gpu).sum(),
            None => 0,
        };
        let value = |value: &Scalar| if let Scalar::Text(value) = value { text(value) } else { 0 };
        // A map keeps its entries in nodes of eleven, half of which may be empty.
        let entry = |(name, of): (&String, &Scalar)| 2 * size_of::<(String, Scalar)>() + text(name) + value(of);
        let attributes: usize = self.attributes.iter().flatten().map(entry).sum();
        let axis = |(name, _): (&String, &u32)| 2 * size_of::<(String, u32)>() + text(name);
        let mesh: usize = self.mesh.iter().flatten().map(axis).sum();
        let layer = if self.layer.is_some() { size_of::<Layer>() + ALLOCATION } else { 0 };
        self.name.as_ref().map_or(0, text) + self.job.as_ref().map_or(0, text) + gpus + mesh + attributes + layer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn weight(fields: serde_json::Value) -> usize {
        let mut json = json!({"event": "mark"});
        json.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        serde_json::from_value::<Annotation>(json).expect("an annotation").weight()
    }

    #[test]
    fn a_weight_is_the_sum_of_all_texts_and_lists() {
        assert_eq!(weight(json!({})), 0);
        assert_eq!(weight(json!({"name": "abc"})), 3 + 32);
        assert_eq!(weight(json!({"name": "abc", "job": "j"})), 3 + 32 + 1 + 32);
        let gpu = size_of::<Gpu>();
        assert_eq!((weight(json!({"gpu": 1})), weight(json!({"gpu": "GPU-a"}))), (gpu, gpu + 5 + 32));
        assert_eq!(weight(json!({"gpu": [1, "GPU-a"]})), 2 * gpu + 5 + 32);
        let entry = 2 * size_of::<(String, Scalar)>();
        let attributes = json!({"attributes": {"ab": "xyz", "c": 1}});
        assert_eq!(weight(attributes), (entry + 2 + 32 + 3 + 32) + (entry + 1 + 32));
        let axis = 2 * size_of::<(String, u32)>();
        assert_eq!(weight(json!({"mesh": {"pp": 1, "dp": 0}})), 2 * (axis + 2 + 32));
        let layer = json!({"kind": "layer", "layer": {"direction": "forward"}});
        assert_eq!(weight(layer), size_of::<Layer>() + 32);
        let all =
            json!({"name": "abc", "job": "j", "gpu": 1, "attributes": {"c": 1}, "layer": {"direction": "backward"}});
        assert_eq!(weight(all), 35 + 33 + gpu + entry + 33 + size_of::<Layer>() + 32);
    }
}
