//! The kubelet's lists: when one is made, and what is looked up in it.

use super::container::{Home, linked};
use super::wire;
use crate::dial::{Connector, Unix};
use crate::grpc::{Call, describe};
use arc_swap::ArcSwapOption;
use bytes::Bytes;
use highwater_core::clock::{Clock, MILLISECOND_NS, SECOND_NS, park_for};
use highwater_core::jobs::Container;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use prost::Message as _;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The shortest time from one list to the next.
const PAUSE: Duration = Duration::from_secs(1);
/// The time from one list to the next while nobody wants one sooner: how late a pod's begin and end are seen.
const POLL_PERIOD: Duration = Duration::from_secs(5);
/// The longest of the growing pauses while the kubelet gives no list.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long the last list is used while the kubelet, which may be restarting, gives no other.
const KEEP_LIST_NS: i64 = 60 * SECOND_NS;
/// How long a call to the kubelet may take, and therefore how long it may delay a shutdown.
const TIMEOUT: Duration = Duration::from_secs(1);
/// The longest time from one list to the next for a container that no list contains.
const LONGEST_PATIENCE_NS: i64 = 60 * SECOND_NS;
/// How long the names of the links are used.
const LINKS_KEEP_NS: i64 = 100 * MILLISECOND_NS;
/// The largest answer that is read, bytes. It is the limit of the kubelet's own clients.
pub const MOST_RESPONSE_BYTES: usize = 16 << 20;

/// Why the kubelet gave no list.
#[derive(Debug, thiserror::Error)]
enum KubeletError {
    #[error("{0}")]
    Runtime(std::io::Error),
    #[error("no answer within {TIMEOUT:?}")]
    TimedOut,
    /// Its status, or why it was not reached.
    #[error("{0}")]
    Call(String),
    #[error("{0}")]
    Answer(#[from] prost::DecodeError),
}

/// How to reach the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletSettings {
    /// Its PodResources socket; `None` disables it.
    pub socket: Option<PathBuf>,
    /// The folder with a link for each container's log.
    pub container_logs: PathBuf,
}

impl Default for KubeletSettings {
    fn default() -> Self {
        Self { socket: None, container_logs: PathBuf::from("/var/log/containers") }
    }
}

/// The GPUs of this node's containers.
#[derive(Debug)]
pub struct Kubelet {
    socket: PathBuf,
    container_logs: PathBuf,
    listed: ArcSwapOption<Listed>,
    /// Whether the last call gave a list; `None` before the first.
    is_up: ArcSwapOption<bool>,
    /// The list must be of this time or later, nanoseconds of the timeline.
    wanted_ns: AtomicI64,
    /// The names in that folder, and when they were read, nanoseconds of the timeline.
    links: Mutex<Option<(i64, Arc<[String]>)>>,
    /// Whether the log already says that the folder cannot be read.
    warned_logs: AtomicBool,
    /// The thread that makes lists, once it runs.
    thread: OnceLock<Thread>,
}

/// One list: of each pod, by namespace and name, its containers with GPUs.
#[derive(Debug)]
pub struct Listed {
    /// The list was current at some moment at or after this time, nanoseconds of the timeline.
    at_ns: i64,
    pods: HashMap<(String, String), Vec<Given>>,
}

/// The GPUs that one container was given.
#[derive(Debug)]
struct Given {
    container: String,
    /// Each GPU's UUID or device file.
    names: Vec<String>,
}

impl Listed {
    pub(super) fn new(at_ns: i64, pods: &wire::Pods) -> Self {
        let given = |container: &wire::ContainerResources| {
            let mut names: Vec<String> = device_names(container).chain(claimed_names(container)).collect();
            names.sort_unstable();
            names.dedup();
            (!names.is_empty()).then(|| Given { container: container.name.clone(), names })
        };
        let of_pod = |pod: &wire::Pod| {
            ((pod.namespace.clone(), pod.name.clone()), pod.containers.iter().filter_map(given).collect())
        };
        Self { at_ns, pods: pods.pods.iter().map(of_pod).collect() }
    }

    pub(super) fn find(&self, container: &Container) -> Option<Vec<String>> {
        let containers = self.pods.get(&(container.namespace.clone(), container.pod.clone()))?;
        let given = match (&container.name, containers.as_slice()) {
            (Some(wanted), _) => containers.iter().find(|given| given.container == *wanted)?,
            (None, [only]) => only,
            // Several containers have GPUs, and it is unknown which of them the process is in. Do not guess.
            (None, _) => return None,
        };
        Some(given.names.clone())
    }

    /// Each container with GPUs: namespace, pod, container, and its GPUs' UUIDs or device files.
    pub(crate) fn containers(&self) -> impl Iterator<Item = (&str, &str, &str, &[String])> {
        self.pods.iter().flat_map(|((namespace, pod), containers)| {
            containers.iter().map(move |given| (&**namespace, &**pod, &*given.container, &*given.names))
        })
    }
}

impl Kubelet {
    /// A kubelet that has not been asked yet; `None` if it is disabled.
    #[must_use]
    pub fn new(settings: &KubeletSettings) -> Option<Self> {
        Some(Self {
            socket: settings.socket.clone()?,
            container_logs: settings.container_logs.clone(),
            listed: ArcSwapOption::empty(),
            is_up: ArcSwapOption::empty(),
            wanted_ns: AtomicI64::new(i64::MIN),
            links: Mutex::default(),
            warned_logs: AtomicBool::new(false),
            thread: OnceLock::new(),
        })
    }

    /// Where a process with these control groups runs.
    #[must_use]
    pub fn home_of(&self, cgroups: &str, now_ns: i64) -> Home {
        Home::of_process(cgroups, || self.links(now_ns)).unwrap_or_else(|error| {
            if !self.warned_logs.swap(true, Ordering::Relaxed) {
                let folder = self.container_logs.display();
                tracing::warn!(%folder, %error, "cannot list container logs to find pods (kubelet.container_logs)");
            }
            Home::Unknown
        })
    }

    /// The container with this id, if it is linked by now.
    #[must_use]
    pub fn container(&self, id: &str, now_ns: i64) -> Option<Container> {
        linked(&self.links(now_ns).ok()?, id)
    }

    /// The names in the folder of links. Read at most ten times a second, however many processes are looked up.
    fn links(&self, now_ns: i64) -> std::io::Result<Arc<[String]>> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, links)) = links.as_ref().filter(|(read_ns, _)| now_ns.saturating_sub(*read_ns) < LINKS_KEEP_NS)
        {
            return Ok(Arc::clone(links));
        }
        let entries = std::fs::read_dir(&self.container_logs)?.flatten();
        let read: Arc<[String]> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        *links = Some((now_ns, Arc::clone(&read)));
        Ok(read)
    }

    /// UUIDs or device files of the GPUs and MIG instances that this container has at `since_ns` or later, each once. If the container's
    /// name is unknown and only one container of its pod has GPUs, returns those. `None` if it has none, or if that is not
    /// known yet: then the kubelet is asked again, and the caller should retry.
    #[must_use]
    pub fn gpus_of(&self, container: &Container, since_ns: i64, now_ns: i64) -> Option<Vec<String>> {
        let listed = self.listed.load();
        let Some(listed) = listed.as_ref().filter(|listed| listed.at_ns >= since_ns) else {
            self.want(since_ns);
            return None;
        };
        let found = listed.find(container);
        // A container without GPUs is looked up as long as its job runs. The pause doubles each time, until the next poll is as soon.
        let patience_ns = (listed.at_ns - since_ns).clamp(SECOND_NS, LONGEST_PATIENCE_NS);
        if found.is_none() && now_ns - listed.at_ns >= patience_ns {
            self.want(now_ns);
        }
        found
    }

    /// The last list, unless it is too old to be used.
    #[must_use]
    pub(crate) fn last_list(&self, now_ns: i64) -> Option<Arc<Listed>> {
        self.listed.load_full().filter(|listed| now_ns.saturating_sub(listed.at_ns) <= KEEP_LIST_NS)
    }

    /// Whether the last call to the kubelet gave a list; `None` before the first.
    #[must_use]
    pub fn is_up(&self) -> Option<bool> {
        self.is_up.load().as_deref().copied()
    }

    /// Requests a list of this time or later.
    fn want(&self, at_ns: i64) {
        if self.wanted_ns.fetch_max(at_ns, Ordering::SeqCst) < at_ns
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Makes a list each five seconds, and whenever one is requested, until `stop`. Calls `after` with the time after each list, and each
    /// five seconds while the kubelet gives none. To end it, unpark its thread.
    pub fn run(&self, clock: &dyn Clock, stop: &AtomicBool, after: &dyn Fn(i64)) {
        // Only one thread runs this. A second one would not be woken, but would do no other harm.
        let _ = self.thread.set(thread::current());
        let (mut warned, mut listed_ns, mut failures) = (Warned::default(), i64::MIN, 0);
        let mut due = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if self.wanted_ns.load(Ordering::SeqCst) > listed_ns || Instant::now() >= due {
                // The answer is current at some moment after this.
                listed_ns = clock.now_ns();
                let pods = self.ask();
                warned.log_change(self, &pods);
                failures = if pods.is_ok() { 0 } else { failures + 1 };
                self.take(listed_ns, pods.ok().as_ref());
                due = Instant::now() + pause_after(failures);
            }
            after(clock.now_ns());
            // What goes with the last list changes while the kubelet is away, too.
            let next = due.min(Instant::now() + POLL_PERIOD);
            park_for(PAUSE, stop);
            while !stop.load(Ordering::Relaxed) && self.wanted_ns.load(Ordering::SeqCst) <= listed_ns {
                let left = next.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                thread::park_timeout(left);
            }
        }
    }

    /// Takes the kubelet's answer, if it gave one. Otherwise the last list stays: the devices of a container do not change, and a
    /// lookup does not use a list from before its time.
    fn take(&self, at_ns: i64, pods: Option<&wire::Pods>) {
        if let Some(pods) = pods {
            self.listed.store(Some(Arc::new(Listed::new(at_ns, pods))));
        }
        self.is_up.store(Some(Arc::new(pods.is_some())));
    }

    fn ask(&self) -> Result<wire::Pods, KubeletError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(KubeletError::Runtime)?;
        let answer = runtime.block_on(async {
            // A new connection each time: the kubelet may have been restarted in between.
            let connector = Connector::new(Arc::new(Unix(self.socket.clone())), None);
            let client = Client::builder(TokioExecutor::new()).http2_only(true).build(connector);
            let call = Call {
                origin: http::Uri::from_static("http://localhost"),
                path: wire::LIST,
                headers: http::HeaderMap::new(),
                gzip: false,
                most_response_bytes: MOST_RESPONSE_BYTES,
            };
            tokio::time::timeout(TIMEOUT, call.send(client, Bytes::new())).await
        });
        let answer =
            answer.map_err(|_| KubeletError::TimedOut)?.map_err(|status| KubeletError::Call(describe(&status)))?;
        Ok(wire::Pods::decode(answer)?)
    }
}

/// The devices that plugins gave a container, by UUID or device file. A GPU whose id says neither is there by its id: a container of
/// which one GPU is unknown is given none.
fn device_names(container: &wire::ContainerResources) -> impl Iterator<Item = String> {
    container.devices.iter().flat_map(|devices| {
        let is_gpu = is_gpu(&devices.resource_name);
        devices.device_ids.iter().filter_map(move |id| device_name(id).or_else(|| is_gpu.then(|| id.clone())))
    })
}

/// Whether NVIDIA's device plugin, or one in its place, gives out GPUs or MIG instances under this name.
fn is_gpu(resource: &str) -> bool {
    resource == "nvidia.com/gpu" || resource.starts_with("nvidia.com/gpu.") || resource.starts_with("nvidia.com/mig-")
}

/// How long to wait for the next list after this many failures in a row.
fn pause_after(failures: u32) -> Duration {
    POLL_PERIOD.saturating_mul(1 << failures.saturating_sub(1).min(8)).min(LONGEST_PAUSE)
}

/// The devices of NVIDIA's driver that a container's claims have (dynamic resource allocation), as it names them.
fn claimed(container: &wire::ContainerResources) -> impl Iterator<Item = &str> {
    let claims = container.dynamic_resources.iter().flat_map(|claim| &claim.claim_resources);
    claims.filter(|resource| resource.driver_name == DRA_DRIVER).map(|resource| &*resource.device_name)
}

/// The same by device file, or as they are named if that does not say it.
fn claimed_names(container: &wire::ContainerResources) -> impl Iterator<Item = String> {
    claimed(container).map(|device| claimed_name(device).unwrap_or_else(|| device.to_owned()))
}

/// A GPU's UUID or device file by a device's id, which each device plugin chooses for itself:
/// - NVIDIA's: the UUID, with `::N` appended if the GPU is shared;
/// - GKE's: `nvidia3`, `nvidia3/gi7` for a MIG instance, with `/vgpu1` appended if the GPU is shared.
///
/// HAMi's ids are a UUID with `-N` appended. Which GPU a container then gets is its scheduler's choice, not the kubelet's, so the
/// UUID in the id may be another GPU's.
fn device_name(id: &str) -> Option<String> {
    let uuid = id.split("::").next()?;
    if uuid.starts_with("GPU-") || uuid.starts_with("MIG-") {
        let is_hamis = uuid.len() > UUID_LENGTH && uuid.as_bytes()[UUID_LENGTH] == b'-';
        return (!is_hamis).then(|| uuid.to_owned());
    }
    let mut parts = id.strip_prefix("nvidia")?.split('/');
    let (minor, part) = (parts.next()?.parse::<u32>().ok()?, parts.next());
    let instance = part.and_then(|part| part.strip_prefix("gi")?.parse::<u32>().ok());
    let is_known = part.is_none_or(|part| instance.is_some() || part.starts_with("vgpu"));
    is_known.then(|| instance.map_or_else(|| format!("/dev/nvidia{minor}"), |gi| format!("/dev/nvidia{minor}/gi{gi}")))
}

/// The length of `GPU-` or `MIG-` and a UUID.
const UUID_LENGTH: usize = 40;

/// A GPU's device file, or a MIG instance by its profile and place, by the name in a claim. NVIDIA's driver for dynamic resource
/// allocation names a GPU `gpu-3`, and an instance `gpu-3-mig-1g18gb-19-4` by its profile, the profile's number and its first memory
/// slice; its versions up to 25.8 `gpu-3-mig-19-4-1` by number, first slice and slices.
fn claimed_name(device: &str) -> Option<String> {
    let number = |text: &str| text.parse::<u32>().ok();
    let rest = device.strip_prefix("gpu-")?;
    let Some((minor, instance)) = rest.split_once("-mig-") else {
        return Some(format!("/dev/nvidia{}", number(rest)?));
    };
    let parts: Vec<&str> = instance.split('-').collect();
    let (profile, start) = match &*parts {
        [profile, start, slices] if number(profile).is_some() => number(slices).and(Some((profile, start)))?,
        [name, .., profile, start] if number(name).is_none() => (profile, start),
        _ => return None,
    };
    Some(format!("gpu-{}-mig-{}-{}", number(minor)?, number(profile)?, number(start)?))
}

/// The name of NVIDIA's driver for dynamic resource allocation.
const DRA_DRIVER: &str = "gpu.nvidia.com";

/// The warnings already logged, so that each is logged once.
#[derive(Debug, Default)]
struct Warned {
    failing: bool,
    without_uuids: bool,
}

impl Warned {
    fn log_change(&mut self, kubelet: &Kubelet, pods: &Result<wire::Pods, KubeletError>) {
        let socket = kubelet.socket.display();
        let pods = match pods {
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(%socket, %error, "cannot read the GPUs of pods from the kubelet (kubelet.socket)");
                }
                return;
            }
            Ok(pods) => pods,
        };
        if std::mem::replace(&mut self.failing, false) {
            tracing::info!(%socket, "the kubelet reports the GPUs of pods again");
        }
        let unknown = |container: &wire::ContainerResources| {
            let gpus = container.devices.iter().filter(|devices| is_gpu(&devices.resource_name));
            let plugins = gpus.flat_map(|devices| &devices.device_ids).find(|id| device_name(id).is_none()).cloned();
            plugins.or_else(|| claimed(container).find(|device| claimed_name(device).is_none()).map(str::to_owned))
        };
        let strange = pods.pods.iter().flat_map(|pod| &pod.containers).find_map(unknown);
        if let Some(id) = strange.filter(|_| !std::mem::replace(&mut self.without_uuids, true)) {
            tracing::warn!(%socket, id, "a device has a name from which its GPU is not known: its pod is not shown, and its job must name its GPU");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of resources, each with its devices.
    type Devices<'a> = &'a [(&'a str, &'a [&'a str])];

    fn pod(namespace: &str, name: &str, containers: &[(&str, Devices<'_>)]) -> wire::Pod {
        let devices = |(resource_name, ids): &(&str, &[&str])| wire::ContainerDevices {
            resource_name: (*resource_name).into(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        let container = |(name, given): &(&str, Devices<'_>)| wire::ContainerResources {
            name: (*name).into(),
            devices: given.iter().map(devices).collect(),
            ..wire::ContainerResources::default()
        };
        wire::Pod {
            name: name.into(),
            namespace: namespace.into(),
            containers: containers.iter().map(container).collect(),
        }
    }

    impl Kubelet {
        /// A kubelet that was asked at 0 and knows one pod with these GPUs: `research/llama-0`, container `trainer`.
        pub(crate) fn with_one_pod(container_logs: PathBuf, gpus: &[&str]) -> Self {
            let settings = KubeletSettings { container_logs, ..KubeletSettings::default() };
            listed_with(settings, vec![pod("research", "llama-0", &[("trainer", &[("nvidia.com/gpu", gpus)])])])
        }
    }

    fn container(namespace: &str, pod: &str, name: Option<&str>) -> Container {
        Container { namespace: namespace.into(), pod: pod.into(), name: name.map(str::to_owned), id: None }
    }

    /// A kubelet that was asked at 0.
    fn listed(pods: Vec<wire::Pod>) -> Kubelet {
        listed_with(KubeletSettings::default(), pods)
    }

    fn listed_with(settings: KubeletSettings, pods: Vec<wire::Pod>) -> Kubelet {
        let settings = KubeletSettings { socket: Some("/nowhere".into()), ..settings };
        let kubelet = Kubelet::new(&settings).expect("a socket is set");
        kubelet.take(0, Some(&wire::Pods { pods }));
        kubelet
    }

    #[test]
    fn a_container_has_its_own_gpus_and_no_other_devices() {
        let kubelet = listed(vec![
            pod(
                "a",
                "train",
                &[("sidecar", &[]), ("main", &[("rdma/hca", &["0", "1"]), ("nvidia.com/gpu", &["GPU-2", "GPU-1"])])],
            ),
            pod("b", "train", &[("main", &[("nvidia.com/gpu.shared", &["GPU-3::0", "GPU-3::7"])])]),
            pod("a", "mig", &[("main", &[("nvidia.com/mig-1g.18gb", &["MIG-4"])])]),
        ]);
        let gpus = |namespace, pod, name| kubelet.gpus_of(&container(namespace, pod, name), 0, 0);
        assert_eq!(gpus("a", "train", Some("main")), Some(vec!["GPU-1".into(), "GPU-2".into()]));
        assert_eq!(gpus("a", "train", None), gpus("a", "train", Some("main")), "only one container has any");
        assert_eq!(gpus("b", "train", None), Some(vec!["GPU-3".into()]), "shared, and listed once");
        assert_eq!(gpus("a", "mig", None), Some(vec!["MIG-4".into()]));
        assert_eq!(gpus("a", "train", Some("sidecar")), None);
        assert_eq!(gpus("c", "train", None), None);
    }

    #[test]
    fn every_plugins_name_of_a_device_is_its_gpus() {
        let uuid = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c";
        let named = |id: &str| device_name(id);
        for id in [uuid, &format!("{uuid}::3")] {
            assert_eq!(named(id).as_deref(), Some(uuid), "{id}");
        }
        assert_eq!(named("MIG-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c").as_deref(), Some(&*uuid.replace("GPU", "MIG")));
        for (id, file) in [
            ("nvidia0", "/dev/nvidia0"),
            ("nvidia12/vgpu3", "/dev/nvidia12"),
            ("nvidia3/gi7", "/dev/nvidia3/gi7"),
            ("nvidia3/gi7/vgpu1", "/dev/nvidia3/gi7"),
        ] {
            assert_eq!(named(id).as_deref(), Some(file), "{id}");
        }
        let hamis = format!("{uuid}-12");
        for id in [&*hamis, "", "0", "nvidia", "nvidiactl", "nvidia0/x", "nvidia99999999999", "nvidia-1", "tpu0"] {
            assert_eq!(named(id), None, "{id}");
        }
        assert_eq!(claimed_name("gpu-5").as_deref(), Some("/dev/nvidia5"));
        for name in ["gpu-5-mig-1g18gb-19-4", "gpu-5-mig-1g18gb-me-19-4", "gpu-5-mig-19-4-1"] {
            assert_eq!(claimed_name(name).as_deref(), Some("gpu-5-mig-19-4"), "{name}");
        }
        let others = [
            "gpu-5-mig-19-4",
            "gpu-5-mig-1g18gb-x-4",
            "gpu-5-mig-19-4-x",
            "gpu-x-mig-19-4-1",
            "gpu-vfio-0",
            "gpu-",
            "5",
        ];
        assert_eq!(others.map(claimed_name), [const { None }; 7]);
    }

    #[test]
    fn a_claim_of_dynamic_resource_allocation_gives_gpus_too() {
        let claimed = |devices: &[(&str, &str)]| {
            let resource = |(driver, device): &(&str, &str)| wire::ClaimResource {
                driver_name: (*driver).into(),
                device_name: (*device).into(),
            };
            let claim = wire::DynamicResource { claim_resources: devices.iter().map(resource).collect() };
            let mut pod = pod("a", "train", &[("main", &[])]);
            pod.containers[0].dynamic_resources = vec![claim];
            listed(vec![pod]).gpus_of(&container("a", "train", None), 0, 0)
        };
        assert_eq!(claimed(&[(DRA_DRIVER, "gpu-5"), ("other.com", "gpu-6")]), Some(vec!["/dev/nvidia5".into()]));
        assert_eq!(claimed(&[("other.com", "gpu-6")]), None);
    }

    #[test]
    fn a_gpu_that_is_not_known_is_not_left_out() {
        let names = |devices: Devices<'_>| {
            listed(vec![pod("a", "train", &[("main", devices)])]).gpus_of(&container("a", "train", None), 0, 0)
        };
        let uuid = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c";
        let hamis = format!("{uuid}-3");
        let of = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(names(&[("nvidia.com/gpu", &[uuid, "7"])]), of(&["7", uuid]));
        assert_eq!(names(&[("nvidia.com/gpu.shared", &[&hamis])]), of(&[&hamis]));
        assert_eq!(names(&[("nvidia.com/mig-1g.18gb", &["x"]), ("nvidia.com/hostdev", &["0000:05:00.1"])]), of(&["x"]));
    }

    #[test]
    fn while_the_kubelet_fails_the_last_list_is_used_for_a_minute_and_pauses_grow() {
        let settings = KubeletSettings { socket: Some("/nowhere".into()), ..KubeletSettings::default() };
        let kubelet = Kubelet::new(&settings).expect("a socket is set");
        assert_eq!((kubelet.is_up(), kubelet.last_list(0).is_some()), (None, false));
        kubelet.take(0, None);
        assert_eq!((kubelet.is_up(), kubelet.last_list(0).is_some()), (Some(false), false), "none was given");
        assert!(kubelet.gpus_of(&container("a", "train", None), 0, 0).is_none());
        kubelet
            .take(7, Some(&wire::Pods { pods: vec![pod("a", "train", &[("m", &[("nvidia.com/gpu", &["GPU-1"])])])] }));
        assert_eq!(kubelet.is_up(), Some(true));
        kubelet.take(9, None);
        assert_eq!(kubelet.is_up(), Some(false));
        let gpus = |since_ns| kubelet.gpus_of(&container("a", "train", None), since_ns, 9);
        assert_eq!((gpus(7), gpus(8)), (Some(vec!["GPU-1".into()]), None), "a later pod of that name may have others");
        let at = |now_ns| kubelet.last_list(now_ns).map(|listed| listed.containers().count());
        assert_eq!((at(7 + KEEP_LIST_NS), at(8 + KEEP_LIST_NS)), (Some(1), None));
        let pauses = [0, 1, 2, 3, 4, 1_000].map(|failures| pause_after(failures).as_secs());
        assert_eq!(pauses, [5, 5, 10, 20, 30, 30]);
    }

    #[test]
    fn two_containers_with_gpus_have_to_say_which_they_are() {
        let given: Devices<'_> = &[("nvidia.com/gpu", &["GPU-1"])];
        let other: Devices<'_> = &[("nvidia.com/gpu", &["GPU-2"])];
        let kubelet = listed(vec![pod("a", "both", &[("one", given), ("two", other)])]);
        assert_eq!(kubelet.gpus_of(&container("a", "both", None), 0, 0), None, "no guess");
        assert_eq!(kubelet.gpus_of(&container("a", "both", Some("two")), 0, 0), Some(vec!["GPU-2".into()]));
    }

    #[test]
    fn what_was_so_before_somebody_looked_is_not_believed_and_the_kubelet_is_asked_again() {
        let kubelet = listed(vec![pod("a", "train", &[("main", &[("nvidia.com/gpu", &["GPU-1"])])])]);
        let gpus = |since_ns, now_ns| kubelet.gpus_of(&container("a", "train", None), since_ns, now_ns);
        assert!(gpus(0, 5 * SECOND_NS).is_some());
        assert_eq!(kubelet.wanted_ns.load(Ordering::SeqCst), i64::MIN, "no new list is needed");
        assert_eq!(gpus(1, 5), None);
        assert_eq!(kubelet.wanted_ns.load(Ordering::SeqCst), 1, "a list in progress is enough");
    }

    #[test]
    fn a_container_that_is_in_no_list_is_asked_for_ever_more_seldom() {
        let kubelet = listed(Vec::new());
        let unknown = container("a", "train", None);
        let lists = (1..200).filter(|second| {
            let before = kubelet.wanted_ns.load(Ordering::SeqCst);
            assert_eq!(kubelet.gpus_of(&unknown, 0, second * SECOND_NS), None);
            let is_wanted = kubelet.wanted_ns.load(Ordering::SeqCst) > before;
            if is_wanted {
                let list = Listed::new(second * SECOND_NS, &wire::Pods::default());
                kubelet.listed.store(Some(Arc::new(list)));
            }
            is_wanted
        });
        assert_eq!(lists.collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 64, 124, 184]);
        assert_eq!(kubelet.gpus_of(&unknown, 190 * SECOND_NS, 190 * SECOND_NS), None);
        let wanted_ns = kubelet.wanted_ns.load(Ordering::SeqCst);
        assert_eq!(wanted_ns, 190 * SECOND_NS, "a new lookup does not wait for that pause");
    }

    #[test]
    fn a_socket_that_says_nonsense_or_nothing_is_an_error_that_says_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let asked = |name: &str| {
            let settings = KubeletSettings { socket: Some(folder.path().join(name)), ..KubeletSettings::default() };
            Kubelet::new(&settings).expect("a socket is set").ask().expect_err("no list")
        };
        let absent = asked("none");
        assert!(matches!(&absent, KubeletError::Call(why) if why.contains("No such file")), "{absent:?}");
        let _silent = std::os::unix::net::UnixListener::bind(folder.path().join("silent")).expect("bound");
        let silent = asked("silent");
        assert!(matches!(silent, KubeletError::TimedOut) && silent.to_string() == "no answer within 1s", "{silent:?}");
        let babbler = std::os::unix::net::UnixListener::bind(folder.path().join("babbler")).expect("bound");
        let babbling = thread::spawn(move || {
            let (mut stream, _) = babbler.accept().expect("a request arrives");
            std::io::Write::write_all(&mut stream, &[0xff; 4096]).expect("written");
        });
        let babbled = asked("babbler");
        assert!(matches!(&babbled, KubeletError::Call(why) if !why.is_empty()), "{babbled:?}");
        babbling.join().expect("it ends");
    }

    #[test]
    fn the_kubelet_is_asked_when_a_list_is_wanted_and_a_failure_makes_none() {
        let settings = KubeletSettings { socket: Some("/nowhere".into()), ..KubeletSettings::default() };
        let kubelet = Arc::new(Kubelet::new(&settings).expect("a socket is set"));
        let (container, stop) = (container("research", "llama-0", None), Arc::new(AtomicBool::new(false)));
        let (asked, stopped) = (Arc::clone(&kubelet), Arc::clone(&stop));
        let runs = thread::spawn(move || asked.run(&highwater_core::clock::Manual::at(7), &stopped, &|_| {}));
        assert_eq!(kubelet.gpus_of(&container, 5, 7), None);
        while kubelet.is_up().is_none() {
            thread::yield_now();
        }
        assert_eq!((kubelet.is_up(), kubelet.listed.load().is_none()), (Some(false), true));
        stop.store(true, Ordering::SeqCst);
        runs.thread().unpark();
        runs.join().expect("it ends");
    }
}
