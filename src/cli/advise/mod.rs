//! `advise`: what to change so that a job needs less memory.

mod checkpoints;
mod recompute;

use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct Advise {
    /// Say where to checkpoint activations, from the layers of one step: a recording, traces of FairScale's
    /// `LayerwiseMemoryTracker`, or a saved answer of /api/v1/jobs/JOB/layers.
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present = "plans",
        requires = "checkpoints",
        conflicts_with = "plans"
    )]
    layers: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: checkpoints::CheckpointFlags,
    /// Say which of ONNX Runtime's recompute plans to enable, from a training log of ORTModule.
    #[arg(long, value_name = "FILE")]
    plans: Option<PathBuf>,
    #[command(flatten)]
    recompute: recompute::RecomputeFlags,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

impl Advise {
    pub fn run(&self) -> anyhow::Result<()> {
        match (&self.layers, &self.plans) {
            (Some(layers), _) => self.checkpoints.run(layers, self.json),
            (None, Some(plans)) => self.recompute.run(plans, self.json),
            // clap sees to it.
            (None, None) => Ok(()),
        }
    }
}
