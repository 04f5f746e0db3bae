//! The regression gate on CPU cost: compares the instruction counts of the hot paths with a committed baseline.
//!
//! Enters: `baseline.txt`. Leaves: a table, and a failure if a case takes more than 3 % more than its baseline. Each case
//! runs under valgrind's callgrind twice, with a number of repetitions and with twice that number. The difference is the cost
//! of the repetitions without their setup. Unlike times, these counts do not depend on other load, and repeat to a tenth of a
//! percent. They depend on the compiler and on the dependencies, which `tests/tools.env` and `Cargo.lock` fix,
//! and a little on the C library.
//!
//! `make instructions` runs it. `make instructions MOVE=1` writes the baseline anew: say in the commit which case moved,
//! by how much, and what it buys. Absent on purpose: times, which `make bench` and benches/gpu measure.

mod cases;
#[allow(dead_code, reason = "each benchmark needs a part of it")]
#[path = "../core/node.rs"]
mod node;

use cases::{CASES, Case};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// A case may take this many percent more than its baseline.
const MOST_MORE_PERCENT: f64 = 3.0;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--case", name, repetitions] => {
            let case = CASES.iter().find(|case| case.name == name).expect("a case");
            (case.run)(repetitions.parse().expect("a number"));
            ExitCode::SUCCESS
        }
        ["--move"] => compare(true),
        [] => compare(false),
        _ => {
            eprintln!("usage: instructions [--move]");
            ExitCode::FAILURE
        }
    }
}

/// Runs every case, and compares it with the baseline or writes the baseline.
fn compare(is_moved: bool) -> ExitCode {
    if Command::new("valgrind").arg("--version").output().is_err() {
        let is_wanted = std::env::var_os("CI").is_some_and(|ci| !ci.is_empty());
        eprintln!("instructions: NOT COUNTED: valgrind is not installed (Debian: apt-get install valgrind)");
        return if is_wanted { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let baseline = baseline();
    let (mut written, mut worse) = (String::new(), Vec::new());
    println!("{:40} {:>12} {:>12} {:>8}", "instructions of", "baseline", "now", "change");
    for case in CASES {
        let now = instructions(case);
        let _ = writeln!(written, "{}\t{now}", case.name);
        let before = baseline.get(case.name).copied();
        let change = before.map(|before| (now as f64 / before as f64 - 1.0) * 100.0);
        let shown = change.map_or_else(|| "new".to_owned(), |change| format!("{change:+.2} %"));
        println!("{:40} {:>12} {now:>12} {shown:>8}", case.name, before.map_or_else(String::new, |n| n.to_string()));
        if change.is_none_or(|change| change > MOST_MORE_PERCENT) {
            worse.push(case.name);
        }
    }
    if is_moved {
        std::fs::write(path(), written).expect("the baseline is written");
        return ExitCode::SUCCESS;
    }
    if worse.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("instructions: more than {MOST_MORE_PERCENT} % above the baseline, or without one: {}", worse.join(", "));
    eprintln!("instructions: mend it, or run `make instructions MOVE=1` and say in the commit what it buys");
    ExitCode::FAILURE
}

/// What one repetition of a case takes.
fn instructions(case: &Case) -> u64 {
    let [once, twice] = [1, 2].map(|times| count(case.name, times * case.repetitions));
    twice.saturating_sub(once) / case.repetitions
}

/// All instructions of a process that runs a case this often.
fn count(name: &str, repetitions: u64) -> u64 {
    let program = std::env::current_exe().expect("this program");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(["--case", name, &repetitions.to_string()])
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .output()
        .expect("valgrind runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {printed}");
    let counted = printed.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
    counted.unwrap_or_else(|| panic!("{name}: callgrind counted nothing: {printed}"))
}

fn path() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "benches", "instructions", "baseline.txt"].iter().collect()
}

/// The committed numbers, by case.
fn baseline() -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(path()).unwrap_or_default();
    let line = |line: &str| {
        let (name, number) = line.split_once('\t')?;
        Some((name.to_owned(), number.trim().parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}
