//! Where a rank runs, by what its events and its process tell, and the search for its GPUs where it names none.

use super::event::Attributes;
use super::wire::Scalar;
use crate::kubelet::Container;
use std::sync::Arc;

/// What is told of the place of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The devices that it sees, as `CUDA_VISIBLE_DEVICES` has them.
    pub visible_devices: Option<String>,
    /// Its position among the processes of its job there.
    pub local_rank: Option<usize>,
    namespace: Option<String>,
    pod: Option<String>,
    pod_uid: Option<String>,
    container: Option<String>,
}

impl Place {
    /// The devices and the local rank of a process.
    pub fn of_process(visible_devices: Option<String>, local_rank: Option<usize>) -> Self {
        Self { visible_devices, local_rank, ..Self::default() }
    }

    /// What attributes of an event tell. Pods have OpenTelemetry's names.
    pub fn of_attributes(attributes: &Attributes) -> Self {
        let get = |wanted: &str| attributes.iter().find(|(name, _)| &**name == wanted).map(|(_, value)| value);
        let text = |name: &str| match get(name) {
            Some(Scalar::Text(text)) => Some(text.clone()),
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

    /// This, and what `other` tells besides.
    pub fn or(self, other: Self) -> Self {
        Self {
            visible_devices: self.visible_devices.or(other.visible_devices),
            local_rank: self.local_rank.or(other.local_rank),
            namespace: self.namespace.or(other.namespace),
            pod: self.pod.or(other.pod),
            pod_uid: self.pod_uid.or(other.pod_uid),
            container: self.container.or(other.container),
        }
    }

    /// The container, where its pod is told.
    pub fn container(&self) -> Option<Container> {
        let (namespace, pod) = self.namespace.clone().zip(self.pod.clone())?;
        Some(Container { namespace, pod, name: self.container.clone(), instance: self.pod_uid.clone() })
    }

    /// Whether `told` is of another pod than this.
    fn is_left_for(&self, told: &Self) -> bool {
        let differs =
            |before: &Option<String>, now: &Option<String>| before.is_some() && now.is_some() && before != now;
        differs(&self.namespace, &told.namespace)
            || differs(&self.pod, &told.pod)
            || differs(&self.pod_uid, &told.pod_uid)
    }
}

/// The search for the GPUs of one rank.
#[derive(Debug, Clone, Default)]
pub(super) struct Search {
    /// Since when it goes on, nanoseconds of the timeline; `None` while the GPUs are known.
    pub since_ns: Option<i64>,
    /// What the rank's events have told so far.
    pub place: Place,
    /// Whether its events named the GPUs that are known.
    pub named: bool,
    /// What was found last.
    pub found: Option<Found>,
}

/// GPUs that were found.
#[derive(Debug, Clone)]
pub(super) struct Found {
    /// Their positions.
    pub gpus: Arc<[usize]>,
    /// The container that has them, and which of its GPUs the process uses, where that was how.
    pub by: Option<(Container, Place)>,
}

impl Search {
    /// Takes what attributes of an event tell; what an earlier event told stays where this one does not tell. Returns
    /// whether the rank is in another pod since.
    pub fn note(&mut self, attributes: &Attributes) -> bool {
        let told = Place::of_attributes(attributes);
        let moved = self.place.is_left_for(&told);
        if moved {
            self.forget();
        }
        self.place = told.or(std::mem::take(&mut self.place));
        moved
    }

    /// Forgets what was told and found: another process or pod speaks for the rank.
    pub fn forget(&mut self) {
        (self.since_ns, self.place) = (None, Place::default());
    }

    /// What was found before for this very container, and a process that tells the same of itself.
    pub fn found_in(&self, container: &Container, place: &Place) -> Option<&Found> {
        let found = self.found.as_ref()?;
        let (before, told) = found.by.as_ref()?;
        // Names alone do not tell a container from the one before it.
        (container.instance.is_some() && before == container && told == place).then_some(found)
    }
}
