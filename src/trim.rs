//! Gives back the pages of program files that only the start needed.
//!
//! Enters: the kernel's account of this process's memory. Leaves: fewer resident pages. To read the settings, to load
//! NVML and what it loads itself touches megabytes of code that nothing touches again; the kernel would take them back
//! only when memory is short. What is touched again is found in the page cache at the cost of a minor fault.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::ptr::NonNull;

/// What one mapping is, as far as matters here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mapping<'a> {
    begin: usize,
    end: usize,
    /// The file behind it, where it is private and not writable.
    file: Option<&'a str>,
    resident_kib: u64,
    /// Pages that are not as the file has them, relocated or changed by a debugger: those present, and those in swap.
    /// `None` where the kernel does not say.
    anonymous_kib: Option<u64>,
    swap_kib: Option<u64>,
}

/// Drops every resident page of the program and its libraries that is just as its file has it, and that nobody can
/// write to. Returns how many bytes were resident there.
///
/// # Errors
/// Where the kernel does not tell this process's mappings.
pub fn give_back_files() -> io::Result<u64> {
    let program = std::fs::read_link("/proc/self/exe")?;
    let loaded = std::fs::read_to_string("/proc/self/maps")?;
    let mut held = BTreeMap::new();
    for path in mappings(&loaded).filter_map(|mapping| mapping.file) {
        held.entry(path).or_insert_with(|| Held::new(path));
    }
    // Only now nothing that is held can go away, and another mapping come to where it was.
    let text = std::fs::read_to_string("/proc/self/smaps")?;
    let stays = |path: &str| program.as_os_str() == path || held.get(path).is_some_and(Option::is_some);
    let mut given_kib = 0;
    for mapping in mappings(&text).filter(|mapping| mapping.is_disposable() && mapping.file.is_some_and(stays)) {
        let (begin, length) = (mapping.begin as *mut libc::c_void, mapping.end - mapping.begin);
        // SAFETY: the range was, a moment ago, a private mapping of the program's file or of that of a library which
        // cannot be unloaded here. It cannot be written to, and none of its pages differs from the file: dropping them
        // changes no byte. Another private mapping of these files would have to be somebody's own, and to be gone since;
        // nothing in this process maps a program's file to read it but a backtrace, which keeps its mapping.
        let refused = unsafe { libc::madvise(begin, length, libc::MADV_DONTNEED) };
        given_kib += if refused == 0 { mapping.resident_kib } else { 0 };
    }
    Ok(given_kib << 10)
}

/// A library that stays loaded while this lives.
struct Held(NonNull<libc::c_void>);

impl Held {
    /// Holds the library at `path`; `None` where none is loaded from there.
    fn new(path: &str) -> Option<Self> {
        let path = CString::new(path).ok()?;
        // SAFETY: a C string; nothing is loaded and nothing of the library runs.
        NonNull::new(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }).map(Self)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and closed once.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

impl Mapping<'_> {
    fn is_disposable(&self) -> bool {
        self.file.is_some() && self.anonymous_kib == Some(0) && self.swap_kib == Some(0) && self.resident_kib > 0
    }
}

/// The mappings of a `maps` or an `smaps` file.
fn mappings(text: &str) -> impl Iterator<Item = Mapping<'_>> {
    let mut lines = text.lines().peekable();
    std::iter::from_fn(move || {
        let mut mapping = lines.by_ref().find_map(header)?;
        while let Some((name, value)) =
            lines.next_if(|line| header(line).is_none()).and_then(|line| line.split_once(':'))
        {
            let kib = || value.split_whitespace().next()?.parse().ok();
            match name {
                "Rss" => mapping.resident_kib = kib().unwrap_or(0),
                "Anonymous" => mapping.anonymous_kib = kib(),
                "Swap" => mapping.swap_kib = kib(),
                _ => {}
            }
        }
        Some(mapping)
    })
}

/// A mapping's first line: `BEGIN-END PERMISSIONS OFFSET DEVICE INODE PATH`.
fn header(line: &str) -> Option<Mapping<'_>> {
    // A path may hold spaces; the kernel pads what stands before it.
    let (range, rest) = line.split_once(' ')?;
    let (begin, end) = range.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let (begin, end) = (address(begin)?, address(end)?);
    let mut fields = rest.splitn(5, ' ');
    let permissions = fields.next()?.as_bytes();
    let path = fields.nth(3).unwrap_or_default().trim_start();
    let is_plain = permissions.get(1) == Some(&b'-') && permissions.get(3) == Some(&b'p');
    Some(Mapping { begin, end, file: (is_plain && path.starts_with('/')).then_some(path), ..Mapping::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0a0000000-55d0a0100000 r-xp 00001000 fe:00 123                        /usr/bin/highwater
Size:               1024 kB
Rss:                 640 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex mr mw me
55d0a0100000-55d0a0180000 r--p 00101000 fe:00 123 /usr/bin/high water
Rss:                 500 kB
Anonymous:           260 kB
55d0a0180000-55d0a0190000 rw-p 00181000 fe:00 123 /usr/bin/highwater
Rss:                  64 kB
Anonymous:             0 kB
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0 [vdso]
Rss:                   4 kB
Anonymous:             0 kB
7f0000000000-7f0000100000 r--s 00000000 00:01 77 /dev/shm/x
Rss:                 100 kB
Anonymous:             0 kB
";

    #[test]
    fn only_what_is_as_its_file_has_it_is_given_back() {
        let found: Vec<Mapping<'_>> = mappings(SMAPS).collect();
        let files: Vec<_> = found.iter().map(|mapping| mapping.file).collect();
        assert_eq!(files, [Some("/usr/bin/highwater"), Some("/usr/bin/high water"), None, None, None]);
        let disposable: Vec<_> = found.iter().filter(|mapping| mapping.is_disposable()).collect();
        let text = Mapping {
            begin: 0x55d0_a000_0000,
            end: 0x55d0_a010_0000,
            file: Some("/usr/bin/highwater"),
            resident_kib: 640,
            anonymous_kib: Some(0),
            swap_kib: Some(0),
        };
        assert_eq!(disposable, [&text]);
    }

    #[test]
    fn what_cannot_be_read_is_left_alone() {
        assert_eq!(mappings("no such thing\n\nRss: 1 kB\n").count(), 0);
        for changed in
            ["Anonymous: many kB\nSwap: 0 kB", "Anonymous: 0 kB", "Swap: 0 kB", "Anonymous: 0 kB\nSwap: 4 kB"]
        {
            let text = format!("1000-2000 r-xp 0 fe:00 9 /x\nRss: 4 kB\n{changed}\n");
            let odd = mappings(&text).next();
            assert!(odd.is_some_and(|mapping| !mapping.is_disposable()), "{changed}");
        }
    }

    /// This program goes on after its own code was unmapped.
    #[test]
    fn the_program_goes_on() {
        let given = give_back_files().expect("smaps");
        assert!(given > 1 << 20, "{given} bytes");
    }
}
