//! Which batch size fits, by what PyTorch's allocator did in the first steps with two of them.

use super::answer::FileAdvice;
use crate::cli::input::Input;
use highwater_analysis::advise::allocations::{Histories, SimulatedBatch, SimulatedRank, read};
use highwater_analysis::report::{Table, size};
use std::fmt::{self, Write as _};

/// What follows from these histories.
pub(super) fn answer(files: &[&Input], headroom_bytes: u64) -> anyhow::Result<FileAdvice> {
    let mut histories = Histories::default();
    for file in files {
        histories.add(file.named(read(&file.path).map_err(anyhow::Error::from))?);
    }
    let names = || files.iter().map(|file| file.shown()).collect::<Vec<_>>().join(", ");
    let advised = histories.advise(headroom_bytes).map_err(|problem| anyhow::anyhow!("{}: {problem}", names()))?;
    Ok(FileAdvice { json: serde_json::to_value(&advised)?, text: text(&advised)? })
}

fn text(advised: &SimulatedRank) -> Result<String, fmt::Error> {
    let mut out = String::new();
    let mut table = Table::new(["batch size", "steps", "reserved at most", "in the simulation"]);
    for steps in &advised.histories {
        let [reserved, simulated] = [steps.reserved_peak_bytes, steps.simulated_peak_bytes].map(size);
        table.push([steps.batch_size.to_string(), steps.steps.to_string(), reserved, simulated]);
    }
    write!(out, "{table}")?;
    let steps = advised.histories.first().map_or(0, |steps| steps.steps);
    let limit = size(advised.limit_bytes);
    writeln!(
        out,
        "On rank {}, PyTorch's allocator may reserve {limit}; {} of the GPU are in use outside of it. By a simulation of the first \
         {steps} steps of a process:",
        advised.rank,
        size(advised.outside_bytes)
    )?;
    let how = if advised.is_expandable { "With expandable segments, as the job ran" } else { "As the job ran" };
    write_batch(&mut out, how, &advised.batch)?;
    if let Some(batch) = &advised.with_expandable_segments {
        write_batch(&mut out, "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", batch)?;
    }
    if let Some(times) = advised.batch.times_observed.filter(|times| *times > 2.0) {
        writeln!(out, "That is {times:.1} times the largest batch that was observed: approach it in steps.")?;
    }
    writeln!(
        out,
        "What is allocated in later steps alone, as for evaluation, needs room of its own: --headroom leaves it."
    )?;
    for (rank, problem) in &advised.unknown_ranks {
        writeln!(out, "Rank {rank} is left out: {problem}.")?;
    }
    if advised.left_out_files > 0 {
        writeln!(out, "Left out: {} files of further ranks or runs.", advised.left_out_files)?;
    }
    Ok(out)
}

fn write_batch(out: &mut String, how: &str, batch: &SimulatedBatch) -> fmt::Result {
    let known = batch.largest_batch_size.zip(batch.reserved_peak_bytes).zip(batch.allocated_peak_bytes);
    match known {
        Some(((largest, reserved), allocated)) => writeln!(
            out,
            "  {how}, the largest batch that fits has {largest} samples: {} reserved at most, {} of them allocated.",
            size(reserved),
            size(allocated)
        ),
        None => writeln!(out, "  {how}, not even a batch of one sample fits."),
    }
}
