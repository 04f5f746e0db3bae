//! One writer at full speed around a small ring, and readers that know from the time alone what they must read.

use super::model::Model;
use crate::ring::{Config, QueryError, Reader, create::with_layout, layout::Layout};
use std::sync::{
    Barrier,
    atomic::{AtomicBool, Ordering},
};

const TICK_NS: i64 = 1_000_000;
const TICKS: i64 = 600_000;
const CONFIG: Config = Config { retention_ns: 200 * TICK_NS, max_bytes: 0, resolution_ns: 1_000 };

/// The value that a tick has: all that the readers need to know. Every 17th tick is lost.
fn used_at(tick: i64) -> Option<u64> {
    let mixed = (tick as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (tick % 17 != 16).then_some((mixed >> 50) << 16)
}

/// The model of the ticks around an interval.
fn model(from_ns: i64, to_ns: i64) -> Model {
    let mut model = Model::new(CONFIG);
    for tick in (from_ns / TICK_NS - 2).max(0)..=to_ns / TICK_NS {
        match used_at(tick) {
            Some(used_bytes) => model.push(tick * TICK_NS, used_bytes).unwrap(),
            None => model.gap(tick * TICK_NS),
        }
    }
    model
}

/// Asks until the writer is done; returns how many answers were right, and how often it was overtaken.
fn ask(reader: &Reader, mut seed: u64, done: &AtomicBool) -> (u64, u64) {
    let (mut answers, mut overtaken) = (0, 0);
    while !done.load(Ordering::Relaxed) {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (Some(oldest_ns), Some(newest_ns)) = (reader.oldest_ns(), reader.newest_ns()) else { continue };
        let span_ns = (newest_ns - oldest_ns).max(0);
        let to_ns = newest_ns - (seed >> 40) as i64 * 100 % (span_ns + 1);
        let from_ns = to_ns - (seed >> 20 & 0xF_FFFF) as i64 * 200 % (to_ns - oldest_ns + 1).max(1);
        match reader.summary(from_ns, to_ns) {
            Ok(summary) => {
                assert_eq!(summary, model(from_ns, to_ns).summary(from_ns, to_ns));
                answers += 1;
            }
            Err(QueryError::Overtaken { oldest_ns }) => {
                assert!(oldest_ns > from_ns, "overtaken at {from_ns}, but {oldest_ns} is kept");
                overtaken += 1;
            }
            Err(other) => panic!("{other} for {from_ns}..{to_ns}"),
        }
        if let Ok(points) = reader.points(from_ns, to_ns, 1_000) {
            assert_eq!(points.points, model(from_ns, to_ns).points(from_ns, to_ns));
        }
        // Everything that is kept can always be asked for, however fast it is overwritten.
        let everything = |from_ns| reader.points_and_summary((from_ns, newest_ns), true, 1_000);
        match reader.of_kept(i64::MIN, newest_ns, everything) {
            Ok((from_ns, (points, summary))) => {
                assert_eq!(points.points, model(from_ns, newest_ns).points_through(from_ns, newest_ns));
                assert_eq!(summary, model(from_ns, newest_ns).summary_through(from_ns, newest_ns));
            }
            Err(QueryError::Overtaken { oldest_ns }) => assert!(oldest_ns > newest_ns, "{oldest_ns} is kept"),
            Err(other) => panic!("{other}"),
        }
        if let Ok(above_ns) = reader.above_ns(from_ns, to_ns, [1 << 29]) {
            assert_eq!(above_ns, [model(from_ns, to_ns).above_ns(from_ns, to_ns, 1 << 29)]);
        }
    }
    (answers, overtaken)
}

#[test]
fn readers_never_see_what_was_not_written() {
    // Some 15 points a block and 12 blocks: the writer comes around every 200 ticks, 3,000 times in all.
    let (mut writer, reader) = with_layout(Layout::of(6, 12, 1).with_marks(2, 5), &CONFIG);
    let (done, start) = (AtomicBool::new(false), Barrier::new(4));
    std::thread::scope(|scope| {
        let readers: Vec<_> = (1..4)
            .map(|seed| {
                let (reader, done, start) = (reader.clone(), &done, &start);
                scope.spawn(move || {
                    start.wait();
                    ask(&reader, seed, done)
                })
            })
            .collect();
        start.wait();
        for tick in 0..TICKS {
            match used_at(tick) {
                Some(used_bytes) => writer.push(tick * TICK_NS, used_bytes).unwrap(),
                None => writer.gap(tick * TICK_NS).unwrap(),
            }
            // Readers must also get a turn on a machine with one core.
            if tick % 4_096 == 0 {
                std::thread::yield_now();
            }
        }
        done.store(true, Ordering::Relaxed);
        let (answers, overtaken) = readers
            .into_iter()
            .map(|reader| reader.join().unwrap())
            .fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        println!("{answers} answers, {overtaken} overtaken");
        assert!(answers > 100, "only {answers} answers");
    });
    assert!(reader.point_count() > 500_000);
}
