//! A command's output for people, robust against readers that go away.
//!
//! The reader of a pipe may go away, and a disk that stderr is sent to may fill up. Neither is a reason to stop
//! measuring, but the standard macros would panic in the thread that prints.

use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write};

/// Standard error that never fails; output that cannot be written is lost.
pub(super) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to standard output. A reader that has gone away is not an error.
///
/// # Errors
/// The output cannot be written, for example to a full disk.
pub(super) fn print(text: impl Display) -> io::Result<()> {
    let mut stdout = io::stdout();
    match write!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// One line on standard output.
///
/// # Errors
/// As [`print()`].
pub(super) fn print_line(line: impl Display) -> io::Result<()> {
    print(format_args!("{line}\n"))
}

/// A line of progress on standard error if that is a terminal. The next one replaces it; an empty one removes it.
pub(super) fn progress(line: impl Display) {
    let mut stderr = io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[K{line}").and_then(|()| stderr.flush());
    }
}

/// GiB to a tenth, or `?` where they are not known.
pub(super) fn gib(bytes: Option<u64>) -> String {
    #[allow(clippy::cast_precision_loss, reason = "shown to a tenth")]
    bytes.map_or_else(|| "?".to_owned(), |bytes| format!("{:.1}", bytes as f64 / (1u64 << 30) as f64))
}

/// One line on standard error.
pub(super) fn print_error(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}
