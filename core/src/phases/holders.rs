//! Who holds the memory of each GPU, once a second: what ranks say of their allocators, what was found outside of them, and what the
//! driver lists of processes.
//!
//! Enters: ranks, their statistics, and the last list of each GPU's processes. Leaves: a point of each GPU's
//! [`Breakdown`](crate::gpu::Breakdown). Absent on purpose: counters of ranks with several GPUs, as they are of one of them.

use super::ledger::Ledger;
use crate::gpu::{GpuState, Latest, Parts, Process};
use crate::jobs::RankMemory;
use std::collections::BTreeSet;

/// Adds a point of each GPU: what held since this was last called, which began at `since_ns`.
pub(super) fn read(ledger: &Ledger, gpus: &[GpuState], since_ns: i64) {
    let ranks = ledger.open().memory_of_ranks();
    let pids: BTreeSet<u32> = ranks.iter().filter_map(|rank| rank.pid).collect();
    let log = ledger.ended();
    let outside = |rank: &RankMemory| log.rank(&rank.key)?.outside_allocator_bytes(rank.pid, Some(&[rank.gpu?]));
    let ranks: Vec<_> = ranks.into_iter().map(|rank| (outside(&rank), rank)).collect();
    drop(log);
    for (position, gpu) in gpus.iter().enumerate() {
        let here: Vec<_> = ranks.iter().filter(|(_, rank)| rank.gpu == Some(position)).collect();
        let listed = gpu.processes();
        let listed = listed.as_deref().map(|latest| Listed { latest, are_all: gpu.lists_all });
        gpu.breakdown.push(since_ns, parts(listed, since_ns, gpu.usable_bytes(), &here, &pids));
    }
}

/// A GPU's processes.
#[derive(Clone, Copy)]
struct Listed<'a> {
    latest: &'a Latest<Vec<Process>>,
    /// Whether the driver lists every process that holds memory.
    are_all: bool,
}

/// The parts of one GPU's memory since a time, of its processes, where they are listed, its ranks, each with what is outside its allocator,
/// and the processes of all ranks of the node.
fn parts(
    listed: Option<Listed<'_>>,
    since_ns: i64,
    usable_bytes: Option<u64>,
    ranks: &[&(Option<u64>, RankMemory)],
    pids: &BTreeSet<u32>,
) -> Parts {
    let (mut parts, processes) = (Parts::default(), listed.map_or(&[][..], |listed| &listed.latest.reading));
    let add = |part: &mut Option<u64>, bytes: u64| *part = Some(part.unwrap_or(0).saturating_add(bytes));
    let mut own = Vec::new();
    for (outside, rank) in ranks {
        let named = processes.iter().find(|process| Some(process.pid) == rank.pid);
        // The driver may know it by another id, which is then nobody's else.
        let process = named.or(match (processes, ranks) {
            ([one], [_]) if !pids.contains(&one.pid) => Some(one),
            _ => None,
        });
        // One that is not listed is gone, and holds nothing whatever its marks said. In a list from before it began it cannot be, and
        // one that was heard of since the point begins has held what it said until it went.
        let is_gone =
            |listed: Listed<'_>| listed.are_all && listed.latest.at_ns >= rank.since_ns && rank.heard_ns < since_ns;
        if process.is_none() && listed.is_some_and(is_gone) {
            continue;
        }
        // Of two ranks of one process it is not known what each holds.
        if process.is_some_and(|process| own.contains(&process.pid)) {
            continue;
        }
        own.extend(process.map(|process| process.pid));
        // A job may send any number. What the driver lists of its process may be ten seconds old, and is no bound.
        let most = usable_bytes.unwrap_or(u64::MAX);
        if let Some(reserved) = rank.reserved.map(|reserved| reserved.min(most)) {
            let allocated = rank.allocated.unwrap_or(reserved).min(reserved);
            add(&mut parts.allocated, allocated);
            add(&mut parts.cached, reserved - allocated);
            outside.iter().for_each(|bytes| add(&mut parts.outside, (*bytes).min(most - reserved)));
        } else if let Some(bytes) = process.and_then(|process| process.used_bytes) {
            add(&mut parts.processes, bytes);
        }
    }
    // Of an incomplete list it is not known what nobody else holds.
    if listed.is_some_and(|listed| listed.are_all) {
        let left = || processes.iter().filter(|process| !own.contains(&process.pid));
        let sum = |is_rank: bool| -> Option<u64> {
            left().filter(|process| pids.contains(&process.pid) == is_rank).map(|process| process.used_bytes).sum()
        };
        parts.processes = sum(true).map(|bytes| bytes.saturating_add(parts.processes.unwrap_or(0)));
        parts.others = sum(false);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{Account, Event, Limits};
    use crate::wire::{EventType, Kind, Memory};

    fn process(pid: u32, used_bytes: Option<u64>) -> Process {
        Process { pid, used_bytes }
    }

    fn rank(pid: u32, allocated: Option<u64>, reserved: Option<u64>) -> RankMemory {
        RankMemory {
            key: ("j".into(), pid),
            gpu: Some(0),
            pid: Some(pid),
            since_ns: 5,
            heard_ns: 5,
            allocated,
            reserved,
        }
    }

    fn of(listed: Option<&[Process]>, ranks: &[(Option<u64>, RankMemory)]) -> [Option<u64>; 5] {
        of_list_at(5, listed, ranks)
    }

    fn of_list_at(at_ns: i64, listed: Option<&[Process]>, ranks: &[(Option<u64>, RankMemory)]) -> [Option<u64>; 5] {
        let latest = listed.map(|listed| Latest { at_ns, reading: listed.to_vec() });
        let listed = latest.as_ref().map(|latest| Listed { latest, are_all: true });
        let pids = ranks.iter().filter_map(|(_, rank)| rank.pid).chain([77]).collect();
        parts(listed, 6, Some(130), &ranks.iter().collect::<Vec<_>>(), &pids).all()
    }

    #[test]
    fn each_byte_is_of_one_part() {
        let two = [(Some(3), rank(7, Some(40), Some(60))), (None, rank(8, None, Some(10)))];
        let listed = [process(7, Some(63)), process(8, Some(11)), process(9, Some(5)), process(10, Some(1))];
        assert_eq!(of(Some(&listed), &two), [Some(50), Some(20), Some(3), Some(0), Some(6)]);
        assert_eq!(of(None, &two), [Some(50), Some(20), Some(3), None, None], "the driver lists none");
        // A process of which an allocator says nothing is all its own; one that the driver does not size makes the rest unknown.
        let silent = [(None, rank(7, None, None)), (Some(1), rank(8, Some(9), Some(10)))];
        assert_eq!(of(Some(&listed), &silent), [Some(9), Some(1), Some(1), Some(63), Some(6)]);
        assert_eq!(
            of(Some(&[process(7, Some(63)), process(9, None)]), &two),
            [Some(40), Some(20), Some(3), Some(0), None]
        );
        // An allocator cannot give out more than it has.
        assert_eq!(of(Some(&listed), &[(None, rank(7, Some(90), Some(60)))])[..2], [Some(60), Some(0)]);
    }

    #[test]
    fn a_process_that_is_gone_holds_nothing_and_one_by_another_id_is_the_rank() {
        let one = [(Some(3), rank(7, Some(40), Some(60)))];
        assert_eq!(of(Some(&[]), &one), [None, None, None, Some(0), Some(0)]);
        assert_eq!(of(Some(&[process(8, Some(5)), process(9, Some(6))]), &one), [None, None, None, Some(0), Some(11)]);
        assert_eq!(of(Some(&[process(70, Some(63))]), &one), [Some(40), Some(20), Some(3), Some(0), Some(0)]);
        assert_eq!(
            of_list_at(4, Some(&[]), &one),
            [Some(40), Some(20), Some(3), Some(0), Some(0)],
            "it came after the list"
        );
        // Each list is newer than the point where lists are read each second.
        assert_eq!(of_list_at(7, Some(&[]), &one), [None, None, None, Some(0), Some(0)]);
        let heard = [(Some(3), RankMemory { heard_ns: 6, ..rank(7, Some(40), Some(60)) })];
        assert_eq!(
            of_list_at(7, Some(&[]), &heard),
            [Some(40), Some(20), Some(3), Some(0), Some(0)],
            "it went since the point begins"
        );
        assert_eq!(
            (of(None, &[]), of(Some(&[process(8, Some(5))]), &[])),
            ([None; 5], [None, None, None, Some(0), Some(5)])
        );
    }

    #[test]
    fn no_job_has_more_than_there_is_and_none_has_anothers() {
        // It says 140 on a GPU of 130; a rank of the same process counts once.
        let two = [(Some(9), rank(7, Some(140), Some(140))), (Some(9), rank(7, Some(140), Some(140)))];
        assert_eq!(of(Some(&[process(7, Some(50))]), &two), [Some(130), Some(0), Some(0), Some(0), Some(0)]);
        // 77 is a rank of the node: it is not taken for rank 7, and is a process of a rank, as one with several GPUs is.
        let one = [(Some(3), rank(7, Some(40), Some(60)))];
        assert_eq!(of(Some(&[process(77, Some(63))]), &one), [None, None, None, Some(63), Some(0)]);
    }

    #[test]
    fn of_a_list_that_may_lack_some_nobody_is_gone_and_the_rest_is_not_known() {
        let one = (Some(3), rank(7, Some(40), Some(60)));
        let latest = Latest { at_ns: 5, reading: vec![process(8, Some(5)), process(9, Some(6))] };
        let found = parts(Some(Listed { latest: &latest, are_all: false }), 6, None, &[&one], &[7].into());
        assert_eq!(found.all(), [Some(40), Some(20), Some(3), None, None]);
    }

    #[test]
    fn a_second_has_the_most_that_was_allocated_in_it() {
        let (ledger, account) = (Ledger::new(Limits::default()), Account::alone());
        let say = |at_ns: i64, allocated: u64| {
            let memory =
                Some(Memory { allocated: Some(allocated << 20), reserved: Some(90 << 20), ..Memory::default() });
            let (event, kind, name) = (EventType::Mark, Kind::Phase, "m".to_owned());
            let mark = Event { event, kind, name, memory, gpus: Some(vec![0]), ..Event::exit("j", 0, None, at_ns) };
            ledger.open().take(&mark, &account, at_ns).expect("taken");
        };
        let gpus = [GpuState::new(crate::gpu::Device::default(), 1, 1)];
        let mut seconds = Vec::new();
        for (second, marks) in [&[30, 80, 20][..], &[40], &[], &[10]].into_iter().enumerate() {
            let at_ns = second as i64 * 10;
            marks.iter().for_each(|mib| say(at_ns, *mib));
            read(&ledger, &gpus, at_ns);
            seconds.push(gpus[0].breakdown.points(at_ns, at_ns).last().and_then(|point| point.parts.allocated));
        }
        assert_eq!(seconds, [80, 40, 40, 10].map(|mib| Some(mib << 20)), "without marks, the last one");
    }
}
