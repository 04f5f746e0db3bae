//! `advise`: what to change so that a job needs less memory.

mod batch;
mod checkpoints;
mod recompute;

use clap::Args;
use highwater_core::detect::Settings;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct Advise {
    /// Say where to checkpoint activations, from the layers of one step: a recording, traces of FairScale's
    /// `LayerwiseMemoryTracker`, or a saved answer of /api/v1/jobs/JOB/layers.
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present_any = ["plans", "batches"],
        conflicts_with_all = ["plans", "batches"]
    )]
    layers: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: checkpoints::CheckpointFlags,
    /// Say which of ONNX Runtime's recompute plans to enable, from a training log of ORTModule.
    #[arg(long, value_name = "FILE")]
    plans: Option<PathBuf>,
    #[command(flatten)]
    recompute: recompute::RecomputeFlags,
    /// Say which batch size fits, from recordings of steps with different ones: `highwater run -o FILE` of a job whose steps
    /// have the attribute `batch_size`, as `highwater.torch.watch` gives them. May be given several times.
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
        match (&self.layers, &self.plans) {
            _ if !self.batches.is_empty() => batch::run(&self.batches, headroom_bytes, self.json),
            (Some(layers), _) => self.checkpoints.run(layers, self.json),
            (None, Some(plans)) => self.recompute.run(plans, headroom_bytes, self.json),
            // clap sees to it.
            (None, None) => Ok(()),
        }
    }
}
