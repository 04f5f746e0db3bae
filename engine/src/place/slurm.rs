//! Which Slurm job a process is of, and which jobs have a GPU.
//!
//! Enters: the control groups that `slurmd` makes for each step, of either version, and the folder in which a site's prolog says
//! which jobs have a GPU, as dcgm-exporter reads it. Leaves: [`SlurmStep`]s. Invariants: a group counts only where root makes it, at
//! the top of the hierarchy, because users can make groups of any name below their own; a folder or file of which another user could
//! be the author is refused; every file, name and list is bounded.
//! Absent on purpose: Slurm's daemons and commands.

use super::process::users;
use crate::files::{Folder, read_at_most};
use highwater_core::gpu::SlurmStep;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// How many bytes of a process's list of control groups are read.
const MOST_PROCESS_BYTES: u64 = 64 << 10;
/// How many bytes of a file in the folder of jobs are read, and of how many files.
const MOST_FILE_BYTES: u64 = 4 << 10;
const MOST_FILES: usize = 1_024;
/// The longest number of a job or name of a step, bytes. Slurm's numbers have at most ten digits, or two such numbers with a `+`.
pub const MOST_NAME_BYTES: usize = 32;

/// How to find Slurm's jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlurmSettings {
    /// Whether control groups are searched for them.
    pub steps: bool,
    /// The folder with a file for each GPU; `None` if there is none.
    pub job_map: Option<PathBuf>,
}

impl Default for SlurmSettings {
    fn default() -> Self {
        Self { steps: true, job_map: None }
    }
}

/// Where a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    /// In this step.
    Step(SlurmStep),
    /// In none.
    None,
    /// It cannot be read: it has ended, or is another user's where these are hidden. Or its path begins above the control groups that
    /// this process sees, so that it is not known where it is.
    Unknown,
}

/// The step of a process, by its folder in `/proc`.
pub(crate) fn step_of(process: &Path) -> Found {
    let Ok(groups) = read_at_most(&process.join("cgroup"), MOST_PROCESS_BYTES) else { return Found::Unknown };
    let groups = String::from_utf8_lossy(&groups);
    if groups.lines().any(|line| line.splitn(3, ':').nth(2).is_some_and(|path| path.starts_with("/.."))) {
        return Found::Unknown;
    }
    let Some((user, job, step)) = groups.lines().find_map(in_group) else { return Found::None };
    // Version 2 has no user in the path.
    let user = user.or_else(|| users(process).first().copied());
    Found::Step(SlurmStep { job: job.to_owned(), step: step.to_owned(), user })
}

/// User, job and step of a line of `/proc/PID/cgroup`: `/slurm/uid_1000/job_77/step_0/task_0` in version 1,
/// `/system.slice/slurmstepd.scope/job_77/step_0/user/task_0` in version 2, where several `slurmd` on a node each have a prefix or
/// suffix of their own.
fn in_group(line: &str) -> Option<(Option<u32>, &str, &str)> {
    let mut parts = line.splitn(3, ':').nth(2)?.strip_prefix('/')?.split('/');
    let first = parts.next()?;
    let user = if first == "slurm" || first.starts_with("slurm_") {
        Some(parts.next()?.strip_prefix("uid_")?.parse().ok()?)
    } else {
        let scope = (first == "system.slice").then(|| parts.next())??.strip_suffix(".scope")?;
        (scope == "slurmstepd" || scope.ends_with("_slurmstepd")).then_some(None)?
    };
    let job = number(parts.next()?.strip_prefix("job_")?)?;
    // A job's own processes, before it has steps, are of none.
    let step = parts.next().and_then(|part| part.strip_prefix("step_")).filter(|step| is_name(step));
    Some((user, job, step.unwrap_or_default()))
}

/// A job's number.
fn number(text: &str) -> Option<&str> {
    let is_number = !text.is_empty() && text.len() <= MOST_NAME_BYTES && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then_some(text)
}

/// Of parts of a heterogeneous job, a step is `0+1`.
fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'+';
    !text.is_empty() && text.len() <= MOST_NAME_BYTES && text.bytes().all(is_plain)
}

/// The jobs that the folder gives each GPU, by the file's name, which is the GPU's index or UUID. A line has a job's number, and
/// perhaps that of its user after it. At most `most` are returned.
///
/// # Errors
/// If the folder cannot be read, or it or a file could be another user's work.
pub(crate) fn mapped(folder: &Path, most: usize) -> io::Result<Vec<(String, SlurmStep)>> {
    let folder = Folder::existing(folder)?;
    let mut jobs = Vec::new();
    for gpu in folder.names()?.into_iter().take(MOST_FILES) {
        let mut text = Vec::new();
        match folder.read(&gpu) {
            Ok(file) => file.take(MOST_FILE_BYTES).read_to_end(&mut text)?,
            // The job has just ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let text = String::from_utf8_lossy(&text);
        let of_file = text.lines().filter_map(in_line).take(most - jobs.len());
        jobs.extend(of_file.map(|job| (gpu.clone(), job)));
    }
    Ok(jobs)
}

fn in_line(line: &str) -> Option<SlurmStep> {
    let mut words = line.split_ascii_whitespace();
    let job = number(words.next()?)?.to_owned();
    Some(SlurmStep { job, step: String::new(), user: words.next().and_then(|user| user.parse().ok()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(folder: &Path, cgroup: &str) -> Found {
        std::fs::write(folder.join("cgroup"), cgroup).expect("written");
        step_of(folder)
    }

    #[test]
    fn a_process_is_of_the_step_that_slurm_made_its_group_for() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("status"), "Name:\tpython\nUid:\t1001\t0\t0\t0\n").expect("written");
        let step = |step: &str, user| Found::Step(SlurmStep { job: "77".into(), step: step.into(), user: Some(user) });
        for (groups, expected) in [
            ("0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n", step("0", 1001)),
            ("0::/system.slice/node7_slurmstepd.scope/job_77/step_0+1/user/task_0\n", step("0+1", 1001)),
            ("0::/system.slice/slurmstepd.scope/job_77/step_batch/slurm\n", step("batch", 1001)),
            ("0::/system.slice/slurmstepd.scope/job_77\n", step("", 1001)),
            ("5:cpu:/\n4:memory:/slurm/uid_1000/job_77/step_extern/task_3\n", step("extern", 1000)),
            ("4:devices:/slurm_node7/uid_1000/job_77/step_0\n", step("0", 1000)),
            // Groups that users made, or that are no step's.
            ("0::/user.slice/user-1001.slice/slurm/uid_0/job_77/step_0\n", Found::None),
            ("0::/user.slice/user-1001.slice/system.slice/slurmstepd.scope/job_77/step_0\n", Found::None),
            ("0::/../system.slice/slurmstepd.scope/job_77/step_0\n", Found::Unknown),
            ("4:memory:/..\n0::/\n", Found::Unknown),
            ("0::/system.slice/slurmd.service/job_77/step_0\n", Found::None),
            ("0::/system.slice/slurmstepd.scope/system\n", Found::None),
            ("0::/slurm/uid_x/job_77/step_0\n", Found::None),
            ("0::/slurm/uid_1000/job_77x/step_0\n", Found::None),
            ("0::/\n", Found::None),
            ("\n:\n", Found::None),
        ] {
            assert_eq!(process(folder.path(), groups), expected, "{groups}");
        }
        std::fs::remove_file(folder.path().join("status")).expect("removed");
        let unknown = Found::Step(SlurmStep { job: "77".into(), step: "0".into(), user: None });
        assert_eq!(process(folder.path(), "0::/system.slice/slurmstepd.scope/job_77/step_0\n"), unknown);
        assert_eq!(step_of(&folder.path().join("none")), Found::Unknown);
        let long = format!("0::/slurm/uid_1/job_{}/step_0\n", "7".repeat(MOST_NAME_BYTES + 1));
        assert_eq!(process(folder.path(), &long), Found::None);
    }

    #[test]
    fn the_folder_names_the_jobs_of_each_gpu() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in [("0", "77\n78 1000\n\nnobody\n"), ("MIG-1", "79 1001"), ("2", "")] {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        let job =
            |gpu: &str, job: &str, user| (gpu.to_owned(), SlurmStep { job: job.into(), step: String::new(), user });
        let mut found = mapped(folder.path(), 9).expect("readable");
        found.sort();
        assert_eq!(found, [job("0", "77", None), job("0", "78", Some(1000)), job("MIG-1", "79", Some(1001))]);
        assert_eq!(mapped(folder.path(), 2).expect("readable").len(), 2);
        let problem = |path: &Path| mapped(path, 9).expect_err("refused").to_string();
        assert!(
            problem(&folder.path().join("none")).contains("No such file"),
            "{}",
            problem(&folder.path().join("none"))
        );
        // What another user may have prepared: a link, something that never ends, a folder that everybody may write to.
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("3")).expect("a link");
        assert!(
            problem(folder.path()).contains("link") || problem(folder.path()).contains("symbolic"),
            "{}",
            problem(folder.path())
        );
        std::fs::remove_file(folder.path().join("3")).expect("removed");
        rustix::fs::mknodat(rustix::fs::CWD, folder.path().join("3"), rustix::fs::FileType::Fifo, 0o666.into(), 0)
            .expect("a FIFO");
        assert!(problem(folder.path()).contains("is not a regular file"), "{}", problem(folder.path()));
        std::fs::remove_file(folder.path().join("3")).expect("removed");
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o1777)).expect("allowed");
        assert!(problem(folder.path()).contains("others may write to it"), "{}", problem(folder.path()));
    }
}
