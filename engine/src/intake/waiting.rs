//! An event on its way: when it arrived and from whom, and what waits until more is known of its sender.

use highwater_core::jobs::{Account, Reservation, Sender, SenderId};
use highwater_core::wire::Annotation;
use std::sync::Arc;

/// When a batch arrived, and from which sender.
#[derive(Debug, Clone)]
pub(super) struct Arrival {
    pub at_ns: i64,
    /// The same moment on the live timeline, for rates and deadlines. A replay's `at_ns` stops at the recording's end.
    pub live_ns: i64,
    pub unix_shift_ns: i64,
    pub sender: Sender,
    /// The sender's account.
    pub account: Arc<Account>,
    /// The sender's container, if the kubelet is still to link it.
    pub unlinked: Option<Arc<str>>,
}

/// What waits until more is known of its sender's process: its environment, or its pod.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all are events, and few wait")]
pub(super) enum Parked {
    Event {
        annotation: Annotation,
        arrival: Arrival,
        held: Reservation,
    },
    /// The end of this process or of a connection of it, which comes after its events.
    End {
        pid: u32,
        sender_id: SenderId,
        _held: Option<Reservation>,
    },
}
