//! A rank's profile while its step goes on, and the last whole one.
//!
//! Enters: records, and the ends of steps. Leaves: a [`Profile`] when its step is over. Invariant: what both take is on an
//! account before it is taken. Absent on purpose: which layers there may be.

use super::code::{self, Last, MOST_RECORD_BYTES, Numbered};
use super::complete::{LayerNames, Profile, Top, totals};
use crate::jobs::account::{Account, Reservation, Resource};
use crate::jobs::event::Event;
use crate::jobs::refusal::Refusal;
use std::sync::Arc;

/// Maximum number of records of one profile: twice the records that 4,096 layers have in a forward and a backward pass.
const MOST_RECORDS: usize = 1 << 14;
/// Minimum bytes that a record counts on the account, even if its code is shorter: it takes more in answers and in files, which
/// this bounds too.
const LEAST_RECORD_BYTES: usize = 16;
/// By how much the bytes of a profile grow, at least.
const LEAST_GROWTH_BYTES: usize = 1 << 10;
/// Bytes of a profile beside its records and its top layers, with what allocating it costs.
const PROFILE_BYTES: usize = size_of::<Profile>() + 128;

/// What the refusal for lack of room names.
const LAYER_BYTES: &str = "bytes of layer profiles (two thirds of annotations.max_ended_bytes)";

/// What a rank has of profiles.
#[derive(Debug, Default)]
pub(in crate::jobs) struct Profiles {
    building: Option<Box<Building>>,
    whole: Option<Arc<Profile>>,
    /// Whether the last record was refused for lack of room, and no step of the rank has begun or ended since.
    was_refused: bool,
}

/// The profile of a step that goes on.
#[derive(Debug)]
struct Building {
    step: Option<u64>,
    names: Arc<LayerNames>,
    top: usize,
    encoded: Vec<u8>,
    last: Last,
    count: usize,
    missing: u64,
    begin_ns: i64,
    end_ns: i64,
    /// Bytes that count for the records: what they take, or more.
    charged: usize,
    /// `None` until there is a record.
    held: Option<Reservation>,
}

impl Building {
    fn new(step: Option<u64>, names: &Arc<LayerNames>, top: usize) -> Self {
        let (names, encoded, last) = (Arc::clone(names), Vec::new(), Last::default());
        let (count, missing, begin_ns, end_ns) = (0, 0, i64::MAX, i64::MIN);
        Self { step, names, top, encoded, last, count, missing, begin_ns, end_ns, charged: 0, held: None }
    }

    fn overhead_bytes(&self) -> usize {
        PROFILE_BYTES + self.top * size_of::<Top>()
    }

    fn is_full(&self) -> bool {
        self.encoded.capacity() - self.encoded.len() < MOST_RECORD_BYTES
    }

    /// By how much the bytes grow once they are full.
    fn more_bytes(&self) -> usize {
        LEAST_GROWTH_BYTES.max(self.encoded.len() / 16)
    }

    /// What counts for the records with one more.
    fn next_charged(&self) -> usize {
        let taken = if self.is_full() { self.encoded.len() + self.more_bytes() } else { self.encoded.capacity() };
        let least = (self.count + 1) * LEAST_RECORD_BYTES;
        taken.max(if self.charged < least { least.next_multiple_of(LEAST_GROWTH_BYTES) } else { self.charged })
    }

    /// Bytes that the next record may need beside those that are held.
    fn growth_bytes(&self) -> usize {
        let more = self.next_charged().saturating_sub(self.charged);
        more + if self.held.is_some() { 0 } else { self.overhead_bytes() }
    }

    fn push(&mut self, record: &Numbered, account: &Arc<Account>) {
        if self.growth_bytes() > 0 {
            self.charged = self.next_charged();
            if self.is_full() {
                self.encoded.reserve_exact(self.more_bytes());
            }
            let bytes = self.overhead_bytes() + self.charged.max(self.encoded.capacity());
            self.held.get_or_insert_with(|| account.hold(Resource::Layers, 0)).set(bytes);
        }
        code::encode(&mut self.encoded, &mut self.last, record);
        self.count += 1;
        (self.begin_ns, self.end_ns) = (self.begin_ns.min(record.at_ns), self.end_ns.max(record.at_ns));
    }

    /// The whole profile; `None` if it has no record.
    fn whole(self) -> Option<Profile> {
        let Self { step, names, top, encoded, count, missing, begin_ns, end_ns, .. } = self;
        let mut held = self.held?;
        let encoded = encoded.into_boxed_slice();
        held.set(PROFILE_BYTES + top * size_of::<Top>() + encoded.len().max(count * LEAST_RECORD_BYTES));
        let (totals, top) = totals(&encoded, &names, top);
        Some(Profile { step, begin_ns, end_ns, missing, count, totals, top, names, encoded, _held: held })
    }
}

impl Profiles {
    /// The last whole profile.
    pub fn whole(&self) -> Option<&Arc<Profile>> {
        self.whole.as_ref()
    }

    fn of_step(&self, step: Option<u64>) -> Option<&Building> {
        self.building.as_deref().filter(|building| building.step == step)
    }

    /// Whether the last record was refused, and nothing has changed since that could make room. Then a further record does not
    /// search all ranks for room again, whatever its step.
    pub fn was_refused(&self) -> bool {
        self.was_refused
    }

    /// Whether a record of this step is too late, because its profile has ended. `open` is the number of the open
    /// step, if one is open. If it is another step, a record is late if its step is earlier, or already has the
    /// complete profile. If no step is open, it is late if its step has the complete profile and no profile is being
    /// built.
    pub fn is_late(&self, step: Option<u64>, open: Option<Option<u64>>) -> bool {
        let Some(number) = step else { return false };
        let is_done = self.whole.as_ref().is_some_and(|whole| whole.step == step);
        match open {
            None => is_done && self.building.is_none(),
            Some(open) => open != step && (is_done || open.is_some_and(|open| number < open)),
        }
    }

    /// Whether there is room for one more record of this step.
    ///
    /// # Errors
    /// Why not.
    pub fn may_record(&self, step: Option<u64>, top: usize, account: &Arc<Account>) -> Result<(), Refusal> {
        let building = self.of_step(step);
        if building.is_some_and(|building| building.count >= MOST_RECORDS) {
            return Err(Refusal::TooManyRecords(MOST_RECORDS));
        }
        let own = building.and_then(|building| building.held.as_ref()).map_or(account, Reservation::account);
        let first_bytes = PROFILE_BYTES + top * size_of::<Top>() + LEAST_GROWTH_BYTES;
        let bytes = building.map_or(first_bytes, Building::growth_bytes);
        if bytes == 0 {
            return Ok(());
        }
        own.may_hold(Resource::Layers, bytes)
            .map_err(|short| Refusal::over_budget(LAYER_BYTES, short, Resource::Layers, own))
    }

    /// Adds a record of a step, whose layer has this number among these names.
    pub fn record(
        &mut self,
        event: &Event,
        step: Option<u64>,
        (names, number): (&Arc<LayerNames>, usize),
        top: usize,
        account: &Arc<Account>,
    ) {
        let Some(layer) = event.layer.as_deref().copied() else { return };
        let (allocated, reserved) = event.memory.map_or((None, None), |memory| (memory.allocated, memory.reserved));
        let record = Numbered { number, at_ns: event.at_ns, allocated, reserved, layer };
        self.enter(step, names, top).push(&record, account);
        self.was_refused = false;
        if let (Some(missing), Some(building)) = (layer.last_with_missing, &mut self.building) {
            building.missing = missing;
            self.complete();
        }
    }

    /// Counts a record of a step for which there is no room.
    pub fn lack(&mut self, step: Option<u64>, names: &Arc<LayerNames>, top: usize) {
        self.enter(step, names, top).missing += 1;
        self.was_refused = true;
    }

    /// The profile of this step, which is created if needed. The profile of another step is completed first.
    fn enter(&mut self, step: Option<u64>, names: &Arc<LayerNames>, top: usize) -> &mut Building {
        if self.of_step(step).is_none() {
            self.complete();
        }
        self.building.get_or_insert_with(|| Box::new(Building::new(step, names, top)))
    }

    /// Starts a step; `open` is the step that is open so far. Completes the profile of any other step. Records of this step that
    /// came before its begin, as those of another batch may, stay. If this step was open and starts again, its records so far are
    /// dropped; returns how many.
    pub fn begin_step(&mut self, step: Option<u64>, open: Option<Option<u64>>) -> u64 {
        self.was_refused = false;
        if step.is_none() || self.of_step(step).is_none() {
            self.complete();
        } else if open == Some(step) {
            return self.building.take().map_or(0, |building| building.count as u64);
        }
        0
    }

    /// Completes the profile, because its step or its rank has ended.
    pub fn end_step(&mut self) {
        self.was_refused = false;
        self.complete();
    }

    /// Ends the profile that is being built: from now on it is the rank's.
    fn complete(&mut self) {
        if let Some(whole) = self.building.take().and_then(|building| building.whole()) {
            self.whole = Some(Arc::new(whole));
        }
    }

    /// Forgets the whole profile if another is about to replace it; returns whether there was one.
    pub fn make_room(&mut self) -> bool {
        self.building.is_some() && self.forget()
    }

    /// Forgets the whole profile; returns whether there was one.
    pub fn forget(&mut self) -> bool {
        self.whole.take().is_some()
    }
}
