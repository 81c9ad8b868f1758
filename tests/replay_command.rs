//! `vramalloc replay` as a user runs it: what it prints, and how it ends.
#![cfg(feature = "cli")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn traces() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/traces")
}

fn replay(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramalloc"));
    command.env_remove("VRAMALLOC_CONF").args(["replay", "--device", "sim"]).args(args);
    command.output().expect("the program runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// A trace in a file of its own, removed with the value.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, contents: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("vramalloc-{}-{name}", std::process::id()));
        std::fs::write(&path, contents).expect("a temporary file");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("text")
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const KEYS: [&str; 14] = [
    "device",
    "driver_calls",
    "driver_us",
    "events",
    "ns_per_event",
    "ooms",
    "passes",
    "peak_allocated",
    "peak_requested",
    "peak_reserved",
    "ratio",
    "retries",
    "segments",
    "trace",
];

fn keys(line: &serde_json::Value) -> Vec<String> {
    let mut keys: Vec<_> = line.as_object().expect("an object").keys().cloned().collect();
    keys.sort();
    keys
}

#[test]
fn json_has_an_object_a_trace_with_just_the_promised_keys() {
    let files =
        ["gnn", "serving_streams"].map(|name| traces().join(format!("{name}.csv.gz")).display().to_string());
    let output = replay(&["--format", "json", "--passes", "3", &files[0], &files[1]]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 2);
    for (line, name) in lines.iter().zip(["gnn", "serving_streams"]) {
        assert_eq!(keys(line), KEYS);
        assert_eq!(
            (&line["trace"], &line["segments"], &line["device"]),
            (&name.into(), &"fixed".into(), &"sim".into())
        );
        for list in ["driver_calls", "driver_us", "ns_per_event"] {
            assert_eq!(line[list].as_array().map(Vec::len), Some(3), "{list}");
        }
        assert!(line["driver_calls"][0].as_u64() > Some(0));
        assert_eq!((&line["driver_calls"][1], &line["driver_calls"][2]), (&0.into(), &0.into()), "{name} settles");
    }
    assert_eq!(lines[0]["events"], 10_412);
    assert_eq!(lines[0]["peak_requested"], 6_886_949_768_u64);
}

// PyTorch's own figures for the same traces, of which the second decimal is known.
#[test]
fn fixed_segments_need_no_more_than_pytorch() {
    for (name, pytorch) in [
        ("resnet50", 1.50),
        ("gpt2_amp", 1.65),
        ("gnn", 3.36),
        ("llama_generate", 1.06),
        ("unet_multires", 1.59),
        ("serving_streams", 4.63),
    ] {
        let file = traces().join(format!("{name}.csv.gz")).display().to_string();
        let output = replay(&["--format", "json", &file]);
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let ratio = line["ratio"].as_f64().expect("a number");
        assert!(ratio < pytorch + 0.005, "{name}: {ratio}");
        assert_eq!(line["driver_calls"][1], 0, "{name}: the second pass needs nothing more");
    }
}

#[test]
fn expandable_segments_tell_what_they_did_with_pages() {
    let file = traces().join("gnn.csv.gz").display().to_string();
    let output = replay(&["--format", "json", "--segments", "expandable", &file]);
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let mut expected: Vec<&str> = KEYS.to_vec();
    expected.extend(["creates", "maps", "releases", "unmaps"]);
    expected.sort_unstable();
    assert_eq!(keys(&line), expected);
    assert_eq!(line["segments"], "expandable");
    let count = |key: &str| line[key][0].as_u64().expect("a number");
    assert!(count("creates") > 0 && count("maps") >= count("creates"), "{line}");
    assert!(line["ratio"].as_f64().expect("a number") < 1.06, "{line}");
}

#[test]
fn the_table_names_what_it_shows() {
    let file = traces().join("gnn.csv.gz").display().to_string();
    let output = replay(&["--passes", "3", &file]);
    for row in [
        "gnn",
        "fixed segments on sim",
        "10412",
        "peak requested",
        "3.3572",
        "modelled",
        "pass 3",
        "least from pass 2 on",
        "retries",
    ] {
        assert!(text(&output.stdout).contains(row), "{row}: {}", text(&output.stdout));
    }
}

#[test]
fn malformed_input_is_named_and_nothing_is_printed() {
    let good = traces().join("gnn.csv.gz").display().to_string();
    let bad = Temporary::new("bad.csv", b"a,0,100,0\nf,0\nf,0\n");
    let output = replay(&["--format", "json", &good, bad.path()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty(), "half printed");
    let expected = format!("{}:3: expected the number of a live allocation, found '0'", bad.path());
    assert!(text(&output.stderr).contains(&expected), "{}", text(&output.stderr));

    let whole = std::fs::read(&good).expect("a trace");
    let cut = Temporary::new("cut.csv.gz", &whole[..whole.len() / 2]);
    let output = replay(&[cut.path()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("cut.csv.gz:"), "{}", text(&output.stderr));

    for args in [
        &["missing.csv.gz"][..],
        &["--config", "slak:1", &good],
        &["--capacity", "lots", &good],
        &["--passes", "0", &good],
        &["--device", "gpu", &good],
        &[],
    ] {
        let output = replay(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn running_out_of_capacity_gives_the_report() {
    let file = traces().join("gnn.csv.gz").display().to_string();
    let output = replay(&["--capacity", "6GiB", &file]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    for part in ["gnn: out of memory on device 0", "reserved", "What can be done:", "segments:expandable"] {
        assert!(text(&output.stderr).contains(part), "{part}: {}", text(&output.stderr));
    }
}
