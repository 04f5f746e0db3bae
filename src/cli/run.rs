//! `run`: records while a command runs, and returns its exit status.

use super::record::{Flags, end, note_daemon};
use super::terminal;
use crate::daemon::Recording;
use crate::files::OwnFolder;
use anyhow::Context as _;
use clap::Args;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitCode, ExitStatus};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

/// As shells have it: the command was found but cannot be run, or was not found.
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Added to the number of the signal that ended the command.
const BY_SIGNAL: i32 = 128;
/// Signals that are passed on to the command.
const PASSED_ON: [Signal; 6] = [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2];

#[derive(Debug, Args)]
pub(super) struct Run {
    #[command(flatten)]
    flags: Flags,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Run {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let own = OwnFolder::make("highwater-run").context("cannot make a folder for the socket")?;
        let socket = own.path().join("annotations.sock");
        let settings = self.flags.settings(&socket)?;
        note_daemon(&socket);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the runtime for signals")?;
        let line = self.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let recording = Recording::start(settings, &self.flags.output, &line)?;
        // Signals are taken before the command exists, so that none ends this process and leaves the command behind.
        let status = runtime.block_on(async {
            let signals = signals()?;
            let (program, arguments) = self.command.split_first().context("a command is needed")?;
            let mut command = Command::new(program);
            command.args(arguments).env("HIGHWATER_ANNOTATIONS_SOCKET", &socket);
            Ok::<_, anyhow::Error>(match command.spawn() {
                Ok(child) => Ok(wait(child, signals).await?),
                Err(error) => Err(error),
            })
        })?;
        match status {
            Ok(status) => {
                // The command's own status is returned all the same: whoever calls this relies on it.
                if let Err(error) = end(recording, &self.flags.output) {
                    terminal::print_error(format_args!("highwater: {error:#}"));
                }
                Ok(code(status))
            }
            Err(error) => {
                // There is nothing to record, so no file is left.
                let _ = recording.stop();
                let _ = std::fs::remove_file(&self.flags.output);
                terminal::print_error(format_args!("highwater: {}: {error}", self.command[0].to_string_lossy()));
                let is_missing = error.kind() == io::ErrorKind::NotFound;
                Ok(ExitCode::from(if is_missing { NOT_FOUND } else { CANNOT_RUN }))
            }
        }
    }
}

/// Every signal to pass on, as it comes. Those that are ignored stay ignored, here and in the command.
fn signals() -> anyhow::Result<mpsc::UnboundedReceiver<Signal>> {
    let (taken, signals) = mpsc::unbounded_channel();
    for passed in PASSED_ON.into_iter().filter(|passed| !super::serve::is_ignored(*passed)) {
        let mut source = signal(SignalKind::from_raw(passed.as_raw())).context("cannot wait for signals")?;
        let taken = taken.clone();
        tokio::spawn(async move { while source.recv().await.is_some() && taken.send(passed).is_ok() {} });
    }
    Ok(signals)
}

/// Waits for the command, and passes signals on.
async fn wait(mut child: Child, mut signals: mpsc::UnboundedReceiver<Signal>) -> anyhow::Result<ExitStatus> {
    // A descriptor, because the number could belong to another process once the command has been waited for.
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).context("cannot follow the command")?;
    let (ended, mut status) = oneshot::channel();
    crate::thread::spawn("hw-command", move || drop(ended.send(child.wait()))).context("cannot start a thread")?;
    loop {
        tokio::select! {
            status = &mut status => return status.context("the command is lost")?.context("cannot wait for the command"),
            Some(taken) = signals.recv() => pass_on(&pidfd, taken),
        }
    }
}

/// Passes a signal on, unless the terminal has sent it to the command already.
fn pass_on(pidfd: &OwnedFd, taken: Signal) {
    let is_typed = matches!(taken, Signal::INT | Signal::QUIT) && has_terminal();
    if !is_typed {
        // The command may have ended meanwhile.
        let _ = pidfd_send_signal(pidfd.as_fd(), taken);
    }
}

/// Whether this process, and so the command, belongs to the group that the terminal sends its signals to.
fn has_terminal() -> bool {
    let Ok(terminal) = std::fs::File::open("/dev/tty") else { return false };
    rustix::termios::tcgetpgrp(&terminal).is_ok_and(|group| group == rustix::process::getpgrp())
}

fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| BY_SIGNAL + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
