//! Flags for settings that several commands share, the parsing of their values, and the error for wrong ones.

use crate::config::{KEYS, SettingLayers};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of the commands that run a daemon.
#[derive(Debug, Args)]
pub(super) struct Common {
    /// Settings file, TOML or YAML.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The address that HTTP listens on [default: 127.0.0.1:10450].
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<String>,
    /// The Unix datagram socket for annotations, or `none`.
    #[arg(long, value_name = "PATH")]
    pub annotations_socket: Option<String>,
    /// Path of libnvidia-ml.so.1.
    #[arg(long, value_name = "PATH")]
    pub nvml_library: Option<String>,
    /// Any other setting.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    pub set: Vec<(String, String)>,
    /// Exit after this time, such as 20s.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub run_for: Option<Duration>,
}

/// The exit status for wrong flags or settings, the same as clap's. Later failures exit with 1.
pub(super) const MISUSED: u8 = 2;

/// Flags or settings that are wrong.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Misuse(pub String);

/// `KEY=VALUE`.
pub(super) fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("is not KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

/// A duration such as `20s`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let duration_ns = highwater_core::units::parse_duration_ns(text).map_err(|error| error.to_string())?;
    Ok(Duration::from_nanos(duration_ns.unsigned_abs()))
}

impl Common {
    /// These flags, over the file and the environment.
    pub fn layers(&self) -> SettingLayers {
        let mut flags = Vec::new();
        let given = [
            ("listen", "--listen", &self.listen),
            ("annotations.socket", "--annotations-socket", &self.annotations_socket),
            ("nvml_library", "--nvml-library", &self.nvml_library),
        ];
        for (key, flag, value) in given {
            flags.extend(value.iter().map(|value| (key.to_owned(), value.clone(), flag.to_owned())));
        }
        flags.extend(self.set.iter().map(|(key, value)| (key.clone(), value.clone(), format!("--set {key}"))));
        layers(self.config.clone(), flags)
    }
}

/// A settings file, this process's variables, and flags: a key, its value, and how the flag is called.
pub(super) fn layers(file: Option<PathBuf>, flags: Vec<(String, String, String)>) -> SettingLayers {
    let text = |text: OsString| text.into_string().ok();
    let environment = std::env::vars_os().filter_map(|(name, value)| Some((text(name)?, text(value)?)));
    let is_ours =
        |name: &str| name.starts_with("HIGHWATER_") || crate::export::otlp::settings::is_standard_variable(name);
    let environment = environment.filter(|(name, _)| is_ours(name)).collect();
    SettingLayers { file, environment, flags }
}

/// The settings, for `serve --help`.
pub(super) fn settings_help() -> String {
    use std::fmt::Write as _;
    let mut help =
        String::from("Settings (file, --set KEY=VALUE, or the variable; config/highwater.toml lists them all):\n");
    for key in KEYS {
        let default = if key.default.is_empty() { "not set" } else { key.default };
        let _ = writeln!(help, "  {} [{}] [default: {default}]\n      {}", key.name, key.variable(), key.help);
    }
    help
}
