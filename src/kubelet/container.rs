//! Which container a process runs in: its control group names the container, and the kubelet's log folder names its pod.

use std::path::Path;

/// Hexadecimal digits of a container's id.
const ID_DIGITS: usize = 64;

/// A container of this node, as Kubernetes names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Its pod's namespace.
    pub namespace: String,
    /// Its pod.
    pub pod: String,
    /// Its name in the pod, where known.
    pub name: Option<String>,
}

impl Container {
    /// The container of a process with these control groups (`/proc/PID/cgroup`). `logs` is the folder in which the
    /// kubelet keeps a link for each container, `POD_NAMESPACE_CONTAINER-ID.log`: nothing else on a node has both names
    /// without asking the API server. `None` where the process is in no container, or the folder cannot be read.
    #[must_use]
    pub fn of_process(cgroups: &str, logs: &Path) -> Option<Self> {
        let ids: Vec<&str> = container_ids(cgroups).collect();
        // Without an id the folder, which has as many links as the node has containers, is not worth reading.
        ids.first()?;
        let entries = std::fs::read_dir(logs).ok()?;
        let names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        // The outermost first: a container inside a pod's container is not the kubelet's.
        ids.iter().find_map(|id| names.iter().find_map(|name| parse(name, id)))
    }
}

/// What looks like a container's id in control groups: `cri-containerd-ID.scope`, `crio-ID.scope`, `docker-ID.scope`, or
/// the bare id, wherever in the path.
fn container_ids(cgroups: &str) -> impl Iterator<Item = &str> {
    cgroups
        .split(|character: char| !character.is_ascii_hexdigit())
        .filter(|run| run.len() == ID_DIGITS && !run.bytes().any(|byte| byte.is_ascii_uppercase()))
}

/// The container whose link this is, if it is that of `id`. Neither namespaces nor pods may have an underscore.
fn parse(link: &str, id: &str) -> Option<Container> {
    let names = link.strip_suffix(".log")?.strip_suffix(id)?.strip_suffix('-')?;
    let mut parts = names.splitn(3, '_');
    let (pod, namespace, name) = (parts.next()?, parts.next()?, parts.next()?);
    Some(Container { namespace: namespace.to_owned(), pod: pod.to_owned(), name: Some(name.to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c38428142970";
    const OTHER: &str = "9ec39b91f3d70e1beff50a308f77067065ea6be0d91a3378375056cd4422cf3d";

    fn logs() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for link in
            [format!("llama-0_research_trainer-{ID}.log"), format!("dns_kube-system_dns-{OTHER}.log"), "x".into()]
        {
            std::fs::write(folder.path().join(link), "").expect("a link");
        }
        folder
    }

    #[test]
    fn every_runtimes_control_group_finds_the_pod() {
        let logs = logs();
        let trainer = Container { namespace: "research".into(), pod: "llama-0".into(), name: Some("trainer".into()) };
        for cgroups in [
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6d3b9a1c_7a3e_4f0e_9d5a_0b1c2d3e4f50.slice/cri-containerd-{ID}.scope\n"
            ),
            format!("0::/../../kubepods-pod6d3b9a1c.slice/crio-{ID}.scope/container\n"),
            format!("12:devices:/kubepods/besteffort/pod6d3b9a1c-7a3e-4f0e-9d5a-0b1c2d3e4f50/{ID}\n0::/\n"),
            // A container inside the pod's container.
            format!("0::/kubepods/pod6d3b9a1c/{ID}/docker/{}\n", "ab".repeat(32)),
        ] {
            assert_eq!(Container::of_process(&cgroups, logs.path()).as_ref(), Some(&trainer), "{cgroups}");
        }
    }

    #[test]
    fn a_process_outside_of_pods_is_in_none() {
        let logs = logs();
        let short = &ID[1..];
        for cgroups in ["", "0::/user.slice/session-2.scope\n", &format!("0::/docker/{}\n", "ab".repeat(32)), short] {
            assert_eq!(Container::of_process(cgroups, logs.path()), None, "{cgroups}");
        }
        let cgroups = format!("0::/kubepods/pod6d3b9a1c/{ID}\n");
        assert_eq!(Container::of_process(&cgroups, &logs.path().join("none")), None, "no such folder");
    }
}
