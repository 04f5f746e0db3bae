//! A job in a pod names no GPU. It is joined with the GPU that the kubelet gave its container. The kubelet's service is
//! Kubernetes' own package over Google's gRPC (`tests/kubelet`); there is no cluster behind it.

use crate::control_group::ControlGroup;
use crate::daemon::Daemon;
use crate::process::Process;
use crate::tools;
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long it may take to find a GPU on a busy machine. The daemon asks the kubelet at most once a second.
const WITHIN: Duration = Duration::from_secs(20);

/// The kubelet of a node, and the pods that it lists.
struct Node {
    program: PathBuf,
    folder: TempDir,
}

impl Node {
    /// `None` if the kubelet's service is not installed, which is reported.
    fn new() -> Option<Self> {
        let program = tools::find("kubelet-podresources")?;
        Some(Self { program, folder: tempfile::tempdir().expect("a folder") })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("kubelet.sock")
    }

    /// Sets the pods: namespace and name, container, its devices.
    fn set(&self, pods: &[(&str, &str, &str, &[String])]) {
        let pod = |(namespace, name, container, devices): &(&str, &str, &str, &[String])| {
            json!({"namespace": namespace, "name": name, "containers": [
                {"name": "sidecar"},
                {"name": container, "cpuIds": ["3", "4"], "devices": [
                    {"resourceName": "nvidia.com/gpu", "deviceIds": devices, "topology": {"nodes": [{"ID": "1"}]}},
                    {"resourceName": "rdma/hca", "deviceIds": ["0", "1"]},
                ]},
            ]})
        };
        self.set_resources(&json!(pods.iter().map(pod).collect::<Vec<_>>()));
    }

    /// Sets the pods as Kubernetes' messages in JSON.
    fn set_resources(&self, pods: &Value) {
        let text = json!({"podResources": pods}).to_string();
        // Replaced atomically, since the kubelet may be reading it.
        std::fs::write(self.folder.path().join("new"), text).expect("written");
        std::fs::rename(self.folder.path().join("new"), self.file()).expect("renamed");
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("pods.json")
    }

    fn start(&self) -> Process {
        let mut command = Command::new(&self.program);
        command.arg(self.socket()).arg(self.file());
        let process = Process::start(command);
        process.wait_for(WITHIN, "line `serving`", |line| (line == "serving").then_some(()));
        process
    }
}

fn daemon(socket: &Path) -> Daemon {
    let socket = format!("kubelet.socket={}", socket.display());
    Daemon::start(&["serve", "--source", "sim:demo", "--set", &socket]).ready()
}

fn wait_until(daemon: &Daemon, reached: impl Fn() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < WITHIN, "{}", daemon.printed());
        std::thread::yield_now();
    }
}

fn json_of(daemon: &Daemon, path: &str) -> Value {
    serde_json::from_str(&daemon.get(path)).expect("JSON")
}

/// The UUIDs of the node's GPUs.
fn uuids(daemon: &Daemon) -> Vec<String> {
    let gpus = json_of(daemon, "/api/v1/gpus");
    let uuid = |gpu: &Value| gpu["uuid"].as_str().expect("a UUID").to_owned();
    gpus["gpus"].as_array().expect("GPUs").iter().map(uuid).collect()
}

/// A begin with what a pod knows about itself: OpenTelemetry's attributes, from the downward API.
fn begin(job: &str, rank: u32, namespace: &str, pod: &str, more: &Value) -> Value {
    let mut attributes = json!({"k8s.namespace.name": namespace, "k8s.pod.name": pod});
    for (name, value) in more.as_object().into_iter().flatten() {
        attributes[name] = value.clone();
    }
    json!({"event": "begin", "name": "forward", "job": job, "rank": rank, "attributes": attributes})
}

fn post(daemon: &Daemon, event: &Value) {
    let (status, answer) = daemon.post("/api/v1/annotations", event);
    assert_eq!(status, 200, "{answer}");
}

/// Sends marks of a rank, without any attributes, until its GPUs are known; returns their UUIDs.
fn found(daemon: &Daemon, job: &str, rank: u32) -> Value {
    let begun = Instant::now();
    loop {
        post(daemon, &json!({"event": "mark", "name": "here", "job": job, "rank": rank}));
        let jobs = json_of(daemon, "/api/v1/jobs");
        let ranks = jobs["jobs"].as_array().into_iter().flatten().filter(|entry| entry["job"] == job);
        let ranks = ranks.flat_map(|entry| entry["ranks"].as_array().into_iter().flatten());
        let gpus = ranks.filter(|entry| entry["rank"] == rank).map(|entry| entry["gpus"].clone()).next();
        if gpus.as_ref().is_some_and(|gpus| *gpus != json!([])) {
            return gpus.expect("there are some");
        }
        assert!(begun.elapsed() < WITHIN, "rank {rank} of {job} has no GPU: {jobs}\n{}", daemon.printed());
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_job_in_a_pod_is_joined_with_the_gpus_of_its_container() {
    let Some(node) = Node::new() else { return };
    let daemon = daemon(&node.socket());
    let gpus = uuids(&daemon);
    node.set(&[
        ("research", "one", "main", &gpus[3..]),
        // Unordered, as device plugins list them, and shared.
        ("research", "two", "main", &[gpus[2].clone(), format!("{}::4", gpus[1])]),
    ]);
    let kubelet = node.start();
    post(&daemon, &begin("one", 0, "research", "one", &json!({"CUDA_VISIBLE_DEVICES": "0"})));
    for rank in [0, 1] {
        post(&daemon, &begin("two", rank, "research", "two", &json!({"LOCAL_RANK": rank})));
    }
    assert_eq!(found(&daemon, "one", 0), json!([gpus[3]]), "its first device, which is the node's fourth");
    assert_eq!(found(&daemon, "two", 1), json!([gpus[2]]));
    // What was found for rank 1, which began to look later, applies to rank 0 from its next event on.
    post(&daemon, &json!({"event": "end", "name": "forward", "job": "two"}));
    let gpu = || json_of(&daemon, "/api/v1/jobs/two/phases")["phases"][0]["gpus"][0].clone();
    wait_until(&daemon, || gpu()["peak_bytes"].is_u64());
    assert_eq!(gpu()["uuid"], json!(gpus[1]));
    // An event of a rank whose GPU is known causes no request.
    let lists = || kubelet.printed().matches("list").count();
    let (before, begun) = (lists(), Instant::now());
    for _ in 0..1_000 {
        post(&daemon, &json!({"event": "mark", "name": "here", "job": "one"}));
    }
    // It is asked each five seconds anyway.
    let polls = 1 + usize::try_from(begun.elapsed().as_secs() / 5).expect("few");
    assert!(lists() <= before + polls, "{} lists in {:?}", lists() - before, begun.elapsed());
}

/// What the metric says of pods: the index of the GPU, namespace, pod and container.
fn pods_of_gpus(daemon: &Daemon) -> Vec<[String; 4]> {
    let metrics = daemon.get("/metrics");
    let series = metrics.lines().filter(|line| line.starts_with("highwater_gpu_pod_info{"));
    let label = |line: &str, name: &str| {
        let rest = line.split(&format!("{name}=\"")).nth(1).expect("a label");
        rest.split('"').next().expect("its end").to_owned()
    };
    let mut all: Vec<_> =
        series.map(|line| ["gpu", "namespace", "pod", "container"].map(|name| label(line, name))).collect();
    all.sort();
    all
}

/// A pod that sends no marks is named all the same: each share of a GPU, whatever the device plugin calls the GPU.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_gpus_pods_are_named_without_marks_within_one_list_and_gone_within_one() {
    let Some(node) = Node::new() else { return };
    let daemon = daemon(&node.socket());
    let gpus = uuids(&daemon);
    let given = |name: &str, id: String| json!({"name": name, "devices": [{"resourceName": "nvidia.com/gpu", "deviceIds": [id]}]});
    let claim = |device: &str| {
        json!({"name": "main", "dynamicResources": [{"claimName": "c", "claimNamespace": "b",
        "claimResources": [{"driverName": "gpu.nvidia.com", "poolName": "n", "deviceName": device}]}]})
    };
    let pod = |namespace: &str, name: &str, containers: Value| json!({"namespace": namespace, "name": name, "containers": containers});
    let all = json!([
        pod("a", "whole", json!([given("main", gpus[0].clone()), {"name": "sidecar"}])),
        pod("a", "shared", json!([given("main", format!("{}::0", gpus[1]))])),
        pod("b", "shared", json!([given("main", format!("{}::1", gpus[1])), given("other", gpus[2].clone())])),
        pod("b", "gke", json!([given("main", "nvidia2/vgpu1".to_owned())])),
        pod("b", "claims", json!([claim("gpu-3")])),
        pod("b", "none", json!([{"name": "main"}])),
    ]);
    node.set_resources(&all);
    assert_eq!(pods_of_gpus(&daemon), Vec::<[String; 4]>::new());
    let kubelet = node.start();
    let expected = [
        ["0", "a", "whole", "main"],
        ["1", "a", "shared", "main"],
        ["1", "b", "shared", "main"],
        ["2", "b", "gke", "main"],
        ["2", "b", "shared", "other"],
        ["3", "b", "claims", "main"],
    ];
    wait_until(&daemon, || pods_of_gpus(&daemon) == expected.map(|row| row.map(str::to_owned)));
    assert!(daemon.get("/metrics").contains("\nhighwater_kubelet_up 1\n"));
    // The simulated processes are the daemon itself, which is in no container; in the root of all control groups that is not known.
    let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", daemon.pid())).expect("its control groups");
    let none = cgroups.lines().any(|line| !line.ends_with(":/")).then_some(0);
    let row = json!([{"namespace": "b", "pod": "claims", "container": "main", "used_bytes": none}]);
    wait_until(&daemon, || json_of(&daemon, "/api/v1/gpus")["gpus"][3]["pods"] == row);
    let of_gpu = |name: &str, labels: &str| {
        let series = format!("highwater_{name}{{gpu=\"3\",uuid=\"{}\"{labels}}} ", gpus[3]);
        daemon.get("/metrics").lines().find_map(|line| line.strip_prefix(&series)?.parse::<f64>().ok())
    };
    let labels = ",namespace=\"b\",pod=\"claims\",container=\"main\"";
    assert_eq!(of_gpu("pod_gpu_memory_used_bytes", labels), none.map(f64::from));
    // The daemon's processes hold gigabytes from the first step on.
    let outside = || of_gpu("gpu_memory_outside_workloads_bytes", "");
    match none {
        Some(_) => wait_until(&daemon, || outside().is_some_and(|rest| rest > 1e9)),
        None => assert_eq!(outside(), None),
    }
    // One ends.
    let lists = || kubelet.printed().matches("list").count();
    node.set_resources(&json!([all[0], all[4]]));
    let before = lists();
    wait_until(&daemon, || lists() > before);
    wait_until(&daemon, || pods_of_gpus(&daemon).len() == 2);
    assert!(lists() <= before + 2, "gone with the first list that begins after its end");
    // While the kubelet restarts, what it listed last is shown, and that it is away.
    drop(kubelet);
    wait_until(&daemon, || daemon.get("/metrics").contains("\nhighwater_kubelet_up 0\n"));
    assert_eq!(pods_of_gpus(&daemon).len(), 2);
    std::fs::remove_file(node.socket()).ok();
    node.set_resources(&json!([all[1]]));
    let _kubelet = node.start();
    wait_until(&daemon, || pods_of_gpus(&daemon).iter().map(|row| &*row[2]).eq(["shared"]));
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_kubelet_that_is_not_there_is_reported_once_and_found_when_it_comes() {
    let Some(node) = Node::new() else { return };
    let daemon = daemon(&node.socket());
    let gpus = uuids(&daemon);
    post(&daemon, &begin("late", 0, "research", "late", &json!({"CUDA_VISIBLE_DEVICES": "0"})));
    wait_until(&daemon, || daemon.printed().contains("cannot read the GPUs of pods"));
    assert!(daemon.printed().contains(&node.socket().display().to_string()), "{}", daemon.printed());
    // The kubelet starts, and does not know the pod at first.
    node.set(&[("elsewhere", "late", "main", &gpus[..1])]);
    let kubelet = node.start();
    wait_until(&daemon, || {
        post(&daemon, &json!({"event": "mark", "name": "here", "job": "late"}));
        kubelet.printed().contains("list")
    });
    node.set(&[("elsewhere", "late", "main", &gpus[..1]), ("research", "late", "main", &gpus[2..3])]);
    assert_eq!(found(&daemon, "late", 0), json!([gpus[2]]));
    wait_until(&daemon, || daemon.printed().contains("the kubelet reports the GPUs"));
    let printed = daemon.printed();
    let before = printed.split("the kubelet reports the GPUs").next().unwrap_or_default();
    assert_eq!(before.matches("cannot read the GPUs of pods").count(), 1, "{printed}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_pod_that_comes_again_with_another_gpu_is_not_taken_for_the_one_before() {
    let Some(node) = Node::new() else { return };
    let daemon = daemon(&node.socket());
    let gpus = uuids(&daemon);
    node.set(&[("research", "worker-0", "main", &gpus[..1])]);
    let _kubelet = node.start();
    post(&daemon, &begin("first", 0, "research", "worker-0", &json!({"k8s.pod.uid": "a"})));
    assert_eq!(found(&daemon, "first", 0), json!([gpus[0]]));
    node.set(&[("research", "worker-0", "main", &gpus[1..2]), ("research", "worker-x", "main", &gpus[2..3])]);
    post(&daemon, &begin("second", 0, "research", "worker-0", &json!({})));
    assert_eq!(found(&daemon, "second", 0), json!([gpus[1]]), "another job in the pod that has come");
    post(&daemon, &begin("first", 0, "research", "worker-0", &json!({"k8s.pod.uid": "b"})));
    assert_eq!(found(&daemon, "first", 0), json!([gpus[1]]), "the same rank, in the pod that has come");
    post(&daemon, &begin("first", 0, "research", "worker-x", &json!({})));
    assert_eq!(found(&daemon, "first", 0), json!([gpus[2]]), "the same rank, in another pod");
    post(&daemon, &json!({"event": "mark", "name": "here", "job": "first", "gpu": 3}));
    post(&daemon, &begin("first", 0, "research", "worker-0", &json!({})));
    assert_eq!(found(&daemon, "first", 0), json!([gpus[3]]), "a GPU that the rank names takes precedence");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn an_index_of_a_sender_whose_container_is_not_known_shows_nothing() {
    let Some(node) = Node::new() else { return };
    let daemon = daemon(&node.socket());
    let gpus = uuids(&daemon);
    node.set(&[("research", "one", "main", &gpus[2..3])]);
    let _kubelet = node.start();
    let entry = |devices: &str| json!({"event": "begin", "name": "forward", "job": "far", "attributes": {"CUDA_VISIBLE_DEVICES": devices}});
    post(&daemon, &entry("0"));
    let without = || {
        let metrics = daemon.metrics();
        let line = metrics.lines().find(|line| line.contains("accepted_without_gpu")).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    assert_eq!(without(), Some(1.0));
    // The sender names its pod later, and gets its GPU.
    post(&daemon, &begin("far", 0, "research", "one", &json!({})));
    assert_eq!(found(&daemon, "far", 0), json!([gpus[2]]));
}

/// Sends two steps at once when it starts, without a name for its job, as a pod's first program does; goes on to send
/// one when it reads a line, and ends with its input.
const EARLY: &str = r#"
import json, socket, sys
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.connect(sys.argv[1])
def step(number):
    for event in ("begin", "end"):
        sender.send(json.dumps({"event": event, "kind": "step", "step": number, "gpu": 0}).encode())
step(0)
step(1)
print("sent", flush=True)
for number, line in enumerate(sys.stdin, 2):
    step(number)
"#;

/// The kubelet links a container's log only once the container runs. The test configures a kubelet that does not exist,
/// because senders are looked up in pods only if one is configured.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_pod_that_marks_before_its_link_is_there_loses_no_mark_and_ends_with_its_process() {
    let id = format!("{:064x}", std::process::id());
    let Some(group) = ControlGroup::new(&format!("cri-containerd-{id}.scope")) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let settings = [
        format!("kubelet.socket={}", folder.path().join("none.sock").display()),
        format!("kubelet.container_logs={}", folder.path().display()),
    ];
    let scenario = folder.path().join("one.toml");
    std::fs::write(&scenario, "[[gpus]]\n").expect("written");
    let source = format!("sim:{}", scenario.display());
    let daemon = Daemon::start(&["serve", "--source", &source, "--set", &settings[0], "--set", &settings[1]]).ready();
    let mut command = group.command("python3", &["-c", EARLY, &daemon.socket().display().to_string()]);
    let mut job = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3");
    let mut says = BufReader::new(job.stdout.take().expect("piped"));
    says.read_line(&mut String::new()).expect("it has sent");
    let steps = || {
        let metrics = daemon.metrics();
        let of_pod = "highwater_job_steps_total{training_job=\"research/llama-0\"";
        let line = metrics.lines().find(|line| line.starts_with(of_pod) && line.contains("namespace=\"research\""));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    assert_eq!(steps(), None, "it is not known whose they are");
    std::fs::write(folder.path().join(format!("llama-0_research_trainer-{id}.log")), "").expect("linked");
    wait_until(&daemon, || steps() == Some(2.0));
    let mut input = job.stdin.take().expect("piped");
    writeln!(input, "one more").expect("it reads");
    wait_until(&daemon, || steps() == Some(3.0));
    drop(input);
    assert!(job.wait().expect("it ends").success());
    wait_until(&daemon, || {
        let job = json_of(&daemon, "/api/v1/jobs/research%2Fllama-0");
        job["ranks"][0]["exited_unix_nano"].is_i64()
    });
    let metrics = daemon.metrics();
    let refused = |reason: &str| metrics.contains(&format!("highwater_annotations_total{{outcome=\"{reason}\"}} 0"));
    assert!(["malformed", "not_owner"].into_iter().all(refused), "{metrics}");
}
