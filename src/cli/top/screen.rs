//! The terminal while `top` shows a picture in it: raw mode, and keys.
//!
//! Invariant: the terminal is as it was when a [`Screen`] is dropped.

use anyhow::Context as _;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use std::io::{self, Read as _, Write as _};
use tokio::sync::mpsc;

/// The other screen of the terminal, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Keys that may wait.
const KEYS: usize = 64;

/// What was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyPress {
    Character(char),
    /// Control-C.
    Interrupt,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

/// The whole terminal, while this lives.
pub(super) struct Screen {
    /// How standard input was; `None` if it is no terminal, so that there are no keys.
    before: Option<Termios>,
    keys: mpsc::Receiver<KeyPress>,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// The terminal cannot be written, or its keys cannot be read.
    pub fn take() -> anyhow::Result<Self> {
        let before = tcgetattr(io::stdin()).ok();
        if let Some(mut raw) = before.clone() {
            // Keys come at once and are not shown. Control-C is a key too, so that the terminal is restored.
            raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
            raw.special_codes[SpecialCodeIndex::VMIN] = 1;
            raw.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(io::stdin(), OptionalActions::Now, &raw).context("cannot read single keys of the terminal")?;
        }
        let (pressed, keys) = mpsc::channel(KEYS);
        // Made before anything else can fail, so that the terminal is restored.
        let mut screen = Self { before, keys };
        if screen.before.is_some() {
            // It ends with the process, as nothing else ends a read of a terminal.
            let thread = std::thread::Builder::new().name("hw-keys".to_owned());
            thread.spawn(move || read_keys(&pressed)).context("cannot start thread hw-keys")?;
        }
        screen.write(ENTER)?;
        Ok(screen)
    }

    /// Replaces what is shown, line by line, so that nothing flickers.
    pub fn draw(&mut self, text: &str) -> anyhow::Result<()> {
        // A line is cleared before its text: after a text that fills it the cursor is still on its last character. All lines are there.
        let lines = text.trim_end_matches('\n').replace('\n', "\r\n\x1b[K");
        self.write(&format!("\x1b[H\x1b[K{lines}"))
    }

    /// The next key; never, where there are none.
    pub async fn key(&mut self) -> Option<KeyPress> {
        match self.keys.recv().await {
            Some(key) => Some(key),
            None => std::future::pending().await,
        }
    }

    fn write(&mut self, text: &str) -> anyhow::Result<()> {
        let mut stdout = io::stdout();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write to the terminal")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.write(LEAVE);
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

fn read_keys(pressed: &mpsc::Sender<KeyPress>) {
    let (mut stdin, mut bytes) = (io::stdin(), [0; 64]);
    while let Ok(count @ 1..) = stdin.read(&mut bytes) {
        for key in keys(&bytes[..count]) {
            // Keys that nobody waits for are lost.
            if matches!(pressed.try_send(key), Err(mpsc::error::TrySendError::Closed(_))) {
                return;
            }
        }
    }
}

/// The keys in what a terminal sends at once, as xterm and the Linux console send them.
fn keys(mut bytes: &[u8]) -> Vec<KeyPress> {
    let sequences: [(&[u8], KeyPress); 10] = [
        (b"\x1b[A", KeyPress::Up),
        (b"\x1bOA", KeyPress::Up),
        (b"\x1b[B", KeyPress::Down),
        (b"\x1bOB", KeyPress::Down),
        (b"\x1b[5~", KeyPress::PageUp),
        (b"\x1b[6~", KeyPress::PageDown),
        (b"\x1b[H", KeyPress::Home),
        (b"\x1b[1~", KeyPress::Home),
        (b"\x1b[F", KeyPress::End),
        (b"\x1b[4~", KeyPress::End),
    ];
    let mut found = Vec::new();
    while let Some((first, rest)) = bytes.split_first() {
        let sequence = sequences.iter().find_map(|(start, key)| Some((*key, bytes.strip_prefix(*start)?)));
        bytes = match (sequence, first) {
            (Some((key, rest)), _) => {
                found.push(key);
                rest
            }
            // Of an unknown sequence nothing is a key. Escape alone ends, as in other tops.
            (None, 0x1b) if rest.is_empty() => {
                found.push(KeyPress::Character('q'));
                rest
            }
            (None, 0x1b) => return found,
            (None, 3) => {
                found.push(KeyPress::Interrupt);
                rest
            }
            (None, byte) => {
                found.extend(
                    Some(char::from(*byte)).filter(|one| one.is_ascii() && !one.is_control()).map(KeyPress::Character),
                );
                rest
            }
        };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_alone_in_rows_and_as_sequences() {
        assert_eq!(keys(b"qs"), [KeyPress::Character('q'), KeyPress::Character('s')]);
        assert_eq!(
            keys(b"\x1b[A\x1bOB\x1b[5~\x1b[6~"),
            [KeyPress::Up, KeyPress::Down, KeyPress::PageUp, KeyPress::PageDown]
        );
        assert_eq!(keys(b"\x1b[H\x1b[4~\x03"), [KeyPress::Home, KeyPress::End, KeyPress::Interrupt]);
        assert_eq!(keys(b"\x1b"), [KeyPress::Character('q')]);
        // F5, and what is no character.
        assert!(keys(b"\x1b[15~").is_empty() && keys(b"\xc3\xa4\n").is_empty());
    }
}
