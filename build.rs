//! Passes the version of the compiler to the program, for `highwater_build_info`.

use std::process::Command;

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().ok().and_then(|out| String::from_utf8(out.stdout).ok());
    let version = version.as_deref().and_then(|text| text.split(' ').nth(1)).unwrap_or("unknown").to_owned();
    println!("cargo::rustc-env=BUILT_BY_RUSTC={version}");
    println!("cargo::rerun-if-changed=build.rs");
}
