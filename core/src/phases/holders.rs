//! Who holds the memory of each GPU, once a second: what ranks say of their allocators, what was found outside of them, and what the
//! driver lists of processes.
//!
//! Enters: ranks, their statistics, and the last list of each GPU's processes. Leaves: a point of each GPU's
//! [`Breakdown`](crate::gpu::Breakdown). Absent on purpose: ranks with several GPUs, whose counters are of one of them.

use super::ledger::Ledger;
use crate::gpu::{GpuState, Latest, Parts, Process};
use crate::jobs::RankMemory;

/// Adds a point of each GPU: what held since this was last called, which began at `since_ns`.
pub(super) fn read(ledger: &Ledger, gpus: &[GpuState], since_ns: i64) {
    let ranks = ledger.open().memory_of_ranks();
    let log = ledger.ended();
    let outside = |rank: &RankMemory| log.rank(&rank.key)?.outside_allocator_bytes(rank.pid, Some(&[rank.gpu]));
    let ranks: Vec<_> = ranks.into_iter().map(|rank| (outside(&rank), rank)).collect();
    drop(log);
    for (position, gpu) in gpus.iter().enumerate() {
        let here: Vec<_> = ranks.iter().filter(|(_, rank)| rank.gpu == position).collect();
        gpu.breakdown.push(since_ns, parts(gpu.processes().as_deref(), &here));
    }
}

/// The parts of one GPU's memory, of its processes, where they are listed, and its ranks, each with what is outside its allocator.
fn parts(latest: Option<&Latest<Vec<Process>>>, ranks: &[&(Option<u64>, RankMemory)]) -> Parts {
    let (mut parts, listed) = (Parts::default(), latest.map(|latest| &*latest.reading));
    let add = |part: &mut Option<u64>, bytes: u64| *part = Some(part.unwrap_or(0).saturating_add(bytes));
    let mut own = Vec::new();
    for (outside, rank) in ranks {
        let process = listed.and_then(|listed| match (listed, ranks) {
            // The driver may know it by another id.
            ([one], [_]) => Some(one),
            _ => listed.iter().find(|process| Some(process.pid) == rank.pid),
        });
        if process.is_none() && latest.is_some_and(|latest| latest.at_ns >= rank.since_ns) {
            // It is gone, and holds nothing whatever its marks said. In a list from before it began it cannot be.
            continue;
        }
        own.extend(process.map(|process| process.pid));
        if let Some(reserved) = rank.reserved {
            let allocated = rank.allocated.unwrap_or(reserved).min(reserved);
            add(&mut parts.allocated, allocated);
            add(&mut parts.cached, reserved - allocated);
            outside.iter().for_each(|bytes| add(&mut parts.outside, *bytes));
        } else if let Some(bytes) = process.and_then(|process| process.used_bytes) {
            add(&mut parts.processes, bytes);
        }
    }
    let others = listed.map(|listed| listed.iter().filter(|process| !own.contains(&process.pid)));
    parts.others = others.and_then(|others| others.map(|process| process.used_bytes).sum());
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
        RankMemory { key: ("j".into(), pid), gpu: 0, pid: Some(pid), since_ns: 5, allocated, reserved }
    }

    fn of(listed: Option<&[Process]>, ranks: &[(Option<u64>, RankMemory)]) -> [Option<u64>; 5] {
        of_list_at(5, listed, ranks)
    }

    fn of_list_at(at_ns: i64, listed: Option<&[Process]>, ranks: &[(Option<u64>, RankMemory)]) -> [Option<u64>; 5] {
        let latest = listed.map(|listed| Latest { at_ns, reading: listed.to_vec() });
        let parts = parts(latest.as_ref(), &ranks.iter().collect::<Vec<_>>());
        parts.all()
    }

    #[test]
    fn each_byte_is_of_one_part() {
        let two = [(Some(3), rank(7, Some(40), Some(60))), (None, rank(8, None, Some(10)))];
        let listed = [process(7, Some(63)), process(8, Some(11)), process(9, Some(5)), process(10, Some(1))];
        assert_eq!(of(Some(&listed), &two), [Some(50), Some(20), Some(3), None, Some(6)]);
        assert_eq!(of(None, &two), [Some(50), Some(20), Some(3), None, None], "the driver lists none");
        // A process of which an allocator says nothing is all its own; one that the driver does not size makes the rest unknown.
        let silent = [(None, rank(7, None, None)), (Some(1), rank(8, Some(9), Some(10)))];
        assert_eq!(of(Some(&listed), &silent), [Some(9), Some(1), Some(1), Some(63), Some(6)]);
        assert_eq!(
            of(Some(&[process(7, Some(63)), process(9, None)]), &two),
            [Some(40), Some(20), Some(3), None, None]
        );
        // An allocator cannot give out more than it has.
        assert_eq!(of(Some(&listed), &[(None, rank(7, Some(90), Some(60)))])[..2], [Some(60), Some(0)]);
    }

    #[test]
    fn a_process_that_is_gone_holds_nothing_and_one_by_another_id_is_the_rank() {
        let one = [(Some(3), rank(7, Some(40), Some(60)))];
        assert_eq!(of(Some(&[]), &one), [None, None, None, None, Some(0)]);
        assert_eq!(of(Some(&[process(8, Some(5)), process(9, Some(6))]), &one), [None, None, None, None, Some(11)]);
        assert_eq!(of(Some(&[process(70, Some(63))]), &one), [Some(40), Some(20), Some(3), None, Some(0)]);
        assert_eq!(
            of_list_at(4, Some(&[]), &one),
            [Some(40), Some(20), Some(3), None, Some(0)],
            "it came after the list"
        );
        assert_eq!(
            (of(None, &[]), of(Some(&[process(8, Some(5))]), &[])),
            ([None; 5], [None, None, None, None, Some(5)])
        );
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
