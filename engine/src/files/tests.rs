//! What another user of the node can prepare. None of it is followed or written to.

use super::*;
use rustix::net::SocketType;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

const SECRET: &[u8] = b"bytes of somebody else";

struct Rig {
    _root: tempfile::TempDir,
    victim: PathBuf,
    folder: PathBuf,
}

impl Rig {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let (victim, folder) = (root.path().join("victim"), root.path().join("ours"));
        std::fs::write(&victim, SECRET).expect("written");
        std::fs::create_dir(&folder).expect("made");
        allow(&folder, 0o755);
        Self { _root: root, victim, folder }
    }

    fn open(&self) -> Folder {
        Folder::open(&self.folder).expect("a folder of our own")
    }

    fn check_victim(&self) {
        assert_eq!(std::fs::read(&self.victim).expect("still there"), SECRET);
    }
}

fn allow(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("ours");
}

/// Gives a path to user 65534. If this process may not, prints a notice and returns `false`.
fn give_away(path: &Path) -> bool {
    let user = Some(rustix::process::Uid::from_raw(65534));
    let is_done = rustix::fs::chownat(rustix::fs::CWD, path, user, None, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).is_ok();
    if !is_done {
        let notice = "\n*** SKIPPED what belongs to another user: only root can give files away\n";
        // The harness captures `eprintln!` of a test that passes. If there is no stderr, the notice is lost.
        let _ = std::io::stderr().write_all(notice.as_bytes());
    }
    is_done
}

fn problem<T: std::fmt::Debug>(done: io::Result<T>, culprit: &Path) -> String {
    let message = done.expect_err("it is refused").to_string();
    assert!(message.contains(&culprit.display().to_string()), "{message} does not name {}", culprit.display());
    message
}

#[test]
fn links_and_everything_else_that_is_no_file_of_ours_is_refused_by_name_and_left_alone() {
    let rig = Rig::new();
    let folder = rig.open();
    for (name, make) in [("link", 0), ("dangling", 1), ("socket", 2), ("directory", 3)] {
        let path = rig.folder.join(name);
        match make {
            0 => symlink(&rig.victim, &path).expect("made"),
            1 => symlink(rig.folder.join("nothing"), &path).expect("made"),
            2 => drop(UnixDatagram::bind(&path).expect("bound")),
            _ => std::fs::create_dir(&path).expect("made"),
        }
        for message in [
            problem(folder.lock(name, "taken"), &path),
            problem(folder.create(name), &path),
            problem(folder.create_anew(name), &path),
            problem(folder.read(name), &path),
            problem(folder.size(name), &path),
            problem(folder.check_sole(name), &path),
        ] {
            assert!(!message.is_empty());
        }
    }
    rig.check_victim();
    assert!(!rig.folder.join("nothing").exists(), "nothing is made behind a link");
    folder.remove("link").expect("the name goes");
    rig.check_victim();
}

#[test]
fn a_file_with_a_second_name_is_replaced_and_never_written_to() {
    let rig = Rig::new();
    let folder = rig.open();
    std::fs::hard_link(&rig.victim, rig.folder.join("file")).expect("the same disk");
    problem(folder.check_sole("file"), &rig.folder.join("file"));
    folder.create_anew("file").and_then(|mut file| file.write_all(b"ours")).expect("made anew");
    rig.check_victim();
    assert_eq!(std::fs::read(rig.folder.join("file")).expect("there"), b"ours");
}

#[test]
fn a_folder_that_others_can_write_to_is_refused_and_one_that_is_a_link() {
    let rig = Rig::new();
    for mode in [0o777, 0o1777, 0o775, 0o757] {
        allow(&rig.folder, mode);
        let message = problem(Folder::open(&rig.folder), &rig.folder);
        assert!(message.contains("others may write to it"), "{message}");
    }
    allow(&rig.folder, 0o755);
    let link = rig.folder.with_file_name("link");
    symlink(&rig.folder, &link).expect("made");
    assert!(problem(Folder::open(&link), &link).contains("symbolic link"));
    // A link on the way is followed if no other user can have made it.
    let below = Folder::open(&link.join("a/b")).expect("made");
    assert_eq!(below.path_of("x").expect("there"), rig.folder.canonicalize().expect("there").join("a/b/x"));
}

#[test]
fn what_another_user_prepared_is_refused() {
    let rig = Rig::new();
    let theirs = rig.folder.join("theirs");
    std::fs::create_dir(&theirs).expect("made");
    let link = rig.folder.join("link");
    symlink(rig.folder.parent().expect("above"), &link).expect("made");
    if !give_away(&theirs) || !give_away(&link) {
        return;
    }
    assert!(problem(Folder::open(&theirs), &theirs).contains("belongs to user 65534"));
    Folder::open(&link.join("made")).expect("nobody else can have put the link there");
    allow(&rig.folder, 0o1777);
    for prepared in [&theirs, &link] {
        let message = problem(Folder::open(&prepared.join("captures")), prepared);
        assert!(message.contains("could prepare it"), "{message}");
        assert!(
            problem(Bound::socket(&prepared.join("socket"), SocketType::DGRAM, 0o666), prepared)
                .contains("could prepare it")
        );
    }
    allow(&rig.folder, 0o755);
    std::fs::write(rig.folder.join("file"), SECRET).expect("written");
    assert!(give_away(&rig.folder.join("file")));
    let message = problem(rig.open().lock("file", "taken"), &rig.folder.join("file"));
    assert!(message.contains("belongs to user 65534"), "{message}");
}

#[test]
fn a_folder_that_is_moved_while_it_is_open_stays_the_same_one() {
    let rig = Rig::new();
    let folder = rig.open();
    let away = rig.folder.with_file_name("away");
    std::fs::rename(&rig.folder, &away).expect("renamed");
    std::fs::create_dir(&rig.folder).expect("another one");
    symlink(&rig.victim, rig.folder.join("file")).expect("made");
    folder.create("file").and_then(|mut file| file.write_all(b"ours")).expect("made");
    rig.check_victim();
    assert_eq!(std::fs::read(away.join("file")).expect("there"), b"ours");
    assert!(problem(folder.path_of("file"), &rig.folder).contains("was moved or replaced"));
}

#[test]
fn a_lock_is_one_process_s_and_truncates_nothing() {
    let rig = Rig::new();
    std::fs::write(rig.folder.join("lock"), SECRET).expect("written");
    let held = rig.open().lock("lock", "another has it").expect("free");
    assert!(problem(rig.open().lock("lock", "another has it"), &rig.folder.join("lock")).contains("another has it"));
    drop(held);
    rig.open().lock("lock", "another has it").expect("free again");
    assert_eq!(std::fs::read(rig.folder.join("lock")).expect("there"), SECRET);
}

#[test]
fn a_socket_takes_the_place_of_a_dead_one_and_of_nothing_else() {
    let rig = Rig::new();
    let path = rig.folder.join("made/socket");
    let (socket, bound) = Bound::socket(&path, SocketType::DGRAM, 0o666).expect("bound");
    let mode = std::fs::symlink_metadata(&path).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o666);
    assert!(problem(Bound::socket(&path, SocketType::DGRAM, 0o666), &path).contains("another daemon listens"));
    drop(socket);
    let (_socket, second) = Bound::socket(&path, SocketType::DGRAM, 0o666).expect("nobody listens on the first");
    drop(bound);
    assert!(path.exists(), "the first one leaves the second one's name alone");
    drop(second);
    assert!(!path.exists());
    symlink(&rig.victim, &path).expect("made");
    allow(&rig.victim, 0o600);
    assert!(problem(Bound::socket(&path, SocketType::DGRAM, 0o666), &path).contains("is not a socket"));
    rig.check_victim();
    assert_eq!(std::fs::metadata(&rig.victim).expect("there").permissions().mode() & 0o777, 0o600);
}

#[test]
fn reading_what_somebody_names_is_bounded() {
    let message = read_text(Path::new("/dev/zero"), 1 << 20).expect_err("it never ends");
    assert_eq!(
        (message.kind(), message.to_string()),
        (io::ErrorKind::FileTooLarge, "it is longer than 1048576 bytes".into())
    );
    let rig = Rig::new();
    assert_eq!(read_text(&rig.victim, SECRET.len() as u64).expect("short enough").as_bytes(), SECRET);
    assert!(read_text(&rig.victim, SECRET.len() as u64 - 1).is_err());
    std::fs::write(&rig.victim, [b'a', 0xff, b'b']).expect("written");
    assert_eq!(read_text(&rig.victim, 2).expect_err("longer").kind(), io::ErrorKind::FileTooLarge);
    assert_ne!(unguessable().expect("random"), unguessable().expect("random"));
}
