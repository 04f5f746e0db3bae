//! Parses, runs, tells how it ended.

use std::process::ExitCode;

fn main() -> ExitCode {
    highwater::cli::main()
}
