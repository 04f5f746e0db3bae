//! Allocations with their lifetimes, on their way into a `Tape`.
//!
//! Enters: what was allocated and when it was freed, in any order. Leaves: the memory of each GPU as the sum of all that
//! was allocated at a time.

use highwater_core::clock::A_DATE_NS;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::SkippedLines;
use highwater_engine::recording::lines::refuse;
use highwater_engine::recording::rows::MOST_GPUS;
use highwater_engine::recording::tape::{Allocation, Format, Tape, Times};
use highwater_engine::recording::track::Track;
use std::collections::BTreeMap;
use std::path::Path;

/// The most allocations of a file: 256 MiB with the changes of memory that they make.
pub(super) const MOST_ALLOCATIONS: usize = 1 << 20;

/// What neither profiler's files say of memory.
pub(super) const MISSING: &[&str] = &[
    "memory that CUDA itself takes",
    "pinned and pageable memory of the host (left out)",
    "steps and phases (NVTX ranges are not read)",
];

/// What was allocated on a device. `end_ns` is `None` if it was never freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lifetime {
    pub device: u32,
    pub begin_ns: i64,
    pub end_ns: Option<i64>,
    pub bytes: u64,
}

/// The recording with these allocations, and with what the file says of the GPUs. It ends with the last event. Its times are dates
/// if they can be.
pub(super) fn tape(
    path: &Path,
    format: Format,
    lifetimes: &[Lifetime],
    facts: &BTreeMap<u32, Device>,
    skipped: SkippedLines,
) -> Result<Tape, OpenError> {
    let begin_ns = lifetimes.iter().map(|one| one.begin_ns).min().unwrap_or_default();
    let ends = lifetimes.iter().map(|one| one.end_ns.unwrap_or(one.begin_ns).max(one.begin_ns));
    let end_ns = ends.max().unwrap_or_default();
    let times = if begin_ns >= A_DATE_NS { Times::Unix } else { Times::Relative };
    let format = Format { times, ..format };
    let mut changes: BTreeMap<u32, Vec<(i64, i128)>> = BTreeMap::new();
    for one in lifetimes {
        if changes.len() >= MOST_GPUS && !changes.contains_key(&one.device) {
            return Err(refuse("recording_too_large", path, format!("it has more than {MOST_GPUS} GPUs")));
        }
        let of = changes.entry(one.device).or_default();
        of.push((one.begin_ns, i128::from(one.bytes)));
        of.extend(one.end_ns.map(|end_ns| (end_ns, -i128::from(one.bytes))));
    }
    let positions: BTreeMap<u32, usize> = changes.keys().enumerate().map(|(at, device)| (*device, at)).collect();
    let allocation = |one: &Lifetime| Allocation {
        gpu: positions[&one.device],
        begin_ns: one.begin_ns,
        end_ns: one.end_ns.unwrap_or(end_ns),
        bytes: one.bytes,
        is_freed: one.end_ns.is_some(),
    };
    let device = |device: &u32| {
        let known = facts.get(device).cloned().unwrap_or_default();
        Device { index: device.to_string(), ..known }
    };
    let gpu = |(of, changes)| (device(&of), Track::new(of, sums(changes, begin_ns, end_ns)));
    let mut tape = Tape::imported(path, format, changes.into_iter().map(gpu), skipped)?;
    tape.allocations = lifetimes.iter().map(allocation).collect();
    Ok(tape)
}

/// Memory in use after each change; `None`, a gap, where the sum is negative. Begins with 0 at `begin_ns`, unless the
/// first change is then. Changes at one time are added up first: memory that is freed and reused at once does not count
/// twice.
fn sums(mut changes: Vec<(i64, i128)>, begin_ns: i64, end_ns: i64) -> Vec<(i64, Option<u64>)> {
    changes.sort_unstable();
    let (mut sum, mut points) = (0_i128, Vec::new());
    if changes.first().is_some_and(|(at_ns, _)| *at_ns > begin_ns) {
        points.push((begin_ns, Some(0)));
    }
    for at in changes.chunk_by(|one, other| one.0 == other.0) {
        sum += at.iter().map(|(_, bytes)| bytes).sum::<i128>();
        points.push((at[0].0, u64::try_from(sum).ok()));
    }
    let last = points.last().and_then(|(_, used)| *used);
    points.push((end_ns, last));
    points
}

#[cfg(test)]
mod tests {
    use crate::replay::tape_of;
    use highwater_core::source::OpenError;
    use highwater_engine::recording::tape::{Allocation, Tape, Times};
    use rusqlite::{Connection, params};

    /// The table as nvprof 11 writes it.
    const NVPROF: &str = "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMORY (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, \
        memoryKind INT NOT NULL, address INT NOT NULL, bytes INT NOT NULL, start INT NOT NULL, end INT NOT NULL, \
        allocPC INT NOT NULL, freePC INT NOT NULL, processId INT NOT NULL, deviceId INT NOT NULL, \
        contextId INT NOT NULL, name INT NOT NULL)";
    /// The table as Nsight Systems 2024 exports it.
    const NSIGHT: &str = "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (start INTEGER NOT NULL, globalPid INTEGER, \
        deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, address INTEGER NOT NULL, pc INTEGER NOT NULL, \
        bytes INTEGER NOT NULL, memKind INTEGER NOT NULL, memoryOperationType INTEGER NOT NULL, name TEXT, \
        correlationId INTEGER, streamId INTEGER, localMemoryPoolAddress INTEGER)";

    fn imported(make: impl FnOnce(&Connection) -> rusqlite::Result<()>) -> Result<Tape, OpenError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("profile");
        let connection = Connection::open(&path).expect("created");
        connection.execute_batch("BEGIN").expect("begun");
        make(&connection).expect("good SQL");
        connection.execute_batch("COMMIT").expect("written");
        drop(connection);
        tape_of(&path)
    }

    /// Allocations of two devices: device, begin, end (0: never freed), bytes.
    fn lifetimes() -> Vec<(u32, i64, i64, u64)> {
        let mut random = 7_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut one = || {
            let begin_ns = 1_000 + next(5_000).cast_signed();
            let end_ns = if next(10) == 0 { 0 } else { begin_ns + next(900).cast_signed() };
            (u32::try_from(next(2)).expect("0 or 1"), begin_ns, end_ns, 1 + next(1 << 30))
        };
        (0..500).map(|_| one()).collect()
    }

    /// Compares every change of memory with the sum over all allocations at that time.
    fn agrees(tape: &Tape, expected: &[(u32, i64, i64, u64)]) {
        let end_ns = expected.iter().map(|one| one.1.max(one.2)).max().expect("some");
        assert_eq!((tape.format.times, tape.end_ns), (Times::Relative, end_ns));
        assert_eq!(tape.allocations.len(), expected.len());
        for (gpu, track) in tape.tracks.iter().enumerate() {
            let of = || expected.iter().filter(|one| one.0 as usize == gpu);
            for at_ns in 1_000..=end_ns {
                let holds = |one: &&(u32, i64, i64, u64)| one.1 <= at_ns && (one.2 == 0 || at_ns < one.2);
                let sum: u64 = of().filter(holds).map(|one| one.3).sum();
                assert_eq!(track.used_at(at_ns).unwrap_or(0), sum, "GPU {gpu} at {at_ns}");
            }
        }
    }

    #[test]
    fn memory_of_an_nvprof_profile_is_the_sum_of_what_is_allocated() {
        let expected = lifetimes();
        let tape = imported(|file| {
            file.execute_batch(NVPROF)?;
            file.execute_batch(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_DEVICE (_id_ INTEGER PRIMARY KEY, globalMemorySize INT, id INT);
                 INSERT INTO CUPTI_ACTIVITY_KIND_DEVICE VALUES (1, 5000, 0)",
            )?;
            let row = "INSERT INTO CUPTI_ACTIVITY_KIND_MEMORY VALUES (NULL, ?5, 9, ?4, ?2, ?3, 0, 0, 1, ?1, 1, 0)";
            for (device, begin_ns, end_ns, bytes) in &expected {
                file.execute(row, params![device, begin_ns, end_ns, bytes.cast_signed(), 3])?;
            }
            // Pinned memory is the host's; a row that ends before it begins, and one whose size is no number, are skipped.
            file.execute(row, params![0, 1, 2, 1_i64 << 40, 2])?;
            file.execute(row, params![0, 9, 2, 1, 3])?;
            file.execute(row, params![0, 1, 2, "many", 3]).map(|_| ())
        });
        let tape = tape.expect("a profile");
        agrees(&tape, &expected);
        assert_eq!(tape.skipped.count, 2);
        let sizes: Vec<_> = tape.devices.iter().map(|gpu| gpu.memory_total_bytes).collect();
        assert_eq!(sizes, [Some(5_000), None]);
        let held = tape.allocations.iter().filter(|one| !one.is_freed).count();
        assert_eq!(held, expected.iter().filter(|one| one.2 == 0).count());
    }

    #[test]
    fn memory_of_a_nsight_export_is_the_sum_of_what_is_allocated() {
        let expected = lifetimes();
        let tape = imported(|file| {
            file.execute_batch(NSIGHT)?;
            let row = "INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS (start, globalPid, deviceId, contextId, address, pc, bytes, \
                       memKind, memoryOperationType) VALUES (?2, 1, ?1, 1, ?3, 0, ?4, ?5, ?6)";
            for (address, (device, begin_ns, end_ns, bytes)) in expected.iter().enumerate() {
                let (address, bytes) = (i64::try_from(address).expect("few"), bytes.cast_signed());
                file.execute(row, params![device, begin_ns, address, bytes, 2, 0])?;
                if *end_ns != 0 {
                    file.execute(row, params![device, end_ns, address, bytes, 2, 1])?;
                }
            }
            file.execute(row, params![0, 1, 77, 1_i64 << 40, 1, 0])?;
            file.execute(row, params![0, 2, 99_999, 5, 2, 1])?;
            file.execute(row, params![0, 2, 99_999, 5, 2, 6]).map(|_| ())
        });
        let tape = tape.expect("an export");
        agrees(&tape, &expected);
        assert_eq!(tape.skipped.count, 2, "a release of unknown memory, and an unknown operation");
        assert_eq!(tape.allocations[0], {
            let first = expected.iter().min_by_key(|one| one.1).expect("some");
            let end_ns = if first.2 == 0 { tape.end_ns } else { first.2 };
            Allocation { gpu: first.0 as usize, begin_ns: first.1, end_ns, bytes: first.3, is_freed: first.2 != 0 }
        });
    }

    #[test]
    fn the_device_0_of_each_process_is_the_gpu_that_the_export_names() {
        let tape = imported(|file| {
            file.execute_batch(NSIGHT)?;
            file.execute_batch(&format!(
                "CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER, uuid TEXT);
                 INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (4, 0, 100, 'x'), (6, 0, 200, 'y');
                 CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT, totalMemory INTEGER, uuid TEXT);
                 INSERT INTO TARGET_INFO_GPU VALUES (0, 4, 'H200', 1000, 'ab'), (0, 6, 'H200', 1000, 'GPU-cd');
                 INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS (start, globalPid, deviceId, contextId, address, pc, bytes,
                 memKind, memoryOperationType) VALUES (10, {}, 0, 1, 5, 0, 100, 2, 0), (20, {}, 0, 1, 5, 0, 300, 2, 0)",
                (7_i64 << 48) + (100 << 24),
                (7_i64 << 48) + (200 << 24) + 3
            ))
        });
        let tape = tape.expect("an export");
        let shown: Vec<_> = tape.devices.iter().map(|gpu| (&*gpu.index, &*gpu.uuid, gpu.memory_total_bytes)).collect();
        assert_eq!(shown, [("4", "GPU-ab", Some(1_000)), ("6", "GPU-cd", Some(1_000))]);
        let last = |gpu: usize| tape.tracks[gpu].points().last();
        assert_eq!([last(0), last(1)], [Some((20, Some(100))), Some((20, Some(300)))]);
    }

    #[test]
    fn times_that_are_dates_and_names_of_gpus_are_kept() {
        let epoch_ns = 1_774_586_313_950_756_076_i64;
        let tape = imported(|file| {
            file.execute_batch(NVPROF)?;
            file.execute_batch(&format!(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_DEVICE (globalMemorySize INT, id INT, name INT);
                 CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY, value TEXT);
                 INSERT INTO CUPTI_ACTIVITY_KIND_DEVICE VALUES (5000, 0, 3);
                 INSERT INTO StringTable VALUES (2, 'x'), (3, 'Tesla T4');
                 INSERT INTO CUPTI_ACTIVITY_KIND_MEMORY VALUES (NULL, 3, 9, 100, {epoch_ns}, 0, 0, 0, 1, 0, 1, 0)"
            ))
        });
        let tape = tape.expect("a profile");
        assert_eq!((tape.format.times, tape.begin_ns), (Times::Unix, epoch_ns));
        assert_eq!(tape.devices[0].name.as_deref(), Some("Tesla T4"));
        let tape = imported(|file| {
            file.execute_batch(NSIGHT)?;
            file.execute_batch(&format!(
                "CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT);
                 INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES ({epoch_ns}, 'x');
                 INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS (start, globalPid, deviceId, contextId, address, pc, bytes,
                 memKind, memoryOperationType) VALUES (10, 1, 0, 1, 5, 0, 100, 2, 0), (20, 1, 0, 1, 5, 0, 100, 2, 1)"
            ))
        });
        let tape = tape.expect("an export");
        assert_eq!((tape.format.times, tape.begin_ns, tape.end_ns), (Times::Unix, epoch_ns + 10, epoch_ns + 20));
    }

    #[test]
    fn an_address_that_is_allocated_twice_was_freed_in_between() {
        let tape = imported(|file| {
            file.execute_batch(NSIGHT)?;
            file.execute_batch(
                "INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS (start, globalPid, deviceId, contextId, address, pc, bytes, \
                 memKind, memoryOperationType) VALUES (10, 1, 0, 1, 5, 0, 100, 2, 0), (20, 1, 0, 1, 5, 0, 300, 2, 0)",
            )
        });
        let points: Vec<_> = tape.expect("an export").tracks[0].points().collect();
        assert_eq!(points.last(), Some(&(20, Some(300))));
    }

    #[test]
    fn what_is_no_profile_is_refused_in_one_line() {
        let refused = |sql: &str| imported(|file| file.execute_batch(sql)).expect_err(sql).message;
        assert!(refused("CREATE TABLE t (a)").contains("is of no format that highwater reads"));
        assert!(refused(NVPROF).contains("it has no memory of any GPU: record it with --track-memory-allocations on"));
        assert!(refused(NSIGHT).contains("it has no memory of any GPU: record it with --cuda-memory-usage=true"));
        assert!(refused("CREATE TABLE StringIds (id, value)").contains("--cuda-memory-usage=true for memory"));
        let nvprof = "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (a); CREATE TABLE StringTable (a)";
        assert!(refused(nvprof).contains("record it with --track-memory-allocations on"));
        // A view could be a query without an end.
        let view = "CREATE VIEW CUPTI_ACTIVITY_KIND_MEMORY AS WITH RECURSIVE n AS (SELECT 1 UNION ALL SELECT 1 FROM n) \
                    SELECT 1 AS deviceId, 1 AS start, 1 AS end, 1 AS bytes FROM n";
        assert!(refused(view).contains("is of no format that highwater reads"));
        let other = "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (start INTEGER)";
        assert!(refused(other).contains("table CUDA_GPU_MEMORY_USAGE_EVENTS: "), "{}", refused(other));
    }
}
