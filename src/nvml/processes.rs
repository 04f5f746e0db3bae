//! Merges NVML's lists of running processes into one list, with one entry per process.

use super::raw::ProcessContext;
use highwater_core::gpu::Process;
use std::collections::BTreeMap;

/// One entry per process, in the order of process ids.
///
/// Inside one list a process appears once for each MIG instance that it uses, and these are added up. If both lists
/// name a process, both report the same memory, so these are not added.
pub(super) fn merge(lists: &[Vec<ProcessContext>]) -> Vec<Process> {
    let mut merged: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for list in lists {
        for (pid, used) in sum_by_pid(list) {
            let known = merged.entry(pid).or_insert(None);
            *known = (*known).max(used);
        }
    }
    merged.into_iter().map(|(pid, used_bytes)| Process { pid, used_bytes }).collect()
}

/// Whether the lists contain every process: since 535.113 the driver leaves out those that are not visible in the
/// caller's pid namespace.
pub(super) fn are_all_seen() -> bool {
    // The initial pid namespace has a fixed number (Linux, include/linux/proc_ns.h).
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|namespace| namespace.as_os_str() == "pid:[4026531836]")
}

/// A sum with an unknown part is unknown.
fn sum_by_pid(list: &[ProcessContext]) -> BTreeMap<u32, Option<u64>> {
    let mut sums: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for context in list {
        let sum = sums.entry(context.pid).or_insert(Some(0));
        *sum = sum.zip(context.used_bytes).map(|(sum, used)| sum.saturating_add(used));
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts(list: &[(u32, Option<u64>)]) -> Vec<ProcessContext> {
        list.iter().map(|&(pid, used_bytes)| ProcessContext { pid, used_bytes }).collect()
    }

    fn merged(lists: &[&[(u32, Option<u64>)]]) -> Vec<(u32, Option<u64>)> {
        let lists: Vec<_> = lists.iter().map(|list| contexts(list)).collect();
        merge(&lists).into_iter().map(|process| (process.pid, process.used_bytes)).collect()
    }

    #[test]
    fn a_process_with_compute_and_graphics_is_counted_once() {
        assert_eq!(merged(&[&[(7, Some(100)), (3, Some(1))], &[(7, Some(100))]]), [(3, Some(1)), (7, Some(100))]);
    }

    #[test]
    fn a_process_on_two_instances_adds_up() {
        assert_eq!(merged(&[&[(7, Some(100)), (7, Some(50))], &[]]), [(7, Some(150))]);
    }

    #[test]
    fn unknown_stays_unknown_and_is_not_zero() {
        assert_eq!(merged(&[&[(7, None)], &[]]), [(7, None)]);
        assert_eq!(merged(&[&[(7, None), (7, Some(5))], &[]]), [(7, None)]);
        assert_eq!(merged(&[&[(7, None)], &[(7, Some(5))]]), [(7, Some(5))]);
    }
}
