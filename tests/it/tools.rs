//! Paths of the programs that tests run beside the daemon. `make test-peers` installs them, and runs the tests that
//! need them, which are ignored otherwise; `tests/tools.env` pins their versions.

use std::env;
use std::path::{Path, PathBuf};

/// The repository's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The value of `name` in `tests/tools.env`.
pub fn pinned(name: &str) -> &'static str {
    let lines = include_str!("../tools.env").lines();
    let value = lines.filter_map(|line| line.split_once('=')).find(|(key, _)| *key == name);
    value.unwrap_or_else(|| panic!("tests/tools.env has no {name}")).1
}

const HINT: &str = "`make test-peers` installs the peers of tests, and curl must be installed";

/// The path of `tool`: as `make test-peers` installs it, or else the machine's own. If it is missing, this panics if
/// `CI` is set, and otherwise reports the test that is skipped and returns `None`.
pub fn find(tool: &str) -> Option<PathBuf> {
    let found = search(tool);
    if found.is_none() {
        missing(&format!("{tool} is not installed"));
    }
    found
}

/// Like `find`, for a tool that not every Go module proxy offers: the test is skipped loudly, also if `CI` is set.
pub fn find_if_offered(tool: &str) -> Option<PathBuf> {
    let found = search(tool);
    if found.is_none() {
        skip(&format!("{tool} is not installed: {HINT}"));
    }
    found
}

/// Panics if `CI` is set, and otherwise reports on stderr, past the harness's capture, that a test is skipped and why.
pub fn missing(reason: &str) {
    assert!(env::var_os("CI").is_none(), "{reason}: {HINT}");
    skip(&format!("{reason}: {HINT}"));
}

/// Reports on stderr, past the harness's capture, that a test is skipped and why.
pub fn skip(reason: &str) {
    let story = std::thread::current().name().unwrap_or("a test").to_owned();
    // The harness captures `eprintln!` of a test that passes; a skip must be seen.
    let notice = format!("\n*** SKIPPED {story}: {reason}\n");
    let _ = std::io::Write::write_all(&mut std::io::stderr(), notice.as_bytes());
}

fn search(tool: &str) -> Option<PathBuf> {
    let tools = root().join("target/tools");
    let built = |name: &str, version: &str| tools.join(format!("{name}-{}", pinned(version)));
    let own = [
        built("helm", "HELM_VERSION"),
        built("otelcol", "OTELCOL_VERSION"),
        built("prometheus", "PROMETHEUS_3_VERSION"),
        built("kubelet", "KUBELET_VERSION"),
        built("axe-core", "AXE_CORE_VERSION"),
        built("dashboard-linter", "DASHBOARD_LINTER_VERSION"),
        tools.join("prometheus/usr/bin"),
        tools.join("alertmanager/usr/bin"),
    ];
    let path = env::var_os("PATH").unwrap_or_default();
    // Debian installs debootstrap in a directory that only root's PATH has.
    let places = own.into_iter().chain(env::split_paths(&path)).chain([PathBuf::from("/usr/sbin")]);
    places.map(|place| place.join(tool)).find(|candidate| candidate.is_file())
}
