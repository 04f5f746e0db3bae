//! All samples of one moment.

use super::catalogue as c;
use super::families::Families;
use super::{gpu, job, own};
use crate::annotate::Intake;
use crate::clock::Clock;
use crate::node::Slot;

/// Collects every sample. `processes` asks for the memory of single processes too.
#[must_use]
pub fn collect(slot: &Slot, intake: &Intake, clock: &dyn Clock, processes: bool) -> Families {
    let mut out = Families::default();
    let node = slot.node();
    if let Some(node) = &node {
        gpu::collect(node, processes, &mut out);
        own::sampler(node, &mut out);
    } else if let Some(trouble) = slot.trouble() {
        out.number(&c::SOURCE_ERROR, &[trouble.reason], Some(1.0));
    }
    out.count(&c::NVML_UP, &[], slot.is_nvml().then_some(u64::from(node.is_some())));
    let clock = node.as_ref().map_or(clock, |node| &*node.clock);
    job::collect(&intake.jobs(), node.as_deref(), clock.now_ns(), clock.unix_shift_ns(), &mut out);
    own::annotations(intake, &mut out);
    own::process(&mut out);
    out
}
