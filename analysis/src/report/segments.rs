//! How memory lay in an allocator's segments at a time, and why a request found none.
//!
//! Enters: layouts. Leaves: a table of them, and a sentence about each failure. Invariant: a cause is named only if the layout
//! shows it.

use super::table::{Table, size};
use highwater_engine::recording::{Allocator, Failure, Layout, PoolLayout};
use serde_json::{Value, json};

/// The largest request that is served from segments for small ones, bytes.
const MOST_SMALL: u64 = 1 << 20;
/// Failures whose layouts are in the table.
const MOST_SHOWN: usize = 3;

/// Why there was no memory, as far as that is known.
pub(super) fn why(failure: &Failure) -> Option<String> {
    match &failure.layout {
        Some(layout) => Some(cause(failure, layout)),
        None => {
            let unused = failure.at.unused()?;
            Some(if unused >= failure.requested {
                format!(
                    "{} were reserved and not allocated, which is enough: in pieces (fragmentation), or for other streams or \
                     CUDA graphs, of which the history has too little to know.",
                    size(unused)
                )
            } else {
                not_enough(unused)
            })
        }
    }
}

fn not_enough(unused: u64) -> String {
    format!("{} were reserved and not allocated, which would not have been enough.", size(unused))
}

fn cause(failure: &Failure, layout: &Layout) -> String {
    let whole = layout.whole();
    let unused = whole.free.saturating_add(whole.idle);
    if unused < failure.requested {
        return not_enough(unused);
    }
    let is_other_stream =
        |pool: &PoolLayout| failure.stream.is_some() && pool.stream.is_some() && pool.stream != failure.stream;
    let is_other_size =
        |pool: &PoolLayout| pool.is_small.is_some_and(|is_small| is_small != (failure.requested <= MOST_SMALL));
    let is_usable = |pool: &PoolLayout| !is_other_stream(pool) && !is_other_size(pool) && pool.is_private != Some(true);
    let usable = layout.sum(is_usable);
    let (free, largest) = (usable.free.saturating_add(usable.idle), usable.largest_piece);
    if free < failure.requested {
        let of = |what: &str, is_it: &dyn Fn(&PoolLayout) -> bool| {
            let pools = layout.sum(is_it);
            let bytes = pools.free.saturating_add(pools.idle);
            (bytes > 0).then(|| format!("{} {what}", size(bytes)))
        };
        let parts = [
            of("for other streams", &is_other_stream),
            of("for requests of another size", &|pool| !is_other_stream(pool) && is_other_size(pool)),
            of("in pools of their own, such as a CUDA graph's", &|pool| {
                !is_other_stream(pool) && !is_other_size(pool) && pool.is_private == Some(true)
            }),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        return format!(
            "{} were reserved and not allocated, of which it could use {}: {}.",
            size(unused),
            size(free),
            parts.join(", ")
        );
    }
    if largest >= failure.requested || usable.idle >= failure.requested {
        return format!(
            "{} lay free, in a piece or in segments that would have been enough: a limit of this process \
             (torch.cuda.set_per_process_memory_fraction), or a pool of its own that the history does not show.",
            size(free)
        );
    }
    let pieces = format!(
        "{} lay free in {} pieces, the largest {}: fragmentation.",
        size(usable.free),
        usable.pieces,
        size(largest)
    );
    if usable.is_expandable {
        return format!("{pieces} Segments could grow already (expandable_segments).");
    }
    format!(
        "{pieces} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which was off, is made against it: the blocks of a stream then \
         share one segment that grows."
    )
}

/// A table of the layouts that are known, with a row for each pool where there are several.
pub(super) fn table(of: &Allocator) -> Option<Table> {
    let failures = of.failures.iter().take(MOST_SHOWN);
    let at_failures = failures.filter_map(|failure| {
        Some((format!("at entry {}, no memory", failure.at.after_events), failure.layout.as_ref()?))
    });
    let at_peak = of.layout_at_peak.iter().filter(|_| of.events > 0).map(|layout| ("at the peak".to_owned(), layout));
    let at_end = of.layout_at_end.iter().map(|layout| ("at the end".to_owned(), layout));
    let all: Vec<(String, &Layout)> = at_peak.chain(at_failures).chain(at_end).collect();
    let mut table = Table::new(["segments", "count", "reserved", "in blocks", "free", "pieces", "largest", "idle"]);
    for (when, layout) in &all {
        table.push(row(when.clone(), &layout.whole()));
        if layout.pools.len() > 1 {
            layout.pools.iter().for_each(|pool| table.push(row(format!("  {}", name(pool)), pool)));
        }
    }
    (!all.is_empty()).then_some(table)
}

fn row(name: String, pool: &PoolLayout) -> [String; 8] {
    let largest = if pool.pieces > 0 { size(pool.largest_piece) } else { String::new() };
    [
        name,
        pool.segments.to_string(),
        size(pool.reserved),
        size(pool.in_blocks),
        size(pool.free),
        pool.pieces.to_string(),
        largest,
        if pool.idle_segments > 0 { format!("{} in {}", size(pool.idle), pool.idle_segments) } else { String::new() },
    ]
}

/// What requests a pool serves, for people.
fn name(pool: &PoolLayout) -> String {
    let stream = pool.stream.map_or_else(|| "stream not known".to_owned(), |stream| format!("stream {stream}"));
    let kind = match pool.is_small {
        Some(true) => ", up to 1 MiB",
        Some(false) => ", above 1 MiB",
        None => "",
    };
    let private = if pool.is_private == Some(true) { ", a pool of its own" } else { "" };
    let grows = if pool.is_expandable { ", growing" } else { "" };
    format!("{stream}{kind}{private}{grows}")
}

/// A layout for programs and for the page.
pub(super) fn json(layout: &Layout) -> Value {
    let mut value = sums(&layout.whole());
    let pools = layout.pools.iter().map(|pool| {
        let mut value = sums(pool);
        if let Some(fields) = value.as_object_mut() {
            fields.insert("name".to_owned(), name(pool).into());
            fields.insert("stream".to_owned(), pool.stream.into());
            fields.insert("small".to_owned(), pool.is_small.into());
            fields.insert("private".to_owned(), pool.is_private.into());
            fields.insert("expandable".to_owned(), pool.is_expandable.into());
        }
        value
    });
    let pools: Vec<Value> = pools.collect();
    if let Some(fields) = value.as_object_mut() {
        fields.insert("pools".to_owned(), pools.into());
    }
    value
}

fn sums(pool: &PoolLayout) -> Value {
    json!({
        "segments": pool.segments,
        "reserved_bytes": pool.reserved,
        "in_blocks_bytes": pool.in_blocks,
        "free_bytes": pool.free,
        "pieces": pool.pieces,
        "largest_piece_bytes": (pool.pieces > 0).then_some(pool.largest_piece),
        "idle_segments": pool.idle_segments,
        "idle_bytes": pool.idle,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_engine::recording::{Moment, Place};

    const MIB: u64 = 1 << 20;

    fn large(free: u64, pieces: u64, largest_piece: u64) -> PoolLayout {
        let (stream, is_small, is_private) = (Some(0), Some(false), None);
        PoolLayout {
            stream,
            is_small,
            is_private,
            segments: 9,
            reserved: 1_000 * MIB,
            free,
            pieces,
            largest_piece,
            ..PoolLayout::default()
        }
    }

    fn failed(requested: u64, pools: Vec<PoolLayout>) -> String {
        let at = Moment { after_events: 9, at_ns: None, allocated: Some(0), reserved: Some(1_000 * MIB) };
        let layout = Some(Layout { pools });
        let (device_free, stream, place) = (None, Some(0), Place::default());
        why(&Failure { at, requested, device_free, stream, layout, place }).expect("known")
    }

    #[test]
    fn a_request_that_found_only_pieces_names_fragmentation() {
        let said = failed(64 * MIB, vec![large(300 * MIB, 31, 18 * MIB)]);
        assert!(said.starts_with("300.00 MiB lay free in 31 pieces, the largest 18.00 MiB: fragmentation."), "{said}");
        assert!(said.contains("expandable_segments:True, which was off"), "{said}");
        let grows = PoolLayout { is_expandable: true, ..large(300 * MIB, 31, 18 * MIB) };
        let said = failed(64 * MIB, vec![grows]);
        assert!(said.ends_with("fragmentation. Segments could grow already (expandable_segments)."), "{said}");
    }

    #[test]
    fn what_lay_elsewhere_is_no_fragmentation() {
        let other = PoolLayout { stream: Some(7), ..large(300 * MIB, 2, 200 * MIB) };
        let small = PoolLayout { is_small: Some(true), ..large(40 * MIB, 90, MIB) };
        let private = PoolLayout { is_private: Some(true), idle: 50 * MIB, ..large(0, 0, 0) };
        let said = failed(64 * MIB, vec![large(10 * MIB, 3, 4 * MIB), other, small, private]);
        assert_eq!(
            said,
            "400.00 MiB were reserved and not allocated, of which it could use 10.00 MiB: 300.00 MiB for other streams, 40.00 MiB for \
             requests of another size, 50.00 MiB in pools of their own, such as a CUDA graph's."
        );
        assert!(failed(64 * MIB, vec![large(63 * MIB, 1, 63 * MIB)]).contains("would not have been enough"));
        assert!(failed(64 * MIB, vec![large(65 * MIB, 1, 65 * MIB)]).contains("a limit of this process"));
    }
}
