//! A stand-in for `libnvidia-ml.so.1`: NVML's C ABI over GPUs that a JSON file describes.
//!
//! Enters: the control file (see `control`), whose path is in the environment variable `HIGHWATER_FAKE_NVML`, or else
//! is this library's own path with `.json` appended. The file is read again when it changes: replace it by renaming a
//! new one over it. A copy of the library at another path is another library to the loader, with its own control file
//! and its own state, so tests of one process need not wait for each other.
//!
//! Leaves: the answers that NVML would return. There are two functions beside NVML's: [`nvml_fake_calls`] counts calls,
//! [`nvml_fake_reload`] reads the control file at once.
//!
//! Absent on purpose: missing symbols (one library has one table of them; answer with `FUNCTION_NOT_FOUND` instead),
//! and all functions that change settings.
//!
//! A memory call costs well under a microsecond; `delay_us` spins to imitate a driver's own cost.

mod control;
mod devices;
mod events;
mod extras;
mod functions;
mod gpm;
mod handle;
mod mig;
mod processes;
mod readings;
mod state;
mod system;

use std::ffi::{CStr, c_char};

/// How often NVML's function `name` was called, or how often a field was read: `field:186`. `u64::MAX` for an unknown
/// name.
///
/// # Safety `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvml_fake_calls(name: *const c_char) -> u64 {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    functions::calls(&name).unwrap_or(u64::MAX)
}

/// Reads the control file now. Returns 0 on success, 999 if the file is missing or invalid.
#[unsafe(no_mangle)]
pub extern "C" fn nvml_fake_reload() -> u32 {
    state::reload()
}
