//! C programs that use the library as a stranger would: through the header in the repository.

#![cfg(unix)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Where the library under test is: beside this test program.
fn library_folder() -> PathBuf {
    let program = std::env::current_exe().expect("the test program has a path");
    program.parent().expect("it is in a folder").to_owned()
}

/// Compiles a program of `tests/c` with every warning an error; once, as several tests may want it at the same time.
fn compile(compiler: &str, language: &[&str], name: &str) -> PathBuf {
    static COMPILED: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = compiled.get(name) {
        return program.clone();
    }
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
    compiled.insert(name.to_owned(), program.clone());
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
    let traced = snapshot["device_traces"][0].as_array().unwrap();
    let allocations = traced.iter().filter(|entry| entry["action"] == "alloc");
    let requested: Vec<_> = allocations.map(|entry| entry["size"].as_u64().unwrap()).collect();
    assert_eq!(requested, [30 << 20, 1000], "the history is in the snapshot");
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
fn a_forked_child_gets_errors_and_never_hangs() {
    let program = compile("cc", &["-std=c11"], "fork");
    let mut command = command(&program, &["sim", "40"], "segments:expandable");
    let output = command.env("VRAMALLOC_DEVICE", "sim").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("40 forks: every function is refused"), "{text}");
    assert!(text.contains("THE TENSOR HAS NO MEMORY"), "a null that is not checked is told of there, too: {text}");
}

/// So that a new function is tried in a forked child, too.
#[test]
fn the_program_that_forks_calls_every_function() {
    let header = std::fs::read_to_string(Path::new(ROOT).join("include/vramalloc.h")).unwrap();
    let program = std::fs::read_to_string(Path::new(ROOT).join("tests/c/fork.c")).unwrap();
    let (_, child) = program.split_once("everything_is_refused(void)").unwrap();
    let (child, _) = child.split_once("static void child").unwrap();
    let mut count = 0;
    for line in header.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for (at, _) in line.match_indices("vram_") {
            let name = line[at..].split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap();
            if line[at + name.len()..].starts_with('(') {
                count += 1;
                let called = name == "vram_last_error" || child.contains(&format!("{name}("));
                assert!(called, "{name} is not called in the child");
            }
        }
    }
    assert!(count > 30, "{count} functions in the header");
}

#[test]
fn what_is_left_is_told_to_those_who_ask() {
    let program = compile("cc", &["-std=c11"], "leak");
    let ends = |how: &str, level: Option<&str>| {
        let mut command = command(&program, &[how], "segments:expandable");
        command.env("VRAMALLOC_DEVICE", "sim");
        command.envs(level.map(|level| ("VRAMALLOC_LOG", level)));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{how}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for how in ["destroy", "exit", "torch", "nothing"] {
        assert_eq!(ends(how, None), "", "{how}: nobody asked");
    }
    let destroyed = ends("destroy", Some("warn"));
    assert!(
        destroyed.contains("destroyed while memory of it is in use") && destroyed.contains("3000 bytes"),
        "{destroyed}"
    );
    let left = ends("exit", Some("warn"));
    assert!(left.contains("still in use as the process ends") && left.contains("3000 bytes"), "{left}");
    assert_eq!(ends("torch", Some("warn")), "", "Python's end frees nothing, which is no news");
    assert!(ends("torch", Some("info")).contains("3000 bytes"));
    assert_eq!(ends("nothing", Some("warn")), "");
    // Threads that go on while the process ends around them do not stop it.
    for _ in 0..5 {
        ends("threads", None);
        assert!(ends("threads", Some("warn")).contains("still in use as the process ends"));
    }
}

#[test]
fn an_unloaded_library_is_not_called() {
    let program = compile("cc", &["-std=gnu11"], "unload");
    let library = library_folder().join("libvramalloc_c.so");
    for level in ["off", "warn"] {
        let mut command = command(&program, &[&library.to_string_lossy()], "");
        let output = command.env("VRAMALLOC_LOG", level).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("unloaded"), "{:?}: {text}", output.status);
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
