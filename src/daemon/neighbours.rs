//! Property test: on a simulated node, whatever invented neighbours send, an honest owner gets the results that it gets alone.
//!
//! What is compared: which events are taken, the events for captures, what ended and its memory, the signs of each turn, the
//! findings with their times, and their counts. What the driver says of a GPU that is lost is compared too.

use super::findings::{START_NS, TURN_NS, lanes, simulated, training};
use highwater_core::clock::{Clock as _, MILLISECOND_NS, SECOND_NS};
use highwater_core::detect::{Detect, Settings, Subject};
use highwater_core::gpu::Process;
use highwater_core::jobs::{Event, JobId, Limits, Sender};
use highwater_core::scope::Scope;
use highwater_core::shares::Given;
use highwater_core::source::Source;
use highwater_engine::intake::{Intake, LogLimits, due};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

const SECONDS: i64 = 26;
/// The honest user, and the process id of its rank 0.
const HONEST: (u32, u32) = (1_001, 70_001);
const GIB: u64 = 1 << 30;

/// What a neighbour does in each turn, from a moment on.
#[derive(Debug, Clone)]
struct Act {
    uid: u32,
    from_s: i64,
    what: What,
    /// How often in a turn.
    times: usize,
}

#[derive(Debug, Clone, Copy)]
enum What {
    /// Steps of many invented ranks that all run out of memory, on this GPU or on none.
    Troubles { jobs: u32, gpu: Option<u32> },
    /// One step of its own that stays open on this GPU.
    Claims { gpu: u32 },
    /// Events of a job of the same name, for the same ranks.
    SameName,
    /// The end of the other's ranks.
    Ends,
    /// Marks that trigger captures.
    Ooms,
    /// Phases under ever new names.
    Phases,
    /// Records of layers.
    Layers,
    /// What is refused, and a count of lost events.
    Nonsense,
}

/// Name, rank, step, begin and end of what ended, and its peaks.
type Ended = (String, u32, Option<u64>, i64, i64, Vec<Option<u64>>);

/// What the honest user has of all of it, and what the driver's word came to.
#[derive(Debug, PartialEq)]
struct Outcome {
    refused: Vec<String>,
    events: Vec<Event>,
    ended: Vec<Ended>,
    signs: Vec<(i64, &'static str, Subject, i64)>,
    findings: Vec<(&'static str, Subject, i64, Option<i64>, String)>,
    counts: Vec<(&'static str, String, u64)>,
    rank_steps: Vec<(u32, u64)>,
}

fn is_own(scope: &Scope) -> bool {
    scope.user() == Some(HONEST.0.to_string().as_str())
}

/// Whether something is of the honest user's job, or of none.
fn is_honest(job: Option<&JobId>) -> bool {
    job.is_none_or(|job| is_own(job.scope()))
}

fn scenario() -> String {
    let troubles = "[jobs.near_oom]\noffset = \"12 s\"\nfor = \"5 s\"\nfree = \"200 MiB\"\n\n[[gpus]]\ncount = 1\n\n[[xids]]\ngpu = 2\nat \
                    = \"9 s\"\nxid = 79\n\n[[lost]]\ngpu = 2\nat = \"9 s\"\nfor = \"20 s\"";
    training(troubles)
}

/// The honest user's job on a node, beside these.
fn play(acts: &[Act]) -> Outcome {
    let (clock, source, node, writers) = simulated(&scenario());
    let log = LogLimits { keep_ns: 60 * SECOND_NS, bytes: 1 << 20 };
    let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default()).with_log(log);
    intake.set_devices(source.devices());
    let (detect, mut sampler) = (Detect::new(Settings::default()), node.sampler(writers));
    let mut said = source.annotations().peekable();
    let (mut refused, mut signs) = (Vec::new(), Vec::new());
    for ms in 1..=SECONDS * 1000 {
        clock.advance_to(START_NS + ms * MILLISECOND_NS);
        let now_ns = clock.now_ns();
        sampler.tick(now_ns, |_| ());
        for annotation in due(&mut said, now_ns) {
            let pid = HONEST.1 + annotation.rank.unwrap_or(0);
            let taken = intake.take(annotation, &Sender::process(Some(pid), HONEST.0));
            refused.extend(taken.err().map(|refusal| refusal.to_string()));
        }
        if (ms * MILLISECOND_NS) % TURN_NS == 0 {
            for act in acts.iter().filter(|act| ms >= act.from_s * 1000) {
                act.play(&intake, ms);
            }
            for (rank, gpu) in (0..2).zip(&*node.gpus) {
                gpu.set_processes(now_ns, Some(vec![Process { pid: HONEST.1 + rank, used_bytes: Some(30 * GIB) }]));
            }
            lanes(&node, now_ns);
            node.advance(intake.ledger(), now_ns);
            let change = detect.advance(&node.join, intake.ledger(), now_ns);
            let of_honest = change.signs.into_iter().filter(|sign| is_honest(sign.subject.job.as_ref()));
            signs.extend(of_honest.map(|sign| (ms, sign.kind.label(), sign.subject, sign.begin_ns)));
        }
    }
    outcome(&intake, &detect, refused, signs, clock.now_ns())
}

fn outcome(
    intake: &Intake,
    detect: &Detect,
    refused: Vec<String>,
    signs: Vec<(i64, &'static str, Subject, i64)>,
    now_ns: i64,
) -> Outcome {
    let honest = |event: &Event| event.scope.as_ref().is_some_and(is_own);
    let (log, mut given) = (intake.log(), Given::default());
    let kept = log.read(log.extent(0), &mut given, usize::MAX).map(|(_, event)| event);
    let ended = intake.ledger().ended().phases.since(0).0;
    let ended = ended.iter().filter(|one| is_own(one.ended.job.scope())).map(|one| {
        let (open, peaks) = (&one.ended.open, one.gpus.iter().map(|gpu| gpu.peak_bytes).collect());
        (open.name.to_string(), one.ended.rank, open.step, open.begin_ns, one.ended.end_ns, peaks)
    });
    let board = detect.board();
    let findings = board.all().filter(|finding| is_honest(finding.sign.subject.job.as_ref())).map(|finding| {
        let (kind, subject) = (finding.sign.kind.label(), finding.sign.subject.clone());
        (kind, subject, finding.raised_ns, finding.ended_ns, finding.first.what.clone())
    });
    let mut findings: Vec<_> = findings.collect();
    findings.sort_by(|one, other| (one.0, &one.1, one.2).cmp(&(other.0, &other.1, other.2)));
    drop(board);
    let counts = detect.counts(now_ns).into_iter().filter(|(of, _)| is_honest(of.job.as_ref()));
    let counts = counts.map(|(of, count)| (of.kind.label(), format!("{:?}", (&of.gpu, &of.job)), count)).collect();
    let jobs = intake.jobs();
    let ranks = jobs.ranks().filter(|(job, _, _)| is_own(job.scope()));
    Outcome {
        refused,
        events: kept.filter(honest).collect(),
        ended: ended.collect(),
        signs,
        findings,
        counts,
        rank_steps: ranks.map(|(_, number, rank)| (number, rank.steps)).collect(),
    }
}

impl Act {
    fn play(&self, intake: &Intake, ms: i64) {
        for n in 0..u32::try_from(self.times).expect("few") {
            for event in self.what.events(u64::try_from(ms).expect("positive"), n) {
                let pid = 80_000 + self.uid;
                // Most is taken, some is refused: both are the neighbour's business.
                if let Ok(annotation) = serde_json::from_value(event) {
                    let _ = intake.take(annotation, &Sender::process(Some(pid), self.uid));
                }
            }
        }
    }
}

impl What {
    /// The `n`th events of the turn at this time.
    fn events(self, ms: u64, n: u32) -> Vec<Value> {
        match self {
            What::Troubles { jobs, gpu } => {
                let (job, rank) = (format!("invented {}", n % jobs), n / jobs);
                let step = ms / 100;
                let event = |event: &str| {
                    json!({"event": event, "kind": "step", "job": job, "rank": rank, "step": step, "gpu": gpu,
                           "memory": {"alloc_retries": step * 3, "reserved": 70 * GIB}})
                };
                vec![event("begin"), event("end")]
            }
            What::Claims { gpu } => {
                vec![json!({"event": "begin", "kind": "step", "job": "claims", "rank": n, "step": 1, "gpu": gpu})]
            }
            What::SameName => ["begin", "end"]
                .map(|event| json!({"event": event, "kind": "step", "job": "train", "rank": n % 2, "step": ms, "gpu": n % 2}))
                .into(),
            What::Ends => vec![json!({"event": "exit", "job": "train", "rank": n % 2})],
            What::Ooms => vec![json!({"event": "mark", "name": "oom", "job": format!("dies {n}"), "rank": 0, "gpu": 0})],
            What::Phases => ["begin", "end"]
                .map(|event| json!({"event": event, "kind": "phase", "name": format!("{ms} {n} {}", "x".repeat(60)), "job": "many"}))
                .into(),
            What::Layers => ["begin", "end"]
                .map(|event| json!({"event": event, "kind": "layer", "name": format!("layer {n}"), "job": "deep", "step": ms}))
                .into(),
            What::Nonsense => vec![
                json!({"event": "end", "kind": "phase", "name": "never begun", "job": "odd"}),
                json!({"event": "mark", "name": "x", "job": "odd", "lost": u32::MAX, "mesh": {"pp": 7}, "world_size": 1}),
                json!({"event": "begin", "name": "y", "job": "odd", "gpu": 99}),
            ],
        }
    }
}

fn act() -> impl Strategy<Value = Act> {
    let what = prop_oneof![
        (1..40_u32, prop::option::of(0..3_u32)).prop_map(|(jobs, gpu)| What::Troubles { jobs, gpu }),
        (0..3_u32).prop_map(|gpu| What::Claims { gpu }),
        Just(What::SameName),
        Just(What::Ends),
        Just(What::Ooms),
        Just(What::Phases),
        Just(What::Layers),
        Just(What::Nonsense),
    ];
    (1_002..1_006_u32, 0..20_i64, what, 1..120_usize).prop_map(|(uid, from_s, what, times)| Act {
        uid,
        from_s,
        what,
        times,
    })
}

fn alone() -> &'static Outcome {
    static ALONE: OnceLock<Outcome> = OnceLock::new();
    ALONE.get_or_init(|| play(&[]))
}

#[test]
fn alone_the_job_has_what_the_property_is_about() {
    let alone = alone();
    let kinds: Vec<_> = alone.findings.iter().map(|finding| finding.0).collect();
    assert_eq!(kinds, ["allocator_thrash", "comm_starvation", "gpu_lost", "low_headroom", "slow_steps", "xid"]);
    assert!(alone.refused.is_empty() && alone.events.len() > 200 && alone.ended.len() > 200, "{alone:?}");
    assert!(alone.signs.len() > 100 && alone.counts.len() >= 5 && alone.rank_steps.len() == 2, "{alone:?}");
}

#[test]
fn all_neighbours_at_once_change_nothing() {
    let all = [
        What::Troubles { jobs: 32, gpu: None },
        What::Troubles { jobs: 8, gpu: Some(0) },
        What::Claims { gpu: 1 },
        What::SameName,
        What::Ends,
        What::Ooms,
        What::Phases,
        What::Layers,
        What::Nonsense,
    ];
    let acts: Vec<_> = (1_002..).zip(all).map(|(uid, what)| Act { uid, from_s: 1, what, times: 100 }).collect();
    assert_eq!(&play(&acts), alone());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn whatever_neighbours_do_changes_nothing(acts in prop::collection::vec(act(), 1..6)) {
        prop_assert_eq!(&play(&acts), alone());
    }
}
