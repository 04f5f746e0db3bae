//! Control groups that tests make.

use crate::tools;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A control group, which is removed when this is dropped, with those above it that it made.
pub struct ControlGroup {
    root: PathBuf,
    below: PathBuf,
}

impl ControlGroup {
    /// One with this path below the root of some hierarchy. `None`, which is reported, where none may be made: that takes root.
    pub fn new(below: &str) -> Option<Self> {
        let roots = ["", "cpu", "pids"].map(|hierarchy| Path::new("/sys/fs/cgroup").join(hierarchy));
        let is_made =
            |root: &PathBuf| root.join("cgroup.procs").is_file() && std::fs::create_dir_all(root.join(below)).is_ok();
        let root = roots.into_iter().find(is_made);
        if root.is_none() {
            tools::missing("no control group can be made, which takes root");
        }
        Some(Self { root: root?, below: below.into() })
    }

    /// A command that runs this program in the group.
    pub fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ >"$0" && exec "$@""#]).arg(self.processes());
        command.arg(program).args(arguments);
        command
    }

    /// Moves a process into the group.
    pub fn take(&self, pid: i32) {
        std::fs::write(self.processes(), pid.to_string()).expect("a process that may be moved");
    }

    fn processes(&self) -> PathBuf {
        self.root.join(&self.below).join("cgroup.procs")
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // The kernel lets a process go a moment after it was waited for.
        let deadline = Instant::now() + Duration::from_secs(5);
        while std::fs::remove_dir(self.root.join(&self.below)).is_err() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        for group in self.below.ancestors().skip(1).filter(|group| !group.as_os_str().is_empty()) {
            let _ = std::fs::remove_dir(self.root.join(group));
        }
    }
}
