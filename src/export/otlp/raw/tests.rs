use super::*;
use highwater_core::clock::{MILLISECOND_NS, Manual};
use highwater_core::ring;
use proptest::prelude::*;

const START_NS: i64 = 1_800_000_000_000_000_000;

/// A node of one GPU whose memory is written by hand.
fn node() -> (Arc<Node>, ring::Writer, Arc<Manual>) {
    let clock = Arc::new(Manual::at(START_NS));
    let (node, writer) = Node::of_one_gpu(Arc::clone(&clock) as _);
    (node, writer, clock)
}

/// Points of all requests as (milliseconds since the start, value).
fn drawn(requests: &[(ExportMetricsServiceRequest, u64)]) -> Vec<(i64, Option<i64>)> {
    let mut points = Vec::new();
    for (request, count) in requests {
        let before = points.len();
        for metric in request.resource_metrics.iter().flat_map(|r| &r.scope_metrics).flat_map(|scope| &scope.metrics) {
            let Some(Data::Gauge(gauge)) = &metric.data else { panic!("a gauge") };
            for point in &gauge.data_points {
                assert!(point.attributes.is_empty());
                let value = point.value.map(|value| match value {
                    Value::AsInt(value) => value,
                    Value::AsDouble(_) => panic!("bytes are whole"),
                });
                assert_eq!(point.flags == 1, value.is_none());
                points.push(((point.time_unix_nano.cast_signed() - START_NS) / MILLISECOND_NS, value));
            }
        }
        assert_eq!(points.len() - before, usize::try_from(*count).expect("few"));
    }
    points
}

/// The points drawn from readings (millisecond, bytes; `None` for a failed one), if the exporter looks after each
/// reading for which `look` returns true.
fn curve(readings: &[(i64, Option<u64>)], look: impl Fn(usize) -> bool) -> Vec<(i64, Option<i64>)> {
    let (node, mut writer, _) = node();
    let mut raw = RawPoints::default();
    let mut points = Vec::new();
    for (number, (ms, used)) in readings.iter().enumerate() {
        let at_ns = START_NS + ms * MILLISECOND_NS;
        match used {
            Some(used) => writer.push(at_ns, *used).expect("in order"),
            None => writer.gap(at_ns).expect("in order"),
        }
        if look(number) {
            points.extend(drawn(&raw.advance(Some(&node), &[])));
        }
    }
    points.extend(drawn(&raw.advance(Some(&node), &[])));
    points
}

#[test]
fn a_held_value_has_a_point_before_the_change_so_that_lines_draw_steps() {
    let readings: Vec<_> = (0..=20).map(|ms| (ms, Some(if ms < 10 { 100 } else { 700 }))).collect();
    assert_eq!(
        curve(&readings, |_| false),
        [(0, Some(100)), (9, Some(100)), (10, Some(700)), (20, Some(700))],
        "begin, the last moment of the old value, the new one, and that it rests"
    );
}

/// Nothing comes after the newest reading if the daemon or a recording ends.
#[test]
fn a_change_at_the_newest_reading_is_reported_at_once_and_once() {
    let readings: Vec<_> = (0..=20).map(|ms| (ms, Some(if ms < 20 { 100 } else { 700 }))).collect();
    let expected = [(0, Some(100)), (19, Some(100)), (20, Some(700))];
    assert_eq!(curve(&readings, |_| false), expected);
    assert_eq!(curve(&readings, |number| number == 20), expected, "looked at twice");
}

/// As the sampler writes it: a gap begins at the last good reading, which may itself be a change.
#[test]
fn nothing_is_drawn_across_a_gap_and_times_only_rise() {
    let mut readings: Vec<(i64, Option<u64>)> =
        (0..=20).map(|ms| (ms, Some(if ms == 20 { 700 } else { 100 }))).collect();
    readings.push((20, None));
    readings.extend((40..=60).map(|ms| (ms, Some(700))));
    for looks in [vec![], vec![20], vec![21], vec![20, 21], vec![19, 20, 21, 22]] {
        let points = curve(&readings, |number| looks.contains(&number));
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0), "{looks:?}: {points:?}");
        let around: Vec<_> = points.iter().filter(|(ms, _)| (20..=40).contains(ms)).collect();
        let marked = [&(20, Some(700)), &(21, None), &(40, Some(700))];
        assert_eq!(around, marked, "{looks:?}: that there is no value from here on");
    }
}

/// A GPU that does not come back has no value after a while, and is drawn again when it does come back.
#[test]
fn a_gpu_that_is_lost_has_no_value_while_it_is() {
    let (node, mut writer, clock) = node();
    let mut raw = RawPoints::default();
    for ms in 0..=20 {
        writer.push(START_NS + ms * MILLISECOND_NS, if ms == 20 { 700 } else { 100 }).expect("in order");
    }
    writer.gap(START_NS + 20 * MILLISECOND_NS).expect("in order");
    clock.advance_to(START_NS + 1_000 * MILLISECOND_NS);
    let expected = [(0, Some(100)), (19, Some(100)), (20, Some(700))];
    assert_eq!(drawn(&raw.advance(Some(&node), &[])), expected, "its last reading, which is a change, included");
    assert_eq!(drawn(&raw.advance(Some(&node), &[])), []);
    clock.advance_to(START_NS + 3_000 * MILLISECOND_NS);
    assert_eq!(drawn(&raw.advance(Some(&node), &[])), [(21, None)]);
    assert_eq!(drawn(&raw.advance(Some(&node), &[])), []);
    writer.push(START_NS + 9_000 * MILLISECOND_NS, 300).expect("in order");
    writer.push(START_NS + 9_001 * MILLISECOND_NS, 300).expect("in order");
    let back = drawn(&raw.advance(Some(&node), &[]));
    assert_eq!(back, [(9_000, Some(300))]);
    assert_eq!(drawn(&raw.advance(None, &[])), [(9_002, None)], "no node, no value");
}

#[test]
fn what_was_read_last_before_a_node_went_is_reported() {
    let (node, mut writer, _) = node();
    let mut raw = RawPoints::default();
    let mut push = |ms: i64| {
        writer.push(START_NS + ms * MILLISECOND_NS, if ms < 8 { 100 } else { 700 }).expect("in order");
    };
    (0..=5).for_each(&mut push);
    assert_eq!(drawn(&raw.advance(Some(&node), &[])), [(0, Some(100)), (5, Some(100))]);
    (6..=10).for_each(push);
    drop(node);
    let rest = [(7, Some(100)), (8, Some(700)), (10, Some(700)), (11, None)];
    assert_eq!(drawn(&raw.advance(None, &[])), rest, "and that there is no value from here on");
    assert_eq!(drawn(&raw.advance(None, &[])), []);
}

#[test]
fn one_resource_a_gpu_carries_its_identity() {
    let (node, mut writer, _) = node();
    writer.push(START_NS, 1).expect("in order");
    writer.push(START_NS + MILLISECOND_NS, 2).expect("in order");
    let attributes = [("service.name".into(), "highwater".into()), ("service.instance.id".into(), "host".into())];
    let requests = RawPoints::default().advance(Some(&node), &attributes);
    let resource = requests[0].0.resource_metrics[0].resource.as_ref().expect("a resource");
    let of = |name: &str| {
        let found = resource.attributes.iter().filter(|attribute| attribute.key == name);
        found.map(|attribute| format!("{:?}", attribute.value)).collect::<Vec<_>>()
    };
    let uuid = &node.gpus[0].device.uuid;
    assert!(of("hw.id")[0].contains(uuid.as_str()));
    assert_eq!(of("service.instance.id").len(), 1);
    assert!(of("service.instance.id")[0].contains(&format!("host/{uuid}")));
    assert_eq!(of("service.name").len(), 1);
}

proptest! {
    /// However often the exporter looks, lines through the points have the sampled value at every reading that has a
    /// point at or before and after it, times rise strictly, and every change is there at its own time.
    #[test]
    fn points_draw_the_curve(values in prop::collection::vec(prop_oneof![Just(1_u64), Just(2), Just(3)], 2..80), looks in prop::collection::vec(any::<bool>(), 80)) {
        let readings: Vec<_> = (0..).zip(&values).map(|(ms, used)| (ms, Some(*used))).collect();
        let points = curve(&readings, |number| looks[number]);
        prop_assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0), "{:?}", points);
        for pair in points.windows(2) {
            let ((from, held), (to, next)) = (pair[0], pair[1]);
            prop_assert!(to - from == 1 || held == next, "a line that is no step: {:?}", pair);
            for ms in from..to {
                let known = values[usize::try_from(ms).expect("small")].cast_signed();
                prop_assert_eq!(Some(known), held, "at {} of {:?}", ms, points.clone());
            }
        }
        for (ms, pair) in (1..).zip(values.windows(2)).filter(|(_, pair)| pair[0] != pair[1]) {
            // The last reading is exported once it has been passed.
            if ms < values.len() as i64 - 1 {
                prop_assert!(points.contains(&(ms, Some(pair[1].cast_signed()))), "{} of {:?}", ms, points);
            }
        }
    }
}
