//! `highwater replay-eval`: measures the quality of detection on recordings with a known truth.
//!
//! Enters: folders with a recording and its `truth.json`. Leaves: precision and recall of each kind of finding and of its causes,
//! with 95 % intervals, and its delay, as a table or JSON, which has every sign. It shows the effect of a changed threshold (`--set detect.…`).

use super::terminal;
use crate::config::{SettingLayers, Settings, load};
use anyhow::{Context as _, bail};
use flate2::read::GzDecoder;
use highwater_analysis::replay;
use highwater_core::detect::evaluate::{Score, Truth, interval, score};
use highwater_core::detect::{FindingKind, LagCause, Looked, Severity, Sign};
use highwater_engine::files::{OwnFolder, read_text};
use highwater_engine::offline;
use highwater_engine::recording::Options;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest `truth.json`.
const MOST_TRUTH_BYTES: u64 = 16 << 20;

/// The recording's file in its folder; without it, the folder is one of text files.
const RECORDING: &str = "recording.sqlite";
/// The same, compressed.
const PACKED: &str = "recording.sqlite.gz";
/// The largest file that is unpacked.
const MOST_UNPACKED_BYTES: u64 = 1 << 30;

/// What to evaluate.
#[derive(Debug, clap::Args)]
pub struct ReplayEval {
    /// Folders, each with a truth.json, and with a recording.sqlite(.gz) or a recording's text files.
    #[arg(required = true, value_name = "FOLDER")]
    recordings: Vec<PathBuf>,
    /// Any setting, such as detect.lag=1.3.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = super::common::key_value)]
    set: Vec<(String, String)>,
    /// Leave out what the jobs' allocators count, as if they had not sent it: what is seen from outside is scored.
    #[arg(long)]
    without_counters: bool,
    /// JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Fail if precision or recall of any kind of finding, over all recordings, is below this.
    #[arg(long, value_name = "SHARE", value_parser = share)]
    fail_below: Option<f64>,
}

/// A share, from 0 to 1.
fn share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "is not a share from 0 to 1".to_owned())
}

type Scores = BTreeMap<FindingKind, Score>;

impl ReplayEval {
    /// Plays every recording and prints how its findings agree with its truth.
    pub fn run(&self) -> anyhow::Result<()> {
        let settings = settings_of(&self.set)?;
        let mut all: BTreeMap<String, Scores> = BTreeMap::new();
        let mut told: BTreeMap<String, Vec<Told>> = BTreeMap::new();
        let mut looked: BTreeMap<FindingKind, Looked> = BTreeMap::new();
        let mut all_signs: BTreeMap<String, Vec<OneSign>> = BTreeMap::new();
        for recording in &self.recordings {
            let name = recording.display().to_string();
            let (scores, signs, of_recording) =
                evaluate(recording, &settings, self.without_counters).with_context(|| name.clone())?;
            of_recording.into_iter().for_each(|(kind, of_kind)| looked.entry(kind).or_default().add(of_kind));
            all.insert(name.clone(), scores);
            told.insert(name.clone(), Told::of(&signs));
            all_signs.insert(name, signs.iter().map(OneSign::of).collect());
        }
        let (mut total, mut kinds) = (Score::default(), Scores::new());
        for (kind, score) in all.values().flatten() {
            total.add(score);
            kinds.entry(*kind).or_default().add(score);
        }
        if self.json {
            let report = serde_json::json!({
                "recordings": all, "kinds": kinds, "all": total, "told": told, "looked": looked, "signs": all_signs,
            });
            terminal::print_line(serde_json::to_string_pretty(&report)?)?;
        } else {
            terminal::print(table(&all, &kinds, &total))?;
            terminal::print(looked_table(&looked))?;
        }
        self.fail_below.map_or(Ok(()), |least| judge(&kinds, least))
    }
}

/// Judges each kind separately: a kind that is found too often or not at all would be lost among the others.
fn judge(kinds: &Scores, least: f64) -> anyhow::Result<()> {
    if kinds.is_empty() {
        bail!("the recordings contain nothing to find, and nothing was found");
    }
    let mut below = Vec::new();
    for (kind, score) in kinds {
        for (name, share) in [("precision", score.precision()), ("recall", score.recall())] {
            below.extend(
                share.filter(|share| *share < least).map(|share| format!("{name} of {} is {share:.3}", kind.label())),
            );
        }
    }
    if below.is_empty() { Ok(()) } else { bail!("below {least}: {}", below.join(", ")) }
}

/// The signs of one kind and severity for one rank, or for the job as a whole, summed over all steps.
#[derive(Debug, serde::Serialize)]
struct Told {
    finding: FindingKind,
    severity: Severity,
    rank: Option<u32>,
    /// The first step and its text.
    first_step: Option<u64>,
    what: String,
    signs: u64,
    /// The mean of each number.
    evidence: BTreeMap<&'static str, f64>,
}

impl Told {
    fn of(signs: &[(i64, Sign)]) -> Vec<Self> {
        let mut all: BTreeMap<(FindingKind, Severity, Option<u32>), Self> = BTreeMap::new();
        for (_, sign) in signs {
            let (finding, severity, rank) = (sign.kind, sign.severity, sign.subject.rank);
            let told = all.entry((finding, severity, rank)).or_insert_with(|| Self {
                finding,
                severity,
                rank,
                first_step: sign.step,
                what: sign.text.what.clone(),
                signs: 0,
                evidence: BTreeMap::new(),
            });
            told.signs += 1;
            #[allow(clippy::cast_precision_loss, reason = "a count of signs")]
            let count = told.signs as f64;
            for evidence in &sign.evidence {
                let mean = told.evidence.entry(evidence.name).or_default();
                *mean += (evidence.value - *mean) / count;
            }
        }
        all.into_values().collect()
    }
}

/// One sign.
#[derive(Debug, serde::Serialize)]
struct OneSign {
    seen_unix_nano: i64,
    finding: FindingKind,
    severity: Severity,
    rank: Option<u32>,
    step: Option<u64>,
    begin_unix_nano: i64,
    lag_cause: Option<LagCause>,
    what: String,
    why: String,
    evidence: BTreeMap<&'static str, f64>,
}

impl OneSign {
    fn of((seen_unix_nano, sign): &(i64, Sign)) -> Self {
        Self {
            seen_unix_nano: *seen_unix_nano,
            finding: sign.kind,
            severity: sign.severity,
            rank: sign.subject.rank,
            step: sign.step,
            begin_unix_nano: sign.begin_ns,
            lag_cause: sign.lag_cause,
            what: sign.text.what.clone(),
            why: sign.text.why.clone(),
            evidence: sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect(),
        }
    }
}

type Signs = Vec<(i64, Sign)>;

/// For each kind, the number of steps that ended, and of those in which its detector abstained.
type AllLooked = BTreeMap<FindingKind, Looked>;

fn evaluate(
    recording: &Path,
    settings: &Settings,
    without_counters: bool,
) -> anyhow::Result<(Scores, Signs, AllLooked)> {
    let path = recording.join("truth.json");
    let text = read_text(&path, MOST_TRUTH_BYTES).with_context(|| path.display().to_string())?;
    let truth: Truth = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let settings = offline::Settings { without_counters, ..settings.into() };
    let (file, packed) = (recording.join(RECORDING), recording.join(PACKED));
    let (signs, looked) = if packed.is_file() {
        let folder = OwnFolder::make("highwater-replay-eval").context("cannot make a folder to unpack into")?;
        let unpacked = folder.path().join(RECORDING);
        unpack(&packed, &unpacked).with_context(|| packed.display().to_string())?;
        signs_of(&unpacked, &settings)?
    } else {
        signs_of(if file.is_file() { &file } else { recording }, &settings)?
    };
    let scores = FindingKind::ALL.into_iter().map(|kind| (kind, score(kind, &truth, &signs)));
    Ok((scores.filter(|(_, score)| score.must_find + score.signs > 0).collect(), signs, looked))
}

/// Every sign in a recording, with its time, and in how many steps each kind was looked for.
fn signs_of(recording: &Path, settings: &offline::Settings) -> anyhow::Result<(Signs, AllLooked)> {
    let replay = Arc::new(replay::open(recording, Options::default())?);
    let mut signs = Vec::new();
    let played = offline::play(&replay, settings, |at_ns, _, change| {
        signs.extend(change.signs.into_iter().map(|sign| (at_ns, sign)));
    })?;
    Ok((signs, played.detect.looked()))
}

fn unpack(packed: &Path, to: &Path) -> anyhow::Result<()> {
    let file = GzDecoder::new(File::open(packed)?);
    let bytes = std::io::copy(&mut file.take(MOST_UNPACKED_BYTES), &mut File::create(to)?)?;
    if bytes >= MOST_UNPACKED_BYTES {
        bail!("it is larger than {MOST_UNPACKED_BYTES} bytes, unpacked");
    }
    Ok(())
}

fn table(all: &BTreeMap<String, Scores>, kinds: &Scores, total: &Score) -> String {
    let header = [
        "recording",
        "finding",
        "must",
        "found",
        "recall",
        "cause",
        "signs",
        "right",
        "precision",
        "delay ms p50",
        "p95",
        "max",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    for (recording, scores) in all {
        for (kind, score) in scores {
            rows.push(row(recording, kind.label(), score));
        }
        if scores.is_empty() {
            rows.push(row(recording, "nothing", &Score::default()));
        }
    }
    rows.extend(kinds.iter().map(|(kind, score)| row("all", kind.label(), score)));
    rows.push(row("all", "", total));
    let mut text = aligned(&rows);
    for wrong in total.wrong.iter().take(20) {
        text.push_str(&format!("wrong: {wrong}\n"));
    }
    text
}

/// A table of the share of steps in which each kind's detector abstained.
fn looked_table(looked: &AllLooked) -> String {
    let mut rows = vec![["finding", "steps of ranks", "abstained", "share"].map(str::to_owned)];
    for (kind, looked) in looked {
        let ratio = looked.abstained_ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
        rows.push([kind.label().to_owned(), looked.steps.to_string(), looked.abstained.to_string(), ratio]);
    }
    format!("\n{}", aligned(&rows))
}

/// Rows as text, with columns as wide as their widest cell.
fn aligned<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..COLUMNS).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width)).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn row(recording: &str, kind: &str, score: &Score) -> [String; 12] {
    let shown = |share: Option<f64>, interval: Option<(f64, f64)>| match share.zip(interval) {
        Some((share, (low, high))) => format!("{share:.3} ({low:.2}-{high:.2})"),
        None => "-".to_owned(),
    };
    let delays = score.delay_ms().map(|delays| delays.map(|delay| delay.to_string()));
    let [middle, most_of_95, most] = delays.unwrap_or_else(|| ["-"; 3].map(str::to_owned));
    [
        recording.to_owned(),
        kind.to_owned(),
        score.must_find.to_string(),
        score.found.to_string(),
        shown(score.recall(), interval(score.found, score.must_find)),
        shown(score.cause(), interval(score.same_cause, score.caused)),
        score.signs.to_string(),
        score.right.to_string(),
        shown(score.precision(), interval(score.right, score.signs)),
        middle,
        most_of_95,
        most,
    ]
}

/// The default settings with only these changes: neither a file nor the environment is read.
fn settings_of(set: &[(String, String)]) -> anyhow::Result<Settings> {
    let flags = set.iter().map(|(key, value)| (key.clone(), value.clone(), format!("--set {key}"))).collect();
    Ok(load(&SettingLayers { file: None, environment: Default::default(), flags })?)
}
