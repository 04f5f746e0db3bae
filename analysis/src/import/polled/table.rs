//! Tables for people, printed again and again: `nvidia-smi` with `-l`, in a loop or in `watch`; `nvitop -1`; `gpustat`.
//!
//! A GPU has two lines in the tables of the first two, the second with its memory; in gpustat's it has one.

use super::clock::{self, DateOrder, Stamp};
use super::columns::{MIB, is_bus_id, size};
use super::hints::Hints;
use super::polls::Polls;
use crate::import::each_line;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{Fault, LineFile};
use highwater_engine::recording::tape::Tape;
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::borrow::Cow;
use std::path::Path;

/// Whether lines can be the first of such a file.
pub(crate) fn is_begin(lines: &[String]) -> bool {
    lines.iter().any(|line| is_head(&plain(line))) || lines.iter().take(8).any(|line| gpustat(&plain(line)).is_some())
}

/// The line above a table, with the version of the tool.
fn is_head(line: &str) -> bool {
    let inner = line.trim_start_matches(['|', '│', ' ']);
    inner.len() < line.len() && (inner.starts_with("NVIDIA-SMI ") || inner.starts_with("NVITOP "))
}

/// Reads such a file.
pub(crate) fn tape(path: &Path, file: &LineFile, hints: &Hints) -> Result<Tape, OpenError> {
    let mut reader = Reader { polls: Polls::new(hints), at: None, table_at: None, head: None, host: None };
    let mut skipped = SkippedLines::default();
    each_line(path, file, &mut skipped, |line| reader.take(&plain(line)))?;
    reader.polls.tape(path, "log of a table of GPUs", skipped)
}

struct Reader {
    polls: Polls,
    /// The time of the newest line that is one.
    at: Option<Stamp>,
    /// The time of the table that is read.
    table_at: Option<Stamp>,
    /// The GPU of the line before.
    head: Option<Device>,
    /// The node of the list of gpustat that is read.
    host: Option<String>,
}

impl Reader {
    fn take(&mut self, line: &str) -> Result<(), Fault> {
        let head = self.head.take();
        if let Some((at, host)) = time_in(line) {
            self.at = Some(at);
            self.host = host.map(str::to_owned);
        } else if is_head(line) {
            self.polls.begin_poll();
            self.table_at = self.at.take();
        } else if let Some((device, used, total)) = gpustat(line) {
            // It prints the time above each of its lists.
            self.table_at = self.at.take().or(self.table_at);
            // GPUs of several nodes have the same numbers.
            let index = match &self.host {
                Some(host) => format!("{} ({host})", device.index),
                None => device.index.clone(),
            };
            return self.add(Device { index, memory_total_bytes: Some(total), ..device }, Some(used));
        } else if let Some(cells) = cells(line) {
            match head {
                None => self.head = gpu(&cells),
                Some(device) => return self.usage(device, &cells),
            }
        } else if line.contains("MiB") && line.split(',').count() > 2 {
            return Err(Fault::Line(FileProblem::malformed("it is a row of CSV in a log of tables")));
        }
        Ok(())
    }

    fn usage(&mut self, device: Device, cells: &[&str]) -> Result<(), Fault> {
        let text = cells.get(1).copied().unwrap_or_default();
        let (used, total) = text.split_once('/').unwrap_or((text, ""));
        let total = size(total.trim(), MIB).ok().flatten();
        // `Not Supported` stands there for what the driver does not know.
        let used = size(used.trim(), MIB).ok().flatten();
        self.add(Device { memory_total_bytes: total, ..device }, used)
    }

    fn add(&mut self, device: Device, used: Option<u64>) -> Result<(), Fault> {
        let name = device.pci_bus_id.clone().unwrap_or_else(|| device.index.clone());
        self.polls.add(self.table_at, Some(&name), used, || device)
    }
}

/// A line without what a terminal would obey.
fn plain(line: &str) -> Cow<'_, str> {
    if !line.contains('\u{1b}') {
        return Cow::Borrowed(line);
    }
    let mut text = String::with_capacity(line.len());
    let mut rest = line.chars();
    while let Some(one) = rest.next() {
        if one == '\u{1b}' {
            // `ESC [` parameters, and a letter that ends them.
            let _ = rest.find(|one| one.is_ascii_alphabetic());
        } else {
            text.push(one);
        }
    }
    Cow::Owned(text)
}

/// The time of a line that has nothing else: nvidia-smi's, `date`'s between marks, gpustat's between host and driver; and that host.
fn time_in(line: &str) -> Option<(Stamp, Option<&str>)> {
    if line.len() > 200 || !line.contains(':') || line.starts_with(['|', '│', '[']) {
        return None;
    }
    let order = DateOrder::DayMonth;
    if let Some(stamp) = clock::parse(line.trim_matches(|one: char| "=-#* ".contains(one)), order) {
        return Some((stamp, None));
    }
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let stamp = clock::parse(&words.get(1..6)?.join(" "), order)?;
    (!matches!(stamp, Stamp::OfDay(_))).then_some((stamp, words.first().copied()))
}

/// The cells of a line of a table.
fn cells(line: &str) -> Option<Vec<&str>> {
    let bar = ['|', '│'].into_iter().find(|bar| line.starts_with(*bar))?;
    Some(line.trim_matches(bar).split(bar).map(str::trim).collect())
}

/// The GPU of the first of its two lines: `0  NVIDIA L40S   On` and `00000000:4A:00.0 Off`.
fn gpu(cells: &[&str]) -> Option<Device> {
    let (index, name) = cells.first()?.split_once(char::is_whitespace)?;
    index.parse::<u32>().ok()?;
    let bus = cells.get(1)?.split_ascii_whitespace().next()?;
    let name = name.trim();
    let name = ["On", "Off", "N/A"].iter().find_map(|mode| name.strip_suffix(mode)).unwrap_or(name).trim();
    is_bus_id(bus).then(|| Device {
        index: index.to_owned(),
        name: Some(name.to_owned()),
        pci_bus_id: Some(bus.to_owned()),
        ..Device::default()
    })
}

/// A line of gpustat: `[0] NVIDIA L40S | 60'C,  68 % |  3712 /  7982 MB | root(3709M)`. Gives the GPU, what is in use, and its size.
fn gpustat(line: &str) -> Option<(Device, u64, u64)> {
    let (index, rest) = line.strip_prefix('[')?.split_once(']')?;
    index.parse::<u32>().ok()?;
    let mut cells = rest.split('|');
    let name = cells.next()?.trim();
    let (used, total) = cells.find_map(|cell| {
        let (used, total) = cell.trim().strip_suffix("MB")?.split_once('/')?;
        Some((size(used.trim(), MIB).ok()??, size(total.trim(), MIB).ok()??))
    })?;
    Some((Device { index: index.to_owned(), name: Some(name.to_owned()), ..Device::default() }, used, total))
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::imported;
    use super::*;
    use highwater_engine::recording::tape::Times;

    /// A table as nvidia-smi 535 prints it, of GPUs with this memory in use.
    pub(super) fn printed(at: &str, used: &[&str]) -> String {
        let mut text = format!(
            "{at}       \n\
             +---------------------------------------------------------------------------------------+\n\
             | NVIDIA-SMI 535.183.01             Driver Version: 535.183.01   CUDA Version: 12.2     |\n\
             |-----------------------------------------+----------------------+----------------------+\n\
             | GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |\n\
             | Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |\n\
             |=========================================+======================+======================|\n"
        );
        for (gpu, used) in used.iter().enumerate() {
            text += &format!(
                "|   {gpu}  NVIDIA GeForce RTX 3090        Off | 00000000:0{}:00.0 Off |                  N/A |\n\
                 | 30%   22C    P8              13W / 350W |  {used} / 24576MiB |      0%      Default |\n\
                 |                                         |                      |                  N/A |\n\
                 +-----------------------------------------+----------------------+----------------------+\n",
                4 + gpu
            );
        }
        text += "| Processes:                                                                            |\n\
                 |  GPU   GI   CI        PID   Type   Process name                            GPU Memory |\n\
                 |=======================================================================================|\n\
                 |    0   N/A  N/A      1492      C   python                                     4096MiB |\n\
                 +---------------------------------------------------------------------------------------+\n";
        text
    }

    #[test]
    fn a_table_that_is_printed_again_and_again_is_a_reading_each_time() {
        let marked = |at: &str, used: &[&str]| format!("==== {at} ====\n{}", printed(at, used));
        let log = marked("Wed Apr  9 10:26:15 2025", &["17706MiB", "1MiB"])
            + "\u{1b}[2K&\n"
            + &printed("Wed Apr  9 10:26:17 2025", &["17000MiB", "N/A"])
            + &printed("Wed Apr  9 10:26:19 2025", &["17000MiB", "9MiB"]);
        let tape = imported("gpu_log.txt", &log).expect("a log");
        let points: Vec<Vec<_>> = tape
            .tracks
            .iter()
            .map(|track| track.points().map(|(at, used)| ((at - tape.begin_ns) / 1_000_000_000, used)).collect())
            .collect();
        let mib = |mib: u64| Some(mib * MIB);
        assert_eq!(points[0], [(0, mib(17_706)), (2, mib(17_000)), (4, mib(17_000))]);
        assert_eq!(points[1], [(0, mib(1)), (2, None), (4, mib(9))]);
        let gpu = &tape.devices[1];
        assert_eq!((gpu.index.as_str(), gpu.name.as_deref()), ("1", Some("NVIDIA GeForce RTX 3090")));
        assert_eq!((gpu.pci_bus_id.as_deref(), gpu.memory_total_bytes), (Some("00000000:05:00.0"), Some(24_576 * MIB)));
        assert_eq!((tape.skipped.count, tape.format.times), (0, Times::Relative));
        assert_eq!(tape.assumed, Vec::<String>::new());
    }

    #[test]
    fn lists_of_gpustat_are_readings() {
        let mut log = String::new();
        for (second, used) in [(32, "3712"), (33, "3800")] {
            log += &format!("compute3          Mon Dec 19 18:33:{second} 2022  465.19.01\n");
            log += &format!("[0] NVIDIA GeForce RTX 2070 SUPER | 60'C,  68 % |  {used} /  7982 MB | root(3709M)\n");
            log += "[1] NVIDIA GeForce RTX 2070 SUPER | 60°C,  68 %,  80 / 215 W |     7 /  7982 MB |\n";
        }
        let tape = imported("gpustat.txt", &log).expect("a log");
        assert_eq!(
            tape.tracks[0].points().map(|(_, used)| used).collect::<Vec<_>>(),
            [Some(3712 * MIB), Some(3800 * MIB)]
        );
        assert_eq!((tape.tracks.len(), tape.end_ns - tape.begin_ns), (2, 1_000_000_000));
    }

    #[test]
    fn gpus_of_several_nodes_are_several() {
        let list = |host: &str, used: u32| {
            format!(
                "{host}   Mon Dec 19 18:33:32 2022  465.19.01\n[0] NVIDIA A40 | 60'C,  68 % |  {used} / 46068 MB |\n"
            )
        };
        let tape = imported("gpustat.txt", &(list("n1", 3_712) + &list("n2", 40_000))).expect("a log");
        let shown: Vec<_> = tape.devices.iter().map(|gpu| gpu.index.as_str()).collect();
        assert_eq!((shown, tape.tracks[0].used_at(tape.end_ns)), (vec!["0 (n1)", "0 (n2)"], Some(3_712 * MIB)));
    }

    #[test]
    fn nvitop_prints_sizes_in_several_units() {
        let log = "Mon Nov 25 14:46:48 2024\n│ NVITOP 1.3.2      Driver Version: 535.216.01      CUDA Driver Version: 12.2 │\n\
                   │   1  ..a V100-DGXS-32GB  On   │ 00000000:08:00.0 Off │                    0 │\n\
                   │ N/A   45C    P0    39W / 300W │   1.50GiB / 32.00GiB │      0%      Default │\n";
        let tape = imported("nvitop.log", log).expect("a log");
        assert_eq!(tape.tracks[0].points().last().and_then(|(_, used)| used), Some(1_536 * MIB));
        assert_eq!(tape.devices[0].memory_total_bytes, Some(32 << 30));
    }
}
