//! `nvlink_degraded`: NVLinks of a GPU that are down, or on which data had to be sent again.
//!
//! A link is missing if it was up before, or, on a node with NVSwitches, if the GPU has fewer links up than another of the same
//! model. Boards and bridges connect only some of a GPU's links, so a link that is down need not be a fault. Errors are those between two
//! readings, 30 s apart, by the limits of NVIDIA's DCGM: one replay or recovery, or 100 checksum errors a second. Absent on
//! purpose: which link had the errors, because a reading of one link takes as long as the sum of all.

use super::agree::InARow;
use super::detector::{Detector, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, Severity, Sign, Text, seconds};
use super::view::View;
use crate::gpu::{GpuState, NvLinkErrors, NvLinks, Rare};

/// Checksum errors a second from which they matter: DCGM's `DCGM_LIMIT_MAX_NVLINK_CRC_ERROR`.
const CRC_PER_SECOND: f64 = 100.0;
/// Distinguish the findings of one GPU.
const DOWN: u64 = 1;
const ERRORS: u64 = 2;

/// Follows the links of all GPUs.
#[derive(Debug, Default)]
pub(super) struct NvlinkDegraded(Vec<Links>);

/// What is known of one GPU's links.
#[derive(Debug, Default)]
struct Links {
    /// The errors at the last reading, and when it was.
    before: Option<(i64, NvLinkErrors)>,
    /// Every link that was ever up.
    ever_up: u32,
    /// The most that were up before the last reading, on this GPU or on one like it.
    most: u32,
    missing: InARow,
    /// The errors between the last two readings, if they matter.
    rise: Option<Rise>,
}

/// Errors between two readings.
#[derive(Debug, Clone, Copy)]
struct Rise {
    from_ns: i64,
    to_ns: i64,
    errors: NvLinkErrors,
}

impl Detector for NvlinkDegraded {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.0.resize_with(view.gpus.len(), Links::default);
        for (gpu, links) in self.0.iter_mut().enumerate() {
            let Some(latest) = view.rare(gpu) else {
                *links = Links { ever_up: links.ever_up, ..Links::default() };
                continue;
            };
            let rare = &latest.reading;
            if links.before.is_none_or(|(read_ns, _)| read_ns != latest.at_ns) {
                links.note(latest.at_ns, rare, most_of_peers(view, gpu));
            }
            let since = |begin_ns: i64| begin_ns.max(view.subject_since_ns(gpu));
            if let Some((begin_ns, now)) = links.missing.since_ns().zip(rare.nvlinks) {
                let text = missing_text(view, gpu, now, links.ever_up, links.most);
                signs.push(sign(view, gpu, DOWN, since(begin_ns), missing_evidence(now, links.most), text));
            }
            if let Some(rise) = links.rise {
                signs.push(sign(view, gpu, ERRORS, since(rise.from_ns), rise.evidence(), rise.text(view, gpu)));
            }
        }
    }
}

impl Links {
    /// Notes a reading of these links, with the most that are up on another GPU.
    fn note(&mut self, at_ns: i64, rare: &Rare, most_of_peers: u32) {
        let up = rare.nvlinks.unwrap_or_default().up;
        self.most = most_of_peers.max(self.ever_up.count_ones());
        self.missing.note(at_ns, rare.nvlinks.is_some() && up.count_ones() < self.most);
        self.rise = self.before.and_then(|before| Rise::between(before, (at_ns, rare.nvlink_errors)));
        self.before = Some((at_ns, rare.nvlink_errors));
        self.ever_up |= up;
    }
}

/// The most links that are up on another GPU of the same model on the same fabric; 0 without a fabric, where bridges connect some GPUs
/// and not others, and of a GPU that is split into MIG instances, whose links may be off.
fn most_of_peers(view: &View<'_>, gpu: usize) -> u32 {
    let is_split =
        |state: &GpuState| view.gpus.iter().any(|other| other.device.parent_uuid.as_ref() == Some(&state.device.uuid));
    let Some(own) = view.gpus.get(gpu).filter(|own| own.device.name.is_some() && !is_split(own)) else { return 0 };
    if view.rare(gpu).is_none_or(|own| own.reading.fabric.is_none()) {
        return 0;
    }
    let is_peer = |(other, state): &(usize, &GpuState)| *other != gpu && state.device.name == own.device.name;
    let peers = view.gpus.iter().enumerate().filter(is_peer);
    let links = |(other, _): (usize, _)| {
        let peer = view.rare(other).filter(|peer| peer.reading.fabric.is_some())?;
        Some(peer.reading.nvlinks?.up.count_ones())
    };
    peers.filter_map(links).max().unwrap_or(0)
}

fn missing_evidence(now: NvLinks, most: u32) -> Vec<Evidence> {
    let counts = [("links_up_count", now.up.count_ones()), ("usual_links_count", most)];
    counts.map(|(name, count)| Evidence { name, value: count.into() }).into()
}

fn missing_text(view: &View<'_>, gpu: usize, now: NvLinks, ever_up: u32, most: u32) -> Text {
    let name = view.gpu_name(gpu);
    let index = view.gpus.get(gpu).map_or("?", |state| state.device.index.as_str());
    let lost: Vec<String> =
        (0..u32::BITS).filter(|link| ever_up & !now.up & (1 << link) != 0).map(|link| link.to_string()).collect();
    let why = if lost.is_empty() {
        format!("Another GPU of the same model on this node has {most}.")
    } else {
        format!("It had {most}; link {} went down while the daemon ran.", lost.join(", "))
    };
    Text {
        what: format!("Only {} NVLinks of {name} are up, instead of {most}.", now.up.count_ones()),
        why: format!("{why} Two readings of the driver, 30 s apart, agree."),
        advice: format!(
            "Collectives wait for the GPU with the fewest links. Compare nvidia-smi nvlink -s -i {index} with the node's other \
             GPUs, look for XID 74 in the kernel's log, and drain the node: links are trained again when its GPUs are reset \
             or the node is restarted. If it comes back, have the GPU and its board checked."
        ),
    }
}

impl Rise {
    /// The errors between two readings; `None` if they are too few to matter, or if the counters began anew.
    fn between((from_ns, before): (i64, NvLinkErrors), (to_ns, now): (i64, NvLinkErrors)) -> Option<Self> {
        let rise =
            |now: Option<u64>, before: Option<u64>| now.zip(before).and_then(|(now, before)| now.checked_sub(before));
        let errors = NvLinkErrors {
            replays: rise(now.replays, before.replays),
            recoveries: rise(now.recoveries, before.recoveries),
            crc: rise(now.crc, before.crc),
        };
        let counts = [errors.replays, errors.recoveries].into_iter().flatten();
        #[allow(clippy::cast_precision_loss, reason = "only compared with a limit")]
        let crc = errors.crc.unwrap_or(0) as f64;
        let matters = counts.sum::<u64>() > 0 || crc >= CRC_PER_SECOND * seconds(to_ns - from_ns);
        (matters && to_ns > from_ns).then_some(Self { from_ns, to_ns, errors })
    }

    fn evidence(&self) -> Vec<Evidence> {
        let NvLinkErrors { replays, recoveries, crc } = self.errors;
        let counts = [("replays_count", replays), ("recoveries_count", recoveries), ("crc_errors_count", crc)];
        #[allow(clippy::cast_precision_loss, reason = "a count for people")]
        counts.into_iter().filter_map(|(name, count)| Some(Evidence { name, value: count? as f64 })).collect()
    }

    fn text(&self, view: &View<'_>, gpu: usize) -> Text {
        let NvLinkErrors { replays, recoveries, crc } = self.errors;
        let counts = [("replays", replays), ("recoveries", recoveries), ("checksum errors", crc)];
        let counts: Vec<String> =
            counts.into_iter().filter_map(|(name, count)| Some(format!("{} {name}", count?))).collect();
        let index = view.gpus.get(gpu).map_or("?", |state| state.device.index.as_str());
        Text {
            what: format!("The NVLinks of {} had to send data again.", view.gpu_name(gpu)),
            why: format!(
                "{} in {:.0} s, over all of its links.",
                counts.join(", "),
                seconds(self.to_ns - self.from_ns)
            ),
            advice: format!(
                "What is sent again, collectives wait for. nvidia-smi nvlink -e -i {index} shows which link it is, and the node's \
                 other GPUs whether the fault lies at the other end. If it goes on, drain the node, reset its GPUs, and have \
                 the board checked: links that get worse end jobs (XID 74)."
            ),
        }
    }
}

fn sign(view: &View<'_>, gpu: usize, code: u64, begin_ns: i64, evidence: Vec<Evidence>, text: Text) -> Sign {
    Sign {
        kind: FindingKind::NvlinkDegraded,
        subject: view.subject_of(gpu),
        severity: Severity::Warning,
        certainty: Certainty::Observed,
        begin_ns,
        until_ns: view.now_ns + view.settings.hold_ns,
        step: view.step_on(gpu),
        code: Some(code),
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence,
        text,
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::super::view::RARE_OLD_NS as OLD_NS;
    use super::*;
    use crate::clock::SECOND_NS;
    use crate::gpu::{Device, Fabric};

    const JOINED: Option<Fabric> = Some(Fabric { state: 3, status: 0 });

    const ALL: NvLinks = NvLinks { present: (1 << 18) - 1, up: (1 << 18) - 1 };

    fn without(links: u32) -> NvLinks {
        NvLinks { up: ALL.up & !links, ..ALL }
    }

    fn errors(replays: u64, crc: u64) -> NvLinkErrors {
        NvLinkErrors { replays: Some(replays), recoveries: Some(0), crc: Some(crc) }
    }

    /// Two GPUs of one model whose links are read every 30 s; returns the signs of each look, one a second.
    fn signs(readings: &[[(Option<NvLinks>, NvLinkErrors); 2]]) -> Vec<Vec<Sign>> {
        signs_on(JOINED, readings)
    }

    fn signs_on(fabric: Option<Fabric>, readings: &[[(Option<NvLinks>, NvLinkErrors); 2]]) -> Vec<Vec<Sign>> {
        let (mut hand, mut detector) = (Hand::with_ranks(2), NvlinkDegraded::default());
        for (gpu, state) in hand.gpus.iter_mut().enumerate() {
            let device = Device { index: gpu.to_string(), name: Some("H200".to_owned()), ..Device::default() };
            *state = GpuState::new(device, 600 * SECOND_NS, SECOND_NS / 10);
        }
        let seconds = 0..readings.len() as i64 * 30;
        seconds
            .map(|second| {
                hand.now_ns = second * SECOND_NS;
                if second % 30 == 0 {
                    for (gpu, (nvlinks, nvlink_errors)) in readings[second as usize / 30].into_iter().enumerate() {
                        let rare = Rare { nvlinks, nvlink_errors, fabric, ..Rare::default() };
                        hand.gpus[gpu].set_rare(hand.now_ns, rare);
                    }
                }
                hand.look(&mut detector).0
            })
            .collect()
    }

    fn seconds_with_signs(looks: &[Vec<Sign>]) -> Vec<usize> {
        looks.iter().enumerate().filter(|(_, signs)| !signs.is_empty()).map(|(second, _)| second).collect()
    }

    #[test]
    fn fewer_links_than_before_or_than_a_peer_are_reported_at_the_second_reading() {
        let (well, none) = ((Some(ALL), errors(0, 0)), NvLinkErrors::default());
        let down = (Some(without(1 << 3 | 1 << 17)), errors(0, 0));
        // A peer shows at the first reading that it has fewer.
        let looks = signs(&[[well, down], [well, down], [well, well]]);
        assert_eq!(seconds_with_signs(&looks), (30..60).collect::<Vec<_>>());
        let sign = &looks[30][0];
        assert_eq!((sign.subject.gpu, sign.subject.rank, sign.begin_ns), (Some(1), Some(1), 0));
        assert_eq!(sign.text.what, "Only 16 NVLinks of GPU 1 are up, instead of 18.");
        assert!(sign.text.why.starts_with("Another GPU of the same model on this node has 18."), "{}", sign.text.why);
        // Both lose the same links: nobody has more, but they had more.
        let looks = signs(&[[well, well], [down, down], [down, down]]);
        assert_eq!((seconds_with_signs(&looks), looks[60].len()), ((60..90).collect(), 2));
        let why = &looks[60][0].text.why;
        assert!(why.starts_with("It had 18; link 3, 17 went down while the daemon ran."), "{why}");
        // A bridge that connects one pair of four.
        assert!(seconds_with_signs(&signs_on(None, &[[well, (Some(without(ALL.up)), errors(0, 0))]; 4])).is_empty());
        // A board that connects no more, a reading that fails, and a link that is down for one reading.
        assert!(seconds_with_signs(&signs(&[[down, down]; 4])).is_empty());
        assert!(seconds_with_signs(&signs(&[[well, well], [(None, none); 2], [(None, none); 2]])).is_empty());
        assert!(seconds_with_signs(&signs(&[[well, well], [down, well], [well, well], [down, well]])).is_empty());
    }

    #[test]
    fn a_gpu_that_is_split_into_instances_may_have_its_links_off() {
        let (mut hand, mut detector) = (Hand::with_ranks(3), NvlinkDegraded::default());
        for (gpu, state) in hand.gpus.iter_mut().enumerate() {
            let parent_uuid = (gpu == 2).then(|| "GPU-1".to_owned());
            let name = Some("H200".to_owned());
            let device =
                Device { index: gpu.to_string(), uuid: format!("GPU-{gpu}"), name, parent_uuid, ..Device::default() };
            *state = GpuState::new(device, 600 * SECOND_NS, SECOND_NS / 10);
        }
        for reading in 0..4 {
            hand.now_ns = reading * 30 * SECOND_NS;
            hand.gpus[0].set_rare(hand.now_ns, Rare { nvlinks: Some(ALL), fabric: JOINED, ..Rare::default() });
            hand.gpus[1]
                .set_rare(hand.now_ns, Rare { nvlinks: Some(without(ALL.up)), fabric: JOINED, ..Rare::default() });
            assert!(hand.look(&mut detector).0.is_empty());
        }
    }

    #[test]
    fn what_was_sent_again_is_reported_until_a_reading_without() {
        let well = (Some(ALL), errors(5, 7));
        let at = |replays, crc| [(Some(ALL), errors(replays, crc)), well];
        let looks = signs(&[at(0, 0), at(0, 0), at(2, 90), at(2, 2_000), at(2, 5_000), at(0, 0)]);
        let found = [60..90, 120..150].into_iter().flatten().collect::<Vec<_>>();
        assert_eq!(seconds_with_signs(&looks), found, "2,000 checksum errors in 30 s are too few");
        let sign = &looks[60][0];
        assert_eq!((sign.subject.gpu, sign.begin_ns), (Some(0), 30 * SECOND_NS));
        assert_eq!(sign.text.what, "The NVLinks of GPU 0 had to send data again.");
        assert_eq!(sign.text.why, "2 replays, 0 recoveries, 90 checksum errors in 30 s, over all of its links.");
        let evidence: Vec<_> = sign.evidence.iter().map(|one| (one.name, one.value)).collect();
        assert_eq!(evidence, [("replays_count", 2.0), ("recoveries_count", 0.0), ("crc_errors_count", 90.0)]);
        // What the driver does not count is not reported as 0.
        let partly = NvLinkErrors { replays: None, ..errors(0, 4_000) };
        let looks = signs(&[[(None, errors(0, 0)), well], [(None, partly), well]]);
        assert_eq!(looks[30][0].text.why, "0 recoveries, 4000 checksum errors in 30 s, over all of its links.");
    }

    #[test]
    fn an_old_reading_says_nothing() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), NvlinkDegraded::default());
        for (at, replays) in [(0, 0), (30, 9)] {
            hand.now_ns = at * SECOND_NS;
            hand.gpus[0].set_rare(hand.now_ns, Rare { nvlink_errors: errors(replays, 0), ..Rare::default() });
            assert_eq!(hand.look(&mut detector).0.len(), usize::from(at > 0));
        }
        hand.now_ns = 30 * SECOND_NS + OLD_NS;
        assert!(hand.look(&mut detector).0.is_empty());
    }
}
