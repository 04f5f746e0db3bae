//! From the wire to an event that can be trusted: names, times and GPUs checked.

use super::account::Sender;
use super::gpus;
use super::limits::Limits;
use super::refusal::Refusal;
use super::sender_id::SenderId;
use crate::mesh::Mesh;
use crate::scope::Scope;
use crate::wire::{Annotation, EventType, GpuList, Kind, Layer, Memory, Scalar};
use std::collections::BTreeMap;

/// The name of a step that was given none.
const STEP_NAME: &str = "step";
/// The name of a rank's exit that was given none.
const EXIT_NAME: &str = "exit";

/// The longest name of a Kubernetes namespace.
const LONGEST_NAMESPACE: usize = 63;

/// OpenTelemetry's names of attributes that say which pod a sender is in.
pub(super) const NAMESPACE: &str = "k8s.namespace.name";
pub(super) const POD: &str = "k8s.pod.name";

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

/// The attributes of a begin, with those of its end added. If both have a name, the begin's value stays. All together are bounded
/// like those of one event; an attribute of the end that exceeds the bounds is left out.
#[must_use]
pub fn joined(begin: Option<Attributes>, end: Option<&Attributes>) -> Option<Attributes> {
    let most = Limits::default();
    let (Some(begin), Some(end)) = (&begin, end) else { return begin.or_else(|| end.cloned()) };
    let bytes =
        |(name, value): &(Box<str>, Scalar)| name.len() + if let Scalar::Text(text) = value { text.len() } else { 0 };
    let mut all = begin.to_vec();
    let mut left = most.attribute_bytes.saturating_sub(all.iter().map(bytes).sum());
    for one in end.iter().filter(|one| begin.iter().all(|known| known.0 != one.0)) {
        if all.len() < most.attributes && bytes(one) <= left {
            left -= bytes(one);
            all.push(one.clone());
        }
    }
    Some(all.into())
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
    /// The job's name.
    pub job: String,
    /// The scope of its job, if it does not follow from the sender: set for events of recordings and simulated jobs,
    /// and by the intake once an event was accepted.
    pub scope: Option<Scope>,
    /// Which process of it; 0 where the job does not say.
    pub rank: u32,
    /// How many processes it has.
    pub world_size: Option<u32>,
    /// Where it stands among them.
    pub mesh: Option<Mesh>,
    /// Positions of the GPUs that it named.
    pub gpus: Option<Vec<usize>>,
    /// Number of the step.
    pub step: Option<u64>,
    /// When, nanoseconds of the timeline.
    pub at_ns: i64,
    /// Allocator counters.
    pub memory: Option<Memory>,
    /// What a layer did in a profiled step: then it is a record of a profile, and no mark.
    pub layer: Option<Box<Layer>>,
    /// Whatever else the job sends.
    pub attributes: Option<Attributes>,
    /// The sending process, if the socket's credentials have it.
    pub pid: Option<u32>,
    /// The connection over which it came, where its end is the sender's.
    pub connection: Option<u32>,
}

/// The attribute of this name.
#[must_use]
pub fn attribute<'a>(attributes: &'a [(Box<str>, Scalar)], name: &str) -> Option<&'a Scalar> {
    attributes.iter().find(|(own, _)| &**own == name).map(|(_, value)| value)
}

impl Event {
    /// Whether it is a mark of this name, in any case, and of no layer.
    pub(super) fn is_mark(&self, name: &str) -> bool {
        self.event == EventType::Mark && self.layer.is_none() && self.name.eq_ignore_ascii_case(name)
    }

    /// The attribute of this name.
    pub(super) fn attribute(&self, name: &str) -> Option<&Scalar> {
        attribute(self.attributes.as_deref()?, name)
    }

    /// The attribute of this name, if it is a non-negative integer. A float, also a whole one, returns `None`.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        if let Scalar::Int(number) = self.attribute(name)? { u64::try_from(*number).ok() } else { None }
    }

    /// The end of a rank whose process did not send `exit`.
    #[must_use]
    pub fn exit(job: &str, rank: u32, pid: Option<u32>, at_ns: i64) -> Self {
        Self {
            event: EventType::Exit,
            kind: Kind::Phase,
            name: EXIT_NAME.to_owned(),
            job: job.to_owned(),
            scope: None,
            rank,
            world_size: None,
            mesh: None,
            gpus: None,
            step: None,
            at_ns,
            memory: None,
            layer: None,
            attributes: None,
            pid,
            connection: None,
        }
    }

    /// Whether its name is added to the names of the job. The name of a mark is no label, and an end without a begin must not add
    /// a name.
    pub(super) fn adds_name(&self) -> bool {
        self.event == EventType::Begin || self.layer.is_some()
    }

    /// The connection or process that sent it, if the daemon can see its end.
    #[must_use]
    pub fn sender_id(&self) -> Option<SenderId> {
        self.connection.map(SenderId::Connection).or(self.pid.map(SenderId::Process))
    }
}

/// What the daemon knows when an event arrives.
pub struct Context<'a> {
    /// What it is checked against.
    pub limits: &'a Limits,
    /// `None` while there is no source: then a named GPU cannot be checked and is ignored.
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
            "job: missing (it may be left out only on the socket, and only if the kernel reports the sender's process)"
        }))?;
        self.check_name("job", &job)?;
        let name = match (raw.name, raw.kind) {
            (Some(name), _) => name,
            (None, _) if raw.event == EventType::Exit => EXIT_NAME.to_owned(),
            (None, Kind::Step) => STEP_NAME.to_owned(),
            (None, _) => return Err(Refusal::Missing("name: missing (only a step and an exit need none)")),
        };
        self.check_name("name", &name)?;
        if matches!(&raw.gpu, Some(GpuList::Many(gpus)) if gpus.is_empty()) {
            return Err(Refusal::Missing("gpu: is an empty list; leave it out where it is not known"));
        }
        let gpus = match (&raw.gpu, self.gpus) {
            (Some(named), Some(gpus)) => Some(gpus.resolve(named).map_err(Refusal::UnknownGpu)?),
            _ => None,
        };
        let mut attributes = raw.attributes;
        if let Some(attributes) = &mut attributes {
            // What it adds counts, so that a replay of the event is taken as well.
            self.check_namespace(attributes)?;
            self.check_attributes(attributes)?;
        }
        if raw.layer.is_some() && (raw.event, raw.kind) != (EventType::Mark, Kind::Layer) {
            return Err(Refusal::Malformed("`layer` belongs to an event `mark` of kind `layer`".to_owned()));
        }
        let mesh = raw.mesh.map(Mesh::checked).transpose();
        Ok(Event {
            at_ns: self.check_time(raw.time_unix_nano)?,
            event: raw.event,
            kind: raw.kind,
            name,
            job,
            scope: raw.scope,
            rank: raw.rank.or(rank).unwrap_or(0),
            world_size: raw.world_size,
            mesh: mesh.map_err(Refusal::BadMesh)?,
            gpus,
            step: raw.step,
            memory: raw.memory,
            layer: raw.layer,
            attributes: attributes
                .map(|attributes| attributes.into_iter().map(|(name, value)| (name.into_boxed_str(), value)).collect()),
            pid: self.sender.pid,
            connection: self.sender.connection,
        })
    }

    /// Who has shown the token of a namespace speaks of no pod of another, and need not name it.
    fn check_namespace(&self, attributes: &mut BTreeMap<String, Scalar>) -> Result<(), Refusal> {
        let Some(own) = &self.sender.namespace else { return Ok(()) };
        match attributes.get(NAMESPACE) {
            Some(Scalar::Text(named)) if **named == **own => {}
            Some(Scalar::Text(named)) => {
                let named = named.chars().take(LONGEST_NAMESPACE).collect();
                return Err(Refusal::OtherNamespace { named, own: own.to_string() });
            }
            Some(_) => return Err(Refusal::Malformed(format!("{NAMESPACE}: is no text"))),
            None if attributes.contains_key(POD) => {
                attributes.insert(NAMESPACE.to_owned(), Scalar::Text(own.to_string()));
            }
            None => {}
        }
        Ok(())
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
pub(super) fn is_hidden(character: char) -> bool {
    let invisible = matches!(character,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
        | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}');
    character.is_control() || invisible
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SECOND_NS;
    use crate::gpu::Device;
    use crate::wire::Direction;
    use serde_json::{Value, json};

    const NOW_NS: i64 = 1_000 * SECOND_NS;

    /// An annotation with these fields beside those that it needs, checked.
    fn check(fields: &Value) -> Result<Event, Refusal> {
        let mut json = json!({"event": "begin", "name": "forward", "job": "j"});
        let all = json.as_object_mut().expect("an object");
        for (name, value) in fields.as_object().expect("an object") {
            all.insert(name.clone(), value.clone());
        }
        all.retain(|_, value| !value.is_null());
        check_as(json, &Sender::DAEMON, &Limits::default(), None, None)
    }

    fn check_as(
        json: Value,
        sender: &Sender,
        limits: &Limits,
        job: Option<&str>,
        rank: Option<u32>,
    ) -> Result<Event, Refusal> {
        let device = |index: &str| Device { index: index.into(), ..Device::default() };
        let gpus = gpus::Gpus::new(&[device("0"), device("1")]);
        let context = Context { limits, gpus: Some(&gpus), now_ns: NOW_NS, unix_shift_ns: 500, sender };
        context.check(serde_json::from_value(json).expect("an annotation"), job.map(str::to_owned), rank)
    }

    /// What is wrong with an annotation with these fields.
    fn refused(fields: Value) -> String {
        check(&fields).expect_err("refused").to_string()
    }

    #[test]
    fn who_shows_a_namespaces_token_speaks_of_no_other_ones_pods() {
        let sender = Sender { namespace: Some("research".into()), ..Sender::default() };
        let attributes = |attributes: Value| {
            let json = json!({"event": "begin", "name": "f", "job": "j", "attributes": attributes});
            let event = check_as(json, &sender, &Limits::default(), None, None)?;
            Ok::<_, Refusal>(
                event.attributes.expect("some").iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>(),
            )
        };
        assert_eq!(attributes(json!({"k8s.pod.name": "a"})), Ok(vec![NAMESPACE.to_owned(), POD.to_owned()]));
        assert_eq!(attributes(json!({NAMESPACE: "research"})), Ok(vec![NAMESPACE.to_owned()]));
        assert_eq!(attributes(json!({"LOCAL_RANK": 1})), Ok(vec!["LOCAL_RANK".to_owned()]));
        let other = attributes(json!({NAMESPACE: "serving", POD: "b"})).expect_err("refused");
        assert_eq!(
            other.to_string(),
            "k8s.namespace.name: is `serving`, and the token is that of namespace `research`"
        );
        let number = attributes(json!({NAMESPACE: 7})).expect_err("refused");
        assert_eq!(number.to_string(), "not a valid event: k8s.namespace.name: is no text");
        // What is added counts for the limit.
        let most = Limits::default().attributes;
        let many: BTreeMap<String, Value> =
            (1..most).map(|nth| (format!("a{nth}"), json!(1))).chain([(POD.into(), json!("a"))]).collect();
        assert_eq!(many.len(), most);
        assert!(attributes(json!(many)).is_err());
        let without = Sender { namespace: None, ..sender };
        let json = json!({"event": "begin", "name": "f", "job": "j", "attributes": {NAMESPACE: "serving"}});
        assert!(check_as(json, &without, &Limits::default(), None, None).is_ok());
    }

    #[test]
    fn every_field_is_in_the_event() {
        let json = json!({
            "event": "end", "kind": "layer", "name": "l", "job": "j", "rank": 3, "world_size": 8, "mesh": {"tp": 1, "pp": 2}, "gpu": [1, 0], "step": 9,
            "time_unix_nano": NOW_NS + 400, "memory": {"reserved": 7}, "attributes": {"a": "b", "n": 2},
        });
        let sender = Sender { connection: Some(5), ..Sender::process(Some(42), 1_000) };
        let event = check_as(json, &sender, &Limits::default(), Some("other"), Some(1)).expect("good");
        let attributes: Attributes = Box::new([("a".into(), Scalar::Text("b".into())), ("n".into(), Scalar::Int(2))]);
        let expected = Event {
            event: EventType::End,
            kind: Kind::Layer,
            name: "l".into(),
            rank: 3,
            world_size: Some(8),
            mesh: Mesh::checked([("tp".to_owned(), 1), ("pp".to_owned(), 2)].into()).ok(),
            gpus: Some(vec![0, 1]),
            step: Some(9),
            memory: Some(Memory { reserved: Some(7), ..Memory::default() }),
            attributes: Some(attributes),
            connection: Some(5),
            ..Event::exit("j", 0, Some(42), NOW_NS - 100)
        };
        assert_eq!(event, expected);
        assert_eq!(event.sender_id(), Some(SenderId::Connection(5)));
        assert_eq!(Event::exit("j", 0, Some(42), 0).sender_id(), Some(SenderId::Process(42)));
        assert_eq!(Event::exit("j", 0, None, 0).sender_id(), None);
    }

    #[test]
    fn what_is_left_out_is_taken_from_the_sender_or_has_its_own_name() {
        let sent = |fields: Value| check(&fields).expect("good");
        assert_eq!((sent(json!({})).rank, sent(json!({})).at_ns), (0, NOW_NS));
        assert_eq!(sent(json!({"kind": "step", "name": null})).name, "step");
        assert_eq!(sent(json!({"event": "exit", "name": null})).name, "exit");
        assert_eq!(sent(json!({"event": "exit", "kind": "step", "name": null})).name, "exit");
        assert_eq!(refused(json!({"name": null})), "name: missing (only a step and an exit need none)");
        assert!(check(&json!({"name": null, "kind": "layer"})).is_err());
        let bare = json!({"event": "begin", "name": "forward"});
        let of = |sender: Sender, job| check_as(bare.clone(), &sender, &Limits::default(), job, Some(4));
        let event = of(Sender::DAEMON, Some("environment")).expect("good");
        assert_eq!((event.job.as_str(), event.rank), ("environment", 4));
        let message = |pid| of(Sender::process(pid, 0), None).expect_err("no job").to_string();
        assert!(message(Some(1)).contains("HIGHWATER_JOB") && message(None).contains("only on the socket"));
    }

    #[test]
    fn names_are_bounded_and_can_be_seen() {
        let most = Limits::default().name_bytes;
        assert!(check(&json!({"name": "n".repeat(most)})).is_ok());
        assert_eq!(refused(json!({"name": "n".repeat(most + 1)})), "name: is 129 bytes long, the limit is 128");
        assert_eq!(
            (refused(json!({"name": ""})), refused(json!({"job": ""}))),
            ("name: is empty".into(), "job: is empty".into())
        );
        assert_eq!(refused(json!({"job": "a\u{7}"})), "job: has the character U+0007, which is not shown");
        assert!(refused(json!({"name": "a\u{200b}b"})).contains("U+200B"));
        assert!(check(&json!({"name": "größe → 大"})).is_ok());
    }

    #[test]
    fn a_gpu_is_one_of_this_node_or_not_checked_while_there_is_none() {
        assert_eq!(check(&json!({"gpu": 1})).expect("good").gpus, Some(vec![1]));
        assert_eq!(refused(json!({"gpu": [0, 7]})), "gpu: no GPU `7` on this node");
        assert_eq!(refused(json!({"gpu": []})), "gpu: is an empty list; leave it out where it is not known");
        let (limits, sender) = (Limits::default(), Sender::DAEMON);
        let context = Context { limits: &limits, gpus: None, now_ns: 0, unix_shift_ns: 0, sender: &sender };
        let named = json!({"event": "begin", "name": "forward", "job": "j", "gpu": 7});
        let event = context.check(serde_json::from_value(named).expect("an annotation"), None, None).expect("good");
        assert_eq!(event.gpus, None);
    }

    #[test]
    fn a_layers_record_is_a_mark_of_kind_layer() {
        let of = |event: &str, kind: &str| {
            let layer = json!({"direction": "forward", "growth": -5, "activations": 7, "duration_ns": 9});
            check(&json!({"event": event, "kind": kind, "layer": layer}))
        };
        let record = of("mark", "layer").expect("good").layer.expect("a record");
        let expected =
            Layer { growth: Some(-5), activations: Some(7), duration_ns: Some(9), ..Layer::new(Direction::Forward) };
        assert_eq!(*record, expected);
        for (event, kind) in
            [("mark", "phase"), ("mark", "step"), ("begin", "layer"), ("end", "layer"), ("exit", "phase")]
        {
            let refusal = of(event, kind).expect_err("refused");
            assert_eq!(
                refusal.to_string(),
                "not a valid event: `layer` belongs to an event `mark` of kind `layer`",
                "{event} {kind}"
            );
        }
        assert_eq!(check(&json!({"event": "mark", "kind": "layer"})).expect("a mark as before").layer, None);
        let wrong = |layer: Value| {
            let json = json!({"event": "mark", "kind": "layer", "name": "l", "layer": layer});
            serde_json::from_value::<Annotation>(json).expect_err("wrong").to_string()
        };
        assert!(wrong(json!({})).contains("`direction`"), "{}", wrong(json!({})));
        assert!(wrong(json!({"direction": "forward", "grown": 1})).contains("`grown`"));
        assert!(wrong(json!({"direction": "sideways"})).contains("`sideways`"));
    }

    #[test]
    fn attributes_are_bounded_in_number_and_bytes() {
        let limits = Limits::default();
        let many = |count: usize| (0..count).map(|n| (format!("a{n}"), json!(n))).collect::<serde_json::Map<_, _>>();
        assert!(check(&json!({"attributes": many(limits.attributes)})).is_ok());
        assert_eq!(
            refused(json!({"attributes": many(limits.attributes + 1)})),
            "attributes: 17 of them, the limit is 16"
        );
        let long = |bytes: usize| json!({"attributes": {"ab": "x".repeat(bytes), "c": 1, "d": "yy"}});
        assert!(check(&long(limits.attribute_bytes - 6)).is_ok());
        assert_eq!(refused(long(limits.attribute_bytes - 5)), "attributes: 1025 bytes in all, the limit is 1024");
        assert!(refused(json!({"attributes": {"a\u{202e}": 1}})).contains("U+202E"));
        let kept: Attributes = Box::new([("ab".into(), Scalar::Text("xyz".into())), ("c".into(), Scalar::Int(1))]);
        let each = size_of::<(Box<str>, Scalar)>() + 16;
        assert_eq!(weight(&kept), (each + 2 + 3 + 16) + (each + 1));
    }

    #[test]
    fn times_lie_within_what_is_kept_and_what_clocks_differ() {
        let Limits { past_ns, future_ns, .. } = Limits::default();
        // The system's clock is 500 ns ahead of the timeline.
        let at = |by_ns: i64| check(&json!({"time_unix_nano": NOW_NS + 500 + by_ns}));
        assert_eq!(at(-7).expect("good").at_ns, NOW_NS - 7);
        assert_eq!((at(-past_ns).is_ok(), at(future_ns).is_ok()), (true, true));
        assert_eq!(at(-past_ns - 1).expect_err("too old"), Refusal::TooOld { behind_s: 600, kept_s: 600 });
        assert_eq!(at(future_ns + SECOND_NS).expect_err("ahead"), Refusal::InFuture { ahead_s: 2 });
        assert!(at(future_ns + 1).is_err());
        for far in [i64::MIN, i64::MAX] {
            assert!(check(&json!({"time_unix_nano": far})).is_err(), "{far}");
        }
    }

    #[test]
    fn an_end_adds_attributes_up_to_those_of_one_event() {
        let of = |all: &[(&str, &str)]| -> Attributes {
            all.iter().map(|(name, text)| ((*name).into(), Scalar::Text((*text).to_owned()))).collect()
        };
        assert_eq!(joined(None, None), None);
        assert_eq!(joined(None, Some(&of(&[("a", "1")]))), Some(of(&[("a", "1")])));
        assert_eq!(joined(Some(of(&[("a", "1")])), None), Some(of(&[("a", "1")])));
        let both = joined(Some(of(&[("a", "1"), ("b", "2")])), Some(&of(&[("b", "3"), ("c", "4")])));
        assert_eq!(both, Some(of(&[("a", "1"), ("b", "2"), ("c", "4")])), "what was said at the begin stays");
        let names: Vec<String> = (0..30).map(|nth| format!("n{nth}")).collect();
        let many = |range: std::ops::Range<usize>| {
            of(&names[range].iter().map(|name| (name.as_str(), "")).collect::<Vec<_>>())
        };
        assert_eq!(joined(Some(many(0..10)), Some(&many(10..26))), Some(many(0..16)));
        let long = "x".repeat(600);
        let both = joined(Some(of(&[("a", &long)])), Some(&of(&[("b", &long), ("c", "small")])));
        assert_eq!(both, Some(of(&[("a", &long), ("c", "small")])));
    }
}
