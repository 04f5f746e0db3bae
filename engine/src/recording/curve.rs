//! Queries the memory of one GPU in a capture: points and a summary of an interval, thinned as a query of the ring is.

use super::part::ALWAYS;
use super::read::track;
use super::rows::RecordingReader;
use highwater_core::clock::SECOND_NS;
use highwater_core::ring::{self, Points, Summary};
use std::io;
use std::path::Path;

/// Bytes of the ring that holds it meanwhile: some millions of changes of a capture of at most minutes.
const MOST_BYTES: usize = 8 << 20;
/// As long as a recording may be.
const RETENTION_NS: i64 = 31 * 86_400 * SECOND_NS;

/// The memory of one GPU in an interval of a capture. Times are Unix nanoseconds.
pub struct Curve {
    /// Index of the GPU.
    pub gpu: String,
    /// First and last time of what is there, Unix nanoseconds.
    pub interval: (i64, i64),
    /// The oldest time of which it has memory.
    pub oldest: i64,
    /// Its changes.
    pub points: Points,
    /// The whole of it.
    pub summary: Summary,
}

/// The memory of a GPU within an interval, at most `most` points of it; `None` if the capture has nothing of it.
///
/// # Errors
/// If the file cannot be read.
pub fn curve(path: &Path, uuid: &str, (from, to): (i64, i64), most: usize) -> io::Result<Option<Curve>> {
    let mut file = RecordingReader::open(path).map_err(io::Error::other)?;
    let devices = file.devices().map_err(io::Error::other)?;
    let Some((gpu, (device, until_ns))) = devices.into_iter().find(|(_, (device, _))| device.uuid == uuid) else {
        return Ok(None);
    };
    let track = track(&mut file, gpu, until_ns, ALWAYS).map_err(io::Error::other)?;
    let config = ring::Config { retention_ns: RETENTION_NS, max_bytes: MOST_BYTES, resolution_ns: 1 };
    let (mut writer, reader) = ring::ring(config).map_err(io::Error::other)?;
    for (at_ns, used) in track.points() {
        match used {
            Some(used) => writer.push(at_ns, used).map_err(io::Error::other)?,
            None => writer.gap(at_ns).map_err(io::Error::other)?,
        }
    }
    let Some(newest_ns) = reader.newest_ns() else { return Ok(None) };
    let (oldest, to) = (track.span().map_or(newest_ns, |(first_ns, _)| first_ns), to.min(newest_ns));
    let ask = |from| reader.points_and_summary((from, to), to == newest_ns, most);
    let Ok((from, (points, summary))) = reader.of_kept(from, to, ask) else { return Ok(None) };
    Ok(Some(Curve { gpu: device.index, interval: (from, to), oldest, points, summary }))
}
