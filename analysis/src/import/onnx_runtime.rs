//! What ONNX Runtime's NVML profiler writes: lines of `<device> <nanoseconds since start> <bytes>`.

use super::readings::Readings;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
pub use highwater_engine::recording::lines::{Fault, LineFile};
pub use highwater_engine::recording::tape::{Format, Tape, Times};
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::path::Path;

const FORMAT: Format = Format {
    name: "ONNX Runtime memory profile",
    times: Times::Relative,
    missing: &["the date", "the GPUs' sizes and names", "steps and phases"],
};

/// Whether a line is one of this format.
pub(crate) fn is_line(line: &str) -> bool {
    parse(line).is_ok()
}

pub(crate) fn tape(path: &Path, file: &LineFile) -> Result<Tape, OpenError> {
    let (mut readings, mut skipped) = (Readings::default(), SkippedLines::default());
    super::each_line(path, file, &mut skipped, |line| {
        let (gpu, at_ns, used) = parse(line).map_err(Fault::Line)?;
        readings.push(gpu, at_ns, Some(used), || Device { index: gpu.to_string(), ..Device::default() })
    })?;
    readings.tape(path, FORMAT, skipped)
}

fn parse(line: &str) -> Result<(u32, i64, u64), FileProblem> {
    let mut fields = line.split_ascii_whitespace();
    let (Some(gpu), Some(at), Some(used), None) = (fields.next(), fields.next(), fields.next(), fields.next()) else {
        return Err(FileProblem::malformed("`<device> <nanoseconds> <bytes>` is expected"));
    };
    let at_ns: i64 = at.parse().map_err(|_| FileProblem::not_a("time in nanoseconds", at))?;
    if at_ns < 0 {
        return Err(FileProblem::not_a("time in nanoseconds", at));
    }
    Ok((
        gpu.parse().map_err(|_| FileProblem::not_a("device number", gpu))?,
        at_ns,
        used.parse().map_err(|_| FileProblem::not_a("number of bytes", used))?,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::tests::imported;
    use highwater_engine::recording::tape::Times;

    #[test]
    fn every_device_has_its_own_memory_and_a_stalled_poller_leaves_a_gap() {
        let mut text = String::new();
        for tick in 0..400_u64 {
            // The poller was held up for 100 of its periods.
            let at_ns = tick * 1_000 + if tick >= 300 { 100_000 } else { 0 };
            text += &format!("0 {at_ns} {}\n1 {} 7\n", 1_000 + tick / 100, at_ns + 10);
        }
        let tape = imported("memory_usage.txt", &text).expect("a recording");
        assert_eq!((tape.begin_ns, tape.end_ns, tape.format.times), (0, 499_010, Times::Relative));
        let points: Vec<Vec<_>> = tape.tracks.iter().map(|track| track.points().collect()).collect();
        assert_eq!(
            points[0],
            [
                (0, Some(1_000)),
                (100_000, Some(1_001)),
                (200_000, Some(1_002)),
                (299_001, None),
                (400_000, Some(1_003)),
                (499_000, Some(1_003)),
            ]
        );
        assert_eq!(points[1], [(10, Some(7)), (299_011, None), (400_010, Some(7)), (499_010, Some(7))]);
        assert_eq!(tape.skipped.count, 0);
    }

    #[test]
    fn a_pause_before_the_period_is_known_is_a_gap_too() {
        let times = [0, 10, 20, 30, 500, 510, 520];
        let text: String = times.iter().map(|at_ns| format!("0 {at_ns} 5\n")).collect();
        let tape = imported("memory_usage.txt", &text).expect("a recording");
        let points: Vec<_> = tape.tracks[0].points().collect();
        assert_eq!(points, [(0, Some(5)), (31, None), (500, Some(5)), (520, Some(5))]);
    }

    #[test]
    fn a_gpu_that_is_not_read_any_more_is_not_known_any_more() {
        let mut text: String = (0..50).map(|tick| format!("0 {0} 5\n1 {0} 6\n", tick * 10)).collect();
        text += &(50..100).map(|tick| format!("1 {} 6\n", tick * 10)).collect::<String>();
        // A time that goes back is no reading of its GPU.
        text += "1 20 9\n";
        let tape = imported("memory_usage.txt", &text).expect("a recording");
        let points: Vec<Vec<_>> = tape.tracks.iter().map(|track| track.points().collect()).collect();
        assert_eq!(points[0], [(0, Some(5)), (490, Some(5)), (491, None)]);
        assert_eq!(points[1], [(0, Some(6)), (990, Some(6))]);
        assert_eq!(tape.skipped.count, 1);
    }

    #[test]
    fn bad_lines_are_counted_and_a_cut_last_line_is_not_believed() {
        let tape =
            imported("a.txt", "0 0 5\n0 x 6\n\n0 2 -7\n0 1 2 3\n-1 4 4\n0 -4 4\n0 9 8\n0 10 12345").expect("read");
        assert_eq!(tape.tracks[0].points().collect::<Vec<_>>(), [(0, Some(5)), (9, Some(8))]);
        let messages: Vec<&str> = tape.skipped.first.iter().map(|skipped| skipped.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "`x` is not a time in nanoseconds",
                "`-7` is not a number of bytes",
                "`<device> <nanoseconds> <bytes>` is expected",
                "`-1` is not a device number",
                "`-4` is not a time in nanoseconds",
                "it does not end with a newline, so it may be cut off",
            ]
        );
        let error = imported("a.txt", "0 0 5").expect_err("nothing is left");
        assert!(error.message.contains("it has no memory of any GPU; "), "{error:?}");
        let far = imported("a.txt", "0 0 5\n0 9000000000000000000 5\n").expect_err("too long");
        assert!(far.message.contains("31 days"), "{far:?}");
    }
}
