//! What a reader of the documentation expects, one case at a time.

use super::model::Model;
use crate::ring::{Config, ConfigError, Drop, Point, PushError, QueryError, Reader, Writer, ring};

const MS: i64 = 1_000_000;
const GIB: u64 = 1 << 30;
const CONFIG: Config = Config { retention_ns: 600_000 * MS, max_bytes: 1 << 20, resolution_ns: 1_000 };

/// A ring with these values, one a millisecond from 0 on; `None` begins a gap.
fn written(values: &[Option<u64>]) -> (Writer, Reader) {
    let (mut writer, reader) = ring(CONFIG).unwrap();
    for (tick, value) in (0..).zip(values) {
        match value {
            Some(gib) => writer.push(tick * MS, gib * GIB).unwrap(),
            None => writer.gap(tick * MS).unwrap(),
        }
    }
    (writer, reader)
}

#[test]
fn an_empty_ring_knows_nothing() {
    let (mut writer, reader) = ring(CONFIG).unwrap();
    writer.gap(5).unwrap();
    assert_eq!((reader.newest_ns(), reader.oldest_ns(), reader.point_count()), (None, None, 0));
    assert_eq!(reader.resolution_ns(), 1_000);
    assert_eq!(reader.at(0), Err(QueryError::Empty));
    assert_eq!(reader.summary(0, 1), Err(QueryError::Empty));
    assert_eq!(reader.summary(1, 0), Err(QueryError::Reversed));
}

#[test]
fn a_flush_near_full_memory_shows_its_fall_and_regrowth() {
    let (_, reader) = written(&[Some(70), Some(78), Some(72), Some(68), Some(75), Some(71), Some(90), Some(90)]);
    let summary = reader.summary(0, 6 * MS).unwrap();
    let drop = Drop { bytes: 10 * GIB, trough_bytes: 68 * GIB, regrown_bytes: 7 * GIB };
    assert_eq!(summary.drop, Some(drop));
    assert_eq!((summary.min, summary.max), (Some(68 * GIB), Some(78 * GIB)));
    assert_eq!((summary.first, summary.last), (Some(70 * GIB), Some(71 * GIB)));
    assert_eq!(summary.mean, Some((70 + 78 + 72 + 68 + 75 + 71) as f64 / 6.0 * GIB as f64));
    assert_eq!(reader.above_ns(0, 6 * MS, [72 * GIB]), Ok([3 * MS]));
}

#[test]
fn a_change_at_the_end_of_an_interval_does_not_count_and_one_at_its_begin_does() {
    let (_, reader) = written(&[Some(1), Some(5), Some(2)]);
    assert_eq!(reader.summary(0, MS).unwrap().max, Some(GIB));
    assert_eq!(reader.summary(MS, 2 * MS).unwrap().min, Some(5 * GIB));
    let instant = reader.summary(MS, MS).unwrap();
    assert_eq!((instant.first, instant.mean, instant.known_ns), (Some(5 * GIB), Some(5.0 * GIB as f64), 0));
}

#[test]
fn the_newest_reading_counts_in_an_interval_that_reaches_through_it() {
    let (mut writer, reader) = written(&[Some(1), Some(5), Some(9)]);
    let through = reader.summary_through(0, 2 * MS).unwrap();
    assert_eq!((through.max, through.last, through.known_ns), (Some(9 * GIB), Some(9 * GIB), 2 * MS));
    assert_eq!((reader.summary(0, 2 * MS).unwrap().max, through.mean), (Some(5 * GIB), Some(3.0 * GIB as f64)));
    // Then the GPU is gone: what was read of it last was read all the same.
    writer.gap(2 * MS).unwrap();
    let through = reader.summary_through(0, 2 * MS).unwrap();
    assert_eq!((through.max, through.last, through.gap_ns), (Some(9 * GIB), None, 0));
}

/// At 1 kHz the oldest time moves on each millisecond: while a question about everything is being answered, too.
#[test]
fn a_question_about_everything_that_is_kept_is_never_too_old() {
    let config = Config { retention_ns: 10 * MS, max_bytes: 1 << 16, resolution_ns: 1_000 };
    let (writer, reader) = ring(config).unwrap();
    let writer = std::cell::RefCell::new(writer);
    let read = |tick: i64| writer.borrow_mut().push(tick * MS, tick as u64 * GIB).unwrap();
    (0..=50).for_each(read);
    assert_eq!(reader.oldest_ns(), Some(40 * MS));
    let next = std::cell::Cell::new(51);
    // The query is overtaken three times by a new reading, right before it runs.
    let question = |from_ns| {
        if next.get() < 54 {
            read(next.replace(next.get() + 1));
        }
        reader.points_and_summary((from_ns, 50 * MS), true, 100)
    };
    let (from_ns, (points, summary)) = reader.of_kept(0, 50 * MS, question).unwrap();
    assert!((43 * MS..=44 * MS).contains(&from_ns), "from what is kept, and little later: {from_ns}");
    assert_eq!((points.points[0].at_ns, summary.from_ns, summary.max), (from_ns, from_ns, Some(50 * GIB)));
    // What is asked for and kept is not changed, and what is not kept at all is an error and not another interval.
    let at = |from_ns, to_ns| reader.of_kept(from_ns, to_ns, |from_ns| reader.summary(from_ns, to_ns)).map(|of| of.0);
    assert_eq!(at(46 * MS, 48 * MS), Ok(46 * MS));
    assert_eq!(at(0, 30 * MS), Err(QueryError::Overtaken { oldest_ns: 43 * MS }));
    assert_eq!(at(48 * MS, 46 * MS), Err(QueryError::Reversed));
    assert_eq!(at(46 * MS, 99 * MS), Err(QueryError::Ahead { newest_ns: 53 * MS }));
}

#[test]
fn a_gap_is_neither_zero_nor_the_last_value() {
    let (_, reader) = written(&[Some(4), None, None, Some(6), Some(6)]);
    let summary = reader.summary(0, 4 * MS).unwrap();
    assert_eq!((summary.known_ns, summary.gap_ns), (2 * MS, 2 * MS));
    assert_eq!((summary.min, summary.mean), (Some(4 * GIB), Some(5.0 * GIB as f64)));
    assert_eq!(reader.at(2 * MS), Ok(None));
    let inside = reader.summary(MS, 3 * MS).unwrap();
    assert_eq!((inside.first, inside.min, inside.mean, inside.drop), (None, None, None, None));
    assert_eq!(reader.above_ns(0, 4 * MS, [0]), Ok([2 * MS]));
    let points = [(0, Some(4 * GIB)), (MS, None), (3 * MS, Some(6 * GIB))];
    assert_eq!(reader.points(0, 4 * MS, 10).unwrap().points, points.map(|(at_ns, used)| Point { at_ns, used }));
}

#[test]
fn the_last_value_before_a_gap_is_known_although_the_gap_begins_at_its_time() {
    let (mut writer, reader) = written(&[Some(5), Some(7)]);
    let newest_ns = reader.newest_ns().expect("readings");
    writer.gap(newest_ns).expect("in order");
    assert_eq!((reader.at(newest_ns), reader.known_at(newest_ns)), (Ok(None), Ok(Some(7 * GIB))));
    assert_eq!(reader.known_at(newest_ns + 1), Err(QueryError::Ahead { newest_ns }));
}

#[test]
fn what_is_not_read_yet_is_ahead_even_within_a_gap() {
    let (mut writer, reader) = written(&[Some(1), Some(2), None]);
    assert_eq!(reader.newest_ns(), Some(MS));
    assert_eq!(reader.summary(0, 3 * MS), Err(QueryError::Ahead { newest_ns: MS }));
    writer.push(3 * MS, 2 * GIB).unwrap();
    assert_eq!(reader.summary(0, 3 * MS).unwrap().gap_ns, MS);
}

#[test]
fn readings_that_cannot_be_placed_are_refused_and_change_nothing() {
    let (mut writer, reader) = written(&[Some(1), Some(2)]);
    assert_eq!(writer.push(MS - 1, 7), Err(PushError::Backward { not_before_ns: MS }));
    for at_ns in [i64::MIN, i64::MAX, 1 << 62, -(1 << 62)] {
        assert_eq!(writer.push(at_ns, 7), Err(PushError::OutOfRange { at_ns }));
        assert_eq!(writer.gap(at_ns), Err(PushError::OutOfRange { at_ns }));
    }
    writer.gap(5 * MS).unwrap();
    assert_eq!(writer.push(4 * MS, 7), Err(PushError::Backward { not_before_ns: 5 * MS }));
    assert_eq!((reader.newest_ns(), reader.point_count()), (Some(MS), 3));
}

#[test]
fn times_at_both_ends_of_what_can_be_kept_do_not_overflow() {
    let config = Config { retention_ns: i64::MAX, max_bytes: 1 << 20, resolution_ns: 1 };
    let (mut writer, reader) = ring(config).unwrap();
    let (begin_ns, end_ns) = (-(1 << 62) + 2, (1 << 62) - 1);
    writer.push(begin_ns, u64::MAX).unwrap();
    writer.push(end_ns, u64::MAX).unwrap();
    writer.push(end_ns, 0).unwrap();
    let summary = reader.summary(begin_ns, end_ns).unwrap();
    assert_eq!((summary.known_ns, summary.mean), (end_ns - begin_ns, Some(u64::MAX as f64)));
    assert_eq!(reader.points(begin_ns, end_ns, 0).unwrap().points.len(), 1);
    assert_eq!(reader.at(i64::MAX), Err(QueryError::Ahead { newest_ns: end_ns }));
}

#[test]
fn an_interval_that_begins_too_early_shows_what_is_kept() {
    let config = Config { retention_ns: 3 * MS, ..CONFIG };
    let (mut writer, reader) = ring(config).unwrap();
    for tick in 0..10 {
        writer.push(tick * MS, GIB).unwrap();
    }
    assert_eq!(reader.oldest_ns(), Some(6 * MS));
    assert_eq!(reader.summary(6 * MS - 1, 9 * MS), Err(QueryError::Overtaken { oldest_ns: 6 * MS }));
    assert_eq!(reader.summary(0, 99 * MS), Err(QueryError::Overtaken { oldest_ns: 6 * MS }), "lost before unknown");
    assert_eq!(reader.summary(6 * MS, 9 * MS).unwrap().known_ns, 3 * MS);
}

#[test]
fn an_impossible_configuration_is_refused() {
    let refused = |config: Config| ring(config).map(drop).unwrap_err();
    assert!(matches!(refused(Config { max_bytes: 4_096, ..CONFIG }), ConfigError::TooSmall { max_bytes: 4_096, .. }));
    assert_eq!(refused(Config { retention_ns: 0, ..CONFIG }), ConfigError::Retention(0));
    assert_eq!(refused(Config { resolution_ns: 0, ..CONFIG }), ConfigError::Resolution(0));
    assert_eq!(refused(Config { resolution_ns: i64::MAX, ..CONFIG }), ConfigError::Resolution(i64::MAX));
}

#[test]
fn the_smallest_ring_works_and_no_cap_is_exceeded() {
    let Err(ConfigError::TooSmall { min_bytes, .. }) = ring(Config { max_bytes: 0, ..CONFIG }) else {
        panic!("a ring of no bytes")
    };
    for max_bytes in [min_bytes, min_bytes + 1, 20_000, 33_333, 100_000, 400_000] {
        let (mut writer, reader) = ring(Config { max_bytes, ..CONFIG }).unwrap();
        assert!(reader.capacity_bytes() <= max_bytes);
        assert!(reader.capacity_bytes() + 4_500 > max_bytes, "{} of {max_bytes}", reader.capacity_bytes());
        for tick in 0..60_000_i64 {
            writer.push(tick * MS, tick.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15)).unwrap();
            assert!(reader.bytes() <= reader.capacity_bytes());
        }
        let oldest_ns = reader.oldest_ns().unwrap();
        assert!(oldest_ns > 0, "60,000 raw values do not fit {max_bytes}");
        assert!(reader.summary(oldest_ns, 59_999 * MS).is_ok());
    }
}

#[test]
fn a_ring_that_has_become_quiet_shrinks_again() {
    let (mut writer, reader) = ring(Config { retention_ns: 60_000 * MS, ..CONFIG }).unwrap();
    let value = |tick: i64| (tick.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) << 16;
    for tick in 0..100_000 {
        writer.push(tick * MS, value(tick)).unwrap();
    }
    let busy_bytes = reader.bytes();
    for second in 100..6_000 {
        writer.push(second * 1_000 * MS, value(second)).unwrap();
    }
    assert!(busy_bytes > 150_000, "{busy_bytes}");
    assert!(reader.bytes() < 13_000, "{}", reader.bytes());
    assert_eq!(reader.oldest_ns(), Some(5_939_000 * MS));
}

/// A reading, or `None` for the begin of a gap, into a ring and its model.
fn write_both(writer: &mut Writer, model: &mut Model, at_ns: i64, used: Option<u64>) {
    match used {
        Some(used_bytes) => {
            writer.push(at_ns, used_bytes).unwrap();
            model.push(at_ns, used_bytes).unwrap();
        }
        None => {
            writer.gap(at_ns).unwrap();
            model.gap(at_ns);
        }
    }
}

/// The usual sizes of blocks and tree, over several levels and around the end of the memory.
#[test]
fn a_long_recording_is_answered_as_by_the_model() {
    let config = Config { max_bytes: 500_000, ..CONFIG };
    let ((mut writer, reader), mut model) = (ring(config).unwrap(), Model::new(config));
    let mut mixed = 1_u64;
    for tick in 0..80_000_i64 {
        mixed = mixed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at_ns = tick * MS + (mixed >> 48) as i64 % 60_000;
        let used_bytes = ((mixed >> 33) % (80 << 20)) << 10;
        write_both(&mut writer, &mut model, at_ns, (mixed >> 40 & 0x3FF != 0).then_some(used_bytes));
    }
    let (oldest_ns, newest_ns) = (reader.oldest_ns().unwrap(), reader.newest_ns().unwrap());
    assert!(oldest_ns > 10_000 * MS, "the memory was used again");
    model.changes.retain(|change| change.at_ns >= oldest_ns);
    for step in 0..12 {
        let from_ns = oldest_ns + (newest_ns - oldest_ns) / 25 * step;
        let to_ns = newest_ns - (newest_ns - oldest_ns) / 29 * step;
        assert_eq!(reader.summary(from_ns, to_ns).unwrap(), model.summary(from_ns, to_ns));
        assert_eq!(reader.above_ns(from_ns, to_ns, [40 * GIB]), Ok([model.above_ns(from_ns, to_ns, 40 * GIB)]));
        assert_eq!(reader.points(from_ns, to_ns, usize::MAX).unwrap().points, model.points(from_ns, to_ns));
    }
}

/// Of the last blocks of the usual size, at each of their change points and between them: from each mark, and from before
/// the first.
#[test]
fn what_was_written_last_is_answered_as_by_the_model_wherever_it_begins() {
    // Short codes, of which a block holds the most, and raw values, of which it holds the fewest.
    let dense = |tick: i64| (100 + tick.cast_unsigned() % 3) << 21;
    let raw = |tick: i64| tick.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for value in [&dense as &dyn Fn(i64) -> u64, &raw] {
        let ((mut writer, reader), mut model) = (ring(CONFIG).unwrap(), Model::new(CONFIG));
        let ticks = 8_000_i64;
        for tick in 0..ticks {
            write_both(&mut writer, &mut model, tick * MS, (tick % 97 != 96).then(|| value(tick)));
        }
        let newest_ns = (ticks - 1) * MS;
        // The model's loops are long, so it needs no more than the changes that matter.
        model.changes.drain(..4_000);
        for step in 0..6_400 {
            let from_ns = newest_ns - step * MS / 2;
            let to_ns = (from_ns + 40 * MS).min(newest_ns);
            assert_eq!(reader.at(from_ns).unwrap(), model.held(from_ns, from_ns)[0].used, "{step}");
            assert_eq!(reader.summary(from_ns, to_ns).unwrap(), model.summary(from_ns, to_ns), "{step}");
        }
    }
}
