//! What unit tests of the lanes use.

use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{Device, GpuState};

/// A GPU of which nothing has been read yet.
pub(super) fn gpu() -> GpuState {
    GpuState::new(Device::default(), SECOND_NS, SECOND_NS)
}
