//! Where a rank runs, by what its events and its process tell, and the search for its GPUs where it names none.

use super::event::Attributes;
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
    /// Its id, where a process of it told: another container of the same names has another one.
    pub id: Option<String>,
}

/// What is told of the place of one rank; with borrowed text, what one event tells.
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
    /// This, and what an earlier event told besides.
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

    /// This, and what another source tells besides. A local rank is only of use beside the devices that it counts, so one
    /// of elsewhere does not stand in.
    pub fn or(self, other: Self) -> Self {
        let without_rank = if self.visible_devices.is_some() { Self { local_rank: None, ..other } } else { other };
        self.since(without_rank)
    }
}

impl<'a> Place<&'a str> {
    /// What attributes of an event tell. Pods have OpenTelemetry's names.
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
            namespace: text("k8s.namespace.name"),
            pod: text("k8s.pod.name"),
            pod_uid: text("k8s.pod.uid"),
            container: text("k8s.container.name"),
        }
    }

    /// Whether `told` is of another pod than this.
    fn is_left_for(&self, told: &Self) -> bool {
        differ(self.namespace, told.namespace) || differ(self.pod, told.pod) || differ(self.pod_uid, told.pod_uid)
    }
}

impl Place {
    /// The devices and the local rank of a process.
    pub fn of_process(visible_devices: Option<String>, local_rank: Option<usize>) -> Self {
        Self { visible_devices, local_rank, ..Self::default() }
    }

    /// The container, where its pod is told.
    pub fn container(&self) -> Option<Container> {
        let (namespace, pod) = self.namespace.clone().zip(self.pod.clone())?;
        Some(Container { namespace, pod, name: self.container.clone(), id: None })
    }
}

/// Whether both are told and not the same.
fn differ<T: PartialEq>(before: Option<T>, now: Option<T>) -> bool {
    before.is_some() && now.is_some() && before != now
}

/// The search for the GPUs of one rank.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// Since when it goes on, nanoseconds of the timeline; `None` while the GPUs are known.
    pub since_ns: Option<i64>,
    /// What the rank's events have told so far.
    pub place: Place,
    /// The process whose event told it last.
    pub told_by: Option<u32>,
    /// Whether its events named the GPUs that are known.
    pub named: bool,
}

impl Search {
    /// Takes what attributes of an event tell; what an earlier event told stays where this one does not tell. Returns
    /// whether GPUs that were found before may be wrong since.
    pub fn note(&mut self, attributes: &Attributes, pid: Option<u32>) -> bool {
        let told = Place::of_attributes(attributes);
        if told == Place::default() {
            return false;
        }
        self.told_by = pid;
        let before = self.place.map(String::as_str);
        let is_elsewhere = before.is_left_for(&told);
        let after = if is_elsewhere { told } else { told.since(before) };
        // Clients tell the same with each event: nothing is kept anew then.
        if after == before {
            return false;
        }
        let uses_others =
            differ(before.visible_devices, told.visible_devices) || differ(before.local_rank, told.local_rank);
        self.place = after.map(|text| (*text).to_owned());
        if is_elsewhere {
            self.since_ns = None;
        }
        is_elsewhere || uses_others
    }

    /// What is known of the place of the rank while process `pid` speaks for it, of which the system tells `own`. What
    /// another process of the rank has said of itself comes last.
    pub fn place_of(&self, pid: Option<u32>, own: Place) -> Place {
        if self.told_by == pid { self.place.clone().or(own) } else { own.or(self.place.clone()) }
    }
}
