//! `nvidia-smi -q`, as text or as XML (`-x`), with `-l` or in a loop.
//!
//! nvidia-smi prints one member a line, so that lines suffice. MIG instances have memory of their own, which is part of the GPU's, and
//! is left out.

use super::clock::{self, DateOrder, Stamp};
use super::columns::{MIB, size};
use super::hints::Hints;
use super::polls::Polls;
use crate::import::each_line;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{Fault, LineFile};
use highwater_engine::recording::tape::Tape;
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::path::Path;

/// Whether lines can be the first of such a file.
pub(crate) fn is_begin(lines: &[String]) -> bool {
    lines.iter().any(|line| line.contains("<nvidia_smi_log>") || line.contains("NVSMI LOG"))
}

/// Reads such a file.
pub(crate) fn tape(path: &Path, file: &LineFile, hints: &Hints) -> Result<Tape, OpenError> {
    let mut reader = Reader { polls: Polls::new(hints), at: None, gpu: None, section: Section::Other };
    let mut skipped = SkippedLines::default();
    each_line(path, file, &mut skipped, |line| reader.take(line))?;
    if let Err(Fault::Line(problem) | Fault::File(problem)) = reader.end_gpu() {
        skipped.add(path, 0, problem);
    }
    reader.polls.tape(path, "log of nvidia-smi -q", skipped)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    /// The memory of the GPU.
    Memory,
    Mig,
    Other,
}

struct Reader {
    polls: Polls,
    at: Option<Stamp>,
    /// The GPU that is read, and its memory in use if it was there: `Some(None)` is not known.
    gpu: Option<(Device, Option<Option<u64>>)>,
    section: Section,
}

impl Reader {
    fn take(&mut self, line: &str) -> Result<(), Fault> {
        let (name, value) = if line.starts_with('<') { of_xml(line) } else { of_text(line) };
        match name {
            "nvidia_smi_log" | "/nvidia_smi_log" => self.end_gpu()?,
            "timestamp" | "Timestamp" => {
                self.end_gpu()?;
                let at = clock::parse(value, DateOrder::DayMonth);
                self.at = Some(at.ok_or_else(|| Fault::Line(FileProblem::not_a("timestamp", value)))?);
                self.polls.begin_poll();
            }
            _ if name.starts_with("gpu id=") || name.starts_with("GPU 0") && name.contains(':') => {
                self.end_gpu()?;
                let bus = name.trim_start_matches("gpu id=").trim_start_matches("GPU ").trim_matches('"');
                self.gpu = Some((Device { pci_bus_id: Some(bus.to_owned()), ..Device::default() }, None));
                self.section = Section::Other;
            }
            "mig_devices" | "MIG Device" | "MIG Devices" => self.section = Section::Mig,
            "/mig_devices" => self.section = Section::Other,
            "fb_memory_usage" | "FB Memory Usage" if self.section != Section::Mig => self.section = Section::Memory,
            "/fb_memory_usage" if self.section != Section::Mig => self.section = Section::Other,
            // The next section of the text, and of a MIG instance its last.
            "BAR1 Memory Usage" | "Utilization" => self.section = Section::Other,
            _ => return self.member(name, value),
        }
        Ok(())
    }

    fn member(&mut self, name: &str, value: &str) -> Result<(), Fault> {
        let Some((device, used)) = &mut self.gpu else { return Ok(()) };
        match (name, self.section) {
            ("product_name" | "Product Name", Section::Other) => device.name = Some(value.to_owned()),
            ("uuid" | "GPU UUID", Section::Other) => value.clone_into(&mut device.uuid),
            ("total" | "Total", Section::Memory) => device.memory_total_bytes = size(value, MIB).ok().flatten(),
            ("reserved" | "Reserved", Section::Memory) => {
                device.memory_reserved_bytes = size(value, MIB).ok().flatten()
            }
            ("used" | "Used", Section::Memory) => *used = Some(size(value, MIB).map_err(Fault::Line)?),
            _ => {}
        }
        Ok(())
    }

    fn end_gpu(&mut self) -> Result<(), Fault> {
        match self.gpu.take() {
            Some((device, Some(used))) => {
                let name = device.pci_bus_id.clone();
                self.polls.add(self.at, name.as_deref(), used, || device)
            }
            _ => Ok(()),
        }
    }
}

/// The name of a line's element, with its attributes, and its text.
fn of_xml(line: &str) -> (&str, &str) {
    let Some((name, rest)) = line.strip_prefix('<').and_then(|line| line.split_once('>')) else { return ("", "") };
    (name, rest.split('<').next().unwrap_or_default().trim())
}

/// The name and the value of a line `Name  : value`, or a section's name.
fn of_text(line: &str) -> (&str, &str) {
    line.split_once(" : ").map_or((line, ""), |(name, value)| (name.trim(), value.trim()))
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::imported;
    use super::*;

    fn text_of(second: u32, used: u32) -> String {
        format!(
            "\n==============NVSMI LOG==============\n\nTimestamp                                 : Mon Mar 11 10:00:0{second} 2024\n\
             Driver Version                            : 550.54.14\n\nAttached GPUs                             : 1\n\
             GPU 00000000:19:00.0\n    Product Name                          : NVIDIA H100\n    MIG Mode\n        Current                           : Enabled\n\
             MIG Device\n        Index                             : 0\n        FB Memory Usage\n            Total                         : 9728 MiB\n\
             Used                              : 13 MiB\n        BAR1 Memory Usage\n            Total                         : 16383 MiB\n\
             GPU UUID                              : GPU-ab\n    FB Memory Usage\n        Total                             : 81559 MiB\n\
             Reserved                          : 551 MiB\n        Used                              : {used} MiB\n        Free                              : 81004 MiB\n\
             BAR1 Memory Usage\n        Total                             : 131072 MiB\n        Used                              : 1 MiB\n"
        )
    }

    fn xml_of(second: u32, used: u32) -> String {
        format!(
            "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n<nvidia_smi_log>\n\
             \t<timestamp>Mon Mar 11 10:00:0{second} 2024</timestamp>\n\t<gpu id=\"00000000:19:00.0\">\n\t\t<product_name>NVIDIA H100</product_name>\n\
             \t\t<mig_devices>\n\t\t\t<mig_device>\n\t\t\t\t<fb_memory_usage>\n\t\t\t\t\t<used>13 MiB</used>\n\t\t\t\t</fb_memory_usage>\n\t\t\t</mig_device>\n\t\t</mig_devices>\n\
             \t\t<uuid>GPU-ab</uuid>\n\t\t<fb_memory_usage>\n\t\t\t<total>81559 MiB</total>\n\t\t\t<reserved>551 MiB</reserved>\n\
             \t\t\t<used>{used} MiB</used>\n\t\t</fb_memory_usage>\n\t\t<bar1_memory_usage>\n\t\t\t<used>1 MiB</used>\n\t\t</bar1_memory_usage>\n\t</gpu>\n</nvidia_smi_log>\n"
        )
    }

    #[test]
    fn text_and_xml_are_the_same_readings() {
        for of in [text_of, xml_of] {
            let text = of(0, 4) + &of(2, 70_000) + &of(4, 5);
            let tape = imported("smi.log", &text).expect("a log");
            let points: Vec<_> = tape.tracks[0].points().map(|(at, used)| (at - tape.begin_ns, used)).collect();
            let seconds = |second: i64| second * 1_000_000_000;
            assert_eq!(points, [(0, Some(4 * MIB)), (seconds(2), Some(70_000 * MIB)), (seconds(4), Some(5 * MIB))]);
            let gpu = &tape.devices[0];
            assert_eq!((gpu.name.as_deref(), gpu.uuid.as_str()), (Some("NVIDIA H100"), "GPU-ab"));
            assert_eq!((gpu.memory_total_bytes, gpu.memory_reserved_bytes), (Some(81_559 * MIB), Some(551 * MIB)));
            assert_eq!(tape.skipped.count, 0);
        }
    }
}
