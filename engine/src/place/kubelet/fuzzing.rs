//! Fuzzes the kubelet's answers and the control groups of processes.

use super::container::Home;
use super::lists::Listed;
use super::wire;
use highwater_core::fuzzing::parts;
use highwater_core::jobs::Container;
use prost::Message as _;

/// Reads the parts of the input: a process's control groups, names of links (one per line), and the kubelet's answer.
pub fn kubelet(data: &[u8]) {
    let mut parts = parts(data);
    // The control groups come first, because they are text, while an answer may have any byte.
    let [cgroups, links] = [(); 2].map(|()| String::from_utf8_lossy(parts.next().unwrap_or_default()));
    let answer = parts.next().unwrap_or_default();
    let home = Home::of_process(&cgroups, || Ok(links.lines().map(str::to_owned).collect()));
    let Ok(pods) = wire::Pods::decode(answer) else { return };
    let listed = Listed::new(0, &pods);
    for pod in &pods.pods {
        let (namespace, pod) = (pod.namespace.clone(), pod.name.clone());
        let names = listed.find(&Container { namespace, pod, name: None, id: None }).unwrap_or_default();
        assert!(names.windows(2).all(|two| two[0] < two[1]), "each once: {names:?}");
    }
    if let Ok(Home::Container(container)) = home {
        listed.find(&container);
    }
}
