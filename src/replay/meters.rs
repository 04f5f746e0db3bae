//! Utilization and power of each GPU, where the recording has them: `realtime_ns,gpu,utilization_percent,power_mw` lines.

use super::lines::{File, SkippedLines};
use super::points::gpu_of;
use crate::source::OpenError;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::Medium;
use std::collections::BTreeMap;
use std::path::Path;

const HEADER: &str = "realtime_ns,gpu,utilization_percent,power_mw";
/// A reading holds for this long.
const HOLD_NS: i64 = SECOND_NS;

/// One reading; a field that was left empty is not known.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at_ns: i64,
    utilization_ratio: Option<f64>,
    power_watts: Option<f64>,
}

/// Readings by GPU number, in order of time.
#[derive(Debug, Default)]
pub(super) struct Meters {
    by_gpu: BTreeMap<u32, Vec<Reading>>,
}

impl Meters {
    /// Reads a file of them.
    pub(super) fn read(path: &Path, skipped: &mut SkippedLines) -> Result<Self, OpenError> {
        let mut meters = Self::default();
        File::open(path)?.parse(skipped, parse, |(gpu, reading)| {
            gpu_of(&mut meters.by_gpu, gpu)?.push(reading);
            Ok(())
        })?;
        meters.by_gpu.values_mut().for_each(|readings| readings.sort_by_key(|reading| reading.at_ns));
        Ok(meters)
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
                ..Medium::default()
            }
        })
    }
}

fn parse(line: &str) -> Result<Option<(u32, Reading)>, String> {
    if line.starts_with('#') || line == HEADER {
        return Ok(None);
    }
    let mut fields = line.split(',').map(str::trim);
    let (Some(at), Some(gpu), Some(percent), Some(milliwatts), None) =
        (fields.next(), fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return Err(format!("`{HEADER}` is expected"));
    };
    let number = |text: &str, name: &str| match text {
        "" => Ok(None),
        _ => text.parse::<f64>().map(Some).map_err(|_| format!("`{text}` is no {name}")),
    };
    Ok(Some((
        gpu.parse().map_err(|_| format!("`{gpu}` is no GPU number"))?,
        Reading {
            at_ns: at.parse().map_err(|_| format!("`{at}` is no time in nanoseconds"))?,
            utilization_ratio: number(percent, "percentage")?.map(|percent| percent / 100.0),
            power_watts: number(milliwatts, "power")?.map(|milliwatts| milliwatts / 1000.0),
        },
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_holds_for_a_second_and_an_empty_field_is_not_known() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("utilization.csv");
        let text = format!("{HEADER}\n1000000000,0,50,250000\n1500000000,0,,300000\nnonsense\n");
        std::fs::write(&path, text).expect("written");
        let mut skipped = SkippedLines::default();
        let meters = Meters::read(&path, &mut skipped).expect("readable");
        let at = |ns| (meters.at(0, ns).utilization_ratio, meters.at(0, ns).power_watts);
        assert_eq!(at(999_999_999), (None, None));
        assert_eq!(at(1_200_000_000), (Some(0.5), Some(250.0)));
        assert_eq!(at(1_600_000_000), (None, Some(300.0)));
        assert_eq!(at(2_500_000_001), (None, None));
        assert_eq!(meters.at(1, 1_200_000_000), Medium::default());
        // A recording may say any time.
        std::fs::write(&path, format!("{}, 0, 50, 250000\n", i64::MIN)).expect("written");
        let meters = Meters::read(&path, &mut skipped).expect("readable");
        assert_eq!(meters.at(0, i64::MAX), Medium::default());
        assert_eq!(skipped.count, 1);
    }
}
