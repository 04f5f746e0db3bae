//! `gpu_lost`: a GPU that does not answer.

use super::finding::{Certainty, Kind, Severity, Sign, Text};
use super::view::{Since, View};
use super::{Detector, Trouble};
use crate::clock::SECOND_NS;
use crate::gpu::Health;

/// Follows since when each GPU is gone.
#[derive(Debug, Default)]
pub(super) struct GpuLost {
    gone: Since,
}

impl Detector for GpuLost {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for (gpu, state) in view.gpus.iter().enumerate() {
            let why = match state.health() {
                Health::Up => None,
                Health::Lost => Some(format!("The driver says: {}.", state.trouble())),
                Health::Hung => Some("A call on it has not come back.".to_owned()),
            };
            let since_ns = self.gone.note(gpu, why.is_some().then_some(view.now_ns));
            let (Some(why), Some(begin_ns)) = (why, since_ns) else { continue };
            signs.push(Sign {
                kind: Kind::GpuLost,
                subject: view.subject_of(gpu),
                severity: Severity::Critical,
                certainty: Certainty::Observed,
                begin_ns,
                until_ns: view.now_ns + SECOND_NS,
                step: None,
                code: None,
                evidence: Vec::new(),
                text: Text {
                    what: format!("{} does not answer.", view.gpu_name(gpu)),
                    why,
                    advice:
                        "Look at the kernel log for XID errors (dmesg | grep -i xid) and drain the node; a GPU that \
                             fell off the bus needs a reset or a reboot."
                            .to_owned(),
                },
            });
        }
    }
}
