//! Gives the program its version with the commit that it was built from, where that is known.
//!
//! Needs no CUDA toolkit: the driver's library is looked for when a program runs.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
    };
    // Only of this crate's own checkout: a packaged crate may be unpacked inside somebody else's.
    let own = git(&["ls-files", "build.rs"]).is_some_and(|file| file == "build.rs");
    let commit = own.then(|| git(&["rev-parse", "--short=12", "HEAD"])).flatten();
    if let (true, Some(head)) = (own, git(&["rev-parse", "--git-path", "logs/HEAD"])) {
        println!("cargo::rerun-if-changed={head}");
    }
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = commit.map_or(version.clone(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=VRAMALLOC_VERSION={version}");
}
