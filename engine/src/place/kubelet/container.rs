//! Finds the container of a process: its control group names the container, and the kubelet's log folder names the pod.

use highwater_core::jobs::Container;
use std::io;
use std::sync::Arc;

/// Hexadecimal digits of a container's id.
const ID_DIGITS: usize = 64;

/// Characters after which the kubelet cuts a link's name, not counting its extension.
const LINK_CHARACTERS: usize = 247;
/// Digits of an id that are enough to identify a container.
const ENOUGH_DIGITS: usize = 12;

/// Where a process runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Home {
    /// In no container.
    Host,
    /// In this container.
    Container(Container),
    /// In a container without a link. The kubelet may still make the link, just after it has started the container.
    Unlinked(Arc<str>),
    /// Possibly in a container, but in an unknown one.
    #[default]
    Unknown,
}

impl Home {
    /// Where a process with these control groups (`/proc/PID/cgroup`) runs. `links` returns the names in the folder
    /// where the kubelet keeps a link for each container, `POD_NAMESPACE_CONTAINER-ID.log`: nothing else on a node has
    /// both names without asking the API server. It is called only if there is a container id.
    ///
    /// # Errors
    /// The links cannot be read.
    pub fn of_process(cgroups: &str, links: impl FnOnce() -> io::Result<Arc<[String]>>) -> io::Result<Self> {
        let ids: Vec<&str> = container_ids(cgroups).collect();
        let Some(outermost) = ids.first() else {
            // A process that is ending appears in the root of every hierarchy, wherever it was.
            let is_somewhere = cgroups.lines().any(|line| !line.ends_with(":/"));
            return Ok(if is_somewhere { Home::Host } else { Home::Unknown });
        };
        let links = links()?;
        // The outermost first: a container inside a pod's container is not managed by the kubelet.
        let found = ids.iter().find_map(|id| linked(&links, id));
        Ok(found.map_or_else(|| Home::Unlinked((*outermost).into()), Home::Container))
    }
}

/// The container ids in control groups: `cri-containerd-ID.scope`, `crio-ID.scope`, `docker-ID.scope`, or the bare id,
/// anywhere in the path.
fn container_ids(cgroups: &str) -> impl Iterator<Item = &str> {
    cgroups
        .split(|character: char| !character.is_ascii_hexdigit())
        .filter(|run| run.len() == ID_DIGITS && !run.bytes().any(|byte| byte.is_ascii_uppercase()))
}

/// The container with this id, if one of these links names it.
pub(super) fn linked(links: &[String], id: &str) -> Option<Container> {
    links.iter().find_map(|link| parse(link, id))
}

/// The container of this link, if its id is `id`. Neither namespaces nor pods may have an underscore.
fn parse(link: &str, id: &str) -> Option<Container> {
    let stem = link.strip_suffix(".log")?;
    let (names, digits) = stem.rsplit_once('-')?;
    let is_cut = stem.len() >= LINK_CHARACTERS && digits.len() >= ENOUGH_DIGITS && id.starts_with(digits);
    if digits != id && !is_cut {
        return None;
    }
    let mut parts = names.splitn(3, '_');
    let (pod, namespace, name) = (parts.next()?.to_owned(), parts.next()?.to_owned(), parts.next()?.to_owned());
    Some(Container { namespace, pod, name: Some(name), id: Some(id.to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c38428142970";
    const OTHER: &str = "9ec39b91f3d70e1beff50a308f77067065ea6be0d91a3378375056cd4422cf3d";

    fn home(cgroups: &str) -> Home {
        let links =
            [format!("llama-0_research_trainer-{ID}.log"), format!("dns_kube-system_dns-{OTHER}.log"), "x".into()];
        Home::of_process(cgroups, || Ok(links.to_vec().into())).expect("the links are there")
    }

    #[test]
    fn every_runtimes_control_group_finds_the_pod() {
        let (namespace, pod) = ("research".to_owned(), "llama-0".to_owned());
        let trainer = Container { namespace, pod, name: Some("trainer".into()), id: Some(ID.into()) };
        for cgroups in [
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6d3b9a1c_7a3e_4f0e_9d5a_0b1c2d3e4f50.slice/cri-containerd-{ID}.scope\n"
            ),
            format!("0::/../../kubepods-pod6d3b9a1c.slice/crio-{ID}.scope/container\n"),
            format!("12:devices:/kubepods/besteffort/pod6d3b9a1c-7a3e-4f0e-9d5a-0b1c2d3e4f50/{ID}\n0::/\n"),
            // A container inside the pod's container.
            format!("0::/kubepods/pod6d3b9a1c/{ID}/docker/{}\n", "ab".repeat(32)),
        ] {
            assert_eq!(home(&cgroups), Home::Container(trainer.clone()), "{cgroups}");
        }
    }

    #[test]
    fn a_process_in_no_container_is_the_hosts_and_one_in_another_container_is_nowhere() {
        assert_eq!(home("12:devices:/\n0::/\n"), Home::Unknown, "it is ending, perhaps");
        for cgroups in ["0::/user.slice/session-2.scope\n", &format!("0::/{}\n", &ID[1..])] {
            assert_eq!(home(cgroups), Home::Host, "{cgroups}");
            let refused = || Err(io::Error::other("they are not asked for"));
            assert!(Home::of_process(cgroups, refused).is_ok(), "{cgroups}");
        }
        let docker = "ab".repeat(32);
        assert_eq!(home(&format!("0::/docker/{docker}\n")), Home::Unlinked(docker.as_str().into()));
        assert!(Home::of_process(&format!("0::/{ID}\n"), || Err(io::Error::other("refused"))).is_err());
    }

    #[test]
    fn a_link_whose_name_was_cut_is_known_by_what_is_left_of_the_id() {
        let pod = "p".repeat(200);
        let whole = format!("{pod}_research_trainer-{ID}");
        let found = parse(&format!("{}.log", &whole[..LINK_CHARACTERS]), ID).expect("found");
        assert_eq!((found.pod.as_str(), found.name.as_deref()), (pod.as_str(), Some("trainer")));
        assert_eq!(parse(&format!("{}.log", &whole[..LINK_CHARACTERS]), OTHER), None);
        assert_eq!(parse(&format!("llama-0_research_trainer-{}.log", &ID[..20]), ID), None, "not cut");
    }
}
