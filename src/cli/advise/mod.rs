//! `advise`: what to change so that a job needs less memory.

mod allocations;
mod answer;
mod any;
mod batch;
mod checkpoints;
mod recompute;

use super::input::Input;
use super::terminal;
use answer::FileAdvice;
use clap::Args;
use highwater_analysis::advise::is_history;
use highwater_core::detect::Settings;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct Advise {
    /// Files of any kind that advice can be made of: recordings, layers, logs of ORTModule; `-` is standard input.
    #[arg(
        value_name = "FILE",
        group = "layered",
        group = "planned",
        required_unless_present_any = ["layers", "plans", "batches"],
        conflicts_with_all = ["layers", "plans", "batches"]
    )]
    files: Vec<PathBuf>,
    /// Say where to checkpoint activations, from the layers of one step: a recording, traces of FairScale's
    /// `LayerwiseMemoryTracker`, or a saved answer of /api/v1/jobs/JOB/layers.
    #[arg(
        long,
        value_name = "FILE",
        group = "layered",
        conflicts_with_all = ["plans", "batches"]
    )]
    layers: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: checkpoints::CheckpointFlags,
    /// Say which of ONNX Runtime's recompute plans to enable, from a training log of ORTModule.
    #[arg(long, value_name = "FILE", group = "planned")]
    plans: Option<PathBuf>,
    #[command(flatten)]
    recompute: recompute::RecomputeFlags,
    /// Say which batch size fits: from what PyTorch's allocator did in the first steps with two of them, as
    /// `highwater.torch.watch(history_dir=…)` writes it, or from recordings of steps with different ones: `highwater run -o FILE`
    /// of a job whose steps have the attribute `batch_size`, as `watch` gives them. May be given several times.
    #[arg(long, value_name = "FILE", conflicts_with = "plans")]
    batches: Vec<PathBuf>,
    /// How much memory of each GPU is to stay free [default: what `detect.headroom` is by default, 1GiB].
    #[arg(long, value_name = "SIZE", value_parser = recompute::bytes)]
    headroom: Option<u64>,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

impl Advise {
    pub fn run(&self) -> anyhow::Result<()> {
        let headroom_bytes = self.headroom.unwrap_or(Settings::default().headroom_bytes);
        let answer = match (&self.layers, &self.plans) {
            (Some(layers), _) => self.checkpoints.answer(&Input::open(layers)?)?,
            (None, Some(plans)) => self.recompute.answer(&Input::open(plans)?, headroom_bytes)?,
            _ if !self.batches.is_empty() => {
                let files = Input::all(&self.batches)?;
                batches(&files, headroom_bytes)?
            }
            (None, None) => any::answer(&Input::all(&self.files)?, &self.checkpoints, &self.recompute, headroom_bytes)?,
        };
        if self.json {
            Ok(terminal::print_line(serde_json::to_string_pretty(&answer.json)?)?)
        } else {
            Ok(terminal::print(answer.text)?)
        }
    }
}

/// Which batch size fits, by files of one kind.
fn batches(files: &[Input], headroom_bytes: u64) -> anyhow::Result<FileAdvice> {
    let (histories, recordings): (Vec<&Input>, Vec<&Input>) = files.iter().partition(|file| is_history(&file.path));
    match (histories.first(), recordings.first()) {
        (Some(history), Some(other)) => anyhow::bail!(
            "{} is a history of allocations, and {} is not: name files of one kind",
            history.shown(),
            other.shown()
        ),
        (Some(_), None) => allocations::answer(&histories, headroom_bytes),
        (None, _) => batch::answer(&recordings, headroom_bytes),
    }
}
