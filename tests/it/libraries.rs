//! Libraries of this workspace that tests load into programs: each is built once, from this profile's folder.

use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// The built library of a package of this workspace.
pub fn build(package: &str) -> PathBuf {
    let (target, profile) = target_and_profile();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", package, "--message-format", "json"]);
    cargo.args(["--profile", &profile, "--target-dir"]).arg(target).current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = cargo.output().expect("cargo runs");
    assert!(output.status.success(), "{package} is not built: {}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout).expect("cargo writes UTF-8");
    let name = package.replace('-', "_");
    let mut built = messages.lines().filter_map(|message| built_library(message, &name));
    built.next_back().expect("cargo names the library that it built")
}

fn built_library(message: &str, name: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    let is_wanted = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
    let files = message["filenames"].as_array().filter(|_| is_wanted)?;
    files.iter().filter_map(Value::as_str).find(|file| file.ends_with(".so")).map(PathBuf::from)
}

/// Derived from this binary's own path, `TARGET/PROFILE/deps/it-…`.
fn target_and_profile() -> (PathBuf, String) {
    let own = std::env::current_exe().expect("a test knows its own path");
    let mut folders = own.ancestors().skip(2);
    let profile = folders.next().and_then(|folder| folder.file_name()?.to_str()).expect("a profile's folder");
    let target = folders.next().expect("a target folder");
    let profile = if profile == "debug" { "dev" } else { profile };
    (target.to_owned(), profile.to_owned())
}
