//! Reads the texts that the file of web settings consists of and names.

use std::fs;
use std::io::Read as _;
use std::path::Path;

/// The longest file, bytes.
const MOST_BYTES: u64 = 1 << 20;

/// The text of a settings file, which must be a regular file and not too long.
pub(super) fn read(path: &Path) -> Result<String, String> {
    let opened =
        fs::metadata(path).and_then(|file| if file.is_file() { fs::File::open(path).map(Some) } else { Ok(None) });
    let file = opened.map_err(|error| format!("cannot be read: {error}"))?.ok_or("is not a file")?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|error| format!("cannot be read: {error}"))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(format!("is longer than {MOST_BYTES} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned())
}
