//! The Python client as users have it: built and installed as a wheel, and within PyTorch. Its other tests are Python's
//! (`python/tests`), which `make test` runs against the built daemon.

use crate::tools;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs a command that has to succeed.
fn run(command: &mut Command) -> Output {
    let output = command.output().expect("it runs");
    let printed = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{command:?}: {}\n{}", printed[0], printed[1]);
    output
}

/// The interpreter of a virtual environment under `target/tools`; `None`, loudly, where it is not installed.
fn interpreter(environment: &str) -> Option<PathBuf> {
    let path = tools::root().join("target/tools").join(environment).join("bin/python");
    if !path.is_file() {
        tools::missing(&format!("{environment} is not installed"));
        return None;
    }
    Some(path)
}

fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-r").args([from, to]));
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_wheel_is_built_and_installed_in_a_clean_environment() {
    let versions = ["MYPY_VERSION", "RUFF_VERSION", "SETUPTOOLS_VERSION"].map(tools::pinned).join("-");
    let Some(python) = interpreter(&format!("python-tools-{versions}")) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    // Setuptools writes beside the sources.
    let (sources, wheels, clean) =
        (folder.path().join("python"), folder.path().join("wheels"), folder.path().join("clean"));
    copy(&tools::root().join("python"), &sources);
    let mut build = Command::new(&python);
    build.args(["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]);
    run(build.args([&wheels, &sources]));
    let wheel = std::fs::read_dir(&wheels).expect("wheels").next().expect("one").expect("read").path();
    let name = wheel.file_name().expect("a name").to_string_lossy().into_owned();
    assert_eq!(name, format!("highwater_client-{}-py3-none-any.whl", env!("CARGO_PKG_VERSION")));

    run(Command::new(&python).args(["-m", "venv"]).arg(&clean));
    let installed = clean.join("bin/python");
    let mut install = Command::new(&installed);
    run(install.args(["-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]).arg(&wheel));
    let shown = run(Command::new(&installed).args(["-m", "pip", "show", "highwater-client"]));
    assert!(String::from_utf8_lossy(&shown.stdout).contains("\nRequires: \n"), "it has no dependencies");

    // The client's tests, with the package as it is installed and none of the sources.
    let tests = folder.path().join("elsewhere");
    std::fs::create_dir(&tests).expect("made");
    copy(&sources.join("tests"), &tests);
    copy(&sources.join("example.py"), &tests);
    let mut tested = Command::new(&installed);
    tested
        .args(["-m", "unittest", "-q", "tests.test_daemon"])
        .current_dir(&tests)
        .env("HIGHWATER", env!("CARGO_BIN_EXE_highwater"));
    run(&mut tested);

    // A user's types are checked against the package's.
    let script = folder.path().join("train.py");
    std::fs::write(
        &script,
        "import highwater\n\n\ndef work(n: int) -> None:\n    with highwater.step(n):\n        highwater.mark(3)\n",
    )
    .expect("written");
    let mut check = Command::new(&python);
    check.args(["-m", "mypy", "--strict", "--cache-dir=/dev/null", "--python-executable"]).args([&installed, &script]);
    let checked = check.current_dir(folder.path()).output().expect("mypy runs");
    let found = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(found.contains("train.py:6: error: Argument 1 to \"mark\"") && found.contains("Found 1 error"), "{found}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_clients_tests_pass_within_pytorch() {
    let Some(python) = interpreter(&format!("torch-{}", tools::pinned("TORCH_VERSION"))) else { return };
    let mut tests = Command::new(python);
    tests.args(["-m", "unittest", "discover", "-s", "python/tests", "-t", "python", "-p", "test_torch*.py"]);
    let output = run(tests.current_dir(tools::root()).env("HIGHWATER", env!("CARGO_BIN_EXE_highwater")));
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(printed.contains("\nOK") && !printed.contains("skipped=") && !printed.contains("Ran 0 tests"), "{printed}");
}
