//! The header in the repository is the one that the sources make.

use std::process::Command;

#[test]
fn the_header_is_in_step_with_the_sources() {
    let made = std::fs::read_to_string(concat!(env!("OUT_DIR"), "/vramalloc.h")).expect("the build makes it");
    let kept = include_str!("../include/vramalloc.h");
    assert!(
        made == kept,
        "capi/include/vramalloc.h is not what the sources say: cp {}/vramalloc.h capi/include/",
        env!("OUT_DIR")
    );
}

#[test]
fn cpp_takes_it_too() {
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include/vramalloc.h");
    let compiler =
        ["c++", "g++", "clang++"].into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    let Some(compiler) = compiler else {
        eprintln!("SKIPPED: no C++ compiler here");
        return;
    };
    let output = Command::new(compiler).args(["-fsyntax-only", "-Wall", "-Werror", "-x", "c++", include]).output();
    let output = output.expect("it was found a moment ago");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
