//! C programs that use the library as a stranger would: through the header in the repository.

#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Where the library under test is: beside this test program.
fn library_folder() -> PathBuf {
    let program = std::env::current_exe().expect("the test program has a path");
    program.parent().expect("it is in a folder").to_owned()
}

/// Compiles a program of `tests/c` with every warning an error.
fn compile(compiler: &str, language: &[&str], name: &str) -> PathBuf {
    let folder = library_folder();
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{compiler}"));
    let output = Command::new(compiler)
        .args(language)
        .args(["-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread", "-I"])
        .arg(Path::new(ROOT).join("include"))
        .arg(Path::new(ROOT).join("tests/c").join(format!("{name}.c")))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&folder)
        .arg("-lvramalloc_c")
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .output()
        .unwrap_or_else(|error| panic!("a C compiler is needed, as `{compiler}`: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// A command for a program, which is to find the library at its own path: cargo's may have an older one in it.
fn command(program: &Path, args: &[&str], conf: &str) -> Command {
    let mut command = Command::new(program);
    command.args(args).env_remove("LD_LIBRARY_PATH").env_remove("VRAMALLOC_LOG").env("VRAMALLOC_CONF", conf);
    command
}

fn run(program: &Path, args: &[&str], conf: &str) -> Output {
    let mut command = command(program, args, conf);
    let output = command.output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {text}", program.display());
    output
}

#[test]
fn every_function_answers_as_the_header_says() {
    let program = compile("cc", &["-std=c11"], "api");
    let snapshot = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("snapshot.json");
    let output = run(&program, &["sim", &snapshot.to_string_lossy()], "");
    assert!(String::from_utf8_lossy(&output.stdout).contains("all of the interface works"));

    let snapshot: serde_json::Value = serde_json::from_slice(&std::fs::read(snapshot).unwrap()).unwrap();
    let segments = snapshot["segments"].as_array().unwrap();
    assert_eq!(segments.len(), 2);
    for segment in segments {
        let blocks = segment["blocks"].as_array().unwrap();
        let bytes: u64 = blocks.iter().map(|block| block["size"].as_u64().unwrap()).sum();
        assert_eq!(Some(bytes), segment["total_size"].as_u64());
        let live = blocks.iter().filter(|block| block["state"] == "active_allocated");
        assert_eq!(live.count(), 1);
    }
}

#[test]
fn nothing_is_left_after_threads_have_passed_blocks_on() {
    let program = compile("cc", &["-std=c11"], "soak");
    let events = std::env::var("VRAMALLOC_SOAK_EVENTS").unwrap_or_else(|_| "100000".to_owned());
    for conf in ["segments:fixed", "segments:expandable"] {
        let output = run(&program, &["sim:8GiB", &events], conf);
        print!("{conf}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn the_log_says_what_happens() {
    let program = compile("cc", &["-std=c11"], "soak");
    let mut command = command(&program, &["sim", "800"], "limit:64MiB");
    let silent = command.output().unwrap();
    assert!(silent.status.success() && silent.stderr.is_empty());
    let told = command.env("VRAMALLOC_LOG", "trace").output().unwrap();
    let text = String::from_utf8_lossy(&told.stderr);
    for said in ["sim: simulated device opened, fixed segments", "out of memory on device 0", "alloc ", "free "] {
        assert!(text.contains(said), "'{said}' is missing in:\n{text}");
    }
}
