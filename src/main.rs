//! The `highwater` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    highwater::cli::main()
}
