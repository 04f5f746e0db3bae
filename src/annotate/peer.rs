//! What the system says of a sending process, where its events do not: its environment its job and its rank, its
//! control groups its container.

use super::place::Place;
use crate::kubelet::{Home, Kubelet};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Variables that name a job, in the order in which they are believed, with the prefix that makes the name clear.
const JOB_VARIABLES: [(&str, &str); 3] =
    [("HIGHWATER_JOB", ""), ("SLURM_JOB_ID", "slurm-"), ("TORCHELASTIC_RUN_ID", "torchrun-")];
/// Processes remembered at a time; the table is emptied when it is full.
const MOST_PEERS: usize = 1024;
/// A longer value of a variable is not kept, bytes: as of attributes.
const MOST_BYTES: usize = 1024;
/// How long what was read is believed: a process id can be used again.
const KEEP_NS: i64 = 10 * crate::clock::SECOND_NS;
/// How long it is believed that a process's container is not known.
const LOOK_AGAIN_NS: i64 = crate::clock::SECOND_NS;

/// What is known of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peer {
    pub job: Option<String>,
    pub rank: Option<u32>,
    pub place: Place,
    /// Which container it is in; not known where no kubelet is asked.
    pub home: Home,
    /// Since when it is known to be there, nanoseconds of the timeline.
    pub since_ns: i64,
}

/// Processes looked at lately.
#[derive(Debug)]
pub(super) struct Peers {
    /// Where the system tells of processes.
    proc: PathBuf,
    /// Who knows which container is which; `None` where nobody is to be asked.
    kubelet: Option<Arc<Kubelet>>,
    known: HashMap<u32, (i64, Peer)>,
}

impl Default for Peers {
    fn default() -> Self {
        Self { proc: "/proc".into(), kubelet: None, known: HashMap::new() }
    }
}

impl Peers {
    /// Those of a node with this kubelet.
    pub fn with_kubelet(kubelet: Option<Arc<Kubelet>>) -> Self {
        Self { kubelet, ..Self::default() }
    }

    /// The same, told by files elsewhere.
    #[cfg(test)]
    pub fn at(self, proc: PathBuf) -> Self {
        Self { proc, ..self }
    }

    /// What is known of this process. A process that may not be looked at, or is gone, tells nothing.
    pub fn get(&mut self, pid: u32, now_ns: i64) -> &Peer {
        if self.known.len() >= MOST_PEERS {
            self.known.clear();
        }
        let read = || (now_ns, read(&self.proc.join(pid.to_string()), self.kubelet.as_deref(), now_ns));
        let known = self.known.entry(pid).or_insert_with(read);
        // A container that has just begun gets its link a little later.
        let keep_ns = if self.kubelet.is_some() && known.1.home == Home::Unknown { LOOK_AGAIN_NS } else { KEEP_NS };
        if now_ns - known.0 > keep_ns {
            let before = std::mem::replace(known, read()).1;
            if before.home == known.1.home {
                known.1.since_ns = before.since_ns;
            }
        }
        &known.1
    }
}

fn read(process: &Path, kubelet: Option<&Kubelet>, now_ns: i64) -> Peer {
    // A process that has just ended has an empty one.
    let environ = std::fs::read(process.join("environ")).ok().filter(|environ| !environ.is_empty());
    let mut peer = Peer { since_ns: now_ns, ..environ.as_deref().map(parse).unwrap_or_default() };
    if let Some(kubelet) = kubelet {
        peer.home = std::fs::read_to_string(process.join("cgroup")).map(|it| kubelet.home_of(&it)).unwrap_or_default();
        // Where the environment may not be read, it may name the job, and does name the rank.
        if let (Some(_), Home::Container(container)) = (environ, &peer.home) {
            peer.job.get_or_insert_with(|| format!("{}/{}", container.namespace, container.pod));
        }
    }
    peer
}

fn parse(environ: &[u8]) -> Peer {
    let variables: HashMap<&str, &str> =
        environ.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('=')).collect();
    let kept = |name: &str| variables.get(name).copied().filter(|value| value.len() <= MOST_BYTES);
    let get = |name: &str| kept(name).filter(|value| !value.is_empty());
    let number = |names: [&str; 2]| names.into_iter().find_map(|name| get(name)?.parse::<u32>().ok());
    Peer {
        job: JOB_VARIABLES.iter().find_map(|(name, prefix)| Some(format!("{prefix}{}", get(name)?))),
        rank: number(["RANK", "SLURM_PROCID"]),
        place: Place::of_process(
            // Empty, it hides all of them.
            kept("CUDA_VISIBLE_DEVICES").map(str::to_owned),
            number(["LOCAL_RANK", "SLURM_LOCALID"]).map(|rank| rank as usize),
        ),
        ..Peer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::{Container, Home, Settings};

    #[test]
    fn a_process_in_a_pod_has_the_pods_name_for_its_job_and_its_own_for_its_rank() {
        let (folder, id) = (tempfile::tempdir().expect("a folder"), "0a".repeat(32));
        let process = folder.path().join("77");
        let write = |name: &str, text: &[u8]| std::fs::write(process.join(name), text).expect("written");
        std::fs::create_dir_all(&process).expect("a folder");
        write("cgroup", format!("0::/kubepods.slice/cri-containerd-{id}.scope\n").as_bytes());
        let logs = folder.path().join("logs");
        std::fs::create_dir_all(&logs).expect("a folder");
        let settings = Settings { socket: Some("/nowhere".into()), container_logs: logs.clone() };
        let kubelet = Kubelet::new(&settings).map(Arc::new);
        let mut peers = Peers::with_kubelet(kubelet).at(folder.path().to_owned());
        assert_eq!(peers.get(77, 0).home, Home::Unknown, "its link is not there yet");
        std::fs::write(logs.join(format!("llama-0_research_trainer-{id}.log")), "").expect("written");
        let peer = peers.get(77, LOOK_AGAIN_NS + 1).clone();
        let (namespace, pod) = ("research".to_owned(), "llama-0".to_owned());
        let container = Container { namespace, pod, name: Some("trainer".into()), id: Some(id) };
        assert_eq!(peer.home, Home::Container(container));
        assert_eq!(peer.job, None, "its environment, which may not be read, may name the job");
        write("environ", b"RANK=5\0LOCAL_RANK=1\0");
        let peer = peers.get(77, 2 * KEEP_NS).clone();
        assert_eq!(
            (peer.job.as_deref(), peer.rank, peer.place.local_rank),
            (Some("research/llama-0"), Some(5), Some(1))
        );
        write("environ", b"HIGHWATER_JOB=llama\0");
        assert_eq!(peers.get(77, 4 * KEEP_NS).job.as_deref(), Some("llama"), "what the job says goes before");
        assert_eq!(*peers.get(78, 0), Peer::default(), "no such process, at 0");
    }

    #[test]
    fn the_first_variable_that_names_a_job_wins() {
        let peer = parse(b"SLURM_JOB_ID=77\0RANK=3\0LOCAL_RANK=1\0CUDA_VISIBLE_DEVICES=0,1\0\xff=x\0");
        assert_eq!(peer.job.as_deref(), Some("slurm-77"));
        assert_eq!((peer.rank, peer.place.local_rank), (Some(3), Some(1)));
        assert_eq!(parse(b"SLURM_JOB_ID=77\0HIGHWATER_JOB=llama").job.as_deref(), Some("llama"));
        assert_eq!(parse(b"HIGHWATER_JOB=\0RANK=x"), Peer::default());
        let hidden = parse(b"CUDA_VISIBLE_DEVICES=\0").place.visible_devices;
        assert_eq!(hidden.as_deref(), Some(""), "all devices are hidden");
        let endless = [b"CUDA_VISIBLE_DEVICES=".as_slice(), &[b'0'; MOST_BYTES + 1]].concat();
        assert_eq!(parse(&endless), Peer::default());
    }
}
