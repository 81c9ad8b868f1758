//! Snapshot files: PyTorch's are read, ours come back as they were, and both replay.

use crate::history::setup;
use crate::viewer;
use std::path::{Path, PathBuf};
use vramalloc::pytorch::{Action, Snapshot, Value};
use vramalloc::trace::Event;
use vramalloc::{BlockState, HistoryOptions, Segments};

const MIB: u64 = 1 << 20;

fn sample(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots").join(name)
}

fn stats() -> std::collections::BTreeMap<String, u64> {
    let stats: std::collections::BTreeMap<String, i64> =
        serde_json::from_str(include_str!("../data/mlp.stats.json")).unwrap();
    stats.into_iter().map(|(key, value)| (key, u64::try_from(value).unwrap_or(0))).collect()
}

#[test]
fn pytorchs_snapshots_are_read() {
    for (name, expandable, segments, entries) in
        [("mlp.pickle.gz", false, 20, 424), ("mlp_expandable.pickle.gz", true, 3, 425)]
    {
        let snapshot = Snapshot::read(sample(name)).unwrap();
        viewer::check_pytorchs(&snapshot);
        assert_eq!((snapshot.segments.len(), snapshot.device_traces[0].len()), (segments, entries), "{name}");
        assert!(snapshot.segments.iter().all(|segment| segment.is_expandable == expandable));
        let setting = snapshot.allocator_settings.iter().find(|(key, _)| key == "expandable_segments").unwrap();
        assert_eq!(setting.1, Value::Bool(expandable));
        assert_eq!(snapshot.external_annotations.len(), 16);
        let first = &snapshot.device_traces[0][0];
        let functions: Vec<&str> = first.frames.frames().iter().map(|frame| &*frame.name).collect();
        assert_eq!(functions, ["convert", "_apply", "_apply", "to", "mlp", "<lambda>", "<module>"]);
        assert_eq!((&*first.frames.frames()[4].filename, first.frames.frames()[4].line), ("train.py", 9));
    }
}

#[test]
fn their_figures_are_those_of_memory_stats() {
    let snapshot = Snapshot::read(sample("mlp.pickle.gz")).unwrap();
    let stats = stats();
    let sum = |of: fn(&vramalloc::pytorch::Segment) -> u64| snapshot.segments.iter().map(of).sum::<u64>();
    assert_eq!(sum(|segment| segment.total_size), stats["reserved_bytes.all.current"]);
    assert_eq!(sum(|segment| segment.allocated_size), stats["allocated_bytes.all.current"]);
    assert_eq!(sum(|segment| segment.active_size), stats["active_bytes.all.current"]);
    assert_eq!(sum(|segment| segment.requested_size), stats["requested_bytes.all.current"]);
    let peak = snapshot.peak_usage(0);
    // The file has no bytes of blocks, so what was left unsplit of them is not in these.
    for (ours, key) in [(peak.allocated, "allocated_bytes.all.peak"), (peak.active, "active_bytes.all.peak")] {
        assert!((stats["requested_bytes.all.peak"]..=stats[key]).contains(&ours), "{key}: {ours}");
    }
    assert_eq!(peak.reserved, stats["reserved_bytes.all.peak"]);
    let trace = snapshot.to_trace(0, "mlp").unwrap();
    assert_eq!(trace.peak_requested, stats["requested_bytes.all.peak"]);
    assert_eq!(trace.allocations as u64, stats["allocation.all.allocated"]);
    assert_eq!(trace.streams, [0, 1]);
}

#[test]
fn what_was_live_before_the_ring_began_is_part_of_the_trace() {
    let mut snapshot = Snapshot::read(sample("mlp.pickle.gz")).unwrap();
    let whole = snapshot.to_trace(0, "mlp").unwrap();
    for cut in [1, 100, 250, 400, 424] {
        snapshot.device_traces[0] =
            Snapshot::read(sample("mlp.pickle.gz")).unwrap().device_traces[0][cut..].to_vec();
        let trace = snapshot.to_trace(0, "mlp").unwrap();
        let live = |trace: &vramalloc::trace::Trace| {
            let mut live: Vec<Option<u64>> = Vec::new();
            for event in &trace.events {
                match *event {
                    Event::Alloc { bytes, .. } => live.push(Some(bytes)),
                    Event::Free { id } => live[id as usize] = None,
                }
            }
            let mut live: Vec<u64> = live.into_iter().flatten().collect();
            live.sort_unstable();
            live
        };
        assert_eq!(live(&trace), live(&whole), "the same is live at the end, cut at {cut}");
        assert!(trace.peak_requested <= whole.peak_requested);
    }
}

#[test]
fn what_is_written_is_read_again() {
    let (_, allocator, [stream, other]) = setup(256 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let mut live = Vec::new();
    for round in 0..3000u64 {
        let _scope = allocator.scope(if round % 2 == 0 { "even \"quoted\" \\ \n ü" } else { "odd" });
        let stream = if round % 3 == 0 { &other } else { &stream };
        live.push(allocator.alloc(1 + round % 600, stream).unwrap());
        if round % 4 == 0 {
            let freed = live.swap_remove(live.len() / 2);
            freed.record_stream(if round % 3 == 0 { stream } else { &other }).unwrap();
        }
    }
    let snapshot = allocator.pytorch_snapshot();
    assert!(snapshot.segments.iter().any(|segment| segment.blocks.len() > 1000), "more than one batch of a list");
    let (mut pickle, mut json) = (Vec::new(), Vec::new());
    snapshot.write_pickle(&mut pickle).unwrap();
    snapshot.write_json(&mut json).unwrap();
    for bytes in [&pickle, &json] {
        assert_eq!(Snapshot::parse(Path::new("memory"), bytes).unwrap(), snapshot);
    }
    // And PyTorch's own, stacks and all.
    let theirs = Snapshot::read(sample("mlp.pickle.gz")).unwrap();
    let (mut pickle, mut json) = (Vec::new(), Vec::new());
    theirs.write_pickle(&mut pickle).unwrap();
    theirs.write_json(&mut json).unwrap();
    assert!(pickle.len() < 150_000, "stacks are written once: {}", pickle.len());
    for bytes in [&pickle, &json] {
        assert_eq!(Snapshot::parse(Path::new("memory"), bytes).unwrap(), theirs);
    }
}

#[test]
fn a_replayed_snapshot_is_the_run() {
    // A run of ours, recorded; its file replayed; the replay recorded: the same requests in the same order.
    let (_, allocator, [stream, other]) = setup(256 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let a = allocator.alloc(30 * MIB, &stream).unwrap();
    let b = allocator.alloc(700, &other).unwrap();
    drop(a);
    let _c = allocator.alloc(20 * MIB, &stream).unwrap();
    let trace = allocator.pytorch_snapshot().to_trace(0, "run").unwrap();
    let expected = [
        Event::Alloc { bytes: 30 * MIB, stream: 0 },
        Event::Alloc { bytes: 700, stream: 1 },
        Event::Free { id: 0 },
        Event::Alloc { bytes: 20 * MIB, stream: 0 },
    ];
    assert_eq!((trace.events.as_slice(), trace.streams.as_slice()), (&expected[..], &[0, 1][..]));
    drop(b);
}

#[test]
fn usage_over_time_starts_with_what_was_there() {
    let (_, allocator, [stream, _]) = setup(256 * MIB, Segments::Fixed);
    let early = allocator.alloc(30 * MIB, &stream).unwrap();
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let late = allocator.alloc(24 * MIB, &stream).unwrap();
    drop(early);
    allocator.empty_cache().unwrap();
    let snapshot = allocator.pytorch_snapshot();
    let over_time = snapshot.usage_over_time(0);
    let first = over_time.usage();
    assert_eq!((first.allocated, first.active, first.reserved), (30 * MIB, 30 * MIB, 30 * MIB));
    let after: Vec<(Action, u64, u64)> = over_time
        .map(|(entry, usage)| (entry.action.clone(), usage.allocated >> 20, usage.reserved >> 20))
        .collect();
    let expected = [
        (Action::SegmentAlloc, 30, 54),
        (Action::Alloc, 54, 54),
        (Action::FreeRequested, 24, 54),
        (Action::FreeCompleted, 24, 54),
        (Action::SegmentFree, 24, 24),
    ];
    assert_eq!(after, expected);
    assert_eq!(snapshot.peak_usage(0).allocated, 54 * MIB);
    drop(late);
}

#[test]
fn errors_name_the_place_and_the_remedy() {
    let parse = |text: &str| Snapshot::parse(Path::new("dir/run.json"), text.as_bytes()).unwrap_err().to_string();
    let segment = |block: &str| {
        format!(
            r#"{{"segments":[{{"device":0,"address":512,"total_size":1024,"stream":0,"segment_type":"small","blocks":[{block}]}}]}}"#
        )
    };
    for (text, expected) in [
        ("{}", "segments: expected a list, found nothing"),
        (r#"{"segments":7}"#, "segments: expected a list, found 7"),
        (r#"{"segments":[{"address":-1}]}"#, "segments[0].address: expected a number from 0 to 2^62, found -1"),
        (r#"{"segments":[{"address":1}]}"#, "segments[0].total_size: expected a number, found nothing"),
        (
            r#"{"segments":[],"device_traces":[[{"action":"alloc","size":1}]]}"#,
            "device_traces[0][0].addr: expected a number",
        ),
        (
            r#"{"segments":[],"device_traces":[[{"size":1}]]}"#,
            "device_traces[0][0].action: expected an action's name",
        ),
        (
            &segment(r#"{"size":512,"state":"inactive"}"#),
            "segments[0].blocks: expected blocks of 1024 bytes in all, found 512",
        ),
        (
            &segment(r#"{"size":4096,"state":"inactive"}"#),
            "segments[0].blocks: expected blocks of 1024 bytes in all",
        ),
        (&segment(r#"{"size":1024,"state":"gone"}"#), "segments[0].blocks[0].state: expected active_allocated"),
        (
            &segment(r#"{"size":1024,"requested_size":2000,"state":"active_allocated"}"#),
            "requested_size: expected at most the block's size, 1024, found 2000",
        ),
        (
            &segment(r#"{"size":1024,"address":7,"state":"inactive"}"#),
            "address: expected 512 (blocks follow each other), found 7",
        ),
        ("{\"segments\":", "not JSON: EOF while parsing a value at line 1 column 12"),
        ("[1", "not JSON"),
    ] {
        let error = parse(text);
        assert!(error.starts_with("dir/run.json: ") && error.contains(expected), "{text}: {error}");
    }
    let error = Snapshot::read("/nowhere/run.pickle").unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/run.pickle: cannot be read"), "{error}");
    let ok = Snapshot::parse(Path::new("s"), segment(r#"{"size":1024,"state":"active_allocated"}"#).as_bytes())
        .unwrap();
    assert_eq!((ok.segments[0].blocks[0].state, ok.segments[0].allocated_size), (BlockState::Live, 1024));
}
