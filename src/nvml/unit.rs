//! State kept of one GPU or MIG instance between calls: its handle, and the queries that it does not support.
//!
//! Invariant: everything that the fast lane reads is an atomic, so that it never waits while another thread reacquires
//! the GPU. The only locks are in the meters of PCIe bytes and of activity, which only
//! the slower lanes use.

use super::activity::ActivityMeter;
use super::pcie::PcieMeter;
use super::raw::{Handle, MemoryVersion, RawFunctions};
use highwater_core::source::Call;
use nvml_wrapper_sys::bindings::nvmlDevice_st;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, Ordering};

/// A query that a GPU may not support. Finer than [`Call`]: one call of the lanes may be two of NVML's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Ask {
    Utilization,
    PowerInstant,
    PowerUsage,
    Temperature,
    SmClock,
    MemoryClock,
    ThrottleReasons,
    Memory,
    Bar1,
    PowerLimit,
    Slowdown,
    Shutdown,
    Energy,
    Pcie,
    Gpm,
    Nvlink,
    NvlinkErrors,
    NvlinkState,
    Fabric,
    EccCorrected,
    EccUncorrected,
    RemappedRows,
    RecoveryAction,
    PcieLink,
    Activity,
    ComputeProcesses,
    GraphicsProcesses,
}

impl Ask {
    /// The label under which its duration is recorded.
    pub(super) fn call(self) -> Call {
        match self {
            Ask::Utilization => Call::Utilization,
            Ask::PowerInstant | Ask::PowerUsage => Call::Power,
            Ask::Temperature => Call::Temperature,
            Ask::SmClock => Call::SmClock,
            Ask::MemoryClock => Call::MemoryClock,
            Ask::ThrottleReasons => Call::ThrottleReasons,
            Ask::Memory => Call::MemoryInfoSlow,
            Ask::Bar1 => Call::Bar1,
            Ask::PowerLimit | Ask::Slowdown | Ask::Shutdown => Call::Limits,
            Ask::Energy => Call::Energy,
            Ask::Pcie => Call::PcieCounters,
            Ask::Gpm | Ask::Activity => Call::Gpm,
            Ask::Nvlink | Ask::NvlinkErrors => Call::NvlinkCounters,
            Ask::NvlinkState | Ask::Fabric => Call::NvlinkState,
            Ask::EccCorrected | Ask::EccUncorrected => Call::EccErrors,
            Ask::RemappedRows => Call::RemappedRows,
            Ask::RecoveryAction => Call::RecoveryAction,
            Ask::PcieLink => Call::PcieLink,
            Ask::ComputeProcesses | Ask::GraphicsProcesses => Call::Processes,
        }
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// Where a MIG instance belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instance {
    /// Position of its GPU.
    pub(super) parent: usize,
    /// GPU instance and compute instance, as events name them; `None` if NVML does not report them.
    pub(super) ids: Option<(u32, u32)>,
}

/// One GPU or MIG instance.
#[derive(Debug)]
pub(super) struct Unit {
    handle: AtomicPtr<nvmlDevice_st>,
    memory_version: AtomicU8,
    unsupported: AtomicU32,
    registers_again: AtomicBool,
    /// PCIe bytes measured with GPM, for a GPU whose own counters cannot be used.
    pub(super) pcie: PcieMeter,
    /// What its multiprocessors do, measured with GPM.
    pub(super) activity: ActivityMeter,
    /// Set for a MIG instance.
    pub(super) instance: Option<Instance>,
}

impl Unit {
    /// A newly found unit. Queries the GPU once to decide how to read it.
    pub(super) fn new(raw: &RawFunctions, handle: Handle, instance: Option<Instance>) -> Self {
        let unit = Self {
            handle: AtomicPtr::new(handle.0),
            memory_version: AtomicU8::new(MemoryVersion::None as u8),
            unsupported: AtomicU32::new(0),
            registers_again: AtomicBool::new(false),
            pcie: PcieMeter::default(),
            activity: ActivityMeter::default(),
            instance,
        };
        unit.settle(raw);
        unit
    }

    /// Takes a new handle for a GPU that came back, and clears the list of unsupported queries.
    pub(super) fn replace(&self, raw: &RawFunctions, handle: Handle) {
        self.handle.store(handle.0, Ordering::Release);
        self.unsupported.store(0, Ordering::Relaxed);
        self.pcie.interrupt();
        self.activity.interrupt();
        self.settle(raw);
        self.registers_again.store(true, Ordering::Release);
    }

    fn settle(&self, raw: &RawFunctions) {
        let handle = self.handle();
        self.memory_version.store(raw.memory_version(handle) as u8, Ordering::Release);
        let whole_gpu = self.instance.is_none();
        if whole_gpu
            && raw
                .power_instant_mw(handle)
                .is_err_and(|code| code.of_lane() == highwater_core::source::Error::Unsupported)
        {
            self.remember_unsupported(Ask::PowerInstant);
        }
    }

    /// The current handle.
    #[inline]
    pub(super) fn handle(&self) -> Handle {
        Handle(self.handle.load(Ordering::Acquire))
    }

    /// The memory call that this GPU supports.
    #[inline]
    pub(super) fn memory_version(&self) -> MemoryVersion {
        match self.memory_version.load(Ordering::Relaxed) {
            2 => MemoryVersion::V2,
            1 => MemoryVersion::V1,
            _ => MemoryVersion::None,
        }
    }

    /// Whether this query was once answered with "not supported".
    pub(super) fn is_unsupported(&self, ask: Ask) -> bool {
        self.unsupported.load(Ordering::Relaxed) & ask.bit() != 0
    }

    /// Skips this query from now on, until the GPU is reacquired.
    pub(super) fn remember_unsupported(&self, ask: Ask) {
        self.unsupported.fetch_or(ask.bit(), Ordering::Relaxed);
    }

    /// Whether its events have to be registered again. Returns true once, then false.
    pub(super) fn take_registers_again(&self) -> bool {
        self.registers_again.swap(false, Ordering::AcqRel)
    }
}
