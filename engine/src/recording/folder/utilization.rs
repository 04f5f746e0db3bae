//! Utilization and power of each GPU: `realtime_ns,gpu,utilization_percent,power_mw` lines.

use super::memory::gpu_of;
use crate::recording::FileProblem;
use crate::recording::lines::{LineFile, SkippedLines};
use crate::recording::meters::Meters;
use highwater_core::gpu::UsagePoint;
use highwater_core::source::OpenError;
use std::collections::BTreeMap;
use std::path::Path;

const HEADER: &str = "realtime_ns,gpu,utilization_percent,power_mw";

/// Reads such a file.
pub(super) fn read(path: &Path, skipped: &mut SkippedLines) -> Result<Meters, OpenError> {
    let mut by_gpu = BTreeMap::new();
    LineFile::open(path)?.parse(skipped, parse, |(gpu, reading)| {
        gpu_of::<Vec<UsagePoint>>(&mut by_gpu, gpu)?.push(reading);
        Ok(())
    })?;
    Ok(Meters::new(by_gpu))
}

fn parse(line: &str) -> Result<Option<(u32, UsagePoint)>, FileProblem> {
    if line.starts_with('#') || line == HEADER {
        return Ok(None);
    }
    let mut fields = line.split(',').map(str::trim);
    let (Some(at), Some(gpu), Some(percent), Some(milliwatts), None) =
        (fields.next(), fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return Err(FileProblem::malformed(format!("`{HEADER}` is expected")));
    };
    let number = |text: &str, name| match text {
        "" => Ok(None),
        _ => text.parse::<f64>().map(Some).map_err(|_| FileProblem::not_a(name, text)),
    };
    Ok(Some((
        gpu.parse().map_err(|_| FileProblem::not_a("GPU number", gpu))?,
        UsagePoint {
            at_ns: at.parse().map_err(|_| FileProblem::not_a("time in nanoseconds", at))?,
            utilization_ratio: number(percent, "percentage")?.map(|percent| percent / 100.0),
            power_watts: number(milliwatts, "power")?.map(|milliwatts| milliwatts / 1000.0),
            ..UsagePoint::default()
        },
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::gpu::Medium;

    #[test]
    fn a_reading_holds_for_a_second_and_an_empty_field_is_not_known() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("utilization.csv");
        let text = format!("{HEADER}\n1000000000,0,50,250000\n1500000000,0,,300000\nnonsense\n");
        std::fs::write(&path, text).expect("written");
        let mut skipped = SkippedLines::default();
        let meters = read(&path, &mut skipped).expect("readable");
        let at = |ns| (meters.at(0, ns).utilization_ratio, meters.at(0, ns).power_watts);
        assert_eq!(at(999_999_999), (None, None));
        assert_eq!(at(1_200_000_000), (Some(0.5), Some(250.0)));
        assert_eq!(at(1_600_000_000), (None, Some(300.0)));
        assert_eq!(at(2_500_000_001), (None, None));
        assert_eq!(meters.at(1, 1_200_000_000), Medium::default());
        // A recording may contain any time.
        std::fs::write(&path, format!("{}, 0, 50, 250000\n", i64::MIN)).expect("written");
        let meters = read(&path, &mut skipped).expect("readable");
        assert_eq!(meters.at(0, i64::MAX), Medium::default());
        assert_eq!(skipped.count, 1);
    }
}
