//! What a sending process's environment says of it, where its events do not: its job and its rank.

use std::collections::HashMap;

/// Variables that name a job, in the order in which they are believed, with the prefix that makes the name clear.
const JOB_VARIABLES: [(&str, &str); 3] =
    [("HIGHWATER_JOB", ""), ("SLURM_JOB_ID", "slurm-"), ("TORCHELASTIC_RUN_ID", "torchrun-")];
/// Processes remembered at a time; the table is emptied when it is full.
const MOST_PEERS: usize = 1024;
/// How long what was read is believed: a process id can be used again.
const KEEP_NS: i64 = 10 * crate::clock::SECOND_NS;

/// What one process's environment tells.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peer {
    pub job: Option<String>,
    pub rank: Option<u32>,
    /// The position among the node's processes of this job, and the devices that the process sees.
    pub local_rank: Option<usize>,
    pub visible_devices: Option<String>,
}

/// Environments read lately.
#[derive(Debug, Default)]
pub(super) struct Peers {
    known: HashMap<u32, (i64, Peer)>,
}

impl Peers {
    /// What this process's environment tells. A process that may not be looked at, or is gone, tells nothing.
    pub fn get(&mut self, pid: u32, now_ns: i64) -> &Peer {
        if self.known.len() >= MOST_PEERS {
            self.known.clear();
        }
        let known = self.known.entry(pid).or_insert_with(|| (now_ns, read(pid)));
        if now_ns - known.0 > KEEP_NS {
            *known = (now_ns, read(pid));
        }
        &known.1
    }
}

fn read(pid: u32) -> Peer {
    std::fs::read(format!("/proc/{pid}/environ")).map(|environ| parse(&environ)).unwrap_or_default()
}

fn parse(environ: &[u8]) -> Peer {
    let variables: HashMap<&str, &str> =
        environ.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('=')).collect();
    let get = |name: &str| variables.get(name).copied().filter(|value| !value.is_empty());
    let number = |names: [&str; 2]| names.into_iter().find_map(|name| get(name)?.parse::<u32>().ok());
    Peer {
        job: JOB_VARIABLES.iter().find_map(|(name, prefix)| Some(format!("{prefix}{}", get(name)?))),
        rank: number(["RANK", "SLURM_PROCID"]),
        local_rank: number(["LOCAL_RANK", "SLURM_LOCALID"]).map(|rank| rank as usize),
        visible_devices: get("CUDA_VISIBLE_DEVICES").map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_that_names_a_job_wins() {
        let peer = parse(b"SLURM_JOB_ID=77\0RANK=3\0LOCAL_RANK=1\0CUDA_VISIBLE_DEVICES=0,1\0\xff=x\0");
        assert_eq!(peer.job.as_deref(), Some("slurm-77"));
        assert_eq!((peer.rank, peer.local_rank), (Some(3), Some(1)));
        assert_eq!(parse(b"SLURM_JOB_ID=77\0HIGHWATER_JOB=llama").job.as_deref(), Some("llama"));
        assert_eq!(parse(b"HIGHWATER_JOB=\0RANK=x"), Peer::default());
    }
}
