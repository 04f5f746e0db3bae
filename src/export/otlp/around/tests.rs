use super::*;
use crate::sim::{Scenario, Sim};
use highwater_core::clock::MILLISECOND_NS;
use highwater_core::detect::{Certainty, FindingKind, Sign, Subject, Text};
use highwater_core::source::Source as _;
use proptest::prelude::*;

/// One point each tenth of a second.
const APART_NS: i64 = 100 * MILLISECOND_NS;

/// A finding: when it begins, how much later it is raised, and when its last sign is seen; all in tenths of a second.
#[derive(Debug, Clone, Copy)]
struct Found {
    begin: i64,
    late: i64,
    last: i64,
    severity: Severity,
}

fn found(begin: i64, late: i64, last: i64) -> Found {
    Found { begin, late, last, severity: Severity::Warning }
}

impl Found {
    /// The finding as the board has it at a time, with a sign at each turn.
    fn at(self, now: i64) -> Option<Finding> {
        let raised = self.begin + self.late;
        let seen_ns = now.min(self.last.max(raised)) * APART_NS;
        let sign = Sign {
            kind: FindingKind::LowHeadroom,
            subject: Subject::default(),
            severity: self.severity,
            certainty: Certainty::Observed,
            begin_ns: self.begin * APART_NS,
            until_ns: 0,
            step: None,
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: Vec::new(),
            text: Text::default(),
        };
        let raised_ns = raised * APART_NS;
        (now >= raised).then_some(Finding {
            id: 1,
            incident: 3,
            gpu: None,
            workloads: Vec::new(),
            first: highwater_core::detect::Said::of(&sign, seen_ns),
            sign,
            raised_ns,
            seen_ns,
            ended_ns: None,
            signs: 1,
        })
    }

    fn is_near(self, at: i64) -> bool {
        let last = self.last.max(self.begin + self.late);
        self.severity > Severity::Info && (self.begin - 100..=last + 100).contains(&at)
    }
}

fn drawn(points: Vec<Point>) -> Drawn {
    let scenario = Scenario::parse("[[gpus]]\ncount = 1\n", "around").expect("a scenario");
    let device = Sim::new(scenario, 0).devices()[0].clone();
    Drawn { device, points, shift_ns: 7, period_ns: MILLISECOND_NS }
}

fn point(at: i64) -> Point {
    Point { at_ns: at * APART_NS, used: Some(at.cast_unsigned()) }
}

/// What is sent of points from 0 to `end`, if they are released every second and at the end: the points with a value,
/// in tenths of a second, and the times of points without one, nanoseconds.
fn sent(findings: &[Found], end: i64) -> (Vec<i64>, Vec<i64>) {
    let mut around = Around::default();
    let mut points = Vec::new();
    let mut turn = |now: i64, until_ns: i64| {
        around.hold(vec![drawn((now - 9..=now).map(point).collect())]);
        let board: Vec<Finding> = findings.iter().filter_map(|finding| finding.at(now)).collect();
        around.look(board.iter());
        let (released, lost) = around.release(until_ns);
        assert_eq!(lost, 0);
        points.extend(released.into_iter().flat_map(|drawn| drawn.points));
    };
    for now in (9..end).step_by(10) {
        turn(now, now * APART_NS - HELD_NS);
    }
    turn(end + (9 - end).rem_euclid(10), i64::MAX);
    assert!(points.windows(2).all(|pair| pair[0].at_ns < pair[1].at_ns), "in order, and nothing twice");
    let (known, unknown): (Vec<_>, Vec<_>) = points.into_iter().partition(|point| point.used.is_some());
    assert!(known.iter().all(|point| point.at_ns == point.used.expect("known").cast_signed() * APART_NS + 7));
    let tenths = known.iter().map(|point| point.at_ns / APART_NS).collect();
    (tenths, unknown.into_iter().map(|point| point.at_ns).collect())
}

#[test]
fn points_are_sent_from_ten_seconds_before_to_ten_seconds_after_and_then_there_is_no_value() {
    let (known, unknown) = sent(&[found(500, 4, 520)], 1_000);
    assert_eq!(known, (400..=620).collect::<Vec<_>>());
    assert_eq!(unknown, [620 * APART_NS + MILLISECOND_NS + 7], "a period after the last value");
    assert_eq!(sent(&[], 1_000), (vec![], vec![]));
}

#[test]
fn a_finding_that_is_raised_late_has_its_points_from_before_it_too() {
    assert_eq!(sent(&[found(500, 50, 560)], 1_000).0, (400..=660).collect::<Vec<_>>());
}

#[test]
fn points_go_on_as_long_as_the_finding_does() {
    assert_eq!(sent(&[found(300, 4, 2_000)], 2_500).0, (200..=2_100).collect::<Vec<_>>());
}

#[test]
fn information_is_no_reason_to_send_points() {
    assert!(sent(&[Found { severity: Severity::Info, ..found(500, 4, 520) }], 1_000).0.is_empty());
}

#[test]
fn what_waits_when_the_daemon_ends_is_decided_by_what_is_known() {
    assert_eq!(sent(&[found(500, 4, 520)], 530).0, (400..540).collect::<Vec<_>>());
    assert!(sent(&[found(900, 4, 920)], 530).0.is_empty());
}

#[test]
fn what_waits_is_bounded_and_what_could_not_wait_is_counted() {
    let mut around = Around::default();
    let many = i64::try_from(MOST_HELD).expect("small") + 1_000;
    around.hold(vec![drawn((0..many).map(point).collect())]);
    let (released, lost) = around.release(0);
    assert!(released.is_empty());
    assert_eq!(lost, 1_000, "it is not known whether these were wanted");
    let waiting = |around: &Around| around.curves.values().map(|curve| curve.waiting.len()).sum::<usize>();
    assert_eq!(waiting(&around), MOST_HELD);
    around.hold(vec![drawn((many..many + 500).map(point).collect())]);
    around.look(found(1_000, 0, 1_000 + 200).at(2_000).iter());
    let (released, lost) = around.release(0);
    assert_eq!((released[0].points.len(), lost), (301 + 1, 199), "points already near are sent, and where they end");
    assert_eq!(waiting(&around), MOST_HELD);
}

proptest! {
    /// Whatever the findings, exactly the points near one of them are sent, each once.
    #[test]
    fn exactly_what_is_near_is_sent(findings in prop::collection::vec((0..1_500_i64, 0..50_i64, 0..300_i64, any::<bool>()), 0..6)) {
        let findings: Vec<Found> = findings.into_iter().map(|(begin, late, lasting, is_info)| {
            let severity = if is_info { Severity::Info } else { Severity::Critical };
            Found { severity, ..found(begin, late, begin + lasting) }
        }).collect();
        let (known, _) = sent(&findings, 2_399);
        let expected: Vec<i64> = (0..2_400).filter(|at| findings.iter().any(|finding| finding.is_near(*at))).collect();
        prop_assert_eq!(known, expected);
    }
}
