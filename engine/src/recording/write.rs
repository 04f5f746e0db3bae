//! Writes one recording, row by row, in transactions.
//!
//! Enters: rows, with times of the timeline. Leaves: the file, with Unix times. Invariant: all times of one file are
//! shifted by the same amount, so that they stay as far apart as they were.

use super::jobs::Texts;
use super::schema;
use super::state::State;
use crate::sample::Sweep;
use highwater_core::detect::{Finding, LagCause, Said};
use highwater_core::gpu::{BreakdownPoint, Changed, GpuChange, GpuState, UsagePoint};
use highwater_core::jobs::{Event, JobId, Profile, Rank};
use highwater_core::phases::{Attributed, PhaseMemory};
use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{Connection, ToSql, params};
use serde::Serialize;
use std::cell::RefCell;
use std::path::Path;

/// Inserts a row. Each value is written beside its column's name, so that values cannot get into the wrong columns.
macro_rules! insert {
    ($file:expr, $into:literal { $first:ident: $first_value:expr $(, $column:ident: $value:expr)* $(,)? }) => {
        $file.put(
            concat!(
                $into, " (", stringify!($first), $(", ", stringify!($column),)* ") VALUES (?", $(placeholder!($column),)* ")"
            ),
            params![$first_value $(, $value)*],
        )
    };
}

/// One more value of a statement.
macro_rules! placeholder {
    ($column:ident) => {
        ", ?"
    };
}

/// A whole number that the database cannot hold becomes its largest; no real one comes near.
fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A position in the database's form.
fn place(position: usize) -> i64 {
    i64::try_from(position).unwrap_or(i64::MAX)
}

/// A name in its wire form: `begin`, `phase`.
pub(crate) fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|json| json.as_str().map(str::to_owned)).unwrap_or_default()
}

/// One finding in the form in which recordings store it. Times are nanoseconds of the timeline.
#[derive(Debug, Clone, PartialEq)]
pub struct FindingRow {
    /// Its number, the same for its whole life. A newer row with the same number replaces the older one.
    pub id: u64,
    /// Its kind, the value of the label `finding`.
    pub kind: &'static str,
    /// `info`, `warning` or `critical`.
    pub severity: String,
    /// `suspected`, `observed` or `confirmed`.
    pub certainty: String,
    /// Why a rank is late, the word of a [`LagCause`].
    pub lag_cause: Option<&'static str>,
    /// The GPU that it is about.
    pub gpu_uuid: Option<String>,
    /// The job that it is about.
    pub job: Option<JobId>,
    /// The rank that it is about.
    pub rank: Option<u32>,
    /// The number of its incident: findings of one cause have the same.
    pub incident: u64,
    /// Since when it holds.
    pub begin_ns: i64,
    /// When it ended; `None` while it holds.
    pub end_ns: Option<i64>,
    /// What was found, in the words of the newest sign.
    pub what: String,
    /// Why we think so.
    pub why: String,
    /// What to try next.
    pub advice: String,
    /// The numbers behind it, by name; `waiting_ranks`, the ranks that wait for this one, where there are any; and `workloads`,
    /// where they are known, each as `pod namespace/pod/container` or `Slurm step 77.0 of user 1000`.
    pub evidence: serde_json::Value,
    /// When the newest sign was seen.
    pub seen_ns: i64,
    /// What the first sign said, and when.
    pub first: Said,
}

impl FindingRow {
    /// A finding as it is now.
    pub fn of(finding: &Finding) -> Self {
        let (sign, subject) = (&finding.sign, &finding.sign.subject);
        let numbers = sign.evidence.iter().map(|evidence| (evidence.name.to_owned(), evidence.value.into()));
        let waiting = Some(&sign.waiting_ranks).filter(|ranks| !ranks.is_empty());
        let workloads = Some(finding.workload_names()).filter(|names| !names.is_empty());
        let evidence = numbers
            .chain(waiting.map(|ranks| ("waiting_ranks".to_owned(), ranks.as_slice().into())))
            .chain(workloads.map(|names| ("workloads".to_owned(), names.into())));
        Self {
            id: finding.id,
            kind: sign.kind.label(),
            severity: sign.severity.label().to_owned(),
            certainty: sign.certainty.label().to_owned(),
            lag_cause: sign.lag_cause.map(LagCause::label),
            gpu_uuid: finding.gpu.as_ref().map(|(_, uuid)| uuid.clone()),
            job: subject.job.clone(),
            rank: subject.rank,
            incident: finding.incident,
            begin_ns: sign.begin_ns,
            end_ns: finding.ended_ns,
            what: sign.text.what.clone(),
            why: sign.text.why.clone(),
            advice: sign.text.advice.clone(),
            evidence: serde_json::Value::Object(evidence.collect()),
            seen_ns: finding.seen_ns,
            first: finding.first.clone(),
        }
    }
}

/// A recording that is being written.
#[derive(Debug)]
pub struct RecordingWriter {
    connection: Connection,
    shift_ns: i64,
    uuids: Vec<String>,
    jobs: RefCell<Texts>,
}

impl RecordingWriter {
    /// Begins the file and its first transaction.
    pub fn create(
        path: &Path,
        (most_bytes, mode): (u64, u32),
        shift_ns: i64,
        uuids: Vec<String>,
    ) -> Result<Self, schema::WriteError> {
        Ok(Self { connection: schema::create(path, most_bytes, mode)?, shift_ns, uuids, jobs: RefCell::default() })
    }

    /// The GPUs in the file, by position.
    pub fn uuids(&self) -> &[String] {
        &self.uuids
    }

    /// Whether no transaction is open.
    pub fn is_idle(&self) -> bool {
        self.connection.is_autocommit()
    }

    /// Begins a transaction.
    pub fn begin(&self) -> rusqlite::Result<()> {
        self.connection.execute_batch("BEGIN IMMEDIATE")
    }

    /// Commits the transaction.
    pub fn commit(&self) -> rusqlite::Result<()> {
        self.connection.execute_batch("COMMIT")
    }

    /// Rolls back what was not committed; an error may have done so already.
    pub fn roll_back(&self) {
        if !self.connection.is_autocommit()
            && let Err(error) = self.connection.execute_batch("ROLLBACK")
        {
            tracing::debug!(%error, "a transaction could not be rolled back");
        }
        self.jobs.borrow_mut().roll_back();
    }

    /// The text that identifies a job in this file. Writes its row of the table `jobs` if it is missing.
    fn job(&self, id: &JobId) -> rusqlite::Result<String> {
        let (job, is_new) = self.jobs.borrow_mut().of(id);
        if is_new {
            let (name, scope) = (&**id.name(), id.scope());
            insert!(self, "INSERT OR REPLACE INTO jobs" { job: job, name: name, namespace: scope.namespace(), user: scope.user() })?;
        }
        Ok(job)
    }

    /// Makes what was committed survive a power failure.
    pub fn sync(&self) -> rusqlite::Result<()> {
        schema::checkpoint(&self.connection)
    }

    /// Lets the file grow by what its last transaction needs, if it has grown to its limit.
    pub fn allow_end(&self) -> rusqlite::Result<()> {
        let most: i64 = self.connection.query_row("PRAGMA max_page_count", [], |row| row.get(0))?;
        self.connection.pragma_update(None, "max_page_count", most.saturating_add(64))
    }

    /// Ends the file, which then opens anywhere.
    pub fn close(self) -> rusqlite::Result<()> {
        schema::close(self.connection)
    }

    /// Writes a fact about the whole file.
    pub fn meta(&self, key: &str, value: impl ToSql) -> rusqlite::Result<()> {
        insert!(self, "INSERT OR REPLACE INTO meta" { key: key, value: value })
    }

    /// Writes a time among these facts.
    pub fn meta_time(&self, key: &str, at_ns: i64) -> rusqlite::Result<()> {
        self.meta(key, self.unix(at_ns))
    }

    /// Writes the state of the recording.
    pub fn state(&self, state: State) -> rusqlite::Result<()> {
        self.meta("state", state.label())
    }

    /// Writes a GPU, or what is known of it now.
    pub fn gpu(&self, gpu: usize, state: &GpuState) -> rusqlite::Result<()> {
        let device = &state.device;
        insert!(self, "INSERT OR REPLACE INTO gpus" {
            gpu: place(gpu),
            gpu_index: device.index,
            uuid: device.uuid,
            name: device.name,
            pci_bus_id: device.pci_bus_id,
            parent_uuid: device.parent_uuid,
            mig_profile: device.mig_profile,
            driver_version: device.driver_version,
            memory_total_bytes: state.total_bytes().map(whole),
            memory_reserved_bytes: state.reserved_bytes().map(whole),
        })
    }

    /// Writes until when the memory of a GPU is known.
    pub fn known_until(&self, gpu: usize, until_ns: i64) -> rusqlite::Result<()> {
        self.put("UPDATE gpus SET known_until_ns = ?2 WHERE gpu = ?1", params![place(gpu), self.unix(until_ns)])
    }

    /// Writes when a sweep began and ended, and which GPUs it skipped.
    pub fn tick(&self, sweep: Sweep) -> rusqlite::Result<()> {
        insert!(self, "INSERT OR IGNORE INTO ticks" {
            begin_ns: self.unix(sweep.begin_ns),
            end_ns: self.unix(sweep.end_ns),
            skipped: sweep.skipped.cast_signed(),
        })
    }

    /// Writes that the detectors looked.
    pub fn turn(&self, at_ns: i64) -> rusqlite::Result<()> {
        insert!(self, "INSERT OR IGNORE INTO turns" { at_ns: self.unix(at_ns) })
    }

    /// Writes a change of memory, the `nth` of those at its time; `None` begins a gap.
    pub fn sample(&self, gpu: usize, at_ns: i64, nth: u32, used: Option<u64>) -> rusqlite::Result<()> {
        let (gpu, at_ns) = (place(gpu), self.unix(at_ns));
        insert!(self, "INSERT INTO samples" { gpu: gpu, at_ns: at_ns, nth: nth, used_bytes: used.map(whole) })
    }

    /// Writes a reading of power and utilization.
    pub fn usage(&self, gpu: usize, point: UsagePoint) -> rusqlite::Result<()> {
        insert!(self, "INSERT OR IGNORE INTO usage" {
            gpu: place(gpu),
            at_ns: self.unix(point.at_ns),
            power_watts: point.power_watts,
            utilization_ratio: point.utilization_ratio,
            throttle_reasons: point.throttle_reasons.map(whole),
            sm_active_ratio: point.activity.sm_active_ratio,
            sm_occupancy_ratio: point.activity.sm_occupancy_ratio,
            tensor_active_ratio: point.activity.tensor_active_ratio,
            dram_active_ratio: point.activity.dram_active_ratio,
        })
    }

    /// Writes who held memory of a GPU from a time on. What holds at the begin of the file gets the begin as its time.
    pub fn breakdown(&self, gpu: usize, point: BreakdownPoint, begin_ns: i64) -> rusqlite::Result<()> {
        insert!(self, "INSERT OR REPLACE INTO breakdown" {
            gpu: place(gpu),
            at_ns: self.unix(point.at_ns.max(begin_ns)),
            allocated_bytes: point.parts.allocated.map(whole),
            cached_bytes: point.parts.cached.map(whole),
            outside_bytes: point.parts.outside.map(whole),
            process_bytes: point.parts.processes.map(whole),
            others_bytes: point.parts.others.map(whole),
        })
    }

    /// Writes a change of a GPU. A change before the begin of the file gets the begin as its time.
    pub fn gpu_change(&self, change: &GpuChange, begin_ns: i64) -> rusqlite::Result<()> {
        let (at_ns, gpu) = (self.unix(change.at_ns.max(begin_ns)), place(change.gpu));
        match &change.what {
            Changed::Health { health, trouble } => {
                let trouble = Some(trouble).filter(|trouble| !trouble.is_empty());
                insert!(self, "INSERT INTO health" { at_ns: at_ns, gpu: gpu, health: health.label(), trouble: trouble })
            }
            Changed::Xid { xid, seen } => {
                let (xid, count, last_ns) = (whole(*xid), whole(seen.count), self.unix(seen.last_ns));
                insert!(self, "INSERT INTO xids" { at_ns: at_ns, gpu: gpu, xid: xid, count: count, last_ns: last_ns })
            }
        }
    }

    /// Writes what a job sent, with its number among all events.
    pub fn annotation(&self, number: u64, event: &Event) -> rusqlite::Result<()> {
        let memory = event.memory.unwrap_or_default();
        let attributes = event.attributes.as_ref().map(|all| {
            let value = |value| serde_json::to_value(value).unwrap_or_default();
            serde_json::Map::from_iter(all.iter().map(|(name, scalar)| (name.to_string(), value(scalar))))
        });
        let job = self.job(&JobId::new(event.scope.clone().unwrap_or_default(), &event.job))?;
        insert!(self, "INSERT INTO annotations" {
            id: whole(number),
            at_ns: self.unix(event.at_ns),
            event: word(&event.event),
            kind: word(&event.kind),
            name: event.name,
            job: job,
            rank: event.rank,
            world_size: event.world_size,
            step: event.step.map(whole),
            gpus: self.gpus(event.gpus.as_deref()),
            pid: event.pid,
            allocated_bytes: memory.allocated.map(whole),
            reserved_bytes: memory.reserved.map(whole),
            active_bytes: memory.active.map(whole),
            inactive_split_bytes: memory.inactive_split.map(whole),
            alloc_retries: memory.alloc_retries.map(whole),
            ooms: memory.ooms.map(whole),
            attributes: attributes.map(|all| serde_json::Value::Object(all).to_string()),
        })
    }

    /// Writes a step or phase that has ended, with the memory of its GPUs.
    pub fn phase(&self, attributed: &Attributed) -> rusqlite::Result<()> {
        let (ended, open) = (&attributed.ended, &attributed.ended.open);
        insert!(self, "INSERT INTO phases" {
            job: self.job(&ended.job)?,
            rank: ended.rank,
            kind: word(&open.kind),
            name: &*open.name,
            step: open.step.map(whole),
            begin_ns: self.unix(open.begin_ns),
            end_ns: self.unix(ended.end_ns),
            ended_by: word(&ended.by),
        })?;
        let phase = self.connection.last_insert_rowid();
        for memory in &attributed.gpus {
            let uuid = attributed.uuid_of(memory);
            if let Some(gpu) = self.uuids.iter().position(|known| Some(known.as_str()) == uuid) {
                self.phase_memory(phase, gpu, memory)?;
            }
        }
        Ok(())
    }

    fn phase_memory(&self, phase: i64, gpu: usize, memory: &PhaseMemory) -> rusqlite::Result<()> {
        insert!(self, "INSERT OR REPLACE INTO phase_memory" {
            phase: phase,
            gpu: place(gpu),
            begin_bytes: memory.begin_bytes.map(whole),
            end_bytes: memory.end_bytes.map(whole),
            peak_bytes: memory.peak_bytes.map(whole),
            min_bytes: memory.min_bytes.map(whole),
            mean_bytes: memory.mean_bytes,
            drop_bytes: memory.drop_bytes.map(whole),
            gap_ns: memory.gap_ns,
            energy_joules: memory.usage.energy_joules,
            idle_seconds: memory.usage.idle_seconds,
            outside_allocator_bytes: memory.outside_allocator_bytes.map(whole),
        })
    }

    /// Writes a rank's profile in place of the one with the same number, with at most `most` records. Further records are
    /// counted as missing. Returns the number of records written.
    pub fn profile(
        &self,
        number: i64,
        (job, rank): (&JobId, u32),
        profile: &Profile,
        most: usize,
    ) -> rusqlite::Result<usize> {
        self.put("DELETE FROM layer_records WHERE profile = ?1", [number])?;
        let (count, left_out) = (profile.count.min(most), profile.count.saturating_sub(most) as u64);
        insert!(self, "INSERT OR REPLACE INTO layer_profiles" {
            id: number,
            job: self.job(job)?,
            rank: rank,
            step: profile.step.map(whole),
            begin_ns: self.unix(profile.begin_ns),
            end_ns: self.unix(profile.end_ns),
            missing: whole(profile.missing.saturating_add(left_out)),
        })?;
        for (nth, record) in profile.records().take(count).enumerate() {
            let layer = &record.layer;
            insert!(self, "INSERT INTO layer_records" {
                profile: number,
                nth: place(nth),
                name: &*record.name,
                direction: layer.direction.label(),
                at_ns: self.unix(record.at_ns),
                allocated_bytes: record.allocated.map(whole),
                reserved_bytes: record.reserved.map(whole),
                growth_bytes: layer.growth,
                activation_bytes: layer.activations.map(whole),
                parameter_bytes: layer.parameters.map(whole),
                gathered_bytes: layer.gathered.map(whole),
                gathered_sum_bytes: layer.gathered_sum.map(whole),
                duration_ns: layer.duration_ns.map(whole),
                modules: layer.modules.map(whole),
                peak_bytes: layer.peak.map(whole),
                held_bytes: layer.held,
                recompute_bytes: layer.recompute,
            })?;
        }
        Ok(count)
    }

    /// Writes what is known of a rank, in place of what the file has.
    pub fn rank(&self, job: &JobId, number: u32, rank: &KnownRank) -> rusqlite::Result<()> {
        let axes = rank.mesh.as_ref().map(|mesh| mesh.axes().map(|(name, at)| (name.to_owned(), at.into())));
        let mesh = axes.map(|axes| serde_json::Value::Object(axes.collect()).to_string());
        insert!(self, "INSERT OR REPLACE INTO ranks" {
            job: self.job(job)?,
            rank: number,
            world_size: rank.world_size,
            pid: rank.pid,
            gpus: self.gpus(rank.gpus.as_deref()),
            mesh: mesh,
        })
    }

    /// Writes a finding, in place of an earlier state of it.
    pub fn finding(&self, row: &FindingRow) -> rusqlite::Result<()> {
        let job = row.job.as_ref().map(|job| self.job(job)).transpose()?;
        insert!(self, "INSERT OR REPLACE INTO findings" {
            id: whole(row.id),
            kind: row.kind,
            severity: row.severity,
            certainty: row.certainty,
            lag_cause: row.lag_cause,
            gpu_uuid: row.gpu_uuid,
            job: job,
            rank: row.rank,
            incident: whole(row.incident),
            begin_ns: self.unix(row.begin_ns),
            end_ns: row.end_ns.map(|at_ns| self.unix(at_ns)),
            what: row.what,
            why: row.why,
            advice: row.advice,
            evidence: row.evidence.to_string(),
            seen_ns: self.unix(row.seen_ns),
            first_seen_ns: self.unix(row.first.seen_ns),
            first_what: row.first.what,
            first_why: row.first.why,
        })
    }

    /// Writes what asked for the capture, and when.
    pub fn trigger(
        &self,
        at_ns: i64,
        reason: &str,
        of: Option<(&JobId, u32)>,
        (note, owner): (&str, &str),
    ) -> rusqlite::Result<()> {
        let job = of.map(|(job, _)| self.job(job)).transpose()?;
        insert!(self, "INSERT INTO triggers" {
            at_ns: self.unix(at_ns),
            reason: reason,
            job: job,
            rank: of.map(|(_, rank)| rank),
            note: note,
            owner: owner,
        })
    }

    /// A time of the timeline in this file's form.
    pub fn unix(&self, at_ns: i64) -> i64 {
        at_ns.saturating_add(self.shift_ns)
    }

    /// UUIDs of GPUs as a JSON array.
    fn gpus(&self, positions: Option<&[usize]>) -> Json {
        let uuid = |position: &usize| self.uuids.get(*position).cloned();
        Json(positions.map(|positions| positions.iter().filter_map(uuid).collect()))
    }

    fn put(&self, sql: &str, row: impl rusqlite::Params) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql)?.execute(row).map(|_| ())
    }
}

/// A JSON array of texts, or nothing.
struct Json(Option<Vec<String>>);

impl ToSql for Json {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match &self.0 {
            Some(texts) => ToSqlOutput::Owned(Value::Text(serde_json::Value::from(texts.clone()).to_string())),
            None => ToSqlOutput::Borrowed(ValueRef::Null),
        })
    }
}

/// What is known of a rank while a recording is written.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownRank {
    world_size: Option<u32>,
    pid: Option<u32>,
    gpus: Option<std::sync::Arc<[usize]>>,
    mesh: Option<std::sync::Arc<highwater_core::mesh::Mesh>>,
}

impl KnownRank {
    /// What is known of this rank.
    pub fn of(rank: &Rank) -> Self {
        Self { world_size: rank.world_size, pid: rank.pid, gpus: rank.gpus.clone(), mesh: rank.mesh.clone() }
    }

    /// The same with the GPUs that it had before, if it has none: so a rank that has ended, whose GPUs a replay needs.
    #[must_use]
    pub fn after(self, before: Option<&Self>) -> Self {
        let gpus = self.gpus.or_else(|| before.and_then(|before| before.gpus.clone()));
        Self { gpus, ..self }
    }
}
