//! A disk that keeps those waiting who write to it, as one that is failing or shared by too many does.
//!
//! For `LD_PRELOAD`. Enters: the folder that lies on that disk, in the environment variable `SLOW_DISK`. Leaves:
//! `write`, `pwrite`, `fsync` and `fdatasync` of the C library, which do not return for files below that folder while it
//! contains a file `blocked`. All other files, and all other functions, are as without it.

use libc::{c_int, c_long, c_void, off_t, size_t, ssize_t};
use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// How often to look whether it goes on.
const LOOK_US: u32 = 1_000;

fn folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let read = || {
        // SAFETY: the name ends with a zero, and nothing here changes the environment.
        let value = unsafe { libc::getenv(c"SLOW_DISK".as_ptr()) };
        // SAFETY: `getenv` returns null or a C string.
        let value = (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })?;
        Some(PathBuf::from(OsStr::from_bytes(value.to_bytes())))
    };
    FOLDER.get_or_init(read).as_deref()
}

/// The path of an open file.
fn path_of(file: c_int) -> Option<PathBuf> {
    let link = format!("/proc/self/fd/{file}\0");
    let mut path = vec![0_u8; 4096];
    // SAFETY: the link ends with a zero, and no more is written than the buffer has.
    let length = unsafe { libc::readlink(link.as_ptr().cast(), path.as_mut_ptr().cast(), path.len()) };
    path.truncate(usize::try_from(length).ok()?);
    Some(PathBuf::from(OsString::from(OsStr::from_bytes(&path))))
}

/// Waits while the disk of this file is blocked.
fn wait(file: c_int) {
    let Some(folder) = folder() else { return };
    if path_of(file).is_some_and(|path| path.starts_with(folder)) {
        let blocked = folder.join("blocked");
        while blocked.exists() {
            // SAFETY: it only waits.
            unsafe { libc::usleep(LOOK_US) };
        }
    }
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(file: c_int, bytes: *const c_void, count: size_t) -> ssize_t {
    wait(file);
    // SAFETY: guaranteed by the caller.
    returned(unsafe { libc::syscall(libc::SYS_write, file, bytes, count) })
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(file: c_int, bytes: *const c_void, count: size_t, at: off_t) -> ssize_t {
    wait(file);
    // SAFETY: guaranteed by the caller.
    returned(unsafe { libc::syscall(libc::SYS_pwrite64, file, bytes, count, at) })
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite(file: c_int, bytes: *const c_void, count: size_t, at: off_t) -> ssize_t {
    // SAFETY: guaranteed by the caller.
    unsafe { pwrite64(file, bytes, count, at) }
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fsync(file: c_int) -> c_int {
    wait(file);
    // SAFETY: it takes a number.
    status(unsafe { libc::syscall(libc::SYS_fsync, file) })
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdatasync(file: c_int) -> c_int {
    wait(file);
    // SAFETY: it takes a number.
    status(unsafe { libc::syscall(libc::SYS_fdatasync, file) })
}

/// `syscall` has set `errno`, and returned -1, where it failed.
fn returned(value: c_long) -> ssize_t {
    ssize_t::try_from(value).unwrap_or(-1)
}

fn status(value: c_long) -> c_int {
    c_int::try_from(value).unwrap_or(-1)
}
