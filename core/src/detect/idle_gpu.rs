//! `idle_gpu`: memory is held, and nothing has run for a while.
//!
//! Told from the driver's utilization alone, so that a process that was forgotten is seen without any annotation. A GPU
//! whose utilization is not known is not judged.

use super::finding::{Certainty, Evidence, Kind, Severity, Sign, Span, Text, seconds};
use super::view::{Since, View, bytes, human};
use super::{Detector, Trouble};
use crate::clock::SECOND_NS;

/// Follows since when each GPU is idle.
#[derive(Debug, Default)]
pub(super) struct IdleGpu {
    idle: Since,
}

impl Detector for IdleGpu {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for gpu in 0..view.gpus.len() {
            let held_bytes = idle(view, gpu);
            let since_ns = self.idle.note(gpu, held_bytes.map(|_| view.now_ns));
            let (Some(held_bytes), Some(begin_ns)) = (held_bytes, since_ns) else { continue };
            if view.now_ns - begin_ns >= view.settings.idle_after_ns {
                signs.push(sign(view, gpu, held_bytes, begin_ns));
            }
        }
    }
}

/// What an idle GPU holds, bytes; `None` where it is busy, holds little, or is not known to be idle.
fn idle(view: &View<'_>, gpu: usize) -> Option<u64> {
    let (state, ring) = (view.gpus.get(gpu)?, view.rings.get(gpu)?);
    let medium = state.medium().filter(|medium| view.now_ns - medium.at_ns < 2 * SECOND_NS)?;
    if medium.reading.utilization_ratio? > 0.0 {
        return None;
    }
    let newest_ns = ring.newest_ns().filter(|newest_ns| view.now_ns - newest_ns < 2 * SECOND_NS)?;
    let held_bytes = ring.at(newest_ns).ok()??;
    (held_bytes >= view.settings.idle_bytes).then_some(held_bytes)
}

fn sign(view: &View<'_>, gpu: usize, held_bytes: u64, begin_ns: i64) -> Sign {
    let idle_ns = view.now_ns - begin_ns;
    Sign {
        kind: Kind::IdleGpu,
        subject: view.subject_of(gpu),
        severity: Severity::Info,
        certainty: Certainty::Observed,
        begin_ns,
        until_ns: view.now_ns + SECOND_NS,
        step: view.step_on(gpu),
        code: None,
        evidence: vec![bytes("held_bytes", held_bytes), Evidence { name: "idle_seconds", value: seconds(idle_ns) }],
        text: Text {
            what: format!(
                "{} holds {} and has run nothing for {}.",
                view.gpu_name(gpu),
                human(held_bytes),
                Span(idle_ns)
            ),
            why: "The driver has told no utilization in all that time.".to_owned(),
            advice:
                "Look whether the process still lives and what it waits for (py-spy dump), or end it to free the GPU."
                    .to_owned(),
        },
    }
}
