//! The state behind every call: the control file as last read, and the time since initialization.
//!
//! A call checks the file at most every two milliseconds, by a coarse clock, so that the memory call stays far below a
//! microsecond.

use crate::control::{Behaviour, Control};
use crate::functions::{self, COUNT, Function};
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// NVML's "unknown error", returned for a faulty control file.
pub const UNKNOWN: u32 = 999;
/// NVML's "not initialized".
const UNINITIALIZED: u32 = 1;
const CHECK_NS: i64 = 2_000_000;

/// The result of reading the control file once.
#[derive(Debug)]
pub struct State {
    pub control: Control,
    pub system: Rules,
    pub gpus: Vec<GpuRules>,
    stamp: Stamp,
}

/// The rules of one GPU and of its MIG instances.
#[derive(Debug)]
pub struct GpuRules {
    pub own: Rules,
    pub mig: Vec<Rules>,
}

/// Behaviour by function, so that no call looks up a name.
#[derive(Debug)]
pub struct Rules {
    pub errors: [u32; COUNT],
    delay: [Duration; COUNT],
    hang: [bool; COUNT],
}

type Stamp = (u64, i64, i64, u64);

static STATE: RwLock<Option<Arc<State>>> = RwLock::new(None);
static NEXT_CHECK_NS: AtomicI64 = AtomicI64::new(0);
static INITIALIZED_AT_NS: AtomicI64 = AtomicI64::new(0);
static USERS: AtomicU32 = AtomicU32::new(0);
static ANCHOR: u8 = 0;

/// The state for one call, once NVML is initialized.
pub fn enter(function: Function) -> Result<Arc<State>, u32> {
    functions::count(function);
    if USERS.load(Ordering::Relaxed) == 0 { Err(UNINITIALIZED) } else { current().ok_or(UNKNOWN) }
}

/// The state for a call that needs no initialization.
pub fn enter_uninitialized(function: Function) -> Result<Arc<State>, u32> {
    functions::count(function);
    current().ok_or(UNKNOWN)
}

/// Counts a user; the first starts the time of the curves. True for the first.
pub fn initialized() -> bool {
    let first = USERS.fetch_add(1, Ordering::Relaxed) == 0;
    if first {
        INITIALIZED_AT_NS.store(clock_ns(libc::CLOCK_MONOTONIC), Ordering::Relaxed);
    }
    first
}

/// Removes a user; false if there is none.
pub fn shut_down() -> bool {
    USERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |users| users.checked_sub(1)).is_ok()
}

/// Milliseconds since initialization.
pub fn elapsed_ms() -> f64 {
    (clock_ns(libc::CLOCK_MONOTONIC) - INITIALIZED_AT_NS.load(Ordering::Relaxed)) as f64 * 1e-6
}

/// Reads the control file now; returns a code.
pub fn reload() -> u32 {
    match load() {
        Ok(state) => {
            *STATE.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(state));
            0
        }
        Err(fault) => {
            eprintln!("nvml-fake: {fault}");
            UNKNOWN
        }
    }
}

/// The current state. If the file becomes faulty, the last valid one stays in force.
pub fn current() -> Option<Arc<State>> {
    let now = clock_ns(libc::CLOCK_MONOTONIC_COARSE);
    let due = NEXT_CHECK_NS.load(Ordering::Relaxed);
    if now >= due
        && NEXT_CHECK_NS.compare_exchange(due, now + CHECK_NS, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        && has_changed()
    {
        reload();
    }
    STATE.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Applies the rules for a function before it answers: its delay, its hanging, its error.
pub fn obey(
    function: Function,
    rules: impl Fn(&State) -> Option<&Rules>,
    mut state: Arc<State>,
) -> Result<Arc<State>, u32> {
    let at = function as usize;
    spin(rules(&state).map_or(Duration::ZERO, |rules| rules.delay[at]));
    while rules(&state).is_some_and(|rules| rules.hang[at]) {
        // Rarely enough that the hanging calls of many GPUs leave the processor to the others.
        std::thread::sleep(Duration::from_millis(20));
        state = current().ok_or(UNKNOWN)?;
    }
    match rules(&state).map_or(0, |rules| rules.errors[at]) {
        0 => Ok(state),
        code => Err(code),
    }
}

/// Keeps the processor busy, like a working driver.
pub fn spin(delay: Duration) {
    if delay.is_zero() {
        return;
    }
    let begin = Instant::now();
    while begin.elapsed() < delay {
        std::hint::spin_loop();
    }
}

fn has_changed() -> bool {
    let state = STATE.read().unwrap_or_else(PoisonError::into_inner);
    state.as_ref().is_none_or(|state| path().and_then(|path| stamp(&path)).is_some_and(|stamp| stamp != state.stamp))
}

fn load() -> Result<State, String> {
    let path = path().ok_or("no control file: this library's own path is not known")?;
    let fault = |fault: &dyn std::fmt::Display| format!("{}: {fault}", path.display());
    let stamp = stamp(&path).ok_or_else(|| fault(&"missing control file"))?;
    let text = std::fs::read(&path).map_err(|error| fault(&error))?;
    let control: Control = serde_json::from_slice(&text).map_err(|error| fault(&error))?;
    let system = Rules::of(&control.behaviour).map_err(|error| fault(&error))?;
    let gpus = control.gpus.iter().map(gpu_rules).collect::<Result<_, _>>().map_err(|error| fault(&error))?;
    Ok(State { control, system, gpus, stamp })
}

fn gpu_rules(gpu: &crate::control::Gpu) -> Result<GpuRules, String> {
    let mig = gpu.mig.iter().map(|mig| Rules::of(&mig.as_ref().map(|mig| mig.behaviour.clone()).unwrap_or_default()));
    Ok(GpuRules { own: Rules::of(&gpu.behaviour)?, mig: mig.collect::<Result<_, _>>()? })
}

impl Rules {
    fn of(behaviour: &Behaviour) -> Result<Self, String> {
        let at = |name: &String| functions::position(name).ok_or_else(|| format!("no function {name}"));
        let mut rules = Self { errors: [0; COUNT], delay: [Duration::ZERO; COUNT], hang: [false; COUNT] };
        for (name, code) in &behaviour.errors {
            rules.errors[at(name)?] = *code;
        }
        for (name, microseconds) in &behaviour.delay_us {
            rules.delay[at(name)?] = Duration::try_from_secs_f64(microseconds * 1e-6).map_err(|e| e.to_string())?;
        }
        for name in &behaviour.hang {
            rules.hang[at(name)?] = true;
        }
        Ok(rules)
    }
}

fn path() -> Option<PathBuf> {
    match std::env::var_os("HIGHWATER_FAKE_NVML") {
        Some(path) => Some(path.into()),
        None => own_path(),
    }
}

/// This library's path with `.json` appended.
fn own_path() -> Option<PathBuf> {
    // SAFETY: every member is a pointer, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is inside this library, and `info` outlives the call.
    let found = unsafe { libc::dladdr((&raw const ANCHOR).cast(), &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own C string, which lives as long as this library is loaded.
    let own = unsafe { CStr::from_ptr(info.dli_fname) };
    let mut path = Path::new(OsStr::from_bytes(own.to_bytes())).as_os_str().to_owned();
    path.push(".json");
    Some(path.into())
}

fn stamp(path: &Path) -> Option<Stamp> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
}

pub fn clock_ns(clock: libc::clockid_t) -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every Linux, and `now` outlives the call.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}
