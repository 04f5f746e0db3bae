//! `gpu_lost`: a GPU that does not answer.

use super::detector::{Detector, Trouble};
use super::finding::{Certainty, FindingKind, Severity, Sign, Text};
use super::view::{Since, View};
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
                Health::Hung => Some("A call on it has not returned.".to_owned()),
            };
            let since_ns = self.gone.note(gpu, why.is_some().then_some(view.now_ns));
            let (Some(why), Some(begin_ns)) = (why, since_ns) else { continue };
            signs.push(Sign {
                kind: FindingKind::GpuLost,
                subject: view.subject_of(gpu),
                severity: Severity::Critical,
                certainty: Certainty::Observed,
                begin_ns,
                until_ns: view.now_ns + SECOND_NS,
                step: None,
                code: None,
                lag_cause: None,
                waiting_ranks: Vec::new(),
                lost_ns: None,
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

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;

    #[test]
    fn a_gpu_is_lost_from_when_it_was_seen_so_until_it_is_back() {
        let (mut hand, mut detector) = (Hand::new(2), GpuLost::default());
        hand.ranks.push(Hand::rank_on(1));
        let mut look = |hand: &mut Hand, second: i64| {
            hand.now_ns = second * SECOND_NS;
            hand.look(&mut detector).0
        };
        assert!(look(&mut hand, 1).is_empty());
        hand.gpus[1].lose("GPU is lost");
        for second in [2, 3] {
            let [sign] = look(&mut hand, second).try_into().expect("one");
            assert_eq!((sign.begin_ns, sign.until_ns), (2 * SECOND_NS, (second + 1) * SECOND_NS));
            assert_eq!((sign.subject.gpu, sign.subject.rank, sign.severity), (Some(1), Some(0), Severity::Critical));
            assert!(sign.text.why.contains("GPU is lost"));
        }
        hand.gpus[1].set_health(Health::Hung);
        assert!(look(&mut hand, 4)[0].text.why.contains("has not returned"));
        hand.gpus[1].set_health(Health::Up);
        assert!(look(&mut hand, 5).is_empty());
        hand.gpus[1].lose("again");
        assert_eq!(look(&mut hand, 6)[0].begin_ns, 6 * SECOND_NS, "another time");
    }
}
