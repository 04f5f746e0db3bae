//! The chart, and whose each GPU is, in a real Kubernetes of one node: API server, kubelet, containerd, a device plugin. `make
//! test-cluster` installs it, and runs this as root; `tests/kubernetes` starts it in namespaces of its own.
//!
//! The GPUs are the fake NVML's, whose control file a test writes: its processes are those of the pods. Not covered: claims of dynamic
//! resource allocation, control groups of version 2 where the machine has version 1 or the other way round, the enforcement of
//! network policies, NVIDIA's runtime.

mod node;

use crate::process::eventually;
use node::{Cluster, Pod};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long anything may take on a busy machine.
const WITHIN: Duration = Duration::from_secs(120);
const GIB: u64 = 1 << 30;

/// The parts follow one another in one cluster, because it takes a quarter of a minute to start.
#[test]
#[ignore = "needs a peer: make test-cluster"]
fn pods_are_named_in_a_real_cluster() {
    let shares: Vec<String> = (0..60).map(|share| format!("GPU-1::{share}")).collect();
    let devices = format!(
        "nvidia.com/gpu GPU-0 GPU-3\nnvidia.com/gpu.shared {}\nnvidia.com/mig-1g.18gb MIG-a MIG-b\n",
        shares.join(" ")
    );
    let Some(cluster) = Cluster::start(&devices) else { return };
    a_namespace_that_forbids_a_profile_keeps_its_pods(&cluster);
    let install = Instant::now();
    cluster.helm(
        &["install", "highwater", "--namespace", "monitoring", "--create-namespace", "--wait"],
        &attribution(&cluster, "15s"),
    );
    eprintln!("installed and ready after {:.1} s", install.elapsed().as_secs_f64());
    every_share_of_every_gpu_is_named_and_its_memory_adds_up(&cluster);
    fifty_pods_at_once_are_named_and_gone(&cluster);
    jobs_of_one_name_in_two_namespaces_are_two(&cluster);
    names_stay_while_the_kubelet_and_the_daemon_restart(&cluster);
    a_driver_upgrade_makes_the_pod_leave(&cluster);
    an_upgrade_replaces_pods_for_a_reason_and_uninstalling_leaves_nothing(&cluster);
}

/// The chart's values with everything that attribution needs, and GPUs that are the fake's.
fn attribution(cluster: &Cluster, silence: &str) -> Value {
    json!({
        "profile": "attribution",
        "image": {"repository": "localhost/highwater-test", "tag": "latest", "pullPolicy": "Never"},
        "config": {"nvml_library": "/fake/libnvml_fake.so", "annotations": {"silence": silence}},
        "extraVolumes": [{"name": "fake", "hostPath": {"path": cluster.fake_folder(), "type": "Directory"}}],
        "extraVolumeMounts": [{"name": "fake", "mountPath": "/fake", "readOnly": true}],
    })
}

/// A namespace that enforces *restricted* admits the default profile, and Helm refuses the other before it ends any pod.
fn a_namespace_that_forbids_a_profile_keeps_its_pods(cluster: &Cluster) {
    cluster.kubectl(&["create", "namespace", "restricted"]);
    cluster.kubectl(&["label", "namespace", "restricted", "pod-security.kubernetes.io/enforce=restricted"]);
    let core = json!({
        "image": {"repository": "localhost/highwater-test", "tag": "latest", "pullPolicy": "Never"},
        "config": {"source": "sim"},
    });
    cluster.helm(&["install", "core", "--namespace", "restricted", "--wait"], &core);
    let before = cluster.pods_of("restricted");
    assert_eq!(before.len(), 1, "{before:?}");
    let refused = cluster.helm_refuses(&["upgrade", "core", "--namespace", "restricted"], &attribution(cluster, "5m"));
    for part in ["restricted", "hostPID", "pod-security.kubernetes.io/enforce=privileged"] {
        assert!(refused.contains(part), "{refused}");
    }
    let misspelt = json!({"config": {"sampling": {"peroid": "2ms"}}});
    let refused = cluster.helm_refuses(&["upgrade", "core", "--namespace", "restricted", "--reuse-values"], &misspelt);
    assert!(refused.contains("peroid"), "{refused}");
    assert_eq!(cluster.pods_of("restricted"), before);
    cluster.helm_plain(&["uninstall", "core", "--namespace", "restricted", "--wait"]);
}

/// The rows of a metric of pods, each as `UUID namespace/pod/container`, and the value.
fn rows(cluster: &Cluster, metric: &str) -> Vec<(String, f64)> {
    let Some(metrics) = cluster.metrics() else { return Vec::new() };
    let start = format!("{metric}{{");
    let label = |line: &str, name: &str| {
        let rest = line.split_once(&format!("{name}=\""));
        rest.and_then(|(_, rest)| rest.split_once('"')).map(|(value, _)| value.to_owned()).unwrap_or_default()
    };
    let row = |line: &str| {
        let [uuid, namespace, pod, container] = ["uuid", "namespace", "pod", "container"].map(|name| label(line, name));
        Some((format!("{uuid} {namespace}/{pod}/{container}"), line.rsplit_once(' ')?.1.parse().ok()?))
    };
    metrics.lines().filter(|line| line.starts_with(&start)).filter_map(row).collect()
}

/// Which pods have which GPU.
fn named(cluster: &Cluster) -> BTreeSet<String> {
    rows(cluster, "highwater_gpu_pod_info").into_iter().map(|(row, _)| row).collect()
}

fn every_share_of_every_gpu_is_named_and_its_memory_adds_up(cluster: &Cluster) {
    for namespace in ["ml", "serving"] {
        cluster.kubectl(&["create", "namespace", namespace]);
    }
    let shared = "nvidia.com/gpu.shared";
    let begun = Instant::now();
    cluster.apply(&[
        Pod::new("ml", "whole").container("trainer", Some("nvidia.com/gpu")).container("sidecar", None),
        Pod::new("ml", "half").container("main", Some(shared)),
        Pod::new("serving", "half").container("main", Some(shared)),
        Pod::new("ml", "slice").container("main", Some("nvidia.com/mig-1g.18gb")),
        // It takes memory of a GPU that it was not given.
        Pod::new("serving", "stowaway").container("main", None),
    ]);
    let slice = eventually(WITHIN, "the pods' GPUs", || {
        let named = named(cluster);
        let slice = named.iter().find(|row| row.ends_with(" ml/slice/main"))?.split(' ').next()?.to_owned();
        let gpu = named.iter().find(|row| row.ends_with(" ml/whole/trainer"))?.split(' ').next()?.to_owned();
        let expected = [
            format!("{gpu} ml/whole/trainer"),
            "GPU-1 ml/half/main".to_owned(),
            "GPU-1 serving/half/main".to_owned(),
            format!("{slice} ml/slice/main"),
        ];
        (named == expected.into_iter().collect()).then_some((gpu, slice))
    });
    eprintln!("5 pods named {:.1} s after they were created", begun.elapsed().as_secs_f64());
    let (whole, slice) = slice;
    let pid = |namespace: &str, pod: &str, container: &str| cluster.pid(&format!("{namespace}-{pod}-{container}"));
    let process = |pid: u32, gib: u64| json!({"pid": pid, "used": gib * GIB});
    let stowaway = pid("serving", "stowaway", "main");
    let mut gpus = node::gpus();
    let number = usize::from(whole == "GPU-3") * 3;
    gpus[number]["used"] = json!(41 * GIB);
    gpus[number]["processes"] = json!([process(pid("ml", "whole", "trainer"), 30), process(stowaway, 10)]);
    gpus[1]["used"] = json!(60 * GIB);
    gpus[1]["processes"] = json!([process(pid("ml", "half", "main"), 20), process(pid("serving", "half", "main"), 39)]);
    let instance = usize::from(slice == "MIG-b");
    gpus[2]["mig"][instance]["used"] = json!(9 * GIB);
    gpus[2]["mig"][instance]["processes"] = json!([process(pid("ml", "slice", "main"), 9)]);
    cluster.set_gpus(&gpus);
    let expected = [
        (whole.as_str(), "ml/whole/trainer", 30),
        (whole.as_str(), "serving/stowaway/main", 10),
        ("GPU-1", "ml/half/main", 20),
        ("GPU-1", "serving/half/main", 39),
        (slice.as_str(), "ml/slice/main", 9),
    ];
    let expected: BTreeSet<(String, u64)> =
        expected.iter().map(|(uuid, pod, gib)| (format!("{uuid} {pod}"), gib * GIB)).collect();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of one GPU")]
    let held = || -> BTreeSet<(String, u64)> {
        let held = rows(cluster, "highwater_pod_gpu_memory_used_bytes").into_iter();
        held.map(|(row, bytes)| (row, bytes as u64)).collect()
    };
    eventually(WITHIN, "each pod's memory", || (held() == expected).then_some(()));
    // What pods hold, and what none holds, is what is in use.
    let rest = rows(cluster, "highwater_gpu_memory_outside_workloads_bytes");
    #[allow(clippy::cast_precision_loss, reason = "bytes of one GPU")]
    for (uuid, used) in [(&*whole, 41 * GIB), ("GPU-1", 60 * GIB), (&*slice, 9 * GIB)] {
        let of_pods: u64 = expected.iter().filter(|(row, _)| row.starts_with(uuid)).map(|(_, bytes)| bytes).sum();
        let outside = rest.iter().find(|(row, _)| row.split(' ').next() == Some(uuid)).expect(uuid).1;
        let apart = (of_pods as f64 + outside - used as f64).abs() / used as f64;
        assert!(apart < 0.01, "{uuid}: {of_pods} + {outside} of {used}");
    }
    // What is found of a GPU says whose it is, the pod that holds most first.
    gpus[number]["used"] = json!(139 * GIB);
    cluster.set_gpus(&gpus);
    eventually(WITHIN, "a finding with its pods", || {
        let findings: Value = serde_json::from_str(&cluster.get("/api/v1/findings")?).ok()?;
        let found = findings["findings"].as_array()?.iter().find(|found| found["finding"] == "low_headroom")?;
        let pods: Vec<&str> = found["pods"].as_array()?.iter().filter_map(|pod| pod["pod"].as_str()).collect();
        (found["uuid"] == *whole && pods == ["whole", "stowaway"]).then_some(())
    });
    // One that ended is gone with the next list, also from what holds memory.
    cluster.kubectl(&["delete", "pod", "--namespace", "serving", "half", "--grace-period=0", "--force"]);
    let begun = Instant::now();
    gpus[1]["processes"] = json!([process(pid("ml", "half", "main"), 20)]);
    gpus[1]["used"] = json!(21 * GIB);
    cluster.set_gpus(&gpus);
    eventually(WITHIN, "the end of a pod", || (!named(cluster).contains("GPU-1 serving/half/main")).then_some(()));
    eprintln!("a deleted pod is gone after {:.1} s", begun.elapsed().as_secs_f64());
    ["ml", "serving"].into_iter().for_each(|namespace| cluster.delete_pods(namespace));
    cluster.set_gpus(&node::gpus());
    eventually(WITHIN, "the end of all pods", || named(cluster).is_empty().then_some(()));
}

fn fifty_pods_at_once_are_named_and_gone(cluster: &Cluster) {
    let pods: Vec<Pod> = (0..50)
        .map(|nth| Pod::new("ml", &format!("many-{nth}")).container("main", Some("nvidia.com/gpu.shared")))
        .collect();
    let begun = Instant::now();
    cluster.apply(&pods);
    let expected: BTreeSet<String> = (0..50).map(|nth| format!("GPU-1 ml/many-{nth}/main")).collect();
    eventually(WITHIN, "50 pods", || (named(cluster) == expected).then_some(()));
    eprintln!("50 pods named {:.1} s after they were created", begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    cluster.delete_pods("ml");
    eventually(WITHIN, "the end of 50 pods", || named(cluster).is_empty().then_some(()));
    eprintln!("50 deleted pods gone after {:.1} s", begun.elapsed().as_secs_f64());
}

fn jobs_of_one_name_in_two_namespaces_are_two(cluster: &Cluster) {
    cluster.apply(&[
        Pod::new("ml", "train-0").marks("train").container("main", Some("nvidia.com/gpu.shared")),
        Pod::new("serving", "train-0").marks("train").container("main", Some("nvidia.com/gpu")),
    ]);
    let begun = Instant::now();
    eventually(WITHIN, "two jobs with their GPUs", || {
        let jobs: Value = serde_json::from_str(&cluster.get("/api/v1/jobs")?).ok()?;
        let of = |namespace: &str| {
            let all = jobs["jobs"].as_array()?;
            let job = all.iter().find(|job| job["job"] == "train" && job["namespace"] == namespace)?;
            job["ranks"][0]["gpus"][0].as_str().map(str::to_owned)
        };
        let (ml, serving) = (of("ml")?, of("serving")?);
        (ml == "GPU-1" && ["GPU-0", "GPU-3"].contains(&serving.as_str())).then_some(())
    });
    eprintln!("two jobs of one name have their GPUs after {:.1} s", begun.elapsed().as_secs_f64());
    let metrics = cluster.metrics().expect("metrics");
    for namespace in ["ml", "serving"] {
        let series = format!("namespace=\"{namespace}\"");
        let steps =
            metrics.lines().find(|line| line.starts_with("highwater_job_steps_total") && line.contains(&series));
        assert!(steps.is_some(), "{namespace} has steps: {metrics}");
    }
}

fn names_stay_while_the_kubelet_and_the_daemon_restart(cluster: &Cluster) {
    let before = named(cluster);
    assert_eq!(before.len(), 2, "{before:?}");
    cluster.restart_kubelet();
    cluster.apply(&[Pod::new("ml", "after").container("main", Some("nvidia.com/gpu.shared"))]);
    let begun = Instant::now();
    eventually(WITHIN, "a pod that began after the kubelet", || {
        let named = named(cluster);
        assert!(before.is_subset(&named), "{named:?}");
        named.contains("GPU-1 ml/after/main").then_some(())
    });
    eprintln!("a pod is named {:.1} s after the kubelet was restarted", begun.elapsed().as_secs_f64());
    let with_it = named(cluster);
    cluster.delete_pods("monitoring");
    let begun = Instant::now();
    eventually(WITHIN, "the same names from a new daemon", || (named(cluster) == with_it).then_some(()));
    eprintln!("a new daemon has all names {:.1} s after the old one was killed", begun.elapsed().as_secs_f64());
    ["ml", "serving"].into_iter().for_each(|namespace| cluster.delete_pods(namespace));
    eventually(WITHIN, "no pods", || named(cluster).is_empty().then_some(()));
}

/// The GPU operator's label, with another value than "true", asks every client of the driver to leave.
fn a_driver_upgrade_makes_the_pod_leave(cluster: &Cluster) {
    let label = |value: &str| cluster.kubectl(&["label", "node", "node-1", "--overwrite", value]);
    label("nvidia.com/gpu.deploy.client=paused-for-driver-upgrade");
    eventually(WITHIN, "a node without the daemon", || cluster.pods_of("monitoring").is_empty().then_some(()));
    label("nvidia.com/gpu.deploy.client=true");
    eventually(WITHIN, "the daemon", || cluster.metrics().map(drop));
    label("nvidia.com/gpu.deploy.client-");
}

fn an_upgrade_replaces_pods_for_a_reason_and_uninstalling_leaves_nothing(cluster: &Cluster) {
    let upgrade = ["upgrade", "highwater", "--namespace", "monitoring", "--wait"];
    let before = cluster.pods_of("monitoring");
    cluster.helm(&upgrade, &attribution(cluster, "15s"));
    assert_eq!(cluster.pods_of("monitoring"), before, "nothing has changed");
    let mut values = attribution(cluster, "20s");
    values["tests"] = json!({"url": cluster.address().expect("a daemon")});
    cluster.helm(&upgrade, &values);
    eventually(WITHIN, "another pod, because a setting has changed", || {
        let pods = cluster.pods_of("monitoring");
        (pods.len() == 1 && pods != before).then_some(())
    });
    values["tests"] = json!({"url": eventually(WITHIN, "its address", || cluster.address())});
    cluster.helm(&upgrade, &values);
    cluster.helm_plain(&["test", "highwater", "--namespace", "monitoring"]);
    cluster.helm_plain(&["uninstall", "highwater", "--namespace", "monitoring", "--wait"]);
    let kinds = "daemonsets,services,configmaps,serviceaccounts,networkpolicies,pods,secrets";
    let ours = ["--selector", "app.kubernetes.io/instance=highwater", "--output", "name"];
    eventually(WITHIN, "nothing left", || {
        let left = cluster.kubectl(&[&["get", kinds, "--namespace", "monitoring"][..], &ours].concat());
        left.trim().is_empty().then_some(())
    });
}
