//! Tests of what the analysis reports about steps.

use super::story::trace;
use crate::timeline::{Activity, Analysis, Idle, Kind, NothingOnGpu, Step, Stretch, analyse, analyse_and_draw};

fn analysed(lines: &str) -> Analysis {
    analyse(&trace(Some(1_000_000), 0, lines)).expect("work")
}

fn only(lines: &str) -> Step {
    let analysis = analysed(lines);
    let [step] = &analysis.steps[..] else { panic!("{analysis:?}") };
    step.clone()
}

/// Of a step, in microseconds: window, busy, compute, communication, memory, overlap.
fn times(step: &Step) -> [u64; 6] {
    [step.window_ns, step.busy_ns, step.compute_ns, step.communication_ns, step.memory_ns, step.overlap_ns]
        .map(|ns| ns / 1_000)
}

/// In microseconds: data, host, other.
fn causes(idle: &Idle) -> [Option<u64>; 3] {
    [idle.data_ns, idle.host_ns, idle.other_ns].map(|ns| ns.map(|ns| ns / 1_000))
}

#[test]
fn communication_beside_computation_is_overlap_and_no_time_counts_twice() {
    let step = only(
        "step 4 0..100
         kernel gemm 10..50 launched 1
         kernel norm 20..40 launched 2
         nccl AllReduce 40..80 launched 3
         nccl AllGather 60..90 launched 4
         copy 85..95 launched 5
         echo 4 10..95",
    );
    assert_eq!(times(&step), [100, 85, 40, 50, 10, 10]);
    assert_eq!((step.overlap, step.idle_ns), (Some(0.2), 15_000));
    assert_eq!((step.step, step.kernels, step.memory_operations), (Some(4), 4, 1));
    assert_eq!(step.begin_unix_ns, Some(1_000_000));
    // The sum by kind is of kernels, which may run at once.
    let kinds: Vec<_> = step.collectives.iter().map(|usage| (usage.kind, usage.count, usage.total_ns)).collect();
    assert_eq!(kinds, [(Kind::AllReduce, 1, 40_000), (Kind::AllGather, 1, 30_000)]);
}

#[test]
fn idle_time_is_the_loaders_the_hosts_or_that_of_what_was_queued() {
    let step = only(
        "step 1 0..100
         loading 0..20
         kernel gemm 30..40 launched 25
         kernel gemm 50..60 launched 26
         kernel gemm 80..90 launched 70",
    );
    // Before the first kernel, 20 of 30 are the loader's; the second was queued; the third and what follows were not.
    assert_eq!(causes(&step.idle), [Some(20), Some(10 + 20 + 10), Some(10)]);
    assert_eq!(step.idle.unexplained_ns, 0);
    assert_eq!(step.idle_ns, 70_000);
}

#[test]
fn a_loader_that_works_while_kernels_are_queued_costs_nothing() {
    let step = only("step 1 0..40\nloading 6..40\nkernel a 0..10 launched 0\nkernel b 20..40 launched 5");
    assert_eq!(causes(&step.idle), [Some(0), Some(0), Some(10)]);
}

#[test]
fn what_the_trace_lacks_is_not_zero() {
    let step = only("kernel gemm 10..20\nkernel gemm 30..40");
    assert_eq!((causes(&step.idle), step.idle.unexplained_ns), ([None, None, None], 10_000));
    assert_eq!((step.overlap, step.step), (None, None));
    let step = only("kernel gemm 10..20 launched 3\nnccl AllReduce 30..40 launched 25");
    assert_eq!(causes(&step.idle), [None, Some(10), Some(0)]);
    assert_eq!((step.collectives[0].bytes, step.collectives[0].algorithm_bytes_per_second), (None, None));
    assert_eq!(step.overlap, Some(0.0));
    assert_eq!(analyse(&trace(None, 0, "kernel gemm 1..2")).expect("work").steps[0].begin_unix_ns, None);
}

#[test]
fn a_step_has_the_time_until_its_own_work_ends_on_the_gpu() {
    let analysis = analysed(
        "step 7 0..20
         step 8 20..40
         kernel warm 0..5
         kernel a 10..50 launched 2
         nccl AllReduce 50..70 launched 3
         kernel b 70..90 launched 21
         nccl AllReduce 95..99 launched 45",
    );
    let [first, second] = &analysis.steps[..] else { panic!("{analysis:?}") };
    assert_eq!((times(first), times(second)), ([70, 65, 45, 20, 0, 0], [20, 20, 20, 0, 0, 0]));
    assert_eq!((first.kernels, second.kernels, second.begin_unix_ns), (3, 1, Some(1_070_000)));
    assert_eq!((first.collectives.len(), second.collectives.len()), (1, 0));
    assert_eq!(analysis.collectives_outside_steps, 1);
}

#[test]
fn without_steps_all_of_the_trace_is_one() {
    let step = only("kernel a 10..20 launched 3\nloading 0..5\ncopy 30..40 launched 31");
    assert_eq!((step.step, times(&step)), (None, [30, 20, 10, 0, 10, 0]));
    assert_eq!(causes(&step.idle), [Some(0), Some(10), Some(0)]);
}

#[test]
fn each_gpu_of_a_process_has_its_own_windows() {
    let analysis = analysed("step 1 0..50\nkernel a 10..40 launched 1 gpu 0\nkernel b 20..90 launched 2 gpu 3");
    let found: Vec<_> = analysis.steps.iter().map(|step| (step.device, times(step)[0], times(step)[1])).collect();
    assert_eq!(found, [(0, 50, 30), (3, 90, 70)]);
}

#[test]
fn a_collective_of_unknown_kind_is_communication_and_named() {
    let analysis = analysed(
        "nccl Generic_1 0..10
         kernel mscclKernel_Sum_half 10..15
         kernel vllm::cross_device_reduce_1stage 20..50
         nccl Broadcast 50..60 bytes 100 of 4",
    );
    let step = &analysis.steps[0];
    assert_eq!((times(step), step.collective_lookalikes), ([60, 55, 30, 25, 0, 0], 1));
    let counts: Vec<_> = step.collectives.iter().map(|usage| (usage.kind, usage.count, usage.bytes)).collect();
    assert_eq!(counts, [(Kind::Broadcast, 1, Some(100)), (Kind::Unknown, 2, None)]);
    let names: Vec<&str> = analysis.unknown_collectives.iter().map(String::as_str).collect();
    assert_eq!(names, ["mscclKernel_Sum_half", "ncclDevKernel_Generic_1_RING_LL"]);
}

#[test]
fn a_trace_without_a_gpu_says_so() {
    let error = analyse(&trace(None, 0, "step 1 0..50\nloading 0..5")).expect_err("no work");
    assert_eq!(error, NothingOnGpu { is_cut_short: false });
    let error = NothingOnGpu { is_cut_short: true }.to_string();
    assert_eq!(error, "the trace has no kernel and no copy on any GPU, and ends before all its events");
}

#[test]
fn what_is_drawn_are_steps_work_that_lies_close_together_and_idle_time_by_its_largest_cause() {
    let lines = "step 3 0..400
         loading 0..60
         kernel gemm 100..110 launched 90
         kernel norm 125..130 launched 91
         kernel late 160..170 launched 92
         copy 160..180 launched 93
         nccl AllReduce 250..300 launched 240
         step 4 400..600
         kernel gemm 420..440 launched 410";
    let mut drawn = Vec::new();
    let analysis = analyse_and_draw(&trace(None, 0, lines), |one: Stretch| {
        drawn.push((one.activity, one.step, one.begin_ns / 1_000, one.end_ns / 1_000));
    });
    assert_eq!(analysis, analyse(&trace(None, 0, lines)), "drawing changes no number");
    let expected = [
        (Activity::Step, Some(3), 0, 400),
        (Activity::Step, Some(4), 400, 600),
        // 15 µs between the first two, 30 to the third.
        (Activity::Compute, Some(3), 100, 130),
        (Activity::Compute, Some(3), 160, 170),
        (Activity::Compute, Some(4), 420, 440),
        (Activity::Communication, Some(3), 250, 300),
        (Activity::Memory, Some(3), 160, 180),
        // 60 of its 100 are the loader's; then work was queued; then none was.
        (Activity::WaitsForData, Some(3), 0, 100),
        (Activity::WaitsOtherwise, Some(3), 130, 160),
        (Activity::WaitsForHost, Some(3), 180, 250),
        (Activity::WaitsForHost, Some(3), 300, 400),
        (Activity::WaitsForHost, Some(4), 400, 420),
        (Activity::WaitsForHost, Some(4), 440, 600),
    ];
    assert_eq!(drawn, expected);
}
