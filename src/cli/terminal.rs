//! A command's output for people, robust against readers that go away.
//!
//! The reader of a pipe may go away, and a disk that stderr is sent to may fill up. Neither is a reason to stop
//! measuring, but the standard macros would panic in the thread that prints.

use highwater_analysis::report::Terminal;
use highwater_engine::recording::short;
use rustix::termios::tcgetwinsize;
use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Columns and rows where the terminal does not say.
const USUAL: (usize, usize) = (80, 24);

/// Whether a line of status is shown, which the next line on the terminal takes the place of.
static HAS_STATUS: AtomicBool = AtomicBool::new(false);

/// What removes it.
const REMOVE_LINE: &str = "\r\x1b[K";

/// Standard error that never fails; output that cannot be written is lost.
pub(super) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(&in_place_of_status(bytes));
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

/// What is to be written to standard error: if it is a terminal that shows a line of status, that is removed.
fn in_place_of_status(bytes: &[u8]) -> Cow<'_, [u8]> {
    if HAS_STATUS.swap(false, Ordering::Relaxed) && io::stderr().is_terminal() {
        Cow::Owned([REMOVE_LINE.as_bytes(), bytes].concat())
    } else {
        Cow::Borrowed(bytes)
    }
}

/// A line of status on standard output, which must be a terminal. The next line takes its place.
pub(super) fn status(line: impl Display) {
    // A line that is longer than the terminal is wide could not be removed.
    let _ = print(format_args!("{REMOVE_LINE}{}", short(&line.to_string(), size().0.saturating_sub(2))));
    HAS_STATUS.store(true, Ordering::Relaxed);
}

/// Standard output, if that is a terminal.
pub(super) fn stdout() -> Option<Terminal> {
    let terminal = || Terminal { columns: size().0, has_color: wants_color(), is_unicode: is_unicode() };
    io::stdout().is_terminal().then(terminal)
}

/// Columns and rows of the terminal.
pub(super) fn size() -> (usize, usize) {
    let known = tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
    known.map_or(USUAL, |size| (size.ws_col.into(), size.ws_row.into()))
}

/// Whether colours are wanted: <https://no-color.org>.
pub(super) fn wants_color() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|asked| asked.is_empty())
}

/// Whether the terminal shows UTF-8, by the environment's locale.
pub(super) fn is_unicode() -> bool {
    let set = |name: &&str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].iter().find_map(set).unwrap_or_default().to_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// A line of progress on standard error if that is a terminal. The next one replaces it; an empty one removes it.
pub(super) fn progress(line: impl Display) {
    let mut stderr = io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "{REMOVE_LINE}{line}").and_then(|()| stderr.flush());
    }
}

/// GiB to a tenth, or `?` where they are not known.
pub(super) fn gib(bytes: Option<u64>) -> String {
    #[allow(clippy::cast_precision_loss, reason = "shown to a tenth")]
    bytes.map_or_else(|| "?".to_owned(), |bytes| format!("{:.1}", bytes as f64 / (1u64 << 30) as f64))
}

/// One line on standard error.
pub(super) fn print_error(line: impl Display) {
    // In one piece, so that no line of the log comes between.
    let _ = Stderr.write_all(format!("{line}\n").as_bytes());
}
