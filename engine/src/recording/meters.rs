//! Utilization, power, clock event reasons and activity of each GPU, if the recording has them.

use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{Medium, UsagePoint};
use std::collections::BTreeMap;

/// A reading holds for this long.
const HOLD_NS: i64 = SECOND_NS;

/// Readings by GPU number, in order of time. A value that was not recorded is not known.
#[derive(Debug, Default)]
pub struct Meters {
    by_gpu: BTreeMap<u32, Vec<UsagePoint>>,
}

impl Meters {
    /// Takes readings in any order.
    pub(super) fn new(mut by_gpu: BTreeMap<u32, Vec<UsagePoint>>) -> Self {
        by_gpu.values_mut().for_each(|readings| readings.sort_by_key(|reading| reading.at_ns));
        Self { by_gpu }
    }

    /// What was known of a GPU at a recorded time.
    pub(super) fn at(&self, gpu: u32, at_ns: i64) -> Medium {
        let readings = self.by_gpu.get(&gpu).map(Vec::as_slice).unwrap_or_default();
        let after = readings.partition_point(|reading| reading.at_ns <= at_ns);
        let last = after.checked_sub(1).and_then(|last| readings.get(last));
        last.filter(|reading| at_ns.saturating_sub(reading.at_ns) <= HOLD_NS).map_or_else(Medium::default, |reading| {
            Medium {
                utilization_ratio: reading.utilization_ratio,
                power_watts: reading.power_watts,
                throttle_reasons: reading.throttle_reasons,
                activity: reading.activity,
                ..Medium::default()
            }
        })
    }
}
