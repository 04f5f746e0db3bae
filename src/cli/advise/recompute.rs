//! Which of ONNX Runtime's recompute plans to enable.

use super::answer::FileAdvice;
use crate::cli::input::Input;
use anyhow::Context as _;
use clap::Args;
use highwater_analysis::advise::recompute::{
    Choice, Combination, Dims, Log, Offer, Plan, choose, configured, listed, names, read,
};
use highwater_analysis::import::bytes_of;
use highwater_analysis::report::{Report, Room, Table, size};
use highwater_core::units::parse_bytes;
use highwater_engine::offline;
use highwater_engine::recording::printable;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(super) struct RecomputeFlags {
    /// How much memory the plans are to save, such as 3.2GiB [default: they are only listed].
    #[arg(long, value_name = "SIZE", requires = "planned", conflicts_with = "layers", value_parser = bytes)]
    free: Option<u64>,
    /// Save as much as the fullest GPU of this recording lacks to keep `--headroom` free.
    #[arg(long, value_name = "FILE", requires = "planned", conflicts_with_all = ["layers", "free"])]
    observed: Option<PathBuf>,
    /// Compute savings with this value of a dimension instead of the first batch's. May be given several times.
    #[arg(long = "dim", value_name = "NAME=N", requires = "planned", conflicts_with = "layers", value_parser = dim)]
    dims: Vec<(String, u64)>,
    /// What ORTMODULE_MEMORY_OPT_CONFIG is now: a list joined by commas, or a JSON file [default: as the log says].
    #[arg(long, value_name = "PLANS", requires = "planned", conflicts_with = "layers")]
    enabled: Option<String>,
}

pub(super) fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

fn dim(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.split_once('=').ok_or("is not NAME=N")?;
    let value = value.trim().parse().map_err(|_| format!("`{}` is not a number", value.trim()))?;
    Ok((name.trim().to_owned(), value))
}

/// The largest log, unpacked, bytes.
const MOST_LOG_BYTES: u64 = 64 << 30;

/// A plan with what it saves, or why that is not known.
struct Valued<'a> {
    plan: &'a Plan,
    saving: Result<Option<u64>, String>,
}

impl RecomputeFlags {
    /// What follows from the plans of a log.
    pub fn answer(&self, file: &Input, headroom_bytes: u64) -> anyhow::Result<FileAdvice> {
        let name = || file.shown();
        let bytes = file.named(bytes_of(&file.path, MOST_LOG_BYTES).map_err(anyhow::Error::from))?;
        let log = read(BufReader::new(bytes)).with_context(name)?;
        anyhow::ensure!(
            !log.plans.is_empty(),
            "{}: has no table of plans: ORTModule prints one at log level INFO, in lines such as ` - Plan 1 : OFF : \
             BiasGelu+:1:-1 …`",
            file.shown()
        );
        let dims = self.dims(&log)?;
        let enabled = self.enabled.as_deref().map(enabled).transpose()?;
        let plans: Vec<Valued<'_>> = log
            .plans
            .iter()
            .map(|plan| Valued { plan, saving: plan.saving(&dims).map_err(|error| error.to_string()) })
            .collect();
        let offers: Vec<Offer<'_>> = plans
            .iter()
            .map(|valued| Offer { plan: valued.plan, saving_bytes: valued.saving.as_ref().ok().copied().flatten() })
            .collect();
        let in_force = enabled.as_deref().or(log.enabled.as_deref());
        let free = match &self.observed {
            Some(observed) => Some(lacking(observed, headroom_bytes)?),
            None => self.free,
        };
        let chosen =
            free.map(|need| choose(&offers, in_force, &log.exclusive(), need)).transpose().with_context(name)?;
        let json = as_json(&log, &plans, &dims, chosen.as_ref());
        Ok(FileAdvice { json, text: as_text(&log, &plans, chosen.as_ref(), free)? })
    }

    /// The dimensions with which to compute; none if savings are to stay as they were printed.
    fn dims(&self, log: &Log) -> anyhow::Result<Dims> {
        if self.dims.is_empty() {
            return Ok(Dims::new());
        }
        let mut dims = log.dims.clone();
        let names: BTreeSet<String> =
            log.plans.iter().filter_map(|plan| plan.expression.as_deref()).flat_map(names).collect();
        for (name, value) in &self.dims {
            anyhow::ensure!(
                names.contains(name),
                "--dim {name}: no plan's saving depends on it, but on {}",
                names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
            );
            dims.insert(name.clone(), *value);
        }
        Ok(dims)
    }
}

/// How many bytes the fullest GPU of a recording lacks to keep the headroom free.
fn lacking(observed: &Path, headroom_bytes: u64) -> anyhow::Result<u64> {
    let report = Report::open(observed, Room::of(1), &offline::Settings::default())?;
    let lacking = report.gpus.iter().filter_map(|gpu| {
        let (peak, usable) = (gpu.usage.peak?.0, gpu.device.usable_bytes()?);
        Some(peak.saturating_add(headroom_bytes).saturating_sub(usable))
    });
    lacking.max().with_context(|| {
        format!(
            "--observed {}: it has no GPU whose size and peak are known: say how much to save by --free",
            observed.display()
        )
    })
}

/// Reads `--enabled`: a JSON file, or a list of plans. A list has colons, because the ID of each plan has.
fn enabled(text: &str) -> anyhow::Result<Vec<Combination>> {
    let found = match File::open(text) {
        Ok(file) => configured(file).map_err(anyhow::Error::from),
        Err(_) if text.contains(':') => listed(text).map_err(anyhow::Error::from),
        Err(error) => Err(error.into()),
    };
    found.map_err(|problem| anyhow::anyhow!("--enabled {}: {problem}", printable(text)))
}

/// A text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", printable(text).replace('\'', "'\\''"))
}

/// A saving as text. Below 1 MiB it is printed in bytes, because a plan may save only a few.
fn saved(bytes: u64) -> String {
    if bytes < 1 << 20 { format!("{bytes} B") } else { size(bytes) }
}

fn as_json(log: &Log, plans: &[Valued<'_>], dims: &Dims, chosen: Option<&Choice>) -> Value {
    // Without `--dim`, the savings are those printed in the log, computed with the dimensions of the first batch.
    let dims = if dims.is_empty() { &log.dims } else { dims };
    let plans = plans.iter().map(|Valued { plan, saving }| {
        json!({
            "plan": plan.combination.to_string(),
            "is_on": plan.is_on,
            "frequency": plan.frequency,
            "saving_bytes": saving.as_ref().ok().copied().flatten(),
            "expression": plan.expression,
            "problem": saving.as_ref().err(),
            "line": plan.line,
        })
    });
    json!({"plans": plans.collect::<Vec<_>>(), "choice": chosen, "dims": dims, "unreadable_rows": log.unreadable.count})
}

fn as_text(log: &Log, plans: &[Valued<'_>], chosen: Option<&Choice>, need: Option<u64>) -> Result<String, fmt::Error> {
    let mut out = String::new();
    let mut table = Table::new(["plan", "now", "often", "saves", "enable"]);
    for (position, Valued { plan, saving }) in plans.iter().enumerate() {
        let is_chosen = chosen.is_some_and(|chosen| chosen.positions.contains(&position));
        table.push([
            plan.combination.to_string(),
            if plan.is_on { "on" } else { "off" }.to_owned(),
            plan.frequency.map_or_else(|| "?".to_owned(), |often| often.to_string()),
            saving.as_ref().ok().copied().flatten().map_or_else(|| "?".to_owned(), saved),
            if is_chosen { "yes" } else { "" }.to_owned(),
        ]);
    }
    write!(out, "{table}")?;
    if let Some(problem) = plans.iter().find_map(|valued| valued.saving.as_ref().err()) {
        writeln!(out, "Not every saving is known: {}", printable(problem))?;
    }
    if let Some((line, problem)) = log.unreadable.first.first() {
        let count = log.unreadable.count;
        writeln!(out, "{count} rows could not be read; the first, in line {line}: {}", printable(problem))?;
    }
    let Some((chosen, need)) = chosen.zip(need) else { return Ok(out) };
    if chosen.enable.is_empty() {
        writeln!(out, "Nothing is to be enabled to save {}.", saved(need))?;
        return Ok(out);
    }
    let many = if chosen.enable.len() == 1 { "1 plan saves" } else { &format!("{} plans save", chosen.enable.len()) };
    writeln!(out, "{many} {} of the {} that are needed.", saved(chosen.saving_bytes), saved(need))?;
    if !chosen.is_exact {
        writeln!(out, "There are too many plans to be sure that no fewer do.")?;
    }
    writeln!(out, "Before May 2024: export ORTMODULE_MEMORY_OPT_CONFIG={}", quoted(&chosen.inline))?;
    writeln!(out, "Since: export ORTMODULE_MEMORY_OPT_CONFIG=FILE, a file with {}", printable(&chosen.json))?;
    Ok(out)
}
