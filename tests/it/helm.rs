//! The chart, linted and rendered by a real Helm: with its defaults, with everything on, and with invalid values.
//!
//! Not covered: a cluster. That the daemon accepts the arguments and settings that the chart renders is covered.

use crate::process::said;
use crate::{daemon, tools};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use yaml_rust2::{Yaml, YamlLoader};

/// Turns on everything that is off by default.
const EVERYTHING: &str = r#"
config: {sampling: {period: 2ms}}
annotations: {port: 10452, socket: {hostPath: {enabled: true, path: /run/hw}}, token: {existingSecret: hw-token, key: bearer, namespacesSecret: hw-namespaces}}
health: {port: 10999}
web: {existingSecret: hw-web, key: web.yml}
captures: {mostBytes: 1Gi, hostPath: {enabled: true, path: /var/lib/hw}}
nvidia: {deviceList: volume-mounts}
runtimeClassName: nvidia
priorityClassName: system-node-critical
hostPID: true
kubelet: {enabled: true, podResources: /var/lib/k0s/kubelet/pod-resources}
env: [{name: RUST_LOG, value: debug}]
extraVolumes: [{name: authority, configMap: {name: authority}}]
extraVolumeMounts: [{name: authority, mountPath: /etc/highwater/otlp, readOnly: true}]
podAnnotations: {example.com/team: gpu}
commonLabels: {team: gpu}
serviceMonitor: {enabled: true, namespace: monitoring, labels: {release: kps}, interval: 5s, scrapeTimeout: 4s, scrapeNativeHistograms: true, scrapeClassicHistograms: true, scheme: https, tlsConfig: {insecureSkipVerify: true}}
prometheusRule: {enabled: true, namespace: monitoring, labels: {release: kps}}
dashboards: {enabled: true, annotations: {grafana_folder: GPUs}}
networkPolicy: {from: [{namespaceSelector: {matchLabels: {name: monitoring}}}], annotationsFrom: [{podSelector: {}}]}
"#;

#[test]
#[ignore = "needs a peer: make test-peers"]
fn helm_lint_has_nothing_to_say() {
    let Some(helm) = tools::find("helm") else { return };
    let output = run(Command::new(helm).args(["lint", "--strict"]).arg(chart()));
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn by_default_the_pod_can_do_nothing_but_read_gpus() {
    let Some(objects) = render("") else { return };
    assert_eq!(kinds(&objects), ["DaemonSet", "NetworkPolicy", "Pod", "Service", "ServiceAccount"]);
    let test = one(&objects, "Pod");
    assert_eq!(test["metadata"]["annotations"]["helm.sh/hook"], "test", "the only other pod is that of `helm test`");
    assert_eq!(test["spec"]["securityContext"]["runAsNonRoot"], true);
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["runAsUser"], 65534);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
    assert_eq!(container["securityContext"]["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(pod["automountServiceAccountToken"], false);
    assert_eq!(pod["enableServiceLinks"], false, "a Service's HIGHWATER_PORT must not become a setting");
    for host in ["hostPID", "hostNetwork", "hostIPC"] {
        assert!(pod[host].is_null(), "{host}");
    }
    let volumes = pod["volumes"].as_array().expect("volumes");
    assert!(volumes.iter().all(|volume| volume["hostPath"].is_null()), "no path on the host: {volumes:?}");
    assert!(container["resources"]["limits"]["nvidia.com/gpu"].is_null(), "it takes no GPU from a job");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn by_default_it_runs_where_gpus_are_and_can_be_watched() {
    let Some(objects) = render("") else { return };
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(
        container["image"],
        format!("highwater:{}", env!("CARGO_PKG_VERSION")),
        "the chart's appVersion is the program's"
    );
    assert_eq!(pod["tolerations"], json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]));
    let env = container["env"].as_array().expect("env");
    assert!(env.contains(&json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})), "{env:?}");
    let node = json!({"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}});
    assert!(env.contains(&node), "OTLP's resource names the node: {env:?}");
    assert!(env.contains(&json!({"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"})), "{env:?}");
    assert_eq!(container["livenessProbe"]["httpGet"], json!({"path": "/healthz", "port": "health"}));
    assert_eq!(container["readinessProbe"]["httpGet"], json!({"path": "/readyz", "port": "health"}));
    let ports = json!([{"name": "http", "containerPort": 10450}, {"name": "health", "containerPort": 10451}]);
    assert_eq!(container["ports"], ports);
    let args = container["args"].as_array().expect("args");
    assert!(args.contains(&json!("--set=health.listen=0.0.0.0:10451")), "{args:?}");
    let service = &one(&objects, "Service")["spec"];
    assert_eq!(service["internalTrafficPolicy"], "Local");
    let labels = &one(&objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"];
    for (name, value) in service["selector"].as_object().expect("a selector") {
        assert_eq!(&labels[name], value, "the Service finds the pods");
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn everything_can_be_switched_on() {
    let Some(objects) = render(EVERYTHING) else { return };
    for kind in ["ConfigMap", "NetworkPolicy", "PrometheusRule", "ServiceMonitor"] {
        assert!(kinds(&objects).contains(&kind), "{kind}: {:?}", kinds(&objects));
    }
    assert!(
        objects.iter().all(|object| object["metadata"]["labels"]["team"] == "gpu"),
        "common labels are on every object"
    );
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    assert_eq!((&pod["runtimeClassName"], &pod["hostPID"]), (&json!("nvidia"), &json!(true)));
    let volume =
        |name: &str| pod["volumes"].as_array().into_iter().flatten().find(|volume| volume["name"] == name).cloned();
    // Root can make them, and only root could write into one that is made.
    assert_eq!(volume("run").expect("run")["hostPath"], json!({"path": "/run/hw", "type": "DirectoryOrCreate"}));
    let captures = json!({"path": "/var/lib/hw", "type": "DirectoryOrCreate"});
    assert_eq!(volume("captures").expect("captures")["hostPath"], captures);
    assert_eq!(volume("all-gpus").expect("all-gpus")["hostPath"]["path"], "/dev/null");
    assert_eq!(volume("token").expect("token")["secret"]["items"], json!([{"key": "bearer", "path": "token"}]));
    assert_eq!(volume("authority").expect("authority")["configMap"]["name"], "authority");
    let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts");
    assert!(mounts.iter().any(|mount| mount["mountPath"] == "/etc/highwater/otlp"), "{mounts:?}");
    for mount in mounts {
        assert!(volume(mount["name"].as_str().unwrap_or_default()).is_some(), "{mount} has a volume");
    }
    let monitor = &one(&objects, "ServiceMonitor")["spec"];
    let histograms = [&monitor["scrapeNativeHistograms"], &monitor["scrapeClassicHistograms"]];
    assert_eq!(histograms, [&json!(true), &json!(true)]);
    let endpoint = &monitor["endpoints"][0];
    assert_eq!((&endpoint["interval"], &endpoint["honorLabels"]), (&json!("5s"), &json!(true)));
    assert_eq!((&endpoint["scheme"], &endpoint["tlsConfig"]["insecureSkipVerify"]), (&json!("https"), &json!(true)));
    assert_eq!(volume("web").expect("web")["secret"]["secretName"], "hw-web");
    assert_eq!(endpoint["relabelings"][0]["targetLabel"], "instance", "series outlive the pod");
}

/// The operator sets the label to something else than "true" before it upgrades a driver: the node then has no pod of ours.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn it_leaves_nodes_whose_driver_is_upgraded_whatever_else_the_affinity_wants() {
    let terms = |values: &str| {
        let affinity = one(&render(values)?, "DaemonSet")["spec"]["template"]["spec"]["affinity"].clone();
        Some(affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"].clone())
    };
    let key = "nvidia.com/gpu.deploy.client";
    let (absent, allowed) =
        (json!({"key": key, "operator": "DoesNotExist"}), json!({"key": key, "operator": "In", "values": ["true"]}));
    let Some(alone) = terms("") else { return };
    assert_eq!(alone, json!([{"matchExpressions": [absent]}, {"matchExpressions": [allowed]}]));
    // Terms are alternatives: each of the user's is wanted together with the label.
    let zone = |name: &str| json!({"key": "zone", "operator": "In", "values": [name]});
    let users = format!(
        "{{affinity: {{podAffinity: {{x: 1}}, nodeAffinity: {{preferredDuringSchedulingIgnoredDuringExecution: [], \
         requiredDuringSchedulingIgnoredDuringExecution: {{nodeSelectorTerms: [{{matchExpressions: [{}]}}, {{matchExpressions: [{}]}}]}}}}}}}}",
        zone("a"),
        zone("b")
    );
    let expected: Vec<Value> = ["a", "b"]
        .into_iter()
        .flat_map(|name| [&absent, &allowed].map(|rule| json!({"matchExpressions": [zone(name), rule]})))
        .collect();
    assert_eq!(terms(&users), Some(json!(expected)));
    let Some(objects) = render(&users) else { return };
    let affinity = &one(&objects, "DaemonSet")["spec"]["template"]["spec"]["affinity"];
    assert_eq!(affinity["podAffinity"], json!({"x": 1}));
    for values in [
        "{affinity: {nodeAffinity: null}}",
        "{affinity: null}",
        "{affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [null]}}}}",
    ] {
        assert_eq!(terms(values), Some(alone.clone()), "{values}");
    }
    let Some(none) = render("{driverUpgrades: {label: ''}}") else { return };
    assert!(one(&none, "DaemonSet")["spec"]["template"]["spec"]["affinity"].is_null());
}

/// One value for what attribution needs, and what it gives up.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_profile_turns_on_all_that_attribution_needs() {
    let Some(objects) = render("{profile: attribution}") else { return };
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    assert_eq!((&pod["hostPID"], &pod["securityContext"]["runAsUser"]), (&json!(true), &json!(0)));
    let paths: Vec<_> = pod["volumes"]
        .as_array()
        .expect("volumes")
        .iter()
        .filter_map(|volume| volume["hostPath"]["path"].as_str())
        .collect();
    let expected = ["/run/highwater", "/var/lib/kubelet/pod-resources", "/var/log/containers", "/sys/fs/cgroup"];
    assert_eq!(paths, expected);
    assert_eq!(pod["containers"][0]["resources"]["limits"]["memory"], "188Mi");
    let separate = "{hostPID: true, kubelet: {enabled: true}, annotations: {socket: {hostPath: {enabled: true}}}}";
    assert_eq!(render(separate), Some(objects), "the same as its parts");
}

/// Endpoints objects hold 1,000 addresses.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn more_than_a_thousand_nodes_can_be_scraped() {
    let monitor = |values: &str, kind: &str| Some(one(&render(values)?, kind)["spec"].clone());
    let more = "sampleLimit: 9000, attachMetadata: {node: true}, scheme: https";
    let Some(service) = monitor(
        &format!("{{serviceMonitor: {{enabled: true, serviceDiscoveryRole: EndpointSlice, {more}}}}}"),
        "ServiceMonitor",
    ) else {
        return;
    };
    assert_eq!(service["serviceDiscoveryRole"], "EndpointSlice");
    let pods =
        monitor(&format!("{{serviceMonitor: {{enabled: true, pods: true, {more}}}}}"), "PodMonitor").expect("helm");
    let mut expected = service["endpoints"].clone();
    let relabelings = expected[0]["relabelings"].as_array_mut().expect("relabelings");
    relabelings.push(json!({"targetLabel": "job", "replacement": "hw-highwater"}));
    assert_eq!(pods["podMetricsEndpoints"], expected, "under the same job");
    let Some(helm) = tools::find("helm") else { return };
    let files = "serviceMonitor: {enabled: true, pods: true, tlsConfig: {caFile: /a}}";
    assert!(said(&template(&helm, files)).contains("caFile"), "a PodMonitor has no files");
    for spec in [&service, &pods] {
        assert_eq!((&spec["sampleLimit"], &spec["attachMetadata"]), (&json!(9000), &json!({"node": true})));
        assert_eq!(spec["selector"]["matchLabels"]["app.kubernetes.io/name"], "highwater");
    }
}

/// OpenShift's constraints allow what the pods of the profile do, and no more.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn openshifts_constraints_are_those_of_the_profile() {
    let constraints = |values: &str| Some(one(&render(values)?, "SecurityContextConstraints").clone());
    let Some(core) = constraints("{openshift: {scc: {enabled: true}}}") else { return };
    assert_eq!(core["users"], json!(["system:serviceaccount:monitoring:hw-highwater"]));
    assert_eq!((&core["allowHostPID"], &core["allowHostDirVolumePlugin"]), (&json!(false), &json!(false)));
    assert_eq!((&core["runAsUser"]["uid"], &core["requiredDropCapabilities"]), (&json!(65534), &json!(["ALL"])));
    let all = constraints("{profile: attribution, openshift: {scc: {enabled: true}}}").expect("helm");
    assert_eq!((&all["allowHostPID"], &all["allowHostDirVolumePlugin"]), (&json!(true), &json!(true)));
    assert_eq!((&all["runAsUser"]["uid"], &all["allowPrivilegedContainer"]), (&json!(0), &json!(false)));
}

/// A chart's new version alone restarts no pod, and a setting that does not exist replaces none.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_pod_is_replaced_for_a_reason_alone() {
    let Some(objects) = render("{commonLabels: {team: gpu}}") else { return };
    let template = &one(&objects, "DaemonSet")["spec"]["template"];
    let labels: Vec<&String> = template["metadata"]["labels"].as_object().expect("labels").keys().collect();
    assert_eq!(labels, ["app.kubernetes.io/instance", "app.kubernetes.io/name", "team"]);
    assert_eq!(template["spec"]["priorityClassName"], "system-node-critical");
    let container = &template["spec"]["containers"][0];
    assert_eq!(container["terminationMessagePolicy"], "FallbackToLogsOnError");
    let args = container["args"].as_array().expect("args");
    assert!(args.contains(&json!("--set=health.restart_after=5m")), "{args:?}");
    let limit = |values: &str| {
        one(&render(values).expect("helm"), "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
            ["memory"]
            .clone()
    };
    assert_eq!([limit(""), limit("{kubelet: {enabled: true}}")], ["164Mi", "188Mi"]);
}

/// Whatever else is set: scrapers, senders of annotations, and the kubelet each have a separate port.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_network_policy_keeps_its_ports_apart() {
    let Some(objects) = render("") else { return };
    let policy = &one(&objects, "NetworkPolicy")["spec"];
    assert_eq!(policy["policyTypes"], json!(["Ingress", "Egress"]));
    let own = json!([{"podSelector": {}}]);
    let expected = json!([{"ports": [{"port": "http"}], "from": own}, {"ports": [{"port": "health"}]}]);
    assert_eq!(policy["ingress"], expected, "not open to all, and no annotations over TCP without a token");
    let Some(with_token) = render("annotations: {token: {existingSecret: t}}") else { return };
    let ports = &one(&with_token, "NetworkPolicy")["spec"]["ingress"];
    assert_eq!((&ports[0]["from"], &ports[1]), (&own, &json!({"ports": [{"port": "annotations"}]})));
    assert_eq!(policy["egress"], json!([]));
    let Some(objects) = render(EVERYTHING) else { return };
    let policy = &one(&objects, "NetworkPolicy")["spec"];
    let monitoring = json!([{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]);
    let expected = json!([
        {"ports": [{"port": "http"}], "from": monitoring},
        {"ports": [{"port": "annotations"}], "from": [{"podSelector": {}}]},
        {"ports": [{"port": "health"}]},
    ]);
    assert_eq!(policy["ingress"], expected);
    let service = &one(&objects, "Service")["spec"]["ports"];
    let annotations = json!({"name": "annotations", "port": 10452, "targetPort": "annotations"});
    assert_eq!((service.as_array().map(Vec::len), &service[1]), (Some(2), &annotations));
    let container = &one(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
    let named = |name: &str| {
        let port = container["ports"].as_array().into_iter().flatten().find(|port| port["name"] == name);
        port.map(|port| port["containerPort"].clone())
    };
    assert_eq!((named("health"), named("annotations")), (Some(json!(10999)), Some(json!(10452))));
    assert!(!kinds(&render("networkPolicy: {enabled: false}").expect("Helm is there")).contains(&"NetworkPolicy"));
}

/// Without a way out, pushed data would wait forever for a receiver that the policy blocks.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn otlp_needs_a_way_out_of_the_network_policy() {
    let Some(helm) = tools::find("helm") else { return };
    let way_out = "networkPolicy: {egress: [{ports: [{port: 4317}]}]}";
    for pushes in [
        "env: [{name: OTEL_EXPORTER_OTLP_ENDPOINT, value: 'http://c:4318'}]",
        "env: [{name: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, value: 'http://c:4318'}]",
        "env: [{name: HIGHWATER_OTLP_ENDPOINT, value: 'http://c:4318'}]",
        "config: {otlp: {endpoint: 'http://c:4318'}}",
    ] {
        let output = template(&helm, pushes);
        assert!(!output.status.success() && said(&output).contains("networkPolicy.egress"), "{}", said(&output));
        for allows in [way_out, "networkPolicy: {enabled: false}"] {
            let output = template(&helm, &format!("{pushes}\n{allows}\n"));
            assert!(output.status.success(), "{allows}: {}", said(&output));
        }
    }
}

/// The kubelet's socket belongs to root. The container gets root's user ID, and none of root's other privileges.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn with_the_kubelet_it_is_root_without_any_capability() {
    let Some(objects) = render("{kubelet: {enabled: true}}") else { return };
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(
        (&pod["securityContext"]["runAsUser"], &pod["securityContext"]["runAsNonRoot"]),
        (&json!(0), &json!(false))
    );
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "the rest stays");
    assert_eq!(container["securityContext"]["capabilities"], json!({"drop": ["ALL"]}));
    let has = |object: &Value, wanted: &Value| object.as_array().is_some_and(|all| all.contains(wanted));
    let argument = json!("--set=kubelet.socket=/var/lib/kubelet/pod-resources/kubelet.sock");
    assert!(has(&container["args"], &argument), "{container}");
    let mount = json!({"name": "pod-resources", "mountPath": "/var/lib/kubelet/pod-resources", "readOnly": true});
    assert!(has(&container["volumeMounts"], &mount), "{container}");
    assert!(!pod.to_string().contains("/var/log/containers"), "without the host's processes it is not needed");
    let Some(objects) = render("{kubelet: {enabled: true, podResources: /k0s/pod-resources}, hostPID: true}") else {
        return;
    };
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let directory = json!({"name": "pod-resources", "hostPath": {"path": "/k0s/pod-resources", "type": "Directory"}});
    assert!(has(&pod["volumes"], &directory), "{pod}");
    let container = &pod["containers"][0];
    let is_cgroups = |mount: &Value| mount["mountPath"] == "/host/sys/fs/cgroup" && mount["readOnly"] == true;
    assert!(container["volumeMounts"].as_array().is_some_and(|all| all.iter().any(is_cgroups)), "{container}");
    assert!(has(&container["args"], &json!("--set=host.cgroups=/host/sys/fs/cgroup")), "{container}");
    let mount = json!({"name": "container-logs", "mountPath": "/var/log/containers", "readOnly": true});
    assert!(has(&pod["containers"][0]["volumeMounts"], &mount), "{pod}");
}

/// The root file system is read-only, so captures need their own volume. It is larger than the captures' size limit.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn captures_have_a_place_unless_they_are_off() {
    let Some(objects) = render("") else { return };
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let has = |object: &Value, wanted: &Value| object.as_array().is_some_and(|all| all.contains(wanted));
    assert!(has(&pod["volumes"], &json!({"name": "captures", "emptyDir": {"sizeLimit": "321Mi"}})), "{pod}");
    let container = &pod["containers"][0];
    assert!(has(&container["volumeMounts"], &json!({"name": "captures", "mountPath": "/var/lib/highwater"})), "{pod}");
    assert!(has(&container["args"], &json!("--set=captures.most_bytes=256MiB")), "{pod}");
    let Some(objects) = render("{captures: {enabled: false}}") else { return };
    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    assert!(has(&pod["containers"][0]["args"], &json!("--set=captures.directory=none")), "{pod}");
    assert!(!pod.to_string().contains("/var/lib/highwater"), "{pod}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_dashboards_that_it_ships_are_the_repositorys() {
    let Some(objects) = render(EVERYTHING) else { return };
    let shipped: Vec<&Value> =
        objects.iter().filter(|object| object["metadata"]["labels"]["grafana_dashboard"] == "1").collect();
    let files = crate::dashboards::files();
    assert_eq!(shipped.len(), files.len());
    for file in files {
        let name = format!("highwater-{}", file.file_name().expect("a file").to_string_lossy());
        let text = shipped
            .iter()
            .find_map(|map| map["data"][&name].as_str())
            .unwrap_or_else(|| panic!("{name} is not shipped"));
        assert_eq!(text.trim(), std::fs::read_to_string(&file).expect("readable").trim(), "{name}");
        assert!(text.len() < 900_000, "{name} nears the 1 MiB that a ConfigMap holds");
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_alerts_that_it_ships_are_the_repositorys() {
    let Some(objects) = render(EVERYTHING) else { return };
    let rule = one(&objects, "PrometheusRule");
    assert_eq!(rule["metadata"]["labels"]["release"], "kps");
    assert_eq!(rule["spec"]["groups"], json!(groups_of_alerts()), "the rules are unchanged");
    let linked = "prometheusRule: {enabled: true, runbookBase: 'https://git.example/highwater/'}";
    let Some(objects) = render(linked) else { return };
    let rendered = one(&objects, "PrometheusRule")["spec"]["groups"].to_string();
    let links = rendered.matches("\"https://git.example/highwater/docs/runbooks/").count();
    assert_eq!((links, rendered.matches("\"runbook_url\"").count()), (links, links));
    assert!(links > 10, "{rendered}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_packaged_chart_has_the_dashboards_and_the_alerts() {
    let Some(helm) = tools::find("helm") else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = run(Command::new(&helm).arg("package").arg(chart()).arg("--destination").arg(directory.path()));
    assert!(output.status.success(), "{}", said(&output));
    // The chart has these files through a link that leads out of it. A package has to contain them.
    let package = directory.path().join(format!("highwater-{}.tgz", env!("CARGO_PKG_VERSION")));
    let values = directory.path().join("values.yaml");
    std::fs::write(&values, EVERYTHING).expect("writable");
    let output = run(Command::new(&helm).args(["template", "hw"]).arg(package).arg("--values").arg(values));
    assert!(output.status.success(), "{}", said(&output));
    let objects = documents(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(one(&objects, "PrometheusRule")["spec"]["groups"], json!(groups_of_alerts()));
    let dashboards = objects.iter().filter(|object| object["metadata"]["labels"]["grafana_dashboard"] == "1");
    assert_eq!(dashboards.count(), crate::dashboards::files().len());
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn without_native_histograms_it_renders_what_make_classic_writes() {
    let Some(objects) =
        render("{nativeHistograms: false, prometheusRule: {enabled: true}, dashboards: {enabled: true}}")
    else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    crate::dashboards::classic(folder.path());
    let read = |path: &Path| std::fs::read_to_string(path).expect("written");
    let written: Vec<Value> = crate::alerts::files()
        .iter()
        .flat_map(|file| {
            let text = read(&folder.path().join("alerts").join(file.file_name().expect("a name")));
            documents(&text)[0]["groups"].as_array().expect("groups").clone()
        })
        .collect();
    assert_eq!(one(&objects, "PrometheusRule")["spec"]["groups"], json!(written));
    assert_ne!(written, groups_of_alerts(), "it leaves something out");
    for file in crate::dashboards::files() {
        let name = file.file_name().and_then(OsStr::to_str).expect("a name");
        let rendered =
            objects.iter().find_map(|object| object["data"][format!("highwater-{name}")].as_str()).expect("rendered");
        assert_eq!(rendered.trim_end(), read(&folder.path().join(name)).trim_end(), "{name}");
    }
}

/// The groups of every rule file, in the order in which Helm renders them.
fn groups_of_alerts() -> Vec<Value> {
    let texts = crate::alerts::files().into_iter().map(|file| std::fs::read_to_string(file).expect("readable"));
    texts.flat_map(|text| documents(&text)[0]["groups"].as_array().expect("groups").clone()).collect()
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_daemon_takes_what_the_chart_renders() {
    for values in ["", EVERYTHING] {
        let Some(objects) = render(values) else { return };
        let directory = tempfile::tempdir().expect("a temporary directory");
        let arguments = &one(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["args"];
        let config = objects.iter().find_map(|object| object["data"]["highwater.yaml"].as_str());
        let config = config.map(|text| {
            // Replaces paths that the pod mounts with paths that exist here.
            let [file, token, folder] =
                ["highwater.yaml", "token", "namespaces"].map(|name| directory.path().join(name));
            std::fs::create_dir(&folder).expect("writable");
            std::fs::write(&token, "secret-secret-secret").expect("writable");
            std::fs::write(folder.join("research"), "another-secret-secret").expect("writable");
            let text = text.replace("/etc/highwater/token/token", &token.display().to_string());
            let text = text.replace("/etc/highwater/namespace-tokens", &folder.display().to_string());
            std::fs::write(&file, text).expect("writable");
            file
        });
        let web = directory.path().join("web.yml");
        std::fs::write(&web, "rate_limit: {interval: 1s, burst: 9}\n").expect("writable");
        let web = format!("--set=web.config_file={}", web.display());
        let arguments = arguments.as_array().expect("args").iter().map(|argument| match (argument.as_str(), &config) {
            (Some("--config=/etc/highwater/highwater.yaml"), Some(file)) => format!("--config={}", file.display()),
            (Some("--set=web.config_file=/etc/highwater/web/web.yml"), _) => web.clone(),
            (argument, _) => argument.unwrap_or_default().to_owned(),
        });
        let output = run(daemon::command().args(arguments).arg("--check-config"));
        assert!(output.status.success(), "{values}: {}", said(&output));
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn values_that_cannot_work_are_refused() {
    let Some(helm) = tools::find("helm") else { return };
    for (values, message) in [
        ("{image: {repositry: x}}", "repositry"),
        ("{unknown: 1}", "unknown"),
        ("{listen: {port: 80}}", "/listen/port"),
        ("{listen: {address: localhost}}", "/listen/address"),
        ("{health: {port: 443}}", "/health/port"),
        ("{health: {restartAfter: soon}}", "/health/restartAfter"),
        ("{health: {restartAfter: 0s}}", "/health/restartAfter"),
        ("{health: {restartAfter: 500ms}}", "/health/restartAfter"),
        ("{config: {sampling: {peroid: 2ms}}}", "peroid"),
        ("{config: {peroid: 2ms}}", "peroid"),
        ("{annotations: {port: 443}}", "/annotations/port"),
        ("{web: {file: x}}", "file"),
        ("{service: {internalTrafficPolicy: Node}}", "/service/internalTrafficPolicy"),
        ("{serviceMonitor: {interval: 15}}", "/serviceMonitor/interval"),
        ("{nvidia: {deviceList: magic}}", "/nvidia/deviceList"),
        ("{prometheusRule: {runbookBase: docs}}", "/prometheusRule/runbookBase"),
        ("{annotations: {socket: {hostPath: {path: run}}}}", "/annotations/socket/hostPath/path"),
        ("{captures: {mostBytes: 256MB}}", "/captures/mostBytes"),
        ("{extraVolumes: [{name: captures, emptyDir: {}}]}", "/extraVolumes/0/name"),
        ("{extraVolumeMounts: [{name: mine, mountPath: etc}]}", "/extraVolumeMounts/0/mountPath"),
        ("{terminationGracePeriodSeconds: 1}", "/terminationGracePeriodSeconds"),
    ] {
        let output = template(&helm, values);
        assert!(!output.status.success(), "{values} is accepted");
        assert!(said(&output).contains(message), "{values}: {}", said(&output));
    }
}

/// A full queue must not make the kernel kill the pod for its memory.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_push_queue_comes_on_top_of_the_memory_limit() {
    let limit = |values: &str| {
        let objects = render(&format!("networkPolicy: {{enabled: false}}\n{values}"))?;
        let container = &one(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
        Some(container["resources"]["limits"]["memory"].as_str().unwrap_or_default().to_owned())
    };
    let endpoint = "endpoint: 'http://x:4317'";
    for (values, expected) in [
        (String::new(), "164Mi"),
        (format!("config: {{otlp: {{{endpoint}}}}}"), "228Mi"),
        ("env: [{name: OTEL_EXPORTER_OTLP_ENDPOINT, value: x}]".to_owned(), "228Mi"),
        (format!("config: {{otlp: {{{endpoint}, queue_bytes: 1GiB}}}}"), "1188Mi"),
        (format!("config: {{otlp: {{{endpoint}, queue_bytes: 134217729}}}}"), "293Mi"),
        (format!("config: {{otlp: {{{endpoint}, queue_dir: /q}}}}"), "164Mi"),
        (format!("config: {{otlp: {{{endpoint}}}}}\nresources: {{limits: {{memory: 1Gi}}}}"), "1Gi"),
    ] {
        let Some(found) = limit(&values) else { return };
        assert_eq!(found, expected, "{values}");
    }
    let Some(helm) = tools::find("helm") else { return };
    let refused = template(
        &helm,
        &format!("networkPolicy: {{enabled: false}}\nconfig: {{otlp: {{{endpoint}, queue_bytes: lots}}}}"),
    );
    assert!(said(&refused).contains("config.otlp.queue_bytes: \"lots\""), "{}", said(&refused));
}

/// The objects that the chart renders with these values on top of the defaults; `None` without Helm.
fn render(values: &str) -> Option<Vec<Value>> {
    let output = template(&tools::find("helm")?, values);
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8(output.stdout).expect("Helm renders UTF-8");
    let objects: Vec<Value> = documents(&text).into_iter().filter(|object| !object.is_null()).collect();
    assert!(objects.iter().all(|object| object["kind"].is_string() && object["metadata"]["name"].is_string()));
    Some(objects)
}

fn template(helm: &Path, values: &str) -> Output {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("values.yaml");
    std::fs::write(&file, values).expect("writable");
    run(Command::new(helm)
        .args(["template", "hw"])
        .arg(chart())
        .args(["--namespace", "monitoring", "--values"])
        .arg(file))
}

fn chart() -> PathBuf {
    tools::root().join("helm/highwater")
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn kinds(objects: &[Value]) -> Vec<&str> {
    let mut kinds: Vec<&str> = objects.iter().filter_map(|object| object["kind"].as_str()).collect();
    kinds.sort_unstable();
    kinds
}

fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["kind"] == kind);
    let object = found.next().unwrap_or_else(|| panic!("no {kind}"));
    assert!(found.next().is_none(), "several {kind}s");
    object
}

/// The documents of a YAML text; panics if it is invalid.
pub fn documents(text: &str) -> Vec<Value> {
    let documents = YamlLoader::load_from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    documents.iter().map(to_json).collect()
}

fn to_json(yaml: &Yaml) -> Value {
    match yaml {
        Yaml::Real(text) => text.parse::<f64>().map_or(Value::Null, Value::from),
        Yaml::Integer(number) => Value::from(*number),
        Yaml::String(text) => Value::from(text.as_str()),
        Yaml::Boolean(value) => Value::from(*value),
        Yaml::Array(items) => items.iter().map(to_json).collect(),
        Yaml::Hash(fields) => {
            fields.iter().map(|(key, value)| (key.as_str().unwrap_or_default().to_owned(), to_json(value))).collect()
        }
        Yaml::Null | Yaml::Alias(_) | Yaml::BadValue => Value::Null,
    }
}
