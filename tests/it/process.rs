//! A program that a test starts. Tests wait for what it prints on stderr, and it is always ended with SIGTERM.

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a program may take to end after SIGTERM before the test fails. A recording is synchronised to the disk, which takes
/// many seconds where others write much.
const END_WITHIN: Duration = Duration::from_secs(60);

/// `command`, started by Python, which resets signals to their default actions. Processes inherit ignored signals, and the
/// tests may have been started with some: `nohup` ignores SIGHUP, and a shell's `&` ignores SIGINT and SIGQUIT.
pub fn hearing_signals(command: &Command) -> Command {
    let resets = "import os, signal, sys\nfor n in 'HUP INT QUIT TERM USR1'.split():\n \
                  signal.signal(getattr(signal, 'SIG' + n), signal.SIG_DFL)\nos.execvp(sys.argv[1], sys.argv[1:])";
    behind_python(resets, command)
}

/// A Python script with the program and arguments of `command` as its own, in the environment of `command`.
pub fn behind_python(script: &str, command: &Command) -> Command {
    let mut python = Command::new("python3");
    python.args(["-c", script]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => python.env(name, value),
            None => python.env_remove(name),
        };
    }
    python
}

/// What a command printed, on both of its outputs.
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A running program.
pub struct Process {
    name: String,
    pid: Pid,
    lines: Receiver<String>,
    printed: Arc<Mutex<String>>,
    ended: Receiver<ExitStatus>,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts it. Its stderr is read here, its stdout discarded.
    pub fn start(mut command: Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        let pid = Pid::from_child(&child);
        let stderr = child.stderr.take().expect("stderr is piped");
        let printed = Arc::new(Mutex::new(String::new()));
        let (line_tx, lines) = channel();
        let kept = Arc::clone(&printed);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                *kept.lock().expect("no panic while held") += &format!("{line}\n");
                let _ = line_tx.send(line);
            }
        });
        let (status_tx, ended) = channel();
        std::thread::spawn(move || status_tx.send(child.wait().expect("it is our child")));
        Self { name, pid, lines, printed, ended, status: None }
    }

    /// Its process ID.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Waits for a line that `wanted` accepts, and returns what `wanted` made of it. Panics with everything printed if
    /// the program ends first or takes longer than `within`.
    pub fn wait_for<T>(&self, within: Duration, what: &str, wanted: impl Fn(&str) -> Option<T>) -> T {
        let deadline = Instant::now() + within;
        loop {
            let line = match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => panic!("no {what} within {within:?}; {}", self.printed()),
                Err(RecvTimeoutError::Disconnected) => panic!("it ended before {what}; {}", self.printed()),
            };
            if let Some(found) = wanted(&line) {
                return found;
            }
        }
    }

    /// Sends SIGTERM and waits; returns the exit status and how long it took. Panics if the program does not end.
    pub fn terminate(&mut self) -> (ExitStatus, Duration) {
        let begin = Instant::now();
        self.signal(Signal::TERM);
        let Some(status) = self.wait(END_WITHIN) else {
            self.signal(Signal::KILL);
            panic!("it does not end {END_WITHIN:?} after SIGTERM; {}", self.printed());
        };
        (status, begin.elapsed())
    }

    /// Sends SIGKILL, which no program can catch, and waits until it has ended.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        assert!(self.wait(END_WITHIN).is_some(), "it does not end after SIGKILL; {}", self.printed());
    }

    /// Sends `signal`, unless it has ended.
    fn signal(&mut self, signal: Signal) {
        if self.wait(Duration::ZERO).is_none() {
            // It may end between the two. Then there is nothing to signal.
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Its exit status, if it ends within `within`.
    pub fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.ended.recv_timeout(within).ok();
        }
        self.status
    }

    /// Everything that it has printed on stderr, headed by its name.
    pub fn printed(&self) -> String {
        format!("stderr of {}:\n{}", self.name, self.printed.lock().expect("no panic while held"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.signal(Signal::KILL);
            eprintln!("{}", self.printed());
        } else if self.status.is_none() {
            self.terminate();
        }
    }
}

/// A child process that ends with its test, even if the test fails.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Fails if the child has already ended.
        let _ = self.0.kill();
    }
}

/// Calls `probe` repeatedly until it returns something; panics with `what` after `within`. For state that can only be
/// polled, such as a scrape that another program makes in its own time.
pub fn eventually<T>(within: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {within:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
