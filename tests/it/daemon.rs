//! The program under test as a process: `highwater` with its own port and annotations socket.

use crate::process::{Process, eventually};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;
use tempfile::TempDir;

/// How long it may take until it listens. A debug build on a busy machine needs more than the target of 300 ms.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);

/// A running daemon, ended with SIGTERM when dropped.
pub struct Daemon {
    process: Process,
    base: String,
    directory: TempDir,
}

impl Daemon {
    /// Starts `highwater ARGUMENTS… --listen 127.0.0.1:0 --annotations-socket …`; returns once it listens. No setting
    /// of the environment reaches it.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// Like [`start`](Self::start), with these variables and no other setting in its environment.
    pub fn start_with(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = command();
        command.envs(environment.iter().copied());
        Self::run(command, arguments)
    }

    /// Like [`start`](Self::start), with a limit of open files.
    pub fn start_limited(arguments: &[&str], descriptors: u64) -> Self {
        let program = command();
        let mut limited = Command::new("sh");
        for (name, _) in program.get_envs() {
            limited.env_remove(name);
        }
        limited.args(["-c", &format!("ulimit -n {descriptors}; exec \"$0\" \"$@\"")]).arg(program.get_program());
        Self::run(limited, arguments)
    }

    fn run(mut command: Command, arguments: &[&str]) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        command.args(arguments).args(["--listen", "127.0.0.1:0"]);
        command.arg("--annotations-socket").arg(socket_in(directory.path()));
        command.env("XDG_RUNTIME_DIR", directory.path()).env("XDG_STATE_HOME", directory.path());
        let process = Process::start(command);
        let base = process.wait_for(LISTENS_WITHIN, "line `listening on`", |line| {
            let address = line.split_once("listening on ")?.1;
            Some(address.split_whitespace().next()?.trim_end_matches('/').to_owned())
        });
        Self { process, base, directory }
    }

    /// Waits until it reads memory. Before that, no GPU is known.
    pub fn ready(self) -> Self {
        eventually(LISTENS_WITHIN, "memory", || (self.ask("/readyz").0 == 200).then_some(()));
        self
    }

    /// What it has printed so far.
    pub fn printed(&self) -> String {
        self.process.printed()
    }

    /// `127.0.0.1:PORT`, which is Prometheus's `instance` label.
    pub fn address(&self) -> &str {
        self.base.split_once("://").map_or(&*self.base, |(_, address)| address)
    }

    /// The address in the line of its log that contains `what`, such as `serving probes`.
    pub fn address_of(&self, what: &str) -> String {
        let printed = self.printed();
        let line = printed.lines().find(|line| line.contains(what));
        let address = line.and_then(|line| line.split_once("address=")).map(|(_, address)| address);
        let address = address.and_then(|address| address.split_whitespace().next());
        address.unwrap_or_else(|| panic!("no address on a line with `{what}`: {printed}")).to_owned()
    }

    /// Its annotations socket.
    pub fn socket(&self) -> PathBuf {
        socket_in(self.directory.path())
    }

    /// The metrics as a scraper gets them, without the label `user` of the user of this test, as whom its jobs send.
    pub fn metrics(&self) -> String {
        let own = format!(",user=\"{}\"", rustix::process::getuid().as_raw());
        self.get("/metrics").replace(&own, "")
    }

    /// The body at `path`; panics unless the status is 200.
    pub fn get(&self, path: &str) -> String {
        let (status, body) = self.ask(path);
        assert_eq!(status, 200, "GET {path}: {body}\n{}", self.process.printed());
        body
    }

    /// Status and body at `path`.
    pub fn ask(&self, path: &str) -> (u16, String) {
        answer(agent().get(format!("{}{path}", self.base)).call(), path)
    }

    /// Status and body of `json` posted to `path`.
    pub fn post(&self, path: &str, json: &Value) -> (u16, String) {
        answer(agent().post(format!("{}{path}", self.base)).send_json(json), path)
    }

    /// Sends SIGKILL.
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Its process ID.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// How long its threads and the caller have waited for a processor so far, all together: what a busy machine costs them. Zero
    /// where the kernel does not say.
    pub fn waited(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("threads");
        let own = PathBuf::from("/proc/thread-self");
        let waited_ns = |task: PathBuf| -> Option<u64> {
            let text = std::fs::read_to_string(task.join("schedstat")).ok()?;
            text.split_whitespace().nth(1)?.parse().ok()
        };
        let tasks = tasks.filter_map(|task| Some(task.ok()?.path())).chain([own]);
        Duration::from_nanos(tasks.filter_map(waited_ns).sum())
    }

    /// Sends SIGTERM; returns the exit status and how long it took.
    pub fn stop(mut self) -> (ExitStatus, Duration) {
        self.process.terminate()
    }
}

/// Where programs that the tests start look for a daemon by default: nowhere.
pub const NO_DAEMON: &str = "/nonexistent";

/// The program, with none of its settings in the environment.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
    // A daemon of this machine is none of the tests' business, nor are they of its.
    command.env("RUNTIME_DIRECTORY", NO_DAEMON);
    let settings = std::env::vars_os().map(|(name, _)| name);
    for name in
        settings.filter(|name| name.to_str().is_some_and(|n| n.starts_with("HIGHWATER_") || n.starts_with("OTEL_")))
    {
        command.env_remove(name);
    }
    command
}

/// The source of a simulated job `wide` with a rank on each of these GPUs, whose rank 0 has 200 MiB left at the times that `near_oom`
/// says; and the folder of its scenario.
pub fn wide(gpus: impl ExactSizeIterator<Item = u32>, near_oom: &str) -> (TempDir, String) {
    let count = gpus.len();
    let ranks: Vec<String> = gpus.map(|gpu| gpu.to_string()).collect();
    let scenario = format!(
        "[[gpus]]\ncount = {count}\n\n[[jobs]]\nname = \"wide\"\nranks = [{}]\n{}\n[jobs.near_oom]\n{near_oom}\nfree = \"200 MiB\"\n",
        ranks.join(", "),
        include_str!("../data/training.toml")
    );
    let folder = TempDir::new().expect("a temporary directory");
    let file = folder.path().join("wide.toml");
    std::fs::write(&file, scenario).expect("writable");
    let source = format!("sim:{}", file.display());
    (folder, source)
}

/// A client that returns every status as an answer and waits for it as long as a busy machine may need.
pub fn agent() -> ureq::Agent {
    let config =
        ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_secs(60)));
    config.build().into()
}

/// Status and body of an answer; panics if there was none.
pub fn answer(result: Result<ureq::http::Response<ureq::Body>, ureq::Error>, what: &str) -> (u16, String) {
    let mut response = result.unwrap_or_else(|error| panic!("{what}: {error}"));
    let body = response.body_mut().read_to_string().unwrap_or_else(|error| panic!("{what}: {error}"));
    (response.status().as_u16(), body)
}

fn socket_in(directory: &Path) -> PathBuf {
    directory.join("annotations.sock")
}
