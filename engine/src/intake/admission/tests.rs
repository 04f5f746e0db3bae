use super::*;
use crate::intake::answer::MOST_LISTED;
use crate::intake::unlinked;
use crate::place::Peers;
use crate::place::home::LINK_WAIT_NS;
use highwater_core::clock::Manual;
use highwater_core::gpu::OnGpus;
use highwater_core::jobs::{Job, JobId};
use highwater_core::phases::{Attributed, PhaseMemory};
use serde_json::json;

/// The only job of this name, regardless of its owner.
fn named<'a>(jobs: &'a Jobs, name: &str) -> &'a Job {
    let mut of_name = jobs.by_id().iter().filter(|(id, _)| **id.name() == *name).map(|(_, job)| job);
    let job = of_name.next().expect("it is known");
    assert!(of_name.next().is_none(), "several owners have it");
    job
}

/// What the system says of the processes there, which tests send from as user 1000 and as root.
const STATUS: &str = "Name:\tpython3\nUid:\t1000\t0\t1000\t1000\n";

/// A node of three GPUs whose kubelet gave the last two to `research/llama-0`, and a folder with its processes.
fn node() -> (Intake, Arc<Manual>, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let (pod, docker) = ("0a".repeat(32), "0b".repeat(32));
    let write = |path: String, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, text).expect("written");
    };
    write(format!("logs/llama-0_research_trainer-{pod}.log"), "");
    for (pid, cgroup, environ) in [
        (1, "user.slice".to_owned(), "CUDA_VISIBLE_DEVICES=0"),
        (2, format!("kubepods/{pod}"), "CUDA_VISIBLE_DEVICES=0"),
        (3, format!("kubepods/{pod}"), "CUDA_VISIBLE_DEVICES=0"),
        (4, format!("kubepods/{pod}"), "LOCAL_RANK=1"),
        (5, format!("docker/{docker}"), "CUDA_VISIBLE_DEVICES=0"),
    ] {
        write(format!("{pid}/cgroup"), &format!("0::/{cgroup}\n"));
        write(format!("{pid}/environ"), environ);
        write(format!("{pid}/status"), STATUS);
    }
    let kubelet = Kubelet::with_one_pod(folder.path().join("logs"), &["GPU-c", "GPU-b"]);
    let clock = Arc::new(Manual::at(0));
    let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default());
    let intake = intake.with_kubelet(Some(kubelet.into()));
    let peers = Peers::default().at(folder.path().to_owned());
    let device = |index: &str, uuid: &str| Device { index: index.into(), uuid: uuid.into(), ..Device::default() };
    intake.set_devices(&[device("0", "GPU-a"), device("1", "GPU-b"), device("2", "GPU-c")]);
    let places = intake.senders.places.at(folder.path().to_owned());
    (Intake { senders: Senders { places, peers, ..intake.senders }, ..intake }, clock, folder)
}

fn process(pid: u32) -> Sender {
    Sender::process(Some(pid), 1_000)
}

/// A phase that ended before its rank spread has its memory exported afterwards; several GPUs add no more of it.
#[test]
fn a_rank_that_spreads_loses_what_was_reported_of_one_gpu() {
    let (intake, ..) = node();
    let say = |event: &str, step: u64| {
        let json = json!({"event": event, "kind": "step", "step": step, "job": "j", "rank": 0});
        assert_eq!(intake.take_json(json.to_string().as_bytes(), &process(7)).accepted, 1);
    };
    let outside_bytes = || {
        let (jobs, log) = (intake.jobs(), intake.ledger().ended());
        let rank = &named(&jobs, "j").ranks[&0];
        log.rank(&(JobId::new(Scope::of(None, Some("1000")), "j"), 0))?
            .outside_allocator_bytes(rank.pid, rank.gpus.as_deref())
    };
    let send = || {
        for ended in intake.jobs().take_ended(i64::MAX, usize::MAX) {
            let memory = PhaseMemory { outside_allocator_bytes: Some(5), ..PhaseMemory::unknown(0) };
            intake.ledger().ended().record(Attributed { ended, gpus: vec![memory], uuids: Arc::default() });
        }
    };
    let works_on = |works| intake.senders.places.processes().set([(7, OnGpus { works, idles: Vec::new() })].into());
    works_on(vec![0]);
    say("begin", 1);
    say("end", 1);
    send();
    assert_eq!(outside_bytes(), Some(5));
    say("begin", 2);
    say("end", 2);
    works_on(vec![0, 1]);
    say("begin", 3);
    assert_eq!(outside_bytes(), None);
    send();
    assert_eq!(outside_bytes(), None, "of step 2, which ran on one");
}

#[test]
fn what_is_reported_late_makes_no_counter_fall() {
    let (intake, ..) = node();
    let say = |at_ns: i64, step: Option<u64>, memory: serde_json::Value| {
        let json = json!({"event": "mark", "name": "m", "job": "j", "rank": 0, "time_unix_nano": at_ns, "step": step,
            "memory": memory});
        let begin = json!({"event": "begin", "name": "p", "job": "j", "rank": 0, "time_unix_nano": at_ns});
        for event in [begin, json] {
            assert_eq!(intake.take_json(event.to_string().as_bytes(), &Sender::DAEMON).accepted, 1);
        }
        let jobs = intake.jobs();
        let rank = &named(&jobs, "j").ranks[&0];
        (rank.step, rank.memory.alloc_retries, rank.memory.reserved)
    };
    assert_eq!(say(0, Some(9), json!({"alloc_retries": 500})), (Some(9), Some(500), None));
    let late = json!({"alloc_retries": 499, "reserved": 7});
    assert_eq!(say(-1, Some(8), late), (Some(9), Some(500), Some(7)), "only what was unknown");
    assert_eq!(say(0, Some(10), json!({"alloc_retries": 501})), (Some(10), Some(501), Some(7)));
    // An event is late if it lies before one that reported the same, not before any other.
    let later = json!({"event": "mark", "name": "m", "job": "j", "rank": 0, "time_unix_nano": 100});
    assert_eq!(intake.take_json(later.to_string().as_bytes(), &Sender::DAEMON).accepted, 1);
    assert_eq!(say(50, Some(11), json!({"alloc_retries": 502})), (Some(11), Some(502), Some(7)));
}

#[test]
fn phases_of_ranks_are_bounded_over_all_jobs() {
    let limits = Limits { phase_series: 3, ..Limits::default() };
    let (known, ..) = node();
    let senders = Senders { accounts: Accounts::new(&limits), ..known.senders };
    let intake = Intake { limits, senders, ..known };
    let say = |rank: u32, name: &str| {
        let event = |event: &str| json!({"event": event, "name": name, "job": "j", "rank": rank});
        let batch = json!([event("begin"), event("end")]);
        let answer = intake.take_json(batch.to_string().as_bytes(), &Sender::DAEMON);
        for ended in intake.jobs().take_ended(i64::MAX, usize::MAX) {
            intake.ledger().ended().record(Attributed { ended, gpus: Vec::new(), uuids: Arc::default() });
        }
        answer.accepted
    };
    let taken = [(0, "a"), (1, "a"), (1, "b"), (1, "c"), (2, "a"), (1, "b")].map(|(rank, name)| say(rank, name));
    assert_eq!(taken, [2, 2, 2, 0, 0, 2], "a phase with series keeps them");
    *intake.jobs() = Jobs::new(intake.limits);
    let begin = |name: &str| json!({"event": "begin", "name": name, "job": "j", "rank": 0});
    let begins = json!(["a", "b", "a", "c", "d"].map(begin));
    assert_eq!(
        intake.take_json(begins.to_string().as_bytes(), &Sender::DAEMON).accepted,
        4,
        "open phases have series too"
    );
}

#[test]
fn a_rank_is_followed_to_where_its_process_works() {
    let (intake, ..) = node();
    let gpus_after = |kind: &str, works: &[usize], idles: &[usize]| {
        intake.senders.places.processes().set([(7, OnGpus { works: works.into(), idles: idles.into() })].into());
        let begin = json!({"event": "begin", "kind": kind, "name": "p", "job": "j", "rank": 0});
        assert_eq!(intake.take_json(begin.to_string().as_bytes(), &process(7)).accepted, 1);
        named(&intake.jobs(), "j").ranks[&0].gpus.as_deref().map(<[usize]>::to_vec).unwrap_or_default()
    };
    assert_eq!(gpus_after("phase", &[1], &[0]), [1]);
    assert_eq!(gpus_after("phase", &[1, 0], &[]), [1, 0], "a phase outside of steps counts too");
    assert_eq!(gpus_after("step", &[1], &[0]), [1], "it has freed its memory there");
    assert_eq!(gpus_after("phase", &[1, 2], &[]), [1], "within a step it stays as it is");
    assert_eq!(gpus_after("step", &[1, 2], &[]), [1, 2]);
    assert_eq!(gpus_after("step", &[0], &[]), [1, 2], "the list lacks its previous GPU, so it is incomplete");
    assert_eq!(gpus_after("step", &[2], &[]), [1, 2]);
}

/// The GPUs of a rank after an event of this process.
fn gpus_after(intake: &Intake, rank: u32, pid: Option<u32>, attributes: &serde_json::Value) -> Option<Vec<usize>> {
    // A separate job for each rank: no process outside of a pod's namespace may send events for a job that the pod
    // began.
    let job = format!("j{rank}");
    let event = json!({"event": "mark", "name": "m", "job": job, "rank": rank, "attributes": attributes});
    let begin = json!({"event": "begin", "name": "p", "job": job, "rank": rank, "attributes": attributes});
    for event in [begin, event] {
        assert_eq!(intake.take_json(event.to_string().as_bytes(), &pid.map_or(Sender::DAEMON, process)).accepted, 1);
    }
    named(&intake.jobs(), &job).ranks[&rank].gpus.as_deref().map(<[usize]>::to_vec)
}

#[test]
fn an_index_is_the_nodes_outside_of_containers_and_the_containers_within() {
    let (intake, clock, _folder) = node();
    let none = json!({});
    assert_eq!(gpus_after(&intake, 1, Some(1), &none), Some(vec![0]), "in no container");
    assert_eq!(gpus_after(&intake, 2, Some(2), &none), Some(vec![1]), "its container's first");
    assert_eq!(gpus_after(&intake, 4, Some(4), &none), Some(vec![2]), "its container's second");
    assert_eq!(gpus_after(&intake, 6, Some(6), &json!({"CUDA_VISIBLE_DEVICES": "0"})), None, "gone already");
    assert_eq!(gpus_after(&intake, 7, None, &json!({"CUDA_VISIBLE_DEVICES": "0"})), None, "no process");
    assert_eq!(gpus_after(&intake, 8, None, &json!({"CUDA_VISIBLE_DEVICES": "GPU-c"})), Some(vec![2]));
    assert_eq!(intake.take_json(&begins("j5", &["a"]), &process(5)).accepted, 1);
    clock.advance_to(LINK_WAIT_NS);
    assert_eq!(gpus_after(&intake, 5, Some(5), &none), None, "in a container that is not the kubelet's");
    let claimed = json!({"k8s.namespace.name": "elsewhere", "k8s.pod.name": "other"});
    assert_eq!(gpus_after(&intake, 9, Some(4), &claimed), Some(vec![2]), "the kernel takes precedence over its claim");
}

/// Adds a process of the node whose container's id has these digits, and returns a function that links the container.
fn in_new_container(folder: &tempfile::TempDir, pid: u32, digits: &str, environ: &str) -> impl Fn() {
    let (process, id) = (folder.path().join(pid.to_string()), digits.repeat(32));
    std::fs::create_dir_all(&process).expect("a folder");
    std::fs::write(process.join("cgroup"), format!("0::/kubepods/{id}\n")).expect("written");
    std::fs::write(process.join("environ"), environ).expect("written");
    std::fs::write(process.join("status"), STATUS).expect("written");
    let logs = folder.path().join("logs");
    move || std::fs::write(logs.join(format!("llama-1_research_trainer-{id}.log")), "").expect("linked")
}

#[test]
fn marks_before_the_kubelets_link_wait_for_it_and_are_the_pods() {
    let (intake, clock, folder) = node();
    let link = in_new_container(&folder, 20, "0c", "A=B");
    let _ = in_new_container(&folder, 21, "0c", "A=B");
    let say = |pid: u32, event: &str| {
        let json = json!({"event": event, "kind": "step", "step": 1});
        intake.take_json(json.to_string().as_bytes(), &process(pid)).accepted
    };
    clock.advance_to(SECOND_NS);
    // A shell script starts a program for each mark.
    assert_eq!([say(20, "begin"), say(21, "end")], [1, 1]);
    intake.advance();
    assert_eq!((intake.jobs().by_id().len(), intake.counts.get(Outcome::Malformed)), (0, 0), "they wait");
    assert!(intake.senders.accounts.held(Resource::Bytes) > 0, "on their owner's account");
    // The first of them is gone before the link comes.
    std::fs::remove_dir_all(folder.path().join("20")).expect("gone");
    clock.advance_to(3 * SECOND_NS);
    link();
    intake.advance();
    let mut jobs = intake.jobs();
    let (id, _) = jobs.by_id().first_key_value().expect("a job");
    assert_eq!((&**id.name(), id.scope()), ("research/llama-1", &Scope::Namespace("research".into())));
    let ended = jobs.take_ended(i64::MAX, usize::MAX);
    assert_eq!((ended.len(), ended[0].end_ns), (1, SECOND_NS), "in order, at the times at which they came");
    assert_eq!(intake.counts.get(Outcome::AcceptedWithoutGpu) + intake.counts.get(Outcome::Accepted), 2);
}

#[test]
fn a_container_that_is_never_linked_is_waited_for_once() {
    let (intake, clock, folder) = node();
    let _ = in_new_container(&folder, 20, "0c", "A=B");
    let _ = in_new_container(&folder, 21, "0c", "A=B");
    let begin = |pid: u32, job: &str| assert_eq!(intake.take_json(&begins(job, &["a"]), &process(pid)).accepted, 1);
    let known = || intake.jobs().by_id().len();
    begin(20, "one");
    clock.advance_to(LINK_WAIT_NS - 1);
    intake.advance();
    assert_eq!(known(), 0);
    clock.advance_to(LINK_WAIT_NS);
    intake.advance();
    assert_eq!(known(), 1, "it is taken as its user's");
    begin(21, "two");
    assert_eq!(known(), 2, "another process of the container waits no more");
}

#[test]
fn the_end_of_a_connection_waits_behind_what_it_sent() {
    let (intake, clock, folder) = node();
    let link = in_new_container(&folder, 20, "0c", "A=B");
    let sender = Sender { connection: Some(7), ..process(20) };
    for name in ["a", "b"] {
        assert_eq!(intake.take_json(&begins("j", &[name]), &sender).accepted, 1);
    }
    intake.end_after_parked(Some(20), SenderId::Connection(7), None);
    link();
    clock.advance_to(SECOND_NS);
    intake.advance();
    assert!(named(&intake.jobs(), "j").ranks[&0].exited_ns.is_some(), "it began, and has ended");
}

#[test]
fn a_container_that_sends_too_much_to_wait_is_taken_in_order() {
    let (intake, _clock, folder) = node();
    let _ = in_new_container(&folder, 20, "0c", "A=B");
    let most = u64::try_from(unlinked::MOST_PARKED).expect("some");
    for step in 0..=most {
        let [begin, end] =
            ["begin", "end"].map(|event| json!({"event": event, "kind": "step", "step": step, "job": "j"}));
        assert_eq!(intake.take_json(json!([begin, end]).to_string().as_bytes(), &process(20)).accepted, 2);
        intake.jobs().take_ended(i64::MAX, usize::MAX);
    }
    assert_eq!(named(&intake.jobs(), "j").ranks[&0].step, Some(most));
    assert_eq!(intake.counts.get(Outcome::AcceptedOutOfOrder), 0);
}

#[test]
fn a_process_of_the_rank_that_speaks_again_has_its_gpu_at_once() {
    let (intake, clock, _folder) = node();
    let none = json!({});
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), Some(vec![1]));
    assert_eq!(gpus_after(&intake, 0, Some(4), &none), Some(vec![2]), "another one that uses another GPU");
    // The list is older than this, and no newer one is made here. It was made after these two began to send events.
    clock.advance_to(5 * SECOND_NS);
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), Some(vec![1]), "as a worker of a data loader beside it");
    assert_eq!(gpus_after(&intake, 0, Some(4), &none), Some(vec![2]));
    assert_eq!(gpus_after(&intake, 0, Some(3), &none), None, "a new process, perhaps of a new pod");
}

#[test]
fn a_pod_that_was_replaced_while_its_gpu_was_looked_for_does_not_have_that_of_the_one_before() {
    let (intake, clock, folder) = node();
    // It is unknown which of the two GPUs the first one uses, and then it dies.
    std::fs::write(folder.path().join("2/environ"), "A=B").expect("written");
    assert_eq!(gpus_after(&intake, 0, Some(2), &json!({})), None);
    clock.advance_to(5 * SECOND_NS);
    assert_eq!(gpus_after(&intake, 0, Some(3), &json!({})), None, "the list is older than the process");
}

#[test]
fn what_one_process_of_the_rank_has_said_helps_the_others_and_is_corrected() {
    let (intake, _clock, folder) = node();
    for pid in [2, 3] {
        std::fs::remove_file(folder.path().join(format!("{pid}/environ"))).expect("it may not be read");
    }
    let none = json!({});
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), None, "two GPUs, and no local rank");
    assert_eq!(gpus_after(&intake, 0, Some(2), &json!({"LOCAL_RANK": 1})), Some(vec![2]));
    assert_eq!(gpus_after(&intake, 0, Some(3), &none), Some(vec![2]), "its data loader's worker");
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), Some(vec![2]), "named once");
    assert_eq!(gpus_after(&intake, 0, Some(3), &json!({"LOCAL_RANK": 0})), Some(vec![1]), "started anew");
}

#[test]
fn the_devices_that_events_name_are_not_mixed_with_the_environments_local_rank() {
    let (intake, _clock, folder) = node();
    let (places, peers) = (intake.senders.places.with_kubelet(None), Peers::default().at(folder.path().to_owned()));
    let intake = Intake { senders: Senders { places, peers, ..intake.senders }, ..intake };
    // As with a launcher that forks further processes: all have its environment.
    std::fs::write(folder.path().join("1/environ"), "SLURM_LOCALID=0\0CUDA_VISIBLE_DEVICES=0,1,2").expect("written");
    let all = json!({"CUDA_VISIBLE_DEVICES": "0,1,2"});
    assert_eq!(gpus_after(&intake, 3, Some(1), &all), None, "no guess");
    assert_eq!(gpus_after(&intake, 3, Some(1), &json!({"LOCAL_RANK": "2"})), Some(vec![2]));
    assert_eq!(gpus_after(&intake, 4, Some(1), &json!({})), Some(vec![0]), "only its environment");
}

/// Events of one user: begins of phases of these names.
fn begins(job: &str, names: &[&str]) -> Vec<u8> {
    let begin = |name: &&str| json!({"event": "begin", "name": name, "job": job, "rank": 0});
    serde_json::to_vec(&names.iter().map(begin).collect::<Vec<_>>()).expect("JSON")
}

fn user(uid: u32) -> Sender {
    Sender::process(None, uid)
}

#[test]
fn users_of_one_job_name_have_a_job_each() {
    let (intake, ..) = node();
    let over_tcp = Sender { address: "127.0.0.1".parse().ok(), ..Sender::default() };
    let senders = [user(1), user(2), over_tcp.clone(), Sender { uid: Some(1), ..over_tcp }];
    assert_eq!(senders.map(|sender| intake.take_json(&begins("j", &["a"]), &sender).accepted), [1; 4]);
    let jobs: Vec<String> = intake.jobs().by_id().keys().map(JobId::text).collect();
    assert_eq!(jobs, ["1/j", "127.0.0.1/j", "2/j"], "one of a user, over whichever door");
}

#[test]
fn what_one_user_takes_leaves_room_for_others() {
    let (intake, ..) = node();
    for job in 0..1_000 {
        intake.take_json(&begins(&format!("hostile-{job}"), &["a"]), &user(666));
    }
    let hostile = intake.jobs().by_id().len();
    assert_eq!(hostile, intake.limits.jobs / 2);
    assert_eq!(intake.counts.get(Outcome::TooManyJobs), 1_000 - hostile as u64);
    for job in 0..8 {
        assert_eq!(intake.take_json(&begins(&format!("honest-{job}"), &["a", "b"]), &user(1)).accepted, 2);
    }
}

#[test]
fn a_refused_event_changes_nothing() {
    let (mut intake, ..) = node();
    intake.limits.open = 30;
    *intake.jobs() = Jobs::new(intake.limits);
    let open: Vec<String> = (0..30).map(|n| format!("n{n}")).collect();
    let open: Vec<&str> = open.iter().map(String::as_str).collect();
    assert_eq!(intake.take_json(&begins("j", &open), &user(1)).accepted, 30);
    let held = |intake: &Intake| {
        [Resource::Bytes, Resource::Jobs, Resource::Ranks, Resource::Series].map(|r| intake.senders.accounts.held(r))
    };
    let before = held(&intake);
    let names: Vec<String> = (0..100).map(|n| format!("refused-{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let answer = intake.take_json(&begins("j", &names), &user(1));
    assert_eq!((answer.accepted, answer.refusals[0].reason), (0, "too_many_open"));
    assert_eq!(held(&intake), before);
    // The names of those 100 used none of the job's 32 names: another rank gets the last two.
    let other = |name: &str| json!({"event": "begin", "name": name, "job": "j", "rank": 1});
    let others = json!([other("x"), other("y"), other("z")]);
    let answer = intake.take_json(others.to_string().as_bytes(), &user(1));
    assert_eq!((answer.accepted, answer.refusals[0].reason), (2, "too_many_names"));
}

#[test]
fn everything_that_was_held_is_given_back() {
    let (intake, clock, _folder) = node();
    let held = || intake.senders.accounts.held(Resource::Bytes) + intake.senders.accounts.held(Resource::Series);
    for step in 0..200 {
        let event = |event: &str, kind: &str, name: &str| {
            json!({"event": event, "kind": kind, "name": name, "job": "j",
            "step": step, "attributes": {"k": "v".repeat(100)}})
        };
        let events = json!([
            event("begin", "step", "s"),
            event("begin", "phase", "a"),
            event("begin", "layer", "l"),
            event("end", "layer", "l"),
            event("end", "phase", "a"),
            event("end", "step", "s"),
            event("begin", "phase", "never ended"),
            event("mark", "phase", "m")
        ]);
        assert_eq!(intake.take_json(events.to_string().as_bytes(), &user(1)).accepted, 8);
    }
    for ended in intake.jobs().take_ended(i64::MAX, usize::MAX) {
        intake.ledger().ended().record(Attributed {
            ended,
            gpus: vec![PhaseMemory::unknown(0)],
            uuids: Arc::default(),
        });
    }
    assert!(intake.senders.accounts.held(Resource::Ended) > 600 * 300);
    assert!(held() < 64 << 10, "{}", held());
    clock.advance_to(1_000 * SECOND_NS);
    intake.ledger().expire(1_000 * SECOND_NS);
    assert_eq!(held(), 0);
    intake.ledger().set_devices(vec!["another".into()]);
    assert_eq!(intake.senders.accounts.held(Resource::Ended), 0);
}

/// Events that are all accepted are refused from the budget on; what has ended is dropped at its own budget.
#[test]
fn bytes_are_bounded_over_all_jobs() {
    let (intake, ..) = node();
    let long = |n: usize| format!("{n:0>128}");
    let mut refused = 0;
    for job in 0..16 {
        for batch in 0..8 {
            let layer = |n: usize| {
                let of = |event: &str| {
                    json!({"event": event, "kind": "layer", "name": long(batch * 256 + n), "job": long(job),
                    "attributes": {"a": "x".repeat(1_000)}})
                };
                [of("begin"), of("end")]
            };
            let events: Vec<_> = (0..256).flat_map(layer).collect();
            refused += intake.take_json(&serde_json::to_vec(&events).expect("JSON"), &user(1)).refused;
        }
        for ended in intake.jobs().take_ended(i64::MAX, usize::MAX) {
            intake.ledger().ended().record(Attributed {
                ended,
                gpus: vec![PhaseMemory::unknown(0); 8],
                uuids: Arc::default(),
            });
        }
    }
    assert!(refused > 0 && intake.counts.get(Outcome::OverBudget) > 0);
    assert!(intake.senders.accounts.held(Resource::Bytes) <= intake.limits.bytes / 2);
    assert!(intake.senders.accounts.held(Resource::Ended) <= intake.limits.ended_bytes);
    // Another user still has room.
    assert_eq!(intake.take_json(&begins("honest", &["a", "b", "c"]), &user(2)).accepted, 3);
}

#[test]
fn names_that_would_not_be_seen_are_refused() {
    let (intake, ..) = node();
    for hidden in ["\u{202e}", "\u{feff}", "\u{200b}", "\u{200d}", "\u{2066}", "\u{7}", "\u{2028}", "\u{e0041}"] {
        for (job, name) in [("j", format!("a{hidden}b")), (&*format!("j{hidden}"), "a".to_owned())] {
            let answer = intake.take_json(&begins(job, &[&name]), &user(1));
            assert_eq!(answer.refusals.first().map(|refused| refused.reason), Some("bad_name"), "{hidden:?}");
        }
    }
    assert_eq!(intake.take_json(&begins("größe-大きさ", &["vorwärts → 前"]), &user(1)).accepted, 1);
    let empty = json!({"event": "begin", "name": "p", "job": "j", "gpu": []});
    assert_eq!(intake.take_json(empty.to_string().as_bytes(), &user(1)).refused, 1, "names no GPU");
}

#[test]
fn events_of_a_job_that_is_being_looked_for_wait_and_come_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = Arc::new(Manual::at(0));
    let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default());
    let intake = Arc::new(Intake {
        senders: Senders { peers: Peers::default().at(folder.path().to_owned()), ..intake.senders },
        ..intake
    });
    std::fs::create_dir(folder.path().join("7")).expect("a folder");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let environ = folder.path().join("7/environ");
    rustix::fs::mknodat(rustix::fs::CWD, &environ, rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
    std::fs::write(folder.path().join("7/status"), STATUS).expect("written");
    intake.start_reader().expect("a thread");
    let say = |event: &str| {
        let json = json!({"event": event, "name": "p"});
        assert_eq!(intake.take_json(json.to_string().as_bytes(), &process(7)).refused, 0);
    };
    ["begin", "end", "begin"].into_iter().for_each(say);
    assert!(intake.jobs().by_id().is_empty(), "the process is not known yet");
    // Others do not wait.
    assert_eq!(intake.take_json(&begins("other", &["a"]), &process(8)).accepted, 1);
    std::fs::write(&environ, "HIGHWATER_JOB=late").expect("written");
    while intake.counts.get(Outcome::AcceptedWithoutGpu) < 4 {
        std::thread::yield_now();
    }
    let jobs = intake.jobs();
    assert_eq!(named(&jobs, "late").ranks[&0].open.len(), 1);
    drop(jobs);
    intake.end_readers();
}

/// A connection that a child inherited, and a process of another user that has the id of the one that connected.
#[test]
fn the_environment_of_another_users_process_is_not_read() {
    let (intake, _clock, folder) = node();
    std::fs::write(folder.path().join("1/environ"), "HIGHWATER_JOB=secret\0RANK=3").expect("written");
    let begin = json!({"event": "begin", "name": "p"}).to_string();
    let another = Sender::process(Some(1), 1_002);
    assert_eq!(intake.take_json(begin.as_bytes(), &another).refusals[0].reason, "malformed", "it names no job");
    assert_eq!(intake.jobs().by_id().len(), 0);
}

#[test]
fn a_process_that_cannot_be_read_has_its_events_refused_after_the_deadline_and_no_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = Arc::new(Manual::at(0));
    let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default());
    let intake = Arc::new(Intake {
        senders: Senders { peers: Peers::default().at(folder.path().to_owned()), ..intake.senders },
        ..intake
    });
    intake.senders.peers.set_threaded();
    let event = json!({"event": "begin", "name": "p"});
    intake.take_json(event.to_string().as_bytes(), &process(7));
    assert_eq!(intake.counts.get(Outcome::Malformed), 0);
    assert!(intake.senders.accounts.held(Resource::Bytes) > 0, "waiting events count on their owner's account");
    // There is no reader: it waits for a turn that never comes.
    clock.advance_to(10 * crate::place::peer::DEADLINE_NS);
    intake.senders.peers.end();
    intake.advance();
    assert_eq!(intake.counts.get(Outcome::Malformed), 1, "neither the event nor the environment names a job");
    assert_eq!(intake.senders.accounts.held(Resource::Bytes), 0);
}

/// On a node whose pods are kept apart: 1 is on the node itself, 2 and 3 are in a pod, 5 in a container of no pod.
#[test]
fn a_pod_cannot_take_over_the_job_of_another_place() {
    let (intake, clock, _folder) = node();
    let root = |pid: u32| Sender::process(Some(pid), 0);
    assert_eq!(intake.take_json(&begins("waits", &["a"]), &root(5)).accepted, 1);
    clock.advance_to(LINK_WAIT_NS);
    intake.advance();
    let refused =
        |job: &str, pid: u32| intake.take_json(&begins(job, &["a"]), &root(pid)).refusals.first().map(|r| r.reason);
    assert_eq!((refused("of both", 1), refused("of both", 2)), (None, None));
    assert_eq!(refused("of both", 3), None, "another process of the pod");
    assert_eq!((refused("of both", 5), refused("unknown", 5)), (Some("not_owner"), None));
    assert_eq!((refused("unknown", 2), refused("unknown", 5)), (None, None));
    let jobs: Vec<String> = intake.jobs().by_id().keys().map(JobId::text).collect();
    assert_eq!(jobs, ["0/of both", "0/unknown", "0/waits", "research/of both", "research/unknown"]);
    // Over TCP the pod is unknown.
    let over_tcp = Sender { uid: Some(0), ..Sender::default() };
    assert_eq!(intake.take_json(&begins("of both", &["a"]), &over_tcp).refused, 1);
}

#[test]
fn a_job_begun_before_its_pod_was_known_goes_on_as_the_pods() {
    let (intake, clock, folder) = node();
    let cgroup = folder.path().join("2/cgroup");
    let known = std::fs::read(&cgroup).expect("read");
    std::fs::write(&cgroup, "0::/\n").expect("written");
    let say = |pid: u32| intake.take_json(&begins("j", &["a"]), &Sender::process(Some(pid), 0)).refused;
    assert_eq!(say(2), 0);
    std::fs::write(&cgroup, known).expect("written");
    clock.advance_to(2 * SECOND_NS);
    assert_eq!(say(2), 0, "the one that began it");
    assert_eq!(say(3), 0, "another process of its pod");
    assert_eq!(intake.jobs().by_id().keys().map(JobId::text).collect::<Vec<_>>(), ["0/j"]);
}

/// Phases that end faster than the join reads them are lost for their sender only.
#[test]
fn one_user_does_not_make_another_lose_phases() {
    let (intake, ..) = node();
    let pair = |job: &str| {
        let event = |event: &str| json!({"event": event, "name": "a", "job": job, "rank": 0});
        serde_json::to_vec(&json!([event("begin"), event("end")])).expect("JSON")
    };
    let (hostile, honest) = (pair("hostile"), pair("honest"));
    for _ in 0..20_000 {
        intake.take_json(&hostile, &user(666));
    }
    let lost = intake.jobs().left().overflow;
    assert!(lost > 0);
    for _ in 0..100 {
        intake.take_json(&honest, &user(1));
    }
    assert_eq!(intake.jobs().left().overflow, lost);
}

#[test]
fn a_message_of_nonsense_is_refused_without_a_look_at_all_of_it() {
    let (intake, ..) = node();
    let answer = intake.take_json(&b"1\n".repeat(32_768), &user(1));
    assert_eq!((answer.refused, answer.refusals.len()), (32_768, MOST_LISTED));
    assert_eq!(intake.counts.get(Outcome::Malformed), 32_768);
    assert_eq!(intake.senders.accounts.refusals(), [("uid 1".to_owned(), 32_768)].into());
    // A sender that exceeds its rate stays refused for the rest of its message.
    let limits = Limits { events_a_second: 10, ..Limits::default() };
    let intake = Intake { senders: Senders { accounts: Accounts::new(&limits), ..intake.senders }, ..intake };
    let answer = intake.take_json(&begins("j", &["a"; 100]), &user(1));
    assert_eq!((answer.accepted, answer.refused, intake.counts.get(Outcome::OverRate)), (10, 90, 90));
    // Of a body of one event, the rate is checked before it is parsed.
    assert_eq!((intake.take_json(b"{nonsense}", &user(1)).refused, intake.counts.get(Outcome::OverRate)), (1, 91));
}

/// The sampler reads a GPU at its full rate once a job names it.
#[test]
fn whoever_listens_for_gpus_hears_of_each_event_on_one() {
    let (intake, ..) = node();
    let heard: Arc<std::sync::Mutex<Vec<Vec<usize>>>> = Arc::default();
    let hears = Arc::clone(&heard);
    intake.on_gpus(Box::new(move |gpus, _| hears.lock().expect("no panic").push(gpus.to_vec())));
    intake.on_gpus(Box::new(|_, _| panic!("the first one stays")));
    for gpu in [json!(1), json!([0, 1])] {
        let event = json!({"event": "mark", "name": "m", "job": "j", "rank": 0, "gpu": gpu}).to_string();
        assert_eq!(intake.take_json(event.as_bytes(), &Sender::DAEMON).accepted, 1);
    }
    let nowhere = json!({"event": "mark", "name": "m", "job": "elsewhere", "rank": 0}).to_string();
    assert_eq!(intake.take_json(nowhere.as_bytes(), &Sender::DAEMON).accepted, 1);
    assert_eq!(*heard.lock().expect("no panic"), [vec![1], vec![0, 1]]);
}

/// While devices come and go, a rank that names its GPU by UUID has that GPU or none, and never another.
#[test]
fn positions_of_devices_that_have_changed_are_not_kept() {
    let (intake, ..) = node();
    let device = |uuid: &str| Device { uuid: uuid.into(), ..Device::default() };
    let orders = [["GPU-a", "GPU-b"], ["GPU-b", "GPU-a"], ["GPU-c", "GPU-a"]].map(|order| order.map(device));
    let found = intake.devices.now();
    intake.set_devices(&orders[0]);
    assert!(intake.jobs_of(found).is_none() && intake.jobs_of(intake.devices.now()).is_some());
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let begin = json!({"event": "begin", "name": "p", "job": "j", "rank": 0, "gpu": "GPU-a"}).to_string();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..20_000 {
                intake.set_devices(&orders[n % orders.len()]);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        while !is_over.load(Ordering::Relaxed) {
            assert_eq!(intake.take_json(begin.as_bytes(), &Sender::DAEMON).accepted, 1);
            let jobs = intake.jobs();
            if let Some(gpus) = &named(&jobs, "j").ranks[&0].gpus {
                let uuids: Vec<_> = gpus.iter().map(|gpu| jobs.devices()[*gpu].as_str()).collect();
                assert_eq!(uuids, ["GPU-a"]);
            }
        }
    });
}

/// Recordings contain whole profiles, and a layer is no reason to capture.
#[test]
fn a_layers_record_is_in_no_log_and_triggers_nothing() {
    let (intake, ..) = node();
    let intake = intake.with_log(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 });
    let heard = Arc::new(AtomicUsize::new(0));
    let hears = Arc::clone(&heard);
    intake.on_mark(Box::new(move |_| {
        hears.fetch_add(1, Ordering::Relaxed);
    }));
    let mark = json!({"event": "mark", "kind": "layer", "name": "oom", "job": "j"});
    let mut record = mark.clone();
    record["layer"] = json!({"direction": "forward"});
    assert_eq!(intake.take_json(json!([record, mark, record]).to_string().as_bytes(), &process(1)).accepted, 3);
    assert_eq!((intake.log().extent(0).next, heard.load(Ordering::Relaxed), intake.jobs().marks().count()), (1, 1, 1));
}

/// This process and one that it starts both send steps for one rank. When the second ends, its id means nothing any more.
#[test]
fn a_second_process_of_a_rank_is_told_the_name_under_which_its_marks_are_kept() {
    let (intake, ..) = node();
    let mut first = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("it starts");
    let connected =
        |pid: u32, connection: u32| Sender { connection: Some(connection), ..Sender::process(Some(pid), 7) };
    let step = json!({"event": "begin", "kind": "step", "job": "train"}).to_string();
    let send = |sender: &Sender| intake.take_json(step.as_bytes(), sender);
    let (holder, second) = (connected(first.id(), 1), connected(4_000_000, 2));
    assert_eq!([send(&holder), send(&holder)].map(|answer| (answer.accepted, answer.job)), [(1, None), (1, None)]);
    assert_eq!(send(&second).job.as_deref(), Some("train~4000000"));
    assert_eq!((send(&holder).job, intake.jobs().conflicts()), (None, 1));
    drop(first.stdin.take());
    first.wait().expect("it ends");
    let third = connected(4_000_001, 3);
    assert_eq!(send(&third).job, None, "the rank is free, although its connection's end was not seen yet");
}

/// Jobs send Unix time, which operators set, NTP slews, and a suspended machine leaves behind. A step lasts as long as it
/// lasted by the timeline, which knows of none of these, and none of its marks is refused.
#[test]
fn steps_last_as_long_whatever_the_systems_clock_does_in_them() {
    let hour = 3_600 * SECOND_NS;
    for (what, shift_at) in [
        ("set forward", Box::new(|ms: i64| if ms >= 500 { hour } else { 0 }) as Box<dyn Fn(i64) -> i64>),
        ("set back", Box::new(|ms| if ms >= 500 { -hour } else { 0 })),
        ("slewed by 500 ppm", Box::new(|ms| ms * 500)),
        ("set back and forth", Box::new(|ms| if (ms / 10) % 2 == 0 { hour } else { -hour })),
    ] {
        let clock = Arc::new(Manual::at(1_800_000_000 * SECOND_NS));
        let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default());
        let device = Device { index: "0".into(), uuid: "GPU-a".into(), ..Device::default() };
        intake.set_devices(&[device]);
        let mut said = Vec::new();
        for ms in 0..1_000_i64 {
            clock.advance_to(1_800_000_000 * SECOND_NS + ms * 1_000_000);
            clock.set_unix_shift_ns(shift_at(ms));
            // Steps of 7 ms, one after the other.
            if ms % 7 == 0 {
                let unix_ns = clock.now_ns() + clock.unix_shift_ns();
                for event in ["end", "begin"].iter().skip(usize::from(ms == 0)) {
                    let step = if *event == "end" { ms / 7 - 1 } else { ms / 7 };
                    let body = json!({"event": event, "kind": "step", "job": "j", "rank": 0, "step": step,
                                      "time_unix_nano": unix_ns});
                    said.push(intake.take_json(body.to_string().as_bytes(), &Sender::DAEMON).refused);
                }
            }
        }
        assert!(said.len() > 280 && said.iter().all(|refused| *refused == 0), "{what}: {said:?}");
        let ended = intake.jobs().take_ended(i64::MAX, 1_000);
        let lengths: Vec<_> = ended.iter().map(|ended| ended.end_ns - ended.open.begin_ns).collect();
        assert!(lengths.len() > 140 && lengths.iter().all(|length| *length == 7_000_000), "{what}: {lengths:?}");
    }
}
