//! Where to checkpoint activations.

use crate::cli::terminal;
use clap::Args;
use highwater_analysis::advise::{Checkpoints, MOST_CHECKPOINTS, ProfileChoice, checkpoints, read};
use highwater_analysis::report::{Table, size};
use std::fmt::{self, Write as _};
use std::path::Path;

#[derive(Debug, Args)]
pub(super) struct CheckpointFlags {
    /// How many checkpoints there may be.
    #[arg(long, value_name = "K", requires = "layers", conflicts_with = "plans", value_parser = clap::value_parser!(u64).range(..=MOST_CHECKPOINTS as u64))]
    checkpoints: Option<u64>,
    /// Leave this many layers at the begin as they are.
    #[arg(long, value_name = "N", requires = "layers", conflicts_with = "plans", default_value_t = 0)]
    skip_layers: usize,
    /// Layers of this job [default: of the rank with the most activations].
    #[arg(long, requires = "layers", conflicts_with = "plans")]
    job: Option<String>,
    /// Layers of this rank.
    #[arg(long, requires = "layers", conflicts_with = "plans")]
    rank: Option<u32>,
}

impl CheckpointFlags {
    pub fn run(&self, file: &Path, json: bool) -> anyhow::Result<()> {
        let choice = ProfileChoice { job: self.job.clone(), rank: self.rank };
        let (layers, profiles) = read(file, &choice)?;
        let most = usize::try_from(self.checkpoints.unwrap_or_default())?;
        let advice = checkpoints(&layers, most, self.skip_layers)
            .map_err(|problem| anyhow::anyhow!("{}: {problem}", file.display()))?;
        if json {
            terminal::print_line(serde_json::to_string_pretty(&advice)?)?;
        } else {
            terminal::print(text(&advice, &layers.whose(), profiles)?)?;
        }
        Ok(())
    }
}

/// How many numbers of checkpoints are compared at most.
const MOST_COMPARED: usize = 16;

fn text(advice: &Checkpoints, whose: &str, profiles: usize) -> Result<String, fmt::Error> {
    let mut out = String::new();
    let all: u64 = advice.segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.activation_bytes));
    let of =
        if profiles > 1 { format!(", which has the most activations of {profiles} profiles") } else { String::new() };
    writeln!(out, "{} layers of {}{of}.", advice.layers, highwater_engine::recording::printable(whose))?;
    if advice.split_modules.is_empty() {
        writeln!(out, "Without checkpoints, they leave {} of activations for the backward pass.", size(all))?;
    } else {
        writeln!(
            out,
            "With {} checkpoints, at most {} of activations are held at a time, instead of {}:",
            advice.split_modules.len(),
            size(advice.max_memory),
            size(all)
        )?;
        let mut table = Table::new(["checkpoint", "from", "to", "layers", "activations"]);
        for (nth, segment) in advice.segments.iter().enumerate() {
            let is_last = nth + 1 == advice.segments.len();
            table.push([
                if is_last { "no" } else { "yes" }.to_owned(),
                segment.first.clone(),
                segment.last.clone(),
                segment.layers.to_string(),
                size(segment.activation_bytes),
            ]);
        }
        write!(out, "{table}")?;
        writeln!(out, "The backward pass begins with the last part: to checkpoint it would gain nothing.")?;
    }
    let peaks = advice.observed_peak_bytes.zip(advice.predicted_peak_bytes);
    if let Some((observed, predicted)) = peaks.filter(|_| !advice.split_modules.is_empty()) {
        let (from, to) = (size(observed), size(predicted));
        writeln!(out, "The allocator's peak, {from} as observed, should fall to {to}.")?;
    }
    if let Some(seconds) = advice.recomputed_seconds.filter(|seconds| *seconds > 0.0) {
        writeln!(out, "Each step runs forward passes of {:.1} ms a second time.", seconds * 1e3)?;
    }
    if advice.unknown_layers > 0 {
        writeln!(out, "Left out: {} layers whose activations are not known.", advice.unknown_layers)?;
    }
    if advice.missing_records > 0 {
        writeln!(out, "{} records of layers are missing: the daemon had no room for them.", advice.missing_records)?;
    }
    let mut table = Table::new(["checkpoints", "activations at a time"]);
    for (checkpoints, largest) in advice.max_memory_by_checkpoints.iter().enumerate().take(MOST_COMPARED) {
        table.push([checkpoints.to_string(), size(*largest)]);
    }
    write!(out, "{table}")?;
    Ok(out)
}
