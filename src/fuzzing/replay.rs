//! Fuzzes the files of a recording, compressed or not, and the source that plays them.

use super::folder::Folder;
use super::parts;
use flate2::Crc;
use highwater_core::source::{CallStats, NextTick, Source as _};
use highwater_engine::recording::{Options, Replay};
use std::fs;
use std::path::Path;

/// The files, in the order of the parts, each with the bit of the first byte that compresses it. The next higher bit
/// only gives it the name of a compressed file.
const FILES: [(&str, u8); 4] = [
    ("nvml_1khz.csv", 1),
    ("annotations_rank0.jsonl", 1 << 2),
    ("utilization.csv", 1 << 4),
    ("annotations_rank1.jsonl", 1 << 6),
];
/// Ticks and annotations that are played.
const MOST_PLAYED: usize = 64;

/// Plays the recording whose files are the parts of the input. The first byte says which are compressed, or only named
/// so; the last part is `gpus.json`.
pub fn replay(data: &[u8]) {
    thread_local!(static FOLDER: Folder = Folder::make("replay").expect("a folder for temporary files"));
    let Some((packed, data)) = data.split_first() else { return };
    FOLDER.with(|folder| {
        let mut parts = parts(data);
        for (name, bit) in FILES {
            put(folder.path(), name, parts.next(), packed & bit != 0, packed & (bit << 1) != 0);
        }
        put(folder.path(), "gpus.json", parts.next(), false, false);
        if let Ok(replay) = Replay::open(folder.path(), Options::default()) {
            play(&replay);
        }
    });
}

/// Leaves one file of this name, compressed or not, or none.
fn put(folder: &Path, name: &str, content: Option<&[u8]>, packs: bool, is_called_packed: bool) {
    let (plain, gz) = (folder.join(name), folder.join(format!("{name}.gz")));
    let (wanted, other) = if packs || is_called_packed { (gz, plain) } else { (plain, gz) };
    // After most inputs the file does not exist.
    let _ = fs::remove_file(other);
    match content {
        Some(content) if packs => fs::write(wanted, gzip(content)).expect("written"),
        Some(content) => fs::write(wanted, content).expect("written"),
        None => {
            // After most inputs the file does not exist.
            let _ = fs::remove_file(wanted);
        }
    }
}

/// Gzip format without compression: compressing would take longer than everything that reads it.
fn gzip(content: &[u8]) -> Vec<u8> {
    let mut packed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let mut chunks = content.chunks(usize::from(u16::MAX)).peekable();
    while let Some(chunk) = chunks.next() {
        let length = u16::try_from(chunk.len()).unwrap_or(u16::MAX);
        packed.push(u8::from(chunks.peek().is_none()));
        packed.extend([length.to_le_bytes(), (!length).to_le_bytes()].concat());
        packed.extend(chunk);
    }
    let mut sum = Crc::new();
    sum.update(content);
    packed.extend([sum.sum().to_le_bytes(), sum.amount().to_le_bytes()].concat());
    packed
}

/// Plays an opened recording.
pub(super) fn play(replay: &Replay) {
    let (calls, mut at_ns) = (CallStats::default(), i64::MIN);
    for _ in 0..MOST_PLAYED {
        at_ns = match replay.next_tick(at_ns) {
            NextTick::At(next_ns) => {
                assert!(next_ns > at_ns, "time advances");
                next_ns
            }
            _ => break,
        };
        for gpu in 0..replay.devices().len().min(4) {
            // There is no value before the first reading.
            let _ = replay.memory_used(gpu, at_ns);
            replay.medium(gpu, at_ns, &calls);
        }
    }
    replay.annotations().take(MOST_PLAYED).for_each(drop);
    assert!(replay.changes(i64::MIN, i64::MAX).all(|change| change.gpu < replay.devices().len()));
}
