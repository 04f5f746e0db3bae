//! One capture from its first transaction, which has all of the past, to its last.
//!
//! Enters: what a node keeps, by reading only. Leaves: transactions. Invariant: a transaction that has a sweep has its
//! readings, so that a file that ends early contains nothing wrong.

use super::allowance::Allowance;
use super::layers::Profiles;
use super::recorder::Start;
use super::trigger::{Findings, Reason, Trigger};
use highwater_core::clock::{Clock, MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::{ChangeLog, GpuChange, GpuState};
use highwater_core::jobs::{Ended, EndedBy, JobId, Jobs, Open, Rank, Scope};
use highwater_core::phases::{Attributed, Ledger, RankKey, attribute};
use highwater_core::ring;
use highwater_core::shares::Given;
use highwater_core::wire::Kind;
use highwater_engine::intake::{EventLog, Intake};
use highwater_engine::node::Node;
use highwater_engine::recording::State;
use highwater_engine::recording::schema::WriteError;
use highwater_engine::recording::track_writer::TrackWriter;
use highwater_engine::recording::write::{FindingRow, KnownRank, RecordingWriter};
use highwater_engine::sample::{Sweep, TickLog, TickStats};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

/// How long after its end the capture waits for late data: phases are attributed every 100 ms.
const LINGER_NS: i64 = 500 * MILLISECOND_NS;
/// How long it waits for the memory of a GPU that answers.
const PATIENCE_NS: i64 = 2 * SECOND_NS;

/// Bytes of a phase and its memory on two GPUs in the file.
const PHASE_BYTES: usize = 256;
/// Rows of what is open that are written at the end, for which there is room in a file that is full: a step and a phase of 64 ranks,
/// with their memory.
const MOST_OPEN_ROWS: usize = 256;

/// The parts of a node that a capture reads. It does not hold the node itself, because the driver cannot be opened again
/// while anything does.
pub(super) struct View {
    source: String,
    gpus: Arc<[GpuState]>,
    rings: Arc<[ring::Reader]>,
    ticks: Arc<TickStats>,
    changes: Arc<ChangeLog>,
    pub clock: Arc<dyn Clock>,
}

impl View {
    pub fn of(node: &Node) -> Self {
        Self {
            source: node.source.description(),
            gpus: Arc::clone(&node.gpus),
            rings: Arc::clone(&node.rings),
            ticks: Arc::clone(&node.ticks),
            changes: Arc::clone(&node.changes),
            clock: Arc::clone(&node.clock),
        }
    }

    /// Memory of the GPUs, by position.
    pub fn rings(&self) -> &[ring::Reader] {
        &self.rings
    }

    /// When memory was read, if that is kept.
    pub fn ticks(&self) -> Option<&TickLog> {
        self.ticks.log()
    }

    /// Whether this still belongs to that node.
    pub fn is_of(&self, node: Option<&Node>) -> bool {
        node.is_some_and(|node| Arc::ptr_eq(&node.rings, &self.rings))
    }
}

/// What jobs sent: their state, and their last events.
#[derive(Clone)]
pub(super) struct Sent {
    ledger: Arc<Ledger>,
    log: Arc<EventLog>,
}

impl Sent {
    /// What the intake has taken.
    pub fn of(intake: &Intake) -> Self {
        Self { ledger: Arc::clone(intake.ledger()), log: Arc::clone(intake.log()) }
    }
}

/// A capture that is being taken.
pub(super) struct Capture {
    file: RecordingWriter,
    view: View,
    sent: Sent,
    findings: Arc<dyn Findings>,
    begin_ns: i64,
    end_ns: i64,
    /// Whether it was ended before its end.
    is_cut: bool,
    tracks: Vec<TrackWriter>,
    /// The tracks as of the last transaction; `None` before the first.
    committed: Option<Vec<TrackWriter>>,
    next_tick: u64,
    next_turn: u64,
    next_change: u64,
    next_event: u64,
    /// The next of the phases, and of the layers.
    next_phases: [u64; 2],
    usage_ns: Vec<i64>,
    breakdown_ns: Vec<i64>,
    ranks: BTreeMap<RankKey, KnownRank>,
    profiles: Profiles,
    /// The findings as of the last transaction; only what changed is written again.
    written: Vec<FindingRow>,
    lost_events: u64,
    lost_phases: u64,
    /// The limit on the bytes of events, of phases and of layers, each; and what each owner has used of it.
    allowance: Allowance,
    given_events: Given,
    given_phases: [Given; 2],
}

impl Capture {
    /// Begins the file. Its contents so far are committed by the first [`advance`](Self::advance).
    pub fn begin(
        path: &Path,
        most_bytes: u64,
        start: &Start,
        view: View,
        sent: Sent,
        findings: Arc<dyn Findings>,
    ) -> Result<Self, WriteError> {
        let uuids = view.gpus.iter().map(|gpu| gpu.device.uuid.clone()).collect();
        let file = RecordingWriter::create(path, (most_bytes, start.kind.mode()), view.clock.unix_shift_ns(), uuids)?;
        let (begin_ns, end_ns) = (start.begin_ns, start.end_ns);
        let track = |(gpu, ring): (usize, &ring::Reader)| TrackWriter::new(gpu, begin_ns, ring.resolution_ns());
        let allowance = Allowance::new(most_bytes, view.clock.now_ns());
        let capture = Self {
            file,
            sent,
            findings,
            begin_ns,
            end_ns,
            is_cut: false,
            tracks: view.rings.iter().enumerate().map(track).collect(),
            committed: None,
            next_tick: 0,
            next_turn: 0,
            next_change: 0,
            next_event: 0,
            next_phases: [0; 2],
            // Exclusive, so that a reading at the very begin counts.
            usage_ns: vec![begin_ns.saturating_sub(1); view.gpus.len()],
            breakdown_ns: vec![begin_ns.saturating_sub(1); view.gpus.len()],
            ranks: BTreeMap::new(),
            profiles: Profiles::new(most_bytes),
            written: Vec::new(),
            lost_events: 0,
            lost_phases: 0,
            allowance,
            given_events: Given::default(),
            given_phases: Default::default(),
            view,
        };
        capture.head(start)?;
        Ok(capture)
    }

    fn head(&self, start: &Start) -> rusqlite::Result<()> {
        let file = &self.file;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for (key, value) in [
            ("kind", start.kind.label()),
            ("id", &start.id),
            ("highwater_version", env!("CARGO_PKG_VERSION")),
            ("host", &host),
            ("source", &self.view.source),
            ("reason", start.trigger.reason.label()),
            ("note", &start.trigger.note),
        ] {
            file.meta(key, value)?;
        }
        file.meta_time("trigger_ns", start.trigger.at_ns)?;
        file.meta_time("begin_ns", self.begin_ns)?;
        file.meta("period_ns", self.view.ticks.period_ns.load(Ordering::Relaxed))?;
        file.state(State::Writing)?;
        write_trigger(file, &start.trigger)?;
        self.view.gpus.iter().enumerate().try_for_each(|(gpu, state)| file.gpu(gpu, state))?;
        file.meta_time("ticks_from_ns", self.ticks_from_ns())?;
        let events_from_ns = self.sent.log.whole_from_ns();
        file.meta_time("annotations_from_ns", events_from_ns.unwrap_or(i64::MIN).max(self.begin_ns))
    }

    /// From when on the times of sweeps are known.
    fn ticks_from_ns(&self) -> i64 {
        let Some(log) = self.view.ticks.log() else { return self.end_ns };
        let (sweeps, next) = log.since(0);
        let is_whole = next == sweeps.len() as u64;
        let first_ns = sweeps.first().map(|sweep| sweep.begin_ns);
        first_ns.filter(|_| !is_whole).unwrap_or(i64::MIN).max(self.begin_ns)
    }

    /// Writes what has come since the last call, and the triggers `joined`, in one transaction, and then layer profiles
    /// in another. Calls `between` repeatedly while it writes memory, so that the worker can make room as the file
    /// grows.
    pub fn advance(&mut self, joined: &[Trigger], between: &dyn Fn()) -> rusqlite::Result<()> {
        // The first transaction is already open: the tables were made in it.
        if self.file.is_idle() {
            self.file.begin()?;
        }
        self.write_ticks()?;
        self.write_turns()?;
        for (track, ring) in self.tracks.iter_mut().zip(self.view.rings.iter()) {
            track.write(ring, self.end_ns, &self.file, between)?;
        }
        self.write_usage()?;
        self.write_breakdown()?;
        self.write_changes()?;
        self.write_events()?;
        self.write_phases()?;
        self.write_ranks()?;
        self.write_findings()?;
        joined.iter().try_for_each(|trigger| write_trigger(&self.file, trigger))?;
        self.file.meta_time("end_ns", self.known_ns())?;
        self.file.commit()?;
        self.committed = Some(self.tracks.clone());
        let now_ns = self.now_ns();
        self.profiles.write(&self.sent.ledger, &self.file, now_ns, self.end_ns)
    }

    /// Whether the file contains anything, which is then at least all of the past.
    pub fn is_committed(&self) -> bool {
        self.committed.is_some()
    }

    /// Ends the capture now, if it would end later.
    pub fn end_now(&mut self) {
        (self.end_ns, self.is_cut) = (self.end_ns.min(self.now_ns()), true);
    }

    /// Lets the capture end later.
    pub fn set_end(&mut self, end_ns: i64) {
        self.end_ns = self.end_ns.max(end_ns);
    }

    /// The current time of the timeline that it follows, nanoseconds.
    pub fn now_ns(&self) -> i64 {
        self.view.clock.now_ns()
    }

    /// Whether everything up to its end is known, or never will be.
    pub fn is_over(&self) -> bool {
        let now_ns = self.view.clock.now_ns();
        let answering = self.view.gpus.iter().zip(self.view.rings.iter()).filter(|(gpu, _)| gpu.is_sampled());
        let is_known = answering.map(|(_, ring)| ring.newest_ns()).all(|newest_ns| newest_ns >= Some(self.end_ns));
        let beyond_ns = now_ns.saturating_sub(self.end_ns);
        // Without a job, nothing comes late.
        let linger_ns = if self.sent.ledger.open().by_id().is_empty() { 0 } else { LINGER_NS };
        beyond_ns >= PATIENCE_NS || (is_known && beyond_ns >= linger_ns)
    }

    /// Whether the node that it records is still this one.
    pub fn is_of(&self, node: Option<&Node>) -> bool {
        self.view.is_of(node)
    }

    /// Until when the memory of every answering GPU has been written, nanoseconds of the timeline.
    pub fn known_ns(&self) -> i64 {
        let tracks = self.tracks.iter().zip(self.view.gpus.iter());
        let answering = tracks.filter(|(_, gpu)| gpu.is_sampled()).map(|(track, _)| track.until_ns());
        // If no GPU answers, nothing more will be known of them.
        answering.min().unwrap_or_else(|| self.now_ns()).min(self.end_ns)
    }

    /// Makes what was committed survive a power failure.
    pub fn sync(&self) -> rusqlite::Result<()> {
        self.file.sync()
    }

    /// Ends the file with this state. Returns when the recording ends, Unix nanoseconds.
    pub fn finish(mut self, state: State) -> rusqlite::Result<i64> {
        self.file.roll_back();
        self.tracks = self.committed.take().unwrap_or_default();
        self.file.allow_end()?;
        let end_ns = if state == State::Complete { self.end_ns } else { self.known_ns() };
        self.file.begin()?;
        for track in &mut self.tracks {
            track.end(end_ns, &self.file)?;
        }
        self.write_open(end_ns)?;
        self.file.meta_time("end_ns", end_ns)?;
        self.file.meta("annotations_lost", i64::try_from(self.lost_events).unwrap_or(i64::MAX))?;
        self.file.meta("phases_lost", i64::try_from(self.lost_phases).unwrap_or(i64::MAX))?;
        self.file.meta("layer_profiles_lost", i64::try_from(self.profiles.lost).unwrap_or(i64::MAX))?;
        self.file.state(state)?;
        self.file.commit()?;
        let end_unix_ns = self.file.unix(end_ns);
        self.file.close().map(|()| end_unix_ns)
    }

    /// Sweeps come before the rings, so that each sweep's readings are there when the rings are read.
    fn write_ticks(&mut self) -> rusqlite::Result<()> {
        let new = new_within(self.view.ticks.log(), &mut self.next_tick, self.begin_ns, self.end_ns);
        new.into_iter().try_for_each(|sweep| self.file.tick(sweep))
    }

    /// Writes the times at which the detectors ran. A replay runs them at the same times.
    fn write_turns(&mut self) -> rusqlite::Result<()> {
        let new = new_within(self.view.ticks.turns(), &mut self.next_turn, self.begin_ns, self.end_ns);
        new.into_iter().try_for_each(|turn| self.file.turn(turn.begin_ns))
    }

    fn write_usage(&mut self) -> rusqlite::Result<()> {
        for (gpu, (state, until_ns)) in self.view.gpus.iter().zip(&mut self.usage_ns).enumerate() {
            for point in state.series.points(*until_ns, self.end_ns) {
                self.file.usage(gpu, point)?;
                *until_ns = point.at_ns;
            }
        }
        Ok(())
    }

    fn write_breakdown(&mut self) -> rusqlite::Result<()> {
        for (gpu, (state, until_ns)) in self.view.gpus.iter().zip(&mut self.breakdown_ns).enumerate() {
            let (since_ns, is_first) = (*until_ns, *until_ns < self.begin_ns);
            for point in state.breakdown.points(since_ns, self.end_ns) {
                // The first time, what holds at the begin counts; it was written before the next.
                if is_first || point.at_ns > since_ns {
                    self.file.breakdown(gpu, point, self.begin_ns)?;
                    *until_ns = point.at_ns.max(self.begin_ns);
                }
            }
        }
        Ok(())
    }

    /// Writes the changes of GPUs up to the end. Of the changes before the begin, only those still in effect at the
    /// begin are written. Changes after the end are left, in case the end moves.
    fn write_changes(&mut self) -> rusqlite::Result<()> {
        let (changes, next) = self.view.changes.since(self.next_change);
        let until = changes.iter().position(|change| change.at_ns > self.end_ns).unwrap_or(changes.len());
        self.next_change = next - (changes.len() - until) as u64;
        let changes = &changes[..until];
        let lasts = |(n, change): &(usize, &GpuChange)| {
            let mut later = changes[n + 1..].iter().take_while(|later| later.at_ns <= self.begin_ns);
            !later.any(|later| later.replaces(change))
        };
        let written = changes.iter().enumerate().filter(lasts);
        written.map(|(_, change)| change).try_for_each(|change| self.file.gpu_change(change, self.begin_ns))
    }

    /// The jobs, as long as the positions in their events mean the GPUs of this file.
    fn jobs(&self) -> Option<MutexGuard<'_, Jobs>> {
        let jobs = self.sent.ledger.open();
        (jobs.devices() == self.file.uuids()).then_some(jobs)
    }

    /// Writes events from the begin on; the last ones may lie after the end. Writes none once positions mean other
    /// GPUs. If an owner sent more than its share, the rest of its events is left out.
    fn write_events(&mut self) -> rusqlite::Result<()> {
        let (log, from) = (&self.sent.log, self.next_event);
        let Some(extent) = self.jobs().map(|_jobs| log.extent(from)) else { return Ok(()) };
        let most_bytes = self.allowance.so_far(self.now_ns());
        let mut read = 0;
        // If positions of GPUs get a new meaning meanwhile, the log is empty.
        for (number, event) in log.read(extent, &mut self.given_events, most_bytes) {
            read += 1;
            if event.at_ns >= self.begin_ns {
                self.file.annotation(number, &event)?;
            }
        }
        // At the first look, what is no longer kept was sent long before, and is not lost.
        self.lost_events += if from > 0 { extent.next - from } else { extent.kept } - read;
        self.next_event = extent.next;
        Ok(())
    }

    fn write_phases(&mut self) -> rusqlite::Result<()> {
        let most = self.allowance.so_far(self.now_ns()) / PHASE_BYTES;
        let ended = {
            let log = self.sent.ledger.ended();
            let mut ended = Vec::new();
            let shelves = [&log.phases, &log.layers].into_iter().zip(&mut self.given_phases);
            for (next, (shelf, given)) in self.next_phases.iter_mut().zip(shelves) {
                let (new, lost) = shelf.some_since(*next, given, most);
                // At the first look, what is no longer kept ended long before, and is not lost.
                self.lost_phases += if *next > 0 { lost } else { (shelf.kept() - new.len()) as u64 };
                *next = shelf.count();
                ended.extend(new);
            }
            ended
        };
        // The end of a capture may still move, so phases that end a little later are kept; of one that is ended early, those alone
        // that began before.
        let latest_ns = if self.is_cut { self.end_ns } else { i64::MAX };
        let is_within =
            |one: &&Arc<Attributed>| one.ended.end_ns >= self.begin_ns && one.ended.open.begin_ns <= latest_ns;
        let mut within = ended.iter().filter(is_within);
        within.try_for_each(|attributed| self.file.phase(attributed))
    }

    /// Writes the steps and phases that are open at the end, with their memory up to then; what finds no room counts as lost.
    fn write_open(&mut self, end_ns: i64) -> rusqlite::Result<()> {
        let Some(open) = self.jobs().map(|jobs| open_at(&jobs, end_ns)) else { return Ok(()) };
        let uuids: Arc<[String]> = self.file.uuids().into();
        let (count, mut rows, mut written) = (open.len(), 0, 0);
        for ended in open {
            rows += 1 + ended.gpus.as_ref().map_or(0, |gpus| gpus.len());
            if rows > MOST_OPEN_ROWS {
                break;
            }
            self.file.phase(&attribute(ended, &self.view.rings, &self.view.gpus, &uuids))?;
            written += 1;
        }
        self.lost_phases += (count - written) as u64;
        Ok(())
    }

    fn write_ranks(&mut self) -> rusqlite::Result<()> {
        let known: Vec<_> = {
            let Some(jobs) = self.jobs() else { return Ok(()) };
            jobs.ranks().map(|(job, number, rank)| ((job.clone(), number), KnownRank::of(rank))).collect()
        };
        for (who, rank) in known {
            let rank = rank.after(self.ranks.get(&who));
            if self.ranks.get(&who) != Some(&rank) {
                self.file.rank(&who.0, who.1, &rank)?;
                self.ranks.insert(who, rank);
            }
        }
        Ok(())
    }

    fn write_findings(&mut self) -> rusqlite::Result<()> {
        let found = self.findings.between(self.begin_ns, self.end_ns);
        let mut new = found.iter().filter(|row| !self.written.contains(row));
        new.try_for_each(|row| self.file.finding(row))?;
        self.written = found;
        Ok(())
    }
}

/// The entries of a log within an interval, from `next` on. Moves `next` behind them.
pub(super) fn new_within(log: Option<&TickLog>, next: &mut u64, begin_ns: i64, end_ns: i64) -> Vec<Sweep> {
    let Some(log) = log else { return Vec::new() };
    let (mut new, count) = log.since(*next);
    // Entries after the end are left, in case the end moves.
    let later = new.iter().rev().take_while(|noted| noted.end_ns > end_ns).count();
    *next = count - later as u64;
    new.truncate(new.len() - later);
    new.retain(|noted| noted.begin_ns >= begin_ns);
    new
}

fn write_trigger(file: &RecordingWriter, trigger: &Trigger) -> rusqlite::Result<()> {
    let of = match &trigger.reason {
        Reason::Oom { job, rank } => Some((job, *rank)),
        Reason::Finding(_) | Reason::Asked => None,
    };
    file.trigger(trigger.at_ns, trigger.reason.label(), of, (&trigger.note, &trigger.owner_text()))
}

/// What ranks have open that began before a time, as if it had ended then: the innermost of each rank first, and owners in turn, so
/// that one with many ranks takes no other's room.
pub(super) fn open_at(jobs: &Jobs, end_ns: i64) -> Vec<Ended> {
    let mut open = Vec::new();
    let mut ranks_of: BTreeMap<&Scope, usize> = BTreeMap::new();
    for (job, number, rank) in jobs.ranks() {
        let nth = ranks_of.entry(job.scope()).or_default();
        // No more of one owner can be written.
        if *nth >= MOST_OPEN_ROWS {
            continue;
        }
        let own = rank.open.iter().rev().filter(|open| open.kind != Kind::Layer && open.begin_ns < end_ns);
        open.extend(own.enumerate().map(|(depth, one)| ((depth, *nth), ended_at(job, number, rank, one, end_ns))));
        *nth += 1;
    }
    open.sort_by_key(|(turn, _)| *turn);
    open.into_iter().map(|(_, ended)| ended).collect()
}

fn ended_at(job: &JobId, number: u32, rank: &Rank, open: &Open, end_ns: i64) -> Ended {
    Ended {
        job: job.clone(),
        rank: number,
        open: open.bare(),
        end_ns,
        by: EndedBy::StillOpen,
        memory: None,
        gpus: rank.gpus.clone(),
        pid: rank.pid,
        waiting: None,
    }
}
