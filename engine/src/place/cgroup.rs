//! Finds the control groups that limit a process's host memory, and reads how many of its processes the kernel killed.
//!
//! Enters: the kernel's files about a process and its control groups, of either version. Leaves: a [`MemoryGroup`], and its
//! [`Counts`]. Invariants: only files below the configured folder are opened, never a path within a process's own view of the file
//! system, which its owner may change; every file is read up to a bound. Absent on purpose: whose the process is, and when anything
//! is read.

use crate::files::read_at_most;
use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::Owner;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// How many bytes of a file are read.
const MOST_BYTES: u64 = 64 << 10;
/// How many control groups above a process's own are read.
const MOST_LEVELS: usize = 8;
/// How deep below the mounted folder the groups of other containers are looked for, and in how many folders at most.
const MOST_DEPTH: usize = 3;
const MOST_FOLDERS: usize = 512;
/// Maximum number of searches of the folders that find nothing in [`MISSES_NS`], of one owner and of all. After that
/// none is made until the time is over. Searches can fail: a container may end first, and a node may have more groups
/// than are searched.
const MOST_MISSES: usize = 8;
const MOST_ALL_MISSES: usize = 32;
const MISSES_NS: i64 = 60 * SECOND_NS;
/// The longest path of a group, bytes: users choose names.
pub(crate) const MOST_PATH_BYTES: usize = 1 << 10;
/// A limit of version 1 from this number of bytes on means no limit. The kernel then reports a value near 2^63.
const NO_LIMIT: u64 = 1 << 60;

/// The control groups of this machine.
#[derive(Debug)]
pub(crate) struct Groups {
    proc: PathBuf,
    /// Where control groups are mounted; `None` to read none.
    root: Option<PathBuf>,
    above: Mutex<Above>,
}

/// Where paths that begin with `..` lead.
#[derive(Debug, Default)]
struct Above {
    /// By the number of `..` at the begin of a path: the folder that the rest is relative to. Cached, as a search is
    /// expensive.
    bases: Vec<(usize, PathBuf)>,
    /// For whom walks had no result, and since when they are counted.
    misses: Vec<Owner>,
    since_ns: i64,
}

/// The result of a search for a process's group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// Its group.
    Found(MemoryGroup),
    /// It has none that is read: it has ended, or its group is the root of all, or not below the mounted folder.
    Nowhere,
    /// It was not searched, because too many searches found nothing. The caller may try again later.
    Later,
}

/// Which of the kernel's two interfaces a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The control group that counts a process's host memory, and those above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryGroup {
    version: Version,
    /// The folder of the version's hierarchy, and that of the group.
    root: Arc<Path>,
    own: Arc<Path>,
}

/// What was counted of a group up to a moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Processes of the group that the kernel killed for want of memory.
    pub kills: u64,
    /// How often each level ran into its limit; `None` where the level does not say.
    pub at_limit: Vec<Option<u64>>,
}

/// Why processes of a group were killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reason {
    /// A limit was reached.
    Limit(Limit),
    /// No limit was, so that the node had no memory left.
    Node,
    /// The kernel does not count how often limits were reached.
    Unknown,
}

/// A limit that was reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Limit {
    /// The control group, as the kernel names it.
    pub group: String,
    /// Bytes; `None` if it has none any more.
    pub bytes: Option<u64>,
}

impl Groups {
    /// The groups that are mounted at `root`, of processes with files below `proc`.
    pub fn new(proc: PathBuf, root: Option<PathBuf>) -> Self {
        Self { proc, root, above: Mutex::default() }
    }

    /// Whether any are read.
    pub fn is_on(&self) -> bool {
        self.root.is_some()
    }

    /// The folder of a process in `/proc`.
    pub fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }

    /// The group of a process of this owner.
    pub fn of(&self, pid: u32, owner: &Owner, now_ns: i64) -> Search {
        let Some(root) = self.root.as_deref() else { return Search::Nowhere };
        let Ok(text) = read_at_most(&self.process(pid).join("cgroup"), MOST_BYTES) else { return Search::Nowhere };
        let text = String::from_utf8_lossy(&text);
        let Some((version, path)) = memory_path(&text) else { return Search::Nowhere };
        let root = match version {
            Version::One => root.join("memory"),
            // Beside version 1, the other is mounted in a folder of its own.
            Version::Two if root.join("unified").is_dir() => root.join("unified"),
            Version::Two => root.to_owned(),
        };
        let own = match self.folder(&root, path, owner, now_ns) {
            Ok(Some(own)) if own != root && own.as_os_str().len() <= MOST_PATH_BYTES => own,
            Ok(_) => return Search::Nowhere,
            Err(NotSearched) => return Search::Later,
        };
        Search::Found(MemoryGroup { version, root: root.into(), own: own.into() })
    }

    /// The folder of a group that the kernel names so. Seen from a container, the path of another container's group begins with
    /// `..`, and is relative to the own group of the container.
    fn folder(&self, root: &Path, path: &str, owner: &Owner, now_ns: i64) -> Result<Option<PathBuf>, NotSearched> {
        let is_up = |part: &Component<'_>| *part == Component::ParentDir;
        let parts = || Path::new(path).components().filter(|part| !matches!(part, Component::RootDir));
        let ups = parts().take_while(is_up).count();
        let rest: PathBuf = parts().skip(ups).collect();
        if rest.components().any(|part| !matches!(part, Component::Normal(_))) {
            return Ok(None);
        }
        if ups == 0 {
            return Ok(Some(root.join(&rest)).filter(|folder| folder.is_dir()));
        }
        let mut above = self.above.lock().unwrap_or_else(PoisonError::into_inner);
        let known = above.bases.iter().find(|(known, _)| *known == ups).map(|(_, folder)| folder.join(&rest));
        if let Some(folder) = known.filter(|folder| folder.is_dir()) {
            return Ok(Some(folder));
        }
        if now_ns.saturating_sub(above.since_ns) >= MISSES_NS {
            above.misses.clear();
            above.since_ns = now_ns;
        }
        let own = above.misses.iter().filter(|other| *other == owner).count();
        if own >= MOST_MISSES || above.misses.len() >= MOST_ALL_MISSES {
            return Err(NotSearched);
        }
        let Some(found) = base_of(root, &rest) else {
            above.misses.push(owner.clone());
            return Ok(None);
        };
        above.bases.retain(|(known, _)| *known != ups);
        let folder = found.join(&rest);
        above.bases.push((ups, found));
        Ok(Some(folder))
    }
}

/// Too many walks were in vain.
struct NotSearched;

/// The path of the group that counts memory, from the kernel's list of a process's groups.
fn memory_path(groups: &str) -> Option<(Version, &str)> {
    let lines = || groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let one = lines().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
    let two = || lines().find(|(controllers, _)| controllers.is_empty());
    one.map(|(_, path)| (Version::One, path)).or_else(|| two().map(|(_, path)| (Version::Two, path)))
}

/// The folder from which this path exists, at most [`MOST_DEPTH`] below `root`.
fn base_of(root: &Path, path: &Path) -> Option<PathBuf> {
    let (mut folders, mut at) = (vec![root.to_owned()], 0);
    while let Some(folder) = folders.get(at).cloned() {
        at += 1;
        if folder.join(path).is_dir() {
            return Some(folder);
        }
        let depth = folder.strip_prefix(root).map_or(0, |below| below.components().count());
        if depth >= MOST_DEPTH {
            continue;
        }
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path());
        folders.extend(below.take(MOST_FOLDERS.saturating_sub(folders.len())));
    }
    None
}

impl MemoryGroup {
    /// What is counted up to now; `None` if the group is gone.
    pub fn counts(&self) -> Option<Counts> {
        Some(Counts { kills: self.kills()?, at_limit: self.levels().map(|level| self.at_limit(level)).collect() })
    }

    /// How many of its processes the kernel has killed; `None` if the group is gone.
    pub fn kills(&self) -> Option<u64> {
        let file = if self.version == Version::One { "memory.oom_control" } else { "memory.events" };
        number_after(&self.own.join(file), "oom_kill")
    }

    /// The folders of the group and of those above it, own first.
    fn levels(&self) -> impl Iterator<Item = &Path> {
        self.own.ancestors().take_while(|level| level.starts_with(&self.root)).take(MOST_LEVELS)
    }

    fn at_limit(&self, level: &Path) -> Option<u64> {
        match self.version {
            // If the limit includes swap, only the counter of memory and swap may rise.
            Version::One => {
                let with_swap = number(&level.join("memory.memsw.failcnt")).unwrap_or(0);
                Some(number(&level.join("memory.failcnt"))?.saturating_add(with_swap))
            }
            Version::Two => number_after(&level.join("memory.events.local"), "oom"),
        }
    }

    /// Why processes were killed between two counts: the lowest limit that was reached.
    pub fn reason(&self, before: &Counts, now: &Counts) -> Reason {
        if now.at_limit.iter().all(Option::is_none) {
            return Reason::Unknown;
        }
        // A count that could not be read before is not known to have risen.
        let of = |counts: &Counts, at: usize| counts.at_limit.get(at).copied().flatten();
        let rose = |at: &usize| of(before, *at).zip(of(now, *at)).is_some_and(|(before, now)| now > before);
        let Some(level) = (0..now.at_limit.len()).find(rose).and_then(|at| self.levels().nth(at)) else {
            // Kernels do not always count that a limit of version 1 was reached (6.18 does not).
            let is_old = self.version == Version::One;
            return if is_old && self.levels().any(was_at_limit) { Reason::Unknown } else { Reason::Node };
        };
        let bytes = match self.version {
            Version::One => number(&level.join("memory.limit_in_bytes")).filter(|bytes| *bytes < NO_LIMIT),
            Version::Two => number(&level.join("memory.max")),
        };
        Reason::Limit(Limit { group: self.name(level), bytes })
    }

    /// The group's folder, if it is of version 2.
    pub fn second_version(&self) -> Option<&Path> {
        (self.version == Version::Two).then_some(&*self.own)
    }

    /// The group as the kernel names it.
    pub fn own_name(&self) -> String {
        self.name(&self.own)
    }

    fn name(&self, level: &Path) -> String {
        let below = level.strip_prefix(&self.root).unwrap_or(level);
        Path::new("/").join(below).as_os_str().to_string_lossy().into_owned()
    }

    /// Where it is: two processes of one group have the same.
    pub fn folder(&self) -> &Arc<Path> {
        &self.own
    }
}

/// Whether a group of version 1 has ever used as much memory as its limit allows.
fn was_at_limit(level: &Path) -> bool {
    let reached = |most: &str, limit: &str| {
        number(&level.join(most)).zip(number(&level.join(limit))).is_some_and(|(most, limit)| most >= limit)
    };
    reached("memory.max_usage_in_bytes", "memory.limit_in_bytes")
        || reached("memory.memsw.max_usage_in_bytes", "memory.memsw.limit_in_bytes")
}

/// The number that a file consists of.
fn number(file: &Path) -> Option<u64> {
    String::from_utf8_lossy(&read_at_most(file, MOST_BYTES).ok()?).trim().parse().ok()
}

/// The number behind a name in a file with a name and a number in each line.
fn number_after(file: &Path, name: &str) -> Option<u64> {
    let text = read_at_most(file, MOST_BYTES).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with control groups, and one with a process's list of them.
    struct Rig {
        folder: tempfile::TempDir,
    }

    impl Rig {
        fn new() -> Self {
            Self { folder: tempfile::tempdir().expect("a folder") }
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        }

        fn of(&self, pid: u32) -> Option<MemoryGroup> {
            found(&self.groups(), pid)
        }

        fn groups(&self) -> Groups {
            Groups::new(self.folder.path().join("proc"), Some(self.folder.path().join("cgroup")))
        }
    }

    fn found(groups: &Groups, pid: u32) -> Option<MemoryGroup> {
        match groups.of(pid, &Owner::Daemon, 0) {
            Search::Found(group) => Some(group),
            Search::Nowhere => None,
            Search::Later => panic!("it was not searched"),
        }
    }

    const TWO: &str = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n";

    #[test]
    fn the_group_of_version_two_counts_kills_and_says_which_level_was_full() {
        let rig = Rig::new();
        rig.write("proc/7/cgroup", "0::/kube/pod/ctr\n");
        rig.write("cgroup/kube/pod/ctr/memory.events", TWO);
        rig.write("cgroup/kube/pod/ctr/memory.events.local", "oom 0\noom_kill 3\n");
        rig.write("cgroup/kube/pod/memory.events.local", "oom 2\noom_kill 0\n");
        rig.write("cgroup/kube/pod/memory.max", "2147483648\n");
        let group = rig.of(7).expect("known");
        let before = group.counts().expect("there");
        assert_eq!(before, Counts { kills: 3, at_limit: vec![Some(0), Some(2), None, None] });
        assert_eq!((group.own_name().as_str(), group.reason(&before, &before)), ("/kube/pod/ctr", Reason::Node));
        rig.write("cgroup/kube/pod/memory.events.local", "oom 3\noom_kill 0\n");
        rig.write("cgroup/kube/pod/ctr/memory.events", &TWO.replace("oom_kill 3", "oom_kill 5"));
        let now = group.counts().expect("there");
        let limit = Limit { group: "/kube/pod".to_owned(), bytes: Some(2 << 30) };
        assert_eq!((now.kills, group.reason(&before, &now)), (5, Reason::Limit(limit.clone())));
        rig.write("cgroup/kube/pod/memory.max", "max\n");
        assert_eq!(group.reason(&before, &now), Reason::Limit(Limit { bytes: None, ..limit }));
        let unknown = Counts { kills: 5, at_limit: vec![None; 4] };
        assert_eq!(group.reason(&unknown, &unknown), Reason::Unknown, "before Linux 5.2");
        assert_eq!(group.reason(&unknown, &now), Reason::Node, "a count that can be read now has not risen");
        std::fs::remove_dir_all(rig.folder.path().join("cgroup/kube/pod/ctr")).expect("gone");
        assert_eq!((group.kills(), group.counts(), rig.of(7)), (None, None, None));
    }

    #[test]
    fn the_group_of_version_one_does_too_even_if_version_two_is_mounted_beside_it() {
        let rig = Rig::new();
        rig.write("proc/7/cgroup", "5:cpu,cpuacct:/other\n4:memory:/slurm/job_9\n0::/\n");
        rig.write("cgroup/unified/cgroup.procs", "");
        let own = "cgroup/memory/slurm/job_9";
        rig.write(&format!("{own}/memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
        rig.write(&format!("{own}/memory.failcnt"), "40\n");
        rig.write(&format!("{own}/memory.limit_in_bytes"), "1073741824\n");
        let group = rig.of(7).expect("known");
        let before = group.counts().expect("there");
        assert_eq!((before.kills, before.at_limit[0]), (1, Some(40)));
        rig.write(&format!("{own}/memory.failcnt"), "41\n");
        let now = group.counts().expect("there");
        let limit = Limit { group: "/slurm/job_9".to_owned(), bytes: Some(1 << 30) };
        assert_eq!(group.reason(&before, &now), Reason::Limit(limit.clone()));
        rig.write(&format!("{own}/memory.limit_in_bytes"), "9223372036854771712\n");
        assert_eq!(group.reason(&before, &now), Reason::Limit(Limit { bytes: None, ..limit }));
        rig.write(&format!("{own}/memory.memsw.failcnt"), "1\n");
        let with_swap = group.counts().expect("there");
        assert!(matches!(group.reason(&now, &with_swap), Reason::Limit(_)));
        // A kernel that does not count.
        assert_eq!(group.reason(&with_swap, &with_swap), Reason::Node);
        rig.write(&format!("{own}/memory.limit_in_bytes"), "1073741824\n");
        rig.write(&format!("{own}/memory.max_usage_in_bytes"), "1073741823\n");
        assert_eq!(group.reason(&with_swap, &with_swap), Reason::Node, "it never used as much");
        rig.write(&format!("{own}/memory.max_usage_in_bytes"), "1073741824\n");
        assert_eq!(group.reason(&with_swap, &with_swap), Reason::Unknown);
        rig.write("proc/8/cgroup", "4:memory:/\n");
        assert_eq!(rig.of(8), None, "everybody's");
        rig.write("proc/8/cgroup", &format!("4:memory:/{}\n", "a/".repeat(MOST_PATH_BYTES / 2)));
        rig.write(&format!("cgroup/memory/{}x", "a/".repeat(MOST_PATH_BYTES / 2)), "");
        assert_eq!(rig.of(8), None, "too long");
    }

    #[test]
    fn from_a_container_the_groups_of_others_are_found_by_the_end_of_their_path() {
        let rig = Rig::new();
        rig.write("proc/7/cgroup", "0::/../../podB.slice/b.scope\n");
        rig.write("proc/8/cgroup", "0::/../../podC.slice/c.scope\n");
        rig.write("proc/9/cgroup", "0::/../../../system.slice/../secret\n");
        for of in ["podB.slice/b.scope", "podC.slice/c.scope"] {
            rig.write(&format!("cgroup/kubepods.slice/{of}/memory.events"), TWO);
        }
        rig.write("cgroup/system.slice/memory.events", TWO);
        let groups = rig.groups();
        assert_eq!(found(&groups, 7).expect("found").own_name(), "/kubepods.slice/podB.slice/b.scope");
        assert_eq!(found(&groups, 8).expect("found").own_name(), "/kubepods.slice/podC.slice/c.scope");
        assert_eq!(found(&groups, 9), None, "never outside of the folder");
        assert_eq!(found(&groups, 10), None, "it has ended");
        assert_eq!(found(&Groups::new(rig.folder.path().join("proc"), None), 7), None, "off");
    }

    #[test]
    fn walks_in_vain_end_the_search_of_their_owner_for_a_minute() {
        let rig = Rig::new();
        rig.write("proc/7/cgroup", "0::/../../podB.slice/b.scope\n");
        rig.write("proc/8/cgroup", "0::/../../../podC.slice/c.scope\n");
        rig.write("cgroup/kubepods.slice/podC.slice/c.scope/memory.events", TWO);
        let (groups, minute) = (rig.groups(), 60 * SECOND_NS);
        let (one, other) = (Owner::Address([10, 0, 0, 1].into()), Owner::Daemon);
        for _ in 0..MOST_MISSES {
            assert_eq!(groups.of(7, &one, minute), Search::Nowhere);
        }
        rig.write("cgroup/kubepods.slice/podB.slice/b.scope/memory.events", TWO);
        assert_eq!(groups.of(7, &one, 2 * minute - 1), Search::Later);
        assert!(matches!(groups.of(8, &other, minute), Search::Found(_)), "another's misses cost it nothing");
        let Search::Found(group) = groups.of(7, &one, 2 * minute) else { panic!("it was not searched again") };
        assert_eq!(group.own_name(), "/kubepods.slice/podB.slice/b.scope");
    }
}
