//! NVML's return codes, and what each one means for the caller.
//!
//! Enters: a code from a raw call, or the wrapper's error. Leaves: [`Error`] for readings, [`OpenError`] for opening.
//! Absent on purpose: a code that becomes a value. An unknown code stays an error.

use highwater_core::source::{Error, OpenError};
use nvml_wrapper::error::NvmlError;
use std::fmt;
use std::path::Path;

/// The name under which the driver installs NVML.
const DEFAULT_LIBRARY: &str = "libnvidia-ml.so.1";

/// One `nvmlReturn_t` that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Code(pub(super) u32);

#[allow(missing_docs, reason = "each is named after NVML's own constant")]
impl Code {
    pub(super) const INVALID_ARGUMENT: Code = Code(2);
    pub(super) const NOT_SUPPORTED: Code = Code(3);
    pub(super) const NO_PERMISSION: Code = Code(4);
    pub(super) const NOT_FOUND: Code = Code(6);
    pub(super) const INSUFFICIENT_SIZE: Code = Code(7);
    pub(super) const DRIVER_NOT_LOADED: Code = Code(9);
    pub(super) const TIMEOUT: Code = Code(10);
    pub(super) const FUNCTION_NOT_FOUND: Code = Code(13);
    pub(super) const GPU_IS_LOST: Code = Code(15);
    pub(super) const RESET_REQUIRED: Code = Code(16);
    pub(super) const OPERATING_SYSTEM: Code = Code(17);
    pub(super) const LIB_RM_VERSION_MISMATCH: Code = Code(18);
    pub(super) const NO_DATA: Code = Code(21);
    pub(super) const ARGUMENT_VERSION_MISMATCH: Code = Code(25);
    pub(super) const DEPRECATED: Code = Code(26);
    pub(super) const GPU_NOT_FOUND: Code = Code(28);
    pub(super) const UNKNOWN: Code = Code(999);

    /// Success, or the code.
    pub(super) fn check(code: u32) -> Result<(), Code> {
        if code == 0 { Ok(()) } else { Err(Code(code)) }
    }

    /// NVML's name of the code and what it means; every code of the NVML 13 header is here.
    fn words(self) -> Option<(&'static str, &'static str)> {
        Some(match self.0 {
            0 => ("SUCCESS", "ok"),
            1 => ("UNINITIALIZED", "NVML is not initialized"),
            2 => ("INVALID_ARGUMENT", "an argument is invalid for this device"),
            3 => ("NOT_SUPPORTED", "not supported by this device"),
            4 => ("NO_PERMISSION", "this user may not ask this"),
            5 => ("ALREADY_INITIALIZED", "NVML is already initialized"),
            6 => ("NOT_FOUND", "no such object"),
            7 => ("INSUFFICIENT_SIZE", "the buffer is too small"),
            8 => ("INSUFFICIENT_POWER", "the external power cables are not attached properly"),
            9 => ("DRIVER_NOT_LOADED", "the NVIDIA driver is not loaded"),
            10 => ("TIMEOUT", "timed out"),
            11 => ("IRQ_ISSUE", "the kernel has an interrupt problem with the GPU"),
            12 => ("LIBRARY_NOT_FOUND", "a library that NVML needs is missing"),
            13 => ("FUNCTION_NOT_FOUND", "this version of NVML has no such function"),
            14 => ("CORRUPTED_INFOROM", "the GPU's infoROM is corrupted"),
            15 => ("GPU_IS_LOST", "the GPU has fallen off the bus or is otherwise inaccessible"),
            16 => ("RESET_REQUIRED", "the GPU needs a reset before it can be used again"),
            17 => ("OPERATING_SYSTEM", "the operating system or cgroup blocks the GPU"),
            18 => ("LIB_RM_VERSION_MISMATCH", "the loaded driver and NVML are of different versions"),
            19 => ("IN_USE", "the GPU is in use"),
            20 => ("MEMORY", "not enough memory"),
            21 => ("NO_DATA", "no data"),
            22 => ("VGPU_ECC_NOT_SUPPORTED", "not available on a vGPU with ECC"),
            23 => ("INSUFFICIENT_RESOURCES", "the driver ran out of a resource"),
            24 => ("FREQ_NOT_SUPPORTED", "this clock is not supported"),
            25 => ("ARGUMENT_VERSION_MISMATCH", "this version of NVML does not know this version of the structure"),
            26 => ("DEPRECATED", "this driver no longer answers this call"),
            27 => ("NOT_READY", "the GPU is not ready"),
            28 => ("GPU_NOT_FOUND", "the GPU is not there"),
            29 => ("INVALID_STATE", "the GPU is in a state that does not allow this"),
            30 => ("RESET_TYPE_NOT_SUPPORTED", "this kind of reset is not supported"),
            999 => ("UNKNOWN", "an internal driver error"),
            _ => return None,
        })
    }

    /// Whether the answer can never change.
    pub(super) fn is_unsupported(self) -> bool {
        matches!(
            self,
            Code::NOT_SUPPORTED
                | Code::NO_PERMISSION
                | Code::FUNCTION_NOT_FOUND
                | Code::ARGUMENT_VERSION_MISMATCH
                | Code::DEPRECATED
        )
    }

    /// What the code means for the reading that shows whether a GPU is present. If NVML no longer accepts a handle, the
    /// GPU or MIG instance is gone.
    pub(super) fn of_presence(self) -> Error {
        match self {
            Code::INVALID_ARGUMENT | Code::NOT_FOUND => Error::Lost(format!("the handle is no longer valid: {self}")),
            _ => self.of_reading(),
        }
    }

    /// What the code means for a call of the medium or slow lane. Its arguments are the same each time, so an argument
    /// that is invalid now stays invalid until the handle is replaced.
    pub(super) fn of_lane(self) -> Error {
        if self == Code::INVALID_ARGUMENT { Error::Unsupported } else { self.of_reading() }
    }

    fn of_reading(self) -> Error {
        match self {
            _ if self.is_unsupported() => Error::Unsupported,
            Code::GPU_IS_LOST | Code::RESET_REQUIRED | Code::GPU_NOT_FOUND => Error::Lost(self.to_string()),
            _ => Error::Failed(self.to_string()),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.words() {
            Some((name, meaning)) => write!(f, "{meaning} (NVML_ERROR_{name}, {})", self.0),
            None => write!(f, "NVML return code {}", self.0),
        }
    }
}

impl From<NvmlError> for Code {
    fn from(error: NvmlError) -> Self {
        match error {
            // The wrapper reports a missing symbol as "unknown", which would be retried forever.
            NvmlError::FailedToLoadSymbol(_) => Code::FUNCTION_NOT_FOUND,
            other => Code(other.into()),
        }
    }
}

/// Why NVML could not be opened, and how to fix it.
pub(super) fn open_error(error: NvmlError, library: Option<&Path>) -> OpenError {
    match error {
        NvmlError::LibloadingError(cause) => library_missing(&cause.to_string(), library),
        NvmlError::FailedToLoadSymbol(cause) => OpenError {
            reason: "init_failed",
            message: format!("{} is not an NVML library, or is too old: {cause}", library_name(library)),
        },
        other => init_failed(Code::from(other)),
    }
}

fn library_name(library: Option<&Path>) -> String {
    library.map_or_else(|| DEFAULT_LIBRARY.to_owned(), |path| path.display().to_string())
}

fn library_missing(cause: &str, library: Option<&Path>) -> OpenError {
    let remedy = if library.is_some() {
        "check the path given as the NVML library"
    } else {
        "install the NVIDIA driver; in a container, start it with the NVIDIA runtime (`--gpus all`, or \
         `runtimeClassName: nvidia`); or name the library with --nvml-library"
    };
    // The loader's message names the library.
    OpenError { reason: "library_missing", message: format!("NVML cannot be loaded: {cause}. To fix it: {remedy}") }
}

fn init_failed(code: Code) -> OpenError {
    let (reason, remedy) = match code {
        Code::LIB_RM_VERSION_MISMATCH => (
            "driver_mismatch",
            "the driver was upgraded while the old kernel module stayed loaded, or this container carries another \
             version of NVML than the host: reboot or reload the nvidia modules, or use the host's NVML",
        ),
        Code::DRIVER_NOT_LOADED => (
            "driver_not_loaded",
            "load the nvidia kernel module (`modprobe nvidia`); `dmesg | grep -i nvrm` shows why it is missing",
        ),
        Code::NO_PERMISSION => (
            "no_permission",
            "give this user access to /dev/nvidiactl and /dev/nvidia*, and the container's device cgroup access to them",
        ),
        _ => ("init_failed", "see whether nvidia-smi works on this node, and `dmesg | grep -i nvrm`"),
    };
    OpenError { reason, message: format!("NVML cannot be initialized: {code}. To fix it: {remedy}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_the_header_has_words_and_one_outcome() {
        let known: Vec<u32> = (0..=30).chain([999]).collect();
        assert!(known.iter().all(|code| Code(*code).words().is_some()));
        assert_eq!(Code(31).to_string(), "NVML return code 31");
        let unsupported: Vec<u32> =
            known.iter().copied().filter(|c| Code(*c).of_reading() == Error::Unsupported).collect();
        assert_eq!(unsupported, [3, 4, 13, 25, 26]);
        let lost: Vec<u32> =
            known.iter().copied().filter(|c| matches!(Code(*c).of_presence(), Error::Lost(_))).collect();
        assert_eq!(lost, [2, 6, 15, 16, 28]);
    }

    #[test]
    fn codes_that_the_wrapper_does_not_know_keep_their_number() {
        assert_eq!(Code::from(NvmlError::from(28)), Code::GPU_NOT_FOUND);
        assert_eq!(Code::from(NvmlError::FailedToLoadSymbol("x".into())), Code::FUNCTION_NOT_FOUND);
    }

    #[test]
    fn start_failures_name_their_reason_and_a_remedy() {
        for (code, reason) in
            [(18, "driver_mismatch"), (9, "driver_not_loaded"), (4, "no_permission"), (999, "init_failed")]
        {
            let error = open_error(NvmlError::from(code), None);
            assert_eq!(error.reason, reason);
            assert!(error.message.contains("To fix it"), "{}", error.message);
        }
    }
}
