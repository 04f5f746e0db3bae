//! The built program as a child process, and its resource usage as the kernel reports it.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A running daemon, killed when dropped.
pub struct Process {
    child: Child,
    base: String,
}

/// Resource usage so far.
pub struct Usage {
    /// CPU time of all its threads, nanoseconds.
    pub all_ns: u64,
    /// CPU time of the exporter's thread alone, nanoseconds.
    pub exporter_ns: u64,
    /// Resident memory, bytes.
    pub resident_bytes: u64,
}

impl Process {
    /// Starts the program on a scenario with these settings and variables; returns once it listens.
    pub fn start(scenario: &Path, folder: &Path, settings: &[String], environment: &[(&str, String)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("HIGHWATER_") || name.starts_with("OTEL_")) {
                command.env_remove(name);
            }
        }
        command.args(["serve", "--listen", "127.0.0.1:0", "--annotations-socket"]).arg(folder.join("bench.sock"));
        command.arg("--source").arg(format!("sim:{}", scenario.display()));
        command.args(settings.iter().flat_map(|setting| ["--set", setting]));
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
        let address = lines.find_map(|line| Some(line.split_once("listening on http://")?.1.to_owned()));
        let base = format!("http://{}", address.expect("it listens").split_whitespace().next().expect("an address"));
        std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
        Self { child, base }
    }

    /// Its resource usage so far.
    pub fn usage(&self) -> Usage {
        let folder = format!("/proc/{}", self.child.id());
        let (mut all_ns, mut exporter_ns) = (0, 0);
        for task in std::fs::read_dir(format!("{folder}/task")).expect("it runs") {
            let task = task.expect("a task").path();
            // The thread may have ended meanwhile.
            let (Ok(name), Ok(times)) =
                (std::fs::read_to_string(task.join("comm")), std::fs::read_to_string(task.join("schedstat")))
            else {
                continue;
            };
            let ran_ns: u64 = times.split(' ').next().and_then(|time| time.parse().ok()).expect("a time");
            all_ns += ran_ns;
            exporter_ns += if name.trim() == "hw-otlp" { ran_ns } else { 0 };
        }
        let status = std::fs::read_to_string(format!("{folder}/status")).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a field of every process");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
        Usage { all_ns, exporter_ns, resident_bytes: kib << 10 }
    }

    /// The sum of a metric's samples; 0 if the metric is absent.
    pub fn sum(&self, metric: &str) -> f64 {
        let mut answer = ureq::get(format!("{}/metrics", self.base)).call().expect("an answer");
        let text = answer.body_mut().read_to_string().expect("text");
        let samples = text.lines().filter(|line| line.starts_with(metric)).filter_map(|line| line.rsplit_once(' '));
        samples.map(|(_, value)| value.parse::<f64>().expect("a number")).sum()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // If the process has already ended, both calls have nothing to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
