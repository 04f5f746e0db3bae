//! Where to checkpoint activations.

use super::answer::FileAdvice;
use crate::cli::input::Input;
use clap::Args;
use highwater_analysis::advise::{Checkpoints, MOST_CHECKPOINTS, ModuleAdvice, ProfileChoice, checkpoints, read};
use highwater_analysis::report::{Table, of_modules, size};
use std::fmt::{self, Write as _};

#[derive(Debug, Args)]
pub(super) struct CheckpointFlags {
    /// How many checkpoints there may be [default: as many modules as bring the peak near the lowest that can be reached; 4
    /// where a file has no peaks of modules].
    #[arg(long, value_name = "K", requires = "layered", conflicts_with = "plans", value_parser = clap::value_parser!(u64).range(..=MOST_CHECKPOINTS as u64))]
    checkpoints: Option<u64>,
    /// Leave this many layers at the begin as they are.
    #[arg(long, value_name = "N", requires = "layered", conflicts_with = "plans", default_value_t = 0)]
    skip_layers: usize,
    /// Layers of this job [default: of the rank with the most activations].
    #[arg(long, requires = "layered", conflicts_with = "plans")]
    job: Option<String>,
    /// Layers of this rank.
    #[arg(long, requires = "layered", conflicts_with = "plans")]
    rank: Option<u32>,
}

impl CheckpointFlags {
    /// What follows from the layers of a file.
    pub fn answer(&self, file: &Input) -> anyhow::Result<FileAdvice> {
        let choice = ProfileChoice { job: self.job.clone(), rank: self.rank };
        let (layers, profiles) = file.named(read(&file.path, &choice).map_err(anyhow::Error::from))?;
        let most = self.checkpoints.map(usize::try_from).transpose()?;
        let advice = checkpoints(&layers, most, self.skip_layers)
            .map_err(|problem| anyhow::anyhow!("{}: {problem}", file.shown()))?;
        let text = text(&advice, &layers.whose(), profiles)?;
        Ok(FileAdvice { json: serde_json::to_value(&advice)?, text })
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
    if let Some(advice) = &advice.modules {
        write!(out, "{}", modules(advice)?)?;
    } else {
        write!(out, "{}", parts(advice, all)?)?;
    }
    if advice.unknown_layers > 0 {
        writeln!(out, "Left out: {} layers whose activations are not known.", advice.unknown_layers)?;
    }
    if advice.missing_records > 0 {
        writeln!(out, "{} records of layers are missing: the daemon had no room for them.", advice.missing_records)?;
    }
    Ok(out)
}

/// The modules to checkpoint, and what each further one gains.
fn modules(advice: &ModuleAdvice) -> Result<String, fmt::Error> {
    let mut out = String::new();
    if advice.modules.is_empty() {
        let peak = size(advice.observed_peak_bytes);
        writeln!(out, "Without checkpoints, the peak of a step is {peak} in live tensors, in {}.", advice.peak_at)?;
    } else {
        let mut sentence = of_modules(advice);
        sentence.get_mut(..1).into_iter().for_each(str::make_ascii_uppercase);
        writeln!(out, "{sentence}")?;
        writeln!(out, "To apply it: highwater.torch.checkpoint(model, FILE), where FILE has what --json prints.")?;
        let mut table = Table::new(["module", "no longer held"]);
        for module in &advice.modules {
            table.push([module.name.clone(), size(u64::try_from(module.held_bytes).unwrap_or(0))]);
        }
        write!(out, "{table}")?;
    }
    let mut table = Table::new(["modules", "peak", "runs again"]);
    let last = advice.by_count.len().saturating_sub(1);
    let step = advice.by_count.len().div_ceil(MOST_COMPARED).max(1);
    for (_, one) in advice.by_count.iter().enumerate().filter(|(nth, _)| nth % step == 0 || *nth == last) {
        let again = one.recomputed_seconds.map_or("not known".to_owned(), |seconds| format!("{:.1} ms", seconds * 1e3));
        table.push([one.modules.to_string(), size(one.predicted_peak_bytes), again]);
    }
    write!(out, "{table}")?;
    Ok(out)
}

/// Parts of consecutive layers, where a file has no peaks of modules.
fn parts(advice: &Checkpoints, all: u64) -> Result<String, fmt::Error> {
    let mut out = String::new();
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
        if predicted < observed {
            writeln!(out, "The allocator's peak, {from} as observed, should fall to {to}.")?;
        } else {
            writeln!(
                out,
                "The allocator's peak, {from} as observed, should not fall: it lies outside of these layers."
            )?;
        }
    }
    if let Some(seconds) = advice.recomputed_seconds.filter(|seconds| *seconds > 0.0) {
        writeln!(out, "Each step runs forward passes of {:.1} ms a second time.", seconds * 1e3)?;
    }
    let mut table = Table::new(["checkpoints", "activations at a time"]);
    for (checkpoints, largest) in advice.max_memory_by_checkpoints.iter().enumerate().take(MOST_COMPARED) {
        table.push([checkpoints.to_string(), size(*largest)]);
    }
    write!(out, "{table}")?;
    Ok(out)
}
