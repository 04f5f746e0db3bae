//! Returns resident pages of the program's own code to the kernel, which the start and rare work needed and nobody needs now.
//!
//! Of eleven MiB of code, sampling, marks and scrapes run less than two. The kernel maps what was once run until memory is
//! short, and counts it as resident. A page that is unmapped here stays in the page cache; running it again costs a minor page
//! fault, for sixteen pages at a time.

use std::time::{Duration, Instant};

/// How often the pages are returned, from the start on. Mapping again what is in use costs some 0.1 ms of processor time.
const PERIOD: Duration = Duration::from_secs(5);

/// Returns pages when it is due.
#[derive(Debug)]
pub(crate) struct CodePages {
    next: Instant,
}

impl Default for CodePages {
    fn default() -> Self {
        Self { next: Instant::now() + PERIOD / 5 }
    }
}

impl CodePages {
    /// Returns pages if it is due.
    pub(crate) fn look(&mut self) {
        if Instant::now() >= self.next {
            give_back();
            self.next = Instant::now() + PERIOD;
        }
    }
}

/// Unmaps all pages of the program's code. Where the kernel does not say which these are, or some are no longer as in the file, as
/// with the breakpoints of a debugger or the probes of a tracer, it does nothing.
#[cfg(target_os = "linux")]
fn give_back() {
    for (begin, end) in mappings().into_iter().filter(|(begin, end)| are_of_file(*begin, *end)) {
        // SAFETY: the addresses are a mapping of a file that cannot be written through it, so that each page is as in the file,
        // and the kernel reads it from there when it is used again.
        unsafe {
            libc::madvise(begin as *mut libc::c_void, end - begin, libc::MADV_DONTNEED);
        }
    }
}

/// Whether all pages between two addresses that are in memory are the file's: a page that was written to is the process's own.
#[cfg(target_os = "linux")]
fn are_of_file(begin: usize, end: usize) -> bool {
    use std::os::unix::fs::FileExt as _;
    const IS_HERE: u64 = 1 << 63;
    const IS_OF_FILE: u64 = 1 << 61;
    let page = rustix::param::page_size();
    let mut entries = vec![0; (end - begin) / page * 8];
    let Ok(pages) = std::fs::File::open("/proc/self/pagemap") else { return false };
    let is_read = pages.read_exact_at(&mut entries, (begin / page * 8) as u64).is_ok();
    let own = |entry: &[u8]| {
        let entry = entry.try_into().map(u64::from_ne_bytes).unwrap_or(IS_HERE);
        entry & IS_HERE != 0 && entry & IS_OF_FILE == 0
    };
    is_read && !entries.chunks(8).any(own)
}

/// As above, where the kernel has another meaning for it.
#[cfg(not(target_os = "linux"))]
fn give_back() {}

/// Begin and end of each mapping of the program's file that is run. Relocated data are in mappings of their own.
#[cfg(target_os = "linux")]
fn mappings() -> Vec<(usize, usize)> {
    let (Ok(maps), Ok(program)) = (std::fs::read_to_string("/proc/self/maps"), std::env::current_exe()) else {
        return Vec::new();
    };
    let program = program.to_string_lossy();
    maps.lines().filter_map(|line| is_code(line, &program)).collect()
}

/// The addresses of a line of `/proc/self/maps` if it maps code of this file.
#[cfg(target_os = "linux")]
fn is_code(line: &str, program: &str) -> Option<(usize, usize)> {
    let mut words = line.splitn(6, ' ');
    let (addresses, permissions) = (words.next()?, words.next()?);
    let file = words.nth(3)?.trim_start();
    let (begin, end) = addresses.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    (permissions == "r-xp" && file == program).then_some((address(begin)?, address(end)?))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use highwater_engine::footprint::Footprint;

    #[test]
    fn code_that_was_run_is_unmapped_and_runs_again() {
        const ALONE: &str = "HIGHWATER_TEST_OF_CODE_PAGES";
        if std::env::var_os(ALONE).is_none() {
            // In a process of its own: other tests would map what is unmapped.
            let this = std::env::current_exe().expect("a program");
            let name = "code_pages::tests::code_that_was_run_is_unmapped_and_runs_again";
            let ran =
                std::process::Command::new(this).args(["--exact", name]).env(ALONE, "1").output().expect("it runs");
            let said = String::from_utf8_lossy(&ran.stdout);
            assert!(ran.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let [(begin, end)] = mappings()[..] else { panic!("one mapping is run: {:?}", mappings()) };
        let own = code_that_was_run_is_unmapped_and_runs_again as *const () as usize;
        assert!((begin..end).contains(&own), "{own:x} in {begin:x}-{end:x}");
        // SAFETY: each address is in a mapping that can be read.
        let read = || (begin..end).step_by(4096).map(|at| u64::from(unsafe { *(at as *const u8) })).sum::<u64>();
        let resident = || Footprint::now().expect("known").of_files;
        let (sum, full) = (read(), resident());
        give_back();
        let less = full - resident();
        assert!(less > (end - begin) * 3 / 4, "{less} of {}", end - begin);
        assert_eq!(read(), sum, "each page is as it was");
        let mut pages = CodePages::default();
        let full = resident();
        pages.look();
        assert!(full.abs_diff(resident()) < (end - begin) / 4, "it is not due yet");
        pages.next = Instant::now();
        pages.look();
        assert!(full - resident() > (end - begin) * 3 / 4);
        assert!(pages.next > Instant::now() + PERIOD / 2);
        // As a debugger does it.
        assert!(are_of_file(begin, end));
        use std::os::unix::fs::FileExt as _;
        let memory = std::fs::File::options().read(true).write(true).open("/proc/self/mem").expect("own memory");
        let mut byte = [0];
        memory.read_exact_at(&mut byte, end as u64 - 8).expect("mapped");
        memory.write_all_at(&byte, end as u64 - 8).expect("the kernel lets a debugger write");
        let full = resident();
        give_back();
        assert!(!are_of_file(begin, end), "a page is the process's own");
        assert!(resident() > full - (end - begin) / 4, "nothing is unmapped");
    }

    #[test]
    fn only_the_programs_own_code_is_meant() {
        let line = |permissions: &str, file: &str| format!("5654-5665 {permissions} 0029f000 fe:00 5308423    {file}");
        let (own, path) = ("/opt/high water", "/opt/high water");
        assert_eq!(is_code(&line("r-xp", path), own), Some((0x5654, 0x5665)));
        for other in
            [line("r--p", path), line("rwxp", path), line("r-xs", path), line("r-xp", "/lib/libnvidia-ml.so.1")]
        {
            assert_eq!(is_code(&other, own), None, "{other}");
        }
        assert_eq!(is_code("7ffd-7ffe r-xp 00000000 00:00 0", own), None);
        assert_eq!(is_code("garbage", own), None);
    }
}
