//! `run`: records while a command runs, and returns its exit status.

use super::client;
use super::record::{Flags, answers, end, note_daemon, note_simulation, show};
use super::terminal;
use super::via::RemoteDaemon;
use crate::config::{Settings, default_socket};
use crate::daemon::{Recording, Unrecorded};
use anyhow::Context as _;
use clap::Args;
use highwater_engine::files::OwnFolder;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{ExitCode, ExitStatus};
use std::time::Instant;
use tokio::process::{Child, Command};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

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
    /// Let the daemon at this address record, and read no GPU here. The file is a capture that the daemon takes; it reaches
    /// back at most the daemon's ring.retention [default without =URL: http://127.0.0.1:10450].
    #[arg(long, value_name = "URL", num_args = 0..=1, require_equals = true, default_missing_value = client::DEFAULT)]
    via: Option<String>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Run {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let ended = match self.record() {
            Ok(ended) => ended,
            Err(Unrecorded::Asked(error)) => return Err(error),
            // The command must run even if a limit or a full disk prevents the recording.
            Err(Unrecorded::Machine(error) | Unrecorded::Sockets(error)) => {
                terminal::print_error(format_args!("highwater: the command runs, and is not recorded: {error:#}"));
                Err(self.become_command())
            }
        };
        Ok(match ended {
            Ok(status) => code(status),
            Err(error) => {
                terminal::print_error(format_args!("highwater: {}: {error}", self.command[0].to_string_lossy()));
                let is_missing = error.kind() == io::ErrorKind::NotFound;
                ExitCode::from(if is_missing { NOT_FOUND } else { CANNOT_RUN })
            }
        })
    }

    /// Replaces this process by the command. Returns only if that fails, with the error.
    fn become_command(&self) -> io::Error {
        let mut command = self.command();
        let error = command.as_std_mut().exec();
        match script(&error, command.as_std()) {
            Some(mut script) => script.exec(),
            None => error,
        }
    }

    /// Records while the command runs. Returns the command's exit status, or the error of starting it.
    ///
    /// # Errors
    /// If the recording cannot begin. The command has not run then.
    fn record(&self) -> Result<io::Result<ExitStatus>, Unrecorded> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the runtime for signals").map_err(Unrecorded::Machine)?;
        if let Some(url) = &self.via {
            return self.record_via(url, &runtime).map_err(Unrecorded::Asked);
        }
        let own = OwnFolder::make("highwater-run").inspect_err(|error| {
            terminal::print_error(format_args!("highwater: marks are not recorded: {error}"));
        });
        let socket = own.as_ref().ok().map(|own| own.path().join("annotations.sock"));
        let mut settings = self.flags.settings(socket.as_deref()).map_err(Unrecorded::Asked)?;
        note_simulation(&settings);
        let recording = self.start(&mut settings)?;
        let mut command = self.command();
        if let Some(socket) = &settings.annotations_socket {
            command.env("HIGHWATER_ANNOTATIONS_SOCKET", socket);
            note_daemon(socket);
        }
        let ended = execute(&mut command, &runtime);
        if ended.is_ok() {
            // The command's own status is returned all the same: the caller relies on it.
            if let Err(error) = end(recording, self.flags.output()) {
                terminal::print_error(format_args!("highwater: {error:#}"));
            }
        } else {
            // There is nothing to record, so no file is left.
            let path = recording.path().to_owned();
            let _ = recording.stop();
            let _ = std::fs::remove_file(path);
        }
        Ok(ended)
    }

    /// Begins the recording; without annotations where no socket can be bound, for example because `/proc` is not mounted.
    fn start(&self, settings: &mut Settings) -> Result<Recording, Unrecorded> {
        let (path, format, line) = (self.flags.output(), self.flags.format, self.line());
        let start = |settings: &Settings| Recording::start(settings.clone(), path, format, &line);
        match start(settings) {
            Err(Unrecorded::Sockets(error)) => {
                settings.annotations_socket = None;
                terminal::print_error(format_args!("highwater: marks are not recorded: {error:#}"));
                start(settings)
            }
            started => started,
        }
    }

    /// The same, but a daemon records.
    fn record_via(&self, url: &str, runtime: &Runtime) -> anyhow::Result<io::Result<ExitStatus>> {
        self.flags.leave_to_daemon()?;
        let path = self.flags.output();
        anyhow::ensure!(path.symlink_metadata().is_err(), "{}: exists, and is not overwritten", path.display());
        let daemon = runtime.block_on(RemoteDaemon::find(url))?;
        let mut command = self.command();
        // Where the daemon's socket lies elsewhere, the environment names it.
        if answers(&default_socket()) {
            command.env("HIGHWATER_ANNOTATIONS_SOCKET", default_socket());
        }
        let begin = Instant::now();
        let ended = execute(&mut command, runtime);
        if ended.is_ok() {
            let recorded = runtime.block_on(daemon.record(begin.elapsed(), &self.line(), path));
            let shown = recorded.and_then(|lost| {
                if !lost.is_zero() {
                    let seconds = lost.as_secs_f64();
                    terminal::print_error(format_args!(
                        "highwater: the daemon no longer keeps the first {seconds:.0} s (ring.retention)"
                    ));
                }
                show(path, path)
            });
            if let Err(error) = shown {
                terminal::print_error(format_args!("highwater: {error:#}"));
            }
        }
        Ok(ended)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        command
    }

    /// The command as a line of text.
    fn line(&self) -> String {
        self.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }
}

/// Runs the command to its end. The signal handlers are installed before it starts, so no signal can end this process and
/// leave the command behind.
fn execute(command: &mut Command, runtime: &Runtime) -> io::Result<ExitStatus> {
    let running = runtime.block_on(async {
        let signals = signals()?;
        spawn(command).map(|child| wait(child, signals))
    });
    running.and_then(|status| runtime.block_on(status))
}

/// Starts the command.
fn spawn(command: &mut Command) -> io::Result<Child> {
    command.spawn().or_else(|error| match script(&error, command.as_std()) {
        Some(script) => Command::from(script).spawn(),
        None => Err(error),
    })
}

/// The command as a script of `/bin/sh`, if it is an executable file without `#!`. Shells do the same.
fn script(error: &io::Error, command: &std::process::Command) -> Option<std::process::Command> {
    let is_script = error.raw_os_error() == Some(libc::ENOEXEC);
    (is_script && command.get_program().as_encoded_bytes().contains(&b'/')).then(|| {
        let mut script = std::process::Command::new("/bin/sh");
        script.arg(command.get_program()).args(command.get_args());
        script.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        script
    })
}

/// Every signal to pass on, as it comes. Those that are ignored stay ignored, here and in the command.
fn signals() -> io::Result<mpsc::UnboundedReceiver<Signal>> {
    let (taken, signals) = mpsc::unbounded_channel();
    for passed in PASSED_ON.into_iter().filter(|passed| !super::serve::is_ignored(*passed)) {
        let mut source = signal(SignalKind::from_raw(passed.as_raw()))?;
        let taken = taken.clone();
        tokio::spawn(async move { while source.recv().await.is_some() && taken.send(passed).is_ok() {} });
    }
    Ok(signals)
}

/// Waits for the command, and passes signals on.
async fn wait(mut child: Child, mut signals: mpsc::UnboundedReceiver<Signal>) -> io::Result<ExitStatus> {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    // Another process could get the same ID once the command has been waited for, so signals go to a pidfd. Kernels before
    // 5.3 have none.
    let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    loop {
        tokio::select! {
            status = child.wait() => return status,
            Some(taken) = signals.recv() => {
                if let Some(pid) = pid {
                    pass_on(pid, pidfd.as_ref(), taken);
                }
            }
        }
    }
}

/// Passes a signal on, unless the terminal has sent it to the command already.
fn pass_on(pid: Pid, pidfd: Option<&OwnedFd>, taken: Signal) {
    let is_typed = matches!(taken, Signal::INT | Signal::QUIT) && hears_terminal(pid);
    if !is_typed {
        // The command may have ended meanwhile.
        let _ = match pidfd {
            Some(pidfd) => pidfd_send_signal(pidfd.as_fd(), taken),
            None => kill_process(pid, taken),
        };
    }
}

/// Whether the process `pid` is in the terminal's foreground group, which gets the signals of typed keys such as Control-C.
fn hears_terminal(pid: Pid) -> bool {
    let Ok(terminal) = std::fs::File::open("/dev/tty") else { return false };
    let own = rustix::process::getpgid(Some(pid));
    rustix::termios::tcgetpgrp(&terminal).is_ok_and(|group| Ok(group) == own)
}

/// The exit status as a shell reports it. If SIGINT ended the command, this process also ends by SIGINT, because only then a
/// shell stops a loop around it.
fn code(status: ExitStatus) -> ExitCode {
    if status.signal() == Some(Signal::INT.as_raw()) {
        // `sh` does not inherit this process's handler, so the signal ends it. If `sh` cannot be run, the status below is 130.
        let _ = std::process::Command::new("/bin/sh").args(["-c", "kill -INT $$"]).exec();
    }
    let code = status.code().or_else(|| status.signal().map(|signal| BY_SIGNAL + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
