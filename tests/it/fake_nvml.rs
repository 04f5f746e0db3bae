//! The fake NVML for tests: built once, and copied for each test.
//!
//! The loader treats a copy at another path as another library, with its own GPUs, counts and clock. Each copy reads
//! the control file beside itself. So tests can run at the same time in one process, and share no environment variable.
//! [`Control::library`] is the path for `--nvml-library` or `nvml::open`.

use crate::libraries;
use serde_json::Value;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The built `libnvml_fake.so`, from this profile's folder.
pub fn library() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| libraries::build("nvml-fake")).clone()
}

/// One copy of the fake with its control file.
pub struct Control {
    library: PathBuf,
    loaded: OnceLock<Loaded>,
}

type Calls = unsafe extern "C" fn(*const libc::c_char) -> u64;
type Reload = unsafe extern "C" fn() -> u32;

/// The copy as this process has loaded it. It stays loaded, so that its counts outlive the source that used it.
struct Loaded {
    calls: Calls,
    reload: Reload,
}

impl Control {
    /// A copy of the fake in `folder`, with no GPU yet.
    pub fn new(folder: &Path) -> Self {
        let copy = folder.join("libnvml_fake.so");
        std::fs::copy(library(), &copy).expect("the fake is copied");
        let control = Self { library: copy, loaded: OnceLock::new() };
        control.set(&serde_json::json!({}));
        control
    }

    /// The copy's path.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The control file's path, for a `HIGHWATER_FAKE_NVML` that names it explicitly.
    pub fn file(&self) -> PathBuf {
        let mut path = self.library.clone().into_os_string();
        path.push(".json");
        path.into()
    }

    /// Replaces the control file. This process sees the change at once, any other within milliseconds.
    pub fn set(&self, control: &Value) {
        assert!(self.accepts(control), "the fake refuses {control}");
    }

    /// Replaces the control file; returns whether the fake can read it.
    pub fn accepts(&self, control: &Value) -> bool {
        self.put(control);
        // SAFETY: the fake's own function, of this type.
        unsafe { (self.loaded().reload)() == 0 }
    }

    /// Replaces the control file, and leaves it to the fake to notice.
    pub fn put(&self, control: &Value) {
        let next = self.file().with_extension("next");
        std::fs::write(&next, control.to_string()).expect("the control file is written");
        std::fs::rename(next, self.file()).expect("the control file is put in place");
    }

    /// How often this process called NVML's function `name` in this copy, or requested `field:N`.
    pub fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).expect("a name without NUL");
        // SAFETY: the fake's own function, of this type, with a C string.
        let calls = unsafe { (self.loaded().calls)(name.as_ptr()) };
        assert_ne!(calls, u64::MAX, "the fake has no function {name:?}");
        calls
    }

    fn loaded(&self) -> &Loaded {
        self.loaded.get_or_init(|| load(&self.library))
    }
}

fn load(library: &Path) -> Loaded {
    let path = CString::new(library.as_os_str().as_encoded_bytes()).expect("a path without NUL");
    // SAFETY: a C string; loading the fake runs no code of its own.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "{} cannot be loaded", library.display());
    let symbol = |name: &CStr| {
        // SAFETY: an open library and a C string.
        let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
        assert!(!found.is_null(), "the fake has no {name:?}");
        found
    };
    let (calls, reload) = (symbol(c"nvml_fake_calls"), symbol(c"nvml_fake_reload"));
    // SAFETY: the fake's two functions of its own have these types, and it is never unloaded.
    unsafe {
        Loaded {
            calls: std::mem::transmute::<*mut libc::c_void, Calls>(calls),
            reload: std::mem::transmute::<*mut libc::c_void, Reload>(reload),
        }
    }
}
