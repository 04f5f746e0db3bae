//! Texts of a snapshot with fixed numbers: the members of its dictionaries that are used, and the states of blocks.

/// Members, in the order of their numbers from 1: `Stacks` has these texts first.
pub(super) const MEMBERS: [&str; 26] = [
    "segments",
    "device_traces",
    "device",
    "address",
    "total_size",
    "blocks",
    "size",
    "requested_size",
    "state",
    "frames",
    "action",
    "addr",
    "time_us",
    "device_free",
    "name",
    "filename",
    "line",
    "active_allocated",
    "active_pending_free",
    "active_awaiting_free",
    "stream",
    "segment_type",
    "segment_pool_id",
    "is_expandable",
    "small",
    "large",
];
pub(super) const SEGMENTS: u32 = 1;
pub(super) const DEVICE_TRACES: u32 = 2;
pub(super) const DEVICE: u32 = 3;
pub(super) const ADDRESS: u32 = 4;
pub(super) const TOTAL_SIZE: u32 = 5;
pub(super) const BLOCKS: u32 = 6;
pub(super) const SIZE: u32 = 7;
pub(super) const REQUESTED_SIZE: u32 = 8;
pub(super) const STATE: u32 = 9;
pub(super) const FRAMES: u32 = 10;
pub(super) const ACTION: u32 = 11;
pub(super) const ADDR: u32 = 12;
pub(super) const TIME_US: u32 = 13;
pub(super) const DEVICE_FREE: u32 = 14;
pub(super) const NAME: u32 = 15;
pub(super) const FILENAME: u32 = 16;
pub(super) const LINE: u32 = 17;
pub(super) const ACTIVE_ALLOCATED: u32 = 18;
pub(super) const ACTIVE_PENDING_FREE: u32 = 19;
pub(super) const ACTIVE_AWAITING_FREE: u32 = 20;
pub(super) const STREAM: u32 = 21;
pub(super) const SEGMENT_TYPE: u32 = 22;
pub(super) const SEGMENT_POOL_ID: u32 = 23;
pub(super) const IS_EXPANDABLE: u32 = 24;
pub(super) const SMALL: u32 = 25;
pub(super) const LARGE: u32 = 26;
