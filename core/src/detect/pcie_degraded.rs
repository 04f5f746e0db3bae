//! `pcie_degraded`: a GPU whose PCIe link has fewer lanes, or a lower generation, than the GPU and its slot can do.
//!
//! Fewer lanes are always a fault. A lower generation is one only while the GPU works: an idle GPU may lower it to save power.
//! The driver is asked every 30 s, and two readings in a row must agree.

use super::agree::InARow;
use super::detector::{Detector, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, Severity, Sign, Text};
use super::view::View;
use crate::gpu::PcieLink;

/// A GPU works if a kernel ran for at least this share of the driver's last window.
const BUSY: f64 = 0.5;

/// Follows the links of all GPUs.
#[derive(Debug, Default)]
pub(super) struct PcieDegraded(Vec<LinkState>);

/// What is known of one GPU's link.
#[derive(Debug, Default)]
struct LinkState {
    /// Whether it worked at the last look.
    was_busy: bool,
    degraded: InARow,
}

impl Detector for PcieDegraded {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.0.resize_with(view.gpus.len(), LinkState::default);
        for (gpu, state) in self.0.iter_mut().enumerate() {
            let read = view.rare(gpu).and_then(|rare| Some((rare.at_ns, rare.reading.pcie_link?)));
            let Some((at_ns, link)) = read else {
                *state = LinkState { was_busy: is_busy(view, gpu), ..LinkState::default() };
                continue;
            };
            let is_busy = is_busy(view, gpu);
            // It may have begun to work since the reading.
            let is_at_fault =
                link.width < link.max_width || (is_busy && state.was_busy && link.generation < link.max_generation);
            state.degraded.note(at_ns, is_at_fault);
            state.was_busy = is_busy;
            if let Some(begin_ns) = state.degraded.since_ns() {
                signs.push(sign(view, gpu, &link, begin_ns.max(view.subject_since_ns(gpu))));
            }
        }
    }
}

fn is_busy(view: &View<'_>, gpu: usize) -> bool {
    let medium = view.gpus.get(gpu).and_then(|gpu| gpu.medium());
    medium.and_then(|latest| latest.reading.utilization_ratio).is_some_and(|ratio| ratio >= BUSY)
}

fn sign(view: &View<'_>, gpu: usize, link: &PcieLink, begin_ns: i64) -> Sign {
    let speeds = link.bytes_per_second();
    let ratio = speeds.map(|(now, best)| Evidence { name: "link_speed_ratio", value: now / best });
    let lanes = [("link_lanes_count", link.width), ("best_lanes_count", link.max_width)];
    let evidence = lanes.map(|(name, lanes)| Evidence { name, value: lanes.into() });
    let cost = speeds.map_or_else(String::new, |(now, best)| {
        format!(" It moves at most {:.1} GB/s in each direction; at its best, {:.1} GB/s.", now / 1e9, best / 1e9)
    });
    Sign {
        kind: FindingKind::PcieDegraded,
        subject: view.subject_of(gpu),
        severity: Severity::Warning,
        certainty: Certainty::Observed,
        begin_ns,
        until_ns: view.now_ns + view.settings.hold_ns,
        step: view.step_on(gpu),
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: evidence.into_iter().chain(ratio).collect(),
        text: Text {
            what: format!(
                "The PCIe link of {} runs at generation {} with {} lanes instead of generation {} with {}.",
                view.gpu_name(gpu),
                link.generation,
                link.width,
                link.max_generation,
                link.max_width
            ),
            why: format!("The driver has reported this in at least two readings, 30 s apart.{cost}"),
            advice:
                "Batches and checkpoints are copied over this link, and collectives too where there is no NVLink. Look \
                     for PCIe errors in the kernel's log (dmesg | grep -i -e pcie -e aer), compare lspci -vv with the \
                     node's other GPUs, and have the GPU, riser or cable seated again."
                    .to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::super::view::RARE_OLD_NS as OLD_NS;
    use super::*;
    use crate::clock::SECOND_NS;
    use crate::gpu::Rare;

    const WHOLE: PcieLink = PcieLink { generation: 5, width: 16, max_generation: 5, max_width: 16 };

    /// Reads a link every 30 s, with the utilization of then, and looks each second; returns the seconds of the looks with a
    /// sign.
    fn seconds(readings: &[(Option<PcieLink>, f64)]) -> Vec<i64> {
        let (mut hand, mut detector, mut found) = (Hand::with_ranks(1), PcieDegraded::default(), Vec::new());
        for second in 0..readings.len() as i64 * 30 {
            hand.now_ns = second * SECOND_NS;
            if second % 30 == 0 {
                let (pcie_link, utilization) = readings[second as usize / 30];
                hand.runs(0, Some(utilization));
                hand.look(&mut detector);
                hand.gpus[0].set_rare(hand.now_ns, Rare { pcie_link, ..Rare::default() });
            }
            found.extend(hand.look(&mut detector).0.iter().map(|sign| {
                assert_eq!((sign.begin_ns / SECOND_NS) % 30, 0);
                second
            }));
        }
        found
    }

    #[test]
    fn half_of_the_lanes_are_reported_at_the_second_reading_and_a_whole_link_never() {
        let narrow = PcieLink { width: 8, ..WHOLE };
        assert!(seconds(&[(Some(WHOLE), 1.0); 4]).is_empty());
        assert_eq!(
            seconds(&[(Some(WHOLE), 0.0), (Some(narrow), 0.0), (Some(narrow), 0.0)]),
            (60..90).collect::<Vec<_>>()
        );
        assert!(seconds(&[(Some(narrow), 1.0), (Some(WHOLE), 1.0), (Some(narrow), 1.0), (None, 1.0)]).is_empty());
    }

    #[test]
    fn a_lower_generation_counts_only_while_the_gpu_works() {
        let slow = PcieLink { generation: 1, ..WHOLE };
        assert!(seconds(&[(Some(slow), 0.1); 4]).is_empty(), "to save power");
        assert_eq!(seconds(&[(Some(slow), 1.0), (Some(slow), 0.5), (Some(slow), 0.4)]), (30..60).collect::<Vec<_>>());
    }

    #[test]
    fn it_says_what_the_link_is_and_what_it_could_move() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), PcieDegraded::default());
        let link = PcieLink { generation: 3, width: 8, max_generation: 5, max_width: 16 };
        let mut signs = Vec::new();
        for second in [1, 31] {
            hand.now_ns = second * SECOND_NS;
            hand.gpus[0].set_rare(hand.now_ns, Rare { pcie_link: Some(link), ..Rare::default() });
            signs = hand.look(&mut detector).0;
        }
        let [sign] = signs.try_into().expect("one");
        assert_eq!(
            sign.text.what,
            "The PCIe link of GPU 0 runs at generation 3 with 8 lanes instead of generation 5 with 16."
        );
        assert!(
            sign.text.why.contains("at most 7.9 GB/s in each direction; at its best, 63.0 GB/s"),
            "{}",
            sign.text.why
        );
        assert_eq!((sign.begin_ns, sign.subject.rank), (SECOND_NS, Some(0)));
        let ratio = sign.evidence.iter().find(|one| one.name == "link_speed_ratio").expect("known").value;
        assert!((ratio - 0.125).abs() < 1e-9, "{ratio}");
        // A reading that is too old says nothing.
        hand.now_ns = 31 * SECOND_NS + OLD_NS;
        assert!(hand.look(&mut detector).0.is_empty());
        // It wakes up just as its link is read, twice.
        let (mut hand, mut detector) = (Hand::with_ranks(1), PcieDegraded::default());
        let slow = PcieLink { generation: 1, ..WHOLE };
        for second in 0..61 {
            hand.now_ns = second * SECOND_NS;
            hand.runs(0, Some(if second % 30 == 0 { 1.0 } else { 0.0 }));
            if second % 30 == 0 {
                hand.gpus[0].set_rare(hand.now_ns, Rare { pcie_link: Some(slow), ..Rare::default() });
            }
            assert!(hand.look(&mut detector).0.is_empty(), "{second}");
        }
        let unknown = PcieLink { generation: 9, max_generation: 9, ..WHOLE };
        assert_eq!(unknown.bytes_per_second(), None);
    }
}
