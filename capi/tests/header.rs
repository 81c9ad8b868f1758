//! The header in the repository is the one that the sources make.

use std::process::Command;

#[test]
fn the_header_is_in_step_with_the_sources() {
    let made = std::fs::read_to_string(concat!(env!("OUT_DIR"), "/vramalloc.h")).unwrap_or_else(|_| {
        let why = std::fs::read_to_string(concat!(env!("OUT_DIR"), "/vramalloc.error"));
        panic!("the build could not make the header: {}", why.unwrap_or_default())
    });
    let kept = include_str!("../include/vramalloc.h");
    assert!(
        made == kept,
        "capi/include/vramalloc.h is not what the sources say: cp {}/vramalloc.h capi/include/",
        env!("OUT_DIR")
    );
}

/// cbindgen leaves out what it does not understand.
#[test]
fn the_header_has_every_exported_function() {
    let sources = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).unwrap();
    let mut functions = Vec::new();
    for source in sources {
        let text = std::fs::read_to_string(source.unwrap().path()).unwrap();
        for (at, _) in text.match_indices("#[unsafe(no_mangle)]") {
            let (_, rest) = text[at..].split_once("extern \"C\" fn ").expect("a function");
            functions.push(rest.split('(').next().unwrap().to_owned());
        }
    }
    assert!(functions.len() > 30, "{functions:?}");
    let declared = include_str!("../include/vramalloc.h");
    for function in functions {
        assert_eq!(declared.matches(&format!("{function}(")).count(), 1, "{function} is not in the header, once");
    }
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
