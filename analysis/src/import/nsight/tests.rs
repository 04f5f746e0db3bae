//! Exports in the schemas of several versions, made here, and what the GPUs did in them.

use super::work::ProfiledWork;
use super::{profile, tape};
use crate::timeline::{Analysis, Kind, Step, analyse};
use highwater_core::source::OpenError;
use highwater_engine::recording::rows::RecordingReader;
use rusqlite::{Connection, params};

/// Tables as Nsight Systems 2025 exports them: names of ranges are texts of their own, or numbers.
const NEW: &str = "
    CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER);
    CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT, totalMemory INTEGER, uuid TEXT);
    CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER, uuid TEXT, numMultiprocessors INTEGER);
    CREATE TABLE ENUM_NSYS_EVENT_TYPE (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
    INSERT INTO ENUM_NSYS_EVENT_TYPE VALUES (59, 'NvtxPushPopRange', 'x'), (60, 'NvtxStartEndRange', 'x'), (75, 'NvtxDomainCreate', 'x');
    CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
    INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'CUDA_MEMCPY_KIND_HTOD', 'Host-to-Device'), (11, 'CUDA_MEMCPY_KIND_UVM_HTOD', 'x');
    CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
    INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'x', 'Pageable'), (2, 'x', 'Device');
    CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER,
        greenContextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,
        mangledName INTEGER, launchType INTEGER, graphNodeId INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER,
        correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER, copyCount INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER,
        correlationId INTEGER, globalPid INTEGER, value INTEGER, bytes INTEGER, memKind INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        correlationId INTEGER, globalPid INTEGER, graphId INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER, globalTid INTEGER,
        correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
    CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
        color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);";
/// Tables as the first versions exported them: without enumerations, devices of processes and names of ranges by number.
const OLD: &str = "
    CREATE TABLE StringIds (id INTEGER, value TEXT);
    CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, globalPid INTEGER,
        shortName INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, globalPid INTEGER,
        copyKind INTEGER, srcKind INTEGER, dstKind INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER);
    CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);";

/// An export in the making.
struct Export {
    folder: tempfile::TempDir,
    file: Connection,
    process: i64,
    launches: i64,
}

impl Export {
    fn new(schema: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = Connection::open(folder.path().join("report1.sqlite")).expect("created");
        file.execute_batch(schema).expect("tables");
        Self { folder, file, process: 100, launches: 0 }
    }

    fn sql(&self, sql: &str) {
        self.file.execute_batch(sql).expect(sql);
    }

    /// The number of a text.
    fn text(&self, value: &str) -> i64 {
        let known = self.file.query_row("SELECT id FROM StringIds WHERE value = ?1", [value], |row| row.get(0));
        known.unwrap_or_else(|_| {
            let insert = "INSERT INTO StringIds SELECT coalesce(max(id), 0) + 1, ?1 FROM StringIds RETURNING id";
            self.file.query_row(insert, [value], |row| row.get(0)).expect("a text")
        })
    }

    fn global_pid(&self) -> i64 {
        (7 << 48) + (self.process << 24)
    }

    /// The number of a call that began at this time, which is in the export unless it is `None`. Times are microseconds.
    fn launch(&mut self, at: Option<i64>) -> i64 {
        self.launches += 1;
        if let Some(at) = at {
            let call = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId) VALUES (?1, ?1, ?2, ?3)";
            self.file.execute(call, params![at * 1_000, self.global_pid() + 9, self.launches]).expect("a call");
        }
        self.launches
    }

    fn kernel(&mut self, name: &str, (begin, end): (i64, i64), launched: Option<i64>, device: u32) {
        let (number, name) = (self.launch(launched), self.text(name));
        let (column, further) = match self.file.column_exists(None, "CUPTI_ACTIVITY_KIND_KERNEL", "demangledName") {
            Ok(true) => ("demangledName", ""),
            _ => ("shortName", ""),
        };
        let insert = format!(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, correlationId, globalPid, {column}) VALUES (?1, ?2, ?3, ?4, ?5, ?6){further}"
        );
        let row = params![begin * 1_000, end * 1_000, device, number, self.global_pid(), name];
        self.file.execute(&insert, row).expect("a kernel");
    }

    fn copy(&mut self, kind: i64, (begin, end): (i64, i64), launched: Option<i64>) {
        let number = self.launch(launched);
        let insert = "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, correlationId, globalPid, copyKind, srcKind, dstKind) \
                      VALUES (?1, ?2, 0, ?3, ?4, ?5, 0, 2)";
        let row = params![begin * 1_000, end * 1_000, number, self.global_pid(), kind];
        self.file.execute(insert, row).expect("a copy");
    }

    fn range(&self, name: &str, (begin, end): (i64, i64)) {
        let insert = "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid) VALUES (?1, ?2, 59, ?3, ?4)";
        let row = params![begin * 1_000, end * 1_000, name, self.global_pid() + 9];
        self.file.execute(insert, row).expect("a range");
    }

    fn read(&self) -> Result<ProfiledWork, OpenError> {
        profile(RecordingReader::open_any(&self.folder.path().join("report1.sqlite"))?)
    }
}

/// The analysis of an export of one process.
fn analysed(export: &Export) -> (Analysis, ProfiledWork) {
    let profile = export.read().expect("an export");
    let [trace] = &profile.traces[..] else { panic!("{profile:?}") };
    (analyse(trace).expect("work"), profile)
}

/// Of a step, in microseconds: its window, compute, communication, memory, overlap, and idle time for data, for the host and otherwise.
fn times(step: &Step) -> [Option<u64>; 8] {
    let known = [step.window_ns, step.compute_ns, step.communication_ns, step.memory_ns, step.overlap_ns].map(Some);
    let idle = [step.idle.data_ns, step.idle.host_ns, step.idle.other_ns];
    let all: Vec<_> = known.into_iter().chain(idle).map(|ns| ns.map(|ns| ns / 1_000)).collect();
    all.try_into().expect("eight")
}

/// Two steps with the same work in either schema.
fn two_steps(schema: &str) -> Export {
    let mut export = Export::new(schema);
    for (nth, begin) in [(1, 0), (2, 100)] {
        export.range(&format!("step {nth}"), (begin, begin + 100));
        export.range("load_batch", (begin, begin + 20));
        export.range("forward_step", (begin + 20, begin + 90));
        export.copy(1, (begin + 30, begin + 40), Some(begin + 25));
        export.kernel("void gemm<float>(float*, int)", (begin + 40, begin + 60), Some(begin + 26), 0);
        export.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", (begin + 50, begin + 80), Some(begin + 27), 0);
    }
    export
}

#[test]
fn steps_and_work_of_old_and_new_exports_are_the_same() {
    for schema in [NEW, OLD] {
        let (analysis, profile) = analysed(&two_steps(schema));
        let steps: Vec<_> = analysis.steps.iter().map(|step| (step.step, times(step))).collect();
        // From 0 to 30, of which 20 for data; 80 to 100 nothing follows, or the next step's copy was not launched yet.
        let expected = [100, 20, 30, 10, 10].map(Some);
        let of = |data, host| [&expected[..], &[Some(data), Some(host), Some(0)]].concat().try_into().expect("eight");
        assert_eq!(steps, [(Some(1), of(20, 30)), (Some(2), of(20, 30))]);
        assert_eq!((analysis.steps[0].kernels, analysis.steps[0].memory_operations), (2, 1));
        assert_eq!(analysis.steps[0].collectives[0].kind, Kind::AllReduce);
        let names: Vec<_> = profile.traces[0].ops[..3].iter().filter_map(|op| profile.traces[0].name_of(op)).collect();
        assert_eq!(
            names,
            ["Memcpy HtoD (Pageable -> Device)", "gemm<float>", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"]
        );
        let assumed = ["steps are the NVTX ranges `step *`", "the host waits for data in the NVTX ranges `load_batch`"];
        assert_eq!(
            (profile.assumed, profile.missing, profile.skipped.count),
            (assumed.map(str::to_owned).to_vec(), vec![], 0)
        );
    }
}

#[test]
fn names_of_ranges_may_be_numbers_and_those_of_libraries_are_no_steps() {
    let export = two_steps(NEW);
    // Inside NCCL's domain, which is of process 100 only.
    export.sql(&format!(
        "UPDATE NVTX_EVENTS SET textId = (SELECT 1000 + rowid), text = NULL WHERE text LIKE 'step %';
         INSERT INTO StringIds VALUES (1001, 'iteration 8'), (1004, 'iteration 9');
         INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES
         (0, NULL, 75, 'NCCL', {0}, 3), (0, 900000, 59, 'batch', {0}, 3), (0, 900000, 34, 'step mark', {0}, 0),
         (5, NULL, 59, 'step open', {0}, 0)",
        export.global_pid() + 9
    ));
    let (analysis, profile) = analysed(&export);
    assert_eq!(analysis.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [Some(8), Some(9)]);
    assert_eq!(profile.assumed[0], "steps are the NVTX ranges `iteration *`");
    // A text that is too long to be read costs no other.
    export.sql("UPDATE StringIds SET value = printf('%.*c', 100000, 'x') WHERE id = 1004");
    let (analysis, _) = analysed(&export);
    assert_eq!(analysis.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [Some(8)]);
}

#[test]
fn without_ranges_all_of_the_file_is_one_window() {
    let mut export = Export::new(NEW);
    export.kernel("a", (10, 20), None, 0);
    export.kernel("b", (30, 40), Some(25), 0);
    export.sql(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId, memKind) VALUES (41000, 42000, 0, 2);
                INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, copyKind) VALUES (42000, 45000, 0, 11);
                INSERT INTO TARGET_INFO_SESSION_START_TIME (utcEpochNs) VALUES (1774586313950756076)",
    );
    let (analysis, profile) = analysed(&export);
    let [step] = &analysis.steps[..] else { panic!("{analysis:?}") };
    assert_eq!(
        (step.step, times(step)),
        (None, [Some(35), Some(20), Some(0), Some(4), Some(0), None, Some(10), Some(0)])
    );
    assert_eq!((step.idle.unexplained_ns, step.begin_unix_ns), (1_000, Some(1_774_586_313_950_766_076)));
    let names: Vec<_> = profile.traces[0].ops.iter().filter_map(|op| profile.traces[0].name_of(op)).collect();
    assert_eq!(names, ["a", "b", "Memset (Device)", "Memcpy HtoD (unified memory)"]);
    assert_eq!(profile.missing, ["steps (it has no NVTX ranges)"]);
    export.range("only once", (0, 50));
    assert_eq!(export.read().expect("an export").missing, ["steps (no NVTX range repeats like one)"]);
}

#[test]
fn a_graph_as_a_whole_is_computation_and_that_is_listed() {
    let mut export = Export::new(NEW);
    let number = export.launch(Some(5));
    export.sql(&format!(
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (10000, 20000, 0, {number}, {}, 4)",
        export.global_pid()
    ));
    let (analysis, profile) = analysed(&export);
    assert_eq!((analysis.steps[0].compute_ns, profile.traces[0].ops[0].launch_ns), (10_000, Some(5_000)));
    assert!(profile.assumed[0].starts_with("CUDA graphs count as computation"), "{:?}", profile.assumed);
}

#[test]
fn each_process_has_its_own_gpus_steps_and_numbers_of_launches() {
    let mut export = Export::new(NEW);
    export.sql("INSERT INTO TARGET_INFO_CUDA_DEVICE (gpuId, cudaId, pid) VALUES (4, 0, 100), (6, 0, 200)");
    for (process, late) in [(100, 0), (200, 50)] {
        (export.process, export.launches) = (process, 0);
        export.range("iteration 1", (late, late + 40));
        export.range("iteration 2", (late + 40, late + 80));
        export.kernel("a", (late + 10, late + 20), Some(late + 5), 0);
        export.kernel("b", (late + 50, late + 60), Some(late + 45), 0);
    }
    // The second process has a little on the GPU of the first, too.
    export.sql("INSERT INTO TARGET_INFO_CUDA_DEVICE (gpuId, cudaId, pid) VALUES (4, 1, 200)");
    export.kernel("visitor", (15, 25), None, 1);
    let profile = export.read().expect("an export");
    let [first, second] = &profile.traces[..] else { panic!("{profile:?}") };
    let steps = |trace| analyse(trace).expect("work").steps;
    let seen = |steps: Vec<Step>| -> Vec<_> {
        steps.iter().map(|step| (step.device, step.step, step.busy_ns / 1_000)).collect()
    };
    assert_eq!(seen(steps(first)), [(4, Some(1), 15), (4, Some(2), 10)]);
    assert_eq!(seen(steps(second)), [(6, Some(1), 10), (6, Some(2), 10)]);
    assert_eq!(second.ops[0].launch_ns, Some(55_000));
}

#[test]
fn rows_that_cannot_be_used_are_counted_and_cost_no_other() {
    let mut export = Export::new(OLD);
    export.kernel("good", (10, 20), Some(5), 0);
    export.sql(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, correlationId, globalPid, shortName) VALUES
         (NULL, 20, 0, 1, 1, 1), (10, NULL, 0, 1, 1, 1), (20, 10, 0, 1, 1, 1), ('soon', 20, 0, 1, 1, 1), (10, 20, -1, 1, 1, 1),
         (10, 20, 0, 1, 1, 'x'), (10, 20, 0, 'x', 1, 1);
         INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, copyKind) VALUES (10, 20, 0, 'x');
         INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME (start, correlationId) VALUES ('x', 1), (NULL, 2);
         INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES (9, 3, 59, 'step 1'), (1, 'x', 60, 'step 2')",
    );
    let (analysis, profile) = analysed(&export);
    assert_eq!((analysis.steps[0].kernels, profile.traces[0].ops[0].launch_ns), (1, Some(5_000)));
    assert_eq!(profile.skipped.count, 7 + 1 + 2 + 2, "{:?}", profile.skipped.first);
    // Names, correlations and processes that do not exist leave the time of the kernel.
    export.sql(
        "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE typeof(start) != 'integer' OR end < start;
         INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, correlationId, globalPid, shortName) VALUES
         (30000, 40000, 0, NULL, NULL, NULL), (40000, 50000, 0, -1, -1, 99), (50000, 60000, 0, 5000000000, 1, 99)",
    );
    let (analysis, profile) = analysed(&export);
    assert_eq!((analysis.steps[0].kernels, analysis.steps[0].compute_ns), (4, 40_000));
    let names: Vec<_> = profile.traces[0].ops.iter().filter_map(|op| profile.traces[0].name_of(op)).collect();
    assert_eq!(names, ["good", "(no name)", "(no name)", "(no name)"]);
}

#[test]
fn tables_and_columns_that_are_missing_leave_what_others_have() {
    let of = |schema: &str| {
        let export = Export::new(schema);
        let profile = export.read().expect(schema);
        profile
            .traces
            .first()
            .map(|trace| (trace.ops.len(), trace.ops[0].launch_ns, trace.name_of(&trace.ops[0]).map(str::to_owned)))
    };
    let named = |name: &str| Some((1, None, Some(name.to_owned())));
    let kernel = "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL";
    assert_eq!(
        of(&format!("{kernel} (start, end, deviceId); INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0)")),
        named("(no name)")
    );
    let copy = "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId); INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 2, 0)";
    assert_eq!(of(copy), named("Memcpy"));
    // Without times or devices, there is no work; a view is no table.
    for none in [
        format!("{kernel} (end, deviceId); INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (2, 0)"),
        format!("{kernel} (start, end)"),
    ] {
        assert_eq!(of(&none), None, "{none}");
    }
    let view = "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n AS (SELECT 1 UNION ALL SELECT 1 FROM n) \
                SELECT 1 AS start, 1 AS end, 0 AS deviceId FROM n";
    assert_eq!(of(view), None);
    let export = two_steps(NEW);
    let file = RecordingReader::open_any(&export.folder.path().join("report1.sqlite")).expect("opened");
    assert!(tape(file).expect_err("no memory").message.contains("record it with --cuda-memory-usage=true"));
}

#[test]
fn time_on_the_gpu_is_that_of_the_innermost_range_of_the_launch() {
    let mut export = two_steps(NEW);
    // Launched in step 1, outside of its parts; in no range; by a call that is not there.
    export.kernel("alone", (91, 95), Some(95), 0);
    export.kernel("after", (205, 206), Some(203), 0);
    export.kernel("unknown", (207, 209), None, 0);
    let operators = analysed(&export).0.operators.expect("ranges");
    let mut found: Vec<_> = operators.into_iter().map(|of| (of.operator, of.count, of.total_ns / 1_000)).collect();
    found.sort();
    let of = |name: &str, count, us| (Some(name.to_owned()), count, us);
    assert_eq!(found, [(None, 2, 3), of("forward_step", 6, 120), of("step *", 1, 4)]);
    // On another thread, the same range is not that of the launch.
    export.sql("UPDATE NVTX_EVENTS SET globalTid = globalTid + 1 WHERE text = 'forward_step'");
    let operators = analysed(&export).0.operators.expect("ranges");
    assert!(operators.iter().all(|of| of.operator.as_deref() != Some("forward_step")));
}
