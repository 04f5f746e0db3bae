//! Images, built from the repository's Dockerfile or another by a real builder, with its storage under target/tools.

use crate::tools;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

/// One test at a time uses the storage: an image that one removes may take layers with it that another is building on ("layer not
/// known").
static STORAGE: Mutex<()> = Mutex::new(());

/// Buildah with its storage under target/tools.
pub struct Buildah {
    program: PathBuf,
    pub base: String,
    _storage: MutexGuard<'static, ()>,
}

/// An image, removed when dropped: each is a copy of its base, 200 MB under target/tools.
pub struct Image<'a> {
    buildah: &'a Buildah,
    tag: &'a str,
}

/// A container of an image, removed when dropped.
pub struct Container<'a> {
    buildah: &'a Buildah,
    pub id: String,
}

impl Buildah {
    /// `None`, or a panic, as in [`tools::missing`], if buildah cannot work here.
    pub fn find() -> Option<Self> {
        let buildah = Self {
            program: tools::find("buildah")?,
            base: format!("localhost/highwater-test-base:{}", tools::pinned("BASE_SUITE")),
            _storage: STORAGE.lock().unwrap_or_else(PoisonError::into_inner),
        };
        if !rustix::process::geteuid().is_root() {
            tools::missing("buildah's chroot isolation needs root here");
            return None;
        }
        let found = buildah.command(&["inspect", "--type", "image", &buildah.base]).output().expect("buildah starts");
        if !found.status.success() {
            tools::missing(&format!("the base image {} is not made", buildah.base));
            return None;
        }
        Some(buildah)
    }

    /// Builds a target of the Dockerfile, with only what `.dockerignore` lets through, and tags it.
    pub fn build<'a>(&'a self, target: &str, arguments: &[&str], tag: &'a str) -> Image<'a> {
        let context = TempDir::new().expect("a temporary directory");
        for file in ["Dockerfile", ".dockerignore"] {
            std::fs::copy(tools::root().join(file), context.path().join(file)).expect("copied");
        }
        let binary = context.path().join("target/release/highwater");
        std::fs::create_dir_all(binary.parent().expect("a folder")).expect("made");
        std::fs::copy(env!("CARGO_BIN_EXE_highwater"), &binary).expect("copied");
        let runtime = format!("RUNTIME={}", self.base);
        self.build_in(context.path(), &[&["--target", target, "--build-arg", &runtime], arguments].concat(), tag)
    }

    /// Builds from a folder's Dockerfile, and tags the image.
    pub fn build_in<'a>(&'a self, context: &Path, arguments: &[&str], tag: &'a str) -> Image<'a> {
        // Buildah stores cache mounts here.
        let scratch = TempDir::new().expect("a temporary directory");
        let mut command = self.command(&["build", "--isolation", "chroot", "--network", "host", "--pull-never"]);
        command.env("TMPDIR", scratch.path());
        command.args(["--tag", tag]).args(arguments).arg(context);
        self.checked(command);
        Image { buildah: self, tag }
    }

    /// A command of the builder.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let storage = tools::root().join("target/tools/containers");
        let path = |part: &str| -> PathBuf { Path::new(&storage).join(part) };
        let mut command = Command::new(&self.program);
        command.args(["--storage-driver", "vfs", "--root"]).arg(path("root")).arg("--runroot").arg(path("run"));
        command.env("BUILDAH_ISOLATION", "chroot").args(arguments);
        command
    }

    /// What a command prints; panics if it fails.
    pub fn output(&self, arguments: &[&str]) -> String {
        self.checked(self.command(arguments))
    }

    /// The JSON that a command prints.
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.output(arguments)).expect("buildah answers JSON")
    }

    fn checked(&self, mut command: Command) -> String {
        let output = command.output().expect("buildah starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {said}{}", hint(&said));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl<'a> Image<'a> {
    /// Writes it as a file that container runtimes import.
    pub fn save(&self, file: &Path) {
        self.buildah.output(&["push", "--quiet", self.tag, &format!("docker-archive:{}:{}", file.display(), self.tag)]);
    }

    /// A container of it, which does not run yet.
    pub fn container(&self) -> Container<'a> {
        let id = self.buildah.output(&["from", "--pull-never", self.tag]).trim().to_owned();
        Container { buildah: self.buildah, id }
    }
}

// Failures are ignored. What is left behind takes space until the next installation of the tools prunes it; a panic
// would hide the failure of the test.
impl Drop for Image<'_> {
    fn drop(&mut self) {
        let _ = self.buildah.command(&["rmi", self.tag]).output();
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        let _ = self.buildah.command(&["rm", &self.id]).output();
    }
}

fn hint(said: &str) -> &'static str {
    if said.contains("GLIBC_") {
        "\nthe program was built for a newer glibc than the base image's: see BASE_SUITE in tests/tools.env"
    } else {
        ""
    }
}
