//! The cluster of one node, and what a test does in it.

use crate::buildah::Buildah;
use crate::fake_nvml;
use crate::process::{Process, said};
use crate::tools;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The pods' image, with busybox and the program that marks steps.
const PODS: &str = "localhost/highwater-test-pause:latest";
const IMAGE: &str = "localhost/highwater-test:latest";
/// How long the cluster may take to start, on a busy machine.
const START: Duration = Duration::from_secs(240);

/// A running cluster, which ends when it is dropped.
pub struct Cluster {
    process: Process,
    /// The process whose namespaces are the cluster's.
    inside: String,
    program: PathBuf,
    helm: PathBuf,
    folder: TempDir,
}

/// A pod whose containers do nothing, or mark steps.
pub struct Pod {
    namespace: String,
    name: String,
    job: Option<String>,
    containers: Vec<(String, Option<String>)>,
}

impl Pod {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned(), job: None, containers: Vec::new() }
    }

    /// One more container, which asks for one device of this resource.
    pub fn container(mut self, name: &str, resource: Option<&str>) -> Self {
        self.containers.push((name.to_owned(), resource.map(str::to_owned)));
        self
    }

    /// Its containers mark steps of this job.
    pub fn marks(mut self, job: &str) -> Self {
        self.job = Some(job.to_owned());
        self
    }

    fn object(&self) -> Value {
        let container = |(name, resource): &(String, Option<String>)| {
            // The words after the script are in the process's command line, by which a test finds it.
            let word = format!("{}-{}-{name}", self.namespace, self.name);
            let idle = json!(["/bin/sh", "-c", "while true; do sleep 60; done", word]);
            let command =
                self.job.as_ref().map_or(idle, |job| json!(["/bin/mark", "/run/highwater/annotations.sock", job, "0"]));
            let limits = resource.as_ref().map_or(json!({}), |resource| json!({resource: 1}));
            let mounts = json!([{"name": "run", "mountPath": "/run/highwater", "readOnly": true}]);
            json!({"name": name, "image": PODS, "imagePullPolicy": "Never", "command": command, "resources": {"limits": limits}, "volumeMounts": mounts})
        };
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": self.namespace, "name": self.name},
            "spec": {
                "containers": self.containers.iter().map(container).collect::<Vec<_>>(),
                "volumes": [{"name": "run", "hostPath": {"path": "/run/highwater", "type": "DirectoryOrCreate"}}],
                "automountServiceAccountToken": false,
                "dnsPolicy": "Default",
            },
        })
    }
}

/// The node's GPUs with nothing on them, as the fake NVML has them; GPU 2 has two MIG instances.
pub fn gpus() -> Vec<Value> {
    let gpu = |number: usize| json!({"uuid": format!("GPU-{number}"), "used": 0, "processes": []});
    let mut gpus: Vec<Value> = (0..4).map(gpu).collect();
    let instance = |uuid: &str, number: u32| {
        json!({"uuid": uuid, "name": "NVIDIA H200 MIG 1g.18gb", "total": 18_u64 << 30, "gpu_instance": number, "compute_instance": 0,
               "gpu_slices": 1, "compute_slices": 1, "used": 0, "processes": []})
    };
    gpus[2]["mig"] = json!([instance("MIG-a", 7), instance("MIG-b", 8)]);
    gpus
}

impl Cluster {
    /// A cluster whose node has these devices: a line for each resource, with the names of its devices. `None`, or a panic, as in [`tools::missing`], if none can run here.
    pub fn start(devices: &str) -> Option<Self> {
        let installed = tools::root().join(format!("target/tools/kubernetes-{}", tools::pinned("KUBERNETES_VERSION")));
        let program = installed.join("kubernetes");
        if !program.is_file() {
            tools::missing("Kubernetes is not installed (`make test-cluster` does)");
            return None;
        }
        let (buildah, helm) = (Buildah::find()?, tools::find("helm")?);
        let folder = tempfile::tempdir().expect("a folder");
        let begun = Instant::now();
        images(&buildah, &installed, folder.path());
        std::fs::create_dir(folder.path().join("fake")).expect("made");
        std::fs::copy(fake_nvml::library(), folder.path().join("fake/libnvml_fake.so")).expect("copied");
        std::fs::write(folder.path().join("devices"), devices).expect("written");
        eprintln!("images made in {:.1} s", begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let mut command = Command::new(tools::root().join("tests/kubernetes/cluster"));
        command.arg(folder.path().join("cluster")).arg(folder.path().join("devices"));
        let process = Process::start(command);
        let inside = process.wait_for(START, "line `inside`", |line| line.strip_prefix("inside ").map(str::to_owned));
        process.wait_for(START, "line `ready`", |line| (line == "ready").then_some(()));
        let cluster = Self { process, inside, program, helm, folder };
        cluster.set_gpus(&gpus());
        cluster.kubectl(&["label", "node", "node-1", "nvidia.com/gpu.present=true"]);
        eprintln!("cluster ready in {:.1} s", begun.elapsed().as_secs_f64());
        Some(cluster)
    }

    /// The folder of the fake NVML on the node.
    pub fn fake_folder(&self) -> PathBuf {
        self.folder.path().join("fake")
    }

    /// From now on the driver answers this.
    pub fn set_gpus(&self, gpus: &[Value]) {
        let next = self.fake_folder().join("next");
        std::fs::write(&next, json!({"gpus": gpus}).to_string()).expect("written");
        std::fs::rename(next, self.fake_folder().join("libnvml_fake.so.json")).expect("renamed");
    }

    /// A program in the cluster's namespaces.
    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.inside, "--mount", "--net", "--ipc", "--uts", "--"]);
        command.arg(program).args(arguments).env("KUBECONFIG", self.folder.path().join("cluster/admin.conf"));
        command
    }

    fn run(&self, program: &Path, arguments: &[&str]) -> Output {
        self.command(program, arguments).output().expect("nsenter starts")
    }

    fn checked(&self, program: &Path, arguments: &[&str]) -> String {
        let output = self.run(program, arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// What kubectl prints.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.checked(&self.program, &[&["kubectl"], arguments].concat())
    }

    /// Creates pods.
    pub fn apply(&self, pods: &[Pod]) {
        let list =
            json!({"apiVersion": "v1", "kind": "List", "items": pods.iter().map(Pod::object).collect::<Vec<_>>()});
        let file = self.folder.path().join("pods.json");
        std::fs::write(&file, list.to_string()).expect("written");
        self.kubectl(&["apply", "--filename", &file.to_string_lossy()]);
    }

    fn with_values(&self, arguments: &[&str], values: &Value) -> Output {
        let file = self.folder.path().join("values.json");
        std::fs::write(&file, values.to_string()).expect("written");
        let (chart, values) = (tools::root().join("helm/highwater"), file.to_string_lossy().into_owned());
        let chart = chart.to_string_lossy();
        // After the release's name.
        let (release, rest) = arguments.split_at(2);
        self.run(&self.helm, &[release, &[&*chart, "--values", &values], rest].concat())
    }

    /// Installs or upgrades the chart.
    pub fn helm(&self, arguments: &[&str], values: &Value) {
        let output = self.with_values(arguments, values);
        if !output.status.success() {
            let pods = self.kubectl(&["describe", "pods", "--all-namespaces"]);
            panic!("{arguments:?}: {}\n{pods}", said(&output));
        }
    }

    /// What Helm says when it refuses.
    pub fn helm_refuses(&self, arguments: &[&str], values: &Value) -> String {
        let output = self.with_values(arguments, values);
        assert!(!output.status.success(), "{arguments:?}: {}", said(&output));
        said(&output)
    }

    /// Helm without the chart.
    pub fn helm_plain(&self, arguments: &[&str]) {
        self.checked(&self.helm, arguments);
    }

    /// The names of a namespace's pods that are to run.
    pub fn pods_of(&self, namespace: &str) -> Vec<String> {
        let list: Value =
            serde_json::from_str(&self.kubectl(&["get", "pods", "--namespace", namespace, "--output", "json"]))
                .expect("JSON");
        let running =
            list["items"].as_array().into_iter().flatten().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        running.map(|pod| pod["metadata"]["name"].as_str().expect("a name").to_owned()).collect()
    }

    /// The address of the daemon, once it runs.
    pub fn address(&self) -> Option<String> {
        let pods = [
            "get",
            "pods",
            "--namespace",
            "monitoring",
            "--output",
            "jsonpath={range .items[?(@.status.phase==\"Running\")]}{.status.podIP}{\"\\n\"}{end}",
        ];
        let address = self.kubectl(&pods);
        let address = address.lines().next_back().filter(|address| !address.is_empty())?;
        Some(format!("http://{address}:10450"))
    }

    /// What the daemon answers; `None` while there is none.
    pub fn get(&self, path: &str) -> Option<String> {
        let url = format!("{}{path}", self.address()?);
        let output = self.run(Path::new("curl"), &["--silent", "--fail", "--max-time", "10", &url]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Its metrics.
    pub fn metrics(&self) -> Option<String> {
        self.get("/metrics")
    }

    /// Ends all pods of a namespace at once.
    pub fn delete_pods(&self, namespace: &str) {
        self.kubectl(&["delete", "pods", "--all", "--namespace", namespace, "--grace-period=0", "--force"]);
    }

    /// The process of a pod's container, by the word in its command line.
    pub fn pid(&self, word: &str) -> u32 {
        let found = self.checked(Path::new("pgrep"), &["--full", "--newest", &format!(" {word}$")]);
        found.trim().parse().expect("a process")
    }

    /// Ends the kubelet at once; another one is started.
    pub fn restart_kubelet(&self) {
        let file = self.folder.path().join("cluster/kubelet.pid");
        let pid = std::fs::read_to_string(&file).expect("its process");
        self.checked(Path::new("kill"), &["-KILL", pid.trim()]);
        std::fs::remove_file(file).expect("removed");
    }
}

/// Ends the cluster, before its folder goes; after a failure with what its reader looks for first.
impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.run(Path::new("sh"), &["-c", "tail -n 50 /var/log/pods/monitoring_*/highwater/*.log"]);
            let metrics = self.metrics().unwrap_or_default();
            let of_pods = metrics
                .lines()
                .filter(|line| line.contains("pod_") || line.contains("_pods_") || line.contains("kubelet"));
            let gpus = self.get("/api/v1/gpus").unwrap_or_default();
            eprintln!("{}\n{}\n{gpus}", said(&log), of_pods.collect::<Vec<_>>().join("\n"));
        }
        self.process.terminate();
    }
}

/// Writes the images that the node's container runtime is to have.
fn images(buildah: &Buildah, installed: &Path, folder: &Path) {
    let images = folder.join("cluster/images");
    std::fs::create_dir_all(&images).expect("made");
    buildah.build("prebuilt", &[], IMAGE).save(&images.join("highwater.tar"));
    let context = folder.join("pods");
    std::fs::create_dir_all(context.join("bin")).expect("made");
    std::fs::copy(installed.join("bin/busybox"), context.join("bin/busybox")).expect("busybox");
    std::fs::copy(installed.join("mark"), context.join("bin/mark")).expect("the program that marks");
    for name in ["sh", "sleep"] {
        std::os::unix::fs::symlink("busybox", context.join("bin").join(name)).expect("a link");
    }
    std::fs::write(
        context.join("Dockerfile"),
        "FROM scratch\nCOPY bin /bin\nENTRYPOINT [\"/bin/sleep\", \"infinity\"]\n",
    )
    .expect("written");
    buildah.build_in(&context, &[], PODS).save(&images.join("pods.tar"));
    std::fs::remove_dir_all(context).expect("removed");
}
