//! Device handles: not pointers, but the index of a GPU or MIG instance and its generation.

use crate::control::{Gpu, Mig};
use crate::functions::Function;
use crate::state::{self, Rules, State};
use nvml_wrapper_sys::bindings::nvmlDevice_t;
use std::sync::Arc;

/// NVML's codes that this library itself returns.
pub const INVALID_ARGUMENT: u32 = 2;
pub const NOT_SUPPORTED: u32 = 3;
pub const NOT_FOUND: u32 = 6;
pub const INSUFFICIENT_SIZE: u32 = 7;
pub const GPU_IS_LOST: u32 = 15;
pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;

const MARK: usize = 0x4_0000_0000_0000;

/// The answer of a function: success, or a code.
pub type Answer = Result<(), u32>;

/// The GPU or MIG instance of a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub gpu: usize,
    pub mig: Option<usize>,
    generation: usize,
}

impl Place {
    /// A place with the current generation.
    pub fn of(state: &State, gpu: usize, mig: Option<usize>) -> Self {
        let generation = state.control.gpus.get(gpu).map_or(0, |gpu| gpu.generation as usize);
        Self { gpu, mig, generation }
    }

    pub fn to_handle(self) -> nvmlDevice_t {
        let mig = self.mig.map_or(0, |mig| mig + 1);
        std::ptr::without_provenance_mut(MARK | self.generation << 32 | self.gpu << 16 | mig << 4)
    }

    fn from_handle(handle: nvmlDevice_t) -> Option<Self> {
        let bits = handle.addr();
        (bits & MARK != 0).then(|| Self {
            gpu: bits >> 16 & 0xffff,
            mig: (bits >> 4 & 0xfff).checked_sub(1),
            generation: bits >> 32 & 0xffff,
        })
    }

    fn rules(self, state: &State) -> Option<&Rules> {
        let gpu = state.gpus.get(self.gpu)?;
        match self.mig {
            Some(mig) => gpu.mig.get(mig),
            None => Some(&gpu.own),
        }
    }
}

/// The device on which a function is called.
pub struct Target<'a> {
    pub state: &'a State,
    pub place: Place,
    pub gpu: &'a Gpu,
    pub mig: Option<&'a Mig>,
}

impl Target<'_> {
    /// The GPU, for readings that a MIG instance does not have.
    pub fn whole(&self) -> Result<&Gpu, u32> {
        if self.mig.is_some() { Err(NOT_SUPPORTED) } else { Ok(self.gpu) }
    }
}

/// Runs a function on a device: counted, delayed, failing or hanging as the control file says.
pub fn on_device(function: Function, device: nvmlDevice_t, answer: impl FnOnce(&Target<'_>) -> Answer) -> u32 {
    code(state::enter(function).and_then(|state| {
        let place = Place::from_handle(device).ok_or(INVALID_ARGUMENT)?;
        let state = state::obey(function, |state| place.rules(state), state)?;
        with_target(&state, place, answer)
    }))
}

/// Runs a function that belongs to no device.
pub fn on_system(function: Function, answer: impl FnOnce(&State) -> Answer) -> u32 {
    code(state::enter(function).and_then(|state| {
        let state: Arc<State> = state::obey(function, |state| Some(&state.system), state)?;
        answer(&state)
    }))
}

/// Runs the lookup of a device, to which the device's errors and its being lost also apply.
pub fn on_lookup(function: Function, find: impl FnOnce(&State) -> Option<Place>, device: *mut nvmlDevice_t) -> u32 {
    code(state::enter(function).and_then(|state| {
        let place = find(&state).ok_or(NOT_FOUND)?;
        let state = state::obey(function, |state| place.rules(state), state)?;
        with_target(&state, place, |target| put(device, target.place.to_handle()))
    }))
}

fn with_target(state: &State, place: Place, answer: impl FnOnce(&Target<'_>) -> Answer) -> Answer {
    let gpu = state.control.gpus.get(place.gpu).ok_or(INVALID_ARGUMENT)?;
    if gpu.lost || gpu.generation as usize != place.generation {
        return Err(GPU_IS_LOST);
    }
    let mig = match place.mig {
        Some(mig) => Some(gpu.mig.get(mig).and_then(Option::as_ref).ok_or(INVALID_ARGUMENT)?),
        None => None,
    };
    answer(&Target { state, place, gpu, mig })
}

/// The code of an answer.
pub fn code(answer: Answer) -> u32 {
    answer.err().unwrap_or(0)
}

/// Writes an answer to the caller's pointer.
pub fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: NVML's callers pass a pointer to a value of this type, and it is not null.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a C string into a buffer of `room` bytes.
pub fn put_text(to: *mut std::ffi::c_char, room: u32, text: &str) -> Answer {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= room as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller's buffer has `room` bytes, enough for the text and its terminating null.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}
