use super::*;
use crate::attribute::{Attributed, PhaseMemory};
use crate::clock::{Manual, SECOND_NS};
use serde_json::json;

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
    }
    let kubelet = Kubelet::with_one_pod(folder.path().join("logs"), &["GPU-c", "GPU-b"]);
    let clock = Arc::new(Manual::at(0));
    let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default());
    let intake = intake.with_kubelet(Some(kubelet.into()));
    let peers = Peers::with_kubelet(intake.kubelet.clone()).at(folder.path().to_owned());
    let device = |index: &str, uuid: &str| Device { index: index.into(), uuid: uuid.into(), ..Device::default() };
    intake.set_devices(&[device("0", "GPU-a"), device("1", "GPU-b"), device("2", "GPU-c")]);
    (Intake { peers: Mutex::new(peers), ..intake }, clock, folder)
}

/// A phase that ended before its rank spread has its memory told after; several GPUs tell no more of it.
#[test]
fn a_rank_that_spreads_loses_what_was_told_of_one_gpu() {
    let (intake, ..) = node();
    let say = |event: &str, step: u64| {
        let json = json!({"event": event, "kind": "step", "step": step, "job": "j", "rank": 0});
        assert_eq!(intake.take_json(json.to_string().as_bytes(), Some(7)).accepted, 1);
    };
    let outside_bytes = || intake.jobs().by_name()["j"].ranks[&0].outside_allocator_bytes;
    let tell = || {
        let mut jobs = intake.jobs();
        for ended in jobs.take_ended(i64::MAX) {
            let memory = PhaseMemory { outside_allocator_bytes: Some(5), ..PhaseMemory::unknown(0) };
            jobs.record(Attributed { ended, gpus: vec![memory], uuids: Arc::default() });
        }
    };
    let works_on = |works| intake.processes.set([(7, OnGpus { works, idles: Vec::new() })].into());
    works_on(vec![0]);
    say("begin", 1);
    say("end", 1);
    tell();
    assert_eq!(outside_bytes(), Some(5));
    say("begin", 2);
    say("end", 2);
    works_on(vec![0, 1]);
    say("begin", 3);
    assert_eq!(outside_bytes(), None);
    tell();
    assert_eq!(outside_bytes(), None, "of step 2, which ran on one");
}

#[test]
fn what_is_told_late_makes_no_counter_fall() {
    let (intake, ..) = node();
    let say = |at_ns: i64, step: Option<u64>, memory: serde_json::Value| {
        let json = json!({"event": "mark", "name": "m", "job": "j", "rank": 0, "time_unix_nano": at_ns, "step": step,
            "memory": memory});
        let begin = json!({"event": "begin", "name": "p", "job": "j", "rank": 0, "time_unix_nano": at_ns});
        for event in [begin, json] {
            assert_eq!(intake.take_json(event.to_string().as_bytes(), None).accepted, 1);
        }
        let jobs = intake.jobs();
        let rank = &jobs.by_name()["j"].ranks[&0];
        (rank.step, rank.memory.alloc_retries, rank.memory.reserved)
    };
    assert_eq!(say(0, Some(9), json!({"alloc_retries": 500})), (Some(9), Some(500), None));
    let late = json!({"alloc_retries": 499, "reserved": 7});
    assert_eq!(say(-1, Some(8), late), (Some(9), Some(500), Some(7)), "only what was not known");
    assert_eq!(say(0, Some(10), json!({"alloc_retries": 501})), (Some(10), Some(501), Some(7)));
    // Late is what lies before an event that told the same, not before any.
    let later = json!({"event": "mark", "name": "m", "job": "j", "rank": 0, "time_unix_nano": 100});
    assert_eq!(intake.take_json(later.to_string().as_bytes(), None).accepted, 1);
    assert_eq!(say(50, Some(11), json!({"alloc_retries": 502})), (Some(11), Some(502), Some(7)));
}

#[test]
fn phases_of_ranks_are_bounded_over_all_jobs() {
    let intake = Intake { limits: Limits { phase_series: 3, ..Limits::default() }, ..node().0 };
    *intake.jobs() = Jobs::new(intake.limits);
    let say = |rank: u32, name: &str| {
        let event = |event: &str| json!({"event": event, "name": name, "job": "j", "rank": rank});
        let batch = json!([event("begin"), event("end")]);
        let answer = intake.take_json(batch.to_string().as_bytes(), None);
        let mut jobs = intake.jobs();
        for ended in jobs.take_ended(i64::MAX) {
            jobs.record(Attributed { ended, gpus: Vec::new(), uuids: Arc::default() });
        }
        answer.accepted
    };
    let taken = [(0, "a"), (1, "a"), (1, "b"), (1, "c"), (2, "a"), (1, "b")].map(|(rank, name)| say(rank, name));
    assert_eq!(taken, [2, 2, 2, 0, 0, 2], "what has its place keeps it");
    *intake.jobs() = Jobs::new(intake.limits);
    let begin = |name: &str| json!({"event": "begin", "name": name, "job": "j", "rank": 0});
    let begins = json!(["a", "b", "a", "c", "d"].map(begin));
    assert_eq!(intake.take_json(begins.to_string().as_bytes(), None).accepted, 4, "what is open has its place too");
}

#[test]
fn a_rank_is_followed_to_where_its_process_works() {
    let (intake, ..) = node();
    let gpus_after = |kind: &str, works: &[usize], idles: &[usize]| {
        intake.processes.set([(7, OnGpus { works: works.into(), idles: idles.into() })].into());
        let begin = json!({"event": "begin", "kind": kind, "name": "p", "job": "j", "rank": 0});
        assert_eq!(intake.take_json(begin.to_string().as_bytes(), Some(7)).accepted, 1);
        intake.jobs().by_name()["j"].ranks[&0].gpus.as_deref().map(<[usize]>::to_vec).unwrap_or_default()
    };
    assert_eq!(gpus_after("phase", &[1], &[0]), [1]);
    assert_eq!(gpus_after("phase", &[1, 0], &[]), [1, 0], "a phase in no step tells too");
    assert_eq!(gpus_after("step", &[1], &[0]), [1], "it has freed what it had there");
    assert_eq!(gpus_after("phase", &[1, 2], &[]), [1], "within a step it stays as it is");
    assert_eq!(gpus_after("step", &[1, 2], &[]), [1, 2]);
    assert_eq!(gpus_after("step", &[0], &[]), [1, 2], "where it was is not listed: that list is not whole");
    assert_eq!(gpus_after("step", &[2], &[]), [1, 2]);
}

/// The GPUs of a rank after an event of this process.
fn gpus_after(intake: &Intake, rank: u32, pid: Option<u32>, attributes: &serde_json::Value) -> Option<Vec<usize>> {
    let event = json!({"event": "mark", "name": "m", "job": "j", "rank": rank, "attributes": attributes});
    let begin = json!({"event": "begin", "name": "p", "job": "j", "rank": rank, "attributes": attributes});
    for event in [begin, event] {
        assert_eq!(intake.take_json(event.to_string().as_bytes(), pid).accepted, 1);
    }
    intake.jobs().by_name()["j"].ranks[&rank].gpus.as_deref().map(<[usize]>::to_vec)
}

#[test]
fn an_index_is_the_nodes_outside_of_containers_and_the_containers_within() {
    let (intake, _clock, _folder) = node();
    let none = json!({});
    assert_eq!(gpus_after(&intake, 1, Some(1), &none), Some(vec![0]), "in no container");
    assert_eq!(gpus_after(&intake, 2, Some(2), &none), Some(vec![1]), "its container's first");
    assert_eq!(gpus_after(&intake, 4, Some(4), &none), Some(vec![2]), "its container's second");
    assert_eq!(gpus_after(&intake, 5, Some(5), &none), None, "in a container that is not the kubelet's");
    assert_eq!(gpus_after(&intake, 6, Some(6), &json!({"CUDA_VISIBLE_DEVICES": "0"})), None, "gone already");
    assert_eq!(gpus_after(&intake, 7, None, &json!({"CUDA_VISIBLE_DEVICES": "0"})), None, "anybody");
    assert_eq!(gpus_after(&intake, 8, None, &json!({"CUDA_VISIBLE_DEVICES": "GPU-c"})), Some(vec![2]));
    let claimed = json!({"k8s.namespace.name": "elsewhere", "k8s.pod.name": "other"});
    assert_eq!(gpus_after(&intake, 9, Some(4), &claimed), Some(vec![2]), "the kernel goes before what it says");
}

#[test]
fn a_process_of_the_rank_that_speaks_again_has_its_gpu_at_once() {
    let (intake, clock, _folder) = node();
    let none = json!({});
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), Some(vec![1]));
    assert_eq!(gpus_after(&intake, 0, Some(4), &none), Some(vec![2]), "another one that uses another GPU");
    // The list is older than this, and nobody makes another one here. It is of after these two began to speak.
    clock.advance_to(5 * SECOND_NS);
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), Some(vec![1]), "as a worker of a data loader beside it");
    assert_eq!(gpus_after(&intake, 0, Some(4), &none), Some(vec![2]));
    assert_eq!(gpus_after(&intake, 0, Some(3), &none), None, "one that was not seen before, perhaps of a new pod");
}

#[test]
fn a_pod_that_was_replaced_while_its_gpu_was_looked_for_does_not_have_that_of_the_one_before() {
    let (intake, clock, folder) = node();
    // Nothing tells which of the two GPUs the first one uses, and then it dies.
    std::fs::write(folder.path().join("2/environ"), "A=B").expect("written");
    assert_eq!(gpus_after(&intake, 0, Some(2), &json!({})), None);
    clock.advance_to(5 * SECOND_NS);
    assert_eq!(gpus_after(&intake, 0, Some(3), &json!({})), None, "the list is of before it");
}

#[test]
fn what_one_process_of_the_rank_has_told_helps_the_others_and_is_corrected() {
    let (intake, _clock, folder) = node();
    for pid in [2, 3] {
        std::fs::remove_file(folder.path().join(format!("{pid}/environ"))).expect("it may not be read");
    }
    let none = json!({});
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), None, "two GPUs, and no local rank");
    assert_eq!(gpus_after(&intake, 0, Some(2), &json!({"LOCAL_RANK": 1})), Some(vec![2]));
    assert_eq!(gpus_after(&intake, 0, Some(3), &none), Some(vec![2]), "its data loader's worker");
    assert_eq!(gpus_after(&intake, 0, Some(2), &none), Some(vec![2]), "told once");
    assert_eq!(gpus_after(&intake, 0, Some(3), &json!({"LOCAL_RANK": 0})), Some(vec![1]), "started anew");
}

#[test]
fn the_devices_that_events_tell_are_not_mixed_with_the_environments_local_rank() {
    let (mut intake, _clock, folder) = node();
    intake.kubelet = None;
    *intake.peers.lock().expect("no panic while held") = Peers::default().at(folder.path().to_owned());
    // As of a launcher that makes further processes by itself: all have its environment.
    std::fs::write(folder.path().join("1/environ"), "SLURM_LOCALID=0\0CUDA_VISIBLE_DEVICES=0,1,2").expect("written");
    let all = json!({"CUDA_VISIBLE_DEVICES": "0,1,2"});
    assert_eq!(gpus_after(&intake, 3, Some(1), &all), None, "no guess");
    assert_eq!(gpus_after(&intake, 3, Some(1), &json!({"LOCAL_RANK": "2"})), Some(vec![2]));
    assert_eq!(gpus_after(&intake, 4, Some(1), &json!({})), Some(vec![0]), "its environment alone");
}
