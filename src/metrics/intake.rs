//! The samples of the intake: what it took and refused, and what it keeps.

use super::catalogue as c;
use super::collect::Collect;
use super::families::{Families, Labels};
use super::memory::Part;
use highwater_core::jobs::{Outcome, Resource};
use highwater_engine::intake::Intake;

impl Collect for Intake {
    fn collect(&self, out: &mut Families) {
        for outcome in Outcome::ALL {
            out.count(&c::ANNOTATIONS, [outcome.label()], Some(self.counts.get(outcome)));
        }
        let accounts = self.accounts();
        for (sender, events) in accounts.losses() {
            out.count(&c::ANNOTATIONS_LOST, Labels::found(&[&sender]), Some(events));
        }
        for (sender, events) in accounts.refusals() {
            out.count(&c::ANNOTATIONS_REFUSED, Labels::found(&[&sender]), Some(events));
        }
        for (kind, resource) in [("open", Resource::Bytes), ("ended", Resource::Ended)] {
            out.count(&c::ANNOTATIONS_HELD, [kind], Some(accounts.held(resource) as u64));
        }
        out.count(&c::CGROUPS_READ, (), Some(self.cgroups() as u64));
        out.memory(Part::Open, accounts.held(Resource::Bytes));
        out.memory(Part::Profiles, accounts.held(Resource::Layers));
        out.memory(Part::Events, self.log().bytes());
    }
}
