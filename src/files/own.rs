//! A folder that exists as long as the process runs. No other user can have prepared it or can look into it.

use super::about;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// The folder. It is removed with its contents when this is dropped.
#[derive(Debug)]
pub struct OwnFolder {
    path: PathBuf,
}

impl OwnFolder {
    /// Creates a folder named `PREFIX-` and an unpredictable suffix, below `$XDG_RUNTIME_DIR` if that belongs to this
    /// user, else in the folder for temporary files.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn make(prefix: &str) -> io::Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| is_ours(path));
        Self::make_in(&runtime.unwrap_or_else(std::env::temp_dir), prefix)
    }

    fn make_in(above: &Path, prefix: &str) -> io::Result<Self> {
        let path = above.join(format!("{prefix}-{}", super::unguessable()?));
        // This fails if the name is taken, even by a link.
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|error| about(&path, error))?;
        Ok(Self { path })
    }

    /// The folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether a folder belongs to this process's user, and no other user can write to it.
fn is_ours(path: &Path) -> bool {
    let is_ours = |found: std::fs::Metadata| {
        found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0
    };
    path.is_absolute() && std::fs::symlink_metadata(path).is_ok_and(is_ours)
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // `remove_dir_all` follows no link.
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the process's temporary folder cannot be removed");
        }
    }
}
