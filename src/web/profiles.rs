//! `profiles` of `GET /api/v1/jobs/{job}/layers`: the layers of each rank's last profiled step, in the order in which they
//! ran.
//!
//! Enters: a job, and perhaps a rank. Leaves: whole profiles, record by record. Invariants: no lock is held while records
//! are decoded; an answer keeps no profile between its pieces. If the rank's profile is replaced while it is being
//! written, the answer breaks off.

use super::pieces::{Page, ROWS, Rows};
use super::site::Site;
use highwater_core::jobs::{Cursor, JobId, Profile, Record, Top, Totals};
use highwater_core::wire::Direction;
use serde::Serialize;
use std::sync::{Arc, Weak};
#[cfg(test)]
use utoipa::ToSchema;

/// The layers of one rank in its last profiled step. Bytes and nanoseconds; `null` if unknown.
#[cfg(test)]
#[derive(ToSchema)]
#[schema(as = Profile)]
#[allow(dead_code, reason = "describes what `RemainingProfiles` writes, for the API's description")]
pub(super) struct ListedProfile<'a> {
    rank: u32,
    step: Option<u64>,
    /// The time of the earliest record.
    begin_unix_nano: i64,
    /// The time of the latest record.
    end_unix_nano: i64,
    /// Records that were refused for lack of room.
    missing: u64,
    totals: Sums<'a>,
    records: Vec<Row<'a>>,
}

/// The members of a profile that come before its records.
#[derive(Serialize)]
struct Head<'a> {
    rank: u32,
    step: Option<u64>,
    begin_unix_nano: i64,
    end_unix_nano: i64,
    missing: u64,
    totals: Sums<'a>,
}

/// What all records of a profile are together. Bytes; `null` if no record has it.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
#[cfg_attr(test, schema(as = ProfileTotals))]
pub(super) struct Sums<'a> {
    /// Different layers.
    layers: u64,
    /// Activations of all forward records.
    activation_bytes: Option<u64>,
    /// Parameters, each layer once.
    parameter_bytes: Option<u64>,
    /// What all-gathers produced.
    gathered_bytes: Option<u64>,
    /// The most in live tensors after a layer.
    allocated_max_bytes: Option<u64>,
    /// The most that the allocator held after a layer.
    reserved_max_bytes: Option<u64>,
    /// The layers with the most activations, the largest first.
    top: Vec<TopRow<'a>>,
}

/// A layer with many activations, over all its records. Bytes.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
#[cfg_attr(test, schema(as = ProfileTop))]
pub(super) struct TopRow<'a> {
    layer: &'a str,
    activation_bytes: u64,
    parameter_bytes: Option<u64>,
}

impl<'a> Sums<'a> {
    fn new(totals: Totals, top: &'a [Top]) -> Self {
        let row = |top: &'a Top| {
            let (activation_bytes, parameter_bytes) = (top.activations, top.parameters);
            TopRow { layer: &top.name, activation_bytes, parameter_bytes }
        };
        Self {
            layers: totals.layers,
            activation_bytes: totals.activations,
            parameter_bytes: totals.parameters,
            gathered_bytes: totals.gathered,
            allocated_max_bytes: totals.allocated_max,
            reserved_max_bytes: totals.reserved_max,
            top: top.iter().map(row).collect(),
        }
    }
}

/// One layer in one pass. Bytes and nanoseconds; `null` if unknown.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
#[cfg_attr(test, schema(as = LayerRecord))]
pub(super) struct Row<'a> {
    layer: &'a str,
    #[cfg_attr(test, schema(value_type = String))]
    direction: Direction,
    allocated: Option<u64>,
    reserved: Option<u64>,
    growth: Option<i64>,
    activations: Option<u64>,
    parameters: Option<u64>,
    gathered: Option<u64>,
    gathered_sum: Option<u64>,
    duration_ns: Option<u64>,
    modules: Option<u64>,
    peak: Option<u64>,
    held: Option<i64>,
    recompute: Option<i64>,
    time_unix_nano: i64,
}

impl<'a> Row<'a> {
    fn new(record: &'a Record, shift_ns: i64) -> Self {
        let Record { name, at_ns, allocated, reserved, layer } = record;
        Self {
            layer: name,
            direction: layer.direction,
            allocated: *allocated,
            reserved: *reserved,
            growth: layer.growth,
            activations: layer.activations,
            parameters: layer.parameters,
            gathered: layer.gathered,
            gathered_sum: layer.gathered_sum,
            duration_ns: layer.duration_ns,
            modules: layer.modules,
            peak: layer.peak,
            held: layer.held,
            recompute: layer.recompute,
            time_unix_nano: at_ns.saturating_add(shift_ns),
        }
    }
}

/// The profiles that are still to be written.
pub(super) struct RemainingProfiles {
    site: Site,
    job: JobId,
    /// The ranks that are left.
    ranks: std::ops::RangeInclusive<u32>,
    /// The profile that is being written, and where. It is not kept for a client that does not read.
    begun: Option<(Weak<Profile>, Cursor)>,
}

impl RemainingProfiles {
    pub fn new(site: Site, job: JobId, rank: Option<u32>) -> Self {
        let ranks = rank.map_or(0..=u32::MAX, |rank| rank..=rank);
        Self { site, job, ranks, begun: None }
    }

    /// The next rank that has a profile.
    fn find(&mut self) -> Option<(u32, Arc<Profile>)> {
        let jobs = self.site.state().ledger.open();
        let ranks = jobs.by_id().get(&self.job).filter(|_| !self.ranks.is_empty())?.ranks.range(self.ranks.clone());
        let found = ranks.filter_map(|(number, rank)| Some((*number, Arc::clone(rank.profile()?)))).next();
        let after = found.as_ref().and_then(|(number, _)| number.checked_add(1));
        #[allow(clippy::reversed_empty_ranges, reason = "no rank is left")]
        let none_left = 1..=0;
        self.ranks = after.map_or(none_left, |after| after..=*self.ranks.end());
        found
    }
}

impl Page for RemainingProfiles {
    fn next(&mut self, rows: &mut Rows) {
        let shift_ns = self.site.state().unix_shift_ns();
        let mut left = ROWS;
        while left > 0 {
            let begun = self.begun.take();
            let mut is_first = begun.is_none();
            let (profile, mut cursor) = if let Some((profile, cursor)) = begun {
                let Some(profile) = profile.upgrade() else { return rows.break_off() };
                (profile, cursor)
            } else {
                let Some((rank, profile)) = self.find() else { return };
                let Profile { step, begin_ns, end_ns, missing, totals, ref top, .. } = *profile;
                let [begin_unix_nano, end_unix_nano] = [begin_ns, end_ns].map(|ns| ns.saturating_add(shift_ns));
                let totals = Sums::new(totals, top);
                rows.open(&Head { rank, step, begin_unix_nano, end_unix_nano, missing, totals }, "records");
                (profile, Cursor::default())
            };
            while left > 0
                && let Some(record) = profile.next(&mut cursor)
            {
                rows.push_inner(&Row::new(&record, shift_ns), std::mem::take(&mut is_first));
                left -= 1;
            }
            if left > 0 {
                rows.close();
                left -= 1;
            } else {
                self.begun = Some((Arc::downgrade(&profile), cursor));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::Recorder;
    use crate::metrics::{Choice, Snapshots};
    use highwater_core::clock::Manual;
    use highwater_core::jobs::{Limits, Sender};
    use highwater_engine::intake::Intake;
    use highwater_engine::shared_state::SharedState;
    use http_body_util::BodyExt as _;
    use serde_json::{Value, json};

    const NOW_NS: i64 = 5_000_000_000;

    fn site() -> Site {
        let intake = Arc::new(Intake::new(Limits::default(), Arc::new(Manual::at(NOW_NS)), Arc::default()));
        let state = SharedState::of(&crate::fuzzing::node(), intake.ledger());
        let snapshots = Snapshots { state, choice: Choice::default(), node_name: Arc::default(), parts: Vec::new() };
        Site::new(snapshots, intake, Recorder::default())
    }

    /// A profiled step of `records` records, and the begin of the next.
    fn step(site: &Site, number: u64, records: u64) {
        let record = |n: u64| {
            json!({"event": "mark", "kind": "layer", "name": format!("{}", n % 3), "job": "j", "rank": 2, "step": number,
                "layer": {"direction": "forward", "activations": n, "parameters": 5}})
        };
        let mut said: Vec<Value> = (0..records).map(record).collect();
        said.push(json!({"event": "begin", "kind": "step", "job": "j", "rank": 2, "step": number + 1}));
        site.intake.take_json(json!(said).to_string().as_bytes(), &Sender::DAEMON);
    }

    fn answer(site: &Site) -> axum::response::Response {
        crate::web::pieces::list("j", "profiles", RemainingProfiles::new(site.clone(), "j".into(), None))
    }

    fn held(site: &Site) -> usize {
        Arc::strong_count(site.intake.jobs().by_id()[&JobId::from("j")].ranks[&2].profile().expect("one"))
    }

    #[tokio::test]
    async fn a_profile_has_its_totals_before_its_records() {
        let site = site();
        step(&site, 1, 250);
        let read = answer(&site).into_body().collect().await.expect("whole").to_bytes();
        let read: Value = serde_json::from_slice(&read).expect("JSON");
        let profile = &read["profiles"][0];
        assert_eq!(profile["records"].as_array().expect("a list").len(), 250);
        let totals = json!({
            "layers": 3, "activation_bytes": 249 * 125, "parameter_bytes": 15, "gathered_bytes": null,
            "allocated_max_bytes": null, "reserved_max_bytes": null, "top": [
                {"layer": "0", "activation_bytes": 3 * (83 * 84 / 2), "parameter_bytes": 5}]
        });
        assert_eq!(profile["totals"]["layers"], totals["layers"]);
        assert_eq!(profile["totals"]["activation_bytes"], totals["activation_bytes"]);
        assert_eq!(profile["totals"]["top"][0], totals["top"][0]);
        let names: Vec<_> = profile["totals"].as_object().expect("an object").keys().collect();
        assert_eq!(names, totals.as_object().expect("an object").keys().collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_keeps_no_profile_and_learns_that_it_is_gone() {
        let site = site();
        step(&site, 1, 1_000);
        let mut body = answer(&site).into_body();
        for _ in 0..4 {
            assert!(body.frame().await.expect("a part").is_ok());
        }
        assert_eq!(held(&site), 1);
        step(&site, 2, 1_000);
        assert!(body.frame().await.expect("a part").is_err());
    }
}
