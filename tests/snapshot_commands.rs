//! The commands around memory snapshots, as a user runs them.
#![cfg(feature = "cli")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use vramalloc::pytorch::{Frame, Snapshot, Stack};

const MIB: u64 = 1 << 20;

fn vramalloc(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramalloc"));
    command.env_remove("VRAMALLOC_CONF").args(args);
    command.output().expect("the program runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

fn file(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

/// A folder of the test's own.
fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn json(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn pytorchs_snapshots_replay() {
    for name in ["mlp", "mlp_expandable"] {
        let output = vramalloc(&[
            "replay",
            "--device",
            "sim",
            "--format",
            "json",
            &file(&format!("tests/data/snapshots/{name}.pickle.gz")),
        ]);
        let line = &json(&output)[0];
        assert_eq!(line["trace"], name);
        assert_eq!(line["peak_requested"], 574_795_300, "requested_bytes.all.peak of its memory_stats");
        // The native allocator's rules are ours with fixed segments.
        assert_eq!((&line["peak_allocated"], &line["peak_reserved"]), (&576_369_152.into(), &673_185_792.into()));
    }
}

#[test]
fn fit_finds_the_smallest_memory() {
    let snapshot = file("tests/data/snapshots/mlp.pickle.gz");
    let trace = file("benches/traces/serving_streams.csv.gz");
    for (name, path) in [("mlp", &snapshot), ("serving_streams", &trace)] {
        let answer = &json(&vramalloc(&["fit", "--format", "json", path]))[0];
        assert_eq!(answer["run"], name);
        assert_eq!(answer["recorded_peak_reserved"].is_null(), name == "serving_streams");
        let live = answer["peak_requested"].as_u64().unwrap();
        for need in answer["needs"].as_array().unwrap() {
            let (kind, smallest) = (need["segments"].as_str().unwrap(), need["smallest"].as_u64().unwrap());
            assert!(smallest >= live && need["peak_reserved"].as_u64().unwrap() <= smallest);
            // It is: with one step less the run ends.
            for (bytes, fits) in [(smallest, true), (smallest - 2 * MIB, false)] {
                let output = vramalloc(&["fit", "--format", "json", "--capacity", &bytes.to_string(), path]);
                let line: Value = serde_json::from_str(text(&output.stdout).lines().next().unwrap()).unwrap();
                let of_kind =
                    line["needs"].as_array().unwrap().iter().find(|need| need["segments"] == kind).unwrap();
                assert_eq!(of_kind["fits"], fits, "{name}, {kind}: {bytes}");
            }
        }
    }
}

#[test]
fn fit_answers_a_question() {
    let snapshot = file("tests/data/snapshots/mlp.pickle.gz");
    let output = vramalloc(&["fit", "--capacity", "24GiB", &snapshot]);
    assert_eq!(output.status.code(), Some(0));
    for part in
        ["mlp", "in 24.00 GiB", "live at the peak", "reserved when it was recorded", "yes, reserving 642.00 MiB"]
    {
        assert!(text(&output.stdout).contains(part), "{part}: {}", text(&output.stdout));
    }
    let output = vramalloc(&["fit", "--capacity", "590MiB", &snapshot]);
    assert_eq!(output.status.code(), Some(0), "under one kind it fits");
    assert!(text(&output.stdout).contains("no: ") && text(&output.stdout).contains("yes, reserving"));
    let output = vramalloc(&["fit", "--capacity", "500MiB", &snapshot]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("no: "), "the answer is printed all the same");
    assert_eq!(text(&output.stderr), "vramalloc: mlp does not fit in 500.00 MiB\n");
}

#[test]
fn a_replay_leaves_a_snapshot_and_statistics() {
    let folder = folder("a_replay_leaves_a_snapshot_and_statistics");
    let path = |name: &str| folder.join(name).display().to_string();
    let trace = file("benches/traces/gnn.csv.gz");
    for segments in ["fixed", "expandable"] {
        for kind in ["pickle", "json"] {
            let (to, stats) = (path(&format!("gnn.{segments}.{kind}")), path("stats.json"));
            let output = vramalloc(&[
                "replay",
                "--device",
                "sim",
                "--segments",
                segments,
                "--snapshot",
                &to,
                "--stats",
                &stats,
                &trace,
            ]);
            assert!(output.status.success(), "{}", text(&output.stderr));
            let snapshot = Snapshot::read(&to).unwrap();
            let stats: Value = serde_json::from_str(&std::fs::read_to_string(stats).unwrap()).unwrap();
            let sum: u64 = snapshot.segments.iter().map(|segment| segment.total_size).sum();
            assert_eq!(stats["reserved_bytes.all.current"], sum);
            let peak = snapshot.peak_usage(0);
            assert_eq!(stats["reserved_bytes.all.peak"], peak.reserved, "{segments}");
            assert_eq!(stats["allocated_bytes.all.peak"], peak.allocated, "{segments}");
            // Replayed, it is the run that it was made from.
            let again = snapshot.to_trace(0, "gnn").unwrap();
            let first = vramalloc::trace::Trace::read(&trace).unwrap();
            assert_eq!((again.events, again.peak_requested), (first.events, first.peak_requested));
        }
    }
    // Where memory ran out, it is as it was then.
    let to = path("oom.pickle");
    let output = vramalloc(&["replay", "--device", "sim", "--capacity", "6GiB", "--snapshot", &to, &trace]);
    assert_eq!(output.status.code(), Some(1));
    let snapshot = Snapshot::read(&to).unwrap();
    assert_eq!(snapshot.device_traces[0].last().unwrap().action.name(), "oom");
}

#[test]
fn snapshots_are_converted() {
    let folder = folder("snapshots_are_converted");
    let path = |name: &str| folder.join(name).display().to_string();
    let snapshot = file("tests/data/snapshots/mlp.pickle.gz");
    let original = Snapshot::read(&snapshot).unwrap();
    for (to, name) in [("json", "mlp.json"), ("pickle", "mlp.pickle")] {
        let output = vramalloc(&["convert", "--to", to, "-o", &path(name), &snapshot]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(Snapshot::read(path(name)).unwrap(), original);
    }
    let output = vramalloc(&["convert", "--to", "chrome", "-o", &path("trace.json"), &path("mlp.json")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(path("trace.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 400);
}

/// A pickle has each stack once, JSON each time: a small file could fill a disk.
#[test]
fn shared_stacks_do_not_grow_without_bound() {
    let folder = folder("shared_stacks_do_not_grow_without_bound");
    let path = |name: &str| folder.join(name).display().to_string();
    let mut snapshot = Snapshot::read(file("tests/data/snapshots/mlp.pickle.gz")).unwrap();
    let frame = |line| Frame { filename: "model.py".into(), line, name: "forward".into() };
    let mut entry = snapshot.device_traces[0][0].clone();
    entry.frames = Stack::new((0..2000).map(frame).collect());
    snapshot.device_traces[0] = vec![entry; 20_000];
    snapshot.save(path("shared.pickle")).unwrap();
    assert!(std::fs::metadata(path("shared.pickle")).unwrap().len() < 2 << 20);
    std::fs::write(path("kept.json"), "{}").unwrap();
    let output = vramalloc(&["convert", "--to", "json", "-o", &path("kept.json"), &path("shared.pickle")]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("write a pickle"), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_to_string(path("kept.json")).unwrap(), "{}", "nothing is lost");
    assert_eq!(snapshot.save(path("kept.json")).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(std::fs::read_to_string(path("kept.json")).unwrap(), "{}", "nor by the library");
    let mut to = Vec::new();
    assert!(snapshot.write_json(&mut to).is_err() && to.is_empty());
    // What fits is written, and takes at least what the bound counts.
    snapshot.device_traces[0].truncate(10);
    snapshot.write_json(&mut to).unwrap();
    assert!(to.len() > 10 * 2000 * ("model.py".len() + "forward".len() + 30), "{}", to.len());
}

#[test]
fn what_is_wrong_is_said() {
    let folder = folder("what_is_wrong_is_said");
    let path = |name: &str| folder.join(name).display().to_string();
    let whole = std::fs::read(file("tests/data/snapshots/mlp.pickle.gz")).unwrap();
    std::fs::write(path("cut.pickle.gz"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(path("code.pickle"), b"\x80\x02cos\nsystem\n(S'id'\ntR.").unwrap();
    std::fs::write(path("empty.json"), br#"{"segments":[],"device_traces":[[]]}"#).unwrap();
    let trace = file("benches/traces/gnn.csv.gz");
    for (args, status, part) in [
        (vec!["replay", "--device", "sim", &path("cut.pickle.gz")], 2, "cut.pickle.gz: cannot be read"),
        (vec!["fit", &path("code.pickle")], 2, "names or calls a Python object"),
        (vec!["fit", &path("empty.json")], 2, "neither events nor live blocks; record a history"),
        (vec!["fit", &path("missing.pickle")], 2, "missing.pickle: cannot be read"),
        (vec!["fit"], 2, "<FILE>"),
        (vec!["fit", "--capacity", "much", &trace], 2, "24GiB"),
        (vec!["replay", "--snapshot", &path("s.pickle"), &trace, &trace], 2, "one trace at a time"),
        (vec!["replay", "--device", "sim", "--snapshot", "/nowhere/s.pickle", &trace], 1, "/nowhere/s.pickle: "),
        (vec!["convert", &trace, "-o", &path("out.json"), "--to", "json"], 2, "not a pickle"),
        (
            vec!["convert", &path("empty.json"), "-o", "/nowhere/out.json", "--to", "json"],
            1,
            "/nowhere/out.json: ",
        ),
    ] {
        let output = vramalloc(&args);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(part), "{args:?}: {part} is not in: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{args:?}: {}", text(&output.stdout));
    }
}

#[test]
fn view_writes_a_page() {
    let folder = folder("view_writes_a_page");
    let page = folder.join("page.html").display().to_string();
    let snapshot = file("tests/data/snapshots/mlp.pickle.gz");
    let trace = file("benches/traces/gnn.csv.gz");
    let view = |args: &[&str]| {
        let _ = std::fs::remove_file(&page);
        let output = vramalloc(&[&["view", "-o", &page], args].concat());
        (output.status.code(), text(&output.stderr).to_owned(), std::fs::read_to_string(&page).ok())
    };
    for args in [&[snapshot.as_str()][..], &[&trace, "--segments", "expandable"]] {
        let (code, said, page) = view(args);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{args:?}");
        let page = page.unwrap();
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"), "{args:?}");
    }
    // A run that fails is shown up to there, and the failure told.
    let (code, said, shown) = view(&[&trace, "--capacity", "2GiB"]);
    assert!(code == Some(0) && shown.is_some());
    assert!(said.starts_with("vramalloc: gnn: out of memory") && said.ends_with("up to there.\n"), "{said}");

    let (code, said, shown) = view(&[&snapshot, "--segments", "fixed"]);
    assert!(code == Some(2) && shown.is_none());
    assert!(said.contains("are for traces") && said.contains("vramalloc replay --snapshot"), "{said}");
    let (code, said, shown) = view(&[&file("README.md")]);
    assert!(code == Some(2) && shown.is_none() && said.contains("README.md"), "{said}");
    let output = vramalloc(&["view", &snapshot, "-o", &folder.display().to_string()]);
    assert_eq!(output.status.code(), Some(1), "a folder is no file");
}
