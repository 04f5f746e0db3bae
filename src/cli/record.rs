//! `record`: records this node's GPUs until a signal, or for a time. `run` shares its flags.

use super::common::{Misuse, duration, key_value, layers};
use super::serve::{Signals, drive, until_ended};
use super::terminal;
use crate::capture::Ended;
use crate::config::{Settings, SourceSpec, default_socket, load};
use crate::daemon::{OutputFormat, Recording};
use anyhow::Context as _;
use clap::Args;
use highwater_analysis::report;
use highwater_core::source::provenance;
use highwater_engine::files::OwnFolder;
use highwater_engine::offline;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often to check whether the file is still written, and to show on a terminal how long it has been.
const LOOK: Duration = Duration::from_millis(250);

#[derive(Debug, Args)]
pub(super) struct Record {
    #[command(flatten)]
    pub flags: Flags,
    /// The Unix datagram socket for annotations [default: one of its own, which it prints].
    #[arg(long, value_name = "PATH")]
    annotations_socket: Option<PathBuf>,
    /// Stop after this time, such as 20s.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    run_for: Option<Duration>,
}

/// What is recorded, and where to.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// The file to write, which must not exist [default: highwater.sqlite, or memory_usage.txt with --format ort].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The file's format. `ort` has no steps and phases.
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
    /// Milliseconds from one reading of memory to the next [default: 1, or the setting sampling.period].
    #[arg(short, long, value_name = "MS")]
    interval: Option<f64>,
    /// The source to read: nvml, sim, sim:SCENARIO.
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
    /// Settings file, TOML or YAML.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Path of libnvidia-ml.so.1.
    #[arg(long, value_name = "PATH")]
    nvml_library: Option<String>,
    /// Any other setting.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
}

impl Flags {
    /// The file to write.
    pub fn output(&self) -> &Path {
        match (&self.output, self.format) {
            (Some(output), _) => output,
            (None, OutputFormat::Sqlite) => Path::new("highwater.sqlite"),
            // As that tool calls it.
            (None, OutputFormat::Ort) => Path::new("memory_usage.txt"),
        }
    }

    /// Refuses the flags that have no effect with `run --via`, where the daemon records.
    pub fn leave_to_daemon(&self) -> anyhow::Result<()> {
        let given = [
            ("--interval", self.interval.is_some()),
            ("--source", self.source.is_some()),
            ("--config", self.config.is_some()),
            ("--nvml-library", self.nvml_library.is_some()),
            ("--set", !self.set.is_empty()),
            ("--format ort", self.format == OutputFormat::Ort),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                Err(Misuse(format!("{flag}: has no effect with --via, where the daemon records")).into())
            }
            None => Ok(()),
        }
    }

    /// The settings of a recording that takes annotations over this socket, or takes none.
    pub fn settings(&self, socket: Option<&Path>) -> anyhow::Result<Settings> {
        let socket = match socket {
            Some(socket) => socket.to_str().context("the path of the annotation socket is not UTF-8")?,
            None => "none",
        };
        let mut flags = vec![("annotations.socket".to_owned(), socket.to_owned(), "--annotations-socket".to_owned())];
        let period = self.interval.map(|milliseconds| format!("{}us", milliseconds * 1000.0));
        let given = [
            ("sampling.period", "--interval", &period),
            ("source", "--source", &self.source),
            ("nvml_library", "--nvml-library", &self.nvml_library),
        ];
        for (key, flag, value) in given {
            flags.extend(value.iter().map(|value| (key.to_owned(), value.clone(), flag.to_owned())));
        }
        flags.extend(self.set.iter().map(|(key, value)| (key.clone(), value.clone(), format!("--set {key}"))));
        let mut layers = layers(self.config.clone(), flags);
        // A recording exports no OTLP, so faults in `OTEL_*` variables, which are meant for the job, must not fail it.
        layers.environment.retain(|(name, _)| name.starts_with("HIGHWATER_"));
        let settings = load(&layers)?;
        if matches!(settings.source, SourceSpec::Replay(_)) {
            return Err(Misuse("source: a replay is a recording already; record nvml or sim".to_owned()).into());
        }
        Ok(settings)
    }
}

impl Record {
    pub fn run(&self) -> anyhow::Result<()> {
        let own = match &self.annotations_socket {
            Some(_) => None,
            None => Some(OwnFolder::make("highwater-record").context("cannot make a folder for the socket")?),
        };
        let socket = own.as_ref().map(|own| own.path().join("annotations.sock"));
        let socket = socket.or_else(|| self.annotations_socket.clone()).unwrap_or_else(default_socket);
        let settings = self.flags.settings(Some(&socket))?;
        note_daemon(&socket);
        note_simulation(&settings);
        drive(async {
            let signals = Signals::listen()?;
            let recording = Recording::start(settings, self.flags.output(), self.flags.format, "highwater record")?;
            let output = self.flags.output().display();
            terminal::print_error(format_args!(
                "recording to {output}; marks: HIGHWATER_ANNOTATIONS_SOCKET={}",
                socket.display()
            ));
            let ended = async {
                let begin = Instant::now();
                while !recording.has_ended() {
                    let bytes = recording.path().metadata().map_or(0, |file| file.len());
                    terminal::progress(format_args!(
                        "{} s, {bytes} bytes; Control-C ends it",
                        begin.elapsed().as_secs()
                    ));
                    tokio::time::sleep(LOOK).await;
                }
            };
            tokio::select! {
                () = until_ended(signals, self.run_for) => {}
                () = ended => {}
            }
            terminal::progress("");
            end(recording, self.flags.output())
        })
    }
}

/// Prints a notice if the source is simulated. The format `ort` has no field for it.
pub(super) fn note_simulation(settings: &Settings) {
    if let SourceSpec::Sim(name) = &settings.source {
        let source = format!("sim:{}", name.as_deref().unwrap_or("demo"));
        terminal::print_error(format_args!("highwater: {}", provenance::notice(&source).unwrap_or_default()));
    }
}

/// Ends a recording, and prints what it shows. `name` is its path as the user gave it.
pub(super) fn end(recording: Recording, name: &Path) -> anyhow::Result<()> {
    let path = recording.path().to_owned();
    let ended = recording.stop();
    // What was recorded before a disk was full is shown too.
    let shown = show(&path, name);
    match ended? {
        Ended::Stopped => shown,
        Ended::SourceGone => anyhow::bail!("the recording ended early: the GPUs went away or changed"),
    }
}

/// Prints what a finished recording shows.
pub(super) fn show(path: &Path, name: &Path) -> anyhow::Result<()> {
    let shown = report::Report::open(path, report::Room::of(1), &offline::Settings::default());
    let shown = shown.with_context(|| format!("{}: cannot be read again", name.display()))?;
    #[allow(clippy::cast_precision_loss, reason = "shown to a tenth")]
    let seconds = shown.duration_ns() as f64 / 1e9;
    let bytes = path.metadata().map_or(0, |file| file.len());
    terminal::print_error(format_args!("highwater: {seconds:.1} s in {} ({bytes} bytes)", name.display()));
    terminal::print_error(report::summary(&shown).to_string().trim_end());
    Ok(())
}

/// Whether something takes marks over this socket.
pub(super) fn answers(socket: &Path) -> bool {
    std::os::unix::net::UnixDatagram::unbound().and_then(|own| own.connect(socket)).is_ok()
}

/// Says if a daemon runs here too. Both read the driver.
pub(super) fn note_daemon(own: &Path) {
    let other = default_socket();
    if other != own && answers(&other) {
        terminal::print_error(
            "highwater: a daemon runs on this node too; this recording reads the GPUs by itself and takes its own marks",
        );
    }
}
