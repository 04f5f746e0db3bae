//! Fuzzes what frameworks write: layers as JSON, traces of the profiler, and logs with recompute plans; read, and asked.

use super::folder::Folder;
use super::import::import;
use highwater_analysis::advise::recompute::{Dims, Offer, choose};
use highwater_analysis::advise::{ProfileChoice, checkpoints, recompute};
use highwater_analysis::{kineto, timeline};
use std::fs;

/// Reads a file whose kind the first byte says: layers, a trace, or a log.
pub fn framework(data: &[u8]) {
    thread_local!(static FOLDER: Folder = Folder::make("framework").expect("a folder for temporary files"));
    let Some((kind, data)) = data.split_first() else { return };
    if kind % 3 < 2 {
        // As a report: nothing in it is a table of rows.
        import(&[&[u8::MAX], data].concat());
    }
    match kind % 3 {
        0 => FOLDER.with(|folder| {
            let path = folder.file("layers");
            fs::write(&path, data).expect("written");
            let Ok((layers, _)) = highwater_analysis::advise::read(&path, &ProfileChoice::default()) else { return };
            for (most, skipped) in [(None, 0), (Some(0), 0), (Some(1), 0), (Some(3), 1), (Some(4_096), 0)] {
                if let Ok(advice) = checkpoints(&layers, most, skipped) {
                    assert_eq!(advice.segments.len(), advice.split_modules.len() + 1, "each part begins somewhere");
                    let largest = advice.segments.iter().map(|segment| segment.activation_bytes).max();
                    assert_eq!(largest, Some(advice.max_memory), "the largest part is as large as is said");
                }
            }
        }),
        1 => {
            let Ok(trace) = kineto::read(data) else { return };
            if let Ok(analysis) = timeline::analyse(&trace) {
                for step in &analysis.steps {
                    assert_eq!(step.busy_ns + step.idle_ns, step.window_ns, "the GPU is busy or idle");
                }
            }
            let Ok(mut other) = kineto::read(data) else { return };
            other.rank = Some(trace.rank.map_or(1, |rank| rank ^ 1));
            let _ = timeline::compare(&[&trace, &other]);
        }
        _ => {
            let log = recompute::read(data).expect("a slice can be read");
            let savings = log.plans.iter().map(|plan| plan.saving(&Dims::new()).ok().flatten());
            let offers: Vec<Offer<'_>> =
                log.plans.iter().zip(savings).map(|(plan, saving_bytes)| Offer { plan, saving_bytes }).collect();
            for need in [1, 1 << 20, 1 << 30] {
                if let Ok(choice) = choose(&offers, log.enabled.as_deref(), &log.exclusive(), need) {
                    assert!(choice.saving_bytes >= need, "what is chosen suffices");
                }
            }
        }
    }
}
