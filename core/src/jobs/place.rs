//! Where a rank runs, according to its events and its process, and the search for its GPUs if it names none.

use super::event::{Attributes, NAMESPACE, POD};
use crate::wire::Scalar;

/// A container of this node, as Kubernetes names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Its pod's namespace.
    pub namespace: String,
    /// Its pod.
    pub pod: String,
    /// Its name in the pod, where known.
    pub name: Option<String>,
    /// Its id, if known from a process of it: a new container with the same names has another id.
    pub id: Option<String>,
}

/// The place of one rank; with borrowed text, as one event gives it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place<Text = String> {
    /// The devices that it sees, as `CUDA_VISIBLE_DEVICES` has them.
    pub visible_devices: Option<Text>,
    /// Its position among the processes of its job there.
    pub local_rank: Option<usize>,
    namespace: Option<Text>,
    pod: Option<Text>,
    pod_uid: Option<Text>,
    container: Option<Text>,
}

impl<Text> Place<Text> {
    /// This, completed from an earlier event.
    fn since(self, before: Self) -> Self {
        Self {
            visible_devices: self.visible_devices.or(before.visible_devices),
            local_rank: self.local_rank.or(before.local_rank),
            namespace: self.namespace.or(before.namespace),
            pod: self.pod.or(before.pod),
            pod_uid: self.pod_uid.or(before.pod_uid),
            container: self.container.or(before.container),
        }
    }

    /// The same with its text in another form.
    fn map<'a, To>(&'a self, form: impl Fn(&'a Text) -> To) -> Place<To> {
        Place {
            visible_devices: self.visible_devices.as_ref().map(&form),
            local_rank: self.local_rank,
            namespace: self.namespace.as_ref().map(&form),
            pod: self.pod.as_ref().map(&form),
            pod_uid: self.pod_uid.as_ref().map(&form),
            container: self.container.as_ref().map(&form),
        }
    }

    /// This place, completed from another source. A local rank is an index into the visible devices. So if this place has visible
    /// devices, the other source's local rank is not used.
    pub fn or(self, other: Self) -> Self {
        let without_rank = if self.visible_devices.is_some() { Self { local_rank: None, ..other } } else { other };
        self.since(without_rank)
    }
}

impl<'a> Place<&'a str> {
    /// The place in the attributes of an event. Pods have OpenTelemetry's names.
    fn of_attributes(attributes: &'a Attributes) -> Self {
        let get = |wanted: &str| attributes.iter().find(|(name, _)| &**name == wanted).map(|(_, value)| value);
        let text = |name: &str| match get(name) {
            Some(Scalar::Text(text)) => Some(text.as_str()),
            _ => None,
        };
        Self {
            visible_devices: text("CUDA_VISIBLE_DEVICES"),
            local_rank: match get("LOCAL_RANK") {
                Some(Scalar::Int(rank)) => usize::try_from(*rank).ok(),
                Some(Scalar::Text(rank)) => rank.parse().ok(),
                _ => None,
            },
            namespace: text(NAMESPACE),
            pod: text(POD),
            pod_uid: text("k8s.pod.uid"),
            container: text("k8s.container.name"),
        }
    }

    /// Whether `given` names another pod than this.
    fn is_left_for(&self, given: &Self) -> bool {
        differ(self.namespace, given.namespace) || differ(self.pod, given.pod) || differ(self.pod_uid, given.pod_uid)
    }
}

impl Place {
    /// The devices and the local rank of a process.
    pub fn of_process(visible_devices: Option<String>, local_rank: Option<usize>) -> Self {
        Self { visible_devices, local_rank, ..Self::default() }
    }

    /// The container, if its pod is known.
    pub fn container(&self) -> Option<Container> {
        let (namespace, pod) = self.namespace.clone().zip(self.pod.clone())?;
        Some(Container { namespace, pod, name: self.container.clone(), id: None })
    }
}

/// Whether both are known and differ.
fn differ<T: PartialEq>(before: Option<T>, now: Option<T>) -> bool {
    before.is_some() && now.is_some() && before != now
}

/// The search for the GPUs of one rank.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// Since when it goes on, nanoseconds of the timeline; `None` while the GPUs are known.
    pub since_ns: Option<i64>,
    /// What the rank's events have given so far.
    pub place: Place,
    /// The process whose event gave it last.
    pub said_by: Option<u32>,
    /// Whether its events named the GPUs that are known.
    pub named: bool,
}

impl Search {
    /// Takes the place from an event's attributes; what this event leaves out stays as earlier events gave it. Returns
    /// whether GPUs that were found before may be wrong since.
    pub fn note(&mut self, attributes: &Attributes, pid: Option<u32>) -> bool {
        let given = Place::of_attributes(attributes);
        if given == Place::default() {
            return false;
        }
        self.said_by = pid;
        let before = self.place.map(String::as_str);
        let is_elsewhere = before.is_left_for(&given);
        let after = if is_elsewhere { given } else { given.since(before) };
        // Clients send the same attributes with each event: nothing is stored again then.
        if after == before {
            return false;
        }
        let uses_others =
            differ(before.visible_devices, given.visible_devices) || differ(before.local_rank, given.local_rank);
        self.place = after.map(|text| (*text).to_owned());
        if is_elsewhere {
            self.since_ns = None;
        }
        is_elsewhere || uses_others
    }

    /// The place of the rank while process `pid` sends for it; `own` is what the system reports about that process.
    /// What the process sent about itself comes before `own`; what another process of the rank sent comes after it.
    pub fn place_of(&self, pid: Option<u32>, own: Place) -> Place {
        if self.said_by == pid { self.place.clone().or(own) } else { own.or(self.place.clone()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(of: &[(&str, &str)]) -> Attributes {
        of.iter().map(|(name, value)| ((*name).into(), Scalar::Text((*value).into()))).collect()
    }

    const POD: [(&str, &str); 3] =
        [("k8s.namespace.name", "research"), ("k8s.pod.name", "llama-0"), ("k8s.pod.uid", "u1")];

    #[test]
    fn attributes_name_the_place_by_their_usual_names() {
        let mut search = Search::default();
        let given =
            [&POD[..], &[("CUDA_VISIBLE_DEVICES", "0,1"), ("LOCAL_RANK", "1"), ("k8s.container.name", "trainer")]]
                .concat();
        assert!(!search.note(&attributes(&given), Some(7)), "nothing was found before");
        assert_eq!((search.place.visible_devices.as_deref(), search.place.local_rank), (Some("0,1"), Some(1)));
        let container = search.place.container().expect("its pod is known");
        let expected =
            Container { namespace: "research".into(), pod: "llama-0".into(), name: Some("trainer".into()), id: None };
        assert_eq!((container, search.said_by), (expected, Some(7)));
        let rank = |value| {
            let mut search = Search::default();
            search.note(&[("LOCAL_RANK".into(), value)].into(), None);
            search.place.local_rank
        };
        assert_eq!(rank(Scalar::Int(3)), Some(3));
        assert_eq!(
            (rank(Scalar::Int(-1)), rank(Scalar::Text("x".into())), rank(Scalar::Float(1.0))),
            (None, None, None)
        );
        assert!(Place::of_process(Some("0".into()), None).container().is_none());
    }

    #[test]
    fn what_one_event_leaves_out_stays_and_other_devices_undo_what_was_found() {
        let mut search = Search { since_ns: Some(5), ..Search::default() };
        assert!(!search.note(&attributes(&[("LOCAL_RANK", "1")]), Some(1)));
        assert!(!search.note(&attributes(&[("CUDA_VISIBLE_DEVICES", "0,1")]), Some(2)));
        assert_eq!((search.place.local_rank, search.said_by), (Some(1), Some(2)));
        assert!(!search.note(&attributes(&[("learning rate", "1")]), Some(3)), "nothing of a place");
        assert_eq!(search.said_by, Some(2));
        assert!(!search.note(&attributes(&[("LOCAL_RANK", "1")]), Some(2)), "the same again");
        assert!(search.note(&attributes(&[("LOCAL_RANK", "0")]), Some(2)), "another of the devices");
        assert!(search.note(&attributes(&[("CUDA_VISIBLE_DEVICES", "1,0")]), Some(2)));
        assert_eq!(search.since_ns, Some(5), "it goes on");
    }

    #[test]
    fn another_pod_forgets_what_the_one_before_said() {
        let at = [&POD[..], &[("LOCAL_RANK", "1"), ("CUDA_VISIBLE_DEVICES", "0,1")]].concat();
        for (part, other) in [(0, "prod"), (1, "llama-1"), (2, "u2")] {
            let mut search = Search { since_ns: Some(5), ..Search::default() };
            search.note(&attributes(&at), None);
            assert!(!search.note(&attributes(&POD), None) && search.place.local_rank.is_some(), "the same pod");
            assert!(search.note(&attributes(&[(POD[part].0, other)]), None), "{other}");
            assert_eq!((search.since_ns, search.place.local_rank, search.place.visible_devices), (None, None, None));
        }
        let mut search = Search::default();
        search.note(&attributes(&[("LOCAL_RANK", "1")]), None);
        assert!(!search.note(&attributes(&POD), None), "given for the first time");
        assert_eq!(search.place.local_rank, Some(1));
    }

    #[test]
    fn a_local_rank_of_elsewhere_does_not_count_devices_seen_here() {
        let of = |devices: Option<&str>, local_rank| Place::of_process(devices.map(str::to_owned), local_rank);
        let own = of(Some("0,1"), Some(1));
        assert_eq!((own.visible_devices.as_deref(), own.local_rank), (Some("0,1"), Some(1)));
        assert_eq!(of(Some("0,1"), None).or(of(Some("2"), Some(1))), of(Some("0,1"), None));
        assert_eq!(of(None, Some(0)).or(of(Some("2,3"), Some(1))), of(Some("2,3"), Some(0)));
        assert_eq!(of(None, None).or(of(Some("2,3"), Some(1))), of(Some("2,3"), Some(1)));
        // What the last sender gave comes before its environment; what another process gave comes after.
        let search = Search { place: of(Some("0"), None), said_by: Some(7), ..Search::default() };
        assert_eq!(search.place_of(Some(7), of(Some("1"), None)), of(Some("0"), None));
        assert_eq!(search.place_of(Some(8), of(Some("1"), None)), of(Some("1"), None));
        assert_eq!(search.place_of(Some(8), of(None, None)), of(Some("0"), None));
    }
}
