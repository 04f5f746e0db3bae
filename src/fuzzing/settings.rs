//! Fuzzes settings: a TOML or YAML file, variables and flags, through all layers.

use super::folder::Folder;
use super::parts;
use crate::config::{SettingLayers, load};
use std::fs;

/// Reads settings from the parts of the input: a file, which is YAML if it begins with `---`, lines of `NAME=VALUE` as
/// variables, and lines of `key=value` as flags.
pub fn settings(data: &[u8]) {
    thread_local!(static FOLDER: Folder = Folder::make("settings").expect("a folder for temporary files"));
    let mut parts = parts(data);
    let text = parts.next().unwrap_or_default();
    let name = if text.starts_with(b"---") { "settings.yaml" } else { "settings.toml" };
    let file = FOLDER.with(|folder| folder.file(name));
    fs::write(&file, text).expect("written");
    let environment = parts.next().map(pairs).unwrap_or_default();
    let flag = |(key, value): (String, String)| (key.clone(), value, format!("--{key}"));
    let flags = parts.next().map(pairs).unwrap_or_default().into_iter().map(flag).collect();
    match load(&SettingLayers { file: Some(file), environment, flags }) {
        Ok(settings) => drop(settings),
        Err(faults) => assert!(!faults.0.is_empty() && !faults.to_string().is_empty(), "a fault says what it is"),
    }
}

fn pairs(lines: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(lines);
    let pair = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    text.lines().filter_map(pair).collect()
}
