//! One event of a trace: the members that are needed, whatever the others are.
//!
//! Enters: JSON. Leaves: an [`Event`], whose memory is used again for the next one. Invariant: no member of an odd type
//! is an error; it counts as absent.

use super::time::nanoseconds;
use super::value::{SIGNED, Text, WHOLE, pass_over, pass_over_scalars};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// What a category of events is to the analysis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Category {
    Kernel,
    Memory,
    /// A call of the driver or its runtime, which may have launched something.
    Call,
    /// An operator or an annotation on the host.
    Host,
    /// A change of what PyTorch's allocator has given out.
    Allocation,
    Other,
}

/// An event as it is in the file.
#[derive(Debug, Default)]
pub(super) struct Event {
    /// Whether it was a JSON object at all.
    pub is_object: bool,
    pub phase: String,
    pub category: String,
    pub name: String,
    pub begin_ns: Option<i64>,
    pub duration_ns: Option<i64>,
    pub process: Option<u64>,
    pub thread: Option<i64>,
    pub args: Args,
}

/// The arguments of an event.
#[derive(Debug, Default)]
pub(super) struct Args {
    pub device: Option<u64>,
    pub stream: Option<u32>,
    pub correlation: Option<u64>,
    pub external: Option<u64>,
    pub collective: String,
    pub dtype: String,
    pub elements_in: Option<u64>,
    pub elements_out: Option<u64>,
    pub group_size: Option<u64>,
    pub group_name: String,
    pub group_ranks: String,
    pub sequence: Option<u64>,
    /// PyTorch's number of the kind of device: 1 is CUDA, 6 is HIP.
    pub device_kind: Option<u64>,
    pub device_id: Option<u64>,
    pub bytes: Option<i64>,
    pub allocated: Option<u64>,
    pub reserved: Option<u64>,
}

impl Event {
    fn clear(&mut self) {
        for text in [&mut self.phase, &mut self.category, &mut self.name] {
            text.clear();
        }
        let args = &mut self.args;
        for text in [&mut args.collective, &mut args.dtype, &mut args.group_name, &mut args.group_ranks] {
            text.clear();
        }
        (self.is_object, self.begin_ns, self.duration_ns) = (false, None, None);
        (self.process, self.thread) = (None, None);
        (args.device, args.correlation, args.external, args.sequence) = (None, None, None, None);
        (args.elements_in, args.elements_out, args.group_size) = (None, None, None);
        (args.device_kind, args.device_id, args.bytes) = (None, None, None);
        (args.allocated, args.reserved, args.stream) = (None, None, None);
    }

    /// Its category. Old versions write `Kernel`, `Memcpy`, `Runtime` and `Operator`.
    pub(super) fn category(&self) -> Category {
        let is = |known: &str| self.category.eq_ignore_ascii_case(known);
        let ends = |end: &str| self.category.to_ascii_lowercase().ends_with(end);
        if is("kernel") {
            Category::Kernel
        } else if is("gpu_memcpy") || is("memcpy") || is("gpu_memset") || is("memset") {
            Category::Memory
        } else if is("user_annotation") || is("cpu_op") || is("operator") {
            Category::Host
        } else if ends("runtime") || ends("driver") {
            Category::Call
        } else if self.name == "[memory]" {
            Category::Allocation
        } else {
            Category::Other
        }
    }

    /// Whether it is an operator of the host, and not an annotation.
    pub(super) fn is_operator(&self) -> bool {
        self.category.eq_ignore_ascii_case("cpu_op") || self.category.eq_ignore_ascii_case("operator")
    }

    /// Whether it is an annotation of the host.
    pub(super) fn is_annotation(&self) -> bool {
        self.category.eq_ignore_ascii_case("user_annotation")
    }

    /// When it began and ended, if both are known and in that order.
    pub(super) fn times(&self) -> Option<(i64, i64)> {
        let (begin_ns, duration_ns) = (self.begin_ns?, self.duration_ns?);
        let end_ns = begin_ns.checked_add(duration_ns)?;
        (duration_ns >= 0).then_some((begin_ns, end_ns))
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Member {
    Ph,
    Cat,
    Name,
    Ts,
    Dur,
    Pid,
    Tid,
    Args,
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(field_identifier)]
enum Arg {
    #[serde(rename = "device")]
    Device,
    #[serde(rename = "stream")]
    Stream,
    #[serde(rename = "correlation")]
    Correlation,
    #[serde(rename = "External id", alias = "external id")]
    External,
    #[serde(rename = "Collective name")]
    Collective,
    #[serde(rename = "dtype")]
    Dtype,
    #[serde(rename = "In msg nelems")]
    ElementsIn,
    #[serde(rename = "Out msg nelems")]
    ElementsOut,
    #[serde(rename = "Group size")]
    GroupSize,
    #[serde(rename = "Process Group Name")]
    GroupName,
    #[serde(rename = "Process Group Ranks")]
    GroupRanks,
    #[serde(rename = "Seq")]
    Sequence,
    #[serde(rename = "Device Type")]
    DeviceKind,
    #[serde(rename = "Device Id")]
    DeviceId,
    #[serde(rename = "Bytes")]
    Bytes,
    #[serde(rename = "Total Allocated")]
    Allocated,
    #[serde(rename = "Total Reserved")]
    Reserved,
    #[serde(other)]
    Other,
}

/// Reads the next event into this one.
pub(super) struct Into<'a>(pub &'a mut Event);

impl<'de> DeserializeSeed<'de> for Into<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.0.clear();
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Into<'_> {
    type Value = ();

    pass_over!(());
    pass_over_scalars!(());

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let event = self.0;
        event.is_object = true;
        while let Some(member) = members.next_key::<Member>()? {
            match member {
                Member::Ph => members.next_value_seed(Text(&mut event.phase))?,
                Member::Cat => members.next_value_seed(Text(&mut event.category))?,
                Member::Name => members.next_value_seed(Text(&mut event.name))?,
                Member::Ts => event.begin_ns = nanoseconds(members.next_value::<Box<RawValue>>()?.get()),
                Member::Dur => event.duration_ns = nanoseconds(members.next_value::<Box<RawValue>>()?.get()),
                Member::Pid => event.process = members.next_value_seed(WHOLE)?,
                Member::Tid => event.thread = members.next_value_seed(SIGNED)?,
                Member::Args => members.next_value_seed(IntoArgs(&mut event.args))?,
                Member::Other => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

struct IntoArgs<'a>(&'a mut Args);

impl<'de> DeserializeSeed<'de> for IntoArgs<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for IntoArgs<'_> {
    type Value = ();

    pass_over!(());
    pass_over_scalars!(());

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let args = self.0;
        while let Some(member) = members.next_key::<Arg>()? {
            match member {
                Arg::Device => args.device = members.next_value_seed(WHOLE)?,
                Arg::Stream => args.stream = members.next_value_seed(WHOLE)?.and_then(|of| u32::try_from(of).ok()),
                Arg::Correlation => args.correlation = members.next_value_seed(WHOLE)?,
                Arg::External => args.external = members.next_value_seed(WHOLE)?,
                Arg::Collective => members.next_value_seed(Text(&mut args.collective))?,
                Arg::Dtype => members.next_value_seed(Text(&mut args.dtype))?,
                Arg::ElementsIn => args.elements_in = members.next_value_seed(WHOLE)?,
                Arg::ElementsOut => args.elements_out = members.next_value_seed(WHOLE)?,
                Arg::GroupSize => args.group_size = members.next_value_seed(WHOLE)?,
                Arg::GroupName => members.next_value_seed(Text(&mut args.group_name))?,
                Arg::GroupRanks => members.next_value_seed(Text(&mut args.group_ranks))?,
                Arg::Sequence => args.sequence = members.next_value_seed(WHOLE)?,
                Arg::DeviceKind => args.device_kind = members.next_value_seed(WHOLE)?,
                Arg::DeviceId => args.device_id = members.next_value_seed(WHOLE)?,
                Arg::Bytes => args.bytes = members.next_value_seed(SIGNED)?,
                Arg::Allocated => args.allocated = members.next_value_seed(WHOLE)?,
                Arg::Reserved => args.reserved = members.next_value_seed(WHOLE)?,
                Arg::Other => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(json: &str) -> Event {
        let mut event = Event { name: "before".to_owned(), begin_ns: Some(1), ..Event::default() };
        Into(&mut event).deserialize(&mut serde_json::Deserializer::from_str(json)).expect("an event");
        event
    }

    #[test]
    fn members_are_taken_in_any_order_and_others_passed_over() {
        let event = event(
            r#"{"args": {"new": {"x": [1]}, "correlation": "7", "external id": 3, "grid": [1, 1, 1]}, "dur": "2",
                "bp": "e", "ts": 1.001, "cat": "Kernel", "pid": 5, "ph": "X"}"#,
        );
        assert_eq!((event.times(), event.category()), (Some((1_001, 3_001)), Category::Kernel));
        assert_eq!((event.args.correlation, event.args.external, event.process), (Some(7), Some(3), Some(5)));
        assert_eq!(event.name, "");
    }

    #[test]
    fn odd_members_count_as_absent() {
        let odd =
            event(r#"{"ph": ["X"], "cat": {"a": 1}, "name": null, "ts": [1], "dur": {}, "args": [1], "pid": "Spans"}"#);
        assert!(odd.is_object && odd.phase.is_empty() && odd.times().is_none() && odd.process.is_none());
        assert!(!event("[1, {}]").is_object && !event("7").is_object && !event("\"x\"").is_object);
    }

    #[test]
    fn categories_of_all_versions_are_known() {
        for (category, expected) in [
            ("gpu_memcpy", Category::Memory),
            ("Memset", Category::Memory),
            ("cuda_driver", Category::Call),
            ("Runtime", Category::Call),
            ("Operator", Category::Host),
            ("user_annotation", Category::Host),
            ("gpu_user_annotation", Category::Other),
            ("ac2g", Category::Other),
        ] {
            let event = Event { category: category.to_owned(), ..Event::default() };
            assert_eq!(event.category(), expected, "{category}");
        }
    }

    #[test]
    fn a_negative_or_endless_duration_is_no_time() {
        for (ts, dur) in [("1", "-0.001"), ("1", "null"), ("9223372036854775", "9223372036854775")] {
            assert_eq!(event(&format!(r#"{{"ts": {ts}, "dur": {dur}}}"#)).times(), None, "{ts} {dur}");
        }
    }
}
