//! The size of this process's memory, as `/proc/self/statm` has it.

/// Memory of this process, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Virtual memory.
    pub mapped: usize,
    /// Resident memory.
    pub resident: usize,
    /// Resident pages of files, such as the program and its libraries, and of shared memory.
    pub of_files: usize,
}

impl Footprint {
    /// What it is now; `None` if the kernel does not say.
    #[must_use]
    pub fn now() -> Option<Self> {
        let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
        let mut bytes = statm.split(' ').map(|pages| Some(pages.parse::<usize>().ok()? * rustix::param::page_size()));
        let [mapped, resident, of_files] = [bytes.next()??, bytes.next()??, bytes.next()??];
        Some(Self { mapped, resident, of_files })
    }

    /// By how much it has grown since.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            mapped: self.mapped.saturating_sub(before.mapped),
            resident: self.resident.saturating_sub(before.resident),
            of_files: self.of_files.saturating_sub(before.of_files),
        }
    }
}
