use highwater_core::source::OpenError;
use highwater_engine::recording::tape::{Tape, Times};
use std::path::Path;

fn read(bytes: &[u8]) -> Result<Tape, OpenError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("snapshot.pickle");
    std::fs::write(&path, bytes).expect("written");
    crate::replay::tape_of(&path)
}

fn refused(bytes: &[u8], because: &str) {
    let error = read(bytes).expect_err(because);
    // Whether it is damaged, or larger than what is read, is for the caller to know.
    let is_too_large = error.message.contains("more than") && !error.message.contains("2^63");
    let reason = if is_too_large { "recording_too_large" } else { "recording_unreadable" };
    assert!(error.message.contains(because) && error.reason == reason, "{error:?}");
}

/// Four training steps of a small network, as PyTorch wrote them on an H200.
fn mlp() -> Vec<u8> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("tests/data/torch/mlp_snapshot.pickle.gz");
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).expect("it is there");
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(file), &mut bytes).expect("whole");
    bytes
}

#[test]
fn the_snapshot_of_a_training_job() {
    let tape = read(&mlp()).expect("a snapshot");
    assert_eq!((tape.format.times, tape.skipped.count, tape.tracks.len()), (Times::Unix, 0, 1));
    let of = &tape.allocators[0];
    assert_eq!((of.events, of.peak.after_events, of.peak.at_ns), (831, 196, Some(1_795_207_208_451_101_000)));
    assert_eq!((of.peak.allocated, of.peak.reserved), (Some(739_917_828), Some(752_877_568)));
    assert_eq!((of.reserved, of.in_use, of.failures.len()), (Some(752_877_568), Some(471_056_384), 0));
    // 16 weights and their gradients; the first were there before the history began.
    let held: Vec<_> = of.at_peak.holders.iter().take(2).map(|holder| (holder.bytes, holder.allocations)).collect();
    assert_eq!(held, [(134_299_648, Some(16)); 2]);
    assert_eq!(
        (of.at_peak.holders[0].place.site.as_deref(), of.at_peak.holders[1].place.site.as_deref()),
        (None, Some("train.py:14:step"))
    );
    // Gradients, on a thread of the backward pass, which has no Python.
    let site = |name: &str| {
        let of = of.at_peak.holders.iter().filter(|holder| holder.place.site.as_deref() == Some(name));
        of.fold((0, 0), |sum, holder| (sum.0 + holder.bytes, sum.1 + holder.allocations.unwrap_or(0)))
    };
    assert_eq!(site("backward pass, AddmmBackward0"), (167_772_160, 9));
    assert_eq!(site("operator sum_dim_IntList"), (81_920, 8));
    let sum: u64 = of.at_peak.holders.iter().map(|holder| holder.bytes).sum();
    assert_eq!(sum + of.at_peak.others.1, 739_917_828);
    // The curve is drawn with the peak at its time.
    assert_eq!(tape.tracks[0].used_at(1_795_207_208_451_101_000), Some(739_917_828));
    assert_eq!(tape.tracks[0].points().filter_map(|(_, used)| used).max(), Some(739_917_828));
}

/// A snapshot that ends anywhere is refused, with the place, and so is one in which a byte is wrong if it can be seen.
#[test]
fn a_snapshot_that_is_cut_short_is_refused() {
    let whole = mlp();
    for length in (2..whole.len()).step_by(97).chain([whole.len() - 1]) {
        refused(&whole[..length], &format!("it ends in the middle, after {length} bytes"));
    }
    let mut state = 1_u64;
    for _ in 0..300 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut wrong = whole.clone();
        let at = (state >> 33) as usize % wrong.len();
        wrong[at] ^= (state >> 20) as u8 | 1;
        // Refused or read, but never more than that.
        let _ = read(&wrong);
    }
}

/// Python would run a command while it reads these.
#[test]
fn code_is_refused_by_name_and_not_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let command = format!("touch {}", run.display());
    let old = format!("\u{80}cos\nsystem\n(S'{command}'\ntR.").chars().map(|one| one as u8).collect::<Vec<u8>>();
    let old = [&[0x80, 2], &old[1..]].concat();
    refused(&old, "it would have Python make or call os.system");
    let mut new = vec![0x80, 4, 0x8c, 5];
    new.extend(b"posix\x94\x8c\x06system\x94\x93\x94\x8c");
    new.push(u8::try_from(command.len()).expect("short"));
    new.extend(command.as_bytes());
    new.extend(b"\x94\x85R.");
    refused(&new, "it would have Python make or call posix.system: a snapshot has only data, and nothing is executed");
    for opcode in [b'R', b'b', b'o', 0x81, 0x82, 0x83, 0x84, 0x92] {
        refused(&[0x80, 4, b'N', b'N', opcode, b'.'], "it would have Python make or call");
    }
    assert!(!run.exists());
}

#[test]
fn what_grows_when_it_is_unpacked_does_not_grow_here() {
    // Each list has the one before it ten times: with fifty, Python's `repr` would have 10^50 items.
    let mut laughs = b"\x80\x04]\x94(\x8c\x03lole".to_vec();
    for nth in 0..50_u8 {
        laughs.extend([b'0', b']', 0x94, b'(']);
        (0..10).for_each(|_| laughs.extend([b'h', nth]));
        laughs.push(b'e');
    }
    laughs.push(b'.');
    refused(&laughs, "it is a pickle, but no memory snapshot of PyTorch");
    let deep = [&[0x80, 4][..], &b"](".repeat(300_000)].concat();
    refused(&deep, "more than 1024 lists are open, one inside the other");
    let wide = [&[0x80, 4, b'('][..], &b"N".repeat(300_000)].concat();
    refused(&wide, "more than 65536 values, or 50331648 bytes of them, wait for their list");
    // Lists of 4,096 frames each, one beside the other.
    let frame = b"\x80\x04(}(\x8c\x08filename\x8c\x04a.pyu\x94";
    let list = [&b"]("[..], &b"h\x00".repeat(4_000), b"e"].concat();
    refused(&[&frame[..], &list.repeat(4_000)].concat(), "bytes of them, wait for their list");
    // What is remembered of 70 million values would be more than may be.
    let remembered = [&b"\x80\x04N"[..], &b"\x94".repeat(68 << 20)].concat();
    refused(&remembered, "values, which take 134217728 bytes");
    let traces =
        [&b"\x80\x04"[..], &[&b"](}("[..], b"\x8c\x06action\x8c\x04free\x8c\x04sizeK\x01ue0"].concat().repeat(65)]
            .concat();
    refused(&traces, "it has more than 64 traces");
    refused(
        &[0x80, 4, b'(', b'K', 1, b'r', 255, 255, 255, 127, b'.'],
        "it remembers a value as number 2147483647 after 0 others",
    );
    // A text of an exabyte, and an integer of 2 GB: their bytes are not there.
    refused(&[0x80, 4, 0x8d, 0, 0, 0, 0, 0, 0, 0, 16, b'x'], "it ends in the middle");
    refused(&[0x80, 4, 0x8b, 255, 255, 255, 127, b'x'], "it ends in the middle");
}

#[test]
fn what_is_no_snapshot_is_refused_with_the_reason() {
    for (bytes, because) in [
        (&b"\x80\x04}\x94."[..], "it is a pickle, but no memory snapshot of PyTorch"),
        (b"\x80\x04]\x94h\x00a.", "items have no list before byte 7"),
        (b"\x80\x04]\x94(h\x00e.", "a list contains itself at byte 7"),
        (b"\x80\x04h\x00.", "byte 4 refers to a value that was not before it"),
        (b"\x80\x04u.", "a value is missing that should be before its list"),
        (b"\x80\x04}(K\x01u.", "a key has no value before byte 7"),
        (b"\x80\x04K\x01(K\x02e.", "items have no list before byte 8"),
        (b"\x80\x04K\x01(K\x02K\x02u.", "items have no dictionary before byte 10"),
        (b"\x80\x04\xff.", "byte 2 is 0xff, which begins nothing in a pickle"),
        (b"\x80\x05\x97.", "it needs data that are not in the file"),
        (b"\x80\x04.", "a value is missing before byte 3"),
        (b"\x80\x02}q\x00U\x08segmentsq\x01]q\x02s.", "it has no memory of any GPU"),
    ] {
        refused(bytes, because);
    }
}

/// One block in use, and no history: protocol 2 with a list of segments, as before PyTorch 2.0.
#[test]
fn a_snapshot_without_a_history_has_what_is_in_use() {
    let mut bytes = b"\x80\x02](}(X\x06\0\0\0deviceK\x01X\x0a\0\0\0total_sizeJ\0\0\x20\0X\x06\0\0\0blocks](}(X\x05\0\0\0stateX\x10\0\0\0".to_vec();
    bytes.extend(b"active_allocatedX\x04\0\0\0sizeM\0\x02X\x0e\0\0\0requested_sizeM\0\x01ueue.");
    let tape = read(&bytes).expect("a snapshot");
    let of = &tape.allocators[0];
    assert_eq!((tape.devices[0].index.as_str(), tape.format.times), ("1", Times::Readings));
    assert_eq!(
        (of.reserved, of.in_use, of.requested, of.peak.allocated),
        (Some(2 << 20), Some(512), Some(256), Some(256))
    );
    assert_eq!((of.events, of.at_peak.holders[0].bytes, of.at_peak.holders[0].allocations), (0, 256, Some(1)));
}

/// PyTorch's own pickler hands over all entries of a trace at once, however many there are, and so a list of frames.
#[test]
fn entries_that_come_all_at_once_are_read_as_they_come() {
    let text =
        |text: &str| [&b"X"[..], &u32::try_from(text.len()).expect("short").to_le_bytes(), text.as_bytes()].concat();
    let mut bytes = [&b"\x80\x02}("[..], &text("segments"), b"](e", &text("device_traces"), b"](]("].concat();
    for nth in 0..900_000_u32 {
        let action = if nth % 3 == 2 { "free_completed" } else { "alloc" };
        bytes.extend(
            [&b"}("[..], &text("action"), &text(action), &text("addr"), b"J", &(nth / 3 * 3 + nth % 2).to_le_bytes()]
                .concat(),
        );
        bytes.extend([&text("size")[..], b"K\x0a", &text("frames"), b"](eu"].concat());
    }
    bytes.extend(b"eeu.");
    let tape = read(&bytes).expect("a snapshot");
    let of = &tape.allocators[0];
    assert_eq!((of.events, of.at_peak.holders.len()), (900_000, 1));
    assert_eq!(tape.format.times, Times::Readings);
    // Of each three entries, the third frees what the first or second allocated.
    assert_eq!((of.peak.allocated, of.peak.after_events), (Some(300_001 * 10), 899_999));
}

/// A snapshot of one device in protocol 2, as its parts are.
fn snapshot(segments: &[u8], trace: &[u8]) -> Vec<u8> {
    [&b"\x80\x02}(U\x08segments]("[..], segments, b"eU\x0ddevice_traces](](", trace, b"eeu."].concat()
}

/// An entry: its action, address, size, and time, of which the last is left out if it is 0.
fn entry(action: &str, address: u8, size: i32, time_us: i32) -> Vec<u8> {
    let text = |text: &str| [b"U", &[u8::try_from(text.len()).expect("short")][..], text.as_bytes()].concat();
    let mut bytes =
        [&b"}("[..], &text("action"), &text(action), &text("addr"), b"K", &[address], &text("size"), b"J"].concat();
    bytes.extend(size.to_le_bytes());
    if time_us > 0 {
        bytes.extend([&text("time_us")[..], b"J", &time_us.to_le_bytes()].concat());
    }
    bytes.extend(b"u");
    bytes
}

#[test]
fn what_is_of_no_use_costs_nothing_else() {
    // The first entry has a negative size; another one is no entry at all.
    let trace =
        [entry("alloc", 1, -5, 9), entry("alloc", 2, 70, 10), b"K\x07".to_vec(), entry("alloc", 3, 20, 0)].concat();
    let segment = |device: &[u8], size: i32| {
        let mut bytes = [
            &b"}("[..],
            device,
            b"U\x0atotal_sizeJ\0\x10\0\0U\x06blocks](}(U\x05stateU\x13active_pending_freeU\x04sizeJ",
        ]
        .concat();
        bytes.extend([&size.to_le_bytes()[..], b"ueu"].concat());
        bytes
    };
    // One segment does not say its device; one has a block that is in use by the GPU alone.
    let segments = [segment(b"", 100), segment(b"U\x06deviceK\0", 100)].concat();
    let tape = read(&snapshot(&segments, &trace)).expect("a snapshot");
    let of = &tape.allocators[0];
    assert_eq!((of.events, of.peak.allocated, of.peak.after_events), (2, Some(90), 2));
    // An entry without a time was after the one before it.
    assert_eq!((of.peak.at_ns, tape.tracks[0].used_at(10_000)), (Some(10_000), Some(90)));
    assert_eq!((of.reserved, of.in_use, of.requested), (Some(4_096), Some(100), None));
    assert_eq!((tape.skipped.count, tape.tracks.len()), (3, 1));
}

#[test]
fn a_device_that_did_nothing_has_its_memory_all_the_time() {
    let segment = b"}(U\x06deviceK\x01U\x0atotal_sizeJ\0\x10\0\0U\x06blocks](}(U\x05stateU\x10active_allocatedU\x04sizeJ\0\x01\0\0ueu";
    let trace = [entry("alloc", 1, 70, 10), entry("free", 1, 70, 20)].concat();
    let tape = read(&snapshot(segment, &trace)).expect("a snapshot");
    let levels = |gpu: usize| [10_000, 15_000, 20_000].map(|at_ns| tape.tracks[gpu].used_at(at_ns));
    assert_eq!(levels(0), [Some(70), Some(70), Some(0)]);
    assert_eq!(levels(1), [Some(256); 3]);
    assert_eq!((tape.allocators[0].reserved, tape.allocators[1].reserved), (None, Some(4_096)));
}

/// A text of a pickle.
fn short_text(text: &str) -> Vec<u8> {
    [b"U", &[u8::try_from(text.len()).expect("short")][..], text.as_bytes()].concat()
}

/// A dictionary of numbers and texts, those of the first before those of the second, and what follows.
fn dict(texts: &[(&str, &str)], numbers: &[(&str, i32)], rest: &[u8]) -> Vec<u8> {
    let texts = texts.iter().map(|(key, text)| [short_text(key), short_text(text)].concat());
    let numbers = numbers.iter().map(|(key, number)| [&short_text(key)[..], b"J", &number.to_le_bytes()].concat());
    [&b"}("[..], &texts.chain(numbers).collect::<Vec<_>>().concat(), rest, b"u"].concat()
}

const MIB: i32 = 1 << 20;

/// A segment of 20 MiB at 20 MiB, of which the history allocates three parts and frees the first and the last, and asks for 10 MiB
/// in vain.
fn fragmented(is_wrong: bool) -> Tape {
    let act = |action: &str, mib: i32, size: i32| {
        dict(&[("action", action)], &[("addr", mib * MIB), ("size", size * MIB), ("stream", 0)], b"")
    };
    let trace = [
        act("segment_alloc", 20, 20),
        act("alloc", 20, 6),
        act("alloc", 26, 6),
        act("alloc", 32, if is_wrong { 9 } else { 6 }),
        act("free_completed", 20, 6),
        act("free_completed", 32, 6),
        dict(&[("action", "oom")], &[("size", 10 * MIB), ("stream", 0), ("device_free", 5)], b""),
    ];
    let block = |state: &str, mib: i32| dict(&[("state", state)], &[("size", mib * MIB)], b"");
    let blocks = [block("inactive", 6), block("active_allocated", 6), block("inactive", 8)].concat();
    // Its pool is (0, 7), that of a CUDA graph.
    let rest = [
        &short_text("blocks")[..],
        b"](",
        &blocks,
        b"e",
        &short_text("segment_pool_id"),
        b"K\0K\x07\x86",
        &short_text("is_expandable"),
        b"\x89",
    ]
    .concat();
    let numbers = [("device", 0), ("address", 20 * MIB), ("total_size", 20 * MIB), ("stream", 0)];
    let segment = dict(&[("segment_type", "large")], &numbers, &rest);
    read(&snapshot(&segment, &trace.concat())).expect("a snapshot")
}

#[test]
fn segments_are_known_at_the_peak_at_a_failure_and_at_the_end() {
    let tape = fragmented(false);
    let of = &tape.allocators[0];
    let laid = |layout: &Option<highwater_engine::recording::Layout>| {
        let whole = layout.as_ref().expect("known").whole();
        (whole.segments, whole.pieces, whole.free >> 20, whole.largest_piece >> 20, whole.in_blocks >> 20)
    };
    assert_eq!((of.peak.after_events, of.peak.allocated), (4, Some(18 << 20)));
    assert_eq!(laid(&of.layout_at_peak), (1, 1, 2, 2, 18));
    assert_eq!(laid(&of.failures[0].layout), (1, 2, 14, 8, 6));
    assert_eq!(laid(&of.layout_at_end), (1, 2, 14, 8, 6));
    let pool = &of.layout_at_end.as_ref().expect("known").pools[0];
    assert_eq!(
        (pool.stream, pool.is_small, pool.is_private, pool.is_expandable),
        (Some(0), Some(false), Some(true), false)
    );
    let sizes = |blocks: &[highwater_engine::recording::HeldBlock]| -> Vec<_> {
        blocks.iter().map(|block| (block.bytes >> 20, block.entry)).collect()
    };
    assert_eq!(sizes(&of.blocks_at_peak), [(6, Some(2)), (6, Some(3)), (6, Some(4))]);
    assert_eq!(sizes(&of.blocks_at_end), [(6, Some(3))]);
    assert_eq!(of.at_end.as_ref().map(highwater_engine::recording::HeldMemory::bytes), Some(6 << 20));
}

#[test]
fn a_history_that_contradicts_itself_has_no_layout() {
    let tape = fragmented(true);
    let of = &tape.allocators[0];
    // A block of 9 MiB at 32 MiB lies across the end of its segment.
    assert_eq!(
        (of.layout_at_peak.is_some(), of.failures[0].layout.is_some(), of.layout_at_end.is_some()),
        (false, true, true)
    );
}
