//! Every order in which a reader can meet the writer, as loom finds them: `RUSTFLAGS="--cfg highwater_loom" cargo test`.

use crate::ring::{
    Config, QueryError, Reader, Writer, create::with_layout, layout::Layout, seqlock::Cell, sync::zeroed,
};
use loom::{sync::Arc, sync::atomic::Ordering, thread};

const CONFIG: Config = Config { retention_ns: 1_000, max_bytes: 0, resolution_ns: 1 };

/// All orders with at most this many forced switches between the threads: bugs of this kind need one or two.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn a_cell_is_read_whole_or_not_at_all() {
    check(4, || {
        let words: Arc<Box<[_]>> = Arc::new(zeroed(3));
        let write = |words: &[loom::sync::atomic::AtomicU64], tag: u64| {
            Cell::new(words).rewrite(tag, |content| {
                for word in content {
                    word.store(tag * 10, Ordering::Relaxed);
                }
            });
        };
        write(&words, 1);
        let writer = {
            let words = Arc::clone(&words);
            thread::spawn(move || (2..4).for_each(|tag| write(&words, tag)))
        };
        for tag in 1..4 {
            let read = Cell::new(&words).read(tag, |content| [0, 1].map(|word| content[word].load(Ordering::Relaxed)));
            assert!(read.is_none_or(|read| read == [tag * 10; 2]), "torn: {read:?} of {tag}");
        }
        writer.join().unwrap();
    });
}

/// The value that a time has in the models below, too far apart for a short code.
fn used_at(at_ns: i64) -> u64 {
    at_ns.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn write(writer: &mut Writer, times: std::ops::Range<i64>) {
    for at_ns in times {
        writer.push(at_ns, used_at(at_ns)).unwrap();
    }
}

/// What was answered of an interval, unless its begin is lost; then the ring says what is kept.
fn unless_lost<T>(answer: Result<T, QueryError>, from_ns: i64) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(QueryError::Overtaken { oldest_ns }) => {
            assert!(oldest_ns > from_ns, "{oldest_ns} is kept, not {from_ns}");
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Whatever the moment: a value is the one of its time, or the time is lost or still to come.
fn check_at(reader: &Reader, at_ns: i64) {
    match reader.at(at_ns) {
        Err(QueryError::Ahead { newest_ns }) => assert!(newest_ns < at_ns),
        answer => assert!(unless_lost(answer, at_ns).is_none_or(|used| used == Some(used_at(at_ns)))),
    }
}

#[test]
fn a_reader_meets_blocks_that_are_used_again() {
    // A block holds its first value and nothing else: each value takes the older of the two blocks.
    check(2, || {
        let (mut writer, reader) = with_layout(Layout::of(0, 2, 1), &CONFIG);
        write(&mut writer, 0..2);
        let writes = thread::spawn(move || write(&mut writer, 2..4));
        check_at(&reader, 1);
        check_at(&reader, 2);
        writes.join().unwrap();
        check_at(&reader, 3);
    });
}

#[test]
fn a_reader_meets_a_block_that_grows() {
    check(2, || {
        let (mut writer, reader) = with_layout(Layout::of(6, 2, 1), &CONFIG);
        write(&mut writer, 0..2);
        let writes = thread::spawn(move || write(&mut writer, 2..4));
        let newest_ns = reader.newest_ns().unwrap();
        check_at(&reader, newest_ns);
        assert_eq!(reader.at(1), Ok(Some(used_at(1))), "nothing was lost");
        writes.join().unwrap();
    });
}

#[test]
fn a_reader_meets_a_block_that_grows_over_old_content() {
    // Two blocks full of changes at time 0, then the first of them again: were a point's bits seen later than its
    // length, the old point in its place would say that another value was held at the newest time.
    check(3, || {
        let (mut writer, reader) = with_layout(Layout::of(6, 2, 1), &CONFIG);
        for value in 100..108 {
            writer.push(0, used_at(value)).unwrap();
        }
        write(&mut writer, 1..4);
        let writes = thread::spawn(move || write(&mut writer, 4..6));
        let newest_ns = reader.newest_ns().unwrap();
        assert_eq!(reader.at(newest_ns), Ok(Some(used_at(newest_ns))));
        writes.join().unwrap();
    });
}

#[test]
fn a_reader_meets_marks_that_are_made_and_overwritten() {
    // A mark at each change after the first, and room for two, of 2 and 3: the reader decodes from the one of 2, which that
    // of 4 overwrites.
    check(2, || {
        let (mut writer, reader) = with_layout(Layout::of(8, 2, 1).with_marks(1, 2), &CONFIG);
        write(&mut writer, 0..4);
        let writes = thread::spawn(move || write(&mut writer, 4..5));
        check_at(&reader, 2);
        writes.join().unwrap();
        check_at(&reader, 3);
    });
}

#[test]
fn a_reader_asks_from_the_oldest_time_while_it_is_lost() {
    check(3, || {
        let (mut writer, reader) = with_layout(Layout::of(0, 2, 1), &CONFIG);
        write(&mut writer, 0..2);
        let writes = thread::spawn(move || write(&mut writer, 2..3));
        let oldest_ns = reader.oldest_ns().unwrap();
        if let Some(points) = unless_lost(reader.changes_from(oldest_ns, oldest_ns), oldest_ns) {
            // What was held before it may be there too.
            assert_eq!(points.last().unwrap().used, Some(used_at(oldest_ns)));
        }
        writes.join().unwrap();
    });
}

#[test]
fn a_reader_meets_a_gap_at_the_newest_time() {
    // As where a GPU is lost: the gap begins at the time of the last reading, which was good.
    check(3, || {
        let (mut writer, reader) = with_layout(Layout::of(6, 2, 1), &CONFIG);
        write(&mut writer, 0..2);
        let writes = thread::spawn(move || {
            writer.gap(1).unwrap();
            writer.push(2, used_at(2)).unwrap();
        });
        let newest_ns = reader.newest_ns().unwrap();
        let at = reader.at(1).unwrap();
        assert!(at.is_none() || (at == Some(used_at(1)) && newest_ns == 1), "{at:?} with {newest_ns}");
        assert_eq!(reader.known_at(1), Ok(Some(used_at(1))));
        writes.join().unwrap();
        assert_eq!((reader.at(1), reader.at(2)), (Ok(None), Ok(Some(used_at(2)))));
    });
}

#[test]
fn a_reader_meets_the_tree_while_it_grows_and_is_overwritten() {
    check(2, || {
        let (mut writer, reader) = with_layout(Layout::of(0, 4, 1), &CONFIG);
        write(&mut writer, 0..4);
        let writes = thread::spawn(move || write(&mut writer, 4..6));
        if let Some(summary) = unless_lost(reader.summary(0, 3), 0) {
            let values = [0, 1, 2].map(used_at);
            assert_eq!((summary.min, summary.max), (values.into_iter().min(), values.into_iter().max()));
            assert_eq!(summary.known_ns, 3);
        }
        writes.join().unwrap();
    });
}

#[test]
fn the_first_reading_is_seen_whole_or_not_at_all() {
    check(4, || {
        let (mut writer, reader) = with_layout(Layout::of(0, 2, 1), &CONFIG);
        let writes = thread::spawn(move || write(&mut writer, 5..6));
        match reader.at(5) {
            Ok(used) => assert_eq!(used, Some(used_at(5))),
            Err(error) => assert_eq!(error, QueryError::Empty),
        }
        writes.join().unwrap();
    });
}
