//! What files of any kind say.
//!
//! Enters: files. Leaves: all the advice that can be made of each, and of all recordings together, and of all histories of
//! allocations, the batch size. What a recording
//! lacks is named with the reason. It is an error if a file has nothing at all, or if no advice follows.

use super::allocations;
use super::answer::FileAdvice;
use super::batch;
use super::checkpoints::CheckpointFlags;
use super::recompute::RecomputeFlags;
use crate::cli::input::Input;
use highwater_analysis::advise::{Advisable, advisable};
use highwater_engine::recording::printable;
use serde_json::json;

/// The advice of these files.
pub(super) fn answer(
    files: &[Input],
    checkpoints: &CheckpointFlags,
    recompute: &RecomputeFlags,
    headroom_bytes: u64,
) -> anyhow::Result<FileAdvice> {
    let mut all = Collected { are_several: files.len() > 1, ..Collected::default() };
    let (mut recordings, mut histories): (Vec<&Input>, Vec<&Input>) = (Vec::new(), Vec::new());
    for file in files {
        match file.named(advisable(&file.path).map_err(anyhow::Error::from))? {
            Advisable::Layers => all.add(file, "checkpoints", Ok(checkpoints.answer(file)?)),
            Advisable::Plans => all.add(file, "plans", Ok(recompute.answer(file, headroom_bytes)?)),
            Advisable::Allocations => histories.push(file),
            Advisable::Recording => {
                recordings.push(file);
                all.add(file, "checkpoints", checkpoints.answer(file));
            }
        }
    }
    let batch = (!recordings.is_empty()).then(|| batch::answer(&recordings, headroom_bytes));
    let simulated = (!histories.is_empty()).then(|| allocations::answer(&histories, headroom_bytes));
    all.finish(batch, simulated)
}

/// The advice so far.
#[derive(Default)]
struct Collected {
    are_several: bool,
    text: String,
    files: Vec<serde_json::Value>,
    /// Why there is not more.
    lacking: Vec<String>,
    answers: usize,
}

impl Collected {
    fn add(&mut self, file: &Input, kind: &str, answer: anyhow::Result<FileAdvice>) {
        if self.are_several && answer.is_ok() {
            self.text += &format!("{}:\n", printable(&file.shown()));
        }
        let json = self.take(answer);
        self.files.push(json!({"file": file.shown(), kind: json}));
    }

    /// Keeps an answer's text, or why there is none; returns its JSON.
    fn take(&mut self, answer: anyhow::Result<FileAdvice>) -> Option<serde_json::Value> {
        match answer {
            Ok(FileAdvice { json, text }) => {
                self.answers += 1;
                self.text += &text;
                Some(json)
            }
            Err(error) => {
                self.lacking.push(printable(&format!("{error:#}")));
                None
            }
        }
    }

    fn finish(
        mut self,
        batch: Option<anyhow::Result<FileAdvice>>,
        simulated: Option<anyhow::Result<FileAdvice>>,
    ) -> anyhow::Result<FileAdvice> {
        let batch = batch.and_then(|batch| self.take(batch));
        let simulated = simulated.and_then(|simulated| self.take(simulated));
        anyhow::ensure!(self.answers > 0, "no advice can be made: {}", self.lacking.join("; "));
        for why in &self.lacking {
            self.text += &format!("Not advised: {why}.\n");
        }
        Ok(FileAdvice {
            json: json!({"files": self.files, "batch": batch, "simulated_batch": simulated, "not_advised": self.lacking}),
            text: self.text,
        })
    }
}
