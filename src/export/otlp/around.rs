//! Raw points around findings only. Points wait until it is known whether a finding is near.
//!
//! Enters: points as they are drawn, and the current findings. Leaves: the points from [`MARGIN_NS`] before a finding
//! begins to [`MARGIN_NS`] after its last sign, each once. The points of every GPU are sent, because the memory of one rank
//! explains why another waits for it. Each stretch that is sent ends with a point without a value, so that no graph draws a
//! line to the next finding. Invariants: the number of waiting points is bounded. Points that are discarded for lack of room
//! are counted. A decision is final. Absent on purpose: what a finding is; and the ring, so discarded points are not read
//! again for a finding that began long ago.

use super::near::{MARGIN_NS, Near};
use super::raw::Drawn;
use highwater_core::clock::SECOND_NS;
use highwater_core::detect::{Finding, Severity};
use highwater_core::gpu::Device;
use highwater_core::ring::Point;
use std::collections::{BTreeMap, VecDeque};

/// How long a point waits. It leaves five seconds, after the margin, for a nearby finding to be raised. Findings are
/// raised half a second or a step after they began.
pub(super) const HELD_NS: i64 = MARGIN_NS + 5 * SECOND_NS;
/// The most points that wait, over all GPUs: about 8 MiB.
const MOST_HELD: usize = 1 << 18;

/// The waiting points of each GPU, and the times near findings.
#[derive(Default)]
pub(super) struct Around {
    near: Near,
    /// By UUID.
    curves: BTreeMap<String, Curve>,
}

struct Curve {
    device: Device,
    /// Points in order, each with the shift that makes its time Unix time.
    waiting: VecDeque<(Point, i64)>,
    period_ns: i64,
    /// When the stretch being sent ends if its next point is not sent: one period after its last point. `None` if that
    /// point has no value, or no stretch is being sent.
    open_until_ns: Option<i64>,
}

impl Around {
    /// Adds drawn points to those that wait.
    pub fn hold(&mut self, drawn: Vec<Drawn>) {
        for Drawn { device, points, shift_ns, period_ns } in drawn {
            let curve = self.curves.entry(device.uuid.clone()).or_insert_with(|| Curve::of(device));
            curve.period_ns = period_ns;
            curve.waiting.extend(points.into_iter().map(|point| (point, shift_ns)));
        }
    }

    /// Takes the current findings. A finding that goes on is passed again at each turn.
    pub fn look<'a>(&mut self, findings: impl Iterator<Item = &'a Finding>) {
        let oldest = self.curves.values().filter_map(|curve| curve.waiting.front());
        let Some(oldest_ns) = oldest.map(|(point, _)| point.at_ns).min() else { return };
        let is_near = |finding: &&Finding| finding.seen_ns.saturating_add(MARGIN_NS) >= oldest_ns;
        for finding in findings.filter(|finding| finding.sign.severity >= Severity::Warning).filter(is_near) {
            self.near.add(finding.sign.begin_ns, finding.seen_ns);
        }
    }

    /// Decides about the points before `until_ns`, and about later ones that exceed the limit. Returns the points near a
    /// finding, with Unix times, and how many of the later ones were discarded.
    pub fn release(&mut self, until_ns: i64) -> (Vec<Drawn>, u64) {
        let share = MOST_HELD / self.curves.len().max(1);
        let (mut released, mut lost) = (Vec::new(), 0);
        for curve in self.curves.values_mut() {
            let due = curve.waiting.partition_point(|(point, _)| point.at_ns < until_ns);
            let count = due.max(curve.waiting.len().saturating_sub(share));
            let (points, let_go) = curve.decide(count, due, &self.near);
            lost += let_go;
            if !points.is_empty() {
                let (device, period_ns) = (curve.device.clone(), curve.period_ns);
                released.push(Drawn { device, points, shift_ns: 0, period_ns });
            }
        }
        self.near.forget_before(until_ns);
        self.curves.retain(|_, curve| !curve.waiting.is_empty() || curve.open_until_ns.is_some());
        (released, lost)
    }
}

impl Curve {
    fn of(device: Device) -> Self {
        Self { device, waiting: VecDeque::new(), period_ns: 0, open_until_ns: None }
    }

    /// Decides about the first `count` points. The first `due` have waited long enough; the rest exceed the limit. Returns
    /// the points to send, and how many of the rest were discarded.
    fn decide(&mut self, count: usize, due: usize, near: &Near) -> (Vec<Point>, u64) {
        let (mut chosen, mut let_go) = (Vec::new(), 0);
        for (place, (point, shift_ns)) in self.waiting.drain(..count).enumerate() {
            if near.touches(point.at_ns, point.at_ns) {
                self.open_until_ns = point.used.is_some().then_some(point.at_ns.saturating_add(self.period_ns));
                chosen.push(Point { at_ns: point.at_ns.saturating_add(shift_ns), ..point });
                continue;
            }
            if place >= due {
                let_go += 1;
            }
            if let Some(open_until_ns) = self.open_until_ns.take() {
                // Not after the point that follows, so that times only rise.
                let at_ns = open_until_ns.min(point.at_ns).saturating_add(shift_ns);
                chosen.push(Point { at_ns, used: None });
            }
        }
        (chosen, let_go)
    }
}

#[cfg(test)]
mod tests;
