//! The lines about memory that `ORTModule` of ONNX Runtime prints into a training log (`ORTMODULE_PRINT_MEMORY_STATS=1`).
//!
//! Enters: a log, line by line. Leaves: the values of each such line. Invariants: other lines, and lines of more than 64 KiB,
//! are ignored, and so is the text before the values, except the rank and the step; a line with a value that cannot be read is
//! counted, and no other is lost. The forms are those of ONNX Runtime 1.17 to 1.20: `_runtime_inspector.py` and
//! `log_memory_usage`.

use crate::log_lines::LogLines;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{LineFile, broken_off, short};
use highwater_engine::recording::{FileProblem, SkippedLines, refuse};
use std::io::{BufReader, ErrorKind};
use std::path::Path;

/// The text by which a line of this kind is recognized.
const MARK: &str = " memory (MiB) | phase: ";
/// A log has its first line of this kind within this number of unpacked bytes.
pub(crate) const BEGIN: usize = 4 << 20;
/// The longest name of a phase, bytes.
const MOST_NAME_BYTES: usize = 64;

/// One line. Sizes are bytes, and were printed in whole MiB.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Statistics {
    /// The rank that printed it; only rank 0 does.
    pub rank: u32,
    /// How many times the model had run.
    pub step: u64,
    /// `pre_forward`, `post_forward`, `pre_backward` or `post_backward`.
    pub phase: String,
    /// What PyTorch's allocator had given to tensors.
    pub allocated: u64,
    /// The highest of it since the first line.
    pub max_allocated: u64,
    /// What the allocator had from the driver. ONNX Runtime calls it *cached*.
    pub reserved: u64,
    /// The highest of it since the first line.
    pub max_reserved: u64,
    /// What the allocator could not give back because a part of its block was in use.
    pub inactive: Option<u64>,
    /// What `nvidia-smi` showed for the rank's GPU.
    pub device_used: Option<u64>,
    /// Parameters, gradients and buffers of the model.
    pub parameters: Option<u64>,
    /// See above.
    pub gradients: Option<u64>,
    /// See above.
    pub buffers: Option<u64>,
}

/// Whether a file that begins like this is a log that has such lines.
pub(crate) fn is_begin(begin: &[u8]) -> bool {
    begin.windows(MARK.len()).any(|window| window == MARK.as_bytes())
}

/// Passes what each line says to `take`; returns the lines that could not be read.
///
/// # Errors
/// The file cannot be read, or `take` returns an error about the whole file.
pub(crate) fn each(
    path: &Path,
    mut take: impl FnMut(Statistics) -> Result<(), FileProblem>,
) -> Result<SkippedLines, OpenError> {
    let (mut skipped, mut last) = (SkippedLines::default(), 0);
    let mut lines = LogLines::new(BufReader::new(LineFile::open(path)?.bytes()));
    loop {
        let line = match lines.next() {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(skipped),
            Err(error) if error.kind() == ErrorKind::FileTooLarge => {
                return Err(refuse("recording_too_large", path, error));
            }
            Err(error) => {
                skipped.add(path, last + 1, broken_off(&error));
                return Ok(skipped);
            }
        };
        last = line.number;
        // One that is too long is none of these.
        let text = String::from_utf8_lossy(line.text.unwrap_or_default());
        let Some((before, values)) = text.split_once(MARK) else { continue };
        let parsed = match line.is_ended {
            true => parse(before, values),
            false => Err(super::cut_off()),
        };
        match parsed {
            Ok(statistics) => take(statistics).map_err(|problem| refuse(problem.reason(), path, problem))?,
            Err(problem) => skipped.add(path, line.number, problem),
        }
    }
}

/// `… rank-0 step 12` and `pre_forward | allocated: 1024 | …`.
fn parse(before: &str, values: &str) -> Result<Statistics, FileProblem> {
    let mut words = before.rsplit(' ');
    let (step, name, rank) = (words.next(), words.next(), words.next());
    let step = step.filter(|_| name == Some("step")).and_then(|step| step.parse().ok());
    let step = step.ok_or(FileProblem::Malformed("`step <number>` is expected before `memory (MiB)`".into()))?;
    let mut fields = values.split(" | ");
    let phase = fields.next().unwrap_or_default().trim();
    if phase.is_empty() || phase.len() > MOST_NAME_BYTES {
        return Err(not_a("name of a phase", phase));
    }
    let mut found =
        Statistics { rank: rank_of(rank.unwrap_or_default())?, step, phase: phase.to_owned(), ..Statistics::default() };
    let (mut allocated, mut max_allocated, mut reserved, mut max_reserved) = (None, None, None, None);
    for field in fields {
        let Some((name, value)) = field.split_once(": ") else {
            return Err(FileProblem::malformed(format!("`{}` has no value", short(field, MOST_NAME_BYTES))));
        };
        let place = match name {
            "allocated" => &mut allocated,
            "max allocated" => &mut max_allocated,
            "cached" => &mut reserved,
            "max cached" => &mut max_reserved,
            "inactive" => &mut found.inactive,
            "nvm smi" => {
                // One value, that of the rank's GPU, or those of all GPUs.
                let own = if value.contains(',') { value.split(',').nth(found.rank as usize) } else { Some(value) };
                found.device_used = own.map(bytes).transpose()?;
                continue;
            }
            "param size" => &mut found.parameters,
            "grad size" => &mut found.gradients,
            "buffer size" => &mut found.buffers,
            // `max inactive`, and what later versions add.
            _ => continue,
        };
        *place = Some(bytes(value)?);
    }
    let known =
        |value: Option<u64>, name: &str| value.ok_or_else(|| FileProblem::malformed(format!("`{name}` is missing")));
    found.allocated = known(allocated, "allocated")?;
    found.max_allocated = known(max_allocated, "max allocated")?;
    found.reserved = known(reserved, "cached")?;
    found.max_reserved = known(max_reserved, "max cached")?;
    Ok(found)
}

/// `rank-3`, `[3/8]`, or `3`, perhaps with what a launcher writes before it.
fn rank_of(word: &str) -> Result<u32, FileProblem> {
    let own = word.strip_suffix(']').and_then(|rest| rest.split_once('/')).map_or(word, |(rank, _)| rank);
    let digits = own.rsplit(|one: char| !one.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().map_err(|_| not_a("rank", word))
}

fn bytes(text: &str) -> Result<u64, FileProblem> {
    let bytes = text.trim().parse::<u64>().ok().and_then(|mib| mib.checked_mul(1 << 20));
    bytes.ok_or_else(|| not_a("number of MiB", text))
}

fn not_a(wanted: &'static str, text: &str) -> FileProblem {
    FileProblem::not_a(wanted, &short(text, MOST_NAME_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Statistics, FileProblem> {
        let (before, values) = line.split_once(MARK).expect("such a line");
        parse(before, values)
    }

    #[test]
    fn the_forms_of_all_versions_are_read() {
        let mib = |mib: u64| mib << 20;
        let first = read(
            "[0/8] step 12 memory (MiB) | phase: pre_forward | allocated: 1866 | max allocated: 20490 | cached: 32768 \
             | max cached: 32769 | inactive: 18 | max inactive: 4000",
        );
        let wanted = Statistics {
            rank: 0,
            step: 12,
            phase: "pre_forward".to_owned(),
            allocated: mib(1866),
            max_allocated: mib(20490),
            reserved: mib(32768),
            max_reserved: mib(32769),
            inactive: Some(mib(18)),
            ..Statistics::default()
        };
        assert_eq!(first.as_ref(), Ok(&wanted));
        let second = read(
            "2024-06-07 10:11:12 orttraining.rank-0 [INFO] - rank-0 step 12 memory (MiB) | phase: pre_forward | nvm smi: 40000 \
             | allocated: 1866 | max allocated: 20490 | cached: 32768 | max cached: 32769 | inactive: 18 \
             | max inactive: 4000 | param size: 1400 | grad size: 700 | buffer size: 3",
        );
        let sizes = Statistics {
            device_used: Some(mib(40000)),
            parameters: Some(mib(1400)),
            gradients: Some(mib(700)),
            buffers: Some(mib(3)),
            ..wanted.clone()
        };
        assert_eq!(second, Ok(sizes));
        let third = read(
            "[1,0]<stdout>:1 step 12 memory (MiB) | phase: pre_forward | allocated: 1866 | max allocated: 20490 \
             | cached: 32768 | max cached: 32769 | inactive: 18 | max inactive: 4000 | nvm smi: 7,9",
        );
        assert_eq!(third, Ok(Statistics { rank: 1, device_used: Some(mib(9)), ..wanted }));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let line = |before: &str, allocated: &str| {
            read(&format!(
                "{before} memory (MiB) | phase: p | allocated: {allocated} | max allocated: 2 | cached: 3 | max cached: 4"
            ))
        };
        assert_eq!(line("rank-0 step 1", "1").map(|found| found.reserved), Ok(3 << 20));
        let not_a = FileProblem::not_a;
        let step = FileProblem::Malformed("`step <number>` is expected before `memory (MiB)`".into());
        let wrong = [
            (line("rank-x step 1", "1"), not_a("rank", "rank-x")),
            (line("rank-0 step x", "1"), step.clone()),
            (line("rank-0 1", "1"), step),
            (line("rank-0 step 1", "-1"), not_a("number of MiB", "-1")),
            (line("rank-0 step 1", "18446744073709551615"), not_a("number of MiB", "18446744073709551615")),
            (
                read("0 step 1 memory (MiB) | phase: p | allocated: 1"),
                FileProblem::Malformed("`max allocated` is missing".into()),
            ),
            (
                read("0 step 1 memory (MiB) | phase: p | allocated"),
                FileProblem::Malformed("`allocated` has no value".into()),
            ),
            (read("0 step 1 memory (MiB) | phase: "), not_a("name of a phase", "")),
        ];
        for (found, wanted) in wrong {
            assert_eq!(found, Err(wanted));
        }
    }
}
