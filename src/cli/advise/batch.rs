//! Which batch size fits.

use super::answer::FileAdvice;
use crate::cli::input::Input;
use highwater_analysis::advise::batch::{Basis, Observed, Rank, read};
use highwater_analysis::report::{Table, size};
use std::fmt::{self, Write as _};

/// What follows from the steps of these recordings.
pub(super) fn answer(files: &[&Input], headroom_bytes: u64) -> anyhow::Result<FileAdvice> {
    let mut observed = Observed::default();
    for file in files {
        file.named(read(&file.path, headroom_bytes, &mut observed).map_err(anyhow::Error::from))?;
    }
    let names = || files.iter().map(|file| file.shown()).collect::<Vec<_>>().join(", ");
    let advised = observed.advise().map_err(|problem| anyhow::anyhow!("{}: {problem}", names()))?;
    Ok(FileAdvice { json: serde_json::to_value(&advised)?, text: text(&advised)? })
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes for people")]
fn text(advised: &Rank) -> Result<String, fmt::Error> {
    let (mut out, fit) = (String::new(), &advised.fit);
    let are_live_tensors = advised.basis == Basis::LiveTensors;
    let peak = if are_live_tensors { "peak in live tensors" } else { "peak" };
    let mut table = Table::new(["batch size", peak, "steps"]);
    for point in &fit.points {
        table.push([point.batch_size.to_string(), size(point.peak_bytes), point.steps.to_string()]);
    }
    write!(out, "{table}")?;
    let fixed = if fit.fixed_bytes >= 0.0 {
        size(fit.fixed_bytes as u64)
    } else {
        format!("-{}", size(-fit.fixed_bytes as u64))
    };
    let per_sample = size(fit.bytes_per_sample as u64);
    write!(out, "On rank {}, the {peak} is {fixed} and {per_sample} more for each sample", advised.rank)?;
    match fit.error_bytes {
        Some(error) => writeln!(out, ", with an error of {}.", size(error as u64))?,
        None => writeln!(out, ". With two batch sizes, the error of this is not known.")?,
    }
    match (fit.largest_batch_size, fit.predicted_peak_bytes) {
        (Some(largest), Some(peak)) => {
            writeln!(out, "The largest batch that stays below {} has {largest} samples.", size(fit.limit_bytes))?;
            write!(out, "Its peak should be {}", size(peak))?;
            match fit.highest_peak_bytes {
                Some(highest) => writeln!(out, ", and with a probability of 97.5 % at most {}.", size(highest))?,
                None => writeln!(out, ".")?,
            }
        }
        _ => writeln!(out, "Not even a batch of one sample stays below {}.", size(fit.limit_bytes))?,
    }
    if let Some(times) = fit.times_observed.filter(|times| *times > 2.0) {
        writeln!(out, "That is {times:.1} times the largest batch that was observed: approach it in steps.")?;
    }
    write_room(advised, &mut out)?;
    if advised.several_in_one_process && !are_live_tensors {
        writeln!(
            out,
            "Several batch sizes ran in one process, whose allocator keeps blocks of each: with a process for each, more may fit."
        )?;
    }
    if advised.left_out_steps > 0 {
        let steps = advised.left_out_steps;
        writeln!(out, "Left out: {steps} steps after one with a larger batch, whose memory the allocator kept.")?;
    }
    for (rank, problem) in &advised.unknown_ranks {
        writeln!(out, "Rank {rank} is left out: {problem}.")?;
    }
    Ok(out)
}

/// What is left beside live tensors, and which batches depend on it.
fn write_room(advised: &Rank, out: &mut String) -> fmt::Result {
    let fit = &advised.fit;
    let Some((outside, slack)) = advised.outside_bytes.zip(fit.slack_bytes) else { return Ok(()) };
    writeln!(
        out,
        "That leaves room for {} of the GPU's memory outside the job's allocator, and for {} that the allocator may need \
         beside live tensors.",
        size(outside),
        size(slack)
    )?;
    let above = fit.largest_batch_size.unwrap_or(0) + 1;
    if let Some(possible) = fit.possible_batch_size.filter(|possible| *possible >= above) {
        writeln!(
            out,
            "Whether {above} to {possible} samples fit depends on how much of that it needs; more do not, by live tensors alone. \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lowers what it needs."
        )?;
    }
    Ok(())
}
