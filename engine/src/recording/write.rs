//! Writes one recording, row by row, in transactions.
//!
//! Enters: rows, with times of the timeline. Leaves: the file, with Unix times. Invariant: all times of one file are
//! shifted by the same amount, so that they stay as far apart as they were.

use super::jobs::Texts;
use super::schema;
use super::state::State;
use crate::sample::Sweep;
use highwater_core::detect::{Finding, Said};
use highwater_core::gpu::{Became, GpuChange, GpuState, UsagePoint};
use highwater_core::jobs::{Event, JobId, Profile, Rank};
use highwater_core::phases::{Attributed, PhaseMemory};
use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{Connection, ToSql, params};
use serde::Serialize;
use std::cell::RefCell;
use std::path::Path;

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
    /// The GPU that it is about.
    pub gpu_uuid: Option<String>,
    /// The job that it is about.
    pub job: Option<JobId>,
    /// The rank that it is about.
    pub rank: Option<u32>,
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
    /// The numbers behind it, by name, and `waiting_ranks`, the ranks that wait for this one, where there are any.
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
        let evidence = numbers.chain(waiting.map(|ranks| ("waiting_ranks".to_owned(), ranks.as_slice().into())));
        Self {
            id: finding.id,
            kind: sign.kind.label(),
            severity: sign.severity.label().to_owned(),
            certainty: sign.certainty.label().to_owned(),
            gpu_uuid: finding.gpu.as_ref().map(|(_, uuid)| uuid.clone()),
            job: subject.job.clone(),
            rank: subject.rank,
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
pub struct File {
    connection: Connection,
    shift_ns: i64,
    uuids: Vec<String>,
    jobs: RefCell<Texts>,
}

impl File {
    /// Begins the file and its first transaction.
    pub fn create(
        path: &Path,
        (most_bytes, mode): (u64, u32),
        shift_ns: i64,
        uuids: Vec<String>,
    ) -> Result<Self, schema::Trouble> {
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

    /// The text of a job in this file, whose table `jobs` has it from now on.
    fn job(&self, id: &JobId) -> rusqlite::Result<String> {
        let (job, is_new) = self.jobs.borrow_mut().of(id);
        if is_new {
            let row = params![job, &**id.name(), id.scope().namespace(), id.scope().user()];
            self.put("INSERT OR REPLACE INTO jobs VALUES (?1, ?2, ?3, ?4)", row)?;
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
        self.put("INSERT OR REPLACE INTO meta VALUES (?1, ?2)", params![key, value])
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
        self.put(
            "INSERT OR REPLACE INTO gpus VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, NULL)",
            params![
                place(gpu),
                device.index,
                device.uuid,
                device.name,
                device.pci_bus_id,
                device.parent_uuid,
                device.mig_profile,
                device.driver_version,
                state.total_bytes().map(whole),
                state.reserved_bytes().map(whole)
            ],
        )
    }

    /// Writes until when the memory of a GPU is known.
    pub fn known_until(&self, gpu: usize, until_ns: i64) -> rusqlite::Result<()> {
        self.put("UPDATE gpus SET known_until_ns = ?2 WHERE gpu = ?1", params![place(gpu), self.unix(until_ns)])
    }

    /// Writes when a sweep began and ended, and which GPUs it skipped.
    pub fn tick(&self, sweep: Sweep) -> rusqlite::Result<()> {
        let (begin_ns, end_ns) = (self.unix(sweep.begin_ns), self.unix(sweep.end_ns));
        let row = params![begin_ns, end_ns, sweep.skipped.cast_signed()];
        self.put("INSERT OR IGNORE INTO ticks VALUES (?1, ?2, ?3)", row)
    }

    /// Writes that the detectors looked.
    pub fn turn(&self, at_ns: i64) -> rusqlite::Result<()> {
        self.put("INSERT OR IGNORE INTO turns VALUES (?1)", [self.unix(at_ns)])
    }

    /// Writes a change of memory, the `nth` of those at its time; `None` begins a gap.
    pub fn sample(&self, gpu: usize, at_ns: i64, nth: u32, used: Option<u64>) -> rusqlite::Result<()> {
        let row = params![place(gpu), self.unix(at_ns), nth, used.map(whole)];
        self.put("INSERT INTO samples VALUES (?1, ?2, ?3, ?4)", row)
    }

    /// Writes a reading of power and utilization.
    pub fn usage(&self, gpu: usize, point: UsagePoint) -> rusqlite::Result<()> {
        let (at_ns, reasons) = (self.unix(point.at_ns), point.throttle_reasons.map(whole));
        let row = params![place(gpu), at_ns, point.power_watts, point.utilization_ratio, reasons];
        self.put("INSERT OR IGNORE INTO usage VALUES (?1, ?2, ?3, ?4, ?5)", row)
    }

    /// Writes what became of a GPU. A change before the begin of the file gets the begin as its time.
    pub fn gpu_change(&self, change: &GpuChange, begin_ns: i64) -> rusqlite::Result<()> {
        let (at_ns, gpu) = (self.unix(change.at_ns.max(begin_ns)), place(change.gpu));
        match &change.what {
            Became::Health { health, trouble } => {
                let trouble = Some(trouble).filter(|trouble| !trouble.is_empty());
                let row = params![at_ns, gpu, health.label(), trouble];
                self.put("INSERT INTO health VALUES (NULL, ?1, ?2, ?3, ?4)", row)
            }
            Became::Xid { xid, seen } => {
                let row = params![at_ns, gpu, whole(*xid), whole(seen.count), self.unix(seen.last_ns)];
                self.put("INSERT INTO xids VALUES (NULL, ?1, ?2, ?3, ?4, ?5)", row)
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
        let row: [&dyn ToSql; 18] = [
            &whole(number),
            &self.unix(event.at_ns),
            &word(&event.event),
            &word(&event.kind),
            &event.name,
            &job,
            &event.rank,
            &event.world_size,
            &event.step.map(whole),
            &self.gpus(event.gpus.as_deref()),
            &event.pid,
            &memory.allocated.map(whole),
            &memory.reserved.map(whole),
            &memory.active.map(whole),
            &memory.inactive_split.map(whole),
            &memory.alloc_retries.map(whole),
            &memory.ooms.map(whole),
            &attributes.map(|all| serde_json::Value::Object(all).to_string()),
        ];
        self.put(
            "INSERT INTO annotations VALUES \
             (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)",
            row,
        )
    }

    /// Writes a step or phase that has ended, with the memory of its GPUs.
    pub fn phase(&self, attributed: &Attributed) -> rusqlite::Result<()> {
        let (ended, open) = (&attributed.ended, &attributed.ended.open);
        let (begin_ns, end_ns) = (self.unix(open.begin_ns), self.unix(ended.end_ns));
        let (kind, step) = (word(&open.kind), open.step.map(whole));
        let row = params![self.job(&ended.job)?, ended.rank, kind, &*open.name, step, begin_ns, end_ns];
        self.put("INSERT INTO phases VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7)", row)?;
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
        self.put(
            "INSERT OR REPLACE INTO phase_memory VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            params![
                phase,
                place(gpu),
                memory.begin_bytes.map(whole),
                memory.end_bytes.map(whole),
                memory.peak_bytes.map(whole),
                memory.min_bytes.map(whole),
                memory.mean_bytes,
                memory.drop_bytes.map(whole),
                memory.gap_ns,
                memory.usage.energy_joules,
                memory.usage.idle_seconds,
                memory.outside_allocator_bytes.map(whole)
            ],
        )
    }

    /// Writes a rank's profile in place of the one with the same number, with at most so many records; the others are among
    /// those that it lacks. Returns how many it has.
    pub fn profile(
        &self,
        number: i64,
        (job, rank): (&JobId, u32),
        profile: &Profile,
        most: usize,
    ) -> rusqlite::Result<usize> {
        self.put("DELETE FROM layer_records WHERE profile = ?1", [number])?;
        let (begin_ns, end_ns) = (self.unix(profile.begin_ns), self.unix(profile.end_ns));
        let (count, left_out) = (profile.count.min(most), profile.count.saturating_sub(most) as u64);
        let missing = whole(profile.missing.saturating_add(left_out));
        let row = params![number, self.job(job)?, rank, profile.step.map(whole), begin_ns, end_ns, missing];
        self.put("INSERT OR REPLACE INTO layer_profiles VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)", row)?;
        for (nth, record) in profile.records().take(count).enumerate() {
            let layer = &record.layer;
            let row = params![
                number,
                place(nth),
                &*record.name,
                layer.direction.label(),
                self.unix(record.at_ns),
                record.allocated.map(whole),
                record.reserved.map(whole),
                layer.growth,
                layer.activations.map(whole),
                layer.parameters.map(whole),
                layer.gathered.map(whole),
                layer.gathered_sum.map(whole),
                layer.duration_ns.map(whole)
            ];
            self.put("INSERT INTO layer_records VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)", row)?;
        }
        Ok(count)
    }

    /// Writes what is known of a rank, in place of what the file has.
    pub fn rank(&self, job: &JobId, number: u32, rank: &KnownRank) -> rusqlite::Result<()> {
        let axes = rank.mesh.as_ref().map(|mesh| mesh.axes().map(|(name, at)| (name.to_owned(), at.into())));
        let mesh = axes.map(|axes| serde_json::Value::Object(axes.collect()).to_string());
        let row = params![self.job(job)?, number, rank.world_size, rank.pid, self.gpus(rank.gpus.as_deref()), mesh];
        self.put("INSERT OR REPLACE INTO ranks VALUES (?1, ?2, ?3, ?4, ?5, ?6)", row)
    }

    /// Writes a finding, in place of an earlier state of it.
    pub fn finding(&self, row: &FindingRow) -> rusqlite::Result<()> {
        let job = row.job.as_ref().map(|job| self.job(job)).transpose()?;
        self.put(
            "INSERT OR REPLACE INTO findings VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, \
             ?15, ?16, ?17)",
            params![
                whole(row.id),
                row.kind,
                row.severity,
                row.certainty,
                row.gpu_uuid,
                job,
                row.rank,
                self.unix(row.begin_ns),
                row.end_ns.map(|at_ns| self.unix(at_ns)),
                row.what,
                row.why,
                row.advice,
                row.evidence.to_string(),
                self.unix(row.seen_ns),
                self.unix(row.first.seen_ns),
                row.first.what,
                row.first.why
            ],
        )
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
        let row = params![self.unix(at_ns), reason, job, of.map(|(_, rank)| rank), note, owner];
        self.put("INSERT INTO triggers VALUES (?1, ?2, ?3, ?4, ?5, ?6)", row)
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
}
