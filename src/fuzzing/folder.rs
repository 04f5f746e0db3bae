//! A temporary folder for inputs that are read from files: created once per thread, and removed with it.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A folder of this thread.
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Creates it in the system's temporary folder.
    pub(super) fn make(what: &str) -> io::Result<Self> {
        let thread = format!("{:?}", std::thread::current().id());
        let digits: String = thread.chars().filter(char::is_ascii_digit).collect();
        let path = std::env::temp_dir().join(format!("highwater-fuzz-{what}-{}-{digits}", std::process::id()));
        // Exclusively, so that a folder prepared by another user is refused.
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// The path of a file in it.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A failure leaves a few kilobytes in the temporary folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}
