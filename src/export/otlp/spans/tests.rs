use super::*;
use highwater_core::clock::MILLISECOND_NS;
use highwater_core::detect::{self, Certainty, Evidence, Finding, Severity, Sign, Subject, Text};
use highwater_core::jobs::{Account, EndedBy, Event, Limits, Open};
use highwater_core::phases::PhaseMemory;
use highwater_core::wire::{EventType, Memory};
use opentelemetry_proto::tonic::trace::v1::Span;
use std::collections::HashSet;

const START_NS: i64 = 1_800_000_000_000_000_000;

/// A step or phase that ended, in milliseconds since the start.
struct Thing<'a> {
    kind: Kind,
    name: &'a str,
    step: Option<u64>,
    rank: u32,
    from_ms: i64,
    to_ms: i64,
    attributes: &'a [(&'a str, &'a str)],
}

fn step(step: u64, from_ms: i64, to_ms: i64) -> Thing<'static> {
    Thing { kind: Kind::Step, name: "step", step: Some(step), rank: 0, from_ms, to_ms, attributes: &[] }
}

fn phase(name: &str, step: u64, from_ms: i64, to_ms: i64) -> Thing<'_> {
    Thing { kind: Kind::Phase, name, step: Some(step), rank: 0, from_ms, to_ms, attributes: &[] }
}

fn ended(thing: &Thing) -> Attributed {
    let text = |(name, value): &(&str, &str)| (Box::from(*name), Scalar::Text((*value).to_owned()));
    let open = Open {
        kind: thing.kind,
        name: thing.name.into(),
        step: thing.step,
        begin_ns: START_NS + thing.from_ms * MILLISECOND_NS,
        memory: Some(Memory { alloc_retries: Some(2), ..Memory::default() }),
        attributes: Some(thing.attributes.iter().map(text).collect()),
        by: None,
        held: None,
        series: None,
    };
    let memory = Some(Memory { allocated: Some(10), alloc_retries: Some(5), ..Memory::default() });
    let end_ns = START_NS + thing.to_ms * MILLISECOND_NS;
    let ended = Ended {
        job: "job".into(),
        rank: thing.rank,
        open,
        end_ns,
        by: EndedBy::End,
        memory,
        gpus: None,
        pid: None,
        waiting: None,
    };
    Attributed { ended, gpus: Vec::new(), uuids: Arc::default() }
}

/// The spans of these things, after one turn at the end.
fn spans(which: Spans, things: &[Thing]) -> Vec<Span> {
    turn(&mut Traces::new(which, Phases::Spans), &Ledger::new(Limits::default()), things, 1_000_000).0.spans
}

/// The result of a turn, with spans as they are sent.
struct Sent {
    spans: Vec<Span>,
    exemplars: Exemplars,
}

impl From<SpanTurn> for Sent {
    fn from(turn: SpanTurn) -> Self {
        Self { spans: turn.spans.into_iter().map(Span::from).collect(), exemplars: turn.exemplars }
    }
}

fn turn(traces: &mut Traces, ledger: &Ledger, things: &[Thing], now_ms: i64) -> (Sent, OtlpStats) {
    for thing in things {
        ledger.ended().record(ended(thing));
    }
    let stats = OtlpStats::default();
    let context = Context { now_ns: START_NS + now_ms * MILLISECOND_NS, shift_ns: 0, marks: &[], findings: &[] };
    let new = traces.new_of(ledger);
    (traces.advance(new, &context, &stats).into(), stats)
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name}"))
}

#[test]
fn a_step_is_a_trace_with_its_phases_below_it_at_the_jobs_own_times() {
    let spans = spans(
        Spans::All,
        &[phase("forward", 7, 10, 40), phase("gather", 7, 50, 60), phase("backward", 7, 40, 90), step(7, 0, 100)],
    );
    assert_eq!(spans.len(), 4);
    let step = named(&spans, "highwater.step");
    assert!(step.parent_span_id.is_empty() && spans.iter().all(|span| span.trace_id == step.trace_id));
    assert_eq!(step.start_time_unix_nano, START_NS.cast_unsigned());
    assert_eq!(step.end_time_unix_nano - step.start_time_unix_nano, 100_000_000);
    assert_eq!(named(&spans, "forward").parent_span_id, step.span_id);
    assert_eq!(named(&spans, "backward").parent_span_id, step.span_id);
    assert_eq!(named(&spans, "gather").parent_span_id, named(&spans, "backward").span_id, "it lies within");
    let ids: HashSet<_> = spans.iter().map(|span| &span.span_id).collect();
    assert_eq!(ids.len(), 4);
    let attributes = format!("{:?}", step.attributes);
    assert!(attributes.contains("highwater.allocator.retries.added") && attributes.contains("IntValue(3)"));
}

#[test]
fn what_a_rank_ended_is_a_span_that_says_so_and_no_exemplar() {
    let ledger = Ledger::new(Limits::default());
    let cut = |thing: &Thing| {
        let mut cut = ended(thing);
        cut.ended.by = EndedBy::Exit;
        cut
    };
    ledger.ended().record(ended(&phase("forward", 7, 0, 40)));
    ledger.ended().record(cut(&phase("backward", 7, 40, 90)));
    ledger.ended().record(cut(&step(7, 0, 90)));
    let sent = turn(&mut Traces::new(Spans::All, Phases::Spans), &ledger, &[], 200).0;
    let step = named(&sent.spans, "highwater.step");
    let says = |name| format!("{:?}", named(&sent.spans, name).attributes).contains("highwater.cut");
    assert_eq!([says("highwater.step"), says("backward"), says("forward")], [true, true, false]);
    assert_eq!(named(&sent.spans, "backward").parent_span_id, step.span_id);
    assert_eq!(sent.exemplars.len(), 1, "of the one that ended by itself");
}

/// A phase waits for its step's end. Meanwhile the driver may have come back with other devices.
#[test]
fn a_span_names_the_gpu_that_its_memory_was_of() {
    let ledger = Ledger::new(Limits::default());
    let mut traces = Traces::new(Spans::All, Phases::Spans);
    let on = |thing: &Thing, uuids: &[&str]| {
        let uuids = uuids.iter().map(|uuid| (*uuid).to_owned()).collect();
        Attributed { gpus: vec![PhaseMemory::unknown(1)], uuids, ..ended(thing) }
    };
    ledger.ended().record(on(&phase("forward", 7, 10, 40), &["GPU-a", "GPU-b"]));
    turn(&mut traces, &ledger, &[], 50);
    ledger.ended().record(on(&step(7, 0, 100), &["GPU-a", "MIG-of-a", "GPU-b"]));
    let spans = turn(&mut traces, &ledger, &[], 200).0.spans;
    let sent = |name| format!("{:?}", named(&spans, name).attributes);
    assert!(sent("forward").contains("GPU-b"), "{}", sent("forward"));
    assert!(sent("highwater.step").contains("MIG-of-a"), "{}", sent("highwater.step"));
}

#[test]
fn ranks_and_nodes_agree_on_the_trace_of_a_step_and_runs_do_not() {
    let trace = |rank, attributes: &[(&str, &str)]| {
        let spans = spans(Spans::All, &[Thing { rank, attributes, ..step(7, 0, 100 + i64::from(rank)) }]);
        (spans[0].trace_id.clone(), spans[0].span_id.clone())
    };
    assert_eq!(trace(0, &[]).0, trace(5, &[]).0);
    assert_ne!(trace(0, &[]).1, trace(5, &[]).1);
    assert_eq!(trace(0, &[("run_id", "a")]).0, trace(1, &[("run_id", "a")]).0);
    assert_ne!(trace(0, &[("run_id", "a")]).0, trace(0, &[("run_id", "b")]).0);
}

#[test]
fn a_traceparent_is_honoured_for_the_step_and_all_in_it() {
    let given: &[(&str, &str)] = &[("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")];
    let spans = spans(Spans::All, &[phase("forward", 7, 10, 40), Thing { attributes: given, ..step(7, 0, 100) }]);
    let step = named(&spans, "highwater.step");
    assert_eq!(step.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
    assert_eq!(step.parent_span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
    let forward = named(&spans, "forward");
    assert_eq!((&forward.trace_id, &forward.parent_span_id), (&step.trace_id, &step.span_id));
    // Bit 8 says that bit 9 is known; bit 9 that the parent is of another process.
    assert_eq!((step.flags, forward.flags), (0x301, 0x101));
}

#[test]
fn what_lies_within_a_phase_of_another_trace_is_in_that_trace() {
    let given: &[(&str, &str)] = &[("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")];
    let away = Thing { attributes: given, ..phase("fetch", 7, 10, 40) };
    let spans = spans(Spans::All, &[phase("decode", 7, 20, 30), away, phase("forward", 7, 50, 60), step(7, 0, 100)]);
    let (fetch, decode) = (named(&spans, "fetch"), named(&spans, "decode"));
    assert_eq!(fetch.parent_span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
    assert_eq!((&decode.trace_id, &decode.parent_span_id), (&fetch.trace_id, &fetch.span_id));
    assert_eq!(named(&spans, "forward").trace_id, named(&spans, "highwater.step").trace_id);
}

#[test]
fn one_in_n_is_the_same_steps_on_every_rank() {
    let steps: Vec<Thing> =
        (0..100_i64).flat_map(|n| [0, 1].map(|rank| Thing { rank, ..step(n as u64, n * 10, n * 10 + 9) })).collect();
    let spans = spans(Spans::OneIn(10), &steps);
    assert_eq!(spans.len(), 20);
    let traces: HashSet<_> = spans.iter().map(|span| &span.trace_id).collect();
    assert_eq!(traces.len(), 10);
}

#[test]
fn only_steps_slower_than_their_ranks_percentile_are_reported() {
    let mut things = Vec::new();
    for n in 0..200_i64 {
        let slow = if n == 150 || n == 10 { 900 } else { 100 + n % 7 };
        things.push(phase("forward", n as u64, n * 1000, n * 1000 + slow / 2));
        things.push(step(n as u64, n * 1000, n * 1000 + slow));
    }
    let spans = spans(Spans::Slow(0.98), &things);
    let sent: Vec<_> =
        spans.iter().filter(|span| span.name == "highwater.step").map(|span| span.start_time_unix_nano).collect();
    assert_eq!(
        sent,
        [(START_NS + 150_000 * MILLISECOND_NS).cast_unsigned()],
        "the first twenty have nothing to be slower than"
    );
    assert_eq!(spans.len(), 2, "its phase comes with it");
}

#[test]
fn phases_whose_step_never_ends_are_sent_without_it() {
    let (mut traces, ledger) = (Traces::new(Spans::All, Phases::Spans), Ledger::new(Limits::default()));
    let (first, _) = turn(&mut traces, &ledger, &[phase("forward", 1, 0, 40)], 100);
    assert_eq!(first.spans.len(), 0, "its step may still end");
    let (second, _) = turn(&mut traces, &ledger, &[phase("forward", 2, 200, 240), step(2, 190, 300)], 400);
    assert_eq!(second.spans.len(), 3);
    let one = spans(Spans::All, &[phase("forward", 1, 0, 40), step(1, 0, 50)]);
    let orphan = second.spans.iter().find(|span| span.start_time_unix_nano == START_NS.cast_unsigned()).expect("it");
    assert_eq!(orphan.parent_span_id, named(&one, "highwater.step").span_id, "where its step would have been");
    let (third, _) = turn(&mut traces, &ledger, &[phase("checkpoint", 3, 500, 900)], 5_900);
    assert_eq!(third.spans.len(), 0);
    let (last, _) = turn(&mut traces, &ledger, &[], 5_901);
    assert_eq!((last.spans.len(), traces.waiting), (1, 0));
    turn(&mut traces, &ledger, &[], 900 + 600_001);
    assert!(traces.ranks.is_empty());
}

/// If the daemon ends in the middle of a step, what is known of the step by then is exported below the span that it
/// would have had.
#[test]
fn at_the_end_phases_of_an_unfinished_step_are_reported_once() {
    let mut traces = Traces::new(Spans::All, Phases::Spans);
    let ledger = Ledger::new(Limits::default());
    let (before, _) = turn(&mut traces, &ledger, &[phase("forward", 7, 10, 40), phase("backward", 7, 40, 90)], 100);
    assert_eq!(before.spans.len(), 0);
    ledger.ended().record(ended(&phase("comm", 7, 90, 95)));
    let context = Context { now_ns: START_NS + 100 * MILLISECOND_NS, ..Context::default() };
    let stats = OtlpStats::default();
    let new = traces.new_of(&ledger);
    let spans = Sent::from(traces.finish(new, &context, &stats)).spans;
    assert_eq!(spans.len(), 3);
    let whole = self::spans(Spans::All, &[phase("forward", 7, 10, 40), step(7, 0, 100)]);
    let step = named(&whole, "highwater.step");
    assert!(spans.iter().all(|span| span.trace_id == step.trace_id && span.parent_span_id == step.span_id));
    assert!(traces.finish(New::default(), &context, &stats).spans.is_empty());
    let mut slow = Traces::new(Spans::Slow(0.9), Phases::Spans);
    turn(&mut slow, &ledger, &[], 100);
    assert!(slow.finish(New::default(), &context, &stats).spans.is_empty(), "of a step that may not be slow");
}

#[test]
fn phases_wait_for_a_step_that_is_open_however_long() {
    let (mut traces, ledger) = (Traces::new(Spans::All, Phases::Spans), Ledger::new(Limits::default()));
    let event = Event {
        event: EventType::Begin,
        kind: Kind::Step,
        name: "step".into(),
        job: "job".into(),
        scope: None,
        rank: 0,
        world_size: None,
        mesh: None,
        gpus: None,
        step: Some(1),
        at_ns: START_NS,
        memory: None,
        layer: None,
        attributes: None,
        pid: None,
        connection: None,
    };
    ledger.open().take(&event, &Account::alone(), START_NS).expect("valid");
    let hour_ms = 3_600_000;
    let (turn, _) = turn(&mut traces, &ledger, &[phase("data", 1, -50, -1), phase("forward", 1, 10, 40)], hour_ms);
    assert_eq!(turn.spans.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), ["data"], "it began before");
    assert_eq!(traces.waiting, 1);
}

#[test]
fn what_waits_is_bounded_and_what_is_lost_is_counted() {
    let limits = Limits { ended: MOST_WAITING / 2, ..Limits::default() };
    let (mut traces, ledger) = (Traces::new(Spans::All, Phases::Spans), Ledger::new(limits));
    let many: Vec<Thing> = (0..limits.ended + 10).map(|_| phase("forward", 1, 0, 1)).collect();
    let (_, stats) = turn(&mut traces, &ledger, &many, 1_000);
    assert_eq!(stats.account(Signal::Spans).dropped(DropReason::Overrun), 10, "the jobs keep no more");
    let (_, stats) = turn(&mut traces, &ledger, &many[..limits.ended], 1_000);
    let (_, more) = turn(&mut traces, &ledger, &many[..100], 1_000);
    assert_eq!(traces.waiting, MOST_WAITING);
    let lost = stats.account(Signal::Spans).dropped(DropReason::Overrun)
        + more.account(Signal::Spans).dropped(DropReason::Overrun);
    assert_eq!(lost as usize, 2 * limits.ended + 100 - MOST_WAITING);
    assert_eq!(more.account(Signal::Spans).produced, more.account(Signal::Spans).dropped(DropReason::Overrun));
}

#[test]
fn the_slowest_is_the_exemplar_that_leads_to_its_trace() {
    let (mut traces, ledger) = (Traces::new(Spans::All, Phases::Spans), Ledger::new(Limits::default()));
    let (turn, _) = turn(&mut traces, &ledger, &[step(1, 0, 100), step(2, 100, 600), step(3, 600, 700)], 1000);
    let exemplar = &turn.exemplars[&Labels::of_rank(&("job".into(), 0))];
    assert_eq!(super::super::span::seconds_of(exemplar), 0.5);
    assert_eq!(exemplar.trace_id, turn.spans[1].trace_id);
    assert_eq!(exemplar.span_id, turn.spans[1].span_id);
}

/// A finding on rank 0 that was last seen at `seen_ms`.
fn finding(severity: Severity, begin_ms: i64, seen_ms: i64) -> Finding {
    let sign = Sign {
        kind: detect::FindingKind::AllocatorThrash,
        subject: Subject { gpu: None, job: Some("job".into()), rank: Some(0) },
        severity,
        certainty: Certainty::Confirmed,
        begin_ns: START_NS + begin_ms * MILLISECOND_NS,
        until_ns: 0,
        step: None,
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: vec![Evidence { name: "fall_bytes", value: 9e9 }],
        text: Text { what: "Rank 0 flushed.".into(), ..Text::default() },
    };
    let seen_ns = START_NS + seen_ms * MILLISECOND_NS;
    Finding {
        id: 3,
        incident: 3,
        gpu: None,
        workloads: Vec::new(),
        first: highwater_core::detect::Said::of(&sign, seen_ns),
        sign,
        raised_ns: seen_ns,
        seen_ns,
        ended_ns: None,
        signs: 1,
    }
}

fn turn_with(traces: &mut Traces, ledger: &Ledger, things: &[Thing], now_ms: i64, findings: &[Finding]) -> Vec<Span> {
    for thing in things {
        ledger.ended().record(ended(thing));
    }
    let context = Context { now_ns: START_NS + now_ms * MILLISECOND_NS, findings, ..Context::default() };
    let new = traces.new_of(ledger);
    Sent::from(traces.advance(new, &context, &OtlpStats::default())).spans
}

#[test]
fn only_steps_with_a_finding_are_reported_also_where_it_is_raised_after_them() {
    let (mut traces, ledger) = (Traces::new(Spans::Findings, Phases::Spans), Ledger::new(Limits::default()));
    let things = [
        phase("forward", 1, 10, 40),
        step(1, 0, 100),
        phase("forward", 2, 110, 140),
        step(2, 100, 200),
        Thing { rank: 1, ..step(2, 100, 200) },
        step(3, 200, 300),
    ];
    assert!(turn_with(&mut traces, &ledger, &things, 1_000, &[]).is_empty(), "a finding may still come");
    assert_eq!(traces.waiting, 6);
    assert_eq!(traces.begin_ns(&New::default()), Some(START_NS));
    let found = [finding(Severity::Warning, 150, 180), finding(Severity::Info, 220, 230)];
    let spans = turn_with(&mut traces, &ledger, &[], 3_301, &found);
    let sent: Vec<_> = spans.iter().map(|span| (span.name.as_str(), span.start_time_unix_nano)).collect();
    let at = |ms: i64| (START_NS + ms * MILLISECOND_NS).cast_unsigned();
    assert_eq!(sent, [("forward", at(110)), ("highwater.step", at(100))], "of the rank that it names, with its phase");
    assert_eq!((traces.waiting, traces.held.len()), (0, 0));
    assert!(turn_with(&mut traces, &ledger, &[], 9_000, &found).is_empty());
}

#[test]
fn steps_that_wait_for_a_finding_are_decided_at_the_end_and_when_there_is_no_room() {
    let (mut traces, ledger) = (Traces::new(Spans::Findings, Phases::Spans), Ledger::new(Limits::default()));
    let found = [finding(Severity::Critical, 150, 180)];
    turn_with(&mut traces, &ledger, &[step(1, 100, 200)], 300, &[]);
    let context = Context { now_ns: START_NS + 300 * MILLISECOND_NS, findings: &found, ..Context::default() };
    assert_eq!(traces.finish(New::default(), &context, &OtlpStats::default()).spans.len(), 1);
    traces.waiting = MOST_WAITING;
    assert_eq!(turn_with(&mut traces, &ledger, &[step(2, 160, 200)], 300, &found).len(), 1);
    assert_eq!((traces.waiting, traces.held.len()), (MOST_WAITING, 0));
}

#[test]
fn a_finding_is_an_event_of_every_step_that_it_lasts_into() {
    let (mut traces, ledger) = (Traces::new(Spans::All, Phases::Spans), Ledger::new(Limits::default()));
    let found = [finding(Severity::Info, 150, 250)];
    let steps = [step(1, 0, 100), step(2, 100, 200), step(3, 200, 300), step(4, 300, 400)];
    let spans = turn_with(&mut traces, &ledger, &steps, 1_000, &found);
    let events: Vec<_> = spans.iter().map(|span| span.events.len()).collect();
    assert_eq!(events, [0, 1, 1, 0]);
    let times: Vec<_> = spans.iter().flat_map(|span| &span.events).map(|event| event.time_unix_nano).collect();
    let at = |ms: i64| (START_NS + ms * MILLISECOND_NS).cast_unsigned();
    assert_eq!(times, [at(150), at(200)], "never before its step");
    let event = &spans[1].events[0];
    let attributes: Vec<_> =
        event.attributes.iter().map(|one| (one.key.as_str(), format!("{:?}", one.value))).collect();
    let of = |name: &str| &attributes.iter().find(|(key, _)| *key == name).unwrap_or_else(|| panic!("no {name}")).1;
    assert_eq!(event.name, "allocator_thrash");
    assert!(
        of("highwater.finding.severity").contains("info") && of("highwater.finding.certainty").contains("confirmed")
    );
    assert!(
        of("highwater.finding.what").contains("Rank 0 flushed.") && of("highwater.finding.id").contains("IntValue(3)")
    );
    assert!(of("highwater.finding.fall_bytes").contains("DoubleValue(9000000000.0)"));
}

/// One step of a rank with these phases, with memory and all else that a GPU and an allocator give. Times and bytes are as irregular as
/// real ones, which do not pack well.
fn full(rank: u32, number: u64, phases: usize) -> (Attributed, Vec<Attributed>) {
    let uuid = format!("GPU-6e789e6a-a1b9-65f4-06c4-5d18800945{rank:02x}");
    let mut state = u64::from(rank) << 32 | number;
    let mut irregular = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 24) % most
    };
    let mut with = |thing: Thing| {
        let mut bytes = || Some((100 << 30) + (irregular(15_000) << 21));
        let mut gpu = PhaseMemory {
            begin_bytes: bytes(),
            end_bytes: bytes(),
            peak_bytes: bytes(),
            min_bytes: bytes(),
            drop_bytes: bytes(),
            outside_allocator_bytes: bytes(),
            ..PhaseMemory::unknown(0)
        };
        #[allow(clippy::cast_precision_loss, reason = "millijoules and microseconds")]
        let mut thousandths = |most| Some(irregular(most) as f64 / 1_000.0);
        (gpu.usage.energy_joules, gpu.usage.idle_seconds) = (thousandths(1_000_000), thousandths(1_000));
        let mut one = Attributed { gpus: vec![gpu], uuids: [uuid.clone()].into(), ..ended(&Thing { rank, ..thing }) };
        one.ended.end_ns += irregular(1_000_000).cast_signed();
        one
    };
    let from_ms = i64::try_from(number).expect("few") * 1_000;
    let step = with(step(number, from_ms, from_ms + 990));
    let names: Vec<String> = (0..phases).map(|nth| format!("phase{nth:02}")).collect();
    let of = |(nth, name): (usize, &String)| {
        let at_ms = from_ms + i64::try_from(nth).expect("few") * 40;
        with(phase(name, number, at_ms, at_ms + 10 + i64::try_from(nth).expect("few")))
    };
    (step, names.iter().enumerate().map(of).collect())
}

#[test]
fn a_step_can_be_one_row_with_its_phases_as_attributes() {
    let (step, phases) = full(0, 3, 20);
    let mut again = phases[19].clone();
    (again.ended.open.begin_ns, again.ended.end_ns) = (step.ended.end_ns - MILLISECOND_NS, step.ended.end_ns);
    again.gpus[0].peak_bytes = Some(130 << 30);
    let ledger = Ledger::new(Limits::default());
    for one in phases.into_iter().chain([again, step]) {
        ledger.ended().record(one);
    }
    let mut traces = Traces::new(Spans::All, Phases::Attributes);
    let (sent, _) = turn(&mut traces, &ledger, &[], 1_000_000);
    assert_eq!(sent.spans.len(), 1);
    let row = named(&sent.spans, "highwater.step");
    let of = |name: &str| row.attributes.iter().find(|one| one.key == name).map(|one| format!("{:?}", one.value));
    let is = |name: &str, value: &str| {
        assert!(of(name).is_some_and(|found| found.contains(value)), "{name}: {:?}", of(name))
    };
    is("highwater.phase.phase19.seconds", "DoubleValue(0.03");
    is("highwater.phase.phase19.memory.peak", &(130_u64 << 30).to_string());
    is("highwater.phases.left_out", "IntValue(4)");
    is("highwater.memory.peak", "IntValue");
    is("highwater.allocator.retries.added", "IntValue(3)");
    assert_eq!((of("highwater.phase.phase03.seconds"), of("highwater.memory.begin")), (None, None), "the shortest");
    assert_eq!(row.attributes.iter().filter(|one| one.key.ends_with(".seconds")).count(), 16);
    // The slowest phases lead to the row.
    assert_eq!(sent.exemplars.len(), 21);
    assert!(sent.exemplars.values().all(|one| one.span_id == row.span_id));
}

/// What docs/otlp.md says of the size of a row.
#[test]
fn a_row_of_ten_phases_takes_at_most_512_bytes_packed() {
    let ledger = Ledger::new(Limits::default());
    let (ranks, steps) = (8, 64);
    let mut traces = Traces::new(Spans::All, Phases::Attributes);
    let mut spans = Vec::new();
    for number in 0..steps {
        for rank in 0..ranks {
            let (step, phases) = full(rank, number, 10);
            for one in phases.into_iter().chain([step]) {
                ledger.ended().record(one);
            }
        }
        let context = Context { now_ns: START_NS, shift_ns: 0, marks: &[], findings: &[] };
        let new = traces.new_of(&ledger);
        spans.extend(traces.advance(new, &context, &OtlpStats::default()).spans);
    }
    let count = spans.len();
    assert_eq!(count as u64, u64::from(ranks) * steps);
    let request = super::super::span_requests::SpanRequests::new(&[], 64 << 20).request(spans).expect("it fits");
    let packed = crate::gzip::compress(&request).len();
    println!("a row: {} bytes, packed {}", request.len() / count, packed / count);
    assert!(packed <= 512 * count, "{} bytes a row", packed / count);
}
