//! `report`: what recordings show, on a terminal, as JSON, or as a page; and whether they exceed a bound.

use super::common::{MISUSED, Misuse, duration};
use super::input::Input;
use super::terminal;
use anyhow::Context as _;
use clap::Args;
use highwater_analysis::import::polled::Hints;
use highwater_analysis::report::{
    Comparison, Condition, Printed, Report, Room, Traced, comparison_of_ranks, json, page, perfetto, picture, ranks,
    summary, together,
};
use highwater_analysis::timeline::{MOST_EVENTS, Ranks, RanksError};
use highwater_engine::files::read_at_most;
use highwater_engine::offline;
use highwater_engine::recording::printable;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Files from this size on take a second or more to read.
const LONG_MIB: u64 = 32;

/// The most files.
const MOST_FILES: usize = 1_024;

/// The exit status where a condition of `--fail-if` holds.
const FAILED_IF: u8 = 3;

#[derive(Debug, Args)]
pub(super) struct ReportCommand {
    /// Recordings: of highwater, or of another tool; `-` is standard input. The first with memory is what the others are compared
    /// with.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write a page that opens in a browser without a network. An existing file is replaced.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write a picture of the curves with their peaks. An existing file is replaced.
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,
    /// Write a trace that Perfetto (ui.perfetto.dev) opens: memory, steps, phases, kernels, findings. An existing file is replaced.
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// JSON on standard output instead of text.
    #[arg(long)]
    json: bool,
    /// Exit with status 3 if this holds: 'peak > 70GiB', 'peak.increase > 5%'. May be given several times.
    #[arg(long = "fail-if", value_name = "CONDITION")]
    fail_if: Vec<Condition>,
    /// In the page, begin all recordings at this step instead of at their begin.
    #[arg(long, value_name = "STEP")]
    align_step: Option<u64>,
    /// Compare files of processes that ran at the same time, instead of adding up what they hold on each GPU.
    #[arg(long)]
    compare: bool,
    /// What the columns of a table of text are, by their names: 'timestamp,-,memory.used'. Of all files.
    #[arg(long, value_name = "NAMES")]
    columns: Option<String>,
    /// The time from one reading to the next, where a log has no times: 10ms. Of all files.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    period: Option<Duration>,
}

impl ReportCommand {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        if let Some(condition) = self.fail_if.iter().find(|condition| condition.needs_two() && self.files.len() < 2) {
            return Err(Misuse(format!("--fail-if '{condition}': needs two recordings or more")).into());
        }
        if self.files.len() > MOST_FILES {
            return Err(Misuse(format!("{} files are more than {MOST_FILES}", self.files.len())).into());
        }
        for (output, begin) in [(&self.output, PAGE), (&self.png, PNG), (&self.perfetto, TRACE)] {
            output.iter().try_for_each(|output| may_be_replaced(output, begin))?;
        }
        let mut reports = self.read()?;
        distinguish(&mut reports, &self.files);
        let ranks = ranks(&reports);
        let all = if self.compare { None } else { together(&reports, Room::of(self.files.len() + 1)) };
        if let (Some(_), Some(condition)) = (&all, self.fail_if.iter().find(|condition| condition.needs_two())) {
            let why = "the files are of one run, which is not compared with itself; --compare compares them";
            return Err(Misuse(format!("--fail-if '{condition}': {why}")).into());
        }
        let comparison = if all.is_none() { Comparison::of(&reports) } else { None };
        reports.splice(..0, all);
        if let Some(output) = &self.output {
            let page = page(&reports, comparison.as_ref(), ranks.as_ref(), self.align_step);
            replace(output, page.as_bytes()).with_context(|| output.display().to_string())?;
        }
        if let Some(png) = &self.png {
            anyhow::ensure!(
                reports.iter().any(|report| !report.gpus.is_empty()),
                "--png: no file has the memory of a GPU"
            );
            let written = picture(&reports).map_err(anyhow::Error::from).and_then(|png_of| Ok(replace(png, &png_of)?));
            written.with_context(|| png.display().to_string())?;
        }
        if let Some(trace) = &self.perfetto {
            replace(trace, perfetto(&reports).as_bytes()).with_context(|| trace.display().to_string())?;
        }
        if self.json {
            terminal::print_line(serde_json::to_string_pretty(&json(&reports, comparison.as_ref(), ranks.as_ref()))?)?;
        } else {
            let text = text(&reports, comparison.as_ref(), ranks.as_ref());
            match terminal::stdout() {
                Some(terminal) => terminal::print(text.fitted(terminal))?,
                None => terminal::print(text)?,
            }
        }
        Ok(self.judge(&reports))
    }

    /// Reads the files.
    fn read(&self) -> anyhow::Result<Vec<Report>> {
        let settings = offline::Settings::default();
        let columns = self.columns.as_deref().map(Hints::columns_of).transpose();
        let columns = columns.map_err(|problem| Misuse(format!("--columns: {problem}")))?;
        let period_ns = self.period.map(|period| i64::try_from(period.as_nanos()).unwrap_or(i64::MAX));
        let hints = Hints { columns, period_ns };
        let inputs = Input::all(&self.files)?;
        let (mut reports, mut collectives) = (Vec::with_capacity(self.files.len()), 0);
        for (nth, given) in self.files.iter().enumerate() {
            let input = &inputs[nth];
            let file = &input.path;
            let mib = std::fs::metadata(file).map_or(0, |found| found.len() >> 20);
            if mib >= LONG_MIB {
                terminal::progress(format_args!(
                    "reading {} ({} of {}, {mib} MiB)",
                    given.display(),
                    nth + 1,
                    self.files.len()
                ));
            }
            let report = Report::open_with(file, Room::of(self.files.len()), &settings, &hints);
            terminal::progress("");
            let mut report = input.named(report.map_err(anyhow::Error::from))?;
            report.name = input.name.clone().unwrap_or(report.name);
            collectives += report.trace.as_ref().map_or(0, Traced::collectives);
            anyhow::ensure!(collectives <= MOST_EVENTS, "the traces have more than {MOST_EVENTS} collectives together");
            reports.push(report);
        }
        Ok(reports)
    }

    fn judge(&self, reports: &[Report]) -> ExitCode {
        let failed: Vec<_> = self.fail_if.iter().flat_map(|condition| condition.failed(reports)).collect();
        for failed in &failed {
            terminal::print_error(format_args!("highwater: {}", failed.why));
        }
        match failed.iter().all(|failed| failed.is_known) {
            true if failed.is_empty() => ExitCode::SUCCESS,
            true => ExitCode::from(FAILED_IF),
            // A condition that cannot be checked must not pass. Its exit status differs from that of one that holds.
            false => ExitCode::FAILURE,
        }
    }
}

fn text(reports: &[Report], comparison: Option<&Comparison>, ranks: Option<&Result<Ranks, RanksError>>) -> Printed {
    let mut text = Printed::default();
    for report in reports {
        let (name, format) = (&report.name, report.origin.format);
        // Layers alone have no times.
        let has_times = !report.gpus.is_empty() || !report.spans.spans().is_empty();
        let length = if has_times { format!(": {}", report.stretch(report.duration_ns())) } else { String::new() };
        let _ = writeln!(text, "{} ({format}){length}", printable(name));
        text.append(summary(report));
    }
    if let Some(comparison) = comparison {
        text.append(comparison.printed());
    }
    ranks.into_iter().for_each(|ranks| text.append(comparison_of_ranks(ranks)));
    text
}

/// Names that are given twice become paths.
fn distinguish(reports: &mut [Report], files: &[PathBuf]) {
    let names: Vec<String> = reports.iter().map(|report| report.name.clone()).collect();
    for (report, file) in reports.iter_mut().zip(files) {
        if names.iter().filter(|name| **name == report.name).count() > 1 {
            report.name = file.display().to_string();
        }
    }
}

/// What a page, a picture and a trace begin with.
const PAGE: &[u8] = b"<!doctype html>";
const PNG: &[u8] = b"\x89PNG";
const TRACE: &[u8] = b"{\"traceEvents\":[";

/// Refuses to replace a file that does not start with `begin`. In `run`, `-o` names the recording, so a user may pass one here.
fn may_be_replaced(path: &Path, begin: &[u8]) -> anyhow::Result<()> {
    let is_file = std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0);
    if is_file && !read_at_most(path, begin.len() as u64).is_ok_and(|read| read == begin) {
        let problem = "exists and is not such a file: it is not overwritten";
        return Err(Misuse(format!("{}: {problem}", path.display())).into());
    }
    Ok(())
}

/// Writes a file under another name first, so that a reader never sees half of it.
fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let is_special = std::fs::metadata(path).is_ok_and(|found| !found.is_file());
    if is_special {
        return std::fs::File::options().write(true).open(path)?.write_all(content);
    }
    let mut other = path.as_os_str().to_owned();
    other.push(format!(".{}.partial", std::process::id()));
    let written = std::fs::File::options()
        .write(true)
        .create_new(true)
        .open(&other)
        .and_then(|mut file| file.write_all(content))
        .and_then(|()| std::fs::rename(&other, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&other);
    }
    written
}

/// For `report --help`.
pub(super) fn status_help() -> String {
    format!(
        "Exit status: 0 when all went well, 1 when a recording cannot be read or a condition cannot be judged, {MISUSED} \
         when flags are wrong, {FAILED_IF} when a condition of --fail-if holds."
    )
}
