//! Small files that expand to large ones are refused with a clear error, at a small cost in memory.

use flate2::{Compression, write::GzEncoder};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

/// Limit of the program's address space. Resident memory is a part of it.
const MOST_KIB: u64 = 96 << 10;

/// Asserts that `serve --check-config` with these arguments prints this error within the limit.
fn check(arguments: &[&str], expected: &str) {
    let mut limited = Command::new("sh");
    let exec = format!("ulimit -v {MOST_KIB}; exec \"$0\" serve --check-config \"$@\"");
    limited.env_clear().args(["-c", &exec, env!("CARGO_BIN_EXE_highwater")]).args(arguments);
    let output = limited.output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(printed.contains(expected), "{printed}");
    assert_eq!(output.status.code(), Some(2), "{printed}");
}

fn written(folder: &Path, name: &str, content: &[u8]) -> String {
    let path = folder.join(name);
    std::fs::write(&path, content).expect("written");
    path.display().to_string()
}

#[test]
fn a_packed_recording_of_a_few_megabytes_that_becomes_gigabytes() {
    let pack = |text: &[u8]| {
        let mut packer = GzEncoder::new(Vec::new(), Compression::default());
        packer.write_all(text).expect("packed");
        packer.finish().expect("packed")
    };
    // Concatenated gzip files are a gzip file too.
    for (text, expected) in [
        (vec![0; 16 << 20], "line 1 is longer than 1048576 bytes"),
        (b"# nothing\n".repeat(1 << 21), "it decompresses to more than"),
    ] {
        let packed = pack(&text).repeat(96);
        assert!(text.len() * 96 >= 3 << 29 && packed.len() < 8 << 20, "{} bytes", packed.len());
        let folder = tempfile::tempdir().expect("a folder");
        let file = written(folder.path(), "nvml_1khz.csv.gz", &packed);
        let source = format!("replay:{}", folder.path().display());
        check(&["--source", &source], &format!("{file}: {expected}"));
    }
}

#[test]
fn yaml_whose_aliases_stand_for_a_billion_words() {
    let mut text = String::from("a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]\n");
    for level in 1..10 {
        let below = format!("*a{}", level - 1);
        text += &format!("a{level}: &a{level} [{}]\n", vec![below; 10].join(", "));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = written(folder.path(), "bomb.yaml", text.as_bytes());
    check(&["--config", &file], &format!("{file}:2: aliases (`*name`) are not supported"));
    let file = written(folder.path(), "deep.yaml", "- ".repeat(500_000).as_bytes());
    check(&["--config", &file], &format!("{file}:1: is nested more than 16 times"));
}

#[test]
fn settings_and_scenarios_of_any_length() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["long.yaml", "long.toml"] {
        let file = written(folder.path(), name, b"# ");
        let long = std::fs::File::options().write(true).open(&file).expect("ours");
        long.set_len(4 << 30).expect("a sparse file takes no space");
        check(&["--config", &file], &format!("{file}: cannot be read: it is longer than 1048576 bytes"));
        let source = format!("sim:{file}");
        check(&["--source", &source], "it is longer than 1048576 bytes");
    }
    check(&["--config", "/dev/zero"], "/dev/zero: cannot be read: it is longer than 1048576 bytes");
}
