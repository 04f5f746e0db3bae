//! Reads the layers, and reports all their faults at once.

use super::keys::KEYS;
use super::locate::line_of;
use super::{Settings, yaml};
use crate::export::otlp::settings::OF_KEY;
use config::{Config, ConfigError, File, FileFormat, Map, Source, Value};
use highwater_engine::files::read_text;
use std::fmt;
use std::path::{Path, PathBuf};

/// Variables with the daemon's prefix that are not settings: those of jobs and their client, and those of tests.
const OTHER_VARIABLES: [&str; 6] = [
    "HIGHWATER_JOB",
    "HIGHWATER_URL",
    "HIGHWATER_TOKEN",
    "HIGHWATER_TOKEN_FILE",
    "HIGHWATER_DISABLED",
    "HIGHWATER_FAKE_NVML",
];

/// The largest settings file: some fifty times the size of all settings with their help.
const MOST_FILE_BYTES: u64 = 1 << 20;

/// The sources of settings, on top of the defaults.
#[derive(Debug, Clone, Default)]
pub struct SettingLayers {
    /// A TOML or YAML file.
    pub file: Option<PathBuf>,
    /// `HIGHWATER_*` and `OTEL_*` variables and those of a pod's identity, with their values.
    pub environment: Vec<(String, String)>,
    /// Settings by key, with the flag that set each.
    pub flags: Vec<(String, String, String)>,
}

/// One error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where: `FILE:LINE`, the variable, or the flag.
    pub place: String,
    /// The key at fault, if any.
    pub key: Option<String>,
    /// What is wrong.
    pub problem: String,
}

/// All errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            // A flag's name contains its key already.
            Some(key) if !self.place.ends_with(key.as_str()) => write!(f, "{}: {key}: {}", self.place, self.problem),
            _ => write!(f, "{}: {}", self.place, self.problem),
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.0.iter().map(Fault::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for Faults {}

/// Reads all layers.
///
/// # Errors
/// Every fault of every layer.
pub fn load(layers: &SettingLayers) -> Result<Settings, Faults> {
    let text = layers.file.as_deref().map(read).transpose().map_err(|fault| Faults(vec![fault]))?;
    let merged = merge(layers, text.as_deref()).map_err(|fault| Faults(vec![fault]))?;
    let mut faults = unknown_variables(layers);
    let mut settings = Settings::default();
    let mut endpoint_place = String::new();
    for (key, value) in merged {
        let place = || place_of(&key, &value, layers, text.as_deref());
        if key == OF_KEY {
            endpoint_place = place();
        }
        let known = KEYS.iter().find(|known| known.name == key);
        let problem = match (known, text_of(&value)) {
            (None, _) => Some(unknown_key(&key)),
            (Some(_), None) => Some("is neither a single value nor a list of single values".into()),
            (Some(known), Some(text)) => {
                let quoted = format!("`{text}`");
                let with_value = |problem: String| {
                    if problem.starts_with(&quoted) { problem } else { format!("{quoted} {problem}") }
                };
                (known.set)(&mut settings, &text).err().map(with_value)
            }
        };
        faults.extend(problem.map(|problem| Fault { place: place(), key: Some(key.clone()), problem }));
    }
    if settings.max_period_ns < settings.period_ns {
        let problem = "is shorter than sampling.period".to_owned();
        faults.push(Fault { place: "settings".into(), key: Some("sampling.max_period".into()), problem });
    }
    match crate::export::otlp::settings::resolve(&settings.otlp, &layers.environment) {
        Ok(export) => settings.otlp_export = export,
        Err(of_variables) => faults.extend(of_variables.into_iter().map(|fault| {
            // The one setting that is judged with the standard variables, wherever it was given.
            if fault.variable == OF_KEY {
                return Fault { place: endpoint_place.clone(), key: Some(OF_KEY.into()), problem: fault.problem };
            }
            let place = format!("environment variable {}", fault.variable);
            Fault { place, key: None, problem: fault.problem }
        })),
    }
    if faults.is_empty() { Ok(settings) } else { Err(Faults(faults)) }
}

/// A value as a flag spells it: a list is joined with commas.
fn text_of(value: &Value) -> Option<String> {
    let Ok(items) = value.clone().into_array() else { return value.clone().into_string().ok() };
    let items: Option<Vec<String>> = items.into_iter().map(|item| item.into_string().ok()).collect();
    Some(items?.join(","))
}

fn read(path: &Path) -> Result<String, Fault> {
    let problem = |error: std::io::Error| Fault {
        place: path.display().to_string(),
        key: None,
        problem: format!("cannot be read: {error}"),
    };
    read_text(path, MOST_FILE_BYTES).map_err(problem)
}

fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Refuses YAML that would be expanded, or nested, without bound.
fn check_yaml(path: &Path, text: &str) -> Result<(), Fault> {
    let fault = |(line, problem)| Fault { place: format!("{}:{line}", path.display()), key: None, problem };
    yaml::refusal(text).map_or(Ok(()), |refused| Err(fault(refused)))
}

fn merge(layers: &SettingLayers, text: Option<&str>) -> Result<Vec<(String, Value)>, Fault> {
    let mut builder = Config::builder();
    if let (Some(path), Some(text)) = (&layers.file, text) {
        let format = if is_yaml(path) { FileFormat::Yaml } else { FileFormat::Toml };
        if format == FileFormat::Yaml {
            check_yaml(path, text)?;
        }
        builder = builder.add_source(File::from_str(text, format));
    }
    builder = builder.add_source(Given { layer: "environment", values: environment(layers) });
    let flags = layers.flags.iter().map(|(key, value, _)| (key.clone(), value.clone())).collect();
    builder = builder.add_source(Given { layer: "flag", values: flags });
    let place = || layers.file.as_ref().map_or_else(|| "settings".into(), |path| path.display().to_string());
    let fault = |error: ConfigError| Fault { place: place(), key: None, problem: describe(&error) };
    let merged = builder.build().and_then(|config| config.collect()).map_err(fault)?;
    let mut leaves = Vec::new();
    flatten("", merged, &mut leaves);
    leaves.sort_by(|left, right| left.0.cmp(&right.0));
    Ok(leaves)
}

/// Values of one layer, each under its dotted key.
#[derive(Debug, Clone)]
struct Given {
    layer: &'static str,
    values: Vec<(String, String)>,
}

impl Source for Given {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ConfigError> {
        let layer = self.layer.to_owned();
        Ok(self.values.iter().map(|(key, value)| (key.clone(), Value::new(Some(&layer), value.clone()))).collect())
    }
}

fn environment(layers: &SettingLayers) -> Vec<(String, String)> {
    let value = |variable: &str| layers.environment.iter().find(|(name, _)| name == variable).map(|(_, value)| value);
    KEYS.iter().filter_map(|key| Some((key.name.to_owned(), value(&key.variable())?.clone()))).collect()
}

fn unknown_variables(layers: &SettingLayers) -> Vec<Fault> {
    let known = |name: &str| KEYS.iter().any(|key| key.variable() == name) || OTHER_VARIABLES.contains(&name);
    let unknown = layers.environment.iter().filter(|(name, _)| name.starts_with("HIGHWATER_") && !known(name));
    let fault = |name: &String| Fault {
        place: format!("environment variable {name}"),
        key: None,
        problem: "is not a setting; `highwater serve --help` lists them".into(),
    };
    unknown.map(|(name, _)| fault(name)).collect()
}

fn flatten(prefix: &str, table: Map<String, Value>, leaves: &mut Vec<(String, Value)>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value.clone().into_table() {
            Ok(table) => flatten(&key, table, leaves),
            Err(_) => leaves.push((key, value)),
        }
    }
}

fn place_of(key: &str, value: &Value, layers: &SettingLayers, text: Option<&str>) -> String {
    let flag = layers.flags.iter().rev().find(|(flagged, _, _)| flagged == key);
    if let (Some("flag"), Some((_, _, flag))) = (value.origin(), flag) {
        return flag.clone();
    }
    if value.origin() == Some("environment") {
        let variable = KEYS.iter().find(|known| known.name == key).map(super::Key::variable);
        return format!("environment variable {}", variable.unwrap_or_default());
    }
    let file = layers.file.as_ref().map_or_else(|| "settings".into(), |path| path.display().to_string());
    match text.and_then(|text| line_of(text, key)) {
        Some(line) => format!("{file}:{line}"),
        None => file,
    }
}

fn unknown_key(key: &str) -> String {
    let last = key.rsplit('.').next().unwrap_or(key);
    let near = KEYS.iter().find(|known| known.name.rsplit('.').next() == Some(last));
    near.map_or_else(|| "is not a setting".into(), |near| format!("is not a setting; did you mean `{}`?", near.name))
}

/// The parser's message about a file that it cannot parse, which has line and column.
fn describe(error: &ConfigError) -> String {
    match error {
        ConfigError::FileParse { cause, .. } => cause.to_string().trim_end().to_owned(),
        other => other.to_string(),
    }
}
