//! A terminal for programs under test, and what it shows.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A terminal: the end that a person sits at, and all that came to it so far.
pub struct Terminal {
    /// The end that a person sits at.
    pub person: File,
    program: OwnedFd,
    shown: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Terminal {
    /// A terminal of a size.
    pub fn open(columns: u16, rows: u16) -> Self {
        let (mut person, mut program) = (-1, -1);
        let mut size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: both numbers and the size outlive the call; there is no name and no settings to be written.
        let done = unsafe {
            libc::openpty(&raw mut person, &raw mut program, std::ptr::null_mut(), std::ptr::null_mut(), &raw mut size)
        };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: both were just opened, and nothing else has them.
        let (person, program) = unsafe { (File::from_raw_fd(person), OwnedFd::from_raw_fd(program)) };
        let shown = Arc::new(Mutex::new(String::new()));
        let reader = {
            let (shown, mut person) = (Arc::clone(&shown), person.try_clone().expect("one more"));
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = person.read(&mut bytes) {
                    shown.lock().expect("whole").push_str(&String::from_utf8_lossy(&bytes[..count]));
                }
            })
        };
        Self { person, program, shown, reader }
    }

    /// The program's end.
    fn end(&self) -> Stdio {
        Stdio::from(self.program.try_clone().expect("one more"))
    }

    /// Gives a program this terminal as its input and its output.
    pub fn attach<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.stdin(self.end()).stdout(self.end())
    }

    /// Gives a program this terminal for its errors too.
    pub fn attach_errors<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        self.attach(command).stderr(self.end())
    }

    /// Whether it was sent something.
    pub fn has(&self, what: &str) -> Option<()> {
        self.shown.lock().expect("whole").contains(what).then_some(())
    }

    /// Closes it, and returns all that it was sent. Every program that has it must have ended.
    pub fn close(self) -> String {
        let Self { person, program, shown, reader } = self;
        drop((program, person));
        reader.join().expect("it ends with the terminal");
        let shown = shown.lock().expect("whole");
        shown.clone()
    }
}
