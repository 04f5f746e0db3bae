//! `low_headroom`: memory so full that communication would not get its buffers.
//!
//! NCCL allocates outside the framework's pool: on an H200 about 0.9 GiB for a process's first communicator and 0.5 GiB
//! for each further one, and it fails where it does not get them. A GPU whose least free memory stays below that is told
//! as soon as it has been so for a moment within the last second.

use super::finding::{Certainty, Kind, Severity, Sign, Text};
use super::view::{Since, View, bytes, human};
use super::{Detector, Trouble};
use crate::clock::SECOND_NS;

/// Looks at the last second of each GPU.
#[derive(Debug, Default)]
pub(super) struct LowHeadroom {
    full: Since,
}

impl Detector for LowHeadroom {
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for gpu in 0..view.gpus.len() {
            let found = full(view, gpu);
            let since_ns = self.full.note(gpu, found.map(|(from_ns, ..)| from_ns));
            let (Some((from_ns, to_ns, free_bytes)), Some(begin_ns)) = (found, since_ns) else { continue };
            if let Some(rank) = view.rank_on(gpu) {
                troubles.push(Trouble { kind: Kind::LowHeadroom, key: rank.key.clone(), from_ns, to_ns });
            }
            signs.push(Sign { begin_ns, ..sign(view, gpu, free_bytes) });
        }
    }
}

/// The last second of a GPU and its least free memory, where that was too little for long enough.
fn full(view: &View<'_>, gpu: usize) -> Option<(i64, i64, u64)> {
    let (ring, usable_bytes) = (view.rings.get(gpu)?, view.gpus.get(gpu)?.usable_bytes()?);
    let to_ns = ring.newest_ns()?;
    // A GPU of which nothing new is known is not judged by what it was.
    if view.now_ns - to_ns > SECOND_NS {
        return None;
    }
    let from_ns = (to_ns - SECOND_NS).max(ring.oldest_ns()?);
    let free_bytes = usable_bytes.saturating_sub(ring.summary_through(from_ns, to_ns).ok()?.max?);
    if free_bytes >= view.settings.headroom_bytes {
        return None;
    }
    let full_bytes = usable_bytes.saturating_sub(view.settings.headroom_bytes);
    let [full_ns] = ring.above_ns(from_ns, to_ns, [full_bytes]).ok()?;
    (full_ns >= view.settings.headroom_ns).then_some((from_ns, to_ns, free_bytes))
}

fn sign(view: &View<'_>, gpu: usize, free_bytes: u64) -> Sign {
    let settings = view.settings;
    let is_critical = free_bytes < settings.critical_headroom_bytes;
    let needed_bytes = if is_critical { settings.critical_headroom_bytes } else { settings.headroom_bytes };
    Sign {
        kind: Kind::LowHeadroom,
        subject: view.subject_of(gpu),
        severity: if is_critical { Severity::Critical } else { Severity::Warning },
        certainty: Certainty::Observed,
        begin_ns: view.now_ns,
        until_ns: view.now_ns + settings.hold_ns,
        step: view.step_on(gpu),
        code: None,
        evidence: vec![bytes("least_free_bytes", free_bytes), bytes("needed_bytes", needed_bytes)],
        text: Text {
            what: format!("{} had only {} free within the last second.", view.gpu_name(gpu), human(free_bytes)),
            why: format!(
                "NCCL allocates outside the framework's pool and needs {} for {}; below that it fails.",
                human(needed_bytes),
                if is_critical { "a new communicator" } else { "a process's first communicator" },
            ),
            advice: "Use a smaller batch or sequence, recompute activations, or keep part of the memory from the \
                     framework (torch.cuda.set_per_process_memory_fraction); create communicators before memory fills."
                .to_owned(),
        },
    }
}
