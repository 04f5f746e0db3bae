//! Reports made by hand, for unit tests.

use super::curve::Point;
use super::model::{Gpu, Origin, Report};
use super::room::Room;
use highwater_core::gpu::Device;
use highwater_engine::recording::Times;
use std::path::Path;

/// A report on GPUs with these changes of memory, from 0 to a nanosecond after the last of them.
pub(super) fn report(name: &str, gpus: &[Vec<(i64, Option<u64>)>]) -> Report {
    let last_ns = gpus.iter().flatten().map(|(at_ns, _)| *at_ns).max().unwrap_or(0);
    let gpu = |(index, points): (usize, &Vec<(i64, Option<u64>)>)| {
        let mut gpu = Gpu::new(
            Device { index: index.to_string(), ..Device::default() },
            0,
            Room::of(1).points_of_one(gpus.len()),
        );
        points.iter().for_each(|(at_ns, used)| gpu.usage.push(Point { at_ns: *at_ns, used: *used }));
        gpu.usage.end(None, last_ns + 1);
        gpu
    };
    let origin = Origin::new("test", Times::Unix);
    Report {
        name: name.to_owned(),
        end_ns: last_ns + 1,
        gpus: gpus.iter().enumerate().map(gpu).collect(),
        ..Report::of_file(Path::new(name), origin)
    }
}
