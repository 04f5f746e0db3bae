//! `gpu_lost`: a GPU that does not answer.

use super::finding::{Certainty, Kind, Severity, Sign, Subject, Text};
use super::view::View;
use super::{Detector, Trouble};
use crate::clock::SECOND_NS;
use crate::sample::Health;

/// Follows since when each GPU is gone.
#[derive(Debug, Default)]
pub(super) struct GpuLost {
    since_ns: Vec<Option<i64>>,
}

impl Detector for GpuLost {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.since_ns.resize(view.gpus.len(), None);
        for (gpu, (state, since_ns)) in view.gpus.iter().zip(&mut self.since_ns).enumerate() {
            let why = match state.health() {
                Health::Up => {
                    *since_ns = None;
                    continue;
                }
                Health::Lost => format!("The driver says: {}.", state.trouble()),
                Health::Hung => "A call on it has not come back.".to_owned(),
            };
            let begin_ns = *since_ns.get_or_insert(view.now_ns);
            let rank = view.rank_on(gpu);
            let (job, rank) = (rank.map(|rank| rank.key.0.clone()), rank.map(|rank| rank.key.1));
            signs.push(Sign {
                kind: Kind::GpuLost,
                subject: Subject { gpu: Some(gpu), job, rank },
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
