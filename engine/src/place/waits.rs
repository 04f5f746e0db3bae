//! What a process waits for on its host: a CPU, memory or storage.
//!
//! Enters: the kernel's files about a process's threads and its control group. Leaves: totals. The kernel counts how
//! long each thread was ready without a CPU. Between two readings, only the thread that waited longest counts, because
//! it is not known which thread launches the GPU's kernels. Of version 1 of control groups, nothing more is read.
//! Invariants: at most [`MOST_THREADS`] threads of a process are read; every file is read up to a bound.

use super::cgroup::MemoryGroup;
use crate::files::read_at_most;
use highwater_core::detect::HostWaits;
use std::collections::HashMap;
use std::path::Path;

/// Threads of a process that are read; PyTorch starts some two hundred.
pub(crate) const MOST_THREADS: usize = 512;
/// How many bytes of a file are read.
const MOST_BYTES: u64 = 4 << 10;

/// How long a process's threads have waited for a CPU.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    /// Each thread's total at the last reading, nanoseconds.
    last: HashMap<u32, u64>,
    /// The sum of the longest waits.
    total_ns: u64,
}

impl Threads {
    /// Reads them; `None` if the process has ended or the kernel does not count it.
    fn read(&mut self, process: &Path) -> Option<u64> {
        let entries = std::fs::read_dir(process.join("task")).ok()?.flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let now: HashMap<u32, u64> = (ids.take(MOST_THREADS))
            .filter_map(|id| Some((id, waited_ns(&process.join(format!("task/{id}/schedstat")))?)))
            .collect();
        if now.is_empty() {
            return None;
        }
        let since = |(id, waited_ns): (&u32, &u64)| waited_ns.checked_sub(*self.last.get(id)?);
        self.total_ns = self.total_ns.saturating_add(now.iter().filter_map(since).max().unwrap_or(0));
        self.last = now;
        Some(self.total_ns)
    }
}

/// What a process waited for up to now. `group` is its control group, where that is known.
pub(crate) fn read(threads: &mut Threads, process: &Path, group: Option<&MemoryGroup>) -> Option<HostWaits> {
    let cpu_ns = threads.read(process)?;
    let microseconds = |file: &str, name: &str| {
        let text = read_at_most(&group?.second_version()?.join(file), MOST_BYTES).ok()?;
        number_of(&String::from_utf8_lossy(&text), name)?.checked_mul(1_000)
    };
    Some(HostWaits {
        cpu_ns: Some(cpu_ns),
        limited_ns: microseconds("cpu.stat", "throttled_usec "),
        memory_ns: microseconds("memory.pressure", "total="),
        storage_ns: microseconds("io.pressure", "total="),
        ..HostWaits::default()
    })
}

/// How long a thread was ready without a CPU: the second number of its file.
fn waited_ns(file: &Path) -> Option<u64> {
    let text = read_at_most(file, MOST_BYTES).ok()?;
    std::str::from_utf8(&text).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The number after the first `name`. In a pressure file that is the line `some`, which comes before `full`.
fn number_of(text: &str, name: &str) -> Option<u64> {
    let behind = text.split_once(name)?.1;
    behind.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::cgroup::{Groups, Search};
    use highwater_core::jobs::{Owner, Within};
    use std::path::PathBuf;

    const OWNER: Owner = Owner::User { uid: 7, within: Within::Node };

    struct Rig(tempfile::TempDir);

    impl Rig {
        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        }

        fn thread(&self, id: u32, waited_ns: u64) {
            self.write(&format!("proc/5/task/{id}/schedstat"), &format!("332704 {waited_ns} 2\n"));
        }

        fn process(&self) -> PathBuf {
            self.0.path().join("proc/5")
        }
    }

    #[test]
    fn each_interval_counts_the_thread_that_waited_longest() {
        let (rig, mut threads) = (Rig(tempfile::tempdir().expect("a folder")), Threads::default());
        assert_eq!(threads.read(&rig.process()), None, "it has ended");
        let mut with = |waits: &[(u32, u64)]| {
            waits.iter().for_each(|(id, waited_ns)| rig.thread(*id, *waited_ns));
            threads.read(&rig.process())
        };
        assert_eq!(with(&[(5, 1_000), (6, 90_000)]), Some(0), "before it was followed");
        assert_eq!(with(&[(5, 1_700), (6, 90_100)]), Some(700));
        assert_eq!(
            with(&[(5, 1_800), (6, 90_500), (7, 5_000_000)]),
            Some(1_100),
            "a thread that is new counts from now on"
        );
        assert_eq!(with(&[(7, 5_000_009), (6, 3)]), Some(1_109), "an id of another thread now");
        rig.write("proc/5/task/7/schedstat", "nonsense");
        assert_eq!(with(&[(5, 1_800)]), Some(1_109));
    }

    #[test]
    fn the_control_group_says_what_else_it_waits_for() {
        let rig = Rig(tempfile::tempdir().expect("a folder"));
        let groups = Groups::new(rig.0.path().join("proc"), Some(rig.0.path().join("cgroup")));
        rig.thread(5, 1);
        rig.write("proc/5/cgroup", "0::/pod/ctr\n");
        rig.write("cgroup/pod/ctr/cpu.stat", "usage_usec 9\nnr_throttled 2\nthrottled_usec 1234\n");
        rig.write(
            "cgroup/pod/ctr/memory.pressure",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=55\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=44\n",
        );
        let Search::Found(group) = groups.of(5, &OWNER, 0) else { panic!("a group") };
        let waits =
            HostWaits { cpu_ns: Some(0), limited_ns: Some(1_234_000), memory_ns: Some(55_000), ..HostWaits::default() };
        assert_eq!(read(&mut Threads::default(), &rig.process(), Some(&group)), Some(waits), "no pressure of storage");
        let alone = HostWaits { cpu_ns: Some(0), ..HostWaits::default() };
        assert_eq!(read(&mut Threads::default(), &rig.process(), None), Some(alone));
        rig.write("proc/5/cgroup", "4:memory:/old\n");
        rig.write("cgroup/memory/old/cpu.stat", "throttled_usec 1\n");
        let Search::Found(group) = groups.of(5, &OWNER, 0) else { panic!("a group") };
        assert_eq!(read(&mut Threads::default(), &rig.process(), Some(&group)), Some(alone), "version 1");
    }

    /// The kernel that runs this test.
    #[test]
    fn a_real_process_has_waited_for_some_time() {
        let process = PathBuf::from(format!("/proc/{}", std::process::id()));
        let waited: Option<u64> = waited_ns(&process.join("schedstat"));
        assert!(waited.is_some_and(|waited_ns| waited_ns < 1 << 62), "{waited:?}");
        assert_eq!(Threads::default().read(&process), Some(0));
    }
}
