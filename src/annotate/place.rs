//! Where a rank runs, by what its events and its process's environment tell: what finds its GPU where it names none.

use super::event::Attributes;
use super::wire::Scalar;
use crate::kubelet::Container;

/// What is known of the place of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The devices that it sees, as `CUDA_VISIBLE_DEVICES` has them.
    pub visible_devices: Option<String>,
    /// Its position among the processes of its job there.
    pub local_rank: Option<usize>,
    /// The container that it runs in.
    pub container: Option<Container>,
}

/// The search for the GPUs of a rank that has named none.
#[derive(Debug, Clone)]
pub(super) struct Search {
    /// Since when they are looked for, nanoseconds of the timeline.
    pub since_ns: i64,
    /// What its events have told so far.
    pub place: Place,
}

impl Search {
    /// One that begins now and knows nothing.
    pub fn new(now_ns: i64) -> Self {
        Self { since_ns: now_ns, place: Place::default() }
    }

    /// Takes what attributes of an event tell; what an earlier event told stays where this one does not tell.
    pub fn note(&mut self, attributes: &Attributes) {
        self.place = Place::of_attributes(attributes).or(std::mem::take(&mut self.place));
    }
}

impl Place {
    /// What attributes of an event tell. The container has OpenTelemetry's names.
    pub fn of_attributes(attributes: &Attributes) -> Self {
        let get = |wanted: &str| attributes.iter().find(|(name, _)| &**name == wanted).map(|(_, value)| value);
        let text = |name: &str| match get(name) {
            Some(Scalar::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let container = text("k8s.namespace.name").zip(text("k8s.pod.name"));
        Self {
            visible_devices: text("CUDA_VISIBLE_DEVICES"),
            local_rank: match get("LOCAL_RANK") {
                Some(Scalar::Int(rank)) => usize::try_from(*rank).ok(),
                Some(Scalar::Text(rank)) => rank.parse().ok(),
                _ => None,
            },
            container: container.map(|(namespace, pod)| Container { namespace, pod, name: text("k8s.container.name") }),
        }
    }

    /// This, and what `other` tells besides.
    pub fn or(self, other: Self) -> Self {
        Self {
            visible_devices: self.visible_devices.or(other.visible_devices),
            local_rank: self.local_rank.or(other.local_rank),
            container: self.container.or(other.container),
        }
    }
}
